//! Connects to a peer at a TCP address, to exchange addresses and to wait until both are ready.

use std::io::ErrorKind;
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::time::Duration;

use crate::endpoint::Address;
use crate::endpoint::deadline::{Deadline, RETRY, socket_error, system};
use crate::{Error, Result};

const MAGIC: [u8; 4] = *b"DBRV";
const VERSION: u16 = 1;
/// The longest message: addresses and keys are short, and a length from a stranger must not allocate much.
const MESSAGE_BYTES_MAX: u32 = 1 << 20;
/// How long a process that connects may take to send its handshake. Others wait behind it.
const PATIENCE: Duration = Duration::from_secs(2);

/// Waits for a peer at an address.
#[derive(Debug)]
pub struct Listener {
    socket: TcpListener,
}

impl Listener {
    /// Listens at `address`, such as `127.0.0.1:7471`; port 0 picks a free one.
    ///
    /// # Errors
    /// [`Error::System`]; [`Error::Malformed`] if `address` is not an address.
    pub fn bind(address: &str) -> Result<Listener> {
        let socket = TcpListener::bind(resolve(address)?)
            .map_err(|error| socket_error("bind", address, &error))?;
        socket
            .set_nonblocking(true)
            .map_err(|error| system("fcntl", &error))?;
        Ok(Listener { socket })
    }

    /// The address that it listens at.
    ///
    /// # Errors
    /// [`Error::System`].
    pub fn address(&self) -> Result<SocketAddr> {
        self.socket
            .local_addr()
            .map_err(|error| system("getsockname", &error))
    }

    /// Waits for a peer. Connections of other programs are rejected, so that a process that can reach the port cannot keep the
    /// peer out.
    ///
    /// # Errors
    /// [`Error::Timeout`] if no peer comes; [`Error::Malformed`] if only other programs came, or peers of another
    /// version.
    pub fn accept(&self, timeout: Duration) -> Result<Channel> {
        let deadline = Deadline::new("accept", timeout);
        let mut stranger = None;
        loop {
            let left = match deadline.left() {
                Ok(left) => left,
                Err(passed) => return Err(stranger.unwrap_or(passed)),
            };
            match self.socket.accept() {
                Ok((stream, _)) => match Channel::new(stream, &deadline.within(PATIENCE)) {
                    Ok(channel) => return Ok(channel),
                    // Says nothing that the end of this call would not say.
                    Err(Error::Timeout { .. }) => {}
                    Err(error) => stranger = Some(error),
                },
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    std::thread::sleep(left.min(RETRY));
                }
                // It left before it was accepted.
                Err(error) if error.kind() == ErrorKind::ConnectionAborted => {}
                Err(error) => return Err(system("accept", &error)),
            }
        }
    }
}

/// A connection with a peer, for messages of up to 1 MiB. A call that ends with an error leaves it in an unknown state: drop it then.
#[derive(Debug)]
pub struct Channel {
    stream: TcpStream,
}

impl Channel {
    /// Connects to the peer that listens at `address`, and retries until `timeout`.
    ///
    /// # Errors
    /// [`Error::Timeout`] if no process listens; [`Error::Malformed`] if the process that listens is not a peer, or is a
    /// peer of another version.
    pub fn connect(address: &str, timeout: Duration) -> Result<Channel> {
        let deadline = Deadline::new("connect", timeout);
        let resolved = resolve(address)?;
        loop {
            match TcpStream::connect_timeout(&resolved, deadline.left()?) {
                Ok(stream) => return Channel::new(stream, &deadline),
                Err(error) if error.kind() == ErrorKind::ConnectionRefused => deadline.nap()?,
                Err(error)
                    if matches!(error.kind(), ErrorKind::TimedOut | ErrorKind::WouldBlock) =>
                {
                    deadline.nap()?;
                }
                Err(error) => return Err(socket_error("connect", address, &error)),
            }
        }
    }

    /// The address of this end of the connection: that of the interface by which the peer is reached.
    ///
    /// # Errors
    /// [`Error::System`].
    pub fn local_address(&self) -> Result<SocketAddr> {
        let address = self.stream.local_addr();
        address.map_err(|error| system("getsockname", &error))
    }

