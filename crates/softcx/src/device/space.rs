//! Whose memory an address is of: this process's, or that of a client that the device serves from outside.
#![allow(unsafe_code)] // reads and writes the memory of processes

use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::device::foreign::ForeignRegion;
use crate::device::foreign::{self, Foreign};
use crate::device::proc_mem::{self, Direction};
pub use doorbell_wire::memory::Span;

/// An address space: this process, or a process by its number, or a process by its place in [`PROCESSES`], or the memory of another device
/// by its place among those.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Space(u32);

/// A process, by its number and by that of a thread of it that has its memory: the first one's, which is the same, while that lives.
#[derive(Debug)]
struct ProcessIds {
    pid: AtomicI32,
    thread: AtomicI32,
}

impl ProcessIds {
    /// The thread has ended. Takes another one of the process, if there is one: the first need not be the last.
    #[cold]
    fn finds_another_thread(&self) -> bool {
        let ended = self.thread.load(Ordering::Acquire);
        if ended == NOBODY {
            return false;
        }
        let pid = self.pid.load(Ordering::Relaxed);
        let threads = std::fs::read_dir(format!("/proc/{pid}/task"));
        let threads = threads.into_iter().flatten().flatten();
        let numbers = threads.filter_map(|it| it.file_name().to_str()?.parse().ok());
        let has_memory = |&thread: &libc::pid_t| thread != ended && !Space::of(thread).is_gone();
        let Some(found) = numbers.into_iter().find(has_memory) else {
            return false;
        };
        // Not if the process was found dead meanwhile.
        let swapped =
            self.thread
                .compare_exchange(ended, found, Ordering::AcqRel, Ordering::Relaxed);
        swapped.is_ok()
    }
}

/// Set in a space that is a place in [`PROCESSES`]: no process has such a number.
const LIFE: u32 = 1 << 31;
/// Set in a space that is the memory of another device, by its place in the table of [`foreign`]. No process has such a number either.
const FOREIGN: u32 = 1 << 30;
/// No process: the kernel's numbers end at 2^22.
const NOBODY: libc::pid_t = libc::pid_t::MAX;
const MAX_PROCESSES: usize = 1 << 14;
/// Numbers of processes whose end is looked out for. Another process may get the number then, and its memory is not to be touched.
static PROCESSES: [ProcessIds; MAX_PROCESSES] = [const {
    ProcessIds {
        pid: AtomicI32::new(0),
        thread: AtomicI32::new(0),
    }
}; MAX_PROCESSES];
/// Places that are free again, behind those that were never taken.
static FREE: Mutex<(Vec<u32>, u32)> = Mutex::new((Vec::new(), 0));

/// An address in a space.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SpaceAddress {
    pub(crate) space: Space,
    pub(crate) addr: u64,
}

const _: () = assert!(size_of::<Span>() == size_of::<libc::iovec>());
const _: () = assert!(std::mem::offset_of!(libc::iovec, iov_len) == 8);

/// Spans of one system call (`UIO_MAXIOV`).
const MAX_SPANS: usize = 1024;

impl SpaceAddress {
    /// An address of this process.
    pub(crate) fn local(at: *const u8) -> SpaceAddress {
        SpaceAddress {
            space: Space::LOCAL,
            addr: at.expose_provenance() as u64,
        }
    }

    /// The place `bytes` behind this one.
    #[inline]
    pub(crate) fn behind(self, bytes: u64) -> SpaceAddress {
        SpaceAddress {
            addr: self.addr.wrapping_add(bytes),
            ..self
        }
    }

    /// So many bytes from here on.
    pub(crate) fn span(self, len_bytes: usize) -> Span {
        Span {
            addr: self.addr,
            len_bytes,
        }
    }

    /// The address as a pointer, if it is one of this process.
    #[inline]
    pub(crate) fn pointer(self) -> Option<*mut u8> {
        self.space
            .is_local()
            .then(|| std::ptr::with_exposed_provenance_mut(self.addr as usize))
    }
}

/// Memory that is not mapped, or not so that the access is allowed; or the process is gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AccessFault;

impl Space {
    /// This process: addresses are pointers.
    pub(crate) const LOCAL: Space = Space(0);

    /// The process of this host that has that number at the time of the call. Its memory is accessed by `process_vm_readv` and
    /// `process_vm_writev`, or by `/proc/PID/mem`.
    pub(crate) fn of(pid: libc::pid_t) -> Space {
        Space(pid.max(0) as u32)
    }

    /// Another process of this host for as long as it lives: until [`Space::end`], after which there is nothing in the space. `None`
    /// when there are too many. To be given back by [`Space::leave`].
    pub(crate) fn enter(pid: libc::pid_t) -> Option<Space> {
        let mut free = FREE.lock().unwrap_or_else(PoisonError::into_inner);
        let (places, never_taken) = &mut *free;
        let place = places.pop().or_else(|| {
            let next = *never_taken;
            *never_taken += u32::from((next as usize) < MAX_PROCESSES);
            Some(next)
        })?;
        let process = PROCESSES.get(place as usize)?;
        process.pid.store(pid, Ordering::Relaxed);
        process.thread.store(pid, Ordering::Release);
        Some(Space(LIFE | place))
    }

