//! How the device is brought to a stop after a failure. The queue pair goes to ERR, flushes, and goes to RESET. Both are commands of the device:
//! they may take milliseconds, hang or fail. So other threads issue them, and every wait for one is bounded.
//!
//! A device that has not confirmed RESET may still write completions, and the memory of its work requests. The endpoint is then given up: its
//! operations and waits end all the same, and everything that the device may write is kept until RESET succeeds, if it ever does.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard};
use std::time::Duration;

use super::stop_state::{
    Phase, Quiesced, RetainedEndpoint, STOP_NS, StopState, Stopped, StreamsStop,
};
use crate::endpoint::clock::now_ns;
use crate::endpoint::shared::{EndpointShared, end_elsewhere};
use crate::proxy::Workers;
use crate::stream::EndingDevice;
use crate::{Error, Result, StateKind};

/// The time limit until waits are released although what is behind them on streams of GPUs was not given up: for many endpoints that fail at the same time.
const STOP_STREAMS_NS: u64 = 5 * STOP_NS;
/// How long a device may take to flush what was rung.
const FLUSH_NS: u64 = 20_000_000;

/// The threads that issue commands. A command that hangs blocks one of them, until the kernel gives it up (mlx5: 60 s).
static COMMANDS: Workers = Workers::new("doorbell-commands", 64);
/// The threads that stop streams of GPUs before the command. A device that hangs blocks one of them, as long as a device may take to stop.
static STOPS: Workers = Workers::new("doorbell-stops", 64);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Command {
    Fail,
    Quiesce,
}

impl EndpointShared {
    /// Makes a worker call `job` with a handle of this endpoint.
    fn order(&self, workers: &'static Workers, job: impl FnOnce(&EndpointShared) + Send + 'static) {
        let Some(this) = self.weak.upgrade() else {
            return;
        };
        let orders = Arc::clone(&self.stop_state.orders);
        orders.fetch_add(1, Ordering::Relaxed);
        workers.run(Box::new(move || {
            job(&this);
            end_elsewhere(this);
            orders.fetch_sub(1, Ordering::Release);
        }));
    }

    fn spawn_command(&self, command: Command) {
        self.order(&COMMANDS, move |this| {
            this.issue(command);
            this.go_on();
        });
    }

    /// Takes the next step, unless another thread holds the generation: that thread takes the step itself later.
    fn go_on(&self) {
        if let Some(_generation) = self.try_hold_generation()
            && self.has_failed.load(Ordering::Acquire)
        {
            self.shut_down();
        }
    }

    /// Issues the command and records its result.
    fn issue(&self, command: Command) {
        let (phase, error) = match command {
            Command::Fail => {
                let error = self.qp.fail().err();
                let rung = self.queues.each_ref().map(|queue| self.may_be_rung(queue));
                self.stop_state.lock().rung = rung;
                let since_ns = now_ns();
                let flushes = error.is_none();
                (Phase::Failed { since_ns, flushes }, error)
            }
            Command::Quiesce => match self.qp.quiesce() {
                Ok(resets_records) => {
                    let rung = self.stop_state.lock().rung;
                    let quiesce = Quiesced {
                        resets_records,
                        rung,
                    };
                    (Phase::Quiet(quiesce), None)
                }
                Err(error) => (Phase::Refused, Some(error)),
            },
        };
        let mut state = self.stop_state.lock();
        state.errors.extend(error);
        let is_late = state.kept.is_some();
        if is_late && command == Command::Fail {
            // The endpoint is no longer watched, and nothing waits for the flushed completions.
            state.phase = Phase::Quiescing;
            drop(state);
            return self.issue(Command::Quiesce);
        }
        let kept = match phase {
            Phase::Quiet(_) => state.kept.take(),
            _ => None,
        };
        state.phase = phase;
        drop(state);
        self.stop_state.changed.notify_all();
        // The caller has a handle, so this is not the last.
        drop(kept.and_then(RetainedEndpoint::release));
    }

    /// The endpoint has failed: from here on no doorbell transmits and nothing is received, though completions may come until the breakdown. That is so
    /// when this returns, unless the device has failed the command or not answered it in time.
    pub(super) fn stop_transmitting(&self) {
        if self.begin_error(self.epoch.load(Ordering::Acquire)) {
            self.stop_state.wait();
        }
    }

    /// The first half of [`EndpointShared::stop_transmitting`], of that generation: issues the command. Returns whether the device is still to answer.
    pub(in crate::endpoint::shared) fn begin_error(&self, generation: u32) -> bool {
        // This takes no generation lock: a caller may hold a stream's locks, and the watchdog waits for these under the generation lock.
        let mut state = self.stop_state.lock();
        if !self.is_in(generation) {
            return false;
        }
        if matches!(state.phase, Phase::Working) {
            state.phase = Phase::Failing;
            state.asked_ns = now_ns();
            drop(state);
            self.spawn_command(Command::Fail);
            return true;
        }
        matches!(state.phase, Phase::Failing)
    }

