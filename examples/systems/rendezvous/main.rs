//! A keyed rendezvous of tensors, as TensorFlow's Rendezvous with its `gdr` transport: a tensor is sent under a key (producer;incarnation;consumer;name;step), and goes to whoever asks for that key,
//! before or after. Tensors are in one registered region. The consumer reads a tensor by RDMA READ from where the producer has computed it to where the consumer uses it.
//!
//!     cargo run --release --example rendezvous
//!
//! The workload is that of a parameter server: rank 0 sends weights, the other ranks send gradients. The same training runs once more with each tensor read into a buffer of the transport and copied from there, and
//! once more with each tensor encoded into a message and decoded on the other side: 0, 1 and 2 copies. All are compared. Before that, a few tensors check what a key, an order of calls and an abort mean.

mod exchange;
mod meaning;
mod note;
mod over;
#[path = "../support/mod.rs"]
mod support;
mod tensor;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::rc::Rc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::Parser;
use doorbell::Group;

use exchange::{Counts, ReadPlaces, Rendezvous};
use meaning::{ELEMENTS, check_meaning};
use note::Method;
use support::Recorder;
use tensor::{Allocator, Tensor};

/// The longest wait for another rank.
const DEADLINE: Duration = Duration::from_secs(30);
const SERVER: u32 = 0;
/// With one copy more at each step.
const METHODS: [Method; 3] = [Method::Read, Method::ReadAndCopy, Method::Message];

#[derive(Parser)]
struct Options {
    /// Ranks that the program starts
    #[arg(long, default_value_t = 3)]
    ranks: u32,
    /// Tensors of weights, at most 16
    #[arg(long, default_value_t = 6)]
    tensors: usize,
    /// Elements of the first tensor; each further one has a third less
    #[arg(long, default_value_t = 400_000)]
    elements: usize,
    #[arg(long, default_value_t = 40)]
    steps: u64,
    /// Receives that two ranks begin from each other before either sends; 600 are more than a peer has slots for, and a third of them more than an endpoint has places for
    #[arg(long, default_value_t = 600)]
    receives: u32,
    /// Worker that is killed in the middle of the training
    #[arg(long)]
    kill: Option<u32>,
    /// File for the weights at the end, as 32-bit floats
    #[arg(long)]
    out: Option<PathBuf>,
    /// File for a timeline
    #[arg(long)]
    svg: Option<PathBuf>,
}

impl Options {
    fn lengths(&self) -> Vec<usize> {
        let shorter = |len: &usize| Some((len * 2 / 3).max(1));
        std::iter::successors(Some(self.elements.max(1)), shorter)
            .take(self.tensors)
            .collect()
    }
}

fn main() -> Result<()> {
    let options = Options::parse();
    ensure!(
        (1..=16).contains(&options.tensors),
        "--tensors must be 1 to 16: the reads of a step have to fit into a send queue"
    );
    let ranks = support::size(options.ranks);
    ensure!(
        (2..=33).contains(&ranks),
        "there must be 2 to 33 ranks, not {ranks}"
    );
    if let Some(victim) = options.kill {
        ensure!(
            (1..ranks).contains(&victim),
            "--kill takes a worker: rank 0 hosts the store of the group"
        );
    }
    support::run_with_victim(options.ranks, options.kill, |group| rank(&options, group))
}

/// What the training of one method cost this rank.
#[derive(Default)]
struct Cost {
    /// Of each step.
    seconds: Vec<f64>,
    application: Duration,
    process: Duration,
    counts: Counts,
    places: TensorPlaces,
    reads: Vec<ReadPlaces>,
}

/// Where the application had its tensors, by its own pointers: the address and the bytes of each that it has computed and sent, and of each that it was given.
#[derive(Default)]
struct TensorPlaces {
    sent: Vec<[u64; 2]>,
    received: Vec<[u64; 2]>,
}

fn place_of(tensor: &Tensor) -> Result<[u64; 2]> {
    let values = tensor.values()?;
    Ok([values.as_ptr().addr() as u64, size_of_val(values) as u64])
}

