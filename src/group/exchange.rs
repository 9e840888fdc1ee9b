//! Exchange of addresses through the store of the job's launcher: every rank puts values for all others, all meet at a fence, and each gets those for itself. A rank puts the
//! values for some neighbouring ranks under one key, so that a launcher's store has to hold few keys.
//!
//! Before the fence all ranks meet in the group's own store. A launcher's fence names no rank that has left or ended, and cannot be taken back: so a rank goes to it only when all
//! ranks are known to come. What they say there also decides together whether the launcher's store is used: if one rank cannot, none does.
//!
//! Once all ranks have read their values, each removes what it has put, if the launcher's store can.
//!
//! A value goes with a proof that its rank has the token: strangers may reach a launcher's store.
//!
//! [`Store::gather`](crate::Store::gather) does not use it: the group's own store gives a rank the values of all in one answer, a launcher's needs a request for each.

use std::fmt;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::endpoint::Deadline;
use crate::group::client::StoreClient;
use crate::group::message::Message;
use crate::group::token::{Token, nonce};
use crate::{Error, Result};

/// The store of a launcher.
pub(super) trait ExchangeStore: fmt::Debug + Send + Sync {
    /// Gives a value of this rank to the job.
    ///
    /// # Errors
    /// [`Error::State`] if the store cannot be used.
    fn put(&self, key: &str, value: &[u8]) -> Result<()>;

    /// Publishes what was put. Other ranks find it after a fence, at the latest.
    ///
    /// # Errors
    /// As [`ExchangeStore::put`].
    fn commit(&self) -> Result<()>;

    /// Waits until every rank of the job has called it.
    ///
    /// # Errors
    /// As [`ExchangeStore::put`]; what `wait` says.
    fn fence(&self, wait: &ExchangeWait<'_>) -> Result<()>;

    /// The value that a rank has put; `None` if it is not there after a while.
    ///
    /// # Errors
    /// As [`ExchangeStore::put`].
    fn get(&self, rank: u32, key: &str) -> Result<Option<Vec<u8>>>;

    /// Removes values that this rank has put and nobody asks for any more. A store that removes nothing keeps them until the job ends.
    ///
    /// # Errors
    /// As [`ExchangeStore::put`].
    fn remove(&self, keys: &[String]) -> Result<()>;
}

/// What ends a wait for other ranks.
#[derive(Debug)]
pub(super) struct ExchangeWait<'a> {
    pub(super) client: &'a StoreClient,
    pub(super) deadline: &'a Deadline,
}

impl ExchangeWait<'_> {
    /// # Errors
    /// [`Error::Timeout`] once the deadline has passed, [`Error::Rank`] once the group has failed.
    pub(super) fn check(&self) -> Result<()> {
        self.client.failure().map_or(Ok(()), Err)?;
        self.deadline.left().map(drop)
    }
}

/// The exchanges of one group through its launcher's store.
#[derive(Debug)]
pub(super) struct LauncherExchange {
    store: Box<dyn ExchangeStore>,
    token: Token,
    /// What rank 0 has chosen for the keys. Threads that exchange at the same time choose the same.
    chosen: OnceLock<[u8; 8]>,
    /// What the keys of this group begin with.
    prefix: OnceLock<String>,
    count: AtomicU32,
}

impl LauncherExchange {
    pub(super) fn new(store: Box<dyn ExchangeStore>, token: &Token) -> LauncherExchange {
        LauncherExchange {
            store,
            token: token.clone(),
            chosen: OnceLock::new(),
            prefix: OnceLock::new(),
            count: AtomicU32::new(0),
        }
    }

    /// The exchanges that went through it.
    pub(super) fn count(&self) -> u32 {
        self.count.load(Ordering::Relaxed)
    }

