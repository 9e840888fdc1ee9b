//! The interpreter: programs executed by the calling thread.
#![allow(unsafe_code)] // loads and stores at the addresses that owners give

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use doorbell_wire::mmio;

use super::{Backoff, Outcome, Owner};
use crate::bytecode::{At, Fence, Program, ProgramOp, Role, UNIT_LIMIT};

/// Executes `program` on the memory of `owner`, in the calling thread, until it is done. Waits end when their condition holds or
/// when the owner releases `cookie`.
///
/// It calls the owner's `base`, `progress`, `released` and `rung`; the caller calls `started` and `finished`, because it knows the
/// outcome.
///
/// A store is one relaxed atomic store of its width, a block copy is 64-bit ones in ascending order, a wait loads with acquire order.
/// What orders them towards the NIC are the program's fences: one with [`Fence::WRITE`] stands between a doorbell and a later store that
/// tells of it (builds with debug assertions panic without). What was stored last is flushed when the program ends.
///
/// The result is [`Outcome::Discarded`], and nothing is executed, when the program addresses another table than the owner's, or
/// when the owner has no memory for one of the targets or not at the alignment that the access needs.
pub fn execute(program: &Program, owner: &dyn Owner, cookie: u64) -> Outcome {
    // Without a look nothing is left for later.
    run(program, owner, cookie, || false, &mut BlockingWaits).unwrap_or(Outcome::Discarded)
}

/// What a program does at a wait whose condition does not hold.
pub(super) trait ProgramWaits {
    /// The thread waits until it holds.
    const BLOCKS: bool;

    /// Where the program goes on, if it was left at a wait: the number of the op, and whether a wait before it was released.
    fn resumes_at(&self) -> (usize, bool);

    /// The program is left at that op.
    fn leave_at(&mut self, op: usize, is_released: bool);

    /// The device did something at the wait.
    fn progressed(&mut self);
}

/// The thread waits, with back-off.
pub(super) struct BlockingWaits;

impl ProgramWaits for BlockingWaits {
    const BLOCKS: bool = true;

    fn resumes_at(&self) -> (usize, bool) {
        (0, false)
    }

    fn leave_at(&mut self, _: usize, _: bool) {}

    fn progressed(&mut self) {}
}

/// A program that is executed by looks, each of which leaves it at a wait whose condition does not hold.
#[derive(Debug, Default)]
pub(super) struct ProgramPosition {
    op: usize,
    is_released: bool,
    /// The device has done something since this was last taken.
    pub(super) has_progressed: bool,
}

impl ProgramWaits for ProgramPosition {
    const BLOCKS: bool = false;

    fn resumes_at(&self) -> (usize, bool) {
        (self.op, self.is_released)
    }

    fn leave_at(&mut self, op: usize, is_released: bool) {
        self.op = op;
        self.is_released = is_released;
    }

    fn progressed(&mut self) {
        self.has_progressed = true;
    }
}

/// As [`execute`]; `interrupted` is asked at each turn of a wait, and ends the program where it is. `None`: it was left at a wait.
pub(super) fn run<W: ProgramWaits>(
    program: &Program,
    owner: &dyn Owner,
    cookie: u64,
    interrupted: impl Fn() -> bool,
    waits: &mut W,
) -> Option<Outcome> {
    let Some(addresses) = resolve(program, owner) else {
        return Some(Outcome::Discarded);
    };
    let (first, is_released) = waits.resumes_at();
    let mut outcome = if is_released {
        Outcome::Released
    } else {
        Outcome::Done
    };
    let mut stored = false;
    // A doorbell may still be in a write-combining buffer.
    let mut buffered = false;
    for (index, (op, &address)) in program.ops().zip(&addresses).enumerate().skip(first) {
        let is_register = writes_to(&op) == Some(Role::Uar);
        debug_assert!(
            !buffered || is_register || writes_to(&op).is_none(),
            "a store behind a doorbell without a fence: a thread that sees it may ring the next doorbell before this one"
        );
        buffered |= is_register;
        match op {
            ProgramOp::StoreDword { value, .. } => {
                store_dword(address, value);
                stored = true;
            }
            ProgramOp::StoreQword { at, value } => {
                store_qword(address, at.role, value);
                stored = true;
            }
            ProgramOp::CopyBlock { at, bytes } => {
                copy_block(address, at.role, bytes);
                stored = true;
            }
            ProgramOp::Fence(bits) => {
                order(bits);
                buffered &= !bits.contains(Fence::WRITE);
            }
            ProgramOp::PollGeq { value, .. }
            | ProgramOp::PollAnd { value, .. }
            | ProgramOp::PollNor { value, .. } => {
                buffered = false;
                if std::mem::take(&mut stored) {
                    // What was stored may be what makes the condition come true.
                    mmio::flush();
                    rung::<W>(owner);
                }
                let condition = condition(&op);
                match wait(
                    address,
                    |word| condition(word, value),
                    owner,
                    cookie,
                    &interrupted,
                    waits,
                ) {
                    WaitState::Held => {}
                    WaitState::Released => outcome = Outcome::Released,
                    WaitState::Interrupted => return Some(Outcome::Discarded),
                    WaitState::Left => {
                        waits.leave_at(index, outcome == Outcome::Released);
                        return None;
                    }
                }
            }
        }
    }
    if stored {
        mmio::flush();
        rung::<W>(owner);
    }
    Some(outcome)
}

