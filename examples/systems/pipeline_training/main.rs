//! Training of one network that is divided among ranks, in two ways, on handwritten digits.
//!
//! ```sh
//! cargo run --release --example pipeline_training -- --svg timeline.svg
//! ```
//!
//! - Pipeline: each rank has some of the layers, a stage. A batch is divided into micro-batches, which go through the stages one behind the other. With the schedule `1f1b`
//!   (PipeDream-Flush, Megatron-LM) a stage computes the gradient of a micro-batch as soon as it can, so it keeps the inputs of few micro-batches. With `gpipe` it computes the
//!   gradients when all of the batch has gone forward.
//! - Tensor: each rank has a part of each layer (Megatron-LM). Forward and backward have an all-reduce for each block of layers.
//!
//! A rank queues its whole step on one stream: receives, kernels, and sends. Closures stand for kernels. They compute, and sleep until their time is over.
//!
//! With `--checkpoint` the pipeline saves its weights every few steps. If a rank ends, the others go on without it from the last checkpoint (`--on-loss shrink`), or end with an error
//! that names it (`--on-loss fail`); the same command then goes on from the checkpoint.
mod network;
mod pipeline;
#[path = "../support/mod.rs"]
mod support;
mod tensor;

use std::fmt::Write as _;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::{Parser, ValueEnum};
use doorbell::{Group, LaunchEnvironment};

use network::Network;
use pipeline::{Pipeline, with_checkpoints};
use support::digits::{self, Digits};
use support::recorder::{between, busy_ms, gather_bars};
use support::{Bar, Ranks, Recorder};

/// The longest wait for a peer.
const DEADLINE: Option<Duration> = Some(Duration::from_secs(30));
/// The longest wait for what the other ranks give to the store.
const GATHERED: Duration = Duration::from_secs(30);
/// The kind of a kernel.
const BACKWARD: &str = "backward";
/// Steps that the CPU queues ahead.
const AHEAD: usize = 2;

