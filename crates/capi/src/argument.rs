//! What the pointers and numbers of a call mean.
#![allow(unsafe_code)] // reads and writes through the pointers of C

use std::ffi::{CStr, c_char, c_int, c_void};
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::time::Duration;

use crate::failure::Failure;
use crate::handle::{CObject, create};
use doorbell_rs::{EndpointConfig, Error, QueueKind};

/// A wait without an end.
pub const DOORBELL_NO_TIMEOUT: i64 = -1;
/// The deadline that the endpoint was made with; 30 s where no endpoint takes part.
pub const DOORBELL_DEFAULT_TIMEOUT: i64 = -2;

/// The send queue.
pub const DOORBELL_QUEUE_SEND: u32 = 0;
/// The receive queue.
pub const DOORBELL_QUEUE_RECV: u32 = 1;

/// No struct of the header is larger; a size beyond is one that was never set.
const STRUCT_BYTES_MAX: usize = 4096;

/// A struct of the header that may grow at its end: begins with its own size, and is all integers and pointers.
///
/// # Safety
/// The type is `repr(C)`, without padding, any bytes are a value of it, and its first field is the size as a `u32`.
pub(super) unsafe trait VersionedStruct: Copy {
    /// Its size in the first version of the header.
    const BYTES_FIRST: usize;
    /// What the fields are that the caller's header does not have yet.
    fn defaults() -> Self;
}

/// A place to write to.
///
/// # Safety
/// The pointer is null, or aligned and good for a write until the reference is gone.
pub(super) unsafe fn out<'a, T>(
    place: *mut T,
    argument: &'static str,
) -> Result<&'a mut MaybeUninit<T>, Failure> {
    // SAFETY: the caller's promise; uninitialised is allowed.
    unsafe { place.cast::<MaybeUninit<T>>().as_mut() }.ok_or_else(|| Failure::null(argument))
}

/// A place to write to, if one is given.
///
/// # Safety
/// As [`out`].
pub(super) unsafe fn out_optional<'a, T>(place: *mut T) -> Option<&'a mut MaybeUninit<T>> {
    // SAFETY: the caller's promise.
    unsafe { place.cast::<MaybeUninit<T>>().as_mut() }
}

/// A place for a handle. It is null until there is a handle, so destroying what a failed call left there does nothing.
///
/// # Safety
/// As [`out`].
pub(super) unsafe fn out_handle<'a, T: CObject>(
    place: *mut *mut T,
    argument: &'static str,
) -> Result<HandleOut<'a, T>, Failure> {
    // SAFETY: the caller's promise.
    let place = unsafe { out(place, argument) }?;
    Ok(HandleOut(place.write(std::ptr::null_mut())))
}

/// See [`out_handle`].
pub(super) struct HandleOut<'a, T>(&'a mut *mut T);

impl<T: CObject> HandleOut<'_, T> {
    /// Gives the object away.
    pub(super) fn set(self, object: T) -> c_int {
        *self.0 = create(object);
        0
    }
}

/// A C string.
///
/// # Safety
/// The pointer is null, or of a C string that stays as it is as long as the reference.
pub(super) unsafe fn text<'a>(
    text: *const c_char,
    argument: &'static str,
) -> Result<&'a str, Failure> {
    if text.is_null() {
        return Err(Failure::null(argument));
    }
    // SAFETY: the caller's promise.
    unsafe { CStr::from_ptr(text) }
        .to_str()
        .map_err(|_| Failure::argument(argument, "it is not UTF-8"))
}

/// An array; one of no elements may be null.
///
/// # Safety
/// The pointer is null or of `count` elements that stay as they are as long as the reference.
#[inline]
pub(super) unsafe fn array<'a, T>(
    first: *const T,
    count: usize,
    argument: &'static str,
) -> Result<&'a [T], Failure> {
    if count == 0 {
        return Ok(&[]);
    }
    if first.is_null() {
        return Err(Failure::null(argument));
    }
    if count > isize::MAX as usize / size_of::<T>().max(1) {
        let reason = format!("{count} elements exceed the address space");
        return Err(Failure::argument(argument, reason));
    }
    // SAFETY: the caller's promise, and no more bytes than there can be.
    Ok(unsafe { std::slice::from_raw_parts(first, count) })
}

/// Fails for a text buffer that has a length and no place.
pub(super) fn check_text(place: *mut c_char, capacity: usize) -> Result<(), Failure> {
    if capacity > 0 && place.is_null() {
        return Err(Failure::null("text"));
    }
    Ok(())
}

/// Writes a text as snprintf does: as much as fits, always with a zero at its end. Gives the length of the whole.
///
/// # Safety
/// The pointer is null, or good for writes of `capacity` bytes.
pub(super) unsafe fn write_text(
    whole: &str,
    place: *mut c_char,
    capacity: usize,
) -> Result<c_int, Failure> {
    check_text(place, capacity)?;
    if capacity > 0 {
        // A character is written whole or not at all.
        let mut fits = whole.len().min(capacity - 1);
        while !whole.is_char_boundary(fits) {
            fits -= 1;
        }
        // SAFETY: `fits` bytes and a zero are no more than `capacity`; our own text does not overlap the caller's.
        unsafe {
            place.copy_from_nonoverlapping(whole.as_ptr().cast(), fits);
            place.add(fits).write(0);
        }
    }
    Ok(c_int::try_from(whole.len()).unwrap_or(c_int::MAX))
}

