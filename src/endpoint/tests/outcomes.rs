//! The model of `docs/outcomes.md`, explored to exhaustion: one queue of three requests with its stream, device, reaper, and an application that
//! aborts, drops and looks at tickets. Every order of their steps is tried, and the transitions are those of `outcome.rs` itself.
//!
//! What is left out: the wrap of counts, receives without a doorbell of their own, resets, and time. Waits have a model of their own.

use std::collections::{HashSet, VecDeque};

use crate::endpoint::outcome::{DeviceState, Evidence, OpStatus, RequestState, Status};
use crate::{Cause, WorkError};

const REQUESTS: usize = 3;

/// Which transitions the model uses; each field but the first is a mistake that must be noticed.
#[derive(Clone, Copy)]
struct Rules {
    after_later: fn(RequestState, Evidence) -> RequestState,
    status: fn(RequestState, DeviceState, bool, bool) -> OpStatus,
    report: fn(OpStatus, Option<WorkError>) -> Status,
    /// Drops of operations count only while the endpoint is alive.
    cancels_alive_only: bool,
    /// A discarded request stops its queue at once.
    discard_stops: bool,
    /// The device is silent once the endpoint is broken down.
    quiesces: bool,
    /// Rung and not rung are distinguished by the count at the breakdown, and not by the one of the moment.
    remembers_rung: bool,
    /// A doorbell that the stream has begun to store counts as rung, though the stream has not counted it.
    counts_begun: bool,
    /// A request that counted as rung at the breakdown is not discarded after it.
    keeps_begun: bool,
    /// Completions of a device that could not be stopped are not processed once its endpoint is given up.
    stops_reaping: bool,
    /// The thread that hands a request over looks for a failure once more when it has written that the stream has it.
    checks_again: bool,
    /// What streams have is what they had when the endpoint was given up.
    remembers_queued: bool,
}

const RULES: Rules = Rules {
    after_later: RequestState::after_later,
    status: RequestState::status_in,
    report: |status, failure| status.report(false, failure),
    cancels_alive_only: true,
    discard_stops: true,
    quiesces: true,
    remembers_rung: true,
    counts_begun: true,
    keeps_begun: true,
    stops_reaping: true,
    checks_again: true,
    remembers_queued: true,
};

/// What a request is to do, which no step changes.
#[derive(Clone, Copy)]
struct Plan {
    signaled: [bool; REQUESTS],
    refused: [bool; REQUESTS],
}

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Fate {
    Waiting,
    Executed,
    Nop,
    Refused,
    Flushed,
}

/// [`Cause`], without what it says more.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum End {
    Aborted,
    Discarded,
    QueuePair,
}

/// Where the thread is that hands over the next request, as `PreparedRef::hand_over`.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Handing {
    No,
    /// It has found no failure.
    Checked,
    /// It has written that the stream has the request, which it has not yet.
    Entered,
    /// It has found a failure then: the stream does not get the request.
    Refused,
}

#[derive(Clone, PartialEq, Eq, Hash)]
struct World {
    requests: [RequestState; REQUESTS],
    fates: [Fate; REQUESTS],
    /// Handed to the stream, in order; those before that were dropped are skipped.
    queued: usize,
    handing: Handing,
    /// Entries that the stream is done with.
    passed: usize,
    /// The stream is in the program of its entry, and has not stored its doorbell: it may still end there.
    has_begun: bool,
    /// The stream has stored the doorbell of its entry, and not its count.
    in_doorbell: bool,
    stream_failed: bool,
    /// Requests whose doorbell reached the device, and that were counted.
    rung: usize,
    counted: usize,
    /// Where the device is, and what it has completed.
    next: usize,
    completions: VecDeque<(usize, Evidence)>,
    in_error: bool,
    /// The device has not heard of the command to ERR, and will not. In the end it is not known to be stopped.
    is_refused: bool,
    given_up: bool,
    is_quiesced: bool,
    reaped: usize,
    failure: Option<End>,
    rung_in_all: Option<usize>,
    queued_in_all: Option<usize>,
    reported: [Option<OpKind>; REQUESTS],
}

/// A final status, without the cause.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum OpKind {
    Complete,
    Failed,
    Unknown,
    Discarded,
    Cancelled,
}

/// Takes the change that a step makes.
type Step<'a> = dyn FnMut(&dyn Fn(&mut World)) + 'a;

