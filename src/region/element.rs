//! Numbers that a region is read and written as, in host byte order.
#![allow(unsafe_code)] // numbers as bytes

mod sealed {
    pub trait Sealed {}
}

/// A number type for [`Region::read_values`](crate::Region::read_values) and [`Region::write_values`](crate::Region::write_values). It has no
/// padding, and any bytes of its size are a value.
pub trait Element: sealed::Sealed + Copy + 'static {}

macro_rules! elements {
    ($($number:ty),+) => {
        $(
            impl sealed::Sealed for $number {}
            impl Element for $number {}
        )+
    };
}

elements!(u8, u16, u32, u64, i8, i16, i32, i64, f32, f64);

/// The bytes of the values.
pub(super) fn bytes_of<T: Element>(values: &[T]) -> &[u8] {
    // SAFETY: an element has no padding, and the trait is sealed; a byte has no alignment.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
}

/// The bytes of the values, to be written.
pub(super) fn bytes_of_mut<T: Element>(values: &mut [T]) -> &mut [u8] {
    // SAFETY: as in `bytes_of`, and any bytes are a value.
    unsafe { std::slice::from_raw_parts_mut(values.as_mut_ptr().cast(), size_of_val(values)) }
}
