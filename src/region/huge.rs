//! Memory in huge pages, where the system has them.
#![allow(unsafe_code)] // maps memory

use std::ptr::NonNull;

use crate::{Error, Result};

/// Bytes of a huge page, as it is asked for here: the size that x86-64 and most arm64 systems set aside.
const HUGE_BYTES: usize = 2 << 20;
/// The size in `mmap`'s flags (`MAP_HUGE_2MB` of `linux/mman.h`): its logarithm above bit 26.
const MAP_HUGE_2MB: libc::c_int = 21 << libc::MAP_HUGE_SHIFT;

/// The pages that memory of a [`Region`](crate::Region) is in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum PageSize {
    /// Not allocated by this library.
    Unknown,
    /// The system's ordinary ones.
    Ordinary,
    /// Ordinary ones, of which the kernel was asked to make huge ones (`MADV_HUGEPAGE`), and did not refuse. Whether it does, and when, is its
    /// own affair.
    Advised,
    /// Huge pages that were set aside for this memory: of this many bytes.
    Huge(u64),
}

/// A private anonymous mapping of its own, zeroed.
#[derive(Debug)]
pub(super) struct HugePages {
    start: NonNull<u8>,
    /// As it was mapped.
    len_bytes: usize,
    page_size: PageSize,
}

// SAFETY: plain memory, of which addresses only are given out.
unsafe impl Send for HugePages {}
// SAFETY: as above.
unsafe impl Sync for HugePages {}

impl HugePages {
    /// At least that many bytes, in huge pages if there are as many.
    ///
    /// # Errors
    /// [`Error::System`] of `mmap`.
    pub(super) fn new(len_bytes: usize) -> Result<HugePages> {
        let whole = len_bytes
            .max(1)
            .checked_next_multiple_of(HUGE_BYTES)
            .ok_or(Error::System {
                operation: "mmap",
                errno: libc::ENOMEM,
            })?;
        // Set aside by the call: a page that is not there when it is touched would end the process.
        if let Ok(start) = map(whole, libc::MAP_HUGETLB | MAP_HUGE_2MB) {
            return Ok(HugePages {
                start,
                len_bytes: whole,
                page_size: PageSize::Huge(HUGE_BYTES as u64),
            });
        }
        let start = map(whole, 0)?;
        // SAFETY: the mapping just made, of that length. It changes no byte.
        let advised = unsafe { libc::madvise(start.as_ptr().cast(), whole, libc::MADV_HUGEPAGE) };
        Ok(HugePages {
            start,
            len_bytes: whole,
            page_size: if advised == 0 {
                PageSize::Advised
            } else {
                PageSize::Ordinary
            },
        })
    }

    pub(super) fn start(&self) -> NonNull<u8> {
        self.start
    }

    pub(super) fn page_size(&self) -> PageSize {
        self.page_size
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        // SAFETY: the mapping that `new` made, which nobody uses any more.
        unsafe {
            libc::munmap(self.start.as_ptr().cast(), self.len_bytes);
        }
    }
}

fn map(len_bytes: usize, flags: libc::c_int) -> Result<NonNull<u8>> {
    // SAFETY: a new mapping, wherever the kernel likes.
    let start = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            len_bytes,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | flags,
            -1,
            0,
        )
    };
    let error = std::io::Error::last_os_error();
    NonNull::new(start.cast())
        .filter(|_| start != libc::MAP_FAILED)
        .ok_or(Error::System {
            operation: "mmap",
            errno: error.raw_os_error().unwrap_or(libc::ENOMEM),
        })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// What the kernel says of the mapping at that address: `KernelPageSize` in kB, and its flags (proc(5), smaps).
    fn smaps(addr: usize) -> (u64, String) {
        let text = fs::read_to_string("/proc/self/smaps").unwrap();
        let mut is_it = false;
        let (mut page_kb, mut flags) = (0, String::new());
        for line in text.lines() {
            let first = line.split_whitespace().next().unwrap_or("");
            if let Some((start, end)) = first.split_once('-')
                && let (Ok(start), Ok(end)) = (
                    usize::from_str_radix(start, 16),
                    usize::from_str_radix(end, 16),
                )
            {
                is_it = (start..end).contains(&addr);
            } else if is_it && first == "KernelPageSize:" {
                page_kb = line.split_whitespace().nth(1).unwrap().parse().unwrap();
            } else if is_it && first == "VmFlags:" {
                flags = line["VmFlags:".len()..].to_owned() + " ";
            }
        }
        (page_kb, flags)
    }

    #[test]
    fn reported_page_size_matches_the_kernel() {
        for len_bytes in [1, HUGE_BYTES, HUGE_BYTES + 1] {
            let pages = HugePages::new(len_bytes).unwrap();
            // SAFETY: both bytes lie in the mapping, which nobody else has.
            unsafe {
                let last = pages.start().as_ptr().add(len_bytes - 1);
                assert_eq!(last.read(), 0);
                last.write(7);
                assert_eq!(last.read(), 7);
            }
            let (page_kb, flags) = smaps(pages.start().addr().get());
            match pages.page_size() {
                PageSize::Huge(bytes) => {
                    assert_eq!((page_kb * 1024, bytes), (bytes, HUGE_BYTES as u64));
                    assert!(flags.contains(" ht "), "{flags}");
                }
                PageSize::Advised => {
                    assert!(page_kb * 1024 < HUGE_BYTES as u64, "{flags}");
                    assert!(flags.contains(" hg "), "{flags}");
                }
                PageSize::Ordinary => assert!(!flags.contains(" hg "), "{flags}"),
                PageSize::Unknown => panic!("it is known"),
            }
        }
    }

    #[test]
    fn more_than_there_is_is_an_error() {
        for len_bytes in [usize::MAX, 1 << 60] {
            let refused = HugePages::new(len_bytes);
            assert!(matches!(refused, Err(Error::System { .. })), "{refused:?}");
        }
    }
}
