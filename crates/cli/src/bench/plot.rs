//! The plot of the loops: time, bandwidth and application CPU against the message size, and the ratios of the two loops.

use anyhow::Result;

use super::chart::{Chart, LEAST, LineStyle, Panel, Series};
use super::kinds::Loop;
use super::row::{BenchRow, Setup};

/// Plots `rows` in four panels. Each loop and kernel length is a line.
///
/// # Errors
/// No rows, and those of the plotting library.
pub fn svg(setup: &Setup, rows: &[BenchRow]) -> Result<String> {
    let lines = lines(rows);
    anyhow::ensure!(!lines.is_empty(), "there are no rows to plot");
    let mut time = panel(
        "Time per iteration: p50, bars up to p99",
        "microseconds",
        &lines,
        |row| row.time.p50_us,
    );
    for (series, line) in time.series.iter_mut().zip(&lines) {
        series.tops = line.rows.iter().map(|row| row.time.p99_us).collect();
    }
    let name = |line: &RowGroup<'_>| format!("{}, kernel {} us", line.kind, line.kernel_us);
    let chart = Chart {
        titles: titles(setup),
        legend: lines.iter().map(|line| (name(line), line.style)).collect(),
        panels: [
            time,
            panel("Bandwidth in one direction", "GB/s", &lines, |row| {
                row.gb_per_s()
            }),
            panel(
                "Application CPU time per iteration",
                "microseconds",
                &lines,
                |row| row.app_cpu_us,
            ),
            ratios(&lines),
        ],
    };
    chart.svg()
}

/// The rows of one loop and one kernel length, shortest message first.
struct RowGroup<'a> {
    kind: Loop,
    kernel_us: u64,
    style: LineStyle,
    rows: Vec<&'a BenchRow>,
}

fn lines(rows: &[BenchRow]) -> Vec<RowGroup<'_>> {
    let mut kernels: Vec<u64> = rows.iter().map(|row| row.kernel_us).collect();
    kernels.sort_unstable();
    kernels.dedup();
    let mut lines = Vec::new();
    for (colour, &kernel_us) in kernels.iter().enumerate() {
        for kind in [Loop::Sync, Loop::Async] {
            let mut of_line: Vec<&BenchRow> = rows
                .iter()
                .filter(|row| row.kernel_us == kernel_us && row.kind == kind)
                .collect();
            of_line.sort_by_key(|row| row.size_bytes);
            if !of_line.is_empty() {
                let style = LineStyle {
                    colour,
                    is_dashed: kind == Loop::Sync,
                };
                lines.push(RowGroup {
                    kind,
                    kernel_us,
                    style,
                    rows: of_line,
                });
            }
        }
    }
    lines
}

fn panel<'a>(
    title: &'a str,
    unit: &'a str,
    lines: &[RowGroup<'_>],
    value: impl Fn(&BenchRow) -> f64,
) -> Panel<'a> {
    let points = |line: &RowGroup<'_>| {
        let rows = line.rows.iter();
        rows.map(|row| (row.size_bytes as f64, value(row)))
            .collect()
    };
    let series = lines.iter().map(|line| Series {
        style: line.style,
        points: points(line),
        tops: Vec::new(),
    });
    Panel {
        title,
        unit,
        series: series.collect(),
    }
}

