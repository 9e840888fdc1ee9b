//! The accesses of a responder to its own registered memory.
#![allow(unsafe_code)] // copies to and from addresses that the key table resolved

use crate::device::gather::{GatherSource, ScatterError};
use crate::device::keys::{Access, Refused};
use crate::device::packet::{Header, INLINE_BYTES, KeyedSpan, PacketKind, PacketPayload};
use crate::device::qp::{DeviceParts, Qp};
use crate::device::space::{AccessFault, SpaceAddress};

impl Qp {
    /// Stores a packet's payload at a resolved address.
    #[inline]
    pub(super) fn store(
        &self,
        context: &mut DeviceParts,
        source: &GatherSource<'_>,
        target: SpaceAddress,
    ) -> Result<(), ScatterError> {
        let len_bytes = source.len_bytes();
        // SAFETY: `target` was resolved for at least the payload, under the device's lock, which is still held.
        unsafe { source.copy_to(&context.keys, &mut context.copies, 0, target, len_bytes) }
    }

    /// The payload of a read's response.
    pub(super) fn remote_payload(
        &self,
        context: &mut DeviceParts,
        rkey: u32,
        addr: u64,
        len_bytes: u32,
    ) -> Result<PacketPayload, Refused> {
        let from = context.keys.resolve_remote(
            rkey,
            self.accessor(),
            addr,
            len_bytes.into(),
            Access::REMOTE_READ,
        )?;
        if len_bytes as usize > INLINE_BYTES {
            let span = KeyedSpan {
                lkey: rkey,
                len_bytes,
                addr,
            };
            return Ok(PacketPayload::Memory {
                pd: self.parts.pd,
                spans: [span, KeyedSpan::default()],
            });
        }
        let mut bytes = [0; INLINE_BYTES];
        // SAFETY: resolved for this length just above, under the device's lock.
        unsafe { context.copies.load(from, &mut bytes[..len_bytes as usize]) }
            .map_err(|AccessFault| Refused)?;
        Ok(if len_bytes == 0 {
            PacketPayload::Empty
        } else {
            PacketPayload::Inline(bytes)
        })
    }
}

/// Carries out an atomic; `target` was resolved for 8 bytes and is aligned.
pub(super) fn apply_atomic(
    context: &mut DeviceParts,
    header: &Header,
    target: SpaceAddress,
) -> Result<u64, AccessFault> {
    let Header {
        compare, operand, ..
    } = *header;
    // SAFETY: the address was checked for its alignment and resolved by the caller, under the device's lock.
    unsafe {
        match header.kind {
            PacketKind::CompareSwap => context.copies.compare_swap(target, compare, operand),
            _ => context.copies.fetch_add(target, operand),
        }
    }
}
