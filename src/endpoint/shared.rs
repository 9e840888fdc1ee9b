//! What an endpoint shares with its tickets, with the programs on streams, and with the watchdog.
#![allow(unsafe_code)] // promises the memory behind the targets to executors

use std::fmt;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use crate::endpoint::clock::now_ns;
use crate::endpoint::side::{Ends, Found, Lane, Standing, Wait};
use crate::endpoint::watchdog::{self, Watched};
use crate::endpoint::{EndpointConfig, Side};
use crate::mlx5::{CqRing, CqRingConfig, Posted, SendQueue, WQEBB_BYTES, Wqe};
use crate::peer::{Dword, Role, Target, TargetId, Targets};
use crate::region::ProtectionDomain;
use crate::soft::{QueuePair, QueuePairConfig, State};
use crate::stream::{Outcome, Owner};
use crate::{Cause, Error, Result, WorkError};

/// How long the watchdog goes on looking at an endpoint with nothing under way: so that an endpoint in use does not come
/// and go with every operation.
const LINGER_NS: u64 = 100_000_000;

/// What an executor hands back: which program it was.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Cookie {
    pub(super) side: Side,
    pub(super) is_wait: bool,
    /// The program begins with a wait for its turn behind another stream.
    pub(super) waits_turn: bool,
    /// Running count of the work request, or running index of the completion.
    pub(super) count: u32,
}

impl Cookie {
    pub(super) fn to_bits(self) -> u64 {
        u64::from(self.count)
            | (self.side as u64) << 32
            | u64::from(self.is_wait) << 33
            | u64::from(self.waits_turn) << 34
    }

    fn from_bits(bits: u64) -> Cookie {
        Cookie {
            side: if bits & 1 << 32 == 0 {
                Side::Send
            } else {
                Side::Recv
            },
            is_wait: bits & 1 << 33 != 0,
            waits_turn: bits & 1 << 34 != 0,
            count: bits as u32,
        }
    }
}

/// How an earlier life of an endpoint ended, for the tickets of that time.
#[derive(Debug, Clone)]
struct Past {
    epoch: u32,
    /// Of each side: work requests, and waits.
    ends: [(Ends, Ends); 2],
    failure: Option<WorkError>,
}

/// Lives that are remembered. A ticket that is older has seen this many resets.
const PASTS: usize = 64;

pub(super) struct Shared {
    /// First, so that the device forgets the queue pair before the regions that its work names are let go.
    pub(super) qp: QueuePair,
    pub(super) domain: ProtectionDomain,
    targets: Targets,
    bases: Vec<NonNull<u8>>,
    /// Where executed programs leave their count: send and receive.
    progress: Arc<[AtomicU32; 2]>,
    pub(super) progress_words: [Dword; 2],
    pub(super) lanes: [Lane; 2],
    pub(super) send_wqebbs: u32,
    /// The first failure. The flag is set after it, and stays until a reset.
    failure: Mutex<Option<WorkError>>,
    has_failed: AtomicBool,
    /// Set when the device does nothing more for this life but flush.
    broken_down: AtomicBool,
    /// Counts lives: each reset starts a new one. Changes under the lock of `failure`.
    pub(super) epoch: AtomicU32,
    /// Held while the watchdog looks and while a new life starts: a verdict on the old one must not hit the new one.
    life: Mutex<()>,
    pasts: Mutex<Vec<Past>>,
    /// Programs that streams have and have not finished.
    pub(super) on_streams: AtomicU32,
    watched: AtomicBool,
    last_active_ns: AtomicU64,
    weak: Weak<Shared>,
}

// SAFETY: the raw addresses are those of rings and pages that live as long as `self`; what may be done with them is agreed
// in the rooms that do it (`mlx5`, `soft`, `stream`).
unsafe impl Send for Shared {}
// SAFETY: as above; all other state is atomics and locks.
unsafe impl Sync for Shared {}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared")
            .field("qpn", &self.qp.qpn())
            .field("failure", &self.failure())
            .finish_non_exhaustive()
    }
}

/// The targets of an endpoint's programs that the queues need to know.
pub(super) struct QueueTargets {
    pub(super) send_record: Dword,
    pub(super) recv_record: Dword,
    pub(super) uar: [crate::peer::Block; 2],
}

