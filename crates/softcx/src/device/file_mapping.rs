//! A file of shared memory, mapped.
//!
//! The memory monitors of libfabric and UCX write a jump over the code of libc's `mmap` and `munmap` while the process runs, and a thread that is in them dies.
//! With a card only the program's own threads would be in them. The device's threads are in the same process behind the preload door, so they call the kernel.
#![allow(unsafe_code)] // maps memory

use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::ptr::NonNull;

#[derive(Debug)]
pub(crate) struct FileMapping {
    start: NonNull<u8>,
    len_bytes: usize,
}

// SAFETY: the mapping is owned; what lies in it is shared memory, of which those who access it take care.
unsafe impl Send for FileMapping {}
// SAFETY: as above.
unsafe impl Sync for FileMapping {}

impl FileMapping {
    /// Maps the first bytes of a file for reading and writing, shared, wherever there is room. No memory is reserved for pages that are not used.
    ///
    /// # Errors
    /// Those of `mmap`.
    pub(crate) fn new(file: impl AsFd, len_bytes: usize) -> io::Result<FileMapping> {
        // SAFETY: a new mapping. Its address is returned as a number of a register's width.
        let start = unsafe {
            libc::syscall(
                libc::SYS_mmap,
                std::ptr::null_mut::<u8>(),
                len_bytes,
                i64::from(libc::PROT_READ | libc::PROT_WRITE),
                i64::from(libc::MAP_SHARED | libc::MAP_NORESERVE),
                i64::from(file.as_fd().as_raw_fd()),
                0_i64,
            )
        };
        // -1 is the only result that is no address.
        let start = usize::try_from(start).map_err(|_| io::Error::last_os_error())?;
        let start = NonNull::new(std::ptr::with_exposed_provenance_mut(start));
        let start = start.ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(FileMapping { start, len_bytes })
    }

    /// The first byte, which is mapped as long as `self` lives.
    pub(crate) fn start(&self) -> NonNull<u8> {
        self.start
    }
}

impl Drop for FileMapping {
    fn drop(&mut self) {
        // SAFETY: mapped in `new` with this length; who used it is gone.
        unsafe { libc::syscall(libc::SYS_munmap, self.start.as_ptr(), self.len_bytes) };
    }
}
