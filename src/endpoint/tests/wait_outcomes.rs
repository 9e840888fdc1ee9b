//! The model of one wait, explored to exhaustion: its stream, the device, the watchdog, an application that aborts, and a ticket that is looked at in
//! every state. The transitions are those of `queue/wait_word.rs` and `outcome.rs`. What the stream takes for failed, and what the ticket says, must
//! be the same.
//!
//! What is left out: several waits of one queue, resets, and how long anything takes.

use std::collections::HashSet;

use crate::endpoint::outcome::{OpStatus, Status};
use crate::endpoint::queue::{Wait, WaitWord};
use crate::{Cause, WorkError};

/// What the model does as the library does; each field is a mistake that must be noticed when it is false.
#[derive(Clone, Copy)]
struct Rules {
    /// The first thread that knows how the wait ends writes it into the wait's word at once.
    decides_at_once: bool,
    /// A deadline fails the endpoint, and does not decide the wait.
    leaves_deadline_to_stream: bool,
    /// A ticket of a failed endpoint waits for the stream if the completion is there.
    leaves_success_to_stream: bool,
    /// Waits are released once the device is silent.
    quiesces_first: bool,
    /// A decision is never changed.
    keeps_decisions: bool,
    /// Where the device cannot be stopped, the wait is decided before it is released.
    decides_given_up: bool,
    /// Only a prepared wait is given to a stream.
    replaces_prepared: bool,
}

const RULES: Rules = Rules {
    decides_at_once: true,
    leaves_deadline_to_stream: true,
    leaves_success_to_stream: true,
    quiesces_first: true,
    keeps_decisions: true,
    decides_given_up: true,
    replaces_prepared: true,
};

/// Where the stream is.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Stage {
    Prepared,
    /// The thread that gives it to the stream has found no failure.
    Checked,
    /// The wait has failed since: the stream does not get it.
    Refused,
    Before,
    Waiting,
    /// Through the wait: by its condition, or released.
    Passed {
        released: bool,
    },
    /// It has looked at the completion.
    Looked {
        released: bool,
        succeeded: bool,
    },
    /// It goes on, or has a fault.
    Decided {
        released: bool,
        well: bool,
    },
    Over {
        well: bool,
    },
    Discarded,
}

/// [`Status`], without the cause.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Reported {
    Complete,
    Failed,
    Discarded,
}

/// [`Cause`], as far as it matters here.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum End {
    Aborted,
    Deadline,
    Discarded,
    QueuePair,
}

#[derive(Clone, PartialEq, Eq, Hash)]
struct World {
    word: u64,
    stage: Stage,
    /// The completion, and whether it is a success.
    completion: Option<bool>,
    /// The watchdog has found the deadline passed and no completion.
    is_overdue: bool,
    failure: Option<End>,
    is_quiesced: bool,
    is_shut_down: bool,
    reported: Option<Reported>,
}

/// Takes the change that a step makes.
type Step<'a> = dyn FnMut(&dyn Fn(&mut World)) + 'a;

impl World {
    fn new() -> World {
        World {
            word: WaitWord::new(0, 0, Wait::Prepared).0,
            stage: Stage::Prepared,
            completion: None,
            is_overdue: false,
            failure: None,
            is_quiesced: false,
            is_shut_down: false,
            reported: None,
        }
    }

    fn set_wait(&mut self, state: Wait) -> bool {
        let next = WaitWord(self.word).next(state);
        if let Some(next) = next {
            self.word = next.0;
        }
        next.is_some()
    }

    fn op_status(&self) -> OpStatus {
        WaitWord(self.word).op_status()
    }

    fn has_succeeded(&self) -> bool {
        self.completion == Some(true)
    }

    fn shut_down(&mut self) {
        if self.op_status() == OpStatus::Prepared {
            self.set_wait(Wait::Failed);
        }
        self.is_shut_down = true;
    }

    fn fail(&mut self, cause: End) {
        self.failure.get_or_insert(cause);
    }

