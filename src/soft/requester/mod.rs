//! The requester of a reliable connection: from work requests to packets, and from acknowledgements to completions.
//!
//! Sequence numbers, windows, going back and the counters of retries are those of IBTA volume 1, section 9.7. The state is
//! a queue of messages. `cursor` and `packet` say which packet leaves next; going back is setting them back.

mod answers;
mod datagrams;
mod windows;

use std::collections::VecDeque;

use crate::mlx5::{Syndrome, WindowUpdate};
use crate::soft::client::{Event, Transport};
use crate::soft::gather::Request;
use crate::soft::keys::Access;
use crate::soft::packet::{Kind, MAX_PAYLOAD_BYTES, Payload, flag, psn_add, psn_distance};
use crate::soft::qp::{Context, Parts, Qp, State};
use crate::soft::wire::{Counted, Destination};

/// Packets that may be without acknowledgement.
const WINDOW: i32 = 256;
/// Packets that one queue pair sends before others have their turn.
const BURST: u32 = 32;
/// The longest message (IBTA: 2^31 bytes).
const MAX_MESSAGE_BYTES: u64 = 1 << 31;
/// The most packets of one message: well within half of the 24-bit sequence space, so that distances keep their sign. At
/// an MTU of 4096 the length limit comes first; at 256 it is 1 GiB.
const MAX_MESSAGE_PACKETS: u32 = 1 << 22;

const NOP: u8 = 0x00;
const SEND_INVAL: u8 = 0x01;
const RDMA_WRITE: u8 = 0x08;
const RDMA_WRITE_IMM: u8 = 0x09;
const SEND: u8 = 0x0a;
const SEND_IMM: u8 = 0x0b;
const RDMA_READ: u8 = 0x10;
const ATOMIC_CS: u8 = 0x11;
const ATOMIC_FA: u8 = 0x12;
const UMR: u8 = WindowUpdate::OPCODE;

/// A work request that was begun and is not complete.
#[derive(Debug)]
struct Message {
    /// Running WQEBB count of its WQE.
    index: u32,
    request: Request,
    /// First PSN, and how many the message takes: of a read, those of its response.
    first_psn: u32,
    packets: u32,
    /// Of a read or an atomic: response packets that came.
    responses: u32,
    /// What the completion will say, if it is no success.
    failed: Option<Syndrome>,
    /// What is to be done to a memory window, until it is done.
    window: Option<Box<WindowUpdate>>,
}

impl Message {
    fn wants_response(&self) -> bool {
        matches!(self.request.opcode, RDMA_READ | ATOMIC_CS | ATOMIC_FA)
    }

    fn answered(&self) -> bool {
        self.responses >= self.packets
    }

    fn wqebbs(&self) -> u32 {
        u32::from(self.request.ds).div_ceil(4)
    }
}

/// The state of one send queue in the device.
#[derive(Debug, Default)]
pub(crate) struct Requester {
    /// Running count of WQEBBs that doorbells announced.
    announced: u32,
    /// Running count of WQEBBs taken into `messages`.
    begun: u32,
    messages: VecDeque<Message>,
    cursor: usize,
    packet: u32,
    next_psn: u32,
    /// The oldest PSN without acknowledgement, and the one after the highest that was sent.
    unacked_psn: u32,
    unsent_psn: u32,
    /// Reads and atomics before the cursor that are not answered: those on their way.
    reads: u32,
    /// Reads and atomics in `messages` that are not answered.
    unanswered: u32,
    /// Set when a lost response made the requester go back, until something arrives: one loss, one retry.
    asked_again: bool,
    retries: u8,
    rnr_retries: u8,
    /// When to send again without having heard anything; `None` while nothing is outstanding.
    deadline_ns: Option<u64>,
    /// Not before this time, because the receiver was not ready.
    wait_until_ns: u64,
    /// The owner knows that the queue is drained.
    pub(crate) told_drained: bool,
}

impl Requester {
    /// Starts a connection.
    pub(crate) fn connect(&mut self, psn: u32) {
        self.next_psn = psn;
        self.unacked_psn = psn;
        self.unsent_psn = psn;
    }

