//! Registered memory.
#![allow(unsafe_code)] // memory that a device writes while Rust code holds handles of it

use std::any::Any;
use std::fmt;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::bytecode::{Role, Target, Targets};
#[cfg(feature = "cuda")]
use crate::cuda::HeldBuffer;
use crate::nic::{Access, Pages, RegisteredMemory};
use crate::proxy::execute_elsewhere;
use crate::region::copy::{copy_between, copy_from, copy_to};
use crate::region::element::{Element, bytes_of, bytes_of_mut};
use crate::region::huge::{HugePages, PageSize};
use crate::region::mapping::{self, Backing};
use crate::region::{ProtectionDomain, RegionKind, RemoteRegion};
use crate::stream::{Attachments, DeferredDrop, KernelMemory};
use crate::{Error, Result, StateKind};

/// The longest region: 1 TiB.
pub const REGION_BYTES_MAX: u64 = 1 << 40;

/// The longest slice, as a data segment of a WQE can name it: 2 GiB less one byte.
const SLICE_BYTES_MAX: u64 = (1 << 31) - 1;

/// How many registrations this process has made.
static REGISTRATIONS: AtomicU64 = AtomicU64::new(1);

/// Memory that a region holds.
pub(super) enum OwnedMemory {
    /// None: the memory belongs to the application.
    Nothing,
    Pages {
        _held: Pages,
    },
    Huge(HugePages),
    /// None, and the registration belongs to the application, too. Its owner may do anything when it is dropped.
    #[cfg(feature = "verbs")]
    Adopted,
    /// Dropping this frees the memory.
    Kept {
        _owner: Box<dyn Any + Send + Sync>,
    },
    /// Of a GPU.
    #[cfg(feature = "cuda")]
    Device {
        held: HeldBuffer,
    },
}

impl OwnedMemory {
    /// Whether the memory stays until the region is dropped. Otherwise the application may free it, or use it for something else, as soon as the last
    /// handle is gone.
    fn is_of_library(&self) -> bool {
        match self {
            OwnedMemory::Nothing => false,
            // There is nothing to deregister.
            #[cfg(feature = "verbs")]
            OwnedMemory::Adopted => true,
            OwnedMemory::Pages { .. } | OwnedMemory::Huge(_) | OwnedMemory::Kept { .. } => true,
            #[cfg(feature = "cuda")]
            OwnedMemory::Device { held } => held.is_of_library(),
        }
    }
}

struct Registered {
    /// Before the memory that it is about.
    attachments: Attachments,
    id: u64,
    domain: ProtectionDomain,
    /// Null only of memory that is not [`RegionKind::Host`]: devices may name its first byte by the address 0.
    start: *mut u8,
    len_bytes: u64,
    lkey: u32,
    registration: RegisteredMemory,
    /// Whether work requests may name it.
    alive: AtomicBool,
    /// Whether the device has given it up. Held while it is asked to, which may take long.
    has_ended: Mutex<bool>,
    access: Access,
    kind: RegionKind,
    targets: Targets,
    target: Target,
    /// The memory itself, if the region owns it; freed after the key is gone, see `drop`.
    own: OwnedMemory,
}

// SAFETY: this process reaches the region's memory by atomics only, from whatever thread, and the device as hardware would.
unsafe impl Send for Registered {}
// SAFETY: as above.
unsafe impl Sync for Registered {}

/// Memory that is never freed, because a device refused to deregister it. In a list, so that leak checkers do not take it for lost.
static HELD_BY_DEVICES: Mutex<Vec<OwnedMemory>> = Mutex::new(Vec::new());

impl Drop for Registered {
    fn drop(&mut self) {
        self.end();
    }
}

impl Registered {
    fn end(&mut self) {
        let has_ended = self.has_ended.get_mut();
        if !*has_ended.unwrap_or_else(PoisonError::into_inner)
            && self.registration.deregister().is_err()
        {
            // The device may still access the memory for peers that have the key.
            HELD_BY_DEVICES
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .push(std::mem::replace(&mut self.own, OwnedMemory::Nothing));
        }
    }
}

/// Memory registered with a device. Clones are handles of the same region; it is deregistered, and its memory freed, when
/// the last handle is gone, and work requests, queued programs and the like hold one until the device is done with them.
/// If that handle is a work request's, memory that the library allocated is deregistered by another thread, shortly after the completion.
/// [`Region::deregister`] ends a peer's access before it returns.
///
/// The device, and through it a peer, may write the memory at any time. Therefore no Rust reference to it is ever given
/// out: [`Region::read`] and [`Region::write`] copy, and what they copy while a transfer is under way is as torn as with
/// any NIC. [`Region::load_u32`] and [`Region::store_u32`] are single accesses with acquire and release order. For memory that is
/// not [`RegionKind::Host`] all these fail with [`Error::State`].
#[derive(Clone)]
pub struct Region {
    inner: Arc<Registered>,
}

