//! The send queue: work requests into the ring, and the programs that ring the doorbell for them.
#![allow(unsafe_code)] // Reason: the ring is raw memory that a device reads, and the emitter is C.

use super::limits::{DS_MAX, RequestLimits, check_power_of_two, check_range, check_ring};
use super::shim::{self, KEPT_WORDS, WorkRequest};
use super::{
    Commit, DatagramSegment, Doorbell, DoorbellStores, Opcode, Payload, Posted, SendRequest,
    WQEBB_BYTES,
};
use crate::bytecode::pack::PackedUnit;
use crate::bytecode::{Block, Dword, Fence, Program};
use crate::mmio;
use crate::{Error, Result, StateKind, bytecode};

/// The record holds 16 bits and must distinguish a full ring from an empty one.
const WQEBBS_MAX: u32 = 1 << 15;

/// The memory and the limits of a send queue.
#[derive(Debug, Clone)]
pub struct SendQueueConfig {
    /// The ring: `wqebb_count` blocks of 64 bytes, aligned to 64.
    pub ring: *mut u8,
    /// Its length in WQEBBs, a power of two up to 32768.
    pub wqebb_count: u32,
    /// The queue pair, 24 bits.
    pub qpn: u32,
    /// The most pieces of memory in a request, up to 61.
    pub max_segments: u32,
    /// The most inline bytes in a request, up to 972.
    pub max_inline_bytes: u32,
    /// The send half of the doorbell record.
    pub record: Dword,
    /// The two doorbell buffers of the UAR, which take turns.
    pub uar: [Block; 2],
}

/// The send queue of a queue pair, over ring memory.
///
/// [`SendQueue::post`] writes requests into the ring, [`SendQueue::commit`] makes the ops that announce them to the NIC, and
/// [`SendQueue::release`] takes back what the NIC is done with. Counts are running WQEBB counts, 32 bits, wrapping.
#[derive(Debug)]
pub struct SendQueue {
    ring: *mut u8,
    wqebb_mask: u32,
    /// Behind the last request posted.
    producer: u32,
    /// Behind the last request committed.
    committed: u32,
    /// Behind the last request released, plus the capacity: how far the producer may go.
    limit: u32,
    qpn: u32,
    limits: RequestLimits,
    /// Live commits, plus what [`SendQueue::reset`] skips. The newest commit has this serial, and its lowest bit says which of the two
    /// UAR buffers is next. Rolling back counts down: the serial may come again, because the commit that had it is gone.
    commits: u64,
    targets: u64,
    /// The ops of a commit but for their values: record, and the two UAR buffers.
    store_record: PackedUnit,
    store_uar: [PackedUnit; 2],
    record: Dword,
    uar: [Block; 2],
    /// The last request posted, as it went into the ring: the ring is never read back. Word 0 is its doorbell.
    kept: [u64; KEPT_WORDS],
}

// SAFETY: the queue owns its ring (contract of `new`); only the thread that has the queue uses the pointer, one thread at a time.
unsafe impl Send for SendQueue {}

/// Segments before the payload of a send on a UD queue pair: control, and three of the address.
const DATAGRAM_HEAD: u32 = 4;

/// Writes the WQE of a request into a ring.
type Emit = unsafe extern "C" fn(*mut u8, u32, u32, *const WorkRequest, *mut u64) -> u32;

