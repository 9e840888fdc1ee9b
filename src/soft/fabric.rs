//! A named fabric: the table, in shared memory, of the devices that reach each other, by node number.
//!
//! A node that ends gives its number back; the number of one that died is taken over. Claims exclude each other by a lock
//! on the file, which the kernel lets go when its holder dies. Readers take no lock: an entry that is torn or stale names
//! an inbox that is not there, or not the one of that port, and opening the lane finds that out.
#![allow(unsafe_code)] // memory shared with other processes

use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::soft::inbox::{PortAddress, host, is_inbox, last_error, started};
use crate::soft::options::Link;
use crate::soft::wire::Destination;
use crate::{Error, Result};

/// Node numbers are 1 to this one: 6 bits of a queue pair number.
pub(crate) const NODES: u16 = 63;
const MAGIC: u64 = u64::from_le_bytes(*b"doorfabr");
/// Changes with every change of the layout.
const VERSION: u64 = 1;
const TABLE_BYTES: usize = 8192;
const NAME_BYTES: usize = 64;
/// The upper half of every InfiniBand GID: link-local, as of a subnet without a manager.
const SUBNET: u64 = 0xfe80 << 48;
/// The lower half, or'ed with the node number: the identity of a port, EUI-64.
const PORT_GUID: u64 = 0x5c0f_7c00_0000_0000;

/// All of it is atomic: any process of the user may write there at any time.
#[repr(C)]
struct Table {
    magic: AtomicU64,
    version: AtomicU64,
    _pad: [u64; 6],
    /// By node number; the first is never used.
    entries: [Entry; NODES as usize + 1],
}

#[repr(C)]
struct Entry {
    /// The random number of the device's inbox; 0 while there is no device.
    port: AtomicU64,
    pid: AtomicU32,
    fd: AtomicU32,
    /// When that process started.
    started: AtomicU64,
    _pad: [u64; 5],
}

const _: () = assert!(size_of::<Table>() <= TABLE_BYTES);

