//! The programs of `examples/systems`: each does its work on small data, and what it writes is compared with a reference.
//!
//! Only in optimised builds, because the programs compute, and poll: `scripts/test systems`.
#![cfg(all(
    feature = "group",
    feature = "softcx",
    not(loom),
    not(debug_assertions)
))]

mod block_write;
mod copies;
mod data_parallel_training;
mod pipeline_training;
mod remote_memory;
mod rendezvous;
mod rpc;
mod shuffle;
#[path = "../waived/mod.rs"]
mod waived;

use std::path::PathBuf;
use std::process::{Command, Output};

/// Runs an example, which starts its own ranks.
fn example(name: &str, arguments: &[&str]) -> Output {
    // `cargo build --release --examples` puts the examples next to the tests.
    let mut folder = std::env::current_exe().unwrap();
    folder.pop();
    folder.pop();
    let program = folder.join("examples").join(name);
    let output = Command::new(&program).args(arguments).output();
    output.unwrap_or_else(|error| panic!("{}: {error}", program.display()))
}

/// A folder of the test's own, empty.
fn folder(test: &str) -> PathBuf {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR"))
        .join("systems")
        .join(test);
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).unwrap();
    folder
}
