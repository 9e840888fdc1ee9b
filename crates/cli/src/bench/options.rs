//! The options of the benchmarks, and the plan that follows from them.

use std::ffi::OsStr;
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};
use doorbell::MessageConfig;
use serde::{Deserialize, Serialize};

use super::kinds::Loop;
use super::kinds::{MemoryKind, StreamKind, StreamOptions};
use super::sizes::{self, MessageSizes};
use super::trigger::TriggerKind;

/// Steps in flight, over all batches. Four queues of the deepest endpoint and the longest stream hold what they need.
const IN_FLIGHT_MAX: u64 = 4096;
/// Messages that a message queue has in flight, at most: `MessageConfig::ahead`.
const AHEAD_MAX: u64 = 1024;
/// Iterations of one row: each has a sample of 8 bytes.
pub const ITERATIONS_MAX: u64 = 100_000_000;
/// Longest measurement of one row, in milliseconds.
const DURATION_MS_MAX: u64 = 3_600_000;

/// The options of `doorbell bench loop` and `doorbell bench pingpong`.
#[derive(Args, Clone, Debug)]
pub struct BenchOptions {
    /// Message sizes in bytes: a list with K and M, where A..B is every power of two from A to B
    #[arg(long, value_name = "LIST", default_value = "8..64K")]
    sizes: MessageSizes,

    /// Kernel lengths in microseconds; in a pingpong each side runs a kernel before it sends
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "0,10",
          value_parser = clap::value_parser!(u64).range(0..=1_000_000))]
    kernel_us: Vec<u64>,

    /// Steps (kernel, message, wait) of one batch; the application waits for whole batches
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..=4096))]
    steps: u64,

    /// Batches in flight before the application waits for the oldest
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u64).range(1..=64))]
    batches: u64,

    /// Measured iterations of each row, rounded up to whole batches
    #[arg(long, value_name = "N", default_value_t = 4000, value_parser = clap::value_parser!(u64).range(2..=ITERATIONS_MAX))]
    iterations: u64,

    /// Measure each row for about this many seconds instead, such as 0.5 or 10
    #[arg(long, visible_alias = "duration", value_name = "SECONDS", conflicts_with = "iterations", allow_negative_numbers = true,
          value_parser = duration_ms)]
    duration_s: Option<u64>,

    /// Unmeasured iterations before each row, rounded up to whole batches [default: steps times batches]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(0..=ITERATIONS_MAX))]
    warmup: Option<u64>,

    /// Device of this process, by a name that `doorbell info` lists [default: softcx; with --listen and --connect one that reaches the other process]
    ///
    /// With --listen and --connect each process has its own. On one host that is softcx, and between hosts an RDMA device, if possible the one that has the
    /// address by which the other host is reached. The process says which one it is.
    #[arg(long, value_name = "NAME")]
    device: Option<String>,

    /// Streams for kernels and transfers: threads of this process, or CUDA streams
    ///
    /// With cuda the times are the GPU's own, taken by events at the end of each batch: percentiles are then of batch means.
    #[arg(long, value_name = "KIND", value_enum, default_value_t = StreamKind::Host)]
    stream: StreamKind,

    /// Memory of the messages, with --stream cuda
    #[arg(long, value_name = "WHERE", value_enum, default_value_t = MemoryKind::Host)]
    memory: MemoryKind,

    /// Launch each batch of the asynchronous loop as one CUDA graph, with --stream cuda; the synchronous loop ignores this
    #[arg(long)]
    graph: bool,

    /// What rings the doorbell in the asynchronous loop, with --stream cuda
    #[arg(long, value_name = "COMPONENT", value_enum, default_value_t = TriggerKind::Stream)]
    trigger: TriggerKind,

    /// Index of the GPU, with --stream cuda
    #[arg(long, value_name = "N", default_value_t = 0)]
    gpu: u32,

    /// Operation: RDMA write to the peer's memory, send to a posted receive, or message of a message queue
    ///
    /// Where the receiver must learn of a message (in a pingpong, and for --validate), a write carries immediate data and
    /// consumes a receive too. A message queue's messages are matched and may have any length: the receiver copies short ones and
    /// reads long ones.
    #[arg(long, value_name = "OP", value_enum, default_value_t = MessageOp::Write)]
    op: MessageOp,

    /// Longest message that the receiver copies out of a slot, in bytes, with --op message; longer ones are read [default: 8192]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(0..=1 << 20))]
    eager_bytes: Option<u32>,

    /// Which of the two loops to run
    #[arg(long = "loop", value_name = "LOOP", value_enum, default_value_t = Loops::Both)]
    loops: Loops,

    /// Check every byte of every message on arrival
    #[arg(long)]
    validate: bool,

    /// Seed of the message bytes for --validate
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,

    /// Run no kernels, with --loop sync --kernel-us 0: transfers alone, as perftest measures them
    #[arg(long)]
    no_kernel: bool,

    #[command(flatten)]
    output: OutputOptions,

    /// Timeout in seconds for the connection and for each transfer; --listen waits for its peer without a limit
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..=3600))]
    timeout_s: u64,

    /// Answer another process: wait at ADDR, such as 127.0.0.1:7471, for the one that measures; port 0 takes a free port
    #[arg(long, value_name = "ADDR", conflicts_with_all = ["connect", "json", "csv", "plot"])]
    listen: Option<String>,

    /// Measure against the process that listens at ADDR
    #[arg(long, value_name = "ADDR")]
    connect: Option<String>,
}

