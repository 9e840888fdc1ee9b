//! Launches of CUDA graphs on a stream.
#![allow(unsafe_code)] // calls the driver

use std::sync::Arc;
use std::sync::atomic::Ordering;

use cudarc::driver::sys;

use super::call_queue::{CallData, CallQueue, DriverCall};
use super::driver::check;
use super::instantiated_graph::{InstantiatedGraph, params};
use super::pending::{PendingEntry, PendingWork};
use super::state::StreamState;
use crate::stream::Submission;
use crate::{Error, Result, StateKind};

impl StreamState {
    /// Launches a graph with these programs in its nodes: as many as it had, in the order of the nodes. Earlier launches keep theirs.
    ///
    /// # Errors
    /// As [`Executor::submit`](crate::Executor::submit). Nothing is launched then.
    pub(super) fn launch(&self, exec: &Arc<InstantiatedGraph>, batch: &[Submission]) -> Result<()> {
        self.check()?;
        self.queue_by(
            |state, queue| {
                queue.of_graph = true;
                let mut rest = batch;
                for (_, programs) in exec.nodes() {
                    let Some((now, later)) = rest.split_at_checked(*programs) else {
                        return Err(unlike("it has fewer programs"));
                    };
                    rest = later;
                    if now.is_empty() {
                        state.count(queue);
                    } else {
                        state.prepare(queue, now.iter())?;
                    }
                    queue.end_call();
                }
                if !rest.is_empty() || queue.calls.len() != exec.nodes().len() {
                    return Err(unlike("its programs do not fit its nodes"));
                }
                // The last node comes after all others of the graph.
                queue.entering.push(PendingEntry {
                    after: queue.issued,
                    done: queue.issued,
                    what: PendingWork::Launched {
                        _exec: Arc::clone(exec),
                    },
                });
                Ok(())
            },
            |state, queue| state.issue_graph(exec, queue),
        )
    }

    fn issue_graph(&self, exec: &InstantiatedGraph, queue: &mut CallQueue) -> Result<()> {
        let before = self.enter(queue)?;
        self.ensure_watched();
        self.launch_graph(exec, queue)
            .inspect_err(|_| self.pending.take_back(before, &mut queue.entering))?;
        self.count.given.store(queue.issued, Ordering::Release);
        Ok(())
    }

    fn launch_graph(&self, exec: &InstantiatedGraph, queue: &mut CallQueue) -> Result<()> {
        // Entered first: setting a node's parameters names no stream, and no error is documented for another current context.
        let mut driver = self.driver(true)?;
        self.forbid_capture(&mut driver, "launch a graph")?;
        for (DriverCall { what, .. }, (node, _)) in queue.calls.iter().zip(exec.nodes()) {
            let CallData::MemoryOps(range) = what else {
                return Err(unlike(
                    "one of its programs needs a kernel, and graph nodes are memory operations",
                ));
            };
            let ops = queue.ops.get_mut(range.clone()).unwrap_or_default();
            let params = params(&self.context, ops);
            // SAFETY: a node of the graph that `exec` was instantiated of, and operations as in `issue`.
            check("cuGraphExecBatchMemOpNodeSetParams", unsafe {
                sys::cuGraphExecBatchMemOpNodeSetParams(exec.raw, *node, &params)
            })
            .inspect_err(|error| self.note(error))?;
        }
        // SAFETY: kept in `pending` until it is done.
        check("cuGraphLaunch", unsafe {
            sys::cuGraphLaunch(exec.raw, self.raw)
        })
        .inspect_err(|error| self.note(error))
    }
}

#[cold]
fn unlike(how: &str) -> Error {
    Error::state(
        StateKind::Graph,
        "launch a graph",
        format!("it is not the one that was recorded: {how}"),
    )
}
