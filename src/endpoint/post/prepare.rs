//! Preparing operations, and taking them back.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::Endpoint;
use crate::bytecode::{Fence, Program};
use crate::endpoint::config::SEGMENTS_MAX;
#[cfg(feature = "cuda")]
use crate::endpoint::owned_queue::OwnedRecvQueue;
use crate::endpoint::prepared::{OperationKind, Prepared, PreparedOperation};
use crate::endpoint::queue::{self, HeldRegions, QueueState};
use crate::endpoint::shared::{EndpointShared, timeout_ns};
use crate::endpoint::work::Data;
use crate::endpoint::{Control, OwnedSendQueue, QueueKind, Work};
use crate::mlx5::{DataSegment, DoorbellStores, Opcode, Payload, SendRequest};
use crate::nic::State;
use crate::region::{Access, Slice};
use crate::{Error, Result, StateKind};

/// The data segments of a list of slices, and the regions to hold.
struct Segments {
    list: [DataSegment; SEGMENTS_MAX as usize],
    count: usize,
    held: HeldRegions,
}

#[cfg(feature = "cuda")]
impl Segments {
    fn into_vec(self) -> Vec<DataSegment> {
        self.list[..self.count].to_vec()
    }
}

impl Endpoint {
    /// Makes a send, write, read or atomic ready for a stream.
    ///
    /// # Errors
    /// [`Error::Work`] if the endpoint has failed; [`Error::State`] if it is not connected, or a region is deregistered;
    /// or if a read or an atomic would write to a region without [`Access::LOCAL_WRITE`]; [`Error::Foreign`] for a region of another protection
    /// domain; [`Error::Range`] for too many slices or inline bytes, and for an atomic whose slice does not have 8 bytes; [`Error::Alignment`] for an
    /// atomic whose remote address is not a multiple of 8; [`Error::OutOfBounds`] for more bytes than the remote slice has; [`Error::State`] for a
    /// read or an atomic on a device that has none, for anything but a send or a NOP on a UD endpoint, for a send there without [`Work::to`], for a work request with
    /// it on another endpoint, for immediate data with an operation that carries none, and for a solicited completion with one that makes none; [`Error::QueueFull`], and with
    /// [`EndpointConfig::room_timeout`](crate::EndpointConfig::room_timeout) [`Error::Timeout`]. Nothing has changed then.
    pub fn prepare_send(&mut self, work: &Work<'_>) -> Result<Prepared> {
        let operation = self.make_send(work)?;
        Ok(self.prepared(operation))
    }

    /// [`Endpoint::prepare_send`], with the program in the endpoint's own place.
    pub(super) fn make_send(&mut self, work: &Work<'_>) -> Result<PreparedOperation> {
        self.program.clear();
        let writes_here = self.check_request(work)?;
        let segments;
        let (payload, held) = match work.data {
            Data::Slices(slices) => {
                check_remote(work, check_message(slices, self.shared.message_bytes)?)?;
                segments = self.segments(slices, writes_here)?;
                (
                    Payload::Segments(&segments.list[..segments.count]),
                    segments.held,
                )
            }
            Data::Inline(bytes) => {
                self.check_inline(bytes)?;
                check_remote(work, bytes.len() as u64)?;
                (Payload::Inline(bytes), HeldRegions::default())
            }
        };
        self.roll_back_cancelled(QueueKind::Send)?;
        self.make_room(QueueKind::Send)?;
        let request = SendRequest {
            opcode: work.opcode,
            signaled: work.signaled,
            solicited: work.solicited,
            fence: work.fence,
            imm: work.imm,
            remote_addr: work.remote.addr(),
            rkey: work.remote.rkey(),
            swap_or_add: work.operand,
            compare: work.compare,
            payload,
        };
        let posted = match self.write_request(&request, work.receiver) {
            Err(Error::QueueFull { .. }) => {
                // The ring is full though the depth is not reached: long work requests.
                self.reap()?;
                self.write_request(&request, work.receiver)?
            }
            posted => posted?,
        };
        let queue = self.shared.queue(QueueKind::Send);
        let count = queue.outstanding.posted();
        let committed = if let Some(doorbells) = self.shared.doorbells() {
            self.send.commit_stores().map(|(commit, stores)| {
                doorbells.enter(QueueKind::Send, count, stores);
                commit
            })
        } else if self.config.blueflame {
            self.send.commit_blueflame(&mut self.program)
        } else {
            self.send.commit(&mut self.program)
        };
        let commit = committed.inspect_err(|_| self.send.discard())?;
        if let Err(error) = announce(
            &self.shared,
            &mut self.program,
            QueueKind::Send,
            count,
            self.config.blueflame,
        ) {
            self.send.rollback(commit)?;
            return Err(error);
        }
        keep_commit(
            &mut self.send_commits,
            queue,
            count,
            (commit, work.signaled),
        );
        let serial = queue.enter(
            posted.index,
            queue::WorkInFlight {
                wr_id: work.wr_id,
                end: posted.end(),
                held,
            },
        );
        if work.signaled {
            queue.expect(1);
        }
        if let Some(receiver) = work.receiver {
            self.hold_handle(count, receiver);
        }
        let kind = OperationKind::Send {
            posted,
            signaled: work.signaled,
        };
        Ok(self.operation(QueueKind::Send, kind, count, serial))
    }