impl Region {
    /// Allocates `len_bytes` of zeroed, page-aligned host memory and registers it.
    ///
    /// The CUDA driver may know the memory already, because the library uses memory again that it cannot unregister yet: `cuMemHostRegister` then returns
    /// `CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED`. `Region::device_address` gives its address for a GPU.
    ///
    /// # Errors
    /// [`Error::Range`] for a length of 0 or over [`REGION_BYTES_MAX`]; [`Error::State`] when the device takes no more.
    pub fn alloc(domain: &ProtectionDomain, len_bytes: u64, access: Access) -> Result<Region> {
        check_len(len_bytes)?;
        let pages = Pages::new(len_bytes as usize)?;
        let start = pages.start();
        Region::new(
            domain,
            start,
            len_bytes,
            access,
            OwnedMemory::Pages { _held: pages },
        )
    }

    /// As [`Region::alloc`], in huge pages of 2 MiB where the system has some set aside (`vm.nr_hugepages`), so that a device needs fewer
    /// translations. Where it has none or too few, in ordinary pages, of which the kernel is asked to make huge ones if it can
    /// (`MADV_HUGEPAGE`). [`Region::page_size`] says which it is.
    ///
    /// # Errors
    /// As [`Region::alloc`]. Missing huge pages are not an error.
    pub fn alloc_huge(domain: &ProtectionDomain, len_bytes: u64, access: Access) -> Result<Region> {
        check_len(len_bytes)?;
        let pages = HugePages::new(len_bytes as usize)?;
        let start = pages.start();
        Region::new(domain, start, len_bytes, access, OwnedMemory::Huge(pages))
    }

    /// Drops this handle. If it is the last, returns what is to be dropped: deregistering memory may block.
    pub(crate) fn into_deferred_drop(self) -> Option<DeferredDrop> {
        Arc::into_inner(self.inner).map(|last| Box::new(last) as DeferredDrop)
    }

    #[cfg(feature = "cuda")]
    pub(super) fn own(&self) -> &OwnedMemory {
        &self.inner.own
    }

    /// The kind of pages that the memory is in. It is not known for memory that this library did not allocate.
    pub fn page_size(&self) -> PageSize {
        match &self.inner.own {
            OwnedMemory::Nothing | OwnedMemory::Kept { .. } => PageSize::Unknown,
            #[cfg(feature = "verbs")]
            OwnedMemory::Adopted => PageSize::Unknown,
            #[cfg(feature = "cuda")]
            OwnedMemory::Device { .. } => PageSize::Unknown,
            OwnedMemory::Pages { .. } => PageSize::Ordinary,
            OwnedMemory::Huge(pages) => pages.page_size(),
        }
    }

    /// Registers `len_bytes` of memory that the application owns.
    ///
    /// Before the registration, the kind of memory is looked up in `/proc/self/maps`. Private and shared anonymous memory, memfd, tmpfs,
    /// hugetlbfs and private mappings of files are registered. Refused are a shared mapping of a file of any other file system (see the
    /// error for why), memory that is not mapped, or not readable, or not writable when `access` lets the device write, secret
    /// memory, and the part of a mapping that lies behind the end of its file.
    ///
    /// # Safety
    /// Until the last handle is gone, those of work in flight and of streams included, the memory is valid for reads and writes,
    /// and no Rust reference to it is alive while a transfer or a call of this region uses it. [`Region::deregister`] takes the
    /// memory from the device, but not from other handles.
    ///
    /// # Errors
    /// As [`Region::alloc`]; [`Error::State`] naming the range that cannot be registered, and why.
    pub unsafe fn register(
        domain: &ProtectionDomain,
        start: NonNull<u8>,
        len_bytes: u64,
        access: Access,
    ) -> Result<Region> {
        Region::look(start, len_bytes, access)?;
        // SAFETY: the caller's promise.
        unsafe { Region::register_looked_at(domain, start, len_bytes, access) }
    }

    /// As [`Region::register`], for memory that dropping `owner` frees: a handle of another library's array, for instance. `owner` is dropped after the
    /// memory is deregistered, when the last handle is gone, those of work in flight and of streams included. Any thread may drop it, also one of this library.
    /// If the call fails, `owner` is dropped as well.
    ///
    /// # Safety
    /// The memory is valid for reads and writes as long as `owner`. No Rust reference to it is alive while a transfer or a call of this region uses it.
    ///
    /// # Errors
    /// As [`Region::register`].
    pub unsafe fn register_from_owner(
        domain: &ProtectionDomain,
        start: NonNull<u8>,
        len_bytes: u64,
        access: Access,
        owner: Box<dyn Any + Send + Sync>,
    ) -> Result<Region> {
        Region::look(start, len_bytes, access)?;
        let own = OwnedMemory::Kept { _owner: owner };
        Region::new(domain, start, len_bytes, access, own)
    }

    /// A part of this region as a region of its own, which keeps this one and `owner`. It uses the same keys: [`Region::deregister`] takes the part from new work
    /// requests of this side, and nothing from the device.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`], [`Error::Range`] for the length.
    pub(super) fn part_with_owner(
        &self,
        offset: u64,
        len_bytes: u64,
        owner: Box<dyn Any + Send + Sync>,
    ) -> Result<Region> {
        check_len(len_bytes)?;
        let start = self.host("offset", offset, len_bytes)?;
        let start = NonNull::new(start).unwrap_or(self.start());
        let registration = &self.inner.registration;
        Ok(Region::of(
            &self.inner.domain,
            RegisteredMemory::of_other(registration.lkey(), registration.rkey()),
            start,
            len_bytes,
            self.inner.access,
            RegionKind::Host,
            // The registration goes before the memory.
            OwnedMemory::Kept {
                _owner: Box::new((self.clone(), owner)),
            },
        ))
    }

