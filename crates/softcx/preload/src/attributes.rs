//! The `stat` family, in the forms that the C library has now and those that it had before 2.33.

use std::ffi::{c_char, c_int, c_uint};

use softcx::doors::Local;

use crate::paths::{PathClass, lead};
use crate::state;

/// # Safety
/// As `fstatat`.
unsafe fn stat_at(
    directory: c_int,
    path: *const c_char,
    to: *mut libc::stat,
    flags: c_int,
) -> c_int {
    // SAFETY: as the caller's, or a terminated path.
    unsafe {
        match &lead(directory, path) {
            PathClass::Node(node) => {
                to.write(Local::node_attributes(*node));
                0
            }
            PathClass::File(file) => raw(libc::AT_FDCWD, file.as_ptr(), to, flags),
            PathClass::Elsewhere => {
                let done = raw(directory, path, to, flags);
                if done == 0
                    && flags & libc::AT_EMPTY_PATH != 0
                    && let Some(local) = state::started()
                {
                    local.rewrite_stat(&mut *to);
                }
                done
            }
        }
    }
}

/// # Safety
/// As `fstatat`.
unsafe fn raw(directory: c_int, path: *const c_char, to: *mut libc::stat, flags: c_int) -> c_int {
    // SAFETY: as the caller's. By number: the function is the one here.
    unsafe { libc::syscall(libc::SYS_newfstatat, directory, path, to, flags) as c_int }
}

macro_rules! by_path {
    ($($name:ident: $flags:expr),*) => {$(
        /// As the C library's.
        ///
        /// # Safety
        /// As the C library's.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(path: *const c_char, to: *mut libc::stat) -> c_int {
            // SAFETY: as the caller's.
            unsafe { stat_at(libc::AT_FDCWD, path, to, $flags) }
        }
    )*};
}
by_path!(stat: 0, stat64: 0, lstat: libc::AT_SYMLINK_NOFOLLOW, lstat64: libc::AT_SYMLINK_NOFOLLOW);

macro_rules! by_path_with_version {
    ($($name:ident: $flags:expr),*) => {$(
        /// As the C library's.
        ///
        /// # Safety
        /// As the C library's.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(_version: c_int, path: *const c_char, to: *mut libc::stat) -> c_int {
            // SAFETY: as the caller's.
            unsafe { stat_at(libc::AT_FDCWD, path, to, $flags) }
        }
    )*};
}
by_path_with_version!(
    __xstat: 0, __xstat64: 0, __lxstat: libc::AT_SYMLINK_NOFOLLOW, __lxstat64: libc::AT_SYMLINK_NOFOLLOW
);

macro_rules! by_descriptor {
    ($($name:ident),*) => {$(
        /// As the C library's.
        ///
        /// # Safety
        /// As the C library's.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(descriptor: c_int, to: *mut libc::stat) -> c_int {
            // SAFETY: as the caller's; the path is a terminated one.
            unsafe { stat_at(descriptor, c"".as_ptr(), to, libc::AT_EMPTY_PATH) }
        }
    )*};
}
by_descriptor!(fstat, fstat64);

macro_rules! by_descriptor_with_version {
    ($($name:ident),*) => {$(
        /// As the C library's.
        ///
        /// # Safety
        /// As the C library's.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(_version: c_int, descriptor: c_int, to: *mut libc::stat) -> c_int {
            // SAFETY: as the caller's; the path is a terminated one.
            unsafe { stat_at(descriptor, c"".as_ptr(), to, libc::AT_EMPTY_PATH) }
        }
    )*};
}
by_descriptor_with_version!(__fxstat, __fxstat64);

macro_rules! at_a_directory {
    ($($name:ident),*) => {$(
        /// As the C library's.
        ///
        /// # Safety
        /// As the C library's.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(directory: c_int, path: *const c_char, to: *mut libc::stat, flags: c_int) -> c_int {
            // SAFETY: as the caller's.
            unsafe { stat_at(directory, path, to, flags) }
        }
    )*};
}
at_a_directory!(fstatat, fstatat64);

/// As the C library's.
///
/// # Safety
/// As the C library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn statx(
    directory: c_int,
    path: *const c_char,
    flags: c_int,
    mask: c_uint,
    to: *mut libc::statx,
) -> c_int {
    // SAFETY: as the caller's, or a terminated path.
    unsafe {
        let call = |directory: c_int, path: *const c_char| {
            libc::syscall(libc::SYS_statx, directory, path, flags, mask, to) as c_int
        };
        match &lead(directory, path) {
            PathClass::Node(node) => {
                to.write(Local::extended(&Local::node_attributes(*node)));
                0
            }
            PathClass::File(file) => call(libc::AT_FDCWD, file.as_ptr()),
            PathClass::Elsewhere => {
                let done = call(directory, path);
                if done == 0
                    && flags & libc::AT_EMPTY_PATH != 0
                    && let Some(local) = state::started()
                {
                    let mut plain = std::mem::zeroed();
                    if raw(directory, c"".as_ptr(), &raw mut plain, libc::AT_EMPTY_PATH) == 0 {
                        let before = plain.st_mode;
                        local.rewrite_stat(&mut plain);
                        if plain.st_mode != before {
                            to.write(Local::extended(&plain));
                        }
                    }
                }
                done
            }
        }
    }
}
