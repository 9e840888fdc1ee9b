//! RDMA writes that need no packet: where the peer shows that it lets this connection write there, the requester stores the bytes
//! itself, and neither the peer's engine nor an acknowledgement has to be waited for.
//!
//! Such a message takes no sequence number, so the peer's count of them stays right. It goes only when the peer has carried out
//! everything before it, since it would overtake what is on its way; the peer shows how far it is. What goes wrong is tried again by
//! packets, and their answer is what the work request fails with.

use super::opcode::RDMA_WRITE;
use crate::device::client::Transport;
use crate::device::gather::Request;
use crate::device::inbox::{NotNow, OpenConnection};
use crate::device::packet::psn_add;
use crate::device::qp::{Context, Qp};
use crate::device::wire::Destination;

/// Longer messages go by packets, so that others have their turn between them.
const MAX_PLACED_BYTES: u64 = 1 << 20;
/// So many writes in a row, and the next one waits until the peer has carried out those that went by packets: then the others need
/// none. Where other requests come between, waiting would cost more than it gains.
pub(super) const ROW: u32 = 8;

/// What became of a write.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Placement {
    Done,
    /// The peer has first to carry out what was sent before.
    Behind,
    /// It needs packets.
    No,
}

impl Qp {
    /// Carries out a write whose segments are the ones at hand, if it can be.
    #[inline]
    pub(super) fn place(&mut self, context: &mut Context<'_>, request: &Request) -> Placement {
        let Some(remote) = self.remote else {
            return Placement::No;
        };
        let Destination::Lane(index) = remote.to else {
            return Placement::No;
        };
        let fits = (1..=MAX_PLACED_BYTES).contains(&request.total_bytes);
        if request.opcode != RDMA_WRITE
            || !fits
            || self.parts.transport == Transport::Ud
            || self.requester.unanswered > 0
            || !context.is_unseen()
        {
            return Placement::No;
        }
        let Some(lane) = context.ways.writer(context.fabric, index, context.now_ns) else {
            return Placement::No;
        };
        let end = OpenConnection {
            qpn: remote.qpn,
            connection: remote.connection,
            node: context.fabric.map_or(0, |fabric| fabric.node()),
        };
        let (addr, bytes) = (request.remote_addr, request.total_bytes);
        // All that was begun was sent, or this one's turn would not have come.
        let next = self.requester.next_psn;
        let writing = match lane.write_to((&end, next), request.rkey, addr, bytes) {
            Ok(writing) => writing,
            Err(NotNow::Behind) => return Placement::Behind,
            Err(NotNow::Shut) => return Placement::No,
        };
        let (keys, copies) = (&*context.keys, &mut *context.copies);
        // What was collected before goes first; its faults are not this one's.
        copies.settle();
        copies.work_for(self.parts.qpn, false);
        let copied = context
            .gather
            .copy_far(keys, copies, self.parts.pd, writing.into);
        let lost = copies.settle_for(self.parts.qpn);
        drop(writing);
        if lost {
            context.ways.stop_writing(index);
        }
        if copied.is_err() || lost {
            return Placement::No;
        }
        context.counters.placed += 1;
        Placement::Done
    }

    /// Whether the write at the cursor, for which the peer was behind, is done, or goes by packets now. Else it waits on.
    pub(super) fn place_waiting(&mut self, context: &mut Context<'_>) -> bool {
        let Some(message) = self.requester.messages.back() else {
            return true;
        };
        let (index, request) = (message.index, message.request);
        let held = context.gather.holds(self.parts.qpn, index)
            || context.gather.load(&self.parts, index, u32::MAX).is_ok();
        let placement = if held {
            self.place(context, &request)
        } else {
            Placement::No
        };
        // What is acknowledged was carried out: a peer that does not show it will not.
        if placement == Placement::Behind && self.requester.unacked_psn != self.requester.unsent_psn
        {
            return false;
        }
        let packets = if placement == Placement::Done {
            0
        } else {
            self.packets(&request)
        };
        let requester = &mut self.requester;
        if let Some(message) = requester.messages.back_mut() {
            message.waits = false;
            message.packets = packets;
            requester.next_psn = psn_add(message.first_psn, packets);
        }
        true
    }
}