impl Shared {
    pub(super) fn new(
        domain: &ProtectionDomain,
        config: &EndpointConfig,
    ) -> Result<(Arc<Shared>, QueueTargets)> {
        watchdog::start()?;
        let send_wqebbs = config.send_wqebbs();
        let recv_wqes = config.recv_depth.next_power_of_two();
        // Twice the depth: what is in flight, and as much that nobody has collected yet.
        let cqes = |depth: u32| (2 * depth).next_power_of_two();
        let (send_cqes, recv_cqes) = (cqes(config.send_depth), cqes(config.recv_depth));
        let qp = QueuePair::new(
            domain.device().soft(),
            &QueuePairConfig {
                pd: domain.number(),
                send_wqebbs,
                recv_wqes,
                recv_stride_bytes: 16 * config.max_segments.next_power_of_two(),
                send_cqes,
                recv_cqes,
            },
        )?;
        let memory = *qp.memory();
        let progress = Arc::new([const { AtomicU32::new(0) }; 2]);
        let mut targets = Targets::new();
        let mut bases = Vec::new();
        let mut register = |name: &str, role, len_bytes: u64, base: *mut u8| -> Result<Target> {
            bases.push(NonNull::new(base).ok_or(Error::System {
                operation: "queue memory",
                errno: libc::ENOMEM,
            })?);
            Ok(targets.register(name, role, len_bytes))
        };
        let record = register("dbrec", Role::DoorbellRecord, 8, memory.record.cast())?;
        let uar = [
            register("uar0", Role::Uar, 256, memory.uar[0])?,
            register("uar1", Role::Uar, 256, memory.uar[1])?,
        ];
        let send_cq = register(
            "send_cq",
            Role::Completions,
            u64::from(send_cqes) * 64,
            memory.send_cq,
        )?;
        let recv_cq = register(
            "recv_cq",
            Role::Completions,
            u64::from(recv_cqes) * 64,
            memory.recv_cq,
        )?;
        let send_marks = register(
            "send_marks",
            Role::Marks,
            u64::from(send_cqes) * 4,
            memory.send_marks.cast(),
        )?;
        let recv_marks = register(
            "recv_marks",
            Role::Marks,
            u64::from(recv_cqes) * 4,
            memory.recv_marks.cast(),
        )?;
        let counts = register(
            "progress",
            Role::Memory,
            8,
            Arc::as_ptr(&progress).cast_mut().cast(),
        )?;
        let cq_config = |recv: bool| CqRingConfig {
            ring: if recv { memory.recv_cq } else { memory.send_cq },
            cqe_count: if recv { recv_cqes } else { send_cqes },
            record: if recv {
                memory.recv_cq_record
            } else {
                memory.send_cq_record
            },
            marks: if recv {
                memory.recv_marks
            } else {
                memory.send_marks
            },
            completions: if recv { recv_cq } else { send_cq },
            marks_target: if recv { recv_marks } else { send_marks },
        };
        // SAFETY: all of it is memory of `qp`, sized as given here, and `qp` lives in the same object as the rings.
        let rings = unsafe {
            [
                CqRing::new(cq_config(false))?,
                CqRing::new(cq_config(true))?,
            ]
        };
        rings.iter().for_each(CqRing::reset);
        let [send_ring, recv_ring] = rings;
        let turn_timeout_ns = timeout_ns(config.wait_timeout);
        let lanes = [
            Lane::new(Side::Send, config.send_depth, turn_timeout_ns, send_ring),
            Lane::new(Side::Recv, config.recv_depth, turn_timeout_ns, recv_ring),
        ];
        let queue_targets = QueueTargets {
            // The record's first word is the receive queue's.
            send_record: record.dword(4)?,
            recv_record: record.dword(0)?,
            uar: [uar[0].block(0, 256)?, uar[1].block(0, 256)?],
        };
        let progress_words = [counts.dword(0)?, counts.dword(4)?];
        let shared = Arc::new_cyclic(|weak| Shared {
            qp,
            domain: domain.clone(),
            targets,
            bases,
            progress,
            progress_words,
            lanes,
            send_wqebbs,
            failure: Mutex::default(),
            has_failed: AtomicBool::new(false),
            broken_down: AtomicBool::new(false),
            epoch: AtomicU32::new(0),
            life: Mutex::default(),
            pasts: Mutex::default(),
            on_streams: AtomicU32::new(0),
            watched: AtomicBool::new(false),
            last_active_ns: AtomicU64::new(0),
            weak: weak.clone(),
        });
        Ok((shared, queue_targets))
    }

