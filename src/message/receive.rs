//! What the stream of a receiver does between its operations: takes the message out of its slot, and reports how the receive ended.
#![allow(unsafe_code)] // promises the memory behind a region's target to executors

use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, OnceLock};

use super::header::{HEADER_BYTES, MessageHeader, MessagePlace};
use crate::bytecode::{Program, TargetId, Targets};
use crate::endpoint::LateRead;
use crate::region::{Region, RemoteSlice, Slice};
use crate::stream::{
    Attachments, DeferredDrop, KernelStep, MessageTake, Outcome, Owner, StreamFailure, Submission,
};
use crate::{Error, Result, StateKind};

/// The slot of a message.
pub(super) struct MessageSlot {
    pub(super) memory: Region,
    pub(super) offset: u64,
    /// Running number of the message that is expected.
    pub(super) number: u32,
    pub(super) eager_bytes: u32,
    /// Offset of the result, if a kernel takes the message.
    pub(super) result: u64,
}

/// The words of `struct dbl_taken` of `include/doorbell/detail/take.h`, as offsets in bytes. Its first bytes are the header that the kernel has found.
const TAKEN: u64 = 32;
const SEEN: u64 = 36;
const SKIP: u64 = 40;

impl MessageSlot {
    /// The header of the message in it.
    ///
    /// # Errors
    /// [`Error::Malformed`].
    pub(super) fn header(&self) -> Result<MessageHeader> {
        self.header_at(self.offset)
    }

    fn header_at(&self, offset: u64) -> Result<MessageHeader> {
        let mut bytes = [0; HEADER_BYTES as usize];
        self.memory.read(offset, &mut bytes)?;
        MessageHeader::from_bytes(&bytes, self.number, self.eager_bytes)
    }

    /// The header of the message that a kernel has taken, or has refused.
    fn header_of_result(&self) -> Result<MessageHeader> {
        self.header_at(self.result)
    }

    /// The value of the result's words with which they are of this message.
    fn mark(&self) -> u32 {
        self.number.wrapping_add(1)
    }

    fn has_mark(&self, word: u64) -> bool {
        let found = self.memory.load_u32(self.result + word);
        found.is_ok_and(|found| found == self.mark())
    }

    /// Gives the words of the result to this message: none of them has its mark. What was there may be from long before, or nothing at all.
    fn arm_result(&self) -> Result<()> {
        for word in [TAKEN, SEEN, SKIP] {
            self.memory.store_u32(self.result + word, self.number)?;
        }
        Ok(())
    }

    /// Whether a kernel has refused the message. It stores first whether it has taken it, and then that it has looked.
    fn is_refused(&self) -> bool {
        self.has_mark(SEEN) && !self.has_mark(TAKEN)
    }

    /// Copies the message of that length into memory, which has room for it.
    pub(super) fn copy<'a>(
        &self,
        len_bytes: u64,
        to: impl Iterator<Item = Slice<'a>>,
    ) -> Result<()> {
        let from = self.offset + u64::from(HEADER_BYTES);
        copy_out(&self.memory, from, len_bytes, to)
    }
}

/// Copies bytes of a region into slices, one after the other, which have room for them.
pub(crate) fn copy_out<'a>(
    memory: &Region,
    mut from: u64,
    len_bytes: u64,
    to: impl Iterator<Item = Slice<'a>>,
) -> Result<()> {
    let end = from + len_bytes;
    for slice in to {
        let len = u64::from(slice.len_bytes).min(end - from);
        if len == 0 {
            continue;
        }
        let piece = memory.slice(from, len)?;
        slice.region.copy_from(slice.offset, piece)?;
        from += len;
    }
    Ok(())
}

/// What takes a message out of its slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Taker {
    /// The thread of the stream.
    Thread,
    Kernel,
    /// It is in none: the peer has written it into place.
    Peer,
}

/// A receive on a stream: the owner of two programs. The stream executes the first when the message has arrived, and the second at the end. Neither has
/// operations, but on a stream of a GPU the second is a wait for what the kernel says that the first stands for.
pub(super) struct Receive {
    slot: MessageSlot,
    target: Vec<(Region, u64, u32)>,
    /// The operation that reads a long message, if there may be one.
    read: Option<LateRead>,
    outcome: Arc<ReceiveOutcome>,
    taker: Taker,
    /// The stream may not pass its end, because something before it has failed.
    is_given_up: AtomicBool,
    /// The peer may write credits as long as the endpoint goes on.
    credits: Region,
}

/// The cookies of the two programs.
const TAKE: u64 = 0;
const END: u64 = 1;

