//! The responder of a reliable connection: takes requests in order, moves their data, and answers.

mod answers;
mod datagrams;
mod receives;
mod unreliable;

use std::collections::VecDeque;

use crate::mlx5::{Cqe, CqeOpcode, Syndrome};
use crate::soft::client::{Event, Transport};
use crate::soft::gather::{ScatterError, Source};
use crate::soft::keys::{Access, Refused};
use crate::soft::packet::{AckCode, Header, Kind, Payload, flag, psn_add, psn_distance};
use crate::soft::qp::{Context, Qp, State};
use crate::soft::space::{Fault, Place};
use crate::soft::wire::Counted;

/// Reads and atomics of the peer that may wait for their answer, and atomics whose answer is kept for a repetition: the
/// most that a requester may have on their way.
const MAX_ANSWERS: usize = 16;
/// Answers that may be queued: the peer's requests, and repetitions of them that crossed with a first answer.
const QUEUED_ANSWERS: usize = 4 * MAX_ANSWERS;
/// Packets of one message after which it is acknowledged so far: well within a requester's window.
const ACK_EVERY: u32 = 64;

/// A message that arrives in several packets.
#[derive(Debug)]
enum Arriving {
    /// A send: bytes written so far into the receive at `index`, whose room is `capacity`.
    Send {
        index: u32,
        done: u32,
        capacity: u64,
    },
    /// A write: where the next packet's payload goes, and what is still to come.
    Write {
        addr: u64,
        rkey: u32,
        missing: u32,
        total: u32,
    },
}

/// The state of one receive queue and of the peer's requests in the device.
#[derive(Debug, Default)]
pub(crate) struct Responder {
    expected_psn: u32,
    /// A negative answer is out: what comes before the expected packet is dropped without another one.
    refused: bool,
    arriving: Option<Arriving>,
    /// Running count of receives taken, and how many the record told of, modulo 2^16.
    taken: u32,
    posted: u16,
    answers: VecDeque<Answer>,
    /// Results of atomics, by PSN, oldest first.
    results: VecDeque<(u32, u64)>,
    /// An acknowledgement is owed.
    owes_ack: bool,
    /// A receive that was taken for a message that broke: the next message gets it.
    kept: Option<u32>,
    /// The owner knows that packets come, and that no receive is taken any more.
    established: bool,
    told_last: bool,
    /// The sender died in the middle of a message.
    orphaned: bool,
}

impl Responder {
    pub(crate) fn connect(&mut self, psn: u32) {
        self.expected_psn = psn;
    }
}

impl Qp {
    /// A request has arrived. Afterwards the queue pair belongs on the list of those that owe an answer.
    #[inline]
    pub(crate) fn on_request(
        &mut self,
        context: &mut Context<'_>,
        header: &Header,
        source: &Source<'_>,
    ) {
        if !self.is_receiving() || self.responder.orphaned {
            return;
        }
        match self.parts.transport {
            Transport::Rc => {}
            Transport::Uc => return self.on_unreliable(context, header, source),
            Transport::Ud => return self.on_datagram(context, header, source),
        }
        self.tell_established();
        let distance = psn_distance(header.psn, self.responder.expected_psn);
        if distance > 0 {
            if !self.responder.refused {
                self.responder.refused = true;
                self.answer(
                    Kind::Ack,
                    self.responder.expected_psn,
                    AckCode::SequenceError,
                    0,
                );
            }
            return;
        }
        if distance < 0 {
            return self.repeat(context, header);
        }
        self.responder.refused = false;
        if let Some(code) = context.wire.strikes(Counted::Request) {
            return self.refuse_by_fault(context, code);
        }
        match header.kind {
            Kind::Send => self.on_send(context, header, source),
            Kind::Write => self.on_write(context, header, source),
            Kind::ReadRequest => self.on_read(context, header),
            _ => self.on_atomic(context, header),
        }
    }

