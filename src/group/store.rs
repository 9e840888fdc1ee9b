//! A rank's connection to the store.

use std::net::{SocketAddr, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::endpoint::{Deadline, system};
use crate::group::client::{StoreClient, Watcher};
use crate::group::connect::{attempt, connect};
use crate::group::exchange::{ExchangeStore, ExchangeWait, LauncherExchange};
use crate::group::launch_environment::LauncherStore;
use crate::group::message::{LIST_BYTES_MAX, Message, VALUE_BYTES_MAX};
use crate::group::pmix::PmixStore;
use crate::group::rendezvous::Rendezvous;
use crate::group::store_server::Host;
use crate::group::torch_store::TorchExchange;
use crate::group::{LaunchEnvironment, Token};
use crate::{Error, Result, StateKind};

/// What a value that is gathered begins with: all of it follows, or its length and a part of it.
const WHOLE: u8 = 0;
const PART: u8 = 1;
/// Bytes in front of a part.
const PART_HEADER: usize = 1 + size_of::<u64>();

/// The store by which the processes of a group exchange data: values under keys, barriers, gatherings. Rank 0 hosts it, in a thread of its
/// own.
///
/// Every call has a deadline, and ends at once with [`Error::Rank`] when a rank ends without having left. Dropping a store without
/// [`Store::leave`] counts as such an end. Rank 0 has a connection, and with it a file descriptor, for every rank: a thousand need a
/// higher limit (`ulimit -n`) than many systems begin with. Calls may come from several threads; barriers and gatherings from one at a
/// time.
#[derive(Debug)]
pub struct Store {
    in_barrier: Mutex<()>,
    in_gather: Mutex<()>,
    in_shrink: Mutex<()>,
    /// The token that counts.
    token: Token,
    client: Arc<StoreClient>,
    /// The store of the launcher.
    pub(super) launcher: Option<LauncherExchange>,
    reader: Option<JoinHandle<()>>,
    /// Dropped after the connection of this rank: the host's thread sees which connections end.
    host: Option<Host>,
}

impl Store {
    /// Connects to the store of the group, and waits until it is there. Rank 0 starts the store in this call.
    ///
    /// # Errors
    /// [`Error::Timeout`] if no process answers there; [`Error::State`] if the store has another token or size, or has seen this rank before;
    /// [`Error::Malformed`] if the process that answers is not a store, is a store of another version, or does not know the token;
    /// [`Error::System`] if rank 0 cannot listen at its address, and those of [`LaunchEnvironment::from_env`]'s job folder.
    pub fn join(environment: &LaunchEnvironment, timeout: Duration) -> Result<Store> {
        Store::join_with(environment, timeout, Box::new(IgnoreEvents))
    }

    /// [`Store::join`], with a watcher that gets what the store sends without a request.
    pub(super) fn join_with(
        environment: &LaunchEnvironment,
        timeout: Duration,
        watcher: Box<dyn Watcher>,
    ) -> Result<Store> {
        let deadline = Deadline::new("join of the group's store", timeout);
        let (rendezvous, number) = environment.rendezvous.of_next_join();
        let environment = &LaunchEnvironment {
            rendezvous,
            ..environment.clone()
        };
        let host = (environment.rank == 0)
            .then(|| {
                Host::start(
                    environment.size,
                    &environment.rendezvous,
                    &environment.token,
                )
            })
            .transpose()?;
        let (stream, token) = match &host {
            Some(host) => {
                let (address, token) = host.store_address();
                let stream = attempt(environment, address, &token, &deadline)?;
                (stream, token)
            }
            None => connect(environment, &deadline)?,
        };
        let (rank, size) = (environment.rank, environment.size);
        let mut store = Store::over(stream, (rank, size), token, host, watcher)?;
        store.launcher = environment.launcher.as_ref().map(|launcher| {
            let exchange: Box<dyn ExchangeStore> = match launcher {
                LauncherStore::Pmix => Box::new(PmixStore { rank, size }),
                LauncherStore::Torch(store) => Box::new(TorchExchange::new(store)),
            };
            LauncherExchange::new(exchange, &store.token)
        });
        environment.rendezvous.joined(number);
        Ok(store)
    }

    /// Over a connection that has been let in.
    fn over(
        stream: TcpStream,
        (rank, size): (u32, u32),
        token: Token,
        host: Option<Host>,
        watcher: Box<dyn Watcher>,
    ) -> Result<Store> {
        stream
            .set_read_timeout(None)
            .map_err(|error| system("setsockopt", &error))?;
        let from = stream
            .try_clone()
            .map_err(|error| system("dup of a socket", &error))?;
        let client = Arc::new(StoreClient::new(rank, size, stream));
        let reading = Arc::clone(&client);
        let reader = std::thread::Builder::new()
            .name("doorbell-group".into())
            .stack_size(512 << 10)
            .spawn(move || reading.read(from, &*watcher))
            .map_err(|error| system("start of a thread", &error))?;
        Ok(Store {
            in_barrier: Mutex::default(),
            in_gather: Mutex::default(),
            in_shrink: Mutex::default(),
            token,
            client,
            launcher: None,
            reader: Some(reader),
            host,
        })
    }

    pub(super) fn client(&self) -> &StoreClient {
        &self.client
    }

    /// The rank of this process.
    pub fn rank(&self) -> u32 {
        self.client.rank()
    }

    /// The number of ranks.
    pub fn size(&self) -> u32 {
        self.client.size()
    }

    /// Stores a value of up to 64 KiB under a key of up to 256 bytes, and replaces an older one.
    ///
    /// # Errors
    /// [`Error::Range`] for a longer one; [`Error::State`] if the store has no room; [`Error::Rank`], [`Error::Timeout`].
    pub fn set(&self, key: &[u8], value: &[u8], timeout: Duration) -> Result<()> {
        let deadline = Deadline::new("set of a value in the group's store", timeout);
        let request = |id| Message::Set { id, key, value };
        self.client.request(&deadline, request).map(drop)
    }

    /// The value under a key; waits until some rank has set it.
    ///
    /// # Errors
    /// [`Error::Timeout`], [`Error::Rank`], [`Error::Range`] for a key of more than 256 bytes.
    pub fn get(&self, key: &[u8], timeout: Duration) -> Result<Vec<u8>> {
        let deadline = Deadline::new("wait for a value in the group's store", timeout);
        let request = |id| Message::Get { id, key };
        self.client.request(&deadline, request)
    }

    /// The value under a key, which is removed; waits until some rank has set it. If the time is over, a value that comes just then may be lost.
    ///
    /// # Errors
    /// As [`Store::get`].
    pub(super) fn take(&self, key: &[u8], timeout: Duration) -> Result<Vec<u8>> {
        let deadline = Deadline::new("wait for a value in the group's store", timeout);
        let request = |id| Message::Take { id, key };
        self.client.request(&deadline, request)
    }

    /// Waits until every rank has called this.
    ///
    /// # Errors
    /// [`Error::Timeout`]; [`Error::Rank`] if a rank has ended, or has left; [`Error::State`] if another thread of this rank is in one.
    pub fn barrier(&self, timeout: Duration) -> Result<()> {
        let _turn = turn(&self.in_barrier, "barrier of the group")?;
        let deadline = Deadline::new("barrier of the group", timeout);
        let request = |id| Message::Barrier { id };
        self.client.request(&deadline, request).map(drop)
    }

    /// Gives every rank the values of all, by rank. They may have any lengths. What is longer than 64 KiB, or all values together longer than 16 MiB,
    /// takes several exchanges with the store.
    ///
    /// # Errors
    /// As [`Store::barrier`].
    pub fn gather(&self, value: &[u8], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        let _turn = turn(&self.in_gather, "gathering of the group")?;
        let deadline = Deadline::new("gathering of the group", timeout);
        let exchange = |piece: &[u8]| {
            let request = |id| Message::Gather { id, value: piece };
            self.client.request(&deadline, request)
        };
        // As long as the answer with the pieces of all ranks has room for: each has its length of four bytes before it.
        let most = (LIST_BYTES_MAX / self.size() as usize - 4).min(VALUE_BYTES_MAX);
        // The first one says whether it is all of the value, in a byte. If not, the length of the value comes next.
        let (head, begin, mut rest) = match value.len() < most {
            true => (vec![WHOLE], value, &value[value.len()..]),
            false => {
                let (begin, rest) = value.split_at(most - PART_HEADER);
                let mut head = vec![PART];
                head.extend((value.len() as u64).to_le_bytes());
                (head, begin, rest)
            }
        };
        let list = exchange(&[&head, begin].concat())?;
        let (mut values, mut lens) = (Vec::new(), Vec::new());
        for value in Message::split_list(&list, self.size())? {
            let (len, piece) = match value.split_first() {
                Some((&WHOLE, all)) => (Some(all.len() as u64), all),
                Some((&PART, part)) => match part.split_first_chunk() {
                    Some((len, part)) => (Some(u64::from_le_bytes(*len)), part),
                    None => (None, part),
                },
                _ => (None, value),
            };
            let len = len.ok_or_else(|| malformed("a value does not say how long it is"))?;
            lens.push(len);
            values.push(piece.to_vec());
        }
        let longest = lens.iter().copied().max().unwrap_or(0);
        let mut had = (most - PART_HEADER) as u64;
        let is_cut = lens
            .iter()
            .zip(&values)
            .any(|(len, value)| value.len() as u64 != *len);
        while is_cut && had < longest {
            let (piece, left) = rest.split_at(rest.len().min(most));
            rest = left;
            let list = exchange(piece)?;
            let pieces = Message::split_list(&list, self.size())?;
            for (value, piece) in values.iter_mut().zip(pieces) {
                value.extend_from_slice(piece);
            }
            had += most as u64;
        }
        let is_whole = |(value, len): (&Vec<u8>, &u64)| value.len() as u64 == *len;
        match values.iter().zip(&lens).all(is_whole) {
            true => Ok(values),
            false => Err(malformed("a value is not as long as it says")),
        }
    }

    /// Gives a value to each other rank, by rank, and returns what they have for this one; `None` if the launcher's store cannot be used, in which all ranks agree. All ranks
    /// of the group call this under the same name, which is used once.
    pub(super) fn exchange(
        &self,
        name: &str,
        values: &[(u32, Vec<u8>)],
        timeout: Duration,
    ) -> Result<Option<Vec<Vec<u8>>>> {
        let Some(launcher) = &self.launcher else {
            return Ok(None);
        };
        let deadline = Deadline::new("exchange of addresses in the group", timeout);
        let wait = ExchangeWait {
            client: &self.client,
            deadline: &deadline,
        };
        launcher.exchange(name, values, &wait)
    }

    /// Removes what this rank has put for an [`exchange`](Store::exchange), where the launcher's store can remove it. All ranks have read what is for them.
    pub(super) fn forget_exchange(&self, name: &str, values: &[(u32, Vec<u8>)]) {
        if let Some(launcher) = &self.launcher {
            launcher.forget(name, values, &self.client);
        }
    }

    /// How many exchanges of this rank went through the store of its launcher (PMIx or torchrun): each is of the addresses of a communicator's or matcher's queues to all ranks.
    pub fn launcher_exchanges(&self) -> u32 {
        self.launcher.as_ref().map_or(0, LauncherExchange::count)
    }

    /// Waits until every rank has called this with the same key.
    pub(super) fn meet(&self, key: &[u8], timeout: Duration) -> Result<()> {
        let deadline = Deadline::new("meeting of the group", timeout);
        let value = &[];
        let request = |id| Message::Meet { id, key, value };
        self.client.request(&deadline, request).map(drop)
    }

    /// A store of the ranks that are still here, once all of them have called this; and the numbers that they have in this store, by their new ones. Rank 0
    /// hosts the new store, too. A rank that ends while others call has no part in it: the others meet once more, and each time there is a new watcher.
    ///
    /// # Errors
    /// [`Error::Rank`] if rank 0 has ended; [`Error::Timeout`] if a rank that is here does not call, or ends before it has come to the new store; [`Error::State`]
    /// if another thread of this rank is in it.
    pub(super) fn shrink_with<W: Watcher + 'static>(
        &self,
        timeout: Duration,
        mut watcher: impl FnMut() -> W,
    ) -> Result<(Store, Vec<u32>)> {
        let _turn = turn(&self.in_shrink, "shrink of the group")?;
        let deadline = Deadline::new("shrink of the group", timeout);
        let mut failed = None;
        loop {
            let (store, survivors) = self.meet_survivors(&deadline, Box::new(watcher()))?;
            drop(failed.take());
            // A rank that ended before it had come would never be missed.
            match store.barrier(deadline.left()?) {
                // It had come. No rank is through the barrier, so all of them are back here. The store stays until they are: one that has not come to it
                // yet, or has not read of the end, must not take it for the end of rank 0.
                Err(Error::Rank { rank, .. }) if rank != 0 => failed = Some(store),
                met => return met.map(|()| (store, survivors)),
            }
        }
    }

    /// A store as [`Store::shrink_with`] makes it, to which not all have come yet.
    pub(super) fn meet_survivors(
        &self,
        deadline: &Deadline,
        watcher: Box<dyn Watcher>,
    ) -> Result<(Store, Vec<u32>)> {
        // The socket comes first, so that it is there when the others hear of it.
        let host = self.host.as_ref();
        let listener = host.map(Host::listen_for_another).transpose()?;
        let port = match &listener {
            Some(listener) => {
                let address = listener.local_addr();
                address
                    .map_err(|error| system("getsockname", &error))?
                    .port()
            }
            None => 0,
        };
        let value = port.to_le_bytes();
        let request = |id| Message::Shrink { id, value: &value };
        let list = self.client.request_of_survivor(deadline, request)?;
        let (survivors, port) = parse_survivors(&list)?;
        let own = survivors.iter().position(|rank| *rank == self.rank());
        let rank = own.ok_or_else(|| malformed("this rank is not among its ranks"))? as u32;
        let size = survivors.len() as u32;
        let host = listener
            .map(|listener| Host::serve(size, listener, self.token.clone(), None))
            .transpose()?;
        let address = match &host {
            Some(host) => host.store_address().0,
            None => SocketAddr::new(self.client.store_address()?.ip(), port),
        };
        let environment = LaunchEnvironment {
            rank,
            size,
            rendezvous: Rendezvous::address(address.to_string())?,
            token: self.token.clone(),
            // Its ranks are others than those of the launcher.
            launcher: None,
        };
        let stream = attempt(&environment, address, &self.token, deadline)?;
        let store = Store::over(stream, (rank, size), self.token.clone(), host, watcher)?;
        Ok((store, survivors))
    }

    /// Which rank has failed the group, if one has.
    pub fn failure(&self) -> Option<Error> {
        self.client.failure()
    }

    /// Leaves the group: from now on the end of this process is not a failure. Rank 0 hosts the store, so it waits until all others have
    /// left.
    ///
    /// # Errors
    /// [`Error::Rank`] if a rank failed before; [`Error::Timeout`] at rank 0 if another rank does not leave in time; that rank then finds no store.
    pub fn leave(self, timeout: Duration) -> Result<()> {
        self.client
            .leave(&Deadline::new("leave of the group", timeout))
    }

    /// Ends the connection, and with it every wait.
    pub(super) fn abandon(&self) {
        self.client.hang_up();
    }
}

