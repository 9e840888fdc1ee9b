//! The structures that cross the kernel interface of verbs, field by field, in host byte order.
//!
//! They are written down here, so that a build needs no rdma-core; a test compares each size and offset with the headers that are
//! installed. Fields have the names of the headers.

mod device;
mod driver;
mod endpoints;
mod memory;
mod queues;

pub(super) use device::*;
pub(super) use driver::*;
pub(super) use endpoints::*;
pub(super) use memory::*;
pub(super) use queues::*;

/// A structure of the interface.
pub(super) trait Layout: Sized {
    /// Its size.
    const BYTES: usize;

    /// Reads one; what the bytes lack is zero, as the kernel has it for callers that know a shorter form.
    fn read(bytes: &[u8]) -> Self;

    /// Its bytes, padding zero.
    fn to_bytes(self) -> Vec<u8>;
}

/// A member of one.
trait Field: Sized {
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
type Row = (&'static str, usize, Vec<(&'static str, usize, usize)>);

macro_rules! layouts {
    ($($name:ident = $c:literal { $($field:ident: $kind:ty),* $(,)? })*) => {
        $(
            #[doc = concat!("`", $c, "`")]
            #[repr(C)]
            #[derive(Debug, Clone, Copy, PartialEq, Eq)]
            pub(in crate::doors) struct $name {
                $(pub(in crate::doors) $field: $kind),*
            }

            impl $crate::doors::abi::Layout for $name {
                const BYTES: usize = size_of::<$name>();

                fn read(bytes: &[u8]) -> Self {
                    let mut whole = [0; size_of::<$name>()];
                    for (to, from) in whole.iter_mut().zip(bytes) {
                        *to = *from;
                    }
                    $name {
                        $($field: $crate::doors::abi::Field::get(
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
                        $crate::doors::abi::Field::put(&self.$field, member);
                    )*
                    bytes
                }
            }

            impl $crate::doors::abi::Field for $name {
                fn get(bytes: &[u8]) -> Self {
                    $crate::doors::abi::Layout::read(bytes)
                }

                fn put(&self, bytes: &mut [u8]) {
                    for (to, from) in bytes.iter_mut().zip($crate::doors::abi::Layout::to_bytes(*self)) {
                        *to = from;
                    }
                }
            }

            impl Default for $name {
                fn default() -> Self {
                    $crate::doors::abi::Layout::read(&[])
                }
            }
        )*

        #[cfg(test)]
        pub(super) fn rows() -> Vec<$crate::doors::abi::Row> {
            vec![$((
                $c,
                size_of::<$name>(),
                vec![$((
                    stringify!($field),
                    std::mem::offset_of!($name, $field),
                    $crate::doors::abi::size_of_field(|it: &$name| it.$field),
                )),*],
            )),*]
        }
    };
}
use layouts;

#[cfg(test)]
fn size_of_field<S, F>(_: fn(&S) -> F) -> usize {
    size_of::<F>()
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::collections::BTreeMap;
    use std::fmt::Write;
    use std::io::Write as _;
    use std::process::Command;

    use super::*;

    /// Says that this machine cannot run a test, as `tests/waived` does.
    fn waived(test: &str, reason: &str) {
        let line = format!("{test}: {reason}\n");
        let _ = std::io::stderr().write_all(format!("WAIVED: {line}").as_bytes());
        if let Some(log) = std::env::var_os("DOORBELL_WAIVED_LOG") {
            let log = std::fs::OpenOptions::new()
                .create(true)
                .append(true)
                .open(log);
            log.unwrap().write_all(line.as_bytes()).unwrap();
        }
    }

    fn rows() -> Vec<Row> {
        [
            device::rows(),
            driver::rows(),
            endpoints::rows(),
            memory::rows(),
            queues::rows(),
        ]
        .concat()
    }

    #[test]
    fn structures_lie_as_the_headers_say() {
        const HEADERS: [&str; 3] = ["rdma_user_ioctl_cmds", "ib_user_verbs", "mlx5-abi"];
        for header in HEADERS {
            let path = format!("/usr/include/rdma/{header}.h");
            if !std::path::Path::new(&path).exists() {
                return waived("structures_lie_as_the_headers_say", &format!("no {path}"));
            }
        }
        let mut source = String::from(
            "#include <stddef.h>\n#include <stdio.h>\n#include <infiniband/verbs.h>\n#include <rdma/rdma_user_ioctl.h>\n\
             #include <rdma/ib_user_ioctl_verbs.h>\n#include <rdma/mlx5-abi.h>\n#include <rdma/mlx5_user_ioctl_verbs.h>\nint main(void)\n{\n",
        );
        let mut ours = BTreeMap::new();
        for (structure, bytes, members) in rows() {
            writeln!(
                source,
                "printf(\"%s=%zu\\n\", \"{structure}\", sizeof({structure}));"
            )
            .unwrap();
            ours.insert(structure.to_owned(), bytes.to_string());
            for (member, offset, bytes) in members {
                writeln!(
                    source,
                    "printf(\"%s=%zu+%zu\\n\", \"{structure}.{member}\", offsetof({structure}, {member}), \
                     sizeof((({structure} *)0)->{member}));"
                )
                .unwrap();
                ours.insert(format!("{structure}.{member}"), format!("{offset}+{bytes}"));
            }
        }
        source.push_str("}\n");
        let folder = std::env::temp_dir().join(format!("doorbell-abi-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let (file, program) = (folder.join("layouts.c"), folder.join("layouts"));
        std::fs::write(&file, source).unwrap();
        let built = Command::new("cc")
            .arg("-o")
            .args([&program, &file])
            .output();
        let Ok(built) = built else {
            return waived("structures_lie_as_the_headers_say", "no C compiler");
        };
        let complaint = String::from_utf8_lossy(&built.stderr).into_owned();
        assert!(built.status.success(), "{complaint}");
        let printed = Command::new(&program).output().unwrap();
        let theirs: BTreeMap<String, String> = String::from_utf8(printed.stdout)
            .unwrap()
            .lines()
            .map(|line| line.split_once('=').unwrap())
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .collect();
        std::fs::remove_dir_all(&folder).unwrap();
        assert_eq!(ours, theirs);
    }

    #[test]
    fn short_requests_are_filled_with_zeros() {
        let request = RegMr::read(&[1, 0, 0, 0, 0, 0, 0, 0, 2]);
        assert_eq!((request.response, request.start, request.length), (1, 2, 0));
        let whole = RegMr {
            start: 2,
            ..request
        };
        assert_eq!(RegMr::read(&whole.to_bytes()), whole);
    }
}
