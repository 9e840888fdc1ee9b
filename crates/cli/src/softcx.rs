//! `doorbell softcx run`: runs a program on a software ConnectX.

use std::ffi::{OsStr, OsString};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};
use doorbell_softcx::device;
use doorbell_softcx::doors::{self, ProgramExit};

use crate::environment;

/// Exit status if the command itself fails, as with `env` and `timeout`.
const FAILED: u8 = 125;
const NOT_EXECUTABLE: u8 = 126;
const NOT_FOUND: u8 = 127;

/// How programs reach the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Door {
    /// A supervisor owns the device and answers system calls for it; works for any program, static ones included
    Seccomp,
    /// A preloaded library puts the device into each process; faster, for dynamically linked programs
    Preload,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum LinkOption {
    /// InfiniBand
    Ib,
    /// Ethernet, RoCE v2
    Eth,
}

#[derive(Debug, Args)]
pub struct RunOptions {
    /// How programs reach the device
    #[arg(long, value_enum, default_value = "seccomp")]
    door: Door,
    /// Link layer of the port [default: that of an enclosing run, or ib]
    #[arg(long, value_enum)]
    link: Option<LinkOption>,
    /// Wire between devices: shm (memory of this host), udp or udp:ADDRESS (RoCE v2 on UDP port 4791, with --link eth), udp+shm or udp+shm:ADDRESS (shm to devices of this host that have it, too, udp to others) [default: that of an enclosing run, or shm]
    #[arg(long, value_name = "WIRE", value_parser = wire)]
    wire: Option<String>,
    /// Properties of the emulated port and PCI function, separated by commas: grh (a global route is required), no-atomics, no-blueflame, foreign-gid, memlock [default: that of an enclosing run, or none]
    #[arg(long, value_name = "LIST", value_parser = function)]
    function: Option<String>,
    /// Fabric to join: devices on one fabric reach each other [default: that of an enclosing run, or `default`]
    #[arg(long, value_name = "NAME")]
    fabric: Option<String>,
    /// Write every WQE, packet and CQE to this file as text
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Append the frames that leave to this capture file (libpcap), and those that arrive by UDP
    #[arg(long, value_name = "FILE")]
    pcap: Option<PathBuf>,
    /// Probability that a packet that is sent is lost, 0 to 1
    #[arg(long, value_name = "0..1", allow_negative_numbers = true, value_parser = probability)]
    loss: Option<f64>,
    /// Delay of every packet in microseconds
    #[arg(long, value_name = "MICROSECONDS")]
    delay_us: Option<u64>,
    /// More faults, separated by commas
    ///
    /// Probabilities: loss=0.1 and duplicate=0.1 (packets sent), reorder=0.1, lose-arriving=0.1, with seed=7.
    /// The Nth packet, response or completion, from 1: drop=3, garble=1, overrun=9.
    /// The Nth request, send or receive with the code of its failure: refuse=1:0x62, send=2:0x12, recv=1:0x04.
    /// Times after the start: down-ms=100+50 (link down after 100 ms for 50 ms), gone-ms=100 (device removed), gid-ms=100 (the GID moves),
    /// fatal-ms=100+50 (fatal event after 100 ms; the device works for another 50 ms).
    /// Duration and order of the device's work, in microseconds: late-writes-us=20, late-packets-us=20, fetch-us=50, flush-us=2000, commands-us=500.
    /// Commands: hang=reset:5000 (answered 5,000 ms later), eio=error+reset (fail with EIO).
    #[arg(long, value_name = "FAULTS", verbatim_doc_comment, value_parser = faults)]
    fault: Option<String>,
    /// Library of the preload door [default: libdoorbell_softcx.so beside this executable, or where scripts/install-c puts it]
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

impl RunOptions {
    /// The preload door's library.
    fn library(&self) -> Result<PathBuf> {
        if let Some(library) = &self.library {
            return std::path::absolute(library).context("--library");
        }
        let own = std::env::current_exe().context("the path of this executable")?;
        let found = own.with_file_name("libdoorbell_softcx.so");
        // PREFIX/bin/doorbell, with PREFIX/libexec/doorbell/.
        let prefix = own.parent().and_then(Path::parent);
        let installed = prefix.map(|prefix| prefix.join("libexec/doorbell/libdoorbell_softcx.so"));
        if let Some(installed) = installed.filter(|it| it.is_file() && !found.is_file()) {
            return Ok(installed);
        }
        if !found.is_file() {
            bail!(
                "{} does not exist; build it with `cargo build --workspace`, or name its path with --library",
                found.display()
            );
        }
        Ok(found)
    }

