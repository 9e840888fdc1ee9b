//! What an endpoint shares with its tickets, with the programs on streams, and with the watchdog.
#![allow(unsafe_code)] // promises the memory behind the targets to executors

mod in_flight;
mod owner;
mod proxy_doorbells;
mod recovery;
mod status;
mod watched;

use std::collections::VecDeque;
use std::fmt;
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use crate::bytecode::{Dword, Role, Target, Targets};
use crate::endpoint::queue::QueueState;
use crate::endpoint::watchdog::{Watched, watchdog};
use crate::endpoint::words::{ProgressPage, WordPair};
use crate::endpoint::{AddressHandle, EndpointConfig, PathReport, QueueKind};
use crate::mlx5::{CqRing, CqRingConfig, Posted, SendQueue, WQEBB_BYTES, Wqe};
use crate::nic::{NicQueuePair, Queues, Transport};
use crate::proxy::{PollMembership, ProgressThread, execute_elsewhere};
use crate::region::ProtectionDomain;
use crate::stream::{Asymmetric, Attachments, KernelMemory, ReadPlace};
use crate::{Error, Result, StateKind, WorkError};

use in_flight::InFlight;
pub(super) use owner::Cookie;
pub(super) use proxy_doorbells::DoorbellTable;
use recovery::DeviceStop;
pub(super) use recovery::Entered;
use status::GenerationEnd;

pub(super) struct EndpointShared {
    /// Before the memory that it is about.
    attachments: Attachments,
    /// Before the queue pair.
    _doorbell_probe: proxy_doorbells::DoorbellProbe,
    /// Before the rest, so that the queue pair is destroyed before the regions that its work names are released.
    pub(super) qp: Box<dyn NicQueuePair>,
    /// Of a UD endpoint that was dropped while others had it: the address handles of its last work. Behind the queue pair.
    last_handles: Mutex<VecDeque<(u32, AddressHandle)>>,
    pub(super) domain: ProtectionDomain,
    targets: Targets,
    bases: Vec<NonNull<u8>>,
    pub(super) words: Arc<ProgressPage>,
    /// Where executed programs leave their count: send and receive.
    pub(super) progress_words: [Dword; 2],
    /// Where completions are counted that were processed.
    pub(super) seen_words: [Dword; 2],
    /// The longest message that the endpoint can send.
    pub(super) message_bytes: u32,
    /// Which component rings the doorbell.
    pub(super) path: PathReport,
    /// On the proxy path only.
    doorbells: Option<DoorbellTable>,
    pub(super) queues: [QueueState; 2],
    pub(super) send_wqebbs: u32,
    /// The first failure. The flag is set after it, and stays until a reset.
    failure: Mutex<Option<WorkError>>,
    has_failed: AtomicBool,
    /// When it was set.
    failed_ns: AtomicU64,
    /// Set when the device does nothing more for this generation, or was given up because it cannot be stopped.
    is_shut_down: AtomicBool,
    /// Between a thread that gives an operation to a stream and one that ends the operations of a failed endpoint.
    pub(super) handing: Asymmetric,
    stop_state: Arc<DeviceStop>,
    /// Counts lives: each reset starts a new one. Changes under the lock of `failure`.
    pub(super) epoch: AtomicU32,
    /// Counts generations that are over: one more than `epoch` while the next one is being made.
    ended: AtomicU32,
    /// Held while the watchdog checks and while a new generation starts, so that a failure is never recorded for the wrong generation.
    generation: Mutex<()>,
    /// Of earlier generations, the oldest first.
    generations: Mutex<VecDeque<GenerationEnd>>,
    /// Programs that streams have and have not finished.
    on_streams: InFlight,
    /// The endpoint was dropped: its queue pair fails when no stream has a program of it.
    is_dropped: AtomicBool,
    /// A reset is under way: nothing more is given to streams.
    closing: AtomicBool,
    watched: PollMembership,
    /// The last stream without a thread that has had an operation; 0 if none had.
    pub(super) looked_stream: AtomicU64,
    last_active_ns: AtomicU64,
    watchdog: &'static ProgressThread<dyn Watched>,
    weak: Weak<EndpointShared>,
}

// SAFETY: the raw addresses are those of rings and pages that live as long as `self`. The modules that access them (`mlx5` of the package
// `doorbell-wire`, the software ConnectX, and `stream`) state what each thread may do with them.
unsafe impl Send for EndpointShared {}
// SAFETY: as above; all other state is atomics and locks.
unsafe impl Sync for EndpointShared {}

