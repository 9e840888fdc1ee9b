//! The folder with the tables of this user's fabrics.
#![allow(unsafe_code)] // the user's number

use std::fs::{DirBuilder, symlink_metadata};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use crate::device::inbox::file_error;
use crate::{Error, Result, StateKind};

const OPERATION: &str = "open of the folder of fabrics";

/// Returns the folder. Makes it if it does not exist.
///
/// It lies in `/dev/shm`, where any user may have made a folder of that name. Then it lies in `$XDG_RUNTIME_DIR`, where no other user can.
///
/// # Errors
/// [`Error::State`] if other users own the folder or may use it, or if there is no room for it; [`Error::System`] if it cannot be made.
pub(super) fn folder() -> Result<PathBuf> {
    let runtime = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
    folder_in(Path::new("/dev/shm"), runtime.as_deref())
}

fn folder_in(shared: &Path, runtime: Option<&Path>) -> Result<PathBuf> {
    let refused = match own(shared.join(format!("doorbell-{}", user()))) {
        Err(refused @ Error::State { .. }) => refused,
        made => return made,
    };
    let other = runtime
        .filter(|runtime| runtime.is_absolute() && check(runtime).is_ok())
        .and_then(|runtime| own(runtime.join("doorbell")).ok());
    other.ok_or(refused)
}

fn user() -> u32 {
    // SAFETY: a plain call.
    unsafe { libc::geteuid() }
}

fn own(path: PathBuf) -> Result<PathBuf> {
    match DirBuilder::new().mode(0o700).create(&path) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => Err(failed(&path, &error)),
        _ => check(&path).map(|()| path),
    }
}

/// Only its owner can change what is in it, and that is this user.
fn check(path: &Path) -> Result<()> {
    let found = symlink_metadata(path).map_err(|error| failed(path, &error))?;
    let (owner, mode) = (found.uid(), found.mode() & 0o7777);
    let wrong = if owner != user() {
        format!("belongs to user {owner}, not to user {}", user())
    } else if !found.is_dir() {
        "is not a folder".into()
    } else if mode & 0o077 != 0 {
        format!("has mode {mode:o}; other users must not have access")
    } else {
        return Ok(());
    };
    let reason = format!("{} {wrong}", path.display());
    Err(Error::state(StateKind::Environment, OPERATION, reason))
}

fn failed(path: &Path, error: &io::Error) -> Error {
    file_error(OPERATION, path, 4096, error)
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::{PermissionsExt, chown, symlink};

    use super::*;

    const OTHER_USER: u32 = 54321;

    /// A folder that is gone with the test.
    struct Root(PathBuf);

    impl Root {
        fn new(test: &str) -> Root {
            let path = std::env::temp_dir().join(format!("doorbell-{test}-{}", std::process::id()));
            DirBuilder::new().mode(0o700).create(&path).unwrap();
            Root(path)
        }
    }

    impl Drop for Root {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    fn reason(refused: Result<PathBuf>) -> String {
        match refused {
            Err(Error::State { reason, .. }) => reason,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn folder_has_mode_0700_and_looser_modes_are_refused() {
        let root = Root::new("folder");
        let folder = folder_in(&root.0, None).unwrap();
        assert_eq!(symlink_metadata(&folder).unwrap().mode() & 0o777, 0o700);
        assert_eq!(folder_in(&root.0, None), Ok(folder.clone()));
        fs::set_permissions(&folder, Permissions::from_mode(0o770)).unwrap();
        assert!(reason(folder_in(&root.0, None)).contains("mode 770"));
        fs::remove_dir(&folder).unwrap();
        symlink(&root.0, &folder).unwrap();
        assert!(reason(folder_in(&root.0, None)).contains("not a folder"));
        let nowhere = folder_in(Path::new("/nonexistent"), None);
        assert!(
            matches!(
                nowhere,
                Err(Error::System {
                    errno: libc::ENOENT,
                    ..
                })
            ),
            "{nowhere:?}"
        );
    }

    #[test]
    fn folder_of_another_user_is_refused_or_xdg_runtime_dir_is_used() {
        let (root, runtime) = (Root::new("squatted"), Root::new("runtime"));
        let folder = folder_in(&root.0, None).unwrap();
        if let Err(error) = chown(&folder, Some(OTHER_USER), None) {
            eprintln!("WAIVED: a folder of another user: chown: {error}");
            return;
        }
        let refused = reason(folder_in(&root.0, None));
        assert!(
            refused.contains(&format!("belongs to user {OTHER_USER}")),
            "{refused}"
        );
        assert_eq!(
            folder_in(&root.0, Some(&runtime.0)),
            Ok(runtime.0.join("doorbell"))
        );
        // A folder that the other user owns as well cannot be used.
        chown(&runtime.0, Some(OTHER_USER), None).unwrap();
        assert_eq!(reason(folder_in(&root.0, Some(&runtime.0))), refused);
    }
}
