//! Ringing for streams: which component rings, and what a proxy stores when a trigger asks for it.
#![allow(unsafe_code)] // stores to the doorbell record and the UAR of the queue pair

use std::any::Any;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

use doorbell_wire::mmio;

use super::{EndpointShared, end_elsewhere};
use crate::endpoint::clock::now_ns;
use crate::endpoint::words::CacheLineStart;
use crate::endpoint::{Control, EndpointConfig, PathReport, QueueKind};
use crate::mlx5::{DoorbellStores, WQEBB_BYTES};
use crate::nic::{NicQueuePair, Queues};
use crate::proxy::{PollMembership, PollResult, Proxied, Proxy, TriggerCount, proxy_at};
use crate::region::ProtectionDomain;
use crate::{Cause, Result};

/// How long a proxy keeps polling an endpoint with nothing under way, so that an endpoint in use is not registered and unregistered for each
/// operation.
const LINGER_NS: u64 = 10_000_000;

/// Not resting: the proxy polls it in every round.
const ACTIVE: usize = usize::MAX;

/// What a GPU was given for the check whether it can ring. It is dropped before the queue pair, which may block until the GPU has done its
/// work.
pub(super) type DoorbellProbe = Option<Box<dyn Any + Send + Sync>>;

/// Chooses the component that rings, and makes what a proxy needs for it.
pub(super) fn choose(
    domain: &ProtectionDomain,
    qp: &dyn NicQueuePair,
    config: &EndpointConfig,
) -> Result<(PathReport, Option<DoorbellTable>, DoorbellProbe)> {
    let device = domain.device();
    let mut proxy = None;
    #[cfg_attr(not(feature = "cuda"), expect(unused_mut))]
    let mut doorbell_probe: DoorbellProbe = None;
    let asked = config.control.or(device.control());
    let path = PathReport::choose(asked, |control| match control {
        Control::Direct => {
            let reason = qp.direct()?;
            // An application that asks for this path may use streams of the host alone, so the GPUs are not checked then.
            #[cfg(feature = "cuda")]
            if asked.is_none() {
                // SAFETY: the endpoint drops it before the queue pair.
                let found = unsafe { crate::region::check_gpus(domain, qp)? };
                doorbell_probe = found.pinned.map(|it| Box::new(it) as Box<_>);
                if !found.finding.is_empty() {
                    return Ok(format!("{reason}; {}", found.finding));
                }
            }
            Ok(reason.to_owned())
        }
        Control::Proxy => {
            let placement = device.placement();
            let found = proxy_at(placement).map_err(|error| error.to_string())?;
            proxy = Some(found);
            Ok(format!(
                "a thread of the library, on {}, looks at trigger words and rings",
                placement.text()
            ))
        }
        Control::Sync => Ok("the calling thread waits for the stream and rings by itself".into()),
    })?;
    let doorbells = proxy
        .filter(|_| path.control == Control::Proxy)
        .map(|proxy| DoorbellTable::new(proxy, config));
    Ok((path, doorbells, doorbell_probe))
}

/// What a proxy needs to ring for an endpoint.
#[derive(Debug)]
#[repr(C)]
pub(in crate::endpoint) struct DoorbellTable {
    proxy: Arc<Proxy>,
    /// Whether the proxy serves the endpoint now. The poster checks it each time.
    served: PollMembership,
    /// The number under which the endpoint rests with the proxy, or [`ACTIVE`]. Rarely changes.
    resting: AtomicUsize,
    _proxy: CacheLineStart,
    last_work_ns: AtomicU64,
    doorbells: [QueueDoorbells; 2],
}

/// The table of one queue.
#[derive(Debug)]
#[repr(C)]
struct QueueDoorbells {
    _poster: CacheLineStart,
    /// The stores of each work request's doorbell, by its running count. They are written when it is prepared, because the ring is not
    /// read back. A place is used again when its work request is done, which is after the device was told of it.
    records: Box<[AtomicU32]>,
    /// None for receives.
    uars: Box<[AtomicU64]>,
    _proxy: CacheLineStart,
    /// Running count of work requests that the device was told of. Changes under `ringing`.
    doorbells_stored: AtomicU32,
    /// The doorbell record that it was told with.
    stored_record: AtomicU32,
    /// Held while the device is told. Never waited for by the proxy.
    ringing: Mutex<()>,
}

