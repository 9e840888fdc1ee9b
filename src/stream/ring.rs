//! The queue of one stream: many producers, one consumer, bounded, in order.
#![allow(unsafe_code)] // slots are shared between producers and the consumer; the cursors say whose a slot is

#[cfg(not(loom))]
use self::cell::UnsafeCell;
#[cfg(loom)]
use loom::{
    cell::UnsafeCell,
    sync::atomic::{AtomicU64, Ordering},
};
use std::sync::Arc;
#[cfg(not(loom))]
use std::sync::atomic::{AtomicU64, Ordering};

/// loom's `UnsafeCell` has an API of its own; this is the part of it in use, over the standard one.
#[cfg(not(loom))]
mod cell {
    #[repr(transparent)]
    pub(super) struct UnsafeCell<T>(std::cell::UnsafeCell<T>);

    impl<T> UnsafeCell<T> {
        pub(super) const fn new(value: T) -> Self {
            Self(std::cell::UnsafeCell::new(value))
        }

        pub(super) fn with_mut<R>(&self, f: impl FnOnce(*mut T) -> R) -> R {
            f(self.0.get())
        }
    }
}

/// Keeps the two cursors on cache lines of their own: each is written by another thread. 128 because adjacent lines are fetched
/// in pairs on x86.
#[repr(align(128))]
struct CacheAligned<T>(T);

/// What a slot holds. It always holds a value, which is written over in place: a value that is used in part only then costs no
/// more than that part.
pub(super) trait SlotValue: Default {
    /// Drops what the value owns. May leave the rest of it as it is.
    fn clear(&mut self) {
        drop(std::mem::take(self));
    }
}

/// Aligned so that two slots never share a cache line: one may be written while its neighbour is executed.
#[repr(C, align(64))]
struct Slot<T> {
    value: UnsafeCell<T>,
    /// Position of the value in it plus one. 0, or a value of an earlier lap: nothing published yet. Behind the value, whose end is
    /// always in use.
    published: AtomicU64,
}

/// Positions count up for ever; the slot of a position is its low bits. A position below `head` was consumed, one from `head` to
/// `tail` is claimed by a producer, and full as soon as `published` says so.
pub(super) struct Ring<T> {
    tail: CacheAligned<AtomicU64>,
    /// A `head` of some time ago, for producers: as long as it leaves room, they let the consumer keep the line of `head`.
    known_head: CacheAligned<AtomicU64>,
    head: CacheAligned<AtomicU64>,
    slots: Box<[Slot<T>]>,
    mask: u64,
}

// SAFETY: a slot is accessed by the producer that claimed its position until it is published, then by the one consumer until
// `head` passes it. Both handovers are release/acquire pairs, so values move between threads as through a channel: `T: Send`.
unsafe impl<T: Send> Send for Ring<T> {}
// SAFETY: as for Send.
unsafe impl<T: Send> Sync for Ring<T> {}

impl<T: SlotValue> Ring<T> {
    /// A ring of `capacity` slots, a power of two, and its only consumer.
    pub(super) fn new(capacity: usize) -> (Arc<Self>, Consumer<T>) {
        debug_assert!(capacity.is_power_of_two());
        let slots = (0..capacity).map(|_| Slot {
            published: AtomicU64::new(0),
            value: UnsafeCell::new(T::default()),
        });
        let ring = Arc::new(Self {
            tail: CacheAligned(AtomicU64::new(0)),
            known_head: CacheAligned(AtomicU64::new(0)),
            head: CacheAligned(AtomicU64::new(0)),
            slots: slots.collect(),
            mask: capacity as u64 - 1,
        });
        let consumer = Consumer {
            ring: Arc::clone(&ring),
            position: 0,
        };
        (ring, consumer)
    }

    pub(super) fn capacity(&self) -> usize {
        self.slots.len()
    }

    /// Positions claimed so far: the next one to be claimed.
    pub(super) fn claimed(&self) -> u64 {
        self.tail.0.load(Ordering::Acquire)
    }

