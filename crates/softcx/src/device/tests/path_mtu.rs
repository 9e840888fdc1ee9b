//! Two ends whose path MTUs differ: what fits into the packets of both works, and the first message that does not fails.

use super::pair::Pair;
use crate::device::Faults;
use crate::device::client::{DeviceEvent, Transport};
use crate::device::packet::{Header, PacketKind, flag};
use crate::device::tests::driver::{Process, Work};
use crate::device::tests::harness::pattern;
use doorbell_wire::mlx5::Syndrome;

const WRITE: u8 = 0x08;
const SEND: u8 = 0x0a;
/// The codes of 1024 and 4096 bytes.
const SHORT: u8 = 3;
const LONG: u8 = 5;
/// More than one packet of the short MTU, and less than one of the long one.
const LEN: usize = 3000;
const ERROR: u8 = 6;
const READY_TO_SEND: u8 = 3;

/// Every way to have packets: several MTUs in one, one by one in one device, and between two devices.
fn pairs(transport: Transport, mtus: [u8; 2]) -> impl Iterator<Item = Pair> {
    [(1, 0), (1, 1), (2, 0), (2, 1)]
        .into_iter()
        .map(move |(devices, delay_ns)| {
            let pair = Pair::with_mtus(transport, devices, Process::local, mtus);
            pair.world.devices.iter().for_each(|device| {
                device.set_faults(Faults {
                    delay_ns,
                    ..Faults::default()
                });
            });
            pair
        })
}

fn work(pair: &Pair, opcode: u8, len: usize) -> Work {
    let mut segments = vec![pair.here(0, len)];
    if opcode == WRITE {
        segments.insert(0, pair.there(0));
    }
    Work::new(opcode, &segments)
}

#[test]
fn reliable_message_with_packets_of_another_length_is_an_invalid_request() {
    for mtus in [[SHORT, LONG], [LONG, SHORT]] {
        for opcode in [SEND, WRITE] {
            for mut pair in pairs(Transport::Rc, mtus) {
                let bytes = pattern(1, LEN);
                pair.a.process.write(pair.from.0, &bytes);
                pair.receive(0, LEN);
                pair.receive(0, LEN);
                pair.send(&work(&pair, opcode, 1024));
                assert_eq!(pair.sent(), [(0, 0)], "{mtus:?} {opcode:#x}");
                assert_eq!(pair.b.process.read(pair.into.0, 1024), bytes[..1024]);
                pair.send(&work(&pair, opcode, LEN));
                let invalid = Syndrome::RemoteInvalReq as u8;
                assert_eq!(pair.sent(), [(1, invalid)], "{mtus:?} {opcode:#x}");
                assert_eq!((pair.state(0), pair.state(1)), (ERROR, ERROR));
                assert_ne!(pair.b.process.read(pair.into.0, LEN), bytes);
            }
        }
    }
}

#[test]
fn unreliable_message_with_packets_of_another_length_is_dropped() {
    for mtus in [[SHORT, LONG], [LONG, SHORT]] {
        for opcode in [SEND, WRITE] {
            for mut pair in pairs(Transport::Uc, mtus) {
                let bytes = pattern(1, LEN);
                pair.a.process.write(pair.from.0, &bytes);
                pair.receive(0, LEN);
                pair.receive(0, LEN);
                for len in [LEN, 1024] {
                    pair.send(&work(&pair, opcode, len));
                }
                assert_eq!(pair.sent(), [(0, 0), (1, 0)], "{mtus:?} {opcode:#x}");
                let received = pair.received();
                let lengths: Vec<_> = received.iter().map(|cqe| cqe.byte_count).collect();
                let expected: &[u32] = if opcode == SEND { &[1024] } else { &[] };
                assert_eq!(lengths, expected, "{mtus:?}");
                assert_eq!(pair.b.process.read(pair.into.0, 1024), bytes[..1024]);
                assert_ne!(pair.b.process.read(pair.into.0, LEN), bytes);
                assert_eq!(
                    (pair.state(0), pair.state(1)),
                    (READY_TO_SEND, READY_TO_SEND)
                );
            }
        }
    }
}

/// The length is looked at before the key, so what is wrong is not the access.
#[test]
fn request_for_more_than_the_longest_message_is_invalid() {
    for (kind, len) in [(PacketKind::ReadRequest, 0), (PacketKind::Write, 1024)] {
        let pair = Pair::new(Transport::Rc, 1, Process::local);
        let header = Header {
            flags: flag::FIRST,
            addr: pair.into.0,
            rkey: pair.into.1,
            total_bytes: (1 << 31) + 1,
            source_lid: pair.world.devices[0].node(),
            ..Header::new(kind, pair.qps[1].qpn, 0x1000, 0)
        };
        pair.world.devices[0].lock().inject(&header, &vec![0; len]);
        let qpn = pair.qps[1].qpn;
        assert_eq!(pair.b.events.take(), [DeviceEvent::QpRequestError { qpn }]);
        assert_eq!(pair.state(1), ERROR);
    }
}