    /// [`Region::register`] of memory that [`Region::look`] finds nothing wrong with.
    ///
    /// # Safety
    /// As [`Region::register`].
    ///
    /// # Errors
    /// As [`Region::alloc`].
    pub(super) unsafe fn register_looked_at(
        domain: &ProtectionDomain,
        start: NonNull<u8>,
        len_bytes: u64,
        access: Access,
    ) -> Result<Region> {
        Region::new(domain, start, len_bytes, access, OwnedMemory::Nothing)
    }

    /// The kind of memory that the library did not allocate.
    ///
    /// # Errors
    /// [`Error::Range`] for the length; [`Error::State`] naming the range that cannot be registered, and why.
    pub(super) fn look(start: NonNull<u8>, len_bytes: u64, access: Access) -> Result<Backing> {
        check_len(len_bytes)?;
        let writes = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_ATOMIC;
        let writable = access.bits() & writes.bits() != 0;
        let addr = start.as_ptr().expose_provenance() as u64;
        mapping::look(addr, len_bytes, writable)
    }

    fn new(
        domain: &ProtectionDomain,
        start: NonNull<u8>,
        len_bytes: u64,
        access: Access,
        own: OwnedMemory,
    ) -> Result<Region> {
        let on_device = domain.on_device()?;
        let registration = on_device.register(start, len_bytes, access)?;
        Ok(Region::of(
            domain,
            registration,
            start,
            len_bytes,
            access,
            RegionKind::Host,
            own,
        ))
    }

    /// A registration that was made. What is not [`RegionKind::Host`] is never loaded from or stored to here.
    pub(super) fn of(
        domain: &ProtectionDomain,
        registration: RegisteredMemory,
        start: NonNull<u8>,
        len_bytes: u64,
        access: Access,
        kind: RegionKind,
        own: OwnedMemory,
    ) -> Region {
        let start = start.as_ptr();
        Region::at(domain, registration, start, len_bytes, access, kind, own)
    }

    /// As [`Region::of`], of memory whose first byte may have the address 0, which host memory never has.
    pub(super) fn at(
        domain: &ProtectionDomain,
        registration: RegisteredMemory,
        start: *mut u8,
        len_bytes: u64,
        access: Access,
        kind: RegionKind,
        own: OwnedMemory,
    ) -> Region {
        let mut targets = Targets::new();
        let target = targets.register("region", Role::Memory, len_bytes);
        let inner = Registered {
            attachments: Attachments::default(),
            id: REGISTRATIONS.fetch_add(1, Ordering::Relaxed),
            domain: domain.clone(),
            start,
            len_bytes,
            lkey: registration.lkey(),
            registration,
            alive: AtomicBool::new(true),
            has_ended: Mutex::default(),
            access,
            kind,
            targets,
            target,
            own,
        };
        Region {
            inner: Arc::new(inner),
        }
    }

    /// The kind of memory, and how the device accesses it.
    pub fn kind(&self) -> RegionKind {
        self.inner.kind
    }

    /// Fails unless this process can load and store the memory.
    pub(crate) fn check_host(&self) -> Result<()> {
        match self.inner.kind {
            RegionKind::Host => Ok(()),
            kind => Err(Error::state(
                StateKind::Memory,
                "region",
                format!("the CPU cannot access this memory ({kind})"),
            )),
        }
    }

