//! A private directory for what a run shows to its programs, which goes when its owner does.
#![allow(unsafe_code)] // file locks

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use crate::Result;
use crate::device::{file_error, random};

const PREFIX: &str = "doorbell-softcx-";
/// Held while the owner lives, whatever ends it: by this lock later runs find what one that was killed has left.
const LOCK: &str = "owner";

/// The directory; removed with all that is in it when this is dropped.
#[derive(Debug)]
pub(super) struct Scratch {
    path: PathBuf,
    _lock: File,
}

impl Scratch {
    /// A fresh one, after what dead owners have left is cleared away.
    ///
    /// # Errors
    /// [`Error::State`](crate::Error::State) if there is no room for it, else [`Error::System`](crate::Error::System).
    pub(super) fn new() -> Result<Scratch> {
        // Random, because all users make such names in the same folder: no other user can take this one before.
        let name = format!("{}-{:016x}", std::process::id(), random()?);
        Scratch::new_in(root(), &name)
            .map_err(|error| file_error("creation of a private directory", root(), 4096, &error))
    }

    fn new_in(root: &Path, owner: &str) -> io::Result<Scratch> {
        sweep(root);
        // A name that no sweep looks at, until the lock is held.
        let unready = root.join(format!(".{PREFIX}{owner}"));
        let path = root.join(format!("{PREFIX}{owner}"));
        fs::DirBuilder::new().mode(0o755).create(&unready)?;
        let locked = File::create(unready.join(LOCK)).and_then(|lock| {
            if !is_free(&lock) {
                return Err(io::Error::last_os_error());
            }
            fs::rename(&unready, &path)?;
            Ok(lock)
        });
        match locked {
            Ok(lock) => Ok(Scratch { path, _lock: lock }),
            Err(error) => {
                // The first error is the one to report.
                let _ = fs::remove_dir_all(&unready);
                Err(error)
            }
        }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // What cannot be removed now, a later run sweeps away.
        let _ = fs::remove_dir_all(&self.path);
    }
}

/// Memory where there is a file system for it.
fn root() -> &'static Path {
    let shared = Path::new("/dev/shm");
    if shared.is_dir() {
        shared
    } else {
        Path::new("/tmp")
    }
}

/// Takes the lock if it is free. Returns whether it did.
fn is_free(lock: &File) -> bool {
    // SAFETY: an open descriptor.
    unsafe { libc::flock(lock.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) == 0 }
}

/// Removes the directories of this user whose owners are dead.
fn sweep(root: &Path) {
    // SAFETY: takes nothing and cannot fail.
    let user = unsafe { libc::geteuid() };
    let is_ours = |name: &OsStr| name.as_encoded_bytes().starts_with(PREFIX.as_bytes());
    let Ok(entries) = fs::read_dir(root) else {
        return;
    };
    let names: Vec<OsString> = entries
        .filter_map(|entry| Some(entry.ok()?.file_name()))
        .filter(|name| is_ours(name))
        .collect();
    for name in names {
        let path = root.join(name);
        let own =
            fs::symlink_metadata(&path).is_ok_and(|found| found.is_dir() && found.uid() == user);
        let dead = || File::open(path.join(LOCK)).is_ok_and(|lock| is_free(&lock));
        if own && dead() {
            let _ = fs::remove_dir_all(&path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scratch_folder_is_removed_on_drop_and_stale_ones_next() {
        let root = Scratch::new().unwrap();
        let root = root.path();
        let kept = Scratch::new_in(root, "kept").unwrap();
        let gone = Scratch::new_in(root, "gone").unwrap();
        let gone_path = gone.path().to_owned();
        fs::create_dir_all(gone_path.join("class/infiniband")).unwrap();
        drop(gone);
        assert!(!gone_path.exists());
        let killed = root.join(format!("{PREFIX}killed"));
        fs::create_dir_all(killed.join("class")).unwrap();
        fs::write(killed.join(LOCK), "").unwrap();
        let unready = root.join(format!(".{PREFIX}unready"));
        fs::create_dir_all(&unready).unwrap();
        let next = Scratch::new_in(root, "next").unwrap();
        assert!(!killed.exists());
        assert!(kept.path().exists() && unready.exists() && next.path().exists());
    }
}
