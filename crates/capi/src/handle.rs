//! Handles: objects of the library as C holds them.
//!
//! A handle is the address of its object. A word before the object says of which kind it is, and whether it was destroyed. The memory of an
//! object is kept for a while after its end, so that the word of a handle that was destroyed is there to be read.
//!
//! Debug builds also list all addresses that were handed out, to detect pointers that never were handles. Release builds do not: the list would need a
//! lock in every call.
#![allow(unsafe_code)] // turns addresses that C kept for us into references

use std::alloc::{Layout, dealloc};
use std::collections::{HashMap, VecDeque};
use std::mem::offset_of;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use crate::failure::Failure;

/// An object that C holds by its address. From any thread, hence the bounds.
pub(super) trait CObject: Send + Sync + Sized {
    /// The name of the type in the header.
    const NAME: &'static str;
}

/// An object with the word before it.
#[repr(C)]
struct HeldObject<T> {
    word: AtomicU64,
    object: T,
}

/// Where the word lies, before the object.
const WORD_BYTES: usize = size_of::<AtomicU64>();

impl<T: CObject> HeldObject<T> {
    /// The word of an object that is in use: a hash of the name (FNV-1a). That of a destroyed object is its complement.
    const LIVE: u64 = {
        // Whatever the type, so that the word is found without knowing it.
        assert!(offset_of!(HeldObject<T>, object) == WORD_BYTES);
        let mut hash = 0xcbf2_9ce4_8422_2325u64;
        let mut at = 0;
        while at < T::NAME.len() {
            hash = (hash ^ T::NAME.as_bytes()[at] as u64).wrapping_mul(0x0000_0100_0000_01b3);
            at += 1;
        }
        hash
    };

    /// The word of a handle.
    ///
    /// # Safety
    /// The handle is of [`create`], of any type, and its memory is still kept.
    #[inline]
    unsafe fn word<'a>(handle: *const T) -> &'a AtomicU64 {
        // SAFETY: before each object of `create` there is a word.
        unsafe { &*handle.byte_sub(WORD_BYTES).cast() }
    }

    #[cold]
    fn refusal(word: u64, argument: &'static str) -> Failure {
        let reason = if word == !Self::LIVE {
            format!("it was a {} that was destroyed before", T::NAME)
        } else {
            format!("it is not a valid {} handle", T::NAME)
        };
        Failure::Handle { argument, reason }
    }
}

/// Number of destroyed objects whose memory is kept.
const QUARANTINE: usize = 1024;

#[derive(Default)]
struct HandleTable {
    /// What each address is, and whether it still is; in debug builds.
    known: HashMap<usize, (&'static str, bool)>,
    /// Objects at their end, oldest first, whose memory is not given back yet.
    ended: VecDeque<DestroyedObject>,
}

/// The memory of an object at its end.
struct DestroyedObject(NonNull<u8>, Layout);

// SAFETY: nobody else uses the memory.
unsafe impl Send for DestroyedObject {}

fn register() -> MutexGuard<'static, HandleTable> {
    static REGISTER: OnceLock<Mutex<HandleTable>> = OnceLock::new();
    REGISTER
        .get_or_init(Mutex::default)
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
}

impl HandleTable {
    fn check<T: CObject>(&self, address: usize, argument: &'static str) -> Result<(), Failure> {
        let reason = match self.known.get(&address) {
            Some((kind, true)) if *kind == T::NAME => return Ok(()),
            Some((kind, true)) => format!("it is a {kind}, not a {}", T::NAME),
            Some((kind, false)) => format!("it was a {kind} that was destroyed before"),
            None => format!("it is not a valid {} handle", T::NAME),
        };
        Err(Failure::Handle { argument, reason })
    }
}

/// Gives an object to C.
pub(super) fn create<T: CObject>(object: T) -> *mut T {
    let held = Box::into_raw(Box::new(HeldObject {
        word: AtomicU64::new(HeldObject::<T>::LIVE),
        object,
    }));
    // SAFETY: of the box.
    let handle = unsafe { &raw mut (*held).object };
    if cfg!(debug_assertions) {
        register().known.insert(handle as usize, (T::NAME, true));
    }
    handle
}

/// The object of a handle.
///
/// # Safety
/// The handle is null, or of [`create`], and not destroyed by another thread before the reference is gone. In debug builds it may be anything.
#[inline]
pub(super) unsafe fn get<'a, T: CObject>(
    handle: *const T,
    argument: &'static str,
) -> Result<&'a T, Failure> {
    if handle.is_null() {
        return Err(Failure::null(argument));
    }
    if cfg!(debug_assertions) {
        register().check::<T>(handle as usize, argument)?;
    }
    // SAFETY: of `create`, by the caller's promise, which debug builds have just checked.
    let word = unsafe { HeldObject::word(handle) }.load(Ordering::Relaxed);
    if word != HeldObject::<T>::LIVE {
        return Err(HeldObject::<T>::refusal(word, argument));
    }
    // SAFETY: an object that is in use, by the word, and by the caller's promise stays so.
    Ok(unsafe { &*handle })
}

/// Takes an object back from C, and drops it. Null is nothing to take.
///
/// # Safety
/// As [`get`], and no other thread uses the handle now or later.
pub(super) unsafe fn destroy<T: CObject>(
    handle: *mut T,
    argument: &'static str,
) -> Result<(), Failure> {
    if handle.is_null() {
        return Ok(());
    }
    // SAFETY: the caller's promise.
    unsafe { take(handle, argument) }.map(drop)
}

