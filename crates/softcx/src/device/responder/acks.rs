//! What the responder owes: responses to reads and atomics, acknowledgements and refusals, in the order of their requests.

use super::state::{QUEUED_ANSWERS, ReadAnswer, Response};
use crate::device::packet::{AckCode, PacketKind, PacketPayload, flag, psn_add};
use crate::device::qp::{DeviceParts, Qp};
use crate::device::wire::Destination;

/// Response packets that one queue pair sends before others have their turn.
const BURST: usize = 32;

impl Qp {
    pub(super) fn answer(&mut self, psn: u32, code: AckCode) {
        let refused = matches!(code, AckCode::AccessError | AckCode::OperationalError);
        // A dying process loses its memory before its queue pairs. Its peers get no answer, because it is not at fault.
        if refused && self.parts.send_record.space().is_gone() {
            return;
        }
        self.responder.answers.push_back(Response::Ack(psn, code));
    }

    /// Queues a refusal that leaves the connection as it is. It is dropped if the same one is the last in the queue, or if the queue is full: a peer that
    /// sends faster than answers leave would otherwise make it grow without bound. A dropped refusal is as good as lost, and the peer repeats its request.
    /// Returns whether it was queued.
    pub(super) fn refuse_for_now(&mut self, psn: u32, code: AckCode) -> bool {
        let answers = &self.responder.answers;
        let is_last = matches!(answers.back(), Some(Response::Ack(last, last_code)) if (*last, *last_code) == (psn, code));
        let has_room = !is_last && answers.len() < QUEUED_ANSWERS;
        if has_room {
            self.answer(psn, code);
        }
        has_room
    }

    /// Whether an answer or an acknowledgement is to be sent.
    #[inline]
    pub(crate) fn has_pending_responses(&self) -> bool {
        if self.responder.paced_until_ns.is_some() {
            return false;
        }
        (self.responder.owes_ack && self.responder.late.is_none())
            || !self.responder.answers.is_empty()
    }

    /// Sends answers, oldest first, and then one acknowledgement for everything since the last. Whether more is to come.
    #[inline]
    pub(crate) fn send_acks(&mut self, context: &mut DeviceParts) -> bool {
        let Some(remote) = self.remote else {
            self.responder.answers.clear();
            self.responder.owes_ack = false;
            return false;
        };
        let mut sent = 0;
        let msn = self.responder.msn;
        while let Some(answer) = self.responder.answers.pop_front() {
            if sent == BURST || context.wire.congested(remote.to) {
                self.responder.answers.push_front(answer);
                return true;
            }
            sent += 1;
            match answer {
                Response::Ack(psn, code) => {
                    let kind = PacketKind::Ack;
                    self.send(context, kind, psn, PacketPayload::Empty, |header| {
                        header.code = code;
                        header.set_msn(msn);
                    });
                }
                Response::Atomic { psn, old, .. } => {
                    let kind = PacketKind::AtomicResponse;
                    self.send(context, kind, psn, PacketPayload::Empty, |header| {
                        header.operand = old;
                        header.set_msn(msn);
                    });
                }
                Response::Read(read) => {
                    let paced = match remote.to {
                        Destination::Host(_) => {
                            let len_bytes = self.response_bytes(&read);
                            self.rate.take(context.now_ns, len_bytes)
                        }
                        _ => Ok(()),
                    };
                    if let Err(until_ns) = paced {
                        self.responder.answers.push_front(answer);
                        self.responder.paced_until_ns = Some(until_ns);
                        return false;
                    }
                    self.send_read_packet(context, read);
                }
            }
        }
        if self.responder.late.is_none() && std::mem::take(&mut self.responder.owes_ack) {
            let psn = self.responder.ack_psn;
            self.send(
                context,
                PacketKind::Ack,
                psn,
                PacketPayload::Empty,
                |header| {
                    header.set_msn(msn);
                },
            );
        }
        false
    }

    /// Ends a pause of paced responses if it is over. Returns whether it did.
    pub(crate) fn resume_when_due(&mut self, now_ns: u64) -> bool {
        let paced_until_ns = &mut self.responder.paced_until_ns;
        paced_until_ns
            .take_if(|until_ns| *until_ns <= now_ns)
            .is_some()
    }

    /// The payload of the next packet of an answer.
    fn response_bytes(&self, read: &ReadAnswer) -> u32 {
        (read.total - read.done_bytes).min(self.attributes.mtu_bytes)
    }

    fn send_read_packet(&mut self, context: &mut DeviceParts, read: ReadAnswer) {
        let ReadAnswer {
            psn,
            addr,
            rkey,
            total,
            done_bytes,
            ..
        } = read;
        let payload_bytes = self.response_bytes(&read);
        let at = addr.wrapping_add(done_bytes.into());
        let Ok(payload) = self.remote_payload(context, rkey, at, payload_bytes) else {
            // The region went away in the middle of a read; what would have come behind it has no meaning any more.
            self.responder.answers.clear();
            self.answer(psn, AckCode::AccessError);
            self.notify_refusal(AckCode::AccessError);
            return self.enter_error_behind_answers(context);
        };
        let msn = self.responder.msn;
        self.send(context, PacketKind::ReadResponse, psn, payload, |header| {
            header.payload_bytes = payload_bytes as u16;
            header.set_msn(msn);
            if done_bytes == 0 {
                header.flags |= flag::FIRST;
            }
            if done_bytes + payload_bytes == total {
                header.flags |= flag::LAST;
            }
        });
        let done_bytes = done_bytes + payload_bytes;
        if done_bytes < total {
            self.responder
                .answers
                .push_front(Response::Read(ReadAnswer {
                    psn: psn_add(psn, 1),
                    done_bytes,
                    ..read
                }));
        }
    }
}
