//! The codec against frames that another implementation built, and against bytes that nobody did.

use std::net::IpAddr;

use proptest::prelude::*;

use super::*;
use crate::device::packet::{AckCode, Header, PacketKind, Service, flag};

/// Frames that scapy built, by `tests/roce/vectors`.
const SCAPY: &str = include_str!("scapy.txt");

struct Vector {
    name: &'static str,
    flow: UdpFlow,
    bytes: Vec<u8>,
}

fn vectors() -> Vec<Vector> {
    let lines = SCAPY.lines().filter(|line| !line.starts_with('#'));
    let vector = |line: &'static str| {
        let words: Vec<_> = line.split(' ').collect();
        let [name, from, to, port, hex] = words[..] else {
            panic!("{line}");
        };
        let gid = |text: &str| gid_of_address(text.parse::<IpAddr>().unwrap());
        let byte = |pair: &[u8]| u8::from_str_radix(str::from_utf8(pair).unwrap(), 16).unwrap();
        Vector {
            name,
            flow: UdpFlow {
                from: gid(from),
                to: gid(to),
                source_port: port.parse().unwrap(),
                identification: 0,
            },
            bytes: hex.as_bytes().chunks(2).map(byte).collect(),
        }
    };
    lines.map(vector).collect()
}

fn find(name: &str) -> Vector {
    vectors().into_iter().find(|it| it.name == name).unwrap()
}

fn encode(flow: &UdpFlow, header: &Header, payload: &[u8]) -> Vec<u8> {
    let mut bytes = [0; MAX_FRAME_BYTES];
    let at = write_headers(header, bytes.first_chunk_mut().unwrap()).unwrap();
    bytes[at..at + payload.len()].copy_from_slice(payload);
    let len = seal_frame(flow, &mut bytes, at + payload.len());
    bytes[..len].to_vec()
}

fn packet(vector: &Vector) -> (Header, Vec<u8>) {
    match read_frame(&vector.flow, &vector.bytes) {
        Ok((RoceFrame::Packet(header, payload), _)) => (header, vector.bytes[payload].to_vec()),
        other => panic!("{}: {other:?}", vector.name),
    }
}

#[test]
fn frames_of_scapy_are_read_and_written_to_the_same_bytes() {
    let vectors = vectors();
    assert!(vectors.len() > 40);
    for vector in vectors {
        if matches!(vector.name, "notice" | "id-write-only") {
            continue;
        }
        let (header, payload) = packet(&vector);
        assert_eq!(header.payload_bytes as usize, payload.len());
        let again = encode(&vector.flow, &header, &payload);
        assert_eq!(again, vector.bytes, "{}: {header:?}", vector.name);
    }
}

#[test]
fn fields_of_scapy_frames_are_where_they_belong() {
    let (write, payload) = packet(&find("write-only-imm"));
    assert_eq!(
        (write.kind, write.service),
        (PacketKind::Write, Service::Reliable)
    );
    assert!(write.has(flag::FIRST | flag::LAST | flag::IMMEDIATE));
    assert_eq!((write.dst_qpn, write.psn), (0xab_cdef, 0x12_3456));
    assert_eq!(
        (write.addr, write.rkey),
        (0x1122_3344_5566_7788, 0x0102_0304)
    );
    assert_eq!((write.total_bytes, write.imm), (3000, 0xcafe_f00d));
    assert_eq!(payload, [1, 8, 15, 22]);
    let (swap, _) = packet(&find("compare-swap"));
    assert_eq!(swap.kind, PacketKind::CompareSwap);
    assert_eq!(
        (swap.operand, swap.compare),
        (0xa1a2_a3a4_a5a6_a7a8, 0xb1b2_b3b4_b5b6_b7b8)
    );
    let (old, _) = packet(&find("atomic-ack"));
    assert_eq!((old.operand, old.msn()), (0xc1c2_c3c4_c5c6_c7c8, 0xff_ffff));
    let (rnr, _) = packet(&find("rnr"));
    assert_eq!(
        (rnr.kind, rnr.code),
        (PacketKind::Ack, AckCode::ReceiverNotReady(12))
    );
    let (datagram, payload) = packet(&find("ud-send"));
    assert_eq!((datagram.qkey, datagram.source_qpn), (0x1111_1111, 0xabcd));
    assert_eq!(payload.len(), 33);
    assert!(datagram.has(flag::GRH));
}

