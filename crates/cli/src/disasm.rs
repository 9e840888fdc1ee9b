//! `doorbell disasm`: prints the work requests and bytecode that the library prepares for a send, a write and a wait.

use std::io::Write;

use anyhow::{Context, Result};
use clap::Args;
use doorbell::{
    Access, Device, Endpoint, EndpointConfig, Prepared, ProtectionDomain, QueueKind, Region, Work,
};
use doorbell_wire::mlx5::Wqe;

/// Bytes of a row of the dump: a segment of a WQE.
const ROW_BYTES: usize = 16;

/// The options of `doorbell disasm`.
#[derive(Args, Clone, Debug)]
pub struct DisasmOptions {
    /// Ring by BlueFlame: the doorbell carries the WQE
    #[arg(long)]
    blueflame: bool,

    /// Device of the endpoints, by a name that `doorbell info` lists
    #[arg(long, value_name = "NAME", default_value = "softcx")]
    device: String,
}

/// Prepares a send, a write and a wait on an endpoint, prints them, and cancels them.
///
/// # Errors
/// Those of the library.
pub fn run(options: &DisasmOptions) -> Result<()> {
    let mut out = std::io::stdout().lock();
    let name = &options.device;
    let device = Device::open(name).with_context(|| format!("--device {name}"))?;
    let domain = device.protection_domain();
    let (mut endpoint, peer) = pair(&domain, options)?;
    let region = Region::alloc(&domain, 4096, Access::ALL)?;
    let slices = [region.slice(0, 64)?];
    let remote = region.remote();

    writeln!(
        out,
        "# endpoint {:#x} on {}, connected to {:#x}; region of {} bytes, key {:#x}",
        endpoint.qpn(),
        device.name(),
        peer.qpn(),
        region.len_bytes(),
        region.lkey(),
    )?;
    let send = endpoint.prepare_send(&Work::send(&slices))?;
    show(&mut out, "send of 64 bytes", &send)?;
    let write = endpoint.prepare_send(&Work::write(&slices, remote.slice(2048, 64)?))?;
    show(&mut out, "write of 64 bytes", &write)?;
    let wait = endpoint.prepare_wait_cq(QueueKind::Send)?;
    show(&mut out, "wait for the completion of the send", &wait)?;
    // Rollback takes the newest operation first.
    for prepared in [wait, write, send] {
        endpoint.rollback(prepared);
    }
    Ok(())
}

fn pair(
    domain: &ProtectionDomain,
    options: &DisasmOptions,
) -> doorbell::Result<(Endpoint, Endpoint)> {
    let config = EndpointConfig::default().blueflame(options.blueflame);
    let mut ends = (
        Endpoint::new(domain, &config)?,
        Endpoint::new(domain, &config)?,
    );
    let addresses = (ends.1.address(), ends.0.address());
    ends.0.connect(&addresses.0)?;
    ends.1.connect(&addresses.1)?;
    Ok(ends)
}

fn show(out: &mut impl Write, title: &str, prepared: &Prepared) -> Result<()> {
    writeln!(out, "\n== {title}")?;
    if let Some(bytes) = prepared.wqe() {
        writeln!(out, "WQE, {} bytes", bytes.len())?;
        for (row, bytes) in bytes.chunks(ROW_BYTES).enumerate() {
            write!(out, "{:6} ", row * ROW_BYTES)?;
            for byte in bytes {
                write!(out, " {byte:02x}")?;
            }
            writeln!(out)?;
        }
        let wqe = Wqe::parse(&bytes).context("the library cannot parse a WQE that it has built")?;
        indented(out, &wqe.to_string())?;
    }
    writeln!(out, "bytecode")?;
    indented(out, &prepared.disassemble())
}

fn indented(out: &mut impl Write, text: &str) -> Result<()> {
    text.lines()
        .try_for_each(|line| writeln!(out, "  {line}"))?;
    Ok(())
}
