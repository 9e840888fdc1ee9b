//! The first program: a kernel fills a buffer, the stream sends it, the receiving side's stream waits for it, and the CPU is
//! free from the first line to the last.

use std::time::Duration;

use doorbell::{
    Access, Device, Endpoint, EndpointConfig, Executor, HostStream, QueueKind, Region, Work,
};

fn main() -> doorbell::Result<()> {
    let domain = Device::open("softcx")?.protection_domain();
    let config = EndpointConfig::default();
    let (mut a, mut b) = (
        Endpoint::new(&domain, &config)?,
        Endpoint::new(&domain, &config)?,
    );
    a.connect(&b.address())?;
    b.connect(&a.address())?;

    let source = Region::alloc(&domain, 4096, Access::LOCAL_READ)?;
    let target = Region::alloc(&domain, 4096, Access::LOCAL_WRITE)?;
    let stream = HostStream::new("compute")?;

    b.post_recv(1, &[target.slice(0, 64)?])?;
    let kernel = source.clone();
    stream.launch(move || {
        // A kernel: here a closure, on a GPU a __global__ function.
        let _ = kernel.fill(0, 64, 42);
    })?;
    let sent = a.stream_queue_send(&stream, &Work::send(&[source.slice(0, 64)?]))?;
    a.stream_wait_cq(&stream, QueueKind::Send)?;
    b.stream_wait_cq(&stream, QueueKind::Recv)?;

    // Nothing above has waited. The CPU is free now; here it checks the result.
    stream.synchronize(Some(Duration::from_secs(5)))?;
    assert!(sent.check()? && target.is_filled_with(0, 64, 42)?);
    println!("64 bytes arrived; control path: {}", a.path());
    Ok(())
}
