//! The links to other devices.

use std::collections::HashMap;

use crate::Result;
use crate::device::fabric::{Fabric, NODES};
use crate::device::inbox::{InboxAddress, LaneWriter};
use crate::device::wire::Destination;

/// How soon a node whose lane could not be opened is tried again.
const REOPEN_NS: u64 = 10_000_000;
/// How long the answer is used that a peer still has its inbox.
const OWNED_NS: u64 = 1_000_000;

/// The link to another device.
#[derive(Debug)]
pub(crate) struct PeerLink {
    pub(super) lane: LaneWriter,
    pub(super) port: u64,
    /// Queue pairs that use it. The link to a node of a fabric stays without any.
    pub(super) users: usize,
    /// When it was last found that the peer still has its inbox.
    pub(super) found_ns: Option<u64>,
}

impl PeerLink {
    pub(super) fn open(to: &InboxAddress) -> Result<PeerLink> {
        Ok(PeerLink {
            lane: LaneWriter::open(to)?,
            port: to.port,
            users: 0,
            found_ns: None,
        })
    }

    /// Whether a process still has the inbox. The kernel is asked once in [`OWNED_NS`].
    pub(super) fn is_owned(&mut self, now_ns: u64) -> bool {
        let fresh = |found_ns| now_ns.wrapping_sub(found_ns) < OWNED_NS;
        if !self.found_ns.is_some_and(fresh) {
            self.found_ns = self.lane.is_owned().then_some(now_ns);
        }
        self.found_ns.is_some()
    }
}

/// The links of a device to others. On a fabric the first ones are those to its nodes, by number.
#[derive(Debug, Default)]
pub(crate) struct PeerLinks {
    pub(super) links: Vec<Option<PeerLink>>,
    pub(super) by_port: HashMap<u64, usize>,
    /// By node: not before this time, and not to this port.
    pub(super) closed: Vec<(u64, u64)>,
    pub(super) nodes: usize,
}

impl PeerLinks {
    pub(super) fn to_nodes() -> PeerLinks {
        let nodes = usize::from(NODES) + 1;
        PeerLinks {
            links: std::iter::repeat_with(|| None).take(nodes).collect(),
            by_port: HashMap::new(),
            closed: vec![(0, 0); nodes],
            nodes,
        }
    }

    /// Opens the link to a node, or opens it anew if another device has the number now.
    pub(super) fn open_to_node(
        &mut self,
        fabric: &Fabric,
        node: usize,
        now_ns: u64,
    ) -> Option<&PeerLink> {
        let port = fabric.port(node as u16);
        let link = self.links.get_mut(node)?;
        if link.as_ref().is_none_or(|link| link.port != port) {
            *link = None;
            let closed = self.closed.get_mut(node)?;
            if port == 0 || (closed.1 == port && now_ns < closed.0) {
                return None;
            }
            match fabric.address(node as u16).map(|to| PeerLink::open(&to)) {
                Some(Ok(opened)) => *link = Some(opened),
                _ => *closed = (now_ns + REOPEN_NS, port),
            }
        }
        link.as_ref()
    }

    /// Whether packets lie there that a living process has not read: nothing is lost, its device has not had its turn.
    #[cold]
    pub(crate) fn is_behind(&mut self, to: Destination, now_ns: u64) -> bool {
        let Destination::Lane(index) = to else {
            return false;
        };
        let link = self.links.get_mut(index).and_then(Option::as_mut);
        link.is_some_and(|link| !link.lane.is_read() && link.is_owned(now_ns))
    }
}
