//! The peers of this process, and what each of them does in a step.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::{Context, Result};
use doorbell::{Device, Error, Event};

use super::backend::{Backend, BenchStream, Clock};
use super::graph::BatchGraph;
use super::kinds::Loop;
use super::machine::Machine;
use super::options::{Exchange, MessageOp, Plan};
use super::pass::Workload;
use super::peer::{Peer, WaitLimits};
use super::row::Setup;
use super::step::BenchStep;

/// Entries of a stream's queue for one step, at most: fill, kernel, transfer, wait, wait for an arrival, check.
const ENTRIES_OF_STEP: u64 = 6;
/// The same of a message queue: fill, kernel, four for a send, nine for a receive, check.
const ENTRIES_OF_MESSAGE: u64 = 16;
/// Bytes of an acknowledgement.
const ACK_BYTES: u64 = 8;

/// What a peer does. A step is a sequence of these.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Action {
    /// Runs the timed kernel, and sends the message.
    Send,
    /// Runs the kernel of the other side of a pingpong, and sends the answer.
    Reply,
    /// Waits for a message, and checks its bytes if the plan says so.
    Arrive,
    /// Tells the sender that the message was checked: before that, the next one must not overwrite it.
    Ack,
    /// Waits for that acknowledgement.
    Acked,
    /// Waits until the memory of a message that the CPU has sent by a message queue may be used again.
    Sent,
}

/// The peers that this process has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BenchRole {
    /// Both: the first one measures.
    Both,
    /// The one that measures.
    Client,
    /// The one that answers.
    Server,
}

/// The actions of a step, each with the index of its peer.
fn script(plan: &Plan, role: BenchRole) -> Vec<(usize, Action)> {
    use Action::{Ack, Acked, Arrive, Reply, Send, Sent};
    let by_queue = plan.op == MessageOp::Message;
    let both: &[(usize, Action)] = match (plan.exchange, plan.announced()) {
        // A long message is sent when the other peer has received it.
        (Exchange::Loop, _) if by_queue => &[(0, Send), (1, Arrive), (0, Sent)],
        (Exchange::Pingpong, _) if by_queue => &[
            (0, Send),
            (1, Arrive),
            (0, Sent),
            (1, Reply),
            (0, Arrive),
            (1, Sent),
        ],
        (Exchange::Loop, false) => &[(0, Send)],
        (Exchange::Loop, true) => &[(0, Send), (1, Arrive)],
        (Exchange::Pingpong, _) => &[(0, Send), (1, Arrive), (1, Reply), (0, Arrive)],
    };
    // In one process, a loop's next kernel runs after the check anyway: one thread or one stream does both. A message queue keeps messages apart.
    let acknowledged = plan.exchange == Exchange::Loop && plan.validate && !by_queue;
    match role {
        BenchRole::Both => both.to_vec(),
        BenchRole::Client | BenchRole::Server => {
            let peer = usize::from(role == BenchRole::Server);
            let ack = if peer == 0 { Acked } else { Ack };
            let own = both.iter().filter(|(of, _)| *of == peer);
            own.map(|(_, action)| (0, *action))
                .chain(acknowledged.then_some((0, ack)))
                .collect()
        }
    }
}

/// The peers of this process with their streams.
pub struct Scenario {
    peers: Vec<Peer>,
    script: Vec<(usize, Action)>,
    backend: Backend,
    streams: Vec<BenchStream>,
    /// Launches the asynchronous loop as graphs, with `--graph`.
    graph: Option<BatchGraph>,
    /// The clock of the first stream.
    clock: Option<Clock>,
    /// The events of all streams, for each batch in flight and one more for the end.
    marks: Vec<Vec<Event>>,
    limits: WaitLimits,
}

impl Scenario {
    /// Both peers, connected to each other.
    ///
    /// # Errors
    /// Those of the library.
    pub fn both(device: &Device, backend: &Backend, plan: &Plan) -> Result<Scenario> {
        let mut scenario = Scenario::new(device, backend, plan, BenchRole::Both, None)?;
        let contacts = [scenario.peers[1].contact(), scenario.peers[0].contact()];
        for (peer, contact) in scenario.peers.iter_mut().zip(contacts) {
            peer.connect(&contact)?;
        }
        Ok(scenario)
    }

