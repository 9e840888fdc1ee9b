//! What a run of the software ConnectX tells its programs of itself in the environment, and what a run within it reads there.
//!
//! The preload door's library takes its options from the same variables.

use std::ffi::{OsStr, OsString};
use std::path::Path;
use std::process::Command;

const LIBRARY: &str = "libdoorbell_softcx.so";

fn name_of(option: &str) -> String {
    let option = option.to_uppercase().replace('-', "_");
    format!("DOORBELL_SOFTCX_{option}")
}

/// What the run around this one says of an option.
pub fn outer(option: &str) -> Option<OsString> {
    std::env::var_os(name_of(option)).filter(|value| !value.is_empty())
}

/// Says it to a program and to runs within it; an option that is not set is not to be taken from a run around this one.
pub fn tell(command: &mut Command, option: &str, value: Option<&OsStr>) {
    match value {
        Some(value) => command.env(name_of(option), value),
        None => command.env_remove(name_of(option)),
    };
}

/// Has the library loaded before all others, and the kernel's sysfs not replaced by that of a run around this one.
pub fn with_library(command: &mut Command, library: &Path) {
    let mut list = library.as_os_str().to_owned();
    for other in preloaded() {
        list.push(":");
        list.push(other);
    }
    command.env("LD_PRELOAD", list);
    command.env_remove("SYSFS_PATH");
}

/// Has no library of a run around this one loaded: it would be before this one's door.
pub fn without_library(command: &mut Command) {
    let others = preloaded();
    if others.is_empty() {
        command.env_remove("LD_PRELOAD");
    } else {
        command.env("LD_PRELOAD", others.join(OsStr::new(":")));
    }
}

/// What is loaded before all other libraries, but for ours.
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
