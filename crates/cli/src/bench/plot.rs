//! The plot of a run, as an SVG: time, bandwidth and application CPU against the message size, and the ratios of the two loops.

use std::ops::Range;

use anyhow::{Context, Result, anyhow};
use plotters::coord::Shift;
use plotters::element::DashedPathElement;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::kinds::Loop;
use super::row::{BenchRow, Setup};
use super::sizes::Short;

const WIDTH: u32 = 1200;
const PANEL_HEIGHT: u32 = 400;
const LEGEND_TOP: u32 = 62;
const LEGEND_ROW: u32 = 24;
const LEGEND_COLUMNS: usize = 5;
const FONT: &str = "sans-serif";
const INK: RGBColor = RGBColor(40, 40, 40);
/// One colour a kernel length. Okabe and Ito's palette, which colour-blind readers tell apart, without its yellow: too pale for a line.
const COLOURS: [RGBColor; 6] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(86, 180, 233),
    RGBColor(230, 159, 0),
];
/// The least value of a logarithmic axis, in any unit of ours: clocks may show no CPU time at all.
const LEAST: f64 = 1e-6;
/// Pixels between the bars of lines at one size, and half the width of the cap of a bar.
const BAR_GAP: i32 = 4;
const BAR_CAP: i32 = 2;

/// Plots `rows` in four panels with logarithmic axes. Each loop and kernel length is a line.
///
/// # Errors
/// No rows, and those of the plotting library.
pub fn svg(setup: &Setup, rows: &[BenchRow]) -> Result<String> {
    let lines = lines(rows);
    anyhow::ensure!(!lines.is_empty(), "there are no rows to plot");
    let mut text = String::new();
    // The library's errors borrow the text that it draws into: they become ours before that is returned.
    draw(&mut text, setup, &lines)
        .map_err(|error| anyhow!("{error:#}"))
        .context("plotting the rows")?;
    Ok(text)
}

/// The rows of one loop and one kernel length, shortest message first.
struct RowGroup<'a> {
    kind: Loop,
    kernel_us: u64,
    colour: RGBColor,
    rows: Vec<&'a BenchRow>,
}

fn lines(rows: &[BenchRow]) -> Vec<RowGroup<'_>> {
    let mut kernels: Vec<u64> = rows.iter().map(|row| row.kernel_us).collect();
    kernels.sort_unstable();
    kernels.dedup();
    let mut lines = Vec::new();
    for (index, &kernel_us) in kernels.iter().enumerate() {
        for kind in [Loop::Sync, Loop::Async] {
            let mut of_line: Vec<&BenchRow> = rows
                .iter()
                .filter(|row| row.kernel_us == kernel_us && row.kind == kind)
                .collect();
            of_line.sort_by_key(|row| row.size_bytes);
            if !of_line.is_empty() {
                let colour = COLOURS[index % COLOURS.len()];
                lines.push(RowGroup {
                    kind,
                    kernel_us,
                    colour,
                    rows: of_line,
                });
            }
        }
    }
    lines
}

/// What a panel shows: points by size and value.
struct Series {
    colour: RGBColor,
    is_dashed: bool,
    points: Vec<(f64, f64)>,
    /// Upper ends of bars above the points, or nothing.
    tops: Vec<f64>,
}

struct Panel<'a> {
    title: &'a str,
    unit: &'a str,
    series: Vec<Series>,
}

