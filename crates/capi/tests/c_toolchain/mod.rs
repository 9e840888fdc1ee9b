//! Compiling C against the library that cargo has just built, and running it.
#![allow(dead_code)] // each test that includes this uses a part of it

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

/// What the static library needs of the system, as the header says.
pub const NATIVE_LIBS: &[&str] = &[
    #[cfg(feature = "verbs")]
    "-lrdmacm",
    #[cfg(feature = "verbs")]
    "-lmlx5",
    #[cfg(feature = "verbs")]
    "-libverbs",
    "-lgcc_s",
    "-lutil",
    "-lrt",
    "-lpthread",
    "-lm",
    "-ldl",
    "-lc",
];

/// On an idle machine no program of these tests takes a fifth of this time.
const LIMIT: Duration = Duration::from_secs(240);

/// The repository.
pub fn root() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
}

/// A file in the tests' own folder. `DOORBELL_TEST_SCRATCH` names another one, for a test that runs beside itself on another device.
pub fn scratch(name: &str) -> PathBuf {
    let folder = std::env::var_os("DOORBELL_TEST_SCRATCH");
    let folder = folder.unwrap_or_else(|| env!("CARGO_TARGET_TMPDIR").into());
    Path::new(&folder).join(name)
}

/// The library in this build's folder: `a` or `so`. Where cargo compiles it to, not where it copies it on `cargo build`,
/// which may be of an earlier day.
pub fn library(extension: &str) -> PathBuf {
    let program = std::env::current_exe().expect("the test's own path");
    let path = program.with_file_name(format!("libdoorbell.{extension}"));
    assert!(
        path.is_file(),
        "{} is missing: run `cargo build -p doorbell-capi` with the same features and profile first",
        path.display()
    );
    path
}

/// A C or C++ compiler with warnings as errors and the header in its path. With the flags of CFLAGS, which are how the
/// rest of the build is instrumented.
pub fn compiler(name: &str, standard: &str) -> Command {
    let mut command = Command::new(name);
    command.arg(format!("-std={standard}"));
    command.args(["-Wall", "-Wextra", "-Werror", "-pedantic", "-g"]);
    command.arg("-I").arg(root().join("include"));
    if let Ok(flags) = std::env::var("CFLAGS") {
        command.args(flags.split_whitespace());
    }
    command
}

/// Whether there is a program of that name.
pub fn has(name: &str) -> bool {
    Command::new(name)
        .arg("--version")
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}

/// Runs a command that has to succeed; its standard output.
pub fn succeed(command: &mut Command) -> String {
    let output = command
        .output()
        .unwrap_or_else(|error| panic!("{command:?}: {error}"));
    judge(command, &output);
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn judge(command: &Command, output: &Output) {
    assert!(
        output.status.success(),
        "{command:?}: {}\n{}{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
}

/// Compiles a C program and links it with the static library.
pub fn build(source: &Path, name: &str, flags: &[&str]) -> PathBuf {
    let program = scratch(name);
    let mut command = compiler("cc", "c11");
    command.args(flags).arg(source).arg(library("a"));
    succeed(command.args(NATIVE_LIBS).arg("-o").arg(&program));
    program
}

/// Runs a program to its end, which must be success and must come soon; its standard output.
pub fn run(command: &mut Command) -> String {
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let start = Instant::now();
    // The programs write little, so a pipe holds all of it.
    while child.try_wait().expect("it is our child").is_none() {
        if start.elapsed() > LIMIT {
            child.kill().expect("it is our child");
            let output = child.wait_with_output().expect("it is our child");
            let text = String::from_utf8_lossy(&output.stdout).into_owned();
            let errors = String::from_utf8_lossy(&output.stderr).into_owned();
            panic!("{command:?} does not end\n{text}{errors}");
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    let output = child.wait_with_output().expect("it is our child");
    judge(command, &output);
    String::from_utf8_lossy(&output.stdout).into_owned()
}