/// Where the rows of a benchmark go.
#[derive(Args, Clone, Debug)]
pub struct OutputOptions {
    /// Print the rows as one JSON list, instead of a table
    #[arg(long, conflicts_with = "csv")]
    json: bool,

    /// Print the rows as CSV with the columns of --json, instead of a table
    #[arg(long)]
    csv: bool,

    /// Plot time, bandwidth and CPU time against the message size
    #[arg(long, value_name = "FILE.svg", value_parser = svg_path)]
    plot: Option<PathBuf>,
}

impl OutputOptions {
    /// Where the rows go.
    pub fn output(&self) -> ReportOutput {
        ReportOutput {
            format: match (self.json, self.csv) {
                (true, _) => Format::Json,
                (_, true) => Format::Csv,
                _ => Format::Table,
            },
            plot: self.plot.clone(),
        }
    }
}

/// Seconds as whole milliseconds.
fn duration_ms(text: &str) -> Result<u64, String> {
    let seconds: f64 = text.parse().map_err(|_| "not a number".to_owned())?;
    let ms = seconds * 1000.0;
    if !(1.0..=DURATION_MS_MAX as f64).contains(&ms) {
        let max = DURATION_MS_MAX / 1000;
        return Err(format!("a duration is 0.001 to {max} seconds"));
    }
    Ok(ms.round() as u64)
}

/// The path of a plot, whose extension says what is written.
fn svg_path(text: &str) -> Result<PathBuf, String> {
    let path = PathBuf::from(text);
    let extension = path.extension().and_then(OsStr::to_str);
    if extension.is_some_and(|it| it.eq_ignore_ascii_case("svg")) {
        Ok(path)
    } else {
        Err("plots are SVG: the name must end in .svg".into())
    }
}

/// Which loops to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Loops {
    /// The CPU waits for the stream, posts, and polls for the completion
    Sync,
    /// Kernel, transfer and wait are queued on the stream; the CPU is free
    Async,
    /// One after the other
    Both,
}

impl Loops {
    /// They, in the order of the rows.
    pub fn list(self) -> Vec<Loop> {
        match self {
            Self::Sync => vec![Loop::Sync],
            Self::Async => vec![Loop::Async],
            Self::Both => vec![Loop::Sync, Loop::Async],
        }
    }
}

/// The exchange of one step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Exchange {
    /// One message.
    Loop,
    /// A message and its answer.
    Pingpong,
}

impl fmt::Display for Exchange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Loop => "loop",
            Self::Pingpong => "pingpong",
        })
    }
}