fn malformed(reason: &str) -> Error {
    Error::Malformed {
        what: "answer of the group's store",
        reason: reason.into(),
    }
}

/// The ranks of a [`Message::Shrink`]'s answer, and the port of their store.
fn parse_survivors(list: &[u8]) -> Result<(Vec<u32>, u16)> {
    let values = Message::split_list(list, 2)?;
    let (ranks, rest) = values[0].as_chunks::<4>();
    let port = <[u8; 2]>::try_from(values[1]);
    match port {
        Ok(port) if rest.is_empty() => {
            let ranks = ranks.iter().map(|rank| u32::from_le_bytes(*rank));
            Ok((ranks.collect(), u16::from_le_bytes(port)))
        }
        _ => Err(malformed("it has neither ranks nor a port")),
    }
}

/// The right to be in a call for which the store counts ranks: two calls of one rank would be a fault of the rank.
fn turn<'a>(calls: &'a Mutex<()>, operation: &'static str) -> Result<MutexGuard<'a, ()>> {
    match calls.try_lock() {
        Ok(turn) => Ok(turn),
        Err(TryLockError::Poisoned(poisoned)) => Ok(poisoned.into_inner()),
        Err(TryLockError::WouldBlock) => {
            let reason = "another thread of this rank is in it";
            Err(Error::state(StateKind::Busy, operation, reason))
        }
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        self.client.hang_up();
        if let Some(reader) = self.reader.take() {
            let _ = reader.join();
        }
    }
}

pub(super) struct IgnoreEvents;

impl Watcher for IgnoreEvents {
    fn message(&self, _: &StoreClient, _: u32, _: &[u8]) {}

    fn failing(&self, _: &StoreClient, _: u32) {}

    fn failed(&self, _: &StoreClient) {}
}
