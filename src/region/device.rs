//! Devices and protection domains.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use crate::nic::{self, Nic, NicDomain};
#[cfg(feature = "softcx")]
use crate::nic::{Counters, Faults};
use crate::proxy::{Placement, proxy_at};
use crate::region::Control;
use crate::{Error, Result};

/// A NIC. Clones are handles of the same one; it is closed with the last handle, and everything made from it holds one.
#[derive(Clone)]
pub struct Device {
    nic: Arc<dyn Nic>,
    control: Option<Control>,
    /// Where the thread runs that rings for its endpoints.
    placement: Placement,
}

impl Device {
    /// The names of the devices that [`Device::open`] knows on this machine, best first: with the feature `verbs` the mlx5 devices that
    /// libibverbs finds, then its others as `verbs:NAME`; with the feature `softcx`, which is on by default, always `softcx`.
    pub fn list() -> Vec<String> {
        nic::list()
    }

    /// Opens a device by its name. `softcx` makes a new software ConnectX, with an engine thread of its own; that needs the feature `softcx`, which is
    /// on by default.
    ///
    /// With the feature `verbs` an mlx5 device is opened by its name (`mlx5_0`), by its PCI address (`0000:3b:00.0`), or as `mlx5`, which
    /// is the first that has an active port. If a CUDA context is current in this thread or known to the library, it is the one of these that is
    /// nearest to its GPU in the PCI tree. Behind the name may stand which port, if not the first active one, and which entry of its
    /// GID table is its address, if not the first (on Ethernet: the first RoCE v2 address of IPv4 in this network namespace): `mlx5_0,port=2,gid=3`.
    ///
    /// Any other device that libibverbs has a provider for is opened by its name (`rxe0`, or `verbs:rxe0`) and used by plain verbs:
    /// streams cannot ring it, so the control path is not a direct one. `verbs:mlx5_0` does so with an mlx5 device, too, and `verbs` is as
    /// `mlx5` for devices of any kind. What such a device cannot do is an error where it is asked for: depths and slices
    /// when an endpoint is made, reads and atomics when they are prepared.
    ///
    /// Behind `softcx` may stand its wire: `softcx,wire=udp` reaches other hosts by RoCE v2 on UDP, and has a free address of 127.0.0.0/16;
    /// `softcx,wire=udp:10.0.0.1` has an address of this host. Without it the device reaches other devices of its host by shared memory.
    ///
    /// Behind any name may stand which [`Control`] path the endpoints of this handle take, if their configuration does not say it, and on
    /// which CPU the thread runs that rings for them, if it is not any CPU of the device's NUMA node: `softcx,path=proxy,cpu=3`.
    ///
    /// # Errors
    /// [`Error::State`] naming the devices that there are, or saying what the device lacks; [`Error::Malformed`] for what stands behind
    /// the name; [`Error::System`] if the kernel gives no memory or no thread, or naming the verbs call that failed.
    pub fn open(name: &str) -> Result<Device> {
        let settings = DeviceSettings::parse(name)?;
        #[cfg(all(feature = "cuda", feature = "verbs"))]
        let gpu = crate::cuda::gpu_address;
        #[cfg(not(all(feature = "cuda", feature = "verbs")))]
        let gpu = || None;
        let nic = nic::open(&settings.rest, &gpu)?;
        Device::of(nic, &settings)
    }

    /// An open NIC, used as the settings say.
    pub(super) fn of(nic: Arc<dyn Nic>, settings: &DeviceSettings) -> Result<Device> {
        let placement = match settings.cpu {
            Some(number) => Placement::cpu(number)
                .ok_or_else(|| bad_name(&format!("cpu={number}"), "is no CPU of this process"))?,
            None => Placement::near(nic.name()),
        };
        Ok(Device {
            nic,
            control: settings.control,
            placement,
        })
    }

    #[cfg(feature = "verbs")]
    pub(super) fn nic(&self) -> &dyn Nic {
        &*self.nic
    }

    /// The control path that the name asked for.
    pub(crate) fn control(&self) -> Option<Control> {
        self.control
    }

    pub(crate) fn placement(&self) -> Placement {
        self.placement
    }

    /// Its name.
    pub fn name(&self) -> &str {
        self.nic.name()
    }

    /// A new protection domain: regions and endpoints of different ones do not work together. A device other than `softcx` is asked for
    /// it when the first region or endpoint is made in it, and refuses it there.
    pub fn protection_domain(&self) -> ProtectionDomain {
        ProtectionDomain {
            inner: Arc::new(LazyDomain {
                device: self.clone(),
                made: Mutex::default(),
            }),
        }
    }

