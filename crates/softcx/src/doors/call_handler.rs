//! Answers the system calls that stop for the supervisor.
#![allow(unsafe_code)] // attributes of files as bytes

use std::ffi::CString;
use std::mem::zeroed;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::caller::{Caller, Inode};
use super::clients::Clients;
use super::context::Descriptors;
use super::filter::RDMA_VERBS_IOCTL;
use super::listener::{CallListener, Reply, TrappedCall};
use super::node::{self, DeviceNode, PathTarget};
use super::rdma_cm::{CmAnswer, CmCaller, EventWaiter};
use crate::device::client::Errno;
use crate::device::space::Space;

/// What the threads that answer share.
#[derive(Debug)]
pub(super) struct CallHandler {
    pub(super) listener: Arc<CallListener>,
    pub(super) clients: Clients,
    /// The private sysfs tree.
    pub(super) tree: PathBuf,
}

/// An errno that the call returns, as for a kernel that has the device.
type Refusal = Errno;

impl CallHandler {
    /// Answers calls until no process is left that could make one.
    pub(super) fn run(&self) {
        while let Some(call) = self.listener.next() {
            // A call without an answer would wait for ever, and this thread be missing for the others.
            let served = catch_unwind(AssertUnwindSafe(|| self.serve(&call)));
            let answer = served.unwrap_or(Reply::Errno(libc::EIO));
            self.listener.answer(&call, answer);
        }
    }

    fn serve(&self, call: &TrappedCall) -> Reply {
        // A process that has no number here is out of reach. The number that it has instead would mean this process.
        if call.tid <= 0 {
            return Reply::Continue;
        }
        let caller = Caller::new(call.tid);
        let [a, b, c, d, e, _] = call.args;
        // Calls without a folder, which newer architectures do not have.
        #[cfg(target_arch = "x86_64")]
        let here = libc::AT_FDCWD;
        let served = match call.number {
            libc::SYS_ioctl if b as u32 == RDMA_VERBS_IOCTL => {
                self.ioctl(call, &caller, a as i32, c)
            }
            libc::SYS_write => self.write(call, &caller, a as i32, b, c),
            libc::SYS_openat => self.open(call, &caller, a as i32, b, c as i32),
            libc::SYS_openat2 => self.openat2(call, &caller, a as i32, b, c, d),
            libc::SYS_newfstatat => {
                self.stat_at(call, &caller, a as i32, b, c, d as i32, Form::Stat)
            }
            libc::SYS_statx => self.stat_at(call, &caller, a as i32, b, e, c as i32, Form::Statx),
            libc::SYS_fstat => self.stat_open(call, &caller, a as i32, b, Form::Stat),
            libc::SYS_faccessat => self.access(call, &caller, a as i32, b, c as i32),
            // Flags do not change the answer: effective ids do not matter here, and no link leads nowhere.
            libc::SYS_faccessat2 => self.access(call, &caller, a as i32, b, c as i32),
            libc::SYS_readlinkat => self.read_link(call, &caller, a as i32, b, (c, d)),
            libc::SYS_getxattr
            | libc::SYS_lgetxattr
            | libc::SYS_listxattr
            | libc::SYS_llistxattr => self.extended_attributes(call, &caller, a),
            #[cfg(target_arch = "x86_64")]
            libc::SYS_open => self.open(call, &caller, here, a, b as i32),
            #[cfg(target_arch = "x86_64")]
            libc::SYS_stat => self.stat_at(call, &caller, here, a, b, 0, Form::Stat),
            #[cfg(target_arch = "x86_64")]
            libc::SYS_lstat => {
                let flags = libc::AT_SYMLINK_NOFOLLOW;
                self.stat_at(call, &caller, here, a, b, flags, Form::Stat)
            }
            #[cfg(target_arch = "x86_64")]
            libc::SYS_access => self.access(call, &caller, here, a, b as i32),
            #[cfg(target_arch = "x86_64")]
            libc::SYS_readlink => self.read_link(call, &caller, here, a, (b, c)),
            _ => Ok(Reply::Continue),
        };
        served.unwrap_or_else(Reply::Errno)
    }

    fn ioctl(
        &self,
        call: &TrappedCall,
        caller: &Caller,
        descriptor: i32,
        argument: u64,
    ) -> Result<Reply, Refusal> {
        let open = caller
            .inode(descriptor)
            .and_then(|at| self.clients.find(at));
        let Some(open) = open else {
            return Ok(Reply::Continue);
        };
        let waiting = || self.listener.is_waiting(call);
        let space = self.clients.space_of(caller, &open, waiting);
        let space = space.map_err(|error| error.raw_os_error().unwrap_or(libc::EIO))?;
        // Otherwise the descriptor was looked up in the table of another process that got the number since.
        if !waiting() {
            return Err(libc::ESRCH);
        }
        let hands = ClientDescriptors {
            space,
            listener: &self.listener,
            call,
            caller,
        };
        open.context.ioctl(argument, &hands)?;
        Ok(Reply::Value(0))
    }

