//! Faults on purpose: calls that fail, work that fails, threads that are late.
//!
//! `DOORBELL_CUDA_STANDIN_FAULTS` holds rules separated by `;`, each `NAME:WHAT[,nth=N][,ppm=P]`. NAME is the exported name of a
//! function (`cuMemAlloc_v2`), `*` for all of them but those that name errors, or `task` for what a stream's thread does. WHAT is the number of the error, which
//! for a task the context keeps; or `delay=US`: microseconds that the thread sleeps first. `nth=N` is the N-th such call
//! from now and that alone; `ppm=P` is P of a million, drawn from `DOORBELL_CUDA_STANDIN_SEED`; without either it is every one.

use std::cell::RefCell;
use std::ffi::{CStr, c_char};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock};
use std::time::Duration;

use crate::call::{CUresult, CudaResult};
use crate::names;
use crate::settings::settings;

#[derive(Clone, Copy)]
enum FaultAction {
    Fail(CUresult),
    Delay(Duration),
}

struct FaultRule {
    name: String,
    action: FaultAction,
    /// Calls until it is its turn.
    nth: Option<u64>,
    ppm: u64,
}

struct PlannedFaults {
    rules: Vec<FaultRule>,
    random: u64,
}

thread_local! {
    /// Rules for calls of this thread only. They draw from a random sequence of their own.
    static THREAD_FAULTS: RefCell<PlannedFaults> = const { RefCell::new(PlannedFaults { rules: Vec::new(), random: 1 }) };
}

/// Whether there are rules at all: without any, a call does not take the lock.
static ANY: AtomicBool = AtomicBool::new(false);

fn faults() -> MutexGuard<'static, PlannedFaults> {
    static FAULTS: OnceLock<Mutex<PlannedFaults>> = OnceLock::new();
    FAULTS
        .get_or_init(|| {
            Mutex::new(PlannedFaults {
                rules: Vec::new(),
                random: settings().seed.max(1),
            })
        })
        .lock()
        .unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// The rules of the environment, once. One that cannot be read ends the program, as `settings` has it.
pub fn start() {
    static STARTED: OnceLock<()> = OnceLock::new();
    STARTED.get_or_init(|| {
        for rule in settings().faults.split(';').filter(|rule| !rule.is_empty()) {
            let parsed = parse(rule)
                .unwrap_or_else(|| panic!("DOORBELL_CUDA_STANDIN_FAULTS: {rule:?} is no rule"));
            add(parsed);
        }
    });
}

fn add(rule: FaultRule) {
    faults().rules.push(rule);
    ANY.store(true, Ordering::Release);
}

fn parse(text: &str) -> Option<FaultRule> {
    let (name, rest) = text.split_once(':')?;
    let mut words = rest.split(',');
    let action = words.next()?;
    let action = match action.strip_prefix("delay=") {
        Some(us) => FaultAction::Delay(Duration::from_micros(us.parse().ok()?)),
        None => FaultAction::Fail(names::result(action.parse().ok()?)?),
    };
    let mut rule = FaultRule {
        name: name.to_owned(),
        action,
        nth: None,
        ppm: 1_000_000,
    };
    for word in words {
        match word.split_once('=')? {
            ("nth", n) => rule.nth = Some(n.parse().ok()?),
            ("ppm", n) => rule.ppm = n.parse().ok()?,
            _ => return None,
        }
    }
    Some(rule)
}

/// The action of the rule that applies to this event, if any.
fn drawn(name: &str, wants_delay: bool) -> Option<FaultAction> {
    // A thread that is ending calls without rules of its own.
    let of_thread =
        THREAD_FAULTS.try_with(|faults| drawn_of(&mut faults.borrow_mut(), name, wants_delay));
    if !ANY.load(Ordering::Acquire) {
        return of_thread.ok().flatten();
    }
    drawn_of(&mut faults(), name, wants_delay).or(of_thread.ok().flatten())
}

/// The same of one list. Every rule that fits counts it.
fn drawn_of(faults: &mut PlannedFaults, name: &str, wants_delay: bool) -> Option<FaultAction> {
    let mut found = None;
    for rule in &mut faults.rules {
        let fits = rule.name == name
            || (rule.name == "*" && name != "task" && !name.starts_with("cuGetError"));
        if !fits || matches!(rule.action, FaultAction::Delay(_)) != wants_delay {
            continue;
        }
        let hit = match &mut rule.nth {
            Some(0) => false,
            Some(left) => {
                *left -= 1;
                *left == 0
            }
            None => {
                // xorshift64: any sequence does that a seed repeats.
                faults.random ^= faults.random << 13;
                faults.random ^= faults.random >> 7;
                faults.random ^= faults.random << 17;
                faults.random % 1_000_000 < rule.ppm
            }
        };
        if hit {
            found = found.or(Some(rule.action));
        }
    }
    found
}

fn failure(name: &str) -> CudaResult {
    match drawn(name, false) {
        Some(FaultAction::Fail(error)) => Err(error),
        _ => Ok(()),
    }
}

pub fn of_call(name: &str) -> CudaResult {
    delay(name);
    failure(name)
}

pub fn of_task() -> CudaResult {
    failure("task")
}

pub fn delay_task() {
    delay("task");
}

fn delay(name: &str) {
    if let Some(FaultAction::Delay(time)) = drawn(name, true) {
        std::thread::sleep(time);
    }
}

/// Adds a rule, written as in the environment; null takes all of them away. 0, or CUDA_ERROR_INVALID_VALUE for what is no rule.
#[unsafe(no_mangle)]
pub extern "C" fn doorbell_cuda_standin_fault(rule: *const c_char) -> CUresult {
    take(rule, || faults().rules.clear(), add)
}

/// The same for calls of the calling thread, and of no other one.
#[unsafe(no_mangle)]
pub extern "C" fn doorbell_cuda_standin_fault_here(rule: *const c_char) -> CUresult {
    THREAD_FAULTS.with_borrow_mut(|faults| {
        let rules = RefCell::new(&mut faults.rules);
        take(
            rule,
            || rules.borrow_mut().clear(),
            |rule| rules.borrow_mut().push(rule),
        )
    })
}

fn take(rule: *const c_char, clear: impl FnOnce(), add: impl FnOnce(FaultRule)) -> CUresult {
    if rule.is_null() {
        clear();
        return CUresult::CUDA_SUCCESS;
    }
    // SAFETY: the caller gave a string.
    let text = unsafe { CStr::from_ptr(rule) };
    match text.to_str().ok().and_then(parse) {
        Some(rule) => {
            add(rule);
            CUresult::CUDA_SUCCESS
        }
        None => CUresult::CUDA_ERROR_INVALID_VALUE,
    }
}