    #[inline]
    pub(super) fn lane(&self, side: Side) -> &Lane {
        &self.lanes[side as usize]
    }

    pub(super) fn targets_id(&self) -> u64 {
        self.targets.id()
    }

    pub(super) fn target_table(&self) -> &Targets {
        &self.targets
    }

    /// Running count of work requests that were executed, as the programs themselves left it.
    #[inline]
    pub(super) fn rung(&self, side: Side) -> u32 {
        self.progress[side as usize].load(Ordering::Acquire)
    }

    pub(super) fn set_rung(&self, side: Side, count: u32) {
        self.progress[side as usize].store(count, Ordering::Release);
    }

    /// The failure of this life, if there is one.
    #[inline]
    pub(super) fn failure(&self) -> Option<WorkError> {
        if self.has_failed.load(Ordering::Acquire) {
            return *self.failure.lock().unwrap_or_else(PoisonError::into_inner);
        }
        None
    }

    #[inline]
    pub(super) fn check_alive(&self) -> Result<()> {
        self.failure()
            .map_or(Ok(()), |failure| Err(Error::Work(failure)))
    }

    /// Records a failure of the life that is now; only the first counts. The watchdog then breaks the endpoint down.
    pub(super) fn fail(&self, wr_id: Option<u64>, cause: Cause) {
        self.fail_in(self.epoch.load(Ordering::Acquire), wr_id, cause);
    }

    /// Records a failure, unless the life that it was found in is over.
    fn fail_in(&self, epoch: u32, wr_id: Option<u64>, cause: Cause) {
        let mut failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
        if self.epoch.load(Ordering::Relaxed) != epoch {
            return;
        }
        if failure.is_none() {
            *failure = Some(WorkError {
                qpn: self.qp.qpn(),
                wr_id,
                cause,
            });
        }
        self.has_failed.store(true, Ordering::Release);
        drop(failure);
        self.activate();
    }

    /// After a failure: nothing may be waited for any more.
    fn break_down(&self) {
        if !self.broken_down.load(Ordering::Relaxed) {
            self.qp.fail();
            // From here on the device only flushes. Streams are let go after this, not before: a doorbell behind a wait that was
            // given up must not send what the wait was to protect.
            self.broken_down.store(true, Ordering::Release);
        }
        self.reap();
        for lane in &self.lanes {
            lane.release_waiters();
            // Nobody need wait for a turn any more.
            self.set_rung(lane.side, lane.queued.load(Ordering::Acquire));
        }
    }

    /// Processes new completions of both queues. Whether there were any. A queue that another thread is at is left to it.
    #[inline]
    pub(super) fn reap(&self) -> bool {
        self.reap_by(Lane::reap)
    }

    /// [`Shared::reap`] that waits for the other thread: completions that were there before the call are processed after it.
    pub(super) fn reap_fully(&self) {
        self.reap_by(Lane::reap_fully);
    }

    #[inline]
    fn reap_by(&self, reap: impl Fn(&Lane, &dyn Fn(Found)) -> bool) -> bool {
        let epoch = self.epoch.load(Ordering::Acquire);
        let [send, recv] = &self.lanes;
        let flushed = std::cell::Cell::new(false);
        let failed = |found: Found| {
            // A flush tells that something else has failed, and the completion that says what may be in the other queue.
            if found.flushed {
                flushed.set(true);
            } else {
                self.fail_in(epoch, found.wr_id, found.cause);
            }
        };
        let mut new = reap(send, &failed) | reap(recv, &failed);
        if flushed.get() && !self.has_failed.load(Ordering::Acquire) {
            // Fully: another thread may be about to process just that completion.
            new |= send.reap_fully(&failed) | recv.reap_fully(&failed);
            self.fail_in(epoch, None, Cause::QueuePair);
        }
        new
    }

    /// [`Shared::reap`], and a look at what the device says of the queue pair itself.
    pub(super) fn look_for_failure(&self) {
        let epoch = self.epoch.load(Ordering::Acquire);
        self.reap();
        if self.has_failed.load(Ordering::Acquire) {
            return;
        }
        if self.qp.status().overrun() {
            self.fail_in(epoch, None, Cause::Overrun);
        } else if self.qp.status().state() == State::Error {
            // A completion that says why was written before the state was set.
            self.reap_fully();
            self.fail_in(epoch, None, Cause::QueuePair);
        }
    }

