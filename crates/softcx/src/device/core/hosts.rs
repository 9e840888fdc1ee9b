//! Packets from other hosts and to them.

use std::collections::VecDeque;

use super::DeviceCore;
use super::lanes::fill;
use super::packets::{is_refused_instead, numbered};
use crate::device::capture::FrameCapture;
use crate::device::copies::Copies;
use crate::device::gather::GatherSource;
use crate::device::keys::Keys;
use crate::device::packet::{Header, MAX_PAYLOAD_BYTES, Packet, PacketKind, Service};
use crate::device::roce::{
    CongestionNotice, MAX_HEADER_BYTES, RoceFrame, RoutedFields, UdpFlow, notice_bytes,
    partition_of, read_frame, seal_frame, write_headers,
};
use crate::device::udp::{UdpArrival, UdpWire};
use doorbell_wire::mlx5::Datagram;

/// System calls for what has arrived, before others have their turn.
const ROUNDS: usize = 4;
/// The bits of the traffic class that say that a router was congested (RFC 3168).
const CONGESTION: u8 = 3;
/// A peer is told of it so often at most.
const NOTICE_NS: u64 = 50_000;

impl DeviceCore {
    /// Takes packets that have arrived by UDP.
    pub(super) fn receive_from_hosts(&mut self, now_ns: u64) -> bool {
        let Some(mut udp) = self.parts.udp.take() else {
            return false;
        };
        let mut worked = false;
        for _ in 0..ROUNDS {
            let (count, more) = udp.receive();
            for at in 0..count {
                for arrival in udp.arrivals.get(at) {
                    match arrival {
                        Some(arrival) => self.take_datagram(now_ns, udp.gid, &arrival),
                        None => self.parts.counters.packets_dropped += 1,
                    }
                }
            }
            // What refers to the bytes is done before the next ones take their place.
            self.settle(now_ns);
            worked |= count > 0;
            if !more {
                break;
            }
        }
        self.parts.udp = Some(udp);
        worked
    }

    fn take_datagram(&mut self, now_ns: u64, own: [u8; 16], arrival: &UdpArrival<'_>) {
        let flow = UdpFlow {
            from: arrival.from,
            to: own,
            source_port: arrival.source_port,
            identification: arrival.identification,
        };
        let Ok((frame, identification)) = read_frame(&flow, arrival.bytes) else {
            self.parts.counters.packets_dropped += 1;
            return;
        };
        if let Some(capture) = &mut self.parts.capture {
            let flow = UdpFlow {
                identification,
                ..flow
            };
            let routed = RoutedFields {
                traffic_class: arrival.traffic_class,
                hop_limit: arrival.hop_limit,
            };
            capture.record(now_ns, &flow, routed, arrival.bytes);
        }
        let (mut header, payload) = match frame {
            RoceFrame::Packet(header, payload) => (header, payload),
            RoceFrame::CongestionNotice(qpn) => {
                return self.take_notice(now_ns, qpn, arrival.from);
            }
        };
        if header.service == Service::Datagram {
            let header_fields = Datagram {
                gid: own,
                traffic_class: arrival.traffic_class,
                hop_limit: arrival.hop_limit,
                ..Datagram::default()
            };
            header.set_grh(&header_fields);
        } else {
            let slot = self.slot_of(header.dst_qpn);
            if let Some(qp) = numbered(&mut self.qps, slot, header.dst_qpn)
                && let Some(remote) = qp.remote
            {
                header.source_qpn = remote.qpn;
                if arrival.traffic_class & CONGESTION == CONGESTION
                    && qp.expects(&header, Some(arrival.from))
                    && qp.owes_notice(now_ns, NOTICE_NS)
                {
                    self.parts.notices.push(CongestionNotice {
                        to: arrival.from,
                        qpn: remote.qpn,
                        partition: partition_of(arrival.bytes),
                    });
                }
            }
        }
        let Some(bytes) = arrival.bytes.get(payload) else {
            return;
        };
        let source = GatherSource::Lane {
            start: bytes.as_ptr(),
            len_bytes: bytes.len() as u32,
        };
        self.parts.sender = Some(arrival.from);
        self.dispatch(now_ns, &header, &source);
        self.parts.sender = None;
    }

    /// A notice of congestion from the peer of a queue pair.
    fn take_notice(&mut self, now_ns: u64, qpn: u32, from: [u8; 16]) {
        let slot = self.slot_of(qpn);
        let receiver = numbered(&mut self.qps, slot, qpn);
        match receiver.filter(|qp| qp.is_connected_to(from)) {
            Some(qp) => {
                qp.on_congestion_notice(now_ns);
                self.parts.counters.congestion_notices += 1;
            }
            None => self.parts.counters.packets_dropped += 1,
        }
    }

