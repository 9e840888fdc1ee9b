//! Notice of memory that changes hands: `munmap`, `mmap` over it, `mremap`, `brk`, `madvise` that discards, from userfaultfd(2).
//!
//! Ranges are registered with the kernel in write-protect mode, and nothing is ever protected: no page fault comes here, so the way of a
//! first touch stays as it was. Only events come. What the kernel does (`fs/userfaultfd.c`), and what that means:
//!
//! - The thread that changes memory does not return before its event was *read*. Here it is read with the locks of all tables held, and
//!   the tables are changed before the locks are released. So a thread that returns from `munmap` finds no entry of that memory.
//! - But memory is unmapped *before* its event is queued, and then another thread may be given the addresses. It finds out by
//!   [`Monitor::settled`]: the kernel counts up `mmap_changing` under the lock that its `mmap` needs as well, and down when the event was
//!   read; while it is not zero, a userfaultfd call says `EAGAIN`. Asked first and looked up then, an entry that is found is valid.
//! - A child after `fork` has none of it (`UFFD_FEATURE_EVENT_FORK` is for privileged processes): there, [`Monitor::is_here`] says no.
//!   The parent's pinned pages stay its own, because the kernel gives the child copies of them (since Linux 5.12).
//! - `shmdt` and `shmat` with `SHM_REMAP` are not announced, nor is what others do to a file. So only private anonymous memory is watched.
//!   `SHM_REMAP` over such memory changes it unnoticed, and so does `madvise` with `MADV_GUARD_INSTALL` (Linux 6.13).
//! - `madvise` that discards is told of *before* the pages go. A thread that asks for that very memory in between makes an entry of pages that
//!   are gone when the call returns: an application that discards memory while it is being used for transfers must not.
#![allow(unsafe_code)] // userfaultfd is made of system calls

use std::fs;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;

use super::fork_guard::ForkGuard;
use super::table::Table;
use crate::region::Region;
use crate::{Error, Result, StateKind};

/// The table of one cache, as the monitor's threads know it.
pub(super) type SharedTable = Arc<Mutex<Table<Region>>>;

/// Locks it; a panic elsewhere leaves it whole: each change is one call without a way out.
#[inline]
pub(super) fn locked<T>(table: &Mutex<T>) -> MutexGuard<'_, T> {
    table.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Drops what a table has put aside, without its lock.
pub(super) fn sweep(table: &Mutex<Table<Region>>) {
    loop {
        let gone = locked(table).take_gone();
        if gone.is_none() {
            return;
        }
    }
}

/// Caches of a process.
const MAX_TABLES: usize = 64;
/// How often [`Monitor::settled`] lets other threads run before it gives up. Events are read within microseconds.
const PATIENCE: u32 = 1000;

// linux/userfaultfd.h. The numbers of the calls are those of the common encoding (asm-generic/ioctl.h).
const UFFD_API: u64 = 0xaa;
const UFFD_USER_MODE_ONLY: libc::c_int = 1;
const UFFDIO_API: libc::c_ulong = 0xc018_aa3f;
const UFFDIO_REGISTER: libc::c_ulong = 0xc020_aa00;
const UFFDIO_WRITEPROTECT: libc::c_ulong = 0xc018_aa06;
const REGISTER_MODE_WP: u64 = 2;
const FEATURE_WP: u64 = 1;
const FEATURE_EVENT_REMAP: u64 = 4;
const FEATURE_EVENT_REMOVE: u64 = 8;
const FEATURE_EVENT_UNMAP: u64 = 0x40;
/// Since Linux 5.19; with it `mmap_changing` is a count (5.15) and pinned pages are copied at `fork` (5.12).
const FEATURE_WP_HUGETLBFS_SHMEM: u64 = 0x1000;
const EVENT_REMAP: u8 = 0x14;
const EVENT_REMOVE: u8 = 0x15;
const EVENT_UNMAP: u8 = 0x16;

/// `struct uffd_msg`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
struct UffdMessage {
    event: u8,
    _reserved: [u8; 7],
    arguments: [u64; 3],
}

const _: () = assert!(size_of::<UffdMessage>() == 32);

/// What both threads and the monitor share.
#[derive(Debug)]
struct MonitorShared {
    uffd: OwnedFd,
    /// The descriptor has failed: the kernel no longer reports changes of memory.
    has_failed: AtomicBool,
    /// Never grown beyond its first allocation, as the lock is one that the reading thread waits for.
    tables: Mutex<Vec<SharedTable>>,
    parent: ForkGuard,
}

