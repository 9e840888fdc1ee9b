//! Charts of measurements, as an SVG: panels with logarithmic axes over the message size, and one legend.

use std::ops::Range;

use anyhow::{Context, Result, anyhow};
use plotters::coord::Shift;
use plotters::element::DashedPathElement;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::sizes::Short;

const WIDTH: u32 = 1200;
const PANEL_HEIGHT: u32 = 400;
const LEGEND_TOP: u32 = 62;
const LEGEND_ROW: u32 = 24;
const LEGEND_COLUMNS: usize = 5;
const FONT: &str = "sans-serif";
const INK: RGBColor = RGBColor(40, 40, 40);
/// Okabe and Ito's palette, which colour-blind readers tell apart, without its yellow: too pale for a line.
const COLOURS: [RGBColor; 6] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(86, 180, 233),
    RGBColor(230, 159, 0),
];
/// The least value of a logarithmic axis, in any unit of ours: clocks may show no CPU time at all.
pub const LEAST: f64 = 1e-6;
/// Pixels between the bars of lines at one size, and half the width of the cap of a bar.
const BAR_GAP: i32 = 4;
const BAR_CAP: i32 = 2;

/// How a line looks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LineStyle {
    /// The number of its colour. There are six, which repeat.
    pub colour: usize,
    /// Dashed, with open marks.
    pub is_dashed: bool,
}

impl LineStyle {
    fn colour(self) -> RGBColor {
        COLOURS[self.colour % COLOURS.len()]
    }
}

/// One line of a panel: points by size and value.
pub struct Series {
    /// How it looks.
    pub style: LineStyle,
    /// Sizes and values.
    pub points: Vec<(f64, f64)>,
    /// Upper ends of bars above the points, or nothing.
    pub tops: Vec<f64>,
}

/// One of the four panels.
pub struct Panel<'a> {
    /// What is shown.
    pub title: &'a str,
    /// The unit of the values.
    pub unit: &'a str,
    /// The lines.
    pub series: Vec<Series>,
}

/// What is drawn.
pub struct Chart<'a> {
    /// The lines above the legend.
    pub titles: [String; 2],
    /// Names of the lines.
    pub legend: Vec<(String, LineStyle)>,
    /// The panels, from the left to the right and down.
    pub panels: [Panel<'a>; 4],
}

impl Chart<'_> {
    /// Draws it.
    ///
    /// # Errors
    /// Those of the plotting library.
    pub fn svg(&self) -> Result<String> {
        let mut text = String::new();
        // The library's errors borrow the text that it draws into: they become ours before that is returned.
        self.draw(&mut text)
            .map_err(|error| anyhow!("{error:#}"))
            .context("plotting the rows")?;
        Ok(text)
    }

    fn draw(&self, text: &mut String) -> Result<()> {
        let head = head_height(self.legend.len());
        let size = (WIDTH, head + 2 * PANEL_HEIGHT);
        let root = SVGBackend::with_string(text, size).into_drawing_area();
        let done = (|| {
            root.fill(&WHITE)?;
            for (title, (y, points)) in self.titles.iter().zip([(12, 20), (38, 14)]) {
                let style = (FONT, points).into_font().color(&INK);
                root.draw(&Text::new(title.as_str(), (24, y), style))?;
            }
            legend(&root, &self.legend)?;
            let (_, body) = root.split_vertically(head);
            for (area, panel) in body.split_evenly((2, 2)).iter().zip(&self.panels) {
                draw_panel(area, panel)?;
            }
            root.present()?;
            Ok::<(), DrawingAreaErrorKind<_>>(())
        })();
        done.map_err(|error: DrawingAreaErrorKind<std::io::Error>| anyhow!("{error}"))
    }
}

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

/// Height of what stands above the panels.
fn head_height(lines: usize) -> u32 {
    LEGEND_TOP + LEGEND_ROW * lines.div_ceil(LEGEND_COLUMNS) as u32 + 6
}

type Drawn = Result<(), DrawingAreaErrorKind<std::io::Error>>;

/// Samples of the lines under the titles, for all panels.
fn legend(root: &Area<'_>, lines: &[(String, LineStyle)]) -> Drawn {
    let text = (FONT, 15)
        .into_font()
        .color(&INK)
        .pos(Pos::new(HPos::Left, VPos::Center));
    for (index, (name, style)) in lines.iter().enumerate() {
        let (row, column) = (index / LEGEND_COLUMNS, index % LEGEND_COLUMNS);
        let x = 24 + column as i32 * ((WIDTH as i32 - 48) / LEGEND_COLUMNS as i32);
        let y = (LEGEND_TOP + LEGEND_ROW / 2) as i32 + row as i32 * LEGEND_ROW as i32;
        stroke(root, *style, &[(x, y), (x + 40, y)])?;
        mark(root, *style, (x + 20, y))?;
        root.draw(&Text::new(name.as_str(), (x + 48, y), text.clone()))?;
    }
    Ok(())
}

/// A polyline in pixels. Dashes tell lines of one colour apart in black and white print too.
fn stroke(area: &Area<'_>, style: LineStyle, points: &[(i32, i32)]) -> Drawn {
    let pen = style.colour().stroke_width(2);
    if style.is_dashed {
        area.draw(&DashedPathElement::new(points.iter().copied(), 7, 4, pen))
    } else {
        area.draw(&PathElement::new(points.to_vec(), pen))
    }
}

fn mark(area: &Area<'_>, style: LineStyle, at: (i32, i32)) -> Drawn {
    if style.is_dashed {
        area.draw(&Circle::new(at, 4, WHITE.filled()))?;
        area.draw(&Circle::new(at, 4, style.colour().stroke_width(2)))
    } else {
        area.draw(&Circle::new(at, 4, style.colour().filled()))
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
        let note = format!("{}: not measured", panel.title);
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
                area.draw(&PathElement::new(bar, series.style.colour().mix(0.6)))?;
            }
        }
        shift += BAR_GAP;
        let points: Vec<(i32, i32)> = series.points.iter().map(|&(x, y)| pixel(x, y)).collect();
        stroke(area, series.style, &points)?;
        for &at in &points {
            mark(area, series.style, at)?;
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
pub mod tests {
    use super::*;

    /// Height of a chart with so many lines in the legend.
    pub fn height(lines: usize) -> u32 {
        head_height(lines) + 2 * PANEL_HEIGHT
    }

    /// Asserts that every mark lies in the chart.
    pub fn check_marks(svg: &str, lines: usize) {
        let number = |text: &str, key: &str| -> f64 {
            let from = text.find(key).unwrap() + key.len();
            text[from..].split('"').next().unwrap().parse().unwrap()
        };
        let height = f64::from(height(lines));
        let marks: Vec<&str> = svg.split("<circle").skip(1).collect();
        assert!(!marks.is_empty());
        for circle in marks {
            let (x, y) = (number(circle, "cx=\""), number(circle, "cy=\""));
            assert!(
                (0.0..f64::from(WIDTH)).contains(&x) && (0.0..height).contains(&y),
                "{x} {y}"
            );
        }
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
    fn a_long_legend_takes_more_rows() {
        assert_eq!(head_height(9), head_height(4) + LEGEND_ROW);
    }
}