    /// Every group of the job has keys of its own: rank 0 chooses what they begin with.
    fn prefix(&self, wait: &ExchangeWait<'_>) -> Result<&str> {
        const KEY: &[u8] = b"doorbell/exchange";
        if let Some(prefix) = self.prefix.get() {
            return Ok(prefix);
        }
        let (client, key) = (wait.client, KEY);
        if client.rank() == 0 {
            let mut fresh = [0; 8];
            fresh.copy_from_slice(&nonce()?[..8]);
            let value = self.chosen.get_or_init(|| fresh);
            client.request(wait.deadline, |id| Message::Set { id, key, value })?;
        }
        let value = client.request(wait.deadline, |id| Message::Get { id, key })?;
        let digits: String = value.iter().map(|byte| format!("{byte:02x}")).collect();
        Ok(self.prefix.get_or_init(|| format!("doorbell.{digits}")))
    }

    /// Waits for a value that was put before a fence. It may be on its way if threads of the ranks came to their fences in different orders.
    fn get(&self, rank: u32, key: &str, wait: &ExchangeWait<'_>) -> Result<Vec<u8>> {
        loop {
            if let Some(found) = self.store.get(rank, key)? {
                let parts = found.split_last_chunk();
                let proven = parts
                    .filter(|(value, proof)| self.token.is_proof(&[&signed(key, value)], proof));
                return proven
                    .map(|(value, _)| value.to_vec())
                    .ok_or_else(|| not_of(rank));
            }
            wait.check()?;
            wait.deadline.nap()?;
        }
    }

    /// Gives a value to each other rank, by rank, and returns what they have for this one; `None` if the ranks are to exchange them without the launcher, in which all of them
    /// agree. All ranks of the group call this under the same name, which is used once.
    ///
    /// # Errors
    /// [`Error::Rank`], [`Error::Timeout`]; those of [`ExchangeStore`].
    pub(super) fn exchange(
        &self,
        name: &str,
        values: &[(u32, Vec<u8>)],
        wait: &ExchangeWait<'_>,
    ) -> Result<Option<Vec<Vec<u8>>>> {
        const DONE: &[u8] = b"put";
        let prefix = self.prefix(wait)?;
        let keys = ExchangeKeys::new(prefix, name, wait.client);
        let own = wait.client.rank();
        let put = keys
            .shares(values)
            .try_for_each(|values| {
                let key = keys.of(own, values[0].0);
                let mut bytes = pack(values);
                bytes.extend(self.token.proof(&[&signed(&key, &bytes)]));
                self.store.put(&key, &bytes)
            })
            .and_then(|()| self.store.commit());
        let said = if put.is_ok() { DONE } else { b"" };
        let meeting = format!("doorbell/{name}");
        let request = |id| Message::Meet {
            id,
            key: meeting.as_bytes(),
            value: said,
        };
        let list = wait.client.request(wait.deadline, request)?;
        let all = Message::split_list(&list, wait.client.size())?;
        if all.iter().any(|said| *said != DONE) {
            // All ranks know that nobody reads it.
            self.forget(name, values, wait.client);
            return Ok(None);
        }
        self.store.fence(wait)?;
        let get = |(from, _): &(u32, Vec<u8>)| {
            let values = self.get(*from, &keys.of(*from, own), wait)?;
            unpack(&values, own).ok_or_else(|| not_of(*from))
        };
        let theirs = values.iter().map(get).collect::<Result<_>>()?;
        self.count.fetch_add(1, Ordering::Relaxed);
        Ok(Some(theirs))
    }

    /// Removes what this rank has put under that name, which every rank has read. A value that cannot be removed does no harm but to the room of the store, so there is no error.
    pub(super) fn forget(&self, name: &str, values: &[(u32, Vec<u8>)], client: &StoreClient) {
        let Some(prefix) = self.prefix.get() else {
            return;
        };
        let keys = ExchangeKeys::new(prefix, name, client);
        let shares = keys.shares(values);
        let own = shares.map(|values| keys.of(client.rank(), values[0].0));
        let _ = self.store.remove(&own.collect::<Vec<_>>());
    }
}

/// The keys of one exchange.
struct ExchangeKeys<'a> {
    prefix: &'a str,
    name: &'a str,
    /// How many neighbouring ranks find their values under the same key.
    share: u32,
}

