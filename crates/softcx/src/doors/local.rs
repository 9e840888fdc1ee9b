//! The device inside the program's own process, for the preload library.
#![allow(unsafe_code)] // signal masks

use std::collections::HashMap;
use std::io;
use std::mem::{MaybeUninit, zeroed};
use std::os::fd::{AsFd, AsRawFd, IntoRawFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::caller::Caller;
use super::cm_files::CmFiles;
use super::context::{Descriptors, DeviceContext};
use super::descriptor_watch::DescriptorWatch;
use super::node::{self, DeviceNode, PathTarget};
use super::rdma_cm::{COMMAND_BYTES, CmAnswer, CmCaller, ConnectionManager, EventWaiter};
use super::scratch::Scratch;
use super::sysfs;
use crate::device::client::Errno;
use crate::device::fabric::{Fabric, NodeReleaser};
use crate::device::space::Space;
use crate::device::{Device, DeviceOptions};
use crate::{Error, Result};

/// The device and its tables, for the preload library.
///
/// All methods may be called at any time by any thread. No method calls a function that the library replaces while it holds a lock that another
/// method needs.
#[derive(Debug)]
pub struct Local {
    device: Device,
    scratch: Mutex<Option<Scratch>>,
    tree: PathBuf,
    opens: Mutex<HashMap<(u64, u64), Arc<DeviceContext>>>,
    connections: ConnectionManager,
    cm_files: CmFiles,
    /// The file system of the device's descriptors. It distinguishes them from other descriptors without a lock.
    file_system: AtomicU64,
    descriptor_watch: DescriptorWatch,
    node_releaser: Option<NodeReleaser>,
}

impl Local {
    /// Makes the device. The device and its three threads exist until the process ends.
    ///
    /// # Errors
    /// [`Error::System`] if the kernel refuses a system call; the errors of [`Device::on_fabric`].
    pub fn start(options: &DeviceOptions) -> Result<&'static Local> {
        // Signals are for the program's own threads.
        let before = block_all();
        let local = Local::start_blocked(options);
        // SAFETY: the set that was in force; nothing that can fail is asked.
        unsafe {
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, std::ptr::null_mut())
        };
        local
    }

    fn start_blocked(options: &DeviceOptions) -> Result<&'static Local> {
        let system = |operation| {
            move |error: io::Error| Error::System {
                operation,
                errno: error.raw_os_error().unwrap_or(libc::EIO),
            }
        };
        let device = Device::on_fabric(options)?;
        let scratch = sysfs::show(&device, &options.faults)?;
        let node_releaser = device.lock().fabric().map(Fabric::node_releaser);
        let connections = ConnectionManager::start(&device).map_err(system("start of a thread"))?;
        let local: &'static Local = Box::leak(Box::new(Local {
            device,
            connections,
            cm_files: CmFiles::default(),
            node_releaser,
            tree: scratch.path().to_owned(),
            scratch: Mutex::new(Some(scratch)),
            opens: Mutex::default(),
            file_system: AtomicU64::new(0),
            descriptor_watch: DescriptorWatch::new(0).map_err(system("inotify"))?,
        }));
        std::thread::Builder::new()
            .name("softcx-closes".into())
            .spawn(|| local.release_closed())
            .map_err(system("start of a thread"))?;
        Ok(local)
    }

    /// The absolute form of a path that a program gave together with a directory's descriptor, if the path may concern the device. Only the text of
    /// the path decides that, so the check is cheap and needs no device.
    pub fn absolute(directory: RawFd, path: &Path) -> Option<PathBuf> {
        if !node::may_lead_here(path) {
            return None;
        }
        // SAFETY: takes nothing and cannot fail.
        let me = Caller::new(unsafe { libc::gettid() });
        me.absolute(directory, path)
    }

    /// Whether an absolute path concerns RDMA devices, so that a device must be made.
    pub fn is_about_devices(path: &Path) -> bool {
        node::place(path, Path::new("/nonexistent")) != PathTarget::Elsewhere
    }

    /// The target of an absolute path without `.` and `..`.
    pub fn redirect(&self, path: &Path) -> Redirect {
        match node::place(path, &self.tree) {
            PathTarget::Node(node) => Redirect::Node(node),
            PathTarget::File(file) => Redirect::File(file),
            PathTarget::Elsewhere => Redirect::Elsewhere,
        }
    }

    /// Checks whether the node may be opened with these flags.
    ///
    /// # Errors
    /// The errno of the open.
    pub fn check_open(flags: i32) -> std::result::Result<(), i32> {
        node::check_open(flags)
    }

    /// Checks access to the node with the mode of `access`.
    ///
    /// # Errors
    /// The errno of `access`.
    pub fn check_access(mode: i32) -> std::result::Result<(), i32> {
        node::check_access(mode)
    }

    /// The flags with which to open a file that [`Local::redirect`] named. The file can only be read.
    ///
    /// # Errors
    /// The errno of the open.
    pub fn flags_for_file(file: &Path, flags: i32) -> std::result::Result<i32, i32> {
        node::flags_for_file(file, flags)
    }

    /// Checks access to such a file with the mode of `access`.
    ///
    /// # Errors
    /// The errno of `access`.
    pub fn check_file_access(file: &Path, mode: i32) -> std::result::Result<(), i32> {
        node::check_file_access(file, mode)
    }

    /// The text of such a file that is a link.
    ///
    /// # Errors
    /// The errno of `readlink`.
    pub fn read_link(file: &Path) -> std::result::Result<PathBuf, i32> {
        node::read_link(file)
    }

    /// The name under which programs know such a file, by its true name.
    pub fn public_name(&self, file: &Path) -> Option<PathBuf> {
        node::public_name(file, &self.tree)
    }

    /// The errno of `getxattr` and its variants on such a file.
    pub fn no_extended_attributes(file: &Path) -> i32 {
        node::no_extended_attributes(file)
    }

    /// Opens the device: a descriptor for the program.
    ///
    /// # Errors
    /// Those of the kernel.
    pub fn open(&self) -> io::Result<OwnedFd> {
        let (context, descriptor) = DeviceContext::open(&self.device)?;
        let inode = context.inode();
        self.file_system.store(inode.0, Ordering::Relaxed);
        self.descriptor_watch
            .watch(descriptor.as_fd(), context.file()?, inode)?;
        self.opens().insert(inode, Arc::new(context));
        Ok(descriptor)
    }

    /// Executes a verbs command on a descriptor; `None` if the descriptor is not of the device. `argument` is the third
    /// argument of the ioctl.
    pub fn ioctl(&self, descriptor: RawFd, argument: u64) -> Option<Result<(), i32>> {
        let stat = stat(descriptor)?;
        let context = self.opens().get(&(stat.st_dev, stat.st_ino)).cloned()?;
        Some(context.ioctl(argument, &LocalDescriptors))
    }

    /// Opens the connection manager: a descriptor for the program.
    ///
    /// # Errors
    /// Those of the kernel.
    pub fn open_connections(&self, flags: i32) -> io::Result<OwnedFd> {
        let opened = self.connections.open()?;
        if flags & libc::O_NONBLOCK != 0 {
            let fd = opened.descriptor.as_raw_fd();
            // SAFETY: an open descriptor, and a flag of its description.
            if unsafe { libc::fcntl(fd, libc::F_SETFL, libc::O_NONBLOCK) } < 0 {
                return Err(io::Error::last_os_error());
            }
        }
        self.descriptor_watch
            .watch(opened.descriptor.as_fd(), opened.file, opened.inode)?;
        if !self.cm_files.enter(opened.inode) {
            return Err(io::Error::from_raw_os_error(libc::EMFILE));
        }
        Ok(opened.descriptor)
    }

    /// Executes what a program writes, if its length is that of a command and the descriptor is of the connection manager. `None` if it is not.
    /// Takes no lock in that case: a signal handler may write.
    #[inline]
    pub fn write(
        &self,
        descriptor: RawFd,
        from: u64,
        len_bytes: usize,
    ) -> Option<Result<usize, i32>> {
        let is_command = u32::try_from(len_bytes).is_ok_and(|it| COMMAND_BYTES.contains(&it));
        if !is_command || !self.connections.is_used() {
            return None;
        }
        let stat = stat(descriptor)?;
        let inode = (stat.st_dev, stat.st_ino);
        let is_of = self.cm_files.contains(inode);
        is_of.then(|| self.write_command(descriptor, inode, from, len_bytes))
    }

    fn write_command(
        &self,
        descriptor: RawFd,
        inode: (u64, u64),
        from: u64,
        len_bytes: usize,
    ) -> Result<usize, i32> {
        let writer = LocalWriter { descriptor };
        loop {
            match self
                .connections
                .write(inode, &writer, from, len_bytes as u64)?
            {
                CmAnswer::Done | CmAnswer::Later => return Ok(len_bytes),
                CmAnswer::Wait => wait_for_event(descriptor)?,
            }
        }
    }

    /// Whether a descriptor is of the device.
    pub fn is_of(&self, descriptor: RawFd) -> bool {
        stat(descriptor)
            .is_some_and(|found| self.opens().contains_key(&(found.st_dev, found.st_ino)))
    }

    /// Patches `stat` to look like the device's node, if it is of a descriptor of the device.
    pub fn rewrite_stat(&self, stat: &mut libc::stat) {
        let inode = (stat.st_dev, stat.st_ino);
        if stat.st_dev == self.file_system.load(Ordering::Relaxed)
            && self.opens().contains_key(&inode)
        {
            node::rewrite_stat(stat, DeviceNode::Verbs);
        } else if self.connections.is_used() && self.cm_files.contains(inode) {
            node::rewrite_stat(stat, DeviceNode::ConnectionManager);
        }
    }

    /// The attributes of a node.
    pub fn node_attributes(node: DeviceNode) -> libc::stat {
        node::stat(node)
    }

    /// Attributes in the form of `statx`.
    pub fn extended(stat: &libc::stat) -> libc::statx {
        node::statx(stat)
    }

    /// Does one turn of the device's work in the calling thread: [`Device::progress`].
    #[inline]
    pub fn progress(&self) -> bool {
        self.device.progress()
    }

    /// The same for a caller that polls repeatedly. Packets do not wake the device's thread until [`Local::stops_polling`].
    #[inline]
    pub fn poll(&self) -> bool {
        self.device.progress_on()
    }

    /// The caller of [`Local::poll`] has stopped polling.
    pub fn stops_polling(&self) {
        self.device.progress_off();
    }

    /// Leaves the fabric and removes the files of the device, at the end of the process. Other threads may still use the device. Takes no lock that
    /// they may hold, because the caller may be a signal handler that interrupted one of them.
    pub fn clear_away(&self) {
        if let Some(node_releaser) = &self.node_releaser {
            node_releaser.release();
        }
        let scratch = self.scratch.try_lock().ok().and_then(|mut it| it.take());
        drop(scratch);
    }

    fn opens(&self) -> MutexGuard<'_, HashMap<(u64, u64), Arc<DeviceContext>>> {
        self.opens.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn release_closed(&self) {
        loop {
            for inode in self.descriptor_watch.closed() {
                let context = self.opens().remove(&inode);
                // Not under the lock: this takes the device's time.
                drop(context);
                self.cm_files.leave(inode);
                self.connections.close(inode);
            }
        }
    }
}

