//! The reduction of numbers in memory, element by element.

use std::fmt;
use std::str::FromStr;

use half::{bf16, f16};

use crate::{Error, Result};

/// The type of an element.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DataType {
    /// IEEE 754 binary16. Each step is computed in binary32, and rounded to the nearest.
    F16,
    /// The upper half of a binary32. Each step is computed in binary32, and rounded to the nearest.
    Bf16,
    /// IEEE 754 binary32.
    F32,
    /// IEEE 754 binary64.
    F64,
    /// Signed, of 4 bytes.
    I32,
    /// Signed, of 8 bytes.
    I64,
    /// Unsigned, of 1 byte.
    U8,
}

impl DataType {
    /// All of them.
    pub const ALL: [DataType; 7] = [
        DataType::F16,
        DataType::Bf16,
        DataType::F32,
        DataType::F64,
        DataType::I32,
        DataType::I64,
        DataType::U8,
    ];

    /// Length of an element in bytes.
    pub fn bytes(self) -> u64 {
        match self {
            DataType::U8 => 1,
            DataType::F16 | DataType::Bf16 => 2,
            DataType::F32 | DataType::I32 => 4,
            DataType::F64 | DataType::I64 => 8,
        }
    }

    /// The name, as [`FromStr`] reads it.
    pub fn name(self) -> &'static str {
        match self {
            DataType::F16 => "f16",
            DataType::Bf16 => "bf16",
            DataType::F32 => "f32",
            DataType::F64 => "f64",
            DataType::I32 => "i32",
            DataType::I64 => "i64",
            DataType::U8 => "u8",
        }
    }
}

/// What two elements become.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ReduceOp {
    /// The sum. Integers wrap around.
    Sum,
    /// The smaller one. Of a number and a NaN the number.
    Min,
    /// The larger one. Of a number and a NaN the number.
    Max,
    /// The sum of all, divided by the number of ranks; of integers rounded towards zero.
    Average,
}

impl ReduceOp {
    /// All of them.
    pub const ALL: [ReduceOp; 4] = [
        ReduceOp::Sum,
        ReduceOp::Min,
        ReduceOp::Max,
        ReduceOp::Average,
    ];

    /// The name, as [`FromStr`] reads it.
    pub fn name(self) -> &'static str {
        match self {
            ReduceOp::Sum => "sum",
            ReduceOp::Min => "min",
            ReduceOp::Max => "max",
            ReduceOp::Average => "avg",
        }
    }
}

macro_rules! named {
    ($type:ty, $what:literal) => {
        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(self.name())
            }
        }

        impl FromStr for $type {
            type Err = Error;

            fn from_str(text: &str) -> Result<$type> {
                let found = <$type>::ALL.into_iter().find(|it| it.name() == text);
                found.ok_or_else(|| Error::Malformed {
                    what: $what,
                    reason: format!("`{text}` is none"),
                })
            }
        }
    };
}

named!(DataType, "the name of a type");
named!(ReduceOp, "the name of a reduction");

/// A type, and what becomes of its elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Reduction {
    /// The type of the elements.
    pub data: DataType,
    /// What two of them become.
    pub op: ReduceOp,
}

impl Reduction {
    /// A reduction of elements of that type.
    pub fn new(data: DataType, op: ReduceOp) -> Reduction {
        Reduction { data, op }
    }

