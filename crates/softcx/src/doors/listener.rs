//! The listening end of a seccomp filter: trapped calls come out of it, answers go in.
#![allow(unsafe_code)] // ioctls of the listener

use std::io;
use std::mem::zeroed;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::{Mutex, PoisonError};

use libc::{seccomp_notif, seccomp_notif_addfd, seccomp_notif_resp};

/// The kernel wakes the answerer on the asker's core (Linux 6.6): both would otherwise wait for a migration.
const FD_SYNC_WAKE_UP: u64 = 1;

/// What a trapped call is to return.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Reply {
    /// Let the kernel execute the call.
    Continue,
    /// Return this.
    Value(i64),
    /// Fail with this errno, a positive number.
    Errno(i32),
    /// Already answered: the descriptor was handed over as the call's result.
    Answered,
}

/// A system call that waits for its answer.
#[derive(Debug, Clone, Copy)]
pub(super) struct TrappedCall {
    pub(super) id: u64,
    /// The thread that made it.
    pub(super) tid: libc::pid_t,
    pub(super) number: libc::c_long,
    pub(super) args: [u64; 6],
}

#[derive(Debug)]
pub(super) struct CallListener {
    fd: OwnedFd,
    /// Held while waiting for a call. One thread waits in the kernel and the others for this lock, so that the thread that is woken for a call
    /// also receives it.
    turn: Mutex<()>,
}

impl CallListener {
    pub(super) fn new(fd: OwnedFd) -> CallListener {
        let flags = FD_SYNC_WAKE_UP;
        // SAFETY: takes no memory. That an older kernel refuses is fine.
        unsafe {
            libc::ioctl(
                fd.as_raw_fd(),
                libc::SECCOMP_IOCTL_NOTIF_SET_FLAGS as _,
                flags,
            )
        };
        CallListener {
            fd,
            turn: Mutex::new(()),
        }
    }

    /// The next call; `None` when no process is left that could make one.
    pub(super) fn next(&self) -> Option<TrappedCall> {
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            let [ready] = super::poll::wait([(self.fd.as_fd(), libc::POLLIN)], -1).ok()?;
            if ready & libc::POLLIN != 0 {
                if let Some(call) = self.receive() {
                    return Some(call);
                }
            } else if ready != 0 {
                return None;
            }
        }
    }

    fn receive(&self) -> Option<TrappedCall> {
        // SAFETY: plain numbers. The kernel wants them zero, and may know a longer form, which it does not write: the length is
        // part of the ioctl's number.
        let mut notif: seccomp_notif = unsafe { zeroed() };
        // SAFETY: the kernel writes one `seccomp_notif`.
        let done = unsafe {
            libc::ioctl(
                self.fd.as_raw_fd(),
                libc::SECCOMP_IOCTL_NOTIF_RECV as _,
                &raw mut notif,
            )
        };
        // ENOENT: the caller died in between. EINTR: look again.
        (done == 0).then_some(TrappedCall {
            id: notif.id,
            tid: notif.pid as libc::pid_t,
            number: notif.data.nr.into(),
            args: notif.data.args,
        })
    }

    /// Whether the caller still waits: what was read from `/proc` or its memory by its number before was really its own.
    pub(super) fn is_waiting(&self, call: &TrappedCall) -> bool {
        // SAFETY: the kernel reads the number.
        let done = unsafe {
            libc::ioctl(
                self.fd.as_raw_fd(),
                libc::SECCOMP_IOCTL_NOTIF_ID_VALID as _,
                &raw const call.id,
            )
        };
        done == 0
    }

    pub(super) fn answer(&self, call: &TrappedCall, answer: Reply) {
        let (val, error, flags) = match answer {
            Reply::Answered => return,
            Reply::Continue => (0, 0, libc::SECCOMP_USER_NOTIF_FLAG_CONTINUE as u32),
            Reply::Value(value) => (value, 0, 0),
            Reply::Errno(errno) => (0, -errno, 0),
        };
        let response = seccomp_notif_resp {
            id: call.id,
            val,
            error,
            flags,
        };
        // SAFETY: the kernel reads one `seccomp_notif_resp`. It fails when the caller has died meanwhile, which is no concern.
        unsafe {
            libc::ioctl(
                self.fd.as_raw_fd(),
                libc::SECCOMP_IOCTL_NOTIF_SEND as _,
                &raw const response,
            )
        };
    }

    /// Puts a descriptor into the caller's table, closed on exec; its number there.
    pub(super) fn give(&self, call: &TrappedCall, descriptor: BorrowedFd<'_>) -> io::Result<i32> {
        self.add(call, descriptor, 0, libc::O_CLOEXEC)
    }

    /// The same, and the call returns that number. `flags` are those of the open, for `O_CLOEXEC`.
    pub(super) fn answer_with(
        &self,
        call: &TrappedCall,
        descriptor: BorrowedFd<'_>,
        flags: i32,
    ) -> io::Result<Reply> {
        let send = libc::SECCOMP_ADDFD_FLAG_SEND as u32;
        self.add(call, descriptor, send, flags & libc::O_CLOEXEC)
            .map(|_| Reply::Answered)
    }

    fn add(
        &self,
        call: &TrappedCall,
        descriptor: BorrowedFd<'_>,
        flags: u32,
        newfd_flags: i32,
    ) -> io::Result<i32> {
        let add = seccomp_notif_addfd {
            id: call.id,
            flags,
            srcfd: descriptor.as_raw_fd() as u32,
            newfd: 0,
            newfd_flags: newfd_flags as u32,
        };
        // SAFETY: the kernel reads one `seccomp_notif_addfd`.
        let number = unsafe {
            libc::ioctl(
                self.fd.as_raw_fd(),
                libc::SECCOMP_IOCTL_NOTIF_ADDFD as _,
                &raw const add,
            )
        };
        if number < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(number)
    }
}

impl AsFd for CallListener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
