//! The options of the benchmark of collective operations, and the plan that follows from them.

use std::fmt;
use std::time::Duration;

use anyhow::ensure;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, ValueEnum};
use doorbell::{Algorithm, DataType, MessageConfig, ReduceOp};

use super::super::kinds::{Loop, StreamKind};
use super::super::options::{Loops, OutputOptions, ReportOutput};
use super::super::sizes::MessageSizes;

/// Ranks that are threads of this process.
const RANKS_MAX: i64 = 64;

/// The options of `doorbell bench collective`.
#[derive(Args, Clone, Debug)]
pub struct CollectiveOptions {
    /// Operation
    #[arg(long, value_enum, value_name = "OP", default_value_t = CollectiveOp::AllReduce)]
    op: CollectiveOp,

    /// Ranks, each a thread of this process with a stream of its own [default: 4]
    #[arg(long, value_name = "N", conflicts_with = "group", value_parser = clap::value_parser!(u32).range(1..=RANKS_MAX))]
    ranks: Option<u32>,

    /// Take part in a group of processes: this process is the rank that its launcher (mpirun, torchrun, srun, or DOORBELL_RANK and DOORBELL_SIZE) says; rank 0 prints
    #[arg(long)]
    group: bool,

    /// Bytes of the longest buffer of the operation: a list with K and M, where A..B is every power of two from A to B
    #[arg(long, value_name = "LIST", default_value = "8..1M")]
    sizes: MessageSizes,

    /// Type of the elements
    #[arg(long = "type", value_name = "TYPE", default_value = "f32",
          value_parser = PossibleValuesParser::new(DataType::ALL.map(DataType::name)).try_map(|name| name.parse::<DataType>()))]
    data: DataType,

    /// Reduction of the elements
    #[arg(long, value_name = "OP", default_value = "sum",
          value_parser = PossibleValuesParser::new(ReduceOp::ALL.map(ReduceOp::name)).try_map(|name| name.parse::<ReduceOp>()))]
    reduce: ReduceOp,

    /// Root of a broadcast, reduce, gather or scatter
    #[arg(long, value_name = "RANK", default_value_t = 0)]
    root: u32,

    /// Algorithm: the one with the least predicted time (auto), each that applies (all), or one by its name
    #[arg(long, value_name = "NAME", default_value = "auto", value_parser = algorithm_parser())]
    algorithm: AlgorithmChoice,

    /// Use the same memory for input and output, with --op all-reduce or all-gather
    #[arg(long)]
    in_place: bool,

    /// Have the ranks match each operation before its launches: messages are written straight into place
    #[arg(long)]
    matched: bool,

    /// Measure the costs first by which algorithms are chosen and times predicted; otherwise they are round numbers
    #[arg(long)]
    measure_costs: bool,

    /// Which of the two loops to run
    #[arg(long = "loop", value_name = "LOOP", value_enum, default_value_t = Loops::Both)]
    loops: Loops,

    /// Operations in flight in the asynchronous loop before the application waits for the oldest
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=64))]
    in_flight: u32,

    /// Measured operations of each row
    #[arg(long, value_name = "N", default_value_t = 200, value_parser = clap::value_parser!(u64).range(1..=10_000_000))]
    iterations: u64,

    /// Unmeasured operations before each row
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u64).range(0..=10_000_000))]
    warmup: u64,

    /// Longest message that its receiver copies out of a slot, in bytes; longer ones are read [default: 8192]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(0..=1 << 20))]
    eager_bytes: Option<u32>,

    /// After each row, carry out the operation once more and compare every element with the result of a formula; a wrong one is an error
    #[arg(long)]
    check: bool,

    /// Device, by a name that `doorbell info` lists
    #[arg(long, value_name = "NAME", default_value = "softcx")]
    device: String,

    /// Streams of the ranks: threads of this process, or CUDA streams, which reduce by a kernel
    #[arg(long, value_name = "KIND", value_enum, default_value_t = StreamKind::Host)]
    stream: StreamKind,

    /// Have a thread execute the host streams of the synchronous loop, too; otherwise the thread that waits does
    #[arg(long)]
    sync_by_thread: bool,

    /// Index of the GPU, with --stream cuda
    #[arg(long, value_name = "N", default_value_t = 0)]
    gpu: u32,

    /// Timeout in seconds for the group and for each operation
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..=3600))]
    timeout_s: u64,

    #[command(flatten)]
    output: OutputOptions,
}

