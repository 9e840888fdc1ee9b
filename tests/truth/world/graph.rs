//! Graphs of a plan: recorded once, and launched any number of times.

use std::collections::BTreeMap;
use std::sync::MutexGuard;
use std::time::Duration;

use doorbell::{
    CudaStream, Endpoint, Error, GraphBuilder, GraphExec, GraphMember, QueueKind, Result, Slice,
    Work,
};

use super::{End, Entry, Lane, World};
use crate::memory::{graph_bytes, place};
use crate::model::{Armed, lock};
use crate::plan::{Recorded, recorded};

/// How long a plan waits for its streams before it records a graph.
const DONE: Duration = Duration::from_millis(20);

type Ends<'a> = BTreeMap<usize, MutexGuard<'a, End>>;

/// A graph of a step.
pub struct Captured {
    exec: GraphExec,
    /// Its operations, if its next launch is prepared.
    armed: Vec<Armed>,
}

impl World<'_> {
    /// The endpoints of a graph, in the order in which they are locked everywhere.
    fn ends_of(&self, operations: &[Recorded]) -> Ends<'_> {
        let numbers: BTreeMap<usize, ()> = operations
            .iter()
            .map(|operation| (operation.end(), ()))
            .collect();
        numbers
            .into_keys()
            .map(|end| (end, lock(&self.ends[end])))
            .collect()
    }

    /// Records a graph while no stream of the context waits: the driver may keep the call that instantiates it, and all calls of other threads, until none does.
    /// Streams that are not done soon leave the plan without this graph.
    pub(super) fn capture(&self, number: usize, stream: usize, operations: &[Recorded]) {
        let mut ends = self.ends_of(operations);
        if ends.values().any(|end| end.endpoint.is_none()) {
            return;
        }
        // Locked, so that no other thread queues work meanwhile.
        let mut lanes: Vec<_> = (0..self.lanes.len()).map(|of| self.lane(of)).collect();
        let mut with_lanes = lanes.iter_mut().enumerate();
        if !with_lanes.all(|(of, lane)| self.is_done(of, lane, DONE)) {
            return;
        }
        let lane = &mut lanes[stream];
        let Some(cuda) = lane.stream.cuda() else {
            return;
        };
        match self.record(number, &mut ends, cuda, operations) {
            Ok(exec) => {
                let armed = Vec::new();
                *lock(&self.graphs[number]) = Some(Captured { exec, armed });
            }
            Err(error) => {
                // What was recorded before is dropped.
                for (at, operation) in operations.iter().enumerate() {
                    let life = &ends[&operation.end()].life;
                    self.model.given_up(recorded(number, at), life);
                }
                self.judge(number, lane, &mut ends, error);
            }
        }
    }

    fn record(
        &self,
        number: usize,
        ends: &mut Ends<'_>,
        stream: &CudaStream,
        operations: &[Recorded],
    ) -> Result<GraphExec> {
        let memory = &self.model.memory;
        let mut builder = GraphBuilder::capture(stream)?;
        for (at, operation) in operations.iter().enumerate() {
            let end = operation.end();
            let endpoint = ends.get_mut(&end).unwrap().endpoint.as_mut().unwrap();
            let wr_id = recorded(number, at) as u64 + 1;
            match operation {
                Recorded::Write { signaled, .. } => {
                    let range = graph_bytes(at);
                    let (from, len_bytes) = (place(number) + range.start, range.end - range.start);
                    let slices: [Slice<'_>; 1] =
                        [memory.sources[0].of(end).slice(from, len_bytes).unwrap()];
                    let remote = memory.targets[0].of(end ^ 1).remote();
                    let work = Work::write(&slices, remote.slice(from, len_bytes).unwrap());
                    builder.send(endpoint, &work.wr_id(wr_id).signaled(*signaled))?;
                }
                Recorded::FetchAdd { .. } => {
                    let result = place(number) + 8 * at as u64;
                    let slices = [memory.targets[0].of(end).slice(result, 8).unwrap()];
                    let remote = memory.launches.of(end ^ 1).remote();
                    let word = remote.slice(8 * recorded(number, at) as u64, 8).unwrap();
                    builder.send(endpoint, &Work::fetch_add(&slices, word, 1).wr_id(wr_id))?;
                }
                Recorded::Wait { timeout, .. } => {
                    builder.wait_cq_for(endpoint, QueueKind::Send, Some(*timeout))?;
                }
            }
        }
        let mut graph = builder.instantiate()?;
        // So that other calls can post to the endpoints before the first launch.
        graph.disarm(&mut endpoints(ends))?;
        Ok(graph)
    }

    pub(super) fn launch_graph(&self, number: usize, of: usize, stream: usize) {
        let operations = self.plan.graph(of);
        let mut ends = self.ends_of(operations);
        let mut lane = self.lane(stream);
        let Some(graph) = self.graphs.get(of) else {
            return;
        };
        let mut graph = lock(graph);
        let (Some(graph), Some(cuda)) = (&mut *graph, lane.stream.cuda()) else {
            return;
        };
        let Captured { exec, armed } = graph;
        let failures: Vec<_> = (ends.values())
            .filter_map(|end| Some((&end.life, end.endpoint.as_ref()?.failure()?)))
            .inspect(|(life, failure)| self.model.failed(life, *failure))
            .map(|(_, failure)| failure)
            .collect();
        let was_armed = exec.is_armed();
        match exec.launch(cuda, &mut endpoints(&mut ends)) {
            Ok(()) => {
                if let Some(failure) = failures.first() {
                    self.model.lie(
                        "accepted after a failure",
                        format!("step {number}: {failure:?}"),
                    );
                }
                if !was_armed {
                    *armed = self.armed(of, operations, &ends);
                }
                let behind = Lane::last_kernel(&lane.log);
                for ((at, armed), ticket) in armed.drain(..).enumerate().zip(exec.tickets()) {
                    let request = self.model.request(recorded(number, at));
                    self.model
                        .launched(armed, request, ticket.clone(), behind.clone());
                    lane.log.push(Entry::Request(request.number));
                }
            }
            Err(error) => {
                self.unarm(graph, &mut ends);
                self.judge(number, &mut lane, &mut ends, error);
            }
        }
    }

    pub(super) fn arm(&self, number: usize, of: usize) {
        let operations = self.plan.graph(of);
        let mut ends = self.ends_of(operations);
        let mut lane = self.lane(0);
        let Some(graph) = self.graphs.get(of) else {
            return;
        };
        let mut graph = lock(graph);
        let Some(Captured { exec, armed }) = &mut *graph else {
            return;
        };
        let was_armed = exec.is_armed();
        match exec.arm(&mut endpoints(&mut ends)) {
            Ok(()) if was_armed => self
                .model
                .lie("armed twice", format!("step {number}: graph {of}")),
            Ok(()) => *armed = self.armed(of, operations, &ends),
            Err(error) => self.judge(number, &mut lane, &mut ends, error),
        }
    }

    pub(super) fn disarm(&self, of: usize) {
        let mut ends = self.ends_of(self.plan.graph(of));
        let Some(graph) = self.graphs.get(of) else {
            return;
        };
        if let Some(graph) = &mut *lock(graph) {
            self.unarm(graph, &mut ends);
        }
    }

    fn armed(&self, of: usize, operations: &[Recorded], ends: &Ends<'_>) -> Vec<Armed> {
        let armed = |(at, operation): (usize, &Recorded)| {
            let life = &ends[&operation.end()].life;
            self.model.armed(of, at, *operation, life)
        };
        operations.iter().enumerate().map(armed).collect()
    }

    /// Takes the preparation of the next launch back, if there is one.
    fn unarm(&self, graph: &mut Captured, ends: &mut Ends<'_>) {
        if !graph.exec.is_armed() {
            return;
        }
        match graph.exec.disarm(&mut endpoints(ends)) {
            Ok(()) => graph
                .armed
                .drain(..)
                .for_each(|armed| self.model.disarmed(&armed)),
            Err(Error::Foreign { .. }) if ends.values().any(|end| end.endpoint.is_none()) => {}
            Err(error) => self
                .model
                .lie("unexpected error", format!("disarm: {error:?}")),
        }
    }

    /// An error of a call for a graph.
    fn judge(&self, number: usize, lane: &mut Lane, ends: &mut Ends<'_>, error: Error) {
        match error {
            Error::Work(failure) => {
                let named = |end: &&mut MutexGuard<'_, End>| {
                    let endpoint = end.endpoint.as_ref();
                    endpoint.and_then(Endpoint::failure) == Some(failure)
                };
                // Of a launch that was prepared before its endpoint was dropped, which goes on and may fail as long as streams have work of it.
                let is_dropped = ends.values().any(|end| end.endpoint.is_none());
                match ends.values_mut().find(named) {
                    Some(end) => self.model.failed(&end.life, failure),
                    None if is_dropped => {}
                    None => self.model.lie(
                        "a failure of no endpoint",
                        format!("step {number}: {failure:?}"),
                    ),
                }
            }
            Error::QueueFull { .. } | Error::State { .. } | Error::Timeout { .. } => {}
            Error::Foreign { .. } if ends.values().any(|end| end.endpoint.is_none()) => {}
            Error::Asynchronous { .. } => lane.take_fault(),
            error => self
                .model
                .lie("unexpected error", format!("step {number}: {error:?}")),
        }
    }
}

fn endpoints<'a>(ends: &'a mut Ends<'_>) -> Vec<&'a mut dyn GraphMember> {
    ends.values_mut()
        .filter_map(|end| end.endpoint.as_mut())
        .map(|endpoint| endpoint as _)
        .collect()
}
