//! Datagrams that have arrived.
#![allow(unsafe_code)] // a system call with many buffers

use std::mem::{size_of, zeroed};
use std::os::fd::{AsRawFd, OwnedFd};

use super::socket::{UDP_GRO, UdpSocketAddress};
use crate::device::roce::MAX_FRAME_BYTES;

/// Messages that one system call takes.
const BATCH: usize = 32;
/// A message: one datagram, or several of one flow.
const STRIDE: usize = 0x1_0000;
/// Room for the control messages about one message.
const CONTROL_BYTES: usize = 96;

/// A datagram.
#[derive(Debug)]
pub(crate) struct UdpArrival<'a> {
    /// The address that it comes from, as a GID.
    pub(crate) from: [u8; 16],
    pub(crate) source_port: u16,
    pub(crate) traffic_class: u8,
    pub(crate) hop_limit: u8,
    /// Its place in its message, which is the identification of its IPv4 header if it was sent with these others.
    pub(crate) identification: u16,
    pub(crate) bytes: &'a [u8],
}

#[derive(Debug, Clone, Copy, Default)]
struct ArrivalNote {
    from: Option<([u8; 16], u16)>,
    marks: ArrivalMarks,
    len_bytes: usize,
}

/// What control messages say of a message.
#[derive(Debug, Clone, Copy, Default)]
struct ArrivalMarks {
    traffic_class: u8,
    hop_limit: u8,
    /// The length of its datagrams, of which the last may be shorter; 0 if it is one.
    segment_bytes: usize,
}

/// The messages of one system call.
#[derive(Debug)]
pub(crate) struct Arrivals {
    bytes: Box<[u8]>,
    notes: [ArrivalNote; BATCH],
}

#[repr(align(8))]
#[derive(Clone, Copy)]
struct ControlBuffer(#[expect(dead_code, reason = "the kernel fills it")] [u8; CONTROL_BYTES]);

impl Arrivals {
    pub(super) fn new() -> Arrivals {
        Arrivals {
            bytes: vec![0; BATCH * STRIDE].into_boxed_slice(),
            notes: [ArrivalNote::default(); BATCH],
        }
    }

    pub(super) fn receive(&mut self, socket: &OwnedFd) -> (usize, bool) {
        let mut names = [UdpSocketAddress::zero(); BATCH];
        let mut controls = [ControlBuffer([0; CONTROL_BYTES]); BATCH];
        let mut buffers = [libc::iovec {
            iov_base: std::ptr::null_mut(),
            iov_len: STRIDE,
        }; BATCH];
        // SAFETY: all zeros is a message without buffers.
        let mut messages: [libc::mmsghdr; BATCH] = unsafe { zeroed() };
        let slots = self.bytes.chunks_exact_mut(STRIDE);
        for (at, slot) in slots.enumerate().take(BATCH) {
            buffers[at].iov_base = slot.as_mut_ptr().cast();
            let message = &mut messages[at].msg_hdr;
            message.msg_name = (&raw mut names[at]).cast();
            message.msg_namelen = size_of::<UdpSocketAddress>() as libc::socklen_t;
            message.msg_iov = &raw mut buffers[at];
            message.msg_iovlen = 1;
            message.msg_control = (&raw mut controls[at]).cast();
            message.msg_controllen = CONTROL_BYTES as _;
        }
        // SAFETY: each message has a name, a buffer and room for control messages of these lengths, which outlive the call.
        let got = unsafe {
            libc::recvmmsg(
                socket.as_raw_fd(),
                messages.as_mut_ptr(),
                BATCH as libc::c_uint,
                libc::MSG_DONTWAIT as _,
                std::ptr::null_mut(),
            )
        };
        let got = usize::try_from(got).unwrap_or(0);
        for at in 0..got {
            let message = &messages[at];
            let is_whole = message.msg_hdr.msg_flags & libc::MSG_TRUNC == 0;
            self.notes[at] = ArrivalNote {
                from: names[at].gid_and_port().filter(|_| is_whole),
                marks: marks(&message.msg_hdr),
                len_bytes: (message.msg_len as usize).min(STRIDE),
            };
        }
        (got, got == BATCH)
    }

    /// The datagrams of a message of the last call; `None` for each that is longer than any frame.
    pub(crate) fn get(&self, at: usize) -> impl Iterator<Item = Option<UdpArrival<'_>>> {
        let note = self.notes.get(at).copied().unwrap_or_default();
        let segment_bytes = match note.marks.segment_bytes {
            0 => STRIDE,
            bytes => bytes,
        };
        // Also an empty datagram is one.
        let count = note.len_bytes.div_ceil(segment_bytes).max(1);
        (0..count).map(move |place| {
            let (from, source_port) = note.from?;
            let start = place * segment_bytes;
            let end = (start + segment_bytes).min(note.len_bytes);
            let bytes = self.bytes.get(at * STRIDE + start..at * STRIDE + end)?;
            (bytes.len() <= MAX_FRAME_BYTES).then_some(UdpArrival {
                from,
                source_port,
                traffic_class: note.marks.traffic_class,
                hop_limit: note.marks.hop_limit,
                identification: place as u16,
                bytes,
            })
        })
    }
}

/// What the control messages of a message say.
fn marks(message: &libc::msghdr) -> ArrivalMarks {
    let mut marks = ArrivalMarks::default();
    // SAFETY: the kernel has filled the control messages of this header.
    let mut control = unsafe { libc::CMSG_FIRSTHDR(message) };
    while !control.is_null() {
        // SAFETY: within the control messages, as the macros have it; the first byte of the data is there. On a little-endian machine it is the low
        // byte of an int, and the type of service is one byte.
        let (level, kind, value) = unsafe {
            let data = libc::CMSG_DATA(control);
            let value = if (*control).cmsg_len as usize >= libc::CMSG_LEN(4) as usize {
                data.cast::<i32>().read_unaligned()
            } else {
                i32::from(data.read())
            };
            ((*control).cmsg_level, (*control).cmsg_type, value)
        };
        match (level, kind) {
            (libc::IPPROTO_IP, libc::IP_TOS) | (libc::IPPROTO_IPV6, libc::IPV6_TCLASS) => {
                marks.traffic_class = value as u8;
            }
            (libc::IPPROTO_IP, libc::IP_TTL) | (libc::IPPROTO_IPV6, libc::IPV6_HOPLIMIT) => {
                marks.hop_limit = value as u8;
            }
            (libc::SOL_UDP, UDP_GRO) => {
                marks.segment_bytes = usize::try_from(value).unwrap_or(0);
            }
            _ => {}
        }
        // SAFETY: as above.
        control = unsafe { libc::CMSG_NXTHDR(message, control) };
    }
    marks
}
