//! One end of a connection, with its queues and what a program does with them.
#![allow(unsafe_code)] // queues over raw memory, and the stores of programs

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use crate::device::client::AddressVector;
use crate::device::fabric::gid_of;
use crate::device::{
    Access, Attributes, Device, LinkLayer, Pages, QueuePair, QueuePairSizes, State,
};
use doorbell_wire::bytecode::{At, Program, ProgramOp, Role, Targets};
use doorbell_wire::mlx5::{
    CqRing, CqRingConfig, Cqe, DataSegment, Posted, RecvQueue, RecvQueueConfig, SendQueue,
    SendQueueConfig, SendRequest, Syndrome,
};

/// Segments of a receive.
const RECV_SEGMENTS: u32 = 4;
/// Segments and inline bytes of a send.
const SEND_SEGMENTS: u32 = 8;
pub(crate) const INLINE: u32 = 256;

/// How both ends of a pair are made.
#[derive(Clone, Copy)]
pub(crate) struct Shape {
    pub(crate) attributes: Attributes,
    pub(crate) send_wqebbs: u32,
    pub(crate) recv_wqes: u32,
    pub(crate) send_cqes: u32,
    pub(crate) recv_cqes: u32,
    pub(crate) memory_bytes: usize,
    pub(crate) access: Access,
}

impl Default for Shape {
    fn default() -> Shape {
        Shape {
            attributes: Attributes::default(),
            send_wqebbs: 64,
            recv_wqes: 64,
            send_cqes: 64,
            recv_cqes: 64,
            memory_bytes: 1 << 16,
            access: Access::ALL,
        }
    }
}

/// One end: a queue pair, its queues, and registered memory. Dropped in the order of the fields: queues, pair, memory.
pub(crate) struct End {
    targets: Targets,
    pub(crate) send: SendQueue,
    pub(crate) recv: RecvQueue,
    pub(crate) send_cq: CqRing,
    pub(crate) recv_cq: CqRing,
    sent: VecDeque<Posted>,
    taken: [u32; 2],
    bases: [usize; 3],
    pub(crate) qp: QueuePair,
    pub(crate) pd: u32,
    pub(crate) key: u32,
    pub(crate) memory: Pages,
    shape: Shape,
}

impl End {
    pub(crate) fn new(device: &Device, shape: Shape) -> End {
        let pd = device.create_pd();
        let sizes = QueuePairSizes {
            send_wqebbs: shape.send_wqebbs,
            recv_wqes: shape.recv_wqes,
            recv_stride_bytes: RecvQueue::stride_bytes(RECV_SEGMENTS),
            cqes: [shape.send_cqes, shape.recv_cqes],
        };
        let qp = QueuePair::new(device, pd, &sizes).unwrap();
        let at = *qp.memory();
        let mut targets = Targets::new();
        let record = targets.register("record", Role::DoorbellRecord, 8);
        let uar = targets.register("uar", Role::Uar, 512);
        let rings = targets.register("completions", Role::Completions, u64::from(u32::MAX));
        let marks = targets.register("marks", Role::Marks, u64::from(u32::MAX));
        // SAFETY: all of it is memory of the queue pair, as long as these say, and it outlives the queues in the same struct.
        let (send, recv, send_cq, recv_cq) = unsafe {
            let send = SendQueue::new(SendQueueConfig {
                ring: at.send_ring,
                wqebb_count: shape.send_wqebbs,
                qpn: qp.qpn(),
                max_segments: if shape.send_wqebbs < 4 {
                    1
                } else {
                    SEND_SEGMENTS
                },
                max_inline_bytes: if shape.send_wqebbs < 8 { 0 } else { INLINE },
                record: record.dword(4).unwrap(),
                uar: [uar.block(0, 256).unwrap(), uar.block(256, 256).unwrap()],
            });
            let recv = RecvQueue::new(RecvQueueConfig {
                ring: at.recv_ring,
                wqe_count: shape.recv_wqes,
                max_segments: RECV_SEGMENTS,
                record: record.dword(0).unwrap(),
            });
            let cq = |side: usize| {
                CqRing::new(CqRingConfig {
                    ring: at.cqs[side],
                    cqe_count: at.sizes.cqes[side],
                    record: at.cq_records[side],
                    marks: at.cq_marks[side],
                    completions: rings,
                    marks_target: marks,
                })
                .unwrap()
            };
            (send.unwrap(), recv.unwrap(), cq(0), cq(1))
        };
        send_cq.reset();
        recv_cq.reset();
        let memory = Pages::new(shape.memory_bytes).unwrap();
        let base = memory.start().as_ptr();
        // SAFETY: the pages outlive the end, and the device does nothing behind its back.
        let key =
            unsafe { device.register(pd, base, memory.len_bytes() as u64, shape.access) }.unwrap();
        End {
            targets,
            send,
            recv,
            send_cq,
            recv_cq,
            sent: VecDeque::new(),
            taken: [0; 2],
            bases: [at.record as usize, at.uar[0] as usize, 0],
            qp,
            pd,
            key,
            memory,
            shape,
        }
    }

