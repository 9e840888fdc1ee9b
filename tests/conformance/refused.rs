//! A work request that the peer refuses: the failure names it by its `wr_id`, and work posted before it completes.

use std::time::{Duration, Instant};

use doorbell::{
    Cause, EndpointConfig, Error, QueueKind, RemoteSlice, Status, Ticket, WcStatus, Work,
};

use crate::rig::{Limit, Pair, SOON, has_atomics};
use crate::{STEP, rigs};

/// Waits until the ticket is final: the failure of its endpoint is found by the watchdog or by the poll in this loop.
fn settled(pair: &mut Pair, ticket: &Ticket) -> Status {
    let deadline = Instant::now() + SOON.unwrap();
    while !ticket.is_over() && Instant::now() < deadline {
        // Polling lets the device make progress.
        let _ = pair.a.poll_cq(QueueKind::Send);
        // A stream without a thread is executed by a wait only.
        let _ = ticket.wait(Some(Duration::from_micros(100)));
    }
    ticket.status()
}

/// An atomic with a key that the peer's device does not know. A misaligned atomic, to which devices respond differently, is refused by the post.
#[test]
fn refused_atomic_fails_and_earlier_work_completes() {
    const REFUSED: u64 = 77;
    const PIECE: u64 = 4 << 10;
    const MOST: u64 = 12;
    let limit = Limit::new("refused", STEP);
    for rig in rigs() {
        let device = (rig.open)();
        if !has_atomics(&device, "refused_atomic_fails_and_earlier_work_completes") {
            return;
        }
        let mut driver = (rig.driver)();
        let mut pair = Pair::new(&device, &EndpointConfig::default());
        let region = pair.region(PIECE * (1 + MOST));
        let remote = region.remote();
        // How many writes come before it, and which of them are signaled.
        for (round, (before, signaled)) in [(0, 0), (1, 0), (1, 1), (5, 0), (5, 0b00100), (MOST, 0)]
            .into_iter()
            .enumerate()
        {
            limit.step(round as u64, STEP);
            region.fill(0, PIECE, round as u8 + 1).unwrap();
            region.fill(PIECE, MOST * PIECE, 0xff).unwrap();
            let data = [region.slice(0, PIECE).unwrap()];
            let mut tickets = Vec::new();
            // In every other round nothing completes before the test posts a receive: a send without one comes first.
            let waits = round % 2 == 1;
            if waits {
                tickets.push(driver.send(&mut pair.a, &Work::send(&data).signaled(round > 2)));
            }
            for number in 0..before {
                let target = remote.slice((1 + number) * PIECE, PIECE).unwrap();
                let work = Work::write(&data, target)
                    .wr_id(number)
                    .signaled(signaled >> number & 1 != 0);
                tickets.push(driver.send(&mut pair.a, &work));
            }
            let into = [region.slice(PIECE - 8, 8).unwrap()];
            let atomic = |addr, rkey| {
                Work::fetch_add(&into, RemoteSlice::at(addr, rkey), 1)
                    .wr_id(REFUSED)
                    .signaled(round % 2 == 0)
            };
            let error = pair
                .a
                .prepare_send(&atomic(remote.addr + 4001, remote.rkey));
            assert!(matches!(error, Err(Error::Alignment { .. })), "{error:?}");
            let unknown = atomic(remote.addr + 4000, remote.rkey ^ 0x100);
            let ticket = driver.send(&mut pair.a, &unknown);
            let case = format!("{}, round {round}", rig.name);
            if waits {
                let until = Instant::now() + Duration::from_millis(20);
                while Instant::now() < until {
                    assert_eq!(pair.a.poll_cq(QueueKind::Send), Ok(None), "{case}");
                    std::thread::sleep(Duration::from_millis(1));
                }
                let into = [region.slice(0, PIECE).unwrap()];
                pair.b.post_recv(1, &into).unwrap();
            }
            let Status::Failed(failure) = settled(&mut pair, &ticket) else {
                panic!("{case}: {:?}", ticket.status());
            };
            assert_eq!(failure.wr_id, Some(REFUSED), "{case}: {failure}");
            let Cause::Completion { status, .. } = failure.cause else {
                panic!("{case}: {failure}");
            };
            assert_eq!(status, WcStatus::RemAccessErr, "{case}: {failure}");
            for (number, ticket) in tickets.iter().enumerate() {
                assert_eq!(ticket.status(), Status::Complete, "{case}: write {number}");
            }
            let written = before * PIECE;
            let (after, rest) = (PIECE + written, MOST * PIECE - written);
            assert!(
                region
                    .is_filled_with(PIECE, written, round as u8 + 1)
                    .unwrap(),
                "{case}"
            );
            assert!(region.is_filled_with(after, rest, 0xff).unwrap(), "{case}");
            assert!(
                matches!(pair.a.post_send(&Work::nop()), Err(Error::Work(same)) if same == failure),
                "{case}"
            );
            driver.settle();
            pair.reset();
        }
    }
}
