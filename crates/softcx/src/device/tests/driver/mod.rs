//! A driver for tests of clients: it plays libmlx5 and the process, by memory and numbers alone.
//!
//! The process may be another one. Its memory is then a mapping that it shares with the test: the test stores into it as the
//! process would, and the device has nothing but the addresses.
#![allow(unsafe_code)] // plays a process and its memory

mod process;

use std::sync::atomic::{Ordering, fence};
use std::sync::{Arc, Mutex};

pub(crate) use self::process::Process;
use crate::device::client::{
    AddressVector, Client, CqParts, DeviceEvent, Errno, EventSink, MrRange, QpAttributes, QpParts,
    SrqParts, Transport, mask,
};
use crate::device::handle::Device;
use doorbell_wire::mlx5::{Cqe, CqeOpcode};

/// `ibv_access_flags` of everything that a region may have.
pub(crate) const ALL: u32 = 15;

/// Events in the order in which they came.
#[derive(Debug, Default)]
pub(crate) struct RecordedEvents(Mutex<Vec<DeviceEvent>>);

impl EventSink for RecordedEvents {
    fn event(&self, event: DeviceEvent) {
        self.0.lock().unwrap().push(event);
    }
}

impl RecordedEvents {
    pub(crate) fn take(&self) -> Vec<DeviceEvent> {
        std::mem::take(&mut self.0.lock().unwrap())
    }
}

/// A context with one UAR page and one domain.
pub(crate) struct Driver {
    pub(crate) client: Client,
    pub(crate) process: Process,
    pub(crate) events: Arc<RecordedEvents>,
    pub(crate) pd: u32,
    pub(crate) uar: u32,
    pub(crate) page: u64,
    /// The node to which queue pairs are connected.
    pub(crate) dlid: u16,
    /// The address to which they are connected by UDP.
    pub(crate) dgid: [u8; 16],
    /// Their `ibv_mtu`.
    pub(crate) mtu: u8,
    /// Reads and atomics on their way at once, and those of the peer that are served at once.
    pub(crate) depths: [u8; 2],
    next_index: u32,
}

/// A completion queue as its driver has it.
pub(crate) struct DriverCq {
    pub(crate) cqn: u32,
    pub(crate) ring: u64,
    pub(crate) cqes: u32,
    pub(crate) cqe_bytes: u32,
    pub(crate) record: u64,
    pub(crate) consumed: u32,
    pub(crate) events: Arc<RecordedEvents>,
    pub(crate) arm_sn: u32,
}

/// A queue pair as its driver has it.
pub(crate) struct DriverQp {
    pub(crate) qpn: u32,
    pub(crate) parts: QpParts,
    pub(crate) posted: u16,
    pub(crate) received: u16,
    /// Which of the page's registers it rings.
    pub(crate) register: u64,
}

/// A shared receive queue as its driver has it.
pub(crate) struct DriverSrq {
    pub(crate) srqn: u32,
    pub(crate) parts: SrqParts,
    free: Vec<u16>,
    tail: Option<u16>,
    posted: u16,
}

/// A WQE's opcode and segments, as bytes.
pub(crate) struct Work {
    pub(crate) opcode: u8,
    /// Flags of the control segment: 8 for a completion, 2 for a solicited event.
    pub(crate) flags: u8,
    pub(crate) imm: u32,
    pub(crate) segments: Vec<[u8; 16]>,
}

pub(crate) fn remote(addr: u64, rkey: u32) -> [u8; 16] {
    let mut segment = [0; 16];
    segment[..8].copy_from_slice(&addr.to_be_bytes());
    segment[8..12].copy_from_slice(&rkey.to_be_bytes());
    segment
}

pub(crate) fn data(addr: u64, lkey: u32, len_bytes: u32) -> [u8; 16] {
    let mut segment = [0; 16];
    segment[..4].copy_from_slice(&len_bytes.to_be_bytes());
    segment[4..8].copy_from_slice(&lkey.to_be_bytes());
    segment[8..].copy_from_slice(&addr.to_be_bytes());
    segment
}

impl Work {
    pub(crate) fn new(opcode: u8, segments: &[[u8; 16]]) -> Work {
        Work {
            opcode,
            flags: 8,
            imm: 0,
            segments: segments.to_vec(),
        }
    }
}