    pub(crate) fn connect(&self, other: &End) {
        self.qp.init(self.shape.attributes).unwrap();
        self.qp.connect(&other.qp.local()).unwrap();
    }

    /// Connects to a queue pair by LID or GID, as a program with the verbs would; both ends start at PSN 0.
    pub(crate) fn aim(&self, node: u16, qpn: u32) {
        let device = self.qp.device();
        let path = AddressVector {
            dlid: if device.link() == LinkLayer::InfiniBand {
                node
            } else {
                0
            },
            dgid: gid_of(device.link(), node),
            is_global: true,
            ..AddressVector::default()
        };
        self.qp.init(self.shape.attributes).unwrap();
        self.qp.connect_by_path(&path, qpn, (0, 0));
    }

    /// The key of another registration of a part of its memory.
    pub(crate) fn register_again(
        &self,
        device: &Device,
        offset: u64,
        len_bytes: u64,
        access: Access,
    ) -> u32 {
        let base = self.memory.at(offset as usize);
        // SAFETY: memory of this end, which outlives what the test does with the device.
        unsafe { device.register(self.pd, base, len_bytes, access) }.unwrap()
    }

    /// Reset of the queue pair and of everything that belongs to the driver.
    pub(crate) fn reset(&mut self) {
        self.qp.reset().unwrap();
        self.send.reset();
        self.recv.reset();
        self.send_cq.reset();
        self.recv_cq.reset();
        for word in [0, 4] {
            self.store(Role::DoorbellRecord, 0, word, 0);
        }
        self.sent.clear();
        self.taken = [0; 2];
    }

    pub(crate) fn state(&self) -> State {
        self.qp.status().state()
    }

    /// First address of the memory.
    pub(crate) fn at(&self, offset: usize) -> u64 {
        self.memory.at(offset) as u64
    }

    pub(crate) fn segment(&self, offset: usize, len_bytes: usize) -> DataSegment {
        DataSegment {
            len_bytes: len_bytes as u32,
            lkey: self.key,
            addr: self.at(offset),
        }
    }