fn algorithm_parser() -> impl TypedValueParser<Value = AlgorithmChoice> {
    let names = Algorithm::ALL.map(Algorithm::name);
    let all = ["auto", "all"].into_iter().chain(names);
    PossibleValuesParser::new(all).try_map(|name| match name.as_str() {
        "auto" => Ok(AlgorithmChoice::Auto),
        "all" => Ok(AlgorithmChoice::All),
        name => name.parse().map(AlgorithmChoice::Named),
    })
}

/// What carries an operation out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AlgorithmChoice {
    /// What the library chooses.
    Auto,
    /// Each that applies, one after the other.
    All,
    /// This one.
    Named(Algorithm),
}

/// A collective operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum CollectiveOp {
    /// No data: no rank passes before all have come
    Barrier,
    /// The root's buffer goes to all
    Broadcast,
    /// A block of each rank goes to the root
    Gather,
    /// A block of the root's buffer goes to each rank
    Scatter,
    /// A block of each rank goes to all
    AllGather,
    /// A block of each rank goes to each rank
    AllToAll,
    /// The reduction of all buffers goes to the root
    Reduce,
    /// A block of the reduction of all buffers goes to each rank
    ReduceScatter,
    /// The reduction of all buffers goes to all
    AllReduce,
}

impl CollectiveOp {
    /// The name on the command line and in rows.
    pub fn name(self) -> &'static str {
        match self {
            Self::Barrier => "barrier",
            Self::Broadcast => "broadcast",
            Self::Gather => "gather",
            Self::Scatter => "scatter",
            Self::AllGather => "all-gather",
            Self::AllToAll => "all-to-all",
            Self::Reduce => "reduce",
            Self::ReduceScatter => "reduce-scatter",
            Self::AllReduce => "all-reduce",
        }
    }

    /// Whether it computes.
    pub fn reduces(self) -> bool {
        matches!(self, Self::Reduce | Self::ReduceScatter | Self::AllReduce)
    }

    /// Whether one rank is the root.
    pub fn has_root(self) -> bool {
        matches!(
            self,
            Self::Broadcast | Self::Gather | Self::Scatter | Self::Reduce
        )
    }

    /// Bytes on the busiest link for each byte of the longest buffer: what nccl-tests multiplies the bandwidth with, so that it can be compared with that of
    /// the link for any number of ranks.
    pub fn bus_factor(self, ranks: u32) -> f64 {
        let others = f64::from(ranks - 1) / f64::from(ranks);
        match self {
            Self::Barrier => 0.0,
            Self::Broadcast | Self::Reduce => 1.0,
            Self::AllReduce => 2.0 * others,
            Self::Gather
            | Self::Scatter
            | Self::AllGather
            | Self::AllToAll
            | Self::ReduceScatter => others,
        }
    }
}

