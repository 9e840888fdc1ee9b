//! What a device has done, in numbers.

/// Counters of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Counters {
    /// UAR stores seen.
    pub doorbells: u64,
    /// UAR stores that came before the doorbell record that should precede them: a bug of whoever rang.
    pub doorbells_before_record: u64,
    /// UAR stores that came behind a later one in the same register: another processor rang, and nobody had flushed this one. What is
    /// overwritten before the device looks does not count, nor does a queue pair that shares its page or has more than 16384 WQEBBs.
    pub doorbells_backwards: u64,
    /// Work requests begun.
    pub wqes: u64,
    /// Packets sent, without what faults added or took.
    pub packets_sent: u64,
    /// Packets that arrived at a queue pair.
    pub packets_received: u64,
    /// Packets that arrived for nobody, or for an earlier connection.
    pub packets_dropped: u64,
    /// Times that a requester went back to send again.
    pub retransmissions: u64,
    /// Receiver-not-ready answers sent.
    pub rnr_naks: u64,
    /// Completions written.
    pub completions: u64,
}
