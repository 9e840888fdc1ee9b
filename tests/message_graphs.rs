//! Messages in CUDA graphs that are launched again and again, among messages that are in none. `scripts/test cuda` runs this over the stand-in for the driver.
#![cfg(all(feature = "cuda", feature = "softcx", not(loom)))]

mod rig;
#[path = "rig/standin.rs"]
mod standin;
mod waived;

use std::sync::{Arc, Barrier};
use std::thread;
use std::time::Duration;

use doorbell::softcx::Faults;
use doorbell::{
    Access, Algorithm, Cause, Communicator, Condition, Control, CudaContext, CudaStream, DataType,
    Device, Error, Executor, GraphBuilder, GraphExec, GraphMember, MessageConfig, MessageQueue,
    ReduceOp, Reduction, Region, StateKind, stream_wait_value32,
};
use rig::gpu::{alone, context};
use rig::{Limit, Random, SOON, control, from_env, strict, strict_device};
use standin::{Fault, is_standin};
use waived::waived;

const STEP: Duration = Duration::from_secs(120);
const EAGER: u32 = 256;
const SLOTS: usize = 4;
/// The longest message.
const LONG: usize = 3000;

/// The device and the context; `None` where the test is WAIVED.
fn begin(test: &str) -> Option<(Device, CudaContext)> {
    let context = context(test)?;
    let device = strict_device();
    if control(&device) == Control::Sync {
        waived(test, "the doorbells of the sync path are in no graph");
        return None;
    }
    Some((device, context))
}

/// Two queues that are connected.
fn pair(device: &Device, timeout: Option<Duration>, room: Option<Duration>) -> [MessageQueue; 2] {
    pair_of(device, 32, timeout, room)
}

fn pair_of(
    device: &Device,
    ahead: u32,
    timeout: Option<Duration>,
    room: Option<Duration>,
) -> [MessageQueue; 2] {
    let mut config = MessageConfig::default()
        .eager_bytes(EAGER)
        .slots(SLOTS as u32)
        .ahead(ahead);
    config.endpoint = config.endpoint.wait_timeout(timeout).room_timeout(room);
    if control(device) != Control::Proxy {
        config.endpoint = config.endpoint.rnr_retry(0);
    }
    let domain = device.protection_domain();
    let mut queues = [(); 2].map(|()| MessageQueue::new(&domain, &config).unwrap());
    let addresses = queues.each_ref().map(MessageQueue::address);
    queues[0].connect(&addresses[1]).unwrap();
    queues[1].connect(&addresses[0]).unwrap();
    queues
}

/// What a side does in one go.
#[derive(Debug, Clone, Copy)]
enum Do {
    Send(usize),
    Recv(usize),
}

/// The messages of both sides in one go, each side in its own order: none of them receives more than it has sent before, and none has more on their way
/// than there are slots.
fn plan(random: &mut Random) -> [Vec<Do>; 2] {
    let count = 1 + random.below(7) as usize;
    let lens = [(); 2].map(|()| {
        let len = |_| match random.below(8) {
            0 => 0,
            1..=4 => random.below(u64::from(EAGER) + 1) as usize,
            _ => 1 + random.below(LONG as u64) as usize,
        };
        (0..count).map(len).collect::<Vec<usize>>()
    });
    let mut of_side = |side: usize| {
        let (mut sent, mut received) = (0, 0);
        let mut all = Vec::new();
        while sent < count || received < count {
            let may_send = sent < count && sent < received + SLOTS;
            let may_receive = received < count && (received < sent || sent == count);
            if may_send && (!may_receive || random.below(2) == 0) {
                all.push(Do::Send(lens[side][sent]));
                sent += 1;
            } else {
                all.push(Do::Recv(lens[1 - side][received]));
                received += 1;
            }
        }
        all
    };
    [of_side(0), of_side(1)]
}

/// The bytes of a message: of its side, of the go, and of the place in it.
fn bytes(side: usize, go: u64, message: usize, len: usize) -> Vec<u8> {
    let byte = |at| (side * 131 + go as usize * 29 + message * 57 + at * 7 + at / 256) as u8;
    (0..len).map(byte).collect()
}

/// One side, with memory for each of its messages of a go.
struct Side {
    side: usize,
    queue: MessageQueue,
    stream: CudaStream,
    memory: Region,
    random: Random,
    meeting: Arc<Barrier>,
}

