//! Programs and the stream's own steps as the calls that give them to the driver: memory operations, or words for a kernel.
#![allow(unsafe_code)] // promises that memory stays mapped

use std::sync::Arc;

use cudarc::driver::sys::CUdeviceptr;

use super::call_queue::CallQueue;
use super::capabilities::{UNORDERED_WRITES, WritesOrdering};
use super::decoded::Decoded;
use super::execution::Execution;
use super::gpu_mapping::GpuMapping;
use super::kernel_address::kernel_address;
use super::kernel_words::KernelWords;
use super::memops::{store_dword, translate, wait_count};
use super::memory_work::MemoryCall;
use super::pending::{Ending, FailureGuard, PendingEntry, PendingWork, ReleaseMethod};
use super::state::StreamState;
use crate::stream::{KernelMemory, KernelStep, Submission};
use crate::{Error, Result, StateKind};

impl StreamState {
    /// Adds the operations of a batch of programs, and an entry for each program.
    ///
    /// # Errors
    /// As [`Executor::submit`](crate::Executor::submit). `queue` may have a part of the batch then.
    pub(super) fn prepare<'a>(
        &self,
        queue: &mut CallQueue,
        batch: impl ExactSizeIterator<Item = &'a Submission>,
    ) -> Result<()> {
        let last = batch.len().wrapping_sub(1);
        let mut after = queue.issued;
        let mut grouped = queue.entering.len();
        // Whether the last operation of the current call is a count. Triggers always end with one.
        let mut counted = queue.for_kernels && queue.current().is_some();
        for (at, submission) in batch.enumerate() {
            submission.check()?;
            let owner = &submission.owner;
            let mapping = GpuMapping::of(&**owner, &self.context)?;
            let program = &Decoded::new(&submission.program);
            let waits = program.waits;
            if queue.for_kernels
                && waits
                && self.context.capabilities().ordering == WritesOrdering::None
            {
                return Err(Error::state(
                    StateKind::Unsupported,
                    "queue a wait for a kernel",
                    UNORDERED_WRITES,
                ));
            }
            let take = match owner.kernel_step(submission.cookie)? {
                Some(KernelStep::Take(take)) => Some(take),
                Some(KernelStep::Memory(work)) => {
                    self.check_memory_work(queue)?;
                    // What is before it is known to be done if the driver refuses it.
                    if grouped < queue.entering.len() {
                        self.count_group(queue, &mut grouped);
                    }
                    after = queue.issued;
                    for work in &work {
                        queue.memory_call(MemoryCall::of(work, &self.context)?);
                    }
                    counted = false;
                    None
                }
                None => None,
            };
            let by = match &take {
                Some(_) => self.kernel_means(queue)?,
                None => self.means(queue, program),
            };
            let take_words = take.as_ref().map_or(0, KernelWords::words_of_take);
            queue.check_len(program, take_words)?;
            if !queue.fits(by, program, take_words) {
                // Each call ends with a count: its programs are known to be done even if the driver refuses the next call.
                if grouped < queue.entering.len() {
                    self.count_group(queue, &mut grouped);
                }
                after = queue.issued;
                queue.end_call();
                counted = false;
            }
            if !counted && waits {
                // Others may have queued long work between two calls. The count shows when that is done and the wait begins.
                self.count_by(queue, by);
                self.group(queue, &mut grouped);
                after = queue.issued;
                counted = true;
            }
            let locate = |at| mapping.locate(at, &**owner);
            let release_by = match by {
                Execution::MemoryOps => {
                    let capabilities = self.context.capabilities();
                    translate(program, capabilities, locate, &mut queue.ops)?;
                    ReleaseMethod::of(program)
                }
                Execution::Kernel => {
                    if let Some(take) = &take {
                        let locate =
                            |memory: &KernelMemory<'_>| kernel_address(memory, &self.context);
                        queue.batch.take(take, locate)?;
                    }
                    // The number is that of the count behind the program, which a program that waits shares with no other.
                    queue.batch.program(program, queue.numbered + 1, locate)?;
                    queue.flush_behind |=
                        waits && self.context.capabilities().flush && !queue.for_kernels;
                    waits.then_some(ReleaseMethod::Kernel)
                }
            };
            // Sends alone end no wait, so that only the status word is of interest.
            if waits {
                queue.waited.push(Arc::clone(owner));
            }
            let failure_notifier =
                (waits || queue.is_watched).then(|| FailureGuard::new(owner, self.id, &self.count));
            queue.entering.push(PendingEntry {
                after,
                done: 0,
                calls: 0,
                what: PendingWork::Program {
                    failure_notifier,
                    owner: Arc::clone(owner),
                    cookie: submission.cookie,
                    has_begun: false,
                    waits,
                    release_by,
                    released: None,
                    ending: Ending::Waits,
                },
            });
            // The stream counts after each wait, since it can block only there, and after the last program.
            if waits || at == last {
                self.count_group(queue, &mut grouped);
                after = queue.issued;
                counted = true;
            }
        }
        Ok(())
    }

    /// Whether memory operations or a kernel execute a program.
    fn means(&self, queue: &CallQueue, program: &Decoded<'_>) -> Execution {
        if queue.for_kernels {
            return Execution::Kernel;
        }
        let capabilities = self.context.capabilities();
        let can = || program.missing(capabilities).is_none();
        // If neither can, the error of the memory operations says what is missing.
        let may = capabilities.kernels && !queue.of_graph;
        if may && (queue.execution == Execution::Kernel || !can()) {
            return Execution::Kernel;
        }
        Execution::MemoryOps
    }

    /// The same for what only a kernel can do.
    ///
    /// # Errors
    /// [`Error::State`] if no kernel can.
    fn kernel_means(&self, queue: &CallQueue) -> Result<Execution> {
        if queue.for_kernels || self.context.capabilities().kernels {
            return Ok(Execution::Kernel);
        }
        Err(Error::state(
            StateKind::Unsupported,
            "receive a message",
            "a kernel takes a message out of its slot, and this library has none for the device; receive on a host stream or with `recv_now`",
        ))
    }

    /// Fails if neither the driver nor a kernel can work on memory for the stream.
    fn check_memory_work(&self, queue: &CallQueue) -> Result<()> {
        if !queue.for_kernels {
            return Ok(());
        }
        Err(Error::state(
            StateKind::Unsupported,
            "work on memory",
            "kernels of the application execute its programs, and the library launches none; use a stream of the host or of the GPU",
        ))
    }

    /// What executes a step of the stream's own that begins a call.
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

    /// Adds a count, with which the entries from `first` on are finished.
    fn count_group(&self, queue: &mut CallQueue, first: &mut usize) {
        self.count(queue);
        self.group(queue, first);
    }

    /// The entries from `first` on are finished with the last count.
    fn group(&self, queue: &mut CallQueue, first: &mut usize) {
        for pending in &mut queue.entering[*first..] {
            pending.done = queue.issued;
        }
        *first = queue.entering.len();
    }

    /// Adds a count to the current call.
    pub(super) fn count(&self, queue: &mut CallQueue) {
        let by = queue.current().unwrap_or_else(|| self.own_means(queue));
        self.count_by(queue, by);
    }

    fn count_by(&self, queue: &mut CallQueue, by: Execution) {
        queue.numbered += 1;
        queue.issued = queue.numbered;
        match by {
            Execution::MemoryOps => {
                let op = store_dword(self.count.words.done_at(), queue.issued as u32);
                queue.ops.push(op);
            }
            Execution::Kernel => queue.batch.count(queue.issued),
        }
    }

    /// Adds a wait for a count of another stream, or for a gate. Returns whether a kernel waits, which this process can tell to stop waiting; its
    /// number is that of the next count.
    pub(super) fn wait_for_count(
        &self,
        queue: &mut CallQueue,
        address: CUdeviceptr,
        value: u32,
    ) -> bool {
        let by = self.own_means(queue);
        match by {
            Execution::MemoryOps => queue.ops.push(wait_count(address, value)),
            Execution::Kernel => queue.batch.wait_count(address, value, queue.numbered + 1),
        }
        by == Execution::Kernel
    }

    /// Adds a count, and an entry that is finished with it.
    pub(super) fn count_for(&self, queue: &mut CallQueue, after: u64, what: PendingWork) {
        self.count(queue);
        queue.entering.push(PendingEntry {
            after,
            done: queue.issued,
            calls: 0,
            what,
        });
    }
}
