//! Host memory that GPUs can access. Each page is registered with the driver once, for all that use it.
#![allow(unsafe_code)] // calls the driver with addresses of memory of others

use std::any::Any;
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use cudarc::driver::sys::{self, CUdeviceptr, CUresult};
use doorbell_wire::memory::{Pages, page_bytes};

use super::capture::RelaxedCapture;
use super::context::{CudaContext, unless_short_of_memory};
use super::deferred_free;
use super::driver::{check, is};
use crate::proxy::drop_elsewhere;
use crate::stream::Attachments;
use crate::{Error, Result, StateKind};

/// For every context, and with an address on the device.
const FLAGS: u32 = sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_DEVICEMAP;

/// For registers of a device, such as a card's UAR page.
const IO_FLAGS: u32 = FLAGS | sys::CU_MEMHOSTREGISTER_IOMEMORY;

/// What calls about registered memory return if it is not registered any more.
const NOT_REGISTERED: [CUresult; 4] = [
    CUresult::CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED,
    CUresult::CUDA_ERROR_INVALID_VALUE,
    CUresult::CUDA_ERROR_INVALID_CONTEXT,
    CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED,
];

/// Consecutive pages that one call has registered.
#[derive(Debug)]
struct PinnedRun {
    context: CudaContext,
    pages: Range<usize>,
    /// Registered by this library, which unregisters it. The application may have registered pages of its own.
    ours: bool,
    keeper: MappingKeeper,
}

/// What keeps the memory mapped when the registration has no user any more.
enum MappingKeeper {
    /// Nothing that is known: there may be other memory at its addresses.
    Unknown,
    /// It is [held](Pages::hold).
    Held,
    /// It stays as long as this object, which the registration keeps: other memory at its addresses could not be registered before this is given back.
    Object(#[expect(dead_code, reason = "kept for its drop")] Arc<dyn Any + Send + Sync>),
}

impl fmt::Debug for MappingKeeper {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            MappingKeeper::Unknown => "Unknown",
            MappingKeeper::Held => "Held",
            MappingKeeper::Object(_) => "Object",
        })
    }
}

/// An object that keeps memory mapped, such as an open device its registers.
pub(crate) type MappingOwner = Weak<dyn Any + Send + Sync>;

/// The runs of the process, by their first address. The driver registers a page once, for all contexts.
type PinnedRuns = BTreeMap<usize, Weak<PinnedRun>>;

struct RegistrationTable {
    runs: PinnedRuns,
    /// Runs without a handle, which are to be unregistered. Those whose memory is known to be the same are among `runs`, too, and may get handles again.
    parked: Vec<Arc<PinnedRun>>,
    /// Pages that are being unregistered, which may take until a GPU has done its queued work. That may wait for another thread that registers memory,
    /// so only threads that need these pages wait.
    leaving: Vec<Range<usize>>,
}

static REGISTRATIONS: Mutex<RegistrationTable> = Mutex::new(RegistrationTable {
    runs: BTreeMap::new(),
    parked: Vec::new(),
    leaving: Vec::new(),
});
static LEFT: Condvar = Condvar::new();

fn registrations() -> MutexGuard<'static, RegistrationTable> {
    REGISTRATIONS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A span of host memory that a GPU reaches: registered as long as this lives, or by the application, which must keep it so.
#[derive(Debug)]
pub(crate) struct HostRegistration {
    runs: Vec<Arc<PinnedRun>>,
    /// The device's address of a byte minus this process's address.
    offset: u64,
}

impl HostRegistration {
    /// Registers the pages of the span that are not registered yet. Waits for pages that were registered before, for other memory perhaps, and that are to
    /// be unregistered.
    ///
    /// # Errors
    /// [`Error::Cuda`]: memory that cannot be registered, such as the registers of a card where the driver does not map them.
    /// [`Error::State`]: such pages are still registered after [`PATIENCE`].
    ///
    /// # Safety
    /// The memory is mapped, and stays so as long as this lives.
    pub(crate) unsafe fn new(
        context: &CudaContext,
        start: usize,
        len_bytes: usize,
    ) -> Result<HostRegistration> {
        // SAFETY: the caller's promise.
        unsafe { HostRegistration::new_kept(context, start, len_bytes, None) }
    }

