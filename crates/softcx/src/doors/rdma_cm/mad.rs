//! The messages of the InfiniBand connection manager (IBTA volume 1, chapter 12) as management datagrams.
//!
//! Offsets are those of the specification's tables, which count from behind the header of 24 bytes.

use crate::device::management::{MAD_BYTES, MadBytes};

const HEADER_BYTES: usize = 24;
/// `Communication management` and its version.
const CLASS: [u8; 2] = [7, 2];
/// `ComMgtSend`.
const METHOD: u8 = 3;

/// Room for private data in each message, in bytes.
pub(super) const REQ_PRIVATE: usize = 92;
pub(super) const REP_PRIVATE: usize = 196;
pub(super) const REJ_PRIVATE: usize = 148;
pub(super) const SIDR_REQ_PRIVATE: usize = 216;
pub(super) const SIDR_REP_PRIVATE: usize = 136;

/// The attribute of a message.
mod attribute {
    pub(super) const REQ: u16 = 0x10;
    pub(super) const MRA: u16 = 0x11;
    pub(super) const REJ: u16 = 0x12;
    pub(super) const REP: u16 = 0x13;
    pub(super) const RTU: u16 = 0x14;
    pub(super) const DREQ: u16 = 0x15;
    pub(super) const DREP: u16 = 0x16;
    pub(super) const SIDR_REQ: u16 = 0x17;
    pub(super) const SIDR_REP: u16 = 0x18;
}

/// Which message a rejection or an MRA is about.
pub(super) mod about {
    pub(in crate::doors::rdma_cm) const REQ: u8 = 0;
    pub(in crate::doors::rdma_cm) const REP: u8 = 1;
    pub(in crate::doors::rdma_cm) const OTHER: u8 = 2;
}

/// Reasons of a rejection (IBTA table 109).
pub(super) mod reason {
    pub(in crate::doors::rdma_cm) const TIMEOUT: u16 = 4;
    pub(in crate::doors::rdma_cm) const INVALID_SERVICE_ID: u16 = 8;
    pub(in crate::doors::rdma_cm) const STALE_CONNECTION: u16 = 10;
    pub(in crate::doors::rdma_cm) const CONSUMER_DEFINED: u16 = 28;
    pub(in crate::doors::rdma_cm) const VENDOR_OPTION_NOT_SUPPORTED: u16 = 35;
}

/// A request for a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ConnectionRequest {
    pub(super) local_id: u32,
    pub(super) service: u64,
    pub(super) guid: u64,
    pub(super) qpn: u32,
    /// Reads that the sender answers at a time.
    pub(super) responder_resources: u8,
    /// Reads that the sender makes at a time.
    pub(super) initiator_depth: u8,
    /// 0: reliable; 1: unreliable.
    pub(super) transport: u8,
    pub(super) flow_control: bool,
    pub(super) psn: u32,
    pub(super) retry_count: u8,
    pub(super) rnr_retry_count: u8,
    pub(super) pkey: u16,
    pub(super) mtu: u8,
    pub(super) srq: bool,
    pub(super) lids: [u16; 2],
    pub(super) gids: [[u8; 16]; 2],
    pub(super) traffic_class: u8,
    pub(super) hop_limit: u8,
    pub(super) sl: u8,
    pub(super) ack_timeout: u8,
    pub(super) private_data: [u8; REQ_PRIVATE],
}

/// The acceptance of one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ConnectionReply {
    pub(super) local_id: u32,
    pub(super) remote_id: u32,
    pub(super) qpn: u32,
    pub(super) psn: u32,
    pub(super) responder_resources: u8,
    pub(super) initiator_depth: u8,
    pub(super) flow_control: bool,
    pub(super) rnr_retry_count: u8,
    pub(super) srq: bool,
    pub(super) guid: u64,
    pub(super) private_data: [u8; REP_PRIVATE],
}

/// The refusal of a request or a reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Rejection {
    pub(super) local_id: u32,
    pub(super) remote_id: u32,
    pub(super) about: u8,
    pub(super) reason: u16,
    /// The additional information, where that is a GUID: of the sender, which gives up its request ([`reason::TIMEOUT`]).
    pub(super) guid: Option<u64>,
    pub(super) private_data: [u8; REJ_PRIVATE],
}

/// A request for the queue pair of a datagram service.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ServiceRequest {
    pub(super) request_id: u32,
    pub(super) pkey: u16,
    pub(super) service: u64,
    pub(super) private_data: [u8; SIDR_REQ_PRIVATE],
}

