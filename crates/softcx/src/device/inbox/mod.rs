//! How packets go from process to process: every device owns an inbox in shared memory, and each device that sends to it
//! claims one of its lanes.
//!
//! The inbox is an anonymous file (memfd), sealed against shrinking, which a peer opens through the owner's `/proc` entry:
//! it has no name, so nothing is left behind by a process that is killed. A lane has one writer and one reader. A writer
//! that dies in the middle of a slot has not published it, and blocks no other process.
#![allow(unsafe_code)] // memory shared with other processes

mod lane;
mod process;

use std::cell::Cell;
use std::os::fd::{FromRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::Result;
use crate::device::cursor::{Corrupt, Cursors};
use crate::device::dma;
use crate::device::file_mapping::FileMapping;
use crate::device::packet::{HEADER_BYTES, Header, MAX_PAYLOAD_BYTES};
use crate::device::wake_word::WakeWord;

pub(crate) use lane::{LaneWriter, is_inbox};
use process::host;
pub(crate) use process::{file_error, last_error, random, start_of, started, system_error};

const MAGIC: u64 = u64::from_le_bytes(*b"doorbell");
/// Changes with every change of the layout or of the packet header.
pub(crate) const VERSION: u32 = 6;
/// Devices that may send to one device: all other nodes of a fabric, and one more.
const LANES: usize = 64;
const SLOTS: usize = 256;
const SLOT_BYTES: usize = HEADER_BYTES + MAX_PAYLOAD_BYTES;
const LANE_BYTES: usize = 4096 + SLOTS * SLOT_BYTES;
const INBOX_BYTES: usize = 4096 + LANES * LANE_BYTES;
/// How the kernel shows the descriptor of an inbox in `/proc`.
const INBOX_LINK: &str = "/memfd:doorbell-inbox";

/// Set in `LaneHead::owner` by a writer that closed its end.
const CLOSED: u64 = 1 << 63;
/// Set in `LaneHead::owner` while a writer moves in: `owner_started` is not its own yet.
const CLAIMING: u64 = 1 << 62;
/// Set in `LaneHead::owner` while the reader frees the lane: no writer may claim it.
const SWEEPING: u64 = 1 << 61;

/// All of it is atomic: any process that may open the inbox may write there at any time.
#[repr(C)]
struct InboxHead {
    magic: AtomicU64,
    version: AtomicU32,
    _reserved: u32,
    port: AtomicU64,
    wake_word: WakeWord,
    /// Bit `i`: lane `i` has a writer, or had one.
    claimed: AtomicU64,
}

#[repr(C)]
struct LaneHead {
    /// 0 while free; else the writer's process id, with [`CLOSED`], [`CLAIMING`] or [`SWEEPING`].
    owner: AtomicU64,
    /// When the writer's process started, so that a later process of the same number is not taken for it.
    owner_started: AtomicU64,
    _pad: [u64; 6],
    cursors: Cursors,
}

impl LaneHead {
    /// Whether the process of this value of `owner` is dead. In doubt it lives: two writers would spoil a lane.
    fn is_dead(&self, owner: u64) -> bool {
        match started(owner as u32) {
            Ok(None) => true,
            Ok(Some(at)) => {
                owner & CLAIMING == 0 && at != self.owner_started.load(Ordering::Acquire)
            }
            Err(_) => false,
        }
    }

    /// Makes this process the owner in place of `owner`, which is 0 or dead. The cursors stay: the counts of a dead writer
    /// go on, and the slot that it did not publish is written anew.
    /// `start` is when this process started.
    fn claim(&self, owner: u64, start: u64) -> bool {
        let pid = u64::from(std::process::id());
        let swap = |from, to| {
            self.owner
                .compare_exchange(from, to, Ordering::AcqRel, Ordering::Relaxed)
                .is_ok()
        };
        if !swap(owner, pid | CLAIMING) {
            return false;
        }
        // The mark keeps others from judging us by the start of the last owner.
        self.owner_started.store(start, Ordering::Release);
        swap(pid | CLAIMING, pid)
    }
}

/// The address of an inbox: what a peer needs to find it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct InboxAddress {
    /// Which boot of which host.
    pub(crate) host: u64,
    pub(crate) pid: u32,
    pub(crate) fd: u32,
    /// Random: no two devices share it.
    pub(crate) port: u64,
}

