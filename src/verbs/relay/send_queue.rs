//! The send queue: reads WQEs from their ring, posts them by verbs, and completes them.

use std::sync::Arc;

use rdma_sys::ibv_wr_opcode;

use super::batch::Batch;
use super::completion_ring::CompletionRing;
use super::cq_batch::CqBatch;
use super::provider::{PostedUpTo, Provider, Queue, Send};
use super::request::{SIGNALED, is_success, send_request, syndrome, vendor_syndrome};
use super::staging::Staging;
use super::work::WorkId;
use crate::mlx5::{Cqe, CqeOpcode, Opcode, Syndrome, WQEBB_BYTES, Wqe};
use crate::verbs::address_table::{AddressTable, RawAddressHandle};
use doorbell_wire::memory::{RecordCell, RingCells};

/// Bytes of the longest WQE: its length has six bits, in segments of 16.
const WQE_BYTES: usize = 63 * 16;

/// The addresses and lengths of a send queue's parts.
#[derive(Debug)]
pub(super) struct SendParts {
    pub(super) ring: RingCells,
    pub(super) record: RecordCell,
    pub(super) wqebbs: u32,
    pub(super) completions: CompletionRing,
    pub(super) staging: Staging,
    /// Requests that the device takes at a time, and pieces of each.
    pub(super) depth: u32,
    pub(super) segments: u32,
    pub(super) qpn: u32,
    /// Of a UD queue pair: the address handles that its WQEs name.
    pub(super) addresses: Option<Arc<AddressTable>>,
}

/// What is known of a request until it is completed.
#[derive(Debug, Clone, Copy)]
struct Entry {
    /// The index of the WQE, as in its CQE.
    index: u16,
    opcode: u8,
    signaled: bool,
    len_bytes: u32,
    fate: Completer,
}

/// Which side completes a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Completer {
    /// The device, to which it was posted.
    Posted,
    /// This side, when the requests before it are done: verbs has no such request.
    Nop,
    /// As above, in error.
    Refused(Syndrome),
}

/// How a request ended: with success, or with a syndrome and the device's code.
type RelayOutcome = Result<(), (u8, u8)>;

const FLUSHED: RelayOutcome = Err((Syndrome::WrFlush as u8, 0));

/// Of a request in a batch: its position, to go on from there if it is not posted.
#[derive(Debug, Clone, Copy)]
struct BatchedRequest {
    position: u32,
    read: u32,
    wqebbs: u32,
}

/// A send queue.
///
/// A provider gives places of its queue back only when a signaled request is found complete. So the first and the last request of each
/// call are signaled, whatever their WQEs say, and the relay drops the completions that were not asked for. The first one ensures that
/// a completion always comes, however few requests the provider accepts. The last one serves for NOPs, which verbs does not have: the
/// request before a NOP is signaled, so the relay knows when the NOP's turn has come.
///
/// A request that the provider refuses is completed in error in its place, too, and the queue pair does not fail before that: requests
/// that were posted before it end as they would have. If the last of them was not signaled, a signaled marker is posted behind it (see
/// [`RelaySendQueue::mark`]).
#[derive(Debug)]
pub(super) struct RelaySendQueue {
    parts: SendParts,
    generation: u32,
    /// WQEBBs read, as they are counted in the record.
    read: u32,
    /// Positions of the oldest request that is not completed, and of the next.
    head: u32,
    tail: u32,
    /// By position; a power of two.
    entries: Box<[Entry]>,
    /// Behind the newest posted request that is signaled, and behind the newest of all.
    signaled_end: u32,
    posted: u32,
    /// The oldest request that was refused, while no completion will show when its turn has come.
    unmarked: Option<u32>,
    /// The provider refuses the marker as well.
    cannot_mark: bool,
    /// A request was completed in error: all behind it fail, too.
    pub(super) has_failed: bool,
    /// Nothing more is posted in this generation.
    is_closed: bool,
    /// A request was refused on this side, of which the queue pair does not know.
    has_refused: bool,
    found: CqBatch,
    batch: Batch<Send, BatchedRequest>,
    /// The address handles of the batch, which must exist until it is posted.
    handles: Vec<Arc<RawAddressHandle>>,
    wqe: Box<[u8; WQE_BYTES]>,
}