/// Writes bytes, all or none. Gives their count.
///
/// # Safety
/// The pointer is null, or good for writes of `capacity` bytes.
pub(super) unsafe fn write_bytes(
    whole: &[u8],
    place: *mut c_void,
    capacity: usize,
    argument: &'static str,
) -> Result<c_int, Failure> {
    if place.is_null() && capacity > 0 {
        return Err(Failure::null(argument));
    }
    if whole.len() > capacity {
        return Err(Failure::Library(Error::Range {
            argument: "capacity",
            value: capacity as u64,
            min: whole.len() as u64,
            max: u64::MAX,
        }));
    }
    if !whole.is_empty() {
        // SAFETY: not null, as there is capacity, and within it by the caller's promise; our own bytes do not overlap it.
        unsafe {
            place
                .cast::<u8>()
                .copy_from_nonoverlapping(whole.as_ptr(), whole.len());
        }
    }
    Ok(c_int::try_from(whole.len()).unwrap_or(c_int::MAX))
}

/// The struct that the caller gives, of the caller's version of the header.
///
/// # Safety
/// The pointer is null, or aligned and good for reads of the size that stands there, and of 4 bytes anyway.
#[inline]
pub(super) unsafe fn read_struct<T: VersionedStruct>(
    given: *const T,
    argument: &'static str,
) -> Result<T, Failure> {
    if given.is_null() {
        return Err(Failure::null(argument));
    }
    // SAFETY: the size stands first, by `VersionedStruct`.
    let bytes = unsafe { given.cast::<u32>().read() } as usize;
    if bytes == size_of::<T>() {
        // SAFETY: all of it is there, and any bytes are a value.
        return Ok(unsafe { given.read() });
    }
    check_struct_size::<T>(bytes, argument)?;
    let mut value = T::defaults();
    let known = bytes.min(size_of::<T>());
    // SAFETY: `known` bytes are there and have room; a prefix of any bytes is a value, as there is no padding.
    unsafe {
        (&raw mut value)
            .cast::<u8>()
            .copy_from_nonoverlapping(given.cast(), known);
    }
    // SAFETY: the size says that they are there.
    let beyond = unsafe {
        std::slice::from_raw_parts(given.cast::<u8>().wrapping_add(known), bytes - known)
    };
    if beyond.iter().any(|byte| *byte != 0) {
        let reason = "it uses fields that this version of the library does not know";
        return Err(Failure::argument(argument, reason));
    }
    Ok(value)
}

/// Writes a struct of the caller's size: no more than that, and zeros in what this version does not know.
///
/// # Safety
/// The pointer is null, or aligned and good for writes of `bytes` bytes.
pub(super) unsafe fn write_struct<T: VersionedStruct>(
    mut value: T,
    place: *mut T,
    bytes: u32,
    argument: &'static str,
) -> Result<c_int, Failure> {
    if place.is_null() {
        return Err(Failure::null(argument));
    }
    let size = bytes as usize;
    check_struct_size::<T>(size, "struct_size")?;
    let known = size.min(size_of::<T>());
    // SAFETY: the size stands first, by `VersionedStruct`; the place has `size` bytes, and `value` at least `known`.
    unsafe {
        (&raw mut value).cast::<u32>().write(bytes);
        place.cast::<u8>().write_bytes(0, size);
        place
            .cast::<u8>()
            .copy_from_nonoverlapping((&raw const value).cast(), known);
    }
    Ok(0)
}

fn check_struct_size<T: VersionedStruct>(
    bytes: usize,
    argument: &'static str,
) -> Result<(), Failure> {
    if (T::BYTES_FIRST..=STRUCT_BYTES_MAX).contains(&bytes) {
        return Ok(());
    }
    let reason = format!(
        "a struct_size of {bytes} is impossible; it is {} in this version",
        size_of::<T>()
    );
    Err(Failure::argument(argument, reason))
}

/// An open descriptor.
///
/// # Safety
/// It is not closed before the result is gone.
pub(super) unsafe fn descriptor<'a>(
    fd: c_int,
    argument: &'static str,
) -> Result<BorrowedFd<'a>, Failure> {
    // SAFETY: asks about a number that need not be a descriptor.
    if fd < 0 || unsafe { libc::fcntl(fd, libc::F_GETFD) } < 0 {
        let reason = format!("{fd} is not an open descriptor");
        return Err(Failure::argument(argument, reason));
    }
    // SAFETY: it is open, and stays so by the caller's promise.
    Ok(unsafe { BorrowedFd::borrow_raw(fd) })
}

/// Which timeouts a call takes beside numbers of milliseconds.
fn bad_timeout(value: i64) -> Failure {
    let reason = format!("{value} ms is negative, and not DOORBELL_NO_TIMEOUT");
    Failure::argument("timeout_ms", reason)
}

