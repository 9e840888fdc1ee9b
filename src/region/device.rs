//! Devices and protection domains.

use std::fmt;
use std::sync::Arc;

use crate::soft::{self, Counters, Faults};
use crate::{Error, Result};

/// The name of the embedded software NIC.
const SOFTCX: &str = "softcx";

/// A NIC. Clones are handles of the same one; it is closed with the last handle, and everything made from it holds one.
#[derive(Clone)]
pub struct Device {
    nic: soft::Device,
}

impl Device {
    /// The names of the devices that [`Device::open`] knows on this machine, best first.
    pub fn list() -> Vec<&'static str> {
        vec![SOFTCX]
    }

    /// Opens a device by its name. `softcx` makes a new software ConnectX, with an engine thread of its own.
    ///
    /// # Errors
    /// [`Error::State`] naming the devices that there are; [`Error::System`] if the kernel gives no memory or no thread.
    pub fn open(name: &str) -> Result<Device> {
        if name != SOFTCX {
            let known = Device::list().join(", ");
            return Err(Error::State {
                operation: "open",
                reason: format!("there is no device `{name}`; there are: {known}"),
            });
        }
        Ok(Device {
            nic: soft::Device::open()?,
        })
    }

    /// Its name.
    pub fn name(&self) -> &'static str {
        SOFTCX
    }

    /// A new protection domain: regions and endpoints of different ones do not work together.
    pub fn protection_domain(&self) -> ProtectionDomain {
        ProtectionDomain {
            inner: Arc::new(Domain {
                device: self.clone(),
                number: self.nic.create_pd(),
            }),
        }
    }

    /// Lets the device do some of its work inside the caller, in poll loops. Whether there was any.
    #[inline]
    pub fn progress(&self) -> bool {
        self.nic.progress()
    }

    /// What the device has counted so far.
    pub fn counters(&self) -> Counters {
        self.nic.counters()
    }

    /// Sets what happens to packets that the device sends from now on, for tests of software that is to survive it.
    pub fn set_faults(&self, faults: Faults) {
        self.nic.set_faults(faults);
    }

    /// Stops all work of the device, or lets it go on: a NIC that hangs, for tests.
    pub fn set_frozen(&self, frozen: bool) {
        self.nic.set_frozen(frozen);
    }

    pub(crate) fn soft(&self) -> &soft::Device {
        &self.nic
    }

    pub(crate) fn is(&self, other: &Device) -> bool {
        self.nic.is(&other.nic)
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Device")
            .field("name", &self.name())
            .finish_non_exhaustive()
    }
}

#[derive(Debug)]
struct Domain {
    device: Device,
    number: u32,
}

/// What belongs together on a device: an endpoint reaches the regions of its own domain only, its peers too.
#[derive(Debug, Clone)]
pub struct ProtectionDomain {
    inner: Arc<Domain>,
}

impl ProtectionDomain {
    /// The device.
    pub fn device(&self) -> &Device {
        &self.inner.device
    }

    pub(crate) fn number(&self) -> u32 {
        self.inner.number
    }

    /// Fails unless `other` is this very domain.
    #[inline]
    pub(crate) fn check_same(
        &self,
        other: &ProtectionDomain,
        argument: &'static str,
    ) -> Result<()> {
        if Arc::ptr_eq(&self.inner, &other.inner) {
            Ok(())
        } else {
            Err(self.foreign(other, argument))
        }
    }

    #[cold]
    fn foreign(&self, other: &ProtectionDomain, argument: &'static str) -> Error {
        let same_device = self.device().is(other.device());
        let name = |domain: &ProtectionDomain| {
            let device = if same_device {
                "this device"
            } else if std::ptr::eq(domain, self) {
                "its device"
            } else {
                "another device"
            };
            format!("protection domain {} of {device}", domain.number())
        };
        Error::Foreign {
            argument,
            found: name(other),
            expected: name(self),
        }
    }
}
