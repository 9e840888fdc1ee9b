//! What a CUDA stream has been given and has not finished: who is to be told, once the stream's count says so.
#![allow(unsafe_code)] // ends waits by stores to the words that they wait for

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use super::graph::Exec;
use crate::Error;
use crate::peer::{At, PeerOp, Program, Role};
use crate::stream::{Mark, Outcome, Owner, Record};

/// One thing of a stream's queue, begun when the stream has counted to `after` and finished when it has counted to `done`.
pub(super) struct Pending {
    pub(super) after: u64,
    pub(super) done: u64,
    pub(super) what: What,
}

pub(super) enum What {
    Program {
        owner: Arc<dyn Owner>,
        cookie: u64,
        has_begun: bool,
        /// What its first wait for a word of memory waits for, if it has one.
        awaited: Option<Awaited>,
        released: Option<Released>,
    },
    Record(Record),
    /// A wait for another stream, whose words it keeps, or a count that somebody waits for.
    Passing {
        _mark: Option<Mark>,
    },
    /// A graph, all of it.
    Launched {
        _exec: Arc<Exec>,
    },
}

/// A wait, as the process can end it.
#[derive(Clone, Copy)]
pub(super) struct Awaited {
    at: At,
    satisfying: Satisfying,
}

#[derive(Clone, Copy)]
enum Satisfying {
    Value(u32),
    /// The word with these bits.
    With(u32),
    /// The word without any bit but these.
    Only(u32),
}

/// A wait that was ended by a store.
#[derive(Clone, Copy)]
pub(super) struct Released {
    before: u32,
    stored: u32,
}

impl Awaited {
    pub(super) fn of(program: &Program) -> Option<Awaited> {
        program.ops().find_map(|op| {
            let (at, satisfying) = match op {
                PeerOp::PollGeq { at, value } => (at, Satisfying::Value(value)),
                PeerOp::PollAnd { at, value } => (at, Satisfying::With(value)),
                PeerOp::PollNor { at, value } => (at, Satisfying::Only(value)),
                _ => return None,
            };
            (at.role == Role::Memory).then_some(Awaited { at, satisfying })
        })
    }

    /// Ends the wait.
    fn satisfy(&self, word: &AtomicU32) -> Released {
        loop {
            let before = word.load(Ordering::Acquire);
            let stored = match self.satisfying {
                Satisfying::Value(value) => value,
                Satisfying::With(bits) => before | bits,
                Satisfying::Only(bits) => before & bits,
            };
            let exchanged =
                word.compare_exchange(before, stored, Ordering::SeqCst, Ordering::Relaxed);
            if exchanged.is_ok() {
                return Released { before, stored };
            }
        }
    }
}

impl Released {
    /// Gives the word its value back, unless somebody has stored another one.
    fn restore(self, word: &AtomicU32) {
        let _ = word.compare_exchange(
            self.stored,
            self.before,
            Ordering::SeqCst,
            Ordering::Relaxed,
        );
    }
}

/// The word of a wait.
fn word(owner: &dyn Owner, at: At) -> Option<&AtomicU32> {
    let base = owner.base(at.target)?;
    let address = base.as_ptr().wrapping_add(usize::try_from(at.offset).ok()?);
    if !address.addr().is_multiple_of(4) {
        return None;
    }
    // SAFETY: programs are of their owner's table, whose addresses were checked when they were made, and the owner guarantees the memory
    // of its targets as long as it lives; others access the word atomically, or not from this process (the contract of `Owner`).
    Some(unsafe { AtomicU32::from_ptr(address.cast()) })
}

/// Tells everyone who is to be told when the stream has counted to `done`; before that, `released` hears the cookies of those whose wait was
/// ended. Returns owners to be let go, which may take a while.
pub(super) fn settle(
    queue: &mut VecDeque<Pending>,
    done: u64,
    released: impl Fn(u64),
) -> Vec<Pending> {
    let mut over = Vec::new();
    while queue.front().is_some_and(|front| front.done <= done) {
        if let Some(front) = queue.pop_front() {
            if let Some(cookie) = front.was_released() {
                released(cookie);
            }
            front.finish();
            over.push(front);
        }
    }
    // Those that one count finishes have begun together: among them is the one, if any, in whose wait the stream is.
    let current = queue.front().map(|front| front.done);
    for pending in queue.iter_mut() {
        if pending.after > done || Some(pending.done) != current {
            break;
        }
        pending.begin();
    }
    over
}

impl Pending {
    /// The stream has come to it, and has not finished it.
    fn begin(&mut self) {
        let What::Program {
            owner,
            cookie,
            has_begun,
            awaited,
            released,
        } = &mut self.what
        else {
            return;
        };
        if !std::mem::replace(has_begun, true) {
            owner.started(*cookie);
        }
        if released.is_none()
            && !owner.ends_waits()
            && let Some(awaited) = awaited
            && owner.released(*cookie)
            && let Some(word) = word(&**owner, awaited.at)
        {
            *released = Some(awaited.satisfy(word));
        }
    }

    fn finish(&self) {
        match &self.what {
            What::Program {
                owner,
                cookie,
                has_begun,
                awaited,
                released,
            } => {
                if !has_begun {
                    owner.started(*cookie);
                }
                let outcome = match (awaited, released) {
                    (Some(awaited), Some(released)) => {
                        if let Some(word) = word(&**owner, awaited.at) {
                            released.restore(word);
                        }
                        Outcome::Released
                    }
                    _ => Outcome::Done,
                };
                owner.finished(*cookie, outcome);
            }
            What::Record(record) => {
                record.fire(None);
                if let Some(event) = record.sleepers() {
                    event.wake();
                }
            }
            What::Passing { .. } | What::Launched { .. } => {}
        }
    }

    /// The stream will never come to it, for that reason.
    pub(super) fn discard(&self, reason: &Error) {
        match &self.what {
            What::Program { owner, cookie, .. } => owner.finished(*cookie, Outcome::Discarded),
            What::Record(record) => record.fire(Some(reason.clone())),
            What::Passing { .. } | What::Launched { .. } => {}
        }
    }

    /// After [`Pending::discard`] of all, and when the stream's count says that it is over: those who sleep until then.
    pub(super) fn wake(&self) {
        if let What::Record(record) = &self.what
            && let Some(event) = record.sleepers()
        {
            event.wake();
        }
    }

    fn was_released(&self) -> Option<u64> {
        match &self.what {
            What::Program {
                cookie,
                released: Some(_),
                ..
            } => Some(*cookie),
            _ => None,
        }
    }

    /// Lets a NIC without silicon of its own move on.
    pub(super) fn progress(&self) -> bool {
        match &self.what {
            What::Program { owner, .. } => owner.progress(),
            What::Record(_) | What::Passing { .. } | What::Launched { .. } => false,
        }
    }
}
