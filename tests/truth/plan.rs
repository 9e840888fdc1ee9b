//! Plans: random sequences of calls, each made from a seed. The same seed makes the same plan; the interleaving of its threads, streams and the device
//! differs in each run.

use std::fmt;
use std::time::Duration;

use doorbell::softcx::{CommandKind, CommandKinds, Faults};
use doorbell::{Control, EndpointConfig, QueueKind};

use crate::rig::{Random, strict};

/// Calls in the longest plan. Each has a place of its own in every region.
pub const STEPS_MAX: usize = 64;
/// Regions to transfer from, and as many to transfer to.
pub const BANKS: usize = 2;
/// Flags that kernels wait for, words that streams wait for, and events.
pub const GATES: usize = 3;
pub const EVENTS: usize = 3;
/// The longest transfer, and the bytes of a step's place.
pub const PLACE: u64 = 1024;
/// Operations in the longest graph.
pub const RECORDS_MAX: usize = 4;

/// One random test.
#[derive(Debug, Clone)]
pub struct Plan {
    pub seed: u64,
    /// The two endpoints of a pair are numbers `2 * pair` and `2 * pair + 1`.
    pub pairs: Vec<EndpointConfig>,
    /// The endpoints with odd numbers are on the second of two devices.
    pub devices: usize,
    /// The endpoint that another process has, the last of all: its memory is the plan's, and it posts receives.
    pub remote: Option<usize>,
    /// Whether the endpoints of the first pair are those of a group of two ranks.
    pub has_group: bool,
    /// Whether each stream continues behind failed work.
    pub continues: Vec<bool>,
    pub threads: usize,
    pub steps: Vec<Step>,
    /// A post that finds its queue full is retried for a while.
    pub insists: bool,
    /// Whether work in flight at the end gets time to complete before all endpoints are aborted.
    pub lingers: bool,
    /// Whether the device permanently shows behaviour that is allowed for a card: it places bytes late, reads requests at their doorbell, and takes
    /// time for commands.
    pub is_strict: bool,
}

/// One call. Its number stays the same when others are removed from the plan.
#[derive(Debug, Clone)]
pub struct Step {
    pub number: usize,
    pub thread: usize,
    pub call: Call,
}

/// How an operation is executed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// By the calling thread.
    Now,
    Stream(usize),
    /// Only prepared. A later step queues it on a stream or rolls it back.
    Prepare,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transfer {
    Write,
    WriteInline,
    WriteImm,
    Send,
    SendInline,
    Read,
    FetchAdd,
    CompareSwap,
}

impl Transfer {
    pub fn is_atomic(self) -> bool {
        matches!(self, Transfer::FetchAdd | Transfer::CompareSwap)
    }
}

#[derive(Debug, Clone, Copy)]
pub struct Send {
    pub end: usize,
    pub transfer: Transfer,
    pub len_bytes: u64,
    pub pieces: u64,
    pub signaled: bool,
    pub fence: bool,
    pub ordered: bool,
    pub wrong_key: bool,
    /// Regions here and there.
    pub from: usize,
    pub to: usize,
    pub way: Way,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kernel {
    Plain,
    Sleeps(u64),
    /// Ends when the gate is opened.
    Gate(usize),
    Panics,
}

/// An operation of a graph. Each has 64 bytes of the place of the step that records it, behind 64 bytes for the results of atomics.
#[derive(Debug, Clone, Copy)]
pub enum Recorded {
    Write {
        end: usize,
        signaled: bool,
    },
    /// Adds 1 to a word of its own.
    FetchAdd {
        end: usize,
    },
    Wait {
        end: usize,
        timeout: Duration,
    },
}

impl Recorded {
    pub fn end(self) -> usize {
        let (Recorded::Write { end, .. } | Recorded::FetchAdd { end } | Recorded::Wait { end, .. }) =
            self;
        end
    }
}

/// A transfer through a bounce buffer, by the calling thread.
#[derive(Debug, Clone, Copy)]
pub struct Bounced {
    pub end: usize,
    pub is_read: bool,
    pub len_bytes: u64,
    pub chunk_bytes: u32,
    pub slots: u32,
    pub wrong_key: bool,
    /// The copy of the engine that fails; the first is 1.
    pub fails_at: Option<u64>,
    pub timeout: Duration,
}

/// A kernel that writes by a send queue that it owns, and waits for the completion.
#[derive(Debug, Clone, Copy)]
#[cfg_attr(
    not(feature = "cuda"),
    expect(dead_code, reason = "only a GPU has kernels")
)]
pub struct Put {
    pub end: usize,
    pub stream: usize,
    pub len_bytes: u64,
    pub to: usize,
    pub wrong_key: bool,
    pub timeout: Duration,
}

/// The number by which an operation of a step's graph or of a step's launch is known; no step has it.
pub fn recorded(step: usize, at: usize) -> usize {
    STEPS_MAX + RECORDS_MAX * step + at
}

/// What the streams of a run can do.
#[derive(Debug, Clone, Copy)]
pub struct Means {
    /// They report kernels that panic.
    pub panics: bool,
    /// They are streams of a GPU whose work the driver executes: graphs, and queues of kernels.
    pub cuda: bool,
    /// Endpoints of the device can use the path `direct` as well as `proxy`.
    pub direct: bool,
}

