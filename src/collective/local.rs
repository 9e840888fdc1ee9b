//! What a host stream does with a rank's own memory between messages.
#![allow(unsafe_code)] // promises the memory behind a region's target to executors

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, OnceLock};

use super::reduction::Reduction;
use super::schedule::{MemoryStep, Operand, OperandSpan};
use crate::bytecode::{Program, TargetId, Targets};
use crate::region::{Region, Slice};
use crate::stream::{Attachments, DeferredDrop, Outcome, Owner, StreamFailure, Submission};
use crate::{Error, Result, StateKind};

/// Worked on at once: two of these stay in the first cache.
const PIECE_BYTES: usize = 4096;

/// A part of a region.
#[derive(Clone)]
pub(super) struct Memory {
    pub(super) region: Region,
    pub(super) offset: u64,
    pub(super) len: u64,
}

impl Memory {
    pub(super) fn of(slice: &Slice<'_>) -> Memory {
        Memory {
            region: slice.region.clone(),
            offset: slice.offset,
            len: slice.len_bytes.into(),
        }
    }
}

/// The memories of an operation.
#[derive(Clone)]
pub(super) struct Memories {
    pub(super) input: Option<Memory>,
    pub(super) output: Option<Memory>,
    pub(super) scratch: Option<Memory>,
}

impl Memories {
    /// The region and the offset of a span.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`] if the operation has no such memory.
    pub(super) fn place(&self, span: OperandSpan) -> Result<(&Region, u64)> {
        let memory = match span.place {
            Operand::Input => &self.input,
            Operand::Output => &self.output,
            Operand::Scratch => &self.scratch,
        };
        let found = memory
            .as_ref()
            .filter(|memory| span.offset + span.len <= memory.len);
        let memory = found.ok_or(Error::OutOfBounds {
            argument: "span",
            offset: span.offset,
            len_bytes: span.len,
            limit_bytes: memory.as_ref().map_or(0, |memory| memory.len),
            what: "a collective operation's memory",
        })?;
        Ok((&memory.region, memory.offset + span.offset))
    }

    /// # Errors
    /// As [`Memories::place`] and [`Region::slice`].
    pub(super) fn slice(&self, span: OperandSpan) -> Result<Slice<'_>> {
        let (region, offset) = self.place(span)?;
        region.slice(offset, span.len)
    }

    fn regions(self) -> impl Iterator<Item = Region> {
        let memories = [self.input, self.output, self.scratch].into_iter();
        memories.flatten().map(|memory| memory.region)
    }
}

/// Carries out local steps, in the calling thread.
///
/// # Errors
/// Those of the memory.
pub(super) fn perform(
    steps: &[MemoryStep],
    memories: &Memories,
    reduction: Option<Reduction>,
    count: u32,
) -> Result<()> {
    let mut pieces = [[0; PIECE_BYTES]; 2];
    let [own, other] = &mut pieces;
    for step in steps {
        let (first, second, into) = match *step {
            MemoryStep::Copy { from, into } => (from, None, into),
            MemoryStep::Divide { span } => (span, None, span),
            MemoryStep::Reduce {
                first,
                second,
                into,
            } => (first, Some(second), into),
        };
        if into.len == 0 {
            // An operation without bytes may have no memory at all.
            continue;
        }
        let [(from, from_at), (to, to_at)] = [memories.place(first)?, memories.place(into)?];
        let second = second.map(|span| memories.place(span)).transpose()?;
        for at in (0..into.len).step_by(PIECE_BYTES) {
            let len = (into.len - at).min(PIECE_BYTES as u64) as usize;
            let (own, other) = (&mut own[..len], &mut other[..len]);
            from.read(from_at + at, own)?;
            if let (Some((region, offset)), Some(reduction)) = (second, reduction) {
                region.read(offset + at, other)?;
                reduction.apply(own, other);
            }
            if let (MemoryStep::Divide { .. }, Some(reduction)) = (step, reduction) {
                reduction.divide(own, count);
            }
            to.write(to_at + at, own)?;
        }
    }
    Ok(())
}

