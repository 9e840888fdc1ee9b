//! Incoming packets: the queue pair that each goes to, and the work after them.

use super::DeviceCore;
use crate::device::gather::GatherSource;
use crate::device::packet::{Header, Packet, PacketKind};
use crate::device::qp::Qp;
use doorbell_wire::mlx5::Datagram;

/// The queue pair in that place, if it still has the number.
#[inline]
pub(super) fn numbered(qps: &mut [Option<Box<Qp>>], slot: usize, qpn: u32) -> Option<&mut Qp> {
    qps.get_mut(slot)?
        .as_deref_mut()
        .filter(|qp| qp.parts.qpn == qpn)
}

/// Whether a refusal takes the place of this response, whose bytes can no longer be read. `refused` are the responses of which that was said already: a
/// queue pair refuses once.
#[cold]
pub(super) fn is_refused_instead(
    qps: &mut [Option<Box<Qp>>],
    slot_mask: u32,
    response: &Header,
    refused: &[Header],
) -> bool {
    let qpn = response.source_qpn;
    let is_first = refused.iter().all(|other| other.source_qpn != qpn);
    let sender = numbered(qps, (qpn & slot_mask) as usize, qpn);
    is_first && sender.is_some_and(|qp| qp.refuses_instead_of(response))
}

impl DeviceCore {
    #[inline]
    pub(super) fn deliver(&mut self, now_ns: u64) -> bool {
        let packets = self.parts.wire.take_arrived();
        for Packet { header, payload } in &packets {
            self.parts.sender = self.parts.host_behind(header);
            self.dispatch(
                now_ns,
                header,
                &GatherSource::of(payload, header.payload_bytes),
            );
        }
        self.parts.sender = None;
        let worked = !packets.is_empty();
        self.parts.wire.give_back(packets);
        self.settle(now_ns);
        worked
    }

    /// Makes the copies that were collected, before a completion or an acknowledgement reports them.
    #[inline]
    pub(super) fn settle(&mut self, now_ns: u64) {
        self.parts.copies.settle();
        while let Some(qpn) = self.parts.copies.take_lost_sender() {
            let slot = self.slot_of(qpn);
            if let Some(qp) = numbered(&mut self.qps, slot, qpn) {
                qp.lose_sender();
            }
        }
        while let Some(cause) = self.parts.copies.take_any_fault() {
            let slot = self.slot_of(cause.qpn);
            if let Some(qp) = numbered(&mut self.qps, slot, cause.qpn) {
                qp.lose_data(self.parts.at(now_ns), cause);
            }
            self.mark_active(slot);
        }
    }

    #[inline]
    pub(super) fn dispatch(&mut self, now_ns: u64, header: &Header, source: &GatherSource<'_>) {
        if self.parts.wire.is_down() || self.parts.wire.loses_arrival() {
            self.parts.counters.packets_dropped += 1;
            return;
        }
        if header.dst_qpn == Datagram::MULTICAST_QPN {
            return self.dispatch_to_group(now_ns, header, source);
        }
        let slot = self.slot_of(header.dst_qpn);
        let receiver = numbered(&mut self.qps, slot, header.dst_qpn);
        let sender = self.parts.sender;
        let by_udp = sender.filter(|_| header.source_lid == 0);
        let Some(qp) = receiver.filter(|qp| qp.expects(header, sender)) else {
            let message = self.receive_mad(header, source);
            let is_kept = message.is_some();
            self.parts.counters.packets_received += u64::from(is_kept);
            self.parts.counters.packets_dropped += u64::from(!is_kept);
            if let Some(trace) = &mut self.parts.trace {
                trace.received(now_ns, by_udp, header, message, is_kept);
            }
            return;
        };
        self.parts.counters.packets_received += 1;
        if let Some(trace) = &mut self.parts.trace {
            trace.received(now_ns, by_udp, header, None, true);
        }
        self.parts
            .copies
            .work_for(header.dst_qpn, header.kind.is_request(), header.psn);
        let view = self.parts.at(now_ns);
        if header.kind.is_request() {
            qp.on_request(view, header, source);
        } else if qp.is_sending() {
            match header.kind {
                PacketKind::Ack => qp.on_ack(view, header),
                _ => qp.on_response(view, header, source),
            }
        }
        self.mark_active(slot);
        if self.parts.copies.take_lost_source() {
            self.lose_source(now_ns, header);
        }
        if self.parts.copies.take_lost_response() {
            self.refuse_response(now_ns, slot, header);
        }
    }

