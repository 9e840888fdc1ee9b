//! The options of the benchmarks, and the plan that follows from them.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};
use serde::{Deserialize, Serialize};

use super::backend::{Backend, MemoryKind, StreamKind};
use super::row::Loop;
use super::sizes::{self, MessageSizes};
use super::trigger::TriggerKind;

/// Steps in flight, over all batches. Four queues of the deepest endpoint and the longest stream hold what they need.
const IN_FLIGHT_MAX: u64 = 4096;

/// What `doorbell bench loop` and `doorbell bench pingpong` take.
#[derive(Args, Clone, Debug)]
pub struct BenchOptions {
    /// Message sizes in bytes: a list with K and M, where A..B is every power of two from A to B
    #[arg(long, value_name = "LIST", default_value = "8..64K")]
    sizes: MessageSizes,

    /// Kernel lengths in microseconds; in a pingpong each side runs a kernel before it sends
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "0,10",
          value_parser = clap::value_parser!(u64).range(0..=1_000_000))]
    kernel_us: Vec<u64>,

    /// Steps that are queued as one batch
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..=4096))]
    steps: u64,

    /// Batches in flight before the application waits for the oldest
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u64).range(1..=64))]
    batches: u64,

    /// Iterations of one row, rounded up to whole batches
    #[arg(long, value_name = "N", default_value_t = 4000, value_parser = clap::value_parser!(u64).range(2..=100_000_000))]
    iterations: u64,

    /// The device that this process measures on, as `doorbell info` names it; with --listen and --connect each side has its own
    #[arg(long, value_name = "NAME", default_value = "softcx")]
    device: String,

    /// What kernels and transfers are queued on: threads of this process, or the streams of a GPU, whose time is by its own events at the
    /// end of each batch
    #[arg(long, value_name = "KIND", value_enum, default_value_t = StreamKind::Host)]
    stream: StreamKind,

    /// Where the messages lie, with `--stream cuda`
    #[arg(long, value_name = "WHERE", value_enum, default_value_t = MemoryKind::Host)]
    memory: MemoryKind,

    /// Queue each batch of `bench loop` as one CUDA graph, with `--stream cuda`; the synchronous loop queues none, and is as without
    #[arg(long)]
    graph: bool,

    /// Who rings in the asynchronous loop, with `--stream cuda`: the stream behind the kernel of a step, or that kernel itself, which waits
    /// for the completion as well; `build`: it makes the work request, too
    #[arg(long, value_name = "WHO", value_enum, default_value_t = TriggerKind::Stream)]
    trigger: TriggerKind,

    /// Which GPU, with `--stream cuda`
    #[arg(long, value_name = "N", default_value_t = 0)]
    gpu: u32,

    /// How a message goes over: written to the peer's memory, or sent to a receive that the peer posted
    ///
    /// Where the receiving side must learn of a message (in a pingpong, and to check it), a write carries immediate data and
    /// takes a receive as well.
    #[arg(long, value_name = "OP", value_enum, default_value_t = Op::Write)]
    op: Op,

    /// Which of the two loops to run
    #[arg(long = "loop", value_name = "LOOP", value_enum, default_value_t = Loops::Both)]
    which: Loops,

    /// Check every byte of every message on arrival
    #[arg(long)]
    validate: bool,

    /// Seed of the bytes that are sent
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,

    /// Leave the kernels out, with `--loop sync --kernel-us 0`: transfers alone, as perftest measures them
    #[arg(long)]
    no_kernel: bool,

    /// Print a list of rows as JSON instead of the table
    #[arg(long)]
    json: bool,

    /// Draw time and CPU of the loops against the size
    #[arg(long, value_name = "FILE.svg")]
    plot: Option<PathBuf>,

    /// Longest wait for the peer, and for any one transfer, in seconds; who listens waits for a peer as long as it takes
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..=3600))]
    timeout_s: u64,

    /// Be one of two processes: wait at ADDR, such as 127.0.0.1:7471, for the one that measures; port 0 takes a free one
    #[arg(long, value_name = "ADDR", conflicts_with_all = ["connect", "json", "plot"])]
    listen: Option<String>,

    /// Be one of two processes: measure against the one that listens at ADDR
    #[arg(long, value_name = "ADDR")]
    connect: Option<String>,
}

/// Which loops to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Loops {
    Sync,
    Async,
    Both,
}

/// What a step is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Exchange {
    /// A message one way.
    Loop,
    /// A message there and one back.
    Pingpong,
}

/// How a message goes over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Op {
    /// RDMA write to the peer's memory.
    Write,
    /// Send to a receive of the peer's.
    Send,
}

