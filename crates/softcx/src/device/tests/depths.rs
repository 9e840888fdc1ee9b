//! How many reads and atomics a queue pair has on their way, and how many of its peer's it serves.

use super::pair::Pair;
use crate::device::Faults;
use crate::device::client::Transport;
use crate::device::tests::driver::{Process, Work};
use crate::device::tests::harness::pattern;
use doorbell_wire::mlx5::Syndrome;

const WRITE: u8 = 0x08;
const READ: u8 = 0x10;
const FETCH_ADD: u8 = 0x12;
const REQUESTS: usize = 20;
const LEN: usize = 3000;
const ERROR: u8 = 6;
const READY_TO_SEND: u8 = 3;

/// Posts requests with one doorbell each, before the device has a turn. Returns the syndromes of their completions.
fn run(pair: &mut Pair, opcode: u8) -> Vec<u8> {
    for number in 0..REQUESTS {
        let mut segments = vec![pair.there(number * 4096)];
        if opcode == FETCH_ADD {
            segments.push([0; 16]);
            segments.push(pair.here(number * 4096, 8));
        } else {
            segments.push(pair.here(number * 4096, LEN));
        }
        pair.send(&Work::new(opcode, &segments));
    }
    pair.sent().iter().map(|(_, syndrome)| *syndrome).collect()
}

fn pair(depths: [u8; 2], devices: usize) -> Pair {
    let pair = Pair::with_depths(Transport::Rc, devices, Process::local, depths);
    for number in 0..REQUESTS {
        let at = (number * 4096) as u64;
        let bytes = pattern(number as u64, LEN);
        pair.b.process.write(pair.into.0 + at, &bytes);
    }
    pair
}

/// Depths that are no power of two are rounded up, as the kernel's driver does it. Without a depth of its own a requester has one request on its
/// way: the driver then leaves the logarithm at 0.
#[test]
fn requester_within_the_depth_of_its_peer_is_served() {
    for depths in [[16, 16], [4, 4], [1, 1], [3, 3], [4, 3], [0, 1], [2, 16]] {
        for devices in [1, 2] {
            for opcode in [READ, FETCH_ADD] {
                let mut pair = pair(depths, devices);
                assert_eq!(run(&mut pair, opcode), [0; REQUESTS], "{depths:?}");
                let len = if opcode == READ { LEN } else { 8 };
                for number in 0..REQUESTS {
                    let got = pair
                        .a
                        .process
                        .read(pair.from.0 + (number * 4096) as u64, len);
                    assert!(got == pattern(number as u64, LEN)[..len], "{number}");
                }
                assert_eq!(pair.state(1), READY_TO_SEND);
            }
        }
    }
}

#[test]
fn request_beyond_the_depth_of_the_responder_is_invalid() {
    for depths in [[16, 4], [16, 8], [2, 1], [5, 3], [4, 0], [0, 0]] {
        for devices in [1, 2] {
            for opcode in [READ, FETCH_ADD] {
                let mut pair = pair(depths, devices);
                let syndromes = run(&mut pair, opcode);
                let served = syndromes.iter().take_while(|it| **it == 0).count();
                let invalid = Syndrome::RemoteInvalReq as u8;
                assert_eq!(syndromes.get(served), Some(&invalid), "{depths:?}");
                if depths[1] == 0 {
                    assert_eq!(served, 0);
                }
                assert_eq!((pair.state(0), pair.state(1)), (ERROR, ERROR));
            }
        }
    }
}

/// Requests that are repeated take no place: their first answers and their second ones may wait at the same time.
#[test]
fn repeated_requests_do_not_count() {
    for seed in 0..60 {
        let depth = [1, 2, 4, 16][seed as usize % 4];
        let mut pair = pair([depth; 2], 1 + seed as usize % 2);
        pair.world.set_faults(Faults {
            loss: 0.02,
            duplicate: 0.2,
            reorder: 0.2,
            delay_ns: 20_000,
            seed,
            ..Faults::default()
        });
        for opcode in [READ, FETCH_ADD] {
            let syndromes = run(&mut pair, opcode);
            let invalid = Syndrome::RemoteInvalReq as u8;
            assert!(!syndromes.contains(&invalid), "seed {seed} {syndromes:?}");
            if pair.state(0) == ERROR {
                // Seven losses in a row.
                break;
            }
        }
    }
}

/// The kernel's driver gives the device the logarithm of the number, rounded up (`__mlx5_ib_modify_qp`).
#[test]
fn depth_of_the_requester_is_rounded_up() {
    for (depth, on_their_way) in [(0, 1), (1, 1), (3, 4), (4, 4), (5, 8), (9, 16)] {
        let mut pair = pair([depth, 16], 2);
        // No answer comes.
        pair.world.devices[1].set_faults(Faults {
            loss: 1.0,
            ..Faults::default()
        });
        for number in 0..REQUESTS {
            let segments = [pair.there(number * 4096), pair.here(number * 4096, 8)];
            pair.send(&Work::new(READ, &segments));
        }
        for _ in 0..3 {
            pair.world.turn();
        }
        let sent = pair.world.devices[0].counters().packets_sent;
        assert_eq!(sent, on_their_way, "{depth}");
    }
}

/// The kernel's driver answers with what the device has (`query_qp_attr` in mlx5/qp.c): the sequence numbers as they are now, the depths from their
/// logarithms, and the remote rights, of which a responder that serves no reads has only that of writes.
#[test]
fn query_tells_what_the_device_has() {
    const REMOTE_WRITE: u32 = 1 << 1;
    const REMOTE: u32 = REMOTE_WRITE | 1 << 2 | 1 << 3;
    for (asked, depths, access) in [
        ([3, 5], [4, 8], REMOTE),
        ([16, 1], [16, 1], REMOTE),
        ([0, 0], [1, 1], REMOTE_WRITE),
    ] {
        let mut pair = pair(asked, 1);
        let query = |pair: &Pair| {
            let a = pair.a.client.query_qp(pair.qps[0].qpn).unwrap();
            (a, pair.b.client.query_qp(pair.qps[1].qpn).unwrap())
        };
        let (a, b) = query(&pair);
        assert_eq!([a.max_rd_atomic, b.max_dest_rd_atomic], depths);
        assert_eq!(b.access, access, "{asked:?}");
        assert_eq!([a.sq_psn, a.rq_psn, b.rq_psn], [0x1000; 3]);
        for _ in 0..3 {
            let write = Work::new(WRITE, &[pair.there(0), pair.here(0, 8)]);
            pair.send(&write);
            assert_eq!(pair.sent().len(), 1);
        }
        let (a, b) = query(&pair);
        assert_eq!((a.sq_psn, b.rq_psn), (0x1003, 0x1003));
        assert_eq!((a.rq_psn, b.sq_psn), (0x1000, 0x1000));
    }
}
