//! Queues that kernels post to, with threads of a CPU as kernels: `tests/kernel_queue/producers.c`, which has the code of
//! `include/doorbell/queue.h`, over the software ConnectX, rung by the threads themselves and by a proxy.

mod c_toolchain;
mod waived;

use std::path::PathBuf;
use std::process::Command;

use c_toolchain::{NATIVE_LIBS, compiler, has, library, root, run, scratch, succeed};

/// Operations of the load, of both control paths together.
const OPERATIONS: u32 = 10_000_000;

/// The program. With ThreadSanitizer it is linked with the shared library, which that can tell from what it knows, and leave out.
fn build(name: &str, with_thread_sanitizer: bool) -> PathBuf {
    let program = scratch(name);
    let mut command = compiler("cc", "c11");
    command.arg("-O2");
    command.arg(root().join("tests/kernel_queue/producers.c"));
    if with_thread_sanitizer {
        let library = library("so");
        let folder = library.parent().expect("a library is in a folder");
        // Its warning is about fences, which order what kernels do; what the threads rely on is releases and acquires.
        command
            .args(["-fsanitize=thread", "-Wno-tsan", "-L"])
            .arg(folder);
        // Before LD_LIBRARY_PATH, by which cargo may show another build of it.
        command.args(["-ldoorbell", "-Wl,--disable-new-dtags"]);
        command.arg(format!("-Wl,-rpath,{}", folder.display()));
    } else {
        command.arg(library("a"));
    }
    succeed(command.args(NATIVE_LIBS).arg("-o").arg(&program));
    program
}

/// Why ThreadSanitizer is not for this run, which then does a part of the operations: the count is needed once.
fn other_build() -> Option<&'static str> {
    if std::env::var("CFLAGS").is_ok_and(|flags| flags.contains("-fsanitize")) {
        Some("the build has another sanitizer")
    } else if std::env::var_os("DOORBELL_TEST_DEVICE").is_some() {
        Some("it stands in the way of the software ConnectX's doors")
    } else {
        None
    }
}

/// The control paths of the device that have a part for kernels: plain verbs have no doorbell that one could ring.
fn controls() -> &'static [&'static str] {
    let device = std::env::var("DOORBELL_TEST_DEVICE").unwrap_or_default();
    if device.starts_with("verbs:") {
        &["1"]
    } else {
        &["0", "1"]
    }
}

/// On each control path.
fn succeeds(name: &str, what: &str, threads: u32, operations: u32, depth: u32) {
    if !has("cc") {
        return waived::waived(name, "cc is not installed");
    }
    let program = build(name, false);
    for control in controls() {
        let numbers = [threads, operations, depth].map(|number| number.to_string());
        let output = run(Command::new(&program).arg(what).args(numbers).arg(control));
        assert_eq!(output.lines().last(), Some("ok"), "control {control}");
    }
}

macro_rules! cases {
    ($($name:ident: $depth:literal;)*) => {
        $(#[test]
        fn $name() {
            succeeds(stringify!($name), stringify!($name), 0, 0, $depth);
        })*
    };
}

cases! {
    kinds: 64;
    loans: 64;
    out_of_order: 64;
    left_to_another: 64;
    full_and_late: 16;
    error_completion: 64;
    error_that_nobody_polls: 64;
    dead_peer: 64;
    aborted: 64;
}

/// Where kernels ring: the host's counts begin with the endpoint's.
#[test]
fn counts_wrap() {
    let test = "counts_wrap";
    if let Some(reason) = other_build() {
        return waived::waived(test, reason);
    }
    let mut command = Command::new(build(test, false));
    let output = run(command.args(["counts_wrap", "0", "0", "1024", "0"]));
    assert_eq!(output.lines().last(), Some("ok"));
}

#[test]
fn queues_of_any_depth_are_full_again_and_again() {
    let name = "queues_of_any_depth_are_full_again_and_again";
    let operations = if other_build().is_none() {
        40_000
    } else {
        4_000
    };
    for depth in [1, 2, 3, 5, 16] {
        succeeds(name, "load", 4, operations, depth);
    }
}

/// Ten million operations, which is the 16 bits of the NIC's counts again and again: none is lost, doubled or torn, and the threads have no
/// data race.
#[test]
fn many_threads_lose_double_and_tear_nothing() {
    let test = "many_threads_lose_double_and_tear_nothing";
    if !has("cc") {
        return waived::waived(test, "cc is not installed");
    }
    let all = if let Some(reason) = other_build() {
        waived::waived(&format!("{test} under ThreadSanitizer"), reason);
        OPERATIONS / 40
    } else {
        OPERATIONS
    };
    let program = build(test, other_build().is_none());
    for (control, depth, operations) in [
        ("0", "1024", all / 2),
        ("1", "1024", all / 4),
        ("0", "64", all / 8),
        ("1", "64", all / 8),
    ] {
        if !controls().contains(&control) {
            continue;
        }
        let mut command = Command::new(&program);
        command.env(
            "TSAN_OPTIONS",
            "ignore_noninstrumented_modules=1 halt_on_error=1 exitcode=66",
        );
        command.args(["load", "6", &operations.to_string(), depth, control]);
        let output = run(&mut command);
        assert_eq!(output.lines().last(), Some("ok"), "control {control}");
    }
}
