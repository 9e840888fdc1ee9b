//! The data segments of one WQE, as the device works with them: bytes out of memory and into it, by offset.
#![allow(unsafe_code)] // copies to and from addresses that the key table resolved

use crate::mlx5::{Datagram, Segment, Syndrome, WindowUpdate, Wqe, parse_recv};
use crate::soft::client::Transport;
use crate::soft::copies::Copies;
use crate::soft::dma::Ring;
use crate::soft::keys::{Access, Keys, Refused};
use crate::soft::packet::{INLINE_BYTES, Payload, Span};
use crate::soft::qp::Parts;
use crate::soft::space::{Fault, Place};

/// Largest WQE: a receive of 64 segments of 16 bytes. One of the send ring has 63 at most (`ds` has 6 bits).
const WQE_BYTES: usize = 1024;
/// Data segments of a receive.
const MAX_PARTS: usize = 64;

#[derive(Debug, Clone, Copy)]
enum Part {
    Memory(Span),
    Inline { at: u16, len_bytes: u16 },
}

impl Part {
    fn len_bytes(&self) -> u32 {
        match self {
            Part::Memory(span) => span.len_bytes,
            Part::Inline { len_bytes, .. } => u32::from(*len_bytes),
        }
    }
}

/// The parsed data segments of one WQE. The device has one of these and fills it with the WQE at hand.
#[derive(Debug)]
pub(crate) struct Gather {
    /// Whose WQE this is: queue pair number and running WQEBB count.
    of: Option<(u32, u32)>,
    bytes: [u8; WQE_BYTES],
    parts: [Part; MAX_PARTS],
    count: usize,
    /// What it says besides, if it is one of a datagram queue pair, or updates a memory window.
    pub(crate) datagram: Option<Datagram>,
    pub(crate) window: Option<WindowUpdate>,
}

/// What the control, address and atomic segments of a WQE say.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Request {
    pub(crate) opcode: u8,
    pub(crate) ds: u8,
    pub(crate) signaled: bool,
    pub(crate) solicited: bool,
    pub(crate) fence: bool,
    pub(crate) imm: u32,
    pub(crate) remote_addr: u64,
    pub(crate) rkey: u32,
    pub(crate) operand: u64,
    pub(crate) compare: u64,
    pub(crate) total_bytes: u64,
}

impl Default for Gather {
    fn default() -> Gather {
        let empty = Part::Inline {
            at: 0,
            len_bytes: 0,
        };
        Gather {
            of: None,
            bytes: [0; WQE_BYTES],
            parts: [empty; MAX_PARTS],
            count: 0,
            datagram: None,
            window: None,
        }
    }
}

impl Gather {
    /// Whether the segments of this WQE are the ones at hand.
    pub(crate) fn holds(&self, qpn: u32, index: u32) -> bool {
        self.of == Some((qpn, index))
    }

    /// Reads the WQE that starts at the running WQEBB count `index`; `limit_wqebbs` have been announced by doorbell.
    ///
    /// # Errors
    /// A WQE that is not one, that belongs to another queue pair, or that is longer than what was announced.
    pub(crate) fn load(
        &mut self,
        parts: &Parts,
        index: u32,
        limit_wqebbs: u32,
    ) -> Result<Request, Syndrome> {
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
            .map_err(|Fault| Syndrome::LocalQpOp)?;
        let ds = usize::from(self.bytes[7] & 0x3f);
        if ds == 0 || ds.div_ceil(4) > limit_wqebbs as usize {
            return Err(Syndrome::LocalQpOp);
        }
        let len_bytes = ds * 16;
        if len_bytes > 64 {
            let rest = &mut self.bytes[64..len_bytes];
            ring.read_ahead(start + 64, rest, valid.saturating_sub(64))
                .map_err(|Fault| Syndrome::LocalQpOp)?;
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
                Segment::Memory(s) => Part::Memory(Span {
                    lkey: s.lkey,
                    len_bytes: s.len_bytes,
                    addr: s.addr,
                }),
                Segment::Inline(data) => Part::Inline {
                    at: (data.as_ptr() as usize - base) as u16,
                    len_bytes: data.len() as u16,
                },
            };
            self.count += 1;
        }
        let request = Request {
            opcode: wqe.ctrl.opcode_raw,
            ds: ds as u8,
            signaled: wqe.ctrl.signaled,
            solicited: wqe.ctrl.solicited,
            fence: wqe.ctrl.fence,
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
    /// [`Fault`] if the ring cannot be read.
    pub(crate) fn load_recv(
        &mut self,
        ring: &Ring,
        index: u32,
        stride_bytes: u32,
        waiting: u16,
    ) -> Result<u64, Fault> {
        let valid = (usize::from(waiting) + 1) * stride_bytes as usize;
        let offset = index as usize * stride_bytes as usize;
        self.read_recv(ring, offset, stride_bytes, valid)
            .map(|stride| self.parse_recv(0, stride))
    }

    /// Reads a WQE of a shared receive queue: its capacity in bytes, and the index of the next one.
    ///
    /// # Errors
    /// [`Fault`] if the ring cannot be read.
    pub(crate) fn load_shared_recv(
        &mut self,
        ring: &Ring,
        offset: usize,
        stride_bytes: u32,
    ) -> Result<(u64, u16), Fault> {
        let stride = self.read_recv(ring, offset, stride_bytes, 0)?;
        // The next segment is 16 bytes; its index stands behind two reserved ones.
        let next = u16::from_be_bytes([self.bytes[2], self.bytes[3]]);
        Ok((self.parse_recv(16.min(stride), stride), next))
    }

    fn read_recv(
        &mut self,
        ring: &Ring,
        offset: usize,
        stride_bytes: u32,
        valid: usize,
    ) -> Result<usize, Fault> {
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
            *part = Part::Memory(Span {
                lkey: s.lkey,
                len_bytes: s.len_bytes,
                addr: s.addr,
            });
            capacity += u64::from(s.len_bytes);
            self.count += 1;
        }
        capacity
    }

