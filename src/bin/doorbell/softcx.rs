//! `doorbell softcx run`: a program with a software ConnectX in sight.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};
use doorbell::soft;
use doorbell::softcx::{self, Outcome};

/// Exit code when the run itself fails, as `env` and `timeout` have it.
const FAILED: u8 = 125;
const NOT_EXECUTABLE: u8 = 126;
const NOT_FOUND: u8 = 127;

/// How programs get at the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Door {
    /// System calls that are about the device stop for a supervisor that has it; any program, also a static one
    Seccomp,
    /// The device is in each process, by a library that is loaded before all others
    Preload,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Link {
    /// InfiniBand
    Ib,
    /// Ethernet, RoCE v2
    Eth,
}

#[derive(Debug, Args)]
pub struct Options {
    /// How programs get at the device
    #[arg(long, value_enum, default_value = "seccomp")]
    door: Door,
    /// The kind of link that the port shows
    #[arg(long, value_enum, default_value = "ib")]
    link: Link,
    /// Runs on one fabric reach each other
    #[arg(long, default_value = "default", value_name = "NAME")]
    fabric: String,
    /// Write every WQE, packet and CQE to this file, decoded
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Lose this share of packets
    #[arg(long, default_value_t = 0.0, value_name = "0..1")]
    loss: f64,
    /// Deliver every packet this much later
    #[arg(long, default_value_t = 0, value_name = "MICROSECONDS")]
    delay_us: u64,
    /// More faults: loss=0.1,duplicate=0.1,reorder=0.1,seed=7; by number drop=3,garble=1,overrun=9; by number and code
    /// refuse=1:0x62,send=2:0x12,recv=1:0x04; down-ms=100+50
    #[arg(long, value_name = "FAULTS")]
    fault: Option<String>,
    /// The preload door's library; beside this executable otherwise
    #[arg(long, value_name = "FILE")]
    library: Option<PathBuf>,
    /// The program and its arguments
    #[arg(
        required = true,
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "PROGRAM"
    )]
    program: Vec<OsString>,
}

impl Options {
    /// The preload door's library.
    fn library(&self) -> Result<PathBuf> {
        if let Some(library) = &self.library {
            return std::path::absolute(library).context("--library");
        }
        let own = std::env::current_exe().context("the path of this executable")?;
        let found = own.with_file_name("libdoorbell_softcx.so");
        if !found.is_file() {
            bail!(
                "{}: not there; build it with `cargo build --workspace`, or name it with --library",
                found.display()
            );
        }
        Ok(found)
    }

    fn device(&self) -> Result<soft::Options> {
        let mut faults = soft::Faults {
            loss: self.loss,
            delay_ns: self.delay_us.saturating_mul(1000),
            ..soft::Faults::default()
        };
        for fault in self.fault.iter().flat_map(|list| list.split(',')) {
            faults.set(fault).context("--fault")?;
        }
        Ok(soft::Options {
            fabric: self.fabric.clone(),
            link: match self.link {
                Link::Ib => soft::Link::InfiniBand,
                Link::Eth => soft::Link::Ethernet,
            },
            faults,
            trace: self.trace.clone(),
        })
    }
}

/// Becomes the program, with the library before all others. Returns only if that fails.
fn preloaded(
    mut command: Command,
    library: &Path,
    device: &soft::Options,
    options: &Options,
) -> Outcome {
    let mut list = library.as_os_str().to_owned();
    if let Some(before) = std::env::var_os("LD_PRELOAD").filter(|before| !before.is_empty()) {
        list.push(":");
        list.push(before);
    }
    command.env("LD_PRELOAD", list);
    command.env("DOORBELL_SOFTCX_FABRIC", &device.fabric);
    let link = options.link.to_possible_value();
    command.env(
        "DOORBELL_SOFTCX_LINK",
        link.as_ref().map_or("ib", |link| link.get_name()),
    );
    command.env("DOORBELL_SOFTCX_LOSS", device.faults.loss.to_string());
    command.env(
        "DOORBELL_SOFTCX_DELAY_US",
        (device.faults.delay_ns / 1000).to_string(),
    );
    for (name, value) in [
        ("FAULT", options.fault.as_ref().map(OsString::from)),
        ("TRACE", device.trace.clone().map(OsString::from)),
    ] {
        let name = format!("DOORBELL_SOFTCX_{name}");
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    let error = command.exec();
    Outcome::NotStarted(error.raw_os_error().unwrap_or(libc::EIO))
}

/// Runs the program: the exit code for this one.
///
/// # Errors
/// Options that make no sense.
pub fn run(options: &Options) -> Result<u8> {
    let device = options.device()?;
    let (name, arguments) = options.program.split_first().context("no program")?;
    let mut command = Command::new(name);
    command.args(arguments);
    let outcome = match options.door {
        Door::Seccomp => softcx::run(&device, command),
        Door::Preload => Ok(preloaded(command, &options.library()?, &device, options)),
    };
    let name = name.to_string_lossy();
    Ok(match outcome {
        Ok(Outcome::Exited(code)) => code,
        Ok(Outcome::NotStarted(errno)) => {
            let error = std::io::Error::from_raw_os_error(errno);
            eprintln!("error: {name}: {error}");
            if error.kind() == std::io::ErrorKind::NotFound {
                NOT_FOUND
            } else {
                NOT_EXECUTABLE
            }
        }
        Ok(Outcome::Supervised) => {
            eprintln!(
                "error: a seccomp supervisor is there already, and the kernel allows no second one; --door preload works"
            );
            FAILED
        }
        Ok(other) => {
            eprintln!("error: {name}: {other:?}");
            FAILED
        }
        Err(error) => {
            eprintln!("error: {error}");
            FAILED
        }
    })
}