/// Takes an object back from C.
///
/// # Safety
/// As [`destroy`].
pub(super) unsafe fn take<T: CObject>(
    handle: *mut T,
    argument: &'static str,
) -> Result<T, Failure> {
    if handle.is_null() {
        return Err(Failure::null(argument));
    }
    if cfg!(debug_assertions) {
        register().check::<T>(handle as usize, argument)?;
    }
    // SAFETY: of `create`, by the caller's promise, which debug builds have just checked.
    let word = unsafe { HeldObject::word(handle) };
    let (live, ended) = (HeldObject::<T>::LIVE, !HeldObject::<T>::LIVE);
    // Of two threads that destroy it at once, one does.
    word.compare_exchange(live, ended, Ordering::AcqRel, Ordering::Relaxed)
        .map_err(|word| HeldObject::<T>::refusal(word, argument))?;
    // SAFETY: of `create`, and no other thread gets past the word any more: only the memory is freed, without dropping the object.
    let object = unsafe { handle.read() };
    let mut locked = register();
    if cfg!(debug_assertions) {
        locked.known.insert(handle as usize, (T::NAME, false));
    }
    // SAFETY: the box begins with the word.
    let held = unsafe { NonNull::new_unchecked(handle.byte_sub(WORD_BYTES).cast()) };
    locked
        .ended
        .push_back(DestroyedObject(held, Layout::new::<HeldObject<T>>()));
    if locked.ended.len() > QUARANTINE
        && let Some(DestroyedObject(oldest, layout)) = locked.ended.pop_front()
    {
        locked
            .known
            .remove(&(oldest.as_ptr() as usize + WORD_BYTES));
        // SAFETY: allocated by a box of this layout, and empty since it was put here.
        unsafe { dealloc(oldest.as_ptr(), layout) };
    }
    // Its drop may take as long as it likes, and call back: after the lock.
    Ok(object)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    struct One(#[expect(dead_code)] Arc<()>);
    struct Other(#[expect(dead_code)] u64);
    impl CObject for One {
        const NAME: &'static str = "one";
    }
    impl CObject for Other {
        const NAME: &'static str = "other";
    }

    fn refused<T>(result: Result<T, Failure>) -> String {
        result.map(drop).unwrap_err().to_string()
    }

    #[test]
    fn an_object_ends_once_and_null_is_named() {
        let held = Arc::new(());
        let handle = create(One(Arc::clone(&held)));
        // SAFETY: null, and a handle that is used as it should be.
        unsafe {
            assert!(get(handle, "x").is_ok());
            assert_eq!(
                refused(get(std::ptr::null::<One>(), "x")),
                "`x`: it is a null pointer"
            );
            assert!(destroy(std::ptr::null_mut::<One>(), "x").is_ok());
            assert!(destroy(handle, "x").is_ok());
        }
        assert_eq!(Arc::strong_count(&held), 1);
    }

    #[test]
    fn a_handle_that_is_used_up_or_of_another_kind_is_refused_in_every_build() {
        let held = Arc::new(());
        let handle = create(One(Arc::clone(&held)));
        // SAFETY: handles whose memory is still kept: tests beside this one end few objects.
        unsafe {
            let other = refused(get(handle.cast::<Other>(), "x"));
            assert!(other.starts_with("`x`: it is "), "{other}");
            assert!(other.contains("not a other"), "{other}");
            assert!(destroy(handle.cast::<Other>(), "x").is_err());
            assert!(destroy(handle, "x").is_ok());
            for other in 0..QUARANTINE as u64 / 4 {
                assert!(destroy(create(Other(other)), "x").is_ok());
            }
            let ended = "`x`: it was a one that was destroyed before";
            assert_eq!(refused(get(handle, "x")), ended);
            assert_eq!(refused(take(handle, "x")), ended);
            assert_eq!(refused(destroy(handle, "x")), ended);
        }
        assert_eq!(Arc::strong_count(&held), 1);
    }

    #[test]
    fn of_threads_that_destroy_the_same_handle_one_does() {
        let held = Arc::new(());
        let handle = create(One(Arc::clone(&held))) as usize;
        let ends = || {
            // SAFETY: a handle whose memory is kept.
            let end = unsafe { destroy(std::ptr::with_exposed_provenance_mut::<One>(handle), "x") };
            u32::from(end.is_ok())
        };
        let ended = std::thread::scope(|scope| {
            let threads = [0; 4].map(|_| scope.spawn(ends));
            threads
                .map(|thread| thread.join().unwrap())
                .iter()
                .sum::<u32>()
        });
        assert_eq!(ended, 1);
        assert_eq!(Arc::strong_count(&held), 1);
    }

    #[test]
    fn debug_builds_know_wrong_handles() {
        if !cfg!(debug_assertions) {
            return;
        }
        let held = Arc::new(());
        let handle = create(One(Arc::clone(&held)));
        // SAFETY: debug builds look at no handle before they have looked it up.
        unsafe {
            assert_eq!(
                refused(get(handle.cast::<Other>(), "x")),
                "`x`: it is a one, not a other"
            );
            assert!(destroy(handle, "x").is_ok());
            for other in 0..10 {
                assert!(destroy(create(Other(other)), "x").is_ok());
            }
            assert_eq!(
                refused(get(handle, "x")),
                "`x`: it was a one that was destroyed before"
            );
            assert!(destroy(handle, "x").is_err());
            let nothing = std::ptr::without_provenance_mut::<One>(0x10);
            assert_eq!(
                refused(destroy(nothing, "x")),
                "`x`: it is not a valid one handle"
            );
            for other in 0..2 * QUARANTINE as u64 {
                assert!(destroy(create(Other(other)), "x").is_ok());
            }
        }
        assert_eq!(Arc::strong_count(&held), 1);
    }
}
