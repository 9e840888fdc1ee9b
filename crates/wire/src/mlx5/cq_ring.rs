//! The completion queue's ring: waits for it as bytecode, and the CPU's look into it.
#![allow(unsafe_code)] // Reason: the ring is raw memory that a device writes and streams poll.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::limits::{check_power_of_two, check_ring};
use super::{CQE_BYTES, Cqe, CqeOpcode, Syndrome};
use crate::bytecode::{self, Dword, Kind, Program, Target};
use crate::mmio;
use crate::{Error, Result, StateKind};

/// The owner bit in a CQE's last dword, as loaded: `op_own` is its top byte.
const OWNER: u32 = 1 << 24;
/// The last dword's offset: wqe_counter, signature, op_own (mlx5dv.h, `struct mlx5_cqe64`).
const LAST_DWORD: u64 = 60;
/// `op_own` of fresh memory: no CQE, owned by the NIC.
const FRESH: u8 = 0xf1;
/// The vendor syndrome of a CQE that no NIC wrote.
pub const RELEASED_VENDOR_SYNDROME: u8 = 0xdb;

/// Whether [`CqRing::release_waiter`] wrote the CQE. A device may have the same vendor syndrome, but names the queue pair.
pub fn is_synthetic(cqe: &Cqe) -> bool {
    cqe.opcode.is_error() && cqe.qpn == 0 && cqe.vendor_syndrome == RELEASED_VENDOR_SYNDROME
}
/// The consumer index in the record has 24 bits; the largest ring leaves room to distinguish full from empty.
const CQES_MAX: u32 = 1 << 22;

/// The memory of a completion queue.
#[derive(Debug, Clone)]
pub struct CqRingConfig {
    /// The ring: `cqe_count` CQEs of 64 bytes, aligned to 64.
    pub ring: *mut u8,
    /// Its length in CQEs, a power of two up to 2^22.
    pub cqe_count: u32,
    /// The first word of the queue's doorbell record: the consumer index.
    pub record: *mut u32,
    /// Busy marks, one a CQE.
    pub marks: *mut u32,
    /// The ring as a target.
    pub completions: Target,
    /// The marks as a target.
    pub marks_target: Target,
}

/// A completion queue over ring memory.
///
/// CQEs have running indices of 32 bits, which wrap; the owner bit shows whether a CQE is the device's or the reader's. There is no
/// cursor here: the caller decides which thread reads a CQE next. A mark at a CQE says that a stream still waits for it, so the CPU must
/// leave the CQE alone.
#[derive(Debug)]
pub struct CqRing {
    ring: *mut u8,
    record: *mut u32,
    marks: *mut u32,
    cqe_count: u32,
    completions: Target,
    marks_target: Target,
}

// SAFETY: the memory is shared with a device and with streams anyway; every access to it is atomic.
unsafe impl Send for CqRing {}
// SAFETY: as above.
unsafe impl Sync for CqRing {}

impl CqRing {
    /// A completion queue over that memory, which is left as it is: see [`CqRing::reset`].
    ///
    /// # Safety
    /// `ring`, `record` and `marks` are valid for reads and writes of `cqe_count * 64`, 4 and `cqe_count * 4` bytes for as long as the
    /// queue lives, and all other code that touches them does so atomically, or as a device does.
    ///
    /// # Errors
    /// [`Error::Range`] or [`Error::Alignment`] for the count; [`Error::Alignment`] for a pointer; [`Error::OutOfBounds`] if a target is
    /// smaller than its memory; [`Error::Foreign`] if the targets are of different tables.
    pub unsafe fn new(config: CqRingConfig) -> Result<Self> {
        let CqRingConfig {
            ring,
            cqe_count,
            record,
            marks,
            completions,
            marks_target,
        } = config;
        check_power_of_two("cqe_count", cqe_count, CQES_MAX)?;
        check_ring(ring, CQE_BYTES)?;
        for (argument, pointer) in [("record", record), ("marks", marks)] {
            if pointer.is_null() || !pointer.addr().is_multiple_of(4) {
                return Err(Error::Alignment {
                    argument,
                    value: pointer.addr() as u64,
                    align: 4,
                });
            }
        }
        let last = u64::from(cqe_count) - 1;
        completions.dword(last * CQE_BYTES as u64 + LAST_DWORD)?;
        marks_target.dword(last * 4)?;
        if completions.targets_id() != marks_target.targets_id() {
            return Err(Error::Foreign {
                argument: "marks_target",
                found: format!("target table {}", marks_target.targets_id()),
                expected: format!("target table {}", completions.targets_id()),
            });
        }
        Ok(Self {
            ring,
            record,
            marks,
            cqe_count,
            completions,
            marks_target,
        })
    }

