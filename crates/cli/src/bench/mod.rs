//! `doorbell bench`: what is measured ([`options`]), between which peers ([`scenario`], [`rendezvous`]), how ([`pass`]), and how it is
//! shown ([`mod@report`]).

mod backend;
mod carrier;
mod chart;
mod clock;
mod collective;
mod csv;
mod device_choice;
mod graph;
mod kinds;
mod machine;
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
mod step;
mod table;
mod trigger;

use anyhow::{Context, Result};
use doorbell::{Device, Listener};

use crate::stdout;
use backend::Backend;
pub use collective::{CollectiveOptions, run as run_collective};
use device_choice::{Identity, SOFTWARE_DEVICE};
use options::{BenchCase, Mode, ReportOutput};
pub use options::{BenchOptions, Exchange, Plan};
use pass::{follow, measure};
use rendezvous::PeerConnection;
use report::BenchReport;
use row::{BenchRow, Setup};
use scenario::{BenchRole, Scenario};

/// Runs a benchmark.
///
/// # Errors
/// Unusable devices, streams, addresses and files; failures of the measurement.
pub fn run(plan: &Plan, options: &BenchOptions) -> Result<()> {
    let output = options.output();
    if let Some(plot) = &output.plot {
        report::check_plot(plot)?;
    }
    let named = options.device().map(open).transpose()?;
    let backend = Backend::new(options.streams())?;
    let identity = Identity::new(named.as_ref())?;
    match options.mode() {
        Mode::Local => {
            let device = named.map_or_else(|| open(SOFTWARE_DEVICE), Ok)?;
            let mut scenario = Scenario::both(&device, &backend, plan)?;
            let setup = scenario.setup(plan);
            report(plan, output, setup, |case| {
                measure(&mut scenario, plan, case, |_| Ok(()))
            })
        }
        Mode::Connect(address) => {
            let (mut rendezvous, device) =
                PeerConnection::connect(&address, plan, &identity, named)
                    .with_context(|| format!("--connect {address}"))?;
            lead(&mut rendezvous, &device, &backend, plan, output)
                .map_err(|error| rendezvous.abort(error))
        }
        Mode::Listen(address) => {
            let listener =
                Listener::bind(&address).with_context(|| format!("--listen {address}"))?;
            stdout::print(&format!("listening at {}\n", listener.address()?))?;
            let (mut rendezvous, plan, device) =
                PeerConnection::accept(&listener, options.timeout(), &identity, named)?;
            answer(&mut rendezvous, &device, &backend, &plan)
                .map_err(|error| rendezvous.abort(error))
        }
    }
}

fn open(name: &str) -> Result<Device> {
    Device::open(name).with_context(|| format!("--device {name}"))
}

/// Measures against the other process.
fn lead(
    rendezvous: &mut PeerConnection,
    device: &Device,
    backend: &Backend,
    plan: &Plan,
    output: ReportOutput,
) -> Result<()> {
    let disconnected = Some(rendezvous.disconnected());
    let mut scenario = Scenario::new(device, backend, plan, BenchRole::Client, disconnected)?;
    rendezvous.connect_peer(scenario.first())?;
    report(plan, output, scenario.setup(plan), |case| {
        let row = measure(&mut scenario, plan, case, |steps| rendezvous.start(steps))?;
        rendezvous.start(0)?;
        Ok(row)
    })
}

/// Takes part in the measurement of the other process.
fn answer(
    rendezvous: &mut PeerConnection,
    device: &Device,
    backend: &Backend,
    plan: &Plan,
) -> Result<()> {
    let disconnected = Some(rendezvous.disconnected());
    let mut scenario = Scenario::new(device, backend, plan, BenchRole::Server, disconnected)?;
    rendezvous.connect_peer(scenario.first())?;
    for case in plan.cases() {
        if scenario.takes_part() {
            follow(&mut scenario, plan, case, || rendezvous.await_start())
                .with_context(|| name(case))?;
        } else {
            while rendezvous.await_start()? > 0 {}
        }
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
    output: ReportOutput,
    setup: Setup,
    mut measure: impl FnMut(BenchCase) -> Result<BenchRow>,
) -> Result<()> {
    let cases = plan.cases();
    let out = std::io::stdout().lock();
    let mut report = BenchReport::begin(out, output, setup, cases.len())?;
    for case in cases {
        let BenchCase {
            kind,
            size_bytes,
            kernel_us,
        } = case;
        report.announce(format!("{kind}, {size_bytes} B, kernel {kernel_us} us"));
        let row = measure(case).with_context(|| name(case))?;
        report.row(row)?;
    }
    report.end()
}
