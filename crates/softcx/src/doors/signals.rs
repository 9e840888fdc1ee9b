//! Signals of the supervisor: taken from a descriptor, and passed on.
#![allow(unsafe_code)] // signal masks and signalfd

use std::io;
use std::mem::{MaybeUninit, zeroed};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// Those that a supervisor hands on. Not the ones that stop and continue: it stops as its programs do.
const PASSED_ON: [i32; 6] = [
    libc::SIGHUP,
    libc::SIGINT,
    libc::SIGQUIT,
    libc::SIGTERM,
    libc::SIGUSR1,
    libc::SIGUSR2,
];

/// A signal that has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Signal {
    /// Some child has changed.
    Child,
    /// The signal was sent to the supervisor alone.
    PassOn(i32),
    /// One that the terminal sent to the whole process group: the programs have it already.
    Seen,
}

/// Blocks the signals for this thread, and for threads made meanwhile, as long as it lives.
#[derive(Debug)]
pub(super) struct Signals {
    fd: OwnedFd,
    before: Mask,
}

/// A signal mask.
#[derive(Debug, Clone, Copy)]
pub(super) struct Mask(libc::sigset_t);

impl Mask {
    /// Makes it the calling thread's. Allowed between fork and exec.
    pub(super) fn apply(&self) -> io::Result<()> {
        // SAFETY: a valid set; the old one is not wanted.
        let error = unsafe {
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.0, std::ptr::null_mut())
        };
        if error != 0 {
            return Err(io::Error::from_raw_os_error(error));
        }
        Ok(())
    }
}

impl Signals {
    pub(super) fn block() -> io::Result<Signals> {
        let mut set = MaybeUninit::uninit();
        // SAFETY: `sigemptyset` initialises the set, and the numbers are those of signals.
        let set = unsafe {
            libc::sigemptyset(set.as_mut_ptr());
            for signal in PASSED_ON.into_iter().chain([libc::SIGCHLD]) {
                libc::sigaddset(set.as_mut_ptr(), signal);
            }
            set.assume_init()
        };
        // SAFETY: plain data, for which zeros are fine.
        let mut before = Mask(unsafe { zeroed() });
        // SAFETY: two sets that outlive the call.
        let error =
            unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, &raw mut before.0) };
        if error != 0 {
            return Err(io::Error::from_raw_os_error(error));
        }
        // SAFETY: a valid set.
        let fd =
            unsafe { libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK) };
        if fd < 0 {
            let failed = io::Error::last_os_error();
            before.apply()?;
            return Err(failed);
        }
        Ok(Signals {
            // SAFETY: just opened, with no other owner.
            fd: unsafe { OwnedFd::from_raw_fd(fd) },
            before,
        })
    }

    /// As it was before.
    pub(super) fn before(&self) -> Mask {
        self.before
    }

    /// The next one that has come.
    pub(super) fn next(&self) -> Option<Signal> {
        // SAFETY: plain numbers, for which zeros are fine.
        let mut info: libc::signalfd_siginfo = unsafe { zeroed() };
        let len = size_of_val(&info);
        // SAFETY: room for one, whole ones are read.
        let done = unsafe { libc::read(self.fd.as_raw_fd(), (&raw mut info).cast(), len) };
        if done != len as isize {
            return None;
        }
        let signal = info.ssi_signo as i32;
        Some(match signal {
            libc::SIGCHLD => Signal::Child,
            // Zero and below: by `kill` and its like.
            _ if info.ssi_code <= 0 => Signal::PassOn(signal),
            _ => Signal::Seen,
        })
    }
}

impl AsFd for Signals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for Signals {
    fn drop(&mut self) {
        // A mask that the kernel gave, it takes.
        let _ = self.before.apply();
    }
}
