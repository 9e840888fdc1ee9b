//! Handles: numbers that C sees as pointers. None is ever given out twice and none can be dereferenced, so what was destroyed or made
//! up is found out.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

/// The objects of one kind, by their handle.
pub struct ObjectTable<T> {
    objects: OnceLock<Mutex<HashMap<u64, Arc<T>>>>,
}

/// A handle that no object has yet. Not canonical as an address: dereferencing it is a fault.
pub fn fresh() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    0x0dbe_0000_0000_0000 | (NEXT.fetch_add(1, Ordering::Relaxed) << 4)
}

impl<T> ObjectTable<T> {
    pub const fn new() -> ObjectTable<T> {
        ObjectTable {
            objects: OnceLock::new(),
        }
    }

    fn objects(&self) -> std::sync::MutexGuard<'_, HashMap<u64, Arc<T>>> {
        self.objects
            .get_or_init(Mutex::default)
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    pub fn insert(&self, handle: u64, object: Arc<T>) {
        self.objects().insert(handle, object);
    }

    pub fn get<P>(&self, handle: *mut P) -> Option<Arc<T>> {
        self.objects().get(&(handle as u64)).cloned()
    }

    pub fn remove<P>(&self, handle: *mut P) -> Option<Arc<T>> {
        self.objects().remove(&(handle as u64))
    }

    /// Removes all for which it holds.
    pub fn remove_where(&self, mut holds: impl FnMut(&T) -> bool) -> Vec<Arc<T>> {
        let mut removed = Vec::new();
        self.objects().retain(|_, object| {
            let remove = holds(object);
            if remove {
                removed.push(object.clone());
            }
            !remove
        });
        removed
    }
}
