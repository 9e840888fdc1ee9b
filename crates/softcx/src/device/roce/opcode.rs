//! The opcodes of the base transport header (IBTA 9.2.1, table 38), and the headers that follow it.

use crate::device::packet::{Header, PacketKind, Service, flag};

/// A congestion notification (annex A17.9.3): no packet of a transport.
pub(super) const CONGESTION_NOTICE: u8 = 0x81;

const UNRELIABLE: u8 = 0x20;
const DATAGRAM: u8 = 0x60;

/// What an opcode stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct OpcodeMeaning {
    pub(super) service: Service,
    pub(super) kind: PacketKind,
    /// Of [`flag`]: `FIRST`, `LAST`, `IMMEDIATE`, `INVALIDATE`.
    pub(super) flags: u8,
}

const MIDDLE: u8 = 0;
const ONLY: u8 = flag::FIRST | flag::LAST;
const IMM: u8 = flag::IMMEDIATE;
const INV: u8 = flag::INVALIDATE;

/// The opcodes of a reliable connection in their order. Those of the other services are the same ones under other upper bits.
const RELIABLE: [(PacketKind, u8); 0x18] = [
    (PacketKind::Send, flag::FIRST),
    (PacketKind::Send, MIDDLE),
    (PacketKind::Send, flag::LAST),
    (PacketKind::Send, flag::LAST | IMM),
    (PacketKind::Send, ONLY),
    (PacketKind::Send, ONLY | IMM),
    (PacketKind::Write, flag::FIRST),
    (PacketKind::Write, MIDDLE),
    (PacketKind::Write, flag::LAST),
    (PacketKind::Write, flag::LAST | IMM),
    (PacketKind::Write, ONLY),
    (PacketKind::Write, ONLY | IMM),
    (PacketKind::ReadRequest, ONLY),
    (PacketKind::ReadResponse, flag::FIRST),
    (PacketKind::ReadResponse, MIDDLE),
    (PacketKind::ReadResponse, flag::LAST),
    (PacketKind::ReadResponse, ONLY),
    (PacketKind::Ack, ONLY),
    (PacketKind::AtomicResponse, ONLY),
    (PacketKind::CompareSwap, ONLY),
    (PacketKind::FetchAdd, ONLY),
    // Resynchronization, of reliable datagrams only: never read or written.
    (PacketKind::Ack, 0xff),
    (PacketKind::Send, flag::LAST | INV),
    (PacketKind::Send, ONLY | INV),
];

impl OpcodeMeaning {
    /// What the opcode stands for. `None` for those of other services, and those that the service does not have.
    pub(super) fn parse(opcode: u8) -> Option<OpcodeMeaning> {
        let &(kind, flags) = RELIABLE.get(usize::from(opcode & 0x1f))?;
        let service = match opcode & 0xe0 {
            0 => Service::Reliable,
            UNRELIABLE => Service::Unreliable,
            DATAGRAM => Service::Datagram,
            _ => return None,
        };
        let moves_data = matches!(kind, PacketKind::Send | PacketKind::Write);
        let exists = match service {
            Service::Reliable => true,
            Service::Unreliable => moves_data && flags & INV == 0,
            Service::Datagram => {
                kind == PacketKind::Send && flags & ONLY == ONLY && flags & INV == 0
            }
        };
        (exists && flags != 0xff).then_some(OpcodeMeaning {
            service,
            kind,
            flags,
        })
    }

    /// The opcode of a packet. `None` if the service does not have such a packet.
    pub(super) fn opcode_of(header: &Header) -> Option<u8> {
        let flags = match header.kind {
            // They are of one packet always.
            PacketKind::ReadRequest
            | PacketKind::CompareSwap
            | PacketKind::FetchAdd
            | PacketKind::Ack
            | PacketKind::AtomicResponse => ONLY,
            PacketKind::ReadResponse => header.flags & ONLY,
            PacketKind::Send | PacketKind::Write => header.flags & (ONLY | IMM | INV),
        };
        let at = RELIABLE
            .iter()
            .position(|&meaning| meaning == (header.kind, flags))?;
        let upper = match header.service {
            Service::Reliable => 0,
            Service::Unreliable => UNRELIABLE,
            Service::Datagram => DATAGRAM,
        };
        let opcode = at as u8 | upper;
        OpcodeMeaning::parse(opcode).map(|_| opcode)
    }

    fn begins(self) -> bool {
        self.flags & flag::FIRST != 0
    }

    pub(super) fn has_datagram_header(self) -> bool {
        self.service == Service::Datagram
    }

    /// RETH: address, key and length of remote memory.
    pub(super) fn has_remote(self) -> bool {
        match self.kind {
            PacketKind::Write => self.begins(),
            kind => kind == PacketKind::ReadRequest,
        }
    }

    pub(super) fn is_atomic_request(self) -> bool {
        matches!(self.kind, PacketKind::CompareSwap | PacketKind::FetchAdd)
    }

    /// AETH: a code and the message sequence number. Responses in the middle of a read have none.
    pub(super) fn has_ack_header(self) -> bool {
        match self.kind {
            PacketKind::Ack | PacketKind::AtomicResponse => true,
            PacketKind::ReadResponse => self.flags & ONLY != 0,
            _ => false,
        }
    }

    pub(super) fn has_old_value(self) -> bool {
        self.kind == PacketKind::AtomicResponse
    }

    /// ImmDt or IETH, 4 bytes each.
    pub(super) fn has_word(self) -> bool {
        self.flags & (IMM | INV) != 0
    }

    /// Whether a payload may follow the headers.
    pub(super) fn has_payload(self) -> bool {
        matches!(
            self.kind,
            PacketKind::Send | PacketKind::Write | PacketKind::ReadResponse
        )
    }

    /// Bytes of all headers from the base transport header on.
    pub(super) fn header_bytes(self) -> usize {
        12 + usize::from(self.has_datagram_header()) * 8
            + usize::from(self.has_remote()) * 16
            + usize::from(self.is_atomic_request()) * 28
            + usize::from(self.has_ack_header()) * 4
            + usize::from(self.has_old_value()) * 8
            + usize::from(self.has_word()) * 4
    }
}