impl SendQueue {
    /// A queue over that memory, empty.
    ///
    /// # Safety
    /// `ring` is valid for reads and writes of `wqebb_count * 64` bytes for as long as the queue lives, and no other code writes to it.
    ///
    /// # Errors
    /// [`Error::Range`] for a count, a limit or a queue pair out of its bounds, or a ring too small for the largest request;
    /// [`Error::Alignment`] for the ring; [`Error::Foreign`] if record and UAR are of different tables.
    pub unsafe fn new(config: SendQueueConfig) -> Result<Self> {
        let SendQueueConfig {
            ring,
            wqebb_count,
            qpn,
            max_segments,
            max_inline_bytes,
            record,
            uar,
        } = config;
        check_power_of_two("wqebb_count", wqebb_count, WQEBBS_MAX)?;
        check_ring(ring, WQEBB_BYTES)?;
        check_range("qpn", qpn, 0, 0xff_ffff)?;
        let limits = RequestLimits::new(max_segments, max_inline_bytes)?;
        check_range(
            "wqebb_count",
            wqebb_count,
            limits.wqebbs_max().next_power_of_two(),
            WQEBBS_MAX,
        )?;
        for block in &uar {
            if block.targets_id() != record.targets_id() {
                return Err(Error::Foreign {
                    argument: "uar",
                    found: format!("target table {}", block.targets_id()),
                    expected: format!("target table {}", record.targets_id()),
                });
            }
        }
        Ok(Self {
            ring,
            wqebb_mask: wqebb_count - 1,
            producer: 0,
            committed: 0,
            limit: wqebb_count,
            qpn,
            limits,
            commits: 0,
            targets: record.targets_id(),
            store_record: bytecode::pack::store_dword(record, 0),
            store_uar: uar.map(|block| bytecode::pack::store_qword(block.first(), 0)),
            record,
            uar,
            kept: [0; KEPT_WORDS],
        })
    }

    /// Writes a request into the ring. The NIC does not know of it before a [`SendQueue::commit`] was executed.
    ///
    /// # Errors
    /// [`Error::QueueFull`]; [`Error::Range`] for too many pieces, a piece or inline data too long, an atomic without its one piece of
    /// 8 bytes, a NOP with a payload; [`Error::State`] for inline data with a read or an atomic. Nothing changes then.
    #[inline]
    pub fn post(&mut self, request: &SendRequest<'_>) -> Result<Posted> {
        let (wr, wqebbs, emit) = self.check(request)?;
        if self.free_wqebbs() < wqebbs {
            return Err(self.full());
        }
        let index = self.producer;
        // SAFETY: the ring is valid and ours (contract of `new`); `wr` names a live slice; the request was checked to fit a WQE, hence
        // `kept`, and `wqebbs` free blocks, so that nothing the NIC may still read is overwritten.
        let emitted = unsafe {
            emit(
                self.ring,
                self.wqebb_mask,
                index,
                &wr,
                self.kept.as_mut_ptr(),
            )
        };
        debug_assert_eq!(emitted, wqebbs, "emitter and queue count the same");
        self.producer = index.wrapping_add(wqebbs);
        Ok(Posted { index, wqebbs })
    }

    /// As [`SendQueue::post`], on the queue of a UD queue pair: a send, with immediate data or without, or a NOP, for which
    /// `datagram` means nothing.
    ///
    /// # Errors
    /// As [`SendQueue::post`]; [`Error::State`] for another opcode.
    pub fn post_datagram(
        &mut self,
        request: &SendRequest<'_>,
        datagram: &DatagramSegment,
    ) -> Result<Posted> {
        match request.opcode {
            Opcode::Nop => return self.post(request),
            Opcode::Send | Opcode::SendImm => {}
            other => {
                return Err(Error::state(
                    StateKind::Unsupported,
                    "post",
                    format!("a UD queue pair has no {}", other.name()),
                ));
            }
        }
        let (wr, segments, _) = self.parts(request)?;
        let segments = DATAGRAM_HEAD + segments;
        check_range("segments of a WQE", segments, 0, DS_MAX)?;
        let wqebbs = segments.div_ceil(4);
        if self.free_wqebbs() < wqebbs {
            return Err(self.full());
        }
        let index = self.producer;
        // SAFETY: as in `post`; the segment is as long as the emitter reads.
        let emitted = unsafe {
            shim::doorbell_shim_wqe_emit_datagram(
                self.ring,
                self.wqebb_mask,
                index,
                &wr,
                datagram,
                self.kept.as_mut_ptr(),
            )
        };
        debug_assert_eq!(emitted, wqebbs, "emitter and queue count the same");
        self.producer = index.wrapping_add(wqebbs);
        Ok(Posted { index, wqebbs })
    }

