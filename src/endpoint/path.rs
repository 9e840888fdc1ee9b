//! Which way a doorbell takes, and why no better one.

use std::fmt;

/// Who rings the NIC, best first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Control {
    /// The stream itself stores to the NIC's doorbell.
    Direct,
    /// The stream stores a trigger word, and a thread of the library rings.
    Proxy,
    /// The application's thread rings after it has waited for the stream: plain GPUDirect RDMA.
    Sync,
}

impl fmt::Display for Control {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Control::Direct => "direct",
            Control::Proxy => "proxy",
            Control::Sync => "sync",
        })
    }
}

/// The control path in force.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Path {
    /// The way.
    pub control: Control,
    /// Why this one: what was found that makes it possible.
    pub reason: String,
    /// Better ones, each with what is missing for it.
    pub better: Vec<(Control, String)>,
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({}", self.control, self.reason)?;
        for (control, missing) in &self.better {
            write!(f, "; not {control}: {missing}")?;
        }
        f.write_str(")")
    }
}
