//! Memory that calls take: regions, slices of them, and arrays, which are registered for the operation.
#![allow(unsafe_code)] // registers memory that an array keeps

use std::ptr::NonNull;

use doorbell::{Access, DataType, Error, ProtectionDomain, Region, Slice, StateKind};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;

use crate::arguments::{RegionPart, access};
use crate::array::Array;
use crate::detached::{Detached, call};
use crate::error::state_exception;
use crate::region::{Items, PyRegion, PySlice};

/// What a device may do with an array if nothing else is asked for.
pub fn default_access(array: &Array) -> Access {
    match array.is_readonly {
        true => Access::LOCAL_READ,
        false => Access::LOCAL_WRITE,
    }
}

/// Fails for rights to write a read-only array.
pub fn check_writable(py: Python<'_>, array: &Array, rights: Access) -> PyResult<()> {
    let writes = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_ATOMIC;
    if !array.is_readonly || rights.bits() & writes.bits() == 0 {
        return Ok(());
    }
    let reason = "the array is read-only, and these access rights let a device write it";
    Err(state_exception(py, StateKind::NoAccess, "register", reason))
}

/// When a call uses the memory of an array.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum MemoryUse {
    /// As soon as the call is made, in the order of no stream. So the call waits for the stream that the array names.
    Now,
    /// In the order of a stream of the caller's, who orders it with the array's.
    OnStream,
}

/// Registers the memory of an array where it is. The region keeps the array.
pub fn register(
    domain: &ProtectionDomain,
    array: &Bound<'_, PyAny>,
    access: Option<u32>,
    used: MemoryUse,
) -> PyResult<PyRegion> {
    let py = array.py();
    let found = Array::of(array)?;
    let rights = self::access(access, default_access(&found))?;
    check_writable(py, &found, rights)?;
    if used == MemoryUse::Now {
        found.settle(py)?;
    }
    let Array {
        start,
        len_bytes,
        itemsize,
        element,
        is_readonly,
        gpu,
        owner,
        ..
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
    let items = Items {
        bytes: itemsize,
        element,
    };
    Ok(PyRegion::new(region, items, is_readonly))
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
    use doorbell::DeviceBuffer;

    call(py, move || {
        let context = Array::context(gpu)?;
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

/// Memory of an operation, in the order of its bytes.
pub struct ArrayMemory {
    // Often the last handle of an array's registration.
    part: Detached<RegionPart>,
    pub items: Items,
}

impl ArrayMemory {
    /// A region, a slice, or an array, which is registered with that access.
    pub fn of(
        domain: &ProtectionDomain,
        object: &Bound<'_, PyAny>,
        rights: Access,
        used: MemoryUse,
    ) -> PyResult<ArrayMemory> {
        if let Ok(slice) = object.cast::<PySlice>() {
            let slice = slice.get();
            return Ok(ArrayMemory {
                part: Detached::new(slice.span()?),
                items: slice.items(),
            });
        }
        if let Ok(region) = object.cast::<PyRegion>() {
            return ArrayMemory::whole(region.get());
        }
        ArrayMemory::whole(&register(domain, object, Some(rights.bits()), used)?)
    }

    fn whole(region: &PyRegion) -> PyResult<ArrayMemory> {
        Ok(ArrayMemory {
            part: Detached::new(region.whole()?),
            items: region.items(),
        })
    }

    /// One of them, or a sequence of several.
    pub fn several(
        domain: &ProtectionDomain,
        object: &Bound<'_, PyAny>,
        rights: Access,
        used: MemoryUse,
    ) -> PyResult<Vec<ArrayMemory>> {
        // Arrays can be iterated, too, so these two kinds only.
        let is_sequence = object.is_instance_of::<pyo3::types::PyList>()
            || object.is_instance_of::<pyo3::types::PyTuple>();
        if !is_sequence {
            return Ok(vec![ArrayMemory::of(domain, object, rights, used)?]);
        }
        let items = object.try_iter()?;
        items
            .map(|item| ArrayMemory::of(domain, &item?, rights, used))
            .collect()
    }

    pub fn slice(&self) -> doorbell::Result<Slice<'_>> {
        let part = self.part.get().ok_or_else(|| {
            Error::state(StateKind::Deregistered, "slice", "the memory is dropped")
        })?;
        part.region.slice(part.offset, part.len_bytes)
    }

    pub fn len_bytes(&self) -> u64 {
        self.part.get().map_or(0, |part| part.len_bytes)
    }

    /// The type of the items, by the argument or by the array.
    pub fn element(&self, named: Option<DataType>) -> PyResult<DataType> {
        named.or(self.items.element).ok_or_else(|| {
            PyTypeError::new_err("the items have no type that reductions know; name one by `dtype`")
        })
    }
}

/// Makes work of several.
pub fn slices(memories: &[ArrayMemory]) -> doorbell::Result<Vec<Slice<'_>>> {
    memories.iter().map(ArrayMemory::slice).collect()
}