/// The answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ServiceReply {
    pub(super) request_id: u32,
    /// 0: success; 1: no such service; 2: rejected.
    pub(super) status: u8,
    pub(super) qpn: u32,
    pub(super) service: u64,
    pub(super) qkey: u32,
    pub(super) private_data: [u8; SIDR_REP_PRIVATE],
}

/// One message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CmMessage {
    Request(ConnectionRequest),
    Reply(ConnectionReply),
    Reject(Rejection),
    /// The message of that kind has come, and its answer takes time.
    Received {
        local_id: u32,
        remote_id: u32,
        about: u8,
        service_timeout: u8,
    },
    ReadyToUse {
        local_id: u32,
        remote_id: u32,
    },
    DisconnectRequest {
        local_id: u32,
        remote_id: u32,
        qpn: u32,
    },
    DisconnectReply {
        local_id: u32,
        remote_id: u32,
    },
    ServiceRequest(ServiceRequest),
    ServiceReply(ServiceReply),
}

impl CmMessage {
    /// The datagram with this message. `transaction` is the same in a request, in its repetitions and in its answers.
    pub(super) fn encode(&self, transaction: u64) -> MadBytes {
        let mut mad = [0; MAD_BYTES];
        let attribute = self.write(&mut MadFields(&mut mad));
        mad[0] = 1;
        mad[1..3].copy_from_slice(&CLASS);
        mad[3] = METHOD;
        mad[8..16].copy_from_slice(&transaction.to_be_bytes());
        mad[16..18].copy_from_slice(&attribute.to_be_bytes());
        mad
    }

    fn write(&self, to: &mut MadFields<'_>) -> u16 {
        match self {
            CmMessage::Request(it) => {
                to.word(0, it.local_id);
                to.long(8, it.service);
                to.long(16, it.guid);
                to.word(32, it.qpn << 8 | u32::from(it.responder_resources));
                to.byte(39, it.initiator_depth);
                let flow = u8::from(it.flow_control);
                to.byte(43, REMOTE_TIMEOUT << 3 | it.transport << 1 | flow);
                to.word(44, it.psn << 8);
                to.byte(47, LOCAL_TIMEOUT << 3 | it.retry_count & 7);
                to.half(48, it.pkey);
                to.byte(50, it.mtu << 4 | it.rnr_retry_count & 7);
                to.byte(51, CM_RETRIES << 4 | u8::from(it.srq) << 3);
                to.half(52, it.lids[0]);
                to.half(54, it.lids[1]);
                to.bytes(56, &it.gids[0]);
                to.bytes(72, &it.gids[1]);
                to.byte(91, RATE);
                to.byte(92, it.traffic_class);
                to.byte(93, it.hop_limit);
                to.byte(94, it.sl << 4 | 1 << 3);
                to.byte(95, it.ack_timeout << 3);
                to.bytes(140, &it.private_data);
                attribute::REQ
            }
            CmMessage::Reply(it) => {
                to.word(0, it.local_id);
                to.word(4, it.remote_id);
                to.word(12, it.qpn << 8);
                to.word(20, it.psn << 8);
                to.byte(24, it.responder_resources);
                to.byte(25, it.initiator_depth);
                to.byte(26, u8::from(it.flow_control));
                let srq = u8::from(it.srq);
                to.byte(27, (it.rnr_retry_count & 7) << 5 | srq << 4);
                to.long(28, it.guid);
                to.bytes(36, &it.private_data);
                attribute::REP
            }
            CmMessage::Reject(it) => {
                to.word(0, it.local_id);
                to.word(4, it.remote_id);
                to.byte(8, it.about << 6);
                to.half(10, it.reason);
                if let Some(guid) = it.guid {
                    to.byte(9, GUID_BYTES << 1);
                    to.long(12, guid);
                }
                to.bytes(84, &it.private_data);
                attribute::REJ
            }
            CmMessage::Received {
                local_id,
                remote_id,
                about,
                service_timeout,
            } => {
                to.word(0, *local_id);
                to.word(4, *remote_id);
                to.byte(8, about << 6);
                to.byte(9, service_timeout << 3);
                attribute::MRA
            }
            CmMessage::ReadyToUse {
                local_id,
                remote_id,
            } => {
                to.word(0, *local_id);
                to.word(4, *remote_id);
                attribute::RTU
            }
            CmMessage::DisconnectRequest {
                local_id,
                remote_id,
                qpn,
            } => {
                to.word(0, *local_id);
                to.word(4, *remote_id);
                to.word(8, qpn << 8);
                attribute::DREQ
            }
            CmMessage::DisconnectReply {
                local_id,
                remote_id,
            } => {
                to.word(0, *local_id);
                to.word(4, *remote_id);
                attribute::DREP
            }
            CmMessage::ServiceRequest(it) => {
                to.word(0, it.request_id);
                to.half(4, it.pkey);
                to.long(8, it.service);
                to.bytes(16, &it.private_data);
                attribute::SIDR_REQ
            }
            CmMessage::ServiceReply(it) => {
                to.word(0, it.request_id);
                to.byte(4, it.status);
                to.word(8, it.qpn << 8);
                to.long(12, it.service);
                to.word(20, it.qkey);
                to.bytes(96, &it.private_data);
                attribute::SIDR_REP
            }
        }
    }

