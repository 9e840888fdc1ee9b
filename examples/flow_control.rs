//! A million writes, each with its wait, through a send queue of 32 places. `room_timeout` makes each call that finds the queue full wait for
//! room, so the loop has no flow control of its own.
//!
//!     cargo run --release --example flow_control [STEPS]

use std::error::Error;
use std::time::{Duration, Instant};

use doorbell::{Access, Device, Endpoint, EndpointConfig, HostStream, QueueKind, Region};

const PATIENCE: Option<Duration> = Some(Duration::from_secs(60));

#[allow(dead_code)] // Reason: a test has this file as a module.
fn main() -> Result<(), Box<dyn Error>> {
    let steps = std::env::args().nth(1);
    let steps = steps.map_or(Ok(1_000_000), |text| text.parse::<u64>())?;
    let begin = Instant::now();
    flow("softcx", steps)?;
    println!("{steps} steps in {:.1?}", begin.elapsed());
    Ok(())
}

/// Writes 64 bytes `steps` times, and waits for each write on the stream.
pub fn flow(device: &str, steps: u64) -> doorbell::Result<()> {
    let domain = Device::open(device)?.protection_domain();
    let config = EndpointConfig::default()
        .send_depth(32)
        .room_timeout(PATIENCE);
    let (mut a, mut b) = (
        Endpoint::new(&domain, &config)?,
        Endpoint::new(&domain, &config)?,
    );
    a.connect(&b.address())?;
    b.connect(&a.address())?;
    let region = Region::alloc(&domain, 128, Access::ALL)?;
    let (from, to) = ([region.slice(0, 64)?], region.remote().slice(64, 64)?);
    let stream = HostStream::new("flow")?;

    let mut last = None;
    for _ in 0..steps {
        a.stream_queue_write(&stream, &from, to)?;
        last = Some(a.stream_wait_cq(&stream, QueueKind::Send)?);
    }
    // The stream is in order: the last wait is over when all are.
    last.map_or(Ok(()), |wait| wait.wait(PATIENCE))
}
