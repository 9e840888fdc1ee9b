//! The requester of a reliable connection: from work requests to packets, and from acknowledgements to completions.
//!
//! Sequence numbers, windows, going back and the counters of retries are those of IBTA volume 1, section 9.7. The state is
//! a queue of messages. `cursor` and `packet` say which packet leaves next; going back is setting them back.

mod acks;
mod datagrams;
mod flow_window;
mod late_responses;
mod message;
mod opcode;
mod packets;
mod state;
mod unread_peer;
mod windows;

use self::flow_window::WINDOW;
pub use self::message::MAX_MESSAGE_BYTES;
use self::message::{MAX_MESSAGE_PACKETS, OutstandingMessage, check};
pub(crate) use self::state::{AnnouncedCount, Requester};
use crate::device::client::Transport;
use crate::device::gather::WqeRequest;
use crate::device::packet::{psn_add, psn_distance};
use crate::device::qp::{DeviceParts, Qp, State};
use crate::device::wire::{Counted, Destination};
use doorbell_wire::mlx5::Syndrome;

/// Packets that one queue pair sends before others have their turn.
const BURST: u32 = 32;

/// Why `transmit` stopped.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum TransmitStop {
    /// Nothing to do before a doorbell, a packet or a timer.
    Idle,
    /// The burst is used up: come again.
    Burst,
    /// The lane is full: come again when others had their turn.
    Congested,
}

impl Qp {
    /// Whether there is something that could be sent, were it not for windows and waits.
    pub(crate) fn has_sends(&self) -> bool {
        self.requester.has_work()
    }

    /// The message at the cursor cannot be sent: it ends the send queue when its turn comes.
    fn fail_at_cursor(&mut self, context: &mut DeviceParts, syndrome: Syndrome) {
        if let Some(message) = self.requester.messages.get_mut(self.requester.cursor) {
            message.failed = Some(syndrome);
        }
        self.reap(context);
    }

    /// A doorbell has announced the WQEs after the running count `before`. A fault may delay when they are read.
    #[inline]
    pub(crate) fn fetch(&mut self, context: &DeviceParts, before: u32) {
        if let Some(fetch_ns) = context.wire.fetch_ns() {
            self.fetch_behind(context.now_ns, fetch_ns, before);
        }
    }

    #[cold]
    fn fetch_behind(&mut self, now_ns: u64, fetch_ns: u64, before: u32) {
        let requester = &mut self.requester;
        let news = requester.announced.wrapping_sub(before) as usize;
        if fetch_ns > 0 {
            if news > 0 && requester.begun == before {
                requester.fetch_from_ns = now_ns.saturating_add(fetch_ns);
            }
            return;
        }
        let copied = (self.parts.send_ring).snapshot(before as usize * 64, news * 64);
        if copied.is_err() {
            self.lose_queue();
        }
    }

