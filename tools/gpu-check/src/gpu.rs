//! The driver, as plain calls: what is found out here must not depend on what the library makes of it.

use std::ffi::c_void;
use std::sync::atomic::{AtomicU32, AtomicU64};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use cudarc::driver::sys::{self, CUresult, CUstream, CUstreamBatchMemOpParams as MemOp};
use cudarc::driver::sys::{CUstreamBatchMemOpType as Kind, CUstreamWaitValue_flags as Flags};
use doorbell::CudaContext;

/// How long anything that should end may take.
pub const SOON: Duration = Duration::from_secs(10);
pub const PORTABLE: u32 = 1 | 2;
pub const IOMEMORY: u32 = 4;

/// Whether to do less: in the short form, and over the stand-in, where a processor is all threads of a grid, one after the other.
pub fn is_few(short: bool) -> bool {
    short || std::env::var_os("DOORBELL_CUDA_STANDIN").is_some()
}

/// The result of a driver's call.
pub fn check(call: &str, result: CUresult) -> Result<()> {
    if result == CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    bail!("{call}: {result:?}")
}

/// A context that is current, and a stream of it. Neither is given back: the process ends with the step.
pub struct Gpu {
    pub context: CudaContext,
    pub stream: CUstream,
}

impl Gpu {
    pub fn new() -> Result<Gpu> {
        let context = CudaContext::primary(0)?;
        // SAFETY: a context that lives as long as the process; each call writes one handle.
        unsafe {
            check("cuCtxSetCurrent", sys::cuCtxSetCurrent(context.raw()))?;
        }
        let stream = new_stream()?;
        Ok(Gpu { context, stream })
    }

    /// Queues operations as one call.
    pub fn queue(&self, ops: &mut [MemOp]) -> Result<()> {
        queue(self.stream, ops)
    }
}

pub fn new_stream() -> Result<CUstream> {
    let mut stream = std::ptr::null_mut();
    // SAFETY: writes one handle.
    check("cuStreamCreate", unsafe {
        sys::cuStreamCreate(&mut stream, 1)
    })?;
    Ok(stream)
}

pub fn queue(stream: CUstream, ops: &mut [MemOp]) -> Result<()> {
    // SAFETY: a stream, and operations on memory that is registered until the process ends.
    check("cuStreamBatchMemOp", unsafe {
        sys::cuStreamBatchMemOp_v2(stream, ops.len() as u32, ops.as_mut_ptr(), 0)
    })
}

/// Whether the stream comes to its end in time.
pub fn drained(stream: CUstream, limit: Duration) -> bool {
    let start = Instant::now();
    loop {
        // SAFETY: a stream.
        if unsafe { sys::cuStreamQuery(stream) } == CUresult::CUDA_SUCCESS {
            return true;
        }
        if start.elapsed() > limit {
            return false;
        }
        std::hint::spin_loop();
    }
}

/// A page that both sides reach. It is never freed.
#[derive(Clone, Copy)]
pub struct Page {
    pub host: *mut u8,
    pub gpu: u64,
}

// SAFETY: memory that is never freed, whose words are used atomically.
unsafe impl Send for Page {}
// SAFETY: as above.
unsafe impl Sync for Page {}

impl Page {
    /// Anonymous memory, or that of a memfd, registered with these flags.
    pub fn new(flags: u32, memfd: bool) -> Result<Page> {
        let len = 1 << 16;
        let host = Page::map(len, memfd)?;
        // SAFETY: mapped above.
        check("cuMemHostRegister", unsafe {
            sys::cuMemHostRegister_v2(host, len, flags)
        })?;
        let mut gpu = 0;
        // SAFETY: writes one address; registered above.
        check("cuMemHostGetDevicePointer", unsafe {
            sys::cuMemHostGetDevicePointer_v2(&mut gpu, host, 0)
        })?;
        let host = host.cast();
        Ok(Page { host, gpu })
    }

    /// Memory that is not registered. It is never freed.
    pub fn unregistered(len: usize) -> Result<*mut c_void> {
        Page::map(len, false)
    }

    fn map(len: usize, memfd: bool) -> Result<*mut c_void> {
        // SAFETY: a new mapping; for a memfd, of a file made here.
        let host = unsafe {
            let fd = if memfd {
                let fd = libc::memfd_create(c"page".as_ptr(), 0);
                anyhow::ensure!(fd >= 0 && libc::ftruncate(fd, len as i64) == 0, "memfd");
                fd
            } else {
                -1
            };
            let how = if memfd {
                libc::MAP_SHARED
            } else {
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS
            };
            let access = libc::PROT_READ | libc::PROT_WRITE;
            libc::mmap(std::ptr::null_mut(), len, access, how, fd, 0)
        };
        anyhow::ensure!(host != libc::MAP_FAILED, "mmap");
        Ok(host)
    }

    pub fn word(&self, at: usize) -> &'static AtomicU32 {
        // SAFETY: within the page, aligned, and never freed.
        unsafe { AtomicU32::from_ptr(self.host.add(at).cast()) }
    }

    pub fn long(&self, at: usize) -> &'static AtomicU64 {
        // SAFETY: as above.
        unsafe { AtomicU64::from_ptr(self.host.add(at).cast()) }
    }
}

fn zeroed() -> MemOp {
    // SAFETY: a union of plain numbers, for all of which zero is a value.
    unsafe { std::mem::zeroed() }
}

pub fn write32(at: u64, value: u32) -> MemOp {
    let mut op = zeroed();
    op.writeValue.operation = Kind::CU_STREAM_MEM_OP_WRITE_VALUE_32;
    op.writeValue.address = at;
    op.writeValue.__bindgen_anon_1.value = value;
    op
}

pub fn write64(at: u64, value: u64) -> MemOp {
    let mut op = zeroed();
    op.writeValue.operation = Kind::CU_STREAM_MEM_OP_WRITE_VALUE_64;
    op.writeValue.address = at;
    op.writeValue.__bindgen_anon_1.value64 = value;
    op
}

pub fn wait32(at: u64, value: u32, condition: Flags) -> MemOp {
    let mut op = zeroed();
    op.waitValue.operation = Kind::CU_STREAM_MEM_OP_WAIT_VALUE_32;
    op.waitValue.address = at;
    op.waitValue.__bindgen_anon_1.value = value;
    op.waitValue.flags = condition as u32;
    op
}

/// Orders what the stream stores, for the whole system.
pub fn barrier() -> MemOp {
    let mut op = zeroed();
    // Its flags, 0 for the system, stand next to it.
    op.operation = Kind::CU_STREAM_MEM_OP_BARRIER;
    op
}

/// The middle one.
pub fn median(mut samples: Vec<f64>) -> Result<f64> {
    samples.sort_by(f64::total_cmp);
    let middle = samples.get(samples.len() / 2).copied();
    middle.context("no samples")
}

/// A thread that answers each new value of one word in another, until `last` was answered or it takes too long.
pub fn echo(page: Page, ping: usize, pong: usize, last: u32) -> std::thread::JoinHandle<bool> {
    use std::sync::atomic::Ordering;
    std::thread::spawn(move || {
        let (ping, pong) = (page.word(ping), page.word(pong));
        let start = Instant::now();
        let mut seen = 0;
        while seen != last {
            let value = ping.load(Ordering::Acquire);
            if value != seen {
                seen = value;
                pong.store(value, Ordering::Release);
            } else if start.elapsed() > SOON {
                // The waiting side is released.
                pong.store(last, Ordering::Release);
                return false;
            }
            std::hint::spin_loop();
        }
        true
    })
}