/// The target of a path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Redirect {
    /// A node.
    Node(DeviceNode),
    /// A file of the private sysfs tree, with its path.
    File(PathBuf),
    /// The path itself: it does not concern the device.
    Elsewhere,
}

fn block_all() -> libc::sigset_t {
    let mut all = MaybeUninit::uninit();
    // SAFETY: plain data, for which zeros are fine.
    let mut before: libc::sigset_t = unsafe { zeroed() };
    // SAFETY: `sigfillset` initialises the set; both sets outlive the calls.
    unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), &raw mut before);
    }
    before
}

fn stat(descriptor: RawFd) -> Option<libc::stat> {
    // SAFETY: plain numbers, for which zeros are fine.
    let mut stat: libc::stat = unsafe { zeroed() };
    // SAFETY: room for one `stat`. By number: a library that is preloaded puts itself before the function.
    let done = unsafe {
        libc::syscall(
            libc::SYS_newfstatat,
            descriptor,
            c"".as_ptr(),
            &raw mut stat,
            libc::AT_EMPTY_PATH,
        )
    };
    (done == 0).then_some(stat)
}

/// The descriptors of this process.
struct LocalDescriptors;

impl Descriptors for LocalDescriptors {
    fn space(&self) -> Space {
        Space::LOCAL
    }

