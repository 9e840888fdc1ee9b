//! Memory of a GPU, allocated by this library or by the application.
#![allow(unsafe_code)] // calls the driver with addresses of memory of others

use std::any::Any;
use std::ffi::c_void;
use std::fmt;
use std::os::fd::{FromRawFd, OwnedFd};
use std::sync::Arc;

use cudarc::driver::sys::{self, CUdeviceptr, CUmemorytype, CUpointer_attribute, CUresult};
use doorbell_wire::memory::page_bytes;

use super::context::CudaContext;
use super::copier::Copier;
use super::deferred_free;
use super::driver::{check, is};
use crate::{Error, Result, StateKind};

/// How a dmabuf of GPU memory leads to the memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DmabufMapping {
    /// As the driver chooses. Where processor and GPU have a coherent link (GB200), that is through this link.
    Usual,
    /// Through the GPU's PCIe registers. A NIC that is beside the GPU and not at the processor needs that (ofiwg/libfabric pull request 10967; UCX does it for
    /// such NICs alone, pull request 11571). Drivers know it since CUDA 12.8.
    Pcie,
}

const PCIE: u64 = sys::CUmemRangeFlags::CU_MEM_RANGE_FLAG_DMA_BUF_MAPPING_TYPE_PCIE as u64;

/// Memory of a GPU. Clones, and [parts](DeviceBuffer::part), are handles of the same memory.
///
/// Memory of [`CudaContext::alloc`] is freed when its last handle is dropped, including those of regions and of their queued work, and no CUDA stream
/// has work that this library has queued: the driver frees memory when the GPU is idle, and blocks other threads until then. The thread that drops
/// the last handle frees it, and blocks as `cuMemFree` does. If a stream has such work then, or the thread is the library's own, the application's next
/// drop of a stream, a buffer, a region or a device queue frees it, or its next `synchronize` of a stream.
///
/// ```no_run
/// use doorbell::{Access, CudaContext, CudaStream, Device, Endpoint, EndpointConfig, Region, QueueKind};
///
/// # fn main() -> doorbell::Result<()> {
/// let context = CudaContext::primary(0)?;
/// let stream = CudaStream::new(&context, "transfers")?;
/// let domain = Device::open("softcx")?.protection_domain();
/// let (from, to) = (context.alloc(4096)?, context.alloc(4096)?);
/// let from = Region::register_device(&domain, &from, Access::LOCAL_WRITE)?;
/// let to = Region::register_device(&domain, &to, Access::ALL)?;
/// let mut a = Endpoint::new(&domain, &EndpointConfig::default())?;
/// let mut b = Endpoint::new(&domain, &EndpointConfig::default())?;
/// a.connect(&b.address())?;
/// b.connect(&a.address())?;
/// // Runs after the kernels that write `from` and before those that read `to`.
/// let remote = to.remote();
/// a.stream_queue_write(&stream, &[from.slice(0, 4096)?], remote.slice(0, 4096)?)?;
/// a.stream_wait_cq(&stream, QueueKind::Send)?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct DeviceBuffer {
    /// Before the memory.
    copier: Arc<Copier>,
    memory: Arc<GpuAllocation>,
    ptr: CUdeviceptr,
    len_bytes: u64,
}

struct GpuAllocation {
    context: CudaContext,
    /// The start of the allocation that it is part of.
    start: CUdeviceptr,
    len_bytes: u64,
    owner: FreedBy,
}

/// What frees the memory.
enum FreedBy {
    Library,
    /// The application or another library.
    Elsewhere,
    /// Dropping this frees it.
    Checkpoint(Box<dyn Any + Send + Sync>),
}

impl Drop for GpuAllocation {
    fn drop(&mut self) {
        match &self.owner {
            FreedBy::Library => deferred_free::free(&self.context, self.start),
            FreedBy::Elsewhere | FreedBy::Checkpoint(_) => {}
        }
    }
}

impl CudaContext {
    /// Allocates memory of the device (`cuMemAlloc`), with undefined contents.
    ///
    /// # Errors
    /// [`Error::Range`] for a length of 0; [`Error::Cuda`], `CUDA_ERROR_OUT_OF_MEMORY` among them.
    pub fn alloc(&self, len_bytes: u64) -> Result<DeviceBuffer> {
        check_len(len_bytes)?;
        let copier = Copier::of(self)?;
        let entered = self.enter_relaxed()?;
        let mut start = 0;
        let mut allocate = || {
            // SAFETY: writes one address; the memory is freed by `GpuAllocation`, which is made next.
            check("cuMemAlloc", unsafe {
                sys::cuMemAlloc_v2(&mut start, len_bytes as usize)
            })
        };
        match allocate() {
            Err(error) if is(&error, CUresult::CUDA_ERROR_OUT_OF_MEMORY) => {
                deferred_free::free_parked();
                if deferred_free::has_allocations() {
                    return Err(Error::state(
                        StateKind::Memory,
                        "allocation of a GPU's memory",
                        format!(
                            "{error}; memory that was given up is not free yet, because CUDA streams have work: synchronise them"
                        ),
                    ));
                }
                allocate()
            }
            allocated => allocated,
        }?;
        let memory = GpuAllocation {
            context: self.clone(),
            start,
            len_bytes,
            owner: FreedBy::Library,
        };
        sync_operations(start);
        drop(entered);
        Ok(DeviceBuffer {
            copier,
            memory: Arc::new(memory),
            ptr: start,
            len_bytes,
        })
    }
}

