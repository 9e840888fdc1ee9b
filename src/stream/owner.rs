//! The owners of programs: the memory behind their targets.
#![allow(unsafe_code)] // declares an unsafe trait; there is no unsafe block in here

use std::any::Any;
use std::fmt;
use std::ptr::NonNull;
use std::sync::{Arc, OnceLock, Weak};

use super::failure_notifier::FailureNotifier;
use super::fault::StreamFailure;
use super::kernel_step::KernelStep;
use super::lock::Lock;
use crate::Result;
use crate::bytecode::{TargetId, Targets};

/// How the execution of a program ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Outcome {
    /// Every op was executed, and every wait saw its condition.
    Done,
    /// Every op was executed, but at least one wait was given up because [`Owner::released`] said so.
    Released,
    /// Not executed, or not to its end: the stream had failed, was aborted, or the owner has no memory for a target.
    Discarded,
    /// The stream ended while it executed the program. It is not known how far it came.
    Lost,
}

/// What queued programs belong to: it has the memory behind a table of targets, keeps it alive, and learns what becomes of
/// each program.
///
/// An executor holds an `Arc` of the owner from the submission of a program until it is finished. The methods are called on the
/// executor's thread, so all of them should be quick and none may wait for that same executor. A panic in one of them is an
/// asynchronous failure of the stream, as if a kernel had panicked.
///
/// # Safety
/// While `self` lives:
/// - [`Owner::targets`] gives the same table every time;
/// - if [`Owner::base`] gives an address for a target of that table, it is the same one every time, and the memory from there is
///   valid for reads and writes of the target's `len_bytes`, from any thread, and is written by others with atomic operations,
///   by a device, or not at all while a program that reads it may run.
///
/// An implementation need not align `base`: executors refuse a misaligned word.
pub unsafe trait Owner: Send + Sync + DropLater {
    /// The table that the programs of this owner address.
    fn targets(&self) -> &Targets;

    /// Where the memory of a target starts in this process. None when it has none here; a program that needs it is then discarded
    /// before its first op.
    fn base(&self, target: TargetId) -> Option<NonNull<u8>>;

    /// An object that keeps the memory of a target mapped after the owner is gone, as an open device keeps its registers. None if there is no such
    /// object.
    fn keeper(&self, target: TargetId) -> Option<Weak<dyn Any + Send + Sync>> {
        let _ = target;
        None
    }

    /// Where executors keep what they derived from the memory, such as mappings for a GPU. The owner drops it before the memory
    /// is freed. None: only executors of this process's own threads can execute the programs.
    fn attachments(&self) -> Option<&Attachments> {
        None
    }

    /// Called at each turn of a wait. It lets a software NIC work inside the loop that waits for it.
    /// True: it did something, so more may happen soon.
    fn progress(&self) -> bool {
        false
    }

    /// Called when stores of a program have been executed: at its end, and before each of its waits.
    fn rung(&self) {}

    /// [`Owner::progress`] in a look at a stream without a thread. The thread waits for the work, so it may do what else another thread would.
    #[doc(hidden)]
    fn progress_in_look(&self) -> bool {
        self.progress()
    }

    /// [`Owner::rung`] in a look at a stream without a thread.
    #[doc(hidden)]
    fn rung_in_look(&self) {
        self.rung();
    }

    /// The executor begins the program submitted with `cookie`. Not called for one that is discarded unseen.
    fn started(&self, cookie: u64) {
        let _ = cookie;
    }

    /// The executor is done with the program submitted with `cookie`. Called exactly once for each program that was accepted.
    fn finished(&self, cookie: u64, outcome: Outcome) {
        let _ = (cookie, outcome);
    }

    /// What is done on a stream of a GPU before the ops of the program: what a stream of the host does in [`Owner::started`].
    ///
    /// # Errors
    /// Any, with which the executor refuses the program.
    #[doc(hidden)]
    fn kernel_step(&self, cookie: u64) -> Result<Option<KernelStep<'_>>> {
        let _ = cookie;
        Ok(None)
    }

    /// Asked once a program was executed to its end, before [`Owner::finished`]: why what is queued behind it must not run, if one of its waits
    /// ended without success. An owner may end a wait by what the wait is for, as a completion in error does.
    fn failure_of(&self, cookie: u64, outcome: Outcome) -> Option<StreamFailure> {
        let _ = cookie;
        (outcome == Outcome::Released)
            .then(|| "a wait was released before its condition held".into())
    }

    /// Asked when the owner has failed, and before its waits end: as [`Owner::failure_of`] of a wait that is released. A GPU may still pass the wait by
    /// what it is for, until everything behind it is stopped; so nothing is decided here.
    #[doc(hidden)]
    fn expected_failure(&self, cookie: u64) -> Option<StreamFailure> {
        self.failure_of(cookie, Outcome::Released)
    }

    /// Everything behind the program was stopped, because of its [`Owner::expected_failure`]. So the wait has failed, also if what it is for comes before the stream.
    #[doc(hidden)]
    fn stopped_behind(&self, cookie: u64) {
        let _ = cookie;
    }

    /// A program that was submitted with that cookie will never be executed to its end: the stream has ended before it, or in it.
    /// [`Owner::finished`] follows.
    fn not_executed(&self, cookie: u64) {
        let _ = cookie;
    }

    /// Fails the owner because a stream that cannot skip queued work, such as a GPU's, must not transmit it. The cause is the application, or an
    /// earlier failure. The owner's waits are then [`Owner::released`], and nothing that the stream rings after this call is transmitted. Called by any
    /// thread, and for an owner of several programs once for each. Does nothing if the programs of that generation are over.
    fn give_up(&self, generation: u32) {
        let _ = generation;
    }

    /// A number that changes only while no stream has a program of the owner.
    fn generation(&self) -> u32 {
        0
    }

    /// True if the owner itself satisfies its waits when they are [`Owner::released`]. Otherwise an executor that cannot leave a wait, such as a
    /// GPU's, stores to the word and restores its value afterwards.
    fn ends_waits(&self) -> bool {
        false
    }

    /// Asked at each turn of a wait of the program submitted with `cookie`. True: stop waiting and go on with the next op.
    fn released(&self, cookie: u64) -> bool {
        let _ = cookie;
        false
    }

    /// Drops the owner, whose last handle is gone, except for what may block. Returns that, for another thread to drop.
    ///
    /// An owner that shares its memory with the application drops its handles of that memory here unless they are the last: the application may
    /// rely on its own handle being the last one as soon as the stream has finished.
    fn drop_nonblocking(self) -> Option<DeferredDrop>
    where
        Self: Sized + 'static,
    {
        Some(Box::new(self))
    }
}