/// What a device of this process does once, with the packet, request or completion of that number, or from now on for so many nanoseconds.
#[derive(Debug, Clone, Copy)]
pub enum Breakage {
    FailSend(u64),
    FailRecv(u64),
    Overrun(u64),
    Refuse(u64),
    Garble(u64),
    Drop(u64),
    Down(u64),
    SlowFlush(u64),
    SlowCommands(u64),
    /// Commands to stop a queue pair fail: endpoints are given up.
    NoStop,
    /// A command to stop a queue pair takes so many nanoseconds: some are longer than the library waits.
    Hang(u64),
    /// The device reports an internal error after so many nanoseconds, works on for as many, and then executes no command.
    Fatal(u64, u64),
    /// The device is removed.
    Gone(u64),
}

#[derive(Debug, Clone)]
pub enum Call {
    Send(Send),
    Recv {
        end: usize,
        len_bytes: u64,
        to: usize,
        way: Way,
    },
    /// A wait on a stream, or one that is prepared.
    StreamWait {
        end: usize,
        side: QueueKind,
        timeout: Option<Duration>,
        way: Way,
    },
    Poll {
        end: usize,
        side: QueueKind,
    },
    WaitCq {
        end: usize,
        side: QueueKind,
        timeout: Duration,
    },
    /// Queues operations that earlier steps have prepared on a stream, in this order.
    Post {
        prepared: Vec<usize>,
        stream: usize,
    },
    Rollback(usize),
    DropPrepared(usize),
    Launch {
        stream: usize,
        kernel: Kernel,
    },
    Open(usize),
    Record {
        stream: usize,
        event: usize,
    },
    WaitEvent {
        stream: usize,
        event: usize,
    },
    WaitValue {
        stream: usize,
        gate: usize,
        timeout: Duration,
    },
    WriteValue {
        stream: usize,
    },
    Query(usize),
    Synchronize {
        stream: usize,
        timeout: Duration,
    },
    AbortStream(usize),
    Abort(usize),
    /// Aborted before, or once the streams are done.
    Reset {
        pair: usize,
        aborts: bool,
    },
    DropEndpoint(usize),
    Faults {
        device: usize,
        loss: f64,
        duplicate: f64,
        reorder: f64,
        delay_ns: u64,
    },
    Break {
        device: usize,
        breakage: Breakage,
    },
    Freeze {
        device: usize,
        is_frozen: bool,
    },
    StallProxy {
        device: usize,
        is_stalled: bool,
    },
    /// Stops the process that has the remote endpoint, and continues it.
    StopPeer(bool),
    KillPeer,
    Deregister {
        bank: usize,
        is_target: bool,
    },
    Pause(u64),
    Failure(usize),
    /// Waits for an operation that an earlier step has posted.
    Wait {
        of: usize,
        timeout: Duration,
    },
    WaitRoom {
        end: usize,
        side: QueueKind,
        count: u32,
        timeout: Duration,
    },
    /// Whether an event has passed, or waits for it.
    AskEvent {
        event: usize,
        timeout: Option<Duration>,
    },
    /// Has an eventfd notified when an event has passed.
    Notify(usize),
    TakeFault(usize),
    /// Captures a stream, and makes a graph that later steps launch.
    Capture {
        stream: usize,
        operations: Vec<Recorded>,
    },
    LaunchGraph {
        of: usize,
        stream: usize,
    },
    /// Prepares the next launch of a graph.
    Arm(usize),
    Disarm(usize),
    Bounce(Bounced),
    /// Hands the send queue of an endpoint to kernels.
    TakeQueue(usize),
    Put(Put),
    /// Once the streams are done.
    DropQueue(usize),
    /// A rank of the group ends without leaving it.
    EndRank(usize),
    Leave(usize),
    CheckRank(usize),
}

impl Plan {
    pub fn new(seed: u64, means: Means) -> Plan {
        let mut random = Random(seed);
        // Posts by the calling thread, many of which fail, and resets: rare interleavings need many of them.
        let is_storm = random.below(6) == 0;
        let pairs: Vec<_> = (0..if is_storm { 1 } else { 1 + random.below(3) })
            .map(|_| config(&mut random, is_storm, means))
            .collect();
        let streams = 1 + random.below(3) as usize;
        let threads = if is_storm {
            1
        } else {
            1 + random.below(3) as usize
        };
        let count = 4 + random.below(STEPS_MAX as u64 - 4) as usize;
        // An operation between devices may fail at one of them, and the other one learns it from packets.
        let devices = 1 + usize::from(!is_storm && random.below(3) == 0);
        let remote = (!is_storm && random.below(12) == 0).then_some(2 * pairs.len() - 1);
        let has_group = !is_storm && remote.is_none() && random.below(8) == 0;
        let mut makes = Makes {
            has_group,
            ends: 2 * pairs.len(),
            devices,
            remote,
            streams,
            is_storm,
            // How many failures are caused on purpose. Some plans have none, because little is found once everything has failed.
            gremlin: *random.pick(&[0, 1, 4, 12]),
            means,
            // Leaving out some kinds of calls makes room for more of the others.
            without: Feature::ALL.map(|_| random.below(4) == 0),
            prepared: Vec::new(),
            graphs: Vec::new(),
            kernels_own: None,
            random,
        };
        // Before a stream waits: later steps record a graph only if their streams are done.
        let first = if means.cuda && remote.is_none() && !is_storm {
            makes.below(4)
        } else {
            0
        };
        let step = |number| {
            let (thread, call) = if number < first {
                (0, makes.capture(number))
            } else {
                (makes.below(threads), makes.call(number))
            };
            Step {
                number,
                thread,
                call,
            }
        };
        let steps = (0..count).map(step).collect();
        Plan {
            seed,
            pairs,
            devices,
            remote,
            has_group,
            continues: (0..streams).map(|_| makes.random.below(6) == 0).collect(),
            threads,
            steps,
            insists: is_storm || makes.random.below(4) == 0,
            lingers: makes.random.below(3) > 0,
            is_strict: makes.random.below(2) == 0,
        }
    }

