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

    /// The segment that has this address.
    pub fn segment(&self) -> DatagramSegment {
        let mut bytes = [0; Datagram::BYTES];
        let mut put = |at: usize, field: &[u8]| bytes[at..at + field.len()].copy_from_slice(field);
        let grh = u32::from(self.has_grh) << 30
            | u32::from(self.gid_index) << 20
            | self.flow_label & 0xf_ffff;
        put(
            12,
            &[self.static_rate << 4 | self.sl & 0xf, self.path_bits & 0x7f],
        );
        put(14, &self.lid.to_be_bytes());
        put(20, &self.mac);
        put(26, &[self.traffic_class, self.hop_limit]);
        put(28, &grh.to_be_bytes());
        put(32, &self.gid);
        DatagramSegment::from_bytes(&bytes).to(self.qpn, self.qkey)
    }

    /// Whether it is for a group.
    pub fn is_multicast(&self) -> bool {
        self.qpn == Datagram::MULTICAST_QPN
    }
}

/// A datagram segment as it is in a WQE (mlx5dv.h, `struct mlx5_wqe_datagram_seg`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C, align(8))]
pub struct DatagramSegment([u8; Datagram::BYTES]);

impl DatagramSegment {
    /// A segment of these bytes: the address vector that a driver has made (`struct mlx5_wqe_av`).
    pub const fn from_bytes(bytes: &[u8; Datagram::BYTES]) -> DatagramSegment {
        DatagramSegment(*bytes)
    }

    /// Its bytes.
    pub const fn to_bytes(self) -> [u8; Datagram::BYTES] {
        self.0
    }

    /// The same port, and that queue pair with that queue key.
    #[must_use]
    pub fn to(mut self, qpn: u32, qkey: u32) -> DatagramSegment {
        self.0[..4].copy_from_slice(&qkey.to_be_bytes());
        self.0[8..12].copy_from_slice(&(qpn & 0xff_ffff | EXTENDED).to_be_bytes());
        self
    }
}
