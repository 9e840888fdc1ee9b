//! A shuffle, as SparkRDMA and other RDMA shuffles do it: map outputs are written to registered memory, their locations are published, and reducers fetch them by RDMA READ. The work
//! is that of TeraSort: records of 100 bytes are sorted by their keys of 10 bytes.
//!
//!     cargo run --release --example shuffle
//!
//! The same blocks are fetched a second way, by a request message and reply messages, and both are compared. With `--kill RANK` that rank is killed while others fetch from it, or when
//! it has sorted its partitions (`--kill-at sorted`). The others then make a group without it, map its splits and sort its partitions again, and go on.

mod fetch;
mod messages;
mod plan;
mod records;
#[path = "../support/mod.rs"]
mod support;

use std::cell::Cell;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::{Parser, ValueEnum};
use doorbell::{Access, Error, Group, Region, RemoteRegion};

use fetch::{FetchFailed, Fetched};
use messages::Queues;
use plan::{Location, Plan};
use records::{KEY, MapOutput, Sorted, key, map, sort, sum_of};
use support::Recorder;

/// The longest wait for another rank.
const DEADLINE: Duration = Duration::from_secs(30);
/// Keys that each split contributes to the choice of the partitions' limits.
const SAMPLES: u64 = 256;

#[derive(Parser)]
struct Options {
    /// Ranks that the program starts
    #[arg(long, default_value_t = 4)]
    ranks: u32,
    /// Parts of the input, each mapped by one rank
    #[arg(long, default_value_t = 8)]
    splits: u32,
    /// Records of 100 bytes in each split
    #[arg(long, default_value_t = 50_000)]
    records: u64,
    /// Parts of the output, each sorted by one rank
    #[arg(long, default_value_t = 16)]
    partitions: u32,
    /// Of the generated records
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Longest READ, and longest reply message
    #[arg(long, default_value_t = 65536)]
    read_bytes: u32,
    /// READs for each completion, and replies for each request
    #[arg(long, default_value_t = 8)]
    batch: usize,
    /// Most bytes that a rank has asked for and not got: at least those of one batch, --batch times --read-bytes
    #[arg(long, default_value_t = 1 << 20)]
    in_flight: u64,
    /// Fetches by each method, of which the median is printed
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// The rank that is killed. Rank 0 hosts the store of the group and cannot be
    #[arg(long)]
    kill: Option<u32>,
    /// When that rank is killed
    #[arg(long, value_enum, default_value_t = Moment::Fetch, requires = "kill")]
    kill_at: Moment,
    /// Folder for the sorted partitions: `part-00000` and so on
    #[arg(long)]
    out: Option<PathBuf>,
    /// File for a timeline
    #[arg(long)]
    svg: Option<PathBuf>,
}

impl Options {
    /// The rank that is killed then.
    fn victim(&self, moment: Moment) -> Option<u32> {
        self.kill.filter(|_| self.kill_at == moment)
    }
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Moment {
    /// While others fetch from it
    Fetch,
    /// When all have sorted their partitions, and no other rank knows of its own
    Sorted,
}

fn main() -> Result<()> {
    let options = Options::parse();
    ensure!(
        (1..=64).contains(&options.batch),
        "--batch must be 1 to 64, because a batch has to fit into a send queue"
    );
    ensure!(
        options.partitions > 0 && options.read_bytes > 0,
        "--partitions and --read-bytes must not be 0"
    );
    let batch_bytes = options.batch as u64 * u64::from(options.read_bytes);
    ensure!(
        options.in_flight >= batch_bytes,
        "--in-flight must be at least --batch times --read-bytes, {batch_bytes} bytes: a batch is asked for as a whole"
    );
    if let Some(victim) = options.kill {
        let ranks = support::size(options.ranks);
        ensure!(
            (1..ranks).contains(&victim) && ranks > 2,
            "--kill takes a rank from 1 on of at least 3: rank 0 hosts the store, and a survivor fetches from another"
        );
    }
    support::run_with_victim(options.ranks, options.kill, |group| rank(&options, group))
}

/// What a rank has and keeps when another one ends.
#[derive(Default)]
struct Held {
    /// The first keys of all partitions but the first.
    limits: Option<Vec<[u8; KEY]>>,
    outputs: BTreeMap<u32, MapOutput>,
    sorted: BTreeMap<u32, Sorted>,
}

/// What one fetch cost.
#[derive(Clone, Copy, Default)]
struct Cost {
    seconds: f64,
    /// Processor time of the thread that fetches.
    fetching: f64,
    /// Of the thread that answers requests.
    serving: f64,
    /// Of the process, with the threads of the library.
    process: f64,
}

/// One rank's part in a job, as long as no rank ends.
struct Attempt<'a> {
    options: &'a Options,
    group: &'a Group,
    /// The numbers that the ranks had at the start.
    names: &'a [u32],
    recorder: &'a Recorder,
    /// By the last fetch by READ.
    fetched: Cell<Fetched>,
    /// The most bytes that were asked for and had not come, in the last fetch by messages.
    most_by_message: Cell<u64>,
}

