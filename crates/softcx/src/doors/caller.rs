//! The thread that made a trapped call: its paths, descriptors and memory, as the kernel shows them.
//!
//! All functions identify the thread by its number. The kernel may give the number to another thread after the first one has ended. So callers
//! check [`CallListener::is_waiting`](super::listener::CallListener::is_waiting) before they act on a result.
#![allow(unsafe_code)] // stat of a descriptor of another process

use std::ffi::{CString, OsString};
use std::mem::zeroed;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Component, Path, PathBuf};

use super::node::without_links;
use crate::device::space::{AccessFault, Space};

const PAGE: u64 = 4096;
const PATH_MAX: usize = libc::PATH_MAX as usize;

/// A file by its device and inode number.
pub(super) type Inode = (u64, u64);

/// A thread that waits in a trapped call.
#[derive(Debug, Clone, Copy)]
pub(super) struct Caller {
    tid: libc::pid_t,
    memory: Space,
}

impl Caller {
    pub(super) fn new(tid: libc::pid_t) -> Caller {
        Caller {
            tid,
            memory: Space::of(tid),
        }
    }

    /// Its memory.
    pub(super) fn space(&self) -> Space {
        self.memory
    }

    /// The flags of one of its descriptors (`O_NONBLOCK` and others).
    pub(super) fn flags(&self, descriptor: i32) -> Option<i32> {
        let info = format!("/proc/{}/fdinfo/{descriptor}", self.tid);
        let info = std::fs::read_to_string(info).ok()?;
        let line = info.lines().find_map(|line| line.strip_prefix("flags:"))?;
        i32::from_str_radix(line.trim(), 8).ok()
    }

    /// The process that the thread is of.
    pub(super) fn process(&self) -> Option<libc::pid_t> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.tid)).ok()?;
        let line = status.lines().find_map(|line| line.strip_prefix("Tgid:"))?;
        line.trim().parse().ok()
    }

    /// Whether it is a thread of that process.
    pub(super) fn is_of(&self, process: libc::pid_t) -> bool {
        self.tid == process || Path::new(&format!("/proc/{process}/task/{}", self.tid)).exists()
    }

    /// The file behind one of its descriptors.
    pub(super) fn inode(&self, descriptor: i32) -> Option<Inode> {
        let stat = self.stat(descriptor)?;
        Some((stat.st_dev, stat.st_ino))
    }

    /// The attributes of the file behind one of its descriptors.
    pub(super) fn stat(&self, descriptor: i32) -> Option<libc::stat> {
        if descriptor < 0 {
            return None;
        }
        let path = CString::new(format!("/proc/{}/fd/{descriptor}", self.tid)).ok()?;
        // SAFETY: plain numbers, for which zeros are fine.
        let mut stat: libc::stat = unsafe { zeroed() };
        // SAFETY: a terminated path, and room for one `stat`.
        let done = unsafe { libc::stat(path.as_ptr(), &raw mut stat) };
        (done == 0).then_some(stat)
    }

    /// Writes to its memory.
    pub(super) fn write(&self, addr: u64, bytes: &[u8]) -> Result<(), AccessFault> {
        self.memory.write(addr, bytes)
    }

    /// Reads from its memory.
    pub(super) fn read(&self, addr: u64, into: &mut [u8]) -> Result<(), AccessFault> {
        self.memory.read(addr, into)
    }

    /// A string that ends with a zero; `None` if it is unreadable or too long for a path.
    pub(super) fn path(&self, addr: u64) -> Option<PathBuf> {
        let mut path = Vec::new();
        let mut chunk = [0; 256];
        while path.len() < PATH_MAX {
            let at = addr.checked_add(path.len() as u64)?;
            // Not across a page's end: the next one need not be mapped.
            let len = (PAGE - at % PAGE).min(chunk.len() as u64) as usize;
            let part = chunk.get_mut(..len)?;
            self.memory.read(at, part).ok()?;
            if let Some(end) = part.iter().position(|&byte| byte == 0) {
                path.extend_from_slice(part.get(..end)?);
                return Some(PathBuf::from(OsString::from_vec(path)));
            }
            path.extend_from_slice(part);
        }
        None
    }

    /// The absolute form of a path that it gave together with a directory's descriptor. By its letters alone: of symbolic links, only those of
    /// the device's sysfs files are followed, where `..` comes behind them.
    pub(super) fn absolute(&self, directory: i32, path: &Path) -> Option<PathBuf> {
        if path.is_absolute() {
            return Some(normal(path));
        }
        let base = if directory == libc::AT_FDCWD {
            format!("/proc/{}/cwd", self.tid)
        } else {
            format!("/proc/{}/fd/{directory}", self.tid)
        };
        let base = std::fs::read_link(base).ok()?;
        // It may have another root, and its absolute paths begin there.
        let root = std::fs::read_link(format!("/proc/{}/root", self.tid)).ok()?;
        let base = match base.strip_prefix(&root) {
            Ok(inside) => Path::new("/").join(inside),
            Err(_) => base,
        };
        // A descriptor that is no directory reads as `socket:[7]` and the like.
        base.is_absolute().then(|| normal(&base.join(path)))
    }
}

