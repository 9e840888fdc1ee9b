//! Queueing programs, small kernels and events on a host stream allocates no memory, as a counting allocator shows.
#![allow(unsafe_code)] // an allocator that counts, and an `Owner` over a word of its own
#![cfg(not(loom))]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use doorbell::__private::{Outcome, Owner, Submission};
use doorbell::{Event, Executor, HostStream};
use doorbell_wire::bytecode::{Program, Role, TargetId, Targets};

thread_local! {
    static HERE: Cell<u64> = const { Cell::new(0) };
}
static EVERYWHERE: AtomicU64 = AtomicU64::new(0);

struct Counting;

// SAFETY: all work is the system allocator's, and the counters allocate nothing: both are constants without a destructor.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        HERE.set(HERE.get() + 1);
        EVERYWHERE.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promise, passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise, passed on.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

struct Word {
    targets: Targets,
    word: AtomicU64,
    done: AtomicU64,
}

// SAFETY: one target of 8 bytes, which are the word; the owner is in an Arc, so it does not move.
unsafe impl Owner for Word {
    fn targets(&self) -> &Targets {
        &self.targets
    }

    fn base(&self, _: TargetId) -> Option<NonNull<u8>> {
        NonNull::new(self.word.as_ptr().cast())
    }

    fn finished(&self, _: u64, outcome: Outcome) {
        assert_eq!(outcome, Outcome::Done);
        self.done.fetch_add(1, Ordering::Relaxed);
    }
}

#[test]
fn submit_and_execute_allocate_nothing() {
    const ROUNDS: u64 = 3000;
    const REPEATS: u64 = 5;
    let mut targets = Targets::new();
    let target = targets.register("word", Role::Memory, 8);
    let owner = Arc::new(Word {
        targets,
        word: AtomicU64::new(0),
        done: AtomicU64::new(0),
    });
    let stream = HostStream::with_capacity("quiet", 64).unwrap();
    let other = HostStream::with_capacity("other", 64).unwrap();
    let event = Event::new();
    let mut batch = Vec::with_capacity(2);
    let mut one_round = |round: u64| {
        let mut program = Program::new(&owner.targets);
        program
            .store_qword(target.qword(0).unwrap(), round)
            .unwrap();
        program
            .poll_geq(target.dword(0).unwrap(), round as u32)
            .unwrap();
        let submission = Submission {
            program,
            owner: owner.clone(),
            cookie: round,
        };
        batch.extend([submission.clone(), submission.clone()]);
        stream
            .submit_one(submission)
            .map_err(|(_, error)| error)
            .unwrap();
        stream.submit(&mut batch).unwrap();
        let kernel = owner.clone();
        stream
            .launch(move || assert_eq!(kernel.word.load(Ordering::Relaxed), round))
            .unwrap();
        stream.record(&event).unwrap();
        other.wait_event(&event).unwrap();
    };
    one_round(0);
    let mut round = 0;
    let mut allocated = || {
        let (here, everywhere) = (HERE.get(), EVERYWHERE.load(Ordering::Relaxed));
        assert!(here > 0, "the allocator counts");
        for _ in 0..ROUNDS {
            round += 1;
            one_round(round);
        }
        stream.synchronize(None).unwrap();
        other.synchronize(None).unwrap();
        let everywhere = EVERYWHERE.load(Ordering::Relaxed) - everywhere;
        (HERE.get() - here, everywhere)
    };
    // The first sleep of a thread allocates its handle, and the harness records the start of the test, whenever these threads are scheduled. So one
    // repetition without allocations is enough.
    let counts: Vec<_> = (0..REPEATS).map(|_| allocated()).collect();
    assert!(
        counts.contains(&(0, 0)),
        "allocations by the caller and by all, in {ROUNDS} rounds each: {counts:?}"
    );
    let rounds = REPEATS * ROUNDS;
    assert_eq!(owner.done.load(Ordering::Relaxed), 3 * (rounds + 1));
    assert_eq!(owner.word.load(Ordering::Relaxed), rounds);
}