impl fmt::Debug for EndpointShared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EndpointShared")
            .field("qpn", &self.qp.qpn())
            .field("failure", &self.failure())
            .finish_non_exhaustive()
    }
}

/// The endpoint's own handle. When it is dropped, the queue pair fails, as soon as no stream has a program of it. When no ticket or operation
/// has another handle, the queue pair is destroyed: the progress threads hold no permanent reference.
#[derive(Debug)]
pub(super) struct EndpointRef {
    shared: ManuallyDrop<Arc<EndpointShared>>,
    /// Of a UD endpoint: the address handles of work in flight, each with the running count of the last work request that names it. They must exist as long as
    /// the queue pair: what streams have goes on when this is dropped.
    pub(super) handles: VecDeque<(u32, AddressHandle)>,
}

impl EndpointRef {
    pub(super) fn new(shared: Arc<EndpointShared>) -> EndpointRef {
        EndpointRef {
            shared: ManuallyDrop::new(shared),
            handles: VecDeque::new(),
        }
    }
}

impl Deref for EndpointRef {
    type Target = Arc<EndpointShared>;

    fn deref(&self) -> &Arc<EndpointShared> {
        &self.shared
    }
}

impl Drop for EndpointRef {
    fn drop(&mut self) {
        // SAFETY: taken once, in here, and not used after it.
        let shared = unsafe { ManuallyDrop::take(&mut self.shared) };
        if Arc::strong_count(&shared) > 1 {
            if !self.handles.is_empty() {
                let last_handles = shared.last_handles.lock();
                let mut last_handles = last_handles.unwrap_or_else(PoisonError::into_inner);
                last_handles.append(&mut self.handles);
            }
            shared.end_endpoint();
        }
        if shared.has_failed.load(Ordering::Acquire) {
            // It is to be known whether the device may still access what the endpoint has; and no thread is to have a handle for a command.
            shared.shut_down_until(u64::MAX);
            shared.await_orders();
        }
        let (watchdog, proxy) = (
            shared.watchdog,
            shared.doorbells().map(DoorbellTable::proxy),
        );
        // The handle is given up between their turns, the queue pair destroyed after that: others need not wait for it.
        let last = watchdog.between_polls(|| match proxy {
            Some(proxy) => proxy.between_polls(|| Arc::into_inner(shared)),
            None => Arc::into_inner(shared),
        });
        drop(last);
    }
}

/// Drops a progress thread's reference. If it is the last one, another thread runs the destructor: it issues commands of the device, and may have to wait
/// for a GPU.
pub(in crate::endpoint) fn end_elsewhere(shared: Arc<EndpointShared>) {
    if let Some(last) = Arc::into_inner(shared) {
        execute_elsewhere(Box::new(last));
    }
}

/// The longest work request that a doorbell carries to the device (BlueFlame), of the 256 bytes that a register takes: with more, a program has no room
/// for the wait for another stream's turn.
const COPY_BYTES_MAX: u32 = 192;

/// The targets of an endpoint's programs that the queues need to know.
pub(super) struct QueueTargets {
    pub(super) send_record: Dword,
    pub(super) recv_record: Dword,
    pub(super) uar: [crate::bytecode::Block; 2],
}

