//! Operations as they can be prepared again and again: what a graph keeps of each.

use std::time::Duration;

use crate::endpoint::config::SEGMENTS_MAX;
use crate::endpoint::work::Data;
use crate::endpoint::{Endpoint, Prepared, QueueKind, Work};
use crate::mlx5::{FenceMode, Opcode};
use crate::region::{Region, RemoteSlice, Slice};
use crate::{Error, Result, StateKind};

/// An operation of one endpoint, with all that preparing it takes. It keeps the regions that it names.
pub(crate) enum OperationTemplate {
    Send(Box<Request>),
    Recv {
        wr_id: u64,
        slices: OwnedSlices,
    },
    Wait {
        kind: QueueKind,
        timeout: Option<Duration>,
    },
}

/// A [`Work`] that owns what it names.
pub(crate) struct Request {
    payload: OwnedPayload,
    opcode: Opcode,
    wr_id: u64,
    signaled: bool,
    solicited: bool,
    fence: FenceMode,
    imm: u32,
    imm_unused: bool,
    remote: RemoteSlice,
    operand: u64,
    compare: u64,
}

enum OwnedPayload {
    Slices(OwnedSlices),
    Inline(Vec<u8>),
}

/// [`Slice`]s that keep their regions.
pub(crate) struct OwnedSlices(Vec<Part>);

struct Part {
    region: Region,
    offset: u64,
    len_bytes: u32,
}

impl OperationTemplate {
    /// A request to the peer of the endpoint.
    ///
    /// # Errors
    /// [`Error::State`] for a request with a receiver of its own.
    pub(crate) fn send(work: &Work<'_>) -> Result<OperationTemplate> {
        if work.receiver.is_some() {
            return Err(Error::state(
                StateKind::WrongKind,
                "add a send to a graph",
                "the work request names its receiver; graphs are for endpoints that are connected",
            ));
        }
        Ok(OperationTemplate::Send(Box::new(Request {
            payload: match work.data {
                Data::Slices(slices) => OwnedPayload::Slices(OwnedSlices::of(slices)),
                Data::Inline(bytes) => OwnedPayload::Inline(bytes.to_vec()),
            },
            opcode: work.opcode,
            wr_id: work.wr_id,
            signaled: work.signaled,
            solicited: work.solicited,
            fence: work.fence,
            imm: work.imm,
            imm_unused: work.imm_unused,
            remote: work.remote,
            operand: work.operand,
            compare: work.compare,
        })))
    }

    pub(crate) fn recv(wr_id: u64, slices: &[Slice<'_>]) -> OperationTemplate {
        OperationTemplate::Recv {
            wr_id,
            slices: OwnedSlices::of(slices),
        }
    }

    /// Prepares it once more.
    ///
    /// # Errors
    /// Those of [`Endpoint::prepare_send`], [`Endpoint::prepare_recv`] and [`Endpoint::prepare_wait_cq_for`].
    pub(crate) fn prepare(&self, endpoint: &mut Endpoint) -> Result<Prepared> {
        match self {
            OperationTemplate::Send(request) => match &request.payload {
                OwnedPayload::Slices(slices) => {
                    slices.with(|slices| endpoint.prepare_send(&request.with(Data::Slices(slices))))
                }
                OwnedPayload::Inline(bytes) => {
                    endpoint.prepare_send(&request.with(Data::Inline(bytes)))
                }
            },
            OperationTemplate::Recv { wr_id, slices } => {
                slices.with(|slices| endpoint.prepare_recv(*wr_id, slices))
            }
            OperationTemplate::Wait { kind, timeout } => {
                endpoint.prepare_wait_cq_for(*kind, *timeout)
            }
        }
    }
}

impl Request {
    fn with<'a>(&self, data: Data<'a>) -> Work<'a> {
        Work {
            data,
            opcode: self.opcode,
            wr_id: self.wr_id,
            signaled: self.signaled,
            solicited: self.solicited,
            fence: self.fence,
            imm: self.imm,
            imm_unused: self.imm_unused,
            remote: self.remote,
            operand: self.operand,
            compare: self.compare,
            receiver: None,
        }
    }
}

impl OwnedSlices {
    pub(crate) fn of(slices: &[Slice<'_>]) -> OwnedSlices {
        let parts = slices.iter().map(|slice| Part {
            region: slice.region.clone(),
            offset: slice.offset,
            len_bytes: slice.len_bytes,
        });
        OwnedSlices(parts.collect())
    }

    /// Calls with the slices, without an allocation. There are no more of them than an operation has room for.
    pub(crate) fn with<R>(&self, act: impl FnOnce(&[Slice<'_>]) -> R) -> R {
        let parts = &self.0;
        let Some(first) = parts.first() else {
            return act(&[]);
        };
        let mut slices = [first.slice(); SEGMENTS_MAX as usize];
        for (slice, part) in slices.iter_mut().zip(parts) {
            *slice = part.slice();
        }
        act(slices.get(..parts.len()).unwrap_or(&slices))
    }
}

impl Part {
    fn slice(&self) -> Slice<'_> {
        Slice {
            region: &self.region,
            offset: self.offset,
            len_bytes: self.len_bytes,
        }
    }
}
