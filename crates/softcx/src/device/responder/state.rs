//! The state of a responder.

use std::collections::VecDeque;

use crate::device::packet::{AckCode, Header, flag, psn_add, psn_distance};
use doorbell_wire::mlx5::CqeOpcode;

/// Reads and atomics of the peer that may wait for their answer, and atomics whose answer is kept for a repetition: the
/// most that a requester may have on their way.
pub(super) const MAX_ANSWERS: usize = 16;
/// Answers that may be queued: the peer's requests, and repetitions of them that crossed with a first answer.
pub(super) const QUEUED_ANSWERS: usize = 4 * MAX_ANSWERS;

/// The state of one receive queue and of the peer's requests in the device.
#[derive(Debug, Default)]
pub(crate) struct Responder {
    pub(super) expected_psn: u32,
    /// Messages that are complete: sends, writes, reads and atomics.
    pub(super) msn: u32,
    /// When the peer was told last that its packets come through a congested network.
    pub(super) noticed_ns: Option<u64>,
    /// A negative answer is out: what comes before the expected packet is dropped without another one.
    pub(super) refused: bool,
    pub(super) arriving: Option<Arriving>,
    /// Running count of receives taken; `posted` is the count in the doorbell record, modulo 2^16.
    pub(super) taken: u32,
    pub(super) posted: u16,
    pub(super) answers: VecDeque<Response>,
    /// The responses that are next wait until then, because they are paced.
    pub(super) paced_until_ns: Option<u64>,
    /// Reads and atomics of the peer that are served at once.
    pub(crate) depth: u8,
    /// Results of atomics, by PSN, oldest first.
    pub(super) results: VecDeque<(u32, u64)>,
    /// An acknowledgement is owed, once nothing is late.
    pub(super) owes_ack: bool,
    /// What it acknowledges: the last packet of a send or a write that was taken. Never a read or an atomic: their acknowledgement is their response, and
    /// SoftRoCE takes another one for a response without a value.
    pub(super) ack_psn: u32,
    /// What has arrived and is not placed.
    pub(super) late: Option<LatePacket>,
    /// What completes when that is placed.
    pub(super) ended: Option<EndedMessage>,
    /// A receive that was taken for a message that broke, or whose first packet was as good as lost: the next message gets it.
    pub(super) kept: Option<u32>,
    /// The owner was notified that packets arrive, and that no more receives are taken.
    pub(super) established: bool,
    pub(super) last_wqe_notified: bool,
    /// The sender died in the middle of a message.
    pub(super) sender_lost: bool,
}

impl Responder {
    pub(crate) fn connect(&mut self, psn: u32) {
        self.expected_psn = psn;
        self.ack_psn = psn_add(psn, 0xff_ffff);
    }

    /// A packet of a send or a write was taken.
    #[inline]
    pub(super) fn owe_ack(&mut self, header: &Header) {
        self.ack_psn = psn_add(self.expected_psn, 0xff_ffff);
        self.owes_ack |= header.has(flag::WANTS_ACK);
    }

    /// Forgets what is still to be sent.
    pub(crate) fn drop_answers(&mut self) {
        self.answers.clear();
        self.paced_until_ns = None;
        self.withdraw_ack();
    }

    /// Sends no acknowledgement behind the queued answers: if the last of them is a refusal, that acknowledges everything before it.
    pub(crate) fn withdraw_ack(&mut self) {
        self.owes_ack = false;
    }

    /// The PSN of the next packet that is taken.
    pub(crate) fn next_receive_psn(&self) -> u32 {
        self.expected_psn
    }

    /// Whether the response with this PSN has left: answers leave in the order of their numbers, but for those that repeat.
    pub(super) fn was_sent(&self, psn: u32) -> bool {
        let next = self
            .answers
            .front()
            .map_or(self.expected_psn, Response::psn);
        psn_distance(psn, next) < 0
    }

    /// Answers a read once more. If the rest of its answer is still to be sent, that begins anew from the response that is asked for: the peer
    /// takes none behind a gap.
    pub(super) fn read_again(&mut self, header: &Header, mtu_bytes: u32) {
        let again = ReadAnswer::new(header, true);
        let end = again.end_psn(mtu_bytes);
        for answer in &mut self.answers {
            if let Response::Read(read) = answer
                && read.end_psn(mtu_bytes) == end
            {
                let repeats = read.repeats;
                *read = ReadAnswer { repeats, ..again };
                return;
            }
        }
        if self.answers.len() < QUEUED_ANSWERS / 2 {
            self.answers.push_back(Response::Read(again));
        }
    }

