//! What a device can do by plain verbs, and what a queue pair asks of it.
#![allow(unsafe_code)] // calls libibverbs

use std::ptr::NonNull;

use doorbell_dv_sys::doorbell_dv_limits;

use crate::verbs::call::status;
use crate::{Error, Result};

/// Sizes of a queue pair. Those of the rings are powers of two.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RelayConfig {
    /// Work requests in flight, and pieces of memory of each.
    pub(crate) send_depth: u32,
    pub(crate) recv_depth: u32,
    pub(crate) segments: u32,
    pub(crate) inline_bytes: u32,
    pub(crate) send_wqebbs: u32,
    pub(crate) recv_wqes: u32,
    pub(crate) send_cqes: u32,
    pub(crate) recv_cqes: u32,
}

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

/// Operations that not every device has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Abilities {
    pub(crate) atomics: bool,
    pub(crate) reads: bool,
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
    pub(super) fn check(&self, config: &RelayConfig) -> Result<()> {
        let depth = self.work_requests.min(self.cqes);
        for (argument, value, max) in [
            ("send_depth", config.send_depth, depth),
            ("recv_depth", config.recv_depth, depth),
            ("max_segments", config.segments, self.segments),
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

    pub(super) fn abilities(&self) -> Abilities {
        Abilities {
            atomics: self.atomics && self.reads_out > 0,
            reads: self.reads_out > 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
        let good = RelayConfig {
            send_depth: 48,
            recv_depth: 48,
            segments: 2,
            inline_bytes: 32,
            send_wqebbs: 64,
            recv_wqes: 64,
            send_cqes: 128,
            recv_cqes: 128,
        };
        assert_eq!(limits.check(&good), Ok(()));
        let bad = |config: RelayConfig| match limits.check(&config) {
            Err(Error::Range {
                argument,
                value,
                max,
                ..
            }) => (argument, value, max),
            other => panic!("{other:?}"),
        };
        let send_depth = 49;
        assert_eq!(
            bad(RelayConfig { send_depth, ..good }),
            ("send_depth", 49, 48)
        );
        let recv_depth = 100;
        assert_eq!(
            bad(RelayConfig { recv_depth, ..good }),
            ("recv_depth", 100, 48)
        );
        let segments = 3;
        assert_eq!(
            bad(RelayConfig { segments, ..good }),
            ("max_segments", 3, 2)
        );
        let abilities = limits.abilities();
        assert!(abilities.reads && !abilities.atomics);
    }
}