fn rank(options: &Options, mut group: Group) -> Result<()> {
    let mut names: Vec<u32> = (0..group.size()).collect();
    let mut held = Held::default();
    let recorder = Recorder::new(group.rank());
    loop {
        let mut attempt = Attempt {
            options,
            group: &group,
            names: &names,
            recorder: &recorder,
            fetched: Cell::default(),
            most_by_message: Cell::default(),
        };
        let own = attempt.name(group.rank());
        let failure = match attempt.run(&mut held) {
            Ok(()) => break,
            Err(failure) => failure,
        };
        // Without an ended rank this is an error like any other, and so is what this rank has found to be wrong.
        let is_of_group = failure.is::<FetchFailed>() || failure.is::<Error>();
        if !is_of_group || group.check().is_ok() {
            return Err(failure);
        }
        println!("rank {own}: {failure:#}");
        let begin = Recorder::now_ms();
        let (next, ranks) = group.shrink()?;
        names = ranks.iter().map(|rank| names[*rank as usize]).collect();
        recorder.add("shrink", begin);
        println!("rank {own}: goes on in a group of {} ranks", next.size());
        group = next;
    }
    group.leave()?;
    Ok(())
}

impl Attempt<'_> {
    fn name(&self, rank: u32) -> u32 {
        self.names[rank as usize]
    }

    fn run(&mut self, held: &mut Held) -> Result<()> {
        let begin = Recorder::now_ms();
        let (splits, partitions) = self.assign(held)?;
        if !splits.is_empty() {
            println!(
                "rank {}: maps splits {splits:?}",
                self.name(self.group.rank())
            );
        }
        let limits = match held.limits.clone() {
            Some(limits) => limits,
            None => self.sample(&splits)?,
        };
        for split in splits {
            let output = map(self.options, self.group, &limits, split)?;
            held.outputs.insert(split, output);
        }
        held.limits = Some(limits);
        self.recorder.add("map", begin);

        let begin = Recorder::now_ms();
        let locations = self.publish(held)?;
        let mut endpoints = BTreeMap::new();
        for peer in (0..self.group.size()).filter(|peer| *peer != self.group.rank()) {
            endpoints.insert(peer, self.group.take_endpoint(peer)?);
        }
        let plan = self.plan(held, &locations, &mut endpoints, &partitions)?;
        self.recorder.add("locations", begin);
        let fetched = Region::alloc(
            self.group.domain(),
            plan.len_bytes.max(1),
            Access::LOCAL_WRITE,
        )?;

        let own = self.name(self.group.rank());
        if self.options.victim(Moment::Fetch) == Some(own) {
            // The others begin their fetches together with this rank.
            self.group.barrier()?;
            // A neighbour sets this in the middle of its fetch.
            self.group.store().get(b"shuffle/kill", DEADLINE)?;
            support::kill_myself();
        }
        let begin = Recorder::now_ms();
        let mut by_read = vec![self.measure(|attempt| {
            attempt.fetch_by_read(held, &plan, &locations, &mut endpoints, &fetched)
        })?];
        self.recorder.add("fetch by READ", begin);

        let begin = Recorder::now_ms();
        if !plan.partitions.is_empty() {
            println!("rank {own}: sorts partitions {:?}", plan.partitions.keys());
        }
        for (partition, (at, len_bytes)) in &plan.partitions {
            let sorted = sort(self.options, &fetched, *partition, (*at, *len_bytes))?;
            held.sorted.insert(*partition, sorted);
        }
        self.recorder.add("sort", begin);
        self.group.barrier()?;
        if self.options.victim(Moment::Sorted) == Some(own) {
            support::kill_myself();
        }

        // A group that lost a rank has shown what it was started for.
        let mut by_message = Vec::new();
        if self.options.kill.is_none() && self.group.size() > 1 {
            let expected = sum_of(&fetched, plan.len_bytes)?;
            let mut queues = Queues::open(self.options, self.group)?;
            for round in 0..self.options.rounds {
                let begin = Recorder::now_ms();
                fetched.fill(0, plan.len_bytes, 0)?;
                let cost = queues.fetch(self, held, &plan, &fetched)?;
                by_message.push(cost);
                let kind = "fetch by message";
                self.recorder.add(kind, begin);
                let found = sum_of(&fetched, plan.len_bytes)?;
                ensure!(found == expected, "the replies have other bytes");
                if round + 1 < self.options.rounds {
                    fetched.fill(0, plan.len_bytes, 0)?;
                    let begin = Recorder::now_ms();
                    by_read.push(self.measure(|attempt| {
                        attempt.fetch_by_read(held, &plan, &locations, &mut endpoints, &fetched)
                    })?);
                    self.recorder.add("fetch by READ", begin);
                    let found = sum_of(&fetched, plan.len_bytes)?;
                    ensure!(found == expected, "the READs brought other bytes");
                }
            }
            queues.finish()?;
        }
        self.report(held, &plan, &by_read, &by_message)?;
        self.recorder
            .write("Shuffle", self.options.svg.as_deref(), self.group)?;
        self.group.barrier()?;
        Ok(())
    }

    /// The splits that this rank is to map, and the partitions that it is to sort: its share of those that no rank has.
    fn assign(&self, held: &Held) -> Result<(Vec<u32>, Vec<u32>)> {
        let (group, options) = (self.group, self.options);
        let own: Vec<u8> = [held.outputs.len() as u32]
            .iter()
            .chain(held.outputs.keys())
            .chain(held.sorted.keys())
            .flat_map(|number| number.to_le_bytes())
            .collect();
        let (mut mapped, mut sorted) = (Vec::new(), Vec::new());
        for list in group.store().gather(&own, DEADLINE)? {
            let numbers = numbers_of(&list)?;
            let (count, numbers) = numbers.split_first().context("an empty list")?;
            let (outputs, partitions) = numbers.split_at(*count as usize);
            mapped.extend_from_slice(outputs);
            sorted.extend_from_slice(partitions);
        }
        let share = |count: u32, present: &[u32]| -> Vec<u32> {
            (0..count)
                .filter(|number| !present.contains(number))
                .enumerate()
                .filter(|(turn, _)| *turn as u32 % group.size() == group.rank())
                .map(|(_, number)| number)
                .collect()
        };
        Ok((
            share(options.splits, &mapped),
            share(options.partitions, &sorted),
        ))
    }

    /// Chooses the limits of the partitions by samples of all splits, so that they are about equally long whatever the keys are.
    fn sample(&self, splits: &[u32]) -> Result<Vec<[u8; KEY]>> {
        let options = self.options;
        let count = SAMPLES.min(options.records);
        let mut own = Vec::new();
        for split in splits {
            for sample in 0..count {
                let number = u64::from(*split) * options.records + sample * options.records / count;
                own.extend_from_slice(&key(options.seed, number));
            }
        }
        let gathered = self.group.store().gather(&own, DEADLINE)?.concat();
        let mut keys: Vec<[u8; KEY]> = gathered.as_chunks().0.to_vec();
        keys.sort_unstable();
        let partitions = options.partitions as usize;
        let limit = |partition: usize| keys.get(partition * keys.len() / partitions).copied();
        Ok((1..partitions).filter_map(limit).collect())
    }

    /// Tells all ranks where this rank's map outputs are, and returns where those of all splits are.
    fn publish(&self, held: &Held) -> Result<BTreeMap<u32, Location>> {
        const LOCATION: usize = 4 + 2 * RemoteRegion::BYTES;
        let mut own = Vec::new();
        for (split, output) in &held.outputs {
            own.extend(split.to_le_bytes());
            own.extend(output.records.remote().to_bytes());
            own.extend(output.table.remote().to_bytes());
        }
        let mut locations = BTreeMap::new();
        for (rank, list) in (0..).zip(self.group.store().gather(&own, DEADLINE)?) {
            for entry in list.as_chunks::<LOCATION>().0 {
                let (split, regions) = entry.split_first_chunk().context("a location")?;
                let (regions, _) = regions.as_chunks::<{ RemoteRegion::BYTES }>();
                let location = Location {
                    rank,
                    records: RemoteRegion::from_bytes(&regions[0]),
                    table: RemoteRegion::from_bytes(&regions[1]),
                };
                locations.insert(u32::from_le_bytes(*split), location);
            }
        }
        let missing = (0..self.options.splits).find(|split| !locations.contains_key(split));
        ensure!(missing.is_none(), "nobody has mapped split {missing:?}");
        Ok(locations)
    }

    /// The cost of a fetch that all ranks begin together.
    fn measure(&self, fetch: impl FnOnce(&Self) -> Result<()>) -> Result<Cost> {
        self.group.barrier()?;
        let (begin, thread, process) = (
            Instant::now(),
            support::thread_time()?,
            support::process_time()?,
        );
        fetch(self)?;
        let cost = Cost {
            seconds: begin.elapsed().as_secs_f64(),
            fetching: (support::thread_time()? - thread).as_secs_f64(),
            serving: 0.0,
            process: (support::process_time()? - process).as_secs_f64(),
        };
        Ok(cost)
    }

    /// Rank 0 prints what all ranks have done, and checks that no record is missing.
    fn report(
        &self,
        held: &Held,
        plan: &Plan,
        by_read: &[Cost],
        by_message: &[Cost],
    ) -> Result<()> {
        let fetched = self.fetched.get();
        let mut own = vec![plan.remote_bytes(), fetched.reads, fetched.completions];
        own.push(held.sorted.len() as u64);
        own.push(held.sorted.values().map(|sorted| sorted.records).sum());
        let sums = held.sorted.values().map(|sorted| sorted.sum);
        own.push(sums.fold(0, u64::wrapping_add));
        own.extend([fetched.most_bytes, self.most_by_message.get()]);
        for cost in by_read.iter().chain(by_message) {
            let parts = [cost.seconds, cost.fetching, cost.serving, cost.process];
            own.extend(parts.map(f64::to_bits));
        }
        let all = support::gather(self.group, &own)?;
        if self.group.rank() != 0 {
            return Ok(());
        }
        let total = |at: usize| {
            let values = all.iter().map(|words| words[at]);
            values.fold(0, u64::wrapping_add)
        };
        let options = self.options;
        let expected = u64::from(options.splits) * options.records;
        ensure!(
            total(3) == u64::from(options.partitions) && total(4) == expected,
            "{} partitions with {} records were sorted, not {} with {expected}",
            total(3),
            total(4),
            options.partitions
        );
        println!(
            "{expected} records in {} sorted partitions, sum {:016x}",
            options.partitions,
            total(5)
        );
        if by_message.is_empty() {
            return Ok(());
        }
        let most = |at: usize| all.iter().map(|words| words[at]).max().unwrap_or_default();
        let mebibytes = total(0) as f64 / f64::from(1 << 20);
        println!(
            "a fetch: {mebibytes:.1} MiB between {} ranks, {} READs of up to {} bytes with {} completions, at most {} bytes in flight for a rank, of {} that may be, and at most {} by messages",
            self.group.size(),
            total(1),
            options.read_bytes,
            total(2),
            most(6),
            options.in_flight,
            most(7)
        );
        println!(
            "median of {:<10} {:>8} {:>8} {:>22} {:>22} {:>12}",
            by_message.len(),
            "ms",
            "MiB/s",
            "CPU of fetches, ms",
            "CPU of servers, ms",
            "all CPU, ms"
        );
        for (name, at, count) in [
            ("READ", 8, by_read.len()),
            ("request and reply", 8 + 4 * by_read.len(), by_message.len()),
        ] {
            // The slowest rank's time, and the processor time of all.
            let median = |part: usize, join: fn(f64, f64) -> f64| {
                let mut rounds: Vec<f64> = (0..count)
                    .map(|round| {
                        let values = all.iter().map(|w| f64::from_bits(w[at + 4 * round + part]));
                        values.fold(0.0, join)
                    })
                    .collect();
                rounds.sort_by(f64::total_cmp);
                rounds[rounds.len() / 2] * 1e3
            };
            let sum: fn(f64, f64) -> f64 = |a, b| a + b;
            let ms = median(0, f64::max);
            println!(
                "{name:<20} {ms:>8.1} {:>8.0} {:>22.1} {:>22.1} {:>12.1}",
                mebibytes / ms * 1e3,
                median(1, sum),
                median(2, sum),
                median(3, sum)
            );
        }
        Ok(())
    }
}

fn numbers_of(bytes: &[u8]) -> Result<Vec<u32>> {
    let (numbers, rest) = bytes.as_chunks();
    ensure!(rest.is_empty(), "a list of {} bytes", bytes.len());
    Ok(numbers.iter().map(|n| u32::from_le_bytes(*n)).collect())
}
