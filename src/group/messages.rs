//! Message queues between the ranks of a group.

use crate::group::Group;
#[cfg(doc)]
use crate::group::GroupConfig;
use crate::message::{MessageAddress, MessageConfig, MessageQueue};
use crate::{Error, Result, StateKind};

/// What a rank has put into the store for a peer: its address, or that it is connected.
#[derive(Clone, Copy)]
enum QueueStep {
    Address = 0,
    Connected = 1,
}

impl Group {
    /// Opens queues for messages with other ranks, one for each pair of a peer and a tag, and waits until all are connected. Each peer opens its side, with the
    /// same tag, in any order, in one call or in several. A call tells the peers of all its queues before it waits for any of theirs. So two ranks that open
    /// several queues with each other by one call each never wait for each other, whatever the order. A tag is any number; messages of different tags have no
    /// order.
    ///
    /// The queues belong to the caller. They are aborted with the endpoints of the group if it fails: waits on streams end, and tickets name the rank
    /// ([`Cause::Rank`](crate::Cause::Rank)).
    ///
    /// # Errors
    /// [`Error::Range`] if a peer is not a rank of the group; [`Error::State`] if it is this rank, or if a queue with that tag was opened before;
    /// [`Error::Timeout`] if a peer does not open its side within [`GroupConfig::timeout`]; [`Error::Rank`] if the group has failed; those of
    /// [`MessageQueue::new`] and [`MessageQueue::connect`]. After an error the queues of the call cannot be opened again.
    pub fn message_queues(
        &self,
        with: &[(u32, u64)],
        config: &MessageConfig,
    ) -> Result<Vec<MessageQueue>> {
        for (peer, _) in with {
            self.check_peer(*peer)?;
        }
        let mut queues = Vec::with_capacity(with.len());
        for (peer, tag) in with {
            if !self.mesh().open_tag(*peer, *tag) {
                return Err(Error::state(
                    StateKind::Taken,
                    "message queue of the group",
                    format!("the queue to rank {peer} with tag {tag} was opened before"),
                ));
            }
            let queue = MessageQueue::new(self.domain(), config)?;
            self.mesh().abort_with_group(queue.abort_handle());
            let key = key(QueueStep::Address, self.rank(), *peer, *tag);
            self.store()
                .set(&key, &queue.address().to_bytes(), self.timeout())?;
            queues.push(queue);
        }
        for (queue, (peer, tag)) in queues.iter_mut().zip(with) {
            let key_of = |step, from, to| key(step, from, to, *tag);
            let address = key_of(QueueStep::Address, *peer, self.rank());
            let address = self.store().get(&address, self.timeout())?;
            queue.connect(&MessageAddress::from_bytes(&address)?)?;
            let connected = key_of(QueueStep::Connected, self.rank(), *peer);
            self.store().set(&connected, &[], self.timeout())?;
        }
        // A message to a queue that is not connected yet would be repeated only as often as the configuration says.
        for (peer, tag) in with {
            let connected = key(QueueStep::Connected, *peer, self.rank(), *tag);
            self.store().get(&connected, self.timeout())?;
        }
        Ok(queues)
    }
}

/// The key of what the rank `from` has stored for the rank `to`.
fn key(step: QueueStep, from: u32, to: u32, tag: u64) -> Vec<u8> {
    let mut key = b"doorbell/messages/".to_vec();
    key.push(step as u8);
    key.extend(from.to_le_bytes());
    key.extend(to.to_le_bytes());
    key.extend(tag.to_le_bytes());
    key
}