    fn new(stream: TcpStream, deadline: &Deadline) -> Result<Channel> {
        stream
            .set_nonblocking(false)
            .map_err(|error| system("fcntl", &error))?;
        stream
            .set_nodelay(true)
            .map_err(|error| system("setsockopt", &error))?;
        let mut channel = Channel { stream };
        let mut hello = [0; 6];
        hello[..4].copy_from_slice(&MAGIC);
        hello[4..].copy_from_slice(&VERSION.to_le_bytes());
        channel.put(&hello, deadline)?;
        let mut theirs = [0; 6];
        channel.get(&mut theirs, deadline)?;
        let bad = |reason| {
            Err(Error::Malformed {
                what: "handshake of a peer",
                reason,
            })
        };
        let version = u16::from_le_bytes([theirs[4], theirs[5]]);
        if theirs[..4] != MAGIC {
            bad("it is not a peer of this library".into())
        } else if version != VERSION {
            bad(format!(
                "it has version {version}, this library supports version {VERSION}"
            ))
        } else {
            Ok(channel)
        }
    }

    fn put(&mut self, bytes: &[u8], deadline: &Deadline) -> Result<()> {
        deadline.write_all(&self.stream, bytes, "send to a peer")
    }

    fn get(&mut self, bytes: &mut [u8], deadline: &Deadline) -> Result<()> {
        deadline.read_exact(&self.stream, bytes, "receive from a peer")
    }

    /// Sends a message.
    ///
    /// # Errors
    /// [`Error::Range`] for one of more than 1 MiB; [`Error::Timeout`], [`Error::System`].
    pub fn send(&mut self, message: &[u8], timeout: Duration) -> Result<()> {
        let deadline = Deadline::new("send to a peer", timeout);
        let max = u64::from(MESSAGE_BYTES_MAX);
        let len = u32::try_from(message.len())
            .ok()
            .filter(|len| *len <= MESSAGE_BYTES_MAX);
        let len = len.ok_or(Error::Range {
            argument: "message",
            value: message.len() as u64,
            min: 0,
            max,
        })?;
        self.put(&len.to_le_bytes(), &deadline)?;
        self.put(message, &deadline)
    }

    /// Receives a message.
    ///
    /// # Errors
    /// [`Error::Timeout`]; [`Error::State`] if the peer has gone; [`Error::Malformed`] for a length over 1 MiB.
    pub fn receive(&mut self, timeout: Duration) -> Result<Vec<u8>> {
        let deadline = Deadline::new("receive from a peer", timeout);
        let mut len = [0; 4];
        self.get(&mut len, &deadline)?;
        let len = u32::from_le_bytes(len);
        if len > MESSAGE_BYTES_MAX {
            return Err(Error::Malformed {
                what: "message of a peer",
                reason: format!("its length is {len}"),
            });
        }
        let mut message = vec![0; len as usize];
        self.get(&mut message, &deadline)?;
        Ok(message)
    }

    /// Gives the peer a message and takes its own.
    ///
    /// # Errors
    /// As [`Channel::send`] and [`Channel::receive`].
    pub fn exchange(&mut self, message: &[u8], timeout: Duration) -> Result<Vec<u8>> {
        self.send(message, timeout)?;
        self.receive(timeout)
    }

    /// Gives the peer the address of an endpoint and takes that of its own.
    ///
    /// # Errors
    /// As [`Channel::exchange`], and those of [`Address::from_bytes`].
    pub fn exchange_addresses(&mut self, address: &Address, timeout: Duration) -> Result<Address> {
        Address::from_bytes(&self.exchange(&address.to_bytes(), timeout)?)
    }

    /// Waits until the peer is here, too.
    ///
    /// # Errors
    /// As [`Channel::exchange`].
    pub fn barrier(&mut self, timeout: Duration) -> Result<()> {
        self.exchange(&[], timeout).map(drop)
    }
}

