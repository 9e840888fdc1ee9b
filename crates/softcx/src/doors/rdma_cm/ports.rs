//! Ports: which ids are bound to a port, and which may share it.

use std::collections::HashMap;

use super::address::{IB, SocketAddress};
use super::id::{ConnectionId, IdState, port_space};
use crate::device::client::Errno;

/// Ports that are given to those who ask for any.
const ANY: std::ops::Range<u16> = 32768..61000;
/// The bits of a service that say which port space it is of.
const SPACE_MASK: u64 = !0xffff;

/// The owners of each port of each port space.
#[derive(Debug, Default)]
pub(super) struct Ports {
    owners: HashMap<(u16, u16), Vec<u32>>,
    last: u16,
}

impl Ports {
    /// Those who begin to look for a free port there.
    pub(super) fn after(last: u16) -> Ports {
        Ports {
            owners: HashMap::new(),
            last,
        }
    }

    /// The owners of a port.
    pub(super) fn owners(&self, key: (u16, u16)) -> &[u32] {
        self.owners.get(&key).map_or(&[], Vec::as_slice)
    }

    /// A port for an identifier with this source address.
    ///
    /// # Errors
    /// EADDRINUSE, EADDRNOTAVAIL, or EPROTONOSUPPORT for a service of another port space.
    pub(super) fn bind(
        &mut self,
        ids: &HashMap<u32, ConnectionId>,
        handle: u32,
        source: &mut SocketAddress,
    ) -> Result<(u16, u16), Errno> {
        let id = ids.get(&handle).ok_or(libc::ENOENT)?;
        let space = match source.family() {
            IB => select_space(id.port_space, source).ok_or(libc::EPROTONOSUPPORT)?,
            _ => id.port_space,
        };
        let port = match source.port() {
            0 => self.free_port(space).ok_or(libc::EADDRNOTAVAIL)?,
            port => {
                check(
                    ids,
                    self.owners((space, port)),
                    handle,
                    source,
                    id.reuses_address,
                )?;
                port
            }
        };
        source.set_port(port);
        self.owners.entry((space, port)).or_default().push(handle);
        Ok((space, port))
    }

    fn free_port(&mut self, space: u16) -> Option<u16> {
        for _ in ANY {
            let next = self.last.wrapping_add(1);
            self.last = if ANY.contains(&next) { next } else { ANY.start };
            if !self.owners.contains_key(&(space, self.last)) {
                return Some(self.last);
            }
        }
        None
    }

    /// Whether an identifier that shares its port may listen.
    ///
    /// # Errors
    /// EADDRINUSE, EADDRNOTAVAIL.
    pub(super) fn check_listen(
        &self,
        ids: &HashMap<u32, ConnectionId>,
        handle: u32,
    ) -> Result<(), Errno> {
        let id = ids.get(&handle).ok_or(libc::ENOENT)?;
        match id.bound {
            Some(key) if id.reuses_address => {
                check(ids, self.owners(key), handle, &id.source, false)
            }
            _ => Ok(()),
        }
    }

    /// Gives a port back.
    pub(super) fn release(&mut self, key: (u16, u16), handle: u32) {
        if let Some(owners) = self.owners.get_mut(&key) {
            owners.retain(|&owner| owner != handle);
            if owners.is_empty() {
                self.owners.remove(&key);
            }
        }
    }
}

/// As `cma_check_port`.
fn check(
    ids: &HashMap<u32, ConnectionId>,
    owners: &[u32],
    handle: u32,
    source: &SocketAddress,
    reuses_address: bool,
) -> Result<(), Errno> {
    let keeps = |id: &ConnectionId| id.keeps_to(source.family());
    let mine = ids.get(&handle).is_some_and(keeps);
    for owner in owners.iter().filter(|&&owner| owner != handle) {
        let Some(other) = ids.get(owner) else {
            continue;
        };
        if other.state != IdState::Listen && reuses_address && other.reuses_address {
            continue;
        }
        let families_differ = source.family() != other.source.family();
        if mine && other.keeps_to(other.source.family()) && families_differ {
            continue;
        }
        if source.is_any() || other.source.is_any() {
            return Err(libc::EADDRNOTAVAIL);
        }
        if source.is_same_host(&other.source) {
            return Err(libc::EADDRINUSE);
        }
    }
    Ok(())
}

/// The port space of an `AF_IB` address, whose service and mask are completed (`cma_select_ib_ps`).
fn select_space(own: u16, source: &mut SocketAddress) -> Option<u16> {
    let (service, mask) = source.service();
    let space_mask = mask & SPACE_MASK;
    let fits = |space: u16| {
        let is_allowed = own == port_space::IB || own == space;
        is_allowed && service & space_mask == u64::from(space) << 16 & space_mask
    };
    let spaces = [port_space::IB, port_space::TCP, port_space::UDP];
    let space = spaces.into_iter().find(|&space| fits(space))?;
    let port = u64::from(source.port());
    source.set_service(u64::from(space) << 16 | port, SPACE_MASK | mask);
    Some(space)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::doors::rdma_cm::address::SocketAddress;

    struct Host {
        ids: HashMap<u32, ConnectionId>,
        ports: Ports,
    }

    impl Host {
        fn bind(&mut self, handle: u32, ip: &str, port: u16, reuses: bool) -> Result<u16, Errno> {
            let mut id = ConnectionId::new((0, 0), port_space::TCP, 2, 0, 5);
            id.reuses_address = reuses;
            let mut source = SocketAddress::of_ip(ip.parse().unwrap(), port);
            id.source = source;
            self.ids.insert(handle, id);
            let bound = self.ports.bind(&self.ids, handle, &mut source);
            let id = self.ids.get_mut(&handle).unwrap();
            (id.source, id.bound) = (source, bound.ok());
            bound.map(|(_, port)| port)
        }
    }

    #[test]
    fn a_port_is_shared_only_by_those_who_agree() {
        let mut host = Host {
            ids: HashMap::new(),
            ports: Ports::after(40000),
        };
        assert_eq!(host.bind(1, "192.0.2.1", 7, false), Ok(7));
        assert_eq!(host.bind(2, "192.0.2.1", 7, false), Err(libc::EADDRINUSE));
        assert_eq!(host.bind(3, "0.0.0.0", 7, true), Err(libc::EADDRNOTAVAIL));
        assert_eq!(host.bind(4, "192.0.2.2", 7, false), Ok(7));
        assert_eq!(host.bind(5, "0.0.0.0", 8, true), Ok(8));
        assert_eq!(host.bind(6, "0.0.0.0", 8, true), Ok(8));
        assert_eq!(
            host.ports.check_listen(&host.ids, 6),
            Err(libc::EADDRNOTAVAIL)
        );
        host.ports.release((port_space::TCP, 8), 5);
        assert_eq!(host.ports.check_listen(&host.ids, 6), Ok(()));
        assert_eq!(host.bind(7, "0.0.0.0", 0, false), Ok(40001));
        assert_eq!(host.bind(8, "::", 0, false), Ok(40002));
    }
}
