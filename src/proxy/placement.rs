//! Where a proxy's thread runs.
#![allow(unsafe_code)] // reads and sets the CPUs of a thread

use std::fs;
use std::mem::size_of;

/// CPUs that the system's own type of set can name.
const CPUS_MAX: usize = libc::CPU_SETSIZE as usize;

/// Where a thread runs that rings for streams.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Placement {
    /// Where the scheduler puts it.
    Anywhere,
    /// On any CPU of a NUMA node: a doorbell that is stored from another one crosses the sockets.
    Node(u32),
    /// On one CPU.
    Cpu(u32),
}

impl Placement {
    /// That CPU, if this process may use it.
    pub(crate) fn cpu(number: u32) -> Option<Placement> {
        allowed()
            .contains(&(number as usize))
            .then_some(Placement::Cpu(number))
    }

    /// Near the verbs device of that name, where the machine has more than one node.
    pub(crate) fn near(device: &str) -> Placement {
        let name = device.rsplit(':').next().unwrap_or(device);
        let nodes = fs::read_to_string("/sys/devices/system/node/online").unwrap_or_default();
        if parse_list(&nodes).len() < 2 || name.contains('/') {
            return Placement::Anywhere;
        }
        // -1 where the device is near no node.
        fs::read_to_string(format!("/sys/class/infiniband/{name}/device/numa_node"))
            .ok()
            .and_then(|text| text.trim().parse().ok())
            .map_or(Placement::Anywhere, Placement::Node)
    }

    /// Text for messages.
    pub(crate) fn text(self) -> String {
        match self {
            Placement::Anywhere => "any CPU".into(),
            Placement::Node(node) => format!("NUMA node {node}"),
            Placement::Cpu(cpu) => format!("CPU {cpu}"),
        }
    }

    /// Moves the calling thread there. If the system refuses that, the thread stays where it is: it is slower there, but
    /// works the same.
    pub(super) fn apply(self) {
        let wanted = match self {
            // Not where the thread is bound that made this one.
            Placement::Anywhere => allowed(),
            Placement::Cpu(cpu) => vec![cpu as usize],
            Placement::Node(node) => {
                let path = format!("/sys/devices/system/node/node{node}/cpulist");
                parse_list(&fs::read_to_string(path).unwrap_or_default())
            }
        };
        let allowed = allowed();
        // SAFETY: a plain array of words, for which zero is the empty set.
        let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
        let mut any = false;
        for cpu in wanted.into_iter().filter(|cpu| allowed.contains(cpu)) {
            // SAFETY: `allowed` has numbers below the size of the set only.
            unsafe { libc::CPU_SET(cpu, &mut set) };
            any = true;
        }
        if any {
            // SAFETY: a set of that size; 0 is the calling thread.
            unsafe { libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const set) };
        }
    }
}

/// The CPUs that the process may use, as its first thread has them.
fn allowed() -> Vec<usize> {
    let process = std::process::id().cast_signed();
    // SAFETY: a plain array of words, for which zero is the empty set.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: a place for a set of that size; the first thread has the number of the process.
    unsafe { libc::sched_getaffinity(process, size_of::<libc::cpu_set_t>(), &raw mut set) };
    // SAFETY: numbers below the size of the set.
    (0..CPUS_MAX)
        .filter(|cpu| unsafe { libc::CPU_ISSET(*cpu, &set) })
        .collect()
}

/// The numbers of a list as the kernel writes it: `0-3,8`. Text that is not a number is left out, and so are numbers that
/// no set could hold.
fn parse_list(text: &str) -> Vec<usize> {
    let number = |text: &str| text.trim().parse::<usize>().ok();
    let mut found = Vec::new();
    for part in text.trim().split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        if let (Some(first), Some(last)) = (number(first), number(last)) {
            found.extend(first..last.saturating_add(1).min(CPUS_MAX));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_the_kernel_are_read() {
        assert_eq!(parse_list("0-2,8\n"), [0, 1, 2, 8]);
        assert_eq!(parse_list("5"), [5]);
        assert!(parse_list("\n").is_empty());
        assert!(parse_list("x,-,9-").is_empty());
        // No length is believed.
        assert_eq!(parse_list("0-18446744073709551615").len(), CPUS_MAX);
    }

    #[test]
    fn a_thread_goes_to_the_cpu_that_was_asked_for() {
        let last = *allowed().last().unwrap();
        let there = Placement::cpu(last as u32).unwrap();
        std::thread::spawn(move || {
            there.apply();
            // SAFETY: no arguments.
            let here = unsafe { libc::sched_getcpu() };
            assert_eq!(usize::try_from(here), Ok(last));
            Placement::Anywhere.apply();
        })
        .join()
        .unwrap();
        assert_eq!(Placement::cpu(CPUS_MAX as u32), None);
    }

    #[test]
    fn a_device_that_is_not_there_is_near_nothing() {
        assert_eq!(Placement::near("softcx"), Placement::Anywhere);
        assert_eq!(Placement::near("../../etc"), Placement::Anywhere);
    }
}
