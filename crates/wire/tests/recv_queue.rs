//! The receive queue beside a model of it.

mod fixture;

use std::collections::VecDeque;

use doorbell_wire::Error;
use doorbell_wire::bytecode::{Program, ProgramOp};
use doorbell_wire::mlx5::{DataSegment, parse_recv};
use fixture::Recv;
use proptest::prelude::*;

#[derive(Debug, Clone)]
enum Op {
    Post(Vec<DataSegment>),
    Commit,
    Rollback,
    Discard,
    Release(usize),
}

fn op() -> impl Strategy<Value = Op> {
    let len_bytes = prop_oneof![1 => Just(0), 6 => 1..=0x7fff_ffffu32, 1 => 0x8000_0000u32..];
    let lkey = prop_oneof![20 => 0x101..u32::MAX, 1 => Just(0x100)];
    let segment = (len_bytes, lkey, any::<u64>()).prop_map(|(len_bytes, lkey, addr)| DataSegment {
        len_bytes,
        lkey,
        addr,
    });
    prop_oneof![
        8 => prop::collection::vec(segment, 0..=4).prop_map(Op::Post),
        4 => Just(Op::Commit),
        2 => Just(Op::Rollback),
        1 => Just(Op::Discard),
        4 => (0..4usize).prop_map(Op::Release),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn behaves_as_the_model(ops in prop::collection::vec(op(), 1..100)) {
        const DEPTH: u32 = 8;
        let mut recv = Recv::new(DEPTH, 3);
        let mut live: VecDeque<Vec<DataSegment>> = VecDeque::new();
        let mut commits = Vec::new();
        let (mut producer, mut committed, mut consumer) = (0u32, 0u32, 0u32);
        for op in ops {
            match op {
                Op::Post(list) => {
                    let result = recv.queue.post(&list);
                    if list.len() > 3 || list.iter().any(|s| s.len_bytes > 0x7fff_ffff) {
                        // Whichever piece is looked at first.
                        assert!(matches!(result, Err(Error::Range { .. } | Error::State { .. })));
                    } else if list.iter().any(|s| s.lkey == 0x100) {
                        assert!(matches!(result, Err(Error::State { operation: "post", .. })));
                    } else if producer - consumer == DEPTH {
                        prop_assert_eq!(result, Err(Error::QueueFull { queue: "receive", depth: DEPTH }));
                    } else {
                        prop_assert_eq!(result.unwrap().index, producer);
                        live.push_back(list.into_iter().filter(|s| s.len_bytes > 0).collect());
                        producer += 1;
                    }
                }
                Op::Commit => {
                    let mut program = Program::new(&recv.targets);
                    match recv.queue.commit(&mut program) {
                        Ok(commit) => {
                            prop_assert!(producer != committed);
                            let ops: Vec<_> = program.ops().collect();
                            let [ProgramOp::StoreDword { at, value }] = ops[..] else { panic!("{program}") };
                            prop_assert_eq!((at.offset, value), (0, (producer & 0xffff).to_be()));
                            commits.push((commit, committed, producer));
                            committed = producer;
                        }
                        Err(error) => {
                            assert!(matches!(error, Error::State { operation: "commit", .. }));
                            prop_assert!(program.is_empty());
                            prop_assert_eq!(producer, committed);
                        }
                    }
                }
                Op::Rollback => {
                    let Some((commit, from, upto)) = commits.pop() else { continue };
                    let result = recv.queue.rollback(commit);
                    if producer != upto || consumer > from {
                        assert!(matches!(result, Err(Error::State { operation: "rollback", .. })));
                        commits.clear();
                    } else {
                        result.unwrap();
                        live.truncate((from - consumer) as usize);
                        (producer, committed) = (from, from);
                    }
                }
                Op::Discard => {
                    recv.queue.discard();
                    live.truncate((committed - consumer) as usize);
                    producer = committed;
                }
                Op::Release(count) => {
                    let count = count.min((committed - consumer) as usize);
                    consumer += count as u32;
                    recv.queue.release(consumer).unwrap();
                    live.drain(..count);
                    prop_assert!(recv.queue.release(consumer.wrapping_sub(1)).is_err());
                    prop_assert!(recv.queue.release(producer + 1).is_err());
                }
            }
            prop_assert_eq!(recv.queue.producer_index(), producer);
            prop_assert_eq!(recv.queue.committed_index(), committed);
            prop_assert_eq!(recv.queue.consumer_index(), consumer);
            prop_assert_eq!(recv.queue.free_wqes(), DEPTH - (producer - consumer));
            for (list, index) in live.iter().zip(consumer..) {
                prop_assert_eq!(&parse_recv(&recv.wqe_bytes(index)).collect::<Vec<_>>(), list);
            }
        }
    }
}

#[test]
fn counts_go_past_16_bits() {
    let mut recv = Recv::new(16, 1);
    for index in 0..70_000 {
        let segment = DataSegment {
            len_bytes: 8,
            lkey: 1,
            addr: u64::from(index),
        };
        assert_eq!(recv.queue.post(&[segment]).unwrap().index, index);
        let mut program = Program::new(&recv.targets);
        recv.queue.commit(&mut program).unwrap();
        let Some(ProgramOp::StoreDword { value, .. }) = program.ops().next() else {
            panic!("{program}")
        };
        assert_eq!(u32::from_be(value), (index + 1) & 0xffff);
        assert!(parse_recv(&recv.wqe_bytes(index)).eq([segment]));
        recv.queue.release(index + 1).unwrap();
    }
}

#[test]
fn a_reset_starts_over() {
    let mut recv = Recv::new(4, 1);
    recv.queue.post(&[]).unwrap();
    let mut program = Program::new(&recv.targets);
    let commit = recv.queue.commit(&mut program).unwrap();
    recv.queue.reset();
    assert_eq!(
        (recv.queue.producer_index(), recv.queue.free_wqes()),
        (0, 4)
    );
    assert!(recv.queue.rollback(commit).is_err());
    assert_eq!(recv.queue.post(&[]).unwrap().index, 0);
}
