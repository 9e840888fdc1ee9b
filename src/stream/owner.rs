//! What programs belong to: the memory behind their targets.
#![allow(unsafe_code)] // declares an unsafe trait; there is no unsafe block in here

use std::ptr::NonNull;

use crate::peer::{TargetId, Targets};

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
pub unsafe trait Owner: Send + Sync {
    /// The table that the programs of this owner address.
    fn targets(&self) -> &Targets;

    /// Where the memory of a target starts in this process. None when it has none here; a program that needs it is then discarded
    /// before its first op.
    fn base(&self, target: TargetId) -> Option<NonNull<u8>>;

    /// Called at each turn of a wait. It lets a NIC without silicon of its own move on from inside the loop that waits for it.
    /// True: it did something, so more may happen soon.
    fn progress(&self) -> bool {
        false
    }

    /// Called when stores of a program have been executed: at its end, and before each of its waits.
    fn rung(&self) {}

    /// The executor begins the program submitted with `cookie`. Not called for one that is discarded unseen.
    fn started(&self, cookie: u64) {
        let _ = cookie;
    }

    /// The executor is done with the program submitted with `cookie`. Called exactly once for each program that was accepted.
    fn finished(&self, cookie: u64, outcome: Outcome) {
        let _ = (cookie, outcome);
    }

    /// Asked at each turn of a wait of the program submitted with `cookie`. True: stop waiting and go on with the next op.
    fn released(&self, cookie: u64) -> bool {
        let _ = cookie;
        false
    }
}