impl DeviceBuffer {
    /// Memory that the application, the runtime API, a framework or another library has allocated, and frees.
    ///
    /// The driver reports what the memory is. Pool memory reports no context; any of the device works.
    ///
    /// # Errors
    /// [`Error::Range`] for a length of 0; [`Error::State`] if it is no device memory, managed memory, memory of another context or device,
    /// or if the allocation ends before; [`Error::Cuda`].
    ///
    /// # Safety
    /// The memory is not freed before the last handle is dropped, including those of regions and of their queued work.
    pub unsafe fn from_raw(
        context: &CudaContext,
        ptr: CUdeviceptr,
        len_bytes: u64,
    ) -> Result<DeviceBuffer> {
        Self::found(context, ptr, len_bytes, FreedBy::Elsewhere)
    }

    /// As [`DeviceBuffer::from_raw`], for memory that dropping `owner` frees. `owner` is dropped with the last handle.
    ///
    /// # Errors
    /// As [`DeviceBuffer::from_raw`].
    ///
    /// # Safety
    /// The memory is valid as long as `owner`.
    pub unsafe fn from_owner(
        context: &CudaContext,
        ptr: CUdeviceptr,
        len_bytes: u64,
        owner: Box<dyn Any + Send + Sync>,
    ) -> Result<DeviceBuffer> {
        Self::found(context, ptr, len_bytes, FreedBy::Checkpoint(owner))
    }

    fn found(
        context: &CudaContext,
        ptr: CUdeviceptr,
        len_bytes: u64,
        owner: FreedBy,
    ) -> Result<DeviceBuffer> {
        check_len(len_bytes)?;
        let entered = context.enter_relaxed()?;
        let found = look(context, ptr, len_bytes)?;
        sync_operations(ptr);
        drop(entered);
        let memory = GpuAllocation {
            context: context.clone(),
            start: found.start,
            len_bytes: found.len_bytes,
            owner,
        };
        Ok(DeviceBuffer {
            copier: Copier::of(context)?,
            memory: Arc::new(memory),
            ptr,
            len_bytes,
        })
    }

    /// Its address on the device.
    #[must_use]
    pub fn ptr(&self) -> CUdeviceptr {
        self.ptr
    }

    /// Length in bytes.
    #[must_use]
    pub fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    /// Its context.
    #[must_use]
    pub fn context(&self) -> &CudaContext {
        &self.memory.context
    }

    /// A handle of a part of it.
    ///
    /// # Errors
    /// [`Error::Range`] for a length of 0, [`Error::OutOfBounds`].
    pub fn part(&self, offset: u64, len_bytes: u64) -> Result<DeviceBuffer> {
        check_len(len_bytes)?;
        let ptr = self.at("offset", offset, len_bytes)?;
        Ok(DeviceBuffer {
            ptr,
            len_bytes,
            ..self.clone()
        })
    }

    /// Copies bytes into it, and returns when they are there. It is not ordered with the work of any stream: wait for that first.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`]; [`Error::Cuda`]; [`Error::State`] if a copy has not ended in ten seconds.
    pub fn copy_from_host(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        let into = self.at("bytes", offset, bytes.len() as u64)?;
        // SAFETY: within the memory, which this handle keeps.
        unsafe { self.copier.copy_in(bytes, into) }
    }

    /// Copies bytes out of it; as [`DeviceBuffer::copy_from_host`].
    ///
    /// # Errors
    /// As [`DeviceBuffer::copy_from_host`].
    pub fn copy_to_host(&self, offset: u64, bytes: &mut [u8]) -> Result<()> {
        let from = self.at("bytes", offset, bytes.len() as u64)?;
        // SAFETY: within the memory, which this handle keeps.
        unsafe { self.copier.copy_out(from, bytes) }
    }

    /// Why a software NIC's last copy of memory of this context failed. The completion of the work request says only that the memory was not
    /// accessible.
    #[must_use]
    pub fn copy_failure(&self) -> Option<Error> {
        self.copier.failure()
    }

