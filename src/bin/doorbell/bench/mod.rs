//! `doorbell bench`: what is measured ([`options`]), how ([`pass`]), and how it is shown ([`report`]).

mod clock;
mod options;
mod pass;
mod pattern;
mod plot;
mod progress;
mod report;
mod row;
mod sizes;
mod table;

use anyhow::{Context, Result};

use options::{Output, Plan};
use pass::{Rig, measure};
use report::Report;
use row::{Row, Setting};

/// Measures every case of `plan` on `rig` and reports on stdout; gives back the rows.
///
/// # Errors
/// Those of the rig, with the case that met them, and those of the output.
fn run(rig: &mut impl Rig, plan: &Plan, output: Output, setting: Setting) -> Result<Vec<Row>> {
    let cases = plan.cases();
    let mut report = Report::begin(
        std::io::stdout().lock(),
        output,
        setting.clone(),
        cases.len(),
    )?;
    for case in cases {
        report.announce(case);
        let row = measure(rig, plan, &setting, case).with_context(|| {
            let (kind, size, kernel) = (case.kind, case.size_bytes, case.kernel_us);
            format!("{kind} loop, {size} bytes, kernel {kernel} us")
        })?;
        report.row(row)?;
    }
    report.end()
}
