//! The calls of warps and blocks (`include/doorbell/collective.cuh`, `include/doorbell/trigger.h`), by warps and blocks of threads of a CPU, with
//! the kernels' own code: `tests/kernel_queue/blocks.cpp`, over the software ConnectX, rung by the threads themselves and by a proxy.

mod c_toolchain;
#[path = "kernel_queue/programs.rs"]
mod programs;
#[path = "../../../tests/waived/mod.rs"]
mod waived;

use std::path::{Path, PathBuf};
use std::process::{Child, Command};

use c_toolchain::{compiler, has, root, run, scratch};
use programs::{THREAD_SANITIZER, command, controls, link, other_build};

/// How many blocks there are at once: each is a translation unit of its own, for its `__shared__`.
const BLOCKS: u32 = 3;

/// Cases that use a queue, with its depth.
const OVER_QUEUES: [(&str, &str); 9] = [
    ("a_warp", "64"),
    ("groups_of_a_warp", "64"),
    ("warps_and_blocks", "64"),
    ("put_signal_and_get", "64"),
    ("scopes", "64"),
    ("late_lane", "64"),
    ("full_and_aborted", "64"),
    ("failed", "64"),
    ("too_many_lanes", "16"),
];

/// Cases without a queue.
const IN_MEMORY: [&str; 4] = ["ping", "relay", "codes_of_triggers", "barriers"];

fn build(name: &str, with_thread_sanitizer: bool) -> PathBuf {
    let folder = root().join("crates/capi/tests/kernel_queue");
    let compiler = || {
        let mut command = compiler("g++", "c++17");
        command.arg("-O2");
        if with_thread_sanitizer {
            command.args(THREAD_SANITIZER);
        }
        command
    };
    let mut program = compiler();
    program.arg(folder.join("blocks.cpp"));
    let compiled: Vec<(Command, Child)> = (0..BLOCKS)
        .map(|block| {
            let object = scratch(&format!("{name}_{block}.o"));
            program.arg(&object);
            let mut command = compiler();
            command.arg(format!("-DBLOCK={block}")).arg("-c");
            command.arg(folder.join("kernels.cpp"));
            command.arg("-o").arg(&object);
            let child = command.spawn().expect("a compiler that is there starts");
            (command, child)
        })
        .collect();
    for (command, mut child) in compiled {
        let status = child.wait().expect("it is our child");
        assert!(status.success(), "{command:?}: {status}");
    }
    link(program, name, with_thread_sanitizer)
}

/// Runs the cases, each on all control paths at the same time, then those that need no queue: most of their time threads wait for others.
fn succeed(program: &Path, over_queues: &[(&str, &str)]) {
    let succeeds = |what: &str, depth: &str, control: &str| {
        let output = run(command(program).args([what, depth, control]));
        let last = output.lines().last();
        assert_eq!(last, Some("ok"), "{what}, control {control}");
    };
    for (what, depth) in over_queues {
        std::thread::scope(|scope| {
            for control in controls() {
                scope.spawn(|| succeeds(what, depth, control));
            }
        });
    }
    std::thread::scope(|scope| {
        for what in IN_MEMORY {
            scope.spawn(move || succeeds(what, "64", "0"));
        }
    });
}

/// For any mask of lanes, each lane's work request is posted once, to its own slot, with one doorbell for all. The peer gets what all threads of a
/// block wrote, received data is visible to all of them, and all get the error code of a failure.
#[test]
fn warps_and_blocks_post_and_trigger_together() {
    let test = "warps_and_blocks_post_and_trigger_together";
    if !has("g++") {
        return waived::waived(test, "g++ is not installed");
    }
    succeed(&build(test, false), &OVER_QUEUES);
}

/// With shuffles that do not order memory, so that only the barriers of the calls do.
#[test]
fn warps_and_blocks_have_no_data_race() {
    let test = "warps_and_blocks_have_no_data_race";
    if !has("g++") {
        return waived::waived(test, "g++ is not installed");
    }
    if let Some(reason) = other_build() {
        return waived::waived(test, reason);
    }
    let program = build(test, true);
    // The failures are the same threads' with the same barriers.
    succeed(&program, &OVER_QUEUES[1..6]);
    // A missing barrier is detected.
    let race = command(&program)
        .args(["shuffle_alone", "64", "0"])
        .output();
    let race = race.expect("the program is there");
    let said = String::from_utf8_lossy(&race.stderr);
    assert_eq!(race.status.code(), Some(66), "{said}");
    assert!(said.contains("data race"), "{said}");
}