    /// Claims `count` consecutive positions, or none when fewer are free.
    pub(super) fn claim(&self, count: usize) -> Option<Claim<'_, T>> {
        let count = count as u64;
        let mut tail = self.tail.0.load(Ordering::Relaxed);
        let fits = |tail: u64, head: u64| {
            // An old `tail` may lie below `head`; then the exchange fails and brings the new one.
            tail.saturating_sub(head) + count <= self.slots.len() as u64
        };
        loop {
            // Acquire: what the consumer did with a slot is over before a producer writes it again. Pairs with `pop`, by way of
            // the producer that stored it here.
            if !fits(tail, self.known_head.0.load(Ordering::Acquire)) {
                // Acquire: as above, at first hand.
                let head = self.head.0.load(Ordering::Acquire);
                // Another producer may have stored a later one meanwhile: an earlier one is true as well.
                self.known_head.0.store(head, Ordering::Release);
                if !fits(tail, head) {
                    let now = self.tail.0.load(Ordering::Relaxed);
                    if now == tail {
                        return None;
                    }
                    tail = now;
                    continue;
                }
            }
            match self.tail.0.compare_exchange_weak(
                tail,
                tail + count,
                Ordering::AcqRel,
                Ordering::Relaxed,
            ) {
                Ok(_) => {
                    return Some(Claim {
                        ring: self,
                        next: tail,
                        end: tail + count,
                    });
                }
                Err(now) => tail = now,
            }
        }
    }

    fn slot(&self, position: u64) -> &Slot<T> {
        &self.slots[(position & self.mask) as usize]
    }

    /// Asks for the lines of a later position that most values take, if it is free: the consumer's core used them last, and to get them from
    /// there takes longer than to queue a value. Only a hint, so a position that another producer claimed meanwhile does not matter.
    #[inline]
    fn prefetch(&self, position: u64) {
        #[cfg(all(target_arch = "x86_64", not(loom)))]
        if position.wrapping_sub(self.known_head.0.load(Ordering::Relaxed))
            < self.slots.len() as u64
        {
            let slot: *const u8 = (&raw const *self.slot(position)).cast();
            let last = size_of::<Slot<T>>() / 64 - 1;
            for line in [0, 1, last.saturating_sub(1), last] {
                // SAFETY: a hint to the processor, which has no effect on memory and cannot fault.
                unsafe {
                    std::arch::asm!(
                        "prefetchw [{}]",
                        in(reg) slot.wrapping_add(line * 64),
                        options(nostack, preserves_flags, readonly)
                    );
                }
            }
        }
        #[cfg(not(all(target_arch = "x86_64", not(loom))))]
        let _ = position;
    }

    fn is_published(&self, position: u64) -> bool {
        // Acquire: the value is there. Pairs with the store in `Claim::put`.
        self.slot(position).published.load(Ordering::Acquire) == position + 1
    }
}

/// How far ahead of what it publishes a producer asks for lines: an application that queues a kernel, a transfer and a wait again and again
/// comes there a step later, about when the lines are.
const AHEAD: u64 = 2;

/// Positions that belong to one producer. Those it leaves empty are filled with `T::default()` when it is dropped, because the
/// consumer waits for every one of them.
#[must_use]
pub(super) struct Claim<'a, T: SlotValue> {
    ring: &'a Ring<T>,
    next: u64,
    end: u64,
}

impl<T: SlotValue> Claim<'_, T> {
    /// The first position that is still empty.
    pub(super) fn position(&self) -> u64 {
        self.next
    }

    /// Publishes `value` at the next position. A value too many is dropped.
    pub(super) fn put(&mut self, value: T) {
        self.put_with(|place| *place = value);
    }

    /// Publishes the next position after `write` has made it what it is to be, over a value that was cleared. Does nothing when
    /// there is no further position.
    #[inline]
    pub(super) fn put_with(&mut self, write: impl FnOnce(&mut T)) {
        if self.next == self.end {
            return;
        }
        let slot = self.ring.slot(self.next);
        slot.value.with_mut(|place| {
            // SAFETY: the position is claimed by us and not published, so no other thread accesses its slot: the consumer was
            // done with it before it moved `head` past it, which `claim` saw.
            write(unsafe { &mut *place });
        });
        // Release: the value is in place before its position says so. Pairs with `is_published`.
        slot.published.store(self.next + 1, Ordering::Release);
        self.next += 1;
        self.ring.prefetch(self.next + AHEAD);
    }
}

impl<T: SlotValue> Drop for Claim<'_, T> {
    fn drop(&mut self) {
        while self.next < self.end {
            self.put(T::default());
        }
    }
}

/// The one consumer of a ring. Values are used in place, in their slot.
pub(super) struct Consumer<T> {
    ring: Arc<Ring<T>>,
    position: u64,
}

