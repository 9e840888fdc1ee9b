//! Launches of CUDA graphs on a stream.
#![allow(unsafe_code)] // calls the driver

use std::sync::Arc;
use std::sync::atomic::Ordering;

use cudarc::driver::sys;

use super::call_queue::CallQueue;
use super::driver::check;
use super::graph_node::unlike;
use super::instantiated_graph::InstantiatedGraph;
use super::pending::{PendingEntry, PendingWork};
use super::state::StreamState;
use crate::Result;
use crate::stream::Submission;

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
                for group in exec.groups() {
                    let Some((now, later)) = rest.split_at_checked(group.programs) else {
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
                let nodes: usize = exec.groups().iter().map(|group| group.nodes.len()).sum();
                if !rest.is_empty() || queue.calls.len() != nodes {
                    return Err(unlike("its programs do not fit its nodes"));
                }
                // The last node comes after all others of the graph.
                queue.entering.push(PendingEntry {
                    after: queue.issued,
                    done: queue.issued,
                    calls: 0,
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
        let nodes = exec.groups().iter().flat_map(|group| &group.nodes);
        // SAFETY: nodes of the graph that `exec` was instantiated of, which it keeps, or the application.
        unsafe { self.set_nodes(exec.raw, nodes, queue) }.inspect_err(|error| self.note(error))?;
        // SAFETY: kept in `pending` until it is done.
        check("cuGraphLaunch", unsafe {
            sys::cuGraphLaunch(exec.raw, self.raw)
        })
        .inspect_err(|error| self.note(error))
    }
}
