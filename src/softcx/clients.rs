//! Who has the device open through the supervisor: contexts by the inode of their descriptor, and the life of their processes.
#![allow(unsafe_code)] // pidfd and epoll

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::caller::Inode;
use super::context::Context;
use super::last_close::LastClose;
use crate::soft::Device;
use crate::soft::space::Space;

/// One open of the device.
#[derive(Debug)]
pub(super) struct Open {
    pub(super) context: Context,
    /// Whose memory the context is about.
    pub(super) process: libc::pid_t,
}

#[derive(Debug, Default)]
struct Table {
    opens: HashMap<Inode, Arc<Open>>,
    /// A descriptor that becomes readable when the process is dead, and how many contexts the process has.
    processes: HashMap<libc::pid_t, (OwnedFd, usize)>,
}

#[derive(Debug)]
pub(super) struct Clients {
    device: Device,
    table: Mutex<Table>,
    last_close: LastClose,
    /// What the keeper waits for: the `last_close` as [`CLOSES`], and processes by their numbers.
    events: OwnedFd,
}

/// Something to wait for that is not a process.
const CLOSES: u64 = 1 << 32;

impl Clients {
    pub(super) fn new(device: Device) -> io::Result<Clients> {
        // SAFETY: takes flags only.
        let events = unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) };
        if events < 0 {
            return Err(io::Error::last_os_error());
        }
        let clients = Clients {
            device,
            table: Mutex::default(),
            last_close: LastClose::new(libc::IN_NONBLOCK)?,
            // SAFETY: just opened, and nobody else's.
            events: unsafe { OwnedFd::from_raw_fd(events) },
        };
        clients.wait_for(clients.last_close.as_fd(), CLOSES)?;
        Ok(clients)
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The context behind a descriptor.
    pub(super) fn find(&self, inode: Inode) -> Option<Arc<Open>> {
        self.table().opens.get(&inode).cloned()
    }

    /// Whether nobody has the device open.
    pub(super) fn is_empty(&self) -> bool {
        self.table().opens.is_empty()
    }

    /// Opens the device for a process; `still_there` says afterwards that the number was really its own. The descriptor is the only
    /// reference: the context ends when it and all its copies are closed.
    pub(super) fn open(
        &self,
        process: libc::pid_t,
        still_there: impl FnOnce() -> bool,
    ) -> io::Result<OwnedFd> {
        let life = self.life_of(process)?;
        if !still_there() {
            return Err(io::Error::from_raw_os_error(libc::ESRCH));
        }
        let (context, descriptor) = Context::open(&self.device, Space::of(process))?;
        let inode = context.inode();
        let mut table = self.table();
        self.last_close.watch(descriptor.as_fd(), inode)?;
        table
            .opens
            .insert(inode, Arc::new(Open { context, process }));
        match table.processes.get_mut(&process) {
            Some((_, count)) => *count += 1,
            None => {
                self.wait_for(life.as_fd(), process as u64)?;
                table.processes.insert(process, (life, 1));
            }
        }
        Ok(descriptor)
    }

    fn life_of(&self, process: libc::pid_t) -> io::Result<OwnedFd> {
        // SAFETY: takes numbers only.
        let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, process, 0) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: just opened, and nobody else's.
        Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
    }

    fn wait_for(&self, descriptor: BorrowedFd<'_>, token: u64) -> io::Result<()> {
        let mut event = libc::epoll_event {
            events: libc::EPOLLIN as u32,
            u64: token,
        };
        // SAFETY: two open descriptors, and an event that the kernel reads.
        let done = unsafe {
            libc::epoll_ctl(
                self.events.as_raw_fd(),
                libc::EPOLL_CTL_ADD,
                descriptor.as_raw_fd(),
                &raw mut event,
            )
        };
        if done < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    }

    /// Releases what has been closed and what the dead held. To be called when the descriptor of [`Clients::as_fd`] is readable.
    pub(super) fn tidy(&self) {
        const AT_ONCE: usize = 16;
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; AT_ONCE];
        // SAFETY: room for that many events.
        let count = unsafe {
            libc::epoll_wait(
                self.events.as_raw_fd(),
                events.as_mut_ptr(),
                AT_ONCE as i32,
                0,
            )
        };
        for event in events.iter().take(count.max(0) as usize) {
            match event.u64 {
                CLOSES => {
                    for inode in self.last_close.closed() {
                        self.release(|at, _| *at == inode);
                    }
                }
                process => self.release(|_, open| open.process as u64 == process),
            }
        }
    }

    fn release(&self, is_over: impl Fn(&Inode, &Open) -> bool) {
        let over = self.take_out(is_over);
        // A call may be using a context; then it ends with that call. Not under the lock: that takes the device's time.
        drop(over);
    }

    fn take_out(&self, is_over: impl Fn(&Inode, &Open) -> bool) -> Vec<Arc<Open>> {
        let mut guard = self.table();
        let table = &mut *guard;
        let over: Vec<(Inode, Arc<Open>)> = table
            .opens
            .extract_if(|inode, open| is_over(inode, open))
            .collect();
        for (inode, open) in &over {
            self.last_close.forget(*inode);
            if let Some((_, count)) = table.processes.get_mut(&open.process) {
                *count -= 1;
                if *count == 0 {
                    // Closing it takes it out of `events`, too.
                    table.processes.remove(&open.process);
                }
            }
        }
        over.into_iter().map(|(_, open)| open).collect()
    }
}

impl AsFd for Clients {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.events.as_fd()
    }
}
