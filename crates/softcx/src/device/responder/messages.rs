//! Sends and writes: messages of one packet or several, whose bytes are stored as they arrive.

use super::receives::receive_error;
use super::state::{Arriving, EndedMessage, LateTarget};
use crate::device::gather::{GatherSource, ScatterError};
use crate::device::keys::Access;
use crate::device::packet::{AckCode, Header, flag};
use crate::device::qp::{DeviceParts, Qp};
use doorbell_wire::mlx5::{Cqe, CqeOpcode, Syndrome};

impl Qp {
    pub(super) fn on_send(
        &mut self,
        context: &mut DeviceParts,
        header: &Header,
        source: &GatherSource<'_>,
    ) {
        let arriving = self.responder.arriving.take();
        let (index, done, capacity) = match (header.has(flag::FIRST), arriving) {
            (true, None) => {
                let Some((index, capacity)) = self.take_receive(context) else {
                    return self.not_ready(context);
                };
                (index, 0, capacity)
            }
            (
                false,
                Some(Arriving::Send {
                    index,
                    done,
                    capacity,
                }),
            ) => {
                // A fault leaves no segment, and so the payload no room.
                let _ = self.load_receive(context, index);
                (index, done, capacity)
            }
            (_, arriving) => {
                self.responder.arriving = arriving;
                return self.refuse(context, AckCode::InvalidRequest);
            }
        };
        let arrived = source.len_bytes();
        let scattered = self.receive_packet(context, header, source, (index, done, capacity));
        let (syndrome, code) = match scattered {
            Ok(()) => {
                let done = done + arrived;
                if header.has(flag::LAST) {
                    if header.has(flag::INVALIDATE)
                        && context
                            .keys
                            .invalidate(header.imm, self.accessor())
                            .is_err()
                    {
                        let error = receive_error(index, Syndrome::LocalAccess);
                        self.complete_recv(context, error);
                        return self.refuse(context, AckCode::AccessError);
                    }
                    self.advance_message(header.psns.into());
                    self.responder.owe_ack(header);
                    let ended = EndedMessage::new(header, send_opcode(header), index, done);
                    self.end_message(context, ended);
                } else {
                    self.responder.arriving = Some(Arriving::Send {
                        index,
                        done,
                        capacity,
                    });
                    self.advance_inside(header);
                }
                return;
            }
            Err(ScatterError::Source) => {
                // As if the packet had been lost; the receive is still there for its repetition.
                if done == 0 && header.has(flag::FIRST) {
                    self.responder.kept = Some(index);
                } else {
                    self.responder.arriving = Some(Arriving::Send {
                        index,
                        done,
                        capacity,
                    });
                }
                return;
            }
            Err(ScatterError::TooLong) => (Syndrome::LocalLength, AckCode::InvalidRequest),
            Err(ScatterError::Target) => (Syndrome::LocalProt, AckCode::OperationalError),
        };
        // Nothing more is written into a receive that has completed.
        self.responder.late = None;
        self.complete_recv(context, receive_error(index, syndrome));
        self.refuse(context, code);
    }

    /// Puts a packet's payload into a receive, `done` bytes behind its start, or has it come there late.
    fn receive_packet(
        &mut self,
        context: &mut DeviceParts,
        header: &Header,
        source: &GatherSource<'_>,
        (index, done, capacity): (u32, u32, u64),
    ) -> Result<(), ScatterError> {
        let fits = u64::from(done) + u64::from(source.len_bytes()) <= capacity;
        let place = LateTarget::Receive { index, done };
        if fits && self.put_off(context, header, source, place)? {
            return Ok(());
        }
        self.scatter(context, source, done, capacity)
    }