/// A timeout; `None` is without an end.
pub(super) fn timeout(timeout_ms: i64) -> Result<Option<Duration>, Failure> {
    match timeout_ms {
        DOORBELL_NO_TIMEOUT => Ok(None),
        DOORBELL_DEFAULT_TIMEOUT => Ok(EndpointConfig::default().wait_timeout),
        _ => u64::try_from(timeout_ms)
            .map(|ms| Some(Duration::from_millis(ms)))
            .map_err(|_| bad_timeout(timeout_ms)),
    }
}

/// A timeout for calls of the library that know none without an end.
pub(super) fn finite_timeout(timeout_ms: i64) -> Result<Duration, Failure> {
    Ok(timeout(timeout_ms)?.unwrap_or(Duration::MAX))
}

/// One of the two queues.
pub(super) fn queue_kind_of(number: u32) -> Result<QueueKind, Failure> {
    match number {
        DOORBELL_QUEUE_SEND => Ok(QueueKind::Send),
        DOORBELL_QUEUE_RECV => Ok(QueueKind::Recv),
        _ => Err(choice("queue_kind", number, 1)),
    }
}

/// A number that names nothing.
#[cold]
pub(super) fn choice(argument: &'static str, value: u32, max: u32) -> Failure {
    Failure::Library(Error::Range {
        argument,
        value: value.into(),
        min: 0,
        max: max.into(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[repr(C)]
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    struct Grown {
        struct_size: u32,
        first: u32,
        added: u64,
    }

    // SAFETY: repr(C), 4 + 4 + 8 bytes without padding, integers, and the size first.
    unsafe impl VersionedStruct for Grown {
        const BYTES_FIRST: usize = 8;
        fn defaults() -> Grown {
            Grown {
                struct_size: 16,
                first: 1,
                added: 2,
            }
        }
    }

    #[test]
    fn structs_of_other_versions_are_understood_or_refused() {
        let read = |words: [u32; 6]| {
            // Aligned as a struct is.
            let words: [u64; 3] = std::array::from_fn(|i| {
                u64::from(words[2 * i]) | u64::from(words[2 * i + 1]) << 32
            });
            // SAFETY: sizes up to 24 bytes are there; those beyond are refused before they are read.
            unsafe { read_struct(words.as_ptr().cast::<Grown>(), "s") }
        };
        let fields = |words| read(words).map(|s| (s.first, s.added)).unwrap();
        assert_eq!(fields([8, 5, 6, 7, 0, 0]), (5, 2), "an older caller");
        assert_eq!(fields([16, 5, 6, 0, 9, 9]), (5, 6), "this version");
        assert_eq!(
            fields([24, 5, 6, 0, 0, 0]),
            (5, 6),
            "a newer caller, nothing new used"
        );
        for (words, wanted) in [
            ([24, 5, 6, 0, 0, 1], "does not know"),
            ([4, 5, 6, 0, 0, 0], "struct_size of 4"),
            ([0xffff, 5, 6, 0, 0, 0], "struct_size of 65535"),
        ] {
            let refused = read(words).unwrap_err().to_string();
            assert!(refused.contains(wanted), "{refused}");
        }
    }

    #[test]
    fn structs_are_written_in_the_callers_size() {
        for (bytes, expected) in [
            (8, [8 | 1 << 32, u64::MAX, u64::MAX]),
            (16, [16 | 1 << 32, 2, u64::MAX]),
            (24, [24 | 1 << 32, 2, 0]),
        ] {
            let mut words = [u64::MAX; 3];
            // SAFETY: up to 24 bytes are there.
            let written =
                unsafe { write_struct(Grown::defaults(), words.as_mut_ptr().cast(), bytes, "s") };
            assert_eq!((written.unwrap(), words), (0, expected));
        }
    }

    #[test]
    fn texts_are_cut_at_characters() {
        let mut place = [1 as c_char; 8];
        for (capacity, expected) in [
            (0, None),
            (1, Some("")),
            (3, Some("a")),
            (4, Some("aé")),
            (8, Some("aéb")),
        ] {
            // SAFETY: 8 bytes are there.
            let length = unsafe { write_text("aéb", place.as_mut_ptr(), capacity) };
            assert_eq!(length.unwrap(), 4);
            // SAFETY: the text has its zero within.
            let written = (capacity > 0).then(|| unsafe { text(place.as_ptr(), "place") }.unwrap());
            assert_eq!(written, expected);
        }
        // SAFETY: null is for no capacity only.
        unsafe {
            assert_eq!(write_text("abc", std::ptr::null_mut(), 0).unwrap(), 3);
            assert!(write_text("abc", std::ptr::null_mut(), 1).is_err());
        }
    }

    #[test]
    fn timeouts() {
        assert_eq!(timeout(0).unwrap(), Some(Duration::ZERO));
        assert_eq!(timeout(DOORBELL_NO_TIMEOUT).unwrap(), None);
        assert_eq!(
            timeout(DOORBELL_DEFAULT_TIMEOUT).unwrap(),
            Some(Duration::from_secs(30))
        );
        assert!(timeout(-3).is_err());
        assert!(timeout(i64::MIN).is_err());
    }
}
