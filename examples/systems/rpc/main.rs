//! Remote procedure calls by several methods, in one run: latency, throughput and processor time over sizes and numbers of clients, and where the order of two methods changes. After
//! AR-gRPC ("Accelerating TensorFlow with Adaptive RDMA-based gRPC", HiPC 2018), whose adaptive method chooses the protocol by the size of a message, and between polling and events by the load.
//!
//!     cargo run --release --example rpc
//!     cargo run --release --example rpc -- --full --svg rpc.svg
//!
//! Rank 0 is the server, with one thread. The clients are threads of the other ranks. Every answer is compared with what the client computes itself.

mod connection;
#[path = "../support/mod.rs"]
mod support;

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Barrier;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail, ensure};
use clap::{Parser, ValueEnum};
use doorbell::softcx::Faults;
use doorbell::{EndpointConfig, Group, GroupConfig, RemoteRegion};
use serde_json::{Value, json};

use connection::{Connection, DEADLINE, Event, Method, Waiting, serve};
use support::{Line, Plot};

#[derive(Parser)]
struct Options {
    /// Ranks, if no launcher starts them: the server and those of the clients
    #[arg(long, default_value_t = 3)]
    ranks: u32,
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = Method::value_variants().to_vec())]
    methods: Vec<Method>,
    /// Bytes of a request, and of its answer
    #[arg(long, value_delimiter = ',', default_values_t = [64, 4096, 262_144])]
    sizes: Vec<u64>,
    /// Numbers of clients
    #[arg(long, value_delimiter = ',', default_values_t = [1, 4, 16])]
    clients: Vec<u64>,
    /// Sizes from 8 bytes to 1 MiB and 1 to 32 clients
    #[arg(long)]
    full: bool,
    /// Calls of all clients together, for each method, size and number of clients
    #[arg(long, default_value_t = 192)]
    calls: u64,
    /// Two methods are told apart if they differ by so many percent
    #[arg(long, default_value_t = 30)]
    margin: u64,
    /// Writes all that was measured as JSON
    #[arg(long)]
    out: Option<PathBuf>,
    /// Writes the sum of all answers to the calls of each size and number of clients by each method, and nothing that was measured
    #[arg(long)]
    answers: Option<PathBuf>,
    /// The software ConnectX of each client delays its packets by so many microseconds: requests of several clients are then under way at the same time
    #[arg(long, default_value_t = 0)]
    delay_us: u64,
    /// The clients of each further rank begin so many microseconds later than those of the one before
    #[arg(long, default_value_t = 0)]
    stagger_us: u64,
    /// The limit of the group for a barrier and for joining, in seconds
    #[arg(long, default_value_t = 60)]
    group_limit_s: u64,
    /// Draws latency over sizes with the fewest clients, and next to it throughput over clients with the shortest messages (`.clients.svg`) and processor time over sizes with the most clients (`.cpu.svg`)
    #[arg(long)]
    svg: Option<PathBuf>,
}

fn main() -> Result<()> {
    let mut options = Options::parse();
    if options.full {
        options.sizes = (0..)
            .map(|step| 8 << (2 * step))
            .take_while(|size| *size < 1 << 20)
            .chain([1 << 20])
            .collect();
        options.clients = vec![1, 2, 4, 8, 16, 32];
    }
    for list in [&mut options.sizes, &mut options.clients] {
        list.sort_unstable();
        list.dedup();
        ensure!(
            list.first().is_some_and(|first| *first > 0),
            "sizes and clients are 1 or more"
        );
    }
    ensure!(
        options.sizes.last().is_some_and(|size| *size <= 1 << 24),
        "a message has at most 16 MiB"
    );
    let config = GroupConfig::default().timeout(Duration::from_secs(options.group_limit_s));
    support::run_with(options.ranks, None, &config, |group| rank(&options, group))
}

