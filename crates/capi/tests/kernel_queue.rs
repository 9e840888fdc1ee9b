//! Queues that kernels post to, with threads of a CPU as kernels: `tests/kernel_queue/producers.c`, which has the code of
//! `include/doorbell/queue.h`, over the software ConnectX, rung by the threads themselves and by a proxy.

mod c_toolchain;
#[path = "kernel_queue/programs.rs"]
mod programs;
#[path = "../../../tests/waived/mod.rs"]
mod waived;

use std::path::PathBuf;

use c_toolchain::{compiler, has, root, run};
use programs::{THREAD_SANITIZER, command, controls, link, other_build};

/// Operations of the load, of both control paths together.
fn operations() -> u32 {
    std::env::var("DOORBELL_OPERATIONS").map_or(10_000_000, |text| {
        text.parse()
            .unwrap_or_else(|error| panic!("DOORBELL_OPERATIONS={text}: {error}"))
    })
}

fn build(name: &str, with_thread_sanitizer: bool) -> PathBuf {
    let mut command = compiler("cc", "c11");
    command.arg("-O2");
    if with_thread_sanitizer {
        command.args(THREAD_SANITIZER);
    }
    command.arg(root().join("crates/capi/tests/kernel_queue/producers.c"));
    link(command, name, with_thread_sanitizer)
}

/// On each control path.
fn succeeds(name: &str, what: &str, threads: u32, operations: u32, depth: u32) {
    if !has("cc") {
        return waived::waived(name, "cc is not installed");
    }
    let program = build(name, false);
    for control in controls() {
        let numbers = [threads, operations, depth].map(|number| number.to_string());
        let output = run(command(&program).arg(what).args(numbers).arg(control));
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
    formats: 64;
    loans: 64;
    slots_are_sent_in_order_of_reservation: 64;
    all_signaled: 64;
    doorbell_is_left_to_the_lock_holder: 64;
    full_and_late: 16;
    refused_requests_take_no_slot: 64;
    put_outlives_the_device_queue: 64;
    quiet_ends: 64;
    comparisons: 64;
    pieces: 16;
    exclusive: 16;
    error_completion: 64;
    host_finds_error_that_is_not_polled: 64;
    dead_peer: 64;
    aborted: 64;
}

/// Where kernels ring, the host's counts begin at the endpoint's counts.
#[test]
fn kernel_queue_counts_wrap() {
    let test = "kernel_queue_counts_wrap";
    if let Some(reason) = other_build() {
        return waived::waived(test, reason);
    }
    let mut command = command(&build(test, false));
    let output = run(command.args(["counts_wrap", "0", "0", "1024", "0"]));
    assert_eq!(output.lines().last(), Some("ok"));
}

/// More than 1 GiB, the most bytes of a work request.
#[test]
fn put_of_more_than_a_work_request_can_have() {
    let test = "put_of_more_than_a_work_request_can_have";
    if other_build().is_some() {
        let reason = "two regions of 1 GiB are needed once, on the software ConnectX";
        return waived::waived(test, reason);
    }
    succeeds(test, "longest", 0, 0, 16);
}

#[test]
fn queues_of_every_depth_fill_repeatedly() {
    let name = "queues_of_every_depth_fill_repeatedly";
    let operations = if other_build().is_none() {
        (operations() / 250).clamp(8_000, 40_000)
    } else {
        4_000
    };
    for depth in [1, 2, 3, 5, 16] {
        succeeds(name, "load", 4, operations, depth);
    }
}

/// Signals that set and add, puts, and quiets, of threads that draw them, and what the peer's memory then has to be: behind each quiet, and in the end.
#[test]
fn signals_of_many_threads_are_those_of_the_oracle() {
    let test = "signals_of_many_threads";
    let operations = if other_build().is_none() {
        (operations() / 100).clamp(8_000, 100_000)
    } else {
        4_000
    };
    for depth in [2, 5, 64] {
        succeeds(test, "signals", 4, operations, depth);
    }
}

/// An exclusive view takes no lock: threads that have it one after another, and share the queue in between.
#[test]
fn exclusive_views_go_from_thread_to_thread() {
    let test = "exclusive_views";
    let operations = if other_build().is_none() {
        (operations() / 200).clamp(8_000, 50_000)
    } else {
        4_000
    };
    for depth in [2, 16] {
        succeeds(test, "exclusive_turns", 4, operations, depth);
    }
}

/// The same under ThreadSanitizer, which finds a thread that uses the state of a queue without its turn.
#[test]
fn signals_and_exclusive_views_have_no_data_race() {
    let test = "signals_and_exclusive_views_have_no_data_race";
    if !has("cc") {
        return waived::waived(test, "cc is not installed");
    }
    if let Some(reason) = other_build() {
        return waived::waived(test, reason);
    }
    let program = build(test, true);
    for control in controls() {
        for what in ["signals", "exclusive_turns"] {
            let output = run(command(&program).args([what, "4", "6000", "16", control]));
            assert_eq!(
                output.lines().last(),
                Some("ok"),
                "{what}, control {control}"
            );
        }
    }
}

/// Ten million operations, unless `DOORBELL_OPERATIONS` sets another number: the NIC's counts of 16 bits wrap repeatedly. No operation is lost,
/// doubled or torn, and the threads have no data race.
#[test]
fn operations_of_many_threads_are_not_lost_doubled_or_torn() {
    let test = "operations_of_many_threads_are_not_lost_doubled_or_torn";
    if !has("cc") {
        return waived::waived(test, "cc is not installed");
    }
    // Fewer operations in other builds: the full number is needed once.
    let all = if let Some(reason) = other_build() {
        waived::waived(&format!("{test} under ThreadSanitizer"), reason);
        operations() / 40
    } else {
        operations()
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
        let mut command = command(&program);
        command.args(["load", "6", &operations.to_string(), depth, control]);
        let output = run(&mut command);
        assert_eq!(output.lines().last(), Some("ok"), "control {control}");
    }
}
