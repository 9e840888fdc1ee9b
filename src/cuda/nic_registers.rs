//! Whether GPUs of this process can store to the registers of a card.
#![allow(unsafe_code)] // registers memory of others

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use cudarc::driver::sys::{CUdevice, CUresult};

use super::context::CudaContext;
use super::driver::{is, is_loaded};
use super::host_call::in_host_function;
use super::host_registration::{HostRegistration, MappingOwner};
use crate::Error;

/// What was found of GPUs and a card's registers.
#[derive(Default)]
pub(crate) struct RegistersFound {
    /// Text for messages. Empty if this process has no CUDA context.
    pub(crate) finding: String,
    /// The registration, if this call made it.
    pub(crate) pinned: Option<HostRegistration>,
}

/// What a trial of a GPU's doorbell showed, with the text for messages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ProbeResult {
    /// The card executed the request.
    Reached(String),
    /// The path is of no use.
    Lost(String),
    /// The trial could not be made. The next queue pair makes another one.
    Unknown(String),
}

/// What was found of a card and a GPU: the text for messages, or why the path is of no use.
type Finding = std::result::Result<String, String>;

/// Whether a GPU can store to a card's registers, which are mapped at that address, or why not: `Ok` also if this process has no CUDA context. It is tried
/// in a context that the library knows or in the one that is current in this thread, once for each card and GPU: what is between the two decides whether a
/// store arrives. If the driver maps the registers, `probe` tries that.
///
/// To give the registration back may take until the GPU has done its work, so the caller keeps it as long as the registers.
///
/// # Safety
/// The registers stay mapped as long as the registration.
pub(crate) unsafe fn check_registers(
    card: &str,
    device: MappingOwner,
    start: usize,
    len_bytes: usize,
    probe: impl FnOnce(&CudaContext) -> ProbeResult,
) -> std::result::Result<RegistersFound, String> {
    static TRIED: Mutex<BTreeMap<(String, CUdevice), Finding>> = Mutex::new(BTreeMap::new());
    // A process that has not loaded the driver is not made to; and a host function must not call it.
    let may_call = is_loaded() && !in_host_function();
    let tried = || TRIED.lock().unwrap_or_else(PoisonError::into_inner);
    let found = |finding: &Finding| {
        finding.clone().map(|finding| RegistersFound {
            finding,
            pinned: None,
        })
    };
    let Some(context) = may_call.then(CudaContext::any).flatten() else {
        // What was found of other GPUs, a refusal first: the process may use one of them again.
        let tried = tried();
        let of_card = || tried.iter().filter(|((of, _), _)| of == card);
        let known = of_card().find(|(_, finding)| finding.is_err());
        let known = known.or_else(|| of_card().next());
        return known.map_or_else(
            || Ok(RegistersFound::default()),
            |(_, finding)| found(finding),
        );
    };
    let pair = (card.to_owned(), context.device());
    if let Some(finding) = tried().get(&pair) {
        return found(finding);
    }
    // Without the lock: a trial may take seconds, and those of other cards do not wait for it. Two trials of one card find the same.
    // SAFETY: the caller's promise.
    match unsafe { HostRegistration::new_kept(&context, start, len_bytes, Some(device)) } {
        Ok(pinned) => {
            let (is_known, arrives) = match probe(&context) {
                ProbeResult::Reached(finding) => (true, Ok(finding)),
                ProbeResult::Lost(why) => (true, Err(why)),
                ProbeResult::Unknown(finding) => (false, Ok(finding)),
            };
            if is_known {
                tried().insert(pair, arrives.clone());
            }
            arrives.map(|finding| RegistersFound {
                finding,
                pinned: Some(pinned),
            })
        }
        Err(error) if is_refused(&error) => {
            let why = why_not(&error);
            tried().insert(pair, Err(why.clone()));
            Err(why)
        }
        // This says nothing of the registers: of memory, or of a context that is broken.
        Err(_) => Ok(RegistersFound::default()),
    }
}

/// Whether the driver has refused to register the memory because of what it is, or because of the process that asks.
pub(super) fn is_refused(error: &Error) -> bool {
    let is_call = matches!(error, Error::Cuda { call, .. } if *call == "cuMemHostRegister");
    let answers = [
        CUresult::CUDA_ERROR_NOT_PERMITTED,
        CUresult::CUDA_ERROR_NOT_SUPPORTED,
        CUresult::CUDA_ERROR_INVALID_VALUE,
    ];
    is_call && answers.iter().any(|answer| is(error, *answer))
}

/// What the driver's refusal of a card's registers means.
pub(super) fn why_not(error: &Error) -> String {
    let cure = if is(error, CUresult::CUDA_ERROR_NOT_PERMITTED) {
        "; that takes CAP_SYS_ADMIN, or the option NVreg_RegistryDwords=\"PeerMappingOverride=1;\" of the module nvidia"
    } else {
        ""
    };
    format!("the CUDA driver does not map the card's doorbell registers to the GPU ({error}){cure}")
}