/// What was measured of one method with one size and number of clients.
struct Cell {
    method: Method,
    size: u64,
    clients: u64,
    median: Duration,
    p99: Duration,
    calls_per_s: f64,
    /// Of server and clients, for a call.
    cpu: Duration,
    /// How often a side went to sleep, for a call.
    sleeps: f64,
    /// How many waits have begun by polling, for a call. Waits of a client that polls memory do not count.
    polled: f64,
    /// More threads of a host polled than it has cores.
    is_crowded: bool,
    /// The most requests that the server was reading at the same time.
    most_reads: u64,
    /// Of all answers.
    sum: u64,
}

impl Cell {
    fn json(&self) -> Value {
        json!({
            "method": self.method.name(), "size": self.size, "clients": self.clients, "latency": self.median.as_nanos() as u64,
            "throughput": self.calls_per_s, "cpu": self.cpu.as_nanos() as u64, "sum": self.sum,
            "sleeps": self.sleeps, "polled": self.polled, "crowded": self.is_crowded, "most_reads": self.most_reads,
        })
    }
}

fn rank(options: &Options, group: Group) -> Result<()> {
    ensure!(
        group.size() >= 2,
        "a server and a rank with clients are needed"
    );
    let result = measure_all(options, &group);
    let cells = result.map_err(|error| match error.downcast::<doorbell::Error>() {
        // An endpoint only reports that it failed; the group has the cause.
        Ok(error) => anyhow!(group.cause_of(error)),
        Err(error) => error,
    })?;
    if group.rank() == 0 {
        report(options, &cells)?;
    }
    group.barrier()?;
    group.leave()?;
    Ok(())
}

fn measure_all(options: &Options, group: &Group) -> Result<Vec<Cell>> {
    if options.delay_us > 0 && group.rank() > 0 {
        let device = group.domain().device();
        let faults = Faults {
            delay_ns: 1000 * options.delay_us,
            ..Faults::default()
        };
        ensure!(
            device.set_faults(faults),
            "{} delays no packets",
            device.name()
        );
    }
    let mut connections = connect(options, group)?;
    let hosts = hosts(group)?;
    let mut cells = Vec::new();
    if group.rank() == 0 {
        println!("clients     bytes  method      median us   p99 us   calls/s  CPU us  sleeps");
    }
    for clients in &options.clients {
        for size in &options.sizes {
            for method in &options.methods {
                let kind = (*method, *size, *clients);
                let cell = measure(options, group, &hosts, &mut connections, kind)?;
                if group.rank() == 0 {
                    println!(
                        "{clients:7} {size:9}  {:10} {:10.1} {:8.1} {:9.0} {:7.1} {:7.2}",
                        method.name(),
                        cell.median.as_secs_f64() * 1e6,
                        cell.p99.as_secs_f64() * 1e6,
                        cell.calls_per_s,
                        cell.cpu.as_secs_f64() * 1e6,
                        cell.sleeps
                    );
                }
                cells.push(cell);
            }
        }
    }
    Ok(cells)
}

/// The host of each rank: the lowest rank that is on it.
fn hosts(group: &Group) -> Result<Vec<usize>> {
    let names = group.store().gather(&support::host_name()?, DEADLINE)?;
    let first = |name: &Vec<u8>| names.iter().position(|other| other == name);
    let hosts: Option<Vec<usize>> = names.iter().map(first).collect();
    hosts.context("a name that is not among the names")
}

/// The rank of a client.
fn rank_of(client: u64, size: u32) -> u32 {
    1 + (client % u64::from(size - 1)) as u32
}

