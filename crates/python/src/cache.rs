//! The registration cache.
#![allow(unsafe_code)] // registers memory that an array keeps

use std::ptr::NonNull;

use doorbell::{Invalidation, RegionCache, StateKind};
use pyo3::prelude::*;

use crate::arguments::{CacheConfiguration, access};
use crate::array::Array;
use crate::detached::{Detached, call};
use crate::device::PyDomain;
use crate::error::{is_gone, state_exception};
use crate::memory::{check_writable, default_access};
use crate::region::{Items, PyRegion};

/// Registrations that outlive their use.
#[pyclass(frozen, module = "doorbell", name = "RegionCache")]
pub struct PyRegionCache(Detached<RegionCache>);

impl PyRegionCache {
    fn inner(&self) -> PyResult<&RegionCache> {
        self.0.get().ok_or_else(is_gone)
    }
}

#[pymethods]
impl PyRegionCache {
    #[new]
    #[pyo3(signature = (domain, config = None))]
    fn new(
        py: Python<'_>,
        domain: &Bound<'_, PyDomain>,
        config: Option<CacheConfiguration>,
    ) -> PyResult<PyRegionCache> {
        let (domain, config) = (domain.get().inner()?, config.unwrap_or_default().0);
        call(py, || RegionCache::new(domain, &config))
            .map(|cache| PyRegionCache(Detached::new(cache)))
    }

    /// A region over the memory of an array of the host, as `Domain.register` makes one, by a registration of the cache if it has one. The region keeps the array.
    #[pyo3(signature = (array, access = None))]
    fn register(&self, array: &Bound<'_, PyAny>, access: Option<u32>) -> PyResult<PyRegion> {
        let py = array.py();
        let cache = self.inner()?;
        let found = Array::of(array)?;
        if found.gpu.is_some() {
            let reason = "the array is a GPU's; register it by `Domain.register`";
            return Err(state_exception(
                py,
                StateKind::Memory,
                "registration cache",
                reason,
            ));
        }
        let rights = self::access(access, default_access(&found))?;
        check_writable(py, &found, rights)?;
        let Array {
            start,
            len_bytes,
            itemsize,
            element,
            is_readonly,
            owner,
            ..
        } = found;
        let region = call(py, move || {
            let start = NonNull::new(start as *mut u8).unwrap_or(NonNull::dangling());
            // SAFETY: the owner keeps the memory, of which nobody in here has a reference.
            unsafe { cache.get_from_owner(start, len_bytes, rights, Box::new(owner)) }
        })?;
        let items = Items {
            bytes: itemsize,
            element,
        };
        Ok(PyRegion::new(region, items, is_readonly))
    }

    /// How the cache learns of memory that is unmapped: "kernel". None: not at all, so that it keeps nothing; `reason` says why.
    #[getter]
    fn invalidation(&self) -> PyResult<Option<&'static str>> {
        Ok(match self.inner()?.invalidation() {
            Invalidation::Kernel => Some("kernel"),
            _ => None,
        })
    }

    /// Why it keeps nothing.
    #[getter]
    fn reason(&self) -> PyResult<Option<String>> {
        Ok(match self.inner()?.invalidation() {
            Invalidation::None(reason) => Some(reason.clone()),
            _ => None,
        })
    }

    /// Requests that an entry answered.
    #[getter]
    fn hits(&self, py: Python<'_>) -> PyResult<u64> {
        let cache = self.inner()?;
        Ok(py.detach(|| cache.counters().hits))
    }

    /// Requests that needed a new registration.
    #[getter]
    fn misses(&self, py: Python<'_>) -> PyResult<u64> {
        let cache = self.inner()?;
        Ok(py.detach(|| cache.counters().misses))
    }

    /// The number of entries.
    fn __len__(&self, py: Python<'_>) -> PyResult<usize> {
        let cache = self.inner()?;
        Ok(py.detach(|| cache.size().0))
    }

    /// Bytes of all entries.
    #[getter]
    fn nbytes(&self, py: Python<'_>) -> PyResult<u64> {
        let cache = self.inner()?;
        Ok(py.detach(|| cache.size().1))
    }
}
