//! The requester of a reliable connection: from work requests to packets, and from acknowledgements to completions.
//!
//! Sequence numbers, windows, going back and the counters of retries are those of IBTA volume 1, section 9.7. The state is
//! a queue of messages. `cursor` and `packet` say which packet leaves next; going back is setting them back.

mod answers;
mod datagrams;
mod message;
mod opcode;
mod packets;
mod windows;

use std::collections::VecDeque;

use self::message::{MAX_MESSAGE_PACKETS, Message, check};
use crate::device::client::{Event, Transport};
use crate::device::gather::Request;
use crate::device::packet::{psn_add, psn_distance};
use crate::device::qp::{Context, Qp, State};
use crate::device::wire::{Counted, Destination};
use doorbell_wire::mlx5::Syndrome;

/// Packets that may be without acknowledgement.
const WINDOW: i32 = 256;
/// Packets that one queue pair sends before others have their turn.
const BURST: u32 = 32;

/// The state of one send queue in the device.
#[derive(Debug, Default)]
pub(crate) struct Requester {
    /// Running count of WQEBBs that doorbells announced.
    announced: u32,
    /// Running count of WQEBBs taken into `messages`.
    begun: u32,
    messages: VecDeque<Message>,
    cursor: usize,
    packet: u32,
    next_psn: u32,
    /// The oldest PSN without acknowledgement, and the one after the highest that was sent.
    unacked_psn: u32,
    unsent_psn: u32,
    /// Reads and atomics before the cursor that are not answered: those on their way.
    reads: u32,
    /// Reads and atomics in `messages` that are not answered.
    unanswered: u32,
    /// Set when a lost response made the requester go back, until something arrives: one loss, one retry.
    asked_again: bool,
    retries: u8,
    rnr_retries: u8,
    /// When to send again without having heard anything; `None` while nothing is outstanding.
    deadline_ns: Option<u64>,
    /// Until when a peer is waited for that has not read its packets.
    patient_until_ns: Option<u64>,
    /// Not before this time, because the receiver was not ready.
    wait_until_ns: u64,
    /// The owner knows that the queue is drained.
    pub(crate) told_drained: bool,
}

impl Requester {
    /// Starts a connection.
    pub(crate) fn connect(&mut self, psn: u32) {
        self.next_psn = psn;
        self.unacked_psn = psn;
        self.unsent_psn = psn;
    }

    /// A doorbell: `index` is the WQE's 16-bit count and `wqebbs` its length, `recorded` the doorbell record's count, and
    /// `ring_wqebbs` the length of the ring, which bounds how far one count can be ahead of another. Whether the record was
    /// behind.
    pub(crate) fn announce(
        &mut self,
        index: u16,
        wqebbs: u16,
        recorded: u16,
        ring_wqebbs: u32,
    ) -> bool {
        let told = index.wrapping_add(wqebbs);
        // Half of the 16-bit space is the longest ring: a sign bit would take one that was filled at once for one gone back.
        let behind = u32::from(recorded.wrapping_sub(told)) > ring_wqebbs;
        // A card works up to the record; a store that came too early waits for the next one.
        let upto = if behind { recorded } else { told };
        let ahead = upto.wrapping_sub(self.announced as u16);
        if u32::from(ahead) <= ring_wqebbs {
            self.announced = self.announced.wrapping_add(ahead.into());
        }
        behind
    }

    /// A doorbell of which only the record tells. Whether it announces anything.
    pub(crate) fn announce_recorded(&mut self, recorded: u16, ring_wqebbs: u32) -> bool {
        let before = self.announced;
        self.announce(recorded, 0, recorded, ring_wqebbs);
        self.announced != before
    }

    /// Whether work requests were begun that are not complete.
    pub(crate) fn is_sending(&self) -> bool {
        !self.messages.is_empty()
    }

    /// Whether there is something that could be sent, were it not for windows and waits.
    pub(crate) fn has_work(&self) -> bool {
        self.cursor < self.messages.len() || self.begun != self.announced
    }

    /// Moves the cursor over what was acknowledged after the requester had gone back: sent once more, it would be a message
    /// for which no new acknowledgement can come.
    fn catch_up(&mut self) {
        while let Some(message) = self.messages.get(self.cursor) {
            let arrived = psn_distance(self.unacked_psn, message.first_psn);
            if message.window.is_some() {
                // It takes no packets and is still to be done.
                return;
            }
            if message.wants_response() || arrived < message.packets as i32 {
                if !message.wants_response() && arrived > self.packet as i32 {
                    self.packet = arrived as u32;
                }
                return;
            }
            self.cursor += 1;
            self.packet = 0;
        }
    }

