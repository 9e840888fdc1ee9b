//! Progress inside the program's own calls: when it posts, and while it polls for completions, the device works in that thread, and
//! no other need be scheduled for it.
//!
//! `ibv_post_send`, `ibv_poll_cq` and their like are inline functions that call through the context, the queue pair or the CQ, so
//! the pointers there are changed when these are made. libmlx5's own functions still do the posting and the polling.
//!
//! A program that arms a CQ is about to sleep: from then on packets wake the device's thread again. A program that just stops polling
//! does not report it; that thread notices when it next wakes up by itself.

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, Ordering};

use crate::calls::fail;
use crate::state;

/// Where `struct ibv_context` has `ops.poll_cq`, `ops.req_notify_cq`, `ops.post_send` and its descriptor. Part of the interface of
/// libibverbs.so.1 since it began.
const POLL_CQ: usize = 96;
const REQ_NOTIFY_CQ: usize = 104;
const POST_SEND: usize = 208;
const CMD_FD: usize = 264;
/// Where the newer context that ends with that one has its size, `create_qp_ex`, and `create_cq_ex`, if it is that long.
const SIZE_BEFORE: usize = 8;
const CREATE_QP_EX_BEFORE: usize = 56;
const CREATE_CQ_EX_BEFORE: usize = 120;
const CONTEXT_BYTES: usize = 328;
/// Set in `abi_compat` if it is such a context (`__VERBS_ABI_IS_EXTENDED`).
const ABI_COMPAT: usize = 320;
/// Where `struct ibv_cq_ex` has `start_poll`, and `struct ibv_qp_ex` has `wr_complete`, which is null if the queue pair was made without.
const START_POLL: usize = 144;
const WR_COMPLETE: usize = 328;

type OpenDevice = unsafe extern "C" fn(*mut c_void) -> *mut c_void;
type PollCq = unsafe extern "C" fn(*mut c_void, c_int, *mut c_void) -> c_int;
type ReqNotifyCq = unsafe extern "C" fn(*mut c_void, c_int) -> c_int;
type PostSend = unsafe extern "C" fn(*mut c_void, *mut c_void, *mut c_void) -> c_int;
type CreateEx = unsafe extern "C" fn(*mut c_void, *mut c_void) -> *mut u8;
type StartPoll = unsafe extern "C" fn(*mut c_void, *mut c_void) -> c_int;
type WrComplete = unsafe extern "C" fn(*mut c_void) -> c_int;

/// The provider's functions. All contexts of ours have the same ones; a context that had others would be left as it is.
static POLL: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
static REQ_NOTIFY: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
static POST: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
static CREATE_CQ: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
static CREATE_QP: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
/// Whether calls of this process do work of the device: it has opened a context of ours, and nobody has forbidden it.
static IN_CALLS: AtomicBool = AtomicBool::new(false);

/// As libibverbs'.
///
/// # Safety
/// As libibverbs'.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_open_device(device: *mut c_void) -> *mut c_void {
    let Some(real) = real_open_device() else {
        fail(libc::ENOSYS);
        return std::ptr::null_mut();
    };
    // SAFETY: the caller's argument, and a context from libibverbs or null.
    unsafe {
        let context = real(device);
        if !context.is_null() {
            take_over(context.cast());
        }
        context
    }
}

/// Not the next one in the order of loading: libibverbs may have been loaded for a module alone (Python's are), where that
/// order does not lead.
fn real_open_device() -> Option<OpenDevice> {
    static FOUND: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
    let mut at = FOUND.load(Ordering::Acquire);
    if at.is_null() {
        // SAFETY: terminated names. The library is loaded already: its device list was the argument's source.
        at = unsafe {
            let library = libc::dlopen(c"libibverbs.so.1".as_ptr(), libc::RTLD_LAZY);
            if library.is_null() {
                return None;
            }
            libc::dlsym(library, c"ibv_open_device".as_ptr())
        };
        FOUND.store(at, Ordering::Release);
    }
    if at.is_null() {
        return None;
    }
    // SAFETY: the type of the function of this name.
    Some(unsafe { std::mem::transmute::<*mut c_void, OpenDevice>(at) })
}

