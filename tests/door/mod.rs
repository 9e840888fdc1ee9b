//! The two doors to the software ConnectX, and C programs over libibverbs to go through them.
#![allow(dead_code)] // Reason: each test uses a part.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use crate::waived::waived;

/// How a program gets to see the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Door {
    /// By seccomp user notification, the device in a supervisor.
    Reference,
    /// By a preloaded library, the device in the program.
    Preload,
}

impl Door {
    /// Both, except in an instrumented build: the preload library cannot be loaded into programs that are not instrumented; `scripts/test sanitized`
    /// tests that.
    pub fn all() -> &'static [Door] {
        if std::env::var_os("DOORBELL_SANITIZER").is_some() {
            return &[Door::Reference];
        }
        &[Door::Reference, Door::Preload]
    }

    fn name(self) -> &'static str {
        match self {
            Door::Reference => "seccomp",
            Door::Preload => "preload",
        }
    }

    /// The command that runs `program` behind this door, with options of `doorbell softcx run`.
    ///
    /// `DOORBELL_TEST_DOOR` names another command to run it with, without options: `env` where there is a real card.
    pub fn run(self, options: &[&str], program: impl AsRef<Path>) -> Command {
        if let Some(other) = std::env::var_os("DOORBELL_TEST_DOOR") {
            let mut command = Command::new(other);
            command.arg(program.as_ref());
            return command;
        }
        let mut command = Command::new(command());
        command.args(["softcx", "run", "--door", self.name()]);
        if self == Door::Preload {
            command.arg("--library").arg(library());
        }
        command.args(options).arg("--").arg(program.as_ref());
        command
    }
}

/// The folder of this build: `target/debug` and the like.
fn build_folder() -> PathBuf {
    let program = std::env::current_exe().expect("the test's own path");
    let folder = program.parent().and_then(Path::parent);
    folder.expect("a test lies in `deps`").to_owned()
}

/// A product of this build, which was built before the tests.
fn product(name: &str, package: &str) -> PathBuf {
    let path = build_folder().join(name);
    assert!(
        path.is_file(),
        "{} is missing: run `cargo build -p {package}` with the same features and profile first",
        path.display()
    );
    path
}

/// The command `doorbell`.
pub fn command() -> PathBuf {
    product("doorbell", "doorbell-cli")
}

/// The preload door's library.
pub fn library() -> &'static Path {
    static LIBRARY: OnceLock<PathBuf> = OnceLock::new();
    LIBRARY.get_or_init(|| product("libdoorbell_softcx.so", "doorbell-softcx-preload"))
}

/// A source file of the `tests/` of this package, or of the repository.
fn source_file(name: &str) -> PathBuf {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files = package
        .ancestors()
        .map(|folder| folder.join("tests").join(name));
    let found = files.find(|file| file.is_file());
    found.unwrap_or_else(|| panic!("{name} is in no folder `tests`"))
}

/// Where a program is made before it is renamed to `program`: tests are processes side by side, and one may be running what
/// another is about to build.
pub fn partial(program: &Path) -> PathBuf {
    program.with_extension(format!("{}.part", std::process::id()))
}

/// A C program of a folder `tests/`, compiled against libibverbs and libmlx5; or `None`, if they are not installed.
pub fn verbs_program(test: &str, source: &str) -> Option<PathBuf> {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let probe = folder.join(format!("{test}.{}.probe.c", std::process::id()));
    std::fs::write(
        &probe,
        "#include <infiniband/mlx5dv.h>\nint main(void) { return !mlx5dv_is_supported(0); }\n",
    )
    .unwrap();
    let probed = Command::new("cc")
        .arg(&probe)
        .args(["-lmlx5", "-libverbs", "-o", "/dev/null"])
        .output();
    std::fs::remove_file(&probe).unwrap();
    match probed {
        Ok(output) if output.status.success() => {}
        Ok(_) => {
            waived(
                test,
                "a program with <infiniband/mlx5dv.h> does not build here (Debian: libibverbs-dev)",
            );
            return None;
        }
        Err(error) => {
            waived(test, &format!("no C compiler: {error}"));
            return None;
        }
    }
    let program = folder.join(test);
    let part = partial(&program);
    // The libraries are there: from here on, a failure is a failure.
    let output = Command::new("cc")
        .args(["-std=gnu11", "-O1", "-g", "-Wall", "-Wextra", "-Werror"])
        .arg(source_file(source))
        .args(["-lmlx5", "-libverbs", "-lpthread", "-o"])
        .arg(&part)
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    std::fs::rename(&part, &program).unwrap();
    Some(program)
}