    fn device(&self) -> Result<device::DeviceOptions> {
        let mut faults = device::Faults {
            loss: self.loss.unwrap_or(0.0),
            delay_ns: self.delay_us.unwrap_or(0).saturating_mul(1000),
            ..device::Faults::default()
        };
        if let Some(list) = &self.fault {
            faults.set_all(list).context("--fault")?;
        }
        let mut options = device::DeviceOptions::default();
        options.fabric = match &self.fabric {
            Some(fabric) => fabric.clone(),
            None => outer("fabric").unwrap_or_else(|| "default".into()),
        };
        options.link = match self.link() {
            LinkOption::Ib => device::LinkLayer::InfiniBand,
            LinkOption::Eth => device::LinkLayer::Ethernet,
        };
        if let Some(wire) = self.wire() {
            options.wire = device::WireKind::parse(&wire)?;
        }
        if options.wire != device::WireKind::SharedMemory && self.link() != LinkOption::Eth {
            bail!("--wire udp and --wire udp+shm need --link eth");
        }
        options.function = function_of(&self.function().unwrap_or_default())?;
        options.faults = faults;
        options.trace = absolute("--trace", self.trace.as_ref())?;
        options.pcap = absolute("--pcap", self.pcap.as_ref())?;
        Ok(options)
    }

    fn function(&self) -> Option<String> {
        self.function.clone().or_else(|| outer("function"))
    }

    fn wire(&self) -> Option<String> {
        self.wire.clone().or_else(|| outer("wire"))
    }

    fn link(&self) -> LinkOption {
        let outer = || LinkOption::from_str(&outer("link")?, false).ok();
        self.link.or_else(outer).unwrap_or(LinkOption::Ib)
    }

