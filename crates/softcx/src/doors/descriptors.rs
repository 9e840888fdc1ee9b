//! How many descriptors this process may have. The device has several for each context, and serves a whole process tree.
#![allow(unsafe_code)] // system calls

use std::io;
use std::mem::zeroed;

/// A limit, as it was.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limit(libc::rlimit);

impl Limit {
    /// Raises it as far as it goes without privilege, for as long as the value lives that this gives out.
    pub(super) fn raise() -> io::Result<RaisedLimit> {
        // SAFETY: plain numbers, for which zeros are fine.
        let mut before = Limit(unsafe { zeroed() });
        // SAFETY: room for one limit.
        if unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut before.0) } != 0 {
            return Err(io::Error::last_os_error());
        }
        let most = libc::rlimit {
            rlim_cur: before.0.rlim_max,
            ..before.0
        };
        Limit(most).apply()?;
        Ok(RaisedLimit { before })
    }

    /// Makes it the process's. Allowed between fork and exec.
    pub(super) fn apply(&self) -> io::Result<()> {
        // SAFETY: a limit that outlives the call.
        if unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const self.0) } != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    }
}

/// The limit is raised as long as this lives.
#[derive(Debug)]
pub(super) struct RaisedLimit {
    before: Limit,
}

impl RaisedLimit {
    /// As it was before.
    pub(super) fn before(&self) -> Limit {
        self.before
    }
}

impl Drop for RaisedLimit {
    fn drop(&mut self) {
        // A limit that the kernel gave, it takes.
        let _ = self.before.apply();
    }
}
