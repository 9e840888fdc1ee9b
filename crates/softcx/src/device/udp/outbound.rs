//! Frames that are to leave.
#![allow(unsafe_code)] // a system call with many buffers

use std::collections::HashSet;
use std::io;
use std::mem::{size_of, zeroed};
use std::os::fd::{AsRawFd, OwnedFd};

use super::socket::{UDP_SEGMENT, UdpSocketAddress, takes_segments};
use crate::device::roce::{MAX_FRAME_BYTES, ROCE_PORT, is_ipv4, renumber_frame};

/// Frames that one system call sends.
const BATCH: usize = 32;
const STRIDE: usize = MAX_FRAME_BYTES.next_multiple_of(64);
/// All datagrams of one message: an IP packet without its headers.
const MESSAGE_BYTES: usize = 0xffff - 40 - 8;

#[repr(align(8))]
#[derive(Clone, Copy)]
struct SegmentControl([u8; 24]);

/// A frame that is ready to leave.
#[derive(Debug, Clone, Copy)]
struct ReadyFrame {
    slot: usize,
    to: [u8; 16],
    flow: usize,
    len_bytes: usize,
    /// The identification of the IPv4 header that its CRC is for.
    identification: u16,
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
    /// A message may hold several frames.
    takes_segments: bool,
    /// But not to these hosts.
    without_segments: HashSet<[u8; 16]>,
}

impl Departures {
    pub(super) fn new(flows: Vec<(OwnedFd, u16)>) -> Departures {
        Departures {
            bytes: vec![0; BATCH * STRIDE].into_boxed_slice(),
            frames: Vec::with_capacity(BATCH),
            used: 0,
            left: 0,
            takes_segments: flows.iter().all(|(socket, _)| takes_segments(socket)),
            without_segments: HashSet::new(),
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
            identification: 0,
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
            let (flow, to) = (first.flow, first.to);
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
                Err(error) => {
                    let count = self.message_of(self.left, run);
                    if count > 1 && is_about_segments(&error) {
                        self.without_segments.insert(to);
                        continue;
                    }
                    // No route, a filter, or longer than the interface takes: lost, as in a network.
                    refused += count as u64;
                    self.left += count;
                }
            }
        }
        self.frames.clear();
        (self.used, self.left) = (0, 0);
        (true, refused)
    }

    /// How many of the `run` frames from `first` on go into one message: of one length, but for the last, which may be shorter, to one host.
    fn message_of(&self, first: usize, run: usize) -> usize {
        let frames = &self.frames[first..first + run];
        let may = self.takes_segments
            && frames
                .first()
                .is_some_and(|frame| !self.without_segments.contains(&frame.to));
        if !may {
            return run.min(1);
        }
        let (mut count, mut bytes) = (0, 0);
        for frame in frames {
            let is_next = frame.to == frames[0].to && frame.len_bytes <= frames[0].len_bytes;
            if !is_next || bytes + frame.len_bytes > MESSAGE_BYTES {
                break;
            }
            (count, bytes) = (count + 1, bytes + frame.len_bytes);
            if frame.len_bytes < frames[0].len_bytes {
                break;
            }
        }
        count
    }

    /// Sends frames of one flow. Returns how many.
    fn send_run(&mut self, flow: usize, run: usize) -> io::Result<usize> {
        let run = run.min(BATCH);
        let mut names = [UdpSocketAddress::zero(); BATCH];
        let mut buffers = [libc::iovec {
            iov_base: std::ptr::null_mut(),
            iov_len: 0,
        }; BATCH];
        let mut controls = [SegmentControl([0; 24]); BATCH];
        // SAFETY: all zeros is a message without buffers.
        let mut messages: [libc::mmsghdr; BATCH] = unsafe { zeroed() };
        let mut counts = [0; BATCH];
        let (mut done, mut used) = (0, 0);
        while done < run {
            let first = self.left + done;
            let count = self.message_of(first, run - done);
            for at in 0..count {
                buffers[done + at] = self
                    .buffer(first + at, at as u16)
                    .ok_or(io::ErrorKind::InvalidInput)?;
            }
            let frame = self.frames[first];
            names[used] = UdpSocketAddress::of_gid(&frame.to, ROCE_PORT);
            let message = &mut messages[used].msg_hdr;
            message.msg_name = (&raw mut names[used]).cast();
            message.msg_namelen = names[used].len();
            message.msg_iov = &raw mut buffers[done];
            message.msg_iovlen = count as _;
            if count > 1 {
                let control = &mut controls[used];
                message.msg_control = (&raw mut control.0).cast();
                message.msg_controllen = size_of::<SegmentControl>() as _;
                // SAFETY: the control buffer is aligned, and has room for one message with two bytes.
                unsafe {
                    let header = libc::CMSG_FIRSTHDR(message);
                    (*header).cmsg_level = libc::SOL_UDP;
                    (*header).cmsg_type = UDP_SEGMENT;
                    (*header).cmsg_len = libc::CMSG_LEN(2) as _;
                    libc::CMSG_DATA(header)
                        .cast::<u16>()
                        .write_unaligned(frame.len_bytes as u16);
                }
            }
            counts[used] = count;
            (done, used) = (done + count, used + 1);
        }
        let Some((socket, _)) = self.flows.get(flow) else {
            return Err(io::ErrorKind::NotConnected.into());
        };
        // SAFETY: each message has a name, buffers and control messages of these lengths, which outlive the call.
        let sent = unsafe {
            libc::sendmmsg(
                socket.as_raw_fd(),
                messages.as_mut_ptr(),
                used as libc::c_uint,
                (libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) as _,
            )
        };
        let sent = usize::try_from(sent).map_err(|_| io::Error::last_os_error())?;
        Ok(counts.iter().take(sent).sum())
    }

    /// A frame with the CRC for its place in its message: the kernel numbers the datagrams of one by the identification of the IPv4 header.
    fn buffer(&mut self, at: usize, identification: u16) -> Option<libc::iovec> {
        let frame = self.frames.get_mut(at)?;
        let start = frame.slot * STRIDE;
        let bytes = self.bytes.get_mut(start..start + frame.len_bytes)?;
        if frame.identification != identification && is_ipv4(&frame.to) {
            renumber_frame(bytes, frame.identification, identification);
            frame.identification = identification;
        }
        Some(libc::iovec {
            iov_base: bytes.as_mut_ptr().cast(),
            iov_len: frame.len_bytes,
        })
    }
}