pub(crate) fn resolve(address: &str) -> Result<SocketAddr> {
    let bad = |reason: String| Error::Malformed {
        what: "TCP address",
        reason,
    };
    let mut found = address
        .to_socket_addrs()
        .map_err(|error| bad(format!("`{address}`: {error}")))?;
    found
        .next()
        .ok_or_else(|| bad(format!("`{address}` names no host")))
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    const SOON: Duration = Duration::from_secs(20);

    #[test]
    fn messages_cross_and_a_peer_that_goes_is_noticed() {
        let listener = Listener::bind("127.0.0.1:0").unwrap();
        let address = listener.address().unwrap().to_string();
        let peer = std::thread::spawn(move || {
            let mut channel = Channel::connect(&address, SOON).unwrap();
            assert_eq!(channel.exchange(b"ping", SOON).unwrap(), b"pong");
            channel.barrier(SOON).unwrap();
        });
        let mut channel = listener.accept(SOON).unwrap();
        assert_eq!(channel.exchange(b"pong", SOON).unwrap(), b"ping");
        channel.barrier(SOON).unwrap();
        peer.join().unwrap();
        assert!(matches!(channel.receive(SOON), Err(Error::State { .. })));
        assert!(matches!(
            channel.send(&vec![0; 1 << 21], SOON),
            Err(Error::Range { .. })
        ));
    }

    fn is_timeout(error: &Error) -> bool {
        matches!(error, Error::Timeout { .. })
    }

    #[test]
    fn no_listener_a_stranger_and_another_version_give_different_errors() {
        let soon = Duration::from_millis(50);
        let listener = Listener::bind("127.0.0.1:0").unwrap();
        assert!(matches!(listener.accept(soon), Err(Error::Timeout { .. })));
        let address = listener.address().unwrap();
        let greet = |hello: &[u8], timeout| {
            let mut stranger = TcpStream::connect(address).unwrap();
            stranger.write_all(hello).unwrap();
            let result = listener.accept(timeout);
            drop(stranger);
            result.map(drop).unwrap_err()
        };
        // If this thread gets no processor for the whole timeout, it does not look at the stranger. That does not happen with all of
        // these timeouts.
        let error_after = |hello: &[u8]| {
            let times = [300, 3_000, 20_000].map(Duration::from_millis);
            let answers = times.into_iter().map(|timeout| greet(hello, timeout));
            let answer = answers.into_iter().find(|it| !is_timeout(it));
            answer.expect("the error names the stranger").to_string()
        };
        assert!(error_after(b"GET / HTTP").contains("not a peer"));
        assert!(error_after(b"DBRV\x09\x00").contains("version 9"));
        assert!(is_timeout(&greet(b"DBR", soon)));
        // A port that is taken and has no listener any more. Another process could take a free port at any moment.
        let closed = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = closed.local_addr().unwrap();
        let _caller = TcpStream::connect(address).unwrap();
        let _called = closed.accept().unwrap();
        drop(closed);
        assert!(matches!(
            Channel::connect(&address.to_string(), soon),
            Err(Error::Timeout { .. })
        ));
        assert!(matches!(
            Channel::connect("nowhere", soon),
            Err(Error::Malformed { .. })
        ));
    }

    #[test]
    fn strangers_that_come_first_do_not_keep_the_peer_out() {
        let listener = Listener::bind("127.0.0.1:0").unwrap();
        let address = listener.address().unwrap();
        let mut garbage = TcpStream::connect(address).unwrap();
        garbage.write_all(b"GET / HTTP").unwrap();
        let silent = TcpStream::connect(address).unwrap();
        let peer = std::thread::spawn(move || {
            let mut channel = Channel::connect(&address.to_string(), SOON).unwrap();
            channel.exchange(b"ping", SOON).unwrap()
        });
        let mut channel = listener.accept(SOON).unwrap();
        assert_eq!(channel.exchange(b"pong", SOON).unwrap(), b"ping");
        assert_eq!(peer.join().unwrap(), b"pong");
        drop((garbage, silent));
    }

    #[test]
    fn a_length_that_lies_allocates_nothing() {
        let listener = Listener::bind("127.0.0.1:0").unwrap();
        let address = listener.address().unwrap();
        let mut stranger = TcpStream::connect(address).unwrap();
        stranger.write_all(b"DBRV\x01\x00\xff\xff\xff\xff").unwrap();
        let mut channel = listener.accept(SOON).unwrap();
        assert!(matches!(
            channel.receive(SOON),
            Err(Error::Malformed { .. })
        ));
    }
}
