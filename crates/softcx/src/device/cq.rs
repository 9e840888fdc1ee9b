//! The device's side of a completion queue.

use std::sync::Arc;

use crate::device::client::{DeviceEvent, EventSink};
use crate::device::dma::{DmaRing, RecordWord};
use doorbell_wire::mlx5::{Cqe, CqeOpcode};

/// The CQE behind which the driver finds nothing more in a ring that was replaced (mlx5dv.h, `MLX5_CQE_RESIZE_CQ`).
const RESIZE: CqeOpcode = CqeOpcode::Other(5);
/// A flag of the arm word: only completions with the solicited bit, and errors, make an event (mlx5 PRM, `cmd` of the CQ doorbell).
const ONLY_SOLICITED: u32 = 1 << 24;

/// The memory and the state of a completion queue.
#[derive(Debug)]
pub(crate) struct Cq {
    ring: DmaRing,
    cqe_count: u32,
    cqe_bytes: u32,
    padded: bool,
    record: RecordWord,
    producer: u32,
    /// The consumer index at the last read of the record.
    consumer: u32,
    overrun: bool,
    owned: Option<Box<CqNotification>>,
}

/// What the completion queue of a client has besides.
#[derive(Debug)]
pub(crate) struct CqNotification {
    pub(crate) cqn: u32,
    /// The page whose register arms it.
    pub(crate) uar: usize,
    pub(crate) arm_record: RecordWord,
    /// The channel that gets completion events; `None` without a channel.
    pub(crate) completions: Option<Arc<dyn EventSink>>,
    /// The receiver of all other events.
    pub(crate) events: Arc<dyn EventSink>,
    pub(crate) ignore_overrun: bool,
    /// Queue pairs that complete to it, each counted once or twice.
    pub(crate) users: u32,
    arm: Arm,
}

/// Which completions make an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Arming {
    #[default]
    No,
    Any,
    Solicited,
}

#[derive(Debug)]
struct Arm {
    waiting: Arming,
    /// The arm word that was last acted upon. Arms of several queues share a register, so this is how an arm is known.
    seen: u32,
    /// The count behind the last solicited completion, if there was one.
    solicited: Option<u32>,
}

impl CqNotification {
    pub(crate) fn new(
        uar: usize,
        arm_record: RecordWord,
        completions: Option<Arc<dyn EventSink>>,
        events: Arc<dyn EventSink>,
    ) -> CqNotification {
        CqNotification {
            cqn: 0,
            uar,
            arm_record,
            completions,
            events,
            ignore_overrun: false,
            users: 0,
            arm: Arm {
                waiting: Arming::No,
                seen: u32::MAX,
                solicited: None,
            },
        }
    }

    fn fire(&mut self) {
        self.arm.waiting = Arming::No;
        if let Some(events) = &self.completions {
            events.event(DeviceEvent::Completion);
        }
    }
}

impl Cq {
    pub(crate) fn new(ring: DmaRing, cqe_count: u32, record: RecordWord) -> Cq {
        Cq {
            ring,
            cqe_count,
            cqe_bytes: 64,
            padded: false,
            record,
            producer: 0,
            consumer: 0,
            overrun: false,
            owned: None,
        }
    }

    /// One of a client, with entries of 64 or 128 bytes.
    pub(crate) fn of_client(
        ring: DmaRing,
        cqe_count: u32,
        cqe_bytes: u32,
        record: RecordWord,
        owned: CqNotification,
    ) -> Cq {
        Cq {
            cqe_bytes,
            owned: Some(Box::new(owned)),
            ..Cq::new(ring, cqe_count, record)
        }
    }

    /// Whether the first half of an entry of 128 bytes is written, too.
    pub(crate) fn set_padded(&mut self, padded: bool) {
        self.padded = padded;
    }

    /// What it has as a client's.
    pub(crate) fn owned(&mut self) -> Option<&mut CqNotification> {
        self.owned.as_deref_mut()
    }

    /// Whether a completion was lost. The queue pairs of this completion queue have failed then.
    pub(crate) fn is_overrun(&self) -> bool {
        self.overrun
    }

