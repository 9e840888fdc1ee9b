//! Where rows go: a table as they come, or a JSON list at the end; a drawing besides.

use std::io::Write;

use anyhow::{Context, Result};
use indicatif::ProgressBar;

use super::options::{BenchCase, Output};
use super::row::{BenchRow, Setup};
use super::{plot, progress, table};

/// The rows of one run on their way out.
pub struct Report<W> {
    out: W,
    output: Output,
    setup: Setup,
    rows: Vec<BenchRow>,
    bar: ProgressBar,
}

impl<W: Write> Report<W> {
    /// Begins a report of `expected` rows; a table shows its head at once.
    ///
    /// # Errors
    /// Those of `out`.
    pub fn begin(mut out: W, output: Output, setup: Setup, expected: usize) -> Result<Self> {
        if !output.json {
            writeln!(out, "{}", table::TableHead(&setup))?;
            out.flush()?;
        }
        Ok(Self {
            out,
            output,
            setup,
            rows: Vec::with_capacity(expected),
            bar: progress::bar(expected as u64),
        })
    }

    /// Says what is being measured now.
    pub fn announce(&self, case: BenchCase) {
        let BenchCase {
            kind,
            size_bytes,
            kernel_us,
        } = case;
        self.bar
            .set_message(format!("{kind}, {size_bytes} B, kernel {kernel_us} us"));
    }

    /// Takes a row; a table shows it at once.
    ///
    /// # Errors
    /// Those of `out`.
    pub fn row(&mut self, row: BenchRow) -> Result<()> {
        if !self.output.json {
            let Self { bar, out, .. } = self;
            bar.suspend(|| writeln!(out, "{}", table::TableRow(&row)).and_then(|()| out.flush()))?;
        }
        self.rows.push(row);
        self.bar.inc(1);
        Ok(())
    }

    /// Ends the report: prints the JSON list, writes the drawing.
    ///
    /// # Errors
    /// Those of `out` and of the drawing's file, which the message names.
    pub fn end(mut self) -> Result<Vec<BenchRow>> {
        self.bar.finish_and_clear();
        if self.output.json {
            serde_json::to_writer_pretty(&mut self.out, &self.rows)?;
            writeln!(self.out)?;
            self.out.flush()?;
        }
        if let Some(path) = &self.output.plot {
            let svg = plot::svg(&self.setup, &self.rows)?;
            std::fs::write(path, svg).with_context(|| format!("--plot {}", path.display()))?;
        }
        Ok(self.rows)
    }
}

#[cfg(test)]
mod tests {
    use super::super::row::{Loop, tests::sample_row};
    use super::*;

    fn setup() -> Setup {
        Setup {
            nic: "nic0".into(),
            stream: "host".into(),
            path: "direct".into(),
            why: "because".into(),
            gpu: None,
        }
    }

    fn printed(json: bool) -> String {
        let mut text = Vec::new();
        let mut report = Report::begin(&mut text, Output { json, plot: None }, setup(), 2).unwrap();
        report.row(sample_row(Loop::Sync, 8, 0)).unwrap();
        report.row(sample_row(Loop::Async, 8, 0)).unwrap();
        assert_eq!(report.end().unwrap().len(), 2);
        String::from_utf8(text).unwrap()
    }

    #[test]
    fn json_is_the_rows_and_nothing_else() {
        let rows: Vec<BenchRow> = serde_json::from_str(&printed(true)).unwrap();
        assert_eq!(
            rows,
            [sample_row(Loop::Sync, 8, 0), sample_row(Loop::Async, 8, 0)]
        );
    }

    #[test]
    fn table_is_two_lines_of_head_and_one_a_row() {
        let text = printed(false);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 4);
        assert!(lines[0].starts_with("# nic=nic0 stream=host path=direct (because)"));
        assert!(lines[2].contains("sync") && lines[3].contains("async"));
    }

    #[test]
    fn a_drawing_that_cannot_be_written_is_an_error_with_its_name() {
        let output = Output {
            json: true,
            plot: Some("/nonexistent/out.svg".into()),
        };
        let mut report = Report::begin(Vec::new(), output, setup(), 1).unwrap();
        report.row(sample_row(Loop::Sync, 8, 0)).unwrap();
        let error = report.end().unwrap_err();
        assert!(
            error.to_string().contains("/nonexistent/out.svg"),
            "{error}"
        );
    }
}
