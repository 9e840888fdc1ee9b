//! What peers may write to by themselves: an inbox shows which regions and connections are open, and whoever
//! holds a lane into it may store the bytes of an RDMA write where they belong, with no packet and nobody at work on this side.
//!
//! An entry is shut before what it stands for goes away, and [`Openings::shut`] returns when no writer can be between its look at
//! the entry and the end of its copy: a writer makes its lane's count odd before the look, and even behind the copy. A writer
//! that dies, or executes another program, has copied all that it ever will. One that is stopped in between holds the owner up until it goes on: its write is
//! under way.
//!
//! What a peer reads here it could also have been told; the owner takes nothing from it. Only processes that may write to each
//! other's memory anyway (`process_vm_writev`) have any use for it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use std::time::{Duration, Instant};

use super::process::has_unmapped;
use super::{INBOX_LINK, LANES, Lane, LaneHead, Mapping};
use crate::device::space::{Place, Space};

/// Regions and queue pairs that can be shown, by slot. Those of higher slots are written to by packets.
pub(super) const ENTRIES: usize = 4096;
/// How long a writer is waited for before it is asked whether it lives, again and again.
const PATIENCE: Duration = Duration::from_millis(1);

/// A region, open while `key` is not 0.
#[repr(C, align(64))]
pub(super) struct RegionEntry {
    key: AtomicU32,
    pd: AtomicU32,
    /// Whose memory it is.
    pid: AtomicU32,
    _pad: AtomicU32,
    start: AtomicU64,
    len_bytes: AtomicU64,
    iova: AtomicU64,
}

/// The receiving end of a connection, open while `qpn` is not 0.
#[repr(C, align(32))]
pub(super) struct ConnectionEntry {
    qpn: AtomicU32,
    pd: AtomicU32,
    connection: AtomicU32,
    /// The node that may write, 0 for any.
    node: AtomicU32,
    /// The sequence number of the next packet: what comes before has been carried out.
    expected_psn: AtomicU32,
}

/// What stands between the lanes and the end of an inbox.
#[repr(C)]
pub(super) struct Entries {
    /// Not 0 while the device lets others write at all.
    open: AtomicU32,
    regions: [RegionEntry; ENTRIES],
    connections: [ConnectionEntry; ENTRIES],
}

/// A region as a peer sees it: one that peers may write to.
#[derive(Debug, Clone, Copy)]
pub(crate) struct OpenRegion {
    pub(crate) key: u32,
    pub(crate) pd: u32,
    pub(crate) start: Place,
    pub(crate) len_bytes: u64,
    pub(crate) iova: u64,
}

/// The receiving end of a connection as its peer names it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct OpenConnection {
    pub(crate) qpn: u32,
    pub(crate) connection: u32,
    /// The node at the other end; on the owner's side 0 for any.
    pub(crate) node: u16,
}

/// The owner's end.
#[derive(Debug, Clone)]
pub(crate) struct Openings(pub(super) Arc<Mapping>);

impl Openings {
    /// Lets peers write, or stops them.
    pub(crate) fn set_open(&self, open: bool) {
        let word = &self.0.entries().open;
        // Read back, because only a change costs a wait.
        if (word.load(Ordering::Relaxed) != 0) != open {
            word.store(u32::from(open), Ordering::Release);
            if !open {
                self.wait_for_writers();
            }
        }
    }

    /// Shows a region. The slot's last one was shut.
    pub(crate) fn show_region(&self, slot: usize, region: &OpenRegion) {
        let Some(entry) = self.0.entries().regions.get(slot) else {
            return;
        };
        entry.pd.store(region.pd, Ordering::Relaxed);
        let pid = region.start.space.pid() as u32;
        entry.pid.store(pid, Ordering::Relaxed);
        entry.start.store(region.start.addr, Ordering::Relaxed);
        entry.len_bytes.store(region.len_bytes, Ordering::Relaxed);
        entry.iova.store(region.iova, Ordering::Relaxed);
        // Release: who finds the key finds the rest.
        entry.key.store(region.key, Ordering::Release);
    }

    /// Shuts a region, if it is shown.
    pub(crate) fn shut_region(&self, slot: usize) {
        if let Some(entry) = self.0.entries().regions.get(slot) {
            self.shut(&entry.key);
        }
    }

    /// Shows the receiving end of a connection, for regions of this domain.
    pub(crate) fn show_connection(&self, slot: usize, end: &OpenConnection, pd: u32) {
        let Some(entry) = self.0.entries().connections.get(slot) else {
            return;
        };
        entry.pd.store(pd, Ordering::Relaxed);
        entry.connection.store(end.connection, Ordering::Relaxed);
        entry.node.store(end.node.into(), Ordering::Relaxed);
        entry.qpn.store(end.qpn, Ordering::Release);
    }

