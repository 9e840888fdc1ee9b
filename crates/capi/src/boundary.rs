//! Where Rust ends: results become codes and a text, and no panic goes further.

use std::any::Any;
use std::ffi::c_int;
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::failure::Failure;
use crate::last_error::remember;

/// Runs the body of a call: its code, 0 or a positive number, or the negative code of its failure.
#[inline]
pub(super) fn guard(body: impl FnOnce() -> Result<c_int, Failure>) -> c_int {
    // Unwind safety: what a panic left half done is behind a lock, which remembers it, or was local to the body.
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(code)) => code,
        Ok(Err(failure)) => remember(failure),
        Err(payload) => panicked(payload),
    }
}

/// [`guard`] for calls that return something else, `otherwise` if they fail.
pub(super) fn guard_or<T>(otherwise: T, body: impl FnOnce() -> Result<T, Failure>) -> T {
    let mut result = otherwise;
    guard(|| {
        result = body()?;
        Ok(0)
    });
    result
}

/// [`guard`] around a body, with what its arguments stand for: `name = get(argument)` for a handle, or another function of `argument` that takes
/// a pointer and its name. They are looked at in this order.
macro_rules! call {
    ($($name:ident = $read:ident($argument:ident)),+, || $body:block) => {
        $crate::boundary::guard(|| {
            $(
                // SAFETY: the caller's promise: the argument is what the header says of it.
                let $name = unsafe { $read($argument, stringify!($argument)) }?;
            )+
            $body
        })
    };
}
pub(super) use call;

#[cold]
fn panicked(payload: Box<dyn Any + Send>) -> c_int {
    let text = payload
        .downcast_ref::<&str>()
        .map(|text| (*text).to_owned())
        .or_else(|| payload.downcast_ref::<String>().cloned());
    // A payload may be of any type, and its drop may panic in turn, with another payload. Not for ever: what is left after
    // a few turns is leaked.
    let mut payload = Some(payload);
    for _ in 0..4 {
        payload = catch_unwind(AssertUnwindSafe(|| drop(payload.take()))).err();
    }
    std::mem::forget(payload);
    remember(Failure::Panic {
        reason: text.unwrap_or_else(|| "without a text".into()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::code;
    use crate::last_error::tests::last_error;

    #[test]
    fn no_panic_crosses() {
        assert_eq!(guard(|| panic!("number {}", 7)), code::DOORBELL_EPANIC);
        assert!(
            last_error().ends_with("it panicked: number 7"),
            "{}",
            last_error()
        );
        assert_eq!(guard(|| panic!("plain")), code::DOORBELL_EPANIC);
        assert!(last_error().ends_with("it panicked: plain"));
        assert_eq!(guard_or(3, || panic!("{}", "other")), 3);

        struct Bomb;
        impl Drop for Bomb {
            fn drop(&mut self) {
                panic!("in the drop of a payload");
            }
        }
        let bomb = || -> Result<c_int, Failure> { std::panic::panic_any(Bomb) };
        assert_eq!(guard(bomb), code::DOORBELL_EPANIC);
        assert!(last_error().ends_with("without a text"));
    }

    #[test]
    fn results_pass() {
        assert_eq!(guard(|| Ok(5)), 5);
        assert_eq!(guard(|| Err(Failure::null("x"))), code::DOORBELL_EINVAL);
        assert_eq!(last_error(), "`x`: it is a null pointer");
    }
}
