//! The receive queue: memory for what comes in.
#![allow(unsafe_code)] // Reason: the ring is raw memory that a device reads, and the emitter is C.

use super::limits::{check_power_of_two, check_range, check_ring, out_of_range};
use super::request::SEGMENT_BYTES_MAX;
use super::{DataSegment, shim};
use crate::bytecode::{self, Dword, Program};
use crate::mmio;
use crate::{Error, Result, StateKind};

/// The most pieces in a receive, so that its stride stays a page or less.
const SEGMENTS_MAX: u32 = 256;
/// The record holds 16 bits and must distinguish a full ring from an empty one.
const WQES_MAX: u32 = 1 << 15;
/// mlx5dv.h, `MLX5_INVALID_LKEY`: in a receive it ends the list, so that it cannot be a key.
const INVALID_LKEY: u32 = 0x100;

/// The memory and the limits of a receive queue.
#[derive(Debug, Clone)]
pub struct RecvQueueConfig {
    /// The ring: `wqe_count` WQEs of 16 bytes times `max_segments` rounded up to a power of two, aligned to 16.
    pub ring: *mut u8,
    /// Its length in WQEs, a power of two up to 32768.
    pub wqe_count: u32,
    /// The most pieces of memory in a receive, 1 to 256.
    pub max_segments: u32,
    /// The receive half of the doorbell record.
    pub record: Dword,
}

/// Where a receive lies in the ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecvPosted {
    /// The running WQE count at its start. A CQE's `wqe_counter` is the low 16 bits.
    pub index: u32,
}

/// A commit that may still be rolled back.
#[derive(Debug, PartialEq, Eq)]
pub struct RecvCommit {
    ring: usize,
    serial: u64,
    previous: u64,
    from: u32,
    upto: u32,
}

/// The receive queue of a queue pair, over ring memory. Counts are running WQE counts, 32 bits, wrapping.
#[derive(Debug)]
pub struct RecvQueue {
    ring: *mut u8,
    wqe_mask: u32,
    stride_shift: u32,
    max_segments: u32,
    producer: u32,
    committed: u32,
    consumer: u32,
    record: Dword,
    newest_serial: u64,
    next_serial: u64,
}

// SAFETY: the queue owns its ring (contract of `new`); only the thread that has the queue uses the pointer, one thread at a time.
unsafe impl Send for RecvQueue {}

impl RecvQueue {
    /// A queue over that memory, empty.
    ///
    /// # Safety
    /// `ring` is valid for reads and writes of `wqe_count` strides (see [`RecvQueue::stride_bytes`]) for as long as the queue lives, and
    /// no other code writes to it.
    ///
    /// # Errors
    /// [`Error::Range`] for a count out of its bounds, [`Error::Alignment`] for the ring or a count that is no power of two.
    pub unsafe fn new(config: RecvQueueConfig) -> Result<Self> {
        let RecvQueueConfig {
            ring,
            wqe_count,
            max_segments,
            record,
        } = config;
        check_power_of_two("wqe_count", wqe_count, WQES_MAX)?;
        check_range("max_segments", max_segments, 1, SEGMENTS_MAX)?;
        check_ring(ring, 16)?;
        Ok(Self {
            ring,
            wqe_mask: wqe_count - 1,
            stride_shift: Self::stride_bytes(max_segments).trailing_zeros(),
            max_segments,
            producer: 0,
            committed: 0,
            consumer: 0,
            record,
            newest_serial: 0,
            next_serial: 1,
        })
    }

    /// Bytes of one WQE with up to `max_segments` pieces: 16 times their number rounded up to a power of two.
    pub const fn stride_bytes(max_segments: u32) -> u32 {
        16 * max_segments.next_power_of_two()
    }

    /// Writes a receive into the ring. The NIC does not know of it before a [`RecvQueue::commit`] was executed.
    ///
    /// # Errors
    /// [`Error::QueueFull`]; [`Error::Range`] for too many pieces or a piece too long; [`Error::State`] for the key 0x100, which ends
    /// a list. Nothing changes then.
    #[inline]
    pub fn post(&mut self, segments: &[DataSegment]) -> Result<RecvPosted> {
        if segments.len() > self.max_segments as usize {
            return Err(out_of_range(
                "slices (limit: max_segments)",
                segments.len() as u64,
                0,
                self.max_segments,
            ));
        }
        for segment in segments {
            if segment.len_bytes > SEGMENT_BYTES_MAX {
                return Err(out_of_range(
                    "len_bytes",
                    u64::from(segment.len_bytes),
                    0,
                    SEGMENT_BYTES_MAX,
                ));
            }
            if segment.lkey == INVALID_LKEY {
                return Err(Error::state(
                    StateKind::Unsupported,
                    "post",
                    "lkey 0x100 ends a receive list",
                ));
            }
        }
        if self.free_wqes() == 0 {
            return Err(Error::QueueFull {
                queue: "receive",
                depth: self.capacity_wqes(),
            });
        }
        let index = self.producer;
        // SAFETY: the ring is valid and ours (contract of `new`), the list is live and not longer than the stride, and the WQE is free, so
        // that nothing the NIC may still read is overwritten.
        unsafe {
            shim::doorbell_shim_recv_wqe_emit(
                self.ring,
                self.wqe_mask,
                self.stride_shift,
                index,
                segments.as_ptr(),
                segments.len() as u32,
            );
        }
        self.producer = index.wrapping_add(1);
        Ok(RecvPosted { index })
    }