/// The operation that carries a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MessageOp {
    /// RDMA write to the peer's memory.
    Write,
    /// Send to a receive that the peer posted.
    Send,
    /// Message of a message queue.
    Message,
}

impl fmt::Display for MessageOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Write => "write",
            Self::Send => "send",
            Self::Message => "message",
        })
    }
}

/// When a row is long enough.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RowLength {
    /// After so many iterations: a multiple of the steps of a batch, at least 2.
    Iterations(u64),
    /// After about so many milliseconds.
    DurationMs(u64),
}

/// What to measure. Only the process that connects has these options; it sends the plan to the one that listens.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    /// The exchange of one step.
    pub exchange: Exchange,
    /// The operation that carries a message.
    pub op: MessageOp,
    /// The longest eager message, of message queues.
    pub eager_bytes: Option<u32>,
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
    /// Unmeasured iterations before each row; a multiple of `steps`.
    pub warmup: u64,
    /// When a row is long enough.
    pub extent: RowLength,
    /// Whether every byte is checked.
    pub validate: bool,
    /// No kernels: transfers alone.
    pub no_kernel: bool,
    /// Seed of the bytes.
    pub seed: u64,
    /// Longest wait, in seconds.
    pub timeout_s: u64,
}

/// The processes of a benchmark.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Both peers in this process.
    Local,
    /// Another process measures; it connects to this address.
    Listen(String),
    /// This process measures; the other one listens at this address.
    Connect(String),
}

/// The format of the rows on standard output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Aligned columns for people.
    Table,
    /// One list of objects.
    Json,
    /// Names of the columns, and a line for each row.
    Csv,
}

/// Where the rows go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReportOutput {
    /// The format on standard output.
    pub format: Format,
    /// The file of the plot.
    pub plot: Option<PathBuf>,
}

impl BenchOptions {
    /// What to measure.
    ///
    /// # Errors
    /// Options that exclude each other.
    pub fn plan(&self, exchange: Exchange) -> Result<Plan, String> {
        let whole_batches = |iterations: u64| iterations.next_multiple_of(self.steps);
        let in_flight = self.steps * self.batches;
        let plan = Plan {
            exchange,
            op: self.op,
            eager_bytes: match self.op {
                MessageOp::Message => {
                    let eager = self.eager_bytes;
                    Some(eager.unwrap_or(MessageConfig::default().eager_bytes))
                }
                _ => self.eager_bytes,
            },
            sizes: self.sizes.clone(),
            kernel_us: self.kernel_us.clone(),
            loops: self.loops.list(),
            steps: self.steps,
            batches: self.batches,
            warmup: whole_batches(self.warmup.unwrap_or(in_flight)),
            extent: match self.duration_s {
                Some(ms) => RowLength::DurationMs(ms),
                None => RowLength::Iterations(whole_batches(self.iterations)),
            },
            validate: self.validate,
            no_kernel: self.no_kernel,
            seed: self.seed,
            timeout_s: self.timeout_s,
        };
        if self.memory == MemoryKind::Gpu && self.stream != StreamKind::Cuda {
            return Err("--memory gpu needs --stream cuda".into());
        }
        if self.memory == MemoryKind::Gpu && self.validate {
            return Err("--validate needs --memory host: it checks bytes in host functions, which must not call CUDA".into());
        }
        self.check_messages()?;
        self.check_graph(exchange)?;
        self.check_trigger()?;
        plan.check().map(|()| plan)
    }

    fn check_messages(&self) -> Result<(), String> {
        let is_message = self.op == MessageOp::Message;
        if self.eager_bytes.is_some() && !is_message {
            return Err("--eager-bytes needs --op message".into());
        }
        if is_message && self.memory == MemoryKind::Gpu && self.loops != Loops::Async {
            return Err("--op message with --memory gpu needs --loop async: a thread cannot receive into memory of a GPU".into());
        }
        Ok(())
    }

