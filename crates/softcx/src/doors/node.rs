//! The device's node as programs see it: its path, its attributes, what may be done with it, and the paths of its sysfs files.
#![allow(unsafe_code)] // attributes as the bytes that a system call returns

use std::ffi::{CString, OsString};
use std::mem::zeroed;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use super::pci_function::{ADDRESS, ALL};
use super::sysfs::{self, CM_NODE_IN_TREE, CM_RDEV, FOLDERS, NODE_IN_TREE, RDEV};
use crate::device::client::Errno;

const MODE: u32 = libc::S_IFCHR | 0o666;

/// A node below `/dev/infiniband`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceNode {
    /// `uverbs0`, the device.
    Verbs,
    /// `rdma_cm`, the connection manager.
    ConnectionManager,
}

impl DeviceNode {
    fn number(self) -> (u32, u32) {
        match self {
            DeviceNode::Verbs => RDEV,
            DeviceNode::ConnectionManager => CM_RDEV,
        }
    }
}

/// What a path that a program gave stands for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum PathTarget {
    /// A node.
    Node(DeviceNode),
    /// A file or directory of the private tree: where it lies.
    File(PathBuf),
    /// A path that is not part of the device.
    Elsewhere,
}

/// Whether a path as a program wrote it can lead to the device at all. Nearly none can, and the others need not be made absolute.
pub(super) fn may_lead_here(path: &Path) -> bool {
    let has = |name: &[u8]| {
        let bytes = path.as_os_str().as_bytes();
        bytes.windows(name.len()).any(|part| part == name)
    };
    has(b"infiniband") || has(b"uverbs0") || has(b"rdma_cm") || has(b"pci")
}

/// The true name of a folder below `/sys` in which links of the private tree occur. Others stay as they are.
pub(super) fn without_links(path: &Path) -> PathBuf {
    let mut path = path.to_owned();
    let links = sysfs::links();
    // A link's target may lie behind another link, and none leads back to itself.
    while let Some(next) = links.iter().find_map(|(link, target)| {
        let rest = path.strip_prefix("/sys").ok()?.strip_prefix(link).ok()?;
        Some(Path::new("/sys").join(target).join(rest))
    }) {
        path = next;
    }
    path
}

/// The name under which programs know a file of the private tree; `path` is its true name.
pub(super) fn public_name(path: &Path, tree: &Path) -> Option<PathBuf> {
    let below = path.strip_prefix(tree).ok()?;
    let root = if below.starts_with("dev") {
        "/"
    } else {
        "/sys"
    };
    Some(Path::new(root).join(below))
}

/// The target of an absolute path without `.` and `..`; `tree` is the private tree. A path inside the tree has the same target as the
/// path that it stands for.
pub(super) fn place(path: &Path, tree: &Path) -> PathTarget {
    let below = |root: &Path| path.strip_prefix(root).ok();
    let sysfs = [below(Path::new("/sys")), below(tree)];
    for below in sysfs.into_iter().flatten() {
        // The functions of the machine are all listed; only one of them is ours.
        if below.strip_prefix(ALL).is_ok_and(is_other_function) {
            return PathTarget::Elsewhere;
        }
        if FOLDERS.iter().any(|folder| below.starts_with(folder)) {
            return PathTarget::File(tree.join(below));
        }
    }
    let devices = [below(Path::new("/")), below(tree)];
    for below in devices.into_iter().flatten() {
        if below == Path::new(NODE_IN_TREE) {
            return PathTarget::Node(DeviceNode::Verbs);
        }
        if below == Path::new(CM_NODE_IN_TREE) {
            return PathTarget::Node(DeviceNode::ConnectionManager);
        }
        if Path::new(NODE_IN_TREE)
            .parent()
            .is_some_and(|folder| below.starts_with(folder))
        {
            return PathTarget::File(tree.join(below));
        }
    }
    PathTarget::Elsewhere
}

fn is_other_function(below: &Path) -> bool {
    below.iter().next().is_some_and(|name| name != ADDRESS)
}

/// Whether the node may be opened so.
pub(super) fn check_open(flags: i32) -> Result<(), Errno> {
    if flags & libc::O_DIRECTORY != 0 {
        return Err(libc::ENOTDIR);
    }
    if flags & (libc::O_CREAT | libc::O_EXCL) == libc::O_CREAT | libc::O_EXCL {
        return Err(libc::EEXIST);
    }
    Ok(())
}

/// Whether the node may be used so (`access`).
pub(super) fn check_access(mode: i32) -> Result<(), Errno> {
    permit(mode, libc::R_OK | libc::W_OK)
}

