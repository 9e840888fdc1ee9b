//! A GPU for tests, or the stand-in for its driver.
#![allow(dead_code)] // Reason: each test uses a part.

use std::sync::{Mutex, MutexGuard, PoisonError};

use doorbell::{CudaContext, EndpointConfig, Executor, QueueKind, Region, RemoteSlice, Status};

use super::{Pair, SOON, device};
use crate::waived::waived;

/// One test at a time: faults of the stand-in apply to all threads.
pub fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The context of the first device; `None`, and the test is WAIVED, without a driver.
pub fn context(test: &str) -> Option<CudaContext> {
    match CudaContext::primary(0) {
        Ok(context) => Some(context),
        Err(error) if std::env::var_os("DOORBELL_CUDA_STANDIN").is_some() => panic!("{error}"),
        Err(error) => {
            waived(test, &format!("{error}"));
            None
        }
    }
}

/// Room for what these tests queue at once.
pub fn config() -> EndpointConfig {
    // A lost peer is detected after half a second.
    EndpointConfig::default().send_depth(128).ack_timeout(14)
}

/// A pair with its memory, which transfers.
pub struct Bench {
    pub pair: Pair,
    pub region: Region,
}

impl Bench {
    pub fn new() -> Bench {
        let pair = Pair::new(&device(), &config());
        let region = pair.region(8192);
        Bench { pair, region }
    }

    /// A write on the stream arrives.
    pub fn works(&mut self, stream: &dyn Executor, value: u8) {
        let Bench { pair, region } = self;
        region.fill(0, 512, value).unwrap();
        region.fill(4096, 512, !value).unwrap();
        let data = [region.slice(0, 512).unwrap()];
        let remote = region.remote();
        let to = remote.addr + 4096;
        let sent = pair
            .a
            .stream_queue_write(stream, &data, RemoteSlice::at(to, remote.rkey));
        let waited = pair.a.stream_wait_cq(stream, QueueKind::Send).unwrap();
        stream.synchronize(SOON).unwrap();
        assert_eq!(
            (sent.unwrap().status(), waited.status()),
            (Status::Complete, Status::Complete)
        );
        assert!(region.is_filled_with(4096, 512, value).unwrap());
    }
}
