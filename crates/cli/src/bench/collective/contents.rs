//! What the buffers hold, and what an operation must make of it. Results follow from a formula and from no computation like the library's.

use doorbell::{DataType, ReduceOp};
use half::{bf16, f16};

use super::options::{CollectiveOp, CollectivePlan};

/// The contents of the buffers of one rank.
#[derive(Clone, Copy, Debug)]
pub struct Contents {
    op: CollectiveOp,
    data: DataType,
    reduce: ReduceOp,
    root: u32,
    rank: u32,
    count: u32,
}

/// Lengths in bytes of a rank's buffers and blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BufferLens {
    /// Of the longest buffer.
    pub whole: u64,
    /// Of the block of each rank.
    pub blocks: Vec<u64>,
    /// Of this rank's input; 0 if the rank has no input.
    pub input: u64,
    /// Of this rank's output; 0 if the rank has no output.
    pub output: u64,
}

impl Contents {
    /// Those of that rank.
    pub fn new(plan: &CollectivePlan, rank: u32, count: u32) -> Contents {
        Contents {
            op: plan.op,
            data: plan.data,
            reduce: plan.reduce,
            root: plan.root,
            rank,
            count,
        }
    }

    /// Lengths for a longest buffer of so many bytes, rounded up to whole elements; in an all-to-all to as many for each rank.
    pub fn lens(&self, size_bytes: u64) -> BufferLens {
        let (element, count) = (self.data.bytes(), u64::from(self.count));
        let mut elements = size_bytes.div_ceil(element);
        if self.op == CollectiveOp::AllToAll {
            elements = elements.next_multiple_of(count);
        }
        let whole = elements * element;
        let block = |rank: u64| (elements / count + u64::from(rank < elements % count)) * element;
        let blocks: Vec<u64> = (0..count).map(block).collect();
        let own = blocks[self.rank as usize];
        let at_root = if self.rank == self.root { whole } else { 0 };
        let (input, output) = match self.op {
            CollectiveOp::Barrier => (0, 0),
            CollectiveOp::Broadcast => (0, whole),
            CollectiveOp::Gather => (own, at_root),
            CollectiveOp::Scatter => (at_root, own),
            CollectiveOp::AllGather => (own, whole),
            CollectiveOp::AllToAll | CollectiveOp::AllReduce => (whole, whole),
            CollectiveOp::Reduce => (whole, at_root),
            CollectiveOp::ReduceScatter => (whole, own),
        };
        BufferLens {
            whole,
            blocks,
            input,
            output,
        }
    }

    /// The input of a rank from the element `first` on: small numbers that differ between the ranks. At each index the ranks have v to v + n - 1 in some order.
    fn element(&self, rank: u32, index: u64) -> i64 {
        (index % 4 + (index + u64::from(rank)) % u64::from(self.count)) as i64
    }

    /// The reduction of that element of all ranks.
    fn reduced(&self, index: u64) -> f64 {
        let (least, count) = ((index % 4) as i64, i64::from(self.count));
        let sum = least * count + count * (count - 1) / 2;
        let is_float = matches!(
            self.data,
            DataType::F16 | DataType::Bf16 | DataType::F32 | DataType::F64
        );
        match self.reduce {
            ReduceOp::Min => least as f64,
            ReduceOp::Max => (least + count - 1) as f64,
            ReduceOp::Average if is_float => sum as f64 / count as f64,
            // A sum of bytes wraps before it is divided.
            ReduceOp::Average if self.data == DataType::U8 => ((sum & 0xff) / count) as f64,
            ReduceOp::Average => (sum / count) as f64,
            _ => sum as f64,
        }
    }