    /// The bytes of a response of this device to itself could not be read: the requester, in that slot, gets a refusal instead, if the responder sends one.
    #[cold]
    fn refuse_response(&mut self, now_ns: u64, slot: usize, response: &Header) {
        let slot_mask = self.parts.slot_mask();
        if !is_refused_instead(&mut self.qps, slot_mask, response, &[]) {
            return;
        }
        self.fail_responder(now_ns, response);
        if let Some(qp) = numbered(&mut self.qps, slot, response.dst_qpn) {
            qp.on_ack(self.parts.at(now_ns), &response.refused());
        }
        self.mark_active(slot);
    }

    /// The queue pair that sent this response has refused the read instead, and is in error.
    #[cold]
    pub(super) fn fail_responder(&mut self, now_ns: u64, response: &Header) {
        let slot = self.slot_of(response.source_qpn);
        if let Some(qp) = numbered(&mut self.qps, slot, response.source_qpn) {
            qp.end_by_refusal(self.parts.at(now_ns));
        }
        self.mark_active(slot);
    }

    /// The bytes of a packet of this device could not be read. A request fails with a local protection error; otherwise its queue pair would
    /// repeat it. The requester of a response has been notified already.
    #[cold]
    pub(super) fn lose_source(&mut self, now_ns: u64, header: &Header) {
        if !header.kind.is_request() {
            return;
        }
        let slot = self.slot_of(header.source_qpn);
        if let Some(qp) = numbered(&mut self.qps, slot, header.source_qpn) {
            qp.lose_source(self.parts.at(now_ns), header.psn);
        }
        self.mark_active(slot);
    }

    /// A datagram for a group: each member gets it. The fabric brings every node a copy, so one for a group without members here is not counted; by UDP
    /// there are no groups, and what comes is a stranger's.
    #[cold]
    fn dispatch_to_group(&mut self, now_ns: u64, header: &Header, source: &GatherSource<'_>) {
        let members = self.group_members(&header.grh_gid());
        let sender = self.parts.sender;
        let by_udp = sender.filter(|_| header.source_lid == 0);
        if let Some(trace) = &mut self.parts.trace {
            trace.received(now_ns, by_udp, header, None, members.is_some());
        }
        let (is_for_this_node, before) = (
            sender.is_some() || members.is_some(),
            self.parts.counters.packets_received,
        );
        for slot in members.unwrap_or_default() {
            if let Some(Some(qp)) = self.qps.get_mut(slot)
                && qp.expects(header, None)
                && !(qp.parts.blocks_loopback && header.source_qpn == qp.parts.qpn)
            {
                self.parts.counters.packets_received += 1;
                self.parts.copies.work_for(qp.parts.qpn, true, header.psn);
                qp.on_request(self.parts.at(now_ns), header, source);
                self.mark_active(slot);
            }
        }
        if is_for_this_node && self.parts.counters.packets_received == before {
            self.parts.counters.packets_dropped += 1;
        }
    }

    /// Handles a packet that no device has sent, or handles a packet before others that came with it.
    #[cfg(test)]
    pub(crate) fn inject(&mut self, header: &Header, payload: &[u8]) {
        // Between hosts the number of the connection does not travel: see ready_to_receive.
        let is_counted = self.parts.host_gid.is_none();
        let header = Header {
            connection: if is_counted { header.connection } else { 0 },
            ..*header
        };
        self.dispatch(self.parts.now_ns, &header, &GatherSource::Bytes(payload));
    }
}
