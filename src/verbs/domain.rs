//! Protection domains, and the memory registered in them.
#![allow(unsafe_code)] // calls libibverbs

use std::ffi::c_void;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::{NonNull, null, null_mut};
use std::sync::{Arc, Mutex, PoisonError};

use super::address_table::AddressTable;
use super::adopted::KeptAlive;
use super::call::{deregister, object, release};
use super::context::{Context, QUEUE_MEMORY, VerbsDevice};
use crate::{Error, Result};
use doorbell_wire::memory::Pages;
use doorbell_wire::verbs::Access;

/// A protection domain.
#[derive(Debug)]
pub(crate) struct Domain {
    pd: NonNull<rdma_sys::ibv_pd>,
    /// Set for a domain that was allocated elsewhere, and is freed there. Before the context, whose owner may be dropped with it.
    adopted: Option<KeptAlive>,
    pub(super) context: Arc<Context>,
    /// The address handles that work requests of relays name.
    pub(super) addresses: Arc<AddressTable>,
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
            adopted: None,
            context,
            addresses: Arc::default(),
            number,
        })
    }

    /// Uses a domain that was allocated elsewhere: a plain one or a parent domain.
    ///
    /// # Safety
    /// It is an `ibv_pd`, and stays one until `owner` is dropped.
    ///
    /// # Errors
    /// [`Error::Foreign`] if it is of another context than the device.
    pub(crate) unsafe fn adopt(
        device: &VerbsDevice,
        pd: NonNull<c_void>,
        owner: KeptAlive,
    ) -> Result<Domain> {
        let context = Arc::clone(device.context());
        let pd = pd.cast::<rdma_sys::ibv_pd>();
        // SAFETY: the caller's promise.
        let of = unsafe { doorbell_dv_sys::doorbell_dv_pd_context(pd.as_ptr()) };
        if of != context.raw().as_ptr() {
            return Err(Error::Foreign {
                argument: "pd",
                found: format!("a protection domain of the context {of:p}"),
                expected: format!("one of the context {:p}", context.raw()),
            });
        }
        let number = context.next_domain();
        Ok(Domain {
            pd,
            adopted: Some(owner),
            context,
            addresses: Arc::default(),
            number,
        })
    }

    /// Whether memory that was registered in `pd` can be used in this domain: the kernel has both for the same one.
    ///
    /// # Safety
    /// `pd` is null or an `ibv_pd`.
    unsafe fn has_memory_of(&self, pd: *const rdma_sys::ibv_pd) -> bool {
        if pd.is_null() {
            return false;
        }
        // SAFETY: the caller's promise, and a live domain.
        let of = |pd| unsafe {
            (
                doorbell_dv_sys::doorbell_dv_pd_context(pd),
                doorbell_dv_sys::doorbell_dv_pd_handle(pd),
            )
        };
        of(pd) == of(self.pd.as_ptr())
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
        if self.adopted.is_some() {
            return;
        }
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

impl Mr {
    /// Deregisters it; after a success it is not to be used, nor dropped.
    fn end(&self) -> Result<()> {
        // SAFETY: registered in `MemoryRegion::new`, and not deregistered yet.
        deregister(|| unsafe { rdma_sys::ibv_dereg_mr(self.0.as_ptr()) })
    }
}

impl Drop for Mr {
    fn drop(&mut self) {
        // SAFETY: it is registered.
        let start = unsafe { self.0.as_ref() }.addr.addr();
        if self.end().is_err() {
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
    ///
    /// # Errors
    /// [`Error::System`](crate::Error::System) if the device refuses: it still has the memory, and the next call asks again.
    pub(crate) fn deregister(&self) -> Result<bool> {
        let mut mr = self.mr.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(registered) = &*mr else {
            return Ok(false);
        };
        registered.end()?;
        std::mem::forget(mr.take());
        Ok(true)
    }
}

/// Memory that another part of the process has registered, as work requests name it (feature `verbs`). See `Region::from_keys`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryKeys {
    /// The address by which work requests name the first byte.
    pub start: u64,
    /// Length in bytes.
    pub len_bytes: u64,
    /// The key for work requests of this side; 0 if it is not known.
    pub lkey: u32,
    /// The key for those of peers; 0 if it is not known.
    pub rkey: u32,
}

/// Memory that was registered elsewhere, and is deregistered there.
#[derive(Debug)]
pub(crate) struct AdoptedMemory {
    _owner: KeptAlive,
    /// Behind the owner, which may free what the domain has.
    _domain: Arc<Domain>,
}

impl AdoptedMemory {
    pub(crate) fn new(domain: &Arc<Domain>, owner: KeptAlive) -> AdoptedMemory {
        AdoptedMemory {
            _owner: owner,
            _domain: Arc::clone(domain),
        }
    }

    /// The range and keys of an `ibv_mr`.
    ///
    /// # Safety
    /// It is an `ibv_mr`, which is registered.
    ///
    /// # Errors
    /// [`Error::Foreign`] if it is registered in another protection domain.
    pub(crate) unsafe fn keys(domain: &Domain, mr: NonNull<c_void>) -> Result<MemoryKeys> {
        // SAFETY: the caller's promise.
        let mr = unsafe { mr.cast::<rdma_sys::ibv_mr>().as_ref() };
        // SAFETY: the domain of registered memory.
        if !unsafe { domain.has_memory_of(mr.pd) } {
            return Err(Error::Foreign {
                argument: "mr",
                found: format!("memory registered in the protection domain {:p}", mr.pd),
                expected: format!("memory of the protection domain {:p}", domain.pd),
            });
        }
        Ok(MemoryKeys {
            start: mr.addr.addr() as u64,
            len_bytes: mr.length as u64,
            lkey: mr.lkey,
            rkey: mr.rkey,
        })
    }
}

/// A protection domain for one queue pair, with a thread domain: to libmlx5 that means a UAR register that no other queue pair uses. Only where the
/// host has none of that kind do queue pairs share one. On an adopted context it also says where the memory of queues comes from.
#[derive(Debug)]
pub(super) struct ThreadDomainUar {
    /// `None` if queue pairs are made in the domain itself.
    parent: Option<ParentDomain>,
    /// `None` if the queue pair uses the register of the context.
    _thread: Option<ThreadDomain>,
    domain: Arc<Domain>,
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

#[derive(Debug)]
struct ParentDomain(NonNull<rdma_sys::ibv_pd>);

impl Drop for ParentDomain {
    fn drop(&mut self) {
        // SAFETY: allocated in `ThreadDomainUar::new`, freed once, before the thread domain and the domain that it is made of. The result is 0 when the
        // queue pair is gone, and it is: it stands before this in the same object.
        release("ibv_dealloc_pd", || unsafe {
            rdma_sys::ibv_dealloc_pd(self.0.as_ptr())
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
            Ok(thread) => Some(ThreadDomain(thread)),
            // The host cannot map registers write-combining, so the kernel gives none of that kind, and libmlx5 asks for no other here
            // (`MLX5_IB_METHOD_UAR_OBJ_ALLOC`, `mlx5_alloc_td`). Queue pairs then share the context's register: doorbells are single stores of 8 bytes.
            Err(Error::System { errno, .. }) if errno == libc::EOPNOTSUPP => None,
            Err(error) => return Err(error),
        };
        let allocator = domain
            .context
            .is_adopted()
            .then_some(&raw const QUEUE_MEMORY);
        let parent = if thread.is_none() && allocator.is_none() {
            None
        } else {
            let td = thread.as_ref().map_or(null_mut(), |td| td.0.as_ptr());
            // SAFETY: live objects of one context, or none; the allocator is static.
            Some(ParentDomain(object(
                "ibv_alloc_parent_domain",
                || unsafe {
                    doorbell_dv_sys::doorbell_dv_alloc_parent_domain(
                        domain.pd.as_ptr(),
                        td,
                        allocator.unwrap_or(null()),
                    )
                },
            )?))
        };
        Ok(ThreadDomainUar {
            parent,
            _thread: thread,
            domain: Arc::clone(domain),
        })
    }

    pub(super) fn raw(&self) -> NonNull<rdma_sys::ibv_pd> {
        self.parent
            .as_ref()
            .map_or(self.domain.pd, |parent| parent.0)
    }

    /// The parent domain that completion queues are to be made with, if they need one for their memory.
    pub(super) fn for_cqs(&self) -> Option<NonNull<rdma_sys::ibv_pd>> {
        let parent = self.parent.as_ref()?;
        self.domain.context.is_adopted().then_some(parent.0)
    }
}
