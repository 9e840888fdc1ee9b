//! A memory of all ranks with a directory at the home of each line and a cache at each rank, after GAM ("Efficient Distributed Memory Management with RDMA and Caching", VLDB 2018).
//!
//!     cargo run --release --example remote_memory
//!     cargo run --release --example remote_memory -- --rounds 1000000 --operations 0
//!
//! Litmus tests count what the memory reorders, and fail if it reorders what it must not. Counters whose lines are written back after each increment show that no write is lost. A key-value store measures what the caches are worth against one-sided accesses without caches.

mod counters;
mod litmus;
mod node;
mod random;
mod store;
#[path = "../support/mod.rs"]
mod support;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use clap::{Parser, ValueEnum};
use doorbell::Group;
use doorbell::softcx::Faults;
use serde_json::json;

use litmus::{Batches, Outcomes, TESTS};
use node::Node;
use random::{Random, Zipf};
use store::{Method, Table, VALUE_BYTES_MAX};
use support::{Line, Plot};

#[derive(Parser)]
struct Options {
    /// Ranks, if no launcher starts them
    #[arg(long, default_value_t = 4)]
    ranks: u32,
    /// Rounds of each litmus test
    #[arg(long, default_value_t = 2048)]
    rounds: u64,
    /// Part of the packets that the software ConnectX holds back for up to 50 us: messages of different peers then overtake each other
    #[arg(long, default_value_t = 0.0)]
    reorder: f64,
    /// The software ConnectX of rank 0 delays its packets by so many microseconds. With four ranks this is the home of the data of `message passing`, and not of the flag
    #[arg(long, default_value_t = 0)]
    delay_us: u64,
    /// Increments of each rank of a few counters, whose lines it writes back at once
    #[arg(long, default_value_t = 1000)]
    increments: u64,
    /// Rounds between two barriers
    #[arg(long, default_value_t = 32, value_parser = clap::value_parser!(u64).range(1..=512))]
    batch: u64,
    /// Keys of the store
    #[arg(long, default_value_t = 2048, value_parser = clap::value_parser!(u64).range(1..))]
    keys: u64,
    #[arg(long, default_value_t = 128)]
    value_bytes: usize,
    /// Gets and puts of each rank, for each share of gets
    #[arg(long, default_value_t = 5000)]
    operations: u64,
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = Method::value_variants().to_vec())]
    methods: Vec<Method>,
    /// Shares of gets in percent
    #[arg(long, value_delimiter = ',', default_values_t = [50, 90, 99])]
    gets: Vec<u64>,
    /// Exponent of the Zipf distribution of keys
    #[arg(long, default_value_t = 0.99)]
    skew: f64,
    /// Lines of 512 bytes in the cache of a rank
    #[arg(long, default_value_t = 1024)]
    cache_lines: usize,
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// This rank begins with a put by `direct`, and ends in the middle of it, as if its host lost power
    #[arg(long)]
    kill: Option<u32>,
    /// Writes outcomes and the final versions of all keys as JSON
    #[arg(long)]
    out: Option<PathBuf>,
    /// Draws throughput over the share of gets
    #[arg(long)]
    svg: Option<PathBuf>,
}

fn main() -> Result<()> {
    let options = Options::parse();
    ensure!(
        options.value_bytes <= VALUE_BYTES_MAX,
        "a value has at most {VALUE_BYTES_MAX} bytes"
    );
    support::run_with_victim(options.ranks, options.kill, |group| rank(&options, group))
}

