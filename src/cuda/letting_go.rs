//! Ends of what holds memory of a GPU, or memory that it has mapped: freeing and unregistering may wait for the GPU.

use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, OnceLock};

use super::memory::DeviceBuffer;
use super::pending::Pending;
use super::shared::{Shared, watch};

/// Gives up a handle between the turns of the thread that looks, so that it is not that thread which ends the stream: this may wait for
/// the GPU, and who ends waits that take too long must not.
pub(super) fn let_go(inner: Arc<Shared>) {
    let last = match watch() {
        Ok(watch) => watch.between_turns(|| Arc::into_inner(inner)),
        Err(_) => Arc::into_inner(inner),
    };
    drop(last);
}

/// What is dropped by a thread of its own: the last handle of an owner unregisters its memory, and who has it may be the thread that looks,
/// or another that must not wait.
pub(super) enum Dropped {
    Owners(#[allow(dead_code)] Vec<Pending>),
    Stream(Arc<Shared>),
    Memory(DeviceBuffer),
}

pub(super) fn drop_elsewhere(what: Dropped) {
    static DROPPER: OnceLock<Option<Sender<Dropped>>> = OnceLock::new();
    let dropper = DROPPER.get_or_init(|| {
        let (sender, receiver) = channel();
        std::thread::Builder::new()
            .name("doorbell-drop".into())
            .spawn(move || {
                for dropped in receiver {
                    match dropped {
                        Dropped::Owners(owners) => drop(owners),
                        Dropped::Stream(inner) => let_go(inner),
                        Dropped::Memory(buffer) => drop(buffer),
                    }
                }
            })
            .ok()
            .map(|_| sender)
    });
    // Without a thread it is dropped here.
    if let Some(sender) = dropper {
        let _ = sender.send(what);
    }
}