impl DoorbellTable {
    fn new(proxy: Arc<Proxy>, config: &EndpointConfig) -> DoorbellTable {
        let queue_doorbells = |records: u32, uars: u32| QueueDoorbells {
            _poster: CacheLineStart,
            _proxy: CacheLineStart,
            records: (0..records).map(|_| AtomicU32::new(0)).collect(),
            uars: (0..uars).map(|_| AtomicU64::new(0)).collect(),
            doorbells_stored: AtomicU32::new(0),
            stored_record: AtomicU32::new(0),
            ringing: Mutex::default(),
        };
        let [sends, receives] = [config.send_depth, config.recv_depth].map(u32::next_power_of_two);
        DoorbellTable {
            proxy,
            served: PollMembership::default(),
            resting: AtomicUsize::new(ACTIVE),
            _proxy: CacheLineStart,
            last_work_ns: AtomicU64::new(0),
            doorbells: [queue_doorbells(sends, sends), queue_doorbells(receives, 0)],
        }
    }

    /// The proxy that serves them.
    pub(in crate::endpoint) fn proxy(&self) -> Arc<Proxy> {
        Arc::clone(&self.proxy)
    }

    /// Enters the doorbell stores for the work request with that running count.
    #[inline]
    pub(in crate::endpoint) fn enter(&self, kind: QueueKind, count: u32, stores: DoorbellStores) {
        let queue_doorbells = &self.doorbells[kind as usize];
        let at = queue_doorbells.place(count);
        // Published with the program by the hand-over to the stream, and to the proxy by the trigger.
        queue_doorbells.records[at].store(stores.record, Ordering::Relaxed);
        if let Some(uar) = queue_doorbells.uars.get(at) {
            uar.store(stores.uar, Ordering::Relaxed);
        }
    }
}

impl DoorbellTable {
    /// Tells the proxy of the caller's stores, if it does not poll the endpoint in every round.
    #[inline]
    fn announce(&self) {
        // Orders what was stored before the look; pairs with the fence of the proxy between the number and its last poll.
        fence(Ordering::SeqCst);
        let number = self.resting.load(Ordering::Relaxed);
        if number != ACTIVE {
            self.proxy.announce(number);
        }
    }
}

impl QueueDoorbells {
    #[inline]
    fn place(&self, count: u32) -> usize {
        count as usize & (self.records.len() - 1)
    }

