//! The output of a run: a table or CSV as rows come, or a JSON list at the end; a plot besides.

use std::fs::OpenOptions;
use std::io::{ErrorKind, Write};
use std::path::Path;

use anyhow::{Context, Result};
use indicatif::ProgressBar;
use serde::{Serialize, Serializer};
use serde_json::Value;

use super::options::{Format, ReportOutput};
use super::{csv, progress};

/// A measurement that can be reported.
pub trait ReportRow: Sized {
    /// What all rows of a run have in common.
    type Setup;

    /// The lines above the rows of a table.
    fn table_head(setup: &Self::Setup) -> String;

    /// The line in a table.
    fn table_line(&self, setup: &Self::Setup) -> String;

    /// The row as JSON and CSV have it.
    fn columns(&self, setup: &Self::Setup) -> Vec<(&'static str, Value)>;

    /// The plot of all rows, as an SVG.
    ///
    /// # Errors
    /// No rows, and those of the plotting library.
    fn plot(setup: &Self::Setup, rows: &[Self]) -> Result<String>;
}

/// The rows of one run on their way out.
pub struct BenchReport<W, R: ReportRow> {
    out: W,
    output: ReportOutput,
    setup: R::Setup,
    rows: Vec<R>,
    bar: ProgressBar,
}

impl<W: Write, R: ReportRow> BenchReport<W, R> {
    /// Begins a report of `expected` rows; a table shows its head at once.
    ///
    /// # Errors
    /// Those of `out`.
    pub fn begin(
        mut out: W,
        output: ReportOutput,
        setup: R::Setup,
        expected: usize,
    ) -> Result<Self> {
        if output.format == Format::Table {
            writeln!(out, "{}", R::table_head(&setup))?;
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

    /// Shows on the progress bar what is being measured.
    pub fn announce(&self, what: String) {
        self.bar.set_message(what);
    }

    /// Takes a row; a table and CSV show it at once.
    ///
    /// # Errors
    /// Those of `out`.
    pub fn row(&mut self, row: R) -> Result<()> {
        let text = match self.output.format {
            Format::Table => row.table_line(&self.setup) + "\n",
            Format::Csv => {
                let columns = row.columns(&self.setup);
                let is_first = self.rows.is_empty();
                let names = is_first.then(|| csv::names(&columns) + "\n");
                names.unwrap_or_default() + &csv::values(&columns) + "\n"
            }
            Format::Json => String::new(),
        };
        let Self { bar, out, .. } = self;
        bar.suspend(|| out.write_all(text.as_bytes()).and_then(|()| out.flush()))?;
        self.rows.push(row);
        self.bar.inc(1);
        Ok(())
    }

    /// Ends the report: prints the JSON list, writes the plot.
    ///
    /// # Errors
    /// Those of `out` and of the plot's file, which the message names.
    pub fn end(mut self) -> Result<()> {
        self.bar.finish_and_clear();
        if self.output.format == Format::Json {
            let rows = self.rows.iter().map(|row| row.columns(&self.setup));
            let rows: Vec<JsonRow> = rows.map(JsonRow).collect();
            serde_json::to_writer_pretty(&mut self.out, &rows)?;
            writeln!(self.out)?;
            self.out.flush()?;
        }
        if let Some(path) = &self.output.plot {
            let svg = R::plot(&self.setup, &self.rows)?;
            std::fs::write(path, svg).with_context(|| format!("--plot {}", path.display()))?;
        }
        Ok(())
    }
}

/// Refuses a plot that cannot be written, before anything is measured. Leaves an existing file as it is.
///
/// # Errors
/// Those of the file system, with the path.
pub fn check_plot(path: &Path) -> Result<()> {
    let open = |create_new| {
        let mut options = OpenOptions::new();
        options.write(true).create_new(create_new).open(path)
    };
    let checked = match open(true) {
        Ok(_) => std::fs::remove_file(path),
        Err(error) if error.kind() == ErrorKind::AlreadyExists => open(false).map(drop),
        Err(error) => Err(error),
    };
    checked.with_context(|| format!("--plot {}", path.display()))
}

/// Columns as a JSON object, in their order.
struct JsonRow(Vec<(&'static str, Value)>);

impl Serialize for JsonRow {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(name, value)| (name, value)))
    }
}

#[cfg(test)]
mod tests {
    use super::super::kinds::Loop;
    use super::super::row::tests::{sample_row, sample_setup};
    use super::*;

    fn printed(format: Format) -> String {
        let mut text = Vec::new();
        let output = ReportOutput { format, plot: None };
        let mut report = BenchReport::begin(&mut text, output, sample_setup(), 2).unwrap();
        report.row(sample_row(Loop::Sync, 8, 0)).unwrap();
        report.row(sample_row(Loop::Async, 8, 0)).unwrap();
        report.end().unwrap();
        String::from_utf8(text).unwrap()
    }

    fn columns(kind: Loop) -> Vec<(&'static str, Value)> {
        sample_row(kind, 8, 0).columns(&sample_setup())
    }

    #[test]
    fn json_is_the_rows_and_nothing_else() {
        let rows: Vec<Value> = serde_json::from_str(&printed(Format::Json)).unwrap();
        for (row, kind) in rows.iter().zip([Loop::Sync, Loop::Async]) {
            let columns = columns(kind);
            assert_eq!(row.as_object().unwrap().len(), columns.len());
            assert!(columns.iter().all(|(name, value)| row[name] == *value));
        }
        assert_eq!(rows.len(), 2);
    }

    #[test]
    fn csv_is_the_names_and_one_line_a_row() {
        let text = printed(Format::Csv);
        let lines: Vec<&str> = text.lines().collect();
        let (sync, asynchronous) = (columns(Loop::Sync), columns(Loop::Async));
        assert_eq!(
            lines,
            [
                csv::names(&sync),
                csv::values(&sync),
                csv::values(&asynchronous)
            ]
        );
    }

    #[test]
    fn table_is_its_head_and_one_line_a_row() {
        let text = printed(Format::Table);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 6);
        assert!(lines[2].starts_with("# device=nic<0> stream=host path=direct ("));
        assert!(lines[4].contains("sync") && lines[5].contains("async"));
    }

    #[test]
    fn a_plot_is_checked_without_a_trace() {
        let error = check_plot(Path::new("/nonexistent/out.svg")).unwrap_err();
        let error = format!("{error:#}");
        assert!(error.contains("--plot /nonexistent/out.svg"), "{error}");
        let path = std::env::temp_dir().join(format!("doorbell-plot-{}.svg", std::process::id()));
        check_plot(&path).unwrap();
        assert!(!path.exists());
        std::fs::write(&path, "kept").unwrap();
        check_plot(&path).unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "kept");
        std::fs::remove_file(&path).unwrap();
    }
}
