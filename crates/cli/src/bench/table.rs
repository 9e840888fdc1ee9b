//! The table of a benchmark, in the manner of perftest: one line a measurement, columns that stay aligned.

use std::fmt;

use super::row::{BenchRow, Setup};

/// The lines above the rows: what they were taken on, then the column heads.
pub struct TableHead<'a>(pub &'a Setup);

impl fmt::Display for TableHead<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Setup {
            nic,
            stream,
            path,
            why,
            gpu,
        } = self.0;
        writeln!(f, "# nic={nic} stream={stream} path={path} ({why})")?;
        if let Some(gpu) = gpu {
            writeln!(f, "# {gpu}")?;
        }
        write!(
            f,
            "{:>10} {:>10} {:>6} {:>11} {:>10} {:>10} {:>10} {:>10} {:>12} {:>12}",
            "#bytes",
            "kernel[us]",
            "loop",
            "#iterations",
            "t_min[us]",
            "t_p50[us]",
            "t_avg[us]",
            "t_p99[us]",
            "msgs/s",
            "app_cpu[us]",
        )
    }
}

/// One row below that head.
pub struct TableRow<'a>(pub &'a BenchRow);

impl fmt::Display for TableRow<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let row = self.0;
        let time = row.us_per_iter;
        write!(
            f,
            "{:>10} {:>10} {:>6} {:>11} {:>10.2} {:>10.2} {:>10.2} {:>10.2} {:>12.0} {:>12.3}",
            row.size_bytes,
            row.kernel_us,
            row.kind,
            row.iterations,
            time.min,
            time.p50,
            time.avg,
            time.p99,
            row.msgs_per_s,
            row.app_cpu_us_per_iter,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::super::row::{Loop, tests::sample_row};
    use super::*;

    #[test]
    fn heads_stand_over_their_columns() {
        let setup = Setup {
            nic: "nic0".into(),
            stream: "host".into(),
            path: "direct".into(),
            why: "the stream stores to the UAR".into(),
            gpu: None,
        };
        let row = sample_row(Loop::Async, 64, 10);
        let text = format!("{}\n{}", TableHead(&setup), TableRow(&row));
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(
            lines,
            [
                "# nic=nic0 stream=host path=direct (the stream stores to the UAR)",
                "    #bytes kernel[us]   loop #iterations  t_min[us]  t_p50[us]  t_avg[us]  t_p99[us]       msgs/s  app_cpu[us]",
                "        64         10  async        4000       1.00      12.02       3.25    1234.57       123457        0.125",
            ]
        );
    }
}
