//! Drops that may block, done by a thread that no other thread waits for.

use std::sync::OnceLock;
use std::sync::mpsc::{Sender, channel};

/// Drops the object in a separate thread. For objects whose drop may block: memory that a GPU has mapped is unregistered only when the GPU is done,
/// which may wait for the very thread that would wait for it.
pub(crate) fn drop_elsewhere(what: Box<dyn Send>) {
    static DROPPER: OnceLock<Option<Sender<Box<dyn Send>>>> = OnceLock::new();
    let dropper = DROPPER.get_or_init(|| {
        let (sender, receiver) = channel::<Box<dyn Send>>();
        std::thread::Builder::new()
            .name("doorbell-ends".into())
            .spawn(move || receiver.into_iter().for_each(drop))
            .ok()
            .map(|_| sender)
    });
    // Without a thread it is dropped here.
    if let Some(sender) = dropper {
        let _ = sender.send(what);
    }
}
