//! The program builder beside a list.

use doorbell_wire::Error;
use doorbell_wire::bytecode::{Fence, Kind, Program, ProgramOp, Role, Target, Targets, UNIT_LIMIT};
use proptest::prelude::*;

#[derive(Debug, Clone, PartialEq)]
enum Op {
    StoreDword(u64, u32),
    StoreQword(u64, u64),
    Copy(u64, Vec<u8>),
    Poll(u8, u64, u32),
    Fence(u32),
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        (0..64u64, any::<u32>()).prop_map(|(at, value)| Op::StoreDword(at * 4, value)),
        (0..32u64, any::<u64>()).prop_map(|(at, value)| Op::StoreQword(at * 8, value)),
        (0..4u64, 1..=12usize, any::<u8>()).prop_map(|(at, words, seed)| Op::Copy(
            at * 8,
            (0..words * 8).map(|i| seed.wrapping_add(i as u8)).collect()
        )),
        (4..=6u8, 0..64u64, any::<u32>()).prop_map(|(kind, at, value)| Op::Poll(
            kind,
            at * 4,
            value
        )),
        any::<u32>().prop_map(|bits| Op::Fence(Fence::from_bits_truncate(bits).bits())),
    ]
}

fn build(program: &mut Program, target: &Target, op: &Op) -> doorbell_wire::Result<()> {
    match op {
        Op::StoreDword(at, value) => program.store_dword(target.dword(*at)?, *value),
        Op::StoreQword(at, value) => program.store_qword(target.qword(*at)?, *value),
        Op::Copy(at, bytes) => program.copy_block(target.block(*at, bytes.len() as u32)?, bytes),
        Op::Poll(4, at, value) => program.poll_geq(target.dword(*at)?, *value),
        Op::Poll(5, at, value) => program.poll_and(target.dword(*at)?, *value),
        Op::Poll(_, at, value) => program.poll_nor(target.dword(*at)?, *value),
        Op::Fence(bits) => program.fence(Fence::from_bits_truncate(*bits)),
    }
}

fn read(program: &Program) -> Vec<Op> {
    program
        .ops()
        .map(|op| match op {
            ProgramOp::StoreDword { at, value } => Op::StoreDword(at.offset, value),
            ProgramOp::StoreQword { at, value } => Op::StoreQword(at.offset, value),
            ProgramOp::CopyBlock { at, bytes } => Op::Copy(at.offset, bytes.to_vec()),
            ProgramOp::PollGeq { at, value } => Op::Poll(4, at.offset, value),
            ProgramOp::PollAnd { at, value } => Op::Poll(5, at.offset, value),
            ProgramOp::PollNor { at, value } => Op::Poll(6, at.offset, value),
            ProgramOp::Fence(fence) => Op::Fence(fence.bits()),
        })
        .collect()
}

fn units(op: &Op) -> usize {
    if let Op::Copy(_, bytes) = op {
        1 + bytes.len().div_ceil(24)
    } else {
        1
    }
}

proptest! {
    #[test]
    fn program_behaves_as_a_list(ops in prop::collection::vec(op(), 0..24), split in 0..24usize) {
        let mut targets = Targets::new();
        let target = targets.register("page", Role::Memory, 256);
        let mut whole = Program::new(&targets);
        let mut list = Vec::new();
        let mut used = 0;
        for op in &ops {
            let before = whole.as_bytes().to_vec();
            let result = build(&mut whole, &target, op);
            if used + units(op) <= UNIT_LIMIT {
                prop_assert_eq!(result, Ok(()));
                used += units(op);
                list.push(op.clone());
            } else {
                let needed = used + units(op) - UNIT_LIMIT;
                prop_assert_eq!(result, Err(Error::ProgramFull { limit: UNIT_LIMIT, needed }));
                prop_assert_eq!(whole.as_bytes(), before);
            }
            prop_assert_eq!(whole.len(), used);
            prop_assert_eq!(whole.units().len(), used);
        }
        prop_assert_eq!(&read(&whole), &list);
        prop_assert_eq!(whole.to_string().lines().count(), list.len());
        // In two parts it is the same, bytes and all.
        let split = split.min(list.len());
        let mut parts = [Program::new(&targets), Program::new(&targets)];
        for (at, op) in list.iter().enumerate() {
            build(&mut parts[usize::from(at >= split)], &target, op).unwrap();
        }
        let [mut first, second] = parts;
        first.append(&second).unwrap();
        prop_assert_eq!(first.as_bytes(), whole.as_bytes());
        // And again there is no room for more than is left.
        let before = first.as_bytes().to_vec();
        prop_assert_eq!(first.append(&whole).is_ok(), 2 * used <= UNIT_LIMIT);
        if 2 * used > UNIT_LIMIT {
            prop_assert_eq!(first.as_bytes(), before);
        }
        first.clear();
        prop_assert!(first.is_empty() && first.ops().next().is_none());
    }
}

#[test]
fn addresses_of_another_table_are_refused() {
    let mut targets = Targets::new();
    targets.register("ours", Role::Memory, 64);
    let mut others = Targets::new();
    let foreign = others.register("theirs", Role::Memory, 64);
    let mut program = Program::new(&targets);
    let expected = Error::Foreign {
        argument: "at",
        found: format!("target table {}", others.id()),
        expected: format!("target table {}", targets.id()),
    };
    let (dword, qword) = (foreign.dword(0).unwrap(), foreign.qword(0).unwrap());
    assert_eq!(program.store_dword(dword, 0), Err(expected.clone()));
    assert_eq!(program.store_qword(qword, 0), Err(expected.clone()));
    assert_eq!(program.poll_geq(dword, 0), Err(expected.clone()));
    assert_eq!(program.poll_and(dword, 0), Err(expected.clone()));
    assert_eq!(program.poll_nor(dword, 0), Err(expected.clone()));
    assert_eq!(
        program.copy_block(foreign.block(0, 8).unwrap(), &[0; 8]),
        Err(expected.clone())
    );
    assert_eq!(program.append(&Program::new(&others)), Err(expected));
    assert!(program.is_empty());
}

#[test]
fn a_block_is_as_long_as_its_bytes() {
    let mut targets = Targets::new();
    let page = targets.register("page", Role::Uar, 512);
    let block = page.block(256, 64).unwrap();
    let mut program = Program::new(&targets);
    assert_eq!(
        program.copy_block(block, &[0; 56]),
        Err(Error::Range {
            argument: "bytes.len()",
            value: 56,
            min: 64,
            max: 64
        })
    );
    assert!(program.is_empty());
    program
        .copy_block(block.prefix(56).unwrap(), &[0; 56])
        .unwrap();
    assert!(matches!(
        block.prefix(72),
        Err(Error::Range { max: 64, .. })
    ));
    assert!(matches!(block.prefix(4), Err(Error::Range { .. })));
    assert!(matches!(block.prefix(12), Err(Error::Alignment { .. })));
    let unit = program.units().next().unwrap();
    assert_eq!(
        (unit.kind, unit.len_bytes, unit.offset),
        (Kind::CopyBlock as u8, 56, 256)
    );
}
