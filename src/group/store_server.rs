//! The store's thread: its sockets, and the process at the other end of each.

use std::collections::{BTreeMap, VecDeque};
use std::io::ErrorKind;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use crate::Result;
use crate::endpoint::system;
use crate::group::connection::{Connection, ConnectionStage};
use crate::group::handshake::{self, Handshake, HandshakeResult, PROOF_BYTES};
use crate::group::key_value_store::{KeyValueStore, RankState};
use crate::group::message::Message;
use crate::group::rendezvous::{Announcement, Rendezvous};
use crate::group::socket::{Ready, enable_keepalive, make_room, poll};
use crate::group::token::{Token, nonce};

/// How long a process that connects may take to prove that it has the token.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// Connections, beyond one for each rank, that may be in the middle of their handshake. The oldest has to go for one more.
const UNAUTHENTICATED_MAX: usize = 64;
/// The most that is kept for a rank that does not read it. Beyond that, the rank is given up.
const BACKLOG_BYTES_MAX: usize = 64 << 20;

/// The store of a group, in a thread of rank 0.
#[derive(Debug)]
pub(super) struct Host {
    address: SocketAddr,
    token: Token,
    /// The thread ends when this is dropped.
    stop: Option<UnixStream>,
    thread: Option<JoinHandle<()>>,
    _file: Option<Announcement>,
}

impl Host {
    /// Starts the store.
    ///
    /// # Errors
    /// [`Error::System`](crate::Error::System) if the address is taken; those of [`Rendezvous::listen`].
    pub(super) fn start(size: u32, rendezvous: &Rendezvous, token: &Token) -> Result<Host> {
        let (listener, token, file) = rendezvous.listen(token)?;
        Host::serve(size, listener, token, file)
    }

    /// A socket at the address of this store, with a port of its own, for the store of a further group.
    ///
    /// # Errors
    /// [`Error::System`](crate::Error::System).
    pub(super) fn listen_for_another(&self) -> Result<TcpListener> {
        let bound = TcpListener::bind((self.address.ip(), 0));
        bound.map_err(|error| system("bind for the group's store", &error))
    }

    /// Starts the store at a socket.
    ///
    /// # Errors
    /// [`Error::System`](crate::Error::System).
    pub(super) fn serve(
        size: u32,
        listener: TcpListener,
        token: Token,
        file: Option<Announcement>,
    ) -> Result<Host> {
        let set = |error: std::io::Error| system("set-up of the group's store", &error);
        listener.set_nonblocking(true).map_err(set)?;
        make_room(&listener)?;
        let address = listener.local_addr().map_err(set)?;
        let (stop, stopped) = UnixStream::pair().map_err(set)?;
        let mut server = Server {
            listener,
            token: token.clone(),
            store: KeyValueStore::new(size),
            connections: BTreeMap::new(),
            rank_connections: vec![None; size as usize],
            kept: BTreeMap::new(),
            next: 0,
            ending: Vec::new(),
        };
        let thread = std::thread::Builder::new()
            .name("doorbell-store".into())
            .spawn(move || server.run(&stopped))
            .map_err(|error| system("start of the group's store", &error))?;
        Ok(Host {
            address,
            token,
            stop: Some(stop),
            thread: Some(thread),
            _file: file,
        })
    }