impl Driver {
    pub(crate) fn new(device: &Device, mut process: Process) -> Driver {
        let events = Arc::<RecordedEvents>::default();
        let client = Client::open(device, process.space, events.clone());
        let page = process.place(4096, 4096);
        // SAFETY: a page of the mapping, which lives as long as the client.
        let uar = unsafe { client.alloc_uar(process.pointer(page, 4096)) }.unwrap();
        let pd = client.alloc_pd().unwrap();
        Driver {
            client,
            process,
            events,
            pd,
            uar,
            page,
            dlid: 1,
            dgid: [0; 16],
            mtu: 3,
            depths: [4, 4],
            next_index: 0x100,
        }
    }

    /// Some memory, and its key.
    pub(crate) fn region(&mut self, len_bytes: usize, access: u32) -> (u64, u32) {
        let align = if len_bytes < 4096 { 64 } else { 4096 };
        let start = self.process.place(len_bytes, align);
        let range = MrRange {
            start,
            len_bytes: len_bytes as u64,
            iova: start,
        };
        (start, self.client.reg_mr(self.pd, range, access).unwrap())
    }

    pub(crate) fn cq_parts(&mut self, cqes: u32, cqe_bytes: u32) -> (CqParts, Arc<RecordedEvents>) {
        let events = Arc::<RecordedEvents>::default();
        let ring = self.cq_ring(cqes, cqe_bytes);
        let parts = CqParts {
            ring,
            cqes,
            cqe_bytes,
            record: self.process.place(8, 64),
            uar: self.uar,
            events: Some(events.clone()),
            padded: false,
            ignore_overrun: false,
        };
        (parts, events)
    }

    /// A fresh ring.
    pub(crate) fn cq_ring(&mut self, cqes: u32, cqe_bytes: u32) -> u64 {
        let ring = self.process.place((cqes * cqe_bytes) as usize, 4096);
        for end in 1..=u64::from(cqes) {
            self.process
                .write(ring + end * u64::from(cqe_bytes) - 1, &[0xf0]);
        }
        ring
    }

    pub(crate) fn cq(&mut self, cqes: u32, cqe_bytes: u32) -> DriverCq {
        let (parts, events) = self.cq_parts(cqes, cqe_bytes);
        DriverCq {
            cqn: self.client.create_cq(parts.clone()).unwrap(),
            ring: parts.ring,
            cqes,
            cqe_bytes,
            record: parts.record,
            consumed: 0,
            events,
            arm_sn: 0,
        }
    }

    pub(crate) fn qp_parts(&mut self, transport: Transport, cqs: [&DriverCq; 2]) -> QpParts {
        self.next_index += 1;
        QpParts {
            transport,
            pd: self.pd,
            send_cq: cqs[0].cqn,
            recv_cq: cqs[1].cqn,
            srq: None,
            send_ring: self.process.place(64 * 64, 64),
            send_wqebbs: 64,
            recv_ring: self.process.place(64 * 64, 64),
            recv_wqes: 64,
            recv_stride_bytes: 64,
            record: self.process.place(8, 64),
            uar: self.uar,
            user_index: self.next_index,
            blocks_loopback: false,
        }
    }

    pub(crate) fn qp(&mut self, transport: Transport, cqs: [&DriverCq; 2]) -> DriverQp {
        let parts = self.qp_parts(transport, cqs);
        self.qp_of(parts)
    }

    pub(crate) fn qp_of(&mut self, parts: QpParts) -> DriverQp {
        DriverQp {
            qpn: self.client.create_qp(&parts).unwrap(),
            parts,
            posted: 0,
            received: 0,
            register: 0x800,
        }
    }

    pub(crate) fn srq(&mut self, wqes: u32) -> DriverSrq {
        let parts = SrqParts {
            pd: self.pd,
            ring: self.process.place(wqes as usize * 64, 64),
            wqes,
            stride_bytes: 64,
            record: self.process.place(4, 64),
        };
        for index in 0..wqes as u16 {
            let next = (index + 1) % wqes as u16;
            self.link(&parts, index, next);
        }
        DriverSrq {
            srqn: self.client.create_srq(parts).unwrap(),
            parts,
            // One is always left, so that the chain has an end; as libmlx5 does it.
            free: (0..wqes as u16).rev().collect(),
            tail: None,
            posted: 0,
        }
    }

