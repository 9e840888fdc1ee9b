//! The suites of the tests, in the surroundings of a bundle.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::json;

use super::process::{Ended, judged};
use super::report::{CheckedStep, Report, Time};

/// In which surroundings a suite runs.
#[derive(Clone)]
struct Way {
    name: &'static str,
    /// What `DOORBELL_TEST_STREAM` is to be.
    stream: &'static str,
    device: &'static str,
    behind_the_door: bool,
}

/// Those that tell most first.
const WAYS: [Way; 6] = [
    Way {
        name: "softcx, direct",
        stream: "cuda",
        device: "softcx",
        behind_the_door: false,
    },
    Way {
        name: "softcx, direct, programs by kernels of an application",
        stream: "cuda-trigger",
        device: "softcx",
        behind_the_door: false,
    },
    Way {
        name: "softcx, proxy, programs by kernels of an application",
        stream: "cuda-trigger",
        device: "softcx,path=proxy",
        behind_the_door: false,
    },
    Way {
        name: "softcx, proxy",
        stream: "cuda",
        device: "softcx,path=proxy",
        behind_the_door: false,
    },
    Way {
        name: "mlx5 behind the preload door",
        stream: "cuda",
        device: "mlx5_0",
        behind_the_door: true,
    },
    Way {
        name: "softcx, direct, programs by a kernel",
        stream: "cuda-kernel",
        device: "softcx",
        behind_the_door: false,
    },
];

/// What comes before the others: by what it tells of a GPU, and how long it takes. The rest is in between.
const FIRST: [&str; 5] = [
    "kernel_trigger",
    "kernel_queue_cuda",
    "conformance",
    "cuda_memory",
    "cuda_graph",
];
const LAST: [&str; 2] = ["tickets", "faults"];

fn rank(suite: &str) -> usize {
    let place = |list: &[&str]| list.iter().position(|name| *name == suite);
    match (place(&FIRST), place(&LAST)) {
        (Some(at), _) => at,
        (None, Some(at)) => FIRST.len() + 1 + at,
        (None, None) => FIRST.len(),
    }
}

/// Runs all of them, each way; of each at most so many tests.
pub fn run_all(bundle: &Path, short: bool, tests: usize, report: &mut Report) {
    let time = if short {
        Time {
            about_s: 5,
            limit_s: 300,
        }
    } else {
        Time {
            about_s: 8,
            limit_s: 90,
        }
    };
    for (suite, way) in list(bundle, short) {
        let name = format!("suite: {suite}, {}", way.name);
        report.step(name, time, |limit| {
            let log = Waivers::new();
            let mut command = command(bundle, &suite, &way, short);
            if tests < usize::MAX {
                command
                    .arg("--exact")
                    .args(first_tests(bundle, &suite, tests));
            }
            judged(log.asked_of(&mut command), limit, |ended| {
                judge(ended, log.take())
            })
        });
    }
}

/// Each suite of the bundle, each way.
fn list(bundle: &Path, short: bool) -> Vec<(String, Way)> {
    let mut all = Vec::new();
    for way in WAYS {
        // Files of the bundle: a suite a line.
        let list = match way.stream {
            "cuda-kernel" => "suites.kernel",
            "cuda-trigger" => "suites.trigger",
            _ => "suites",
        };
        let list = std::fs::read_to_string(bundle.join(list)).unwrap_or_default();
        for suite in list.split_whitespace() {
            // All of one kind, and one of the others, are enough to see that they start.
            let shown = if way.behind_the_door {
                "conformance"
            } else {
                "tickets"
            };
            if short && way.name != WAYS[0].name && suite != shown {
                continue;
            }
            all.push((suite.to_owned(), way.clone()));
        }
    }
    // The order of the ways stays within each.
    all.sort_by_key(|(suite, _)| rank(suite));
    all
}

/// The names of the first tests of a suite. Where they cannot be read, one that no test has: the step fails, for nothing passed.
fn first_tests(bundle: &Path, suite: &str, most: usize) -> Vec<String> {
    let said = Command::new(bundle.join("bin").join(suite))
        .args(["--list", "--format", "terse"])
        .output();
    let said = said.map_or_else(
        |error| error.to_string(),
        |said| String::from_utf8_lossy(&said.stdout).into_owned(),
    );
    let names = said.lines().filter_map(|line| line.strip_suffix(": test"));
    let mut names: Vec<String> = names.take(most).map(str::to_owned).collect();
    if names.is_empty() {
        names.push("no test can be listed".into());
    }
    names
}