impl World {
    fn new() -> World {
        World {
            requests: [RequestState::Posted; REQUESTS],
            fates: [Fate::Waiting; REQUESTS],
            queued: 0,
            handing: Handing::No,
            queued_in_all: None,
            passed: 0,
            has_begun: false,
            in_doorbell: false,
            stream_failed: false,
            rung: 0,
            counted: 0,
            next: 0,
            completions: VecDeque::new(),
            in_error: false,
            is_refused: false,
            given_up: false,
            is_quiesced: false,
            reaped: 0,
            failure: None,
            rung_in_all: None,
            reported: [None; REQUESTS],
        }
    }

    /// What the stream has.
    fn given(&self) -> usize {
        self.queued - usize::from(matches!(self.handing, Handing::Entered | Handing::Refused))
    }

    fn fail(&mut self, cause: End) {
        self.failure.get_or_insert(cause);
    }

    fn steps(&self, plan: &Plan, rules: &Rules) -> Vec<World> {
        let mut after = Vec::new();
        let mut step = |change: &dyn Fn(&mut World)| {
            let mut world = self.clone();
            change(&mut world);
            after.push(world);
        };
        // The application: hands over the next operation, drops one, aborts; the stream fails for a reason of its own.
        match self.handing {
            Handing::No if self.queued < REQUESTS && self.failure.is_none() => {
                step(&|world| world.handing = Handing::Checked);
            }
            Handing::Checked => step(&|world| {
                world.queued += 1;
                world.handing = Handing::Entered;
            }),
            Handing::Entered => step(&|world| {
                world.handing = match world.failure {
                    Some(_) if rules.checks_again => Handing::Refused,
                    _ => Handing::No,
                };
            }),
            Handing::No | Handing::Refused => {}
        }
        for at in self.queued..REQUESTS {
            let may = self.failure.is_none() || !rules.cancels_alive_only;
            let is_held = at == self.queued && self.handing == Handing::Checked;
            if !is_held && may && self.requests[at] == RequestState::Posted {
                step(&|world| {
                    world.requests[at] = RequestState::Cancelled;
                });
            }
        }
        if self.failure.is_none() {
            step(&|world| world.fail(End::Aborted));
        }
        if !self.stream_failed {
            step(&|world| world.stream_failed = true);
            // Its fault is taken, and the stream goes on: below.
        } else {
            step(&|world| world.stream_failed = false);
        }
        self.stream(rules, &mut step);
        self.device(plan, &mut step);
        // The watchdog: the queue pair to error, then silence. The device may fail either command.
        let is_ending = self.failure.is_some() && self.rung_in_all.is_none();
        if self.failure.is_some() && !self.in_error && !self.is_refused {
            step(&|world| world.in_error = true);
            step(&|world| world.is_refused = true);
        }
        if is_ending && (self.in_error || self.is_refused) {
            step(&|world| {
                while world.reap(rules) {}
                world.given_up = true;
                world.rung_in_all = Some(REQUESTS);
                world.queued_in_all = rules.remembers_queued.then_some(world.queued);
            });
        }
        if is_ending && self.in_error && !self.is_refused {
            step(&|world| {
                world.is_quiesced = rules.quiesces;
                let begun =
                    usize::from(rules.counts_begun && (world.in_doorbell || world.has_begun));
                world.rung_in_all = Some(world.counted.max(world.passed + begun));
            });
        }
        // The reaper.
        let is_over = self.given_up && rules.stops_reaping;
        if !self.completions.is_empty() && !is_over {
            step(&|world| {
                world.reap(rules);
            });
        }
        after
    }

    /// Processes the next completion. Whether there was one.
    fn reap(&mut self, rules: &Rules) -> bool {
        let Some((own, evidence)) = self.completions.pop_front() else {
            return false;
        };
        for at in self.reaped..own {
            self.requests[at] = (rules.after_later)(self.requests[at], evidence);
        }
        self.requests[own] = self.requests[own].after_own(evidence);
        self.reaped = own + 1;
        if evidence != Evidence::Success {
            self.fail(End::QueuePair);
        }
        true
    }

