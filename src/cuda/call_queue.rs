//! The calls of the driver that are being prepared for a stream, or the triggers for kernels of the application.

use std::ops::Range;
use std::sync::Arc;

use super::decoded::Decoded;
use super::execution::Execution;
use super::kernel_words::{KernelWords, LONG_WORDS, TRIGGER_WORDS};
use super::memops::{CALL_MAX, MemOp, flush_remote_writes};
use super::memory::DeviceBuffer;
use super::memory_work::MemoryCall;
use super::pending::{PendingEntry, PendingWork};
use crate::stream::{Owner, Progress};
use crate::{Error, Result};

/// Operations that are being prepared: memory operations and words for kernels, divided into calls.
#[derive(Default)]
pub(super) struct CallQueue {
    /// The stream's count when it has executed all that is queued.
    pub(super) issued: u64,
    /// The last count that was given out. Those of entries that were refused are not used again, since a thread that has found a failure meanwhile
    /// may remember them.
    pub(super) numbered: u64,
    pub(super) gate: u32,
    /// What executes a program that both memory operations and a kernel can execute.
    pub(super) execution: Execution,
    pub(super) ops: Vec<MemOp>,
    pub(super) batch: KernelWords,
    pub(super) memory: Vec<MemoryCall>,
    /// The calls that `ops`, `batch` and `memory` are divided into. No program is divided.
    pub(super) calls: Vec<DriverCall>,
    /// The end of the last call in `ops`.
    ops_end: usize,
    /// A flush of remote writes follows the kernel, which has waits and cannot flush by itself.
    pub(super) flush_behind: bool,
    /// Kernels of the application read the stream's status word.
    pub(super) is_watched: bool,
    /// The calls are for nodes of a graph: memory operations, whatever the stream prefers, but for what only a kernel can do.
    pub(super) of_graph: bool,
    pub(super) entering: Vec<PendingEntry>,
    /// Kernels that the driver has without a count behind them. The next count says that they are done.
    pub(super) uncounted: Vec<PendingWork>,
    /// The owners whose waits are among them.
    pub(super) waited: Vec<Arc<dyn Owner>>,
    /// The stream whose failure these entries have asked to hear of.
    pub(super) followed: Option<Arc<Progress>>,
    /// How many calls the driver has accepted so far.
    pub(super) taken: u64,
    /// Kernels of the application execute the programs: calls stay here until they are taken as triggers.
    pub(super) for_kernels: bool,
    /// How many triggers the application has taken, and the stream's count when they are executed.
    pub(super) triggers: u64,
    pub(super) triggered: u64,
    /// Memory that triggers need besides the stream's words.
    pub(super) kept: Option<Arc<DeviceBuffer>>,
}

pub(super) struct DriverCall {
    pub(super) what: CallData,
    /// The stream's count when it has executed the call.
    pub(super) issued: u64,
}

/// A state of a queue that [`CallQueue::restore`] returns to.
pub(super) struct Checkpoint {
    issued: u64,
    gate: u32,
    calls: usize,
    words: usize,
    start: usize,
}

/// The operations of a call.
pub(super) enum CallData {
    /// In `ops`.
    MemoryOps(Range<usize>),
    /// In `batch`.
    Kernel(Range<usize>),
    /// In `memory`.
    Memory(usize),
}

impl CallQueue {
    /// A queue for a node of a graph.
    pub(super) fn for_node() -> CallQueue {
        CallQueue {
            of_graph: true,
            ..CallQueue::default()
        }
    }

    /// Whether it is one call of memory operations.
    pub(super) fn is_one_call(&self) -> bool {
        matches!(
            self.calls.as_slice(),
            [DriverCall {
                what: CallData::MemoryOps(_),
                ..
            }]
        )
    }

    /// What executes the current call, if that has operations.
    pub(super) fn current(&self) -> Option<Execution> {
        if self.batch.len() > 0 {
            Some(Execution::Kernel)
        } else {
            (self.ops.len() > self.ops_end).then_some(Execution::MemoryOps)
        }
    }

