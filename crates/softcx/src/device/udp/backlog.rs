//! Whether a device of this host has datagrams that it has not read: its threads have got no processor, and nothing is lost but what its socket
//! has dropped.

use std::net::{IpAddr, Ipv6Addr};

use crate::device::roce::ROCE_PORT;

/// How long an answer is used again.
const FRESH_NS: u64 = 200_000;

/// The last answer, with its address and its time.
#[derive(Debug, Default)]
pub(crate) struct PeerBacklog(Option<([u8; 16], u64, Option<i64>)>);

impl PeerBacklog {
    /// If the device at that address is one of this host and has datagrams that it has not read: how many its socket has dropped.
    #[cold]
    pub(crate) fn unread(&mut self, gid: &[u8; 16], now_ns: u64) -> Option<i64> {
        match self.0 {
            Some((of, at_ns, drops)) if of == *gid && now_ns.wrapping_sub(at_ns) < FRESH_NS => {
                drops
            }
            _ => {
                let drops = ask(gid);
                self.0 = Some((*gid, now_ns, drops));
                drops
            }
        }
    }
}

fn ask(gid: &[u8; 16]) -> Option<i64> {
    let (file, address) = match Ipv6Addr::from(*gid).to_canonical() {
        IpAddr::V4(address) => ("/proc/net/udp", words(&address.octets())),
        IpAddr::V6(address) => ("/proc/net/udp6", words(&address.octets())),
    };
    let wanted = format!("{address}:{ROCE_PORT:04X}");
    let sockets = std::fs::read_to_string(file).ok()?;
    let at = sockets.lines().find_map(|line| queue_at(line, &wanted));
    at.and_then(|(bytes, drops)| (bytes > 0).then_some(drops))
}

/// An address as the kernel writes it: words in the byte order of the machine.
fn words(octets: &[u8]) -> String {
    let words = octets.as_chunks::<4>().0.iter();
    words
        .map(|word| format!("{:08X}", u32::from_ne_bytes(*word)))
        .collect()
}

/// The bytes that wait in the socket of a line, and the datagrams that it has dropped, if it is at that address.
fn queue_at(line: &str, wanted: &str) -> Option<(u64, i64)> {
    let mut fields = line.split_whitespace();
    let local = fields.nth(1)?;
    let (_, received) = fields.nth(2)?.split_once(':')?;
    let bytes = u64::from_str_radix(received, 16).ok()?;
    // The last column. The kernel counts in an int.
    let drops = fields.next_back()?.parse().ok()?;
    (local == wanted).then_some((bytes, drops))
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;

    use super::*;
    use crate::device::roce::gid_of_address;

    #[test]
    fn line_of_the_kernel_is_read() {
        let line = "15619: 0100007F:12B7 00000000:0000 07 00000000:00000340 00:00000000 00000000     0        0 15285532 2 0000000039bfff27 17";
        assert_eq!(queue_at(line, "0100007F:12B7"), Some((0x340, 17)));
        assert_eq!(queue_at(line, "0200007F:12B7"), None);
        assert_eq!(queue_at("sl local_address", "0100007F:12B7"), None);
        #[cfg(target_endian = "little")]
        assert_eq!(words(&[127, 0, 0, 1]), "0100007F");
    }

    #[test]
    fn datagram_that_nobody_reads_is_found() {
        let address = "127.8.7.6".parse().unwrap();
        let (gid, mut backlog) = (gid_of_address(address), PeerBacklog::default());
        assert_eq!(backlog.unread(&gid, 0), None);
        let socket = UdpSocket::bind((address, ROCE_PORT)).unwrap();
        socket.send_to(b"x", (address, ROCE_PORT)).unwrap();
        assert_eq!(backlog.unread(&gid, FRESH_NS - 1), None, "not asked again");
        assert_eq!(backlog.unread(&gid, FRESH_NS), Some(0));
        // Until its buffer is full, and some of them are dropped.
        let mut now_ns = FRESH_NS;
        while backlog.unread(&gid, now_ns).is_some_and(|drops| drops == 0) {
            assert!(now_ns < 10_000 * FRESH_NS, "no end of the buffer");
            now_ns += FRESH_NS;
            for _ in 0..100 {
                socket.send_to(&[0; 4096], (address, ROCE_PORT)).unwrap();
            }
        }
        assert!(backlog.unread(&gid, now_ns).is_some_and(|drops| drops > 0));
        socket.set_nonblocking(true).unwrap();
        while socket.recv(&mut [0; 4]).is_ok() {}
        assert_eq!(backlog.unread(&gid, now_ns + FRESH_NS), None);
    }
}
