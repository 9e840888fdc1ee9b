//! The responder of a reliable connection: takes requests in order, moves their data, and answers.

mod answers;
mod datagrams;
mod memory;
mod messages;
mod reads;
mod receives;
mod unreliable;

use std::collections::VecDeque;

use self::answers::Answer;
use self::messages::Arriving;
use crate::device::client::{Event, Transport};
use crate::device::gather::Source;
use crate::device::packet::{AckCode, Header, Kind, psn_add, psn_distance};
use crate::device::qp::{Context, Qp, State};
use crate::device::wire::Counted;

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

    fn advance(&mut self, packets: u32) {
        self.responder.expected_psn = psn_add(self.responder.expected_psn, packets);
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