    fn at(&self, argument: &'static str, offset: u64, len_bytes: u64) -> Result<CUdeviceptr> {
        if offset <= self.len_bytes && len_bytes <= self.len_bytes - offset {
            return Ok(self.ptr + offset);
        }
        Err(Error::OutOfBounds {
            argument,
            offset,
            len_bytes,
            limit_bytes: self.len_bytes,
            what: "the buffer",
        })
    }

    #[cfg(feature = "softcx")]
    pub(crate) fn copier(&self) -> &Arc<Copier> {
        &self.copier
    }

    /// A dmabuf of the allocation that it is part of, and its offset in that.
    ///
    /// # Errors
    /// [`Error::State`] if the device's memory cannot be exported; [`Error::Cuda`], also for a mapping that the driver does not know.
    pub(crate) fn dmabuf(&self, mapping: DmabufMapping) -> Result<(OwnedFd, u64)> {
        if !self.context().capabilities().dmabuf {
            return Err(Error::state(
                StateKind::Unsupported,
                "export of a GPU's memory",
                "device and driver export none as a dmabuf: that needs the open kernel modules",
            ));
        }
        // The pages of the whole allocation: the driver need not export a part of one.
        let page_bytes = page_bytes() as u64;
        let start = self.memory.start & !(page_bytes - 1);
        let end = (self.memory.start + self.memory.len_bytes).next_multiple_of(page_bytes);
        let flags = match mapping {
            DmabufMapping::Usual => 0,
            DmabufMapping::Pcie => PCIE,
        };
        let _entered = self.context().enter_relaxed()?;
        let mut fd = -1_i32;
        // SAFETY: writes one descriptor; asks for memory that this handle keeps.
        check("cuMemGetHandleForAddressRange", unsafe {
            sys::cuMemGetHandleForAddressRange(
                (&raw mut fd).cast(),
                start,
                (end - start) as usize,
                sys::CUmemRangeHandleType::CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD,
                flags,
            )
        })?;
        // SAFETY: a new descriptor, which is ours.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        Ok((fd, self.ptr - start))
    }

    /// A handle for a region.
    pub(crate) fn held(self) -> HeldBuffer {
        HeldBuffer(self)
    }

    /// The object that it was made from, if that is a `T` and there is no other handle.
    pub(super) fn into_owner<T: 'static>(self) -> std::result::Result<T, DeviceBuffer> {
        let DeviceBuffer {
            copier,
            memory,
            ptr,
            len_bytes,
        } = self;
        let again = |memory| DeviceBuffer {
            copier: Arc::clone(&copier),
            memory,
            ptr,
            len_bytes,
        };
        let is = |memory: &GpuAllocation| matches!(&memory.owner, FreedBy::Checkpoint(owner) if owner.is::<T>());
        if !is(&memory) {
            return Err(again(memory));
        }
        let mut memory = Arc::try_unwrap(memory).map_err(again)?;
        match std::mem::replace(&mut memory.owner, FreedBy::Elsewhere) {
            FreedBy::Checkpoint(owner) => match owner.downcast() {
                Ok(owner) => Ok(*owner),
                Err(owner) => {
                    memory.owner = FreedBy::Checkpoint(owner);
                    Err(again(Arc::new(memory)))
                }
            },
            owner => {
                memory.owner = owner;
                Err(again(Arc::new(memory)))
            }
        }
    }

    /// Its address and length, without freeing it. Only for the only handle of memory that this library has allocated.
    pub(super) fn leak(self) -> std::result::Result<(CUdeviceptr, u64), DeviceBuffer> {
        let is_whole = self.ptr == self.memory.start && self.len_bytes == self.memory.len_bytes;
        if !is_whole || !matches!(self.memory.owner, FreedBy::Library) {
            return Err(self);
        }
        let DeviceBuffer {
            copier,
            memory,
            ptr,
            len_bytes,
        } = self;
        match Arc::try_unwrap(memory) {
            Ok(mut memory) => {
                memory.owner = FreedBy::Elsewhere;
                Ok((ptr, len_bytes))
            }
            Err(memory) => Err(DeviceBuffer {
                copier,
                memory,
                ptr,
                len_bytes,
            }),
        }
    }
}

impl fmt::Debug for DeviceBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceBuffer")
            .field("ptr", &format_args!("{:#x}", self.ptr))
            .field("len_bytes", &self.len_bytes)
            .field("context", &self.memory.context)
            .finish_non_exhaustive()
    }
}

/// A handle of a region's.
pub(crate) struct HeldBuffer(DeviceBuffer);

impl HeldBuffer {
    /// Whether the memory stays until this is dropped. Otherwise its owner may free it when the last handle is gone.
    pub(crate) fn is_of_library(&self) -> bool {
        !matches!(self.0.memory.owner, FreedBy::Elsewhere)
    }