/// The flags to open a file of the tree with: nothing in it can be written or made. A descriptor that stands for a path alone
/// (`O_PATH`) cannot be handed over to another process, so it may be read.
pub(super) fn flags_for_file(file: &Path, flags: i32) -> Result<i32, Errno> {
    let writes = flags & libc::O_ACCMODE != libc::O_RDONLY || flags & libc::O_TRUNC != 0;
    let creates = flags & libc::O_CREAT != 0;
    let found = if flags & libc::O_NOFOLLOW != 0 {
        std::fs::symlink_metadata(file)
    } else {
        std::fs::metadata(file)
    };
    match found {
        Ok(_) if creates && flags & libc::O_EXCL != 0 => Err(libc::EEXIST),
        Ok(found) if (writes || creates) && found.is_dir() => Err(libc::EISDIR),
        Err(_) if creates => Err(libc::EACCES),
        Ok(_) if writes && flags & libc::O_PATH == 0 => Err(libc::EACCES),
        _ => {
            Ok(flags & (libc::O_DIRECTORY | libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_CLOEXEC))
        }
    }
}

/// Whether a file of the tree may be used so.
pub(super) fn check_file_access(file: &Path, mode: i32) -> Result<(), Errno> {
    let found = std::fs::metadata(file).map_err(errno)?;
    let searched = if found.is_dir() { libc::X_OK } else { 0 };
    permit(mode, libc::R_OK | searched)
}

/// The text of a link of the tree.
pub(super) fn read_link(file: &Path) -> Result<PathBuf, Errno> {
    let path = CString::new(file.as_os_str().as_bytes()).map_err(|_| libc::EINVAL)?;
    let mut text = vec![0; libc::PATH_MAX as usize];
    // SAFETY: a terminated path, and room for a text of that length. By number: a library that is preloaded puts itself before the function,
    // and calls this one.
    let len = unsafe {
        libc::syscall(
            libc::SYS_readlinkat,
            libc::AT_FDCWD,
            path.as_ptr(),
            text.as_mut_ptr(),
            text.len(),
        )
    };
    match usize::try_from(len) {
        Ok(len) => {
            text.truncate(len);
            Ok(OsString::from_vec(text).into())
        }
        Err(_) => Err(errno(std::io::Error::last_os_error())),
    }
}

/// The result of a query for extended attributes of a file of the tree.
pub(super) fn no_extended_attributes(file: &Path) -> Errno {
    std::fs::symlink_metadata(file).map_or_else(errno, |_| libc::EOPNOTSUPP)
}

fn permit(mode: i32, permitted: i32) -> Result<(), Errno> {
    match mode {
        _ if mode & !(libc::R_OK | libc::W_OK | libc::X_OK) != 0 => Err(libc::EINVAL),
        _ if mode & !permitted != 0 => Err(libc::EACCES),
        _ => Ok(()),
    }
}

fn errno(error: std::io::Error) -> Errno {
    error.raw_os_error().unwrap_or(libc::EIO)
}

/// Turns the attributes of any file into those of a node.
pub(super) fn rewrite_stat(stat: &mut libc::stat, node: DeviceNode) {
    stat.st_mode = MODE;
    let (major, minor) = node.number();
    stat.st_rdev = libc::makedev(major, minor);
    stat.st_size = 0;
    stat.st_blocks = 0;
    stat.st_nlink = 1;
    stat.st_blksize = 4096;
}

