//! Training with a part of each block on each rank.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use doorbell::{
    Access, Algorithm, Collective, DataType, EndpointConfig, Event, Executor, Group, HostStream,
    MessageConfig, ReduceOp, Reduction, Region,
};

use crate::network::{
    Block, CLASS, NEURON, Network, bytes_of, classify, descend, images_of, labels, pixels,
    values_of,
};
use crate::support::digits::{CLASSES, Digits, PIXELS};
use crate::support::{self, Recorder};
use crate::{AHEAD, BACKWARD, DEADLINE, GATHERED, Options, Report, Run, last, lock, report};

/// What a kernel of a part does to it and to the memory of its sums.
type PartKernel = Box<dyn FnOnce(&mut Part, &Region) -> doorbell::Result<()> + Send>;

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
    fn forward(&mut self, block: usize, sums: &Region) -> doorbell::Result<()> {
        let weights = &self.network.blocks[block];
        let (of_part, hidden) = Block::forward(&weights[..weights.len() - PIXELS], &self.passed);
        self.kept.push((std::mem::take(&mut self.passed), hidden));
        sums.write_values(0, &of_part)
    }

    /// Behind the all-reduce.
    fn after_forward(&mut self, block: usize, sums: &Region) -> doorbell::Result<()> {
        let weights = &self.network.blocks[block];
        let images = &self.kept[block].0;
        let mut of_all = vec![0.0; images.len()];
        sums.read_values(0, &mut of_all)?;
        self.passed = Block::output(images, &of_all, &weights[weights.len() - PIXELS..]);
        Ok(())
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

    fn backward(&mut self, block: usize, sums: &Region) -> doorbell::Result<()> {
        let (images, hidden) = self.kept.pop().expect("it has gone forward");
        let weights = &self.network.blocks[block];
        let neurons = &weights[..weights.len() - PIXELS];
        let (of_neurons, of_biases) = self.gradients[block].split_at_mut(neurons.len());
        Block::add_bias_gradient(of_biases, &self.passed);
        let below = Block::backward(neurons, of_neurons, &images, &hidden, &self.passed);
        sums.write_values(0, &below)
    }

    fn after_backward(&mut self, sums: &Region) -> doorbell::Result<()> {
        let mut below = vec![0.0; self.passed.len()];
        sums.read_values(0, &mut below)?;
        self.passed
            .iter_mut()
            .zip(below)
            .for_each(|(delta, below)| *delta += below);
        Ok(())
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
pub fn train(group: &Group, options: &Options, digits: &Arc<Digits>) -> Result<Report> {
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
    let recorder = Arc::new(Recorder::new(group.rank()));
    let time = Duration::from_micros(options.kernel_us) / ranks as u32;
    let kernel = |kind: &'static str, factor: u32, work: PartKernel| {
        let (part, recorder, sums) = (Arc::clone(&part), Arc::clone(&recorder), sums.clone());
        stream.try_launch(move || {
            recorder.time(kind, || {
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
                part.forward(block, sums)
            };
            kernel("forward", 1, Box::new(forward))?;
            comm.launch(&stream, &reduce)?;
            let part = Arc::clone(&part);
            let sums = sums.clone();
            stream.try_launch(move || lock(&part).after_forward(block, &sums))?;
        }
        for block in (0..options.blocks).rev() {
            let images = (block + 1 == options.blocks).then(|| images.clone());
            let backward = move |part: &mut Part, sums: &Region| {
                images.iter().for_each(|images| part.classify(images));
                part.backward(block, sums)
            };
            kernel(BACKWARD, 2, Box::new(backward))?;
            comm.launch(&stream, &reduce)?;
            let part = Arc::clone(&part);
            let sums = sums.clone();
            stream.try_launch(move || lock(&part).after_backward(&sums))?;
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
    let all: Vec<Vec<f32>> = group
        .store()
        .gather(&bytes_of(&own), GATHERED)?
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
