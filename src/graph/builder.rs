//! [`GraphBuilder`]: records the operations of a graph.
#![allow(unsafe_code)] // takes a graph that the application owns

use std::fmt;
use std::time::Duration;

use cudarc::driver::sys::{CUgraph, CUgraphNode};

use super::GraphExec;
use super::step::GraphStep;
use crate::cuda::{CudaStream, Draft};
use crate::endpoint::{Condition, Control, Endpoint, OperationTemplate, Prepared, QueueKind, Work};
use crate::region::{Region, Slice};
use crate::stream::Submission;
use crate::{Error, Result, StateKind};

/// Records operations into a CUDA graph.
///
/// - Operations come one after the other in the graph, in the order in which they are recorded; the captured stream, or
///   [`GraphBuilder::after`], determines what else they depend on.
/// - Recording prepares the operations, so it returns the errors of preparing, and the queues need room. The first launch uses what was
///   prepared; until it, nothing else can be posted to those queues. Dropping the builder, or a [`GraphExec`] that is not launched, cancels it
///   as dropping [`Prepared`] does; [`GraphExec::disarm`] leaves no trace.
/// - While a stream is captured, the library's other calls refuse it ([`Error::State`]): what they queue would be repeated with stale values.
///   [`CudaStream::launch_host`] does so too, for the driver would call the function again with each launch.
///
/// A builder stays in its thread, as the driver requires for captures.
///
/// ```no_run
/// use doorbell::{CudaContext, CudaStream, Endpoint, GraphBuilder, Result, QueueKind, Work};
///
/// fn steps(stream: &CudaStream, endpoint: &mut Endpoint, work: &Work<'_>) -> Result<()> {
///     let mut graph = GraphBuilder::capture(stream)?;
///     // A kernel that makes the data is launched on `stream.raw()` here, as always.
///     graph.send(endpoint, work)?;
///     graph.wait_cq(endpoint, QueueKind::Send)?;
///     let mut graph = graph.instantiate()?;
///     for _ in 0..1000 {
///         graph.launch(stream, &mut [&mut *endpoint])?;
///     }
///     Ok(())
/// }
/// ```
pub struct GraphBuilder {
    draft: Draft,
    steps: Vec<GraphStep>,
    /// The prepared operations of the steps that belong to endpoints, in order.
    armed: Vec<Prepared>,
}

impl GraphBuilder {
    /// Begins to capture a stream (`cuStreamBeginCapture`, thread-local mode): everything that is queued on it from now on is in the graph.
    ///
    /// # Errors
    /// [`Error::Cuda`], for example if it is being captured already.
    pub fn capture(stream: &CudaStream) -> Result<GraphBuilder> {
        Ok(Self::new(Draft::capture(stream)?))
    }

    /// Adds nodes to a graph that the application makes. `stream` is one of the context that the nodes will run in.
    ///
    /// # Safety
    /// `graph` is a graph, and lives, with the nodes that are added to it, until the builder and its [`GraphExec`] are dropped and the last
    /// launch is done.
    pub unsafe fn over(stream: &CudaStream, graph: CUgraph) -> GraphBuilder {
        // SAFETY: promised by the caller.
        Self::new(unsafe { Draft::over(stream, graph) })
    }

    fn new(draft: Draft) -> GraphBuilder {
        GraphBuilder {
            draft,
            steps: Vec::new(),
            armed: Vec::new(),
        }
    }

    /// Makes the next operation depend on these nodes as well. For [`GraphBuilder::over`].
    ///
    /// # Errors
    /// [`Error::State`] if a stream is captured: then the order of the stream applies.
    pub fn after(&mut self, nodes: &[CUgraphNode]) -> Result<()> {
        self.draft.after(nodes)
    }

    /// The node of the last operation, so that other nodes can depend on it. Operations that do not wait share nodes with those before;
    /// after this call the next one has a new node.
    pub fn last_node(&mut self) -> Option<CUgraphNode> {
        self.draft.last_node()
    }

