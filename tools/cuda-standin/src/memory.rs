//! What a device can reach: its own memory, and host memory that is page-locked.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;
use std::time::Instant;

use cudarc::driver::sys::CUdeviceptr;

use crate::call::{CUresult, CudaResult, Out, cuda, valid};
use crate::context::Context;
use crate::reservation::{self, PhysicalPages};
use crate::settings::settings;
use crate::{capture, current, host_memory};

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum BlockKind {
    Device,
    /// By cuMemHostAlloc or cuMemAllocHost.
    Allocated,
    /// The program's own, by cuMemHostRegister.
    Registered,
    /// By cuMemAllocManaged, or with confidential computing by the calls of `Allocated`.
    Managed,
}

pub struct MemoryBlock {
    pub kind: BlockKind,
    /// Its first address as a device sees it.
    pub start: u64,
    pub len: u64,
    /// Where this library reads and writes it. For host memory that is where the program does.
    pub host: u64,
    pub flags: u32,
    pub context: Arc<Context>,
    /// Unique for the life of the process (CU_POINTER_ATTRIBUTE_BUFFER_ID).
    pub id: u64,
    pub sync_memops: AtomicBool,
    backing: Option<PhysicalPages>,
}

/// Some bytes that may be read and written for as long as this lives; for host memory, as long as the program leaves it mapped.
pub struct Place {
    pub address: u64,
    pub block: Option<Arc<MemoryBlock>>,
}

/// Blocks that were taken away and are remembered.
const GONE_MAX: usize = 4096;

/// By the first address.
static BLOCKS: Mutex<BTreeMap<u64, Arc<MemoryBlock>>> = Mutex::new(BTreeMap::new());

fn blocks() -> MutexGuard<'static, BTreeMap<u64, Arc<MemoryBlock>>> {
    BLOCKS
        .lock()
        .unwrap_or_else(|poisoned| poisoned.into_inner())
}

impl MemoryBlock {
    pub fn new(
        kind: BlockKind,
        start: u64,
        len: u64,
        host: u64,
        flags: u32,
        context: Arc<Context>,
    ) -> MemoryBlock {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        MemoryBlock {
            kind,
            start,
            len,
            host,
            flags,
            context,
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            sync_memops: AtomicBool::new(false),
            backing: None,
        }
    }

    fn contains(&self, address: u64, len: u64) -> bool {
        address >= self.start
            && address - self.start < self.len
            && len <= self.len - (address - self.start)
    }

    /// A descriptor of its memory, if it is the device's.
    pub fn descriptor(&self) -> CudaResult<i32> {
        match &self.backing {
            Some(backing) => backing.descriptor(),
            None => Err(CUresult::CUDA_ERROR_INVALID_VALUE),
        }
    }
}

/// Adds a block, unless `refuses` finds one among the others that it goes badly with.
pub fn insert(block: MemoryBlock, refuses: impl Fn(&MemoryBlock) -> CudaResult) -> CudaResult {
    let mut blocks = blocks();
    blocks.values().try_for_each(|other| refuses(other))?;
    blocks.insert(block.start, Arc::new(block));
    Ok(())
}

/// The block around an address of a device.
pub fn find(address: u64) -> Option<Arc<MemoryBlock>> {
    let blocks = blocks();
    let (_, block) = blocks.range(..=address).next_back()?;
    block.contains(address, 1).then(|| block.clone())
}

/// The block of host memory around an address of the program.
pub fn find_host(address: u64) -> Option<Arc<MemoryBlock>> {
    blocks()
        .values()
        .find(|block| {
            block.kind != BlockKind::Device
                && address >= block.host
                && address - block.host < block.len
        })
        .cloned()
}

/// Takes a block away that begins at this address of the program or of a device, once nothing runs that could be using it.
pub fn remove(kind: BlockKind, address: u64) -> Option<Arc<MemoryBlock>> {
    let found = blocks()
        .values()
        .find(|block| {
            block.kind == kind
                && (if kind == BlockKind::Device {
                    block.start
                } else {
                    block.host
                }) == address
        })
        .cloned()?;
    // Freeing waits for the device, as the driver's does (cuMemFree: no implicit synchronization only for what cuMemAllocAsync gave).
    found.context.wait_idle_alone();
    let removed = blocks().remove(&found.start);
    remember(&found);
    if kind == BlockKind::Device && settings().has("reuse") {
        reservation::reuse(found.start, found.len);
    }
    removed
}

/// A block that was taken away, for the message of [`illegal`].
struct GoneBlock {
    start: u64,
    len: u64,
    kind: &'static str,
    thread: String,
    at: Instant,
}

static GONE: Mutex<VecDeque<GoneBlock>> = Mutex::new(VecDeque::new());

fn gone() -> MutexGuard<'static, VecDeque<GoneBlock>> {
    GONE.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

fn remember(block: &MemoryBlock) {
    let mut gone = gone();
    gone.truncate(GONE_MAX - 1);
    gone.push_front(GoneBlock {
        start: block.start,
        len: block.len,
        kind: match block.kind {
            BlockKind::Device => "freed device memory",
            BlockKind::Allocated | BlockKind::Managed => "freed memory of the driver",
            BlockKind::Registered => "memory whose registration has ended",
        },
        thread: thread::current().name().unwrap_or("?").into(),
        at: Instant::now(),
    });
}

