//! What comes back to a requester: acknowledgements, refusals, responses, or nothing; and how messages end.

use super::flow_window::READ_CHUNK;
use super::message::OutstandingMessage;
use super::opcode::{NOP, RDMA_READ};
use super::state::NextResponse;
use super::unread_peer::Silence;
use crate::device::gather::{GatherSource, ScatterError};
use crate::device::packet::{
    AckCode, Header, PacketKind, flag, psn_add, psn_distance, rnr_delay_ns,
};
use crate::device::qp::{DeviceParts, Qp};
use crate::device::wire::Destination;
use doorbell_wire::mlx5::Syndrome;

impl Qp {
    /// An acknowledgement, positive or negative.
    #[inline]
    pub(crate) fn on_ack(&mut self, context: &mut DeviceParts, header: &Header) {
        let psn = header.psn;
        let requester = &self.requester;
        let in_flight = psn_distance(psn, requester.unacked_psn) >= 0
            && psn_distance(requester.unsent_psn, psn) > 0;
        match header.code {
            AckCode::Ack if in_flight => self.acknowledge(context, psn_add(psn, 1)),
            // A repeated acknowledgement, or one of something never sent.
            AckCode::Ack => {}
            _ if !in_flight => {}
            // What is answered is not the oldest packet if a response before it was lost: that one is asked for again, and the
            // refused packet gets a new answer when it is sent again behind it.
            AckCode::SequenceError => {
                self.acknowledge(context, psn);
                // Behind a packet for which there is no receive all are out of sequence. They are sent again when the wait is over.
                let waits = self.requester.wait_until_ns > context.now_ns;
                if self.requester.unacked_psn == psn && !waits {
                    self.retry(context);
                }
            }
            AckCode::ReceiverNotReady(timer) => {
                self.acknowledge(context, psn);
                let waits = self.requester.wait_until_ns > context.now_ns;
                if self.requester.unacked_psn != psn || waits || !self.is_sending() {
                    return;
                }
                if self.requester.rnr_retries >= self.attributes.rnr_retry
                    && self.attributes.rnr_retry != 7
                {
                    return self.fail_oldest(context, Syndrome::RnrRetryExc);
                }
                self.requester.rnr_retries = self.requester.rnr_retries.saturating_add(1);
                // The packet has arrived, so what was sent again got through.
                self.requester.retries = 0;
                self.requester.wait_until_ns = context.now_ns + rnr_delay_ns(timer);
                self.requester.deadline_ns = None;
                self.go_back(context);
            }
            AckCode::InvalidRequest | AckCode::AccessError | AckCode::OperationalError => {
                self.acknowledge(context, psn);
                let syndrome = match header.code {
                    AckCode::InvalidRequest => Syndrome::RemoteInvalReq,
                    AckCode::AccessError => Syndrome::RemoteAccess,
                    _ => Syndrome::RemoteOp,
                };
                // Only the message that the answer is about may take the blame: a lost response before it is another matter.
                if self.requester.unacked_psn == psn && self.is_sending() {
                    self.fail_oldest(context, syndrome);
                }
            }
        }
    }

    /// Everything before the PSN `upto` has arrived at the peer, except for reads whose response has not come.
    #[inline]
    fn acknowledge(&mut self, context: &mut DeviceParts, upto: u32) {
        let requester = &mut self.requester;
        let mut upto = upto;
        let mut lost_response = false;
        if requester.unanswered > 0 {
            let unanswered = requester
                .messages
                .iter()
                .find(|message| message.wants_response() && !message.answered());
            if let Some(read) = unanswered {
                let missing = psn_add(read.first_psn, read.responses);
                if psn_distance(upto, missing) > 0 {
                    upto = missing;
                    lost_response = true;
                }
            }
        }
        let arrived = psn_distance(upto, requester.unacked_psn);
        if arrived > 0 {
            requester.window.grow(arrived as u32);
            requester.unacked_psn = upto;
            requester.catch_up();
            self.progressed(context);
            self.reap(context);
        }
        if lost_response {
            self.ask_again(context);
        }
    }

