//! The device's node as programs see it: its path, its attributes, and the paths of its sysfs files.
#![allow(unsafe_code)] // attributes as the bytes that a system call returns

use std::mem::zeroed;
use std::path::{Path, PathBuf};

use super::sysfs::{DEVICE_NODE, RDEV};

const MODE: u32 = libc::S_IFCHR | 0o666;

/// What a path that a program gave stands for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Place {
    /// The device.
    Node,
    /// A file of the private sysfs tree: where it lies.
    Sysfs(PathBuf),
    /// Nothing of ours.
    Elsewhere,
}

/// Where an absolute path without odd components leads; `tree` is the private sysfs tree.
pub(super) fn place(path: &Path, tree: &Path) -> Place {
    if path == Path::new(DEVICE_NODE) {
        return Place::Node;
    }
    let below = path.strip_prefix("/sys").ok();
    match below.filter(|below| {
        below.starts_with("class/infiniband") || below.starts_with("class/infiniband_verbs")
    }) {
        Some(below) => Place::Sysfs(tree.join(below)),
        None => Place::Elsewhere,
    }
}

/// Turns the attributes of any file into those of the node.
pub(super) fn disguise(stat: &mut libc::stat) {
    stat.st_mode = MODE;
    stat.st_rdev = libc::makedev(RDEV.0, RDEV.1);
    stat.st_size = 0;
    stat.st_blocks = 0;
    stat.st_nlink = 1;
    stat.st_blksize = 4096;
}

/// The attributes of the node by its path.
pub(super) fn stat() -> libc::stat {
    // SAFETY: plain numbers, for which zeros are fine.
    let mut stat: libc::stat = unsafe { zeroed() };
    stat.st_ino = 1;
    disguise(&mut stat);
    stat
}

/// The same attributes in the form of `statx`.
pub(super) fn statx(stat: &libc::stat) -> libc::statx {
    // SAFETY: as above.
    let mut statx: libc::statx = unsafe { zeroed() };
    statx.stx_mask = libc::STATX_BASIC_STATS;
    statx.stx_blksize = stat.st_blksize as u32;
    statx.stx_nlink = stat.st_nlink as u32;
    statx.stx_uid = stat.st_uid;
    statx.stx_gid = stat.st_gid;
    statx.stx_mode = stat.st_mode as u16;
    statx.stx_ino = stat.st_ino;
    statx.stx_size = stat.st_size as u64;
    statx.stx_blocks = stat.st_blocks as u64;
    statx.stx_rdev_major = libc::major(stat.st_rdev);
    statx.stx_rdev_minor = libc::minor(stat.st_rdev);
    statx.stx_dev_major = libc::major(stat.st_dev);
    statx.stx_dev_minor = libc::minor(stat.st_dev);
    let time = |tv_sec, tv_nsec| {
        // SAFETY: as above.
        let mut time: libc::statx_timestamp = unsafe { zeroed() };
        time.tv_sec = tv_sec;
        time.tv_nsec = tv_nsec as u32;
        time
    };
    statx.stx_atime = time(stat.st_atime, stat.st_atime_nsec);
    statx.stx_mtime = time(stat.st_mtime, stat.st_mtime_nsec);
    statx.stx_ctime = time(stat.st_ctime, stat.st_ctime_nsec);
    statx
}

/// The bytes of a plain structure of the kernel's.
///
/// # Safety
/// `T` has no padding that was never written: it began as zeros.
pub(super) unsafe fn bytes<T: Copy>(of: &T) -> &[u8] {
    // SAFETY: initialised throughout, by the caller's word, for as long as the reference is.
    unsafe { std::slice::from_raw_parts(std::ptr::from_ref(of).cast(), size_of::<T>()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_of_the_device_are_told_from_others() {
        let tree = Path::new("/dev/shm/tree");
        let place = |path: &str| place(Path::new(path), tree);
        assert_eq!(place("/dev/infiniband/uverbs0"), Place::Node);
        let verbs = Place::Sysfs("/dev/shm/tree/class/infiniband_verbs".into());
        assert_eq!(place("/sys/class/infiniband_verbs"), verbs);
        let lid = "class/infiniband/mlx5_0/ports/1/lid";
        let found = Place::Sysfs(tree.join(lid));
        assert_eq!(place(&format!("/sys/{lid}")), found);
        for other in [
            "/dev/infiniband/uverbs1",
            "/dev/infiniband/uverbs01",
            "/sys/class/infinibandx",
            "/sys/class/infiniband_mad",
            "/sys",
            "/etc/passwd",
            "",
        ] {
            assert_eq!(place(other), Place::Elsewhere, "{other}");
        }
    }

    #[test]
    fn the_node_is_a_character_device_with_its_number() {
        let stat = stat();
        assert_eq!(stat.st_mode & libc::S_IFMT, libc::S_IFCHR);
        assert_eq!((libc::major(stat.st_rdev), libc::minor(stat.st_rdev)), RDEV);
        let statx = statx(&stat);
        assert_eq!((statx.stx_rdev_major, statx.stx_rdev_minor), RDEV);
        assert_eq!(u32::from(statx.stx_mode), stat.st_mode);
    }
}
