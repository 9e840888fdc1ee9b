//! Device queues whose kernels run on a GPU.
#![allow(unsafe_code)] // promises that memory stays mapped

use crate::Result;
use crate::cuda::{CudaContext, DeviceBuffer, HostRegistration, registers_error};
use crate::endpoint::{OwnedSendQueue, QueueView, fresh_marks, state_words};

/// Bytes of `struct dbl_queue_state`, behind which the marks lie where the kernels ring.
const STATE_BYTES: usize = 512;

/// What kernels use of it.
#[derive(Debug)]
#[expect(dead_code, reason = "kept for kernels, which have its address")]
pub(super) struct OnGpu {
    mapped: Vec<HostRegistration>,
    memory: DeviceBuffer,
}

impl OnGpu {
    pub(super) fn new(
        context: &CudaContext,
        queue: &OwnedSendQueue,
        view: &mut QueueView,
    ) -> Result<OnGpu> {
        let mut mapped = Vec::new();
        let registers = queue.memory().uar.map(|uar| uar.addr());
        view.reach(queue, |address, len_bytes| {
            let is_register = registers.contains(&address);
            let keeper = is_register.then(|| queue.uar_mapping()).flatten();
            // SAFETY: memory of the queue, which lives longer than this: `DeviceQueue` drops this first.
            let pinned = unsafe { HostRegistration::new_kept(context, address, len_bytes, keeper) };
            let pinned = pinned.map_err(|error| {
                if is_register {
                    registers_error("hand a send queue to kernels", error)
                } else {
                    error
                }
            })?;
            let reached = pinned.device_address(address);
            mapped.push(pinned);
            Ok(reached)
        })?;
        let line = queue.state();
        let (first, completion) = line.first();
        let mut bytes: Vec<u8> = words(&state_words(first, completion));
        debug_assert_eq!(bytes.len(), STATE_BYTES);
        let (slots, _) = line.slots();
        let has_flags = line.flags().is_some();
        if !has_flags {
            bytes.extend(words(&fresh_marks(first, slots)));
        }
        let memory = context.alloc(bytes.len() as u64)?;
        memory.copy_from_host(0, &bytes)?;
        view.state = memory.ptr();
        if !has_flags {
            view.marks = memory.ptr() + STATE_BYTES as u64;
        }
        Ok(OnGpu { mapped, memory })
    }
}

fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}