    /// The words of a request as they would be in the ring with the running count 0, and the number of their 16-byte segments: for kernels, which write
    /// requests of one WQEBB themselves. None: it takes more.
    ///
    /// # Errors
    /// As [`SendQueue::post`].
    pub fn image(&self, request: &SendRequest<'_>) -> Result<Option<([u64; 8], u32)>> {
        let (wr, wqebbs, emit) = self.check(request)?;
        if wqebbs != 1 {
            return Ok(None);
        }
        let mut words = [0; 8];
        let mut kept = [0; KEPT_WORDS];
        // SAFETY: a ring of one block, which is as long as the request; `wr` names a live slice; `kept` has room for each request.
        let emitted = unsafe { emit(words.as_mut_ptr().cast(), 0, 0, &wr, kept.as_mut_ptr()) };
        debug_assert_eq!(emitted, 1, "emitter and queue count the same");
        // The second big-endian word of the control segment ends with it.
        let segments = u32::from_be((words[0] >> 32) as u32) & 0x3f;
        Ok(Some((words, segments)))
    }

    /// A request for the emitter, with the blocks that it takes.
    #[inline(always)]
    fn check(&self, request: &SendRequest<'_>) -> Result<(WorkRequest, u32, Emit)> {
        let (wr, segments, emit) = self.parts(request)?;
        let head =
            1 + u32::from(request.opcode.has_remote()) + u32::from(request.opcode.is_atomic());
        Ok((wr, (head + segments).div_ceil(4), emit))
    }

    /// A request for the emitter, with the segments of its payload.
    #[inline(always)]
    fn parts(&self, request: &SendRequest<'_>) -> Result<(WorkRequest, u32, Emit)> {
        let (payload, count, segments, emit): (_, _, _, Emit) = match request.payload {
            Payload::Segments(list) => (
                list.as_ptr().cast(),
                list.len(),
                self.limits.list_segments(request, list)?,
                shim::doorbell_shim_wqe_emit_segments,
            ),
            Payload::Inline(bytes) => (
                bytes.as_ptr(),
                bytes.len(),
                self.limits.inline_segments(request, bytes)?,
                shim::doorbell_shim_wqe_emit_inline,
            ),
        };
        let wr = WorkRequest {
            remote_addr: request.remote_addr,
            swap_or_add: request.swap_or_add,
            compare: request.compare,
            payload,
            count: count as u32,
            rkey: request.rkey,
            imm: request.imm,
            qpn: self.qpn,
            opcode: request.opcode,
            flags: flag(request.signaled, shim::FLAG_SIGNALED)
                | flag(request.solicited, shim::FLAG_SOLICITED)
                | request.fence as u8,
            is_inline: u16::from(matches!(request.payload, Payload::Inline(_))),
        };
        Ok((wr, segments, emit))
    }

    /// Adds the ops that announce to the NIC all requests posted since the last commit: the doorbell record, a fence, the UAR.
    ///
    /// # Errors
    /// [`Error::State`] if there is nothing to commit, [`Error::ProgramFull`], [`Error::Foreign`] if the program is of another table.
    /// Queue and program stay as they were then.
    #[inline]
    pub fn commit(&mut self, program: &mut Program) -> Result<Commit> {
        if self.producer == self.committed {
            return Err(nothing_to_commit());
        }
        let units = [
            self.store_record.with_value(u64::from(self.record_value())),
            bytecode::pack::fence(Fence::RECORD_BEFORE_UAR),
            self.store_uar[self.parity()].with_value(self.kept[0]),
        ];
        if !program.try_extend(self.targets, units) {
            return Err(program.refusal(self.targets, units.len()));
        }
        Ok(self.committed())
    }

    /// As [`SendQueue::commit`], without ops. Returns what is to be stored, for a caller that rings itself.
    ///
    /// # Errors
    /// [`Error::State`] if there is nothing to commit.
    #[inline]
    pub fn commit_stores(&mut self) -> Result<(Commit, DoorbellStores)> {
        if self.producer == self.committed {
            return Err(nothing_to_commit());
        }
        let stores = DoorbellStores {
            record: self.record_value(),
            uar: self.kept[0],
        };
        Ok((self.committed(), stores))
    }

