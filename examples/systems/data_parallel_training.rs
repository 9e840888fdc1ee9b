//! Data-parallel training of a network on handwritten digits, as `DistributedDataParallel` of PyTorch does it: each rank has a copy of the network and computes the gradient of its
//! share of a batch. While the gradient of one layer is reduced, the gradient of the layer below is computed.
//!
//! ```sh
//! cargo run --release --example data_parallel_training -- --svg timeline.svg
//! ```
//!
//! Closures on a host stream stand for kernels. Three methods train the same network one after the other:
//!
//! - `all-reduce`: a ring all-reduce for each layer, queued behind the backward kernel of that layer. The CPU queues whole steps ahead.
//! - `parameter-server`: rank 0 receives the gradients of a layer from all ranks, changes the weights and sends them back. It is queued in the same way.
//! - `synchronous`: the operations of `all-reduce`, but the CPU waits after each of them.
#[path = "support/mod.rs"]
mod support;

use std::fmt::Write as _;
use std::io::Write as _;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::{Parser, ValueEnum};
use doorbell::{
    Access, Algorithm, Collective, Communicator, DataType, EndpointConfig, Event, Executor, Group,
    HostStream, MessageConfig, ReduceOp, Reduction, Region,
};

use support::digits::{self, CLASSES, Digit, Digits, PIXELS, Random};
use support::recorder::{between, busy_ms, overlap_ms, overlapping};
use support::{Bar, Recorder};

/// The longest wait for a peer.
const DEADLINE: Option<Duration> = Some(Duration::from_secs(30));
/// The rank that has the weights, with `parameter-server`.
const SERVER: u32 = 0;
/// Rows of the timeline.
const COMPUTE: usize = 0;
const NETWORK: usize = 1;
const APPLICATION: usize = 2;
const ROWS: [&str; 3] = ["kernels", "network", "CPU"];
/// What a row shows while the CPU calls the library.
const QUEUES: &str = "CPU queues";

