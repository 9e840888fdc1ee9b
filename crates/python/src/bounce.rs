//! Transfers of memory that no NIC reaches, in chunks through pinned memory.
#![allow(unsafe_code)] // gives addresses of arrays to the engine that copies

use std::sync::Mutex;
use std::time::Duration;

use doorbell::{
    Bounce, Endpoint, Error, MemcpyEngine, ProtectionDomain, RemoteRegion, RemoteSlice, StateKind,
};
use pyo3::prelude::*;

use crate::arguments::{BounceConfiguration, timeout};
use crate::array::Array;
use crate::detached::{Detached, call, lock, wait_whole};
use crate::device::PyDomain;
use crate::endpoint::PyEndpoint;
use crate::error::{is_gone, state_exception};
use crate::parts::RemotePart;

/// Pinned memory, and what copies between it and arrays.
enum AnyBounce {
    Host(Bounce<MemcpyEngine>),
    #[cfg(feature = "cuda")]
    Gpu(Bounce<doorbell::CudaEngine>),
}

/// What is done with an array.
#[derive(Clone, Copy)]
enum ArrayTransfer {
    Write(RemoteSlice),
    Read(RemoteSlice),
    Send,
    Recv,
}

impl ArrayTransfer {
    fn writes_array(self) -> bool {
        matches!(self, ArrayTransfer::Read(_) | ArrayTransfer::Recv)
    }
}

/// The region of which a slice is.
fn region_of(slice: RemoteSlice) -> RemoteRegion {
    RemoteRegion {
        addr: slice.addr(),
        rkey: slice.rkey(),
        len_bytes: slice.len_bytes(),
    }
}

macro_rules! transfer {
    ($bounce:ident, $endpoint:ident, $transfer:ident, $start:ident, $len:ident, $timeout:ident) => {
        match $transfer {
            // SAFETY: the caller's promise.
            ArrayTransfer::Write(remote) => unsafe {
                $bounce.write($endpoint, $start, $len, &region_of(remote), 0, $timeout)
            },
            // SAFETY: as above.
            ArrayTransfer::Read(remote) => unsafe {
                $bounce.read($endpoint, &region_of(remote), 0, $start, $len, $timeout)
            },
            // SAFETY: as above.
            ArrayTransfer::Send => unsafe { $bounce.send($endpoint, $start, $len, $timeout) },
            // SAFETY: as above.
            ArrayTransfer::Recv => unsafe { $bounce.recv($endpoint, $start, $len, $timeout) },
        }
    };
}

impl AnyBounce {
    /// # Safety
    /// The memory is valid until this returns, or for as long as the process lives if it returns a [`StateKind::Unexpected`].
    unsafe fn transfer(
        &mut self,
        endpoint: &mut Endpoint,
        transfer: ArrayTransfer,
        (start, len_bytes): (u64, u64),
        timeout: Duration,
    ) -> doorbell::Result<()> {
        match self {
            AnyBounce::Host(bounce) => {
                transfer!(bounce, endpoint, transfer, start, len_bytes, timeout)
            }
            #[cfg(feature = "cuda")]
            AnyBounce::Gpu(bounce) => {
                transfer!(bounce, endpoint, transfer, start, len_bytes, timeout)
            }
        }
    }
}

/// A bounce buffer.
#[pyclass(frozen, module = "doorbell", name = "BounceBuffer")]
pub struct PyBounceBuffer {
    inner: Detached<Mutex<AnyBounce>>,
    /// The GPU whose memory it copies.
    gpu: Option<u32>,
    chunk_bytes: u32,
    slots: u32,
}

impl PyBounceBuffer {
    /// A signal aborts the endpoint, because the chunks of a transfer cannot be taken back.
    fn transfer(
        &self,
        endpoint: &Bound<'_, PyEndpoint>,
        array: &Bound<'_, PyAny>,
        transfer: ArrayTransfer,
        seconds: Option<f64>,
    ) -> PyResult<()> {
        let py = array.py();
        let timeout = timeout(seconds)?.unwrap_or(Duration::MAX);
        let found = Array::of(array)?;
        let refuse = |kind, reason| Err(state_exception(py, kind, "bounce buffer", reason));
        if found.is_readonly && transfer.writes_array() {
            return refuse(StateKind::NoAccess, "the array is read-only");
        }
        found.settle(py)?;
        match (found.gpu, self.gpu) {
            (Some(Some(of_array)), Some(own)) if of_array != own => {
                return refuse(StateKind::Memory, "the array is another GPU's");
            }
            (Some(_), None) => {
                let reason = "the array is a GPU's; name the GPU by `gpu` when the buffer is made";
                return refuse(StateKind::Memory, reason);
            }
            (None, Some(_)) => {
                let reason = "the array is the host's, and the buffer copies memory of a GPU";
                return refuse(StateKind::Memory, reason);
            }
            _ => {}
        }
        let memory = (found.start, found.len_bytes);
        let inner = self.inner.get().ok_or_else(is_gone)?;
        let (shared, abort) = (endpoint.get().shared()?, endpoint.get().abort_handle()?);
        let owner = found.owner;
        let mut kept = Some(owner);
        let done = wait_whole(
            py,
            || {
                // The endpoint first, as all calls that have both do.
                let mut endpoint = lock(shared);
                // SAFETY: `kept` has the memory until this has returned, and for ever after an error behind which the engine may still use it.
                let done =
                    unsafe { lock(inner).transfer(&mut endpoint, transfer, memory, timeout) };
                if let Err(Error::State {
                    kind: StateKind::Unexpected,
                    ..
                }) = &done
                {
                    std::mem::forget(kept.take());
                }
                done
            },
            || abort.abort(),
        );
        drop(kept);
        done
    }
}