    /// A write of a command's length, perhaps to the connection manager.
    fn write(
        &self,
        call: &TrappedCall,
        caller: &Caller,
        descriptor: i32,
        from: u64,
        len_bytes: u64,
    ) -> Result<Reply, Refusal> {
        let connections = &self.clients.connections;
        if !connections.is_used() {
            return Ok(Reply::Continue);
        }
        let inode = caller.inode(descriptor);
        let Some(inode) = inode.filter(|&it| connections.is_of(it)) else {
            return Ok(Reply::Continue);
        };
        if !self.listener.is_waiting(call) {
            return Err(libc::ESRCH);
        }
        let writer = CommandWriter {
            listener: &self.listener,
            call: *call,
            caller: *caller,
            descriptor,
        };
        match connections.write(inode, &writer, from, len_bytes)? {
            CmAnswer::Done => Ok(Reply::Value(len_bytes as i64)),
            CmAnswer::Later | CmAnswer::Wait => Ok(Reply::Answered),
        }
    }

    /// The place that a path leads to, and that it was really the caller's.
    fn place(&self, call: &TrappedCall, caller: &Caller, directory: i32, path: u64) -> PathTarget {
        let found = caller
            .path(path)
            .filter(|path| node::may_lead_here(path))
            .and_then(|path| caller.absolute(directory, &path))
            .map_or(PathTarget::Elsewhere, |path| node::place(&path, &self.tree));
        if found == PathTarget::Elsewhere || self.listener.is_waiting(call) {
            found
        } else {
            PathTarget::Elsewhere
        }
    }

    fn open(
        &self,
        call: &TrappedCall,
        caller: &Caller,
        directory: i32,
        path: u64,
        flags: i32,
    ) -> Result<Reply, Refusal> {
        let failed = |error: std::io::Error| error.raw_os_error().unwrap_or(libc::EIO);
        let descriptor = match self.place(call, caller, directory, path) {
            PathTarget::Elsewhere => return Ok(Reply::Continue),
            PathTarget::Node(DeviceNode::ConnectionManager) => {
                node::check_open(flags)?;
                let opened = self.clients.open_connections().map_err(failed)?;
                if flags & libc::O_NONBLOCK != 0 {
                    set_nonblocking(&opened)?;
                }
                opened
            }
            PathTarget::Node(DeviceNode::Verbs) => {
                node::check_open(flags)?;
                let process = caller.process().ok_or(libc::ESRCH)?;
                let waiting = || self.listener.is_waiting(call);
                self.clients.open(process, waiting).map_err(failed)?
            }
            PathTarget::File(file) => open_for_reading(&self.tree, &file, flags)?,
        };
        // If it does not get there, the drop of this descriptor is the last close of the context.
        self.listener
            .answer_with(call, descriptor.as_fd(), flags)
            .map_err(failed)
    }

    fn openat2(
        &self,
        call: &TrappedCall,
        caller: &Caller,
        directory: i32,
        path: u64,
        how: u64,
        how_bytes: u64,
    ) -> Result<Reply, Refusal> {
        let mut flags = [0; 8];
        if how_bytes < flags.len() as u64 || caller.read(how, &mut flags).is_err() {
            return Ok(Reply::Continue);
        }
        let flags = u64::from_ne_bytes(flags) as i32;
        self.open(call, caller, directory, path, flags)
    }

    #[allow(clippy::too_many_arguments)] // those of the system call
    fn stat_at(
        &self,
        call: &TrappedCall,
        caller: &Caller,
        directory: i32,
        path: u64,
        to: u64,
        flags: i32,
        form: Form,
    ) -> Result<Reply, Refusal> {
        // Both spellings of "this descriptor": an empty path and, since Linux 6.11, none.
        let empty = || {
            path == 0
                || caller
                    .path(path)
                    .is_some_and(|path| path.as_os_str().is_empty())
        };
        if flags & libc::AT_EMPTY_PATH != 0 && empty() {
            return self.stat_open(call, caller, directory, to, form);
        }
        let stat = match self.place(call, caller, directory, path) {
            PathTarget::Elsewhere => return Ok(Reply::Continue),
            PathTarget::Node(node) => node::stat(node),
            PathTarget::File(file) => stat(&file, flags & libc::AT_SYMLINK_NOFOLLOW)?,
        };
        put(caller, to, &stat, form)
    }

