//! The structures that cross the kernel interface of verbs, field by field, in host byte order.
//!
//! They are written down here, so that a build needs no rdma-core; a test compares each size and offset with the headers that are
//! installed. Fields have the names of the headers.

mod connections;
mod device;
mod driver;
mod endpoints;
mod layout;
mod memory;
mod queues;

pub(super) use connections::*;
pub(super) use device::*;
pub(super) use driver::*;
pub(super) use endpoints::*;
pub(super) use layout::Layout;
pub(super) use memory::*;
pub(super) use queues::*;

#[cfg(all(test, not(loom)))]
mod tests {
    use std::collections::BTreeMap;
    use std::fmt::Write;
    use std::io::Write as _;
    use std::process::Command;

    use super::layout::Row;
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
            connections::rows(),
            device::rows(),
            driver::rows(),
            endpoints::rows(),
            memory::rows(),
            queues::rows(),
        ]
        .concat()
    }

    #[test]
    fn structures_match_the_kernel_headers() {
        const HEADERS: [&str; 5] = [
            "rdma_user_ioctl_cmds",
            "ib_user_verbs",
            "mlx5-abi",
            "rdma_user_cm",
            "ib_user_sa",
        ];
        for header in HEADERS {
            let path = format!("/usr/include/rdma/{header}.h");
            if !std::path::Path::new(&path).exists() {
                return waived("structures_match_the_kernel_headers", &format!("no {path}"));
            }
        }
        let mut source = String::from(
            "#include <stddef.h>\n#include <stdio.h>\n#include <infiniband/verbs.h>\n#include <rdma/rdma_user_ioctl.h>\n\
             #include <rdma/ib_user_ioctl_verbs.h>\n#include <netinet/in.h>\n#include <rdma/rdma_user_cm.h>\n#include <rdma/ib_user_sa.h>\n#include <rdma/mlx5-abi.h>\n#include <rdma/mlx5_user_ioctl_verbs.h>\nint main(void)\n{\n",
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
            return waived("structures_match_the_kernel_headers", "no C compiler");
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
