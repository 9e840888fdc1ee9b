//! Kernels under compute-sanitizer, where it is installed and runs. Its racecheck looks at shared memory, so it is for kernels that have some.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::json;

use super::kernels::{FAILURES, GROUPS, MARK, POSTS, PUTS};
use super::process::{ExitReason, ProcessResult, run_judged};
use super::report::{CheckedStep, Report, StepOutcome, Time};
use super::suites::{self, Waivers};

/// What runs: for people, the program of the bundle with its arguments, the tools, and about how long one takes.
const LIST: [(&str, &[&str], &[&str], u64); 6] = [
    (
        "posts of lanes, warps and blocks",
        &["gpu_check", "--short", "--step", POSTS],
        &["memcheck", "racecheck"],
        12,
    ),
    (
        "a full queue and a dead peer",
        &["gpu_check", "--short", "--step", FAILURES],
        &["memcheck"],
        10,
    ),
    (
        "puts of many blocks",
        &["gpu_check", "--short", "--step", PUTS],
        &["memcheck"],
        15,
    ),
    (
        "triggers of warps and blocks",
        &["gpu_check", "--short", "--step", GROUPS],
        &["memcheck", "racecheck"],
        10,
    ),
    (
        "triggers",
        &["kernel_trigger", "--test-threads", "1"],
        &["memcheck"],
        25,
    ),
    (
        "kernels",
        &["cuda_kernels", "--test-threads", "1"],
        &["memcheck"],
        20,
    ),
];
const TOOLS: [&str; 2] = ["memcheck", "racecheck"];
const TRIAL: Time = Time {
    about_s: 6,
    limit_s: 60,
};

pub fn about_s() -> u64 {
    let each = LIST.iter().map(|(_, _, tools, s)| tools.len() as u64 * s);
    TRIAL.about_s * TOOLS.len() as u64 + each.sum::<u64>()
}

/// Runs all of them, each tool only if it gets along with this machine: that it does not is no fault of the kernels.
pub fn run_all(bundle: &Path, report: &mut Report) {
    let Some(tool) = find() else {
        let step = CheckedStep::waived("compute-sanitizer is not here".into());
        let name = "compute-sanitizer".to_owned();
        return report.add(CheckedStep { name, ..step });
    };
    let mut good = Vec::new();
    for name in TOOLS {
        let program = bundle.join("bin/gpu_check");
        let arguments = ["--short", "--step", MARK];
        let mut runs = false;
        let about = format!("a kernel that stores a word, under compute-sanitizer {name}");
        report.step(about, TRIAL, |limit| {
            let mut command = under(&tool, name, &program, &arguments);
            let step = run_judged(&mut command, limit, trial);
            runs = step.outcome == StepOutcome::Passed;
            step
        });
        if runs {
            good.push(name);
        }
    }
    for (what, arguments, tools, about_s) in LIST {
        let time = Time {
            about_s,
            limit_s: 90,
        };
        for name in tools {
            let called = format!("{what} under compute-sanitizer {name}");
            report.step(called, time, |limit| {
                let [program, arguments @ ..] = arguments else {
                    return CheckedStep::waived("nothing was named".into());
                };
                let program = bundle.join("bin").join(program);
                if !program.is_file() {
                    return CheckedStep::waived(format!("the bundle has no {}", program.display()));
                }
                if !good.contains(name) {
                    return CheckedStep::waived(format!("{name} does not run on this machine"));
                }
                let log = Waivers::new();
                let mut command = under(&tool, name, &program, arguments);
                run_judged(log.set_in(&mut command), limit, |ended| {
                    judge(ended, log.take())
                })
            });
        }
    }
}

fn find() -> Option<PathBuf> {
    let places = ["/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer"].map(PathBuf::from);
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(places)
        .map(|folder| folder.join("compute-sanitizer"))
        .find(|program| program.is_file())
}

/// Without the errors of the driver's calls, which probe what there is, and have tests that are refused.
fn under(tool: &Path, name: &str, program: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(tool);
    command
        .args(["--tool", name, "--report-api-errors", "no"])
        .args(["--error-exitcode", "9"])
        .arg(program)
        .args(arguments);
    command
}

/// The tool's last word: `ERROR SUMMARY: 0 errors`, or `RACECHECK SUMMARY: 0 hazards ...`.
fn is_clean(ended: &ProcessResult) -> Option<bool> {
    let mut lines = ended.output.lines().rev();
    let line = lines.find_map(|line| line.split_once(" SUMMARY: "))?;
    Some(line.1.starts_with("0 "))
}

