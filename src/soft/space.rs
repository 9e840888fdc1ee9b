//! Whose memory an address is of: this process's, or that of a client that the device serves from outside.
#![allow(unsafe_code)] // reads and writes the memory of processes

/// An address space.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Space(libc::pid_t);

/// An address in a space.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) space: Space,
    pub(crate) addr: u64,
}

/// Bytes in a row, in a space that is known otherwise. It has the form of an `iovec`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct Span {
    pub(crate) addr: u64,
    pub(crate) len_bytes: usize,
}

const _: () = assert!(size_of::<Span>() == size_of::<libc::iovec>());
const _: () = assert!(std::mem::offset_of!(libc::iovec, iov_len) == 8);
/// Spans of one system call (`UIO_MAXIOV`).
const MAX_SPANS: usize = 1024;

impl Place {
    /// An address of this process.
    pub(crate) fn local(at: *const u8) -> Place {
        Place {
            space: Space::LOCAL,
            addr: at.expose_provenance() as u64,
        }
    }

    /// The place `bytes` behind this one.
    #[inline]
    pub(crate) fn behind(self, bytes: u64) -> Place {
        Place {
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
pub(crate) struct Fault;

impl Space {
    /// This process: addresses are pointers.
    pub(crate) const LOCAL: Space = Space(0);

    /// Another process of this host, reached by `process_vm_readv` and `process_vm_writev`.
    pub(crate) fn of(pid: libc::pid_t) -> Space {
        Space(pid)
    }

    /// Whether addresses are pointers of this process.
    #[inline]
    pub(crate) fn is_local(self) -> bool {
        self.0 == 0
    }

    /// Reads from a client's memory, also one's own, without trusting the address: the kernel copies, and says if it cannot.
    pub(crate) fn read(self, addr: u64, into: &mut [u8]) -> Result<(), Fault> {
        self.gather(&mut [(addr, into)])
    }

    /// Writes to a client's memory, also one's own, without trusting the address.
    pub(crate) fn write(self, addr: u64, from: &[u8]) -> Result<(), Fault> {
        self.scatter(&[(addr, from)])
    }

    /// Copies from `theirs`, in this space, to `own`, in this process: both in their order, and as many bytes.
    ///
    /// # Safety
    /// `own` may be written.
    pub(crate) unsafe fn fetch(self, own: &[Span], theirs: &[Span]) -> Result<(), Fault> {
        count();
        let total: usize = theirs.iter().map(|span| span.len_bytes).sum();
        if own.len().max(theirs.len()) > MAX_SPANS {
            return Err(Fault);
        }
        // SAFETY: a span has the form of an `iovec`; the caller's promise for `own`; the kernel checks `theirs`.
        let done = unsafe {
            let (o, t) = (own.as_ptr().cast(), theirs.as_ptr().cast());
            libc::process_vm_readv(self.pid(), o, own.len() as u64, t, theirs.len() as u64, 0)
        };
        (done == total as isize).then_some(()).ok_or(Fault)
    }

    /// Copies from `own`, in this process, to `theirs`, in this space: both in their order, and as many bytes.
    ///
    /// # Safety
    /// `own` may be read; `theirs` may be written, if the space is this process.
    pub(crate) unsafe fn put(self, own: &[Span], theirs: &[Span]) -> Result<(), Fault> {
        count();
        let total: usize = theirs.iter().map(|span| span.len_bytes).sum();
        if own.len().max(theirs.len()) > MAX_SPANS {
            return Err(Fault);
        }
        // SAFETY: a span has the form of an `iovec`; the caller's promise; the kernel checks `theirs`.
        let done = unsafe {
            let (o, t) = (own.as_ptr().cast(), theirs.as_ptr().cast());
            libc::process_vm_writev(self.pid(), o, own.len() as u64, t, theirs.len() as u64, 0)
        };
        (done == total as isize).then_some(()).ok_or(Fault)
    }

    /// Reads several pieces with one system call, one after the other.
    pub(crate) fn gather<const N: usize>(
        self,
        pieces: &mut [(u64, &mut [u8]); N],
    ) -> Result<(), Fault> {
        count();
        let mut total = 0;
        let mut sides = [[EMPTY; N]; 2];
        for (at, (addr, into)) in pieces.iter_mut().enumerate() {
            total += into.len();
            sides[0][at] = vector(into.as_mut_ptr(), into.len());
            sides[1][at] = vector(foreign(*addr), into.len());
        }
        let [own, theirs] = &sides;
        // SAFETY: the vectors are as long as said; `own` are exclusive borrows; the kernel checks `theirs`.
        let done = unsafe {
            let (own, theirs) = (own.as_ptr(), theirs.as_ptr());
            libc::process_vm_readv(self.pid(), own, N as u64, theirs, N as u64, 0)
        };
        (done == total as isize).then_some(()).ok_or(Fault)
    }

    /// Writes several pieces with one system call, one after the other.
    pub(crate) fn scatter<const N: usize>(self, pieces: &[(u64, &[u8]); N]) -> Result<(), Fault> {
        count();
        let mut total = 0;
        let mut sides = [[EMPTY; N]; 2];
        for (at, (addr, from)) in pieces.iter().enumerate() {
            total += from.len();
            sides[0][at] = vector(from.as_ptr().cast_mut(), from.len());
            sides[1][at] = vector(foreign(*addr), from.len());
        }
        let [own, theirs] = &sides;
        // SAFETY: the vectors are as long as said; `own` is only read; the kernel checks `theirs`, and that it is memory of
        // ours is the caller's concern as it is when a process gives the kernel a pointer.
        let done = unsafe {
            let (own, theirs) = (own.as_ptr(), theirs.as_ptr());
            libc::process_vm_writev(self.pid(), own, N as u64, theirs, N as u64, 0)
        };
        (done == total as isize).then_some(()).ok_or(Fault)
    }

    /// Whether the process has no memory any more: it has died, though its number may still be taken.
    pub(crate) fn is_gone(self) -> bool {
        let mut byte = 0u8;
        // Whether there is something at the address does not matter.
        let (own, theirs) = (vector(&raw mut byte, 1), vector(foreign(0), 1));
        // SAFETY: `own` is one byte of this function; the kernel checks `theirs`.
        let done = unsafe {
            libc::process_vm_readv(self.pid(), &raw const own, 1, &raw const theirs, 1, 0)
        };
        let errno = std::io::Error::last_os_error().raw_os_error();
        !self.is_local() && done < 0 && errno == Some(libc::ESRCH)
    }

    pub(super) fn pid(self) -> libc::pid_t {
        if self.is_local() {
            std::process::id() as libc::pid_t
        } else {
            self.0
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

#[inline]
fn count() {
    #[cfg(test)]
    CALLS.set(CALLS.get() + 1);
}

const EMPTY: libc::iovec = vector(std::ptr::null_mut(), 0);

const fn vector(start: *mut u8, len_bytes: usize) -> libc::iovec {
    libc::iovec {
        iov_base: start.cast(),
        iov_len: len_bytes,
    }
}

/// An address for the kernel alone to use.
fn foreign(addr: u64) -> *mut u8 {
    std::ptr::without_provenance_mut(addr as usize)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn the_dead_have_no_memory_whether_waited_for_or_not() {
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
}
