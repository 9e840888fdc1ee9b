//! Operations in graphs that the application captures, instantiates and launches by calls of the driver alone, as frameworks do. `scripts/test cuda_replay`
//! runs this over the stand-in for the driver; without a driver its tests are WAIVED.
#![cfg(all(feature = "cuda", feature = "softcx", not(loom)))]
#![allow(unsafe_code)] // calls the driver as an application does

#[path = "../../examples/kv_push.rs"]
mod kv_push;
#[path = "../rig/mod.rs"]
mod rig;
#[path = "../rig/standin.rs"]
mod standin;
#[path = "../waived/mod.rs"]
mod waived;

mod faults;
mod given_up;
mod launches;
mod lifetimes;
mod operations;
mod pages;
mod random_order;
mod refused;
mod words;

use std::os::fd::AsFd;
use std::pin::pin;
use std::ptr::null_mut;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use cudarc::driver::sys::{self, CUstreamCaptureMode as Mode};
use doorbell::{
    Access, Control, CudaContext, CudaStream, DeviceBuffer, EndpointConfig, Error,
    ProtectionDomain, QueueKind, Region, StateKind, Status, Ticket, Work, WritesOrdering,
};

use crate::rig::gpu::context;
use crate::rig::{Limit, Pair, control, device};
use crate::waived::waived;

pub(crate) const BOUND: Duration = Duration::from_secs(120);
pub(crate) const SIDE: u64 = 1 << 15;

/// A stream of the application, which captures it.
pub(crate) struct Application {
    raw: sys::CUstream,
    stream: CudaStream,
}

/// A graph of the application, instantiated.
pub(crate) struct Graph(sys::CUgraphExec);

pub(crate) fn ok(result: sys::CUresult) {
    assert_eq!(result, sys::CUresult::CUDA_SUCCESS);
}

impl Application {
    fn new(context: &CudaContext) -> Application {
        let mut raw = null_mut();
        // SAFETY: the context lives as long as the test; writes one handle, which lives as long as `Application`.
        let stream = unsafe {
            ok(sys::cuCtxSetCurrent(context.raw()));
            ok(sys::cuStreamCreate(
                &mut raw,
                sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32,
            ));
            CudaStream::from_raw(context, raw, "application").unwrap()
        };
        Application { raw, stream }
    }

    fn begin(&self, mode: Mode) {
        // SAFETY: a stream of this application.
        ok(unsafe { sys::cuStreamBeginCapture_v2(self.raw, mode) });
    }

    fn end(&self) -> Graph {
        let (mut graph, mut exec) = (null_mut(), null_mut());
        // SAFETY: the capture of this stream; the graph is destroyed once, and the executable one by `Graph`.
        unsafe {
            ok(sys::cuStreamEndCapture(self.raw, &mut graph));
            ok(sys::cuGraphInstantiateWithFlags(&mut exec, graph, 0));
            ok(sys::cuGraphDestroy(graph));
        }
        Graph(exec)
    }

    fn capture(&self, mode: Mode, record: impl FnOnce(&CudaStream)) -> Graph {
        self.begin(mode);
        record(&self.stream);
        self.end()
    }

    fn launch(&self, graph: &Graph) {
        // SAFETY: both live.
        ok(unsafe { sys::cuGraphLaunch(graph.0, self.raw) });
    }

    fn wait(&self) {
        // SAFETY: as above.
        ok(unsafe { sys::cuStreamSynchronize(self.raw) });
    }
}

impl Drop for Application {
    fn drop(&mut self) {
        if std::thread::panicking() {
            return;
        }
        self.wait();
        // The library's object goes before, or after: it makes no call for a stream that it does not own.
        // SAFETY: made in `new`; nothing is queued on it.
        ok(unsafe { sys::cuStreamDestroy_v2(self.raw) });
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: made by `Application::end`.
        ok(unsafe { sys::cuGraphExecDestroy(self.0) });
    }
}

/// A pair, each side with memory, and an application for each side.
pub(crate) struct Bench {
    a: Application,
    b: Application,
    from: Region,
    to: Region,
    pair: Pair,
    _limit: Limit,
}

impl Bench {
    fn new(test: &'static str, config: &EndpointConfig) -> Option<Bench> {
        let context = context(test)?;
        let device = device();
        if control(&device) == Control::Sync {
            waived(test, "the doorbells of the sync path are in no graph");
            return None;
        }
        if let Err(error) = usable(&context) {
            waived(test, &format!("{error}"));
            return None;
        }
        if context.capabilities().ordering == WritesOrdering::None {
            waived(test, "the GPU does not see writes of NICs in order");
            return None;
        }
        let pair = Pair::new(&device, config);
        let (from, to) = (pair.region(SIDE), pair.region(SIDE));
        Some(Bench {
            a: Application::new(&context),
            b: Application::new(&context),
            from,
            to,
            pair,
            _limit: Limit::new(test, BOUND),
        })
    }

