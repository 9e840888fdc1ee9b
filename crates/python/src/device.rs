//! Devices and protection domains.
#![allow(unsafe_code)] // registers memory that Python objects own

use std::ptr::NonNull;

use doorbell::{Access, Device, Endpoint, EndpointConfig, ProtectionDomain, Region, StateKind};
use pyo3::prelude::*;

use crate::arguments::{Configuration, access};
use crate::array::Array;
use crate::detached::{Detached, call};
use crate::endpoint::PyEndpoint;
use crate::error::{is_gone, state_exception};
use crate::region::PyRegion;

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

    fn inner(&self) -> PyResult<&ProtectionDomain> {
        self.0.get().ok_or_else(is_gone)
    }
}

#[pymethods]
impl PyDomain {
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
        Ok(PyRegion::new(region, 1, false))
    }

    /// Registers the memory of an array where it is. The region keeps the array.
    #[pyo3(signature = (array, access = None))]
    fn register(&self, array: &Bound<'_, PyAny>, access: Option<u32>) -> PyResult<PyRegion> {
        let py = array.py();
        let found = Array::of(array)?;
        let default = if found.is_readonly {
            Access::LOCAL_READ
        } else {
            Access::LOCAL_WRITE
        };
        let rights = self::access(access, default)?;
        let writes = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_ATOMIC;
        if found.is_readonly && rights.bits() & writes.bits() != 0 {
            let reason = "the array is read-only, and these access rights let a device write it";
            return Err(state_exception(py, StateKind::NoAccess, "register", reason));
        }
        let domain = self.inner()?;
        let Array {
            start,
            len_bytes,
            itemsize,
            is_readonly,
            gpu,
            owner,
        } = found;
        let region = match gpu {
            Some(gpu) => register_device(py, domain, (start, len_bytes), gpu, rights, owner)?,
            None => call(py, move || {
                let start = NonNull::new(start as *mut u8).unwrap_or(NonNull::dangling());
                // SAFETY: the owner keeps the memory, which nobody in here has a reference to. That Python code uses the array while a device writes
                // it is what RDMA is: it sees bytes of before or after.
                unsafe {
                    Region::register_from_owner(domain, start, len_bytes, rights, Box::new(owner))
                }
            })?,
        };
        Ok(PyRegion::new(region, itemsize, is_readonly))
    }

    /// A new endpoint, which is to be connected.
    #[pyo3(signature = (config = None))]
    fn endpoint(&self, py: Python<'_>, config: Option<Configuration>) -> PyResult<PyEndpoint> {
        let config = config.map_or_else(EndpointConfig::default, |config| config.0);
        let domain = self.inner()?;
        call(py, || Endpoint::new(domain, &config)).map(PyEndpoint::new)
    }
}

#[cfg(feature = "cuda")]
fn register_device(
    py: Python<'_>,
    domain: &ProtectionDomain,
    (start, len_bytes): (u64, u64),
    gpu: Option<u32>,
    access: Access,
    owner: Py<PyAny>,
) -> PyResult<Region> {
    use doorbell::{CudaContext, DeviceBuffer};

    call(py, move || {
        let context = match gpu {
            Some(ordinal) => CudaContext::primary(ordinal),
            None => CudaContext::current().or_else(|_| CudaContext::primary(0)),
        }?;
        // SAFETY: the owner keeps the memory.
        let buffer =
            unsafe { DeviceBuffer::from_owner(&context, start, len_bytes, Box::new(owner)) }?;
        Region::register_device(domain, &buffer, access)
    })
}

#[cfg(not(feature = "cuda"))]
fn register_device(
    py: Python<'_>,
    _domain: &ProtectionDomain,
    _span: (u64, u64),
    _gpu: Option<u32>,
    _access: Access,
    _owner: Py<PyAny>,
) -> PyResult<Region> {
    Err(state_exception(
        py,
        StateKind::Unsupported,
        "register",
        "this package was built without the feature `cuda`",
    ))
}