/// Instantiates on both sides while neither stream waits: the driver may wait for all streams of the context then, and keep all other calls out.
fn instantiate(builder: GraphBuilder, meeting: &Barrier) -> GraphExec {
    meeting.wait();
    let graph = builder.instantiate().unwrap();
    meeting.wait();
    graph
}

impl Side {
    fn new(
        side: usize,
        queue: MessageQueue,
        context: &CudaContext,
        seed: u64,
        meeting: &Arc<Barrier>,
    ) -> Side {
        let memory = Region::alloc(queue.domain(), 16 * LONG as u64, Access::ALL).unwrap();
        Side {
            side,
            stream: CudaStream::new(context, format!("side {side}")).unwrap(),
            queue,
            memory,
            random: Random(seed + side as u64),
            meeting: Arc::clone(meeting),
        }
    }

    fn offset(step: usize) -> u64 {
        (step * LONG) as u64
    }

    /// Records these steps. Some messages are waited for at once, if those of the peer that come before can be received.
    fn record(&mut self, steps: &[Do]) -> GraphExec {
        let Side { queue, stream, .. } = self;
        stream.synchronize(SOON).unwrap();
        let mut builder = GraphBuilder::capture(stream).unwrap();
        for (step, what) in steps.iter().enumerate() {
            match what {
                Do::Send(len) => {
                    let slice = self.memory.slice(Self::offset(step), *len as u64).unwrap();
                    builder.start_message(queue, &[slice]).unwrap();
                }
                Do::Recv(_) => {
                    let slice = self.memory.slice(Self::offset(step), LONG as u64).unwrap();
                    builder.recv_message(queue, &[slice]).unwrap();
                }
            }
        }
        if self.random.below(2) == 0 {
            builder.wait_messages(queue).unwrap();
        }
        instantiate(builder, &self.meeting)
    }

    /// Writes what is to be sent, and something else where messages are received.
    fn write(&self, go: u64, steps: &[Do]) {
        let mut sent = 0;
        for (step, what) in steps.iter().enumerate() {
            let at = Self::offset(step);
            if let Do::Send(len) = what {
                let bytes = bytes(self.side, go, sent, *len);
                self.memory.write(at, &bytes).unwrap();
                sent += 1;
            } else {
                self.memory.fill(at, LONG as u64, 0xee).unwrap();
            }
        }
    }

    fn check(&self, go: u64, steps: &[Do]) {
        let mut received = 0;
        for (step, what) in steps.iter().enumerate() {
            let Do::Recv(len) = what else { continue };
            let mut found = vec![0; LONG];
            self.memory.read(Self::offset(step), &mut found).unwrap();
            let mut expected = bytes(1 - self.side, go, received, *len);
            expected.resize(LONG, 0xee);
            let at = (0..LONG).find(|at| found[*at] != expected[*at]);
            assert_eq!(at, None, "side {}, go {go}, step {step}", self.side);
            received += 1;
        }
    }

    fn launch(&mut self, graph: &mut GraphExec, go: u64, steps: &[Do]) {
        self.write(go, steps);
        graph.launch(&self.stream, &mut [&mut self.queue]).unwrap();
        assert_eq!(graph.message_tickets().len(), steps.len());
        for (ticket, what) in graph.message_tickets().iter().zip(steps) {
            let (Do::Send(len) | Do::Recv(len)) = what;
            let done = ticket.wait(SOON);
            assert_eq!(done, Ok(*len as u64), "side {}, go {go}", self.side);
        }
        self.check(go, steps);
    }

    /// The same steps without a graph, by the stream or by this thread.
    fn go_directly(&mut self, go: u64, steps: &[Do]) {
        self.write(go, steps);
        let mut pending = Vec::new();
        let mut tickets = Vec::new();
        for (step, what) in steps.iter().enumerate() {
            let by_thread = self.random.below(3) == 0;
            let at = Self::offset(step);
            let len = match what {
                Do::Send(len) => *len,
                Do::Recv(_) => LONG,
            };
            let slices = [self.memory.slice(at, len as u64).unwrap()];
            match what {
                Do::Send(_) => {
                    pending.push(self.queue.start_send(&self.stream, &slices).unwrap());
                }
                Do::Recv(len) if by_thread && pending.is_empty() => {
                    let received = self.queue.recv_now(&slices, SOON);
                    assert_eq!(received, Ok(*len as u64));
                }
                Do::Recv(_) => tickets.push(self.queue.recv(&self.stream, &slices).unwrap()),
            }
        }
        for sent in pending {
            tickets.push(self.queue.wait_send(&self.stream, sent).unwrap());
        }
        for ticket in tickets {
            ticket.wait(SOON).unwrap();
        }
        self.stream.synchronize(SOON).unwrap();
        self.check(go, steps);
    }
}