    fn link(&self, parts: &SrqParts, index: u16, next: u16) {
        let at = parts.ring + u64::from(index) * u64::from(parts.stride_bytes);
        self.process.write(at + 2, &next.to_be_bytes());
    }

    /// Posts to a shared receive queue: the index that its completion will name.
    pub(crate) fn post_srq(&self, srq: &mut DriverSrq, segments: &[[u8; 16]]) -> u16 {
        let index = srq.free.pop().unwrap();
        if let Some(tail) = srq.tail {
            self.link(&srq.parts, tail, index);
        }
        srq.tail = Some(index);
        let at = srq.parts.ring + u64::from(index) * u64::from(srq.parts.stride_bytes);
        self.put_segments(at + 16, segments, srq.parts.stride_bytes as usize / 16 - 1);
        srq.posted = srq.posted.wrapping_add(1);
        fence(Ordering::SeqCst);
        self.process.store(srq.parts.record, srq.posted.into());
        index
    }

    fn put_segments(&self, at: u64, segments: &[[u8; 16]], room: usize) {
        self.process.write(at, segments.as_flattened());
        if segments.len() < room {
            let end = data(0, 0x100, 0);
            self.process.write(at + segments.len() as u64 * 16, &end);
        }
    }

    /// Gives back the place of a receive that was completed.
    pub(crate) fn free_srq(&self, srq: &mut DriverSrq, index: u16) {
        srq.free.insert(0, index);
    }

    pub(crate) fn post_recv(&self, qp: &mut DriverQp, segments: &[[u8; 16]]) {
        let slot = u32::from(qp.received) % qp.parts.recv_wqes;
        let stride = qp.parts.recv_stride_bytes;
        let at = qp.parts.recv_ring + u64::from(slot * stride);
        self.put_segments(at, segments, stride as usize / 16);
        qp.received = qp.received.wrapping_add(1);
        fence(Ordering::SeqCst);
        self.process.store(qp.parts.record, qp.received.into());
    }

    /// Posts without a doorbell, and returns the value for the register.
    pub(crate) fn post(&self, qp: &mut DriverQp, work: &Work) -> [u8; 8] {
        let ds = 1 + work.segments.len();
        let mut bytes = vec![0; 16];
        bytes[..4]
            .copy_from_slice(&(u32::from(qp.posted) << 8 | u32::from(work.opcode)).to_be_bytes());
        bytes[4..8].copy_from_slice(&(qp.qpn << 8 | ds as u32).to_be_bytes());
        bytes[11] = work.flags;
        bytes[12..16].copy_from_slice(&work.imm.to_be_bytes());
        bytes.extend_from_slice(work.segments.as_flattened());
        bytes.resize(ds.div_ceil(4) * 64, 0);
        for (block, bytes) in bytes.chunks(64).enumerate() {
            let slot = (u32::from(qp.posted) + block as u32) % qp.parts.send_wqebbs;
            self.process
                .write(qp.parts.send_ring + u64::from(slot) * 64, bytes);
        }
        qp.posted = qp.posted.wrapping_add(ds.div_ceil(4) as u16);
        fence(Ordering::SeqCst);
        self.process.store(qp.parts.record + 4, qp.posted.into());
        std::array::from_fn(|at| bytes[at])
    }

    pub(crate) fn send(&self, qp: &mut DriverQp, work: &Work) {
        let doorbell = self.post(qp, work);
        self.process.ring(self.page + qp.register, doorbell);
    }

    pub(crate) fn poll(&self, cq: &mut DriverCq) -> Option<Cqe> {
        let at = self.cqe_at(cq, cq.consumed);
        let bytes: [u8; 64] = self.process.read(at, 64).try_into().unwrap();
        let cqe = Cqe::parse(&bytes);
        let odd = cq.consumed & cq.cqes != 0;
        if cqe.opcode == CqeOpcode::Invalid || cqe.owner != odd {
            return None;
        }
        cq.consumed = cq.consumed.wrapping_add(1);
        self.process.store(cq.record, cq.consumed & 0xff_ffff);
        Some(cqe)
    }