impl<T: SlotValue> Consumer<T> {
    /// The position of the front.
    pub(super) fn position(&self) -> u64 {
        self.position
    }

    /// True when the front can be used.
    pub(super) fn is_ready(&self) -> bool {
        self.ring.is_published(self.position)
    }

    /// True when no producer claimed anything that was not consumed.
    pub(super) fn is_empty(&self) -> bool {
        self.ring.claimed() == self.position
    }

    /// Lets `f` use the front, which stays where it is. None when nothing is there.
    pub(super) fn with_front<R>(&mut self, f: impl FnOnce(&mut T) -> R) -> Option<R> {
        if !self.is_ready() {
            return None;
        }
        Some(self.ring.slot(self.position).value.with_mut(|value| {
            // SAFETY: the position is published, so its producer is done with the slot. `&mut self` of the only consumer makes
            // the access exclusive, and no producer gets the slot before `pop` frees it.
            f(unsafe { &mut *value })
        }))
    }

    /// Clears the front and frees its slot, the latter also when a drop panics. False when nothing is there.
    pub(super) fn pop(&mut self) -> bool {
        struct Free<'a, T: SlotValue>(&'a mut Consumer<T>);
        impl<T: SlotValue> Drop for Free<'_, T> {
            fn drop(&mut self) {
                self.0.position += 1;
                // Release: our use of the slot is over before a producer may claim it. Pairs with the load in `claim`.
                self.0.ring.head.0.store(self.0.position, Ordering::Release);
            }
        }
        if !self.is_ready() {
            return false;
        }
        let free = Free(self);
        let consumer = &*free.0;
        consumer
            .ring
            .slot(consumer.position)
            .value
            .with_mut(|value| {
                // SAFETY: as in `with_front`.
                unsafe { &mut *value }.clear();
            });
        true
    }
}

