//! The responder of a reliable connection: takes requests in order, moves their data, and answers.

mod acks;
mod datagrams;
mod late_packets;
mod memory;
mod messages;
mod reads;
mod receives;
mod state;
mod unreliable;

pub(crate) use self::state::Responder;
use crate::device::client::{DeviceEvent, Transport};
use crate::device::copies::CopyOrigin;
use crate::device::gather::GatherSource;
use crate::device::keys::Access;
use crate::device::packet::{AckCode, Header, PacketKind, flag, psn_add, psn_distance};
use crate::device::qp::{DeviceParts, Qp, State};
use crate::device::wire::Counted;

/// The longest write or read that a request may ask for (IBTA 9.7.4.1.6).
const MAX_DMA_BYTES: u32 = 1 << 31;

impl Qp {
    /// A request has arrived. Afterwards the queue pair belongs on the list of those that owe an answer.
    #[inline]
    pub(crate) fn on_request(
        &mut self,
        context: &mut DeviceParts,
        header: &Header,
        source: &GatherSource<'_>,
    ) {
        if !self.is_receiving() || self.responder.sender_lost {
            return;
        }
        match self.parts.transport {
            Transport::Rc => {}
            Transport::Uc => return self.on_unreliable(context, header, source),
            Transport::Ud => return self.on_datagram(context, header, source),
        }
        self.notify_established();
        self.catch_up_with(context, header);
        if !self.is_receiving() {
            return;
        }
        let distance = psn_distance(header.psn, self.responder.expected_psn);
        if distance > 0 {
            if !self.responder.refused {
                self.responder.refused = true;
                self.refuse_for_now(self.responder.expected_psn, AckCode::SequenceError);
            }
            return;
        }
        if distance < 0 {
            return self.repeat(context, header);
        }
        self.responder.refused = false;
        if let Some(code) = context.wire.fault_code(Counted::Request) {
            return self.refuse_by_fault(context, code);
        }
        if !self.serves(header.kind) || !self.fits_path_mtu(header, source.len_bytes()) {
            return self.refuse(context, AckCode::InvalidRequest);
        }
        match header.kind {
            PacketKind::Send => self.on_send(context, header, source),
            PacketKind::Write => self.on_write(context, header, source),
            PacketKind::ReadRequest => self.on_read(context, header),
            _ => self.on_atomic(context, header),
        }
    }

    /// Whether the rights of the queue pair allow requests of this kind, with any length: without a right the receive queue does not support the operation
    /// (`check_op_valid` in the kernel's `rxe_resp.c`). What a key allows is another matter.
    #[inline]
    fn serves(&self, kind: PacketKind) -> bool {
        let right = match kind {
            PacketKind::Write => Access::REMOTE_WRITE,
            PacketKind::ReadRequest => Access::REMOTE_READ,
            PacketKind::CompareSwap | PacketKind::FetchAdd => Access::REMOTE_ATOMIC,
            _ => return true,
        };
        self.attributes.access.contains(right)
    }

    /// Whether a request of a connection has a length that its place in the message allows (IBTA 9.7.4.1.6). The first packet and the middle ones
    /// have one path MTU, the last has 1 byte or more, and none has more than one. A packet with several PSNs stands for as many packets.
    #[inline]
    fn fits_path_mtu(&self, header: &Header, len_bytes: u32) -> bool {
        if matches!(header.kind, PacketKind::Write | PacketKind::ReadRequest)
            && header.has(flag::FIRST)
            && header.total_bytes > MAX_DMA_BYTES
        {
            return false;
        }
        if !matches!(header.kind, PacketKind::Send | PacketKind::Write) {
            return true;
        }
        let (mtu, psns) = (self.attributes.mtu_bytes, u32::from(header.psns));
        match (header.has(flag::FIRST), header.has(flag::LAST)) {
            (_, false) => len_bytes == psns * mtu,
            (false, true) if len_bytes == 0 => false,
            (_, true) => len_bytes.div_ceil(mtu).max(1) == psns,
        }
    }

    #[cold]
    fn refuse_by_fault(&mut self, context: &mut DeviceParts, code: u8) {
        self.place_late(context);
        if !self.is_receiving() {
            return;
        }
        match AckCode::parse(code) {
            None | Some(AckCode::Ack) => {}
            Some(code @ (AckCode::SequenceError | AckCode::ReceiverNotReady(_))) => {
                self.responder.refused = true;
                self.refuse_for_now(self.responder.expected_psn, code);
            }
            Some(code) => self.refuse(context, code),
        }
    }

