//! Reads WQEs from their rings: parses the work request, and puts its segments into the gather.

use super::{Gather, GatherPart, WQE_BYTES};
use crate::device::client::Transport;
use crate::device::dma::DmaRing;
use crate::device::packet::KeyedSpan;
use crate::device::qp::QpSetup;
use crate::device::space::AccessFault;
use doorbell_wire::mlx5::{Segment, Syndrome, WindowUpdate, Wqe, parse_recv};

/// What the control, address and atomic segments of a WQE say.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct WqeRequest {
    pub(crate) opcode: u8,
    pub(crate) ds: u8,
    pub(crate) signaled: bool,
    pub(crate) solicited: bool,
    pub(crate) fence: bool,
    pub(crate) ordered: bool,
    pub(crate) imm: u32,
    pub(crate) remote_addr: u64,
    pub(crate) rkey: u32,
    pub(crate) operand: u64,
    pub(crate) compare: u64,
    pub(crate) total_bytes: u64,
}

impl Gather {
    /// Reads the WQE that starts at the running WQEBB count `index`; `limit_wqebbs` have been announced by doorbell.
    ///
    /// # Errors
    /// A WQE that is not one, that belongs to another queue pair, or that is longer than what was announced.
    pub(crate) fn load(
        &mut self,
        parts: &QpSetup,
        index: u32,
        limit_wqebbs: u32,
    ) -> Result<WqeRequest, Syndrome> {
        self.of = None;
        self.count = 0;
        self.datagram = None;
        self.window = None;
        let (ring, qpn) = (&parts.send_ring, parts.qpn);
        let start = index as usize * 64;
        // What is announced does not change; how much is, a second look does not know.
        let valid = match limit_wqebbs {
            u32::MAX => 0,
            wqebbs => wqebbs as usize * 64,
        };
        ring.read_ahead(start, &mut self.bytes[..64], valid)
            .map_err(|AccessFault| Syndrome::LocalQpOp)?;
        let ds = usize::from(self.bytes[7] & 0x3f);
        if ds == 0 || ds.div_ceil(4) > limit_wqebbs as usize {
            return Err(Syndrome::LocalQpOp);
        }
        let len_bytes = ds * 16;
        if len_bytes > 64 {
            let rest = &mut self.bytes[64..len_bytes];
            ring.read_ahead(start + 64, rest, valid.saturating_sub(64))
                .map_err(|AccessFault| Syndrome::LocalQpOp)?;
        }
        let wqe = if parts.transport == Transport::Ud {
            Wqe::parse_datagram(&self.bytes[..len_bytes])
        } else {
            Wqe::parse(&self.bytes[..len_bytes])
        };
        let wqe = wqe.map_err(|_| Syndrome::LocalQpOp)?;
        if wqe.ctrl.qpn != qpn || wqe.ctrl.index != index as u16 {
            return Err(Syndrome::LocalQpOp);
        }
        self.count = 0;
        let base = self.bytes.as_ptr() as usize;
        for (part, segment) in self.parts.iter_mut().zip(wqe.segments()) {
            *part = match segment {
                Segment::Memory(s) => GatherPart::Memory(KeyedSpan {
                    lkey: s.lkey,
                    len_bytes: s.len_bytes,
                    addr: s.addr,
                }),
                Segment::Inline(data) => GatherPart::Inline {
                    at: (data.as_ptr() as usize - base) as u16,
                    len_bytes: data.len() as u16,
                },
            };
            self.count += 1;
        }
        let request = WqeRequest {
            opcode: wqe.ctrl.opcode_raw,
            ds: ds as u8,
            signaled: wqe.ctrl.signaled,
            solicited: wqe.ctrl.solicited,
            fence: wqe.ctrl.fence,
            ordered: wqe.ctrl.ordered,
            imm: wqe.ctrl.imm,
            remote_addr: wqe.remote.map_or(0, |remote| remote.addr),
            rkey: wqe.remote.map_or(0, |remote| remote.rkey),
            operand: wqe.atomic.map_or(0, |atomic| atomic.swap_or_add),
            compare: wqe.atomic.map_or(0, |atomic| atomic.compare),
            total_bytes: wqe.total_len(),
        };
        if parts.transport == Transport::Ud {
            self.datagram = wqe.datagram();
        }
        if request.opcode == WindowUpdate::OPCODE {
            self.window = wqe.window();
        }
        self.of = Some((qpn, index));
        Ok(request)
    }

    /// Reads a receive WQE, the one of a running count, behind which `waiting` more are posted. Its capacity in bytes.
    ///
    /// # Errors
    /// [`AccessFault`] if the ring cannot be read.
    pub(crate) fn load_recv(
        &mut self,
        ring: &DmaRing,
        index: u32,
        stride_bytes: u32,
        waiting: u16,
    ) -> Result<u64, AccessFault> {
        let valid = (usize::from(waiting) + 1) * stride_bytes as usize;
        let offset = index as usize * stride_bytes as usize;
        self.read_recv(ring, offset, stride_bytes, valid)
            .map(|stride| self.parse_recv(0, stride))
    }

    /// Reads a WQE of a shared receive queue: its capacity in bytes, and the index of the next one.
    ///
    /// # Errors
    /// [`AccessFault`] if the ring cannot be read.
    pub(crate) fn load_shared_recv(
        &mut self,
        ring: &DmaRing,
        offset: usize,
        stride_bytes: u32,
    ) -> Result<(u64, u16), AccessFault> {
        let stride = self.read_recv(ring, offset, stride_bytes, 0)?;
        // The next segment is 16 bytes; its index stands behind two reserved ones.
        let next = u16::from_be_bytes([self.bytes[2], self.bytes[3]]);
        Ok((self.parse_recv(16.min(stride), stride), next))
    }

    fn read_recv(
        &mut self,
        ring: &DmaRing,
        offset: usize,
        stride_bytes: u32,
        valid: usize,
    ) -> Result<usize, AccessFault> {
        self.of = None;
        self.count = 0;
        let stride = (stride_bytes as usize).min(WQE_BYTES);
        ring.read_ahead(offset, &mut self.bytes[..stride], valid)?;
        Ok(stride)
    }

    fn parse_recv(&mut self, start: usize, end: usize) -> u64 {
        let mut capacity = 0;
        let segments = parse_recv(&self.bytes[start..end]);
        for (part, s) in self.parts.iter_mut().zip(segments) {
            *part = GatherPart::Memory(KeyedSpan {
                lkey: s.lkey,
                len_bytes: s.len_bytes,
                addr: s.addr,
            });
            capacity += u64::from(s.len_bytes);
            self.count += 1;
        }
        capacity
    }
}
