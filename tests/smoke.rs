//! The shortest way through everything: two endpoints of one device, a stream, a send and a wait.
#![cfg(feature = "softcx")]

use std::time::Duration;

use doorbell::{
    Access, Device, Endpoint, EndpointConfig, Executor, HostStream, QueueKind, Region, Status, Work,
};

const SOON: Option<Duration> = Some(Duration::from_secs(20));

#[test]
fn a_send_on_a_stream_arrives() {
    let device = Device::open("softcx").unwrap();
    let domain = device.protection_domain();
    let config = EndpointConfig::default();
    let mut a = Endpoint::new(&domain, &config).unwrap();
    let mut b = Endpoint::new(&domain, &config).unwrap();
    a.connect(&b.address()).unwrap();
    b.connect(&a.address()).unwrap();
    let region = Region::alloc(&domain, 8192, Access::ALL).unwrap();
    let stream = HostStream::new("test").unwrap();
    for round in 0..1000u32 {
        let posted = b
            .post_recv(u64::from(round), &[region.slice(4096, 64).unwrap()])
            .unwrap();
        let kernel = region.clone();
        stream
            .launch(move || kernel.fill(0, 64, round as u8).unwrap())
            .unwrap();
        let sent = a
            .stream_queue_send(&stream, &Work::send(&[region.slice(0, 64).unwrap()]))
            .unwrap();
        let waited = a.stream_wait_cq(&stream, QueueKind::Send).unwrap();
        b.stream_wait_cq(&stream, QueueKind::Recv).unwrap();
        stream.synchronize(SOON).unwrap();
        assert_eq!(
            (sent.status(), waited.status(), posted.status()),
            (Status::Complete, Status::Complete, Status::Complete)
        );
        assert_eq!(posted.details(), Some((64, None)));
        assert!(region.is_filled_with(4096, 64, round as u8).unwrap());
    }
}