/// What worker `rank` pulls an element of the weights to.
fn target(rank: u32, tensor: usize, element: usize) -> f32 {
    ((rank as usize * 31 + tensor * 7 + element) % 1000) as f32 / 100.0
}

/// Steepest descent with rate 1/4 to the mean of the workers' targets. Returns the weights at the server. Step numbers begin with `first`.
fn train(
    options: &Options,
    rendezvous: &mut Rendezvous<'_>,
    method: Method,
    first: u64,
) -> Result<(Cost, Vec<f32>)> {
    rendezvous.group.barrier()?;
    rendezvous.counts.set(Counts::default());
    rendezvous.reads.clear();
    let mut places = TensorPlaces::default();
    let (thread, process) = (support::thread_time()?, support::process_time()?);
    let (seconds, weights) = match rendezvous.group.rank() {
        SERVER => serve(options, rendezvous, &mut places, (method, first))?,
        _ => work(options, rendezvous, &mut places, (method, first))?,
    };
    rendezvous.drain("the end of the training")?;
    let cost = Cost {
        seconds,
        application: support::thread_time()? - thread,
        process: support::process_time()? - process,
        counts: rendezvous.counts.get(),
        places,
        reads: std::mem::take(&mut rendezvous.reads),
    };
    Ok((cost, weights))
}

/// The server: sends the weights to all workers, and changes them by the workers' gradients.
fn serve(
    options: &Options,
    rendezvous: &mut Rendezvous<'_>,
    places: &mut TensorPlaces,
    (method, first): (Method, u64),
) -> Result<(Vec<f64>, Vec<f32>)> {
    let memory = Rc::clone(&rendezvous.memory);
    let workers = rendezvous.group.size() - 1;
    let mut weights = Vec::new();
    for len in options.lengths() {
        let mut tensor = memory.tensor(len)?;
        tensor.values_mut()?.fill(0.0);
        weights.push(Rc::new(tensor));
    }
    let mut seconds = Vec::new();
    for step in first..first + options.steps {
        let begin = Instant::now();
        for worker in 1..=workers {
            for (number, tensor) in weights.iter().enumerate() {
                let key = rendezvous.key(SERVER, worker, &format!("weights/{number}"), step)?;
                rendezvous.send(&key, tensor)?;
                places.sent.push(place_of(tensor)?);
            }
        }
        let mut ids = Vec::new();
        for number in 0..weights.len() {
            for worker in 1..=workers {
                let key = rendezvous.key(worker, SERVER, &format!("gradient/{number}"), step)?;
                ids.push(rendezvous.start_recv(&key, method)?);
            }
        }
        let mut ids = ids.into_iter();
        for old in &mut weights {
            // Workers may still read the old weights.
            let mut new = memory.tensor(old.len)?;
            let values = new.values_mut()?;
            values.fill(0.0);
            for id in ids.by_ref().take(workers as usize) {
                let gradient = rendezvous.wait(id)?;
                places.received.push(place_of(&gradient)?);
                for (sum, value) in values.iter_mut().zip(gradient.values()?) {
                    *sum += value;
                }
            }
            for (value, old) in values.iter_mut().zip(old.values()?) {
                *value = old - 0.25 * *value / workers as f32;
            }
            *old = Rc::new(new);
        }
        rendezvous.finish_step(step)?;
        seconds.push(begin.elapsed().as_secs_f64());
    }
    let mut all = Vec::new();
    for tensor in &weights {
        all.extend_from_slice(tensor.values()?);
    }
    Ok((seconds, all))
}

