//! What memory is, before a device is asked to pin it: read from `/proc/self/maps`, without touching the memory.
//!
//! The rules are those by which Linux pins for a device (`FOLL_LONGTERM`; `check_vma_flags` in `mm/gup.c`), so that a refusal has a reason
//! and not only `EFAULT`, and so that a device of software, which pins nothing, refuses the same:
//!
//! - Private anonymous memory, shared anonymous memory, memfd, tmpfs, ramfs and hugetlbfs are pinned.
//! - A shared mapping of a file of any other file system is not. Writeback cleans a page and makes it read-only to be told of the next
//!   write; a device writes past that, and the write is lost or surprises the file system. Since Linux 6.5 the kernel refuses to pin such
//!   a mapping for writing (commit 8ac268436e6d, `writable_file_mapping_allowed`). It would still pin it for reading, but truncation
//!   leaves the device with pages that are no longer the file's, so that is refused here, too.
//! - A private mapping of a file (text, constants, `.data`) is pinned: what gets pinned is a copy of the page, for reading as well since
//!   Linux 6.2 (commit 84209e87c696, unsharing), and rdma-core's older kernels force that copy by pinning for writing.
//! - Secret memory and pages of the kernel are never pinned.
#![allow(unsafe_code)] // asks the kernel whether the last byte of a shared mapping is there

use std::borrow::Cow;
use std::fs;
use std::io;

use crate::{Error, Result, StateKind};

/// What all of a range of memory is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Backing {
    /// Private anonymous memory: only this process's calls change which pages it is. The mappings that it lies in begin and end here.
    Private { start: u64, end: u64 },
    /// Anything else that may be pinned: others can replace its pages, by its file.
    Other,
}

/// Looks at `len_bytes` from `addr`, for a device that writes there if `writable`.
///
/// # Errors
/// [`Error::State`] naming the range and why it cannot be registered; [`Error::System`] if `/proc` cannot be read.
pub(super) fn look(addr: u64, len_bytes: u64, writable: bool) -> Result<Backing> {
    let read = |path, operation| {
        fs::read(path).map_err(|error| Error::System {
            operation,
            errno: error.raw_os_error().unwrap_or(libc::EIO),
        })
    };
    let maps = read("/proc/self/maps", "reading /proc/self/maps")?;
    let refused = |reason: String| {
        Error::state(
            StateKind::Memory,
            "registration",
            format!("{len_bytes} bytes at {addr:#x}: {reason}"),
        )
    };
    // Only for shared mappings of files it matters which file systems there are.
    let mounts = || read("/proc/self/mountinfo", "").unwrap_or_default();
    let found = judge(&maps, &mounts, addr, len_bytes, writable).map_err(refused)?;
    for end in found.shared_ends {
        if !is_there(end - 1) {
            let reason = format!("its byte at {:#x} lies beyond the end of its file", end - 1);
            return Err(refused(reason));
        }
    }
    Ok(found.backing)
}

#[derive(Debug, PartialEq, Eq)]
struct MappedRange {
    backing: Backing,
    /// Where parts of the range end that a file may be too short for.
    shared_ends: Vec<u64>,
}

/// One line of `/proc/self/maps` (proc(5)).
#[derive(Debug, PartialEq, Eq)]
struct Mapping<'a> {
    start: u64,
    end: u64,
    readable: bool,
    writable: bool,
    shared: bool,
    device: &'a str,
    inode: u64,
    path: Cow<'a, str>,
}

