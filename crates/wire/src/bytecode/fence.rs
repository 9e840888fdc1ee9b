//! Fences: which accesses are ordered, of which side, and how far.

use std::fmt;
use std::ops::BitOr;

/// An ordering between the ops before it and the ops after it.
///
/// Three questions, each answered by bits: which accesses are ordered (reads, writes), which side made the accesses before it
/// (the executor and the CPU, or the NIC), and how far the ordering reaches (system memory, or the memory of peer devices as well).
/// The same three as in MLNX_OFED's peer-direct fences.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct Fence(u32);

impl Fence {
    /// Orders reads before with accesses after.
    pub const READ: Self = Self(1 << 0);
    /// Orders writes before with accesses after.
    pub const WRITE: Self = Self(1 << 1);
    /// The accesses before are the executor's and the CPU's.
    pub const FROM_CPU: Self = Self(1 << 4);
    /// The accesses before are the NIC's.
    pub const FROM_HCA: Self = Self(1 << 5);
    /// Reaches system memory and the NIC.
    pub const SYSTEM: Self = Self(1 << 8);
    /// Reaches the memory of peer devices.
    pub const PEER: Self = Self(1 << 9);

    /// Between the doorbell record and the UAR: the record's store, by the executor, is visible to the NIC before the UAR's store is.
    pub const RECORD_BEFORE_UAR: Self = Self(Self::WRITE.0 | Self::FROM_CPU.0 | Self::SYSTEM.0);
    /// After a BlueFlame copy: its stores leave the write-combining buffers before any later store.
    pub const BLUEFLAME_FLUSH: Self = Self::RECORD_BEFORE_UAR;
    /// Between a doorbell and a word that announces it: a thread that sees the word may ring the next doorbell, and the device must not
    /// see that one first.
    pub const DOORBELL_BEFORE_FLAG: Self = Self::RECORD_BEFORE_UAR;

    /// Between the work of a stream and a word that announces it: all accesses before, by the executor, go before the word's store.
    pub const WORK_BEFORE_FLAG: Self =
        Self(Self::READ.0 | Self::WRITE.0 | Self::FROM_CPU.0 | Self::SYSTEM.0);

    const ALL: u32 = Self::READ.0
        | Self::WRITE.0
        | Self::FROM_CPU.0
        | Self::FROM_HCA.0
        | Self::SYSTEM.0
        | Self::PEER.0;

    /// The bits as in a unit's `value`.
    #[inline]
    pub const fn bits(self) -> u32 {
        self.0
    }

    /// The fence of those bits; bits that mean nothing are dropped.
    #[inline]
    pub const fn from_bits_truncate(bits: u32) -> Self {
        Self(bits & Self::ALL)
    }

    /// Whether all bits of `other` are set.
    #[inline]
    pub const fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }
}

impl BitOr for Fence {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

impl fmt::Display for Fence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list = |parts: [(Self, &'static str); 2]| match parts
            .map(|(bit, name)| self.contains(bit).then_some(name))
        {
            [Some(a), Some(b)] => format!("{a}+{b}"),
            [Some(a), None] | [None, Some(a)] => a.to_owned(),
            [None, None] => "nothing".to_owned(),
        };
        write!(
            f,
            "{} from {}, seen by {}",
            list([(Self::READ, "reads"), (Self::WRITE, "writes")]),
            list([(Self::FROM_CPU, "CPU"), (Self::FROM_HCA, "HCA")]),
            list([(Self::SYSTEM, "system"), (Self::PEER, "peers")]),
        )
    }
}

impl fmt::Debug for Fence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Fence({self})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_and_text() {
        let fence = Fence::WRITE | Fence::FROM_CPU | Fence::SYSTEM;
        assert_eq!(fence, Fence::RECORD_BEFORE_UAR);
        assert_eq!(fence.bits(), 0x112);
        assert!(fence.contains(Fence::WRITE) && !fence.contains(Fence::READ));
        assert_eq!(fence.to_string(), "writes from CPU, seen by system");
        assert_eq!(Fence::from_bits_truncate(u32::MAX).bits(), 0x333);
        assert_eq!(
            Fence::from_bits_truncate(u32::MAX).to_string(),
            "reads+writes from CPU+HCA, seen by system+peers"
        );
        assert_eq!(
            Fence::from_bits_truncate(0).to_string(),
            "nothing from nothing, seen by nothing"
        );
    }
}
