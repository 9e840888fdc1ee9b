//! Sends of UD endpoints: each names its receiver.

use super::Endpoint;
use crate::endpoint::Work;
use crate::endpoint::work::{Data, Receiver};
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
        let done = self.shared.queues[0].outstanding.done();
        // Sends to the same port one after the other need one place: `count` is that of the last of them.
        if let Some((last, held)) = self.handles.back_mut()
            && held.is(receiver.handle)
        {
            *last = count;
            return;
        }
        while (self.handles.front())
            .is_some_and(|(last, _)| done.wrapping_sub(*last).cast_signed() > 0)
        {
            self.handles.pop_front();
        }
        self.handles.push_back((count, receiver.handle.clone()));
    }
}
