//! The measurement of one rank.

use std::collections::VecDeque;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use doorbell::{
    Access, Algorithm, Collective, CollectiveTicket, Error, Reduction, Region, StateKind,
};
use serde::{Deserialize, Serialize};

use super::super::backend::{Backend, BenchStream};
use super::super::clock::thread_cpu_time;
use super::super::kinds::Loop;
use super::contents::{BufferLens, Contents};
use super::options::{AlgorithmChoice, CollectiveCase, CollectiveOp, CollectivePlan};
use super::ranks::Rank;

/// A byte that fills an output before a check.
const UNTOUCHED: u8 = 0xa5;

/// The streams of one rank.
pub struct LoopStreams {
    synchronous: BenchStream,
    asynchronous: BenchStream,
}

impl LoopStreams {
    /// Makes them.
    ///
    /// # Errors
    /// Those of the library.
    pub fn new(backend: &Backend, rank: u32, plan: &CollectivePlan) -> Result<LoopStreams> {
        let name = |of: &str| format!("rank {rank}, {of}");
        let asynchronous = backend.stream(name("async"), ENTRIES)?;
        let synchronous = match plan.sync_by_thread {
            true => asynchronous.clone(),
            false => backend.synchronous_stream(name("sync"), ENTRIES)?,
        };
        Ok(LoopStreams {
            synchronous,
            asynchronous,
        })
    }

    fn of(&self, kind: Loop) -> &BenchStream {
        match kind {
            Loop::Sync => &self.synchronous,
            Loop::Async => &self.asynchronous,
        }
    }
}

/// Entries of a stream's queue.
const ENTRIES: usize = 1024;

/// The measurement of one rank: its memory, and what it launches.
pub struct RankMeasurement<'a> {
    rank: &'a mut Rank,
    streams: &'a LoopStreams,
    plan: &'a CollectivePlan,
    contents: Contents,
    input: Region,
    output: Region,
}

/// What a rank has found out in one case.
pub struct Measured {
    /// What goes to the other ranks.
    pub figures: Figures,
    /// What the library chose.
    pub algorithm: Algorithm,
    /// The library's prediction.
    pub predicted_us: f64,
    /// Bytes of the longest buffer, in whole elements.
    pub size_bytes: u64,
}

/// The figures of a rank in one case.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Figures {
    /// The whole measurement.
    pub elapsed_ns: u64,
    /// CPU time of the application's thread in it.
    pub cpu_ns: u64,
    /// Elements that were wrong, if they were checked.
    pub wrong: Option<u64>,
}

