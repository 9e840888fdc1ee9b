//! Functions that take paths.

use std::ffi::{CStr, CString, OsStr, c_char, c_int, c_void};
use std::os::fd::IntoRawFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;

use doorbell::softcx::Redirect;

use crate::calls::{fail, next};
use crate::state;

/// Where a path leads.
pub enum Lead {
    /// To the device's node.
    Node,
    /// To a file of the private sysfs tree.
    File(CString),
    /// Where it says; also any path that is relative.
    Elsewhere,
}

/// Looks at a path. The device is made if it is about RDMA devices.
///
/// # Safety
/// `path` is null or a terminated string.
pub unsafe fn lead(path: *const c_char) -> Lead {
    if path.is_null() {
        return Lead::Elsewhere;
    }
    // SAFETY: terminated, by the caller's word.
    let path = unsafe { CStr::from_ptr(path) }.to_bytes();
    if !path.starts_with(b"/sys/class/infiniband") && path != b"/dev/infiniband/uverbs0" {
        return Lead::Elsewhere;
    }
    let Some(local) = state::start() else {
        return Lead::Elsewhere;
    };
    match local.redirect(Path::new(OsStr::from_bytes(path))) {
        Redirect::Node => Lead::Node,
        Redirect::File(file) => {
            CString::new(file.into_os_string().into_vec()).map_or(Lead::Elsewhere, Lead::File)
        }
        Redirect::Elsewhere => Lead::Elsewhere,
    }
}

/// # Safety
/// As `openat`.
unsafe fn open_at(directory: c_int, path: *const c_char, flags: c_int, mode: c_int) -> c_int {
    // SAFETY: as the caller's.
    let (directory, path) = match &unsafe { lead(path) } {
        Lead::Node => return open_node(),
        Lead::File(file) => {
            let file = file.as_ptr();
            // SAFETY: a terminated path.
            return unsafe { libc::syscall(libc::SYS_openat, libc::AT_FDCWD, file, flags, mode) }
                as c_int;
        }
        Lead::Elsewhere => (directory, path),
    };
    // SAFETY: as the caller's. By number: the function is this one.
    unsafe { libc::syscall(libc::SYS_openat, directory, path, flags, mode) as c_int }
}

fn open_node() -> c_int {
    match state::start().map(doorbell::softcx::Local::open) {
        Some(Ok(descriptor)) => descriptor.into_raw_fd(),
        Some(Err(error)) => fail(error.raw_os_error().unwrap_or(libc::EIO)),
        None => fail(libc::ENODEV),
    }
}

macro_rules! opens {
    ($($name:ident),*) => {$(
        /// As the C library's.
        ///
        /// # Safety
        /// As the C library's.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(path: *const c_char, flags: c_int, mode: c_int) -> c_int {
            // SAFETY: as the caller's.
            unsafe { open_at(libc::AT_FDCWD, path, flags, mode) }
        }
    )*};
}
opens!(open, open64);

macro_rules! opens_at {
    ($($name:ident),*) => {$(
        /// As the C library's.
        ///
        /// # Safety
        /// As the C library's.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(directory: c_int, path: *const c_char, flags: c_int, mode: c_int) -> c_int {
            // SAFETY: as the caller's.
            unsafe { open_at(directory, path, flags, mode) }
        }
    )*};
}
opens_at!(openat, openat64);

/// What `_FORTIFY_SOURCE` makes of opens without a mode.
macro_rules! checked_opens {
    ($($name:ident),*) => {$(
        /// As the C library's.
        ///
        /// # Safety
        /// As the C library's.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(path: *const c_char, flags: c_int) -> c_int {
            // SAFETY: as the caller's.
            unsafe { open_at(libc::AT_FDCWD, path, flags, 0) }
        }
    )*};
}
checked_opens!(__open_2, __open64_2);

macro_rules! checked_opens_at {
    ($($name:ident),*) => {$(
        /// As the C library's.
        ///
        /// # Safety
        /// As the C library's.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(directory: c_int, path: *const c_char, flags: c_int) -> c_int {
            // SAFETY: as the caller's.
            unsafe { open_at(directory, path, flags, 0) }
        }
    )*};
}
checked_opens_at!(__openat_2, __openat64_2);

macro_rules! streams {
    ($($name:ident = $symbol:literal),*) => {$(
        /// As the C library's.
        ///
        /// # Safety
        /// As the C library's.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(path: *const c_char, mode: *const c_char) -> *mut c_void {
            type Function = unsafe extern "C" fn(*const c_char, *const c_char) -> *mut c_void;
            // SAFETY: the type of the function of this name; the arguments are the caller's, or a terminated path.
            unsafe {
                let real: Function = next!($symbol, Function, std::ptr::null_mut());
                match &lead(path) {
                    Lead::File(file) => real(file.as_ptr(), mode),
                    _ => real(path, mode),
                }
            }
        }
    )*};
}
streams!(fopen = c"fopen", fopen64 = c"fopen64");

/// As the C library's.
///
/// # Safety
/// As the C library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn opendir(path: *const c_char) -> *mut c_void {
    type Function = unsafe extern "C" fn(*const c_char) -> *mut c_void;
    // SAFETY: as above.
    unsafe {
        let real: Function = next!(c"opendir", Function, std::ptr::null_mut());
        match &lead(path) {
            Lead::File(file) => real(file.as_ptr()),
            _ => real(path),
        }
    }
}

/// As the C library's.
///
/// # Safety
/// As the C library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn access(path: *const c_char, mode: c_int) -> c_int {
    // SAFETY: as the caller's.
    unsafe { faccessat(libc::AT_FDCWD, path, mode, 0) }
}

/// As the C library's.
///
/// # Safety
/// As the C library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn faccessat(
    directory: c_int,
    path: *const c_char,
    mode: c_int,
    flags: c_int,
) -> c_int {
    // SAFETY: as the caller's, or a terminated path. The older system call has no flags.
    unsafe {
        let call = |directory: c_int, path: *const c_char| match flags {
            0 => libc::syscall(libc::SYS_faccessat, directory, path, mode) as c_int,
            _ => libc::syscall(libc::SYS_faccessat2, directory, path, mode, flags) as c_int,
        };
        match &lead(path) {
            Lead::Node => 0,
            Lead::File(file) => call(libc::AT_FDCWD, file.as_ptr()),
            Lead::Elsewhere => call(directory, path),
        }
    }
}

/// As the C library's.
///
/// # Safety
/// As the C library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn readlink(path: *const c_char, to: *mut c_char, len: usize) -> isize {
    // SAFETY: as the caller's.
    unsafe { readlinkat(libc::AT_FDCWD, path, to, len) }
}

/// As the C library's.
///
/// # Safety
/// As the C library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn readlinkat(
    directory: c_int,
    path: *const c_char,
    to: *mut c_char,
    len: usize,
) -> isize {
    // SAFETY: as the caller's, or a terminated path.
    unsafe {
        let call = |directory: c_int, path: *const c_char| {
            libc::syscall(libc::SYS_readlinkat, directory, path, to, len) as isize
        };
        match &lead(path) {
            Lead::File(file) => call(libc::AT_FDCWD, file.as_ptr()),
            _ => call(directory, path),
        }
    }
}