#[derive(Parser)]
struct Options {
    /// The images, which `scripts/digits` fetches if the file is not there
    #[arg(long, default_value = "target/digits.csv")]
    data: PathBuf,
    /// How gradients are summed; without it all methods run, one after the other
    #[arg(long, value_enum)]
    method: Vec<Method>,
    /// Neurons of the hidden layers
    #[arg(long, value_delimiter = ',', default_values_t = [128, 64])]
    hidden: Vec<usize>,
    /// How often all training images are used
    #[arg(long, default_value_t = 6)]
    epochs: usize,
    /// Images of a step, of all ranks together
    #[arg(long, default_value_t = 64)]
    batch: usize,
    /// Learning rate
    #[arg(long, default_value_t = 0.5)]
    rate: f32,
    /// The least time of a kernel in microseconds; one that is done earlier sleeps, as the CPU is idle while a GPU computes
    #[arg(long, default_value_t = 2000)]
    kernel_us: u64,
    /// Steps that the CPU queues ahead
    #[arg(long, default_value_t = 3)]
    ahead: usize,
    /// Ranks, unless a launcher says how many there are
    #[arg(long, default_value_t = 4)]
    ranks: u32,
    /// Writes the losses and the final weights of each method to this file
    #[arg(long)]
    out: Option<PathBuf>,
    /// Draws some steps of each method as a timeline
    #[arg(long)]
    svg: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Method {
    AllReduce,
    ParameterServer,
    Synchronous,
}

impl Method {
    fn name(self) -> String {
        self.to_possible_value()
            .map_or_else(String::new, |value| value.get_name().to_owned())
    }
}

fn main() -> Result<()> {
    let options = Options::parse();
    // Once, before there are ranks.
    digits::fetch(&options.data)?;
    support::run(options.ranks, |group| rank(group, &options))
}

fn rank(group: Group, options: &Options) -> Result<()> {
    let size = group.size() as usize;
    ensure!(size > 1, "a single rank has nobody to sum gradients with");
    ensure!(
        options.batch > 0 && options.batch.is_multiple_of(size),
        "a batch of {} images cannot be divided by {size} ranks",
        options.batch
    );
    ensure!(options.ahead > 0, "at least one step must be queued");
    let digits = Arc::new(Digits::read(&options.data)?);
    ensure!(
        options.batch <= digits.training.len(),
        "there are only {} images",
        digits.training.len()
    );
    let methods = match options.method.as_slice() {
        [] => Method::value_variants(),
        chosen => chosen,
    };
    let steps_ahead = options.ahead as u32 + 1;
    let config = MessageConfig::default()
        // A step has at most 2 (n - 1) messages to a peer for each layer.
        .ahead((steps_ahead * 2 * group.size() * (options.hidden.len() as u32 + 1)).clamp(64, 1024))
        .endpoint(
            EndpointConfig::default()
                .wait_timeout(DEADLINE)
                .room_timeout(DEADLINE),
        );
    let mut comm = group.communicator(None, 1, &config)?;
    let mut reports = Vec::new();
    for method in methods {
        let trained = train(&group, &mut comm, options, &digits, *method);
        reports.push(
            trained.map_err(|error| match error.downcast::<doorbell::Error>() {
                // The queue only reports that it failed; the group has the cause.
                Ok(error) => group.cause_of(error).into(),
                Err(other) => other,
            })?,
        );
    }
    comm.finish(DEADLINE)?;
    group.barrier()?;
    if group.rank() == 0 {
        print(options, &reports, size)?;
    }
    group.leave()?;
    Ok(())
}

/// A layer of neurons on one rank. Weights and gradients have a row for each input and one for the biases.
struct Layer {
    inputs: usize,
    outputs: usize,
    weights: Vec<f32>,
    /// What the forward kernel has computed from.
    seen: Vec<f32>,
}

impl Layer {
    /// Adds up the products of each image of a batch with the weights.
    fn forward(&mut self, batch: Vec<f32>, is_last: bool) -> Vec<f32> {
        let (rows, biases) = self.weights.split_at(self.inputs * self.outputs);
        let mut results = Vec::with_capacity(batch.len() / self.inputs * self.outputs);
        for image in batch.chunks(self.inputs) {
            let mut sums = biases.to_vec();
            for (value, row) in image.iter().zip(rows.chunks(self.outputs)) {
                for (sum, weight) in sums.iter_mut().zip(row) {
                    *sum += value * weight;
                }
            }
            if !is_last {
                sums.iter_mut().for_each(|sum| *sum = sum.max(0.0));
            }
            results.extend(sums);
        }
        self.seen = batch;
        results
    }