/// Both sides in threads of their own. The queues stay until both are done.
fn on_both(
    device: &Device,
    context: &CudaContext,
    seed: u64,
    room: Option<Duration>,
    run: impl Fn(&mut Side) + Sync,
) {
    let mut side = 0;
    let meeting = Arc::new(Barrier::new(2));
    let sides = pair(device, SOON, room).map(|queue| {
        side += 1;
        Side::new(side - 1, queue, context, seed, &meeting)
    });
    thread::scope(|scope| {
        let run = &run;
        let threads = sides.map(|mut side| {
            scope.spawn(move || {
                run(&mut side);
                side.queue.finish(SOON).unwrap();
                side.queue
            })
        });
        let ended = threads.map(|thread| thread.join());
        assert!(ended.iter().all(Result::is_ok), "DOORBELL_SEED={seed}");
    });
}

/// Graphs that are recorded once and launched in any order, and messages that are in none between them.
fn random_graphs(device: &Device, context: &CudaContext, seed: u64, goes: u64) {
    let plans: Vec<[Vec<Do>; 2]> = {
        let mut random = Random(seed);
        (0..4).map(|_| plan(&mut random)).collect()
    };
    on_both(device, context, seed, SOON, |side| {
        // What both do: their own choices come from other numbers.
        let mut choices = Random(seed ^ 0x5eed);
        let mut graphs: Vec<Option<GraphExec>> = (0..plans.len()).map(|_| None).collect();
        for go in 0..goes {
            let which = choices.below(plans.len() as u64) as usize;
            let steps = &plans[which][side.side];
            if choices.below(4) == 0 {
                side.go_directly(go, steps);
                continue;
            }
            let mut graph = match graphs[which].take() {
                Some(graph) => graph,
                None => side.record(steps),
            };
            if side.random.below(4) == 0 {
                // Prepared, and taken back.
                if graph.is_armed() {
                    graph.disarm(&mut [&mut side.queue]).unwrap();
                } else {
                    graph.arm(&mut [&mut side.queue]).unwrap();
                }
            }
            side.launch(&mut graph, go, steps);
            graphs[which] = Some(graph);
        }
    });
}

#[test]
fn random_graphs_among_other_messages_transfer_what_was_sent() {
    let test = "random_graphs_among_other_messages_transfer_what_was_sent";
    let _alone = alone();
    let limit = Limit::new(test, STEP);
    let Some((device, context)) = begin(test) else {
        return;
    };
    let first = from_env("DOORBELL_SEED", 1);
    for seed in first..first + from_env("DOORBELL_GRAPH_SEEDS", 8) {
        limit.step(seed, STEP);
        random_graphs(&device, &context, seed, 24);
    }
}

#[test]
fn random_graphs_survive_loss_duplicates_and_reordering() {
    let test = "random_graphs_survive_loss_duplicates_and_reordering";
    let _alone = alone();
    let limit = Limit::new(test, STEP);
    let Some((device, context)) = begin(test) else {
        return;
    };
    let first = from_env("DOORBELL_SEED", 1000);
    for seed in first..first + from_env("DOORBELL_GRAPH_SEEDS", 8) / 4 {
        limit.step(seed, STEP);
        let faults = Faults {
            loss: 0.01,
            duplicate: 0.02,
            reorder: 0.05,
            seed,
            ..strict()
        };
        if !device.set_faults(faults) {
            return waived(test, "the device injects no faults here");
        }
        random_graphs(&device, &context, seed, 16);
    }
}

/// Short, long and empty messages both ways. Each launch is queued as soon as the memory of the one before may be used again.
#[test]
fn a_graph_of_messages_is_launched_many_times() {
    let test = "a_graph_of_messages_is_launched_many_times";
    let _alone = alone();
    let limit = Limit::new(test, STEP);
    let Some((device, context)) = begin(test) else {
        return;
    };
    let launches = from_env("DOORBELL_GRAPH_LAUNCHES", 300);
    on_both(&device, &context, 1, SOON, |side| {
        let steps = [
            Do::Send(40),
            Do::Send(1000),
            Do::Recv(40),
            Do::Send(0),
            Do::Recv(1000),
            Do::Recv(0),
        ];
        let mut graph = side.record(&steps);
        for go in 0..launches {
            if go % 100 == 0 {
                limit.step(go, STEP);
            }
            side.launch(&mut graph, go, &steps);
        }
    });
}

