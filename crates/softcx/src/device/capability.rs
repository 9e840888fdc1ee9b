//! The capabilities of a process, for what the kernel keeps to privileged ones (capabilities(7)).

use crate::device::space::Space;

/// A capability, by its number in `linux/capability.h`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Capability {
    /// `CAP_NET_RAW`.
    NetRaw = 13,
    /// `CAP_IPC_LOCK`.
    IpcLock = 14,
}

impl Space {
    /// Whether the process has a capability in its effective set. A process that is gone has none.
    pub(crate) fn has_capability(self, capability: Capability) -> bool {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid()));
        let effective = status.ok().and_then(|status| effective_set(&status));
        effective.is_some_and(|set| set >> capability as u32 & 1 != 0)
    }
}

/// The line `CapEff` of a status file (proc_pid_status(5)).
fn effective_set(status: &str) -> Option<u64> {
    let set = status
        .lines()
        .find_map(|line| line.strip_prefix("CapEff:"))?;
    u64::from_str_radix(set.trim(), 16).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn effective_set_is_read_among_the_others() {
        let status = "Name:\tx\nCapPrm:\t000001ffffffffff\nCapEff:\t0000000000002000\nCapBnd:\t0\n";
        assert_eq!(effective_set(status), Some(1 << 13));
        assert_eq!(effective_set("Name:\tCapEff\n"), None);
        assert_eq!(effective_set("CapEff:\tmany\n"), None);
    }
}
