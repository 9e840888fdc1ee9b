//! The receive queue: reads receives from their ring, posts them by verbs, and completes them.

use super::batch::Batch;
use super::completion_ring::CompletionRing;
use super::cq_batch::CqBatch;
use super::provider::{Provider, Queue, Recv};
use super::request::{is_success, recv_cqe, recv_sges};
use super::work::WorkId;
use crate::mlx5::{Cqe, CqeOpcode, Syndrome};
use doorbell_wire::memory::{RecordCell, RingCells};

/// Bytes of the longest receive.
const STRIDE_BYTES_MAX: usize = 1024;

/// The addresses and lengths of a receive queue's parts.
#[derive(Debug)]
pub(super) struct RecvParts {
    pub(super) ring: RingCells,
    pub(super) record: RecordCell,
    pub(super) wqes: u32,
    pub(super) stride_bytes: u32,
    pub(super) completions: CompletionRing,
    /// Receives that the device takes at a time, and pieces of each.
    pub(super) depth: u32,
    pub(super) segments: u32,
    pub(super) qpn: u32,
}

/// A receive queue. Receives have running positions, which are their counts in the ring, too.
#[derive(Debug)]
pub(super) struct RelayRecvQueue {
    parts: RecvParts,
    generation: u32,
    /// The oldest that is not completed, and the next to post.
    head: u32,
    tail: u32,
    /// Nothing more is posted in this generation: the device refused a receive, or completed one in error.
    pub(super) is_closed: bool,
    /// It refused one: the queue pair does not know that it has failed.
    pub(super) has_refused: bool,
    found: CqBatch,
    batch: Batch<Recv, ()>,
}

impl RelayRecvQueue {
    pub(super) fn new(parts: RecvParts) -> RelayRecvQueue {
        let batch = Batch::new(parts.segments.next_power_of_two().max(1));
        RelayRecvQueue {
            parts,
            generation: 0,
            head: 0,
            tail: 0,
            is_closed: false,
            has_refused: false,
            found: CqBatch::new(),
            batch,
        }
    }

    /// Starts over, with nothing posted.
    pub(super) fn reset(&mut self, generation: u32) {
        self.begin(generation, 0);
        self.parts.completions.reset();
    }

    /// Goes on at the same position, in a queue pair that has dropped the posted receives: posts these again.
    pub(super) fn post_again(&mut self, generation: u32) {
        self.begin(generation, self.head);
    }

    fn begin(&mut self, generation: u32, position: u32) {
        self.generation = generation;
        (self.head, self.tail) = (position, position);
        (self.is_closed, self.has_refused) = (false, false);
        self.found.clear();
    }

    /// Receives that were announced and are not posted. A record that announces more than a ring announces none.
    fn announced(&self) -> u32 {
        let record = self.parts.record.load();
        let ahead = u32::from((record as u16).wrapping_sub(self.tail as u16));
        if ahead > self.parts.wqes { 0 } else { ahead }
    }

    /// Whether there are such receives.
    pub(super) fn has_announced(&self) -> bool {
        self.announced() > 0
    }

    /// Posts the receives that were announced, as far as the device takes them. Returns whether there were any.
    pub(super) fn post(&mut self, provider: &mut impl Provider) -> bool {
        let mut worked = false;
        while !self.is_closed {
            let free = self.parts.depth - self.tail.wrapping_sub(self.head);
            let count = self.announced().min(free);
            if count == 0 {
                break;
            }
            self.gather(count);
            let posted = provider.post_recv(&self.batch.requests, &self.batch.sges);
            self.tail = self.tail.wrapping_add(posted.count as u32);
            worked |= posted.count > 0;
            if posted.errno != 0 {
                // With nothing posted there is nothing that would make room.
                self.has_refused = !posted.is_full() || self.head == self.tail;
                self.is_closed |= self.has_refused;
                break;
            }
        }
        worked
    }

    fn gather(&mut self, count: u32) {
        let RelayRecvQueue {
            parts,
            batch,
            generation,
            tail,
            ..
        } = self;
        batch.clear();
        let mut bytes = [0; STRIDE_BYTES_MAX];
        let stride = parts.stride_bytes as usize;
        for ahead in 0..count {
            if batch.is_full() {
                break;
            }
            let position = tail.wrapping_add(ahead);
            let Some(wqe) = bytes.get_mut(..stride) else {
                break;
            };
            parts.ring.read(position as usize * stride, wqe);
            let first_sge = batch.sges.len() as u32;
            let sges = recv_sges(wqe, &mut batch.sges);
            let id = WorkId {
                generation: *generation,
                position,
            };
            let request = Recv {
                wr_id: id.to_wr_id(),
                first_sge,
                sges,
            };
            batch.push(request, ());
        }
    }

    /// Passes completions on, as far as there is room for them. Returns whether there were any; `None` if the queue is broken. With
    /// `flushes`, completes announced receives as flushed, after the posted ones.
    pub(super) fn complete(&mut self, provider: &mut impl Provider, flushes: bool) -> Option<bool> {
        let mut worked = false;
        loop {
            if self.head == self.tail {
                break;
            }
            let Some(found) = self.found.front() else {
                if self.found.poll(provider, Queue::Recv)? == 0 {
                    return Some(worked);
                }
                continue;
            };
            let id = WorkId::from_wr_id(found.wr_id);
            let ahead = id.position.wrapping_sub(self.head);
            let is_ours =
                id.generation == self.generation && ahead < self.tail.wrapping_sub(self.head);
            if is_ours {
                if !self.push(id.position, recv_cqe(&found)) {
                    return Some(worked);
                }
                self.is_closed |= !is_success(&found);
                worked = true;
            }
            self.found.pop();
        }
        while flushes && self.announced() > 0 {
            let flushed = Cqe {
                opcode: CqeOpcode::RespErr,
                syndrome: Syndrome::WrFlush as u8,
                ..Cqe::default()
            };
            self.tail = self.tail.wrapping_add(1);
            if !self.push(self.head, flushed) {
                self.tail = self.head;
                break;
            }
            worked = true;
        }
        Some(worked)
    }

    /// Completes the receives up to that position. Returns whether there was room.
    fn push(&mut self, position: u32, cqe: Cqe) -> bool {
        let pushed = self.parts.completions.push(&Cqe {
            qpn: self.parts.qpn,
            wqe_counter: position as u16,
            ..cqe
        });
        if pushed {
            self.head = position.wrapping_add(1);
        }
        pushed
    }
}
