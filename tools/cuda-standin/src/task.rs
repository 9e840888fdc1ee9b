//! What a stream's thread does, and what a node of a graph does.

use std::ffi::c_void;

use crate::call::{CudaResult, as_host_function};
use crate::life::ContextLife;
use crate::mark::StreamMark;

/// CUgraphNodeType.
pub mod node_type {
    pub const KERNEL: u32 = 0;
    pub const COPY: u32 = 1;
    pub const FILL: u32 = 2;
    pub const HOST: u32 = 3;
    pub const GRAPH: u32 = 4;
    pub const EMPTY: u32 = 5;
    pub const MEMOPS: u32 = 12;
}

pub trait Task: Send + Sync {
    /// An error ends all work of the context. So does the end of the context's life, for which whatever waits looks.
    fn run(&self, life: &ContextLife) -> CudaResult;

    /// Whether it is a wait: nothing that was queued later in its work queue begins before its end. Anything else stops a work queue only until it begins.
    fn holds_work_queue(&self) -> bool {
        false
    }

    /// How many places of its stream's queue it has until it is done.
    fn places(&self) -> u64 {
        1
    }

    /// What is reached with its end.
    fn end(&self) -> Option<&StreamMark> {
        None
    }

    /// Of the node that it is captured as.
    fn node_type(&self) -> u32 {
        node_type::EMPTY
    }

    /// The id of the context that a node keeps when it is given another task.
    fn context(&self) -> Option<u64> {
        None
    }
}

/// A function of the program with its argument.
pub struct HostCallback {
    pub function: unsafe extern "C" fn(*mut c_void),
    pub argument: *mut c_void,
}

// SAFETY: the program gave both for a call on a thread of the driver.
unsafe impl Send for HostCallback {}
// SAFETY: as above.
unsafe impl Sync for HostCallback {}

impl Task for HostCallback {
    fn run(&self, _life: &ContextLife) -> CudaResult {
        // SAFETY: the program answers for what it gave to cuLaunchHostFunc.
        as_host_function(|| unsafe { (self.function)(self.argument) });
        Ok(())
    }

    fn node_type(&self) -> u32 {
        node_type::HOST
    }
}
