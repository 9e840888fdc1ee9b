//! What a collective operation costs, by which algorithms are chosen.

use super::schedule::{MemoryStep, Schedule};

/// Costs of messages and of work on memory, for the choice of an algorithm. The predicted time of an operation is the sum over its rounds: the latency for each message that the rank
/// sends or receives, whichever are more, the time of the longer of both directions' bytes, and the time of copies and reductions.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct CollectiveCosts {
    /// Of a message without data, in nanoseconds.
    pub latency_ns: f64,
    /// Of a byte of a message, in nanoseconds.
    pub byte_ns: f64,
    /// Of a byte of a result of a reduction, or of a copy, in nanoseconds.
    pub work_ns: f64,
}

setters!(CollectiveCosts {
    latency_ns: f64,
    byte_ns: f64,
    work_ns: f64,
});

impl Default for CollectiveCosts {
    /// Those of no measurement: 3 us a message, 10 GB/s on the wire, 5 GB/s of memory.
    fn default() -> CollectiveCosts {
        CollectiveCosts {
            latency_ns: 3000.0,
            byte_ns: 0.1,
            work_ns: 0.2,
        }
    }
}

impl CollectiveCosts {
    pub(super) fn predicted_ns(&self, schedule: &Schedule) -> f64 {
        let of_round = |round: &super::schedule::Round| {
            let bytes = |transfers: &[super::schedule::Transfer]| {
                transfers.iter().map(|it| it.span.len).sum::<u64>()
            };
            let messages = round.sends.len().max(round.receives.len()) as f64;
            let bytes = bytes(&round.sends).max(bytes(&round.receives)) as f64;
            let work = round.then.iter().map(|step| match step {
                MemoryStep::Copy { into, .. } | MemoryStep::Reduce { into, .. } => into.len,
                MemoryStep::Divide { span } => span.len,
            });
            let work = work.sum::<u64>() as f64;
            messages * self.latency_ns + bytes * self.byte_ns + work * self.work_ns
        };
        schedule.rounds.iter().map(of_round).sum()
    }
}