impl fmt::Display for CollectiveOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// What to measure. All ranks have the same.
#[derive(Clone, Debug)]
pub struct CollectivePlan {
    /// The operation.
    pub op: CollectiveOp,
    /// Type of the elements.
    pub data: DataType,
    /// Reduction of the elements.
    pub reduce: ReduceOp,
    /// The root.
    pub root: u32,
    /// What carries it out.
    pub algorithm: AlgorithmChoice,
    /// Whether input and output are the same memory.
    pub in_place: bool,
    /// Whether the ranks match each operation before its launches.
    pub matched: bool,
    /// Whether costs are measured first.
    pub measure_costs: bool,
    /// Streams of the synchronous loop have a thread, too.
    pub sync_by_thread: bool,
    /// Lengths of the longest buffer in bytes, before they are rounded up to whole elements.
    pub sizes: Vec<u64>,
    /// Loops, in the order of the rows.
    pub loops: Vec<Loop>,
    /// Operations in flight in the asynchronous loop.
    pub in_flight: u32,
    /// Measured operations of a row.
    pub iterations: u64,
    /// Unmeasured operations before.
    pub warmup: u64,
    /// Whether every element of a result is checked.
    pub check: bool,
    /// The longest message that is copied.
    pub eager_bytes: u32,
    /// Longest wait.
    pub timeout: Duration,
}

/// What one row measures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CollectiveCase {
    /// Which loop.
    pub kind: Loop,
    /// Bytes of the longest buffer.
    pub size_bytes: u64,
    /// The algorithm, or none where the library chooses.
    pub algorithm: Option<Algorithm>,
}

impl fmt::Display for CollectiveCase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let algorithm = self.algorithm.map_or("auto", Algorithm::name);
        write!(f, "{}, {} B, {algorithm}", self.kind, self.size_bytes)
    }
}

impl CollectiveOptions {
    /// What to measure.
    ///
    /// # Errors
    /// Options that exclude each other.
    pub fn plan(&self) -> Result<CollectivePlan, String> {
        let can_be_in_place = matches!(self.op, CollectiveOp::AllReduce | CollectiveOp::AllGather);
        if self.in_place && !can_be_in_place {
            return Err("--in-place needs --op all-reduce or all-gather".into());
        }
        let ranks = self.ranks();
        if let Some(ranks) = ranks.filter(|ranks| self.op.has_root() && self.root >= *ranks) {
            return Err(format!(
                "--root is {}; it must be less than the {ranks} ranks",
                self.root
            ));
        }
        Ok(CollectivePlan {
            op: self.op,
            data: self.data,
            reduce: self.reduce,
            root: self.root,
            algorithm: self.algorithm,
            in_place: self.in_place,
            matched: self.matched,
            measure_costs: self.measure_costs,
            sync_by_thread: self.sync_by_thread,
            sizes: match self.op {
                CollectiveOp::Barrier => vec![0],
                _ => self.sizes.iter().collect(),
            },
            loops: self.loops.list(),
            in_flight: self.in_flight,
            iterations: self.iterations,
            warmup: self.warmup,
            check: self.check,
            eager_bytes: self
                .eager_bytes
                .unwrap_or(MessageConfig::default().eager_bytes),
            timeout: Duration::from_secs(self.timeout_s),
        })
    }

    /// The number of ranks in this process, or none where it is one rank of a group.
    pub fn ranks(&self) -> Option<u32> {
        (!self.group).then(|| self.ranks.unwrap_or(4))
    }

    /// Name of the device.
    pub fn device(&self) -> &str {
        &self.device
    }

    /// The kind of the streams.
    pub fn stream(&self) -> StreamKind {
        self.stream
    }

    /// Index of the GPU.
    pub fn gpu(&self) -> u32 {
        self.gpu
    }

    /// Where the rows go.
    pub fn output(&self) -> ReportOutput {
        self.output.output()
    }
}

impl CollectivePlan {
    /// Refuses what so many ranks cannot do.
    ///
    /// # Errors
    /// A root that is no rank. A check of a type that cannot hold the sums exactly.
    pub fn check_ranks(&self, count: u32) -> anyhow::Result<()> {
        let root = self.root;
        ensure!(
            !self.op.has_root() || root < count,
            "--root is {root}; there are {count} ranks"
        );
        let exact = match self.data {
            DataType::Bf16 => 256,
            DataType::F16 => 2048,
            _ => u32::MAX,
        };
        let largest = 3 * count + count * (count - 1) / 2;
        let data = self.data;
        ensure!(
            !self.check || largest <= exact,
            "--check compares exact sums, which are up to {largest} of {count} ranks; {data} has all integers up to {exact} only"
        );
        Ok(())
    }