#[inline]
fn rung<W: ProgramWaits>(owner: &dyn Owner) {
    if W::BLOCKS {
        owner.rung();
    } else {
        owner.rung_in_look();
    }
}

/// What an op stores to, if it does.
fn writes_to(op: &ProgramOp<'_>) -> Option<Role> {
    match op {
        ProgramOp::StoreDword { at, .. }
        | ProgramOp::StoreQword { at, .. }
        | ProgramOp::CopyBlock { at, .. } => Some(at.role),
        _ => None,
    }
}

/// The address of each op of a program, in order; null for a fence. Good for the access that its op makes.
type Addresses = [*mut u8; UNIT_LIMIT];

/// Looks all addresses up before the first op is executed, so that a program is executed wholly or not at all.
fn resolve(program: &Program, owner: &dyn Owner) -> Option<Addresses> {
    if program.targets_id() != owner.targets().id() {
        return None;
    }
    let mut addresses = [std::ptr::null_mut(); UNIT_LIMIT];
    for (op, address) in program.ops().zip(&mut addresses) {
        let (at, align) = match op {
            ProgramOp::StoreDword { at, .. }
            | ProgramOp::PollGeq { at, .. }
            | ProgramOp::PollAnd { at, .. }
            | ProgramOp::PollNor { at, .. } => (at, 4),
            ProgramOp::StoreQword { at, .. } | ProgramOp::CopyBlock { at, .. } => (at, 8),
            ProgramOp::Fence(_) => continue,
        };
        *address = locate(at, owner)?;
        if !address.addr().is_multiple_of(align) {
            return None;
        }
    }
    Some(addresses)
}

fn locate(at: At, owner: &dyn Owner) -> Option<*mut u8> {
    let base = owner.base(at.target)?;
    let offset = usize::try_from(at.offset).ok()?;
    // SAFETY: the program is of the owner's table, and addresses of that table were checked against the length of their target
    // when they were made; the owner guarantees that many bytes behind `base`.
    Some(unsafe { base.as_ptr().add(offset) })
}

fn store_dword(address: *mut u8, value: u32) {
    // SAFETY: `resolve` made the address for this op: aligned, inside its target, and alive as long as the owner, whom the caller
    // holds. Others access the word atomically, or not from this process: the contract of `Owner`.
    unsafe { AtomicU32::from_ptr(address.cast()) }.store(value, Ordering::Relaxed);
}

fn store_qword(address: *mut u8, role: Role, value: u64) {
    if role == Role::Uar {
        // SAFETY: as in `store_dword`; `run` flushes before it returns, while the owner is held.
        unsafe { mmio::store(address.cast(), value) };
        return;
    }
    // SAFETY: as in `store_dword`.
    unsafe { AtomicU64::from_ptr(address.cast()) }.store(value, Ordering::Relaxed);
}

fn copy_block(address: *mut u8, role: Role, bytes: &[u8]) {
    let (words, rest) = bytes.as_chunks::<8>();
    debug_assert!(rest.is_empty(), "blocks are whole words");
    for (index, word) in words.iter().enumerate() {
        // `wrapping_add` needs no promise; the address is in bounds, because the block as a whole is.
        store_qword(
            address.wrapping_add(index * 8),
            role,
            u64::from_ne_bytes(*word),
        );
    }
}

