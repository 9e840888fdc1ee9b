//! The plot of collective operations: time, bandwidth, application CPU and the library's prediction against the size.

use anyhow::Result;

use super::super::chart::{Chart, LEAST, LineStyle, Panel, Series};
use super::super::kinds::Loop;
use super::row::{CollectiveRow, CollectiveSetup};

/// Plots `rows` in four panels. Each algorithm and loop is a line.
///
/// # Errors
/// No rows, operations without data, and those of the plotting library.
pub fn svg(setup: &CollectiveSetup, rows: &[CollectiveRow]) -> Result<String> {
    let rows: Vec<&CollectiveRow> = rows.iter().filter(|row| row.case.size_bytes > 0).collect();
    anyhow::ensure!(
        !rows.is_empty(),
        "there are no rows to plot: a plot is over the size"
    );
    let mut lines: Vec<(String, LineStyle)> = Vec::new();
    let mut algorithms = Vec::new();
    for row in &rows {
        let name = row.series();
        if lines.iter().any(|line| line.0 == name) {
            continue;
        }
        let asked = row.case.algorithm;
        let known = algorithms.iter().position(|it| *it == asked);
        let colour = known.unwrap_or_else(|| {
            algorithms.push(asked);
            algorithms.len() - 1
        });
        let is_dashed = row.case.kind == Loop::Sync;
        lines.push((name, LineStyle { colour, is_dashed }));
    }
    let panel = |title, unit, value: fn(&CollectiveRow) -> f64| Panel {
        title,
        unit,
        series: lines
            .iter()
            .map(|(name, style)| {
                let of_line = rows.iter().filter(|row| row.series() == *name);
                let point = |row: &&CollectiveRow| (row.case.size_bytes as f64, value(row));
                Series {
                    style: *style,
                    points: of_line.map(point).collect(),
                    tops: Vec::new(),
                }
            })
            .collect(),
    };
    let panels = [
        panel("Time of an operation", "microseconds", |row| row.time_us),
        panel("Bus bandwidth", "GB/s", |row| row.busbw),
        panel(
            "Application CPU time of an operation",
            "microseconds",
            |row| row.app_cpu_us,
        ),
        panel("Predicted time / measured time", "ratio", |row| {
            row.predicted_us.max(LEAST) / row.time_us.max(LEAST)
        }),
    ];
    let CollectiveSetup { machine, plan, .. } = setup;
    let version = env!("CARGO_PKG_VERSION");
    let path = setup.path.as_ref();
    let path = path.map_or(String::new(), |path| format!(", path {}", path.control));
    let gpu = setup.gpu.as_deref();
    let gpu = gpu.map_or(String::new(), |gpu| format!(", {gpu}"));
    let chart = Chart {
        titles: [
            format!(
                "doorbell {version} bench collective, {} of {} ranks: device {}, stream {}{path}",
                plan.op, setup.ranks, setup.device, setup.stream
            ),
            format!(
                "{}: {}, {} CPUs{gpu}; processes={} type={} {}",
                machine.host,
                machine.cpu,
                machine.cpus,
                setup.processes,
                plan.data,
                plan.describe()
            ),
        ],
        legend: lines.clone(),
        panels,
    };
    chart.svg()
}