    /// As [`SendQueue::commit`], with the WQE itself copied to the UAR, so that the NIC need not fetch it. Only one single request of at
    /// most 256 bytes can go this way; for any other the ops are those of [`SendQueue::commit`].
    ///
    /// # Errors
    /// As [`SendQueue::commit`].
    pub fn commit_blueflame(&mut self, program: &mut Program) -> Result<Commit> {
        let uar = self.uar[self.parity()];
        let last = self.last();
        let len_bytes = last.wqebbs * WQEBB_BYTES as u32;
        if self.producer == self.committed
            || last.index != self.committed
            || len_bytes > uar.len_bytes()
        {
            return self.commit(program);
        }
        let mut bytes = [0; bytecode::BLOCK_BYTES_MAX as usize];
        for (chunk, word) in bytes.chunks_exact_mut(8).zip(&self.kept) {
            chunk.copy_from_slice(&word.to_ne_bytes());
        }
        let before = program.len();
        let added = program
            .store_dword(self.record, self.record_value())
            .and_then(|()| program.fence(Fence::RECORD_BEFORE_UAR))
            .and_then(|()| program.copy_block(uar.prefix(len_bytes)?, &bytes[..len_bytes as usize]))
            .and_then(|()| program.fence(Fence::BLUEFLAME_FLUSH));
        if let Err(error) = added {
            program.truncate(before);
            return Err(error);
        }
        Ok(self.committed())
    }

    /// What the record is to hold: the low 16 bits of the producer count, big-endian.
    #[inline]
    fn record_value(&self) -> u32 {
        (self.producer & 0xffff).to_be()
    }

    #[inline]
    fn committed(&mut self) -> Commit {
        // Between this CPU's stores to the ring and the executor's store to the doorbell record, by which the NIC (or the software NIC)
        // learns of them: whatever hands the program over, the WQEs go first.
        mmio::to_device();
        self.commits += 1;
        let commit = Commit {
            ring: self.ring.addr(),
            serial: self.commits,
            from: self.committed,
            upto: self.producer,
        };
        self.committed = self.producer;
        commit
    }

    /// Which of the two UAR buffers is next.
    #[inline]
    fn parity(&self) -> usize {
        (self.commits & 1) as usize
    }

    /// Takes the newest commit back, with its requests: its program must never be executed. The one before it is then the newest.
    ///
    /// # Errors
    /// [`Error::State`] if it is not the newest, if requests were posted since (see [`SendQueue::discard`]), if some of its requests were
    /// released already, or if it is of another queue. Nothing changes then.
    pub fn rollback(&mut self, commit: Commit) -> Result<()> {
        let reason = if commit.ring != self.ring.addr() {
            "it is a commit of another queue"
        } else if commit.serial != self.commits {
            "it is not the newest commit"
        } else if self.producer != self.committed {
            "requests were posted after it"
        } else if self
            .consumer_index()
            .wrapping_sub(commit.from)
            .wrapping_sub(1)
            < commit.upto.wrapping_sub(commit.from)
        {
            "some of its requests are released"
        } else {
            self.producer = commit.from;
            self.committed = commit.from;
            self.commits -= 1;
            return Ok(());
        };
        Err(Error::state(StateKind::OutOfOrder, "rollback", reason))
    }

    /// Drops the requests that were posted and not committed.
    pub fn discard(&mut self) {
        self.producer = self.committed;
    }

    /// Makes a NOP of a request that was posted and, if committed, not rung: it keeps its place and, if `signaled`, its CQE. For an
    /// operation that is dropped while later ones are already behind it.
    ///
    /// # Errors
    /// [`Error::State`] if the request is no longer, or not yet, between consumer and producer.
    pub fn overwrite_with_nop(&mut self, posted: Posted, signaled: bool) -> Result<()> {
        let offset = posted.index.wrapping_sub(self.consumer_index());
        let used = self.used_wqebbs();
        if posted.wqebbs == 0 || offset >= used || posted.wqebbs > used - offset {
            return Err(Error::state(
                StateKind::OutOfOrder,
                "overwrite_with_nop",
                format!("WQEBBs {}..+{} are not in use", posted.index, posted.wqebbs),
            ));
        }
        // SAFETY: the ring is valid and ours (contract of `new`), and the blocks are in use by a request.
        let doorbell = unsafe {
            Self::nop_over_raw(
                self.ring,
                self.capacity_wqebbs(),
                self.qpn,
                posted,
                signaled,
            )
        };
        if posted == self.last() {
            // It may still be committed by BlueFlame: the kept copy follows the ring.
            self.kept[0] = doorbell;
            self.kept[1] = u64::from(flag(signaled, shim::FLAG_SIGNALED)) << 24;
        }
        Ok(())
    }