/// Launches that wait for those before them on their stream.
#[test]
fn launches_are_queued_behind_each_other() {
    let test = "launches_are_queued_behind_each_other";
    let _alone = alone();
    let _limit = Limit::new(test, STEP);
    let Some((device, context)) = begin(test) else {
        return;
    };
    on_both(&device, &context, 1, SOON, |side| {
        let steps = [Do::Send(64), Do::Recv(64)];
        let mut graph = side.record(&steps);
        side.write(7, &steps);
        let mut tickets = Vec::new();
        for _ in 0..100 {
            graph.launch(&side.stream, &mut [&mut side.queue]).unwrap();
            tickets.extend_from_slice(graph.message_tickets());
        }
        for ticket in tickets {
            assert_eq!(ticket.wait(SOON), Ok(64));
        }
        side.check(7, &steps);
    });
}

#[test]
fn a_graph_that_is_taken_back_leaves_no_trace() {
    let test = "a_graph_that_is_taken_back_leaves_no_trace";
    let _alone = alone();
    let _limit = Limit::new(test, STEP);
    let Some((device, context)) = begin(test) else {
        return;
    };
    on_both(&device, &context, 1, SOON, |side| {
        let steps = [Do::Send(64), Do::Recv(64), Do::Send(1000), Do::Recv(1000)];
        let mut graph = side.record(&steps);
        for go in 0..40 {
            if graph.is_armed() {
                graph.disarm(&mut [&mut side.queue]).unwrap();
                assert!(!graph.is_armed());
            }
            side.go_directly(go, &steps);
            graph.arm(&mut [&mut side.queue]).unwrap();
            let refused = graph.arm(&mut [&mut side.queue]).unwrap_err();
            assert!(matches!(
                refused,
                Error::State {
                    kind: StateKind::Armed,
                    ..
                }
            ));
        }
        graph.disarm(&mut [&mut side.queue]).unwrap();
    });
}

#[test]
fn a_graph_that_is_dropped_armed_fails_its_queue() {
    let test = "a_graph_that_is_dropped_armed_fails_its_queue";
    let _alone = alone();
    let _limit = Limit::new(test, STEP);
    let Some((device, context)) = begin(test) else {
        return;
    };
    for is_instantiated in [false, true] {
        let [mut a, _b] = pair(&device, SOON, SOON);
        let stream = CudaStream::new(&context, test).unwrap();
        let memory = Region::alloc(a.domain(), 64, Access::ALL).unwrap();
        let mut builder = GraphBuilder::capture(&stream).unwrap();
        let slice = memory.slice(0, 64).unwrap();
        builder.start_message(&mut a, &[slice]).unwrap();
        assert_eq!(a.failure(), None);
        match is_instantiated {
            true => drop(builder.instantiate().unwrap()),
            false => drop(builder),
        }
        assert_eq!(a.failure().unwrap().cause, Cause::Aborted);
    }
}

#[test]
fn refused_steps_and_launches_change_nothing() {
    let test = "refused_steps_and_launches_change_nothing";
    let _alone = alone();
    let _limit = Limit::new(test, STEP);
    let Some((device, context)) = begin(test) else {
        return;
    };
    on_both(&device, &context, 1, None, |side| {
        let other = Device::open("softcx").unwrap().protection_domain();
        let foreign = Region::alloc(&other, 64, Access::ALL).unwrap();
        let Side {
            queue,
            stream,
            memory,
            meeting,
            ..
        } = side;
        let mut builder = GraphBuilder::capture(stream).unwrap();
        let slice = [memory.slice(0, 64).unwrap()];
        let into = [memory.slice(LONG as u64, LONG as u64).unwrap()];
        builder.start_message(queue, &slice).unwrap();
        for _ in 0..3 {
            let not_ours = [foreign.slice(0, 64).unwrap()];
            let refused = builder.send_message(queue, &not_ours).unwrap_err();
            assert!(matches!(refused, Error::Foreign { .. }), "{refused}");
            let refused = builder.recv_message(queue, &not_ours).unwrap_err();
            assert!(matches!(refused, Error::Foreign { .. }), "{refused}");
        }
        builder.recv_message(queue, &into).unwrap();
        let mut graph = instantiate(builder, meeting);
        // The queue is the graph's until that is launched.
        let refused = queue.start_send(stream, &slice);
        assert!(matches!(refused, Err(Error::State { .. })), "{refused:?}");
        let steps = [Do::Send(64), Do::Recv(64)];
        for go in 0..4 {
            side.launch(&mut graph, go, &steps);
            let missing = graph.arm(&mut []).unwrap_err();
            assert!(matches!(missing, Error::Foreign { .. }), "{missing}");
            assert!(!graph.is_armed());
        }
        // More than the queue has room for.
        let Side {
            queue,
            stream,
            memory,
            meeting,
            ..
        } = side;
        stream.synchronize(SOON).unwrap();
        let mut builder = GraphBuilder::capture(stream).unwrap();
        let slice = [memory.slice(0, 64).unwrap()];
        let mut recorded = 0;
        let refused = loop {
            match builder.start_message(queue, &slice) {
                Ok(()) => recorded += 1,
                Err(error) => break error,
            }
        };
        assert!(matches!(refused, Error::QueueFull { .. }), "{refused}");
        assert!(recorded >= 32, "{recorded}");
        let mut graph = instantiate(builder, meeting);
        graph.disarm(&mut [queue as &mut dyn GraphMember]).unwrap();
        side.go_directly(9, &steps);
    });
}