    fn lock(&self) -> MutexGuard<'_, ()> {
        self.ringing.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl EndpointShared {
    /// The doorbells, if the proxy path is in force.
    #[inline]
    pub(in crate::endpoint) fn doorbells(&self) -> Option<&DoorbellTable> {
        self.doorbells.as_ref()
    }

    /// Makes the proxy poll this endpoint, if it does not yet.
    #[inline]
    pub(super) fn register_with_proxy(&self) {
        let Some(doorbells) = &self.doorbells else {
            return;
        };
        if doorbells.served.join() {
            doorbells.last_work_ns.store(now_ns(), Ordering::Relaxed);
            doorbells.proxy.register(self.weak.clone());
        } else if doorbells.resting.load(Ordering::Relaxed) != ACTIVE && self.awaits_receives() {
            // Sends are announced when they are triggered.
            doorbells.announce();
        }
    }

    /// A stream has stored triggers.
    #[inline]
    pub(super) fn announce_triggers(&self) {
        if let Some(doorbells) = &self.doorbells {
            doorbells.announce();
        }
    }

    /// Whether streams wait for receives that are not complete.
    #[inline]
    fn awaits_receives(&self) -> bool {
        let taken = self.queue(QueueKind::Recv).taken.load(Ordering::Relaxed);
        let seen = self.words.seen[QueueKind::Recv as usize].load(Ordering::Relaxed);
        taken.wrapping_sub(seen).cast_signed() > 0
    }

    /// Sets the count of executed programs for which no doorbell has to be rung any more: when a generation ends, or before one begins.
    pub(in crate::endpoint) fn set_rung(&self, kind: QueueKind, count: u32) {
        let queue_doorbells = self
            .doorbells
            .as_ref()
            .map(|doorbells| &doorbells.doorbells[kind as usize]);
        // Held, so that the proxy finds nothing between the two.
        let _ringing = queue_doorbells.map(QueueDoorbells::lock);
        if let Some(queue_doorbells) = queue_doorbells {
            queue_doorbells
                .doorbells_stored
                .store(count, Ordering::Relaxed);
        }
        self.words.rung[kind as usize].store(count, Ordering::Release);
    }

    /// Running count of work requests whose doorbell was stored: on the proxy path by the proxy, elsewhere by the program that counts.
    pub(in crate::endpoint) fn doorbells_stored(&self, kind: QueueKind) -> u32 {
        let Some(doorbells) = &self.doorbells else {
            return self.rung(kind);
        };
        let queue_doorbells = &doorbells.doorbells[kind as usize];
        let _ringing = queue_doorbells.lock();
        queue_doorbells.doorbells_stored.load(Ordering::Relaxed)
    }

    /// Tells the device what was triggered, unless another thread is doing so. Returns whether there was anything.
    #[inline]
    pub(in crate::endpoint) fn ring_triggered(&self, kind: QueueKind) -> bool {
        let Some(doorbells) = &self.doorbells else {
            return false;
        };
        let queue_doorbells = &doorbells.doorbells[kind as usize];
        if self.queue(kind).is_device_owned()
            && let Ok(_ringing) = queue_doorbells.ringing.try_lock()
        {
            self.trigger_for_kernels(kind, queue_doorbells);
        }
        if self.rung(kind) == queue_doorbells.doorbells_stored.load(Ordering::Relaxed) {
            return false;
        }
        match queue_doorbells.ringing.try_lock() {
            Ok(_ringing) => self.ring(kind, queue_doorbells),
            Err(TryLockError::Poisoned(_ringing)) => self.ring(kind, queue_doorbells),
            Err(TryLockError::WouldBlock) => false,
        }
    }

    /// Tells the device of all that kernels have submitted. If another thread is ringing, waits for it first.
    pub(in crate::endpoint) fn ring_submitted(&self, kind: QueueKind) {
        if let Some(doorbells) = &self.doorbells {
            let queue_doorbells = &doorbells.doorbells[kind as usize];
            let _ringing = queue_doorbells.lock();
            // Once is enough, because no more than that is in flight. This also rings for what the proxy has triggered and not rung for yet.
            self.trigger_for_kernels(kind, queue_doorbells);
            self.ring(kind, queue_doorbells);
        }
    }

    /// Triggers what kernels have submitted, as a stream would: sets the count, and the doorbell stores of the last request.
    /// The caller holds the lock of these doorbells.
    #[cold]
    fn trigger_for_kernels(&self, kind: QueueKind, queue_doorbells: &QueueDoorbells) {
        let Some((upto, doorbell)) = self.queue(kind).submitted(self.rung(kind)) else {
            return;
        };
        let at = queue_doorbells.place(upto.wrapping_sub(1));
        queue_doorbells.records[at].store((upto & 0xffff).to_be(), Ordering::Relaxed);
        if let Some(uar) = queue_doorbells.uars.get(at) {
            uar.store(doorbell, Ordering::Relaxed);
        }
        self.queue(kind).queued.store(upto, Ordering::Release);
        self.words.rung[kind as usize].store(upto, Ordering::Release);
    }

    /// Tells the device what was triggered. If another thread is ringing, waits for it first.
    #[inline]
    pub(in crate::endpoint) fn ring_now(&self, kind: QueueKind) {
        if let Some(doorbells) = &self.doorbells {
            let queue_doorbells = &doorbells.doorbells[kind as usize];
            let _ringing = queue_doorbells.lock();
            self.ring(kind, queue_doorbells);
            if kind == QueueKind::Recv {
                // The peer may send as soon as it learns that the caller has posted the receive.
                self.qp.wait_receives_posted();
            }
        }
    }

    /// The caller holds the lock of these doorbells.
    fn ring(&self, kind: QueueKind, queue_doorbells: &QueueDoorbells) -> bool {
        // Acquire, inside: after what the stream did before it triggered.
        let triggered = self.rung(kind);
        let doorbells_stored = queue_doorbells.doorbells_stored.load(Ordering::Relaxed);
        if triggered == doorbells_stored {
            return false;
        }
        self.prefetch_for_ring(kind, queue_doorbells, triggered);
        // The word is memory that streams and kernels write. A work request that was never handed to a stream has no doorbell here.
        let handed = self.queue(kind).queued.load(Ordering::Acquire);
        if triggered.wrapping_sub(doorbells_stored) > handed.wrapping_sub(doorbells_stored) {
            self.fail(None, Cause::Trigger(triggered));
            return false;
        }
        // A record is a count: the last one covers all before it.
        let at = queue_doorbells.place(triggered.wrapping_sub(1));
        let Queues::Mlx5(memory) = self.qp.queues();
        let record_word = if kind == QueueKind::Send { 1 } else { 0 };
        let record = queue_doorbells.records[at].load(Ordering::Relaxed);
        // SAFETY: the record has two words, which live as long as `qp`; any other thread that stores to them holds `ringing`, or has the
        // endpoint to itself. Release: the work requests before it, which were written before the trigger was stored.
        unsafe { AtomicU32::from_ptr(memory.record.add(record_word)) }
            .store(record, Ordering::Release);
        queue_doorbells
            .stored_record
            .store(record, Ordering::Relaxed);
        if let Some(doorbell) = queue_doorbells.uars.get(at) {
            // Either register will do. A burst of stores to a single one would wait for its buffer, so they alternate.
            let uar = memory.uar[triggered as usize & 1];
            mmio::flush();
            // SAFETY: a register of the queue pair's own, of 8 bytes, mapped as long as `qp` lives.
            unsafe { mmio::store(uar.cast(), doorbell.load(Ordering::Relaxed)) };
            // A thread that learns of this doorbell may ring the next one from another processor.
            mmio::flush();
        }
        queue_doorbells
            .doorbells_stored
            .store(triggered, Ordering::Relaxed);
        self.qp.rung();
        true
    }

    /// Asks for the memory that ringing and the completion will need, all of which the poster's core wrote last: the work request itself, which
    /// a device of software reads, and what the reaper looks at. To get one after the other from there would take several times as long.
    #[inline]
    fn prefetch_for_ring(&self, kind: QueueKind, queue_doorbells: &QueueDoorbells, triggered: u32) {
        let queue = self.queue(kind);
        let Queues::Mlx5(memory) = self.qp.queues();
        if kind == QueueKind::Send {
            // Of several, only the first one's place is known without a look.
            let first = u32::from_be(queue_doorbells.stored_record.load(Ordering::Relaxed));
            let at = first as usize & (self.send_wqebbs as usize - 1);
            fetch(memory.send_ring.cast::<u8>().wrapping_add(at * WQEBB_BYTES));
        }
        for place in queue.places(triggered.wrapping_sub(1)) {
            fetch(place);
        }
    }

    /// Whether completions are to come that streams wait for, or kernels have the queue, whose counts are elsewhere.
    fn awaits_device(&self, doorbells: &DoorbellTable) -> bool {
        let send = self.queue(QueueKind::Send);
        let [doorbells_stored, _] = &doorbells.doorbells;
        send.is_device_owned()
            || doorbells_stored.doorbells_stored.load(Ordering::Relaxed) != send.outstanding.done()
            || self.rung(QueueKind::Send)
                != doorbells_stored.doorbells_stored.load(Ordering::Relaxed)
            || self.awaits_receives()
    }

    /// Whether there are triggers that the device was not told of, or may be some.
    fn expects_triggers(&self, doorbells: &DoorbellTable) -> bool {
        self.on_streams.any()
            || [QueueKind::Send, QueueKind::Recv].into_iter().any(|kind| {
                self.rung(kind)
                    != doorbells.doorbells[kind as usize]
                        .doorbells_stored
                        .load(Ordering::Relaxed)
            })
    }
}

impl Proxied for EndpointShared {
    fn drop_reference(self: Arc<Self>) {
        end_elsewhere(self);
    }

