//! Values on pages of their own.
#![allow(unsafe_code)] // lays values out in pages

use std::fmt;
use std::marker::PhantomData;
use std::ops::Deref;

use super::Pages;
use crate::Result;

/// Values in a row on [`Pages`] of their own.
///
/// A driver registers whole pages for a device. Everything that shares a page with registered memory is registered, too, whatever it belongs
/// to. So memory that is to be registered does not come from the allocator.
pub struct PageSlice<T> {
    pages: Pages,
    count: usize,
    values: PhantomData<T>,
}

// SAFETY: it owns values of T, as a box does.
unsafe impl<T: Send> Send for PageSlice<T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for PageSlice<T> {}

impl<T> PageSlice<T> {
    /// `count` values.
    ///
    /// # Errors
    /// [`Error::System`](crate::Error::System) with ENOMEM.
    pub fn new(count: usize, make: impl Fn(usize) -> T) -> Result<PageSlice<T>> {
        const { assert!(!std::mem::needs_drop::<T>()) };
        const { assert!(align_of::<T>() <= 4096) };
        let pages = Pages::new(count.saturating_mul(size_of::<T>()))?;
        let start = pages.start().cast::<T>();
        for index in 0..count {
            // SAFETY: within the pages, aligned as they are, and no other code has the address yet.
            unsafe { start.add(index).write(make(index)) };
        }
        Ok(PageSlice {
            pages,
            count,
            values: PhantomData,
        })
    }

    /// Bytes of the pages.
    pub fn len_bytes(&self) -> usize {
        self.pages.len_bytes()
    }
}

impl<T> Deref for PageSlice<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: as many values were written, and the pages are written only through them.
        unsafe { std::slice::from_raw_parts(self.pages.start().cast().as_ptr(), self.count) }
    }
}

impl<T: fmt::Debug> fmt::Debug for PageSlice<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(&**self).finish()
    }
}

/// A value on pages of its own, as [`PageSlice`].
pub struct PageBox<T>(PageSlice<T>);

impl<T> PageBox<T> {
    /// The value.
    ///
    /// # Errors
    /// As [`PageSlice::new`].
    pub fn new(make: impl Fn() -> T) -> Result<PageBox<T>> {
        PageSlice::new(1, |_| make()).map(PageBox)
    }

    /// Bytes of the pages.
    pub fn len_bytes(&self) -> usize {
        self.0.len_bytes()
    }
}

impl<T> Deref for PageBox<T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: `new` has written one value.
        unsafe { self.0.pages.start().cast::<T>().as_ref() }
    }
}

impl<T: fmt::Debug> fmt::Debug for PageBox<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;
    use crate::memory::page_bytes;

    #[test]
    fn values_begin_a_page_and_stay_there() {
        let count = page_bytes() / 4 + 1;
        let many = PageSlice::new(count, |at| AtomicU32::new(at as u32)).unwrap();
        assert_eq!(many.len(), count);
        assert_eq!(many.len_bytes(), 2 * page_bytes());
        assert!(many.as_ptr().addr().is_multiple_of(page_bytes()));
        assert_eq!(many[count - 1].load(Ordering::Relaxed) as usize, count - 1);
        let one = PageBox::new(|| AtomicU32::new(7)).unwrap();
        let first = std::ptr::from_ref(&*one);
        let moved = Box::new(one);
        assert_eq!(std::ptr::from_ref(&**moved), first);
        assert_eq!(
            (moved.load(Ordering::Relaxed), moved.len_bytes()),
            (7, page_bytes())
        );
    }
}
