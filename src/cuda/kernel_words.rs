//! Programs as the words that a kernel interprets, in the layout of `include/doorbell/detail/execute.h`.

use std::ops::Range;

use cudarc::driver::sys::CUdeviceptr;

use super::decoded::{Decoded, place};
use crate::Result;
use crate::bytecode::{At, Kind, ProgramOp, UNIT_BYTES, UNIT_LIMIT, Unit};
use crate::stream::{KernelMemory, MessageTake};

/// Words that the short kernel and the long kernel take.
pub(super) const SHORT_WORDS: usize = 62;
pub(super) const LONG_WORDS: usize = 2046;

/// Words that a trigger takes: DOORBELL_TRIGGER_WORDS of the C interface.
pub(super) const TRIGGER_WORDS: usize = 60;

const UNIT_WORDS: usize = UNIT_BYTES / 8;
/// Words of `struct dbl_take`, and of one of its slices.
const TAKE_WORDS: usize = 5;
const TAKE_SLICE_WORDS: usize = 2;

const ITEM_TABLE: u64 = 1;
const ITEM_PROGRAM: u64 = 2;
const ITEM_COUNT: u64 = 3;
const ITEM_TAKE: u64 = 4;

/// The words of the next launches, one after the other.
#[derive(Debug, Default)]
pub(super) struct KernelWords {
    words: Vec<u64>,
    /// Where the words of the current launch begin.
    start: usize,
    /// The addresses in the last table of that launch.
    table: Vec<CUdeviceptr>,
}

impl KernelWords {
    /// The most words that a program takes: those with a table of its own.
    pub(super) fn words_of(program: &Decoded<'_>) -> usize {
        let mut targets = [None; UNIT_LIMIT];
        let mut count = 0;
        for at in program.ops().iter().filter_map(place) {
            let known = targets.iter().take(count);
            if known.clone().any(|known| *known == Some(at.target)) {
                continue;
            }
            if let Some(free) = targets.get_mut(count) {
                *free = Some(at.target);
                count += 1;
            }
        }
        1 + count + 2 + UNIT_WORDS * program.program.len()
    }

    /// Words of [`KernelWords::take`].
    pub(super) fn words_of_take(take: &MessageTake<'_>) -> usize {
        1 + TAKE_WORDS + TAKE_SLICE_WORDS * take.slices.len()
    }

    /// Words of a count.
    pub(super) const COUNT_WORDS: usize = 2;

    /// Words of a wait for a count.
    pub(super) const WAIT_WORDS: usize = 2 + 2 + UNIT_WORDS;

    /// Words of the current launch.
    pub(super) fn len(&self) -> usize {
        self.words.len() - self.start
    }

    /// Words of all launches.
    pub(super) fn len_of_all(&self) -> usize {
        self.words.len()
    }

    /// Where the words of the current launch begin.
    pub(super) fn start(&self) -> usize {
        self.start
    }

    /// Removes what was added since there were that many words, ends of launches included.
    pub(super) fn go_back(&mut self, words: usize, start: usize) {
        self.words.truncate(words);
        self.start = start;
        // The next program adds a table.
        self.table.clear();
    }

