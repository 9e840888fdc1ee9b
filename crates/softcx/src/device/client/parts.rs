//! The parameters that a client passes for its objects and their states.

use std::sync::Arc;

use super::EventSink;

/// A positive errno.
pub(crate) type Errno = i32;
/// For a path from an index at which the table of GIDs has nothing (`rdma_get_gid_attr` in the kernel's core/cache.c; EINVAL before entries
/// could be asked for, in 5.10).
pub(crate) const GID_IS_EMPTY: Errno = libc::ENODATA;

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
    /// The channel that gets completion events; `None` without a channel.
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
    pub(crate) rate_limit: u32,
    pub(crate) path: AddressVector,
    pub(crate) alt_path: AddressVector,
}

/// Bits of a modify call (`ibv_qp_attr_mask`).
pub(crate) mod mask {
    pub(crate) const STATE: u32 = 1 << 0;
    pub(crate) const CUR_STATE: u32 = 1 << 1;
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
