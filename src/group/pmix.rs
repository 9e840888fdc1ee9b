//! A client of the PMIx server of a job, as far as a rendezvous and the exchange of addresses need one. The library is loaded when it is first asked for: Open MPI and Slurm bring it.
//!
//! The layouts and numbers are those of the PMIx standard, which promises them to stay within `libpmix.so.2`.
#![allow(unsafe_code)] // loads and calls a library of C

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::mem::size_of;
use std::ptr::{null, null_mut};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use crate::group::exchange::{ExchangeStore, ExchangeWait};
use crate::{Error, Result, StateKind};

const LIBRARY: &CStr = c"libpmix.so.2";
/// How long the server is asked to wait for a value. The rendezvous repeats the request.
const PATIENCE_S: c_int = 1;

const SUCCESS: c_int = 0;
/// `PMIX_OPERATION_SUCCEEDED`: it has ended already, and nothing is called.
const SUCCEEDED_AT_ONCE: c_int = -157;
/// `PMIX_GLOBAL`.
const SCOPE_GLOBAL: u8 = 3;
/// `PMIX_BOOL`, `PMIX_STRING`, `PMIX_INT`, `PMIX_UINT32`, `PMIX_BYTE_OBJECT`.
const BOOL: u16 = 1;
const STRING: u16 = 3;
const INT: u16 = 6;
const UINT32: u16 = 14;
const BYTE_OBJECT: u16 = 27;
/// `PMIX_RANK_WILDCARD`.
const ALL_RANKS: u32 = u32::MAX - 1;
/// How often a wait for a fence looks whether the group has failed.
const LOOK: Duration = Duration::from_millis(20);

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

impl PmixInfo {
    fn new(name: &[u8], kind: u16, number: usize) -> PmixInfo {
        let mut info = PmixInfo {
            key: [0; 512],
            flags: 0,
            value: PmixValue {
                kind,
                data: [number, 0, 0],
            },
        };
        for (at, byte) in info.key.iter_mut().zip(name) {
            *at = *byte as c_char;
        }
        info
    }
}

/// Of a value of the server.
enum PmixData {
    Text(String),
    Bytes(Vec<u8>),
    Number(u32),
}

const _: () = assert!(size_of::<PmixProcess>() == 260 && size_of::<PmixInfo>() == 552);

type PmixPutCall = unsafe extern "C" fn(u8, *const c_char, *mut PmixValue) -> c_int;

type PmixCommitCall = unsafe extern "C" fn() -> c_int;

type PmixGetCall = unsafe extern "C" fn(
    *const PmixProcess,
    *const c_char,
    *const PmixInfo,
    usize,
    *mut *mut PmixValue,
) -> c_int;

type PmixFenceEndCall = unsafe extern "C" fn(c_int, *mut c_void);

type PmixFenceCall = unsafe extern "C" fn(
    *const PmixProcess,
    usize,
    *const PmixInfo,
    usize,
    PmixFenceEndCall,
    *mut c_void,
) -> c_int;

