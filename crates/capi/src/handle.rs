//! Handles: objects of the library as C holds them.
//!
//! A handle is the address of its object. Debug builds keep a list of all addresses they gave out, and an object's memory
//! for a while after its end, so that a handle that is none, is of another kind, or was destroyed is found out without
//! looking at what it points to. Release builds believe the caller: a list would be a lock on the way of every operation.
#![allow(unsafe_code)] // turns addresses that C kept for us into references

use std::alloc::{Layout, dealloc};
use std::collections::{HashMap, VecDeque};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use crate::failure::Failure;

/// An object that C holds by its address. From any thread, hence the bounds.
pub(super) trait CObject: Send + Sync + Sized {
    /// The name of the type in the header.
    const NAME: &'static str;
}

/// Ends whose memory is kept, in debug builds.
const QUARANTINE: usize = 1024;

#[derive(Default)]
struct HandleTable {
    /// What each address is, and whether it still is.
    known: HashMap<usize, (&'static str, bool)>,
    /// Objects at their end, oldest first, whose memory is not given back yet.
    ended: VecDeque<(usize, Layout)>,
}

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
            Some((kind, false)) => format!("it was a {kind}, and is destroyed"),
            None => format!("it is not a {} of this library", T::NAME),
        };
        Err(Failure::Handle { argument, reason })
    }
}

/// Gives an object to C.
pub(super) fn create<T: CObject>(object: T) -> *mut T {
    let handle = Box::into_raw(Box::new(object));
    if cfg!(debug_assertions) {
        register().known.insert(handle as usize, (T::NAME, true));
    }
    handle
}

/// The object of a handle.
///
/// # Safety
/// The handle is null, or of [`create`] and not destroyed before the reference is gone. In debug builds it may be anything.
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
    // SAFETY: the caller's promise, which debug builds have just checked.
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
    if !cfg!(debug_assertions) {
        // SAFETY: of `create`, by the caller's promise.
        return Ok(*unsafe { Box::from_raw(handle) });
    }
    let mut locked = register();
    locked.check::<T>(handle as usize, argument)?;
    locked.known.insert(handle as usize, (T::NAME, false));
    // SAFETY: of `create`, and nobody else gets past the check above any more: the memory is given back as such, without the object.
    let object = unsafe { handle.read() };
    locked
        .ended
        .push_back((handle as usize, Layout::new::<T>()));
    if locked.ended.len() > QUARANTINE
        && let Some((oldest, layout)) = locked.ended.pop_front()
    {
        locked.known.remove(&oldest);
        // SAFETY: allocated by a box of this layout, and empty since it was put here.
        unsafe { dealloc(std::ptr::with_exposed_provenance_mut(oldest), layout) };
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
                "`x`: it was a one, and is destroyed"
            );
            assert!(destroy(handle, "x").is_err());
            let nothing = std::ptr::without_provenance_mut::<One>(0x10);
            assert_eq!(
                refused(destroy(nothing, "x")),
                "`x`: it is not a one of this library"
            );
            for other in 0..2 * QUARANTINE as u64 {
                assert!(destroy(create(Other(other)), "x").is_ok());
            }
        }
        assert_eq!(Arc::strong_count(&held), 1);
    }
}
