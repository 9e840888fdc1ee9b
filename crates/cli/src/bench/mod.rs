//! `doorbell bench`: what is measured ([`options`]), by whom ([`scenario`], [`rendezvous`]), how ([`pass`]), and how it is shown
//! ([`report`]).

mod backend;
mod clock;
mod graph;
mod message;
mod nvtx;
mod options;
mod pass;
mod pattern;
mod peer;
mod plot;
mod progress;
mod rendezvous;
mod report;
mod row;
mod scenario;
mod sizes;
mod table;
mod trigger;

use anyhow::{Context, Result};
use doorbell::{Device, Listener};

use crate::stdout;
use backend::Backend;
use options::{BenchCase, Mode, Output};

pub use options::{BenchOptions, Exchange, Plan};
use pass::{follow, measure};
use rendezvous::Rendezvous;
use report::Report;
use row::{BenchRow, Setup};
use scenario::{Role, Scenario};

/// Runs a benchmark.
///
/// # Errors
/// What keeps it from being run to its end.
pub fn run(plan: &Plan, options: &BenchOptions) -> Result<()> {
    let name = options.device();
    let device = Device::open(name).with_context(|| format!("--device {name}"))?;
    let backend = options.backend()?;
    match options.mode() {
        Mode::Local => {
            let mut scenario = Scenario::both(&device, &backend, plan)?;
            let setup = scenario.setup();
            report(plan, options.output(), &setup, |case| {
                measure(&mut scenario, plan, &setup, case)
            })
        }
        Mode::Connect(address) => {
            let mut rendezvous = Rendezvous::connect(&address, plan)
                .with_context(|| format!("--connect {address}"))?;
            lead(&mut rendezvous, &device, &backend, plan, options.output())
                .map_err(|error| rendezvous.part(error))
        }
        Mode::Listen(address) => {
            let listener =
                Listener::bind(&address).with_context(|| format!("--listen {address}"))?;
            stdout::print(&format!("listening at {}\n", listener.address()?))?;
            let (mut rendezvous, plan) = Rendezvous::accept(&listener, options.timeout())?;
            second(&mut rendezvous, &device, &backend, &plan)
                .map_err(|error| rendezvous.part(error))
        }
    }
}

/// Measures, with the other process at the other end.
fn lead(
    rendezvous: &mut Rendezvous,
    device: &Device,
    backend: &Backend,
    plan: &Plan,
    output: Output,
) -> Result<()> {
    let mut scenario = Scenario::new(
        device,
        backend,
        plan,
        Role::Client,
        Some(rendezvous.disconnected()),
    )?;
    rendezvous.connect_peer(scenario.first())?;
    let setup = scenario.setup();
    report(plan, output, &setup, |case| {
        rendezvous.meet()?;
        let row = measure(&mut scenario, plan, &setup, case)?;
        rendezvous.meet()?;
        Ok(row)
    })
}

/// Is the other end for the process that measures.
fn second(
    rendezvous: &mut Rendezvous,
    device: &Device,
    backend: &Backend,
    plan: &Plan,
) -> Result<()> {
    let mut scenario = Scenario::new(
        device,
        backend,
        plan,
        Role::Server,
        Some(rendezvous.disconnected()),
    )?;
    rendezvous.connect_peer(scenario.first())?;
    let takes_part = scenario.takes_part();
    for case in plan.cases() {
        rendezvous.await_peer()?;
        if takes_part {
            follow(&mut scenario, plan, case).with_context(|| name(case))?;
        }
        rendezvous.await_peer()?;
    }
    Ok(())
}

fn name(case: BenchCase) -> String {
    let (kind, size, kernel) = (case.kind, case.size_bytes, case.kernel_us);
    format!("{kind} loop, {size} bytes, kernel {kernel} us")
}

/// Measures every case of `plan` and reports on stdout.
fn report(
    plan: &Plan,
    output: Output,
    setup: &Setup,
    mut measure: impl FnMut(BenchCase) -> Result<BenchRow>,
) -> Result<()> {
    let cases = plan.cases();
    let out = std::io::stdout().lock();
    let mut report = Report::begin(out, output, setup.clone(), cases.len())?;
    for case in cases {
        report.announce(case);
        let row = measure(case).with_context(|| name(case))?;
        report.row(row)?;
    }
    report.end().map(drop)
}