/// A fence of the program, as the strongest of what its bits ask for.
fn order(bits: Fence) {
    if bits.contains(Fence::WRITE) {
        // The stores before it, such as the doorbell record or the UAR, before the stores after it, such as the UAR or a flag. The other
        // sides are the NIC, which reads the record by DMA after it saw the UAR's store, and the thread that sees the flag and rings next.
        mmio::flush();
    }
    if bits.contains(Fence::READ) {
        // The loads before it, such as a poll of a CQE, before what follows, such as reads of the data that the CQE announced. The
        // other side is the NIC, which writes the data before the CQE.
        mmio::from_device();
    }
    if bits.contains(Fence::PEER) || bits.contains(Fence::READ | Fence::WRITE) {
        fence(Ordering::SeqCst);
    }
}

/// The condition of a poll, of the word in memory and the op's value. CUDA's definitions (`CUstreamWaitValue_flags`).
fn condition(op: &ProgramOp<'_>) -> fn(u32, u32) -> bool {
    match op {
        ProgramOp::PollGeq { .. } => |word, value| word.wrapping_sub(value).cast_signed() >= 0,
        ProgramOp::PollAnd { .. } => |word, value| word & value != 0,
        _ => |word, value| !(word | value) != 0,
    }
}

enum WaitState {
    Held,
    Released,
    Interrupted,
    /// For a later look.
    Left,
}

/// Turns of a look at a wait while the device has something to do.
const TURNS_OF_LOOK: u32 = 4;