    /// Lets the device do some of its work inside the caller, in poll loops. Whether there was any; a card needs no such turn.
    #[inline]
    pub fn progress(&self) -> bool {
        self.nic.progress()
    }

    /// What the device has counted so far (feature `softcx`). A card counts in the system's own files, and this says 0.
    #[cfg(feature = "softcx")]
    pub fn counters(&self) -> Counters {
        self.nic.counters().unwrap_or_default()
    }

    /// Sets what happens to packets that the device sends from now on (feature `softcx`), for tests. Returns false if the device
    /// cannot inject faults; only the software ConnectX of this process can.
    #[cfg(feature = "softcx")]
    pub fn set_faults(&self, faults: Faults) -> bool {
        self.nic.set_faults(faults)
    }

    /// Stops all work of the device, or lets it go on (feature `softcx`): a NIC that hangs, for tests. Returns false as
    /// [`Device::set_faults`] does.
    #[cfg(feature = "softcx")]
    pub fn set_frozen(&self, frozen: bool) -> bool {
        self.nic.set_frozen(frozen)
    }

    /// Stalls or resumes the proxy thread, which rings for the endpoints of this device on the [`Control::Proxy`] path, for tests. All devices that the
    /// thread serves are affected.
    ///
    /// # Errors
    /// [`Error::System`] if there is no thread yet and none to be had.
    pub fn set_proxy_stalled(&self, stalled: bool) -> Result<()> {
        proxy_at(self.placement).map(|proxy| proxy.set_stalled(stalled))
    }

    pub(crate) fn is(&self, other: &Device) -> bool {
        Arc::ptr_eq(&self.nic, &other.nic)
    }
}

fn bad_name(part: &str, reason: &str) -> Error {
    Error::Malformed {
        what: "device name",
        reason: format!("`{part}` {reason}"),
    }
}

/// What stands behind the name of a device.
pub(super) struct DeviceSettings {
    control: Option<Control>,
    cpu: Option<u32>,
    /// The name, and what is the driver's to read.
    pub(super) rest: String,
}

impl DeviceSettings {
    /// # Errors
    /// [`Error::Malformed`].
    pub(super) fn parse(name: &str) -> Result<DeviceSettings> {
        let mut rest: Vec<&str> = Vec::new();
        let (mut control, mut cpu) = (None, None);
        for part in name.split(',') {
            match part.split_once('=') {
                Some(("path", value)) => control = Some(value.parse()?),
                Some(("cpu", value)) => {
                    let number = value.parse();
                    cpu = Some(number.map_err(|_| bad_name(part, "names no CPU"))?);
                }
                _ => rest.push(part),
            }
        }
        Ok(DeviceSettings {
            control,
            cpu,
            rest: rest.join(","),
        })
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
struct LazyDomain {
    device: Device,
    made: Mutex<Option<Arc<dyn NicDomain>>>,
}

/// What belongs together on a device: an endpoint reaches the regions of its own domain only, its peers too.
#[derive(Debug, Clone)]
pub struct ProtectionDomain {
    inner: Arc<LazyDomain>,
}

impl ProtectionDomain {
    /// The device.
    pub fn device(&self) -> &Device {
        &self.inner.device
    }

    /// A domain that the device has already.
    #[cfg(feature = "verbs")]
    pub(super) fn of(device: &Device, made: Arc<dyn NicDomain>) -> ProtectionDomain {
        ProtectionDomain {
            inner: Arc::new(LazyDomain {
                device: device.clone(),
                made: Mutex::new(Some(made)),
            }),
        }
    }

    /// The device's own, made if this is the first use of it.
    ///
    /// # Errors
    /// As the device has them.
    pub(crate) fn on_device(&self) -> Result<Arc<dyn NicDomain>> {
        let mut made = self
            .inner
            .made
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(domain) = &*made {
            return Ok(Arc::clone(domain));
        }
        let domain = self.inner.device.nic.domain()?;
        Ok(Arc::clone(made.insert(domain)))
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
            let device = domain.device().name();
            // Two devices may have the same name: each opening of `softcx` makes one.
            let which = if std::ptr::eq(domain, self) {
                "this"
            } else {
                "another"
            };
            match domain.on_device() {
                _ if !same_device => {
                    format!("a protection domain of {which} device, opened as `{device}`")
                }
                Ok(domain) => format!("protection domain {} of `{device}`", domain.number()),
                Err(_) => format!("a protection domain of `{device}`"),
            }
        };
        Error::Foreign {
            argument,
            found: name(other),
            expected: name(self),
        }
    }
}
