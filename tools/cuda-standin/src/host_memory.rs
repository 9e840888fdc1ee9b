//! Host memory that a device can reach: allocated by the driver, or the program's own that it registers.

use std::ffi::c_void;
use std::ptr::null_mut;

use cudarc::driver::sys::CUdeviceptr;

use crate::call::{CUresult, CudaResult, Out, cuda, valid};
use crate::memory::{self, BlockKind, MemoryBlock};
use crate::reservation::{self, page};
use crate::settings::settings;
use crate::{capture, current, device};

/// PORTABLE, DEVICEMAP, WRITECOMBINED.
const ALLOC_FLAGS: u32 = 0x7;
const DEVICEMAP: u32 = 0x2;
const ATTACH_GLOBAL: u32 = 0x1;
const ATTACH_HOST: u32 = 0x2;
pub const IOMEMORY: u32 = 0x4;
const READ_ONLY: u32 = 0x8;
/// PORTABLE, DEVICEMAP, IOMEMORY, READ_ONLY.
const REGISTER_FLAGS: u32 = 0xf;

/// What `cuMemHostAlloc` gives. With confidential computing that is managed memory (a moderator in NVIDIA's developer forum, topic 261009).
fn kind_of_allocated() -> BlockKind {
    if settings().has("confidential") {
        BlockKind::Managed
    } else {
        BlockKind::Allocated
    }
}

fn allocate(
    pointer: &Out<*mut c_void>,
    len: usize,
    flags: u32,
    allowed: u32,
    kind: BlockKind,
) -> CudaResult {
    let context = current::context()?;
    context.pass();
    capture::check_safe()?;
    valid(!pointer.is_null() && len > 0 && flags & !allowed == 0)?;
    let rights = libc::PROT_READ | libc::PROT_WRITE;
    let private = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: a new mapping where the kernel finds a place.
    let found = unsafe { libc::mmap(null_mut(), len, rights, private, -1, 0) };
    if found == libc::MAP_FAILED {
        return Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY);
    }
    let start = found as u64;
    let block = MemoryBlock::new(kind, start, len as u64, start, flags, context);
    memory::insert(block, |_| Ok(()))?;
    pointer.put(found)
}

/// The memory of a block that is no longer the device's.
pub fn give_back(block: &MemoryBlock) {
    // SAFETY: mapped by `allocate`, and no longer to be found.
    unsafe { libc::munmap(block.host as *mut c_void, block.len as usize) };
}

fn pages(start: u64, len: u64) -> (u64, u64) {
    (
        start & !(page() - 1),
        (start + len).next_multiple_of(page()),
    )
}

/// Whether the program has something at all these pages. Pages that are longer than the kernel's here are never mapped in part where they are.
fn is_mapped(start: u64, len: u64) -> bool {
    let (first, end) = pages(start, len);
    if page() == KERNEL_PAGE {
        return is_mapped_here(first, end - first);
    }
    let has_some = |at| {
        (at..at + page())
            .step_by(KERNEL_PAGE as usize)
            .any(|at| is_mapped_here(at, KERNEL_PAGE))
    };
    (first..end).step_by(page() as usize).all(has_some)
}

/// Bytes of a page of this machine's kernel.
const KERNEL_PAGE: u64 = 4096;

/// Whether all these pages of the kernel's are mapped.
fn is_mapped_here(first: u64, len: u64) -> bool {
    let mut seen = vec![0u8; (len / KERNEL_PAGE) as usize];
    // SAFETY: it looks at page tables only, and `seen` has a byte a page.
    unsafe { libc::mincore(first as *mut c_void, len as usize, seen.as_mut_ptr()) == 0 }
}

/// Whether all of it, none of it, or some of it is an I/O mapping, such as a card's registers: here the pages of the software ConnectX's
/// file, there what `remap_pfn_range` made (VM_IO, VM_PFNMAP).
fn is_io(start: u64, len: u64) -> Option<bool> {
    let (first, end) = pages(start, len);
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let io_bytes: u64 = maps
        .lines()
        .filter(|line| line.contains("/memfd:uverbs") || line.contains("/dev/infiniband/"))
        .filter_map(|line| {
            let (from, to) = line.split(' ').next()?.split_once('-')?;
            let number = |text| u64::from_str_radix(text, 16).ok();
            Some(
                number(to)?
                    .min(end)
                    .saturating_sub(number(from)?.max(first)),
            )
        })
        .sum();
    match io_bytes {
        0 => Some(false),
        all if all == end - first => Some(true),
        _ => None,
    }
}

