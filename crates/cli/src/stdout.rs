//! Standard output whose reader may leave early, as in `doorbell info | head -1`.
#![allow(
    unsafe_code,
    reason = "std cannot restore the default action of a signal"
)]

use std::io::{ErrorKind, Write};
use std::process::ExitCode;

use anyhow::Result;

/// Exit status that shells show for a process that SIGPIPE ended: 128 + 13.
const BY_SIGPIPE: u8 = 141;

/// Prints text on standard output.
///
/// # Errors
/// Those of the write. `println!` panics instead.
pub fn print(text: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes())?;
    Ok(out.flush()?)
}

/// Whether an error is a write to a pipe whose reader has left. Errors of the library are never `std::io::Error`: the pipe is our output.
pub fn is_closed(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| {
        let by_io = cause.downcast_ref::<std::io::Error>().map(|io| io.kind());
        let by_json = || cause.downcast_ref::<serde_json::Error>()?.io_error_kind();
        by_io.or_else(by_json) == Some(ErrorKind::BrokenPipe)
    })
}

/// Ends the process as SIGPIPE ends other tools: quietly. Rust programs ignore that signal, and the threads of this one rely on it: the
/// default action returns only here, when all work is over.
pub fn end_by_sigpipe() -> ExitCode {
    // SAFETY: two calls of the C library without pointers. SIGPIPE's default action ends the process and runs no code of ours.
    unsafe {
        libc::signal(libc::SIGPIPE, libc::SIG_DFL);
        libc::raise(libc::SIGPIPE);
    }
    // The signal is blocked.
    ExitCode::from(BY_SIGPIPE)
}