    /// As [`SendQueue::overwrite_with_nop`], for callers that have no queue at hand, such as a drop handler. Returns the NOP's doorbell.
    ///
    /// # Safety
    /// `ring` is a live send ring of `wqebb_count` WQEBBs (a power of two) of queue pair `qpn`; `posted` came from its queue, is in use, was
    /// not rung, and no other thread writes that block at the same time.
    pub unsafe fn nop_over_raw(
        ring: *mut u8,
        wqebb_count: u32,
        qpn: u32,
        posted: Posted,
        signaled: bool,
    ) -> u64 {
        // SAFETY: the caller's contract; the index is masked, so it stays in the ring.
        let doorbell = unsafe {
            shim::doorbell_shim_wqe_overwrite_with_nop(
                ring,
                wqebb_count - 1,
                posted.index,
                qpn,
                posted.wqebbs,
                u32::from(signaled),
            )
        };
        // Between this store to the ring and the doorbell of a later request, by which the NIC comes to read the block.
        mmio::to_device();
        doorbell
    }

    /// Makes an RDMA read of a request that was one of a single slice before [`SendQueue::nop_over_raw`] made a NOP of it. It reads `len_bytes` from
    /// `remote_addr` on, into the slice that it was posted with, and makes a CQE.
    ///
    /// # Safety
    /// As [`SendQueue::nop_over_raw`]. `len_bytes` is 1 to the length of that slice.
    pub unsafe fn read_over_nop_raw(
        ring: *mut u8,
        wqebb_count: u32,
        qpn: u32,
        posted: Posted,
        (remote_addr, rkey): (u64, u32),
        len_bytes: u32,
    ) {
        debug_assert_eq!(posted.wqebbs, 1);
        // SAFETY: the caller's contract; the index is masked, so it stays in the ring.
        unsafe {
            shim::doorbell_shim_wqe_read_over_nop(
                ring,
                wqebb_count - 1,
                posted.index,
                qpn,
                remote_addr,
                rkey,
                len_bytes,
            )
        };
        // As in `nop_over_raw`.
        mmio::to_device();
    }

    /// Takes back all WQEBBs up to the running count `upto`: the NIC is done with them.
    ///
    /// # Errors
    /// [`Error::State`] if `upto` lies before what was released already, or behind what was posted.
    #[inline]
    pub fn release(&mut self, upto: u32) -> Result<()> {
        if upto.wrapping_sub(self.consumer_index()) > self.used_wqebbs() {
            return Err(self.bad_release(upto));
        }
        self.limit = upto.wrapping_add(self.capacity_wqebbs());
        Ok(())
    }

    /// The running WQEBB count behind the last request posted.
    #[inline]
    pub fn producer_index(&self) -> u32 {
        self.producer
    }

    /// The running WQEBB count behind the last request committed.
    #[inline]
    pub fn committed_index(&self) -> u32 {
        self.committed
    }

    /// The running WQEBB count behind the last request released.
    #[inline]
    pub fn consumer_index(&self) -> u32 {
        self.limit.wrapping_sub(self.capacity_wqebbs())
    }

    /// WQEBBs in no use.
    #[inline]
    pub fn free_wqebbs(&self) -> u32 {
        self.limit.wrapping_sub(self.producer)
    }

    /// WQEBBs in the ring.
    #[inline]
    pub fn capacity_wqebbs(&self) -> u32 {
        self.wqebb_mask + 1
    }

    /// The last request posted, from its own words in `kept`. Means nothing before the first post.
    fn last(&self) -> Posted {
        let doorbell = Doorbell::parse(self.kept[0]);
        let wqebbs = u32::from(doorbell.ds).div_ceil(4);
        Posted {
            index: self.producer.wrapping_sub(wqebbs),
            wqebbs,
        }
    }