    pub fn in_one_thread(&self) -> Plan {
        let mut plan = self.clone();
        plan.steps.iter_mut().for_each(|step| step.thread = 0);
        plan
    }

    /// The graphs that are recorded before the threads begin, and the other steps.
    pub fn in_order(&self) -> (&[Step], &[Step]) {
        let is_other = |step: &Step| !matches!(step.call, Call::Capture { .. });
        let first = self.steps.iter().position(is_other);
        self.steps.split_at(first.unwrap_or(self.steps.len()))
    }

    /// The operations of the graph that a step records; none if that step was removed.
    pub fn graph(&self, of: usize) -> &[Recorded] {
        let step = self.steps.iter().find(|step| step.number == of);
        match step.map(|step| &step.call) {
            Some(Call::Capture { operations, .. }) => operations,
            _ => &[],
        }
    }

    /// Removes references to operations that are no longer prepared.
    pub fn tidied(mut self) -> Plan {
        let numbers: Vec<_> = self.steps.iter().map(|step| step.number).collect();
        for step in &mut self.steps {
            if let Call::Post { prepared, .. } = &mut step.call {
                prepared.retain(|number| numbers.contains(number));
            }
        }
        self
    }

    /// The faults that a step sets.
    pub fn faults(&self, call: &Call) -> Option<Faults> {
        let stops = CommandKinds::of(&[CommandKind::Error, CommandKind::Reset]);
        let mut faults = Faults {
            seed: self.seed,
            ..self.usual_faults()
        };
        match *call {
            Call::Faults {
                loss,
                duplicate,
                reorder,
                delay_ns,
                ..
            } => {
                (faults.loss, faults.duplicate, faults.reorder) = (loss, duplicate, reorder);
                faults.delay_ns = delay_ns;
            }
            Call::Break { breakage, .. } => match breakage {
                Breakage::FailSend(nth) => faults.fail_send = (nth, 0x02),
                Breakage::FailRecv(nth) => faults.fail_recv = (nth, 0x04),
                Breakage::Overrun(nth) => faults.overrun_nth = nth,
                // The syndrome of a remote operational error.
                Breakage::Refuse(nth) => faults.refuse = (nth, 0x63),
                Breakage::Garble(nth) => faults.garble_nth = nth,
                Breakage::Drop(nth) => faults.drop_nth = nth,
                Breakage::Down(for_ns) => faults.down_ns = (1, for_ns),
                Breakage::SlowFlush(ns) => faults.flush_ns = ns,
                Breakage::SlowCommands(ns) => faults.commands_ns = ns,
                Breakage::NoStop => faults.eio = stops,
                Breakage::Hang(ns) => faults.hang = (stops, ns),
                Breakage::Fatal(after_ns, for_ns) => faults.fatal_ns = (after_ns, for_ns),
                Breakage::Gone(after_ns) => faults.gone_ns = after_ns,
            },
            _ => return None,
        }
        Some(faults)
    }

    /// Whether a step transfers to or from memory that the process of the remote endpoint has registered, too.
    pub fn is_remote(&self, number: usize) -> bool {
        let step = self.steps.iter().find(|step| step.number == number);
        step.is_some_and(|step| match &step.call {
            Call::Send(Send { end, .. }) | Call::Bounce(Bounced { end, .. }) => {
                self.remote == Some(end ^ 1)
            }
            _ => false,
        })
    }

    /// Whether a device does not stop at some time, and endpoints may be given up.
    pub fn has_no_stop(&self) -> bool {
        self.breakages().any(|breakage| {
            matches!(
                breakage,
                Breakage::NoStop | Breakage::Hang(_) | Breakage::Fatal(..) | Breakage::Gone(_)
            )
        })
    }

    pub fn breakages(&self) -> impl Iterator<Item = Breakage> {
        self.steps.iter().filter_map(|step| match step.call {
            Call::Break { breakage, .. } => Some(breakage),
            _ => None,
        })
    }

    /// The time limits that waits of an endpoint may have.
    pub fn deadlines(&self, end: usize) -> Vec<Duration> {
        let of_steps = self.steps.iter().flat_map(|step| match &step.call {
            Call::StreamWait {
                end: of, timeout, ..
            } if *of == end => timeout.iter().copied().collect(),
            Call::Put(put) if put.end == end => vec![put.timeout],
            Call::Bounce(bounced) if bounced.end == end => vec![bounced.timeout],
            Call::Capture { operations, .. } => (operations.iter())
                .filter_map(|operation| match operation {
                    Recorded::Wait { end: of, timeout } if *of == end => Some(*timeout),
                    _ => None,
                })
                .collect(),
            _ => Vec::new(),
        });
        of_steps.chain(self.pairs[end / 2].wait_timeout).collect()
    }