    /// From the derivatives of the loss by the outputs: those by the weights and those by the inputs.
    fn backward(&self, deltas: &[f32], is_first: bool) -> (Vec<f32>, Vec<f32>) {
        let mut gradient = vec![0.0; self.weights.len()];
        let (rows, biases) = gradient.split_at_mut(self.inputs * self.outputs);
        let mut below = Vec::new();
        for (image, delta) in self
            .seen
            .chunks(self.inputs)
            .zip(deltas.chunks(self.outputs))
        {
            for (value, row) in image.iter().zip(rows.chunks_mut(self.outputs)) {
                for (sum, delta) in row.iter_mut().zip(delta) {
                    *sum += value * delta;
                }
            }
            for (sum, delta) in biases.iter_mut().zip(delta) {
                *sum += delta;
            }
            if is_first {
                continue;
            }
            for (value, row) in image.iter().zip(self.weights.chunks(self.outputs)) {
                let sum = row
                    .iter()
                    .zip(delta)
                    .fold(0.0, |sum, (weight, delta)| sum + weight * delta);
                // An input is the output of a rectifier below.
                below.push(if *value > 0.0 { sum } else { 0.0 });
            }
        }
        (gradient, below)
    }
}

/// The loss of a batch, summed over its images, and its derivatives by the outputs of the last layer.
fn loss(outputs: &[f32], labels: &[u8]) -> (f32, Vec<f32>) {
    let (mut loss, mut deltas) = (0.0, Vec::with_capacity(outputs.len()));
    for (outputs, label) in outputs.chunks(CLASSES).zip(labels) {
        let largest = outputs.iter().copied().fold(f32::MIN, f32::max);
        let powers: Vec<f32> = outputs
            .iter()
            .map(|output| (output - largest).exp())
            .collect();
        let sum: f32 = powers.iter().sum();
        loss += sum.ln() - (outputs[usize::from(*label)] - largest);
        let of_class =
            |(class, power): (usize, &f32)| power / sum - f32::from(class == usize::from(*label));
        deltas.extend(powers.iter().enumerate().map(of_class));
    }
    (loss, deltas)
}

/// The network of one rank, which the kernels of both streams share. Events order the kernels, so the locks only show that to the compiler.
struct Replica {
    digits: Arc<Digits>,
    layers: Vec<Mutex<Layer>>,
    /// What the last kernel of the compute stream has computed, for the next one: outputs of a layer, or derivatives.
    passed: Mutex<Vec<f32>>,
    labels: Mutex<Vec<u8>>,
    /// Of each step, the mean of the whole batch.
    losses: Mutex<Vec<f32>>,
    /// The gradient of each layer. Behind that of the last one the loss.
    gradients: Vec<Region>,
    /// The weights of each layer, of the parameter server.
    weights: Vec<Region>,
    recorder: Recorder,
    kernel_time: Duration,
    /// Images of a step.
    batch: usize,
    rate: f32,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Replica {
    fn new(group: &Group, options: &Options, digits: &Arc<Digits>) -> Result<Replica> {
        let mut widths = vec![PIXELS];
        widths.extend(&options.hidden);
        widths.push(CLASSES);
        // The same on every rank.
        let mut random = Random(1);
        let (mut layers, mut gradients, mut weights) = (Vec::new(), Vec::new(), Vec::new());
        for pair in widths.windows(2) {
            let (inputs, outputs) = (pair[0], pair[1]);
            let scale = (3.0 / inputs as f32).sqrt();
            let mut of_layer: Vec<f32> = (0..inputs * outputs)
                .map(|_| random.weight() * scale)
                .collect();
            of_layer.resize((inputs + 1) * outputs, 0.0);
            let bytes = 4 * of_layer.len() as u64;
            gradients.push(Region::alloc(group.domain(), bytes + 4, Access::ALL)?);
            weights.push(Region::alloc(group.domain(), bytes, Access::ALL)?);
            layers.push(Mutex::new(Layer {
                inputs,
                outputs,
                weights: of_layer,
                seen: Vec::new(),
            }));
        }
        Ok(Replica {
            digits: Arc::clone(digits),
            layers,
            passed: Mutex::default(),
            labels: Mutex::default(),
            losses: Mutex::default(),
            gradients,
            weights,
            recorder: Recorder::new(0),
            kernel_time: Duration::from_micros(options.kernel_us),
            batch: options.batch,
            rate: options.rate,
        })
    }

    fn is_last(&self, layer: usize) -> bool {
        layer + 1 == self.layers.len()
    }

    /// Numbers that are reduced of a layer.
    fn reduced(&self, layer: usize) -> usize {
        lock(&self.layers[layer]).weights.len() + usize::from(self.is_last(layer))
    }

    /// Runs a kernel of the compute stream.
    fn kernel<T>(&self, kind: &str, work: impl FnOnce() -> T) -> T {
        self.recorder.time_in(COMPUTE, kind, || {
            let begin = Instant::now();
            let result = work();
            std::thread::sleep(self.kernel_time.saturating_sub(begin.elapsed()));
            result
        })
    }

    fn load(&self, images: &[usize]) {
        let images = images.iter().map(|image| &self.digits.training[*image]);
        *lock(&self.labels) = images.clone().map(|image| image.label).collect();
        *lock(&self.passed) = images.flat_map(|image| image.pixels).collect();
    }

    fn forward(&self, layer: usize) {
        let mut passed = lock(&self.passed);
        let batch = std::mem::take(&mut *passed);
        *passed = lock(&self.layers[layer]).forward(batch, self.is_last(layer));
    }

    fn backward(&self, layer: usize) -> doorbell::Result<()> {
        let mut passed = lock(&self.passed);
        let mut sum = None;
        if self.is_last(layer) {
            let (of_batch, deltas) = loss(&passed, &lock(&self.labels));
            (sum, *passed) = (Some(of_batch), deltas);
        }
        let (mut gradient, below) = lock(&self.layers[layer]).backward(&passed, layer == 0);
        *passed = below;
        gradient.extend(sum);
        self.gradients[layer].write_values(0, &gradient)
    }

    /// Changes the weights by the gradient of the whole batch.
    fn update(&self, layer: usize, gradient: &[f32]) {
        let step = self.rate / self.batch as f32;
        for (weight, derivative) in lock(&self.layers[layer]).weights.iter_mut().zip(gradient) {
            *weight -= step * derivative;
        }
        if self.is_last(layer) {
            let sum = gradient[gradient.len() - 1];
            lock(&self.losses).push(sum / self.batch as f32);
        }
    }

    fn reduced_gradient(&self, layer: usize) -> doorbell::Result<Vec<f32>> {
        let mut gradient = vec![0.0; self.reduced(layer)];
        self.gradients[layer].read_values(0, &mut gradient)?;
        Ok(gradient)
    }

    /// On the parameter server: adds the gradients of the others to its own in the order of the ranks, and changes the weights that it sends to all.
    fn serve(&self, layer: usize, received: &Region) -> doorbell::Result<()> {
        let mut sum = self.reduced_gradient(layer)?;
        let mut other = vec![0.0; sum.len()];
        let bytes = 4 * sum.len() as u64;
        for at in (0..received.len_bytes()).step_by(bytes as usize) {
            received.read_values(at, &mut other)?;
            for (sum, other) in sum.iter_mut().zip(&other) {
                *sum += other;
            }
        }
        self.update(layer, &sum);
        self.weights[layer].write_values(0, &lock(&self.layers[layer]).weights)
    }

    /// The number of images that the network recognizes.
    fn recognized(&self, images: &[Digit]) -> usize {
        let is_right = |image: &&Digit| {
            let mut passed = image.pixels.to_vec();
            for layer in 0..self.layers.len() {
                passed = lock(&self.layers[layer]).forward(passed, self.is_last(layer));
            }
            let answer = (0..CLASSES).max_by(|a, b| passed[*a].total_cmp(&passed[*b]));
            answer == Some(usize::from(image.label))
        };
        images.iter().filter(is_right).count()
    }

    fn all_weights(&self) -> Vec<f32> {
        self.layers
            .iter()
            .flat_map(|layer| lock(layer).weights.clone())
            .collect()
    }
}

/// What is queued behind the backward kernel of a layer.
enum Exchange {
    AllReduce(Collective),
    /// The gradients go to the server, and the weights come back. The server has memory for the gradients of the others.
    Server {
        push: Collective,
        pull: Collective,
        received: Option<Region>,
    },
}

impl Exchange {
    fn new(
        comm: &Communicator,
        replica: &Replica,
        layer: usize,
        method: Method,
    ) -> Result<Exchange> {
        let (gradient, weights) = (&replica.gradients[layer], &replica.weights[layer]);
        let bytes = 4 * replica.reduced(layer) as u64;
        let whole = gradient.slice(0, bytes)?;
        if method != Method::ParameterServer {
            let sum = Reduction::new(DataType::F32, ReduceOp::Sum);
            return Ok(Exchange::AllReduce(comm.all_reduce(
                &whole,
                &whole,
                sum,
                Some(Algorithm::Ring),
            )?));
        }
        let weights = weights.slice(0, weights.len_bytes())?;
        if comm.rank() != SERVER {
            let push = comm.exchange(&[(SERVER, whole)], &[])?;
            let pull = comm.exchange(&[], &[(SERVER, weights)])?;
            return Ok(Exchange::Server {
                push,
                pull,
                received: None,
            });
        }
        let workers = 1..comm.size();
        let received = Region::alloc(comm.domain(), bytes * workers.len() as u64, Access::ALL)?;
        let places: doorbell::Result<Vec<_>> = (workers.clone().zip(0..))
            .map(|(worker, place)| Ok((worker, received.slice(place * bytes, bytes)?)))
            .collect();
        let push = comm.exchange(&[], &places?)?;
        let pull = comm.exchange(
            &workers.map(|worker| (worker, weights)).collect::<Vec<_>>(),
            &[],
        )?;
        Ok(Exchange::Server {
            push,
            pull,
            received: Some(received),
        })
    }
}

/// A training under way.
struct Training<'a> {
    comm: &'a mut Communicator,
    replica: Arc<Replica>,
    exchanges: Vec<Exchange>,
    compute: HostStream,
    network: HostStream,
    /// Of each layer: its gradient is there, and its weights have changed.
    ready: Vec<Event>,
    updated: Vec<Event>,
    /// With `synchronous`: what the CPU waits with.
    waits: Option<Event>,
}

impl Training<'_> {
    /// With `synchronous`, waits for what was queued last.
    fn queued(&self, stream: &HostStream) -> Result<()> {
        if let Some(event) = &self.waits {
            stream.record(event)?;
            event.synchronize(DEADLINE)?;
        }
        Ok(())
    }

