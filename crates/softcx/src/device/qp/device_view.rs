//! The rest of the device, as a queue pair sees it while it works.

use super::Counters;
use crate::device::copies::Copies;
use crate::device::core::PeerLinks;
use crate::device::cq::Cq;
use crate::device::fabric::Fabric;
use crate::device::gather::Gather;
use crate::device::keys::Keys;
use crate::device::srq::Srq;
use crate::device::trace::Trace;
use crate::device::wire::{Counted, Wire};
use doorbell_wire::mlx5::Cqe;

/// What a queue pair needs of the rest of the device while it works.
pub(crate) struct DeviceView<'a> {
    pub(crate) now_ns: u64,
    pub(crate) cqs: &'a mut [Option<Cq>],
    pub(crate) srqs: &'a mut [Option<Srq>],
    pub(crate) keys: &'a mut Keys,
    pub(crate) copies: &'a mut Copies,
    pub(crate) wire: &'a mut Wire,
    pub(crate) counters: &'a mut Counters,
    pub(crate) gather: &'a mut Gather,
    pub(crate) fabric: Option<&'a Fabric>,
    pub(crate) links: &'a mut PeerLinks,
    pub(crate) trace: Option<&'a mut Trace>,
    /// Set when a completion queue lost a completion.
    pub(crate) overran: &'a mut bool,
}

impl DeviceView<'_> {
    /// Whether nobody wants to see single packets, or to have them lost: then there may be fewer.
    #[inline]
    pub(crate) fn is_unseen(&self) -> bool {
        self.trace.is_none() && !self.wire.is_faulty()
    }

    pub(super) fn complete(&mut self, cq: usize, cqe: &Cqe) -> bool {
        let lost = self.wire.strikes(Counted::Completion).is_some();
        let queue = self.cqs.get_mut(cq).and_then(Option::as_mut);
        let pushed = queue.is_some_and(|queue| {
            if lost {
                queue.break_down();
            }
            queue.push(cqe)
        });
        *self.overran |= !pushed;
        if let Some(trace) = &mut self.trace {
            trace.cqe(self.now_ns, cq, cqe, pushed);
        }
        self.counters.completions += u64::from(pushed);
        pushed
    }
}
