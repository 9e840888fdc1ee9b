//! Which memory can be registered, and the reasons of refusals. Every mapping here is made for the test.
#![cfg(feature = "softcx")]
#![allow(unsafe_code)] // maps memory, and registers it

mod rig;
mod waived;

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd};
use std::path::PathBuf;
use std::ptr::NonNull;
use std::time::Duration;

use doorbell::{
    Access, DeviceMemory, EndpointConfig, Error, ProtectionDomain, QueueKind, Region, RegionKind,
    RegistrationReport, RemoteSlice, StateKind, Work,
};
use rig::{Limit, Pair, SOON, device};
use waived::waived;

const PAGE: usize = 4096;
const HUGE: usize = 2 << 20;

/// A mapping, unmapped at the end.
struct Map {
    at: NonNull<u8>,
    len: usize,
}

impl Map {
    fn try_new(len: usize, rights: i32, flags: i32, file: Option<&File>) -> io::Result<Map> {
        let fd = file.map_or(-1, AsRawFd::as_raw_fd);
        // SAFETY: a new mapping, wherever there is room.
        let at = unsafe { libc::mmap(std::ptr::null_mut(), len, rights, flags, fd, 0) };
        if at == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let at = NonNull::new(at.cast()).expect("never at 0");
        Ok(Map { at, len })
    }

    fn new(len: usize, rights: i32, flags: i32, file: Option<&File>) -> Map {
        Map::try_new(len, rights, flags, file).expect("mmap")
    }

    fn register(&self, domain: &ProtectionDomain, access: Access) -> Result<Region, Error> {
        // SAFETY: the mapping outlives the region in each test; what may not be read is refused, which is the point.
        unsafe { Region::register(domain, self.at, self.len as u64, access) }
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        // SAFETY: mapped by `try_new`.
        unsafe { libc::munmap(self.at.as_ptr().cast(), self.len) };
    }
}

const RW: i32 = libc::PROT_READ | libc::PROT_WRITE;
const ANONYMOUS: i32 = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;

fn memfd(len: usize) -> File {
    // SAFETY: the name ends with a zero; the descriptor is nobody else's.
    let file = unsafe {
        let fd = libc::memfd_create(c"doorbell-test".as_ptr(), libc::MFD_CLOEXEC);
        assert!(fd >= 0, "{}", io::Error::last_os_error());
        File::from_raw_fd(fd)
    };
    file.set_len(len as u64).unwrap();
    file
}

/// A file of the file system of the build, removed at the end.
struct Scratch(PathBuf, File);

impl Scratch {
    fn new(name: &str, len: usize) -> Scratch {
        let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR"))
            .join(format!("{name}-{}", std::process::id()));
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(true)
            .open(&path)
            .unwrap();
        file.set_len(len as u64).unwrap();
        Scratch(path, file)
    }

    fn is_of_memory(&self) -> bool {
        // SAFETY: an open descriptor, and room for the result.
        let kind = unsafe {
            let mut found: libc::statfs = std::mem::zeroed();
            assert_eq!(libc::fstatfs(self.1.as_raw_fd(), &mut found), 0);
            found.f_type
        };
        kind == libc::TMPFS_MAGIC || kind == 0x8584_58f6
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        fs::remove_file(&self.0).ok();
    }
}

#[track_caller]
fn refused(result: Result<Region, Error>, map: &Map, parts: &[&str]) {
    let error = result.expect_err("refused");
    let Error::State {
        kind: StateKind::Memory,
        operation: "registration",
        reason,
    } = error
    else {
        panic!("{error:?}")
    };
    let range = format!("{} bytes at {:#x}", map.len, map.at.as_ptr() as usize);
    for part in parts.iter().copied().chain([&*range]) {
        assert!(reason.contains(part), "{part}: {reason}");
    }
}

/// Sends from one memory into the other, and compares every byte.
fn carries(pair: &mut Pair, from: &Region, to: &Region) {
    let len = from.len_bytes().min(to.len_bytes());
    let bytes: Vec<u8> = (0..len).map(|i| (i * 7 + i / 251) as u8).collect();
    from.write(0, &bytes).unwrap();
    let slices = [from.slice(0, len).unwrap()];
    let remote = to.remote();
    let work = Work::write(&slices, RemoteSlice::at(remote.addr, remote.rkey));
    pair.a.post_send(&work).unwrap();
    pair.a.wait_cq(QueueKind::Send, SOON).unwrap();
    let mut got = vec![0; len as usize];
    to.read(0, &mut got).unwrap();
    assert!(got == bytes, "{from:?} to {to:?}");
}

