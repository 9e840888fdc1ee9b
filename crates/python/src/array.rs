//! Where the memory of an array is: of an object with the buffer protocol, with `__cuda_array_interface__`, or with `__dlpack__`. Nothing is copied.
#![allow(unsafe_code)] // reads the structure of DLPack behind a capsule

use std::ffi::c_void;
use std::ptr::NonNull;

use doorbell::{DataType, StateKind};
use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::{PyBufferError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyDict, PyMemoryView};

use crate::error::state_exception;

/// Memory of an array.
pub struct Array {
    pub start: u64,
    pub len_bytes: u64,
    pub itemsize: u64,
    /// The type of its items, if reductions know it.
    pub element: Option<DataType>,
    pub is_readonly: bool,
    /// The GPU whose memory it is; `Some(None)`: one that the array does not name.
    pub gpu: Option<Option<u32>>,
    /// What keeps the memory.
    pub owner: Py<PyAny>,
}

/// `DLTensor` of dlpack.h.
#[repr(C)]
struct DlTensor {
    data: *mut c_void,
    device_type: i32,
    device_id: i32,
    dimensions: i32,
    code: u8,
    bits: u8,
    lanes: u16,
    shape: *const i64,
    strides: *const i64,
    byte_offset: u64,
}

/// Those of its device types that are known here: `kDLCPU`, `kDLCUDA`, `kDLCUDAHost`, `kDLCUDAManaged`.
const CPU: i32 = 1;
const CUDA: i32 = 2;
const CUDA_HOST: i32 = 3;
const CUDA_MANAGED: i32 = 13;

/// The name of a capsule that nobody has consumed.
const FRESH: &std::ffi::CStr = c"dltensor";

impl Array {
    /// Finds the memory of an array.
    pub fn of(object: &Bound<'_, PyAny>) -> PyResult<Array> {
        let py = object.py();
        if let Ok(view) = PyMemoryView::from(object) {
            return Array::of_buffer(&view);
        }
        if let Some(interface) = object.getattr_opt("__cuda_array_interface__")? {
            return Array::of_cuda(object, &interface.cast_into()?);
        }
        if object.hasattr("__dlpack__")? {
            return Array::of_dlpack(object);
        }
        Err(PyTypeError::new_err(format!(
            "{} has neither the buffer protocol nor `__cuda_array_interface__` nor `__dlpack__`",
            object
                .get_type()
                .name()
                .unwrap_or_else(|_| pyo3::types::PyString::new(py, "the object"))
        )))
    }

    /// The view holds the buffer: its owner neither moves nor frees it meanwhile.
    fn of_buffer(view: &Bound<'_, PyMemoryView>) -> PyResult<Array> {
        let buffer = PyUntypedBuffer::get(view)?;
        if !buffer.is_c_contiguous() {
            return Err(not_contiguous());
        }
        Ok(Array {
            start: buffer.buf_ptr() as u64,
            len_bytes: buffer.len_bytes() as u64,
            itemsize: buffer.item_size() as u64,
            element: element_of_format(buffer.format().to_bytes(), buffer.item_size()),
            is_readonly: buffer.readonly(),
            gpu: None,
            owner: view.clone().into_any().unbind(),
        })
    }

    /// <https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html>
    fn of_cuda(object: &Bound<'_, PyAny>, interface: &Bound<'_, PyDict>) -> PyResult<Array> {
        let needed = |name: &str| {
            let found = interface.get_item(name)?;
            found.ok_or_else(|| {
                PyBufferError::new_err(format!("`__cuda_array_interface__` has no `{name}`"))
            })
        };
        let (start, is_readonly): (u64, bool) = needed("data")?.extract()?;
        let shape: Vec<i64> = needed("shape")?.extract()?;
        let kind: String = needed("typestr")?.extract()?;
        // "<f4": the byte order, the kind, and the bytes.
        let itemsize = kind.get(2..).and_then(|bytes| bytes.parse().ok());
        let itemsize: u64 = itemsize.ok_or_else(|| {
            PyBufferError::new_err(format!("`{kind}` is no type of fixed length"))
        })?;
        let strides: Option<Vec<i64>> = match interface.get_item("strides")? {
            Some(strides) => strides.extract()?,
            None => None,
        };
        let in_items = strides.map(|bytes| {
            bytes
                .iter()
                .map(|stride| stride / itemsize.max(1) as i64)
                .collect::<Vec<_>>()
        });
        let len = items(&shape, in_items.as_deref())?;
        // torch, cupy and others name the device like this.
        let gpu = match object.getattr_opt("__dlpack_device__")? {
            Some(device) => Some(device.call0()?.extract::<(i32, u32)>()?.1),
            None => None,
        };
        Ok(Array {
            start,
            len_bytes: len * itemsize,
            itemsize,
            element: element_of_typestr(&kind, itemsize),
            is_readonly,
            gpu: Some(gpu),
            owner: object.clone().unbind(),
        })
    }

