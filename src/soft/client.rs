//! What a kernel driver asks of the device on behalf of processes: contexts, and the objects that are made in them.
//!
//! Every number that a client gives is looked up among its own objects; one of another client's is as unknown as one that
//! never was. Errors are errno values, because that is what goes back to the process.

use std::sync::{Arc, MutexGuard};

use crate::soft::core::Core;
use crate::soft::core::pages::{ARM, DOORBELLS};
use crate::soft::core::queues::Need;
use crate::soft::core::regions::Rights;
use crate::soft::device::Device;
use crate::soft::dma::{ClockWord, Register};
use crate::soft::space::Space;

/// A positive errno.
pub(crate) type Errno = i32;

/// What the device tells asynchronously. Element numbers are those that creation returned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Event {
    /// A completion queue that was armed has something new.
    Completion,
    /// A completion queue overran (`IBV_EVENT_CQ_ERR`).
    CqError { cqn: u32 },
    /// A queue pair failed by itself (`IBV_EVENT_QP_FATAL`).
    QpFatal { qpn: u32 },
    /// A request made no sense to the responder (`IBV_EVENT_QP_REQ_ERR`).
    QpRequestError { qpn: u32 },
    /// A request was refused by the responder (`IBV_EVENT_QP_ACCESS_ERR`).
    QpAccessError { qpn: u32 },
    /// The first packet came before the transition to RTS (`IBV_EVENT_COMM_EST`).
    CommunicationEstablished { qpn: u32 },
    /// A send queue is drained (`IBV_EVENT_SQ_DRAINED`).
    SendQueueDrained { qpn: u32 },
    /// A queue pair in error will take nothing more from its shared receive queue (`IBV_EVENT_QP_LAST_WQE_REACHED`).
    LastWqeReached { qpn: u32 },
    /// A shared receive queue fell below its limit (`IBV_EVENT_SRQ_LIMIT_REACHED`).
    SrqLimitReached { srqn: u32 },
    /// The port went down or up (`IBV_EVENT_PORT_ERR`, `IBV_EVENT_PORT_ACTIVE`).
    Port { active: bool },
    /// The device failed for good (`IBV_EVENT_DEVICE_FATAL`).
    #[allow(dead_code)] // the software device does not
    DeviceFatal,
}

/// Takes events. Called under the device's lock: it may neither block nor call the device.
pub(crate) trait EventSink: Send + Sync + std::fmt::Debug {
    /// One event.
    fn event(&self, event: Event);
}

/// A range of a client's memory to be registered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MrRange {
    /// First address in the client's space.
    pub(crate) start: u64,
    /// Length in bytes.
    pub(crate) len_bytes: u64,
    /// The address by which work requests name the first byte.
    pub(crate) iova: u64,
}

/// What a re-registration changes.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct MrChange {
    pub(crate) range: Option<MrRange>,
    pub(crate) pd: Option<u32>,
    /// `ibv_access_flags`.
    pub(crate) access: Option<u32>,
}

/// Where a completion queue lies in the client's space.
#[derive(Debug, Clone)]
pub(crate) struct CqParts {
    /// Address of the ring.
    pub(crate) ring: u64,
    /// Entries, a power of two.
    pub(crate) cqes: u32,
    /// 64 or 128; a 128-byte entry has its CQE in the second half.
    pub(crate) cqe_bytes: u32,
    /// The first half of an entry of 128 bytes is written, too, with zeros (`MLX5_IB_CREATE_CQ_FLAGS_CQE_128B_PAD`).
    pub(crate) padded: bool,
    /// Address of the doorbell record: `[0]` consumer index, `[1]` arm. Creation seeds the arm word with all ones.
    pub(crate) record: u64,
    /// The UAR whose register at 0x20 arms it.
    pub(crate) uar: u32,
    /// Who hears of completions; nobody without a channel.
    pub(crate) events: Option<Arc<dyn EventSink>>,
    /// Completions may be lost in silence when it is full (`IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN`).
    pub(crate) ignore_overrun: bool,
}

/// Where a shared receive queue lies in the client's space.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SrqParts {
    pub(crate) pd: u32,
    /// Address of the ring; each entry starts with a next segment (`mlx5_wqe_srq_next_seg`).
    pub(crate) ring: u64,
    /// Entries, a power of two, and bytes of each, a power of two.
    pub(crate) wqes: u32,
    pub(crate) stride_bytes: u32,
    /// Address of the record: one count of posted receives, 16 bits.
    pub(crate) record: u64,
    /// The event limit to begin with.
    pub(crate) limit: u32,
}

/// The transport of a queue pair, with verbs' numbers (`ibv_qp_type`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Transport {
    Rc = 2,
    Uc = 3,
    Ud = 4,
}