/// A worker: receives the weights, and sends what they differ by from its targets.
fn work(
    options: &Options,
    rendezvous: &mut Rendezvous<'_>,
    places: &mut TensorPlaces,
    (method, first): (Method, u64),
) -> Result<(Vec<f64>, Vec<f32>)> {
    let memory = Rc::clone(&rendezvous.memory);
    let rank = rendezvous.group.rank();
    let ask = |rendezvous: &mut Rendezvous<'_>, step: u64| -> Result<Vec<u64>> {
        (0..options.tensors)
            .map(|number| {
                let key = rendezvous.key(SERVER, rank, &format!("weights/{number}"), step)?;
                rendezvous.start_recv(&key, method)
            })
            .collect()
    };
    let end = first + options.steps;
    let mut ids = ask(rendezvous, first)?;
    for step in first..end {
        if options.kill == Some(rank) && step == first + options.steps / 2 {
            support::kill_myself();
        }
        for (number, id) in std::mem::take(&mut ids).into_iter().enumerate() {
            let weights = rendezvous.wait(id)?;
            places.received.push(place_of(&weights)?);
            let mut gradient = memory.tensor(weights.len)?;
            let pairs = gradient.values_mut()?.iter_mut().zip(weights.values()?);
            for (element, (slope, weight)) in pairs.enumerate() {
                *slope = weight - target(rank, number, element);
            }
            let key = rendezvous.key(rank, SERVER, &format!("gradient/{number}"), step)?;
            let gradient = Rc::new(gradient);
            places.sent.push(place_of(&gradient)?);
            rendezvous.send(&key, &gradient)?;
        }
        // The server had all gradients of the step before when it sent these weights.
        rendezvous.finish_step(step.wrapping_sub(1))?;
        if step + 1 < end {
            ids = ask(rendezvous, step + 1)?;
        }
    }
    // The gradients of the last step have not been asked for yet.
    rendezvous.until("ask for the last gradients", |r| r.is_taken(end - 1))?;
    rendezvous.finish_step(end - 1)?;
    Ok((Vec::new(), Vec::new()))
}

/// How many READs went from memory where the producer's application had computed a tensor to memory where the consumer's application was given one. Each tensor counts once. No
/// processor has copied these tensors: what the application sent and got is what the device has read and written.
fn count_in_place(group: &Group, cost: &Cost) -> Result<u64> {
    let TensorPlaces { sent, received } = &cost.places;
    let mut own = vec![sent.len() as u64, received.len() as u64];
    own.extend(sent.iter().chain(received).flatten());
    for read in &cost.reads {
        own.extend([read.producer.into(), read.from, read.to, read.len_bytes]);
    }
    let all = support::gather(group, &own)?;
    // Of each rank: how often each place was sent, and received; and what its READs were told.
    let mut places = Vec::new();
    for words in &all {
        let [sent, received, words @ ..] = &words[..] else {
            bail!("a rank has told nothing");
        };
        let mut rest = words;
        let count = |places: &[u64]| {
            let mut counts = BTreeMap::<[u64; 2], u64>::new();
            for place in places.as_chunks::<2>().0 {
                *counts.entry(*place).or_default() += 1;
            }
            counts
        };
        let mut take = |many: u64| {
            let (taken, others) = rest.split_at_checked(2 * many as usize)?;
            rest = others;
            Some(count(taken))
        };
        let (sent, received) = (take(*sent), take(*received));
        let parts = sent.zip(received).context("a list that is too short")?;
        places.push((parts, rest));
    }
    let reads: Vec<(usize, [u64; 4])> = (places.iter().enumerate())
        .flat_map(|(rank, (_, reads))| reads.as_chunks().0.iter().map(move |read| (rank, *read)))
        .collect();
    let mut in_place = 0;
    let is_one = |counts: &BTreeMap<_, u64>, place| counts.get(&place).is_some_and(|n| *n > 0);
    for (consumer, [producer, from, to, len_bytes]) in reads {
        let (source, destination) = ([from, len_bytes], [to, len_bytes]);
        let producer = producer as usize;
        if is_one(&places[producer].0.0, source) && is_one(&places[consumer].0.1, destination) {
            *places[producer].0.0.entry(source).or_default() -= 1;
            *places[consumer].0.1.entry(destination).or_default() -= 1;
            in_place += 1;
        }
    }
    Ok(in_place)
}

