//! How many packets may be on their way to another host. A socket's buffers lose what is too much for them, so the window follows what arrives:
//! it grows with acknowledgements and shrinks with losses and notices of congestion (additive increase, multiplicative decrease).

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
}

impl Default for FlowWindow {
    fn default() -> FlowWindow {
        FlowWindow {
            packets: FIRST,
            arrived: 0,
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

    /// A packet was lost, or the network says that it is congested.
    pub(super) fn shrink(&mut self) {
        self.packets = (self.packets / 2).max(READ_CHUNK);
        self.arrived = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn window_halves_and_grows_by_one_a_round_within_its_bounds() {
        let mut window = FlowWindow::default();
        window.shrink();
        assert_eq!(window.packets(), FIRST / 2);
        window.grow(FIRST / 2);
        assert_eq!(window.packets(), FIRST / 2 + 1);
        (0..9).for_each(|_| window.shrink());
        assert_eq!(window.packets(), READ_CHUNK);
        window.grow(1_000_000);
        assert_eq!(window.packets(), WINDOW);
    }
}