    fn is_filled(&self, len_bytes: u64, value: u8) -> bool {
        self.to.is_filled_with(0, len_bytes, value).unwrap()
    }
}

/// Whether the library's kernels run in the context.
pub(crate) fn usable(context: &CudaContext) -> doorbell::Result<()> {
    CudaStream::new(context, "kernels")?
        .with_execution(doorbell::Execution::Kernel)
        .map(drop)
}

pub(crate) fn config() -> EndpointConfig {
    // A lost peer is detected after half a second.
    EndpointConfig::default()
        .send_depth(32)
        .recv_depth(32)
        .ack_timeout(14)
        .max_segments(8)
        .max_inline_bytes(64)
}

/// The first 8 bytes.
pub(crate) fn number(region: &Region) -> u64 {
    let mut bytes = [0; 8];
    region.read(0, &mut bytes).unwrap();
    u64::from_ne_bytes(bytes)
}

/// Memory of the GPU, registered; `None`, and the test is WAIVED, where the NIC does not reach it.
pub(crate) fn gpu_region(
    test: &str,
    domain: &ProtectionDomain,
    buffer: &DeviceBuffer,
) -> Option<Region> {
    match Region::register_device(domain, buffer, Access::ALL) {
        Ok(region) => Some(region),
        Err(error) if lacks_gpu_memory(&error.to_string()) => {
            waived(test, &error.to_string());
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// Whether a NIC has said that it does not reach memory of the GPU. The software NIC of this process always does.
pub(crate) fn lacks_gpu_memory(error: &str) -> bool {
    let name = std::env::var("DOORBELL_TEST_DEVICE").unwrap_or_default();
    let is_softcx = name.is_empty() || name.starts_with("softcx");
    !is_softcx && error.contains("dmabuf: ") && error.contains("peermem: ")
}

pub(crate) fn is_failed(ticket: &Ticket) -> bool {
    matches!(ticket.status(), Status::Failed(_))
}

/// Whatever waits for an operation that is never complete is refused: a notice would say that it is over.
pub(crate) fn assert_never_over(ticket: &Ticket) {
    let eventfd = crate::rig::eventfd();
    let refusals = [
        ticket.wait(Some(BOUND)).unwrap_err(),
        ticket.notify(eventfd.as_fd()).unwrap_err(),
        poll_once(ticket.into_future()).unwrap_err(),
    ];
    for refusal in &refusals {
        assert!(
            matches!(refusal, Error::State { kind, .. } if *kind == StateKind::Captured),
            "{refusal}"
        );
    }
    assert_eq!(crate::rig::count(&eventfd), 0, "it was notified");
}

/// What a future has that is ready at once.
fn poll_once<T>(future: impl Future<Output = T>) -> T {
    let mut context = Context::from_waker(Waker::noop());
    match pin!(future).poll(&mut context) {
        Poll::Ready(output) => output,
        Poll::Pending => panic!("it is not ready"),
    }
}

/// A message from `a` to `b`: the sender's graph, the receiver's, and the tickets of send, wait, receive, wait.
pub(crate) struct Exchange {
    sender: Graph,
    receiver: Graph,
    tickets: Vec<Ticket>,
}

pub(crate) fn exchange(bench: &mut Bench, mode: Mode) -> Exchange {
    let (from, to) = (bench.from.clone(), bench.to.clone());
    let mut tickets = Vec::new();
    let endpoint = &mut bench.pair.a;
    let sender = bench.a.capture(mode, |stream| {
        let slices = [from.slice(0, 64).unwrap()];
        let work = Work::send(&slices);
        tickets.push(endpoint.stream_queue_send(stream, &work).unwrap());
        tickets.push(endpoint.stream_wait_cq(stream, QueueKind::Send).unwrap());
    });
    let endpoint = &mut bench.pair.b;
    let receiver = bench.b.capture(mode, |stream| {
        let slices = [to.slice(0, 64).unwrap()];
        tickets.push(endpoint.stream_queue_recv(stream, 0, &slices).unwrap());
        tickets.push(endpoint.stream_wait_cq(stream, QueueKind::Recv).unwrap());
    });
    Exchange {
        sender,
        receiver,
        tickets,
    }
}

pub(crate) fn check(bench: &Bench, both: &Exchange, launches: u64) {
    for launch in 0..launches {
        bench.from.fill(0, 64, launch as u8 + 1).unwrap();
        bench.b.launch(&both.receiver);
        bench.a.launch(&both.sender);
        bench.b.wait();
        assert!(bench.is_filled(64, launch as u8 + 1), "launch {launch}");
        bench.a.wait();
    }
}
