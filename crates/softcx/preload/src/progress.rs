//! Progress in calls of UCX.
//!
//! UCX's transports `rc_mlx5` and `ud_mlx5` post and poll in memory and call no function of libibverbs. But a program over UCX calls `ucp_worker_progress` while it waits, and so do
//! MPI libraries. The device works in there as it does in `ibv_poll_cq`.
//!
//! A process can have several libraries with these functions, because wheels bring their own. Then a call is passed on to the one that its caller was linked with, so the functions
//! here take the address that they return to.

use std::ffi::{CStr, CString, c_int, c_uint, c_void};
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};

use crate::verbs;

type WorkerProgress = unsafe extern "C" fn(*mut c_void) -> c_uint;
type WorkerArm = unsafe extern "C" fn(*mut c_void) -> c_int;

/// What `ucp_worker_arm` returns if there is something to be done first (`UCS_ERR_BUSY`), and for a function that is not there (`UCS_ERR_NO_ELEM`).
const BUSY: c_int = -15;
const NO_ELEMENT: c_int = -12;

/// A function with the name of one of UCX. `$inner` has one argument more, the address that the call returns to.
macro_rules! with_return_address {
    ($(#[$attribute:meta])* $name:ident => $inner:ident -> $result:ty) => {
        $(#[$attribute])*
        #[unsafe(no_mangle)]
        #[unsafe(naked)]
        pub unsafe extern "C" fn $name(worker: *mut c_void) -> $result {
            #[cfg(target_arch = "x86_64")]
            core::arch::naked_asm!("endbr64", "mov rsi, [rsp]", "jmp {}", sym $inner);
            #[cfg(target_arch = "aarch64")]
            core::arch::naked_asm!("hint #34", "mov x1, x30", "b {}", sym $inner);
        }
    };
}

with_return_address! {
    /// As UCX's.
    ///
    /// # Safety
    /// As UCX's.
    ucp_worker_progress => progress -> c_uint
}
with_return_address! {
    /// As UCX's. `ucp_worker_wait` calls it, too.
    ///
    /// # Safety
    /// As UCX's.
    ucp_worker_arm => arm -> c_int
}

/// # Safety
/// As `ucp_worker_progress`.
unsafe extern "C" fn progress(worker: *mut c_void, caller: usize) -> c_uint {
    static BEHIND: Behind = Behind::new(c"ucp_worker_progress", ucp_worker_progress as *const ());
    let Some(real) = BEHIND.of(caller) else {
        return 0;
    };
    // SAFETY: a function of this name has this type; the argument is the caller's.
    let poll = || unsafe { std::mem::transmute::<*mut c_void, WorkerProgress>(real)(worker) };
    if !verbs::works_in_calls() {
        return poll();
    }
    verbs::poll_with(|| poll() as c_int, 0, |events| events != 0) as c_uint
}

/// # Safety
/// As `ucp_worker_arm`.
unsafe extern "C" fn arm(worker: *mut c_void, caller: usize) -> c_int {
    static BEHIND: Behind = Behind::new(c"ucp_worker_arm", ucp_worker_arm as *const ());
    let Some(real) = BEHIND.of(caller) else {
        return NO_ELEMENT;
    };
    // SAFETY: a function of this name has this type; the argument is the caller's.
    let done = unsafe { std::mem::transmute::<*mut c_void, WorkerArm>(real)(worker) };
    if done != BUSY && verbs::works_in_calls() {
        verbs::armed();
    }
    done
}

/// How many places of calls are remembered: MPI libraries have the call in dozens of places.
const PLACES: usize = 256;
/// Where a place can be, from the one that its address gives. If all of them are taken, the function is looked up each time.
const PROBES: usize = 16;
/// A place that is being filled in.
const RESERVED: usize = 1;

/// The functions of a name, by the places where they are called.
struct Behind {
    name: &'static CStr,
    ours: *const (),
    places: [CallPlace; PLACES],
}

struct CallPlace {
    /// 0: free.
    caller: AtomicUsize,
    function: AtomicPtr<c_void>,
}

// SAFETY: `ours` is the address of a function.
unsafe impl Sync for Behind {}

impl Behind {
    const fn new(name: &'static CStr, ours: *const ()) -> Behind {
        Behind {
            name,
            ours,
            places: [const {
                CallPlace {
                    caller: AtomicUsize::new(0),
                    function: AtomicPtr::new(std::ptr::null_mut()),
                }
            }; PLACES],
        }
    }

    fn of(&self, caller: usize) -> Option<*mut c_void> {
        let probes = || (0..PROBES).map(|probe| &self.places[(caller / 4 + probe) % PLACES]);
        for place in probes() {
            match place.caller.load(Ordering::Acquire) {
                0 => break,
                known if known == caller => return Some(place.function.load(Ordering::Relaxed)),
                _ => {}
            }
        }
        let function = self.look_up(caller)?;
        // Two threads may remember the same place twice.
        let reserve = |place: &&CallPlace| {
            let (order, free) = (Ordering::Relaxed, 0);
            (place.caller.compare_exchange(free, RESERVED, order, order)).is_ok()
        };
        if let Some(place) = probes().find(reserve) {
            place.function.store(function, Ordering::Relaxed);
            place.caller.store(caller, Ordering::Release);
        }
        Some(function)
    }

    /// The function that the caller would have called without this library.
    fn look_up(&self, caller: usize) -> Option<*mut c_void> {
        let objects = loaded_objects();
        let mut all: Vec<(&CStr, *mut c_void)> = Vec::new();
        for object in &objects {
            if let Some(function) = self.in_object(object)
                && !all.iter().any(|(_, known)| *known == function)
            {
                all.push((object, function));
            }
        }
        if all.len() < 2 {
            return all.first().map(|(_, function)| *function);
        }
        let caller = object_of(caller as *const c_void);
        if let Some(function) = caller.and_then(|caller| self.in_object(caller)) {
            return Some(function);
        }
        // SAFETY: a terminated name.
        let next = unsafe { libc::dlsym(libc::RTLD_NEXT, self.name.as_ptr()) };
        if next.is_null() {
            let of = |(_, at): &(_, *mut c_void)| object_of(*at).map(|it| it.to_string_lossy());
            eprintln!(
                "doorbell softcx: a call of {} from {}, which is linked with none of several libraries that have it ({}); --door seccomp does without",
                self.name.to_string_lossy(),
                caller.unwrap_or_default().to_string_lossy(),
                all.iter().filter_map(of).collect::<Vec<_>>().join(", "),
            );
            std::process::abort();
        }
        Some(next)
    }

    /// The function in a loaded object or in one that it was linked with. An executable has no result.
    fn in_object(&self, object: &CStr) -> Option<*mut c_void> {
        // SAFETY: a terminated name. The handle is closed again; the object stays, because it is one that calls, or that other code has loaded.
        let found = unsafe {
            let handle = libc::dlopen(object.as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD);
            if handle.is_null() {
                return None;
            }
            let found = libc::dlsym(handle, self.name.as_ptr());
            libc::dlclose(handle);
            found
        };
        (!found.is_null() && found.cast_const().cast() != self.ours).then_some(found)
    }
}

/// The names of the loaded objects but for the executable.
fn loaded_objects() -> Vec<CString> {
    unsafe extern "C" fn add(object: *mut libc::dl_phdr_info, _: usize, to: *mut c_void) -> c_int {
        // SAFETY: the loader gives an object, whose name is terminated or null; `to` is what the call below gave.
        unsafe {
            let name = (*object).dlpi_name;
            if !name.is_null() && name.read() != 0 {
                (*to.cast::<Vec<CString>>()).push(CStr::from_ptr(name).to_owned());
            }
        }
        0
    }
    let mut objects = Vec::new();
    // SAFETY: the function takes what is given here.
    unsafe { libc::dl_iterate_phdr(Some(add), (&raw mut objects).cast()) };
    objects
}

/// The name of the object that has this address.
fn object_of<'a>(at: *const c_void) -> Option<&'a CStr> {
    let mut object = MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: any address will do, there is room for the result, and zeros are a result. The name lives as long as the object, whose code calls or is called.
    unsafe {
        libc::dladdr(at, object.as_mut_ptr());
        let name = object.assume_init().dli_fname;
        (!name.is_null()).then(|| CStr::from_ptr(name))
    }
}
