//! Launches of captured graphs: what they transfer, and that each is executed once.

use std::ptr::null_mut;

use cudarc::driver::sys::{self, CUdeviceptr, CUstreamCaptureMode as Mode};
use doorbell::{Executor, HostStream, QueueKind, Region, Status, Work};

use crate::rig::gpu::alone;
use crate::rig::{Pair, Random, SOON, device, from_env};
use crate::{
    Application, Bench, Graph, SIDE, assert_never_over, check, config, exchange, number, ok,
};

/// Sends, receives, and waits of both sides, in every mode of captures. The contents of the memory are those of the launch.
#[test]
fn a_captured_graph_transfers_the_contents_of_each_launch() {
    let _alone = alone();
    for mode in [
        Mode::CU_STREAM_CAPTURE_MODE_GLOBAL,
        Mode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
        Mode::CU_STREAM_CAPTURE_MODE_RELAXED,
    ] {
        let Some(mut bench) = Bench::new("a_captured_graph_transfers", &config()) else {
            return;
        };
        let (from, to) = (bench.from.clone(), bench.to.clone());
        let mut tickets = Vec::new();
        let endpoint = &mut bench.pair.a;
        let sender = bench.a.capture(mode, |stream| {
            let slices = [from.slice(0, 100).unwrap(), from.slice(4096, 28).unwrap()];
            let work = Work::send(&slices).imm(77);
            tickets.push(endpoint.stream_queue_send(stream, &work).unwrap());
            tickets.push(endpoint.stream_wait_cq(stream, QueueKind::Send).unwrap());
        });
        let endpoint = &mut bench.pair.b;
        let receiver = bench.b.capture(mode, |stream| {
            let slices = [to.slice(0, 64).unwrap(), to.slice(64, 64).unwrap()];
            tickets.push(endpoint.stream_queue_recv(stream, 0, &slices).unwrap());
            tickets.push(endpoint.stream_wait_cq(stream, QueueKind::Recv).unwrap());
        });
        for ticket in &tickets {
            assert_eq!(
                (ticket.status(), ticket.launches()),
                (Status::Prepared, Some(0))
            );
        }
        let launches = from_env("DOORBELL_GRAPH_LAUNCHES", 1_000);
        for launch in 1..=launches {
            bench.from.fill(0, SIDE, launch as u8).unwrap();
            bench.b.launch(&receiver);
            bench.a.launch(&sender);
            bench.b.wait();
            assert!(bench.is_filled(128, launch as u8), "launch {launch}");
            bench.a.wait();
        }
        for ticket in &tickets {
            assert_eq!(
                (ticket.status(), ticket.launches()),
                (Status::Rung, Some(launches))
            );
            assert!(!ticket.is_over());
            assert_never_over(ticket);
        }
        assert_eq!(tickets[3].details(), Some((128, Some(77))));
        assert_eq!(tickets[0].details(), None);
    }
}

/// No call of this process comes between the launches, and no wait: each launch adds one to a number of the peer, and the queues wrap many times.
#[test]
fn launches_behind_each_other_are_all_executed_once() {
    let _alone = alone();
    let Some(mut bench) = Bench::new("launches_behind_each_other", &config()) else {
        return;
    };
    if crate::rig::has_no_queue(&device(), "launches_behind_each_other")
        || !crate::rig::has_atomics(&device(), "launches_behind_each_other")
    {
        return;
    }
    bench.to.fill(0, 64, 0).unwrap();
    let (from, to) = (bench.from.clone(), bench.to.clone());
    let remote = to.remote().slice(0, 8).unwrap();
    let endpoint = &mut bench.pair.a;
    let mut waited = None;
    let graph = bench
        .a
        .capture(Mode::CU_STREAM_CAPTURE_MODE_GLOBAL, |stream| {
            let old = from.slice(0, 8).unwrap();
            for _ in 0..3 {
                let work = Work::fetch_add(std::slice::from_ref(&old), remote, 1);
                endpoint.stream_queue_send(stream, &work).unwrap();
            }
            for _ in 0..3 {
                waited = Some(endpoint.stream_wait_cq(stream, QueueKind::Send).unwrap());
            }
        });
    let launches = from_env("DOORBELL_GRAPH_LAUNCHES", 1_000);
    for _ in 0..launches {
        bench.a.launch(&graph);
    }
    bench.a.wait();
    assert_eq!(number(&to), 3 * launches);
    assert_eq!(number(&from), 3 * launches - 1);
    assert_eq!(waited.unwrap().launches(), Some(launches));
}