fn rank(options: &Options, group: Group) -> Result<()> {
    let size = u64::from(group.size());
    let litmus_lines = litmus::lines(options.batch);
    let table_lines = Table::lines_for(options.keys);
    let tables_at = litmus_lines + counters::LINES;
    let lines = (tables_at + options.methods.len() as u64 * table_lines).div_ceil(size);
    let mut node = Node::new(group, lines, options.cache_lines)?;
    let is_slow = node.rank() == 0;
    let faults = Faults {
        reorder: options.reorder,
        delay_ns: if is_slow { 1000 * options.delay_us } else { 0 },
        seed: options.seed,
        ..Faults::default()
    };
    if options.reorder > 0.0 || options.delay_us > 0 {
        let device = node.group.domain().device();
        ensure!(
            device.set_faults(faults),
            "{} holds no packets back",
            device.name()
        );
    }
    let outcomes = test_order(options, &mut node)?;
    let counted = counters::count(&mut node, litmus_lines, options.increments, options.seed)?;
    let table = |(method, number): (&Method, u64)| {
        Table::new(
            *method,
            tables_at + number * table_lines,
            table_lines,
            options.value_bytes,
        )
    };
    let mut tables: Vec<Table> = options.methods.iter().zip(0..).map(table).collect();
    for table in &mut tables {
        table.is_killed = table.method == Method::Direct && options.kill == Some(node.rank());
    }
    let mut versions = Vec::new();
    if options.operations > 0 {
        let puts = measure(options, &mut node, &mut tables)?;
        versions = check_versions(options, &mut node, &mut tables, puts)?;
    }
    if let Some(file) = options.out.as_ref().filter(|_| node.rank() == 0) {
        let outcomes: Vec<_> = outcomes.iter().map(Outcomes::json).collect();
        std::fs::write(
            file,
            json!({ "litmus": outcomes, "counted": counted, "versions": versions }).to_string(),
        )?;
    }
    node.barrier()?;
    // No rank leaves while another one may still wait for an acknowledgement.
    node.group.barrier()?;
    node.group.leave()?;
    Ok(())
}

/// Runs the litmus tests, and fails if one has an outcome that it must not have.
fn test_order(options: &Options, node: &mut Node) -> Result<Vec<Outcomes>> {
    let is_first = node.rank() == 0;
    let mut batches = Batches::new(options.batch, options.seed, node.rank());
    let mut all = Vec::new();
    for test in TESTS.iter().filter(|_| options.rounds > 0) {
        let started = Instant::now();
        let Some(outcomes) = batches.run(node, test, options.rounds)? else {
            if is_first {
                println!("{}: too few ranks", test.name);
            }
            continue;
        };
        if is_first {
            let rounds: u64 = outcomes.counts.values().sum();
            let counts: Vec<String> = outcomes
                .counts
                .iter()
                .map(|(reads, count)| format!("{reads:?} {count}"))
                .collect();
            println!(
                "{:25} {rounds:8} rounds in {:.1?}: relaxed {}, forbidden {}; {}",
                test.name,
                started.elapsed(),
                outcomes.relaxed,
                outcomes.forbidden,
                counts.join(", ")
            );
        }
        all.push(outcomes);
    }
    let forbidden: Vec<String> = all
        .iter()
        .filter(|outcomes| outcomes.forbidden > 0)
        .map(|outcomes| {
            format!(
                "{}: {} forbidden outcomes",
                outcomes.name, outcomes.forbidden
            )
        })
        .collect();
    ensure!(forbidden.is_empty(), "{}", forbidden.join(", "));
    Ok(all)
}

/// What a method did with one share of gets, all ranks together.
struct Measured {
    operations_per_s: f64,
    cpu: Duration,
    counts: [u64; 6],
    retries: u64,
    puts: u64,
}

/// Returns the puts of all ranks into each table.
fn measure(options: &Options, node: &mut Node, tables: &mut [Table]) -> Result<u64> {
    let is_first = node.rank() == 0;
    let (rank, size) = (u64::from(node.rank()), u64::from(node.size()));
    for table in tables.iter_mut() {
        for key in (0..options.keys).filter(|key| key % size == rank) {
            table.insert(node, key)?;
        }
        node.fence()?;
        node.barrier()?;
    }
    if is_first {
        println!(
            "\n{} keys of {} bytes, skew {}, {} lines in each cache, {} operations of each of {} ranks",
            options.keys,
            options.value_bytes,
            options.skew,
            options.cache_lines,
            options.operations,
            node.size()
        );
        println!(
            "  gets  method   operations/s  hits  of an operation: READ  WRITE atomic   SEND  CPU us  retries"
        );
    }
    let zipf = Zipf::new(options.keys, options.skew);
    let line = |method: &Method| Line {
        name: method.name(),
        points: Vec::new(),
    };
    let mut lines: Vec<Line> = options.methods.iter().map(line).collect();
    let mut puts = vec![0; tables.len()];
    for (phase, share) in options.gets.iter().enumerate() {
        for (number, (table, line)) in tables.iter_mut().zip(&mut lines).enumerate() {
            let measured = measure_one(options, node, table, &zipf, (phase as u64, *share))?;
            puts[number] += measured.puts;
            line.points.push((*share as f64, measured.operations_per_s));
            if is_first {
                print_row(options, node.size(), table.method, *share, &measured);
            }
        }
    }
    if let Some(file) = options.svg.as_ref().filter(|_| is_first) {
        let plot = Plot {
            title: "Key-value store",
            x: "gets, percent",
            y: "operations per second",
            lines,
        };
        plot.write(file)?;
    }
    let all = puts.first().copied().unwrap_or_default();
    ensure!(
        puts.iter().all(|puts| *puts == all),
        "the tables had {puts:?} puts"
    );
    Ok(all)
}

