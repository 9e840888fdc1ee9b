//! Making, changing and destroying what the device has: queue pairs, their states, completion queues.

use super::DeviceCore;
use super::doorbells::ring;
use crate::device::cq::Cq;
use crate::device::qp::{Attributes, Qp, QpSetup, RemoteEnd, State};
use crate::device::queue_pair::{MAX_READS, RemoteQueuePair};
use crate::{Error, Result, StateKind};

/// Queue pairs of one device: 16 bits of the number, the other 8 are a generation.
const MAX_QPS: usize = 1 << 16;
/// Queue pairs of a device on a fabric: 14 bits of the number, under 4 of a generation and 6 of the node. The last ones would,
/// on the last node, have the number that stands for multicast.
const MAX_QPS_OF_NODE: usize = (1 << 14) - 1;

/// A slot for a new object, `first` or one behind it.
pub(super) fn free_slot<T>(slots: &mut Vec<Option<T>>, first: usize) -> usize {
    let free = slots.iter().skip(first).position(Option::is_none);
    let slot = free.map_or(slots.len().max(first), |free| free + first);
    while slots.len() <= slot {
        slots.push(None);
    }
    slot
}

impl DeviceCore {
    pub(crate) fn create_pd(&mut self) -> u32 {
        self.next_pd += 1;
        self.next_pd - 1
    }

    pub(crate) fn create_cq(&mut self, cq: Cq) -> usize {
        let slot = free_slot(&mut self.parts.cqs, 0);
        self.parts.cqs[slot] = Some(cq);
        slot
    }

    pub(crate) fn destroy_cq(&mut self, cq: usize) {
        if let Some(slot) = self.parts.cqs.get_mut(cq) {
            *slot = None;
        }
    }

    /// Reserves a queue pair number: slot, and the number itself.
    pub(crate) fn reserve_qp(&mut self) -> Result<(usize, u32)> {
        self.check_present_for("create_qp")?;
        let max = if self.parts.fabric.is_some() {
            MAX_QPS_OF_NODE
        } else {
            MAX_QPS
        };
        let Some((slot, generation)) = self.numbers.reserve(max) else {
            return Err(Error::state(
                StateKind::Exhausted,
                "create_qp",
                format!("the device has {max} queue pairs"),
            ));
        };
        if self.qps.len() <= slot {
            self.qps.resize_with(slot + 1, || None);
        }
        let qpn = match &self.parts.fabric {
            Some(fabric) => u32::from(fabric.node()) << 18 | (generation & 0xf) << 14,
            None => generation << 16,
        };
        Ok((slot, qpn | slot as u32))
    }

    pub(crate) fn create_qp(&mut self, slot: usize, parts: QpSetup) -> &Qp {
        self.registers.set(slot, parts.uar);
        self.qps[slot].insert(Box::new(Qp::new(parts)))
    }

    pub(crate) fn destroy_qp(&mut self, slot: usize) {
        self.leave_lane(slot);
        self.qps[slot] = None;
        self.registers.remove(slot);
        self.lists.forget(slot);
        self.numbers.free(slot);
    }

    fn qp_mut(&mut self, slot: usize) -> Result<&mut Qp> {
        let gone = Error::state(StateKind::QueuePair, "modify_qp", "the queue pair is gone");
        self.qps
            .get_mut(slot)
            .and_then(Option::as_deref_mut)
            .ok_or(gone)
    }

    fn check_present_for(&self, operation: &'static str) -> Result<()> {
        if self.gone {
            return Err(Error::state(
                StateKind::DeviceGone,
                operation,
                "the device is gone",
            ));
        }
        Ok(())
    }

    fn transition(&mut self, slot: usize, to: State) -> Result<&mut Qp> {
        self.check_present_for("modify_qp")?;
        let qp = self.qp_mut(slot)?;
        let from = qp.state();
        if from.allows(to) {
            Ok(qp)
        } else {
            Err(Error::state(
                StateKind::QueuePair,
                "modify_qp",
                format!("{from:?} does not lead to {to:?}"),
            ))
        }
    }

