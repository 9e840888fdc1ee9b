//! The state of a requester.

use std::collections::VecDeque;

use super::flow_window::FlowWindow;
use super::message::OutstandingMessage;
use super::unread_peer::UnreadPeer;
use crate::device::packet::psn_distance;

/// The longest ring, in WQEBBs, for which the 16 bits of two doorbells suffice to order them.
const LONGEST_ORDERED_RING: u32 = 1 << 14;

/// What a doorbell announces.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AnnouncedCount {
    /// Which of the queue pair's two registers it came in.
    pub(crate) register: usize,
    /// The count of WQEBBs behind its work request.
    pub(crate) upto: u16,
}

/// What was wrong with the order of a doorbell's stores.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct DoorbellOrder {
    /// It came before the record that should precede it.
    pub(crate) before_record: bool,
    /// It came behind a later one in the same register.
    pub(crate) backwards: bool,
}

/// The state of one send queue in the device.
#[derive(Debug, Default)]
pub(crate) struct Requester {
    /// Running count of WQEBBs that doorbells announced.
    pub(crate) announced: u32,
    /// The same of the last doorbell in each register.
    last_counts: [u32; 2],
    /// Running count of WQEBBs taken into `messages`.
    pub(super) begun: u32,
    pub(super) messages: VecDeque<OutstandingMessage>,
    pub(super) cursor: usize,
    pub(super) packet: u32,
    pub(super) next_psn: u32,
    /// The oldest PSN without acknowledgement, and the one after the highest that was sent.
    pub(super) unacked_psn: u32,
    pub(super) unsent_psn: u32,
    /// How many packets may be on their way to another host.
    pub(super) window: FlowWindow,
    /// Requests for reads and atomics before the cursor that are not answered: those on their way.
    pub(super) reads: u32,
    /// Reads and atomics in `messages` that are not answered.
    pub(super) unanswered: u32,
    /// Which response of a read may come next.
    pub(super) next_response: NextResponse,
    /// A response of a read that is not placed.
    pub(super) late: Option<LateResponse>,
    /// Set when a lost response made the requester go back, until something arrives: one loss, one retry.
    pub(super) asked_again: bool,
    pub(super) retries: u8,
    pub(super) rnr_retries: u8,
    /// When to send again if nothing has arrived; `None` while nothing is outstanding.
    pub(super) deadline_ns: Option<u64>,
    pub(super) unread_peer: UnreadPeer,
    /// Not before this time, because the receiver was not ready, or because packets of UC are paced.
    pub(super) wait_until_ns: u64,
    /// What is announced is not read before this time, if a fault says so; else 0.
    pub(super) fetch_from_ns: u64,
}

/// Which packet of the responses to reads may come next.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum NextResponse {
    /// The first one of a request.
    #[default]
    First,
    /// One behind the first.
    Further,
    /// Either, because a request was sent again: responses to the one before may still come.
    Any,
}

impl NextResponse {
    pub(super) fn allows(self, is_first: bool) -> bool {
        match self {
            NextResponse::First => is_first,
            NextResponse::Further => !is_first,
            NextResponse::Any => true,
        }
    }
}

impl Requester {
    /// Starts a connection.
    pub(crate) fn connect(&mut self, psn: u32) {
        self.next_psn = psn;
        self.unacked_psn = psn;
        self.unsent_psn = psn;
    }

    /// The PSN of the next packet that is sent for the first time.
    pub(crate) fn next_send_psn(&self) -> u32 {
        self.unsent_psn
    }

    /// A doorbell. `recorded` is the doorbell record's count, and `ring_wqebbs` the length of the ring, which bounds how far one count
    /// can be ahead of another.
    pub(crate) fn announce(
        &mut self,
        doorbell: AnnouncedCount,
        recorded: u16,
        ring_wqebbs: u32,
    ) -> DoorbellOrder {
        let upto = doorbell.upto;
        // Half of the 16-bit space is the longest ring: a sign bit would take one that was filled at once for one gone back.
        let is_new = (1..=ring_wqebbs).contains(&upto.wrapping_sub(self.announced as u16).into());
        let before_record = is_new && u32::from(recorded.wrapping_sub(upto)) > ring_wqebbs;
        let count = self.announced.wrapping_add_signed(i32::from(
            upto.wrapping_sub(self.announced as u16).cast_signed(),
        ));
        let last = &mut self.last_counts[doorbell.register & 1];
        // The 16 bits do not order doorbells of longer rings.
        let backwards = ring_wqebbs <= LONGEST_ORDERED_RING
            && (1..=ring_wqebbs).contains(&last.wrapping_sub(count));
        *last = count;
        // A card works up to the record; a store that came too early waits for the next one.
        self.advance(if before_record { recorded } else { upto }, ring_wqebbs);
        DoorbellOrder {
            before_record,
            backwards,
        }
    }

    /// Announces up to the doorbell record's count, when the doorbell's own value is lost. Returns whether it announces anything.
    pub(crate) fn announce_recorded(&mut self, recorded: u16, ring_wqebbs: u32) -> bool {
        let before = self.announced;
        self.advance(recorded, ring_wqebbs);
        self.announced != before
    }

    fn advance(&mut self, upto: u16, ring_wqebbs: u32) {
        let ahead = upto.wrapping_sub(self.announced as u16);
        if u32::from(ahead) <= ring_wqebbs {
            self.announced = self.announced.wrapping_add(ahead.into());
        }
    }

    /// Whether the message at the cursor must not begin before earlier ones are answered.
    pub(super) fn waits_for_earlier(&self, message: &OutstandingMessage) -> bool {
        let request = &message.request;
        (request.fence && (self.reads > 0 || self.late.is_some()))
            || (request.ordered && self.cursor > 0)
    }

    /// Whether there is something that could be sent, were it not for windows and waits.
    pub(crate) fn has_work(&self) -> bool {
        self.cursor < self.messages.len() || self.begun != self.announced
    }

    /// Moves the cursor over what was acknowledged after the requester had gone back: sent once more, it would be a message
    /// for which no new acknowledgement can come.
    pub(super) fn catch_up(&mut self) {
        while let Some(message) = self.messages.get(self.cursor) {
            let arrived = psn_distance(self.unacked_psn, message.first_psn);
            if message.window.is_some() {
                // It takes no packets and is still to be done.
                return;
            }
            let is_answered = message.wants_response() && message.answered();
            if !is_answered && (message.wants_response() || arrived < message.packets as i32) {
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
        let fetching = (self.fetch_from_ns > 0).then_some(self.fetch_from_ns);
        let timers = [self.deadline_ns, waiting, fetching, self.late_until_ns()];
        timers.into_iter().flatten().min()
    }

    /// Whether a part of the message at this index is not placed.
    pub(super) fn is_late(&self, index: u32) -> bool {
        self.late.as_ref().is_some_and(|late| late.index == index)
    }

    /// When something late is due.
    pub(super) fn late_until_ns(&self) -> Option<u64> {
        self.late.as_ref().map(|late| late.until_ns)
    }
}

/// A response that has arrived and is not placed.
#[derive(Debug)]
pub(super) struct LateResponse {
    /// Of its message, and the PSN behind that.
    pub(super) index: u32,
    pub(super) end_psn: u32,
    /// Where in the message its bytes belong.
    pub(super) offset: u32,
    pub(super) bytes: Vec<u8>,
    pub(super) until_ns: u64,
}
