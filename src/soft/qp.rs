//! A reliable-connected queue pair in the device: its attributes, its state machine, and how it ends.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

use crate::mlx5::{Cqe, CqeOpcode, Syndrome};
use crate::soft::client::{Event, EventSink, QpAttributes, Transport};
use crate::soft::copies::Copies;
use crate::soft::cq::Cq;
use crate::soft::dma::{RecordWord, Register, Ring};
use crate::soft::fabric::Fabric;
use crate::soft::gather::Gather;
use crate::soft::keys::{Access, Accessor, Keys};
use crate::soft::packet::{Header, Kind, Packet, Payload, Service};
use crate::soft::requester::Requester;
use crate::soft::responder::Responder;
use crate::soft::srq::Srq;
use crate::soft::trace::Trace;
use crate::soft::wire::{Counted, Destination, Wire};
use crate::{Error, Result};

/// The states of a queue pair, with verbs' numbers (`ibv_qp_state`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum State {
    /// Fresh; nothing can be posted to the device.
    Reset = 0,
    /// Receives may be posted.
    Init = 1,
    /// Ready to receive.
    ReadyToReceive = 2,
    /// Ready to send.
    ReadyToSend = 3,
    /// Nothing more is begun from the send queue; receiving goes on.
    SendQueueDrained = 4,
    /// The send queue failed, receiving goes on. For unreliable queue pairs; a reliable one goes to [`State::Error`].
    SendQueueError = 5,
    /// Everything posted is flushed.
    Error = 6,
}

impl State {
    /// The state of that number.
    pub(crate) fn parse(byte: u8) -> Option<State> {
        Some(match byte {
            0 => State::Reset,
            1 => State::Init,
            2 => State::ReadyToReceive,
            3 => State::ReadyToSend,
            4 => State::SendQueueDrained,
            5 => State::SendQueueError,
            6 => State::Error,
            _ => return None,
        })
    }

    /// Whether a modify call may go from `self` to `to` for a reliable connection (IBTA 10.3.1; the kernel's
    /// `qp_state_table` says the same). The send-queue-error state is left by a return to ready-to-send, but no reliable
    /// queue pair ever enters it.
    pub fn allows(self, to: State) -> bool {
        use State::{Error, Init, ReadyToReceive, ReadyToSend, Reset, SendQueueError};
        matches!(
            (self, to),
            (_, Reset | Error)
                | (Reset | Init, Init)
                | (Init, ReadyToReceive)
                | (ReadyToReceive | ReadyToSend | SendQueueError, ReadyToSend)
        )
    }
}

/// The part of a queue pair that its owner reads without the device's lock: what a card tells by asynchronous events.
#[derive(Debug, Default)]
pub struct Status {
    state: AtomicU8,
    overrun: AtomicU8,
    /// Whether the device looks at the registers in every turn. It clears this before a last look, and whoever rings looks
    /// here behind the ring: one of the two sees the other.
    watched: AtomicBool,
}

impl Status {
    pub(crate) fn set_watched(&self, watched: bool) {
        self.watched.store(watched, Ordering::Relaxed);
    }

    pub(crate) fn watched(&self) -> bool {
        self.watched.load(Ordering::Relaxed)
    }

    /// The state as the device last set it.
    pub fn state(&self) -> State {
        State::parse(self.state.load(Ordering::Acquire)).unwrap_or(State::Reset)
    }

    /// Whether a completion queue overran: completions were lost.
    pub fn overrun(&self) -> bool {
        self.overrun.load(Ordering::Acquire) != 0
    }
}

/// Attributes of a connection, the same on both sides where it matters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Attributes {
    /// Largest payload of a packet, in bytes: 256, 512, 1024, 2048 or 4096.
    pub mtu_bytes: u32,
    /// Time without an acknowledgement before packets are sent again: 4.096 us * 2^timeout; 0 waits for ever (IBTA 9.7.6.1.3).
    pub timeout: u8,
    /// How often packets are sent again, without any progress, before the queue pair fails: 0 to 7.
    pub retry_count: u8,
    /// The same for a peer with no receive posted: 0 to 6, and 7 for without end.
    pub rnr_retry: u8,
    /// What this side asks a sender to wait when no receive is posted: a code of IBTA table 45, 0 to 31.
    pub min_rnr_timer: u8,
    /// Reads and atomics on their way at once, 1 to 16.
    pub max_reads: u8,
    /// What the peer may do to this side's regions, where their keys allow it too.
    pub access: Access,
}

