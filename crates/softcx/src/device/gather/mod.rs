//! The data segments of one WQE, as the device works with them: bytes out of memory and into it, by offset.
#![allow(unsafe_code)] // copies to and from addresses that the key table resolved

mod source;
mod wqe;

pub(crate) use self::source::{GatherSource, ScatterError};
pub(crate) use self::wqe::WqeRequest;
use crate::device::copies::Copies;
use crate::device::keys::{Access, Keys, Refused};
use crate::device::packet::{INLINE_BYTES, KeyedSpan, PacketPayload};
use crate::device::space::AccessFault;
use doorbell_wire::mlx5::{Datagram, WindowUpdate};

/// Largest WQE: a receive of 64 segments of 16 bytes. One of the send ring has 63 at most (`ds` has 6 bits).
const WQE_BYTES: usize = 1024;
/// Data segments of a receive.
const MAX_PARTS: usize = 64;

#[derive(Debug, Clone, Copy)]
enum GatherPart {
    Memory(KeyedSpan),
    Inline { at: u16, len_bytes: u16 },
}

impl GatherPart {
    fn len_bytes(&self) -> u32 {
        match self {
            GatherPart::Memory(span) => span.len_bytes,
            GatherPart::Inline { len_bytes, .. } => u32::from(*len_bytes),
        }
    }
}

/// The parsed data segments of one WQE. The device has one of these and fills it with the WQE at hand.
#[derive(Debug)]
pub(crate) struct Gather {
    /// Whose WQE this is: queue pair number and running WQEBB count.
    of: Option<(u32, u32)>,
    bytes: [u8; WQE_BYTES],
    parts: [GatherPart; MAX_PARTS],
    count: usize,
    /// The remaining segments of a datagram queue pair's request, or of a memory window's update.
    pub(crate) datagram: Option<Datagram>,
    pub(crate) window: Option<WindowUpdate>,
}

impl Default for Gather {
    fn default() -> Gather {
        let empty = GatherPart::Inline {
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

    /// The segments as text, for a trace: empty without any.
    #[cold]
    pub(crate) fn describe(&self) -> String {
        let parts = self.parts[..self.count].iter().map(|part| match part {
            GatherPart::Memory(span) => {
                let (addr, len, key) = (span.addr, span.len_bytes, span.lkey);
                format!(" {addr:#x}+{len} lkey {key:#x}")
            }
            GatherPart::Inline { len_bytes, .. } => format!(" inline {len_bytes} B"),
        });
        parts.collect()
    }

    /// Whether all memory named here may be used so.
    pub(crate) fn check(&self, keys: &Keys, pd: u32, need: Access) -> Result<(), Refused> {
        for part in &self.parts[..self.count] {
            if let GatherPart::Memory(span) = part {
                keys.resolve_span(span, pd, need)?;
            }
        }
        Ok(())
    }

    /// The payload of one packet: `len_bytes` from `offset` of the message. Short ones by value, others by name; see
    /// [`PacketPayload::Memory`].
    #[inline]
    pub(crate) fn payload(
        &self,
        keys: &Keys,
        copies: &mut Copies,
        pd: u32,
        mut offset: u32,
        len_bytes: u32,
    ) -> Result<PacketPayload, Refused> {
        if len_bytes == 0 {
            return Ok(PacketPayload::Empty);
        }
        if len_bytes as usize <= INLINE_BYTES {
            let mut bytes = [0; INLINE_BYTES];
            self.copy(keys, copies, pd, offset, &mut bytes[..len_bytes as usize])?;
            return Ok(PacketPayload::Inline(bytes));
        }
        let start = offset;
        let mut spans = [KeyedSpan::default(); 2];
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
                GatherPart::Memory(span) if used < 2 => {
                    spans[used] = KeyedSpan {
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
        Ok(PacketPayload::Memory { pd, spans })
    }

    /// As [`Gather::payload`], with a copy of all bytes: for senders that may change their memory as soon as the packet was sent.
    pub(crate) fn by_value(
        &self,
        keys: &Keys,
        copies: &mut Copies,
        pd: u32,
        offset: u32,
        len_bytes: u32,
    ) -> Result<PacketPayload, Refused> {
        if len_bytes as usize <= INLINE_BYTES {
            return self.payload(keys, copies, pd, offset, len_bytes);
        }
        let mut bytes = vec![0; len_bytes as usize].into_boxed_slice();
        self.copy(keys, copies, pd, offset, &mut bytes)?;
        Ok(PacketPayload::Heap(bytes))
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
                GatherPart::Memory(span) => {
                    let addr = span.addr.wrapping_add(offset.into());
                    let from =
                        keys.resolve(span.lkey, pd, addr, piece as u64, Access::LOCAL_READ)?;
                    // SAFETY: resolved for `piece` bytes just above, under the device's lock.
                    unsafe { copies.load(from, now) }.map_err(|AccessFault| Refused)?;
                }
                GatherPart::Inline { at, .. } => {
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
        source: &GatherSource<'_>,
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
            let GatherPart::Memory(span) = part else {
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
