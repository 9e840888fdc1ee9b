//! A batch of the asynchronous loop as one CUDA graph.

#[cfg(feature = "cuda")]
use std::time::Duration;

#[cfg(feature = "cuda")]
use doorbell::GraphExec;
use doorbell::Result;

use super::peer::Peer;
use super::step::BenchStep;

/// The graph of the case that is being measured.
#[cfg(feature = "cuda")]
pub struct BatchGraph {
    /// Steps of a batch.
    steps: u64,
    recorded: Option<Recorded>,
}

/// No stream of this build launches graphs.
#[cfg(not(feature = "cuda"))]
pub enum BatchGraph {}

#[cfg(feature = "cuda")]
struct Recorded {
    exec: GraphExec,
    size_bytes: u64,
    kernel: Duration,
}

#[cfg(feature = "cuda")]
impl BatchGraph {
    /// Nothing recorded yet, for batches of `steps` steps.
    pub fn new(steps: u64) -> BatchGraph {
        BatchGraph {
            steps,
            recorded: None,
        }
    }

    /// Launches a whole batch with its first step, and nothing with the others: passes consist of whole batches. The first step of a new
    /// case records the graph; the stream is drained then.
    ///
    /// # Errors
    /// Those of the library.
    pub fn step(&mut self, peer: &mut Peer, step: &BenchStep) -> Result<()> {
        if !step.index.is_multiple_of(self.steps) {
            return Ok(());
        }
        let (size_bytes, kernel) = (step.size_bytes, step.kernel());
        let of_case = |graph: &Recorded| graph.size_bytes == size_bytes && graph.kernel == kernel;
        let recorded = match self.recorded.take().filter(of_case) {
            Some(recorded) => recorded,
            None => Recorded {
                exec: peer.record(step, self.steps)?,
                size_bytes,
                kernel,
            },
        };
        peer.launch_graph(&mut self.recorded.insert(recorded).exec)
    }
}

#[cfg(not(feature = "cuda"))]
impl BatchGraph {
    /// As with the feature `cuda`.
    pub fn step(&mut self, _: &mut Peer, _: &BenchStep) -> Result<()> {
        match *self {}
    }
}
