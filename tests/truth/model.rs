//! The model: each request with everything observed of it, and the contradictions.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use doorbell::{
    Cause, Completion, Error, Opcode, Operation, QueueKind, Status, Ticket, WcStatus, WorkError,
};

use crate::memory::{Found, Memory, is_zero, word};
use crate::plan::{
    Bounced, Breakage, Call, Plan, Put, Recorded, STEPS_MAX, Send, Step, Transfer, recorded,
};

/// How long a device that is not unresponsive may take to stop on a machine that is busy.
const STOPS: Duration = Duration::from_secs(5);

/// A contradiction between what the library reports and the actual state.
#[derive(Debug, Clone)]
pub struct Lie {
    pub kind: &'static str,
    pub text: String,
}

/// How many operations ended in which way.
#[derive(Debug, Default)]
pub struct Ends {
    pub complete: AtomicU64,
    pub failed: AtomicU64,
    pub cancelled: AtomicU64,
    /// Those of graphs that are complete.
    pub launched: AtomicU64,
    /// Transfers through bounce buffers, and puts of kernels, that succeeded.
    pub bounced: AtomicU64,
    pub put: AtomicU64,
}

/// A kernel that was launched: when it ran, by the model's clock; 0: not yet.
#[derive(Debug)]
pub struct Launched {
    pub number: usize,
    pub panics: bool,
    pub started_at: AtomicU64,
    pub ended_at: AtomicU64,
    pub ended_when: Mutex<Option<Instant>>,
}

impl Launched {
    pub fn started(&self) -> u64 {
        self.started_at.load(Ordering::SeqCst)
    }

    pub fn ended(&self) -> u64 {
        self.ended_at.load(Ordering::SeqCst)
    }
}

/// An endpoint between two resets.
#[derive(Debug)]
pub struct Life {
    pub end: usize,
    /// 0: the endpoint is in another process.
    qpn: u32,
    /// Whether the plan has aborted the endpoint, reset it, or dropped it; set before the call.
    pub aborted: AtomicBool,
    pub dropped: AtomicBool,
    failure: Mutex<Option<WorkError>>,
    sides: [Order; 2],
    /// Kernels own its send queue, or owned it.
    has_kernels: AtomicBool,
    /// The numbers of requests of graphs that were prepared and not launched. What was prepared behind such a request keeps it in its queue, as a no-operation.
    disarmed: Mutex<Vec<u64>>,
}

/// The requests of one queue in one life, in order.
#[derive(Debug)]
struct Order {
    requests: Mutex<Vec<usize>>,
    /// Those that make a completion when they succeed.
    completions: Mutex<Vec<usize>>,
    /// Completions that were given to waits and polls.
    taken: AtomicUsize,
    /// Whether the two above are known exactly. Operations that are dropped may or may not leave a completion.
    exact: AtomicBool,
}

impl Order {
    fn enter(&self, number: usize, is_signaled: bool) {
        lock(&self.requests).push(number);
        if is_signaled {
            lock(&self.completions).push(number);
        }
    }

    /// The newest of that number gets another, or leaves.
    #[cfg(feature = "cuda")]
    fn replace(&self, number: usize, by: Option<usize>) {
        for list in [&self.requests, &self.completions] {
            let mut list = lock(list);
            if let Some(at) = list.iter().rposition(|other| *other == number) {
                match by {
                    Some(by) => list[at] = by,
                    None => drop(list.remove(at)),
                }
            }
        }
    }
}

/// An operation of a graph whose next launch is prepared.
#[cfg(feature = "cuda")]
#[derive(Debug)]
pub struct Armed {
    /// Stands for it in the order of the queue.
    number: usize,
    /// Of a wait: which completion it takes.
    index: Option<usize>,
    life: Arc<Life>,
}

impl Life {
    fn new(end: usize, qpn: u32) -> Arc<Life> {
        let order = || Order {
            requests: Mutex::default(),
            completions: Mutex::default(),
            taken: AtomicUsize::new(0),
            exact: AtomicBool::new(true),
        };
        Arc::new(Life {
            end,
            qpn,
            aborted: AtomicBool::new(false),
            dropped: AtomicBool::new(false),
            failure: Mutex::default(),
            sides: [order(), order()],
            has_kernels: AtomicBool::new(false),
            disarmed: Mutex::default(),
        })
    }

    pub fn has_kernels(&self) -> bool {
        self.has_kernels.load(Ordering::SeqCst)
    }

    #[cfg(feature = "cuda")]
    pub fn begin_kernels(&self) {
        self.has_kernels.store(true, Ordering::SeqCst);
    }

    #[cfg(feature = "cuda")]
    pub fn has_failed(&self) -> bool {
        lock(&self.failure).is_some()
    }
}

#[derive(Debug, Clone)]
pub enum What {
    Send(Send),
    Recv {
        end: usize,
        to: usize,
    },
    Wait {
        end: usize,
        side: QueueKind,
    },
    WaitValue {
        gate: usize,
        timeout: Duration,
    },
    WriteValue,
    /// Operation `at` of a launch of the graph that step `of` recorded.
    Launched {
        of: usize,
        at: usize,
        what: Recorded,
    },
}

/// A request, which has a ticket.
pub struct Request {
    pub number: usize,
    /// Launches of one graph have the same.
    pub wr_id: u64,
    pub what: What,
    trail: Mutex<Trail>,
}

/// What was observed of a request.
#[derive(Default)]
pub struct Trail {
    pub ticket: Option<Ticket>,
    pub life: Option<Arc<Life>>,
    /// Of a wait: which completion of its queue it takes.
    index: Option<usize>,
    /// The kernel that its stream has to execute before it.
    pub behind: Option<Arc<Launched>>,
    /// Why the device cannot have received it.
    pub never: Option<&'static str>,
    pub dropped: bool,
    last: Option<Status>,
    rung_at: u64,
    over_at: u64,
    over_when: Option<Instant>,
    /// The contents of its range when it became final.
    found: Option<Found>,
    /// Whether its range was cleared after that, to detect late writes.
    cleared: bool,
}