/// The bytes of a launch, others at each offset.
fn payload(launch: u64, len_bytes: u64) -> Vec<u8> {
    let mut random = Random(launch + 1);
    (0..len_bytes).map(|_| random.next() as u8).collect()
}

/// Moves all slots but one by one slot, by nodes of the captured graph: down, or up.
struct Shift {
    slots: CUdeviceptr,
    spare: CUdeviceptr,
    slot_bytes: u64,
    all_bytes: u64,
}

impl Shift {
    fn capture(&self, application: &Application, down: bool) {
        let (from, to) = match down {
            true => (self.slot_bytes, 0),
            false => (0, self.slot_bytes),
        };
        let len_bytes = (self.all_bytes - self.slot_bytes) as usize;
        for (to, from) in [
            (self.spare, self.slots + from),
            (self.slots + to, self.spare),
        ] {
            // SAFETY: the regions live until the graph is gone, and the slots are within them.
            ok(unsafe { sys::cuMemcpyDtoDAsync_v2(to, from, len_bytes, application.raw) });
        }
    }
}

/// Nothing but launches: nodes of the graphs put the bytes of the next launch in place, and those that have arrived away. So the bytes of each launch are seen, at the end,
/// in the place of that launch.
#[test]
fn launches_behind_each_other_have_each_its_own_bytes() {
    const SLOT: u64 = 128;
    let launches = from_env("DOORBELL_GRAPH_LAUNCHES", 300);
    let rounds = if launches < 10_000 { 3 } else { 1 };
    let all_bytes = (launches + 1) * SLOT;
    let _alone = alone();
    let Some(mut bench) = Bench::new("launches_behind_each_other_have", &config()) else {
        return;
    };
    let [next, arrived, spare] =
        [all_bytes, all_bytes, 2 * all_bytes].map(|len_bytes| bench.pair.region(len_bytes));
    let context = bench.a.stream.context().clone();
    let spare_at = spare.device_address(&context).unwrap();
    let shift = |region: &Region, spare| Shift {
        slots: region.device_address(&context).unwrap(),
        spare,
        slot_bytes: SLOT,
        all_bytes,
    };
    let shifts = [
        shift(&next, spare_at),
        shift(&arrived, spare_at + all_bytes),
    ];
    let mode = Mode::CU_STREAM_CAPTURE_MODE_GLOBAL;
    let mut tickets = Vec::new();
    let Pair { a, b, .. } = &mut bench.pair;
    let sender = bench.a.capture(mode, |stream| {
        // In another order and of other lengths than at the receiver.
        let slices = [(100, 28), (0, 40), (40, 60)].map(|(at, len)| next.slice(at, len).unwrap());
        a.stream_queue_send(stream, &Work::send(&slices)).unwrap();
        tickets.push(a.stream_wait_cq(stream, QueueKind::Send).unwrap());
        shifts[0].capture(&bench.a, true);
    });
    let receiver = bench.b.capture(mode, |stream| {
        let slices = [(28, 50), (78, 50), (0, 28)].map(|(at, len)| arrived.slice(at, len).unwrap());
        b.stream_queue_recv(stream, 0, &slices).unwrap();
        tickets.push(b.stream_wait_cq(stream, QueueKind::Recv).unwrap());
        shifts[1].capture(&bench.b, false);
    });
    for round in 0..rounds {
        for launch in 0..launches {
            let bytes = payload(round * launches + launch, SLOT);
            next.write(launch * SLOT, &bytes).unwrap();
        }
        arrived.fill(0, all_bytes, 0xee).unwrap();
        for _ in 0..launches {
            bench.b.launch(&receiver);
            bench.a.launch(&sender);
        }
        bench.a.wait();
        bench.b.wait();
        for launch in 0..launches {
            let sent = payload(round * launches + launch, SLOT);
            let sent = [&sent[100..], &sent[..100]].concat();
            let mut expected = vec![0; SLOT as usize];
            expected[28..].copy_from_slice(&sent[..100]);
            expected[..28].copy_from_slice(&sent[100..]);
            let mut found = vec![0; SLOT as usize];
            // The last one is in the slot behind the first.
            let slot = launches - launch;
            arrived.read(slot * SLOT, &mut found).unwrap();
            assert_eq!(found, expected, "round {round}, launch {launch}");
        }
        let executed = Some((round + 1) * launches);
        assert!(tickets.iter().all(|ticket| ticket.launches() == executed));
    }
}

