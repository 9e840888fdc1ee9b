//! The drawing of a run: time and CPU of the loops against the message size, as an SVG.

use anyhow::{Context, Result, anyhow};
use plotters::coord::Shift;
use plotters::element::DashedPathElement;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::row::{BenchRow, Loop, Setup};
use super::sizes::Short;

const WIDTH: u32 = 1200;
const PANEL_HEIGHT: u32 = 488;
const LEGEND_TOP: u32 = 42;
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

/// Draws `rows`: a panel for the time of an iteration (p50), one for the application's CPU; a line for each loop and kernel length.
///
/// # Errors
/// No rows, and whatever the drawing library reports.
pub fn svg(setup: &Setup, rows: &[BenchRow]) -> Result<String> {
    let lines = lines(rows);
    anyhow::ensure!(!lines.is_empty(), "there are no rows to draw");
    let mut text = String::new();
    // The library's errors borrow the text they draw into: they are turned into ours before it is given away.
    draw(&mut text, setup, &lines)
        .map_err(|error| anyhow!("{error:#}"))
        .context("drawing the rows")?;
    Ok(text)
}

/// The rows of one loop and one kernel length, shortest message first.
struct Series<'a> {
    kind: Loop,
    kernel_us: u64,
    colour: RGBColor,
    rows: Vec<&'a BenchRow>,
}

