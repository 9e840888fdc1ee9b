//! The deadline of a call that goes over a socket.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use crate::{Error, Result, StateKind};

/// How often a call looks whether its peer has come.
pub(crate) const RETRY: Duration = Duration::from_millis(5);

/// When an operation must have ended, and what it is called if it has not.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Deadline {
    operation: &'static str,
    at: Instant,
    timeout: Duration,
}

impl Deadline {
    /// From now on.
    pub(crate) fn new(operation: &'static str, timeout: Duration) -> Deadline {
        let now = Instant::now();
        // A time that is too far to be represented counts as a century: no caller waits longer.
        let at = now
            .checked_add(timeout)
            .unwrap_or(now + Duration::from_secs(3_153_600_000));
        Deadline {
            operation,
            at,
            timeout,
        }
    }

    /// For a part of the same operation, which may not take all of its time.
    pub(crate) fn within(&self, part: Duration) -> Deadline {
        Deadline {
            at: self.at.min(Instant::now() + part),
            ..*self
        }
    }

    /// The error once it has passed.
    pub(crate) fn passed(&self) -> Error {
        Error::Timeout {
            operation: self.operation,
            timeout: self.timeout,
        }
    }

    /// The time left, never zero.
    pub(crate) fn left(&self) -> Result<Duration> {
        let left = self.at.saturating_duration_since(Instant::now());
        if left.is_zero() {
            Err(self.passed())
        } else {
            Ok(left)
        }
    }

    /// A short sleep, before one more try.
    pub(crate) fn nap(&self) -> Result<()> {
        std::thread::sleep(self.left()?.min(RETRY));
        Ok(())
    }

    /// Writes all of it before the deadline.
    pub(crate) fn write_all(
        &self,
        mut stream: &TcpStream,
        bytes: &[u8],
        operation: &'static str,
    ) -> Result<()> {
        let mut put = 0;
        while put < bytes.len() {
            // Set anew for each piece: a peer that takes a byte at a time has the same deadline.
            let timed = stream.set_write_timeout(Some(self.left()?));
            match timed.and_then(|()| stream.write(&bytes[put..])) {
                Ok(0) => return Err(gone(operation)),
                Ok(count) => put += count,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(self.or_system(operation, &error)),
            }
        }
        Ok(())
    }

    /// Fills all of it before the deadline.
    pub(crate) fn read_exact(
        &self,
        mut stream: &TcpStream,
        bytes: &mut [u8],
        operation: &'static str,
    ) -> Result<()> {
        let mut got = 0;
        while got < bytes.len() {
            // Set anew for each piece: a peer that sends a byte at a time has the same deadline.
            let timed = stream.set_read_timeout(Some(self.left()?));
            match timed.and_then(|()| stream.read(&mut bytes[got..])) {
                Ok(0) => return Err(gone(operation)),
                Ok(count) => got += count,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(self.or_system(operation, &error)),
            }
        }
        Ok(())
    }

    fn or_system(&self, operation: &'static str, error: &std::io::Error) -> Error {
        match error.kind() {
            ErrorKind::WouldBlock | ErrorKind::TimedOut => self.passed(),
            ErrorKind::BrokenPipe | ErrorKind::ConnectionReset => gone(operation),
            _ => system(operation, error),
        }
    }
}

fn gone(operation: &'static str) -> Error {
    Error::state(StateKind::Disconnected, operation, "the peer has gone")
}

/// A socket call that the system refused.
pub(crate) fn system(operation: &'static str, error: &std::io::Error) -> Error {
    Error::System {
        operation,
        errno: error.raw_os_error().unwrap_or(libc::EIO),
    }
}

/// The error of a socket, with the address that the call was about.
pub(crate) fn socket_error(
    operation: &'static str,
    address: &str,
    error: &std::io::Error,
) -> Error {
    Error::Socket {
        operation,
        address: address.to_owned(),
        errno: error.raw_os_error().unwrap_or(libc::EIO),
    }
}
