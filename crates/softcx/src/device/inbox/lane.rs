//! The writing end of a lane.
#![allow(unsafe_code)] // memory shared with other processes

use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::Ordering;

use super::process::{host, start_of};
use super::{
    CLOSED, INBOX_BYTES, INBOX_LINK, InboxAddress, LANES, MAGIC, SLOTS, SWEEPING, SharedMapping,
    VERSION,
};
use crate::device::packet::{HEADER_BYTES, Header};
use crate::{Error, Result, StateKind};

/// Whether this descriptor of a process is an inbox; `None` if the kernel does not say.
pub(crate) fn is_inbox(pid: u32, fd: u32) -> Option<bool> {
    match std::fs::read_link(format!("/proc/{pid}/fd/{fd}")) {
        Ok(target) => Some(
            target
                .as_os_str()
                .as_bytes()
                .starts_with(INBOX_LINK.as_bytes()),
        ),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Some(false),
        Err(_) => None,
    }
}

/// The writing end of a lane into another device's inbox.
#[derive(Debug)]
pub(crate) struct LaneWriter {
    pub(super) mapping: SharedMapping,
    pub(super) lane: usize,
    /// The descriptor by which the peer has its inbox, and device and inode of the inbox.
    path: String,
    file: (u64, u64),
}

impl LaneWriter {
    /// Claims a lane.
    ///
    /// # Errors
    /// [`Error::State`] if the device is on another host, gone, of another version, or has no lane left; [`Error::System`] if the kernel
    /// refuses to open the inbox, for want of descriptors or rights for example.
    pub(crate) fn open(to: &InboxAddress) -> Result<LaneWriter> {
        let no = |reason: String| Error::state(StateKind::Unreachable, "connect", reason);
        if to.host != host()? {
            return Err(no(
                "the peer's software NIC is on another host; it reaches processes of one host only"
                    .into(),
            ));
        }
        let path = format!("/proc/{}/fd/{}", to.pid, to.fd);
        let refused = |error: std::io::Error| match error.raw_os_error() {
            Some(libc::ENOENT | libc::ESRCH) | None => no(format!(
                "process {} or its device is gone ({error})",
                to.pid
            )),
            Some(errno) => Error::System {
                operation: "open of the peer's inbox",
                errno,
            },
        };
        let another = || {
            no(format!(
                "process {}'s device is gone: its descriptor is another file now",
                to.pid
            ))
        };
        // Looked at before it is opened: an address may be forged, and to open a device or a terminal may do something.
        let target = std::fs::read_link(&path).map_err(refused)?;
        if !target
            .as_os_str()
            .as_bytes()
            .starts_with(INBOX_LINK.as_bytes())
        {
            return Err(another());
        }
        let file = File::options()
            .read(true)
            .write(true)
            .open(&path)
            .map_err(refused)?;
        let meta = file.metadata().map_err(refused)?;
        let file = OwnedFd::from(file);
        // SAFETY: a plain call on an open descriptor.
        let seals = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS) };
        if seals < 0 || seals & libc::F_SEAL_SHRINK == 0 {
            return Err(another());
        }
        if meta.len() != INBOX_BYTES as u64 {
            return Err(no(
                "the peer's inbox has another size: another version of the library".into(),
            ));
        }
        let mapping = SharedMapping::new(&file)?;
        let head = mapping.head();
        if head.magic.load(Ordering::Acquire) != MAGIC
            || head.port.load(Ordering::Relaxed) != to.port
        {
            return Err(no(format!("process {}'s device is gone", to.pid)));
        }
        let version = head.version.load(Ordering::Relaxed);
        if version != VERSION {
            return Err(no(format!(
                "the peer's fabric has version {version}, this one {VERSION}"
            )));
        }
        let start = start_of(std::process::id())?;
        let free = |lane: usize| mapping.lane(lane).claim(0, start);
        // The reader frees the lanes of dead processes, too, but one at a time: many may have died since.
        let taken_over = |lane: usize| {
            let lane = mapping.lane(lane);
            let owner = lane.owner.load(Ordering::Acquire);
            let taken = owner != 0 && owner & SWEEPING == 0;
            taken && lane.is_dead(owner) && lane.claim(owner, start)
        };
        let lane = (0..LANES)
            .find(|&lane| free(lane))
            .or_else(|| (0..LANES).find(|&lane| taken_over(lane)));
        if let Some(lane) = lane {
            head.claimed.fetch_or(1u64 << lane, Ordering::AcqRel);
            return Ok(LaneWriter {
                mapping,
                lane,
                path,
                file: (meta.dev(), meta.ino()),
            });
        }
        Err(no(format!(
            "all {LANES} lanes into the peer's device are taken"
        )))
    }

    /// Writes a packet. `false` if the lane is full. `fill` puts the payload into the slot, which has room for
    /// [`MAX_PAYLOAD_BYTES`](crate::device::packet::MAX_PAYLOAD_BYTES); if it fails the packet is dropped.
    pub(crate) fn send(&self, header: &Header, fill: impl FnOnce(*mut u8) -> bool) -> bool {
        let cursors = &self.mapping.lane(self.lane).cursors;
        let Some(count) = cursors.free(SLOTS as u64) else {
            return false;
        };
        if fill(self.payload(count)) {
            self.publish(count, header);
        }
        true
    }

    /// The count of the next slot, and how many are free.
    pub(crate) fn room(&self) -> Option<(u64, u64)> {
        let cursors = &self.mapping.lane(self.lane).cursors;
        cursors.room(SLOTS as u64)
    }

    /// Where the payload of the slot of that count lies, with room for [`MAX_PAYLOAD_BYTES`](crate::device::packet::MAX_PAYLOAD_BYTES).
    pub(crate) fn payload(&self, count: u64) -> *mut u8 {
        let slot = self.mapping.slot(self.lane, count);
        slot.wrapping_add(HEADER_BYTES)
    }

    /// Hands over the next slot, whose payload is there.
    pub(crate) fn publish(&self, count: u64, header: &Header) {
        let slot = self.mapping.slot(self.lane, count);
        // SAFETY: a slot within the mapping, ours until it is published.
        unsafe { std::ptr::copy_nonoverlapping(header.encode().as_ptr(), slot, HEADER_BYTES) };
        self.mapping.lane(self.lane).cursors.publish(count);
    }

    /// Whether the peer still has its inbox: a process that has died or executes another program has not, and neither has a later
    /// process with the same number. If the kernel does not say, it has.
    pub(crate) fn is_owned(&self) -> bool {
        match std::fs::metadata(&self.path) {
            Ok(meta) => (meta.dev(), meta.ino()) == self.file,
            Err(error) => !matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ESRCH)),
        }
    }

    /// Whether the reader has read all packets.
    pub(crate) fn is_read(&self) -> bool {
        self.mapping.lane(self.lane).cursors.is_read()
    }

    /// Wakes the engine of the peer, if it sleeps.
    pub(crate) fn wake_peer(&self) {
        self.mapping.head().wake_word.wake();
    }
}

impl Drop for LaneWriter {
    fn drop(&mut self) {
        self.mapping
            .lane(self.lane)
            .owner
            .fetch_or(CLOSED, Ordering::AcqRel);
    }
}
