//! A queue pair of plain verbs behind queues in memory of this library.
#![allow(unsafe_code)] // hands memory and verbs objects to the relay

use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::sync::{Arc, Mutex, PoisonError, TryLockError};

use doorbell_dv_sys::doorbell_dv_caps;

use super::completion_ring::CompletionRing;
use super::core::Core;
use super::provider::Verbs;
use super::recv_queue::{RecvParts, RelayRecvQueue};
use super::send_queue::{RelaySendQueue, SendParts};
use super::staging::Staging;
use crate::verbs::call::object;
use crate::verbs::completion_queue::CompletionQueue;
use crate::verbs::context::Context;
use crate::verbs::domain::Domain;
use crate::verbs::qp_states::{RawQp, States, VerbsRemote};
use crate::{Error, Result, StateKind};
use doorbell_wire::memory::{Pages, QueuePairMemory, QueuePairSizes, RecordCell, RingCells};
use doorbell_wire::verbs::{Abilities, Capacity, State, Transport};

/// A queue pair with two completion queues of its own. The fields are in the order in which they must be dropped.
#[derive(Debug)]
pub(crate) struct Relay {
    states: States,
    /// Held through every call that posts, polls or changes the state; taken before the lock inside of `states`.
    core: Mutex<Core<Verbs>>,
    /// A thread rang while another held the core. The other thread has to look again.
    missed: AtomicBool,
    /// The completions that came before the device's failure were passed on.
    shows_error: AtomicBool,
    /// Requests were rung for and are not posted, or a thread is about to check whether there are any.
    holds_work: AtomicBool,
    _cqs: [CompletionQueue; 2],
    memory: QueuePairMemory,
    pages: Pages,
    abilities: Abilities,
    domain: Arc<Domain>,
}

impl Relay {
    /// Makes a queue pair in the RESET state.
    ///
    /// # Errors
    /// [`Error::Range`] naming the requested value that the device does not support; [`Error::State`] if it has no reliable
    /// connections; [`Error::System`] of the verbs call.
    pub(crate) fn new(domain: &Arc<Domain>, capacity: &Capacity) -> Result<Relay> {
        let context = &domain.context;
        let limits = context.limits;
        if let Err(error) = limits.check(capacity) {
            // A device without reliable connections has small limits as well, which would give a misleading error.
            let least = Capacity {
                transport: capacity.transport,
                send_depth: 1,
                recv_depth: 1,
                segments: 1,
                inline_bytes: 0,
            };
            let cq = || CompletionQueue::of_at_least(context, 1);
            return Err(
                match create_once(context, domain, &[cq()?, cq()?], &least) {
                    Err(none @ Error::State { .. }) => none,
                    _ => error,
                },
            );
        }
        let sizes = QueuePairSizes::of(capacity);
        let (pages, memory) = QueuePairMemory::new(&sizes)?;
        // A place for each work request in flight is enough: a completion that was not passed on yet still belongs to one of those,
        // however long the rings behind it are.
        let cq = |depth| CompletionQueue::of_at_least(context, depth);
        let cqs = [cq(capacity.send_depth)?, cq(capacity.recv_depth)?];
        let (qp, caps) = create(context, domain, &cqs, capacity)?;
        let states = States::new(qp, capacity.transport, context, &cqs)?;
        let needs_slots = caps.inline_bytes < capacity.inline_bytes;
        let staging = Staging::new(
            needs_slots.then_some(domain),
            capacity.send_depth,
            capacity.inline_bytes,
            caps.inline_bytes,
        )?;
        let qpn = states.qpn();
        // SAFETY: all of it lies in `pages`, which go after the core, and is as long as it was laid out.
        let (send, recv) = unsafe {
            let completions = |queue: usize| {
                let count = sizes.cqes[queue];
                CompletionRing::new(
                    RingCells::new(memory.cqs[queue], count as usize * 64),
                    count,
                    RecordCell::new(memory.cq_records[queue]),
                )
            };
            let send = SendParts {
                ring: RingCells::new(memory.send_ring, sizes.send_wqebbs as usize * 64),
                record: RecordCell::new(memory.record.add(1)),
                wqebbs: sizes.send_wqebbs,
                completions: completions(0),
                staging,
                depth: capacity.send_depth,
                segments: capacity.segments,
                qpn,
                addresses: (capacity.transport == Transport::Ud)
                    .then(|| Arc::clone(&domain.addresses)),
            };
            let recv = RecvParts {
                ring: RingCells::new(
                    memory.recv_ring,
                    (sizes.recv_wqes * sizes.recv_stride_bytes) as usize,
                ),
                record: RecordCell::new(memory.record),
                wqes: sizes.recv_wqes,
                stride_bytes: sizes.recv_stride_bytes,
                completions: completions(1),
                depth: capacity.recv_depth,
                segments: capacity.segments,
                qpn,
            };
            (send, recv)
        };
        // SAFETY: the queue pair is destroyed when no code can use the relay any more, and the completion queues after it.
        let provider =
            unsafe { Verbs::new(states.raw(), cqs.each_ref().map(CompletionQueue::raw)) };
        Ok(Relay {
            states,
            core: Mutex::new(Core::new(
                provider,
                RelaySendQueue::new(send),
                RelayRecvQueue::new(recv),
            )),
            missed: AtomicBool::new(false),
            shows_error: AtomicBool::new(false),
            holds_work: AtomicBool::new(false),
            _cqs: cqs,
            memory,
            pages,
            abilities: context.abilities(),
            domain: Arc::clone(domain),
        })
    }