    /// The permanent behaviour of the device.
    pub fn usual_faults(&self) -> Faults {
        if self.is_strict {
            strict()
        } else {
            Faults::default()
        }
    }
}

fn config(random: &mut Random, is_storm: bool, means: Means) -> EndpointConfig {
    let ms = Duration::from_millis;
    let depths = if is_storm {
        [1, 1, 1, 2]
    } else {
        [1, 2, 4, 16]
    };
    let config = EndpointConfig::default()
        .send_depth(*random.pick(&depths))
        .recv_depth(*random.pick(&[1, 4, 16]))
        .ack_timeout(5 + random.below(4) as u8)
        .retry_count(*random.pick(&[0, 1, 3, 7]))
        .rnr_retry(*random.pick(&[0, 1, 7, 7]))
        .min_rnr_timer(*random.pick(&[1, 12]))
        .max_reads(*random.pick(&[1, 16]))
        .mtu_bytes(*random.pick(&[256, 1024]))
        .room_timeout(*random.pick(&[None, None, Some(ms(1))]))
        .wait_timeout(Some(*random.pick(&[ms(5), ms(50), ms(500)])));
    match random.below(4) {
        0 if means.direct => config.control(Some(Control::Proxy)),
        1 if means.direct => config.blueflame(true),
        _ => config,
    }
}

/// Kinds of calls that a plan may leave out.
#[derive(Clone, Copy)]
enum Feature {
    Now,
    Streams,
    Prepares,
    Kernels,
    Events,
    Values,
    Unsignaled,
}

impl Feature {
    const ALL: [Feature; 7] = [
        Feature::Now,
        Feature::Streams,
        Feature::Prepares,
        Feature::Kernels,
        Feature::Events,
        Feature::Values,
        Feature::Unsignaled,
    ];
}

struct Makes {
    random: Random,
    ends: usize,
    devices: usize,
    remote: Option<usize>,
    has_group: bool,
    streams: usize,
    is_storm: bool,
    gremlin: u64,
    means: Means,
    without: [bool; Feature::ALL.len()],
    /// Steps that only prepare, and whose operations no later step uses.
    prepared: Vec<usize>,
    /// Steps that record a graph.
    graphs: Vec<usize>,
    /// The endpoint whose send queue was handed to kernels last.
    kernels_own: Option<usize>,
}

impl Makes {
    fn below(&mut self, end: usize) -> usize {
        self.random.below(end as u64) as usize
    }

    /// An endpoint of this process.
    fn end(&mut self) -> usize {
        match self.below(self.ends) {
            end if Some(end) == self.remote => end - 1,
            end => end,
        }
    }

    fn has(&self, feature: Feature) -> bool {
        !self.without[feature as usize]
    }

    fn side(&mut self) -> QueueKind {
        *self
            .random
            .pick(&[QueueKind::Send, QueueKind::Send, QueueKind::Recv])
    }

    fn way(&mut self, number: usize) -> Way {
        match self.random.below(8) {
            _ if self.is_storm => Way::Now,
            0 | 1 if self.has(Feature::Now) => Way::Now,
            2 | 3 if self.has(Feature::Prepares) => {
                self.prepared.push(number);
                Way::Prepare
            }
            _ if self.has(Feature::Streams) => Way::Stream(self.below(self.streams)),
            _ => Way::Now,
        }
    }

    fn takes_prepared(&mut self) -> Option<usize> {
        let at = (!self.prepared.is_empty()).then(|| self.below(self.prepared.len()))?;
        Some(self.prepared.remove(at))
    }