    /// Adds the op that announces to the NIC all receives posted since the last commit: the doorbell record. No UAR takes part.
    ///
    /// # Errors
    /// [`Error::State`] if there is nothing to commit, [`Error::ProgramFull`], [`Error::Foreign`] if the program is of another table.
    /// Queue and program stay as they were then.
    #[inline]
    pub fn commit(&mut self, program: &mut Program) -> Result<RecvCommit> {
        if self.producer == self.committed {
            return Err(nothing_to_commit());
        }
        let record = bytecode::pack::store_dword(self.record, self.record_value());
        if !program.try_extend(self.record.targets_id(), [record]) {
            return Err(program.refusal(self.record.targets_id(), 1));
        }
        Ok(self.committed())
    }

    /// As [`RecvQueue::commit`], without ops. Returns what is to be stored in the receive word of the doorbell record, for a caller that
    /// stores it itself.
    ///
    /// # Errors
    /// [`Error::State`] if there is nothing to commit.
    pub fn commit_stores(&mut self) -> Result<(RecvCommit, u32)> {
        if self.producer == self.committed {
            return Err(nothing_to_commit());
        }
        let record = self.record_value();
        Ok((self.committed(), record))
    }

    /// What the record is to hold: the low 16 bits of the producer count, big-endian.
    fn record_value(&self) -> u32 {
        (self.producer & 0xffff).to_be()
    }

    fn committed(&mut self) -> RecvCommit {
        // Between this CPU's stores to the ring and the executor's store to the doorbell record, by which the NIC learns of them.
        mmio::to_device();
        let commit = RecvCommit {
            ring: self.ring.addr(),
            serial: self.next_serial,
            previous: self.newest_serial,
            from: self.committed,
            upto: self.producer,
        };
        self.newest_serial = self.next_serial;
        self.next_serial += 1;
        self.committed = self.producer;
        commit
    }

    /// Takes the newest commit back, with its receives: its program must never be executed. The one before it is then the newest.
    ///
    /// # Errors
    /// [`Error::State`] if it is not the newest, if receives were posted since (see [`RecvQueue::discard`]), if some of its receives were
    /// released already, or if it is of another queue. Nothing changes then.
    pub fn rollback(&mut self, commit: RecvCommit) -> Result<()> {
        let reason = if commit.ring != self.ring.addr() {
            "it is a commit of another queue"
        } else if commit.serial != self.newest_serial {
            "it is not the newest commit"
        } else if self.producer != self.committed {
            "receives were posted after it"
        } else if self.consumer.wrapping_sub(commit.from).wrapping_sub(1)
            < commit.upto.wrapping_sub(commit.from)
        {
            "some of its receives are released"
        } else {
            self.producer = commit.from;
            self.committed = commit.from;
            self.newest_serial = commit.previous;
            return Ok(());
        };
        Err(Error::state(StateKind::OutOfOrder, "rollback", reason))
    }

    /// Drops the receives that were posted and not committed.
    pub fn discard(&mut self) {
        self.producer = self.committed;
    }

    /// Takes back all WQEs up to the running count `upto`: the NIC is done with them.
    ///
    /// # Errors
    /// [`Error::State`] if `upto` lies before what was released already, or behind what was posted.
    #[inline]
    pub fn release(&mut self, upto: u32) -> Result<()> {
        if upto.wrapping_sub(self.consumer) > self.producer.wrapping_sub(self.consumer) {
            return Err(Error::state(
                StateKind::OutOfOrder,
                "release",
                format!(
                    "count {upto} is not within {}..={}",
                    self.consumer, self.producer
                ),
            ));
        }
        self.consumer = upto;
        Ok(())
    }

    /// The running WQE count behind the last receive posted.
    #[inline]
    pub fn producer_index(&self) -> u32 {
        self.producer
    }

    /// The running WQE count behind the last receive committed.
    #[inline]
    pub fn committed_index(&self) -> u32 {
        self.committed
    }

    /// The running WQE count behind the last receive released.
    #[inline]
    pub fn consumer_index(&self) -> u32 {
        self.consumer
    }

    /// WQEs in no use.
    #[inline]
    pub fn free_wqes(&self) -> u32 {
        self.capacity_wqes() - self.producer.wrapping_sub(self.consumer)
    }

    /// WQEs in the ring.
    #[inline]
    pub fn capacity_wqes(&self) -> u32 {
        self.wqe_mask + 1
    }

    /// Starts over at count 0, as after a reset of the queue pair. Commits of before can no longer be rolled back.
    pub fn reset(&mut self) {
        self.producer = 0;
        self.committed = 0;
        self.consumer = 0;
        self.newest_serial = 0;
    }
}

#[cold]
fn nothing_to_commit() -> Error {
    Error::state(
        StateKind::NothingPosted,
        "commit",
        "no receive was posted since the last commit",
    )
}