    /// As [`HostRegistration::new`]. Memory that is not of [`Pages`] is kept by `keeper`.
    ///
    /// # Errors
    /// As [`HostRegistration::new`].
    ///
    /// # Safety
    /// As [`HostRegistration::new`].
    pub(crate) unsafe fn new_kept(
        context: &CudaContext,
        start: usize,
        len_bytes: usize,
        keeper: Option<MappingOwner>,
    ) -> Result<HostRegistration> {
        let _relaxed = RelaxedCapture::new();
        let end = (start + len_bytes).next_multiple_of(page_bytes());
        let mut at = start & !(page_bytes() - 1);
        let mut table = clear(at..end)?;
        if covering(&table.runs, at).is_none()
            && let Some(offset) = known_to_driver(context, start, len_bytes)?
        {
            return Ok(HostRegistration {
                runs: Vec::new(),
                offset,
            });
        }
        let mut held = Vec::new();
        let result = loop {
            if at >= end {
                break Ok(());
            }
            if let Some(run) = table.handle(at) {
                at = run.pages.end;
                held.push(run);
                continue;
            }
            let stop = table
                .runs
                .range(at..end)
                .find(|(_, run)| run.strong_count() > 0)
                .map_or(end, |(start, _)| *start);
            match register(context, at..stop, keeper.as_ref()) {
                Ok(run) => {
                    at = run.pages.end;
                    let run = Arc::new(run);
                    table.runs.insert(run.pages.start, Arc::downgrade(&run));
                    held.push(run);
                }
                Err(error) => break Err(error),
            }
        };
        table.runs.retain(|_, run| run.strong_count() > 0);
        drop(table);
        // Made before the error is returned, so that its drop unregisters what was registered.
        let mut pinned = HostRegistration {
            runs: held,
            offset: 0,
        };
        result?;
        pinned.offset = pinned.find_offset(context)?;
        Ok(pinned)
    }

    /// The registration of an owner's span, made with the first use in a context.
    ///
    /// # Errors
    /// As [`HostRegistration::new`].
    ///
    /// # Safety
    /// The memory stays mapped as long as `owner` lives, whose one span it is.
    pub(crate) unsafe fn of(
        owner: &Attachments,
        context: &CudaContext,
        start: NonNull<u8>,
        len_bytes: usize,
    ) -> Result<Arc<HostRegistration>> {
        // SAFETY: the caller's promise.
        let pin = || unsafe { HostRegistration::new(context, start.as_ptr().addr(), len_bytes) };
        owner.get_or_make(context.key(), pin)
    }

    /// The device's address of an address of the span.
    pub(crate) fn device_address(&self, address: usize) -> CUdeviceptr {
        (address as u64).wrapping_add(self.offset)
    }

    /// The offset, which must be the same for all runs: programs address a target by its first byte.
    fn find_offset(&self, context: &CudaContext) -> Result<u64> {
        let _entered = context.enter()?;
        let mut found = None;
        for run in &self.runs {
            let mut device = 0;
            // SAFETY: writes one address; asks for memory that is registered.
            check("cuMemHostGetDevicePointer", unsafe {
                sys::cuMemHostGetDevicePointer_v2(&mut device, run.pages.start as *mut _, 0)
            })?;
            let offset = device.wrapping_sub(run.pages.start as u64);
            if *found.get_or_insert(offset) != offset {
                return Err(not_mappable(
                    "its parts were registered separately and have unrelated addresses on the GPU",
                ));
            }
        }
        Ok(found.unwrap_or(0))
    }
}

impl Drop for HostRegistration {
    fn drop(&mut self) {
        let mut is_parked = false;
        {
            let mut table = registrations();
            for run in self.runs.drain(..) {
                // Handles are cloned under the lock, so the last one stays the last.
                if run.ours && Arc::strong_count(&run) == 1 {
                    if run.has_other_memory() {
                        table.runs.remove(&run.pages.start);
                    }
                    table.parked.push(run);
                    deferred_free::count_parked();
                    is_parked = true;
                }
            }
        }
        if is_parked {
            deferred_free::free_parked();
        }
    }
}

/// Unregisters a run that has no handle. Returns false if there is no such run.
pub(super) fn give_one_back() -> bool {
    let run = {
        let mut table = registrations();
        let Some(run) = table.parked.pop() else {
            return false;
        };
        table.runs.remove(&run.pages.start);
        table.leaving.push(run.pages.clone());
        run
    };
    deferred_free::count_unparked();
    run.unregister();
    registrations()
        .leaving
        .retain(|leaving| *leaving != run.pages);
    LEFT.notify_all();
    if matches!(run.keeper, MappingKeeper::Object(_)) {
        // This may close a device, which takes its time.
        drop_elsewhere(Box::new(run));
    }
    true
}