    /// The memory of another device, as long as the region has its part in it.
    pub(crate) fn of_foreign(region: &ForeignRegion) -> Space {
        Space(FOREIGN | region.place())
    }

    /// Whether it is the memory of another device.
    #[inline]
    pub(crate) fn is_foreign(self) -> bool {
        self.0 & (LIFE | FOREIGN) == FOREIGN
    }

    /// What copies the memory of another device.
    ///
    /// # Errors
    /// [`AccessFault`] if it was deregistered.
    pub(crate) fn foreign(self) -> Result<Arc<dyn Foreign>, AccessFault> {
        foreign::at(self.0 & !FOREIGN).ok_or(AccessFault)
    }

    /// The process has died.
    pub(crate) fn end(self) {
        if let Some(process) = self.process() {
            process.thread.store(NOBODY, Ordering::Release);
        }
    }

    /// Whether [`Space::end`] was called.
    pub(crate) fn has_ended(self) -> bool {
        self.process()
            .is_some_and(|process| process.thread.load(Ordering::Acquire) == NOBODY)
    }

    /// No place in the space is left.
    pub(crate) fn leave(self) {
        if self.process().is_some() {
            self.end();
            let mut free = FREE.lock().unwrap_or_else(PoisonError::into_inner);
            free.0.push(self.0 & !LIFE);
        }
    }

    fn process(self) -> Option<&'static ProcessIds> {
        let place = (self.0 & LIFE != 0).then_some(self.0 & !LIFE)?;
        PROCESSES.get(place as usize)
    }

    /// Whether addresses are pointers of this process.
    #[inline]
    pub(crate) fn is_local(self) -> bool {
        self.0 == 0
    }

    /// Reads from a client's memory, also one's own, without trusting the address: the kernel copies, and says if it cannot.
    pub(crate) fn read(self, addr: u64, into: &mut [u8]) -> Result<(), AccessFault> {
        self.gather(&mut [(addr, into)])
    }

    /// Writes to a client's memory, also one's own, without trusting the address.
    pub(crate) fn write(self, addr: u64, from: &[u8]) -> Result<(), AccessFault> {
        self.scatter(&[(addr, from)])
    }

    /// Copies from `theirs`, in this space, to `own`, in this process: both in their order, and as many bytes.
    ///
    /// # Safety
    /// `own` may be written.
    #[inline]
    pub(crate) unsafe fn fetch(self, own: &[Span], theirs: &[Span]) -> Result<(), AccessFault> {
        if self.is_foreign() {
            // SAFETY: the caller's promise, and that the memory is there is the promise of the region's owner.
            return unsafe { self.foreign()?.fetch(own, theirs) };
        }
        // SAFETY: the caller's promise.
        unsafe { self.transfer(Direction::Fetch, own, theirs) }
    }

    /// Copies from `own`, in this process, to `theirs`, in this space: both in their order, and as many bytes.
    ///
    /// # Safety
    /// `own` may be read; `theirs` may be written, if the space is this process.
    #[inline]
    pub(crate) unsafe fn put(self, own: &[Span], theirs: &[Span]) -> Result<(), AccessFault> {
        if self.is_foreign() {
            // SAFETY: as in `fetch`.
            return unsafe { self.foreign()?.put(own, theirs) };
        }
        // SAFETY: the caller's promise.
        unsafe { self.transfer(Direction::Put, own, theirs) }
    }

    /// # Safety
    /// What is done to `own`, and to `theirs` if the space is this process, may be done.
    unsafe fn transfer(
        self,
        direction: Direction,
        own: &[Span],
        theirs: &[Span],
    ) -> Result<(), AccessFault> {
        count();
        let total: usize = theirs.iter().map(|span| span.len_bytes).sum();
        if own.len().max(theirs.len()) > MAX_SPANS {
            return Err(AccessFault);
        }
        // SAFETY: the caller's promise.
        let done = unsafe { self.copy(direction, own, theirs) };
        (done == total as isize).then_some(()).ok_or(AccessFault)
    }

    /// Copies by a system call, or by the file of the memory where that is refused. Returns how many bytes, or the errno, negative.
    ///
    /// # Safety
    /// As [`Space::transfer`].
    unsafe fn copy(self, direction: Direction, own: &[Span], theirs: &[Span]) -> isize {
        let call = match direction {
            Direction::Fetch => libc::process_vm_readv,
            Direction::Put => libc::process_vm_writev,
        };
        // SAFETY: a span has the form of an `iovec`; the caller's promise; the kernel checks `theirs`.
        let done = unsafe {
            let (o, t) = (own.as_ptr().cast(), theirs.as_ptr().cast());
            let (mine, their) = (own.len() as u64, theirs.len() as u64);
            self.reach(|pid| call(pid, o, mine, t, their, 0))
        };
        if !proc_mem::is_refused(done) {
            return done;
        }
        // SAFETY: the caller's promise.
        self.reach(|pid| unsafe { proc_mem::copy(direction, pid, own, theirs) })
    }

    /// Reads several pieces with one system call, one after the other.
    pub(crate) fn gather<const N: usize>(
        self,
        pieces: &mut [(u64, &mut [u8]); N],
    ) -> Result<(), AccessFault> {
        let theirs = pieces.each_ref().map(|(addr, into)| Span {
            addr: *addr,
            len_bytes: into.len(),
        });
        let own = pieces.each_mut().map(|(_, into)| Span {
            addr: into.as_mut_ptr().expose_provenance() as u64,
            len_bytes: into.len(),
        });
        // SAFETY: `own` are exclusive borrows.
        unsafe { self.fetch(&own, &theirs) }
    }

    /// Writes several pieces with one system call, one after the other.
    pub(crate) fn scatter<const N: usize>(
        self,
        pieces: &[(u64, &[u8]); N],
    ) -> Result<(), AccessFault> {
        let theirs = pieces.map(|(addr, from)| Span {
            addr,
            len_bytes: from.len(),
        });
        let own = pieces.map(|(_, from)| Span {
            addr: from.as_ptr().expose_provenance() as u64,
            len_bytes: from.len(),
        });
        // SAFETY: `own` is only read; that `theirs` is memory of ours is the caller's concern, as it is when a process gives
        // the kernel a pointer.
        unsafe { self.put(&own, &theirs) }
    }

    /// Whether the process has no memory any more: it has died, though its number may still be taken.
    pub(crate) fn is_gone(self) -> bool {
        if self.is_foreign() {
            return false;
        }
        let mut byte = 0u8;
        // Whether there is something at the address does not matter.
        let [own, theirs] =
            [(&raw mut byte).expose_provenance() as u64, 0].map(|addr| Span { addr, len_bytes: 1 });
        // SAFETY: `own` is one byte of this function; the kernel checks `theirs`.
        let done = unsafe { self.copy(Direction::Fetch, &[own], &[theirs]) };
        !self.is_local() && done == -(libc::ESRCH as isize)
    }

    /// Makes a system call with the process's number. If no thread has that number any more, tries another thread of the process. Returns the
    /// result of the call, or the negative errno.
    #[inline]
    fn reach(self, call: impl Fn(libc::pid_t) -> isize) -> isize {
        let errno = || {
            -(std::io::Error::last_os_error()
                .raw_os_error()
                .unwrap_or(libc::EIO) as isize)
        };
        let done = call(self.pid());
        if done >= 0 {
            return done;
        }
        let failed = errno();
        let gone = failed == -(libc::ESRCH as isize);
        if gone && self.process().is_some_and(ProcessIds::finds_another_thread) {
            let done = call(self.pid());
            return if done < 0 { errno() } else { done };
        }
        failed
    }

    /// Its process.
    pub(super) fn pid(self) -> libc::pid_t {
        match self.process() {
            Some(process) => process.thread.load(Ordering::Acquire),
            None if self.is_local() => std::process::id() as libc::pid_t,
            None => self.0 as libc::pid_t,
        }
    }
}

