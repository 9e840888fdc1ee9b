//! The send queue beside a model of it: any sequence of posts, commits, rollbacks, discards and releases, and what the NIC would
//! read from the ring at every moment.
#![allow(unsafe_code)] // Reason: the constructor of a queue is unsafe.

mod fixture;

use std::collections::VecDeque;

use doorbell_wire::Error;
use doorbell_wire::bytecode::{Program, ProgramOp, UNIT_LIMIT};
use doorbell_wire::mlx5::{
    Commit, DataSegment, Doorbell, Opcode, Posted, Segment, SendRequest, Wqe,
};
use fixture::{MAX_INLINE, MAX_SEGMENTS, QPN, Send};
use proptest::prelude::*;

#[derive(Debug, Clone)]
enum Load {
    Segments(Vec<DataSegment>),
    Inline(Vec<u8>),
}

#[derive(Debug, Clone)]
enum Op {
    Post {
        opcode: Opcode,
        flags: u8,
        imm: u32,
        remote: (u64, u32),
        load: Load,
    },
    Commit {
        blueflame: bool,
    },
    Rollback,
    Discard,
    Release {
        requests: usize,
    },
    NopOver {
        which: usize,
        signaled: bool,
    },
    Reset,
}

fn segment() -> impl Strategy<Value = DataSegment> {
    let len_bytes = prop_oneof![1 => Just(0), 6 => 1..=0x7fff_ffffu32, 1 => 0x8000_0000u32..];
    (len_bytes, any::<u32>(), any::<u64>()).prop_map(|(len_bytes, lkey, addr)| DataSegment {
        len_bytes,
        lkey,
        addr,
    })
}

fn op() -> impl Strategy<Value = Op> {
    let opcode = prop::sample::select(vec![
        Opcode::RdmaWrite,
        Opcode::RdmaWriteImm,
        Opcode::Send,
        Opcode::SendImm,
        Opcode::RdmaRead,
        Opcode::AtomicFa,
        Opcode::Nop,
    ]);
    let load = prop_oneof![
        4 => prop::collection::vec(segment(), 0..=MAX_SEGMENTS as usize + 1).prop_map(Load::Segments),
        1 => (any::<u32>(), any::<u64>())
            .prop_map(|(lkey, addr)| Load::Segments(vec![DataSegment { len_bytes: 8, lkey, addr }])),
        3 => prop::collection::vec(any::<u8>(), 0..=MAX_INLINE as usize + 8).prop_map(Load::Inline),
    ];
    prop_oneof![
        12 => (opcode, 0..8u8, any::<u32>(), any::<(u64, u32)>(), load)
            .prop_map(|(opcode, flags, imm, remote, load)| Op::Post { opcode, flags, imm, remote, load }),
        6 => any::<bool>().prop_map(|blueflame| Op::Commit { blueflame }),
        2 => Just(Op::Rollback),
        1 => Just(Op::Discard),
        4 => (0..6usize).prop_map(|requests| Op::Release { requests }),
        1 => (0..8usize, any::<bool>()).prop_map(|(which, signaled)| Op::NopOver { which, signaled }),
        1 => Just(Op::Reset),
    ]
}

/// A request that is in the ring.
#[derive(Debug, Clone)]
struct Live {
    posted: Posted,
    bytes: Vec<u8>,
}

#[derive(Default)]
struct Model {
    live: VecDeque<Live>,
    /// Of `live`, how many are committed.
    committed: usize,
    /// How many requests each live commit covers.
    commits: Vec<(Commit, usize)>,
    producer: u32,
    consumer: u32,
    parity: bool,
}