    fn stream(&self, rules: &Rules, step: &mut Step<'_>) {
        if self.in_doorbell {
            step(&|world| {
                world.in_doorbell = false;
                world.passed += 1;
                world.counted = world.passed;
            });
        } else if self.passed < self.given() {
            let at = self.passed;
            if self.has_begun {
                step(&|world| {
                    world.has_begun = false;
                    world.rung = at + 1;
                    world.in_doorbell = true;
                });
            } else if self.requests[at] == RequestState::Cancelled {
                step(&|world| world.passed += 1);
            }
            if self.stream_failed && self.requests[at] != RequestState::Cancelled {
                let discard = |world: &mut World, is_refused: bool| {
                    world.has_begun = false;
                    world.passed += 1;
                    let counted =
                        rules.keeps_begun && world.rung_in_all.is_some_and(|all| all > at);
                    if !counted && world.failure.is_none_or(|cause| cause == End::Discarded) {
                        world.requests[at] = RequestState::Discarded;
                    }
                    world.fail(End::Discarded);
                    // Not while it is silent, which it stays. One command, which the device fails or not.
                    let asks = !world.in_error && !world.is_refused;
                    if rules.discard_stops && world.rung_in_all.is_none() && asks {
                        world.in_error = !is_refused;
                        world.is_refused = is_refused;
                    }
                };
                step(&|world| discard(world, false));
                step(&|world| discard(world, true));
            } else if !self.has_begun && self.requests[at] != RequestState::Cancelled {
                step(&|world| world.has_begun = true);
            }
        }
    }

    fn device(&self, plan: &Plan, step: &mut Step<'_>) {
        if self.is_quiesced || self.next >= self.rung {
            return;
        }
        let at = self.next;
        if self.in_error && !plan.signaled[at] {
            // Verbs promise a completion for each flushed request; the library does not count on it for those that are not signaled.
            step(&|world| {
                world.next += 1;
                world.fates[at] = Fate::Flushed;
            });
        }
        step(&|world| {
            world.next += 1;
            if world.in_error {
                world.fates[at] = Fate::Flushed;
                world.completions.push_back((at, Evidence::Flush));
                return;
            }
            let is_nop = world.requests[at] == RequestState::Cancelled;
            if plan.refused[at] && !is_nop {
                world.fates[at] = Fate::Refused;
                world.completions.push_back((at, Evidence::Error));
                world.in_error = true;
                return;
            }
            world.fates[at] = if is_nop { Fate::Nop } else { Fate::Executed };
            if plan.signaled[at] {
                world.completions.push_back((at, Evidence::Success));
            }
        });
    }

    /// What the ticket of a request says. `None`: not over, or the device has to be stopped first.
    fn look(&self, at: usize, rules: &Rules) -> Option<OpKind> {
        let is_over = self.given_up && rules.stops_reaping;
        if !self.completions.is_empty() && !is_over {
            // A look reaps first.
            return None;
        }
        let rung = match self.rung_in_all {
            Some(rung) if rules.remembers_rung => rung,
            _ => self.counted,
        };
        let end = match self.rung_in_all {
            None => DeviceState::Open,
            Some(_) if self.given_up => DeviceState::Unresponsive,
            Some(_) => DeviceState::Stopped,
        };
        let queued = self.queued_in_all.unwrap_or(self.queued);
        let status = (rules.status)(self.requests[at], end, at < rung, at < queued);
        let is_open = matches!(
            status,
            OpStatus::Prepared | OpStatus::Queued | OpStatus::Rung
        );
        if is_open && self.failure.is_some() && self.rung_in_all.is_none() {
            return None;
        }
        let failure = self.failure.map(|cause| {
            let cause = match cause {
                End::Aborted => Cause::Aborted,
                End::Discarded => Cause::Discarded,
                End::QueuePair => Cause::QueuePair,
            };
            WorkError::new(1, None, cause)
        });
        match (rules.report)(status, failure) {
            Status::Complete => Some(OpKind::Complete),
            Status::Failed(_) => Some(OpKind::Failed),
            Status::Unknown(_) => Some(OpKind::Unknown),
            Status::Discarded => Some(OpKind::Discarded),
            Status::Cancelled => Some(OpKind::Cancelled),
            _ => None,
        }
    }

    /// Tickets are looked at in every state. Gives the first contradiction.
    fn check(&mut self, rules: &Rules) -> Result<(), String> {
        for at in 0..REQUESTS {
            let fate = self.fates[at];
            if let Some(now) = self.look(at, rules) {
                let first = *self.reported[at].get_or_insert(now);
                if first != now {
                    return Err(format!("request {at}: {first:?}, then {now:?}"));
                }
            }
            let lies = match self.reported[at] {
                None | Some(OpKind::Unknown) => false,
                Some(OpKind::Complete) => fate != Fate::Executed,
                // The device says so, or it never came to it.
                Some(OpKind::Failed) => fate == Fate::Executed,
                Some(OpKind::Discarded | OpKind::Cancelled) => {
                    matches!(fate, Fate::Executed | Fate::Refused)
                }
            };
            if lies {
                return Err(format!("request {at}: {:?} of {fate:?}", self.reported[at]));
            }
        }
        Ok(())
    }
}

