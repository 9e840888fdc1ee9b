//! How a structure of the interface is declared, read and written.

/// A structure of the interface.
pub(in crate::doors) trait Layout: Sized {
    /// Its size.
    const BYTES: usize;

    /// Reads one; what the bytes lack is zero, as the kernel has it for callers that know a shorter form.
    fn read(bytes: &[u8]) -> Self;

    /// Its bytes, padding zero.
    fn to_bytes(self) -> Vec<u8>;
}

/// A member of one.
pub(super) trait Field: Sized {
    fn get(bytes: &[u8]) -> Self;
    fn put(&self, bytes: &mut [u8]);
}

macro_rules! number_fields {
    ($($number:ty),*) => {$(
        impl Field for $number {
            fn get(bytes: &[u8]) -> Self {
                bytes.first_chunk().map_or(0, |bytes| Self::from_ne_bytes(*bytes))
            }

            fn put(&self, bytes: &mut [u8]) {
                if let Some(bytes) = bytes.first_chunk_mut() {
                    *bytes = self.to_ne_bytes();
                }
            }
        }
    )*};
}
number_fields!(u8, u16, u32, u64, i32);

impl<const N: usize> Field for [u8; N] {
    fn get(bytes: &[u8]) -> Self {
        bytes.first_chunk().copied().unwrap_or([0; N])
    }

    fn put(&self, bytes: &mut [u8]) {
        if let Some(bytes) = bytes.first_chunk_mut() {
            *bytes = *self;
        }
    }
}

/// One structure of a table: its name in C, its size, and name, offset and size of each member.
#[cfg(test)]
pub(super) type Row = (&'static str, usize, Vec<(&'static str, usize, usize)>);

macro_rules! layouts {
    ($($name:ident = $c:literal { $($field:ident: $kind:ty),* $(,)? })*) => {
        $(
            #[doc = concat!("`", $c, "`")]
            #[repr(C)]
            #[derive(Debug, Clone, Copy, PartialEq, Eq)]
            pub(in crate::doors) struct $name {
                $(pub(in crate::doors) $field: $kind),*
            }

            impl $crate::doors::abi::layout::Layout for $name {
                const BYTES: usize = size_of::<$name>();

                fn read(bytes: &[u8]) -> Self {
                    let mut whole = [0; size_of::<$name>()];
                    for (to, from) in whole.iter_mut().zip(bytes) {
                        *to = *from;
                    }
                    $name {
                        $($field: $crate::doors::abi::layout::Field::get(
                            whole.get(std::mem::offset_of!($name, $field)..).unwrap_or_default(),
                        )),*
                    }
                }

                fn to_bytes(self) -> Vec<u8> {
                    let mut bytes = vec![0; size_of::<$name>()];
                    $(
                        let member = bytes
                            .get_mut(std::mem::offset_of!($name, $field)..)
                            .unwrap_or_default();
                        $crate::doors::abi::layout::Field::put(&self.$field, member);
                    )*
                    bytes
                }
            }

            impl $crate::doors::abi::layout::Field for $name {
                fn get(bytes: &[u8]) -> Self {
                    $crate::doors::abi::layout::Layout::read(bytes)
                }

                fn put(&self, bytes: &mut [u8]) {
                    for (to, from) in bytes.iter_mut().zip($crate::doors::abi::layout::Layout::to_bytes(*self)) {
                        *to = from;
                    }
                }
            }

            impl Default for $name {
                fn default() -> Self {
                    $crate::doors::abi::layout::Layout::read(&[])
                }
            }
        )*

        #[cfg(test)]
        pub(super) fn rows() -> Vec<$crate::doors::abi::layout::Row> {
            vec![$((
                $c,
                size_of::<$name>(),
                vec![$((
                    stringify!($field).trim_start_matches("r#"),
                    std::mem::offset_of!($name, $field),
                    $crate::doors::abi::layout::size_of_field(|it: &$name| it.$field),
                )),*],
            )),*]
        }
    };
}
pub(super) use layouts;

#[cfg(test)]
pub(super) fn size_of_field<S, F>(_: fn(&S) -> F) -> usize {
    size_of::<F>()
}