    pub(crate) fn write(&self, offset: usize, bytes: &[u8]) {
        assert!(offset + bytes.len() <= self.memory.len_bytes());
        // SAFETY: within the memory; no device has a turn now.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.memory.at(offset), bytes.len())
        };
    }

    pub(crate) fn read(&self, offset: usize, len_bytes: usize) -> Vec<u8> {
        assert!(offset + len_bytes <= self.memory.len_bytes());
        // SAFETY: within the memory; no device has a turn now.
        unsafe { std::slice::from_raw_parts(self.memory.at(offset), len_bytes) }.to_vec()
    }

    pub(crate) fn word(&self, offset: usize) -> u64 {
        u64::from_ne_bytes(self.read(offset, 8).try_into().unwrap())
    }

    pub(crate) fn post(&mut self, request: &SendRequest<'_>) -> Posted {
        let posted = self.send.post(request).unwrap();
        self.sent.push_back(posted);
        posted
    }

    /// Makes a program of what was posted.
    pub(crate) fn commit(&mut self) -> Program {
        let mut program = Program::new(&self.targets);
        self.send.commit(&mut program).unwrap();
        program
    }

    pub(crate) fn commit_blueflame(&mut self) -> Program {
        let mut program = Program::new(&self.targets);
        self.send.commit_blueflame(&mut program).unwrap();
        program
    }

    /// Rings the doorbell for the posted requests.
    pub(crate) fn ring(&mut self) {
        let program = self.commit();
        self.execute(&program);
    }

    pub(crate) fn send(&mut self, request: &SendRequest<'_>) -> Posted {
        let posted = self.post(request);
        self.ring();
        posted
    }

    pub(crate) fn receive(&mut self, segments: &[DataSegment]) {
        self.recv.post(segments).unwrap();
        self.commit_receives();
    }

    /// Commits the posted receives to the device.
    pub(crate) fn commit_receives(&mut self) {
        let mut program = Program::new(&self.targets);
        self.recv.commit(&mut program).unwrap();
        self.execute(&program);
    }

    /// Overwrites one byte of a WQE in the ring.
    pub(crate) fn spoil(&self, posted: Posted, at: usize, value: u8) {
        let block = posted.index % self.shape.send_wqebbs;
        // SAFETY: a block of the ring; no device has a turn now.
        unsafe { *self.qp.memory().send_ring.add(block as usize * 64 + at) = value };
    }

    fn address(&self, at: At) -> *mut u8 {
        let base = self.bases[at.target.index() as usize];
        std::ptr::with_exposed_provenance_mut(base + at.offset as usize)
    }

    /// Carries out the stores and fences of a program, and reports the doorbell.
    pub(crate) fn execute(&self, program: &Program) {
        self.execute_unreported(program);
        self.qp.rung();
    }

    /// As an executor that cannot report doorbells.
    pub(crate) fn execute_unreported(&self, program: &Program) {
        for op in program.ops() {
            // SAFETY: targets are record and UAR of the queue pair, offsets were checked when the program was made, and both
            // words are aligned.
            unsafe {
                match op {
                    ProgramOp::StoreDword { at, value } => {
                        AtomicU32::from_ptr(self.address(at).cast())
                            .store(value, Ordering::Relaxed);
                    }
                    ProgramOp::StoreQword { at, value } => {
                        AtomicU64::from_ptr(self.address(at).cast())
                            .store(value, Ordering::Relaxed);
                    }
                    ProgramOp::CopyBlock { at, bytes } => {
                        let start: *mut u8 = self.address(at);
                        for (i, chunk) in bytes.chunks_exact(8).enumerate() {
                            let word = u64::from_ne_bytes(chunk.try_into().unwrap());
                            AtomicU64::from_ptr(start.add(i * 8).cast())
                                .store(word, Ordering::Relaxed);
                        }
                    }
                    ProgramOp::Fence(_) => fence(Ordering::SeqCst),
                    other => panic!("{other:?} in a program of stores"),
                }
            }
        }
    }

    /// Stores a dword of the record, or a qword of the UAR, without a program.
    pub(crate) fn store(&self, role: Role, base: usize, offset: usize, value: u64) {
        let at = std::ptr::with_exposed_provenance_mut::<u8>(self.bases[base] + offset);
        // SAFETY: only used on record and UAR, with offsets inside of them.
        unsafe {
            match role {
                Role::Uar => {
                    AtomicU64::from_ptr(at.cast()).store(value, Ordering::Release);
                    self.qp.rung();
                }
                _ => AtomicU32::from_ptr(at.cast()).store(value as u32, Ordering::Release),
            }
        }
    }

    /// The next completion of the send queue, given back to the device at once.
    pub(crate) fn sent(&mut self) -> Option<Cqe> {
        let cqe = self.send_cq.cqe(self.taken[0])?;
        self.taken[0] = self.taken[0].wrapping_add(1);
        self.send_cq.set_consumer_index(self.taken[0]);
        while let Some(posted) = self.sent.pop_front() {
            self.send.release(posted.end()).unwrap();
            if posted.index as u16 == cqe.wqe_counter {
                return Some(cqe);
            }
        }
        panic!("a completion for nothing that was posted: {cqe:?}");
    }

    /// The next completion of the receive queue.
    pub(crate) fn received(&mut self) -> Option<Cqe> {
        let cqe = self.recv_cq.cqe(self.taken[1])?;
        self.taken[1] = self.taken[1].wrapping_add(1);
        self.recv_cq.set_consumer_index(self.taken[1]);
        self.recv
            .release(self.recv.consumer_index().wrapping_add(1))
            .unwrap();
        Some(cqe)
    }

    /// All completions of the send queue: WQE counter and syndrome, `None` for success.
    pub(crate) fn all_sent(&mut self) -> Vec<(u16, Option<Syndrome>)> {
        std::iter::from_fn(|| self.sent())
            .map(|cqe| (cqe.wqe_counter, Syndrome::from_raw(cqe.syndrome)))
            .collect()
    }

    /// The same of the receive queue.
    pub(crate) fn all_received(&mut self) -> Vec<(u16, Option<Syndrome>)> {
        std::iter::from_fn(|| self.received())
            .map(|cqe| (cqe.wqe_counter, Syndrome::from_raw(cqe.syndrome)))
            .collect()
    }
}