/// How long a thread waits for pages that are to be unregistered.
const PATIENCE: Duration = Duration::from_secs(10);

/// Waits until none of these pages is registered for other memory.
///
/// # Errors
/// [`Error::State`] if that takes longer than [`PATIENCE`].
fn clear(pages: Range<usize>) -> Result<MutexGuard<'static, RegistrationTable>> {
    let deadline = Instant::now() + PATIENCE;
    let overlaps = |other: &Range<usize>| other.start < pages.end && pages.start < other.end;
    let mut has_tried = false;
    loop {
        let table = registrations();
        let is_parked = |run: &Arc<PinnedRun>| run.has_other_memory() && overlaps(&run.pages);
        if !table.parked.iter().any(is_parked) && !table.leaving.iter().any(overlaps) {
            return Ok(table);
        }
        if !std::mem::replace(&mut has_tried, true) {
            drop(table);
            deferred_free::free_parked();
            continue;
        }
        has_tried = false;
        // There is no notification when the streams become idle.
        let woken = LEFT.wait_timeout(table, Duration::from_millis(1));
        drop(woken.unwrap_or_else(PoisonError::into_inner));
        if Instant::now() > deadline {
            return Err(not_mappable(
                "its pages are still registered for memory that was freed while CUDA streams had work; synchronise the streams before, or keep that memory",
            ));
        }
    }
}

impl PinnedRun {
    /// Whether there may be other memory at its addresses than was registered, if it has no handle.
    fn has_other_memory(&self) -> bool {
        match &self.keeper {
            MappingKeeper::Unknown => true,
            MappingKeeper::Held | MappingKeeper::Object(_) => false,
        }
    }

    /// Whether the driver has ended the registration, as it does with the context. Not if it says nothing of that, for want of memory for one.
    fn is_stale(&self) -> bool {
        let mut device = 0;
        let asked = self.context.enter().and_then(|_entered| {
            // SAFETY: writes one address.
            check("cuMemHostGetDevicePointer", unsafe {
                sys::cuMemHostGetDevicePointer_v2(&mut device, self.pages.start as *mut _, 0)
            })
        });
        asked.is_err_and(|error| NOT_REGISTERED.iter().any(|code| is(&error, *code)))
    }

    /// Lets the memory go that was held for it.
    fn release(&self) {
        if matches!(self.keeper, MappingKeeper::Held) {
            Pages::release(self.pages.start);
        }
    }

    fn unregister(&self) {
        let mut result = Ok(());
        // A destroyed context has ended its registrations.
        if let Some(_entered) = self.context.enter_to_give_back() {
            result = unless_short_of_memory(|| {
                // SAFETY: registered by `register`, and its last handle was dropped.
                check("cuMemHostUnregister", unsafe {
                    sys::cuMemHostUnregister(self.pages.start as *mut _)
                })
            });
        }
        match result {
            Err(error) if !NOT_REGISTERED.iter().any(|code| is(&error, *code)) => {
                // GPUs may still access the pages.
                if matches!(self.keeper, MappingKeeper::Held) {
                    Pages::give_up(self.pages.start);
                }
            }
            _ => self.release(),
        }
    }
}

/// The offset of a span that the driver has mapped already: the application has allocated it (`cuMemHostAlloc`, which `cudaMallocHost` calls), and
/// the driver refuses to register it, or it has registered it. `None` for any other memory.
///
/// # Errors
/// [`Error::State`] for managed memory, which is no target of a stream's memory operations.
fn known_to_driver(context: &CudaContext, start: usize, len_bytes: usize) -> Result<Option<u64>> {
    use sys::CUpointer_attribute as Attribute;
    let (mut kind, mut managed) = (0_u32, 0_u32);
    let (mut first, mut range_bytes, mut device) = (0_u64, 0_u64, 0);
    let mut attributes = [
        Attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
        Attribute::CU_POINTER_ATTRIBUTE_IS_MANAGED,
        Attribute::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
        Attribute::CU_POINTER_ATTRIBUTE_RANGE_SIZE,
    ];
    let mut values = [
        (&raw mut kind).cast(),
        (&raw mut managed).cast(),
        (&raw mut first).cast(),
        (&raw mut range_bytes).cast(),
    ];
    let _entered = context.enter()?;
    // SAFETY: writes values of at most the length of those, as cuda.h has them; of memory that the driver does not know, zeros.
    let asked = check("cuPointerGetAttributes", unsafe {
        sys::cuPointerGetAttributes(
            attributes.len() as u32,
            attributes.as_mut_ptr(),
            values.as_mut_ptr(),
            start as u64,
        )
    });
    if asked.is_ok() && managed != 0 {
        return Err(not_mappable(
            "it is managed memory, which streams do not take as the target of stores and waits, and which moves between host and GPU. With \
             confidential computing, whatever cudaMallocHost allocates is managed memory",
        ));
    }
    if asked.is_err() || kind != sys::CUmemorytype::CU_MEMORYTYPE_HOST as u32 {
        return Ok(None);
    }
    // SAFETY: writes one address.
    let found = check("cuMemHostGetDevicePointer", unsafe {
        sys::cuMemHostGetDevicePointer_v2(&mut device, start as *mut _, 0)
    });
    // The range is that of the device's addresses.
    let ahead = device.wrapping_sub(first);
    let is_whole = ahead <= range_bytes && len_bytes as u64 <= range_bytes - ahead;
    Ok((found.is_ok() && is_whole).then(|| device.wrapping_sub(start as u64)))
}

