//! The kernels of the library. `scripts/test cuda` runs this over the stand-in for the driver, which has functions of the same names;
//! without a driver its tests are WAIVED. With a GPU the kernels are those that nvcc has compiled.
#![cfg(all(feature = "cuda", not(loom)))]

mod rig;
mod waived;

use std::time::{Duration, Instant};

use doorbell::{CudaStream, Event, Executor};
use rig::SOON;
use rig::gpu::context;

#[test]
fn a_spin_takes_its_time_in_the_order_of_its_stream() {
    const TIME: Duration = Duration::from_millis(300);
    let Some(context) = context("a_spin_takes_its_time") else {
        return;
    };
    let stream = CudaStream::new(&context, "spin").unwrap();
    let (before, after) = (Event::new(), Event::new());
    stream.spin(Duration::ZERO).unwrap();
    stream.record(&before).unwrap();
    before.synchronize(SOON).unwrap();
    let start = Instant::now();
    stream.spin(TIME).unwrap();
    stream.record(&after).unwrap();
    after.synchronize(SOON).unwrap();
    // The GPU's clock is another one.
    assert!(start.elapsed() > TIME * 9 / 10, "{:?}", start.elapsed());
}

#[test]
fn what_is_queued_keeps_the_kernels_though_every_handle_is_gone() {
    let Some(context) = context("what_is_queued_keeps_the_kernels") else {
        return;
    };
    let stream = CudaStream::new(&context, "dropped").unwrap();
    let after = Event::new();
    stream.spin(Duration::from_millis(300)).unwrap();
    stream.spin(Duration::ZERO).unwrap();
    stream.record(&after).unwrap();
    drop((stream, context));
    after.synchronize(SOON).unwrap();
}