fn wait<W: ProgramWaits>(
    address: *mut u8,
    holds: impl Fn(u32) -> bool,
    owner: &dyn Owner,
    cookie: u64,
    interrupted: impl Fn() -> bool,
    waits: &mut W,
) -> WaitState {
    // SAFETY: as in `store_dword`.
    let word = unsafe { AtomicU32::from_ptr(address.cast()) };
    let mut backoff = Backoff::new();
    let mut turns = 0;
    loop {
        // Acquire: what was written before the word, the data of a CQE for one, is seen by everything that follows in the stream.
        if holds(word.load(Ordering::Acquire)) {
            mmio::from_device();
            return WaitState::Held;
        }
        if interrupted() {
            return WaitState::Interrupted;
        }
        if owner.released(cookie) {
            return WaitState::Released;
        }
        if W::BLOCKS {
            if owner.progress() {
                backoff.reset();
            } else {
                backoff.pause();
            }
            continue;
        }
        let has_progressed = owner.progress_in_look();
        if !has_progressed || turns == TURNS_OF_LOOK {
            return WaitState::Left;
        }
        waits.progressed();
        turns += 1;
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::bytecode::{Role, Target, TargetId, Targets};
    use std::ptr::NonNull;
    use std::sync::Mutex;
    use std::sync::atomic::AtomicBool;
    use std::time::Duration;

    /// 64 words of memory, as two targets of 128 bytes, and one more target that has none.
    struct TestWords {
        targets: Targets,
        memory: Box<[AtomicU64; 32]>,
        parts: [Target; 3],
        shift_bytes: usize,
        calls: Mutex<Vec<&'static str>>,
        release: AtomicBool,
    }

    impl TestWords {
        fn new() -> Self {
            let mut targets = Targets::new();
            let parts = ["a", "b", "absent"].map(|name| targets.register(name, Role::Memory, 128));
            Self {
                targets,
                memory: Box::new([const { AtomicU64::new(0) }; 32]),
                parts,
                shift_bytes: 0,
                calls: Mutex::default(),
                release: AtomicBool::new(false),
            }
        }

        fn qword(&self, index: usize) -> u64 {
            self.memory[index].load(Ordering::Relaxed)
        }
    }

    // SAFETY: the table never changes, and `base` gives 128 bytes of the boxed array for the first two targets, less what a test
    // shifts them by, which it then only uses to see that nothing is accessed.
    unsafe impl Owner for TestWords {
        fn targets(&self) -> &Targets {
            &self.targets
        }

        fn base(&self, target: TargetId) -> Option<NonNull<u8>> {
            let first = match target.index() {
                // The fourth is the page of a test, in the place of the first.
                0 | 3 => 0,
                1 => 16,
                _ => return None,
            };
            NonNull::new(
                self.memory[first]
                    .as_ptr()
                    .cast::<u8>()
                    .wrapping_add(self.shift_bytes),
            )
        }

        fn progress(&self) -> bool {
            self.calls.lock().unwrap().push("progress");
            // The NIC of this test answers a store of 1 to the first word with a 1 in the second target.
            let asked = self.memory[0].load(Ordering::Relaxed) == 1;
            self.memory[16].store(u64::from(asked), Ordering::Release);
            asked
        }

        fn rung(&self) {
            self.calls.lock().unwrap().push("rung");
        }

        fn released(&self, cookie: u64) -> bool {
            cookie == 7 && self.release.load(Ordering::Relaxed)
        }
    }

    #[test]
    #[cfg(debug_assertions)]
    #[should_panic(expected = "without a fence")]
    fn a_flag_behind_a_doorbell_needs_a_fence() {
        let mut words = TestWords::new();
        let page = words.targets.register("page", Role::Uar, 128);
        let mut program = Program::new(&words.targets);
        program.store_qword(page.qword(0).unwrap(), 1).unwrap();
        let flag = words.parts[1].dword(0).unwrap();
        program.store_dword(flag, 1).unwrap();
        let _ = execute(&program, &words, 0);
    }

    #[test]
    fn stores_are_as_wide_as_they_say_and_stay_in_place() {
        let words = TestWords::new();
        let mut program = Program::new(&words.targets);
        program
            .store_dword(words.parts[0].dword(4).unwrap(), 0x1122_3344)
            .unwrap();
        program.fence(Fence::RECORD_BEFORE_UAR).unwrap();
        program
            .store_qword(words.parts[1].qword(120).unwrap(), u64::MAX - 1)
            .unwrap();
        let block: Vec<u8> = (1..=24).collect();
        program
            .copy_block(words.parts[1].block(8, 24).unwrap(), &block)
            .unwrap();
        assert_eq!(execute(&program, &words, 0), Outcome::Done);
        let written: Vec<_> = (0..32)
            .map(|index| (index, words.qword(index)))
            .filter(|word| word.1 != 0)
            .collect();
        assert_eq!(
            written,
            [
                (0, 0x1122_3344 << 32),
                (17, 0x0807_0605_0403_0201),
                (18, 0x100f_0e0d_0c0b_0a09),
                (19, 0x1817_1615_1413_1211),
                (31, u64::MAX - 1),
            ]
        );
        assert_eq!(*words.calls.lock().unwrap(), ["rung"]);
    }

    #[test]
    fn conditions_at_their_edges() {
        let targets = TestWords::new();
        let at = targets.parts[0].dword(0).unwrap();
        let holds = |build: fn(&mut Program, crate::bytecode::Dword, u32) -> crate::Result<()>,
                     word: u32,
                     value: u32| {
            let mut program = Program::new(&targets.targets);
            build(&mut program, at, value).unwrap();
            let op = program.ops().next().unwrap();
            condition(&op)(word, value)
        };
        let geq = |word, value| holds(Program::poll_geq, word, value);
        assert!(geq(5, 5) && geq(6, 5) && !geq(4, 5));
        assert!(geq(0, u32::MAX), "counts on over the wrap");
        assert!(!geq(u32::MAX, 0));
        assert!(
            geq(0x7fff_ffff, 0) && !geq(0x8000_0000, 0),
            "half the circle is ahead"
        );
        assert!(geq(0x8000_0004, 5) && !geq(0x8000_0005, 5));
        assert!(!geq(0xd0 << 24, 0), "an error CQE's op_own is negative");
        let and = |word, value| holds(Program::poll_and, word, value);
        assert!(and(0x0100_0000, 1 << 24) && and(u32::MAX, 1) && !and(0xfeff_ffff, 1 << 24));
        assert!(!and(u32::MAX, 0) && !and(0, u32::MAX));
        let nor = |word, value| holds(Program::poll_nor, word, value);
        assert!(nor(0xfeff_ffff, !(1 << 24)) && !nor(0x0100_0000, !(1 << 24)));
        assert!(nor(0, 0) && nor(u32::MAX - 1, 0) && !nor(u32::MAX, 0) && !nor(0, u32::MAX));
    }

    #[test]
    fn a_wait_reports_its_stores_before_it_lets_the_nic_progress() {
        let words = TestWords::new();
        let mut program = Program::new(&words.targets);
        program
            .store_dword(words.parts[0].dword(0).unwrap(), 1)
            .unwrap();
        program
            .poll_geq(words.parts[1].dword(0).unwrap(), 1)
            .unwrap();
        program
            .store_dword(words.parts[0].dword(8).unwrap(), 5)
            .unwrap();
        assert_eq!(execute(&program, &words, 0), Outcome::Done);
        assert_eq!(words.qword(1), 5);
        assert_eq!(*words.calls.lock().unwrap(), ["rung", "progress", "rung"]);
    }

    #[test]
    fn a_condition_that_holds_calls_no_owner() {
        let words = TestWords::new();
        let mut program = Program::new(&words.targets);
        program
            .poll_nor(words.parts[0].dword(0).unwrap(), 0)
            .unwrap();
        words.release.store(true, Ordering::Relaxed);
        assert_eq!(execute(&program, &words, 7), Outcome::Done);
        assert!(words.calls.lock().unwrap().is_empty());
    }

    #[test]
    fn a_released_wait_goes_on_and_an_interrupted_one_does_not() {
        let words = TestWords::new();
        let mut program = Program::new(&words.targets);
        program
            .poll_and(words.parts[1].dword(64).unwrap(), 1)
            .unwrap();
        program
            .store_dword(words.parts[0].dword(8).unwrap(), 5)
            .unwrap();
        let turns = std::cell::Cell::new(0);
        let interrupted = || turns.replace(turns.get() + 1) == 3;
        let ended = run(&program, &words, 7, interrupted, &mut BlockingWaits);
        assert_eq!(ended, Some(Outcome::Discarded));
        assert_eq!(words.qword(1), 0);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(2));
                words.release.store(true, Ordering::Relaxed);
            });
            assert_eq!(execute(&program, &words, 7), Outcome::Released);
        });
        assert_eq!(words.qword(1), 5);
    }

    #[test]
    fn what_cannot_run_wholly_does_not_run_at_all() {
        let mut words = TestWords::new();
        let store = |words: &TestWords| {
            let mut program = Program::new(&words.targets);
            program
                .store_dword(words.parts[0].dword(0).unwrap(), 1)
                .unwrap();
            program
        };
        let mut absent = store(&words);
        absent
            .store_dword(words.parts[2].dword(0).unwrap(), 1)
            .unwrap();
        assert_eq!(execute(&absent, &words, 0), Outcome::Discarded);
        let foreign = store(&TestWords::new());
        assert_eq!(execute(&foreign, &words, 0), Outcome::Discarded);
        // A base that is good for dwords is not good for qwords.
        words.shift_bytes = 4;
        let mut crooked = store(&words);
        crooked
            .store_qword(words.parts[0].qword(0).unwrap(), 1)
            .unwrap();
        assert_eq!(execute(&crooked, &words, 0), Outcome::Discarded);
        assert!((0..32).all(|index| words.qword(index) == 0));
        assert!(words.calls.lock().unwrap().is_empty());
        assert_eq!(execute(&store(&words), &words, 0), Outcome::Done);
        assert_eq!(words.qword(0), 1 << 32);
    }

    #[test]
    fn a_full_program_runs_to_its_last_unit() {
        let words = TestWords::new();
        let mut program = Program::new(&words.targets);
        for index in 0..UNIT_LIMIT as u64 {
            program
                .store_qword(words.parts[0].qword(index * 8).unwrap(), index + 1)
                .unwrap();
        }
        assert_eq!(execute(&program, &words, 0), Outcome::Done);
        assert!((0..UNIT_LIMIT).all(|index| words.qword(index) == index as u64 + 1));
    }

    #[test]
    fn another_thread_sees_stores_in_the_order_of_the_fence() {
        const ROUNDS: u32 = 20_000;
        let words = TestWords::new();
        let record = words.parts[0].dword(0).unwrap();
        let uar = words.parts[1].qword(0).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut backoff = Backoff::new();
                let mut seen = 0;
                while seen < u64::from(ROUNDS) {
                    let rung = words.memory[16].load(Ordering::Acquire);
                    // SAFETY: the first word of the boxed array, which outlives the scope; all access to it is atomic.
                    let count = unsafe { AtomicU32::from_ptr(words.memory[0].as_ptr().cast()) }
                        .load(Ordering::Relaxed);
                    assert!(
                        u64::from(count) >= rung,
                        "doorbell {rung} overtook record {count}"
                    );
                    if rung == seen {
                        backoff.pause();
                    } else {
                        backoff.reset();
                    }
                    seen = rung;
                }
            });
            let mut program = Program::new(&words.targets);
            for round in 1..=ROUNDS {
                program.clear();
                program.store_dword(record, round).unwrap();
                program.fence(Fence::RECORD_BEFORE_UAR).unwrap();
                program.store_qword(uar, u64::from(round)).unwrap();
                assert_eq!(execute(&program, &words, 0), Outcome::Done);
            }
        });
    }
}