impl Receive {
    /// # Errors
    /// None that are known: the result is within the memory.
    pub(super) fn new(
        slot: MessageSlot,
        target: &[Slice<'_>],
        read: Option<LateRead>,
        credits: &Region,
        taker: Taker,
    ) -> Result<Arc<Receive>> {
        if taker == Taker::Kernel {
            slot.arm_result()?;
        }
        let target = target
            .iter()
            .map(|slice| (slice.region.clone(), slice.offset, slice.len_bytes))
            .collect();
        Ok(Arc::new(Receive {
            slot,
            target,
            read,
            outcome: Arc::default(),
            taker,
            is_given_up: AtomicBool::new(false),
            credits: credits.clone(),
        }))
    }

    pub(super) fn outcome(&self) -> Arc<ReceiveOutcome> {
        Arc::clone(&self.outcome)
    }

    pub(super) fn taker(&self) -> Taker {
        self.taker
    }

    /// Whether it is for a message without bytes only.
    pub(super) fn is_empty(&self) -> bool {
        capacity(self.slices()) == 0
    }

    fn by_kernel(&self) -> bool {
        self.taker == Taker::Kernel
    }

    /// The program that takes the message out of its slot.
    pub(super) fn take_step(self: &Arc<Self>) -> Submission {
        self.step(TAKE, Program::new(self.slot.memory.targets()))
    }

    /// The program that ends the receive. A stream that cannot skip what is behind a message that was refused waits in it, until that is stopped.
    ///
    /// # Errors
    /// None that are known: the word is within the memory.
    pub(super) fn end_step(self: &Arc<Self>) -> Result<Submission> {
        let MessageSlot { memory, result, .. } = &self.slot;
        let mut program = Program::new(memory.targets());
        if self.by_kernel() {
            let taken = memory.target().dword(result + TAKEN)?;
            program.poll_geq(taken, self.slot.mark())?;
        }
        Ok(self.step(END, program))
    }

    fn step(self: &Arc<Self>, cookie: u64, program: Program) -> Submission {
        Submission {
            program,
            owner: Arc::clone(self) as Arc<dyn Owner>,
            cookie,
        }
    }

    fn slices(&self) -> impl Iterator<Item = Slice<'_>> + Clone {
        self.target.iter().map(|(region, offset, len_bytes)| Slice {
            region,
            offset: *offset,
            len_bytes: *len_bytes,
        })
    }

    /// Copies an eager message; has the read of a long one read it.
    fn take(&self) -> Result<u64> {
        let MessageHeader {
            len_bytes, place, ..
        } = self.slot.header()?;
        check_fits(len_bytes, self.slices())?;
        match (place, &self.read) {
            (MessagePlace::Slot, _) => self.slot.copy(len_bytes, self.slices())?,
            (MessagePlace::Sender { addr, rkey }, Some(read)) => {
                read.set(RemoteSlice::new(addr, rkey, len_bytes))?;
            }
            // Longer than a slot, and so than the memory.
            (MessagePlace::Sender { .. }, None) => return Err(truncated(len_bytes, self.slices())),
        }
        Ok(len_bytes)
    }

    /// The length of a message that the peer has written into place.
    fn placed(&self) -> Result<u64> {
        // A message of another kind is in the slot. Only then is its header there.
        if self.slot.header().is_ok() {
            return Err(Error::Malformed {
                what: "message",
                reason: "the peer has sent one with a header; this side expects one that is written into place, as both agreed before".into(),
            });
        }
        Ok(capacity(self.slices()))
    }

    /// Notes what a kernel has found, which it has stored.
    fn note_result(&self) {
        let found = self.slot.header_of_result().and_then(|header| {
            check_fits(header.len_bytes, self.slices())?;
            Ok(header.len_bytes)
        });
        self.outcome.take(found);
    }
}

/// Fails if a message is longer than the memory for it.
pub(super) fn check_fits<'a>(
    len_bytes: u64,
    target: impl Iterator<Item = Slice<'a>> + Clone,
) -> Result<()> {
    if len_bytes <= capacity(target.clone()) {
        return Ok(());
    }
    Err(truncated(len_bytes, target))
}

/// The length of slices together.
pub(super) fn capacity<'a>(slices: impl Iterator<Item = Slice<'a>>) -> u64 {
    slices.map(|slice| u64::from(slice.len_bytes)).sum()
}

fn truncated<'a>(len_bytes: u64, target: impl Iterator<Item = Slice<'a>>) -> Error {
    Error::Truncated {
        len_bytes,
        limit_bytes: capacity(target),
    }
}

// SAFETY: the one target of the region's table is the region's memory, which lives as long as the slot has it.
unsafe impl Owner for Receive {
    fn targets(&self) -> &Targets {
        self.slot.memory.targets()
    }

    fn base(&self, target: TargetId) -> Option<NonNull<u8>> {
        let memory = &self.slot.memory;
        (target == memory.target().id()).then(|| memory.start())
    }

    fn attachments(&self) -> Option<&Attachments> {
        Some(self.slot.memory.attachments())
    }

    fn started(&self, cookie: u64) {
        if cookie == TAKE && self.taker == Taker::Thread {
            self.outcome.take(self.take());
        }
    }