/// Ratios of the synchronous to the asynchronous loop: of CPU time, and dashed of time. Empty unless both were measured.
fn ratios(lines: &[RowGroup<'_>]) -> Panel<'static> {
    let mut series = Vec::new();
    for pair in lines.windows(2) {
        let [sync, asynchronous] = pair else { continue };
        if sync.kernel_us != asynchronous.kernel_us {
            continue;
        }
        let ratio = |is_dashed, value: fn(&BenchRow) -> f64| Series {
            style: LineStyle {
                is_dashed,
                ..sync.style
            },
            points: (sync.rows.iter())
                .filter_map(|row| {
                    let same = |other: &&&BenchRow| other.size_bytes == row.size_bytes;
                    let other = asynchronous.rows.iter().find(same)?;
                    let ratio = value(row).max(LEAST) / value(other).max(LEAST);
                    Some((row.size_bytes as f64, ratio))
                })
                .collect(),
            tops: Vec::new(),
        };
        series.push(ratio(false, |row| row.app_cpu_us));
        series.push(ratio(true, |row| row.time.p50_us));
    }
    Panel {
        title: "Ratio sync / async: CPU time (solid), time (dashed)",
        unit: "ratio",
        series,
    }
}

fn titles(setup: &Setup) -> [String; 2] {
    let Setup { machine, plan, .. } = setup;
    let version = env!("CARGO_PKG_VERSION");
    let gpu = setup.gpu.as_deref();
    let gpu = gpu.map_or(String::new(), |gpu| {
        format!(", {gpu}, messages in {} memory", setup.memory)
    });
    [
        format!(
            "doorbell {version} bench {}, op {}: device {}, stream {}, path {}",
            plan.exchange, plan.op, setup.device, setup.stream, setup.path
        ),
        format!(
            "{}: {}, {} CPUs{gpu}; processes={} {}",
            machine.host,
            machine.cpu,
            machine.cpus,
            setup.processes,
            plan.settings()
        ),
    ]
}

#[cfg(test)]
mod tests {
    use super::super::chart::tests::{check_marks, height};
    use super::super::row::tests::{sample_row, sample_setup};
    use super::*;

    fn rows(sizes: std::ops::RangeInclusive<u32>) -> Vec<BenchRow> {
        let mut rows = Vec::new();
        for exponent in sizes.rev() {
            for kernel_us in [0, 10] {
                for kind in [Loop::Sync, Loop::Async] {
                    let mut row = sample_row(kind, 1 << exponent, kernel_us);
                    if kind == Loop::Sync {
                        row.time.p50_us += 3.0;
                        row.app_cpu_us = row.time.p50_us;
                    }
                    rows.push(row);
                }
            }
        }
        rows
    }

    #[test]
    fn plot_has_its_panels_lines_and_marks() {
        let svg = svg(&sample_setup(), &rows(3..=16)).unwrap();
        for part in [
            "Time per iteration",
            "p99",
            "GB/s",
            "Application CPU time",
            "Ratio sync / async",
            "sync, kernel 0 us",
            "async, kernel 10 us",
            "device nic&lt;0&gt;, stream host, path direct",
            "bench loop, op write",
            "host0: A CPU, 8 CPUs",
            "64K",
            "</svg>",
        ] {
            assert!(svg.contains(part), "{part}");
        }
        // Three panels of four lines of 14 points and one of four ratios, and a mark a line in the legend; an open mark is two circles.
        assert_eq!(svg.matches("<circle").count(), (4 * 14 + 1) * (2 + 2 * 2));
    }

    #[test]
    fn every_mark_lies_in_the_plot() {
        let mut rows = rows(0..=20);
        rows[0].app_cpu_us = 0.0;
        let svg = svg(&sample_setup(), &rows).unwrap();
        check_marks(&svg, 4);
    }

    #[test]
    fn ratios_are_of_the_same_size_and_kernel() {
        let rows = rows(3..=4);
        let panel = ratios(&lines(&rows));
        assert_eq!(panel.series.len(), 4);
        let cpu = &panel.series[2];
        // Kernel 10: 2 + 10 + 3 us and a little for the size, over 0.125 us.
        let expected = (15.0 + 8.0 / 4096.0) / 0.125;
        assert_eq!(
            (cpu.style.is_dashed, cpu.points[0]),
            (false, (8.0, expected))
        );
    }

    #[test]
    fn a_long_legend_takes_more_rows_instead_of_leaving_the_plot() {
        let rows: Vec<BenchRow> = (0..9)
            .map(|kernel_us| sample_row(Loop::Sync, 64, kernel_us))
            .collect();
        let drawn = svg(&sample_setup(), &rows).unwrap();
        assert!(drawn.contains(&format!("height=\"{}\"", height(9))));
        assert!(drawn.contains("sync, kernel 8 us"));
        assert!(drawn.contains("(dashed): not measured"));
    }

    #[test]
    fn one_size_draws_and_no_rows_is_an_error() {
        let drawn = svg(&sample_setup(), &rows(6..=6)).unwrap();
        assert!(drawn.contains("sync, kernel 0 us"));
        let error = svg(&sample_setup(), &[]).unwrap_err();
        assert!(error.to_string().contains("no rows"), "{error}");
    }
}
