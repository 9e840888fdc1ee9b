//! Programs as executors and printers read them: op by op, or unit by unit.

use super::unit::UNIT_BYTES;
use super::{Fence, Kind, Role, TargetId, Unit};

/// Where an op acts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct At {
    /// The target.
    pub target: TargetId,
    /// What the target is for.
    pub role: Role,
    /// The offset in the target, in bytes: aligned and in bounds, because the address was checked when it was made.
    pub offset: u64,
}

/// One op of a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProgramOp<'a> {
    /// One 32-bit store.
    StoreDword {
        /// Where to.
        at: At,
        /// What a native load gives afterwards.
        value: u32,
    },
    /// One 64-bit store.
    StoreQword {
        /// Where to.
        at: At,
        /// What a native load gives afterwards.
        value: u64,
    },
    /// 64-bit stores in ascending order.
    CopyBlock {
        /// Where to.
        at: At,
        /// The bytes; their number is a multiple of 8.
        bytes: &'a [u8],
    },
    /// Waits until `(memory - value) as i32 >= 0`.
    PollGeq {
        /// The word.
        at: At,
        /// What it is compared with.
        value: u32,
    },
    /// Waits until `memory & value != 0`.
    PollAnd {
        /// The word.
        at: At,
        /// The mask.
        value: u32,
    },
    /// Waits until `!(memory | value) != 0`.
    PollNor {
        /// The word.
        at: At,
        /// The bits that do not count.
        value: u32,
    },
    /// Orders what went before with what follows.
    Fence(Fence),
}

/// The units of a program, decoded. See [`Program::units`](super::Program::units).
#[derive(Clone)]
pub struct Units<'a>(pub(super) std::slice::Iter<'a, [u8; UNIT_BYTES]>);

impl Iterator for Units<'_> {
    type Item = Unit;

    fn next(&mut self) -> Option<Unit> {
        self.0.next().map(Unit::from_bytes)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.0.size_hint()
    }
}

impl ExactSizeIterator for Units<'_> {}

/// The ops of a program. See [`Program::ops`](super::Program::ops).
#[derive(Clone)]
pub struct Ops<'a> {
    pub(super) rest: &'a [[u8; UNIT_BYTES]],
}

impl<'a> Iterator for Ops<'a> {
    type Item = ProgramOp<'a>;

    #[inline]
    fn next(&mut self) -> Option<ProgramOp<'a>> {
        let (first, mut rest) = self.rest.split_first()?;
        let unit = Unit::from_bytes(first);
        let kind = Kind::from_raw(unit.kind)?;
        let op = if kind == Kind::Fence {
            ProgramOp::Fence(Fence::from_bits_truncate(unit.value as u32))
        } else {
            let at = At {
                target: TargetId::from_raw(unit.target),
                role: Role::from_raw(unit.role)?,
                offset: unit.offset,
            };
            match kind {
                Kind::StoreDword => ProgramOp::StoreDword {
                    at,
                    value: unit.value as u32,
                },
                Kind::StoreQword => ProgramOp::StoreQword {
                    at,
                    value: unit.value,
                },
                Kind::CopyBlock => {
                    let len_bytes = usize::from(unit.len_bytes);
                    let (payload, behind) =
                        rest.split_at_checked(len_bytes.div_ceil(UNIT_BYTES))?;
                    rest = behind;
                    ProgramOp::CopyBlock {
                        at,
                        bytes: payload.as_flattened().get(..len_bytes)?,
                    }
                }
                Kind::PollGeq => ProgramOp::PollGeq {
                    at,
                    value: unit.value as u32,
                },
                Kind::PollAnd => ProgramOp::PollAnd {
                    at,
                    value: unit.value as u32,
                },
                Kind::PollNor => ProgramOp::PollNor {
                    at,
                    value: unit.value as u32,
                },
                Kind::Fence => return None,
            }
        };
        self.rest = rest;
        Some(op)
    }
}
