//! From a message to its packets.

use super::flow_window::{self, READ_CHUNK};
use super::message::MAX_MESSAGE_BYTES;
use super::opcode::{
    ATOMIC_CS, ATOMIC_FA, NOP, RDMA_READ, RDMA_WRITE_IMM, SEND, SEND_IMM, SEND_INVAL, UMR,
};
use super::state::NextResponse;
use crate::device::client::Transport;
use crate::device::gather::WqeRequest;
use crate::device::packet::{
    MAX_PAYLOAD_BYTES, PacketKind, PacketPayload, flag, psn_add, psn_distance,
};
use crate::device::qp::{DeviceParts, Qp};
use crate::device::wire::Destination;
use doorbell_wire::mlx5::Syndrome;

/// Sequence numbers of one message after which it is acknowledged so far: well within a requester's window.
const ACK_EVERY: u32 = 64;

impl Qp {
    /// Packets of a message.
    pub(super) fn packets(&self, request: &WqeRequest) -> u32 {
        match request.opcode {
            NOP | UMR => 0,
            ATOMIC_CS | ATOMIC_FA => 1,
            _ => (request.total_bytes.min(MAX_MESSAGE_BYTES) as u32)
                .div_ceil(self.attributes.mtu_bytes)
                .max(1),
        }
    }

    /// Sends the packet at the cursor and moves on.
    #[inline]
    pub(super) fn send_packet(&mut self, context: &mut DeviceParts, psn: u32) {
        let mtu = self.attributes.mtu_bytes;
        let remote = self.remote.map(|remote| remote.to);
        let requester = &mut self.requester;
        let packet = requester.packet;
        let Some(message) = requester.messages.get_mut(requester.cursor) else {
            return;
        };
        let request = message.request;
        let total = request.total_bytes as u32;
        if message.wants_response() {
            // A read that is asked again asks for what is still missing.
            let start = packet.max(message.responses);
            let done = start * mtu;
            let missing = total - done.min(total);
            let psn = psn_add(message.first_psn, start);
            // From another host it is asked for in pieces, as its responses arrive.
            let end = match remote {
                Some(Destination::Host(_)) => (start / READ_CHUNK + 1) * READ_CHUNK,
                _ => message.packets,
            };
            let end = end.min(message.packets);
            let missing = missing.min((end - start).saturating_mul(mtu));
            let after = psn_add(message.first_psn, end);
            requester.packet = end;
            if end == message.packets {
                requester.cursor += 1;
                requester.packet = 0;
            }
            requester.reads += 1;
            if psn_distance(psn, requester.unsent_psn) < 0 {
                requester.next_response = NextResponse::Any;
            }
            if psn_distance(after, requester.unsent_psn) > 0 {
                requester.unsent_psn = after;
            }
            let kind = match request.opcode {
                RDMA_READ => PacketKind::ReadRequest,
                ATOMIC_CS => PacketKind::CompareSwap,
                _ => PacketKind::FetchAdd,
            };
            self.send(context, kind, psn, PacketPayload::Empty, |header| {
                header.flags = flag::FIRST | flag::LAST | flag::WANTS_ACK;
                header.rkey = request.rkey;
                header.addr = request.remote_addr.wrapping_add(done.into());
                header.total_bytes = missing;
                header.operand = request.operand;
                header.compare = request.compare;
            });
            return self.arm(context);
        }
        let offset = packet * mtu;
        let longest = if self.parts.transport == Transport::Rc && context.has_no_observer() {
            MAX_PAYLOAD_BYTES as u32
        } else {
            mtu
        };
        let payload_bytes = (total - offset).min(longest);
        let psns = payload_bytes.div_ceil(mtu).max(1);
        let (index, last) = (message.index, packet + psns == message.packets);
        let loaded = context.gather.holds(self.parts.qpn, index)
            || context.gather.load(&self.parts, index, u32::MAX).is_ok();
        let reliable = self.parts.transport == Transport::Rc;
        let (keys, copies, pd) = (&context.keys, &mut &mut context.copies, self.parts.pd);
        // Unreliable means that the memory is the application's again at once.
        let payload = if reliable {
            context
                .gather
                .payload(keys, copies, pd, offset, payload_bytes)
        } else {
            context
                .gather
                .by_value(keys, copies, pd, offset, payload_bytes)
        };
        let Some(payload) = payload.ok().filter(|_| loaded) else {
            // The region went away after the work request was begun.
            message.failed = Some(Syndrome::LocalProt);
            return self.reap(context);
        };
        requester.packet += psns;
        if last {
            requester.cursor += 1;
            requester.packet = 0;
        }
        let after = psn_add(psn, psns);
        if psn_distance(after, requester.unsent_psn) > 0 {
            requester.unsent_psn = after;
        }
        if !reliable {
            requester.unacked_psn = requester.unsent_psn;
        }
        let mark = match request.opcode {
            SEND_IMM | RDMA_WRITE_IMM => flag::IMMEDIATE,
            SEND_INVAL => flag::INVALIDATE,
            _ => 0,
        };
        let ack_every = match remote {
            Some(Destination::Host(_)) => flow_window::ACK_EVERY,
            _ => ACK_EVERY,
        };
        let wants_ack = reliable && (last || psn / ack_every != (psn + psns) / ack_every);
        let kind = if matches!(request.opcode, SEND | SEND_IMM | SEND_INVAL) {
            PacketKind::Send
        } else {
            PacketKind::Write
        };
        self.send(context, kind, psn, payload, |header| {
            header.payload_bytes = payload_bytes as u16;
            header.psns = psns as u8;
            if wants_ack {
                header.flags |= flag::WANTS_ACK;
            }
            if packet == 0 {
                header.flags |= flag::FIRST;
                header.addr = request.remote_addr;
                header.rkey = request.rkey;
                header.total_bytes = total;
            }
            if last {
                header.flags |= flag::LAST;
                if mark != 0 {
                    header.flags |= mark;
                    header.imm = request.imm;
                }
                if request.solicited {
                    header.flags |= flag::SOLICITED;
                }
            }
        });
        if reliable {
            self.arm(context);
        } else if last {
            self.reap(context);
        }
    }

    /// Starts the timer, if it does not run.
    #[inline]
    pub(super) fn arm(&mut self, context: &DeviceParts) {
        if self.requester.deadline_ns.is_none() {
            self.requester.deadline_ns = Some(
                context
                    .now_ns
                    .saturating_add(self.attributes.ack_timeout_ns()),
            );
        }
    }
}
