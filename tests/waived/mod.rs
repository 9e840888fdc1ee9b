//! The third result of a test: this machine cannot run it.

use std::io::Write;

/// Says so, visibly, and in the file named by `DOORBELL_WAIVED_LOG` if there is one: a line `test: reason`.
pub fn waived(test: &str, reason: &str) {
    // Not by `eprintln!`, which the test harness keeps to itself when the test passes.
    let _ = writeln!(std::io::stderr(), "WAIVED: {test}: {reason}");
    if let Some(log) = std::env::var_os("DOORBELL_WAIVED_LOG") {
        std::fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(&log)
            .and_then(|mut file| writeln!(file, "{test}: {reason}"))
            .unwrap_or_else(|error| panic!("{}: {error}", log.display()));
    }
}