    /// The peers of a role, not connected. Setting `disconnected` ends all waits.
    ///
    /// # Errors
    /// Those of the library.
    pub fn new(
        device: &Device,
        backend: &Backend,
        plan: &Plan,
        role: BenchRole,
        disconnected: Option<&Arc<AtomicBool>>,
    ) -> Result<Scenario> {
        let domain = device.protection_domain();
        let limits = WaitLimits {
            timeout: plan.timeout(),
            disconnected: disconnected.cloned(),
        };
        let by_queue = plan.op == MessageOp::Message;
        let of_step = if by_queue {
            ENTRIES_OF_MESSAGE
        } else {
            ENTRIES_OF_STEP
        };
        let entries = plan.in_flight() * of_step + plan.batches + 1;
        // A loop in one process has one stream: the check of a message is queued behind the wait for it. Not of a message queue, where the sender's stream may
        // wait for the receiver's.
        let is_split = plan.exchange == Exchange::Pingpong || by_queue;
        let stream_count = if role == BenchRole::Both && is_split {
            2
        } else {
            1
        };
        let streams = (0..stream_count)
            .map(|number| backend.stream(format!("bench{number}"), entries as usize))
            .collect::<doorbell::Result<Vec<_>>>()?;
        let seeds = [plan.seed, !plan.seed];
        let peer = |number: usize| {
            let seeds = [seeds[number], seeds[1 - number]];
            let stream = streams.get(number).unwrap_or(&streams[0]);
            // The synchronous loop has one thread, which waits for one stream: with a stream for each peer, three threads would take turns on
            // two cores.
            let streams = [stream, &streams[0]];
            Peer::new(&domain, backend, streams, plan, seeds, &limits)
        };
        let peers = match role {
            BenchRole::Both => vec![peer(0)?, peer(1)?],
            BenchRole::Client => vec![peer(0)?],
            // It has the only stream, and the seeds of the second peer.
            BenchRole::Server => vec![peer(1)?],
        };
        let events = |_| {
            let event = || Event::blocking().without_timing();
            streams.iter().map(|_| event()).collect()
        };
        let script = script(plan, role);
        // A graph repeats identical steps only.
        let is_repeated = script == [(0, Action::Send)];
        Ok(Scenario {
            peers,
            script,
            graph: backend.graph(plan.steps).filter(|_| is_repeated),
            marks: (0..=plan.batches).map(events).collect(),
            clock: backend.clock(),
            backend: backend.clone(),
            streams,
            limits,
        })
    }

    /// The peer that measures, or the only one.
    pub fn first(&mut self) -> &mut Peer {
        &mut self.peers[0]
    }

    /// Whether this process does anything in a step. The target of plain writes does not.
    pub fn takes_part(&self) -> bool {
        !self.script.is_empty()
    }

    /// What the rows of a run have in common.
    pub fn setup(&self, plan: &Plan) -> Setup {
        let carrier = self.peers[0].carrier();
        let path = carrier.path();
        let mut reason = path.reason;
        for (control, missing) in path.better {
            reason += &format!("; not {control}: {missing}");
        }
        Setup {
            machine: Machine::this(),
            plan: plan.clone(),
            processes: if self.peers.len() == 2 { 1 } else { 2 },
            device: carrier.device_name().into(),
            stream: self.backend.name().into(),
            path: path.control.to_string(),
            reason,
            memory: self.backend.memory().into(),
            gpu: self.backend.gpu(),
            gpu_details: self.backend.describe(),
        }
    }

