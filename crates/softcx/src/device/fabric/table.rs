//! The table of a fabric: a file in shared memory, an entry a node.
#![allow(unsafe_code)] // memory shared with other processes

use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::NODES;
use crate::device::inbox::{is_inbox, last_error, started};
use crate::device::options::LinkLayer;
use crate::{Error, Result, StateKind};

const MAGIC: u64 = u64::from_le_bytes(*b"doorfabr");
/// Changes with every change of the layout.
const VERSION: u64 = 1;
const TABLE_BYTES: usize = 8192;
/// Tables of others that are looked over when one is opened.
const SWEEP: usize = 64;

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
    _pad: [u64; 5],
}

const _: () = assert!(size_of::<TableLayout>() <= TABLE_BYTES);

impl NodeEntry {
    /// Whether nobody is there any more. In doubt somebody is.
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
}

/// A table, mapped.
#[derive(Debug)]
pub(super) struct FabricTable(NonNull<TableLayout>);

// SAFETY: the table is plain shared memory, accessed by atomics only.
unsafe impl Send for FabricTable {}

impl FabricTable {
    /// The table of a file that is long enough.
    ///
    /// # Errors
    /// [`Error::System`] if it cannot be mapped.
    fn map(file: &File) -> Result<FabricTable> {
        // SAFETY: a fresh shared mapping of a file of at least this length.
        let start = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                TABLE_BYTES,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                0,
            )
        };
        if start == libc::MAP_FAILED {
            return Err(last_error("mmap of a fabric"));
        }
        NonNull::new(start.cast())
            .map(FabricTable)
            .ok_or_else(|| last_error("mmap of a fabric"))
    }

    fn table(&self) -> &TableLayout {
        // SAFETY: mapped in `map` for longer than a table and until `drop`; any bytes are a valid table.
        unsafe { self.0.as_ref() }
    }

    /// The entry of a node; none for a number that is none.
    #[inline]
    pub(super) fn entry(&self, node: u16) -> Option<&NodeEntry> {
        self.table()
            .entries
            .get(usize::from(node))
            .filter(|_| node > 0)
    }

    /// Whether nobody is there any more.
    pub(super) fn is_deserted(&self) -> bool {
        (1..=NODES).all(|node| self.entry(node).is_none_or(NodeEntry::is_vacant))
    }

    /// Whether it is a table of this version; fresh memory becomes one.
    fn is_ours(&self) -> bool {
        let head = self.table();
        match head.magic.load(Ordering::Acquire) {
            0 => {
                head.version.store(VERSION, Ordering::Relaxed);
                head.magic.store(MAGIC, Ordering::Release);
                true
            }
            magic => magic == MAGIC && head.version.load(Ordering::Relaxed) == VERSION,
        }
    }
}

impl Drop for FabricTable {
    fn drop(&mut self) {
        // SAFETY: mapped in `map` with this length; nobody holds a reference into it any more.
        unsafe { libc::munmap(self.0.as_ptr().cast(), TABLE_BYTES) };
    }
}

/// A file that nobody else has locked.
pub(super) struct Locked(File);

impl Locked {
    /// Waits for it.
    ///
    /// # Errors
    /// [`Error::System`] if the kernel gives no lock.
    fn new(file: File) -> Result<Locked> {
        loop {
            // SAFETY: a plain call on an open descriptor.
            if unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX) } == 0 {
                return Ok(Locked(file));
            }
            if std::io::Error::last_os_error().kind() != std::io::ErrorKind::Interrupted {
                return Err(last_error("lock of a fabric"));
            }
        }
    }

    /// Does not wait.
    fn try_new(file: File) -> Option<Locked> {
        // SAFETY: a plain call on an open descriptor.
        let got = unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) };
        (got == 0).then_some(Locked(file))
    }

    /// Which file it is.
    pub(super) fn inode(&self) -> Option<u64> {
        let meta = self.0.metadata().ok()?;
        // One that was removed is none.
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
pub(super) fn path(name: &str, link: LinkLayer) -> PathBuf {
    let link = match link {
        LinkLayer::InfiniBand => "ib",
        LinkLayer::Ethernet => "eth",
    };
    Path::new("/dev/shm").join(format!("{}{name}.{link}", prefix()))
}

fn prefix() -> String {
    format!("doorbell-fabric-{}-", user())
}

fn user() -> u32 {
    // SAFETY: a plain call.
    unsafe { libc::geteuid() }
}

/// Opens and locks the file, and makes it if it is not there.
///
/// # Errors
/// [`Error::State`] if it is not this user's, [`Error::System`] if it cannot be opened.
pub(super) fn lock(path: &Path) -> Result<Locked> {
    loop {
        let file = open(path, true).map_err(|error| Error::System {
            operation: "open of a fabric's table",
            errno: error.raw_os_error().unwrap_or(0),
        })?;
        if !is_own(&file) {
            return Err(Error::state(
                StateKind::NotFound,
                "open of a fabric",
                format!("{} belongs to somebody else", path.display()),
            ));
        }
        let locked = Locked::new(file)?;
        // The last node may have removed it in between.
        if locked.inode().is_some() {
            return Ok(locked);
        }
    }
}

/// The table, locked, if it is there; an error if somebody else has it locked.
pub(super) fn try_lock(path: &Path) -> std::result::Result<Option<Locked>, Busy> {
    let Some(file) = open(path, false).ok().filter(is_own) else {
        return Ok(None);
    };
    Locked::try_new(file).map(Some).ok_or(Busy)
}

/// Somebody else has the table locked.
#[derive(Debug)]
pub(super) struct Busy;

/// The table, locked, if it is there. Waits for it.
pub(super) fn lock_existing(path: &Path) -> Option<Locked> {
    let file = open(path, false).ok().filter(is_own)?;
    Locked::new(file).ok()
}

/// Maps a locked file, made long enough.
///
/// # Errors
/// [`Error::State`] if it is of another version, [`Error::System`] if there is no memory for it.
pub(super) fn map(locked: &Locked, path: &Path) -> Result<FabricTable> {
    let len = locked.0.metadata().map_or(0, |meta| meta.len());
    if len < TABLE_BYTES as u64 && locked.0.set_len(TABLE_BYTES as u64).is_err() {
        return Err(last_error("ftruncate of a fabric"));
    }
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

/// Removes tables whose nodes are all gone: a process that ends without a word leaves its fabric's.
pub(super) fn sweep(but: &Path) {
    let Ok(folder) = std::fs::read_dir("/dev/shm") else {
        return;
    };
    let prefix = prefix();
    let is_table = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name.starts_with(&prefix) && path != but
    };
    let paths = folder.flatten().map(|entry| entry.path());
    for path in paths.filter(is_table).take(SWEEP) {
        let file = open(&path, false).ok().filter(is_own);
        let Some(locked) = file.and_then(Locked::try_new) else {
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

fn is_own(file: &File) -> bool {
    file.metadata()
        .is_ok_and(|meta| meta.is_file() && meta.uid() == user())
}
