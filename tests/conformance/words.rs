//! Words of 64 bits, and words that must equal a value, on every kind of stream.

use std::time::Duration;

use doorbell::{
    Access, Condition, Condition64, Error, Executor, Region, StateKind, Status,
    stream_wait_count64, stream_wait_value32, stream_wait_value64, stream_write_value32,
    stream_write_value64, wait_value64,
};

use crate::rig::{SOON, strict_device as device};
use crate::waived::waived;

/// Words of 64 bits and words that must equal a value, in memory of the host: each condition ends its wait, and not before it holds.
#[test]
fn words_of_64_bits_are_stored_and_awaited() {
    let domain = device().protection_domain();
    let region = Region::alloc(&domain, 4096, Access::ALL).unwrap();
    region.store_u64(64, 0).unwrap();
    let stream = crate::rig::stream("wide words");
    let high = 1u64 << 40;
    if std::env::var("DOORBELL_TEST_STREAM").is_ok_and(|kind| kind == "cuda-trigger") {
        let condition = Condition64::Equal(0);
        let refused = stream_wait_value64(&stream, &region, 0, condition, SOON).unwrap_err();
        assert!(
            matches!(&refused, Error::State { kind, .. } if *kind == StateKind::Unsupported),
            "{refused}"
        );
        return;
    }
    let first = stream_wait_value64(&stream, &region, 64, Condition64::Equal(0), SOON);
    if let Err(refused) = &first
        && refused.to_string().contains("writes of NICs in order")
    {
        waived("words_of_64_bits", &refused.to_string());
        return;
    }
    first.unwrap();
    stream.synchronize(SOON).unwrap();
    for (condition, not_yet, then) in [
        (
            Condition64::GreaterOrEqual(high),
            u64::from(u32::MAX),
            high + 5,
        ),
        (Condition64::GreaterOrEqual(3), (-1i64).cast_unsigned(), 3),
        (Condition64::Equal(high), high * 2, high),
        (Condition64::Equal(high), high + 1, high),
        (Condition64::And(high), high - 1, high * 3),
        (Condition64::Nor(!high), u64::MAX, high - 1),
    ] {
        region.store_u64(64, not_yet).unwrap();
        region.store_u64(72, 0).unwrap();
        let waited = stream_wait_value64(&stream, &region, 64, condition, SOON).unwrap();
        stream_write_value64(&stream, &region, 72, high | 9).unwrap();
        std::thread::sleep(Duration::from_millis(2));
        assert_eq!(region.load_u64(72), Ok(0), "{condition:?}");
        assert!(waited.status() != Status::Complete, "{condition:?}");
        region.store_u64(64, then).unwrap();
        stream.synchronize(SOON).unwrap();
        assert_eq!(region.load_u64(72), Ok(high | 9), "{condition:?}");
        assert_eq!(waited.status(), Status::Complete, "{condition:?}");
        waited.wait(SOON).unwrap();
        wait_value64(&region, 64, condition, SOON).unwrap();
    }
    let equal = Condition::Equal(7);
    region.store_u32(128, 8).unwrap();
    let waited = stream_wait_value32(&stream, &region, 128, equal, SOON).unwrap();
    std::thread::sleep(Duration::from_millis(2));
    assert!(waited.status() != Status::Complete);
    region.store_u32(128, 7).unwrap();
    stream.synchronize(SOON).unwrap();
    assert_eq!(waited.status(), Status::Complete);
    // A count that no launch of a graph raises is waited for as it is.
    region.store_u64(136, 4).unwrap();
    stream_wait_count64(&stream, &region, 136, (4, 100), SOON).unwrap();
    stream.synchronize(SOON).unwrap();
    for (offset, found) in [(4096, "OutOfBounds"), (4, "Alignment")] {
        let waited = stream_wait_value64(&stream, &region, offset, Condition64::And(1), SOON);
        let counted = stream_wait_count64(&stream, &region, offset, (1, 1), SOON);
        let written = stream_write_value64(&stream, &region, offset, 1);
        for refused in [waited, counted, written] {
            let refused = format!("{:?}", refused.unwrap_err());
            assert!(refused.contains(found), "{offset}: {refused}");
        }
    }
    only_the_address_of_a_word_matters_if_its_offset_is_aligned(&stream);
    // A wait that does not end in time is a fault of the stream.
    let late = Some(Duration::from_millis(30));
    let waited = stream_wait_value64(&stream, &region, 64, Condition64::Equal(1), late).unwrap();
    stream_write_value64(&stream, &region, 72, 1).unwrap();
    let fault = stream.synchronize(SOON).unwrap_err();
    assert!(matches!(fault, Error::Asynchronous { .. }), "{fault}");
    assert!(matches!(waited.status(), Status::Failed(_)), "{waited:?}");
    assert!(stream.take_fault().is_some());
    stream.synchronize(SOON).unwrap();
    let timed_out = wait_value64(&region, 64, Condition64::Equal(1), late).unwrap_err();
    assert!(matches!(timed_out, Error::Timeout { .. }), "{timed_out}");
}

/// A region may start at any byte. The offset 0 is a multiple of everything, and the word there has no alignment.
#[expect(
    unsafe_code,
    reason = "the memory of a region that starts anywhere is the caller's"
)]
fn only_the_address_of_a_word_matters_if_its_offset_is_aligned(stream: &dyn Executor) {
    let domain = device().protection_domain();
    let mut memory = vec![0u64; 512];
    for skew in [1, 2, 4] {
        // SAFETY: within the vector, which lives until the region is dropped; nothing else accesses it.
        let region = unsafe {
            let start = std::ptr::NonNull::from(&mut memory[0])
                .cast::<u8>()
                .add(skew);
            Region::register(&domain, start, 256, Access::ALL).unwrap()
        };
        let mut refused = vec![
            stream_wait_value64(stream, &region, 8, Condition64::And(1), SOON).unwrap_err(),
            stream_wait_count64(stream, &region, 8, (1, 1), SOON).unwrap_err(),
            stream_write_value64(stream, &region, 8, 1).unwrap_err(),
        ];
        let narrow = Condition::GreaterOrEqual(0);
        let waited = stream_wait_value32(stream, &region, 8, narrow, SOON);
        let equal = stream_wait_value32(stream, &region, 8, Condition::Equal(0), SOON);
        let written = stream_write_value32(stream, &region, 8, 1);
        if skew == 4 {
            for done in [waited, equal, written] {
                done.unwrap();
            }
        } else {
            refused.extend([waited, equal, written].map(Result::unwrap_err));
        }
        for refused in refused {
            assert!(
                matches!(
                    refused,
                    Error::Alignment {
                        argument: "address",
                        ..
                    }
                ),
                "{skew}: {refused}"
            );
        }
        stream.synchronize(SOON).unwrap();
    }
}
