//! A process that the supervisor serves: its memory, and its end.
#![allow(unsafe_code)] // pidfd

use std::io;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::{Mutex, PoisonError};

use crate::device::space::Space;

/// One process. What was made in its memory refers to its space, so this lives as long as any of that.
#[derive(Debug)]
pub(super) struct ClientProcess {
    pub(super) pid: libc::pid_t,
    pub(super) space: Space,
    /// Readable when it is dead; none from then on.
    life: Mutex<Option<OwnedFd>>,
}

impl ClientProcess {
    /// The process of that number; `still_there` says afterwards that it is the one that was meant. EMFILE if there are too many.
    pub(super) fn of(
        pid: libc::pid_t,
        still_there: impl FnOnce() -> bool,
    ) -> io::Result<ClientProcess> {
        // SAFETY: takes numbers only.
        let life = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
        if life < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: just opened, with no other owner.
        let life = unsafe { OwnedFd::from_raw_fd(life as i32) };
        if !still_there() {
            return Err(io::Error::from_raw_os_error(libc::ESRCH));
        }
        let space = Space::enter(pid).ok_or_else(|| io::Error::from_raw_os_error(libc::EMFILE))?;
        Ok(ClientProcess {
            pid,
            space,
            life: Mutex::new(Some(life)),
        })
    }

    /// Calls `then` with a descriptor that becomes readable when the process dies; `None` if it has died.
    pub(super) fn with_life<T>(&self, then: impl FnOnce(BorrowedFd<'_>) -> T) -> Option<T> {
        let life = self.life.lock().unwrap_or_else(PoisonError::into_inner);
        life.as_ref().map(|life| then(life.as_fd()))
    }

    /// Whether it has died. Once this returns `true`, its space is closed.
    pub(super) fn is_dead(&self) -> bool {
        let lives = self
            .with_life(|life| super::poll::wait([(life, libc::POLLIN)], 0))
            .is_some_and(|ready| ready.is_ok_and(|[events]| events == 0));
        if !lives {
            self.space.end();
            let mut life = self.life.lock().unwrap_or_else(PoisonError::into_inner);
            life.take();
        }
        !lives
    }
}

impl Drop for ClientProcess {
    fn drop(&mut self) {
        self.space.leave();
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::process::Stdio;

    use super::*;

    #[test]
    fn memory_of_an_exited_client_is_inaccessible() {
        let _alone = crate::device::space::table_alone();
        let mut child = std::process::Command::new("cat")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        // Until it is that program: an emulator returns before, and what memory a process had before it executes a program is gone.
        let (to, from) = (
            child.stdin.as_mut().unwrap(),
            child.stdout.as_mut().unwrap(),
        );
        to.write_all(b"x").unwrap();
        from.read_exact(&mut [0]).unwrap();
        let pid = child.id() as libc::pid_t;
        assert!(ClientProcess::of(pid, || false).is_err());
        let process = ClientProcess::of(pid, || true).unwrap();
        assert!(!process.is_dead() && !process.space.is_gone());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(process.is_dead() && process.space.has_ended());
        assert!(process.is_dead() && process.with_life(|_| ()).is_none());
        let gone = ClientProcess::of(pid, || true).unwrap_err();
        assert_eq!(gone.raw_os_error(), Some(libc::ESRCH));
    }
}
