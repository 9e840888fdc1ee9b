//! Programs and the stream's own steps as the calls that give them to the driver: memory operations, or words for a kernel.

use std::sync::Arc;

use cudarc::driver::sys::CUdeviceptr;

use super::call_queue::CallQueue;
use super::decoded::Decoded;
use super::execution::Execution;
use super::gpu_mapping::GpuMapping;
use super::memops::{store_dword, translate, wait_count};
use super::pending::{AlarmGuard, Awaited, PendingEntry, PendingWork};
use super::state::StreamState;
use crate::Result;
use crate::stream::Submission;

impl StreamState {
    /// The operations of a batch of programs.
    pub(super) fn prepare<'a>(
        &self,
        queue: &mut CallQueue,
        batch: impl ExactSizeIterator<Item = &'a Submission>,
    ) -> Result<()> {
        let last = batch.len().wrapping_sub(1);
        let mut after = queue.issued;
        let mut grouped = queue.entering.len();
        // Whether the call that is being made has counted, and nothing comes between. What is made for kernels ends with a count each time.
        let mut counted = queue.for_kernels && queue.current().is_some();
        for (at, submission) in batch.enumerate() {
            submission.check()?;
            let owner = &submission.owner;
            let mapping = GpuMapping::of(&**owner, &self.context)?;
            let program = &Decoded::new(&submission.program);
            let waits = program.waits;
            let by = self.means(queue, program);
            queue.check_len(program)?;
            if !queue.fits(by, program) {
                // Each call ends with a count, so that what it brings is known to be done whatever becomes of the next one.
                if grouped < queue.entering.len() {
                    self.count_group(queue, &mut grouped);
                }
                after = queue.issued;
                queue.end_call();
                counted = false;
            }
            if !counted && waits {
                // Between two calls others may have queued what takes its time: a wait has not begun before that is over.
                self.count_by(queue, by);
                self.group(queue, &mut grouped);
                after = queue.issued;
                counted = true;
            }
            let locate = |at| mapping.locate(at, &**owner);
            let awaited = match by {
                Execution::MemoryOps => {
                    let capabilities = self.context.capabilities();
                    translate(program, capabilities, locate, &mut queue.ops)?;
                    Awaited::of(program)
                }
                Execution::Kernel => {
                    // By the count behind it, which a program that waits has to itself.
                    queue.batch.program(program, queue.issued + 1, locate)?;
                    queue.flush_behind |=
                        waits && self.context.capabilities().flush && !queue.for_kernels;
                    waits.then_some(Awaited::Kernel)
                }
            };
            let alarm = queue
                .is_watched
                .then(|| AlarmGuard::new(owner, self.id, &self.count));
            queue.entering.push(PendingEntry {
                after,
                done: 0,
                what: PendingWork::Program {
                    alarm,
                    owner: Arc::clone(owner),
                    cookie: submission.cookie,
                    has_begun: false,
                    awaited,
                    released: None,
                },
            });
            // The stream counts after each wait, for only there it may stand still, and behind the last program.
            if waits || at == last {
                self.count_group(queue, &mut grouped);
                after = queue.issued;
                counted = true;
            }
        }
        Ok(())
    }

    /// What executes a program.
    fn means(&self, queue: &CallQueue, program: &Decoded<'_>) -> Execution {
        if queue.for_kernels {
            return Execution::Kernel;
        }
        let capabilities = self.context.capabilities();
        let can = || program.missing(capabilities).is_none();
        // Without either the error is that of the memory operations, which says what is missing.
        let may = capabilities.kernels && !queue.of_graph;
        // Nothing else sees that a completion is one in error before what is behind the wait runs.
        let looks = || queue.is_watched && program.waits_for_completion;
        if may && (queue.execution == Execution::Kernel || looks() || !can()) {
            return Execution::Kernel;
        }
        Execution::MemoryOps
    }

    /// What executes the stream's own steps, where they are in no call with others.
    fn own_means(&self, queue: &CallQueue) -> Execution {
        if queue.for_kernels {
            return Execution::Kernel;
        }
        let capabilities = self.context.capabilities();
        let wanted = queue.execution == Execution::Kernel || !capabilities.memops;
        if capabilities.kernels && !queue.of_graph && wanted {
            return Execution::Kernel;
        }
        Execution::MemoryOps
    }

    /// Lets the stream count, and finishes with that what was entered from `first` on.
    fn count_group(&self, queue: &mut CallQueue, first: &mut usize) {
        self.count(queue);
        self.group(queue, first);
    }

    /// What was entered from `first` on is finished with the count that was made last.
    fn group(&self, queue: &mut CallQueue, first: &mut usize) {
        for pending in &mut queue.entering[*first..] {
            pending.done = queue.issued;
        }
        *first = queue.entering.len();
    }

    /// Lets the stream count, in the call that is being made.
    pub(super) fn count(&self, queue: &mut CallQueue) {
        let by = queue.current().unwrap_or_else(|| self.own_means(queue));
        self.count_by(queue, by);
    }

    fn count_by(&self, queue: &mut CallQueue, by: Execution) {
        queue.issued += 1;
        match by {
            Execution::MemoryOps => {
                let op = store_dword(self.count.words.done_at(), queue.issued as u32);
                queue.ops.push(op);
            }
            Execution::Kernel => queue.batch.count(queue.issued),
        }
    }

    /// Lets the stream wait for a count of others. Whether by a kernel, which can be told to wait no more until the count that comes next.
    pub(super) fn wait_for_count(
        &self,
        queue: &mut CallQueue,
        address: CUdeviceptr,
        value: u32,
    ) -> bool {
        let by = self.own_means(queue);
        match by {
            Execution::MemoryOps => queue.ops.push(wait_count(address, value)),
            Execution::Kernel => queue.batch.wait_count(address, value, queue.issued + 1),
        }
        by == Execution::Kernel
    }

    /// Lets the stream count, and enters what is finished with that.
    pub(super) fn count_for(&self, queue: &mut CallQueue, after: u64, what: PendingWork) {
        self.count(queue);
        queue.entering.push(PendingEntry {
            after,
            done: queue.issued,
            what,
        });
    }
}
