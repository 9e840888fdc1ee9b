//! The entries of a registration cache: address ranges, and which of them go when there is no room.
//!
//! No call here allocates or frees, because the monitor's thread waits for the lock around a table while another thread may be inside
//! `munmap` waiting for the monitor: a thread that holds the lock and calls `munmap`, as `free` may, would wait for itself. So values
//! that leave a table are put aside, and dropped by a caller without the lock.

use super::cache::CacheCounters;

/// What a range is registered for: rights in verbs' bits, first byte, and the byte behind the last one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RegisteredRange {
    pub(super) access: u32,
    pub(super) start: u64,
    pub(super) end: u64,
}

impl RegisteredRange {
    fn contains(&self, other: &RegisteredRange) -> bool {
        self.access == other.access && self.start <= other.start && other.end <= self.end
    }

    fn len_bytes(&self) -> u64 {
        self.end - self.start
    }

    /// Rights and first byte as one number, by which entries are in order. No processor has addresses of 60 bits.
    #[inline]
    fn key(&self) -> u64 {
        u64::from(self.access) << 60 | self.start
    }
}

#[derive(Debug)]
pub(super) struct CacheEntry<T> {
    pub(super) range: RegisteredRange,
    /// How many have promised that all of the range stays as it is.
    pub(super) held: u32,
    pub(super) id: u64,
    used: u64,
    pub(super) value: T,
}

/// A registration on its way: the range may become invalid before it is an entry.
#[derive(Debug)]
struct PendingRegistration {
    id: u64,
    range: RegisteredRange,
    invalid: bool,
}

/// Registrations on their way at once; those of more threads are not kept.
const MAX_PENDING: usize = 64;

/// Entries in the order of their rights and first bytes. Among those of the same rights none contains another, so the order of their ends
/// is the same, and one step finds the only entry that can contain a range.
#[derive(Debug)]
pub(super) struct Table<T> {
    entries: Vec<CacheEntry<T>>,
    /// Their keys, close together: a lookup reads one entry.
    keys: Vec<u64>,
    pending: Vec<PendingRegistration>,
    gone: Vec<T>,
    max_entries: usize,
    max_bytes: u64,
    bytes: u64,
    clock: u64,
    ids: u64,
    pub(super) counters: CacheCounters,
}

impl<T> Table<T> {
    pub(super) fn new(max_entries: usize, max_bytes: u64) -> Table<T> {
        Table {
            entries: Vec::with_capacity(max_entries),
            keys: Vec::with_capacity(max_entries),
            pending: Vec::with_capacity(MAX_PENDING),
            gone: Vec::with_capacity(2 * max_entries),
            max_entries,
            max_bytes,
            bytes: 0,
            clock: 0,
            ids: 0,
            counters: CacheCounters::default(),
        }
    }

    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The place of the entry that contains a range.
    fn place(&self, range: &RegisteredRange) -> Option<usize> {
        let key = range.key();
        let behind = self.keys.partition_point(|it| *it <= key);
        let place = behind.checked_sub(1)?;
        self.entries
            .get(place)?
            .range
            .contains(range)
            .then_some(place)
    }

    /// The entry that contains a range, as the one used last.
    #[inline]
    pub(super) fn find(
        &mut self,
        range: &RegisteredRange,
    ) -> Option<(&mut CacheEntry<T>, &mut CacheCounters)> {
        let place = self.place(range)?;
        self.clock += 1;
        let entry = self.entries.get_mut(place)?;
        entry.used = self.clock;
        Some((entry, &mut self.counters))
    }

    /// Puts the entry aside that contains a range.
    pub(super) fn discard(&mut self, range: &RegisteredRange) {
        if let Some(place) = self.place(range) {
            self.remove(place);
            self.counters.invalidations += 1;
        }
    }

    /// A range is about to be registered. `None` if too many are.
    pub(super) fn begin(&mut self, range: RegisteredRange) -> Option<u64> {
        if self.pending.len() == MAX_PENDING {
            return None;
        }
        self.ids += 1;
        self.pending.push(PendingRegistration {
            id: self.ids,
            range,
            invalid: false,
        });
        Some(self.ids)
    }

    /// The registration that has begun is not to be kept. Whether its range has stayed valid, and what it is.
    pub(super) fn end(&mut self, id: u64) -> Option<RegisteredRange> {
        let at = self.pending.iter().position(|it| it.id == id)?;
        let pending = self.pending.swap_remove(at);
        (!pending.invalid).then_some(pending.range)
    }