    /// The place at an offset, for a kernel.
    pub(crate) fn kernel_memory(&self, offset: u64) -> KernelMemory<'_> {
        #[cfg(feature = "cuda")]
        let context = match &self.inner.own {
            OwnedMemory::Device { held } => Some(held.context().key()),
            _ => None,
        };
        #[cfg(not(feature = "cuda"))]
        let context = None;
        let is_host = self.inner.kind == RegionKind::Host;
        KernelMemory {
            attachments: is_host.then_some(&self.inner.attachments),
            start: self.start(),
            context,
            len_bytes: self.inner.len_bytes as usize,
            offset,
        }
    }

    /// The protection domain.
    #[inline]
    pub fn domain(&self) -> &ProtectionDomain {
        &self.inner.domain
    }

    /// Length in bytes.
    #[inline]
    pub fn len_bytes(&self) -> u64 {
        self.inner.len_bytes
    }

    /// The first byte, for foreign interfaces, which are responsible for what they do with it. For memory that is not [`RegionKind::Host`], this is
    /// the device's address of it, which is null for adopted memory that begins at the address 0.
    #[inline]
    pub fn as_ptr(&self) -> *mut u8 {
        self.inner.start
    }

    /// The key by which local work requests name the region.
    #[inline]
    pub fn lkey(&self) -> u32 {
        self.inner.lkey
    }

    /// The number of this registration, which is unique in this process; keys are used again.
    pub fn id(&self) -> u64 {
        self.inner.id
    }

    /// How many handles there are, those of work in flight included.
    pub(crate) fn handles(&self) -> usize {
        Arc::strong_count(&self.inner)
    }

    /// The access rights of the registration.
    pub fn access(&self) -> Access {
        self.inner.access
    }

    /// What a peer needs to read or write this region.
    pub fn remote(&self) -> RemoteRegion {
        RemoteRegion {
            addr: self.as_ptr() as u64,
            rkey: self.inner.registration.rkey(),
            len_bytes: self.inner.len_bytes,
        }
    }

    /// Deregisters the region: its keys are invalid when this returns, also for work in flight, which then fails. The
    /// memory stays until the last handle is gone. Returns whether the region was still registered. If another thread is
    /// deregistering it, waits for that. It is a command of the device, for which the kernel's driver waits as long as it takes: mlx5 gives up after 60 s.
    ///
    /// With the feature `verbs`, a region can have the registration of another part of the process (`Region::from_ibv_mr`, `Region::from_keys`). Then this
    /// call only keeps the region out of later work requests. Its keys stay valid, and the device goes on with work in flight.
    ///
    /// # Errors
    /// [`Error::System`] if the device refuses. Later work requests cannot name the region, but its keys stay valid: peers may still read and write the memory, which must not be
    /// used for anything else. The next call asks again, and so does the drop of the last handle. If that is refused, too, memory that the region owns is never freed. A drop reports
    /// nothing, so before an application frees memory that peers may write, it makes this call.
    pub fn deregister(&self) -> Result<bool> {
        // A caller that is told that it was done already may rely on that as well.
        let mut has_ended = (self.inner.has_ended.lock()).unwrap_or_else(PoisonError::into_inner);
        // Release: for threads that only load it.
        self.inner.alive.store(false, Ordering::Release);
        if *has_ended {
            return Ok(false);
        }
        let was_registered = self.inner.registration.deregister()?;
        *has_ended = true;
        Ok(was_registered)
    }

    /// Whether the region has not been deregistered.
    #[inline]
    pub fn is_registered(&self) -> bool {
        self.inner.alive.load(Ordering::Acquire)
    }

    /// The address of bytes that this process is about to load or store.
    fn host(&self, argument: &'static str, offset: u64, len_bytes: u64) -> Result<*mut u8> {
        self.check_host()?;
        self.check(argument, offset, len_bytes)
    }

    fn check(&self, argument: &'static str, offset: u64, len_bytes: u64) -> Result<*mut u8> {
        let limit_bytes = self.inner.len_bytes;
        if offset <= limit_bytes && len_bytes <= limit_bytes - offset {
            Ok(self.as_ptr().wrapping_add(offset as usize))
        } else {
            Err(Error::OutOfBounds {
                argument,
                offset,
                len_bytes,
                limit_bytes,
                what: "the region",
            })
        }
    }

    /// Copies bytes into the region. Others may read or write them at the same time: what they see, or leave, is then some mixture of old and new bytes.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`]; [`Error::State`] if it is memory of a GPU that the CPU cannot access.
    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        let at = self.host("bytes", offset, bytes.len() as u64)?;
        // SAFETY: within the region, which is alive.
        unsafe { copy_to(at, bytes) };
        Ok(())
    }

    /// Copies bytes out of the region. Others may write them at the same time, as for [`Region::write`].
    ///
    /// # Errors
    /// As [`Region::write`].
    pub fn read(&self, offset: u64, bytes: &mut [u8]) -> Result<()> {
        let at = self.host("bytes", offset, bytes.len() as u64)?;
        // SAFETY: within the region, which is alive.
        unsafe { copy_from(at, bytes) };
        Ok(())
    }

    /// Copies the bytes of a slice to the byte `offset` of this region, in this thread and without a NIC. The slice may be one of this region. If both overlap, the bytes there
    /// are some mixture afterwards.
    ///
    /// ```
    /// # #[cfg(feature = "softcx")]
    /// # fn main() -> doorbell::Result<()> {
    /// # use doorbell::{Access, Device, Region};
    /// # let domain = Device::open("softcx")?.protection_domain();
    /// let slot = Region::alloc(&domain, 64, Access::LOCAL_WRITE)?;
    /// let tensor = Region::alloc(&domain, 4096, Access::ALL)?;
    /// slot.fill(0, 64, 7)?;
    /// tensor.copy_from(128, slot.slice(0, 64)?)?;
    /// assert!(tensor.is_filled_with(128, 64, 7)?);
    /// # Ok(())
    /// # }
    /// # #[cfg(not(feature = "softcx"))]
    /// # fn main() {}
    /// ```
    ///
    /// # Errors
    /// As [`Region::write`], for either region.
    pub fn copy_from(&self, offset: u64, from: Slice<'_>) -> Result<()> {
        let to = self.host("bytes", offset, from.len_bytes.into())?;
        let at = from
            .region
            .host("from", from.offset, from.len_bytes.into())?;
        // SAFETY: within the regions, which are alive.
        unsafe { copy_between(at, to, from.len_bytes as usize) };
        Ok(())
    }

    /// Copies numbers into the region, from the byte `offset` on, in host byte order. `offset` needs no alignment.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`].
    pub fn write_values<T: Element>(&self, offset: u64, values: &[T]) -> Result<()> {
        self.write(offset, bytes_of(values))
    }

    /// Copies numbers out of the region, as [`Region::write_values`] copies them in.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`].
    pub fn read_values<T: Element>(&self, offset: u64, values: &mut [T]) -> Result<()> {
        self.read(offset, bytes_of_mut(values))
    }

    /// Numbers where they lie in the region, from the byte `offset` on, in host byte order: what [`Region::read_values`] copies, without the copy.
    ///
    /// ```
    /// # #[cfg(feature = "softcx")]
    /// # fn main() -> doorbell::Result<()> {
    /// use doorbell::{Access, Device, Region};
    ///
    /// let domain = Device::open("softcx")?.protection_domain();
    /// let [received, sums] = [(); 2].map(|()| Region::alloc(&domain, 4096, Access::ALL));
    /// let (received, sums) = (received?, sums?);
    /// received.write_values(0, &[1.5_f32, 2.5])?;
    /// // SAFETY: no work request uses the regions, and there is no other slice of them.
    /// let (received, sums) = unsafe { (received.values::<f32>(0, 2)?, sums.values_mut::<f32>(0, 2)?) };
    /// for (sum, value) in sums.iter_mut().zip(received) {
    ///     *sum += value;
    /// }
    /// assert_eq!(sums, [1.5, 2.5]);
    /// # Ok(())
    /// # }
    /// # #[cfg(not(feature = "softcx"))]
    /// # fn main() {}
    /// ```
    ///
    /// # Safety
    /// While the slice is in use, nothing writes these bytes: no peer, device or stream, no other call of this process. A receive or read into them
    /// has completed, and its ticket or wait has been observed.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`]; [`Error::Alignment`] if the address is not a multiple of the size of a number; [`Error::State`] if the CPU cannot
    /// access the memory.
    pub unsafe fn values<T: Element>(&self, offset: u64, len: usize) -> Result<&[T]> {
        let at = self.aligned("len", offset, values_bytes::<T>(len))?;
        // SAFETY: aligned and within the region, which lives as long as `self`. Any bytes are a value, and the caller promises that they do not change.
        Ok(unsafe { std::slice::from_raw_parts(at, len) })
    }

    /// Numbers where they lie in the region, to be written: as [`Region::values`].
    ///
    /// # Safety
    /// While the slice is in use, nothing else reads or writes these bytes: no peer, device or stream, no other call of this process. A send or write
    /// from them has completed.
    ///
    /// # Errors
    /// As [`Region::values`].
    #[allow(clippy::mut_from_ref)] // a region is shared memory: the caller promises that the slice is the only access
    pub unsafe fn values_mut<T: Element>(&self, offset: u64, len: usize) -> Result<&mut [T]> {
        let at = self.aligned("len", offset, values_bytes::<T>(len))?;
        // SAFETY: as in `values`, and the caller promises that there is no other access.
        Ok(unsafe { std::slice::from_raw_parts_mut(at, len) })
    }

    /// Sets `len_bytes` to one value.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`].
    pub fn fill(&self, offset: u64, len_bytes: u64, value: u8) -> Result<()> {
        let at = self.host("len_bytes", offset, len_bytes)?;
        let word = [value; 64];
        for start in (0..len_bytes as usize).step_by(word.len()) {
            let piece = word.len().min(len_bytes as usize - start);
            // SAFETY: within the region, which is alive.
            unsafe { copy_to(at.add(start), &word[..piece]) };
        }
        Ok(())
    }

    /// Whether `len_bytes` from `offset` on equal `expected` repeated, without copying them out.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`].
    pub fn is_filled_with(&self, offset: u64, len_bytes: u64, expected: u8) -> Result<bool> {
        let at = self.host("len_bytes", offset, len_bytes)?;
        // SAFETY: within the region; single bytes are read, as atomics, because a device may be writing them.
        Ok((0..len_bytes as usize)
            .all(|i| unsafe { AtomicU8::from_ptr(at.add(i)) }.load(Ordering::Relaxed) == expected))
    }

    /// The address of numbers that are accessed where they lie.
    fn aligned<T>(&self, argument: &'static str, offset: u64, len_bytes: u64) -> Result<*mut T> {
        let at = self.host(argument, offset, len_bytes)?.cast::<T>();
        if !at.is_aligned() {
            self.check_aligned("offset", offset, align_of::<T>() as u64)?;
        }
        Ok(at)
    }

    /// Checks the offset of a word that a stream or a kernel accesses, and the word's address: the memory of a region may start anywhere.
    ///
    /// # Errors
    /// [`Error::Alignment`], of `argument` if it is the offset, of the address if only that is not aligned.
    pub(crate) fn check_aligned(
        &self,
        argument: &'static str,
        offset: u64,
        align: u64,
    ) -> Result<()> {
        let address = (self.inner.start.addr() as u64).wrapping_add(offset);
        for (argument, value) in [(argument, offset), ("address", address)] {
            if !value.is_multiple_of(align) {
                return Err(Error::Alignment {
                    argument,
                    value,
                    align,
                });
            }
        }
        Ok(())
    }

    fn word(&self, offset: u64) -> Result<&AtomicU32> {
        let at = self.aligned("offset", offset, 4)?;
        // SAFETY: aligned and within the region, which lives as long as `self`; accesses by the device are as by atomics.
        Ok(unsafe { AtomicU32::from_ptr(at) })
    }

    fn wide_word(&self, offset: u64) -> Result<&AtomicU64> {
        let at = self.aligned("offset", offset, 8)?;
        // SAFETY: as in `word`.
        Ok(unsafe { AtomicU64::from_ptr(at) })
    }

    /// Loads a 32-bit word with acquire order: what a peer or a stream stored before it is visible afterwards.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`], [`Error::Alignment`].
    pub fn load_u32(&self, offset: u64) -> Result<u32> {
        Ok(self.word(offset)?.load(Ordering::Acquire))
    }

    /// Stores a 32-bit word with release order.
    ///
    /// # Errors
    /// As [`Region::load_u32`].
    pub fn store_u32(&self, offset: u64, value: u32) -> Result<()> {
        self.word(offset)?.store(value, Ordering::Release);
        Ok(())
    }

    /// Loads a 64-bit word with acquire order.
    ///
    /// # Errors
    /// As [`Region::load_u32`].
    pub fn load_u64(&self, offset: u64) -> Result<u64> {
        Ok(self.wide_word(offset)?.load(Ordering::Acquire))
    }

    /// Stores a 64-bit word with release order.
    ///
    /// # Errors
    /// As [`Region::load_u32`].
    pub fn store_u64(&self, offset: u64, value: u64) -> Result<()> {
        self.wide_word(offset)?.store(value, Ordering::Release);
        Ok(())
    }

    /// A part of the region for a work request.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`]; [`Error::Range`] for 2 GiB and more.
    #[inline]
    pub fn slice(&self, offset: u64, len_bytes: u64) -> Result<Slice<'_>> {
        self.check("slice", offset, len_bytes)?;
        if len_bytes > SLICE_BYTES_MAX {
            return Err(Error::Range {
                argument: "len_bytes",
                value: len_bytes,
                min: 0,
                max: SLICE_BYTES_MAX,
            });
        }
        Ok(Slice {
            region: self,
            offset,
            len_bytes: len_bytes as u32,
        })
    }

    /// A part of the region for an operation that divides it into work requests.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`].
    pub fn span(&self, offset: u64, len_bytes: u64) -> Result<RegionSpan<'_>> {
        self.check("span", offset, len_bytes)?;
        Ok(RegionSpan {
            region: self,
            offset,
            len_bytes,
        })
    }

    /// Whether both are handles of one region.
    #[inline]
    pub(crate) fn is(&self, other: &Region) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }

    pub(crate) fn targets(&self) -> &Targets {
        &self.inner.targets
    }

    /// Drops the handle in a thread that other threads rely on. Deregistration is a command of the device, and freeing mapped memory may wait for a
    /// GPU, so another thread does both. Only the memory of an application is deregistered here: the application may free it when this returns.
    pub(crate) fn drop_deferred(self) {
        if let Some(mut last) = Arc::into_inner(self.inner) {
            if !last.own.is_of_library() {
                last.end();
                if last.attachments.is_empty() {
                    return;
                }
            }
            execute_elsewhere(Box::new(last));
        }
    }

    pub(crate) fn attachments(&self) -> &Attachments {
        &self.inner.attachments
    }

    pub(crate) fn target(&self) -> Target {
        self.inner.target
    }

    /// The first byte, for code that loads, stores or maps host memory. Nothing in this process or on a GPU reaches memory that a device names by the
    /// address 0, so any address that is not mapped stands for it.
    pub(crate) fn start(&self) -> NonNull<u8> {
        NonNull::new(self.inner.start).unwrap_or(NonNull::dangling())
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Region")
            .field("id", &self.inner.id)
            .field("start", &self.inner.start)
            .field("len_bytes", &self.inner.len_bytes)
            .field("kind", &self.inner.kind)
            .field("lkey", &format_args!("{:#x}", self.inner.lkey))
            .field("registered", &self.is_registered())
            .finish()
    }
}

