//! The programs of this folder: how they are linked and run, and on which control paths.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::c_toolchain::{NATIVE_LIBS, library, scratch, succeed};

/// Compiler flags for ThreadSanitizer. The disabled warning is about fences, which order accesses of kernels; the threads rely on releases and
/// acquires.
pub const THREAD_SANITIZER: [&str; 2] = ["-fsanitize=thread", "-Wno-tsan"];

/// Why this run does not use ThreadSanitizer.
pub fn other_build() -> Option<&'static str> {
    if std::env::var("CFLAGS").is_ok_and(|flags| flags.contains("-fsanitize")) {
        Some("the build has another sanitizer")
    } else if std::env::var_os("DOORBELL_TEST_DEVICE").is_some() {
        Some("it stands in the way of the software ConnectX's doors")
    } else {
        None
    }
}

/// Has the compiler link what it was given. With ThreadSanitizer it is the shared library, which that can tell from what it knows, and leave out.
pub fn link(mut command: Command, name: &str, with_thread_sanitizer: bool) -> PathBuf {
    let program = scratch(name);
    if with_thread_sanitizer {
        let library = library("so");
        let folder = library.parent().expect("a library is in a folder");
        command.arg("-L").arg(folder);
        // Before LD_LIBRARY_PATH, by which cargo may show another build of it.
        command.args(["-ldoorbell", "-Wl,--disable-new-dtags"]);
        command.arg(format!("-Wl,-rpath,{}", folder.display()));
    } else {
        command.arg(library("a"));
    }
    succeed(command.args(NATIVE_LIBS).arg("-o").arg(&program));
    program
}

/// Runs a program; if it has ThreadSanitizer, the first data race ends it with 66.
pub fn command(program: &Path) -> Command {
    let mut command = Command::new(program);
    // Otherwise it sleeps for a second at exit, for threads that still run. One of the library that has ended, and that nobody has joined yet, is no
    // data race.
    command.env(
        "TSAN_OPTIONS",
        "ignore_noninstrumented_modules=1 halt_on_error=1 exitcode=66 atexit_sleep_ms=0 report_thread_leaks=0",
    );
    command
}

/// The control paths of the device on which kernels can post: with plain verbs kernels cannot ring.
pub fn controls() -> &'static [&'static str] {
    let device = std::env::var("DOORBELL_TEST_DEVICE").unwrap_or_default();
    if device.starts_with("verbs:") {
        &["1"]
    } else {
        &["0", "1"]
    }
}
