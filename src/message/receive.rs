//! What the stream of a receiver does between its operations: takes the message out of its slot, and reports how the receive ended.
#![allow(unsafe_code)] // promises the memory behind a region's target to executors

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use super::header::{HEADER_BYTES, MessageHeader, MessagePlace};
use crate::bytecode::{Program, TargetId, Targets};
use crate::endpoint::LateRead;
use crate::region::{Region, RemoteSlice, Slice};
use crate::stream::{Attachments, DeferredDrop, Outcome, Owner, StreamFailure, Submission};
use crate::{Error, Result, StateKind};

/// Copied at once.
const COPY_BYTES: usize = 1024;

/// The slot of a message.
pub(super) struct MessageSlot {
    pub(super) memory: Region,
    pub(super) offset: u64,
    /// Running number of the message that is expected.
    pub(super) number: u32,
    pub(super) eager_bytes: u32,
}

impl MessageSlot {
    /// The header of the message in it.
    ///
    /// # Errors
    /// [`Error::Malformed`].
    pub(super) fn header(&self) -> Result<MessageHeader> {
        let mut bytes = [0; HEADER_BYTES as usize];
        self.memory.read(self.offset, &mut bytes)?;
        MessageHeader::from_bytes(&bytes, self.number, self.eager_bytes)
    }

    /// Copies the message of that length into memory, which has room for it.
    pub(super) fn copy<'a>(
        &self,
        len_bytes: u64,
        to: impl Iterator<Item = Slice<'a>>,
    ) -> Result<()> {
        let mut buffer = [0; COPY_BYTES];
        let mut from = self.offset + u64::from(HEADER_BYTES);
        let end = from + len_bytes;
        for slice in to {
            let (mut at, slice_end) = (slice.offset, slice.offset + u64::from(slice.len_bytes));
            while at < slice_end && from < end {
                let len = (slice_end - at).min(end - from).min(COPY_BYTES as u64);
                let part = &mut buffer[..len as usize];
                self.memory.read(from, part)?;
                slice.region.write(at, part)?;
                (at, from) = (at + len, from + len);
            }
        }
        Ok(())
    }
}

/// A receive on a stream: the owner of two programs without any operations. The stream executes the first when the message has arrived, and the second at
/// the end.
pub(super) struct Receive {
    slot: MessageSlot,
    target: Vec<(Region, u64, u32)>,
    /// The operation that reads a long message, if there may be one.
    read: Mutex<Option<LateRead>>,
    outcome: Arc<ReceiveOutcome>,
    /// The peer may write credits as long as the endpoint goes on.
    credits: Region,
}

/// The cookies of the two programs.
const TAKE: u64 = 0;
const END: u64 = 1;

impl Receive {
    pub(super) fn new(
        slot: MessageSlot,
        target: &[Slice<'_>],
        read: Option<LateRead>,
        credits: &Region,
    ) -> Arc<Receive> {
        let target = target
            .iter()
            .map(|slice| (slice.region.clone(), slice.offset, slice.len_bytes))
            .collect();
        Arc::new(Receive {
            slot,
            target,
            read: Mutex::new(read),
            outcome: Arc::default(),
            credits: credits.clone(),
        })
    }

    pub(super) fn outcome(&self) -> Arc<ReceiveOutcome> {
        Arc::clone(&self.outcome)
    }

    /// The program that takes the message out of its slot.
    pub(super) fn take_step(self: &Arc<Self>) -> Submission {
        self.step(TAKE)
    }

    /// The program that ends the receive.
    pub(super) fn end_step(self: &Arc<Self>) -> Submission {
        self.step(END)
    }

    fn step(self: &Arc<Self>, cookie: u64) -> Submission {
        Submission {
            program: Program::new(self.slot.memory.targets()),
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

    fn read(&self) -> Option<LateRead> {
        let mut read = self.read.lock().unwrap_or_else(PoisonError::into_inner);
        read.take()
    }

    /// Copies an eager message; has the read of a long one read it.
    fn take(&self) -> Result<u64> {
        let MessageHeader {
            len_bytes, place, ..
        } = self.slot.header()?;
        check_fits(len_bytes, self.slices())?;
        match (place, self.read()) {
            (MessagePlace::Slot, _) => self.slot.copy(len_bytes, self.slices())?,
            (MessagePlace::Sender { addr, rkey }, Some(read)) => {
                read.set(RemoteSlice::new(addr, rkey, len_bytes))?;
            }
            // Longer than a slot, and so than the memory.
            (MessagePlace::Sender { .. }, None) => return Err(truncated(len_bytes, self.slices())),
        }
        Ok(len_bytes)
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

// SAFETY: the one target of the region's table is the region's memory, which lives as long as the slot has it. The programs access none of it.
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
        if cookie == TAKE {
            self.outcome.take(self.take());
        }
    }

    fn failure_of(&self, cookie: u64, outcome: Outcome) -> Option<StreamFailure> {
        // At the end, so that the sender has its credit, and the slot its receive.
        let is_end = cookie == END && outcome == Outcome::Done;
        let result = self.outcome.taken.get().filter(|_| is_end)?;
        let error = result.as_ref().err()?;
        Some(format!("a receive failed: {error}").into())
    }

    fn finished(&self, cookie: u64, outcome: Outcome) {
        match (cookie, outcome) {
            (END, Outcome::Done) => self.outcome.end(DONE),
            (_, Outcome::Done) => {}
            _ => self.outcome.end(DISCARDED),
        }
    }

    fn drop_nonblocking(self) -> Option<DeferredDrop> {
        let read = self
            .read
            .into_inner()
            .unwrap_or_else(PoisonError::into_inner);
        let mut rest: Vec<DeferredDrop> = Vec::new();
        rest.extend(read.and_then(LateRead::into_deferred_drop));
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
