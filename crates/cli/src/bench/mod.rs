//! `doorbell bench`: what is measured ([`options`]), by whom ([`cast`], [`link`]), how ([`pass`]), and how it is shown
//! ([`report`]).

mod cast;
mod clock;
mod end;
mod graph;
mod link;
mod message;
mod nvtx;
mod options;
mod pass;
mod pattern;
mod plot;
mod progress;
mod report;
mod row;
mod sizes;
mod stream;
mod table;
mod trigger;

use std::io::Write;

use anyhow::{Context, Result};
use doorbell::{Device, Listener};

use cast::{Cast, Part};
use link::Link;
use options::{Case, Output, Place};
pub use options::{Exchange, Options, Plan};
use pass::{follow, measure};
use report::Report;
use row::{Row, Setting};
use stream::Ground;

/// Runs a benchmark.
///
/// # Errors
/// What keeps it from being run to its end.
pub fn run(plan: &Plan, options: &Options) -> Result<()> {
    let name = options.device();
    let device = Device::open(name).with_context(|| format!("--device {name}"))?;
    let ground = options.ground()?;
    match options.place() {
        Place::Here => {
            let mut cast = Cast::both(&device, &ground, plan)?;
            let setting = cast.setting();
            report(plan, options.output(), &setting, |case| {
                measure(&mut cast, plan, &setting, case)
            })
        }
        Place::Connect(address) => {
            let mut link =
                Link::connect(&address, plan).with_context(|| format!("--connect {address}"))?;
            lead(&mut link, &device, &ground, plan, options.output())
                .map_err(|error| link.part(error))
        }
        Place::Listen(address) => {
            let listener =
                Listener::bind(&address).with_context(|| format!("--listen {address}"))?;
            println!("listening at {}", listener.address()?);
            std::io::stdout().flush()?;
            let (mut link, plan) = Link::accept(&listener, options.timeout())?;
            second(&mut link, &device, &ground, &plan).map_err(|error| link.part(error))
        }
    }
}

/// Measures, with the other process at the other end.
fn lead(
    link: &mut Link,
    device: &Device,
    ground: &Ground,
    plan: &Plan,
    output: Output,
) -> Result<()> {
    let mut cast = Cast::new(device, ground, plan, Part::First, Some(link.peer_gone()))?;
    link.introduce(cast.first())?;
    let setting = cast.setting();
    report(plan, output, &setting, |case| {
        link.meet()?;
        let row = measure(&mut cast, plan, &setting, case)?;
        link.meet()?;
        Ok(row)
    })
}

/// Is the other end for the process that measures.
fn second(link: &mut Link, device: &Device, ground: &Ground, plan: &Plan) -> Result<()> {
    let mut cast = Cast::new(device, ground, plan, Part::Second, Some(link.peer_gone()))?;
    link.introduce(cast.first())?;
    let takes_part = cast.takes_part();
    for case in plan.cases() {
        link.await_peer()?;
        if takes_part {
            follow(&mut cast, plan, case).with_context(|| name(case))?;
        }
        link.await_peer()?;
    }
    Ok(())
}

fn name(case: Case) -> String {
    let (kind, size, kernel) = (case.kind, case.size_bytes, case.kernel_us);
    format!("{kind} loop, {size} bytes, kernel {kernel} us")
}

/// Measures every case of `plan` and reports on stdout.
fn report(
    plan: &Plan,
    output: Output,
    setting: &Setting,
    mut measure: impl FnMut(Case) -> Result<Row>,
) -> Result<()> {
    let cases = plan.cases();
    let out = std::io::stdout().lock();
    let mut report = Report::begin(out, output, setting.clone(), cases.len())?;
    for case in cases {
        report.announce(case);
        let row = measure(case).with_context(|| name(case))?;
        report.row(row)?;
    }
    report.end().map(drop)
}
