//! The file that a process maps as it would map a card's pages: UAR pages, the clock and how to read it.
#![allow(unsafe_code)] // memory shared with processes

use std::ffi::CStr;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::time::{Duration, SystemTime};

use crate::device::client::Errno;
use crate::device::file_mapping::FileMapping;
use crate::doors::abi::{Layout, Mlx5ClockInfo};
use crate::doors::event_pipe::{inode, last_errno, reopen};
use crate::doors::limits;

pub(super) const PAGE_BYTES: usize = 4096;
/// The first UAR page in the file, and how many there are. Their numbers are what `UAR_OBJ_ALLOC` returns.
const FIRST_UAR: usize = 0xa00;
const UARS: usize = limits::UARS as usize;
/// Pages that libmlx5 asks for by command: `MLX5_IB_MMAP_CORE_CLOCK` and `MLX5_IB_MMAP_CLOCK_INFO`, in the second byte.
const CLOCK: usize = 5 << 8;
const CLOCK_INFO: usize = 7 << 8;
const PAGES: usize = FIRST_UAR + UARS;
const NAME: &CStr = c"uverbs0";

/// The file and its mapping here.
#[derive(Debug)]
pub(super) struct DevicePages {
    file: OwnedFd,
    inode: (u64, u64),
    mapping: FileMapping,
    taken: Vec<bool>,
}

impl DevicePages {
    /// A sparse file: only pages that are used take memory.
    pub(super) fn new() -> Result<DevicePages, Errno> {
        let length = PAGES * PAGE_BYTES;
        let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
        // SAFETY: the name ends with a zero.
        let file = unsafe { libc::memfd_create(NAME.as_ptr(), flags) };
        if file < 0 {
            return Err(last_errno());
        }
        // SAFETY: the call succeeded, and no other code has the descriptor.
        let file = unsafe { OwnedFd::from_raw_fd(file) };
        // SAFETY: a descriptor of ours.
        if unsafe { libc::ftruncate(file.as_raw_fd(), length as libc::off_t) } != 0 {
            return Err(last_errno());
        }
        // A process that shrank the file would make accesses to the mapping here fatal.
        let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
        // SAFETY: a descriptor of ours.
        if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) } != 0 {
            return Err(last_errno());
        }
        let mapping = FileMapping::new(&file, length);
        let mapping = mapping.map_err(|error| error.raw_os_error().unwrap_or(libc::ENOMEM))?;
        Ok(DevicePages {
            inode: inode(&file)?,
            file,
            mapping,
            taken: vec![false; UARS],
        })
    }

    pub(super) fn inode(&self) -> (u64, u64) {
        self.inode
    }

    /// A descriptor for a process, with a description of its own.
    pub(super) fn descriptor(&self) -> Result<OwnedFd, Errno> {
        reopen(&self.file, libc::O_RDWR)
    }

    /// Another descriptor of the file, with the description that is used here.
    pub(super) fn file(&self) -> std::io::Result<OwnedFd> {
        self.file.try_clone()
    }

    /// Takes a UAR page, zeroed: its number, which is also its place in the file in pages.
    pub(super) fn take_uar(&mut self) -> Result<u32, Errno> {
        let slot = self.taken.iter().position(|taken| !taken);
        let slot = slot.ok_or(libc::ENOMEM)?;
        if let Some(taken) = self.taken.get_mut(slot) {
            *taken = true;
        }
        let page = self.at(FIRST_UAR + slot);
        // SAFETY: `at` points to a page of the mapping. A process that still maps it as a UAR that it gave back sees it change.
        unsafe { std::ptr::write_bytes(page, 0, PAGE_BYTES) };
        Ok((FIRST_UAR + slot) as u32)
    }

    /// Gives it back.
    pub(super) fn release_uar(&mut self, page: u32) {
        let slot = (page as usize).wrapping_sub(FIRST_UAR);
        if let Some(taken) = self.taken.get_mut(slot) {
            *taken = false;
        }
    }

    /// Where a taken UAR page is mapped here.
    pub(super) fn uar(&self, page: u32) -> *mut u8 {
        self.at(page as usize)
    }

    /// Where the device's clock stands to be read: two big-endian words, the high one first.
    pub(super) fn clock(&self) -> *mut u8 {
        self.at(CLOCK)
    }

    /// Says how the clock, which counts nanoseconds, turns into time of day.
    pub(super) fn set_clock_info(&self, now_ns: u64) {
        let since_epoch = SystemTime::now()
            .duration_since(SystemTime::UNIX_EPOCH)
            .unwrap_or(Duration::ZERO);
        let info = Mlx5ClockInfo {
            nsec: since_epoch.as_nanos() as u64,
            cycles: now_ns,
            mult: 1,
            mask: u64::MAX,
            // Nanoseconds fill 64 bits in 584 years.
            overflow_period: u64::MAX,
            ..Mlx5ClockInfo::default()
        };
        let bytes = info.to_bytes();
        // SAFETY: a page of the mapping, longer than the structure.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.at(CLOCK_INFO), bytes.len());
        }
    }

    fn at(&self, page: usize) -> *mut u8 {
        // SAFETY: no page behind the mapping.
        unsafe {
            self.mapping
                .start()
                .as_ptr()
                .add(page.min(PAGES - 1) * PAGE_BYTES)
        }
    }
}
