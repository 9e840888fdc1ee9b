//! Open devices, and the list of those that there are.
#![cfg_attr(feature = "verbs", allow(unsafe_code))] // methods whose callers promise what an address is of

#[cfg(feature = "verbs")]
use std::ffi::c_void;
use std::fmt;
#[cfg(feature = "verbs")]
use std::ptr::NonNull;
use std::sync::Arc;

use super::NicDomain;
#[cfg(feature = "verbs")]
use super::domain::no_verbs;
#[cfg(feature = "softcx")]
use super::{Counters, Faults, softcx};
#[cfg(feature = "verbs")]
use super::{KeptAlive, verbs};
use crate::{Error, Result, StateKind};

/// An open NIC.
pub(crate) trait Nic: fmt::Debug + Send + Sync {
    /// The name by which [`open`] finds it.
    fn name(&self) -> &str;

    /// A new protection domain.
    ///
    /// # Errors
    /// As the device has them.
    fn domain(&self) -> Result<Arc<dyn NicDomain>>;

    /// Uses a protection domain (`ibv_pd`) of the device that was allocated elsewhere.
    ///
    /// # Safety
    /// It is one, and stays one until `owner` is dropped.
    ///
    /// # Errors
    /// [`Error::Foreign`] if it is not of this device.
    #[cfg(feature = "verbs")]
    unsafe fn adopt_domain(
        &self,
        _pd: NonNull<c_void>,
        _owner: KeptAlive,
    ) -> Result<Arc<dyn NicDomain>> {
        Err(no_verbs("a protection domain"))
    }

    /// Takes note of an asynchronous event that was read elsewhere: its kind and the address of the object that it is about.
    #[cfg(feature = "verbs")]
    fn report_event(&self, _kind: u32, _object: usize) {}

    /// Lets a device of software work inside the caller, and returns whether there was any work. A card needs no such turn.
    #[inline]
    fn progress(&self) -> bool {
        false
    }

    /// The counters of a device of software. A card counts in the system's own files.
    #[cfg(feature = "softcx")]
    fn counters(&self) -> Option<Counters> {
        None
    }

    /// Sets what happens to packets that are sent from now on. Returns whether the device can do that.
    #[cfg(feature = "softcx")]
    fn set_faults(&self, _faults: Faults) -> bool {
        false
    }

    /// Stops all work of the device, or lets it go on. Returns whether the device can do that.
    #[cfg(feature = "softcx")]
    fn set_frozen(&self, _frozen: bool) -> bool {
        false
    }
}

/// What a driver makes of a name: a device, or nothing if the driver has none of that name.
type Opened = Result<Option<Arc<dyn Nic>>>;

/// Returns the PCI address of the GPU that the device is to be near, if the process uses one. Called only where that matters.
pub(crate) type GpuAddress<'a> = &'a dyn Fn() -> Option<String>;

/// A way to open devices.
pub(super) struct Driver {
    /// The names of the devices that it finds, best first.
    pub(super) list: fn() -> Vec<String>,
    /// Opens a device by its name. `None` if the driver has no such device.
    pub(super) open: fn(&str, GpuAddress<'_>) -> Opened,
}

/// Cards first.
const DRIVERS: &[Driver] = &[
    #[cfg(feature = "verbs")]
    verbs::DRIVER,
    #[cfg(feature = "softcx")]
    softcx::DRIVER,
];

/// The names of the devices that there are, cards first.
pub(crate) fn list() -> Vec<String> {
    DRIVERS.iter().flat_map(|driver| (driver.list)()).collect()
}

/// Opens the device of that name.
///
/// # Errors
/// [`Error::State`] naming the devices that there are, or the feature that the library was built without; those of the driver.
pub(crate) fn open(name: &str, gpu: GpuAddress<'_>) -> Result<Arc<dyn Nic>> {
    // From the last on: libibverbs need not look for a card of the name of the software ConnectX.
    for driver in DRIVERS.iter().rev() {
        if let Some(nic) = (driver.open)(name, gpu)? {
            return Ok(nic);
        }
    }
    Err(Error::state(StateKind::NotFound, "open", missing(name)))
}

fn missing(name: &str) -> String {
    if name == "softcx" && !cfg!(feature = "softcx") {
        return "the library was built without the feature `softcx`, the software ConnectX".into();
    }
    let known = match list().join(", ") {
        none if none.is_empty() => "there are none".into(),
        known => format!("there are: {known}"),
    };
    let hint = if cfg!(feature = "verbs") {
        ""
    } else {
        " (built without the feature `verbs`, which opens cards)"
    };
    format!("there is no device `{name}`; {known}{hint}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_software_connectx_is_there_if_it_was_built_in() {
        let is_built = cfg!(feature = "softcx");
        assert_eq!(list().iter().any(|name| name == "softcx"), is_built);
        match open("softcx", &|| None) {
            Ok(nic) => assert!(is_built && nic.name() == "softcx"),
            Err(error) => {
                assert!(!is_built, "{error}");
                assert!(error.to_string().contains("without the feature `softcx`"));
            }
        }
        let error = open("no-such-device", &|| None).unwrap_err().to_string();
        assert!(error.contains("no-such-device"), "{error}");
        assert_eq!(
            error.contains("the feature `verbs`"),
            !cfg!(feature = "verbs")
        );
    }
}
