//! The reports.

use std::fmt::Write;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::verdicts::{StepEvidence, verdicts};

/// The time of the whole run. A shared GPU is available for ten minutes, with the time before and after the run.
pub const RUN_TIME: Duration = Duration::from_secs(470);
/// The same of the short form, for machines without a GPU, which may be small and busy.
const RUN_TIME_SHORT: Duration = Duration::from_secs(1200);
/// The reason for waiving a step when too little time is left.
pub const NO_TIME: &str = "the time of the whole run is up";

/// The estimated time of a step on a GPU, and the limit from which on it counts as a hang.
#[derive(Clone, Copy)]
pub struct Time {
    pub about_s: u64,
    pub limit_s: u64,
}

/// How a step ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StepOutcome {
    Passed,
    /// A figure that is not reached.
    Missed,
    Waived,
    Failed,
}

impl StepOutcome {
    fn name(self) -> &'static str {
        match self {
            StepOutcome::Passed => "passed",
            StepOutcome::Missed => "MISSED",
            StepOutcome::Waived => "WAIVED",
            StepOutcome::Failed => "FAILED",
        }
    }
}

/// A step and its outcome.
pub struct CheckedStep {
    pub name: String,
    pub outcome: StepOutcome,
    pub seconds: f64,
    pub found: Value,
    pub reason: String,
    pub waived: Vec<String>,
}

impl CheckedStep {
    fn new(outcome: StepOutcome, found: Value, reason: String) -> CheckedStep {
        CheckedStep {
            name: String::new(),
            outcome,
            seconds: 0.0,
            found,
            reason,
            waived: Vec::new(),
        }
    }

    /// A step that succeeded: passed, unless one of its figures was missed.
    pub fn found(found: Value) -> CheckedStep {
        let outcome = if figures(&found).iter().all(|figure| figure["met"] == true) {
            StepOutcome::Passed
        } else {
            StepOutcome::Missed
        };
        CheckedStep::new(outcome, found, String::new())
    }

    pub fn failed(reason: String) -> CheckedStep {
        CheckedStep::new(StepOutcome::Failed, Value::Null, reason)
    }

    pub fn waived(reason: String) -> CheckedStep {
        CheckedStep::new(StepOutcome::Waived, Value::Null, reason)
    }
}

/// How long a process may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepLimit {
    pub time: Duration,
    /// The limit is the rest of the run, which is shorter than the step's own limit.
    pub is_rest_of_run: bool,
}

fn limit_of(time: Time, left: Duration) -> Option<StepLimit> {
    let own = Duration::from_secs(time.limit_s);
    (left >= Duration::from_secs(time.about_s)).then(|| StepLimit {
        time: own.min(left),
        is_rest_of_run: left < own,
    })
}

/// Runs a step if it has a limit, and notes how long it took. Without one it is waived.
pub fn timed(
    name: String,
    limit: Option<StepLimit>,
    work: impl FnOnce(StepLimit) -> CheckedStep,
) -> CheckedStep {
    let began = Instant::now();
    let step = match limit {
        Some(limit) => work(limit),
        None => CheckedStep::waived(NO_TIME.into()),
    };
    CheckedStep {
        name,
        seconds: began.elapsed().as_secs_f64(),
        ..step
    }
}

/// The figures in what was found.
fn figures(found: &Value) -> Vec<&Value> {
    let list = match found {
        Value::Array(list) => list.iter().collect(),
        one => vec![one],
    };
    list.into_iter()
        .filter(|it| it.get("figure").is_some())
        .collect()
}

pub struct Report {
    began: Instant,
    out: PathBuf,
    short: bool,
    standin: bool,
    steps: Vec<CheckedStep>,
}

const STANDIN: &str = "The device is the stand-in for tests, and no GPU: no figure here means anything, and none was judged.";

