//! The steps and their order; each runs as a process of its own. The most informative steps come first, because the time of the whole run may end
//! before the last.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use serde_json::{Value, json};

use super::kernels::{FAILURES, GROUPS, MARK, POSTS, PUTS};
use super::process::{ExitReason, ProcessResult, run_judged};
use super::report::{CheckedStep, RUN_TIME, Report, StepOutcome, Time};
use super::verdicts::{
    CALLS, CAPTURES, COPIES, GRAPH_CALLS, GRAPHS, GRAPHS_BESIDE, GRAPHS_MADE, ORDER, QUEUED,
    STREAMS,
};
use super::{
    attributes, blocking, captures, emitter, examples, facts, figures, graphs, kernels, posts,
    puts, sanitizer, suites, times, trigger_latency,
};

const fn time(about_s: u64, limit_s: u64) -> Time {
    Time { about_s, limit_s }
}

/// The name and the time of a step of this program.
type LocalStep = (&'static str, Time);

const FACTS: [LocalStep; 17] = [
    ("fact: device", time(2, 60)),
    ("fact: attributes", time(2, 30)),
    (CALLS, time(8, 60)),
    (STREAMS, time(5, 60)),
    (CAPTURES, time(2, 60)),
    ("fact: mappings", time(2, 30)),
    ("fact: conditions", time(2, 30)),
    (ORDER, time(3, 60)),
    ("fact: operations of a call", time(2, 30)),
    ("fact: times of operations", time(2, 30)),
    ("fact: patched graphs", time(2, 30)),
    (GRAPHS, time(2, 30)),
    (QUEUED, time(3, 60)),
    (COPIES, time(2, 60)),
    (GRAPH_CALLS, time(2, 90)),
    (GRAPHS_BESIDE, time(3, 90)),
    (GRAPHS_MADE, time(2, 60)),
];
/// Steps of kernels that ring doorbells, and of kernels that make work requests.
const KERNELS: [LocalStep; 5] = [
    (MARK, time(2, 30)),
    (GROUPS, time(4, 60)),
    (PUTS, time(6, 90)),
    (POSTS, time(8, 90)),
    (FAILURES, time(5, 60)),
];
/// Figures of kernels, and of streams.
const FIGURES: [LocalStep; 10] = [
    (
        "figure: fences, loads and round trips of a kernel",
        time(3, 60),
    ),
    ("figure: kernel trigger", time(4, 60)),
    ("figure: puts of kernels", time(8, 90)),
    ("figure: emitter", time(6, 60)),
    ("watchdog", time(4, 60)),
    ("figure: round trip", time(4, 60)),
    ("figure: queue cost", time(3, 60)),
    ("figure: driver calls", time(2, 30)),
    ("figure: graph replay", time(3, 60)),
    (LOOPS, time(6, 120)),
];
const LOOPS: &str = "figure: loops";

/// Runs a step in this process. Returns its result as a line of JSON.
pub fn run_step(name: &str, short: bool) -> Value {
    let found = match name {
        "fact: device" => facts::device(),
        "fact: mappings" => facts::mappings(),
        "fact: conditions" => facts::conditions(),
        ORDER => facts::order(short),
        "fact: attributes" => attributes::attributes(),
        "fact: times of operations" => facts::times(),
        CALLS => blocking::calls(),
        STREAMS => blocking::streams(short),
        CAPTURES => captures::calls(),
        GRAPHS => blocking::graphs(),
        QUEUED => blocking::queued(short),
        COPIES => blocking::copies(),
        GRAPH_CALLS => graphs::calls(),
        GRAPHS_BESIDE => graphs::beside(short),
        GRAPHS_MADE => graphs::instantiated(short),
        "fact: operations of a call" => facts::batches(),
        "fact: patched graphs" => facts::graphs(),
        "watchdog" => figures::watchdog(),
        "figure: round trip" => figures::round_trip(short),
        "figure: queue cost" => figures::queue_cost(short),
        "figure: driver calls" => figures::driver_calls(),
        "figure: graph replay" => figures::graph_replay(short),
        MARK => kernels::mark(),
        GROUPS => kernels::triggers_of_groups(short),
        PUTS => puts::puts_of_blocks(short),
        POSTS => posts::posts_of_groups(short),
        FAILURES => posts::failures(),
        "figure: fences, loads and round trips of a kernel" => times::times_of_kernels(short),
        "figure: kernel trigger" => trigger_latency::trigger_to_doorbell(short),
        "figure: puts of kernels" => puts::rate_of_blocks(short),
        "figure: emitter" => emitter::emitter(short),
        LOOPS => match std::env::current_exe() {
            Ok(here) => figures::loops(&here.with_file_name("doorbell"), short),
            Err(error) => Err(error.into()),
        },
        _ => Err(anyhow::anyhow!("no step {name:?}")),
    };
    match found {
        Ok(found) => json!({"found": found}),
        Err(error) => json!({"failed": format!("{error:#}")}),
    }
}

/// The estimated time of all steps but the suites, which have the rest.
fn about() -> Duration {
    let steps = [&FACTS[..], &KERNELS, &FIGURES].concat();
    let all = steps.iter().map(|(_, time)| time.about_s);
    Duration::from_secs(all.sum::<u64>() + examples::about_s() + sanitizer::about_s())
}

/// Runs all of them, and the suites.
pub fn run_all(bundle: &Path, short: bool, tests: usize, report: &mut Report) {
    if !short {
        println!(
            "About {} s of the {} s are for what comes before the suites, which have the rest.",
            about().as_secs(),
            RUN_TIME.as_secs()
        );
    }
    run_processes(&FACTS[..1], short, report);
    if report.has(StepOutcome::Failed) {
        // Nothing below can run without a device.
        return;
    }
    run_processes(&FACTS[1..], short, report);
    run_processes(&KERNELS, short, report);
    run_processes(&FIGURES, short, report);
    examples::run_all(bundle, short, report);
    sanitizer::run_all(bundle, report);
    suites::run_all(bundle, short, tests, report);
}

fn run_processes(list: &[LocalStep], short: bool, report: &mut Report) {
    for &(name, time) in list {
        report.step(name.to_owned(), time, |limit| {
            let Ok(program) = std::env::current_exe() else {
                return CheckedStep::failed("the path of this program is unknown".into());
            };
            let mut command = Command::new(program);
            command.args(["--step", name]);
            if short {
                command.arg("--short");
            }
            run_judged(&mut command, limit, found)
        });
    }
}

/// The outcome in the last line of JSON of a step.
fn found(ended: &ProcessResult) -> CheckedStep {
    let line = ended
        .output
        .lines()
        .rev()
        .find(|line| line.starts_with('{'));
    let Some(found) = line.and_then(|line| serde_json::from_str::<Value>(line).ok()) else {
        return CheckedStep::failed(ended.failure_text());
    };
    match (found.get("found"), found.get("failed")) {
        // It printed a result, and then did not end.
        (Some(_), _) if ended.end != ExitReason::Exited => {
            CheckedStep::failed(ended.failure_text())
        }
        (Some(found), _) if found.get("waived").is_some() => {
            CheckedStep::waived(found["waived"].as_str().unwrap_or_default().to_owned())
        }
        (Some(found), _) => CheckedStep::found(found.clone()),
        (None, Some(reason)) => CheckedStep::failed(reason.as_str().unwrap_or_default().to_owned()),
        (None, None) => CheckedStep::failed(ended.failure_text()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Half of the time is the suites'.
    #[test]
    fn all_steps_fit_into_five_minutes() {
        assert!(about() <= Duration::from_secs(300), "{:?}", about());
    }

    #[test]
    fn result_line_decides_the_outcome() {
        let found = |said: &str, end| {
            let ended = ProcessResult {
                success: end == ExitReason::Exited,
                end,
                status: "exit status: 0".into(),
                output: said.into(),
            };
            super::found(&ended).outcome
        };
        let well = "on the way\n{\"found\":{\"of\":1}}\n";
        assert_eq!(found(well, ExitReason::Exited), StepOutcome::Passed);
        assert_eq!(found(well, ExitReason::StepTimeout), StepOutcome::Failed);
        let waived = "{\"found\":{\"waived\":\"no nvcc\"}}";
        assert_eq!(found(waived, ExitReason::Exited), StepOutcome::Waived);
        let missed = "{\"found\":[{\"figure\":\"a\",\"met\":false}]}";
        assert_eq!(found(missed, ExitReason::Exited), StepOutcome::Missed);
        for said in ["", "{}", "{\"failed\":\"so\"}", "{\"found\":"] {
            assert_eq!(
                found(said, ExitReason::Exited),
                StepOutcome::Failed,
                "{said}"
            );
        }
    }
}
