//! What a key, an order of calls and an abort mean.

use std::rc::Rc;

use anyhow::{Context, Result, bail, ensure};
use doorbell::softcx::Faults;
use doorbell::wait_until;

use crate::exchange::{Produced, Rendezvous};
use crate::note::{Aborted, Cancelled, Key, Method};
use crate::tensor::Tensor;
use crate::{DEADLINE, METHODS};

/// Elements of a tensor here.
pub const ELEMENTS: usize = 300;

/// Ranks 0 and 1 send each other a few tensors, in each order of send and receive and with an abort.
pub fn check_meaning(rendezvous: &mut Rendezvous<'_>, receives: u32) -> Result<()> {
    let group = rendezvous.group;
    let of_rank_0 = rendezvous.key(0, 1, "any", 0)?;
    let key = |name: &str, step: u64| Key {
        name: name.into(),
        step,
        ..of_rank_0.clone()
    };
    let tensor = |rendezvous: &Rendezvous<'_>, first: f32| -> Result<Rc<Tensor>> {
        let mut tensor = rendezvous.memory.tensor(ELEMENTS)?;
        for (value, at) in tensor.values_mut()?.iter_mut().zip(0_u16..) {
            *value = first + f32::from(at);
        }
        Ok(Rc::new(tensor))
    };
    let check = |tensor: &Tensor, first: f32| -> Result<()> {
        let expected = (0..ELEMENTS as u16).map(|at| first + f32::from(at));
        ensure!(
            tensor.values()?.iter().copied().eq(expected),
            "other values"
        );
        Ok(())
    };
    for (method, step) in METHODS.into_iter().zip([1, 2, 8]) {
        let (early, other, late) = (key("early", step), key("other", step), key("late", step));
        match group.rank() {
            0 => {
                for key in [&early, &other] {
                    rendezvous.until("ask for a tensor", |r| r.is_awaited(key))?;
                }
                let [first, second, third] = [1.0, 1000.0, 2000.0].map(|at| tensor(rendezvous, at));
                // Of two keys in another order than they were asked for, and of one key twice.
                rendezvous.send(&other, &second?)?;
                rendezvous.send(&early, &first?)?;
                rendezvous.send(&late, &third?)?;
                rendezvous.send(&late, &tensor(rendezvous, 3000.0)?)?;
                group.barrier()?;
                rendezvous.until("ask for `late`", |r| r.is_taken(step))?;
            }
            1 => {
                let first = rendezvous.start_recv(&early, method)?;
                let second = rendezvous.start_recv(&other, method)?;
                check(&*rendezvous.wait(first)?, 1.0)?;
                check(&*rendezvous.wait(second)?, 1000.0)?;
                group.barrier()?;
                for first in [2000.0, 3000.0] {
                    let id = rendezvous.start_recv(&late, method)?;
                    check(&*rendezvous.wait(id)?, first)?;
                }
                println!("{}: received before and after their sends", method.name());
            }
            _ => group.barrier()?,
        }
        rendezvous.drain("the check of keys")?;
        rendezvous.finish_step(step)?;
    }

    let (aborted, goes_on) = (3, 4);
    let (a, b, c) = (key("a", aborted), key("b", aborted), key("c", goes_on));
    match group.rank() {
        0 => {
            for key in [&a, &b, &c] {
                rendezvous.until("ask for a tensor", |r| r.is_awaited(key))?;
            }
            rendezvous.abort(aborted, "out of memory")?;
            rendezvous.abort(aborted, "a consequence")?;
            let late = rendezvous.send(&a, &tensor(rendezvous, 1.0)?);
            let failure: Aborted = late
                .err()
                .context("a send of an aborted step has ended well")?
                .downcast()?;
            println!("{a}, sent later: {failure}");
            rendezvous.send(&c, &tensor(rendezvous, 2.0)?)?;
        }
        1 => {
            let pending = [&a, &b, &c].map(|key| rendezvous.start_recv(key, Method::Read));
            let [of_a, of_b, of_c] = pending;
            for (key, id) in [(&a, of_a?), (&b, of_b?)] {
                let Err(failure) = rendezvous.wait(id) else {
                    bail!("{key} was received, though its step was aborted");
                };
                let failure: Aborted = failure.downcast()?;
                println!("{key}: {failure}");
            }
            check(&*rendezvous.wait(of_c?)?, 2.0)?;
            println!("{c}: received");
            // One that begins after both aborts, of which the second one came before `c`.
            let id = rendezvous.start_recv(&a, Method::Read)?;
            println!("{a}, asked later: {}", aborted_by(rendezvous, id)?);
        }
        _ => rendezvous.until("abort", |r| r.knows(aborted))?,
    }
    rendezvous.drain("the check of aborts")?;
    rendezvous.finish_step(aborted)?;
    rendezvous.finish_step(goes_on)?;
    check_long_reason(rendezvous)?;
    check_memory_of_aborted_steps(rendezvous)?;
    check_many(rendezvous, receives)?;
    check_wrong_keys(rendezvous)?;
    check_release(rendezvous)?;
    check_ends(rendezvous)?;
    check_incarnation(rendezvous)?;
    for (method, step) in METHODS.into_iter().zip(10..) {
        check_crossing_cancel(rendezvous, method, step)?;
    }
    let held = rendezvous.held_bytes();
    ensure!(held == 0, "{held} bytes are held when all tensors are gone");
    Ok(())
}