#[test]
fn notice_of_congestion_is_that_of_scapy() {
    let vector = find("notice");
    let read = read_frame(&vector.flow, &vector.bytes);
    assert_eq!(read, Ok((RoceFrame::CongestionNotice(0xab_cdef), 0)));
    // As a ConnectX begins it.
    assert_eq!(vector.bytes[..5], [0x81, 0, 0xff, 0xff, 0x40]);
    let mut bytes = [0; 40];
    let unpadded = notice_bytes(0xab_cdef, 0xffff);
    bytes[..unpadded.len()].copy_from_slice(&unpadded);
    let len = seal_frame(&vector.flow, &mut bytes, unpadded.len());
    assert_eq!(bytes[..len], vector.bytes);
}

#[test]
fn crc_over_an_identification_that_nobody_told_is_taken_and_others_are_not() {
    let vector = find("id-write-only");
    // The number that `tests/roce/vectors` has set.
    const NUMBER: u16 = 0x7a31;
    for (told, expected) in [(0, NUMBER), (NUMBER, NUMBER), (3, NUMBER)] {
        let flow = UdpFlow {
            identification: told,
            ..vector.flow
        };
        let (_, found) = read_frame(&flow, &vector.bytes).unwrap();
        assert_eq!(found, expected);
    }
    let other = UdpFlow {
        source_port: vector.flow.source_port + 1,
        ..vector.flow
    };
    assert_eq!(read_frame(&other, &vector.bytes), Err(BadFrame::Crc));
    let mut bytes = vector.bytes.clone();
    renumber_frame(&mut bytes, NUMBER, 0);
    let unpadded = bytes.len() - 4;
    let mut sealed = bytes.clone();
    seal_frame(&vector.flow, &mut sealed, unpadded);
    assert_eq!(bytes, sealed);
    let v6 = find("v6-write-only");
    let mut bytes = v6.bytes.clone();
    let at = bytes.len() - 1;
    bytes[at] ^= 1;
    assert_eq!(read_frame(&v6.flow, &bytes), Err(BadFrame::Crc));
}

#[test]
fn one_wrong_bit_anywhere_is_found_or_masked() {
    for vector in vectors() {
        for at in 0..vector.bytes.len() * 8 {
            let mut bytes = vector.bytes.clone();
            bytes[at / 8] ^= 1 << (at % 8);
            // The byte of congestion marks and reserved bits is not covered.
            let masked = at / 8 == 4;
            let taken = read_frame(&vector.flow, &bytes).is_ok();
            assert_eq!(taken, masked, "{} bit {at}", vector.name);
        }
    }
}

#[test]
fn frame_of_a_capture_has_the_addresses_and_a_right_checksum() {
    let v4 = find("write-only");
    let routed = RoutedFields {
        traffic_class: 0xa7,
        hop_limit: 9,
    };
    let bytes = frame_header(&v4.flow, routed, &v4.bytes);
    assert_eq!((bytes[15], bytes[22]), (0xa7, 9));
    assert_eq!(bytes[..14], [2, 0, 127, 0, 0, 9, 2, 0, 127, 0, 0, 3, 8, 0]);
    assert_eq!(bytes[26..34], [127, 0, 0, 3, 127, 0, 0, 9]);
    let sum = bytes[14..34].chunks(2).fold(0u32, |sum, pair| {
        sum + u32::from(u16::from_be_bytes([pair[0], pair[1]]))
    });
    assert_eq!((sum & 0xffff) + (sum >> 16), 0xffff);
    let v6 = find("v6-write-only");
    let bytes = frame_header(&v6.flow, routed, &v6.bytes);
    assert_eq!((&bytes[14..18], bytes[21]), (&[0x6a, 0x70, 0, 0][..], 9));
}

proptest! {
    #[test]
    fn any_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..200), opcode in 0u8..0x90) {
        let mut bytes = bytes;
        if let Some(first) = bytes.first_mut() {
            *first = opcode;
        }
        if let Some(flags) = bytes.get_mut(1) {
            *flags &= 0xf0;
        }
        if let Some(key) = bytes.get_mut(2..4) {
            key.fill(0xff);
        }
        if let Ok(RoceFrame::Packet(header, payload)) = RoceFrame::parse(&bytes) {
            prop_assert!(payload.end + 4 <= bytes.len());
            // What is read can be written, to the same fields.
            let flow = find("ack").flow;
            let again = encode(&flow, &header, &bytes[payload.clone()]);
            prop_assert_eq!(read_frame(&flow, &again), Ok((RoceFrame::Packet(header, payload), 0)));
        }
    }
}
