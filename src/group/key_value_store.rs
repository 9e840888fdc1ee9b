//! What the store knows and decides. No sockets, no clock: messages of ranks in, messages to ranks out.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use crate::group::message::{LIST_BYTES_MAX, Message};

/// The most bytes that all values and their keys may take together.
const BYTES_MAX: usize = 256 << 20;
/// The bytes that are counted for a value besides its own.
const OVERHEAD_BYTES: usize = 64;
/// Requests of one rank that wait at a time.
const WAITING_MAX: usize = 1024;

/// A message to a rank, as bytes that many may share.
pub(super) type OutgoingMessage = (u32, Arc<[u8]>);

/// How a rank stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RankState {
    /// It has not come yet.
    Absent,
    /// It is connected.
    Here,
    /// It has left, and may end.
    Left,
    /// It ended before it had left.
    Lost,
}

/// What ranks meet for.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum StoreMeeting {
    Barrier,
    Gathering,
    /// Under a key.
    Keyed(Vec<u8>),
}

/// A meeting that is under way: the request of each rank that has come, and what it gives.
type StoreCollective = BTreeMap<u32, (u32, Vec<u8>)>;

/// A request that waits for a value.
#[derive(Debug, Clone, Copy)]
struct StoreWaiter {
    rank: u32,
    id: u32,
    /// Whether it removes the value that it gets.
    takes: bool,
}

#[derive(Debug)]
pub(super) struct KeyValueStore {
    rank_states: Vec<RankState>,
    values: BTreeMap<Vec<u8>, Arc<[u8]>>,
    bytes: usize,
    /// The requests that wait for a value that is not there yet, in the order in which they came.
    waiting: BTreeMap<Vec<u8>, VecDeque<StoreWaiter>>,
    waits: Vec<usize>,
    meetings: BTreeMap<StoreMeeting, StoreCollective>,
    /// The ranks that have asked for a group of those that are here.
    shrinking: StoreCollective,
    /// The request with which rank 0, where the store lives, wants to leave.
    host_leaves: Option<u32>,
    out: Vec<OutgoingMessage>,
}

impl KeyValueStore {
    pub(super) fn new(size: u32) -> KeyValueStore {
        KeyValueStore {
            rank_states: vec![RankState::Absent; size as usize],
            values: BTreeMap::new(),
            bytes: 0,
            waiting: BTreeMap::new(),
            waits: vec![0; size as usize],
            meetings: BTreeMap::new(),
            shrinking: StoreCollective::default(),
            host_leaves: None,
            out: Vec::new(),
        }
    }

    pub(super) fn size(&self) -> u32 {
        self.rank_states.len() as u32
    }

    pub(super) fn rank_state(&self, rank: u32) -> Option<RankState> {
        self.rank_states.get(rank as usize).copied()
    }

    /// What is to be sent, in order.
    pub(super) fn drain_outgoing(&mut self) -> Vec<OutgoingMessage> {
        std::mem::take(&mut self.out)
    }

    /// A rank has come. It is told which ranks were lost before.
    pub(super) fn join(&mut self, rank: u32) {
        self.rank_states[rank as usize] = RankState::Here;
        let lost: Vec<u32> = (0..self.size())
            .filter(|&other| self.rank_states[other as usize] == RankState::Lost)
            .collect();
        for other in lost {
            self.send(rank, &Message::Lost { rank: other });
        }
    }

    /// The connection of a rank has ended. Whether that was a failure: the others are told then.
    pub(super) fn end(&mut self, rank: u32) -> bool {
        let failed = self.rank_states[rank as usize] == RankState::Here;
        if failed {
            self.rank_states[rank as usize] = RankState::Lost;
            for other in 0..self.size() {
                if self.rank_states[other as usize] == RankState::Here {
                    self.send(other, &Message::Lost { rank });
                }
            }
        }
        self.forget_requests(rank);
        self.shrink_if_all_have_asked();
        self.let_host_go();
        failed
    }

    /// A rank that has not come is not waited for any longer.
    pub(super) fn give_up(&mut self, rank: u32) {
        self.rank_states[rank as usize] = RankState::Here;
        self.end(rank);
    }

