//! Which component rings the NIC.

use std::fmt;
use std::str::FromStr;

use crate::{Error, Result};

/// Which component rings the NIC, best first.
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

impl Control {
    /// All of them, best first.
    pub const ALL: [Control; 3] = [Control::Direct, Control::Proxy, Control::Sync];

    const fn name(self) -> &'static str {
        match self {
            Control::Direct => "direct",
            Control::Proxy => "proxy",
            Control::Sync => "sync",
        }
    }
}

impl fmt::Display for Control {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Control {
    type Err = Error;

    fn from_str(text: &str) -> Result<Control> {
        Control::ALL
            .into_iter()
            .find(|control| control.name() == text)
            .ok_or_else(|| Error::Malformed {
                what: "control path",
                reason: format!("`{text}` must be direct, proxy or sync"),
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_come_back() {
        for control in Control::ALL {
            assert_eq!(control.to_string().parse(), Ok(control));
        }
        assert!("gpu".parse::<Control>().is_err());
    }
}
