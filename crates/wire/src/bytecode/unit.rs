//! The unit: 24 bytes of bytecode, the same in Rust, C and CUDA.

/// Size of a unit in bytes.
pub const UNIT_BYTES: usize = 24;

/// What a unit does. `include/doorbell/detail/bytecode.h` has the same numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[repr(u8)]
pub enum Kind {
    /// One 32-bit store.
    StoreDword = 1,
    /// One 64-bit store.
    StoreQword = 2,
    /// 64-bit stores of the bytes in the units that follow.
    CopyBlock = 3,
    /// Waits until `(memory - value) as i32 >= 0`.
    PollGeq = 4,
    /// Waits until `memory & value != 0`.
    PollAnd = 5,
    /// Waits until `!(memory | value) != 0`.
    PollNor = 6,
    /// Orders what went before with what follows.
    Fence = 7,
}

impl Kind {
    /// The kind of a unit's `kind` byte.
    pub const fn from_raw(raw: u8) -> Option<Self> {
        Some(match raw {
            1 => Self::StoreDword,
            2 => Self::StoreQword,
            3 => Self::CopyBlock,
            4 => Self::PollGeq,
            5 => Self::PollAnd,
            6 => Self::PollNor,
            7 => Self::Fence,
            _ => return None,
        })
    }
}

/// One unit, as `struct dbl_unit` in `include/doorbell/detail/bytecode.h`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(C)]
pub struct Unit {
    /// A [`Kind`].
    pub kind: u8,
    /// The [`super::Role`] of the target; 0 for a fence.
    pub role: u8,
    /// Bytes stored, polled or copied: 4, 8, or the length of the block; 0 for a fence.
    pub len_bytes: u16,
    /// The target's number in its table; 0 for a fence.
    pub target: u32,
    /// The offset in the target, in bytes.
    pub offset: u64,
    /// The value stored or compared (a 32-bit one in the low half), or the bits of a fence.
    pub value: u64,
}

impl Unit {
    /// Reads a unit from its bytes.
    #[inline]
    pub fn from_bytes(bytes: &[u8; UNIT_BYTES]) -> Self {
        let word = |at: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&bytes[at..at + 8]);
            u64::from_ne_bytes(word)
        };
        let head = word(0);
        Self {
            kind: head as u8,
            role: (head >> 8) as u8,
            len_bytes: (head >> 16) as u16,
            target: (head >> 32) as u32,
            offset: word(8),
            value: word(16),
        }
    }
}

/// The bytes of a unit, built from its three words: fewer stores than field by field.
#[inline]
pub(super) fn bytes_of(head: u64, offset: u64, value: u64) -> [u8; UNIT_BYTES] {
    let mut bytes = [0; UNIT_BYTES];
    bytes[0..8].copy_from_slice(&head.to_ne_bytes());
    bytes[8..16].copy_from_slice(&offset.to_ne_bytes());
    bytes[16..24].copy_from_slice(&value.to_ne_bytes());
    bytes
}

/// The first word of a unit: kind and length, over the role and target of an address (see `TargetOffset::head`).
#[inline]
pub(super) const fn head(kind: Kind, len_bytes: u32, place: u64) -> u64 {
    kind as u64 | (len_bytes as u64) << 16 | place
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn golden_bytes() {
        let bytes = bytes_of(
            head(Kind::PollNor, 4, 3 << 8 | 0xaabb_ccdd << 32),
            0x1122,
            0x55,
        );
        assert_eq!(
            bytes,
            [
                6, 3, 4, 0, 0xdd, 0xcc, 0xbb, 0xaa, 0x22, 0x11, 0, 0, 0, 0, 0, 0, 0x55, 0, 0, 0, 0,
                0, 0, 0
            ]
        );
        let unit = Unit {
            kind: 6,
            role: 3,
            len_bytes: 4,
            target: 0xaabb_ccdd,
            offset: 0x1122,
            value: 0x55,
        };
        assert_eq!(Unit::from_bytes(&bytes), unit);
        assert_eq!(size_of::<Unit>(), UNIT_BYTES);
    }

    #[test]
    fn kind_round_trips_through_its_byte() {
        for raw in 0..=255u8 {
            if let Some(kind) = Kind::from_raw(raw) {
                assert_eq!(kind as u8, raw);
            }
        }
        assert_eq!((0..=255).filter_map(Kind::from_raw).count(), 7);
    }
}
