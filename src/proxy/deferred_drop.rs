//! Drops that may block, done by threads that no other thread waits for.

use super::Workers;

/// A drop that blocks keeps one of them, and no other drop waiting.
static DROPS: Workers = Workers::new("doorbell-ends", 16);

/// Drops the object in a separate thread. For objects whose drop may block: the device has to execute a command, which may hang, or memory that a
/// GPU has mapped is unregistered only when the GPU is done, which may wait for the very thread that would wait for it.
pub(crate) fn drop_elsewhere(what: Box<dyn Send>) {
    DROPS.run(Box::new(move || drop(what)));
}
