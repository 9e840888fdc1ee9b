//! Queues that kernels of a GPU post to. In addition to `crates/capi/tests/kernel_queue.rs`, which uses threads: the queue is mapped to the GPU, and
//! its state is in device memory. Over the stand-in for the driver the kernel is a function of the CPU, made of the same header; with a GPU it is the
//! library's own, `doorbell_put_step`.
#![cfg(all(feature = "cuda", feature = "softcx", not(loom)))]
#![allow(unsafe_code)] // launches kernels that post

mod rig;
#[path = "rig/standin.rs"]
mod standin;
mod waived;

use std::time::{Duration, Instant};

use doorbell::__private::PutStep;
use doorbell::{
    Cause, Control, CudaContext, CudaStream, DeviceBuffer, DeviceQueue, Error, Executor, QueueKind,
    Region, RemoteSlice, WcStatus, Work,
};
use rig::gpu::{Bench, alone, config, context};
use rig::{Pair, SOON, control, device};
use waived::waived;

const ETIMEOUT: i32 = -17;
const EWORK: i32 = -19;
const FINE: i32 = 0;

const BOUND: Duration = Duration::from_secs(60);

/// A pair whose first endpoint has its send queue on a GPU, with a region and a stream of the application.
struct Application {
    // In the order of destruction: the queue is no longer in use.
    queue: DeviceQueue,
    stream: CudaStream,
    code: DeviceBuffer,
    bench: Bench,
}

impl Application {
    /// `None`, and the test is WAIVED, where kernels cannot ring.
    fn new(test: &str) -> Option<Application> {
        let context = context(test)?;
        if control(&device()) == Control::Sync {
            waived(test, "on the sync path no kernel rings");
            return None;
        }
        Some(Self::over(&context, Bench::new()))
    }

    fn over(context: &CudaContext, mut bench: Bench) -> Application {
        let stream = CudaStream::new(context, "application").unwrap();
        let code = context.alloc(4).unwrap();
        code.copy_from_host(0, &FINE.to_ne_bytes()).unwrap();
        let queue = DeviceQueue::on_gpu(context, &mut bench.pair.a).unwrap();
        Application {
            queue,
            stream,
            code,
            bench,
        }
    }

    /// A put of 512 bytes from the region's start to `offset` behind its middle.
    fn put(&self, offset: u64) -> PutStep {
        let region = &self.bench.region;
        let slice = region.slice(0, 512).unwrap();
        let remote = region.remote();
        PutStep {
            local: self.queue.local(&slice).unwrap(),
            len_bytes: 512,
            remote: (remote.addr + 4096 + offset, remote.rkey),
            timeout: BOUND,
            code: self.code.ptr(),
            ..PutStep::default()
        }
    }

    fn launch(&self, step: &PutStep) {
        // SAFETY: the queue, the region and the code live until `self` goes, which waits before.
        unsafe { self.queue.put_step(&self.stream, step) }.unwrap();
    }

    /// The last error code of the finished kernels.
    fn code(&self) -> i32 {
        self.stream.synchronize(SOON).unwrap();
        let mut bytes = [0; 4];
        self.code.copy_to_host(0, &mut bytes).unwrap();
        i32::from_ne_bytes(bytes)
    }

    fn region(&self) -> &Region {
        &self.bench.region
    }

    /// Kernels post and wait, and the data arrives.
    fn works(&self, value: u8) {
        self.code.copy_from_host(0, &FINE.to_ne_bytes()).unwrap();
        self.region().fill(0, 512, value).unwrap();
        self.region().fill(4096, 512, !value).unwrap();
        self.launch(&self.put(0));
        assert_eq!(self.code(), FINE);
        assert!(self.region().is_filled_with(4096, 512, value).unwrap());
    }

    /// Resets the endpoint, which then works with a new device queue.
    fn works_after_reset(self) {
        let Application {
            queue,
            stream,
            code,
            mut bench,
        } = self;
        let context = stream.context().clone();
        let refused = bench.pair.a.reset().unwrap_err();
        assert!(
            refused.to_string().contains("owned by kernels"),
            "{refused}"
        );
        drop((queue, stream, code));
        bench.pair.reset();
        Self::over(&context, bench).works(77);
    }
}

#[test]
fn kernels_post_to_a_queue_in_which_every_count_wraps() {
    let _alone = alone();
    let Some(application) = Application::new("kernels_post_to_a_queue") else {
        return;
    };
    application.works(1);
    // Wraps the ring and the completion queue many times; crates/capi/tests/kernel_queue.rs wraps the NIC's 16 bits.
    let rounds = if std::env::var_os("DOORBELL_CUDA_STANDIN").is_some() {
        2_000
    } else {
        70_000
    };
    for round in 0..rounds {
        application.launch(&application.put(round % 8 * 8));
        if round % 256 == 0 {
            application.stream.synchronize(SOON).unwrap();
        }
    }
    assert_eq!(application.code(), FINE);
    application.works(2);
}