    /// A doorbell: `index` is the WQE's 16-bit count and `wqebbs` its length, `recorded` the doorbell record's count, and
    /// `ring_wqebbs` the length of the ring, which bounds how far one count can be ahead of another. Whether the record was
    /// behind.
    pub(crate) fn announce(
        &mut self,
        index: u16,
        wqebbs: u16,
        recorded: u16,
        ring_wqebbs: u32,
    ) -> bool {
        let told = index.wrapping_add(wqebbs);
        // Half of the 16-bit space is the longest ring: a sign bit would take one that was filled at once for one gone back.
        let behind = u32::from(recorded.wrapping_sub(told)) > ring_wqebbs;
        // A card works up to the record; a store that came too early waits for the next one.
        let upto = if behind { recorded } else { told };
        let ahead = upto.wrapping_sub(self.announced as u16);
        if u32::from(ahead) <= ring_wqebbs {
            self.announced = self.announced.wrapping_add(ahead.into());
        }
        behind
    }

    /// A doorbell of which only the record tells. Whether it announces anything.
    pub(crate) fn announce_recorded(&mut self, recorded: u16, ring_wqebbs: u32) -> bool {
        let before = self.announced;
        self.announce(recorded, 0, recorded, ring_wqebbs);
        self.announced != before
    }

    /// Whether work requests were begun that are not complete.
    pub(crate) fn is_sending(&self) -> bool {
        !self.messages.is_empty()
    }

    /// Whether there is something that could be sent, were it not for windows and waits.
    pub(crate) fn has_work(&self) -> bool {
        self.cursor < self.messages.len() || self.begun != self.announced
    }

    /// Moves the cursor over what was acknowledged after the requester had gone back: sent once more, it would be a message
    /// for which no new acknowledgement can come.
    fn catch_up(&mut self) {
        while let Some(message) = self.messages.get(self.cursor) {
            let arrived = psn_distance(self.unacked_psn, message.first_psn);
            if message.wants_response() || arrived < message.packets as i32 {
                if !message.wants_response() && arrived > self.packet as i32 {
                    self.packet = arrived as u32;
                }
                return;
            }
            self.cursor += 1;
            self.packet = 0;
        }
    }

    /// When the requester wants to be called again though nothing arrived.
    pub(crate) fn next_timer_ns(&self) -> Option<u64> {
        let waiting = (self.wait_until_ns > 0).then_some(self.wait_until_ns);
        match (self.deadline_ns, waiting) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        }
    }
}

/// Why `transmit` stopped.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Pause {
    /// Nothing to do before a doorbell, a packet or a timer.
    Idle,
    /// The burst is used up: come again.
    Burst,
    /// The lane is full: come again when others had their turn.
    Congested,
}

impl Qp {
    /// Whether there is something that could be sent in this state, were it not for windows and waits.
    pub(crate) fn has_sends(&self) -> bool {
        match self.state() {
            State::SendQueueDrained => self.requester.cursor < self.requester.messages.len(),
            _ => self.requester.has_work(),
        }
    }

    /// Tells that everything begun is complete, once, if the owner wants to know.
    pub(crate) fn tell_drained(&mut self) {
        if self.requester.messages.is_empty() && !self.requester.told_drained {
            self.requester.told_drained = true;
            if self.asked.en_sqd_async_notify {
                self.notify(Event::SendQueueDrained {
                    qpn: self.parts.qpn,
                });
            }
        }
    }

    /// The message at the cursor cannot be sent: it ends the send queue when its turn comes.
    fn fail_at_cursor(&mut self, context: &mut Context<'_>, syndrome: Syndrome) {
        if let Some(message) = self.requester.messages.get_mut(self.requester.cursor) {
            message.failed = Some(syndrome);
        }
        self.reap(context);
    }