#[test]
fn a_launch_that_the_driver_refuses_is_repeated_or_taken_back() {
    let test = "a_launch_that_the_driver_refuses_is_repeated_or_taken_back";
    let _alone = alone();
    let _limit = Limit::new(test, STEP);
    let Some((device, context)) = begin(test) else {
        return;
    };
    if !is_standin() {
        return waived(test, "a real driver does not fail on request");
    }
    on_both(&device, &context, 1, SOON, |side| {
        let steps = [Do::Send(64), Do::Recv(64), Do::Send(1000), Do::Recv(1000)];
        let mut graph = side.record(&steps);
        graph.disarm(&mut [&mut side.queue]).unwrap();
        for go in 0..60 {
            // Leaves completions of credits that nobody has waited for.
            side.go_directly(3 * go, &steps);
            side.go_directly(3 * go + 1, &steps);
            let call = ["cuGraphLaunch", "cuGraphExecKernelNodeSetParams_v2"][go as usize % 2];
            let fault = Fault::here(&format!("{call}:999,nth=1"));
            let refused = graph.launch(&side.stream, &mut [&mut side.queue]);
            drop(fault);
            assert!(matches!(refused, Err(Error::Cuda { .. })), "{refused:?}");
            assert!(graph.is_armed());
            if go % 3 == 0 {
                graph.disarm(&mut [&mut side.queue]).unwrap();
                side.go_directly(3 * go + 2, &steps);
            } else {
                side.launch(&mut graph, 3 * go + 2, &steps);
            }
        }
    });
}

/// Each of the two directions of a queue is a graph's for itself.
#[test]
fn a_graph_that_only_sends_leaves_receives_alone() {
    let test = "a_graph_that_only_sends_leaves_receives_alone";
    let _alone = alone();
    let _limit = Limit::new(test, STEP);
    let Some((device, context)) = begin(test) else {
        return;
    };
    on_both(&device, &context, 1, None, |side| {
        let (first, second) = (0, LONG as u64);
        let sends = [Do::Send(64), Do::Recv(64)];
        // The graph is armed while this side receives by other calls, and is taken back every other time.
        for go in 0..60 {
            side.write(go, &sends);
            let Side {
                queue,
                stream,
                memory,
                meeting,
                ..
            } = &mut *side;
            let record = |queue: &mut MessageQueue| {
                let mut builder = GraphBuilder::capture(stream).unwrap();
                let slice = memory.slice(first, 64).unwrap();
                builder.start_message(queue, &[slice]).unwrap();
                instantiate(builder, meeting)
            };
            let mut graph = record(queue);
            let mut other = record(queue);
            // In the order in which they were prepared.
            let refused = graph.disarm(&mut [&mut *queue]).unwrap_err();
            assert!(
                matches!(
                    refused,
                    Error::State {
                        kind: StateKind::OutOfOrder,
                        ..
                    }
                ),
                "{refused}"
            );
            other.disarm(&mut [&mut *queue]).unwrap();
            if go % 2 == 0 {
                graph.launch(stream, &mut [&mut *queue]).unwrap();
                other.arm(&mut [&mut *queue]).unwrap();
            }
            let into = [memory.slice(second, LONG as u64).unwrap()];
            let is_by_thread = go % 4 < 2;
            if go % 2 == 1 {
                graph.disarm(&mut [&mut *queue]).unwrap();
                let slice = memory.slice(first, 64).unwrap();
                queue.send_now(&[slice], SOON).unwrap();
                other.arm(&mut [&mut *queue]).unwrap();
            }
            // While a graph is armed.
            let received = match is_by_thread {
                true => queue.recv_now(&into, SOON),
                false => queue.recv(stream, &into).unwrap().wait(SOON),
            };
            assert_eq!(received, Ok(64));
            stream.synchronize(SOON).unwrap();
            other.disarm(&mut [&mut *queue]).unwrap();
            side.check(go, &sends);
        }
    });
}

