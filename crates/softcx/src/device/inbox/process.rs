//! Queries to the kernel: this host, its processes, and random numbers.
#![allow(unsafe_code)] // one system call

use std::io;
use std::path::Path;
use std::sync::OnceLock;

use crate::{Error, Result, StateKind};

pub(crate) fn last_error(operation: &'static str) -> Error {
    system_error(operation)(io::Error::last_os_error())
}

/// Makes the kernel's refusal of an operation an error of this crate.
pub(crate) fn system_error(operation: &'static str) -> impl Fn(io::Error) -> Error {
    move |error| Error::System {
        operation,
        errno: error.raw_os_error().unwrap_or(0),
    }
}

/// The kernel's refusal of a file or a folder. If there is no room for it, the error names it and its size.
pub(crate) fn file_error(
    operation: &'static str,
    path: &Path,
    len_bytes: usize,
    error: &io::Error,
) -> Error {
    let errno = error.raw_os_error().unwrap_or(0);
    if !matches!(errno, libc::ENOSPC | libc::EDQUOT | libc::ENOMEM) {
        return Error::System { operation, errno };
    }
    let reason = format!(
        "no room for {len_bytes} bytes in {}: {error}",
        path.display()
    );
    Error::state(StateKind::Exhausted, operation, reason)
}

/// A number for this boot of this host. Read once: later there may be no descriptor for it.
///
/// # Errors
/// [`Error::System`] if the kernel does not say.
pub(crate) fn host() -> Result<u64> {
    static HOST: OnceLock<u64> = OnceLock::new();
    if let Some(host) = HOST.get() {
        return Ok(*host);
    }
    let id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").map_err(|error| {
        let errno = error.raw_os_error().unwrap_or(libc::EIO);
        Error::System {
            operation: "read of the boot id",
            errno,
        }
    })?;
    // FNV-1a, only to make 64 bits of a text.
    let hash = id.trim().bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    Ok(*HOST.get_or_init(|| hash))
}

/// When a process that runs started, which marks what it owns as its own.
///
/// # Errors
/// [`Error::System`] if the kernel does not say.
pub(crate) fn start_of(pid: u32) -> Result<u64> {
    let found = started(pid).and_then(|at| at.ok_or(io::Error::from_raw_os_error(libc::ESRCH)));
    found.map_err(|error| Error::System {
        operation: "read of the start of a process",
        errno: error.raw_os_error().unwrap_or(libc::EIO),
    })
}

/// The start time of a process, in clock ticks since boot; `None` if no process with this number runs.
///
/// # Errors
/// The error of reading `/proc`, for example if there are no free descriptors, or if `/proc` hides the processes of other users.
pub(crate) fn started(pid: u32) -> io::Result<Option<u64>> {
    // By its first thread, whose start is that of the process: under qemu-user /proc/PID/stat says, to the process itself, when the thread that
    // asks started.
    let stat = match std::fs::read(format!("/proc/{pid}/task/{pid}/stat")) {
        Ok(stat) => stat,
        Err(error)
            if error.kind() == io::ErrorKind::NotFound
                || error.raw_os_error() == Some(libc::ESRCH) =>
        {
            // The entry of a living process may be missing, too: with the option hidepid, and where the kernel has no memory for it.
            return if exists(pid) { Err(error) } else { Ok(None) };
        }
        Err(error) => return Err(error),
    };
    // The name may hold any bytes, blanks and parentheses too; field 3 is the first behind its end.
    let stat = String::from_utf8_lossy(&stat);
    let fields: Vec<_> = stat
        .rsplit_once(')')
        .map_or("", |(_, rest)| rest)
        .split_whitespace()
        .collect();
    let number = |field: usize| {
        let text = fields.get(field - 3)?;
        text.parse::<u64>().ok()
    };
    match (fields.first(), number(20), number(22)) {
        (Some(&"X"), ..) => Ok(None),
        // A process whose first thread has ended is shown as a zombie, too, while its other threads go on.
        (Some(&"Z"), threads, _) if threads.unwrap_or(0) <= 1 => Ok(None),
        (_, _, Some(at)) => Ok(Some(at)),
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}

/// Whether there is a process with this number, as the kernel knows it.
fn exists(pid: u32) -> bool {
    let Some(pid) = i32::try_from(pid).ok().filter(|&pid| pid > 0) else {
        return false;
    };
    // SAFETY: signal 0 is not sent. The kernel only checks that the process exists and may be signaled.
    let done = unsafe { libc::kill(pid, 0) };
    done == 0 || io::Error::last_os_error().raw_os_error() != Some(libc::ESRCH)
}

/// 64 random bits from the kernel.
pub(crate) fn random() -> Result<u64> {
    let mut bytes = [0u8; 8];
    // SAFETY: the buffer has room for the 8 bytes asked for.
    let got = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
    if got == 8 {
        Ok(u64::from_ne_bytes(bytes))
    } else {
        Err(last_error("getrandom"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_proc_hides_is_not_taken_for_dead() {
        assert!(matches!(started(1), Ok(Some(_))));
        let hidden = std::thread::spawn(|| {
            // The kernel takes null pointers here, too; valgrind does not.
            let none = c"none".as_ptr();
            // SAFETY: plain calls with texts that end in 0; namespace and user are those of this thread alone.
            unsafe {
                let made = libc::unshare(libc::CLONE_NEWNS | libc::CLONE_FS) == 0
                    && libc::mount(
                        none,
                        c"/".as_ptr(),
                        none,
                        libc::MS_REC | libc::MS_PRIVATE,
                        none.cast(),
                    ) == 0
                    && libc::mount(
                        c"proc".as_ptr(),
                        c"/proc".as_ptr(),
                        c"proc".as_ptr(),
                        0,
                        c"hidepid=2".as_ptr().cast(),
                    ) == 0;
                // Of this thread alone, as all calls here: the functions of libc would change all threads.
                if !made || libc::syscall(libc::SYS_setgroups, 0, 0) != 0 {
                    return Err(io::Error::last_os_error());
                }
                // The group, too: that of root sees all processes.
                let nobody: libc::uid_t = 65534;
                for call in [libc::SYS_setresgid, libc::SYS_setresuid] {
                    assert_eq!(libc::syscall(call, nobody, nobody, nobody), 0);
                }
            }
            let gone = started(u32::MAX - 1);
            let found = [started(1), started(std::process::id())];
            Ok((gone, found))
        });
        match hidden.join().unwrap() {
            Ok((gone, [of_root, own])) => {
                assert_eq!(gone.ok(), Some(None));
                let error = of_root.unwrap_err();
                assert_eq!(error.kind(), io::ErrorKind::NotFound);
                assert!(matches!(own, Ok(Some(_))), "{own:?}");
            }
            Err(error) => eprintln!("WAIVED: /proc that hides processes: {error}"),
        }
    }
}
