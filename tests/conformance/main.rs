//! One suite over every consumer and every executor: each operation, in each shape, moves the right bytes and no others.
//!
//! A [`Rig`] names a device and how operations get to it. A further backend or a further kind of stream is one more line in
//! [`rigs`], and goes through everything here.
#![cfg(all(feature = "softcx", not(loom)))]

mod order;
mod refused;
mod shapes;
mod words;
mod wrap;

#[path = "../rig/mod.rs"]
mod rig;
#[path = "../waived/mod.rs"]
mod waived;

use std::time::Duration;

use doorbell::{
    Device, Endpoint, Executor, QueueKind, Slice, Ticket, Work, stream_post, stream_post_all,
};

use crate::rig::SOON;

/// A consumer, and an executor for it.
pub(crate) struct Rig {
    pub name: &'static str,
    pub open: fn() -> Device,
    pub driver: fn() -> Box<dyn Driver>,
}

/// How operations get to a device. They are executed in order; [`Driver::settle`] returns when all of them are.
pub(crate) trait Driver {
    fn send(&mut self, endpoint: &mut Endpoint, work: &Work<'_>) -> Ticket;
    fn recv(&mut self, endpoint: &mut Endpoint, wr_id: u64, slices: &[Slice<'_>]) -> Ticket;
    /// Waits for the next completion.
    fn wait(&mut self, endpoint: &mut Endpoint, side: QueueKind);
    fn settle(&mut self);
}

/// All there are.
pub(crate) fn rigs() -> Vec<Rig> {
    vec![
        Rig {
            name: "host stream",
            open: rig::strict_device,
            driver: || Box::new(Streamed(rig::stream("conformance"))),
        },
        Rig {
            name: "host stream, split form",
            open: rig::strict_device,
            driver: || Box::new(Split(rig::stream("conformance"), 0)),
        },
        Rig {
            name: "calling thread",
            open: rig::strict_device,
            driver: || Box::new(Synchronous),
        },
    ]
}

/// Everything queued on a stream.
struct Streamed<E>(E);

impl<E: Executor> Driver for Streamed<E> {
    fn send(&mut self, endpoint: &mut Endpoint, work: &Work<'_>) -> Ticket {
        endpoint.stream_queue_send(&self.0, work).unwrap()
    }

    fn recv(&mut self, endpoint: &mut Endpoint, wr_id: u64, slices: &[Slice<'_>]) -> Ticket {
        endpoint.stream_queue_recv(&self.0, wr_id, slices).unwrap()
    }

    fn wait(&mut self, endpoint: &mut Endpoint, side: QueueKind) {
        endpoint.stream_wait_cq(&self.0, side).unwrap();
    }

    fn settle(&mut self) {
        self.0.synchronize(SOON).unwrap();
    }
}

/// Prepared first, then given to the stream: one by one and as batches of one, in turn.
struct Split<E>(E, u32);

impl<E: Executor> Split<E> {
    fn post(&mut self, prepared: doorbell::Prepared) -> Ticket {
        self.1 += 1;
        if self.1.is_multiple_of(2) {
            return stream_post(&self.0, prepared).unwrap();
        }
        let mut list = vec![prepared];
        let tickets = stream_post_all(&self.0, &mut list).unwrap();
        assert!(list.is_empty());
        tickets.into_iter().next().unwrap()
    }
}

impl<E: Executor> Driver for Split<E> {
    fn send(&mut self, endpoint: &mut Endpoint, work: &Work<'_>) -> Ticket {
        let prepared = endpoint.prepare_send(work).unwrap();
        self.post(prepared)
    }

    fn recv(&mut self, endpoint: &mut Endpoint, wr_id: u64, slices: &[Slice<'_>]) -> Ticket {
        let prepared = endpoint.prepare_recv(wr_id, slices).unwrap();
        self.post(prepared)
    }

    fn wait(&mut self, endpoint: &mut Endpoint, side: QueueKind) {
        let prepared = endpoint.prepare_wait_cq(side).unwrap();
        self.post(prepared);
    }

    fn settle(&mut self) {
        self.0.synchronize(SOON).unwrap();
    }
}

/// The CPU-synchronous twins.
struct Synchronous;

impl Driver for Synchronous {
    fn send(&mut self, endpoint: &mut Endpoint, work: &Work<'_>) -> Ticket {
        endpoint.post_send(work).unwrap()
    }

    fn recv(&mut self, endpoint: &mut Endpoint, wr_id: u64, slices: &[Slice<'_>]) -> Ticket {
        endpoint.post_recv(wr_id, slices).unwrap()
    }

    fn wait(&mut self, endpoint: &mut Endpoint, side: QueueKind) {
        endpoint.wait_cq(side, SOON).unwrap();
    }

    fn settle(&mut self) {}
}

/// No step of this suite takes this long.
pub(crate) const STEP: Duration = Duration::from_secs(120);