/// The queues are in the middle of a lap when they are handed over.
#[test]
fn queues_that_were_in_use_go_on_where_they_were() {
    let _alone = alone();
    let Some(mut bench) = Bench::new("queues_that_were_in_use", &config()) else {
        return;
    };
    let (from, to) = (bench.from.clone(), bench.to.clone());
    let stream = HostStream::new("before").unwrap();
    for round in 0..37 {
        from.fill(0, 8, round).unwrap();
        bench
            .pair
            .b
            .post_recv(0, &[to.slice(0, 8).unwrap()])
            .unwrap();
        let slices = [from.slice(0, 8).unwrap()];
        let Pair { a, b, .. } = &mut bench.pair;
        a.stream_queue_send(&stream, &Work::send(&slices)).unwrap();
        a.stream_wait_cq(&stream, QueueKind::Send).unwrap();
        b.stream_wait_cq(&stream, QueueKind::Recv).unwrap();
        stream.synchronize(SOON).unwrap();
    }
    let mode = Mode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
    let both = exchange(&mut bench, mode);
    check(&bench, &both, 200);
}

/// Two instances of a graph, on two streams at the same time.
#[test]
fn launches_of_two_instances_are_all_counted() {
    let _alone = alone();
    let Some(mut bench) = Bench::new("launches_of_two_instances", &config()) else {
        return;
    };
    let (from, to) = (bench.from.clone(), bench.to.clone());
    let slices = [from.slice(0, 8).unwrap()];
    let work = Work::write(&slices, to.remote().slice(0, 8).unwrap());
    let (stream, endpoint) = (&bench.a.stream, &mut bench.pair.a);
    bench.a.begin(Mode::CU_STREAM_CAPTURE_MODE_GLOBAL);
    let sent = endpoint.stream_queue_send(stream, &work).unwrap();
    let waited = endpoint.stream_wait_cq(stream, QueueKind::Send).unwrap();
    let (mut graph, mut one, mut two) = (null_mut(), null_mut(), null_mut());
    // SAFETY: the capture of this stream; the graph is destroyed once, and the executable ones by `Graph`.
    unsafe {
        ok(sys::cuStreamEndCapture(bench.a.raw, &mut graph));
        ok(sys::cuGraphInstantiateWithFlags(&mut one, graph, 0));
        ok(sys::cuGraphInstantiateWithFlags(&mut two, graph, 0));
        ok(sys::cuGraphDestroy(graph));
    }
    let (one, two) = (Graph(one), Graph(two));
    let launches = from_env("DOORBELL_GRAPH_LAUNCHES", 1_000);
    for _ in 0..launches {
        bench.a.launch(&one);
        bench.b.launch(&two);
    }
    bench.a.wait();
    bench.b.wait();
    let counts = (sent.launches(), waited.launches());
    assert_eq!(counts, (Some(2 * launches), Some(2 * launches)));
}

/// More receives than the 16 bits of a doorbell record count.
#[test]
fn doorbell_records_wrap() {
    let _alone = alone();
    let Some(mut bench) = Bench::new("doorbell_records_wrap", &config()) else {
        return;
    };
    let (from, to) = (bench.from.clone(), bench.to.clone());
    let mode = Mode::CU_STREAM_CAPTURE_MODE_GLOBAL;
    let Pair { a, b, .. } = &mut bench.pair;
    let s = [from.slice(0, 8).unwrap()];
    let r = [to.slice(0, 8).unwrap()];
    let mut last = None;
    let sender = bench.a.capture(mode, |stream| {
        for _ in 0..24 {
            a.stream_queue_send(stream, &Work::send(&s)).unwrap();
        }
        for _ in 0..24 {
            a.stream_wait_cq(stream, QueueKind::Send).unwrap();
        }
    });
    let receiver = bench.b.capture(mode, |stream| {
        for _ in 0..24 {
            b.stream_queue_recv(stream, 0, &r).unwrap();
        }
        for _ in 0..24 {
            last = Some(b.stream_wait_cq(stream, QueueKind::Recv).unwrap());
        }
    });
    for launch in 0..3000u64 {
        bench.b.launch(&receiver);
        bench.a.launch(&sender);
        if launch % 64 == 0 {
            bench.a.wait();
            bench.b.wait();
        }
    }
    bench.a.wait();
    bench.b.wait();
    assert_eq!(last.unwrap().launches(), Some(3000));
}
