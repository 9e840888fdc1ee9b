//! Receives without a message, messages without a receive, and which belong together. No memory, no queues, no time.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::{Source, TagSelector};

/// Where receives that are alike are found, and the messages that each such receive takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum MatchKey {
    /// Of a peer, with a tag.
    Exact(usize, u32),
    /// Of any peer, with a tag.
    AnyPeer(u32),
    /// Of a peer, with any tag.
    AnyTag(usize),
    Any,
}

impl MatchKey {
    /// Of the receives that take a message of that peer and tag, whatever bits of a tag they ignore.
    fn all(peer: usize, tag: u32) -> [MatchKey; 4] {
        [
            MatchKey::Exact(peer, tag),
            MatchKey::AnyPeer(tag),
            MatchKey::AnyTag(peer),
            MatchKey::Any,
        ]
    }

    /// Of a receive. None if it ignores some of a tag's bits.
    fn of(source: Source, tag: TagSelector) -> Option<MatchKey> {
        match (source, tag.single()) {
            (Source::Peer(peer), Some(tag)) => Some(MatchKey::Exact(peer, tag)),
            (Source::Any, Some(tag)) => Some(MatchKey::AnyPeer(tag)),
            (Source::Peer(peer), None) if tag.is_any() => Some(MatchKey::AnyTag(peer)),
            (Source::Any, None) if tag.is_any() => Some(MatchKey::Any),
            _ => None,
        }
    }
}

/// Numbers by key, those of a key in order.
#[derive(Debug, Default)]
struct KeyedNumbers(HashMap<MatchKey, BTreeSet<u64>>);

impl KeyedNumbers {
    fn insert(&mut self, key: MatchKey, number: u64) {
        self.0.entry(key).or_default().insert(number);
    }

    fn remove(&mut self, key: MatchKey, number: u64) {
        if let Some(numbers) = self.0.get_mut(&key) {
            numbers.remove(&number);
            if numbers.is_empty() {
                self.0.remove(&key);
            }
        }
    }

    fn first(&self, key: MatchKey) -> Option<u64> {
        self.0.get(&key)?.first().copied()
    }

    fn all(&self, key: MatchKey) -> impl Iterator<Item = u64> {
        self.0.get(&key).into_iter().flatten().copied()
    }
}

/// The receives and messages of a matcher that have no counterpart. Receives have numbers that grow in the order in which they were posted, and messages in the order
/// in which they have arrived. A receive takes the earliest message that it matches, and a message the earliest receive.
///
/// A receive that takes one tag or all of them is found by its key, in time that depends on the logarithm of their number. Those that ignore some bits of a tag are
/// looked at one after the other.
#[derive(Debug, Default)]
pub(super) struct MatchTable {
    receives: HashMap<u64, (Source, TagSelector)>,
    by_key: KeyedNumbers,
    masked: BTreeMap<u64, (Source, TagSelector)>,
    messages: HashMap<u64, (usize, u32)>,
    messages_by_key: KeyedNumbers,
}

fn takes((source, tags): (Source, TagSelector), peer: usize, tag: u32) -> bool {
    let is_from = match source {
        Source::Any => true,
        Source::Peer(expected) => expected == peer,
    };
    is_from && tags.matches(tag)
}

impl MatchTable {
    /// Posts the receive with that number, which is larger than those before. Returns the message that it takes, which is not in the table any more. Otherwise the
    /// receive is.
    pub(super) fn post(&mut self, receive: u64, source: Source, tag: TagSelector) -> Option<u64> {
        if let Some(message) = self.probe(source, tag) {
            self.forget(message);
            return Some(message);
        }
        self.receives.insert(receive, (source, tag));
        match MatchKey::of(source, tag) {
            Some(key) => self.by_key.insert(key, receive),
            None => _ = self.masked.insert(receive, (source, tag)),
        }
        None
    }

    /// A message has arrived; its number is larger than those before. Returns the receive that takes it, which is not in the table any more. Otherwise the message
    /// is.
    pub(super) fn arrive(&mut self, message: u64, peer: usize, tag: u32) -> Option<u64> {
        let keys = MatchKey::all(peer, tag);
        let first = keys.iter().filter_map(|key| self.by_key.first(*key)).min();
        let mut before = self.masked.range(..first.unwrap_or(u64::MAX));
        let masked = before.find(|(_, receive)| takes(**receive, peer, tag));
        let receive = masked.map(|(receive, _)| *receive).or(first);
        if let Some(receive) = receive {
            self.cancel(receive);
            return Some(receive);
        }
        self.messages.insert(message, (peer, tag));
        for key in keys {
            self.messages_by_key.insert(key, message);
        }
        None
    }

