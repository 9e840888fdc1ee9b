//! The device of this process: made when it is first looked for, and made anew in a forked child.

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, Ordering};

use softcx::device::{DeviceOptions, Faults, Function, LinkLayer, WireKind};
use softcx::doors::Local;

static LOCAL: AtomicPtr<Local> = AtomicPtr::new(std::ptr::null_mut());
/// The process that `LOCAL` is of.
static OWNER: AtomicI32 = AtomicI32::new(0);
/// The thread that is creating it, or 0.
static STARTING: AtomicI32 = AtomicI32::new(0);
/// It cannot be had.
static REFUSED: AtomicBool = AtomicBool::new(false);

/// The device, if there is one in this process already.
#[inline]
pub fn started() -> Option<&'static Local> {
    // SAFETY: null or leaked, and never changed.
    unsafe { LOCAL.load(Ordering::Acquire).as_ref() }
}

/// The device, made now if need be. `None` when it cannot be had; why has been said then.
pub fn start() -> Option<&'static Local> {
    // SAFETY: takes nothing and cannot fail.
    let (process, thread) = unsafe { (libc::getpid(), libc::gettid()) };
    if OWNER.load(Ordering::Acquire) != process {
        forget();
        OWNER.store(process, Ordering::Release);
    }
    loop {
        if let Some(local) = started() {
            return Some(local);
        }
        if REFUSED.load(Ordering::Acquire) {
            return None;
        }
        match STARTING.compare_exchange(0, thread, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => break,
            // It looks at what the kernel has in these folders.
            Err(starting) if starting == thread => return None,
            Err(_) => {}
        }
        // Another thread is at it. It takes a millisecond, once; a lock here would be one that a fork may leave locked.
        // SAFETY: takes nothing.
        unsafe { libc::sched_yield() };
    }
    if started().is_none() {
        match Local::start(&options()) {
            Ok(local) => {
                LOCAL.store(std::ptr::from_ref(local).cast_mut(), Ordering::Release);
                register();
            }
            Err(error) => {
                eprintln!("doorbell softcx: no device: {error}");
                REFUSED.store(true, Ordering::Release);
            }
        }
    }
    STARTING.store(0, Ordering::Release);
    started()
}

/// In a forked child: what the parent made is not ours, and is left as it is.
extern "C" fn forget() {
    LOCAL.store(std::ptr::null_mut(), Ordering::Release);
    STARTING.store(0, Ordering::Release);
    REFUSED.store(false, Ordering::Release);
}

extern "C" fn clear_away() {
    // A child that ends must not take its parent's files with it: its `LOCAL` is empty, unless it was made by a bare system call.
    // SAFETY: takes nothing and cannot fail.
    let owner = OWNER.load(Ordering::Acquire) == unsafe { libc::getpid() };
    if let Some(local) = started().filter(|_| owner) {
        local.clear_away();
    }
}

/// Run when the program has run what it wanted to run at its end: that may still use the device.
// SAFETY: the section is a list of functions of this type.
#[used]
#[unsafe(link_section = ".fini_array")]
static LAST: extern "C" fn() = clear_away;

fn register() {
    static ONCE: AtomicBool = AtomicBool::new(false);
    if !ONCE.swap(true, Ordering::AcqRel) {
        // SAFETY: a function that lives as long as the library, which is never unloaded.
        unsafe { libc::pthread_atfork(None, None, Some(forget)) };
    }
}

/// An option in the environment.
pub fn option(name: &str) -> Option<OsString> {
    std::env::var_os(format!("DOORBELL_SOFTCX_{name}"))
}

/// What `doorbell softcx run` put into the environment. What makes no sense there is taken as absent: it has checked it.
fn options() -> DeviceOptions {
    let text = |name| option(name).and_then(|value| value.into_string().ok());
    let fault = text("FAULT").unwrap_or_default();
    let mut faults = Faults {
        loss: text("LOSS")
            .and_then(|loss| loss.parse().ok())
            .unwrap_or(0.0),
        ..Faults::default()
    };
    let delay_us = text("DELAY_US").and_then(|delay| delay.parse::<u64>().ok());
    faults.delay_ns = delay_us.unwrap_or(0).saturating_mul(1000);
    for fault in fault.split(',').filter(|fault| !fault.is_empty()) {
        let _ = faults.set(fault);
    }
    let mut function = Function::default();
    for word in text("FUNCTION").unwrap_or_default().split(',') {
        let _ = function.set(word);
    }
    let mut options = DeviceOptions::default();
    options.fabric = text("FABRIC").unwrap_or_else(|| "default".into());
    options.link = match text("LINK").as_deref() {
        Some("eth") => LinkLayer::Ethernet,
        _ => LinkLayer::InfiniBand,
    };
    if let Some(Ok(wire)) = text("WIRE").map(|wire| WireKind::parse(&wire)) {
        options.wire = wire;
    }
    options.function = function;
    options.faults = faults;
    options.trace = option("TRACE").map(PathBuf::from);
    options.pcap = option("PCAP").map(PathBuf::from);
    options
}