    /// What this rank gives: the bytes of its input, or in place those of its output before the operation.
    pub fn given(&self, lens: &BufferLens, in_place: bool) -> Vec<u8> {
        let element = self.data.bytes();
        let starts_at = match self.op {
            // In place the input is this rank's block of the output.
            CollectiveOp::AllGather if in_place => self.start(lens) / element,
            _ => 0,
        };
        let elements = |bytes: u64| bytes / element;
        let mut bytes = Vec::new();
        let len = match (self.op, in_place) {
            (CollectiveOp::Broadcast, _) => lens.output,
            (CollectiveOp::AllGather, true) => lens.output,
            _ => lens.input,
        };
        for index in 0..elements(len) {
            let is_other = match self.op {
                CollectiveOp::Broadcast => self.rank != self.root,
                CollectiveOp::AllGather if in_place => {
                    let own = elements(lens.blocks[self.rank as usize]);
                    !(starts_at..starts_at + own).contains(&index)
                }
                _ => false,
            };
            match is_other {
                true => self.put(NOT_THERE, &mut bytes),
                false => {
                    let value = self.element(self.rank, index - starts_at.min(index));
                    self.put(value as f64, &mut bytes);
                }
            }
        }
        bytes
    }

    /// What its output must be.
    pub fn expected(&self, lens: &BufferLens) -> Vec<u8> {
        let element = self.data.bytes();
        let (count, start) = (u64::from(self.count), self.start(lens) / element);
        let mut bytes = Vec::new();
        // The rank whose block has that element of the whole, and where in the block it is.
        let owner = |index: u64| {
            let mut left = index;
            for (rank, block) in (0..).zip(&lens.blocks) {
                match block / element {
                    len if left < len => return (rank, left),
                    len => left -= len,
                }
            }
            (0, 0)
        };
        for index in 0..lens.output / element {
            let value = match self.op {
                CollectiveOp::Barrier => 0.0,
                CollectiveOp::Broadcast => self.element(self.root, index) as f64,
                CollectiveOp::Gather | CollectiveOp::AllGather => {
                    let (rank, at) = owner(index);
                    self.element(rank, at) as f64
                }
                CollectiveOp::Scatter => self.element(self.root, start + index) as f64,
                CollectiveOp::AllToAll => {
                    let block = lens.whole / element / count;
                    let (from, at) = ((index / block) as u32, index % block);
                    self.element(from, start + at) as f64
                }
                CollectiveOp::Reduce | CollectiveOp::AllReduce => self.reduced(index),
                CollectiveOp::ReduceScatter => self.reduced(start + index),
            };
            self.put(value, &mut bytes);
        }
        bytes
    }

    /// How many elements of two buffers differ.
    pub fn differing(&self, found: &[u8], expected: &[u8]) -> u64 {
        let element = self.data.bytes() as usize;
        let pairs = found.chunks(element).zip(expected.chunks(element));
        let differing = pairs.filter(|(found, expected)| found != expected).count();
        (differing + found.len().abs_diff(expected.len()) / element) as u64
    }

    /// Where this rank's block begins, in bytes.
    fn start(&self, lens: &BufferLens) -> u64 {
        lens.blocks[..self.rank as usize].iter().sum()
    }

    fn put(&self, value: f64, bytes: &mut Vec<u8>) {
        match self.data {
            DataType::F16 => bytes.extend(f16::from_f64(value).to_ne_bytes()),
            DataType::Bf16 => bytes.extend(bf16::from_f64(value).to_ne_bytes()),
            DataType::F32 => bytes.extend((value as f32).to_ne_bytes()),
            DataType::F64 => bytes.extend(value.to_ne_bytes()),
            DataType::I32 => bytes.extend((value as i32).to_ne_bytes()),
            DataType::I64 => bytes.extend((value as i64).to_ne_bytes()),
            // Sums wrap around.
            _ => bytes.push(value as u64 as u8),
        }
    }
}

/// In elements that an operation must overwrite with those of a rank, which are at most 66.
const NOT_THERE: f64 = 119.0;

#[cfg(test)]
mod tests {
    use super::super::options::tests::plan;
    use super::*;

