//! The table of a benchmark, in the manner of perftest: one line a measurement, in aligned columns.

use std::fmt;

use super::row::{BenchRow, Setup};

/// The lines above the rows: what was measured on which machine, then the names of the columns.
pub struct TableHead<'a>(pub &'a Setup);

impl fmt::Display for TableHead<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Setup { machine, plan, .. } = self.0;
        let version = env!("CARGO_PKG_VERSION");
        writeln!(f, "# doorbell {version} bench {}", plan.describe())?;
        writeln!(
            f,
            "# host={} cpu={:?} cpus={}",
            machine.host, machine.cpu, machine.cpus
        )?;
        let Setup {
            device,
            stream,
            path,
            reason,
            ..
        } = self.0;
        writeln!(
            f,
            "# device={device} stream={stream} path={path} ({reason})"
        )?;
        if let Some(details) = &self.0.gpu_details {
            writeln!(f, "# {details}")?;
        }
        write!(
            f,
            "{:>10} {:>10} {:>6} {:>11} {:>10} {:>10} {:>10} {:>10} {:>11} {:>12} {:>9} {:>12}",
            "#bytes",
            "kernel[us]",
            "loop",
            "#iterations",
            "t_min[us]",
            "t_p50[us]",
            "t_avg[us]",
            "t_p99[us]",
            "t_p999[us]",
            "msgs/s",
            "GB/s",
            "app_cpu[us]",
        )
    }
}

/// One row below that head.
pub struct TableRow<'a>(pub &'a BenchRow);

impl fmt::Display for TableRow<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let row = self.0;
        let time = row.time;
        write!(
            f,
            "{:>10} {:>10} {:>6} {:>11} {:>10.2} {:>10.2} {:>10.2} {:>10.2} {:>11.2} {:>12.0} {:>9.4} {:>12.3}",
            row.size_bytes,
            row.kernel_us,
            row.kind,
            row.iterations,
            time.min_us,
            time.p50_us,
            time.avg_us,
            time.p99_us,
            time.p999_us,
            row.messages_per_s,
            row.gb_per_s(),
            row.app_cpu_us,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::super::kinds::Loop;
    use super::super::row::tests::{sample_row, sample_setup};
    use super::*;

    #[test]
    fn heads_stand_over_their_columns() {
        let row = sample_row(Loop::Async, 64, 10);
        let text = format!("{}\n{}", TableHead(&sample_setup()), TableRow(&row));
        let lines: Vec<&str> = text.lines().collect();
        let version = env!("CARGO_PKG_VERSION");
        let title = format!(
            "# doorbell {version} bench loop op=write steps=3 batches=2 warmup=6 iterations=12"
        );
        assert_eq!(
            lines,
            [
                &*title,
                "# host=host0 cpu=\"A CPU\" cpus=8",
                "# device=nic<0> stream=host path=direct (the stream stores to the UAR)",
                "    #bytes kernel[us]   loop #iterations  t_min[us]  t_p50[us]  t_avg[us]  t_p99[us]  t_p999[us]       msgs/s      GB/s  app_cpu[us]",
                "        64         10  async        4000       1.00      12.02       3.25    1234.57     2345.68       123457    0.0079        0.125",
            ]
        );
    }
}