    /// A message of a rank that is here.
    ///
    /// # Errors
    /// What is wrong with it. The rank is not to be listened to any longer.
    pub(super) fn take(&mut self, rank: u32, message: &Message<'_>) -> Result<(), &'static str> {
        match *message {
            Message::Set { id, key, value } => self.set(rank, id, key, value),
            Message::Get { id, key } => {
                let takes = false;
                return self.get(key, StoreWaiter { rank, id, takes });
            }
            Message::Take { id, key } => {
                let takes = true;
                return self.get(key, StoreWaiter { rank, id, takes });
            }
            Message::Barrier { id } => return self.meet(rank, id, StoreMeeting::Barrier, &[]),
            Message::Gather { id, value } => {
                return self.meet(rank, id, StoreMeeting::Gathering, value);
            }
            Message::Meet { id, key, value } => {
                return self.meet(rank, id, StoreMeeting::Keyed(key.to_vec()), value);
            }
            Message::Shrink { id, value } => {
                if self.shrinking.contains_key(&rank) {
                    return Err("a shrink was started before the previous one finished");
                }
                self.shrinking.insert(rank, (id, value.to_vec()));
                self.shrink_if_all_have_asked();
            }
            Message::Cancel { id } => self.cancel(rank, id),
            Message::Forward { to, bytes } => match self.rank_state(to) {
                Some(RankState::Absent | RankState::Here) => {
                    self.send(to, &Message::Delivery { from: rank, bytes });
                }
                // Other messages report that the rank is lost or has left.
                Some(_) => {}
                None => return Err("message to a rank that does not exist"),
            },
            Message::Leave { id } => self.leave(rank, id),
            _ => return Err("a message that only the store sends"),
        }
        Ok(())
    }

    fn send(&mut self, to: u32, message: &Message<'_>) {
        // Fields that were read are within the limits, and a list is checked before.
        if let Ok(bytes) = message.to_bytes() {
            self.out.push((to, bytes.into()));
        }
    }

    fn set(&mut self, rank: u32, id: u32, key: &[u8], value: &[u8]) {
        let old = self.values.get(key);
        let freed = old.map_or(0, |old| key.len() + old.len() + OVERHEAD_BYTES);
        let bytes = self.bytes - freed + key.len() + value.len() + OVERHEAD_BYTES;
        if bytes > BYTES_MAX {
            return self.send(rank, &Message::Full { id });
        }
        self.bytes = bytes;
        self.values.insert(key.to_vec(), value.into());
        self.send(rank, &Message::Done { id });
        // In their order, until one of them has removed the value: those behind it wait for the next one.
        let mut waiters = self.waiting.remove(key).unwrap_or_default();
        while let Some(waiter) = waiters.pop_front() {
            self.waits[waiter.rank as usize] -= 1;
            self.answer(key, waiter, value);
            if waiter.takes {
                break;
            }
        }
        if !waiters.is_empty() {
            self.waiting.insert(key.to_vec(), waiters);
        }
    }

    /// Gives a request the value that stands under its key.
    fn answer(&mut self, key: &[u8], waiter: StoreWaiter, value: &[u8]) {
        let StoreWaiter { rank, id, takes } = waiter;
        self.send(rank, &Message::Value { id, value });
        if takes && self.values.remove(key).is_some() {
            self.bytes -= key.len() + value.len() + OVERHEAD_BYTES;
        }
    }

    fn get(&mut self, key: &[u8], waiter: StoreWaiter) -> Result<(), &'static str> {
        if let Some(value) = self.values.get(key).cloned() {
            self.answer(key, waiter, &value);
            return Ok(());
        }
        let waits = &mut self.waits[waiter.rank as usize];
        if *waits == WAITING_MAX {
            return Err("too many requests that wait");
        }
        *waits += 1;
        self.waiting
            .entry(key.to_vec())
            .or_default()
            .push_back(waiter);
        Ok(())
    }

