//! Training of one network that is divided among ranks, in two ways, on handwritten digits.
//!
//! ```sh
//! scripts/digits
//! cargo run --release --example pipeline_training -- --svg timeline.svg
//! ```
//!
//! - Pipeline: each rank has some of the layers, a stage. A batch is divided into micro-batches, which go through the stages one behind the other. With the schedule `1f1b`
//!   (PipeDream-Flush, Megatron-LM) a stage computes the gradient of a micro-batch as soon as it can, so it keeps the inputs of few micro-batches. With `gpipe` it computes the
//!   gradients when all of the batch has gone forward.
//! - Tensor: each rank has a part of each layer (Megatron-LM). Forward and backward have an all-reduce for each block of layers.
//!
//! A rank queues its whole step on one stream: receives, kernels, and sends. Closures stand for kernels. They compute, and sleep until their time is over.
//!
//! With `--checkpoint` the pipeline saves its weights every few steps. If a rank ends, the others go on without it from the last checkpoint (`--on-loss shrink`), or end with an error
//! that names it (`--on-loss fail`); the same command then goes on from the checkpoint.
#[path = "support/mod.rs"]
mod support;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::Write as _;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::{Parser, ValueEnum};
use doorbell::{
    Access, Algorithm, Collective, DataType, EndpointConfig, Event, Executor, Group, HostStream,
    LaunchEnvironment, MessageConfig, MessageQueue, ReduceOp, Reduction, Region,
};

use support::digits::{CLASSES, Digits, PIXELS, Random};
use support::recorder::{between, busy_ms};
use support::{Bar, Ranks, Recorder};

/// The longest wait for a peer.
const DEADLINE: Option<Duration> = Some(Duration::from_secs(30));
/// Steps that the CPU queues ahead.
const AHEAD: usize = 2;

