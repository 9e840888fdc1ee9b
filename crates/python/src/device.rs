//! Devices and protection domains.

use doorbell::{Access, Device, Endpoint, EndpointConfig, MessageQueue, ProtectionDomain, Region};
use pyo3::prelude::*;

use crate::arguments::{Configuration, MessageConfiguration, access};
use crate::detached::{Detached, Room, call};
use crate::endpoint::PyEndpoint;
use crate::error::is_gone;
use crate::memory::{MemoryUse, register};
use crate::message::PyMessageQueue;
use crate::region::{Items, PyRegion};

/// A NIC.
#[pyclass(frozen, module = "doorbell", name = "Device")]
pub struct PyDevice(Detached<Device>);

impl PyDevice {
    fn inner(&self) -> PyResult<&Device> {
        self.0.get().ok_or_else(is_gone)
    }
}

#[pymethods]
impl PyDevice {
    #[new]
    #[pyo3(signature = (name = "softcx"))]
    fn new(py: Python<'_>, name: &str) -> PyResult<PyDevice> {
        call(py, || Device::open(name)).map(|device| PyDevice(Detached::new(device)))
    }

    /// The names of the devices of this machine, best first.
    #[staticmethod]
    fn list(py: Python<'_>) -> Vec<String> {
        py.detach(Device::list)
    }

    /// The name that the device was opened with.
    #[getter]
    fn name(&self) -> PyResult<&str> {
        Ok(self.inner()?.name())
    }

    /// A new protection domain.
    fn domain(&self) -> PyResult<PyDomain> {
        Ok(PyDomain::new(self.inner()?.protection_domain()))
    }
}

/// What belongs together on a device.
#[pyclass(frozen, module = "doorbell", name = "Domain")]
pub struct PyDomain(Detached<ProtectionDomain>);

impl PyDomain {
    pub fn new(domain: ProtectionDomain) -> PyDomain {
        PyDomain(Detached::new(domain))
    }

    pub fn inner(&self) -> PyResult<&ProtectionDomain> {
        self.0.get().ok_or_else(is_gone)
    }
}

#[pymethods]
impl PyDomain {
    /// The device of the domain.
    #[getter]
    fn device(&self) -> PyResult<PyDevice> {
        Ok(PyDevice(Detached::new(self.inner()?.device().clone())))
    }

    /// Allocates and registers memory of the host, which is zeroed. `memoryview` and `torch.frombuffer` show it.
    #[pyo3(signature = (nbytes, access = None))]
    fn alloc(&self, py: Python<'_>, nbytes: u64, access: Option<u32>) -> PyResult<PyRegion> {
        let rights = self::access(access, Access::LOCAL_WRITE)?;
        let domain = self.inner()?;
        let region = call(py, || Region::alloc(domain, nbytes, rights))?;
        Ok(PyRegion::new(region, Items::BYTES, false))
    }

    /// Registers the memory of an array where it is. The region keeps the array.
    #[pyo3(signature = (array, access = None))]
    fn register(&self, array: &Bound<'_, PyAny>, access: Option<u32>) -> PyResult<PyRegion> {
        register(self.inner()?, array, access, MemoryUse::Now)
    }

    /// A new endpoint, which is to be connected.
    #[pyo3(signature = (config = None))]
    fn endpoint(&self, py: Python<'_>, config: Option<Configuration>) -> PyResult<PyEndpoint> {
        let mut config = config.map_or_else(EndpointConfig::default, |config| config.0);
        let room = Room::of(&mut config);
        let domain = self.inner()?;
        let endpoint = call(py, || Endpoint::new(domain, &config))?;
        Ok(PyEndpoint::new(endpoint, room))
    }

    /// A new message queue, which is to be connected.
    #[pyo3(signature = (config = None))]
    fn message_queue(
        &self,
        py: Python<'_>,
        config: Option<MessageConfiguration>,
    ) -> PyResult<PyMessageQueue> {
        let mut config = config.unwrap_or_default().0;
        let room = Room::of(&mut config.endpoint);
        let domain = self.inner()?;
        let queue = call(py, || MessageQueue::new(domain, &config))?;
        Ok(PyMessageQueue::new(queue, room))
    }
}