    fn give(&self, descriptor: OwnedFd) -> Result<i32, Errno> {
        Ok(descriptor.into_raw_fd())
    }

    fn inode(&self, number: i32) -> Option<(u64, u64)> {
        stat(number).map(|found| (found.st_dev, found.st_ino))
    }

    fn take_back(&self, number: i32) {
        // SAFETY: created just now; no other code knows its number.
        unsafe { libc::close(number.as_raw_fd()) };
    }
}

/// A thread of this process that writes a command of the connection manager.
struct LocalWriter {
    descriptor: RawFd,
}

impl CmCaller for LocalWriter {
    fn space(&self) -> Space {
        Space::LOCAL
    }

    fn is_nonblocking(&self) -> bool {
        // SAFETY: takes numbers only.
        let flags = unsafe { libc::fcntl(self.descriptor, libc::F_GETFL) };
        flags >= 0 && flags & libc::O_NONBLOCK != 0
    }

    fn inode(&self, number: i32) -> Option<(u64, u64)> {
        stat(number).map(|found| (found.st_dev, found.st_ino))
    }

    fn waiter(&self, _response: u64, _room_bytes: usize) -> Option<Box<dyn EventWaiter>> {
        None
    }
}

/// Waits until a descriptor of the connection manager is readable: by a read, which signals interrupt as they interrupt the kernel's wait.
fn wait_for_event(descriptor: RawFd) -> std::result::Result<(), i32> {
    let mut byte = [0_u8];
    // SAFETY: room for one byte. By number: a library that is preloaded may put itself before the function.
    let read = unsafe { libc::syscall(libc::SYS_read, descriptor, byte.as_mut_ptr(), 1) };
    match read {
        1 => Ok(()),
        _ => Err(io::Error::last_os_error()
            .raw_os_error()
            .unwrap_or(libc::EIO)),
    }
}
