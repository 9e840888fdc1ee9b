//! The examples in CUDA C, each run as it is: its own check decides, and the stencil's times are figures.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::figures::figure;
use super::process::{ProcessResult, run_judged};
use super::report::{CheckedStep, Report, StepLimit, Time};

/// Name of the example, its arguments, and about how many seconds it takes.
const LIST: [(&str, &[&str], u64); 5] = [
    ("put_signal", &["132", "100", "1024", "softcx"], 5),
    ("put_signal", &["132", "50", "1024", "softcx,path=proxy"], 5),
    ("stencil", &[], 30),
    (
        "stencil",
        &["--steps", "200", "--device", "softcx,path=proxy", "256x256"],
        6,
    ),
    ("loop", &[], 5),
];
const LIMIT_S: u64 = 120;
/// Up to so many cells a step is short next to what the host does for it: there the exchange without the host is to be that much better.
const SMALL: u64 = 256 * 256;
const BETTER: f64 = 1.3;

pub fn about_s() -> u64 {
    LIST.iter().map(|(_, _, about_s)| about_s).sum()
}

/// Runs all of them.
pub fn run_all(bundle: &Path, short: bool, report: &mut Report) {
    for (name, arguments, about_s) in LIST {
        if short && !arguments.is_empty() && name == "stencil" {
            continue;
        }
        let called = format!("example: {}", [&[name][..], arguments].concat().join(" "));
        let time = Time {
            about_s,
            limit_s: LIMIT_S,
        };
        report.step(called, time, |limit| one(bundle, name, arguments, limit));
    }
}

fn one(bundle: &Path, name: &str, arguments: &[&str], limit: StepLimit) -> CheckedStep {
    let program = bundle.join("bin").join(format!("example_{name}"));
    if !program.is_file() {
        return CheckedStep::waived("the bundle was made without nvcc".into());
    }
    run_judged(Command::new(program).args(arguments), limit, |ended| {
        judge(ended).unwrap_or_else(|error| {
            CheckedStep::failed(format!("{error:#}\n{}", ended.failure_text()))
        })
    })
}

/// What its last line and its status say.
fn judge(ended: &ProcessResult) -> Result<CheckedStep> {
    let last = ended
        .output
        .lines()
        .rev()
        .find(|line| !line.is_empty())
        .unwrap_or("");
    if let Some(reason) = last.strip_prefix("WAIVED: ").filter(|_| !ended.success) {
        return Ok(CheckedStep::waived(reason.to_owned()));
    }
    if !ended.success || !last.starts_with("PASS: ") {
        return Ok(CheckedStep::failed(ended.failure_text()));
    }
    let mut found = Vec::new();
    for line in ended
        .output
        .lines()
        .filter(|line| line.starts_with("stencil "))
    {
        found.extend(of_size(line).with_context(|| format!("what is {line:?}?"))?);
    }
    Ok(CheckedStep::found(if found.is_empty() {
        json!(last)
    } else {
        Value::Array(found)
    }))
}

/// A line as `stencil 64x64 steps 500 sync 120.00 us ratio 1.000 stream 60.00 us ratio 0.500 ...`: a figure for each variant but the first.
fn of_size(line: &str) -> Option<Vec<Value>> {
    let words: Vec<&str> = line.split(' ').collect();
    let [_, size, "steps", _, variants @ ..] = &words[..] else {
        return None;
    };
    let (columns, rows) = size.split_once('x')?;
    let cells = columns.parse::<u64>().ok()? * rows.parse::<u64>().ok()?;
    let limit = if cells <= SMALL { 1.0 / BETTER } else { 1.0 };
    let mut figures = Vec::new();
    for variant in variants.chunks(5) {
        let [name, us, "us", "ratio", ratio] = variant else {
            return None;
        };
        let (us, ratio): (f64, f64) = (us.parse().ok()?, ratio.parse().ok()?);
        if *name != "sync" {
            let called = format!("stencil {size}: a step {name}, over one in sync");
            figures.push(figure(&called, ratio, true, limit, &json!({"us": us})));
        }
    }
    Some(figures).filter(|figures| !figures.is_empty())
}

#[cfg(test)]
mod tests {
    use super::super::process::ExitReason;
    use super::*;

    fn ended(success: bool, said: &str) -> ProcessResult {
        ProcessResult {
            success,
            end: ExitReason::Exited,
            status: "exit status: 1".into(),
            output: said.into(),
        }
    }

    #[test]
    fn last_line_decides_the_outcome() {
        let judged = |success, said: &str| judge(&ended(success, said)).unwrap();
        let small = "stencil 64x64 steps 500 sync 120.00 us ratio 1.000 stream 60.00 us ratio 0.500 triggered 108.00 us ratio 0.900";
        let large = "stencil 4096x4096 steps 500 sync 900.00 us ratio 1.000 stream 890.00 us ratio 0.989 triggered 880.00 us ratio 0.978";
        let step = judged(true, &format!("{small}\n{large}\nPASS: all\n"));
        let met: Vec<bool> = (0..4).map(|at| step.found[at]["met"] == true).collect();
        assert_eq!(met, [true, false, true, true]);
        assert_eq!(
            judged(true, "on the way\nPASS: well\n").found,
            json!("PASS: well")
        );
        assert_eq!(judged(false, "\nWAIVED: no GPU\n\n").reason, "no GPU");
        for (success, said) in [
            (false, "PASS: well"),
            (true, "FAIL: bytes"),
            (true, ""),
            (true, "WAIVED: x"),
        ] {
            assert!(
                judged(success, said).reason.contains("exit status"),
                "{said}"
            );
        }
        let odd = "stencil 64x64 steps 500 sync 1.0 us ratio 1.000 stream 1.0 us ratio 1.000 WRONG";
        assert!(judge(&ended(true, &format!("{odd}\nPASS: all"))).is_err());
    }
}