    /// The segments as text, for a trace: empty without any.
    #[cold]
    pub(crate) fn describe(&self) -> String {
        let parts = self.parts[..self.count].iter().map(|part| match part {
            Part::Memory(span) => {
                let (addr, len, key) = (span.addr, span.len_bytes, span.lkey);
                format!(" {addr:#x}+{len} lkey {key:#x}")
            }
            Part::Inline { len_bytes, .. } => format!(" inline {len_bytes} B"),
        });
        parts.collect()
    }

    /// Whether all memory named here may be used so.
    pub(crate) fn check(&self, keys: &Keys, pd: u32, need: Access) -> Result<(), Refused> {
        for part in &self.parts[..self.count] {
            if let Part::Memory(span) = part {
                keys.resolve_span(span, pd, need)?;
            }
        }
        Ok(())
    }

    /// The payload of one packet: `len_bytes` from `offset` of the message. Short ones by value, others by name; see
    /// [`Payload::Memory`].
    #[inline]
    pub(crate) fn payload(
        &self,
        keys: &Keys,
        copies: &mut Copies,
        pd: u32,
        mut offset: u32,
        len_bytes: u32,
    ) -> Result<Payload, Refused> {
        if len_bytes == 0 {
            return Ok(Payload::Empty);
        }
        if len_bytes as usize <= INLINE_BYTES {
            let mut bytes = [0; INLINE_BYTES];
            self.copy(keys, copies, pd, offset, &mut bytes[..len_bytes as usize])?;
            return Ok(Payload::Inline(bytes));
        }
        let start = offset;
        let mut spans = [Span::default(); 2];
        let mut used = 0;
        let mut left = len_bytes;
        for part in &self.parts[..self.count] {
            let part_bytes = part.len_bytes();
            if offset >= part_bytes {
                offset -= part_bytes;
                continue;
            }
            let piece = (part_bytes - offset).min(left);
            match part {
                Part::Memory(span) if used < 2 => {
                    spans[used] = Span {
                        lkey: span.lkey,
                        len_bytes: piece,
                        addr: span.addr.wrapping_add(offset.into()),
                    };
                    keys.resolve_span(&spans[used], pd, Access::LOCAL_READ)?;
                    used += 1;
                }
                _ => return self.by_value(keys, copies, pd, start, len_bytes),
            }
            left -= piece;
            offset = 0;
            if left == 0 {
                break;
            }
        }
        Ok(Payload::Memory { pd, spans })
    }

    /// As [`Gather::payload`], all by value: for a sender who may touch its memory as soon as the packet has left.
    pub(crate) fn by_value(
        &self,
        keys: &Keys,
        copies: &mut Copies,
        pd: u32,
        offset: u32,
        len_bytes: u32,
    ) -> Result<Payload, Refused> {
        if len_bytes as usize <= INLINE_BYTES {
            return self.payload(keys, copies, pd, offset, len_bytes);
        }
        let mut bytes = vec![0; len_bytes as usize].into_boxed_slice();
        self.copy(keys, copies, pd, offset, &mut bytes)?;
        Ok(Payload::Heap(bytes))
    }

    fn copy(
        &self,
        keys: &Keys,
        copies: &mut Copies,
        pd: u32,
        mut offset: u32,
        mut into: &mut [u8],
    ) -> Result<(), Refused> {
        for part in &self.parts[..self.count] {
            let part_bytes = part.len_bytes();
            if offset >= part_bytes {
                offset -= part_bytes;
                continue;
            }
            if into.is_empty() {
                break;
            }
            let piece = ((part_bytes - offset) as usize).min(into.len());
            let (now, rest) = into.split_at_mut(piece);
            match part {
                Part::Memory(span) => {
                    let addr = span.addr.wrapping_add(offset.into());
                    let from =
                        keys.resolve(span.lkey, pd, addr, piece as u64, Access::LOCAL_READ)?;
                    // SAFETY: resolved for `piece` bytes just above, under the device's lock.
                    unsafe { copies.load(from, now) }.map_err(|Fault| Refused)?;
                }
                Part::Inline { at, .. } => {
                    let at = usize::from(*at) + offset as usize;
                    now.copy_from_slice(&self.bytes[at..at + piece]);
                }
            }
            into = rest;
            offset = 0;
        }
        Ok(())
    }