pub struct Model {
    pub memory: Memory,
    pub requests: Vec<Option<Request>>,
    /// The numbers that requests have.
    numbers: Vec<usize>,
    pub checks_faults: bool,
    /// The endpoint in another process.
    pub remote: Option<usize>,
    /// A device does not stop at some time.
    has_no_stop: bool,
    causes: Causes,
    /// Calls of abort that have begun, and that have returned, by endpoint.
    aborts: Vec<(AtomicUsize, AtomicUsize)>,
    /// The ranks of a group that have ended or are ending.
    ended: [AtomicBool; 2],
    /// See [`Ends`].
    pub bounced: AtomicU64,
    pub put: AtomicU64,
    clock: AtomicU64,
    lies: Mutex<Vec<Lie>>,
    /// Generations that have ended, and current ones.
    lives: Mutex<Vec<Arc<Life>>>,
}

/// Which causes of failures a plan can have.
struct Causes {
    /// The time limits of waits, by endpoint.
    deadlines: Vec<Vec<Duration>>,
    overruns: bool,
    /// Whether a message may meet no receive, or one that is too short for it.
    misses_receives: bool,
    /// Statuses of completions that only one kind of call causes, and whether the plan has it.
    statuses: [(WcStatus, bool); 5],
}

impl Causes {
    fn new(plan: &Plan) -> Causes {
        let breaks = |is_it: fn(Breakage) -> bool| plan.breakages().any(is_it);
        let calls = |is_it: fn(&Call) -> bool| plan.steps.iter().any(|step| is_it(&step.call));
        let deregisters = calls(|call| matches!(call, Call::Deregister { .. }));
        let wrong_key = calls(|call| {
            matches!(
                call,
                Call::Send(Send {
                    wrong_key: true,
                    ..
                }) | Call::Bounce(Bounced {
                    wrong_key: true,
                    ..
                }) | Call::Put(Put {
                    wrong_key: true,
                    ..
                })
            )
        });
        Causes {
            deadlines: (0..2 * plan.pairs.len())
                .map(|end| plan.deadlines(end))
                .collect(),
            overruns: breaks(|breakage| matches!(breakage, Breakage::Overrun(_))),
            misses_receives: calls(|call| {
                matches!(
                    call,
                    Call::Send(Send {
                        transfer: Transfer::Send | Transfer::SendInline | Transfer::WriteImm,
                        ..
                    })
                )
            }),
            statuses: [
                (WcStatus::RemAccessErr, deregisters || wrong_key),
                (
                    WcStatus::LocProtErr,
                    deregisters || breaks(|breakage| matches!(breakage, Breakage::FailRecv(_))),
                ),
                (
                    WcStatus::LocQpOpErr,
                    breaks(|breakage| matches!(breakage, Breakage::FailSend(_))),
                ),
                (
                    WcStatus::RemOpErr,
                    deregisters
                        || breaks(|breakage| {
                            matches!(breakage, Breakage::Refuse(_) | Breakage::FailRecv(_))
                        }),
                ),
                (
                    WcStatus::BadRespErr,
                    breaks(|breakage| matches!(breakage, Breakage::Garble(_))),
                ),
            ],
        }
    }
}

pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn is_final(status: Status) -> bool {
    !matches!(status, Status::Prepared | Status::Queued | Status::Rung)
}

/// A name for each kind of change of a final ticket, because their causes differ.
fn kind_of_change(last: Status, status: Status) -> &'static str {
    match (last, status) {
        (Status::Failed(_), Status::Cancelled) => "failed, then cancelled",
        (Status::Cancelled, Status::Failed(_)) => "cancelled, then failed",
        (Status::Cancelled, Status::Complete) => "cancelled, then complete",
        (Status::Failed(_), Status::Complete) => "failed, then complete",
        (Status::Complete, _) => "complete, then not",
        (Status::Failed(_), Status::Failed(_)) => "failed, then failed otherwise",
        _ => "changed after its end",
    }
}

fn rank(status: Status) -> u8 {
    match status {
        Status::Prepared => 0,
        Status::Queued => 1,
        Status::Rung => 2,
        _ => 3,
    }
}

impl Request {
    fn new(step: &Step) -> Option<Request> {
        let what = match &step.call {
            Call::Send(send) => What::Send(*send),
            Call::Recv { end, to, .. } => What::Recv { end: *end, to: *to },
            Call::StreamWait { end, side, .. } => What::Wait {
                end: *end,
                side: *side,
            },
            Call::WaitValue { gate, timeout, .. } => What::WaitValue {
                gate: *gate,
                timeout: *timeout,
            },
            Call::WriteValue { .. } => What::WriteValue,
            _ => return None,
        };
        Some(Request {
            number: step.number,
            wr_id: step.number as u64 + 1,
            what,
            trail: Mutex::default(),
        })
    }

    fn launched(step: &Step, of: usize, (at, what): (usize, Recorded)) -> Request {
        Request {
            number: recorded(step.number, at),
            wr_id: recorded(of, at) as u64 + 1,
            what: What::Launched { of, at, what },
            trail: Mutex::default(),
        }
    }

