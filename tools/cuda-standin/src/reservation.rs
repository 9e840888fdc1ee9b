//! Addresses of devices, which the CPU cannot touch, and the memory behind them.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr::null_mut;
use std::sync::Mutex;

use crate::call::{CUresult, CudaResult};
use crate::settings::settings;

/// All device addresses of a process. They are not given out twice, so that what was freed is found out, unless the settings say so.
const SPAN: u64 = 1 << 40;

/// Bytes of a page of the system's.
pub fn page() -> u64 {
    settings().page_bytes
}

struct ReservedSpan {
    start: u64,
    next: u64,
    /// Ranges to be given out again: where they begin, and how long they are.
    freed: Vec<(u64, u64)>,
}

static ADDRESSES: Mutex<Option<ReservedSpan>> = Mutex::new(None);

fn map(at: *mut libc::c_void, len: u64, rights: i32, flags: i32, file: i32) -> CudaResult<u64> {
    // SAFETY: a new mapping where the kernel finds a place: no pointer into it exists.
    let found = unsafe { libc::mmap(at, len as usize, rights, flags, file, 0) };
    if found == libc::MAP_FAILED {
        return Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY);
    }
    Ok(found as u64)
}

/// A range of device addresses that is no other's, and is not next to any.
pub fn reserve(len: u64, align: u64) -> CudaResult<u64> {
    let mut addresses = ADDRESSES
        .lock()
        .unwrap_or_else(|poisoned| poisoned.into_inner());
    if addresses.is_none() {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // Half a span where a machine has no room for a whole one, and so on.
        let found = (0..10).find_map(|halved| {
            let len = SPAN >> halved;
            map(null_mut(), len, libc::PROT_NONE, flags, -1)
                .ok()
                .map(|start| (start, len))
        });
        let (start, len) = found.ok_or(CUresult::CUDA_ERROR_OUT_OF_MEMORY)?;
        LIMIT.store(start + len, std::sync::atomic::Ordering::Release);
        START.store(start, std::sync::atomic::Ordering::Release);
        *addresses = Some(ReservedSpan {
            start,
            next: start,
            freed: Vec::new(),
        });
    }
    let span = addresses
        .as_mut()
        .ok_or(CUresult::CUDA_ERROR_OUT_OF_MEMORY)?;
    debug_assert!(span.start <= span.next);
    if let Some(found) = span.freed.iter().position(|(_, freed)| *freed == len) {
        return Ok(span.freed.swap_remove(found).0);
    }
    let at = span.next.next_multiple_of(align);
    let end = at
        .checked_add(len.next_multiple_of(page()) + page())
        .ok_or(CUresult::CUDA_ERROR_OUT_OF_MEMORY)?;
    if end > LIMIT.load(std::sync::atomic::Ordering::Acquire) {
        return Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY);
    }
    span.next = end;
    Ok(at)
}

/// Has the next range of that length be this one.
pub fn reuse(start: u64, len: u64) {
    let mut addresses = ADDRESSES
        .lock()
        .unwrap_or_else(|poisoned| poisoned.into_inner());
    if let Some(span) = addresses.as_mut() {
        span.freed.push((start, len));
    }
}

static START: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
static LIMIT: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);

/// Whether an address can only be a device's: the CPU has nothing there.
pub fn is_reserved(address: u64) -> bool {
    let start = START.load(std::sync::atomic::Ordering::Acquire);
    start != 0 && address >= start && address < LIMIT.load(std::sync::atomic::Ordering::Acquire)
}

/// The memory behind a range: pages of a memfd, at an address that only this library knows.
pub struct PhysicalPages {
    pub address: u64,
    len: u64,
    file: OwnedFd,
}

impl PhysicalPages {
    pub fn new(len: u64) -> CudaResult<PhysicalPages> {
        let len = len.next_multiple_of(page());
        // SAFETY: a string constant; the new descriptor has no other owner.
        let file = unsafe {
            let file = libc::memfd_create(c"cuda-standin".as_ptr(), libc::MFD_CLOEXEC);
            if file < 0 {
                return Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY);
            }
            OwnedFd::from_raw_fd(file)
        };
        // SAFETY: a descriptor that is open.
        if unsafe { libc::ftruncate(file.as_raw_fd(), len as libc::off_t) } != 0 {
            return Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY);
        }
        let rights = libc::PROT_READ | libc::PROT_WRITE;
        let address = map(null_mut(), len, rights, libc::MAP_SHARED, file.as_raw_fd())?;
        Ok(PhysicalPages { address, len, file })
    }

    /// A descriptor of the same memory, which is the caller's.
    pub fn descriptor(&self) -> CudaResult<i32> {
        // SAFETY: a descriptor that is open.
        let copy = unsafe { libc::fcntl(self.file.as_raw_fd(), libc::F_DUPFD_CLOEXEC, 0) };
        if copy < 0 {
            return Err(CUresult::CUDA_ERROR_OPERATING_SYSTEM);
        }
        Ok(copy)
    }
}

impl Drop for PhysicalPages {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`; code that uses the memory keeps it alive.
        unsafe { libc::munmap(self.address as *mut libc::c_void, self.len as usize) };
    }
}
