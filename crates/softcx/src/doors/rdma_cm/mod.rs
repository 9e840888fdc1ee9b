//! The connection manager, as the kernel shows it: `/dev/infiniband/rdma_cm`, to the unmodified librdmacm.
//!
//! Processes write `commands`; `table` has their identifiers (`id`) and events (`event_file`). Addresses (`address`, `ports`) are bound and
//! resolved by `addresses`. Connections are made by messages (`mad`) in the format of the InfiniBand connection manager, which travel as datagrams
//! between the queue pairs 1 of the devices: `connect` sends them, `messages` takes them, and `timers` repeats what is not answered.

mod address;
mod addresses;
mod attributes;
mod commands;
mod connect;
mod event_file;
mod groups;
mod id;
mod joined_groups;
mod mad;
mod messages;
mod ports;
mod table;
#[cfg(all(test, not(loom)))]
mod tests;
mod timers;

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

pub(in crate::doors) use self::commands::{COMMAND_BYTES, CmAnswer, CmCaller};
pub(in crate::doors) use self::event_file::EventWaiter;

use self::commands::CmCommand;
use self::event_file::EventFile;
use self::mad::CmMessage;
use self::table::CmTable;
use crate::device::client::Errno;
use crate::device::management::MadQueue;
use crate::device::{Device, random};

/// A file of the connection manager, as it was opened.
#[derive(Debug)]
pub(in crate::doors) struct OpenedFile {
    pub(in crate::doors) inode: (u64, u64),
    /// The descriptor for the process.
    pub(in crate::doors) descriptor: OwnedFd,
    /// The same file, under another description.
    pub(in crate::doors) file: OwnedFd,
}

/// The connection manager of a device, with a thread for what arrives from peers.
#[derive(Debug)]
pub(in crate::doors) struct ConnectionManager {
    shared: Arc<SharedCmTable>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct SharedCmTable {
    table: Mutex<CmTable>,
    mads: Arc<MadQueue>,
    /// A file was opened once.
    is_used: AtomicBool,
    stop: AtomicBool,
}

impl SharedCmTable {
    fn lock(&self) -> MutexGuard<'_, CmTable> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self) {
        let mut next_look = Instant::now();
        while !self.stop.load(Ordering::Acquire) {
            let until_next = self.lock().run_timers(&mut next_look);
            let mads = self.mads.wait(until_next);
            let mut table = self.lock();
            for (from, mad) in mads {
                if let Some((transaction, message)) = CmMessage::parse(&mad) {
                    table.on_message(from, transaction, &message);
                }
            }
        }
    }
}

impl ConnectionManager {
    /// Starts the manager of a device. Requests of peers are answered from now on, and refused as long as no process listens.
    ///
    /// # Errors
    /// The kernel has no thread.
    pub(in crate::doors) fn start(device: &Device) -> io::Result<ConnectionManager> {
        let mads = device.mads();
        // Numbers that are not random are still numbers.
        let seed = random().unwrap_or_else(|_| std::process::id().into());
        let shared = Arc::new(SharedCmTable {
            table: Mutex::new(CmTable::new(device.clone(), seed)),
            mads: Arc::clone(&mads),
            is_used: AtomicBool::new(false),
            stop: AtomicBool::new(false),
        });
        let thread = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("softcx-cm".into())
            .spawn(move || thread.run())?;
        mads.open();
        Ok(ConnectionManager {
            shared,
            thread: Some(thread),
        })
    }

    /// Opens the file.
    ///
    /// # Errors
    /// The kernel gives no descriptors.
    pub(in crate::doors) fn open(&self) -> io::Result<OpenedFile> {
        let (events, inode, descriptor) = EventFile::new()?;
        let file = events.reader()?;
        self.shared.lock().files.insert(inode, events);
        self.shared.is_used.store(true, Ordering::Release);
        Ok(OpenedFile {
            inode,
            descriptor,
            file,
        })
    }

    /// Whether a file was opened once. Takes no lock.
    pub(in crate::doors) fn is_used(&self) -> bool {
        self.shared.is_used.load(Ordering::Acquire)
    }

    /// Whether a descriptor with this inode is of an open file.
    pub(in crate::doors) fn is_of(&self, inode: (u64, u64)) -> bool {
        self.is_used() && self.shared.lock().files.contains_key(&inode)
    }

    /// Executes the command that a process has written to a file: `len_bytes` at `at`.
    ///
    /// # Errors
    /// The errno of the write.
    pub(in crate::doors) fn write(
        &self,
        file: (u64, u64),
        caller: &dyn CmCaller,
        at: u64,
        len_bytes: u64,
    ) -> Result<CmAnswer, Errno> {
        let mut table = self.shared.lock();
        let first = table.timers.first().copied();
        let answer = CmCommand::execute(&mut table, file, caller, at, len_bytes);
        let has_new_timer = table.timers.first().copied() != first;
        drop(table);
        if has_new_timer {
            self.shared.mads.wake();
        }
        answer
    }

    /// Ends everything that was made through a file, when its last descriptor is closed.
    pub(in crate::doors) fn close(&self, inode: (u64, u64)) {
        if self.is_used() {
            self.shared.lock().close(inode);
        }
    }
}

impl Drop for ConnectionManager {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        self.shared.mads.wake();
        // The thread has the device, which has to leave its fabric before the process ends.
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
