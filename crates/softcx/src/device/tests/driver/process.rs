//! A process that a driver plays, with its memory.
#![allow(unsafe_code)] // maps memory, forks, and stores as the other process would

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use crate::device::space::Space;

/// A process with some memory.
pub(crate) struct Process {
    pub(crate) space: Space,
    pid: libc::pid_t,
    start: *mut u8,
    len_bytes: usize,
    used: usize,
}

impl Process {
    /// This one.
    pub(crate) fn local(len_bytes: usize) -> Process {
        // SAFETY: a new mapping.
        let start = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len_bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        assert_ne!(start, libc::MAP_FAILED);
        Process {
            space: Space::LOCAL,
            pid: 0,
            start: start.cast(),
            len_bytes,
            used: 4096,
        }
    }

    /// Another one, which does nothing but to have the memory.
    pub(crate) fn other(len_bytes: usize) -> Process {
        let mut process = Process::local(len_bytes);
        // SAFETY: the child only calls what is safe to call after a fork of a process with threads.
        unsafe {
            let parent = libc::getpid();
            process.pid = libc::fork();
            if process.pid == 0 {
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                if libc::getppid() != parent {
                    libc::_exit(0);
                }
                serve(process.start);
            }
        }
        assert!(process.pid > 0);
        process.space = Space::of(process.pid);
        process
    }

    /// Takes memory away from the other process; here it stays.
    pub(crate) fn unmap(&self, addr: u64, len_bytes: usize) {
        let order = |at: usize, value: u64| {
            let word = self.pointer(self.start as u64 + at as u64, 8);
            // SAFETY: the first words of the mapping, which are for this.
            unsafe { AtomicU64::from_ptr(word.cast()) }.store(value, Ordering::Release);
        };
        order(8, len_bytes as u64);
        order(0, addr);
        let mut probe = [0];
        while self.space.read(addr, &mut probe).is_ok() {
            std::thread::yield_now();
        }
    }

    /// Ends the process, if it is another one.
    pub(crate) fn kill(&mut self) {
        if self.pid > 0 {
            // SAFETY: a child of ours that was not waited for.
            unsafe {
                libc::kill(self.pid, libc::SIGKILL);
                libc::waitpid(self.pid, std::ptr::null_mut(), 0);
            }
            self.pid = 0;
        }
    }

    /// Some of its memory that is not in use yet.
    pub(crate) fn place(&mut self, len_bytes: usize, align: usize) -> u64 {
        let at = self.used.next_multiple_of(align);
        self.used = at + len_bytes;
        assert!(self.used <= self.len_bytes);
        self.start as u64 + at as u64
    }

    pub(super) fn pointer(&self, addr: u64, len_bytes: usize) -> *mut u8 {
        let offset = (addr - self.start as u64) as usize;
        assert!(offset + len_bytes <= self.len_bytes);
        self.start.wrapping_add(offset)
    }

    pub(crate) fn write(&self, addr: u64, bytes: &[u8]) {
        let at = self.pointer(addr, bytes.len());
        // SAFETY: within the mapping; the device does not read it before the doorbell.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), at, bytes.len()) };
    }

    pub(crate) fn read(&self, addr: u64, len_bytes: usize) -> Vec<u8> {
        let at = self.pointer(addr, len_bytes);
        let mut bytes = vec![0; len_bytes];
        // SAFETY: within the mapping.
        unsafe { std::ptr::copy_nonoverlapping(at, bytes.as_mut_ptr(), len_bytes) };
        bytes
    }

    /// A big-endian word that is handed over.
    pub(crate) fn store(&self, addr: u64, value: u32) {
        let at = self.pointer(addr, 4);
        // SAFETY: within the mapping, and aligned by those who place words.
        unsafe { AtomicU32::from_ptr(at.cast()) }.store(value.to_be(), Ordering::Release);
    }

    pub(crate) fn word(&self, addr: u64) -> u32 {
        let at = self.pointer(addr, 4);
        // SAFETY: as above.
        u32::from_be(unsafe { AtomicU32::from_ptr(at.cast()) }.load(Ordering::Acquire))
    }

    /// A store to a register.
    pub(crate) fn ring(&self, addr: u64, value: [u8; 8]) {
        let at = self.pointer(addr, 8);
        fence(Ordering::SeqCst);
        // SAFETY: as above.
        unsafe { AtomicU64::from_ptr(at.cast()) }
            .store(u64::from_ne_bytes(value), Ordering::Release);
    }
}

/// What the other process does: it unmaps what the first words of its memory say.
///
/// # Safety
/// The start of a mapping, in a process of its own.
unsafe fn serve(start: *mut u8) -> ! {
    loop {
        // SAFETY: the caller's promise; only calls that are safe behind a fork.
        unsafe {
            let addr = AtomicU64::from_ptr(start.cast()).swap(0, Ordering::AcqRel);
            if addr != 0 {
                let len_bytes = AtomicU64::from_ptr(start.add(8).cast()).load(Ordering::Acquire);
                libc::munmap(addr as usize as *mut libc::c_void, len_bytes as usize);
            }
            libc::usleep(1000);
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
        // SAFETY: mapped in `local`; the client is gone, by the order of the fields in `Driver`.
        unsafe { libc::munmap(self.start.cast(), self.len_bytes) };
    }
}