/// The calls, and this process as the server knows it.
struct PmixLibrary {
    put: PmixPutCall,
    commit: PmixCommitCall,
    get: PmixGetCall,
    fence: PmixFenceCall,
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

/// Whether there are a library and a server of this job.
pub(super) fn is_available() -> bool {
    library().is_ok()
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
        let (fence, finalize) = (find(c"PMIx_Fence_nb")?, find(c"PMIx_Finalize")?);
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
                put: std::mem::transmute::<*mut c_void, PmixPutCall>(put),
                commit: std::mem::transmute::<*mut c_void, PmixCommitCall>(commit),
                get: std::mem::transmute::<*mut c_void, PmixGetCall>(get),
                fence: std::mem::transmute::<*mut c_void, PmixFenceCall>(fence),
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

fn check(operation: &'static str, status: c_int) -> Result<()> {
    if status == SUCCESS {
        return Ok(());
    }
    Err(failed(operation, format!("it returned {status}")))
}

impl PmixLibrary {
    /// Gives a value of this rank to the job. The caller keeps what its data points to until then.
    fn put(&self, key: &str, mut value: PmixValue) -> Result<()> {
        let key = c_text(key)?;
        let _call = self.calls.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: a key with an end mark, and a value of its kind. The call copies both.
        let status = unsafe { (self.put)(SCOPE_GLOBAL, key.as_ptr(), &raw mut value) };
        check("PMIx_Put", status)
    }

    fn commit(&self) -> Result<()> {
        let _call = self.calls.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: after `PMIx_Init`.
        check("PMIx_Commit", unsafe { (self.commit)() })
    }

    /// The value that a rank has given to the job, or that the job has for all ranks, if it is there: the server is asked to wait for it, a second at most.
    fn get(&self, rank: u32, key: &str) -> Result<Option<PmixData>> {
        let key = c_text(key)?;
        let process = PmixProcess { rank, ..self.own };
        let timeout = PmixInfo::new(b"pmix.timeout", INT, PATIENCE_S as usize);
        let _call = self.calls.lock().unwrap_or_else(PoisonError::into_inner);
        let mut found: *mut PmixValue = null_mut();
        // SAFETY: names and wishes as the standard has them, and a place for the value.
        let status = unsafe {
            (self.get)(
                &raw const process,
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
        // SAFETY: a value that the library has allocated with `malloc`, as it has what it points to, for the caller to free.
        unsafe {
            let value = found.read();
            libc::free(found.cast());
            let start: *const c_char = std::ptr::with_exposed_provenance(value.data[0]);
            Ok(match value.kind {
                UINT32 => Some(PmixData::Number(value.data[0] as u32)),
                STRING if !start.is_null() => {
                    let text = CStr::from_ptr(start).to_string_lossy().into_owned();
                    libc::free(start.cast_mut().cast());
                    Some(PmixData::Text(text))
                }
                BYTE_OBJECT if start.is_null() => Some(PmixData::Bytes(Vec::new())),
                BYTE_OBJECT => {
                    let bytes = std::slice::from_raw_parts(start.cast(), value.data[1]).to_vec();
                    libc::free(start.cast_mut().cast());
                    Some(PmixData::Bytes(bytes))
                }
                _ => None,
            })
        }
    }
}

/// Gives a text of this rank to the job.
///
/// # Errors
/// [`Error::State`] if there is no library or no server, or with the status of the call.
pub(super) fn put_text(key: &str, value: &str) -> Result<()> {
    let library = library()?;
    let value = c_text(value)?;
    let data = [value.as_ptr().expose_provenance(), 0, 0];
    library.put(key, PmixValue { kind: STRING, data })?;
    library.commit()
}

/// The text that rank 0 has given to the job, if it has: the server is asked to wait for it, a second at most.
///
/// # Errors
/// [`Error::State`] if there is no library or no server.
pub(super) fn text_of_rank_0(key: &str) -> Result<Option<String>> {
    Ok(match library()?.get(0, key)? {
        Some(PmixData::Text(text)) => Some(text),
        _ => None,
    })
}

/// The PMIx server as the store of a job with as many ranks, of which this process is one.
#[derive(Debug)]
pub(super) struct PmixStore {
    pub(super) rank: u32,
    pub(super) size: u32,
}

/// A fence that is under way: what the call was given, and how it ended.
struct PmixFence {
    all: PmixProcess,
    /// The servers give each other what was committed.
    collect: PmixInfo,
    status: Mutex<Option<c_int>>,
    ended: Condvar,
}

unsafe extern "C" fn fence_ended(status: c_int, of: *mut c_void) {
    // SAFETY: of `PmixStore::fence`, which gave its reference to this one call.
    let fence = unsafe { Arc::from_raw(of.cast_const().cast::<PmixFence>()) };
    *fence.status.lock().unwrap_or_else(PoisonError::into_inner) = Some(status);
    fence.ended.notify_all();
}

impl ExchangeStore for PmixStore {
    fn put(&self, key: &str, value: &[u8]) -> Result<()> {
        // A `pmix_byte_object_t`.
        let data = [value.as_ptr().expose_provenance(), value.len(), 0];
        let kind = BYTE_OBJECT;
        library()?.put(key, PmixValue { kind, data })
    }

    /// Refused if the server has other ranks than the group: its fence would be one of others.
    fn commit(&self) -> Result<()> {
        let library = library()?;
        let size = library.get(ALL_RANKS, "pmix.job.size")?;
        let is_same = matches!(size, Some(PmixData::Number(size)) if size == self.size);
        if library.own.rank != self.rank || !is_same {
            let reason = "its job has other ranks than the group".into();
            return Err(failed("exchange with the PMIx server", reason));
        }
        library.commit()
    }

    fn fence(&self, wait: &ExchangeWait<'_>) -> Result<()> {
        const FENCE: &str = "PMIx_Fence_nb";
        let library = library()?;
        let fence = Arc::new(PmixFence {
            all: PmixProcess {
                rank: ALL_RANKS,
                ..library.own
            },
            collect: PmixInfo::new(b"pmix.collect", BOOL, 1),
            status: Mutex::default(),
            ended: Condvar::new(),
        });
        let (all, collect) = (&raw const fence.all, &raw const fence.collect);
        let of = Arc::into_raw(Arc::clone(&fence));
        let status = {
            let _call = library.calls.lock().unwrap_or_else(PoisonError::into_inner);
            // SAFETY: names and wishes as the standard has them, which stay until `fence_ended`. That is called once if the call succeeds.
            unsafe { (library.fence)(all, 1, collect, 1, fence_ended, of.cast_mut().cast()) }
        };
        if status != SUCCESS {
            // SAFETY: the reference that the call did not take.
            drop(unsafe { Arc::from_raw(of) });
            if status == SUCCEEDED_AT_ONCE {
                return Ok(());
            }
            return check(FENCE, status);
        }
        let mut status = fence.status.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(status) = *status {
                return check(FENCE, status);
            }
            wait.check()?;
            (status, _) = fence
                .ended
                .wait_timeout(status, LOOK)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn get(&self, rank: u32, key: &str) -> Result<Option<Vec<u8>>> {
        Ok(match library()?.get(rank, key)? {
            Some(PmixData::Bytes(bytes)) => Some(bytes),
            _ => None,
        })
    }

    /// PMIx has no call that takes back what `PMIx_Put` has put; `PMIx_Unpublish` is for values that were published.
    fn remove(&self, _: &[String]) -> Result<()> {
        Ok(())
    }
}