    /// Shows how far the packets of a connection have been carried out.
    pub(crate) fn show_progress(&self, slot: usize, expected_psn: u32) {
        if let Some(entry) = self.0.entries().connections.get(slot) {
            // Release: behind the bytes of those packets.
            entry.expected_psn.store(expected_psn, Ordering::Release);
        }
    }

    /// Shuts it, if it is shown.
    pub(crate) fn shut_connection(&self, slot: usize) {
        if let Some(entry) = self.0.entries().connections.get(slot) {
            self.shut(&entry.qpn);
        }
    }

    fn shut(&self, word: &AtomicU32) {
        if word.load(Ordering::Relaxed) != 0 {
            word.store(0, Ordering::Relaxed);
            self.wait_for_writers();
        }
    }

    /// Returns when every writer that may have seen an entry open is done.
    fn wait_for_writers(&self) {
        // Orders the shut entry before the look at the counts; pairs with the fence in `Lane::write_to`. Either the writer sees the
        // entry shut, or this sees its odd count.
        fence(Ordering::SeqCst);
        let mut claimed = self.0.head().claimed.load(Ordering::Acquire);
        while claimed != 0 {
            let lane = claimed.trailing_zeros() as usize;
            claimed &= claimed - 1;
            wait_for(self.0.lane(lane % LANES), self.0.inode);
        }
    }
}

fn wait_for(lane: &LaneHead, inode: u64) {
    let seen = lane.writes.load(Ordering::Acquire);
    if seen & 1 == 0 {
        return;
    }
    let mut asked = Instant::now();
    while lane.writes.load(Ordering::Acquire) == seen {
        if asked.elapsed() < PATIENCE {
            std::thread::yield_now();
            continue;
        }
        let owner = lane.owner.load(Ordering::Acquire);
        let pid = owner as u32;
        if owner == 0 || lane.is_dead(owner) || has_unmapped(pid, INBOX_LINK, inode) {
            return;
        }
        std::thread::sleep(PATIENCE);
        asked = Instant::now();
    }
}

impl LaneHead {
    /// A writer that died in the middle writes no more.
    pub(super) fn end_writes(&self) {
        let count = self.writes.load(Ordering::Relaxed);
        self.writes.store((count + 1) & !1, Ordering::Release);
    }
}

/// What a peer showed; it stays so until this is dropped.
pub(crate) struct Writing<'a> {
    lane: &'a LaneHead,
    /// Where the bytes go.
    pub(crate) into: Place,
}

/// Why a peer may not be written to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NotNow {
    /// It does not let this happen.
    Shut,
    /// Packets that came before have not been carried out.
    Behind,
}

impl Drop for Writing<'_> {
    fn drop(&mut self) {
        // Release: behind the copy.
        self.lane.writes.fetch_add(1, Ordering::Release);
    }
}

impl Lane {
    /// The place of `len_bytes` (not 0) at `addr` under `rkey`, for a peer that lets this end of the connection write there by itself,
    /// and has carried out all packets before `next_psn`.
    pub(crate) fn write_to(
        &self,
        (end, next_psn): (&OpenConnection, u32),
        rkey: u32,
        addr: u64,
        len_bytes: u64,
    ) -> Result<Writing<'_>, NotNow> {
        let entries = self.mapping.entries();
        let lane = self.mapping.lane(self.lane);
        // Slots are the low bits of queue pair numbers.
        let slot = end.qpn as usize % ENTRIES;
        let (Some(region), Some(connection)) = (
            entries.regions.get((rkey >> 8) as usize),
            entries.connections.get(slot),
        ) else {
            return Err(NotNow::Shut);
        };
        // What is shut has the number 0, and the rest of it is still there.
        if rkey == 0 || end.qpn == 0 {
            return Err(NotNow::Shut);
        }
        // A look before the fence, which is the dear part.
        if entries.open.load(Ordering::Relaxed) == 0
            || region.key.load(Ordering::Relaxed) != rkey
            || connection.qpn.load(Ordering::Relaxed) != end.qpn
        {
            return Err(NotNow::Shut);
        }
        if connection.expected_psn.load(Ordering::Relaxed) != next_psn {
            return Err(NotNow::Behind);
        }
        lane.writes.fetch_add(1, Ordering::Relaxed);
        // Pairs with the fence in `Openings::wait_for_writers`.
        fence(Ordering::SeqCst);
        let mut writing = Writing {
            lane,
            into: Place::local(std::ptr::null()),
        };
        let open = entries.open.load(Ordering::Acquire) != 0
            && region.key.load(Ordering::Acquire) == rkey
            && connection.qpn.load(Ordering::Acquire) == end.qpn;
        let node = connection.node.load(Ordering::Relaxed);
        let expected = connection.connection.load(Ordering::Relaxed) == end.connection
            && (node == 0 || node == u32::from(end.node))
            && connection.pd.load(Ordering::Relaxed) == region.pd.load(Ordering::Relaxed)
            && connection.expected_psn.load(Ordering::Acquire) == next_psn;
        let offset = addr.wrapping_sub(region.iova.load(Ordering::Relaxed));
        let room = region.len_bytes.load(Ordering::Relaxed);
        let fits = offset < room && len_bytes <= room - offset;
        // By the kernel, also where it is this process: what a peer shows is not trusted with a plain copy, and no process has a
        // number that would stand for one.
        let space = Space::of(region.pid.load(Ordering::Relaxed) as i32);
        if !(open && expected && fits) || space.is_local() {
            return Err(NotNow::Shut);
        }
        writing.into = Place {
            space,
            addr: region.start.load(Ordering::Relaxed).wrapping_add(offset),
        };
        Ok(writing)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::device::inbox::Inbox;
    use std::sync::atomic::AtomicBool;