impl RelaySendQueue {
    pub(super) fn new(parts: SendParts) -> RelaySendQueue {
        let blank = Entry {
            index: 0,
            opcode: 0,
            signaled: false,
            len_bytes: 0,
            fate: Completer::Nop,
        };
        let places = parts.depth.next_power_of_two() as usize;
        // A payload of the ring's longest form: memory, or one piece of inline bytes.
        let batch = Batch::new(parts.segments.max(1));
        RelaySendQueue {
            parts,
            generation: 0,
            read: 0,
            head: 0,
            tail: 0,
            entries: vec![blank; places].into_boxed_slice(),
            signaled_end: 0,
            posted: 0,
            unmarked: None,
            cannot_mark: false,
            has_failed: false,
            is_closed: false,
            has_refused: false,
            found: CqBatch::new(),
            batch,
            handles: Vec::new(),
            wqe: Box::new([0; WQE_BYTES]),
        }
    }

    pub(super) fn staging_bytes(&self) -> usize {
        self.parts.staging.len_bytes()
    }

    /// Starts over, with nothing posted.
    pub(super) fn reset(&mut self, generation: u32) {
        self.generation = generation;
        self.read = 0;
        (self.head, self.tail) = (0, 0);
        (self.signaled_end, self.posted) = (0, 0);
        (self.unmarked, self.cannot_mark) = (None, false);
        (self.has_failed, self.is_closed, self.has_refused) = (false, false, false);
        self.found.clear();
        self.parts.completions.reset();
    }

    fn entry(&mut self, position: u32) -> &mut Entry {
        let mask = self.entries.len() - 1;
        &mut self.entries[position as usize & mask]
    }

    /// WQEBBs that were announced and are not read. A record that announces more than a ring announces none.
    fn announced(&self) -> u32 {
        let record = self.parts.record.load();
        let ahead = u32::from((record as u16).wrapping_sub(self.read as u16));
        if ahead > self.parts.wqebbs { 0 } else { ahead }
    }

    /// Whether requests were announced that are not read.
    pub(super) fn has_announced(&self) -> bool {
        self.announced() != 0
    }

    fn has_place(&self) -> bool {
        self.tail.wrapping_sub(self.head) < self.parts.depth
    }

    /// Posts the requests that were announced, as far as the device takes them. Returns whether there were any. With `flushes`, enters
    /// them as flushed instead.
    pub(super) fn post(&mut self, provider: &mut impl Provider, flushes: bool) -> bool {
        let before = self.read;
        loop {
            let left = self.announced();
            if left == 0 || !self.has_place() {
                break;
            }
            self.gather(left, flushes);
            if self.batch.requests.is_empty() {
                if self.must_wait(flushes) {
                    break;
                }
                continue;
            }
            for end in [0, self.batch.requests.len() - 1] {
                self.batch.requests[end].flags |= SIGNALED;
            }
            let posted = provider.post_send(&self.batch.requests, &self.batch.sges);
            // Those of requests in flight are the endpoint's.
            self.handles.clear();
            if !self.enter_posted(posted) {
                break;
            }
        }
        if !flushes && self.unmarked.is_some() {
            self.mark(provider);
        }
        self.read != before
    }

    /// Whether a request was refused on this side, of which the queue pair does not know.
    pub(super) fn has_refused(&self) -> bool {
        self.has_refused
    }

    /// Whether the oldest request is one that this side completes, without the device.
    pub(super) fn completes_next(&mut self) -> bool {
        self.head != self.tail && self.entry(self.head).fate != Completer::Posted
    }

    /// Whether the queue pair is to fail: the request that was refused has been completed, or there is no way to learn when it could be.
    pub(super) fn fails(&self) -> bool {
        self.has_refused && (self.has_failed || self.cannot_mark)
    }

    /// Whether a completion will come that frees places.
    fn expects_completion(&self) -> bool {
        self.signaled_end.wrapping_sub(self.head).cast_signed() > 0
    }

    /// Posts a marker, a write of no bytes, which accesses no memory: its completion shows when all requests before the refused one are
    /// done, if the last of them was not signaled. If the peer allows no writes, it refuses the marker, which shows the same; the
    /// connection ends in any case. The marker completes with the number of the refused request, whose place it takes.
    fn mark(&mut self, provider: &mut impl Provider) {
        let Some(position) = self.unmarked else {
            return;
        };
        let is_signaled = self.posted.wrapping_sub(self.signaled_end).cast_signed() <= 0;
        let is_done = self.posted.wrapping_sub(self.head).cast_signed() <= 0;
        if is_signaled || is_done {
            self.unmarked = None;
            return;
        }
        let id = WorkId {
            generation: self.generation,
            position,
        };
        let marker = Send {
            wr_id: id.to_wr_id(),
            opcode: ibv_wr_opcode::IBV_WR_RDMA_WRITE,
            flags: SIGNALED,
            ..Send::default()
        };
        let posted = provider.post_send(&[marker], &[]);
        if posted.count == 1 {
            self.unmarked = None;
        } else if !(posted.is_full() && self.expects_completion()) {
            self.unmarked = None;
            self.cannot_mark = true;
        }
    }

