//! Counters of the work that a device has done.

/// Counters of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Counters {
    /// UAR stores seen.
    pub doorbells: u64,
    /// UAR stores that arrived before the doorbell record that must precede them. The ringing program lacks a fence.
    pub doorbells_before_record: u64,
    /// UAR stores that arrived after a later store to the same register: another processor rang before the first store was flushed. A store
    /// that is overwritten before the device reads the register is not counted. Queue pairs that share their UAR page or have more than 16384
    /// WQEBBs are not checked.
    pub doorbells_backwards: u64,
    /// Work requests begun.
    pub wqes: u64,
    /// Packets sent. Duplicates and losses that faults make are not counted.
    pub packets_sent: u64,
    /// Packets that arrived at a queue pair.
    pub packets_received: u64,
    /// Packets that arrived for a queue pair that does not exist, or for an earlier connection; by UDP also datagrams that are no packets, and frames
    /// that the kernel refused to send.
    pub packets_dropped: u64,
    /// Notices of congestion that arrived (CNP).
    pub congestion_notices: u64,
    /// Times that a requester started to send packets again.
    pub retransmissions: u64,
    /// Receiver-not-ready answers sent.
    pub rnr_naks: u64,
    /// Completions written.
    pub completions: u64,
}
