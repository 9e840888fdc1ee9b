//! An open device.
#![allow(unsafe_code)] // calls libibverbs

use std::ffi::c_void;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Once};

use doorbell_dv_sys::doorbell_dv_allocator;

use super::adopted::KeptAlive;
use super::call::{object, release, status};
use super::events::Events;
use super::gid::Gid;
use super::nearness::nearest_first;
use super::port::{Port, PortAddress};
use super::relay::Limits;
use super::select::{DeviceList, Listed, Selector};
use crate::{Error, Result, StateKind};
use doorbell_wire::memory::Pages;
use doorbell_wire::verbs::Abilities;

/// An open device file with one of its ports.
#[derive(Debug)]
pub(super) struct Context {
    /// First: its drop changes the event descriptor, which is open still.
    pub(super) events: Arc<Events>,
    file: ContextFile,
    pub(super) port: Port,
    name: String,
    /// Whether it is used by plain verbs.
    pub(super) is_plain: bool,
    /// What the device can do at most.
    pub(super) limits: Limits,
    domains: AtomicU32,
}

/// What `ibv_open_device` gives.
#[derive(Debug)]
struct ContextFile {
    raw: NonNull<rdma_sys::ibv_context>,
    /// Set for a context that was opened elsewhere, and is closed there.
    adopted: Option<KeptAlive>,
}

// SAFETY: libibverbs' calls on a context may come from any thread at any time (ibv_open_device(3) and the library's documentation).
unsafe impl Send for ContextFile {}
// SAFETY: as above.
unsafe impl Sync for ContextFile {}

impl Drop for ContextFile {
    fn drop(&mut self) {
        if self.adopted.is_some() {
            return;
        }
        // SAFETY: opened in `VerbsDevice::open_listed`, closed once, after everything made from it: all of it holds the `Context`.
        release("ibv_close_device", || unsafe {
            rdma_sys::ibv_close_device(self.raw.as_ptr())
        });
    }
}

impl Context {
    pub(super) fn raw(&self) -> NonNull<rdma_sys::ibv_context> {
        self.file.raw
    }

    /// Whether it was opened elsewhere: nothing of it may change for its other users.
    pub(super) fn is_adopted(&self) -> bool {
        self.file.adopted.is_some()
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// The address of the port that is given to a peer: chosen when it is needed first, because the table changes. One that is gone is
    /// replaced. If the table cannot be read, it is the one of before.
    pub(super) fn address(&self, reported: &mut Option<Gid>) -> PortAddress {
        let known = reported.unwrap_or(self.port.gid);
        let found = self.port.gids.find(self.raw(), known);
        let gid = found
            .or_else(|_| self.port.gids.choose(self.raw()))
            .unwrap_or(known);
        *reported = Some(gid);
        self.port.address_at(gid)
    }

    /// What queue pairs of the port can do.
    pub(super) fn abilities(&self) -> Abilities {
        Abilities {
            atomics: self.limits.has_atomics(),
            reads: self.limits.has_reads(),
            message_bytes: self.port.message_bytes,
        }
    }

    /// A number for a new domain, for messages.
    pub(super) fn next_domain(&self) -> u32 {
        self.domains.fetch_add(1, Ordering::Relaxed)
    }
}

/// A device that libibverbs has a provider for. Clones are handles of the same one.
#[derive(Debug, Clone)]
pub(crate) struct VerbsDevice {
    context: Arc<Context>,
}

impl VerbsDevice {
    /// The names of those that there are, best first: none where libibverbs finds no way to look.
    pub(crate) fn list() -> Vec<String> {
        let Ok(list) = DeviceList::read() else {
            return Vec::new();
        };
        let of = |is_mlx5: bool| {
            list.devices
                .iter()
                .filter(move |device| device.is_mlx5 == is_mlx5)
                .map(move |device| device.full_name(!is_mlx5))
        };
        of(true).chain(of(false)).collect()
    }