/// What a receive of an aborted step fails with.
fn aborted_by(rendezvous: &mut Rendezvous<'_>, id: u64) -> Result<Aborted> {
    let failure = rendezvous.wait(id).err();
    let failure = failure.context("a receive of an aborted step has ended well")?;
    failure.downcast()
}

/// The memory of tensors of an aborted step: of one that nobody has asked for, and of one into which the device reads when the step is aborted.
fn check_memory_of_aborted_steps(rendezvous: &mut Rendezvous<'_>) -> Result<()> {
    let step = 13;
    let (unasked, read) = (
        rendezvous.key(0, 1, "unasked", step)?,
        rendezvous.key(0, 1, "read", step)?,
    );
    let held = rendezvous.held_bytes();
    match rendezvous.group.rank() {
        0 => {
            for key in [&unasked, &read] {
                rendezvous.send(key, &Rc::new(rendezvous.memory.tensor(ELEMENTS)?))?;
            }
        }
        1 => {
            let id = rendezvous.start_recv(&read, Method::Read)?;
            // Takes no completions, so the READ goes on for this rank however fast the device is.
            wait_until(Some(DEADLINE), || -> Result<Option<()>> {
                rendezvous.take_messages()?;
                Ok(rendezvous.is_being_read(id).then_some(()))
            })?;
            rendezvous.abort(step, "behind a READ")?;
            ensure!(
                rendezvous.is_being_read(id),
                "an abort has given memory back into which the device reads"
            );
            println!("{read}, being read: {}", aborted_by(rendezvous, id)?);
        }
        _ => {}
    }
    // Before the step is over, which drops what is left of it.
    rendezvous.until("abort", |r| r.knows_abort(step))?;
    rendezvous.drain("the check of memory of aborted steps")?;
    let now = rendezvous.held_bytes();
    ensure!(
        now == held,
        "{now} bytes are held behind an abort, and {held} before"
    );
    rendezvous.finish_step(step)
}

