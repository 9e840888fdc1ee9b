//! What only a GPU can decide, and the figures: the program behind `check` in the bundle of `scripts/gpu-bundle`.
//!
//!     gpu_check [--short] [--suites] [--tests N] [--bundle FOLDER] [--out FOLDER]
//!
//! Each step is a process of its own with a time limit, so that a hang on a GPU is a finding and not the end. One report for programs
//! (`gpu-check.json`) and one for readers (`gpu-check.md`) come out; the exit status is 1 if a step failed. A figure that was missed is
//! reported as missed, which is no failure. Over the stand-in for the driver no figure is judged. With `--tests N` only the first N tests of each
//! suite run: enough to see that all of them start in the environment of a bundle. With `--suites` nothing else runs.
#![allow(unsafe_code)] // calls the driver, as an application does

mod attributes;
mod blocking;
mod captures;
mod emitter;
mod examples;
mod facts;
mod figures;
mod gpu;
mod graphs;
mod kernels;
mod posts;
mod process;
mod puts;
mod report;
mod sanitizer;
mod steps;
mod suites;
mod times;
mod trigger_latency;
mod verdicts;

use std::fs::File;
use std::path::PathBuf;
use std::process::ExitCode;

use report::{Report, StepOutcome};

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let value = |name: &str| {
        let at = words.iter().position(|word| word == name)?;
        words.get(at + 1).cloned()
    };
    let short = words.iter().any(|word| word == "--short");
    if let Some(step) = value("--step") {
        // The parent reads the result on stdout.
        println!("{}", steps::run_step(&step, short));
        return ExitCode::SUCCESS;
    }
    let bundle = value("--bundle").map_or_else(|| PathBuf::from("."), PathBuf::from);
    let out = value("--out").map_or_else(|| PathBuf::from("."), PathBuf::from);
    let _held = open_gpus();
    let mut report = Report::begin(short, out.clone());
    let tests = value("--tests").map_or(Ok(usize::MAX), |text| text.parse());
    let Ok(tests) = tests else {
        eprintln!("gpu_check: --tests takes a number");
        return ExitCode::from(2);
    };
    if words.iter().any(|word| word == "--suites") {
        suites::run_all(&bundle, short, tests, &mut report);
    } else {
        steps::run_all(&bundle, short, tests, &mut report);
    }
    match report.write() {
        Ok(()) => {}
        Err(error) => {
            eprintln!("gpu_check: {}: {error}", out.display());
            return ExitCode::from(2);
        }
    }
    print!("{}", report.summary());
    if report.has(StepOutcome::Failed) {
        ExitCode::FAILURE
    } else {
        ExitCode::SUCCESS
    }
}

/// The driver's files of the GPUs. Each step is a process, and without one that has a GPU open the driver resets it: the next process then
/// waits for seconds. nvidia-persistenced holds them in the same way (`nvidia_open` in the driver's kernel-open/nvidia/nv.c starts the GPU).
fn open_gpus() -> Vec<File> {
    let open = |number| {
        let file = format!("/dev/nvidia{number}");
        File::options().read(true).write(true).open(file).ok()
    };
    (0..16).filter_map(open).collect()
}