    fn rest(&self, number: Option<usize>) -> Option<Arc<dyn TriggerCount>> {
        let doorbells = self.doorbells.as_ref()?;
        doorbells
            .resting
            .store(number.unwrap_or(ACTIVE), Ordering::Relaxed);
        number?;
        Some(Arc::clone(&self.words) as Arc<dyn TriggerCount>)
    }

    fn ring_for_streams(&self) -> PollResult {
        let Some(doorbells) = &self.doorbells else {
            return PollResult::Over;
        };
        let rang = self.ring_triggered(QueueKind::Send) | self.ring_triggered(QueueKind::Recv);
        // Without work on a stream, nothing waits for the device here. Kernels that own the queue count as work on a stream.
        let moved = (rang || self.on_streams.any() || self.holds_work()) && self.qp.progress();
        if self.reap() | rang | moved {
            return PollResult::Worked;
        }
        // What was rung for and waits for others needs a thread that looks, and the stream that triggered it may be done.
        let is_expected = || self.expects_triggers(doorbells) || self.holds_work();
        if is_expected() {
            if doorbells.last_work_ns.load(Ordering::Relaxed) != 0 {
                doorbells.last_work_ns.store(0, Ordering::Relaxed);
            }
            return if self.awaits_device(doorbells) {
                PollResult::Waiting
            } else {
                PollResult::Resting
            };
        }
        let now = now_ns();
        let last = doorbells.last_work_ns.load(Ordering::Relaxed);
        if last == 0 {
            doorbells.last_work_ns.store(now, Ordering::Relaxed);
            return PollResult::Resting;
        }
        if now.saturating_sub(last) < LINGER_NS {
            return PollResult::Resting;
        }
        doorbells.served.leave(is_expected)
    }
}

/// Asks the processor for a line, to be read soon.
#[inline]
fn fetch(line: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a hint, which has no effect on memory and cannot fault.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(line.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = line;
}