    /// Adds a send, write, read or atomic. It has the same data segments, address and immediate data with each launch; inline bytes are copied now.
    ///
    /// # Errors
    /// Those of [`Endpoint::prepare_send`]; [`Error::State`] for an endpoint whose doorbells the calling thread rings
    /// ([`Control::Sync`]), and for what the device's streams lack; [`Error::Cuda`]. Nothing was recorded then.
    pub fn send(&mut self, endpoint: &mut Endpoint, work: &Work<'_>) -> Result<()> {
        self.post(endpoint, OperationTemplate::send(work))
    }

    /// Adds a receive.
    ///
    /// # Errors
    /// As [`GraphBuilder::send`], with those of [`Endpoint::prepare_recv`].
    pub fn recv(
        &mut self,
        endpoint: &mut Endpoint,
        wr_id: u64,
        slices: &[Slice<'_>],
    ) -> Result<()> {
        self.post(endpoint, OperationTemplate::recv(wr_id, slices))
    }

    /// Adds a wait for the next completion of a queue: the next one at the time of each launch. It must be the completion of work that the graph
    /// or the application has posted before.
    ///
    /// # Errors
    /// As [`GraphBuilder::send`], with those of [`Endpoint::prepare_wait_cq`].
    pub fn wait_cq(&mut self, endpoint: &mut Endpoint, kind: QueueKind) -> Result<()> {
        let timeout = endpoint.config().wait_timeout;
        self.wait_cq_for(endpoint, kind, timeout)
    }

    /// [`GraphBuilder::wait_cq`] with its own deadline, which counts from when the graph reaches the wait; `None` means no deadline.
    ///
    /// # Errors
    /// As [`GraphBuilder::wait_cq`].
    pub fn wait_cq_for(
        &mut self,
        endpoint: &mut Endpoint,
        kind: QueueKind,
        timeout: Option<Duration>,
    ) -> Result<()> {
        self.post(endpoint, OperationTemplate::Wait { kind, timeout })
    }

    /// Adds a wait for a word: [`stream_wait_value32`](crate::stream_wait_value32). The value is the same with each launch.
    ///
    /// # Errors
    /// Those of [`stream_wait_value32`](crate::stream_wait_value32).
    pub fn wait_value32(
        &mut self,
        region: &Region,
        offset: u64,
        condition: Condition,
        timeout: Option<Duration>,
    ) -> Result<()> {
        self.value(GraphStep::Wait {
            region: region.clone(),
            offset,
            condition,
            timeout,
        })
    }

    /// Adds a store to a word: [`stream_write_value32`](crate::stream_write_value32).
    ///
    /// # Errors
    /// Those of [`stream_write_value32`](crate::stream_write_value32).
    pub fn write_value32(&mut self, region: &Region, offset: u64, value: u32) -> Result<()> {
        self.value(GraphStep::Write {
            region: region.clone(),
            offset,
            value,
        })
    }

    /// Ends the recording. The graph is armed for its first launch.
    ///
    /// # Errors
    /// [`Error::Cuda`], for example if the capture was broken off, or its streams were not joined.
    pub fn instantiate(self) -> Result<GraphExec> {
        let exec = self.draft.instantiate()?;
        Ok(GraphExec::new(exec, self.steps, self.armed))
    }

    fn post(&mut self, endpoint: &mut Endpoint, recipe: OperationTemplate) -> Result<()> {
        if endpoint.path().control == Control::Sync {
            return Err(Error::state(
                StateKind::Unsupported,
                "GraphBuilder",
                "the endpoint uses the path `sync`, whose doorbells are rung by the calling thread; graphs need another path",
            ));
        }
        let prepared = recipe.prepare(endpoint)?;
        if let Err(error) = self.draft.add(prepared.submission_for_graph()) {
            endpoint.rollback(prepared);
            return Err(error);
        }
        self.armed.push(prepared);
        self.steps.push(GraphStep::post(endpoint, recipe));
        Ok(())
    }

    fn value(&mut self, step: GraphStep) -> Result<()> {
        if let Some(made) = step.value() {
            let (submission, _): (Submission, _) = made?;
            self.draft.add(submission)?;
            self.steps.push(step);
        }
        Ok(())
    }
}

impl fmt::Debug for GraphBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GraphBuilder")
            .field("stream", self.draft.stream())
            .field("operations", &self.steps.len())
            .finish_non_exhaustive()
    }
}