    const END: OpenConnection = OpenConnection {
        qpn: 0x48003,
        connection: 7,
        node: 2,
    };
    const REGION: OpenRegion = OpenRegion {
        key: 0x105,
        pd: 4,
        start: Place {
            space: Space::LOCAL,
            addr: 0x7000,
        },
        len_bytes: 100,
        iova: 0x1000,
    };

    fn opened() -> (Inbox, Lane) {
        let inbox = Inbox::new().unwrap();
        let openings = inbox.openings();
        openings.set_open(true);
        openings.show_region(1, &REGION);
        openings.show_progress(3, 50);
        openings.show_connection(3, &END, REGION.pd);
        let lane = Lane::open(&inbox.address()).unwrap();
        (inbox, lane)
    }

    fn place(lane: &Lane, end: &OpenConnection, rkey: u32, addr: u64, len: u64) -> Option<u64> {
        lane.write_to((end, 50), rkey, addr, len)
            .ok()
            .map(|writing| writing.into.addr)
    }

    #[test]
    fn what_is_shown_is_open_and_every_edge_of_it_is_checked() {
        let (inbox, lane) = opened();
        let at = |addr, len| place(&lane, &END, REGION.key, addr, len);
        assert_eq!(
            (at(0x1000, 100), at(0x1063, 1)),
            (Some(0x7000), Some(0x7063))
        );
        assert_eq!(
            (
                at(0x1000, 101),
                at(0xfff, 1),
                at(0x1064, 1),
                at(0x1001, 100),
                at(0x1001, u64::MAX)
            ),
            (None, None, None, None, None)
        );
        assert_eq!(place(&lane, &END, REGION.key + 1, 0x1000, 1), None);
        assert_eq!(place(&lane, &END, u32::MAX, 0x1000, 1), None);
        let ends = [
            OpenConnection {
                qpn: 0x48004,
                ..END
            },
            OpenConnection {
                qpn: 0x4c003,
                ..END
            },
            OpenConnection {
                connection: 8,
                ..END
            },
            OpenConnection { node: 1, ..END },
        ];
        for end in ends {
            assert_eq!(place(&lane, &end, REGION.key, 0x1000, 1), None, "{end:?}");
        }
        let behind = lane.write_to((&END, 51), REGION.key, 0x1000, 1).err();
        assert_eq!(behind, Some(NotNow::Behind));
        let openings = inbox.openings();
        openings.show_connection(3, &END, REGION.pd + 1);
        assert_eq!(at(0x1000, 1), None, "of another domain");
        openings.show_connection(3, &OpenConnection { node: 0, ..END }, REGION.pd);
        assert_eq!(place(&lane, &ends[3], REGION.key, 0x1000, 1), Some(0x7000));
        // Slots that have no entry are nobody's.
        openings.show_region(ENTRIES, &REGION);
        openings.shut_region(ENTRIES);
        assert_eq!(place(&lane, &END, (ENTRIES as u32) << 8, 0x1000, 1), None);
        let shuts: [fn(&Openings); 3] = [
            |openings| openings.shut_region(1),
            |openings| openings.shut_connection(3),
            |openings| openings.set_open(false),
        ];
        for shut in shuts {
            let (inbox, lane) = opened();
            shut(&inbox.openings());
            let refused = lane.write_to((&END, 50), REGION.key, 0x1000, 1).err();
            assert_eq!(refused, Some(NotNow::Shut));
            assert_eq!(inbox.mapping.lane(0).writes.load(Ordering::Relaxed) & 1, 0);
        }
    }