/// Whether the tool runs here: on a kernel of which nothing could be said.
fn trial(ended: &ProcessResult) -> CheckedStep {
    let has_stored = ended.output.contains("{\"found\":{\"word\":");
    if ended.success && has_stored && is_clean(ended) == Some(true) {
        return CheckedStep::found(json!("it runs"));
    }
    if ended.output.contains("{\"found\":{\"waived\":") {
        return CheckedStep::waived("the bundle has no kernels of its own".into());
    }
    // A line: this is in lists of what was waived.
    let complaint = ended.failure_text();
    let lines = complaint.lines().map(str::trim);
    let lines: Vec<&str> = lines.filter(|line| !line.is_empty()).collect();
    CheckedStep::waived(format!("it does not run here: {}", lines.join("; ")))
}

/// What a tool that runs here has said of a program: a step of this one, or a suite.
fn judge(ended: &ProcessResult, waived: Vec<String>) -> CheckedStep {
    // A step says in its line what became of it.
    if ended.end == ExitReason::Exited && ended.output.contains("{\"found\":{\"waived\":") {
        return CheckedStep::waived("the program had nothing to run".into());
    }
    let mut step = if ended.output.contains("test result: ") {
        suites::judge(ended, waived)
    } else if ended.success && ended.output.contains("{\"found\":") {
        CheckedStep::found(json!(""))
    } else {
        return CheckedStep::failed(ended.failure_text());
    };
    if step.outcome == StepOutcome::Passed {
        let more = step.found.as_str().unwrap_or_default().to_owned();
        match is_clean(ended) {
            Some(true) => step.found = json!(format!("no errors. {more}")),
            Some(false) => return CheckedStep::failed(ended.failure_text()),
            None => return CheckedStep::waived("the tool says nothing of what it has seen".into()),
        }
    }
    step
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ended(success: bool, said: &str) -> ProcessResult {
        ProcessResult {
            success,
            end: ExitReason::Exited,
            status: "exit status: 9".into(),
            output: said.into(),
        }
    }

    const CLEAN: &str = "========= ERROR SUMMARY: 0 errors\n";
    const TESTS: &str = "test result: ok. 1 passed; 0 failed\n";

    #[test]
    fn a_tool_that_does_not_run_here_is_no_failure() {
        let of = |success, said: &str| trial(&ended(success, said)).outcome;
        let stored = "{\"found\":{\"word\":7}}\n";
        assert_eq!(of(true, &(stored.to_owned() + CLEAN)), StepOutcome::Passed);
        for said in [
            "========= Error: Device not supported\n",
            stored,
            CLEAN,
            "{\"failed\":\"cuMemAlloc: CUDA_ERROR_UNKNOWN\"}\n",
        ] {
            assert_eq!(of(true, said), StepOutcome::Waived, "{said}");
        }
        assert_eq!(of(false, &(stored.to_owned() + CLEAN)), StepOutcome::Waived);
        let refused = trial(&ended(false, "=== TOOL\n=== Error: Device not supported\n"));
        assert!(
            refused
                .reason
                .ends_with("TOOL; === Error: Device not supported")
        );
    }

    #[test]
    fn findings_fail_and_skipped_runs_are_waived() {
        let of = |success, said: &[&str], waived: &[&str]| {
            let waived = waived.iter().map(|line| (*line).to_owned()).collect();
            judge(&ended(success, &said.concat()), waived).outcome
        };
        let step = "{\"found\":[1]}\n";
        assert_eq!(of(true, &[step, CLEAN], &[]), StepOutcome::Passed);
        assert_eq!(of(true, &[TESTS, CLEAN], &[]), StepOutcome::Passed);
        assert_eq!(
            of(true, &[TESTS, CLEAN], &["a@1: no GPU"]),
            StepOutcome::Waived
        );
        assert_eq!(of(true, &[step], &[]), StepOutcome::Waived);
        assert_eq!(
            of(true, &["{\"found\":{\"waived\":\"so\"}}", CLEAN], &[]),
            StepOutcome::Waived
        );
        let found = "========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)\n";
        assert_eq!(of(false, &[step, found], &[]), StepOutcome::Failed);
        assert_eq!(of(true, &[TESTS, found], &[]), StepOutcome::Failed);
        assert_eq!(
            of(true, &["{\"failed\":\"so\"}", CLEAN], &[]),
            StepOutcome::Failed
        );
        assert_eq!(of(false, &[CLEAN], &[]), StepOutcome::Failed);
    }
}