    /// Adds the ops that wait for the CQE of that running index and then clear its mark; the mark is set from here, now.
    ///
    /// # Errors
    /// [`Error::State`] if the CQE's place is already waited for, [`Error::ProgramFull`], [`Error::Foreign`] if the program is of
    /// another table. Program and mark stay as they were then.
    #[inline]
    pub fn peek(&self, index: u32, program: &mut Program) -> Result<()> {
        let slot = u64::from(self.slot(index));
        let last_dword = self
            .completions
            .dword(slot * CQE_BYTES as u64 + LAST_DWORD)?;
        // The bit is 0 in fresh CQEs of even laps and 1 in those of odd laps. NOR ignores the bits given, so all but the owner.
        let poll = if self.is_odd_lap(index) {
            bytecode::pack::poll(Kind::PollAnd, last_dword, OWNER)
        } else {
            bytecode::pack::poll(Kind::PollNor, last_dword, !OWNER)
        };
        self.peek_by(poll, index, program)
    }

    /// As [`CqRing::peek`], waiting for a word that counts CQEs to be beyond that running index instead of for the CQE itself. For
    /// executors that cannot look at CQEs, and for programs that are executed again: the word's poll is the same on every lap.
    ///
    /// # Errors
    /// As [`CqRing::peek`].
    #[inline]
    pub fn peek_count(&self, index: u32, count: Dword, program: &mut Program) -> Result<()> {
        let poll = bytecode::pack::poll(Kind::PollGeq, count, index.wrapping_add(1));
        self.peek_by(poll, index, program)
    }

    #[inline]
    fn peek_by(
        &self,
        poll: bytecode::pack::PackedUnit,
        index: u32,
        program: &mut Program,
    ) -> Result<()> {
        let mark = self.marks_target.dword(u64::from(self.slot(index)) * 4)?;
        let before = program.len();
        let units = [poll, bytecode::pack::store_dword(mark, 0)];
        if !program.try_extend(self.completions.targets_id(), units) {
            return Err(program.refusal(self.completions.targets_id(), units.len()));
        }
        // A load and a store: only one thread at a time peeks, and others only clear the mark.
        let mark = self.mark(index);
        if mark.load(Ordering::Relaxed) != 0 {
            program.truncate(before);
            return Err(already_waited_for(index));
        }
        // Relaxed: the mark is published to the stream by the hand-over of the program.
        mark.store(1, Ordering::Relaxed);
        Ok(())
    }

    /// Clears the mark of a wait whose program will never be executed.
    #[inline]
    pub fn abort_peek(&self, index: u32) {
        self.mark(index).store(0, Ordering::Release);
    }

    /// Whether a stream still waits for that CQE. Once false, what the stream did before it cleared the mark is visible here.
    #[inline]
    pub fn is_marked(&self, index: u32) -> bool {
        self.mark(index).load(Ordering::Acquire) != 0
    }

    /// The CQE of that running index, if the NIC has written it.
    #[inline]
    pub fn cqe(&self, index: u32) -> Option<Cqe> {
        let words = self.words(index);
        // Acquire: after the NIC's store of the CQE's last 8 bytes, which it makes last.
        let last = words[7].load(Ordering::Acquire);
        mmio::from_device();
        let op_own = last.to_ne_bytes()[7];
        let owner_is_ours = (op_own & 1 != 0) == self.is_odd_lap(index);
        if !owner_is_ours || CqeOpcode::from_raw(op_own >> 4) == CqeOpcode::Invalid {
            return None;
        }
        let mut bytes = [0; CQE_BYTES];
        let (chunks, _) = bytes.as_chunks_mut::<8>();
        for (chunk, word) in chunks.iter_mut().zip(words) {
            *chunk = word.load(Ordering::Relaxed).to_ne_bytes();
        }
        if let Some(chunk) = chunks.last_mut() {
            *chunk = last.to_ne_bytes();
        }
        Some(Cqe::parse(&bytes))
    }

    /// Gives the CQE of that running index, which is read, the opcode of fresh memory. Before [`CqRing::set_consumer_index`] gives its place back: later it
    /// would race with the NIC. So a place without a CQE always has an opcode with the top bit set, as errors have, and a stream that waits until that bit
    /// is 0 waits for a success, on each lap.
    #[inline]
    pub fn retire(&self, index: u32) {
        let [.., last] = self.words(index);
        let mut bytes = last.load(Ordering::Relaxed).to_ne_bytes();
        // The owner bit stays that of its lap.
        bytes[7] |= 0xf0;
        // Release: a thread that finds it gone finds that it was seen.
        last.store(u64::from_ne_bytes(bytes), Ordering::Release);
    }

    /// Reports to the NIC that all CQEs before that running index are read and may be overwritten.
    #[inline]
    pub fn set_consumer_index(&self, index: u32) {
        // SAFETY: valid and aligned (contract of `new`).
        let record = unsafe { AtomicU32::from_ptr(self.record) };
        // After the loads of the CQEs that are given back, and the stores of `retire`.
        mmio::to_device();
        record.store((index & 0xff_ffff).to_be(), Ordering::Release);
    }