/// How another device is reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WireAddress {
    /// By its inbox, on this host.
    Inbox(InboxAddress),
    /// By UDP, at the address of this GID.
    Host([u8; 16]),
}

/// The shared memory of an inbox.
#[derive(Debug)]
struct SharedMapping(FileMapping);

impl SharedMapping {
    /// `file` is INBOX_BYTES long and sealed against shrinking.
    fn new(file: &OwnedFd) -> Result<SharedMapping> {
        let mapping = FileMapping::new(file, INBOX_BYTES);
        Ok(SharedMapping(
            mapping.map_err(system_error("mmap of an inbox"))?,
        ))
    }

    fn head(&self) -> &InboxHead {
        // SAFETY: the mapping is page aligned, longer than a head, lives as long as `self`, and any bytes are a valid head.
        unsafe { self.0.start().cast::<InboxHead>().as_ref() }
    }

    fn lane(&self, lane: usize) -> &LaneHead {
        debug_assert!(lane < LANES);
        // SAFETY: within the mapping and aligned: lanes start at multiples of 64 bytes; any bytes are a valid head.
        unsafe {
            self.0
                .start()
                .add(4096 + lane % LANES * LANE_BYTES)
                .cast::<LaneHead>()
                .as_ref()
        }
    }

    fn slot(&self, lane: usize, count: u64) -> *mut u8 {
        let offset =
            4096 + lane % LANES * LANE_BYTES + 4096 + (count as usize % SLOTS) * SLOT_BYTES;
        self.0.start().as_ptr().wrapping_add(offset)
    }
}

/// This device's inbox.
#[derive(Debug)]
pub(crate) struct Inbox {
    mapping: Arc<SharedMapping>,
    address: InboxAddress,
    /// The lane whose writer's life is looked into next.
    next_sweep: Cell<usize>,
    _file: OwnedFd,
}

/// What a reader found on a lane.
pub(crate) enum Arrival {
    /// A packet; its payload lies at the pointer until [`Inbox::give_back`].
    Packet(u64, Header, *const u8),
    /// Bytes that are no packet, in the slot of that count; without, the lane was a lie and is empty now.
    Garbage(Option<u64>),
    /// Nothing.
    Empty,
}

impl Inbox {
    pub(crate) fn new() -> Result<Inbox> {
        // SAFETY: a constant, terminated name.
        let fd = unsafe {
            libc::memfd_create(
                c"doorbell-inbox".as_ptr(),
                libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING,
            )
        };
        if fd < 0 {
            return Err(last_error("memfd_create"));
        }
        // SAFETY: a descriptor that was just opened and has no other owner.
        let file = unsafe { OwnedFd::from_raw_fd(fd) };
        // SAFETY: plain calls on an open descriptor.
        let sealed = unsafe {
            libc::ftruncate(fd, INBOX_BYTES as libc::off_t) == 0
                && libc::fcntl(
                    fd,
                    libc::F_ADD_SEALS,
                    libc::F_SEAL_SHRINK | libc::F_SEAL_GROW,
                ) == 0
        };
        if !sealed {
            return Err(last_error("ftruncate of an inbox"));
        }
        let mapping = SharedMapping::new(&file)?;
        let address = InboxAddress {
            host: host()?,
            pid: std::process::id(),
            fd: fd as u32,
            port: random()?,
        };
        let head = mapping.head();
        head.port.store(address.port, Ordering::Relaxed);
        head.version.store(VERSION, Ordering::Relaxed);
        // Release: a reader that sees the magic number sees the others.
        head.magic.store(MAGIC, Ordering::Release);
        Ok(Inbox {
            mapping: Arc::new(mapping),
            address,
            next_sweep: Cell::new(0),
            _file: file,
        })
    }

