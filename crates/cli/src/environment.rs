//! Environment variables by which a run of the software ConnectX passes its options to nested runs and to the preload door's library.

use std::ffi::{OsStr, OsString};
use std::path::Path;
use std::process::Command;

const LIBRARY: &str = "libdoorbell_softcx.so";

fn name_of(option: &str) -> String {
    let option = option.to_uppercase().replace('-', "_");
    format!("DOORBELL_SOFTCX_{option}")
}

/// The value of an option in the enclosing run.
pub fn outer(option: &str) -> Option<OsString> {
    std::env::var_os(name_of(option)).filter(|value| !value.is_empty())
}

/// Passes an option to a program. `None` removes the value of an enclosing run.
pub fn export(command: &mut Command, option: &str, value: Option<&OsStr>) {
    match value {
        Some(value) => command.env(name_of(option), value),
        None => command.env_remove(name_of(option)),
    };
}

/// Preloads the library before all others, and removes an enclosing run's replacement of sysfs.
pub fn with_library(command: &mut Command, library: &Path) {
    let mut list = library.as_os_str().to_owned();
    for other in preloaded() {
        list.push(":");
        list.push(other);
    }
    command.env("LD_PRELOAD", list);
    command.env_remove("SYSFS_PATH");
}

/// Removes an enclosing run's library from LD_PRELOAD: it would intercept calls before this run's supervisor.
pub fn without_library(command: &mut Command) {
    let others = preloaded();
    if others.is_empty() {
        command.env_remove("LD_PRELOAD");
    } else {
        command.env("LD_PRELOAD", others.join(OsStr::new(":")));
    }
}

/// The libraries in LD_PRELOAD, ours excluded.
fn preloaded() -> Vec<OsString> {
    use std::os::unix::ffi::OsStrExt;
    let list = std::env::var_os("LD_PRELOAD").unwrap_or_default();
    list.as_bytes()
        .split(|byte| b": ".contains(byte))
        .map(OsStr::from_bytes)
        .filter(|it| !it.is_empty() && Path::new(it).file_name() != Some(OsStr::new(LIBRARY)))
        .map(OsStr::to_owned)
        .collect()
}
