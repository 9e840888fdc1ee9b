//! Copies by the NIC, into memory that the CPU cannot access: reads of this process's own blocks over a loopback.

use std::collections::VecDeque;

use super::peer::StoredMessage;
use super::pool::PoolBlock;
use super::state::TargetPart;
use crate::message::{MessageQueue, ReturnKind};
use crate::{Error, Result, WorkError};

/// A message to be copied out of a block.
#[derive(Debug, Clone, Copy)]
pub(super) struct CopyJob {
    pub(super) receive: u64,
    pub(super) message: StoredMessage,
    pub(super) block: PoolBlock,
}

/// A job that has begun.
struct BegunCopy {
    job: CopyJob,
    /// Slices that were posted, and reads that are not complete.
    slices: usize,
    reads: u32,
    /// Bytes that were posted.
    bytes: u64,
}

/// The copies under way, in order.
pub(super) struct NicCopier {
    queue: MessageQueue,
    /// The other end of the loopback, which answers the reads.
    _other_end: MessageQueue,
    jobs: VecDeque<BegunCopy>,
    is_stopping: bool,
    failure: Option<WorkError>,
}

impl NicCopier {
    pub(super) fn new([queue, other_end]: [MessageQueue; 2]) -> NicCopier {
        NicCopier {
            queue,
            _other_end: other_end,
            jobs: VecDeque::new(),
            is_stopping: false,
            failure: None,
        }
    }

    pub(super) fn push(&mut self, job: CopyJob) {
        self.jobs.push_back(BegunCopy {
            job,
            slices: 0,
            reads: 0,
            bytes: 0,
        });
    }

    /// Goes on with all jobs. Returns whether anything was done, and the jobs that are over, with the failure of those that have failed. `target` is the memory of a receive, `source`
    /// the address and key of a job's block.
    pub(super) fn serve<'a>(
        &mut self,
        target: impl Fn(u64) -> &'a [TargetPart],
        source: impl Fn(&CopyJob) -> (u64, u32),
    ) -> (bool, Vec<(CopyJob, Option<WorkError>)>) {
        if self.jobs.is_empty() {
            return (false, Vec::new());
        }
        if let Some(failure) = self.failure {
            let jobs = self.jobs.drain(..);
            return (true, jobs.map(|copy| (copy.job, Some(failure))).collect());
        }
        let mut over = Vec::new();
        let mut worked = match self.go_on(&target, &source, &mut over) {
            Ok(worked) => worked,
            Err(_) => {
                if !self.is_stopping {
                    self.queue.abort_handle().abort();
                }
                self.is_stopping = true;
                true
            }
        };
        if self.is_stopping && self.queue.has_stopped() {
            self.failure = self.queue.failure();
            worked = true;
        }
        (worked, over)
    }

    fn go_on<'a>(
        &mut self,
        target: &impl Fn(u64) -> &'a [TargetPart],
        source: &impl Fn(&CopyJob) -> (u64, u32),
        over: &mut Vec<(CopyJob, Option<WorkError>)>,
    ) -> Result<bool> {
        let mut worked = false;
        loop {
            // Reads are complete in the order of the jobs.
            while let Some(first) = self.jobs.front()
                && first.reads == 0
                && first.bytes == first.job.message.len_bytes
            {
                over.extend(self.jobs.pop_front().map(|copy| (copy.job, None)));
                worked = true;
            }
            if self.post(target, source)? {
                worked = true;
                continue;
            }
            if self.queue.poll_return()? != Some(ReturnKind::Read) {
                return Ok(worked);
            }
            worked = true;
            if let Some(first) = self.jobs.iter_mut().find(|copy| copy.reads > 0) {
                first.reads -= 1;
            }
        }
    }

    /// Posts what there is room for. Returns whether that was anything.
    fn post<'a>(
        &mut self,
        target: &impl Fn(u64) -> &'a [TargetPart],
        source: &impl Fn(&CopyJob) -> (u64, u32),
    ) -> Result<bool> {
        let mut worked = false;
        for copy in &mut self.jobs {
            let (addr, rkey) = source(&copy.job);
            let left = |bytes: u64| copy.job.message.len_bytes - bytes;
            while left(copy.bytes) > 0 {
                let Some(part) = target(copy.job.receive).get(copy.slices) else {
                    break;
                };
                let len_bytes = u64::from(part.len_bytes).min(left(copy.bytes));
                if len_bytes > 0 {
                    let slice = part.region.slice(part.offset, len_bytes)?;
                    match self.queue.read_into(slice, addr + copy.bytes, rkey) {
                        Err(Error::QueueFull { .. }) => return Ok(worked),
                        posted => posted?,
                    }
                    copy.reads += 1;
                    worked = true;
                }
                copy.bytes += len_bytes;
                copy.slices += 1;
            }
        }
        Ok(worked)
    }

    /// Ends the copies under way: the memory of their receives is not written after this.
    pub(super) fn close(&mut self) {
        if self.jobs.iter().any(|copy| copy.reads > 0) {
            self.queue.abort_handle().abort();
            self.queue.await_stop();
        }
    }
}