    /// The options on the command line as environment variables hold them; `None` for those that are not given.
    fn given(&self) -> Result<[(&'static str, Option<OsString>); 9]> {
        let link = self.link.and_then(|link| link.to_possible_value());
        Ok([
            ("link", link.map(|link| link.get_name().into())),
            ("wire", self.wire.clone().map(Into::into)),
            ("function", self.function.clone().map(Into::into)),
            ("fabric", self.fabric.clone().map(Into::into)),
            (
                "trace",
                absolute("--trace", self.trace.as_ref())?.map(Into::into),
            ),
            (
                "pcap",
                absolute("--pcap", self.pcap.as_ref())?.map(Into::into),
            ),
            ("loss", self.loss.map(|loss| loss.to_string().into())),
            ("delay-us", self.delay_us.map(|us| us.to_string().into())),
            ("fault", self.fault.clone().map(Into::into)),
        ])
    }

    /// Passes the options to the program and to runs nested in this one.
    fn export(&self, command: &mut Command, device: &device::DeviceOptions) -> Result<()> {
        for (option, value) in self.given()? {
            environment::export(command, option, value.as_deref());
        }
        let word =
            |name: Option<clap::builder::PossibleValue>| name.map(|it| it.get_name().to_owned());
        for (option, value) in [
            ("link", word(self.link().to_possible_value())),
            ("wire", self.wire()),
            ("function", self.function()),
            ("fabric", Some(device.fabric.clone())),
            ("door", word(self.door.to_possible_value())),
        ] {
            environment::export(command, option, value.as_deref().map(OsStr::new));
        }
        Ok(())
    }

    /// The first option that an enclosing run has with another value than asked for.
    fn disagreement(&self) -> Result<Option<String>> {
        for (option, asked) in self.given()? {
            let has = environment::outer(option);
            let Some(asked) = asked.filter(|asked| Some(asked) != has.as_ref()) else {
                continue;
            };
            let has = match has {
                Some(has) => format!("--{option} {}", has.display()),
                None => format!("no --{option}"),
            };
            return Ok(Some(format!("{has}, not {}", asked.display())));
        }
        Ok(None)
    }
}

/// The absolute path: programs may change their directory.
fn absolute(option: &'static str, path: Option<&PathBuf>) -> Result<Option<PathBuf>> {
    let absolute = |path| std::path::absolute(path).context(option);
    path.map(absolute).transpose()
}

/// A probability.
fn probability(text: &str) -> Result<f64, String> {
    let value: f64 = text.parse().map_err(|_| "not a number".to_owned())?;
    // NaN is in no range.
    if !(0.0..=1.0).contains(&value) {
        return Err("a probability is 0 to 1".into());
    }
    Ok(value)
}

/// A wire that the device has.
fn wire(text: &str) -> doorbell_wire::Result<String> {
    device::WireKind::parse(text).map(|_| text.to_owned())
}

/// A list of what a function of a card demands or lacks.
fn function(list: &str) -> doorbell_wire::Result<String> {
    function_of(list).map(|_| list.to_owned())
}

fn function_of(list: &str) -> doorbell_wire::Result<device::Function> {
    let mut function = device::Function::default();
    list.split(',')
        .filter(|word| !word.is_empty())
        .try_for_each(|word| function.set(word))?;
    Ok(function)
}

/// A list of faults that the device understands.
fn faults(list: &str) -> doorbell_wire::Result<String> {
    device::Faults::default()
        .set_all(list)
        .map(|()| list.to_owned())
}

fn outer(option: &str) -> Option<String> {
    environment::outer(option)?.into_string().ok()
}

/// Replaces this process by the program. Returns only if that fails.
fn become_program(mut command: Command) -> ProgramExit {
    let error = command.exec();
    ProgramExit::NotStarted(error.raw_os_error().unwrap_or(libc::EIO))
}

/// Runs the program and returns the exit status of this process.
///
/// # Errors
/// Invalid options.
pub fn run(options: &RunOptions) -> Result<u8> {
    let device = options.device()?;
    let (name, arguments) = options.program.split_first().context("no program")?;
    let program = || {
        let mut command = Command::new(name);
        command.args(arguments);
        command
    };
    let mut command = program();
    options.export(&mut command, &device)?;
    let outcome = match options.door {
        Door::Seccomp => {
            environment::without_library(&mut command);
            doors::run(&device, command)
        }
        Door::Preload => {
            environment::with_library(&mut command, &options.library()?);
            Ok(become_program(command))
        }
    };
    let outcome = match outcome {
        // The kernel allows one supervisor. If it belongs to an enclosing run, the program reaches the device already.
        Ok(ProgramExit::Supervised) if outer("door").as_deref() == Some("seccomp") => {
            if let Some(disagreement) = options.disagreement()? {
                eprintln!(
                    "error: this run is nested in another, which has {disagreement}; a nested run needs --door preload for its own options"
                );
                return Ok(FAILED);
            }
            Ok(become_program(program()))
        }
        other => other,
    };
    let name = name.to_string_lossy();
    Ok(match outcome {
        Ok(ProgramExit::Exited(code)) => code,
        Ok(ProgramExit::NotStarted(errno)) => {
            let error = std::io::Error::from_raw_os_error(errno);
            eprintln!("error: {name}: {error}");
            if error.kind() == std::io::ErrorKind::NotFound {
                NOT_FOUND
            } else {
                NOT_EXECUTABLE
            }
        }
        Ok(ProgramExit::Supervised) => {
            eprintln!(
                "error: another seccomp supervisor already controls this process, and the kernel allows only one; use --door preload"
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