/// Connects every client with the server, each by an endpoint of its own. Returns those of this rank, in the order of the clients.
fn connect(options: &Options, group: &Group) -> Result<Vec<Connection>> {
    let max_bytes = options.sizes.last().copied().unwrap_or_default();
    let all = 0..options.clients.last().copied().unwrap_or_default();
    let is_server = group.rank() == 0;
    let mut with = Vec::new();
    for client in all {
        match rank_of(client, group.size()) {
            rank if is_server => with.push((rank, client)),
            rank if rank == group.rank() => with.push((0, client)),
            _ => (),
        }
    }
    let config = EndpointConfig::default().room_timeout(Some(DEADLINE));
    let mut connections = Vec::new();
    let mut regions = Vec::new();
    for endpoint in group.endpoints(&with, &config)? {
        let connection = Connection::new(group, endpoint, max_bytes)?;
        regions.extend(connection.region().to_bytes());
        connections.push(connection);
    }
    let regions = group.store().gather(&regions, DEADLINE)?;
    for ((peer, client), connection) in with.iter().zip(&mut connections) {
        let at = match is_server {
            true => client / u64::from(group.size() - 1),
            false => *client,
        };
        let (all, _) = regions[*peer as usize].as_chunks();
        let region = all.get(at as usize);
        let region = region.with_context(|| format!("rank {peer} has no region {at}"))?;
        connection.set_remote(RemoteRegion::from_bytes(region));
    }
    Ok(connections)
}

fn measure(
    options: &Options,
    group: &Group,
    hosts: &[usize],
    connections: &mut [Connection],
    (method, size, clients): (Method, u64, u64),
) -> Result<Cell> {
    let calls = options.calls.div_ceil(clients);
    let rank = group.rank();
    let own = (0..clients).filter(|client| rank == 0 || rank_of(*client, group.size()) == rank);
    let own: Vec<u64> = own.collect();
    let connections = &mut connections[..own.len()];
    // The clients on this host, and the server if it is one of its ranks.
    let host = hosts[rank as usize];
    let is_here = |rank: u32| hosts[rank as usize] == host;
    let clients_here = (0..clients).filter(|client| is_here(rank_of(*client, group.size())));
    let threads = clients_here.count() as u64 + u64::from(is_here(0));
    let cores = std::thread::available_parallelism().map_or(1, usize::from) as u64;
    let waiting = Waiting {
        group,
        method,
        is_crowded: threads > cores,
    };
    if rank == 0 {
        for connection in connections.iter_mut() {
            connection.expect(method)?;
        }
    }
    group.barrier()?;
    let met = support::monotonic_time();
    let cpu = support::process_time()?;
    let mut done = Done::default();
    if rank == 0 {
        let served = serve(connections, &waiting, clients * calls, compute)?;
        (done.sleeps, done.polled) = (served.sleeps, served.polled);
        done.most_reads = served.most_reads;
    } else if !own.is_empty() {
        std::thread::sleep(Duration::from_micros(
            options.stagger_us * u64::from(rank - 1),
        ));
        done = run_clients(connections, &waiting, &own, (calls, size))?;
    }
    done.cpu = support::process_time()? - cpu;
    done.met = met;
    done.is_crowded = waiting.is_crowded;
    // Ranks without clients, and those whose clients are done, are here long before the others.
    support::wait_for_all(group)?;
    put_together(group, hosts, done, (method, size, clients), clients * calls)
}

/// What a rank has done.
#[derive(Default)]
struct Done {
    latencies: Vec<Duration>,
    /// When all ranks had met, by the clock of the host.
    met: Duration,
    /// When the first of its clients began, and when the last one ended.
    span: Option<(Duration, Duration)>,
    cpu: Duration,
    sleeps: u64,
    polled: u64,
    is_crowded: bool,
    /// Of the server; 0 of the others.
    most_reads: u64,
    sum: u64,
}