fn register(pointer: *mut c_void, len: usize, flags: u32) -> CudaResult {
    let context = current::context()?;
    context.pass();
    capture::check_safe()?;
    let (start, len) = (pointer as u64, len as u64);
    valid(
        start != 0
            && len > 0
            && flags & !REGISTER_FLAGS == 0
            && start.checked_add(len + page()).is_some(),
    )?;
    if flags & READ_ONLY != 0 || settings().lacks("hostregister") {
        return Err(CUresult::CUDA_ERROR_NOT_SUPPORTED);
    }
    // Of the driver's `osmemdesc.c`: peer mappings of registers are for administrators, unless its option PeerMappingOverride is set.
    if flags & IOMEMORY != 0 && !settings().has("iomemory") {
        return Err(CUresult::CUDA_ERROR_NOT_PERMITTED);
    }
    valid(!reservation::is_reserved(start) && is_mapped(start, len))?;
    // `os_lookup_user_io_memory` refuses what is no I/O mapping; and what is one has no pages that could be locked.
    valid(is_io(start, len) == Some(flags & IOMEMORY != 0))?;
    let seen = if settings().lacks("samepointer") {
        reservation::reserve(len + page(), page())? + start % page()
    } else {
        start
    };
    let (first, end) = pages(start, len);
    memory::insert(
        MemoryBlock::new(BlockKind::Registered, seen, len, start, flags, context),
        |other| {
            if other.kind == BlockKind::Device {
                return Ok(());
            }
            let (other_first, other_end) = pages(other.host, other.len);
            // Pages are locked, not bytes. What the driver allocated is no memory to be registered.
            if first < other_end && other_first < end {
                return Err(match other.kind {
                    BlockKind::Registered => CUresult::CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED,
                    _ => CUresult::CUDA_ERROR_INVALID_VALUE,
                });
            }
            Ok(())
        },
    )
}

cuda! {
    fn cuMemAllocHost_v2(pointer: Out<*mut c_void>, len: usize) {
        allocate(&pointer, len, 0, ALLOC_FLAGS, kind_of_allocated())
    }

    fn cuMemHostAlloc(pointer: Out<*mut c_void>, len: usize, flags: u32) {
        allocate(&pointer, len, flags, ALLOC_FLAGS, kind_of_allocated())
    }

    // ATTACH_GLOBAL or ATTACH_HOST. It has one address, here and on the device.
    fn cuMemAllocManaged(pointer: Out<*mut c_void>, len: usize, flags: u32) {
        valid(flags == ATTACH_GLOBAL || flags == ATTACH_HOST)?;
        allocate(&pointer, len, flags, ATTACH_GLOBAL | ATTACH_HOST, BlockKind::Managed)
    }

    fn cuMemFreeHost(pointer: *mut c_void) {
        let context = current::context()?;
        capture::check_safe()?;
        let block = memory::remove(kind_of_allocated(), pointer as u64);
        give_back(&*block.ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?);
        context.life.check()
    }

    fn cuMemHostRegister_v2(pointer: *mut c_void, len: usize, flags: u32) {
        register(pointer, len, flags)
    }

    // The address that was registered, not one within, and not the driver's own memory: those are CUDA_ERROR_INVALID_VALUE.
    fn cuMemHostUnregister(pointer: *mut c_void) {
        let context = current::context()?;
        capture::check_safe()?;
        valid(!pointer.is_null())?;
        if memory::remove(BlockKind::Registered, pointer as u64).is_none() {
            return Err(match memory::find_host(pointer as u64) {
                Some(_) => CUresult::CUDA_ERROR_INVALID_VALUE,
                None => CUresult::CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED,
            });
        }
        context.life.check()
    }

    // Any address within. What was allocated is mapped whatever its flags say; what was registered, if they asked for it.
    fn cuMemHostGetDevicePointer_v2(device_pointer: Out<CUdeviceptr>, pointer: *mut c_void, flags: u32) {
        let context = current::context()?;
        valid(!device_pointer.is_null() && flags == 0)?;
        let address = pointer as u64;
        let block = memory::find_host(address).ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
        valid(block.kind != BlockKind::Registered || block.flags & DEVICEMAP != 0)?;
        // CAN_MAP_HOST_MEMORY.
        valid(device::attribute(context.device, 19) == 1)?;
        device_pointer.put(block.start + (address - block.host))
    }

    fn cuMemHostGetFlags(flags: Out<u32>, pointer: *mut c_void) {
        current::context()?;
        let block = memory::find_host(pointer as u64).filter(|block| block.kind == kind_of_allocated());
        // Mapped it always is.
        flags.put(block.ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?.flags | DEVICEMAP)
    }
}