    /// Notes that the request of that position was refused: nothing behind it is posted.
    fn refuse(&mut self, position: u32) {
        (self.is_closed, self.has_refused) = (true, true);
        self.unmarked = Some(position);
    }

    /// Reads WQEs into a batch, as long as there is place for them.
    fn gather(&mut self, mut left: u32, flushes: bool) {
        self.batch.clear();
        self.handles.clear();
        while left > 0 && !self.batch.is_full() && self.has_place() && !self.must_wait(flushes) {
            let (entry, wqebbs) = self.read_next(left, flushes);
            left -= wqebbs;
            self.read = self.read.wrapping_add(wqebbs);
            if let Some(entry) = entry {
                let position = self.tail;
                *self.entry(position) = entry;
                self.tail = position.wrapping_add(1);
            }
        }
    }

    /// Whether the next WQE waits for all before it: verbs have no such fence.
    fn must_wait(&mut self, flushes: bool) -> bool {
        if self.head == self.tail || flushes || self.is_closed {
            return false;
        }
        let mut control = [0; 16];
        let start = self.read as usize * WQEBB_BYTES;
        self.parts.ring.read(start, &mut control);
        Wqe::ctrl(&control).ordered
    }

    /// Reads the next WQE, of `left` WQEBBs at most: returns the entry to keep for it, and its length. A request to post goes to the
    /// batch; a request that will not be completed visibly has no entry.
    fn read_next(&mut self, left: u32, flushes: bool) -> (Option<Entry>, u32) {
        let RelaySendQueue {
            parts,
            wqe: bytes,
            batch,
            handles,
            ..
        } = self;
        let index = self.read as u16;
        let refused = |opcode, syndrome| Entry {
            index,
            opcode,
            signaled: true,
            len_bytes: 0,
            fate: Completer::Refused(syndrome),
        };
        let start = self.read as usize * WQEBB_BYTES;
        let (head, _) = bytes.split_at_mut(WQEBB_BYTES);
        parts.ring.read(start, head);
        let Some(control) = head.first_chunk().map(Wqe::ctrl) else {
            self.refuse(self.tail);
            return (Some(refused(0, Syndrome::LocalQpOp)), left);
        };
        let wqebbs = control.wqebbs().clamp(1, left);
        if flushes || self.is_closed {
            return (Some(refused(control.opcode_raw, Syndrome::WrFlush)), wqebbs);
        }
        let len_bytes = usize::from(control.ds) * 16;
        let wqe = bytes
            .get_mut(..len_bytes)
            .filter(|_| control.wqebbs() <= left)
            .and_then(|bytes| {
                parts.ring.read(start, bytes);
                match parts.addresses {
                    Some(_) => Wqe::parse_datagram(bytes).ok(),
                    None => Wqe::parse(bytes).ok(),
                }
            })
            .filter(|wqe| wqe.ctrl.qpn == parts.qpn && wqe.ctrl.index == index);
        let id = WorkId {
            generation: self.generation,
            position: self.tail,
        };
        match wqe {
            Some(wqe) if wqe.ctrl.opcode == Some(Opcode::Nop) => {
                if !wqe.ctrl.signaled {
                    return (None, wqebbs);
                }
                // So that its turn is known. The requests of an earlier call ended with a signaled one.
                if let Some(before) = batch.requests.last_mut() {
                    before.flags |= SIGNALED;
                }
                let entry = Entry {
                    index,
                    opcode: control.opcode_raw,
                    signaled: true,
                    len_bytes: 0,
                    fate: Completer::Nop,
                };
                return (Some(entry), wqebbs);
            }
            Some(wqe) => {
                let request = send_request(
                    &wqe,
                    id,
                    parts.segments,
                    &mut parts.staging,
                    &mut batch.sges,
                );
                // A handle that is gone ends the request, as one that cannot be translated.
                let request = match &parts.addresses {
                    Some(table) => request.and_then(|request| {
                        let (datagram, handle) =
                            wqe.datagram().and_then(|to| Some((to, table.find(&to)?)))?;
                        let addressed = Send {
                            ah: handle.address(),
                            remote_qpn: datagram.qpn,
                            remote_qkey: datagram.qkey,
                            // So that no marker is needed behind it: a UD queue pair has no request that does nothing.
                            flags: request.flags | SIGNALED,
                            ..request
                        };
                        handles.push(handle);
                        Some(addressed)
                    }),
                    None => request,
                };
                if let Some(request) = request {
                    let entry = Entry {
                        index,
                        opcode: control.opcode_raw,
                        signaled: wqe.ctrl.signaled,
                        len_bytes: wqe.total_len() as u32,
                        fate: Completer::Posted,
                    };
                    let memo = BatchedRequest {
                        position: id.position,
                        read: self.read,
                        wqebbs,
                    };
                    batch.push(request, memo);
                    return (Some(entry), wqebbs);
                }
            }
            None => {}
        }
        self.refuse(self.tail);
        (
            Some(refused(control.opcode_raw, Syndrome::LocalQpOp)),
            wqebbs,
        )
    }

