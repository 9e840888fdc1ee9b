//! One open of the device file, and the one call that it takes.
#![allow(unsafe_code)] // shows the device a page

use std::collections::HashSet;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::device::Device;
use crate::device::client::{Client, Errno};
use crate::device::space::Space;
use crate::doors::channel::Channel;
use crate::doors::events::AsyncEvents;
use crate::doors::objects::Objects;
use crate::doors::pages::DevicePages;
use crate::doors::port::Port;
use crate::doors::uverbs;

/// What the context needs of the process that calls: its memory and its table of descriptors. It need not be the one that has opened
/// the context, as with a kernel: who has it by a fork calls from its own memory.
pub(crate) trait Descriptors {
    /// Its memory: addresses of the call, and of what the call makes, are there.
    fn space(&self) -> Space;

    /// Hands a descriptor to the process: its number there.
    fn give(&self, descriptor: OwnedFd) -> Result<i32, Errno>;

    /// `st_dev` and `st_ino` of one of its descriptors.
    fn inode(&self, number: i32) -> Option<(u64, u64)>;

    /// Closes one that was given, because the command failed after all.
    fn take_back(&self, number: i32);
}

/// A context of a process on the device. Dropping it releases everything that was made in it.
#[derive(Debug)]
pub(crate) struct Context {
    // The client goes first: the device uses the pages.
    pub(super) client: Client,
    tables: Mutex<Tables>,
    pub(super) events: Arc<AsyncEvents>,
    pub(super) port: Port,
    device: Device,
}

/// What changes with the calls.
#[derive(Debug)]
pub(super) struct Tables {
    pub(super) objects: Objects,
    pub(super) pages: DevicePages,
    pub(super) channels: Vec<CompletionChannel>,
    /// Queue pairs, by number, in multicast groups.
    pub(super) groups: HashSet<(u32, [u8; 16])>,
    /// GET_CONTEXT was called; before that nothing else can be.
    pub(super) opened: bool,
}

/// A completion channel, and its descriptor as it was given, in the process with this memory.
#[derive(Debug)]
pub(super) struct CompletionChannel {
    pub(super) channel: Arc<Channel>,
    pub(super) number: i32,
    pub(super) space: Space,
}

impl Context {
    /// Opens the device. The descriptor stands for the device file, and is open in a way of
    /// its own: when the process has closed it everywhere, nobody else has it open so. Pages are mapped from it.
    pub(crate) fn open(device: &Device) -> io::Result<(Context, OwnedFd)> {
        let failed = io::Error::from_raw_os_error;
        let pages = DevicePages::new().map_err(failed)?;
        let descriptor = pages.descriptor().map_err(failed)?;
        let events = Arc::new(AsyncEvents::default());
        let client = Client::open(device, Space::LOCAL, events.clone());
        // SAFETY: a page of the mapping, which outlives the client.
        unsafe { client.show_clock(pages.clock()) };
        let context = Context {
            client,
            tables: Mutex::new(Tables {
                objects: Objects::default(),
                pages,
                channels: Vec::new(),
                groups: HashSet::new(),
                opened: false,
            }),
            events,
            port: Port::of(device),
            device: device.clone(),
        };
        Ok((context, descriptor))
    }

    /// `st_dev` and `st_ino` of the file, by which descriptors of it are recognised.
    pub(crate) fn inode(&self) -> (u64, u64) {
        self.lock().pages.inode()
    }

    /// Another descriptor of the file, beside the one that the process has.
    pub(crate) fn file(&self) -> io::Result<OwnedFd> {
        self.lock().pages.file()
    }

    /// `RDMA_VERBS_IOCTL`, with its argument: an address in the process that calls.
    pub(crate) fn ioctl(&self, argument: u64, descriptors: &dyn Descriptors) -> Result<(), Errno> {
        uverbs::call(self, &mut self.lock(), argument, descriptors)
    }

    /// What the device's clock says, as completions have it.
    pub(super) fn now_ns(&self) -> u64 {
        self.device.now_ns()
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Tables> {
        self.tables.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