impl Mapping<'_> {
    fn parse(line: &[u8]) -> Option<Mapping<'_>> {
        let (line, rest) = field(line)?;
        let (start, end) = line.split_once('-')?;
        let (rights, rest) = field(rest)?;
        let (_offset, rest) = field(rest)?;
        let (device, rest) = field(rest)?;
        let (inode, rest) = match field(rest) {
            Some(found) => found,
            None => (std::str::from_utf8(rest).ok()?, &b""[..]),
        };
        let rights: [u8; 4] = rights.as_bytes().try_into().ok()?;
        let found = Mapping {
            start: u64::from_str_radix(start, 16).ok()?,
            end: u64::from_str_radix(end, 16).ok()?,
            readable: rights[0] == b'r',
            writable: rights[1] == b'w',
            shared: rights[3] == b's',
            device,
            inode: inode.trim().parse().ok()?,
            path: String::from_utf8_lossy(rest.trim_ascii()),
        };
        (found.start < found.end).then_some(found)
    }

    /// Why a device may not pin it.
    fn refusal(&self, mounts: &dyn Fn() -> Vec<u8>, writable: bool) -> Option<String> {
        let Mapping {
            start, end, path, ..
        } = self;
        let at = format!("{start:#x} to {end:#x}");
        if !self.readable {
            return Some(format!("no access is allowed to {at} (mprotect)"));
        }
        if writable && !self.writable {
            let what = if path.is_empty() { "it" } else { path.as_ref() };
            return Some(format!(
                "{at} is read-only ({what}), and the rights asked for let the device write"
            ));
        }
        if path.starts_with("[vvar") || path.starts_with("[vsyscall") {
            return Some(format!("{at} is {path}, pages of the kernel's own"));
        }
        if path.starts_with("/secretmem") {
            return Some(format!("{at} is secret memory, which no device may reach"));
        }
        if !self.shared || self.inode == 0 {
            return None;
        }
        // A file system that is mounted nowhere is the kernel's own: of these names it gives to no other than memory.
        let internal = ["/memfd:", "/dev/zero (deleted)", "/SYSV", "/anon_hugepage"];
        let unnamed =
            self.device.starts_with("00:") && internal.iter().any(|it| path.starts_with(it));
        let kind = match file_system(&mounts(), self.device) {
            Some(kind) if ["tmpfs", "ramfs", "hugetlbfs", "devtmpfs"].contains(&&*kind) => {
                return None;
            }
            Some(kind) => format!("file system {kind}"),
            None if unnamed => return None,
            None => format!(
                "a file system that this process does not see, device {}",
                self.device
            ),
        };
        Some(format!(
            "{at} is a shared mapping of the file {path} ({kind}); a device that writes there bypasses the file's writeback, and \
             truncation takes the pages away from under it: the kernel does not pin such memory. Map it privately, or copy"
        ))
    }
}

/// A field and what stands behind the spaces after it.
fn field(text: &[u8]) -> Option<(&str, &[u8])> {
    let end = text.iter().position(|&byte| byte == b' ')?;
    let (field, rest) = text.split_at(end);
    Some((std::str::from_utf8(field).ok()?, rest.trim_ascii_start()))
}

/// The type of the file system of a device, `major:minor` in hexadecimal as in maps; in `/proc/self/mountinfo` it is decimal.
fn file_system(mounts: &[u8], device: &str) -> Option<String> {
    let (major, minor) = device.split_once(':')?;
    let number = |digits| u32::from_str_radix(digits, 16).ok();
    let wanted = format!("{}:{}", number(major)?, number(minor)?);
    for line in mounts.split(|&byte| byte == b'\n') {
        let line = String::from_utf8_lossy(line);
        // Behind optional fields, which end with a dash, stands the type.
        if line.split(' ').nth(2) == Some(&*wanted)
            && let Some((_, behind)) = line.split_once(" - ")
        {
            return behind.split(' ').next().map(str::to_owned);
        }
    }
    None
}

