//! Queue pairs of mlx5 devices, whose queues mlx5dv shows as memory.

#[cfg(feature = "cuda")]
use std::any::Any;
use std::sync::Arc;
#[cfg(feature = "cuda")]
use std::sync::Weak;

use super::peer::PeerQueuePair;
use super::{Abilities, Attributes, Capacity, NicQueuePair, Pages, QueuePairMemory, Queues, State};
use crate::Result;
use crate::verbs::{self, Step, Steps};
use doorbell_wire::memory::QueuePairSizes;

#[derive(Debug)]
pub(super) struct Mlx5QueuePair {
    pair: verbs::VerbsQueuePair,
    memory: QueuePairMemory,
    /// The marks of both completion queues.
    marks: Pages,
}

impl Mlx5QueuePair {
    pub(super) fn new(domain: &Arc<verbs::Domain>, capacity: &Capacity) -> Result<Mlx5QueuePair> {
        let pair =
            verbs::VerbsQueuePair::new(domain, capacity.transport, &QueuePairSizes::of(capacity))?;
        let queues = pair.queues();
        let cqes = [queues.send_cqes, queues.recv_cqes];
        let marks = Pages::new(4 * (cqes[0] + cqes[1]) as usize)?;
        let memory = QueuePairMemory {
            sizes: QueuePairSizes {
                send_wqebbs: queues.send_wqebbs,
                recv_wqes: queues.recv_wqes,
                recv_stride_bytes: queues.recv_stride_bytes,
                cqes,
            },
            send_ring: queues.send_ring,
            recv_ring: queues.recv_ring,
            record: queues.record,
            // The second buffer lies behind the first; a register without buffers is one.
            uar: [0, queues.uar_bytes as usize].map(|offset| queues.uar.wrapping_add(offset)),
            uar_bytes: queues.uar_bytes.max(8),
            cqs: [queues.send_cq, queues.recv_cq],
            cq_records: [queues.send_cq_record, queues.recv_cq_record],
            cq_marks: [0, 4 * cqes[0] as usize].map(|offset| marks.at(offset).cast()),
        };
        Ok(Mlx5QueuePair {
            pair,
            memory,
            marks,
        })
    }
}

impl NicQueuePair for Mlx5QueuePair {
    fn queues(&self) -> Queues<'_> {
        Queues::Mlx5(&self.memory)
    }

    fn memory_bytes(&self) -> usize {
        let sizes = &self.memory.sizes;
        let rings = sizes.send_wqebbs * 64 + sizes.recv_wqes * sizes.recv_stride_bytes;
        let cqes = sizes.cqes.iter().sum::<u32>() * 64;
        (rings + cqes) as usize + self.marks.len_bytes()
    }

    fn qpn(&self) -> u32 {
        self.pair.states().qpn()
    }

    #[inline]
    fn state(&self) -> State {
        self.pair.states().state()
    }

    fn overrun(&self) -> bool {
        self.pair.states().overrun()
    }

    #[inline]
    fn poll_async_events(&self) {
        self.pair.states().poll_async_events();
    }

    fn direct(&self) -> Result<&'static str, String> {
        Ok(
            "mlx5dv shows the queue's rings and its own UAR register, mapped into this process, which a host stream stores to",
        )
    }

    #[cfg(feature = "cuda")]
    fn uar_mapping(&self) -> Option<Weak<dyn Any + Send + Sync>> {
        Some(self.pair.device())
    }

    fn abilities(&self) -> Abilities {
        self.pair.states().abilities()
    }

    fn mtu_bytes(&self) -> u32 {
        self.pair.states().mtu_bytes()
    }

    fn local(&self) -> PeerQueuePair {
        self.pair.states().local().into()
    }

    fn init(&self, attributes: Attributes) -> Result<()> {
        self.pair.states().init(attributes)
    }

    fn connect(&self, peer: &PeerQueuePair) -> Result<()> {
        self.pair.states().connect(&peer.verbs()?)
    }

    fn activate(&self) -> Result<()> {
        self.pair.states().activate()
    }

    fn connect_by(&self, steps: &Steps<'_>) -> Result<()> {
        self.pair.states().connect_by(steps)
    }

    fn modify_by(&self, step: Step) -> Result<()> {
        self.pair.states().modify_by(step)
    }

    fn reads_max(&self) -> (u8, u8) {
        self.pair.states().reads_max()
    }

    fn place(&self) -> Option<(String, u8)> {
        Some(self.pair.states().place())
    }

    fn fail(&self) -> Result<()> {
        self.pair.states().fail()
    }

    fn quiesce(&self) -> Result<bool> {
        self.pair.states().quiesce()?;
        Ok(true)
    }

    fn reset(&self) -> Result<()> {
        self.pair.states().reset()
    }

    fn resets_cqs(&self) -> bool {
        false
    }
}
