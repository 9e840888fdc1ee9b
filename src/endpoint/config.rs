//! The configuration of an endpoint.

use std::time::Duration;

use crate::endpoint::Control;
use crate::mlx5::Opcode;
use crate::nic::{Access, Attributes, Capacity, Transport};
use crate::{Error, Result};
use doorbell_wire::memory::QueuePairSizes;

/// Blocks that a send ring can have: the doorbell record counts 16 bits.
const SEND_WQEBBS_MAX: u32 = 32768;
/// The deepest queue.
const DEPTH_MAX: u32 = 16384;
/// Slices of a work request.
pub(super) const SEGMENTS_MAX: u32 = 16;
/// Inline bytes of a work request: with three segments before them they fit into four WQEBBs.
const INLINE_BYTES_MAX: u32 = 476;

/// The configuration of an endpoint. Start from `EndpointConfig::default()`, and change what differs:
///
/// ```
/// let config = doorbell::EndpointConfig::default().send_depth(1024).rnr_retry(0);
/// assert_eq!(config.send_depth, 1024);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct EndpointConfig {
    /// The service of the queue pair. Default [`Transport::Rc`], a reliable connection. A [`Transport::Ud`] endpoint has no peer: [`Endpoint::activate`](crate::Endpoint::activate)
    /// takes the place of [`Endpoint::connect`](crate::Endpoint::connect). It only sends, and each send names its receiver
    /// ([`Work::to`](crate::Work::to)) and has at most `mtu_bytes`, or the MTU of the port if that is smaller. The memory of its receives begins with 40 bytes
    /// for a global route header (GRH), which the device writes if the datagram has one; [`Completion::len_bytes`] counts them. A datagram is lost if it finds no
    /// receive, or if its queue key is another. One that is longer than its receive fails the endpoint that receives.
    pub transport: Transport,
    /// Of a UD endpoint: the queue key that datagrams to it must have. Default 0. With the highest bit set, `ibv_modify_qp` fails with EPERM in a process without
    /// `CAP_NET_RAW`.
    pub qkey: u32,
    /// Work requests that the send queue holds, 1 to 16384 (fewer where long work requests fill the ring). Default 128.
    pub send_depth: u32,
    /// Work requests that the receive queue holds, 1 to 16384. Default 128.
    pub recv_depth: u32,
    /// Slices of a work request, 1 to 16. Default 4.
    pub max_segments: u32,
    /// Inline bytes of a work request, 0 to 476. Default 64.
    pub max_inline_bytes: u32,
    /// How long a wait on a stream may take before the watchdog releases it and fails the endpoint. Default 30 s; `None`
    /// waits for ever.
    pub wait_timeout: Option<Duration>,
    /// How long a call that posts or prepares an operation waits for room in a full queue, as
    /// [`Endpoint::wait_room`](crate::Endpoint::wait_room). Default `None`: it does not wait, and fails with
    /// [`Error::QueueFull`](crate::Error::QueueFull). It is for the endpoint's queue: a call that queues on a stream whose own queue is full waits until the stream
    /// goes on or is aborted, whatever the timeout.
    pub room_timeout: Option<Duration>,
    /// Whether a doorbell carries its WQE, if that has at most 192 bytes, to the device (BlueFlame). Default: no.
    pub blueflame: bool,
    /// Largest payload of a packet, in bytes: 256, 512, 1024, 2048 or 4096. The smaller of both ends is used. Default 4096.
    pub mtu_bytes: u32,
    /// The code of the time without an acknowledgement of the peer before the device sends packets again: 4.096 us * 2^`ack_timeout`, 0 to 31; 0
    /// means no limit. Verbs call it `timeout`, the InfiniBand specification Local Ack Timeout. Default 18, which is 1.07 s, as in UCX: on a
    /// congested network an acknowledgement may take long, and repetitions add to the congestion. A peer that is gone is detected when all
    /// repetitions are over, after 8.6 s: before the deadline of a wait, whose error would not name the reason. NCCL uses 20, with which it takes 34
    /// s.
    pub ack_timeout: u8,
    /// Repetitions without any progress before a work request fails, 0 to 7. Default 7.
    pub retry_count: u8,
    /// Repetitions if the peer has no receive posted, 0 to 6; 7 means no limit. Default 7.
    pub rnr_retry: u8,
    /// The RNR NAK timer: how long the peer waits before it retries if no receive is posted here, encoded as in verbs (0 to 31). Default 12, which
    /// is 0.64 ms, as in NCCL.
    pub min_rnr_timer: u8,
    /// Reads and atomics in flight at once, 1 to 16. A device at either end of the connection that supports fewer reduces the number. Default 16.
    pub max_reads: u8,
    /// What the peer may do to regions, if the regions' own rights allow it, too. Default: everything.
    pub access: Access,
    /// Traffic class of packets with a global route, 0 to 255; on RoCE it is the TOS byte of IP, with the DSCP in the upper six bits. Default 0,
    /// which most RoCE networks put into a lossy class. Not used by connections of rdma_cm, nor by `softcx`.
    pub traffic_class: u8,
    /// Service level of packets, 0 to 15. Default 0. Not used by connections of rdma_cm, nor by `softcx`.
    pub service_level: u8,
    /// Index of the partition key in the port's table. Default 0. Not used by connections of rdma_cm, nor by `softcx`.
    pub pkey_index: u16,
    /// Which component rings the NIC. Default `None`: what the device was opened with (see [`Device::open`](crate::Device::open)), and
    /// if that does not say, the best way that is possible; [`Endpoint::path`](crate::Endpoint::path) says which, and why. BlueFlame
    /// needs [`Control::Direct`] or [`Control::Sync`]; a proxy rings without it.
    pub control: Option<Control>,
}

