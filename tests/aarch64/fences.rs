//! Each barrier alone in a function, for scripts/aarch64 to disassemble.
#![allow(missing_docs)]

use doorbell_wire::mmio;

#[unsafe(no_mangle)]
pub extern "C" fn fence_to_device() {
    mmio::to_device();
}

#[unsafe(no_mangle)]
pub extern "C" fn fence_from_device() {
    mmio::from_device();
}

#[unsafe(no_mangle)]
pub extern "C" fn fence_flush() {
    mmio::flush();
}