/// The error of work on a stream that reaches for memory that is not there. The error itself comes to light in a later call, of any thread, so what was done is
/// said here, on the standard error.
pub fn illegal(what: &str, address: u64, len: u64) -> CUresult {
    let end = address.saturating_add(len);
    let gone = gone();
    let before = gone
        .iter()
        .find(|block| address < block.start + block.len && block.start < end);
    let was = before.map_or("nothing known was there".into(), |block| {
        let GoneBlock {
            start,
            len,
            kind,
            thread,
            at,
        } = block;
        let us = at.elapsed().as_micros();
        format!("{kind}, {start:#x} with {len} bytes, {us} us ago by the thread {thread:?}")
    });
    eprintln!("doorbell-cuda-standin: {what}, {len} bytes at {address:#x}: {was}");
    CUresult::CUDA_ERROR_ILLEGAL_ADDRESS
}

/// What a device reaches at an address.
pub fn device_place(address: u64, len: u64) -> Option<Place> {
    let block = find(address)?;
    let reaches = block.contains(address, len);
    reaches.then(|| Place {
        address: block.host + (address - block.start),
        block: Some(block.clone()),
    })
}

/// What the CPU reaches, page-locked or not. Addresses of a device are not included.
pub fn host_place(address: u64, len: u64) -> Option<Place> {
    let end = address.checked_add(len)?;
    if address == 0 || reservation::is_reserved(address) {
        return None;
    }
    let blocks = blocks();
    let block = blocks.values().find(|block| {
        block.kind != BlockKind::Device && block.host < end && address < block.host + block.len
    });
    // Page-locked as a whole, or not at all.
    if block.is_some_and(|block| address < block.host || end > block.host + block.len) {
        return None;
    }
    Some(Place {
        address,
        block: block.cloned(),
    })
}

/// Either.
pub fn any_place(address: u64, len: u64) -> Option<Place> {
    match find(address) {
        Some(_) => device_place(address, len),
        None => host_place(address, len),
    }
}

/// All that a context had.
pub fn forget(context: &Context) {
    let mut gone = Vec::new();
    blocks().retain(|_, block| {
        let stays = block.context.id != context.id;
        if !stays {
            gone.push(block.clone());
        }
        stays
    });
    gone.iter().for_each(|block| remember(block));
    for block in gone
        .iter()
        .filter(|block| matches!(block.kind, BlockKind::Allocated | BlockKind::Managed))
    {
        host_memory::give_back(block);
    }
}

fn used_bytes(context: &Context) -> u64 {
    blocks()
        .values()
        .filter(|block| block.kind == BlockKind::Device && block.context.device == context.device)
        .map(|block| block.len)
        .sum()
}

cuda! {
    fn cuMemAlloc_v2(pointer: Out<CUdeviceptr>, len: usize) {
        let context = current::context()?;
        context.pass();
        capture::check_safe()?;
        valid(!pointer.is_null() && len > 0)?;
        let len = len as u64;
        if len > settings().memory_bytes.saturating_sub(used_bytes(&context)) {
            return Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY);
        }
        let align = if len >= 2 << 20 { 2 << 20 } else { reservation::page() };
        let start = reservation::reserve(len, align)?;
        let backing = PhysicalPages::new(len)?;
        let mut block = MemoryBlock::new(BlockKind::Device, start, len, backing.address, 0, context);
        block.backing = Some(backing);
        insert(block, |_| Ok(()))?;
        pointer.put(start)
    }

    // Only what cuMemAlloc or cuMemAllocManaged gave, and only once.
    fn cuMemFree_v2(pointer: CUdeviceptr) {
        let context = current::context()?;
        capture::check_safe()?;
        if remove(BlockKind::Device, pointer).is_none() {
            let block = remove(BlockKind::Managed, pointer);
            host_memory::give_back(&*block.ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?);
        }
        context.life.check()
    }

    fn cuMemGetInfo_v2(free: Out<usize>, total: Out<usize>) {
        let context = current::context()?;
        let all = settings().memory_bytes;
        free.put_if_wanted(all.saturating_sub(used_bytes(&context)) as usize);
        total.put_if_wanted(all as usize);
        Ok(())
    }

    fn cuMemGetAddressRange_v2(base: Out<CUdeviceptr>, size: Out<usize>, pointer: CUdeviceptr) {
        current::context()?;
        let block = find(pointer).filter(|block| block.kind != BlockKind::Registered);
        let block = block.ok_or(CUresult::CUDA_ERROR_NOT_FOUND)?;
        base.put_if_wanted(block.start);
        size.put_if_wanted(block.len as usize);
        Ok(())
    }

    // Page-aligned ranges of device memory. The file that it gives begins where the allocation does, so only such a range can be had. CUDA 12.8 has
    // brought the flag that maps it through PCIe.
    fn cuMemGetHandleForAddressRange(handle: Out<i32>, pointer: CUdeviceptr, size: usize, kind: u32, flags: u64) {
        current::context()?;
        // CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
        valid(!handle.is_null() && kind == 1 && size > 0)?;
        valid(flags & !u64::from(settings().driver >= 12_080) == 0)?;
        valid(pointer.is_multiple_of(reservation::page()) && (size as u64).is_multiple_of(reservation::page()))?;
        let has = settings().has("dmabuf") || (flags == 1 && settings().has("dmabuf-pcie"));
        if !has {
            return Err(CUresult::CUDA_ERROR_NOT_SUPPORTED);
        }
        let block = find(pointer).filter(|block| block.kind == BlockKind::Device);
        let block = block.ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
        valid(size as u64 <= block.len.next_multiple_of(reservation::page()))?;
        if block.start != pointer {
            return Err(CUresult::CUDA_ERROR_NOT_SUPPORTED);
        }
        handle.put(block.descriptor()?)
    }
}