/// The process's one monitor: the kernel takes one userfaultfd for each address.
///
/// It stays when the last cache is gone. To end it, every range would have to be taken from the kernel by name, and before Linux 6.17 that
/// takes it from whatever userfaultfd has it by then, a garbage collector's or that of the next monitor.
#[derive(Debug)]
pub(super) struct Monitor {
    watch: Arc<MonitorShared>,
}

static MONITOR: Mutex<Option<Arc<Monitor>>> = Mutex::new(None);

impl Monitor {
    /// The process's monitor.
    ///
    /// # Errors
    /// Why the kernel does not tell this process what becomes of its memory.
    pub(super) fn get() -> Result<Arc<Monitor>, String> {
        let mut slot = locked(&MONITOR);
        if let Some(monitor) = &*slot {
            return if monitor.is_here() {
                Ok(Arc::clone(monitor))
            } else {
                Err("this process was forked from one that has a registration cache".into())
            };
        }
        let monitor = Arc::new(Monitor::new()?);
        *slot = Some(Arc::clone(&monitor));
        Ok(monitor)
    }

    fn new() -> Result<Monitor, String> {
        // There, one thread runs at a time, and one that is in `munmap` keeps all others from running: the event would never be read.
        let maps = fs::read("/proc/self/maps").unwrap_or_default();
        if maps.windows(10).any(|part| part == b"/valgrind/") {
            return Err("under valgrind, events of memory cannot be waited for".into());
        }
        let uffd = open()?;
        let parent = ForkGuard::new().map_err(|error| error.to_string())?;
        let watch = Arc::new(MonitorShared {
            uffd,
            has_failed: AtomicBool::new(false),
            tables: Mutex::new(Vec::with_capacity(MAX_TABLES)),
            parent,
        });
        let monitor = Monitor {
            watch: Arc::clone(&watch),
        };
        let start = |name: &str, run: Box<dyn FnOnce() + Send>| {
            let builder = thread::Builder::new().name(name.to_owned());
            builder
                .spawn(run)
                .map_err(|error| format!("start of a thread: {error}"))
        };
        let swept = Arc::clone(&watch);
        let sweeper = start("doorbell-sweep", Box::new(move || swept.sweep()))?;
        let wake = sweeper.thread().clone();
        start("doorbell-uffd", Box::new(move || watch.read(&wake)))?;
        Ok(monitor)
    }

    /// Whether this is the process that made it, and not a child of `fork`.
    #[inline]
    pub(super) fn is_here(&self) -> bool {
        self.watch.parent.is_here()
    }

    /// From now on the table receives the events of memory.
    ///
    /// # Errors
    /// [`Error::State`] if there are too many.
    pub(super) fn add(&self, table: &SharedTable) -> Result<()> {
        let mut tables = locked(&self.watch.tables);
        if tables.len() == MAX_TABLES {
            drop(tables);
            return Err(Error::state(
                StateKind::Exhausted,
                "registration cache",
                format!("this process has {MAX_TABLES} of them"),
            ));
        }
        tables.push(Arc::clone(table));
        Ok(())
    }

    /// The table is going.
    pub(super) fn remove(&self, table: &SharedTable) {
        let mut tables = locked(&self.watch.tables);
        let at = tables.iter().position(|it| Arc::ptr_eq(it, table));
        let found = at.map(|at| tables.swap_remove(at));
        drop(tables);
        drop(found);
    }

    /// Whether the kernel will tell what becomes of these mappings. They are private anonymous memory, and whole: a part of one would
    /// become a mapping of its own, and an `mremap` across the two fails.
    pub(super) fn arm(&self, start: u64, end: u64) -> bool {
        // struct uffdio_register
        let mut call = [start, end - start, REGISTER_MODE_WP, 0];
        // SAFETY: a descriptor of ours, and the structure that the call reads and writes.
        unsafe { libc::ioctl(self.watch.uffd.as_raw_fd(), UFFDIO_REGISTER, &raw mut call) == 0 }
    }

    /// Waits until every change of memory that this thread can know of is in the tables. Whether it came to that.
    pub(super) fn settled(&self) -> bool {
        for _ in 0..PATIENCE {
            if self.watch.has_failed.load(Ordering::Acquire) {
                return false;
            }
            if !self.watch.is_changing() {
                return true;
            }
            thread::yield_now();
        }
        false
    }
}

impl MonitorShared {
    /// Whether memory was changed and its event was not read yet.
    #[inline]
    fn is_changing(&self) -> bool {
        // struct uffdio_writeprotect, with a length that is always refused: the kernel looks at `mmap_changing` before.
        let call = [0u64; 3];
        // SAFETY: a descriptor of ours, and the structure that the call reads.
        let done =
            unsafe { libc::ioctl(self.uffd.as_raw_fd(), UFFDIO_WRITEPROTECT, &raw const call) };
        done != 0 && io::Error::last_os_error().raw_os_error() == Some(libc::EAGAIN)
    }