setters!(EndpointConfig {
    transport: Transport,
    qkey: u32,
    send_depth: u32,
    recv_depth: u32,
    max_segments: u32,
    max_inline_bytes: u32,
    wait_timeout: Option<Duration>,
    room_timeout: Option<Duration>,
    blueflame: bool,
    mtu_bytes: u32,
    ack_timeout: u8,
    retry_count: u8,
    rnr_retry: u8,
    min_rnr_timer: u8,
    max_reads: u8,
    access: Access,
    traffic_class: u8,
    service_level: u8,
    pkey_index: u16,
    control: Option<Control>,
});

impl Default for EndpointConfig {
    fn default() -> EndpointConfig {
        let attributes = Attributes::default();
        EndpointConfig {
            transport: Transport::default(),
            qkey: attributes.qkey,
            send_depth: 128,
            recv_depth: 128,
            max_segments: 4,
            max_inline_bytes: 64,
            wait_timeout: Some(Duration::from_secs(30)),
            room_timeout: None,
            blueflame: false,
            mtu_bytes: attributes.mtu_bytes,
            ack_timeout: 18,
            retry_count: attributes.retry_count,
            rnr_retry: attributes.rnr_retry,
            min_rnr_timer: attributes.min_rnr_timer,
            max_reads: attributes.max_reads,
            access: attributes.access,
            traffic_class: attributes.traffic_class,
            service_level: attributes.service_level,
            pkey_index: attributes.pkey_index,
            control: None,
        }
    }
}

impl EndpointConfig {
    pub(super) fn capacity(&self) -> Capacity {
        Capacity {
            transport: self.transport,
            send_depth: self.send_depth,
            recv_depth: self.recv_depth,
            segments: self.max_segments,
            inline_bytes: self.max_inline_bytes,
        }
    }

