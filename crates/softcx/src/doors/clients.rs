//! The processes that have the device open through the supervisor: contexts by the inode of their descriptor, and the life of their processes.
#![allow(unsafe_code)] // epoll

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::caller::{Caller, Inode};
use super::context::DeviceContext;
use super::descriptor_watch::DescriptorWatch;
use super::process::ClientProcess;
use super::rdma_cm::ConnectionManager;
use crate::device::Device;
use crate::device::space::Space;

/// One open of the device.
#[derive(Debug)]
pub(super) struct Open {
    // The context goes first: what it holds is in memory of these processes.
    pub(super) context: DeviceContext,
    /// The processes that have called: the one that opened the device, and those that inherited it by a fork. Dead processes stay in the list.
    processes: Mutex<Vec<Arc<ClientProcess>>>,
}

impl Open {
    fn processes(&self) -> MutexGuard<'_, Vec<Arc<ClientProcess>>> {
        self.processes
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Debug, Default)]
struct ClientTable {
    opens: HashMap<Inode, Arc<Open>>,
    /// Processes that have called and are alive.
    processes: HashMap<libc::pid_t, Arc<ClientProcess>>,
}

#[derive(Debug)]
pub(super) struct Clients {
    device: Device,
    pub(super) connections: ConnectionManager,
    table: Mutex<ClientTable>,
    descriptor_watch: DescriptorWatch,
    /// What the keeper waits for: the `descriptor_watch` as [`CLOSES`], and processes by their numbers.
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
            connections: ConnectionManager::start(&device)?,
            device,
            table: Mutex::default(),
            descriptor_watch: DescriptorWatch::new(libc::IN_NONBLOCK)?,
            // SAFETY: just opened, with no other owner.
            events: unsafe { OwnedFd::from_raw_fd(events) },
        };
        clients.wait_for(clients.descriptor_watch.as_fd(), CLOSES)?;
        Ok(clients)
    }

    fn table(&self) -> MutexGuard<'_, ClientTable> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The context behind a descriptor.
    pub(super) fn find(&self, inode: Inode) -> Option<Arc<Open>> {
        self.table().opens.get(&inode).cloned()
    }

    /// Whether no process has the device open, and none has used the connection manager.
    pub(super) fn is_empty(&self) -> bool {
        self.table().opens.is_empty() && !self.connections.is_used()
    }

    /// Opens the device for a process; `still_there` says afterwards that the number was really its own. The descriptor is the only
    /// reference: the context ends when it and all its copies are closed.
    pub(super) fn open(
        &self,
        process: libc::pid_t,
        still_there: impl FnOnce() -> bool,
    ) -> io::Result<OwnedFd> {
        let process = self.process(process, still_there)?;
        let (context, descriptor) = DeviceContext::open(&self.device)?;
        let (inode, file) = (context.inode(), context.file()?);
        let processes = Mutex::new(vec![process]);
        let open = Arc::new(Open { context, processes });
        self.table().opens.insert(inode, open);
        let watched = self.descriptor_watch.watch(descriptor.as_fd(), file, inode);
        if watched.is_err() {
            self.release(inode);
        }
        watched.map(|()| descriptor)
    }

    /// Opens the connection manager. The descriptor is the only reference, as for [`Clients::open`].
    pub(super) fn open_connections(&self) -> io::Result<OwnedFd> {
        let opened = self.connections.open()?;
        let (descriptor, inode) = (opened.descriptor, opened.inode);
        let watched = self
            .descriptor_watch
            .watch(descriptor.as_fd(), opened.file, inode);
        if watched.is_err() {
            self.release(inode);
        }
        watched.map(|()| descriptor)
    }

    /// The memory of a process that calls on a context; `still_there` as for [`Clients::open`].
    pub(super) fn space_of(
        &self,
        caller: &Caller,
        open: &Open,
        still_there: impl FnOnce() -> bool,
    ) -> io::Result<Space> {
        let known = |it: &&Arc<ClientProcess>| !it.space.has_ended() && caller.is_of(it.pid);
        if let Some(process) = open.processes().iter().find(known) {
            return Ok(process.space);
        }
        let gone = || io::Error::from_raw_os_error(libc::ESRCH);
        let process = self.process(caller.process().ok_or_else(gone)?, still_there)?;
        let space = process.space;
        open.processes().push(process);
        Ok(space)
    }

    fn process(
        &self,
        pid: libc::pid_t,
        still_there: impl FnOnce() -> bool,
    ) -> io::Result<Arc<ClientProcess>> {
        let mut table = self.table();
        if let Some(process) = table.processes.get(&pid)
            && !process.is_dead()
        {
            return Ok(Arc::clone(process));
        }
        let process = Arc::new(ClientProcess::of(pid, still_there)?);
        process
            .with_life(|life| self.wait_for(life, pid as u64))
            .transpose()?;
        table.processes.insert(pid, Arc::clone(&process));
        Ok(process)
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
    pub(super) fn process_events(&self) {
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
            if event.u64 != CLOSES {
                self.remove_dead(event.u64 as libc::pid_t);
            }
        }
        for inode in self.descriptor_watch.closed() {
            self.release(inode);
        }
    }

    /// What a process had open, it has closed by its death. What others have of it, a forked child perhaps, they keep, but for
    /// what was in its memory.
    fn remove_dead(&self, pid: libc::pid_t) {
        let mut table = self.table();
        if table.processes.get(&pid).is_some_and(|it| it.is_dead()) {
            table.processes.remove(&pid);
        }
    }

    fn release(&self, inode: Inode) {
        self.descriptor_watch.forget(inode);
        let open = self.table().opens.remove(&inode);
        // A call may be using a context; then it ends with that call. Not under the lock: that takes the device's time.
        drop(open);
        self.connections.close(inode);
    }
}

impl AsFd for Clients {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.events.as_fd()
    }
}