/// Run by `RUSTFLAGS="--cfg loom" cargo test --release --lib loom`.
#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use loom::thread;

    impl SlotValue for Option<Box<u32>> {}

    /// Two producers, one with a batch, on a ring that cannot hold it all: order, contiguity, and slots handed over cleanly
    /// (loom's cell reports two accesses that nothing orders).
    #[test]
    fn loom_batches_stay_whole_and_slots_change_hands() {
        loom::model(|| {
            let (ring, mut consumer) = Ring::<Option<Box<u32>>>::new(2);
            let batch = {
                let ring = Arc::clone(&ring);
                thread::spawn(move || {
                    loop {
                        if let Some(mut claim) = ring.claim(2) {
                            claim.put(Some(Box::new(1)));
                            claim.put(Some(Box::new(2)));
                            break;
                        }
                        thread::yield_now();
                    }
                })
            };
            let single = {
                let ring = Arc::clone(&ring);
                thread::spawn(move || {
                    loop {
                        if let Some(mut claim) = ring.claim(1) {
                            claim.put(Some(Box::new(7)));
                            break;
                        }
                        thread::yield_now();
                    }
                })
            };
            let mut seen = Vec::new();
            while seen.len() < 3 {
                match consumer.with_front(|value| value.take()) {
                    Some(value) => {
                        seen.push(*value.expect("published empty"));
                        assert!(consumer.pop());
                    }
                    None => thread::yield_now(),
                }
            }
            assert!(seen == [1, 2, 7] || seen == [7, 1, 2], "{seen:?}");
            batch.join().unwrap();
            single.join().unwrap();
        });
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::collections::VecDeque;

    impl SlotValue for u32 {}
    impl SlotValue for u64 {}
    impl SlotValue for Option<Arc<()>> {}

    fn drain<T: SlotValue + Clone>(consumer: &mut Consumer<T>) -> Vec<T> {
        let mut seen = Vec::new();
        while let Some(value) = consumer.with_front(|value| value.clone()) {
            seen.push(value);
            assert!(consumer.pop());
        }
        seen
    }

    #[test]
    fn claims_all_or_nothing() {
        let (ring, mut consumer) = Ring::<u32>::new(4);
        let mut claim = ring.claim(3).unwrap();
        assert_eq!(claim.position(), 0);
        for value in 1..=3 {
            claim.put(value);
        }
        claim.put(99);
        drop(claim);
        assert!(ring.claim(2).is_none());
        assert_eq!(ring.claimed(), 3, "a refused claim takes nothing");
        ring.claim(1).unwrap().put(4);
        assert!(ring.claim(1).is_none());
        assert_eq!(drain(&mut consumer), [1, 2, 3, 4]);
        assert!(consumer.is_empty());
        assert!(!consumer.pop());
    }

    #[test]
    fn a_claim_left_open_holds_back_only_what_follows_it() {
        let (ring, mut consumer) = Ring::<u32>::new(4);
        let mut first = ring.claim(2).unwrap();
        ring.claim(1).unwrap().put(3);
        assert!(!consumer.is_ready());
        assert!(!consumer.is_empty());
        first.put(1);
        assert_eq!(drain(&mut consumer), [1]);
        drop(first);
        assert_eq!(drain(&mut consumer), [0, 3], "the rest is the default");
    }

    #[test]
    fn agrees_with_a_deque_over_many_laps() {
        let (ring, mut consumer) = Ring::<u64>::new(8);
        let mut model = VecDeque::new();
        let mut next = 0u64;
        let mut random = 1u64;
        for _ in 0..10_000 {
            random = random.wrapping_mul(6364136223846793005).wrapping_add(1);
            let count = (random >> 60) as usize % 10;
            if random >> 40 & 1 == 0 {
                match ring.claim(count) {
                    Some(mut claim) => {
                        assert!(model.len() + count <= 8);
                        for _ in 0..count {
                            claim.put(next);
                            model.push_back(next);
                            next += 1;
                        }
                    }
                    None => assert!(model.len() + count > 8),
                }
            } else {
                for _ in 0..count {
                    assert_eq!(consumer.with_front(|value| *value), model.pop_front());
                    consumer.pop();
                }
            }
        }
        assert!(next > 1000);
    }

    #[test]
    fn what_was_never_consumed_is_dropped_with_the_ring() {
        let value = Arc::new(());
        let (ring, mut consumer) = Ring::<Option<Arc<()>>>::new(4);
        for _ in 0..3 {
            ring.claim(1).unwrap().put(Some(Arc::clone(&value)));
        }
        consumer.pop();
        assert_eq!(Arc::strong_count(&value), 3);
        drop((ring, consumer));
        assert_eq!(Arc::strong_count(&value), 1);
    }

    #[test]
    fn a_panic_in_a_drop_frees_the_slot() {
        #[derive(Default)]
        struct Bomb(bool);
        impl Drop for Bomb {
            fn drop(&mut self) {
                assert!(!self.0, "bomb");
            }
        }
        impl SlotValue for Bomb {}
        let (ring, mut consumer) = Ring::<Bomb>::new(1);
        ring.claim(1).unwrap().put(Bomb(true));
        let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| consumer.pop()));
        assert!(caught.is_err());
        assert!(consumer.is_empty());
        ring.claim(1).unwrap().put(Bomb(false));
        assert!(consumer.pop());
    }

    #[test]
    fn producers_keep_their_own_order() {
        const EACH: u64 = 5000;
        let (ring, mut consumer) = Ring::<u64>::new(64);
        std::thread::scope(|scope| {
            for producer in 0..3u64 {
                let ring = &ring;
                scope.spawn(move || {
                    let mut next = 0;
                    while next < EACH {
                        let count = 1 + next % 5;
                        match ring.claim(count as usize) {
                            Some(mut claim) => {
                                for _ in 0..count {
                                    claim.put(producer << 32 | next << 3 | count);
                                    next += 1;
                                }
                            }
                            None => std::thread::yield_now(),
                        }
                    }
                });
            }
            let mut next = [0u64; 3];
            let mut seen = 0;
            let mut batch: Option<(u64, u64)> = None;
            while !(consumer.is_empty() && next.iter().all(|&n| n >= EACH)) {
                let Some(value) = consumer.with_front(|value| *value) else {
                    std::thread::yield_now();
                    continue;
                };
                consumer.pop();
                seen += 1;
                let (producer, number, count) =
                    (value >> 32, value >> 3 & (u32::MAX as u64 >> 3), value & 7);
                assert_eq!(number, next[producer as usize]);
                next[producer as usize] += 1;
                let left = match batch {
                    Some((owner, left)) => {
                        assert_eq!(owner, producer, "a batch was torn");
                        left - 1
                    }
                    None => count - 1,
                };
                batch = (left > 0).then_some((producer, left));
            }
            assert!(seen >= 3 * EACH);
        });
    }
}