    /// Sends what may be sent.
    #[inline]
    pub(crate) fn transmit(&mut self, context: &mut Context<'_>) -> Pause {
        let datagrams = self.parts.transport == Transport::Ud;
        let to = match self.remote {
            Some(remote) => remote.to,
            None if datagrams => Destination::Nowhere,
            None => return Pause::Idle,
        };
        if !self.is_sending() || self.requester.wait_until_ns > context.now_ns {
            return Pause::Idle;
        }
        for _ in 0..BURST {
            if self.requester.cursor == self.requester.messages.len()
                && (self.state() != State::ReadyToSend || !self.begin(context))
            {
                return Pause::Idle;
            }
            let requester = &self.requester;
            let Some(message) = requester.messages.get(requester.cursor) else {
                return Pause::Idle;
            };
            if message.failed.is_some() {
                self.reap(context);
                return Pause::Idle;
            }
            if message.packets == 0 {
                if message.window.is_some() {
                    if message.request.fence && requester.reads > 0 {
                        return Pause::Idle;
                    }
                    self.update_window(context);
                    continue;
                }
                self.requester.cursor += 1;
                self.reap(context);
                if !self.is_sending() {
                    return Pause::Idle;
                }
                continue;
            }
            if datagrams {
                if let Some(pause) = self.send_datagram(context) {
                    return pause;
                }
                if !self.is_sending() {
                    return Pause::Idle;
                }
                continue;
            }
            let starts = requester.packet == 0;
            let blocked_by_reads = (message.request.fence && starts && requester.reads > 0)
                || (message.wants_response()
                    && requester.reads >= u32::from(self.attributes.max_reads));
            let psn = psn_add(message.first_psn, requester.packet);
            if blocked_by_reads || psn_distance(psn, requester.unacked_psn) >= WINDOW {
                return Pause::Idle;
            }
            if context.wire.congested(to) {
                self.arm(context);
                return Pause::Congested;
            }
            self.send_packet(context, psn);
        }
        Pause::Burst
    }

    /// Takes the next announced WQE into the queue of messages. `false` if there is none.
    #[inline]
    fn begin(&mut self, context: &mut Context<'_>) -> bool {
        let requester = &mut self.requester;
        let waiting = requester.announced.wrapping_sub(requester.begun);
        if waiting == 0 {
            return false;
        }
        context.counters.wqes += 1;
        let index = requester.begun;
        let loaded = context.gather.load(&self.parts, index, waiting);
        let message = match loaded {
            Ok(request) => {
                let mut failed = check(&request, context, &self.parts).err();
                let mut packets = match request.opcode {
                    NOP | UMR => 0,
                    ATOMIC_CS | ATOMIC_FA => 1,
                    _ => (request.total_bytes.min(MAX_MESSAGE_BYTES) as u32)
                        .div_ceil(self.attributes.mtu_bytes)
                        .max(1),
                };
                if packets > MAX_MESSAGE_PACKETS {
                    failed = Some(Syndrome::LocalLength);
                    packets = 1;
                }
                Message {
                    index,
                    request,
                    first_psn: requester.next_psn,
                    packets,
                    responses: 0,
                    failed,
                    window: context.gather.window.map(Box::new),
                }
            }
            Err(syndrome) => Message {
                index,
                // Its length is unknown: one block, so that the flush can go on behind it.
                request: Request {
                    ds: 1,
                    ..Request::default()
                },
                first_psn: requester.next_psn,
                packets: 1,
                responses: 0,
                failed: Some(syndrome),
                window: None,
            },
        };
        let mut message = message;
        if let Some(syndrome) = context.wire.strikes(Counted::Send) {
            message.failed = Syndrome::from_raw(syndrome).or(message.failed);
        }
        if let Some(trace) = &mut context.trace {
            let (request, failed) = (&message.request, message.failed);
            trace.send_wqe(
                context.now_ns,
                &self.parts,
                index,
                request,
                context.gather,
                failed,
            );
        }
        requester.next_psn = psn_add(requester.next_psn, message.packets);
        requester.begun = requester.begun.wrapping_add(message.wqebbs());
        requester.unanswered += u32::from(message.wants_response());
        requester.messages.push_back(message);
        true
    }