    #[cold]
    fn refuse_by_fault(&mut self, context: &mut Context<'_>, code: u8) {
        match AckCode::parse(code) {
            None | Some(AckCode::Ack) => {}
            Some(code @ (AckCode::SequenceError | AckCode::ReceiverNotReady(_))) => {
                self.responder.refused = true;
                self.answer(Kind::Ack, self.responder.expected_psn, code, 0);
            }
            Some(code) => self.refuse(context, code),
        }
    }

    /// A request that was carried out before: only its answer is given again.
    fn repeat(&mut self, context: &Context<'_>, header: &Header) {
        match header.kind {
            Kind::Send | Kind::Write => self.responder.owes_ack = true,
            Kind::ReadRequest => {
                let known = psn_distance(
                    self.responder.expected_psn,
                    psn_add(header.psn, self.response_packets(header.total_bytes)),
                ) >= 0;
                if !known || self.responder.answers.len() >= QUEUED_ANSWERS / 2 {
                    return;
                }
                if self.readable(context, header) {
                    self.responder.answers.push_back(read_answer(header));
                } else {
                    // The region went away since. It may have done so because the read is long complete and this is a
                    // late copy of the request: then nobody minds the answer, so it must not end the connection here.
                    self.answer(Kind::Ack, header.psn, AckCode::AccessError, 0);
                }
            }
            _ => {
                let kept = self
                    .responder
                    .results
                    .iter()
                    .find(|(psn, _)| *psn == header.psn);
                if let Some(&(psn, value)) = kept
                    && self.responder.answers.len() < QUEUED_ANSWERS / 2
                {
                    self.answer(Kind::AtomicResponse, psn, AckCode::Ack, value);
                }
            }
        }
    }

