//! The memory of an owner as a GPU reaches it.
#![allow(unsafe_code)] // promises the driver that memory stays mapped

use std::sync::{Mutex, PoisonError};

use cudarc::driver::sys::CUdeviceptr;

use super::context::CudaContext;
use super::pinned::Pinned;
use crate::peer::At;
use crate::stream::Owner;
use crate::{Error, Result};

/// The targets of one owner that programs have named so far, registered. It lies with the owner, who drops it before the memory.
pub(super) struct GpuMapping {
    context: CudaContext,
    /// By the number of the target.
    targets: Mutex<Vec<Option<Mapped>>>,
}

struct Mapped {
    pinned: Pinned,
    start: usize,
}

impl GpuMapping {
    pub(super) fn new(context: &CudaContext) -> GpuMapping {
        GpuMapping {
            context: context.clone(),
            targets: Mutex::default(),
        }
    }

    /// The device's address of an op's memory, whose target is registered with its first use: on the proxy path no program names the UAR,
    /// which may be what cannot be mapped.
    ///
    /// # Errors
    /// [`Error::State`] if the owner has no memory for the target; [`Error::Cuda`].
    pub(super) fn locate(&self, at: At, owner: &dyn Owner) -> Result<CUdeviceptr> {
        let index = at.target.index() as usize;
        let mut targets = self.targets.lock().unwrap_or_else(PoisonError::into_inner);
        if targets.len() <= index {
            targets.resize_with(index + 1, || None);
        }
        if targets[index].is_none() {
            targets[index] = Some(self.reach(at, owner)?);
        }
        let offset = usize::try_from(at.offset).unwrap_or(usize::MAX);
        match &targets[index] {
            Some(reached) => Ok(reached.pinned.device_address(reached.start + offset)),
            None => Err(no_memory(at)),
        }
    }

    fn reach(&self, at: At, owner: &dyn Owner) -> Result<Mapped> {
        let base = owner.base(at.target).ok_or_else(|| no_memory(at))?;
        let len_bytes = owner
            .targets()
            .iter()
            .find(|target| target.id() == at.target)
            .map_or(0, |target| target.len_bytes());
        let start = base.as_ptr().addr();
        // SAFETY: the owner's memory of that length, which lives longer than this: see `Owner::attachments`.
        let pinned = unsafe { Pinned::new(&self.context, start, len_bytes as usize)? };
        Ok(Mapped { pinned, start })
    }
}

#[cold]
fn no_memory(at: At) -> Error {
    Error::State {
        operation: "queue on a CUDA stream",
        reason: format!("its owner has no memory for a target ({})", at.role.name()),
    }
}
