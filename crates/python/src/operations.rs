//! What streams and builders of graphs have in common: the operations of an endpoint's queues.

use doorbell::QueueKind;
use pyo3::prelude::*;

use crate::endpoint::{Options, PyEndpoint, WorkKind};
use crate::parts::RegionParts;

/// Takes operations of endpoints: a stream executes them, the builder of a graph adds them.
pub trait TakesOperations {
    /// What there is for each: a ticket of a stream, nothing of a graph.
    type Taken;

    fn take_work(
        &self,
        endpoint: &Bound<'_, PyEndpoint>,
        slices: &RegionParts,
        work_kind: WorkKind,
        options: Options,
    ) -> PyResult<Self::Taken>;

    fn take_recv(
        &self,
        endpoint: &Bound<'_, PyEndpoint>,
        slices: &RegionParts,
        wr_id: u64,
    ) -> PyResult<Self::Taken>;

    fn take_wait(
        &self,
        endpoint: &Bound<'_, PyEndpoint>,
        kind: QueueKind,
        seconds: Option<f64>,
    ) -> PyResult<Self::Taken>;
}

/// The methods of a class for the operations, under these names.
macro_rules! operation_methods {
    ($class:ident, $taken:ty: $send:ident, $recv:ident, $write:ident, $read:ident, $fetch_add:ident, $compare_swap:ident) => {
        #[pymethods]
        impl $class {
            /// A send to the peer's next receive.
            #[pyo3(signature = (endpoint, slices, *, wr_id = 0, immediate = None, signaled = true))]
            fn $send(
                &self,
                endpoint: &Bound<'_, PyEndpoint>,
                slices: RegionParts,
                wr_id: u64,
                immediate: Option<u32>,
                signaled: bool,
            ) -> PyResult<$taken> {
                let options = Options {
                    wr_id,
                    immediate,
                    signaled,
                };
                self.take_work(endpoint, &slices, WorkKind::Send, options)
            }

            /// A receive, which the peer's next send fills.
            #[pyo3(signature = (endpoint, slices, *, wr_id = 0))]
            fn $recv(
                &self,
                endpoint: &Bound<'_, PyEndpoint>,
                slices: RegionParts,
                wr_id: u64,
            ) -> PyResult<$taken> {
                self.take_recv(endpoint, &slices, wr_id)
            }

            /// A write to memory of the peer. With immediate data, it uses one of the peer's receives.
            #[pyo3(signature = (endpoint, slices, remote, *, wr_id = 0, immediate = None, signaled = true))]
            fn $write(
                &self,
                endpoint: &Bound<'_, PyEndpoint>,
                slices: RegionParts,
                remote: RemotePart,
                wr_id: u64,
                immediate: Option<u32>,
                signaled: bool,
            ) -> PyResult<$taken> {
                let options = Options {
                    wr_id,
                    immediate,
                    signaled,
                };
                self.take_work(endpoint, &slices, WorkKind::Write(remote.0), options)
            }

            /// A read from memory of the peer.
            #[pyo3(signature = (endpoint, slices, remote, *, wr_id = 0, signaled = true))]
            fn $read(
                &self,
                endpoint: &Bound<'_, PyEndpoint>,
                slices: RegionParts,
                remote: RemotePart,
                wr_id: u64,
                signaled: bool,
            ) -> PyResult<$taken> {
                let options = Options::without_immediate(wr_id, signaled);
                self.take_work(endpoint, &slices, WorkKind::Read(remote.0), options)
            }

            /// Adds a number to 8 bytes of the peer, whose old value goes to `result`.
            #[pyo3(signature = (endpoint, result, remote, add, *, wr_id = 0, signaled = true))]
            fn $fetch_add(
                &self,
                endpoint: &Bound<'_, PyEndpoint>,
                result: RegionParts,
                remote: RemotePart,
                add: u64,
                wr_id: u64,
                signaled: bool,
            ) -> PyResult<$taken> {
                let options = Options::without_immediate(wr_id, signaled);
                self.take_work(endpoint, &result, WorkKind::FetchAdd(remote.0, add), options)
            }

            /// Replaces 8 bytes of the peer by `swap` if they equal `compare`. Their old value goes to `result`.
            #[pyo3(signature = (endpoint, result, remote, compare, swap, *, wr_id = 0, signaled = true))]
            #[expect(clippy::too_many_arguments, reason = "an operation has them")]
            fn $compare_swap(
                &self,
                endpoint: &Bound<'_, PyEndpoint>,
                result: RegionParts,
                remote: RemotePart,
                compare: u64,
                swap: u64,
                wr_id: u64,
                signaled: bool,
            ) -> PyResult<$taken> {
                let options = Options::without_immediate(wr_id, signaled);
                let work_kind = WorkKind::CompareSwap(remote.0, compare, swap);
                self.take_work(endpoint, &result, work_kind, options)
            }

            /// Makes what comes later wait for the next completion of the send queue.
            #[pyo3(signature = (endpoint, timeout = None))]
            fn wait_send(
                &self,
                endpoint: &Bound<'_, PyEndpoint>,
                timeout: Option<f64>,
            ) -> PyResult<$taken> {
                self.take_wait(endpoint, QueueKind::Send, timeout)
            }

            /// Makes what comes later wait for the next completion of the receive queue.
            #[pyo3(signature = (endpoint, timeout = None))]
            fn wait_recv(
                &self,
                endpoint: &Bound<'_, PyEndpoint>,
                timeout: Option<f64>,
            ) -> PyResult<$taken> {
                self.take_wait(endpoint, QueueKind::Recv, timeout)
            }
        }
    };
}
pub(crate) use operation_methods;
