//! Targets: memory that programs may touch, and checked addresses in it.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::{Error, Result};

/// The longest block that one COPY_BLOCK moves: one BlueFlame buffer.
pub const BLOCK_BYTES_MAX: u32 = 256;

/// A target's number in its table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(transparent)]
pub struct TargetId(u32);

impl TargetId {
    /// The position in the table, 0 for the first registered.
    #[inline]
    pub const fn index(self) -> u32 {
        self.0
    }

    #[inline]
    pub(super) const fn from_raw(raw: u32) -> Self {
        Self(raw)
    }
}

/// What a target is for. The executor does not care; the disassembler does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[repr(u8)]
pub enum Role {
    /// Doorbell records: pairs of big-endian words, receive then send.
    DoorbellRecord = 1,
    /// The doorbell register page of the NIC.
    Uar = 2,
    /// A completion queue's ring of 64-byte CQEs.
    Completions = 3,
    /// Busy marks, one 32-bit word a CQE.
    Marks = 4,
    /// Anything else: words that the application waits for or writes.
    Memory = 5,
}

impl Role {
    /// The role of a unit's `role` byte.
    pub const fn from_raw(raw: u8) -> Option<Self> {
        Some(match raw {
            1 => Self::DoorbellRecord,
            2 => Self::Uar,
            3 => Self::Completions,
            4 => Self::Marks,
            5 => Self::Memory,
            _ => return None,
        })
    }

    /// A short name, for output.
    pub const fn name(self) -> &'static str {
        match self {
            Self::DoorbellRecord => "doorbell record",
            Self::Uar => "UAR",
            Self::Completions => "completions",
            Self::Marks => "marks",
            Self::Memory => "memory",
        }
    }
}

/// The part of an address that every kind has: where it is, packed as a unit's first two words want it.
///
/// `head` holds the role in bits 8..16 and the target in bits 32..64, as in a [`super::Unit`]; the rest is zero, so that building
/// a unit is one OR.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct TargetOffset {
    pub(super) targets: u64,
    pub(super) head: u64,
    pub(super) offset: u64,
}

/// The checked address of an aligned 32-bit word.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Dword(pub(super) TargetOffset);

/// The checked address of an aligned 64-bit word.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Qword(pub(super) TargetOffset);

/// The checked address of a run of aligned 64-bit words, at most [`BLOCK_BYTES_MAX`] bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Block {
    pub(super) place: TargetOffset,
    pub(super) len_bytes: u32,
}

macro_rules! place_accessors {
    ($type:ty, $($place:tt)+) => {
        impl $type {
            /// The id of the table that this address belongs to.
            #[inline]
            pub const fn targets_id(&self) -> u64 {
                self.$($place)+.targets
            }

            /// The target.
            #[inline]
            pub const fn target(&self) -> TargetId {
                TargetId((self.$($place)+.head >> 32) as u32)
            }

            /// The offset in the target, in bytes.
            #[inline]
            pub const fn offset(&self) -> u64 {
                self.$($place)+.offset
            }
        }
    };
}

place_accessors!(Dword, 0);
place_accessors!(Qword, 0);
place_accessors!(Block, place);

impl Block {
    /// The length in bytes, a multiple of 8.
    #[inline]
    pub const fn len_bytes(&self) -> u32 {
        self.len_bytes
    }

    /// The first `len_bytes` bytes of the block.
    ///
    /// # Errors
    /// [`Error::Range`] if that is nothing or more than the block has, [`Error::Alignment`] if it is no multiple of 8.
    pub fn prefix(&self, len_bytes: u32) -> Result<Self> {
        check_block_len(len_bytes, self.len_bytes)?;
        Ok(Self { len_bytes, ..*self })
    }

    /// The first 64-bit word of the block: where a doorbell goes when the block is a BlueFlame buffer.
    #[inline]
    pub const fn first(&self) -> Qword {
        Qword(self.place)
    }
}

/// One registered piece of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Target {
    id: TargetId,
    role: Role,
    len_bytes: u64,
    targets: u64,
}

impl Target {
    /// Its number in its table.
    #[inline]
    pub const fn id(&self) -> TargetId {
        self.id
    }