    /// The receive that has taken that message is gone, and the message goes to the earliest receive that has none, or back to its place among the messages.
    pub(super) fn withdraw(&mut self, message: u64, peer: usize, tag: u32) -> Option<u64> {
        // Messages are kept in the order of their numbers, not in that of the calls.
        self.arrive(message, peer, tag)
    }

    /// Takes a receive out. Returns whether it was there: it had no message.
    pub(super) fn cancel(&mut self, receive: u64) -> bool {
        let Some((source, tag)) = self.receives.remove(&receive) else {
            return false;
        };
        match MatchKey::of(source, tag) {
            Some(key) => self.by_key.remove(key, receive),
            None => _ = self.masked.remove(&receive),
        }
        true
    }

    /// Takes a message out. Returns whether it was there: no receive had taken it.
    pub(super) fn forget(&mut self, message: u64) -> bool {
        let Some((peer, tag)) = self.messages.remove(&message) else {
            return false;
        };
        for key in MatchKey::all(peer, tag) {
            self.messages_by_key.remove(key, message);
        }
        true
    }

    /// The message that such a receive would take.
    pub(super) fn probe(&self, source: Source, tag: TagSelector) -> Option<u64> {
        if let Some(key) = MatchKey::of(source, tag) {
            return self.messages_by_key.first(key);
        }
        let key = match source {
            Source::Any => MatchKey::Any,
            Source::Peer(peer) => MatchKey::AnyTag(peer),
        };
        let fits = |message: &u64| {
            let found = self.messages.get(message);
            found.is_some_and(|(_, found)| tag.matches(*found))
        };
        self.messages_by_key.all(key).find(fits)
    }

    /// The receives that `is_wanted` says, in order.
    pub(super) fn receives(&self, is_wanted: impl Fn(Source) -> bool) -> Vec<u64> {
        let wanted = self.receives.iter().filter(|(_, it)| is_wanted(it.0));
        let mut found: Vec<u64> = wanted.map(|(receive, _)| *receive).collect();
        found.sort_unstable();
        found
    }

