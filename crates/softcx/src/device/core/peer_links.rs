//! The links to other devices.

use std::collections::HashMap;

use crate::Result;
use crate::device::fabric::{Fabric, NODES};
use crate::device::inbox::{InboxAddress, LaneWriter};
use crate::device::wire::{Destination, Wire};

/// How soon a node whose lane could not be opened is tried again.
const REOPEN_NS: u64 = 10_000_000;
/// How long the answer is used that a peer still has its inbox.
const OWNED_NS: u64 = 1_000_000;

/// The link to another device.
#[derive(Debug)]
pub(crate) struct PeerLink {
    pub(super) lane: LaneWriter,
    port: u64,
    /// Queue pairs that use it. The link to a node of a fabric stays without any.
    users: usize,
    /// When it was last found that the peer still has its inbox.
    found_ns: Option<u64>,
}

impl PeerLink {
    fn open(to: &InboxAddress) -> Result<PeerLink> {
        Ok(PeerLink {
            lane: LaneWriter::open(to)?,
            port: to.port,
            users: 0,
            found_ns: None,
        })
    }

    /// Whether a process still has the inbox. The kernel is asked once in [`OWNED_NS`].
    fn is_owned(&mut self, now_ns: u64) -> bool {
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
    links: Vec<Option<PeerLink>>,
    by_port: HashMap<u64, usize>,
    /// By node: not before this time, and not to this port.
    closed: Vec<(u64, u64)>,
    nodes: usize,
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
    fn open_to_node(&mut self, fabric: &Fabric, node: usize, now_ns: u64) -> Option<&PeerLink> {
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

    /// Whether the device of that node is there, and its lane can be had. The kernel is asked once in [`OWNED_NS`].
    pub(crate) fn reaches(&mut self, fabric: &Fabric, node: u16, now_ns: u64) -> bool {
        let node = usize::from(node);
        self.open_to_node(fabric, node, now_ns).is_some()
            && (self.links.get_mut(node).and_then(Option::as_mut))
                .is_some_and(|link| link.is_owned(now_ns))
    }

    /// Whether packets lie there that a living process has not read. Lanes drop none, so nothing is lost: its device has not had its turn.
    #[cold]
    pub(crate) fn is_behind(&mut self, to: Destination, now_ns: u64) -> bool {
        let Destination::Lane(index) = to else {
            return false;
        };
        let link = self.links.get_mut(index).and_then(Option::as_mut);
        link.is_some_and(|link| !link.lane.is_read() && link.is_owned(now_ns))
    }

    /// Returns the number of the link to another device. Opens the link if it does not exist.
    pub(super) fn number_of(&mut self, port: &InboxAddress) -> Result<usize> {
        if let Some(&number) = self.by_port.get(&port.port) {
            return Ok(number);
        }
        let link = PeerLink::open(port)?;
        let free = self.links.iter().skip(self.nodes).position(Option::is_none);
        let at = free.map_or(self.links.len(), |free| self.nodes + free);
        if at == self.links.len() {
            self.links.push(None);
        }
        self.links[at] = Some(link);
        self.by_port.insert(port.port, at);
        Ok(at)
    }

    /// The link of that number, opened anew if it is to a node that another device has now.
    pub(super) fn opened(
        &mut self,
        fabric: Option<&Fabric>,
        number: usize,
        now_ns: u64,
    ) -> Option<&PeerLink> {
        match fabric {
            Some(fabric) if number < self.nodes => self.open_to_node(fabric, number, now_ns),
            _ => self.links.get(number)?.as_ref(),
        }
    }

    /// Counts a queue pair that uses a link.
    pub(super) fn enter(&mut self, to: Destination) {
        if let Destination::Lane(number) = to
            && let Some(Some(link)) = self.links.get_mut(number)
        {
            link.users += 1;
        }
    }

    /// A queue pair uses a link no more. Whether the link is closed with that; those to nodes stay.
    pub(super) fn leave(&mut self, number: usize) -> bool {
        if number < self.nodes {
            return false;
        }
        let Some(entry) = self.links.get_mut(number) else {
            return false;
        };
        let Some(link) = entry else { return false };
        link.users -= 1;
        if link.users > 0 {
            return false;
        }
        self.by_port.remove(&link.port);
        *entry = None;
        true
    }

    /// Closes the links to nodes that are no more. One that died in silence is looked for only where packets wait for room.
    pub(super) fn sweep_nodes(&mut self, fabric: &Fabric, wire: &mut Wire) {
        for node in 1..self.nodes {
            let Some(Some(link)) = self.links.get(node) else {
                continue;
            };
            let stuck = wire.lane(node).is_some_and(|queue| !queue.is_empty());
            let gone =
                fabric.port(node as u16) != link.port || (stuck && fabric.is_vacant(node as u16));
            if gone {
                self.closed[node] = (u64::MAX, link.port);
                self.links[node] = None;
            }
        }
    }
}