    /// What it is for.
    #[inline]
    pub const fn role(&self) -> Role {
        self.role
    }

    /// Its length in bytes.
    #[inline]
    pub const fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    /// The id of its table.
    #[inline]
    pub const fn targets_id(&self) -> u64 {
        self.targets
    }

    /// The address of the 32-bit word at `offset` bytes.
    ///
    /// # Errors
    /// [`Error::Alignment`] if `offset` is no multiple of 4, [`Error::OutOfBounds`] if the word leaves the target.
    #[inline]
    pub fn dword(&self, offset: u64) -> Result<Dword> {
        self.place(offset, 4, 4).map(Dword)
    }

    /// The address of the 64-bit word at `offset` bytes.
    ///
    /// # Errors
    /// [`Error::Alignment`] if `offset` is no multiple of 8, [`Error::OutOfBounds`] if the word leaves the target.
    #[inline]
    pub fn qword(&self, offset: u64) -> Result<Qword> {
        self.place(offset, 8, 8).map(Qword)
    }

    /// The address of the `len_bytes` bytes at `offset`.
    ///
    /// # Errors
    /// [`Error::Range`] if `len_bytes` is not 8 to 256, [`Error::Alignment`] if one of the two is no multiple of 8,
    /// [`Error::OutOfBounds`] if the block leaves the target.
    pub fn block(&self, offset: u64, len_bytes: u32) -> Result<Block> {
        if !(8..=BLOCK_BYTES_MAX).contains(&len_bytes) {
            return Err(Error::Range {
                argument: "len_bytes",
                value: u64::from(len_bytes),
                min: 8,
                max: u64::from(BLOCK_BYTES_MAX),
            });
        }
        if !len_bytes.is_multiple_of(8) {
            return Err(Error::Alignment {
                argument: "len_bytes",
                value: u64::from(len_bytes),
                align: 8,
            });
        }
        let place = self.place(offset, u64::from(len_bytes), 8)?;
        Ok(Block { place, len_bytes })
    }

    #[inline]
    fn place(&self, offset: u64, len_bytes: u64, align: u64) -> Result<TargetOffset> {
        if offset & (align - 1) != 0 {
            return Err(misaligned(offset, align));
        }
        if offset > self.len_bytes || self.len_bytes - offset < len_bytes {
            return Err(self.out_of_bounds(offset, len_bytes));
        }
        let head = u64::from(self.role as u8) << 8 | u64::from(self.id.0) << 32;
        Ok(TargetOffset {
            targets: self.targets,
            head,
            offset,
        })
    }

    #[cold]
    fn out_of_bounds(&self, offset: u64, len_bytes: u64) -> Error {
        Error::OutOfBounds {
            argument: "offset",
            offset,
            len_bytes,
            limit_bytes: self.len_bytes,
            what: self.role.name(),
        }
    }
}

fn check_block_len(len_bytes: u32, max: u32) -> Result<()> {
    if !(8..=max).contains(&len_bytes) {
        return Err(Error::Range {
            argument: "len_bytes",
            value: u64::from(len_bytes),
            min: 8,
            max: u64::from(max),
        });
    }
    if !len_bytes.is_multiple_of(8) {
        return Err(Error::Alignment {
            argument: "len_bytes",
            value: u64::from(len_bytes),
            align: 8,
        });
    }
    Ok(())
}

#[cold]
fn misaligned(offset: u64, align: u64) -> Error {
    Error::Alignment {
        argument: "offset",
        value: offset,
        align,
    }
}

/// The table of the targets of one owner.
///
/// Its id is unique in the process: an address, and a program built from it, remember the id, so that a program never runs on
/// the memory of another table.
#[derive(Debug)]
pub struct Targets {
    id: u64,
    entries: Vec<(String, Target)>,
}