    fn access(
        &self,
        call: &TrappedCall,
        caller: &Caller,
        directory: i32,
        path: u64,
        mode: i32,
    ) -> Result<Reply, Refusal> {
        match self.place(call, caller, directory, path) {
            PathTarget::Elsewhere => return Ok(Reply::Continue),
            PathTarget::Node(_) => node::check_access(mode)?,
            PathTarget::File(file) => node::check_file_access(&file, mode)?,
        }
        Ok(Reply::Value(0))
    }

    fn read_link(
        &self,
        call: &TrappedCall,
        caller: &Caller,
        directory: i32,
        path: u64,
        (to, room): (u64, u64),
    ) -> Result<Reply, Refusal> {
        let file = match self.place(call, caller, directory, path) {
            PathTarget::Elsewhere => return Ok(Reply::Continue),
            PathTarget::Node(_) => return Err(libc::EINVAL),
            PathTarget::File(file) => file,
        };
        // The system call takes an `int`.
        let room = match room as i32 {
            ..=0 => return Err(libc::EINVAL),
            room => room as usize,
        };
        let text = node::read_link(&file)?;
        let text = text.as_os_str().as_bytes();
        let text = text.get(..room).unwrap_or(text);
        let written = caller.write(to, text);
        written.map_err(|_| libc::EFAULT)?;
        Ok(Reply::Value(text.len() as i64))
    }

    fn extended_attributes(
        &self,
        call: &TrappedCall,
        caller: &Caller,
        path: u64,
    ) -> Result<Reply, Refusal> {
        match self.place(call, caller, libc::AT_FDCWD, path) {
            PathTarget::Elsewhere => Ok(Reply::Continue),
            PathTarget::Node(_) => Err(libc::EOPNOTSUPP),
            PathTarget::File(file) => Err(node::no_extended_attributes(&file)),
        }
    }

    fn stat_open(
        &self,
        call: &TrappedCall,
        caller: &Caller,
        descriptor: i32,
        to: u64,
        form: Form,
    ) -> Result<Reply, Refusal> {
        if self.clients.is_empty() {
            return Ok(Reply::Continue);
        }
        let Some(mut stat) = caller.stat(descriptor) else {
            return Ok(Reply::Continue);
        };
        let inode = (stat.st_dev, stat.st_ino);
        let node = if self.clients.find(inode).is_some() {
            DeviceNode::Verbs
        } else if self.clients.connections.is_of(inode) {
            DeviceNode::ConnectionManager
        } else {
            return Ok(Reply::Continue);
        };
        if !self.listener.is_waiting(call) {
            return Ok(Reply::Continue);
        }
        node::rewrite_stat(&mut stat, node);
        put(caller, to, &stat, form)
    }
}

fn set_nonblocking(descriptor: &OwnedFd) -> Result<(), Refusal> {
    let fd = descriptor.as_raw_fd();
    // SAFETY: an open descriptor, and a flag of its description.
    if unsafe { libc::fcntl(fd, libc::F_SETFL, libc::O_NONBLOCK) } < 0 {
        return Err(last_errno());
    }
    Ok(())
}

/// The form in which a call returns attributes.
#[derive(Debug, Clone, Copy)]
enum Form {
    Stat,
    Statx,
}

fn put(caller: &Caller, to: u64, stat: &libc::stat, form: Form) -> Result<Reply, Refusal> {
    let written = match form {
        // SAFETY: all `stat` here began as zeros, or were written by the kernel.
        Form::Stat => caller.write(to, unsafe { node::bytes(stat) }),
        Form::Statx => {
            let statx = node::statx(stat);
            // SAFETY: it began as zeros.
            caller.write(to, unsafe { node::bytes(&statx) })
        }
    };
    written.map(|()| Reply::Value(0)).map_err(|_| libc::EFAULT)
}

fn last_errno() -> Errno {
    std::io::Error::last_os_error()
        .raw_os_error()
        .unwrap_or(libc::EIO)
}

fn terminated(path: &Path) -> Result<CString, Refusal> {
    CString::new(path.as_os_str().as_bytes()).map_err(|_| libc::EINVAL)
}

