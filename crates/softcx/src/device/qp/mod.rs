//! A queue pair in the device: what it is made of, what it sends and completes, and how it ends.

mod completions;
mod counters;
mod device_parts;
mod send_rate;
mod setup;
mod status;

use std::sync::Arc;

pub use self::counters::Counters;
pub(crate) use self::device_parts::DeviceParts;
use self::send_rate::SendRate;
pub(crate) use self::setup::QpSetup;
pub use self::status::QpStatus;
use crate::device::client::{DeviceEvent, QpAttributes, Transport};
use crate::device::fabric::Fabric;
use crate::device::keys::Accessor;
use crate::device::packet::{Header, Packet, PacketKind, PacketPayload, Service, flag};
use crate::device::requester::Requester;
use crate::device::responder::Responder;
use crate::device::wire::{Counted, Destination};
pub use doorbell_wire::verbs::{Attributes, State};

/// The other end of a connection.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RemoteEnd {
    pub(crate) to: Destination,
    /// The address of its device, if this one has one.
    pub(crate) host: Option<[u8; 16]>,
    pub(crate) qpn: u32,
    /// The connection number that the other end expects.
    pub(crate) connection: u32,
    /// The node that packets must come from; 0 for any.
    pub(crate) node: u16,
    /// Service level of packets to it.
    pub(crate) sl: u8,
}

/// A queue pair.
#[derive(Debug)]
pub(crate) struct Qp {
    pub(crate) parts: QpSetup,
    pub(crate) status: Arc<QpStatus>,
    pub(crate) attributes: Attributes,
    /// Attributes as a client set them.
    pub(crate) asked: Box<QpAttributes>,
    pub(crate) remote: Option<RemoteEnd>,
    /// The connection number that this end expects in packets.
    pub(crate) connection: u32,
    pub(crate) requester: Requester,
    pub(crate) responder: Responder,
    /// How fast it sends to another host what nothing acknowledges.
    pub(crate) rate: SendRate,
    /// Set while the queue pair stands in the device's list of that name.
    pub(crate) ready: bool,
    pub(crate) answering: bool,
    pub(crate) timed: bool,
    /// Waits for room on a lane, and stands in no list of those with something to send until there is some.
    pub(crate) held: bool,
    /// Its memory cannot be reached, so there is nothing to flush.
    lost: bool,
    /// In error, it does not flush before this.
    flushes_from_ns: u64,
}

impl Qp {
    pub(crate) fn new(parts: QpSetup) -> Qp {
        Qp {
            parts,
            status: Arc::default(),
            attributes: Attributes::default(),
            asked: Box::default(),
            remote: None,
            connection: 0,
            requester: Requester::default(),
            responder: Responder::default(),
            rate: SendRate::default(),
            ready: false,
            answering: false,
            timed: false,
            held: false,
            lost: false,
            flushes_from_ns: 0,
        }
    }

    pub(crate) fn state(&self) -> State {
        self.status.state()
    }

    /// Its identity for the key table.
    pub(crate) fn accessor(&self) -> Accessor {
        Accessor {
            pd: self.parts.pd,
            qpn: self.parts.qpn,
        }
    }

    pub(crate) fn set_state(&mut self, state: State) {
        self.status.set_state(state);
    }

    /// Forgets everything: as after creation, with new starting numbers to come from `connect`.
    pub(crate) fn reset(&mut self) {
        self.requester = Requester::default();
        self.responder = Responder::default();
        self.rate = SendRate::default();
        self.remote = None;
        self.connection = 0;
        self.lost = false;
        self.flushes_from_ns = 0;
        self.parts.send_ring.forget();
        self.parts.recv_ring.forget();
        *self.asked = QpAttributes::default();
        self.status.set_overrun(false);
        self.set_state(State::Reset);
    }

    /// Sends a packet to the other end.
    #[inline]
    pub(crate) fn send(
        &self,
        context: &mut DeviceParts,
        kind: PacketKind,
        psn: u32,
        payload: PacketPayload,
        fill: impl FnOnce(&mut Header),
    ) {
        let Some(remote) = self.remote else { return };
        let mut header = Header::new(kind, remote.qpn, psn, remote.connection);
        header.source_qpn = self.parts.qpn;
        header.source_lid = context.fabric.as_ref().map_or(0, Fabric::node);
        header.sl = remote.sl;
        if self.parts.transport == Transport::Uc {
            header.service = Service::Unreliable;
        }
        fill(&mut header);
        self.send_to(context, remote.to, Packet { header, payload });
    }

    #[inline]
    pub(crate) fn send_to(&self, context: &mut DeviceParts, to: Destination, mut packet: Packet) {
        context.counters.packets_sent += 1;
        if context.wire.is_faulty() {
            garble(context, &mut packet);
        }
        if let Some(trace) = &mut context.trace {
            trace.sent(context.now_ns, to, &packet.header, None);
        }
        if context.capture.is_some() && !matches!(to, Destination::Host(_)) {
            context.capture_local(to, &packet);
        }
        context.wire.send(context.now_ns, to, packet);
    }

