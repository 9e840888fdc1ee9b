//! Functions that look at permissions, links, true names and extended attributes of files.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use softcx::doors::Local;

use crate::calls::{fail, next};
use crate::paths::{PathClass, absolute, as_path, classify_path, lead};
use crate::state;

fn answer(checked: Result<(), c_int>) -> c_int {
    checked.map_or_else(fail, |()| 0)
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
    // SAFETY: as the caller's. The older system call has no flags.
    unsafe {
        match &lead(directory, path) {
            PathClass::Node(_) => answer(Local::check_access(mode)),
            PathClass::File(file) => answer(Local::check_file_access(as_path(file), mode)),
            PathClass::Elsewhere if flags == 0 => {
                libc::syscall(libc::SYS_faccessat, directory, path, mode) as c_int
            }
            PathClass::Elsewhere => {
                libc::syscall(libc::SYS_faccessat2, directory, path, mode, flags) as c_int
            }
        }
    }
}

macro_rules! by_path {
    ($($name:ident: $flags:expr),*) => {$(
        /// As the C library's.
        ///
        /// # Safety
        /// As the C library's.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(path: *const c_char, mode: c_int) -> c_int {
            // SAFETY: as the caller's.
            unsafe { faccessat(libc::AT_FDCWD, path, mode, $flags) }
        }
    )*};
}
by_path!(access: 0, eaccess: libc::AT_EACCESS, euidaccess: libc::AT_EACCESS);

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
    // SAFETY: as the caller's.
    unsafe {
        match &lead(directory, path) {
            PathClass::Node(_) => fail(libc::EINVAL) as isize,
            PathClass::File(_) if len as c_int <= 0 => fail(libc::EINVAL) as isize,
            PathClass::File(file) => match Local::read_link(as_path(file)) {
                Ok(text) => {
                    let text = text.as_os_str().as_bytes();
                    let len = text.len().min(len);
                    std::ptr::copy_nonoverlapping(text.as_ptr(), to.cast(), len);
                    len as isize
                }
                Err(errno) => fail(errno) as isize,
            },
            PathClass::Elsewhere => {
                libc::syscall(libc::SYS_readlinkat, directory, path, to, len) as isize
            }
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

/// What `_FORTIFY_SOURCE` makes of `readlinkat` where the buffer's size is not known at compile time.
///
/// # Safety
/// As the C library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn __readlinkat_chk(
    directory: c_int,
    path: *const c_char,
    to: *mut c_char,
    len: usize,
    room: usize,
) -> isize {
    if len > room {
        overflows();
    }
    // SAFETY: as the caller's.
    unsafe { readlinkat(directory, path, to, len) }
}

/// The same of `readlink`.
///
/// # Safety
/// As the C library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn __readlink_chk(
    path: *const c_char,
    to: *mut c_char,
    len: usize,
    room: usize,
) -> isize {
    // SAFETY: as the caller's.
    unsafe { __readlinkat_chk(libc::AT_FDCWD, path, to, len, room) }
}

/// The end of a program that is about to write behind a buffer, as the C library has it.
fn overflows() -> ! {
    eprintln!("*** buffer overflow detected ***: terminated");
    std::process::abort()
}

type TrueName = unsafe extern "C" fn(*const c_char, *mut c_char) -> *mut c_char;

