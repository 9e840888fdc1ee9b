//! Who hears of an owner's failure before anything that waits for it is let go.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, MutexGuard};

use super::lock::Lock;

/// What is called when an owner fails whose programs are queued: in the thread that has found the failure. It must not wait.
type AlarmCallback = Arc<dyn Fn() + Send + Sync>;

/// The streams that are to hear of an owner's failure, each as long as it has programs of it.
#[derive(Default)]
pub(crate) struct Alarm {
    /// By the number of the stream, with the number of its programs.
    streams: Lock<Vec<(u64, u32, AlarmCallback)>>,
    has_failed: AtomicBool,
}

impl Alarm {
    fn streams(&self) -> MutexGuard<'_, Vec<(u64, u32, AlarmCallback)>> {
        self.streams.lock()
    }

    /// A program of the owner is about to be queued on that stream. Where the owner has failed already, it is told at once.
    pub(crate) fn enter(&self, stream: u64, ring: impl FnOnce() -> AlarmCallback) {
        let mut streams = self.streams();
        let at = match streams.iter().position(|(of, ..)| *of == stream) {
            Some(at) => at,
            None => {
                streams.push((stream, 0, ring()));
                streams.len() - 1
            }
        };
        let Some((_, count, ring)) = streams.get_mut(at) else {
            return;
        };
        *count += 1;
        if self.has_failed.load(Ordering::Relaxed) {
            ring();
        }
    }

    /// It is over, or was not queued.
    pub(crate) fn leave(&self, stream: u64) {
        let mut streams = self.streams();
        let Some(at) = streams.iter().position(|(of, ..)| *of == stream) else {
            return;
        };
        let Some((_, count, _)) = streams.get_mut(at) else {
            return;
        };
        *count -= 1;
        if *count == 0 {
            let gone = streams.swap_remove(at);
            // Not under the lock: what it holds may have to wait for a GPU.
            drop(streams);
            drop(gone);
        }
    }

    /// The owner has failed, and nothing that waits for it knows yet.
    pub(crate) fn sound(&self) {
        let streams = self.streams();
        // Under the lock, which orders it against who enters.
        self.has_failed.store(true, Ordering::Relaxed);
        streams.iter().for_each(|(_, _, ring)| ring());
    }

    /// The owner starts over.
    pub(crate) fn reset(&self) {
        let _streams = self.streams();
        self.has_failed.store(false, Ordering::Relaxed);
    }
}

impl fmt::Debug for Alarm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Alarm").finish_non_exhaustive()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::sync::atomic::AtomicU32;

    use super::*;

    #[test]
    fn streams_hear_of_a_failure_while_they_have_programs() {
        let alarm = Alarm::default();
        let heard = [(); 2].map(|()| Arc::new(AtomicU32::new(0)));
        let enter = |stream: usize| {
            let heard = Arc::clone(&heard[stream]);
            alarm.enter(stream as u64, || {
                Arc::new(move || {
                    heard.fetch_add(1, Ordering::SeqCst);
                })
            });
        };
        let counts = || [0, 1].map(|at: usize| heard[at].load(Ordering::SeqCst));
        enter(0);
        enter(0);
        enter(1);
        alarm.leave(1);
        alarm.leave(0);
        assert_eq!(counts(), [0, 0]);
        alarm.sound();
        assert_eq!(counts(), [1, 0]);
        // Who comes late hears at once; after a new start nobody does.
        enter(1);
        assert_eq!(counts(), [1, 1]);
        alarm.reset();
        alarm.leave(0);
        enter(0);
        assert_eq!(counts(), [1, 1]);
        assert_eq!(Arc::strong_count(&heard[0]), 2);
        alarm.leave(0);
        alarm.leave(1);
        assert_eq!(heard.each_ref().map(Arc::strong_count), [1, 1]);
    }
}
