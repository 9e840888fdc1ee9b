//! Reads and atomics: requests whose answer is data, and what is given again when they are repeated.

use super::memory::apply_atomic;
use super::state::{MAX_ANSWERS, QUEUED_ANSWERS, ReadAnswer, Response};
use crate::device::keys::Access;
use crate::device::packet::{AckCode, Header, PacketKind, psn_add, psn_distance};
use crate::device::qp::{DeviceParts, Qp};

/// Response packets of a read that is no burst.
const FEW_RESPONSES: u32 = 16;

impl Qp {
    /// A request that was carried out before: only its answer is given again.
    pub(super) fn repeat(&mut self, context: &DeviceParts, header: &Header) {
        match header.kind {
            PacketKind::Send | PacketKind::Write => self.responder.owes_ack = true,
            PacketKind::ReadRequest => {
                let known = psn_distance(
                    self.responder.expected_psn,
                    psn_add(header.psn, self.response_packets(header.total_bytes)),
                ) >= 0;
                if !known {
                    return;
                }
                if !self.serves(header.kind) {
                    // The right was taken away since. As below, this may be a late copy.
                    self.refuse_for_now(header.psn, AckCode::InvalidRequest);
                } else if self.readable(context, header) {
                    // A requester that asks for little at a time has a window of its own, and slows down by itself.
                    let is_long = self.response_packets(header.total_bytes) > FEW_RESPONSES;
                    if is_long && self.responder.was_sent(header.psn) {
                        // A response was lost, or this is a copy of the request.
                        self.rate.lower(context.now_ns);
                    }
                    self.responder.read_again(header, self.attributes.mtu_bytes);
                } else {
                    // The region went away since. It may have done so because the read is long complete and this is a
                    // late copy of the request: then the answer is ignored, so it must not end the connection here.
                    self.refuse_for_now(header.psn, AckCode::AccessError);
                }
            }
            _ => {
                if let Some(old) = self.responder.result_of(header.psn)
                    && self.responder.answers.len() < QUEUED_ANSWERS / 2
                {
                    self.responder.answers.push_back(Response::Atomic {
                        psn: header.psn,
                        old,
                        repeats: true,
                    });
                }
            }
        }
    }

    pub(super) fn on_read(&mut self, context: &mut DeviceParts, header: &Header) {
        // Too many requests at once are invalid (IBTA 9.7.4.1); with a depth of 0 one is too many.
        if self.responder.arriving.is_some() || self.responder.is_full() {
            return self.refuse(context, AckCode::InvalidRequest);
        }
        if self.responder.answers.len() >= QUEUED_ANSWERS {
            // As if the packet had been lost: only copies of requests can have filled the queue, which is no error.
            return;
        }
        if !self.readable(context, header) {
            return self.refuse(context, AckCode::AccessError);
        }
        let answer = ReadAnswer::new(header, false);
        self.responder.answers.push_back(Response::Read(answer));
        // The response acknowledges what came before, too.
        self.responder.owes_ack = false;
        self.advance_message(self.response_packets(header.total_bytes));
    }

    pub(super) fn on_atomic(&mut self, context: &mut DeviceParts, header: &Header) {
        let is_valid = self.responder.arriving.is_none() && header.addr.is_multiple_of(8);
        if !is_valid || self.responder.is_full() {
            return self.refuse(context, AckCode::InvalidRequest);
        }
        if self.responder.answers.len() >= QUEUED_ANSWERS {
            // As for a read.
            return;
        }
        let target = context.keys.resolve_remote(
            header.rkey,
            self.accessor(),
            header.addr,
            8,
            Access::REMOTE_ATOMIC,
        );
        let Ok(target) = target else {
            return self.refuse(context, AckCode::AccessError);
        };
        let Ok(old) = apply_atomic(context, header, target) else {
            return self.refuse(context, AckCode::OperationalError);
        };
        if self.responder.results.len() == MAX_ANSWERS {
            self.responder.results.pop_front();
        }
        self.responder.results.push_back((header.psn, old));
        self.responder.answers.push_back(Response::Atomic {
            psn: header.psn,
            old,
            repeats: false,
        });
        self.responder.owes_ack = false;
        self.advance_message(1);
    }

    fn response_packets(&self, total_bytes: u32) -> u32 {
        total_bytes.div_ceil(self.attributes.mtu_bytes).max(1)
    }

    fn readable(&self, context: &DeviceParts, header: &Header) -> bool {
        let range = context.keys.resolve_remote(
            header.rkey,
            self.accessor(),
            header.addr,
            header.total_bytes.into(),
            Access::REMOTE_READ,
        );
        range.is_ok()
    }
}
