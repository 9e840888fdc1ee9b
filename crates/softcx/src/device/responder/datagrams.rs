//! Receiving datagrams: 40 bytes for a GRH in front of every message, whether there is one or not.

use super::messages::send_opcode;
use crate::device::fabric::gid_of;
use crate::device::gather::GatherSource;
use crate::device::options::LinkLayer;
use crate::device::packet::{Header, PacketKind, flag};
use crate::device::qp::{DeviceParts, Qp};
use doorbell_wire::mlx5::Cqe;

/// Room for a GRH (IBTA 8.3), or for an IPv4 header in its second half (annex A17.4.5.2).
const GRH_BYTES: usize = 40;
/// What stands between IP header and payload, and behind it: UDP, BTH, DETH, ICRC.
const ROCE_BYTES: usize = 8 + 12 + 8 + 4;
const IMM_BYTES: usize = 4;
/// In a CQE's two bits for the GRH: there is one.
const HAS_GRH: u8 = 1;
/// In a CQE's bits for the kind of IP header (the kernel's `MLX5_CQE_ROCE_L3_HEADER_TYPE_*`).
const IPV6: u8 = 1;
const IPV4: u8 = 2;

impl Qp {
    pub(super) fn on_datagram(
        &mut self,
        context: &mut DeviceParts,
        header: &Header,
        source: &GatherSource<'_>,
    ) {
        // A wrong key is answered by silence (IBTA 9.8.3).
        if header.kind != PacketKind::Send || header.qkey != self.asked.qkey {
            context.counters.packets_dropped += 1;
            return;
        }
        let Some((index, capacity)) = self.take_receive(context) else {
            context.counters.packets_dropped += 1;
            return;
        };
        let link = context.link();
        let from = context.sender.unwrap_or_else(|| {
            let own = context.host_gid.filter(|_| header.source_lid == 0);
            own.unwrap_or_else(|| gid_of(link, header.source_lid))
        });
        let grh = header
            .has(flag::GRH)
            .then(|| grh(header, link, &from, source));
        // Without a GRH its room stays as it was.
        let head = grh.as_ref().map_or(Ok(()), |bytes| {
            self.scatter(context, &GatherSource::Bytes(bytes), 0, capacity)
        });
        let scattered =
            head.and_then(|()| self.scatter(context, source, GRH_BYTES as u32, capacity));
        if let Err(error) = scattered {
            return self.end_receive(context, index, error);
        }
        let cqe = Cqe {
            opcode: send_opcode(header),
            wqe_counter: index as u16,
            byte_count: GRH_BYTES as u32 + source.len_bytes(),
            imm: header.imm,
            solicited: header.has(flag::SOLICITED),
            source_qpn: header.source_qpn,
            source_lid: match link {
                LinkLayer::InfiniBand => header.source_lid,
                LinkLayer::Ethernet => 0,
            },
            sl: match (link, is_ipv4(&header.grh_gid())) {
                (LinkLayer::InfiniBand, _) => header.sl,
                (LinkLayer::Ethernet, true) => IPV4,
                (LinkLayer::Ethernet, false) => IPV6,
            },
            grh: if grh.is_some() { HAS_GRH } else { 0 },
            ..Cqe::default()
        };
        self.complete_recv(context, cqe);
    }
}

fn is_ipv4(gid: &[u8; 16]) -> bool {
    gid[..12] == [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff]
}

