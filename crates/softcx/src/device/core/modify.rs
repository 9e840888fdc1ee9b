//! Changing and asking the state of a client's queue pair.

use super::DeviceCore;
use crate::device::client::{Errno, GID_IS_EMPTY, QpAttributes, Transport, mask};
use crate::device::keys::Access;
use crate::device::qp::{Attributes, Qp, State};
use crate::device::transitions;

/// Reads and atomics on their way at once.
pub(crate) const MAX_RD_ATOMIC: u8 = 16;

/// A number of reads and atomics as the device has it. It has the logarithm, which the kernel's driver rounds up, and leaves at 0 for a number of 0
/// (`__mlx5_ib_modify_qp`; some versions before 6.12 rounded down).
fn depth(most: u8) -> u8 {
    most.next_power_of_two()
}

impl QpAttributes {
    /// Whether what `named` names is in range.
    fn check(&self, named: u32) -> Result<(), Errno> {
        let fits = |bit, fits| named & bit == 0 || fits;
        let all = fits(mask::PATH_MTU, (1..=5).contains(&self.path_mtu))
            && fits(mask::PORT, self.port == 1)
            && fits(mask::PKEY_INDEX, self.pkey_index == 0)
            && fits(mask::AV, self.path.port <= 1)
            && fits(mask::TIMEOUT, self.timeout <= 31)
            && fits(mask::RETRY_CNT, self.retry_count <= 7)
            && fits(mask::RNR_RETRY, self.rnr_retry <= 7)
            && fits(mask::MIN_RNR_TIMER, self.min_rnr_timer <= 31)
            && fits(mask::MAX_QP_RD_ATOMIC, self.max_rd_atomic <= MAX_RD_ATOMIC)
            && fits(
                mask::MAX_DEST_RD_ATOMIC,
                self.max_dest_rd_atomic <= MAX_RD_ATOMIC,
            )
            && fits(mask::DEST_QPN, self.dest_qpn >> 24 == 0)
            && fits(mask::PATH_MIG_STATE, self.path_mig_state <= 2);
        all.then_some(()).ok_or(libc::EINVAL)
    }

    /// Takes over what `named` names. Sequence numbers have 24 bits; the kernel cuts off the rest, too.
    fn take(&mut self, from: &QpAttributes, named: u32) {
        macro_rules! take {
            ($($bit:ident: $($field:ident),+;)+) => {$(
                if named & mask::$bit != 0 {
                    $(self.$field = from.$field;)+
                }
            )+};
        }
        take! {
            ACCESS_FLAGS: access;
            PKEY_INDEX: pkey_index;
            PORT: port;
            QKEY: qkey;
            AV: path;
            PATH_MTU: path_mtu;
            TIMEOUT: timeout;
            RETRY_CNT: retry_count;
            RNR_RETRY: rnr_retry;
            RQ_PSN: rq_psn;
            SQ_PSN: sq_psn;
            MAX_QP_RD_ATOMIC: max_rd_atomic;
            MAX_DEST_RD_ATOMIC: max_dest_rd_atomic;
            MIN_RNR_TIMER: min_rnr_timer;
            ALT_PATH: alt_path, alt_pkey_index, alt_port, alt_timeout;
            PATH_MIG_STATE: path_mig_state;
            DEST_QPN: dest_qpn;
            RATE_LIMIT: rate_limit;
        }
        self.rq_psn &= 0xff_ffff;
        self.sq_psn &= 0xff_ffff;
    }

    /// Reads and atomics of the peer that are served at once. For 0 the kernel's driver takes the right to make such requests away.
    fn served(&self) -> u8 {
        match self.max_dest_rd_atomic {
            0 => 0,
            most => depth(most),
        }
    }

    /// What of it the transport works with.
    fn transport(&self, transport: Transport) -> Attributes {
        let mtu_bytes = match (transport, self.path_mtu) {
            (Transport::Rc | Transport::Uc, 1..=5) => 128 << self.path_mtu,
            _ => 4096,
        };
        Attributes {
            mtu_bytes,
            ack_timeout: self.timeout,
            retry_count: self.retry_count,
            rnr_retry: self.rnr_retry,
            min_rnr_timer: self.min_rnr_timer,
            max_reads: depth(self.max_rd_atomic),
            access: Access::from_bits(self.access & Access::ALL.bits()).unwrap_or_default(),
            // Where packets go is in `asked`.
            ..Attributes::default()
        }
    }
}

