//! Further endpoints between the ranks of a group.

#[cfg(doc)]
use crate::Error;
use crate::Result;
use crate::endpoint::{Endpoint, EndpointConfig};
use crate::group::Group;
#[cfg(doc)]
use crate::group::GroupConfig;

impl Group {
    /// Makes further endpoints between ranks, one for each pair of a peer and a tag, beside the one of [`Group::take_endpoint`], and waits until all are
    /// connected: for a thread of its own, or with another configuration. Each peer makes its side, with the same tag, in any order, in one call or in several. A call
    /// tells the peers of all its endpoints before it waits for any of theirs. A tag is any number; those of message queues are others.
    ///
    /// An endpoint of this rank to itself receives what it sends. By it a rank accesses its own memory as the others do: atomics of a device are atomic with each other,
    /// and not with those of the processor.
    ///
    /// The endpoints belong to the caller. They are aborted with the others if the group fails: waits on streams end, and errors name the rank
    /// ([`Cause::Rank`](crate::Cause::Rank)).
    ///
    /// # Errors
    /// [`Error::Range`] if a peer is not a rank of the group; [`Error::State`] if an endpoint with that tag was made before;
    /// [`Error::Timeout`] if a peer does not make its side within [`GroupConfig::timeout`]; [`Error::Rank`] if the group has failed; those of
    /// [`Endpoint::new`] and [`Endpoint::connect`]. After an error the endpoints of the call cannot be made again.
    pub fn endpoints(&self, with: &[(u32, u64)], config: &EndpointConfig) -> Result<Vec<Endpoint>> {
        let mut endpoints = self.open_links(with, || Endpoint::new(self.domain(), config))?;
        self.connect_links(&mut endpoints, with)?;
        Ok(endpoints)
    }
}
