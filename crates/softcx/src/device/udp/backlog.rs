//! Whether a device of this host has datagrams that it has not read: its threads have got no processor, and nothing is lost.

use std::net::{IpAddr, Ipv6Addr};

use crate::device::roce::ROCE_PORT;

/// How long an answer is used again.
const FRESH_NS: u64 = 200_000;

/// The last answer, with its address and its time.
#[derive(Debug, Default)]
pub(crate) struct PeerBacklog(Option<([u8; 16], u64, bool)>);

impl PeerBacklog {
    /// Whether the device at that address is one of this host and has datagrams that it has not read.
    #[cold]
    pub(crate) fn is_unread(&mut self, gid: &[u8; 16], now_ns: u64) -> bool {
        match self.0 {
            Some((of, at_ns, is_unread)) if of == *gid && now_ns.wrapping_sub(at_ns) < FRESH_NS => {
                is_unread
            }
            _ => {
                let is_unread = ask(gid);
                self.0 = Some((*gid, now_ns, is_unread));
                is_unread
            }
        }
    }
}

fn ask(gid: &[u8; 16]) -> bool {
    let (file, address) = match Ipv6Addr::from(*gid).to_canonical() {
        IpAddr::V4(address) => ("/proc/net/udp", words(&address.octets())),
        IpAddr::V6(address) => ("/proc/net/udp6", words(&address.octets())),
    };
    let wanted = format!("{address}:{ROCE_PORT:04X}");
    let Ok(sockets) = std::fs::read_to_string(file) else {
        return false;
    };
    sockets
        .lines()
        .any(|line| queued(line, &wanted).is_some_and(|bytes| bytes > 0))
}

/// An address as the kernel writes it: words in the byte order of the machine.
fn words(octets: &[u8]) -> String {
    let words = octets.as_chunks::<4>().0.iter();
    words
        .map(|word| format!("{:08X}", u32::from_ne_bytes(*word)))
        .collect()
}

/// The bytes that wait in the socket of a line, if it is at that address.
fn queued(line: &str, wanted: &str) -> Option<u64> {
    let mut fields = line.split_whitespace();
    let local = fields.nth(1)?;
    let (_, received) = fields.nth(2)?.split_once(':')?;
    let bytes = u64::from_str_radix(received, 16).ok()?;
    (local == wanted).then_some(bytes)
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;

    use super::*;
    use crate::device::roce::gid_of_address;

    #[test]
    fn line_of_the_kernel_is_read() {
        let line = "15619: 0100007F:12B7 00000000:0000 07 00000000:00000340 00:00000000 00000000     0        0 15285532 2 0000000039bfff27 17";
        assert_eq!(queued(line, "0100007F:12B7"), Some(0x340));
        assert_eq!(queued(line, "0200007F:12B7"), None);
        assert_eq!(queued("sl local_address", "0100007F:12B7"), None);
        #[cfg(target_endian = "little")]
        assert_eq!(words(&[127, 0, 0, 1]), "0100007F");
    }

    #[test]
    fn datagram_that_nobody_reads_is_found() {
        let address = "127.8.7.6".parse().unwrap();
        let (gid, mut backlog) = (gid_of_address(address), PeerBacklog::default());
        assert!(!backlog.is_unread(&gid, 0));
        let socket = UdpSocket::bind((address, ROCE_PORT)).unwrap();
        socket.send_to(b"x", (address, ROCE_PORT)).unwrap();
        assert!(!backlog.is_unread(&gid, FRESH_NS - 1), "not asked again");
        assert!(backlog.is_unread(&gid, FRESH_NS));
        socket.recv(&mut [0; 4]).unwrap();
        assert!(!backlog.is_unread(&gid, 2 * FRESH_NS));
    }
}
