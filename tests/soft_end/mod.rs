//! One end of a connection over the software ConnectX, for tests and benchmarks that stay below endpoints.
#![allow(unsafe_code)] // queues over the memory of a queue pair
#![allow(dead_code)] // each of its users needs another part

use std::ptr::NonNull;

use doorbell::__private::{Outcome, Owner, execute};
use doorbell_softcx::device::{Access, Attributes, Device, Pages, QueuePair, QueuePairSizes};
use doorbell_wire::bytecode::{Program, Role, TargetId, Targets};
use doorbell_wire::mlx5::{
    CqRing, CqRingConfig, Cqe, DataSegment, SendQueue, SendQueueConfig, SendRequest,
};

/// A queue pair as the owner of programs.
pub struct Pair {
    targets: Targets,
    pub qp: QueuePair,
}

// SAFETY: the table never changes, and the bases are memory of the queue pair, as long as the targets say.
unsafe impl Owner for Pair {
    fn targets(&self) -> &Targets {
        &self.targets
    }
    fn base(&self, target: TargetId) -> Option<NonNull<u8>> {
        let memory = self.qp.memory();
        NonNull::new(match target.index() {
            0 => memory.record.cast(),
            1 => memory.uar[0],
            2 => memory.cqs[0],
            _ => memory.cq_marks[0].cast(),
        })
    }
    fn progress(&self) -> bool {
        self.qp.device().progress()
    }
    fn rung(&self) {
        self.qp.rung();
    }
}

/// One end of a connection: a queue pair, its send queue and completions, and memory that is never freed.
pub struct End {
    pub send: SendQueue,
    pub cq: CqRing,
    pub consumer: u32,
    program: Program,
    pub pair: Pair,
    pub key: u32,
    pub memory: &'static Pages,
}

const CQES: u32 = 256;

static KEPT: std::sync::Mutex<Vec<&'static Pages>> = std::sync::Mutex::new(Vec::new());

impl End {
    pub fn new(device: &Device, memory_bytes: usize) -> End {
        let pd = device.create_pd();
        let sizes = QueuePairSizes {
            send_wqebbs: 256,
            recv_wqes: 16,
            recv_stride_bytes: 16,
            cqes: [CQES, 16],
        };
        let qp = QueuePair::new(device, pd, &sizes).unwrap();
        let at = *qp.memory();
        let mut targets = Targets::new();
        let record = targets.register("record", Role::DoorbellRecord, 8);
        let uar = targets.register("uar", Role::Uar, 512);
        let ring = u64::from(CQES) * 64;
        let completions = targets.register("completions", Role::Completions, ring);
        let marks = targets.register("marks", Role::Marks, u64::from(CQES) * 4);
        // SAFETY: memory of the queue pair, as long as these say, which outlives the queues in the same struct.
        let (send, cq) = unsafe {
            let send = SendQueue::new(SendQueueConfig {
                ring: at.send_ring,
                wqebb_count: sizes.send_wqebbs,
                qpn: qp.qpn(),
                max_segments: 4,
                max_inline_bytes: 64,
                record: record.dword(4).unwrap(),
                uar: [uar.block(0, 256).unwrap(), uar.block(256, 256).unwrap()],
            });
            let cq = CqRing::new(CqRingConfig {
                ring: at.cqs[0],
                cqe_count: CQES,
                record: at.cq_records[0],
                marks: at.cq_marks[0],
                completions,
                marks_target: marks,
            });
            (send.unwrap(), cq.unwrap())
        };
        cq.reset();
        // Never freed, because the device may use it for its whole lifetime. Kept reachable, so that leak checkers do not report it.
        let memory: &'static Pages = Box::leak(Box::new(Pages::new(memory_bytes).unwrap()));
        KEPT.lock().unwrap().push(memory);
        let (start, len_bytes) = (memory.start().as_ptr(), memory.len_bytes() as u64);
        // SAFETY: it was just leaked.
        let key = unsafe { device.register(pd, start, len_bytes, Access::ALL) };
        End {
            send,
            cq,
            consumer: 0,
            program: Program::new(&targets),
            pair: Pair { targets, qp },
            key: key.unwrap(),
            memory,
        }
    }

    pub fn pair(device: &Device, memory_bytes: usize) -> (End, End) {
        let ends = (
            End::new(device, memory_bytes),
            End::new(device, memory_bytes),
        );
        for (end, other) in [(&ends.0, &ends.1), (&ends.1, &ends.0)] {
            end.pair.qp.init(Attributes::default()).unwrap();
            end.pair.qp.connect(&other.pair.qp.local()).unwrap();
        }
        ends
    }

    /// Resets the queues, in the device and here.
    pub fn reset(&mut self) {
        self.pair.qp.reset().unwrap();
        self.send.reset();
        self.cq.reset();
        self.consumer = 0;
        let memory = self.pair.qp.memory();
        // SAFETY: the doorbell record lives as long as the queue pair, and the device does not look at it in RESET.
        unsafe { memory.record.cast::<u64>().write_volatile(0) };
    }

    pub fn segment(&self, offset: usize, len_bytes: usize) -> DataSegment {
        DataSegment {
            len_bytes: len_bytes as u32,
            lkey: self.key,
            addr: self.at(offset),
        }
    }

    pub fn at(&self, offset: usize) -> u64 {
        self.memory.at(offset) as u64
    }

    /// Posts one request with a doorbell of its own.
    #[inline]
    pub fn ring(&mut self, request: &SendRequest<'_>) {
        self.send.post(request).unwrap();
        self.program.clear();
        self.send.commit(&mut self.program).unwrap();
        assert_eq!(execute(&self.program, &self.pair, 0), Outcome::Done);
    }

    /// Waits for the next completion, which must be successful.
    #[inline]
    pub fn wait(&mut self) {
        loop {
            if let Some(cqe) = self.poll() {
                assert_eq!(cqe.syndrome, 0);
                return;
            }
            self.pair.progress();
        }
    }

    /// The next completion.
    #[inline]
    pub fn poll(&mut self) -> Option<Cqe> {
        let cqe = self.cq.cqe(self.consumer)?;
        self.consumer = self.consumer.wrapping_add(1);
        self.cq.set_consumer_index(self.consumer);
        // Each request takes one block here.
        let from = self.send.consumer_index();
        let done = cqe.wqe_counter.wrapping_sub(from as u16);
        let upto = from.wrapping_add(u32::from(done) + 1);
        self.send.release(upto).unwrap();
        Some(cqe)
    }
}
