//! The memory of work requests: slices of regions, or whole ones.

use doorbell::{Error, RegionSpan, RemoteSlice, Slice};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;

use crate::arguments::RegionPart;
use crate::error::to_exception;
use crate::region::{PyRegion, PyRemoteRegion, PyRemoteSlice, PySlice};

/// One slice, one region, or several of them.
pub struct RegionParts(Vec<RegionPart>);

impl<'py> FromPyObject<'_, 'py> for RegionParts {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<RegionParts> {
        if let Some(one) = span(&object)? {
            return Ok(RegionParts(vec![one]));
        }
        let several = object.try_iter().map_err(|_| wrong(&object))?;
        let several = several.map(|item| {
            let item = item?;
            span(&item)?.ok_or_else(|| wrong(&item))
        });
        several.collect::<PyResult<_>>().map(RegionParts)
    }
}

fn span(object: &Bound<'_, PyAny>) -> PyResult<Option<RegionPart>> {
    if let Ok(slice) = object.cast::<PySlice>() {
        return slice.get().span().map(Some);
    }
    match object.cast::<PyRegion>() {
        Ok(region) => region.get().whole().map(Some),
        Err(_) => Ok(None),
    }
}

fn wrong(object: &Bound<'_, PyAny>) -> PyErr {
    PyTypeError::new_err(format!(
        "slices are parts of regions, not {}; `domain.register` makes a region of an array",
        object.get_type()
    ))
}

impl RegionParts {
    /// Makes work of the slices.
    pub fn with<T>(
        &self,
        work: impl FnOnce(&[Slice<'_>]) -> doorbell::Result<T>,
    ) -> doorbell::Result<T> {
        let slices = self
            .0
            .iter()
            .map(|span| span.region.slice(span.offset, span.len_bytes));
        work(&slices.collect::<doorbell::Result<Vec<_>>>()?)
    }
}

impl RegionParts {
    /// The only one.
    pub fn one(&self, argument: &'static str) -> doorbell::Result<Slice<'_>> {
        let part = self.one_part(argument)?;
        part.region.slice(part.offset, part.len_bytes)
    }

    /// The only one, of any length.
    pub fn one_span(&self, argument: &'static str) -> doorbell::Result<RegionSpan<'_>> {
        let part = self.one_part(argument)?;
        part.region.span(part.offset, part.len_bytes)
    }

    fn one_part(&self, argument: &'static str) -> doorbell::Result<&RegionPart> {
        match self.0.as_slice() {
            [part] => Ok(part),
            several => Err(Error::Range {
                argument,
                value: several.len() as u64,
                min: 1,
                max: 1,
            }),
        }
    }
}

/// Memory of a peer: a slice, or a whole region.
pub struct RemotePart(pub RemoteSlice);

impl<'py> FromPyObject<'_, 'py> for RemotePart {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<RemotePart> {
        if let Ok(slice) = object.cast::<PyRemoteSlice>() {
            return Ok(RemotePart(slice.get().inner));
        }
        let region = object.cast::<PyRemoteRegion>()?.get();
        let whole = region.inner.slice(0, region.inner.len_bytes);
        whole
            .map(RemotePart)
            .map_err(|error| to_exception(object.py(), error))
    }
}
