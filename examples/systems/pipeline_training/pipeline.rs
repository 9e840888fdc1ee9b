//! A pipeline of stages, each of which has some of the blocks, and its checkpoints.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use doorbell::{
    Access, EndpointConfig, Event, Executor, Group, HostStream, MessageConfig, MessageQueue, Region,
};

use crate::network::{
    Block, Network, bytes_of, classify, descend, images_of, labels, pixels, values_of,
};
use crate::support::digits::{Digits, PIXELS};
use crate::support::{self, Recorder};
use crate::{
    AHEAD, BACKWARD, DEADLINE, GATHERED, Moment, OnLoss, Options, Report, Run, Schedule, last,
    lock, named, report,
};

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

/// A neighbour in the pipeline: activations go one way, derivatives the other one. There is memory for each micro-batch.
struct Neighbour {
    queue: MessageQueue,
    sent: Region,
    received: Region,
}

/// A rank of the pipeline.
pub struct Pipeline {
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
    pub fn new(
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
            recorder: Arc::new(Recorder::new(group.rank())),
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
            false => (&mut self.after, &mut self.before, BACKWARD, 2),
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
        let time = self.kernel_time * factor;
        self.stream.try_launch(move || {
            recorder.time(kind, || {
                last(time, || {
                    let mut values = vec![0.0; width];
                    if let Some(received) = received {
                        received.read_values(at, &mut values)?;
                    }
                    let values = work(&mut lock(&stage), values);
                    sent.map_or(Ok(()), |sent| sent.write_values(at, &values))
                })
            })
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
    pub fn train(&mut self, group: &Group, options: &Options) -> Result<Report> {
        let ends: Vec<Event> = (0..AHEAD)
            .map(|_| Event::blocking().without_timing())
            .collect();
        let first = lock(&self.stage).network.losses.len();
        let digits = Arc::clone(&lock(&self.stage).digits);
        group.barrier()?;
        self.recorder = Arc::new(Recorder::new(group.rank()));
        let (begin, thread) = (Instant::now(), support::thread_time()?);
        for step in first..options.steps {
            let end = &ends[step % AHEAD];
            end.synchronize(DEADLINE)?;
            let is_killed = |moment| {
                let is_now = options.kill == [self.rank, step] && options.kill_at == moment;
                self.is_first_try && is_now
            };
            let [in_kernel, in_save] = [Moment::Kernel, Moment::Save].map(is_killed);
            self.step(&images_of(step, options, &digits), options, in_kernel)?;
            self.stream.record(end)?;
            if let Some(folder) = &options.checkpoint
                && (step + 1) % options.every == 0
            {
                self.stream.synchronize(DEADLINE)?;
                if in_save {
                    // By then the others have saved their weights, and wait for those of this rank.
                    std::thread::sleep(Duration::from_secs(1));
                    support::kill_myself();
                }
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
        // The files have their names durably when their folder is written, and the folder when the one around it is.
        for folder in [&own, folder] {
            sync_folder(folder)?;
        }
        group.barrier()?;
        if stage.is_first {
            write_durably(&folder.join("latest"), steps.to_string().as_bytes())?;
            sync_folder(folder)?;
        }
        Ok(())
    }
}

/// Sends of a step, and whether they go forward.
type Sends = Vec<(bool, doorbell::PendingSend)>;

/// Writes the names in a folder to its disk.
fn sync_folder(folder: &Path) -> Result<()> {
    let sync = || std::fs::File::open(folder)?.sync_all();
    sync().with_context(|| folder.display().to_string())
}

/// Writes a file that is there as a whole or not at all, also if the host loses power. Its name is durable when its folder is written, too.
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
pub fn with_checkpoints(
    group: &mut Group,
    options: &Options,
    digits: &Arc<Digits>,
) -> Result<Report> {
    let folder = options.checkpoint.as_ref().context("no folder")?;
    let count = options.micro_batches.first().copied().unwrap_or(1);
    let mut is_first_try = true;
    loop {
        let network = load(folder, options)?;
        let from = network.losses.len();
        ensure!(
            from <= options.steps,
            "the checkpoint in {} has {from} steps, which are more than --steps {}",
            folder.display(),
            options.steps
        );
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
    let all = group.store().gather(&bytes_of(&own), GATHERED)?;
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
