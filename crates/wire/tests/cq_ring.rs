//! The completion ring over many laps: waits fire when the NIC writes, not before, and the CPU sees the same.

mod fixture;

use doorbell_wire::Error;
use doorbell_wire::bytecode::{Program, UNIT_LIMIT};
use doorbell_wire::mlx5::{Cqe, CqeOpcode, Syndrome};
use doorbell_wire::verbs::WcStatus;
use fixture::Completions;
use proptest::prelude::*;

/// What a NIC does, at a running index.
fn deliver(completions: &Completions, index: u32, cqe: &Cqe) {
    let cqe_count = completions.queue.cqe_count();
    let owner = index & cqe_count != 0;
    completions
        .ring
        .write((index % cqe_count) as usize * 64, &cqe.encode(owner));
}

#[test]
fn owner_bits_over_laps() {
    for cqe_count in [1, 2, 8] {
        let completions = Completions::new(cqe_count);
        for index in 0..cqe_count * 5 {
            let mut program = completions.program();
            completions.queue.peek(index, &mut program).unwrap();
            assert!(completions.queue.is_marked(index));
            assert!(
                !completions.run(&program),
                "CQE {index} of {cqe_count} is not there yet"
            );
            assert_eq!(completions.queue.cqe(index), None);
            let cqe = Cqe {
                wqe_counter: index as u16,
                qpn: 7,
                ..Cqe::default()
            };
            deliver(&completions, index, &cqe);
            assert!(completions.queue.is_marked(index));
            assert!(
                completions.run(&program),
                "CQE {index} of {cqe_count} is there"
            );
            assert!(!completions.queue.is_marked(index));
            let seen = completions.queue.cqe(index).unwrap();
            assert_eq!(
                (seen.wqe_counter, seen.qpn, seen.opcode),
                (index as u16, 7, CqeOpcode::Req)
            );
            // Not one of the next lap.
            assert_eq!(completions.queue.cqe(index.wrapping_add(cqe_count)), None);
        }
    }
}

#[test]
fn the_running_index_wraps() {
    let completions = Completions::new(4);
    // 2^32 is a multiple of two laps, so the owner bit goes on as if nothing had happened.
    let start = u32::MAX - 9;
    for step in 0..20u32 {
        let index = start.wrapping_add(step);
        if step >= 4 {
            assert_eq!(completions.queue.cqe(index), None, "{index}");
        }
        deliver(
            &completions,
            index,
            &Cqe {
                wqe_counter: step as u16,
                ..Cqe::default()
            },
        );
        assert_eq!(
            completions.queue.cqe(index).unwrap().wqe_counter,
            step as u16
        );
    }
}

#[test]
fn an_error_completes_a_wait() {
    let completions = Completions::new(4);
    for index in 0..8 {
        let mut program = completions.program();
        completions.queue.peek(index, &mut program).unwrap();
        let syndrome = Syndrome::RemoteAccess as u8;
        deliver(
            &completions,
            index,
            &Cqe {
                opcode: CqeOpcode::ReqErr,
                syndrome,
                ..Cqe::default()
            },
        );
        assert!(completions.run(&program));
        assert_eq!(
            completions.queue.cqe(index).unwrap().status(),
            WcStatus::RemAccessErr
        );
    }
}

#[test]
fn one_wait_a_place() {
    let completions = Completions::new(4);
    let mut program = completions.program();
    completions.queue.peek(1, &mut program).unwrap();
    let before = program.as_bytes().to_vec();
    for index in [1, 5] {
        let result = completions.queue.peek(index, &mut program);
        assert!(
            matches!(
                result,
                Err(Error::State {
                    operation: "peek",
                    ..
                })
            ),
            "{result:?}"
        );
        assert_eq!(program.as_bytes(), before);
        assert!(completions.queue.is_marked(1));
    }
    completions.queue.abort_peek(1);
    assert!(!completions.queue.is_marked(1));
    completions.queue.peek(1, &mut program).unwrap();
}

#[test]
fn a_failed_peek_changes_nothing() {
    let completions = Completions::new(4);
    let mut program = completions.program();
    let mark = completions.marks_target.dword(0).unwrap();
    for _ in 0..UNIT_LIMIT - 1 {
        program.store_dword(mark, 1).unwrap();
    }
    let before = program.as_bytes().to_vec();
    let result = completions.queue.peek(2, &mut program);
    assert_eq!(
        result,
        Err(Error::ProgramFull {
            limit: UNIT_LIMIT,
            needed: 1
        })
    );
    assert_eq!(program.as_bytes(), before);
    let mut foreign = Program::for_targets(completions.targets.id() + 1000);
    assert!(matches!(
        completions.queue.peek(2, &mut foreign),
        Err(Error::Foreign { .. })
    ));
    assert!(foreign.is_empty());
    assert!(!completions.queue.is_marked(2));
}