    fn on_send(&mut self, context: &mut Context<'_>, header: &Header, source: &Source<'_>) {
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
        let scattered = self.scatter(context, source, done, capacity);
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
                    self.advance(1);
                    self.responder.owes_ack = true;
                    self.complete_message(context, header, send_opcode(header), index, done);
                } else {
                    self.responder.arriving = Some(Arriving::Send {
                        index,
                        done,
                        capacity,
                    });
                    self.advance_inside();
                }
                return;
            }
            Err(ScatterError::Source) => {
                // As if the packet had been lost; the receive is still there for its repetition.
                if done == 0 && header.has(flag::FIRST) {
                    self.put_back(context, index);
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
        self.complete_recv(context, receive_error(index, syndrome));
        self.refuse(context, code);
    }

    #[inline]
    fn on_write(&mut self, context: &mut Context<'_>, header: &Header, source: &Source<'_>) {
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
        let allowed = self.attributes.access.contains(Access::REMOTE_WRITE) || total == 0;
        let target = context.keys.resolve_remote(
            rkey,
            self.accessor(),
            addr,
            missing.into(),
            Access::REMOTE_WRITE,
        );
        let Some(target) = target.ok().filter(|_| allowed) else {
            return self.refuse(context, AckCode::AccessError);
        };
        let immediate = last && header.has(flag::IMMEDIATE);
        let receive = if immediate {
            let Some((index, _)) = self.take_receive(context) else {
                return self.not_ready(context);
            };
            Some(index)
        } else {
            None
        };
        if let Err(error) = self.store(context, source, target) {
            if let Some(index) = receive {
                self.put_back(context, index);
            }
            if error != ScatterError::Source {
                // The memory is registered, but the process took it away.
                self.refuse(context, AckCode::OperationalError);
            }
            return;
        }
        if last {
            self.responder.arriving = None;
            self.advance(1);
            self.responder.owes_ack = true;
            if let Some(index) = receive {
                self.complete_message(context, header, CqeOpcode::RespWriteImm, index, total);
            }
        } else {
            let (addr, missing) = (addr.wrapping_add(arrived.into()), missing - arrived);
            self.responder.arriving = Some(Arriving::Write {
                addr,
                rkey,
                missing,
                total,
            });
            self.advance_inside();
        }
    }

    fn on_read(&mut self, context: &mut Context<'_>, header: &Header) {
        if self.responder.arriving.is_some() {
            return self.refuse(context, AckCode::InvalidRequest);
        }
        if self.responder.answers.len() >= QUEUED_ANSWERS {
            // As if the packet had been lost: only copies of requests can have filled the queue, and that is nobody's fault.
            return;
        }
        if !self.readable(context, header) {
            return self.refuse(context, AckCode::AccessError);
        }
        self.responder.answers.push_back(read_answer(header));
        self.advance(self.response_packets(header.total_bytes));
    }

    fn on_atomic(&mut self, context: &mut Context<'_>, header: &Header) {
        if self.responder.arriving.is_some() || !header.addr.is_multiple_of(8) {
            return self.refuse(context, AckCode::InvalidRequest);
        }
        if self.responder.answers.len() >= QUEUED_ANSWERS {
            // As for a read.
            return;
        }
        let allowed = self.attributes.access.contains(Access::REMOTE_ATOMIC);
        let target = context.keys.resolve_remote(
            header.rkey,
            self.accessor(),
            header.addr,
            8,
            Access::REMOTE_ATOMIC,
        );
        let Some(target) = target.ok().filter(|_| allowed) else {
            return self.refuse(context, AckCode::AccessError);
        };
        let Ok(old) = apply_atomic(context, header, target) else {
            return self.refuse(context, AckCode::OperationalError);
        };
        if self.responder.results.len() == MAX_ANSWERS {
            self.responder.results.pop_front();
        }
        self.responder.results.push_back((header.psn, old));
        self.answer(Kind::AtomicResponse, header.psn, AckCode::Ack, old);
        self.advance(1);
    }

    fn response_packets(&self, total_bytes: u32) -> u32 {
        total_bytes.div_ceil(self.attributes.mtu_bytes).max(1)
    }

    fn readable(&self, context: &Context<'_>, header: &Header) -> bool {
        let allowed =
            self.attributes.access.contains(Access::REMOTE_READ) || header.total_bytes == 0;
        let range = context.keys.resolve_remote(
            header.rkey,
            self.accessor(),
            header.addr,
            header.total_bytes.into(),
            Access::REMOTE_READ,
        );
        allowed && range.is_ok()
    }

    /// A packet that does not end its message. The requester's window is shorter than a long message, so it must hear of the
    /// packets before the last.
    fn advance_inside(&mut self) {
        self.advance(1);
        self.responder.owes_ack |= self.responder.expected_psn.is_multiple_of(ACK_EVERY);
    }

    fn advance(&mut self, packets: u32) {
        self.responder.expected_psn = psn_add(self.responder.expected_psn, packets);
    }

    fn complete_message(
        &mut self,
        context: &mut Context<'_>,
        header: &Header,
        opcode: CqeOpcode,
        index: u32,
        byte_count: u32,
    ) {
        context.copies.settle();
        if self.responder.orphaned || context.copies.is_orphan(self.parts.qpn) {
            // The message has a hole, and nobody is left to fill it: to this side it never came.
            return self.put_back(context, index);
        }
        let cqe = Cqe {
            opcode,
            wqe_counter: index as u16,
            byte_count,
            imm: header.imm,
            solicited: header.has(flag::SOLICITED),
            source_qpn: header.source_qpn,
            source_lid: header.source_lid,
            sl: header.sl,
            ..Cqe::default()
        };
        self.complete_recv(context, cqe);
    }

    /// Tells the owner, once, that packets come before it has made the last transition.
    fn tell_established(&mut self) {
        if self.state() == State::ReadyToReceive && !self.responder.established {
            self.responder.established = true;
            self.notify(Event::CommunicationEstablished {
                qpn: self.parts.qpn,
            });
        }
    }

    fn not_ready(&mut self, context: &mut Context<'_>) {
        if !self.is_receiving() {
            // The queue itself was at fault.
            return;
        }
        context.counters.rnr_naks += 1;
        self.responder.refused = true;
        let code = AckCode::ReceiverNotReady(self.attributes.min_rnr_timer);
        self.answer(Kind::Ack, self.responder.expected_psn, code, 0);
    }

    /// Refuses a request for good: the answer goes out, and the queue pair is in error.
    fn refuse(&mut self, context: &mut Context<'_>, code: AckCode) {
        self.answer(Kind::Ack, self.responder.expected_psn, code, 0);
        let qpn = self.parts.qpn;
        match code {
            AckCode::InvalidRequest => self.notify(Event::QpRequestError { qpn }),
            AckCode::AccessError => self.notify(Event::QpAccessError { qpn }),
            _ => {}
        }
        self.enter_error(context);
    }

    /// The sender has died, and bytes of its last message with it. To a connection it is as if it were cut.
    pub(crate) fn lose_sender(&mut self) {
        self.responder.orphaned = self.parts.transport != Transport::Ud;
    }

    /// Refuses what was the last request, though it was carried out so far, and is in error.
    pub(crate) fn refuse_done(&mut self, context: &mut Context<'_>) {
        self.responder.owes_ack = false;
        if self.parts.transport == Transport::Rc {
            let psn = psn_add(self.responder.expected_psn, 0xff_ffff);
            self.answer(Kind::Ack, psn, AckCode::OperationalError, 0);
        }
        self.enter_error(context);
    }
}