/// Runs a thread for each client.
fn run_clients(
    connections: &mut [Connection],
    waiting: &Waiting<'_>,
    own: &[u64],
    (calls, size): (u64, u64),
) -> Result<Done> {
    let start = Barrier::new(own.len());
    let mut done = Done::default();
    let results: Vec<Result<Client>> = std::thread::scope(|threads| {
        let started: Vec<_> = (own.iter().zip(connections))
            .map(|(client, connection)| {
                threads.spawn(|| run_client(connection, waiting, &start, *client, (calls, size)))
            })
            .collect();
        let join = |thread: std::thread::ScopedJoinHandle<'_, _>| {
            thread.join().unwrap_or_else(|_| bail!("a client panicked"))
        };
        started.into_iter().map(join).collect()
    });
    let mut ends = Vec::new();
    for result in results {
        let client = result?;
        done.latencies.extend(client.latencies);
        done.sleeps += client.sleeps;
        done.polled += client.polled;
        done.sum = done.sum.wrapping_add(client.sum);
        ends.push((client.begin, client.end));
    }
    done.span = span_of(&ends);
    Ok(done)
}

/// From the first begin to the last end; `None` if there are none.
fn span_of(spans: &[(Duration, Duration)]) -> Option<(Duration, Duration)> {
    let begin = spans.iter().map(|(begin, _)| *begin).min()?;
    let end = spans.iter().map(|(_, end)| *end).max()?;
    Some((begin, end))
}

struct Client {
    latencies: Vec<Duration>,
    begin: Duration,
    end: Duration,
    sleeps: u64,
    polled: u64,
    sum: u64,
}

fn run_client(
    connection: &mut Connection,
    waiting: &Waiting<'_>,
    start: &Barrier,
    client: u64,
    (calls, size): (u64, u64),
) -> Result<Client> {
    let event = Event::new();
    // All of the rank come here, whatever fails.
    start.wait();
    let (event, begin) = (event?, support::monotonic_time());
    let (sleeps, polled) = (connection.sleeps, connection.polled);
    let mut latencies = Vec::new();
    let (mut request, mut answer, mut sum) =
        (vec![0; size as usize], vec![0; size as usize], 0_u64);
    for call in 0..calls {
        fill(&mut request, client << 40 ^ size << 16 ^ call);
        connection.prepare(&request)?;
        latencies.push(connection.call(waiting, &event, size)?);
        connection.answer(&mut answer)?;
        compute(&mut request);
        ensure!(
            request == answer,
            "client {client}: the answer of call {} is wrong",
            connection.number()
        );
        sum = sum.wrapping_add(sum_of(&answer));
    }
    Ok(Client {
        latencies,
        begin,
        end: support::monotonic_time(),
        sleeps: connection.sleeps - sleeps,
        polled: connection.polled - polled,
        sum,
    })
}

/// The bytes of a request.
fn fill(bytes: &mut [u8], seed: u64) {
    for (at, to) in bytes.chunks_mut(8).enumerate() {
        let word = (seed ^ (at as u64) << 20).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        to.copy_from_slice(&word.rotate_left(23).to_le_bytes()[..to.len()]);
    }
}

/// The procedure: each byte depends on its place and on what was sent.
fn compute(bytes: &mut [u8]) {
    for (at, byte) in bytes.iter_mut().enumerate() {
        *byte = byte.wrapping_mul(5).wrapping_add(at as u8 ^ 0x5a);
    }
}

fn sum_of(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .zip(1_u64..)
        .fold(0, |sum, (byte, at)| sum.wrapping_add(u64::from(*byte) * at))
}