    /// The addresses of its parts.
    pub(crate) fn memory(&self) -> &QueuePairMemory {
        &self.memory
    }

    /// Bytes of memory that it takes, without the device's own.
    pub(crate) fn memory_bytes(&self) -> usize {
        self.pages.len_bytes() + self.hold(|core| core.send.staging_bytes())
    }

    pub(crate) fn states(&self) -> &States {
        &self.states
    }

    /// The state. The error state is reported only when the completion that has the reason was passed on: the device wrote it earlier, but
    /// to its own queue.
    #[inline]
    pub(crate) fn state(&self) -> State {
        let state = self.states.state();
        if state == State::Error && !self.shows_error.load(Ordering::Acquire) {
            self.show_error();
        }
        state
    }

    #[cold]
    fn show_error(&self) {
        self.hold(|core| {
            if self.states.state() == State::Error {
                core.turn(State::Error);
                self.shows_error.store(true, Ordering::Release);
            }
        });
    }

    pub(crate) fn abilities(&self) -> Abilities {
        self.abilities
    }

    /// The name of the device.
    pub(crate) fn device_name(&self) -> &str {
        self.domain.context.name()
    }

    /// Waits for the core, and afterwards looks again if a thread rang meanwhile and found the core taken. Every way to hold it ends in such
    /// a look.
    fn hold<T>(&self, act: impl FnOnce(&mut Core<Verbs>) -> T) -> T {
        let mut core = self.core.lock().unwrap_or_else(PoisonError::into_inner);
        let result = act(&mut core);
        drop(core);
        if self.was_missed() {
            self.turn();
        }
        result
    }

    /// Whether a thread rang and found the core taken, which the caller has just released.
    #[inline]
    fn was_missed(&self) -> bool {
        // Between the unlock and the look at the flag; pairs with the one in `rung`, between the flag and the try to lock.
        fence(Ordering::SeqCst);
        self.missed.load(Ordering::Relaxed)
    }

    /// Does the work that there is, unless another thread is doing so. Returns whether there was any.
    #[inline]
    pub(crate) fn turn(&self) -> bool {
        self.turn_by(|core| self.work(core))
    }

    /// As [`Relay::turn`], with `act` for the first turn.
    #[inline]
    fn turn_by(&self, act: impl FnOnce(&mut Core<Verbs>) -> bool) -> bool {
        let mut worked = false;
        let mut first = Some(act);
        loop {
            let mut core = match self.core.try_lock() {
                Ok(core) => core,
                Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
                Err(TryLockError::WouldBlock) => return worked,
            };
            // Before `missed` is cleared: the thread that rang may look at `holds_work` next.
            self.holds_work.store(true, Ordering::SeqCst);
            // Acquire: the doorbells of the threads that rang before this.
            self.missed.swap(false, Ordering::AcqRel);
            worked |= match first.take() {
                Some(act) => act(&mut core),
                None => self.work(&mut core),
            };
            drop(core);
            if !self.was_missed() {
                return worked;
            }
        }
    }

    /// A doorbell was stored: it is acted upon before this returns, or by the thread that holds the core.
    #[inline]
    pub(crate) fn rung(&self) {
        self.missed.swap(true, Ordering::AcqRel);
        fence(Ordering::SeqCst);
        self.turn_by(|core| self.post(core));
    }

    /// Posts what was rung for. The threads that wait for completions look for them.
    #[inline]
    fn post(&self, core: &mut Core<Verbs>) -> bool {
        if !core.post(self.states.state()) {
            return self.work(core);
        }
        self.holds_work.store(false, Ordering::SeqCst);
        true
    }

    /// Whether requests that were rung for are still to be posted, in a turn to come.
    pub(crate) fn holds_work(&self) -> bool {
        self.missed.load(Ordering::SeqCst) || self.holds_work.load(Ordering::SeqCst)
    }

    /// Returns when the device has the receives that were rung for, as far as it takes them. That includes those that were rung for while
    /// another thread held the core, which may not have come to them.
    pub(crate) fn wait_receives_posted(&self) {
        self.hold(|core| {
            if core.recv.has_announced() {
                self.work(core);
            }
        });
    }