    pub(crate) fn address(&self) -> InboxAddress {
        self.address
    }

    /// Lanes that have a writer, as bits.
    #[inline]
    pub(crate) fn claimed(&self) -> u64 {
        self.mapping.head().claimed.load(Ordering::Acquire)
    }

    /// The oldest packet of a lane, behind so many that were read and not given back.
    pub(crate) fn receive(&self, lane: usize, held: u64) -> Arrival {
        let head = self.mapping.lane(lane);
        let count = match head.cursors.filled_behind(held, SLOTS as u64) {
            Ok(Some(count)) => count,
            Ok(None) => return Arrival::Empty,
            Err(Corrupt) => {
                head.cursors.drain();
                return Arrival::Garbage(None);
            }
        };
        let slot = self.mapping.slot(lane, count);
        let mut bytes = [0; HEADER_BYTES];
        // SAFETY: a slot within the mapping. It is copied before it is looked at: the writer might change it meanwhile.
        unsafe { dma::copy_out(slot, &mut bytes) };
        match Header::parse(&bytes) {
            Ok(header) => Arrival::Packet(count, header, slot.wrapping_add(HEADER_BYTES)),
            Err(_) => Arrival::Garbage(Some(count)),
        }
    }

    /// Frees the slot of a packet, and all before it.
    pub(crate) fn give_back(&self, lane: usize, count: u64) {
        self.mapping.lane(lane).cursors.give_back(count);
    }

    /// Frees lanes whose writer has closed them or is dead, once they are read empty. Each call checks for one
    /// lane only whether its writer lives, because this system call takes some microseconds.
    pub(crate) fn sweep(&self) {
        let asked = self.next_sweep.get();
        self.next_sweep.set((asked + 1) % LANES);
        for lane in 0..LANES {
            let head = self.mapping.lane(lane);
            let owner = head.owner.load(Ordering::Acquire);
            if owner == 0 {
                continue;
            }
            let foreign = owner as u32 != std::process::id();
            let gone = owner & CLOSED != 0 || (lane == asked && foreign && head.is_dead(owner));
            let empty = || matches!(head.cursors.filled(SLOTS as u64), Ok(None) | Err(Corrupt));
            // The mark comes first: from here on no process can take the lane over, and a lane that was taken over is left alone.
            let mark = || {
                let marked = owner | SWEEPING;
                head.owner
                    .compare_exchange(owner, marked, Ordering::AcqRel, Ordering::Relaxed)
                    .is_ok()
            };
            if gone && empty() && mark() {
                head.cursors.drain();
                self.mapping
                    .head()
                    .claimed
                    .fetch_and(!(1u64 << lane), Ordering::AcqRel);
                // Release: the next owner finds the lane empty.
                head.owner.store(0, Ordering::Release);
            }
        }
    }

    /// The word that wakes the engine of this inbox.
    pub(crate) fn engine_wake(&self) -> EngineWake {
        EngineWake(Arc::clone(&self.mapping))
    }
}

/// The word that wakes the engine of an inbox.
#[derive(Debug, Clone)]
pub(crate) struct EngineWake(Arc<SharedMapping>);