    /// The context that the memory is of.
    pub(crate) fn context(&self) -> &CudaContext {
        self.0.context()
    }

    /// As [`DeviceBuffer::copy_failure`].
    pub(crate) fn copy_failure(&self) -> Option<Error> {
        self.0.copy_failure()
    }
}

fn check_len(len_bytes: u64) -> Result<()> {
    if len_bytes > 0 {
        return Ok(());
    }
    Err(Error::Range {
        argument: "len_bytes",
        value: 0,
        min: 1,
        max: u64::MAX,
    })
}

/// Makes synchronous operations on the memory synchronous in all cases (`CU_POINTER_ATTRIBUTE_SYNC_MEMOPS`). Otherwise a `cuMemcpy` from pageable
/// memory may return before the bytes have arrived, and a NIC, or a copy of this library's, would read the memory too early.
fn sync_operations(ptr: CUdeviceptr) {
    let on = 1_u32;
    // SAFETY: reads one int. It fails for memory without this attribute, such as a pool's, whose documentation tells the user to synchronise.
    let _ = unsafe {
        sys::cuPointerSetAttribute(
            (&raw const on).cast(),
            CUpointer_attribute::CU_POINTER_ATTRIBUTE_SYNC_MEMOPS,
            ptr,
        )
    };
}

/// An allocation, as the driver reports it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Allocation {
    pub(crate) start: CUdeviceptr,
    pub(crate) len_bytes: u64,
    /// No other allocation of the process has or had this number.
    pub(crate) number: u64,
}

impl Allocation {
    /// The allocation that these bytes are part of.
    ///
    /// # Errors
    /// As [`DeviceBuffer::from_raw`].
    pub(crate) fn of(
        context: &CudaContext,
        ptr: CUdeviceptr,
        len_bytes: u64,
    ) -> Result<Allocation> {
        check_len(len_bytes)?;
        let _entered = context.enter_relaxed()?;
        look(context, ptr, len_bytes)
    }
}

fn look(context: &CudaContext, ptr: CUdeviceptr, len_bytes: u64) -> Result<Allocation> {
    use CUpointer_attribute as Attribute;
    let no = |reason: String| {
        Err(Error::state(
            StateKind::Memory,
            "use of a GPU's memory",
            format!("{len_bytes} bytes at {ptr:#x}: {reason}"),
        ))
    };
    // This call reports attributes that do not exist as zero; the call for a single attribute fails.
    let (mut kind, mut managed, mut device) = (0_u32, 0_u32, -1_i32);
    let (mut owner, mut start, mut allocated, mut number) = (0_u64, 0_u64, 0_u64, 0_u64);
    let mut attributes = [
        Attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
        Attribute::CU_POINTER_ATTRIBUTE_IS_MANAGED,
        Attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
        Attribute::CU_POINTER_ATTRIBUTE_CONTEXT,
        Attribute::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
        Attribute::CU_POINTER_ATTRIBUTE_RANGE_SIZE,
        Attribute::CU_POINTER_ATTRIBUTE_BUFFER_ID,
    ];
    let mut values: [*mut c_void; 7] = [
        (&raw mut kind).cast(),
        (&raw mut managed).cast(),
        (&raw mut device).cast(),
        (&raw mut owner).cast(),
        (&raw mut start).cast(),
        (&raw mut allocated).cast(),
        (&raw mut number).cast(),
    ];
    // SAFETY: writes values of at most the length of those, as cuda.h has them.
    check("cuPointerGetAttributes", unsafe {
        sys::cuPointerGetAttributes(
            attributes.len() as u32,
            attributes.as_mut_ptr(),
            values.as_mut_ptr(),
            ptr,
        )
    })?;
    if kind == CUmemorytype::CU_MEMORYTYPE_HOST as u32 {
        return no(
            "the driver says that it is memory of the host, which a region registers as such"
                .into(),
        );
    }
    if kind != CUmemorytype::CU_MEMORYTYPE_DEVICE as u32 {
        return no("the driver knows of no memory of a device there".into());
    }
    if managed != 0 {
        return no("managed memory, which moves between host and device".into());
    }
    if device != context.device() {
        return no(format!(
            "memory of device {device}, not of {}",
            context.device()
        ));
    }
    // Pool memory has no context.
    if owner != 0 && owner != context.key() {
        return no(format!(
            "memory of the context {owner:#x}, not of {:#x}",
            context.key()
        ));
    }
    let offset = ptr.wrapping_sub(start);
    if offset > allocated || len_bytes > allocated - offset {
        return no(format!(
            "the allocation has {allocated} bytes at {start:#x}"
        ));
    }
    Ok(Allocation {
        start,
        len_bytes: allocated,
        number,
    })
}
