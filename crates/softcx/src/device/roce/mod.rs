//! RoCE v2: packets of the transport as bytes on an Ethernet (IBTA volume 1, chapter 9, and annex A17).
//!
//! | file | what |
//! |---|---|
//! | `opcode.rs` | the opcodes of the base transport header, and which headers follow each |
//! | `transport.rs` | from a [`Header`](crate::device::packet::Header) to these headers, and back |
//! | `check.rs` | the invariant CRC |
//! | `frame.rs` | the IP and UDP headers around them, for the CRC and for captures |
//!
//! Nothing here has state or does I/O.

mod check;
mod frame;
mod opcode;
#[cfg(test)]
mod tests;
mod transport;

pub(crate) use self::frame::{RoutedFields, UdpFlow, frame_header, gid_of_address, is_ipv4};
pub use self::transport::{BadFrame, RoceFrame};
pub(crate) use self::transport::{
    CongestionNotice, MAX_FRAME_BYTES, MAX_HEADER_BYTES, notice_bytes, partition_of, read_frame,
    renumber_frame, seal_frame, write_headers,
};

/// The UDP port of RoCE v2.
pub(crate) const ROCE_PORT: u16 = 4791;