/// The attributes of a node by its path.
pub(super) fn stat(node: DeviceNode) -> libc::stat {
    // SAFETY: plain numbers, for which zeros are fine.
    let mut stat: libc::stat = unsafe { zeroed() };
    stat.st_ino = 1 + u64::from(node == DeviceNode::ConnectionManager);
    rewrite_stat(&mut stat, node);
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
    fn device_paths_are_distinguished_from_others() {
        let tree = Path::new("/dev/shm/tree");
        let place = |path: &str| place(Path::new(path), tree);
        let verbs_node = PathTarget::Node(DeviceNode::Verbs);
        assert_eq!(place("/dev/infiniband/uverbs0"), verbs_node);
        assert_eq!(
            place("/dev/infiniband/rdma_cm"),
            PathTarget::Node(DeviceNode::ConnectionManager)
        );
        let version = "class/misc/rdma_cm/abi_version";
        assert_eq!(
            place(&format!("/sys/{version}")),
            PathTarget::File(tree.join(version))
        );
        assert_eq!(
            place("/dev/shm/tree/dev/infiniband/uverbs0"),
            verbs_node,
            "by a descriptor of the directory"
        );
        let verbs = PathTarget::File("/dev/shm/tree/class/infiniband_verbs".into());
        assert_eq!(place("/sys/class/infiniband_verbs"), verbs);
        for inside in [
            "class/infiniband/mlx5_0/ports/1/lid",
            "class/infiniband",
            "bus/pci/devices",
            "bus/pci/devices/5c0f:00:00.0/vendor",
            "devices/pci5c0f:00/5c0f:00:00.0/config",
        ] {
            let found = PathTarget::File(tree.join(inside));
            assert_eq!(place(&format!("/sys/{inside}")), found);
            assert_eq!(place(&format!("/dev/shm/tree/{inside}")), found);
        }
        for inside in [
            "dev/infiniband",
            "dev/infiniband/uverbs1",
            "dev/infiniband/uverbs0/x",
            "dev/infiniband/uverbs01",
        ] {
            assert_eq!(
                place(&format!("/{inside}")),
                PathTarget::File(tree.join(inside))
            );
        }
        for other in [
            "/sys/bus/pci/devices/0000:00:00.0",
            "/dev/shm/tree/bus/pci/devices/0000:00:00.0/vendor",
            "/sys/bus/pci/drivers",
            "/sys/devices/pci0000:00/0000:00:00.0",
            "/sys/class/infinibandx",
            "/sys/class/infiniband_mad",
            "/sys/dev/infiniband",
            "/class/infiniband",
            "/dev/infiniband0",
            "/dev/shm/tree",
            "/dev/shm/tree/owner",
            "/sys",
            "/etc/passwd",
            "",
        ] {
            assert_eq!(place(other), PathTarget::Elsewhere, "{other}");
        }
        let function = "/sys/devices/pci5c0f:00/5c0f:00:00.0";
        for (link, name) in [
            ("/sys/class/infiniband/mlx5_0/device", function.to_owned()),
            (
                "/sys/class/infiniband_verbs/uverbs0/device/infiniband/mlx5_0/device/irq",
                format!("{function}/irq"),
            ),
            ("/sys/class/net", "/sys/class/net".into()),
        ] {
            assert_eq!(without_links(Path::new(link)), Path::new(&name));
        }
        let name = public_name(&tree.join("bus/pci"), tree);
        assert_eq!(name.unwrap(), Path::new("/sys/bus/pci"));
        let name = public_name(&tree.join(NODE_IN_TREE), tree);
        assert_eq!(name.unwrap(), Path::new("/dev/infiniband/uverbs0"));
        assert_eq!(public_name(Path::new("/sys"), tree), None);
        let may = |path: &str| may_lead_here(Path::new(path));
        assert!(may("infiniband") && may("./uverbs0") && may("/dev/infiniband/"));
        assert!(!may("/etc/ld.so.cache") && !may("") && !may("uverbs"));
    }

    #[test]
    fn sysfs_files_cannot_be_created_or_written() {
        let folder = Path::new("/proc");
        let (file, none) = (folder.join("version"), folder.join("nothing"));
        let flags = |file: &Path, flags| flags_for_file(file, flags);
        let (read, write, create) = (libc::O_RDONLY, libc::O_RDWR, libc::O_CREAT);
        assert_eq!(flags(&file, read | libc::O_CLOEXEC), Ok(libc::O_CLOEXEC));
        assert_eq!(flags(&file, read | create), Ok(0));
        assert_eq!(flags(&file, libc::O_PATH), Ok(0));
        assert_eq!(flags(&none, read), Ok(0));
        assert_eq!(flags(&file, write), Err(libc::EACCES));
        assert_eq!(flags(&file, read | libc::O_TRUNC), Err(libc::EACCES));
        assert_eq!(flags(&none, create), Err(libc::EACCES));
        assert_eq!(flags(&file, create | libc::O_EXCL), Err(libc::EEXIST));
        assert_eq!(flags(folder, libc::O_WRONLY), Err(libc::EISDIR));
        let access = |mode| check_file_access(&file, mode);
        assert_eq!((access(0), access(libc::R_OK)), (Ok(()), Ok(())));
        assert_eq!(access(libc::R_OK | libc::W_OK), Err(libc::EACCES));
        assert_eq!(access(libc::X_OK), Err(libc::EACCES));
        assert_eq!(access(8), Err(libc::EINVAL));
        assert_eq!(check_file_access(folder, libc::X_OK), Ok(()));
        assert_eq!(check_file_access(&none, 0), Err(libc::ENOENT));
        let (file, none) = (read_link(&file), read_link(&none));
        assert_eq!((file, none), (Err(libc::EINVAL), Err(libc::ENOENT)));
        assert_eq!(check_access(libc::R_OK | libc::W_OK), Ok(()));
        assert_eq!(check_access(libc::X_OK), Err(libc::EACCES));
    }

    #[test]
    fn the_node_is_a_character_device_with_its_number() {
        let stat = super::stat(DeviceNode::Verbs);
        assert_eq!(stat.st_mode & libc::S_IFMT, libc::S_IFCHR);
        assert_eq!((libc::major(stat.st_rdev), libc::minor(stat.st_rdev)), RDEV);
        let statx = statx(&stat);
        assert_eq!((statx.stx_rdev_major, statx.stx_rdev_minor), RDEV);
        assert_eq!(u32::from(statx.stx_mode), stat.st_mode);
        let manager = super::stat(DeviceNode::ConnectionManager);
        assert_eq!(libc::major(manager.st_rdev), CM_RDEV.0);
    }
}
