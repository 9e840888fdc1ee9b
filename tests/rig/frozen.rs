//! Threads of the library that stand still.
#![allow(unsafe_code)] // a handler of a signal
#![allow(dead_code)] // Reason: each test uses a part.

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

static IS_FROZEN: AtomicBool = AtomicBool::new(false);
static FROZEN: AtomicUsize = AtomicUsize::new(0);

/// As long as this lives, the threads that the library has started stand still.
pub struct Frozen {
    /// By name.
    pub threads: Vec<String>,
}

extern "C" fn stand_still(_signal: libc::c_int) {
    FROZEN.fetch_add(1, Ordering::SeqCst);
    while IS_FROZEN.load(Ordering::SeqCst) {
        let moment = libc::timespec {
            tv_sec: 0,
            tv_nsec: 1_000_000,
        };
        // SAFETY: reads one object; allowed in a handler.
        unsafe { libc::nanosleep(&moment, std::ptr::null_mut()) };
    }
    FROZEN.fetch_sub(1, Ordering::SeqCst);
}

impl Frozen {
    /// Stops all threads of this process whose names begin with `doorbell`, and returns when they stand still.
    pub fn library() -> Frozen {
        let handler: extern "C" fn(libc::c_int) = stand_still;
        // SAFETY: the handler sleeps, and uses atomics.
        let before = unsafe { libc::signal(libc::SIGUSR2, handler as libc::sighandler_t) };
        assert_ne!(before, libc::SIG_ERR);
        assert!(!IS_FROZEN.swap(true, Ordering::SeqCst));
        let mut threads = Vec::new();
        for task in std::fs::read_dir("/proc/self/task").unwrap() {
            let path = task.unwrap().path();
            let Ok(name) = std::fs::read_to_string(path.join("comm")) else {
                continue;
            };
            if !name.starts_with("doorbell") {
                continue;
            }
            let number = path.file_name().and_then(|it| it.to_str()?.parse().ok());
            let number: libc::c_int = number.unwrap();
            // Not while it works, when it may hold a lock that others need.
            while !sleeps(&path) {
                std::thread::yield_now();
            }
            // SAFETY: a signal to a thread of this process.
            let sent =
                unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), number, libc::SIGUSR2) };
            if sent == 0 {
                threads.push(name.trim_end().to_owned());
            }
        }
        while FROZEN.load(Ordering::SeqCst) < threads.len() {
            std::thread::sleep(Duration::from_millis(1));
        }
        Frozen { threads }
    }
}

/// Whether the thread waits for something, or has ended.
fn sleeps(task: &Path) -> bool {
    let stat = std::fs::read_to_string(task.join("stat")).unwrap_or_default();
    let state = stat
        .rsplit_once(") ")
        .and_then(|(_, rest)| rest.chars().next());
    state.is_none_or(|state| state == 'S')
}

impl Drop for Frozen {
    fn drop(&mut self) {
        IS_FROZEN.store(false, Ordering::SeqCst);
        while FROZEN.load(Ordering::SeqCst) > 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