    /// One more rank has come to a meeting, with a value.
    fn meet(
        &mut self,
        rank: u32,
        id: u32,
        meeting: StoreMeeting,
        value: &[u8],
    ) -> Result<(), &'static str> {
        let came = self.meetings.get(&meeting);
        if came.is_some_and(|came| came.contains_key(&rank)) {
            return Err("a barrier or gather was started before the previous one finished");
        }
        if let Some(gone) = self.first_left() {
            self.send(rank, &Message::Left { id, rank: gone });
            return Ok(());
        }
        if came.is_none() && self.meetings.len() == WAITING_MAX {
            return Err("too many meetings that wait");
        }
        let came = self.meetings.entry(meeting.clone()).or_default();
        came.insert(rank, (id, value.to_vec()));
        if came.len() < self.rank_states.len() {
            return Ok(());
        }
        let came = self.meetings.remove(&meeting).unwrap_or_default();
        let is_barrier = meeting == StoreMeeting::Barrier;
        let mut values = Vec::new();
        for (_, value) in came.values().filter(|_| !is_barrier) {
            values.extend((value.len() as u32).to_le_bytes());
            values.extend(value);
        }
        for (&rank, &(id, _)) in &came {
            let values = &values;
            let answer = match is_barrier {
                true => Message::Done { id },
                false if values.len() > LIST_BYTES_MAX => Message::Full { id },
                false => Message::List { id, values },
            };
            self.send(rank, &answer);
        }
        Ok(())
    }

    /// Answers those that have asked for a group of the ranks that are here, once all of these have and none is still to come. Without rank 0 there is no answer:
    /// the store is about to end, and nobody hosts the next one.
    fn shrink_if_all_have_asked(&mut self) {
        let is_here = |rank: &u32| self.rank_states[*rank as usize] == RankState::Here;
        let here: Vec<u32> = (0..self.size()).filter(is_here).collect();
        let all_have = here.iter().all(|rank| self.shrinking.contains_key(rank));
        let is_to_come = self.rank_states.contains(&RankState::Absent);
        if here.first() != Some(&0) || !all_have || is_to_come {
            return;
        }
        let asked = std::mem::take(&mut self.shrinking);
        let numbers: Vec<u8> = here.iter().flat_map(|rank| rank.to_le_bytes()).collect();
        let given = asked.get(&0).map_or(&[][..], |(_, value)| value);
        let mut values = Vec::new();
        for value in [&numbers, given] {
            values.extend((value.len() as u32).to_le_bytes());
            values.extend(value);
        }
        for (&rank, &(id, _)) in &asked {
            let values = &values;
            let answer = match values.len() > LIST_BYTES_MAX {
                true => Message::Full { id },
                false => Message::List { id, values },
            };
            self.send(rank, &answer);
        }
    }

    fn first_left(&self) -> Option<u32> {
        let left = self.rank_states.iter().position(|&s| s == RankState::Left);
        left.map(|rank| rank as u32)
    }

    fn cancel(&mut self, rank: u32, id: u32) {
        self.drop_requests(rank, |request| request == id);
        self.shrinking
            .retain(|other, (request, _)| *other != rank || *request != id);
        self.drop_from_meetings(rank, |request| request == id);
    }

    fn leave(&mut self, rank: u32, id: u32) {
        // The store ends with rank 0, so rank 0 stays as long as another rank may need it.
        if rank == 0 {
            self.host_leaves = Some(id);
        } else {
            self.rank_states[rank as usize] = RankState::Left;
            self.send(rank, &Message::Done { id });
            self.shrink_if_all_have_asked();
            for (other, (id, _)) in std::mem::take(&mut self.meetings).into_values().flatten() {
                self.send(other, &Message::Left { id, rank });
            }
        }
        self.let_host_go();
    }

    /// Takes back what a rank waits for.
    fn forget_requests(&mut self, rank: u32) {
        self.drop_requests(rank, |_| true);
        self.drop_from_meetings(rank, |_| true);
        self.shrinking.remove(&rank);
    }

    fn drop_from_meetings(&mut self, rank: u32, is_one: impl Fn(u32) -> bool) {
        self.meetings.retain(|_, came| {
            came.retain(|other, (request, _)| *other != rank || !is_one(*request));
            !came.is_empty()
        });
    }

    fn drop_requests(&mut self, rank: u32, is_one: impl Fn(u32) -> bool) {
        if self.waits[rank as usize] == 0 {
            return;
        }
        let mut dropped = 0;
        self.waiting.retain(|_, waiters| {
            let before = waiters.len();
            waiters.retain(|waiter| waiter.rank != rank || !is_one(waiter.id));
            dropped += before - waiters.len();
            !waiters.is_empty()
        });
        self.waits[rank as usize] -= dropped;
    }

    /// Answers rank 0's request to leave once no other rank is here or still to come.
    fn let_host_go(&mut self) {
        let others = self.rank_states.iter().skip(1);
        let over = others
            .clone()
            .all(|s| matches!(s, RankState::Left | RankState::Lost));
        if let Some(id) = self.host_leaves.take_if(|_| over) {
            self.rank_states[0] = RankState::Left;
            self.send(0, &Message::Done { id });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn store(size: u32) -> KeyValueStore {
        let mut store = KeyValueStore::new(size);
        (0..size).for_each(|rank| store.join(rank));
        store
    }

    /// The answers to a message, each with its rank.
    fn answers(store: &mut KeyValueStore, rank: u32, message: &Message<'_>) -> Vec<(u32, String)> {
        store.take(rank, message).unwrap();
        sent(store)
    }

    fn sent(store: &mut KeyValueStore) -> Vec<(u32, String)> {
        let read = |(to, bytes): &OutgoingMessage| {
            let (message, len) = Message::parse(bytes).unwrap().unwrap();
            assert_eq!(len, bytes.len());
            (*to, format!("{message:?}"))
        };
        store.drain_outgoing().iter().map(read).collect()
    }

    fn text(to: u32, message: Message<'_>) -> (u32, String) {
        (to, format!("{message:?}"))
    }

    #[test]
    fn values_are_waited_for_replaced_and_counted() {
        let mut store = store(3);
        let (key, value) = (&b"k"[..], &b"one"[..]);
        for rank in 1..3 {
            let none = answers(&mut store, rank, &Message::Get { id: 10 + rank, key });
            assert_eq!(none, []);
        }
        assert_eq!(answers(&mut store, 2, &Message::Cancel { id: 12 }), []);
        assert_eq!(
            answers(&mut store, 0, &Message::Set { id: 1, key, value }),
            [
                text(0, Message::Done { id: 1 }),
                text(1, Message::Value { id: 11, value })
            ]
        );
        assert_eq!(store.waits, [0, 0, 0]);
        let bytes = store.bytes;
        let two = &b"two"[..];
        answers(
            &mut store,
            0,
            &Message::Set {
                id: 2,
                key,
                value: two,
            },
        );
        assert_eq!(store.bytes, bytes);
        assert_eq!(
            answers(&mut store, 2, &Message::Get { id: 3, key }),
            [text(2, Message::Value { id: 3, value: two })]
        );
    }

    #[test]
    fn value_is_taken_once_and_its_bytes_are_free_again() {
        let mut store = store(4);
        let (key, value) = (&b"k"[..], &b"one"[..]);
        let set = |id| Message::Set { id, key, value };
        answers(&mut store, 0, &set(1));
        let held = store.bytes;
        assert_eq!(held, key.len() + value.len() + OVERHEAD_BYTES);
        assert_eq!(
            answers(&mut store, 1, &Message::Take { id: 2, key }),
            [text(1, Message::Value { id: 2, value })]
        );
        assert_eq!((store.bytes, store.values.len()), (0, 0));
        // It is gone: each of these waits, and the first that takes leaves nothing for those behind it.
        assert_eq!(answers(&mut store, 1, &Message::Get { id: 3, key }), []);
        assert_eq!(answers(&mut store, 2, &Message::Take { id: 4, key }), []);
        assert_eq!(answers(&mut store, 3, &Message::Take { id: 5, key }), []);
        assert_eq!(answers(&mut store, 1, &Message::Get { id: 6, key }), []);
        assert_eq!(
            answers(&mut store, 0, &set(7)),
            [
                text(0, Message::Done { id: 7 }),
                text(1, Message::Value { id: 3, value }),
                text(2, Message::Value { id: 4, value }),
            ]
        );
        assert_eq!((store.bytes, &store.waits[..]), (0, &[0, 1, 0, 1][..]));
        // A request that was cancelled takes nothing.
        answers(&mut store, 3, &Message::Cancel { id: 5 });
        assert_eq!(
            answers(&mut store, 0, &set(8)),
            [
                text(0, Message::Done { id: 8 }),
                text(1, Message::Value { id: 6, value }),
            ]
        );
        assert_eq!((store.bytes, &store.waits[..]), (held, &[0; 4][..]));
    }

    #[test]
    fn what_is_held_is_bounded() {
        let mut store = store(2);
        let value = vec![0; 64 << 10];
        let mut full = false;
        for number in 0..5000_u32 {
            let key = &number.to_le_bytes();
            let set = Message::Set {
                id: 1,
                key,
                value: &value,
            };
            full = answers(&mut store, 1, &set) == [text(1, Message::Full { id: 1 })];
            assert!(store.bytes <= BYTES_MAX);
            if full {
                break;
            }
        }
        assert!(full);
        for id in 0..WAITING_MAX as u32 {
            assert_eq!(answers(&mut store, 0, &Message::Get { id, key: b"?" }), []);
        }
        assert!(store.take(0, &Message::Get { id: 0, key: b"?" }).is_err());
        store.end(0);
        assert_eq!((store.waits[0], store.waiting.len()), (0, 0));
    }

    #[test]
    fn barriers_and_gatherings_end_together_and_again() {
        let mut store = store(2);
        for round in 0..3 {
            let id = round;
            assert_eq!(answers(&mut store, 1, &Message::Barrier { id }), []);
            // The two kinds are apart.
            assert_eq!(
                answers(&mut store, 0, &Message::Gather { id, value: b"a" }),
                []
            );
            assert!(store.take(1, &Message::Barrier { id }).is_err());
            let done = answers(&mut store, 0, &Message::Barrier { id: 7 });
            assert_eq!(
                done,
                [
                    text(0, Message::Done { id: 7 }),
                    text(1, Message::Done { id })
                ]
            );
            let values = b"\x01\0\0\0a\0\0\0\0";
            let list = |id| Message::List { id, values };
            assert_eq!(
                answers(&mut store, 1, &Message::Gather { id: 9, value: b"" }),
                [text(0, list(id)), text(1, list(9))]
            );
        }
        // Meetings under keys are apart, too.
        for key in [b"one", b"two"] {
            let meet = |value| Message::Meet { id: 3, key, value };
            assert_eq!(answers(&mut store, 0, &meet(b"a")), []);
            assert!(store.take(0, &meet(b"a")).is_err());
        }
        assert_eq!(
            answers(&mut store, 0, &Message::Gather { id: 8, value: b"" }),
            []
        );
        answers(&mut store, 0, &Message::Cancel { id: 8 });
        let values = b"\x01\0\0\0a\x01\0\0\0b";
        let (key, value) = (b"two", b"b");
        assert_eq!(
            answers(&mut store, 1, &Message::Meet { id: 9, key, value }),
            [
                text(0, Message::List { id: 3, values }),
                text(1, Message::List { id: 9, values })
            ]
        );
        // A rank that takes its request back is not counted.
        answers(&mut store, 0, &Message::Barrier { id: 1 });
        answers(&mut store, 0, &Message::Cancel { id: 1 });
        assert_eq!(answers(&mut store, 1, &Message::Barrier { id: 2 }), []);
    }

    #[test]
    fn ranks_that_are_here_shrink_together_whoever_ends_meanwhile() {
        let mut store = KeyValueStore::new(4);
        (0..3).for_each(|rank| store.join(rank));
        let shrink = |id, value| Message::Shrink { id, value };
        let none: &[u8] = b"";
        // One rank has not come yet, which is no reason to go on without it.
        store.end(1);
        sent(&mut store);
        assert_eq!(answers(&mut store, 2, &shrink(5, none)), []);
        assert_eq!(answers(&mut store, 0, &shrink(6, none)), []);
        for (rank, id) in [(0, 6), (2, 5)] {
            assert_eq!(answers(&mut store, rank, &Message::Cancel { id }), []);
        }
        store.join(3);
        sent(&mut store);
        assert_eq!(answers(&mut store, 3, &shrink(7, none)), []);
        assert!(store.take(3, &shrink(8, none)).is_err());
        assert_eq!(answers(&mut store, 3, &Message::Cancel { id: 7 }), []);
        assert_eq!(answers(&mut store, 0, &shrink(1, b"port")), []);
        assert_eq!(answers(&mut store, 3, &shrink(9, none)), []);
        // The last one that has not asked ends.
        store.end(2);
        let values = b"\x08\0\0\0\0\0\0\0\x03\0\0\0\x04\0\0\0port";
        let list = |id| Message::List { id, values };
        let lost = Message::Lost { rank: 2 };
        assert_eq!(
            sent(&mut store),
            [
                text(0, lost),
                text(3, lost),
                text(0, list(1)),
                text(3, list(9))
            ]
        );
        // And again.
        assert_eq!(answers(&mut store, 3, &shrink(10, none)), []);
        assert_eq!(
            answers(&mut store, 0, &shrink(2, b"port")),
            [text(0, list(2)), text(3, list(10))]
        );
        // A rank that has left is no survivor.
        assert_eq!(answers(&mut store, 0, &shrink(3, b"")), []);
        let alone = Message::List {
            id: 3,
            values: b"\x04\0\0\0\0\0\0\0\0\0\0\0",
        };
        assert_eq!(
            answers(&mut store, 3, &Message::Leave { id: 11 }),
            [text(3, Message::Done { id: 11 }), text(0, alone)]
        );
    }

    #[test]
    fn the_end_of_a_rank_is_sent_to_all_and_to_later_ranks() {
        let mut store = KeyValueStore::new(4);
        (0..3).for_each(|rank| store.join(rank));
        assert!(store.end(1));
        let lost = Message::Lost { rank: 1 };
        assert_eq!(sent(&mut store), [text(0, lost), text(2, lost)]);
        store.join(3);
        assert_eq!(sent(&mut store), [text(3, lost)]);
        assert_eq!(store.rank_state(1), Some(RankState::Lost));
        assert_eq!(store.rank_state(4), None);
    }

    #[test]
    fn a_rank_that_has_left_is_no_failure_and_is_not_waited_for() {
        let mut store = store(3);
        answers(&mut store, 1, &Message::Barrier { id: 5 });
        assert_eq!(
            answers(&mut store, 2, &Message::Leave { id: 6 }),
            [
                text(2, Message::Done { id: 6 }),
                text(1, Message::Left { id: 5, rank: 2 })
            ]
        );
        assert!(!store.end(2));
        let late = answers(&mut store, 0, &Message::Gather { id: 8, value: b"" });
        assert_eq!(late, [text(0, Message::Left { id: 8, rank: 2 })]);
        // The host of the store goes last.
        assert_eq!(answers(&mut store, 0, &Message::Leave { id: 9 }), []);
        assert_eq!(
            answers(&mut store, 1, &Message::Leave { id: 1 }),
            [
                text(1, Message::Done { id: 1 }),
                text(0, Message::Done { id: 9 })
            ]
        );
        assert!(!store.end(0));
    }

    #[test]
    fn mail_goes_to_ranks_that_are_or_will_be() {
        let mut store = KeyValueStore::new(3);
        (0..2).for_each(|rank| store.join(rank));
        for to in [1, 2] {
            let message = Message::Forward { to, bytes: b"hi" };
            let delivery = Message::Delivery {
                from: 0,
                bytes: b"hi",
            };
            assert_eq!(answers(&mut store, 0, &message), [text(to, delivery)]);
        }
        assert!(
            store
                .take(0, &Message::Forward { to: 3, bytes: b"" })
                .is_err()
        );
        assert!(store.take(0, &Message::Lost { rank: 1 }).is_err());
        store.end(1);
        sent(&mut store);
        assert_eq!(
            answers(&mut store, 0, &Message::Forward { to: 1, bytes: b"" }),
            []
        );
    }
}
