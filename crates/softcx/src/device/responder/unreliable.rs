//! The responder of an unreliable connection: a message whose packets do not all come, in order, is as if it had never been
//! sent. Its receive is there for the next one (IBTA 9.8.2.2).

use super::messages::send_opcode;
use super::receives::receive_error;
use super::state::{Arriving, EndedMessage};
use crate::device::gather::{GatherSource, ScatterError};
use crate::device::keys::Access;
use crate::device::packet::{Header, PacketKind, flag, psn_add};
use crate::device::qp::{DeviceParts, Qp};
use doorbell_wire::mlx5::{CqeOpcode, Syndrome};

impl Qp {
    pub(super) fn on_unreliable(
        &mut self,
        context: &mut DeviceParts,
        header: &Header,
        source: &GatherSource<'_>,
    ) {
        self.notify_established();
        let in_sequence = header.psn == self.responder.expected_psn;
        self.responder.expected_psn = psn_add(header.psn, 1);
        if header.has(flag::FIRST) || !in_sequence {
            self.drop_message();
        }
        if !self.fits_path_mtu(header, source.len_bytes()) {
            // The rest of the message has no beginning, and is dropped with it.
            return self.drop_message();
        }
        match header.kind {
            PacketKind::Send => self.on_unreliable_send(context, header, source),
            PacketKind::Write => self.on_unreliable_write(context, header, source),
            // Reads and atomics need answers.
            _ => self.drop_message(),
        }
    }

    /// The message in progress comes to nothing.
    fn drop_message(&mut self) {
        if let Some(Arriving::Send { index, .. }) = self.responder.arriving.take() {
            self.responder.kept = Some(index);
        }
    }

    fn on_unreliable_send(
        &mut self,
        context: &mut DeviceParts,
        header: &Header,
        source: &GatherSource<'_>,
    ) {
        let (index, done, capacity) = match self.responder.arriving.take() {
            Some(Arriving::Send {
                index,
                done,
                capacity,
            }) => {
                // A fault leaves no segment, and so the payload no room.
                let _ = self.load_receive(context, index);
                (index, done, capacity)
            }
            None if header.has(flag::FIRST) => match self.take_receive(context) {
                Some((index, capacity)) => (index, 0, capacity),
                None => return,
            },
            _ => return,
        };
        if let Err(error) = self.scatter(context, source, done, capacity) {
            return self.end_receive(context, index, error);
        }
        let done = done + source.len_bytes();
        if header.has(flag::LAST) {
            self.complete_message(
                context,
                &EndedMessage::new(header, send_opcode(header), index, done),
            );
        } else {
            self.responder.arriving = Some(Arriving::Send {
                index,
                done,
                capacity,
            });
        }
    }

    fn on_unreliable_write(
        &mut self,
        context: &mut DeviceParts,
        header: &Header,
        source: &GatherSource<'_>,
    ) {
        let (addr, rkey, missing, total) = match self.responder.arriving.take() {
            Some(Arriving::Write {
                addr,
                rkey,
                missing,
                total,
            }) => (addr, rkey, missing, total),
            None if header.has(flag::FIRST) => {
                let total = header.total_bytes;
                (header.addr, header.rkey, total, total)
            }
            // A write in the middle of a send: neither of them has all its packets.
            other => {
                self.responder.arriving = other;
                return self.drop_message();
            }
        };
        let (arrived, last) = (source.len_bytes(), header.has(flag::LAST));
        if !self.serves(header.kind) || arrived > missing || (last && arrived != missing) {
            return;
        }
        let by = self.accessor();
        // The whole range with the first packet, so that a write that is refused writes nothing.
        let target =
            context
                .keys
                .resolve_remote(rkey, by, addr, missing.into(), Access::REMOTE_WRITE);
        let Ok(target) = target else { return };
        if self.store(context, source, target).is_err() {
            return;
        }
        if !last {
            self.responder.arriving = Some(Arriving::Write {
                addr: addr.wrapping_add(arrived.into()),
                rkey,
                missing: missing - arrived,
                total,
            });
        } else if header.has(flag::IMMEDIATE)
            && let Some((index, _)) = self.take_receive(context)
        {
            self.complete_message(
                context,
                &EndedMessage::new(header, CqeOpcode::RespWriteImm, index, total),
            );
        }
    }

    /// A payload was not placed in its receive. If the receive caused that, it completes in error, and the queue pair goes to the error
    /// state.
    pub(super) fn end_receive(
        &mut self,
        context: &mut DeviceParts,
        index: u32,
        error: ScatterError,
    ) {
        let syndrome = match error {
            // As if the packet had been lost.
            ScatterError::Source => return self.responder.kept = Some(index),
            ScatterError::TooLong => Syndrome::LocalLength,
            ScatterError::Target => Syndrome::LocalProt,
        };
        self.complete_recv(context, receive_error(index, syndrome));
        self.enter_error(context);
    }
}