    /// Something new arrived: the counters of retries start anew.
    #[inline]
    fn progressed(&mut self, context: &DeviceParts) {
        let requester = &mut self.requester;
        requester.retries = 0;
        requester.rnr_retries = 0;
        requester.asked_again = false;
        // What the receiver was not ready for has arrived by another packet.
        requester.wait_until_ns = 0;
        requester.unread_peer.answered();
        let outstanding = psn_distance(requester.unsent_psn, requester.unacked_psn) > 0;
        requester.deadline_ns = outstanding.then(|| {
            context
                .now_ns
                .saturating_add(self.attributes.ack_timeout_ns())
        });
    }

    /// A later packet shows that a response was lost. One retry for one loss, however many later packets show it.
    fn ask_again(&mut self, context: &mut DeviceParts) {
        if !self.requester.asked_again {
            self.retry(context);
            self.requester.asked_again = true;
        }
    }

    /// Goes back and counts it; too often without progress is the end.
    fn retry(&mut self, context: &mut DeviceParts) {
        if !self.is_sending() {
            return;
        }
        if self.requester.retries >= self.attributes.retry_count {
            return self.fail_oldest(context, Syndrome::TransportRetryExc);
        }
        self.requester.retries += 1;
        self.send_again(context);
    }

    /// Goes back after a loss.
    fn send_again(&mut self, context: &mut DeviceParts) {
        self.requester.window.shrink(context.now_ns);
        self.requester.asked_again = false;
        self.requester.deadline_ns = Some(
            context
                .now_ns
                .saturating_add(self.attributes.ack_timeout_ns()),
        );
        self.go_back(context);
    }

    /// The network tells that packets of this queue pair come through congestion.
    pub(crate) fn on_congestion_notice(&mut self, now_ns: u64) {
        self.requester.window.shrink_for_notice(now_ns);
        self.rate.lower(now_ns);
    }

    /// Sets the cursor to the oldest packet without acknowledgement.
    fn go_back(&mut self, context: &mut DeviceParts) {
        context.counters.retransmissions += 1;
        let requester = &mut self.requester;
        let unacked = requester.unacked_psn;
        // A NOP takes no PSN: one whose turn has come was completed, so the one found here still waits for it.
        let at = requester.messages.iter().position(|message| {
            let end = psn_distance(psn_add(message.first_psn, message.packets), unacked);
            end > 0 || (end == 0 && message.packets == 0)
        });
        requester.cursor = at.unwrap_or(requester.messages.len());
        requester.next_response = NextResponse::Any;
        requester.packet = match requester.messages.get(requester.cursor) {
            Some(message) if !message.wants_response() => {
                psn_distance(unacked, message.first_psn).max(0) as u32
            }
            _ => 0,
        };
        let sent = requester.messages.iter().take(requester.cursor);
        requester.reads = sent
            .filter(|message| message.wants_response() && !message.answered())
            .count() as u32;
    }

    /// When it wants to be called again though nothing arrived.
    pub(crate) fn next_timer_ns(&self) -> Option<u64> {
        let responder = self.responder.next_timer_ns();
        let requester = self.requester.next_timer_ns();
        requester.into_iter().chain(responder).min()
    }

    /// The timer ran out, or a wait for the receiver is over, or something late is due. Whether there is something to send.
    pub(crate) fn on_timer(&mut self, context: &mut DeviceParts) -> bool {
        self.resume_when_due(context.now_ns)
            | self.place_when_due(context)
            | self.place_response_when_due(context)
            | self.on_requester_timer(context)
    }

    fn on_requester_timer(&mut self, context: &mut DeviceParts) -> bool {
        if !self.is_sending() {
            self.requester.deadline_ns = None;
            self.requester.wait_until_ns = 0;
            self.requester.fetch_from_ns = 0;
            return false;
        }
        let mut due = false;
        if self.requester.fetch_from_ns > 0 && self.requester.fetch_from_ns <= context.now_ns {
            self.requester.fetch_from_ns = 0;
            due = true;
        }
        if self.requester.wait_until_ns > 0 && self.requester.wait_until_ns <= context.now_ns {
            self.requester.wait_until_ns = 0;
            due = true;
        }
        if self
            .requester
            .deadline_ns
            .is_some_and(|deadline| deadline <= context.now_ns)
        {
            self.requester.deadline_ns = None;
            let has_more = self.requester.has_work() || !self.requester.messages.is_empty();
            match self.silence(context) {
                Silence::Unread => {
                    let again = context
                        .now_ns
                        .saturating_add(self.attributes.ack_timeout_ns());
                    self.requester.deadline_ns = Some(again);
                }
                _ if !has_more => {}
                Silence::Dropped => {
                    // Not counted: the peer is there, and may drop more until it gets a processor.
                    self.send_again(context);
                    due = true;
                }
                Silence::Lost => {
                    self.retry(context);
                    due = true;
                }
            }
        }
        due
    }

