//! `doorbell info`: lists what this build supports and this machine has.

use std::io::Write;

use anyhow::{Result, ensure};
use clap::Args;
use doorbell::{Control, Device, Endpoint, EndpointConfig, MessageCosts};

/// What a feature of the library adds.
fn purpose(feature: &str) -> &'static str {
    match feature {
        "softcx" => "software ConnectX in this process",
        "group" => "groups of processes",
        "verbs" => "NICs of rdma-core",
        "cuda" => "CUDA streams",
        _ => "",
    }
}

/// The streams for which the path of an endpoint is chosen.
const HOST: &str = "host stream";
#[cfg(feature = "cuda")]
const HOST_AND_CUDA: &str = "host and CUDA streams";

/// The options of `doorbell info`.
#[derive(Args, Clone, Debug)]
pub struct InfoOptions {
    /// Show only this device, by any name that opens it: `mlx5`, a PCI address, `mlx5_0,port=2,gid=3`
    #[arg(long, value_name = "NAME")]
    device: Option<String>,
    /// Measure on each device what messages cost, and from which length on they are read and not copied
    #[arg(long)]
    protocols: bool,
    /// With --protocols: the round trip of the network to the peer in microseconds, which the measurement in one process does not have
    #[arg(long, value_name = "US", default_value_t = 0.0, requires = "protocols")]
    round_trip: f64,
}

/// Lists version, features, streams, devices, and the control paths of each device.
///
/// # Errors
/// A device that was named and cannot be used, and failed writes. A device that was found and cannot be used is listed with the reason.
pub fn run(options: &InfoOptions) -> Result<()> {
    let mut out = std::io::stdout().lock();
    let (os, arch) = (std::env::consts::OS, std::env::consts::ARCH);
    writeln!(out, "doorbell {} ({os}, {arch})", env!("CARGO_PKG_VERSION"))?;
    writeln!(out, "features")?;
    for (name, compiled) in doorbell::__private::FEATURES {
        let state = if compiled {
            "compiled in"
        } else {
            "not compiled in"
        };
        writeln!(out, "  {name:<8} {}: {state}", purpose(name))?;
    }
    writeln!(out, "streams")?;
    writeln!(
        out,
        "  host     thread of this process; kernels are closures"
    )?;
    #[cfg(feature = "cuda")]
    writeln!(
        out,
        "  kernels of the library {}",
        doorbell::__private::kernels_made_by()
    )?;
    // Kept until the devices are shown: whether a GPU can ring a card is tried in a context that is there.
    #[cfg(feature = "cuda")]
    let context = doorbell::CudaContext::primary(0);
    #[cfg(feature = "cuda")]
    match &context {
        Ok(context) => {
            writeln!(out, "  cuda     {}", context.device_name())?;
            writeln!(out, "    {:?}", context.capabilities())?;
            for finding in context.findings() {
                writeln!(out, "    {finding}")?;
            }
        }
        Err(error) => writeln!(out, "  cuda     none: {error}")?,
    }
    #[cfg(feature = "cuda")]
    let streams = if context.is_ok() { HOST_AND_CUDA } else { HOST };
    #[cfg(not(feature = "cuda"))]
    let streams = HOST;
    writeln!(out, "devices")?;
    let names = match &options.device {
        Some(name) => vec![name.clone()],
        None => Device::list(),
    };
    for name in &names {
        match show(&mut out, name, streams, options) {
            Ok(()) => {}
            Err(error) if error.is::<std::io::Error>() => return Err(error),
            // A device that the user has named has to work. Of those that are found, a port may be down.
            Err(error) if options.device.is_some() => {
                return Err(error.context(format!("device {name}")));
            }
            Err(error) => writeln!(out, "  {name:<8} {error:#}")?,
        }
    }
    Ok(())
}

/// Shows a device, and the control paths that its endpoints may take.
fn show(out: &mut impl Write, name: &str, streams: &str, options: &InfoOptions) -> Result<()> {
    let device = Device::open(name)?;
    let endpoint = Endpoint::new(&device.protection_domain(), &EndpointConfig::default())?;
    let name = device.name();
    let kind = if name == "softcx" {
        "software ConnectX in this process; reaches processes on this host"
    } else if name.starts_with("verbs:") {
        "verbs device through rdma-core"
    } else {
        "mlx5 device through rdma-core"
    };
    let config = endpoint.config();
    writeln!(out, "  {name:<8} {kind}")?;
    writeln!(
        out,
        "    endpoint  {} sends, {} receives, {} KiB, MTU {} bytes",
        config.send_depth,
        config.recv_depth,
        endpoint.memory_bytes().div_ceil(1024),
        config.mtu_bytes,
    )?;
    writeln!(out, "    path      {streams}: {}", endpoint.path())?;
    for control in Control::ALL {
        if control == endpoint.path().control {
            continue;
        }
        let config = EndpointConfig::default().control(Some(control));
        match Endpoint::new(&device.protection_domain(), &config) {
            Ok(other) => writeln!(
                out,
                "              also {}: {}",
                control,
                other.path().reason
            )?,
            Err(error) => writeln!(out, "              {error}")?,
        }
    }
    if options.protocols {
        show_protocols(out, &device, options.round_trip)?;
    }
    Ok(())
}

/// Shows which messages are better eager, and what both protocols cost.
fn show_protocols(out: &mut impl Write, device: &Device, round_trip_us: f64) -> Result<()> {
    ensure!(
        round_trip_us.is_finite() && round_trip_us >= 0.0,
        "--round-trip {round_trip_us}: not a time in microseconds"
    );
    let measured = MessageCosts::measure(&device.protection_domain())?;
    let costs = measured.over(round_trip_us * 1e3);
    let limit = costs.eager_bytes();
    writeln!(
        out,
        "    messages  up to {limit} bytes eager: a host stream or a thread copies them out of a slot in less time than a read's round trip. Longer ones are read"
    )?;
    writeln!(
        out,
        "              {:>9}  {:>10}  {:>10}  {:>10}  {:>10}  {:>13}  chosen",
        "bytes", "send us", "copy us", "read us", "eager us", "rendezvous us"
    )?;
    for len in (3..=20).step_by(2).map(|shift| 1_u64 << shift) {
        let us = |ns: f64| format!("{:.2}", ns / 1e3);
        writeln!(
            out,
            "              {len:>9}  {:>10}  {:>10}  {:>10}  {:>10}  {:>13}  {}",
            us(costs.send.at(len)),
            us(costs.copy.at(len)),
            us(costs.read.at(len)),
            us(costs.eager_ns(len)),
            us(costs.rendezvous_ns(len)),
            if len <= limit.into() {
                "eager"
            } else {
                "rendezvous"
            }
        )?;
    }
    Ok(())
}
