//! Receives: taken from the queue pair's own ring or from a shared one, kept, flushed.

use crate::device::client::{DeviceEvent, Transport};
use crate::device::gather::{GatherSource, ScatterError};
use crate::device::packet::AckCode;
use crate::device::qp::{DeviceParts, Qp};
use crate::device::space::AccessFault;
use crate::device::wire::Counted;
use doorbell_wire::mlx5::{Cqe, CqeOpcode, Syndrome};

impl Qp {
    /// Takes the next posted receive: its running count, or its index if it is of a shared queue, and its room in bytes. Its
    /// segments are in the gather afterwards.
    pub(super) fn take_receive(&mut self, context: &mut DeviceParts) -> Option<(u32, u64)> {
        let mut taken = self.find_receive(context);
        if let Some((index, _)) = taken
            && let Some(syndrome) = context.wire.fault_code(Counted::Recv)
            && let Some(syndrome) = Syndrome::from_raw(syndrome)
        {
            self.complete_recv(context, receive_error(index, syndrome));
            if self.parts.transport == Transport::Rc {
                // The answer acknowledges what came before.
                self.place_late(context);
            }
            if self.is_receiving() {
                if self.parts.transport == Transport::Rc {
                    let psn = self.responder.expected_psn;
                    self.answer(psn, AckCode::OperationalError);
                }
                self.enter_error_behind_answers(context);
            }
            taken = None;
        }
        if let (Some((index, _)), Some(trace)) = (taken, &mut context.trace) {
            trace.recv_wqe(context.now_ns, &self.parts, index, &context.gather);
        }
        taken
    }

    fn find_receive(&mut self, context: &mut DeviceParts) -> Option<(u32, u64)> {
        if let Some(index) = self.responder.kept.take() {
            return match self.load_receive(context, index) {
                Ok(capacity) => Some((index, capacity)),
                Err(AccessFault) => {
                    self.lose_queue();
                    None
                }
            };
        }
        if let Some(srq) = self.parts.srq {
            let srq = context.srqs.get_mut(srq)?.as_mut()?;
            let taken = srq.take(&mut context.gather);
            if srq.is_broken() {
                self.lose_queue();
            }
            return taken.map(|(index, capacity)| (index.into(), capacity));
        }
        let index = self.responder.taken;
        // The record is read again when the posted receives are used up.
        if self.responder.posted == index as u16 {
            let Ok(posted) = self.parts.recv_record.load() else {
                self.lose_queue();
                return None;
            };
            let waiting = (posted as u16).wrapping_sub(index as u16);
            // More than the ring holds: a record that was made fresh too early, or garbage.
            if waiting == 0 || u32::from(waiting) > self.parts.recv_wqes {
                return None;
            }
            self.responder.posted = posted as u16;
            if context.wire.fetch_ns() == Some(0) && !self.copy_receives(index, waiting) {
                self.lose_queue();
                return None;
            }
        }
        self.responder.taken = index.wrapping_add(1);
        match self.load_receive(context, index) {
            Ok(capacity) => Some((index, capacity)),
            Err(AccessFault) => {
                self.lose_queue();
                None
            }
        }
    }

    /// Copies receives that the record has announced. Whether they could be read.
    #[cold]
    fn copy_receives(&mut self, index: u32, waiting: u16) -> bool {
        let stride = self.parts.recv_stride_bytes as usize;
        let (offset, len_bytes) = (index as usize * stride, usize::from(waiting) * stride);
        self.parts.recv_ring.snapshot(offset, len_bytes).is_ok()
    }

    pub(super) fn load_receive(
        &self,
        context: &mut DeviceParts,
        index: u32,
    ) -> Result<u64, AccessFault> {
        if let Some(srq) = self.parts.srq {
            let srq = context
                .srqs
                .get(srq)
                .and_then(Option::as_ref)
                .ok_or(AccessFault)?;
            return Ok(srq.load(&mut context.gather, index as u16)?.0);
        }
        let stride = self.parts.recv_stride_bytes;
        let waiting = self
            .responder
            .posted
            .wrapping_sub(self.responder.taken as u16);
        context
            .gather
            .load_recv(&self.parts.recv_ring, index, stride, waiting)
    }

    /// Puts a payload into the receive at hand, `done` bytes behind its start.
    pub(super) fn scatter(
        &self,
        context: &mut DeviceParts,
        source: &GatherSource<'_>,
        done: u32,
        capacity: u64,
    ) -> Result<(), ScatterError> {
        if u64::from(done) + u64::from(source.len_bytes()) > capacity {
            return Err(ScatterError::TooLong);
        }
        let srq = self
            .parts
            .srq
            .and_then(|srq| context.srqs.get(srq)?.as_ref());
        let pd = srq.map_or(self.parts.pd, |srq| srq.pd);
        context
            .gather
            .scatter(&context.keys, &mut context.copies, pd, done, source)
    }

    /// Completes in error the receives that are posted.
    pub(crate) fn flush_receives(&mut self, context: &mut DeviceParts) {
        if let Some(index) = self.responder.take_unfinished() {
            self.complete_recv(context, receive_error(index, Syndrome::WrFlush));
        }
        if let Some(index) = self.responder.kept.take() {
            self.complete_recv(context, receive_error(index, Syndrome::WrFlush));
        }
        if self.parts.srq.is_some() {
            // What is posted to a shared queue belongs to the others.
            if !std::mem::replace(&mut self.responder.last_wqe_notified, true) {
                self.notify(DeviceEvent::LastWqeReached {
                    qpn: self.parts.qpn,
                });
            }
            return;
        }
        while let Some((index, _)) = self.take_receive(context) {
            self.complete_recv(context, receive_error(index, Syndrome::WrFlush));
        }
    }
}

/// The completion of a receive that failed.
pub(super) fn receive_error(index: u32, syndrome: Syndrome) -> Cqe {
    Cqe {
        opcode: CqeOpcode::RespErr,
        wqe_counter: index as u16,
        syndrome: syndrome as u8,
        ..Cqe::default()
    }
}