    /// Goes on with stopping the device, as far as that goes without waiting. The caller holds the generation.
    pub(super) fn stop_device(&self) -> Stopped {
        let mut state = self.stop_state.lock();
        if state.kept.is_some() {
            return Stopped::Unresponsive;
        }
        let now = now_ns();
        match state.streams {
            StreamsStop::NotAsked if self.attachments().failure_notifier().has_listeners() => {
                state.streams = StreamsStop::Asked { since_ns: now };
                drop(state);
                let generation = self.epoch.load(Ordering::Acquire);
                self.order(&STOPS, move |this| {
                    // A reset waits for this mark, so it is set although an owner panics.
                    let stopped = catch_unwind(AssertUnwindSafe(|| this.stop(generation)));
                    this.stop_state.lock().streams = StreamsStop::Done;
                    this.go_on();
                    if let Err(panicked) = stopped {
                        resume_unwind(panicked);
                    }
                });
                return Stopped::NotYet;
            }
            StreamsStop::NotAsked => state.streams = StreamsStop::Done,
            StreamsStop::Asked { since_ns } => {
                if now.saturating_sub(since_ns) < STOP_STREAMS_NS {
                    return Stopped::NotYet;
                }
                return self.give_up(state);
            }
            StreamsStop::Done => {}
        }
        let mut longest_ns = STOP_NS;
        match state.phase {
            Phase::Working => {
                state.phase = Phase::Failing;
                state.asked_ns = now;
                drop(state);
                self.spawn_command(Command::Fail);
                return Stopped::NotYet;
            }
            Phase::Failing | Phase::Quiescing => {}
            Phase::Failed { since_ns, flushes } => {
                drop(state);
                let waits = flushes && now.saturating_sub(since_ns) < FLUSH_NS;
                if waits && !self.has_flushed() {
                    return Stopped::NotYet;
                }
                self.stop_state.lock().phase = Phase::Quiescing;
                self.spawn_command(Command::Quiesce);
                return Stopped::NotYet;
            }
            // The device may have gone on in between, with work that a stream has discarded.
            Phase::Quiet(_) if !state.errors.is_empty() => return Stopped::Unresponsive,
            Phase::Quiet(quiesced) => return Stopped::Yes(quiesced),
            Phase::Refused => longest_ns = 0,
        }
        if now.saturating_sub(state.asked_ns) < longest_ns {
            return Stopped::NotYet;
        }
        self.give_up(state)
    }

    /// Keeps everything that the device may still access, until it is stopped after all.
    fn give_up(&self, mut state: MutexGuard<'_, StopState>) -> Stopped {
        state.kept = (self.weak.upgrade()).map(|this| RetainedEndpoint::new(this));
        let command = match state.phase {
            Phase::Working => {
                state.phase = Phase::Failing;
                state.asked_ns = now_ns();
                Some(Command::Fail)
            }
            Phase::Failed { .. } => {
                state.phase = Phase::Quiescing;
                Some(Command::Quiesce)
            }
            _ => None,
        };
        drop(state);
        if let Some(command) = command {
            self.spawn_command(command);
        }
        Stopped::Unresponsive
    }

    /// Tries once more to stop the device of an endpoint that was given up.
    ///
    /// # Errors
    /// [`Error::State`] with the device's errors, and with what the user can do. The endpoint stays given up.
    pub(super) fn stop_again(&self) -> Result<()> {
        let begin_ns = now_ns();
        loop {
            let mut state = self.stop_state.lock();
            // The thread that stops them would act on the next generation.
            let stops_streams = matches!(state.streams, StreamsStop::Asked { .. });
            match state.phase {
                Phase::Quiet(_) if !stops_streams => return Ok(()),
                Phase::Refused if state.asked_ns < begin_ns => {
                    state.asked_ns = now_ns();
                    state.phase = Phase::Quiescing;
                    drop(state);
                    self.spawn_command(Command::Quiesce);
                }
                Phase::Refused => return Err(self.not_stopped(&state)),
                _ if now_ns().saturating_sub(begin_ns) > STOP_NS => {
                    return Err(self.not_stopped(&state));
                }
                _ => {
                    drop(state);
                    std::thread::sleep(Duration::from_micros(50));
                }
            }
        }
    }

    fn not_stopped(&self, state: &StopState) -> Error {
        let mut found: Vec<String> = state.errors.iter().map(Error::to_string).collect();
        found.dedup();
        let silent_for =
            |to| format!("the command that moves the queue pair to {to} is not answered");
        match state.phase {
            Phase::Failing => found.push(silent_for("ERR")),
            Phase::Quiescing => found.push(silent_for("RESET")),
            _ => {}
        }
        if matches!(state.streams, StreamsStop::Asked { .. }) {
            found.push("the GPU streams that wait for it are still being stopped".to_owned());
        }
        let reason = format!(
            "the device was not stopped: {}. It may still access the memory of this endpoint's work requests, which therefore stays registered \
             until it is stopped. Try again later, or open the device again and make a new endpoint",
            found.join("; ")
        );
        Error::state(StateKind::QueuePair, "reset", reason)
    }

    /// Waits until no thread has a handle for a command, as long as a device may take.
    pub(in crate::endpoint::shared) fn await_orders(&self) {
        let state = self.stop_state.lock();
        let until_ns = state.asked_ns.saturating_add(STOP_NS);
        drop(state);
        while self.stop_state.orders.load(Ordering::Acquire) > 0 && now_ns() < until_ns {
            std::thread::sleep(Duration::from_micros(20));
        }
    }
}
