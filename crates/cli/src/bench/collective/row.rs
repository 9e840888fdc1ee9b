//! One measurement of a collective operation, with the columns of nccl-tests.

use anyhow::Result;
use doorbell::PathReport;
use serde_json::Value;

use super::super::backend::Backend;
use super::super::machine::Machine;
use super::super::report::ReportRow;
use super::super::row::micros;
use super::measurement::{Figures, Measured};
use super::options::{CollectiveCase, CollectivePlan};
use super::plot;
use super::ranks::{Meeting, Rank};

/// Version of the columns. It changes when a column is renamed, removed, or means something else.
pub const SCHEMA: u32 = 1;

/// What all rows of a run have in common.
#[derive(Clone, Debug)]
pub struct CollectiveSetup {
    /// Where it ran.
    pub machine: Machine,
    /// What was measured.
    pub plan: CollectivePlan,
    /// Number of ranks.
    pub ranks: u32,
    /// Number of processes.
    pub processes: u32,
    /// The device.
    pub device: String,
    /// The kind of stream.
    pub stream: String,
    /// The control path of its queues, and why no better one; none for a single rank.
    pub path: Option<PathReport>,
    /// Name of the GPU, if there is one.
    pub gpu: Option<String>,
}

/// One measurement.
#[derive(Clone, Debug, PartialEq)]
pub struct CollectiveRow {
    /// Which loop, how many bytes, and which algorithm was asked for.
    pub case: CollectiveCase,
    /// The algorithm that carried the operation out.
    pub algorithm: &'static str,
    /// Number of elements of the longest buffer.
    pub elements: u64,
    /// Time of an operation on the slowest rank.
    pub time_us: f64,
    /// Bytes of the longest buffer by the time, in 10^9 bytes a second.
    pub algbw: f64,
    /// The same times what the busiest link carries of each byte.
    pub busbw: f64,
    /// Wrong elements on all ranks, if they were checked.
    pub wrong: Option<u64>,
    /// The prediction of the library.
    pub predicted_us: f64,
    /// CPU time of the application's thread for an operation, mean of the ranks.
    pub app_cpu_us: f64,
}

impl CollectiveSetup {
    /// That of this process.
    pub fn new(
        plan: &CollectivePlan,
        rank: &Rank,
        backend: &Backend,
        meeting: &Meeting,
    ) -> CollectiveSetup {
        CollectiveSetup {
            machine: Machine::this(),
            plan: plan.clone(),
            ranks: rank.communicator.size(),
            processes: meeting.processes(),
            device: rank.communicator.domain().device().name().to_owned(),
            stream: backend.name().to_owned(),
            path: rank.communicator.path(),
            gpu: backend.gpu(),
        }
    }
}

impl CollectiveRow {
    /// The row of a case, from the figures of all ranks.
    pub fn new(
        plan: &CollectivePlan,
        case: CollectiveCase,
        ranks: u32,
        own: &Measured,
        all: &[Figures],
    ) -> CollectiveRow {
        let operations = plan.iterations as f64;
        let slowest = all.iter().map(|it| it.elapsed_ns).max().unwrap_or(0) as f64;
        let cpu: u64 = all.iter().map(|it| it.cpu_ns).sum();
        let of_one_ns = slowest / operations;
        let rounded = |value: f64| (value * 1e6).round() / 1e6;
        let algbw = own.size_bytes as f64 / of_one_ns.max(1e-3);
        let wrong = all.iter().map(|it| it.wrong);
        CollectiveRow {
            case: CollectiveCase {
                size_bytes: own.size_bytes,
                ..case
            },
            algorithm: own.algorithm.name(),
            elements: own.size_bytes / plan.data.bytes(),
            time_us: micros(of_one_ns),
            algbw: rounded(algbw),
            busbw: rounded(algbw * plan.op.bus_factor(ranks)),
            wrong: wrong.fold(None, |sum, it| it.map(|it| it + sum.unwrap_or(0)).or(sum)),
            predicted_us: micros(own.predicted_us * 1e3),
            app_cpu_us: micros(cpu as f64 / operations / all.len().max(1) as f64),
        }
    }

    /// The name of its line in a plot.
    pub fn series(&self) -> String {
        let algorithm = self.case.algorithm.map_or("auto", |it| it.name());
        format!("{algorithm}, {}", self.case.kind)
    }
}

impl ReportRow for CollectiveRow {
    type Setup = CollectiveSetup;