    /// When the requester wants to be called again though nothing arrived.
    pub(crate) fn next_timer_ns(&self) -> Option<u64> {
        let waiting = (self.wait_until_ns > 0).then_some(self.wait_until_ns);
        match (self.deadline_ns, waiting) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        }
    }
}

/// Why `transmit` stopped.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Pause {
    /// Nothing to do before a doorbell, a packet or a timer.
    Idle,
    /// The burst is used up: come again.
    Burst,
    /// The lane is full: come again when others had their turn.
    Congested,
}

impl Qp {
    /// Whether there is something that could be sent in this state, were it not for windows and waits.
    pub(crate) fn has_sends(&self) -> bool {
        match self.state() {
            State::SendQueueDrained => self.requester.cursor < self.requester.messages.len(),
            _ => self.requester.has_work(),
        }
    }

    /// Tells that everything begun is complete, once, if the owner wants to know.
    pub(crate) fn tell_drained(&mut self) {
        if self.requester.messages.is_empty() && !self.requester.told_drained {
            self.requester.told_drained = true;
            if self.asked.en_sqd_async_notify {
                self.notify(Event::SendQueueDrained {
                    qpn: self.parts.qpn,
                });
            }
        }
    }

    /// The message at the cursor cannot be sent: it ends the send queue when its turn comes.
    fn fail_at_cursor(&mut self, context: &mut Context<'_>, syndrome: Syndrome) {
        if let Some(message) = self.requester.messages.get_mut(self.requester.cursor) {
            message.failed = Some(syndrome);
        }
        self.reap(context);
    }

    /// Sends what may be sent.
    #[inline]
    pub(crate) fn transmit(&mut self, context: &mut Context<'_>) -> Pause {
        let datagrams = self.parts.transport == Transport::Ud;
        let to = match self.remote {
            Some(remote) => remote.to,
            None if datagrams => Destination::Nowhere,
            None => return Pause::Idle,
        };
        if !self.is_sending() || self.requester.wait_until_ns > context.now_ns {
            return Pause::Idle;
        }
        for _ in 0..BURST {
            if self.requester.cursor == self.requester.messages.len()
                && (self.state() != State::ReadyToSend || !self.begin(context))
            {
                return Pause::Idle;
            }
            let requester = &self.requester;
            let Some(message) = requester.messages.get(requester.cursor) else {
                return Pause::Idle;
            };
            if message.failed.is_some() {
                self.reap(context);
                return Pause::Idle;
            }
            if message.packets == 0 {
                if message.window.is_some() {
                    if message.request.fence && requester.reads > 0 {
                        return Pause::Idle;
                    }
                    self.update_window(context);
                    continue;
                }
                self.requester.cursor += 1;
                self.reap(context);
                if !self.is_sending() {
                    return Pause::Idle;
                }
                continue;
            }
            if datagrams {
                if let Some(pause) = self.send_datagram(context) {
                    return pause;
                }
                if !self.is_sending() {
                    return Pause::Idle;
                }
                continue;
            }
            let starts = requester.packet == 0;
            let blocked_by_reads = (message.request.fence && starts && requester.reads > 0)
                || (message.wants_response()
                    && requester.reads >= u32::from(self.attributes.max_reads));
            let psn = psn_add(message.first_psn, requester.packet);
            if blocked_by_reads || psn_distance(psn, requester.unacked_psn) >= WINDOW {
                return Pause::Idle;
            }
            if context.wire.congested(to) {
                self.arm(context);
                return Pause::Congested;
            }
            self.send_packet(context, psn);
        }
        Pause::Burst
    }

    /// Takes the next announced WQE into the queue of messages. `false` if there is none.
    #[inline]
    fn begin(&mut self, context: &mut Context<'_>) -> bool {
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
                Message {
                    index,
                    request,
                    first_psn: requester.next_psn,
                    packets,
                    responses: 0,
                    failed,
                    window: context.gather.window.map(Box::new),
                }
            }
            Err(syndrome) => Message {
                index,
                // Its length is unknown: one block, so that the flush can go on behind it.
                request: Request {
                    ds: 1,
                    ..Request::default()
                },
                first_psn: requester.next_psn,
                packets: 1,
                responses: 0,
                failed: Some(syndrome),
                window: None,
            },
        };
        let mut message = message;
        if let Some(syndrome) = context.wire.strikes(Counted::Send) {
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
                context.gather,
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
