//! `doorbell softcx run`: a program with a software ConnectX in sight.

use std::ffi::{OsStr, OsString};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};
use doorbell_softcx::device;
use doorbell_softcx::doors::{self, Outcome};

use crate::environment;

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
enum LinkLayer {
    /// InfiniBand
    Ib,
    /// Ethernet, RoCE v2
    Eth,
}

#[derive(Debug, Args)]
pub struct RunOptions {
    /// How programs get at the device
    #[arg(long, value_enum, default_value = "seccomp")]
    door: Door,
    /// The kind of link that the port shows [default: that of the run around this one, or ib]
    #[arg(long, value_enum)]
    link: Option<LinkLayer>,
    /// Runs on one fabric reach each other [default: that of the run around this one, or `default`]
    #[arg(long, value_name = "NAME")]
    fabric: Option<String>,
    /// Write every WQE, packet and CQE to this file, decoded
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Lose this share of packets
    #[arg(long, value_name = "0..1")]
    loss: Option<f64>,
    /// Deliver every packet this much later
    #[arg(long, value_name = "MICROSECONDS")]
    delay_us: Option<u64>,
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

impl RunOptions {
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

    fn device(&self) -> Result<device::Options> {
        let mut faults = device::Faults {
            loss: self.loss.unwrap_or(0.0),
            delay_ns: self.delay_us.unwrap_or(0).saturating_mul(1000),
            ..device::Faults::default()
        };
        for fault in self.fault.iter().flat_map(|list| list.split(',')) {
            faults.set(fault).context("--fault")?;
        }
        Ok(device::Options {
            fabric: match &self.fabric {
                Some(fabric) => fabric.clone(),
                None => outer("fabric").unwrap_or_else(|| "default".into()),
            },
            link: match self.link() {
                LinkLayer::Ib => device::Link::InfiniBand,
                LinkLayer::Eth => device::Link::Ethernet,
            },
            faults,
            trace: self.trace()?,
        })
    }

    fn link(&self) -> LinkLayer {
        let outer = || LinkLayer::from_str(&outer("link")?, false).ok();
        self.link.or_else(outer).unwrap_or(LinkLayer::Ib)
    }

    /// Programs need not stay in this directory.
    fn trace(&self) -> Result<Option<PathBuf>> {
        let absolute = |path| std::path::absolute(path).context("--trace");
        self.trace.as_ref().map(absolute).transpose()
    }

    /// The options that were given, as the environment has them, and none for those that were not.
    fn given(&self) -> Result<[(&'static str, Option<OsString>); 6]> {
        let link = self.link.and_then(|link| link.to_possible_value());
        Ok([
            ("link", link.map(|link| link.get_name().into())),
            ("fabric", self.fabric.clone().map(Into::into)),
            ("trace", self.trace()?.map(Into::into)),
            ("loss", self.loss.map(|loss| loss.to_string().into())),
            ("delay-us", self.delay_us.map(|us| us.to_string().into())),
            ("fault", self.fault.clone().map(Into::into)),
        ])
    }

    /// Tells the program, and runs within this one, what holds.
    fn tell(&self, command: &mut Command, device: &device::Options) -> Result<()> {
        for (option, value) in self.given()? {
            environment::tell(command, option, value.as_deref());
        }
        let word =
            |name: Option<clap::builder::PossibleValue>| name.map(|it| it.get_name().to_owned());
        for (option, value) in [
            ("link", word(self.link().to_possible_value())),
            ("fabric", Some(device.fabric.clone())),
            ("door", word(self.door.to_possible_value())),
        ] {
            environment::tell(command, option, value.as_deref().map(OsStr::new));
        }
        Ok(())
    }

    /// What the run around this one has otherwise than was asked for.
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

fn outer(option: &str) -> Option<String> {
    environment::outer(option)?.into_string().ok()
}

/// Becomes the program. Returns only if that fails.
fn become_program(mut command: Command) -> Outcome {
    let error = command.exec();
    Outcome::NotStarted(error.raw_os_error().unwrap_or(libc::EIO))
}

/// Runs the program: the exit code for this one.
///
/// # Errors
/// Options that make no sense.
pub fn run(options: &RunOptions) -> Result<u8> {
    let device = options.device()?;
    let (name, arguments) = options.program.split_first().context("no program")?;
    let program = || {
        let mut command = Command::new(name);
        command.args(arguments);
        command
    };
    let mut command = program();
    options.tell(&mut command, &device)?;
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
        // The kernel allows one supervisor. If it is that of a run around this one, the device is in sight already.
        Ok(Outcome::Supervised) if outer("door").as_deref() == Some("seccomp") => {
            if let Some(disagreement) = options.disagreement()? {
                eprintln!(
                    "error: a run within a run, and the outer one has {disagreement}; --door preload can have options of its own"
                );
                return Ok(FAILED);
            }
            Ok(become_program(program()))
        }
        other => other,
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
                "error: a seccomp supervisor is there already, not of a run that is known here, and the kernel allows no second one; \
                 --door preload works"
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