/// Opens a file of the private tree. The descriptor in this process is closed on exec; `flags` apply to the caller's descriptor. Programs of this
/// user can change the tree, so symbolic links that lead out of it are not followed, and a pipe without a writer does not block this thread.
fn open_for_reading(tree: &Path, file: &Path, flags: i32) -> Result<OwnedFd, Refusal> {
    let flags = node::flags_for_file(file, flags)?;
    let root =
        std::fs::File::open(tree).map_err(|error| error.raw_os_error().unwrap_or(libc::EIO))?;
    let path = terminated(file.strip_prefix(tree).map_err(|_| libc::EXDEV)?)?;
    let careful = libc::O_CLOEXEC | libc::O_NOCTTY | libc::O_NONBLOCK;
    // SAFETY: plain numbers, for which zeros are fine.
    let mut how: libc::open_how = unsafe { zeroed() };
    how.flags = (flags | careful) as u64;
    how.resolve = libc::RESOLVE_BENEATH;
    // SAFETY: a terminated path, and a structure of that size.
    let fd = unsafe {
        libc::syscall(
            libc::SYS_openat2,
            root.as_raw_fd(),
            path.as_ptr(),
            &raw const how,
            size_of::<libc::open_how>(),
        )
    } as i32;
    if fd < 0 {
        return Err(match last_errno() {
            // A link that leads out of the tree: none of ours.
            libc::EXDEV => libc::ELOOP,
            errno => errno,
        });
    }
    // SAFETY: just opened, with no other owner.
    let opened = unsafe { OwnedFd::from_raw_fd(fd) };
    if flags & libc::O_NONBLOCK == 0 {
        // SAFETY: an open descriptor.
        unsafe { libc::fcntl(fd, libc::F_SETFL, flags & !libc::O_CLOEXEC) };
    }
    Ok(opened)
}

fn stat(file: &Path, flags: i32) -> Result<libc::stat, Refusal> {
    let path = terminated(file)?;
    // SAFETY: plain numbers, for which zeros are fine.
    let mut stat: libc::stat = unsafe { zeroed() };
    // SAFETY: a terminated path, and room for one `stat`.
    if unsafe { libc::fstatat(libc::AT_FDCWD, path.as_ptr(), &raw mut stat, flags) } < 0 {
        return Err(last_errno());
    }
    Ok(stat)
}

/// The caller's memory, and its descriptors for a command that gives it one.
struct ClientDescriptors<'a> {
    space: Space,
    listener: &'a CallListener,
    call: &'a TrappedCall,
    caller: &'a Caller,
}

impl Descriptors for ClientDescriptors<'_> {
    fn space(&self) -> Space {
        self.space
    }

    fn give(&self, descriptor: OwnedFd) -> Result<i32, Errno> {
        self.listener
            .give(self.call, descriptor.as_fd())
            .map_err(|error| error.raw_os_error().unwrap_or(libc::EIO))
    }

    fn inode(&self, number: i32) -> Option<Inode> {
        self.caller.inode(number)
    }

    /// A descriptor of another process cannot be closed. It cannot be added together with the call's result either, which is 0 for
    /// these calls: its number is in memory. So answers are written before it is given; it stays only if another thread unmapped
    /// the memory since then.
    fn take_back(&self, _number: i32) {}
}

/// A call that writes a command of the connection manager.
struct CommandWriter<'a> {
    listener: &'a Arc<CallListener>,
    call: TrappedCall,
    caller: Caller,
    descriptor: i32,
}

impl CmCaller for CommandWriter<'_> {
    fn space(&self) -> Space {
        self.caller.space()
    }

    fn is_nonblocking(&self) -> bool {
        let flags = self.caller.flags(self.descriptor);
        flags.is_some_and(|flags| flags & libc::O_NONBLOCK != 0)
    }

    fn inode(&self, descriptor: i32) -> Option<Inode> {
        self.caller.inode(descriptor)
    }

    fn waiter(&self, response: u64, room_bytes: usize) -> Option<Box<dyn EventWaiter>> {
        Some(Box::new(WaitingCall {
            listener: Arc::clone(self.listener),
            call: self.call,
            space: self.caller.space(),
            response,
            room_bytes,
        }))
    }
}

/// A call that is answered when there is an event.
#[derive(Debug)]
struct WaitingCall {
    listener: Arc<CallListener>,
    call: TrappedCall,
    space: Space,
    response: u64,
    room_bytes: usize,
}

impl EventWaiter for WaitingCall {
    fn is_waiting(&self) -> bool {
        self.listener.is_waiting(&self.call)
    }

    fn write(&self, event: &[u8]) -> bool {
        let event = event.get(..self.room_bytes).unwrap_or(event);
        self.space.write(self.response, event).is_ok()
    }

    fn finish(&self, result: Result<(), Errno>) {
        let [_, _, len_bytes, ..] = self.call.args;
        let reply = match result {
            Ok(()) => Reply::Value(len_bytes as i64),
            Err(errno) => Reply::Errno(errno),
        };
        self.listener.answer(&self.call, reply);
    }
}
