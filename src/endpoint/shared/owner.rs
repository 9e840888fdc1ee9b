//! The endpoint as an owner of programs, for executors.
#![allow(unsafe_code)] // promises the memory behind the targets

#[cfg(feature = "cuda")]
use std::any::Any;
use std::ptr::NonNull;
#[cfg(feature = "cuda")]
use std::sync::Weak;
use std::sync::atomic::Ordering;

use super::EndpointShared;
use crate::Cause;
#[cfg(feature = "cuda")]
use crate::bytecode::Role;
use crate::bytecode::{TargetId, Targets};
use crate::endpoint::QueueKind;
use crate::endpoint::clock::now_ns;
use crate::endpoint::queue::Wait;
use crate::stream::{Attachments, Outcome, Owner, StreamFailure};

/// The cookie that an executor hands back: it names the program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::endpoint) struct Cookie {
    pub(in crate::endpoint) kind: QueueKind,
    pub(in crate::endpoint) is_wait: bool,
    /// The program begins with a wait for its turn behind another stream.
    pub(in crate::endpoint) waits_turn: bool,
    /// Running count of the work request, or running index of the completion.
    pub(in crate::endpoint) count: u32,
}

impl Cookie {
    pub(in crate::endpoint) fn to_bits(self) -> u64 {
        u64::from(self.count)
            | (self.kind as u64) << 32
            | u64::from(self.is_wait) << 33
            | u64::from(self.waits_turn) << 34
    }

    fn from_bits(bits: u64) -> Cookie {
        Cookie {
            kind: if bits & 1 << 32 == 0 {
                QueueKind::Send
            } else {
                QueueKind::Recv
            },
            is_wait: bits & 1 << 33 != 0,
            waits_turn: bits & 1 << 34 != 0,
            count: bits as u32,
        }
    }
}

// SAFETY: `bases` holds, for each target of `targets` in the order of their numbers, memory of `qp` or `progress` of the
// length registered in `new`; both live as long as `self` and do not move.
unsafe impl Owner for EndpointShared {
    fn targets(&self) -> &Targets {
        &self.targets
    }

    fn base(&self, target: TargetId) -> Option<NonNull<u8>> {
        self.bases.get(target.index() as usize).copied()
    }

    #[cfg(feature = "cuda")]
    fn keeper(&self, target: TargetId) -> Option<Weak<dyn Any + Send + Sync>> {
        let target = self.targets.get(target)?;
        (target.role() == Role::Uar).then(|| self.qp.uar_mapping())?
    }

    fn attachments(&self) -> Option<&Attachments> {
        Some(&self.attachments)
    }

    #[inline]
    fn progress(&self) -> bool {
        // On the proxy path a stream does only what a GPU's stream could do: it stores and polls words, and other threads do
        // the rest.
        self.doorbells().is_none() && self.qp.progress()
    }

    #[inline]
    fn rung(&self) {
        if self.doorbells().is_none() {
            self.qp.rung();
            // Work behind the program may be what allows a peer to send.
            self.qp.wait_receives_posted();
        } else {
            self.announce_triggers();
        }
    }

    fn progress_in_look(&self) -> bool {
        if self.doorbells().is_none() {
            return self.qp.progress();
        }
        // What the proxy does, which is not told of this work.
        let has_rung = self.ring_triggered(QueueKind::Send) | self.ring_triggered(QueueKind::Recv);
        has_rung | self.qp.progress() | self.reap()
    }

    fn rung_in_look(&self) {
        if self.doorbells().is_none() {
            Owner::rung(self);
            return;
        }
        let has_rung = self.ring_triggered(QueueKind::Send);
        if self.ring_triggered(QueueKind::Recv) {
            // Work behind the program may be what allows a peer to send.
            self.qp.wait_receives_posted();
        }
        if has_rung && self.holds_work() {
            // This thread may not look here again.
            self.watch();
        }
    }

