//! The CUDA driver: loading it, and the results of its functions.
#![allow(unsafe_code)] // calls the driver

use std::ffi::{CStr, c_char};
use std::sync::OnceLock;

use cudarc::driver::sys::{self, CUresult, CUstream};

use crate::{Error, Result, StateKind};

/// The oldest driver that this library supports: 11.7 brought the second version of the memory operations.
const DRIVER_MIN: i32 = 11_070;

/// Loads and initialises the driver, once, before any other call: `cudarc` panics if the library is missing.
///
/// # Errors
/// [`Error::State`] if there is no driver or an old one, [`Error::Cuda`] if it does not start.
pub(super) fn load() -> Result<()> {
    static LOADED: OnceLock<Result<()>> = OnceLock::new();
    LOADED.get_or_init(initialise).clone()
}

fn initialise() -> Result<()> {
    let no = |reason: String| {
        Err(Error::state(
            StateKind::NotFound,
            "load the CUDA driver",
            reason,
        ))
    };
    if !can_be_loaded() {
        return no("libcuda.so.1 cannot be loaded: there is no NVIDIA driver here".into());
    }
    // SAFETY: the first call of the driver; it takes no flags.
    let started = unsafe { sys::cuInit(0) };
    if started == CUresult::CUDA_ERROR_STUB_LIBRARY {
        return no(
            "libcuda.so is the stub of the CUDA toolkit, which only programs are linked with: take its folder `stubs` out of LD_LIBRARY_PATH"
                .into(),
        );
    }
    check("cuInit", started)?;
    let mut version = 0;
    // SAFETY: writes one int.
    check("cuDriverGetVersion", unsafe {
        sys::cuDriverGetVersion(&mut version)
    })?;
    if version < DRIVER_MIN {
        return no(format!(
            "the driver is of CUDA {}.{}; 11.7 is the first whose streams have the memory operations that are used here",
            version / 1000,
            version % 1000 / 10
        ));
    }
    Ok(())
}

/// Whether the driver's library can be loaded. `cudarc` panics if it cannot, and says so beforehand only if it was built to load the library,
/// not if another crate of the program has it link the library.
fn can_be_loaded() -> bool {
    // Two of the names that `cudarc` tries; the driver's installer makes the first, and CUDA's packages for development the second.
    [c"libcuda.so.1", c"libcuda.so"].iter().any(|name| {
        // SAFETY: opens a library of that name, whose constructors are those of the system's driver. It is not closed: calls of it follow.
        let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_LAZY | libc::RTLD_LOCAL) };
        !library.is_null()
    })
}

/// Whether this process has the driver's library.
pub(super) fn is_loaded() -> bool {
    // SAFETY: as in `can_be_loaded`; it loads nothing.
    let library = unsafe {
        libc::dlopen(
            c"libcuda.so.1".as_ptr(),
            libc::RTLD_LAZY | libc::RTLD_NOLOAD,
        )
    };
    !library.is_null()
}

/// A driver function's result as this library's.
#[inline]
pub(super) fn check(call: &'static str, result: CUresult) -> Result<()> {
    if result == CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    Err(failed(call, result))
}

#[cold]
fn failed(call: &'static str, result: CUresult) -> Error {
    let mut text: *const c_char = std::ptr::null();
    // SAFETY: writes one pointer, to a string that is a constant of the driver, or null for a result that it does not know.
    let found = unsafe { sys::cuGetErrorName(result, &mut text) };
    let name = if found != CUresult::CUDA_SUCCESS || text.is_null() {
        "an error without a name".to_owned()
    } else {
        // SAFETY: a constant string of the driver.
        unsafe { CStr::from_ptr(text) }
            .to_string_lossy()
            .into_owned()
    };
    Error::Cuda {
        call,
        code: result as u32,
        name,
    }
}

/// Whether an error is this result of a driver function.
pub(super) fn is(error: &Error, result: CUresult) -> bool {
    matches!(error, Error::Cuda { code, .. } if *code == result as u32)
}

/// A new stream of the current context, which does not synchronize with the legacy default stream. The caller destroys it.
///
/// # Errors
/// [`Error::Cuda`].
pub(super) fn create_stream() -> Result<CUstream> {
    let mut raw = std::ptr::null_mut();
    // SAFETY: writes one handle.
    check("cuStreamCreate", unsafe {
        sys::cuStreamCreate(&mut raw, sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32)
    })?;
    Ok(raw)
}
