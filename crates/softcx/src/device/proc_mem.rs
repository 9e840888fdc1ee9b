//! The memory of a process by its file in `/proc`, where `process_vm_readv` and `process_vm_writev` are refused: the filter of a container may
//! forbid them, and an emulator of user programs may not have them.
//!
//! One difference remains: by its file, private memory is also reached that its process may not read, or not write.
#![allow(unsafe_code)] // reads and writes the memory of processes

use std::fs::OpenOptions;
use std::io;
use std::os::fd::AsRawFd;

use super::space::Span;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Direction {
    /// From the process.
    Fetch,
    /// To the process.
    Put,
}

/// Whether the kernel has no such system call, or forbids it. `done` is the result of the call: a count of bytes, or the negative errno.
pub(super) fn is_refused(done: isize) -> bool {
    [libc::ENOSYS, libc::EPERM].contains(&(-done as i32))
}

/// Copies between `own`, in this process, and `theirs`, in that one, both in their order. Returns what the system calls would: how many bytes
/// they were, or -1 and the reason as errno.
///
/// # Safety
/// What is done to `own`, and to `theirs` if it is this process, may be done.
pub(super) unsafe fn copy(
    direction: Direction,
    pid: libc::pid_t,
    own: &[Span],
    theirs: &[Span],
) -> isize {
    // SAFETY: the caller's promise.
    let failed = match unsafe { try_copy(direction, pid, own, theirs) } {
        Ok(bytes) => return bytes as isize,
        Err(error) => error.raw_os_error(),
    };
    // SAFETY: this thread's errno.
    unsafe {
        *libc::__errno_location() = match failed {
            // There is no such process.
            Some(libc::ENOENT) => libc::ESRCH,
            // There is nothing at the address.
            Some(libc::EIO) | None => libc::EFAULT,
            Some(errno) => errno,
        };
    }
    -1
}

/// # Safety
/// As [`copy`].
unsafe fn try_copy(
    direction: Direction,
    pid: libc::pid_t,
    own: &[Span],
    theirs: &[Span],
) -> io::Result<usize> {
    let memory = OpenOptions::new()
        .read(direction == Direction::Fetch)
        .write(direction == Direction::Put)
        .open(format!("/proc/{pid}/mem"))?;
    let file = memory.as_raw_fd();
    let mut total = 0;
    let mut own = own.iter().copied();
    let mut here = Span {
        addr: 0,
        len_bytes: 0,
    };
    for &(mut there) in theirs {
        while there.len_bytes > 0 {
            if here.len_bytes == 0 {
                let Some(next) = own.next() else {
                    return Ok(total);
                };
                here = next;
                continue;
            }
            let len_bytes = here.len_bytes.min(there.len_bytes);
            let place = std::ptr::with_exposed_provenance_mut(here.addr as usize);
            let at = there.addr.cast_signed();
            // SAFETY: the caller's promise; the kernel checks `there`.
            let moved = unsafe {
                match direction {
                    Direction::Fetch => libc::pread64(file, place, len_bytes, at),
                    Direction::Put => libc::pwrite64(file, place, len_bytes, at),
                }
            };
            let Ok(moved @ 1..) = usize::try_from(moved) else {
                return match (total, moved) {
                    // A process that has died and was not waited for has an empty file.
                    (0, 0) => Err(io::Error::from_raw_os_error(libc::ESRCH)),
                    (0, _) => Err(io::Error::last_os_error()),
                    _ => Ok(total),
                };
            };
            for span in [&mut here, &mut there] {
                span.addr = span.addr.wrapping_add(moved as u64);
                span.len_bytes -= moved;
            }
            total += moved;
        }
    }
    Ok(total)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::super::space::{AccessFault, Space};

    /// From here on this thread has not the two system calls. Where they are missing anyway, there may be no filters either.
    fn forbid() {
        let statement = |code: u32, jt, k| libc::sock_filter {
            code: code as u16,
            jt,
            jf: 0,
            k,
        };
        let is = |number: libc::c_long, skips| {
            let equal = libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K;
            statement(equal, skips, number as u32)
        };
        let number = std::mem::offset_of!(libc::seccomp_data, nr) as u32;
        let answer = |k| statement(libc::BPF_RET | libc::BPF_K, 0, k);
        let mut filter = [
            statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, number),
            is(libc::SYS_process_vm_readv, 2),
            is(libc::SYS_process_vm_writev, 1),
            answer(libc::SECCOMP_RET_ALLOW),
            answer(libc::SECCOMP_RET_ERRNO | libc::EPERM as u32),
        ];
        let program = libc::sock_fprog {
            len: filter.len() as u16,
            filter: filter.as_mut_ptr(),
        };
        // SAFETY: the filter outlives the call, which copies it.
        unsafe {
            libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
            libc::prctl(
                libc::PR_SET_SECCOMP,
                libc::SECCOMP_MODE_FILTER,
                &raw const program,
            );
        }
    }

    #[test]
    fn memory_of_processes_is_reached_where_the_system_calls_are_forbidden() {
        std::thread::spawn(|| {
            forbid();
            // A number, so that it is not taken for this process's own memory.
            let space = Space::of(std::process::id() as libc::pid_t);
            let mut place = [1u8, 2, 3, 4, 5, 6, 7, 8];
            let at = |offset: usize, place: &mut [u8; 8]| {
                place.as_mut_ptr().wrapping_add(offset).expose_provenance() as u64
            };
            let (mut first, mut rest) = ([0; 1], [0; 3]);
            let (begin, end) = (at(0, &mut place), at(4, &mut place));
            let both = &mut [(begin, &mut first[..]), (end, &mut rest[..])];
            assert_eq!(space.gather(both), Ok(()));
            assert_eq!((first, rest), ([1], [5, 6, 7]));
            let (begin, end) = (at(2, &mut place), at(7, &mut place));
            let both = [(begin, &[9, 9][..]), (end, &[8][..])];
            assert_eq!(space.scatter(&both), Ok(()));
            assert_eq!(std::hint::black_box(place), [1, 2, 9, 9, 5, 6, 7, 8]);
            assert_eq!(space.read(1, &mut first), Err(AccessFault));
            assert_eq!(space.write(1, &[0]), Err(AccessFault));
            assert!(!space.is_gone());

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
        })
        .join()
        .unwrap();
    }
}