fn print_row(options: &Options, size: u32, method: Method, share: u64, measured: &Measured) {
    let all = (options.operations * u64::from(size)) as f64;
    let [hits, misses, reads, writes, atomics, messages] = measured.counts;
    let hits = match method {
        Method::Cached => format!(
            "{:3.0} %",
            100.0 * hits as f64 / (hits + misses).max(1) as f64
        ),
        Method::Direct => "    -".into(),
    };
    let each = |count: u64| count as f64 / all;
    println!(
        "{share:4} %  {:7} {:13.0} {hits} {:22.2} {:6.2} {:6.2} {:6.2} {:7.1} {:8}",
        method.name(),
        measured.operations_per_s,
        each(reads),
        each(writes),
        each(atomics),
        each(messages),
        measured.cpu.as_secs_f64() * 1e6 / all,
        measured.retries,
    );
}

/// The generator of the operations of a rank.
fn operations_of(options: &Options, rank: u32, phase: u64) -> Random {
    Random::new(options.seed.wrapping_mul(1 << 20) + (phase << 10) + u64::from(rank))
}

fn measure_one(
    options: &Options,
    node: &mut Node,
    table: &mut Table,
    zipf: &Zipf,
    (phase, share): (u64, u64),
) -> Result<Measured> {
    let mut random = operations_of(options, node.rank(), phase);
    node.barrier()?;
    let (counts, retries, cpu) = (node.counts, table.retries, support::process_time()?);
    let started = Instant::now();
    let mut puts = 0;
    for _ in 0..options.operations {
        let is_get = random.below(100) < share && !table.is_killed;
        let key = zipf.draw(&mut random);
        if is_get {
            table.get(node, key)?;
        } else {
            table.put(node, key)?;
            puts += 1;
        }
    }
    node.fence()?;
    let own = node.counts.since(&counts);
    node.barrier()?;
    let elapsed = started.elapsed();
    let cpu = support::process_time()? - cpu;
    let mut values = own.to_vec();
    values.extend([table.retries - retries, cpu.as_nanos() as u64, puts]);
    let mut sums = [0; 9];
    for values in support::gather(&node.group, &values)? {
        for (sum, value) in sums.iter_mut().zip(values) {
            *sum += value;
        }
    }
    let [counts @ .., retries, cpu, puts] = sums;
    Ok(Measured {
        operations_per_s: (options.operations * u64::from(node.size())) as f64
            / elapsed.as_secs_f64(),
        cpu: Duration::from_nanos(cpu),
        counts,
        retries,
        puts,
    })
}

/// Reads all keys of all tables, whose versions are the puts: one that was lost or made twice shows.
fn check_versions(
    options: &Options,
    node: &mut Node,
    tables: &mut [Table],
    puts: u64,
) -> Result<Vec<Vec<u64>>> {
    node.barrier()?;
    let mut versions = Vec::new();
    if node.rank() == 0 {
        for key in 0..options.keys {
            let of_key: Result<Vec<u64>> = tables
                .iter_mut()
                .map(|table| table.get(node, key))
                .collect();
            versions.push(of_key?);
        }
        for (number, table) in tables.iter().enumerate() {
            let found: u64 = versions
                .iter()
                .map(|of_key: &Vec<u64>| of_key[number])
                .sum();
            println!(
                "{}: all {} keys were read back, with {found} of {puts} puts",
                table.method.name(),
                options.keys
            );
            ensure!(
                found == puts,
                "{}: {puts} puts were made, and {found} are there",
                table.method.name()
            );
        }
    }
    node.barrier()?;
    Ok(versions)
}