    #[inline]
    fn work(&self, core: &mut Core<Verbs>) -> bool {
        let turn = core.turn(self.states.state());
        if turn.fails {
            // If this fails, posted requests are not flushed, and the endpoint notices that.
            let _ = self.states.fail();
            // Requests that were posted before are flushed from here on.
            core.turn(State::Error);
        }
        let holds = self.states.state() == State::ReadyToSend && core.send.has_announced();
        self.holds_work.store(holds, Ordering::SeqCst);
        turn.worked
    }

    /// INIT to RTR and RTS. After an error the queue pair is in the state that it had, with the receives that it had.
    ///
    /// # Errors
    /// As [`States::connect`].
    pub(crate) fn connect(&self, remote: &VerbsRemote) -> Result<()> {
        self.hold(|core| {
            self.states.connect(remote).inspect_err(|_| {
                if self.states.state() == State::Init {
                    core.post_again();
                }
            })
        })
    }

    /// INIT to RTR and RTS of a UD queue pair. After an error, as [`Relay::connect`].
    ///
    /// # Errors
    /// As [`States::activate`].
    pub(crate) fn activate(&self) -> Result<()> {
        self.hold(|core| {
            self.states.activate().inspect_err(|_| {
                if self.states.state() == State::Init {
                    core.post_again();
                }
            })
        })
    }

    /// Any state to ERR. The device flushes posted requests, and the relay flushes requests that are rung for later, in its next turns.
    ///
    /// # Errors
    /// As [`States::fail`].
    pub(crate) fn fail(&self) -> Result<()> {
        // Without the core, so that no thread waits for the core if the command hangs.
        let done = self.states.fail();
        self.hold(|_| ());
        done
    }

    /// After [`Relay::fail`]: passes on the completions that there are, and does nothing more for this generation.
    ///
    /// # Errors
    /// As [`States::quiesce`].
    pub(crate) fn quiesce(&self) -> Result<()> {
        self.hold(|core| {
            core.turn(State::Error);
            core.is_silent = true;
        });
        self.states.quiesce()
    }

    /// Any state to RESET. The completion queues begin at their first entry.
    ///
    /// # Errors
    /// As [`States::reset`].
    pub(crate) fn reset(&self) -> Result<()> {
        // If a thread rings for the old generation and finds the core held, the look that follows finds nothing: in RESET there is nothing
        // to do.
        self.hold(|core| {
            self.states.reset()?;
            core.reset();
            self.shows_error.store(false, Ordering::Release);
            Ok(())
        })
    }
}

/// Makes the queue pair.
///
/// # Errors
/// [`Error::Range`] with the most that the device creates. The limit that it reports is an upper bound, which long work requests do not
/// reach.
fn create(
    context: &Context,
    domain: &Domain,
    cqs: &[CompletionQueue; 2],
    capacity: &Capacity,
) -> Result<(RawQp, doorbell_dv_caps)> {
    let make = |capacity: &Capacity| create_once(context, domain, cqs, capacity);
    let error = match make(capacity) {
        Err(
            error @ Error::System {
                errno: libc::EINVAL | libc::ENOMEM,
                ..
            },
        ) => error,
        made => return made,
    };
    let (send_depth, recv_depth) = (capacity.send_depth, capacity.recv_depth);
    let with_send = |send_depth| {
        make(&Capacity {
            send_depth,
            ..*capacity
        })
        .is_ok()
    };
    let with_recv = |recv_depth| {
        make(&Capacity {
            recv_depth,
            ..*capacity
        })
        .is_ok()
    };
    let (argument, value, max) = match largest(send_depth, with_send) {
        Some(max) => ("send_depth", send_depth, max),
        None => match largest(recv_depth, with_recv) {
            Some(max) => ("recv_depth", recv_depth, max),
            None => return Err(error),
        },
    };
    Err(Error::Range {
        argument,
        value: value.into(),
        min: 1,
        max: max.into(),
    })
}

/// The largest number below `refused` that works, if all below it do; `None` if not even 1 does.
fn largest(refused: u32, works: impl Fn(u32) -> bool) -> Option<u32> {
    let (mut good, mut bad) = (0, refused);
    while bad - good > 1 {
        let middle = good + (bad - good) / 2;
        if works(middle) {
            good = middle;
        } else {
            bad = middle;
        }
    }
    (good > 0).then_some(good)
}