    /// Opens the device of that name or PCI address. A device of the mlx5 provider is opened with direct access to its queues; any
    /// other, and any device behind the prefix `verbs:`, is opened by plain verbs. `mlx5` and `verbs` mean the first device with an
    /// active port, or that nearest to the GPU of that PCI address. `None` if there is no such device.
    ///
    /// # Errors
    /// [`Error::Malformed`] for the part behind the name; [`Error::System`] of the verbs call; [`Error::State`] if no port is active.
    pub(crate) fn open_near(
        name: &str,
        gpu: &dyn Fn() -> Option<String>,
    ) -> Result<Option<VerbsDevice>> {
        let selector = Selector::parse(name)?;
        prepare_for_fork();
        let list = match DeviceList::read() {
            // "No kernel support for RDMA", says ibv_get_device_list(3): there are no devices.
            Err(Error::System { errno, .. }) if errno == libc::ENOSYS => return Ok(None),
            list => list?,
        };
        let mut candidates: Vec<&Listed> =
            (list.devices.iter().filter(|listed| selector.admits(listed))).collect();
        if selector.is_automatic()
            && let Some(gpu) = gpu()
        {
            let gpu = Path::new("/sys/bus/pci/devices").join(gpu);
            nearest_first(&mut candidates, |listed| listed.folder(), &gpu);
        }
        let mut inactive = None;
        for listed in candidates {
            match VerbsDevice::open_listed(listed, &selector) {
                // The next may do better.
                Err(error) if selector.is_automatic() => inactive = Some(error),
                opened => return opened.map(Some),
            }
        }
        inactive.map_or(Ok(None), Err)
    }

    /// [`VerbsDevice::open_near`] without a GPU.
    #[cfg(test)]
    pub(crate) fn open(name: &str) -> Result<Option<VerbsDevice>> {
        VerbsDevice::open_near(name, &|| None)
    }

    fn open_listed(listed: &Listed, selector: &Selector<'_>) -> Result<VerbsDevice> {
        // SAFETY: the list that the device is of is alive.
        let raw = object("ibv_open_device", || unsafe {
            rdma_sys::ibv_open_device(listed.device.as_ptr())
        })?;
        let file = ContextFile { raw, adopted: None };
        VerbsDevice::of(file, listed, selector, true)
    }

    /// Uses a context that was opened elsewhere. `settings` is as for [`VerbsDevice::open_near`], with `mlx5`, `verbs` or nothing in place of a name.
    /// The library reads its asynchronous events only if `reads_events`.
    ///
    /// # Safety
    /// It is an open `ibv_context`, and stays one until `owner` is dropped. If `reads_events`, nobody else reads its events.
    ///
    /// # Errors
    /// As [`VerbsDevice::open_near`]; [`Error::State`] if direct access is asked for and the provider is not mlx5.
    pub(crate) unsafe fn adopt(
        context: NonNull<c_void>,
        settings: &str,
        reads_events: bool,
        owner: KeptAlive,
    ) -> Result<VerbsDevice> {
        let selector = Selector::parse(settings)?;
        let raw = context.cast::<rdma_sys::ibv_context>();
        // SAFETY: the caller's promise: an open context, which has a device.
        let listed = unsafe { Listed::of_context(raw) }?;
        selector.check_adopted(&listed)?;
        let file = ContextFile {
            raw,
            adopted: Some(owner),
        };
        VerbsDevice::of(file, &listed, &selector, reads_events)
    }

    fn of(
        file: ContextFile,
        listed: &Listed,
        selector: &Selector<'_>,
        reads_events: bool,
    ) -> Result<VerbsDevice> {
        let port = match selector.port {
            Some(number) => Port::read(file.raw, number, selector.gid_index)?,
            None => first_active(file.raw, &listed.name, selector.gid_index)?,
        };
        let is_plain = selector.wants_plain(listed);
        if !is_plain && std::env::var_os(SIGNATURE).is_some() {
            return Err(Error::state(
                StateKind::Environment,
                "open",
                format!(
                    "{SIGNATURE} is set: libmlx5 would make queue pairs whose work requests need signatures, which this library does not write; unset it"
                ),
            ));
        }
        // The allocators of an adopted context are its other users' too. There each queue pair has a parent domain with allocators.
        if !is_plain && file.adopted.is_none() {
            // SAFETY: an open context of the provider mlx5, before anything is made from it, and functions that any thread may call.
            status("mlx5dv_set_context_attr", || unsafe {
                doorbell_dv_sys::doorbell_dv_set_allocator(
                    file.raw.as_ptr(),
                    &raw const QUEUE_MEMORY,
                )
            })?;
        }
        let limits = Limits::probe(file.raw)?;
        let events = Events::of(file.raw, reads_events)?;
        Ok(VerbsDevice {
            context: Arc::new(Context {
                events,
                file,
                port,
                name: listed.full_name(is_plain),
                is_plain,
                limits,
                domains: AtomicU32::new(0),
            }),
        })
    }