/// What completes when a send has arrived.
fn send_opcode(header: &Header) -> CqeOpcode {
    if header.has(flag::IMMEDIATE) {
        CqeOpcode::RespSendImm
    } else if header.has(flag::INVALIDATE) {
        CqeOpcode::RespSendInv
    } else {
        CqeOpcode::RespSend
    }
}

fn receive_error(index: u32, syndrome: Syndrome) -> Cqe {
    Cqe {
        opcode: CqeOpcode::RespErr,
        wqe_counter: index as u16,
        syndrome: syndrome as u8,
        ..Cqe::default()
    }
}

/// The accesses of a responder to its own registered memory.
mod access {
    #![allow(unsafe_code)] // copies to and from addresses that the key table resolved
    use super::*;
    use crate::soft::packet::{INLINE_BYTES, Span};

    impl Qp {
        /// Stores a packet's payload at a resolved address.
        #[inline]
        pub(super) fn store(
            &self,
            context: &mut Context<'_>,
            source: &Source<'_>,
            target: Place,
        ) -> Result<(), ScatterError> {
            let len_bytes = source.len_bytes();
            // SAFETY: `target` was resolved for at least the payload, under the device's lock, which is still held.
            unsafe { source.copy_to(context.keys, context.copies, 0, target, len_bytes) }
        }

        /// The payload of a read's response.
        pub(super) fn remote_payload(
            &self,
            context: &mut Context<'_>,
            rkey: u32,
            addr: u64,
            len_bytes: u32,
        ) -> Result<Payload, Refused> {
            let from = context.keys.resolve_remote(
                rkey,
                self.accessor(),
                addr,
                len_bytes.into(),
                Access::REMOTE_READ,
            )?;
            if len_bytes as usize > INLINE_BYTES {
                let span = Span {
                    lkey: rkey,
                    len_bytes,
                    addr,
                };
                return Ok(Payload::Memory {
                    pd: self.parts.pd,
                    spans: [span, Span::default()],
                });
            }
            let mut bytes = [0; INLINE_BYTES];
            // SAFETY: resolved for this length just above, under the device's lock.
            unsafe { context.copies.load(from, &mut bytes[..len_bytes as usize]) }
                .map_err(|Fault| Refused)?;
            Ok(if len_bytes == 0 {
                Payload::Empty
            } else {
                Payload::Inline(bytes)
            })
        }
    }

    /// Carries out an atomic; `target` was resolved for 8 bytes and is aligned.
    pub(super) fn apply_atomic(
        context: &mut Context<'_>,
        header: &Header,
        target: Place,
    ) -> Result<u64, Fault> {
        let Header {
            compare, operand, ..
        } = *header;
        // SAFETY: the address was checked for its alignment and resolved by the caller, under the device's lock.
        unsafe {
            match header.kind {
                Kind::CompareSwap => context.copies.compare_swap(target, compare, operand),
                _ => context.copies.fetch_add(target, operand),
            }
        }
    }
}
use access::apply_atomic;
use answers::{Answer, read_answer};