impl<'a> ExchangeKeys<'a> {
    fn new(prefix: &'a str, name: &'a str, client: &StoreClient) -> ExchangeKeys<'a> {
        ExchangeKeys {
            prefix,
            name,
            share: client.size().isqrt(),
        }
    }

    /// The rank is part of the key: not every store keeps the values of ranks apart.
    fn of(&self, from: u32, to: u32) -> String {
        let ExchangeKeys {
            prefix,
            name,
            share,
        } = self;
        format!("{prefix}.{name}.{from}.{}", to / share)
    }

    /// The values that go under one key each.
    fn shares<'v>(
        &self,
        values: &'v [(u32, Vec<u8>)],
    ) -> impl Iterator<Item = &'v [(u32, Vec<u8>)]> + use<'v> {
        let share = self.share;
        values.chunk_by(move |(one, _), (next, _)| one / share == next / share)
    }
}

fn not_of(rank: u32) -> Error {
    Error::Malformed {
        what: "address in the launcher's store",
        reason: format!("rank {rank} of this group has not put it"),
    }
}

/// Each value, with its rank and its length before it.
fn pack(values: &[(u32, Vec<u8>)]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (rank, value) in values {
        bytes.extend(rank.to_le_bytes());
        bytes.extend((value.len() as u32).to_le_bytes());
        bytes.extend(value);
    }
    bytes
}

/// The value of a rank in what [`pack`] has made.
fn unpack(mut bytes: &[u8], of: u32) -> Option<Vec<u8>> {
    loop {
        let (rank, rest) = bytes.split_first_chunk()?;
        let (len, rest) = rest.split_first_chunk()?;
        let (value, rest) = rest.split_at_checked(u32::from_le_bytes(*len) as usize)?;
        if u32::from_le_bytes(*rank) == of {
            return Some(value.to_vec());
        }
        bytes = rest;
    }
}

/// What the proof of a value is of. No key has a line's end.
fn signed(key: &str, value: &[u8]) -> Vec<u8> {
    [key.as_bytes(), b"\n", value].concat()
}