impl std::ops::Deref for EngineWake {
    type Target = WakeWord;
    fn deref(&self) -> &WakeWord {
        &self.0.head().wake_word
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Error;
    use crate::device::packet::PacketKind;

    fn packet(psn: u32) -> Header {
        Header {
            payload_bytes: 4,
            ..Header::new(PacketKind::Send, 1, psn, 0)
        }
    }

    fn send(lane: &LaneWriter, psn: u32) -> bool {
        lane.send(&packet(psn), |at| {
            // SAFETY: a slot has room for 4 bytes.
            unsafe { dma::copy_in(at, &psn.to_le_bytes()) };
            true
        })
    }

    fn receive(inbox: &Inbox, lane: usize) -> Option<u32> {
        let Arrival::Packet(count, header, payload) = inbox.receive(lane, 0) else {
            return None;
        };
        let mut bytes = [0; 4];
        // SAFETY: the slot is not given back yet.
        unsafe { dma::copy_out(payload, &mut bytes) };
        assert_eq!(u32::from_le_bytes(bytes), header.psn);
        inbox.give_back(lane, count);
        Some(header.psn)
    }

    #[test]
    fn packets_arrive_in_order_and_a_full_lane_refuses() {
        let inbox = Inbox::new().unwrap();
        let lane = LaneWriter::open(&inbox.address()).unwrap();
        assert_eq!(inbox.claimed(), 1);
        for lap in 0..3 {
            for psn in 0..SLOTS as u32 {
                assert!(send(&lane, lap * 1000 + psn));
            }
            assert!(!send(&lane, 9999));
            for psn in 0..SLOTS as u32 {
                assert_eq!(receive(&inbox, 0), Some(lap * 1000 + psn));
            }
            assert_eq!(receive(&inbox, 0), None);
        }
    }

    #[test]
    fn a_closed_lane_is_read_empty_and_used_again() {
        let inbox = Inbox::new().unwrap();
        let lane = LaneWriter::open(&inbox.address()).unwrap();
        assert!(send(&lane, 5));
        drop(lane);
        inbox.sweep();
        assert_eq!(inbox.claimed(), 1, "not before it is read");
        assert_eq!(receive(&inbox, 0), Some(5));
        inbox.sweep();
        assert_eq!(inbox.claimed(), 0);
        let again = LaneWriter::open(&inbox.address()).unwrap();
        assert!(send(&again, 6));
        assert_eq!(receive(&inbox, 0), Some(6));
    }

    #[test]
    fn full_inbox_and_wrong_addresses_are_refused_with_a_reason() {
        let inbox = Inbox::new().unwrap();
        let lanes: Vec<_> = (0..LANES)
            .map(|_| LaneWriter::open(&inbox.address()).unwrap())
            .collect();
        let reason = |address| match LaneWriter::open(&address) {
            Err(Error::State { reason, .. }) => reason,
            other => panic!("{other:?}"),
        };
        assert!(reason(inbox.address()).contains("lanes"));
        drop(lanes);
        inbox.sweep();
        assert!(
            reason(InboxAddress {
                port: 1,
                ..inbox.address()
            })
            .contains("gone")
        );
        assert!(
            reason(InboxAddress {
                fd: 0,
                ..inbox.address()
            })
            .contains("gone")
        );
        assert!(
            reason(InboxAddress {
                pid: u32::MAX,
                ..inbox.address()
            })
            .contains("gone")
        );
        assert!(
            reason(InboxAddress {
                host: 1,
                ..inbox.address()
            })
            .contains("host")
        );
    }

    /// In a child, because the limit is the whole process's.
    #[test]
    fn process_without_descriptors_gets_emfile() {
        const CHILD: &str = "DOORBELL_TEST_WITHOUT_DESCRIPTORS";
        if std::env::var_os(CHILD).is_none() {
            let name = "device::inbox::tests::process_without_descriptors_gets_emfile";
            let output = std::process::Command::new(std::env::current_exe().unwrap())
                .args(["--exact", name, "--nocapture", "--test-threads=1"])
                .env(CHILD, "")
                // The leak checker opens files when the child ends.
                .env("ASAN_OPTIONS", "detect_leaks=0")
                .output()
                .unwrap();
            assert!(output.status.success(), "{output:?}");
            return;
        }
        let inbox = Inbox::new().unwrap();
        let limit = libc::rlimit {
            rlim_cur: 0,
            rlim_max: 0,
        };
        assert_eq!(
            // SAFETY: reads one `rlimit`.
            unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) },
            0
        );
        let opened = LaneWriter::open(&inbox.address());
        assert!(
            matches!(
                opened,
                Err(Error::System {
                    errno: libc::EMFILE,
                    ..
                })
            ),
            "{opened:?}"
        );
        assert!(matches!(
            start_of(1),
            Err(Error::System {
                errno: libc::EMFILE,
                ..
            })
        ));
        let made = Inbox::new();
        assert!(
            matches!(
                made,
                Err(Error::System {
                    errno: libc::EMFILE,
                    ..
                })
            ),
            "{made:?}"
        );
    }

    #[test]
    fn the_lane_of_a_dead_process_is_taken_over_unless_it_is_being_freed() {
        // No process has this number.
        const DEAD: u64 = (u32::MAX - 1) as u64;
        let inbox = Inbox::new().unwrap();
        let lanes: Vec<_> = (0..LANES)
            .map(|_| LaneWriter::open(&inbox.address()).unwrap())
            .collect();
        assert!(send(&lanes[7], 5));
        let owner = &inbox.mapping.lane(7).owner;
        owner.store(DEAD | SWEEPING, Ordering::Release);
        assert!(LaneWriter::open(&inbox.address()).is_err());
        for mark in [0, CLAIMING, CLOSED] {
            owner.store(DEAD | mark, Ordering::Release);
            let lane = LaneWriter::open(&inbox.address()).unwrap();
            assert_eq!(lane.lane, 7);
            assert!(send(&lane, 6));
            // What the dead one had published arrives before.
            assert_eq!(receive(&inbox, 7), Some(5));
            assert_eq!(receive(&inbox, 7), Some(6));
            assert!(send(&lane, 5));
        }
        // A process of the same number that started later is another one.
        let owner = &inbox.mapping.lane(9);
        owner.owner_started.fetch_add(1, Ordering::AcqRel);
        assert_eq!(LaneWriter::open(&inbox.address()).unwrap().lane, 9);
    }

    #[test]
    fn an_inbox_is_owned_while_its_process_has_it() {
        let inbox = Inbox::new().unwrap();
        let address = inbox.address();
        let file = std::fs::File::open(format!("/proc/self/fd/{}", address.fd)).unwrap();
        let mut child = std::process::Command::new("sleep")
            .arg("60")
            .stdin(file)
            .spawn()
            .unwrap();
        // An emulator may return from the spawn before the child has its descriptors.
        while lane::is_inbox(child.id(), 0) != Some(true) {
            std::thread::yield_now();
        }
        let of_child = InboxAddress {
            pid: child.id(),
            fd: 0,
            ..address
        };
        let lanes = [address, of_child].map(|address| LaneWriter::open(&address).unwrap());
        let owned = || [0, 1].map(|lane: usize| lanes[lane].is_owned());
        let alive = owned();
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!((alive, owned()), ([true, true], [true, false]));
        // The number is free now, or that of another file.
        drop(inbox);
        assert_eq!(owned(), [false, false]);
    }

    #[test]
    fn a_lane_that_is_being_claimed_is_not_swept_while_its_process_lives() {
        let inbox = Inbox::new().unwrap();
        let lane = LaneWriter::open(&inbox.address()).unwrap();
        let head = inbox.mapping.lane(0);
        // The parent: alive, and not this process.
        let claiming = u64::from(std::os::unix::process::parent_id()) | CLAIMING;
        head.owner.store(claiming, Ordering::Release);
        inbox.sweep();
        assert_eq!(head.owner.load(Ordering::Acquire), claiming);
        assert_eq!(inbox.claimed(), 1);
        drop(lane);
    }

    #[test]
    fn garbage_in_a_slot_is_dropped() {
        let inbox = Inbox::new().unwrap();
        let lane = LaneWriter::open(&inbox.address()).unwrap();
        assert!(send(&lane, 1));
        // SAFETY: the slot of the packet just written.
        unsafe { *inbox.mapping.slot(0, 0) = 0xff };
        let Arrival::Garbage(Some(count)) = inbox.receive(0, 0) else {
            panic!("bytes that are no packet");
        };
        inbox.give_back(0, count);
        assert!(matches!(inbox.receive(0, 0), Arrival::Empty));
        assert!(send(&lane, 2));
        assert_eq!(receive(&inbox, 0), Some(2));
    }
}