impl EndpointShared {
    pub(super) fn new(
        domain: &ProtectionDomain,
        config: &EndpointConfig,
    ) -> Result<(Arc<EndpointShared>, QueueTargets)> {
        let watchdog = watchdog()?;
        let qp = domain.on_device()?.queue_pair(&config.capacity())?;
        let message_bytes = match config.transport {
            Transport::Ud => config.mtu_bytes.min(qp.mtu_bytes()),
            _ => qp.abilities().message_bytes,
        };
        let Queues::Mlx5(&memory) = qp.queues();
        let (path, doorbells, doorbell_probe) = proxy_doorbells::choose(domain, &*qp, config)?;
        let words = Arc::new(ProgressPage::new()?);
        let mut targets = Targets::new();
        let mut bases = Vec::new();
        let mut register = |name: &str, role, len_bytes: u64, base: *mut u8| -> Result<Target> {
            bases.push(NonNull::new(base).ok_or(Error::System {
                operation: "queue memory",
                errno: libc::ENOMEM,
            })?);
            Ok(targets.register(name, role, len_bytes))
        };
        let record = register("dbrec", Role::DoorbellRecord, 8, memory.record.cast())?;
        let uar_bytes = u64::from(memory.uar_bytes);
        let uar = [
            register("uar0", Role::Uar, uar_bytes, memory.uar[0])?,
            register("uar1", Role::Uar, uar_bytes, memory.uar[1])?,
        ];
        let [send_cqes, recv_cqes] = memory.sizes.cqes.map(u64::from);
        let cqs = [
            register("send_cq", Role::Completions, send_cqes * 64, memory.cqs[0])?,
            register("recv_cq", Role::Completions, recv_cqes * 64, memory.cqs[1])?,
        ];
        let [send_marks, recv_marks] = memory.cq_marks.map(<*mut u32>::cast);
        let marks = [
            register("send_marks", Role::Marks, send_cqes * 4, send_marks)?,
            register("recv_marks", Role::Marks, recv_cqes * 4, recv_marks)?,
        ];
        let mut count = |name, words: &WordPair| {
            let base: *const AtomicU32 = words.as_ptr();
            register(name, Role::Memory, 8, base.cast_mut().cast())
        };
        let rung = count("progress", &words.rung)?;
        let seen = count("completed", &words.seen)?;
        let cq_config = |kind: QueueKind| {
            let kind = kind as usize;
            CqRingConfig {
                ring: memory.cqs[kind],
                cqe_count: memory.sizes.cqes[kind],
                record: memory.cq_records[kind],
                marks: memory.cq_marks[kind],
                completions: cqs[kind],
                marks_target: marks[kind],
            }
        };
        // SAFETY: all of it is memory of `qp`, sized as given here, and `qp` lives in the same object as the rings.
        let rings = unsafe {
            [
                CqRing::new(cq_config(QueueKind::Send))?,
                CqRing::new(cq_config(QueueKind::Recv))?,
            ]
        };
        rings.iter().for_each(CqRing::reset);
        let [send_ring, recv_ring] = rings;
        let turn_timeout_ns = timeout_ns(config.wait_timeout);
        let queues = [
            QueueState::new(
                QueueKind::Send,
                config.send_depth,
                turn_timeout_ns,
                send_ring,
                Arc::clone(&words),
            ),
            QueueState::new(
                QueueKind::Recv,
                config.recv_depth,
                turn_timeout_ns,
                recv_ring,
                Arc::clone(&words),
            ),
        ];
        let queue_targets = QueueTargets {
            // The record's first word is the receive queue's.
            send_record: record.dword(4)?,
            recv_record: record.dword(0)?,
            uar: [
                uar[0].block(0, memory.uar_bytes.min(COPY_BYTES_MAX))?,
                uar[1].block(0, memory.uar_bytes.min(COPY_BYTES_MAX))?,
            ],
        };
        let progress_words = [rung.dword(0)?, rung.dword(4)?];
        let seen_words = [seen.dword(0)?, seen.dword(4)?];
        let shared = Arc::new_cyclic(|weak| EndpointShared {
            attachments: Attachments::default(),
            _doorbell_probe: doorbell_probe,
            qp,
            last_handles: Mutex::default(),
            domain: domain.clone(),
            targets,
            bases,
            words,
            progress_words,
            seen_words,
            message_bytes,
            path,
            doorbells,
            queues,
            send_wqebbs: memory.sizes.send_wqebbs,
            failure: Mutex::default(),
            has_failed: AtomicBool::new(false),
            failed_ns: AtomicU64::new(0),
            is_shut_down: AtomicBool::new(false),
            handing: Asymmetric::new(),
            stop_state: Arc::new(DeviceStop::new()),
            epoch: AtomicU32::new(0),
            ended: AtomicU32::new(0),
            generation: Mutex::default(),
            generations: Mutex::default(),
            on_streams: InFlight::default(),
            is_dropped: AtomicBool::new(false),
            closing: AtomicBool::new(false),
            watched: PollMembership::default(),
            looked_stream: AtomicU64::new(0),
            last_active_ns: AtomicU64::new(0),
            watchdog,
            weak: weak.clone(),
        });
        Ok((shared, queue_targets))
    }

    #[inline]
    pub(super) fn queue(&self, kind: QueueKind) -> &QueueState {
        &self.queues[kind as usize]
    }

    pub(super) fn attachments(&self) -> &Attachments {
        &self.attachments
    }

    pub(super) fn targets_id(&self) -> u64 {
        self.targets.id()
    }

