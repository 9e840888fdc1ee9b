//! Packets whose bytes are placed late: those of later packets come before them.
//!
//! A reliable connection completes in order. It does not promise that bytes are placed in order, neither those of two writes nor those of
//! one message: with adaptive routing, and on ConnectX-8, a device places packets as they come (openucx/ucx pull request 10658;
//! mlx5dv.h, `MLX5DV_QP_CREATE_OOO_DP`; IBTA 9.5: an application shall not depend on the order of data writes to memory within a message). All
//! earlier bytes are placed before immediate data, a send, a read or an atomic takes effect, and before an acknowledgement is sent. The bytes of a message are
//! placed before its completion.
#![allow(unsafe_code)] // copies to addresses that the key table resolved

use super::receives::receive_error;
use super::state::{Arriving, EndedMessage, LatePacket, LateTarget};
use crate::device::gather::{GatherSource, ScatterError};
use crate::device::keys::Access;
use crate::device::packet::{AckCode, Header, PacketKind, flag};
use crate::device::qp::{DeviceParts, Qp};
use doorbell_wire::mlx5::Syndrome;

impl Qp {
    /// Keeps the bytes of a packet to place them later, if a fault is set for that and no other packet is late. Returns whether it did.
    pub(super) fn put_off(
        &mut self,
        context: &mut DeviceParts,
        header: &Header,
        source: &GatherSource<'_>,
        place: LateTarget,
    ) -> Result<bool, ScatterError> {
        let plain_write = header.kind == PacketKind::Write && !header.has(flag::IMMEDIATE);
        let late_ns = match header.has(flag::LAST) {
            false => context.wire.late_packets_ns(),
            true if plain_write => context.wire.late_writes_ns(),
            true => 0,
        };
        if late_ns == 0 || source.len_bytes() == 0 || self.responder.late.is_some() {
            return Ok(false);
        }
        let bytes = source.take(&context.keys, &mut context.copies)?;
        if context.copies.has_lost_sender(self.parts.qpn) {
            // The sender died with the bytes.
            return Err(ScatterError::Source);
        }
        self.responder.late = Some(LatePacket {
            psn: header.psn,
            bytes,
            place,
            until_ns: context.now_ns.saturating_add(late_ns),
        });
        Ok(true)
    }

    /// Places what is late before this request is carried out, unless it is one that may overtake it.
    #[inline]
    pub(super) fn catch_up_with(&mut self, context: &mut DeviceParts, header: &Header) {
        if self.responder.late.is_none() {
            return;
        }
        let overtakes = header.psn == self.responder.expected_psn
            && self.responder.ended.is_none()
            && !header.has(flag::INVALIDATE)
            // The rest of a message, or a write without a completion at the receiver.
            && (!header.has(flag::FIRST)
                || (header.kind == PacketKind::Write && !header.has(flag::IMMEDIATE)));
        if !overtakes {
            self.place_late(context);
        }
    }

    /// Places the late bytes if they are due. Returns whether it did.
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

    /// Places the late bytes, before an acknowledgement of them is sent.
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
        context.copies.work_for(self.parts.qpn, true, late.psn);
        let placed = match late.place {
            LateTarget::Write { addr, rkey } => self.place_write(context, addr, rkey, &late.bytes),
            LateTarget::Receive { index, done } => {
                let capacity = self.load_receive(context, index);
                let source = GatherSource::Bytes(&late.bytes);
                // A fault leaves no segment, and so the payload no room.
                self.scatter(context, &source, done, capacity.unwrap_or(0))
            }
        };
        if placed.is_err() {
            // The region went away before it was written.
            let code = match late.place {
                LateTarget::Write { .. } => AckCode::AccessError,
                LateTarget::Receive { index, .. } => {
                    (self.responder.arriving, self.responder.ended) = (None, None);
                    self.complete_recv(context, receive_error(index, Syndrome::LocalProt));
                    AckCode::OperationalError
                }
            };
            // Requests that overtook it are not acknowledged, and neither is it.
            return self.refuse_psn(context, late.psn, code);
        }
        if let Some(ended) = self.responder.ended.take() {
            self.complete_message(context, &ended);
        }
    }

    fn place_write(
        &self,
        context: &mut DeviceParts,
        addr: u64,
        rkey: u32,
        bytes: &[u8],
    ) -> Result<(), ScatterError> {
        let (by, len_bytes) = (self.accessor(), bytes.len() as u64);
        let target = context
            .keys
            .resolve_remote(rkey, by, addr, len_bytes, Access::REMOTE_WRITE);
        let target = target.map_err(|_| ScatterError::Target)?;
        // SAFETY: resolved for this length, under the device's lock, which is held.
        unsafe { context.copies.store(target, bytes) }.map_err(|_| ScatterError::Target)
    }

    /// A message has arrived: it completes, now or when all of it is placed.
    pub(super) fn end_message(&mut self, context: &mut DeviceParts, ended: EndedMessage) {
        if self.responder.late.is_some() {
            self.responder.ended = Some(ended);
        } else {
            self.complete_message(context, &ended);
        }
    }
}

impl super::Responder {
    /// When something late is due, or responses that are paced.
    pub(crate) fn next_timer_ns(&self) -> Option<u64> {
        let late = self.late.as_ref().map(|late| late.until_ns);
        late.into_iter().chain(self.paced_until_ns).min()
    }

    /// The receive of a message that has arrived in part, or that is not placed. It will not complete.
    pub(super) fn take_unfinished(&mut self) -> Option<u32> {
        match (self.ended.take(), self.arriving.take()) {
            (Some(ended), _) => Some(ended.index),
            (None, Some(Arriving::Send { index, .. })) => Some(index),
            _ => None,
        }
    }
}
