//! What a device can do by plain verbs.
#![allow(unsafe_code)] // calls libibverbs

use std::ptr::NonNull;

use doorbell_dv_sys::doorbell_dv_limits;

use crate::verbs::call::status;
use crate::{Error, Result};
use doorbell_wire::verbs::Capacity;

/// What a device says that it can do at most.
#[derive(Debug, Clone, Copy)]
pub(in crate::verbs) struct Limits {
    /// Work requests of a queue.
    pub(super) work_requests: u32,
    /// Pieces of memory of a work request.
    pub(super) segments: u32,
    /// Entries of a completion queue.
    pub(super) cqes: u32,
    /// Reads and atomics that a queue pair may have under way.
    pub(in crate::verbs) reads_out: u8,
    /// And those of its peer that it can serve.
    pub(in crate::verbs) reads_in: u8,
    pub(super) atomics: bool,
}

impl Limits {
    /// Asks the device.
    ///
    /// # Errors
    /// [`Error::System`] of `ibv_query_device`.
    pub(in crate::verbs) fn probe(context: NonNull<rdma_sys::ibv_context>) -> Result<Limits> {
        let mut found = doorbell_dv_limits::default();
        // SAFETY: an open context, and a place for the result.
        status("ibv_query_device", || unsafe {
            doorbell_dv_sys::doorbell_dv_query_limits(context.as_ptr(), &raw mut found)
        })?;
        Ok(Limits {
            work_requests: found.qp_wrs,
            segments: found.sges,
            cqes: found.cqes,
            // Attributes of a connection have eight bits for them.
            reads_out: u8::try_from(found.reads_out).unwrap_or(u8::MAX),
            reads_in: u8::try_from(found.reads_in).unwrap_or(u8::MAX),
            atomics: found.atomics != 0,
        })
    }

    /// Fails for a queue pair that the device cannot have, naming what an endpoint was asked to be.
    ///
    /// # Errors
    /// [`Error::Range`] with the device's limit.
    pub(super) fn check(&self, capacity: &Capacity) -> Result<()> {
        let depth = self.work_requests.min(self.cqes);
        for (argument, value, max) in [
            ("send_depth", capacity.send_depth, depth),
            ("recv_depth", capacity.recv_depth, depth),
            ("max_segments", capacity.segments, self.segments),
        ] {
            if value > max {
                return Err(Error::Range {
                    argument,
                    value: value.into(),
                    min: 1,
                    max: max.into(),
                });
            }
        }
        Ok(())
    }

    pub(in crate::verbs) fn has_atomics(&self) -> bool {
        self.atomics && self.reads_out > 0
    }

    pub(in crate::verbs) fn has_reads(&self) -> bool {
        self.reads_out > 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use doorbell_wire::verbs::Transport;

    #[test]
    fn what_a_device_cannot_have_is_named_with_its_limit() {
        let limits = Limits {
            work_requests: 64,
            segments: 2,
            cqes: 48,
            reads_out: 4,
            reads_in: 4,
            atomics: false,
        };
        let good = Capacity {
            transport: Transport::Rc,
            send_depth: 48,
            recv_depth: 48,
            segments: 2,
            inline_bytes: 32,
        };
        assert_eq!(limits.check(&good), Ok(()));
        let bad = |capacity: Capacity| match limits.check(&capacity) {
            Err(Error::Range {
                argument,
                value,
                max,
                ..
            }) => (argument, value, max),
            other => panic!("{other:?}"),
        };
        let send_depth = 49;
        assert_eq!(bad(Capacity { send_depth, ..good }), ("send_depth", 49, 48));
        let recv_depth = 100;
        assert_eq!(
            bad(Capacity { recv_depth, ..good }),
            ("recv_depth", 100, 48)
        );
        let segments = 3;
        assert_eq!(bad(Capacity { segments, ..good }), ("max_segments", 3, 2));
        assert!(limits.has_reads() && !limits.has_atomics());
    }
}
