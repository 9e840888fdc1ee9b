//! Whether GPUs of this process can store to the registers of a card.
#![allow(unsafe_code)] // registers memory of others

use std::sync::OnceLock;

use cudarc::driver::sys::CUresult;

use super::context::{CudaContext, unless_short_of_memory};
use super::driver::{is, is_loaded};
use super::pinned::Pinned;
use crate::Error;

/// Why GPUs cannot store to a card's registers, which are mapped at that address; nothing if they can, or if this process uses none. It is tried once, in
/// a context that the library knows or in the one that is current in this thread: privilege is the process's, and the driver's option the machine's.
///
/// # Safety
/// The registers stay mapped until this returns.
pub(crate) unsafe fn check_registers(
    start: usize,
    len_bytes: usize,
) -> std::result::Result<(), String> {
    static TRIED: OnceLock<std::result::Result<(), String>> = OnceLock::new();
    if let Some(tried) = TRIED.get() {
        return tried.clone();
    }
    // A process that has not loaded the driver is not made to.
    let context = is_loaded().then(CudaContext::any).flatten();
    let Some(context) = context else {
        return Ok(());
    };
    let tried = TRIED.get_or_init(|| {
        let pinned = unless_short_of_memory(|| {
            // SAFETY: the caller's promise. They are let go at once.
            unsafe { Pinned::new(&context, start, len_bytes) }
        });
        pinned.map(drop).map_err(|error| why_not(&error))
    });
    tried.clone()
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
