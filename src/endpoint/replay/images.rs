//! Work requests and receives as kernels post them.

use super::super::post::Endpoint;
use super::super::work::{Data, Work};
use super::operation::refused;
use crate::mlx5::{Opcode, Payload, SendRequest};
use crate::region::{Region, Slice};
use crate::{Error, Result};

/// Data segments of a request in one WQEBB, beside the address of remote memory.
const REMOTE_SLICES: usize = 2;
/// Pieces of memory of a receive.
const RECV_SLICES: usize = 4;

/// The words of a WQE, its segments, and whether the request is the last of its work.
type Image = ([u64; 8], u32, bool);

impl Endpoint {
    /// The requests of a work, each of one WQEBB. A write or a read of more slices becomes several, of which the last one makes the completion.
    pub(super) fn send_images(&self, work: &Work<'_>) -> Result<Vec<Image>> {
        let segments = self.check_send(work)?;
        let request = |payload, at_bytes: u64, is_last: bool| SendRequest {
            opcode: match work.opcode {
                Opcode::RdmaWriteImm if !is_last => Opcode::RdmaWrite,
                opcode => opcode,
            },
            signaled: work.signaled && is_last,
            solicited: work.solicited && is_last,
            fence: work.fence,
            imm: work.imm,
            remote_addr: work.remote.addr().wrapping_add(at_bytes),
            rkey: work.remote.rkey(),
            swap_or_add: work.operand,
            compare: work.compare,
            payload,
        };
        let image = |request: &SendRequest<'_>, is_last| {
            let image = self.send.image(request)?;
            image
                .map(|(words, segments)| (words, segments, is_last))
                .ok_or_else(|| too_long(work))
        };
        if let Data::Inline(bytes) = work.data {
            return Ok(vec![image(
                &request(Payload::Inline(bytes), 0, true),
                true,
            )?]);
        }
        let divides = work.opcode.has_remote() && !work.opcode.is_atomic();
        if !divides || segments.len() <= REMOTE_SLICES {
            let whole = request(Payload::Segments(&segments), 0, true);
            return Ok(vec![image(&whole, true)?]);
        }
        let mut images = Vec::new();
        let mut at_bytes = 0;
        let mut parts = segments.chunks(REMOTE_SLICES).peekable();
        while let Some(part) = parts.next() {
            let is_last = parts.peek().is_none();
            let request = request(Payload::Segments(part), at_bytes, is_last);
            images.push(image(&request, is_last)?);
            at_bytes += part
                .iter()
                .map(|part| u64::from(part.len_bytes))
                .sum::<u64>();
        }
        Ok(images)
    }

    /// The regions of a work.
    pub(super) fn held_of(&self, work: &Work<'_>) -> Vec<Region> {
        match work.data {
            Data::Slices(slices) => slices.iter().map(|slice| slice.region.clone()).collect(),
            Data::Inline(_) => Vec::new(),
        }
    }

    /// The pieces of a receive as they are in the ring.
    pub(super) fn recv_image(&self, slices: &[Slice<'_>]) -> Result<([u64; 8], u32)> {
        let segments = self.check_recv(slices)?;
        let full = || {
            refused(format!(
                "a receive has at most {RECV_SLICES} slices in a graph that the application launches; this one has {}",
                slices.len()
            ))
        };
        let mut words = [0; 8];
        let mut used = words.chunks_exact_mut(2);
        let filled = segments.iter().filter(|segment| segment.len_bytes > 0);
        let mut count = 0;
        for segment in filled {
            let place = used.next().ok_or_else(full)?;
            let first = u64::from(segment.len_bytes) << 32 | u64::from(segment.lkey);
            place.copy_from_slice(&[first.to_be(), segment.addr.to_be()]);
            count += 1;
        }
        Ok((words, count))
    }
}

#[cold]
fn too_long(work: &Work<'_>) -> Error {
    let reason = match work.data {
        Data::Inline(bytes) => format!(
            "{} inline bytes: a work request has 64 bytes in a graph that the application launches, with its control and address segments",
            bytes.len()
        ),
        Data::Slices(slices) => format!(
            "{} slices: a work request has 64 bytes in a graph that the application launches, which is room for 3 slices of a send",
            slices.len()
        ),
    };
    refused(reason)
}
