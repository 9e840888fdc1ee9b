//! Drops that may block, done by threads that no other thread waits for.

use super::Workers;

/// For what a GPU has mapped. Memory is unregistered only when the GPU is idle.
static DROPS: Workers = Workers::new("doorbell-ends", 16).keep_one();
/// For what takes a command of a device, which may hang.
static COMMANDS: Workers = Workers::new("doorbell-leaves", 16).keep_one();

/// Drops the object in a separate thread: memory that a GPU has mapped is unregistered only when the GPU is done, which may wait for the very thread that
/// would wait for it.
pub(crate) fn drop_elsewhere(what: Box<dyn Send>) {
    DROPS.run(Box::new(move || drop(what)));
}

/// The same for an object whose drop issues a command of a device: a queue pair that is destroyed, or memory that is deregistered. It may also wait for a
/// GPU.
pub(crate) fn execute_elsewhere(what: Box<dyn Send>) {
    COMMANDS.run(Box::new(move || drop(what)));
}