    pub fn trail(&self) -> MutexGuard<'_, Trail> {
        lock(&self.trail)
    }

    pub fn end(&self) -> Option<usize> {
        match &self.what {
            What::Send(send) => Some(send.end),
            What::Recv { end, .. } | What::Wait { end, .. } => Some(*end),
            What::Launched { what, .. } => Some(what.end()),
            What::WaitValue { .. } | What::WriteValue => None,
        }
    }

    /// The status of its ticket, if it was taken.
    pub fn status(&self) -> Option<Status> {
        let trail = self.trail();
        trail.ticket.as_ref().map(Ticket::status)
    }

    pub fn is_wait(&self) -> bool {
        matches!(
            self.what,
            What::Wait { .. }
                | What::WaitValue { .. }
                | What::Launched {
                    what: Recorded::Wait { .. },
                    ..
                }
        )
    }

    fn is_unsignaled(&self) -> bool {
        matches!(
            self.what,
            What::Send(Send {
                signaled: false,
                ..
            }) | What::Launched {
                what: Recorded::Write {
                    signaled: false,
                    ..
                },
                ..
            }
        )
    }

    pub fn side(&self) -> QueueKind {
        match &self.what {
            What::Recv { .. }
            | What::Wait {
                side: QueueKind::Recv,
                ..
            } => QueueKind::Recv,
            _ => QueueKind::Send,
        }
    }

    /// The region that it writes, and how many of its own bytes; none for a receive, which gets the bytes of another request.
    fn fills(&self) -> Option<(usize, u64)> {
        match &self.what {
            What::Send(send) => match send.transfer {
                Transfer::Send | Transfer::SendInline => None,
                transfer if transfer.is_atomic() => None,
                _ => (send.len_bytes > 0).then_some((send.to, send.len_bytes)),
            },
            _ => None,
        }
    }
}

impl Model {
    pub fn new(memory: Memory, plan: &Plan, checks_faults: bool) -> Model {
        let mut requests = Vec::new();
        requests.resize_with(recorded(STEPS_MAX, 0), || None);
        for step in &plan.steps {
            requests[step.number] = Request::new(step);
            if let Call::LaunchGraph { of, .. } = step.call {
                for operation in plan.graph(of).iter().copied().enumerate() {
                    let request = Request::launched(step, of, operation);
                    let number = request.number;
                    requests[number] = Some(request);
                }
            }
        }
        let numbers = (0..requests.len())
            .filter(|number| requests[*number].is_some())
            .collect();
        Model {
            memory,
            requests,
            numbers,
            checks_faults,
            remote: plan.remote,
            has_no_stop: plan.has_no_stop(),
            causes: Causes::new(plan),
            aborts: plan
                .pairs
                .iter()
                .flat_map(|_| [Default::default(), Default::default()])
                .collect(),
            ended: Default::default(),
            bounced: AtomicU64::new(0),
            put: AtomicU64::new(0),
            clock: AtomicU64::new(1),
            lies: Mutex::default(),
            lives: Mutex::default(),
        }
    }

    pub fn tick(&self) -> u64 {
        self.clock.fetch_add(1, Ordering::SeqCst)
    }

    pub fn lie(&self, kind: &'static str, text: impl Into<String>) {
        lock(&self.lies).push(Lie {
            kind,
            text: text.into(),
        });
    }

    pub fn lies(&self) -> Vec<Lie> {
        lock(&self.lies).clone()
    }

    pub fn request(&self, number: usize) -> &Request {
        self.requests[number].as_ref().unwrap()
    }

    pub fn all(&self) -> impl Iterator<Item = &Request> {
        self.numbers.iter().map(|number| self.request(*number))
    }

    /// The request of that number for the application, if there is one.
    pub fn named(&self, wr_id: u64) -> Option<&Request> {
        let number = usize::try_from(wr_id).ok()?.checked_sub(1)?;
        self.requests.get(number)?.as_ref()
    }

    /// `aborts`: of [`Model::aborts`] before the call that begins it. An abort that had not returned by then may be of this generation.
    pub fn begin_life(&self, end: usize, qpn: u32, aborts: usize) -> Arc<Life> {
        let life = Life::new(end, qpn);
        // Locked, so that an abort that begins now marks it.
        let mut lives = lock(&self.lives);
        let begun = self.aborts[end].0.load(Ordering::SeqCst);
        life.aborted.store(begun != aborts, Ordering::SeqCst);
        lives.push(Arc::clone(&life));
        drop(lives);
        life
    }

    /// Aborts an endpoint, whatever generation it is in.
    pub fn aborts_during(&self, end: usize, abort: impl FnOnce()) {
        self.aborts[end].0.fetch_add(1, Ordering::SeqCst);
        let lives = lock(&self.lives).clone();
        for life in lives.iter().filter(|life| life.end == end) {
            life.aborted.store(true, Ordering::SeqCst);
        }
        abort();
        self.aborts[end].1.fetch_add(1, Ordering::SeqCst);
    }

    /// Calls of abort that have returned.
    pub fn aborts(&self, end: usize) -> usize {
        self.aborts[end].1.load(Ordering::SeqCst)
    }

    /// The endpoint has accepted a request. The caller has exclusive access to the endpoint.
    pub fn accepted(
        &self,
        request: &Request,
        life: &Arc<Life>,
        ticket: Ticket,
        behind: Option<Arc<Launched>>,
    ) {
        let order = &life.sides[request.side() as usize];
        let mut trail = request.trail();
        if request.is_wait() {
            trail.index = Some(order.taken.fetch_add(1, Ordering::SeqCst));
        } else {
            order.enter(request.number, !request.is_unsignaled());
        }
        trail.life = Some(Arc::clone(life));
        trail.behind = behind;
        trail.ticket = Some(ticket);
    }

    /// The next launch of a graph was prepared: an operation that step `of` recorded has its place in the order of its queue.
    #[cfg(feature = "cuda")]
    pub fn armed(&self, of: usize, at: usize, what: Recorded, life: &Arc<Life>) -> Armed {
        let order = &life.sides[QueueKind::Send as usize];
        let number = recorded(of, at);
        let index = if let Recorded::Wait { .. } = what {
            Some(order.taken.fetch_add(1, Ordering::SeqCst))
        } else {
            let is_signaled = !matches!(
                what,
                Recorded::Write {
                    signaled: false,
                    ..
                }
            );
            order.enter(number, is_signaled);
            None
        };
        Armed {
            number,
            index,
            life: Arc::clone(life),
        }
    }

