//! The owner of programs over words of its own.
#![allow(dead_code, unsafe_code)] // Reason: each test uses a part; `Owner` is an unsafe trait.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use doorbell::__private::{Outcome, Owner, Submission};
use doorbell::Result;
use doorbell_wire::bytecode::{Dword, Program, Role, Target, TargetId, Targets};

/// Sixteen words, and the outcomes of the programs.
pub struct Words {
    targets: Targets,
    target: Target,
    memory: [AtomicU32; 16],
    /// Whether the programs reach the words.
    pub mapped: AtomicBool,
    /// The program with that cookie does not wait on.
    pub released: AtomicU64,
    /// In `started`.
    pub panics: AtomicBool,
    pub outcomes: Mutex<Vec<(u64, Outcome)>>,
    pub started: AtomicU64,
}

// SAFETY: the table never changes, and `memory` lives as long as the owner and is accessed atomically only. The owner is always in
// an Arc, so the memory does not move.
unsafe impl Owner for Words {
    fn targets(&self) -> &Targets {
        &self.targets
    }

    fn base(&self, _: TargetId) -> Option<NonNull<u8>> {
        let base = NonNull::new(self.memory[0].as_ptr().cast());
        base.filter(|_| self.mapped.load(Ordering::Relaxed))
    }

    fn started(&self, _: u64) {
        self.started.fetch_add(1, Ordering::Relaxed);
        assert!(!self.panics.load(Ordering::Relaxed), "owner says no");
    }

    fn finished(&self, cookie: u64, outcome: Outcome) {
        self.outcomes.lock().unwrap().push((cookie, outcome));
    }

    fn released(&self, cookie: u64) -> bool {
        self.released.load(Ordering::Relaxed) == cookie
    }
}

impl Words {
    pub fn new() -> Arc<Self> {
        let mut targets = Targets::new();
        let target = targets.register("words", Role::Memory, 64);
        Arc::new(Self {
            targets,
            target,
            memory: [const { AtomicU32::new(0) }; 16],
            mapped: AtomicBool::new(true),
            released: AtomicU64::new(u64::MAX),
            panics: AtomicBool::new(false),
            outcomes: Mutex::default(),
            started: AtomicU64::new(0),
        })
    }

    pub fn dword(&self, index: u64) -> Dword {
        self.target.dword(index * 4).unwrap()
    }

    pub fn get(&self, index: usize) -> u32 {
        self.memory[index].load(Ordering::Acquire)
    }

    pub fn set(&self, index: usize, value: u32) {
        self.memory[index].store(value, Ordering::Release);
    }

    pub fn submission(
        self: &Arc<Self>,
        cookie: u64,
        build: impl FnOnce(&mut Program) -> Result<()>,
    ) -> Submission {
        let mut program = Program::new(&self.targets);
        build(&mut program).unwrap();
        let owner = Arc::clone(self) as Arc<dyn Owner>;
        Submission {
            program,
            owner,
            cookie,
        }
    }

    pub fn store(self: &Arc<Self>, cookie: u64, index: u64, value: u32) -> Submission {
        self.submission(cookie, |program| {
            program.store_dword(self.dword(index), value)
        })
    }

    /// Waits for word 0 to reach `value`, then stores it to word 1.
    pub fn wait(self: &Arc<Self>, cookie: u64, value: u32) -> Submission {
        self.submission(cookie, |program| {
            program.poll_geq(self.dword(0), value)?;
            program.store_dword(self.dword(1), value)
        })
    }

    pub fn outcomes(&self) -> Vec<(u64, Outcome)> {
        self.outcomes.lock().unwrap().clone()
    }
}