    fn compute(
        &self,
        kind: &'static str,
        work: impl FnOnce(&Replica) -> doorbell::Result<()> + Send + 'static,
    ) -> Result<()> {
        let replica = Arc::clone(&self.replica);
        self.compute
            .try_launch(move || replica.kernel(kind, || work(&replica)))?;
        self.queued(&self.compute)
    }

    /// Queues a step. Nothing in it waits, but for room in the queues and with `synchronous`.
    fn step(&mut self, images: Vec<usize>) -> Result<()> {
        let layers = self.exchanges.len();
        let mut images = Some(images);
        for layer in 0..layers {
            self.compute.wait_event(&self.updated[layer])?;
            let images = images.take();
            self.compute("forward", move |replica| {
                images.iter().for_each(|images| replica.load(images));
                replica.forward(layer);
                Ok(())
            })?;
        }
        for layer in (0..layers).rev() {
            self.compute("backward", move |replica| replica.backward(layer))?;
            self.compute.record(&self.ready[layer])?;
            self.network.wait_event(&self.ready[layer])?;
            self.exchange(layer)?;
            self.network.record(&self.updated[layer])?;
        }
        Ok(())
    }

    /// Queues the exchange of the gradient of a layer, and the change of its weights.
    fn exchange(&mut self, layer: usize) -> Result<()> {
        match &self.exchanges[layer] {
            Exchange::AllReduce(reduce) => {
                let begun = self.begin()?;
                self.comm.launch(&self.network, reduce)?;
                self.end(begun, "all-reduce")?;
                self.on_network(move |replica| {
                    replica.update(layer, &replica.reduced_gradient(layer)?);
                    Ok(())
                })?;
            }
            Exchange::Server {
                push,
                pull,
                received,
            } => {
                let begun = self.begin()?;
                self.comm.launch(&self.network, push)?;
                self.end(begun, "push of gradients")?;
                if let Some(received) = received.clone() {
                    self.on_network(move |replica| replica.serve(layer, &received))?;
                }
                let begun = self.begin()?;
                self.comm.launch(&self.network, pull)?;
                self.end(begun, "pull of weights")?;
                if received.is_none() {
                    self.on_network(move |replica| {
                        let weights = &mut lock(&replica.layers[layer]).weights;
                        replica.weights[layer].read_values(0, weights)
                    })?;
                }
            }
        }
        Ok(())
    }

