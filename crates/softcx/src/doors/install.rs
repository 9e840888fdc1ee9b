//! Puts a filter on a program that is about to start, and brings its listener here.
#![allow(unsafe_code)] // runs between fork and exec

use std::io;
use std::mem::zeroed;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};

use libc::{sock_filter, sock_fprog};

use super::descriptors::Limit;
use super::filter;
use super::signals::Mask;

/// Room for one descriptor in a control message, aligned as its header.
const CONTROL_WORDS: usize = 4;

/// How a start went wrong.
#[derive(Debug)]
pub(super) enum StartFailure {
    /// The filter could not be put on.
    Filter(io::Error),
    /// The program could not be executed.
    Program(io::Error),
}

/// Starts the program with the filter on, and with the given signal mask and limit. The child, and the filter's listening end.
pub(super) fn start(
    mut command: Command,
    mask: Mask,
    descriptors: Limit,
) -> Result<(Child, OwnedFd), StartFailure> {
    let (here, there) = UnixStream::pair().map_err(StartFailure::Filter)?;
    let program = filter::program();
    let channel = there.as_raw_fd();
    let prepare = move || {
        mask.apply()?;
        descriptors.apply()?;
        let listener = install(&program)?;
        send(channel, listener)
    };
    // SAFETY: `prepare` makes system calls and nothing else: no allocation, no locks.
    let spawned = unsafe { command.pre_exec(prepare) }.spawn();
    drop(there);
    match (spawned, receive(&here)) {
        (Ok(child), Ok(listener)) => Ok((child, listener)),
        // The listener came, so the filter was on when it failed.
        (Err(error), Ok(_)) => Err(StartFailure::Program(error)),
        (Err(error), Err(_)) | (Ok(_), Err(error)) => Err(StartFailure::Filter(error)),
    }
}

/// Puts the filter on the calling thread: the listener's descriptor, closed on exec.
fn install(program: &[sock_filter]) -> io::Result<RawFd> {
    // SAFETY: takes numbers only. Without it, only the privileged may put on filters.
    if unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) } < 0 {
        return Err(io::Error::last_os_error());
    }
    let program = sock_fprog {
        len: program.len() as u16,
        filter: program.as_ptr().cast_mut(),
    };
    let listening = libc::SECCOMP_FILTER_FLAG_NEW_LISTENER;
    // Once the supervisor has a call, a signal waits for its answer (unless it kills): else the kernel would start the call over,
    // and a command be carried out twice. Linux 5.19.
    let uninterrupted = libc::SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV;
    let put_on = |flags: libc::c_ulong| {
        // SAFETY: a program that outlives the call; the kernel checks and copies it.
        let fd = unsafe {
            libc::syscall(
                libc::SYS_seccomp,
                libc::SECCOMP_SET_MODE_FILTER,
                flags,
                &raw const program,
            )
        };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(fd as RawFd)
    };
    match put_on(listening | uninterrupted) {
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => put_on(listening),
        done => done,
    }
}

/// Sends a descriptor.
fn send(channel: RawFd, descriptor: RawFd) -> io::Result<()> {
    let mut byte = [0u8; 1];
    let mut data = libc::iovec {
        iov_base: byte.as_mut_ptr().cast(),
        iov_len: 1,
    };
    let mut control = [0u64; CONTROL_WORDS];
    // SAFETY: plain data, for which zeros are fine.
    let mut message: libc::msghdr = unsafe { zeroed() };
    message.msg_iov = &raw mut data;
    message.msg_iovlen = 1;
    message.msg_control = control.as_mut_ptr().cast();
    // SAFETY: arithmetic. There is room for a header and one descriptor: 16 + 8 of 32 bytes.
    unsafe {
        message.msg_controllen = libc::CMSG_SPACE(size_of::<RawFd>() as u32) as _;
        let header = libc::CMSG_FIRSTHDR(&raw const message);
        (*header).cmsg_level = libc::SOL_SOCKET;
        (*header).cmsg_type = libc::SCM_RIGHTS;
        (*header).cmsg_len = libc::CMSG_LEN(size_of::<RawFd>() as u32) as _;
        libc::CMSG_DATA(header)
            .cast::<RawFd>()
            .write_unaligned(descriptor);
    }
    // SAFETY: everything that the message points to outlives the call.
    if unsafe { libc::sendmsg(channel, &raw const message, libc::MSG_NOSIGNAL) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Receives a descriptor.
fn receive(channel: &UnixStream) -> io::Result<OwnedFd> {
    let mut byte = [0u8; 1];
    let mut data = libc::iovec {
        iov_base: byte.as_mut_ptr().cast(),
        iov_len: 1,
    };
    let mut control = [0u64; CONTROL_WORDS];
    // SAFETY: plain data, for which zeros are fine.
    let mut message: libc::msghdr = unsafe { zeroed() };
    message.msg_iov = &raw mut data;
    message.msg_iovlen = 1;
    message.msg_control = control.as_mut_ptr().cast();
    message.msg_controllen = size_of_val(&control) as _;
    let (fd, flags) = (channel.as_raw_fd(), libc::MSG_CMSG_CLOEXEC);
    // SAFETY: everything that the message points to outlives the call.
    if unsafe { libc::recvmsg(fd, &raw mut message, flags) } < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has filled the control buffer; the header lies in it or is none, and one of this type holds a descriptor
    // that is ours from here on.
    let received = unsafe {
        let header = libc::CMSG_FIRSTHDR(&raw const message);
        let is_one = !header.is_null()
            && (*header).cmsg_level == libc::SOL_SOCKET
            && (*header).cmsg_type == libc::SCM_RIGHTS;
        is_one
            .then(|| OwnedFd::from_raw_fd(libc::CMSG_DATA(header).cast::<RawFd>().read_unaligned()))
    };
    received.ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
}