    /// Sends the packet at the cursor and moves on.
    #[inline]
    fn send_packet(&mut self, context: &mut Context<'_>, psn: u32) {
        let mtu = self.attributes.mtu_bytes;
        let requester = &mut self.requester;
        let packet = requester.packet;
        let Some(message) = requester.messages.get_mut(requester.cursor) else {
            return;
        };
        let request = message.request;
        let total = request.total_bytes as u32;
        if message.wants_response() {
            // A read that is asked again asks for what is still missing.
            let done = message.responses * mtu;
            let missing = total - done.min(total);
            let psn = psn_add(message.first_psn, message.responses);
            let after = psn_add(message.first_psn, message.packets);
            requester.cursor += 1;
            requester.packet = 0;
            requester.reads += 1;
            if psn_distance(after, requester.unsent_psn) > 0 {
                requester.unsent_psn = after;
            }
            let kind = match request.opcode {
                RDMA_READ => Kind::ReadRequest,
                ATOMIC_CS => Kind::CompareSwap,
                _ => Kind::FetchAdd,
            };
            self.send(context, kind, psn, Payload::Empty, |header| {
                header.flags = flag::FIRST | flag::LAST;
                header.rkey = request.rkey;
                header.addr = request.remote_addr.wrapping_add(done.into());
                header.total_bytes = missing;
                header.operand = request.operand;
                header.compare = request.compare;
            });
            return self.arm(context);
        }
        let offset = packet * mtu;
        let payload_bytes = (total - offset).min(mtu);
        let (index, last) = (message.index, packet + 1 == message.packets);
        let loaded = context.gather.holds(self.parts.qpn, index)
            || context.gather.load(&self.parts, index, u32::MAX).is_ok();
        let reliable = self.parts.transport == Transport::Rc;
        let (keys, copies, pd) = (&*context.keys, &mut *context.copies, self.parts.pd);
        // Unreliable means that the memory is the application's again at once.
        let payload = if reliable {
            context
                .gather
                .payload(keys, copies, pd, offset, payload_bytes)
        } else {
            context
                .gather
                .by_value(keys, copies, pd, offset, payload_bytes)
        };
        let Some(payload) = payload.ok().filter(|_| loaded) else {
            // The region went away after the work request was begun.
            message.failed = Some(Syndrome::LocalProt);
            return self.reap(context);
        };
        requester.packet += 1;
        if last {
            requester.cursor += 1;
            requester.packet = 0;
        }
        let after = psn_add(psn, 1);
        if psn_distance(after, requester.unsent_psn) > 0 {
            requester.unsent_psn = after;
        }
        if !reliable {
            requester.unacked_psn = requester.unsent_psn;
        }
        let mark = match request.opcode {
            SEND_IMM | RDMA_WRITE_IMM => flag::IMMEDIATE,
            SEND_INVAL => flag::INVALIDATE,
            _ => 0,
        };
        let kind = if matches!(request.opcode, SEND | SEND_IMM | SEND_INVAL) {
            Kind::Send
        } else {
            Kind::Write
        };
        self.send(context, kind, psn, payload, |header| {
            header.payload_bytes = payload_bytes as u16;
            if packet == 0 {
                header.flags |= flag::FIRST;
                header.addr = request.remote_addr;
                header.rkey = request.rkey;
                header.total_bytes = total;
            }
            if last {
                header.flags |= flag::LAST;
                if mark != 0 {
                    header.flags |= mark;
                    header.imm = request.imm;
                }
                if request.solicited {
                    header.flags |= flag::SOLICITED;
                }
            }
        });
        if reliable {
            self.arm(context);
        } else if last {
            self.reap(context);
        }
    }

    /// Starts the timer, if it does not run.
    #[inline]
    fn arm(&mut self, context: &Context<'_>) {
        if self.requester.deadline_ns.is_none() {
            self.requester.deadline_ns =
                Some(context.now_ns.saturating_add(self.attributes.timeout_ns()));
        }
    }
}

/// What can be found wrong before anything is sent.
fn check(request: &Request, context: &Context<'_>, parts: &Parts) -> Result<(), Syndrome> {
    let opcode = request.opcode;
    let known = match parts.transport {
        Transport::Rc => true,
        Transport::Uc => matches!(
            opcode,
            NOP | UMR | SEND | SEND_IMM | RDMA_WRITE | RDMA_WRITE_IMM
        ),
        Transport::Ud => matches!(opcode, NOP | SEND | SEND_IMM),
    };
    let need = match opcode {
        _ if !known => return Err(Syndrome::LocalQpOp),
        NOP | UMR => return Ok(()),
        SEND | SEND_IMM | SEND_INVAL | RDMA_WRITE | RDMA_WRITE_IMM => Access::LOCAL_READ,
        RDMA_READ | ATOMIC_CS | ATOMIC_FA => Access::LOCAL_WRITE,
        _ => return Err(Syndrome::LocalQpOp),
    };
    let longest = match parts.transport {
        Transport::Ud => MAX_PAYLOAD_BYTES as u64,
        _ => MAX_MESSAGE_BYTES,
    };
    if request.total_bytes > longest {
        return Err(Syndrome::LocalLength);
    }
    if matches!(opcode, ATOMIC_CS | ATOMIC_FA) && request.total_bytes != 8 {
        return Err(Syndrome::LocalLength);
    }
    context
        .gather
        .check(context.keys, parts.pd, need)
        .map_err(|_| Syndrome::LocalProt)
}