    /// Sends packets to other hosts.
    pub(super) fn send_to_hosts(&mut self, now_ns: u64) -> bool {
        let slot_mask = self.parts.slot_mask();
        let parts = &mut self.parts;
        let Some(udp) = parts.udp.as_deref_mut() else {
            return false;
        };
        let mut worked = false;
        let (mut lost, mut refused) = (Vec::new(), Vec::new());
        loop {
            let (is_through, dropped) = udp.departures.send();
            parts.counters.packets_dropped += dropped;
            if !is_through {
                break;
            }
            while udp.departures.room() > 0
                && let Some(notice) = parts.notices.pop()
            {
                write_notice(udp, parts.capture.as_deref_mut(), now_ns, notice);
            }
            let queue = parts.wire.for_hosts();
            let count = queue.len().min(udp.departures.room());
            if count == 0 && udp.departures.is_empty() {
                break;
            }
            worked = true;
            let mut builder = FrameBuilder {
                udp,
                keys: &parts.keys,
                copies: &mut parts.copies,
                capture: parts.capture.as_deref_mut(),
                now_ns,
            };
            if builder.build(queue, count) {
                queue.drain(..count);
                continue;
            }
            // Of which packet the bytes are gone, is found out when each goes alone.
            for (to, packet) in queue.drain(..count) {
                let header = packet.header;
                let mut alone = VecDeque::from([(to, packet)]);
                if builder.build(&alone, 1) {
                    continue;
                }
                let has_lost_source = builder.copies.take_lost_source();
                if header.kind != PacketKind::ReadResponse {
                    lost.extend(has_lost_source.then_some(header));
                } else if is_refused_instead(&mut self.qps, slot_mask, &header, &refused) {
                    alone[0].1 = Packet {
                        header: header.refused(),
                        payload: crate::device::packet::PacketPayload::Empty,
                    };
                    builder.build(&alone, 1);
                    refused.push(header);
                }
            }
        }
        if worked {
            self.release_held();
        }
        for header in lost {
            self.lose_source(now_ns, &header);
        }
        for header in refused {
            self.fail_responder(now_ns, &header);
        }
        worked
    }
}

fn write_notice(
    udp: &mut UdpWire,
    capture: Option<&mut FrameCapture>,
    now_ns: u64,
    notice: CongestionNotice,
) {
    let CongestionNotice { to, qpn, partition } = notice;
    let (flow, source_port) = udp.departures.flow(0, qpn);
    let ends = UdpFlow {
        from: udp.gid,
        to,
        source_port,
        identification: 0,
    };
    let Some(frame) = udp.departures.slot(0) else {
        return;
    };
    let notice = notice_bytes(qpn, partition);
    frame[..notice.len()].copy_from_slice(&notice);
    let len_bytes = seal_frame(&ends, frame, notice.len());
    if let Some(capture) = capture {
        capture.record(now_ns, &ends, RoutedFields::SENT, &frame[..len_bytes]);
    }
    udp.departures.push(0, to, flow, len_bytes);
    udp.departures.use_slots(1);
}

/// Makes frames of packets.
struct FrameBuilder<'a> {
    udp: &'a mut UdpWire,
    keys: &'a Keys,
    copies: &'a mut Copies,
    capture: Option<&'a mut FrameCapture>,
    now_ns: u64,
}

impl FrameBuilder<'_> {
    /// Builds the frames of the first packets. Returns false, and builds none, if bytes of one of them cannot be read.
    #[allow(unsafe_code)] // frames are filled by address
    fn build(&mut self, queue: &VecDeque<([u8; 16], Packet)>, count: usize) -> bool {
        self.copies.begin_fetches();
        let mut is_whole = true;
        let mut starts = [None; 64];
        for (ahead, (_, packet)) in queue.iter().take(count.min(starts.len())).enumerate() {
            let source = GatherSource::of(&packet.payload, packet.header.payload_bytes);
            let fits = source.len_bytes() as usize <= MAX_PAYLOAD_BYTES;
            let Some(frame) = self.udp.departures.slot(ahead) else {
                is_whole = false;
                break;
            };
            let Some(headers) = frame.first_chunk_mut::<MAX_HEADER_BYTES>() else {
                is_whole = false;
                break;
            };
            let Some(at) = write_headers(&packet.header, headers).filter(|_| fits) else {
                // No packet of RoCE: dropped.
                continue;
            };
            let payload = frame[at..].as_mut_ptr();
            if !fill(self.keys, self.copies, &source, payload) {
                is_whole = false;
                break;
            }
            starts[ahead] = Some(at);
        }
        // SAFETY: frames of the batch, which are ours until they are sent.
        if unsafe { self.copies.end_fetches() }.is_err() || !is_whole {
            return false;
        }
        for ((ahead, (to, packet)), start) in queue.iter().take(count).enumerate().zip(starts) {
            if let Some(at) = start {
                self.seal(*to, &packet.header, ahead, at);
            }
        }
        self.udp.departures.use_slots(count);
        true
    }

    fn seal(&mut self, to: [u8; 16], header: &Header, ahead: usize, at: usize) {
        let (flow, source_port) = self.udp.departures.flow(header.source_qpn, header.dst_qpn);
        let ends = UdpFlow {
            from: self.udp.gid,
            to,
            source_port,
            identification: 0,
        };
        let Some(frame) = self.udp.departures.slot(ahead) else {
            return;
        };
        let len_bytes = seal_frame(&ends, frame, at + usize::from(header.payload_bytes));
        if let Some(capture) = &mut self.capture {
            let frame = &frame[..len_bytes];
            capture.record(self.now_ns, &ends, RoutedFields::SENT, frame);
        }
        self.udp.departures.push(ahead, to, flow, len_bytes);
    }
}
