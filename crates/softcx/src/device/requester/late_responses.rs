//! Responses to reads whose bytes are placed late: see `responder/late_packets.rs`.

use super::state::LateResponse;
use crate::device::gather::{GatherSource, ScatterError};
use crate::device::packet::{Header, PacketKind, psn_distance};
use crate::device::qp::{DeviceParts, Qp};
use doorbell_wire::mlx5::Syndrome;

impl Qp {
    /// Takes the bytes of a response, to be placed later. Its message is named by its index and the PSN behind it.
    pub(super) fn put_off_response(
        &mut self,
        context: &mut DeviceParts,
        source: &GatherSource<'_>,
        (index, end_psn): (u32, u32),
        offset: u32,
    ) -> Result<(), ScatterError> {
        let late_ns = context.wire.late_packets_ns();
        self.requester.late = Some(LateResponse {
            index,
            end_psn,
            offset,
            bytes: source.take(&context.keys, &mut context.copies)?,
            until_ns: context.now_ns.saturating_add(late_ns),
        });
        Ok(())
    }

    /// Places what is late before this response, unless that is of the same read and may overtake it.
    #[inline]
    pub(super) fn catch_up_with_response(&mut self, context: &mut DeviceParts, header: &Header) {
        if let Some(late) = &self.requester.late {
            let overtakes = header.kind == PacketKind::ReadResponse
                && psn_distance(late.end_psn, header.psn) > 0;
            if !overtakes {
                self.place_late_response(context);
            }
        }
    }

    /// Places the late bytes of a response if they are due. Returns whether it did.
    pub(super) fn place_response_when_due(&mut self, context: &mut DeviceParts) -> bool {
        let late = self.requester.late.as_ref();
        let is_due = late.is_some_and(|late| late.until_ns <= context.now_ns);
        if is_due {
            self.place_late_response(context);
        }
        is_due
    }

    #[cold]
    fn place_late_response(&mut self, context: &mut DeviceParts) {
        let Some(late) = self.requester.late.take() else {
            return;
        };
        if !self.is_sending() {
            return;
        }
        context.copies.work_for(self.parts.qpn, false, 0);
        let source = GatherSource::Bytes(&late.bytes);
        match self.place_response(context, late.index, late.offset, &source) {
            Ok(()) => self.reap(context),
            Err(_) => self.fail_message(context, late.index, Syndrome::LocalProt),
        }
    }

    /// Puts a response's bytes where the work request at this index has them.
    pub(super) fn place_response(
        &self,
        context: &mut DeviceParts,
        index: u32,
        offset: u32,
        source: &GatherSource<'_>,
    ) -> Result<(), ScatterError> {
        if !context.gather.holds(self.parts.qpn, index) {
            let loaded = context.gather.load(&self.parts, index, u32::MAX);
            loaded.map_err(|_| ScatterError::Target)?;
        }
        context.gather.scatter(
            &context.keys,
            &mut context.copies,
            self.parts.pd,
            offset,
            source,
        )
    }
}