    /// Puts a packet's payload into the memory named here, from `offset` of the message on.
    #[inline]
    pub(crate) fn scatter(
        &self,
        keys: &Keys,
        copies: &mut Copies,
        pd: u32,
        mut offset: u32,
        source: &Source<'_>,
    ) -> Result<(), ScatterError> {
        let mut done = 0;
        for part in &self.parts[..self.count] {
            let part_bytes = part.len_bytes();
            if offset >= part_bytes {
                offset -= part_bytes;
                continue;
            }
            let piece = (part_bytes - offset).min(source.len_bytes() - done);
            if piece == 0 {
                break;
            }
            let Part::Memory(span) = part else {
                return Err(ScatterError::Target);
            };
            let into = keys
                .resolve(
                    span.lkey,
                    pd,
                    span.addr.wrapping_add(offset.into()),
                    piece.into(),
                    Access::LOCAL_WRITE,
                )
                .map_err(|Refused| ScatterError::Target)?;
            // SAFETY: resolved for `piece` bytes just above, under the device's lock.
            unsafe { source.copy_to(keys, copies, done, into, piece) }?;
            done += piece;
            offset = 0;
        }
        if done == source.len_bytes() {
            Ok(())
        } else {
            Err(ScatterError::TooLong)
        }
    }
}

/// Why a payload did not reach its place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ScatterError {
    /// The memory to write to may not be written.
    Target,
    /// There is more payload than room.
    TooLong,
    /// The sender's memory is no longer registered: to the receiver, a packet that never came.
    Source,
}

/// Where the bytes of an arrived packet are.
#[derive(Debug)]
pub(crate) enum Source<'a> {
    /// In the packet.
    Bytes(&'a [u8]),
    /// In the sender's registered memory, by key.
    Memory { pd: u32, spans: &'a [Span; 2] },
    /// In a slot of a lane, which the sender will not touch before the slot is given back (and if it did: torn bytes).
    Lane { start: *const u8, len_bytes: u32 },
}

impl<'a> Source<'a> {
    pub(crate) fn of(payload: &'a Payload, len_bytes: u16) -> Source<'a> {
        match payload {
            Payload::Empty => Source::Bytes(&[]),
            Payload::Inline(bytes) => {
                Source::Bytes(&bytes[..usize::from(len_bytes).min(INLINE_BYTES)])
            }
            Payload::Heap(bytes) => Source::Bytes(bytes),
            Payload::Memory { pd, spans } => Source::Memory { pd: *pd, spans },
        }
    }

    #[inline]
    pub(crate) fn len_bytes(&self) -> u32 {
        match self {
            Source::Bytes(bytes) => bytes.len() as u32,
            Source::Memory { spans, .. } => spans[0].len_bytes + spans[1].len_bytes,
            Source::Lane { len_bytes, .. } => *len_bytes,
        }
    }

    /// Copies `len_bytes` from `offset` on.
    ///
    /// # Safety
    /// `into` was resolved for `len_bytes` under the device's lock, and `offset + len_bytes <= self.len_bytes()`.
    #[inline]
    pub(crate) unsafe fn copy_to(
        &self,
        keys: &Keys,
        copies: &mut Copies,
        mut offset: u32,
        mut into: Place,
        mut len_bytes: u32,
    ) -> Result<(), ScatterError> {
        let failed = |Fault| ScatterError::Source;
        let no_target = |Fault| ScatterError::Target;
        match self {
            // SAFETY: the caller's promise; slicing checks the source.
            Source::Bytes(bytes) => unsafe {
                let bytes = &bytes[offset as usize..(offset + len_bytes) as usize];
                copies.store(into, bytes).map_err(no_target)?;
            },
            // SAFETY: the caller's promise, and that of whoever made the source of a lane's slot.
            Source::Lane { start, .. } => unsafe {
                let from = Place::local(start.add(offset as usize));
                if len_bytes <= 8 {
                    // By way of a local copy, so that words arrive whole.
                    let mut word = [0; 8];
                    let word = &mut word[..len_bytes as usize];
                    copies.load(from, word).map_err(no_target)?;
                    copies.store(into, word).map_err(no_target)?;
                } else {
                    copies
                        .copy(from, into, len_bytes as usize)
                        .map_err(failed)?;
                }
            },
            Source::Memory { pd, spans } => {
                for span in *spans {
                    if offset >= span.len_bytes {
                        offset -= span.len_bytes;
                        continue;
                    }
                    let piece = (span.len_bytes - offset).min(len_bytes);
                    let from = keys
                        .resolve(
                            span.lkey,
                            *pd,
                            span.addr.wrapping_add(offset.into()),
                            piece.into(),
                            Access::LOCAL_READ,
                        )
                        .map_err(|Refused| ScatterError::Source)?;
                    // SAFETY: the caller's promise for `into`, and resolved just above for `from`.
                    unsafe { copies.copy(from, into, piece as usize) }.map_err(failed)?;
                    into = into.behind(piece.into());
                    len_bytes -= piece;
                    offset = 0;
                }
            }
        }
        Ok(())
    }
}