    /// Whether the message is there: no receive has taken it.
    pub(super) fn has_message(&self, message: u64) -> bool {
        self.messages.contains_key(&message)
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use proptest::prelude::*;

    use super::*;

    /// A step of a test.
    #[derive(Debug, Clone, Copy)]
    enum TableStep {
        Post(Source, TagSelector),
        Arrive(usize, u32),
        /// Of the receives so far, the one at that place from the end.
        Cancel(usize),
        /// The same of the pairs so far.
        Withdraw(usize),
        Probe(Source, TagSelector),
    }

    fn selector() -> impl Strategy<Value = (Source, TagSelector)> {
        let source = prop_oneof![Just(Source::Any), (0_usize..3).prop_map(Source::Peer)];
        let tag = prop_oneof![
            4 => (0_u32..4).prop_map(TagSelector::exact),
            2 => Just(TagSelector::any()),
            2 => (0_u32..4, 1_u32..4).prop_map(|(value, ignored)| TagSelector::masked(value, ignored)),
        ];
        (source, tag)
    }

    fn step() -> impl Strategy<Value = TableStep> {
        prop_oneof![
            5 => selector().prop_map(|(source, tag)| TableStep::Post(source, tag)),
            5 => (0_usize..3, 0_u32..4).prop_map(|(peer, tag)| TableStep::Arrive(peer, tag)),
            1 => (0_usize..6).prop_map(TableStep::Cancel),
            1 => (0_usize..6).prop_map(TableStep::Withdraw),
            1 => selector().prop_map(|(source, tag)| TableStep::Probe(source, tag)),
        ]
    }

    /// The same by definition: two histories, and for each receive the message that it has.
    #[derive(Default)]
    struct History {
        receives: Vec<(Source, TagSelector, ReceiveFate)>,
        messages: Vec<(usize, u32)>,
    }

    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    enum ReceiveFate {
        Open,
        Has(usize),
        Gone,
    }

    impl History {
        fn fits(&self, receive: usize, message: usize) -> bool {
            let (source, tags, _) = self.receives[receive];
            let (peer, tag) = self.messages[message];
            (source == Source::Any || source == Source::Peer(peer)) && tags.matches(tag)
        }

        fn is_free(&self, message: usize) -> bool {
            let has = ReceiveFate::Has(message);
            self.receives.iter().all(|(_, _, fate)| *fate != has)
        }

        /// Gives every free message to the earliest open receive that fits, the earliest message first. Returns what is new.
        fn settle(&mut self) -> Vec<(usize, usize)> {
            let mut new = Vec::new();
            for message in 0..self.messages.len() {
                if !self.is_free(message) {
                    continue;
                }
                let open = (0..self.receives.len()).find(|receive| {
                    self.receives[*receive].2 == ReceiveFate::Open && self.fits(*receive, message)
                });
                if let Some(receive) = open {
                    self.receives[receive].2 = ReceiveFate::Has(message);
                    new.push((receive, message));
                }
            }
            new
        }
    }

    proptest! {
        #[test]
        fn table_is_like_its_definition(steps in proptest::collection::vec(step(), 0..80)) {
            let (mut table, mut history) = (MatchTable::default(), History::default());
            for step in steps {
                match step {
                    TableStep::Post(source, tag) => {
                        let receive = history.receives.len();
                        history.receives.push((source, tag, ReceiveFate::Open));
                        let found = table.post(receive as u64, source, tag);
                        let expected = history.settle();
                        let found: Vec<_> = found.map(|it| (receive, it as usize)).into_iter().collect();
                        prop_assert_eq!(found, expected);
                    }
                    TableStep::Arrive(peer, tag) => {
                        let message = history.messages.len();
                        history.messages.push((peer, tag));
                        let found = table.arrive(message as u64, peer, tag);
                        let expected = history.settle();
                        let found: Vec<_> = found.map(|it| (it as usize, message)).into_iter().collect();
                        prop_assert_eq!(found, expected);
                        prop_assert_eq!(table.has_message(message as u64), history.is_free(message));
                    }
                    TableStep::Cancel(back) => {
                        let Some(receive) = history.receives.len().checked_sub(back + 1) else { continue };
                        let is_open = history.receives[receive].2 == ReceiveFate::Open;
                        if is_open {
                            history.receives[receive].2 = ReceiveFate::Gone;
                        }
                        prop_assert_eq!(table.cancel(receive as u64), is_open);
                    }
                    TableStep::Withdraw(back) => {
                        let pairs = history.receives.iter().enumerate();
                        let pairs = pairs.filter_map(|(receive, (_, _, fate))| match fate {
                            ReceiveFate::Has(message) => Some((receive, *message)),
                            _ => None,
                        });
                        let pairs: Vec<_> = pairs.collect();
                        let Some(at) = pairs.len().checked_sub(back + 1) else { continue };
                        let (receive, message) = pairs[at];
                        history.receives[receive].2 = ReceiveFate::Gone;
                        let (peer, tag) = history.messages[message];
                        let found = table.withdraw(message as u64, peer, tag);
                        let expected = history.settle();
                        let found: Vec<_> = found.map(|it| (it as usize, message)).into_iter().collect();
                        prop_assert_eq!(found, expected);
                    }
                    TableStep::Probe(source, tag) => {
                        let fits = |message: &usize| {
                            let (peer, found) = history.messages[*message];
                            history.is_free(*message)
                                && (source == Source::Any || source == Source::Peer(peer))
                                && tag.matches(found)
                        };
                        let expected = (0..history.messages.len()).find(fits);
                        prop_assert_eq!(table.probe(source, tag), expected.map(|it| it as u64));
                    }
                }
            }
            let open = (0..history.receives.len()).filter(|it| history.receives[*it].2 == ReceiveFate::Open);
            let open: Vec<u64> = open.map(|it| it as u64).collect();
            prop_assert_eq!(table.receives(|_| true), open);
        }
    }

    /// Where each search went over all of them, this would take hours.
    #[test]
    fn many_receives_and_messages_cost_little_each() {
        const COUNT: u64 = 200_000;
        let begin = Instant::now();
        let mut table = MatchTable::default();
        for receive in 0..COUNT {
            let source = match receive % 3 {
                0 => Source::Any,
                _ => Source::Peer(1),
            };
            assert_eq!(table.post(receive, source, (receive as u32).into()), None);
        }
        for message in 0..COUNT {
            let tag = COUNT - 1 - message;
            assert_eq!(table.arrive(message, 1, tag as u32), Some(tag));
        }
        for message in 0..COUNT {
            assert_eq!(table.arrive(message, 1, message as u32), None);
        }
        for receive in 0..COUNT {
            let tag = COUNT - 1 - receive;
            let taken = table.post(receive, Source::Any, (tag as u32).into());
            assert_eq!(taken, Some(tag));
        }
        assert!(table.receives(|_| true).is_empty() && table.messages.is_empty());
        assert!(begin.elapsed() < Duration::from_secs(60));
    }
}