    /// The consumer index that the NIC was given: the low 24 bits of the running index, which include the lap.
    pub fn consumer_index(&self) -> u32 {
        // SAFETY: valid and aligned (contract of `new`).
        let record = unsafe { AtomicU32::from_ptr(self.record) };
        u32::from_be(record.load(Ordering::Acquire))
    }

    /// Lets a stream go that waits for the CQE of that index. A GPU stops at an error, whose opcode has its top bit set, and passes one with
    /// [`CqeOpcode::ReleasedErr`]. So the NIC's error gets this opcode, and where the NIC has written nothing, a synthetic error CQE is written
    /// (vendor syndrome 0xdb). Gives whether one was. Legal only once the NIC writes no more to this queue: it would race with it.
    pub fn release_waiter(&self, index: u32, syndrome: Syndrome) -> bool {
        if let Some(cqe) = self.cqe(index) {
            if cqe.opcode.is_error() {
                let [.., last] = self.words(index);
                let mut bytes = last.load(Ordering::Acquire).to_ne_bytes();
                bytes[7] = CqeOpcode::ReleasedErr.raw() << 4 | bytes[7] & 0xf;
                last.store(u64::from_ne_bytes(bytes), Ordering::Release);
            }
            return false;
        }
        let cqe = Cqe {
            opcode: CqeOpcode::ReleasedErr,
            syndrome: syndrome as u8,
            vendor_syndrome: RELEASED_VENDOR_SYNDROME,
            ..Cqe::default()
        };
        self.write(index, &cqe.encode(self.is_odd_lap(index)));
        true
    }

    /// Makes the memory fresh: no CQE is valid, no mark is set, the consumer index is 0. No stream may be waiting.
    pub fn reset(&self) {
        self.reset_at(0);
    }

    /// As [`CqRing::reset`], for a queue whose next CQE is the one of that running index: a card's goes on where it is when the queue
    /// pair is reset. The card writes nothing meanwhile.
    pub fn reset_at(&self, next: u32) {
        for ahead in 0..self.cqe_count {
            let index = next.wrapping_add(ahead);
            let mut fresh = [0; CQE_BYTES];
            // The owner bit of the lap before: streams look at nothing else.
            fresh[CQE_BYTES - 1] = FRESH & !1 | u8::from(!self.is_odd_lap(index));
            self.write(index, &fresh);
            self.abort_peek(index);
        }
        self.set_consumer_index(next);
    }

    /// The running index behind the last CQE that the NIC has written, found by looking from `index` on, which it has come to already.
    pub fn next_index(&self, index: u32) -> u32 {
        let written = (0..self.cqe_count)
            .take_while(|ahead| {
                self.cqe(index.wrapping_add(*ahead))
                    .is_some_and(|cqe| !is_synthetic(&cqe))
            })
            .count();
        index.wrapping_add(written as u32)
    }

    /// CQEs in the ring.
    #[inline]
    pub fn cqe_count(&self) -> u32 {
        self.cqe_count
    }

    #[inline]
    fn slot(&self, index: u32) -> u32 {
        index & (self.cqe_count - 1)
    }

    #[inline]
    fn is_odd_lap(&self, index: u32) -> bool {
        index & self.cqe_count != 0
    }

    #[inline]
    fn mark(&self, index: u32) -> &AtomicU32 {
        // SAFETY: the slot is below `cqe_count`; the marks are valid, aligned and accessed atomically (contract of `new`).
        unsafe { AtomicU32::from_ptr(self.marks.add(self.slot(index) as usize)) }
    }

    #[inline]
    fn words(&self, index: u32) -> &[AtomicU64; 8] {
        // SAFETY: the slot is below `cqe_count`; the ring is valid, aligned to 64 and accessed atomically (contract of `new`).
        unsafe { &*self.ring.add(self.slot(index) as usize * CQE_BYTES).cast() }
    }

    /// Writes a CQE as a NIC does: the last 8 bytes, which make it valid, last.
    fn write(&self, index: u32, bytes: &[u8; CQE_BYTES]) {
        let (chunks, _) = bytes.as_chunks::<8>();
        for (at, (word, chunk)) in self.words(index).iter().zip(chunks).enumerate() {
            let order = if at == 7 {
                Ordering::Release
            } else {
                Ordering::Relaxed
            };
            word.store(u64::from_ne_bytes(*chunk), order);
        }
    }
}

#[cold]
fn already_waited_for(index: u32) -> Error {
    Error::state(
        StateKind::OutOfOrder,
        "peek",
        format!("the place of CQE {index} is already waited for"),
    )
}