/// Without empty, `.` and `..` components, and without a slash at its end.
fn normal(path: &Path) -> PathBuf {
    // The common case costs nothing.
    let bytes = path.as_os_str().as_bytes();
    let is_odd = |pair: &[u8]| pair == b"/." || pair == b"//";
    if !bytes.windows(2).any(is_odd) && !bytes.ends_with(b"/") {
        return path.to_owned();
    }
    let mut normal = PathBuf::from("/");
    for component in path.components() {
        match component {
            Component::Normal(name) => normal.push(name),
            Component::ParentDir => {
                // Behind a link of the device's is the folder in which its target lies.
                normal = without_links(&normal);
                normal.pop();
            }
            Component::RootDir | Component::CurDir | Component::Prefix(_) => {}
        }
    }
    normal
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd;

    fn me() -> Caller {
        // SAFETY: takes nothing and cannot fail.
        Caller::new(unsafe { libc::gettid() })
    }

    #[test]
    fn paths_are_read_up_to_their_zero_and_no_page_further() {
        let pages = crate::device::Pages::new(2 * 4096).unwrap();
        let base = pages.at(0) as u64;
        // SAFETY: the second page, which nothing else uses; it is made accessible again below.
        unsafe { libc::mprotect((base + 4096) as *mut _, 4096, libc::PROT_NONE) };
        let text = b"/dev/infiniband/uverbs0\0";
        let at = base + 4096 - text.len() as u64;
        me().write(at, text).unwrap();
        assert_eq!(me().path(at).unwrap(), Path::new("/dev/infiniband/uverbs0"));
        assert_eq!(
            me().path(at + 1).unwrap(),
            Path::new("dev/infiniband/uverbs0")
        );
        me().write(base + 4095, b"x").unwrap();
        assert_eq!(me().path(at), None, "no zero before the hole");
        assert_eq!(me().path(0), None);
        assert_eq!(me().path(u64::MAX - 3), None);
        // SAFETY: as it was.
        unsafe {
            libc::mprotect(
                (base + 4096) as *mut _,
                4096,
                libc::PROT_READ | libc::PROT_WRITE,
            )
        };
    }

    #[test]
    fn relative_paths_and_odd_ones_are_found() {
        let absolute = |directory, path: &str| me().absolute(directory, Path::new(path));
        let node = PathBuf::from("/dev/infiniband/uverbs0");
        for path in [
            "/dev/infiniband/uverbs0",
            "//dev/./infiniband//uverbs0",
            "/dev/../dev/infiniband/x/../uverbs0",
            "/../dev/infiniband/uverbs0",
            "/dev/infiniband/uverbs0/",
            "/sys/class/infiniband/mlx5_0/device/../../../../dev/infiniband/uverbs0",
        ] {
            assert_eq!(
                absolute(libc::AT_FDCWD, path).as_ref(),
                Some(&node),
                "{path}"
            );
            assert_eq!(absolute(0, path).unwrap().as_os_str(), node.as_os_str());
        }
        let dev = std::fs::File::open("/dev").unwrap();
        assert_eq!(absolute(dev.as_raw_fd(), "infiniband/uverbs0"), Some(node));
        let here = std::env::current_dir().unwrap();
        assert_eq!(absolute(libc::AT_FDCWD, "x"), Some(here.join("x")));
        assert_eq!(absolute(-1, "x"), None);
    }

    #[test]
    fn a_descriptor_has_the_inode_that_its_owner_sees() {
        use std::os::unix::fs::MetadataExt;
        let file = std::fs::File::open("/proc/self/exe").unwrap();
        let seen = file.metadata().unwrap();
        assert_eq!(me().inode(file.as_raw_fd()), Some((seen.dev(), seen.ino())));
        assert_eq!(me().inode(-1), None);
        assert_eq!(me().process(), Some(std::process::id() as libc::pid_t));
        assert!(me().is_of(std::process::id() as libc::pid_t));
        assert!(!me().is_of(1));
    }
}