#[cfg(all(test, feature = "softcx", not(loom)))]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::{Barrier, Condvar, LazyLock, Mutex};
    use std::time::Duration;

    use super::*;
    use crate::group::Store;
    use crate::group::tests::{SHORT, SOON, groups, ranks};
    use crate::{
        Access, DataType, Error, HostStream, MatcherConfig, MessageConfig, ReduceOp, Reduction,
        Region, StateKind,
    };

    /// What ranks in this process have given to their launcher's store.
    #[derive(Debug, Default)]
    struct FakeJob {
        values: BTreeMap<(u32, String), FakeValue>,
        came: u32,
    }

    #[derive(Debug)]
    struct FakeValue {
        bytes: Vec<u8>,
        is_committed: bool,
        was_read: bool,
    }

    type Job = LazyLock<(Mutex<FakeJob>, Condvar)>;

    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    enum Fault {
        None,
        Put,
        Fence,
        /// Another process replaces values.
        Value,
    }

    #[derive(Debug)]
    struct FakeStore {
        rank: u32,
        size: u32,
        job: &'static Job,
        fault: Fault,
    }

    impl FakeStore {
        fn check(&self, fault: Fault) -> Result<()> {
            if self.fault == fault {
                return Err(Error::state(StateKind::Environment, "test", "broken"));
            }
            Ok(())
        }
    }

    impl ExchangeStore for FakeStore {
        fn put(&self, key: &str, value: &[u8]) -> Result<()> {
            self.check(Fault::Put)?;
            let mut job = self.job.0.lock().unwrap();
            let value = FakeValue {
                bytes: value.to_vec(),
                is_committed: false,
                was_read: false,
            };
            let old = job.values.insert((self.rank, key.into()), value);
            // A rank that has read it might go on with that one.
            assert!(old.is_none_or(|old| !old.was_read), "{key}");
            Ok(())
        }

        fn commit(&self) -> Result<()> {
            let mut job = self.job.0.lock().unwrap();
            for ((rank, _), value) in &mut job.values {
                value.is_committed |= *rank == self.rank;
            }
            Ok(())
        }

        fn fence(&self, wait: &ExchangeWait<'_>) -> Result<()> {
            self.check(Fault::Fence)?;
            let (job, changed) = &**self.job;
            let mut job = job.lock().unwrap();
            let all = (job.came / self.size + 1) * self.size;
            job.came += 1;
            changed.notify_all();
            while job.came < all {
                wait.check()?;
                (job, _) = changed.wait_timeout(job, SHORT / 10).unwrap();
            }
            Ok(())
        }

        fn get(&self, rank: u32, key: &str) -> Result<Option<Vec<u8>>> {
            let mut job = self.job.0.lock().unwrap();
            let value = job.values.get_mut(&(rank, key.into()));
            Ok(value.filter(|value| value.is_committed).map(|value| {
                value.was_read = true;
                let mut bytes = value.bytes.clone();
                if self.fault == Fault::Value {
                    bytes[0] ^= 1;
                }
                bytes
            }))
        }

        fn remove(&self, keys: &[String]) -> Result<()> {
            let mut job = self.job.0.lock().unwrap();
            for key in keys {
                job.values.remove(&(self.rank, key.clone()));
            }
            Ok(())
        }
    }

    fn exchange(store: &Store, job: &'static Job, fault: Fault) -> Option<LauncherExchange> {
        let (rank, size) = (store.rank(), store.size());
        Some(LauncherExchange::new(
            Box::new(FakeStore {
                rank,
                size,
                job,
                fault,
            }),
            &Token::new("of the job"),
        ))
    }

    /// What each rank has for each other.
    fn values(store: &Store) -> Vec<(u32, Vec<u8>)> {
        let others = (0..store.size()).filter(|rank| *rank != store.rank());
        let value = |to: u32| (to, vec![store.rank() as u8; to as usize]);
        others.map(value).collect()
    }

    fn check(store: &Store, theirs: &[Vec<u8>]) {
        let others = (0..store.size()).filter(|rank| *rank != store.rank());
        let expected = others.map(|from| vec![from as u8; store.rank() as usize]);
        assert!(expected.eq(theirs.iter().cloned()), "{theirs:?}");
    }

    #[test]
    fn one_rank_that_cannot_use_the_launcher_has_all_do_without_it() {
        static JOB: Job = LazyLock::new(Default::default);
        ranks(4, |mut store| {
            let is_odd = store.rank() == 2;
            let fault = if is_odd { Fault::Put } else { Fault::None };
            store.launcher = exchange(&store, &JOB, fault);
            assert_eq!(store.exchange("once", &values(&store), SOON), Ok(None));
            assert_eq!(store.launcher_exchanges(), 0);
            store.leave(SOON).unwrap();
        });
        let job = JOB.0.lock().unwrap();
        assert_eq!((job.came, job.values.len()), (0, 0));
    }

    /// The first exchanges of threads agree on what the keys begin with.
    #[test]
    fn threads_exchange_at_the_same_time() {
        static JOBS: [Job; 20] = [const { LazyLock::new(Default::default) }; 20];
        for job in &JOBS {
            ranks(2, move |mut store| {
                store.launcher = exchange(&store, job, Fault::None);
                let start = Barrier::new(3);
                std::thread::scope(|scope| {
                    for name in ["a", "b", "c"] {
                        let (store, start) = (&store, &start);
                        scope.spawn(move || {
                            start.wait();
                            let theirs = store.exchange(name, &values(store), SOON).unwrap();
                            check(store, &theirs.unwrap());
                        });
                    }
                });
                assert_eq!(store.launcher_exchanges(), 3);
                store.leave(SOON).unwrap();
            });
        }
    }

    #[test]
    fn an_exchange_that_has_timed_out_is_made_again() {
        static JOB: Job = LazyLock::new(Default::default);
        ranks(3, |mut store| {
            store.launcher = exchange(&store, &JOB, Fault::None);
            if store.rank() == 1 {
                let alone = store.exchange("name", &[(0, vec![7]), (2, vec![8])], SHORT);
                assert!(matches!(alone, Err(Error::Timeout { .. })), "{alone:?}");
            }
            store.barrier(SOON).unwrap();
            let theirs = store.exchange("name", &values(&store), SOON).unwrap();
            check(&store, &theirs.unwrap());
            assert_eq!(store.launcher_exchanges(), 1);
            store.leave(SOON).unwrap();
        });
    }

    #[test]
    fn the_end_of_a_rank_ends_a_fence() {
        static JOB: Job = LazyLock::new(Default::default);
        ranks(3, |mut store| {
            let is_odd = store.rank() == 2;
            let fault = if is_odd { Fault::Fence } else { Fault::None };
            store.launcher = exchange(&store, &JOB, fault);
            let error = store.exchange("name", &values(&store), SOON).unwrap_err();
            match is_odd {
                true => assert!(matches!(error, Error::State { .. }), "{error}"),
                false => assert!(matches!(error, Error::Rank { rank: 2, .. }), "{error}"),
            }
        });
    }

    #[test]
    fn a_value_of_somebody_else_is_refused() {
        static JOB: Job = LazyLock::new(Default::default);
        ranks(2, |mut store| {
            let is_odd = store.rank() == 1;
            let fault = if is_odd { Fault::Value } else { Fault::None };
            store.launcher = exchange(&store, &JOB, fault);
            let theirs = store.exchange("name", &values(&store), SOON);
            match is_odd {
                true => assert!(matches!(theirs, Err(Error::Malformed { .. })), "{theirs:?}"),
                false => check(&store, &theirs.unwrap().unwrap()),
            }
            store.leave(SOON).unwrap();
        });
    }

    #[test]
    fn a_rank_that_has_left_is_named_before_the_fence() {
        static JOB: Job = LazyLock::new(Default::default);
        ranks(3, |mut store| {
            store.launcher = exchange(&store, &JOB, Fault::None);
            store.barrier(SOON).unwrap();
            if store.rank() == 0 {
                // Rank 0 leaves last.
                let error = store.exchange("name", &values(&store), SOON).unwrap_err();
                assert!(matches!(error, Error::Rank { .. }), "{error}");
            }
            store.leave(SOON).unwrap();
        });
        assert_eq!(JOB.0.lock().unwrap().came, 0);
    }

    #[test]
    fn queues_of_all_ranks_are_connected_through_the_launcher() {
        static JOB: Job = LazyLock::new(Default::default);
        groups(3, |mut group| {
            group.store.launcher = exchange(&group.store, &JOB, Fault::None);
            // Two threads, which come in another order in each rank.
            let mut communicator = std::thread::scope(|scope| {
                let matcher = scope.spawn(|| {
                    std::thread::sleep(Duration::from_millis(20 * u64::from(group.rank())));
                    let config = MatcherConfig::default();
                    group.matcher(None, 1, &config).unwrap()
                });
                std::thread::sleep(Duration::from_millis(40 - 20 * u64::from(group.rank())));
                let config = MessageConfig::default();
                let made = group.communicator(None, 2, &config).unwrap();
                drop(matcher.join().unwrap());
                made
            });
            assert_eq!(group.store.launcher_exchanges(), 2);
            // Some of the ranks do not meet all others.
            if group.rank() > 0 {
                let config = MessageConfig::default();
                drop(group.communicator(Some(&[1, 2]), 3, &config).unwrap());
            }
            assert_eq!(group.store.launcher_exchanges(), 2);
            let stream = HostStream::new("sum").unwrap();
            let memory = Region::alloc(group.domain(), 16, Access::ALL).unwrap();
            memory.write_values(0, &[1_i64 << group.rank()]).unwrap();
            let sum = Reduction::new(DataType::I64, ReduceOp::Sum);
            let slice = |at| memory.slice(at, 8).unwrap();
            let operation = communicator.all_reduce(&slice(0), &slice(8), sum, None);
            let ticket = communicator.launch(&stream, &operation.unwrap()).unwrap();
            ticket.wait(Some(SOON)).unwrap();
            let mut total = [0_i64];
            memory.read_values(8, &mut total).unwrap();
            assert_eq!(total, [7]);
            communicator.finish(Some(SOON)).unwrap();
            group.barrier().unwrap();
            group.leave().unwrap();
        });
        assert!(JOB.0.lock().unwrap().values.is_empty());
    }
}