    fn steps(&self, rules: &Rules) -> Vec<World> {
        let mut after = Vec::new();
        let mut step = |change: &dyn Fn(&mut World)| {
            let mut world = self.clone();
            change(&mut world);
            after.push(world);
        };
        self.stream(rules, &mut step);
        // The device.
        if self.completion.is_none() && !self.is_quiesced {
            step(&|world| world.completion = Some(true));
            step(&|world| world.completion = Some(false));
        }
        // The application, and any thread that reaps.
        if self.failure.is_none() {
            step(&|world| world.fail(End::Aborted));
        }
        if self.completion == Some(false) && self.failure.is_none() {
            step(&|world| world.fail(End::QueuePair));
        }
        // The watchdog.
        let is_waiting = self.op_status() == OpStatus::Rung;
        if is_waiting && self.completion.is_none() && self.failure.is_none() && !self.is_overdue {
            step(&|world| world.is_overdue = true);
        }
        if self.is_overdue {
            step(&|world| {
                world.is_overdue = false;
                if !rules.leaves_deadline_to_stream {
                    world.word = WaitWord(world.word).with(Wait::Failed).0;
                    world.fail(End::Deadline);
                } else if world.op_status() == OpStatus::Rung && world.completion.is_none() {
                    world.fail(End::Deadline);
                }
            });
        }
        if self.failure.is_some() && !self.is_quiesced {
            step(&|world| world.is_quiesced = true);
        }
        let may_release = self.is_quiesced || !rules.quiesces_first;
        if self.failure.is_some() && may_release && !self.is_shut_down {
            step(&|world| world.shut_down());
        }
        // As `QueueState::give_up_waits`: the device goes on.
        if self.failure.is_some() && !self.is_shut_down {
            step(&|world| {
                let is_on_stream = matches!(world.op_status(), OpStatus::Queued | OpStatus::Rung);
                if rules.decides_given_up && is_on_stream && !world.has_succeeded() {
                    world.set_wait(Wait::Failed);
                }
                world.shut_down();
            });
        }
        after
    }

    fn stream(&self, rules: &Rules, step: &mut Step<'_>) {
        match self.stage {
            // As `PreparedRef::give_to`.
            Stage::Prepared => {
                if self.failure.is_none() {
                    step(&|world| world.stage = Stage::Checked);
                }
            }
            Stage::Checked => step(&|world| {
                if world.op_status() != OpStatus::Prepared && rules.replaces_prepared {
                    world.stage = Stage::Refused;
                    return;
                }
                world.word = WaitWord(world.word).with(Wait::Queued).0;
                world.stage = Stage::Before;
            }),
            Stage::Before => {
                step(&|world| {
                    world.set_wait(Wait::Started);
                    world.stage = Stage::Waiting;
                });
                // It has failed, or was aborted.
                step(&discard);
            }
            Stage::Waiting => {
                if self.completion.is_some() {
                    step(&|world| world.stage = Stage::Passed { released: false });
                }
                if self.is_shut_down {
                    step(&|world| world.stage = Stage::Passed { released: true });
                }
                step(&discard);
            }
            Stage::Passed { released } => step(&|world| {
                let succeeded = world.has_succeeded();
                world.stage = Stage::Looked {
                    released,
                    succeeded,
                };
            }),
            // As `QueueState::decide_wait`.
            Stage::Looked {
                released,
                succeeded,
            } => step(&|world| {
                let state = if succeeded { Wait::Done } else { Wait::Failed };
                if rules.decides_at_once && world.op_status() == OpStatus::Rung {
                    world.set_wait(state);
                }
                let well = succeeded && world.op_status() != OpStatus::Failed;
                if !well {
                    world.fail(End::QueuePair);
                }
                world.stage = Stage::Decided { released, well };
            }),
            // As `EndpointShared::finished`.
            Stage::Decided { released, well } => step(&|world| {
                let given_up = released || (world.failure.is_some() && !world.has_succeeded());
                let state = if given_up { Wait::Failed } else { Wait::Done };
                if rules.keeps_decisions {
                    world.set_wait(state);
                } else {
                    world.word = WaitWord(world.word).with(state).0;
                }
                world.stage = Stage::Over { well };
            }),
            Stage::Over { .. } | Stage::Discarded | Stage::Refused => {}
        }
    }

