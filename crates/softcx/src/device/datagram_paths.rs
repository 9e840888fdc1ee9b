//! Where the datagrams of a device without a fabric go. Ports have no LIDs there, so the device gives each one that it is asked about a number,
//! which stands in the place of the LID.

use super::inbox::WireAddress;
use super::wire::Destination;

/// The numbered ports. A number is used again when nobody has it.
#[derive(Debug, Default)]
pub(crate) struct DatagramPaths(Vec<Option<NumberedPort>>);

#[derive(Debug)]
struct NumberedPort {
    port: WireAddress,
    to: Destination,
    users: usize,
}

impl DatagramPaths {
    /// Where packets for the port of that number go.
    pub(crate) fn route(&self, number: u16) -> Destination {
        let port = self.0.get(usize::from(number)).and_then(Option::as_ref);
        port.map_or(Destination::Nowhere, |port| port.to)
    }

    /// The number that a port has already, for a further user.
    pub(crate) fn enter_known(&mut self, port: &WireAddress) -> Option<u16> {
        let has_it = |path: &Option<NumberedPort>| path.as_ref().is_some_and(|it| it.port == *port);
        let number = self.0.iter().position(has_it)?;
        self.0.get_mut(number)?.as_mut()?.users += 1;
        u16::try_from(number).ok()
    }

    /// A number for a port that has none. `None` if there is no number left.
    pub(crate) fn enter_new(&mut self, port: WireAddress, to: Destination) -> Option<u16> {
        let free = self.0.iter().position(Option::is_none);
        let at = free.unwrap_or(self.0.len());
        let number = u16::try_from(at).ok()?;
        let users = 1;
        let path = Some(NumberedPort { port, to, users });
        match self.0.get_mut(at) {
            Some(place) => *place = path,
            None => self.0.push(path),
        }
        Some(number)
    }

    /// The number has one user less. For the last one, returns where the port was.
    pub(crate) fn leave(&mut self, number: u16) -> Option<Destination> {
        let place = self.0.get_mut(usize::from(number))?;
        let path = place.as_mut()?;
        path.users -= 1;
        if path.users > 0 {
            return None;
        }
        place.take().map(|path| path.to)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn port(number: u8) -> WireAddress {
        WireAddress::Host([number; 16])
    }

    #[test]
    fn a_number_is_kept_while_it_has_users_and_then_used_again() {
        let mut paths = DatagramPaths::default();
        assert_eq!(paths.route(0), Destination::Nowhere);
        assert_eq!(paths.enter_known(&port(7)), None);
        assert_eq!(paths.enter_new(port(7), Destination::Local), Some(0));
        assert_eq!(paths.enter_new(port(8), Destination::Lane(3)), Some(1));
        assert_eq!(paths.enter_known(&port(7)), Some(0));
        assert_eq!(paths.leave(0), None);
        assert_eq!(
            (paths.route(0), paths.route(1)),
            (Destination::Local, Destination::Lane(3))
        );
        assert_eq!(paths.leave(0), Some(Destination::Local));
        assert_eq!(
            (paths.route(0), paths.leave(0)),
            (Destination::Nowhere, None)
        );
        assert_eq!(paths.enter_new(port(9), Destination::Lane(4)), Some(0));
    }
}