/// Whether the request is legal, and its segments.
fn segments_of(opcode: Opcode, load: &Load) -> Option<u32> {
    let head = match opcode {
        Opcode::Nop | Opcode::Send | Opcode::SendImm => 1,
        Opcode::AtomicCs | Opcode::AtomicFa => 3,
        _ => 2,
    };
    let payload = match load {
        Load::Segments(list) => {
            if list.len() > MAX_SEGMENTS as usize
                || list.iter().any(|segment| segment.len_bytes > 0x7fff_ffff)
                || opcode == Opcode::Nop && !list.is_empty()
                || head == 3 && !(list.len() == 1 && list[0].len_bytes == 8)
            {
                return None;
            }
            list.iter().filter(|segment| segment.len_bytes > 0).count() as u32
        }
        Load::Inline(bytes) => {
            if bytes.len() > MAX_INLINE as usize
                || matches!(opcode, Opcode::Nop | Opcode::RdmaRead | Opcode::AtomicFa)
            {
                return None;
            }
            if bytes.is_empty() {
                0
            } else {
                (bytes.len() as u32 + 4).div_ceil(16)
            }
        }
    };
    Some(head + payload)
}

fn post(send: &mut Send, model: &mut Model, op: &Op) {
    let Op::Post {
        opcode,
        flags,
        imm,
        remote,
        load,
    } = op
    else {
        unreachable!()
    };
    let request = match opcode {
        Opcode::RdmaWrite => SendRequest::write(remote.0, remote.1),
        Opcode::RdmaWriteImm => SendRequest::write_imm(remote.0, remote.1, *imm),
        Opcode::Send => SendRequest::send(),
        Opcode::SendImm => SendRequest::send_imm(*imm),
        Opcode::RdmaRead => SendRequest::read(remote.0, remote.1),
        Opcode::AtomicFa => SendRequest::fetch_add(remote.0, remote.1, 77),
        _ => SendRequest::nop(),
    };
    let request = request
        .signaled(flags & 1 != 0)
        .solicited(flags & 2 != 0)
        .fence(flags & 4 != 0);
    let request = match load {
        Load::Segments(list) => request.segments(list),
        Load::Inline(bytes) => request.inline(bytes),
    };
    let result = send.queue.post(&request);
    let Some(segments) = segments_of(*opcode, load) else {
        assert!(
            matches!(result, Err(Error::Range { .. } | Error::State { .. })),
            "{result:?}"
        );
        return;
    };
    let wqebbs = segments.div_ceil(4);
    if send.wqebb_count - model.producer.wrapping_sub(model.consumer) < wqebbs {
        assert_eq!(
            result,
            Err(Error::QueueFull {
                queue: "send",
                depth: send.wqebb_count
            })
        );
        return;
    }
    let posted = result.unwrap();
    assert_eq!(
        posted,
        Posted {
            index: model.producer,
            wqebbs
        }
    );
    // What the reader makes of the bytes is what was asked for.
    let bytes = send.wqe_bytes(posted.index);
    let wqe = Wqe::parse(&bytes).unwrap();
    assert_eq!(u32::from(wqe.ctrl.ds), segments);
    assert_eq!((wqe.ctrl.opcode, wqe.ctrl.qpn), (Some(*opcode), QPN));
    assert_eq!(u32::from(wqe.ctrl.index), posted.index & 0xffff);
    assert_eq!(
        (wqe.ctrl.signaled, wqe.ctrl.solicited, wqe.ctrl.fence),
        (flags & 1 != 0, flags & 2 != 0, flags & 4 != 0)
    );
    assert_eq!(wqe.ctrl.imm, if opcode.has_imm() { *imm } else { 0 });
    assert_eq!(
        wqe.remote.map(|r| (r.addr, r.rkey)),
        opcode.has_remote().then_some(*remote)
    );
    let parsed: Vec<_> = wqe.segments().collect();
    match load {
        Load::Segments(list) => {
            let expected = list
                .iter()
                .filter(|s| s.len_bytes > 0)
                .map(|s| Segment::Memory(*s));
            assert!(expected.eq(parsed));
        }
        Load::Inline(bytes) if bytes.is_empty() => assert!(parsed.is_empty()),
        Load::Inline(bytes) => assert_eq!(parsed, [Segment::Inline(bytes)]),
    }
    model.producer = posted.end();
    model.live.push_back(Live { posted, bytes });
}

