//! One turn of a relay, over any provider: it posts the requests that were rung for, and passes completions on.

use super::provider::{BATCH, PolledCompletion, Provider, Queue};
use super::recv_queue::RelayRecvQueue;
use super::send_queue::RelaySendQueue;
use doorbell_wire::verbs::State;

/// The working part of a relay, without the creation of the queue pair and its state changes.
#[derive(Debug)]
pub(super) struct Core<P> {
    pub(super) provider: P,
    pub(super) send: RelaySendQueue,
    pub(super) recv: RelayRecvQueue,
    /// The number of the generation, so that completions left over from one do not enter the next.
    generation: u32,
    /// The queue pair is reset though its state shows an error; see [`super::Relay::quiesce`].
    pub(super) is_silent: bool,
}

/// The result of a turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RelayProgress {
    pub(super) worked: bool,
    /// Something failed on this side: the caller has to bring the queue pair to its error state.
    pub(super) fails: bool,
}

impl<P: Provider> Core<P> {
    pub(super) fn new(provider: P, send: RelaySendQueue, recv: RelayRecvQueue) -> Core<P> {
        Core {
            provider,
            send,
            recv,
            generation: 0,
            is_silent: false,
        }
    }

    /// One turn of work, for a queue pair in that state.
    pub(super) fn turn(&mut self, state: State) -> RelayProgress {
        let mut turn = RelayProgress {
            worked: false,
            fails: false,
        };
        if self.is_silent || state == State::Reset {
            return turn;
        }
        // Requests that are rung for from now on are not given to the device, which would only flush them: not every
        // provider accepts them then.
        let flushes = state == State::Error || self.send.has_failed || self.recv.is_closed;
        if !flushes {
            turn.worked |= self.recv.post(&mut self.provider);
        }
        if matches!(state, State::ReadyToSend | State::Error) {
            turn.worked |= self.send.post(&mut self.provider, flushes);
        }
        let sent = self.send.complete(&mut self.provider);
        let flushes = flushes || self.send.has_failed;
        let received = self.recv.complete(&mut self.provider, flushes);
        turn.worked |= sent.unwrap_or(false) | received.unwrap_or(false);
        let refused = self.send.fails() || self.recv.has_refused;
        turn.fails = state != State::Error && (refused || sent.is_none() || received.is_none());
        turn
    }

    /// Posts the requests that were rung for, in a queue pair that is well, and looks for no completions: polls do that, and a poll of a device of software
    /// is a turn of its work. Returns whether that is all: if not, a whole turn is to follow.
    pub(super) fn post(&mut self, state: State) -> bool {
        let is_well = matches!(
            state,
            State::Init | State::ReadyToReceive | State::ReadyToSend
        );
        if self.is_silent || !is_well || self.send.has_failed || self.recv.is_closed {
            return false;
        }
        self.recv.post(&mut self.provider);
        if state == State::ReadyToSend {
            self.send.post(&mut self.provider, false);
            if self.send.has_announced() {
                return false;
            }
        }
        let refused = self.send.has_refused() || self.recv.has_refused;
        !(refused || self.recv.has_announced() || self.send.completes_next())
    }

    /// Takes the completions that there are, and drops them.
    fn drain(&mut self) {
        let mut found = [PolledCompletion::default(); BATCH];
        for queue in [Queue::Send, Queue::Recv] {
            while self
                .provider
                .poll(queue, &mut found)
                .is_some_and(|count| count > 0)
            {}
        }
    }

    /// Starts over, in a queue pair that was reset.
    pub(super) fn reset(&mut self) {
        self.drain();
        self.generation = self.generation.wrapping_add(1);
        self.send.reset(self.generation);
        self.recv.reset(self.generation);
        self.is_silent = false;
    }

    /// Posts receives again that a queue pair has forgotten.
    pub(super) fn post_again(&mut self) {
        self.drain();
        self.generation = self.generation.wrapping_add(1);
        self.recv.post_again(self.generation);
    }
}