    /// A graph repeats identical steps in one process.
    fn check_graph(&self, exchange: Exchange) -> Result<(), String> {
        let refusals = [
            (
                self.stream != StreamKind::Cuda,
                "--graph needs --stream cuda",
            ),
            (
                exchange != Exchange::Loop,
                "--graph needs bench loop: a pingpong step uses two streams",
            ),
            (
                self.mode() != Mode::Local,
                "--graph excludes --listen and --connect: both peers must be in one process",
            ),
            (
                self.op != MessageOp::Write,
                "--graph needs --op write: a graph posts no receives",
            ),
            (
                self.validate,
                "--graph excludes --validate: the graph has no host functions that check bytes",
            ),
            (
                self.no_kernel,
                "--graph excludes --no-kernel: the kernels are part of the graph",
            ),
            (
                self.loops == Loops::Sync,
                "--graph needs --loop async or both: the synchronous loop queues no batches",
            ),
        ];
        let refused = refusals.iter().find(|(refused, _)| self.graph && *refused);
        refused.map_or(Ok(()), |(_, reason)| Err((*reason).into()))
    }

    fn check_trigger(&self) -> Result<(), String> {
        let refusals = [
            (
                self.stream != StreamKind::Cuda,
                "--trigger needs --stream cuda",
            ),
            (
                self.graph,
                "--trigger excludes --graph: a trigger runs once, a graph many times",
            ),
            (
                self.op == MessageOp::Message,
                "--trigger excludes --op message: the kernels ring for an endpoint",
            ),
            (
                self.loops == Loops::Sync,
                "--trigger needs --loop async or both: in the synchronous loop the application rings",
            ),
        ];
        let builds = self.trigger == TriggerKind::Build;
        if builds && (self.op != MessageOp::Write || self.loops != Loops::Async) {
            return Err(
                "--trigger build needs --op write and --loop async: the kernels own the send queue"
                    .into(),
            );
        }
        let rings = self.trigger != TriggerKind::Stream;
        let refused = refusals.iter().find(|(refused, _)| rings && *refused);
        refused.map_or(Ok(()), |(_, reason)| Err((*reason).into()))
    }

    /// What the streams are made of. Not part of the plan: each process has its own streams.
    pub fn streams(&self) -> StreamOptions {
        StreamOptions {
            stream: self.stream,
            memory: self.memory,
            graph: self.graph,
            trigger: self.trigger,
            gpu: self.gpu,
        }
    }

    /// The name of the device, if it was given. Not part of the plan: each process has its own.
    pub fn device(&self) -> Option<&str> {
        self.device.as_deref()
    }

    /// Longest wait for the peer.
    pub fn timeout(&self) -> Duration {
        Duration::from_secs(self.timeout_s)
    }

    /// The processes.
    pub fn mode(&self) -> Mode {
        match (&self.listen, &self.connect) {
            (Some(address), _) => Mode::Listen(address.clone()),
            (None, Some(address)) => Mode::Connect(address.clone()),
            (None, None) => Mode::Local,
        }
    }

    /// Where the rows go.
    pub fn output(&self) -> ReportOutput {
        self.output.output()
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
    /// Checks all limits: a plan may come from another process.
    ///
    /// # Errors
    /// The first value beyond its limit, and the limit.
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
        if self.op == MessageOp::Message {
            let ahead = in_flight + 2 * self.steps;
            let what = "with --op message, --steps times --batches and two batches more";
            within(what, ahead, 1, AHEAD_MAX)?;
        }
        let eager_bytes = self.eager_bytes.unwrap_or(0);
        within("--eager-bytes", eager_bytes.into(), 0, 1 << 20)?;
        // Rounded up to whole batches, of 4096 steps at most.
        let iterations_max = ITERATIONS_MAX + 4096;
        within("--warmup", self.warmup, 0, iterations_max)?;
        match self.extent {
            RowLength::Iterations(count) => within("--iterations", count, 2, iterations_max)?,
            RowLength::DurationMs(ms) => within("milliseconds", ms, 1, DURATION_MS_MAX)?,
        }
        if self.no_kernel && (self.loops != [Loop::Sync] || self.kernel_us != [0]) {
            return Err("--no-kernel needs --loop sync and --kernel-us 0".into());
        }
        within("--timeout-s", self.timeout_s, 1, 3600)
    }