    /// What the ticket says, if it is final; as `EndpointShared::status_now`.
    fn look(&self, rules: &Rules) -> Option<Reported> {
        if self.completion == Some(false) && self.failure.is_none() {
            // A look reaps first.
            return None;
        }
        let status = self.op_status();
        let is_open = matches!(status, OpStatus::Queued | OpStatus::Rung);
        if (is_open || status == OpStatus::Prepared) && self.failure.is_some() && !self.is_shut_down
        {
            return None;
        }
        let is_left = is_open && rules.leaves_success_to_stream && self.has_succeeded();
        let failure = self.failure.filter(|_| !is_left).map(|cause| {
            let cause = match cause {
                End::Aborted => Cause::Aborted,
                End::Deadline => Cause::Deadline(std::time::Duration::ZERO),
                End::Discarded => Cause::Discarded,
                End::QueuePair => Cause::QueuePair,
            };
            WorkError::new(1, None, cause)
        });
        match status.report(true, failure) {
            Status::Complete => Some(Reported::Complete),
            Status::Failed(_) => Some(Reported::Failed),
            Status::Discarded => Some(Reported::Discarded),
            _ => None,
        }
    }

    /// Gives the first contradiction.
    fn check(&mut self, rules: &Rules) -> Result<(), String> {
        if let Some(now) = self.look(rules) {
            let first = *self.reported.get_or_insert(now);
            if first != now {
                return Err(format!("{first:?}, then {now:?}"));
            }
        }
        if self.reported == Some(Reported::Complete) && !self.has_succeeded() {
            return Err(format!("complete of {:?}", self.completion));
        }
        match (self.stage, self.reported) {
            (Stage::Over { well: true }, Some(Reported::Complete))
            | (Stage::Over { well: false }, Some(Reported::Failed | Reported::Discarded))
            | (Stage::Discarded, Some(Reported::Failed | Reported::Discarded))
            | (Stage::Refused, Some(Reported::Failed)) => Ok(()),
            (Stage::Over { .. } | Stage::Discarded | Stage::Refused, None)
                if !self.is_shut_down =>
            {
                Ok(())
            }
            (Stage::Over { .. } | Stage::Discarded | Stage::Refused, reported) => Err(format!(
                "the stream is {:?}, and the ticket {reported:?}",
                self.stage
            )),
            (Stage::Decided { well: true, .. }, _) if !self.has_succeeded() => {
                Err("the stream goes on, and nothing is complete".into())
            }
            _ => Ok(()),
        }
    }
}

/// As [`EndpointShared::finished`](crate::endpoint::shared::Shared) of what was discarded.
fn discard(world: &mut World) {
    if matches!(world.failure, None | Some(End::Discarded)) {
        world.set_wait(Wait::Discarded);
    }
    world.set_wait(Wait::Failed);
    world.fail(End::Discarded);
    world.stage = Stage::Discarded;
}

/// Every state that can be reached. Gives their number, or the first contradiction.
fn explore(rules: &Rules) -> Result<usize, String> {
    let mut seen = HashSet::new();
    let mut ahead = vec![World::new()];
    while let Some(mut world) = ahead.pop() {
        world.check(rules)?;
        if seen.insert(world.clone()) {
            ahead.extend(world.steps(rules));
        }
    }
    Ok(seen.len())
}

#[test]
fn no_order_of_steps_makes_the_ticket_of_a_wait_differ_from_its_stream() {
    let states = explore(&RULES).unwrap();
    println!("{states} states");
    assert!(
        states > 200,
        "{states} states: the model has lost its steps"
    );
}

#[test]
fn mistakes_in_the_end_of_a_wait_are_noticed() {
    let mistakes: [(&str, Rules); 7] = [
        (
            "a device that goes on completes a wait that was given up",
            Rules {
                decides_given_up: false,
                ..RULES
            },
        ),
        (
            "a wait that has failed is given to a stream",
            Rules {
                replaces_prepared: false,
                ..RULES
            },
        ),
        (
            "the stream decides, and writes it down later",
            Rules {
                decides_at_once: false,
                ..RULES
            },
        ),
        (
            "a deadline decides a wait that may be over",
            Rules {
                leaves_deadline_to_stream: false,
                ..RULES
            },
        ),
        (
            "a ticket does not wait for the stream",
            Rules {
                leaves_success_to_stream: false,
                ..RULES
            },
        ),
        (
            "waits are released before the device is silent",
            Rules {
                quiesces_first: false,
                ..RULES
            },
        ),
        (
            "the end of a wait is written over what was decided",
            Rules {
                keeps_decisions: false,
                ..RULES
            },
        ),
    ];
    for (mistake, rules) in mistakes {
        let found = explore(&rules);
        println!("{mistake}: {found:?}");
        assert!(found.is_err(), "not noticed: {mistake}");
    }
}
