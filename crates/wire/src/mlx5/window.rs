//! What a UMR WQE says: a memory window is bound or closed.

use super::wqe_parse::{be32, be64};

/// What a UMR WQE does to a memory window (mlx5dv.h, `struct mlx5_wqe_umr_ctrl_seg`, `mlx5_wqe_mkey_context_seg` and
/// `mlx5_wqe_umr_klm_seg`, as rdma-core's provider fills them for binding and invalidating).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WindowUpdate {
    /// The window's key; it stands where other WQEs have their immediate data.
    pub key: u32,
    /// The low 8 bits of its key from now on.
    pub variant: u8,
    /// The queue pair that alone may use it: windows of type 2. None for type 1.
    pub qpn: Option<u32>,
    /// What it opens from now on; none closes it.
    pub opens: Option<WindowOpening>,
}

/// What a memory window opens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WindowOpening {
    /// The key of the region.
    pub region: u32,
    /// First byte, as the region counts, and length.
    pub addr: u64,
    /// Length in bytes.
    pub len_bytes: u64,
    /// The address by which peers name the first byte.
    pub iova: u64,
    /// The rights, with verbs' bits (`ibv_access_flags`).
    pub access: u32,
}

const MASK_QPN: u64 = 1 << 14;
const CONTEXT_FREE: u8 = 1 << 6;
/// Bits of `access_flags` in the order of verbs' bits: local write, remote write, remote read, atomic.
const CONTEXT_ACCESS: [u8; 4] = [1 << 3, 1 << 5, 1 << 4, 1 << 6];

impl WindowUpdate {
    /// The opcode of its WQE (mlx5dv.h, `MLX5_OPCODE_UMR`).
    pub const OPCODE: u8 = 0x25;

    /// `segments` are those behind the control segment. None if there are too few.
    pub(super) fn parse(key: u32, segments: &[[u8; 16]]) -> Option<WindowUpdate> {
        let [umr, _, _, context, range, _, _, data @ ..] = segments else {
            return None;
        };
        let mask = be64(umr, 8);
        let (free, flags, qpn_mkey) = (context[0], context[2], be32(context, 4));
        let opens = if free & CONTEXT_FREE != 0 {
            None
        } else {
            let klm = data.first()?;
            let access = CONTEXT_ACCESS.iter().enumerate();
            Some(WindowOpening {
                region: be32(klm, 4),
                addr: be64(klm, 8),
                len_bytes: be64(range, 8),
                iova: be64(range, 0),
                access: access.fold(0, |bits, (bit, mask)| {
                    bits | u32::from(flags & mask != 0) << bit
                }),
            })
        };
        Some(WindowUpdate {
            key,
            variant: qpn_mkey as u8,
            qpn: (mask & MASK_QPN != 0).then_some(qpn_mkey >> 8),
            opens,
        })
    }

    /// The window's key from now on.
    pub fn new_key(&self) -> u32 {
        self.key & !0xff | u32::from(self.variant)
    }
}