#[derive(Parser)]
struct Options {
    /// The images, which `scripts/digits` fetches if the file is not there
    #[arg(long, default_value = "target/digits.csv")]
    data: PathBuf,
    /// How the network is divided; without it both ways run
    #[arg(long, value_enum)]
    method: Vec<Method>,
    /// Numbers of micro-batches of a pipeline, one run for each
    #[arg(long, value_delimiter = ',', default_values_t = [1, 4, 8, 16])]
    micro_batches: Vec<usize>,
    /// Blocks of layers
    #[arg(long, default_value_t = 4)]
    blocks: usize,
    /// Hidden neurons of a block
    #[arg(long, default_value_t = 96)]
    hidden: usize,
    #[arg(long, default_value_t = 20)]
    steps: usize,
    /// Images of a step
    #[arg(long, default_value_t = 64)]
    batch: usize,
    /// Learning rate
    #[arg(long, default_value_t = 0.05)]
    rate: f32,
    /// The least time of the forward kernel of a block for a whole batch, in microseconds; the backward kernel takes twice as long
    #[arg(long, default_value_t = 16_000)]
    kernel_us: u64,
    /// Ranks, unless a launcher says how many there are
    #[arg(long, default_value_t = 4)]
    ranks: u32,
    /// Saves the weights in this folder, and begins with those that are there. Runs only the pipeline, once
    #[arg(long)]
    checkpoint: Option<PathBuf>,
    /// Steps between two checkpoints
    #[arg(long, default_value_t = 10)]
    every: usize,
    /// What the other ranks do if one ends
    #[arg(long, value_enum, default_value = "fail")]
    on_loss: OnLoss,
    /// RANK,STEP: this rank ends in this step, as if its host lost power
    #[arg(long, value_delimiter = ',')]
    kill: Vec<usize>,
    /// Where in this step
    #[arg(long, value_enum, default_value = "kernel", requires = "kill")]
    kill_at: Moment,
    /// Writes losses and final weights of each run to this file
    #[arg(long)]
    out: Option<PathBuf>,
    /// Draws a step of each run as a timeline
    #[arg(long)]
    svg: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Method {
    Pipeline,
    Tensor,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum OnLoss {
    Shrink,
    Fail,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Moment {
    /// In a kernel
    Kernel,
    /// When it comes to the checkpoint behind this step, of which it has saved nothing
    Save,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Schedule {
    OneForwardOneBackward,
    GPipe,
}

fn main() -> Result<()> {
    let options = Options::parse();
    // Once, before there are ranks.
    digits::fetch(&options.data)?;
    let is_killed = |rank: u32| options.kill.first() == Some(&(rank as usize));
    if LaunchEnvironment::from_env().is_ok() {
        return rank(Group::from_env()?, &options);
    }
    let mut ranks = Ranks::start(options.ranks)?;
    for rank in 0..options.ranks {
        let status = ranks.wait(rank)?;
        let is_expected =
            is_killed(rank) && options.on_loss == OnLoss::Shrink && support::was_killed(status);
        ensure!(
            status.success() || is_expected,
            "rank {rank} of {}: {status}",
            options.ranks
        );
    }
    Ok(())
}

fn rank(mut group: Group, options: &Options) -> Result<()> {
    let [size, batch] = [group.size() as usize, options.batch];
    ensure!(
        (2..=options.blocks).contains(&size),
        "{} blocks are for 2 to as many ranks",
        options.blocks
    );
    let fits = |count: &usize| (1..=64).contains(count) && batch.is_multiple_of(*count);
    let wrong = options.micro_batches.iter().find(|count| !fits(count));
    ensure!(
        wrong.is_none(),
        "{batch} images cannot be divided into {} micro-batches of 1 to 64",
        wrong.unwrap_or(&0)
    );
    ensure!(
        matches!(options.kill.len(), 0 | 2),
        "--kill takes a rank and a step"
    );
    let digits = Arc::new(Digits::read(&options.data)?);
    ensure!(
        (1..=digits.training.len()).contains(&batch),
        "there are {} images",
        digits.training.len()
    );
    if options.checkpoint.is_some() {
        let report = with_checkpoints(&mut group, options, &digits)?;
        return end(group, options, &[report]);
    }
    let chosen = |method| options.method.is_empty() || options.method.contains(&method);
    let mut reports = Vec::new();
    if chosen(Method::Pipeline) {
        let one = Schedule::OneForwardOneBackward;
        let mut runs: Vec<_> = options
            .micro_batches
            .iter()
            .map(|count| (*count, one))
            .collect();
        runs.extend(
            options
                .micro_batches
                .last()
                .map(|count| (*count, Schedule::GPipe)),
        );
        for (number, (count, schedule)) in (1..).zip(runs) {
            let network = Network::new(options);
            let mut pipeline =
                Pipeline::new(&group, options, &digits, network, (count, schedule), number)?;
            reports.push(
                pipeline
                    .train(&group, options)
                    .map_err(|error| named(&group, error))?,
            );
        }
    }
    if chosen(Method::Tensor) {
        ensure!(
            options.hidden.is_multiple_of(size),
            "{} neurons cannot be divided by {size} ranks",
            options.hidden
        );
        reports
            .push(tensor::train(&group, options, &digits).map_err(|error| named(&group, error))?);
    }
    end(group, options, &reports)
}

/// An endpoint only reports that it failed; the group has the cause.
fn named(group: &Group, error: anyhow::Error) -> anyhow::Error {
    match error.downcast::<doorbell::Error>() {
        Ok(error) => group.cause_of(error).into(),
        Err(other) => other,
    }
}

fn end(group: Group, options: &Options, reports: &[Report]) -> Result<()> {
    group.barrier()?;
    if group.rank() == 0 {
        print(options, reports, group.size())?;
    }
    group.leave()?;
    Ok(())
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What a run has done.
struct Report {
    name: String,
    micro_batches: usize,
    network: Network,
    /// The step that it has begun with.
    from: usize,
    recognized: (usize, usize),
    step: Duration,
    /// Of the application's thread, for a step.
    thread: Duration,
    /// Part of the time in which no kernel runs, mean of the ranks, and what the schedule predicts.
    idle: f64,
    predicted: f64,
    /// The most micro-batches whose inputs a rank keeps.
    kept: usize,
    /// One row for each rank.
    bars: Vec<Bar>,
}

/// The least time of a kernel.
fn last<T>(time: Duration, work: impl FnOnce() -> T) -> T {
    let begin = Instant::now();
    let result = work();
    std::thread::sleep(time.saturating_sub(begin.elapsed()));
    result
}

struct Run {
    name: &'static str,
    micro_batches: usize,
    predicted: f64,
    steps: usize,
}

fn report(
    group: &Group,
    run: Run,
    network: Network,
    digits: &Digits,
    (wall, thread, kept): (Duration, Duration, usize),
    recorder: &Recorder,
) -> Result<Report> {
    let steps = run.steps.max(1) as u32;
    let bars = recorder.take();
    let busy = busy_ms(&bars, group.rank() as usize) / 1e3;
    let idle = 1.0 - busy / wall.as_secs_f64();
    let own = [idle.to_bits(), thread.as_nanos() as u64, kept as u64];
    let all = support::gather(group, &own)?;
    let sum = |of: fn(&[u64]) -> f64| all.iter().map(|rank| of(rank)).sum::<f64>();
    let idle = sum(|rank| f64::from_bits(rank[0])) / all.len() as f64;
    let thread = sum(|rank| rank[1] as f64) / all.len() as f64;
    // The kernels of two steps, which rank 0 draws.
    let of_step = bars.len() / steps as usize;
    let from = (run.steps / 2 * of_step).min(bars.len());
    let shown = &bars[from..bars.len().min(from + 2 * of_step)];
    Ok(Report {
        name: run.name.to_owned(),
        micro_batches: run.micro_batches,
        recognized: (network.recognized(digits), digits.held_out.len()),
        from: network.losses.len() - run.steps,
        network,
        step: wall / steps,
        thread: Duration::from_nanos(thread as u64) / steps,
        idle,
        predicted: run.predicted,
        kept: all.iter().map(|rank| rank[2] as usize).max().unwrap_or(0),
        bars: gather_bars(group, shown)?,
    })
}

fn print(options: &Options, reports: &[Report], ranks: u32) -> Result<()> {
    let mut text = format!(
        "{ranks} ranks, {} blocks, {} steps of {} images; forward {} us a block and batch, backward twice that\n{:<10}{:>14}{:>10}{:>15}{:>8}{:>11}{:>7}{:>18}{:>11}\n",
        options.blocks,
        options.steps,
        options.batch,
        options.kernel_us,
        "schedule",
        "micro-batches",
        "step ms",
        "CPU thread us",
        "idle",
        "predicted",
        "kept",
        "loss",
        "held out"
    );
    for report in reports {
        let of = |at: Option<&f32>| at.copied().unwrap_or(f32::NAN);
        let losses = &report.network.losses;
        let (right, all) = report.recognized;
        writeln!(
            text,
            "{:<10}{:>14}{:>10.2}{:>15.0}{:>7.1}%{:>10.1}%{:>7}{:>18}{:>10.1}%",
            report.name,
            report.micro_batches,
            report.step.as_secs_f64() * 1e3,
            report.thread.as_secs_f64() * 1e6,
            100.0 * report.idle,
            100.0 * report.predicted,
            report.kept,
            format!("{:.3} -> {:.4}", of(losses.first()), of(losses.last())),
            100.0 * right as f64 / all as f64
        )?;
    }
    std::io::stdout().write_all(text.as_bytes())?;
    if let Some(file) = &options.out {
        let bits = |values: &[f32]| -> String {
            values
                .iter()
                .map(|value| format!(" {:08x}", value.to_bits()))
                .collect()
        };
        let mut text = String::new();
        for report in reports {
            writeln!(text, "{} {}", report.name, report.micro_batches)?;
            writeln!(text, "losses{}", bits(&report.network.losses))?;
            let weights: Vec<f32> = report
                .network
                .blocks
                .iter()
                .flatten()
                .chain(&report.network.head)
                .copied()
                .collect();
            writeln!(text, "weights{}", bits(&weights))?;
            writeln!(text, "from {} kept {}", report.from, report.kept)?;
        }
        std::fs::write(file, text).with_context(|| file.display().to_string())?;
    }
    if let Some(file) = &options.svg {
        draw(file, reports, ranks as usize)?;
    }
    Ok(())
}

/// Two steps of each run, one below the other.
fn draw(file: &Path, reports: &[Report], ranks: usize) -> Result<()> {
    let (mut rows, mut bars) = (Vec::new(), Vec::new());
    for (number, report) in reports.iter().enumerate() {
        rows.extend(
            (0..ranks).map(|rank| format!("{} {}, rank {rank}", report.name, report.micro_batches)),
        );
        let of_first = report.bars.iter().filter(|bar| bar.row == 0);
        let from_ms = of_first.map(|bar| bar.from_ms).fold(f64::MAX, f64::min);
        let to_ms = from_ms + 2.0 * report.step.as_secs_f64() * 1e3;
        let shown = between(&report.bars, from_ms, to_ms).into_iter();
        bars.extend(shown.map(|bar| Bar {
            row: ranks * number + bar.row,
            ..bar
        }));
    }
    support::timeline(file, "Two steps of each run", &rows, &bars)
}
