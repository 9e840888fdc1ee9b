//! A named fabric: the table, in shared memory, of the devices that reach each other, by node number.
//!
//! A node that ends gives its number back; the number of one that died is taken over. Claims exclude each other by a lock
//! on the file, which the kernel lets go when its holder dies. Readers take no lock: an entry that is torn or stale names
//! an inbox that is not there, or not the one of that port, and opening the lane finds that out.

mod folder;
mod node_releaser;
mod table;

use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::time::Duration;

pub(crate) use self::node_releaser::NodeReleaser;
use self::table::{FabricTable, NodeEntry};
use crate::device::inbox::{InboxAddress, start_of, system_error};
use crate::device::options::LinkLayer;
use crate::device::wire::Destination;
use crate::{Error, Result, StateKind};

/// Node numbers are 1 to this one: 6 bits of a queue pair number.
pub(crate) const NODES: u16 = 63;
const NAME_BYTES: usize = 64;
/// How long a device that leaves waits for the lock of the table. Without it the number is given back, but the table is not removed.
const LOCK_TIMEOUT: Duration = Duration::from_secs(1);
/// The upper half of every InfiniBand GID: link-local, as of a subnet without a manager.
const SUBNET: u64 = 0xfe80 << 48;
/// The lower half, or'ed with the node number: the identity of a port, EUI-64.
const PORT_GUID: u64 = 0x5c0f_7c00_0000_0000;

/// A device's place on a fabric.
#[derive(Debug)]
pub(crate) struct Fabric {
    table: FabricTable,
    node: u16,
    link: LinkLayer,
    address: InboxAddress,
    path: PathBuf,
    inode: u64,
    /// The network namespace of a device that has told the others its GID; 0 before that.
    namespace: u64,
}

impl Fabric {
    /// Takes a node number for the device with this inbox.
    ///
    /// # Errors
    /// [`Error::State`] if the name is not valid, the fabric is full or of another version, or its folder cannot be trusted or has no room;
    /// [`Error::Timeout`] if another process keeps the table locked; [`Error::System`] if the table cannot be opened.
    pub(crate) fn join(name: &str, link: LinkLayer, address: InboxAddress) -> Result<Fabric> {
        let no = |kind, reason: String| Error::state(kind, "open of a fabric", reason);
        let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
        if name.is_empty() || name.len() > NAME_BYTES || !name.bytes().all(allowed) {
            return Err(no(
                StateKind::NotFound,
                format!(
                    "`{name}` is no name: it needs 1 to {NAME_BYTES} letters, digits, `-`, `_` and `.`"
                ),
            ));
        }
        let path = table::path(name, link)?;
        table::sweep(&path);
        let locked = table::lock(&path)?;
        let mut fabric = Fabric {
            table: table::map(&locked, &path)?,
            node: 0,
            link,
            address,
            inode: locked.inode().unwrap_or(0),
            path,
            namespace: 0,
        };
        let node = (1..=NODES).find(|&node| fabric.entry(node).is_some_and(NodeEntry::is_vacant));
        let Some(node) = node else {
            return Err(no(
                StateKind::Exhausted,
                format!("all {NODES} nodes of `{name}` are taken"),
            ));
        };
        // An entry with a wrong start would be taken for that of a dead process.
        let at = start_of(address.pid)?;
        if let Some(entry) = fabric.entry(node) {
            entry.port.store(0, Ordering::Release);
            entry.clear_host();
            entry.pid.store(address.pid, Ordering::Relaxed);
            entry.fd.store(address.fd, Ordering::Relaxed);
            entry.started.store(at, Ordering::Relaxed);
            // Release: a reader that sees the port sees the rest.
            entry.port.store(address.port, Ordering::Release);
        }
        fabric.node = node;
        Ok(fabric)
    }

    fn entry(&self, node: u16) -> Option<&NodeEntry> {
        self.table.entry(node)
    }

    /// This device's number.
    pub(crate) fn node(&self) -> u16 {
        self.node
    }

    pub(crate) fn link(&self) -> LinkLayer {
        self.link
    }