fn not_mappable(reason: &str) -> Error {
    Error::state(StateKind::Memory, "map memory to a GPU", reason)
}

/// The run with the page at that address.
fn covering(runs: &PinnedRuns, at: usize) -> Option<Arc<PinnedRun>> {
    let (_, run) = runs.range(..=at).next_back()?;
    run.upgrade().filter(|run| run.pages.contains(&at))
}

impl RegistrationTable {
    /// A handle of the run with the page at that address, if there is one that is still registered.
    fn handle(&mut self, at: usize) -> Option<Arc<PinnedRun>> {
        let run = covering(&self.runs, at)?;
        let parked = self
            .parked
            .iter()
            .position(|parked| Arc::ptr_eq(parked, &run));
        if let Some(parked) = parked {
            self.parked.swap_remove(parked);
            deferred_free::count_unparked();
            if run.is_stale() {
                self.runs.remove(&run.pages.start);
                run.release();
                return None;
            }
        }
        Some(run)
    }
}

/// Registers these pages, or only the first of them if the application has registered some.
fn register(
    context: &CudaContext,
    pages: Range<usize>,
    keeper: Option<&MappingOwner>,
) -> Result<PinnedRun> {
    let _entered = context.enter()?;
    let run = |pages: Range<usize>, ours: bool| PinnedRun {
        context: context.clone(),
        keeper: match keeper {
            _ if !ours => MappingKeeper::Unknown,
            _ if Pages::hold(pages.start) => MappingKeeper::Held,
            keeper => keeper
                .and_then(Weak::upgrade)
                .map_or(MappingKeeper::Unknown, MappingKeeper::Object),
        },
        pages,
        ours,
    };
    let whole = match attempt(&pages, keeper) {
        Ok(()) => return Ok(run(pages, true)),
        Err(error) => error,
    };
    if is(&whole, CUresult::CUDA_ERROR_NOT_SUPPORTED) && !context.registers_host_memory() {
        return Err(not_mappable(
            "the driver registers no memory of the host for this GPU (CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED is 0), as with confidential \
             computing. Its streams and kernels cannot ring a NIC or wait for one: use a host stream",
        ));
    }
    if !is(&whole, CUresult::CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED) {
        return Err(whole);
    }
    let first = pages.start..pages.start + page_bytes();
    match attempt(&first, keeper) {
        Ok(()) => Ok(run(first, true)),
        Err(error) if is(&error, CUresult::CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED) => {
            Ok(run(first, false))
        }
        Err(error) => Err(error),
    }
}

/// The registers of a card have a keeper. Other memory may be some other device's registers.
fn attempt(pages: &Range<usize>, keeper: Option<&MappingOwner>) -> Result<()> {
    let call = |flags| {
        // SAFETY: mapped memory, by the contract of `HostRegistration::new`.
        check("cuMemHostRegister", unsafe {
            sys::cuMemHostRegister_v2(pages.start as *mut _, pages.len(), flags)
        })
    };
    let (first, second) = match keeper {
        Some(_) => (IO_FLAGS, FLAGS),
        None => (FLAGS, IO_FLAGS),
    };
    match call(first) {
        Err(error) if !is(&error, CUresult::CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED) => {
            // The first error is of what the memory most likely is.
            call(second).map_err(|_| error)
        }
        answer => answer,
    }
}