/// # Safety
/// `context` is a `struct ibv_context`.
unsafe fn take_over(context: *mut u8) {
    // SAFETY: a field of the structure, which is aligned.
    let descriptor = unsafe { context.add(CMD_FD).cast::<c_int>().read() };
    let ours = state::started().is_some_and(|local| local.is_of(descriptor));
    if !ours || state::option("IN_CALLS").is_some_and(|value| value == "0") {
        return;
    }
    IN_CALLS.store(true, Ordering::Release);
    // SAFETY: fields of the structure; no other code has the context yet. The fields before it exist if its size says so.
    unsafe {
        replace(context.add(POLL_CQ), &POLL, poll_cq as *mut c_void);
        replace(
            context.add(REQ_NOTIFY_CQ),
            &REQ_NOTIFY,
            req_notify_cq as *mut c_void,
        );
        replace(context.add(POST_SEND), &POST, post_send as *mut c_void);
        let extended = context.add(ABI_COMPAT).cast::<usize>().read() == usize::MAX;
        let bytes = |before| context.sub(before).cast::<usize>().read();
        if extended && bytes(SIZE_BEFORE) >= CONTEXT_BYTES + CREATE_CQ_EX_BEFORE {
            let (cq, qp) = (CREATE_CQ_EX_BEFORE, CREATE_QP_EX_BEFORE);
            replace(context.sub(cq), &CREATE_CQ, create_cq_ex as *mut c_void);
            replace(context.sub(qp), &CREATE_QP, create_qp_ex as *mut c_void);
        }
    }
}

/// Puts a function into the place of the one that is there, if that is the same as in all others. Whether there is nothing more to do.
///
/// # Safety
/// `slot` is an aligned pointer to a function pointer, and no other thread accesses it.
unsafe fn replace(slot: *mut u8, known: &AtomicPtr<c_void>, by: *mut c_void) -> bool {
    let slot = slot.cast::<*mut c_void>();
    // SAFETY: the caller's promise.
    unsafe {
        let own = slot.read();
        if own.is_null() {
            return true;
        }
        let (order, null) = (Ordering::AcqRel, std::ptr::null_mut());
        let before = known.compare_exchange(null, own, order, Ordering::Acquire);
        let same = before.is_ok() || before == Err(own);
        if same {
            slot.write(by);
        }
        same
    }
}

/// # Safety
/// As `ibv_poll_cq`.
unsafe extern "C" fn poll_cq(cq: *mut c_void, entries: c_int, to: *mut c_void) -> c_int {
    // SAFETY: stored before this function was put anywhere, and of this type.
    let real = unsafe { std::mem::transmute::<*mut c_void, PollCq>(POLL.load(Ordering::Relaxed)) };
    // SAFETY: as the caller's.
    poll_with(|| unsafe { real(cq, entries, to) }, 0, |found| found > 0)
}

/// Polls, and if that gives `empty`, has the device work and polls again if there was something to do.
pub fn poll_with(
    mut poll: impl FnMut() -> c_int,
    empty: c_int,
    has_found: impl Fn(c_int) -> bool,
) -> c_int {
    let mut result = poll();
    if result == empty && polled_on() {
        result = poll();
    }
    if has_found(result) {
        stops_polling();
    }
    result
}

/// Whether calls of this process do work of the device.
pub fn works_in_calls() -> bool {
    IN_CALLS.load(Ordering::Acquire)
}

/// Empty polls behind an arming until the program counts as one that polls: one that sleeps makes a last poll, or a few.
const LAST_POLLS: u32 = 64;
static SLEEPS_AFTER: AtomicU32 = AtomicU32::new(0);

/// A poll found nothing. Whether the device has had something to do since.
fn polled_on() -> bool {
    let Some(local) = state::started() else {
        return false;
    };
    // A load and a store will do: it is a hint, of all threads together.
    match SLEEPS_AFTER.load(Ordering::Relaxed) {
        0 => local.poll(),
        left => {
            SLEEPS_AFTER.store(left - 1, Ordering::Relaxed);
            local.progress()
        }
    }
}

/// A poll found something. The program may look at its memory alone from here on: packets have to wake the device's thread until the
/// next empty poll.
fn stops_polling() {
    if let Some(local) = state::started() {
        local.stops_polling();
    }
}

/// Something was posted.
fn posted() {
    if let Some(local) = state::started() {
        local.progress();
    }
}

