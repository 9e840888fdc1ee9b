//! Progress inside the program's own polls: while a program polls for completions, the device works in that thread, and no other
//! need be scheduled for it.
//!
//! `ibv_poll_cq` is an inline function that calls through the context, so the pointer in the context is changed after
//! `ibv_open_device`. libmlx5's own function still does the polling.

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};

use crate::calls::fail;
use crate::state;

/// Where `struct ibv_context` has `ops.poll_cq`, and its descriptor. Part of the interface of libibverbs.so.1 since it began.
const POLL_CQ: usize = 96;
const CMD_FD: usize = 264;

type OpenDevice = unsafe extern "C" fn(*mut c_void) -> *mut c_void;
type PollCq = unsafe extern "C" fn(*mut c_void, c_int, *mut c_void) -> c_int;

/// The provider's function. All contexts of ours have the same one; a context that had another would be left as it is.
static POLL: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());

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
    // SAFETY: two fields of the structure, which are aligned.
    let (descriptor, slot) = unsafe {
        (
            context.add(CMD_FD).cast::<c_int>().read(),
            context.add(POLL_CQ).cast::<*mut c_void>(),
        )
    };
    if !state::started().is_some_and(|local| local.is_of(descriptor)) {
        return;
    }
    // SAFETY: a field of the structure.
    let own = unsafe { slot.read() };
    let known = POLL.compare_exchange(
        std::ptr::null_mut(),
        own,
        Ordering::AcqRel,
        Ordering::Acquire,
    );
    if known.is_ok() || known == Err(own) {
        // SAFETY: as above; nobody else knows of the context yet.
        unsafe { slot.write(poll_cq as *mut c_void) };
    }
}

/// # Safety
/// As `ibv_poll_cq`.
unsafe extern "C" fn poll_cq(cq: *mut c_void, entries: c_int, to: *mut c_void) -> c_int {
    // SAFETY: stored before this function was put anywhere, and of this type.
    let real = unsafe { std::mem::transmute::<*mut c_void, PollCq>(POLL.load(Ordering::Relaxed)) };
    // SAFETY: as the caller's.
    let mut found = unsafe { real(cq, entries, to) };
    let Some(local) = state::started() else {
        return found;
    };
    if found == 0 {
        if !local.progress() {
            return 0;
        }
        // SAFETY: as the caller's.
        found = unsafe { real(cq, entries, to) };
    }
    if found != 0 {
        local.found();
    }
    found
}
