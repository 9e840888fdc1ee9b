//! One open of the device file, with everything that was made through it.
#![allow(unsafe_code)] // shows the device a page

use std::collections::HashSet;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::device::Device;
use crate::device::client::{Client, Errno};
use crate::device::commands::{Answer, CommandKind};
use crate::device::space::Space;
use crate::doors::event_pipe::EventPipe;
use crate::doors::events::{AsyncEvents, EventSubject};
use crate::doors::objects::{CqObject, Object, Objects, UarObject};
use crate::doors::pages::DevicePages;
use crate::doors::port::PortIdentity;

/// What the context needs of the calling process: its memory and its table of descriptors. The caller need not be the process that opened the
/// context: a process that inherited it by a fork calls with its own memory, as with the kernel.
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
pub(crate) struct DeviceContext {
    // The client goes first: the device uses the pages.
    pub(super) client: Client,
    tables: Mutex<Tables>,
    pub(super) events: Arc<AsyncEvents>,
    pub(super) port: PortIdentity,
    device: Device,
}

/// What changes with the calls.
#[derive(Debug)]
pub(super) struct Tables {
    pub(super) objects: Objects,
    pub(super) pages: DevicePages,
    pub(super) channels: Vec<CompletionChannel>,
    /// Queue pairs, by number, in multicast groups, by GID and LID.
    pub(super) groups: HashSet<(u32, [u8; 16], u16)>,
    /// GET_CONTEXT was called; before that nothing else can be.
    pub(super) opened: bool,
}

/// A completion channel, and its descriptor as it was given, in the process with this memory.
#[derive(Debug)]
pub(super) struct CompletionChannel {
    pub(super) channel: Arc<EventPipe>,
    pub(super) number: i32,
    pub(super) space: Space,
}

impl DeviceContext {
    /// Opens the device. The descriptor stands for the device file. It refers to an open file description of its own, which ends when the
    /// process has closed all its duplicates. Pages are mapped from it.
    pub(crate) fn open(device: &Device) -> io::Result<(DeviceContext, OwnedFd)> {
        let failed = io::Error::from_raw_os_error;
        let pages = DevicePages::new().map_err(failed)?;
        let descriptor = pages.descriptor().map_err(failed)?;
        let events = Arc::new(AsyncEvents::default());
        let client = Client::open(device, Space::LOCAL, events.clone());
        // SAFETY: a page of the mapping, which outlives the client.
        unsafe { client.show_clock(pages.clock()) };
        let context = DeviceContext {
            client,
            tables: Mutex::new(Tables {
                objects: Objects::default(),
                pages,
                channels: Vec::new(),
                groups: HashSet::new(),
                opened: false,
            }),
            events,
            port: PortIdentity::of(device),
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

    /// Destroys a completion queue: how many events of each kind, of completions and asynchronous, the process has read.
    pub(super) fn destroy_cq(&self, cq: &CqObject) -> Result<(u32, u32), Errno> {
        self.client.destroy_cq(cq.cqn)?;
        let completions = cq.completions.as_ref().map_or(0, |it| it.finish());
        Ok((completions, self.events.forget(EventSubject::Cq(cq.cqn))))
    }

    /// Destroys a shared receive queue: how many of its events the process has read.
    pub(super) fn destroy_srq(&self, srqn: u32) -> Result<u32, Errno> {
        self.client.destroy_srq(srqn)?;
        Ok(self.events.forget(EventSubject::Srq(srqn)))
    }

    /// Destroys a queue pair: how many of its events the process has read.
    pub(super) fn destroy_qp(&self, qpn: u32) -> Result<u32, Errno> {
        self.client.destroy_qp(qpn)?;
        Ok(self.events.forget(EventSubject::Qp(qpn)))
    }

    /// Frees a UAR and its page.
    pub(super) fn free_uar(&self, tables: &mut Tables, uar: UarObject) -> Result<(), Errno> {
        self.client.free_uar(uar.uar)?;
        tables.pages.release_uar(uar.page);
        Ok(())
    }

    /// Removes an object from the device that was never used, and so cannot be busy.
    pub(super) fn discard(&self, tables: &mut Tables, object: &Object) {
        let client = &self.client;
        let _ = match object {
            Object::Pd(pd) => client.dealloc_pd(*pd),
            Object::Mr(mr) => client.dereg_mr(mr.key),
            Object::Mw(key) => client.dealloc_mw(*key),
            Object::Cq(it) => self.destroy_cq(it).map(|_| ()),
            Object::Srq(it) => self.destroy_srq(it.srqn).map(|_| ()),
            Object::Qp(it) => self.destroy_qp(it.qpn).map(|_| ()),
            Object::Ah(_) => Ok(()),
            Object::Uar(it) => self.free_uar(tables, *it),
        };
    }

    /// Waits for the time that a command takes, before anything is locked that other commands need. Returns how it is answered.
    pub(super) fn issue(&self, kind: CommandKind) -> Result<Answer, Errno> {
        self.device.commands().pass(kind)
    }

    /// The device's clock, in the unit of completions' time stamps.
    pub(super) fn now_ns(&self) -> u64 {
        self.device.now_ns()
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Tables> {
        self.tables.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