    /// Entries that the driver has not given back, as far as is known.
    fn used(&self) -> u32 {
        // The record holds 24 bits of the consumer's count.
        self.producer.wrapping_sub(self.consumer) & 0xff_ffff
    }

    fn has_room(&mut self) -> bool {
        if self.used() < self.cqe_count {
            return true;
        }
        match self.record.load() {
            Ok(consumer) => self.consumer = consumer,
            Err(_) => return false,
        }
        let ignores = self
            .owned
            .as_ref()
            .is_some_and(|owned| owned.ignore_overrun);
        self.used() < self.cqe_count || ignores
    }

    /// Writes a CQE. `false` if there is no room: the queue is then broken until it is reset, as on a card.
    #[inline]
    pub(crate) fn push(&mut self, cqe: &Cqe) -> bool {
        if self.overrun || !self.has_room() || !self.write(cqe) {
            self.break_down();
            return false;
        }
        self.producer = self.producer.wrapping_add(1);
        if let Some(owned) = &mut self.owned {
            let solicited = cqe.solicited || cqe.opcode.is_error();
            if solicited {
                owned.arm.solicited = Some(self.producer);
            }
            if owned.arm.waiting == Arming::Any
                || (solicited && owned.arm.waiting == Arming::Solicited)
            {
                owned.fire();
            }
        }
        true
    }

    #[inline]
    fn write(&self, cqe: &Cqe) -> bool {
        let owner = self.producer & self.cqe_count != 0;
        let slot = self.producer & (self.cqe_count - 1);
        // An entry of 128 bytes has the CQE in its second half.
        let at = slot as usize * self.cqe_bytes as usize + (self.cqe_bytes as usize - 64);
        if self.padded && self.cqe_bytes == 128 && self.ring.write_cqe(at - 64, &[0; 64]).is_err() {
            return false;
        }
        self.ring.write_cqe(at, &cqe.encode(owner)).is_ok()
    }

    /// Takes no more completions, and reports the overrun.
    #[cold]
    pub(crate) fn break_down(&mut self) {
        if !std::mem::replace(&mut self.overrun, true)
            && let Some(owned) = &self.owned
        {
            owned.events.event(DeviceEvent::CqError { cqn: owned.cqn });
        }
    }

    /// Acts on an arm word, if it is another than at the last look: what the arm waits for may have come already.
    pub(crate) fn arm(&mut self, word: u32) {
        let producer = self.producer;
        let Some(owned) = &mut self.owned else { return };
        if word == owned.arm.seen {
            return;
        }
        owned.arm.seen = word;
        let later_than = |count: u32| {
            let ahead = count.wrapping_sub(word) & 0xff_ffff;
            ahead != 0 && ahead < 1 << 23
        };
        let (waiting, come) = if word & ONLY_SOLICITED == 0 {
            (Arming::Any, later_than(producer))
        } else {
            (
                Arming::Solicited,
                owned.arm.solicited.is_some_and(later_than),
            )
        };
        owned.arm.waiting = waiting;
        if come {
            owned.fire();
        }
    }

    /// Goes on in another ring. The old one ends with a mark, to which the driver copies what it has not consumed; every entry
    /// comes to lie one place later. `false`, and nothing has changed, if one of the rings has no room for all.
    pub(crate) fn resize(&mut self, ring: DmaRing, cqe_count: u32, cqe_bytes: u32) -> bool {
        if let Ok(consumer) = self.record.load() {
            self.consumer = consumer;
        }
        if self.overrun || self.used() >= self.cqe_count.min(cqe_count) {
            return false;
        }
        let mark = Cqe {
            opcode: RESIZE,
            ..Cqe::default()
        };
        if !self.write(&mark) {
            return false;
        }
        self.producer = self.producer.wrapping_add(1);
        (self.ring, self.cqe_count, self.cqe_bytes) = (ring, cqe_count, cqe_bytes);
        true
    }

    /// Back to the first lap; the driver has made the ring fresh.
    pub(crate) fn reset(&mut self) {
        self.producer = 0;
        self.consumer = 0;
        self.overrun = false;
    }
}
