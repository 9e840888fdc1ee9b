//! The thread that waits for datagrams. A sleeping engine hears of them by it.
#![allow(unsafe_code)] // the poll system call

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::device::engine::EngineCore;
use crate::{Error, Result};

/// How long it leaves the socket to a thread that makes the device's progress, before it looks whether that still does.
const LONGEST_PAUSE: Duration = Duration::from_micros(200);
/// The first of these times; the next are twice as long.
const FIRST_PAUSE: Duration = Duration::from_micros(10);
/// A thread that polls makes progress more often than this. One that waits for a word in memory makes none.
const POLLS_WITHIN_NS: u64 = 3000;

/// The thread. It ends with this.
#[derive(Debug)]
pub(crate) struct UdpWatcher {
    stop: Arc<AtomicBool>,
    /// Readable when it is to stop.
    bell: OwnedFd,
    thread: Option<JoinHandle<()>>,
}

impl UdpWatcher {
    pub(crate) fn start(nic: Arc<EngineCore>, socket: OwnedFd) -> Result<UdpWatcher> {
        let failed = |operation, error: &std::io::Error| Error::System {
            operation,
            errno: error.raw_os_error().unwrap_or(libc::EAGAIN),
        };
        // SAFETY: takes numbers only.
        let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        if fd < 0 {
            return Err(failed("eventfd", &std::io::Error::last_os_error()));
        }
        // SAFETY: just opened, and nobody else's.
        let bell = unsafe { OwnedFd::from_raw_fd(fd) };
        let stop = Arc::new(AtomicBool::new(false));
        let watched = bell
            .try_clone()
            .map_err(|error| failed("dup of an eventfd", &error))?;
        let stopped = Arc::clone(&stop);
        let thread = std::thread::Builder::new()
            .name("softcx-udp".into())
            .spawn(move || watch(&nic, &socket, &watched, &stopped))
            .map_err(|error| failed("start of the thread of the UDP wire", &error))?;
        Ok(UdpWatcher {
            stop,
            bell,
            thread: Some(thread),
        })
    }
}

fn watch(nic: &EngineCore, socket: &OwnedFd, bell: &OwnedFd, stop: &AtomicBool) {
    let (mut seen_ns, mut pause) = (0, Duration::ZERO);
    loop {
        wait(socket, bell);
        if stop.load(Ordering::Acquire) {
            return;
        }
        if !is_driven(nic, &mut seen_ns) && take(nic) {
            // Such a wake may come between two polls, too: only several in a row show that nobody polls.
            pause /= 4;
        } else {
            // Another thread takes what arrives; or the device does nothing, such as one that is gone, and leaves the datagram where it is.
            pause = (pause * 2).clamp(FIRST_PAUSE, LONGEST_PAUSE);
            std::thread::sleep(pause);
        }
    }
}

/// Whether another thread makes the device's progress repeatedly.
fn is_driven(nic: &EngineCore, seen_ns: &mut u64) -> bool {
    let driven_ns = nic.driven.load(Ordering::Relaxed);
    let is_new = std::mem::replace(seen_ns, driven_ns) != driven_ns;
    is_new
        && (nic.wake_word.is_suppressed()
            || nic.now_ns().saturating_sub(driven_ns) < POLLS_WITHIN_NS)
}

/// Has the device take what has arrived, unless another thread has it work at this moment. Returns whether it did anything.
fn take(nic: &EngineCore) -> bool {
    let Some(mut core) = nic.try_lock() else {
        return false;
    };
    let worked = nic.turn(&mut core, nic.now_ns());
    nic.end_turn(core, worked);
    worked
}

fn wait(socket: &OwnedFd, bell: &OwnedFd) {
    let watched = |fd: &OwnedFd| libc::pollfd {
        fd: fd.as_raw_fd(),
        events: libc::POLLIN,
        revents: 0,
    };
    let mut fds = [watched(socket), watched(bell)];
    // SAFETY: two entries. Every outcome is fine: the caller looks again.
    unsafe { libc::poll(fds.as_mut_ptr(), 2, -1) };
}

impl Drop for UdpWatcher {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        let one = 1u64.to_ne_bytes();
        // SAFETY: eight bytes, as an eventfd takes them. It cannot be full.
        unsafe { libc::write(self.bell.as_raw_fd(), one.as_ptr().cast(), one.len()) };
        if let Some(thread) = self.thread.take() {
            // It does not panic; if it did, the panic was printed, and a drop is no place for another.
            let _ = thread.join();
        }
    }
}
