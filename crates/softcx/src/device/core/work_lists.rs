//! Which queue pairs have something to do.

use std::collections::VecDeque;

use crate::device::qp::{Qp, State};

/// Queue pairs by slot. For each list but `failed`, a queue pair has a flag of the same name that says whether it is on it.
#[derive(Debug, Default)]
pub(super) struct WorkLists {
    /// With something to send.
    pub(super) ready: VecDeque<usize>,
    /// With something to answer.
    pub(super) answering: VecDeque<usize>,
    /// With a timer.
    pub(super) timed: Vec<usize>,
    /// With something to flush.
    pub(super) failed: Vec<usize>,
    /// Those that wait for room on a lane.
    held: Vec<usize>,
}

impl WorkLists {
    /// Puts a queue pair on the lists where it belongs.
    #[inline]
    pub(super) fn mark_active(&mut self, slot: usize, qp: &mut Qp) {
        if !qp.ready && !qp.held && qp.is_sending() && qp.has_sends() {
            qp.ready = true;
            self.ready.push_back(slot);
        }
        self.mark_active_others(slot, qp);
    }

    /// As [`WorkLists::mark_active`], but for the list of those with something to send.
    #[inline]
    pub(super) fn mark_active_others(&mut self, slot: usize, qp: &mut Qp) {
        let state = qp.state();
        if !qp.answering && !qp.held && qp.has_pending_responses() {
            qp.answering = true;
            self.answering.push_back(slot);
        }
        if !qp.timed && qp.next_timer_ns().is_some() {
            qp.timed = true;
            self.timed.push(slot);
        }
        if matches!(state, State::Error | State::SendQueueError) && !self.failed.contains(&slot) {
            self.failed.push(slot);
        }
    }

    /// Whether a queue pair could do something right now.
    pub(super) fn has_work(&self) -> bool {
        !self.ready.is_empty() || !self.answering.is_empty()
    }

    /// Has a queue pair wait for room on a lane.
    pub(super) fn hold(&mut self, slot: usize, qp: &mut Qp) {
        qp.held = true;
        self.held.push(slot);
    }

    /// Those that waited for room.
    pub(super) fn take_held(&mut self) -> Vec<usize> {
        std::mem::take(&mut self.held)
    }

    /// Takes a queue pair that is reset off the lists of those that wait for room or have something to flush.
    pub(super) fn forget_reset(&mut self, slot: usize) {
        self.held.retain(|&held| held != slot);
        self.failed.retain(|&failed| failed != slot);
    }

    /// Takes a queue pair that is destroyed off all lists.
    pub(super) fn forget(&mut self, slot: usize) {
        self.forget_reset(slot);
        self.ready.retain(|&ready| ready != slot);
        self.answering.retain(|&answering| answering != slot);
        self.timed.retain(|&timed| timed != slot);
    }
}