#[test]
fn immediate_data_posted_by_a_kernel_reaches_the_receive() {
    let _alone = alone();
    let Some(mut application) =
        Application::new("immediate_data_posted_by_a_kernel_reaches_the_receive")
    else {
        return;
    };
    application.bench.pair.b.post_recv(5, &[]).unwrap();
    let step = PutStep {
        imm: Some(0x0102_0304),
        ..application.put(0)
    };
    application.launch(&step);
    let peer = &mut application.bench.pair.b;
    let received = peer.wait_cq(QueueKind::Recv, SOON).unwrap();
    assert_eq!((received.wr_id, received.imm), (5, Some(0x0102_0304)));
    assert_eq!(application.code(), FINE);
}

#[test]
fn nic_error_is_a_kernel_code_and_reset_recovers() {
    let _alone = alone();
    let Some(application) = Application::new("nic_error_is_a_kernel_code_and_reset_recovers")
    else {
        return;
    };
    let mut step = application.put(0);
    step.remote.1 ^= 0x5500;
    application.launch(&step);
    assert_eq!(application.code(), EWORK);
    let failure = application.queue.failure().unwrap();
    assert!(
        matches!(
            failure.cause,
            Cause::Completion {
                status: WcStatus::RemAccessErr,
                ..
            }
        ),
        "{failure}"
    );
    // Nothing more is transmitted.
    application.launch(&application.put(0));
    assert_eq!(application.code(), EWORK);
    application.works_after_reset();
}

#[test]
fn an_abort_ends_a_wait_of_a_kernel() {
    let _alone = alone();
    let Some(context) = context("an_abort_ends_a_wait_of_a_kernel") else {
        return;
    };
    if control(&device()) == Control::Sync {
        return waived(
            "an_abort_ends_a_wait_of_a_kernel",
            "on the sync path no kernel rings",
        );
    }
    let mut config = config();
    // The kernel's completion never arrives, and its retries do not end.
    config.ack_timeout = 0;
    let pair = Pair::new(&device(), &config);
    let region = pair.region(8192);
    let mut application = Application::over(&context, Bench { pair, region });
    let start = Instant::now();
    application.bench.pair.b.abort();
    // The peer ends some time after the call; until then a put may still arrive, or be late.
    let mut late = 0;
    while late < 2 {
        application.launch(&PutStep {
            timeout: Duration::from_secs(1),
            ..application.put(0)
        });
        late = match application.code() {
            FINE => 0,
            code => {
                assert_eq!(code, ETIMEOUT);
                late + 1
            }
        };
        assert!(start.elapsed() < BOUND);
    }
    application.launch(&application.put(0));
    let abort = application.bench.pair.a.abort_handle();
    std::thread::sleep(Duration::from_millis(30));
    abort.abort();
    assert_eq!(application.code(), EWORK);
    assert!(start.elapsed() < BOUND);
    assert!(matches!(
        application.bench.pair.a.prepare_wait_cq(QueueKind::Send),
        Err(Error::Work(_))
    ));
    application.works_after_reset();
}

/// On such a GPU a kernel could see the completion of a get before its data. A child of this test has such a GPU.
#[test]
fn kernel_queue_is_refused_on_a_gpu_with_unordered_nic_writes() {
    let _alone = alone();
    let test = "kernel_queue_is_refused_on_a_gpu_with_unordered_nic_writes";
    if !standin::is_standin() {
        return waived(test, "a real device has the order that it has");
    }
    let Some(context) = context(test) else { return };
    if standin::lacking(test, "ordering") {
        return;
    }
    if control(&device()) == Control::Sync {
        return waived(test, "on the sync path no kernel rings");
    }
    let mut bench = Bench::new();
    let refused = DeviceQueue::on_gpu(&context, &mut bench.pair.a).unwrap_err();
    assert!(refused.to_string().contains("WRITES_ORDERING"), "{refused}");
    // The endpoint still has its queue.
    bench.pair.a.post_send(&Work::nop()).unwrap();
    bench.pair.a.wait_cq(QueueKind::Send, SOON).unwrap();
}

#[test]
fn failed_mapping_is_an_error_and_the_endpoint_keeps_its_queue() {
    let _alone = alone();
    let test = "failed_mapping_is_an_error_and_the_endpoint_keeps_its_queue";
    if !standin::is_standin() {
        return waived(test, "a driver that refuses is the stand-in's");
    }
    let Some(context) = context(test) else { return };
    if control(&device()) == Control::Sync {
        return waived(test, "on the sync path no kernel rings");
    }
    let mut bench = Bench::new();
    for call in ["cuMemHostRegister_v2", "cuMemAlloc_v2"] {
        let fault = standin::Fault::here(&format!("{call}:2"));
        let refused = DeviceQueue::on_gpu(&context, &mut bench.pair.a).unwrap_err();
        assert!(matches!(refused, Error::Cuda { .. }), "{call}: {refused}");
        drop(fault);
        // The endpoint is unchanged: it still sends.
        let slice = [bench.region.slice(0, 8).unwrap()];
        let remote = bench.region.remote();
        let write = Work::write(&slice, RemoteSlice::at(remote.addr + 4096, remote.rkey));
        bench.pair.a.post_send(&write).unwrap();
        bench.pair.a.wait_cq(QueueKind::Send, SOON).unwrap();
    }
    Application::over(&context, bench).works(3);
}
