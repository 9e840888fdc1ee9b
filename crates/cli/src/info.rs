//! `doorbell info`: lists what this build supports and this machine has.

use std::io::Write;

use anyhow::Result;
use clap::Args;
use doorbell::{Control, Device, Endpoint, EndpointConfig};

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

/// The options of `doorbell info`.
#[derive(Args, Clone, Debug)]
pub struct InfoOptions {
    /// Show only this device, by any name that opens it: `mlx5`, a PCI address, `mlx5_0,port=2,gid=3`
    #[arg(long, value_name = "NAME")]
    device: Option<String>,
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
    match doorbell::CudaContext::primary(0) {
        Ok(context) => {
            writeln!(out, "  cuda     {}", context.device_name())?;
            writeln!(out, "    {:?}", context.capabilities())?;
            for finding in context.findings() {
                writeln!(out, "    {finding}")?;
            }
        }
        Err(error) => writeln!(out, "  cuda     none: {error}")?,
    }
    writeln!(out, "devices")?;
    let names = match &options.device {
        Some(name) => vec![name.clone()],
        None => Device::list(),
    };
    for name in &names {
        match show(&mut out, name) {
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
fn show(out: &mut impl Write, name: &str) -> Result<()> {
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
    writeln!(out, "    path      host stream: {}", endpoint.path())?;
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
    Ok(())
}
