//! A client of the PMIx server of a job, as far as a rendezvous needs one. The library is loaded when it is first asked for: Open MPI and Slurm bring it.
//!
//! The layouts and numbers are those of the PMIx standard, which promises them to stay within `libpmix.so.2`.
#![allow(unsafe_code)] // loads and calls a library of C

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::mem::size_of;
use std::ptr::{null, null_mut};
use std::sync::{Mutex, OnceLock, PoisonError};

use crate::{Error, Result, StateKind};

const LIBRARY: &CStr = c"libpmix.so.2";
/// How long the server is asked to wait for a value. The rendezvous repeats the request.
const PATIENCE_S: c_int = 1;

const SUCCESS: c_int = 0;
/// `PMIX_GLOBAL`.
const SCOPE_GLOBAL: u8 = 3;
/// `PMIX_STRING` and `PMIX_INT`.
const STRING: u16 = 3;
const INT: u16 = 6;

/// `pmix_proc_t`.
#[repr(C)]
#[derive(Clone, Copy)]
struct PmixProcess {
    namespace: [c_char; 256],
    rank: u32,
}

/// `pmix_value_t`: the longest member of its union is a `pmix_envar_t`.
#[repr(C)]
struct PmixValue {
    kind: u16,
    data: [usize; 3],
}

/// `pmix_info_t`.
#[repr(C)]
struct PmixInfo {
    key: [c_char; 512],
    flags: u32,
    value: PmixValue,
}

const _: () = assert!(size_of::<PmixProcess>() == 260 && size_of::<PmixInfo>() == 552);

/// The calls, and this process as the server knows it.
struct PmixLibrary {
    put: unsafe extern "C" fn(u8, *const c_char, *mut PmixValue) -> c_int,
    commit: unsafe extern "C" fn() -> c_int,
    get: unsafe extern "C" fn(
        *const PmixProcess,
        *const c_char,
        *const PmixInfo,
        usize,
        *mut *mut PmixValue,
    ) -> c_int,
    own: PmixProcess,
    /// Calls come one after the other.
    calls: Mutex<()>,
}

type Init = unsafe extern "C" fn(*mut PmixProcess, *mut PmixInfo, usize) -> c_int;

type Finalize = unsafe extern "C" fn(*const PmixInfo, usize) -> c_int;

static FINALIZE: OnceLock<Finalize> = OnceLock::new();

extern "C" fn finalize_at_exit() {
    if let Some(finalize) = FINALIZE.get() {
        // SAFETY: once, after the one `PMIx_Init` of this module.
        let _ = unsafe { finalize(null(), 0) };
    }
}

fn failed(operation: &'static str, reason: String) -> Error {
    Error::state(StateKind::Environment, operation, reason)
}

/// The library, connected with the server of this job. It stays so until the process ends: the process may use PMIx otherwise, as MPI does.
fn library() -> Result<&'static PmixLibrary> {
    static LOADED: OnceLock<Result<PmixLibrary>> = OnceLock::new();
    LOADED
        .get_or_init(PmixLibrary::load)
        .as_ref()
        .map_err(Error::clone)
}