    /// Keeps the registration that has begun, if its range is still valid and there is room, once those go that nobody uses and that were
    /// used longest ago. `exact` takes the place of an entry that contains it. The value comes back if it is not kept.
    pub(super) fn keep(
        &mut self,
        id: u64,
        value: T,
        held: u32,
        exact: bool,
        in_use: impl Fn(&T) -> bool,
    ) -> Result<(), T> {
        let Some(range) = self.end(id) else {
            return Err(value);
        };
        let len_bytes = range.len_bytes();
        // Values that were put aside take room, too, until they are dropped: entries can be put aside at any time, and then there has to be
        // room.
        let room = self.entries.len() + self.gone.len() < 2 * self.max_entries
            && len_bytes <= self.max_bytes;
        if !room || (!exact && self.place(&range).is_some()) {
            return Err(value);
        }
        if !self.make_room(len_bytes, &in_use) {
            return Err(value);
        }
        self.take_out(|it| it.contains(&range) || range.contains(it));
        let place = self.keys.partition_point(|it| *it < range.key());
        self.clock += 1;
        let entry = CacheEntry {
            range,
            held,
            id,
            used: self.clock,
            value,
        };
        self.keys.insert(place, range.key());
        self.entries.insert(place, entry);
        self.bytes += len_bytes;
        Ok(())
    }

    /// Room for one more entry of so many bytes. Entries that go before it is known that it will not do are no loss of correctness.
    fn make_room(&mut self, len_bytes: u64, in_use: &impl Fn(&T) -> bool) -> bool {
        while self.entries.len() >= self.max_entries || self.bytes + len_bytes > self.max_bytes {
            let oldest = self
                .entries
                .iter()
                .enumerate()
                .filter(|(_, entry)| entry.held == 0 && !in_use(&entry.value))
                .min_by_key(|(_, entry)| entry.used)
                .map(|(place, _)| place);
            let Some(place) = oldest else {
                return false;
            };
            self.remove(place);
            self.counters.evictions += 1;
        }
        true
    }

    fn remove(&mut self, place: usize) {
        self.keys.remove(place);
        let entry = self.entries.remove(place);
        self.bytes -= entry.range.len_bytes();
        self.gone.push(entry.value);
    }

    /// Removes the entries whose ranges satisfy `is`. Returns their number.
    fn take_out(&mut self, is: impl Fn(&RegisteredRange) -> bool) -> u64 {
        let (mut place, mut count) = (0, 0);
        while let Some(entry) = self.entries.get(place) {
            if is(&entry.range) {
                self.remove(place);
                count += 1;
            } else {
                place += 1;
            }
        }
        count
    }

    /// No entry has any of these bytes afterwards. How many had.
    pub(super) fn invalidate(&mut self, start: u64, end: u64) -> u64 {
        let meets = |it: &RegisteredRange| start < end && it.start < end && start < it.end;
        for pending in &mut self.pending {
            pending.invalid |= meets(&pending.range);
        }
        let count = self.take_out(meets);
        self.counters.invalidations += count;
        count
    }

    /// An entry is no longer held by one of its holders.
    pub(super) fn release(&mut self, id: u64) {
        if let Some(entry) = self.entries.iter_mut().find(|entry| entry.id == id) {
            entry.held = entry.held.saturating_sub(1);
        }
    }

    /// A value that was put aside; to be dropped without the lock.
    pub(super) fn take_gone(&mut self) -> Option<T> {
        self.gone.pop()
    }
}

impl<T: Clone> CacheEntry<T> {
    #[inline]
    pub(super) fn value(&self) -> T {
        self.value.clone()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    #[derive(Debug, Clone)]
    enum Step {
        Request {
            range: RegisteredRange,
            exact: bool,
        },
        Invalidate {
            start: u64,
            end: u64,
        },
        /// A registration meets an invalidation before it is kept.
        Overtaken {
            range: RegisteredRange,
            start: u64,
            end: u64,
        },
        /// The value gets another user, or loses all.
        Use {
            value: u64,
            used: bool,
        },
        Release {
            index: usize,
        },
        Sweep,
    }

    fn range() -> impl Strategy<Value = RegisteredRange> {
        (0..2u32, 0..40u64, 1..12u64).prop_map(|(access, start, len)| RegisteredRange {
            access,
            start,
            end: start + len,
        })
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            8 => (range(), any::<bool>()).prop_map(|(range, exact)| Step::Request { range, exact }),
            2 => (0..50u64, 0..8u64).prop_map(|(start, len)| Step::Invalidate { start, end: start + len }),
            1 => (range(), 0..50u64, 0..8u64)
                .prop_map(|(range, start, len)| Step::Overtaken { range, start, end: start + len }),
            2 => (0..60u64, any::<bool>()).prop_map(|(value, used)| Step::Use { value, used }),
            1 => (0..8usize).prop_map(|index| Step::Release { index }),
            2 => Just(Step::Sweep),
        ]
    }

    /// What the table is to be, written down without any order: entries as (range, value, held, id), the one used last at the end.
    #[derive(Default)]
    struct Model {
        entries: Vec<(RegisteredRange, u64, u32, u64)>,
        gone: usize,
        evictions: u64,
        invalidations: u64,
    }

    const ENTRIES: usize = 5;
    const BYTES: u64 = 30;

    impl Model {
        fn bytes(&self) -> u64 {
            self.entries
                .iter()
                .map(|(range, ..)| range.len_bytes())
                .sum()
        }

        fn remove(&mut self, is: impl Fn(&RegisteredRange) -> bool) -> u64 {
            let before = self.entries.len();
            self.entries.retain(|(range, ..)| !is(range));
            self.gone += before - self.entries.len();
            (before - self.entries.len()) as u64
        }