/// With what a queue pair is created.
#[derive(Debug, Clone, Copy)]
pub(crate) struct QpParts {
    pub(crate) transport: Transport,
    pub(crate) pd: u32,
    pub(crate) send_cq: u32,
    pub(crate) recv_cq: u32,
    pub(crate) srq: Option<u32>,
    /// Address of the send ring, and its length in WQEBBs, a power of two; 0 without.
    pub(crate) send_ring: u64,
    pub(crate) send_wqebbs: u32,
    /// Address of the receive ring, entries (a power of two; 0 without) and bytes of each.
    pub(crate) recv_ring: u64,
    pub(crate) recv_wqes: u32,
    pub(crate) recv_stride_bytes: u32,
    /// Address of the doorbell record: `[0]` receive, `[1]` send.
    pub(crate) record: u64,
    /// The UAR whose registers ring it.
    pub(crate) uar: u32,
    /// Put into every CQE (`srqn_uidx`): libmlx5 finds its queue pair by it.
    pub(crate) user_index: u32,
    /// Its own datagrams to a multicast group do not come back to it (`IBV_QP_CREATE_BLOCK_SELF_MCAST_LB`).
    pub(crate) blocks_loopback: bool,
}

/// Where packets go (`ib_uverbs_qp_dest`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct AddressVector {
    pub(crate) dgid: [u8; 16],
    pub(crate) flow_label: u32,
    pub(crate) dlid: u16,
    pub(crate) sgid_index: u8,
    pub(crate) hop_limit: u8,
    pub(crate) traffic_class: u8,
    pub(crate) sl: u8,
    pub(crate) src_path_bits: u8,
    pub(crate) static_rate: u8,
    pub(crate) is_global: bool,
    pub(crate) port: u8,
}

/// Attributes of a queue pair (`ibv_qp_attr`), in verbs' units.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct QpAttributes {
    /// `ibv_qp_state`.
    pub(crate) state: u8,
    /// `ibv_qp_state`: what the caller believes the state to be.
    pub(crate) current_state: u8,
    /// `ibv_mtu`, 1 to 5.
    pub(crate) path_mtu: u8,
    pub(crate) path_mig_state: u8,
    pub(crate) qkey: u32,
    pub(crate) rq_psn: u32,
    pub(crate) sq_psn: u32,
    pub(crate) dest_qpn: u32,
    /// `ibv_access_flags`.
    pub(crate) access: u32,
    pub(crate) pkey_index: u16,
    pub(crate) alt_pkey_index: u16,
    pub(crate) port: u8,
    pub(crate) alt_port: u8,
    pub(crate) timeout: u8,
    pub(crate) alt_timeout: u8,
    pub(crate) retry_count: u8,
    pub(crate) rnr_retry: u8,
    pub(crate) min_rnr_timer: u8,
    pub(crate) max_rd_atomic: u8,
    pub(crate) max_dest_rd_atomic: u8,
    pub(crate) en_sqd_async_notify: bool,
    pub(crate) sq_draining: bool,
    pub(crate) rate_limit: u32,
    pub(crate) path: AddressVector,
    pub(crate) alt_path: AddressVector,
}

/// Bits of a modify call (`ibv_qp_attr_mask`).
pub(crate) mod mask {
    pub(crate) const STATE: u32 = 1 << 0;
    pub(crate) const CUR_STATE: u32 = 1 << 1;
    pub(crate) const EN_SQD_ASYNC_NOTIFY: u32 = 1 << 2;
    pub(crate) const ACCESS_FLAGS: u32 = 1 << 3;
    pub(crate) const PKEY_INDEX: u32 = 1 << 4;
    pub(crate) const PORT: u32 = 1 << 5;
    pub(crate) const QKEY: u32 = 1 << 6;
    pub(crate) const AV: u32 = 1 << 7;
    pub(crate) const PATH_MTU: u32 = 1 << 8;
    pub(crate) const TIMEOUT: u32 = 1 << 9;
    pub(crate) const RETRY_CNT: u32 = 1 << 10;
    pub(crate) const RNR_RETRY: u32 = 1 << 11;
    pub(crate) const RQ_PSN: u32 = 1 << 12;
    pub(crate) const MAX_QP_RD_ATOMIC: u32 = 1 << 13;
    pub(crate) const ALT_PATH: u32 = 1 << 14;
    pub(crate) const MIN_RNR_TIMER: u32 = 1 << 15;
    pub(crate) const SQ_PSN: u32 = 1 << 16;
    pub(crate) const MAX_DEST_RD_ATOMIC: u32 = 1 << 17;
    pub(crate) const PATH_MIG_STATE: u32 = 1 << 18;
    pub(crate) const DEST_QPN: u32 = 1 << 20;
    pub(crate) const RATE_LIMIT: u32 = 1 << 25;
}

