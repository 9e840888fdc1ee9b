//! Sends of UD endpoints, each of which names its receiver, and the handles of receivers.

use super::Endpoint;
use crate::endpoint::work::{Data, Receiver};
use crate::endpoint::{Address, AddressHandle, Work};
use crate::mlx5::{Opcode, Posted, SendRequest};
use crate::nic::Transport;
use crate::{Error, Result, StateKind};

impl Endpoint {
    /// Whether it is an endpoint of unreliable datagrams.
    #[inline]
    pub(crate) fn is_datagram(&self) -> bool {
        self.config.transport == Transport::Ud
    }

    /// Fails for an endpoint of unreliable datagrams.
    pub(crate) fn check_reliable(&self, operation: &'static str) -> Result<()> {
        if !self.is_datagram() {
            return Ok(());
        }
        Err(Error::state(
            StateKind::WrongKind,
            operation,
            "the endpoint is one of unreliable datagrams (UD), and this needs a reliable connection (RC)",
        ))
    }

    /// Checks a work request that has a receiver, or that is for a UD endpoint.
    #[cold]
    pub(super) fn check_datagram(&self, work: &Work<'_>) -> Result<()> {
        let refuse =
            |reason: String| Err(Error::state(StateKind::WrongKind, "prepare_send", reason));
        if !self.is_datagram() {
            return refuse(
                "the work request names its receiver, and the endpoint has a reliable connection to its peer".into(),
            );
        }
        if !matches!(work.opcode, Opcode::Send | Opcode::SendImm | Opcode::Nop) {
            return refuse(format!(
                "{} needs a reliable connection; the endpoint is one of unreliable datagrams (UD), which only sends",
                work.opcode.name()
            ));
        }
        let receiver = match (work.opcode, work.receiver) {
            (Opcode::Nop, _) => return Ok(()),
            (_, Some(receiver)) => receiver,
            (_, None) => {
                return refuse(
                    "a send of an endpoint of unreliable datagrams (UD) names its receiver by `Work::to`".into(),
                );
            }
        };
        (self.shared.domain).check_same(receiver.handle.domain(), "handle")?;
        let range = |argument, value: u64, max: u32| {
            if value <= max.into() {
                return Ok(());
            }
            Err(Error::Range {
                argument,
                value,
                min: 0,
                max: max.into(),
            })
        };
        range("qpn", receiver.qpn.into(), 0xff_ffff)?;
        let len_bytes = match work.data {
            Data::Slices(slices) => slices.iter().map(|slice| u64::from(slice.len_bytes)).sum(),
            Data::Inline(bytes) => bytes.len() as u64,
        };
        range(
            "bytes of a datagram (limit: the MTU of the endpoint and of the port)",
            len_bytes,
            self.shared.message_bytes,
        )
    }

    /// Writes a request into the ring.
    #[inline]
    pub(super) fn write_request(
        &mut self,
        request: &SendRequest<'_>,
        receiver: Option<Receiver<'_>>,
    ) -> Result<Posted> {
        match receiver {
            None => self.send.post(request),
            Some(receiver) => self.write_datagram(request, receiver),
        }
    }

    #[cold]
    fn write_datagram(
        &mut self,
        request: &SendRequest<'_>,
        receiver: Receiver<'_>,
    ) -> Result<Posted> {
        let segment = receiver.handle.segment(receiver.qpn, receiver.qkey);
        self.send.post_datagram(request, &segment)
    }

    /// Holds the address handle of the work request of that running count until it has completed.
    #[cold]
    pub(super) fn hold_handle(&mut self, count: u32, receiver: Receiver<'_>) {
        // Sends to the same port one after the other need one place: `count` is that of the last of them.
        if let Some((last, held)) = self.shared.handles.back_mut()
            && held.is(receiver.handle)
        {
            *last = count;
            return;
        }
        self.release_handles();
        let held = (count, receiver.handle.clone());
        self.shared.handles.push_back(held);
    }

    /// Gives back the address handles of work requests that have completed.
    #[cold]
    pub(super) fn release_handles(&mut self) {
        let done = self.shared.queues[0].outstanding.done();
        while (self.shared.handles.front())
            .is_some_and(|(last, _)| done.wrapping_sub(*last).cast_signed() > 0)
        {
            self.shared.handles.pop_front();
        }
    }
}

impl Endpoint {
    /// The handle of the port of a peer's endpoint, for [`Work::to`](crate::Work::to). Datagrams to it have the traffic class and the service level of this
    /// endpoint's configuration. The peer's endpoint may be reset meanwhile: the handle stays valid, because it is of the port.
    ///
    /// # Errors
    /// [`Error::Foreign`](crate::Error::Foreign) for an address of another kind of device; [`Error::State`](crate::Error::State) if the peer's device is gone or on
    /// another host; [`Error::System`](crate::Error::System) of `ibv_create_ah`.
    pub fn address_handle(&self, peer: &Address) -> Result<AddressHandle> {
        let domain = self.domain();
        let attributes = self.config().attributes();
        let nic = domain
            .on_device()?
            .address_of(&peer.queue_pair, &attributes)?;
        Ok(AddressHandle::new(domain, nic))
    }

    /// The handle of the port of that LID and, with a global route, of that GID: for peers that do not use this library. On Ethernet the LID is 0, and a GID
    /// is needed.
    ///
    /// # Errors
    /// As [`Endpoint::address_handle`]; [`Error::State`](crate::Error::State) on a device that is not one of libibverbs.
    pub fn address_handle_of_port(&self, lid: u16, gid: Option<[u8; 16]>) -> Result<AddressHandle> {
        let domain = self.domain();
        let attributes = self.config().attributes();
        let nic = domain.on_device()?.address_of_port(lid, gid, &attributes)?;
        Ok(AddressHandle::new(domain, nic))
    }
}