fn judge(
    maps: &[u8],
    mounts: &dyn Fn() -> Vec<u8>,
    addr: u64,
    len_bytes: u64,
    writable: bool,
) -> Result<MappedRange, String> {
    let Some(end) = addr.checked_add(len_bytes) else {
        return Err("it leaves the address space".into());
    };
    let (mut first, mut is_private) = (None, true);
    let mut shared_ends = Vec::new();
    let mut covered = addr;
    // Lines are in the order of addresses. One that cannot be read is as a hole: nothing is known of it.
    let mappings = maps.split(|&byte| byte == b'\n').filter_map(Mapping::parse);
    for mapping in mappings {
        if mapping.end <= covered {
            continue;
        }
        if mapping.start > covered {
            break;
        }
        if let Some(reason) = mapping.refusal(mounts, writable) {
            return Err(reason);
        }
        if !mapping.shared && mapping.path.starts_with("/anon_hugepage") {
            // Named after a file, as all huge pages are, but private and anonymous.
        } else if mapping.inode != 0 {
            is_private = false;
            shared_ends.push(mapping.end.min(end));
        } else if mapping.shared || mapping.path == "[vdso]" {
            is_private = false;
        }
        let start = *first.get_or_insert(mapping.start);
        covered = mapping.end;
        if covered >= end {
            let backing = match is_private {
                true => Backing::Private {
                    start,
                    end: covered,
                },
                false => Backing::Other,
            };
            return Ok(MappedRange {
                backing,
                shared_ends,
            });
        }
    }
    Err(format!("nothing is mapped at {covered:#x}"))
}