    #[inline]
    fn used_wqebbs(&self) -> u32 {
        self.capacity_wqebbs() - self.free_wqebbs()
    }

    /// Starts over at count 0, as after a reset of the queue pair. Earlier commits can no longer be rolled back. The owner of the
    /// doorbell record's memory has to clear the record.
    pub fn reset(&mut self) {
        self.producer = 0;
        self.committed = 0;
        self.limit = self.capacity_wqebbs();
        // A number that no commit has; even, so that the first UAR buffer is next.
        self.commits = (self.commits | 1) + 1;
    }

    #[cold]
    fn full(&self) -> Error {
        Error::QueueFull {
            queue: "send",
            depth: self.capacity_wqebbs(),
        }
    }

    #[cold]
    fn bad_release(&self, upto: u32) -> Error {
        Error::state(
            StateKind::OutOfOrder,
            "release",
            format!(
                "count {upto} is not within {}..={}",
                self.consumer_index(),
                self.producer
            ),
        )
    }
}

#[inline]
const fn flag(set: bool, bit: u8) -> u8 {
    if set { bit } else { 0 }
}

#[cold]
fn nothing_to_commit() -> Error {
    Error::state(
        StateKind::NothingPosted,
        "commit",
        "no request was posted since the last commit",
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bytecode::{Role, Targets};

    #[repr(align(64))]
    struct Ring([u8; 8 * WQEBB_BYTES]);

    /// 2^32 WQEBBs are too many for a test: it starts shortly before them.
    #[test]
    fn counts_go_past_32_bits() {
        let mut ring = Ring([0; 8 * WQEBB_BYTES]);
        let mut targets = Targets::new();
        let record = targets
            .register("record", Role::DoorbellRecord, 8)
            .dword(4)
            .unwrap();
        let uar = targets
            .register("uar", Role::Uar, 256)
            .block(0, 256)
            .unwrap();
        let config = SendQueueConfig {
            ring: ring.0.as_mut_ptr(),
            wqebb_count: 8,
            qpn: 1,
            max_segments: 0,
            max_inline_bytes: 100,
            record,
            uar: [uar; 2],
        };
        // SAFETY: the ring is that long and outlives the queue.
        let mut queue = unsafe { SendQueue::new(config).unwrap() };
        let start = u32::MAX - 4;
        queue.producer = start;
        queue.committed = start;
        queue.limit = start.wrapping_add(8);
        let mut end = start;
        let mut program = Program::new(&targets);
        for _ in 0..2 {
            // 2 WQEBBs each.
            let posted = queue.post(&SendRequest::send().inline(&[1; 100]).signaled(true));
            let posted = posted.unwrap();
            assert_eq!(
                posted,
                Posted {
                    index: end,
                    wqebbs: 2
                }
            );
            end = posted.end();
            program.clear();
            queue.commit(&mut program).unwrap();
        }
        for _ in 0..2 {
            end = queue
                .post(&SendRequest::send().inline(&[2; 100]))
                .unwrap()
                .end();
        }
        assert_eq!(end, start.wrapping_add(8));
        assert_eq!((queue.free_wqebbs(), queue.consumer_index()), (0, start));
        assert!(matches!(
            queue.post(&SendRequest::nop()),
            Err(Error::QueueFull { .. })
        ));
        program.clear();
        let commit = queue.commit_blueflame(&mut program).unwrap();
        assert_eq!((commit.from(), commit.upto()), (start.wrapping_add(4), 3));
        queue.rollback(commit).unwrap();
        assert_eq!(queue.producer_index(), u32::MAX);
        assert!(queue.release(start.wrapping_sub(1)).is_err());
        assert!(queue.release(0).is_err());
        queue.release(u32::MAX).unwrap();
        assert_eq!(queue.free_wqebbs(), 8);
        assert_eq!(
            queue
                .post(&SendRequest::send().inline(&[3; 100]))
                .unwrap()
                .end(),
            1
        );
        queue.release(1).unwrap();
        assert_eq!((queue.consumer_index(), queue.free_wqebbs()), (1, 8));
    }
}