#[test]
fn anonymous_memfd_and_tmpfs_memory_carries_transfers() {
    let _limit = Limit::new("memory", Duration::from_secs(100));
    let mut pair = Pair::new(&device(), &EndpointConfig::default());
    let len = 3 * PAGE;
    let file = memfd(len);
    let shm = PathBuf::from(format!("/dev/shm/doorbell-{}", std::process::id()));
    let tmpfs = OpenOptions::new()
        .read(true)
        .write(true)
        .create_new(true)
        .open(&shm)
        .ok();
    if let Some(tmpfs) = &tmpfs {
        tmpfs.set_len(len as u64).unwrap();
        fs::remove_file(&shm).unwrap();
    }
    let maps = [
        Map::new(len, RW, ANONYMOUS, None),
        Map::new(len, RW, libc::MAP_SHARED | libc::MAP_ANONYMOUS, None),
        Map::new(len, RW, libc::MAP_SHARED, Some(&file)),
        Map::new(len, RW, libc::MAP_PRIVATE, Some(&file)),
        match &tmpfs {
            Some(tmpfs) => Map::new(len, RW, libc::MAP_SHARED, Some(tmpfs)),
            None => Map::new(len, RW, ANONYMOUS, None),
        },
    ];
    for map in &maps {
        let region = map.register(&pair.domain, Access::ALL).unwrap();
        let own = pair.region(len as u64);
        carries(&mut pair, &region, &own);
        carries(&mut pair, &own, &region);
    }
}

#[test]
fn shared_file_mapping_is_refused_by_name() {
    let domain = device().protection_domain();
    let file = Scratch::new("shared", PAGE);
    if file.is_of_memory() {
        return waived(
            "shared_file_mapping_is_refused_by_name",
            "the build's folder lies in memory",
        );
    }
    let shared = Map::new(PAGE, RW, libc::MAP_SHARED, Some(&file.1));
    let name = file.0.file_name().unwrap().to_str().unwrap();
    refused(
        shared.register(&domain, Access::ALL),
        &shared,
        &[name, "writeback"],
    );
    refused(
        shared.register(&domain, Access::LOCAL_READ),
        &shared,
        &[name],
    );
    // A copy of the file is the process's own.
    let private = Map::new(PAGE, RW, libc::MAP_PRIVATE, Some(&file.1));
    assert!(private.register(&domain, Access::ALL).is_ok());
    let constant = Map::new(PAGE, libc::PROT_READ, libc::MAP_PRIVATE, Some(&file.1));
    assert!(constant.register(&domain, Access::LOCAL_READ).is_ok());
    refused(
        constant.register(&domain, Access::LOCAL_WRITE),
        &constant,
        &["read-only", name],
    );
}

#[test]
fn unmapped_or_inaccessible_memory_is_refused() {
    let domain = device().protection_domain();
    let closed = Map::new(PAGE, libc::PROT_NONE, ANONYMOUS, None);
    refused(
        closed.register(&domain, Access::LOCAL_READ),
        &closed,
        &["no access"],
    );

    // A hole in the middle.
    let holed = Map::new(3 * PAGE, RW, ANONYMOUS, None);
    let hole = holed.at.as_ptr().wrapping_add(PAGE);
    // SAFETY: a page of the mapping that nobody uses.
    unsafe { libc::munmap(hole.cast(), PAGE) };
    let at = format!("nothing is mapped at {:#x}", hole as usize);
    refused(holed.register(&domain, Access::ALL), &holed, &[&at]);

    // A page without access rights in the middle.
    let barred = Map::new(3 * PAGE, RW, ANONYMOUS, None);
    // SAFETY: as above.
    unsafe {
        libc::mprotect(
            barred.at.as_ptr().wrapping_add(PAGE).cast(),
            PAGE,
            libc::PROT_NONE,
        )
    };
    refused(
        barred.register(&domain, Access::ALL),
        &barred,
        &["no access"],
    );

    let constant = Map::new(PAGE, libc::PROT_READ, ANONYMOUS, None);
    for access in [
        Access::LOCAL_WRITE,
        Access::REMOTE_WRITE,
        Access::REMOTE_ATOMIC,
    ] {
        refused(
            constant.register(&domain, access),
            &constant,
            &["read-only"],
        );
    }
    assert!(constant.register(&domain, Access::REMOTE_READ).is_ok());

    let short = memfd(PAGE + 1);
    let long = Map::new(3 * PAGE, RW, libc::MAP_SHARED, Some(&short));
    refused(
        long.register(&domain, Access::ALL),
        &long,
        &["beyond the end of its file"],
    );
    let enough = Map::new(2 * PAGE, RW, libc::MAP_SHARED, Some(&short));
    assert!(enough.register(&domain, Access::ALL).is_ok());
}