    /// Makes a receive ready for a stream: what arrives fills the slices in turn.
    ///
    /// # Errors
    /// As [`Endpoint::prepare_send`], but a receive may be posted before [`Endpoint::connect`].
    pub fn prepare_recv(&mut self, wr_id: u64, slices: &[Slice<'_>]) -> Result<Prepared> {
        let operation = self.make_recv(wr_id, slices)?;
        Ok(self.prepared(operation))
    }

    /// [`Endpoint::prepare_recv`], with the program in the endpoint's own place.
    pub(super) fn make_recv(
        &mut self,
        wr_id: u64,
        slices: &[Slice<'_>],
    ) -> Result<PreparedOperation> {
        self.program.clear();
        self.shared.check_alive()?;
        self.check_state("prepare_recv", State::Init)?;
        let segments = self.segments(slices, true)?;
        self.roll_back_cancelled(QueueKind::Recv)?;
        self.make_room(QueueKind::Recv)?;
        let list = &segments.list[..segments.count];
        let posted = match self.recv.post(list) {
            Err(Error::QueueFull { .. }) => {
                // A reaper has counted it and has not given the ring's entry back yet.
                self.reap()?;
                self.recv.post(list)?
            }
            posted => posted?,
        };
        let queue = self.shared.queue(QueueKind::Recv);
        let count = queue.outstanding.posted();
        let committed = match self.shared.doorbells() {
            Some(doorbells) => self.recv.commit_stores().map(|(commit, record)| {
                doorbells.enter(QueueKind::Recv, count, DoorbellStores { record, uar: 0 });
                commit
            }),
            None => self.recv.commit(&mut self.program),
        };
        let commit = committed.inspect_err(|_| self.recv.discard())?;
        if let Err(error) = announce(
            &self.shared,
            &mut self.program,
            QueueKind::Recv,
            count,
            false,
        ) {
            self.recv.rollback(commit)?;
            return Err(error);
        }
        keep_commit(&mut self.recv_commits, queue, count, commit);
        let end = posted.index.wrapping_add(1);
        let serial = queue.enter(
            posted.index,
            queue::WorkInFlight {
                wr_id,
                end,
                held: segments.held,
            },
        );
        queue.expect(1);
        Ok(self.operation(QueueKind::Recv, OperationKind::Recv, count, serial))
    }

    /// Makes a wait for the next completion of a queue ready for a stream, with the endpoint's own deadline.
    ///
    /// # Errors
    /// [`Error::Work`] if the endpoint has failed; [`Error::State`] if there is no further completion to come: each signaled
    /// send and each receive makes one.
    pub fn prepare_wait_cq(&mut self, kind: QueueKind) -> Result<Prepared> {
        self.prepare_wait_cq_for(kind, self.config.wait_timeout)
    }

    /// [`Endpoint::prepare_wait_cq`] with a deadline of its own; `None` waits for ever.
    ///
    /// # Errors
    /// As [`Endpoint::prepare_wait_cq`].
    pub fn prepare_wait_cq_for(
        &mut self,
        kind: QueueKind,
        timeout: Option<Duration>,
    ) -> Result<Prepared> {
        let operation = self.make_wait_cq(kind, timeout)?;
        Ok(self.prepared(operation))
    }

    /// [`Endpoint::prepare_wait_cq_for`], with the program in the endpoint's own place.
    pub(super) fn make_wait_cq(
        &mut self,
        kind: QueueKind,
        timeout: Option<Duration>,
    ) -> Result<PreparedOperation> {
        self.program.clear();
        self.shared.check_alive()?;
        self.roll_back_cancelled(kind)?;
        let queue = self.shared.queue(kind);
        let index = queue.taken.load(Ordering::Relaxed);
        let expected = queue.expected.load(Ordering::Relaxed);
        // There may be fewer than were taken: one was taken, and then the send that it was expected of was taken back.
        if expected.wrapping_sub(index) as i32 <= 0 {
            let (what, posted) = match kind {
                QueueKind::Send => ("signaled send", "sends"),
                QueueKind::Recv => ("receive", "receives"),
            };
            let reason = if expected == 0 {
                format!("nothing to wait for: no {what} is posted; post one first")
            } else {
                format!(
                    "nothing to wait for: all {posted} so far have their wait; post another {what} first"
                )
            };
            return Err(Error::state(StateKind::NothingPosted, "wait_cq", reason));
        }
        if self.shared.doorbells().is_some() {
            let seen = self.shared.seen_words[kind as usize];
            queue.cq.peek_count(index, seen, &mut self.program)?;
        } else {
            queue.cq.peek(index, &mut self.program)?;
        }
        let serial = queue.enter_wait(index, timeout_ns(timeout));
        // Release: the reaper that sees the count sees the mark, and does not give the completion back before it is cleared.
        queue.taken.store(index.wrapping_add(1), Ordering::Release);
        Ok(self.operation(kind, OperationKind::Wait, index, serial))
    }

    /// Takes a prepared operation back. The newest of its queue leaves no trace; another one is cancelled as by dropping it.
    pub fn rollback(&mut self, mut prepared: Prepared) {
        if !Arc::ptr_eq(&prepared.shared, &self.shared)
            || prepared.operation.epoch != self.shared.epoch.load(Ordering::Relaxed)
        {
            // It belongs to another endpoint or an earlier generation: dropping it does what can be done.
            return;
        }
        let shared = Arc::clone(&self.shared);
        let PreparedOperation {
            queue_kind,
            kind,
            count,
            ..
        } = prepared.operation;
        let queue = shared.queue(queue_kind);
        let newest = match kind {
            OperationKind::Send { .. } | OperationKind::Recv => {
                queue.outstanding.posted().wrapping_sub(1) == count
            }
            OperationKind::Wait => queue.taken.load(Ordering::Relaxed) == count.wrapping_add(1),
        };
        if !newest {
            // Dropping it cancels it.
            return;
        }
        let has_ticket = prepared.has_ticket();
        let is_cancelled = prepared.mark_cancelled();
        match kind {
            OperationKind::Send { .. } | OperationKind::Recv if is_cancelled => {
                self.roll_back_newest(queue_kind);
            }
            // On an endpoint that has failed the operation has failed, and its ticket keeps reporting that. Without a ticket, a completion that
            // came before the failure goes to the next wait or poll.
            OperationKind::Wait if is_cancelled || !has_ticket => {
                prepared.live = false;
                queue.return_completion(count);
            }
            _ => {}
        }
    }

    /// The send queue, for kernels to own. It comes back by a reset, once they are done with it.
    ///
    /// # Errors
    /// [`Error::Work`] if the endpoint has failed; [`Error::State`] if it is not connected, if the queue has work in flight, or if no thread
    /// could ring for a kernel.
    pub(crate) fn take_send_queue(&mut self, with_flags: bool) -> Result<OwnedSendQueue> {
        self.shared.check_alive()?;
        self.check_state("hand the send queue to kernels", State::ReadyToSend)?;
        self.check_reliable("hand the send queue to kernels")?;
        if self.shared.path.control == Control::Sync {
            return Err(Error::state(
                StateKind::Unsupported,
                "hand the send queue to kernels",
                "on the path `sync` it is the calling thread that rings",
            ));
        }
        if self.shared.message_bytes < KERNEL_MESSAGE_BYTES {
            let reason = format!(
                "kernels may ask for messages of {KERNEL_MESSAGE_BYTES} bytes, and those of the port have at most {}",
                self.shared.message_bytes
            );
            return Err(Error::state(
                StateKind::Unsupported,
                "hand the send queue to kernels",
                reason,
            ));
        }
        self.roll_back_cancelled(QueueKind::Send)?;
        self.reap()?;
        let first = self.send.producer_index();
        OwnedSendQueue::new(&self.shared, first, self.config.send_depth, with_flags)
    }

    /// The receive queue, for kernels to own, as [`Endpoint::take_send_queue`].
    ///
    /// # Errors
    /// As [`Endpoint::take_send_queue`].
    #[cfg(feature = "cuda")]
    pub(in crate::endpoint) fn take_recv_queue(&mut self) -> Result<OwnedRecvQueue> {
        self.roll_back_cancelled(QueueKind::Recv)?;
        let first = self.recv.producer_index();
        OwnedRecvQueue::new(&self.shared, first, self.config.recv_depth)
    }

    /// Checks all of a work request but its memory. Returns whether it writes to memory here.
    #[inline]
    fn check_request(&self, work: &Work<'_>) -> Result<bool> {
        self.shared.check_alive()?;
        self.check_state("prepare_send", State::ReadyToSend)?;
        let writes_here = work.opcode.is_fetch();
        if writes_here {
            self.check_fetch(work)?;
        }
        if work.imm_unused || work.solicited {
            check_flags(work)?;
        }
        if work.receiver.is_some() || self.is_datagram() {
            self.check_datagram(work)?;
        }
        Ok(writes_here)
    }

    /// The data segments of a work request that a kernel will post, which is checked as by [`Endpoint::prepare_send`]; none of inline bytes.
    ///
    /// # Errors
    /// Those of [`Endpoint::prepare_send`] but for a full queue.
    #[cfg(feature = "cuda")]
    pub(in crate::endpoint) fn check_send(&self, work: &Work<'_>) -> Result<Vec<DataSegment>> {
        let writes_here = self.check_request(work)?;
        match work.data {
            Data::Slices(slices) => {
                check_remote(work, check_message(slices, self.shared.message_bytes)?)?;
                self.segments(slices, writes_here).map(Segments::into_vec)
            }
            Data::Inline(bytes) => {
                self.check_inline(bytes)?;
                check_remote(work, bytes.len() as u64)?;
                Ok(Vec::new())
            }
        }
    }

    /// The data segments of memory that a kernel will write to the peer.
    ///
    /// # Errors
    /// As [`Endpoint::check_send`].
    #[cfg(feature = "cuda")]
    pub(in crate::endpoint) fn check_slices(
        &self,
        slices: &[Slice<'_>],
    ) -> Result<Vec<DataSegment>> {
        self.shared.check_alive()?;
        self.check_state("push pages", State::ReadyToSend)?;
        self.segments(slices, false).map(Segments::into_vec)
    }

    /// The same of a receive.
    ///
    /// # Errors
    /// As [`Endpoint::check_send`].
    #[cfg(feature = "cuda")]
    pub(in crate::endpoint) fn check_recv(&self, slices: &[Slice<'_>]) -> Result<Vec<DataSegment>> {
        self.shared.check_alive()?;
        self.check_state("prepare_recv", State::Init)?;
        self.segments(slices, true).map(Segments::into_vec)
    }

    /// What becomes of an operation for whom it is to be kept.
    #[inline]
    pub(super) fn prepared(&self, operation: PreparedOperation) -> Prepared {
        Prepared::new(Arc::clone(&self.shared), self.program, operation)
    }

    #[inline]
    fn operation(
        &self,
        queue_kind: QueueKind,
        kind: OperationKind,
        count: u32,
        serial: u32,
    ) -> PreparedOperation {
        PreparedOperation {
            queue_kind,
            kind,
            count,
            serial,
            epoch: self.shared.epoch.load(Ordering::Relaxed),
        }
    }

    fn check_state(&self, operation: &'static str, least: State) -> Result<()> {
        let state = self.shared.qp.state();
        if state == State::Error {
            self.shared.look_for_failure();
            self.shared.check_alive()?;
        }
        let fine = match least {
            State::Init => matches!(
                state,
                State::Init | State::ReadyToReceive | State::ReadyToSend
            ),
            _ => state == State::ReadyToSend,
        };
        if fine {
            return Ok(());
        }
        // The breakdown of an endpoint that has failed meanwhile resets its queue pair.
        self.shared.check_alive()?;
        Err(Error::state(
            StateKind::NotConnected,
            operation,
            if self.is_datagram() {
                "the endpoint is not active; call `activate` first"
            } else {
                "the endpoint is not connected; call `connect` with the address of the peer first"
            },
        ))
    }

    /// Fails for a read or an atomic that the device does not have, and for an atomic whose remote address is not aligned.
    fn check_fetch(&self, work: &Work<'_>) -> Result<()> {
        let opcode = work.opcode;
        if opcode.is_atomic() && !work.remote.addr().is_multiple_of(ATOMIC_BYTES) {
            return Err(Error::Alignment {
                argument: "remote",
                value: work.remote.addr(),
                align: ATOMIC_BYTES,
            });
        }
        let abilities = self.shared.qp.abilities();
        let has = if opcode.is_atomic() {
            abilities.atomics
        } else {
            abilities.reads
        };
        if has {
            return Ok(());
        }
        Err(Error::state(
            StateKind::Unsupported,
            "prepare_send",
            format!("the device has no {}", opcode.name()),
        ))
    }

    #[inline]
    fn check_inline(&self, bytes: &[u8]) -> Result<()> {
        if bytes.len() > self.config.max_inline_bytes as usize {
            return Err(Error::Range {
                argument: "bytes.len() (limit: EndpointConfig::max_inline_bytes)",
                value: bytes.len() as u64,
                min: 0,
                max: self.config.max_inline_bytes.into(),
            });
        }
        Ok(())
    }

    /// Checks the slices and turns them into data segments. `written`: the device writes to them.
    fn segments(&self, slices: &[Slice<'_>], written: bool) -> Result<Segments> {
        if slices.len() > self.config.max_segments as usize {
            let max = u64::from(self.config.max_segments);
            return Err(Error::Range {
                argument: "slices.len() (limit: EndpointConfig::max_segments)",
                value: slices.len() as u64,
                min: 0,
                max,
            });
        }
        let mut segments = Segments {
            list: [DataSegment::default(); SEGMENTS_MAX as usize],
            count: slices.len(),
            held: HeldRegions::default(),
        };
        for (at, slice) in slices.iter().enumerate() {
            let region = slice.region;
            self.shared.domain.check_same(region.domain(), "slices")?;
            if !region.is_registered() {
                return Err(Error::state(
                    StateKind::Deregistered,
                    "post",
                    format!("the region of slice {at} is deregistered"),
                ));
            }
            if written && !region.access().contains(Access::LOCAL_WRITE) {
                return Err(no_write_access(at));
            }
            segments.list[at] = DataSegment {
                len_bytes: slice.len_bytes,
                lkey: region.lkey(),
                addr: region.as_ptr() as u64 + slice.offset,
            };
            segments.held.hold(region);
        }
        Ok(segments)
    }

    /// Takes back the newest work request of a queue, which was not given to a stream. Returns whether it is gone. This fails
    /// only if the commit is not one of this queue; then the work request stays, as a no-operation.
    fn roll_back_newest(&mut self, kind: QueueKind) -> bool {
        let signaled = match kind {
            QueueKind::Send => self
                .send_commits
                .pop_back()
                .and_then(|(_, (commit, signaled))| {
                    self.send.rollback(commit).ok().map(|()| signaled)
                }),
            QueueKind::Recv => self
                .recv_commits
                .pop_back()
                .and_then(|(_, commit)| self.recv.rollback(commit).ok().map(|()| true)),
        };
        let Some(signaled) = signaled else {
            return false;
        };
        let queue = self.shared.queue(kind);
        queue.expect(-i32::from(signaled));
        queue.take_back();
        queue.return_unexpected();
        true
    }

    /// Work requests that were prepared and dropped, and have nothing behind them, never were: they take no room, and no completion
    /// of theirs is to be waited for.
    #[inline]
    pub(super) fn roll_back_cancelled(&mut self, kind: QueueKind) -> Result<()> {
        loop {
            let queue = self.shared.queue(kind);
            let newest = queue.outstanding.posted().wrapping_sub(1);
            let dropped = queue.outstanding.in_flight() > 0
                && queue.is_cancelled(newest)
                && queue.queued.load(Ordering::Acquire) != queue.outstanding.posted();
            if !dropped {
                return Ok(());
            }
            if !self.roll_back_newest(kind) {
                return Err(Error::state(
                    StateKind::OutOfOrder,
                    "prepare",
                    "a dropped operation cannot be taken back",
                ));
            }
        }
    }
}

/// Adds the store of the running count. On the proxy path it is the trigger: what the stream did before it, and the count of what was
/// handed over, come first. Elsewhere the doorbell comes first: with `is_flushed` the program may end with a flush of its own, and has no room for
/// two behind a long BlueFlame copy.
#[inline]
fn announce(
    shared: &EndpointShared,
    program: &mut Program,
    kind: QueueKind,
    count: u32,
    is_flushed: bool,
) -> Result<()> {
    if shared.doorbells().is_some() {
        program.fence(Fence::WORK_BEFORE_FLAG)?;
    } else if !(is_flushed && program.ends_with(Fence::BLUEFLAME_FLUSH)) {
        program.fence(Fence::DOORBELL_BEFORE_FLAG)?;
    }
    program.store_dword(shared.progress_words[kind as usize], count.wrapping_add(1))
}

/// What an atomic operates on, and the alignment of its remote address.
const ATOMIC_BYTES: u64 = 8;

/// `DOORBELL_MESSAGE_BYTES_MAX` of queue.h.
const KERNEL_MESSAGE_BYTES: u32 = 1 << 30;

/// Fails for immediate data and a solicited completion where the operation has neither: the peer learns of a read, an atomic or a plain write by no completion.
#[cold]
fn check_flags(work: &Work<'_>) -> Result<()> {
    let name = work.opcode.name();
    let reason = if work.imm_unused {
        format!("{name} carries no immediate data; a send or a write does")
    } else if !matches!(
        work.opcode,
        Opcode::Send | Opcode::SendImm | Opcode::RdmaWriteImm
    ) {
        format!(
            "{name} makes no completion at the peer, so none that is solicited; a send or a write with immediate data does"
        )
    } else {
        return Ok(());
    };
    Err(Error::state(StateKind::WrongKind, "prepare_send", reason))
}

#[cold]
fn no_write_access(at: usize) -> Error {
    let reason = format!(
        "the region of slice {at} has no local write access, which receives, reads and atomics need; register it with `Access::LOCAL_WRITE`"
    );
    Error::state(StateKind::NoAccess, "post", reason)
}

/// The length of the slices together. Fails if it is longer than a message can be: the device would find out, and fail the endpoint.
#[inline]
fn check_message(slices: &[Slice<'_>], longest: u32) -> Result<u64> {
    let len_bytes: u64 = slices.iter().map(|slice| u64::from(slice.len_bytes)).sum();
    if len_bytes > u64::from(longest) {
        return Err(Error::Range {
            argument: "bytes of the slices (limit: the longest message of the device's port)",
            value: len_bytes,
            min: 0,
            max: longest.into(),
        });
    }
    Ok(len_bytes)
}

/// Fails for more bytes than the peer's memory has that the request names.
#[inline]
fn check_remote(work: &Work<'_>, len_bytes: u64) -> Result<()> {
    let limit_bytes = work.remote.len_bytes();
    if len_bytes > limit_bytes {
        return Err(Error::OutOfBounds {
            argument: "remote",
            offset: 0,
            len_bytes,
            limit_bytes,
            what: "the remote slice",
        });
    }
    Ok(())
}

/// Remembers how to take a commit back, and forgets those that are with a stream.
fn keep_commit<C>(commits: &mut VecDeque<(u32, C)>, queue: &QueueState, count: u32, commit: C) {
    let queued = queue.queued.load(Ordering::Acquire);
    while commits
        .front()
        .is_some_and(|(count, _)| (queued.wrapping_sub(*count) as i32) > 0)
    {
        commits.pop_front();
    }
    commits.push_back((count, commit));
}