/// Dropping a handle of an owner by a thread that must not block.
pub trait DropLater {
    /// Gives up a handle. If it was the last, this returns what [`Owner::drop_nonblocking`] leaves: dropping it may block until a GPU is done, so another
    /// thread may do that.
    #[doc(hidden)]
    fn into_deferred_drop(self: Arc<Self>) -> Option<DeferredDrop>;
}

/// Something whose drop may block.
pub type DeferredDrop = Box<dyn Send>;

impl<T: Owner + 'static> DropLater for T {
    fn into_deferred_drop(self: Arc<Self>) -> Option<DeferredDrop> {
        // The memory of a program may be in the owner itself, and stays where it is until the mappings of it are gone with the owner.
        let place: Weak<T> = Arc::downgrade(&self);
        let rest = Arc::into_inner(self)?.drop_nonblocking()?;
        Some(Box::new((rest, place)))
    }
}

/// What executors keep with an owner of memory: a thing for each executor, or kind of executor, that asked for one. A thing that is attached
/// stays until the owner drops it, and is found without a lock.
#[derive(Default)]
pub struct Attachments {
    first: OnceLock<Box<Attachment>>,
    /// Held while a thing is made, so that it is made once.
    making: Lock<()>,
    /// Has a lock of its own: making a thing may block until streams are done.
    failure_notifier: FailureNotifier,
}

struct Attachment {
    key: u64,
    thing: Box<dyn Any + Send + Sync>,
    next: OnceLock<Box<Attachment>>,
}

impl Attachments {
    /// Whether nothing is attached.
    pub(crate) fn is_empty(&self) -> bool {
        self.first.get().is_none()
    }

    /// The streams that are told of the owner's failure before its waits end.
    pub(crate) fn failure_notifier(&self) -> &FailureNotifier {
        &self.failure_notifier
    }

    /// The thing of that key and type, made if there is none yet.
    ///
    /// # Errors
    /// That of `make`.
    pub fn get_or_make<T: Any + Send + Sync>(
        &self,
        key: u64,
        make: impl FnOnce() -> Result<T>,
    ) -> Result<Arc<T>> {
        let shared = self.get_or_attach(key, || make().map(Arc::new))?;
        Ok(Arc::clone(shared))
    }

    /// The thing of that key and type, made if there is none yet. Lends what [`Attachments::get_or_make`] shares.
    ///
    /// # Errors
    /// That of `make`.
    pub(crate) fn get_or_attach<T: Any + Send + Sync>(
        &self,
        key: u64,
        make: impl FnOnce() -> Result<T>,
    ) -> Result<&T> {
        if let Ok(thing) = self.find(key) {
            return Ok(thing);
        }
        let _making = self.making.lock();
        match self.find(key) {
            Ok(thing) => Ok(thing),
            Err(end) => {
                let thing = Box::new(make()?);
                let attached = end.get_or_init(|| {
                    Box::new(Attachment {
                        key,
                        thing,
                        next: OnceLock::new(),
                    })
                });
                match attached.thing.downcast_ref() {
                    Some(thing) => Ok(thing),
                    None => unreachable!("only the holder of the lock attaches"),
                }
            }
        }
    }

    /// The thing of that key and type, or where the next one is attached.
    fn find<T: Any>(&self, key: u64) -> std::result::Result<&T, &OnceLock<Box<Attachment>>> {
        let mut place = &self.first;
        while let Some(attached) = place.get() {
            if attached.key == key
                && let Some(thing) = attached.thing.downcast_ref()
            {
                return Ok(thing);
            }
            place = &attached.next;
        }
        Err(place)
    }
}

impl fmt::Debug for Attachments {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Attachments").finish_non_exhaustive()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::{Error, StateKind};

    #[test]
    fn each_key_and_type_has_one_thing_and_a_failure_leaves_none() {
        let attachments = Attachments::default();
        let refused = Error::state(StateKind::Unexpected, "make", "");
        let failed = attachments.get_or_make::<u32>(1, || Err(refused.clone()));
        assert_eq!(failed.unwrap_err(), refused);
        let first = attachments.get_or_make(1, || Ok(7_u32)).unwrap();
        let again = attachments.get_or_make(1, || Ok(8_u32)).unwrap();
        assert!(Arc::ptr_eq(&first, &again) && *first == 7);
        assert_eq!(*attachments.get_or_make(2, || Ok(9_u32)).unwrap(), 9);
        assert_eq!(*attachments.get_or_make(1, || Ok(10_u64)).unwrap(), 10);
    }
}