/// The peer answers only what the graph sends: nothing that the graph waits for may come behind that answer.
#[test]
fn a_graph_sends_what_a_receive_of_another_stream_waits_for() {
    let test = "a_graph_sends_what_a_receive_of_another_stream_waits_for";
    let _alone = alone();
    let _limit = Limit::new(test, STEP);
    let Some((device, context)) = begin(test) else {
        return;
    };
    let [mut asks, mut answers] = pair(&device, SOON, SOON);
    let memory = Region::alloc(asks.domain(), 256, Access::ALL).unwrap();
    let slice = |at| [memory.slice(at, 64).unwrap()];
    let streams = [(); 3].map(|()| CudaStream::new(&context, test).unwrap());
    let mut builder = GraphBuilder::capture(&streams[0]).unwrap();
    builder.send_message(&mut asks, &slice(0)).unwrap();
    let mut graph = builder.instantiate().unwrap();
    // Each receive of a lap of the credits' completions.
    for round in 0..80 {
        memory.fill(0, 64, round).unwrap();
        let answer = asks.recv(&streams[1], &slice(64)).unwrap();
        graph.launch(&streams[0], &mut [&mut asks]).unwrap();
        answers.recv(&streams[2], &slice(128)).unwrap();
        let sent = answers.send(&streams[2], &slice(128)).unwrap();
        assert_eq!(answer.wait(SOON), Ok(64), "{round}");
        assert_eq!(sent.wait(SOON), Ok(64));
        assert!(memory.is_filled_with(64, 64, round).unwrap());
    }
}

/// Otherwise the wait for a read would take the completion of an earlier credit for its own, and end before the message is there.
#[test]
fn a_graph_waits_first_for_completions_of_earlier_credits() {
    let test = "a_graph_waits_first_for_completions_of_earlier_credits";
    let _alone = alone();
    let _limit = Limit::new(test, STEP);
    let Some((device, context)) = begin(test) else {
        return;
    };
    // With two messages ahead each credit has a completion.
    let [mut a, mut b] = pair_of(&device, 2, SOON, SOON);
    let memory = Region::alloc(a.domain(), 4 * LONG as u64, Access::ALL).unwrap();
    let [from, into] = [0, LONG as u64].map(|at| [memory.slice(at, LONG as u64).unwrap()]);
    memory.fill(0, LONG as u64, 7).unwrap();
    let short = [memory.slice(0, 64).unwrap()];
    b.send_now(&short, SOON).unwrap();
    assert_eq!(a.recv_now(&into, SOON), Ok(64));
    let stream = CudaStream::new(&context, test).unwrap();
    let mut builder = GraphBuilder::capture(&stream).unwrap();
    builder.recv_message(&mut a, &into).unwrap();
    let mut graph = builder.instantiate().unwrap();
    let slow = Faults {
        delay_ns: 20_000_000,
        ..strict()
    };
    if !device.set_faults(slow) {
        return waived(test, "the device injects no faults here");
    }
    let sent = b.start_send_now(&from, SOON).unwrap();
    graph.launch(&stream, &mut [&mut a]).unwrap();
    let received = graph.message_tickets()[0].wait(SOON);
    assert_eq!(received, Ok(LONG as u64));
    assert!(memory.is_filled_with(LONG as u64, LONG as u64, 7).unwrap());
    b.wait_send_now(&sent, SOON).unwrap();
}

