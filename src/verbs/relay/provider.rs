//! The three calls of verbs that carry work.
#![allow(unsafe_code)] // calls libibverbs

use std::ptr::NonNull;

use doorbell_dv_sys::{
    DOORBELL_DV_BATCH, doorbell_dv_recv, doorbell_dv_send, doorbell_dv_sge, doorbell_dv_wc,
};

/// Requests of one call.
pub(super) const BATCH: usize = DOORBELL_DV_BATCH as usize;

pub(super) type Sge = doorbell_dv_sge;
pub(super) type Send = doorbell_dv_send;
pub(super) type Recv = doorbell_dv_recv;
pub(super) type PolledCompletion = doorbell_dv_wc;

/// What became of a list of requests: how many were posted, in order; and the errno of the first that was not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct PostedUpTo {
    pub(super) count: usize,
    pub(super) errno: i32,
}

impl PostedUpTo {
    /// Whether more can be posted once the device is done with some: what verbs says of a full queue, and some providers of a short one.
    pub(super) fn is_full(&self) -> bool {
        matches!(self.errno, libc::ENOMEM | libc::EAGAIN | libc::ENOBUFS)
    }
}

/// The two completion queues.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Queue {
    Send = 0,
    Recv = 1,
}

/// A queue pair with its completion queues, as the code that posts to it sees it. Lists have at most [`BATCH`] requests.
pub(super) trait Provider {
    fn post_send(&mut self, requests: &[Send], sges: &[Sge]) -> PostedUpTo;
    fn post_recv(&mut self, requests: &[Recv], sges: &[Sge]) -> PostedUpTo;
    /// Takes completions, as many as there are and have room. `None` if the queue is broken.
    fn poll(&mut self, queue: Queue, into: &mut [PolledCompletion]) -> Option<usize>;
}

/// The provider that libibverbs has found.
#[derive(Debug)]
pub(super) struct Verbs {
    qp: NonNull<rdma_sys::ibv_qp>,
    cqs: [NonNull<rdma_sys::ibv_cq>; 2],
}

// SAFETY: any thread may post and poll.
unsafe impl std::marker::Send for Verbs {}

impl Verbs {
    /// # Safety
    /// The three are alive as long as anything is posted or polled here, and the two queues are the queue pair's.
    pub(super) unsafe fn new(
        qp: NonNull<rdma_sys::ibv_qp>,
        cqs: [NonNull<rdma_sys::ibv_cq>; 2],
    ) -> Verbs {
        Verbs { qp, cqs }
    }
}

impl Provider for Verbs {
    fn post_send(&mut self, requests: &[Send], sges: &[Sge]) -> PostedUpTo {
        let mut errno = 0;
        // SAFETY: alive (contract of `new`). The call reads `requests.len()` requests, and their places in `sges`, which the code that
        // wrote the requests has counted. It has copied what it needs when it returns. The device checks the memory that they name, by
        // their keys.
        let count = unsafe {
            doorbell_dv_sys::doorbell_dv_post_send(
                self.qp.as_ptr(),
                requests.as_ptr(),
                requests.len() as u32,
                sges.as_ptr(),
                &raw mut errno,
            )
        };
        PostedUpTo {
            count: count as usize,
            errno,
        }
    }

    fn post_recv(&mut self, requests: &[Recv], sges: &[Sge]) -> PostedUpTo {
        let mut errno = 0;
        // SAFETY: as in `post_send`.
        let count = unsafe {
            doorbell_dv_sys::doorbell_dv_post_recv(
                self.qp.as_ptr(),
                requests.as_ptr(),
                requests.len() as u32,
                sges.as_ptr(),
                &raw mut errno,
            )
        };
        PostedUpTo {
            count: count as usize,
            errno,
        }
    }

    fn poll(&mut self, queue: Queue, into: &mut [PolledCompletion]) -> Option<usize> {
        // SAFETY: alive (contract of `new`), and room for that many.
        let got = unsafe {
            doorbell_dv_sys::doorbell_dv_poll_cq(
                self.cqs[queue as usize].as_ptr(),
                into.as_mut_ptr(),
                into.len() as u32,
            )
        };
        usize::try_from(got).ok().map(|got| got.min(into.len()))
    }
}
