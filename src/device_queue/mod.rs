//! Send queues whose work requests kernels make: threads of a GPU, or of this process, any number of them at once.
//!
//! [`DeviceQueue::new`] takes the send queue of a connected endpoint. The kernels' side is in `include/doorbell/queue.h`, for C and CUDA.
//! Kernels get a [`QueueView`]; they reserve slots, write puts, gets, atomics and signals, ring, and poll; on the proxy path a thread of
//! this library rings. The endpoint keeps its receive queue. If it fails, every call of the kernels returns an error code.
//!
//! Kernels name memory by keys, which do not keep a region registered. [`DeviceQueue::local`] holds the region until the endpoint is reset.

#![allow(unsafe_code)] // has memory mapped to GPUs that it holds

#[cfg(feature = "cuda")]
mod gpu;
#[cfg(feature = "cuda")]
mod step;

use std::sync::atomic::AtomicU32;

use doorbell_wire::memory::PageBox;

#[cfg(feature = "cuda")]
use crate::cuda::{CudaContext, UNORDERED_WRITES, WritesOrdering};
use crate::endpoint::{Endpoint, OwnedSendQueue, QueueView, state_words};
use crate::region::{Access, Region, Slice};
#[cfg(feature = "cuda")]
use crate::{Error, StateKind};
use crate::{Result, WorkError};
#[cfg(feature = "cuda")]
use gpu::OnGpu;
#[cfg(feature = "cuda")]
pub use step::PutStep;

/// The send queue of an endpoint, owned by kernels: threads of a GPU, or of this process, any number of them at once.
///
/// The kernels' functions, which take its [`QueueView`], are in `include/doorbell/queue.h`, for C and CUDA.
///
/// As long as this exists, sends of the endpoint itself fail with [`Error::State`](crate::Error::State). Drop it when no kernel uses it any more; the
/// library cannot check that. Work that kernels have submitted is still transmitted while the endpoint exists. A reset of the endpoint then returns the
/// send queue to it. The endpoint may be dropped earlier.
#[derive(Debug)]
pub struct DeviceQueue {
    view: QueueView,
    /// Before the memory that it maps.
    _place: StateMemory,
    queue: OwnedSendQueue,
}

/// The memory of the state that the threads share.
#[derive(Debug)]
#[expect(dead_code, reason = "kept for kernels, which have its address")]
enum StateMemory {
    Host(PageBox<DeviceQueueWords>),
    #[cfg(feature = "cuda")]
    Gpu(OnGpu),
}

/// `struct dbl_queue_state`.
#[derive(Debug)]
#[repr(C)]
struct DeviceQueueWords([AtomicU32; 128]);

/// Registers 8 bytes for what additions of signals found, where the device has additions. They are held until nothing that kernels have submitted
/// is in flight.
fn register_sink(queue: &OwnedSendQueue, view: &mut QueueView) -> Result<()> {
    if queue.has_atomics() {
        let sink = Region::alloc(queue.domain(), 8, Access::LOCAL_WRITE)?;
        queue.hold(&sink)?;
        view.set_sink(sink.as_ptr() as u64, sink.lkey());
    }
    Ok(())
}

impl DeviceQueue {
    /// Hands the endpoint's send queue to threads of this process.
    ///
    /// # Errors
    /// [`Error::Work`](crate::Error::Work) if the endpoint has failed; [`Error::State`](crate::Error::State) if it is not connected, if sends of
    /// its own are prepared, in flight or not collected, if kernels own its send queue already, or if its path is `sync`;
    /// [`Error::System`](crate::Error::System) if the device does not register 8 bytes for it.
    pub fn new(endpoint: &mut Endpoint) -> Result<DeviceQueue> {
        let mut queue = endpoint.take_send_queue(true)?;
        let (slot, completion) = queue.state().first();
        let words = state_words(slot, completion);
        let state = PageBox::new(|| DeviceQueueWords(words.map(AtomicU32::new)))?;
        let mut view = QueueView::new(&queue);
        view.reach(&queue, |address, _| Ok(address as u64))?;
        view.state = std::ptr::from_ref(&*state).addr() as u64;
        register_sink(&queue, &mut view)?;
        queue.begin()?;
        Ok(DeviceQueue {
            view,
            _place: StateMemory::Host(state),
            queue,
        })
    }

    /// Hands the endpoint's send queue to kernels of a GPU. Their shared state is in the GPU's memory, and the queue is mapped for the GPU.
    ///
    /// # Errors
    /// As [`DeviceQueue::new`], and [`Error::Cuda`](crate::Error::Cuda), for example if the driver does not map the memory.
    /// [`Error::State`](crate::Error::State) for a GPU that does not see writes of NICs in order (GPU_DIRECT_RDMA_WRITES_ORDERING is NONE): a
    /// stream can flush them before it goes on, a kernel cannot, so it would find the completion of a get before its data; and if the driver does not map
    /// the card's doorbell registers to the GPU, with the remedy.
    #[cfg(feature = "cuda")]
    pub fn on_gpu(context: &CudaContext, endpoint: &mut Endpoint) -> Result<DeviceQueue> {
        if context.capabilities().ordering == WritesOrdering::None {
            return Err(Error::state(
                StateKind::Unsupported,
                "hand a send queue to kernels",
                UNORDERED_WRITES,
            ));
        }
        let mut queue = endpoint.take_send_queue(false)?;
        let mut view = QueueView::new(&queue);
        let place = OnGpu::new(context, &queue, &mut view)?;
        register_sink(&queue, &mut view)?;
        // Last: what the driver refuses leaves the endpoint as it was.
        queue.begin()?;
        Ok(DeviceQueue {
            view,
            _place: StateMemory::Gpu(place),
            queue,
        })
    }

    /// The queue view that kernels need, to be passed to them by value.
    pub fn view(&self) -> QueueView {
        self.view
    }

    /// The address and the local key by which kernels name a part of a region. The region is held as long as this queue exists, and until the
    /// endpoint is reset or dropped: work that kernels have submitted goes on after the queue is dropped.
    ///
    /// # Errors
    /// [`Error::Foreign`](crate::Error::Foreign) for a region of another protection domain; [`Error::State`](crate::Error::State) if it is
    /// deregistered.
    pub fn local(&self, slice: &Slice<'_>) -> Result<(u64, u32)> {
        let region = slice.region;
        self.queue.hold(region)?;
        Ok((region.as_ptr() as u64 + slice.offset, region.lkey()))
    }

    /// The failure of the endpoint, if it has failed. Kernels get `DOORBELL_EWORK` for it. The number of a work request is the low 16 bits
    /// of its slot.
    pub fn failure(&self) -> Option<WorkError> {
        self.queue.failure()
    }
}