/// The length of numbers. A length that does not fit is larger than any region.
fn values_bytes<T>(len: usize) -> u64 {
    (len as u64).saturating_mul(size_of::<T>() as u64)
}

fn check_len(len_bytes: u64) -> Result<()> {
    if (1..=REGION_BYTES_MAX).contains(&len_bytes) {
        Ok(())
    } else {
        Err(Error::Range {
            argument: "len_bytes",
            value: len_bytes,
            min: 1,
            max: REGION_BYTES_MAX,
        })
    }
}

/// A part of a region: what a work request sends from or receives into. Made by [`Region::slice`], which checks it.
#[derive(Debug, Clone, Copy)]
pub struct Slice<'a> {
    pub(crate) region: &'a Region,
    pub(crate) offset: u64,
    pub(crate) len_bytes: u32,
}

impl Slice<'_> {
    /// Length in bytes.
    pub fn len_bytes(&self) -> u32 {
        self.len_bytes
    }
}

/// A part of a region, of any length: for operations that divide it into work requests.
#[derive(Debug, Clone, Copy)]
pub struct RegionSpan<'a> {
    pub(crate) region: &'a Region,
    pub(crate) offset: u64,
    pub(crate) len_bytes: u64,
}

impl<'a> RegionSpan<'a> {
    /// The region that it is a part of.
    #[must_use]
    pub fn region(&self) -> &'a Region {
        self.region
    }

    /// Where it begins in the region, in bytes.
    #[must_use]
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Its length in bytes.
    #[must_use]
    pub fn len_bytes(&self) -> u64 {
        self.len_bytes
    }
}