/// As the C library's, which does not come by its own `readlink`.
///
/// # Safety
/// As the C library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn realpath(path: *const c_char, to: *mut c_char) -> *mut c_char {
    // SAFETY: the type of the function of this name; the arguments are the caller's.
    unsafe {
        let real: TrueName = next!(c"realpath", TrueName, std::ptr::null_mut());
        let Some(name) = absolute(libc::AT_FDCWD, path) else {
            return real(path, to);
        };
        let found = match &classify_path(&name) {
            PathClass::Node(_) => Ok(name),
            PathClass::File(file) => true_name(file, real),
            PathClass::Elsewhere => return real(path, to),
        };
        let exists = found.as_ref().map(drop).map_err(|errno| *errno);
        let name = CString::new(
            found
                .unwrap_or_default()
                .into_os_string()
                .into_encoded_bytes(),
        );
        match (exists, name) {
            // To where the caller wants it, which has room for a path, or to memory that the caller frees.
            (Ok(()), Ok(name)) if to.is_null() => libc::strdup(name.as_ptr()),
            (Ok(()), Ok(name)) if name.as_bytes_with_nul().len() <= libc::PATH_MAX as usize => {
                libc::strcpy(to, name.as_ptr())
            }
            (exists, _) => {
                fail(exists.err().unwrap_or(libc::ENAMETOOLONG));
                std::ptr::null_mut()
            }
        }
    }
}

/// The true name of a file of the private tree, as programs know it.
///
/// # Safety
/// `real` is the C library's `realpath`.
unsafe fn true_name(file: &CString, real: TrueName) -> Result<PathBuf, c_int> {
    let mut name = [0; libc::PATH_MAX as usize];
    // SAFETY: the caller's word, a terminated path, and room for the longest name.
    unsafe {
        if real(file.as_ptr(), name.as_mut_ptr()).is_null() {
            return Err(*libc::__errno_location());
        }
        let name = as_path(CStr::from_ptr(name.as_ptr()));
        let public = state::started().and_then(|local| local.public_name(name));
        // A link to a function that is not ours leads out of the tree.
        Ok(public.unwrap_or_else(|| name.to_owned()))
    }
}

/// What `_FORTIFY_SOURCE` makes of `realpath`.
///
/// # Safety
/// As the C library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn __realpath_chk(
    path: *const c_char,
    to: *mut c_char,
    room: usize,
) -> *mut c_char {
    if !to.is_null() && room < libc::PATH_MAX as usize {
        overflows();
    }
    // SAFETY: as the caller's.
    unsafe { realpath(path, to) }
}

/// As the C library's.
///
/// # Safety
/// As the C library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn canonicalize_file_name(path: *const c_char) -> *mut c_char {
    // SAFETY: as the caller's.
    unsafe { realpath(path, std::ptr::null_mut()) }
}

/// Ours have no extended attributes: the errno, if the path is of ours.
///
/// # Safety
/// `path` is null or a terminated string.
unsafe fn without_attributes(path: *const c_char) -> Option<c_int> {
    // SAFETY: the caller's word.
    match &unsafe { lead(libc::AT_FDCWD, path) } {
        PathClass::Node(_) => Some(libc::EOPNOTSUPP),
        PathClass::File(file) => Some(Local::no_extended_attributes(as_path(file))),
        PathClass::Elsewhere => None,
    }
}

macro_rules! gets {
    ($($name:ident: $number:expr),*) => {$(
        /// As the C library's.
        ///
        /// # Safety
        /// As the C library's.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(path: *const c_char, name: *const c_char, to: *mut c_void, len: usize) -> isize {
            // SAFETY: as the caller's.
            unsafe {
                match without_attributes(path) {
                    Some(errno) => fail(errno) as isize,
                    None => libc::syscall($number, path, name, to, len) as isize,
                }
            }
        }
    )*};
}
gets!(getxattr: libc::SYS_getxattr, lgetxattr: libc::SYS_lgetxattr);

macro_rules! lists {
    ($($name:ident: $number:expr),*) => {$(
        /// As the C library's.
        ///
        /// # Safety
        /// As the C library's.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(path: *const c_char, to: *mut c_char, len: usize) -> isize {
            // SAFETY: as the caller's.
            unsafe {
                match without_attributes(path) {
                    Some(errno) => fail(errno) as isize,
                    None => libc::syscall($number, path, to, len) as isize,
                }
            }
        }
    )*};
}
lists!(listxattr: libc::SYS_listxattr, llistxattr: libc::SYS_llistxattr);