/// Gathers what the ranks have done.
fn put_together(
    group: &Group,
    hosts: &[usize],
    done: Done,
    (method, size, clients): (Method, u64, u64),
    calls: u64,
) -> Result<Cell> {
    let mut words = vec![
        done.met.as_nanos() as u64,
        done.span
            .map_or(u64::MAX, |(begin, _)| begin.as_nanos() as u64),
        done.span.map_or(0, |(_, end)| end.as_nanos() as u64),
        done.cpu.as_nanos() as u64,
        done.sleeps,
        done.polled,
        done.is_crowded.into(),
        done.most_reads,
        done.sum,
    ];
    let latencies = done.latencies.iter();
    words.extend(latencies.map(|latency| latency.as_nanos() as u64));
    let mut latencies = Vec::new();
    let (mut cpu, mut sleeps, mut most_reads, mut sum) = (0, 0, 0, 0_u64);
    let (mut polled, mut is_crowded) = (0, false);
    let mut spans = Vec::new();
    let gathered = support::gather(group, &words)?;
    for (words, host) in gathered.iter().zip(hosts) {
        let [
            _,
            begin,
            end,
            of_cpu,
            of_sleeps,
            of_polled,
            of_crowded,
            of_reads,
            of_sum,
            rest @ ..,
        ] = &words[..]
        else {
            bail!("a rank has told nothing");
        };
        // The spans of ranks need not overlap, so they are put on one time line. Hosts share no clock: its zero is, on each host, when the first rank of that host
        // had met the others.
        let of_host = gathered
            .iter()
            .zip(hosts)
            .filter(|(_, other)| *other == host);
        let met = of_host.filter_map(|(words, _)| words.first()).min();
        let zero = met.copied().unwrap_or_default();
        if begin <= end {
            let time = |nanoseconds: u64| Duration::from_nanos(nanoseconds.saturating_sub(zero));
            spans.push((time(*begin), time(*end)));
        }
        most_reads = most_reads.max(*of_reads);
        polled += of_polled;
        is_crowded |= *of_crowded != 0;
        (cpu, sleeps, sum) = (cpu + of_cpu, sleeps + of_sleeps, sum.wrapping_add(*of_sum));
        latencies.extend_from_slice(rest);
    }
    let elapsed = span_of(&spans).map_or(Duration::ZERO, |(begin, end)| end - begin);
    latencies.sort_unstable();
    let at = |part: f64| {
        latencies
            .get((latencies.len() as f64 * part) as usize)
            .copied()
            .unwrap_or_default()
    };
    Ok(Cell {
        method,
        size,
        clients,
        median: Duration::from_nanos(at(0.5)),
        p99: Duration::from_nanos(at(0.99)),
        calls_per_s: calls as f64 / elapsed.as_secs_f64().max(1e-9),
        cpu: Duration::from_nanos(cpu / calls),
        sleeps: sleeps as f64 / calls as f64,
        polled: polled as f64 / calls as f64,
        is_crowded,
        most_reads,
        sum,
    })
}

/// The order of two methods changes between two sizes, or two numbers of clients.
struct Crossing {
    metric: &'static str,
    /// "bytes" or "clients", and the value of the other one.
    over: &'static str,
    fixed: u64,
    /// The better one before, and the one after.
    before: Method,
    after: Method,
    from: u64,
    to: u64,
}

impl Crossing {
    fn json(&self) -> Value {
        json!({
            "metric": self.metric, "over": self.over, "fixed": self.fixed, "before": self.before.name(),
            "after": self.after.name(), "from": self.from, "to": self.to,
        })
    }
}