    /// Sends what may be sent.
    #[inline]
    pub(crate) fn transmit(&mut self, context: &mut DeviceParts) -> TransmitStop {
        let datagrams = self.parts.transport == Transport::Ud;
        let to = match self.remote {
            Some(remote) => remote.to,
            None if datagrams => Destination::Nowhere,
            None => return TransmitStop::Idle,
        };
        if !self.is_sending() || self.requester.wait_until_ns > context.now_ns {
            return TransmitStop::Idle;
        }
        for _ in 0..BURST {
            if self.requester.cursor == self.requester.messages.len()
                && (self.state() != State::ReadyToSend
                    || self.requester.fetch_from_ns > context.now_ns
                    || !self.begin(context))
            {
                return TransmitStop::Idle;
            }
            let requester = &self.requester;
            let Some(message) = requester.messages.get(requester.cursor) else {
                return TransmitStop::Idle;
            };
            if message.failed.is_some() {
                self.reap(context);
                return TransmitStop::Idle;
            }
            if message.packets == 0 {
                if message.window.is_some() {
                    if requester.waits_for_earlier(message) {
                        return TransmitStop::Idle;
                    }
                    self.update_window(context);
                    continue;
                }
                self.requester.cursor += 1;
                self.reap(context);
                if !self.is_sending() {
                    return TransmitStop::Idle;
                }
                continue;
            }
            if datagrams {
                if let Some(pause) = self.send_datagram(context) {
                    return pause;
                }
                if !self.is_sending() {
                    return TransmitStop::Idle;
                }
                continue;
            }
            let starts = requester.packet == 0;
            let is_blocked = (starts && requester.waits_for_earlier(message))
                || (message.wants_response()
                    && requester.reads >= u32::from(self.attributes.max_reads));
            let psn = psn_add(message.first_psn, requester.packet);
            let mtu = self.attributes.mtu_bytes;
            let total = message.request.total_bytes.min(MAX_MESSAGE_BYTES) as u32;
            let payload_bytes = total.saturating_sub(requester.packet * mtu).min(mtu);
            let window = match to {
                Destination::Host(_) => requester.window.packets(),
                _ => WINDOW,
            };
            if is_blocked || psn_distance(psn, requester.unacked_psn) >= window as i32 {
                return TransmitStop::Idle;
            }
            if context.wire.congested(to) {
                self.arm(context);
                return TransmitStop::Congested;
            }
            if matches!(to, Destination::Host(_))
                && self.parts.transport == Transport::Uc
                && let Err(until_ns) = self.rate.take(context.now_ns, payload_bytes)
            {
                self.requester.wait_until_ns = until_ns;
                return TransmitStop::Idle;
            }
            self.send_packet(context, psn);
            // Its bytes may have gone. What is behind it is flushed later, and is not sent until then.
            if !self.is_sending() {
                return TransmitStop::Idle;
            }
        }
        TransmitStop::Burst
    }

    /// Moves the next announced WQE into the message queue. Returns false if no WQE is announced.
    #[inline]
    fn begin(&mut self, context: &mut DeviceParts) -> bool {
        let requester = &mut self.requester;
        let waiting = requester.announced.wrapping_sub(requester.begun);
        if waiting == 0 {
            return false;
        }
        context.counters.wqes += 1;
        let index = requester.begun;
        let loaded = context.gather.load(&self.parts, index, waiting);
        let message = match loaded {
            Ok(request) => {
                let mut failed = check(&request, context, &self.parts).err();
                let mut packets = self.packets(&request);
                let requester = &self.requester;
                if packets > MAX_MESSAGE_PACKETS {
                    failed = Some(Syndrome::LocalLength);
                    packets = 1;
                }
                OutstandingMessage {
                    index,
                    request,
                    first_psn: requester.next_psn,
                    packets,
                    responses: 0,
                    failed,
                    window: context.gather.window.map(Box::new),
                }
            }
            Err(syndrome) => OutstandingMessage {
                index,
                // Its length is unknown: one block, so that the flush can go on behind it.
                request: WqeRequest {
                    ds: 1,
                    ..WqeRequest::default()
                },
                first_psn: requester.next_psn,
                packets: 1,
                responses: 0,
                failed: Some(syndrome),
                window: None,
            },
        };
        let mut message = message;
        if let Some(syndrome) = context.wire.fault_code(Counted::Send) {
            message.failed = Syndrome::from_raw(syndrome).or(message.failed);
        }
        let requester = &mut self.requester;
        if let Some(trace) = &mut context.trace {
            let (request, failed) = (&message.request, message.failed);
            trace.send_wqe(
                context.now_ns,
                &self.parts,
                index,
                request,
                &context.gather,
                failed,
            );
        }
        requester.next_psn = psn_add(requester.next_psn, message.packets);
        requester.begun = requester.begun.wrapping_add(message.wqebbs());
        requester.unanswered += u32::from(message.wants_response());
        requester.messages.push_back(message);
        true
    }
}