impl Default for Attributes {
    fn default() -> Attributes {
        Attributes {
            mtu_bytes: 4096,
            timeout: 14,
            retry_count: 7,
            rnr_retry: 7,
            min_rnr_timer: 12,
            max_reads: 16,
            access: Access::ALL,
        }
    }
}

impl Attributes {
    /// # Errors
    /// [`Error::Range`] naming the attribute.
    pub fn check(&self) -> Result<()> {
        let range = |argument, value: u32, min, max| {
            if (min..=max).contains(&u64::from(value)) {
                Ok(())
            } else {
                Err(Error::Range {
                    argument,
                    value: u64::from(value),
                    min,
                    max,
                })
            }
        };
        range("mtu_bytes", self.mtu_bytes, 256, 4096)?;
        if !self.mtu_bytes.is_power_of_two() {
            return Err(Error::Alignment {
                argument: "mtu_bytes",
                value: self.mtu_bytes.into(),
                align: 256,
            });
        }
        range("timeout", self.timeout.into(), 0, 31)?;
        range("retry_count", self.retry_count.into(), 0, 7)?;
        range("rnr_retry", self.rnr_retry.into(), 0, 7)?;
        range("min_rnr_timer", self.min_rnr_timer.into(), 0, 31)?;
        range("max_reads", self.max_reads.into(), 1, 16)
    }

    pub(crate) fn timeout_ns(&self) -> u64 {
        if self.timeout == 0 {
            u64::MAX
        } else {
            4096u64 << self.timeout
        }
    }
}

/// The other end of a connection.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Remote {
    pub(crate) to: Destination,
    pub(crate) qpn: u32,
    /// The connection number that the other end expects.
    pub(crate) connection: u32,
    /// The node that packets must come from; 0 for any.
    pub(crate) node: u16,
    /// Service level of packets to it.
    pub(crate) sl: u8,
}

/// Counters of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Counters {
    /// UAR stores seen.
    pub doorbells: u64,
    /// UAR stores that came before the doorbell record that should precede them: a bug of whoever rang.
    pub doorbells_before_record: u64,
    /// Work requests begun.
    pub wqes: u64,
    /// Packets sent, without what faults added or took.
    pub packets_sent: u64,
    /// Packets that arrived at a queue pair.
    pub packets_received: u64,
    /// Packets that arrived for nobody, or for an earlier connection.
    pub packets_dropped: u64,
    /// Times that a requester went back to send again.
    pub retransmissions: u64,
    /// Receiver-not-ready answers sent.
    pub rnr_naks: u64,
    /// Completions written.
    pub completions: u64,
}

/// What a queue pair needs of the rest of the device while it works.
pub(crate) struct Context<'a> {
    pub(crate) now_ns: u64,
    pub(crate) cqs: &'a mut [Option<Cq>],
    pub(crate) srqs: &'a mut [Option<Srq>],
    pub(crate) keys: &'a mut Keys,
    pub(crate) copies: &'a mut Copies,
    pub(crate) wire: &'a mut Wire,
    pub(crate) counters: &'a mut Counters,
    pub(crate) gather: &'a mut Gather,
    pub(crate) fabric: Option<&'a Fabric>,
    pub(crate) trace: Option<&'a mut Trace>,
    /// Set when a completion queue lost a completion.
    pub(crate) overran: &'a mut bool,
}