/// More receives than a peer has slots for, of two ranks from each other, which send only when all were begun; and the answers to more receives than an endpoint has places for, which come when
/// the step was aborted.
fn check_many(rendezvous: &mut Rendezvous<'_>, receives: u32) -> Result<()> {
    let (both, aborted, answers) = (14, 15, receives / 3);
    let rank = rendezvous.group.rank();
    let keys = |rendezvous: &Rendezvous<'_>, from: u32, to: u32, step: u64, count: u32| {
        let name = |number: u32| format!("many/{number}");
        let numbers = (0..count).map(|number| rendezvous.key(from, to, &name(number), step));
        numbers.collect::<Result<Vec<Key>>>()
    };
    if rank < 2 {
        let mut ids = Vec::new();
        for key in keys(rendezvous, 1 - rank, rank, both, receives)? {
            ids.push(rendezvous.start_recv(&key, Method::Read)?);
        }
        for key in keys(rendezvous, rank, 1 - rank, both, receives)? {
            rendezvous.send(&key, &Rc::new(rendezvous.memory.tensor(7)?))?;
        }
        for id in ids {
            ensure!(rendezvous.wait(id)?.len == 7, "another tensor");
        }
        rendezvous.until("ask for all tensors", |r| r.is_taken(both))?;
    }
    rendezvous.drain("the check of many receives")?;
    rendezvous.finish_step(both)?;

    let keys = keys(rendezvous, 0, 1, aborted, answers)?;
    match rank {
        0 => {
            for key in &keys {
                rendezvous.until("ask for a tensor", |r| r.is_awaited(key))?;
                rendezvous.send(key, &Rc::new(rendezvous.memory.tensor(7)?))?;
            }
            rendezvous.group.barrier()?;
        }
        1 => {
            let dropped = rendezvous.dropped;
            let ids = keys
                .iter()
                .map(|key| rendezvous.start_recv(key, Method::Read));
            let ids = ids.collect::<Result<Vec<u64>>>()?;
            // A barrier makes no progress of the rendezvous, so all answers come behind the abort.
            rendezvous.group.barrier()?;
            rendezvous.abort(aborted, "before its answers")?;
            rendezvous.until("the answers", |r| r.dropped == dropped + u64::from(answers))?;
            for id in ids {
                aborted_by(rendezvous, id)?;
            }
            println!("{answers} answers were dropped");
        }
        _ => rendezvous.group.barrier()?,
    }
    rendezvous.drain("the check of many answers")?;
    rendezvous.finish_step(aborted)
}

/// Keys that cannot be: the producer refuses them, and goes on.
fn check_wrong_keys(rendezvous: &mut Rendezvous<'_>) -> Result<()> {
    let step = 16;
    let right = rendezvous.key(0, 1, "right", step)?;
    for name in ["", "a;b"] {
        ensure!(
            rendezvous.key(0, 1, name, step).is_err(),
            "`{name}` is a name of a key"
        );
    }
    match rendezvous.group.rank() {
        0 => {
            rendezvous.send(&right, &Rc::new(rendezvous.memory.tensor(7)?))?;
            rendezvous.until("ask for a tensor", |r| r.is_taken(step))?;
        }
        1 => {
            for name in ["", "a;b"] {
                let wrong = Key {
                    name: name.into(),
                    ..right.clone()
                };
                let id = rendezvous.start_recv(&wrong, Method::Read)?;
                println!("wrong key: {}", aborted_by(rendezvous, id)?.reason);
            }
            let id = rendezvous.start_recv(&right, Method::Read)?;
            ensure!(rendezvous.wait(id)?.len == 7, "another tensor");
        }
        _ => {}
    }
    rendezvous.drain("the check of wrong keys")?;
    rendezvous.finish_step(step)
}

/// A tensor that its producer changes as soon as it has it back. The software ConnectX of the producer loses a packet of each: a READ whose response was lost reads the memory again, and would find the next
/// values if the release had not waited for its end.
fn check_release(rendezvous: &mut Rendezvous<'_>) -> Result<()> {
    let step = 17;
    let key = rendezvous.key(0, 1, "changed", step)?;
    let values = (1..=4_u8).map(f32::from);
    match rendezvous.group.rank() {
        0 => {
            let device = rendezvous.group.domain().device().clone();
            // So many packets that the lost one is of the response to the READ, with others behind it, so that the consumer reads it again at once.
            let mut tensor = Rc::new(rendezvous.memory.tensor(100 * ELEMENTS)?);
            for value in values {
                let own = Rc::get_mut(&mut tensor).context("a tensor that others have")?;
                own.values_mut()?.fill(value);
                // The consumer hears late that a packet is missing. A card has no such faults.
                device.set_faults(Faults {
                    drop_nth: 12,
                    delay_ns: 500_000,
                    ..Faults::default()
                });
                rendezvous.send(&key, &tensor)?;
                rendezvous.until("give the tensor back", |_| Rc::strong_count(&tensor) == 1)?;
            }
            device.set_faults(Faults::default());
        }
        1 => {
            for value in values {
                let id = rendezvous.start_recv(&key, Method::Read)?;
                let tensor = rendezvous.wait(id)?;
                let is_right = tensor.values()?.iter().all(|found| *found == value);
                ensure!(
                    is_right,
                    "a tensor was released before it was read: not all values are {value}"
                );
            }
        }
        _ => {}
    }
    rendezvous.drain("the check of the release")?;
    rendezvous.finish_step(step)
}

