//! What the standard library's sockets lack: waiting for many, and noticing that the other host is gone.
#![allow(unsafe_code)] // calls the system

use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsRawFd, BorrowedFd};

use crate::endpoint::system;
use crate::{Error, Result};

/// What to wait for, and what came of it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ready {
    /// There is something to read, or the end.
    pub(super) read: bool,
    /// There is room to write.
    pub(super) write: bool,
}

/// Waits until one of the sockets is ready for something of what is wanted of it, or the time is over.
///
/// # Errors
/// [`Error::System`].
pub(super) fn poll(sockets: &[(BorrowedFd<'_>, Ready)], timeout_ms: i32) -> Result<Vec<Ready>> {
    let mut fds: Vec<libc::pollfd> = sockets
        .iter()
        .map(|(socket, wanted)| libc::pollfd {
            fd: socket.as_raw_fd(),
            events: if wanted.read { libc::POLLIN } else { 0 }
                | if wanted.write { libc::POLLOUT } else { 0 },
            revents: 0,
        })
        .collect();
    // SAFETY: the pointer is to as many entries of ours, which the call reads and fills; the descriptors are borrowed, so they are open.
    let result = unsafe { libc::poll(fds.as_mut_ptr(), fds.len() as libc::nfds_t, timeout_ms) };
    if result < 0 {
        let error = std::io::Error::last_os_error();
        if error.kind() != std::io::ErrorKind::Interrupted {
            return Err(system("poll", &error));
        }
        fds.iter_mut().for_each(|fd| fd.revents = 0);
    }
    // An error or a hang-up is read as such.
    let read = libc::POLLIN | libc::POLLHUP | libc::POLLERR | libc::POLLNVAL;
    let ready = |fd: &libc::pollfd| Ready {
        read: fd.revents & read != 0,
        write: fd.revents & libc::POLLOUT != 0,
    };
    Ok(fds.iter().map(ready).collect())
}

/// Lets as many connections wait to be accepted as the system allows: a thousand ranks that come at once do not fit what the standard library
/// asks for, and each that does not fit tries again a second later.
///
/// # Errors
/// [`Error::System`].
pub(super) fn make_room(listener: &TcpListener) -> Result<()> {
    // SAFETY: two numbers, of which the descriptor is that of a socket that listens; to call this again only changes the number.
    if unsafe { libc::listen(listener.as_raw_fd(), i32::MAX) } < 0 {
        return Err(last_error("listen"));
    }
    Ok(())
}

/// Sets a connection up: small messages go at once, and a host that does not answer for about 20 seconds is taken for gone. The
/// system asks it, not the process: one that is stopped in a debugger is not gone.
///
/// # Errors
/// [`Error::System`].
pub(super) fn enable_keepalive(stream: &TcpStream) -> Result<()> {
    stream
        .set_nodelay(true)
        .map_err(|error| system("setsockopt", &error))?;
    set(stream, libc::SOL_SOCKET, libc::SO_KEEPALIVE, 1)?;
    set(stream, libc::IPPROTO_TCP, libc::TCP_KEEPIDLE, 5)?;
    set(stream, libc::IPPROTO_TCP, libc::TCP_KEEPINTVL, 5)?;
    set(stream, libc::IPPROTO_TCP, libc::TCP_KEEPCNT, 3)?;
    // Where data is on its way, no questions are asked: this ends it then.
    set(stream, libc::IPPROTO_TCP, libc::TCP_USER_TIMEOUT, 20_000)
}

fn set(stream: &TcpStream, level: i32, option: i32, value: i32) -> Result<()> {
    let len = size_of::<i32>() as libc::socklen_t;
    // SAFETY: the pointer is to an int of ours, which these options are, and the length is its own.
    let result = unsafe {
        libc::setsockopt(
            stream.as_raw_fd(),
            level,
            option,
            (&raw const value).cast(),
            len,
        )
    };
    if result < 0 {
        return Err(last_error("setsockopt"));
    }
    Ok(())
}

fn last_error(operation: &'static str) -> Error {
    system(operation, &std::io::Error::last_os_error())
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn a_socket_is_ready_when_there_is_something() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut a = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (b, _) = listener.accept().unwrap();
        enable_keepalive(&a).unwrap();
        let read = Ready {
            read: true,
            write: false,
        };
        let ready = |timeout_ms| poll(&[(b.as_fd(), read)], timeout_ms).unwrap()[0].read;
        assert!(!ready(1));
        a.write_all(b"x").unwrap();
        assert!(ready(10_000));
    }
}