    fn on_network(
        &self,
        work: impl FnOnce(&Replica) -> doorbell::Result<()> + Send + 'static,
    ) -> Result<()> {
        let replica = Arc::clone(&self.replica);
        self.network.try_launch(move || work(&replica))?;
        self.queued(&self.network)
    }

    /// Notes when the network's stream comes to this place.
    fn begin(&self) -> Result<Arc<Mutex<f64>>> {
        let begun = Arc::<Mutex<f64>>::default();
        let note = Arc::clone(&begun);
        self.network
            .launch(move || *lock(&note) = Recorder::now_ms())?;
        Ok(begun)
    }

    fn end(&self, begun: Arc<Mutex<f64>>, kind: &'static str) -> Result<()> {
        self.on_network(move |replica| {
            replica.recorder.add_in(NETWORK, kind, *lock(&begun));
            Ok(())
        })
    }
}

/// What a method has done, on rank 0.
struct Report {
    method: Method,
    losses: Vec<f32>,
    weights: Vec<f32>,
    recognized: usize,
    held_out: usize,
    step: Duration,
    /// Of the application's thread, and of the whole process, for a step: means of all ranks.
    thread: Duration,
    process: Duration,
    /// Part of the time of the network's operations in which a kernel runs, too.
    overlap: f64,
    /// The network's operations, and those of them beside which a kernel ran.
    operations: (usize, usize),
    /// Steps that were queued completely before the step before had ended.
    queued_ahead: usize,
    bars: Vec<Bar>,
}