        fn invalidate(&mut self, start: u64, end: u64) -> u64 {
            let bytes: BTreeSet<u64> = (start..end).collect();
            let count = self.remove(|it| (it.start..it.end).any(|byte| bytes.contains(&byte)));
            self.invalidations += count;
            count
        }

        fn keep(
            &mut self,
            range: RegisteredRange,
            value: u64,
            held: u32,
            exact: bool,
            id: u64,
            users: &BTreeSet<u64>,
        ) -> bool {
            let contains = |one: &RegisteredRange, other: &RegisteredRange| {
                one.access == other.access
                    && (other.start..other.end).all(|byte| (one.start..one.end).contains(&byte))
            };
            if range.len_bytes() > BYTES
                || self.entries.len() + self.gone >= 2 * ENTRIES
                || (!exact && self.entries.iter().any(|(it, ..)| contains(it, &range)))
            {
                return false;
            }
            while self.entries.len() == ENTRIES || self.bytes() + range.len_bytes() > BYTES {
                let free = |(_, value, held, _): &(RegisteredRange, u64, u32, u64)| {
                    *held == 0 && !users.contains(value)
                };
                let Some(at) = self.entries.iter().position(free) else {
                    return false;
                };
                self.entries.remove(at);
                self.gone += 1;
                self.evictions += 1;
            }
            self.remove(|it| contains(it, &range) || contains(&range, it));
            self.entries.push((range, value, held, id));
            true
        }
    }

    proptest! {
        #[test]
        fn table_agrees_with_a_list_model(steps in proptest::collection::vec(step(), 1..80)) {
            let mut table = Table::new(ENTRIES, BYTES);
            let capacity = [table.entries.capacity(), table.keys.capacity(), table.gone.capacity()];
            let (mut model, mut users, mut value) = (Model::default(), BTreeSet::new(), 0u64);
            for step in steps {
                match step {
                    Step::Request { range, exact } => {
                        let contains = |it: &RegisteredRange| it.access == range.access && it.start <= range.start && range.end <= it.end;
                        // Of two that overlap, the one that begins later.
                        let containing = model.entries.iter().enumerate().filter(|(_, (it, ..))| contains(it));
                        let at = containing.max_by_key(|(_, (it, ..))| it.start).map(|(at, _)| at);
                        let found = table.find(&range).map(|(entry, _)| (entry.range, entry.value(), entry.held, entry.id));
                        prop_assert_eq!(found, at.map(|at| model.entries[at]));
                        if let Some(at) = at {
                            let entry = model.entries.remove(at);
                            model.entries.push(entry);
                        }
                        if at.is_none() || exact {
                            value += 1;
                            let id = table.begin(range).unwrap();
                            let held = u32::from(exact);
                            let kept = table.keep(id, value, held, exact, |it| users.contains(it));
                            prop_assert_eq!(kept.is_ok(), model.keep(range, value, held, exact, id, &users));
                        }
                    }
                    Step::Invalidate { start, end } => {
                        prop_assert_eq!(table.invalidate(start, end), model.invalidate(start, end));
                    }
                    Step::Overtaken { range, start, end } => {
                        value += 1;
                        let id = table.begin(range).unwrap();
                        prop_assert_eq!(table.invalidate(start, end), model.invalidate(start, end));
                        let met = (start..end).any(|byte| (range.start..range.end).contains(&byte));
                        let kept = table.keep(id, value, 0, false, |it| users.contains(it)).is_ok();
                        prop_assert_eq!(kept, !met && model.keep(range, value, 0, false, id, &users));
                    }
                    Step::Use { value, used: true } => drop(users.insert(value)),
                    Step::Use { value, used: false } => drop(users.remove(&value)),
                    Step::Release { index } => {
                        if let Some(entry) = model.entries.get_mut(index) {
                            table.release(entry.3);
                            entry.2 = entry.2.saturating_sub(1);
                        }
                    }
                    Step::Sweep => {
                        while table.take_gone().is_some() {
                            model.gone -= 1;
                        }
                        prop_assert_eq!(model.gone, 0);
                    }
                }
                prop_assert_eq!(table.len(), model.entries.len());
                prop_assert_eq!(table.bytes(), model.bytes());
                prop_assert_eq!(table.gone.len(), model.gone);
                prop_assert_eq!(table.counters.evictions, model.evictions);
                prop_assert_eq!(table.counters.invalidations, model.invalidations);
                // Nothing was allocated.
                prop_assert_eq!(capacity, [table.entries.capacity(), table.keys.capacity(), table.gone.capacity()]);
                prop_assert!(table.pending.is_empty());
            }
        }
    }

    #[test]
    fn more_registrations_at_once_than_are_kept_track_of_are_refused() {
        let mut table = Table::<u64>::new(4, 100);
        let range = RegisteredRange {
            access: 0,
            start: 0,
            end: 1,
        };
        let ids: Vec<_> = (0..MAX_PENDING)
            .map(|_| table.begin(range).unwrap())
            .collect();
        assert_eq!(table.begin(range), None);
        assert_eq!(table.end(ids[3]), Some(range));
        assert!(table.begin(range).is_some());
    }
}