    fn kernel_step(&self, cookie: u64) -> Result<Option<KernelStep<'_>>> {
        if cookie != TAKE || !self.by_kernel() {
            return Ok(None);
        }
        let slot = &self.slot;
        let slices = self.target.iter().map(|(region, offset, len_bytes)| {
            let memory = region.kernel_memory(*offset);
            (memory, *len_bytes)
        });
        Ok(Some(KernelStep::Take(MessageTake {
            slot: slot.memory.kernel_memory(slot.offset),
            result: slot.memory.kernel_memory(slot.result),
            read: self.read.as_ref().map(LateRead::place),
            number: slot.number,
            eager_bytes: slot.eager_bytes,
            slices: slices.collect(),
        })))
    }

    fn failure_of(&self, cookie: u64, outcome: Outcome) -> Option<StreamFailure> {
        if cookie != END {
            return None;
        }
        if self.by_kernel() && (outcome == Outcome::Done || self.slot.is_refused()) {
            self.note_result();
        }
        if self.taker == Taker::Peer && outcome == Outcome::Done {
            self.outcome.take(self.placed());
        }
        match (self.outcome.taken.get(), outcome) {
            (Some(Err(error)), _) => Some(format!("a receive failed: {error}").into()),
            (_, Outcome::Released) => Some("a receive was given up".into()),
            _ => None,
        }
    }

    fn finished(&self, cookie: u64, outcome: Outcome) {
        match (cookie, outcome) {
            (END, Outcome::Done) => self.outcome.end(DONE),
            (_, Outcome::Done) => {}
            _ => self.outcome.end(DISCARDED),
        }
    }

    fn give_up(&self, _generation: u32) {
        self.is_given_up.store(true, Ordering::Release);
        // A kernel that has not begun leaves the memory alone.
        let MessageSlot { memory, result, .. } = &self.slot;
        let _ = memory.store_u32(result + SKIP, self.slot.mark());
    }

    fn released(&self, cookie: u64) -> bool {
        cookie == END
            && self.by_kernel()
            && (self.is_given_up.load(Ordering::Acquire) || self.slot.is_refused())
    }

    fn drop_nonblocking(self) -> Option<DeferredDrop> {
        let mut rest: Vec<DeferredDrop> = Vec::new();
        rest.extend(self.read.and_then(LateRead::into_deferred_drop));
        let regions = self.target.into_iter().map(|(region, ..)| region);
        let regions = regions.chain([self.slot.memory, self.credits]);
        rest.extend(regions.filter_map(Region::into_deferred_drop));
        (!rest.is_empty()).then(|| Box::new(rest) as DeferredDrop)
    }
}

const PENDING: u8 = 0;
const DONE: u8 = 1;
const DISCARDED: u8 = 2;

/// How a receive has ended, for its ticket.
#[derive(Debug, Default)]
pub(super) struct ReceiveOutcome {
    /// The length of the message that was taken out of its slot, or why none was.
    taken: OnceLock<Result<u64>>,
    state: AtomicU8,
}

impl ReceiveOutcome {
    fn take(&self, result: Result<u64>) {
        let _ = self.taken.set(result);
    }

    /// Whether the receive is over for its stream.
    pub(super) fn has_ended(&self) -> bool {
        self.state.load(Ordering::Acquire) != PENDING
    }

    /// Only the first end counts.
    fn end(&self, state: u8) {
        let _ = (self.state).compare_exchange(PENDING, state, Ordering::AcqRel, Ordering::Relaxed);
    }

    /// The length of the message, once it is there.
    ///
    /// # Errors
    /// [`Error::Truncated`], [`Error::Malformed`]; [`Error::State`] if the receive was discarded.
    pub(super) fn check(&self) -> Result<Option<u64>> {
        let state = self.state.load(Ordering::Acquire);
        match (state, self.taken.get()) {
            (PENDING, _) => Ok(None),
            (DONE, Some(Ok(len_bytes))) => Ok(Some(*len_bytes)),
            (_, Some(Err(error))) => Err(error.clone()),
            _ => Err(Error::state(
                StateKind::Discarded,
                "receive a message",
                "its stream failed or was aborted before the receive was over",
            )),
        }
    }
}

#[cfg(all(test, feature = "softcx"))]
mod tests {
    use super::*;
    use crate::{Access, Device};

    /// The memory of results is zero at first, and 0 is the mark of the last number.
    #[test]
    fn results_begin_without_a_mark() {
        let domain = Device::open("softcx").unwrap().protection_domain();
        let memory = Region::alloc(&domain, 4096, Access::LOCAL_WRITE).unwrap();
        for number in [0, 1, u32::MAX] {
            let slot = MessageSlot {
                memory: memory.clone(),
                offset: 0,
                number,
                eager_bytes: 64,
                result: 2048,
            };
            memory.fill(2048, 64, 0).unwrap();
            slot.arm_result().unwrap();
            let marks = [TAKEN, SEEN, SKIP].map(|word| slot.has_mark(word));
            assert_eq!(marks, [false; 3], "{number}");
            assert!(!slot.is_refused());
            memory.store_u32(2048 + SEEN, slot.mark()).unwrap();
            assert!(slot.is_refused());
            memory.store_u32(2048 + TAKEN, slot.mark()).unwrap();
            assert!(!slot.is_refused());
        }
    }
}
