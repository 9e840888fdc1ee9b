//! Preparing, queueing, waiting, posting and polling allocate no memory, as a counting allocator shows.
#![allow(unsafe_code)] // Reason: an allocator that counts
#![cfg(all(feature = "softcx", not(loom)))]

mod rig;
mod waived;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicU64, Ordering};

use doorbell::{
    EndpointConfig, Executor, HostStream, QueueKind, RemoteSlice, Status, Work, stream_post,
};
use rig::{Pair, SOON, device};

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

struct Counting;

// SAFETY: all work is the system allocator's; the counter allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promise, passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise, passed on.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// One test, because the counter covers all threads of the process, including the watchdog, the engine and the stream.
#[test]
fn prepare_post_wait_and_poll_allocate_nothing() {
    for blueflame in [false, true] {
        let config = EndpointConfig::default().blueflame(blueflame);
        let mut pair = Pair::new(&device(), &config);
        let region = pair.region(8192);
        let remote = region.remote();
        let stream = HostStream::new("quiet").unwrap();
        let data = [region.slice(0, 32).unwrap(), region.slice(64, 32).unwrap()];
        let into = [region.slice(4096, 64).unwrap()];
        let bytes = [5; 64];
        let write = Work::write(&data, RemoteSlice::at(remote.addr + 1024, remote.rkey));
        let mut queued = |_| {
            let receive = pair.b.stream_queue_recv(&stream, 1, &into).unwrap();
            let sent = pair
                .a
                .stream_queue_send(&stream, &Work::send(&data))
                .unwrap();
            let prepared = pair.a.prepare_send(&write.signaled(false)).unwrap();
            stream_post(&stream, prepared).map_err(drop).unwrap();
            let wait = pair.a.prepare_wait_cq(QueueKind::Send).unwrap();
            stream_post(&stream, wait).map_err(drop).unwrap();
            pair.b.stream_wait_cq(&stream, QueueKind::Recv).unwrap();
            stream.synchronize(SOON).unwrap();
            let prepared = pair.a.prepare_send(&write).unwrap();
            pair.a.rollback(prepared);
            drop(pair.a.prepare_send(&write).unwrap());
            assert!(sent.status() == Status::Complete && receive.status() == Status::Complete);
            let receive = pair.b.post_recv(2, &into).unwrap();
            pair.a.post_send(&Work::send_inline(&bytes)).unwrap();
            while pair.a.poll_cq(QueueKind::Send).unwrap().is_none() {}
            pair.b.wait_cq(QueueKind::Recv, SOON).unwrap();
            assert_eq!(receive.details(), Some((64, None)));
        };
        // Lists of the device and of the watchdog grow to their final size: on the proxy path for a send that arrives before its receive, and on a
        // busy machine for new interleavings. So one repetition without allocations is enough.
        (0..2000).for_each(&mut queued);
        let rounds = |_| {
            let before = ALLOCATIONS.load(Ordering::Relaxed);
            assert!(before > 0, "the allocator counts");
            (0..1000).for_each(&mut queued);
            ALLOCATIONS.load(Ordering::Relaxed) - before
        };
        let counts: Vec<_> = (0..5).map(rounds).collect();
        assert!(
            counts.contains(&0),
            "allocations in 1000 rounds: {counts:?}"
        );
    }
}