#[test]
fn the_watchdog_releases_a_wait() {
    let completions = Completions::new(4);
    for index in 0..8 {
        let mut program = completions.program();
        completions.queue.peek(index, &mut program).unwrap();
        assert!(completions.queue.release_waiter(index, Syndrome::WrFlush));
        assert!(completions.run(&program));
        let cqe = completions.queue.cqe(index).unwrap();
        assert_eq!(
            (cqe.opcode, cqe.status(), cqe.vendor_syndrome),
            (CqeOpcode::ReleasedErr, WcStatus::WrFlushErr, 0xdb)
        );
    }
    // A device may use the same code of its own.
    let theirs = Cqe {
        opcode: CqeOpcode::ReqErr,
        qpn: 0x123,
        syndrome: Syndrome::WrFlush as u8,
        vendor_syndrome: 0xdb,
        ..Cqe::default()
    };
    assert_eq!(completions.queue.next_index(8), 8);
    deliver(&completions, 8, &theirs);
    assert_eq!(completions.queue.next_index(8), 9);
    // An error of the NIC stays what it is, and a stream that stops at errors passes it.
    let failed = Cqe {
        opcode: CqeOpcode::RespErr,
        wqe_counter: 5,
        syndrome: Syndrome::RemoteAccess as u8,
        vendor_syndrome: 3,
        ..Cqe::default()
    };
    deliver(&completions, 9, &failed);
    assert!(!completions.queue.release_waiter(9, Syndrome::WrFlush));
    let released = completions.queue.cqe(9).unwrap();
    let opcode = CqeOpcode::ReleasedErr;
    let owner = released.owner;
    assert_eq!(
        released,
        Cqe {
            opcode,
            owner,
            ..failed
        }
    );
    assert!(
        opcode.raw() >> 3 == 0
            && CqeOpcode::ReqErr.raw() >> 3 == 1
            && CqeOpcode::RespErr.raw() >> 3 == 1
    );
    // What the NIC wrote stays.
    deliver(
        &completions,
        8,
        &Cqe {
            wqe_counter: 99,
            ..Cqe::default()
        },
    );
    assert!(!completions.queue.release_waiter(8, Syndrome::WrFlush));
    assert_eq!(completions.queue.cqe(8).unwrap().wqe_counter, 99);
}

/// What a stream of a GPU waits for: it does not look at the owner bit.
#[test]
fn only_a_success_clears_the_top_bit_of_a_place() {
    let completions = Completions::new(4);
    completions.queue.reset();
    let is_over = |index: u32| {
        let at = index as usize % 4 * 64 + 63;
        completions.ring.read(at, 1)[0] & 0x80 == 0
    };
    let opcodes = [
        CqeOpcode::Req,
        CqeOpcode::RespSend,
        CqeOpcode::ReqErr,
        CqeOpcode::RespSendImm,
        CqeOpcode::RespErr,
        CqeOpcode::RespWriteImm,
        CqeOpcode::Req,
    ];
    for (index, opcode) in (0..70).zip(opcodes.into_iter().cycle()) {
        assert!(!is_over(index), "{index}");
        let cqe = Cqe {
            opcode,
            ..Cqe::default()
        };
        deliver(&completions, index, &cqe);
        assert_eq!(is_over(index), !opcode.is_error(), "{index}");
        assert!(completions.queue.cqe(index).is_some());
        if opcode.is_error() {
            completions.queue.release_waiter(index, Syndrome::WrFlush);
            assert!(is_over(index));
        }
        completions.queue.retire(index);
        completions.queue.set_consumer_index(index + 1);
        assert!(completions.queue.cqe(index).is_none());
        assert!(completions.queue.cqe(index + 4).is_none());
    }
}

#[test]
fn consumer_index_and_reset() {
    let completions = Completions::new(4);
    completions.queue.set_consumer_index(0x0123_4567);
    assert_eq!(completions.record.read(0, 4), [0, 0x23, 0x45, 0x67]);
    // The word behind it, which arms the queue, is not ours.
    assert_eq!(completions.record.read(4, 4), [0xee; 4]);
    let mut program = completions.program();
    completions.queue.peek(3, &mut program).unwrap();
    deliver(&completions, 3, &Cqe::default());
    completions.queue.reset();
    assert_eq!(completions.record.read(0, 4), [0; 4]);
    assert_eq!(completions.marks.read(0, 16), [0; 16]);
    for slot in 0..4 {
        assert_eq!(completions.ring.read(slot * 64 + 63, 1), [0xf1]);
    }
    // On an odd lap the owner bit of fresh memory would fit: the opcode says no.
    for index in 0..8 {
        assert_eq!(completions.queue.cqe(index), None);
    }
}

proptest! {
    /// Waits and completions in any order that a queue allows; a model knows which CQEs are there.
    #[test]
    fn behaves_as_the_model(steps in prop::collection::vec(any::<bool>(), 1..200)) {
        let completions = Completions::new(8);
        let (mut delivered, mut waited) = (0u32, 0u32);
        let mut waiting = std::collections::VecDeque::new();
        for deliver_next in steps {
            // The NIC may be a ring ahead of what was waited for, and the waits a ring ahead of the NIC.
            if deliver_next && delivered - waited.min(delivered) < 8 {
                deliver(&completions, delivered, &Cqe { wqe_counter: delivered as u16, ..Cqe::default() });
                delivered += 1;
            } else if waited - delivered.min(waited) < 8 && waiting.len() < 8 {
                let mut program = completions.program();
                completions.queue.peek(waited, &mut program).unwrap();
                waiting.push_back((waited, program));
                waited += 1;
            }
            for (index, program) in &waiting {
                prop_assert_eq!(completions.queue.cqe(*index).is_some(), *index < delivered);
                prop_assert!(completions.queue.is_marked(*index));
                if *index >= delivered {
                    prop_assert!(!completions.run(program));
                }
            }
            while let Some((index, program)) = waiting.front() {
                if *index >= delivered {
                    break;
                }
                prop_assert!(completions.run(program));
                prop_assert!(!completions.queue.is_marked(*index));
                prop_assert_eq!(completions.queue.cqe(*index).unwrap().wqe_counter, *index as u16);
                waiting.pop_front();
            }
        }
    }
}