/// An abort for a reason that is longer than a message, and of which the last byte that would have room is the first one of a character.
fn check_long_reason(rendezvous: &mut Rendezvous<'_>) -> Result<()> {
    let (step, reason) = (7, "\u{e9}".repeat(600));
    let key = rendezvous.key(0, 1, "long", step)?;
    match rendezvous.group.rank() {
        0 => {
            rendezvous.until("ask for a tensor", |r| r.is_awaited(&key))?;
            rendezvous.abort(step, &reason)?;
        }
        1 => {
            let id = rendezvous.start_recv(&key, Method::Read)?;
            let failure = aborted_by(rendezvous, id)?;
            ensure!(reason.starts_with(&failure.reason), "{failure}");
            let len = failure.reason.len();
            println!("{key}: {len} of {} bytes of the reason", reason.len());
        }
        _ => rendezvous.until("abort", |r| r.knows(step))?,
    }
    rendezvous.drain("the check of a long reason")?;
    rendezvous.finish_step(step)
}

/// The end of a step with receives that wait, a receive that is cancelled, and dead tensors.
fn check_ends(rendezvous: &mut Rendezvous<'_>) -> Result<()> {
    let group = rendezvous.group;
    let rank = group.rank();
    let (ended, step) = (5, 6);
    let fails = |rendezvous: &mut Rendezvous<'_>, id: u64, when: &str| -> Result<()> {
        let failure = rendezvous.wait(id).err();
        let failure = failure.with_context(|| format!("a receive {when} has ended well"))?;
        // A receive that nobody answers ends by its deadline, with another error.
        let failure: Aborted = failure.downcast()?;
        println!("{when}: {failure}");
        Ok(())
    };
    // Rank 0 ends the step while rank 1 waits for a tensor of it, and rank 1 asks once more.
    let never = rendezvous.key(0, 1, "never", ended)?;
    match rank {
        0 => {
            rendezvous.until("ask for a tensor", |r| r.is_awaited(&never))?;
            let refused = rendezvous.refused;
            rendezvous.finish_step(ended)?;
            group.barrier()?;
            rendezvous.until("ask for the tensor again", |r| r.refused == refused + 2)?;
        }
        1 => {
            let id = rendezvous.start_recv(&never, Method::Read)?;
            group.barrier()?;
            fails(rendezvous, id, "waiting when its producer ends the step")?;
            let id = rendezvous.start_recv(&never, Method::Read)?;
            fails(
                rendezvous,
                id,
                "asking when the producer has ended the step",
            )?;
            let own = rendezvous.key(1, 1, "own", ended)?;
            let id = rendezvous.start_recv(&own, Method::Read)?;
            rendezvous.finish_step(ended)?;
            fails(rendezvous, id, "waiting when its consumer ends the step")?;
            let id = rendezvous.start_recv(&never, Method::Read)?;
            fails(rendezvous, id, "beginning behind the end of the step")?;
        }
        _ => group.barrier()?,
    }
    rendezvous.drain("the check of ends")?;
    rendezvous.finish_step(ended)?;
    ensure!(
        !rendezvous.knows(ended),
        "a request has made step {ended} anew"
    );

    let key = |name: &str| rendezvous.key(0, 1, name, step);
    let (taken_back, dead) = (key("x")?, key("dead")?);
    let mut cancelled = None;
    if rank == 1 {
        cancelled = Some(rendezvous.start_recv(&taken_back, Method::Read)?);
    } else if rank == 0 {
        rendezvous.until("ask for a tensor", |r| r.is_awaited(&taken_back))?;
    }
    group.barrier()?;
    if let Some(id) = cancelled {
        ensure!(
            rendezvous.cancel(id)?,
            "a receive that waits cannot be cancelled"
        );
        let failure = rendezvous.wait(id).err();
        let failure = failure.context("a cancelled receive has ended well")?;
        println!("cancelled: {}", failure.downcast::<Cancelled>()?);
    } else if rank == 0 {
        rendezvous.until("cancel a receive", |r| !r.is_awaited(&taken_back))?;
    }
    group.barrier()?;
    match rank {
        0 => {
            rendezvous.send(&taken_back, &Rc::new(rendezvous.memory.tensor(7)?))?;
            rendezvous.send_dead(&dead)?;
            rendezvous.send_dead(&dead)?;
            rendezvous.until("ask for them", |r| r.is_taken(step))?;
        }
        1 => {
            let id = rendezvous.start_recv(&taken_back, Method::Read)?;
            let tensor = rendezvous.wait(id)?;
            ensure!(tensor.len == 7, "a tensor of {} elements", tensor.len);
            ensure!(
                !rendezvous.cancel(id)?,
                "a receive that is over was cancelled"
            );
            println!("{taken_back}: received behind the cancelled receive");
            for method in [Method::Read, Method::Message] {
                let id = rendezvous.start_recv(&dead, method)?;
                let produced = rendezvous.wait_produced(id)?;
                ensure!(matches!(produced, Produced::Dead), "{dead} is alive");
                println!("{dead}, {}: dead", method.name());
            }
        }
        _ => {}
    }
    rendezvous.drain("the check of cancelled receives")?;
    rendezvous.finish_step(step)
}

