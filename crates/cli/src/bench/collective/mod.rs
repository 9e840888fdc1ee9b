//! `doorbell bench collective`: collective operations between the threads of this process, or the processes of a launcher, with the columns of nccl-tests.

mod contents;
mod measurement;
mod options;
mod plot;
mod ranks;
mod row;

use anyhow::{Result, bail, ensure};
use doorbell::Device;

use super::backend::Backend;
use super::kinds::{MemoryKind, StreamOptions};
use super::report::{self, BenchReport};
use super::trigger::TriggerKind;
use contents::Contents;
use measurement::{LoopStreams, RankMeasurement};
pub use options::CollectiveOptions;
use options::CollectivePlan;
use ranks::{Meeting, Rank, process_of_group, threads};
use row::{CollectiveRow, CollectiveSetup};

/// Runs the benchmark.
///
/// # Errors
/// Unusable devices, streams, groups and files; failures of an operation; with `--check` a wrong element.
pub fn run(plan: &CollectivePlan, options: &CollectiveOptions) -> Result<()> {
    let output = options.output();
    if let Some(plot) = &output.plot {
        report::check_plot(plot)?;
    }
    let device = Device::open(options.device())?;
    let backend = Backend::new(StreamOptions {
        stream: options.stream(),
        memory: MemoryKind::Host,
        graph: false,
        trigger: TriggerKind::Stream,
        gpu: options.gpu(),
    })?;
    let measured = |rank: &mut Rank, meeting: &Meeting| {
        let result = measure_all(rank, meeting, &backend, plan, options);
        result.map_err(|error| meeting.fail(error))
    };
    let wrong = match options.ranks() {
        Some(count) => threads(&device, count, plan, measured)?,
        None => process_of_group(&device, plan, measured)?,
    };
    ensure!(wrong == 0, "{wrong} elements are wrong");
    Ok(())
}

/// Measures every case as one rank. The first rank reports. Returns how many elements were wrong on all ranks.
fn measure_all(
    rank: &mut Rank,
    meeting: &Meeting,
    backend: &Backend,
    plan: &CollectivePlan,
    options: &CollectiveOptions,
) -> Result<u64> {
    let (number, count) = (rank.communicator.rank(), rank.communicator.size());
    plan.check_ranks(count)?;
    let streams = LoopStreams::new(backend, number, plan)?;
    let contents = Contents::new(plan, number, count);
    let mut measurement = RankMeasurement::new(rank, &streams, plan, contents)?;
    let cases = measurement.cases()?;
    if cases.is_empty() {
        let op = plan.op;
        bail!("no algorithm of {op} runs on {} streams", backend.name());
    }
    let mut report = match number {
        0 => {
            let setup = CollectiveSetup::new(plan, measurement.rank(), backend, meeting);
            let out = std::io::stdout().lock();
            let report = BenchReport::begin(out, options.output(), setup, cases.len())?;
            Some(report)
        }
        _ => None,
    };
    let mut wrong = 0;
    for case in cases {
        if let Some(report) = &report {
            report.announce(case.to_string());
        }
        let own = measurement.measure(case)?;
        let all = meeting.exchange(number, &own.figures)?;
        let row = CollectiveRow::new(plan, case, count, &own, &all);
        wrong += row.wrong.unwrap_or(0);
        if let Some(report) = &mut report {
            report.row(row)?;
        }
    }
    if let Some(report) = report {
        report.end()?;
    }
    measurement.finish()?;
    Ok(wrong)
}