    /// One step.
    fn step(&mut self, by: Loop, step: BenchStep) -> doorbell::Result<()> {
        if let (Loop::Async, Some(graph)) = (by, &mut self.graph) {
            return graph.step(&mut self.peers[0], &step);
        }
        let (index, size_bytes) = (step.index, step.size_bytes);
        let untimed = step.untimed();
        // Moved into the timed kernel, not cloned: its stamps are shared with the stream's thread.
        let mut timed = Some(step);
        for (number, action) in &self.script {
            let peer = &mut self.peers[*number];
            match action {
                Action::Send | Action::Reply => {
                    let timed = timed.take_if(|_| *action == Action::Send);
                    peer.launch(by, timed.unwrap_or_else(|| untimed.clone()))?;
                    if by == Loop::Sync {
                        peer.synchronize()?;
                    }
                    peer.transfer(by, index, size_bytes)?;
                }
                Action::Arrive => {
                    peer.arrive(by, size_bytes)?;
                    peer.inspect(by, index, size_bytes)?;
                }
                Action::Ack => peer.transfer(by, index, ACK_BYTES)?,
                Action::Acked => peer.arrive(by, ACK_BYTES)?,
                Action::Sent => peer.sent(by)?,
            }
        }
        Ok(())
    }

    fn mark(&self, slot: usize) -> doorbell::Result<()> {
        let pairs = self.streams.iter().zip(&self.marks[slot]);
        pairs
            .into_iter()
            .try_for_each(|(stream, event)| stream.executor().record(event))
    }

    fn wait(&self, slot: usize) -> doorbell::Result<()> {
        self.marks[slot]
            .iter()
            .try_for_each(|event| self.limits.wait_for_all(|slice| event.synchronize(slice)))
    }

    /// The reason of a failure: a stream only reports that a wait was released, the endpoint knows why.
    fn cause(&self, error: Error) -> anyhow::Error {
        let failures = self
            .peers
            .iter()
            .filter_map(|peer| peer.carrier().failure());
        let cause = match error {
            Error::Asynchronous { .. } => failures.map(Error::Work).next().unwrap_or(error),
            error => error,
        };
        // Ends the waits that are still queued.
        self.peers.iter().for_each(|peer| peer.carrier().abort());
        cause.into()
    }
}

impl Workload for Scenario {
    fn step_sync(&mut self, step: BenchStep) -> Result<()> {
        self.step(Loop::Sync, step)
            .map_err(|error| self.cause(error))
    }

    fn step_async(&mut self, step: BenchStep) -> Result<()> {
        self.step(Loop::Async, step)
            .map_err(|error| self.cause(error))
    }

    fn mark_batch(&mut self, slot: usize) -> Result<()> {
        self.mark(slot).map_err(|error| self.cause(error))
    }

    fn wait_batch(&mut self, slot: usize) -> Result<()> {
        self.wait(slot).map_err(|error| self.cause(error))
    }

    fn begin_notes(&mut self, count: usize) -> Result<bool> {
        let Some(clock) = &mut self.clock else {
            return Ok(false);
        };
        clock.begin(count)?;
        Ok(true)
    }

    fn note(&mut self) -> Result<()> {
        if let Some(clock) = &mut self.clock {
            clock.note(&self.streams[0])?;
        }
        Ok(())
    }

    fn periods_ns(&self) -> Result<Vec<u64>> {
        let periods = self.clock.as_ref().map(Clock::periods_ns).transpose()?;
        Ok(periods.unwrap_or_default())
    }

    fn drain(&mut self) -> Result<()> {
        // Not `synchronize`, which spins: the end of the asynchronous loop costs no more CPU time than its middle.
        let last = self.marks.len() - 1;
        let drained = self.mark(last).and_then(|()| self.wait(last));
        // Failures of the last steps are reported by the next call.
        let drained = drained.and_then(|()| {
            self.streams
                .iter()
                .try_for_each(|stream| stream.executor().query().map(drop))
        });
        let drained = drained.and_then(|()| self.peers.iter().try_for_each(Peer::settle));
        drained.map_err(|error| self.cause(error))?;
        self.peers
            .iter()
            .try_for_each(Peer::verdict)
            .context("--validate")
    }
}

#[cfg(test)]
mod tests {
    use super::super::options::BenchCase;
    use super::super::options::tests::sample_plan;
    use super::super::pass::measure;
    use super::*;

    fn device() -> Device {
        Device::open("softcx").unwrap()
    }

    fn plan(exchange: Exchange, op: MessageOp, validate: bool) -> Plan {
        Plan {
            exchange,
            op,
            validate,
            ..sample_plan()
        }
    }

