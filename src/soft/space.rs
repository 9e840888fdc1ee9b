//! Whose memory an address is of: this process's, or that of a client that the device serves from outside.
#![allow(unsafe_code)] // reads and writes the memory of processes

/// An address space.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Space(libc::pid_t);

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
    pub(crate) fn is_local(self) -> bool {
        self.0 == 0
    }

    /// Reads from a client's memory, also one's own, without trusting the address: the kernel copies, and says if it cannot.
    pub(crate) fn read(self, addr: u64, into: &mut [u8]) -> Result<(), Fault> {
        let (pid, len) = (self.pid(), into.len());
        let local = libc::iovec {
            iov_base: into.as_mut_ptr().cast(),
            iov_len: len,
        };
        let remote = libc::iovec {
            iov_base: addr as usize as *mut libc::c_void,
            iov_len: len,
        };
        // SAFETY: `local` is a buffer of this function's caller; the kernel checks `remote`.
        let done =
            unsafe { libc::process_vm_readv(pid, &raw const local, 1, &raw const remote, 1, 0) };
        (done == len as isize).then_some(()).ok_or(Fault)
    }

    /// Writes to a client's memory, also one's own, without trusting the address.
    pub(crate) fn write(self, addr: u64, from: &[u8]) -> Result<(), Fault> {
        let (pid, len) = (self.pid(), from.len());
        let local = libc::iovec {
            iov_base: from.as_ptr().cast_mut().cast(),
            iov_len: len,
        };
        let remote = libc::iovec {
            iov_base: addr as usize as *mut libc::c_void,
            iov_len: len,
        };
        // SAFETY: `local` is only read; the kernel checks `remote`, and that it is memory of ours is the caller's concern as
        // it is when a process gives the kernel a pointer.
        let done =
            unsafe { libc::process_vm_writev(pid, &raw const local, 1, &raw const remote, 1, 0) };
        (done == len as isize).then_some(()).ok_or(Fault)
    }

    fn pid(self) -> libc::pid_t {
        if self.is_local() {
            std::process::id() as libc::pid_t
        } else {
            self.0
        }
    }
}
