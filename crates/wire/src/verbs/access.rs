//! Access rights of verbs: which accesses to a region are allowed, locally and by peers.

/// Access rights of a region, with the values of verbs' `ibv_access_flags`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Access(u32);

impl Access {
    /// Local reading only.
    pub const LOCAL_READ: Access = Access(0);
    /// The device may write on behalf of the local side: receives, results of reads and atomics.
    pub const LOCAL_WRITE: Access = Access(1);
    /// A peer may write.
    pub const REMOTE_WRITE: Access = Access(2);
    /// A peer may read.
    pub const REMOTE_READ: Access = Access(4);
    /// A peer may run atomics.
    pub const REMOTE_ATOMIC: Access = Access(8);
    /// All of them.
    pub const ALL: Access = Access(15);

    /// The rights with verbs' bits; unknown bits give `None`.
    pub fn from_bits(bits: u32) -> Option<Access> {
        (bits & !Access::ALL.0 == 0).then_some(Access(bits))
    }

    /// Verbs' bits.
    pub fn bits(self) -> u32 {
        self.0
    }

    /// Whether all of `other` is allowed.
    pub fn contains(self, other: Access) -> bool {
        self.0 & other.0 == other.0
    }

    /// What is left when `other` is taken away.
    pub fn without(self, other: Access) -> Access {
        Access(self.0 & !other.0)
    }
}

impl std::ops::BitOr for Access {
    type Output = Access;
    fn bitor(self, other: Access) -> Access {
        Access(self.0 | other.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn access_bits_are_those_of_verbs() {
        assert_eq!((Access::LOCAL_WRITE | Access::REMOTE_ATOMIC).bits(), 9);
        assert_eq!(Access::from_bits(16), None);
        assert_eq!(
            Access::from_bits(6),
            Some(Access::REMOTE_WRITE | Access::REMOTE_READ)
        );
    }
}
