//! A host with longer pages: GH200 and GB200 are used with pages of 64 KiB.
//!
//! The driver registers whole pages, so what shares a page is registered together. `DOORBELL_CUDA_STANDIN_PAGE_BYTES=65536` has the stand-in register as on such
//! a host, and `LD_PRELOAD` of this library reports it to the program, by `sysconf`. So do new
//! mappings, by `mmap`, which begin such a page. The allocator's memory does not.

use std::ffi::{CStr, c_int, c_long, c_void};
use std::sync::OnceLock;

use crate::settings::settings;

type Sysconf = unsafe extern "C" fn(c_int) -> c_long;

/// The function of that name that this library's own stands before.
fn behind(name: &CStr) -> *mut c_void {
    // SAFETY: looks up a name.
    unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) }
}

/// That of libc, but for the length of a page. Programs find this one only if the library is preloaded.
#[unsafe(no_mangle)]
pub extern "C" fn sysconf(name: c_int) -> c_long {
    static NEXT: OnceLock<Option<Sysconf>> = OnceLock::new();
    if name == libc::_SC_PAGESIZE {
        return settings().page_bytes.cast_signed();
    }
    let next = NEXT.get_or_init(|| {
        // SAFETY: a function of that type, or null.
        unsafe { std::mem::transmute::<*mut c_void, Option<Sysconf>>(behind(c"sysconf")) }
    });
    match next {
        // SAFETY: takes any number.
        Some(next) => unsafe { next(name) },
        None => -1,
    }
}

type Mmap = unsafe extern "C" fn(*mut c_void, usize, c_int, c_int, c_int, i64) -> *mut c_void;

/// That of libc, but a new mapping of no file begins a page, and is whole pages long, as on such a host. Found as [`sysconf`] is.
///
/// # Safety
/// As mmap(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mmap(
    at: *mut c_void,
    len: usize,
    rights: c_int,
    flags: c_int,
    file: c_int,
    offset: i64,
) -> *mut c_void {
    static NEXT: OnceLock<Option<Mmap>> = OnceLock::new();
    let next = NEXT.get_or_init(|| {
        // SAFETY: a function of that type, or null.
        unsafe { std::mem::transmute::<*mut c_void, Option<Mmap>>(behind(c"mmap")) }
    });
    let Some(next) = next else {
        return libc::MAP_FAILED;
    };
    let page = settings().page_bytes as usize;
    let whole = len.next_multiple_of(page);
    if page == 4096 || !at.is_null() || flags & libc::MAP_ANONYMOUS == 0 {
        // SAFETY: the caller's promise.
        return unsafe { next(at, len, rights, flags, file, offset) };
    }
    // SAFETY: the caller's promise, of more memory; what is not needed is unmapped.
    unsafe {
        let found = next(at, whole + page, rights, flags, file, offset);
        if found == libc::MAP_FAILED {
            return found;
        }
        let start = found.wrapping_byte_add(found.addr().next_multiple_of(page) - found.addr());
        let before = start.addr() - found.addr();
        if before > 0 {
            libc::munmap(found, before);
        }
        libc::munmap(start.wrapping_byte_add(whole), page - before);
        start
    }
}