    fn started(&self, cookie: u64) {
        let cookie = Cookie::from_bits(cookie);
        let queue = self.queue(cookie.kind);
        if cookie.is_wait {
            queue
                .record(cookie.count)
                .wait_started_ns
                .store(now_ns(), Ordering::Relaxed);
            queue.set_wait(cookie.count, Wait::Started);
        } else {
            // Before the doorbell, which the program counts after it has stored it. A stream that waits for its turn may have begun a later one.
            let count = cookie.count.wrapping_add(1);
            let _ = (queue.begun).fetch_update(Ordering::Relaxed, Ordering::Relaxed, |begun| {
                (count.wrapping_sub(begun).cast_signed() > 0).then_some(count)
            });
            if cookie.waits_turn {
                queue.turn_waits.begin(now_ns());
            }
        }
    }

    fn finished(&self, cookie: u64, outcome: Outcome) {
        let cookie = Cookie::from_bits(cookie);
        let queue = self.queue(cookie.kind);
        if cookie.waits_turn {
            queue.turn_waits.end(now_ns());
        }
        if cookie.is_wait {
            // The end of a GPU's wait may become known late, after a failure of work behind the wait.
            let given_up = outcome != Outcome::Done
                || (self.has_failed.load(Ordering::Acquire) && !queue.has_succeeded(cookie.count));
            if !matches!(outcome, Outcome::Discarded | Outcome::Lost) {
                let state = if given_up { Wait::Failed } else { Wait::Done };
                queue.set_wait(cookie.count, state);
            }
        }
        if matches!(outcome, Outcome::Discarded | Outcome::Lost) {
            if cookie.is_wait {
                self.unless_failed(|| {
                    queue.set_wait(cookie.count, Wait::Discarded);
                });
                queue.set_wait(cookie.count, Wait::Failed);
                // The program that would have cleared the mark was not executed.
                queue.cq.abort_peek(cookie.count);
            } else if outcome == Outcome::Discarded {
                self.mark_discarded(cookie);
            }
            self.fail(None, Cause::Discarded);
            if !cookie.is_wait {
                // Before the stream executes anything else: the next doorbell of the queue would release this request, too, because doorbell
                // records count.
                self.tell_device(self.epoch.load(Ordering::Acquire));
            }
        }
        self.on_streams.leave();
    }

    fn not_executed(&self, cookie: u64) {
        let cookie = Cookie::from_bits(cookie);
        if !cookie.is_wait {
            self.mark_discarded(cookie);
        }
    }

    #[inline]
    fn failure_of(&self, cookie: u64, outcome: Outcome) -> Option<StreamFailure> {
        let cookie = Cookie::from_bits(cookie);
        let queue = self.queue(cookie.kind);
        let is_well = if cookie.is_wait {
            // Its ticket reports the same, whatever comes next: a deadline, or a late completion.
            queue.decide_wait(cookie.count)
        } else {
            // The wait for its turn ends by the count, which a breakdown moves.
            let is_due = self.rung(cookie.kind).wrapping_sub(cookie.count) as i32 >= 0;
            let is_released = outcome == Outcome::Released && !is_due;
            !(cookie.waits_turn && (is_released || self.is_shut_down.load(Ordering::Acquire)))
        };
        (!is_well).then(|| self.wait_failure().into())
    }

    fn expected_failure(&self, cookie: u64) -> Option<StreamFailure> {
        let of = Cookie::from_bits(cookie);
        let queue = self.queue(of.kind);
        if !(of.is_wait && queue.is_on_stream(of.count)) {
            return self.failure_of(cookie, Outcome::Released);
        }
        (!queue.has_succeeded(of.count)).then(|| self.wait_failure().into())
    }

    fn stopped_behind(&self, cookie: u64) {
        let of = Cookie::from_bits(cookie);
        let queue = self.queue(of.kind);
        // Of one that a GPU is in, the device's end decides.
        if of.is_wait && !queue.is_waiting(of.count) {
            queue.set_wait(of.count, Wait::Failed);
        }
    }

    fn give_up(&self, generation: u32) {
        self.fail_in(generation, None, Cause::Discarded);
        // What is behind its own waits is stopped by another thread, before those are released.
        self.tell_device(generation);
    }

    fn generation(&self) -> u32 {
        self.epoch.load(Ordering::Acquire)
    }

    fn ends_waits(&self) -> bool {
        // The breakdown writes completions and counts.
        true
    }

    #[inline]
    fn released(&self, _cookie: u64) -> bool {
        self.is_shut_down.load(Ordering::Acquire)
    }
}