/// A metric and whether less is better.
type Metric = (&'static str, bool, fn(&Cell) -> f64);

const METRICS: [Metric; 3] = [
    ("latency", true, |cell| cell.median.as_secs_f64()),
    ("throughput", false, |cell| cell.calls_per_s),
    ("cpu", true, |cell| cell.cpu.as_secs_f64()),
];

/// What changes along an axis, and what stays.
type Axis = (&'static str, fn(&Cell) -> u64, fn(&Cell) -> u64);

const AXES: [Axis; 2] = [
    ("bytes", |cell| cell.size, |cell| cell.clients),
    ("clients", |cell| cell.clients, |cell| cell.size),
];

/// All changes of order in what was measured. Values that differ by less than the margin have no order.
fn crossings(cells: &[Cell], methods: &[Method], margin: f64) -> Vec<Crossing> {
    let mut found = Vec::new();
    for (metric, less_is_better, value) in METRICS {
        for (over, moving, staying) in AXES {
            for fixed in cells.iter().map(staying).collect::<BTreeSet<u64>>() {
                for (index, first) in methods.iter().enumerate() {
                    for second in &methods[index + 1..] {
                        let of = |method: Method| {
                            cells
                                .iter()
                                .filter(move |cell| cell.method == method && staying(cell) == fixed)
                        };
                        let mut points: Vec<(u64, f64, f64)> = of(*first)
                            .filter_map(|cell| {
                                let other =
                                    of(*second).find(|other| moving(other) == moving(cell))?;
                                Some((moving(cell), value(cell), value(other)))
                            })
                            .collect();
                        points.sort_by_key(|point| point.0);
                        let mut last: Option<(u64, bool)> = None;
                        for (at, a, b) in points {
                            if a.max(b) < a.min(b) * (1.0 + margin) {
                                continue;
                            }
                            let first_is_better = (a < b) == less_is_better;
                            if let Some((from, was)) =
                                last.filter(|(_, was)| *was != first_is_better)
                            {
                                let (before, after) = if was {
                                    (*first, *second)
                                } else {
                                    (*second, *first)
                                };
                                found.push(Crossing {
                                    metric,
                                    over,
                                    fixed,
                                    before,
                                    after,
                                    from,
                                    to: at,
                                });
                            }
                            last = Some((at, first_is_better));
                        }
                    }
                }
            }
        }
    }
    found
}

fn report(options: &Options, cells: &[Cell]) -> Result<()> {
    let found = crossings(cells, &options.methods, options.margin as f64 / 100.0);
    println!(
        "\nThe order of two methods changes {} times, where they differ by {} % or more on both sides:",
        found.len(),
        options.margin
    );
    for crossing in &found {
        let Crossing {
            metric,
            over,
            fixed,
            before,
            after,
            from,
            to,
        } = crossing;
        let fixed = match *over {
            "bytes" => format!("{fixed} clients"),
            _ => format!("{fixed} bytes"),
        };
        println!(
            "{metric}, {fixed}: {} is better at {from} {over}, {} at {to}",
            before.name(),
            after.name()
        );
    }
    if let Some(file) = &options.out {
        let cells: Vec<Value> = cells.iter().map(Cell::json).collect();
        let found: Vec<Value> = found.iter().map(Crossing::json).collect();
        std::fs::write(
            file,
            json!({ "cells": cells, "crossings": found }).to_string(),
        )?;
    }
    if let Some(file) = &options.answers {
        let line = |cell: &Cell| {
            let name = cell.method.name();
            format!("{} {} {name} {:016x}\n", cell.clients, cell.size, cell.sum)
        };
        std::fs::write(file, cells.iter().map(line).collect::<String>())?;
    }
    let Some(file) = &options.svg else {
        return Ok(());
    };
    let (clients, size) = (options.clients[0], options.sizes[0]);
    let draw = |file: &std::path::Path,
                title: &str,
                (x, y),
                point: &dyn Fn(&Cell) -> Option<(f64, f64)>| {
        let line = |method: &Method| Line {
            name: method.name(),
            points: cells
                .iter()
                .filter(|cell| cell.method == *method)
                .filter_map(point)
                .collect(),
        };
        let lines = options.methods.iter().map(line).collect();
        Plot { title, x, y, lines }.write(file)
    };
    draw(
        file,
        &format!("Calls of {clients} client(s)"),
        ("bytes", "median us"),
        &|cell| {
            (cell.clients == clients).then_some((cell.size as f64, cell.median.as_secs_f64() * 1e6))
        },
    )?;
    let next_to_it = file.with_extension("clients.svg");
    draw(
        &next_to_it,
        &format!("Calls with {size} bytes"),
        ("clients", "calls per second"),
        &|cell| (cell.size == size).then_some((cell.clients as f64, cell.calls_per_s)),
    )?;
    let most = options.clients.last().copied().unwrap_or(clients);
    draw(
        &file.with_extension("cpu.svg"),
        &format!("Processor time of a call, {most} client(s)"),
        ("bytes", "CPU us"),
        &|cell| (cell.clients == most).then_some((cell.size as f64, cell.cpu.as_secs_f64() * 1e6)),
    )
}