fn command(bundle: &Path, suite: &str, way: &Way, short: bool) -> Command {
    let program = bundle.join("bin").join(suite);
    let mut command = if way.behind_the_door {
        let mut door = Command::new(bundle.join("bin/doorbell"));
        door.args([
            "softcx",
            "run",
            "--door",
            "preload",
            "--fabric",
            &format!("check-{}", std::process::id()),
            "--library",
        ]);
        door.arg(bundle.join("lib/libdoorbell_softcx.so"))
            .arg("--")
            .arg(program);
        door
    } else {
        Command::new(program)
    };
    command
        .env("DOORBELL_TEST_STREAM", way.stream)
        .env("DOORBELL_TEST_DEVICE", way.device)
        .env("DOORBELL_FAULTS", if short { "300" } else { "2000" })
        .env("DOORBELL_POSTS", if short { "1000" } else { "7000" });
    command
}

/// Where a suite says which of its tests waived themselves, and why.
pub struct Waivers(PathBuf);

impl Waivers {
    pub fn new() -> Waivers {
        let name = format!("doorbell-waived-{}", std::process::id());
        let log = Waivers(std::env::temp_dir().join(name));
        let _ = std::fs::remove_file(&log.0);
        log
    }

    pub fn asked_of<'a>(&self, command: &'a mut Command) -> &'a mut Command {
        command.env("DOORBELL_WAIVED_LOG", &self.0)
    }

    /// Lines as tests/waived writes them.
    pub fn take(&self) -> Vec<String> {
        let all = std::fs::read_to_string(&self.0).unwrap_or_default();
        all.lines().map(str::to_owned).collect()
    }
}

impl Drop for Waivers {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// What became of a suite: those of its tests that waived themselves have passed for its harness.
pub fn judge(ended: &Ended, log: Vec<String>) -> CheckedStep {
    let mut names: Vec<&str> = log
        .iter()
        .filter_map(|line| line.split(": ").next())
        .collect();
    names.sort_unstable();
    names.dedup();
    let count = names.len();
    let waived: Vec<String> = log.iter().map(|line| without_process(line)).collect();
    let mut lines = ended.said.lines().rev();
    let result = lines.find(|line| line.starts_with("test result: "));
    let passed = result
        .and_then(|line| line.strip_prefix("test result: ok. "))
        .and_then(|rest| rest.split(' ').next()?.parse::<usize>().ok());
    let step = match (result, passed) {
        (Some(_), Some(passed)) if ended.success && count > 0 && passed <= count => {
            CheckedStep::waived(format!("all of its {passed} tests waived themselves"))
        }
        (Some(result), Some(1..)) if ended.success => CheckedStep::found(json!(format!(
            "{} ({count} of them WAIVED)",
            result.trim_start_matches("test result: ")
        ))),
        _ => CheckedStep::failed(ended.complaint()),
    };
    CheckedStep { waived, ..step }
}

/// A line `test@process: reason`, for people.
fn without_process(line: &str) -> String {
    match line.split_once(": ") {
        Some((test, reason)) => format!("{}: {reason}", test.split('@').next().unwrap_or(test)),
        None => line.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::super::process::End;
    use super::super::report::StepOutcome;
    use super::*;

    #[test]
    fn tests_that_waive_themselves_have_not_passed() {
        let judged = |said: &str, success, waived: &[&str]| {
            let ended = Ended {
                success,
                end: End::ByItself,
                status: "exit status: 0".into(),
                said: said.into(),
            };
            judge(&ended, waived.iter().map(|line| (*line).into()).collect())
        };
        let ok =
            "running 2 tests\ntest result: ok. 2 passed; 0 failed; 0 ignored; finished in 0.1s\n";
        let all = ["a@7: no GPU", "a@7: no path", "b@7: no GPU"];
        let step = judged(ok, true, &all);
        assert_eq!(step.outcome, StepOutcome::Waived);
        assert_eq!(step.waived, ["a: no GPU", "a: no path", "b: no GPU"]);
        let step = judged(ok, true, &all[..2]);
        assert_eq!(step.outcome, StepOutcome::Passed);
        assert!(step.found.as_str().unwrap().contains("1 of them WAIVED"));
        for (said, success) in [
            (ok, false),
            ("", true),
            ("test result: ok. 0 passed; 0 failed; 0 ignored", true),
            ("test result: FAILED. 1 passed; 1 failed", true),
        ] {
            assert_eq!(judged(said, success, &[]).outcome, StepOutcome::Failed);
        }
    }

    #[test]
    fn most_informative_suites_run_first_and_longest_last() {
        let order = ["kernel_trigger", "conformance", "cuda", "tickets", "faults"];
        assert!(order.is_sorted_by_key(|suite| rank(suite)));
    }
}