/// With inline data, if the device has that, or else without.
fn create_once(
    context: &Context,
    domain: &Domain,
    cqs: &[CompletionQueue; 2],
    capacity: &Capacity,
) -> Result<(RawQp, doorbell_dv_caps)> {
    let [send_cq, recv_cq] = cqs.each_ref().map(|cq| cq.raw().as_ptr());
    let make = |inline_bytes: u32| {
        let mut caps = doorbell_dv_caps {
            send_wrs: capacity.send_depth,
            recv_wrs: capacity.recv_depth,
            send_sges: capacity.segments,
            recv_sges: capacity.segments,
            inline_bytes,
            datagrams: (capacity.transport == Transport::Ud).into(),
        };
        // SAFETY: live objects of one context, which the owner of the queue pair holds.
        let qp = object("ibv_create_qp", || unsafe {
            doorbell_dv_sys::doorbell_dv_create_plain_qp(
                domain.raw().as_ptr(),
                send_cq,
                recv_cq,
                &raw mut caps,
            )
        })?;
        Ok((RawQp(qp), caps))
    };
    let made = match make(capacity.inline_bytes) {
        // The error of a provider for too much inline data, as for any other value that is too large.
        Err(Error::System {
            errno: libc::EINVAL | libc::ENOMEM,
            ..
        }) if capacity.inline_bytes > 0 => make(0),
        made => made,
    };
    match made {
        Err(Error::System {
            errno: libc::EOPNOTSUPP | libc::ENOSYS,
            ..
        }) => Err(Error::state(
            StateKind::Unsupported,
            "ibv_create_qp",
            format!(
                "`{}` does not support {:?} queue pairs",
                context.name(),
                capacity.transport
            ),
        )),
        made => made,
    }
}

/// On a device that the environment names.
#[cfg(test)]
mod tests {
    use std::sync::Barrier;
    use std::sync::atomic::AtomicU32;

    use super::*;
    use crate::verbs::VerbsDevice;
    use crate::verbs::tests::{RELAY, device_name};
    use doorbell_wire::verbs::Attributes;

    #[test]
    fn a_ring_while_another_thread_holds_the_relay_is_not_lost() {
        let test = "a_ring_while_another_thread_holds_the_relay_is_not_lost";
        let Some(name) = device_name(test) else {
            return;
        };
        let plain = format!("verbs:{}", name.trim_start_matches("verbs:"));
        let device = VerbsDevice::open(&plain).unwrap().unwrap();
        let domain = Arc::new(Domain::new(&device).unwrap());
        let relay = Relay::new(&domain, &RELAY).unwrap();
        let init = || relay.states().init(Attributes::default()).unwrap();
        init();
        relay.hold(|_| {
            std::thread::scope(|threads| threads.spawn(|| relay.rung()).join().unwrap());
            assert!(relay.missed.load(Ordering::Acquire), "it was taken");
        });
        assert!(!relay.missed.load(Ordering::Acquire));
        // For every call that holds the core, and every interleaving of the two threads: when both are done, no doorbell is left that was
        // not looked after.
        type Holder<'a> = (&'a str, &'a (dyn Fn() + Sync));
        let to_itself = relay.states().local();
        let holders: [Holder<'_>; 7] = [
            ("wait_receives_posted", &|| relay.wait_receives_posted()),
            ("memory_bytes", &|| assert!(relay.memory_bytes() > 0)),
            ("show_error", &|| relay.show_error()),
            ("connect", &|| relay.connect(&to_itself).unwrap()),
            ("fail", &|| relay.fail().unwrap()),
            ("quiesce", &|| relay.quiesce().unwrap()),
            ("reset", &|| relay.reset().unwrap()),
        ];
        for round in 0..300 {
            relay.reset().unwrap();
            init();
            for (call, hold) in holders {
                let begin = Barrier::new(2);
                std::thread::scope(|threads| {
                    threads.spawn(|| {
                        begin.wait();
                        relay.rung();
                    });
                    begin.wait();
                    hold();
                });
                let missed = relay.missed.load(Ordering::Acquire);
                assert!(!missed, "{call}, round {round}");
            }
        }
    }

    /// A peer that learns that a receive was posted may send at once, and without retries it would fail.
    #[test]
    fn settling_returns_after_receives_are_posted() {
        let Some(name) = device_name("settling_returns_after_receives_are_posted") else {
            return;
        };
        let plain = format!("verbs:{}", name.trim_start_matches("verbs:"));
        let device = VerbsDevice::open(&plain).unwrap().unwrap();
        let domain = Arc::new(Domain::new(&device).unwrap());
        let relay = Relay::new(&domain, &RELAY).unwrap();
        relay.states().init(Attributes::default()).unwrap();
        let has_announced = || relay.hold(|core| core.recv.has_announced());
        assert!(!has_announced());
        // One receive, of no memory: the ring is zero.
        // SAFETY: the record's receive word, which lives as long as the relay.
        let record = unsafe { AtomicU32::from_ptr(relay.memory().record) };
        record.store(1u32.to_be(), Ordering::Release);
        assert!(has_announced(), "nobody has rung");
        relay.wait_receives_posted();
        assert!(!has_announced());
    }
}