    /// RESET to INIT.
    pub(crate) fn init_qp(&mut self, slot: usize, attributes: Attributes) -> Result<()> {
        attributes.check()?;
        let qp = self.transition(slot, State::Init)?;
        qp.attributes = attributes;
        qp.asked.qkey = attributes.qkey;
        qp.set_state(State::Init);
        Ok(())
    }

    /// INIT to RTR: from now on the other end's packets are taken. `own`: the PSN to send from and the number of the connection.
    pub(crate) fn ready_to_receive(
        &mut self,
        slot: usize,
        remote: &RemoteQueuePair,
        own: (u32, u32),
    ) -> Result<()> {
        self.transition(slot, State::ReadyToReceive)?;
        let to = self.destination(&remote.port.0)?;
        // Packets between hosts do not have the number of their connection.
        let is_counted = self.parts.host_gid.is_none();
        let (psn, connection) = (own.0, if is_counted { own.1 } else { 0 });
        let theirs = if is_counted { remote.connection } else { 0 };
        let qp = self.qp_mut(slot)?;
        qp.remote = Some(RemoteEnd {
            to,
            host: remote.port.host_gid(),
            qpn: remote.qpn & 0xff_ffff,
            connection: theirs,
            node: 0,
            sl: 0,
        });
        qp.connection = connection;
        qp.requester.connect(psn);
        qp.responder.connect(remote.psn & 0xff_ffff);
        qp.responder.depth = MAX_READS;
        // No more than the peer serves: it treats one too many as an invalid request.
        qp.attributes.max_reads = qp.attributes.max_reads.min(remote.reads);
        qp.set_state(State::ReadyToReceive);
        self.parts.links.enter(to);
        Ok(())
    }

    /// INIT to RTR of a UD queue pair, with the PSN to send from.
    pub(crate) fn activate_datagrams(&mut self, slot: usize, psn: u32) -> Result<()> {
        let qp = self.transition(slot, State::ReadyToReceive)?;
        qp.requester.connect(psn);
        qp.set_state(State::ReadyToReceive);
        Ok(())
    }

    /// INIT to RTS, with the PSN to send from and the one to expect.
    #[cfg(test)]
    pub(crate) fn start_qp(&mut self, slot: usize, psns: (u32, u32)) {
        if let Ok(qp) = self.transition(slot, State::ReadyToReceive) {
            qp.requester.connect(psns.0);
            qp.responder.connect(psns.1);
            qp.responder.depth = MAX_READS;
            qp.set_state(State::ReadyToSend);
        }
        self.mark_active(slot);
    }

    /// RTR to RTS.
    pub(crate) fn ready_to_send(&mut self, slot: usize) -> Result<()> {
        self.transition(slot, State::ReadyToSend)?
            .set_state(State::ReadyToSend);
        self.mark_active(slot);
        Ok(())
    }

    /// Any state to ERR. When this returns, everything posted is flushed and the device writes nothing more but flushes.
    pub(crate) fn fail_qp(&mut self, slot: usize, now_ns: u64) {
        if self.gone {
            return;
        }
        if let Some(Some(qp)) = self.qps.get_mut(slot) {
            // What was rung before this call counts as posted.
            match self.registers.get(slot) {
                Some(uar) => {
                    ring(qp, uar, &mut self.parts);
                }
                _ => self.count_sends(slot),
            }
        }
        if let Some(Some(qp)) = self.qps.get_mut(slot) {
            qp.enter_error(self.parts.at(now_ns));
        }
        self.mark_active(slot);
    }

    /// Fails the queue pairs of clients whose completion queue lost a completion.
    #[cold]
    pub(super) fn spread_overruns(&mut self) {
        self.parts.overran = false;
        for slot in 0..self.qps.len() {
            let Some(Some(qp)) = self.qps.get_mut(slot) else {
                continue;
            };
            let broken =
                |cq: usize| matches!(self.parts.cqs.get(cq), Some(Some(cq)) if cq.is_overrun());
            let concerned =
                qp.parts.uar.is_none() && (broken(qp.parts.send_cq) || broken(qp.parts.recv_cq));
            if concerned && !matches!(qp.state(), State::Reset | State::Init | State::Error) {
                qp.fail_by_itself();
                self.mark_active(slot);
            }
        }
    }
}
