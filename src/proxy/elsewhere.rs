//! Ends that may take a while, brought about by a thread that nobody waits for.

use std::cell::Cell;
use std::sync::OnceLock;
use std::sync::mpsc::{Sender, channel};

thread_local! {
    static GOES_ROUND: Cell<bool> = const { Cell::new(false) };
}

/// Whether others wait behind what the calling thread does.
#[inline]
pub(crate) fn goes_round() -> bool {
    GOES_ROUND.get()
}

pub(super) fn begin_to_go_round() {
    GOES_ROUND.set(true);
}

/// Drops it in a thread of its own. Those who go round use it for what may have to wait when it ends: memory that a GPU has mapped is
/// unregistered only when the GPU is done, which may wait for the very thread that would wait for it.
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