    fn advance(&mut self, packets: u32) {
        self.responder.expected_psn = psn_add(self.responder.expected_psn, packets);
    }

    /// The last packet of a message.
    fn advance_message(&mut self, packets: u32) {
        self.advance(packets);
        self.responder.msn = psn_add(self.responder.msn, 1);
    }

    /// A packet came through congestion. Whether the peer is to be told: once in so long.
    pub(crate) fn owes_notice(&mut self, now_ns: u64, every_ns: u64) -> bool {
        let told = self.responder.noticed_ns;
        let owes = told.is_none_or(|told| now_ns.saturating_sub(told) >= every_ns);
        if owes {
            self.responder.noticed_ns = Some(now_ns);
        }
        owes
    }

    /// Notifies the owner, once, that packets arrive before it has made the transition to RTS.
    fn notify_established(&mut self) {
        if self.state() == State::ReadyToReceive && !self.responder.established {
            self.responder.established = true;
            self.notify(DeviceEvent::CommunicationEstablished {
                qpn: self.parts.qpn,
            });
        }
    }

    fn not_ready(&mut self, context: &mut DeviceParts) {
        // The answer acknowledges what came before.
        self.place_late(context);
        if !self.is_receiving() {
            // The queue itself was at fault.
            return;
        }
        // Packets behind it are out of sequence, and dropped: a responder has one negative answer out at a time, as in the kernel's hfi1 driver. (SoftRoCE
        // answers the first of them with a sequence NAK, too.)
        self.responder.refused = true;
        let code = AckCode::ReceiverNotReady(self.attributes.min_rnr_timer);
        let is_queued = self.refuse_for_now(self.responder.expected_psn, code);
        context.counters.rnr_naks += u64::from(is_queued);
    }

    /// Refuses a request for good: the answer goes out, and the queue pair is in error.
    fn refuse(&mut self, context: &mut DeviceParts, code: AckCode) {
        // The answer acknowledges what came before.
        self.place_late(context);
        if !self.is_receiving() {
            // What was late is refused instead.
            return;
        }
        self.answer(self.responder.expected_psn, code);
        self.notify_refusal(code);
        self.enter_error_behind_answers(context);
    }

    /// Notifies the owner why the queue pair goes to the error state, if there is an event for that.
    pub(super) fn notify_refusal(&self, code: AckCode) {
        let qpn = self.parts.qpn;
        match code {
            _ if self.state() == State::Error => {}
            AckCode::InvalidRequest => self.notify(DeviceEvent::QpRequestError { qpn }),
            AckCode::AccessError => self.notify(DeviceEvent::QpAccessError { qpn }),
            _ => {}
        }
    }

    /// Whether a refusal leaves instead of this response, which waited to leave until its region was no longer registered. A queue pair in error sends
    /// nothing, and one whose process is dying does not refuse.
    pub(crate) fn refuses_instead_of(&self, response: &Header) -> bool {
        self.is_receiving()
            && self.remote.is_some_and(|remote| {
                (remote.qpn, remote.connection) == (response.dst_qpn, response.connection)
            })
            && !self.parts.send_record.space().is_gone()
    }

    /// Such a refusal leaves, and nothing behind it.
    pub(crate) fn end_by_refusal(&mut self, context: &mut DeviceParts) {
        self.notify_refusal(AckCode::AccessError);
        self.enter_error(context);
    }

    /// The sender has died, and bytes of its last message with it. A connection takes no more packets.
    pub(crate) fn lose_sender(&mut self) {
        self.responder.sender_lost = self.parts.transport != Transport::Ud;
    }

    /// Refuses a request whose bytes could not be copied, though later ones may have been carried out, and is in error.
    pub(crate) fn refuse_copied(&mut self, context: &mut DeviceParts, cause: CopyOrigin) {
        self.refuse_psn(context, cause.psn, AckCode::OperationalError);
    }

    /// The request of that packet was not executed. What would acknowledge it is not sent: answers to it and to later ones.
    pub(crate) fn withdraw_answers(&mut self, psn: u32) {
        self.responder.withdraw_ack();
        self.responder
            .answers
            .retain(|answer| psn_distance(answer.psn(), psn) < 0);
    }

    /// Refuses the request of an earlier packet, and is in error. The answer acknowledges what came before that packet, and nothing else.
    fn refuse_psn(&mut self, context: &mut DeviceParts, psn: u32, code: AckCode) {
        self.withdraw_answers(psn);
        if self.parts.transport == Transport::Rc {
            self.answer(psn, code);
            self.notify_refusal(code);
        }
        self.enter_error_behind_answers(context);
    }
}