/// Nothing of the queue is in the builder then.
#[test]
fn a_queue_whose_only_step_was_refused_goes_on() {
    let test = "a_queue_whose_only_step_was_refused_goes_on";
    let _alone = alone();
    let _limit = Limit::new(test, STEP);
    let Some((device, context)) = begin(test) else {
        return;
    };
    let domain = device.protection_domain();
    let mut queue = MessageQueue::new(&domain, &MessageConfig::default()).unwrap();
    let stream = CudaStream::new(&context, test).unwrap();
    let memory = Region::alloc(&domain, 64, Access::ALL).unwrap();
    let slice = [memory.slice(0, 64).unwrap()];
    for is_instantiated in [false, true] {
        let mut builder = GraphBuilder::capture(&stream).unwrap();
        for _ in 0..2 {
            let refused = builder.send_message(&mut queue, &slice).unwrap_err();
            assert!(
                matches!(
                    refused,
                    Error::State {
                        kind: StateKind::NotConnected,
                        ..
                    }
                ),
                "{refused}"
            );
        }
        if is_instantiated {
            let mut graph = builder.instantiate().unwrap();
            graph.disarm(&mut []).unwrap();
        }
        assert_eq!(queue.failure(), None);
    }
}

/// Its graph cannot be launched any more.
#[test]
fn a_queue_that_is_dropped_while_a_graph_is_armed_ends_its_connection() {
    let test = "a_queue_that_is_dropped_while_a_graph_is_armed";
    let _alone = alone();
    let _limit = Limit::new(test, STEP);
    let Some((device, context)) = begin(test) else {
        return;
    };
    let [mut a, mut b] = pair(&device, SOON, None);
    let stream = CudaStream::new(&context, test).unwrap();
    let memory = Region::alloc(a.domain(), 64, Access::ALL).unwrap();
    let slice = [memory.slice(0, 64).unwrap()];
    let mut builder = GraphBuilder::capture(&stream).unwrap();
    builder.start_message(&mut a, &slice).unwrap();
    let graph = builder.instantiate().unwrap();
    drop(a);
    // The peer's message finds nobody.
    let sent = b.send_now(&slice, SOON);
    assert!(matches!(sent, Err(Error::Work(_))), "{sent:?}");
    drop(graph);
}

/// An operation that finds no room leaves the other members as they were.
#[test]
fn a_launch_without_room_leaves_all_members_as_they_were() {
    let test = "a_launch_without_room_leaves_all_members_as_they_were";
    let _alone = alone();
    let _limit = Limit::new(test, STEP);
    let Some((device, context)) = begin(test) else {
        return;
    };
    let [mut a, mut b] = pair(&device, SOON, None);
    let ranks = pair(&device, SOON, None);
    let mut ranks = {
        let [one, other] = ranks;
        [
            Communicator::new(0, vec![None, Some(one)]).unwrap(),
            Communicator::new(1, vec![Some(other), None]).unwrap(),
        ]
    };
    let memory = Region::alloc(a.domain(), 4096, Access::ALL).unwrap();
    let of_ranks = Region::alloc(ranks[0].domain(), 4096, Access::ALL).unwrap();
    let gate = Region::alloc(a.domain(), 64, Access::ALL).unwrap();
    let streams = [(); 2].map(|()| CudaStream::new(&context, test).unwrap());
    let sum = Reduction::new(DataType::I64, ReduceOp::Sum);
    let mut graphs = Vec::new();
    for (rank, stream) in ranks.iter_mut().zip(&streams) {
        let at = 1024 * u64::from(rank.rank());
        let slice = of_ranks.slice(at, 16).unwrap();
        let reduce = rank.all_reduce(&slice, &slice, sum, Some(Algorithm::Ring));
        let reduce = reduce.unwrap();
        let mut builder = GraphBuilder::capture(stream).unwrap();
        if rank.rank() == 0 {
            let into = [memory.slice(2048, 64).unwrap()];
            builder.recv_message(&mut a, &into).unwrap();
        }
        builder.collective(rank, &reduce).unwrap();
        graphs.push(builder.instantiate().unwrap());
    }
    let open = Condition::GreaterOrEqual(1);
    for stream in &streams {
        stream_wait_value32(stream, &gate, 0, open, SOON).unwrap();
    }
    // Behind the gate, until a queue of the ranks is full.
    let mut launched = [0, 0];
    for (at, (rank, stream)) in ranks.iter_mut().zip(&streams).enumerate() {
        loop {
            let members: &mut [&mut dyn GraphMember] = match at {
                0 => &mut [&mut a, rank],
                _ => &mut [rank],
            };
            match graphs[at].launch(stream, members) {
                Ok(()) => launched[at] += 1,
                Err(error) => {
                    assert!(matches!(error, Error::QueueFull { .. }), "{error}");
                    assert!(!graphs[at].is_armed());
                    break;
                }
            }
        }
    }
    assert_eq!(launched[0], launched[1]);
    assert!(launched[0] > 4, "{launched:?}");
    gate.store_u32(0, 1).unwrap();
    // What was launched receives these messages, and the next call the one behind them.
    let message = [memory.slice(3072, 64).unwrap()];
    for number in 0..=launched[0] {
        memory.fill(3072, 64, number as u8 + 1).unwrap();
        b.send_now(&message, SOON).unwrap();
    }
    streams
        .iter()
        .for_each(|stream| stream.synchronize(SOON).unwrap());
    assert!(memory.is_filled_with(2048, 64, launched[0] as u8).unwrap());
    let into = [memory.slice(2048, 64).unwrap()];
    assert_eq!(a.recv_now(&into, SOON), Ok(64));
    assert!(
        memory
            .is_filled_with(2048, 64, launched[0] as u8 + 1)
            .unwrap()
    );
    for (rank, stream) in ranks.iter_mut().zip(&streams) {
        let members: &mut [&mut dyn GraphMember] = match rank.rank() {
            0 => &mut [&mut a, rank],
            _ => &mut [rank],
        };
        let graph = &mut graphs[usize::from(members.len() == 1)];
        graph.launch(stream, members).unwrap();
    }
    b.send_now(&message, SOON).unwrap();
    streams
        .iter()
        .for_each(|stream| stream.synchronize(SOON).unwrap());
}

