//! Kernels of the host stream: closures that may fail, kept in the queue itself when they are small.
#![allow(unsafe_code)] // a closure of any type, stored as bytes

use std::marker::PhantomData;
use std::mem::{ManuallyDrop, MaybeUninit};

use crate::Result;

/// Room for a closure: eight captured words.
type Storage = MaybeUninit<[u64; 8]>;

/// A closure to be run at most once. One that captures no more than eight words lies in here and costs no allocation, neither
/// when it is queued nor, in another thread, when it is done.
pub(super) struct HostClosure {
    closure: Storage,
    calls: &'static Calls,
}

/// What can be done with the closure in a [`Storage`], once, and it is gone.
struct Calls {
    run: unsafe fn(*mut Storage) -> Result<()>,
    discard: unsafe fn(*mut Storage),
}

struct CallsOf<F>(PhantomData<F>);

impl<F: FnOnce() -> Result<()>> CallsOf<F> {
    const CALLS: Calls = Calls {
        run: |closure| {
            // SAFETY: the caller says that an F is there, and that it is gone after this.
            let closure = unsafe { closure.cast::<F>().read() };
            closure()
        },
        discard: |closure| {
            // SAFETY: as for `run`.
            unsafe { closure.cast::<F>().drop_in_place() }
        },
    };
}

impl HostClosure {
    /// `Send`, because another thread runs or drops it; `'static`, because nobody knows when.
    pub(super) fn new<F: FnOnce() -> Result<()> + Send + 'static>(closure: F) -> Self {
        if size_of::<F>() > size_of::<Storage>() || align_of::<F>() > align_of::<Storage>() {
            let boxed: Box<dyn FnOnce() -> Result<()> + Send> = Box::new(closure);
            return Self::new(boxed);
        }
        let mut kernel = Self {
            closure: Storage::uninit(),
            calls: &CallsOf::<F>::CALLS,
        };
        // SAFETY: the storage is large enough and aligned for an F, as was just checked. `calls` is F's.
        unsafe { (&raw mut kernel.closure).cast::<F>().write(closure) };
        kernel
    }

    pub(super) fn run(self) -> Result<()> {
        // The closure goes away in the call, so our drop must not drop it again.
        let mut kernel = ManuallyDrop::new(self);
        let run = kernel.calls.run;
        // SAFETY: a kernel holds the closure that its `calls` are of, until this call or its drop, and only one of them happens.
        unsafe { run(&raw mut kernel.closure) }
    }
}

impl Drop for HostClosure {
    fn drop(&mut self) {
        // SAFETY: as in `run`.
        unsafe { (self.calls.discard)(&raw mut self.closure) };
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};

    /// Adds the sum of what it captured to the count, and holds a reference to it until it is gone.
    fn kernel<const N: usize>(count: &Arc<AtomicU64>) -> HostClosure {
        let (held, words) = (Arc::clone(count), [1u64; N]);
        HostClosure::new(move || {
            held.fetch_add(words.iter().sum(), Ordering::Relaxed);
            Ok(())
        })
    }

    #[test]
    fn runs_once_or_is_dropped_in_place_or_in_a_box() {
        let count = Arc::new(AtomicU64::new(0));
        // 7 words and the reference are the most that fit.
        let makers: [fn(&Arc<AtomicU64>) -> HostClosure; 4] =
            [kernel::<0>, kernel::<7>, kernel::<8>, kernel::<100>];
        for (make, sum) in makers.into_iter().zip([0, 7, 15, 115]) {
            let moved = vec![make(&count)];
            assert_eq!(Arc::strong_count(&count), 2);
            moved.into_iter().for_each(|kernel| kernel.run().unwrap());
            assert_eq!(count.load(Ordering::Relaxed), sum);
            assert_eq!(Arc::strong_count(&count), 1);
            drop(make(&count));
            assert_eq!(count.load(Ordering::Relaxed), sum, "dropped, not run");
            assert_eq!(Arc::strong_count(&count), 1);
        }
    }

    #[test]
    fn alignment_beyond_the_storage_goes_to_a_box() {
        #[repr(align(64))]
        struct Wide(Arc<AtomicU64>);
        let wide = Wide(Arc::new(AtomicU64::new(0)));
        let count = Arc::clone(&wide.0);
        HostClosure::new(move || {
            let wide = wide;
            assert!((&raw const wide).addr().is_multiple_of(64));
            wide.0.store(1, Ordering::Relaxed);
            Ok(())
        })
        .run()
        .unwrap();
        assert_eq!(count.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn a_panic_drops_what_was_captured() {
        let held = Arc::new(());
        let captured = Arc::clone(&held);
        let kernel = HostClosure::new(move || {
            let _captured = captured;
            panic!("in the kernel");
        });
        let ran = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| kernel.run()));
        assert!(ran.is_err());
        assert_eq!(Arc::strong_count(&held), 1);
    }
}