    /// The result of the last atomic with this PSN. The numbers wrap: with few atomics between other requests, an older one may have the same.
    pub(super) fn result_of(&self, psn: u32) -> Option<u64> {
        let kept = self.results.iter().rev().find(|(of, _)| *of == psn);
        kept.map(|(_, old)| *old)
    }

    /// Whether as many reads and atomics wait for their first answer as are served at once. The peer counts a request until the whole answer has
    /// come, so one that keeps to this number is never refused.
    pub(super) fn is_full(&self) -> bool {
        let waiting = self.answers.iter().filter(|answer| answer.takes_depth());
        waiting.count() >= usize::from(self.depth)
    }
}

/// An answer that is still to be sent.
#[derive(Debug)]
pub(super) enum Response {
    /// Response packets of a read.
    Read(ReadAnswer),
    /// The value before an atomic.
    Atomic {
        psn: u32,
        old: u64,
        /// The request has come again; its first answer was given, or waits before this one.
        repeats: bool,
    },
    /// An acknowledgement or its negation.
    Ack(u32, AckCode),
}

impl Response {
    /// Of its first packet that is still to be sent.
    pub(super) fn psn(&self) -> u32 {
        match *self {
            Response::Read(ReadAnswer { psn, .. })
            | Response::Atomic { psn, .. }
            | Response::Ack(psn, _) => psn,
        }
    }

    /// Whether it is the first answer to a read or an atomic.
    fn takes_depth(&self) -> bool {
        match *self {
            Response::Read(ReadAnswer { repeats, .. }) | Response::Atomic { repeats, .. } => {
                !repeats
            }
            Response::Ack(..) => false,
        }
    }
}

/// What is still to be sent of the answer to a read.
#[derive(Debug, Clone, Copy)]
pub(super) struct ReadAnswer {
    /// Of the next packet.
    pub(super) psn: u32,
    /// First address of the whole read.
    pub(super) addr: u64,
    pub(super) rkey: u32,
    pub(super) total: u32,
    /// Bytes that have been sent.
    pub(super) done_bytes: u32,
    /// The request has come again; its first answer was given, or waits before this one.
    pub(super) repeats: bool,
}

impl ReadAnswer {
    /// The PSN behind its last packet.
    fn end_psn(&self, mtu_bytes: u32) -> u32 {
        let missing = self.total - self.done_bytes;
        psn_add(self.psn, missing.div_ceil(mtu_bytes).max(1))
    }

    pub(super) fn new(header: &Header, repeats: bool) -> ReadAnswer {
        ReadAnswer {
            psn: header.psn,
            addr: header.addr,
            rkey: header.rkey,
            total: header.total_bytes,
            done_bytes: 0,
            repeats,
        }
    }
}

/// A message that arrives in several packets.
#[derive(Debug)]
pub(super) enum Arriving {
    /// A send: bytes written so far into the receive at `index`, whose room is `capacity`.
    Send {
        index: u32,
        done: u32,
        capacity: u64,
    },
    /// A write: where the next packet's payload goes, and what is still to come.
    Write {
        addr: u64,
        rkey: u32,
        missing: u32,
        total: u32,
    },
}

/// A packet that has arrived and is not placed.
#[derive(Debug)]
pub(super) struct LatePacket {
    pub(super) psn: u32,
    pub(super) bytes: Vec<u8>,
    pub(super) place: LateTarget,
    pub(super) until_ns: u64,
}

/// Where the bytes of a packet go.
#[derive(Debug, Clone, Copy)]
pub(super) enum LateTarget {
    Write {
        addr: u64,
        rkey: u32,
    },
    /// `done` bytes behind the start of the receive at `index`.
    Receive {
        index: u32,
        done: u32,
    },
}

/// A message that has arrived, and completes when all of it is placed.
#[derive(Debug)]
pub(super) struct EndedMessage {
    pub(super) header: Header,
    pub(super) opcode: CqeOpcode,
    pub(super) index: u32,
    pub(super) byte_count: u32,
}

impl EndedMessage {
    pub(super) fn new(
        header: &Header,
        opcode: CqeOpcode,
        index: u32,
        byte_count: u32,
    ) -> EndedMessage {
        EndedMessage {
            header: *header,
            opcode,
            index,
            byte_count,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn result_of_an_atomic_is_that_of_the_last_one_with_its_number() {
        let mut responder = Responder::default();
        // The second 5 is 2^24 packets behind the first one.
        responder.results.extend([(5, 50), (9, 90), (5, 51)]);
        assert_eq!(responder.result_of(5), Some(51));
        assert_eq!(responder.result_of(9), Some(90));
        assert_eq!(responder.result_of(6), None);
    }
}
