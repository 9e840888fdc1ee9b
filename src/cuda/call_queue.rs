//! What a stream is about to give to the driver, or to kernels of the application: programs as memory operations, or as the words of kernels.

use std::ops::Range;
use std::sync::Arc;

use super::decoded::Decoded;
use super::execution::Execution;
use super::kernel_words::{KernelWords, LONG_WORDS, TRIGGER_WORDS};
use super::memops::{CALL_MAX, MemOp, flush_remote_writes};
use super::memory::DeviceBuffer;
use super::pending::PendingEntry;
use crate::{Error, Result};

/// What the next calls of the driver need.
#[derive(Default)]
pub(super) struct CallQueue {
    /// Counts that stores of the stream will have made when it is done with everything.
    pub(super) issued: u64,
    pub(super) gate: u32,
    /// What programs are executed by, where there is a choice.
    pub(super) execution: Execution,
    pub(super) ops: Vec<MemOp>,
    pub(super) batch: KernelWords,
    /// The calls of the driver that `ops` and `batch` are given by; a program is in one of them.
    pub(super) calls: Vec<DriverCall>,
    /// Where in `ops` the last call of them ends.
    ops_end: usize,
    /// What NICs wrote before the waits of the kernel that is being made is to be flushed behind it: a kernel has no means for that.
    pub(super) flush_behind: bool,
    /// Kernels of the application look at the stream's status.
    pub(super) is_watched: bool,
    /// The calls are for nodes of a graph: memory operations, and nothing else.
    pub(super) of_graph: bool,
    pub(super) entering: Vec<PendingEntry>,
    /// The last thread that queued had another current context than the stream's: the next call enters that first.
    pub(super) enters_first: bool,
    /// Calls that the driver has taken so far.
    pub(super) taken: u64,
    /// Kernels of the application execute what is queued, once they have it: what is made stays until it is taken.
    pub(super) for_kernels: bool,
    /// Triggers that the application has taken, and what it will have counted to when they are executed.
    pub(super) triggers: u64,
    pub(super) triggered: u64,
    /// What triggers need beside the stream's words.
    pub(super) kept: Option<Arc<DeviceBuffer>>,
}

pub(super) struct DriverCall {
    pub(super) what: CallData,
    /// What the stream will have counted to.
    pub(super) issued: u64,
}

/// How far a queue was, to go back there.
pub(super) struct Checkpoint {
    issued: u64,
    gate: u32,
    calls: usize,
    words: usize,
    start: usize,
}

/// What a call gives to the driver.
pub(super) enum CallData {
    /// In `ops`.
    MemoryOps(Range<usize>),
    /// In `batch`.
    Kernel(Range<usize>),
}

impl CallQueue {
    /// For a node of a graph, which is memory operations.
    pub(super) fn for_node() -> CallQueue {
        CallQueue {
            of_graph: true,
            ..CallQueue::default()
        }
    }

    /// What it holds, if one call of the driver can take it.
    pub(super) fn into_one_call(mut self) -> Option<Vec<MemOp>> {
        self.end_call();
        (self.calls.len() == 1).then_some(self.ops)
    }

    /// What the call that is being made is executed by, if there is one.
    pub(super) fn current(&self) -> Option<Execution> {
        if self.batch.len() > 0 {
            Some(Execution::Kernel)
        } else {
            (self.ops.len() > self.ops_end).then_some(Execution::MemoryOps)
        }
    }

    /// Whether a program, and counts around it, fit the call that is being made.
    pub(super) fn fits(&self, by: Execution, program: &Decoded<'_>) -> bool {
        if self.current().is_some_and(|current| current != by) {
            return false;
        }
        match by {
            Execution::MemoryOps => {
                self.ops.len() - self.ops_end + program.memop_count + 2 <= CALL_MAX
            }
            Execution::Kernel => {
                let words = KernelWords::words_of(program) + 2 * KernelWords::COUNT_WORDS;
                self.has_room(words)
            }
        }
    }

    /// Whether the kernel that is being made takes that many words more.
    fn has_room(&self, words: usize) -> bool {
        let limit = if self.for_kernels {
            TRIGGER_WORDS
        } else {
            LONG_WORDS
        };
        self.batch.len() + words <= limit
    }

    /// Ends the call that is being made if it has no place for so many words and a count. What is made for the driver is one step then,
    /// which always has.
    pub(super) fn make_room(&mut self, words: usize) {
        if self.for_kernels && !self.has_room(words + KernelWords::COUNT_WORDS) {
            self.end_call();
        }
    }

    /// Fails if not even a trigger of its own takes the program.
    pub(super) fn check_len(&self, program: &Decoded<'_>) -> Result<()> {
        if !self.for_kernels {
            return Ok(());
        }
        let words = (KernelWords::words_of(program) + 2 * KernelWords::COUNT_WORDS) as u64;
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

    /// What was added since the last call is one.
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

    pub(super) fn checkpoint(&self) -> Checkpoint {
        Checkpoint {
            issued: self.issued,
            gate: self.gate,
            calls: self.calls.len(),
            words: self.batch.len_of_all(),
            start: self.batch.start(),
        }
    }

    /// After a step that was queued.
    pub(super) fn end_step(&mut self) {
        if !self.for_kernels {
            self.clear();
        }
    }

    /// After a step that was not: as it was. Gates are the caller's, who opens those that were there.
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
        self.calls.clear();
        self.ops_end = 0;
        self.flush_behind = false;
        self.of_graph = false;
    }
}