    /// Longest wait for the peer, and for any one transfer.
    pub fn timeout(&self) -> Duration {
        Duration::from_secs(self.timeout_s)
    }

    /// Whether the receiver learns of a message: a write then carries immediate data and consumes a receive, as a send does.
    pub fn announced(&self) -> bool {
        self.op != MessageOp::Write || self.validate || self.exchange == Exchange::Pingpong
    }

    /// The longest eager message of a message queue.
    pub fn eager_bytes(&self) -> u32 {
        self.eager_bytes.unwrap_or(0)
    }

    /// Steps in flight, at most.
    pub fn in_flight(&self) -> u64 {
        self.steps * self.batches
    }

    /// The plan in one line, without what differs from row to row.
    pub fn describe(&self) -> String {
        format!("{} op={} {}", self.exchange, self.op, self.settings())
    }

    /// How the plan is measured.
    pub fn settings(&self) -> String {
        let Plan {
            steps,
            batches,
            warmup,
            ..
        } = self;
        let extent = match self.extent {
            RowLength::Iterations(count) => format!("iterations={count}"),
            RowLength::DurationMs(ms) => format!("duration={}s", ms as f64 / 1000.0),
        };
        let validate = if self.validate { " validate=on" } else { "" };
        let kernel = if self.no_kernel { " kernel=none" } else { "" };
        let eager = match self.eager_bytes {
            Some(eager_bytes) => format!(" eager={eager_bytes}"),
            None => String::new(),
        };
        format!("steps={steps} batches={batches} warmup={warmup} {extent}{kernel}{eager}{validate}")
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
pub mod tests {
    use clap::Parser;

    use super::*;

    /// A plan for tests: two batches of three steps in flight, 12 iterations.
    pub fn sample_plan() -> Plan {
        options("--sizes 64 --kernel-us 0 --steps 3 --batches 2 --iterations 12")
            .unwrap()
            .plan(Exchange::Loop)
            .unwrap()
    }

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
        assert_eq!((plan.steps, plan.batches, plan.warmup), (20, 4, 80));
        assert_eq!(plan.extent, RowLength::Iterations(4000));
        assert_eq!(plan.loops, [Loop::Sync, Loop::Async]);
        assert!(!plan.validate);
        assert_eq!(options.mode(), Mode::Local);
        assert_eq!(options.device(), None);
        assert_eq!(plan.cases().len(), 14 * 2 * 2);
    }

    #[test]
    fn options_reach_the_plan() {
        let options = options(
            "--sizes 8,1K --kernel-us 5 --steps 3 --batches 2 --iterations 10 --warmup 4 --loop async --validate --seed 9 \
             --device mlx5_0,port=2 --connect 127.0.0.1:7000 --json --plot out.svg",
        )
        .unwrap();
        let plan = options.plan(Exchange::Loop).unwrap();
        // Ten iterations are four batches of three.
        assert_eq!(plan.extent, RowLength::Iterations(12));
        assert_eq!(plan.warmup, 6);
        assert!(plan.validate);
        assert_eq!(plan.seed, 9);
        assert_eq!(options.device(), Some("mlx5_0,port=2"));
        assert_eq!(options.mode(), Mode::Connect("127.0.0.1:7000".into()));
        assert_eq!(
            options.output(),
            ReportOutput {
                format: Format::Json,
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
    fn messages_have_a_longest_eager_one() {
        let plan = |line: &str| options(line).unwrap().plan(Exchange::Loop);
        let defaults = plan("--op message").unwrap();
        assert_eq!(defaults.eager_bytes, Some(8192));
        assert!(defaults.announced());
        assert!(
            defaults.describe().ends_with(" eager=8192"),
            "{}",
            defaults.describe()
        );
        let none = plan("--op message --eager-bytes 0").unwrap();
        assert_eq!(none.eager_bytes, Some(0));
        assert_eq!(plan("").unwrap().eager_bytes, None);
        for (line, reason) in [
            ("--eager-bytes 8", "needs --op message"),
            (
                "--op message --stream cuda --memory gpu",
                "needs --loop async",
            ),
            (
                "--op message --stream cuda --trigger kernel",
                "excludes --op message",
            ),
            (
                "--op message --steps 64 --batches 15",
                "two batches more is 1088",
            ),
        ] {
            let error = plan(line).unwrap_err();
            assert!(error.contains(reason), "{line}: {error}");
        }
        assert!(plan("--op message --stream cuda --memory gpu --loop async").is_ok());
        assert!(plan("--op message --steps 64 --batches 14").is_ok());
    }

    #[test]
    fn a_duration_replaces_the_iterations() {
        let plan = options("--duration 0.25 --warmup 0").unwrap();
        let plan = plan.plan(Exchange::Pingpong).unwrap();
        assert_eq!((plan.extent, plan.warmup), (RowLength::DurationMs(250), 0));
        let described = "pingpong op=write steps=20 batches=4 warmup=0 duration=0.25s";
        assert_eq!(plan.describe(), described);
    }

    #[test]
    fn what_is_too_much_together_is_refused() {
        let plan = |line| options(line).unwrap().plan(Exchange::Loop);
        let error = plan("--steps 4096 --batches 2").unwrap_err();
        assert!(error.contains("--steps times --batches is 8192"), "{error}");
        assert!(plan("--steps 64 --batches 64").is_ok());
        for line in ["--no-kernel --loop sync", "--no-kernel --kernel-us 0"] {
            let error = plan(line).unwrap_err();
            assert!(error.contains("--no-kernel needs"), "{error}");
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
            ("", Exchange::Loop, "needs --stream cuda"),
            ("--stream cuda", Exchange::Pingpong, "needs bench loop"),
            (
                "--stream cuda --listen a:1",
                Exchange::Loop,
                "excludes --listen and --connect",
            ),
            (
                "--stream cuda --connect a:1",
                Exchange::Loop,
                "excludes --listen and --connect",
            ),
            (
                "--stream cuda --op send",
                Exchange::Loop,
                "needs --op write",
            ),
            (
                "--stream cuda --validate",
                Exchange::Loop,
                "excludes --validate",
            ),
            (
                "--stream cuda --no-kernel --loop sync --kernel-us 0",
                Exchange::Loop,
                "excludes --no-kernel",
            ),
            (
                "--stream cuda --loop sync",
                Exchange::Loop,
                "--loop async or both",
            ),
        ] {
            let error = plan(line, exchange).unwrap_err();
            assert!(error.contains("--graph "), "{line}: {error}");
            assert!(error.contains(reason), "{line}: {error}");
        }
    }

    #[test]
    fn kernels_ring_in_the_asynchronous_loop_of_a_gpu() {
        let plan = |line: &str| options(line).unwrap().plan(Exchange::Pingpong);
        assert!(plan("--trigger kernel --stream cuda --validate").is_ok());
        assert!(plan("--trigger stream").is_ok());
        for (line, reason) in [
            ("", "needs --stream cuda"),
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
        assert!(error.contains("excludes --graph"), "{error}");
    }

    #[test]
    fn wrong_options_are_refused_by_name() {
        for (line, named) in [
            ("--sizes 0", "--sizes"),
            ("--eager-bytes 1048577 --op message", "--eager-bytes"),
            ("--sizes 9..12", "power of two"),
            ("--kernel-us 1000001", "--kernel-us"),
            ("--steps 0", "--steps"),
            ("--batches 65", "--batches"),
            ("--iterations 1", "--iterations"),
            ("--duration-s 0", "0.001 to 3600"),
            ("--duration-s -1", "0.001 to 3600"),
            ("--duration-s nan", "0.001 to 3600"),
            ("--duration 1 --iterations 9", "--iterations"),
            ("--plot out.png", ".svg"),
            ("--plot svg", ".svg"),
            ("--json --csv", "--csv"),
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
