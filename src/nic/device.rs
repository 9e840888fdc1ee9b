//! Devices and their protection domains.

#[cfg(feature = "verbs")]
use std::sync::Arc;

#[cfg(feature = "verbs")]
use crate::verbs;
use crate::{Error, Result};
use doorbell_softcx::device::{self as soft, Counters, Faults};

/// The name of the embedded software NIC.
const SOFTCX: &str = "softcx";

/// An open NIC. Clones are handles of the same one.
#[derive(Debug, Clone)]
pub(crate) enum Device {
    Soft(soft::Device),
    #[cfg(feature = "verbs")]
    Verbs(verbs::Device),
}

impl Device {
    /// The names of those that there are: cards first.
    pub(crate) fn list() -> Vec<String> {
        let cards: Vec<String> = {
            #[cfg(feature = "verbs")]
            {
                verbs::Device::list()
            }
            #[cfg(not(feature = "verbs"))]
            {
                Vec::new()
            }
        };
        cards.into_iter().chain([SOFTCX.to_owned()]).collect()
    }

    pub(crate) fn open(name: &str) -> Result<Device> {
        if name == SOFTCX {
            return Ok(Device::Soft(soft::Device::open()?));
        }
        #[cfg(feature = "verbs")]
        if let Some(device) = verbs::Device::open(name)? {
            return Ok(Device::Verbs(device));
        }
        let known = Device::list().join(", ");
        let hint = if cfg!(feature = "verbs") {
            ""
        } else {
            " (built without the feature `verbs`, which opens cards)"
        };
        Err(Error::State {
            operation: "open",
            reason: format!("there is no device `{name}`; there are: {known}{hint}"),
        })
    }

    pub(crate) fn name(&self) -> &str {
        match self {
            Device::Soft(_) => SOFTCX,
            #[cfg(feature = "verbs")]
            Device::Verbs(device) => device.name(),
        }
    }

    /// Whether both are handles of one device.
    pub(crate) fn is(&self, other: &Device) -> bool {
        match (self, other) {
            (Device::Soft(one), Device::Soft(other)) => one.is(other),
            #[cfg(feature = "verbs")]
            (Device::Verbs(one), Device::Verbs(other)) => one.is(other),
            #[cfg(feature = "verbs")]
            _ => false,
        }
    }

    /// Lets a device of software work inside the caller. A card needs no such turn.
    #[inline]
    pub(crate) fn progress(&self) -> bool {
        match self {
            Device::Soft(device) => device.progress(),
            #[cfg(feature = "verbs")]
            Device::Verbs(_) => false,
        }
    }

    /// What a device of software has counted.
    pub(crate) fn counters(&self) -> Option<Counters> {
        match self {
            Device::Soft(device) => Some(device.counters()),
            #[cfg(feature = "verbs")]
            Device::Verbs(_) => None,
        }
    }

    /// Whether the device can do that.
    pub(crate) fn set_faults(&self, faults: Faults) -> bool {
        match self {
            Device::Soft(device) => device.set_faults(faults),
            #[cfg(feature = "verbs")]
            Device::Verbs(_) => return false,
        }
        true
    }

    /// Whether the device can do that.
    pub(crate) fn set_frozen(&self, frozen: bool) -> bool {
        match self {
            Device::Soft(device) => device.set_frozen(frozen),
            #[cfg(feature = "verbs")]
            Device::Verbs(_) => return false,
        }
        true
    }
}

/// A protection domain of a device, which it holds.
#[derive(Debug, Clone)]
pub(crate) enum Domain {
    Soft {
        device: soft::Device,
        number: u32,
    },
    #[cfg(feature = "verbs")]
    Verbs(Arc<verbs::Domain>),
}

impl Domain {
    pub(crate) fn new(device: &Device) -> Result<Domain> {
        match device {
            Device::Soft(device) => Ok(Domain::Soft {
                device: device.clone(),
                number: device.create_pd(),
            }),
            #[cfg(feature = "verbs")]
            Device::Verbs(device) => Ok(Domain::Verbs(Arc::new(verbs::Domain::new(device)?))),
        }
    }

    /// A number for messages.
    pub(crate) fn number(&self) -> u32 {
        match self {
            Domain::Soft { number, .. } => *number,
            #[cfg(feature = "verbs")]
            Domain::Verbs(domain) => domain.number(),
        }
    }
}