    #[test]
    fn nobody_is_led_to_a_plain_copy_by_what_a_peer_shows() {
        let (inbox, lane) = opened();
        for pid in [0, 1 << 31, u32::MAX] {
            inbox.mapping.entries().regions[1]
                .pid
                .store(pid, Ordering::Relaxed);
            let shown = place(&lane, &END, REGION.key, 0x1000, 1);
            assert_eq!(shown, None, "{pid}");
        }
    }

    #[test]
    fn zero_is_no_key_and_no_number_of_what_is_shut() {
        let (inbox, lane) = opened();
        let openings = inbox.openings();
        let first = OpenRegion { key: 5, ..REGION };
        openings.show_region(0, &first);
        assert_eq!(place(&lane, &END, 5, 0x1000, 1), Some(0x7000));
        openings.shut_region(0);
        assert_eq!(place(&lane, &END, 0, 0x1000, 1), None);
        let end = OpenConnection {
            qpn: 1 << 14,
            ..END
        };
        openings.show_progress(0, 50);
        openings.show_connection(0, &end, REGION.pd);
        assert_eq!(place(&lane, &end, REGION.key, 0x1000, 1), Some(0x7000));
        openings.shut_connection(0);
        let nobody = OpenConnection { qpn: 0, ..END };
        assert_eq!(place(&lane, &nobody, REGION.key, 0x1000, 1), None);
    }

    #[test]
    fn who_shuts_waits_for_who_writes() {
        const SHUTS: [fn(&Openings); 3] = [
            |openings| openings.shut_region(1),
            |openings| openings.shut_connection(3),
            |openings| openings.set_open(false),
        ];
        for (round, shut) in SHUTS.iter().cycle().take(12).enumerate() {
            let (inbox, first) = opened();
            let second = Lane::open(&inbox.address()).unwrap();
            let lane = [&first, &second][round % 2];
            let (started, done) = (AtomicBool::new(false), AtomicBool::new(false));
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    let writing = lane.write_to((&END, 50), REGION.key, 0x1000, 1);
                    started.store(true, Ordering::Release);
                    // Longer than what is only slow to look.
                    std::thread::sleep(3 * PATIENCE);
                    done.store(true, Ordering::Release);
                    assert!(writing.is_ok());
                });
                while !started.load(Ordering::Acquire) {
                    std::thread::yield_now();
                }
                shut(&inbox.openings());
                assert!(done.load(Ordering::Acquire), "{round}");
            });
        }
    }

    #[test]
    fn a_writer_that_has_died_holds_nobody_up_nor_does_its_lane() {
        let (inbox, lane) = opened();
        let head = inbox.mapping.lane(0);
        std::mem::forget(lane.write_to((&END, 50), REGION.key, 0x1000, 1));
        // No process has this number.
        head.owner.store(u64::from(u32::MAX - 1), Ordering::Release);
        inbox.openings().shut_region(1);
        assert_eq!(head.writes.load(Ordering::Relaxed), 1);
        drop(lane);
        inbox.sweep();
        let next = Lane::open(&inbox.address()).unwrap();
        assert_eq!((next.lane, head.writes.load(Ordering::Relaxed)), (0, 2));
        inbox.openings().shut_connection(3);
    }

    #[test]
    fn a_writer_that_executes_another_program_holds_nobody_up() {
        let (inbox, lane) = opened();
        let head = inbox.mapping.lane(0);
        let own = std::process::id();
        assert!(!has_unmapped(own, INBOX_LINK, inbox.mapping.inode));
        assert!(has_unmapped(own, INBOX_LINK, inbox.mapping.inode ^ 1 << 40));
        let mut child = std::process::Command::new("sleep")
            .arg("60")
            .spawn()
            .unwrap();
        std::mem::forget(lane.write_to((&END, 50), REGION.key, 0x1000, 1));
        let started = crate::device::inbox::started(child.id()).unwrap().unwrap();
        head.owner_started.store(started, Ordering::Release);
        head.owner.store(child.id().into(), Ordering::Release);
        let (openings, done) = (inbox.openings(), AtomicBool::new(false));
        let held_up = std::thread::scope(|scope| {
            scope.spawn(|| {
                openings.shut_region(1);
                done.store(true, Ordering::Release);
            });
            let start = Instant::now();
            while !done.load(Ordering::Acquire) && start.elapsed() < Duration::from_secs(30) {
                std::thread::yield_now();
            }
            let held_up = !done.load(Ordering::Acquire);
            child.kill().unwrap();
            child.wait().unwrap();
            held_up
        });
        assert!(!held_up);
    }
}
