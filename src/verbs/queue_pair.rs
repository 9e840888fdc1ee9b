//! A queue pair on a card, with the memory of its queues laid open.
#![allow(unsafe_code)] // calls libibverbs

#[cfg(feature = "cuda")]
use std::any::Any;
use std::sync::Arc;
#[cfg(feature = "cuda")]
use std::sync::Weak;

use doorbell_dv_sys::{doorbell_dv_queues, doorbell_dv_sizes};

use super::call::{object, status};
use super::completion_queue::CompletionQueue;
#[cfg(feature = "cuda")]
use super::context::Context;
use super::domain::{Domain, ThreadDomainUar};
use super::qp_states::{RawQp, States};
use crate::{Error, Result, StateKind};
use doorbell_wire::memory::QueuePairSizes;
use doorbell_wire::verbs::Transport;

/// A queue pair with two completion queues of its own. The fields stand in the order in which they must go.
#[derive(Debug)]
pub(crate) struct VerbsQueuePair {
    states: States,
    _cqs: [CompletionQueue; 2],
    _uar: ThreadDomainUar,
    #[cfg(feature = "cuda")]
    context: Arc<Context>,
    /// Where its parts lie, and how long they are: as asked for, or longer.
    queues: doorbell_dv_queues,
}

// SAFETY: the queue pair is handed to calls that any thread may make; the addresses in `queues` are for the unsafe code that uses them.
unsafe impl Send for VerbsQueuePair {}
// SAFETY: as above.
unsafe impl Sync for VerbsQueuePair {}

impl VerbsQueuePair {
    /// Makes a queue pair in the RESET state.
    ///
    /// # Errors
    /// [`Error::System`] of the verbs call; [`Error::State`] if what the provider made is not what the library's queues can use.
    pub(crate) fn new(
        domain: &Arc<Domain>,
        transport: Transport,
        sizes: &QueuePairSizes,
    ) -> Result<VerbsQueuePair> {
        let context = &domain.context;
        let uar = ThreadDomainUar::new(domain)?;
        let cqs = [
            CompletionQueue::new(context, &uar, sizes.cqes[0])?,
            CompletionQueue::new(context, &uar, sizes.cqes[1])?,
        ];
        let asked = doorbell_dv_sizes {
            send_wqebbs: sizes.send_wqebbs,
            recv_wqes: sizes.recv_wqes,
            recv_segments: sizes.recv_segments(),
            atomics: context.limits.has_atomics().into(),
            datagrams: (transport == Transport::Ud).into(),
        };
        let [send_cq, recv_cq] = cqs.each_ref().map(|cq| cq.raw().as_ptr());
        // SAFETY: live objects of one context, which the queue pair holds.
        let qp = RawQp(object("mlx5dv_create_qp", || unsafe {
            doorbell_dv_sys::doorbell_dv_create_qp(uar.raw().as_ptr(), send_cq, recv_cq, &asked)
        })?);
        let mut queues = doorbell_dv_queues::default();
        // SAFETY: as above.
        status("mlx5dv_init_obj", || unsafe {
            doorbell_dv_sys::doorbell_dv_queues(qp.0.as_ptr(), send_cq, recv_cq, &raw mut queues)
        })?;
        check(&queues, sizes)?;
        let states = States::new(qp, transport, context, &cqs)?;
        Ok(VerbsQueuePair {
            states,
            _cqs: cqs,
            _uar: uar,
            #[cfg(feature = "cuda")]
            context: Arc::clone(context),
            queues,
        })
    }

    pub(crate) fn queues(&self) -> &doorbell_dv_queues {
        &self.queues
    }

    /// The open device, as long as which the registers stay mapped: libmlx5 keeps those of a thread domain that is gone for the next one.
    #[cfg(feature = "cuda")]
    pub(crate) fn device(&self) -> Weak<dyn Any + Send + Sync> {
        let device: Weak<Context> = Arc::downgrade(&self.context);
        device
    }

    pub(crate) fn states(&self) -> &States {
        &self.states
    }
}

/// Fails unless the provider's queues are such as ours can use.
fn check(queues: &doorbell_dv_queues, sizes: &QueuePairSizes) -> Result<()> {
    let rule = |holds: bool, what: &str, found: u32| {
        if holds {
            return Ok(());
        }
        Err(Error::state(
            StateKind::Unsupported,
            "mlx5dv_init_obj",
            format!("the provider made {what} of {found}, which the library's queues cannot use"),
        ))
    };
    let pow2 = |found: u32, least: u32| found.is_power_of_two() && found >= least;
    let addresses = [
        queues.send_ring,
        queues.recv_ring,
        queues.uar,
        queues.send_cq,
        queues.recv_cq,
        queues.record.cast(),
        queues.send_cq_record.cast(),
        queues.recv_cq_record.cast(),
    ];
    rule(
        addresses.iter().all(|address| !address.is_null()),
        "a queue at the address",
        0,
    )?;
    rule(
        pow2(queues.send_wqebbs, sizes.send_wqebbs) && queues.send_wqebbs <= 1 << 15,
        "a send ring with a length",
        queues.send_wqebbs,
    )?;
    rule(
        queues.send_stride_bytes == 64,
        "a send ring with blocks",
        queues.send_stride_bytes,
    )?;
    rule(
        pow2(queues.recv_wqes, sizes.recv_wqes) && queues.recv_wqes <= 1 << 15,
        "a receive ring with a length",
        queues.recv_wqes,
    )?;
    rule(
        pow2(queues.recv_stride_bytes, sizes.recv_stride_bytes),
        "a receive ring with a stride",
        queues.recv_stride_bytes,
    )?;
    rule(
        pow2(queues.send_cqes, sizes.cqes[0]),
        "a completion queue with a length",
        queues.send_cqes,
    )?;
    rule(
        pow2(queues.recv_cqes, sizes.cqes[1]),
        "a completion queue with a length",
        queues.recv_cqes,
    )?;
    rule(
        queues.send_cqe_bytes == 64,
        "a completion queue with entries",
        queues.send_cqe_bytes,
    )?;
    rule(
        queues.recv_cqe_bytes == 64,
        "a completion queue with entries",
        queues.recv_cqe_bytes,
    )
}