/// This test has no memory of another device. It checks that each way reports why it cannot be used.
#[test]
fn device_memory_refusal_reports_a_reason_for_every_way() {
    let device = device();
    let domain = device.protection_domain();
    // A descriptor that is not a dmabuf.
    let file = memfd(PAGE);
    // An unmapped address, in place of an address of a GPU.
    let gone = Map::new(PAGE, RW, ANONYMOUS, None);
    let (addr, len_bytes) = (gone.at.as_ptr() as u64, PAGE as u64);
    drop(gone);
    for exported in [false, true] {
        let memory = DeviceMemory {
            addr,
            len_bytes,
            dmabuf: exported.then(|| (file.as_fd(), 0)),
        };
        let RegistrationReport {
            region, refused, ..
        } = Region::register_with_report(&domain, &memory, Access::ALL).unwrap();
        assert!(region.is_none());
        let [(RegionKind::Dmabuf, dmabuf), (RegionKind::Peermem, peermem)] = &refused[..] else {
            panic!("{refused:?}")
        };
        let (dmabuf, peermem) = (dmabuf.to_string(), peermem.to_string());
        let (expected, peers) = match device.name() {
            "softcx" => ("not a dmabuf", "softcx accesses only memory"),
            _ => ("ibv_reg_dmabuf_mr", "nvidia_peermem"),
        };
        let expected = if exported { expected } else { "not exported" };
        assert!(dmabuf.contains(expected), "{dmabuf}");
        assert!(peermem.contains(peers), "{peermem}");
    }
    waived(
        "device_memory_refusal_reports_a_reason_for_every_way",
        "no device here has memory that a NIC could reach; the refusals were seen",
    );
    for (addr, len_bytes, name) in [
        (0, 1, "addr"),
        (u64::MAX, 1, "addr"),
        (1, 0, "len_bytes"),
        (1, (1 << 40) + 1, "len_bytes"),
    ] {
        let memory = DeviceMemory {
            addr,
            len_bytes,
            dmabuf: None,
        };
        let error = Region::register_with_report(&domain, &memory, Access::ALL).unwrap_err();
        assert!(
            matches!(error, Error::Range { argument, .. } if argument == name),
            "{error}"
        );
    }
}

/// Huge pages added to those that the machine has set aside, if this process may. The pool is the machine's: without the lock two processes of
/// these tests would take back each other's pages.
struct Reserved {
    before: String,
    _lock: File,
}

const POOL: &str = "/proc/sys/vm/nr_hugepages";

impl Reserved {
    fn new(pages: u64) -> Result<Reserved, String> {
        let wrong = |error| format!("{POOL}: {error}");
        let lock = File::open(POOL).map_err(wrong)?;
        // SAFETY: an open file. The lock goes with it.
        if unsafe { libc::flock(lock.as_raw_fd(), libc::LOCK_EX) } != 0 {
            return Err(wrong(io::Error::last_os_error()));
        }
        let before = fs::read_to_string(POOL).map_err(wrong)?;
        let had: u64 = before
            .trim()
            .parse()
            .map_err(|_| format!("{POOL} says {before}"))?;
        fs::write(POOL, (had + pages).to_string()).map_err(wrong)?;
        let reserved = Reserved {
            before,
            _lock: lock,
        };
        let now = fs::read_to_string(POOL).unwrap_or_default();
        if now.trim().parse().is_ok_and(|now: u64| now >= had + pages) {
            Ok(reserved)
        } else {
            Err(format!(
                "the kernel reserved {} of {} huge pages",
                now.trim(),
                had + pages
            ))
        }
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        fs::write(POOL, &self.before).ok();
    }
}

#[test]
fn huge_pages_carry_transfers() {
    let _limit = Limit::new("huge pages", Duration::from_secs(100));
    let mut pair = Pair::new(&device(), &EndpointConfig::default());
    // Transparent huge pages, if the kernel provides them: it may ignore the advice, and the memory works either way.
    let plain = Map::new(2 * HUGE, RW, ANONYMOUS, None);
    // SAFETY: advice about a mapping of ours.
    unsafe { libc::madvise(plain.at.as_ptr().cast(), plain.len, libc::MADV_HUGEPAGE) };
    let region = plain.register(&pair.domain, Access::ALL).unwrap();
    let own = pair.region(2 * HUGE as u64);
    carries(&mut pair, &region, &own);
    carries(&mut pair, &own, &region);

    let name = "huge_pages_carry_transfers";
    let reserved = match Reserved::new(4) {
        Ok(reserved) => reserved,
        Err(reason) => return waived(name, &reason),
    };
    for kind in [libc::MAP_PRIVATE, libc::MAP_SHARED] {
        let flags = kind | libc::MAP_ANONYMOUS | libc::MAP_HUGETLB | libc::MAP_HUGE_2MB;
        let map = match Map::try_new(2 * HUGE, RW, flags, None) {
            Ok(map) => map,
            Err(error) => return waived(name, &format!("mmap of huge pages: {error}")),
        };
        let region = map.register(&pair.domain, Access::ALL).unwrap();
        carries(&mut pair, &region, &own);
        carries(&mut pair, &own, &region);
    }
    drop(reserved);
}
