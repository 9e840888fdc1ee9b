//! Where the memory of an array is: of an object with the buffer protocol, with `__cuda_array_interface__`, or with `__dlpack__`. Nothing is copied.
#![allow(unsafe_code)] // reads the structure of DLPack behind a capsule

use std::ffi::c_void;
use std::ptr::NonNull;

#[cfg(feature = "cuda")]
use doorbell::CudaContext;
use doorbell::{DataType, StateKind};
use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::{PyBufferError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{IntoPyDict, PyCapsule, PyDict, PyMemoryView};

#[cfg(feature = "cuda")]
use crate::detached::{call, wait};
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
    /// The `cudaStream_t` whose work may still use the memory.
    stream: Option<usize>,
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

/// Says to `__dlpack__` that the memory is not accessed.
const UNORDERED: isize = -1;

/// The default streams as both interfaces number them, and the driver: `CU_STREAM_LEGACY`, `CU_STREAM_PER_THREAD`.
const LEGACY: usize = 1;
#[cfg(feature = "cuda")]
const PER_THREAD: usize = 2;

/// The name of a capsule that nobody has consumed.
const FRESH: &std::ffi::CStr = c"dltensor";

impl Array {
    /// Finds the memory of an array.
    pub fn of(object: &Bound<'_, PyAny>) -> PyResult<Array> {
        let py = object.py();
        if let Ok(view) = PyMemoryView::from(object) {
            check_unmasked(object)?;
            return Array::of_buffer(&view);
        }
        let has_dlpack = object.hasattr("__dlpack__")?;
        match object.getattr_opt("__cuda_array_interface__") {
            Ok(Some(interface)) => return Array::of_cuda(object, &interface.cast_into()?),
            // torch raises for types that have no name there, which DLPack may have.
            Err(error) if !has_dlpack => return Err(error),
            Ok(None) | Err(_) => {}
        }
        if has_dlpack {
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
            stream: None,
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
        let name: String = needed("typestr")?.extract()?;
        let itemsize = bytes_of_typestr(&name)?;
        let given = |name: &str| {
            let found = interface.get_item(name)?;
            PyResult::Ok(found.filter(|value| !value.is_none()))
        };
        if given("mask")?.is_some() {
            return Err(is_masked());
        }
        let strides: Option<Vec<i64>> = match given("strides")? {
            Some(strides) => Some(strides.extract()?),
            None => None,
        };
        let len_bytes = contiguous_bytes(&shape, strides.as_deref(), itemsize, itemsize)?;
        // torch, cupy and others name the device like this.
        let gpu = match object.getattr_opt("__dlpack_device__")? {
            Some(device) => gpu_of(object.py(), device.call0()?.extract()?)?,
            None => Some(None),
        };
        let stream = match given("stream")? {
            Some(stream) => Some(stream.extract::<usize>()?),
            None => None,
        };
        if stream == Some(0) {
            // The interface forbids it: it could mean either default stream.
            return Err(PyBufferError::new_err(
                "0 is no stream of `__cuda_array_interface__`",
            ));
        }
        let exported = (dlpack(object, UNORDERED).ok()).filter(|(tensor, _)| {
            tensor.start() == start && tensor.itemsize().ok() == Some(itemsize)
        });
        let element = match name.chars().nth(1) {
            // Bytes of no type, which torch calls a bfloat16. What DLPack does not export has no type that is known here.
            Some('V') => exported.as_ref().and_then(|(tensor, _)| tensor.element()),
            _ => element_of_typestr(&name, itemsize),
        };
        // A tensor may be given other memory (`tensor.data = other`). The capsule keeps this one.
        let owner = match exported {
            Some((_, capsule)) => (object, capsule).into_pyobject(object.py())?.into_any(),
            None => object.clone(),
        };
        Ok(Array {
            start,
            len_bytes,
            itemsize,
            element,
            is_readonly,
            gpu,
            stream,
            owner: owner.unbind(),
        })
    }

    /// The capsule is not consumed: it keeps the tensor, whose deleter it calls when it is dropped.
    fn of_dlpack(object: &Bound<'_, PyAny>) -> PyResult<Array> {
        let (tensor, capsule) = dlpack(object, LEGACY as isize)?;
        let dimensions = usize::try_from(tensor.dimensions).map_err(|_| no_shape())?;
        if dimensions > 0 && tensor.shape.is_null() {
            return Err(no_shape());
        }
        let shape = match dimensions {
            0 => &[][..],
            // SAFETY: by DLPack the shape has that many numbers; the capsule keeps it.
            _ => unsafe { std::slice::from_raw_parts(tensor.shape, dimensions) },
        };
        // SAFETY: as the shape; null stands for an array that is contiguous.
        let strides = (!tensor.strides.is_null() && dimensions > 0)
            .then(|| unsafe { std::slice::from_raw_parts(tensor.strides, dimensions) });
        let itemsize = tensor.itemsize()?;
        let gpu = gpu_of(object.py(), (tensor.device_type, tensor.device_id))?;
        Ok(Array {
            start: tensor.start(),
            len_bytes: contiguous_bytes(shape, strides, 1, itemsize)?,
            itemsize,
            element: tensor.element(),
            is_readonly: false,
            gpu,
            // The exporter has ordered what it does before this one.
            stream: gpu.is_some().then_some(LEGACY),
            owner: capsule.into_any().unbind(),
        })
    }
}

#[cfg(feature = "cuda")]
impl Array {
    /// The context of the GPU whose memory it is.
    pub fn context(gpu: Option<u32>) -> doorbell::Result<CudaContext> {
        match gpu {
            Some(ordinal) => CudaContext::primary(ordinal),
            None => CudaContext::current().or_else(|_| CudaContext::primary(0)),
        }
    }

    /// Waits until the stream that the array names has executed what it was given so far. For calls that use the memory from this thread, not on a stream.
    pub fn settle(&self, py: Python<'_>) -> PyResult<()> {
        let (Some(gpu), Some(handle)) = (self.gpu, self.stream) else {
            return Ok(());
        };
        let event = call(py, move || {
            let raw = std::ptr::with_exposed_provenance_mut(handle);
            let context = match handle {
                LEGACY | PER_THREAD => Array::context(gpu),
                // SAFETY: a stream, by the interface; the array, which the caller has, keeps it.
                _ => unsafe { CudaContext::of_stream(raw) },
            }?;
            // SAFETY: as above.
            unsafe { context.record_event(raw) }
        })?;
        wait(py, None, |slice| event.synchronize(slice))
    }
}

#[cfg(not(feature = "cuda"))]
impl Array {
    /// Memory of a GPU is refused later.
    pub fn settle(&self, _py: Python<'_>) -> PyResult<()> {
        let _ = self.stream;
        Ok(())
    }
}

/// The tensor of an array with `__dlpack__`, and the capsule that keeps what it leads to. The exporter orders what a GPU still does with the memory before
/// `stream`, as DLPack numbers it.
fn dlpack<'py>(
    object: &Bound<'py, PyAny>,
    stream: isize,
) -> PyResult<(DlTensor, Bound<'py, PyCapsule>)> {
    let device: Option<(i32, i32)> = match object.getattr_opt("__dlpack_device__")? {
        Some(device) => Some(device.call0()?.extract()?),
        None => None,
    };
    let exported = match device {
        // Without a stream torch orders nothing, whatever the standard says.
        Some((CUDA | CUDA_MANAGED, _)) => {
            let named = [("stream", stream)].into_py_dict(object.py())?;
            object.call_method("__dlpack__", (), Some(&named))?
        }
        // Other devices have no streams.
        _ => object.call_method0("__dlpack__")?,
    };
    let capsule = exported.cast_into::<PyCapsule>()?;
    let managed: NonNull<c_void> = capsule.pointer_checked(Some(FRESH))?;
    // SAFETY: a capsule of this name has a `DLManagedTensor`, whose first member is the `DLTensor`; the capsule keeps it.
    let tensor = unsafe { managed.cast::<DlTensor>().read() };
    Ok((tensor, capsule))
}

impl DlTensor {
    fn start(&self) -> u64 {
        (self.data as u64).wrapping_add(self.byte_offset)
    }

    /// Types of less than a byte may be packed, and how is not said.
    fn itemsize(&self) -> PyResult<u64> {
        let bits = u64::from(self.bits) * u64::from(self.lanes);
        if !bits.is_multiple_of(8) {
            return Err(PyBufferError::new_err(format!(
                "an item has {bits} bits, which are no whole bytes"
            )));
        }
        Ok(bits / 8)
    }

    fn element(&self) -> Option<DataType> {
        match self.lanes {
            1 => element_of_code(self.code, u64::from(self.bits).div_ceil(8)),
            _ => None,
        }
    }
}

/// The GPU of a device as DLPack names it; None is the host.
fn gpu_of(py: Python<'_>, (device_type, device): (i32, i32)) -> PyResult<Option<Option<u32>>> {
    match device_type {
        CPU | CUDA_HOST => Ok(None),
        CUDA | CUDA_MANAGED => Ok(Some(u32::try_from(device).ok())),
        other => {
            let reason = format!("DLPack's device type {other} is neither a CPU's nor CUDA's");
            Err(state_exception(
                py,
                StateKind::Unsupported,
                "register",
                &reason,
            ))
        }
    }
}

/// The buffer of numpy's masked arrays has all items, and says nothing of the mask.
fn check_unmasked(object: &Bound<'_, PyAny>) -> PyResult<()> {
    let modules = object.py().import("sys")?.getattr("modules")?;
    // Without the module there is no such array.
    let Ok(masked) =
        (modules.get_item("numpy.ma")).and_then(|module| module.getattr("MaskedArray"))
    else {
        return Ok(());
    };
    match object.is_instance(&masked)? {
        true => Err(is_masked()),
        false => Ok(()),
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

/// The bytes of an item by numpy's name of its type: "<f4" is the byte order, the kind, and the bytes; times have their unit behind that.
fn bytes_of_typestr(name: &str) -> PyResult<u64> {
    let unknown = || PyBufferError::new_err(format!("`{name}` is no type of fixed length"));
    let mut letters = name.chars();
    let (Some('<' | '>' | '|' | '='), Some(kind)) = (letters.next(), letters.next()) else {
        return Err(unknown());
    };
    let rest = letters.as_str();
    let (bytes, unit) = rest.split_at(rest.find('[').unwrap_or(rest.len()));
    // Texts count characters, bit fields bits; objects are addresses in this process.
    let counts_bytes = match kind {
        'b' | 'i' | 'u' | 'f' | 'c' | 'V' | 'S' => unit.is_empty(),
        'm' | 'M' => true,
        _ => false,
    };
    match bytes.parse() {
        Ok(bytes) if counts_bytes => Ok(bytes),
        _ => Err(unknown()),
    }
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

/// The bytes of a contiguous array; the stride from an item to the next one is `step`.
fn contiguous_bytes(
    shape: &[i64],
    strides: Option<&[i64]>,
    step: u64,
    itemsize: u64,
) -> PyResult<u64> {
    if strides.is_some_and(|strides| strides.len() != shape.len()) {
        return Err(no_shape());
    }
    let mut count = 1u64;
    for (at, len) in shape.iter().enumerate().rev() {
        let len = u64::try_from(*len).map_err(|_| no_shape())?;
        let stride = strides.and_then(|strides| strides.get(at).copied());
        if len > 1
            && let Some(stride) = stride
            && u64::try_from(stride).ok() != count.checked_mul(step)
        {
            return Err(not_contiguous());
        }
        count = count.checked_mul(len).ok_or_else(no_shape)?;
    }
    count.checked_mul(itemsize).ok_or_else(no_shape)
}

fn no_shape() -> PyErr {
    PyBufferError::new_err("the shape is no array's")
}

fn is_masked() -> PyErr {
    PyBufferError::new_err(
        "the array has a mask, which a transfer would ignore; register its data without the mask",
    )
}

fn not_contiguous() -> PyErr {
    PyBufferError::new_err(
        "the array is not contiguous; a copy is (`contiguous()`), or the base that it is a view of",
    )
}
