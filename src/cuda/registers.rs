//! Whether GPUs of this process can store to the registers of a card.
#![allow(unsafe_code)] // registers memory of others

use cudarc::driver::sys::CUresult;

use super::context::{CudaContext, unless_short_of_memory};
use super::driver::{is, is_loaded};
use super::pinned::Pinned;
use crate::Error;

/// Why a GPU cannot store to a card's registers, which are mapped at that address; nothing if all can that this process uses: those of the contexts
/// that the library knows and the one that is current in this thread. Each context is tried once.
///
/// # Safety
/// The registers stay mapped until this returns.
pub(crate) unsafe fn check_registers(
    start: usize,
    len_bytes: usize,
) -> std::result::Result<(), String> {
    if !is_loaded() {
        // Nor was it used, and nobody is to be made to.
        return Ok(());
    }
    let mut contexts = CudaContext::all_known();
    if let Ok(current) = CudaContext::current() {
        contexts.push(current);
    }
    contexts.iter().try_for_each(|context| {
        let tried = context.registers().get_or_init(|| {
            let pinned = unless_short_of_memory(|| {
                // SAFETY: the caller's promise. They are let go at once.
                unsafe { Pinned::new(context, start, len_bytes) }
            });
            pinned.map(drop).map_err(|error| why_not(&error))
        });
        tried.clone()
    })
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