impl PmixLibrary {
    fn load() -> Result<PmixLibrary> {
        const LOAD: &str = "load of the PMIx library";
        // SAFETY: a name with an end mark. What the library does when it is loaded is its own.
        let handle = unsafe { libc::dlopen(LIBRARY.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
        if handle.is_null() {
            return Err(failed(
                LOAD,
                format!(
                    "there is no {}; set `DOORBELL_MASTER_ADDR` and `DOORBELL_MASTER_PORT`",
                    LIBRARY.to_string_lossy()
                ),
            ));
        }
        let find = |name: &CStr| {
            // SAFETY: a library that stays loaded, and a name with an end mark.
            let found = unsafe { libc::dlsym(handle, name.as_ptr()) };
            if found.is_null() {
                return Err(failed(
                    LOAD,
                    format!("it has no {}", name.to_string_lossy()),
                ));
            }
            Ok(found)
        };
        let (init, put) = (find(c"PMIx_Init")?, find(c"PMIx_Put")?);
        let (commit, get) = (find(c"PMIx_Commit")?, find(c"PMIx_Get")?);
        let finalize = find(c"PMIx_Finalize")?;
        let mut own = PmixProcess {
            namespace: [0; 256],
            rank: 0,
        };
        // SAFETY: the standard's type of `PMIx_Init`.
        let init = unsafe { std::mem::transmute::<*mut c_void, Init>(init) };
        // SAFETY: a place for this process's name; no further wishes. Other users of PMIx in the process call it, too: it counts.
        let status = unsafe { init(&raw mut own, null_mut(), 0) };
        if status != SUCCESS {
            return Err(failed("PMIx_Init", format!("it returned {status}")));
        }
        // A process that ends without it counts as one that has failed, and the launcher ends the others.
        // SAFETY: the standard's type of `PMIx_Finalize`.
        let finalize = unsafe { std::mem::transmute::<*mut c_void, Finalize>(finalize) };
        let _ = FINALIZE.set(finalize);
        // SAFETY: a function that may be called when the process ends.
        unsafe { libc::atexit(finalize_at_exit) };
        // SAFETY: the standard's types of these functions.
        unsafe {
            Ok(PmixLibrary {
                put: std::mem::transmute::<
                    *mut c_void,
                    unsafe extern "C" fn(u8, *const c_char, *mut PmixValue) -> c_int,
                >(put),
                commit: std::mem::transmute::<*mut c_void, unsafe extern "C" fn() -> c_int>(commit),
                get: std::mem::transmute::<
                    *mut c_void,
                    unsafe extern "C" fn(
                        *const PmixProcess,
                        *const c_char,
                        *const PmixInfo,
                        usize,
                        *mut *mut PmixValue,
                    ) -> c_int,
                >(get),
                own,
                calls: Mutex::default(),
            })
        }
    }
}

fn c_text(text: &str) -> Result<CString> {
    CString::new(text).map_err(|_| Error::Malformed {
        what: "PMIx text",
        reason: "it has a zero".into(),
    })
}

/// Gives a value of this rank to the job.
///
/// # Errors
/// [`Error::State`] if there is no library or no server, or with the status of the call.
pub(super) fn put(key: &str, value: &str) -> Result<()> {
    let library = library()?;
    let (key, value) = (c_text(key)?, c_text(value)?);
    let _call = library.calls.lock().unwrap_or_else(PoisonError::into_inner);
    let mut given = PmixValue {
        kind: STRING,
        data: [value.as_ptr().expose_provenance(), 0, 0],
    };
    // SAFETY: a key and a value with end marks. The call copies both.
    let status = unsafe { (library.put)(SCOPE_GLOBAL, key.as_ptr(), &raw mut given) };
    if status != SUCCESS {
        return Err(failed("PMIx_Put", format!("it returned {status}")));
    }
    // SAFETY: after `PMIx_Init`.
    let status = unsafe { (library.commit)() };
    if status != SUCCESS {
        return Err(failed("PMIx_Commit", format!("it returned {status}")));
    }
    Ok(())
}

/// The value that rank 0 has given to the job, if it has: the server is asked to wait for it, a second at most.
///
/// # Errors
/// [`Error::State`] if there is no library or no server.
pub(super) fn get_of_rank_0(key: &str) -> Result<Option<String>> {
    let library = library()?;
    let key = c_text(key)?;
    let rank_0 = PmixProcess {
        rank: 0,
        ..library.own
    };
    let mut timeout = PmixInfo {
        key: [0; 512],
        flags: 0,
        value: PmixValue {
            kind: INT,
            data: [PATIENCE_S as usize, 0, 0],
        },
    };
    for (at, byte) in timeout.key.iter_mut().zip(b"pmix.timeout") {
        *at = *byte as c_char;
    }
    let _call = library.calls.lock().unwrap_or_else(PoisonError::into_inner);
    let mut found: *mut PmixValue = null_mut();
    // SAFETY: names and wishes as the standard has them, and a place for the value.
    let status = unsafe {
        (library.get)(
            &raw const rank_0,
            key.as_ptr(),
            &raw const timeout,
            1,
            &raw mut found,
        )
    };
    if status != SUCCESS || found.is_null() {
        // Not there yet. Which number says so depends on the server.
        return Ok(None);
    }
    // SAFETY: a value that the library has allocated with `malloc`, as it has its text, for the caller to free.
    unsafe {
        let value = found.read();
        libc::free(found.cast());
        if value.kind != STRING {
            return Ok(None);
        }
        let text: *const c_char = std::ptr::with_exposed_provenance(value.data[0]);
        if text.is_null() {
            return Ok(None);
        }
        let copied = CStr::from_ptr(text).to_string_lossy().into_owned();
        libc::free(text.cast_mut().cast());
        Ok(Some(copied))
    }
}
