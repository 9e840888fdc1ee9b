//! The table of a fabric: a file in shared memory, an entry a node.
#![allow(unsafe_code)] // memory shared with other processes

use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use std::time::{Duration, Instant};

use super::NODES;
use super::folder::folder;
use crate::device::file_mapping::FileMapping;
use crate::device::inbox::{file_error, is_inbox, started, system_error};
use crate::device::options::LinkLayer;
use crate::{Error, Result, StateKind};

const MAGIC: u64 = u64::from_le_bytes(*b"doorfabr");
/// Changes with every change of the layout.
const VERSION: u64 = 2;
const TABLE_BYTES: usize = 8192;
/// Tables of others that are looked over when one is opened.
const SWEEP: usize = 64;
/// How long a device that joins waits for the lock. Holders need a millisecond, but one that is stopped keeps the lock.
const LOCK_TIMEOUT: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_millis(1);

/// All of it is atomic: any process of the user may write there at any time.
#[repr(C)]
struct TableLayout {
    magic: AtomicU64,
    version: AtomicU64,
    _pad: [u64; 6],
    /// By node number; the first is never used.
    entries: [NodeEntry; NODES as usize + 1],
}

#[repr(C)]
pub(super) struct NodeEntry {
    /// The random number of the device's inbox; 0 while there is no device.
    pub(super) port: AtomicU64,
    pub(super) pid: AtomicU32,
    pub(super) fd: AtomicU32,
    /// When that process started.
    pub(super) started: AtomicU64,
    /// The GID of a device that other hosts reach by UDP, as two words; valid with `namespace`.
    host: [AtomicU64; 2],
    /// The network namespace that the GID is an address of; 0 without a GID.
    namespace: AtomicU64,
    _pad: [u64; 2],
}

const _: () = assert!(size_of::<TableLayout>() <= TABLE_BYTES);

impl NodeEntry {
    /// Whether the entry is free: never used, or its process has ended or has become a program without the device. `false` if that is not known.
    pub(super) fn is_vacant(&self) -> bool {
        if self.port.load(Ordering::Acquire) == 0 {
            return true;
        }
        let pid = self.pid.load(Ordering::Relaxed);
        match started(pid) {
            Ok(None) => true,
            Ok(Some(at)) if at != self.started.load(Ordering::Relaxed) => true,
            // The process may have become another program, without its device.
            Ok(Some(_)) => is_inbox(pid, self.fd.load(Ordering::Relaxed)) == Some(false),
            Err(_) => false,
        }
    }

    /// The GID that the device of this entry has told, if that is one of this network namespace. It stays when the device leaves, until another device has
    /// the number: packets that it sent before may not have been read.
    pub(super) fn host_in(&self, namespace: u64) -> Option<[u8; 16]> {
        let is_told = || self.namespace.load(Ordering::Acquire) == namespace;
        if !is_told() {
            return None;
        }
        let [high, low] = self
            .host
            .each_ref()
            .map(|word| word.load(Ordering::Relaxed));
        // Orders the loads of the words before the second look.
        fence(Ordering::Acquire);
        let gid = u128::from(high) << 64 | u128::from(low);
        is_told().then_some(gid.to_be_bytes())
    }

    /// Makes it the entry of a device with this GID.
    pub(super) fn set_host(&self, gid: [u8; 16], namespace: u64) {
        self.clear_host();
        let gid = u128::from_be_bytes(gid);
        self.host[0].store((gid >> 64) as u64, Ordering::Relaxed);
        self.host[1].store(gid as u64, Ordering::Relaxed);
        // Release: a reader that sees it sees the words.
        self.namespace.store(namespace, Ordering::Release);
    }

    /// The device has no GID, or none yet.
    pub(super) fn clear_host(&self) {
        self.namespace.store(0, Ordering::Relaxed);
        // Orders it before the stores of other words.
        fence(Ordering::Release);
    }
}

/// A table, mapped.
#[derive(Debug)]
pub(super) struct FabricTable(FileMapping);

impl FabricTable {
    /// The table of a file that is long enough.
    ///
    /// # Errors
    /// [`Error::System`] if it cannot be mapped.
    fn map(file: &File) -> Result<FabricTable> {
        let mapping = FileMapping::new(file, TABLE_BYTES);
        Ok(FabricTable(
            mapping.map_err(system_error("mmap of a fabric"))?,
        ))
    }

    fn table(&self) -> &TableLayout {
        // SAFETY: mapped in `map` for longer than a table and until `drop`; any bytes are a valid table, whose fields are atomics.
        unsafe { self.0.start().cast::<TableLayout>().as_ref() }
    }

    /// The entry of a node; `None` for an invalid number.
    #[inline]
    pub(super) fn entry(&self, node: u16) -> Option<&NodeEntry> {
        self.table()
            .entries
            .get(usize::from(node))
            .filter(|_| node > 0)
    }

    /// Whether no entry is in use.
    pub(super) fn is_deserted(&self) -> bool {
        (1..=NODES).all(|node| self.entry(node).is_none_or(NodeEntry::is_vacant))
    }

    #[cfg(test)]
    pub(super) fn set_version(&self, version: u64) {
        self.table().version.store(version, Ordering::Relaxed);
    }

