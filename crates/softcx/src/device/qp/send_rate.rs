//! How fast a queue pair sends packets to another host that nothing acknowledges: responses to reads, and packets of UC. A window cannot bound them, so a
//! token bucket does. Its rate falls with losses and notices of congestion and rises while there are none (multiplicative decrease, additive increase).

use crate::device::congestion::{CONGESTION_NS, CongestionCuts};

/// Bytes per second at first, at least and at most.
const FIRST: u64 = 4 << 30;
const LEAST: u64 = 16 << 20;
const MOST: u64 = 8 << 30;
/// The rate rises by so much at a time.
const STEP: u64 = 2 << 20;
/// It rises once in this time.
const CHANGE_NS: u64 = CONGESTION_NS;
/// What the headers of a packet take, from IP to the CRC.
const HEADER_BYTES: u64 = 60;
const SECOND_NS: u64 = 1_000_000_000;

/// The rate, and what may be sent at once.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SendRate {
    bytes_per_s: u64,
    /// The last packet may take more than there was.
    budget_bytes: i64,
    refilled_ns: u64,
    raised_ns: u64,
    cuts: CongestionCuts,
}

impl Default for SendRate {
    fn default() -> SendRate {
        SendRate {
            bytes_per_s: FIRST,
            budget_bytes: burst_bytes(FIRST),
            refilled_ns: 0,
            raised_ns: 0,
            cuts: CongestionCuts::default(),
        }
    }
}

/// What may be sent at once: as much as in half a millisecond, which is a requester's longest window at first, and 16 packets of 4 KiB or more, as in its
/// shortest.
fn burst_bytes(bytes_per_s: u64) -> i64 {
    (bytes_per_s / 2048).clamp(64 << 10, 1 << 20) as i64
}

impl SendRate {
    /// Takes room for a packet with so much payload.
    ///
    /// # Errors
    /// The time, in ns, at which the bucket has room for several packets, if it has none for this one.
    pub(crate) fn take(&mut self, now_ns: u64, payload_bytes: u32) -> Result<(), u64> {
        let elapsed_ns = now_ns.saturating_sub(self.refilled_ns).min(SECOND_NS);
        let burst = burst_bytes(self.bytes_per_s);
        let earned = (self.bytes_per_s * elapsed_ns / SECOND_NS) as i64;
        if earned > 0 {
            self.budget_bytes = (self.budget_bytes + earned).min(burst);
            self.refilled_ns = now_ns;
        }
        if self.budget_bytes <= 0 {
            let missing = (burst / 4 - self.budget_bytes) as u64;
            let wait_ns = missing * SECOND_NS / self.bytes_per_s;
            return Err(now_ns + wait_ns.max(1));
        }
        self.budget_bytes -= (u64::from(payload_bytes) + HEADER_BYTES) as i64;
        // Time without packets says nothing of the network.
        if now_ns.saturating_sub(self.raised_ns) >= CHANGE_NS {
            self.raised_ns = now_ns;
            self.bytes_per_s = (self.bytes_per_s + STEP).min(MOST);
        }
        Ok(())
    }

    /// A packet was lost, or the network says that it is congested.
    pub(crate) fn lower(&mut self, now_ns: u64) {
        if !self.cuts.take(now_ns) {
            return;
        }
        self.raised_ns = now_ns;
        self.bytes_per_s = (self.bytes_per_s / 2).max(LEAST);
        self.budget_bytes = self.budget_bytes.min(burst_bytes(self.bytes_per_s));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAYLOAD: u32 = 4096;

    /// Sends all it can for so long, and returns the number of bytes.
    fn send(rate: &mut SendRate, from_ns: u64, for_ns: u64) -> u64 {
        let (mut now_ns, mut bytes) = (from_ns, 0);
        while now_ns < from_ns + for_ns {
            match rate.take(now_ns, PAYLOAD) {
                Ok(()) => bytes += u64::from(PAYLOAD),
                Err(until_ns) => {
                    assert!(until_ns > now_ns);
                    now_ns = until_ns;
                }
            }
        }
        bytes
    }

    #[test]
    fn rate_is_kept_after_the_first_burst() {
        let mut rate = SendRate::default();
        let burst = burst_bytes(FIRST) as u64;
        let at_once = send(&mut rate, 5_000, 1);
        let whole = at_once + at_once / u64::from(PAYLOAD) * HEADER_BYTES;
        assert!((burst..burst + 8192).contains(&whole), "{whole}");
        let bytes = send(&mut rate, 6_000, 10_000_000);
        let expected = FIRST / 100;
        assert!(
            (expected * 9 / 10..expected * 12 / 10).contains(&bytes),
            "{bytes}"
        );
    }

    #[test]
    fn rate_halves_once_a_millisecond_and_rises_slowly() {
        let mut rate = SendRate::default();
        for _ in 0..5 {
            rate.lower(10);
        }
        assert_eq!(rate.bytes_per_s, FIRST / 2);
        for round in 1..=20 {
            rate.lower(round * CHANGE_NS + 10);
        }
        assert_eq!(rate.bytes_per_s, LEAST);
        let from_ns = 21 * CHANGE_NS + 10;
        send(&mut rate, from_ns, 10 * CHANGE_NS);
        let steps = (rate.bytes_per_s - LEAST) / STEP;
        assert!((8..=11).contains(&steps), "{steps}");
        // A pause is no sign that the network has more room.
        let before = rate.bytes_per_s;
        rate.take(from_ns + 1000 * CHANGE_NS, PAYLOAD).unwrap();
        assert!(rate.bytes_per_s <= before + STEP);
        (0..10_000).for_each(|round| {
            let _ = rate.take(from_ns + (2000 + round) * CHANGE_NS, PAYLOAD);
        });
        assert_eq!(rate.bytes_per_s, MOST);
    }
}