    /// The plan in one line, without what differs from row to row.
    pub fn describe(&self) -> String {
        let CollectivePlan {
            op,
            warmup,
            iterations,
            in_flight,
            eager_bytes,
            ..
        } = self;
        let place = if self.in_place { " in-place" } else { "" };
        let check = if self.check { " check=on" } else { "" };
        format!(
            "collective op={op}{place} in_flight={in_flight} warmup={warmup} iterations={iterations} eager={eager_bytes}{check}"
        )
    }
}

#[cfg(test)]
pub mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser, Debug)]
    struct TestCli {
        #[command(flatten)]
        options: CollectiveOptions,
    }

    fn options(line: &str) -> Result<CollectiveOptions, clap::Error> {
        let words = std::iter::once("collective").chain(line.split_whitespace());
        TestCli::try_parse_from(words).map(|line| line.options)
    }

    /// The plan of a command line.
    pub fn plan(line: &str) -> Result<CollectivePlan, String> {
        let options = options(line).map_err(|error| error.to_string())?;
        options.plan()
    }

    #[test]
    fn defaults_are_an_all_reduce_of_four_threads() {
        let options = options("").unwrap();
        let plan = options.plan().unwrap();
        assert_eq!(
            (plan.op, options.ranks()),
            (CollectiveOp::AllReduce, Some(4))
        );
        assert_eq!((plan.data, plan.reduce), (DataType::F32, ReduceOp::Sum));
        assert_eq!(plan.algorithm, AlgorithmChoice::Auto);
        assert_eq!((plan.sizes[0], plan.sizes.len()), (8, 18));
        assert!(!plan.check);
    }

    #[test]
    fn names_are_those_of_the_library() {
        for algorithm in Algorithm::ALL {
            let plan = plan(&format!("--algorithm {algorithm}")).unwrap();
            assert_eq!(plan.algorithm, AlgorithmChoice::Named(algorithm));
        }
        for op in CollectiveOp::value_variants() {
            assert_eq!(plan(&format!("--op {op}")).unwrap().op, *op);
        }
        assert_eq!(plan("--op barrier").unwrap().sizes, [0]);
        assert_eq!(options("--group").unwrap().ranks(), None);
    }

    #[test]
    fn what_cannot_be_is_refused() {
        for (line, reason) in [
            (
                "--op gather --in-place",
                "needs --op all-reduce or all-gather",
            ),
            ("--op broadcast --root 4", "less than the 4 ranks"),
            ("--ranks 0", "--ranks"),
            ("--ranks 2 --group", "--group"),
            ("--algorithm best", "recursive-doubling"),
            ("--type f8", "bf16"),
            ("--json --csv", "--csv"),
        ] {
            let error = plan(line).unwrap_err();
            assert!(error.contains(reason), "{line}: {error}");
        }
        // An all-reduce has no root.
        assert!(plan("--root 9").is_ok());
        let halves = plan("--type bf16 --check").unwrap();
        assert!(halves.check_ranks(20).is_ok());
        let error = halves.check_ranks(21).unwrap_err().to_string();
        assert!(error.contains("bf16"), "{error}");
    }

    #[test]
    fn bus_bandwidth_is_that_of_nccl_tests() {
        let factors = |ranks| {
            CollectiveOp::value_variants()
                .iter()
                .map(move |op| op.bus_factor(ranks))
        };
        let of_4: Vec<f64> = factors(4).collect();
        assert_eq!(of_4, [0.0, 1.0, 0.75, 0.75, 0.75, 0.75, 1.0, 0.75, 1.5]);
        assert!(factors(1).all(|factor| factor <= 1.0));
    }
}
