//! Functions that open files and directories.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::os::fd::IntoRawFd;

use softcx::doors::{DeviceNode, Local};

use crate::calls::{fail, next};
use crate::paths::{PathClass, as_path, lead};
use crate::state;

/// # Safety
/// As `openat`.
unsafe fn open_at(directory: c_int, path: *const c_char, flags: c_int, mode: c_int) -> c_int {
    // SAFETY: as the caller's.
    match &unsafe { lead(directory, path) } {
        PathClass::Node(node) => open_node(*node, flags),
        PathClass::File(file) => match Local::flags_for_file(as_path(file), flags) {
            // SAFETY: a terminated path.
            Ok(flags) => unsafe { raw(libc::AT_FDCWD, file.as_ptr(), flags, 0) },
            Err(errno) => fail(errno),
        },
        // SAFETY: as the caller's.
        PathClass::Elsewhere => unsafe { raw(directory, path, flags, mode) },
    }
}

/// # Safety
/// As `openat`.
unsafe fn raw(directory: c_int, path: *const c_char, flags: c_int, mode: c_int) -> c_int {
    // SAFETY: as the caller's. By number: the function is the one here.
    unsafe { libc::syscall(libc::SYS_openat, directory, path, flags, mode) as c_int }
}

fn open_node(node: DeviceNode, flags: c_int) -> c_int {
    if let Err(errno) = Local::check_open(flags) {
        return fail(errno);
    }
    let open = |local: &Local| match node {
        DeviceNode::Verbs => local.open(),
        DeviceNode::ConnectionManager => local.open_connections(flags),
    };
    let descriptor = match state::start().map(open) {
        Some(Ok(descriptor)) => descriptor.into_raw_fd(),
        Some(Err(error)) => return fail(error.raw_os_error().unwrap_or(libc::EIO)),
        None => return fail(libc::ENODEV),
    };
    if flags & libc::O_CLOEXEC == 0 {
        // SAFETY: opened a moment ago. It was made so that a program that another thread executes does not get it before.
        unsafe { libc::fcntl(descriptor, libc::F_SETFD, 0) };
    }
    descriptor
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

/// The flags of the open that a mode of `fopen` stands for.
fn flags_of(mode: &[u8]) -> c_int {
    let has = |letter| mode.contains(&letter);
    let access = match (has(b'+'), mode.first()) {
        (true, _) => libc::O_RDWR,
        (false, Some(b'r')) => libc::O_RDONLY,
        _ => libc::O_WRONLY,
    };
    let made = match mode.first() {
        Some(b'w') => libc::O_CREAT | libc::O_TRUNC,
        Some(b'a') => libc::O_CREAT,
        _ => 0,
    };
    let asked = |letter, flag| if has(letter) { flag } else { 0 };
    access | made | asked(b'x', libc::O_EXCL) | asked(b'e', libc::O_CLOEXEC)
}

macro_rules! streams {
    ($($name:ident = $symbol:literal),*) => {$(
        /// As the C library's.
        ///
        /// # Safety
        /// As the C library's.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(path: *const c_char, mode: *const c_char) -> *mut c_void {
            type OpenStream = unsafe extern "C" fn(*const c_char, *const c_char) -> *mut c_void;
            // SAFETY: the type of the function of this name; the arguments are the caller's, or a terminated path.
            unsafe {
                let real: OpenStream = next!($symbol, OpenStream, std::ptr::null_mut());
                let flags = || flags_of(CStr::from_ptr(mode).to_bytes());
                match &lead(libc::AT_FDCWD, path) {
                    PathClass::Node(DeviceNode::Verbs) => {
                        stream_of(open_node(DeviceNode::Verbs, flags()), mode)
                    }
                    // The end of a pipe, which can only be read.
                    PathClass::Node(node) => {
                        stream_of(open_node(*node, flags()), c"r".as_ptr())
                    }
                    PathClass::File(file) => match Local::flags_for_file(as_path(file), flags()) {
                        Ok(_) => real(file.as_ptr(), mode),
                        Err(errno) => {
                            fail(errno);
                            std::ptr::null_mut()
                        }
                    },
                    PathClass::Elsewhere => real(path, mode),
                }
            }
        }
    )*};
}
streams!(fopen = c"fopen", fopen64 = c"fopen64");

/// A stream over a descriptor that was opened for it, or over none.
///
/// # Safety
/// `mode` is that of an `fopen`.
unsafe fn stream_of(descriptor: c_int, mode: *const c_char) -> *mut c_void {
    if descriptor < 0 {
        return std::ptr::null_mut();
    }
    // SAFETY: the caller's word.
    let stream = unsafe { libc::fdopen(descriptor, mode) };
    if stream.is_null() {
        // SAFETY: no other code has it.
        unsafe { libc::close(descriptor) };
    }
    stream.cast()
}

/// As the C library's.
///
/// # Safety
/// As the C library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn opendir(path: *const c_char) -> *mut c_void {
    type OpenDirectory = unsafe extern "C" fn(*const c_char) -> *mut c_void;
    // SAFETY: the type of the function of this name; the arguments are the caller's, or a terminated path.
    unsafe {
        let real: OpenDirectory = next!(c"opendir", OpenDirectory, std::ptr::null_mut());
        match &lead(libc::AT_FDCWD, path) {
            PathClass::Node(_) => {
                fail(libc::ENOTDIR);
                std::ptr::null_mut()
            }
            PathClass::File(file) => real(file.as_ptr()),
            PathClass::Elsewhere => real(path),
        }
    }
}

macro_rules! scans {
    ($($name:ident = $symbol:literal),*) => {$(
        /// As the C library's, which does not come by its own `opendir`.
        ///
        /// # Safety
        /// As the C library's.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(path: *const c_char, to: *mut c_void, filter: *mut c_void, order: *mut c_void) -> c_int {
            type ScanDirectory = unsafe extern "C" fn(*const c_char, *mut c_void, *mut c_void, *mut c_void) -> c_int;
            // SAFETY: the type of the function of this name; the arguments are the caller's, or a terminated path.
            unsafe {
                let real: ScanDirectory = next!($symbol, ScanDirectory, -1);
                match &lead(libc::AT_FDCWD, path) {
                    PathClass::Node(_) => fail(libc::ENOTDIR),
                    PathClass::File(file) => real(file.as_ptr(), to, filter, order),
                    PathClass::Elsewhere => real(path, to, filter, order),
                }
            }
        }
    )*};
}
scans!(scandir = c"scandir", scandir64 = c"scandir64");
