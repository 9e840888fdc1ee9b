//! The device in this very process, for a library that is loaded into a program.
#![allow(unsafe_code)] // signal masks

use std::collections::HashMap;
use std::io;
use std::mem::{MaybeUninit, zeroed};
use std::os::fd::{AsFd, AsRawFd, IntoRawFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::caller::Caller;
use super::context::{Descriptors, DeviceContext};
use super::descriptor_watch::DescriptorWatch;
use super::node::{self, PathTarget};
use super::scratch::Scratch;
use super::sysfs;
use crate::device::client::Errno;
use crate::device::fabric::{Fabric, Leaver};
use crate::device::space::Space;
use crate::device::{Device, DeviceOptions};
use crate::{Error, Result};

/// What the preload door serves its process with.
///
/// All methods may be called at any time by any thread. None of them calls a function that such a library puts itself before
/// while it holds a lock that another of them needs.
#[derive(Debug)]
pub struct Local {
    device: Device,
    scratch: Mutex<Option<Scratch>>,
    tree: PathBuf,
    opens: Mutex<HashMap<(u64, u64), Arc<DeviceContext>>>,
    /// The file system of the device's descriptors: others are told from them without a lock.
    file_system: AtomicU64,
    descriptor_watch: DescriptorWatch,
    leaver: Option<Leaver>,
}

impl Local {
    /// Makes the device. It and its two threads stay until the process ends.
    ///
    /// # Errors
    /// [`Error::System`] if the kernel refuses something that this needs; the errors of [`Device::on_fabric`].
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
        let scratch = sysfs::show(&device)?;
        let leaver = device.lock().fabric().map(Fabric::leaver);
        let local: &'static Local = Box::leak(Box::new(Local {
            device,
            leaver,
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

    /// The absolute form of a path that a program gave together with a directory's descriptor, by its letters, if it can be about
    /// the device. Costs next to nothing if it cannot; asks no device, so that one need not be made for this.
    pub fn absolute(directory: RawFd, path: &Path) -> Option<PathBuf> {
        if !node::may_lead_here(path) {
            return None;
        }
        // SAFETY: takes nothing and cannot fail.
        let me = Caller::new(unsafe { libc::gettid() });
        me.absolute(directory, path)
    }

    /// Whether an absolute path is about RDMA devices, and so worth making one.
    pub fn is_about_devices(path: &Path) -> bool {
        node::place(path, Path::new("/nonexistent")) != PathTarget::Elsewhere
    }

    /// Where an absolute path without odd components leads, if it is about the device: [`Redirect`].
    pub fn redirect(&self, path: &Path) -> Redirect {
        match node::place(path, &self.tree) {
            PathTarget::Node => Redirect::Node,
            PathTarget::File(file) => Redirect::File(file),
            PathTarget::Elsewhere => Redirect::Elsewhere,
        }
    }

    /// Whether the node may be opened with these flags: an errno if not.
    ///
    /// # Errors
    /// The errno of the open.
    pub fn check_open(flags: i32) -> std::result::Result<(), i32> {
        node::check_open(flags)
    }

    /// Whether the node may be used so, as `access` asks.
    ///
    /// # Errors
    /// The errno of `access`.
    pub fn check_access(mode: i32) -> std::result::Result<(), i32> {
        node::check_access(mode)
    }

    /// The flags with which a file that [`Local::redirect`] named is to be opened: it can be read and nothing else.
    ///
    /// # Errors
    /// The errno of the open.
    pub fn flags_for_file(file: &Path, flags: i32) -> std::result::Result<i32, i32> {
        node::flags_for_file(file, flags)
    }

    /// Whether such a file may be used so, as `access` asks.
    ///
    /// # Errors
    /// The errno of `access`.
    pub fn check_file_access(file: &Path, mode: i32) -> std::result::Result<(), i32> {
        node::check_file_access(file, mode)
    }

    /// The errno of `readlink` on such a file.
    pub fn no_link(file: &Path) -> i32 {
        node::no_link(file)
    }

    /// The errno of a look for extended attributes of such a file.
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

    /// Carries out a verbs command on a descriptor; `None` if the descriptor is not of the device. `argument` is the third
    /// argument of the ioctl.
    pub fn ioctl(&self, descriptor: RawFd, argument: u64) -> Option<Result<(), i32>> {
        let stat = stat(descriptor)?;
        let context = self.opens().get(&(stat.st_dev, stat.st_ino)).cloned()?;
        Some(context.ioctl(argument, &OwnHands))
    }

    /// Whether a descriptor is of the device.
    pub fn is_of(&self, descriptor: RawFd) -> bool {
        stat(descriptor)
            .is_some_and(|found| self.opens().contains_key(&(found.st_dev, found.st_ino)))
    }

    /// Makes the attributes of a file those of the device's node, if it is the file of a descriptor of the device.
    pub fn disguise(&self, stat: &mut libc::stat) {
        if stat.st_dev == self.file_system.load(Ordering::Relaxed)
            && self.opens().contains_key(&(stat.st_dev, stat.st_ino))
        {
            node::disguise(stat);
        }
    }

    /// The attributes of the device's node.
    pub fn node_attributes() -> libc::stat {
        node::stat()
    }

    /// Attributes in the form of `statx`.
    pub fn extended(stat: &libc::stat) -> libc::statx {
        node::statx(stat)
    }

    /// Lets the device do a turn of its work in the caller: [`Device::progress`].
    #[inline]
    pub fn progress(&self) -> bool {
        self.device.progress()
    }

    /// The same for a caller that polls, and will do so again at once. Meanwhile packets do not wake the device's thread.
    #[inline]
    pub fn poll(&self) -> bool {
        self.device.progress_on()
    }

    /// That caller may not poll again soon.
    pub fn stops_polling(&self) {
        self.device.progress_off();
    }

    /// Leaves the fabric and removes what is on disk, at the end of the process: for its last words, when nobody looks for the device any
    /// more. Other threads may still use it. Waits for nothing that they hold: one of them may be this one, interrupted by a signal.
    pub fn clear_away(&self) {
        if let Some(leaver) = &self.leaver {
            leaver.leave();
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
            }
        }
    }
}

/// Where a path leads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Redirect {
    /// To the device's node.
    Node,
    /// To a file of the private sysfs tree, which lies here.
    File(PathBuf),
    /// Where it says.
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
struct OwnHands;

impl Descriptors for OwnHands {
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
        // SAFETY: given a moment ago; nobody was told its number.
        unsafe { libc::close(number.as_raw_fd()) };
    }
}