impl Context<'_> {
    fn complete(&mut self, cq: usize, cqe: &Cqe) -> bool {
        let lost = self.wire.strikes(Counted::Completion).is_some();
        let queue = self.cqs.get_mut(cq).and_then(Option::as_mut);
        let pushed = queue.is_some_and(|queue| {
            if lost {
                queue.break_down();
            }
            queue.push(cqe)
        });
        *self.overran |= !pushed;
        if let Some(trace) = &mut self.trace {
            trace.cqe(self.now_ns, cq, cqe, pushed);
        }
        self.counters.completions += u64::from(pushed);
        pushed
    }
}

/// The memory and the numbers with which a queue pair is created.
#[derive(Debug)]
pub(crate) struct Parts {
    pub(crate) qpn: u32,
    pub(crate) transport: Transport,
    pub(crate) pd: u32,
    /// Put into every CQE.
    pub(crate) user_index: u32,
    /// The shared receive queue from which it takes, instead of its own.
    pub(crate) srq: Option<usize>,
    /// Who hears what becomes of it. An embedded device's owner looks at its [`Status`].
    pub(crate) events: Option<Arc<dyn EventSink>>,
    pub(crate) send_cq: usize,
    pub(crate) recv_cq: usize,
    pub(crate) send_ring: Ring,
    pub(crate) send_record: RecordWord,
    pub(crate) recv_ring: Ring,
    pub(crate) recv_wqes: u32,
    pub(crate) recv_stride_bytes: u32,
    pub(crate) recv_record: RecordWord,
    /// Its own registers, or none if it is one of many on a page.
    pub(crate) uar: Option<[Register; 2]>,
    /// That page, then.
    pub(crate) page: usize,
    /// Its own multicast does not come back to it.
    pub(crate) blocks_loopback: bool,
}

/// A queue pair.
#[derive(Debug)]
pub(crate) struct Qp {
    pub(crate) parts: Parts,
    pub(crate) status: Arc<Status>,
    pub(crate) attributes: Attributes,
    /// Attributes as a client set them.
    pub(crate) asked: Box<QpAttributes>,
    pub(crate) remote: Option<Remote>,
    /// The connection number that this end expects in packets.
    pub(crate) connection: u32,
    pub(crate) requester: Requester,
    pub(crate) responder: Responder,
    /// Set while the queue pair stands in the device's list of that name.
    pub(crate) ready: bool,
    pub(crate) answering: bool,
    pub(crate) timed: bool,
    /// Waits for room on a lane, and stands in no list of those with something to send until there is some.
    pub(crate) held: bool,
    /// Its memory cannot be reached, so there is nothing to flush.
    lost: bool,
}

impl Qp {
    pub(crate) fn new(parts: Parts) -> Qp {
        Qp {
            parts,
            status: Arc::default(),
            attributes: Attributes::default(),
            asked: Box::default(),
            remote: None,
            connection: 0,
            requester: Requester::default(),
            responder: Responder::default(),
            ready: false,
            answering: false,
            timed: false,
            held: false,
            lost: false,
        }
    }

    pub(crate) fn state(&self) -> State {
        self.status.state()
    }

    /// Who it is to the key table.
    pub(crate) fn accessor(&self) -> Accessor {
        Accessor {
            pd: self.parts.pd,
            qpn: self.parts.qpn,
        }
    }

    pub(crate) fn set_state(&mut self, state: State) {
        self.status.state.store(state as u8, Ordering::Release);
    }

    /// Forgets everything: as after creation, with new starting numbers to come from `connect`.
    pub(crate) fn reset(&mut self) {
        self.requester = Requester::default();
        self.responder = Responder::default();
        self.remote = None;
        self.connection = 0;
        self.lost = false;
        self.parts.send_ring.forget();
        self.parts.recv_ring.forget();
        *self.asked = QpAttributes::default();
        self.status.overrun.store(0, Ordering::Release);
        self.set_state(State::Reset);
    }