    fn run(scenario: &mut Scenario, plan: &Plan, kind: Loop) -> Result<()> {
        let case = BenchCase {
            kind,
            size_bytes: 64,
            kernel_us: 0,
        };
        measure(scenario, plan, case, |_| Ok(())).map(drop)
    }

    #[test]
    fn a_write_that_nobody_need_notice_is_the_senders_alone() {
        use Action::{Ack, Acked, Arrive, Reply, Send, Sent};
        let of = |exchange, op, validate, role| {
            let script = script(&plan(exchange, op, validate), role);
            script
                .into_iter()
                .map(|(_, action)| action)
                .collect::<Vec<_>>()
        };
        let alone = |role| of(Exchange::Loop, MessageOp::Write, false, role);
        assert_eq!(alone(BenchRole::Both), [Send]);
        assert_eq!(alone(BenchRole::Client), [Send]);
        assert_eq!(alone(BenchRole::Server), []);
        let checked = |role| of(Exchange::Loop, MessageOp::Write, true, role);
        assert_eq!(checked(BenchRole::Both), [Send, Arrive]);
        assert_eq!(checked(BenchRole::Client), [Send, Acked]);
        assert_eq!(checked(BenchRole::Server), [Arrive, Ack]);
        let queued = |exchange, role| of(exchange, MessageOp::Message, true, role);
        assert_eq!(
            queued(Exchange::Loop, BenchRole::Both),
            [Send, Arrive, Sent]
        );
        assert_eq!(queued(Exchange::Loop, BenchRole::Server), [Arrive]);
        assert_eq!(
            queued(Exchange::Pingpong, BenchRole::Server),
            [Arrive, Reply, Sent]
        );
        let pong = |role| of(Exchange::Pingpong, MessageOp::Send, true, role);
        assert_eq!(pong(BenchRole::Client), [Send, Arrive]);
        assert_eq!(pong(BenchRole::Server), [Arrive, Reply]);
    }

    #[test]
    fn wrong_bytes_end_a_row_of_either_loop() {
        for kind in [Loop::Sync, Loop::Async] {
            let plan = plan(Exchange::Loop, MessageOp::Send, true);
            let mut scenario = Scenario::both(&device(), &Backend::Host, &plan).unwrap();
            run(&mut scenario, &plan, kind).unwrap();
            // The region holds the message of the last step, not that of the first.
            scenario.peers[1].inspect(kind, 0, 64).unwrap();
            let error = run(&mut scenario, &plan, kind).unwrap_err();
            assert!(
                format!("{error:#}").contains("step 0: byte 0 of 64"),
                "{error:#}"
            );
        }
    }

    #[test]
    fn messages_arrive_by_either_protocol_and_wrong_bytes_are_found() {
        for (eager_bytes, exchange) in [
            (4096, Exchange::Loop),
            (4096, Exchange::Pingpong),
            (0, Exchange::Loop),
            (0, Exchange::Pingpong),
        ] {
            for kind in [Loop::Sync, Loop::Async] {
                let plan = Plan {
                    eager_bytes: Some(eager_bytes),
                    ..plan(exchange, MessageOp::Message, true)
                };
                let mut scenario = Scenario::both(&device(), &Backend::Host, &plan).unwrap();
                run(&mut scenario, &plan, kind).unwrap();
                scenario.peers[1].inspect(kind, 0, 64).unwrap();
                let error = run(&mut scenario, &plan, kind).unwrap_err();
                let text = format!("{error:#}");
                assert!(text.contains("step 0: byte 0 of 64"), "{text}");
            }
        }
    }

    #[test]
    fn a_failed_endpoint_is_named_and_not_the_stream_alone() {
        let plan = plan(Exchange::Pingpong, MessageOp::Write, false);
        let mut scenario = Scenario::both(&device(), &Backend::Host, &plan).unwrap();
        scenario.peers[1].carrier().abort();
        for kind in [Loop::Async, Loop::Sync] {
            let error = run(&mut scenario, &plan, kind).unwrap_err();
            assert!(format!("{error:#}").contains("endpoint 0x"), "{error:#}");
        }
    }
}
