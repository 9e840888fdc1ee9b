//! Work of the device in calls of programs that write their own work requests: behind the preload door, in `ucp_worker_progress` of UCX. The programs are in `tests/verbs/`.

#[path = "../../../tests/door/mod.rs"]
mod door;
#[path = "../../../tests/waived/mod.rs"]
mod waived;

use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use door::{Door, verbs_program};

/// Shared libraries with UCX's names, and libraries over them, in a folder of their own.
struct Libraries {
    folder: PathBuf,
}

impl Libraries {
    fn build(test: &str) -> Libraries {
        let folder =
            Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{test}-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let libraries = Libraries { folder };
        for number in ["1", "2"] {
            libraries.compile(
                "named_as_ucx.c",
                &format!("libucp-{number}.so"),
                &[
                    &format!("-DLIBRARY={number}"),
                    &format!("-Wl,-soname,libucp-{number}.so"),
                ],
            );
            let over = format!("-l:libucp-{number}.so");
            let returns = format!("libuser-{number}.so");
            libraries.compile(
                "over_ucx.c",
                &returns,
                &["-fno-optimize-sibling-calls", &over],
            );
        }
        // Here the call is a jump: it returns to the library's caller.
        libraries.compile(
            "over_ucx.c",
            "libtail.so",
            &["-foptimize-sibling-calls", "-l:libucp-1.so"],
        );
        libraries
    }

    fn compile(&self, source: &str, library: &str, flags: &[&str]) {
        let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/verbs");
        let output = Command::new("cc")
            .args([
                "-std=gnu11",
                "-O2",
                "-Wall",
                "-Wextra",
                "-Werror",
                "-fPIC",
                "-shared",
            ])
            .arg(sources.join(source))
            .arg("-L")
            .arg(&self.folder)
            .args(["-Wl,-rpath,$ORIGIN", "-o"])
            .arg(self.folder.join(library))
            .args(flags)
            .output()
            .unwrap();
        assert!(
            output.status.success(),
            "{library}: {}",
            String::from_utf8_lossy(&output.stderr)
        );
    }

    fn path(&self, library: &str) -> PathBuf {
        self.folder.join(library)
    }
}

impl Drop for Libraries {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

/// The output of `in_memory` behind the preload door; `None` where it cannot be run.
fn in_memory(test: &str, first: &[&str], libraries: &[&str]) -> Option<Output> {
    if !Door::all().contains(&Door::Preload) {
        waived::waived(
            test,
            "the preload door has a stage of its own under a sanitizer",
        );
        return None;
    }
    let program = verbs_program(test, "verbs/in_memory.c")?;
    let built = Libraries::build(test);
    let fabric = format!("{}-{}", std::process::id(), &test[..20]);
    let mut command = Door::Preload.run(&["--fabric", &fabric], program);
    command.args(first);
    command.args(libraries.iter().map(|library| built.path(library)));
    Some(command.output().unwrap())
}

#[test]
fn device_works_in_calls_of_ucx() {
    let test = "device_works_in_calls_of_ucx";
    let libraries = ["libtail.so", "libuser-1.so", "libuser-2.so"];
    let Some(output) = in_memory(test, &[], &libraries) else {
        return;
    };
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}");
    assert!(text.starts_with("20 in calls"), "{text}");
}

/// It would be passed on to any of them otherwise.
#[test]
fn call_of_an_unknown_one_of_two_libraries_ends_the_program() {
    let test = "call_of_an_unknown_one_of_two_libraries_ends_the_program";
    let Some(output) = in_memory(test, &["unclear"], &["libtail.so", "libuser-2.so"]) else {
        return;
    };
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.signal(), Some(libc::SIGABRT), "{text}");
    assert!(
        text.contains("ucp_worker_progress")
            && text.contains("libucp-1.so")
            && text.contains("libucp-2.so"),
        "{text}"
    );
}
