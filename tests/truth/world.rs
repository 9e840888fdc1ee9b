//! Executes a plan with endpoints, streams and threads, and passes the result of each call to the model.

mod bounce;
#[cfg(feature = "cuda")]
mod graph;
mod group;
#[cfg(feature = "cuda")]
mod kernel_queue;

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use doorbell::softcx::Faults;
use doorbell::{
    AbortHandle, Condition, Control, Device, Endpoint, Error, Event, Executor, Prepared,
    ProtectionDomain, QueueKind, RemoteRegion, Result, Slice, StateKind, Status, Ticket, Work,
    stream_post, stream_post_all, stream_wait_value32, stream_write_value32,
};

use crate::memory::{Bank, Memory, Shared, place, swapped, word};
use crate::model::{Launched, Lie, Life, Model, Request, imm, lock};
use crate::peer::Peer;
use crate::plan::{
    Call, EVENTS, GATES, Kernel, Plan, STEPS_MAX, Send, Step, Transfer, Way, end_name,
};
use crate::rig::{Stream, Streams, count, eventfd};
use bounce::Written;
#[cfg(feature = "cuda")]
use graph::Captured;
use group::Ranks;
#[cfg(feature = "cuda")]
use kernel_queue::{Codes, OwnedQueue};

/// Longer than a kernel waits for its gate.
const GATE: Duration = Duration::from_secs(30);

/// Longer than a notification takes after its event has passed.
const NOTIFIES: Duration = Duration::from_secs(5);

/// How long a post to a full queue is retried.
const INSISTS: Duration = Duration::from_millis(1);

struct End {
    /// `None` after it was dropped.
    endpoint: Option<Endpoint>,
    life: Arc<Life>,
    /// Its send queue, if kernels own it.
    #[cfg(feature = "cuda")]
    queue: Option<OwnedQueue>,
}

/// A stream with all that was queued on it, in order.
struct Lane {
    stream: Stream,
    /// Continues behind failed work.
    continues: bool,
    log: Vec<Entry>,
}

enum Entry {
    Kernel(Arc<Launched>),
    Request(usize),
    /// Aborted, and the time when that call had returned.
    Abort(u64),
    /// Behind that many entries of another stream, by an event.
    After {
        stream: usize,
        entries: usize,
    },
    /// A call has reported a failure.
    Report,
}

struct Recorded {
    event: Event,
    /// The stream, and how many of its entries were before the record.
    at: Option<(usize, usize)>,
}

/// Flags that kernels wait for, and their results.
struct Gates {
    open: [AtomicBool; GATES],
}

pub struct World<'a> {
    plan: &'a Plan,
    devices: &'a [Device],
    domains: Vec<ProtectionDomain>,
    /// The process of the remote endpoint.
    peer: Option<Peer>,
    ranks: Option<Ranks>,
    pub model: Arc<Model>,
    ends: Vec<Mutex<End>>,
    /// `None`: the remote endpoint.
    aborts: Vec<Option<AbortHandle>>,
    lanes: Vec<Mutex<Lane>>,
    events: Vec<Mutex<Recorded>>,
    prepared: Vec<Mutex<Option<Prepared>>>,
    /// By the step that records it.
    #[cfg(feature = "cuda")]
    graphs: Vec<Mutex<Option<Captured>>>,
    #[cfg(feature = "cuda")]
    codes: Option<Codes>,
    gates: Arc<Gates>,
    /// Contents of regions when they were deregistered.
    deregistered: Mutex<Vec<(usize, Vec<Vec<u8>>)>>,
    /// What bounce buffers have written.
    written: Mutex<Vec<Written>>,
    /// The events that had not passed when a notification was asked for, each with its eventfd.
    notifications: Mutex<Vec<(Event, OwnedFd)>>,
    is_sync: bool,
    has_proxy: bool,
}

/// The findings of a run, and whether something did not end, after which the process must not continue.
pub fn run(
    plan: &Plan,
    devices: &[Device],
    streams: &Streams,
    patience: Duration,
    checks_faults: bool,
    watched: &Mutex<Option<Arc<Model>>>,
) -> Vec<Lie> {
    let world = World::new(plan, devices, streams, checks_faults);
    *lock(watched) = Some(Arc::clone(&world.model));
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let witness = scope.spawn(|| {
            while !is_over.load(Ordering::Acquire) {
                world
                    .model
                    .all()
                    .for_each(|request| world.model.observe(request));
                std::thread::sleep(Duration::from_micros(30));
            }
        });
        let (first, others) = plan.in_order();
        first.iter().for_each(|step| world.step(step));
        let threads: Vec<_> = (0..plan.threads)
            .map(|thread| {
                let world = &world;
                scope.spawn(move || {
                    for step in others.iter().filter(|step| step.thread == thread) {
                        world.step(step);
                    }
                })
            })
            .collect();
        let panicked = threads
            .into_iter()
            .filter_map(|thread| thread.join().err())
            .count();
        if panicked > 0 {
            world.model.lie("panic", "a call of the library panicked");
        }
        world.drain(patience);
        is_over.store(true, Ordering::Release);
        if witness.join().is_err() {
            world.model.lie("panic", "a look at a ticket panicked");
        }
    });
    world.settle();
    world.model.lies()
}

