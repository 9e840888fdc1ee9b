//! Where the bytes of an arrived packet are, and how they get to their place.
#![allow(unsafe_code)] // copies to and from addresses that the key table resolved

use crate::device::copies::Copies;
use crate::device::keys::{Access, Keys, Refused};
use crate::device::packet::{INLINE_BYTES, KeyedSpan, PacketPayload};
use crate::device::space::{AccessFault, SpaceAddress};

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
pub(crate) enum GatherSource<'a> {
    /// In the packet.
    Bytes(&'a [u8]),
    /// In the sender's registered memory, by key.
    Memory { pd: u32, spans: &'a [KeyedSpan; 2] },
    /// In a slot of a lane, which the sender will not touch before the slot is given back (and if it did: torn bytes).
    Lane { start: *const u8, len_bytes: u32 },
}

impl<'a> GatherSource<'a> {
    pub(crate) fn of(payload: &'a PacketPayload, len_bytes: u16) -> GatherSource<'a> {
        match payload {
            PacketPayload::Empty => GatherSource::Bytes(&[]),
            PacketPayload::Inline(bytes) => {
                GatherSource::Bytes(&bytes[..usize::from(len_bytes).min(INLINE_BYTES)])
            }
            PacketPayload::Heap(bytes) => GatherSource::Bytes(bytes),
            PacketPayload::Memory { pd, spans } => GatherSource::Memory { pd: *pd, spans },
        }
    }

    #[inline]
    pub(crate) fn len_bytes(&self) -> u32 {
        match self {
            GatherSource::Bytes(bytes) => bytes.len() as u32,
            GatherSource::Memory { spans, .. } => spans[0].len_bytes + spans[1].len_bytes,
            GatherSource::Lane { len_bytes, .. } => *len_bytes,
        }
    }

    /// A copy of all bytes, for callers that keep them.
    pub(crate) fn take(&self, keys: &Keys, copies: &mut Copies) -> Result<Vec<u8>, ScatterError> {
        let mut bytes = vec![0; self.len_bytes() as usize];
        let into = SpaceAddress::local(bytes.as_mut_ptr());
        // SAFETY: `into` has that length, and stays until the copies are made, which is below.
        let copied = unsafe { self.copy_to(keys, copies, 0, into, self.len_bytes()) };
        copies.settle();
        copied.map(|()| bytes)
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
        mut into: SpaceAddress,
        mut len_bytes: u32,
    ) -> Result<(), ScatterError> {
        let failed = |AccessFault| ScatterError::Source;
        let no_target = |AccessFault| ScatterError::Target;
        match self {
            // SAFETY: the caller's promise; slicing checks the source.
            GatherSource::Bytes(bytes) => unsafe {
                let bytes = &bytes[offset as usize..(offset + len_bytes) as usize];
                copies.store(into, bytes).map_err(no_target)?;
            },
            // SAFETY: the caller's promise, and that of the code that made the source of a lane's slot.
            GatherSource::Lane { start, .. } => unsafe {
                let from = SpaceAddress::local(start.add(offset as usize));
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
            GatherSource::Memory { pd, spans } => {
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
                    unsafe { copies.copy(from, into, piece as usize) }.map_err(|AccessFault| {
                        copies.lose_source(from);
                        ScatterError::Source
                    })?;
                    into = into.behind(piece.into());
                    len_bytes -= piece;
                    offset = 0;
                }
            }
        }
        Ok(())
    }
}