/// What to measure. The process that connects sends it to the one that listens: only one of the two is told.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    /// What a step is.
    pub exchange: Exchange,
    /// How a message goes over.
    pub op: Op,
    /// Message sizes.
    pub sizes: MessageSizes,
    /// Kernel lengths.
    pub kernel_us: Vec<u64>,
    /// Loops, in the order of the rows.
    pub loops: Vec<Loop>,
    /// Steps of a batch.
    pub steps: u64,
    /// Batches in flight.
    pub batches: u64,
    /// Iterations of a row; a multiple of `steps`, at least 2.
    pub iterations: u64,
    /// Whether every byte is checked.
    pub validate: bool,
    /// No kernels: transfers alone.
    pub no_kernel: bool,
    /// Seed of the bytes.
    pub seed: u64,
    /// Longest wait, in seconds.
    pub timeout_s: u64,
}

/// Where the other end is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Both ends in this process.
    Local,
    /// The other process measures; it will come to this address.
    Listen(String),
    /// The other process listens at this address.
    Connect(String),
}

/// How the rows leave.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Output {
    /// JSON instead of a table.
    pub json: bool,
    /// Where the drawing goes.
    pub plot: Option<PathBuf>,
}

impl BenchOptions {
    /// What to measure.
    ///
    /// # Errors
    /// Options that are fine one by one and not together.
    pub fn plan(&self, exchange: Exchange) -> Result<Plan, String> {
        let batches = self.iterations.div_ceil(self.steps);
        let plan = Plan {
            exchange,
            op: self.op,
            sizes: self.sizes.clone(),
            kernel_us: self.kernel_us.clone(),
            loops: match self.which {
                Loops::Sync => vec![Loop::Sync],
                Loops::Async => vec![Loop::Async],
                Loops::Both => vec![Loop::Sync, Loop::Async],
            },
            steps: self.steps,
            batches: self.batches,
            iterations: batches * self.steps,
            validate: self.validate,
            no_kernel: self.no_kernel,
            seed: self.seed,
            timeout_s: self.timeout_s,
        };
        if self.memory == MemoryKind::Gpu && self.stream != StreamKind::Cuda {
            return Err("--memory gpu goes with --stream cuda".into());
        }
        if self.memory == MemoryKind::Gpu && self.validate {
            return Err("--validate goes with --memory host: functions of the host, which look at the bytes, must not call CUDA".into());
        }
        self.check_graph(exchange)?;
        self.check_trigger()?;
        plan.check().map(|()| plan)
    }

    /// A graph repeats what it was recorded with, in one process.
    fn check_graph(&self, exchange: Exchange) -> Result<(), String> {
        let refusals = [
            (
                self.stream != StreamKind::Cuda,
                "--graph goes with --stream cuda",
            ),
            (
                exchange != Exchange::Loop,
                "--graph goes with bench loop: a step of a pingpong is of two streams",
            ),
            (
                self.mode() != Mode::Local,
                "--graph goes without --listen and --connect: both ends are in this process",
            ),
            (
                self.op != Op::Write,
                "--graph goes with --op write: receives are posted by the application, and not by the graph",
            ),
            (
                self.validate,
                "--graph goes without --validate: functions of the host, which look at the bytes, are in no graph",
            ),
            (
                self.no_kernel,
                "--graph goes without --no-kernel: its kernels are in the graph",
            ),
            (
                self.which == Loops::Sync,
                "--graph goes with --loop async or both: the synchronous loop queues no batches",
            ),
        ];
        let refused = refusals.iter().find(|(refused, _)| self.graph && *refused);
        refused.map_or(Ok(()), |(_, reason)| Err((*reason).into()))
    }

    fn check_trigger(&self) -> Result<(), String> {
        let refusals = [
            (
                self.stream != StreamKind::Cuda,
                "--trigger goes with --stream cuda",
            ),
            (
                self.graph,
                "--trigger goes without --graph: a trigger is executed once",
            ),
            (
                self.which == Loops::Sync,
                "--trigger goes with --loop async or both: in the synchronous loop the application rings",
            ),
        ];
        let builds = self.trigger == TriggerKind::Build;
        if builds && (self.op != Op::Write || self.which != Loops::Async) {
            return Err("--trigger build goes with --op write and --loop async: the kernels have the send queue to themselves".into());
        }
        let rings = self.trigger != TriggerKind::Stream;
        let refused = refusals.iter().find(|(refused, _)| rings && *refused);
        refused.map_or(Ok(()), |(_, reason)| Err((*reason).into()))
    }

    /// What streams are made from. No part of the plan, either.
    ///
    /// # Errors
    /// This build or this machine has none.
    pub fn backend(&self) -> anyhow::Result<Backend> {
        Backend::new(self.stream, self.memory, self.graph, self.trigger, self.gpu)
    }

    /// The name of the device. No part of the plan: the other process may have another one.
    pub fn device(&self) -> &str {
        &self.device
    }