    /// What was armed was launched, as this request.
    #[cfg(feature = "cuda")]
    pub fn launched(
        &self,
        armed: Armed,
        request: &Request,
        ticket: Ticket,
        behind: Option<Arc<Launched>>,
    ) {
        let order = &armed.life.sides[QueueKind::Send as usize];
        order.replace(armed.number, Some(request.number));
        let mut trail = request.trail();
        trail.index = armed.index;
        trail.life = Some(armed.life);
        trail.behind = behind;
        trail.ticket = Some(ticket);
    }

    /// What was armed is not launched.
    #[cfg(feature = "cuda")]
    pub fn disarmed(&self, armed: &Armed) {
        let order = &armed.life.sides[QueueKind::Send as usize];
        order.replace(armed.number, None);
        self.given_up(armed.number, &armed.life);
    }

    /// What a graph has prepared of that number, with [`recorded`], is taken back or dropped.
    #[cfg(feature = "cuda")]
    pub fn given_up(&self, number: usize, life: &Life) {
        lock(&life.disarmed).push(number as u64 + 1);
        self.lose_count(life);
    }

    /// A request that was refused.
    pub fn refused(&self, request: &Request, why: &'static str) {
        request.trail().never.get_or_insert(why);
    }

    /// Whether all completions of the send queue were taken, as far as that is known.
    pub fn is_collected(&self, life: &Life) -> bool {
        let order = &life.sides[QueueKind::Send as usize];
        order.exact.load(Ordering::SeqCst)
            && lock(&order.completions).len() == order.taken.load(Ordering::SeqCst)
    }

    /// Operations of an endpoint may have been dropped.
    pub fn lose_count(&self, life: &Life) {
        for order in &life.sides {
            order.exact.store(false, Ordering::SeqCst);
        }
    }

    /// An operation that was not queued is about to be dropped or rolled back.
    pub fn dropping(&self, request: &Request) {
        let mut trail = request.trail();
        trail.dropped = true;
        trail.never = Some("it was dropped before a stream had it");
        if let Some(life) = &trail.life {
            life.sides[request.side() as usize]
                .exact
                .store(false, Ordering::SeqCst);
        }
    }

    /// A rank of the group ends without having left.
    pub fn rank_ends(&self, rank: usize) {
        self.ended[rank].store(true, Ordering::SeqCst);
    }

    pub fn has_ended(&self, rank: u32) -> bool {
        let ended = self.ended.get(rank as usize);
        ended.is_some_and(|ended| ended.load(Ordering::SeqCst))
    }

    /// The failure that an endpoint names, or a call of it.
    pub fn failed(&self, life: &Life, failure: WorkError) {
        if let Cause::Rank(rank) = failure.cause
            && !self.has_ended(rank)
        {
            self.lie(
                "a rank that has not ended",
                format!("endpoint {}: {failure:?}", life.end),
            );
        }
        self.judge_cause(life, failure);
        {
            let mut known = lock(&life.failure);
            match *known {
                None => *known = Some(failure),
                Some(first) if first != failure => {
                    self.lie(
                        "two causes",
                        format!("endpoint {}: {first:?}, and then {failure:?}", life.end),
                    );
                }
                Some(_) => {}
            }
        }
        self.names(life, failure);
    }

    /// Whether an endpoint can have failed for that reason.
    fn can_fail(&self, life: &Life, failure: WorkError) -> bool {
        let causes = &self.causes;
        let is_possible = match failure.cause {
            Cause::Aborted => life.aborted.load(Ordering::SeqCst),
            Cause::Dropped => life.dropped.load(Ordering::SeqCst),
            Cause::Deadline(timeout) => causes.deadlines[life.end].contains(&timeout),
            Cause::Overrun => causes.overruns,
            Cause::Completion {
                status: WcStatus::RnrRetryExcErr | WcStatus::LocLenErr | WcStatus::RemInvReqErr,
                ..
            } => causes.misses_receives,
            Cause::Completion { status, .. } => (causes.statuses.iter())
                .find(|(of, _)| *of == status)
                .is_none_or(|(_, is_possible)| *is_possible),
            // No plan writes to a trigger word, and endpoints do not wait for values.
            Cause::Trigger(_) | Cause::Substitute => false,
            _ => true,
        };
        is_possible && failure.qpn == life.qpn
    }

    fn judge_cause(&self, life: &Life, failure: WorkError) {
        if !self.can_fail(life, failure) {
            let qpn = life.qpn;
            self.lie(
                "a cause that is impossible",
                format!("endpoint {} ({qpn:#x}): {failure:?}", life.end),
            );
        }
    }

    /// The failure that a stream reports: an endpoint of this plan has failed with it, or a wait for a value.
    pub fn faulted(&self, failure: WorkError) {
        if failure.qpn == 0 {
            let has_it = |request: &Request| match request.what {
                What::WaitValue { timeout, .. } => match failure.cause {
                    Cause::Deadline(its) => its == timeout,
                    Cause::Substitute => true,
                    _ => false,
                },
                _ => false,
            };
            if !self.all().any(has_it) {
                self.lie("a fault of no wait", format!("{failure:?}"));
            }
            return;
        }
        let lives = lock(&self.lives).clone();
        let has_it = |life: &Arc<Life>| {
            let known = *lock(&life.failure);
            known.is_none_or(|known| known == failure) && self.can_fail(life, failure)
        };
        if !lives.iter().any(has_it) {
            self.lie("a fault of no endpoint", format!("{failure:?}"));
        }
    }