    /// Where rank 0 itself finds it, and the token that counts.
    pub(super) fn store_address(&self) -> (SocketAddr, Token) {
        let mut address = self.address;
        if address.ip().is_unspecified() {
            address.set_ip(match address {
                SocketAddr::V4(_) => std::net::Ipv4Addr::LOCALHOST.into(),
                SocketAddr::V6(_) => std::net::Ipv6Addr::LOCALHOST.into(),
            });
        }
        (address, self.token.clone())
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Messages that wait, and their bytes.
type Backlog = (VecDeque<Arc<[u8]>>, usize);

/// All connections.
struct Server {
    listener: TcpListener,
    token: Token,
    store: KeyValueStore,
    connections: BTreeMap<u64, Connection>,
    /// Which connection is which rank.
    rank_connections: Vec<Option<u64>>,
    /// What came for ranks that have not come, and how much it is.
    kept: BTreeMap<u32, Backlog>,
    next: u64,
    /// Connections that are about to end.
    ending: Vec<u64>,
}

impl Server {
    fn run(&mut self, stopped: &UnixStream) {
        let mut scratch = vec![0; 64 << 10];
        loop {
            let read = Ready {
                read: true,
                write: false,
            };
            let mut waits = vec![(stopped.as_fd(), read), (self.listener.as_fd(), read)];
            let mut names = Vec::with_capacity(self.connections.len());
            for (&name, connection) in &self.connections {
                let write = !connection.output.is_empty();
                waits.push((connection.stream.as_fd(), Ready { read: true, write }));
                names.push(name);
            }
            // Strangers are shown out by the clock.
            let Ok(ready) = poll(&waits, 1000) else {
                // No memory for a moment, or a limit: the ranks' own deadlines end what does not get better.
                std::thread::sleep(Duration::from_millis(10));
                continue;
            };
            if ready[0].read {
                // Rank 0 ends. What was said to the others last is in their sockets.
                return;
            }
            for (&name, ready) in names.iter().zip(&ready[2..]) {
                if ready.write {
                    self.flush(name);
                }
                if ready.read {
                    self.read(name, &mut scratch);
                }
            }
            if ready[1].read {
                self.accept();
            }
            self.drop_unauthenticated();
        }
    }

    fn accept(&mut self) {
        loop {
            let stream = match self.listener.accept() {
                Ok((stream, _)) => stream,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(_) => {
                    // Too many open files, perhaps: processes that want to connect keep waiting, and the next turn must not come at once.
                    std::thread::sleep(Duration::from_millis(10));
                    return;
                }
            };
            if stream.set_nonblocking(true).is_err() || enable_keepalive(&stream).is_err() {
                continue;
            }
            let mut strangers = self
                .connections
                .iter()
                .filter(|(_, connection)| connection.is_unauthenticated());
            let oldest = strangers.next().map(|(&name, _)| name);
            if strangers.count() + 1 >= UNAUTHENTICATED_MAX + self.rank_connections.len() {
                oldest.map(|name| self.connections.remove(&name));
            }
            self.connections.insert(self.next, Connection::new(stream));
            self.next += 1;
        }
    }

    fn drop_unauthenticated(&mut self) {
        self.connections.retain(|_, connection| {
            !connection.is_unauthenticated() || connection.came.elapsed() < HANDSHAKE_TIMEOUT
        });
    }

    fn flush(&mut self, name: u64) {
        let alive = self
            .connections
            .get_mut(&name)
            .is_none_or(Connection::flush);
        if !alive {
            self.end(name);
        }
    }

    /// A connection ended, or is not to be listened to any longer.
    fn end(&mut self, name: u64) {
        self.ending.push(name);
        self.settle();
    }

    fn read(&mut self, name: u64, scratch: &mut [u8]) {
        let Some(connection) = self.connections.get_mut(&name) else {
            return;
        };
        let open = connection.fill(scratch);
        let mut input = std::mem::take(&mut connection.input);
        let fine = self.listen(name, &mut input);
        if let Some(connection) = self.connections.get_mut(&name) {
            connection.input = input;
        }
        // Messages that came before the end of the connection are handled first.
        if !open || !fine {
            self.end(name);
        }
    }

    /// Takes the whole messages out of what was read. Whether there was sense in it.
    fn listen(&mut self, name: u64, input: &mut Vec<u8>) -> bool {
        let mut at = 0;
        let fine = loop {
            let Some(connection) = self.connections.get_mut(&name) else {
                break true;
            };
            let rest = &input[at..];
            match connection.stage {
                ConnectionStage::Handshake => {
                    // The head comes first: another version may say less behind it.
                    let head = rest.first_chunk().map(handshake::check_head);
                    if let Some(Err(_)) = head {
                        connection.stage = ConnectionStage::Going;
                        connection.push(Arc::new(handshake::head()));
                        break connection.flush();
                    }
                    let Some(bytes) = rest.first_chunk::<{ Handshake::BYTES }>() else {
                        break true;
                    };
                    let (Ok(handshake), Ok(challenge)) = (Handshake::from_bytes(bytes), nonce())
                    else {
                        break false;
                    };
                    at += Handshake::BYTES;
                    connection.stage = ConnectionStage::Proof {
                        handshake,
                        challenge,
                    };
                    connection.push(Arc::new(handshake::challenge(&challenge)));
                    if !connection.flush() {
                        break false;
                    }
                }
                ConnectionStage::Proof {
                    handshake,
                    challenge,
                } => {
                    let Some(proof) = rest.first_chunk::<PROOF_BYTES>() else {
                        break true;
                    };
                    at += PROOF_BYTES;
                    let verdict = self.verify_handshake(&handshake, &challenge, proof);
                    self.admit(name, verdict, &handshake, &challenge);
                }
                ConnectionStage::Rank(rank) => match Message::parse(rest) {
                    Ok(Some((message, len))) => {
                        let taken = self.store.take(rank, &message);
                        at += len;
                        self.settle();
                        if taken.is_err() {
                            break false;
                        }
                    }
                    Ok(None) => break true,
                    Err(_) => break false,
                },
                ConnectionStage::Going => {
                    at = input.len();
                    break true;
                }
            }
        };
        input.drain(..at);
        fine
    }

    fn verify_handshake(
        &self,
        handshake: &Handshake,
        challenge: &[u8; 32],
        proof: &[u8; PROOF_BYTES],
    ) -> HandshakeResult {
        if !handshake.is_proof(&self.token, challenge, proof) {
            return HandshakeResult::Token;
        }
        if handshake.size != self.store.size() {
            return HandshakeResult::Size(self.store.size());
        }
        match self.store.rank_state(handshake.rank) {
            None => HandshakeResult::NoRank,
            Some(RankState::Absent) => HandshakeResult::Welcome,
            Some(RankState::Here) => HandshakeResult::Twice,
            Some(RankState::Left | RankState::Lost) => HandshakeResult::Ended,
        }
    }

    fn admit(
        &mut self,
        name: u64,
        verdict: HandshakeResult,
        handshake: &Handshake,
        challenge: &[u8; 32],
    ) {
        let bytes = verdict.to_bytes(&self.token, handshake, challenge);
        let Some(connection) = self.connections.get_mut(&name) else {
            return;
        };
        connection.push(Arc::new(bytes));
        if verdict == HandshakeResult::Welcome {
            connection.stage = ConnectionStage::Rank(handshake.rank);
            self.rank_connections[handshake.rank as usize] = Some(name);
            let (kept, _) = self.kept.remove(&handshake.rank).unwrap_or_default();
            kept.into_iter().for_each(|bytes| connection.push(bytes));
            self.store.join(handshake.rank);
            self.settle();
        } else {
            connection.stage = ConnectionStage::Going;
        }
        self.flush(name);
    }

    /// Sends what the store has to send, and ends what is to end, until there is nothing of either: the end of one is news to the others,
    /// and sending it may find that another has gone, too.
    fn settle(&mut self) {
        loop {
            while let Some(name) = self.ending.pop() {
                let connection = self.connections.remove(&name);
                if let Some(ConnectionStage::Rank(rank)) =
                    connection.map(|connection| connection.stage)
                {
                    self.rank_connections[rank as usize] = None;
                    self.store.end(rank);
                }
            }
            let parcels = self.store.drain_outgoing();
            if parcels.is_empty() {
                return;
            }
            let mut touched = Vec::with_capacity(parcels.len());
            for (rank, bytes) in parcels {
                touched.extend(self.hand_over(rank, bytes));
            }
            for name in touched {
                if !self
                    .connections
                    .get_mut(&name)
                    .is_none_or(Connection::flush)
                {
                    self.ending.push(name);
                }
            }
        }
    }

    /// Puts a message where its rank gets it from; the connection that it is then to be sent over.
    fn hand_over(&mut self, rank: u32, bytes: Arc<[u8]>) -> Option<u64> {
        let seat = self.rank_connections[rank as usize];
        if let Some(connection) = seat.and_then(|name| self.connections.get_mut(&name)) {
            connection.push(bytes);
            if connection.backlog_bytes > BACKLOG_BYTES_MAX {
                self.ending.extend(seat);
            }
            return seat;
        }
        if self.store.rank_state(rank) == Some(RankState::Absent) {
            let (kept, backlog_bytes) = self.kept.entry(rank).or_default();
            *backlog_bytes += bytes.len();
            kept.push_back(bytes);
            if *backlog_bytes > BACKLOG_BYTES_MAX {
                // It cannot have all of it any more, so it cannot come any more.
                self.kept.remove(&rank);
                self.store.give_up(rank);
            }
        }
        None
    }
}