    /// Operations by hand, on what the ranks give.
    #[test]
    fn results_follow_from_what_is_given() {
        for (op, data, reduce) in [
            ("all-reduce", "i32", "sum"),
            ("all-reduce", "i32", "min"),
            ("all-reduce", "i32", "max"),
            ("all-reduce", "i32", "avg"),
            ("reduce", "i64", "sum"),
            ("reduce-scatter", "i32", "sum"),
            ("all-gather", "i32", "sum"),
            ("gather", "i32", "sum"),
            ("scatter", "i32", "sum"),
            ("broadcast", "i32", "sum"),
            ("all-to-all", "i32", "sum"),
        ] {
            for count in 1..=5_u32 {
                let root = count - 1;
                let line = format!(
                    "--op {op} --type {data} --reduce {reduce} --root {root} --ranks {count}"
                );
                let plan = plan(&line).unwrap();
                let of = |rank| Contents::new(&plan, rank, count);
                for size in [4, 36, 100] {
                    let lens: Vec<BufferLens> =
                        (0..count).map(|rank| of(rank).lens(size)).collect();
                    let width = plan.data.bytes() as usize;
                    let values = |bytes: Vec<u8>| -> Vec<i64> {
                        let chunks = bytes.chunks(width);
                        chunks
                            .map(|chunk| {
                                let mut word = [0; 8];
                                word[..width].copy_from_slice(chunk);
                                i64::from_ne_bytes(word)
                            })
                            .collect()
                    };
                    let inputs: Vec<Vec<i64>> = (0..count)
                        .map(|rank| values(of(rank).given(&lens[rank as usize], false)))
                        .collect();
                    let reduced = |index: usize| {
                        let column = inputs.iter().map(|input| input[index]);
                        match reduce {
                            "min" => column.min().unwrap(),
                            "max" => column.max().unwrap(),
                            "avg" => column.sum::<i64>() / i64::from(count),
                            _ => column.sum(),
                        }
                    };
                    let blocks: Vec<usize> = lens[0]
                        .blocks
                        .iter()
                        .map(|bytes| *bytes as usize / width)
                        .collect();
                    let whole: usize = blocks.iter().sum();
                    for rank in 0..count as usize {
                        let start: usize = blocks[..rank].iter().sum();
                        let own = start..start + blocks[rank];
                        let at_root = rank == root as usize;
                        let by_hand: Vec<i64> = match op {
                            "all-reduce" => (0..whole).map(reduced).collect(),
                            "reduce" if at_root => (0..whole).map(reduced).collect(),
                            "reduce-scatter" => own.map(reduced).collect(),
                            "all-gather" => inputs.concat(),
                            "gather" if at_root => inputs.concat(),
                            "scatter" => inputs[root as usize][own].to_vec(),
                            "broadcast" => inputs[root as usize].clone(),
                            "all-to-all" => {
                                let of_input = |input: &Vec<i64>| input[own.clone()].to_vec();
                                inputs.iter().flat_map(of_input).collect()
                            }
                            _ => Vec::new(),
                        };
                        let expected = values(of(rank as u32).expected(&lens[rank]));
                        assert_eq!(expected, by_hand, "{line}, {size} bytes, rank {rank}");
                    }
                }
            }
        }
    }

    #[test]
    fn in_place_only_the_own_block_is_there() {
        let plan = plan("--op all-gather --type u8 --ranks 3 --in-place").unwrap();
        let contents = Contents::new(&plan, 1, 3);
        let lens = contents.lens(7);
        assert_eq!(lens.blocks, [3, 2, 2]);
        let (given, expected) = (contents.given(&lens, true), contents.expected(&lens));
        let other = NOT_THERE as u8;
        assert_eq!(given[3..5], expected[3..5]);
        assert_eq!(given[..3], [other; 3]);
        assert_eq!(given[5..], [other; 2]);
        assert_eq!(contents.differing(&given, &expected), 5);
        assert_eq!(contents.differing(&expected, &expected), 0);
    }

    #[test]
    fn values_have_their_bytes() {
        let one = |data: &str| {
            let plan = plan(&format!("--type {data}")).unwrap();
            let mut bytes = Vec::new();
            Contents::new(&plan, 0, 4).put(1.5, &mut bytes);
            bytes
        };
        assert_eq!(one("f16"), 0x3e00_u16.to_ne_bytes());
        assert_eq!(one("bf16"), 0x3fc0_u16.to_ne_bytes());
        assert_eq!(one("f32"), 1.5_f32.to_ne_bytes());
        assert_eq!(one("f64"), 1.5_f64.to_ne_bytes());
        assert_eq!(one("i64"), 1_i64.to_ne_bytes());
        assert_eq!(one("u8"), [1]);
    }
}
