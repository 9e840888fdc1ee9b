//! The reference door: runs a program under a supervisor that owns the device.
#![allow(unsafe_code)] // children and signals

use std::io;
use std::os::fd::AsFd;
use std::process::{Child, Command};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::call_handler::CallHandler;
use super::clients::Clients;
use super::descriptors::Limit;
use super::install::{self, StartFailure};
use super::listener::CallListener;
use super::signals::{Signal, Signals};
use super::sysfs;
use crate::device::{Device, DeviceOptions};
use crate::{Error, Result};

/// Threads that answer calls. Commands are short; there are several so that one client whose memory is slow to read (a page
/// that comes from a disk) does not keep the others waiting.
const THREADS: usize = 3;
/// How long the end waits for them.
const LEAVE: Duration = Duration::from_millis(200);

/// How a program ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ProgramExit {
    /// The program ran: its exit code, or 128 plus the number of the signal that ended it, as in a shell.
    Exited(u8),
    /// The program could not be executed: the errno.
    NotStarted(i32),
    /// Another supervisor already controls this process and its children. The kernel allows only one.
    Supervised,
}

/// Runs a program and its child processes with a software ConnectX, and waits until all of them have ended.
///
/// The device is in this process. System calls that concern the device stop in the kernel until a thread of this process has answered them. This
/// process reads and writes the clients' memory, so a bad address fails as on a card. No privilege is needed. Static programs work as well. The
/// program and its children cannot gain privileges (`no_new_privs`).
///
/// The calling process should do nothing else. All its children are waited for, also those that other code has started. It becomes the parent of
/// orphaned processes of the program. `SIGHUP`, `SIGINT`, `SIGQUIT`, `SIGTERM`, `SIGUSR1` and `SIGUSR2` are passed on to the program.
///
/// # Errors
/// [`Error::System`] if the kernel has no seccomp user notification (Linux 5.14), or refuses another system call that the supervisor needs.
pub fn run(options: &DeviceOptions, mut command: Command) -> Result<ProgramExit> {
    let system = |operation| {
        move |error: io::Error| Error::System {
            operation,
            errno: error.raw_os_error().unwrap_or(libc::EIO),
        }
    };
    // Before there are threads: they are to have the same mask.
    let signals = Signals::block().map_err(system("signalfd"))?;
    let descriptors = Limit::raise().map_err(system("setrlimit"))?;
    let device = Device::on_fabric(options)?;
    let scratch = sysfs::show(&device, &options.faults)?;
    let clients = Clients::new(device).map_err(system("epoll"))?;
    // SAFETY: takes numbers only. Orphans stay descendants of this process: where ptrace is restricted to those, so is their memory.
    unsafe { libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) };
    command.env("SYSFS_PATH", scratch.path());
    let (child, listener) = match install::start(command, signals.before(), descriptors.before()) {
        Ok(started) => started,
        Err(StartFailure::Program(error)) => {
            return Ok(ProgramExit::NotStarted(
                error.raw_os_error().unwrap_or(libc::EIO),
            ));
        }
        Err(StartFailure::Filter(error)) if error.raw_os_error() == Some(libc::EBUSY) => {
            // SAFETY: as above. Whatever this process becomes now, its orphans are the other supervisor's.
            unsafe { libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0) };
            return Ok(ProgramExit::Supervised);
        }
        Err(StartFailure::Filter(error)) => return Err(system("seccomp with a listener")(error)),
    };
    let service = Arc::new(CallHandler {
        listener: Arc::new(CallListener::new(listener)),
        clients,
        tree: scratch.path().to_owned(),
    });
    let mut family = Family::new(&child);
    let threads = (0..THREADS).map(|_| {
        let service = Arc::clone(&service);
        let thread = std::thread::Builder::new().name("softcx-door".into());
        thread.spawn(move || service.run())
    });
    let threads: io::Result<Vec<_>> = threads.collect();
    let threads = match threads {
        Ok(threads) => threads,
        Err(error) => {
            family.signal_all(libc::SIGKILL);
            return Err(system("start of a thread")(error));
        }
    };
    keep(&service, &signals, &mut family).map_err(system("poll"))?;
    family.wait_for_first();
    leave(threads);
    Ok(ProgramExit::Exited(family.exit_code()))
}

/// Looks after signals, children and closed contexts until no process is left that has the filter.
fn keep(service: &CallHandler, signals: &Signals, family: &mut Family) -> io::Result<()> {
    loop {
        let ready = super::poll::wait(
            [
                (signals.as_fd(), libc::POLLIN),
                (service.clients.as_fd(), libc::POLLIN),
                (service.listener.as_fd(), 0),
            ],
            -1,
        )?;
        let [signalled, closed, hung_up] = ready.map(|events| events != 0);
        while signalled && let Some(signal) = signals.next() {
            match signal {
                Signal::Child => family.reap(),
                Signal::PassOn(signal) => family.pass_on(signal),
                Signal::Seen => {}
            }
        }
        if closed {
            service.clients.process_events();
        }
        if hung_up {
            return Ok(());
        }
    }
}

/// Lets the threads end. One that an old kernel does not wake (before Linux 6.11) is left behind.
fn leave(threads: Vec<JoinHandle<()>>) {
    let start = Instant::now();
    while !threads.iter().all(JoinHandle::is_finished) && start.elapsed() < LEAVE {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// The program and the processes that it left to this one.
#[derive(Debug)]
struct Family {
    first: libc::pid_t,
    /// The status of the first, once it is dead.
    status: Option<i32>,
}

impl Family {
    fn new(first: &Child) -> Family {
        Family {
            first: first.id() as libc::pid_t,
            status: None,
        }
    }

    fn reap(&mut self) {
        self.wait(-1, libc::WNOHANG);
    }

    fn wait_for_first(&mut self) {
        if self.status.is_none() {
            self.wait(self.first, 0);
        }
    }

    fn wait(&mut self, child: libc::pid_t, flags: i32) {
        loop {
            let mut status = 0;
            // SAFETY: room for a status.
            let pid = unsafe { libc::waitpid(child, &raw mut status, flags) };
            if pid == self.first {
                self.status = Some(status);
            }
            let interrupted = || io::Error::last_os_error().kind() == io::ErrorKind::Interrupted;
            if pid == 0 || (pid < 0 && !interrupted()) || pid == child {
                return;
            }
        }
    }

    /// To the program while it lives, then to what it left behind.
    fn pass_on(&self, signal: i32) {
        if self.status.is_none() {
            // SAFETY: our child, dead or alive, but not waited for: the number is its own.
            unsafe { libc::kill(self.first, signal) };
        } else {
            self.signal_all(signal);
        }
    }

    fn signal_all(&self, signal: i32) {
        // The kernel lists children by the thread that they are of.
        for task in std::fs::read_dir("/proc/self/task")
            .into_iter()
            .flatten()
            .flatten()
        {
            let children =
                std::fs::read_to_string(task.path().join("children")).unwrap_or_default();
            for child in children
                .split_whitespace()
                .filter_map(|pid| pid.parse().ok())
            {
                // SAFETY: as above.
                unsafe { libc::kill(child, signal) };
            }
        }
    }

    fn exit_code(&self) -> u8 {
        match self.status {
            Some(status) if libc::WIFSIGNALED(status) => 128 + libc::WTERMSIG(status) as u8,
            Some(status) => libc::WEXITSTATUS(status) as u8,
            // Another thread waited for it.
            None => 0,
        }
    }
}
