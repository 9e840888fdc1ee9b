//! Where a path leads that a program gives to a function of the C library.

use std::ffi::{CStr, CString, OsStr, c_char, c_int};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use softcx::doors::{DeviceNode, Local, Redirect};

use crate::state;

/// Where a path leads.
pub enum PathClass {
    /// To a node.
    Node(DeviceNode),
    /// To a file of the private tree.
    File(CString),
    /// Where it says.
    Elsewhere,
}

/// A path that the functions of the C library take, as one.
pub fn as_path(file: &CStr) -> &Path {
    Path::new(OsStr::from_bytes(file.to_bytes()))
}

/// The absolute form of a path, if it can be about RDMA devices.
///
/// # Safety
/// `path` is null or a terminated string.
pub unsafe fn absolute(directory: c_int, path: *const c_char) -> Option<PathBuf> {
    if path.is_null() {
        return None;
    }
    // SAFETY: terminated, by the caller's word.
    Local::absolute(directory, as_path(unsafe { CStr::from_ptr(path) }))
}

/// Looks at a path. The device is made if it is about RDMA devices.
///
/// # Safety
/// `path` is null or a terminated string.
pub unsafe fn lead(directory: c_int, path: *const c_char) -> PathClass {
    // SAFETY: the caller's word.
    match unsafe { absolute(directory, path) } {
        Some(path) => classify_path(&path),
        None => PathClass::Elsewhere,
    }
}

/// The same for an absolute path.
pub fn classify_path(path: &Path) -> PathClass {
    // Only a process with a device can be inside its tree.
    let local = if Local::is_about_devices(path) {
        state::start()
    } else {
        state::started()
    };
    match local.map(|local| local.redirect(path)) {
        Some(Redirect::Node(node)) => PathClass::Node(node),
        Some(Redirect::File(file)) => CString::new(file.into_os_string().into_vec())
            .map_or(PathClass::Elsewhere, PathClass::File),
        Some(Redirect::Elsewhere) | None => PathClass::Elsewhere,
    }
}
