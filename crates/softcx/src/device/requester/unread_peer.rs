//! What it means that a peer has not answered in time: that a packet was lost, or that the peer's device got no processor to read it. A card does not wait
//! for a processor.

/// Times in a row that nothing is sent to a peer whose socket is not empty: what waits there may be of others, and the packet of this queue pair lost.
const UNREAD_IN_A_ROW: u8 = 2;
/// How long a peer is waited for that does not read its packets, before they count as lost.
const WAIT_NS: u64 = 5_000_000_000;

/// Why no answer has come in time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Silence {
    /// A packet or its answer was lost, or the peer is gone.
    Lost,
    /// The peer has not read all packets, and one of this queue pair may be lost: its full buffer has dropped some, or it has been waited for.
    Dropped,
    /// The peer has not read all packets, and its buffer has dropped none. To send them again would probably not help.
    Unread,
}

/// What a requester knows of a peer that does not read its packets.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct UnreadPeer {
    /// Until when the requester waits for it.
    until_ns: Option<u64>,
    /// The datagrams that had been dropped there when this was looked at last. At first it is 0: what was dropped before the connection began counts as
    /// dropped of it, which costs one repetition.
    seen_drops: i64,
    /// Times in a row that it was waited for.
    waits: u8,
}

impl UnreadPeer {
    /// The peer has answered.
    #[inline]
    pub(super) fn answered(&mut self) {
        self.until_ns = None;
        self.waits = 0;
    }

    /// No answer has come in time. `unread` tells, if the peer has packets that it has not read, how many have been dropped there. `by_socket`: packets of
    /// other devices wait there, too.
    pub(super) fn silence(
        &mut self,
        now_ns: u64,
        by_socket: bool,
        unread: impl FnOnce() -> Option<i64>,
    ) -> Silence {
        let until_ns = *self.until_ns.get_or_insert(now_ns + WAIT_NS);
        if now_ns >= until_ns {
            return Silence::Lost;
        }
        match unread() {
            None => Silence::Lost,
            Some(drops)
                if drops == self.seen_drops && (!by_socket || self.waits < UNREAD_IN_A_ROW) =>
            {
                self.waits = self.waits.saturating_add(1);
                Silence::Unread
            }
            Some(drops) => {
                self.seen_drops = drops;
                self.waits = 0;
                Silence::Dropped
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packets_count_as_lost_when_all_are_read_or_the_wait_is_over() {
        let mut peer = UnreadPeer::default();
        assert_eq!(peer.silence(100, true, || None), Silence::Lost);
        assert_eq!(
            peer.silence(99 + WAIT_NS, true, || Some(0)),
            Silence::Unread
        );
        let is_not_asked = || unreachable!("the wait is over");
        assert_eq!(
            peer.silence(100 + WAIT_NS, true, is_not_asked),
            Silence::Lost
        );
        peer.answered();
        assert_eq!(
            peer.silence(100 + WAIT_NS, true, || Some(0)),
            Silence::Unread
        );
    }

    #[test]
    fn each_change_of_what_was_dropped_has_packets_sent_again() {
        let mut peer = UnreadPeer::default();
        for (drops, expected) in [
            (0, Silence::Unread),
            (3, Silence::Dropped),
            (3, Silence::Unread),
            (4, Silence::Dropped),
            // Another socket has the address.
            (0, Silence::Dropped),
            (0, Silence::Unread),
            (0, Silence::Unread),
            // What waits there may be of others, and the packet lost.
            (0, Silence::Dropped),
            (0, Silence::Unread),
        ] {
            assert_eq!(peer.silence(100, true, || Some(drops)), expected, "{drops}");
        }
        // In memory that two devices share nothing is lost, and nothing of others waits.
        for _ in 0..300 {
            assert_eq!(peer.silence(100, false, || Some(0)), Silence::Unread);
        }
    }
}