    /// Records which requests of the batch were posted. Returns whether to go on.
    fn enter_posted(&mut self, posted: PostedUpTo) -> bool {
        let count = posted.count.min(self.batch.requests.len());
        let signaled = |request: &Send| request.flags & SIGNALED != 0;
        if let Some(newest) = self.batch.requests[..count].iter().rposition(signaled) {
            self.signaled_end = self.batch.memos[newest].position.wrapping_add(1);
        }
        if let Some(newest) = self.batch.memos[..count].last() {
            self.posted = newest.position.wrapping_add(1);
        }
        let Some(first) = self.batch.memos.get(count).copied() else {
            return true;
        };
        // The requests that were not posted are read again.
        self.tail = first.position;
        self.read = first.read;
        // A refused request behind them is refused again.
        (self.is_closed, self.has_refused) = (false, false);
        self.unmarked = None;
        if posted.is_full() && self.expects_completion() {
            return false;
        }
        // The device does not take it, and nothing is under way that would change its mind.
        let refused = self.entry(first.position);
        refused.fate = Completer::Refused(Syndrome::LocalQpOp);
        refused.signaled = true;
        self.tail = first.position.wrapping_add(1);
        self.read = first.read.wrapping_add(first.wqebbs);
        self.refuse(first.position);
        true
    }

    /// Passes completions on, as far as there is room for them. Returns whether there were any; `None` if the queue is broken.
    pub(super) fn complete(&mut self, provider: &mut impl Provider) -> Option<bool> {
        let before = self.head;
        while self.head != self.tail {
            let fate = self.entry(self.head).fate;
            let outcome = match fate {
                Completer::Nop if self.has_failed => FLUSHED,
                Completer::Nop => Ok(()),
                Completer::Refused(_) if self.has_failed => FLUSHED,
                Completer::Refused(syndrome) => Err((syndrome as u8, 0)),
                Completer::Posted => match self.outcome(provider)? {
                    Some(outcome) => outcome,
                    None => break,
                },
            };
            if !self.retire(outcome) {
                break;
            }
        }
        Some(self.head != before)
    }

    /// How the oldest request, which the device has, ended, if its own completion or that of a later one shows that. The outer `None`
    /// means that the queue is broken.
    fn outcome(&mut self, provider: &mut impl Provider) -> Option<Option<RelayOutcome>> {
        loop {
            let Some(found) = self.found.front() else {
                if self.found.poll(provider, Queue::Send)? == 0 {
                    return Some(None);
                }
                continue;
            };
            let id = WorkId::from_wr_id(found.wr_id);
            let ahead = id.position.wrapping_sub(self.head);
            if id.generation != self.generation || ahead >= self.tail.wrapping_sub(self.head) {
                self.found.pop();
                continue;
            }
            return Some(Some(if ahead == 0 && !is_success(&found) {
                Err((syndrome(found.status), vendor_syndrome(&found)))
            } else if ahead > 0 && self.has_failed {
                FLUSHED
            } else {
                Ok(())
            }));
        }
    }

    /// Completes the oldest request, with a CQE if it is signaled or failed. Returns whether there was room for that.
    fn retire(&mut self, outcome: RelayOutcome) -> bool {
        let position = self.head;
        let entry = *self.entry(position);
        if entry.signaled || outcome.is_err() {
            let (syndrome, vendor_syndrome) = outcome.err().unwrap_or((0, 0));
            let cqe = Cqe {
                opcode: if outcome.is_ok() {
                    CqeOpcode::Req
                } else {
                    CqeOpcode::ReqErr
                },
                qpn: self.parts.qpn,
                wqe_counter: entry.index,
                byte_count: if outcome.is_ok() { entry.len_bytes } else { 0 },
                send_opcode: entry.opcode,
                syndrome,
                vendor_syndrome,
                ..Cqe::default()
            };
            if !self.parts.completions.push(&cqe) {
                return false;
            }
        }
        if outcome.is_err() {
            self.has_failed = true;
            self.is_closed = true;
        }
        self.head = position.wrapping_add(1);
        // Its own completion, and no longer of use.
        let own = self.found.front().is_some_and(|found| {
            WorkId::from_wr_id(found.wr_id)
                == WorkId {
                    generation: self.generation,
                    position,
                }
        });
        if own {
            self.found.pop();
        }
        true
    }
}
