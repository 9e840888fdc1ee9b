//! The queues of an endpoint as those of graphs.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::super::device_queue_state::{fresh_marks, state_words};
use super::super::owned_queue::{OwnedRecvQueue, OwnedSendQueue};
use super::super::queue_view::{QueueView, VIEW_WORDS};
use super::operation::{
    OPERATION, QUEUE_WORDS, ReplayOperation, ReplayTarget, ReplayTicket, add, refused,
};
use crate::region::Region;
use crate::stream::{ReplayCell, ReplayKeeper, ReplayMemory, ReplayPart, ReplayStream};
use crate::{Error, Result, StateKind};

/// Bytes of `struct dbl_queue_state`, and of `struct dbl_replay_recv`.
const STATE_BYTES: usize = 512;
/// How long a reset waits for the driver to say that graphs were destroyed.
const RELEASE: Duration = Duration::from_secs(5);

/// The queues, and what the operations that were added have in common.
#[derive(Debug)]
pub(in crate::endpoint) struct ReplayQueues {
    parts: Arc<ReplayParts>,
    context: u64,
    unwaited: VecDeque<Unwaited>,
}

/// A signaled send for which no wait was added yet.
#[derive(Debug)]
struct Unwaited {
    capture: Option<u64>,
    cell: Arc<ReplayCell>,
}

/// What each graph keeps.
#[derive(Debug)]
struct ReplayParts {
    /// Before the memory that it maps.
    _memory: Box<dyn ReplayMemory>,
    words: [u64; QUEUE_WORDS],
    recv: OwnedRecvQueue,
    send: OwnedSendQueue,
}

impl ReplayQueues {
    /// Hands both queues of an endpoint over.
    ///
    /// # Errors
    /// [`Error::State`] if kernels cannot have them; [`Error::Cuda`]. They are the endpoint's then, as before.
    pub(super) fn new(
        mut send: OwnedSendQueue,
        mut recv: OwnedRecvQueue,
        stream: &dyn ReplayStream,
    ) -> Result<ReplayQueues> {
        let mut view = QueueView::new(&send);
        let registers = send.memory().uar.map(|uar| uar.addr());
        let mut parts = Vec::new();
        view.reach(&send, |start, len_bytes| {
            let is_register = registers.contains(&start);
            parts.push(ReplayPart {
                start,
                len_bytes,
                registers: is_register.then(|| send.uar_mapping()).flatten(),
            });
            Ok(0)
        })?;
        let send_parts = parts.len();
        let memory = send.memory();
        let sizes = memory.sizes;
        let recv_bytes = sizes.recv_wqes * sizes.recv_stride_bytes;
        for (start, len_bytes) in [
            (memory.recv_ring.addr(), recv_bytes as usize),
            (memory.record.addr(), 8),
            (memory.cqs[1].addr(), sizes.cqes[1] as usize * 64),
            (memory.cq_records[1].addr(), 4),
        ] {
            parts.push(ReplayPart {
                start,
                len_bytes,
                registers: None,
            });
        }
        let line = send.state();
        let (first, completion) = line.first();
        let (slots, _) = line.slots();
        let mut contents = bytes(&state_words(first, completion));
        let (recv_first, recv_completion) = recv.first();
        // posted, taken, completed
        let mut recv_state = [0; STATE_BYTES / 4];
        for (at, value) in [
            (0, recv_first),
            (32, recv_completion),
            (64, recv_completion),
        ] {
            recv_state[at] = value;
        }
        contents.extend(bytes(&recv_state));
        let has_flags = line.flags().is_some();
        if !has_flags {
            contents.extend(bytes(&fresh_marks(first, slots)));
        }
        let mapped = stream.map(&parts, &contents)?;
        let mut addresses = mapped.mapped().iter().copied();
        view.reach(&send, |_, _| {
            addresses
                .next()
                .ok_or_else(|| refused("a part of the queue is not mapped"))
        })?;
        view.state = mapped.start();
        if !has_flags {
            view.marks = mapped.start() + 2 * STATE_BYTES as u64;
        }
        let mut words = [0; QUEUE_WORDS];
        words[..VIEW_WORDS].copy_from_slice(&view.words());
        words[14] = mapped.start() + STATE_BYTES as u64;
        words[15..19].copy_from_slice(&mapped.mapped()[send_parts..]);
        let pair = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
        words[19] = pair(sizes.recv_wqes - 1, sizes.recv_stride_bytes.ilog2());
        words[20] = pair(sizes.cqes[1] - 1, recv.capacity());
        // Last: what was refused has left the endpoint as it was.
        send.begin()?;
        recv.begin();
        Ok(ReplayQueues {
            parts: Arc::new(ReplayParts {
                _memory: mapped,
                words,
                recv,
                send,
            }),
            context: stream.context_key(),
            unwaited: VecDeque::new(),
        })
    }

