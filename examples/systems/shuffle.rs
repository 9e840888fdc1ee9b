//! A shuffle, as SparkRDMA and other RDMA shuffles do it: map outputs are written to registered memory, their locations are published, and reducers fetch them by RDMA READ. The work
//! is that of TeraSort: records of 100 bytes are sorted by their keys of 10 bytes.
//!
//!     cargo run --release --example shuffle
//!
//! The same blocks are fetched a second way, by a request message and reply messages, and both are compared. With `--kill RANK` that rank is killed while others fetch from it. The
//! others then make a group without it, map its splits again, and go on.

#[path = "support/mod.rs"]
mod support;

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::Parser;
use doorbell::{
    Access, Endpoint, EndpointConfig, Error, Group, MessageConfig, MessageQueue, QueueKind, Region,
    RemoteRegion, Work,
};
use support::Recorder;

/// The longest wait for another rank.
const DEADLINE: Duration = Duration::from_secs(30);
const KEY: usize = 10;
const RECORD: usize = 100;
/// Bytes of a table entry: offset and length of a partition's block.
const ENTRY: u64 = 16;
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
    /// Most bytes that a rank has asked for and not got
    #[arg(long, default_value_t = 1 << 20)]
    in_flight: u64,
    /// Fetches by each method, of which the median is printed
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// The rank that is killed while others fetch from it. Rank 0 hosts the store of the group and cannot be
    #[arg(long)]
    kill: Option<u32>,
    /// Folder for the sorted partitions: `part-00000` and so on
    #[arg(long)]
    out: Option<PathBuf>,
    /// File for a timeline
    #[arg(long)]
    svg: Option<PathBuf>,
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
    if let Some(victim) = options.kill {
        ensure!(
            (1..options.ranks).contains(&victim) && options.ranks > 2,
            "--kill takes a rank from 1 on of at least 3: rank 0 hosts the store, and a survivor fetches from another"
        );
    }
    support::run_with_victim(options.ranks, options.kill, |group| rank(&options, group))
}

/// The fetch of a block failed: what Spark calls a FetchFailedException. The rank that has ended is in the cause; it need not be the one that was fetched from, because the group fails
/// as a whole.
#[derive(Debug)]
struct FetchFailed {
    split: u32,
    rank: u32,
    cause: Error,
}

impl fmt::Display for FetchFailed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let FetchFailed { split, rank, cause } = self;
        write!(f, "fetch of split {split} from rank {rank}: {cause}")
    }
}

impl std::error::Error for FetchFailed {}

/// What a rank has and keeps when another one ends.
#[derive(Default)]
struct Held {
    /// The first keys of all partitions but the first.
    limits: Option<Vec<[u8; KEY]>>,
    outputs: BTreeMap<u32, MapOutput>,
    sorted: BTreeMap<u32, Sorted>,
}

/// A mapped split. Peers read both regions.
struct MapOutput {
    /// The records, by partition.
    records: Region,
    /// An entry for each partition.
    table: Region,
}

/// A partition that has been sorted.
#[derive(Clone, Copy)]
struct Sorted {
    records: u64,
    /// The sum of the hashes of its records, in whatever order.
    sum: u64,
}

/// Where a split's output is.
struct Location {
    rank: u32,
    records: RemoteRegion,
    table: RemoteRegion,
}

/// A piece of a block: the unit that is read, or sent in a reply.
#[derive(Clone, Copy)]
struct Piece {
    split: u32,
    /// In the split's output.
    from: u64,
    /// In this rank's memory.
    to: u64,
    len_bytes: u64,
}

/// What a rank fetches.
struct Plan {
    /// By the rank that has them.
    batches: BTreeMap<u32, Vec<Vec<Piece>>>,
    /// Blocks in this rank's own outputs.
    local: Vec<Piece>,
    /// Where each partition of this rank is in the fetched memory.
    partitions: BTreeMap<u32, (u64, u64)>,
    len_bytes: u64,
}