fn commit(send: &mut Send, model: &mut Model, blueflame: bool) {
    let mut program = send.program();
    let result = if blueflame {
        send.queue.commit_blueflame(&mut program)
    } else {
        send.queue.commit(&mut program)
    };
    let fresh = model.live.len() - model.committed;
    if fresh == 0 {
        assert!(
            matches!(
                result,
                Err(Error::State {
                    operation: "commit",
                    ..
                })
            ),
            "{result:?}"
        );
        assert!(program.is_empty());
        return;
    }
    let commit = result.unwrap();
    assert_eq!(commit.upto(), model.producer);
    assert_eq!(commit.from(), model.live[model.committed].posted.index);
    let last = model.live.back().unwrap();
    let ops: Vec<_> = program.ops().collect();
    let ProgramOp::StoreDword { at, value } = ops[0] else {
        panic!("{program:?}")
    };
    assert_eq!((at.target, at.offset), (send.record.id(), 4));
    assert_eq!(value, (model.producer & 0xffff).to_be());
    assert!(matches!(ops[1], ProgramOp::Fence(_)));
    let uar = if model.parity { 0x900 } else { 0x800 };
    match ops[2] {
        ProgramOp::StoreQword { at, value } => {
            assert!(!blueflame || fresh > 1 || last.posted.wqebbs > 4);
            assert_eq!((at.target, at.offset), (send.uar.id(), uar));
            assert_eq!(value.to_ne_bytes(), last.bytes[..8]);
            assert_eq!(
                u32::from(Doorbell::parse(value).index),
                last.posted.index & 0xffff
            );
            assert_eq!(ops.len(), 3);
        }
        ProgramOp::CopyBlock { at, bytes } => {
            assert!(blueflame && fresh == 1);
            assert_eq!((at.target, at.offset), (send.uar.id(), uar));
            assert_eq!(bytes.len(), last.posted.wqebbs as usize * 64);
            let nop = Wqe::parse(bytes).unwrap().ctrl.opcode == Some(Opcode::Nop);
            let compared = if nop { 16 } else { last.bytes.len() };
            assert_eq!(bytes[..compared], last.bytes[..compared]);
            assert!(matches!(ops[3..], [ProgramOp::Fence(_)]));
        }
        _ => panic!("{program:?}"),
    }
    model.committed = model.live.len();
    model.commits.push((commit, fresh));
    model.parity = !model.parity;
}

fn rollback(send: &mut Send, model: &mut Model) {
    let Some((commit, requests)) = model.commits.pop() else {
        return;
    };
    let from = commit.from();
    // Released requests take their commits out of reach.
    let released = from.wrapping_sub(model.consumer) > send.wqebb_count;
    let result = send.queue.rollback(commit);
    if model.live.len() != model.committed || released {
        assert!(
            matches!(
                result,
                Err(Error::State {
                    operation: "rollback",
                    ..
                })
            ),
            "{result:?}"
        );
        // The commit is gone: those before it are out of reach now.
        model.commits.clear();
        return;
    }
    result.unwrap();
    model.live.truncate(model.committed - requests);
    model.committed = model.live.len();
    model.producer = from;
    model.parity = !model.parity;
}