    /// Why no answer has come in time.
    fn silence(&mut self, context: &mut DeviceParts) -> Silence {
        let Some(remote) = self.remote else {
            return Silence::Lost;
        };
        let now_ns = context.now_ns;
        let unread_peer = &mut self.requester.unread_peer;
        let by_socket = matches!(remote.to, Destination::Host(_));
        unread_peer.silence(now_ns, by_socket, || context.unread_at(remote.to))
    }

    /// A response to a read or an atomic.
    pub(crate) fn on_response(
        &mut self,
        context: &mut DeviceParts,
        header: &Header,
        source: &GatherSource<'_>,
    ) {
        self.catch_up_with_response(context, header);
        let psn = header.psn;
        let requester = &mut self.requester;
        // With the one at the cursor, if a piece of it was asked for.
        let begun = requester.cursor + usize::from(requester.packet > 0);
        let oldest = requester
            .messages
            .iter_mut()
            .take(begun)
            .find(|m| m.wants_response() && !m.answered());
        let Some(message) = oldest else { return };
        let expected = psn_add(message.first_psn, message.responses);
        match psn_distance(psn, expected) {
            0 => {}
            // An earlier response is missing; or this is an old one once more.
            1.. => return self.ask_again(context),
            _ => return,
        }
        let (index, request) = (message.index, message.request);
        let offset = message.responses * self.attributes.mtu_bytes;
        let total = request.total_bytes as u32;
        let word = header.operand.to_ne_bytes();
        let atomic = request.opcode != RDMA_READ;
        let source = if atomic {
            &GatherSource::Bytes(&word)
        } else {
            source
        };
        let kind = if atomic {
            PacketKind::AtomicResponse
        } else {
            PacketKind::ReadResponse
        };
        let wanted = if atomic {
            8
        } else {
            (total - offset.min(total)).min(self.attributes.mtu_bytes)
        };
        let end_psn = psn_add(message.first_psn, message.packets);
        let is_last = psn_add(psn, 1) == end_psn;
        let in_pieces =
            matches!(self.remote, Some(remote) if matches!(remote.to, Destination::Host(_)));
        let ends_request =
            is_last || (in_pieces && (message.responses + 1).is_multiple_of(READ_CHUNK));
        // As the kernel's rxe checks a response (`check_ack` of rxe_comp.c): its opcode follows the one before, and its syndrome is that of an acknowledgement.
        let in_order = atomic
            || (requester.next_response.allows(header.has(flag::FIRST))
                && header.has(flag::LAST) == ends_request);
        if header.kind != kind
            || header.code != AckCode::Ack
            || source.len_bytes() != wanted
            || !in_order
        {
            return self.fail_message(context, index, Syndrome::BadResp);
        }
        let put_off = !is_last && context.wire.late_packets_ns() > 0;
        let placed = if put_off && self.requester.late.is_none() {
            self.put_off_response(context, source, (index, end_psn), offset)
        } else {
            self.place_response(context, index, offset, source)
        };
        match placed {
            Ok(()) => {}
            Err(ScatterError::Source) => return context.copies.lose_response(),
            Err(_) => return self.fail_message(context, index, Syndrome::LocalProt),
        }
        let requester = &mut self.requester;
        if let Some(message) = requester.messages.iter_mut().find(|m| m.index == index) {
            message.responses += 1;
        }
        if !atomic {
            requester.next_response = match ends_request {
                true => NextResponse::First,
                false => NextResponse::Further,
            };
        }
        if ends_request {
            // Those that were on their way when the requester went back are not counted.
            requester.reads = requester.reads.saturating_sub(1);
        }
        if is_last {
            requester.unanswered -= 1;
        }
        // A response acknowledges what came before it.
        let arrived = psn_distance(psn_add(psn, 1), requester.unacked_psn);
        if arrived > 0 {
            requester.window.grow(arrived as u32);
            requester.unacked_psn = psn_add(psn, 1);
        }
        requester.catch_up();
        self.progressed(context);
        self.reap(context);
    }