    /// Whether it is a table of this version; fresh memory becomes one, and one of version 1 that no device uses. The caller has its lock.
    fn is_ours(&self) -> bool {
        let head = self.table();
        match head.magic.load(Ordering::Acquire) {
            0 => {
                head.version.store(VERSION, Ordering::Relaxed);
                head.magic.store(MAGIC, Ordering::Release);
                true
            }
            MAGIC => {
                // The words that version 2 added were zero before it.
                let is_older = head.version.load(Ordering::Relaxed) == 1 && self.is_deserted();
                if is_older {
                    head.version.store(VERSION, Ordering::Relaxed);
                }
                is_older || head.version.load(Ordering::Relaxed) == VERSION
            }
            _ => false,
        }
    }
}

/// A file that this process has locked.
pub(super) struct Locked(File);

impl Locked {
    /// Locks the file. Tries again until `timeout` has passed: the kernel's own wait has no deadline.
    fn new(file: File, timeout: Duration) -> io::Result<Locked> {
        let begun = Instant::now();
        loop {
            // SAFETY: a plain call on an open descriptor.
            if unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) } == 0 {
                return Ok(Locked(file));
            }
            let error = io::Error::last_os_error();
            match error.kind() {
                ErrorKind::Interrupted => {}
                ErrorKind::WouldBlock if begun.elapsed() < timeout => std::thread::sleep(PAUSE),
                _ => return Err(error),
            }
        }
    }

    /// The file's inode; `None` if the file was removed or cannot be queried.
    pub(super) fn inode(&self) -> Option<u64> {
        let meta = self.0.metadata().ok()?;
        // A removed file has no links.
        (meta.nlink() > 0).then(|| meta.ino())
    }
}

impl Drop for Locked {
    fn drop(&mut self) {
        // By name, because a mapping of the file keeps it open, and with it the lock.
        // SAFETY: a plain call on an open descriptor.
        unsafe { libc::flock(self.0.as_raw_fd(), libc::LOCK_UN) };
    }
}

/// Where the table of a fabric lies: shared memory of this user on this host.
///
/// # Errors
/// Those of [`folder`].
pub(super) fn path(name: &str, link: LinkLayer) -> Result<PathBuf> {
    let link = match link {
        LinkLayer::InfiniBand => "ib",
        LinkLayer::Ethernet => "eth",
    };
    Ok(folder()?.join(format!("{name}.{link}")))
}

/// Opens and locks the file, and makes it if it is not there.
///
/// # Errors
/// [`Error::Timeout`] if another process keeps the lock, [`Error::System`] if the file cannot be opened.
pub(super) fn lock(path: &Path) -> Result<Locked> {
    loop {
        let file = open(path, true)
            .map_err(|error| file_error("open of a fabric's table", path, TABLE_BYTES, &error))?;
        let locked = Locked::new(file, LOCK_TIMEOUT).map_err(|error| match error.kind() {
            ErrorKind::WouldBlock => Error::Timeout {
                operation: "open of a fabric, whose table another process has locked,",
                timeout: LOCK_TIMEOUT,
            },
            _ => file_error("lock of a fabric's table", path, TABLE_BYTES, &error),
        })?;
        // The last node may have removed it in between.
        if locked.inode().is_some() {
            return Ok(locked);
        }
    }
}

/// The table, locked, if it is there and its lock can be had in time.
pub(super) fn lock_existing(path: &Path, timeout: Duration) -> Option<Locked> {
    Locked::new(open(path, false).ok()?, timeout).ok()
}

/// Maps a locked file, made long enough.
///
/// # Errors
/// [`Error::State`] if it is of another version or there is no room for it, [`Error::System`] if there is no memory for it.
pub(super) fn map(locked: &Locked, path: &Path) -> Result<FabricTable> {
    reserve(&locked.0, TABLE_BYTES)
        .map_err(|error| file_error("open of a fabric", path, TABLE_BYTES, &error))?;
    let shared = FabricTable::map(&locked.0)?;
    if shared.is_ours() {
        Ok(shared)
    } else {
        Err(Error::state(
            StateKind::NotFound,
            "open of a fabric",
            format!("{} is of another version", path.display()),
        ))
    }
}

/// Makes the file so long, with memory behind all of it: a store to a page for which there is no room would end the process with SIGBUS.
fn reserve(file: &File, len_bytes: usize) -> io::Result<()> {
    loop {
        // SAFETY: a plain call on an open descriptor.
        match unsafe { libc::posix_fallocate(file.as_raw_fd(), 0, len_bytes as libc::off_t) } {
            0 => return Ok(()),
            libc::EINTR => {}
            errno => return Err(io::Error::from_raw_os_error(errno)),
        }
    }
}

/// Removes the tables of fabrics without a live node; a killed process leaves such a table behind.
pub(super) fn sweep(but: &Path) {
    let Some(Ok(folder)) = but.parent().map(std::fs::read_dir) else {
        return;
    };
    let paths = folder.flatten().map(|entry| entry.path());
    for path in paths.filter(|path| path != but).take(SWEEP) {
        let Some(locked) = lock_existing(&path, Duration::ZERO) else {
            continue;
        };
        let len = locked.0.metadata().map_or(0, |meta| meta.len());
        // Of another length it is of another version, or being made.
        if len == TABLE_BYTES as u64
            && locked.inode().is_some()
            && FabricTable::map(&locked.0).is_ok_and(|shared| shared.is_deserted())
        {
            let _ = std::fs::remove_file(&path);
        }
    }
}

fn open(path: &Path, create: bool) -> std::io::Result<File> {
    OpenOptions::new()
        .read(true)
        .write(true)
        .create(create)
        .truncate(false)
        .mode(0o600)
        .custom_flags(libc::O_NOFOLLOW | libc::O_CLOEXEC)
        .open(path)
}
