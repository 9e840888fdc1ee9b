//! One line of a benchmark: what was measured, and the figures.

use std::fmt;

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// The two ways to follow a kernel with a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Loop {
    /// The CPU waits for the stream, posts, and polls for the completion.
    Sync,
    /// Kernel, transfer and wait are queued on the stream; the CPU is free.
    Async,
}

impl fmt::Display for Loop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Sync => "sync",
            Self::Async => "async",
        })
    }
}

/// What a run is taken on; the same for all of its rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Setup {
    /// The device.
    pub nic: String,
    /// The executor.
    pub stream: String,
    /// The control path in force.
    pub path: String,
    /// Why this path, and why no better one.
    pub why: String,
    /// The GPU, if there is one: its name, its driver, where the messages lie.
    pub gpu: Option<String>,
}

/// A row as `--json` prints it. The keys are an interface: they do not change.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BenchRow {
    /// The device.
    pub nic: String,
    /// The executor.
    pub stream: String,
    /// The control path.
    pub path: String,
    /// Which of the two loops.
    #[serde(rename = "loop")]
    pub kind: Loop,
    /// Bytes of one message.
    pub size_bytes: u64,
    /// Length of the kernel before each message.
    pub kernel_us: u64,
    /// Iterations measured.
    pub iterations: u64,
    /// Microseconds of one iteration.
    pub us_per_iter: Spread,
    /// Messages a second, over the whole measurement.
    pub msgs_per_s: f64,
    /// CPU time of the application thread an iteration, in microseconds.
    pub app_cpu_us_per_iter: f64,
}

/// How samples spread, in microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Spread {
    /// The shortest.
    pub min: f64,
    /// Half of the samples are no longer.
    pub p50: f64,
    /// The mean.
    pub avg: f64,
    /// 99 of 100 samples are no longer.
    pub p99: f64,
}

impl Spread {
    /// Spread of `samples_ns`, which it sorts; none of nothing. Percentiles are nearest-rank: each is a sample that was taken.
    pub fn of(samples_ns: &mut [u64]) -> Option<Self> {
        if samples_ns.is_empty() {
            return None;
        }
        samples_ns.sort_unstable();
        let sorted = &*samples_ns;
        let rank = |percent: usize| sorted[(sorted.len() * percent).div_ceil(100).max(1) - 1];
        let total: u128 = sorted.iter().map(|&ns| u128::from(ns)).sum();
        Some(Self {
            min: micros(sorted[0] as f64),
            p50: micros(rank(50) as f64),
            avg: micros(total as f64 / sorted.len() as f64),
            p99: micros(rank(99) as f64),
        })
    }
}

/// Nanoseconds as microseconds, rounded to the nanosecond: digits below are noise in a JSON file.
pub fn micros(ns: f64) -> f64 {
    ns.round() / 1e3
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// A row of made-up figures, for tests of how rows are shown.
    pub fn sample_row(kind: Loop, size_bytes: u64, kernel_us: u64) -> BenchRow {
        let spread = Spread {
            min: 1.0,
            p50: 2.0 + kernel_us as f64 + size_bytes as f64 / 4096.0,
            avg: 3.25,
            p99: 1234.567,
        };
        BenchRow {
            nic: "nic0".into(),
            stream: "host".into(),
            path: "direct".into(),
            kind,
            size_bytes,
            kernel_us,
            iterations: 4000,
            us_per_iter: spread,
            msgs_per_s: 123456.7,
            app_cpu_us_per_iter: 0.125,
        }
    }

    #[test]
    fn percentiles_are_nearest_rank() {
        let mut hundred: Vec<u64> = (1..=100).rev().map(|n| n * 1000).collect();
        let spread = Spread::of(&mut hundred).unwrap();
        assert_eq!(
            (spread.min, spread.p50, spread.avg, spread.p99),
            (1.0, 50.0, 50.5, 99.0)
        );

        let mut three = [9000, 1000, 2000];
        let spread = Spread::of(&mut three).unwrap();
        assert_eq!(
            (spread.min, spread.p50, spread.avg, spread.p99),
            (1.0, 2.0, 4.0, 9.0)
        );

        let one = Spread::of(&mut [1501]).unwrap();
        assert_eq!(
            (one.min, one.p50, one.avg, one.p99),
            (1.501, 1.501, 1.501, 1.501)
        );
        assert_eq!(Spread::of(&mut []), None);
    }

    #[test]
    fn sums_past_64_bits_do_not_wrap() {
        let spread = Spread::of(&mut [u64::MAX, u64::MAX, u64::MAX]).unwrap();
        assert!((spread.avg / (u64::MAX as f64 / 1e3) - 1.0).abs() < 1e-9);
    }

    #[test]
    fn json_has_exactly_the_promised_keys() {
        let row = sample_row(Loop::Async, 64, 10);
        let text = serde_json::to_string(&row).unwrap();
        assert_eq!(
            text,
            "{\"nic\":\"nic0\",\"stream\":\"host\",\"path\":\"direct\",\"loop\":\"async\",\"size_bytes\":64,\"kernel_us\":10,\
             \"iterations\":4000,\"us_per_iter\":{\"min\":1.0,\"p50\":12.015625,\"avg\":3.25,\"p99\":1234.567},\
             \"msgs_per_s\":123456.7,\"app_cpu_us_per_iter\":0.125}"
        );
        assert_eq!(serde_json::from_str::<BenchRow>(&text).unwrap(), row);
        let sync = serde_json::to_value(sample_row(Loop::Sync, 8, 0)).unwrap();
        assert_eq!(sync["loop"], "sync");
    }
}
