//! Plots as SVG files: lines over sizes, and timelines.

use std::ops::Range;
use std::path::Path;

use anyhow::Result;
use plotters::prelude::*;

/// A named line of a plot.
pub struct Line {
    pub name: String,
    pub points: Vec<(f64, f64)>,
}

/// Lines over logarithmic axes.
pub struct Plot<'a> {
    pub title: &'a str,
    pub x: &'a str,
    pub y: &'a str,
    pub lines: Vec<Line>,
}

impl Plot<'_> {
    /// Draws the lines into an SVG file.
    pub fn write(&self, file: &Path) -> Result<()> {
        let points = || self.lines.iter().flat_map(|line| &line.points);
        let root = SVGBackend::new(file, (960, 600)).into_drawing_area();
        root.fill(&WHITE)?;
        let mut chart = ChartBuilder::on(&root)
            .caption(self.title, ("sans-serif", 20))
            .margin(12)
            .x_label_area_size(40)
            .y_label_area_size(70)
            .build_cartesian_2d(
                range(points().map(|point| point.0)).log_scale(),
                range(points().map(|point| point.1)).log_scale(),
            )?;
        chart
            .configure_mesh()
            .x_desc(self.x)
            .y_desc(self.y)
            .draw()?;
        for (index, line) in self.lines.iter().enumerate() {
            let colour = Palette99::pick(index).to_rgba();
            chart
                .draw_series(LineSeries::new(line.points.clone(), colour.stroke_width(2)))?
                .label(&line.name)
                .legend(move |(x, y)| {
                    PathElement::new([(x, y), (x + 18, y)], colour.stroke_width(2))
                });
        }
        chart
            .configure_series_labels()
            .background_style(WHITE)
            .border_style(BLACK)
            .draw()?;
        root.present()?;
        Ok(())
    }
}

/// A stretch of time in a row of a timeline, in milliseconds.
pub struct Bar {
    pub row: usize,
    /// What was done. Bars of one kind have one colour.
    pub kind: String,
    pub from_ms: f64,
    pub to_ms: f64,
}

/// Draws bars over time into an SVG file, one row for each name.
pub fn timeline(file: &Path, title: &str, rows: &[String], bars: &[Bar]) -> Result<()> {
    let end = bars.iter().map(|bar| bar.to_ms).fold(0.0, f64::max);
    let root = SVGBackend::new(file, (1200, 120 + 40 * rows.len() as u32)).into_drawing_area();
    root.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&root)
        .caption(title, ("sans-serif", 20))
        .margin(12)
        .x_label_area_size(40)
        .y_label_area_size(120)
        .build_cartesian_2d(0.0..end.max(1e-3), rows.len() as f64..0.0)?;
    chart
        .configure_mesh()
        .disable_y_mesh()
        .x_desc("ms")
        .y_labels(2 * rows.len() + 1)
        .y_label_formatter(&|y| match y.fract() {
            0.5 => rows.get(*y as usize).cloned().unwrap_or_default(),
            _ => String::new(),
        })
        .draw()?;
    let mut kinds: Vec<&str> = bars.iter().map(|bar| &*bar.kind).collect();
    kinds.sort_unstable();
    kinds.dedup();
    for (index, kind) in kinds.iter().enumerate() {
        let colour = Palette99::pick(index).to_rgba();
        let own = bars.iter().filter(|bar| bar.kind == *kind).map(|bar| {
            let top = bar.row as f64;
            Rectangle::new(
                [(bar.from_ms, top + 0.1), (bar.to_ms, top + 0.9)],
                colour.filled(),
            )
        });
        chart
            .draw_series(own)?
            .label(*kind)
            .legend(move |(x, y)| Rectangle::new([(x, y - 5), (x + 12, y + 5)], colour.filled()));
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperRight)
        .background_style(WHITE.mix(0.8))
        .draw()?;
    root.present()?;
    Ok(())
}

fn range(values: impl Iterator<Item = f64>) -> Range<f64> {
    let (low, high) = values.fold((f64::MAX, f64::MIN), |(low, high), value| {
        (low.min(value), high.max(value))
    });
    if low > high {
        1.0..10.0
    } else {
        low * 0.9..high * 1.1
    }
}