fn train(
    group: &Group,
    comm: &mut Communicator,
    options: &Options,
    digits: &Arc<Digits>,
    method: Method,
) -> Result<Report> {
    let replica = Arc::new(Replica::new(group, options, digits)?);
    let layers = 0..replica.layers.len();
    let exchanges: Result<Vec<Exchange>> = layers
        .clone()
        .map(|layer| Exchange::new(comm, &replica, layer, method))
        .collect();
    let events = || {
        layers
            .clone()
            .map(|_| Event::new().without_timing())
            .collect()
    };
    // The CPU sleeps while it waits, with every method: what it takes is calls and wake-ups, and no spinning.
    let blocking = || Event::blocking().without_timing();
    let mut training = Training {
        comm,
        replica: Arc::clone(&replica),
        exchanges: exchanges?,
        compute: HostStream::new("compute")?,
        network: HostStream::new("network")?,
        ready: events(),
        updated: events(),
        waits: (method == Method::Synchronous).then(blocking),
    };
    let ends: Vec<Event> = (0..options.ahead).map(|_| blocking()).collect();
    let share = options.batch / group.size() as usize;
    let first = share * group.rank() as usize;
    let mut random = Random(2);
    let (mut steps, mut queued_ahead) = (0_usize, 0);
    group.barrier()?;
    let (begin, thread, process) = (
        Instant::now(),
        support::thread_time()?,
        support::process_time()?,
    );
    for _ in 0..options.epochs {
        // The same on every rank. A rest that is smaller than a batch is left out.
        let order = random.order(digits.training.len());
        for batch in order.chunks_exact(options.batch) {
            let end = &ends[steps % ends.len()];
            end.synchronize(DEADLINE)?;
            let from_ms = Recorder::now_ms();
            training.step(batch[first..first + share].to_vec())?;
            // If there is only one event, it is still that of the step before.
            if let Some(before) = steps.checked_sub(1) {
                queued_ahead += usize::from(!ends[before % ends.len()].query()?);
            }
            training.network.record(end)?;
            replica.recorder.add_in(APPLICATION, QUEUES, from_ms);
            steps += 1;
        }
    }
    training.network.synchronize(DEADLINE)?;
    let (wall, count) = (begin.elapsed(), steps.max(1) as u32);
    let own = [
        support::thread_time()? - thread,
        support::process_time()? - process,
    ]
    .map(|time| time / count);
    let weights = replica.all_weights();
    let [thread, process] = agree(group, &weights, own)?;
    let bars = replica.recorder.take();
    Ok(Report {
        method,
        losses: std::mem::take(&mut lock(&replica.losses)),
        weights,
        recognized: replica.recognized(&digits.held_out),
        held_out: digits.held_out.len(),
        step: wall / count,
        thread,
        process,
        operations: (
            bars.iter().filter(|bar| bar.row == NETWORK).count(),
            overlapping(&bars, [NETWORK, COMPUTE]),
        ),
        queued_ahead,
        overlap: overlap_ms(&bars, [NETWORK, COMPUTE]) / busy_ms(&bars, NETWORK),
        bars,
    })
}