/// A context of a process on the device. Dropping it releases everything that was made in it, while others go on.
#[derive(Debug)]
pub(crate) struct Client {
    device: Device,
    id: u32,
    space: Space,
}

impl Client {
    /// Opens a context for the process whose memory `space` is. `events` hears what the device has to say.
    pub(crate) fn open(device: &Device, space: Space, events: Arc<dyn EventSink>) -> Client {
        Client {
            device: device.clone(),
            id: device.lock().add_client(space, events),
            space,
        }
    }

    fn core(&self) -> MutexGuard<'_, Core> {
        self.device.lock()
    }

    fn check_all(&self, needs: &[Need]) -> Result<(), Errno> {
        needs.iter().try_for_each(|need| need.check(self.space))
    }

    /// Adds a UAR page: registers at 0x800, 0x900, 0xa00, 0xb00 ring queue pairs, the one at 0x20 arms completion queues.
    ///
    /// # Safety
    /// `page` is 4096 bytes of memory shared with the client, aligned to 8 bytes and valid until the number is freed or the
    /// client is dropped.
    #[allow(unsafe_code)]
    pub(crate) unsafe fn alloc_uar(&self, page: *mut u8) -> Result<u32, Errno> {
        // SAFETY: within the page, whose life the caller promises.
        let register = |at: usize| unsafe { Register::new(page.add(at).cast()) };
        self.core()
            .add_uar(self.id, DOORBELLS.map(register), register(ARM))
    }

    /// Shows the device's clock to the client: nanoseconds, big-endian, as of the last turn of the device's work. CQEs are
    /// stamped with the same clock, never ahead of what is shown.
    ///
    /// # Safety
    /// `word` is 8 bytes of memory shared with the client, aligned, and valid until the client is dropped.
    #[allow(unsafe_code)]
    pub(crate) unsafe fn show_clock(&self, word: *mut u8) {
        // SAFETY: the caller's promise.
        let clock = unsafe { ClockWord::new(word.cast()) };
        clock.set(self.device.now_ns());
        self.core().show_clock(self.id, clock);
    }

    /// EBUSY while a queue uses it.
    pub(crate) fn free_uar(&self, uar: u32) -> Result<(), Errno> {
        self.core().free_uar(self.id, uar)
    }

    pub(crate) fn alloc_pd(&self) -> Result<u32, Errno> {
        self.core().alloc_pd(self.id)
    }

    /// EBUSY while something is in it.
    pub(crate) fn dealloc_pd(&self, pd: u32) -> Result<(), Errno> {
        self.core().dealloc_pd(self.id, pd)
    }

    /// EINVAL for an empty range, one past the end of the address space, or an I/O address at another place of its page (as the
    /// kernel has it); EFAULT for one that is not mapped.
    fn check_range(&self, range: MrRange, writable: bool) -> Result<(), Errno> {
        let MrRange {
            start,
            len_bytes,
            iova,
        } = range;
        let wraps = start.checked_add(len_bytes).is_none() || iova.checked_add(len_bytes).is_none();
        if len_bytes == 0 || wraps || (start ^ iova) & 0xfff != 0 {
            return Err(libc::EINVAL);
        }
        self.space
            .check(start, len_bytes, writable)
            .map_err(|_| libc::EFAULT)
    }

    /// The key, local and remote. EFAULT unless the whole range is mapped (and writable, if the access says so); EINVAL for
    /// remote write or atomics without local write.
    pub(crate) fn reg_mr(&self, pd: u32, range: MrRange, access: u32) -> Result<u32, Errno> {
        let rights = Rights::parse(access)?;
        self.check_range(range, rights.writes())?;
        self.core().reg_mr(self.id, pd, range, rights)
    }

    /// The key from now on. On failure the region is as it was. EBUSY while a memory window is bound to it.
    pub(crate) fn rereg_mr(&self, key: u32, change: MrChange) -> Result<u32, Errno> {
        let rights = change.access.map(Rights::parse).transpose()?;
        let (old, written) = self.core().mr_range(self.id, key)?;
        let writable = rights.map_or(written, Rights::writes);
        // What stays as it is was looked at when it was registered.
        if change.range.is_some() || writable != written {
            self.check_range(change.range.unwrap_or(old), writable)?;
        }
        self.core().rereg_mr(self.id, key, &change, rights)
    }

    /// EBUSY while a memory window is bound to it. When this returns, the device does not touch the memory any more.
    pub(crate) fn dereg_mr(&self, key: u32) -> Result<(), Errno> {
        self.core().dereg_mr(self.id, key)
    }

    /// A memory window of type 1 or 2 (`ibv_mw_type`): its key.
    pub(crate) fn alloc_mw(&self, pd: u32, kind: u8) -> Result<u32, Errno> {
        self.core().alloc_mw(self.id, pd, kind)
    }

    pub(crate) fn dealloc_mw(&self, key: u32) -> Result<(), Errno> {
        self.core().dealloc_mw(self.id, key)
    }

    /// EINVAL for sizes that are none or memory that is not aligned, EFAULT for memory that is not mapped.
    pub(crate) fn create_cq(&self, parts: CqParts) -> Result<u32, Errno> {
        let ring = CqParts::ring_need(parts.ring, parts.cqes, parts.cqe_bytes)?;
        self.check_all(&[ring, parts.record_need()])?;
        self.core().create_client_cq(self.id, parts)
    }

    /// Moves to another ring: writes a RESIZE CQE (opcode 5, `MLX5_CQE_RESIZE_CQ`) as the last one into the old ring, and goes on in the new one;
    /// see `mlx5_resize_cq` in libmlx5, which copies what is between. EINVAL if one of the rings has no room for all.
    pub(crate) fn resize_cq(
        &self,
        cqn: u32,
        ring: u64,
        cqes: u32,
        cqe_bytes: u32,
    ) -> Result<(), Errno> {
        self.check_all(&[CqParts::ring_need(ring, cqes, cqe_bytes)?])?;
        self.core().resize_cq(self.id, cqn, ring, cqes, cqe_bytes)
    }

    /// Sets moderation; accepted and without effect on a device without interrupts.
    pub(crate) fn modify_cq(&self, cqn: u32, _count: u16, _period_us: u16) -> Result<(), Errno> {
        self.core().check_cq(self.id, cqn)
    }

    /// EBUSY while a queue pair completes to it.
    pub(crate) fn destroy_cq(&self, cqn: u32) -> Result<(), Errno> {
        self.core().destroy_client_cq(self.id, cqn)
    }

    /// Errors as of [`Client::create_cq`].
    pub(crate) fn create_srq(&self, parts: SrqParts) -> Result<u32, Errno> {
        self.check_all(&parts.needs()?)?;
        self.core().create_srq(self.id, &parts)
    }

    /// Arms the limit event. EINVAL for a limit that is not below the number of entries.
    pub(crate) fn set_srq_limit(&self, srqn: u32, limit: u32) -> Result<(), Errno> {
        self.core().set_srq_limit(self.id, srqn, limit)
    }

    /// The limit: 0 after its event.
    pub(crate) fn srq_limit(&self, srqn: u32) -> Result<u32, Errno> {
        self.core().srq_limit(self.id, srqn)
    }

    /// EBUSY while a queue pair takes from it.
    pub(crate) fn destroy_srq(&self, srqn: u32) -> Result<(), Errno> {
        self.core().destroy_srq(self.id, srqn)
    }

    /// A queue pair in the RESET state: its number. Errors as of [`Client::create_cq`]; ENOMEM if the device has all it can.
    pub(crate) fn create_qp(&self, parts: &QpParts) -> Result<u32, Errno> {
        self.check_all(&parts.needs()?)?;
        self.core().create_client_qp(self.id, parts)
    }

    /// Changes what `mask` names; checks transition, required and optional attributes as the kernel's `ib_modify_qp_is_ok`
    /// does. Nothing has changed on failure.
    pub(crate) fn modify_qp(
        &self,
        qpn: u32,
        attributes: &QpAttributes,
        mask: u32,
    ) -> Result<(), Errno> {
        let now_ns = self.device.now_ns();
        self.core()
            .modify_qp(self.id, qpn, attributes, mask, now_ns)
    }

    /// The attributes as last set, with the state as it is.
    pub(crate) fn query_qp(&self, qpn: u32) -> Result<QpAttributes, Errno> {
        self.core().query_qp(self.id, qpn)
    }

    /// When this returns, the device writes nothing more for it.
    pub(crate) fn destroy_qp(&self, qpn: u32) -> Result<(), Errno> {
        self.core().destroy_client_qp(self.id, qpn)
    }

    /// Joins a multicast group (UD only), and leaves it. The LID of the group is not used: groups are known by their GID.
    pub(crate) fn attach_multicast(
        &self,
        qpn: u32,
        gid: [u8; 16],
        _mlid: u16,
    ) -> Result<(), Errno> {
        self.core().attach_multicast(self.id, qpn, gid)
    }

    pub(crate) fn detach_multicast(
        &self,
        qpn: u32,
        gid: [u8; 16],
        _mlid: u16,
    ) -> Result<(), Errno> {
        self.core().detach_multicast(self.id, qpn, gid)
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.core().remove_client(self.id);
    }
}