fn make(
    py: Python<'_>,
    domain: &ProtectionDomain,
    gpu: Option<u32>,
    config: doorbell::BounceConfig,
) -> PyResult<AnyBounce> {
    let Some(gpu) = gpu else {
        let made = call(py, || Bounce::new(domain, MemcpyEngine::default(), config))?;
        return Ok(AnyBounce::Host(made));
    };
    #[cfg(feature = "cuda")]
    {
        let made = call(py, || {
            let context = doorbell::CudaContext::primary(gpu)?;
            Bounce::new(domain, doorbell::CudaEngine::new(&context)?, config)
        })?;
        Ok(AnyBounce::Gpu(made))
    }
    #[cfg(not(feature = "cuda"))]
    {
        let _ = gpu;
        let reason = "this package was built without the feature `cuda`";
        let kind = StateKind::Unsupported;
        Err(state_exception(py, kind, "bounce buffer", reason))
    }
}

#[pymethods]
impl PyBounceBuffer {
    /// Pins memory of the host. `gpu` is the ordinal of the GPU whose arrays are transferred; None: arrays of the host.
    #[new]
    #[pyo3(signature = (domain, config = None, *, gpu = None))]
    fn new(
        py: Python<'_>,
        domain: &Bound<'_, PyDomain>,
        config: Option<BounceConfiguration>,
        gpu: Option<u32>,
    ) -> PyResult<PyBounceBuffer> {
        let config = config.unwrap_or_default().0;
        let made = make(py, domain.get().inner()?, gpu, config)?;
        Ok(PyBounceBuffer {
            inner: Detached::new(Mutex::new(made)),
            gpu,
            chunk_bytes: config.chunk_bytes,
            slots: config.slots,
        })
    }

    /// Bytes of a chunk.
    #[getter]
    fn chunk_bytes(&self) -> u32 {
        self.chunk_bytes
    }

    /// Chunks under way at once.
    #[getter]
    fn slots(&self) -> u32 {
        self.slots
    }

    /// Writes an array to memory of the peer.
    #[pyo3(signature = (endpoint, array, remote, timeout = None))]
    fn write(
        &self,
        endpoint: &Bound<'_, PyEndpoint>,
        array: &Bound<'_, PyAny>,
        remote: RemotePart,
        timeout: Option<f64>,
    ) -> PyResult<()> {
        self.transfer(endpoint, array, ArrayTransfer::Write(remote.0), timeout)
    }

    /// Reads memory of the peer into an array.
    #[pyo3(signature = (endpoint, array, remote, timeout = None))]
    fn read(
        &self,
        endpoint: &Bound<'_, PyEndpoint>,
        array: &Bound<'_, PyAny>,
        remote: RemotePart,
        timeout: Option<f64>,
    ) -> PyResult<()> {
        self.transfer(endpoint, array, ArrayTransfer::Read(remote.0), timeout)
    }

    /// Sends an array to a peer that calls `recv` for as many bytes, with chunks of the same length.
    #[pyo3(signature = (endpoint, array, timeout = None))]
    fn send(
        &self,
        endpoint: &Bound<'_, PyEndpoint>,
        array: &Bound<'_, PyAny>,
        timeout: Option<f64>,
    ) -> PyResult<()> {
        self.transfer(endpoint, array, ArrayTransfer::Send, timeout)
    }

    /// Receives into an array what the peer sends by `send`.
    #[pyo3(signature = (endpoint, array, timeout = None))]
    fn recv(
        &self,
        endpoint: &Bound<'_, PyEndpoint>,
        array: &Bound<'_, PyAny>,
        timeout: Option<f64>,
    ) -> PyResult<()> {
        self.transfer(endpoint, array, ArrayTransfer::Recv, timeout)
    }
}
