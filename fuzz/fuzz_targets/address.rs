//! What a peer sends to be connected to: an address that is taken encodes to the very bytes it came from.
#![no_main]

use doorbell::{Address, Error, RemoteRegion};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    match Address::from_bytes(data) {
        Ok(address) => {
            assert_eq!(address.to_bytes(), data, "{address:?}");
            assert_eq!(address.to_string().parse(), Ok(address));
        }
        Err(error) => assert!(matches!(error, Error::Malformed { .. }), "{error:?}"),
    }
    if let Ok(text) = std::str::from_utf8(data) {
        if let Err(error) = text.parse::<Address>() {
            assert!(matches!(error, Error::Malformed { .. }), "{error:?}");
        }
    }
    if let Some(bytes) = data.first_chunk::<{ RemoteRegion::BYTES }>() {
        assert_eq!(&RemoteRegion::from_bytes(bytes).to_bytes(), bytes);
    }
});
