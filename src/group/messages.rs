//! Message queues between the ranks of a group.

#[cfg(doc)]
use crate::Error;
use crate::Result;
use crate::group::Group;
#[cfg(doc)]
use crate::group::GroupConfig;
use crate::message::{MessageAddress, MessageConfig, MessageQueue};

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
        let mut queues = self.open_queues(with, config)?;
        self.connect_links(&mut queues, with)?;
        Ok(queues)
    }

    /// Queues with the others of some ranks, in their order, which all of these open by this call with the same ranks. If these are all ranks of the group, the addresses go
    /// through the launcher's store, where it has one.
    ///
    /// # Errors
    /// As [`Group::message_queues`].
    pub(super) fn queues_with(
        &self,
        ranks: &[u32],
        tag: u64,
        config: &MessageConfig,
    ) -> Result<Vec<MessageQueue>> {
        let others = ranks.iter().filter(|rank| **rank != self.rank());
        let with: Vec<(u32, u64)> = others.map(|peer| (*peer, tag)).collect();
        let mut queues = self.open_queues(&with, config)?;
        if ranks.len() < self.size() as usize {
            self.connect_links(&mut queues, &with)?;
            return Ok(queues);
        }
        let own = queues.iter().zip(&with);
        let own = own.map(|(queue, (peer, _))| (*peer, queue.address().to_bytes().to_vec()));
        let (own, timeout) = (own.collect::<Vec<_>>(), self.timeout());
        let name = format!("q{tag:x}");
        let theirs = self.store().exchange(&name, &own, timeout)?;
        let Some(theirs) = theirs else {
            self.connect_links(&mut queues, &with)?;
            return Ok(queues);
        };
        for (queue, address) in queues.iter_mut().zip(theirs) {
            queue.connect(&MessageAddress::from_bytes(&address)?)?;
        }
        // A message to a queue that is not connected yet would be repeated only as often as the configuration says.
        let key = format!("doorbell/c{tag:x}");
        self.store().meet(key.as_bytes(), timeout)?;
        // Every rank came here with the addresses of all.
        self.store().forget_exchange(&name, &own);
        Ok(queues)
    }

    fn open_queues(
        &self,
        with: &[(u32, u64)],
        config: &MessageConfig,
    ) -> Result<Vec<MessageQueue>> {
        self.open_links(with, || MessageQueue::new(self.domain(), config))
    }
}
