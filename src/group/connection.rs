//! One connection of the store.

use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::Instant;

use crate::group::handshake::Handshake;

/// The most that is read from a connection before others have their turn.
const TURN_BYTES: usize = 256 << 10;

/// How far a connection has come.
#[derive(Debug)]
pub(super) enum ConnectionStage {
    /// The peer has not sent its handshake yet.
    Handshake,
    /// It is to prove the token.
    Proof {
        handshake: Handshake,
        challenge: [u8; 32],
    },
    /// It is this rank.
    Rank(u32),
    /// It is to go once it has what is written to it.
    Going,
}

#[derive(Debug)]
pub(super) struct Connection {
    pub(super) stream: TcpStream,
    pub(super) stage: ConnectionStage,
    pub(super) came: Instant,
    pub(super) input: Vec<u8>,
    pub(super) output: VecDeque<Arc<[u8]>>,
    /// How much of the first of them is written.
    written: usize,
    pub(super) backlog_bytes: usize,
}

impl Connection {
    pub(super) fn new(stream: TcpStream) -> Connection {
        Connection {
            stream,
            stage: ConnectionStage::Handshake,
            came: Instant::now(),
            input: Vec::new(),
            output: VecDeque::new(),
            written: 0,
            backlog_bytes: 0,
        }
    }

    /// Whether it has not proven anything.
    pub(super) fn is_unauthenticated(&self) -> bool {
        !matches!(self.stage, ConnectionStage::Rank(_))
    }

    /// Takes something to be written.
    pub(super) fn push(&mut self, bytes: Arc<[u8]>) {
        self.backlog_bytes += bytes.len();
        self.output.push_back(bytes);
    }

    /// Writes what goes without waiting. Whether the connection still is.
    pub(super) fn flush(&mut self) -> bool {
        while let Some(first) = self.output.front() {
            match self.stream.write(&first[self.written..]) {
                Ok(0) => return false,
                Ok(count) => {
                    self.written += count;
                    if self.written == first.len() {
                        self.backlog_bytes -= first.len();
                        self.written = 0;
                        self.output.pop_front();
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return true,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => return false,
            }
        }
        !matches!(self.stage, ConnectionStage::Going)
    }

    /// Reads what is there, within a turn. Whether there may be more, later.
    pub(super) fn fill(&mut self, scratch: &mut [u8]) -> bool {
        let mut taken = 0;
        while taken < TURN_BYTES {
            match self.stream.read(scratch) {
                Ok(0) => return false,
                Ok(count) => {
                    taken += count;
                    // Bytes behind a refusal are ignored.
                    if !matches!(self.stage, ConnectionStage::Going) {
                        self.input.extend_from_slice(&scratch[..count]);
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return true,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => return false,
            }
        }
        true
    }
}