impl<'a> From<Slice<'a>> for RegionSpan<'a> {
    fn from(slice: Slice<'a>) -> RegionSpan<'a> {
        RegionSpan {
            region: slice.region,
            offset: slice.offset,
            len_bytes: slice.len_bytes.into(),
        }
    }
}

#[cfg(all(test, feature = "softcx"))]
mod tests {
    use std::sync::Barrier;
    use std::time::Duration;

    use super::*;
    use crate::region::Device;

    #[test]
    fn numbers_are_copied_in_and_out_at_any_offset() {
        let domain = Device::open("softcx").unwrap().protection_domain();
        let region = Region::alloc(&domain, 64, Access::ALL).unwrap();
        region.write_values(3, &[1.5_f32, -0.0, f32::MAX]).unwrap();
        let mut bytes = [0; 12];
        region.read(3, &mut bytes).unwrap();
        assert_eq!(bytes[..4], 1.5_f32.to_ne_bytes());
        let mut values = [0_f32; 3];
        region.read_values(3, &mut values).unwrap();
        assert_eq!(
            values.map(f32::to_bits),
            [1.5_f32, -0.0, f32::MAX].map(f32::to_bits)
        );
        let refused = region.write_values(57, &[0_u64]);
        assert!(
            matches!(
                refused,
                Err(Error::OutOfBounds {
                    len_bytes: 8,
                    limit_bytes: 64,
                    ..
                })
            ),
            "{refused:?}"
        );
    }