    /// A failure that names a request: that request has failed.
    pub fn names(&self, life: &Life, failure: WorkError) {
        // Kernels give their work requests no numbers: the failure names a slot.
        if life.has_kernels() && matches!(failure.cause, Cause::Completion { .. }) {
            return;
        }
        let Some(request) = failure.wr_id.and_then(|wr_id| self.named(wr_id)) else {
            return;
        };
        let Some(ticket) = request.trail().ticket.clone() else {
            // The call that posts it has not returned yet.
            return;
        };
        let flushed = matches!(
            failure.cause,
            Cause::Completion {
                status: WcStatus::WrFlushErr,
                ..
            }
        );
        // A status stays what it was until the device has stopped, for which a look waits half a second.
        let until = Instant::now() + STOPS;
        while matches!(ticket.status(), Status::Rung) && Instant::now() < until {
            std::thread::yield_now();
        }
        match ticket.status() {
            Status::Failed(_) => {}
            // A deadline names the request that was the oldest one under way, which may complete just then.
            Status::Unknown(_) | Status::Complete
                if matches!(failure.cause, Cause::Deadline(_)) => {}
            // A later doorbell released it to a queue pair in error.
            Status::Discarded if flushed => {}
            status => self.lie(
                "names what has not failed",
                format!(
                    "{failure:?}, but the ticket of step {} says {status:?}",
                    request.number
                ),
            ),
        }
    }

    /// The result of a wait for a ticket.
    pub fn waited(
        &self,
        number: usize,
        ticket: &Ticket,
        result: Result<(), Error>,
        was_late: bool,
    ) {
        let status = ticket.status();
        let is_right = match &result {
            Ok(()) => status == Status::Complete,
            Err(Error::Work(failure)) => {
                matches!(status, Status::Failed(its) | Status::Unknown(its) if its == *failure)
            }
            Err(Error::State { .. }) => matches!(status, Status::Discarded | Status::Cancelled),
            Err(Error::Timeout { .. }) => was_late,
            Err(_) => false,
        };
        if !is_right {
            self.lie(
                "a wait for a ticket that answers otherwise",
                format!("step {number}: {result:?}, and the ticket says {status:?}"),
            );
        }
    }

    /// A poll has found that completion.
    pub fn polled(&self, life: &Life, side: QueueKind, completion: Completion) {
        let wr_id = completion.wr_id;
        let order = &life.sides[side as usize];
        let index = order.taken.fetch_add(1, Ordering::SeqCst);
        let expected = lock(&order.completions).get(index).copied();
        let is_it = |request: &&Request| request.wr_id == wr_id;
        let expected_request = expected.and_then(|number| self.requests[number].as_ref());
        let found = expected_request.filter(is_it);
        // Where the order is not known exactly, launches of one graph cannot be told apart: one of this life that is complete will do.
        let is_complete = |request: &&Request| {
            let trail = request.trail();
            let is_here = (trail.life.as_deref()).is_none_or(|its| std::ptr::eq(its, life));
            let status = trail.ticket.as_ref().map(Ticket::status);
            is_here && status == Some(Status::Complete)
        };
        let by_number = || {
            let complete = self.all().filter(is_it).find(is_complete);
            complete.or_else(|| self.all().find(is_it))
        };
        let Some(request) = found.or_else(by_number) else {
            let is_nop = completion.operation == Operation::Post(Opcode::Nop);
            if is_nop && lock(&life.disarmed).contains(&wr_id) {
                return;
            }
            self.lie(
                "polled what is unknown",
                format!("endpoint {} {side:?}: {completion:?}", life.end),
            );
            return;
        };
        let trail = request.trail();
        if order.exact.load(Ordering::SeqCst) && expected != Some(request.number) {
            let number = request.number;
            self.lie("polled out of order", format!("endpoint {} {side:?}: completion {index} is of step {number} and not {expected:?}", life.end));
        }
        // What was dropped is overwritten with a NOP, which may complete.
        if !(trail.dropped && completion.operation == Operation::Post(Opcode::Nop)) {
            self.says(request, completion);
        }
        match trail.ticket.as_ref().map(Ticket::status) {
            Some(Status::Complete) | None => {}
            Some(_) if trail.dropped => {}
            Some(status) => {
                self.lie(
                    "polled what is not complete",
                    format!("the ticket of step {} says {status:?}", request.number),
                );
            }
        }
    }

    /// Checks what a completion says of its request.
    fn says(&self, request: &Request, completion: Completion) {
        let (operation, len_bytes, imm) = match &request.what {
            What::Send(send) => {
                let number = request.number;
                let opcode = match (send.transfer, imm(number, send.transfer)) {
                    (Transfer::Write | Transfer::WriteInline, _) => Opcode::RdmaWrite,
                    (Transfer::WriteImm, _) => Opcode::RdmaWriteImm,
                    (Transfer::Send | Transfer::SendInline, None) => Opcode::Send,
                    (Transfer::Send | Transfer::SendInline, Some(_)) => Opcode::SendImm,
                    (Transfer::Read, _) => Opcode::RdmaRead,
                    (Transfer::FetchAdd, _) => Opcode::AtomicFa,
                    (Transfer::CompareSwap, _) => Opcode::AtomicCs,
                };
                let len_bytes = match opcode {
                    Opcode::RdmaRead | Opcode::AtomicFa | Opcode::AtomicCs => send.len_bytes as u32,
                    _ => 0,
                };
                (Operation::Post(opcode), len_bytes, None)
            }
            What::Recv { to, .. } => {
                let bytes = Memory::read(&self.memory.targets[*to], request.number);
                let sender = (self.memory.sender(&bytes))
                    .or(completion.imm.map(|imm| imm as usize))
                    .and_then(|sender| self.requests.get(sender)?.as_ref());
                let Some((number, What::Send(send))) =
                    sender.map(|sender| (sender.number, &sender.what))
                else {
                    // The ticket is checked for that.
                    return;
                };
                let operation = match send.transfer {
                    Transfer::WriteImm => Operation::ReceiveWrite,
                    _ => Operation::Receive,
                };
                let imm = imm(number, send.transfer);
                (operation, send.len_bytes as u32, imm)
            }
            _ => return,
        };
        let said = (completion.operation, completion.len_bytes, completion.imm);
        if said != (operation, len_bytes, imm) {
            let expected = (operation, len_bytes, imm);
            self.lie(
                "a completion that says something else",
                format!("step {}: {said:?} instead of {expected:?}", request.number),
            );
        }
    }