impl Report {
    pub fn begin(short: bool, out: PathBuf) -> Report {
        Report {
            began: Instant::now(),
            out,
            short,
            standin: std::env::var_os("DOORBELL_CUDA_STANDIN").is_some(),
            steps: Vec::new(),
        }
    }

    /// Runs a step if there is time for it, and adds it.
    pub fn step(&mut self, name: String, time: Time, work: impl FnOnce(StepLimit) -> CheckedStep) {
        let step = timed(name, self.limit_for(time), work);
        self.add(step);
    }

    /// Adds a step and prints it, because the run takes minutes.
    pub fn add(&mut self, mut step: CheckedStep) {
        // The device's name shows it as well, whatever the environment says.
        self.standin |= step.found["name"]
            .as_str()
            .is_some_and(|name| name.contains("stand-in"));
        if self.standin && step.outcome == StepOutcome::Missed {
            step.outcome = StepOutcome::Passed;
        }
        println!(
            "{:<7} {:>6.1} s  {}",
            step.outcome.name(),
            step.seconds,
            step.name
        );
        for line in step.reason.lines() {
            println!("          {line}");
        }
        self.steps.push(step);
        // Written after each step, so that an early end loses only the step in progress. Only the last write reports errors.
        let _ = self.write();
    }

    /// How long a step may take. None if less of the run is left than the step probably needs.
    pub fn limit_for(&self, time: Time) -> Option<StepLimit> {
        let whole = if self.short { RUN_TIME_SHORT } else { RUN_TIME };
        limit_of(time, whole.saturating_sub(self.began.elapsed()))
    }

    pub fn has(&self, outcome: StepOutcome) -> bool {
        self.count(outcome) > 0
    }

    fn count(&self, outcome: StepOutcome) -> usize {
        self.steps
            .iter()
            .filter(|step| step.outcome == outcome)
            .count()
    }

    /// Every WAIVED of a suite or of a step, once.
    fn waived(&self) -> Vec<String> {
        let mut all = Vec::new();
        for step in &self.steps {
            if step.outcome == StepOutcome::Waived {
                all.push(format!("{}: {}", step.name, step.reason));
            }
            all.extend(
                step.waived
                    .iter()
                    .map(|line| format!("{}: {line}", step.name)),
            );
        }
        all.sort();
        all.dedup();
        all
    }

    fn facts(&self) -> Vec<Value> {
        let shown = self.steps.iter().map(|step| StepEvidence {
            name: &step.name,
            found: &step.found,
            reason: &step.reason,
            has_failed: step.outcome == StepOutcome::Failed,
        });
        verdicts(&shown.collect::<Vec<_>>())
    }

    /// The last lines on the terminal.
    pub fn summary(&self) -> String {
        let mut text = String::new();
        for line in self.waived() {
            let _ = writeln!(text, "WAIVED: {line}");
        }
        if self.standin {
            let _ = writeln!(text, "{STANDIN}");
        }
        let [passed, missed, waived, failed] = [
            StepOutcome::Passed,
            StepOutcome::Missed,
            StepOutcome::Waived,
            StepOutcome::Failed,
        ]
        .map(|it| self.count(it));
        let _ = writeln!(
            text,
            "{passed} passed, {missed} with a figure missed, {waived} waived, {failed} failed"
        );
        text
    }

    /// Both files.
    pub fn write(&self) -> std::io::Result<()> {
        let folder = &self.out;
        std::fs::create_dir_all(folder)?;
        std::fs::write(
            folder.join("gpu-check.json"),
            format!("{:#}\n", self.json()),
        )?;
        std::fs::write(folder.join("gpu-check.md"), self.markdown())
    }

    fn json(&self) -> Value {
        let steps = self.steps.iter().map(|step| {
            json!({
                "name": step.name,
                "outcome": step.outcome.name(),
                "seconds": step.seconds,
                "found": step.found,
                "reason": step.reason,
                "waived": step.waived,
            })
        });
        json!({
            "version": env!("CARGO_PKG_VERSION"),
            "standin": self.standin,
            "figures judged": !self.standin,
            "short": self.short,
            "seconds": self.began.elapsed().as_secs_f64(),
            "processors": std::thread::available_parallelism().map_or(0, usize::from),
            "facts": self.facts(),
            "steps": steps.collect::<Vec<_>>(),
        })
    }

