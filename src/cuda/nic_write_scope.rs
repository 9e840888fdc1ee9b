//! Copies that stand for the writes of a NIC.
//!
//! A copy of the driver's is seen at once by all that follows. A write of a NIC may be seen by a GPU after the completion that tells of it
//! (GPU_DIRECT_RDMA_WRITES_ORDERING). So that a missing flush shows without a GPU, the stand-in for the driver is told which copies are a
//! NIC's, and holds them back; a driver is told nothing.
#![allow(unsafe_code)] // looks for a function of the stand-in

use std::sync::OnceLock;

type AsNicFunction = extern "C" fn(bool);

/// While it lives, what this thread copies stands for writes of a NIC.
pub(super) struct NicWriteScope(Option<AsNicFunction>);

impl NicWriteScope {
    pub(super) fn begin() -> NicWriteScope {
        static FUNCTION: OnceLock<Option<AsNicFunction>> = OnceLock::new();
        let function = *FUNCTION.get_or_init(find);
        if let Some(tell) = function {
            tell(true);
        }
        NicWriteScope(function)
    }
}

impl Drop for NicWriteScope {
    fn drop(&mut self) {
        if let Some(tell) = self.0 {
            tell(false);
        }
    }
}

fn find() -> Option<AsNicFunction> {
    // SAFETY: looks for a name in a library, if that is loaded, and keeps it; only the stand-in has the name, for a function of this type.
    unsafe {
        let library = libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD);
        if library.is_null() {
            return None;
        }
        let symbol = libc::dlsym(library, c"doorbell_cuda_standin_as_nic".as_ptr());
        std::mem::transmute::<*mut libc::c_void, Option<AsNicFunction>>(symbol)
    }
}
