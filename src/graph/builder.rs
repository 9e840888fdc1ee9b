//! [`GraphBuilder`]: records the operations of a graph.
#![allow(unsafe_code)] // takes a graph that the application owns

use std::fmt;
use std::time::Duration;

use cudarc::driver::sys::{CUgraph, CUgraphNode};

use super::GraphExec;
use super::member::{GraphMember, Members};
use super::step::{GraphStep, MessageStep, StepReport};
use crate::collective::{Collective, Communicator};
use crate::cuda::{CudaStream, Draft};
use crate::endpoint::{
    Condition, Control, Endpoint, OperationTemplate, OwnedSlices, QueueKind, Work,
};
use crate::message::{MessageQueue, Recording};
use crate::region::{Region, Slice};
use crate::{Error, Result, StateKind};

/// Records operations into a CUDA graph.
///
/// - Operations come one after the other in the graph, in the order in which they are recorded; the captured stream, or
///   [`GraphBuilder::after`], determines what else they depend on.
/// - Recording prepares the operations, so it returns the errors of preparing, and the queues need room. The first launch uses what was
///   prepared; until it, nothing else can be posted to those queues. Dropping the builder, or a [`GraphExec`] that is not launched, cancels it
///   as dropping [`Prepared`](crate::Prepared) does; [`GraphExec::disarm`] leaves no trace of what is the newest of its queue.
/// - Messages and collective operations take their slots and numbers when they are prepared, as if they were sent then. So a builder or a [`GraphExec`] that is dropped with
///   such operations prepared aborts the connections; disarm it before. Each launch waits for a free slot for each message that it sends, and for the completions of the
///   credits that it gives, so it executes the same operations each time.
/// - If a message or a collective operation could be recorded only in part, [`GraphBuilder::instantiate`] returns that error.
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
    /// The operations for the first launch.
    recording: Recording,
    reports: Vec<StepReport>,
    /// How many of the recording's operations, and of its other programs, have nodes.
    added: (usize, usize),
    broken: Option<Error>,
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
            recording: Recording::default(),
            reports: Vec::new(),
            added: (0, 0),
            broken: None,
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
        self.post(endpoint, OperationTemplate::send(work)?)
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
        let region = region.clone();
        let step = GraphStep::Wait {
            region,
            offset,
            condition,
            timeout,
        };
        self.add(step, &mut [])
    }

    /// Adds a store to a word: [`stream_write_value32`](crate::stream_write_value32).
    ///
    /// # Errors
    /// Those of [`stream_write_value32`](crate::stream_write_value32).
    pub fn write_value32(&mut self, region: &Region, offset: u64, value: u32) -> Result<()> {
        let region = region.clone();
        let step = GraphStep::Write {
            region,
            offset,
            value,
        };
        self.add(step, &mut [])
    }

    /// Adds a message, and a wait until its memory may be used again: [`MessageQueue::send`]. It has the same memory with each launch, and its contents of then.
    ///
    /// # Errors
    /// Those of [`MessageQueue::send`]; [`Error::State`] for a queue on the path [`Control::Sync`]; [`Error::Cuda`]. Nothing was recorded then, unless the error came while
    /// nodes were added, as those of the driver do and those of memory that the GPU cannot reach: then all that was recorded of the queue is taken back, and the builder can only be dropped.
    pub fn send_message(&mut self, queue: &mut MessageQueue, slices: &[Slice<'_>]) -> Result<()> {
        self.message(queue, MessageStep::Send(OwnedSlices::of(slices)))
    }

    /// Adds a message, and no wait: [`MessageQueue::start_send`]. [`GraphBuilder::wait_messages`] adds that, or the next [`GraphBuilder::send_message`] of the queue, or the end of the graph.
    ///
    /// # Errors
    /// As [`GraphBuilder::send_message`].
    pub fn start_message(&mut self, queue: &mut MessageQueue, slices: &[Slice<'_>]) -> Result<()> {
        self.message(queue, MessageStep::Start(OwnedSlices::of(slices)))
    }

    /// Adds the waits for all messages of the queue that were started and have none.
    ///
    /// # Errors
    /// As [`GraphBuilder::send_message`].
    pub fn wait_messages(&mut self, queue: &mut MessageQueue) -> Result<()> {
        self.message(queue, MessageStep::Wait)
    }

    /// Adds a receive: [`MessageQueue::recv`].
    ///
    /// # Errors
    /// As [`GraphBuilder::send_message`], with those of [`MessageQueue::recv`].
    pub fn recv_message(&mut self, queue: &mut MessageQueue, slices: &[Slice<'_>]) -> Result<()> {
        self.message(queue, MessageStep::Recv(OwnedSlices::of(slices)))
    }

    /// Adds a collective operation, whose memory stays the same: [`Communicator::launch`]. All ranks launch it as often, and in the same order among their
    /// operations, in graphs or not.
    ///
    /// # Errors
    /// Those of [`Communicator::launch`]; [`Error::State`] for a communicator on the path [`Control::Sync`]; [`Error::Cuda`]. If a part was recorded, or the driver refused a
    /// node, all that was recorded of the communicator is taken back, and the builder can only be dropped.
    pub fn collective(
        &mut self,
        communicator: &mut Communicator,
        operation: &Collective,
    ) -> Result<()> {
        let step = GraphStep::Collective {
            communicator: communicator.id(),
            operation: Box::new(operation.clone()),
        };
        self.add(step, &mut [communicator])
    }

    /// Ends the recording. The graph is armed for its first launch.
    ///
    /// The driver may wait until all work of the context that is queued is done, and let no other thread use the GPU meanwhile: that of ranks which share the context, too,
    /// so they instantiate before any of their streams waits for another one.
    ///
    /// # Errors
    /// [`Error::Cuda`], for example if the capture was broken off, or its streams were not joined; the error of an operation of which a part was recorded.
    /// Message queues and communicators that were recorded are aborted then.
    pub fn instantiate(mut self) -> Result<GraphExec> {
        if let Some(error) = self.broken {
            return Err(error);
        }
        self.recording.finish();
        self.add_nodes()?;
        let stream = self.draft.stream().clone();
        let exec = self.draft.instantiate()?;
        Ok(GraphExec::new(
            exec,
            stream,
            self.steps,
            self.recording,
            self.reports,
        ))
    }

    fn post(&mut self, endpoint: &mut Endpoint, recipe: OperationTemplate) -> Result<()> {
        endpoint.check_reliable("GraphBuilder")?;
        if endpoint.path().control == Control::Sync {
            return Err(Error::state(
                StateKind::Unsupported,
                "GraphBuilder",
                "the endpoint uses the path `sync`, whose doorbells are rung by the calling thread; graphs need another path",
            ));
        }
        let endpoint_id = endpoint.id();
        let step = GraphStep::Post {
            endpoint: endpoint_id,
            recipe,
        };
        self.add(step, &mut [endpoint])
    }

    fn message(&mut self, queue: &mut MessageQueue, step: MessageStep) -> Result<()> {
        let id = queue.id();
        let step = GraphStep::Message { queue: id, step };
        self.add(step, &mut [queue])
    }

    /// Records a step, with what it belongs to, and adds its nodes.
    fn add(&mut self, step: GraphStep, members: &mut [&mut dyn GraphMember]) -> Result<()> {
        if let Some(error) = &self.broken {
            return Err(error.clone());
        }
        let stream = self.draft.stream().clone();
        let (recording, reports) = (&mut self.recording, &mut self.reports);
        let recorded = step.record(members, &stream, recording, reports);
        if let Err((error, has_begun)) = recorded {
            if has_begun {
                self.recording.take_back(&mut Members(members));
                self.broken = Some(error.clone());
            }
            return Err(error);
        }
        let before = self.added;
        if let Err(error) = self.add_nodes() {
            let is_one = matches!(
                step,
                GraphStep::Post { .. } | GraphStep::Wait { .. } | GraphStep::Write { .. }
            );
            if is_one && self.added == before {
                // The newest, so that it leaves no trace.
                self.recording.take_back_last(before, &mut Members(members));
                self.reports.pop();
            } else {
                self.recording.take_back(&mut Members(members));
                self.broken = Some(error.clone());
            }
            return Err(error);
        }
        self.steps.push(step);
        Ok(())
    }

    /// Adds nodes for what has none.
    fn add_nodes(&mut self) -> Result<()> {
        loop {
            let batch = &self.recording.batch;
            let (operations, others) = self.added;
            let other = batch.others.get(others);
            let other = other.filter(|(before, _)| *before <= operations);
            if let Some((_, other)) = other {
                self.draft.add(other.clone())?;
                self.added.1 += 1;
            } else if let Some(prepared) = batch.prepared.get(operations) {
                self.draft.add(prepared.submission_for_graph())?;
                self.added.0 += 1;
            } else {
                return Ok(());
            }
        }
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