#[derive(Parser)]
struct Options {
    /// The images: the file that `scripts/digits` writes
    #[arg(long, default_value = "target/digits.csv")]
    data: PathBuf,
    /// How the network is divided; without it both ways run
    #[arg(long, value_enum)]
    method: Vec<Method>,
    /// Numbers of micro-batches of a pipeline, one run for each
    #[arg(long, value_delimiter = ',', default_values_t = [1, 4, 8, 16])]
    micro_batches: Vec<usize>,
    /// Blocks of layers
    #[arg(long, default_value_t = 4)]
    blocks: usize,
    /// Hidden neurons of a block
    #[arg(long, default_value_t = 96)]
    hidden: usize,
    #[arg(long, default_value_t = 20)]
    steps: usize,
    /// Images of a step
    #[arg(long, default_value_t = 64)]
    batch: usize,
    /// Learning rate
    #[arg(long, default_value_t = 0.05)]
    rate: f32,
    /// The least time of the forward kernel of a block for a whole batch, in microseconds; the backward kernel takes twice as long
    #[arg(long, default_value_t = 16_000)]
    kernel_us: u64,
    /// Ranks, unless a launcher says how many there are
    #[arg(long, default_value_t = 4)]
    ranks: u32,
    /// Saves the weights in this folder, and begins with those that are there. Runs only the pipeline, once
    #[arg(long)]
    checkpoint: Option<PathBuf>,
    /// Steps between two checkpoints
    #[arg(long, default_value_t = 10)]
    every: usize,
    /// What the other ranks do if one ends
    #[arg(long, value_enum, default_value = "fail")]
    on_loss: OnLoss,
    /// RANK,STEP: this rank ends in the middle of this step, as if its host lost power
    #[arg(long, value_delimiter = ',')]
    kill: Vec<usize>,
    /// Writes losses and final weights of each run to this file
    #[arg(long)]
    out: Option<PathBuf>,
    /// Draws a step of each run as a timeline
    #[arg(long)]
    svg: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Method {
    Pipeline,
    Tensor,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum OnLoss {
    Shrink,
    Fail,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Schedule {
    OneForwardOneBackward,
    GPipe,
}

fn main() -> Result<()> {
    let options = Options::parse();
    let is_killed = |rank: u32| options.kill.first() == Some(&(rank as usize));
    if LaunchEnvironment::from_env().is_ok() {
        return rank(Group::from_env()?, &options);
    }
    let mut ranks = Ranks::start(options.ranks)?;
    for rank in 0..options.ranks {
        let status = ranks.wait(rank)?;
        let is_expected =
            is_killed(rank) && options.on_loss == OnLoss::Shrink && support::was_killed(status);
        ensure!(
            status.success() || is_expected,
            "rank {rank} of {}: {status}",
            options.ranks
        );
    }
    Ok(())
}

fn rank(mut group: Group, options: &Options) -> Result<()> {
    let [size, batch] = [group.size() as usize, options.batch];
    ensure!(
        (2..=options.blocks).contains(&size),
        "{} blocks are for 2 to as many ranks",
        options.blocks
    );
    let fits = |count: &usize| (1..=64).contains(count) && batch.is_multiple_of(*count);
    let wrong = options.micro_batches.iter().find(|count| !fits(count));
    ensure!(
        wrong.is_none(),
        "{batch} images cannot be divided into {} micro-batches of 1 to 64",
        wrong.unwrap_or(&0)
    );
    ensure!(
        matches!(options.kill.len(), 0 | 2),
        "--kill takes a rank and a step"
    );
    let digits = Arc::new(Digits::read(&options.data)?);
    ensure!(
        (1..=digits.training.len()).contains(&batch),
        "there are {} images",
        digits.training.len()
    );
    if options.checkpoint.is_some() {
        let report = with_checkpoints(&mut group, options, &digits)?;
        return end(group, options, &[report]);
    }
    let chosen = |method| options.method.is_empty() || options.method.contains(&method);
    let mut reports = Vec::new();
    if chosen(Method::Pipeline) {
        let one = Schedule::OneForwardOneBackward;
        let mut runs: Vec<_> = options
            .micro_batches
            .iter()
            .map(|count| (*count, one))
            .collect();
        runs.extend(
            options
                .micro_batches
                .last()
                .map(|count| (*count, Schedule::GPipe)),
        );
        for (number, (count, schedule)) in (1..).zip(runs) {
            let network = Network::new(options);
            let mut pipeline =
                Pipeline::new(&group, options, &digits, network, (count, schedule), number)?;
            reports.push(
                pipeline
                    .train(&group, options)
                    .map_err(|error| named(&group, error))?,
            );
        }
    }
    if chosen(Method::Tensor) {
        ensure!(
            options.hidden.is_multiple_of(size),
            "{} neurons cannot be divided by {size} ranks",
            options.hidden
        );
        reports.push(train_tensor(&group, options, &digits).map_err(|error| named(&group, error))?);
    }
    end(group, options, &reports)
}

/// An endpoint only reports that it failed; the group has the cause.
fn named(group: &Group, error: anyhow::Error) -> anyhow::Error {
    match error.downcast::<doorbell::Error>() {
        Ok(error) => group.cause_of(error).into(),
        Err(other) => other,
    }
}

fn end(group: Group, options: &Options, reports: &[Report]) -> Result<()> {
    group.barrier()?;
    if group.rank() == 0 {
        print(options, reports, group.size())?;
    }
    group.leave()?;
    Ok(())
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Two layers with a detour around them: y = x + B max(0, A x + a) + b. For each hidden neuron its row of A, its bias and its column of B; b at the end. So the part of a
/// rank is a range of neurons.
struct Block;

/// Numbers of a hidden neuron.
const NEURON: usize = 2 * PIXELS + 1;

impl Block {
    /// The contribution of some neurons to B max(0, A x + a) for each image, and their values.
    fn forward(neurons: &[f32], images: &[f32]) -> (Vec<f32>, Vec<f32>) {
        let (mut sums, mut hidden) = (vec![0.0; images.len()], Vec::new());
        for (image, sums) in images.chunks(PIXELS).zip(sums.chunks_mut(PIXELS)) {
            for neuron in neurons.chunks(NEURON) {
                let (row, rest) = neuron.split_at(PIXELS);
                let value = image
                    .iter()
                    .zip(row)
                    .fold(rest[0], |sum, (x, weight)| sum + x * weight)
                    .max(0.0);
                for (sum, weight) in sums.iter_mut().zip(&rest[1..]) {
                    *sum += value * weight;
                }
                hidden.push(value);
            }
        }
        (sums, hidden)
    }

    /// Adds the detour, once the contributions of all neurons are summed.
    fn output(images: &[f32], sums: &[f32], biases: &[f32]) -> Vec<f32> {
        let all = images.iter().zip(sums).zip(biases.iter().cycle());
        all.map(|((x, sum), bias)| x + (sum + bias)).collect()
    }

    /// Adds to the gradient of some neurons, and returns their contribution to the derivatives by the inputs.
    fn backward(
        neurons: &[f32],
        gradient: &mut [f32],
        images: &[f32],
        hidden: &[f32],
        deltas: &[f32],
    ) -> Vec<f32> {
        let mut below = vec![0.0; images.len()];
        let each = images.chunks(PIXELS).zip(deltas.chunks(PIXELS));
        let each = each
            .zip(hidden.chunks(neurons.len() / NEURON))
            .zip(below.chunks_mut(PIXELS));
        for (((image, deltas), hidden), below) in each {
            for ((neuron, gradient), value) in neurons
                .chunks(NEURON)
                .zip(gradient.chunks_mut(NEURON))
                .zip(hidden)
            {
                let sum = deltas
                    .iter()
                    .zip(&neuron[PIXELS + 1..])
                    .fold(0.0, |sum, (delta, weight)| sum + delta * weight);
                let delta = if *value > 0.0 { sum } else { 0.0 };
                for at in 0..PIXELS {
                    gradient[PIXELS + 1 + at] += value * deltas[at];
                    gradient[at] += delta * image[at];
                    below[at] += delta * neuron[at];
                }
                gradient[PIXELS] += delta;
            }
        }
        below
    }

    fn add_bias_gradient(gradient: &mut [f32], deltas: &[f32]) {
        for deltas in deltas.chunks(PIXELS) {
            for (sum, delta) in gradient.iter_mut().zip(deltas) {
                *sum += delta;
            }
        }
    }
}

/// Numbers of a class in the last layer: its weights and its bias.
const CLASS: usize = PIXELS + 1;

/// The last layer and the loss. Adds to the gradient, and to the loss image by image, and returns the derivatives by the inputs.
fn classify(
    head: &[f32],
    gradient: &mut [f32],
    loss: &mut f32,
    images: &[f32],
    labels: &[u8],
) -> Vec<f32> {
    let mut below = Vec::with_capacity(images.len());
    for (image, label) in images.chunks(PIXELS).zip(labels) {
        let outputs = outputs(head, image);
        let largest = outputs.iter().copied().fold(f32::MIN, f32::max);
        let powers: Vec<f32> = outputs
            .iter()
            .map(|output| (output - largest).exp())
            .collect();
        let sum: f32 = powers.iter().sum();
        *loss += sum.ln() - (outputs[usize::from(*label)] - largest);
        let mut deltas = [0.0; PIXELS];
        for (class, power) in powers.iter().enumerate() {
            let delta = power / sum - f32::from(class == usize::from(*label));
            let at = class * CLASS;
            for pixel in 0..PIXELS {
                deltas[pixel] += delta * head[at + pixel];
                gradient[at + pixel] += delta * image[pixel];
            }
            gradient[at + PIXELS] += delta;
        }
        below.extend(deltas);
    }
    below
}

fn outputs(head: &[f32], image: &[f32]) -> Vec<f32> {
    let of_class = |class: &[f32]| {
        image
            .iter()
            .zip(class)
            .fold(class[PIXELS], |sum, (x, weight)| sum + x * weight)
    };
    head.chunks(CLASS).map(of_class).collect()
}

/// All weights, and what a training has come to.
#[derive(Clone)]
struct Network {
    blocks: Vec<Vec<f32>>,
    head: Vec<f32>,
    losses: Vec<f32>,
}

impl Network {
    /// Before the first step: the same on every rank.
    fn new(options: &Options) -> Network {
        let mut random = Random(1);
        let (first, second) = (
            (3.0 / PIXELS as f32).sqrt(),
            0.5 * (3.0 / options.hidden as f32).sqrt(),
        );
        let mut block = || {
            let mut block = Vec::new();
            for _ in 0..options.hidden {
                block.extend((0..PIXELS).map(|_| random.weight() * first));
                block.push(0.0);
                block.extend((0..PIXELS).map(|_| random.weight() * second));
            }
            block.resize(block.len() + PIXELS, 0.0);
            block
        };
        let blocks = (0..options.blocks).map(|_| block()).collect();
        let mut head = Vec::new();
        for _ in 0..CLASSES {
            head.extend((0..PIXELS).map(|_| random.weight() * first));
            head.push(0.0);
        }
        Network {
            blocks,
            head,
            losses: Vec::new(),
        }
    }

    fn recognized(&self, digits: &Digits) -> usize {
        let is_right = |image: &&support::digits::Digit| {
            let mut passed = image.pixels.to_vec();
            for block in &self.blocks {
                let (neurons, biases) = block.split_at(block.len() - PIXELS);
                passed = Block::output(&passed, &Block::forward(neurons, &passed).0, biases);
            }
            let outputs = outputs(&self.head, &passed);
            let answer = (0..CLASSES).max_by(|a, b| outputs[*a].total_cmp(&outputs[*b]));
            answer == Some(usize::from(image.label))
        };
        digits.held_out.iter().filter(is_right).count()
    }
}

/// The images of a step: the same on every rank, whatever step it begins with.
fn images_of(step: usize, options: &Options, digits: &Digits) -> Vec<usize> {
    let a_round = digits.training.len() / options.batch;
    let order = Random(2 + (step / a_round) as u64).order(digits.training.len());
    order[step % a_round * options.batch..][..options.batch].to_vec()
}

fn pixels(digits: &Digits, images: &[usize]) -> Vec<f32> {
    images
        .iter()
        .flat_map(|image| digits.training[*image].pixels)
        .collect()
}

fn labels(digits: &Digits, images: &[usize]) -> Vec<u8> {
    images
        .iter()
        .map(|image| digits.training[*image].label)
        .collect()
}

fn descend(weights: &mut [f32], gradient: &mut [f32], step: f32) {
    for (weight, derivative) in weights.iter_mut().zip(gradient) {
        *weight -= step * *derivative;
        *derivative = 0.0;
    }
}

/// What a run has done.
struct Report {
    name: String,
    micro_batches: usize,
    network: Network,
    /// The step that it has begun with.
    from: usize,
    recognized: (usize, usize),
    step: Duration,
    /// Of the application's thread, for a step.
    thread: Duration,
    /// Part of the time in which no kernel runs, mean of the ranks, and what the schedule predicts.
    idle: f64,
    predicted: f64,
    /// The most micro-batches whose inputs a rank keeps.
    kept: usize,
    /// One row for each rank.
    bars: Vec<Bar>,
}

/// What a block has computed from, and its hidden neurons.
type Kept = (Vec<f32>, Vec<f32>);

/// A stage of the pipeline, which its kernels use one after the other.
struct Stage {
    digits: Arc<Digits>,
    /// The whole network; only the blocks of this stage are up to date.
    network: Network,
    /// Blocks of this stage.
    own: Range<usize>,
    is_first: bool,
    is_last: bool,
    /// Of the blocks of this stage, and of the last layer.
    gradients: Vec<Vec<f32>>,
    head_gradient: Vec<f32>,
    loss: f32,
    /// By micro-batch, for each block what it has computed from, and the hidden neurons. Behind them the output.
    kept: BTreeMap<usize, Vec<Kept>>,
    most_kept: usize,
}

impl Stage {
    fn forward(&mut self, micro_batch: usize, images: &[usize], received: Vec<f32>) -> Vec<f32> {
        let mut passed = if self.is_first {
            pixels(&self.digits, images)
        } else {
            received
        };
        let mut kept = Vec::new();
        for block in &self.network.blocks[self.own.clone()] {
            let (neurons, biases) = block.split_at(block.len() - PIXELS);
            let (sums, hidden) = Block::forward(neurons, &passed);
            let output = Block::output(&passed, &sums, biases);
            kept.push((std::mem::replace(&mut passed, output), hidden));
        }
        kept.push((passed.clone(), Vec::new()));
        self.kept.insert(micro_batch, kept);
        self.most_kept = self.most_kept.max(self.kept.len());
        passed
    }

    fn backward(&mut self, micro_batch: usize, images: &[usize], received: Vec<f32>) -> Vec<f32> {
        let mut kept = self.kept.remove(&micro_batch).expect("it has gone forward");
        let (output, _) = kept.pop().expect("a stage has an output");
        let mut deltas = received;
        if self.is_last {
            let labels = labels(&self.digits, images);
            deltas = classify(
                &self.network.head,
                &mut self.head_gradient,
                &mut self.loss,
                &output,
                &labels,
            );
        }
        let blocks = self.network.blocks[self.own.clone()]
            .iter()
            .zip(&mut self.gradients);
        for ((block, gradient), (images, hidden)) in blocks.zip(kept).rev() {
            let neurons = &block[..block.len() - PIXELS];
            let (of_neurons, of_biases) = gradient.split_at_mut(neurons.len());
            Block::add_bias_gradient(of_biases, &deltas);
            let below = Block::backward(neurons, of_neurons, &images, &hidden, &deltas);
            deltas
                .iter_mut()
                .zip(below)
                .for_each(|(delta, below)| *delta += below);
        }
        deltas
    }

    fn update(&mut self, batch: usize, rate: f32) {
        let step = rate / batch as f32;
        for (block, gradient) in self.network.blocks[self.own.clone()]
            .iter_mut()
            .zip(&mut self.gradients)
        {
            descend(block, gradient, step);
        }
        if self.is_last {
            descend(&mut self.network.head, &mut self.head_gradient, step);
            self.network.losses.push(self.loss / batch as f32);
            self.loss = 0.0;
        }
    }
}

/// The least time of a kernel.
fn last(time: Duration, work: impl FnOnce()) {
    let begin = Instant::now();
    work();
    std::thread::sleep(time.saturating_sub(begin.elapsed()));
}

/// A neighbour in the pipeline: activations go one way, derivatives the other one. There is memory for each micro-batch.
struct Neighbour {
    queue: MessageQueue,
    sent: Region,
    received: Region,
}

/// A rank of the pipeline.
struct Pipeline {
    stage: Arc<Mutex<Stage>>,
    recorder: Arc<Recorder>,
    stream: HostStream,
    before: Option<Neighbour>,
    after: Option<Neighbour>,
    rank: usize,
    ranks: usize,
    micro_batches: usize,
    schedule: Schedule,
    /// Numbers of a micro-batch between two stages.
    width: usize,
    kernel_time: Duration,
    /// Whether this is no repetition after another rank has ended.
    is_first_try: bool,
}

impl Pipeline {
    fn new(
        group: &Group,
        options: &Options,
        digits: &Arc<Digits>,
        network: Network,
        (micro_batches, schedule): (usize, Schedule),
        tag: u64,
    ) -> Result<Pipeline> {
        let (rank, ranks) = (group.rank() as usize, group.size() as usize);
        let own = options.blocks * rank / ranks..options.blocks * (rank + 1) / ranks;
        let width = options.batch / micro_batches * PIXELS;
        let config = MessageConfig::default()
            .ahead((AHEAD + 1) as u32 * micro_batches as u32 + 1)
            .endpoint(
                EndpointConfig::default()
                    .wait_timeout(DEADLINE)
                    .room_timeout(DEADLINE),
            );
        let [is_first, is_last] = [rank == 0, rank + 1 == ranks];
        let mut peers = Vec::new();
        peers.extend((!is_first).then(|| (group.rank() - 1, tag)));
        peers.extend((!is_last).then(|| (group.rank() + 1, tag)));
        let mut neighbours = group
            .message_queues(&peers, &config)?
            .into_iter()
            .map(|queue| {
                let region = || {
                    Region::alloc(
                        group.domain(),
                        (4 * width * micro_batches) as u64,
                        Access::ALL,
                    )
                };
                Ok(Neighbour {
                    queue,
                    sent: region()?,
                    received: region()?,
                })
            });
        let mut neighbour = |is_there: bool| -> Result<Option<Neighbour>> {
            if is_there {
                neighbours.next().transpose()
            } else {
                Ok(None)
            }
        };
        let (before, after) = (neighbour(!is_first)?, neighbour(!is_last)?);
        let kernel_time =
            Duration::from_micros(options.kernel_us) * own.len() as u32 / micro_batches as u32;
        let zeros = |weights: &Vec<f32>| vec![0.0; weights.len()];
        let stage = Stage {
            digits: Arc::clone(digits),
            gradients: network.blocks[own.clone()].iter().map(zeros).collect(),
            head_gradient: zeros(&network.head),
            network,
            own,
            is_first,
            is_last,
            loss: 0.0,
            kept: BTreeMap::new(),
            most_kept: 0,
        };
        Ok(Pipeline {
            stage: Arc::new(Mutex::new(stage)),
            recorder: Arc::new(Recorder::new()),
            stream: HostStream::new("stage")?,
            before,
            after,
            rank,
            ranks,
            micro_batches,
            schedule,
            width,
            kernel_time,
            is_first_try: true,
        })
    }

    /// Queues a step. `is_killed`: this process ends in the middle of it.
    fn step(&mut self, images: &[usize], options: &Options, is_killed: bool) -> Result<()> {
        let count = self.micro_batches;
        let ahead = match self.schedule {
            // So many micro-batches are between this stage and the last one.
            Schedule::OneForwardOneBackward => (self.ranks - 1 - self.rank).min(count),
            Schedule::GPipe => count,
        };
        let parts: Vec<Vec<usize>> = images
            .chunks(images.len() / count)
            .map(<[usize]>::to_vec)
            .collect();
        let mut sends = Vec::new();
        for place in 0..count + ahead {
            if place < count {
                self.forward(place, parts[place].clone(), &mut sends)?;
            }
            if place >= ahead {
                let micro_batch = place - ahead;
                let is_end = is_killed && micro_batch == count / 2;
                self.backward(micro_batch, parts[micro_batch].clone(), is_end, &mut sends)?;
            }
        }
        let (stage, batch, rate) = (Arc::clone(&self.stage), options.batch, options.rate);
        self.stream
            .launch(move || lock(&stage).update(batch, rate))?;
        // The next step writes into the memory of these messages.
        for (is_forward, send) in sends {
            let neighbour = if is_forward {
                &mut self.after
            } else {
                &mut self.before
            };
            neighbour
                .as_mut()
                .expect("it has sent")
                .queue
                .wait_send(&self.stream, send)?;
        }
        Ok(())
    }

    fn forward(&mut self, micro_batch: usize, images: Vec<usize>, sends: &mut Sends) -> Result<()> {
        let work = move |stage: &mut Stage, received| stage.forward(micro_batch, &images, received);
        self.pass(true, micro_batch, work, sends)
    }

    fn backward(
        &mut self,
        micro_batch: usize,
        images: Vec<usize>,
        is_end: bool,
        sends: &mut Sends,
    ) -> Result<()> {
        let work = move |stage: &mut Stage, received| {
            if is_end {
                support::kill_myself();
            }
            stage.backward(micro_batch, &images, received)
        };
        self.pass(false, micro_batch, work, sends)
    }

    /// Queues a receive from one neighbour, a kernel, and a send to the other one.
    fn pass(
        &mut self,
        is_forward: bool,
        micro_batch: usize,
        work: impl FnOnce(&mut Stage, Vec<f32>) -> Vec<f32> + Send + 'static,
        sends: &mut Sends,
    ) -> Result<()> {
        let (from, to, kind, factor) = match is_forward {
            true => (&mut self.before, &mut self.after, "forward", 1),
            false => (&mut self.after, &mut self.before, "backward", 2),
        };
        let (width, bytes) = (self.width, 4 * self.width as u64);
        let at = micro_batch as u64 * bytes;
        if let Some(neighbour) = from {
            neighbour
                .queue
                .recv(&self.stream, &[neighbour.received.slice(at, bytes)?])?;
        }
        let received = from.as_ref().map(|neighbour| neighbour.received.clone());
        let sent = to.as_ref().map(|neighbour| neighbour.sent.clone());
        let (stage, recorder) = (Arc::clone(&self.stage), Arc::clone(&self.recorder));
        let (row, time) = (self.rank, self.kernel_time * factor);
        self.stream.launch(move || {
            recorder.time(row, kind, || {
                last(time, || {
                    let mut values = vec![0.0; width];
                    if let Some(received) = received {
                        received
                            .read_values(at, &mut values)
                            .expect("it was received");
                    }
                    let values = work(&mut lock(&stage), values);
                    if let Some(sent) = sent {
                        sent.write_values(at, &values)
                            .expect("there is memory for each micro-batch");
                    }
                });
            });
        })?;
        if let Some(neighbour) = to {
            sends.push((
                is_forward,
                neighbour
                    .queue
                    .start_send(&self.stream, &[neighbour.sent.slice(at, bytes)?])?,
            ));
        }
        Ok(())
    }

    /// Trains from the first step that the network has not seen to the last.
    fn train(&mut self, group: &Group, options: &Options) -> Result<Report> {
        let ends: Vec<Event> = (0..AHEAD)
            .map(|_| Event::blocking().without_timing())
            .collect();
        let first = lock(&self.stage).network.losses.len();
        let digits = Arc::clone(&lock(&self.stage).digits);
        group.barrier()?;
        self.recorder = Arc::new(Recorder::new());
        let (begin, thread) = (Instant::now(), support::thread_time()?);
        for step in first..options.steps {
            let end = &ends[step % AHEAD];
            end.synchronize(DEADLINE)?;
            let is_killed = self.is_first_try && options.kill == [self.rank, step];
            self.step(&images_of(step, options, &digits), options, is_killed)?;
            self.stream.record(end)?;
            if let Some(folder) = &options.checkpoint
                && (step + 1) % options.every == 0
            {
                self.stream.synchronize(DEADLINE)?;
                self.save(group, folder, step + 1)?;
            }
        }
        self.stream.synchronize(DEADLINE)?;
        let wall = begin.elapsed();
        let thread = support::thread_time()? - thread;
        for neighbour in [&mut self.before, &mut self.after].into_iter().flatten() {
            neighbour.queue.finish(DEADLINE)?;
        }
        let stage = lock(&self.stage);
        let kept = stage.most_kept;
        let network = assemble(group, &stage)?;
        drop(stage);
        let predicted = (self.ranks - 1) as f64 / (self.micro_batches + self.ranks - 1) as f64;
        let name = match self.schedule {
            Schedule::OneForwardOneBackward => "1f1b",
            Schedule::GPipe => "gpipe",
        };
        let run = Run {
            name,
            micro_batches: self.micro_batches,
            predicted,
            steps: options.steps - first,
        };
        report(
            group,
            run,
            network,
            &digits,
            (wall, thread, kept),
            &self.recorder,
        )
    }

    /// Saves the weights of this stage. The checkpoint is complete when all ranks have saved theirs; the file `latest` says so.
    fn save(&self, group: &Group, folder: &Path, steps: usize) -> Result<()> {
        let stage = lock(&self.stage);
        let own = folder.join(format!("step-{steps}"));
        std::fs::create_dir_all(&own)?;
        for block in stage.own.clone() {
            write_durably(
                &own.join(format!("block-{block}")),
                &bytes_of(&stage.network.blocks[block]),
            )?;
        }
        if stage.is_last {
            write_durably(&own.join("head"), &bytes_of(&stage.network.head))?;
            write_durably(&own.join("losses"), &bytes_of(&stage.network.losses))?;
        }
        group.barrier()?;
        if stage.is_first {
            write_durably(&folder.join("latest"), steps.to_string().as_bytes())?;
        }
        Ok(())
    }
}

/// Sends of a step, and whether they go forward.
type Sends = Vec<(bool, doorbell::PendingSend)>;

/// Writes a file that is there as a whole or not at all, also if the host loses power.
fn write_durably(file: &Path, bytes: &[u8]) -> Result<()> {
    let new = file.with_extension("new");
    let write = || {
        let mut open = std::fs::File::create(&new)?;
        open.write_all(bytes)?;
        open.sync_all()?;
        std::fs::rename(&new, file)
    };
    write().with_context(|| file.display().to_string())
}

fn bytes_of(values: &[f32]) -> Vec<u8> {
    values
        .iter()
        .flat_map(|value| value.to_le_bytes())
        .collect()
}

fn values_of(bytes: &[u8]) -> Vec<f32> {
    bytes
        .as_chunks()
        .0
        .iter()
        .map(|bytes| f32::from_le_bytes(*bytes))
        .collect()
}

/// The network of the last complete checkpoint, or a new one.
fn load(folder: &Path, options: &Options) -> Result<Network> {
    let mut network = Network::new(options);
    let steps = match std::fs::read_to_string(folder.join("latest")) {
        Ok(steps) => steps,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(network),
        Err(error) => {
            return Err(error).with_context(|| folder.join("latest").display().to_string());
        }
    };
    let folder = folder.join(format!("step-{steps}"));
    let read = |name: &str, len: usize| -> Result<Vec<f32>> {
        let file = folder.join(name);
        let values = values_of(&std::fs::read(&file).with_context(|| file.display().to_string())?);
        ensure!(
            values.len() == len,
            "{}: {} numbers, and not {len}",
            file.display(),
            values.len()
        );
        Ok(values)
    };
    for (number, block) in network.blocks.iter_mut().enumerate() {
        *block = read(&format!("block-{number}"), block.len())?;
    }
    network.head = read("head", network.head.len())?;
    network.losses = read(
        "losses",
        steps.parse().with_context(|| format!("`{steps}` steps"))?,
    )?;
    Ok(network)
}

/// Trains the pipeline. If a rank ends, the others make a group without it, divide the blocks anew, and go on from the last checkpoint.
fn with_checkpoints(group: &mut Group, options: &Options, digits: &Arc<Digits>) -> Result<Report> {
    let folder = options.checkpoint.as_ref().context("no folder")?;
    let count = options.micro_batches.first().copied().unwrap_or(1);
    let mut is_first_try = true;
    loop {
        let network = load(folder, options)?;
        let from = network.losses.len();
        let schedule = (count, Schedule::OneForwardOneBackward);
        let trained =
            Pipeline::new(group, options, digits, network, schedule, 1).and_then(|mut pipeline| {
                pipeline.is_first_try = std::mem::take(&mut is_first_try);
                pipeline.train(group, options)
            });
        let error = match trained {
            Ok(report) => return Ok(report),
            Err(error) => named(group, error),
        };
        // In one piece: several ranks write to one file.
        let tell = |text: String| std::io::stderr().write_all(text.as_bytes());
        let is_loss = matches!(error.downcast_ref(), Some(doorbell::Error::Rank { .. }));
        if !is_loss || options.on_loss == OnLoss::Fail {
            tell(format!("rank {}: {error:#}\n", group.rank()))?;
            return Err(error);
        }
        let (rank, steps) = (group.rank(), load(folder, options)?.losses.len());
        let (smaller, ranks) = group.shrink()?;
        *group = smaller;
        let now = group.rank();
        tell(format!(
            "rank {rank}: {error:#}; began at step {from}, goes on at step {steps} as rank {now} of {ranks:?}\n"
        ))?;
        ensure!(group.size() > 1, "no other rank is left");
    }
}

/// The whole network, from the stages of all ranks.
fn assemble(group: &Group, stage: &Stage) -> Result<Network> {
    let mut own: Vec<f32> = stage.network.blocks[stage.own.clone()].concat();
    if stage.is_last {
        own.extend(&stage.network.head);
        own.extend(&stage.network.losses);
    }
    let all = gather(group, &bytes_of(&own))?;
    let all: Vec<f32> = all.iter().flat_map(|bytes| values_of(bytes)).collect();
    let mut rest = all.as_slice();
    let mut take = |len: usize| -> Result<Vec<f32>> {
        let (taken, left) = rest
            .split_at_checked(len)
            .context("a rank has stored too few numbers")?;
        rest = left;
        Ok(taken.to_vec())
    };
    let blocks: Result<Vec<_>> = stage
        .network
        .blocks
        .iter()
        .map(|block| take(block.len()))
        .collect();
    let (blocks, head) = (blocks?, take(stage.network.head.len())?);
    Ok(Network {
        blocks,
        head,
        losses: rest.to_vec(),
    })
}

/// The bytes of all ranks. A value of the store has a limit, so they go in pieces.
fn gather(group: &Group, own: &[u8]) -> Result<Vec<Vec<u8>>> {
    let timeout = Duration::from_secs(30);
    let lens = group
        .store()
        .gather(&(own.len() as u64).to_le_bytes(), timeout)?;
    let longest = lens
        .iter()
        .filter_map(|len| len.first_chunk().map(|len| u64::from_le_bytes(*len)))
        .max();
    let mut all = vec![Vec::new(); lens.len()];
    for from in (0..longest.unwrap_or(0) as usize).step_by(PIECE) {
        let piece = own
            .get(from..own.len().min(from + PIECE))
            .unwrap_or_default();
        for (all, piece) in all.iter_mut().zip(group.store().gather(piece, timeout)?) {
            all.extend(piece);
        }
    }
    Ok(all)
}

const PIECE: usize = 32 << 10;

struct Run {
    name: &'static str,
    micro_batches: usize,
    predicted: f64,
    steps: usize,
}

fn report(
    group: &Group,
    run: Run,
    network: Network,
    digits: &Digits,
    (wall, thread, kept): (Duration, Duration, usize),
    recorder: &Recorder,
) -> Result<Report> {
    let steps = run.steps.max(1) as u32;
    let (bars, start_ms) = (recorder.take(), recorder.start_ms());
    let busy = busy_ms(&bars, group.rank() as usize) / 1e3;
    let mut own = vec![
        1.0 - busy / wall.as_secs_f64(),
        kept as f64,
        thread.as_secs_f64(),
    ];
    // The kernels of two steps, which rank 0 draws.
    let of_step = bars.len() / steps as usize;
    for bar in bars.iter().skip(run.steps / 2 * of_step).take(2 * of_step) {
        own.extend([
            f64::from(u8::from(bar.kind == BACKWARD)),
            start_ms + bar.from_ms,
            start_ms + bar.to_ms,
        ]);
    }
    let own: Vec<u8> = own.iter().flat_map(|value| value.to_le_bytes()).collect();
    let all: Vec<Vec<f64>> = gather(group, &own)?
        .iter()
        .map(|bytes| {
            bytes
                .as_chunks()
                .0
                .iter()
                .map(|bytes| f64::from_le_bytes(*bytes))
                .collect()
        })
        .collect();
    ensure!(
        all.iter().all(|values| values.len() >= 3),
        "a rank has stored too few numbers"
    );
    let mean = |at: usize| all.iter().map(|values| values[at]).sum::<f64>() / all.len() as f64;
    let bars_of = |(row, values): (usize, &Vec<f64>)| -> Vec<Bar> {
        let bar = |values: &[f64; 3]| Bar {
            row,
            kind: if values[0] > 0.0 { BACKWARD } else { "forward" }.to_owned(),
            from_ms: values[1] - start_ms,
            to_ms: values[2] - start_ms,
        };
        values[3..].as_chunks().0.iter().map(bar).collect()
    };
    Ok(Report {
        name: run.name.to_owned(),
        micro_batches: run.micro_batches,
        recognized: (network.recognized(digits), digits.held_out.len()),
        from: network.losses.len() - run.steps,
        network,
        step: wall / steps,
        thread: Duration::from_secs_f64(mean(2)) / steps,
        idle: mean(0),
        predicted: run.predicted,
        kept: all
            .iter()
            .map(|values| values[1] as usize)
            .max()
            .unwrap_or(0),
        bars: all.iter().enumerate().flat_map(bars_of).collect(),
    })
}

const BACKWARD: &str = "backward";

/// What a kernel of a part does to it and to the memory of its sums.
type PartKernel = Box<dyn FnOnce(&mut Part, &Region) + Send>;

/// What the kernels of one rank use that has a part of the neurons of each block.
struct Part {
    digits: Arc<Digits>,
    /// Of each block the neurons of this rank, and all biases.
    network: Network,
    gradients: Vec<Vec<f32>>,
    head_gradient: Vec<f32>,
    loss: f32,
    /// What the last kernel has computed.
    passed: Vec<f32>,
    /// For each block what it has computed from, and the hidden neurons.
    kept: Vec<(Vec<f32>, Vec<f32>)>,
}

impl Part {
    fn forward(&mut self, block: usize, sums: &Region) {
        let weights = &self.network.blocks[block];
        let (of_part, hidden) = Block::forward(&weights[..weights.len() - PIXELS], &self.passed);
        sums.write_values(0, &of_part)
            .expect("it has the length of a batch");
        self.kept.push((std::mem::take(&mut self.passed), hidden));
    }

    /// Behind the all-reduce.
    fn after_forward(&mut self, block: usize, sums: &Region) {
        let weights = &self.network.blocks[block];
        let images = &self.kept[block].0;
        let mut of_all = vec![0.0; images.len()];
        sums.read_values(0, &mut of_all)
            .expect("it has the length of a batch");
        self.passed = Block::output(images, &of_all, &weights[weights.len() - PIXELS..]);
    }

    fn classify(&mut self, images: &[usize]) {
        let labels = labels(&self.digits, images);
        self.passed = classify(
            &self.network.head,
            &mut self.head_gradient,
            &mut self.loss,
            &self.passed,
            &labels,
        );
    }

    fn backward(&mut self, block: usize, sums: &Region) {
        let (images, hidden) = self.kept.pop().expect("it has gone forward");
        let weights = &self.network.blocks[block];
        let neurons = &weights[..weights.len() - PIXELS];
        let (of_neurons, of_biases) = self.gradients[block].split_at_mut(neurons.len());
        Block::add_bias_gradient(of_biases, &self.passed);
        let below = Block::backward(neurons, of_neurons, &images, &hidden, &self.passed);
        sums.write_values(0, &below)
            .expect("it has the length of a batch");
    }

    fn after_backward(&mut self, sums: &Region) {
        let mut below = vec![0.0; self.passed.len()];
        sums.read_values(0, &mut below)
            .expect("it has the length of a batch");
        self.passed
            .iter_mut()
            .zip(below)
            .for_each(|(delta, below)| *delta += below);
    }

    fn update(&mut self, batch: usize, rate: f32) {
        let step = rate / batch as f32;
        for (block, gradient) in self.network.blocks.iter_mut().zip(&mut self.gradients) {
            descend(block, gradient, step);
        }
        descend(&mut self.network.head, &mut self.head_gradient, step);
        self.network.losses.push(self.loss / batch as f32);
        self.loss = 0.0;
    }
}

/// Trains with a part of each block on each rank.
fn train_tensor(group: &Group, options: &Options, digits: &Arc<Digits>) -> Result<Report> {
    let (rank, ranks) = (group.rank() as usize, group.size() as usize);
    let config = MessageConfig::default().ahead(256).endpoint(
        EndpointConfig::default()
            .wait_timeout(DEADLINE)
            .room_timeout(DEADLINE),
    );
    let mut comm = group.communicator(None, TENSOR_TAG, &config)?;
    let mut network = Network::new(options);
    let whole = network.clone();
    let share = options.hidden / ranks * NEURON;
    for block in &mut network.blocks {
        let biases = block.split_off(options.hidden * NEURON);
        *block = block[rank * share..(rank + 1) * share].to_vec();
        block.extend(biases);
    }
    let zeros = |weights: &Vec<f32>| vec![0.0; weights.len()];
    let part = Arc::new(Mutex::new(Part {
        digits: Arc::clone(digits),
        gradients: network.blocks.iter().map(zeros).collect(),
        head_gradient: zeros(&network.head),
        network,
        loss: 0.0,
        passed: Vec::new(),
        kept: Vec::new(),
    }));
    let bytes = (4 * options.batch * PIXELS) as u64;
    let sums = Region::alloc(group.domain(), bytes, Access::ALL)?;
    let in_place = sums.slice(0, bytes)?;
    let sum = Reduction::new(DataType::F32, ReduceOp::Sum);
    // Few bytes: each rank sends all of them to log n others, in an order that does not depend on the place of a number.
    let reduce: Collective = comm.all_reduce(
        &in_place,
        &in_place,
        sum,
        Some(Algorithm::RecursiveDoubling),
    )?;
    let stream = HostStream::new("part")?;
    let recorder = Arc::new(Recorder::new());
    let time = Duration::from_micros(options.kernel_us) / ranks as u32;
    let kernel = |kind: &'static str, factor: u32, work: PartKernel| {
        let (part, recorder, sums) = (Arc::clone(&part), Arc::clone(&recorder), sums.clone());
        stream.launch(move || {
            recorder.time(rank, kind, || {
                last(time * factor, || work(&mut lock(&part), &sums))
            })
        })
    };
    let ends: Vec<Event> = (0..AHEAD)
        .map(|_| Event::blocking().without_timing())
        .collect();
    group.barrier()?;
    let (begin, thread) = (Instant::now(), support::thread_time()?);
    for step in 0..options.steps {
        let end = &ends[step % AHEAD];
        end.synchronize(DEADLINE)?;
        let images = images_of(step, options, digits);
        let of_step = images.clone();
        for block in 0..options.blocks {
            let images = (block == 0).then(|| of_step.clone());
            let forward = move |part: &mut Part, sums: &Region| {
                images
                    .iter()
                    .for_each(|images| part.passed = pixels(&part.digits, images));
                part.forward(block, sums);
            };
            kernel("forward", 1, Box::new(forward))?;
            comm.launch(&stream, &reduce)?;
            let part = Arc::clone(&part);
            let sums = sums.clone();
            stream.launch(move || lock(&part).after_forward(block, &sums))?;
        }
        for block in (0..options.blocks).rev() {
            let images = (block + 1 == options.blocks).then(|| images.clone());
            let backward = move |part: &mut Part, sums: &Region| {
                images.iter().for_each(|images| part.classify(images));
                part.backward(block, sums);
            };
            kernel(BACKWARD, 2, Box::new(backward))?;
            comm.launch(&stream, &reduce)?;
            let part = Arc::clone(&part);
            let sums = sums.clone();
            stream.launch(move || lock(&part).after_backward(&sums))?;
        }
        let (part, batch, rate) = (Arc::clone(&part), options.batch, options.rate);
        stream.launch(move || lock(&part).update(batch, rate))?;
        stream.record(end)?;
    }
    stream.synchronize(DEADLINE)?;
    let wall = begin.elapsed();
    let thread = support::thread_time()? - thread;
    comm.finish(DEADLINE)?;
    // The neurons of all ranks, and what each of them has computed alike.
    let part = lock(&part);
    let own: Vec<f32> = part
        .network
        .blocks
        .concat()
        .into_iter()
        .chain(part.network.head.clone())
        .collect();
    let all: Vec<Vec<f32>> = gather(group, &bytes_of(&own))?
        .iter()
        .map(|bytes| values_of(bytes))
        .collect();
    let mut network = Network {
        losses: part.network.losses.clone(),
        ..whole
    };
    for (block, weights) in network.blocks.iter_mut().enumerate() {
        let from = block * (share + PIXELS);
        let biases = from + share..from + share + PIXELS;
        let alike = |rank: &&Vec<f32>| rank[biases.clone()] == all[0][biases.clone()];
        ensure!(
            all.iter().all(|rank| alike(&rank)),
            "the ranks have different biases"
        );
        *weights = all
            .iter()
            .flat_map(|rank| rank[from..from + share].to_vec())
            .collect();
        weights.extend(&all[0][biases]);
    }
    network.head = all[0][all[0].len() - CLASSES * CLASS..].to_vec();
    let run = Run {
        name: "tensor",
        micro_batches: 1,
        predicted: 0.0,
        steps: options.steps,
    };
    report(group, run, network, digits, (wall, thread, 1), &recorder)
}

const TENSOR_TAG: u64 = 1000;

fn print(options: &Options, reports: &[Report], ranks: u32) -> Result<()> {
    let mut text = format!(
        "{ranks} ranks, {} blocks, {} steps of {} images; forward {} us a block and batch, backward twice that\n{:<10}{:>14}{:>10}{:>15}{:>8}{:>11}{:>7}{:>18}{:>11}\n",
        options.blocks,
        options.steps,
        options.batch,
        options.kernel_us,
        "schedule",
        "micro-batches",
        "step ms",
        "CPU thread us",
        "idle",
        "predicted",
        "kept",
        "loss",
        "held out"
    );
    for report in reports {
        let of = |at: Option<&f32>| at.copied().unwrap_or(f32::NAN);
        let losses = &report.network.losses;
        let (right, all) = report.recognized;
        writeln!(
            text,
            "{:<10}{:>14}{:>10.2}{:>15.0}{:>7.1}%{:>10.1}%{:>7}{:>18}{:>10.1}%",
            report.name,
            report.micro_batches,
            report.step.as_secs_f64() * 1e3,
            report.thread.as_secs_f64() * 1e6,
            100.0 * report.idle,
            100.0 * report.predicted,
            report.kept,
            format!("{:.3} -> {:.4}", of(losses.first()), of(losses.last())),
            100.0 * right as f64 / all as f64
        )?;
    }
    std::io::stdout().write_all(text.as_bytes())?;
    if let Some(file) = &options.out {
        let bits = |values: &[f32]| -> String {
            values
                .iter()
                .map(|value| format!(" {:08x}", value.to_bits()))
                .collect()
        };
        let mut text = String::new();
        for report in reports {
            writeln!(text, "{} {}", report.name, report.micro_batches)?;
            writeln!(text, "losses{}", bits(&report.network.losses))?;
            let weights: Vec<f32> = report
                .network
                .blocks
                .iter()
                .flatten()
                .chain(&report.network.head)
                .copied()
                .collect();
            writeln!(text, "weights{}", bits(&weights))?;
            writeln!(text, "from {} kept {}", report.from, report.kept)?;
        }
        std::fs::write(file, text).with_context(|| file.display().to_string())?;
    }
    if let Some(file) = &options.svg {
        draw(file, reports, ranks as usize)?;
    }
    Ok(())
}

/// Two steps of each run, one below the other.
fn draw(file: &Path, reports: &[Report], ranks: usize) -> Result<()> {
    let (mut rows, mut bars) = (Vec::new(), Vec::new());
    for (number, report) in reports.iter().enumerate() {
        rows.extend(
            (0..ranks).map(|rank| format!("{} {}, rank {rank}", report.name, report.micro_batches)),
        );
        let of_first = report.bars.iter().filter(|bar| bar.row == 0);
        let from_ms = of_first.map(|bar| bar.from_ms).fold(f64::MAX, f64::min);
        let to_ms = from_ms + 2.0 * report.step.as_secs_f64() * 1e3;
        let shown = between(&report.bars, from_ms, to_ms).into_iter();
        bars.extend(shown.map(|bar| Bar {
            row: ranks * number + bar.row,
            ..bar
        }));
    }
    support::timeline(file, "Two steps of each run", &rows, &bars)
}
