//! [`GraphExec`]: launches a recorded graph.

use std::fmt;
use std::sync::Arc;

use cudarc::driver::sys::CUgraphExec;

use super::step::GraphStep;
use crate::cuda::{CudaStream, InstantiatedGraph};
use crate::endpoint::{Endpoint, Prepared, Ticket, graph_post_all};
use crate::stream::Executor;
use crate::{Error, Result, StateKind};

/// A graph that is launched again and again: recorded by a [`GraphBuilder`](crate::GraphBuilder).
///
/// A launch needs its operations prepared: [`GraphExec::launch`] does both; [`GraphExec::arm`] prepares ahead, while what was launched before
/// is still running, and [`GraphExec::launch_armed`] launches that. The driver executes the launches of one graph one after the other, on
/// whatever streams. How many can be queued depends on the room in the endpoints' queues.
///
/// If it is dropped while launches are queued or running, it is destroyed when they are done.
pub struct GraphExec {
    exec: Arc<InstantiatedGraph>,
    steps: Vec<GraphStep>,
    armed: Vec<Prepared>,
    is_armed: bool,
    tickets: Vec<Ticket>,
}

impl GraphExec {
    pub(super) fn new(
        exec: Arc<InstantiatedGraph>,
        steps: Vec<GraphStep>,
        armed: Vec<Prepared>,
    ) -> GraphExec {
        GraphExec {
            exec,
            steps,
            armed,
            is_armed: true,
            tickets: Vec::new(),
        }
    }

    /// Prepares the operations of the next launch, unless they are prepared, and launches it. `endpoints` contains those that were recorded, in
    /// any order; endpoints that were not recorded are ignored.
    ///
    /// # Errors
    /// Those of [`GraphExec::arm`] and [`GraphExec::launch_armed`]. If the launch was refused, the graph is armed; if it could not be armed, it
    /// is as it was.
    pub fn launch(&mut self, stream: &CudaStream, endpoints: &mut [&mut Endpoint]) -> Result<()> {
        if !self.is_armed {
            self.arm(endpoints)?;
        }
        self.launch_armed(stream)
    }

    /// Prepares the operations of the next launch.
    ///
    /// # Errors
    /// [`Error::State`] if it is armed; [`Error::Foreign`] if an endpoint that was recorded is missing; those of preparing, a full queue for one:
    /// then nothing is prepared.
    pub fn arm(&mut self, endpoints: &mut [&mut Endpoint]) -> Result<()> {
        if self.is_armed {
            return Err(Error::state(
                StateKind::Armed,
                "GraphExec::arm",
                "it is armed",
            ));
        }
        for step in &self.steps {
            let GraphStep::Post { endpoint, recipe } = step else {
                continue;
            };
            let prepared = find(endpoints, *endpoint).and_then(|found| recipe.prepare(found));
            match prepared {
                Ok(prepared) => self.armed.push(prepared),
                Err(error) => {
                    self.take_back(endpoints);
                    return Err(error);
                }
            }
        }
        self.is_armed = true;
        Ok(())
    }

    /// Takes the preparation of the next launch back, so that other work can be posted to the endpoints before it.
    ///
    /// # Errors
    /// [`Error::Foreign`] if an endpoint that was recorded is missing: nothing has changed then.
    pub fn disarm(&mut self, endpoints: &mut [&mut Endpoint]) -> Result<()> {
        for step in &self.steps {
            if let GraphStep::Post { endpoint, .. } = step {
                find(endpoints, *endpoint)?;
            }
        }
        self.take_back(endpoints);
        self.is_armed = false;
        Ok(())
    }

    /// Launches what is armed, once.
    ///
    /// # Errors
    /// [`Error::State`] if it is not armed, or the stream is of another context; [`Error::Work`] if an endpoint has failed; and what the
    /// stream refuses. It is armed as before then.
    pub fn launch_armed(&mut self, stream: &CudaStream) -> Result<()> {
        const OPERATION: &str = "GraphExec::launch";
        if !self.is_armed {
            return Err(Error::state(
                StateKind::NotArmed,
                OPERATION,
                "it is not armed; call `arm`, or `launch`, which arms it",
            ));
        }
        if stream.context().raw() != self.exec.context().raw() {
            return Err(Error::state(
                StateKind::WrongKind,
                OPERATION,
                "the stream is of another context",
            ));
        }
        let (exec, steps) = (&self.exec, &self.steps);
        let mut values = Vec::new();
        let posted = graph_post_all(stream.id(), &mut self.armed, |turns, batch| {
            let mut posts = batch.drain(..);
            let mut all = Vec::with_capacity(steps.len());
            for step in steps {
                match step.value() {
                    None => all.extend(posts.next()),
                    Some(made) => {
                        let (submission, ticket) = made?;
                        all.push(submission);
                        values.push(ticket);
                    }
                }
            }
            if !turns.is_empty() {
                stream.submit(turns)?;
            }
            stream.launch_graph(exec, &all)
        })?;
        self.is_armed = false;
        let (mut posted, mut values) = (posted.into_iter(), values.into_iter());
        self.tickets.clear();
        self.tickets
            .extend(self.steps.iter().filter_map(|step| match step {
                GraphStep::Post { .. } => posted.next(),
                GraphStep::Wait { .. } | GraphStep::Write { .. } => values.next(),
            }));
        Ok(())
    }

    /// Whether the next launch is prepared.
    #[must_use]
    pub fn is_armed(&self) -> bool {
        self.is_armed
    }

    /// The tickets of the last launch, one for each operation, in the order of recording. Empty before the first.
    #[must_use]
    pub fn tickets(&self) -> &[Ticket] {
        &self.tickets
    }

    /// The driver's handle. A launch without this library rings doorbells of work that is complete.
    #[must_use]
    pub fn raw(&self) -> CUgraphExec {
        self.exec.raw()
    }

    /// The newest first: each is then the newest of its queue, and leaves no trace.
    fn take_back(&mut self, endpoints: &mut [&mut Endpoint]) {
        while let Some(prepared) = self.armed.pop() {
            if let Ok(endpoint) = find(endpoints, prepared.endpoint_id()) {
                endpoint.rollback(prepared);
            }
        }
    }
}

fn find<'a>(endpoints: &'a mut [&mut Endpoint], id: u64) -> Result<&'a mut Endpoint> {
    let found = endpoints.iter_mut().find(|endpoint| endpoint.id() == id);
    found
        .map(|found| &mut **found)
        .ok_or_else(|| Error::Foreign {
            argument: "endpoints",
            found: "other endpoints".into(),
            expected: format!("the recorded endpoint, with target table {id}, among them"),
        })
}

impl fmt::Debug for GraphExec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GraphExec")
            .field("operations", &self.steps.len())
            .field("is_armed", &self.is_armed)
            .finish_non_exhaustive()
    }
}