    /// Sends a packet to the other end.
    #[inline]
    pub(crate) fn send(
        &self,
        context: &mut Context<'_>,
        kind: Kind,
        psn: u32,
        payload: Payload,
        fill: impl FnOnce(&mut Header),
    ) {
        let Some(remote) = self.remote else { return };
        let mut header = Header::new(kind, remote.qpn, psn, remote.connection);
        header.source_qpn = self.parts.qpn;
        header.source_lid = context.fabric.map_or(0, Fabric::node);
        header.sl = remote.sl;
        if self.parts.transport == Transport::Uc {
            header.service = Service::Unreliable;
        }
        fill(&mut header);
        self.send_to(context, remote.to, Packet { header, payload });
    }

    #[inline]
    pub(crate) fn send_to(&self, context: &mut Context<'_>, to: Destination, mut packet: Packet) {
        context.counters.packets_sent += 1;
        if context.wire.is_faulty() {
            garble(context, &mut packet.header);
        }
        if let Some(trace) = &mut context.trace {
            trace.sent(context.now_ns, to, &packet.header);
        }
        context.wire.send(context.now_ns, to, packet);
    }

    /// Whether a packet that has come for this number is of its transport, and from its peer.
    #[inline]
    pub(crate) fn expects(&self, header: &Header) -> bool {
        match (self.parts.transport, header.service) {
            (Transport::Rc, Service::Reliable) | (Transport::Uc, Service::Unreliable) => {
                self.connection == header.connection
                    && self
                        .remote
                        .is_some_and(|remote| remote.node == 0 || remote.node == header.source_lid)
            }
            (Transport::Ud, Service::Datagram) => true,
            _ => false,
        }
    }

    /// Whether it sends, or finishes what it began before it was told to drain.
    #[inline]
    pub(crate) fn is_sending(&self) -> bool {
        matches!(self.state(), State::ReadyToSend | State::SendQueueDrained)
    }

    /// Whether it receives. A failed or drained send queue does not keep it from that.
    #[inline]
    pub(crate) fn is_receiving(&self) -> bool {
        matches!(
            self.state(),
            State::ReadyToReceive
                | State::ReadyToSend
                | State::SendQueueDrained
                | State::SendQueueError
        )
    }

    /// Completes a work request of the send queue.
    #[inline]
    pub(crate) fn complete_send(
        &mut self,
        context: &mut Context<'_>,
        wqe_counter: u16,
        opcode: u8,
        byte_count: u32,
        syndrome: Option<Syndrome>,
    ) {
        // Behind what it reports.
        let lost = context.copies.settle_for(self.parts.qpn);
        let syndrome = syndrome.or(lost.then_some(Syndrome::LocalProt));
        let cqe = Cqe {
            opcode: if syndrome.is_some() {
                CqeOpcode::ReqErr
            } else {
                CqeOpcode::Req
            },
            qpn: self.parts.qpn,
            srqn_uidx: self.parts.user_index,
            wqe_counter,
            byte_count,
            send_opcode: opcode,
            syndrome: syndrome.map_or(0, |syndrome| syndrome as u8),
            timestamp: context.now_ns,
            ..Cqe::default()
        };
        let pushed = context.complete(self.parts.send_cq, &cqe);
        self.check_overrun(pushed);
        if lost {
            self.enter_error(context);
        }
    }

    /// Completes a receive.
    pub(crate) fn complete_recv(&mut self, context: &mut Context<'_>, cqe: Cqe) {
        // Behind what it reports.
        let lost = context.copies.settle_for(self.parts.qpn) && !cqe.opcode.is_error();
        let mut cqe = Cqe {
            qpn: self.parts.qpn,
            srqn_uidx: self.parts.user_index,
            timestamp: context.now_ns,
            ..cqe
        };
        if lost {
            cqe.opcode = CqeOpcode::RespErr;
            cqe.syndrome = Syndrome::LocalProt as u8;
        }
        let pushed = context.complete(self.parts.recv_cq, &cqe);
        self.check_overrun(pushed);
        if lost {
            self.refuse_done(context);
        }
    }

    /// The memory of a request was not there, which was found out behind it, or that of a response.
    pub(crate) fn lose_data(&mut self, context: &mut Context<'_>, request: bool) {
        if matches!(self.state(), State::Reset | State::Error) {
            return;
        }
        if request {
            self.refuse_done(context);
        } else {
            self.fail_oldest(context, Syndrome::LocalProt);
        }
    }