fn report(options: &Options, group: &Group, costs: &[Cost]) -> Result<()> {
    let mut own = Vec::new();
    for cost in costs {
        let counts = &cost.counts;
        own.extend([
            cost.application.as_nanos() as u64,
            cost.process.as_nanos() as u64,
            counts.received,
            counts.copies,
            counts.copied_bytes,
            counts.asked_before,
            counts.asked_after,
        ]);
    }
    let in_place = costs.iter().map(|cost| count_in_place(group, cost));
    let in_place = in_place.collect::<Result<Vec<u64>>>()?;
    let mut sums = vec![0; own.len()];
    for list in support::gather(group, &own)? {
        for (sum, word) in sums.iter_mut().zip(list) {
            *sum += word;
        }
    }
    if group.rank() != SERVER {
        return Ok(());
    }
    println!(
        "{} steps with {} tensors of {:?} floats, {} workers",
        options.steps,
        options.tensors,
        options.lengths(),
        group.size() - 1
    );
    println!(
        "{:<9} {:>14} {:>20} {:>12} {:>9} {:>7} {:>11} {:>13} {:>12} {:>9}",
        "",
        "ms of a step",
        "CPU of threads, ms",
        "all CPU, ms",
        "received",
        "copies",
        "MiB copied",
        "asked before",
        "asked after",
        "in place"
    );
    for (((cost, sums), method), in_place) in costs
        .iter()
        .zip(sums.as_chunks::<7>().0)
        .zip(METHODS)
        .zip(in_place)
    {
        let mut seconds = cost.seconds.clone();
        seconds.sort_by(f64::total_cmp);
        let [application, process, received, copies, bytes, before, after] = *sums;
        println!(
            "{:<9} {:>14.2} {:>20.1} {:>12.1} {received:>9} {copies:>7} {:>11.1} {before:>13} {after:>12} {in_place:>9}",
            method.name(),
            seconds.get(seconds.len() / 2).copied().unwrap_or_default() * 1e3,
            application as f64 / 1e6,
            process as f64 / 1e6,
            bytes as f64 / f64::from(1 << 20)
        );
    }
    Ok(())
}

fn rank(options: &Options, group: Group) -> Result<()> {
    let recorder = Recorder::new(group.rank());
    let lengths = options.lengths();
    let (longest, all) = (lengths[0], lengths.iter().sum::<usize>() as u64);
    // Weights of two steps, gradients of all workers, and as much again in messages.
    let workers = u64::from(group.size()) - 1;
    let need = 4 * all * (4 + 3 * workers) + 4 * longest as u64 + (4 << 20);
    let memory = Allocator::new(&group, need)?;
    // What is being read at the same time: the gradients of all workers.
    let transit = Allocator::new(&group, 4 * all * workers + (1 << 20))?;
    let longest = longest.max(ELEMENTS);
    let mut rendezvous = Rendezvous::new(&group, Rc::clone(&memory), transit, longest)?;
    check_meaning(&mut rendezvous, options.receives)?;
    let mut costs = Vec::new();
    let mut results = Vec::new();
    for (method, first) in METHODS.into_iter().zip([1000, 1_000_000, 2_000_000]) {
        let begin = Recorder::now_ms();
        let trained = train(options, &mut rendezvous, method, first);
        let (cost, weights) = match trained {
            Err(failure) if options.kill.is_some() && group.check().is_err() => {
                println!("rank {}: {failure:#}", group.rank());
                return Ok(());
            }
            trained => trained?,
        };
        recorder.add(method.name(), begin);
        costs.push(cost);
        results.push(weights);
    }
    // Those of the checks, and of the training by each method.
    let entries = rendezvous.over.entries();
    ensure!(
        entries <= 4,
        "steps that are over take {entries} entries, and not one for steps that follow each other"
    );
    ensure!(
        results.iter().all(|weights| *weights == results[0]),
        "the methods have other weights"
    );
    report(options, &group, &costs)?;
    if let (SERVER, Some(file)) = (group.rank(), &options.out) {
        let bytes: Vec<u8> = results[0].iter().flat_map(|w| w.to_le_bytes()).collect();
        std::fs::write(file, bytes).with_context(|| file.display().to_string())?;
    }
    recorder.write("Keyed rendezvous", options.svg.as_deref(), &group)?;
    drop(rendezvous);
    group.barrier()?;
    group.leave()?;
    Ok(())
}
