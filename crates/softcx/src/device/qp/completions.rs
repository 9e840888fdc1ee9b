//! Completions of a queue pair. A completion is written after the bytes that it reports.

use super::{DeviceParts, Qp, State};
use crate::device::copies::CopyOrigin;
use doorbell_wire::mlx5::{Cqe, CqeOpcode, Opcode, Syndrome};

/// The byte count in a CQE of a request that is no read. Drivers do not look at it, so it may be anything.
const COUNTS_NOTHING: u32 = 0xdead_c0de;

impl Qp {
    /// Completes a work request of the send queue, which has transferred `byte_count` bytes.
    #[inline]
    pub(crate) fn complete_send(
        &mut self,
        context: &mut DeviceParts,
        wqe_counter: u16,
        opcode: u8,
        byte_count: u32,
        syndrome: Option<Syndrome>,
    ) {
        // Behind what it reports.
        let lost = context.copies.settle_for(self.parts.qpn, false);
        let syndrome = syndrome.or(lost.map(|cause| cause.syndrome()));
        let byte_count = match Opcode::from_raw(opcode) {
            Some(Opcode::RdmaRead) => byte_count,
            _ => COUNTS_NOTHING,
        };
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
        if lost.is_some() {
            self.enter_error(context);
        }
    }

    /// Completes a receive.
    pub(crate) fn complete_recv(&mut self, context: &mut DeviceParts, cqe: Cqe) {
        // Behind what it reports.
        let lost = context.copies.settle_for(self.parts.qpn, true);
        let mut cqe = Cqe {
            qpn: self.parts.qpn,
            srqn_uidx: self.parts.user_index,
            timestamp: context.now_ns,
            ..cqe
        };
        let was_error = cqe.opcode.is_error();
        if lost.is_some() && !was_error {
            cqe.opcode = CqeOpcode::RespErr;
            cqe.syndrome = Syndrome::LocalProt as u8;
        }
        let pushed = context.complete(self.parts.recv_cq, &cqe);
        self.check_overrun(pushed);
        match lost {
            Some(cause) if was_error && !self.is_receiving() => self.withdraw_answers(cause.psn),
            Some(cause) => self.refuse_copied(context, cause),
            None => {}
        }
    }

    /// The memory of a request was not there, which was found out behind it, or that of a response.
    pub(crate) fn lose_data(&mut self, context: &mut DeviceParts, cause: CopyOrigin) {
        match self.state() {
            State::Reset => return,
            State::Error => {
                if cause.request {
                    self.withdraw_answers(cause.psn);
                }
                return;
            }
            _ => {}
        }
        if cause.request {
            self.refuse_copied(context, cause);
        } else {
            self.fail_oldest(context, cause.syndrome());
        }
    }

    fn check_overrun(&mut self, pushed: bool) {
        if !pushed {
            self.status.set_overrun(true);
            self.fail_by_itself();
        }
    }
}
