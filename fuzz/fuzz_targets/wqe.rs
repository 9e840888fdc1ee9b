//! The readers of send WQEs, receive WQEs and doorbells: any bytes give a value or a typed error, and the readers agree with each other.
#![no_main]

use doorbell_wire::Error;
use doorbell_wire::mlx5::{Doorbell, Segment, Wqe, parse_recv};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    receive(data);
    let wqe = match Wqe::parse(data) {
        Ok(wqe) => wqe,
        Err(error) => return assert!(matches!(error, Error::Malformed { .. }), "{error:?}"),
    };

    let first: &[u8; 16] = data
        .first_chunk()
        .expect("what parsed has a control segment");
    let control = Wqe::ctrl(first);
    assert_eq!(wqe.ctrl, control);
    let doorbell = Doorbell::parse(u64::from_ne_bytes(*first.first_chunk().expect("8 of 16")));
    assert_eq!(
        (doorbell.index, doorbell.opcode, doorbell.qpn, doorbell.ds),
        (control.index, control.opcode_raw, control.qpn, control.ds)
    );

    let len_bytes = usize::from(control.ds) * 16;
    assert_eq!(
        Wqe::parse(&data[..len_bytes]).as_ref(),
        Ok(&wqe),
        "bytes behind the WQE changed it"
    );
    let whole = data[..len_bytes].as_ptr_range();
    let mut total = 0;
    for segment in wqe.segments() {
        total += match segment {
            Segment::Memory(memory) => u64::from(memory.len_bytes),
            Segment::Inline(bytes) => {
                let range = bytes.as_ptr_range();
                assert!(whole.start <= range.start && range.end <= whole.end);
                bytes.len() as u64
            }
        };
    }
    assert_eq!(total, wqe.total_len());
    assert!(!wqe.to_string().is_empty());
});

fn receive(data: &[u8]) {
    let mut count = 0;
    for segment in parse_recv(data) {
        assert_ne!(segment.lkey, 0x100, "a terminator is not a segment");
        count += 1;
    }
    assert!(count <= data.len() / 16);
}
