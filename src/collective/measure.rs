//! Measures what messages and work on memory cost, for the choice of algorithms.

use std::time::{Duration, Instant};

use super::algorithms::Algorithm;
use super::communicator::{Collective, Communicator};
use super::costs::CollectiveCosts;
use super::reduction::{DataType, ReduceOp, Reduction};
use super::schedule::{MemoryStep, Operand, OperandSpan, Schedule};
use super::ticket::CollectiveTicket;
use crate::region::Slice;
use crate::stream::Executor;
use crate::{Error, Result};

/// Of messages and reductions, in bytes.
const SHORT: u64 = 8;
const LONG: u64 = 1 << 20;
/// Operations that are queued together, and how often. The fastest time counts: others have waited for a processor.
const BATCH: u32 = 8;
const BATCHES: u32 = 12;

/// What every rank has measured, in nanoseconds: a short message and a long one, a short reduction and a long one. Zeros where it has not.
type MeasuredTimes = [f64; 4];

impl Communicator {
    /// Measures the costs that algorithms are chosen by, and sets them. All ranks call this at the same time, each with a stream of the kind that will carry the operations out. Two ranks each
    /// exchange messages of 8 bytes and of 1 MiB, and each reduces as much of its own. Of each time the longest one of all ranks counts, so all have the same costs afterwards. The memory for it
    /// is of the GPU if that of `beside` is. A stream that cannot reduce leaves `work_ns` at its default, and so does a single rank the costs of messages.
    ///
    /// Waits for at most `timeout`; `None` waits for ever.
    ///
    /// # Errors
    /// As [`Communicator::launch`]; those of [`Region::alloc`](crate::Region::alloc); [`Error::Timeout`]. The communicator is aborted then.
    pub fn measure_costs(
        &mut self,
        stream: &dyn Executor,
        beside: Option<&Slice<'_>>,
        timeout: Option<Duration>,
    ) -> Result<CollectiveCosts> {
        let end = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let left = || end.map(|end| end.saturating_duration_since(Instant::now()));
        let measured = self
            .times(stream, beside, &left)
            .and_then(|own| self.longest(own, &left));
        let times = measured.map_err(|error| {
            self.abort();
            match error {
                Error::Timeout { .. } => Error::Timeout {
                    operation: "the measurement of costs",
                    timeout: timeout.unwrap_or_default(),
                },
                error => error,
            }
        })?;
        let costs = costs_of(times);
        self.set_costs(costs);
        Ok(costs)
    }

    fn times(
        &mut self,
        stream: &dyn Executor,
        beside: Option<&Slice<'_>>,
        left: &dyn Fn() -> Option<Duration>,
    ) -> Result<MeasuredTimes> {
        let memory = self.scratch(2 * LONG, super::communicator::between(), beside)?;
        let partner = Some(self.rank() ^ 1).filter(|partner| *partner < self.size());
        let mut times = [0.0; 4];
        for (at, len) in [SHORT, LONG].into_iter().enumerate() {
            let [from, into] = [memory.slice(0, len)?, memory.slice(LONG, len)?];
            if let Some(partner) = partner {
                let exchange = self.exchange(&[(partner, from)], &[(partner, into)])?;
                times[at] = self.fastest(stream, &exchange, left)?;
            }
            let reduce = self.local_reduction(&from, &into)?;
            if reduce.runs_on(stream) {
                times[2 + at] = self.fastest(stream, &reduce, left)?;
            }
        }
        Ok(times)
    }

    /// A reduction of this rank alone.
    fn local_reduction(&self, from: &Slice<'_>, into: &Slice<'_>) -> Result<Collective> {
        let span = |place| OperandSpan::new(place, 0, from.len_bytes.into());
        let mut schedule = Schedule::default();
        schedule.then(MemoryStep::Reduce {
            first: span(Operand::Output),
            second: span(Operand::Input),
            into: span(Operand::Output),
        });
        let reduction = Reduction::new(DataType::I32, ReduceOp::Sum);
        let algorithm = Algorithm::Linear;
        self.prepared_alone("measure", algorithm, schedule, reduction, (from, into))
    }

    /// The time of an operation in nanoseconds, among several that are queued together.
    fn fastest(
        &mut self,
        stream: &dyn Executor,
        collective: &Collective,
        left: &dyn Fn() -> Option<Duration>,
    ) -> Result<f64> {
        let mut fastest = f64::INFINITY;
        for _ in 0..BATCHES {
            let began = Instant::now();
            let mut last = None;
            for _ in 0..BATCH {
                let launched = match (self.launch(stream, collective), &last) {
                    // A queue that is shorter than the batch.
                    (Err(Error::QueueFull { .. }), Some(before)) => {
                        let before: &CollectiveTicket = before;
                        before.wait(left())?;
                        self.launch(stream, collective)
                    }
                    (launched, _) => launched,
                };
                last = Some(launched?);
            }
            if let Some(last) = last {
                last.wait(left())?;
            }
            fastest = fastest.min(began.elapsed().as_nanos() as f64 / f64::from(BATCH));
        }
        Ok(fastest)
    }

    /// Of each time the longest of all ranks.
    fn longest(
        &mut self,
        own: MeasuredTimes,
        left: &dyn Fn() -> Option<Duration>,
    ) -> Result<MeasuredTimes> {
        let bytes: Vec<u8> = own.iter().flat_map(|time| time.to_le_bytes()).collect();
        let expected = vec![bytes.len(); self.size() as usize];
        let told = vec![bytes; self.size() as usize];
        for queue in self.queues.iter_mut().flatten() {
            queue.await_streams(left())?;
        }
        let mut longest = own;
        for heard in self.swap(&told, &expected, left)?.into_iter().flatten() {
            let times = heard.unwrap_or_default();
            let times = times
                .as_chunks()
                .0
                .iter()
                .map(|time| f64::from_le_bytes(*time));
            for (own, other) in longest.iter_mut().zip(times) {
                *own = own.max(other);
            }
        }
        Ok(longest)
    }
}

/// The costs behind those times.
fn costs_of([message, long_message, work, long_work]: MeasuredTimes) -> CollectiveCosts {
    let mut costs = CollectiveCosts::default();
    let by_byte = |short: f64, long: f64| ((long - short) / (LONG - SHORT) as f64).max(0.0);
    if message > 0.0 {
        costs = costs
            .latency_ns(message)
            .byte_ns(by_byte(message, long_message));
    }
    if work > 0.0 {
        costs = costs.work_ns(by_byte(work, long_work));
    }
    costs
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn costs_are_those_of_the_times() {
        let long = (LONG - SHORT) as f64;
        let costs = costs_of([2000.0, 2000.0 + long / 4.0, 100.0, 100.0 + long / 2.0]);
        assert_eq!(
            (costs.latency_ns, costs.byte_ns, costs.work_ns),
            (2000.0, 0.25, 0.5)
        );
        // What was not measured stays; and no time is less than none.
        let default = CollectiveCosts::default();
        assert_eq!(costs_of([0.0; 4]), default);
        let costs = costs_of([2000.0, 1000.0, 0.0, 0.0]);
        assert_eq!(
            (costs.latency_ns, costs.byte_ns, costs.work_ns),
            (2000.0, 0.0, default.work_ns)
        );
    }
}