    /// Whether the current call has room for a program with a count before and after it, and for `more` words in front of it.
    pub(super) fn fits(&self, by: Execution, program: &Decoded<'_>, more: usize) -> bool {
        if self.current().is_some_and(|current| current != by) {
            return false;
        }
        match by {
            Execution::MemoryOps => {
                self.ops.len() - self.ops_end + program.memop_count + 2 <= CALL_MAX
            }
            Execution::Kernel => {
                let words = KernelWords::words_of(program) + 2 * KernelWords::COUNT_WORDS;
                self.has_room(more + words)
            }
        }
    }

    /// Whether the current kernel takes that many more words.
    fn has_room(&self, words: usize) -> bool {
        let limit = if self.for_kernels {
            TRIGGER_WORDS
        } else {
            LONG_WORDS
        };
        self.batch.len() + words <= limit
    }

    /// Ends the current trigger if it has no room for so many words and a count. A call for the driver begins empty with each step, and has room.
    pub(super) fn make_room(&mut self, words: usize) {
        if self.for_kernels && !self.has_room(words + KernelWords::COUNT_WORDS) {
            self.end_call();
        }
    }

    /// Fails if the program, with `more` words in front of it, does not fit into a trigger of its own.
    pub(super) fn check_len(&self, program: &Decoded<'_>, more: usize) -> Result<()> {
        if !self.for_kernels {
            return Ok(());
        }
        let words = (more + KernelWords::words_of(program) + 2 * KernelWords::COUNT_WORDS) as u64;
        if words <= TRIGGER_WORDS as u64 {
            return Ok(());
        }
        Err(Error::Range {
            argument: "the words of a program in a trigger",
            value: words,
            min: 0,
            max: TRIGGER_WORDS as u64,
        })
    }

    /// Ends the current call.
    pub(super) fn end_call(&mut self) {
        let what = match self.current() {
            Some(Execution::MemoryOps) => CallData::MemoryOps(self.ops_end..self.ops.len()),
            Some(Execution::Kernel) => CallData::Kernel(self.batch.end_launch()),
            None => return,
        };
        self.ops_end = self.ops.len();
        let issued = self.issued;
        self.calls.push(DriverCall { what, issued });
        if std::mem::take(&mut self.flush_behind) {
            self.ops.push(flush_remote_writes());
            let what = CallData::MemoryOps(self.ops_end..self.ops.len());
            self.ops_end = self.ops.len();
            self.calls.push(DriverCall { what, issued });
        }
    }

    /// Adds a call that works on memory, behind the current one.
    pub(super) fn memory_call(&mut self, call: MemoryCall) {
        self.end_call();
        let what = CallData::Memory(self.memory.len());
        self.memory.push(call);
        let issued = self.issued;
        self.calls.push(DriverCall { what, issued });
    }

    pub(super) fn checkpoint(&self) -> Checkpoint {
        Checkpoint {
            issued: self.issued,
            gate: self.gate,
            calls: self.calls.len(),
            words: self.batch.len_of_all(),
            start: self.batch.start(),
        }
    }

    /// Ends a step that was queued.
    pub(super) fn end_step(&mut self) {
        if !self.for_kernels {
            self.clear();
        }
    }

    /// Takes the kernels that the driver has from entries which it has refused, and returns the others.
    pub(super) fn keep_uncounted(&mut self, refused: Vec<PendingEntry>) -> Vec<PendingEntry> {
        let has_driver = |entry: &PendingEntry| matches!(&entry.what, PendingWork::Kernel(kernel) if kernel.is_uncounted);
        let (kernels, others) = refused.into_iter().partition::<Vec<_>, _>(has_driver);
        self.uncounted
            .extend(kernels.into_iter().map(|entry| entry.what));
        others
    }

    /// Undoes a step that was not queued. Returns the last gate before it; the caller removes those after that.
    pub(super) fn restore(&mut self, to: &Checkpoint) -> u32 {
        if self.for_kernels {
            self.batch.go_back(to.words, to.start);
            self.calls.truncate(to.calls);
        } else {
            self.clear();
        }
        self.issued = to.issued;
        to.gate
    }

    pub(super) fn clear(&mut self) {
        self.ops.clear();
        self.batch.clear();
        self.memory.clear();
        self.calls.clear();
        self.ops_end = 0;
        self.flush_behind = false;
        self.of_graph = false;
    }
}