/// The bytes in front of the payload.
fn grh(
    header: &Header,
    link: LinkLayer,
    from: &[u8; 16],
    source: &GatherSource<'_>,
) -> [u8; GRH_BYTES] {
    let [traffic_class, hop_limit] = [(header.addr >> 40) as u8, (header.addr >> 32) as u8];
    let flow = u32::from(traffic_class) << 20 | header.addr as u32 & 0xf_ffff;
    let to = header.grh_gid();
    let imm = if header.has(flag::IMMEDIATE) {
        IMM_BYTES
    } else {
        0
    };
    // With its padding, which is part of the packet.
    let payload = (source.len_bytes() as usize).next_multiple_of(4) + imm;
    let mut bytes = [0; GRH_BYTES];
    let mut put = |at: usize, field: &[u8]| bytes[at..at + field.len()].copy_from_slice(field);
    if link == LinkLayer::Ethernet && is_ipv4(&to) {
        let len = (20 + ROCE_BYTES + payload) as u16;
        put(20, &[0x45, traffic_class]);
        put(22, &len.to_be_bytes());
        // Not to be fragmented; UDP.
        put(26, &[0x40, 0, hop_limit, 17]);
        put(32, &from[12..]);
        put(36, &to[12..]);
        let sum = checksum(&bytes[20..]);
        bytes[30..32].copy_from_slice(&sum.to_be_bytes());
        return bytes;
    }
    let (next, len) = match link {
        // The payload length of a GRH counts from behind it to the ICRC (IBTA 8.3.3): BTH, DETH, payload, padding, ICRC.
        LinkLayer::InfiniBand => (0x1b, 12 + 8 + payload + 4),
        LinkLayer::Ethernet => (17, ROCE_BYTES + payload),
    };
    put(0, &(6 << 28 | flow).to_be_bytes());
    put(4, &(len as u16).to_be_bytes());
    put(6, &[next, hop_limit]);
    put(8, from);
    put(24, &to);
    bytes
}

/// The internet checksum (RFC 1071) of an even number of bytes.
fn checksum(bytes: &[u8]) -> u16 {
    let words = bytes.as_chunks::<2>().0.iter();
    let sum: u32 = words.map(|word| u32::from(u16::from_be_bytes(*word))).sum();
    let folded = (sum & 0xffff) + (sum >> 16);
    !((folded & 0xffff) + (folded >> 16)) as u16
}

#[cfg(test)]
mod tests {
    use super::*;
    use doorbell_wire::mlx5::Datagram;

    /// What the IP header of a packet of RoCE v2 says: UDP, BTH, DETH, payload, padding, ICRC.
    #[test]
    fn lengths_of_ip_headers_count_the_padding() {
        let mapped = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, 0, 2];
        for (flags, udp) in [
            (0, [(0, 32), (1, 36), (3, 36), (4, 36), (5, 40)]),
            (
                flag::IMMEDIATE,
                [(0, 36), (1, 40), (3, 40), (4, 40), (5, 44)],
            ),
        ] {
            for (len, udp_bytes) in udp {
                let head = |gid| {
                    let mut header = Header::new(PacketKind::Send, 1, 0, 0);
                    header.set_grh(&Datagram {
                        gid,
                        ..Datagram::default()
                    });
                    header.flags |= flags;
                    let bytes = [0; 8];
                    let source = GatherSource::Bytes(&bytes[..len]);
                    grh(&header, LinkLayer::Ethernet, &mapped, &source)
                };
                let (v4, v6) = (head(mapped), head([0xfd; 16]));
                let length =
                    |bytes: &[u8], at: usize| u16::from_be_bytes([bytes[at], bytes[at + 1]]);
                assert_eq!(length(&v4, 22), 20 + udp_bytes, "{len}");
                assert_eq!(length(&v6, 4), udp_bytes, "{len}");
            }
        }
    }

    #[test]
    fn the_checksum_of_a_header_that_has_it_is_zero() {
        // 192.168.0.1 to 192.168.0.199, UDP, 115 bytes.
        let mut header = [
            0x45, 0, 0, 0x73, 0, 0, 0x40, 0, 0x40, 0x11, 0, 0, 0xc0, 0xa8, 0, 1, 0xc0, 0xa8, 0,
            0xc7,
        ];
        let sum = checksum(&header);
        assert_eq!(sum, 0xb861);
        header[10..12].copy_from_slice(&sum.to_be_bytes());
        assert_eq!(checksum(&header), 0);
    }
}