impl Plan {
    fn remote_bytes(&self) -> u64 {
        let pieces = self.batches.values().flatten().flatten();
        pieces.map(|piece| piece.len_bytes).sum()
    }

    fn pieces(&self) -> usize {
        self.batches.values().flatten().map(Vec::len).sum()
    }
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

        if self.options.kill == Some(self.name(self.group.rank())) {
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
        for (partition, (at, len_bytes)) in &plan.partitions {
            let sorted = sort(self.options, &fetched, *partition, (*at, *len_bytes))?;
            held.sorted.insert(*partition, sorted);
        }
        self.recorder.add("sort", begin);
        self.group.barrier()?;

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

    /// Reads the tables of all map outputs, and says from them what this rank fetches to which place.
    fn plan(
        &self,
        held: &Held,
        locations: &BTreeMap<u32, Location>,
        endpoints: &mut BTreeMap<u32, Endpoint>,
        partitions: &[u32],
    ) -> Result<Plan> {
        let options = self.options;
        let table_bytes = u64::from(options.partitions) * ENTRY;
        let tables = Region::alloc(
            self.group.domain(),
            u64::from(options.splits) * table_bytes,
            Access::LOCAL_WRITE,
        )?;
        for (split, location) in locations {
            let at = u64::from(*split) * table_bytes;
            if let Some(output) = held.outputs.get(split) {
                copy(&output.table, 0, &tables, at, table_bytes)?;
                continue;
            }
            let endpoint = endpoints.get_mut(&location.rank).context("an endpoint")?;
            let slices = [tables.slice(at, table_bytes)?];
            let remote = location.table.slice(0, table_bytes)?;
            let read = endpoint.post_send(&Work::read(&slices, remote));
            read.and_then(|_| endpoint.wait_cq(QueueKind::Send, Some(DEADLINE)))
                .map_err(|error| self.fetch_failed(*split, location.rank, error))?;
        }
        let mut plan = Plan {
            batches: BTreeMap::new(),
            local: Vec::new(),
            partitions: BTreeMap::new(),
            len_bytes: 0,
        };
        for partition in partitions {
            let start = plan.len_bytes;
            // Each rank begins with another mapper, so that not all read from one at a time.
            let first = self.group.rank() * options.splits / self.group.size();
            for turn in 0..options.splits {
                let split = (first + turn) % options.splits;
                let entry = u64::from(split) * table_bytes + u64::from(*partition) * ENTRY;
                let mut block = [0_u64; 2];
                tables.read_values(entry, &mut block)?;
                let [mut from, mut left] = block;
                while left > 0 {
                    let piece = Piece {
                        split,
                        from,
                        to: plan.len_bytes,
                        len_bytes: left.min(options.read_bytes.into()),
                    };
                    from += piece.len_bytes;
                    left -= piece.len_bytes;
                    plan.len_bytes += piece.len_bytes;
                    if held.outputs.contains_key(&split) {
                        plan.local.push(piece);
                        continue;
                    }
                    let batches = plan.batches.entry(locations[&split].rank).or_default();
                    match batches.last_mut() {
                        Some(batch) if batch.len() < options.batch => batch.push(piece),
                        _ => batches.push(vec![piece]),
                    }
                }
            }
            let len_bytes = plan.len_bytes - start;
            plan.partitions.insert(*partition, (start, len_bytes));
        }
        Ok(plan)
    }

    fn fetch_failed(&self, split: u32, rank: u32, error: Error) -> FetchFailed {
        // The endpoint only reports that it failed; the group knows which rank has ended.
        let cause = match self.group.cause_of(error) {
            Error::Rank { rank, reason } => Error::Rank {
                rank: self.name(rank),
                reason,
            },
            other => other,
        };
        FetchFailed {
            split,
            rank: self.name(rank),
            cause,
        }
    }

    /// Fetches by RDMA READ: no code of the application runs at the rank that is read from.
    fn fetch_by_read(
        &self,
        held: &Held,
        plan: &Plan,
        locations: &BTreeMap<u32, Location>,
        endpoints: &mut BTreeMap<u32, Endpoint>,
        fetched: &Region,
    ) -> Result<()> {
        copy_local(held, plan, fetched)?;
        let mut flight = Flight::new(plan, self.options.in_flight);
        let batches = plan.batches.values().map(Vec::len).sum::<usize>();
        let mut posted = 0;
        while !flight.is_over() {
            while let Some((peer, batch)) = flight.next(|peer, batch| {
                let endpoint = endpoints.get_mut(&peer);
                endpoint.is_some_and(|e| e.room(QueueKind::Send) as usize >= batch.len())
            }) {
                let endpoint = endpoints.get_mut(&peer).context("an endpoint")?;
                for (index, piece) in batch.iter().enumerate() {
                    let slices = [fetched.slice(piece.to, piece.len_bytes)?];
                    let records = &locations[&piece.split].records;
                    let remote = records.slice(piece.from, piece.len_bytes)?;
                    // Reads of a connection complete in order, so the last one's completion is that of all.
                    let work = Work::read(&slices, remote).signaled(index + 1 == batch.len());
                    endpoint
                        .post_send(&work)
                        .map_err(|error| self.fetch_failed(piece.split, peer, error))?;
                }
                posted += 1;
            }
            if self.options.kill.is_some() && 2 * posted >= batches {
                self.read_until_killed(plan, locations, endpoints, fetched)?;
            }
            let peer = flight.oldest().context("nothing in flight")?;
            let split = flight.first_of(peer)[0].split;
            let endpoint = endpoints.get_mut(&peer).context("an endpoint")?;
            endpoint
                .wait_cq(QueueKind::Send, Some(DEADLINE))
                .map_err(|error| self.fetch_failed(split, peer, error))?;
            flight.complete(peer);
            // The others may have come meanwhile. One call cannot wait for several endpoints.
            for (peer, endpoint) in endpoints.iter_mut() {
                while let Some(piece) = flight.first_of(*peer).first() {
                    let polled = endpoint.poll_cq(QueueKind::Send);
                    let polled =
                        polled.map_err(|error| self.fetch_failed(piece.split, *peer, error))?;
                    if polled.is_none() {
                        break;
                    }
                    flight.complete(*peer);
                }
            }
        }
        Ok(())
    }

    /// At the neighbour of the rank that is to be killed: asks for that in the middle of a fetch, and reads from it until it is gone, so that it ends with reads under way.
    fn read_until_killed(
        &self,
        plan: &Plan,
        locations: &BTreeMap<u32, Location>,
        endpoints: &mut BTreeMap<u32, Endpoint>,
        fetched: &Region,
    ) -> Result<()> {
        let Some(victim) = self
            .names
            .iter()
            .position(|name| Some(*name) == self.options.kill)
        else {
            return Ok(()); // It is gone.
        };
        let victim = victim as u32;
        if self.group.rank() != (victim + 1) % self.group.size() {
            return Ok(());
        }
        let batches = plan.batches.get(&victim);
        let piece = batches.and_then(|batches| batches.first()?.first());
        let piece = piece.context("this rank fetches nothing from the one that is to be killed")?;
        let endpoint = endpoints.get_mut(&victim).context("an endpoint")?;
        self.group.store().set(b"shuffle/kill", &[], DEADLINE)?;
        let end = Instant::now() + DEADLINE;
        while Instant::now() < end {
            let slices = [fetched.slice(piece.to, piece.len_bytes)?];
            let remote = locations[&piece.split]
                .records
                .slice(piece.from, piece.len_bytes)?;
            let read = endpoint.wait_room(QueueKind::Send, 1, Some(DEADLINE));
            read.and_then(|()| endpoint.post_send(&Work::read(&slices, remote)))
                .and_then(|_| endpoint.wait_cq(QueueKind::Send, Some(DEADLINE)))
                .map_err(|error| self.fetch_failed(piece.split, victim, error))?;
        }
        bail!("rank {} was not killed", self.name(victim))
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
        let mut own = vec![plan.remote_bytes(), plan.pieces() as u64];
        own.push(plan.batches.values().map(Vec::len).sum::<usize>() as u64);
        own.push(held.sorted.len() as u64);
        own.push(held.sorted.values().map(|sorted| sorted.records).sum());
        let sums = held.sorted.values().map(|sorted| sorted.sum);
        own.push(sums.fold(0, u64::wrapping_add));
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
        let mebibytes = total(0) as f64 / f64::from(1 << 20);
        println!(
            "a fetch: {mebibytes:.1} MiB between {} ranks, {} READs of up to {} bytes in {} batches, at most {} bytes in flight for each rank",
            self.group.size(),
            total(1),
            options.read_bytes,
            total(2),
            options.in_flight
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
            ("READ", 6, by_read.len()),
            ("request and reply", 6 + 4 * by_read.len(), by_message.len()),
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

/// Which batches have been asked for and have not come. The order of a peer's batches is that in which they come.
struct Flight<'a> {
    left: BTreeMap<u32, VecDeque<&'a [Piece]>>,
    under_way: BTreeMap<u32, VecDeque<&'a [Piece]>>,
    /// The peer of each batch that is under way, oldest first.
    order: VecDeque<u32>,
    bytes: u64,
    limit: u64,
    last: u32,
}

impl<'a> Flight<'a> {
    fn new(plan: &'a Plan, limit: u64) -> Flight<'a> {
        let batches = plan.batches.iter();
        let left = batches.map(|(peer, list)| (*peer, list.iter().map(|b| &b[..]).collect()));
        Flight {
            left: left.collect(),
            under_way: BTreeMap::new(),
            order: VecDeque::new(),
            bytes: 0,
            limit,
            last: 0,
        }
    }

    fn is_over(&self) -> bool {
        self.order.is_empty() && self.left.values().all(VecDeque::is_empty)
    }

    /// The next batch to ask for: peers take turns. None if the limit is reached, or no peer has room. One batch may always be under way, whatever the limit.
    fn next(
        &mut self,
        mut has_room: impl FnMut(u32, &[Piece]) -> bool,
    ) -> Option<(u32, &'a [Piece])> {
        let behind = self.left.range(self.last + 1..);
        let order: Vec<u32> = behind
            .chain(self.left.range(..=self.last))
            .map(|(peer, _)| *peer)
            .collect();
        for peer in order {
            let Some(batch) = self.left[&peer].front().copied() else {
                continue;
            };
            let bytes = bytes_of(batch);
            // With nothing under way there is room, unless the endpoint has failed: then the post says why, and `Endpoint::room` would be 0.
            let is_free = self.bytes == 0;
            if !is_free && (self.bytes + bytes > self.limit || !has_room(peer, batch)) {
                continue;
            }
            self.left.entry(peer).or_default().pop_front();
            self.under_way.entry(peer).or_default().push_back(batch);
            self.order.push_back(peer);
            self.bytes += bytes;
            self.last = peer;
            return Some((peer, batch));
        }
        None
    }

    fn oldest(&self) -> Option<u32> {
        self.order.front().copied()
    }

    /// The oldest batch that is under way with the peer, or an empty one.
    fn first_of(&self, peer: u32) -> &'a [Piece] {
        let queue = self.under_way.get(&peer);
        queue
            .and_then(|queue| queue.front())
            .copied()
            .unwrap_or(&[])
    }

    /// The peer's oldest batch has come.
    fn complete(&mut self, peer: u32) {
        let queue = self.under_way.entry(peer).or_default();
        if let Some(batch) = queue.pop_front() {
            self.bytes -= bytes_of(batch);
        }
        if let Some(at) = self.order.iter().position(|other| *other == peer) {
            self.order.remove(at);
        }
    }
}

fn bytes_of(batch: &[Piece]) -> u64 {
    batch.iter().map(|piece| piece.len_bytes).sum()
}

/// The other method: a rank asks for a batch by a message, and a thread of the rank that has it replies with one message for each piece.
struct Queues {
    peers: Vec<u32>,
    /// To each peer's server.
    asking: Vec<MessageQueue>,
    /// From each peer, for this rank's server.
    serving: Vec<MessageQueue>,
    /// Requests on their way out, and the one that the server reads.
    requests: Region,
    request: Region,
    batch: usize,
}

/// Bytes of a piece in a request: split, offset, length.
const REQUEST_ENTRY: usize = 24;
/// Requests of one peer whose replies have not come.
const REQUESTS: u32 = 4;

impl Queues {
    fn open(options: &Options, group: &Group) -> Result<Queues> {
        let rank = group.rank();
        let peers: Vec<u32> = (0..group.size()).filter(|peer| *peer != rank).collect();
        // The tag is the rank that asks.
        let asking = peers.iter().map(|peer| (*peer, u64::from(rank)));
        let serving = peers.iter().map(|peer| (*peer, u64::from(*peer)));
        let with: Vec<(u32, u64)> = asking.chain(serving).collect();
        let slots = (REQUESTS * options.batch as u32).next_power_of_two();
        let config = MessageConfig::default()
            .slots(slots)
            .ahead(slots.max(64))
            .eager_bytes(options.read_bytes.min(1 << 20))
            .endpoint(EndpointConfig::default().wait_timeout(Some(DEADLINE)));
        let mut asking = group.message_queues(&with, &config)?;
        let serving = asking.split_off(peers.len());
        let bytes = (options.batch * REQUEST_ENTRY) as u64;
        let all = bytes * u64::from(REQUESTS) * peers.len() as u64;
        Ok(Queues {
            asking,
            serving,
            requests: Region::alloc(group.domain(), all, Access::LOCAL_WRITE)?,
            request: Region::alloc(group.domain(), bytes, Access::LOCAL_WRITE)?,
            batch: options.batch,
            peers,
        })
    }

    fn fetch(
        &mut self,
        attempt: &Attempt<'_>,
        held: &Held,
        plan: &Plan,
        fetched: &Region,
    ) -> Result<Cost> {
        let is_over = AtomicBool::new(false);
        let Queues {
            peers,
            asking,
            serving,
            requests,
            request,
            batch,
        } = self;
        let request = &*request;
        std::thread::scope(|scope| {
            let server = scope.spawn(|| serve(serving, held, request, &is_over));
            let mut fetch = || -> Result<Cost> {
                let cost = attempt.measure(|attempt| {
                    let ask = Asking {
                        peers,
                        requests,
                        batch: *batch,
                    };
                    ask.fetch(attempt, asking, held, plan, fetched)
                })?;
                // Until here a peer may ask.
                attempt.group.barrier()?;
                Ok(cost)
            };
            let fetched = fetch();
            is_over.store(true, Ordering::Relaxed);
            let served = server.join();
            let served = served.unwrap_or_else(|_| bail!("the server panicked"));
            Ok(Cost {
                serving: served?.as_secs_f64(),
                ..fetched?
            })
        })
    }

    fn finish(self) -> Result<()> {
        for mut queue in self.asking.into_iter().chain(self.serving) {
            queue.finish(Some(DEADLINE))?;
        }
        Ok(())
    }
}

/// Answers requests, and returns the processor time that it took.
fn serve(
    queues: &mut [MessageQueue],
    held: &Held,
    request: &Region,
    is_over: &AtomicBool,
) -> Result<Duration> {
    let whole = [request.slice(0, request.len_bytes())?];
    let mut bytes = vec![0; request.len_bytes() as usize];
    while !is_over.load(Ordering::Relaxed) {
        let mut all: Vec<&mut MessageQueue> = queues.iter_mut().collect();
        let limit = Some(Duration::from_millis(10));
        let (from, len_bytes) = match MessageQueue::recv_any_now(&mut all, &whole, limit) {
            Err(Error::Timeout { .. }) => continue,
            received => received?,
        };
        request.read(0, &mut bytes)?;
        let entries = bytes[..len_bytes as usize].as_chunks::<REQUEST_ENTRY>().0;
        for entry in entries {
            let (words, _) = entry.as_chunks();
            let [split, at, len] = [0, 1, 2].map(|word| u64::from_le_bytes(words[word]));
            let output = held.outputs.get(&(split as u32));
            let output = output.with_context(|| format!("split {split} was asked for"))?;
            // It is sent from where the map has written it, which stays.
            let reply = [output.records.slice(at, len)?];
            let _ = queues[from].start_send_now(&reply, Some(DEADLINE))?;
        }
    }
    support::thread_time()
}

/// The side that asks.
struct Asking<'a> {
    peers: &'a [u32],
    requests: &'a Region,
    batch: usize,
}

impl Asking<'_> {
    fn fetch(
        &self,
        attempt: &Attempt<'_>,
        queues: &mut [MessageQueue],
        held: &Held,
        plan: &Plan,
        fetched: &Region,
    ) -> Result<()> {
        copy_local(held, plan, fetched)?;
        let mut flight = Flight::new(plan, attempt.options.in_flight);
        let mut asked = vec![0_u32; self.peers.len()];
        let mut under_way = vec![0_u32; self.peers.len()];
        let index = |peer: u32| self.peers.iter().position(|p| *p == peer);
        while !flight.is_over() {
            while let Some((peer, batch)) =
                flight.next(|peer, _| index(peer).is_some_and(|at| under_way[at] < REQUESTS))
            {
                let at = index(peer).context("a queue")?;
                let bytes: Vec<u8> = batch
                    .iter()
                    .flat_map(|piece| [piece.split.into(), piece.from, piece.len_bytes])
                    .flat_map(u64::to_le_bytes)
                    .collect();
                // The replies to what was there before have come.
                let place = at as u32 * REQUESTS + asked[at] % REQUESTS;
                let place = u64::from(place) * (self.batch * REQUEST_ENTRY) as u64;
                self.requests.write(place, &bytes)?;
                let request = [self.requests.slice(place, bytes.len() as u64)?];
                let _ = queues[at]
                    .start_send_now(&request, Some(DEADLINE))
                    .map_err(|error| attempt.fetch_failed(batch[0].split, peer, error))?;
                asked[at] += 1;
                under_way[at] += 1;
            }
            let peer = flight.oldest().context("nothing in flight")?;
            let at = index(peer).context("a queue")?;
            for piece in flight.first_of(peer) {
                let into = [fetched.slice(piece.to, piece.len_bytes)?];
                let len_bytes = queues[at]
                    .recv_now(&into, Some(DEADLINE))
                    .map_err(|error| attempt.fetch_failed(piece.split, peer, error))?;
                ensure!(len_bytes == piece.len_bytes, "a reply of {len_bytes} bytes");
            }
            flight.complete(peer);
            under_way[at] -= 1;
        }
        Ok(())
    }
}

/// Blocks in this rank's own outputs are copied, whatever the method.
fn copy_local(held: &Held, plan: &Plan, fetched: &Region) -> Result<()> {
    for piece in &plan.local {
        let records = &held.outputs[&piece.split].records;
        copy(records, piece.from, fetched, piece.to, piece.len_bytes)?;
    }
    Ok(())
}

fn copy(from: &Region, at: u64, to: &Region, to_at: u64, len_bytes: u64) -> Result<()> {
    let mut bytes = vec![0; len_bytes as usize];
    from.read(at, &mut bytes)?;
    Ok(to.write(to_at, &bytes)?)
}

/// Maps a split: generates its records, and writes each into its partition's block.
fn map(options: &Options, group: &Group, limits: &[[u8; KEY]], split: u32) -> Result<MapOutput> {
    let first = u64::from(split) * options.records;
    let keys = (first..first + options.records).map(|number| key(options.seed, number));
    let of_key = |key: &[u8; KEY]| limits.partition_point(|limit| limit <= key);
    let partitions: Vec<usize> = keys.map(|key| of_key(&key)).collect();
    let mut lengths = vec![0_u64; options.partitions as usize];
    for partition in &partitions {
        lengths[*partition] += RECORD as u64;
    }
    let mut entries = Vec::new();
    let mut end = 0;
    for len_bytes in &lengths {
        entries.extend([end, *len_bytes]);
        end += len_bytes;
    }
    let access = Access::LOCAL_WRITE | Access::REMOTE_READ;
    let table_bytes = u64::from(options.partitions) * ENTRY;
    let table = Region::alloc(group.domain(), table_bytes, access)?;
    table.write_values(0, &entries)?;
    let records = Region::alloc(group.domain(), end.max(1), access)?;
    let mut at: Vec<u64> = entries.iter().step_by(2).copied().collect();
    for (number, partition) in (first..).zip(&partitions) {
        records.write(at[*partition], &record(options.seed, number))?;
        at[*partition] += RECORD as u64;
    }
    Ok(MapOutput { records, table })
}

/// Sorts a partition that has been fetched, and writes it if that was asked for.
fn sort(
    options: &Options,
    fetched: &Region,
    partition: u32,
    (at, len_bytes): (u64, u64),
) -> Result<Sorted> {
    let mut bytes = vec![0; len_bytes as usize];
    fetched.read(at, &mut bytes)?;
    let (records, rest) = bytes.as_chunks_mut::<RECORD>();
    ensure!(rest.is_empty(), "partition {partition} ends in a record");
    // Equal keys are ordered by what follows, so that the result does not depend on the order of arrival.
    records.sort_unstable();
    if let Some(folder) = &options.out {
        std::fs::create_dir_all(folder)?;
        let name = format!("part-{partition:05}");
        let made = folder.join(format!(".{name}.{}", std::process::id()));
        std::fs::write(&made, records.as_flattened())?;
        // A rank that is killed leaves no half of a partition under its name.
        std::fs::rename(&made, folder.join(name))?;
    }
    let hashes = records.iter().map(|record| hash(record));
    Ok(Sorted {
        records: records.len() as u64,
        sum: hashes.fold(0, u64::wrapping_add),
    })
}

fn sum_of(region: &Region, len_bytes: u64) -> Result<u64> {
    let mut bytes = vec![0; len_bytes as usize];
    region.read(0, &mut bytes)?;
    Ok(hash(&bytes))
}

/// FNV-1a.
fn hash(bytes: &[u8]) -> u64 {
    let step = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, step)
}

