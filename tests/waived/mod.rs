//! The third result of a test: this machine cannot run it.

use std::io::Write;

/// Reports that a test is waived, visibly and in the file named by `DOORBELL_WAIVED_LOG` if there is one: a line `test@process: reason`, since a test
/// may be run several times, each in a process of its own.
pub fn waived(test: &str, reason: &str) {
    // Not by `eprintln!`, whose output the test harness drops when the test passes. One write per line, because tests run in parallel.
    let _ = std::io::stderr().write_all(format!("WAIVED: {test}: {reason}\n").as_bytes());
    if let Some(log) = std::env::var_os("DOORBELL_WAIVED_LOG") {
        std::fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(&log)
            .and_then(|mut file| {
                file.write_all(format!("{test}@{}: {reason}\n", std::process::id()).as_bytes())
            })
            .unwrap_or_else(|error| panic!("{}: {error}", log.display()));
    }
}