fn step(send: &mut Send, model: &mut Model, op: &Op) {
    match op {
        Op::Post { .. } => post(send, model, op),
        Op::Commit { blueflame } => commit(send, model, *blueflame),
        Op::Rollback => rollback(send, model),
        Op::Discard => {
            send.queue.discard();
            model.live.truncate(model.committed);
            model.producer = model
                .live
                .back()
                .map_or(model.consumer, |live| live.posted.end());
        }
        Op::Release { requests } => {
            let requests = (*requests).min(model.committed);
            let upto = requests
                .checked_sub(1)
                .map_or(model.consumer, |last| model.live[last].posted.end());
            send.queue.release(upto).unwrap();
            model.live.drain(..requests);
            model.committed -= requests;
            model.consumer = upto;
            for wrong in [
                model.consumer.wrapping_sub(1),
                model.producer.wrapping_add(1),
            ] {
                let result = send.queue.release(wrong);
                assert!(
                    matches!(
                        result,
                        Err(Error::State {
                            operation: "release",
                            ..
                        })
                    ),
                    "{result:?}"
                );
            }
        }
        Op::NopOver { which, signaled } => {
            let Some(live) = model.live.get_mut(*which) else {
                let beyond = Posted {
                    index: model.producer,
                    wqebbs: 1,
                };
                assert!(send.queue.overwrite_with_nop(beyond, *signaled).is_err());
                return;
            };
            send.queue
                .overwrite_with_nop(live.posted, *signaled)
                .unwrap();
            let bytes = send.wqe_bytes(live.posted.index);
            let wqe = Wqe::parse(&bytes).unwrap();
            assert_eq!(
                (wqe.ctrl.opcode, wqe.ctrl.signaled),
                (Some(Opcode::Nop), *signaled)
            );
            assert_eq!(wqe.ctrl.wqebbs(), live.posted.wqebbs);
            assert_eq!(u32::from(wqe.ctrl.index), live.posted.index & 0xffff);
            live.bytes = bytes;
        }
        Op::Reset => {
            send.queue.reset();
            if let Some((commit, _)) = model.commits.pop() {
                assert!(
                    send.queue.rollback(commit).is_err(),
                    "a commit does not outlive a reset"
                );
            }
            *model = Model::default();
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn behaves_as_the_model(ops in prop::collection::vec(op(), 1..150), wqebb_count in prop::sample::select(vec![4u32, 8, 64])) {
        let mut send = Send::new(wqebb_count);
        let mut model = Model::default();
        for op in &ops {
            step(&mut send, &mut model, op);
            prop_assert_eq!(send.queue.producer_index(), model.producer);
            prop_assert_eq!(send.queue.consumer_index(), model.consumer);
            let committed = model.committed.checked_sub(1).map_or(model.consumer, |last| model.live[last].posted.end());
            prop_assert_eq!(send.queue.committed_index(), committed);
            prop_assert_eq!(send.queue.free_wqebbs(), wqebb_count - model.producer.wrapping_sub(model.consumer));
            // Nothing that the NIC may still read has changed.
            for live in &model.live {
                prop_assert_eq!(&send.wqe_bytes(live.posted.index), &live.bytes);
            }
        }
    }
}

#[test]
fn counts_go_past_16_bits() {
    let mut send = Send::new(64);
    let mut index = 0u32;
    let mut posts = 0;
    let inline = [0x5a; 120];
    while posts < 70_000 || index < 140_000 {
        // 1, 2 and 3 WQEBBs in turn.
        let request = SendRequest::write(u64::from(index), 7)
            .inline(&inline[..[8, 60, 120][posts % 3]])
            .signaled(true);
        let posted = send.queue.post(&request).unwrap();
        assert_eq!((posted.index, posted.wqebbs), (index, posts as u32 % 3 + 1));
        let mut program = send.program();
        send.queue.commit(&mut program).unwrap();
        let mut ops = program.ops();
        let (
            Some(ProgramOp::StoreDword { value: count, .. }),
            Some(ProgramOp::StoreQword {
                value: doorbell, ..
            }),
        ) = (ops.next(), ops.nth(1))
        else {
            panic!("{program}");
        };
        assert_eq!(u32::from_be(count), posted.end() & 0xffff);
        assert_eq!(u32::from(Doorbell::parse(doorbell).index), index & 0xffff);
        if posts % 997 == 0 {
            let bytes = send.wqe_bytes(index);
            assert_eq!(
                Wqe::parse(&bytes).unwrap().remote.unwrap().addr,
                u64::from(index)
            );
        }
        index = posted.end();
        // Half a ring behind.
        if index > 32 {
            send.queue.release(index - posted.wqebbs).unwrap();
        }
        posts += 1;
    }
    assert!(index > 2 * 65_536 && posts >= 70_000);
}

#[test]
fn only_the_newest_commit_rolls_back() {
    let mut send = Send::new(8);
    let mut other = Send::new(8);
    let mut program = send.program();
    let mut commit = |send: &mut Send| {
        program = send.program();
        send.queue.post(&SendRequest::nop()).unwrap();
        send.queue.commit(&mut program).unwrap()
    };
    let first = commit(&mut send);
    let second = commit(&mut send);
    let foreign = commit(&mut other);
    assert!(send.queue.rollback(foreign).is_err());
    assert!(send.queue.rollback(first).is_err());
    assert_eq!(send.queue.committed_index(), 2);
    send.queue.post(&SendRequest::nop()).unwrap();
    // Not over what was posted since; and the refusal uses the commit up.
    assert!(send.queue.rollback(second).is_err());
    assert_eq!(
        (send.queue.committed_index(), send.queue.producer_index()),
        (2, 3)
    );
    send.queue.discard();
    let third = commit(&mut send);
    let fourth = commit(&mut send);
    send.queue.rollback(fourth).unwrap();
    send.queue.rollback(third).unwrap();
    assert_eq!(
        (send.queue.committed_index(), send.queue.producer_index()),
        (2, 2)
    );
    let fifth = commit(&mut send);
    send.queue.release(3).unwrap();
    assert!(send.queue.rollback(fifth).is_err());
}

#[test]
fn a_commit_does_not_outlive_a_reset() {
    let mut send = Send::new(8);
    let mut commits = Vec::new();
    for _ in 0..3 {
        for _ in 0..2 {
            send.queue.post(&SendRequest::nop()).unwrap();
            let mut program = send.program();
            commits.push(send.queue.commit(&mut program).unwrap());
        }
        send.queue.reset();
    }
    // One of the same place as an old one: the old one is not taken for it.
    send.queue.post(&SendRequest::nop()).unwrap();
    let mut program = send.program();
    let newest = send.queue.commit(&mut program).unwrap();
    let Some(ProgramOp::StoreQword { at, .. }) = program.ops().nth(2) else {
        panic!("{program}")
    };
    assert_eq!(at.offset, 0x800, "the first UAR buffer is the first again");
    for old in commits {
        assert!(send.queue.rollback(old).is_err());
    }
    send.queue.rollback(newest).unwrap();
}

#[test]
fn a_failed_commit_changes_nothing() {
    let mut send = Send::new(8);
    let posted = send
        .queue
        .post(&SendRequest::write(1, 2).inline(&[1; 200]))
        .unwrap();
    assert_eq!(posted.wqebbs, 4);
    let mut full = send.program();
    let record = send.record.dword(0).unwrap();
    // Room for 2 units: a commit needs 3; and for 14, a BlueFlame commit of 256 bytes 15.
    for (units, blueflame) in [
        (UNIT_LIMIT - 2, false),
        (2, true),
        (UNIT_LIMIT, false),
        (UNIT_LIMIT, true),
    ] {
        full.clear();
        for _ in 0..units {
            full.store_dword(record, 1).unwrap();
        }
        let before = full.as_bytes().to_vec();
        let result = if blueflame {
            send.queue.commit_blueflame(&mut full)
        } else {
            send.queue.commit(&mut full)
        };
        assert!(
            matches!(
                result,
                Err(Error::ProgramFull {
                    limit: UNIT_LIMIT,
                    ..
                })
            ),
            "{result:?}"
        );
        assert_eq!(full.as_bytes(), before);
        assert_eq!(
            (send.queue.committed_index(), send.queue.producer_index()),
            (0, 4)
        );
    }
    let mut foreign = Program::for_targets(send.targets.id() + 1000);
    for blueflame in [false, true] {
        let result = if blueflame {
            send.queue.commit_blueflame(&mut foreign)
        } else {
            send.queue.commit(&mut foreign)
        };
        assert!(matches!(result, Err(Error::Foreign { .. })), "{result:?}");
        assert!(foreign.is_empty());
    }
    // And then it goes.
    full.clear();
    full.store_dword(record, 1).unwrap();
    send.queue.commit_blueflame(&mut full).unwrap();
    assert_eq!(full.len(), UNIT_LIMIT);
}

#[test]
fn a_nop_over_the_last_request_goes_out_by_blueflame_too() {
    let mut send = Send::new(8);
    let posted = send
        .queue
        .post(&SendRequest::write(1, 2).inline(&[1; 60]).signaled(true))
        .unwrap();
    send.queue.overwrite_with_nop(posted, false).unwrap();
    let mut program = send.program();
    send.queue.commit_blueflame(&mut program).unwrap();
    let Some(ProgramOp::CopyBlock { bytes, .. }) = program.ops().nth(2) else {
        panic!("{program}")
    };
    let wqe = Wqe::parse(bytes).unwrap();
    assert_eq!(
        (wqe.ctrl.opcode, wqe.ctrl.signaled, wqe.ctrl.wqebbs()),
        (Some(Opcode::Nop), false, 2)
    );
    assert_eq!(bytes[..16], send.memory.read(0, 16));
}

#[test]
fn bad_configurations_are_named() {
    use doorbell_wire::mlx5::{SendQueue, SendQueueConfig};
    let send = Send::new(64);
    let good = SendQueueConfig {
        ring: send.memory.base(),
        wqebb_count: 64,
        qpn: 1,
        max_segments: 4,
        max_inline_bytes: 64,
        record: send.record.dword(4).unwrap(),
        uar: [send.uar.block(0x800, 256).unwrap(); 2],
    };
    let error = |change: fn(&mut SendQueueConfig)| {
        let mut config = good.clone();
        change(&mut config);
        // SAFETY: what is wrong with it is refused before the memory is touched.
        let result = unsafe { SendQueue::new(config) };
        result.map(|_| ()).unwrap_err()
    };
    assert!(matches!(
        error(|c| c.wqebb_count = 0),
        Error::Range {
            argument: "wqebb_count",
            value: 0,
            ..
        }
    ));
    assert!(matches!(
        error(|c| c.wqebb_count = 1 << 16),
        Error::Range {
            argument: "wqebb_count",
            max: 32768,
            ..
        }
    ));
    assert!(matches!(
        error(|c| c.wqebb_count = 48),
        Error::Alignment {
            argument: "wqebb_count",
            ..
        }
    ));
    assert!(matches!(
        error(|c| c.qpn = 1 << 24),
        Error::Range {
            argument: "qpn",
            ..
        }
    ));
    assert!(matches!(
        error(|c| c.max_segments = 62),
        Error::Range {
            argument: "max_segments",
            max: 61,
            ..
        }
    ));
    assert!(matches!(
        error(|c| c.max_inline_bytes = 973),
        Error::Range {
            argument: "max_inline_bytes",
            max: 972,
            ..
        }
    ));
    assert!(matches!(
        error(|c| c.ring = std::ptr::null_mut()),
        Error::Alignment {
            argument: "ring",
            ..
        }
    ));
    assert!(matches!(
        error(|c| c.ring = c.ring.wrapping_add(32)),
        Error::Alignment {
            argument: "ring",
            align: 64,
            ..
        }
    ));
    let too_small = |c: &mut SendQueueConfig| {
        c.wqebb_count = 2;
        c.max_inline_bytes = 200;
    };
    assert!(matches!(
        error(too_small),
        Error::Range {
            argument: "wqebb_count",
            min: 4,
            ..
        }
    ));
    let mut foreign = good.clone();
    foreign.uar[1] = Send::new(4).uar.block(0x900, 256).unwrap();
    // SAFETY: as above.
    let result = unsafe { SendQueue::new(foreign) };
    assert!(matches!(
        result,
        Err(Error::Foreign {
            argument: "uar",
            ..
        })
    ));
}