    #[inline]
    pub(super) fn on_write(
        &mut self,
        context: &mut DeviceParts,
        header: &Header,
        source: &GatherSource<'_>,
    ) {
        let arrived = source.len_bytes();
        let (addr, rkey, missing, total) = match (header.has(flag::FIRST), &self.responder.arriving)
        {
            (true, None) => (
                header.addr,
                header.rkey,
                header.total_bytes,
                header.total_bytes,
            ),
            (
                false,
                Some(Arriving::Write {
                    addr,
                    rkey,
                    missing,
                    total,
                }),
            ) => (*addr, *rkey, *missing, *total),
            _ => return self.refuse(context, AckCode::InvalidRequest),
        };
        let last = header.has(flag::LAST);
        if arrived > missing || (last && arrived != missing) {
            return self.refuse(context, AckCode::InvalidRequest);
        }
        // The whole range is checked with the first packet, so that a write that fails writes nothing.
        let target = context.keys.resolve_remote(
            rkey,
            self.accessor(),
            addr,
            missing.into(),
            Access::REMOTE_WRITE,
        );
        let immediate = last && header.has(flag::IMMEDIATE);
        let Ok(target) = target else {
            return self.refuse_write(context, immediate);
        };
        let receive = if immediate {
            let Some((index, _)) = self.take_receive(context) else {
                return self.not_ready(context);
            };
            Some(index)
        } else {
            None
        };
        let placed = match self.put_off(context, header, source, LateTarget::Write { addr, rkey }) {
            Ok(true) => Ok(()),
            Ok(false) => self.store(context, source, target),
            Err(error) => Err(error),
        };
        if let Err(error) = placed {
            if receive.is_some() {
                self.responder.kept = receive;
            }
            if error != ScatterError::Source {
                // The memory is registered, but the process took it away.
                self.refuse(context, AckCode::OperationalError);
            }
            return;
        }
        if last {
            self.responder.arriving = None;
            self.advance_message(header.psns.into());
            self.responder.owe_ack(header);
            if let Some(index) = receive {
                let ended = EndedMessage::new(header, CqeOpcode::RespWriteImm, index, total);
                self.end_message(context, ended);
            }
        } else {
            let (addr, missing) = (addr.wrapping_add(arrived.into()), missing - arrived);
            self.responder.arriving = Some(Arriving::Write {
                addr,
                rkey,
                missing,
                total,
            });
            self.advance_inside(header);
        }
    }

    /// A write that the key does not allow. The packet with the immediate is about a receive, which fails with it if there is one.
    #[cold]
    fn refuse_write(&mut self, context: &mut DeviceParts, immediate: bool) {
        if immediate && let Some((index, _)) = self.take_receive(context) {
            self.complete_recv(context, receive_error(index, Syndrome::LocalAccess));
        }
        // Unless the queue itself was at fault.
        if self.is_receiving() {
            self.refuse(context, AckCode::AccessError);
        }
    }

    pub(super) fn complete_message(&mut self, context: &mut DeviceParts, ended: &EndedMessage) {
        let (header, index) = (&ended.header, ended.index);
        context.copies.settle();
        if self.responder.sender_lost || context.copies.has_lost_sender(self.parts.qpn) {
            // The message has a hole that no process is left to fill: for this side it never came. Its receive does not go back to where it was
            // taken from, because others may have taken the next ones of a shared queue since.
            self.responder.kept = Some(index);
            return;
        }
        let cqe = Cqe {
            opcode: ended.opcode,
            wqe_counter: index as u16,
            byte_count: ended.byte_count,
            imm: header.imm,
            solicited: header.has(flag::SOLICITED),
            source_qpn: header.source_qpn,
            source_lid: header.source_lid,
            sl: header.sl,
            ..Cqe::default()
        };
        self.complete_recv(context, cqe);
    }

    /// A packet that does not end its message.
    fn advance_inside(&mut self, header: &Header) {
        self.advance(header.psns.into());
        self.responder.owe_ack(header);
    }
}

/// What completes when a send has arrived.
pub(super) fn send_opcode(header: &Header) -> CqeOpcode {
    if header.has(flag::IMMEDIATE) {
        CqeOpcode::RespSendImm
    } else if header.has(flag::INVALIDATE) {
        CqeOpcode::RespSendInv
    } else {
        CqeOpcode::RespSend
    }
}