    fn call(&mut self, number: usize) -> Call {
        if self.random.below(50) < self.gremlin {
            return self.mischief();
        }
        let streams = self.streams;
        let has_gpu = self.means.cuda && self.remote.is_none();
        let kind = match self.random.below(if has_gpu { 128 } else { 108 }) {
            _ if self.is_storm => return self.storm(number),
            64..=70 if !self.has(Feature::Kernels) => 0,
            71 | 72 | 96..=103 if !self.has(Feature::Events) => 0,
            73 | 74 if !self.has(Feature::Values) => 0,
            kind => kind,
        };
        match kind {
            0..=29 => Call::Send(self.send(number)),
            30..=39 => self.receive(number),
            40..=49 => {
                let timeout = *self
                    .random
                    .pick(&[None, None, Some(Duration::from_millis(2))]);
                let (end, side) = (self.end(), self.side());
                let way = match self.way(number) {
                    Way::Now => Way::Stream(self.below(streams)),
                    way => way,
                };
                Call::StreamWait {
                    end,
                    side,
                    timeout,
                    way,
                }
            }
            50..=55 => Call::Poll {
                end: self.end(),
                side: self.side(),
            },
            56 | 57 => Call::WaitCq {
                end: self.end(),
                side: self.side(),
                timeout: Duration::from_millis(1 + self.random.below(3)),
            },
            58..=61 => {
                let stream = self.below(streams);
                let count = if self.random.below(2) == 0 { 1 } else { 4 };
                // Most often in the order in which they were prepared: others are refused.
                let count = count.min(self.prepared.len());
                let prepared = match (count, self.random.below(4)) {
                    (1, 0) => self.takes_prepared().into_iter().collect(),
                    _ => self.prepared.drain(..count).collect(),
                };
                Call::Post { prepared, stream }
            }
            62 | 63 => match self.takes_prepared() {
                Some(number) if self.random.below(2) == 0 => Call::Rollback(number),
                Some(number) => Call::DropPrepared(number),
                None => Call::Pause(self.random.below(300)),
            },
            64..=68 => {
                let kernel = match self.random.below(4) {
                    0 => Kernel::Plain,
                    1 => Kernel::Sleeps(self.random.below(2000)),
                    _ => Kernel::Gate(self.below(GATES)),
                };
                Call::Launch {
                    stream: self.below(streams),
                    kernel,
                }
            }
            69 | 70 => Call::Open(self.below(GATES)),
            71 | 96..=98 => Call::Record {
                stream: self.below(streams),
                event: self.below(EVENTS),
            },
            72 => Call::WaitEvent {
                stream: self.below(streams),
                event: self.below(EVENTS),
            },
            73 => Call::WaitValue {
                stream: self.below(streams),
                gate: self.below(GATES),
                timeout: Duration::from_millis(1 + self.random.below(20)),
            },
            74 => Call::WriteValue {
                stream: self.below(streams),
            },
            75 => Call::Query(self.below(streams)),
            76 => Call::Synchronize {
                stream: self.below(streams),
                timeout: Duration::from_millis(self.random.below(5)),
            },
            77 => Call::Failure(self.end()),
            80..=87 => self.receive(number),
            // Without a reset, a plan tests nothing once all of its endpoints have failed.
            88..=90 => self.reset(),
            91 | 92 if number > 0 => Call::Wait {
                of: self.below(number),
                timeout: Duration::from_micros(self.random.below(3000)),
            },
            93..=95 => Call::WaitRoom {
                end: self.end(),
                side: self.side(),
                count: self.random.below(6) as u32,
                timeout: Duration::from_micros(self.random.below(3000)),
            },
            99 | 100 => Call::Notify(self.below(EVENTS)),
            101..=103 => Call::AskEvent {
                event: self.below(EVENTS),
                timeout: *self.random.pick(&[None, Some(Duration::from_micros(500))]),
            },
            104 => Call::TakeFault(self.below(streams)),
            105..=107 => self.bounced(),
            108..=110 => self.capture(number),
            111..=120 => match self.graphs.len() {
                0 => self.capture(number),
                graphs => {
                    let which = self.below(graphs);
                    let of = self.graphs[which];
                    match kind {
                        118 | 119 => Call::Arm(of),
                        120 => Call::Disarm(of),
                        _ => Call::LaunchGraph {
                            of,
                            stream: self.below(streams),
                        },
                    }
                }
            },
            // Most often the endpoint that has such a queue.
            121..=127 => match self.kernels_own {
                Some(end) if kind < 125 || self.random.below(3) > 0 => Call::Put(self.put(end)),
                Some(end) if kind == 127 => Call::DropQueue(end),
                _ => {
                    let end = self.end();
                    self.kernels_own = Some(end);
                    Call::TakeQueue(end)
                }
            },
            _ => Call::Pause(self.random.below(500)),
        }
    }

    fn capture(&mut self, number: usize) -> Call {
        self.graphs.push(number);
        let end = self.end();
        let operation = |makes: &mut Makes| {
            // Most often all of one endpoint.
            let end = if makes.random.below(4) == 0 {
                makes.end()
            } else {
                end
            };
            match makes.random.below(5) {
                0 | 1 => Recorded::FetchAdd { end },
                2 | 3 => Recorded::Write {
                    end,
                    signaled: makes.random.below(4) > 0,
                },
                _ => Recorded::Wait {
                    end,
                    timeout: *makes
                        .random
                        .pick(&[Duration::from_millis(2), Duration::from_millis(500)]),
                },
            }
        };
        let count = 1 + self.below(RECORDS_MAX);
        Call::Capture {
            stream: self.below(self.streams),
            operations: (0..count).map(|_| operation(self)).collect(),
        }
    }

    fn bounced(&mut self) -> Call {
        let ms = Duration::from_millis;
        Call::Bounce(Bounced {
            end: self.end(),
            is_read: self.random.below(2) == 0,
            len_bytes: 8 * (1 + self.random.below(PLACE / 8)),
            chunk_bytes: *self.random.pick(&[64, 256, PLACE as u32]),
            slots: 1 + self.random.below(4) as u32,
            wrong_key: self.gremlin > 0 && self.random.below(10) == 0,
            fails_at: (self.gremlin > 0 && self.random.below(10) == 0)
                .then(|| 1 + self.random.below(4)),
            timeout: *self.random.pick(&[ms(1), ms(20), ms(200)]),
        })
    }

    fn put(&mut self, end: usize) -> Put {
        let ms = Duration::from_millis;
        Put {
            end,
            stream: self.below(self.streams),
            len_bytes: *self.random.pick(&[16, 64, PLACE]),
            to: self.below(BANKS),
            wrong_key: self.gremlin > 0 && self.random.below(20) == 0,
            timeout: *self.random.pick(&[ms(1), ms(20), ms(200)]),
        }
    }

