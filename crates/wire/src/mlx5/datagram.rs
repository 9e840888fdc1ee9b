//! The datagram segment: where a datagram goes, in each WQE of a UD queue pair.

use super::wqe_parse::be32;

/// Set in `dqp_dct` by drivers that write the segment in its long form, the only one (rdma-core, `MLX5_EXTENDED_UD_AV`).
const EXTENDED: u32 = 0x8000_0000;
/// In `grh_gid_fl`: the packet has a GRH. InfiniBand only; on Ethernet all have one.
const HAS_GRH: u32 = 1 << 30;

/// The address of a datagram (mlx5dv.h, `struct mlx5_wqe_av`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Datagram {
    /// The queue key.
    pub qkey: u32,
    /// The queue pair that it is for, 24 bits; all ones for a multicast group.
    pub qpn: u32,
    /// Static rate, 4 bits.
    pub static_rate: u8,
    /// Service level, 4 bits; on Ethernet the priority in 3 bits, one to the left.
    pub sl: u8,
    /// Low bits of the own LID.
    pub path_bits: u8,
    /// The LID that it is for; 0 on Ethernet.
    pub lid: u16,
    /// The MAC address that it is for; of no meaning on InfiniBand.
    pub mac: [u8; 6],
    /// Traffic class of the GRH.
    pub traffic_class: u8,
    /// Hop limit of the GRH.
    pub hop_limit: u8,
    /// Whether it has a GRH, on InfiniBand.
    pub has_grh: bool,
    /// Index of the own GID.
    pub gid_index: u8,
    /// Flow label of the GRH, 20 bits.
    pub flow_label: u32,
    /// The GID that it is for.
    pub gid: [u8; 16],
}

impl Datagram {
    /// Length of the segment in bytes.
    pub const BYTES: usize = 48;
    /// The queue pair number that stands for a multicast group.
    pub const MULTICAST_QPN: u32 = 0xff_ffff;

    pub(super) fn parse([first, second, third]: &[[u8; 16]; 3]) -> Datagram {
        let grh = be32(second, 12);
        Datagram {
            qkey: be32(first, 0),
            qpn: be32(first, 8) & !EXTENDED & 0xff_ffff,
            static_rate: first[12] >> 4,
            sl: first[12] & 0xf,
            path_bits: first[13] & 0x7f,
            lid: u16::from_be_bytes([first[14], first[15]]),
            mac: [
                second[4], second[5], second[6], second[7], second[8], second[9],
            ],
            traffic_class: second[10],
            hop_limit: second[11],
            has_grh: grh & HAS_GRH != 0,
            gid_index: (grh >> 20) as u8,
            flow_label: grh & 0xf_ffff,
            gid: *third,
        }
    }

    /// Whether it is for a group.
    pub fn is_multicast(&self) -> bool {
        self.qpn == Datagram::MULTICAST_QPN
    }
}