/// Fails unless all ranks have the same weights, bit for bit. Returns the means of the times of all ranks.
fn agree(group: &Group, weights: &[f32], times: [Duration; 2]) -> Result<[Duration; 2]> {
    // FNV-1a
    let mix = |hash: u64, weight: &f32| {
        (hash ^ u64::from(weight.to_bits())).wrapping_mul(0x100_0000_01b3)
    };
    let hash = weights.iter().fold(0xcbf2_9ce4_8422_2325, mix);
    let [thread, process] = times.map(|time| time.as_nanos() as u64);
    let all = support::gather(group, &[hash, thread, process])?;
    let mut sums = [0; 2];
    for (rank, values) in all.iter().enumerate() {
        ensure!(
            values[0] == hash,
            "the weights of rank {rank} are not those of rank {}",
            group.rank()
        );
        sums[0] += values[1];
        sums[1] += values[2];
    }
    Ok(sums.map(|sum| Duration::from_nanos(sum / all.len() as u64)))
}

fn print(options: &Options, reports: &[Report], ranks: usize) -> Result<()> {
    let mut text = format!(
        "{ranks} ranks, {} weights, {} steps of {} images; a kernel takes at least {} us\n",
        reports.first().map_or(0, |report| report.weights.len()),
        reports.first().map_or(0, |report| report.losses.len()),
        options.batch,
        options.kernel_us
    );
    writeln!(
        text,
        "{:<18}{:>10}{:>14}{:>15}{:>10}{:>16}{:>14}{:>18}{:>12}",
        "method",
        "step ms",
        "CPU thread us",
        "CPU process us",
        "overlap",
        "beside kernels",
        "queued ahead",
        "loss",
        "held out"
    )?;
    for report in reports {
        let us = |time: Duration| time.as_secs_f64() * 1e6;
        let of = |at: Option<&f32>| at.copied().unwrap_or(f32::NAN);
        writeln!(
            text,
            "{:<18}{:>10.2}{:>14.0}{:>15.0}{:>9.0}%{:>16}{:>14}{:>18}{:>11.1}%",
            report.method.name(),
            us(report.step) / 1e3,
            us(report.thread),
            us(report.process),
            100.0 * report.overlap.max(0.0),
            format!("{}/{}", report.operations.1, report.operations.0),
            report.queued_ahead,
            format!(
                "{:.2} -> {:.4}",
                of(report.losses.first()),
                of(report.losses.last())
            ),
            100.0 * report.recognized as f64 / report.held_out as f64
        )?;
    }
    std::io::stdout().write_all(text.as_bytes())?;
    if let Some(file) = &options.out {
        let mut text = String::new();
        for report in reports {
            let bits = |values: &[f32]| -> String {
                values
                    .iter()
                    .map(|value| format!(" {:08x}", value.to_bits()))
                    .collect()
            };
            writeln!(text, "method {}", report.method.name())?;
            writeln!(text, "losses{}", bits(&report.losses))?;
            writeln!(text, "weights{}", bits(&report.weights))?;
            writeln!(text, "recognized {} {}", report.recognized, report.held_out)?;
        }
        std::fs::write(file, text).with_context(|| file.display().to_string())?;
    }
    if let Some(file) = &options.svg {
        draw(file, reports, options)?;
    }
    Ok(())
}

/// Some steps from the middle of each method, on rank 0.
fn draw(file: &std::path::Path, reports: &[Report], options: &Options) -> Result<()> {
    let (mut rows, mut bars) = (Vec::new(), Vec::new());
    for (number, report) in reports.iter().enumerate() {
        rows.extend(ROWS.map(|row| format!("{}: {row}", report.method.name())));
        let mut starts: Vec<f64> = (report.bars.iter())
            .filter(|bar| bar.row == COMPUTE && bar.kind == "forward")
            .map(|bar| bar.from_ms)
            .collect();
        starts.sort_by(f64::total_cmp);
        let layers = options.hidden.len() + 1;
        let from = report.losses.len() / 2 * layers;
        let Some(from_ms) = starts.get(from) else {
            continue;
        };
        let to_ms = starts.get(from + 3 * layers).copied().unwrap_or(f64::MAX);
        bars.extend(
            between(&report.bars, *from_ms, to_ms)
                .into_iter()
                .map(|bar| Bar {
                    row: ROWS.len() * number + bar.row,
                    ..bar
                }),
        );
    }
    support::timeline(
        file,
        "Three steps of data-parallel training, rank 0",
        &rows,
        &bars,
    )
}