/// System calls for the memory of processes so far, in this thread.
#[cfg(test)]
pub(crate) fn calls() -> u64 {
    CALLS.get()
}

#[cfg(test)]
thread_local! {
    static CALLS: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
}

/// For tests that take places of the table of processes: one of them takes all that are left.
#[cfg(test)]
pub(crate) fn table_alone() -> std::sync::MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

#[inline]
fn count() {
    #[cfg(test)]
    CALLS.set(CALLS.get() + 1);
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn zombie_and_reaped_processes_have_no_memory() {
        let mut child = std::process::Command::new("sleep")
            .arg("60")
            .spawn()
            .unwrap();
        let space = Space::of(child.id() as libc::pid_t);
        assert!(!space.is_gone());
        child.kill().unwrap();
        // Not waited for: a zombie.
        while !space.is_gone() {
            std::thread::yield_now();
        }
        child.wait().unwrap();
        assert!(space.is_gone());
        assert!(!Space::LOCAL.is_gone());
    }

    #[test]
    fn space_ends_with_its_process_even_if_its_pid_is_reused() {
        let _alone = table_alone();
        let me = std::process::id() as libc::pid_t;
        let (value, mut read) = ([7u8; 4], [0; 4]);
        let at = SpaceAddress::local(value.as_ptr()).addr;
        let spaces = [me, me].map(|pid| Space::enter(pid).unwrap());
        assert_ne!(spaces[0], spaces[1]);
        assert!(spaces.iter().all(|space| !space.is_local()));
        assert_eq!(spaces[0].read(at, &mut read), Ok(()));
        assert_eq!((read, spaces[0].has_ended()), (value, false));
        spaces[0].end();
        assert!(spaces[0].has_ended() && spaces[0].is_gone());
        assert_eq!(spaces[0].read(at, &mut read), Err(AccessFault));
        assert_eq!(spaces[1].read(at, &mut read), Ok(()));
        spaces.into_iter().for_each(Space::leave);
        let places: Vec<_> = (0..).map_while(|_| Space::enter(me)).collect();
        assert!(places.len() <= MAX_PROCESSES && places.contains(&spaces[0]));
        places.into_iter().for_each(Space::leave);
    }
}
