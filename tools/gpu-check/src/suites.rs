//! The test suites, in the environment of a bundle.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::json;

use super::process::{ProcessResult, run_judged};
use super::report::{CheckedStep, Report, Time};

/// A configuration in which a suite runs.
#[derive(Clone)]
struct SuiteConfig {
    name: &'static str,
    /// The value of `DOORBELL_TEST_STREAM`.
    stream: &'static str,
    device: &'static str,
    behind_preload_door: bool,
}

/// The most informative first.
const CONFIGS: [SuiteConfig; 6] = [
    SuiteConfig {
        name: "softcx, direct",
        stream: "cuda",
        device: "softcx",
        behind_preload_door: false,
    },
    SuiteConfig {
        name: "softcx, direct, programs by kernels of an application",
        stream: "cuda-trigger",
        device: "softcx",
        behind_preload_door: false,
    },
    SuiteConfig {
        name: "softcx, proxy, programs by kernels of an application",
        stream: "cuda-trigger",
        device: "softcx,path=proxy",
        behind_preload_door: false,
    },
    SuiteConfig {
        name: "softcx, proxy",
        stream: "cuda",
        device: "softcx,path=proxy",
        behind_preload_door: false,
    },
    SuiteConfig {
        name: "mlx5 behind the preload door",
        stream: "cuda",
        device: "mlx5_0",
        behind_preload_door: true,
    },
    SuiteConfig {
        name: "softcx, direct, programs by a kernel",
        stream: "cuda-kernel",
        device: "softcx",
        behind_preload_door: false,
    },
];

/// The suites that run first: the most informative ones, and the short ones. Those in neither list run in between.
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

/// Runs all suites in all configurations; at most `tests` tests of each.
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
    for (suite, config) in list(bundle, short) {
        let name = format!("suite: {suite}, {}", config.name);
        report.step(name, time, |limit| {
            let log = Waivers::new();
            let mut command = command(bundle, &suite, &config, short);
            if tests < usize::MAX {
                command
                    .arg("--exact")
                    .args(first_tests(bundle, &suite, tests));
            }
            run_judged(log.set_in(&mut command), limit, |ended| {
                judge(ended, log.take())
            })
        });
    }
}

/// Each suite of the bundle in each configuration.
fn list(bundle: &Path, short: bool) -> Vec<(String, SuiteConfig)> {
    let mut all = Vec::new();
    for config in CONFIGS {
        // Files of the bundle: a suite a line.
        let list = match config.stream {
            "cuda-kernel" => "suites.kernel",
            "cuda-trigger" => "suites.trigger",
            _ => "suites",
        };
        let list = std::fs::read_to_string(bundle.join(list)).unwrap_or_default();
        for suite in list.split_whitespace() {
            // All suites of one configuration, and one suite of the others, are enough to see that they start.
            let shown = if config.behind_preload_door {
                "conformance"
            } else {
                "tickets"
            };
            if short && config.name != CONFIGS[0].name && suite != shown {
                continue;
            }
            all.push((suite.to_owned(), config.clone()));
        }
    }
    // A stable sort: the configurations of a suite stay in order.
    all.sort_by_key(|(suite, _)| rank(suite));
    all
}

/// The names of the first tests of a suite. If they cannot be listed, a name that no test has, so that the step fails.
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

fn command(bundle: &Path, suite: &str, config: &SuiteConfig, short: bool) -> Command {
    let program = bundle.join("bin").join(suite);
    let mut command = if config.behind_preload_door {
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
        // Tests beside each other would have more streams that wait than a context has work queues: see docs/gpu.md.
        .env("RUST_TEST_THREADS", "1")
        .env("DOORBELL_TEST_STREAM", config.stream)
        .env("DOORBELL_TEST_DEVICE", config.device)
        .env("DOORBELL_FAULTS", if short { "300" } else { "2000" })
        .env("DOORBELL_POSTS", if short { "1000" } else { "7000" });
    command
}

/// The file in which a suite logs the tests that waived themselves, and why.
pub struct Waivers(PathBuf);

impl Waivers {
    pub fn new() -> Waivers {
        let name = format!("doorbell-waived-{}", std::process::id());
        let log = Waivers(std::env::temp_dir().join(name));
        let _ = std::fs::remove_file(&log.0);
        log
    }

    pub fn set_in<'a>(&self, command: &'a mut Command) -> &'a mut Command {
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

/// The outcome of a suite. For the test harness, tests that waived themselves have passed.
pub fn judge(ended: &ProcessResult, log: Vec<String>) -> CheckedStep {
    let mut names: Vec<&str> = log
        .iter()
        .filter_map(|line| line.split(": ").next())
        .collect();
    names.sort_unstable();
    names.dedup();
    let count = names.len();
    let waived: Vec<String> = log.iter().map(|line| without_process(line)).collect();
    let mut lines = ended.output.lines().rev();
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
        _ => CheckedStep::failed(ended.failure_text()),
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
    use super::super::process::ExitReason;
    use super::super::report::StepOutcome;
    use super::*;

    #[test]
    fn tests_that_waive_themselves_have_not_passed() {
        let judged = |said: &str, success, waived: &[&str]| {
            let ended = ProcessResult {
                success,
                end: ExitReason::Exited,
                status: "exit status: 0".into(),
                output: said.into(),
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