    #[test]
    fn values_in_place_are_aligned_and_inside_the_region() {
        let domain = Device::open("softcx").unwrap().protection_domain();
        let region = Region::alloc(&domain, 64, Access::ALL).unwrap();
        // SAFETY: no work request uses the region, and one slice is used at a time.
        unsafe {
            region
                .values_mut::<f64>(16, 6)
                .unwrap()
                .copy_from_slice(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
            assert_eq!(region.values::<f64>(56, 1).unwrap(), [6.0]);
            assert_eq!(region.values::<u8>(63, 1).unwrap().len(), 1);
            assert!(region.values::<f64>(64, 0).unwrap().is_empty());
            assert!(matches!(
                region.values::<f64>(4, 1),
                Err(Error::Alignment {
                    value: 4,
                    align: 8,
                    ..
                })
            ));
            for (offset, len) in [(16, 7), (64, 1), (0, usize::MAX), (8, usize::MAX / 8)] {
                let refused = region.values_mut::<f64>(offset, len);
                assert!(
                    matches!(refused, Err(Error::OutOfBounds { .. })),
                    "{offset} {len}: {refused:?}"
                );
            }
        }
        let mut value = [0.0_f64];
        region.read_values(16, &mut value).unwrap();
        assert_eq!(value, [1.0]);
    }

    #[test]
    fn every_edge_of_a_region_is_an_error_that_names_the_limit() {
        let domain = Device::open("softcx").unwrap().protection_domain();
        let range = |len| match Region::alloc(&domain, len, Access::ALL) {
            Err(Error::Range {
                argument: "len_bytes",
                max,
                ..
            }) => max,
            other => panic!("{other:?}"),
        };
        assert_eq!(range(0), REGION_BYTES_MAX);
        assert_eq!(range(REGION_BYTES_MAX + 1), REGION_BYTES_MAX);
        let region = Region::alloc(&domain, 100, Access::ALL).unwrap();
        let outside = |result: Result<()>| {
            matches!(
                result,
                Err(Error::OutOfBounds {
                    limit_bytes: 100,
                    ..
                })
            )
        };
        assert!(outside(region.write(98, &[0; 3])));
        assert!(outside(region.read(u64::MAX, &mut [0; 1])));
        assert!(outside(region.slice(101, 0).map(drop)));
        assert!(outside(region.load_u32(97).map(drop)));
        assert!(matches!(
            region.store_u32(2, 0),
            Err(Error::Alignment { align: 4, .. })
        ));
        assert!(matches!(
            region.remote().slice(100, 1),
            Err(Error::OutOfBounds { .. })
        ));
        assert!(region.slice(100, 0).is_ok());
    }

    #[test]
    fn a_region_reports_the_size_of_its_pages() {
        let domain = Device::open("softcx").unwrap().protection_domain();
        for len_bytes in [1, 4096, (2 << 20) + 1] {
            let region = Region::alloc_huge(&domain, len_bytes, Access::ALL).unwrap();
            assert_eq!(
                (region.len_bytes(), region.kind()),
                (len_bytes, RegionKind::Host)
            );
            assert!(region.is_filled_with(0, len_bytes, 0).unwrap());
            region.fill(0, len_bytes, 9).unwrap();
            assert!(region.is_filled_with(0, len_bytes, 9).unwrap());
            assert_ne!(region.page_size(), PageSize::Unknown);
            // SAFETY: memory of the region above, which outlives this one.
            let again = unsafe {
                Region::register(&domain, region.start(), len_bytes, Access::ALL).unwrap()
            };
            assert_eq!(again.page_size(), PageSize::Unknown);
        }
        let region = Region::alloc(&domain, 64, Access::ALL).unwrap();
        assert_eq!(region.page_size(), PageSize::Ordinary);
        for len_bytes in [0, REGION_BYTES_MAX + 1] {
            let refused = Region::alloc_huge(&domain, len_bytes, Access::ALL).map(drop);
            assert!(matches!(refused, Err(Error::Range { .. })), "{refused:?}");
        }
    }

    #[test]
    fn the_owner_of_memory_goes_after_the_registration_and_every_handle() {
        struct Buffer {
            _memory: Box<[u64]>,
            is_gone: Arc<AtomicBool>,
        }
        impl Drop for Buffer {
            fn drop(&mut self) {
                self.is_gone.store(true, Ordering::Release);
            }
        }
        let domain = Device::open("softcx").unwrap().protection_domain();
        let register = |len_bytes, is_gone: &Arc<AtomicBool>| {
            let mut memory = vec![0u64; 8].into_boxed_slice();
            let start = NonNull::from(&mut memory[0]).cast();
            let owner = Box::new(Buffer {
                _memory: memory,
                is_gone: Arc::clone(is_gone),
            });
            // SAFETY: the owner has the memory, and nothing else refers to it.
            unsafe { Region::register_from_owner(&domain, start, len_bytes, Access::ALL, owner) }
        };
        let is_gone = Arc::new(AtomicBool::new(false));
        let region = register(64, &is_gone).unwrap();
        region.fill(0, 64, 3).unwrap();
        let again = region.clone();
        assert_eq!(region.deregister(), Ok(true));
        drop(region);
        assert!(!is_gone.load(Ordering::Acquire));
        assert!(again.is_filled_with(0, 64, 3).unwrap());
        assert_eq!(again.page_size(), PageSize::Unknown);
        drop(again);
        assert!(is_gone.load(Ordering::Acquire));
        let is_gone = Arc::new(AtomicBool::new(false));
        let refused = register(0, &is_gone).map(drop);
        assert!(matches!(refused, Err(Error::Range { .. })), "{refused:?}");
        assert!(is_gone.load(Ordering::Acquire));
    }

    #[test]
    fn what_is_written_is_read_and_keys_end_once() {
        let domain = Device::open("softcx").unwrap().protection_domain();
        let region = Region::alloc(&domain, 64, Access::ALL).unwrap();
        region.write(3, b"bytes").unwrap();
        let mut got = [0; 5];
        region.read(3, &mut got).unwrap();
        assert_eq!(&got, b"bytes");
        region.fill(0, 64, 7).unwrap();
        assert!(region.is_filled_with(0, 64, 7).unwrap());
        region.store_u32(60, 9).unwrap();
        assert!(!region.is_filled_with(0, 64, 7).unwrap());
        assert_eq!(region.load_u32(60), Ok(9));
        let remote = region.remote();
        assert_eq!(RemoteRegion::from_bytes(&remote.to_bytes()), remote);
        assert_eq!(region.clone().deregister(), Ok(true));
        assert_eq!(region.deregister(), Ok(false));
        assert!(!region.is_registered());
    }

    /// A device that refuses may still access the memory for peers.
    #[test]
    fn owner_of_memory_that_a_device_keeps_is_not_dropped() {
        static REFUSALS: AtomicU32 = AtomicU32::new(0);
        let domain = Device::open("softcx").unwrap().protection_domain();
        for (refusals, answers, is_kept) in [
            (0, [Ok(true), Ok(false)], false),
            (1, [Err(()), Ok(true)], false),
            (2, [Err(()), Err(())], false),
            (3, [Err(()), Err(())], true),
        ] {
            REFUSALS.store(refusals, Ordering::Relaxed);
            let registration = RegisteredMemory::that_ends_by(|| {
                let left = REFUSALS.load(Ordering::Relaxed);
                REFUSALS.store(left.saturating_sub(1), Ordering::Relaxed);
                match left {
                    0 => Ok(true),
                    _ => Err(Error::System {
                        operation: "ibv_dereg_mr",
                        errno: libc::EBUSY,
                    }),
                }
            });
            let owner = Arc::new([0_u64; 8]);
            let start = NonNull::from(&*owner).cast();
            let own = OwnedMemory::Kept {
                _owner: Box::new(Arc::clone(&owner)),
            };
            let kind = RegionKind::Host;
            let region = Region::of(&domain, registration, start, 64, Access::ALL, kind, own);
            for answer in answers {
                assert_eq!(region.deregister().map_err(drop), answer);
                assert!(!region.is_registered());
            }
            drop(region);
            assert_eq!(Arc::strong_count(&owner) == 2, is_kept, "{refusals}");
        }
    }

    #[test]
    fn deregister_returns_only_after_the_key_has_ended() {
        static HAS_BEGUN: Barrier = Barrier::new(2);
        static HAS_ENDED: AtomicBool = AtomicBool::new(false);
        let domain = Device::open("softcx").unwrap().protection_domain();
        let registration = RegisteredMemory::that_ends_by(|| {
            HAS_BEGUN.wait();
            // A card takes its time.
            std::thread::sleep(Duration::from_millis(50));
            Ok(!HAS_ENDED.swap(true, Ordering::AcqRel))
        });
        let mut word = [0u64; 8];
        let start = NonNull::from(&mut word).cast();
        let own = OwnedMemory::Nothing;
        let kind = RegionKind::Host;
        let region = Region::of(&domain, registration, start, 64, Access::ALL, kind, own);
        std::thread::scope(|threads| {
            threads.spawn(|| assert_eq!(region.deregister(), Ok(true)));
            HAS_BEGUN.wait();
            assert_eq!(region.deregister(), Ok(false), "the other thread ends it");
            assert!(HAS_ENDED.load(Ordering::Acquire), "it was there");
        });
    }
}