fn panel<'a>(
    title: &'a str,
    unit: &'a str,
    lines: &[RowGroup<'_>],
    value: impl Fn(&BenchRow) -> f64,
) -> Panel<'a> {
    let series = |line: &RowGroup<'_>| Series {
        colour: line.colour,
        is_dashed: line.kind == Loop::Sync,
        points: line
            .rows
            .iter()
            .map(|row| (row.size_bytes as f64, value(row)))
            .collect(),
        tops: Vec::new(),
    };
    let series = lines.iter().map(series).collect();
    Panel {
        title,
        unit,
        series,
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
            colour: sync.colour,
            is_dashed,
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

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

/// Height of what stands above the panels.
fn head_height(lines: usize) -> u32 {
    LEGEND_TOP + LEGEND_ROW * lines.div_ceil(LEGEND_COLUMNS) as u32 + 6
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

fn draw(text: &mut String, setup: &Setup, lines: &[RowGroup<'_>]) -> Result<()> {
    let head = head_height(lines.len());
    let root = SVGBackend::with_string(text, (WIDTH, head + 2 * PANEL_HEIGHT)).into_drawing_area();
    let done = (|| {
        root.fill(&WHITE)?;
        for (title, (y, points)) in titles(setup).into_iter().zip([(12, 20), (38, 14)]) {
            let style = (FONT, points).into_font().color(&INK);
            root.draw(&Text::new(title, (24, y), style))?;
        }
        legend(&root, lines)?;
        let (_, body) = root.split_vertically(head);
        let mut time = panel(
            "Time per iteration: p50, bars up to p99",
            "microseconds",
            lines,
            |row| row.time.p50_us,
        );
        for (series, line) in time.series.iter_mut().zip(lines) {
            series.tops = line.rows.iter().map(|row| row.time.p99_us).collect();
        }
        let panels = [
            time,
            panel("Bandwidth in one direction", "GB/s", lines, |row| {
                row.gb_per_s()
            }),
            panel(
                "Application CPU time per iteration",
                "microseconds",
                lines,
                |row| row.app_cpu_us,
            ),
            ratios(lines),
        ];
        for (area, panel) in body.split_evenly((2, 2)).iter().zip(&panels) {
            draw_panel(area, panel)?;
        }
        root.present()?;
        Ok::<(), DrawingAreaErrorKind<_>>(())
    })();
    done.map_err(|error: DrawingAreaErrorKind<std::io::Error>| anyhow!("{error}"))
}

type Drawn = Result<(), DrawingAreaErrorKind<std::io::Error>>;

/// Samples of the lines under the titles, for all panels.
fn legend(root: &Area<'_>, lines: &[RowGroup<'_>]) -> Drawn {
    let style = (FONT, 15)
        .into_font()
        .color(&INK)
        .pos(Pos::new(HPos::Left, VPos::Center));
    for (index, line) in lines.iter().enumerate() {
        let (row, column) = (index / LEGEND_COLUMNS, index % LEGEND_COLUMNS);
        let x = 24 + column as i32 * ((WIDTH as i32 - 48) / LEGEND_COLUMNS as i32);
        let y = (LEGEND_TOP + LEGEND_ROW / 2) as i32 + row as i32 * LEGEND_ROW as i32;
        let is_dashed = line.kind == Loop::Sync;
        stroke(root, line.colour, is_dashed, &[(x, y), (x + 40, y)])?;
        mark(root, line.colour, is_dashed, (x + 20, y))?;
        let name = format!("{}, kernel {} us", line.kind, line.kernel_us);
        root.draw(&Text::new(name, (x + 48, y), style.clone()))?;
    }
    Ok(())
}

/// A polyline in pixels. Dashes tell the synchronous loop in black and white print too.
fn stroke(area: &Area<'_>, colour: RGBColor, is_dashed: bool, points: &[(i32, i32)]) -> Drawn {
    let style = colour.stroke_width(2);
    if is_dashed {
        area.draw(&DashedPathElement::new(points.iter().copied(), 7, 4, style))
    } else {
        area.draw(&PathElement::new(points.to_vec(), style))
    }
}

fn mark(area: &Area<'_>, colour: RGBColor, is_open: bool, at: (i32, i32)) -> Drawn {
    if is_open {
        area.draw(&Circle::new(at, 4, WHITE.filled()))?;
        area.draw(&Circle::new(at, 4, colour.stroke_width(2)))
    } else {
        area.draw(&Circle::new(at, 4, colour.filled()))
    }
}

/// The least and the greatest value with some room, so that marks stay within the frame.
fn range(values: impl Iterator<Item = f64>, room: f64) -> Range<f64> {
    let (least, most) = values.fold((f64::MAX, LEAST), |(least, most), value| {
        let value = value.max(LEAST);
        (least.min(value), most.max(value))
    });
    least.min(most) / room..most * room
}

/// Ticks of a logarithmic axis: decades, or the coarsest parts of them that give four ticks.
fn ticks(range: &Range<f64>) -> Vec<f64> {
    const PARTS: [&[f64]; 4] = [
        &[1.0],
        &[1.0, 2.0, 5.0],
        &[1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0],
        &[
            1.0, 1.1, 1.2, 1.4, 1.6, 1.8, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0,
        ],
    ];
    let decades = range.start.log10().floor() as i32..=range.end.log10().ceil() as i32;
    let of_parts = |parts: &[f64]| -> Vec<f64> {
        let all = decades.clone().flat_map(|decade| {
            let part = move |part: &f64| part * 10f64.powi(decade);
            parts.iter().map(part)
        });
        all.filter(|tick| range.contains(tick)).collect()
    };
    let mut candidates = PARTS.iter().map(|parts| of_parts(parts));
    candidates
        .find(|ticks| ticks.len() >= 4)
        .unwrap_or_else(|| of_parts(PARTS[3]))
}

fn draw_panel(area: &Area<'_>, panel: &Panel<'_>) -> Drawn {
    let ink = |points: u32| (FONT, points).into_font().color(&INK);
    let all = || panel.series.iter();
    if all().next().is_none() {
        let note = format!("{}: needs both loops", panel.title);
        return area.draw(&Text::new(note, (90, 12), ink(16)));
    }
    let x = range(all().flat_map(|it| it.points.iter().map(|at| at.0)), 1.25);
    let values = all().flat_map(|it| it.points.iter().map(|at| at.1).chain(it.tops.clone()));
    let y = range(values, 1.3);
    let ticks = ticks(&y);

    let mut chart = ChartBuilder::on(area)
        .caption(panel.title, ink(16))
        .margin_right(24)
        .margin_left(12)
        .margin_bottom(8)
        .x_label_area_size(46)
        .y_label_area_size(64)
        .build_cartesian_2d(
            x.log_scale().base(2.0),
            y.log_scale().with_key_points(ticks),
        )?;
    chart
        .configure_mesh()
        .x_desc("message size (bytes)")
        .y_desc(panel.unit)
        .x_labels(16)
        .x_label_formatter(&|bytes| Short(bytes.round() as u64).to_string())
        .y_label_formatter(&|value| format!("{}", (value * 1e9).round() / 1e9))
        .axis_desc_style(ink(15))
        .label_style(ink(14))
        .bold_line_style(BLACK.mix(0.14))
        .light_line_style(TRANSPARENT)
        .draw()?;
    let pixel = |x: f64, y: f64| within(area, chart.backend_coord(&(x, y.max(LEAST))));
    let mut shift = -BAR_GAP * (panel.series.len() as i32 - 1) / 2;
    for series in &panel.series {
        for (&(size, value), &top) in series.points.iter().zip(&series.tops) {
            let (x, low) = pixel(size, value);
            let (x, high) = (x + shift, pixel(size, top).1);
            for bar in [
                [(x, low), (x, high)],
                [(x - BAR_CAP, high), (x + BAR_CAP, high)],
            ] {
                area.draw(&PathElement::new(bar, series.colour.mix(0.6)))?;
            }
        }
        shift += BAR_GAP;
        let points: Vec<(i32, i32)> = series.points.iter().map(|&(x, y)| pixel(x, y)).collect();
        stroke(area, series.colour, series.is_dashed, &points)?;
        for &at in &points {
            mark(area, series.colour, series.is_dashed, at)?;
        }
    }
    Ok(())
}

/// A pixel of the whole plot as one of `area`.
fn within(area: &Area<'_>, at: (i32, i32)) -> (i32, i32) {
    let (left, top) = area.get_base_pixel();
    (at.0 - left, at.1 - top)
}

#[cfg(test)]
mod tests {
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
        let number = |text: &str, key: &str| -> f64 {
            let from = text.find(key).unwrap() + key.len();
            text[from..].split('"').next().unwrap().parse().unwrap()
        };
        let height = f64::from(head_height(4) + 2 * PANEL_HEIGHT);
        for circle in svg.split("<circle").skip(1) {
            let (x, y) = (number(circle, "cx=\""), number(circle, "cy=\""));
            assert!(
                (0.0..f64::from(WIDTH)).contains(&x) && (0.0..height).contains(&y),
                "{x} {y}"
            );
        }
    }

    #[test]
    fn ratios_are_of_the_same_size_and_kernel() {
        let rows = rows(3..=4);
        let panel = ratios(&lines(&rows));
        assert_eq!(panel.series.len(), 4);
        let cpu = &panel.series[2];
        // Kernel 10: 2 + 10 + 3 us and a little for the size, over 0.125 us.
        let expected = (15.0 + 8.0 / 4096.0) / 0.125;
        assert_eq!((cpu.is_dashed, cpu.points[0]), (false, (8.0, expected)));
    }

    #[test]
    fn ticks_stay_in_their_range_and_are_not_too_many() {
        assert_eq!(ticks(&(0.9..11.0)), [1.0, 2.0, 5.0, 10.0]);
        assert_eq!(ticks(&(2.0..6.0)), [2.0, 3.0, 4.0, 5.0]);
        assert_eq!(ticks(&(9.5..14.0)), [10.0, 11.0, 12.0]);
        let many = ticks(&(1e-3..1e4));
        assert_eq!(many.len(), 7);
        assert!(many.iter().all(|tick| (1e-3..1e4).contains(tick)));
    }

    #[test]
    fn a_long_legend_takes_more_rows_instead_of_leaving_the_plot() {
        let rows: Vec<BenchRow> = (0..9)
            .map(|kernel_us| sample_row(Loop::Sync, 64, kernel_us))
            .collect();
        let drawn = svg(&sample_setup(), &rows).unwrap();
        let height = head_height(9) + 2 * PANEL_HEIGHT;
        assert!(drawn.contains(&format!("height=\"{height}\"")));
        assert_eq!(head_height(9), head_height(4) + LEGEND_ROW);
        assert!(drawn.contains("sync, kernel 8 us"));
        assert!(drawn.contains("needs both loops"));
    }

    #[test]
    fn one_size_draws_and_no_rows_is_an_error() {
        let drawn = svg(&sample_setup(), &rows(6..=6)).unwrap();
        assert!(drawn.contains("sync, kernel 0 us"));
        let error = svg(&sample_setup(), &[]).unwrap_err();
        assert!(error.to_string().contains("no rows"), "{error}");
    }
}
