//! Rings that wrap: more operations go through than any count in them has values.

use doorbell::{EndpointConfig, QueueKind, Status, Work};

use crate::rig::{Limit, Pair, Random, from_env};
use crate::{STEP, rigs};

/// Random mixtures of work requests of one to three blocks through rings of every small size.
#[test]
fn small_rings_wrap_thousands_of_times() {
    let limit = Limit::new("small rings", STEP);
    let rounds = from_env("DOORBELL_RINGS", 1200) as u32;
    for rig in rigs() {
        for depth in [1, 2, 3, 7, 16] {
            let config = EndpointConfig::default()
                .send_depth(depth)
                .recv_depth(depth)
                .blueflame(depth % 2 == 1)
                .max_inline_bytes(128);
            let mut pair = Pair::new(&(rig.open)(), &config);
            let mut driver = (rig.driver)();
            let mut random = Random(depth.into());
            let region = pair.region(8192);
            let remote = region.remote();
            let mut number = 0u32;
            for _ in 0..rounds / depth {
                limit.step(number.into(), STEP);
                let mut receives = Vec::new();
                // Fills the queue wholly; the last is signaled, so that it can be emptied.
                for place in 0..depth {
                    number += 1;
                    let bytes: Vec<u8> = (0..16).flat_map(|_| number.to_le_bytes()).collect();
                    let count = 8 * (1 + random.below(8));
                    let at = u64::from(place) * 64;
                    region.write(at, &bytes).unwrap();
                    let slices: Vec<_> = (0..1 + random.below(4))
                        .map(|piece| region.slice(at + piece, 1).unwrap())
                        .collect();
                    let target = remote.slice(4096 + at, 64).unwrap();
                    let last = place + 1 == depth;
                    let work = match random.below(4) {
                        0 => Work::write_inline(&bytes[..count as usize], target),
                        1 => Work::write(&slices, target),
                        2 => Work::nop(),
                        _ => {
                            let into = [region.slice(4096 + at, 64).unwrap()];
                            receives.push((driver.recv(&mut pair.b, 5, &into), count as u32));
                            Work::send_inline(&bytes[..count as usize])
                        }
                    };
                    driver.send(&mut pair.a, &work.signaled(last).wr_id(number.into()));
                }
                driver.wait(&mut pair.a, QueueKind::Send);
                for _ in &receives {
                    driver.wait(&mut pair.b, QueueKind::Recv);
                }
                driver.settle();
                for (receive, len) in receives {
                    assert_eq!(receive.details(), Some((len, None)), "{}", rig.name);
                }
            }
        }
    }
}

/// More posts than the doorbell record's 16 bits count, of both queues; and more completions than any ring has.
#[test]
fn seventy_thousand_posts_wrap_the_doorbell_record() {
    // Fewer where a post takes long; then the counts do not wrap.
    let posts = from_env("DOORBELL_POSTS", 70_000) as u32;
    const ROUND: u32 = 50;
    let limit = Limit::new("70,000 posts", STEP);
    for rig in rigs() {
        let config = EndpointConfig::default()
            .send_depth(ROUND)
            .recv_depth(ROUND);
        let mut pair = Pair::new(&(rig.open)(), &config);
        let mut driver = (rig.driver)();
        let region = pair.region(u64::from(ROUND) * 4);
        for round in 0..posts / ROUND {
            limit.step(round.into(), STEP);
            let mut tickets = Vec::new();
            for place in 0..ROUND {
                let number = round * ROUND + place;
                let into = [region.slice(u64::from(place) * 4, 4).unwrap()];
                let receive = driver.recv(&mut pair.b, number.into(), &into);
                let bytes = number.to_le_bytes();
                let work = Work::send_inline(&bytes).imm(!number);
                // A third of them unsignaled.
                let signaled = place % 3 != 0 || place + 1 == ROUND;
                let sent = driver.send(&mut pair.a, &work.signaled(signaled));
                if signaled {
                    driver.wait(&mut pair.a, QueueKind::Send);
                }
                driver.wait(&mut pair.b, QueueKind::Recv);
                tickets.push((sent, receive, number));
            }
            driver.settle();
            for (place, (sent, receive, number)) in tickets.into_iter().enumerate() {
                assert_eq!(sent.status(), Status::Complete);
                assert_eq!(receive.details(), Some((4, Some(!number))), "{}", rig.name);
                assert_eq!(region.load_u32(place as u64 * 4), Ok(number.to_le()));
            }
        }
    }
}
