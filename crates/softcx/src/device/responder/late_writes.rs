//! Writes whose bytes are placed late: those of later writes come before them.
//!
//! A reliable connection completes in order. It does not promise that the bytes of two writes are placed in order: with adaptive routing,
//! and on ConnectX-8, a device places packets as they come (openucx/ucx pull request 10658). Immediate data, sends, reads and atomics find
//! everything placed, and so does whoever is told by an acknowledgement.
#![allow(unsafe_code)] // copies to addresses that the key table resolved

use crate::device::gather::{ScatterError, Source};
use crate::device::keys::Access;
use crate::device::packet::{Header, PacketKind, flag};
use crate::device::qp::{DeviceParts, Qp};
use crate::device::space::SpaceAddress;

/// The last packet of a write, which has arrived and is not placed.
#[derive(Debug)]
pub(super) struct LateWrite {
    bytes: Vec<u8>,
    addr: u64,
    rkey: u32,
    until_ns: u64,
}

impl Qp {
    /// Takes the bytes of a write's last packet, to be placed later, if the fault is set and no other is late. Whether it did.
    pub(super) fn put_off(
        &mut self,
        context: &mut DeviceParts,
        header: &Header,
        source: &Source<'_>,
        addr: u64,
        rkey: u32,
    ) -> Result<bool, ScatterError> {
        let late_ns = context.wire.late_writes_ns();
        let len_bytes = source.len_bytes();
        let applies = late_ns > 0
            && header.has(flag::LAST)
            && !header.has(flag::IMMEDIATE)
            && len_bytes > 0
            && self.responder.late.is_none();
        if !applies {
            return Ok(false);
        }
        let mut bytes = vec![0; len_bytes as usize];
        let into = SpaceAddress::local(bytes.as_mut_ptr());
        // SAFETY: `into` has that length, and stays until the copies are made, which is below.
        let copied =
            unsafe { source.copy_to(&context.keys, &mut context.copies, 0, into, len_bytes) };
        context.copies.settle();
        copied?;
        if context.copies.is_orphan(self.parts.qpn) {
            // The sender died with the bytes.
            return Err(ScatterError::Source);
        }
        self.responder.late = Some(LateWrite {
            bytes,
            addr,
            rkey,
            until_ns: context.now_ns.saturating_add(late_ns),
        });
        Ok(true)
    }

    /// Places what is late before this request is carried out, unless it is one that may overtake it.
    #[inline]
    pub(super) fn catch_up_with(&mut self, context: &mut DeviceParts, header: &Header) {
        let overtakes = header.kind == PacketKind::Write
            && !header.has(flag::IMMEDIATE)
            && header.psn == self.responder.expected_psn;
        if self.responder.late.is_some() && !overtakes {
            self.place_late(context);
        }
    }

    /// Places what is late, if its time has come. Whether it did.
    pub(crate) fn place_when_due(&mut self, context: &mut DeviceParts) -> bool {
        let is_due = self
            .responder
            .late
            .as_ref()
            .is_some_and(|late| late.until_ns <= context.now_ns);
        if is_due {
            self.place_late(context);
        }
        is_due
    }

    /// Places what is late: before an answer that tells of it.
    #[cold]
    pub(super) fn place_late(&mut self, context: &mut DeviceParts) {
        let Some(late) = self.responder.late.take() else {
            return;
        };
        if !self.is_receiving() {
            // Nothing is written by a queue pair in error, and it is not acknowledged.
            self.responder.owes_ack = false;
            return;
        }
        context.copies.work_for(self.parts.qpn, true);
        let target = context.keys.resolve_remote(
            late.rkey,
            self.accessor(),
            late.addr,
            late.bytes.len() as u64,
            Access::REMOTE_WRITE,
        );
        // SAFETY: resolved for this length, under the device's lock, which is held.
        let placed = target
            .ok()
            .and_then(|target| unsafe { context.copies.store(target, &late.bytes) }.ok());
        if placed.is_none() {
            // The region went away before it was written.
            self.refuse_done(context);
        }
    }
}

impl super::Responder {
    /// When something late is due.
    pub(crate) fn late_until_ns(&self) -> Option<u64> {
        self.late.as_ref().map(|late| late.until_ns)
    }
}
