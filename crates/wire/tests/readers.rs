//! The readers take any bytes: they give values or errors, and never panic.

use doorbell_wire::mlx5::{Cqe, Doorbell, Opcode, Segment, Wqe, parse_recv};
use proptest::prelude::*;

/// Bytes with a control segment that makes sense often enough for the rest to be looked at.
fn wqe_bytes() -> impl Strategy<Value = Vec<u8>> {
    let opcode = prop_oneof![
        8 => prop::sample::select(vec![0u8, 1, 8, 9, 10, 11, 16, 17, 18, 0x25]),
        1 => any::<u8>(),
    ];
    // Short inline segments often, so that several follow one another.
    let word = prop_oneof![2 => any::<u32>(), 2 => 0x8000_0000..0x8000_0080u32, 1 => 0..100u32];
    (
        opcode,
        0..70u8,
        prop::collection::vec(word, 0..260),
        0..16usize,
    )
        .prop_map(|(opcode, ds, words, cut)| {
            let mut bytes: Vec<u8> = words.into_iter().flat_map(u32::to_be_bytes).collect();
            if let Some(control) = bytes.first_chunk_mut::<8>() {
                control[3] = opcode;
                control[7] = ds;
            }
            bytes.truncate(bytes.len().saturating_sub(cut));
            bytes
        })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1200, ..ProptestConfig::default() })]

    #[test]
    fn wqes(bytes in wqe_bytes()) {
        let datagram = Wqe::parse_datagram(&bytes);
        prop_assert!(datagram.is_err() || bytes.len() >= 16);
        match Wqe::parse(&bytes) {
            Err(error) => prop_assert!(error.to_string().starts_with("malformed send WQE")),
            Ok(wqe) => {
                let ds = usize::from(wqe.ctrl.ds);
                prop_assert!((1..=63).contains(&ds) && ds * 16 <= bytes.len());
                let known = wqe.ctrl.opcode.is_some_and(|opcode| opcode != Opcode::Nop);
                let head = 1 + usize::from(wqe.remote.is_some()) + usize::from(wqe.atomic.is_some());
                // The segments fill the WQE, no more and no less.
                let segments: usize = wqe.segments().map(|segment| match segment {
                    Segment::Memory(_) => 1,
                    Segment::Inline(bytes) => (bytes.len() + 4).div_ceil(16),
                }).sum();
                prop_assert_eq!(head + segments, if known { ds } else { 1 });
                let total: u64 = wqe.segments().map(|segment| u64::from(segment.len_bytes())).sum();
                prop_assert_eq!(wqe.total_len(), total);
                prop_assert!(wqe.to_string().starts_with("control\n"));
            }
        }
    }

    #[test]
    fn receives(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        prop_assert!(parse_recv(&bytes).count() <= bytes.len() / 16);
        prop_assert!(parse_recv(&bytes).all(|segment| segment.lkey != 0x100));
    }

    #[test]
    fn cqes_round_trip(halves in prop::array::uniform2(prop::array::uniform32(any::<u8>()))) {
        let bytes: [u8; 64] = std::array::from_fn(|i| halves[i / 32][i % 32]);
        let cqe = Cqe::parse(&bytes);
        prop_assert_eq!(Cqe::parse(&cqe.encode(cqe.owner)), Cqe {
            // Fields that an error CQE does not have.
            imm: if cqe.opcode.is_error() { 0 } else { cqe.imm },
            byte_count: if cqe.opcode.is_error() { 0 } else { cqe.byte_count },
            ..cqe
        });
    }

    #[test]
    fn doorbells(loaded in any::<u64>()) {
        let doorbell = Doorbell::parse(loaded);
        let mut control = [0; 16];
        control[..8].copy_from_slice(&loaded.to_ne_bytes());
        let control = Wqe::ctrl(&control);
        prop_assert_eq!((doorbell.index, doorbell.opcode, doorbell.qpn, doorbell.ds),
            (control.index, control.opcode_raw, control.qpn, control.ds));
    }
}

#[test]
fn malformed_wqes_have_distinct_errors() {
    let reason = |bytes: &[u8]| Wqe::parse(bytes).unwrap_err().to_string();
    assert!(reason(&[0; 15]).contains("no control segment"));
    assert!(reason(&[0; 64]).contains("0 segments"));
    let mut wqe = [0u8; 64];
    (wqe[3], wqe[7]) = (8, 5);
    assert!(reason(&wqe).contains("5 segments announced, 4 there"));
    wqe[7] = 1;
    assert!(reason(&wqe).contains("RDMA_WRITE without a remote address"));
    (wqe[3], wqe[7]) = (17, 2);
    assert!(reason(&wqe).contains("ATOMIC_CS without operands"));
    (wqe[3], wqe[7]) = (10, 2);
    wqe[16..20].copy_from_slice(&[0x80, 0, 0, 13]);
    assert!(reason(&wqe).contains("longer than the 12 bytes"));
    wqe[19] = 12;
    assert_eq!(Wqe::parse(&wqe).unwrap().total_len(), 12);
}