/// The key of a record: ten bytes from its number and the seed.
fn key(seed: u64, number: u64) -> [u8; KEY] {
    let mut key = [0; KEY];
    let first = mix(seed ^ mix(number));
    key[..8].copy_from_slice(&first.to_be_bytes());
    key[8..].copy_from_slice(&mix(first).to_be_bytes()[..2]);
    key
}

/// A record with the layout of gensort's binary records: key, break, the number in hexadecimal digits, break, filler, break.
fn record(seed: u64, number: u64) -> [u8; RECORD] {
    let mut record = [0; RECORD];
    record[..KEY].copy_from_slice(&key(seed, number));
    record[10..12].copy_from_slice(&[0x00, 0x11]);
    record[12..44].copy_from_slice(format!("{number:032X}").as_bytes());
    record[44..48].copy_from_slice(&[0x88, 0x99, 0xaa, 0xbb]);
    let filler = mix(number).to_be_bytes();
    for (at, byte) in record[48..96].iter_mut().enumerate() {
        *byte = b"0123456789ABCDEF"[usize::from(filler[at / 4 % 8] & 15)];
    }
    record[96..].copy_from_slice(&[0xcc, 0xdd, 0xee, 0xff]);
    record
}

/// One step of splitmix64.
fn mix(state: u64) -> u64 {
    let mut mixed = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

fn numbers_of(bytes: &[u8]) -> Result<Vec<u32>> {
    let (numbers, rest) = bytes.as_chunks();
    ensure!(rest.is_empty(), "a list of {} bytes", bytes.len());
    Ok(numbers.iter().map(|n| u32::from_le_bytes(*n)).collect())
}