    fn check_overrun(&mut self, pushed: bool) {
        if !pushed {
            self.status.overrun.store(1, Ordering::Release);
            self.fail_by_itself();
        }
    }

    /// Tells its owner.
    pub(crate) fn notify(&self, event: Event) {
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

    /// Moves to the error state without a completion that would tell why.
    pub(crate) fn fail_by_itself(&mut self) {
        if self.state() != State::Error {
            self.set_state(State::Error);
            self.notify(Event::QpFatal {
                qpn: self.parts.qpn,
            });
        }
    }

    /// Moves to the error state and flushes both queues: every work request gets a completion, also an unsignaled one.
    pub(crate) fn enter_error(&mut self, context: &mut Context<'_>) {
        self.trace_state(context, State::Error);
        self.set_state(State::Error);
        self.flush(context);
    }

    fn trace_state(&self, context: &mut Context<'_>, to: State) {
        if let Some(trace) = &mut context.trace {
            trace.state(context.now_ns, self.parts.qpn, self.state(), to);
        }
    }

    /// Completes in error what was posted; called again and again in the error state, for what is posted later.
    pub(crate) fn flush(&mut self, context: &mut Context<'_>) {
        if self.lost {
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

    /// The send queue cannot go on. A reliable queue pair is in error with it; the others go on receiving.
    pub(crate) fn fail_sends(&mut self, context: &mut Context<'_>) {
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
fn garble(context: &mut Context<'_>, header: &mut Header) {
    let other = match header.kind {
        Kind::ReadResponse => Kind::AtomicResponse,
        Kind::AtomicResponse => Kind::ReadResponse,
        _ => return,
    };
    if context.wire.strikes(Counted::Response).is_some() {
        header.kind = other;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_transitions_of_the_specification_are_allowed() {
        use State::{Error, Init, ReadyToReceive, ReadyToSend, Reset, SendQueueError};
        let all = [
            Reset,
            Init,
            ReadyToReceive,
            ReadyToSend,
            SendQueueError,
            Error,
        ];
        let allowed: Vec<_> = all
            .iter()
            .flat_map(|&a| all.iter().map(move |&b| (a, b)))
            .filter(|(a, b)| a.allows(*b))
            .collect();
        for state in all {
            assert!(allowed.contains(&(state, Reset)) && allowed.contains(&(state, Error)));
        }
        let forward: Vec<_> = allowed
            .into_iter()
            .filter(|(_, b)| !matches!(b, Reset | Error))
            .collect();
        assert_eq!(
            forward,
            [
                (Reset, Init),
                (Init, Init),
                (Init, ReadyToReceive),
                (ReadyToReceive, ReadyToSend),
                (ReadyToSend, ReadyToSend),
                (SendQueueError, ReadyToSend)
            ]
        );
    }

    #[test]
    fn attributes_out_of_range_are_named() {
        let bad = |attributes: Attributes| match attributes.check() {
            Err(Error::Range { argument, .. } | Error::Alignment { argument, .. }) => argument,
            other => panic!("{other:?}"),
        };
        let good = Attributes::default();
        assert_eq!(good.check(), Ok(()));
        assert_eq!(
            bad(Attributes {
                mtu_bytes: 128,
                ..good
            }),
            "mtu_bytes"
        );
        assert_eq!(
            bad(Attributes {
                mtu_bytes: 1500,
                ..good
            }),
            "mtu_bytes"
        );
        assert_eq!(
            bad(Attributes {
                timeout: 32,
                ..good
            }),
            "timeout"
        );
        assert_eq!(
            bad(Attributes {
                retry_count: 8,
                ..good
            }),
            "retry_count"
        );
        assert_eq!(
            bad(Attributes {
                rnr_retry: 8,
                ..good
            }),
            "rnr_retry"
        );
        assert_eq!(
            bad(Attributes {
                max_reads: 0,
                ..good
            }),
            "max_reads"
        );
    }
}
