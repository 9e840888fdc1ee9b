//! How many packets may be on their way to another host. A socket's buffers lose what is too much for them, so the window follows what arrives:
//! it grows with acknowledgements and shrinks with losses and notices of congestion (additive increase, multiplicative decrease).

use crate::device::congestion::CongestionCuts;

/// The most packets on their way, also between devices of one host, whose lanes lose nothing.
pub(super) const WINDOW: u32 = 256;
const FIRST: u32 = 64;
/// The least. A read asks for so many packets at once, so that its responses fit into any window.
pub(super) const READ_CHUNK: u32 = 16;
/// In every so many packets one asks for an acknowledgement: the smallest window has one.
pub(super) const ACK_EVERY: u32 = 16;

#[derive(Debug, Clone, Copy)]
pub(super) struct FlowWindow {
    packets: u32,
    /// Packets that have arrived since the window last grew.
    arrived: u32,
    cuts: CongestionCuts,
}

impl Default for FlowWindow {
    fn default() -> FlowWindow {
        FlowWindow {
            packets: FIRST,
            arrived: 0,
            cuts: CongestionCuts::default(),
        }
    }
}

impl FlowWindow {
    pub(super) fn packets(&self) -> u32 {
        self.packets
    }

    /// So many packets have arrived: one packet more for each window of them.
    pub(super) fn grow(&mut self, arrived: u32) {
        self.arrived += arrived;
        while self.arrived >= self.packets {
            self.arrived -= self.packets;
            self.packets = (self.packets + 1).min(WINDOW);
        }
    }

    /// A packet was lost.
    pub(super) fn shrink(&mut self, now_ns: u64) {
        self.cuts.record(now_ns);
        self.halve();
    }

    /// The network says that it is congested. Each packet that comes through the congestion brings such a notice, at most one in some 50 us, but it
    /// is one congestion, as is that which has lost packets.
    pub(super) fn shrink_for_notice(&mut self, now_ns: u64) {
        if self.cuts.take(now_ns) {
            self.halve();
        }
    }

    fn halve(&mut self) {
        self.packets = (self.packets / 2).max(READ_CHUNK);
        self.arrived = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::congestion::CONGESTION_NS;

    #[test]
    fn window_halves_and_grows_by_one_a_round_within_its_bounds() {
        let mut window = FlowWindow::default();
        window.shrink(0);
        assert_eq!(window.packets(), FIRST / 2);
        window.grow(FIRST / 2);
        assert_eq!(window.packets(), FIRST / 2 + 1);
        (0..9).for_each(|_| window.shrink(0));
        assert_eq!(window.packets(), READ_CHUNK);
        window.grow(1_000_000);
        assert_eq!(window.packets(), WINDOW);
    }

    #[test]
    fn notices_of_one_congestion_halve_the_window_once() {
        let mut window = FlowWindow::default();
        window.grow(1_000_000);
        let mut notices = |from_ns: u64| {
            (0..20).for_each(|notice| window.shrink_for_notice(from_ns + notice * 40_000));
            window.packets()
        };
        assert_eq!(notices(10), WINDOW / 2);
        assert_eq!(notices(10 + CONGESTION_NS), WINDOW / 4);
        // A loss counts always, and is of the congestion that the notices tell of.
        let from_ns = 10 + 3 * CONGESTION_NS;
        (0..2).for_each(|_| window.shrink(from_ns));
        assert_eq!(window.packets(), WINDOW / 16);
        window.grow(1_000_000);
        (0..20).for_each(|notice| window.shrink_for_notice(from_ns + notice * 40_000));
        assert_eq!(window.packets(), WINDOW);
    }
}