    /// Adds a program. `locate` gives the device's address of an op; the process ends the program's waits by `number`.
    ///
    /// # Errors
    /// Those of `locate`. Nothing was added then.
    pub(super) fn program(
        &mut self,
        program: &Decoded<'_>,
        number: u64,
        mut locate: impl FnMut(At) -> Result<CUdeviceptr>,
    ) -> Result<()> {
        // The base addresses of the ops' targets, in the order of the ops.
        let mut bases = [None; UNIT_LIMIT];
        for (op, base) in program.ops().iter().zip(&mut bases) {
            if let Some(at) = place(op) {
                *base = Some(locate(at)?.wrapping_sub(at.offset));
            }
        }
        let mut used = bases.iter().flatten();
        if !used.all(|base| self.table.contains(base)) {
            self.table.clear();
            for base in bases.iter().flatten() {
                if !self.table.contains(base) {
                    self.table.push(*base);
                }
            }
            self.put_table();
        }
        let start = self.words.len();
        self.words.extend([0, number]);
        let (units, _) = program.program.as_bytes().as_chunks::<UNIT_BYTES>();
        let mut units = units.iter();
        let prepared = program.program.ops();
        for ((op, base), prepared) in program.ops().iter().zip(&bases).zip(prepared) {
            let units_of = |op: &ProgramOp<'_>| match op {
                ProgramOp::CopyBlock { bytes, .. } => bytes.len().div_ceil(UNIT_BYTES),
                _ => 0,
            };
            let payload = units_of(op);
            if let Some(unit) = units.next() {
                let mut words = words_of(unit);
                if let (ProgramOp::StoreQword { value, .. }, ProgramOp::CopyBlock { .. }) =
                    (*op, prepared)
                {
                    // Rung without BlueFlame: one store takes the place of the block.
                    words[0] = words[0] & !0xffff_00ff | Kind::StoreQword as u64 | 8 << 16;
                    words[2] = value;
                    units.nth(units_of(&prepared) - 1);
                }
                if let Some(base) = base {
                    let target = self.table.iter().position(|known| known == base);
                    // Found: the table has all of them.
                    words[0] = with_target(words[0], target.unwrap_or_default() as u32);
                }
                self.words.extend(words);
            }
            self.words
                .extend(units.by_ref().take(payload).flat_map(words_of));
        }
        let len = (self.words.len() - start - 2) / UNIT_WORDS;
        self.words[start] = head(ITEM_PROGRAM, len);
        Ok(())
    }

    /// Has a message taken out of its slot. `locate` gives the device's address of memory.
    ///
    /// # Errors
    /// Those of `locate`. Nothing was added then.
    pub(super) fn take(
        &mut self,
        take: &MessageTake<'_>,
        locate: impl Fn(&KernelMemory<'_>) -> Result<CUdeviceptr>,
    ) -> Result<()> {
        let (wqe, index, qpn) = match &take.read {
            Some(read) => (locate(&read.wqe)?, read.index, read.qpn),
            None => (0, 0, 0),
        };
        let pair = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
        let mut words = vec![
            head(ITEM_TAKE, KernelWords::words_of_take(take) - 1),
            locate(&take.slot)?,
            locate(&take.result)?,
            wqe,
            pair(take.number, take.eager_bytes),
            pair(index, qpn),
        ];
        for (memory, len_bytes) in &take.slices {
            words.extend([locate(memory)?, u64::from(*len_bytes)]);
        }
        self.words.extend(words);
        Ok(())
    }

    /// Adds a wait until the count at `address` has reached `value`, modulo 2^32.
    pub(super) fn wait_count(&mut self, address: CUdeviceptr, value: u32, number: u64) {
        self.table.clear();
        self.table.push(address);
        self.put_table();
        let unit = Unit {
            kind: Kind::PollGeq as u8,
            len_bytes: 4,
            value: u64::from(value),
            ..Unit::default()
        };
        let first = u64::from(unit.kind) | u64::from(unit.len_bytes) << 16;
        let item = [head(ITEM_PROGRAM, 1), number, first, 0, unit.value];
        self.words.extend(item);
    }

    /// Adds a count.
    pub(super) fn count(&mut self, value: u64) {
        self.words.extend([head(ITEM_COUNT, 0), value]);
    }

    /// Ends the current launch, and returns where its words are.
    pub(super) fn end_launch(&mut self) -> Range<usize> {
        let launch = self.start..self.words.len();
        self.start = launch.end;
        // Each launch has its own tables.
        self.table.clear();
        launch
    }

    pub(super) fn words(&self, launch: Range<usize>) -> &[u64] {
        self.words.get(launch).unwrap_or_default()
    }

    pub(super) fn clear(&mut self) {
        self.words.clear();
        self.table.clear();
        self.start = 0;
    }

    fn put_table(&mut self) {
        self.words.push(head(ITEM_TABLE, self.table.len()));
        self.words.extend(&self.table);
    }
}

/// `struct dbl_item_head`.
fn head(kind: u64, count: usize) -> u64 {
    kind | (count as u64) << 8
}

/// The words of a unit.
fn words_of(unit: &[u8; UNIT_BYTES]) -> [u64; UNIT_WORDS] {
    let (words, _) = unit.as_chunks::<8>();
    std::array::from_fn(|at| words.get(at).map_or(0, |word| u64::from_ne_bytes(*word)))
}