    /// The name to open it by, such as `mlx5_0` or `verbs:rxe0`.
    pub(crate) fn name(&self) -> &str {
        &self.context.name
    }

    pub(super) fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Takes note of an asynchronous event that another part of the process has read: its kind (`enum ibv_event_type`), and the address of the object
    /// that it is about.
    pub(crate) fn report_event(&self, kind: u32, object: usize) {
        self.context.events.enter(kind, object);
    }
}

/// Where queues and records of libmlx5 come from.
pub(super) static QUEUE_MEMORY: doorbell_dv_allocator = doorbell_dv_allocator {
    alloc: Some(alloc_queue_memory),
    release: Some(release_queue_memory),
};

/// Memory for the queues and records of libmlx5. The CUDA driver may keep it registered for longer than the queues live.
unsafe extern "C" fn alloc_queue_memory(len_bytes: usize, _: *mut c_void) -> *mut c_void {
    match Pages::new(len_bytes) {
        Ok(pages) => pages.into_raw().as_ptr().cast(),
        Err(_) => std::ptr::null_mut(),
    }
}

unsafe extern "C" fn release_queue_memory(start: *mut c_void, _: *mut c_void) {
    // SAFETY: libmlx5 gives back each address that it got, once.
    drop(NonNull::new(start.cast()).and_then(|start| unsafe { Pages::from_raw(start) }));
}

/// Has registered memory stay with the parent when this process forks. Kernels before 5.12 copy a page for whichever process writes to it first:
/// the parent's next write would be to another page than the device has. Later kernels copy pinned pages for the child, and need not be asked:
/// libibverbs would mark each page that is registered, which costs a system call each.
fn prepare_for_fork() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        if kernel_copies_for_the_child() {
            return;
        }
        // SAFETY: takes no arguments. It fails if memory was registered before; then the code that registered it has decided.
        let _ = unsafe { rdma_sys::ibv_fork_init() };
    });
}

/// Whether the kernel is 5.12 or newer.
fn kernel_copies_for_the_child() -> bool {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease");
    release.is_ok_and(|release| is_5_12(&release))
}

fn is_5_12(release: &str) -> bool {
    let mut numbers = release
        .split(|c: char| !c.is_ascii_digit())
        .map_while(|number| number.parse::<u32>().ok());
    (numbers.next(), numbers.next()) >= (Some(5), Some(12))
}

/// The variable by which libmlx5 makes each queue pair with `MLX5_QP_FLAG_SIGNATURE`.
const SIGNATURE: &str = "MLX5_QP_SIGNATURE";

fn first_active(
    context: NonNull<rdma_sys::ibv_context>,
    name: &str,
    gid_index: Option<u8>,
) -> Result<Port> {
    // SAFETY: plain numbers and arrays of them, for which zero is a value.
    let mut attributes: rdma_sys::ibv_device_attr = unsafe { std::mem::zeroed() };
    // SAFETY: an open context, and a place for the result.
    status("ibv_query_device", || unsafe {
        rdma_sys::ibv_query_device(context.as_ptr(), &raw mut attributes)
    })?;
    let mut refusal = None;
    for number in 1..=attributes.phys_port_cnt {
        match Port::read(context, number, gid_index) {
            Ok(port) if port.is_active => return Ok(port),
            Ok(_) => {}
            Err(error) => refusal = Some(error),
        }
    }
    Err(refusal.unwrap_or_else(|| {
        Error::state(
            StateKind::NotFound,
            "open",
            format!("no port of `{name}` is active"),
        )
    }))
}

#[cfg(test)]
mod tests {
    use super::is_5_12;

    #[test]
    fn kernels_that_copy_for_the_child_are_known_by_their_release() {
        for new in [
            "5.12.0",
            "5.14.0-362.el9.x86_64\n",
            "6.1.0-18-amd64",
            "10.0",
        ] {
            assert!(is_5_12(new), "{new}");
        }
        for old in [
            "5.11.22",
            "4.18.0-553.el8_10.x86_64\n",
            "5.4.0-150-generic",
            "5",
            "",
        ] {
            assert!(!is_5_12(old), "{old}");
        }
    }
}