    /// Fails for a stream of another context than that of the stream which had the first operation.
    pub(super) fn check_context(&self, stream: &dyn ReplayStream) -> Result<()> {
        if stream.context_key() == self.context {
            return Ok(());
        }
        Err(Error::Foreign {
            argument: "stream",
            found: format!("CUDA context {:#x}", stream.context_key()),
            expected: format!(
                "CUDA context {:#x}, whose graphs have the endpoint's queues",
                self.context
            ),
        })
    }

    /// Holds a region until a reset.
    pub(super) fn hold(&self, region: &Region) -> Result<()> {
        self.parts.send.hold(region)
    }

    /// Adds an operation.
    pub(super) fn queue(
        &self,
        stream: &dyn ReplayStream,
        operation: &ReplayOperation,
        cell: &Arc<ReplayCell>,
        awaited: Option<Arc<ReplayCell>>,
    ) -> Result<()> {
        let (first, completion) = self.parts.recv.first();
        let target = ReplayTarget {
            queues: Some(&self.parts.words),
            recv_ahead: first.wrapping_sub(completion),
            awaited: awaited.as_deref(),
        };
        let kept: ReplayKeeper =
            Arc::new((Arc::clone(&self.parts), Arc::clone(cell), awaited.clone()));
        let endpoint = Some(self.parts.send.shared());
        add(stream, operation, target, cell, kept, endpoint)
    }

    /// A signaled send was added.
    pub(super) fn expect(&mut self, capture: Option<u64>, cell: &Arc<ReplayCell>) {
        // Nobody will wait for those of a capture that was given up, or of a graph without waits.
        if self.unwaited.len() == UNWAITED_MAX {
            self.unwaited.pop_front();
        }
        self.unwaited.push_back(Unwaited {
            capture,
            cell: Arc::clone(cell),
        });
    }

    /// The oldest send of that capture for which no wait was added.
    pub(super) fn next_unwaited(&self, capture: Option<u64>) -> Result<Arc<ReplayCell>> {
        let mut sends = self.unwaited.iter();
        let found = sends.find(|send| send.capture == capture);
        found.map(|send| Arc::clone(&send.cell)).ok_or_else(|| {
            Error::state(
                StateKind::NothingPosted,
                OPERATION,
                "nothing to wait for: all signaled sends of this capture have their wait; a wait and its send are in one capture",
            )
        })
    }

    /// Its wait was added.
    pub(super) fn has_wait(&mut self, send: &Arc<ReplayCell>) {
        let at = (self.unwaited.iter()).position(|other| Arc::ptr_eq(&other.cell, send));
        at.and_then(|at| self.unwaited.remove(at));
    }

    pub(super) fn ticket(&self, cell: Arc<ReplayCell>, kind: (bool, bool)) -> ReplayTicket {
        ReplayTicket::new(Some(Arc::clone(self.parts.send.shared())), cell, kind)
    }

    /// Gives the queues back, unless a graph has them still.
    pub(super) fn end(mut self: Box<Self>) -> std::result::Result<(), Box<Self>> {
        let until = Instant::now() + RELEASE;
        self.unwaited.clear();
        // The driver tells of the end of a graph some time later.
        while Arc::strong_count(&self.parts) > 1 {
            if Instant::now() > until {
                return Err(self);
            }
            std::thread::sleep(Duration::from_micros(100));
        }
        Ok(())
    }
}

/// Sends without a wait that are remembered.
const UNWAITED_MAX: usize = 65_536;

fn bytes(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}