/// # Safety
/// As `ibv_req_notify_cq`.
unsafe extern "C" fn req_notify_cq(cq: *mut c_void, solicited_only: c_int) -> c_int {
    // SAFETY: as in `poll_cq`.
    let done = unsafe {
        let real =
            std::mem::transmute::<*mut c_void, ReqNotifyCq>(REQ_NOTIFY.load(Ordering::Relaxed));
        real(cq, solicited_only)
    };
    // Behind the arming, so that what comes from here on raises the event.
    armed();
    done
}

/// The program has armed a CQ, and is about to sleep.
pub fn armed() {
    if let Some(local) = state::started() {
        SLEEPS_AFTER.store(LAST_POLLS, Ordering::Relaxed);
        local.stops_polling();
    }
}

/// # Safety
/// As `ibv_post_send`.
unsafe extern "C" fn post_send(qp: *mut c_void, list: *mut c_void, bad: *mut c_void) -> c_int {
    // SAFETY: as in `poll_cq`.
    let done = unsafe {
        let real = std::mem::transmute::<*mut c_void, PostSend>(POST.load(Ordering::Relaxed));
        real(qp, list, bad)
    };
    posted();
    done
}

/// # Safety
/// As `ibv_create_cq_ex`, of which it is the provider's part.
unsafe extern "C" fn create_cq_ex(context: *mut c_void, attributes: *mut c_void) -> *mut u8 {
    // SAFETY: as in `poll_cq`; what it makes has the field, and no other code has it yet.
    unsafe {
        let real = std::mem::transmute::<*mut c_void, CreateEx>(CREATE_CQ.load(Ordering::Relaxed));
        let cq = real(context, attributes);
        if !cq.is_null() {
            start_poll::put_before(cq.add(START_POLL));
        }
        cq
    }
}

/// # Safety
/// As `ibv_create_qp_ex`, of which it is the provider's part.
unsafe extern "C" fn create_qp_ex(context: *mut c_void, attributes: *mut c_void) -> *mut u8 {
    // SAFETY: as in `create_cq_ex`: libmlx5 makes every queue pair as long as an extended one, with zeros.
    unsafe {
        let real = std::mem::transmute::<*mut c_void, CreateEx>(CREATE_QP.load(Ordering::Relaxed));
        let qp = real(context, attributes);
        if !qp.is_null() {
            wr_complete::put_before(qp.add(WR_COMPLETE));
        }
        qp
    }
}

/// Functions before those of a kind of which libmlx5 has several: `$ours` gets the one that it stands before.
macro_rules! before_each {
    ($module:ident: $type:ty = $ours:ident, $($kind:literal)*) => {
        mod $module {
            use super::*;

            static REAL: [AtomicPtr<c_void>; OURS.len()] =
                [const { AtomicPtr::new(std::ptr::null_mut()) }; OURS.len()];
            const OURS: &[$type] = &[$($ours::<$kind>),*];

            /// # Safety
            /// Called by what stands before a function of that type.
            pub(super) unsafe fn real(kind: usize) -> $type {
                // SAFETY: stored before that was put anywhere.
                unsafe { std::mem::transmute(REAL[kind].load(Ordering::Relaxed)) }
            }

            /// # Safety
            /// `slot` is a pointer of that type, and no other thread has it yet.
            pub(super) unsafe fn put_before(slot: *mut u8) {
                for (real, ours) in REAL.iter().zip(OURS) {
                    // SAFETY: the caller's promise.
                    if unsafe { replace(slot, real, *ours as *mut c_void) } {
                        return;
                    }
                }
            }
        }
    };
}
before_each!(start_poll: StartPoll = start,
    0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31);
before_each!(wr_complete: WrComplete = complete, 0 1 2 3);

/// # Safety
/// As `ibv_start_poll`.
unsafe extern "C" fn start<const KIND: usize>(cq: *mut c_void, attributes: *mut c_void) -> c_int {
    // SAFETY: the arguments are the caller's.
    let poll = || unsafe { start_poll::real(KIND)(cq, attributes) };
    poll_with(poll, libc::ENOENT, |result| result == 0)
}

/// # Safety
/// As `ibv_wr_complete`.
unsafe extern "C" fn complete<const KIND: usize>(qp: *mut c_void) -> c_int {
    // SAFETY: the argument is the caller's.
    let done = unsafe { wr_complete::real(KIND)(qp) };
    posted();
    done
}