    /// Completes from the front what is done.
    #[inline]
    pub(super) fn reap(&mut self, context: &mut DeviceParts) {
        while let Some(message) = self.requester.messages.front() {
            if let Some(syndrome) = message.failed {
                return self.fail_oldest(context, syndrome);
            }
            let last = psn_add(message.first_psn, message.packets);
            let done = if message.wants_response() {
                message.answered() && !self.requester.is_late(message.index)
            } else {
                psn_distance(self.requester.unacked_psn, last) >= 0
            };
            // A NOP is done when its turn has come.
            if !done || self.requester.cursor == 0 {
                return;
            }
            let Some(message) = self.requester.messages.pop_front() else {
                return;
            };
            self.requester.cursor -= 1;
            if message.request.signaled {
                let bytes = message.request.total_bytes as u32;
                self.complete_send(
                    context,
                    message.index as u16,
                    message.request.opcode,
                    bytes,
                    None,
                );
            }
        }
    }

    /// A message that may not be the oldest has failed: it ends the queue pair when its turn comes.
    pub(super) fn fail_message(
        &mut self,
        context: &mut DeviceParts,
        index: u32,
        syndrome: Syndrome,
    ) {
        let messages = &mut self.requester.messages;
        let at = messages.iter().position(|message| message.index == index);
        if let Some(message) = at.and_then(|at| messages.get_mut(at)) {
            message.failed = Some(syndrome);
        }
        if at == Some(0) {
            self.reap(context);
        }
    }

    /// The bytes of the packet with this number cannot be read.
    pub(crate) fn lose_source(&mut self, context: &mut DeviceParts, psn: u32) {
        let of_packet = |message: &&OutstandingMessage| {
            let behind = psn_distance(psn, message.first_psn);
            u32::try_from(behind).is_ok_and(|behind| behind < message.packets)
        };
        let message = self.requester.messages.iter().find(of_packet);
        if let Some(index) = message.map(|message| message.index) {
            self.fail_message(context, index, Syndrome::LocalProt);
        }
    }

    /// The oldest message fails, and with it the queue pair.
    pub(crate) fn fail_oldest(&mut self, context: &mut DeviceParts, syndrome: Syndrome) {
        if let Some(message) = self.requester.messages.pop_front() {
            self.complete_send(
                context,
                message.index as u16,
                message.request.opcode,
                0,
                Some(syndrome),
            );
        }
        self.fail_sends(context);
    }

    /// Completes in error what was announced and is not complete.
    pub(crate) fn flush_sends(&mut self, context: &mut DeviceParts) {
        self.requester.deadline_ns = None;
        self.requester.wait_until_ns = 0;
        self.requester.cursor = 0;
        self.requester.reads = 0;
        self.requester.unanswered = 0;
        self.requester.late = None;
        while let Some(message) = self.requester.messages.pop_front() {
            self.complete_send(
                context,
                message.index as u16,
                message.request.opcode,
                0,
                Some(Syndrome::WrFlush),
            );
        }
        // An unreliable queue pair may go on from here.
        self.requester.packet = 0;
        self.requester.unacked_psn = self.requester.next_psn;
        self.requester.unsent_psn = self.requester.next_psn;
        loop {
            let waiting = self.requester.announced.wrapping_sub(self.requester.begun);
            if waiting == 0 {
                return;
            }
            let index = self.requester.begun;
            let loaded = context.gather.load(&self.parts, index, waiting);
            let (wqebbs, opcode) = loaded.map_or((1, NOP), |request| {
                (u32::from(request.ds).div_ceil(4), request.opcode)
            });
            self.requester.begun = index.wrapping_add(wqebbs);
            self.complete_send(context, index as u16, opcode, 0, Some(Syndrome::WrFlush));
        }
    }
}