impl Targets {
    /// An empty table with an id of its own.
    pub fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Self {
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            entries: Vec::new(),
        }
    }

    /// The table's id, never 0.
    pub const fn id(&self) -> u64 {
        self.id
    }

    /// Adds a target of `len_bytes` bytes. The name is for the disassembly.
    ///
    /// # Panics
    /// After 2^32 targets.
    pub fn register(&mut self, name: &str, role: Role, len_bytes: u64) -> Target {
        let id = TargetId(
            u32::try_from(self.entries.len()).expect("fewer than 2^32 targets in a table"),
        );
        let target = Target {
            id,
            role,
            len_bytes,
            targets: self.id,
        };
        self.entries.push((name.to_owned(), target));
        target
    }

    /// The target of that number.
    pub fn get(&self, id: TargetId) -> Option<Target> {
        self.entry(id).map(|entry| entry.1)
    }

    /// The name of the target of that number.
    pub fn name(&self, id: TargetId) -> Option<&str> {
        self.entry(id).map(|entry| entry.0.as_str())
    }

    /// All targets in order of registration.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = Target> + '_ {
        self.entries.iter().map(|entry| entry.1)
    }

    fn entry(&self, id: TargetId) -> Option<&(String, Target)> {
        self.entries.get(usize::try_from(id.0).ok()?)
    }
}

impl Default for Targets {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_checked() {
        let mut targets = Targets::new();
        let page = targets.register("page", Role::Memory, 64);
        assert_eq!(page.dword(60).unwrap().offset(), 60);
        assert_eq!(
            page.dword(2).unwrap_err(),
            Error::Alignment {
                argument: "offset",
                value: 2,
                align: 4
            }
        );
        assert!(matches!(
            page.dword(64),
            Err(Error::OutOfBounds {
                offset: 64,
                len_bytes: 4,
                limit_bytes: 64,
                ..
            })
        ));
        assert!(matches!(
            page.dword(u64::MAX - 3),
            Err(Error::OutOfBounds { .. })
        ));
        assert_eq!(page.qword(56).unwrap().target(), page.id());
        assert!(matches!(
            page.qword(60),
            Err(Error::Alignment { align: 8, .. })
        ));
        assert!(matches!(page.qword(64), Err(Error::OutOfBounds { .. })));
        assert_eq!(page.block(0, 64).unwrap().len_bytes(), 64);
        assert!(matches!(
            page.block(8, 64),
            Err(Error::OutOfBounds {
                offset: 8,
                len_bytes: 64,
                ..
            })
        ));
        assert!(matches!(
            page.block(4, 8),
            Err(Error::Alignment {
                argument: "offset",
                ..
            })
        ));
        assert!(matches!(
            page.block(0, 12),
            Err(Error::Alignment {
                argument: "len_bytes",
                ..
            })
        ));
        assert!(matches!(
            page.block(0, 0),
            Err(Error::Range {
                value: 0,
                min: 8,
                max: 256,
                ..
            })
        ));
        assert!(matches!(
            page.block(0, 264),
            Err(Error::Range { value: 264, .. })
        ));
    }

    #[test]
    fn a_word_needs_room_even_in_a_tiny_target() {
        let mut targets = Targets::new();
        for len_bytes in 0..8 {
            let tiny = targets.register("tiny", Role::Memory, len_bytes);
            assert_eq!(tiny.dword(0).is_ok(), len_bytes >= 4);
            assert!(tiny.qword(0).is_err());
        }
    }

    #[test]
    fn target_tables_have_names_and_unique_ids() {
        let mut a = Targets::new();
        let b = Targets::new();
        assert_ne!(a.id(), b.id());
        let first = a.register("first", Role::Uar, 8);
        let second = a.register("second", Role::Marks, 8);
        assert_eq!(a.name(second.id()), Some("second"));
        assert_eq!(a.get(first.id()), Some(first));
        assert_eq!(b.get(first.id()), None);
        assert_eq!(a.iter().collect::<Vec<_>>(), [first, second]);
        assert_eq!(first.qword(0).unwrap().targets_id(), a.id());
    }

    #[test]
    fn role_round_trips_through_its_byte() {
        for raw in 0..=255u8 {
            if let Some(role) = Role::from_raw(raw) {
                assert_eq!(role as u8, raw);
            }
        }
        assert_eq!((0..=255).filter_map(Role::from_raw).count(), 5);
    }
}
