//! Ends of what holds memory of a GPU, or memory that it has mapped: freeing and unregistering may wait for the GPU.

use std::sync::Arc;

use super::memory::DeviceBuffer;
use super::shared::{Shared, watch};
use crate::proxy;
use crate::stream::Last;

/// Gives up a handle between the turns of the thread that looks, so that it is not that thread which ends the stream: this may wait for
/// the GPU, and who ends waits that take too long must not.
pub(super) fn let_go(inner: Arc<Shared>) {
    let last = match watch() {
        Ok(watch) => watch.between_turns(|| Arc::into_inner(inner)),
        Err(_) => Arc::into_inner(inner),
    };
    drop(last);
}

/// What is dropped by a thread that nobody waits for: the last handle of an owner unregisters its memory, and who has it may be the thread that
/// looks, or another that must not wait.
pub(super) enum Dropped {
    Owners(Vec<Last>),
    Stream(Arc<Shared>),
    Memory(DeviceBuffer),
}

/// A stream's handle, given up as [`let_go`] does.
struct LetGo(Option<Arc<Shared>>);

impl Drop for LetGo {
    fn drop(&mut self) {
        if let Some(inner) = self.0.take() {
            let_go(inner);
        }
    }
}

pub(super) fn drop_elsewhere(what: Dropped) {
    proxy::drop_elsewhere(match what {
        Dropped::Owners(owners) if owners.is_empty() => return,
        Dropped::Owners(owners) => Box::new(owners),
        Dropped::Stream(inner) => Box::new(LetGo(Some(inner))),
        Dropped::Memory(buffer) => Box::new(buffer),
    });
}
