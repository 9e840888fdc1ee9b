//! A program that has its own objects of libibverbs: an open device, a protection domain and registered memory. The library uses them as they are: it
//! transfers between their memory on a stream, registers nothing, and ends nothing.
//!
//! ```sh
//! cargo run --features verbs --example adopt            # the first verbs device, directly if it is an mlx5 one
//! cargo run --features verbs --example adopt -- verbs   # by plain verbs
//! ```
#![allow(unsafe_code)] // calls libibverbs, as the program did before

use std::ffi::c_void;
use std::io::Write;
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use doorbell::{
    Access, Device, Endpoint, EndpointConfig, Executor, HostStream, ProtectionDomain, QueueKind,
    Region, RegionKind, Work,
};
use rdma_sys::{self as verbs, ibv_access_flags as Flags};

const LEN_BYTES: usize = 4096;

/// Two pages, as memory is registered.
#[repr(C, align(4096))]
struct Pages([[u8; LEN_BYTES]; 2]);

/// What the program had before it knew of this library. After an error it is left to the end of the process.
struct Theirs {
    context: NonNull<verbs::ibv_context>,
    pd: NonNull<verbs::ibv_pd>,
    /// Registrations of the two pages of `memory`.
    source: NonNull<verbs::ibv_mr>,
    target: NonNull<verbs::ibv_mr>,
    memory: *mut Pages,
}

// SAFETY: libibverbs' calls for these objects may come from any thread; of the memory, only the owner of the last handle takes it back.
unsafe impl Send for Theirs {}
// SAFETY: as above.
unsafe impl Sync for Theirs {}

impl Theirs {
    fn open() -> Result<Theirs> {
        let memory = Box::into_raw(Box::new(Pages([[0; LEN_BYTES]; 2])));
        let rights = Flags::IBV_ACCESS_LOCAL_WRITE | Flags::IBV_ACCESS_REMOTE_WRITE;
        // SAFETY: calls of libibverbs in their order, each with what the one before gave; the memory is taken back after its registrations.
        unsafe {
            let list = some(
                "ibv_get_device_list",
                verbs::ibv_get_device_list(null_mut()),
            )?;
            let first = NonNull::new(*list.as_ptr()).context("no verbs device")?;
            let context = some("ibv_open_device", verbs::ibv_open_device(first.as_ptr()))?;
            verbs::ibv_free_device_list(list.as_ptr());
            let pd = some("ibv_alloc_pd", verbs::ibv_alloc_pd(context.as_ptr()))?;
            let register = |page: usize| {
                let start = memory.cast::<u8>().add(page * LEN_BYTES).cast::<c_void>();
                let mr = verbs::ibv_reg_mr(pd.as_ptr(), start, LEN_BYTES, rights.0.cast_signed());
                some("ibv_reg_mr", mr)
            };
            Ok(Theirs {
                context,
                pd,
                source: register(0)?,
                target: register(1)?,
                memory,
            })
        }
    }

    /// Ends all of it, which works only if nobody uses it any more.
    fn close(self) -> Result<()> {
        // SAFETY: each object is ended once, and the memory after its registrations.
        unsafe {
            for mr in [self.source, self.target] {
                let ended = verbs::ibv_dereg_mr(mr.as_ptr());
                ensure!(ended == 0, "ibv_dereg_mr: error {ended}");
            }
            let freed = verbs::ibv_dealloc_pd(self.pd.as_ptr());
            ensure!(freed == 0, "ibv_dealloc_pd: error {freed}");
            let closed = verbs::ibv_close_device(self.context.as_ptr());
            ensure!(closed == 0, "ibv_close_device: {closed}");
            drop(Box::from_raw(self.memory));
        }
        Ok(())
    }
}

fn some<T>(call: &str, object: *mut T) -> Result<NonNull<T>> {
    NonNull::new(object).with_context(|| format!("{call}: {}", std::io::Error::last_os_error()))
}

#[allow(dead_code)] // the test calls `adopt` itself
fn main() -> Result<()> {
    adopt(&std::env::args().nth(1).unwrap_or_default())
}

/// Writes from one page of the program's memory to the other, with the device used as `settings` say: see [`Device::from_ibv_context`].
pub fn adopt(settings: &str) -> Result<()> {
    let theirs = Arc::new(Theirs::open()?);
    // SAFETY: each object is adopted with an owner that keeps it, and the memory was registered with these rights and under its own address.
    let (domain, source, target) = unsafe {
        let device = Device::from_ibv_context(theirs.context.cast(), settings, theirs.clone())?;
        let domain = ProtectionDomain::from_ibv_pd(&device, theirs.pd.cast(), theirs.clone())?;
        let region = |mr: NonNull<verbs::ibv_mr>, rights| {
            Region::from_ibv_mr(&domain, mr.cast(), rights, RegionKind::Host, theirs.clone())
        };
        let target = region(theirs.target, Access::LOCAL_WRITE | Access::REMOTE_WRITE)?;
        (
            domain.clone(),
            region(theirs.source, Access::LOCAL_WRITE)?,
            target,
        )
    };
    let config = EndpointConfig::default();
    let mut a = Endpoint::new(&domain, &config)?;
    let mut b = Endpoint::new(&domain, &config)?;
    a.connect(&b.address())?;
    b.connect(&a.address())?;

    let stream = HostStream::new("adopted")?;
    let (kernel, len) = (source.clone(), LEN_BYTES as u64);
    stream.launch(move || {
        // A kernel: here a closure, on a GPU a __global__ function.
        let _ = kernel.fill(0, len, 0x5a);
    })?;
    let (from, into) = ([source.slice(0, len)?], target.remote().slice(0, len)?);
    let written = a.stream_queue_send(&stream, &Work::write(&from, into))?;
    a.stream_wait_cq(&stream, QueueKind::Send)?;
    stream.synchronize(Some(Duration::from_secs(30)))?;
    ensure!(written.check()? && target.is_filled_with(0, len, 0x5a)?);
    let path = a.path();

    // All work is complete, and the endpoints end before the regions, so this releases the library's owners. Of work in flight, another thread may release them
    // later: a program that has some waits for that before it ends its objects.
    drop((written, stream, a, b, source, target, domain));
    let theirs = Arc::into_inner(theirs).context("the library still has an owner")?;
    theirs.close()?;
    writeln!(
        std::io::stdout(),
        "{LEN_BYTES} bytes between adopted regions; control path: {path}"
    )?;
    Ok(())
}