    fn markdown(&self) -> String {
        let mut text = String::from("# What `check` found\n\n");
        if self.standin {
            let _ = writeln!(text, "**{STANDIN}**\n");
        }
        if let Some(device) = self
            .steps
            .first()
            .map(|step| &step.found)
            .filter(|it| it.is_object())
        {
            let field = |name: &str| device[name].as_str().unwrap_or("").to_owned();
            let _ = writeln!(
                text,
                "{}, CUDA {}. {}\n\n    {}\n",
                field("name"),
                field("cuda"),
                field("module"),
                field("capabilities")
            );
        }
        let _ = writeln!(
            text,
            "## Figures\n\n| figure | value | is to be | |\n|---|---|---|---|"
        );
        for step in &self.steps {
            for figure in figures(&step.found) {
                let verdict = match (self.standin, figure["met"].as_bool()) {
                    (true, _) => "not judged",
                    (false, Some(true)) => "reached",
                    _ => "**MISSED**",
                };
                let value = figure["value"].as_f64().unwrap_or(f64::NAN);
                let limit = figure["limit"].as_f64().unwrap_or(f64::NAN);
                let (name, how) = (
                    figure["figure"].as_str().unwrap_or(""),
                    figure["is to be"].as_str().unwrap_or(""),
                );
                let _ = writeln!(text, "| {name} | {value:.3} | {how} {limit} | {verdict} |");
            }
        }
        let _ = writeln!(text, "\n## Facts\n\n| fact | | evidence |\n|---|---|---|");
        for row in self.facts() {
            let field = |name: &str| row[name].as_str().unwrap_or("").to_owned();
            let (fact, verdict, step) = (field("fact"), field("verdict"), field("step"));
            let evidence = row["evidence"].to_string().replace('|', "\\|");
            let _ = writeln!(text, "| {fact} | {verdict} | {step}: `{evidence}` |");
        }
        let _ = writeln!(
            text,
            "\n## Steps\n\n| step | | s | found |\n|---|---|---|---|"
        );
        for step in &self.steps {
            let found = match &step.found {
                Value::Null => step.reason.lines().next().unwrap_or("").to_owned(),
                Value::String(said) => said.clone(),
                other => format!("`{other}`"),
            };
            let _ = writeln!(
                text,
                "| {} | {} | {:.1} | {} |",
                step.name,
                step.outcome.name(),
                step.seconds,
                found.replace('|', "\\|")
            );
        }
        let failed: Vec<&CheckedStep> = self
            .steps
            .iter()
            .filter(|step| step.outcome == StepOutcome::Failed)
            .collect();
        if !failed.is_empty() {
            text.push_str("\n## Failures\n");
            for step in failed {
                let _ = writeln!(text, "\n### {}\n\n```\n{}\n```", step.name, step.reason);
            }
        }
        text.push_str("\n## WAIVED\n\n");
        for line in self.waived() {
            let _ = writeln!(text, "- {line}");
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn step_starts_if_time_suffices_and_knows_its_limit() {
        let time = Time {
            about_s: 5,
            limit_s: 60,
        };
        let left = |seconds| limit_of(time, Duration::from_secs(seconds));
        let of = |seconds, is_rest_of_run| {
            let time = Duration::from_secs(seconds);
            Some(StepLimit {
                time,
                is_rest_of_run,
            })
        };
        assert_eq!(left(470), of(60, false));
        assert_eq!(left(60), of(60, false));
        assert_eq!(left(59), of(59, true));
        assert_eq!(left(5), of(5, true));
        assert_eq!(left(4), None);
    }
}