    fn breakage(&mut self) -> Breakage {
        let nth = 1 + self.random.below(12);
        let soon_ns = 1 + 1000 * self.random.below(2000);
        match self.random.below(35) {
            0..=4 => Breakage::FailSend(nth),
            5..=8 => Breakage::FailRecv(nth),
            9..=11 => Breakage::Overrun(nth),
            12..=15 => Breakage::Refuse(nth),
            16..=18 => Breakage::Garble(nth),
            19..=22 => Breakage::Drop(nth),
            23..=25 => Breakage::Down(1_000_000 * (1 + self.random.below(20))),
            26..=28 => Breakage::SlowFlush(1_000_000 * (1 + self.random.below(20))),
            29 | 30 => Breakage::SlowCommands(1_000_000 * (1 + self.random.below(5))),
            // Some of these take seconds.
            31 => Breakage::Hang(1_000_000 * *self.random.pick(&[5, 100, 3000])),
            32 => Breakage::Fatal(soon_ns, 1_000_000 * self.random.below(5)),
            33 => Breakage::Gone(soon_ns),
            _ => Breakage::NoStop,
        }
    }

    fn receive(&mut self, number: usize) -> Call {
        Call::Recv {
            end: self.end(),
            len_bytes: *self.random.pick(&[PLACE, PLACE, PLACE, 64]),
            to: self.below(BANKS),
            way: self.way(number),
        }
    }

    fn reset(&mut self) -> Call {
        Call::Reset {
            pair: self.below(self.ends / 2),
            aborts: self.random.below(2) == 0,
        }
    }

    fn storm(&mut self, number: usize) -> Call {
        match self.random.below(10) {
            0..=6 => Call::Send(self.send(number)),
            7 => Call::Failure(self.end()),
            8 => Call::Poll {
                end: self.end(),
                side: QueueKind::Send,
            },
            _ => Call::Reset {
                pair: 0,
                aborts: false,
            },
        }
    }

    fn send(&mut self, number: usize) -> Send {
        use Transfer::{CompareSwap, FetchAdd, Read, SendInline, Write, WriteImm, WriteInline};
        // Few operations that need a receive: without one, they block all work behind them.
        let transfers = [
            Write,
            Write,
            Write,
            WriteInline,
            Read,
            Read,
            FetchAdd,
            CompareSwap,
            Transfer::Send,
            SendInline,
            WriteImm,
        ];
        let transfer = *self.random.pick(&transfers);
        let len_bytes = match transfer {
            FetchAdd | CompareSwap => 8,
            // A receive tells its sender by the first bytes.
            SendInline => 16 + self.random.below(49),
            WriteInline => *self.random.pick(&[0, 1, 16, 37, 64]),
            Transfer::Send => *self.random.pick(&[16, 64, 67, PLACE]),
            _ => *self.random.pick(&[0, 16, 64, 64, 67, PLACE - 3, PLACE]),
        };
        Send {
            end: self.end(),
            transfer,
            len_bytes,
            pieces: if transfer.is_atomic() {
                1
            } else {
                1 + self.random.below(2)
            },
            signaled: self.without[Feature::Unsignaled as usize] || self.random.below(4) > 0,
            fence: self.random.below(8) == 0,
            ordered: self.random.below(8) == 0,
            wrong_key: self.is_storm && self.random.below(3) == 0
                || self.gremlin > 0 && self.random.below(25) == 0,
            from: self.below(BANKS),
            to: self.below(BANKS),
            way: self.way(number),
        }
    }

    fn mischief(&mut self) -> Call {
        let (streams, device) = (self.streams, self.below(self.devices));
        if self.remote.is_some() && self.random.below(4) == 0 {
            return match self.random.below(4) {
                0 => Call::KillPeer,
                1 => Call::StopPeer(true),
                _ => Call::StopPeer(false),
            };
        }
        if self.has_group && self.random.below(6) == 0 {
            return match self.random.below(3) {
                0 => Call::EndRank(self.below(2)),
                1 => Call::Leave(self.below(2)),
                _ => Call::CheckRank(self.below(2)),
            };
        }
        match self.random.below(26) {
            22..=25 => Call::Break {
                device,
                breakage: self.breakage(),
            },
            0..=5 => Call::Abort(self.end()),
            6..=10 => self.reset(),
            11 | 12 => Call::AbortStream(self.below(streams)),
            13 => Call::DropEndpoint(self.end()),
            14 => Call::Deregister {
                bank: self.below(BANKS),
                is_target: self.random.below(2) == 0,
            },
            15 | 16 => Call::Faults {
                device,
                loss: *self.random.pick(&[0.0, 0.1, 0.3]),
                duplicate: *self.random.pick(&[0.0, 0.2]),
                reorder: *self.random.pick(&[0.0, 0.3]),
                delay_ns: *self.random.pick(&[0, 20_000]),
            },
            kind @ (17 | 18) => Call::Freeze {
                device,
                is_frozen: kind == 17,
            },
            kind @ (19 | 20) => Call::StallProxy {
                device,
                is_stalled: kind == 19,
            },
            _ if self.means.panics => Call::Launch {
                stream: self.below(streams),
                kernel: Kernel::Panics,
            },
            _ => Call::Pause(self.random.below(500)),
        }
    }
}

