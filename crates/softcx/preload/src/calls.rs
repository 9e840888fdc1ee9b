//! Calls by descriptor, and the way to the functions behind those of this library.

use std::ffi::{CStr, c_char, c_int, c_ulong, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};

use crate::state;

/// `RDMA_VERBS_IOCTL`, the only one that a verbs device has.
const RDMA_VERBS_IOCTL: u32 = 0xc018_1b01;
const NETLINK_RDMA: c_int = 20;
const PROC_SELF_FD: &str = "/proc/self/fd/";
/// What the kernel shows for the descriptors of the device, after a fork also where there is no device.
const MEMFD: &[u8] = b"/memfd:uverbs0";

/// Fails a call.
pub fn fail(errno: c_int) -> c_int {
    // SAFETY: the calling thread's own.
    unsafe { *libc::__errno_location() = errno };
    -1
}

/// The function of this name in the libraries behind this one; found once.
pub fn find(name: &CStr, found: &AtomicPtr<c_void>) -> Option<*mut c_void> {
    let mut at = found.load(Ordering::Acquire);
    if at.is_null() {
        // SAFETY: a terminated name.
        at = unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) };
        found.store(at, Ordering::Release);
    }
    (!at.is_null()).then_some(at)
}

/// The next function with this name and type in the search order of the loader. If there is none, the caller returns `$failed`.
macro_rules! next {
    ($name:expr, $type:ty, $failed:expr) => {{
        static FOUND: std::sync::atomic::AtomicPtr<std::ffi::c_void> =
            std::sync::atomic::AtomicPtr::new(std::ptr::null_mut());
        match $crate::calls::find($name, &FOUND) {
            Some(found) => std::mem::transmute::<*mut std::ffi::c_void, $type>(found),
            None => {
                $crate::calls::fail(libc::ENOSYS);
                return $failed;
            }
        }
    }};
}
pub(crate) use next;

/// As the C library's.
///
/// # Safety
/// As the C library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ioctl(
    descriptor: c_int,
    request: c_ulong,
    argument: *mut c_void,
) -> c_int {
    if request as u32 == RDMA_VERBS_IOCTL {
        let served = state::started()
            .and_then(|local| local.ioctl(descriptor, argument.expose_provenance() as u64));
        match served {
            Some(Ok(())) => return 0,
            Some(Err(errno)) => return fail(errno),
            None if is_inherited(descriptor) => return fail(libc::EIO),
            None => {}
        }
    }
    // SAFETY: as the caller's. By number: the function is this one.
    unsafe { libc::syscall(libc::SYS_ioctl, descriptor, request, argument) as c_int }
}

/// Whether it is a descriptor of a device that was left behind in a fork.
fn is_inherited(descriptor: c_int) -> bool {
    let mut target = [0u8; 64];
    let path = format!("{PROC_SELF_FD}{descriptor}\0");
    // SAFETY: a terminated path, and a buffer with its length.
    let len = unsafe {
        libc::syscall(
            libc::SYS_readlinkat,
            libc::AT_FDCWD,
            path.as_ptr().cast::<c_char>(),
            target.as_mut_ptr(),
            target.len(),
        )
    };
    let target = target.get(..len.max(0) as usize).unwrap_or_default();
    target.starts_with(MEMFD)
}

/// As the C library's.
///
/// # Safety
/// As the C library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn socket(family: c_int, kind: c_int, protocol: c_int) -> c_int {
    // libibverbs asks the kernel by netlink which devices there are, and turns to sysfs where it cannot.
    if family == libc::AF_NETLINK && protocol == NETLINK_RDMA {
        return fail(libc::EPROTONOSUPPORT);
    }
    // SAFETY: takes numbers only.
    unsafe { libc::syscall(libc::SYS_socket, family, kind, protocol) as c_int }
}

/// As the C library's.
///
/// # Safety
/// As the C library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn write(descriptor: c_int, from: *const c_void, len: usize) -> isize {
    let served = state::started()
        .and_then(|local| local.write(descriptor, from.expose_provenance() as u64, len));
    match served {
        Some(Ok(written)) => written as isize,
        Some(Err(errno)) => fail(errno) as isize,
        // SAFETY: as the caller's. By number: the function is this one.
        None => unsafe { libc::syscall(libc::SYS_write, descriptor, from, len) as isize },
    }
}
