//! Programs: ops in fixed space, built by queues, run by executors.

use super::ops::{Ops, Units};
use super::target::TargetOffset;
use super::unit::{UNIT_BYTES, bytes_of, head};
use super::{Block, Dword, Fence, Kind, Qword, Targets};
use crate::{Error, Result};

/// Units in a program. A send takes 3, a wait 2, a BlueFlame post of 256 bytes 15.
pub const UNIT_LIMIT: usize = 16;

/// A few peer ops on the targets of one table, in order.
///
/// It lives in fixed space and never allocates. What the units hold is bytes in the layout of `struct dbl_unit`
/// (`include/doorbell/detail/bytecode.h`), so that C and CUDA read [`Program::as_bytes`] as it is.
///
/// ```
/// use doorbell_wire::bytecode::{Program, Role, Targets};
///
/// let mut targets = Targets::new();
/// let flag = targets.register("flag", Role::Memory, 4).dword(0)?;
/// let mut program = Program::new(&targets);
/// program.poll_geq(flag, 1)?;
/// program.store_dword(flag, 0)?;
/// println!("{}", program.disassemble(&targets));
/// # Ok::<(), doorbell_wire::Error>(())
/// ```
#[derive(Clone, Copy)]
#[repr(C, align(8))]
pub struct Program {
    targets: u64,
    /// Units in use; what lies behind is left over and means nothing.
    len: u32,
    /// Keeps the units aligned to 8, because readers take them as words of 8 bytes.
    reserved: u32,
    // Last, so that a short program, which most are, is in use in one piece.
    units: [[u8; UNIT_BYTES]; UNIT_LIMIT],
}

impl Program {
    /// An empty program on the targets of that table.
    #[inline]
    pub fn new(targets: &Targets) -> Self {
        Self::for_targets(targets.id())
    }

    /// An empty program on the targets of the table with that id.
    #[inline]
    pub fn for_targets(id: u64) -> Self {
        Self {
            units: [[0; UNIT_BYTES]; UNIT_LIMIT],
            targets: id,
            len: 0,
            reserved: 0,
        }
    }

    /// Becomes a copy of `other` without touching the units that `other` does not use, nor the memory that they lie in: a copy by
    /// value takes the whole space of a program.
    #[inline]
    pub fn assign(&mut self, other: &Program) {
        let used = other.live();
        self.targets = other.targets;
        self.len = other.len;
        if let Some(units) = self.units.get_mut(..used.len()) {
            units.copy_from_slice(used);
        }
    }

    /// Stores 32 bits at once. `value` is what a native load of the memory gives afterwards.
    ///
    /// # Errors
    /// [`Error::ProgramFull`]; [`Error::Foreign`] if the address is of another table. The program stays as it was.
    #[inline]
    pub fn store_dword(&mut self, at: Dword, value: u32) -> Result<()> {
        self.extend(at.targets_id(), [store_dword(at, value)])
    }

    /// Stores 64 bits at once. `value` is what a native load of the memory gives afterwards.
    ///
    /// # Errors
    /// As [`Program::store_dword`].
    #[inline]
    pub fn store_qword(&mut self, at: Qword, value: u64) -> Result<()> {
        self.extend(at.targets_id(), [store_qword(at, value)])
    }

    /// Copies bytes, 64 bits a store, in ascending order.
    ///
    /// # Errors
    /// [`Error::Range`] if `bytes` is not as long as the block; else as [`Program::store_dword`].
    pub fn copy_block(&mut self, at: Block, bytes: &[u8]) -> Result<()> {
        if bytes.len() != at.len_bytes as usize {
            let len_bytes = u64::from(at.len_bytes);
            return Err(Error::Range {
                argument: "bytes.len()",
                value: bytes.len() as u64,
                min: len_bytes,
                max: len_bytes,
            });
        }
        self.check_table(at.targets_id())?;
        let needed = 1 + bytes.len().div_ceil(UNIT_BYTES);
        let Some([first, payload @ ..]) = self
            .units
            .get_mut(self.len as usize..self.len as usize + needed)
        else {
            return Err(self.full(needed));
        };
        *first = bytes_of(
            head(Kind::CopyBlock, at.len_bytes, at.place.head),
            at.place.offset,
            0,
        );
        let (copied, padding) = payload.as_flattened_mut().split_at_mut(bytes.len());
        copied.copy_from_slice(bytes);
        padding.fill(0);
        self.len += needed as u32;
        Ok(())
    }

    /// Waits until `(memory - value) as i32 >= 0`.
    ///
    /// # Errors
    /// As [`Program::store_dword`].
    #[inline]
    pub fn poll_geq(&mut self, at: Dword, value: u32) -> Result<()> {
        self.extend(at.targets_id(), [poll(Kind::PollGeq, at, value)])
    }

    /// Waits until `memory & value != 0`.
    ///
    /// # Errors
    /// As [`Program::store_dword`].
    #[inline]
    pub fn poll_and(&mut self, at: Dword, value: u32) -> Result<()> {
        self.extend(at.targets_id(), [poll(Kind::PollAnd, at, value)])
    }

    /// Waits until `!(memory | value) != 0`.
    ///
    /// # Errors
    /// As [`Program::store_dword`].
    #[inline]
    pub fn poll_nor(&mut self, at: Dword, value: u32) -> Result<()> {
        self.extend(at.targets_id(), [poll(Kind::PollNor, at, value)])
    }

