//! What a queue pair shows to its peer, so that the peer may write by itself.

use super::{Qp, State};
use crate::device::client::Transport;
use crate::device::inbox::{OpenConnection, Openings};
use crate::device::keys::Access;

/// The receiving end of a connection as others see it; shut when this goes.
#[derive(Debug)]
pub(super) struct Shown {
    openings: Openings,
    slot: usize,
}

impl Drop for Shown {
    fn drop(&mut self) {
        self.openings.shut_connection(self.slot);
    }
}

impl Qp {
    /// Lets the peer write by itself, if this is a connection on which it may write, and both ends know that it is there.
    pub(crate) fn show_in(&mut self, openings: &Openings, slot: usize) {
        self.shown = None;
        let Some(remote) = self.remote else { return };
        let writable = self.attributes.access.contains(Access::REMOTE_WRITE);
        let ready = match self.state() {
            // Of the first packet its owner is told.
            State::ReadyToReceive => self.responder.is_established(),
            State::ReadyToSend => true,
            _ => false,
        };
        if self.parts.transport != Transport::Ud && ready && writable {
            let end = OpenConnection {
                qpn: self.parts.qpn,
                connection: self.connection,
                node: remote.node,
            };
            openings.show_progress(slot, self.responder.expected_psn());
            openings.show_connection(slot, &end, self.parts.pd);
            self.shown = Some(Shown {
                openings: openings.clone(),
                slot,
            });
        }
    }

    /// Tells the peer how far its packets have been carried out, with all their copies.
    #[inline]
    pub(crate) fn show_progress(&self) {
        if let Some(shown) = &self.shown {
            let expected_psn = self.responder.expected_psn();
            shown.openings.show_progress(shown.slot, expected_psn);
        }
    }
}