impl DeviceCore {
    pub(crate) fn modify_qp(
        &mut self,
        client: u32,
        qpn: u32,
        asked: &QpAttributes,
        named: u32,
        now_ns: u64,
    ) -> Result<(), Errno> {
        self.check_present()?;
        let (slot, qp) = self.client_qp(client, qpn)?;
        let from = qp.state();
        let to = if named & mask::STATE == 0 {
            from
        } else {
            State::parse(asked.state).ok_or(libc::EINVAL)?
        };
        let believes = named & mask::CUR_STATE == 0 || asked.current_state == from as u8;
        let transport = qp.parts.transport;
        if !believes || !transitions::is_allowed(transport, from, to, named) {
            return Err(libc::EINVAL);
        }
        asked.check(named)?;
        let is_empty = asked.path.is_global && self.gid_index != Some(asked.path.sgid_index);
        if named & mask::AV != 0 && is_empty {
            return Err(GID_IS_EMPTY);
        }
        let (_, qp) = self.client_qp(client, qpn)?;
        let mut attributes = *qp.asked;
        attributes.take(asked, named);
        let page = qp.parts.page;
        // The transition to the error state reports its own event.
        if let Some(trace) = &mut self.parts.trace
            && from != to
            && to != State::Error
        {
            trace.state(now_ns, qpn, from, to);
        }
        match to {
            State::Reset => {
                // A doorbell of before must not be found behind it.
                self.look_at_page(page);
                self.reset_qp(slot);
            }
            State::Error => self.fail_qp(slot, now_ns),
            _ => self.lead(slot, (from, to), attributes, named),
        }
        Ok(())
    }

    /// Any state to RESET.
    pub(crate) fn reset_qp(&mut self, slot: usize) {
        self.leave_lane(slot);
        if let Some(uar) = self.registers.get(slot) {
            for register in uar.registers {
                register.take();
            }
        }
        self.lists.forget_reset(slot);
        if let Some(Some(qp)) = self.qps.get_mut(slot) {
            qp.held = false;
            qp.reset();
            let cqs = [qp.parts.send_cq, qp.parts.recv_cq];
            // Completion queues of clients are shared, and cleaned by their drivers.
            let own = qp.parts.uar.is_some();
            for cq in cqs.into_iter().filter(|_| own) {
                if let Some(Some(cq)) = self.parts.cqs.get_mut(cq) {
                    cq.reset();
                }
            }
        }
    }

    /// Moves a queue pair on, with all its attributes as they are to be.
    fn lead(&mut self, slot: usize, way: (State, State), asked: QpAttributes, named: u32) {
        let (from, to) = way;
        let Some(Some(qp)) = self.qps.get_mut(slot) else {
            return;
        };
        let transport = qp.parts.transport;
        *qp.asked = asked;
        qp.attributes = asked.transport(transport);
        qp.responder.depth = asked.served();
        let connected = matches!(transport, Transport::Rc | Transport::Uc);
        if to == State::ReadyToReceive {
            qp.responder.connect(asked.rq_psn);
        }
        if (from, to) == (State::ReadyToReceive, State::ReadyToSend) {
            qp.requester.connect(asked.sq_psn);
        }
        if from != to {
            qp.set_state(to);
        }
        if connected && named & mask::AV != 0 {
            self.set_destination(slot, &asked.path, asked.dest_qpn);
        }
        if to == State::ReadyToSend {
            self.count_sends(slot);
        }
        self.mark_active(slot);
    }

    pub(crate) fn query_qp(&self, client: u32, qpn: u32) -> Result<QpAttributes, Errno> {
        let (_, qp) = self.client_qp(client, qpn)?;
        Ok(attributes_of(qp))
    }

    /// The rights that the owner has given last, whether the device has them or not.
    pub(crate) fn asked_access(&self, client: u32, qpn: u32) -> Result<u32, Errno> {
        let (_, qp) = self.client_qp(client, qpn)?;
        Ok(qp.asked.access)
    }
}

/// What the device has, as the kernel's driver reads it (`query_qp_attr` in mlx5/qp.c).
fn attributes_of(qp: &Qp) -> QpAttributes {
    let state = qp.state();
    let remote = match qp.asked.max_dest_rd_atomic {
        // `set_qpc_atomic_flags`: no reads and atomics of a responder without a depth.
        0 => Access::REMOTE_WRITE.bits(),
        _ => Access::ALL.bits() & !Access::LOCAL_WRITE.bits(),
    };
    QpAttributes {
        state: state as u8,
        current_state: state as u8,
        sq_psn: qp.requester.next_send_psn(),
        rq_psn: qp.responder.next_receive_psn(),
        max_rd_atomic: depth(qp.asked.max_rd_atomic),
        max_dest_rd_atomic: depth(qp.asked.max_dest_rd_atomic),
        access: qp.asked.access & remote,
        ..*qp.asked
    }
}