    /// Orders the ops before with those after.
    ///
    /// # Errors
    /// [`Error::ProgramFull`].
    #[inline]
    pub fn fence(&mut self, fence: Fence) -> Result<()> {
        self.extend(self.targets, [self::fence(fence)])
    }

    /// Adds the ops of another program on the same table.
    ///
    /// # Errors
    /// As [`Program::store_dword`].
    pub fn append(&mut self, other: &Program) -> Result<()> {
        self.check_table(other.targets)?;
        let added = other.live();
        let Some(room) = self
            .units
            .get_mut(self.len as usize..self.len as usize + added.len())
        else {
            return Err(self.full(added.len()));
        };
        room.copy_from_slice(added);
        self.len += other.len;
        Ok(())
    }

    /// Empties the program; its table stays.
    #[inline]
    pub fn clear(&mut self) {
        self.len = 0;
    }

    /// The id of the table whose targets the program touches.
    #[inline]
    pub fn targets_id(&self) -> u64 {
        self.targets
    }

    /// Whether there is nothing to do.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether its last op is that fence.
    pub fn ends_with(&self, fence: Fence) -> bool {
        let last = self.units().last();
        last.is_some_and(|unit| unit.kind == Kind::Fence as u8 && unit.value == fence.bits().into())
    }

    /// Units in use, of [`UNIT_LIMIT`].
    #[inline]
    pub fn len(&self) -> usize {
        self.len as usize
    }

    /// The units in use, one after the other: an array of `struct dbl_unit`, aligned to 8 bytes.
    #[inline]
    pub fn as_bytes(&self) -> &[u8] {
        self.live().as_flattened()
    }

    /// The units in use, decoded. The payload units of a COPY_BLOCK come out as they lie.
    pub fn units(&self) -> Units<'_> {
        Units(self.live().iter())
    }

    /// The ops in order.
    #[inline]
    pub fn ops(&self) -> Ops<'_> {
        Ops { rest: self.live() }
    }

    #[inline]
    fn live(&self) -> &[[u8; UNIT_BYTES]] {
        // `len` never exceeds the limit: `get` keeps a panic out of the hot path.
        self.units.get(..self.len as usize).unwrap_or(&[])
    }

    #[inline]
    fn extend<const N: usize>(&mut self, targets: u64, units: [PackedUnit; N]) -> Result<()> {
        if self.try_extend(targets, units) {
            Ok(())
        } else {
            Err(self.refusal(targets, N))
        }
    }

    /// Adds units whose addresses all belong to `targets`: all of them or none, with one check for all. If none,
    /// [`Program::refusal`] gives the reason; separate, because building an error here would cost the queues instructions.
    #[inline]
    pub(crate) fn try_extend<const N: usize>(
        &mut self,
        targets: u64,
        units: [PackedUnit; N],
    ) -> bool {
        if targets != self.targets {
            return false;
        }
        let Some(room) = self
            .units
            .get_mut(self.len as usize..)
            .and_then(|rest| rest.first_chunk_mut::<N>())
        else {
            return false;
        };
        *room = units.map(|unit| unit.0);
        self.len += N as u32;
        true
    }

    /// Why that many units on that table were not added.
    #[cold]
    pub(crate) fn refusal(&self, targets: u64, units: usize) -> Error {
        if targets == self.targets {
            self.full(units)
        } else {
            self.foreign(targets)
        }
    }

    /// Takes back what was added since the program had `len` units.
    #[inline]
    pub(crate) fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len as u32);
    }

    #[inline]
    fn check_table(&self, targets: u64) -> Result<()> {
        if targets == self.targets {
            Ok(())
        } else {
            Err(self.foreign(targets))
        }
    }

    #[cold]
    fn foreign(&self, found: u64) -> Error {
        Error::Foreign {
            argument: "at",
            found: format!("target table {found}"),
            expected: format!("target table {}", self.targets),
        }
    }

    #[cold]
    fn full(&self, units: usize) -> Error {
        Error::ProgramFull {
            limit: UNIT_LIMIT,
            needed: units - (UNIT_LIMIT - self.len()).min(units),
        }
    }
}

/// A unit ready to be put into a program of its table.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PackedUnit([u8; UNIT_BYTES]);

impl PackedUnit {
    /// The same op with another value, for callers that make the same op again and again.
    #[inline]
    pub(crate) fn with_value(self, value: u64) -> Self {
        let mut bytes = self.0;
        bytes[16..].copy_from_slice(&value.to_ne_bytes());
        Self(bytes)
    }
}

#[inline]
pub(crate) fn store_dword(at: Dword, value: u32) -> PackedUnit {
    packed(Kind::StoreDword, 4, at.0, u64::from(value))
}

#[inline]
pub(crate) fn store_qword(at: Qword, value: u64) -> PackedUnit {
    packed(Kind::StoreQword, 8, at.0, value)
}

#[inline]
pub(crate) fn poll(kind: Kind, at: Dword, value: u32) -> PackedUnit {
    packed(kind, 4, at.0, u64::from(value))
}

#[inline]
pub(crate) fn fence(fence: Fence) -> PackedUnit {
    PackedUnit(bytes_of(Kind::Fence as u64, 0, u64::from(fence.bits())))
}

#[inline]
fn packed(kind: Kind, len_bytes: u32, place: TargetOffset, value: u64) -> PackedUnit {
    PackedUnit(bytes_of(
        head(kind, len_bytes, place.head),
        place.offset,
        value,
    ))
}
