//! Frames that are to leave.
#![allow(unsafe_code)] // a system call with many buffers

use std::io;
use std::mem::zeroed;
use std::os::fd::{AsRawFd, OwnedFd};

use super::socket::UdpSocketAddress;
use crate::device::roce::{MAX_FRAME_BYTES, ROCE_PORT};

/// Frames that one system call sends.
const BATCH: usize = 32;
const STRIDE: usize = MAX_FRAME_BYTES.next_multiple_of(64);

/// A frame that is ready to leave.
#[derive(Debug, Clone, Copy)]
struct ReadyFrame {
    slot: usize,
    to: [u8; 16],
    flow: usize,
    len_bytes: usize,
}

/// Frames that are built, and the sockets that they leave by.
#[derive(Debug)]
pub(crate) struct Departures {
    bytes: Box<[u8]>,
    frames: Vec<ReadyFrame>,
    /// Slots that are in use, from the first.
    used: usize,
    /// So many of `frames` have left.
    left: usize,
    flows: Vec<(OwnedFd, u16)>,
}

impl Departures {
    pub(super) fn new(flows: Vec<(OwnedFd, u16)>) -> Departures {
        Departures {
            bytes: vec![0; BATCH * STRIDE].into_boxed_slice(),
            frames: Vec::with_capacity(BATCH),
            used: 0,
            left: 0,
            flows,
        }
    }

    /// Has everything that leaves bear the mark of a congested router.
    #[cfg(test)]
    pub(crate) fn mark_congested(&self) {
        self.flows
            .iter()
            .for_each(|(socket, _)| super::socket::mark_congested(socket));
    }

    /// How many frames there is room for.
    pub(crate) fn room(&self) -> usize {
        BATCH - self.used
    }

    /// Whether nothing is ready.
    pub(crate) fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }

    /// The flow of a queue pair's packets, and its port.
    pub(crate) fn flow(&self, source_qpn: u32, dst_qpn: u32) -> (usize, u16) {
        let hash = source_qpn.wrapping_mul(0x9e37_79b1) ^ dst_qpn.wrapping_mul(0x85eb_ca6b);
        let flow = (hash >> 16) as usize % self.flows.len().max(1);
        (flow, self.flows.get(flow).map_or(0, |(_, port)| *port))
    }

    /// Where the frame `ahead` places behind those that are in use is built.
    pub(crate) fn slot(&mut self, ahead: usize) -> Option<&mut [u8]> {
        let at = (self.used + ahead) * STRIDE;
        self.bytes.get_mut(at..at + MAX_FRAME_BYTES)
    }

    /// The frame in this slot is ready.
    pub(crate) fn push(&mut self, ahead: usize, to: [u8; 16], flow: usize, len_bytes: usize) {
        self.frames.push(ReadyFrame {
            slot: self.used + ahead,
            to,
            flow,
            len_bytes,
        });
    }

    /// The next slots are in use until all has left, whether frames are ready there or not.
    pub(crate) fn use_slots(&mut self, count: usize) {
        self.used += count;
    }

    /// Sends what is ready. Returns whether all of it has left, and how many frames the kernel refused for good.
    pub(crate) fn send(&mut self) -> (bool, u64) {
        let mut refused = 0;
        while let Some(first) = self.frames.get(self.left) {
            let flow = first.flow;
            let run = self.frames[self.left..]
                .iter()
                .take_while(|frame| frame.flow == flow)
                .count();
            match self.send_run(flow, run) {
                Ok(sent) => self.left += sent,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    return (false, refused);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // No route, or longer than the interface takes: lost, as in a network.
                Err(_) => {
                    refused += 1;
                    self.left += 1;
                }
            }
        }
        self.frames.clear();
        (self.used, self.left) = (0, 0);
        (true, refused)
    }

    fn send_run(&mut self, flow: usize, run: usize) -> io::Result<usize> {
        let mut names = [UdpSocketAddress::zero(); BATCH];
        let mut buffers = [libc::iovec {
            iov_base: std::ptr::null_mut(),
            iov_len: 0,
        }; BATCH];
        // SAFETY: all zeros is a message without buffers.
        let mut messages: [libc::mmsghdr; BATCH] = unsafe { zeroed() };
        let frames = self.frames.iter().skip(self.left).take(run);
        for (at, frame) in frames.enumerate() {
            names[at] = UdpSocketAddress::of_gid(&frame.to, ROCE_PORT);
            let start = frame.slot * STRIDE;
            let Some(bytes) = self.bytes.get_mut(start..start + frame.len_bytes) else {
                return Err(io::ErrorKind::InvalidInput.into());
            };
            buffers[at].iov_base = bytes.as_mut_ptr().cast();
            buffers[at].iov_len = frame.len_bytes;
            let message = &mut messages[at].msg_hdr;
            message.msg_name = (&raw mut names[at]).cast();
            message.msg_namelen = names[at].len();
            message.msg_iov = &raw mut buffers[at];
            message.msg_iovlen = 1;
        }
        let Some((socket, _)) = self.flows.get(flow) else {
            return Err(io::ErrorKind::NotConnected.into());
        };
        // SAFETY: each message has a name and a buffer of these lengths, which outlive the call.
        let sent = unsafe {
            libc::sendmmsg(
                socket.as_raw_fd(),
                messages.as_mut_ptr(),
                run.min(BATCH) as libc::c_uint,
                (libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) as _,
            )
        };
        usize::try_from(sent).map_err(|_| io::Error::last_os_error())
    }
}
