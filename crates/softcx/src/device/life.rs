//! Whether a process still lives and has its device, asked often: its memory is written to by its number, which another one may have
//! after it, and a program that it executes has at once.
#![allow(unsafe_code)] // pidfd

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use crate::device::inbox::{is_inbox, started};

/// How long an answer is good for. No number comes round again in that time.
const GOOD_NS: u64 = 1_000_000;

/// A process, or one that counts as dead.
#[derive(Debug)]
pub(crate) struct Life {
    lasts: bool,
    process: Option<OwnedFd>,
    /// When it started, where the kernel has no descriptors of processes (before 5.3).
    started: Option<u64>,
    pid: u32,
    /// The descriptor of its inbox, which is closed when it executes another program.
    inbox: u32,
    asked_ns: u64,
}

impl Life {
    /// The process that has this number now, with the inbox of this descriptor.
    pub(crate) fn of(pid: u32, inbox: u32) -> Life {
        // SAFETY: takes numbers only.
        let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
        // SAFETY: if it is one, it was just opened and belongs to nobody else.
        let process = (fd >= 0).then(|| unsafe { OwnedFd::from_raw_fd(fd as i32) });
        let started = match process {
            Some(_) => None,
            None => started(pid).ok().flatten(),
        };
        Life {
            lasts: process.is_some() || started.is_some(),
            process,
            started,
            pid,
            inbox,
            asked_ns: 0,
        }
    }

    /// Whether it lived a moment ago.
    #[inline]
    pub(crate) fn lasts(&mut self, now_ns: u64) -> bool {
        if self.lasts && now_ns.wrapping_sub(self.asked_ns) >= GOOD_NS {
            self.asked_ns = now_ns;
            self.ask();
        }
        self.lasts
    }

    #[cold]
    fn ask(&mut self) {
        let ended = match &self.process {
            Some(process) => has_ended(process),
            None => started(self.pid).ok().flatten() != self.started,
        };
        if ended || is_inbox(self.pid, self.inbox) == Some(false) {
            self.lasts = false;
        }
    }
}

fn has_ended(process: &OwnedFd) -> bool {
    let mut entry = libc::pollfd {
        fd: process.as_raw_fd(),
        events: libc::POLLIN,
        revents: 0,
    };
    loop {
        // SAFETY: one entry, which outlives the call.
        let done = unsafe { libc::poll(&raw mut entry, 1, 0) };
        // Without a wait, too, a signal that is to be handled interrupts it; that says nothing of the process.
        if done < 0 && last_errno() == libc::EINTR {
            continue;
        }
        // The descriptor is readable when the process has ended. In doubt it has.
        return done != 0;
    }
}

fn last_errno() -> i32 {
    std::io::Error::last_os_error().raw_os_error().unwrap_or(0)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::device::inbox::Inbox;
    use std::fs::File;
    use std::process::Command;
    use std::time::{Duration, Instant};

    #[test]
    fn a_life_ends_when_it_ends_and_is_not_asked_about_all_the_time() {
        let inbox = Inbox::new().unwrap();
        let address = inbox.address();
        let file = File::open(format!("/proc/self/fd/{}", address.fd)).unwrap();
        let mut command = Command::new("sleep");
        let mut child = command.arg("60").stdin(file).spawn().unwrap();
        let mut life = Life::of(child.id(), 0);
        assert!(life.lasts(0) && life.lasts(5 * GOOD_NS));
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(life.lasts(6 * GOOD_NS - 1), "asked a moment ago");
        assert!(!life.lasts(6 * GOOD_NS));
        assert!(!life.lasts(6 * GOOD_NS + 1));
        assert!(!Life::of(child.id(), 0).lasts(GOOD_NS));
    }

    extern "C" fn nothing(_: libc::c_int) {}

    /// Has a signal handled in the calling thread, some ten thousand times a second from now on.
    fn pester() -> libc::timer_t {
        let signal = libc::SIGRTMIN() + 7;
        // SAFETY: plain structures, of which zeros are valid, and calls that are given them; the handler does nothing.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = nothing as extern "C" fn(libc::c_int) as libc::sighandler_t;
            assert_eq!(libc::sigaction(signal, &action, std::ptr::null_mut()), 0);
            let mut event: libc::sigevent = std::mem::zeroed();
            event.sigev_notify = libc::SIGEV_THREAD_ID;
            event.sigev_signo = signal;
            event.sigev_notify_thread_id = libc::gettid();
            let mut timer = std::ptr::null_mut();
            let clock = libc::CLOCK_MONOTONIC;
            assert_eq!(libc::timer_create(clock, &raw mut event, &raw mut timer), 0);
            let time = libc::timespec {
                tv_sec: 0,
                tv_nsec: 100_000,
            };
            let often = libc::itimerspec {
                it_interval: time,
                it_value: time,
            };
            assert_eq!(
                libc::timer_settime(timer, 0, &often, std::ptr::null_mut()),
                0
            );
            timer
        }
    }

    #[test]
    fn nobody_is_dead_because_a_signal_came_while_the_kernel_was_asked() {
        let own = std::process::id();
        let inbox = Inbox::new().unwrap();
        let mut life = Life::of(own, inbox.address().fd);
        let process = life.process.as_ref().map(AsRawFd::as_raw_fd);
        let timer = pester();
        let (start, mut now_ns, mut interrupted) = (Instant::now(), GOOD_NS, 0);
        while interrupted < 20 && start.elapsed() < Duration::from_secs(30) {
            now_ns += GOOD_NS;
            assert!(life.lasts(now_ns), "after {interrupted} interruptions");
            // That they do interrupt it where it is not asked again.
            let mut entry = libc::pollfd {
                fd: process.unwrap_or(-1),
                events: libc::POLLIN,
                revents: 0,
            };
            // SAFETY: one entry, which outlives the call.
            let done = unsafe { libc::poll(&raw mut entry, 1, 0) };
            interrupted += u32::from(done < 0 && last_errno() == libc::EINTR);
        }
        // SAFETY: made above, and deleted once.
        unsafe { libc::timer_delete(timer) };
        assert!(interrupted > 0, "no signal came in between");
    }

    #[test]
    fn a_process_that_executes_another_program_has_its_device_no_more() {
        let inbox = Inbox::new().unwrap();
        let mut command = Command::new("sleep");
        let mut child = command.arg("60").spawn().unwrap();
        // The child had it until it became `sleep`; a bit longer than its parent waited, for descriptors are closed after that.
        let mut life = Life::of(child.id(), inbox.address().fd);
        let (start, mut now_ns) = (Instant::now(), GOOD_NS);
        while life.lasts(now_ns) && start.elapsed() < Duration::from_secs(20) {
            now_ns += GOOD_NS;
        }
        let still = child.try_wait().unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!((life.lasts(now_ns), still), (false, None));
    }
}
