//! Bytes in a row.

/// Bytes in a row, in memory that is known otherwise: this process's, another one's, or a GPU's. It has the form of an `iovec`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct Span {
    /// First byte.
    pub addr: u64,
    /// How many.
    pub len_bytes: usize,
}