/// What was recorded of the queue is taken back, and the builder stays broken.
#[test]
fn a_message_that_the_driver_refuses_to_record_leaves_no_trace() {
    let test = "a_message_that_the_driver_refuses_to_record_leaves_no_trace";
    let _alone = alone();
    let _limit = Limit::new(test, STEP);
    let Some((device, context)) = begin(test) else {
        return;
    };
    if !is_standin() {
        return waived(test, "a real driver does not fail on request");
    }
    on_both(&device, &context, 1, SOON, |side| {
        let steps = [Do::Send(64), Do::Recv(64), Do::Send(1000), Do::Recv(1000)];
        let faults = [
            "cuGraphAddBatchMemOpNode:999,nth=1",
            "cuGraphAddBatchMemOpNode:999,nth=2",
            "cuGraphAddBatchMemOpNode:999,nth=3",
            "cuGraphAddKernelNode_v2:999,nth=1",
            "cuStreamUpdateCaptureDependencies:999,nth=2",
        ];
        for (go, fault) in (0..).zip(faults) {
            let Side {
                queue,
                stream,
                memory,
                ..
            } = &mut *side;
            let slice = [memory.slice(0, 64).unwrap()];
            let into = [memory.slice(LONG as u64, LONG as u64).unwrap()];
            let mut builder = GraphBuilder::capture(stream).unwrap();
            builder.start_message(queue, &slice).unwrap();
            let injected = Fault::here(fault);
            let refused = builder.recv_message(queue, &into);
            drop(injected);
            assert!(
                matches!(refused, Err(Error::Cuda { .. })),
                "{fault}: {refused:?}"
            );
            let still = builder.wait_messages(queue);
            assert_eq!(still, refused);
            assert_eq!(builder.instantiate().map(drop), refused);
            side.go_directly(go, &steps);
        }
    });
}

/// The deadline of each wait counts from when the graph comes to it.
#[test]
fn a_wait_in_a_graph_ends_at_its_deadline() {
    let test = "a_wait_in_a_graph_ends_at_its_deadline";
    let _alone = alone();
    let _limit = Limit::new(test, STEP);
    let Some((device, context)) = begin(test) else {
        return;
    };
    let [mut a, _b] = pair(&device, Some(Duration::from_millis(50)), None);
    let stream = CudaStream::new(&context, test).unwrap();
    let memory = Region::alloc(a.domain(), 64, Access::ALL).unwrap();
    let mut builder = GraphBuilder::capture(&stream).unwrap();
    let slice = memory.slice(0, 64).unwrap();
    builder.recv_message(&mut a, &[slice]).unwrap();
    let mut graph = builder.instantiate().unwrap();
    graph.launch(&stream, &mut [&mut a]).unwrap();
    let ticket = graph.message_tickets()[0].clone();
    assert!(ticket.wait(SOON).is_err());
    assert!(stream.synchronize(SOON).is_err());
    let cause = a.failure().unwrap().cause;
    assert!(matches!(cause, Cause::Deadline(_)), "{cause:?}");
    assert!(stream.take_fault().is_some());
    // It cannot be launched again.
    let refused = graph.launch(&stream, &mut [&mut a]).unwrap_err();
    assert!(matches!(refused, Error::Work(_)), "{refused}");
}