    /// A poll has found a completion in error: the number of later completions is not known exactly.
    pub fn polled_error(&self, life: &Life, side: QueueKind) {
        life.sides[side as usize]
            .exact
            .store(false, Ordering::SeqCst);
    }

    /// Observes a request, unless another thread is observing it.
    pub fn observe(&self, request: &Request) {
        let Ok(mut trail) = request.trail.try_lock() else {
            return;
        };
        self.observe_with(request, &mut trail);
    }

    fn observe_with(&self, request: &Request, trail: &mut Trail) {
        let Some(ticket) = trail.ticket.clone() else {
            return;
        };
        let number = request.number;
        let status = ticket.status();
        let now = self.tick();
        let last = trail.last.unwrap_or(Status::Prepared);
        if is_final(last) {
            // The first final status counts; later ones are compared with it.
            if status != last {
                let kind = match kind_of_change(last, status) {
                    "failed, then complete" if request.is_wait() => {
                        "a wait that failed, then complete"
                    }
                    kind => kind,
                };
                self.lie(kind, format!("step {number}: {last:?}, then {status:?}"));
            }
            return;
        }
        if rank(status) < rank(last) {
            self.lie(
                "went back",
                format!("step {number}: {last:?}, then {status:?}"),
            );
        }
        trail.last = Some(status);
        if status == Status::Rung && trail.rung_at == 0 {
            trail.rung_at = now;
        }
        if is_final(status) {
            trail.over_at = now;
            trail.over_when = Some(Instant::now());
            self.ends(request, trail, status, &ticket);
        }
        if !is_final(status) {
            self.is_not_early(request, trail);
        }
    }

    /// A request that its stream has not reached must not be transmitted.
    fn is_not_early(&self, request: &Request, trail: &Trail) {
        let Some(behind) = &trail.behind else { return };
        if behind.started() == 0 || behind.ended() != 0 {
            return;
        }
        let found = self.found(request);
        if matches!(found, Some(Found::Part | Found::All)) && behind.ended() == 0 {
            self.lie(
                "transmitted before its turn",
                format!(
                    "step {}: kernel {} before it still runs",
                    request.number, behind.number
                ),
            );
        }
    }

    fn found(&self, request: &Request) -> Option<Found> {
        if let What::Recv { to, .. } = request.what {
            let bytes = Memory::read(&self.memory.targets[to], request.number);
            return Some(if is_zero(&bytes) {
                Found::Nothing
            } else {
                Found::All
            });
        }
        let (bank, len_bytes) = request.fills()?;
        let bytes = Memory::read(&self.memory.targets[bank], request.number);
        let (found, foreign) = self.memory.find(&bytes, request.number, len_bytes);
        if foreign {
            self.lie(
                "wrong bytes",
                format!(
                    "step {}: bytes in its place that it does not transfer",
                    request.number
                ),
            );
        }
        Some(found)
    }

    /// A request has become final.
    fn ends(&self, request: &Request, trail: &mut Trail, status: Status, ticket: &Ticket) {
        let number = request.number;
        trail.found = self.found(request);
        match status {
            Status::Failed(failure) | Status::Unknown(failure) => {
                if let Some(life) = &trail.life {
                    self.judge_cause(life, failure);
                    let mut known = lock(&life.failure);
                    if *known.get_or_insert(failure) != failure {
                        self.lie("two causes", format!("endpoint {}: {:?}, but the ticket of step {number} says {failure:?}", life.end, *known));
                    }
                } else if let What::WaitValue { timeout, .. } = request.what
                    && (failure.qpn, failure.cause) != (0, Cause::Deadline(timeout))
                    && (failure.qpn, failure.cause) != (0, Cause::Substitute)
                {
                    self.lie(
                        "a cause that is impossible",
                        format!("step {number}: {failure:?}"),
                    );
                }
            }
            Status::Complete => self.is_done(request, trail, ticket),
            Status::Discarded => trail.never = trail.never.or(Some("its stream discarded it")),
            _ => {}
        }
    }

    fn is_done(&self, request: &Request, trail: &mut Trail, ticket: &Ticket) {
        let number = request.number;
        if let Some(why) = trail.never {
            self.lie("complete and never sent", format!("step {number}: {why}"));
            return;
        }
        if let (What::Send(send), Some(details)) = (&request.what, ticket.details()) {
            let brings = send.transfer.is_atomic() || send.transfer == Transfer::Read;
            if !brings || !send.signaled || details != (send.len_bytes as u32, None) {
                let text = format!("step {number}: {details:?}, and it is {send:?}");
                self.lie("wrong details", text);
            }
        }
        match &request.what {
            What::Send(Send {
                transfer: Transfer::FetchAdd,
                to,
                ..
            }) => {
                let (_, one) = Memory::counter(number);
                let before = self.memory.result(number, *to);
                let times = self.memory.added(number);
                if times != 1 {
                    self.lie(
                        "complete and not added once",
                        format!("step {number}: added {times} times"),
                    );
                }
                if before == u64::MAX || (before / one) & 3 != 0 {
                    self.lie(
                        "complete without its result",
                        format!("step {number}: {before:#x}"),
                    );
                }
            }
            What::Send(Send {
                transfer: Transfer::CompareSwap,
                to,
                ..
            }) => {
                let is_swapped = self.memory.is_swapped(number);
                let before = self.memory.result(number, *to);
                if !is_swapped || before != 0 {
                    self.lie(
                        "complete and not swapped once",
                        format!("step {number}: swapped: {is_swapped}, before: {before:#x}"),
                    );
                }
            }
            What::Send(Send {
                transfer: Transfer::Send | Transfer::SendInline,
                ..
            }) => {
                let times = self.receipts(number);
                if times != 1 {
                    self.lie(
                        "complete and not received once",
                        format!("step {number}: in {times} receives"),
                    );
                }
            }
            What::Send(Send { len_bytes: 0, .. }) => {}
            What::Send(send) => {
                if trail.found != Some(Found::All) {
                    self.lie(
                        "complete without its bytes",
                        format!("step {number}: {:?} of them", trail.found),
                    );
                }
                let place = crate::memory::place(number);
                self.memory.targets[send.to]
                    .fill(place, send.len_bytes, 0)
                    .unwrap();
                trail.cleared = true;
            }
            What::Recv { end, to, .. } => self.is_received(number, *end, *to, ticket),
            What::WriteValue => {
                if self.memory.words.load_u32(word(number)) != Ok(number as u32 + 1) {
                    self.lie("complete without its value", format!("step {number}"));
                }
            }
            What::WaitValue { gate, .. } => {
                if self.memory.words.load_u32(4 * *gate as u64) == Ok(0) {
                    self.lie("complete before its value", format!("step {number}"));
                }
            }
            What::Launched {
                of,
                at,
                what: Recorded::Write { .. },
            } => {
                if !self.memory.has_graph_bytes(*of, *at) {
                    self.lie("complete without its bytes", format!("step {number}"));
                }
            }
            What::Launched { .. } | What::Wait { .. } => {}
        }
    }