/// Whether the way of a message takes no several frames in one: through an interface that makes no checksums, or that has a shorter MTU.
fn is_about_segments(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::EIO | libc::EINVAL | libc::EMSGSIZE)
    )
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::collections::BTreeSet;
    use std::net::{IpAddr, UdpSocket};

    use super::*;
    use crate::device::roce::{UdpFlow, gid_of_address, seal_frame};
    use crate::device::udp::socket;

    const SENDER: &str = "127.77.0.1";
    /// Of each frame its length without the CRC, its host, and its place in its message: frames of one message have one length, but for the last.
    const FRAMES: [(usize, usize, u16); 12] = [
        (400, 0, 0),
        (400, 0, 1),
        (400, 0, 2),
        (100, 0, 3),
        (400, 0, 0),
        (100, 1, 0),
        (100, 0, 0),
        (4100, 0, 0),
        (4100, 1, 0),
        (60, 0, 0),
        (400, 0, 0),
        (400, 0, 1),
    ];

    #[test]
    fn a_connection_has_one_source_port_and_many_have_all() {
        let own = |_| {
            let flow = socket::bind(IpAddr::from([127, 0, 0, 1]), 0).unwrap();
            let port = socket::port_of(&flow).unwrap();
            (flow, port)
        };
        let departures = Departures::new((0..4).map(own).collect());
        let mut ports = BTreeSet::new();
        for qpn in 0..64 {
            let (flow, port) = departures.flow(qpn, 7 * qpn + 1);
            assert_eq!(departures.flow(qpn, 7 * qpn + 1), (flow, port));
            assert_eq!(departures.flows[flow].1, port);
            ports.insert(port);
        }
        assert_eq!(ports.len(), 4);
    }

    /// The kernel takes messages apart for a socket that has not asked for them. That it numbers the datagrams so is checked where SoftRoCE is the peer.
    #[test]
    fn frames_of_one_message_arrive_one_by_one_with_a_crc_for_their_place() {
        for (round, takes) in [(0, true), (1, false)] {
            let hosts = [2, 3].map(|host| format!("127.77.{round}.{host}"));
            let sockets = hosts.each_ref().map(|host| {
                let socket = UdpSocket::bind((host.as_str(), ROCE_PORT)).unwrap();
                socket.set_nonblocking(true).unwrap();
                socket
            });
            let flow = socket::bind(SENDER.parse().unwrap(), 0).unwrap();
            let port = socket::port_of(&flow).unwrap();
            if !takes {
                without_checksums(&flow);
            }
            let gid = |host: &str| gid_of_address(host.parse::<IpAddr>().unwrap());
            let ends = |host: usize, identification| UdpFlow {
                from: gid(SENDER),
                to: gid(&hosts[host]),
                source_port: port,
                identification,
            };
            let mut departures = Departures::new(vec![(flow, port)]);
            assert!(departures.takes_segments, "a kernel older than 4.18");
            for (ahead, (len, host, _)) in FRAMES.into_iter().enumerate() {
                let frame = departures.slot(ahead).unwrap();
                frame[..len].fill(ahead as u8);
                let len_bytes = seal_frame(&ends(host, 0), frame, len);
                departures.push(ahead, gid(&hosts[host]), 0, len_bytes);
            }
            departures.use_slots(FRAMES.len());
            assert_eq!(departures.send(), (true, 0));
            let refused = (!takes).then(|| gid(&hosts[0]));
            assert_eq!(
                departures.without_segments,
                refused.into_iter().collect(),
                "only one host was sent several frames at once"
            );
            for (ahead, (len, host, place)) in FRAMES.into_iter().enumerate() {
                let mut expected = [ahead as u8; MAX_FRAME_BYTES];
                let place = if takes { place } else { 0 };
                let len_bytes = seal_frame(&ends(host, place), &mut expected, len);
                let mut got = [0; MAX_FRAME_BYTES + 1];
                let (got_bytes, from) = sockets[host].recv_from(&mut got).unwrap();
                assert_eq!(got[..got_bytes], expected[..len_bytes], "{takes} {ahead}");
                assert_eq!(from.port(), port);
            }
            for socket in &sockets {
                assert!(socket.recv_from(&mut [0; 8]).is_err());
            }
        }
    }

    #[test]
    fn frames_without_a_route_are_lost_and_change_nothing_for_others() {
        let flow = socket::bind(SENDER.parse().unwrap(), 0).unwrap();
        let mut departures = Departures::new(vec![(flow, 0)]);
        // The kernel refuses broadcasts of sockets that have not asked for them (EACCES).
        let broadcast = gid_of_address("255.255.255.255".parse::<IpAddr>().unwrap());
        let host = gid_of_address("127.77.2.2".parse::<IpAddr>().unwrap());
        for (ahead, to) in [broadcast, broadcast, broadcast, host, host]
            .into_iter()
            .enumerate()
        {
            departures.push(ahead, to, 0, 400);
        }
        departures.use_slots(5);
        assert_eq!(departures.send(), (true, 3));
        assert!(departures.without_segments.is_empty());
    }

    /// The kernel takes no message of several datagrams from a socket whose datagrams have no checksum.
    fn without_checksums(socket: &OwnedFd) {
        let on: libc::c_int = 1;
        // SAFETY: the option is an integer.
        let rc = unsafe {
            libc::setsockopt(
                socket.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_NO_CHECK,
                (&raw const on).cast(),
                size_of_val(&on) as libc::socklen_t,
            )
        };
        assert_eq!(rc, 0);
    }
}
