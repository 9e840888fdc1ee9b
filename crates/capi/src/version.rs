//! Which version of the library this is.
#![allow(unsafe_code)] // exports functions to C

use std::ffi::{CStr, c_char};

/// Major version of the header that this library was made with.
pub const DOORBELL_VERSION_MAJOR: u32 = number(env!("CARGO_PKG_VERSION_MAJOR"));
/// Minor version.
pub const DOORBELL_VERSION_MINOR: u32 = number(env!("CARGO_PKG_VERSION_MINOR"));
/// Patch level.
pub const DOORBELL_VERSION_PATCH: u32 = number(env!("CARGO_PKG_VERSION_PATCH"));

const TEXT: &CStr =
    match CStr::from_bytes_with_nul(concat!(env!("CARGO_PKG_VERSION"), "\0").as_bytes()) {
        Ok(text) => text,
        Err(_) => panic!("a version without a zero inside"),
    };

const fn number(digits: &str) -> u32 {
    let digits = digits.as_bytes();
    let (mut value, mut at) = (0, 0);
    while at < digits.len() {
        value = value * 10 + (digits[at] - b'0') as u32;
        at += 1;
    }
    value
}

/// The version as a number that can be compared.
#[unsafe(no_mangle)]
pub extern "C" fn doorbell_version() -> u32 {
    DOORBELL_VERSION_MAJOR << 24 | DOORBELL_VERSION_MINOR << 12 | DOORBELL_VERSION_PATCH
}

/// The version as a text.
#[unsafe(no_mangle)]
pub extern "C" fn doorbell_version_text() -> *const c_char {
    TEXT.as_ptr()
}
