//! The `doorbell` command.

mod bench;
mod disasm;
mod environment;
mod info;
mod softcx;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// GPU-triggered RDMA: measure it, look at what it queues, and see what this machine has for it.
#[derive(Parser)]
#[command(name = "doorbell", version, arg_required_else_help = false)]
struct Cli {
    #[command(subcommand)]
    command: CliCommand,
}

#[derive(Subcommand)]
enum CliCommand {
    /// Measure
    #[command(subcommand, arg_required_else_help = false)]
    BenchCommand(BenchCommand),
    /// Show the bytecode and the WQE of a send, a write and a wait
    Disasm(disasm::DisasmOptions),
    /// List devices, streams and paths
    Info(info::InfoOptions),
    /// The software ConnectX for unmodified verbs programs
    #[command(subcommand, arg_required_else_help = false)]
    SoftcxCommand(SoftcxCommand),
}

#[derive(Subcommand)]
enum SoftcxCommand {
    /// Run a program, and all that it starts, with a software ConnectX in sight as mlx5_0
    Run(softcx::RunOptions),
}

#[derive(Subcommand)]
enum BenchCommand {
    /// The two loops of GPUDirect side by side: kernel and transfer driven by the CPU, and queued on the stream
    Loop(bench::BenchOptions),
    /// Round trips: each side runs a kernel and sends, driven by the CPU, and queued on streams
    Pingpong(bench::BenchOptions),
}

/// Exit code for a command line that makes no sense.
const USAGE: u8 = 2;

fn main() -> ExitCode {
    let line = match Cli::try_parse() {
        Ok(line) => line,
        Err(error) if error.use_stderr() => return usage(&error.render().to_string()),
        Err(help) => {
            // Help that nobody reads any more is no failure.
            let _ = help.print();
            return ExitCode::SUCCESS;
        }
    };
    let done = match line.command {
        CliCommand::BenchCommand(bench) => {
            let (exchange, options) = match bench {
                BenchCommand::Loop(options) => (bench::Exchange::Loop, options),
                BenchCommand::Pingpong(options) => (bench::Exchange::Pingpong, options),
            };
            match options.plan(exchange) {
                Ok(plan) => bench::run(&plan, &options),
                Err(refused) => return usage(&format!("error: {refused}")),
            }
        }
        CliCommand::Disasm(options) => disasm::run(&options),
        CliCommand::Info(options) => info::run(&options),
        CliCommand::SoftcxCommand(SoftcxCommand::Run(options)) => match softcx::run(&options) {
            Ok(code) => return ExitCode::from(code),
            Err(error) => Err(error),
        },
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Says what is wrong with the command line, in one line: what clap has to say without its summary of the usage.
fn usage(text: &str) -> ExitCode {
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    let said: Vec<&str> = lines
        .take_while(|line| !line.starts_with("Usage:") && !line.starts_with("For more"))
        .collect();
    eprintln!("{}", said.join(" "));
    ExitCode::from(USAGE)
}