impl Entry {
    /// Whether nobody is there any more. In doubt somebody is.
    fn is_vacant(&self) -> bool {
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

/// A device's place on a fabric.
#[derive(Debug)]
pub(crate) struct Fabric {
    table: NonNull<Table>,
    node: u16,
    link: Link,
    address: PortAddress,
    path: PathBuf,
    inode: u64,
}

// SAFETY: the table is plain shared memory, accessed by atomics only.
unsafe impl Send for Fabric {}

impl Fabric {
    /// Takes a node number for the device with this inbox.
    ///
    /// # Errors
    /// [`Error::State`] if the name is none, or the fabric is full or of another version; [`Error::System`] if the table
    /// cannot be opened.
    pub(crate) fn join(name: &str, link: Link, address: PortAddress) -> Result<Fabric> {
        let no = |reason: String| Error::State {
            operation: "open of a fabric",
            reason,
        };
        let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
        if name.is_empty() || name.len() > NAME_BYTES || !name.bytes().all(allowed) {
            return Err(no(format!(
                "`{name}` is no name: it needs 1 to {NAME_BYTES} letters, digits, `-`, `_` and `.`"
            )));
        }
        let path = path(name, link);
        let stat = |file: &File| file.metadata().map_err(|_| last_error("stat of a fabric"));
        let (locked, meta) = loop {
            let file = open(&path)?;
            let meta = stat(&file)?;
            if !meta.is_file() || meta.uid() != user() {
                return Err(no(format!("{} belongs to somebody else", path.display())));
            }
            let locked = Locked::new(file)?;
            let meta = stat(&locked.0)?;
            // The last node may have removed it in between.
            if meta.nlink() > 0 {
                break (locked, meta);
            }
        };
        let file = &locked.0;
        if meta.len() < TABLE_BYTES as u64 && file.set_len(TABLE_BYTES as u64).is_err() {
            return Err(last_error("ftruncate of a fabric"));
        }
        let table = map(file)?;
        // From here on the mapping goes with the fabric, whatever happens.
        let mut fabric = Fabric {
            table,
            node: 0,
            link,
            address,
            path,
            inode: meta.ino(),
        };
        let path = &fabric.path;
        let head = fabric.table();
        match head.magic.load(Ordering::Acquire) {
            0 => {
                head.version.store(VERSION, Ordering::Relaxed);
                head.magic.store(MAGIC, Ordering::Release);
            }
            MAGIC if head.version.load(Ordering::Relaxed) == VERSION => {}
            _ => return Err(no(format!("{} is of another version", path.display()))),
        }
        let node = (1..=NODES).find(|&node| fabric.entry(node).is_some_and(Entry::is_vacant));
        let Some(node) = node else {
            return Err(no(format!("all {NODES} nodes of `{name}` are taken")));
        };
        if let Some(entry) = fabric.entry(node) {
            let at = started(address.pid).ok().flatten().unwrap_or(0);
            entry.port.store(0, Ordering::Release);
            entry.pid.store(address.pid, Ordering::Relaxed);
            entry.fd.store(address.fd, Ordering::Relaxed);
            entry.started.store(at, Ordering::Relaxed);
            // Release: who finds the port finds the rest.
            entry.port.store(address.port, Ordering::Release);
        }
        fabric.node = node;
        Ok(fabric)
    }

    fn table(&self) -> &Table {
        // SAFETY: mapped in `map` for longer than a table and until `drop`; any bytes are a valid table.
        unsafe { self.table.as_ref() }
    }

    fn entry(&self, node: u16) -> Option<&Entry> {
        self.table()
            .entries
            .get(usize::from(node))
            .filter(|_| node > 0)
    }

    /// This device's number.
    pub(crate) fn node(&self) -> u16 {
        self.node
    }

    pub(crate) fn link(&self) -> Link {
        self.link
    }

    /// The port that has this number now; 0 for none.
    #[inline]
    pub(crate) fn port(&self, node: u16) -> u64 {
        self.entry(node)
            .map_or(0, |entry| entry.port.load(Ordering::Acquire))
    }

    /// Where the device of this number is.
    pub(crate) fn address(&self, node: u16) -> Option<PortAddress> {
        let entry = self.entry(node)?;
        let port = entry.port.load(Ordering::Acquire);
        (port != 0).then(|| PortAddress {
            host: host(),
            pid: entry.pid.load(Ordering::Relaxed),
            fd: entry.fd.load(Ordering::Relaxed),
            port,
        })
    }

    /// As if the process had been killed.
    #[cfg(test)]
    pub(crate) fn play_dead(&self) {
        if let Some(entry) = self.entry(self.node) {
            entry.pid.store(u32::MAX - 1, Ordering::Relaxed);
        }
    }

    /// Where packets for a node go, whether it is there or not: a device that comes later is found, too.
    #[inline]
    pub(crate) fn route(&self, node: u16) -> Destination {
        if node == self.node {
            Destination::Local
        } else if (1..=NODES).contains(&node) {
            Destination::Lane(usize::from(node))
        } else {
            Destination::Nowhere
        }
    }

    /// Whether the device of this number is gone without a word.
    pub(crate) fn is_vacant(&self, node: u16) -> bool {
        self.entry(node).is_none_or(Entry::is_vacant)
    }
}

impl Fabric {
    /// Gives the number back; the last one to go removes the table.
    fn leave(&self) {
        let locked = open(&self.path).and_then(Locked::new);
        if let Some(entry) = self.entry(self.node) {
            // Not if it was taken over.
            let (port, gone) = (self.address.port, 0);
            let _ = entry
                .port
                .compare_exchange(port, gone, Ordering::AcqRel, Ordering::Relaxed);
        }
        let is_this = |file: &File| {
            let last = (1..=NODES).all(|node| self.is_vacant(node));
            let meta = file.metadata().ok();
            last && meta.is_some_and(|meta| meta.ino() == self.inode)
        };
        if let Ok(locked) = &locked
            && is_this(&locked.0)
        {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

impl Drop for Fabric {
    fn drop(&mut self) {
        // A child of a fork has a copy of the device, and not its place.
        if self.address.pid == std::process::id() && self.node > 0 {
            self.leave();
        }
        // SAFETY: mapped in `map` with this length; nobody holds a reference into it any more.
        unsafe { libc::munmap(self.table.as_ptr().cast(), TABLE_BYTES) };
    }
}

/// The GID of a node.
pub(crate) fn gid_of(link: Link, node: u16) -> [u8; 16] {
    let number = match link {
        Link::InfiniBand => u128::from(SUBNET) << 64 | u128::from(PORT_GUID | u64::from(node)),
        // IPv4-mapped 127.0.0.NODE (IBTA annex A17: a RoCE v2 GID is an IP address).
        Link::Ethernet => 0xffff_7f00_0000 | u128::from(node),
    };
    number.to_be_bytes()
}

/// The node that a GID names.
pub(crate) fn node_of(link: Link, gid: &[u8; 16]) -> Option<u16> {
    let node = u16::from_be_bytes([gid[14], gid[15]]);
    let node = if link == Link::Ethernet {
        node & 0xff
    } else {
        node
    };
    ((1..=NODES).contains(&node) && gid_of(link, node) == *gid).then_some(node)
}

/// Where the table of a fabric lies: shared memory of this user on this host.
fn path(name: &str, link: Link) -> PathBuf {
    let link = match link {
        Link::InfiniBand => "ib",
        Link::Ethernet => "eth",
    };
    PathBuf::from(format!("/dev/shm/doorbell-fabric-{}-{name}.{link}", user()))
}

fn user() -> u32 {
    // SAFETY: a plain call.
    unsafe { libc::geteuid() }
}

fn open(path: &Path) -> Result<File> {
    OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .custom_flags(libc::O_NOFOLLOW | libc::O_CLOEXEC)
        .open(path)
        .map_err(|error| Error::System {
            operation: "open of a fabric's table",
            errno: error.raw_os_error().unwrap_or(0),
        })
}

/// A file that nobody else has locked.
struct Locked(File);

impl Locked {
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
}

impl Drop for Locked {
    fn drop(&mut self) {
        // By name, because a mapping of the file keeps it open, and with it the lock.
        // SAFETY: a plain call on an open descriptor.
        unsafe { libc::flock(self.0.as_raw_fd(), libc::LOCK_UN) };
    }
}

fn map(file: &File) -> Result<NonNull<Table>> {
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
    NonNull::new(start.cast()).ok_or_else(|| last_error("mmap of a fabric"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::soft::inbox::Inbox;

    fn fabric(name: &str) -> (Inbox, Fabric) {
        let inbox = Inbox::new().unwrap();
        let fabric = Fabric::join(name, Link::InfiniBand, inbox.address()).unwrap();
        (inbox, fabric)
    }

    fn name(test: &str) -> String {
        format!("test-{test}-{}", std::process::id())
    }

    #[track_caller]
    fn is_forgotten(name: &str) {
        assert!(!path(name, Link::InfiniBand).exists());
    }

    #[test]
    fn nodes_are_numbered_found_and_given_back() {
        let name = name("nodes");
        let (inbox_a, a) = fabric(&name);
        let (inbox_b, b) = fabric(&name);
        assert_eq!((a.node(), b.node()), (1, 2));
        assert_eq!(a.address(2), Some(inbox_b.address()));
        assert_eq!(b.address(1), Some(inbox_a.address()));
        assert_eq!(
            (a.address(3), a.address(0), a.address(64)),
            (None, None, None)
        );
        drop(a);
        assert_eq!(b.address(1), None);
        assert_eq!(fabric(&name).1.node(), 1);
        drop(b);
        is_forgotten(&name);
    }

    #[test]
    fn the_number_of_a_dead_node_is_taken_over_and_not_given_back_by_it() {
        let name = name("dead");
        let (_inbox, a) = fabric(&name);
        let (_other_inbox, other) = fabric(&name);
        let alive = a.address;
        // No process has this number; then one of the same number that started at another time; then one without the inbox.
        for (pid, later, fd) in [
            (u32::MAX - 1, 0, alive.fd),
            (alive.pid, 1, alive.fd),
            (alive.pid, 0, 0),
        ] {
            let entry = a.entry(1).unwrap();
            entry.port.store(alive.port, Ordering::Relaxed);
            entry.pid.store(pid, Ordering::Relaxed);
            entry.fd.store(fd, Ordering::Relaxed);
            entry.started.fetch_add(later, Ordering::Relaxed);
            assert!(a.is_vacant(1), "{pid} {later} {fd}");
            let (inbox, b) = fabric(&name);
            assert_eq!(b.node(), 1);
            assert!(!b.is_vacant(1));
            assert_eq!(a.address(1), Some(inbox.address()));
        }
        let (inbox, b) = fabric(&name);
        drop(a);
        assert_eq!(b.address(1), Some(inbox.address()));
        drop(b);
        drop(other);
        is_forgotten(&name);
    }

    #[test]
    fn a_fabric_is_full_at_its_last_node_and_names_are_names() {
        let name = name("full");
        let all: Vec<_> = (0..NODES).map(|_| fabric(&name)).collect();
        assert_eq!(all.last().unwrap().1.node(), NODES);
        let address = all[0].0.address();
        let refused = Fabric::join(&name, Link::InfiniBand, address);
        assert!(matches!(refused, Err(Error::State { .. })), "{refused:?}");
        for bad in ["", "a/b", "..\0", &"x".repeat(65), "ä"] {
            let refused = Fabric::join(bad, Link::InfiniBand, address);
            assert!(matches!(refused, Err(Error::State { .. })), "{bad}");
        }
        drop(all);
        is_forgotten(&name);
    }

    #[test]
    fn gids_name_nodes() {
        for link in [Link::InfiniBand, Link::Ethernet] {
            for node in [1, 2, NODES] {
                assert_eq!(node_of(link, &gid_of(link, node)), Some(node));
            }
            assert_eq!(node_of(link, &gid_of(link, 0)), None);
            assert_eq!(node_of(link, &gid_of(link, NODES + 1)), None);
            assert_eq!(node_of(link, &[0xff; 16]), None);
        }
        let mut gid = gid_of(Link::Ethernet, 7);
        assert_eq!(gid[10..], [0xff, 0xff, 127, 0, 0, 7]);
        gid[14] = 1;
        assert_eq!(node_of(Link::Ethernet, &gid), None);
    }
}