    /// Longest wait for the peer.
    pub fn timeout(&self) -> Duration {
        Duration::from_secs(self.timeout_s)
    }

    /// Where the other end is.
    pub fn mode(&self) -> Mode {
        match (&self.listen, &self.connect) {
            (Some(address), _) => Mode::Listen(address.clone()),
            (None, Some(address)) => Mode::Connect(address.clone()),
            (None, None) => Mode::Local,
        }
    }

    /// How the rows leave.
    pub fn output(&self) -> Output {
        Output {
            json: self.json,
            plot: self.plot.clone(),
        }
    }
}

/// What one row measures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BenchCase {
    /// Which loop.
    pub kind: Loop,
    /// Bytes of a message.
    pub size_bytes: u64,
    /// Length of the kernel.
    pub kernel_us: u64,
}

impl Plan {
    /// Looks at all limits again: a plan may come from another process.
    ///
    /// # Errors
    /// What is beyond which limit.
    pub fn check(&self) -> Result<(), String> {
        let within = |what: &str, value: u64, min: u64, max: u64| {
            if (min..=max).contains(&value) {
                Ok(())
            } else {
                Err(format!("{what} is {value}; it must be {min} to {max}"))
            }
        };
        for bytes in self.sizes.iter() {
            within("a size in --sizes", bytes, 1, sizes::MAX_BYTES)?;
        }
        for &kernel_us in &self.kernel_us {
            within("a kernel in --kernel-us", kernel_us, 0, 1_000_000)?;
        }
        within("--steps", self.steps, 1, 4096)?;
        within("--batches", self.batches, 1, 64)?;
        let in_flight = self.in_flight();
        within("--steps times --batches", in_flight, 1, IN_FLIGHT_MAX)?;
        within("--iterations", self.iterations, 2, 200_000_000)?;
        if self.no_kernel && (self.loops != [Loop::Sync] || self.kernel_us != [0]) {
            return Err("--no-kernel goes with --loop sync and --kernel-us 0".into());
        }
        within("--timeout-s", self.timeout_s, 1, 3600)
    }

    /// Longest wait for the peer, and for any one transfer.
    pub fn timeout(&self) -> Duration {
        Duration::from_secs(self.timeout_s)
    }

    /// Whether the receiving side learns of a message: a write then carries immediate data and takes a receive, as a send does.
    pub fn announced(&self) -> bool {
        self.op == Op::Send || self.validate || self.exchange == Exchange::Pingpong
    }

    /// Steps in flight, at most; a pass warms up with as many.
    pub fn in_flight(&self) -> u64 {
        self.steps * self.batches
    }