    /// The thread that reads events. It must not come to `munmap` or `madvise`, where it would wait for itself: it allocates and frees
    /// nothing once it runs.
    fn read(&self, sweeper: &thread::Thread) {
        no_signals();
        loop {
            let mut event = libc::pollfd {
                fd: self.uffd.as_raw_fd(),
                events: libc::POLLIN,
                revents: 0,
            };
            // SAFETY: one entry.
            let ready = unsafe { libc::poll(&raw mut event, 1, -1) };
            if ready < 0 && io::Error::last_os_error().raw_os_error() == Some(libc::EINTR) {
                continue;
            }
            let failed = ready < 0 || event.revents & !libc::POLLIN != 0;
            if failed || !self.read_once() {
                self.has_failed.store(true, Ordering::Release);
                self.with_tables(|table| table.invalidate(0, u64::MAX));
                sweeper.unpark();
                return;
            }
            sweeper.unpark();
        }
    }

    /// Takes the events that there are, with the locks held that they are read under. Whether the descriptor still works.
    fn read_once(&self) -> bool {
        let tables = locked(&self.tables);
        let mut guards = [const { None }; MAX_TABLES];
        for (guard, table) in guards.iter_mut().zip(tables.iter()) {
            *guard = Some(locked(table));
        }
        let mut messages = [UffdMessage::default(); 16];
        // SAFETY: a descriptor of ours that does not block, and as much room as is said.
        let read = unsafe {
            libc::read(
                self.uffd.as_raw_fd(),
                messages.as_mut_ptr().cast(),
                size_of_val(&messages),
            )
        };
        let Ok(bytes) = usize::try_from(read) else {
            // Another event was taken back meanwhile, as when the thread that waits is killed.
            return io::Error::last_os_error().raw_os_error() == Some(libc::EAGAIN);
        };
        for message in messages.iter().take(bytes / size_of::<UffdMessage>()) {
            let [first, second, third] = message.arguments;
            let ranges = match message.event {
                EVENT_UNMAP | EVENT_REMOVE => [(first, second), (0, 0)],
                EVENT_REMAP => [
                    (first, first.saturating_add(third)),
                    (second, second.saturating_add(third)),
                ],
                _ => continue,
            };
            for guard in guards.iter_mut().flatten() {
                for (start, end) in ranges {
                    guard.invalidate(start, end);
                }
            }
        }
        true
    }

    fn with_tables<R>(&self, act: impl Fn(&mut Table<Region>) -> R) {
        for table in locked(&self.tables).iter() {
            act(&mut locked(table));
        }
    }

    /// The thread that drops what events put aside: that frees memory, which the reading thread may not do.
    fn sweep(&self) {
        loop {
            let mut at = 0;
            loop {
                let table = locked(&self.tables).get(at).cloned();
                let Some(table) = table else { break };
                sweep(&table);
                at += 1;
            }
            thread::park();
        }
    }
}

/// A descriptor that tells of unmapped, moved and discarded memory.
fn open() -> Result<OwnedFd, String> {
    // Faults of the kernel's own accesses are of no interest, and without them no privilege is needed.
    let flags = libc::O_CLOEXEC | libc::O_NONBLOCK | UFFD_USER_MODE_ONLY;
    // SAFETY: no pointers; the descriptor is nobody else's.
    let uffd = unsafe {
        let fd = libc::syscall(libc::SYS_userfaultfd, flags);
        if fd < 0 {
            return Err(format!("userfaultfd: {}", io::Error::last_os_error()));
        }
        OwnedFd::from_raw_fd(fd as libc::c_int)
    };
    let features = FEATURE_WP
        | FEATURE_WP_HUGETLBFS_SHMEM
        | FEATURE_EVENT_REMAP
        | FEATURE_EVENT_REMOVE
        | FEATURE_EVENT_UNMAP;
    // struct uffdio_api
    let mut call = [UFFD_API, features, 0];
    // SAFETY: a descriptor of ours, and the structure that the call reads and writes.
    let done = unsafe { libc::ioctl(uffd.as_raw_fd(), UFFDIO_API, &raw mut call) };
    if done == 0 {
        Ok(uffd)
    } else {
        let error = io::Error::last_os_error();
        Err(format!(
            "userfaultfd without the events of Linux 5.19: {error}"
        ))
    }
}

/// A signal handler on the reading thread could free memory.
fn no_signals() {
    // SAFETY: a set of signals of ours.
    unsafe {
        let mut all = std::mem::zeroed();
        libc::sigfillset(&mut all);
        libc::pthread_sigmask(libc::SIG_BLOCK, &all, std::ptr::null_mut());
    }
}