    /// Has the watchdog look at this endpoint, if it does not.
    #[inline]
    pub(super) fn activate(&self) {
        // SeqCst, as the store and the look at `on_streams` where the watchdog stops watching: one of the two sees the other.
        if !self.watched.load(Ordering::SeqCst) && !self.watched.swap(true, Ordering::SeqCst) {
            self.last_active_ns.store(now_ns(), Ordering::Relaxed);
            watchdog::watch(self.weak.clone());
        }
    }

    /// Waits until no stream has a program of this endpoint.
    pub(super) fn quiesce(&self, timeout: Duration) -> Result<()> {
        let deadline = now_ns().saturating_add(timeout.as_nanos() as u64);
        while self.on_streams.load(Ordering::Acquire) > 0 {
            if now_ns() > deadline {
                return Err(Error::Timeout {
                    operation: "reset: programs of the endpoint are still on a stream; this",
                    timeout,
                });
            }
            std::thread::sleep(Duration::from_micros(50));
        }
        Ok(())
    }

    /// Starts a new life. The caller has the endpoint to itself, and no stream has a program of it.
    pub(super) fn start_over(&self) -> Result<()> {
        let _life = self.life.lock().unwrap_or_else(PoisonError::into_inner);
        // First, so that no flush of the old life arrives in the new one.
        self.qp.reset()?;
        let past = Past {
            epoch: self.epoch.load(Ordering::Relaxed),
            ends: [self.lanes[0].ends(), self.lanes[1].ends()],
            failure: self.failure(),
        };
        let mut pasts = self.pasts.lock().unwrap_or_else(PoisonError::into_inner);
        if pasts.len() == PASTS {
            pasts.remove(0);
        }
        pasts.push(past);
        drop(pasts);
        self.lanes.iter().for_each(Lane::reset);
        self.set_rung(Side::Send, 0);
        self.set_rung(Side::Recv, 0);
        let mut failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
        self.epoch.fetch_add(1, Ordering::AcqRel);
        *failure = None;
        self.has_failed.store(false, Ordering::Release);
        self.broken_down.store(false, Ordering::Release);
        Ok(())
    }

    /// Clears the doorbell records, as after creation.
    pub(super) fn reset_records(&self) {
        for word in 0..2 {
            // SAFETY: the record has two words, which live as long as `qp`.
            unsafe { AtomicU32::from_ptr(self.qp.memory().record.add(word)) }
                .store(0, Ordering::Release);
        }
    }

    /// How an operation of an earlier life ended: well, or with that life's failure.
    pub(super) fn standing_in_the_past(
        &self,
        epoch: u32,
        side: Side,
        is_wait: bool,
        count: u32,
    ) -> (Standing, Option<WorkError>) {
        let pasts = self.pasts.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(past) = pasts.iter().find(|past| past.epoch == epoch) else {
            return (Standing::Failed, None);
        };
        let (requests, waits) = &past.ends[side as usize];
        let standing = if is_wait { waits } else { requests }.of(count);
        (standing, past.failure)
    }

    /// Makes a NOP of a send that was prepared and is dropped while later ones stand behind it.
    pub(super) fn nop_over(&self, posted: Posted, signaled: bool) {
        // SAFETY: the ring is that of `qp`; the request was prepared and never handed to a stream, so it was not rung; and
        // its `Prepared`, which calls this once, is the only one to know of it.
        unsafe {
            SendQueue::nop_over_raw(
                self.qp.memory().send_ring,
                self.send_wqebbs,
                self.qp.qpn(),
                posted,
                signaled,
            );
        }
    }

    /// The bytes of a posted work request, as long as its control segment says.
    pub(super) fn wqe(&self, posted: Posted) -> Vec<u8> {
        let ring = self.qp.memory().send_ring.cast::<u64>();
        let first = posted.index & (self.send_wqebbs - 1);
        let mut bytes = Vec::with_capacity(posted.wqebbs as usize * WQEBB_BYTES);
        for word in 0..posted.wqebbs * 8 {
            let at = (first * 8 + word) % (self.send_wqebbs * 8);
            // SAFETY: inside the ring, which is page-aligned and lives as long as `qp`. As an atomic, because the poster may
            // have taken the place again, if the operation was not dropped in time: then the bytes are of no use, and no more.
            let word =
                unsafe { AtomicU64::from_ptr(ring.add(at as usize)) }.load(Ordering::Relaxed);
            bytes.extend_from_slice(&word.to_ne_bytes());
        }
        let len_bytes = bytes
            .first_chunk()
            .map_or(0, |control| usize::from(Wqe::ctrl(control).ds) * 16);
        bytes.truncate(len_bytes);
        bytes
    }

