//! One measurement: what was measured, and its figures.

use anyhow::Result;
use serde_json::Value;

use super::kinds::Loop;
use super::machine::Machine;
use super::options::Plan;
use super::plot;
use super::report::ReportRow;
use super::table::{TableHead, TableRow};

/// Version of the columns of [`BenchRow`]. It changes when a column is renamed, removed, or means something else.
pub const SCHEMA: u32 = 2;

/// What all rows of a run have in common.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Setup {
    /// Where it ran.
    pub machine: Machine,
    /// What was measured.
    pub plan: Plan,
    /// Processes that took part: 1 or 2.
    pub processes: u32,
    /// The device.
    pub device: String,
    /// The kind of stream.
    pub stream: String,
    /// The control path in force.
    pub path: String,
    /// Why this path is in force, and why each better one is not.
    pub reason: String,
    /// Where the messages lie: `host` or `gpu`.
    pub memory: String,
    /// Name of the GPU, if there is one.
    pub gpu: Option<String>,
    /// The GPU's driver and the options for it, for the table.
    pub gpu_details: Option<String>,
}

/// One measurement.
#[derive(Clone, Debug, PartialEq)]
pub struct BenchRow {
    /// Which of the two loops.
    pub kind: Loop,
    /// Bytes of one message.
    pub size_bytes: u64,
    /// Length of the kernel before each message, in microseconds.
    pub kernel_us: u64,
    /// Iterations that were measured.
    pub iterations: u64,
    /// What one sample of the time is.
    pub sample: Sample,
    /// Time of one iteration.
    pub time: LatencyStats,
    /// Messages a second in one direction, over the whole measurement.
    pub messages_per_s: f64,
    /// CPU time of the application's thread per iteration, in microseconds.
    pub app_cpu_us: f64,
}

/// What one sample of the time is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sample {
    /// One iteration.
    Iteration,
    /// The mean of one batch, by the GPU's clock.
    BatchMean,
}

impl BenchRow {
    /// Bandwidth in one direction, in 10^9 bytes a second.
    pub fn gb_per_s(&self) -> f64 {
        (self.size_bytes as f64 * self.messages_per_s / 1e3).round() / 1e6
    }
}

impl ReportRow for BenchRow {
    type Setup = Setup;

    fn table_head(setup: &Setup) -> String {
        TableHead(setup).to_string()
    }

    fn table_line(&self, _: &Setup) -> String {
        TableRow(self).to_string()
    }

    /// The names are an interface (see [`SCHEMA`]).
    fn columns(&self, setup: &Setup) -> Vec<(&'static str, Value)> {
        let Setup { machine, plan, .. } = setup;
        let sample = match self.sample {
            Sample::Iteration => "iteration",
            Sample::BatchMean => "batch mean",
        };
        vec![
            ("schema", SCHEMA.into()),
            ("version", env!("CARGO_PKG_VERSION").into()),
            ("host", machine.host.as_str().into()),
            ("cpu", machine.cpu.as_str().into()),
            ("cpus", machine.cpus.into()),
            ("gpu", setup.gpu.as_deref().into()),
            ("device", setup.device.as_str().into()),
            ("stream", setup.stream.as_str().into()),
            ("path", setup.path.as_str().into()),
            ("memory", setup.memory.as_str().into()),
            ("processes", setup.processes.into()),
            ("test", plan.exchange.to_string().into()),
            ("op", plan.op.to_string().into()),
            ("loop", self.kind.to_string().into()),
            ("size_bytes", self.size_bytes.into()),
            ("kernel_us", self.kernel_us.into()),
            ("no_kernel", plan.no_kernel.into()),
            ("validate", plan.validate.into()),
            ("eager_bytes", plan.eager_bytes.into()),
            ("steps", plan.steps.into()),
            ("batches", plan.batches.into()),
            ("warmup_iterations", plan.warmup.into()),
            ("iterations", self.iterations.into()),
            ("sample", sample.into()),
            ("time_min_us", self.time.min_us.into()),
            ("time_p50_us", self.time.p50_us.into()),
            ("time_avg_us", self.time.avg_us.into()),
            ("time_p99_us", self.time.p99_us.into()),
            ("time_p999_us", self.time.p999_us.into()),
            ("messages_per_s", self.messages_per_s.into()),
            ("gb_per_s", self.gb_per_s().into()),
            ("app_cpu_us", self.app_cpu_us.into()),
        ]
    }

    fn plot(setup: &Setup, rows: &[BenchRow]) -> Result<String> {
        plot::svg(setup, rows)
    }
}

/// How samples of a time spread.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LatencyStats {
    /// The shortest.
    pub min_us: f64,
    /// Half of the samples are no longer.
    pub p50_us: f64,
    /// The mean.
    pub avg_us: f64,
    /// 99 % of the samples are no longer.
    pub p99_us: f64,
    /// 99.9 % of the samples are no longer. Of fewer than 1,000 samples, the longest.
    pub p999_us: f64,
}