    /// The port that has this number now; 0 for none.
    #[inline]
    pub(crate) fn port(&self, node: u16) -> u64 {
        self.entry(node)
            .map_or(0, |entry| entry.port.load(Ordering::Acquire))
    }

    /// Where the device of this number is.
    pub(crate) fn address(&self, node: u16) -> Option<InboxAddress> {
        let entry = self.entry(node)?;
        let port = entry.port.load(Ordering::Acquire);
        (port != 0).then(|| InboxAddress {
            host: self.address.host,
            pid: entry.pid.load(Ordering::Relaxed),
            fd: entry.fd.load(Ordering::Relaxed),
            port,
        })
    }

    /// As if the process had been killed.
    #[cfg(test)]
    pub(crate) fn mark_dead(&self) {
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

    /// Tells the others the GID by which devices of other hosts reach this one. From then on it finds those that have told theirs.
    ///
    /// # Errors
    /// [`Error::System`] if the network namespace of the thread cannot be found out; [`Error::Timeout`] if another process keeps the table locked.
    pub(crate) fn tell_host(&mut self, gid: [u8; 16]) -> Result<()> {
        // Of the thread: a thread may have entered another one, and its sockets are in that.
        let own = std::fs::metadata("/proc/thread-self/ns/net");
        let namespace = own
            .map_err(system_error("stat of a network namespace"))?
            .ino();
        // Nobody takes a number meanwhile.
        let _locked = table::lock(&self.path)?;
        for entry in (1..=NODES).filter_map(|node| self.entry(node)) {
            // The address is ours: a device that had it has left or is dead.
            if entry.host_in(namespace) == Some(gid) {
                entry.clear_host();
            }
        }
        if let Some(entry) = self.entry(self.node) {
            entry.set_host(gid, namespace);
        }
        self.namespace = namespace;
        Ok(())
    }

    /// The GID that a node has told, if this device has told its own.
    #[inline]
    pub(crate) fn host_of(&self, node: u16) -> Option<[u8; 16]> {
        if self.namespace == 0 {
            return None;
        }
        self.entry(node)?.host_in(self.namespace)
    }

    /// The node that has told this GID. Whether its device is alive is not looked at.
    pub(crate) fn node_of_host(&self, gid: &[u8; 16]) -> Option<u16> {
        if self.namespace == 0 {
            return None;
        }
        (1..=NODES).find(|&node| self.port(node) != 0 && self.host_of(node).as_ref() == Some(gid))
    }

    /// Whether the device of this number is gone without a word.
    pub(crate) fn is_vacant(&self, node: u16) -> bool {
        self.entry(node).is_none_or(NodeEntry::is_vacant)
    }
}

impl Fabric {
    /// A handle that leaves the fabric, and that does not borrow from this.
    pub(crate) fn node_releaser(&self) -> NodeReleaser {
        NodeReleaser::of(self)
    }

