//! What two ranks connect by a tag, through the store of the group.

use crate::Result;
use crate::endpoint::{AbortHandle, Address, Endpoint};
use crate::group::Group;
use crate::message::{MessageAddress, MessageQueue};
use crate::{Error, StateKind};

/// One side of a connection with another rank, which its peer opens by the same tag.
pub(super) trait RankLink {
    /// Its name in errors. The tags of one kind are not those of another one.
    const NAME: &'static str;
    /// What its keys in the store begin with.
    const KEYS: &'static str;
    /// Whether a rank may open one with itself: it is connected with its own address then.
    const TO_ITSELF: bool;

    fn address(&self) -> Vec<u8>;

    /// Connects with the side that has this address.
    fn connect(&mut self, address: &[u8]) -> Result<()>;

    fn abort_handle(&self) -> AbortHandle;
}

impl RankLink for MessageQueue {
    const NAME: &'static str = "message queue of the group";
    const KEYS: &'static str = "doorbell/messages/";
    const TO_ITSELF: bool = false;

    fn address(&self) -> Vec<u8> {
        MessageQueue::address(self).to_bytes().to_vec()
    }

    fn connect(&mut self, address: &[u8]) -> Result<()> {
        MessageQueue::connect(self, &MessageAddress::from_bytes(address)?)
    }

    fn abort_handle(&self) -> AbortHandle {
        MessageQueue::abort_handle(self)
    }
}

impl RankLink for Endpoint {
    const NAME: &'static str = "further endpoint of the group";
    const KEYS: &'static str = "doorbell/endpoints/";
    const TO_ITSELF: bool = true;

    fn address(&self) -> Vec<u8> {
        Endpoint::address(self).to_bytes().to_vec()
    }

    fn connect(&mut self, address: &[u8]) -> Result<()> {
        Endpoint::connect(self, &Address::from_bytes(address)?)
    }

    fn abort_handle(&self) -> AbortHandle {
        Endpoint::abort_handle(self)
    }
}

/// What a rank has put into the store for a peer: its address, or that it is connected.
#[derive(Clone, Copy)]
enum LinkStep {
    Address = 0,
    Connected = 1,
}

impl Group {
    /// Makes one side for each pair of a peer and a tag. The failure of the group aborts it.
    ///
    /// # Errors
    /// Those of `make`; [`Error::Range`] if a peer is not a rank of the group; [`Error::State`] if it is this rank and the kind has none to itself, or if
    /// the tag was opened before; [`Error::Rank`] if the group has failed.
    pub(super) fn open_links<L: RankLink>(
        &self,
        with: &[(u32, u64)],
        make: impl Fn() -> Result<L>,
    ) -> Result<Vec<L>> {
        for (peer, _) in with {
            match L::TO_ITSELF && *peer == self.rank() {
                true => self.check()?,
                false => self.check_peer(*peer)?,
            }
        }
        let mut links = Vec::with_capacity(with.len());
        for (peer, tag) in with {
            if !self.mesh().open_tag(L::KEYS, *peer, *tag) {
                return Err(Error::state(
                    StateKind::Taken,
                    L::NAME,
                    format!("the one to rank {peer} with tag {tag} was opened before"),
                ));
            }
            let link = make()?;
            self.mesh().abort_with_group(link.abort_handle());
            links.push(link);
        }
        Ok(links)
    }

    /// Connects them with those of the peers, through the group's own store. Returns when both sides of each are connected.
    ///
    /// Each key has one reader, which removes it: the store has room for the links that are being connected, not for all that ever were. A tag is opened once, so
    /// nobody asks for the key again. What a call that fails has set, or was to read, stays in the store as long as the group.
    ///
    /// # Errors
    /// [`Error::Timeout`]; [`Error::Rank`] if the group has failed; those of the connection.
    pub(super) fn connect_links<L: RankLink>(
        &self,
        links: &mut [L],
        with: &[(u32, u64)],
    ) -> Result<()> {
        let own = self.rank();
        for (link, (peer, tag)) in links.iter().zip(with) {
            let key = key::<L>(LinkStep::Address, own, *peer, *tag);
            self.store().set(&key, &link.address(), self.timeout())?;
        }
        for (link, (peer, tag)) in links.iter_mut().zip(with) {
            let address = key::<L>(LinkStep::Address, *peer, own, *tag);
            link.connect(&self.store().take(&address, self.timeout())?)?;
            let connected = key::<L>(LinkStep::Connected, own, *peer, *tag);
            self.store().set(&connected, &[], self.timeout())?;
        }
        // What is sent to a side that is not connected yet would be repeated only as often as the configuration says.
        for (peer, tag) in with {
            let connected = key::<L>(LinkStep::Connected, *peer, own, *tag);
            self.store().take(&connected, self.timeout())?;
        }
        Ok(())
    }
}

/// The key of what the rank `from` has stored for the rank `to`.
fn key<L: RankLink>(step: LinkStep, from: u32, to: u32, tag: u64) -> Vec<u8> {
    let mut key = L::KEYS.as_bytes().to_vec();
    key.push(step as u8);
    key.extend(from.to_le_bytes());
    key.extend(to.to_le_bytes());
    key.extend(tag.to_le_bytes());
    key
}