    /// Reduces whole elements of two memories into the first.
    pub(super) fn apply(self, into: &mut [u8], other: &[u8]) {
        /// One loop for each type and operation, which the compiler can vectorise.
        macro_rules! each {
            ($type:ty, $call:expr) => {{
                let call = $call;
                let (into, _) = into.as_chunks_mut();
                let (other, _) = other.as_chunks();
                for (into, other) in into.iter_mut().zip(other) {
                    let (first, second) = (
                        <$type>::from_ne_bytes(*into),
                        <$type>::from_ne_bytes(*other),
                    );
                    *into = call(first, second).to_ne_bytes();
                }
            }};
        }
        macro_rules! of_integers {
            ($type:ty) => {
                match self.op {
                    ReduceOp::Sum | ReduceOp::Average => each!($type, <$type>::wrapping_add),
                    ReduceOp::Min => each!($type, <$type>::min),
                    ReduceOp::Max => each!($type, <$type>::max),
                }
            };
        }
        macro_rules! of_floats {
            ($type:ty) => {
                match self.op {
                    ReduceOp::Sum | ReduceOp::Average => each!($type, |a: $type, b: $type| a + b),
                    ReduceOp::Min => each!($type, <$type>::min),
                    ReduceOp::Max => each!($type, <$type>::max),
                }
            };
        }
        macro_rules! of_halves {
            ($type:ty) => {{
                let wide = |call: fn(f32, f32) -> f32| {
                    move |a: $type, b: $type| <$type>::from_f32(call(a.to_f32(), b.to_f32()))
                };
                match self.op {
                    ReduceOp::Sum | ReduceOp::Average => each!($type, wide(|a, b| a + b)),
                    ReduceOp::Min => each!($type, wide(f32::min)),
                    ReduceOp::Max => each!($type, wide(f32::max)),
                }
            }};
        }
        match self.data {
            DataType::F16 => of_halves!(f16),
            DataType::Bf16 => of_halves!(bf16),
            DataType::F32 => of_floats!(f32),
            DataType::F64 => of_floats!(f64),
            DataType::I32 => of_integers!(i32),
            DataType::I64 => of_integers!(i64),
            DataType::U8 => of_integers!(u8),
        }
    }