    /// The rows in order: the loops of one size and kernel stand together, so that a reader compares neighbours.
    pub fn cases(&self) -> Vec<BenchCase> {
        let mut cases = Vec::new();
        for &kernel_us in &self.kernel_us {
            for size_bytes in self.sizes.iter() {
                cases.extend(self.loops.iter().map(|&kind| BenchCase {
                    kind,
                    size_bytes,
                    kernel_us,
                }));
            }
        }
        cases
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser, Debug)]
    struct TestCli {
        #[command(flatten)]
        options: BenchOptions,
    }

    fn options(line: &str) -> Result<BenchOptions, clap::Error> {
        let words = std::iter::once("loop").chain(line.split_whitespace());
        TestCli::try_parse_from(words).map(|line| line.options)
    }

    #[test]
    fn defaults_are_those_of_the_manual() {
        let options = options("").unwrap();
        let plan = options.plan(Exchange::Loop).unwrap();
        assert_eq!(plan.sizes.to_string().split(',').count(), 14);
        assert_eq!(plan.sizes.max_bytes(), 65536);
        assert_eq!(plan.kernel_us, [0, 10]);
        assert_eq!((plan.steps, plan.batches, plan.iterations), (20, 4, 4000));
        assert_eq!(plan.loops, [Loop::Sync, Loop::Async]);
        assert!(!plan.validate);
        assert_eq!(options.mode(), Mode::Local);
        assert_eq!(options.device(), "softcx");
        assert_eq!(plan.cases().len(), 14 * 2 * 2);
    }

    #[test]
    fn options_reach_the_plan() {
        let options = options(
            "--sizes 8,1K --kernel-us 5 --steps 3 --batches 2 --iterations 10 --loop async --validate --seed 9 --device mlx5_0,port=2 \
             --connect 127.0.0.1:7000 --json --plot out.svg",
        )
        .unwrap();
        let plan = options.plan(Exchange::Loop).unwrap();
        assert_eq!(
            plan.iterations, 12,
            "ten iterations are four batches of three"
        );
        assert!(plan.validate);
        assert_eq!(plan.seed, 9);
        assert_eq!(options.device(), "mlx5_0,port=2");
        assert_eq!(options.mode(), Mode::Connect("127.0.0.1:7000".into()));
        assert_eq!(
            options.output(),
            Output {
                json: true,
                plot: Some("out.svg".into())
            }
        );
        let case = |size_bytes| BenchCase {
            kind: Loop::Async,
            size_bytes,
            kernel_us: 5,
        };
        assert_eq!(plan.cases(), [case(8), case(1024)]);

        let text = serde_json::to_string(&plan).unwrap();
        assert_eq!(serde_json::from_str::<Plan>(&text).unwrap(), plan);
    }

    #[test]
    fn what_is_too_much_together_is_refused() {
        let plan = |line| options(line).unwrap().plan(Exchange::Loop);
        let error = plan("--steps 4096 --batches 2").unwrap_err();
        assert!(error.contains("--steps times --batches is 8192"), "{error}");
        assert!(plan("--steps 64 --batches 64").is_ok());
        for line in ["--no-kernel --loop sync", "--no-kernel --kernel-us 0"] {
            let error = plan(line).unwrap_err();
            assert!(error.contains("--no-kernel goes with"), "{error}");
        }
        assert!(plan("--no-kernel --loop sync --kernel-us 0").is_ok());

        let mut strange = plan("").unwrap();
        strange.sizes = serde_json::from_str("[0]").unwrap();
        assert!(strange.check().unwrap_err().contains("--sizes"));
    }

    #[test]
    fn a_graph_goes_with_the_loop_of_writes_alone() {
        let plan = |line: &str, exchange| {
            let line = format!("--graph {line}");
            options(&line).unwrap().plan(exchange)
        };
        assert!(plan("--stream cuda", Exchange::Loop).is_ok());
        assert!(plan("--stream cuda --memory gpu --loop async", Exchange::Loop).is_ok());
        for (line, exchange, reason) in [
            ("", Exchange::Loop, "with --stream cuda"),
            ("--stream cuda", Exchange::Pingpong, "with bench loop"),
            (
                "--stream cuda --listen a:1",
                Exchange::Loop,
                "without --listen and --connect",
            ),
            (
                "--stream cuda --connect a:1",
                Exchange::Loop,
                "without --listen and --connect",
            ),
            ("--stream cuda --op send", Exchange::Loop, "with --op write"),
            (
                "--stream cuda --validate",
                Exchange::Loop,
                "without --validate",
            ),
            (
                "--stream cuda --no-kernel --loop sync --kernel-us 0",
                Exchange::Loop,
                "without --no-kernel",
            ),
            (
                "--stream cuda --loop sync",
                Exchange::Loop,
                "--loop async or both",
            ),
        ] {
            let error = plan(line, exchange).unwrap_err();
            assert!(error.contains("--graph goes with"), "{line}: {error}");
            assert!(error.contains(reason), "{line}: {error}");
        }
    }

    #[test]
    fn kernels_ring_in_the_asynchronous_loop_of_a_gpu() {
        let plan = |line: &str| options(line).unwrap().plan(Exchange::Pingpong);
        assert!(plan("--trigger kernel --stream cuda --validate").is_ok());
        assert!(plan("--trigger stream").is_ok());
        for (line, reason) in [
            ("", "with --stream cuda"),
            ("--stream cuda --loop sync", "--loop async or both"),
        ] {
            let error = plan(&format!("--trigger kernel {line}")).unwrap_err();
            assert!(error.contains(reason), "{line}: {error}");
        }
        for line in ["--loop async --op send", "--loop both", ""] {
            let error = plan(&format!("--trigger build --stream cuda {line}")).unwrap_err();
            assert!(
                error.contains("--op write and --loop async"),
                "{line}: {error}"
            );
        }
        assert!(plan("--trigger build --stream cuda --loop async --validate").is_ok());
        let both = options("--trigger kernel --stream cuda --graph").unwrap();
        let error = both.plan(Exchange::Loop).unwrap_err();
        assert!(error.contains("without --graph"), "{error}");
    }

    #[test]
    fn wrong_options_are_refused_by_name() {
        for (line, named) in [
            ("--sizes 0", "--sizes"),
            ("--sizes 9..12", "power of two"),
            ("--kernel-us 1000001", "--kernel-us"),
            ("--steps 0", "--steps"),
            ("--batches 65", "--batches"),
            ("--iterations 1", "--iterations"),
            ("--loop neither", "--loop"),
            ("--op read", "--op"),
            ("--timeout-s 0", "--timeout-s"),
            ("--seed -1", "unexpected argument"),
            ("--listen a:1 --connect a:1", "--listen"),
            ("--listen a:1 --json", "--json"),
        ] {
            let error = options(line).unwrap_err().to_string();
            assert!(error.contains(named), "{line}: {error}");
        }
    }
}
