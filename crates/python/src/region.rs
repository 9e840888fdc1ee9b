//! Registered memory, of this process and of peers.
#![allow(unsafe_code)] // shows the memory of a region to Python

use std::ffi::{c_int, c_void};
use std::hash::{DefaultHasher, Hash, Hasher};

use doorbell::{DataType, Error, Region, RegionKind, RemoteRegion, RemoteSlice};
use pyo3::exceptions::{PyBufferError, PyTypeError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PySlice as PySliceObject};

use crate::arguments::{RegionPart, to_access};
use crate::detached::Detached;
use crate::error::{class, is_gone, to_exception};

/// The bytes of `region[from:to]`, whose numbers count items. Unlike Python's sequences this cuts nothing off: an end beyond the region is an error.
fn bytes_of(slice: &Bound<'_, PyAny>, itemsize: u64, limit_bytes: u64) -> PyResult<(u64, u64)> {
    let py = slice.py();
    let slice = slice
        .cast::<PySliceObject>()
        .map_err(|_| PyTypeError::new_err("a region is cut by a slice, such as region[0:n]"))?;
    let bound = |name: &str| slice.getattr(name)?.extract::<Option<i64>>();
    if bound("step")?.is_some_and(|step| step != 1) {
        return Err(PyValueError::new_err("a slice of a region has no step"));
    }
    let items = (limit_bytes / itemsize.max(1)) as i64;
    let from_end = |at: i64| if at < 0 { at.saturating_add(items) } else { at };
    let start = from_end(bound("start")?.unwrap_or(0));
    let stop = from_end(bound("stop")?.unwrap_or(items));
    let inside = 0 <= start && start <= stop && stop <= items;
    let bytes = |items: i64| (items.unsigned_abs()).saturating_mul(itemsize);
    if inside {
        return Ok((bytes(start), bytes(stop - start)));
    }
    Err(to_exception(
        py,
        Error::OutOfBounds {
            argument: "slice",
            offset: bytes(start),
            len_bytes: bytes(stop.saturating_sub(start).max(0)),
            limit_bytes,
            what: "the region",
        },
    ))
}

/// Registered memory of this process.
#[pyclass(frozen, module = "doorbell", name = "Region")]
pub struct PyRegion {
    inner: Detached<Region>,
    items: Items,
    is_readonly: bool,
}

/// What the items of memory are.
#[derive(Clone, Copy)]
pub struct Items {
    pub bytes: u64,
    /// The type, if reductions know it.
    pub element: Option<DataType>,
}

impl Items {
    /// Of memory that no array describes.
    pub const BYTES: Items = Items {
        bytes: 1,
        element: None,
    };

    /// The length of that many items, without overflow.
    pub fn len_bytes(self, items: u64) -> u64 {
        items.saturating_mul(self.bytes)
    }

    fn dtype<'py>(self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        let class = class(py, "doorbell._types", "DataType")?;
        let named = |element: DataType| class.call1((element.name(),));
        self.element.map(named).transpose()
    }
}

impl PyRegion {
    pub fn new(region: Region, items: Items, is_readonly: bool) -> PyRegion {
        PyRegion {
            inner: Detached::new(region),
            items,
            is_readonly,
        }
    }

    pub fn items(&self) -> Items {
        self.items
    }

    pub fn inner(&self) -> PyResult<&Region> {
        self.inner.get().ok_or_else(is_gone)
    }

    pub fn whole(&self) -> PyResult<RegionPart> {
        let region = self.inner()?.clone();
        let len_bytes = region.len_bytes();
        Ok(RegionPart {
            region,
            offset: 0,
            len_bytes,
        })
    }
}

#[pymethods]
impl PyRegion {
    fn __len__(&self) -> PyResult<usize> {
        Ok((self.inner()?.len_bytes() / self.items.bytes.max(1)) as usize)
    }

    fn __getitem__(&self, items: &Bound<'_, PyAny>) -> PyResult<PySlice> {
        let region = self.inner()?;
        let (offset, len_bytes) = bytes_of(items, self.items.bytes, region.len_bytes())?;
        Ok(PySlice::new(region.clone(), offset, len_bytes, self.items))
    }

    /// The address of the first byte, in this process or on the GPU.
    #[getter]
    fn address(&self) -> PyResult<usize> {
        Ok(self.inner()?.as_ptr().addr())
    }

    /// Bytes of the region.
    #[getter]
    fn nbytes(&self) -> PyResult<u64> {
        Ok(self.inner()?.len_bytes())
    }

    /// Bytes of an item.
    #[getter]
    fn itemsize(&self) -> u64 {
        self.items.bytes
    }