    /// The deadline that has passed, if one has.
    fn overdue(&self, now_ns: u64) -> Option<Duration> {
        for lane in &self.lanes {
            for index in lane.under_way() {
                let record = lane.record(index);
                // One whose completion is there is over; its stream was only slow to see it.
                if !lane.is_waiting(index) || lane.cq.cqe(index).is_some() {
                    continue;
                }
                let started = record.wait_started_ns.load(Ordering::Relaxed);
                let timeout = record.wait_timeout_ns.load(Ordering::Relaxed);
                if started != 0 && now_ns.saturating_sub(started) > timeout {
                    lane.set_wait(index, Wait::GivenUp);
                    return Some(Duration::from_nanos(timeout));
                }
            }
            let started = lane.turn_started_ns.load(Ordering::Acquire);
            let timeout = lane.turn_timeout_ns;
            if started != 0 && now_ns.saturating_sub(started) > timeout {
                return Some(Duration::from_nanos(timeout));
            }
        }
        None
    }
}

impl Watched for Shared {
    fn look(&self) -> bool {
        let now = now_ns();
        let _life = self.life.lock().unwrap_or_else(PoisonError::into_inner);
        self.look_for_failure();
        if !self.has_failed.load(Ordering::Acquire)
            && let Some(timeout) = self.overdue(now)
        {
            self.fail(None, Cause::Deadline(timeout));
        }
        if self.has_failed.load(Ordering::Acquire) {
            self.break_down();
        }
        if self.on_streams.load(Ordering::Acquire) > 0 {
            self.last_active_ns.store(now, Ordering::Relaxed);
            return true;
        }
        if now.saturating_sub(self.last_active_ns.load(Ordering::Relaxed)) < LINGER_NS {
            return true;
        }
        self.watched.store(false, Ordering::SeqCst);
        // Whoever became active just before the store found `watched` set: look once more.
        let missed = self.on_streams.load(Ordering::SeqCst) > 0;
        missed && !self.watched.swap(true, Ordering::SeqCst)
    }
}

// SAFETY: `bases` holds, for each target of `targets` in the order of their numbers, memory of `qp` or `progress` of the
// length registered in `new`; both live as long as `self` and do not move.
unsafe impl Owner for Shared {
    fn targets(&self) -> &Targets {
        &self.targets
    }

    fn base(&self, target: TargetId) -> Option<NonNull<u8>> {
        self.bases
            .get(self.targets.iter().position(|known| known.id() == target)?)
            .copied()
    }

    #[inline]
    fn progress(&self) -> bool {
        self.qp.device().progress()
    }

    #[inline]
    fn rung(&self) {
        self.qp.rung();
    }

    fn started(&self, cookie: u64) {
        let cookie = Cookie::from_bits(cookie);
        let lane = self.lane(cookie.side);
        if cookie.is_wait {
            lane.record(cookie.count)
                .wait_started_ns
                .store(now_ns(), Ordering::Relaxed);
            lane.set_wait(cookie.count, Wait::Started);
        } else if cookie.waits_turn {
            lane.turn_started_ns.store(now_ns(), Ordering::Release);
        }
    }

    fn finished(&self, cookie: u64, outcome: Outcome) {
        let cookie = Cookie::from_bits(cookie);
        let lane = self.lane(cookie.side);
        if cookie.waits_turn {
            lane.turn_started_ns.store(0, Ordering::Release);
        }
        if cookie.is_wait {
            let given_up = outcome != Outcome::Done || self.has_failed.load(Ordering::Acquire);
            lane.set_wait(
                cookie.count,
                if given_up { Wait::GivenUp } else { Wait::Done },
            );
        }
        if outcome == Outcome::Discarded {
            if cookie.is_wait {
                // The program that would have cleared the mark was not executed.
                lane.cq.abort_peek(cookie.count);
            }
            self.fail(None, Cause::Discarded);
        }
        self.on_streams.fetch_sub(1, Ordering::AcqRel);
    }

    #[inline]
    fn released(&self, _cookie: u64) -> bool {
        self.broken_down.load(Ordering::Acquire)
    }
}

/// A timeout as nanoseconds; none is longer than any time.
pub(super) fn timeout_ns(timeout: Option<Duration>) -> u64 {
    timeout.map_or(u64::MAX, |timeout| {
        u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX)
    })
}
