//! The `doorbell` command.

mod bench;
mod disasm;
mod environment;
mod info;
mod softcx;
mod stdout;

use std::process::ExitCode;

use anyhow::Result;
use clap::error::ErrorKind;
use clap::{Parser, Subcommand};

/// GPU-triggered RDMA: benchmarks, a disassembler for queued operations, and a software ConnectX
#[derive(Parser)]
#[command(name = "doorbell", version, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: CliCommand,
}

#[derive(Subcommand)]
enum CliCommand {
    /// Measure latency, bandwidth and CPU time
    #[command(subcommand, arg_required_else_help = true)]
    Bench(BenchCommand),
    /// Print the work requests and bytecode that are queued for a send, a write and a wait
    Disasm(disasm::DisasmOptions),
    /// List devices, streams, and the control paths of each device
    Info(info::InfoOptions),
    /// Run unmodified verbs programs on a software ConnectX
    #[command(subcommand, arg_required_else_help = true)]
    Softcx(SoftcxCommand),
}

#[derive(Subcommand)]
enum SoftcxCommand {
    /// Run a program and its children with a software ConnectX as the device mlx5_0
    Run(softcx::RunOptions),
}

#[derive(Subcommand)]
enum BenchCommand {
    /// One-way messages: the CPU drives kernel and transfer (sync), or queues both on a stream (async)
    Loop(bench::BenchOptions),
    /// Round trips: each side runs a kernel and then sends; driven by the CPU (sync) or queued on streams (async)
    Pingpong(bench::BenchOptions),
    /// Collective operations of several ranks: launched one at a time (sync), or several on a stream (async)
    Collective(bench::CollectiveOptions),
}

/// Exit status for a wrong command line.
const USAGE: u8 = 2;

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return refuse(&error),
    };
    let done = match cli.command {
        CliCommand::Bench(bench) => {
            let planned = match &bench {
                BenchCommand::Loop(options) => options
                    .plan(bench::Exchange::Loop)
                    .map(|plan| bench::run(&plan, options)),
                BenchCommand::Pingpong(options) => options
                    .plan(bench::Exchange::Pingpong)
                    .map(|plan| bench::run(&plan, options)),
                BenchCommand::Collective(options) => options
                    .plan()
                    .map(|plan| bench::run_collective(&plan, options)),
            };
            match planned {
                Ok(done) => done,
                Err(refused) => return usage(&format!("error: {refused}")),
            }
        }
        CliCommand::Disasm(options) => disasm::run(&options),
        CliCommand::Info(options) => info::run(&options),
        CliCommand::Softcx(SoftcxCommand::Run(options)) => match softcx::run(&options) {
            Ok(status) => return ExitCode::from(status),
            Err(error) => Err(error),
        },
    };
    finish(done)
}

/// The exit status of a finished command. Prints its error.
fn finish(done: Result<()>) -> ExitCode {
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if stdout::is_closed(&error) => stdout::end_by_sigpipe(),
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Prints requested help and versions on stdout, and help for a missing subcommand too, as cargo does. Anything else is an error.
fn refuse(error: &clap::Error) -> ExitCode {
    let is_help = error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand;
    if error.use_stderr() && !is_help {
        return usage(&error.render().to_string());
    }
    finish(stdout::print(&error.render().to_string()))
}

/// Prints what is wrong with the command line as one line: clap's message without its summary of the usage.
fn usage(text: &str) -> ExitCode {
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    let message: Vec<&str> = lines
        .take_while(|line| !line.starts_with("Usage:") && !line.starts_with("For more"))
        .collect();
    eprintln!("{}", message.join(" "));
    ExitCode::from(USAGE)
}