impl std::fmt::Debug for Fate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Fate::Waiting => "one that the device has not seen",
            Fate::Executed => "one that was executed",
            Fate::Nop => "a no-operation",
            Fate::Refused => "one that was refused",
            Fate::Flushed => "one that was flushed",
        })
    }
}

/// Every state that can be reached. Gives their number, or the first contradiction.
fn explore(rules: &Rules) -> Result<usize, String> {
    let mut states = 0;
    for bits in 0..1u32 << (2 * REQUESTS) {
        let bit = |at: usize| bits >> at & 1 == 1;
        let plan = Plan {
            signaled: std::array::from_fn(bit),
            refused: std::array::from_fn(|at| bit(REQUESTS + at)),
        };
        let mut seen = HashSet::new();
        let mut ahead = vec![World::new()];
        while let Some(mut world) = ahead.pop() {
            world.check(rules)?;
            if !seen.insert(world.clone()) {
                continue;
            }
            let next = world.steps(&plan, rules);
            // Nothing is left to do but to fail the stream and to take its fault: all that is over is reported as that.
            let is_over = world.rung_in_all.is_some()
                && (world.completions.is_empty() || world.given_up)
                && world.passed == world.given()
                && matches!(world.handing, Handing::No | Handing::Refused)
                && (world.is_quiesced || world.next >= world.rung);
            if is_over && world.reported.iter().any(Option::is_none) {
                return Err("a ticket that never ends".into());
            }
            ahead.extend(next);
        }
        states += seen.len();
    }
    Ok(states)
}

#[test]
fn no_order_of_steps_makes_a_ticket_lie() {
    let states = explore(&RULES).unwrap();
    println!("{states} states");
    assert!(
        states > 10_000,
        "{states} states: the model has lost its steps"
    );
}

#[test]
fn mistakes_in_the_transitions_are_noticed() {
    let mistakes: [(&str, Rules); 14] = [
        (
            "a flush vouches for what is before it",
            Rules {
                after_later: |state, evidence| match evidence {
                    Evidence::Flush => state.after_later(Evidence::Success),
                    _ => state.after_later(evidence),
                },
                ..RULES
            },
        ),
        (
            "an error says nothing of a dropped request before it",
            Rules {
                after_later: |_, _| RequestState::Succeeded,
                ..RULES
            },
        ),
        (
            "a discarded request is reported as that before the device is stopped",
            Rules {
                status: |state, end, is_rung, is_queued| match state {
                    RequestState::Discarded => OpStatus::Discarded,
                    _ => state.status_in(end, is_rung, is_queued),
                },
                ..RULES
            },
        ),
        (
            "what was not rung when the device was given up has failed",
            Rules {
                status: |state, end, is_rung, is_queued| match (end, state) {
                    (DeviceState::Unresponsive, RequestState::Posted) => OpStatus::Queued,
                    _ => state.status_in(end, is_rung, is_queued),
                },
                ..RULES
            },
        ),
        (
            "completions are processed after the device was given up",
            Rules {
                stops_reaping: false,
                ..RULES
            },
        ),
        (
            "what was rung and lost its completion has failed",
            Rules {
                report: |status, failure| match (status, failure) {
                    (OpStatus::Rung | OpStatus::Unknown, Some(failure)) => Status::Failed(failure),
                    _ => status.report(false, failure),
                },
                ..RULES
            },
        ),
        (
            "a request is handed over after its endpoint was given up",
            Rules {
                checks_again: false,
                ..RULES
            },
        ),
        (
            "a request that was refused counts as one that a stream has",
            Rules {
                remembers_queued: false,
                ..RULES
            },
        ),
        (
            "operations of a failed endpoint are cancelled",
            Rules {
                cancels_alive_only: false,
                ..RULES
            },
        ),
        (
            "the queue goes on behind a discarded request",
            Rules {
                discard_stops: false,
                ..RULES
            },
        ),
        (
            "the device completes after the breakdown",
            Rules {
                quiesces: false,
                ..RULES
            },
        ),
        (
            "a doorbell counts when the stream has counted it",
            Rules {
                counts_begun: false,
                ..RULES
            },
        ),
        (
            "a program that was begun is discarded after the breakdown",
            Rules {
                keeps_begun: false,
                ..RULES
            },
        ),
        (
            "the count of the moment says what was rung",
            Rules {
                remembers_rung: false,
                ..RULES
            },
        ),
    ];
    for (mistake, rules) in mistakes {
        let found = explore(&rules);
        assert!(found.is_err(), "not noticed: {mistake}");
        println!("{mistake}: {}", found.unwrap_err());
    }
}