    /// The type of its items, if reductions know it.
    #[getter]
    fn dtype<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        self.items.dtype(py)
    }

    /// Whether the memory is read-only.
    #[getter]
    fn readonly(&self) -> bool {
        self.is_readonly
    }

    /// The access rights of the device and the peers.
    #[getter]
    fn access<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        to_access(py, self.inner()?.access())
    }

    /// How the device accesses the memory: "host", or for memory of a GPU "dmabuf", "peermem" or "copies of its driver".
    #[getter]
    fn kind(&self) -> PyResult<String> {
        Ok(self.inner()?.kind().to_string())
    }

    /// Whether the memory is still registered.
    #[getter]
    fn registered(&self) -> PyResult<bool> {
        Ok(self.inner()?.is_registered())
    }

    /// What a peer needs to read or write the region.
    #[getter]
    fn remote(&self) -> PyResult<PyRemoteRegion> {
        Ok(PyRemoteRegion {
            inner: self.inner()?.remote(),
            itemsize: self.items.bytes,
        })
    }

    /// A part by bytes.
    fn span(&self, py: Python<'_>, offset: u64, nbytes: u64) -> PyResult<PySlice> {
        let region = self.inner()?;
        region
            .slice(offset, nbytes)
            .map_err(|error| to_exception(py, error))?;
        Ok(PySlice::new(region.clone(), offset, nbytes, self.items))
    }

    /// Ends the registration now. Whether it had not ended yet.
    fn deregister(&self, py: Python<'_>) -> PyResult<bool> {
        let region = self.inner()?;
        py.detach(|| region.deregister())
            .map_err(|error| to_exception(py, error))
    }

    /// # Safety
    /// As Python's `bf_getbuffer`.
    unsafe fn __getbuffer__(
        slf: Bound<'_, Self>,
        view: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        let this = slf.get();
        let region = this.inner()?;
        if region.kind() != RegionKind::Host {
            return Err(PyBufferError::new_err("the memory is a GPU's"));
        }
        let start: *mut c_void = region.as_ptr().cast();
        let len_bytes = isize::try_from(region.len_bytes())
            .map_err(|_| PyBufferError::new_err("the region is too long"))?;
        let is_readonly = c_int::from(this.is_readonly);
        // SAFETY: `view` is Python's to be filled; the memory stays as long as the region, which the view keeps.
        match unsafe {
            ffi::PyBuffer_FillInfo(view, slf.as_ptr(), start, len_bytes, is_readonly, flags)
        } {
            0 => Ok(()),
            _ => Err(PyErr::fetch(slf.py())),
        }
    }

    fn __repr__(&self) -> PyResult<String> {
        let region = self.inner()?;
        Ok(format!(
            "<doorbell.Region of {} bytes at {:#x}>",
            region.len_bytes(),
            region.as_ptr().addr()
        ))
    }
}

/// A part of a region. It keeps the region.
#[pyclass(frozen, module = "doorbell", name = "Slice")]
pub struct PySlice {
    region: Detached<Region>,
    offset: u64,
    len_bytes: u64,
    items: Items,
}

impl PySlice {
    fn new(region: Region, offset: u64, len_bytes: u64, items: Items) -> PySlice {
        PySlice {
            region: Detached::new(region),
            offset,
            len_bytes,
            items,
        }
    }

    pub fn items(&self) -> Items {
        self.items
    }

    pub fn span(&self) -> PyResult<RegionPart> {
        Ok(RegionPart {
            region: self.region.get().ok_or_else(is_gone)?.clone(),
            offset: self.offset,
            len_bytes: self.len_bytes,
        })
    }
}

#[pymethods]
impl PySlice {
    /// The first byte, counted from the beginning of the region.
    #[getter]
    fn offset(&self) -> u64 {
        self.offset
    }

    /// Bytes of the slice.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.len_bytes
    }

    fn __repr__(&self) -> String {
        format!(
            "<doorbell.Slice of {} bytes from {}>",
            self.len_bytes, self.offset
        )
    }
}

/// A region of a peer.
#[pyclass(frozen, module = "doorbell", name = "RemoteRegion")]
pub struct PyRemoteRegion {
    pub inner: RemoteRegion,
    itemsize: u64,
}

#[pymethods]
impl PyRemoteRegion {
    #[new]
    #[pyo3(signature = (data, itemsize = 1))]
    fn new(data: &[u8], itemsize: u64) -> PyResult<PyRemoteRegion> {
        let data: &[u8; RemoteRegion::BYTES] = data.try_into().map_err(|_| {
            PyValueError::new_err(format!(
                "a remote region has {} bytes, not {}",
                RemoteRegion::BYTES,
                data.len()
            ))
        })?;
        if itemsize == 0 {
            return Err(PyValueError::new_err("an item has at least one byte"));
        }
        let inner = RemoteRegion::from_bytes(data);
        Ok(PyRemoteRegion { inner, itemsize })
    }

    fn __len__(&self) -> usize {
        (self.inner.len_bytes / self.itemsize.max(1)) as usize
    }

    fn __getitem__(&self, items: &Bound<'_, PyAny>) -> PyResult<PyRemoteSlice> {
        let (offset, len_bytes) = bytes_of(items, self.itemsize, self.inner.len_bytes)?;
        self.span(items.py(), offset, len_bytes)
    }

    /// The bytes to give to a peer.
    fn __bytes__<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.inner.to_bytes())
    }

    fn __eq__(&self, other: &Bound<'_, PyAny>) -> bool {
        let other = other.cast::<PyRemoteRegion>();
        other.is_ok_and(|other| {
            other.get().inner == self.inner && other.get().itemsize == self.itemsize
        })
    }

    fn __hash__(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.inner.to_bytes().hash(&mut hasher);
        hasher.finish()
    }

    /// For pickle.
    fn __getnewargs__<'py>(&self, py: Python<'py>) -> (Bound<'py, PyBytes>, u64) {
        (self.__bytes__(py), self.itemsize)
    }

    /// Bytes of the region.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.inner.len_bytes
    }

    /// Bytes of an item.
    #[getter]
    fn itemsize(&self) -> u64 {
        self.itemsize
    }

    /// A part by bytes.
    fn span(&self, py: Python<'_>, offset: u64, nbytes: u64) -> PyResult<PyRemoteSlice> {
        let slice = self.inner.slice(offset, nbytes);
        slice
            .map(|inner| PyRemoteSlice { inner })
            .map_err(|error| to_exception(py, error))
    }
}

/// A part of a region of a peer.
#[pyclass(frozen, module = "doorbell", name = "RemoteSlice")]
pub struct PyRemoteSlice {
    pub inner: RemoteSlice,
}

#[pymethods]
impl PyRemoteSlice {
    /// Bytes of the slice.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.inner.len_bytes()
    }
}