const PENDING: u8 = 0;
const DONE: u8 = 1;
const DISCARDED: u8 = 2;

/// Local steps that a host stream carries out in its turn: the owner of a program without operations.
pub(super) struct LocalWork {
    steps: Vec<MemoryStep>,
    memories: Memories,
    reduction: Option<Reduction>,
    count: u32,
    /// Whose table of targets the program has.
    anchor: Region,
    end: Arc<LocalEnd>,
}

impl LocalWork {
    /// # Errors
    /// [`Error::OutOfBounds`] if there is no memory to work on.
    pub(super) fn new(
        steps: &[MemoryStep],
        memories: &Memories,
        reduction: Option<Reduction>,
        count: u32,
    ) -> Result<LocalWork> {
        let any = memories.clone().regions().next();
        let anchor = any.ok_or(Error::OutOfBounds {
            argument: "span",
            offset: 0,
            len_bytes: 0,
            limit_bytes: 0,
            what: "a collective operation's memory",
        })?;
        Ok(LocalWork {
            steps: steps.to_vec(),
            memories: memories.clone(),
            reduction,
            count,
            anchor,
            end: Arc::default(),
        })
    }

    pub(super) fn end(&self) -> Arc<LocalEnd> {
        Arc::clone(&self.end)
    }

    pub(super) fn submission(self) -> Submission {
        Submission {
            program: Program::new(self.anchor.targets()),
            owner: Arc::new(self),
            cookie: 0,
        }
    }
}

// SAFETY: the one target of the region's table is the region's memory, which lives as long as the work has it.
unsafe impl Owner for LocalWork {
    fn targets(&self) -> &Targets {
        self.anchor.targets()
    }

    fn base(&self, target: TargetId) -> Option<NonNull<u8>> {
        (target == self.anchor.target().id()).then(|| self.anchor.start())
    }

    fn attachments(&self) -> Option<&Attachments> {
        Some(self.anchor.attachments())
    }

    fn started(&self, _cookie: u64) {
        let done = perform(&self.steps, &self.memories, self.reduction, self.count);
        let _ = self.end.result.set(done);
    }

    fn failure_of(&self, _cookie: u64, _outcome: Outcome) -> Option<StreamFailure> {
        let Some(Err(error)) = self.end.result.get() else {
            return None;
        };
        Some(format!("a collective operation failed: {error}").into())
    }

    fn finished(&self, _cookie: u64, outcome: Outcome) {
        let state = match outcome {
            Outcome::Done => DONE,
            _ => DISCARDED,
        };
        self.end.state.store(state, Ordering::Release);
    }

    fn drop_nonblocking(self) -> Option<DeferredDrop> {
        let regions = self.memories.regions().chain([self.anchor]);
        let rest: Vec<DeferredDrop> = regions.filter_map(Region::into_deferred_drop).collect();
        (!rest.is_empty()).then(|| Box::new(rest) as DeferredDrop)
    }
}

/// How local steps have ended, for a ticket.
#[derive(Debug, Default)]
pub(super) struct LocalEnd {
    result: OnceLock<Result<()>>,
    state: AtomicU8,
}

impl LocalEnd {
    /// Whether the steps are done.
    ///
    /// # Errors
    /// Those of the steps; [`Error::State`] if the stream has discarded them.
    pub(super) fn check(&self) -> Result<bool> {
        match (self.state.load(Ordering::Acquire), self.result.get()) {
            (PENDING, _) => Ok(false),
            (_, Some(Err(error))) => Err(error.clone()),
            (DONE, _) => Ok(true),
            _ => Err(Error::state(
                StateKind::Discarded,
                "a collective operation",
                "its stream failed or was aborted before the operation was over",
            )),
        }
    }
}
