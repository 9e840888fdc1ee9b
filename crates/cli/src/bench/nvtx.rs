//! NVTX ranges, which profilers show. Without the NVTX library they do nothing.
#![allow(
    unsafe_code,
    reason = "calls a library of C that is loaded when there is one"
)]

use std::ffi::{CString, c_char, c_int, c_void};
use std::sync::OnceLock;

/// A range of this thread, from its creation to its drop.
pub struct NvtxRange(Option<&'static Library>);

/// `nvtxRangePushA` and `nvtxRangePop` of nvToolsExt.h.
struct Library {
    push: unsafe extern "C" fn(*const c_char) -> c_int,
    pop: unsafe extern "C" fn() -> c_int,
}

impl NvtxRange {
    /// Begins a range.
    pub fn new(name: &str) -> NvtxRange {
        let library = library();
        if let (Some(library), Ok(name)) = (library, CString::new(name)) {
            // SAFETY: the function copies the string.
            unsafe { (library.push)(name.as_ptr()) };
            return NvtxRange(Some(library));
        }
        NvtxRange(None)
    }
}

impl Drop for NvtxRange {
    fn drop(&mut self) {
        if let Some(library) = self.0 {
            // SAFETY: ends the innermost range of this thread; ranges are dropped on it in the opposite order of their creation.
            unsafe { (library.pop)() };
        }
    }
}

fn library() -> Option<&'static Library> {
    static LIBRARY: OnceLock<Option<Library>> = OnceLock::new();
    LIBRARY.get_or_init(load).as_ref()
}

fn load() -> Option<Library> {
    // SAFETY: NVIDIA's library has no constructors with requirements. It stays loaded.
    let library = unsafe { libc::dlopen(c"libnvToolsExt.so.1".as_ptr(), libc::RTLD_NOW) };
    if library.is_null() {
        return None;
    }
    let find = |name: &std::ffi::CStr| -> Option<*mut c_void> {
        // SAFETY: the library is loaded, and the name is a C string.
        let symbol = unsafe { libc::dlsym(library, name.as_ptr()) };
        (!symbol.is_null()).then_some(symbol)
    };
    let (push, pop) = (find(c"nvtxRangePushA")?, find(c"nvtxRangePop")?);
    // SAFETY: nvToolsExt.h declares the functions with these types.
    unsafe {
        Some(Library {
            push: std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*const c_char) -> c_int>(
                push,
            ),
            pop: std::mem::transmute::<*mut c_void, unsafe extern "C" fn() -> c_int>(pop),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn where_there_is_no_library_a_range_is_nothing() {
        let outer = NvtxRange::new("outer");
        let inner = NvtxRange::new("in\0ner");
        assert!(inner.0.is_none());
        assert_eq!(outer.0.is_some(), library().is_some());
    }
}