impl LatencyStats {
    /// Spread of `samples_ns`, which it sorts; `None` if there are no samples. Percentiles are nearest-rank: each is a sample that was taken.
    pub fn of(samples_ns: &mut [u64]) -> Option<Self> {
        if samples_ns.is_empty() {
            return None;
        }
        samples_ns.sort_unstable();
        let sorted = &*samples_ns;
        let rank = |permille: usize| {
            let index = (sorted.len() * permille).div_ceil(1000).max(1) - 1;
            micros(sorted[index] as f64)
        };
        let total: u128 = sorted.iter().map(|&ns| u128::from(ns)).sum();
        Some(Self {
            min_us: micros(sorted[0] as f64),
            p50_us: rank(500),
            avg_us: micros(total as f64 / sorted.len() as f64),
            p99_us: rank(990),
            p999_us: rank(999),
        })
    }
}

/// Nanoseconds as microseconds, rounded to the nanosecond: digits below are noise in a file.
pub fn micros(ns: f64) -> f64 {
    ns.round() / 1e3
}

#[cfg(test)]
pub mod tests {
    use super::super::options::tests::sample_plan;
    use super::*;

    /// A row of made-up figures, for tests of how rows are shown.
    pub fn sample_row(kind: Loop, size_bytes: u64, kernel_us: u64) -> BenchRow {
        let time = LatencyStats {
            min_us: 1.0,
            p50_us: 2.0 + kernel_us as f64 + size_bytes as f64 / 4096.0,
            avg_us: 3.25,
            p99_us: 1234.567,
            p999_us: 2345.678,
        };
        BenchRow {
            kind,
            size_bytes,
            kernel_us,
            iterations: 4000,
            sample: Sample::Iteration,
            time,
            messages_per_s: 123456.7,
            app_cpu_us: 0.125,
        }
    }

    /// A setup to go with it.
    pub fn sample_setup() -> Setup {
        Setup {
            machine: Machine {
                host: "host0".into(),
                cpu: "A CPU".into(),
                cpus: 8,
            },
            plan: sample_plan(),
            processes: 1,
            device: "nic<0>".into(),
            stream: "host".into(),
            path: "direct".into(),
            reason: "the stream stores to the UAR".into(),
            memory: "host".into(),
            gpu: None,
            gpu_details: None,
        }
    }

    #[test]
    fn percentiles_are_nearest_rank() {
        let of = |samples: &mut [u64]| {
            let spread = LatencyStats::of(samples).unwrap();
            let LatencyStats {
                min_us,
                p50_us,
                avg_us,
                p99_us,
                p999_us,
            } = spread;
            (min_us, p50_us, avg_us, p99_us, p999_us)
        };
        let mut thousand: Vec<u64> = (1..=1000).rev().map(|n| n * 1000).collect();
        assert_eq!(of(&mut thousand), (1.0, 500.0, 500.5, 990.0, 999.0));
        assert_eq!(of(&mut [9000, 1000, 2000]), (1.0, 2.0, 4.0, 9.0, 9.0));
        assert_eq!(of(&mut [1501]), (1.501, 1.501, 1.501, 1.501, 1.501));
        assert_eq!(LatencyStats::of(&mut []), None);
    }

    #[test]
    fn sums_past_64_bits_do_not_wrap() {
        let spread = LatencyStats::of(&mut [u64::MAX, u64::MAX, u64::MAX]).unwrap();
        assert!((spread.avg_us / (u64::MAX as f64 / 1e3) - 1.0).abs() < 1e-9);
    }

    #[test]
    fn bandwidth_is_of_one_direction_in_decimal_gigabytes() {
        let mut row = sample_row(Loop::Sync, 65536, 0);
        row.messages_per_s = 1e6;
        assert_eq!(row.gb_per_s(), 65.536);
    }

    #[test]
    fn columns_are_the_promised_ones() {
        let columns = sample_row(Loop::Async, 64, 10).columns(&sample_setup());
        let text: Vec<String> = columns
            .iter()
            .map(|(name, value)| format!("{name}={value}"))
            .collect();
        let version = env!("CARGO_PKG_VERSION");
        assert_eq!(
            text.join(" "),
            format!(
                "schema=2 version=\"{version}\" host=\"host0\" cpu=\"A CPU\" cpus=8 gpu=null device=\"nic<0>\" stream=\"host\" \
                 path=\"direct\" memory=\"host\" processes=1 test=\"loop\" op=\"write\" loop=\"async\" size_bytes=64 kernel_us=10 \
                 no_kernel=false validate=false eager_bytes=null steps=3 batches=2 warmup_iterations=6 iterations=4000 sample=\"iteration\" \
                 time_min_us=1.0 time_p50_us=12.015625 time_avg_us=3.25 time_p99_us=1234.567 time_p999_us=2345.678 \
                 messages_per_s=123456.7 gb_per_s=0.007901 app_cpu_us=0.125"
            )
        );
    }
}
