//! The reader of datagrams from other hosts: a frame that it takes has its payload within its bytes, and is one that a requester or a responder sends.
#![no_main]

use doorbell_softcx::device::{MAX_PAYLOAD_BYTES, PacketKind, RoceFrame, Service};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Ok(RoceFrame::Packet(header, payload)) = RoceFrame::parse(data) else {
        return;
    };
    assert!(payload.start <= payload.end && payload.end + 4 <= data.len());
    assert_eq!(payload.len(), usize::from(header.payload_bytes));
    assert!(payload.len() <= MAX_PAYLOAD_BYTES);
    assert!(header.dst_qpn >> 24 == 0 && header.psn >> 24 == 0 && header.source_qpn >> 24 == 0);
    // What the services do not have does not come through.
    match header.service {
        Service::Reliable => {}
        Service::Unreliable => assert!(matches!(header.kind, PacketKind::Send | PacketKind::Write)),
        Service::Datagram => assert_eq!(header.kind, PacketKind::Send),
    }
});