    /// Reads a datagram: the transaction, and the message. `None` for what is no message of the connection manager, or one that is not known here.
    pub(super) fn parse(mad: &MadBytes) -> Option<(u64, CmMessage)> {
        if mad[0] != 1 || mad[1..3] != CLASS || mad[3] != METHOD {
            return None;
        }
        let from = View(mad);
        let (local_id, remote_id) = (from.word(0), from.word(4));
        let transaction = u64::from_be_bytes(*mad.get(8..)?.first_chunk()?);
        let message = match u16::from_be_bytes(*mad.get(16..)?.first_chunk()?) {
            attribute::REQ => CmMessage::Request(ConnectionRequest {
                local_id,
                service: from.long(8),
                guid: from.long(16),
                qpn: from.word(32) >> 8,
                responder_resources: from.byte(35),
                initiator_depth: from.byte(39),
                transport: from.byte(43) >> 1 & 3,
                flow_control: from.byte(43) & 1 != 0,
                psn: from.word(44) >> 8,
                retry_count: from.byte(47) & 7,
                pkey: from.half(48),
                mtu: from.byte(50) >> 4,
                rnr_retry_count: from.byte(50) & 7,
                srq: from.byte(51) >> 3 & 1 != 0,
                lids: [from.half(52), from.half(54)],
                gids: [from.bytes(56), from.bytes(72)],
                traffic_class: from.byte(92),
                hop_limit: from.byte(93),
                sl: from.byte(94) >> 4,
                ack_timeout: from.byte(95) >> 3,
                private_data: from.bytes(140),
            }),
            attribute::REP => CmMessage::Reply(ConnectionReply {
                local_id,
                remote_id,
                qpn: from.word(12) >> 8,
                psn: from.word(20) >> 8,
                responder_resources: from.byte(24),
                initiator_depth: from.byte(25),
                flow_control: from.byte(26) & 1 != 0,
                rnr_retry_count: from.byte(27) >> 5,
                srq: from.byte(27) >> 4 & 1 != 0,
                guid: from.long(28),
                private_data: from.bytes(36),
            }),
            attribute::REJ => CmMessage::Reject(Rejection {
                local_id,
                remote_id,
                about: from.byte(8) >> 6,
                reason: from.half(10),
                guid: (from.byte(9) >> 1 >= GUID_BYTES).then(|| from.long(12)),
                private_data: from.bytes(84),
            }),
            attribute::MRA => CmMessage::Received {
                local_id,
                remote_id,
                about: from.byte(8) >> 6,
                service_timeout: from.byte(9) >> 3,
            },
            attribute::RTU => CmMessage::ReadyToUse {
                local_id,
                remote_id,
            },
            attribute::DREQ => CmMessage::DisconnectRequest {
                local_id,
                remote_id,
                qpn: from.word(8) >> 8,
            },
            attribute::DREP => CmMessage::DisconnectReply {
                local_id,
                remote_id,
            },
            attribute::SIDR_REQ => CmMessage::ServiceRequest(ServiceRequest {
                request_id: local_id,
                pkey: from.half(4),
                service: from.long(8),
                private_data: from.bytes(16),
            }),
            attribute::SIDR_REP => CmMessage::ServiceReply(ServiceReply {
                request_id: local_id,
                status: from.byte(4),
                qpn: from.word(8) >> 8,
                service: from.long(12),
                qkey: from.word(20),
                private_data: from.bytes(96),
            }),
            _ => return None,
        };
        Some((transaction, message))
    }
}

/// Timeouts of the protocol, in units of 4.096 us to the power of two, and how often a message is repeated: what the kernel's manager says.
const REMOTE_TIMEOUT: u8 = 20;
const LOCAL_TIMEOUT: u8 = 20;
pub(super) const CM_RETRIES: u8 = 15;
/// Length of the additional information of a rejection that is a GUID.
const GUID_BYTES: u8 = 8;
/// `IB_RATE_200_GBPS`.
pub(super) const RATE: u8 = 17;

/// MadFields of a message, at offsets behind the header.
struct MadFields<'a>(&'a mut MadBytes);