    /// Divides whole elements by a number of ranks.
    pub(super) fn divide(self, elements: &mut [u8], count: u32) {
        macro_rules! each {
            ($type:ty, $call:expr) => {{
                let call = $call;
                let (elements, _) = elements.as_chunks_mut();
                for element in elements {
                    *element = call(<$type>::from_ne_bytes(*element)).to_ne_bytes();
                }
            }};
        }
        let float = count as f32;
        match self.data {
            DataType::F16 => each!(f16, |it: f16| f16::from_f32(it.to_f32() / float)),
            DataType::Bf16 => each!(bf16, |it: bf16| bf16::from_f32(it.to_f32() / float)),
            DataType::F32 => each!(f32, |it: f32| it / float),
            DataType::F64 => each!(f64, |it: f64| it / f64::from(count)),
            // In a wider type: the count may be no number of this one.
            DataType::I32 => each!(i32, |it: i32| (i64::from(it) / i64::from(count)) as i32),
            DataType::I64 => each!(i64, |it: i64| it / i64::from(count)),
            DataType::U8 => each!(u8, |it: u8| (u32::from(it) / count) as u8),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes<const N: usize, T: Copy>(values: &[T], to: impl Fn(T) -> [u8; N]) -> Vec<u8> {
        values.iter().flat_map(|value| to(*value)).collect()
    }

    fn reduced(data: DataType, op: ReduceOp, own: &[u8], other: &[u8]) -> Vec<u8> {
        let mut into = own.to_vec();
        Reduction::new(data, op).apply(&mut into, other);
        into
    }

    #[test]
    fn integers_are_exact_and_wrap() {
        let own = [1, -5, i32::MAX, i32::MIN, 7];
        let other = [2, 3, 1, -1, 7];
        let of = |op| {
            reduced(
                DataType::I32,
                op,
                &bytes(&own, i32::to_ne_bytes),
                &bytes(&other, i32::to_ne_bytes),
            )
        };
        let expect = |values: [i32; 5]| bytes(&values, i32::to_ne_bytes);
        assert_eq!(of(ReduceOp::Sum), expect([3, -2, i32::MIN, i32::MAX, 14]));
        assert_eq!(of(ReduceOp::Min), expect([1, -5, 1, i32::MIN, 7]));
        assert_eq!(of(ReduceOp::Max), expect([2, 3, i32::MAX, -1, 7]));
        assert_eq!(
            reduced(DataType::U8, ReduceOp::Sum, &[250, 3], &[10, 4]),
            [4, 7]
        );
        let longs = [i64::MAX, -3].map(i64::to_ne_bytes).concat();
        let ones = [1_i64, 1].map(i64::to_ne_bytes).concat();
        let sum = [i64::MIN, -2].map(i64::to_ne_bytes).concat();
        assert_eq!(reduced(DataType::I64, ReduceOp::Sum, &longs, &ones), sum);
    }

    #[test]
    fn floats_are_rounded_to_their_type() {
        let own = [1.5_f32, f32::NAN, -0.5, f32::MAX];
        let other = [2.25, 4.0, 0.5, f32::MAX];
        let of = |op| {
            let into = reduced(
                DataType::F32,
                op,
                &bytes(&own, f32::to_ne_bytes),
                &bytes(&other, f32::to_ne_bytes),
            );
            let (chunks, _) = into.as_chunks();
            chunks
                .iter()
                .map(|it| f32::from_ne_bytes(*it))
                .collect::<Vec<_>>()
        };
        assert_eq!(of(ReduceOp::Min)[..3], [1.5, 4.0, -0.5]);
        assert_eq!(of(ReduceOp::Max)[..3], [2.25, 4.0, 0.5]);
        let sum = of(ReduceOp::Sum);
        assert!(sum[0] == 3.75 && sum[1].is_nan() && sum[2] == 0.0 && sum[3] == f32::INFINITY);
        // 2048 is where the step of a binary16 becomes 2: the half way to 2049 goes to the even number.
        let [big, one] = [2048.0, 1.0].map(|it| f16::from_f32(it).to_ne_bytes());
        let sum = reduced(DataType::F16, ReduceOp::Sum, &big, &one);
        assert_eq!(sum, big);
        let [big, one] = [256.0, 1.0].map(|it| bf16::from_f32(it).to_ne_bytes());
        assert_eq!(reduced(DataType::Bf16, ReduceOp::Sum, &big, &one), big);
        let [a, b, c] = [1.5, 2.5, 4.0].map(|it: f64| it.to_ne_bytes());
        assert_eq!(reduced(DataType::F64, ReduceOp::Sum, &a, &b), c);
    }

    #[test]
    fn averages_divide_at_the_end() {
        let divided = |data, mut elements: Vec<u8>, count| {
            Reduction::new(data, ReduceOp::Average).divide(&mut elements, count);
            elements
        };
        assert_eq!(divided(DataType::U8, vec![7, 255], 300), [0, 0]);
        let ints = bytes(&[-7_i32, 7], i32::to_ne_bytes);
        assert_eq!(
            divided(DataType::I32, ints, 2),
            bytes(&[-3_i32, 3], i32::to_ne_bytes)
        );
        let longs = bytes(&[-7_i64, i64::MAX], i64::to_ne_bytes);
        let third = bytes(&[-2_i64, i64::MAX / 3], i64::to_ne_bytes);
        assert_eq!(divided(DataType::I64, longs, 3), third);
        let floats = bytes(&[3.0_f32], f32::to_ne_bytes);
        assert_eq!(
            divided(DataType::F32, floats, 4),
            bytes(&[0.75_f32], f32::to_ne_bytes)
        );
        let halves = f16::from_f32(3.0).to_ne_bytes().to_vec();
        assert_eq!(
            divided(DataType::F16, halves, 4),
            f16::from_f32(0.75).to_ne_bytes()
        );
    }

    #[test]
    fn names_are_read_back() {
        for data in DataType::ALL {
            assert_eq!(data.to_string().parse(), Ok(data));
        }
        for op in ReduceOp::ALL {
            assert_eq!(op.to_string().parse(), Ok(op));
        }
        assert!("f8".parse::<DataType>().is_err() && "prod".parse::<ReduceOp>().is_err());
    }
}
