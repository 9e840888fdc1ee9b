//! What a stream does with a rank's own memory between messages.
#![allow(unsafe_code)] // promises the memory behind a region's target to executors

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, OnceLock};

use super::reduction::{DataType, ReduceOp, Reduction};
use super::schedule::{MemoryStep, Operand, OperandSpan};
use crate::bytecode::{Program, TargetId, Targets};
use crate::region::{Region, Slice};
use crate::stream::{
    Attachments, DeferredDrop, KernelMemory, KernelStep, MemoryWork, Outcome, Owner, StreamFailure,
    Submission,
};
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
    /// Those of a list of messages.
    pub(super) listed: Vec<Memory>,
}

impl Memories {
    /// The region and the offset of a span.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`] if the operation has no such memory.
    pub(super) fn place(&self, span: OperandSpan) -> Result<(&Region, u64)> {
        let memory = self.of(span.place);
        let found = memory.filter(|memory| span.offset + span.len <= memory.len);
        let memory = found.ok_or(Error::OutOfBounds {
            argument: "span",
            offset: span.offset,
            len_bytes: span.len,
            limit_bytes: memory.map_or(0, |memory| memory.len),
            what: "a collective operation's memory",
        })?;
        Ok((&memory.region, memory.offset + span.offset))
    }

    /// Fails if the CPU cannot access one of these memories.
    ///
    /// # Errors
    /// [`Error::State`].
    pub(super) fn check_host(&self, places: impl IntoIterator<Item = Operand>) -> Result<()> {
        for place in places {
            self.of(place).map_or(Ok(()), |it| it.region.check_host())?;
        }
        Ok(())
    }

    fn of(&self, place: Operand) -> Option<&Memory> {
        match place {
            Operand::Input => self.input.as_ref(),
            Operand::Output => self.output.as_ref(),
            Operand::Scratch => self.scratch.as_ref(),
            Operand::Listed(at) => self.listed.get(at as usize),
        }
    }

    /// # Errors
    /// As [`Memories::place`] and [`Region::slice`].
    pub(super) fn slice(&self, span: OperandSpan) -> Result<Slice<'_>> {
        let (region, offset) = self.place(span)?;
        region.slice(offset, span.len)
    }

    fn kernel_memory(&self, span: OperandSpan) -> Result<KernelMemory<'_>> {
        let (region, offset) = self.place(span)?;
        Ok(region.kernel_memory(offset))
    }

    fn regions(self) -> impl Iterator<Item = Region> {
        let memories = [self.input, self.output, self.scratch].into_iter();
        memories
            .flatten()
            .chain(self.listed)
            .map(|memory| memory.region)
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
        let (first, second, into) = step.spans();
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

/// What a kernel does for a step: `enum dbl_data_type` and `enum dbl_reduce_op` of `cuda/reduce.h`. None: it only copies.
fn of_kernel(reduction: Reduction, step: &MemoryStep) -> Option<(u32, u32)> {
    let data = match reduction.data {
        DataType::F16 => 0,
        DataType::Bf16 => 1,
        DataType::F32 => 2,
        DataType::F64 => 3,
        DataType::I32 => 4,
        DataType::I64 => 5,
        DataType::U8 => 6,
    };
    let op = match (step, reduction.op) {
        (MemoryStep::Copy { .. }, _) => return None,
        (MemoryStep::Divide { .. }, _) => 3,
        (_, ReduceOp::Sum | ReduceOp::Average) => 0,
        (_, ReduceOp::Min) => 1,
        (_, ReduceOp::Max) => 2,
    };
    Some((data, op))
}

/// The same as work for a stream of a GPU.
///
/// # Errors
/// As [`Memories::place`].
fn work<'a>(
    steps: &[MemoryStep],
    memories: &'a Memories,
    reduction: Option<Reduction>,
    count: u32,
) -> Result<Vec<MemoryWork<'a>>> {
    let mut works = Vec::with_capacity(steps.len());
    for step in steps {
        let (first, second, into) = step.spans();
        if into.len == 0 {
            continue;
        }
        let [first, into_memory] = [first, into].map(|span| memories.kernel_memory(span));
        let (first, into_memory) = (first?, into_memory?);
        let second = second
            .map(|span| memories.kernel_memory(span))
            .transpose()?;
        let of_kernel = reduction.and_then(|reduction| of_kernel(reduction, step));
        works.push(match of_kernel {
            None => MemoryWork::Copy {
                into: into_memory,
                from: first,
                len_bytes: into.len,
            },
            Some((data, op)) => MemoryWork::Reduce {
                into: into_memory,
                first,
                second,
                len_bytes: into.len,
                data,
                op,
                count,
            },
        });
    }
    Ok(works)
}

const PENDING: u8 = 0;
const DONE: u8 = 1;
const DISCARDED: u8 = 2;

/// Local steps that a stream carries out in its turn: the owner of a program without operations.
pub(super) struct LocalWork {
    steps: Vec<MemoryStep>,
    memories: Memories,
    reduction: Option<Reduction>,
    count: u32,
    /// Whose table of targets the program has.
    anchor: Region,
    /// The thread of a host stream does it; otherwise calls of the driver.
    by_thread: bool,
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
        by_thread: bool,
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
            by_thread,
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
        if !self.by_thread {
            return;
        }
        let done = perform(&self.steps, &self.memories, self.reduction, self.count);
        let _ = self.end.result.set(done);
    }

    fn kernel_step(&self, _cookie: u64) -> Result<Option<KernelStep<'_>>> {
        if self.by_thread {
            return Ok(None);
        }
        let works = work(&self.steps, &self.memories, self.reduction, self.count)?;
        Ok(Some(KernelStep::Memory(works)))
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
