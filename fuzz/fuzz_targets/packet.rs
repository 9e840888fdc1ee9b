//! The reader of packets from another process: a header that it takes is one that the writer could have written, bit for bit.
#![no_main]

use doorbell_softcx::Error;
use doorbell_softcx::device::{HEADER_BYTES, Header};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Some(bytes) = data.first_chunk::<HEADER_BYTES>() else {
        return;
    };
    match Header::parse(bytes) {
        Ok(header) => assert_eq!(&header.encode(), bytes, "{header:?}"),
        Err(error) => assert!(matches!(error, Error::Malformed { .. }), "{error:?}"),
    }
});