    /// The capsule is not consumed: it keeps the tensor, whose deleter it calls when it is dropped.
    fn of_dlpack(object: &Bound<'_, PyAny>) -> PyResult<Array> {
        let py = object.py();
        let capsule = object
            .call_method0("__dlpack__")?
            .cast_into::<PyCapsule>()?;
        let managed: NonNull<c_void> = capsule.pointer_checked(Some(FRESH))?;
        // SAFETY: a capsule of this name has a `DLManagedTensor`, whose first member is the `DLTensor`; the capsule keeps it and is kept here.
        let tensor = unsafe { managed.cast::<DlTensor>().as_ref() };
        let dimensions = usize::try_from(tensor.dimensions).unwrap_or(0);
        let shape = match dimensions {
            0 => &[][..],
            // SAFETY: by DLPack the shape has that many numbers.
            _ => unsafe { std::slice::from_raw_parts(tensor.shape, dimensions) },
        };
        // SAFETY: as the shape; null stands for an array that is contiguous.
        let strides = (!tensor.strides.is_null() && dimensions > 0)
            .then(|| unsafe { std::slice::from_raw_parts(tensor.strides, dimensions) });
        let itemsize = (u64::from(tensor.bits) * u64::from(tensor.lanes)).div_ceil(8);
        let gpu = match tensor.device_type {
            CPU | CUDA_HOST => None,
            CUDA | CUDA_MANAGED => Some(u32::try_from(tensor.device_id).ok()),
            other => {
                let reason = format!("DLPack's device type {other} is neither a CPU's nor CUDA's");
                return Err(state_exception(
                    py,
                    StateKind::Unsupported,
                    "register",
                    &reason,
                ));
            }
        };
        Ok(Array {
            start: (tensor.data as u64).wrapping_add(tensor.byte_offset),
            len_bytes: items(shape, strides)? * itemsize,
            itemsize,
            element: match tensor.lanes {
                1 => element_of_code(tensor.code, itemsize),
                _ => None,
            },
            is_readonly: false,
            gpu,
            owner: capsule.into_any().unbind(),
        })
    }
}

/// A type by the letter of its kind, and its bytes.
fn element(kind: char, itemsize: u64) -> Option<DataType> {
    match (kind, itemsize) {
        ('f', 2) => Some(DataType::F16),
        ('f', 4) => Some(DataType::F32),
        ('f', 8) => Some(DataType::F64),
        ('i', 4) => Some(DataType::I32),
        ('i', 8) => Some(DataType::I64),
        ('u', 1) => Some(DataType::U8),
        _ => None,
    }
}

/// The type of a buffer's format, in the letters of the module `struct`.
fn element_of_format(format: &[u8], itemsize: usize) -> Option<DataType> {
    let letter = match format {
        [letter] | [b'@' | b'=', letter] => *letter,
        [b'<', letter] if cfg!(target_endian = "little") => *letter,
        _ => return None,
    };
    let kind = match letter {
        b'e' | b'f' | b'd' => 'f',
        b'i' | b'l' | b'q' => 'i',
        b'B' => 'u',
        _ => return None,
    };
    element(kind, itemsize as u64)
}

/// The type of numpy's name, such as "<f4".
fn element_of_typestr(name: &str, itemsize: u64) -> Option<DataType> {
    let mut letters = name.chars();
    let is_native = matches!(letters.next(), Some('<' | '|' | '='));
    letters
        .next()
        .filter(|_| is_native)
        .and_then(|kind| element(kind, itemsize))
}

/// The type of DLPack's `DLDataTypeCode`.
fn element_of_code(code: u8, itemsize: u64) -> Option<DataType> {
    match code {
        0 => element('i', itemsize),
        1 => element('u', itemsize),
        2 => element('f', itemsize),
        4 if itemsize == 2 => Some(DataType::Bf16),
        _ => None,
    }
}

/// The number of items of a contiguous array; strides are in items.
fn items(shape: &[i64], strides: Option<&[i64]>) -> PyResult<u64> {
    let mut count = 1i64;
    for (at, len) in shape.iter().enumerate().rev() {
        let stride = strides.map_or(Some(count), |strides| strides.get(at).copied());
        if *len > 1 && stride != Some(count) {
            return Err(not_contiguous());
        }
        count = count
            .checked_mul(*len)
            .ok_or_else(|| PyBufferError::new_err("the shape is no array's"))?;
    }
    u64::try_from(count).map_err(|_| PyBufferError::new_err("the shape is no array's"))
}

fn not_contiguous() -> PyErr {
    PyBufferError::new_err(
        "the array is not contiguous; a copy is (`contiguous()`), or the base that it is a view of",
    )
}