impl<'a> World<'a> {
    fn new(
        plan: &'a Plan,
        devices: &'a [Device],
        streams: &Streams,
        checks_faults: bool,
    ) -> World<'a> {
        let domains: Vec<_> = devices.iter().map(Device::protection_domain).collect();
        let is_shared = plan.remote.is_some() || devices.len() > 1;
        let memory = Memory::new(
            &domains,
            plan.seed,
            plan.steps.iter().map(|step| step.number),
            is_shared.then(|| Shared::new().unwrap()),
        );
        for step in &plan.steps {
            if let Call::Send(Send {
                transfer: Transfer::FetchAdd | Transfer::CompareSwap,
                to,
                ..
            }) = step.call
            {
                memory.targets[to]
                    .write(place(step.number), &u64::MAX.to_le_bytes())
                    .unwrap();
            }
        }
        let model = Arc::new(Model::new(memory, plan, checks_faults));
        devices.iter().for_each(|device| {
            device.set_faults(plan.usual_faults());
        });
        let (mut ranks, mut of_group) = (None, Vec::new());
        if plan.has_group {
            let (joined, endpoints) = Ranks::join(plan, &domains);
            (ranks, of_group) = (Some(joined), Vec::from(endpoints));
        }
        let endpoint = |end: usize| {
            let domain = &domains[end % domains.len()];
            (plan.remote != Some(end)).then(|| Endpoint::new(domain, &plan.pairs[end / 2]).unwrap())
        };
        let connected = of_group.len();
        let mut endpoints: Vec<_> = (of_group.into_iter().map(Some))
            .chain((connected..2 * plan.pairs.len()).map(endpoint))
            .collect();
        let mut peer = None;
        for pair in endpoints[connected..].chunks_mut(2) {
            match pair {
                [Some(a), Some(b)] => {
                    a.connect(&b.address()).unwrap();
                    b.connect(&a.address()).unwrap();
                }
                [Some(a), None] => {
                    let started = Peer::start(plan, &model.memory.path().unwrap(), &a.address());
                    a.connect(&started.address()).unwrap();
                    peer = Some(started);
                }
                _ => unreachable!(),
            }
        }
        let steps = plan
            .steps
            .iter()
            .map(|step| step.number + 1)
            .max()
            .unwrap_or(0);
        let lanes: Vec<_> = (plan.continues.iter().enumerate())
            .map(|(number, continues)| {
                let stream = streams.stream(&format!("s{number}"));
                stream.continue_on_error(*continues);
                Mutex::new(Lane {
                    stream,
                    continues: *continues,
                    log: Vec::new(),
                })
            })
            .collect();
        let aborts = (endpoints.iter())
            .map(|endpoint| endpoint.as_ref().map(Endpoint::abort_handle))
            .collect();
        let has = |control: Control| {
            let mut paths = endpoints.iter().flatten().map(Endpoint::path);
            paths.any(|path| path.control == control)
        };
        let (is_sync, has_proxy) = (has(Control::Sync), has(Control::Proxy));
        let ends: Vec<_> = (endpoints.into_iter().enumerate())
            .map(|(end, endpoint)| {
                Mutex::new(End {
                    life: model.begin_life(end, endpoint.as_ref().map_or(0, Endpoint::qpn), 0),
                    endpoint,
                    #[cfg(feature = "cuda")]
                    queue: None,
                })
            })
            .collect();
        if let Some(ranks) = &mut ranks {
            ranks.lives = ends[..2]
                .iter()
                .map(|end| Arc::clone(&lock(end).life))
                .collect();
        }
        World {
            plan,
            devices,
            peer,
            ranks,
            written: Mutex::default(),
            notifications: Mutex::default(),
            is_sync,
            has_proxy,
            aborts,
            ends,
            #[cfg(feature = "cuda")]
            codes: Codes::new(&lanes),
            lanes,
            events: (0..EVENTS)
                .map(|_| {
                    Mutex::new(Recorded {
                        // Only those can notify.
                        event: Event::blocking(),
                        at: None,
                    })
                })
                .collect(),
            prepared: (0..steps).map(|_| Mutex::default()).collect(),
            #[cfg(feature = "cuda")]
            graphs: (0..steps).map(|_| Mutex::default()).collect(),
            gates: Arc::new(Gates {
                open: Default::default(),
            }),
            deregistered: Mutex::default(),
            domains,
            model,
        }
    }

    fn step(&self, step: &Step) {
        let number = step.number;
        match &step.call {
            Call::Send(send) => self.send(number, send),
            Call::Recv {
                end,
                len_bytes,
                to,
                way,
            } => {
                let into = [self.model.memory.targets[*to]
                    .of(*end)
                    .slice(place(number), *len_bytes)
                    .unwrap()];
                let wr_id = number as u64 + 1;
                self.operation(
                    number,
                    *end,
                    *way,
                    Call3 {
                        now: &|endpoint| endpoint.post_recv(wr_id, &into),
                        queued: &|endpoint, stream| {
                            endpoint.stream_queue_recv(stream, wr_id, &into)
                        },
                        prepared: &|endpoint| endpoint.prepare_recv(wr_id, &into),
                    },
                );
            }
            Call::StreamWait {
                end,
                side,
                timeout,
                way,
            } => {
                let timeout = |endpoint: &Endpoint| timeout.or(endpoint.config().wait_timeout);
                self.operation(
                    number,
                    *end,
                    *way,
                    Call3 {
                        now: &|_| unreachable!(),
                        queued: &|endpoint, stream| {
                            endpoint.stream_wait_cq_for(stream, *side, timeout(endpoint))
                        },
                        prepared: &|endpoint| {
                            endpoint.prepare_wait_cq_for(*side, timeout(endpoint))
                        },
                    },
                );
            }
            Call::Poll { end, side } => self.poll(*end, *side, |endpoint| endpoint.poll_cq(*side)),
            Call::WaitCq { end, side, timeout } => {
                self.poll(*end, *side, |endpoint| {
                    match endpoint.wait_cq(*side, Some(*timeout)) {
                        Err(Error::Timeout { .. }) => Ok(None),
                        taken => taken.map(Some),
                    }
                })
            }
            Call::Post { prepared, stream } => self.post(prepared, *stream),
            Call::Rollback(prepared) => self.take_back(*prepared, true),
            Call::DropPrepared(prepared) => self.take_back(*prepared, false),
            Call::Launch { stream, kernel } => self.launch(number, *stream, *kernel),
            Call::Open(gate) => self.open(*gate),
            Call::Record { stream, event } => {
                let mut lane = self.lane(*stream);
                let mut recorded = lock(&self.events[*event]);
                let result = lane.stream.record(&recorded.event);
                if self.allowed(&mut lane, result).is_some() {
                    recorded.at = Some((*stream, lane.log.len()));
                }
            }
            Call::WaitEvent { stream, event } => {
                let mut lane = self.lane(*stream);
                let recorded = lock(&self.events[*event]);
                let result = lane.stream.wait_event(&recorded.event);
                if self.allowed(&mut lane, result).is_some()
                    && let Some((stream, entries)) = recorded.at
                {
                    lane.log.push(Entry::After { stream, entries });
                }
            }
            Call::WaitValue {
                stream,
                gate,
                timeout,
            } => {
                let (words, at) = (&self.model.memory.words, 4 * *gate as u64);
                self.value(number, *stream, |stream| {
                    stream_wait_value32(
                        stream,
                        words,
                        at,
                        Condition::GreaterOrEqual(1),
                        Some(*timeout),
                    )
                });
            }
            Call::WriteValue { stream } => {
                let words = &self.model.memory.words;
                self.value(number, *stream, |stream| {
                    stream_write_value32(stream, words, word(number), number as u32 + 1)
                });
            }
            Call::Query(stream) => {
                let mut lane = self.lane(*stream);
                let result = lane.stream.query();
                self.allowed(&mut lane, result);
            }
            Call::Synchronize { stream, timeout } => {
                self.synchronize(*stream, *timeout);
            }
            Call::AbortStream(stream) => self.abort_stream(*stream),
            Call::Abort(end) => self.abort(*end),
            Call::Reset { pair, aborts } => self.reset(*pair, *aborts),
            Call::DropEndpoint(end) => {
                let mut end = lock(&self.ends[*end]);
                end.life.dropped.store(true, Ordering::SeqCst);
                drop(end.endpoint.take());
            }
            Call::Faults { device, .. } | Call::Break { device, .. } => {
                self.devices[*device].set_faults(self.plan.faults(&step.call).unwrap());
            }
            Call::Freeze { device, is_frozen } => {
                self.devices[*device].set_frozen(*is_frozen);
            }
            Call::StallProxy { device, is_stalled } => {
                self.stall(&self.devices[*device], *is_stalled)
            }
            Call::StopPeer(is_stopped) => self.peer.iter().for_each(|peer| peer.stop(*is_stopped)),
            Call::KillPeer => self.peer.iter().for_each(Peer::kill),
            Call::Deregister { bank, is_target } => {
                let memory = &self.model.memory;
                if !is_target {
                    memory.sources[*bank].deregister();
                } else if memory.targets[*bank].deregister() {
                    let places = STEPS_MAX;
                    let seen = (0..places)
                        .map(|number| Memory::read(&memory.targets[*bank], number))
                        .collect();
                    lock(&self.deregistered).push((*bank, seen));
                }
            }
            Call::Pause(us) => std::thread::sleep(Duration::from_micros(*us)),
            Call::Failure(end) => {
                let end = lock(&self.ends[*end]);
                if let Some(failure) = end.endpoint.as_ref().and_then(Endpoint::failure) {
                    self.model.failed(&end.life, failure);
                }
            }
            Call::Wait { of, timeout } => {
                let request = self.model.requests.get(*of).and_then(Option::as_ref);
                if let Some(ticket) = request.and_then(|request| request.trail().ticket.clone()) {
                    let started = Instant::now();
                    let result = ticket.wait(Some(*timeout));
                    let was_late = started.elapsed() >= *timeout;
                    self.model.waited(*of, &ticket, result, was_late);
                }
            }
            Call::WaitRoom {
                end,
                side,
                count,
                timeout,
            } => self.wait_room(*end, *side, *count, *timeout),
            Call::AskEvent { event, timeout } => self.ask_event(*event, *timeout),
            Call::Notify(event) => self.notify(*event),
            Call::TakeFault(stream) => {
                let mut lane = self.lane(*stream);
                match lane.stream.take_fault() {
                    Some(Error::Asynchronous { work, .. }) => {
                        work.iter().for_each(|work| self.model.faulted(*work));
                        lane.log.push(Entry::Report);
                    }
                    Some(error) => self.model.lie("unexpected error", format!("{error:?}")),
                    None => {}
                }
            }
            #[cfg(feature = "cuda")]
            Call::Capture { stream, operations } => self.capture(number, *stream, operations),
            #[cfg(feature = "cuda")]
            Call::LaunchGraph { of, stream } => self.launch_graph(number, *of, *stream),
            #[cfg(feature = "cuda")]
            Call::Arm(of) => self.arm(number, *of),
            #[cfg(feature = "cuda")]
            Call::Disarm(of) => self.disarm(*of),
            Call::Bounce(bounced) => self.bounce(number, bounced),
            Call::EndRank(rank) => self.end_rank(*rank),
            Call::Leave(rank) => self.leave(*rank),
            Call::CheckRank(rank) => self.check_rank(*rank),
            #[cfg(feature = "cuda")]
            Call::TakeQueue(end) => self.take_queue(number, *end),
            #[cfg(feature = "cuda")]
            Call::Put(put) => self.put(number, put),
            #[cfg(feature = "cuda")]
            Call::DropQueue(end) => {
                self.give_queue_back(&mut lock(&self.ends[*end]));
            }
            #[cfg(not(feature = "cuda"))]
            Call::Capture { .. }
            | Call::LaunchGraph { .. }
            | Call::Arm(_)
            | Call::Disarm(_)
            | Call::TakeQueue(_)
            | Call::Put(_)
            | Call::DropQueue(_) => unreachable!(),
        }
    }

    fn lane(&self, stream: usize) -> MutexGuard<'_, Lane> {
        lock(&self.lanes[stream])
    }

    /// Errors that a call may return in a plan with faults; any other error is a finding.
    fn allowed<T>(&self, lane: &mut Lane, result: Result<T>) -> Option<T> {
        match result {
            Ok(value) => return Some(value),
            Err(Error::Asynchronous { work, .. }) => {
                work.iter().for_each(|work| self.model.faulted(*work));
                lane.take_fault();
            }
            Err(Error::Timeout { .. }) => {}
            Err(error) => self.model.lie("unexpected error", format!("{error:?}")),
        }
        None
    }

    fn send(&self, number: usize, send: &Send) {
        let memory = &self.model.memory;
        let (source, target) = match send.transfer {
            Transfer::Read => (&memory.targets[send.to], &memory.sources[send.from]),
            Transfer::FetchAdd => (&memory.targets[send.to], &memory.counters),
            Transfer::CompareSwap => (&memory.targets[send.to], &memory.swaps),
            _ => (&memory.sources[send.from], &memory.targets[send.to]),
        };
        let (source, remote) = (
            source.of(send.end),
            self.remote(target, send.end ^ 1, send.wrong_key),
        );
        let (offset, one) = match send.transfer {
            Transfer::FetchAdd => Memory::counter(number),
            Transfer::CompareSwap => (swapped(number), 0),
            _ => (place(number), 0),
        };
        let remote = remote.slice(offset, send.len_bytes).unwrap();
        // Every fifth step has an empty piece, unless it has but one.
        let each = match number % 5 {
            0 => 0,
            _ => send.len_bytes / send.pieces / 8 * 8,
        };
        let slices: Vec<Slice<'_>> = (0..send.pieces)
            .map(|piece| {
                let len_bytes = if piece + 1 == send.pieces {
                    send.len_bytes - piece * each
                } else {
                    each
                };
                source
                    .slice(place(number) + piece * each, len_bytes)
                    .unwrap()
            })
            .collect();
        let bytes = memory.stamp(number, send.len_bytes);
        let mut work = match send.transfer {
            Transfer::Write | Transfer::WriteImm => Work::write(&slices, remote),
            Transfer::WriteInline => Work::write_inline(bytes, remote),
            Transfer::Send => Work::send(&slices),
            Transfer::SendInline => Work::send_inline(bytes),
            Transfer::Read => Work::read(&slices, remote),
            Transfer::FetchAdd => Work::fetch_add(&slices, remote, one),
            Transfer::CompareSwap => Work::compare_swap(&slices, remote, 0, number as u64 + 1),
        };
        if let Some(imm) = imm(number, send.transfer) {
            work = work.imm(imm);
        }
        let work = work
            .wr_id(number as u64 + 1)
            .signaled(send.signaled)
            .fence(send.fence)
            .ordered(send.ordered);
        self.operation(
            number,
            send.end,
            send.way,
            Call3 {
                now: &|endpoint| endpoint.post_send(&work),
                queued: &|endpoint, stream| endpoint.stream_queue_send(stream, &work),
                prepared: &|endpoint| endpoint.prepare_send(&work),
            },
        );
    }

    /// A bank as the peer of the endpoint `there` accesses it.
    fn remote(&self, bank: &Bank, there: usize, wrong_key: bool) -> RemoteRegion {
        let mut remote = match &self.peer {
            Some(peer) if Some(there) == self.plan.remote => {
                peer.region(self.model.memory.number(bank))
            }
            _ => bank.of(there).remote(),
        };
        if wrong_key {
            remote.rkey ^= 0x5500;
        }
        remote
    }

    fn operation(&self, number: usize, end: usize, way: Way, calls: Call3<'_>) {
        let request = self.model.request(number);
        let mut end = lock(&self.ends[end]);
        let End { endpoint, life, .. } = &mut *end;
        let Some(endpoint) = endpoint else {
            return self
                .model
                .refused(request, "its endpoint was dropped before");
        };
        let failure = endpoint.failure();
        // In every third step it is known whether there is room.
        let side = (number.is_multiple_of(3) && !request.is_wait()).then(|| request.side());
        let room = side.map_or(0, |side| endpoint.room(side));
        let mut lane = None;
        let result = match way {
            Way::Now => {
                let started = Instant::now();
                loop {
                    match (calls.now)(endpoint) {
                        Err(Error::QueueFull { .. })
                            if self.plan.insists && started.elapsed() < INSISTS =>
                        {
                            std::hint::spin_loop()
                        }
                        result => break result,
                    }
                }
            }
            Way::Stream(stream) => {
                let lane = lane.insert(self.lane(stream));
                (calls.queued)(endpoint, &lane.stream)
            }
            Way::Prepare => (calls.prepared)(endpoint).map(|prepared| {
                let ticket = prepared.ticket();
                *lock(&self.prepared[number]) = Some(prepared);
                ticket
            }),
        };
        if let Some(failure) = failure {
            self.model.failed(life, failure);
            if result.is_ok() {
                self.model.lie(
                    "accepted after a failure",
                    format!("step {number}: {failure:?}"),
                );
            }
        }
        match result {
            Ok(ticket) => {
                let behind = lane
                    .as_deref()
                    .and_then(|lane| Lane::last_kernel(&lane.log));
                self.model.accepted(request, life, ticket, behind);
                if let Some(lane) = &mut lane {
                    lane.log.push(Entry::Request(number));
                }
            }
            Err(error) => {
                self.model.refused(request, "the call that posts it failed");
                if room > 0 && matches!(error, Error::QueueFull { .. }) {
                    self.model.lie(
                        "full though there is room",
                        format!("step {number}: room for {room}"),
                    );
                }
                match error {
                    Error::Work(failure) => self.model.failed(life, failure),
                    // Not connected, nothing to wait for, or out of order; a deregistered region; a stream that is not done in time (sync path).
                    Error::QueueFull { .. } | Error::State { .. } | Error::Timeout { .. } => {}
                    Error::Asynchronous { .. } => {
                        lane.into_iter().for_each(|mut lane| lane.take_fault());
                    }
                    error => self
                        .model
                        .lie("unexpected error", format!("step {number}: {error:?}")),
                }
            }
        }
    }

    fn wait_room(&self, end: usize, side: QueueKind, count: u32, timeout: Duration) {
        let mut locked = lock(&self.ends[end]);
        let End { endpoint, life, .. } = &mut *locked;
        let Some(endpoint) = endpoint else { return };
        let started = Instant::now();
        let result = endpoint.wait_room(side, count, Some(timeout));
        let elapsed = started.elapsed();
        // No other thread posts to it or rolls back operations until this call has returned.
        let room = endpoint.room(side);
        let depth = match side {
            QueueKind::Send => endpoint.config().send_depth,
            QueueKind::Recv => endpoint.config().recv_depth,
        };
        let is_right = match &result {
            Ok(()) => room >= count || endpoint.failure().is_some(),
            Err(Error::Timeout { .. }) => elapsed >= timeout,
            Err(Error::QueueFull { .. }) => room < count,
            Err(Error::Range { .. }) => count > depth,
            Err(Error::Work(failure)) => {
                self.model.failed(life, *failure);
                true
            }
            Err(Error::State { .. }) => true,
            Err(_) => false,
        };
        if !is_right || room > depth {
            self.model.lie(
                "not the room that is there",
                format!(
                    "{}, {side:?}: room for {room} of {depth}, and {result:?} for {count}",
                    end_name(end)
                ),
            );
        }
    }

    fn ask_event(&self, event: usize, timeout: Option<Duration>) {
        let recorded = lock(&self.events[event]);
        let result = match timeout {
            None => recorded.event.query(),
            Some(timeout) => match recorded.event.synchronize(Some(timeout)) {
                Err(Error::Timeout { .. }) => Ok(false),
                result => result.map(|()| true),
            },
        };
        let at = recorded.at;
        drop(recorded);
        match (result, at) {
            (Ok(true), Some((stream, entries))) => {
                let lane = self.lane(stream);
                let before = Lane::last_kernel(&lane.log[..entries]);
                // A kernel that had not begun when its stream was aborted or failed never runs.
                let was_discarded = lane.log[..entries]
                    .iter()
                    .rev()
                    .take_while(|entry| !matches!(entry, Entry::Kernel(_)))
                    .any(|entry| matches!(entry, Entry::Abort(_) | Entry::Report));
                let continues = lane.continues;
                drop(lane);
                let is_under_way = |kernel: &Arc<Launched>| {
                    kernel.ended() == 0 && (kernel.started() != 0 || !was_discarded)
                };
                if let Some(kernel) = before.filter(is_under_way) {
                    self.model.lie(
                        "an event that has not passed",
                        format!("event {event}: kernel {} is not over", kernel.number),
                    );
                }
                // A stream with `continue_on_error` reports a failure once, and not by events.
                let failures = self.failures(stream);
                if let (Some(Some(by)), false) = (failures.get(entries), continues) {
                    self.model.lie(
                        "an event without its failure",
                        format!("event {event} is behind step {by}, which failed"),
                    );
                }
            }
            (Ok(false), None) => self.model.lie(
                "an event that has not passed",
                format!("event {event} was never recorded"),
            ),
            (Ok(_) | Err(Error::Asynchronous { .. }), _) => {}
            (Err(error), _) => self.model.lie("unexpected error", format!("{error:?}")),
        }
    }

    fn notify(&self, event: usize) {
        // Locked, so that it is not recorded meanwhile.
        let recorded = lock(&self.events[event]);
        let eventfd = eventfd();
        let was_passed = recorded.event.query();
        match recorded.event.notify(eventfd.as_fd()) {
            Ok(()) if was_passed != Ok(false) && count(&eventfd) != 1 => self.model.lie(
                "no notification of an event that has passed",
                format!("{was_passed:?}"),
            ),
            Ok(()) if was_passed != Ok(false) => {}
            Ok(()) => lock(&self.notifications).push((recorded.event.clone(), eventfd)),
            Err(error) => self.model.lie("unexpected error", format!("{error:?}")),
        }
    }

    /// All streams are done: each notification has come, once.
    fn settle_notifications(&self) {
        let started = Instant::now();
        for (event, eventfd) in lock(&self.notifications).iter() {
            let mut times = count(eventfd);
            // A thread that observes streams may have no processor.
            while times == 0 && started.elapsed() < NOTIFIES {
                std::thread::sleep(Duration::from_micros(100));
                times += count(eventfd);
            }
            if times != 1 {
                let passed = event.query();
                self.model.lie(
                    "not notified once",
                    format!("{times} times, and the event says {passed:?}"),
                );
            }
        }
    }

    fn poll(
        &self,
        end: usize,
        side: QueueKind,
        take: impl FnOnce(&mut Endpoint) -> Result<Option<doorbell::Completion>>,
    ) {
        let mut end = lock(&self.ends[end]);
        let End { endpoint, life, .. } = &mut *end;
        let Some(endpoint) = endpoint else { return };
        match take(endpoint) {
            // The completion of a bounce buffer's chunk, left by a transfer that failed.
            Ok(Some(completion)) if completion.wr_id >= bounce::CHUNKS => {}
            Ok(Some(completion)) => self.model.polled(life, side, completion),
            Ok(None) => {}
            Err(Error::State {
                kind: StateKind::KernelsOwnQueue,
                ..
            }) if life.has_kernels() => {}
            Err(Error::Work(failure)) => {
                self.model.polled_error(life, side);
                self.model.names(life, failure);
            }
            Err(error) => self.model.lie("unexpected error", format!("{error:?}")),
        }
    }

    fn post(&self, numbers: &[usize], stream: usize) {
        let mut lane = self.lane(stream);
        let taken = numbers
            .iter()
            .filter_map(|number| Some((*number, lock(self.prepared.get(*number)?).take()?)));
        let (numbers, mut list): (Vec<_>, Vec<_>) = taken.unzip();
        let requests: Vec<&Request> = numbers
            .iter()
            .map(|number| self.model.request(*number))
            .collect();
        // Locked until it is known whether the stream has accepted them: a refusal sets their tickets back to "prepared".
        let mut trails: Vec<_> = requests.iter().map(|request| request.trail()).collect();
        let result = if list.len() == 1 {
            stream_post(&lane.stream, list.remove(0))
                .map(drop)
                .map_err(|rejected| {
                    list.push(rejected.prepared);
                    rejected.error
                })
        } else {
            stream_post_all(&lane.stream, &mut list).map(drop)
        };
        match result {
            Ok(()) => {
                let behind = Lane::last_kernel(&lane.log);
                trails
                    .iter_mut()
                    .for_each(|trail| trail.behind.clone_from(&behind));
                lane.log
                    .extend(numbers.iter().map(|number| Entry::Request(*number)));
            }
            Err(error) => {
                for (number, prepared) in numbers.iter().zip(list) {
                    *lock(&self.prepared[*number]) = Some(prepared);
                }
                match error {
                    Error::Work(_) | Error::State { .. } | Error::Timeout { .. } => {}
                    Error::Asynchronous { .. } => lane.take_fault(),
                    error => self
                        .model
                        .lie("unexpected error", format!("post {numbers:?}: {error:?}")),
                }
            }
        }
    }

    fn take_back(&self, number: usize, rolls_back: bool) {
        let Some(request) = self.model.requests.get(number).and_then(Option::as_ref) else {
            return;
        };
        let end = request.end().map(|end| lock(&self.ends[end]));
        let Some(prepared) = lock(&self.prepared[number]).take() else {
            return;
        };
        self.model.dropping(request);
        let (true, Some(mut end)) = (rolls_back, end) else {
            return drop(prepared);
        };
        match &mut end.endpoint {
            Some(endpoint) => endpoint.rollback(prepared),
            None => drop(prepared),
        }
    }

    fn launch(&self, number: usize, stream: usize, kernel: Kernel) {
        let launched = Arc::new(Launched {
            number,
            panics: kernel == Kernel::Panics,
            started_at: AtomicU64::new(0),
            ended_at: AtomicU64::new(0),
            ended_when: Mutex::default(),
        });
        let (gates, model, told) = (
            Arc::clone(&self.gates),
            Arc::clone(&self.model),
            Arc::clone(&launched),
        );
        let function = move || {
            told.started_at.store(model.tick(), Ordering::SeqCst);
            let started = Instant::now();
            match kernel {
                Kernel::Plain | Kernel::Panics => {}
                Kernel::Sleeps(us) => std::thread::sleep(Duration::from_micros(us)),
                // It would run in the thread that is to open the gate.
                Kernel::Gate(_) if crate::rig::has_no_thread() => {}
                Kernel::Gate(gate) => {
                    while !gates.open[gate].load(Ordering::Acquire) && started.elapsed() < GATE {
                        std::thread::sleep(Duration::from_micros(20));
                    }
                }
            }
            *lock(&told.ended_when) = Some(Instant::now());
            told.ended_at.store(model.tick(), Ordering::SeqCst);
            if kernel == Kernel::Panics {
                // Without the panic hook, which would print it.
                std::panic::resume_unwind(Box::new("a kernel that fails"));
            }
        };
        let mut lane = self.lane(stream);
        let result = lane.stream.launch(function);
        if self.allowed(&mut lane, result).is_some() {
            lane.log.push(Entry::Kernel(launched));
        }
    }

    fn open(&self, gate: usize) {
        self.gates.open[gate].store(true, Ordering::Release);
        self.model
            .memory
            .words
            .store_u32(4 * gate as u64, 1)
            .unwrap();
    }

    fn open_all(&self) {
        (0..GATES).for_each(|gate| self.open(gate));
    }

    fn value(&self, number: usize, stream: usize, queue: impl FnOnce(&Stream) -> Result<Ticket>) {
        let request = self.model.request(number);
        let mut lane = self.lane(stream);
        let result = queue(&lane.stream);
        match self.allowed(&mut lane, result) {
            Some(ticket) => {
                let mut trail = request.trail();
                trail.ticket = Some(ticket);
                trail.behind = Lane::last_kernel(&lane.log);
                lane.log.push(Entry::Request(number));
            }
            None => self
                .model
                .refused(request, "the call that queues it failed"),
        }
    }

    /// Whether the stream has executed all of its work.
    fn synchronize(&self, stream: usize, timeout: Duration) -> bool {
        self.is_done(stream, &mut self.lane(stream), timeout)
    }

    /// [`World::synchronize`] of a stream that is locked.
    fn is_done(&self, stream: usize, lane: &mut Lane, timeout: Duration) -> bool {
        let result = lane.stream.synchronize(Some(timeout));
        let timed_out = matches!(result, Err(Error::Timeout { .. }));
        let is_ok = self.allowed(lane, result).is_some();
        let panicked = |entry: &Entry| matches!(entry, Entry::Kernel(kernel) if kernel.panics && kernel.ended() != 0);
        let reported = lane
            .log
            .iter()
            .rposition(|entry| matches!(entry, Entry::Report))
            .unwrap_or(0);
        if is_ok && skips(&lane.stream) && lane.log[reported..].iter().any(panicked) {
            self.model.lie(
                "no word of a kernel that panicked",
                format!("stream {stream}: synchronize is Ok"),
            );
        }
        !timed_out
    }

    fn abort_stream(&self, stream: usize) {
        // On the sync path another thread may be in a call that only this abort ends: then it is not known what was queued before.
        let Ok(mut lane) = self.lanes[stream].try_lock() else {
            return;
        };
        lane.stream.abort();
        let now = self.model.tick();
        lane.log.push(Entry::Abort(now));
    }

    fn reset(&self, pair: usize, aborts: bool) {
        let mut a = lock(&self.ends[2 * pair]);
        let mut b = lock(&self.ends[2 * pair + 1]);
        let abort = || (2 * pair..2 * pair + 2).for_each(|end| self.abort(end));
        if aborts {
            abort();
        }
        self.open_all();
        if !aborts
            && !(0..self.lanes.len())
                .all(|stream| self.synchronize(stream, Duration::from_millis(20)))
        {
            abort();
        }
        #[cfg(feature = "cuda")]
        if ![&mut a, &mut b]
            .map(|end| self.give_queue_back(end))
            .iter()
            .all(|gone| *gone)
        {
            return;
        }
        for (end, of) in [&mut a, &mut b].into_iter().zip(2 * pair..) {
            let End { endpoint, life, .. } = &mut **end;
            let Some(endpoint) = endpoint else {
                continue;
            };
            life.aborted.store(true, Ordering::SeqCst);
            let aborts = self.model.aborts(of);
            match endpoint.reset() {
                Ok(()) => *life = self.model.begin_life(of, endpoint.qpn(), aborts),
                // A program is still queued on a stream.
                Err(Error::Timeout { .. }) => return,
                Err(_) if self.plan.has_no_stop() => {
                    // It may have failed at its last step, when the generation had ended.
                    *life = self.model.begin_life(of, endpoint.qpn(), aborts);
                    life.aborted.store(true, Ordering::SeqCst);
                    self.model.lose_count(life);
                    return;
                }
                Err(error) => {
                    return self
                        .model
                        .lie("reset refused", format!("{}: {error:?}", end_name(of)));
                }
            }
        }
        let is_remote = self.plan.remote == Some(2 * pair + 1);
        let connected = match (&mut a.endpoint, &mut b.endpoint, &self.peer) {
            (Some(a), Some(b), _) => vec![a.connect(&b.address()), b.connect(&a.address())],
            (Some(a), None, Some(peer)) if is_remote => match peer.reset(&a.address()) {
                Some(address) => vec![a.connect(&address)],
                // It is stopped or killed.
                None => return,
            },
            _ => return,
        };
        for connected in connected {
            match connected {
                // Another thread has aborted it meanwhile.
                Ok(()) | Err(Error::Work(_)) => {}
                Err(
                    Error::System { .. }
                    | Error::State {
                        kind: StateKind::DeviceGone,
                        ..
                    },
                ) if self.plan.has_no_stop() => {}
                // Or has killed the other process.
                Err(Error::State {
                    kind: StateKind::Unreachable,
                    ..
                }) if is_remote => {}
                Err(error) => self
                    .model
                    .lie("connect refused", format!("pair {pair}: {error:?}")),
            }
        }
    }

    fn abort(&self, end: usize) {
        if let Some(handle) = &self.aborts[end] {
            self.model.aborts_during(end, || handle.abort());
        }
    }

    fn stall(&self, device: &Device, is_stalled: bool) {
        if self.has_proxy {
            device.set_proxy_stalled(is_stalled).unwrap();
        }
    }

    /// Ends all work.
    fn drain(&self, patience: Duration) {
        for device in self.devices {
            device.set_frozen(false);
            device.set_faults(Faults::default());
            self.stall(device, false);
        }
        self.open_all();
        let started = Instant::now();
        while self.plan.lingers
            && started.elapsed() < Duration::from_millis(10)
            && !self.model.under_way().is_empty()
        {
            std::thread::sleep(Duration::from_micros(200));
        }
        self.settle_ranks();
        for (number, prepared) in self.prepared.iter().enumerate() {
            if let Some(prepared) = lock(prepared).take() {
                self.model.dropping(self.model.request(number));
                drop(prepared);
            }
        }
        for (number, end) in self.ends.iter().enumerate() {
            // A dropped stream ends without that.
            if lock(end).endpoint.is_some() {
                self.abort(number);
            }
        }
        for stream in 0..self.lanes.len() {
            if !self.synchronize(stream, patience) {
                self.model
                    .lie("a stream does not end", format!("stream {stream}"));
                #[cfg(feature = "cuda")]
                for end in &self.ends {
                    // Kernels may still use it.
                    std::mem::forget(lock(end).queue.take());
                }
                return;
            }
        }
        // An endpoint that was dropped goes on as long as kernels own its send queue.
        #[cfg(feature = "cuda")]
        for end in &self.ends {
            self.give_queue_back(&mut lock(end));
        }
        let started = Instant::now();
        loop {
            let under_way = self.model.under_way();
            if under_way.is_empty() {
                break;
            }
            let is_gone = |number: &usize| {
                let end = self.model.request(*number).end();
                end.is_some_and(|end| lock(&self.ends[end]).endpoint.is_none())
            };
            if started.elapsed() > patience {
                let kind = if under_way.iter().all(is_gone) {
                    "never over, endpoint dropped"
                } else {
                    "never over"
                };
                self.model.lie(kind, format!("steps {under_way:?}"));
                break;
            }
            std::thread::sleep(Duration::from_micros(200));
        }
        for (end, state) in self.ends.iter().enumerate() {
            let state = lock(state);
            match state.endpoint.as_ref().map(Endpoint::failure) {
                Some(Some(failure)) => self.model.failed(&state.life, failure),
                Some(None) => self.model.lie("aborted without a failure", end_name(end)),
                None => {}
            }
        }
        // Time for late effects.
        std::thread::sleep(Duration::from_millis(1));
    }

    fn settle(&self) {
        let failures: Vec<_> = (0..self.lanes.len())
            .map(|stream| self.failures(stream))
            .collect();
        for stream in 0..self.lanes.len() {
            self.settle_lane(stream, &failures);
        }
        self.model.settle();
        self.settle_notifications();
        self.settle_written();
        for (bank, before) in lock(&self.deregistered).iter() {
            for (number, before) in before.iter().enumerate() {
                if self.plan.is_remote(number) {
                    // The other process has not deregistered it.
                    continue;
                }
                let now = Memory::read(&self.model.memory.targets[*bank], number);
                let came = |(now, before): (&u8, &u8)| *now != 0 && now != before;
                if now != *before && now.iter().zip(before).any(came) {
                    self.model.lie(
                        "written after it was deregistered",
                        format!("target {bank}, step {number}"),
                    );
                }
            }
        }
    }

    /// The step whose failure an entry of a stream is behind, entry by entry, and one more for the end: a kernel that panicked, or with
    /// `checks_faults` a wait.
    fn failures(&self, stream: usize) -> Vec<Option<usize>> {
        let lane = self.lane(stream);
        let skips = skips(&lane.stream);
        let (mut panicked, mut wait) = (None, None);
        let mut failures = vec![None];
        for entry in &lane.log {
            match entry {
                Entry::Abort(_) => wait = None,
                Entry::Report => (panicked, wait) = (None, None),
                Entry::Kernel(kernel) if kernel.panics && kernel.ended() != 0 => {
                    panicked = panicked.or(Some(kernel.number))
                }
                Entry::Request(number) if self.model.checks_faults => {
                    let request = self.model.request(*number);
                    if request.is_wait() && matches!(request.status(), Some(Status::Failed(_))) {
                        wait = wait.or(Some(*number));
                    }
                }
                _ => {}
            }
            failures.push(panicked.or(wait).filter(|_| skips));
        }
        failures
    }

    /// Checks which kernels ran on a stream, and in which order.
    fn settle_lane(&self, stream: usize, failures: &[Vec<Option<usize>>]) {
        let lane = self.lane(stream);
        let mut previous: Option<&Arc<Launched>> = None;
        let mut after: Vec<Arc<Launched>> = Vec::new();
        // By an event of a stream that had failed.
        let mut poisoned = None;
        for (at, entry) in lane.log.iter().enumerate() {
            let failed = failures[stream][at]
                .or(poisoned)
                .filter(|_| !lane.continues);
            match entry {
                Entry::Abort(aborted_at) => {
                    self.settle_abort(stream, &lane, at, *aborted_at);
                    poisoned = None;
                    // The waits for events were given up, too.
                    after.clear();
                }
                Entry::Report => poisoned = None,
                Entry::After {
                    stream: of,
                    entries,
                } => {
                    if *of != stream {
                        after.extend(Lane::last_kernel(&self.lane(*of).log[..*entries]));
                    }
                    if self.model.checks_faults && skips(&lane.stream) && !self.plan.continues[*of]
                    {
                        poisoned = poisoned.or(failures[*of][*entries]);
                    }
                }
                Entry::Kernel(kernel) => {
                    let ran = kernel.started() != 0;
                    for before in previous.into_iter().chain(&after) {
                        if ran && before.started() != 0 && before.ended() > kernel.started() {
                            self.model.lie(
                                "kernel before its turn",
                                format!(
                                    "stream {stream}: kernel {} before the end of {}",
                                    kernel.number, before.number
                                ),
                            );
                        }
                    }
                    if let (true, Some(by)) = (ran, failed) {
                        self.model.lie(
                            "kernel behind a failure",
                            format!("stream {stream}: kernel {} behind step {by}", kernel.number),
                        );
                    }
                    previous = Some(kernel);
                }
                Entry::Request(number) => {
                    let Some(by) = failed else { continue };
                    let request = self.model.request(*number);
                    if lane.stream.host().is_none()
                        && (request.is_wait() || request.end().is_none())
                    {
                        // A GPU executes stores, and waits, which may find what they wait for.
                        continue;
                    }
                    if lane.stream.host().is_none()
                        && (self.plan.has_no_stop()
                            || matches!(request.status(), Some(Status::Unknown(_))))
                    {
                        // A GPU may have begun to ring when its endpoint was stopped. A device that does not stop may carry out what it rings later, too.
                        continue;
                    }
                    request
                        .trail()
                        .never
                        .get_or_insert("it is behind what failed on its stream");
                    if request.status() == Some(Status::Complete) {
                        let is_panic = self.model.requests.get(by).is_none_or(Option::is_none);
                        let kind = if is_panic {
                            "complete behind a panic"
                        } else {
                            "complete behind a failure"
                        };
                        self.model.lie(
                            kind,
                            format!("stream {stream}: step {number} behind step {by}"),
                        );
                    }
                }
            }
        }
        let is_silent = |entry: &Entry| !matches!(entry, Entry::Report);
        if let (Some(Some(by)), true) = (failures[stream].last(), lane.log.iter().all(is_silent)) {
            self.model.lie(
                "no word of a failure",
                format!("stream {stream}: step {by} failed, and synchronize is Ok"),
            );
        }
    }

    /// Checks that work behind the kernel that ran during an abort of the stream has not run.
    fn settle_abort(&self, stream: usize, lane: &Lane, at: usize, aborted_at: u64) {
        let (before, is_host) = (&lane.log[..at], lane.stream.host().is_some());
        let runs = |entry: &Entry| matches!(entry, Entry::Kernel(kernel) if (1..aborted_at).contains(&kernel.started()) && kernel.ended() > aborted_at);
        let Some(running) = before.iter().position(runs) else {
            return;
        };
        for entry in &before[running + 1..] {
            match entry {
                Entry::Kernel(kernel) if skips(&lane.stream) && kernel.started() != 0 => {
                    self.model.lie(
                        "kernel ran after an abort",
                        format!("stream {stream}: kernel {}", kernel.number),
                    );
                }
                Entry::Request(number) => {
                    let request = self.model.request(*number);
                    if !is_host && (request.is_wait() || request.end().is_none()) {
                        // Nor a store, nor a wait, which may find what it waits for.
                        continue;
                    }
                    let mut trail = request.trail();
                    trail
                        .never
                        .get_or_insert("its stream was aborted before it came to it");
                    drop(trail);
                    if request.status() == Some(Status::Complete) && !self.is_sync {
                        self.model.lie(
                            "complete after an abort",
                            format!("stream {stream}: step {number}"),
                        );
                    }
                }
                _ => {}
            }
        }
    }
}

impl Lane {
    /// A call has reported a failure: takes it, so that the stream can be used again.
    fn take_fault(&mut self) {
        self.stream.take_fault();
        self.log.push(Entry::Report);
    }

    fn last_kernel(log: &[Entry]) -> Option<Arc<Launched>> {
        let kernel = |entry: &Entry| match entry {
            Entry::Kernel(kernel) => Some(Arc::clone(kernel)),
            _ => None,
        };
        log.iter().rev().find_map(kernel)
    }
}

/// Whether a stream calls no function behind a failure, and executes no operation. If kernels of an application execute the operations, its functions
/// are on another stream.
fn skips(stream: &Stream) -> bool {
    #[cfg(feature = "cuda")]
    if stream.cuda().is_some() {
        return true;
    }
    stream.host().is_some()
}

/// The three ways to execute one operation.
struct Call3<'a> {
    now: &'a dyn Fn(&mut Endpoint) -> Result<Ticket>,
    queued: &'a dyn Fn(&mut Endpoint, &dyn Executor) -> Result<Ticket>,
    prepared: &'a dyn Fn(&mut Endpoint) -> Result<Prepared>,
}
