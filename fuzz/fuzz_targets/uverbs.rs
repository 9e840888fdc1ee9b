//! The software ConnectX against a hostile client: any stream of calls, any bytes in rings, records and doorbells. The process that has
//! the device must survive it, and be done with the client when it is gone.
#![no_main]

use std::cell::OnceCell;

use doorbell_softcx::doors::testing::hostile::Hostile;
use libfuzzer_sys::fuzz_target;

thread_local! {
    static HOSTILE: OnceCell<Hostile> = const { OnceCell::new() };
}

fuzz_target!(|data: &[u8]| {
    HOSTILE.with(|hostile| {
        hostile
            .get_or_init(|| Hostile::new().expect("a child and a device"))
            .live(data);
    });
});