impl Call {
    fn pair(&self) -> Option<usize> {
        match self {
            Call::Send(Send { end, .. })
            | Call::Recv { end, .. }
            | Call::StreamWait { end, .. }
            | Call::Poll { end, .. }
            | Call::WaitCq { end, .. }
            | Call::Abort(end)
            | Call::DropEndpoint(end)
            | Call::WaitRoom { end, .. }
            | Call::Bounce(Bounced { end, .. })
            | Call::TakeQueue(end)
            | Call::Put(Put { end, .. })
            | Call::DropQueue(end)
            | Call::Failure(end) => Some(end / 2),
            Call::Reset { pair, .. } => Some(*pair),
            _ => None,
        }
    }

    /// Whether it makes something fail, or may.
    pub fn is_fault(&self) -> bool {
        match self {
            Call::Send(Send { wrong_key, .. }) | Call::Put(Put { wrong_key, .. }) => *wrong_key,
            Call::Bounce(bounced) => bounced.wrong_key || bounced.fails_at.is_some(),
            Call::Reset { aborts, .. } => *aborts,
            Call::Freeze { is_frozen, .. } => *is_frozen,
            Call::StallProxy { is_stalled, .. } => *is_stalled,
            Call::StopPeer(is_stopped) => *is_stopped,
            Call::Faults { loss, reorder, .. } => *loss + *reorder > 0.0,
            Call::Launch { kernel, .. } => *kernel == Kernel::Panics,
            Call::Break { .. }
            | Call::AbortStream(_)
            | Call::Abort(_)
            | Call::DropEndpoint(_)
            | Call::KillPeer
            | Call::EndRank(_)
            | Call::Deregister { .. } => true,
            _ => false,
        }
    }

    fn uses(&self, pair: usize) -> bool {
        let is_of = |operation: &Recorded| operation.end() / 2 == pair;
        match self {
            Call::Capture { operations, .. } => operations.iter().any(is_of),
            _ => self.pair() == Some(pair),
        }
    }
}