    pub(super) fn target_table(&self) -> &Targets {
        &self.targets
    }

    /// Running count of work requests that were executed, as the programs themselves left it.
    #[inline]
    pub(super) fn rung(&self, kind: QueueKind) -> u32 {
        self.words.rung[kind as usize].load(Ordering::Acquire)
    }

    /// Fails if streams have operations of a queue that they have not executed: one that this thread executes would overtake them.
    pub(super) fn check_no_stream_ahead(&self, kind: QueueKind) -> Result<()> {
        let queued = self.queue(kind).queued.load(Ordering::Relaxed);
        let waiting = queued.wrapping_sub(self.rung(kind));
        if waiting == 0 {
            return Ok(());
        }
        let reason = format!(
            "earlier operations of the {} queue ({waiting}) are still on a stream; this one would overtake them",
            kind.name()
        );
        Err(Error::state(StateKind::OutOfOrder, "post", reason))
    }

    /// Makes a NOP of a send that was prepared and is dropped while later ones stand behind it.
    pub(super) fn overwrite_with_nop(&self, posted: Posted, signaled: bool) {
        let Queues::Mlx5(memory) = self.qp.queues();
        // SAFETY: the ring is that of `qp`; the request was prepared and never handed to a stream, so it was not rung; and
        // its `Prepared`, which calls this once, is the only one to know of it.
        unsafe {
            SendQueue::nop_over_raw(
                memory.send_ring,
                self.send_wqebbs,
                self.qp.qpn(),
                posted,
                signaled,
            );
        }
    }

    /// Makes a read of a prepared request that was one before [`EndpointShared::overwrite_with_nop`]. The caller has seen to the length and holds the generation
    /// of the request.
    pub(super) fn read_over_nop(&self, posted: Posted, remote: (u64, u32), len_bytes: u32) {
        let Queues::Mlx5(memory) = self.qp.queues();
        // SAFETY: the ring is that of `qp`; the request is not rung yet, and its `LateRead`, which calls this once, is the only one to change it.
        unsafe {
            SendQueue::read_over_nop_raw(
                memory.send_ring,
                self.send_wqebbs,
                self.qp.qpn(),
                posted,
                remote,
                len_bytes,
            );
        }
    }

    /// Where a prepared request of one WQEBB is, for a kernel.
    pub(super) fn read_place(&self, posted: Posted) -> ReadPlace<'_> {
        let Queues::Mlx5(memory) = self.qp.queues();
        let ring = NonNull::new(memory.send_ring).unwrap_or(NonNull::dangling());
        let wqebb = u64::from(posted.index & (self.send_wqebbs - 1));
        ReadPlace {
            wqe: KernelMemory {
                attachments: Some(&self.attachments),
                start: ring,
                context: None,
                len_bytes: self.send_wqebbs as usize * WQEBB_BYTES,
                offset: wqebb * WQEBB_BYTES as u64,
            },
            index: posted.index,
            qpn: self.qp.qpn(),
        }
    }

    /// The bytes of a posted work request, as long as its control segment says.
    pub(super) fn wqe(&self, posted: Posted) -> Vec<u8> {
        let Queues::Mlx5(memory) = self.qp.queues();
        let ring = memory.send_ring.cast::<u64>();
        let first = posted.index & (self.send_wqebbs - 1);
        let mut bytes = Vec::with_capacity(posted.wqebbs as usize * WQEBB_BYTES);
        for word in 0..posted.wqebbs * 8 {
            let at = (first * 8 + word) % (self.send_wqebbs * 8);
            // SAFETY: inside the ring, which is page-aligned and lives as long as `qp`. As an atomic, because the poster may
            // have taken the place again, if the operation was not dropped in time: then the bytes are of no use, and no more.
            let word =
                unsafe { AtomicU64::from_ptr(ring.add(at as usize)) }.load(Ordering::Relaxed);
            bytes.extend_from_slice(&word.to_ne_bytes());
        }
        let len_bytes = bytes
            .first_chunk()
            .map_or(0, |control| usize::from(Wqe::ctrl(control).ds) * 16);
        bytes.truncate(len_bytes);
        bytes
    }
}

/// A timeout as nanoseconds; none is longer than any time.
pub(super) fn timeout_ns(timeout: Option<Duration>) -> u64 {
    timeout.map_or(u64::MAX, |timeout| {
        u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX)
    })
}