    fn table_head(setup: &CollectiveSetup) -> String {
        let CollectiveSetup {
            machine,
            plan,
            ranks,
            processes,
            device,
            stream,
            path,
            gpu,
        } = setup;
        let version = env!("CARGO_PKG_VERSION");
        let path = path.as_ref().map(|path| format!(" path={path}"));
        let gpu = gpu.as_deref().map(|gpu| format!(" gpu={gpu:?}"));
        format!(
            "# doorbell {version} bench {}\n# host={} cpu={:?} cpus={}\n# ranks={ranks} processes={processes} device={device} stream={stream}{}{}\n\
             {:>11} {:>11} {:>5} {:>6} {:>4} {:>18} {:>6} {:>12} {:>13} {:>13} {:>7} {:>14} {:>12}",
            plan.describe(),
            machine.host,
            machine.cpu,
            machine.cpus,
            gpu.unwrap_or_default(),
            path.unwrap_or_default(),
            "#size[B]",
            "count",
            "type",
            "redop",
            "root",
            "algorithm",
            "loop",
            "time[us]",
            "algbw[GB/s]",
            "busbw[GB/s]",
            "#wrong",
            "predicted[us]",
            "app_cpu[us]",
        )
    }

    fn table_line(&self, setup: &CollectiveSetup) -> String {
        let plan = &setup.plan;
        let wrong = self.wrong.map_or("N/A".into(), |wrong| wrong.to_string());
        format!(
            "{:>11} {:>11} {:>5} {:>6} {:>4} {:>18} {:>6} {:>12.2} {:>13.4} {:>13.4} {wrong:>7} {:>14.2} {:>12.3}",
            self.case.size_bytes,
            self.elements,
            plan.data.name(),
            redop(plan).unwrap_or("none"),
            root(plan).map_or(-1, i64::from),
            self.algorithm,
            self.case.kind,
            self.time_us,
            self.algbw,
            self.busbw,
            self.predicted_us,
            self.app_cpu_us,
        )
    }

    fn columns(&self, setup: &CollectiveSetup) -> Vec<(&'static str, Value)> {
        let CollectiveSetup {
            machine,
            plan,
            ranks,
            processes,
            device,
            stream,
            path,
            gpu,
        } = setup;
        vec![
            ("schema", SCHEMA.into()),
            ("version", env!("CARGO_PKG_VERSION").into()),
            ("host", machine.host.as_str().into()),
            ("cpu", machine.cpu.as_str().into()),
            ("cpus", machine.cpus.into()),
            ("gpu", gpu.as_deref().into()),
            ("device", device.as_str().into()),
            ("stream", stream.as_str().into()),
            (
                "path",
                path.as_ref().map(|path| path.control.to_string()).into(),
            ),
            ("ranks", (*ranks).into()),
            ("processes", (*processes).into()),
            ("op", plan.op.name().into()),
            ("in_place", plan.in_place.into()),
            ("matched", plan.matched.into()),
            ("measured_costs", plan.measure_costs.into()),
            ("loop", self.case.kind.to_string().into()),
            ("size_bytes", self.case.size_bytes.into()),
            ("count", self.elements.into()),
            ("type", plan.data.name().into()),
            ("redop", redop(plan).into()),
            ("root", root(plan).into()),
            (
                "algorithm_asked",
                self.case.algorithm.map_or("auto", |it| it.name()).into(),
            ),
            ("algorithm", self.algorithm.into()),
            ("eager_bytes", plan.eager_bytes.into()),
            ("in_flight", plan.in_flight.into()),
            ("warmup_iterations", plan.warmup.into()),
            ("iterations", plan.iterations.into()),
            ("time_us", self.time_us.into()),
            ("algbw_gb_per_s", self.algbw.into()),
            ("busbw_gb_per_s", self.busbw.into()),
            ("wrong", self.wrong.into()),
            ("predicted_us", self.predicted_us.into()),
            ("app_cpu_us", self.app_cpu_us.into()),
        ]
    }

    fn plot(setup: &CollectiveSetup, rows: &[CollectiveRow]) -> Result<String> {
        plot::svg(setup, rows)
    }
}

fn redop(plan: &CollectivePlan) -> Option<&'static str> {
    plan.op.reduces().then(|| plan.reduce.name())
}

fn root(plan: &CollectivePlan) -> Option<u32> {
    plan.op.has_root().then_some(plan.root)
}
