//! What a dropped matcher does with receives that are not over.

use std::time::{Duration, Instant};

use super::{MatchTicket, Matcher, MatcherConfig, Source, TagSelector};
use crate::{
    Access, Device, Error, Executor, HostStream, MessageConfig, MessageQueue, Region, StateKind,
};

const SOON: Option<Duration> = Some(Duration::from_secs(60));
const ANY: TagSelector = TagSelector::any();

fn two(device: &Device) -> [Matcher; 2] {
    let domain = device.protection_domain();
    let messages = MessageConfig::default().eager_bytes(64).slots(2);
    let config = MatcherConfig::default().messages(messages);
    let [mut a, mut b] = [(); 2].map(|()| MessageQueue::new(&domain, &messages).unwrap());
    a.connect(&b.address()).unwrap();
    b.connect(&a.address()).unwrap();
    [vec![None, Some(a)], vec![Some(b), None]]
        .map(|queues| Matcher::new(&domain, queues, &config).unwrap())
}

fn is_dropped(ticket: &MatchTicket) -> bool {
    let ended = ticket.wait(SOON);
    matches!(
        &ended,
        Err(Error::State {
            kind: StateKind::Discarded,
            ..
        })
    )
}

/// Receives that their stream has come to, that it has not, and that have a message which is not stored yet: each ends with a fault of its stream, also while the memory of a
/// message that the NIC reads is being written.
#[test]
fn dropped_matcher_ends_receives_and_their_streams() {
    let device = Device::open("softcx").unwrap();
    for is_read in [false, true] {
        let [a, b] = two(&device);
        let region = Region::alloc(b.domain(), 1 << 16, Access::ALL).unwrap();
        let slice = |at: u64| [region.slice(at, 8192).unwrap()];
        let streams = ["x", "y", "z"].map(|name| HostStream::new(name).unwrap());
        let waits = b
            .recv(&streams[0], Source::Any, 1.into(), &slice(0))
            .unwrap();
        let behind = b
            .recv(&streams[0], Source::Any, 2.into(), &slice(0))
            .unwrap();
        let go = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
        let flag = std::sync::Arc::clone(&go);
        let wait = move || {
            while !flag.load(std::sync::atomic::Ordering::Acquire) {
                std::thread::sleep(Duration::from_millis(1));
            }
        };
        streams[1].launch(wait).unwrap();
        let unreached = b
            .recv(&streams[1], Source::Any, 3.into(), &slice(8192))
            .unwrap();
        let len = if is_read { 8192 } else { 64 };
        let source = [region.slice(32_768, len).unwrap()];
        let sent = a.start_send_now(1, 3, &source, SOON).unwrap();
        let read = b
            .recv(&streams[2], Source::Any, 4.into(), &slice(16_384))
            .unwrap();
        let also_sent = a.start_send_now(1, 4, &source, SOON).unwrap();
        if !is_read {
            a.wait_send_now(&sent, SOON).unwrap();
            a.wait_send_now(&also_sent, SOON).unwrap();
        }
        let begin = Instant::now();
        drop(b);
        go.store(true, std::sync::atomic::Ordering::Release);
        assert!(is_dropped(&waits));
        assert!(is_dropped(&behind));
        assert!(is_dropped(&unreached));
        // Either it was over before, or it is so: then nothing is written any more.
        let ended = read.wait(SOON);
        let found = region.is_filled_with(16_384, 8192, 0).unwrap();
        assert!(ended.is_ok() || is_dropped(&read), "{ended:?}");
        std::thread::sleep(Duration::from_millis(2));
        assert_eq!(region.is_filled_with(16_384, 8192, 0), Ok(found));
        for stream in &streams[..2] {
            assert!(stream.synchronize(SOON).is_err());
            assert!(stream.take_fault().is_some());
        }
        assert!(begin.elapsed() < Duration::from_secs(30));
        assert_eq!(region.is_filled_with(0, 16_384, 0), Ok(true));
    }
}

/// Regions are the application's alone once a receive is over.
#[test]
fn ended_receives_keep_no_region() {
    let device = Device::open("softcx").unwrap();
    let [a, b] = two(&device);
    let region = Region::alloc(b.domain(), 4096, Access::ALL).unwrap();
    let other = Region::alloc(b.domain(), 4096, Access::ALL).unwrap();
    let stream = HostStream::new("s").unwrap();
    let source = [other.slice(0, 8).unwrap()];
    let long = [other.slice(0, 2048).unwrap()];
    for source in [&source, &long] {
        let target = [region.slice(0, 4096).unwrap()];
        let received = b.recv(&stream, Source::Any, ANY, &target).unwrap();
        a.send_now(1, 0, source, SOON).unwrap();
        received.wait(SOON).unwrap();
        assert_eq!(region.handles(), 1);
    }
    let target = [region.slice(0, 8).unwrap()];
    let cancelled = b.recv(&stream, Source::Any, ANY, &target).unwrap();
    assert_eq!(b.cancel(&cancelled), Ok(true));
    assert!(cancelled.wait(SOON).is_err());
    assert_eq!(region.handles(), 1);
}
