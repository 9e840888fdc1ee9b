//! Protection domains, and the memory registered in them.
#![allow(unsafe_code)] // calls libibverbs

use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

use super::call::{object, release};
use super::context::{Context, VerbsDevice};
use crate::{Error, Result};
use doorbell_wire::memory::Pages;
use doorbell_wire::verbs::Access;

/// A protection domain.
#[derive(Debug)]
pub(crate) struct Domain {
    pd: NonNull<rdma_sys::ibv_pd>,
    pub(super) context: Arc<Context>,
    number: u32,
}

// SAFETY: libibverbs' calls on a protection domain may come from any thread.
unsafe impl Send for Domain {}
// SAFETY: as above.
unsafe impl Sync for Domain {}

impl Domain {
    /// # Errors
    /// [`Error::System`] of `ibv_alloc_pd`.
    pub(crate) fn new(device: &VerbsDevice) -> Result<Domain> {
        let context = Arc::clone(device.context());
        // SAFETY: an open context, which the domain holds.
        let pd = object("ibv_alloc_pd", || unsafe {
            rdma_sys::ibv_alloc_pd(context.raw().as_ptr())
        })?;
        let number = context.next_domain();
        Ok(Domain {
            pd,
            context,
            number,
        })
    }

    /// A number for messages.
    pub(crate) fn number(&self) -> u32 {
        self.number
    }

    /// Whether the device is used by plain verbs: queue pairs are to be made by [`super::Relay`].
    pub(crate) fn is_plain(&self) -> bool {
        self.context.is_plain
    }

    pub(super) fn raw(&self) -> NonNull<rdma_sys::ibv_pd> {
        self.pd
    }
}

impl Drop for Domain {
    fn drop(&mut self) {
        // SAFETY: allocated in `new`, freed once; what is in it holds it.
        release("ibv_dealloc_pd", || unsafe {
            rdma_sys::ibv_dealloc_pd(self.pd.as_ptr())
        });
    }
}

/// Registered memory.
#[derive(Debug)]
pub(crate) struct MemoryRegion {
    /// `None` once it is deregistered.
    mr: Mutex<Option<Mr>>,
    lkey: u32,
    rkey: u32,
    _domain: Arc<Domain>,
}

#[derive(Debug)]
struct Mr(NonNull<rdma_sys::ibv_mr>);

// SAFETY: it is only handed to `ibv_dereg_mr`, which any thread may call.
unsafe impl Send for Mr {}

impl Drop for Mr {
    fn drop(&mut self) {
        // SAFETY: as below.
        let start = unsafe { self.0.as_ref() }.addr.addr();
        // SAFETY: registered in `MemoryRegion::new`, deregistered once.
        let is_over = release("ibv_dereg_mr", || unsafe {
            rdma_sys::ibv_dereg_mr(self.0.as_ptr())
        });
        if !is_over {
            // The device may still access the memory for peers that have the key. If the library has allocated it, nobody gets it again.
            Pages::give_up(start);
        }
    }
}

/// The library's rights have the same bits as those of verbs. If a peer may write the memory, the local side may, too: verbs requires
/// that right to be given explicitly.
fn verbs_access(access: Access) -> Access {
    if access.contains(Access::REMOTE_WRITE) || access.contains(Access::REMOTE_ATOMIC) {
        access | Access::LOCAL_WRITE
    } else {
        access
    }
}

impl MemoryRegion {
    /// Registers memory, which stays valid until the region is gone or was deregistered.
    ///
    /// # Errors
    /// [`Error::System`] of `ibv_reg_mr`.
    pub(crate) fn new(
        domain: &Arc<Domain>,
        start: NonNull<u8>,
        len_bytes: u64,
        access: Access,
    ) -> Result<MemoryRegion> {
        let len = usize::try_from(len_bytes).map_err(|_| Error::System {
            operation: "ibv_reg_mr",
            errno: libc::ENOMEM,
        })?;
        let access = verbs_access(access);
        // SAFETY: a live domain; the call only looks whether the memory is there.
        let mr = object("ibv_reg_mr", || unsafe {
            rdma_sys::ibv_reg_mr(
                domain.pd.as_ptr(),
                start.as_ptr().cast(),
                len,
                access.bits().cast_signed(),
            )
        })?;
        Ok(MemoryRegion::of(domain, mr))
    }