/// Whether a byte can be read, by the kernel: a file may be shorter than its mapping, and an access from here would be a SIGBUS. Where the
/// kernel does not let a process ask that, the device will find out.
fn is_there(addr: u64) -> bool {
    let mut byte = 0u8;
    let here = libc::iovec {
        iov_base: (&raw mut byte).cast(),
        iov_len: 1,
    };
    let there = libc::iovec {
        iov_base: std::ptr::with_exposed_provenance_mut(addr as usize),
        iov_len: 1,
    };
    // SAFETY: the kernel copies one byte to `byte`, and says so if it cannot read.
    let read = unsafe { libc::process_vm_readv(libc::getpid(), &here, 1, &there, 1, 0) };
    read == 1 || io::Error::last_os_error().raw_os_error() != Some(libc::EFAULT)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAPS: &str = "\
55d0c0000000-55d0c0002000 r-xp 00001000 08:01 1234                       /usr/bin/x y
55d0c0002000-55d0c0003000 rw-p 00003000 08:01 1234                       /usr/bin/x y
55d0c0003000-55d0c0024000 rw-p 00000000 00:00 0                          [heap]
7f0000000000-7f0000001000 rw-p 00000000 00:00 0 
7f0000001000-7f0000002000 ---p 00000000 00:00 0 
7f0000002000-7f0000003000 rw-s 00000000 08:01 99                         /data/file (deleted)
7f0000003000-7f0000004000 rw-s 00000000 00:2b 98                         /btrfs/memfd:x
7f0000004000-7f0000005000 rw-s 00000000 00:01 97                         /memfd:ring (deleted)
7f0000005000-7f0000006000 rw-s 00000000 00:01 96                         /dev/zero (deleted)
7f0000006000-7f0000007000 rw-s 00000000 00:1a 95                         /dev/shm/a
7f0000007000-7f0000008000 rw-s 00000000 00:77 94                         /elsewhere/b
7f0000008000-7f0000009000 rw-s 00000000 00:0e 93                         /secretmem (deleted)
7f0000200000-7f0000400000 rw-p 00000000 00:0f 92                         /anon_hugepage (deleted)
this is no line
7ffd00000000-7ffd00004000 r--p 00000000 00:00 0                          [vvar]
7ffd00004000-7ffd00006000 r-xp 00000000 00:00 0                          [vdso]
";
    const MOUNTS: &str = "\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/root rw
23 22 0:26 / /dev/shm rw master:3 propagate_from:2 - tmpfs tmpfs rw
24 22 0:43 /sub /btrfs rw - btrfs /dev/sdb rw
";

    fn judged(addr: u64, len_bytes: u64, writable: bool) -> Result<MappedRange, String> {
        judge(
            MAPS.as_bytes(),
            &|| MOUNTS.into(),
            addr,
            len_bytes,
            writable,
        )
    }

    #[track_caller]
    fn refused(addr: u64, len_bytes: u64, writable: bool, parts: &[&str]) {
        let reason = judged(addr, len_bytes, writable).expect_err("refused");
        for part in parts {
            assert!(reason.contains(part), "{part}: {reason}");
        }
    }

    #[test]
    fn private_memory_is_distinguished_from_files() {
        let backing = |addr, len_bytes| judged(addr, len_bytes, true).map(|found| found.backing);
        let private = |start, end| Ok(Backing::Private { start, end });
        let heap = private(0x55d0_c000_3000, 0x55d0_c002_4000);
        assert_eq!(backing(0x55d0_c000_3000, 0x21000), heap);
        assert_eq!(backing(0x55d0_c000_4567, 1), heap);
        let page = private(0x7f00_0000_0000, 0x7f00_0000_1000);
        assert_eq!(backing(0x7f00_0000_0fff, 1), page);
        let huge = private(0x7f00_0020_0000, 0x7f00_0040_0000);
        assert_eq!(backing(0x7f00_0020_0000, 1 << 21), huge);
        // With the data before the heap it is no longer anonymous alone.
        assert_eq!(backing(0x55d0_c000_2fff, 2), Ok(Backing::Other));
        for page in [4, 5, 6] {
            assert_eq!(
                backing(0x7f00_0000_0000 + page * 0x1000, 0x1000),
                Ok(Backing::Other)
            );
        }
        let found = judged(0x7f00_0000_4000, 0x2800, true).unwrap();
        assert_eq!(
            found.shared_ends,
            [0x7f00_0000_5000, 0x7f00_0000_6000, 0x7f00_0000_6800]
        );
        assert_eq!(
            judged(0x7ffd_0000_4000, 1, false).map(|it| it.backing),
            Ok(Backing::Other)
        );
    }

    #[test]
    fn each_refusal_says_where_and_why() {
        refused(0x55d0_c000_0000, 8, true, &["read-only", "/usr/bin/x y"]);
        assert!(judged(0x55d0_c000_0000, 8, false).is_ok());
        refused(
            0x7f00_0000_0000,
            0x1001,
            false,
            &["0x7f0000001000", "no access"],
        );
        refused(
            0x7f00_0000_2000,
            1,
            false,
            &["/data/file", "ext4", "writeback"],
        );
        refused(0x7f00_0000_3000, 1, true, &["/btrfs/memfd:x", "btrfs"]);
        refused(0x7f00_0000_7000, 1, true, &["/elsewhere/b", "device 00:77"]);
        refused(0x7f00_0000_8000, 1, true, &["secret"]);
        refused(0x7ffd_0000_0000, 1, false, &["[vvar]"]);
        refused(
            0x7f00_0000_9000,
            1,
            false,
            &["nothing is mapped at 0x7f0000009000"],
        );
        refused(
            0x7f00_003f_ffff,
            2,
            false,
            &["nothing is mapped at 0x7f0000400000"],
        );
        refused(0, 1, false, &["nothing is mapped at 0x0"]);
        refused(u64::MAX, 2, false, &["address space"]);
    }

    #[test]
    fn malformed_maps_lines_are_skipped() {
        for bad in [
            "",
            "x",
            "1-2",
            "2-1 rw-p 0 0:0 0",
            "1-2 rw-p",
            "1-2 rw- 0 0:0 0",
            "g-2 rw-p 0 0:0 0",
            "1-2 rw-p 0 0:0 x",
        ] {
            assert_eq!(Mapping::parse(bad.as_bytes()), None, "{bad}");
        }
        assert!(Mapping::parse(b"1-2 rw-p 0 0:0 0").is_some());
        let strange = Mapping::parse(b"1-2 rw-p 0 0:0 7 /a\xff b").map(|it| it.path.into_owned());
        assert_eq!(strange.as_deref(), Some("/a\u{fffd} b"));
    }
}