    /// Where the CQE of that count lies.
    pub(crate) fn cqe_at(&self, cq: &DriverCq, count: u32) -> u64 {
        let slot = u64::from(count % cq.cqes);
        cq.ring + slot * u64::from(cq.cqe_bytes) + u64::from(cq.cqe_bytes - 64)
    }

    pub(crate) fn arm(&self, cq: &DriverCq, only_solicited: bool) {
        let word = cq.arm_sn << 28 | u32::from(only_solicited) << 24 | (cq.consumed & 0xff_ffff);
        self.process.store(cq.record + 4, word);
        let mut doorbell = [0; 8];
        doorbell[..4].copy_from_slice(&word.to_be_bytes());
        doorbell[4..].copy_from_slice(&cq.cqn.to_be_bytes());
        self.process.ring(self.page + 0x20, doorbell);
    }

    /// Completion events since the last call, which the driver has acknowledged.
    pub(crate) fn events(cq: &mut DriverCq) -> usize {
        let events = cq.events.take();
        assert!(events.iter().all(|event| *event == DeviceEvent::Completion));
        cq.arm_sn = (cq.arm_sn + events.len() as u32) & 3;
        events.len()
    }

    pub(crate) fn modify(
        &self,
        qp: &DriverQp,
        attributes: &QpAttributes,
        named: u32,
    ) -> Result<(), Errno> {
        self.client.modify_qp(qp.qpn, attributes, named)
    }

    /// All the way to RTS, towards another queue pair.
    pub(crate) fn connect(&self, qp: &DriverQp, dest_qpn: u32) {
        self.init(qp);
        self.to_rtr(qp, dest_qpn);
        self.to_rts(qp);
    }

    pub(crate) fn init(&self, qp: &DriverQp) {
        let attributes = QpAttributes {
            state: 1,
            port: 1,
            access: ALL,
            qkey: 0x1111,
            ..QpAttributes::default()
        };
        let identity = match qp.parts.transport {
            Transport::Ud => mask::QKEY,
            _ => mask::ACCESS_FLAGS,
        };
        let named = mask::STATE | mask::PKEY_INDEX | mask::PORT | identity;
        self.modify(qp, &attributes, named).unwrap();
    }

    pub(crate) fn to_rtr(&self, qp: &DriverQp, dest_qpn: u32) {
        let attributes = QpAttributes {
            state: 2,
            path_mtu: self.mtu,
            dest_qpn,
            rq_psn: 0x1000,
            max_dest_rd_atomic: self.depths[1],
            min_rnr_timer: 1,
            path: AddressVector {
                dlid: self.dlid,
                dgid: self.dgid,
                port: 1,
                ..AddressVector::default()
            },
            ..QpAttributes::default()
        };
        let path = mask::AV | mask::PATH_MTU | mask::DEST_QPN | mask::RQ_PSN;
        let named = match qp.parts.transport {
            Transport::Ud => 0,
            Transport::Uc => path,
            Transport::Rc => path | mask::MAX_DEST_RD_ATOMIC | mask::MIN_RNR_TIMER,
        };
        self.modify(qp, &attributes, mask::STATE | named).unwrap();
    }

    pub(crate) fn to_rts(&self, qp: &DriverQp) {
        let attributes = QpAttributes {
            state: 3,
            sq_psn: 0x1000,
            timeout: 8,
            retry_count: 3,
            rnr_retry: 3,
            max_rd_atomic: self.depths[0],
            ..QpAttributes::default()
        };
        let retries = mask::TIMEOUT | mask::RETRY_CNT | mask::RNR_RETRY | mask::MAX_QP_RD_ATOMIC;
        let named = match qp.parts.transport {
            Transport::Rc => mask::SQ_PSN | retries,
            _ => mask::SQ_PSN,
        };
        self.modify(qp, &attributes, mask::STATE | named).unwrap();
    }

    /// A transition that names nothing but the state.
    pub(crate) fn to_state(&self, qp: &DriverQp, state: u8) -> Result<(), Errno> {
        let attributes = QpAttributes {
            state,
            ..QpAttributes::default()
        };
        self.modify(qp, &attributes, mask::STATE)
    }

    pub(crate) fn state(&self, qp: &DriverQp) -> u8 {
        self.client.query_qp(qp.qpn).unwrap().state
    }
}