/// The name of an endpoint in a printed plan.
pub fn end_name(end: usize) -> String {
    format!("{}{}", ["a", "b"][end % 2], end / 2)
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let uses = |number: usize| self.steps.iter().any(|step| step.call.uses(number));
        let pairs = self.pairs.iter().enumerate();
        for (number, config) in pairs.filter(|(number, _)| uses(*number)) {
            let EndpointConfig {
                send_depth,
                recv_depth,
                ack_timeout,
                retry_count,
                rnr_retry,
                mtu_bytes,
                wait_timeout,
                room_timeout,
                blueflame,
                control,
                ..
            } = config;
            writeln!(
                f,
                "let (a{number}, b{number}) = pair(send_depth({send_depth}).recv_depth({recv_depth}).ack_timeout({ack_timeout}).retry_count({retry_count})\
                 .rnr_retry({rnr_retry}).mtu_bytes({mtu_bytes}).wait_timeout({wait_timeout:?}).room_timeout({room_timeout:?}).blueflame({blueflame})\
                 .control({control:?}));"
            )?;
        }
        for (stream, _) in (self.continues.iter().enumerate()).filter(|(_, goes_on)| **goes_on) {
            writeln!(f, "s{stream}.continue_on_error(true);")?;
        }
        if self.devices > 1 {
            writeln!(f, "// Each b is on another device than its a.")?;
        }
        if let Some(end) = self.remote {
            writeln!(f, "// {} is in another process.", end_name(end))?;
        }
        if self.has_group {
            writeln!(f, "// a0 and b0 are endpoints of a group: ranks 0 and 1.")?;
        }
        if self.is_strict {
            writeln!(f, "device.set_faults(strict());")?;
        }
        for step in &self.steps {
            write!(f, "{step}")?;
            if self.steps.iter().any(|step| step.thread > 0) {
                write!(f, " // thread {}", step.thread)?;
            }
            writeln!(f)?;
        }
        let end = if self.lingers {
            "after a while, all endpoints are aborted"
        } else {
            "all endpoints are aborted"
        };
        writeln!(f, "// Then all gates are opened, and {end}.")
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let number = self.number;
        let way = |f: &mut fmt::Formatter<'_>, end: usize, way: Way, what: &str| {
            let end = end_name(end);
            match way {
                Way::Now => write!(f, "let t{number} = {end}.post_{what}("),
                Way::Stream(stream) => {
                    write!(f, "let t{number} = {end}.stream_queue_{what}(&s{stream}, ")
                }
                Way::Prepare => write!(f, "let p{number} = {end}.prepare_{what}("),
            }
        };
        match &self.call {
            Call::Send(send) => {
                way(f, send.end, send.way, "send")?;
                write!(
                    f,
                    "{:?} {{ {} bytes in {}, signaled: {}, fence: {}, ordered: {}, regions {} to {}{} }});",
                    send.transfer,
                    send.len_bytes,
                    send.pieces,
                    send.signaled,
                    send.fence,
                    send.ordered,
                    send.from,
                    send.to,
                    if send.wrong_key { ", wrong rkey" } else { "" }
                )
            }
            Call::Recv {
                end,
                len_bytes,
                to,
                way: by,
            } => {
                way(f, *end, *by, "recv")?;
                write!(f, "{len_bytes} bytes, region {to});")
            }
            Call::StreamWait {
                end,
                side,
                timeout,
                way,
            } => {
                let end = end_name(*end);
                match way {
                    Way::Stream(stream) => write!(
                        f,
                        "let t{number} = {end}.stream_wait_cq_for(&s{stream}, {side:?}, {timeout:?});"
                    ),
                    _ => write!(
                        f,
                        "let p{number} = {end}.prepare_wait_cq_for({side:?}, {timeout:?});"
                    ),
                }
            }
            Call::Poll { end, side } => write!(f, "{}.poll_cq({side:?});", end_name(*end)),
            Call::WaitCq { end, side, timeout } => {
                write!(f, "{}.wait_cq({side:?}, {timeout:?});", end_name(*end))
            }
            Call::Post { prepared, stream } => match &prepared[..] {
                [one] => write!(f, "stream_post(&s{stream}, p{one});"),
                several => write!(f, "stream_post_all(&s{stream}, {several:?});"),
            },
            Call::Rollback(number) => write!(f, "rollback(p{number});"),
            Call::DropPrepared(number) => write!(f, "drop(p{number});"),
            Call::Launch { stream, kernel } => write!(f, "s{stream}.launch({kernel:?});"),
            Call::Open(gate) => write!(f, "open(gate {gate});"),
            Call::Record { stream, event } => write!(f, "s{stream}.record(&e{event});"),
            Call::WaitEvent { stream, event } => write!(f, "s{stream}.wait_event(&e{event});"),
            Call::WaitValue {
                stream,
                gate,
                timeout,
            } => write!(
                f,
                "let t{number} = stream_wait_value32(&s{stream}, gate {gate}, {timeout:?});"
            ),
            Call::WriteValue { stream } => write!(
                f,
                "let t{number} = stream_write_value32(&s{stream}, word {number});"
            ),
            Call::Query(stream) => write!(f, "s{stream}.query();"),
            Call::Synchronize { stream, timeout } => {
                write!(f, "s{stream}.synchronize({timeout:?});")
            }
            Call::AbortStream(stream) => write!(f, "s{stream}.abort();"),
            Call::Abort(end) => write!(f, "{}.abort();", end_name(*end)),
            Call::Reset { pair, aborts } => {
                let first = if *aborts {
                    "abort both, open all gates, "
                } else {
                    "open all gates, synchronize, "
                };
                write!(f, "{first}a{pair}.reset(); b{pair}.reset(); connect;")
            }
            Call::DropEndpoint(end) => write!(f, "drop({});", end_name(*end)),
            Call::Faults { device, .. } | Call::Break { device, .. } => {
                write!(f, "device{device}.set_faults({:?});", self.call)
            }
            Call::Freeze { device, is_frozen } => {
                write!(f, "device{device}.set_frozen({is_frozen});")
            }
            Call::StallProxy { device, is_stalled } => {
                write!(f, "device{device}.set_proxy_stalled({is_stalled});")
            }
            Call::StopPeer(is_stopped) => {
                write!(
                    f,
                    "{}(peer);",
                    if *is_stopped { "stop" } else { "continue" }
                )
            }
            Call::KillPeer => write!(f, "kill(peer);"),
            Call::Deregister { bank, is_target } => {
                write!(
                    f,
                    "{}[{bank}].deregister().unwrap();",
                    if *is_target { "targets" } else { "sources" }
                )
            }
            Call::Pause(us) => write!(f, "sleep({us} us);"),
            Call::Failure(end) => write!(f, "{}.failure();", end_name(*end)),
            Call::Wait { of, timeout } => write!(f, "t{of}.wait({timeout:?});"),
            Call::WaitRoom {
                end,
                side,
                count,
                timeout,
            } => {
                let end = end_name(*end);
                write!(f, "{end}.wait_room({side:?}, {count}, {timeout:?});")
            }
            Call::AskEvent { event, timeout } => match timeout {
                Some(timeout) => write!(f, "e{event}.synchronize({timeout:?});"),
                None => write!(f, "e{event}.query();"),
            },
            Call::Notify(event) => write!(f, "e{event}.notify(eventfd);"),
            Call::TakeFault(stream) => write!(f, "s{stream}.take_fault();"),
            Call::Capture { stream, operations } => {
                write!(f, "let g{number} = capture(&s{stream}, {operations:?});")
            }
            Call::LaunchGraph { of, stream } => write!(f, "g{of}.launch(&s{stream});"),
            Call::Arm(of) => write!(f, "g{of}.arm();"),
            Call::Disarm(of) => write!(f, "g{of}.disarm();"),
            Call::Bounce(bounced) => write!(f, "bounce({bounced:?});"),
            Call::TakeQueue(end) => write!(f, "let q = DeviceQueue::on_gpu({});", end_name(*end)),
            Call::Put(put) => write!(f, "q.put_step({put:?});"),
            Call::DropQueue(_) => write!(f, "synchronize all; drop(q);"),
            Call::EndRank(rank) => write!(f, "drop(group{rank});"),
            Call::Leave(rank) => write!(f, "group{rank}.leave();"),
            Call::CheckRank(rank) => write!(f, "group{rank}.check();"),
        }
    }
}