/// The first word of a unit with another target, which is its upper half.
fn with_target(word: u64, target: u32) -> u64 {
    word & 0xffff_ffff | u64::from(target) << 32
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bytecode::{Fence, Program, Role, Targets};
    use crate::{Error, StateKind};

    /// The items of a launch: tables, programs with their numbers and units, counts.
    #[derive(Debug, PartialEq)]
    enum Item {
        Table(Vec<u64>),
        Program(u64, Vec<[u64; 3]>),
        Count(u64),
    }

    fn items(mut words: &[u64]) -> Vec<Item> {
        let mut items = Vec::new();
        while let [head, rest @ ..] = words {
            let count = (head >> 8 & 0xff) as usize;
            let (item, body) = match head & 0xff {
                1 => (Item::Table(rest[..count].to_vec()), count),
                2 => {
                    let (units, _) = rest[1..=3 * count].as_chunks::<3>();
                    (Item::Program(rest[0], units.to_vec()), 1 + 3 * count)
                }
                3 => (Item::Count(rest[0]), 1),
                other => panic!("{other}"),
            };
            items.push(item);
            words = &rest[body..];
        }
        items
    }

    #[test]
    fn a_blueflame_copy_is_a_doorbell_of_8_bytes() {
        let mut targets = Targets::new();
        let page = targets.register("page", Role::Uar, 256);
        let word = targets.register("word", Role::Memory, 64);
        let locate = |at: At| Ok(0x1000 * u64::from(at.target.index()) + at.offset);
        let mut program = Program::new(&targets);
        let block = page.block(64, 64).unwrap();
        program.copy_block(block, &[7; 64]).unwrap();
        program.store_dword(word.dword(0).unwrap(), 1).unwrap();
        let decoded = Decoded::new(&program);
        assert_eq!(decoded.memop_count, 2);
        let mut batch = KernelWords::default();
        batch.program(&decoded, 5, locate).unwrap();
        let launch = batch.end_launch();
        let found = items(batch.words(launch));
        let uar = Role::Uar as u64;
        let memory = Role::Memory as u64;
        let expected = vec![
            [2 | uar << 8 | 8 << 16, 64, 0x0707_0707_0707_0707],
            [1 | memory << 8 | 4 << 16 | 1 << 32, 0, 1],
        ];
        assert_eq!(found.last(), Some(&Item::Program(5, expected)));
    }

    #[test]
    fn programs_keep_their_units_but_for_the_places_of_their_targets() {
        let mut targets = Targets::new();
        let unused = targets.register("unused", Role::Memory, 64);
        let page = targets.register("page", Role::Memory, 64);
        let word = targets.register("word", Role::Memory, 64);
        let locate = |at: At| Ok(0x1000 * u64::from(at.target.index()) + at.offset);
        let bytes: [u8; 32] = std::array::from_fn(|at| at as u8);
        let mut program = Program::new(&targets);
        program.store_dword(word.dword(4).unwrap(), 7).unwrap();
        program.fence(Fence::WORK_BEFORE_FLAG).unwrap();
        program
            .copy_block(page.block(32, 32).unwrap(), &bytes)
            .unwrap();
        program.poll_nor(word.dword(8).unwrap(), 9).unwrap();
        let mut batch = KernelWords::default();
        batch.program(&Decoded::new(&program), 5, locate).unwrap();
        assert!(batch.len() <= KernelWords::words_of(&Decoded::new(&program)));
        batch.count(5);
        // The same targets, so the same table.
        let one = batch.len();
        batch.program(&Decoded::new(&program), 6, locate).unwrap();
        assert_eq!(batch.len() - one, 2 + 3 * program.len());
        let launch = batch.end_launch();
        let found = items(batch.words(launch.clone()));
        let units: Vec<Unit> = program.units().collect();
        let word_of = |bytes: &[u8]| u64::from_ne_bytes(bytes.try_into().unwrap());
        let named = |index: usize, target: u64| {
            let unit = units[index];
            let head = u64::from(unit.kind)
                | u64::from(unit.role) << 8
                | u64::from(unit.len_bytes) << 16
                | target << 32;
            [head, unit.offset, unit.value]
        };
        let expected = vec![
            named(0, 0),
            named(1, 0),
            named(2, 1),
            [0, 8, 16].map(|at| word_of(&bytes[at..at + 8])),
            [word_of(&bytes[24..]), 0, 0],
            named(5, 0),
        ];
        assert_eq!(
            found,
            [
                Item::Table(vec![0x2000, 0x1000]),
                Item::Program(5, expected.clone()),
                Item::Count(5),
                Item::Program(6, expected),
            ]
        );
        // Another launch knows nothing of the table before; another target takes another table.
        program.clear();
        program.store_dword(unused.dword(0).unwrap(), 1).unwrap();
        batch.program(&Decoded::new(&program), 7, locate).unwrap();
        program.clear();
        program.store_dword(word.dword(0).unwrap(), 2).unwrap();
        batch.program(&Decoded::new(&program), 8, locate).unwrap();
        batch.wait_count(0x5000, 77, 9);
        let later = batch.end_launch();
        assert_eq!(later.start, launch.end);
        let found = items(batch.words(later));
        let tables: Vec<&Item> = found
            .iter()
            .filter(|item| matches!(item, Item::Table(_)))
            .collect();
        let table = |address| Item::Table(vec![address]);
        assert_eq!(tables, [&table(0), &table(0x2000), &table(0x5000)]);
        assert_eq!(
            found.last(),
            Some(&Item::Program(9, vec![[4 | 4 << 16, 0, 77]]))
        );
    }

    #[test]
    fn what_cannot_be_located_is_not_added() {
        let mut targets = Targets::new();
        let word = targets.register("word", Role::Memory, 64);
        let mut program = Program::new(&targets);
        program.store_dword(word.dword(0).unwrap(), 1).unwrap();
        let mut batch = KernelWords::default();
        let refused = Error::state(StateKind::Unsupported, "locate", "");
        let result = batch.program(&Decoded::new(&program), 1, |_| Err(refused.clone()));
        assert_eq!(result, Err(refused));
        assert_eq!(batch.len(), 0);
    }
}