impl MadFields<'_> {
    fn bytes(&mut self, at: usize, value: &[u8]) {
        let to = self.0.iter_mut().skip(HEADER_BYTES + at);
        for (to, from) in to.zip(value) {
            *to |= *from;
        }
    }

    fn byte(&mut self, at: usize, value: u8) {
        self.bytes(at, &[value]);
    }

    fn half(&mut self, at: usize, value: u16) {
        self.bytes(at, &value.to_be_bytes());
    }

    fn word(&mut self, at: usize, value: u32) {
        self.bytes(at, &value.to_be_bytes());
    }

    fn long(&mut self, at: usize, value: u64) {
        self.bytes(at, &value.to_be_bytes());
    }
}

struct View<'a>(&'a MadBytes);

impl View<'_> {
    fn bytes<const N: usize>(&self, at: usize) -> [u8; N] {
        let from = self.0.get(HEADER_BYTES + at..).unwrap_or_default();
        from.first_chunk().copied().unwrap_or([0; N])
    }

    fn byte(&self, at: usize) -> u8 {
        u8::from_be_bytes(self.bytes(at))
    }

    fn half(&self, at: usize) -> u16 {
        u16::from_be_bytes(self.bytes(at))
    }

    fn word(&self, at: usize) -> u32 {
        u32::from_be_bytes(self.bytes(at))
    }

    fn long(&self, at: usize) -> u64 {
        u64::from_be_bytes(self.bytes(at))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn golden_bytes_of_a_request() {
        let request = ConnectionRequest {
            local_id: 0x0102_0304,
            service: 0x0000_0000_0106_1c06,
            guid: 0x5c0f_7c00_0000_0001,
            qpn: 0x0a_0b0c,
            responder_resources: 7,
            initiator_depth: 9,
            transport: 0,
            flow_control: true,
            psn: 0x11_2233,
            retry_count: 7,
            rnr_retry_count: 6,
            pkey: 0xffff,
            mtu: 5,
            srq: true,
            lids: [1, 2],
            gids: [[0x11; 16], [0x22; 16]],
            traffic_class: 3,
            hop_limit: 64,
            sl: 2,
            ack_timeout: 17,
            private_data: [0xee; REQ_PRIVATE],
        };
        let mad = CmMessage::Request(request).encode(0x55);
        let mut want = [0; MAD_BYTES];
        let mut put = |at: usize, bytes: &[u8]| want[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &[1, 7, 2, 3]);
        put(15, &[0x55, 0, 0x10]);
        put(24, &[1, 2, 3, 4]);
        put(32, &[0, 0, 0, 0, 1, 6, 0x1c, 6]);
        put(40, &[0x5c, 0x0f, 0x7c, 0, 0, 0, 0, 1]);
        put(24 + 32, &[0xa, 0xb, 0xc, 7]);
        put(24 + 39, &[9]);
        put(24 + 43, &[20 << 3 | 1, 0x11, 0x22, 0x33, 20 << 3 | 7]);
        put(24 + 48, &[0xff, 0xff, 5 << 4 | 6, 15 << 4 | 8, 0, 1, 0, 2]);
        put(24 + 56, &[0x11; 16]);
        put(24 + 72, &[0x22; 16]);
        put(24 + 91, &[17, 3, 64, 2 << 4 | 8, 17 << 3]);
        put(24 + 140, &[0xee; 92]);
        assert_eq!(mad, want);
        assert_eq!(
            CmMessage::parse(&mad),
            Some((0x55, CmMessage::Request(request)))
        );
    }

    #[test]
    fn other_datagrams_are_no_messages() {
        let mad = CmMessage::ReadyToUse {
            local_id: 1,
            remote_id: 2,
        }
        .encode(3);
        assert!(CmMessage::parse(&mad).is_some());
        for (at, value) in [(0, 2), (1, 3), (2, 1), (3, 1), (17, 0x19)] {
            let mut other = mad;
            other[at] = value;
            assert_eq!(CmMessage::parse(&other), None, "byte {at}");
        }
    }

    proptest! {
        #[test]
        fn what_was_parsed_is_encoded_to_what_parses_alike(
            bytes in proptest::collection::vec(any::<u8>(), MAD_BYTES), attribute in 0x10_u8..0x19
        ) {
            let mut mad = MadBytes::try_from(bytes).unwrap();
            mad[..4].copy_from_slice(&[1, 7, 2, 3]);
            mad[16..18].copy_from_slice(&[0, attribute]);
            let (transaction, message) = CmMessage::parse(&mad).unwrap();
            prop_assert_eq!(CmMessage::parse(&message.encode(transaction)), Some((transaction, message)));
        }
    }
}
