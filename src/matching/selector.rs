//! Which messages a receive takes.

/// From whom a receive of a [`Matcher`](crate::Matcher) takes a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Source {
    /// Any peer, this process included if it is one.
    Any,
    /// The peer with this index.
    Peer(usize),
}

/// The tags that a receive of a [`Matcher`](crate::Matcher) takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TagSelector {
    value: u32,
    ignored: u32,
}

impl TagSelector {
    /// This tag only.
    pub const fn exact(tag: u32) -> TagSelector {
        TagSelector::masked(tag, 0)
    }

    /// Every tag.
    pub const fn any() -> TagSelector {
        TagSelector::masked(0, u32::MAX)
    }

    /// The tags that are equal to `value` in the bits that `ignored` lacks, as with `fi_trecv` of libfabric.
    pub const fn masked(value: u32, ignored: u32) -> TagSelector {
        let value = value & !ignored;
        TagSelector { value, ignored }
    }

    /// Whether it takes that tag.
    pub const fn matches(self, tag: u32) -> bool {
        (tag ^ self.value) & !self.ignored == 0
    }

    /// The tag, if it takes one only.
    pub(super) fn single(self) -> Option<u32> {
        (self.ignored == 0).then_some(self.value)
    }

    /// Whether it takes all tags.
    pub(super) fn is_any(self) -> bool {
        self.ignored == u32::MAX
    }
}

impl From<u32> for TagSelector {
    fn from(tag: u32) -> TagSelector {
        TagSelector::exact(tag)
    }
}

/// What is known of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Envelope {
    /// The index of the peer that has sent it.
    pub peer: usize,
    /// Its tag.
    pub tag: u32,
    /// Its length in bytes.
    pub len_bytes: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ignored_bits_are_not_compared() {
        let of_kind = TagSelector::masked(0x1234_0007, 0x0000_ffff);
        assert!(of_kind.matches(0x1234_0000) && of_kind.matches(0x1234_ffff));
        assert!(!of_kind.matches(0x1235_0007));
        // The bits of the value that are ignored make no difference.
        assert_eq!(of_kind, TagSelector::masked(0x1234_0000, 0x0000_ffff));
        assert_eq!(TagSelector::from(7).single(), Some(7));
        assert!(TagSelector::exact(7).matches(7) && !TagSelector::exact(7).matches(6));
        assert!(TagSelector::any().is_any() && TagSelector::any().matches(u32::MAX));
    }
}