fn lines(rows: &[BenchRow]) -> Vec<Series<'_>> {
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
                lines.push(Series {
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

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

/// Height of what stands above the panels.
fn head_height(lines: usize) -> u32 {
    LEGEND_TOP + LEGEND_ROW * lines.div_ceil(LEGEND_COLUMNS) as u32 + 6
}

fn draw(text: &mut String, setup: &Setup, lines: &[Series<'_>]) -> Result<()> {
    let head = head_height(lines.len());
    let root = SVGBackend::with_string(text, (WIDTH, head + PANEL_HEIGHT)).into_drawing_area();
    let done = (|| {
        root.fill(&WHITE)?;
        let title = format!(
            "doorbell bench: nic {}, stream {}, path {}",
            setup.nic, setup.stream, setup.path
        );
        root.draw(&Text::new(
            title,
            (24, 14),
            (FONT, 20).into_font().color(&INK),
        ))?;
        legend(&root, lines)?;
        let (_, body) = root.split_vertically(head);
        let (left, right) = body.split_horizontally(WIDTH / 2);
        panel(
            &left,
            "Time per iteration, p50",
            "microseconds",
            lines,
            |row| row.us_per_iter.p50,
        )?;
        panel(
            &right,
            "Application CPU per iteration",
            "microseconds of CPU",
            lines,
            |row| row.app_cpu_us_per_iter,
        )?;
        root.present()?;
        Ok::<(), DrawingAreaErrorKind<_>>(())
    })();
    done.map_err(|error: DrawingAreaErrorKind<std::io::Error>| anyhow!("{error}"))
}

type Drawn = Result<(), DrawingAreaErrorKind<std::io::Error>>;

/// Samples under the title, for both panels.
fn legend(root: &Area<'_>, lines: &[Series<'_>]) -> Drawn {
    let style = (FONT, 15)
        .into_font()
        .color(&INK)
        .pos(Pos::new(HPos::Left, VPos::Center));
    for (index, line) in lines.iter().enumerate() {
        let (row, column) = (index / LEGEND_COLUMNS, index % LEGEND_COLUMNS);
        let x = 24 + column as i32 * ((WIDTH as i32 - 48) / LEGEND_COLUMNS as i32);
        let y = (LEGEND_TOP + LEGEND_ROW / 2) as i32 + row as i32 * LEGEND_ROW as i32;
        stroke(root, line, &[(x, y), (x + 40, y)])?;
        mark(root, line, (x + 20, y))?;
        let name = format!("{}, kernel {} us", line.kind, line.kernel_us);
        root.draw(&Text::new(name, (x + 48, y), style.clone()))?;
    }
    Ok(())
}

/// A polyline in pixels: whole for the asynchronous loop, dashed for the synchronous one, so that black and white print tells them apart too.
fn stroke(area: &Area<'_>, line: &Series<'_>, points: &[(i32, i32)]) -> Drawn {
    let style = line.colour.stroke_width(2);
    match line.kind {
        Loop::Async => area.draw(&PathElement::new(points.to_vec(), style)),
        Loop::Sync => area.draw(&DashedPathElement::new(points.iter().copied(), 7, 4, style)),
    }
}

fn mark(area: &Area<'_>, line: &Series<'_>, at: (i32, i32)) -> Drawn {
    match line.kind {
        Loop::Async => area.draw(&Circle::new(at, 4, line.colour.filled())),
        Loop::Sync => {
            area.draw(&Circle::new(at, 4, WHITE.filled()))?;
            area.draw(&Circle::new(at, 4, line.colour.stroke_width(2)))
        }
    }
}

fn panel(
    area: &Area<'_>,
    title: &str,
    unit: &str,
    lines: &[Series<'_>],
    value: impl Fn(&BenchRow) -> f64,
) -> Drawn {
    let rows = || lines.iter().flat_map(|line| &line.rows);
    let shortest = rows().map(|row| row.size_bytes).min().unwrap_or(1).max(1) as f64;
    let longest = rows().map(|row| row.size_bytes).max().unwrap_or(1).max(1) as f64;
    let highest = rows().map(|row| value(row)).fold(0.0, f64::max);
    // A little air keeps the marks of the first and last size off the frame; from zero, so that heights compare.
    let x = (shortest / 1.25..longest * 1.25).log_scale().base(2.0);
    let y = 0.0..if highest > 0.0 { highest * 1.06 } else { 1.0 };

    let mut chart = ChartBuilder::on(area)
        .caption(title, (FONT, 18).into_font().color(&INK))
        .margin_right(24)
        .margin_left(12)
        .margin_bottom(8)
        .x_label_area_size(46)
        .y_label_area_size(64)
        .build_cartesian_2d(x, y)?;
    chart
        .configure_mesh()
        .x_desc("message size (bytes)")
        .y_desc(unit)
        .x_labels(16)
        .x_label_formatter(&|bytes| Short(bytes.round() as u64).to_string())
        .y_label_formatter(&|micros| format!("{}", (micros * 1000.0).round() / 1000.0))
        .axis_desc_style((FONT, 15).into_font().color(&INK))
        .label_style((FONT, 14).into_font().color(&INK))
        .bold_line_style(BLACK.mix(0.14))
        .light_line_style(TRANSPARENT)
        .draw()?;
    for line in lines {
        let points: Vec<(i32, i32)> = line
            .rows
            .iter()
            .map(|row| chart.backend_coord(&(row.size_bytes.max(1) as f64, value(row))))
            .collect();
        let points: Vec<(i32, i32)> = points.iter().map(|&at| within(area, at)).collect();
        stroke(area, line, &points)?;
        for &at in &points {
            mark(area, line, at)?;
        }
    }
    Ok(())
}

/// A pixel of the whole drawing as one of `area`.
fn within(area: &Area<'_>, at: (i32, i32)) -> (i32, i32) {
    let (left, top) = area.get_base_pixel();
    (at.0 - left, at.1 - top)
}

#[cfg(test)]
mod tests {
    use super::super::row::tests::sample_row;
    use super::*;

    fn setup() -> Setup {
        Setup {
            nic: "nic<0>".into(),
            stream: "host".into(),
            path: "direct".into(),
            why: String::new(),
            gpu: None,
        }
    }

    fn rows(sizes: std::ops::RangeInclusive<u32>) -> Vec<BenchRow> {
        let mut rows = Vec::new();
        for exponent in sizes.rev() {
            for kernel_us in [0, 10] {
                for kind in [Loop::Sync, Loop::Async] {
                    let mut row = sample_row(kind, 1 << exponent, kernel_us);
                    if kind == Loop::Sync {
                        row.us_per_iter.p50 += 3.0;
                        row.app_cpu_us_per_iter = row.us_per_iter.p50;
                    }
                    rows.push(row);
                }
            }
        }
        rows
    }

    #[test]
    fn drawing_has_its_panels_lines_and_marks() {
        let svg = svg(&setup(), &rows(3..=16)).unwrap();
        for part in [
            "Time per iteration",
            "Application CPU",
            "sync, kernel 0 us",
            "async, kernel 10 us",
            "nic&lt;0&gt;",
            "64K",
            "</svg>",
        ] {
            assert!(svg.contains(part), "{part}");
        }
        // Two panels of four lines of 14 points, and a mark a line in the legend; a mark of the sync loop is two circles.
        assert_eq!(svg.matches("<circle").count(), (2 * 14 + 1) * (2 + 2 * 2));
    }

    #[test]
    fn every_mark_lies_in_the_drawing() {
        let svg = svg(&setup(), &rows(0..=20)).unwrap();
        let number = |text: &str, key: &str| -> f64 {
            let from = text.find(key).unwrap() + key.len();
            text[from..].split('"').next().unwrap().parse().unwrap()
        };
        let height = f64::from(head_height(4) + PANEL_HEIGHT);
        for circle in svg.split("<circle").skip(1) {
            let (x, y) = (number(circle, "cx=\""), number(circle, "cy=\""));
            assert!(
                (0.0..f64::from(WIDTH)).contains(&x) && (0.0..height).contains(&y),
                "{x} {y}"
            );
        }
    }

    #[test]
    fn a_long_legend_takes_more_rows_instead_of_leaving_the_drawing() {
        let rows: Vec<BenchRow> = (0..9)
            .map(|kernel_us| sample_row(Loop::Sync, 64, kernel_us))
            .collect();
        let drawn = svg(&setup(), &rows).unwrap();
        assert!(drawn.contains(&format!("height=\"{}\"", head_height(9) + PANEL_HEIGHT)));
        assert_eq!(head_height(9), head_height(4) + LEGEND_ROW);
        assert!(drawn.contains("sync, kernel 8 us"));
    }

    #[test]
    fn one_size_draws_and_no_rows_is_an_error() {
        assert!(
            svg(&setup(), &rows(6..=6))
                .unwrap()
                .contains("sync, kernel 0 us")
        );
        let error = svg(&setup(), &[]).unwrap_err();
        assert!(error.to_string().contains("no rows"), "{error}");
    }
}