    pub(super) fn attributes(&self) -> Attributes {
        Attributes {
            mtu_bytes: self.mtu_bytes,
            ack_timeout: self.ack_timeout,
            retry_count: self.retry_count,
            rnr_retry: self.rnr_retry,
            min_rnr_timer: self.min_rnr_timer,
            max_reads: self.max_reads,
            access: self.access,
            traffic_class: self.traffic_class,
            service_level: self.service_level,
            pkey_index: self.pkey_index,
            qkey: self.qkey,
        }
    }

    pub(super) fn check(&self) -> Result<()> {
        let range = |argument, value: u32, min: u32, max: u32| {
            if (min..=max).contains(&value) {
                Ok(())
            } else {
                Err(Error::Range {
                    argument,
                    value: value.into(),
                    min: min.into(),
                    max: max.into(),
                })
            }
        };
        range("max_segments", self.max_segments, 1, SEGMENTS_MAX)?;
        range(
            "max_inline_bytes",
            self.max_inline_bytes,
            0,
            INLINE_BYTES_MAX,
        )?;
        range(
            "send_depth",
            self.send_depth,
            1,
            DEPTH_MAX.min(SEND_WQEBBS_MAX / QueuePairSizes::wqebbs_each(&self.capacity())),
        )?;
        range("recv_depth", self.recv_depth, 1, DEPTH_MAX)?;
        if self.wait_timeout == Some(Duration::ZERO) {
            return Err(Error::Range {
                argument: "wait_timeout",
                value: 0,
                min: 1,
                max: u64::MAX,
            });
        }
        self.attributes().check()
    }
}

/// A completion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Completion {
    /// The number that the application gave to the work request.
    pub wr_id: u64,
    /// The kind of work request that was completed.
    pub operation: Operation,
    /// Bytes that a receive, a read or an atomic has brought. 0 for sends and writes, of which the device does not report it.
    pub len_bytes: u32,
    /// Immediate data, if the peer sent some.
    pub imm: Option<u32>,
    /// Of a receive of a UD endpoint: where the datagram came from.
    pub source: Option<DatagramSource>,
}

/// Where a datagram came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct DatagramSource {
    /// The number of the queue pair.
    pub qpn: u32,
    /// The LID of the port on InfiniBand; else 0.
    pub lid: u16,
    /// Whether the first 40 bytes of the receive have a global route header. Without one they are as they were.
    pub has_grh: bool,
}

/// The kind of a completed work request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Operation {
    /// Taken from the send queue.
    Post(Opcode),
    /// A receive that took a send.
    Receive,
    /// A receive that took the immediate data of a write.
    ReceiveWrite,
}

/// The two queues of an endpoint, each with its completions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum QueueKind {
    /// Sends, writes, reads and atomics.
    Send = 0,
    /// Receives.
    Recv = 1,
}

impl QueueKind {
    pub(super) fn name(self) -> &'static str {
        match self {
            QueueKind::Send => "send",
            QueueKind::Recv => "receive",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_named() {
        let bad = |config: EndpointConfig| match config.check() {
            Err(Error::Range { argument, max, .. }) => (argument, max),
            other => panic!("{other:?}"),
        };
        let good = EndpointConfig::default();
        assert_eq!(good.check(), Ok(()));
        assert_eq!(bad(good.send_depth(0)), ("send_depth", 16384));
        assert_eq!(bad(good.send_depth(1 << 20)), ("send_depth", 16384));
        assert_eq!(bad(good.recv_depth(0)), ("recv_depth", 16384));
        assert_eq!(bad(good.recv_depth(1 << 20)), ("recv_depth", 16384));
        assert_eq!(bad(good.max_segments(17)), ("max_segments", 16));
        assert_eq!(
            bad(good.max_segments(16).send_depth(8000)),
            ("send_depth", 6553)
        );
        assert_eq!(bad(good.max_inline_bytes(477)), ("max_inline_bytes", 476));
        assert_eq!(
            bad(good.wait_timeout(Some(Duration::ZERO))).0,
            "wait_timeout"
        );
        assert_eq!(bad(good.retry_count(8)).0, "retry_count");
    }
}
