//! A read whose source is known only when its stream comes to it.
#![allow(unsafe_code)] // writes a work request into the ring of its queue pair

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::endpoint::prepared::OperationKind;
use crate::endpoint::shared::EndpointShared;
use crate::endpoint::{Endpoint, Prepared, Ticket, Work};
use crate::mlx5::Posted;
use crate::region::{RemoteSlice, Slice};
use crate::stream::{DeferredDrop, ReadPlace};
use crate::{Error, Result, StateKind};

/// The source of a read that is prepared without one. The work request is a no-operation until [`LateRead::set`], which the stream that has the operation
/// calls before it comes to the operation. So one program serves both cases: something is to be read, or nothing is.
#[derive(Debug)]
pub(crate) struct LateRead {
    shared: Arc<EndpointShared>,
    posted: Posted,
    epoch: u32,
    /// Of the slice that it reads into.
    capacity: u32,
    is_set: AtomicBool,
}

impl Endpoint {
    /// Whether an operation was prepared by this endpoint.
    pub(crate) fn has_prepared(&self, prepared: &Prepared) -> bool {
        Arc::ptr_eq(&prepared.shared, &self.shared)
    }

    /// Whether a ticket is of an operation of this endpoint.
    pub(crate) fn has_ticket(&self, ticket: &Ticket) -> bool {
        ticket.is_of(&self.shared)
    }

    /// Makes a read into `slice` ready for a stream, as [`Endpoint::prepare_send`] of a [`Work::read`], but without a source. It is signaled.
    ///
    /// # Errors
    /// As [`Endpoint::prepare_send`]; [`Error::Range`] for an empty slice.
    pub(crate) fn prepare_late_read(
        &mut self,
        slice: &Slice<'_>,
        wr_id: u64,
    ) -> Result<(Prepared, LateRead)> {
        let capacity = slice.len_bytes();
        if capacity == 0 {
            return Err(Error::Range {
                argument: "slice.len_bytes()",
                value: 0,
                min: 1,
                max: u32::MAX.into(),
            });
        }
        let slices = [*slice];
        let nowhere = RemoteSlice::at(0, 0);
        let prepared = self.prepare_send(&Work::read(&slices, nowhere).wr_id(wr_id))?;
        match prepared.operation.kind {
            OperationKind::Send { posted, signaled } if posted.wqebbs == 1 => {
                self.shared.overwrite_with_nop(posted, signaled);
                let late = LateRead {
                    shared: Arc::clone(&prepared.shared),
                    posted,
                    epoch: prepared.operation.epoch,
                    capacity,
                    is_set: AtomicBool::new(false),
                };
                Ok((prepared, late))
            }
            _ => {
                self.rollback(prepared);
                Err(Error::state(
                    StateKind::WrongKind,
                    "prepare a read",
                    "its work request is longer than one WQEBB",
                ))
            }
        }
    }
}

impl LateRead {
    /// Drops it where nothing may block. Returns what another thread is to drop.
    pub(crate) fn into_deferred_drop(self) -> Option<DeferredDrop> {
        Arc::into_inner(self.shared).map(|last| Box::new(last) as DeferredDrop)
    }

    /// Where the work request is, for a kernel that does what [`LateRead::set`] does.
    pub(crate) fn place(&self) -> ReadPlace<'_> {
        self.shared.read_place(self.posted)
    }

    /// Has the operation read `remote`, of 1 byte to as many as its slice has. The operation has not been rung: the caller is what the same stream executes
    /// before it. Does nothing with the second call.
    ///
    /// An endpoint that has failed may not have been stopped yet, and execute what comes next: a no-operation in the place of the read would complete without the message.
    ///
    /// # Errors
    /// [`Error::Range`] for the length. [`Error::State`] if the endpoint was reset.
    pub(crate) fn set(&self, remote: RemoteSlice) -> Result<()> {
        let len_bytes = u32::try_from(remote.len_bytes()).ok();
        let Some(len_bytes) = len_bytes.filter(|len| (1..=self.capacity).contains(len)) else {
            return Err(Error::Range {
                argument: "remote.len_bytes()",
                value: remote.len_bytes(),
                min: 1,
                max: self.capacity.into(),
            });
        };
        if self.is_set.swap(true, Ordering::Relaxed) {
            return Ok(());
        }
        let shared = &self.shared;
        let is_set = shared.if_current(self.epoch, || {
            shared.read_over_nop(self.posted, (remote.addr(), remote.rkey()), len_bytes);
        });
        if is_set {
            return Ok(());
        }
        let reason = "its endpoint was reset before";
        Err(Error::state(StateKind::Discarded, "read a message", reason))
    }
}