    /// Registers `len_bytes` of a dmabuf from `offset` on, under the address `iova`. It holds the dmabuf itself.
    ///
    /// # Errors
    /// [`Error::System`] of `ibv_reg_dmabuf_mr`: EOPNOTSUPP where the provider or the kernel's driver has none.
    pub(crate) fn dmabuf(
        domain: &Arc<Domain>,
        fd: BorrowedFd<'_>,
        offset: u64,
        len_bytes: u64,
        iova: u64,
        access: Access,
    ) -> Result<MemoryRegion> {
        let len = usize::try_from(len_bytes).map_err(|_| Error::System {
            operation: "ibv_reg_dmabuf_mr",
            errno: libc::ENOMEM,
        })?;
        let access = verbs_access(access).bits().cast_signed();
        // SAFETY: a live domain and an open descriptor; the call touches no memory of this process.
        let mr = object("ibv_reg_dmabuf_mr", || unsafe {
            rdma_sys::ibv_reg_dmabuf_mr(
                domain.pd.as_ptr(),
                offset,
                len,
                iova,
                fd.as_raw_fd(),
                access,
            )
        })?;
        Ok(MemoryRegion::of(domain, mr))
    }

    fn of(domain: &Arc<Domain>, mr: NonNull<rdma_sys::ibv_mr>) -> MemoryRegion {
        // SAFETY: just made.
        let (lkey, rkey) = unsafe { (mr.as_ref().lkey, mr.as_ref().rkey) };
        MemoryRegion {
            mr: Mutex::new(Some(Mr(mr))),
            lkey,
            rkey,
            _domain: Arc::clone(domain),
        }
    }

    pub(crate) fn lkey(&self) -> u32 {
        self.lkey
    }

    pub(crate) fn rkey(&self) -> u32 {
        self.rkey
    }

    /// Takes the memory from the device. Whether it still had it.
    pub(crate) fn deregister(&self) -> bool {
        self.mr
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take()
            .is_some()
    }
}

/// A protection domain for one queue pair, with a thread domain: to libmlx5 that means a UAR register that no other queue pair uses. Only where the
/// host has none of that kind do queue pairs share one.
#[derive(Debug)]
pub(super) struct ThreadDomainUar {
    parent: NonNull<rdma_sys::ibv_pd>,
    /// `None` if the queue pair uses the register of the context, and `parent` is the domain itself.
    thread: Option<ThreadDomain>,
    _domain: Arc<Domain>,
}

// SAFETY: libibverbs' calls on a parent domain may come from any thread; what it is for, posting without locks, is not done by
// libibverbs here.
unsafe impl Send for ThreadDomainUar {}
// SAFETY: as above.
unsafe impl Sync for ThreadDomainUar {}

#[derive(Debug)]
struct ThreadDomain(NonNull<rdma_sys::ibv_td>);

impl Drop for ThreadDomain {
    fn drop(&mut self) {
        // SAFETY: allocated in `ThreadDomainUar::new`, freed once, after the parent domain: the field stands behind it.
        release("ibv_dealloc_td", || unsafe {
            doorbell_dv_sys::doorbell_dv_dealloc_td(self.0.as_ptr())
        });
    }
}

impl ThreadDomainUar {
    /// # Errors
    /// [`Error::System`] of the verbs call.
    pub(super) fn new(domain: &Arc<Domain>) -> Result<ThreadDomainUar> {
        // SAFETY: an open context.
        let thread = object("ibv_alloc_td", || unsafe {
            doorbell_dv_sys::doorbell_dv_alloc_td(domain.context.raw().as_ptr())
        });
        let thread = match thread {
            Ok(thread) => ThreadDomain(thread),
            // The host cannot map registers write-combining, so the kernel gives none of that kind, and libmlx5 asks for no other here
            // (`MLX5_IB_METHOD_UAR_OBJ_ALLOC`, `mlx5_alloc_td`). Queue pairs then share the context's register: doorbells are single stores of 8 bytes.
            Err(Error::System { errno, .. }) if errno == libc::EOPNOTSUPP => {
                return Ok(ThreadDomainUar {
                    parent: domain.pd,
                    thread: None,
                    _domain: Arc::clone(domain),
                });
            }
            Err(error) => return Err(error),
        };
        // SAFETY: live objects of one context.
        let parent = object("ibv_alloc_parent_domain", || unsafe {
            doorbell_dv_sys::doorbell_dv_alloc_parent_domain(domain.pd.as_ptr(), thread.0.as_ptr())
        })?;
        Ok(ThreadDomainUar {
            parent,
            thread: Some(thread),
            _domain: Arc::clone(domain),
        })
    }

    pub(super) fn raw(&self) -> NonNull<rdma_sys::ibv_pd> {
        self.parent
    }
}

impl Drop for ThreadDomainUar {
    fn drop(&mut self) {
        if self.thread.is_none() {
            return;
        }
        // SAFETY: allocated in `new`, freed once, before the thread domain and the domain that it is made of. The result is 0 when the
        // queue pair is gone, and it is: it stands before this in the same object.
        release("ibv_dealloc_pd", || unsafe {
            rdma_sys::ibv_dealloc_pd(self.parent.as_ptr())
        });
    }
}