    /// The number of receives that hold all bytes of a send.
    fn receipts(&self, number: usize) -> usize {
        let What::Send(send) = &self.request(number).what else {
            return 0;
        };
        let stamp = self.memory.stamp(number, send.len_bytes);
        let receives = self.all().filter_map(|request| match request.what {
            What::Recv { end, to, .. } if end == send.end ^ 1 => {
                Some(Memory::read(&self.memory.targets[to], request.number))
            }
            _ => None,
        });
        let inbox = (self.memory.inbox.iter())
            .filter(|_| self.remote == Some(send.end ^ 1))
            .flat_map(|inbox| (0..STEPS_MAX).map(|receive| Memory::read(inbox, receive)));
        (receives.chain(inbox))
            .filter(|bytes| bytes.starts_with(stamp))
            .count()
    }

    fn is_received(&self, number: usize, end: usize, to: usize, ticket: &Ticket) {
        let bytes = Memory::read(&self.memory.targets[to], number);
        let details = ticket.details();
        let sender = match self.memory.sender(&bytes) {
            Some(sender) => Some(sender),
            // The immediate data of a write leave no bytes in the receive.
            None => details.and_then(|(_, imm)| imm).map(|imm| imm as usize),
        };
        let Some(sender) = sender else {
            if details.is_some() || !is_zero(&bytes) {
                self.lie(
                    "received bytes that were not sent",
                    format!("step {number}: {details:?}, {:x?}", &bytes[..16]),
                );
            }
            return;
        };
        let Some(Request {
            what: What::Send(send),
            ..
        }) = self.requests.get(sender).and_then(Option::as_ref)
        else {
            self.lie(
                "received bytes that were not sent",
                format!("step {number}: step {sender}"),
            );
            return;
        };
        let is_write = send.transfer == Transfer::WriteImm;
        if send.end != end ^ 1 || is_write == self.memory.sender(&bytes).is_some() {
            self.lie(
                "received what is not for it",
                format!("step {number}: step {sender}, {details:?}"),
            );
        }
        if !is_write && self.memory.find(&bytes, sender, send.len_bytes) != (Found::All, false) {
            self.lie("received in part", format!("step {number}: step {sender}"));
        }
        let expected = (send.len_bytes as u32, imm(sender, send.transfer));
        if details.is_some_and(|details| details != expected) {
            self.lie(
                "wrong details",
                format!("step {number}: {details:?} instead of {expected:?} of step {sender}"),
            );
        }
    }

    /// Requests that are not final.
    pub fn under_way(&self) -> Vec<usize> {
        let is_under_way = |request: &&Request| {
            let mut trail = request.trail();
            self.observe_with(request, &mut trail);
            trail.ticket.is_some() && !trail.last.is_some_and(is_final)
        };
        self.all()
            .filter(is_under_way)
            .map(|request| request.number)
            .collect()
    }

    /// The last status that was seen of each request. For the report of a hang: takes no locks that could block.
    pub fn states(&self) -> String {
        let state = |request: &Request| match request.trail.try_lock() {
            Ok(trail) => format!("{}: {:?}\n", request.number, trail.last),
            Err(_) => format!("{}: a thread is at it\n", request.number),
        };
        self.all().map(state).collect()
    }

