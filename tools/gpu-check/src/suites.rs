//! The test suites, in the environment of a bundle.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use serde_json::json;

use super::process::{ProcessResult, run_judged};
use super::report::{CheckedStep, Report, Time, timed};

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
const FIRST: [&str; 6] = [
    "kernel_trigger",
    "kernel_queue_cuda",
    "conformance",
    "cuda_memory",
    "cuda_graph",
    "cuda_replay",
];
const LAST: [&str; 1] = ["slow_commands"];

fn rank(suite: &str) -> usize {
    let place = |list: &[&str]| list.iter().position(|name| *name == suite);
    match (place(&FIRST), place(&LAST)) {
        (Some(at), _) => at,
        (None, Some(at)) => FIRST.len() + 1 + at,
        (None, None) => FIRST.len(),
    }
}

/// Runs before all others and beside none: its tests compare how much memory of the GPU is free.
const ALONE: &str = "cuda_memory";

/// Processors for each suite that runs beside others: its tests wait most of the time, and have threads of devices and streams.
const PROCESSORS_EACH: usize = 3;
/// More beside each other than these share the GPU's time so often that tests with short time limits fail.
const BESIDE_MAX: usize = 5;

/// Runs all suites in all configurations; at most `tests` tests of each. On a machine with many processors some run beside each other: each process has
/// a context of its own, and with it work queues of its own.
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
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    let beside = (processors / PROCESSORS_EACH).clamp(1, BESIDE_MAX);
    let (alone, together): (Vec<_>, Vec<_>) = list(bundle, short)
        .into_iter()
        .partition(|(suite, _)| suite == ALONE);
    let report = Mutex::new(report);
    let lock = || report.lock().unwrap_or_else(PoisonError::into_inner);
    let run = |(suite, config): &(String, SuiteConfig)| {
        let name = format!("suite: {suite}, {}", config.name);
        let limit = lock().limit_for(time);
        let step = timed(name, limit, |limit| {
            let log = Waivers::new();
            let mut command = command(bundle, suite, config, short);
            if tests < usize::MAX {
                command
                    .arg("--exact")
                    .args(first_tests(bundle, suite, tests));
            }
            run_judged(log.set_in(&mut command), limit, |ended| {
                judge(ended, log.take())
            })
        });
        lock().add(step);
    };
    alone.iter().for_each(run);
    let next = AtomicUsize::new(0);
    let work = || {
        while let Some(one) = together.get(next.fetch_add(1, Ordering::Relaxed)) {
            run(one);
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..beside {
            scope.spawn(work);
        }
    });
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
            &format!("check-{}", unique_name()),
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

/// Part of a name, for what suites beside each other must not share.
fn unique_name() -> String {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    format!("{}-{number}", std::process::id())
}

/// The file in which a suite logs the tests that waived themselves, and why.
pub struct Waivers(PathBuf);

impl Waivers {
    pub fn new() -> Waivers {
        let name = format!("doorbell-waived-{}", unique_name());
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
        let order = ["kernel_trigger", "conformance", "cuda", "slow_commands"];
        assert!(order.is_sorted_by_key(|suite| rank(suite)));
    }
}
