//! Where a GPU finds the memory of an owner.
#![allow(unsafe_code)] // promises the driver that memory stays mapped

use std::sync::OnceLock;

use cudarc::driver::sys::CUdeviceptr;

use super::context::CudaContext;
use super::host_registration::HostRegistration;
use super::nic_registers::{is_refused, why_not};
use crate::bytecode::{At, Role};
use crate::stream::Owner;
use crate::{Error, Result, StateKind};

/// The memory of one owner as it is registered for one context. It is kept among the owner's attachments, which go before the memory.
///
/// A target is registered when a program first names it: on the proxy path no program names the UAR page, which some machines cannot map.
/// After that a lookup takes no lock.
pub(super) struct GpuMapping {
    context: CudaContext,
    /// By the number of the target.
    targets: Box<[OnceLock<MappedTarget>]>,
}

struct MappedTarget {
    _pinned: HostRegistration,
    /// The address of its first byte on the device.
    start: CUdeviceptr,
}

impl GpuMapping {
    /// The mapping of that owner's memory in that context, without targets at first.
    ///
    /// # Errors
    /// [`Error::State`] if the owner keeps no attachments.
    pub(super) fn of<'a>(owner: &'a dyn Owner, context: &CudaContext) -> Result<&'a GpuMapping> {
        let Some(attachments) = owner.attachments() else {
            return Err(Error::state(
                StateKind::Unsupported,
                "queue on a CUDA stream",
                "the owner of the program does not map its memory for a GPU",
            ));
        };
        attachments.get_or_attach(context.key(), || {
            Ok(GpuMapping {
                context: context.clone(),
                targets: owner.targets().iter().map(|_| OnceLock::new()).collect(),
            })
        })
    }

    /// The device's address of an op's memory.
    ///
    /// # Errors
    /// [`Error::State`] if the owner has no memory for the target; [`Error::Cuda`].
    pub(super) fn locate(&self, at: At, owner: &dyn Owner) -> Result<CUdeviceptr> {
        let target = self.targets.get(at.target.index() as usize);
        let target = target.ok_or_else(|| no_memory(at))?;
        let mapped = match target.get() {
            Some(mapped) => mapped,
            // Two threads may register the same pages at once, which count how often they are.
            None => {
                let mapped = self.map(at, owner)?;
                target.get_or_init(|| mapped)
            }
        };
        Ok(mapped.start.wrapping_add(at.offset))
    }

    #[cold]
    fn map(&self, at: At, owner: &dyn Owner) -> Result<MappedTarget> {
        let base = owner.base(at.target).ok_or_else(|| no_memory(at))?;
        let len_bytes = owner
            .targets()
            .iter()
            .find(|target| target.id() == at.target)
            .map_or(0, |target| target.len_bytes());
        let start = base.as_ptr().addr();
        // SAFETY: the owner's memory of that length, which lives longer than this: see `Owner::attachments`.
        let pinned = unsafe {
            HostRegistration::new_kept(
                &self.context,
                start,
                len_bytes as usize,
                owner.keeper(at.target),
            )
        };
        let pinned = pinned.map_err(|error| match at.role {
            Role::Uar => registers_error("queue on a CUDA stream", error),
            _ => error,
        })?;
        let start = pinned.device_address(start);
        Ok(MappedTarget {
            _pinned: pinned,
            start,
        })
    }
}

/// The error of a registration of a card's registers. If the driver has refused it, it names the reason and the remedy.
#[cold]
pub(crate) fn registers_error(operation: &'static str, error: Error) -> Error {
    if !is_refused(&error) {
        return error;
    }
    let why = why_not(&error);
    let reason = format!(
        "{why}; an endpoint that is made while the CUDA context is known takes the path `proxy` by itself, or open the device with `path=proxy`"
    );
    Error::state(StateKind::Unsupported, operation, reason)
}

#[cold]
fn no_memory(at: At) -> Error {
    Error::state(
        StateKind::Unsupported,
        "queue on a CUDA stream",
        format!("its owner has no memory for a target ({})", at.role.name()),
    )
}