    /// Whether a packet that has come for this number is of its transport, and from its peer. `sender` is the address that it comes from, of a device that
    /// has one: with the wire `udp+shm` packets of one peer may come by memory and by UDP.
    #[inline]
    pub(crate) fn expects(&self, header: &Header, sender: Option<[u8; 16]>) -> bool {
        match (self.parts.transport, header.service) {
            (Transport::Rc, Service::Reliable) | (Transport::Uc, Service::Unreliable) => {
                if let Some(gid) = sender {
                    return self.is_connected_to(gid);
                }
                self.connection == header.connection
                    && self
                        .remote
                        .is_some_and(|remote| remote.node == 0 || remote.node == header.source_lid)
            }
            (Transport::Ud, Service::Datagram) => true,
            _ => false,
        }
    }

    /// Whether it is connected to a queue pair at this address.
    pub(crate) fn is_connected_to(&self, gid: [u8; 16]) -> bool {
        self.remote.is_some_and(|remote| remote.host == Some(gid))
    }

    /// Whether it sends.
    #[inline]
    pub(crate) fn is_sending(&self) -> bool {
        self.state() == State::ReadyToSend
    }

    /// Whether it receives. A failed send queue does not keep it from that.
    #[inline]
    pub(crate) fn is_receiving(&self) -> bool {
        matches!(
            self.state(),
            State::ReadyToReceive | State::ReadyToSend | State::SendQueueError
        )
    }

    /// Sends its owner an event.
    pub(crate) fn notify(&self, event: DeviceEvent) {
        if let Some(events) = &self.parts.events {
            events.event(event);
        }
    }

    /// The memory of its queues or records is gone.
    pub(crate) fn lose_queue(&mut self) {
        self.lost = true;
        self.fail_by_itself();
    }

    /// Whether its memory is gone.
    pub(crate) fn is_lost(&self) -> bool {
        self.lost
    }

    /// Moves to the error state without a completion that gives the reason.
    pub(crate) fn fail_by_itself(&mut self) {
        if self.state() != State::Error {
            self.responder.drop_answers();
            self.set_state(State::Error);
            self.notify(DeviceEvent::QpFatal {
                qpn: self.parts.qpn,
            });
        }
    }

    /// Moves to the error state and flushes both queues: every work request gets a completion, also an unsignaled one. Answers that have not left are
    /// dropped, because a queue pair in error sends nothing.
    pub(crate) fn enter_error(&mut self, context: &mut DeviceParts) {
        if self.state() != State::Error {
            self.responder.drop_answers();
        }
        self.enter_error_behind_answers(context);
    }

    /// As [`Qp::enter_error`], but queued answers still leave. For a responder whose refusal is the last of them: the peer gets the refusal, and the answers
    /// before it.
    pub(crate) fn enter_error_behind_answers(&mut self, context: &mut DeviceParts) {
        self.responder.withdraw_ack();
        self.trace_state(context, State::Error);
        if self.state() != State::Error {
            let flush_ns = context.wire.flush_ns();
            self.flushes_from_ns = context.now_ns.saturating_add(flush_ns);
        }
        self.set_state(State::Error);
        self.flush(context);
    }

    fn trace_state(&self, context: &mut DeviceParts, to: State) {
        if let Some(trace) = &mut context.trace {
            trace.state(context.now_ns, self.parts.qpn, self.state(), to);
        }
    }

    /// Completes in error what was posted; called again and again in the error state, for what is posted later.
    pub(crate) fn flush(&mut self, context: &mut DeviceParts) {
        if self.lost || context.now_ns < self.flushes_from_ns {
            return;
        }
        match self.state() {
            State::Error => {
                self.flush_sends(context);
                self.flush_receives(context);
            }
            State::SendQueueError => self.flush_sends(context),
            _ => {}
        }
    }

    /// When it begins to flush, if that is to come.
    pub(crate) fn flushes_at_ns(&self, now_ns: u64) -> Option<u64> {
        let is_to_come = self.state() == State::Error && self.flushes_from_ns > now_ns;
        is_to_come.then_some(self.flushes_from_ns)
    }

    /// The send queue cannot go on. A reliable queue pair is in error with it; the others go on receiving.
    pub(crate) fn fail_sends(&mut self, context: &mut DeviceParts) {
        if self.parts.transport == Transport::Rc {
            return self.enter_error(context);
        }
        if self.state() != State::Error {
            self.trace_state(context, State::SendQueueError);
            self.set_state(State::SendQueueError);
        }
        self.flush_sends(context);
    }
}

/// Gives a response the form of the other kind, if a fault picks it.
#[cold]
fn garble(context: &mut DeviceParts, packet: &mut Packet) {
    let header = &mut packet.header;
    let other = match header.kind {
        PacketKind::ReadResponse => PacketKind::AtomicResponse,
        PacketKind::AtomicResponse => PacketKind::ReadResponse,
        _ => return,
    };
    if context.wire.fault_code(Counted::Response).is_some() {
        header.kind = other;
        // A whole response of that kind: a frame of another form would be dropped on its way.
        header.flags |= flag::FIRST | flag::LAST;
        header.payload_bytes = 0;
        packet.payload = PacketPayload::Empty;
    }
}