impl<'a> RankMeasurement<'a> {
    /// Allocates memory for the longest buffers.
    ///
    /// # Errors
    /// Those of the library.
    pub fn new(
        rank: &'a mut Rank,
        streams: &'a LoopStreams,
        plan: &'a CollectivePlan,
        contents: Contents,
    ) -> Result<RankMeasurement<'a>> {
        let lens = plan.sizes.iter().map(|bytes| contents.lens(*bytes));
        let (input, output) = lens.fold((1, 1), |(input, output), lens| {
            (lens.input.max(input), lens.output.max(output))
        });
        let domain = rank.communicator.domain();
        let region = |bytes| {
            let region = Region::alloc(domain, bytes, Access::ALL)?;
            region.fill(0, bytes, 0)?;
            Ok::<Region, Error>(region)
        };
        let (input, output) = (region(input)?, region(output)?);
        if plan.measure_costs {
            let communicator = &mut rank.communicator;
            communicator.measure_costs(
                streams.of(Loop::Async).executor(),
                None,
                Some(plan.timeout),
            )?;
        }
        Ok(RankMeasurement {
            rank,
            streams,
            plan,
            contents,
            input,
            output,
        })
    }

    /// The rank.
    pub fn rank(&self) -> &Rank {
        self.rank
    }

    /// The cases in order. Those of one size stand together, so that a reader compares neighbours.
    ///
    /// # Errors
    /// Those of the library.
    pub fn cases(&self) -> Result<Vec<CollectiveCase>> {
        let algorithms = match self.plan.algorithm {
            AlgorithmChoice::Auto => vec![None],
            AlgorithmChoice::Named(algorithm) => vec![Some(algorithm)],
            AlgorithmChoice::All => self.algorithms()?.into_iter().map(Some).collect(),
        };
        let mut cases = Vec::new();
        for &size_bytes in &self.plan.sizes {
            for &algorithm in &algorithms {
                cases.extend(self.plan.loops.iter().map(|&kind| CollectiveCase {
                    kind,
                    size_bytes,
                    algorithm,
                }));
            }
        }
        Ok(cases)
    }

    /// Those that the operation has, for this number of ranks and on this stream.
    fn algorithms(&self) -> Result<Vec<Algorithm>> {
        let lens = self.contents.lens(self.plan.sizes[0]);
        let mut found = Vec::new();
        for algorithm in Algorithm::ALL {
            match self.prepare(&lens, Some(algorithm)) {
                Ok(operation) if operation.runs_on(self.streams.of(Loop::Async).executor()) => {
                    found.push(algorithm)
                }
                Ok(_)
                | Err(Error::State {
                    kind: StateKind::Unsupported,
                    ..
                }) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(found)
    }

    fn prepare(
        &self,
        lens: &BufferLens,
        algorithm: Option<Algorithm>,
    ) -> doorbell::Result<Collective> {
        let plan = self.plan;
        let communicator = &self.rank.communicator;
        let input = self.input.slice(0, lens.input)?;
        let output = self.output.slice(0, lens.output)?;
        let (root, reduction) = (plan.root, Reduction::new(plan.data, plan.reduce));
        let is_root = communicator.rank() == root;
        match plan.op {
            CollectiveOp::Barrier => communicator.barrier(algorithm),
            CollectiveOp::Broadcast => communicator.broadcast(&output, root, algorithm),
            CollectiveOp::Gather => {
                let output = is_root.then_some(&output);
                communicator.gather(&input, output, &lens.blocks, root, algorithm)
            }
            CollectiveOp::Scatter => {
                let input = is_root.then_some(&input);
                communicator.scatter(input, &output, &lens.blocks, root, algorithm)
            }
            CollectiveOp::AllGather => {
                let input = (!plan.in_place).then_some(&input);
                communicator.all_gather(input, &output, &lens.blocks, algorithm)
            }
            CollectiveOp::AllToAll => communicator.all_to_all(&input, &output, algorithm),
            CollectiveOp::Reduce => {
                let output = is_root.then_some(&output);
                communicator.reduce(&input, output, reduction, root, algorithm)
            }
            CollectiveOp::ReduceScatter => {
                communicator.reduce_scatter(&input, &output, &lens.blocks, reduction, algorithm)
            }
            CollectiveOp::AllReduce if plan.in_place => {
                communicator.all_reduce(&output, &output, reduction, algorithm)
            }
            CollectiveOp::AllReduce => {
                communicator.all_reduce(&input, &output, reduction, algorithm)
            }
        }
    }

    /// Measures a case, and checks its result if the plan says so.
    ///
    /// # Errors
    /// Those of the library.
    pub fn measure(&mut self, case: CollectiveCase) -> Result<Measured> {
        let lens = self.contents.lens(case.size_bytes);
        let mut operation = self.prepare(&lens, case.algorithm)?;
        if self.plan.matched {
            let timeout = Some(self.plan.timeout);
            self.rank
                .communicator
                .match_ahead(&mut operation, timeout)?;
        }
        // Without it floats would become infinite from one launch in place to the next, and slow to add on some processors.
        self.output.fill(0, self.output.len_bytes(), 0)?;
        let in_flight = match case.kind {
            Loop::Sync => 1,
            Loop::Async => self.plan.in_flight as usize,
        };
        let stream = self.streams.of(case.kind);
        self.launch_many(stream, &operation, self.plan.warmup, in_flight)?;
        let barrier = self.rank.communicator.barrier(None)?;
        self.launch_many(stream, &barrier, 1, 1)?;
        let (start, cpu) = (Instant::now(), thread_cpu_time()?);
        self.launch_many(stream, &operation, self.plan.iterations, in_flight)?;
        let (elapsed, cpu) = (start.elapsed(), thread_cpu_time()? - cpu);
        let wrong = match self.plan.check {
            true => Some(self.check(stream, &operation, &lens)?),
            false => None,
        };
        Ok(Measured {
            figures: Figures {
                elapsed_ns: elapsed.as_nanos() as u64,
                cpu_ns: cpu.as_nanos() as u64,
                wrong,
            },
            algorithm: operation.algorithm(),
            predicted_us: operation.predicted_ns() / 1e3,
            size_bytes: lens.whole,
        })
    }

    /// Launches an operation so many times, with at most `in_flight` at a time, and waits for all.
    fn launch_many(
        &mut self,
        stream: &BenchStream,
        operation: &Collective,
        times: u64,
        in_flight: usize,
    ) -> Result<()> {
        let mut tickets: VecDeque<CollectiveTicket> = VecDeque::with_capacity(in_flight);
        for _ in 0..times {
            if tickets.len() == in_flight
                && let Some(oldest) = tickets.pop_front()
            {
                self.wait(&oldest)?;
            }
            let communicator = &mut self.rank.communicator;
            tickets.push_back(communicator.launch(stream.executor(), operation)?);
        }
        tickets.iter().try_for_each(|ticket| self.wait(ticket))
    }

    fn wait(&self, ticket: &CollectiveTicket) -> Result<()> {
        ticket.wait(Some(self.plan.timeout))?;
        Ok(())
    }

    /// Launches the operation once more with known contents. Returns how many elements are wrong.
    fn check(
        &mut self,
        stream: &BenchStream,
        operation: &Collective,
        lens: &BufferLens,
    ) -> Result<u64> {
        let in_place = self.plan.in_place;
        let given = self.contents.given(lens, in_place);
        self.output.fill(0, lens.output, UNTOUCHED)?;
        let is_in_output = in_place || self.plan.op == CollectiveOp::Broadcast;
        let from = if is_in_output {
            &self.output
        } else {
            &self.input
        };
        from.write(0, &given)?;
        self.launch_many(stream, operation, 1, 1)?;
        let mut found = vec![0; lens.output as usize];
        self.output.read(0, &mut found)?;
        let expected = self.contents.expected(lens);
        let mut wrong = self.contents.differing(&found, &expected);
        if !is_in_output {
            let mut input = vec![0; lens.input as usize];
            self.input.read(0, &mut input)?;
            wrong += self.contents.differing(&input, &given);
        }
        Ok(wrong)
    }

    /// Waits until the peers have everything.
    ///
    /// # Errors
    /// Those of the library.
    pub fn finish(self) -> Result<()> {
        let timeout = Some(self.plan.timeout);
        for kind in [Loop::Sync, Loop::Async] {
            let stream = self.streams.of(kind).executor();
            stream.synchronize(timeout).context("the rank's stream")?;
        }
        self.rank.communicator.finish(timeout)?;
        ensure!(
            self.rank.communicator.failure().is_none(),
            "the communicator has failed"
        );
        Ok(())
    }
}
