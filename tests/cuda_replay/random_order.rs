//! Posts, sends and waits in random orders.

use cudarc::driver::sys::CUstreamCaptureMode as Mode;
use doorbell::{Executor, HostStream, QueueKind, Status, Work};

use crate::rig::gpu::alone;
use crate::rig::{Pair, Random, SOON, from_env};
use crate::{Bench, config};

/// Posts, sends and waits in a random order, by graphs and by calls outside of them: each message arrives in the receive that was posted first, and each wait reports the
/// message that came first.
#[test]
fn random_orders_pair_sends_receives_and_waits() {
    let _alone = alone();
    for seed in 1..=from_env("DOORBELL_GRAPH_SEEDS", 4) {
        let Some(mut bench) = Bench::new("random_orders", &config()) else {
            return;
        };
        let mut random = Random(seed * 7919);
        let (from, to) = (bench.from.clone(), bench.to.clone());
        let mode = Mode::CU_STREAM_CAPTURE_MODE_GLOBAL;
        // First some host work to move the queues.
        let host = HostStream::new("before").unwrap();
        for _ in 0..random.below(40) {
            bench
                .pair
                .b
                .post_recv(0, &[to.slice(0, 8).unwrap()])
                .unwrap();
            let s = [from.slice(0, 8).unwrap()];
            let Pair { a, b, .. } = &mut bench.pair;
            a.stream_queue_send(&host, &Work::send(&s)).unwrap();
            a.stream_wait_cq(&host, QueueKind::Send).unwrap();
            b.stream_wait_cq(&host, QueueKind::Recv).unwrap();
            host.synchronize(SOON).unwrap();
        }
        // Graphs: sends of imm k; posts of buffer k; waits.
        let Pair { a, b, .. } = &mut bench.pair;
        let mut sends = Vec::new();
        for k in 0..4u32 {
            let mut t = None;
            let g = bench.a.capture(mode, |stream| {
                let s = [from.slice(0, 8 + u64::from(k)).unwrap()];
                let work = Work::send(&s);
                let work = if k % 2 == 0 { work.imm(100 + k) } else { work };
                a.stream_queue_send(stream, &work).unwrap();
                t = Some(a.stream_wait_cq(stream, QueueKind::Send).unwrap());
            });
            sends.push((g, t.unwrap(), 0u64));
        }
        let mut posts = Vec::new();
        for k in 0..6u64 {
            let g = bench.b.capture(mode, |stream| {
                let n = 1 + k % 3;
                for j in 0..n {
                    b.stream_queue_recv(
                        stream,
                        0,
                        &[
                            to.slice(1024 * k + 64 * j, 16).unwrap(),
                            to.slice(1024 * k + 64 * j + 16, 16).unwrap(),
                        ][..(1 + j as usize % 2)],
                    )
                    .unwrap();
                }
            });
            posts.push((g, 1 + k % 3));
        }
        let mut w = None;
        let waits = bench.b.capture(mode, |stream| {
            w = Some(b.stream_wait_cq(stream, QueueKind::Recv).unwrap());
        });
        let w = w.unwrap();
        let mut waited = 0u64;
        let mut posted = std::collections::VecDeque::new();
        let mut sent = std::collections::VecDeque::new();
        let mut value = 0u8;
        for step in 0..600 {
            match random.below(3) {
                0 if posted.len() + sent.len() <= 28 => {
                    if random.below(4) == 0 {
                        let off = 512 + 1024 * random.below(6);
                        b.stream_queue_recv(&bench.b.stream, 0, &[to.slice(off, 16).unwrap()])
                            .unwrap();
                        posted.push_back(off);
                    } else {
                        let k = random.below(6);
                        bench.b.launch(&posts[k as usize].0);
                        for j in 0..posts[k as usize].1 {
                            posted.push_back(1024 * k + 64 * j);
                        }
                    }
                    bench.b.wait();
                }
                1 if !posted.is_empty() => {
                    value = value.wrapping_add(1);
                    from.fill(0, 16, value).unwrap();
                    let off = posted.pop_front().unwrap();
                    to.fill(off, 16, !value).unwrap();
                    if random.below(5) == 0 {
                        let s = [from.slice(0, 8).unwrap()];
                        a.stream_queue_send(&bench.a.stream, &Work::send(&s))
                            .unwrap();
                        let t = a.stream_wait_cq(&bench.a.stream, QueueKind::Send).unwrap();
                        bench.a.stream.synchronize(SOON).unwrap();
                        assert_eq!(t.status(), Status::Complete);
                        sent.push_back((8, None, off, value));
                    } else {
                        let k = random.below(4) as usize;
                        bench.a.launch(&sends[k].0);
                        bench.a.wait();
                        sends[k].2 += 1;
                        assert_eq!(sends[k].1.launches(), Some(sends[k].2));
                        sent.push_back((
                            8 + k as u32,
                            k.is_multiple_of(2).then_some(100 + k as u32),
                            off,
                            value,
                        ));
                    }
                    let (len, _, off, value) = *sent.back().unwrap();
                    // Buffers may repeat; the check is at once.
                    assert!(
                        to.is_filled_with(off, len.into(), value).unwrap(),
                        "seed {seed} step {step}"
                    );
                }
                2 if !sent.is_empty() => {
                    let (len, imm, _, _) = sent.pop_front().unwrap();
                    if random.below(5) == 0 {
                        let t = b.stream_wait_cq(&bench.b.stream, QueueKind::Recv).unwrap();
                        bench.b.stream.synchronize(SOON).unwrap();
                        assert_eq!(
                            (t.status(), t.details()),
                            (Status::Complete, Some((len, imm)))
                        );
                    } else {
                        bench.b.launch(&waits);
                        bench.b.wait();
                        waited += 1;
                        assert_eq!(
                            (w.launches(), w.details()),
                            (Some(waited), Some((len, imm))),
                            "seed {seed} step {step}"
                        );
                    }
                }
                _ => {}
            }
        }
        drop((sends, posts, waits));
        bench.pair.reset();
    }
}
