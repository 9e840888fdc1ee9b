//! What a process has mapped: the check that the kernel makes when it pins memory for a card.

use std::io::{BufRead, BufReader};

use crate::device::space::{AccessFault, Space};

impl Space {
    /// Whether all of a range is mapped so that it can be read, and written if `writable`. What the process unmaps later is a
    /// fault when it is used.
    ///
    /// # Errors
    /// [`AccessFault`] if not, or if the process is gone.
    pub(crate) fn check(
        self,
        addr: u64,
        len_bytes: u64,
        writable: bool,
    ) -> Result<(), AccessFault> {
        let end = addr.checked_add(len_bytes).ok_or(AccessFault)?;
        if len_bytes == 0 {
            return Ok(());
        }
        // Mapped is not yet there: a file may be shorter than its mapping, and device memory cannot be copied.
        let mut byte = [0];
        self.read(addr, &mut byte)?;
        self.read(end - 1, &mut byte)?;
        let file =
            std::fs::File::open(format!("/proc/{}/maps", self.pid())).map_err(|_| AccessFault)?;
        let mut covered = addr;
        for line in BufReader::new(file).split(b'\n') {
            let line = line.map_err(|_| AccessFault)?;
            let Some((start, stop, rights)) = parse(&line) else {
                continue;
            };
            if stop <= covered {
                continue;
            }
            let allowed = rights[0] == b'r' && (!writable || rights[1] == b'w');
            if start > covered || !allowed {
                return Err(AccessFault);
            }
            covered = stop;
            if covered >= end {
                return Ok(());
            }
        }
        Err(AccessFault)
    }
}

/// `start-end rwxp ...` of a line in `/proc/PID/maps` (proc(5)).
fn parse(line: &[u8]) -> Option<(u64, u64, [u8; 2])> {
    let line = std::str::from_utf8(line.get(..line.len().min(64))?).ok()?;
    let (range, rest) = line.split_once(' ')?;
    let (start, stop) = range.split_once('-')?;
    let hex = |digits| u64::from_str_radix(digits, 16).ok();
    let rights = rest.as_bytes().first_chunk()?;
    Some((hex(start)?, hex(stop)?, *rights))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::dma::Pages;

    #[test]
    fn a_range_is_checked_to_its_last_byte() {
        let len_bytes = 4 * doorbell_wire::memory::page_bytes();
        let pages = Pages::new(len_bytes).unwrap();
        let at = pages.start().as_ptr() as u64;
        let check = |addr, len_bytes, writable| Space::LOCAL.check(addr, len_bytes, writable);
        assert_eq!(check(at, len_bytes as u64, true), Ok(()));
        assert_eq!(check(at + 5, 1, false), Ok(()));
        assert_eq!(check(0, 1, false), Err(AccessFault));
        assert_eq!(check(u64::MAX, 2, false), Err(AccessFault));
        assert_eq!(check(u64::MAX - 1, 1, false), Err(AccessFault));
        assert_eq!(check(at, 1 << 46, false), Err(AccessFault));
        let constant: &'static str = "not to be written";
        let constant = constant.as_ptr() as u64;
        assert_eq!(check(constant, 8, false), Ok(()));
        assert_eq!(check(constant, 8, true), Err(AccessFault));
    }

    #[test]
    fn lines_of_proc_maps_are_parsed() {
        let line = b"7f0012345000-7f0012346000 r-xp 00000000 08:01 1 /lib/x";
        assert_eq!(
            parse(line),
            Some((0x7f00_1234_5000, 0x7f00_1234_6000, *b"r-"))
        );
        for bad in ["", "x", "1-2", "1-2 ", "1-2 r", "g-2 rw", "1-2-3 rw"] {
            assert_eq!(parse(bad.as_bytes()), None, "{bad}");
        }
    }
}