/// A request that names the process which had the producer's rank before.
fn check_incarnation(rendezvous: &mut Rendezvous<'_>) -> Result<()> {
    let step = 9;
    let key = rendezvous.key(0, 1, "restarted", step)?;
    match rendezvous.group.rank() {
        0 => {
            let refused = rendezvous.refused;
            rendezvous.send(&key, &Rc::new(rendezvous.memory.tensor(7)?))?;
            rendezvous.until("ask for a tensor", |r| r.is_taken(step))?;
            ensure!(
                rendezvous.refused == refused + 1,
                "a request for another incarnation was not refused"
            );
        }
        1 => {
            let stale = Key {
                incarnation: !key.incarnation,
                ..key.clone()
            };
            let id = rendezvous.start_recv(&stale, Method::Read)?;
            println!("another incarnation: {}", aborted_by(rendezvous, id)?);
            let id = rendezvous.start_recv(&key, Method::Read)?;
            ensure!(rendezvous.wait(id)?.len == 7, "another tensor");
        }
        _ => {}
    }
    rendezvous.drain("the check of incarnations")?;
    rendezvous.finish_step(step)
}

/// A receive that is cancelled when its tensor has been sent and has not come.
fn check_crossing_cancel(rendezvous: &mut Rendezvous<'_>, method: Method, step: u64) -> Result<()> {
    let group = rendezvous.group;
    let key = rendezvous.key(0, 1, "crossing", step)?;
    match group.rank() {
        0 => {
            rendezvous.until("ask for a tensor", |r| r.is_awaited(&key))?;
            rendezvous.send(&key, &Rc::new(rendezvous.memory.tensor(7)?))?;
            group.barrier()?;
        }
        1 => {
            let id = rendezvous.start_recv(&key, method)?;
            // A barrier makes no progress of the rendezvous.
            group.barrier()?;
            let dropped = rendezvous.dropped;
            ensure!(rendezvous.cancel(id)?, "the tensor has come");
            let failure = rendezvous.wait(id).err();
            let failure = failure.context("a cancelled receive has ended well")?;
            ensure!(failure.is::<Cancelled>(), "{failure}");
            rendezvous.until("the tensor of a cancelled receive", |r| {
                r.dropped == dropped + 1
            })?;
            println!(
                "{}: cancelled when its tensor was on its way",
                method.name()
            );
        }
        _ => group.barrier()?,
    }
    // The producer has its tensor back: nothing is lent.
    rendezvous.drain("the check of a cancel that crosses its tensor")?;
    rendezvous.finish_step(step)
}