    /// Gives the number back; the last one to go removes the table.
    fn leave(&self) {
        let locked = table::lock_existing(&self.path, LOCK_TIMEOUT);
        if let Some(entry) = self.entry(self.node) {
            // Not if it was taken over.
            let (port, gone) = (self.address.port, 0);
            let _ = entry
                .port
                .compare_exchange(port, gone, Ordering::AcqRel, Ordering::Relaxed);
        }
        // Its name may stand for another table now.
        if let Some(locked) = &locked
            && locked.inode() == Some(self.inode)
            && self.table.is_deserted()
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
    }
}

/// The GID of a node.
pub(crate) fn gid_of(link: LinkLayer, node: u16) -> [u8; 16] {
    let number = match link {
        LinkLayer::InfiniBand => u128::from(SUBNET) << 64 | u128::from(PORT_GUID | u64::from(node)),
        // IPv4-mapped 127.0.0.NODE (IBTA annex A17: a RoCE v2 GID is an IP address).
        LinkLayer::Ethernet => 0xffff_7f00_0000 | u128::from(node),
    };
    number.to_be_bytes()
}

/// The node that a GID names.
pub(crate) fn node_of(link: LinkLayer, gid: &[u8; 16]) -> Option<u16> {
    let node = u16::from_be_bytes([gid[14], gid[15]]);
    let node = if link == LinkLayer::Ethernet {
        node & 0xff
    } else {
        node
    };
    ((1..=NODES).contains(&node) && gid_of(link, node) == *gid).then_some(node)
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;
    use crate::device::inbox::Inbox;

    fn fabric(name: &str) -> (Inbox, Fabric) {
        let inbox = Inbox::new().unwrap();
        let fabric = Fabric::join(name, LinkLayer::InfiniBand, inbox.address()).unwrap();
        (inbox, fabric)
    }

    fn name(test: &str) -> String {
        format!("test-{test}-{}", std::process::id())
    }

    fn table_of(name: &str) -> PathBuf {
        table::path(name, LinkLayer::InfiniBand).unwrap()
    }

    #[track_caller]
    fn is_forgotten(name: &str) {
        assert!(!table_of(name).exists());
    }

    #[track_caller]
    fn until(mut holds: impl FnMut() -> bool) {
        let start = Instant::now();
        while !holds() {
            assert!(start.elapsed() < Duration::from_secs(60));
        }
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
    fn nodes_are_found_by_the_addresses_that_they_have_told() {
        let name = name("addresses");
        let ((_inbox_a, mut a), (_inbox_b, mut b)) = (fabric(&name), fabric(&name));
        let (mine, theirs) = ([1; 16], [2; 16]);
        a.tell_host(mine).unwrap();
        assert_eq!((a.host_of(1), a.host_of(2)), (Some(mine), None));
        assert_eq!(a.node_of_host(&theirs), None);
        // A device that has not told its own address finds no other device.
        assert_eq!((b.host_of(1), b.node_of_host(&mine)), (None, None));
        b.tell_host(theirs).unwrap();
        assert_eq!(a.node_of_host(&theirs), Some(2));
        assert_eq!(b.node_of_host(&mine), Some(1));
        assert_eq!(a.node_of_host(&mine), Some(1));
        // The same address in another network namespace is another host's.
        b.entry(2).unwrap().set_host(theirs, a.namespace + 1);
        assert_eq!(a.node_of_host(&theirs), None);
        b.tell_host(theirs).unwrap();
        // A device that has been killed has no address any more, once another one has that.
        let (_inbox_c, mut c) = fabric(&name);
        c.tell_host(theirs).unwrap();
        assert_eq!((a.node_of_host(&theirs), a.host_of(2)), (Some(3), None));
        // One that has left is not found, and what it has sent is still its own.
        drop(c);
        assert_eq!(
            (a.host_of(3), a.node_of_host(&theirs)),
            (Some(theirs), None)
        );
        let (_inbox_d, d) = fabric(&name);
        assert_eq!((d.node(), a.host_of(3)), (3, None));
    }

    /// A table that no device uses may be removed by another process that joins a fabric: then once more with another table.
    #[test]
    fn table_of_version_1_is_used_if_no_device_does() {
        let is_done = (0..10).any(|attempt| {
            let name = name(&format!("version-{attempt}"));
            let (inbox, a) = fabric(&name);
            let mut kept = Vec::new();
            for (version, is_used, is_taken) in
                [(1, true, false), (1, false, true), (3, false, false)]
            {
                a.table.set_version(version);
                let port = if is_used { a.address.port } else { 0 };
                a.entry(1).unwrap().port.store(port, Ordering::Relaxed);
                let joined = Fabric::join(&name, LinkLayer::InfiniBand, inbox.address());
                if joined.as_ref().is_ok_and(|other| other.inode != a.inode) {
                    return false;
                }
                assert_eq!(joined.is_ok(), is_taken, "{version} {joined:?}");
                // The last one to leave removes the table.
                kept.push(joined);
            }
            a.table.set_version(2);
            true
        });
        assert!(is_done);
    }

    #[test]
    fn full_fabric_and_invalid_names_are_refused() {
        let name = name("full");
        let all: Vec<_> = (0..NODES).map(|_| fabric(&name)).collect();
        assert_eq!(all.last().unwrap().1.node(), NODES);
        let address = all[0].0.address();
        let refused = Fabric::join(&name, LinkLayer::InfiniBand, address);
        assert!(matches!(refused, Err(Error::State { .. })), "{refused:?}");
        for bad in ["", "a/b", "..\0", &"x".repeat(65), "ä"] {
            let refused = Fabric::join(bad, LinkLayer::InfiniBand, address);
            assert!(matches!(refused, Err(Error::State { .. })), "{bad}");
        }
        drop(all);
        is_forgotten(&name);
    }

    #[test]
    fn table_with_only_dead_nodes_is_removed_by_next_join() {
        let (left, other) = (name("left"), name("other"));
        let (inbox, a) = fabric(&left);
        let b = fabric(&other);
        assert!(table_of(&left).exists());
        a.mark_dead();
        // The place of a process that was killed is not given back. Kept in sight: to a leak checker it is no leak.
        static KILLED: std::sync::Mutex<Option<(Inbox, Fabric)>> = std::sync::Mutex::new(None);
        *KILLED.lock().unwrap() = Some((inbox, a));
        drop(b);
        // A join skips a table that another process holds at that moment.
        until(|| {
            drop(fabric(&other));
            !table_of(&left).exists()
        });
        is_forgotten(&other);
    }

    #[test]
    fn node_is_released_without_its_device() {
        let name = name("releasers");
        let path = table_of(&name);
        let (_inbox_a, a) = fabric(&name);
        let (inbox_b, b) = fabric(&name);
        // The table is held, and the release does not wait for it.
        let held = table::lock(&path).unwrap();
        a.node_releaser().release();
        assert!(b.address(1).is_some());
        drop(held);
        // Others look over all tables now and then: one that is locked for so long is given up.
        until(|| {
            a.node_releaser().release();
            b.address(1).is_none()
        });
        a.node_releaser().release();
        assert_eq!(
            (b.address(1), b.address(2)),
            (None, Some(inbox_b.address()))
        );
        // Another has the number now, and keeps it.
        let (inbox_c, c) = fabric(&name);
        a.node_releaser().release();
        assert_eq!((c.node(), b.address(1)), (1, Some(inbox_c.address())));
        until(|| {
            c.node_releaser().release();
            b.address(1).is_none()
        });
        assert!(path.exists());
        // The last one.
        until(|| {
            b.node_releaser().release();
            !path.exists()
        });
        b.node_releaser().release();
        drop((a, b, c));
        is_forgotten(&name);
    }

    #[test]
    fn held_table_lock_delays_others_for_a_bounded_time() {
        let name = name("stopped");
        let (_inbox, a) = fabric(&name);
        let (inbox_b, b) = fabric(&name);
        let held = table::lock(&table_of(&name)).unwrap();
        let (send, receive) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            drop(a);
            let inbox = Inbox::new().unwrap();
            let _ = send.send(Fabric::join(&name, LinkLayer::InfiniBand, inbox.address()));
        });
        let joined = receive.recv_timeout(Duration::from_secs(60));
        let joined = joined.expect("a holder of the lock that does not go on is waited for");
        assert!(matches!(joined, Err(Error::Timeout { .. })), "{joined:?}");
        // The place is given back all the same.
        assert_eq!(b.address(1), None);
        assert_eq!(b.address(2), Some(inbox_b.address()));
        drop(held);
    }

    #[test]
    fn gids_name_nodes() {
        for link in [LinkLayer::InfiniBand, LinkLayer::Ethernet] {
            for node in [1, 2, NODES] {
                assert_eq!(node_of(link, &gid_of(link, node)), Some(node));
            }
            assert_eq!(node_of(link, &gid_of(link, 0)), None);
            assert_eq!(node_of(link, &gid_of(link, NODES + 1)), None);
            assert_eq!(node_of(link, &[0xff; 16]), None);
        }
        let mut gid = gid_of(LinkLayer::Ethernet, 7);
        assert_eq!(gid[10..], [0xff, 0xff, 127, 0, 0, 7]);
        gid[14] = 1;
        assert_eq!(node_of(LinkLayer::Ethernet, &gid), None);
    }
}