    /// Adds the outcomes of its operations.
    pub fn count(&self, ends: &Ends) {
        for (here, all) in [(&self.bounced, &ends.bounced), (&self.put, &ends.put)] {
            all.fetch_add(here.load(Ordering::Relaxed), Ordering::Relaxed);
        }
        for request in self.all() {
            let of = match request.trail().last {
                Some(Status::Complete) => &ends.complete,
                Some(Status::Failed(_) | Status::Unknown(_) | Status::Discarded) => &ends.failed,
                Some(Status::Cancelled) => &ends.cancelled,
                _ => continue,
            };
            of.fetch_add(1, Ordering::Relaxed);
            if request.trail().last == Some(Status::Complete)
                && matches!(request.what, What::Launched { .. })
            {
                ends.launched.fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    /// Checks everything after all work has ended.
    pub fn settle(&self) {
        for request in self.all() {
            let mut trail = request.trail();
            self.observe_with(request, &mut trail);
            self.settle_one(request, &mut trail);
        }
        self.settle_graphs();
        for life in lock(&self.lives).iter() {
            for order in &life.sides {
                self.settle_order(life, order);
            }
        }
    }

    /// Checks how often the launches of each graph have added to its words.
    fn settle_graphs(&self) {
        let mut counts = BTreeMap::<(usize, usize), [u64; 2]>::new();
        for request in self.all() {
            if let What::Launched {
                of,
                at,
                what: Recorded::FetchAdd { .. },
            } = request.what
            {
                let [complete, uncertain] = counts.entry((of, at)).or_default();
                match request.trail().last {
                    Some(Status::Complete) => *complete += 1,
                    Some(Status::Failed(_) | Status::Unknown(_)) => *uncertain += 1,
                    _ => {}
                }
            }
        }
        for ((of, at), [complete, uncertain]) in counts {
            let added = self.memory.launched(recorded(of, at));
            if !(complete..=complete + uncertain).contains(&added) {
                self.lie(
                    "launches that do not add up",
                    format!("operation {at} of graph {of}: {complete} are complete, {uncertain} failed or unknown, {added} have added"),
                );
            }
        }
    }

    fn settle_one(&self, request: &Request, trail: &mut Trail) {
        let number = request.number;
        let is_complete = trail.last == Some(Status::Complete);
        if let Some(behind) = &trail.behind {
            if trail.rung_at != 0 && trail.rung_at < behind.ended() {
                self.lie(
                    "rung before its turn",
                    format!(
                        "step {number}: kernel {} before it was still running",
                        behind.number
                    ),
                );
            }
            if trail.over_at != 0 && trail.over_at < behind.ended() {
                trail
                    .never
                    .get_or_insert("it was over before its stream came to it");
                if is_complete {
                    self.lie(
                        "complete before its turn",
                        format!(
                            "step {number}: kernel {} before it was still running",
                            behind.number
                        ),
                    );
                }
            }
        }
        if let (
            Some(Status::Failed(WorkError {
                cause: Cause::Deadline(timeout),
                ..
            })),
            What::WaitValue { .. },
        ) = (trail.last, &request.what)
            && let (Some(over), Some(behind)) = (trail.over_when, &trail.behind)
            && let Some(began) = *lock(&behind.ended_when)
            && over.saturating_duration_since(began) < timeout
        {
            self.lie(
                "deadline before its turn",
                format!(
                    "step {number}: given up {:?} after kernel {} before it",
                    over.saturating_duration_since(began),
                    behind.number
                ),
            );
        }
        if trail.last == Some(Status::Cancelled) {
            trail.never.get_or_insert("it was cancelled");
        }
        // A device that cannot be stopped may carry it out later.
        let is_open = self.has_no_stop && matches!(trail.last, Some(Status::Unknown(_)));
        let found = self.found(request);
        let arrived = matches!(found, Some(Found::Part | Found::All));
        if trail.cleared && arrived {
            self.lie("written again", format!("step {number}"));
        }
        if let What::Send(send) = &request.what {
            let times = match send.transfer {
                Transfer::FetchAdd => self.memory.added(number),
                Transfer::CompareSwap => self.memory.is_swapped(number).into(),
                Transfer::Send | Transfer::SendInline => self.receipts(number) as u64,
                _ => u64::from(arrived),
            };
            if times > 1 {
                self.lie("carried out twice", format!("step {number}: {times} times"));
            }
            if let (Some(why), 1.., false) = (trail.never, times, is_open) {
                self.lie(
                    "arrived and never sent",
                    format!("step {number}, {:?}: {why}", trail.last),
                );
            }
        } else if let (What::Recv { .. }, Some(why), true) = (&request.what, trail.never, arrived)
            && !is_open
        {
            self.lie(
                "received and never posted",
                format!("step {number}, {:?}: {why}", trail.last),
            );
        }
        // Checks the memory of this side only: data for the other side may arrive later.
        let is_here = matches!(
            request.what,
            What::Recv { .. }
                | What::Send(Send {
                    transfer: Transfer::Read,
                    ..
                })
        );
        if is_here && !is_complete && trail.over_at != 0 && found != trail.found && !is_open {
            self.lie(
                "arrived after its end",
                format!(
                    "step {number}, {:?}: {:?}, then {found:?}",
                    trail.last, trail.found
                ),
            );
        }
    }

    fn settle_order(&self, life: &Life, order: &Order) {
        // An operation that is armed and was not launched has no request.
        let last = |number: usize| self.requests[number].as_ref()?.trail().last;
        let mut failed = None;
        for number in lock(&order.requests).iter().copied() {
            match last(number) {
                Some(Status::Failed(_) | Status::Unknown(_) | Status::Discarded) => {
                    failed = failed.or(Some(number));
                }
                Some(Status::Complete) if failed.is_some() => {
                    self.lie("complete behind what failed", format!("endpoint {}: step {number} is complete, and {failed:?} before it failed", life.end));
                }
                _ => {}
            }
        }
        if !order.exact.load(Ordering::SeqCst) {
            return;
        }
        let completions = lock(&order.completions);
        for wait in self.all() {
            let trail = wait.trail();
            let (Some(index), Some(its_life)) = (trail.index, &trail.life) else {
                continue;
            };
            if !std::ptr::eq(&its_life.sides[wait.side() as usize], order)
                || trail.last != Some(Status::Complete)
            {
                continue;
            }
            drop(trail);
            let found = completions
                .get(index)
                .map(|number| (*number, last(*number)));
            if !matches!(found, Some((_, Some(Status::Complete)))) {
                self.lie(
                    "a wait for what is not complete",
                    format!(
                        "endpoint {}: step {} is complete, and it waited for {found:?}",
                        life.end, wait.number
                    ),
                );
            }
        }
    }
}

/// The immediate data of a step.
pub fn imm(number: usize, transfer: Transfer) -> Option<u32> {
    let has_imm = transfer == Transfer::WriteImm || transfer == Transfer::Send && number % 2 == 1;
    has_imm.then_some(number as u32)
}
