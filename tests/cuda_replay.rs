//! Operations in graphs that the application captures, instantiates and launches by calls of the driver alone, as frameworks do. `scripts/test cuda_replay`
//! runs this over the stand-in for the driver; without a driver its tests are WAIVED.
#![cfg(all(feature = "cuda", feature = "softcx", not(loom)))]
#![allow(unsafe_code)] // calls the driver as an application does

#[path = "../examples/kv_push.rs"]
mod kv_push;
mod rig;
#[path = "rig/standin.rs"]
mod standin;
mod waived;

use std::ptr::null_mut;
use std::time::Duration;

use cudarc::driver::sys::{self, CUstreamCaptureMode as Mode};
use doorbell::softcx::Faults;
use doorbell::{
    Access, Condition, Condition64, Control, CudaContext, CudaStream, DeviceBuffer, EndpointConfig,
    Error, Executor, HostStream, PagePush, ProtectionDomain, QueueKind, Region, StateKind, Status,
    Ticket, Work, WritesOrdering, stream_wait_count64, stream_wait_value32, stream_wait_value64,
    stream_write_value32, stream_write_value64,
};
use rig::gpu::{alone, context};
use rig::{Limit, Pair, Random, SOON, control, device, from_env, strict};
use standin::is_standin;
use waived::waived;

const BOUND: Duration = Duration::from_secs(120);
const SIDE: u64 = 1 << 15;

/// A stream of the application, which captures it.
struct Application {
    raw: sys::CUstream,
    stream: CudaStream,
}

/// A graph of the application, instantiated.
struct Graph(sys::CUgraphExec);

fn ok(result: sys::CUresult) {
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
struct Bench {
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
fn usable(context: &CudaContext) -> doorbell::Result<()> {
    CudaStream::new(context, "kernels")?
        .with_execution(doorbell::Execution::Kernel)
        .map(drop)
}

fn config() -> EndpointConfig {
    // A lost peer is detected after half a second.
    EndpointConfig::default()
        .send_depth(32)
        .recv_depth(32)
        .ack_timeout(14)
        .max_segments(8)
        .max_inline_bytes(64)
}

/// The first 8 bytes.
fn number(region: &Region) -> u64 {
    let mut bytes = [0; 8];
    region.read(0, &mut bytes).unwrap();
    u64::from_ne_bytes(bytes)
}

/// Memory of the GPU, registered; `None`, and the test is WAIVED, where the NIC does not reach it.
fn gpu_region(test: &str, domain: &ProtectionDomain, buffer: &DeviceBuffer) -> Option<Region> {
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
fn lacks_gpu_memory(error: &str) -> bool {
    let name = std::env::var("DOORBELL_TEST_DEVICE").unwrap_or_default();
    let is_softcx = name.is_empty() || name.starts_with("softcx");
    !is_softcx && error.contains("dmabuf: ") && error.contains("peermem: ")
}

fn is_failed(ticket: &Ticket) -> bool {
    matches!(ticket.status(), Status::Failed(_))
}

/// Sends, receives, and waits of both sides, in every mode of captures. The contents of the memory are those of the launch.
#[test]
fn a_captured_graph_transfers_the_contents_of_each_launch() {
    let _alone = alone();
    for mode in [
        Mode::CU_STREAM_CAPTURE_MODE_GLOBAL,
        Mode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
        Mode::CU_STREAM_CAPTURE_MODE_RELAXED,
    ] {
        let Some(mut bench) = Bench::new("a_captured_graph_transfers", &config()) else {
            return;
        };
        let (from, to) = (bench.from.clone(), bench.to.clone());
        let mut tickets = Vec::new();
        let endpoint = &mut bench.pair.a;
        let sender = bench.a.capture(mode, |stream| {
            let slices = [from.slice(0, 100).unwrap(), from.slice(4096, 28).unwrap()];
            let work = Work::send(&slices).imm(77);
            tickets.push(endpoint.stream_queue_send(stream, &work).unwrap());
            tickets.push(endpoint.stream_wait_cq(stream, QueueKind::Send).unwrap());
        });
        let endpoint = &mut bench.pair.b;
        let receiver = bench.b.capture(mode, |stream| {
            let slices = [to.slice(0, 64).unwrap(), to.slice(64, 64).unwrap()];
            tickets.push(endpoint.stream_queue_recv(stream, 0, &slices).unwrap());
            tickets.push(endpoint.stream_wait_cq(stream, QueueKind::Recv).unwrap());
        });
        for ticket in &tickets {
            assert_eq!(
                (ticket.status(), ticket.launches()),
                (Status::Prepared, Some(0))
            );
        }
        let launches = from_env("DOORBELL_GRAPH_LAUNCHES", 1_000);
        for launch in 1..=launches {
            bench.from.fill(0, SIDE, launch as u8).unwrap();
            bench.b.launch(&receiver);
            bench.a.launch(&sender);
            bench.b.wait();
            assert!(bench.is_filled(128, launch as u8), "launch {launch}");
            bench.a.wait();
        }
        for ticket in &tickets {
            assert_eq!(
                (ticket.status(), ticket.launches()),
                (Status::Rung, Some(launches))
            );
            let waited = ticket.wait(SOON).unwrap_err();
            assert!(
                matches!(&waited, Error::State { kind, .. } if *kind == StateKind::Captured),
                "{waited}"
            );
        }
        assert_eq!(tickets[3].details(), Some((128, Some(77))));
        assert_eq!(tickets[0].details(), None);
    }
}

/// No call of this process comes between the launches, and no wait: each launch adds one to a number of the peer, and the queues wrap many times.
#[test]
fn launches_behind_each_other_are_all_executed_once() {
    let _alone = alone();
    let Some(mut bench) = Bench::new("launches_behind_each_other", &config()) else {
        return;
    };
    if rig::has_no_queue(&device(), "launches_behind_each_other")
        || !rig::has_atomics(&device(), "launches_behind_each_other")
    {
        return;
    }
    bench.to.fill(0, 64, 0).unwrap();
    let (from, to) = (bench.from.clone(), bench.to.clone());
    let remote = to.remote().slice(0, 8).unwrap();
    let endpoint = &mut bench.pair.a;
    let mut waited = None;
    let graph = bench
        .a
        .capture(Mode::CU_STREAM_CAPTURE_MODE_GLOBAL, |stream| {
            let old = from.slice(0, 8).unwrap();
            for _ in 0..3 {
                let work = Work::fetch_add(std::slice::from_ref(&old), remote, 1);
                endpoint.stream_queue_send(stream, &work).unwrap();
            }
            for _ in 0..3 {
                waited = Some(endpoint.stream_wait_cq(stream, QueueKind::Send).unwrap());
            }
        });
    let launches = from_env("DOORBELL_GRAPH_LAUNCHES", 1_000);
    for _ in 0..launches {
        bench.a.launch(&graph);
    }
    bench.a.wait();
    assert_eq!(number(&to), 3 * launches);
    assert_eq!(number(&from), 3 * launches - 1);
    assert_eq!(waited.unwrap().launches(), Some(launches));
}

/// The queues are in the middle of a lap when they are handed over.
#[test]
fn queues_that_were_in_use_go_on_where_they_were() {
    let _alone = alone();
    let Some(mut bench) = Bench::new("queues_that_were_in_use", &config()) else {
        return;
    };
    let (from, to) = (bench.from.clone(), bench.to.clone());
    let stream = HostStream::new("before").unwrap();
    for round in 0..37 {
        from.fill(0, 8, round).unwrap();
        bench
            .pair
            .b
            .post_recv(0, &[to.slice(0, 8).unwrap()])
            .unwrap();
        let slices = [from.slice(0, 8).unwrap()];
        let Pair { a, b, .. } = &mut bench.pair;
        a.stream_queue_send(&stream, &Work::send(&slices)).unwrap();
        a.stream_wait_cq(&stream, QueueKind::Send).unwrap();
        b.stream_wait_cq(&stream, QueueKind::Recv).unwrap();
        stream.synchronize(SOON).unwrap();
    }
    let mode = Mode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
    let both = exchange(&mut bench, mode);
    check(&bench, &both, 200);
}

/// A message from `a` to `b`: the sender's graph, the receiver's, and the tickets of send, wait, receive, wait.
struct Exchange {
    sender: Graph,
    receiver: Graph,
    tickets: Vec<Ticket>,
}

fn exchange(bench: &mut Bench, mode: Mode) -> Exchange {
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

fn check(bench: &Bench, both: &Exchange, launches: u64) {
    for launch in 0..launches {
        bench.from.fill(0, 64, launch as u8 + 1).unwrap();
        bench.b.launch(&both.receiver);
        bench.a.launch(&both.sender);
        bench.b.wait();
        assert!(bench.is_filled(64, launch as u8 + 1), "launch {launch}");
        bench.a.wait();
    }
}

/// The endpoint, its region and the library's stream are dropped: what the graph needs of them stays until it is destroyed.
#[test]
fn graphs_keep_what_they_use() {
    let _alone = alone();
    let Some(mut bench) = Bench::new("graphs_keep_what_they_use", &config()) else {
        return;
    };
    let both = exchange(&mut bench, Mode::CU_STREAM_CAPTURE_MODE_RELAXED);
    check(&bench, &both, 3);
    for endpoint in [&mut bench.pair.a, &mut bench.pair.b] {
        let refused = endpoint.reset().unwrap_err();
        assert!(refused.to_string().contains("graphs"), "{refused}");
    }
    check(&bench, &both, 3);
    let other = Pair::new(&device(), &config());
    drop(std::mem::replace(&mut bench.pair, other));
    check(&bench, &both, 3);
    assert_eq!(both.tickets[3].launches(), Some(9));
    for ticket in &both.tickets {
        assert_eq!(ticket.status(), Status::Rung);
    }
    let Exchange {
        sender,
        receiver,
        tickets,
    } = both;
    drop((sender, receiver));
    // The graphs are destroyed, so nothing keeps the queue pairs any more.
    let until = std::time::Instant::now() + Duration::from_secs(30);
    while tickets.iter().any(|ticket| !is_failed(ticket)) {
        assert!(std::time::Instant::now() < until, "{tickets:?}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// After its graphs were destroyed, an endpoint is reset, and is as new: for streams, and for other graphs.
#[test]
fn endpoints_are_reset_behind_their_graphs() {
    let _alone = alone();
    let Some(mut bench) = Bench::new("endpoints_are_reset", &config()) else {
        return;
    };
    for round in 0..5 {
        let both = exchange(&mut bench, Mode::CU_STREAM_CAPTURE_MODE_GLOBAL);
        check(&bench, &both, 3 + round);
        // Work of the host is refused, and says why.
        let slices = [bench.from.slice(0, 8).unwrap()];
        let refused = bench.pair.a.post_send(&Work::send(&slices)).unwrap_err();
        assert!(
            refused.to_string().contains("owned by kernels"),
            "{refused}"
        );
        let refused = bench.pair.b.post_recv(0, &slices).unwrap_err();
        assert!(
            refused.to_string().contains("receive queue is owned"),
            "{refused}"
        );
        drop(both);
        bench.pair.reset();
        let (from, to) = (bench.from.clone(), bench.to.clone());
        from.fill(0, 8, 200).unwrap();
        let Pair { a, b, .. } = &mut bench.pair;
        b.post_recv(0, &[to.slice(0, 8).unwrap()]).unwrap();
        let slices = [from.slice(0, 8).unwrap()];
        a.stream_queue_send(&bench.a.stream, &Work::send(&slices))
            .unwrap();
        let waited = a.stream_wait_cq(&bench.a.stream, QueueKind::Send).unwrap();
        bench.a.stream.synchronize(SOON).unwrap();
        assert_eq!(waited.status(), Status::Complete);
        b.wait_cq(QueueKind::Recv, SOON).unwrap();
        assert!(to.is_filled_with(0, 8, 200).unwrap());
    }
}

/// A receive is posted ahead, by the same calls outside of a capture; each launch posts the next one when it has its own.
#[test]
fn calls_outside_of_a_capture_use_the_same_queues() {
    let _alone = alone();
    let Some(mut bench) = Bench::new("calls_outside_of_a_capture", &config()) else {
        return;
    };
    let (from, to) = (bench.from.clone(), bench.to.clone());
    let mode = Mode::CU_STREAM_CAPTURE_MODE_GLOBAL;
    let endpoint = &mut bench.pair.b;
    let slices = [to.slice(0, 64).unwrap()];
    let receiver = bench.b.capture(mode, |stream| {
        endpoint.stream_wait_cq(stream, QueueKind::Recv).unwrap();
        endpoint.stream_queue_recv(stream, 0, &slices).unwrap();
    });
    let endpoint = &mut bench.pair.a;
    let data = [from.slice(0, 64).unwrap()];
    let sender = bench.a.capture(mode, |stream| {
        endpoint
            .stream_queue_send(stream, &Work::send(&data))
            .unwrap();
        endpoint.stream_wait_cq(stream, QueueKind::Send).unwrap();
    });
    let posted = bench
        .pair
        .b
        .stream_queue_recv(&bench.b.stream, 0, &slices)
        .unwrap();
    bench.b.stream.synchronize(SOON).unwrap();
    assert_eq!(
        (posted.status(), posted.launches()),
        (Status::Rung, Some(1))
    );
    for launch in 0..100 {
        from.fill(0, 64, launch).unwrap();
        bench.a.launch(&sender);
        bench.b.launch(&receiver);
        bench.b.wait();
        assert!(bench.is_filled(64, launch), "launch {launch}");
        bench.a.wait();
    }
    // One more, by a kernel that is no node.
    from.fill(0, 64, 200).unwrap();
    let a = &mut bench.pair.a;
    a.stream_queue_send(&bench.a.stream, &Work::send(&data))
        .unwrap();
    let waited = a.stream_wait_cq(&bench.a.stream, QueueKind::Send).unwrap();
    bench.a.stream.synchronize(SOON).unwrap();
    assert_eq!(waited.launches(), Some(1));
    bench.b.launch(&receiver);
    bench.b.wait();
    assert!(bench.is_filled(64, 200));
}

/// Writes and reads of more slices than a work request holds, inline data, unsignaled work.
#[test]
fn all_operations_are_replayed() {
    let _alone = alone();
    let Some(mut bench) = Bench::new("all_operations_are_replayed", &config()) else {
        return;
    };
    let (from, to) = (bench.from.clone(), bench.to.clone());
    let remote = |offset, len| to.remote().slice(offset, len).unwrap();
    let has_reads = control(&device()) != Control::Sync && !rig::has_no_queue(&device(), "reads");
    let endpoint = &mut bench.pair.a;
    let slices: Vec<_> = (0..7)
        .map(|at| from.slice(at * 128, 100 + at).unwrap())
        .collect();
    let length: u64 = (0..7).map(|at| 100 + at).sum();
    let back: Vec<_> = (0..5)
        .map(|at| from.slice(8192 + at * 64, 8).unwrap())
        .collect();
    let graph = bench
        .a
        .capture(Mode::CU_STREAM_CAPTURE_MODE_GLOBAL, |stream| {
            let work = Work::write(&slices, remote(0, length)).signaled(false);
            endpoint.stream_queue_send(stream, &work).unwrap();
            let inline = Work::write_inline(b"twenty-eight bytes, no more.", remote(4096, 28));
            endpoint
                .stream_queue_send(stream, &inline.signaled(false))
                .unwrap();
            let read = Work::read(&back, remote(0, 40)).fence(true);
            endpoint.stream_queue_send(stream, &read).unwrap();
            endpoint.stream_wait_cq(stream, QueueKind::Send).unwrap();
        });
    assert!(has_reads);
    for launch in 1..50 {
        for at in 0..7 {
            from.fill(at * 128, 128, launch + at as u8).unwrap();
        }
        to.fill(0, SIDE, 0).unwrap();
        from.fill(8192, 320, 0).unwrap();
        bench.a.launch(&graph);
        bench.a.wait();
        let mut offset = 0;
        for at in 0..7 {
            let len = 100 + at;
            assert!(to.is_filled_with(offset, len, launch + at as u8).unwrap());
            offset += len;
        }
        assert!(to.is_filled_with(offset, 4096 - offset, 0).unwrap());
        let mut text = [0; 29];
        to.read(4096, &mut text).unwrap();
        assert_eq!(&text, b"twenty-eight bytes, no more.\0");
        for at in 0..5 {
            assert!(from.is_filled_with(8192 + at * 64, 8, launch).unwrap());
        }
    }
}

/// What cannot be executed again without this process is refused when it is captured, with the reason, and the capture goes on.
#[test]
fn what_cannot_be_replayed_is_refused_at_capture() {
    let _alone = alone();
    let Some(mut bench) = Bench::new("what_cannot_be_replayed", &config()) else {
        return;
    };
    let (from, to) = (bench.from.clone(), bench.to.clone());
    let Pair { a, b, .. } = &mut bench.pair;
    let received = b.post_recv(7, &[to.slice(0, 8).unwrap()]).unwrap();
    let refusal = |result: doorbell::Result<Ticket>| result.unwrap_err().to_string();
    let graph = bench
        .a
        .capture(Mode::CU_STREAM_CAPTURE_MODE_GLOBAL, |stream| {
            // Receives in flight: their completions would be taken for those of the graph.
            let said = refusal(b.stream_wait_cq(stream, QueueKind::Recv));
            assert!(
                said.contains("1 work requests are prepared or in flight"),
                "{said}"
            );
            let said = refusal(a.stream_wait_cq(stream, QueueKind::Send));
            assert!(said.contains("nothing to wait for"), "{said}");
            let bytes = [0; 60];
            let remote = to.remote().slice(0, 60).unwrap();
            let said = refusal(a.stream_queue_send(stream, &Work::write_inline(&bytes, remote)));
            assert!(said.contains("60 inline bytes"), "{said}");
            let slices: Vec<_> = (0..4).map(|at| from.slice(at * 8, 8).unwrap()).collect();
            let said = refusal(a.stream_queue_send(stream, &Work::send(&slices)));
            assert!(said.contains("4 slices"), "{said}");
            let slices: Vec<_> = (0..5).map(|at| from.slice(at * 8, 8).unwrap()).collect();
            let said = refusal(a.stream_queue_recv(stream, 0, &slices));
            assert!(said.contains("at most 4 slices"), "{said}");
            // Bad input has its own error.
            let error = a
                .stream_queue_send(
                    stream,
                    &Work::write(&slices, to.remote().slice(0, 8).unwrap()),
                )
                .unwrap_err();
            assert!(matches!(error, Error::OutOfBounds { .. }), "{error}");
            for refused in [
                stream.record(&doorbell::Event::new()),
                stream.launch_host(|| unreachable!()),
                stream.query().map(drop),
            ] {
                let error = refused.unwrap_err();
                assert!(
                    matches!(&error, Error::State { kind, .. } if *kind == StateKind::Captured),
                    "{error}"
                );
            }
            let one = [from.slice(0, 8).unwrap()];
            a.stream_queue_send(stream, &Work::send(&one)).unwrap();
        });
    from.fill(0, 8, 9).unwrap();
    bench.a.launch(&graph);
    bench.a.wait();
    received.wait(SOON).unwrap();
    assert!(to.is_filled_with(0, 8, 9).unwrap());
}

/// Words: the same values with each launch.
#[test]
fn words_are_stored_and_awaited_by_each_launch() {
    let _alone = alone();
    let Some(bench) = Bench::new("words_are_stored", &config()) else {
        return;
    };
    let words = bench.pair.region(4096);
    let mut tickets = Vec::new();
    let graph = bench
        .a
        .capture(Mode::CU_STREAM_CAPTURE_MODE_GLOBAL, |stream| {
            let condition = Condition::GreaterOrEqual(5);
            tickets.push(stream_wait_value32(stream, &words, 0, condition, SOON).unwrap());
            tickets.push(stream_write_value32(stream, &words, 8, 11).unwrap());
        });
    for launch in 1..20 {
        words.store_u32(0, 0).unwrap();
        words.store_u32(8, 0).unwrap();
        bench.a.launch(&graph);
        std::thread::sleep(Duration::from_millis(1));
        assert_eq!(words.load_u32(8), Ok(0));
        words.store_u32(0, 5 + launch).unwrap();
        bench.a.wait();
        assert_eq!(words.load_u32(8), Ok(11));
        for ticket in &tickets {
            assert_eq!(ticket.launches(), Some(launch.into()));
        }
    }
    // A launch whose wait does not end in its time: nothing behind it is executed, until the fault is taken.
    let short = Some(Duration::from_millis(20));
    let late = bench
        .a
        .capture(Mode::CU_STREAM_CAPTURE_MODE_GLOBAL, |stream| {
            let condition = Condition::GreaterOrEqual(1000);
            tickets.push(stream_wait_value32(stream, &words, 0, condition, short).unwrap());
            tickets.push(stream_write_value32(stream, &words, 8, 12).unwrap());
        });
    bench.a.launch(&late);
    bench.a.launch(&graph);
    bench.a.wait();
    assert_eq!(words.load_u32(8), Ok(11));
    assert!(is_failed(&tickets[2]) && is_failed(&tickets[3]));
    let fault = bench.a.stream.synchronize(SOON).unwrap_err();
    assert!(fault.to_string().contains("time limit"), "{fault}");
    assert!(bench.a.stream.take_fault().is_some());
    bench.a.stream.synchronize(SOON).unwrap();
    words.store_u32(0, 1000).unwrap();
    bench.a.launch(&late);
    bench.a.wait();
    assert_eq!(words.load_u32(8), Ok(12));
}

/// What happens at a random launch of a graph.
#[derive(Debug, Clone, Copy)]
enum Event {
    Nothing,
    AbortSender,
    AbortReceiver,
    /// The region that the peer writes to is deregistered.
    Deregister,
    /// The network loses everything.
    Cut,
    /// A work request of the device ends in an error.
    FailSend,
    FailRecv,
}

const EVENTS: [Event; 7] = [
    Event::Nothing,
    Event::AbortSender,
    Event::AbortReceiver,
    Event::Deregister,
    Event::Cut,
    Event::FailSend,
    Event::FailRecv,
];

/// Whatever fails, at whatever launch: what a count says has arrived is there, the rest has a typed error, nothing hangs, and after a reset all works.
#[test]
fn replays_under_random_faults_are_right_or_have_a_typed_error() {
    let test = "replays_under_random_faults";
    let _alone = alone();
    let config = config().wait_timeout(Some(Duration::from_millis(300)));
    let Some(mut bench) = Bench::new(test, &config) else {
        return;
    };
    let device = device();
    let has_faults = device.set_faults(strict());
    let seed = from_env("DOORBELL_SEED", 1);
    let mut random = Random(seed);
    let total = from_env("DOORBELL_REPLAYS", 1_000);
    let mut launched = 0;
    let mut round = 0;
    while launched < total {
        round += 1;
        let label = format!("seed {seed}, round {round}");
        let event = *random.pick(&EVENTS);
        let event = match event {
            Event::Cut | Event::FailSend | Event::FailRecv if !has_faults => Event::Nothing,
            event => event,
        };
        if has_faults {
            device.set_faults(Faults {
                loss: random.below(5) as f64 / 100.0,
                duplicate: random.below(3) as f64 / 100.0,
                reorder: random.below(3) as f64 / 100.0,
                seed: random.next(),
                ..strict()
            });
        }
        let writes = random.below(2) == 0;
        let (from, to) = (bench.from.clone(), bench.pair.region(4096));
        let len = 8 * (1 + random.below(64));
        let slices = [from.slice(0, len).unwrap()];
        let into = [to.slice(0, len).unwrap()];
        let mut tickets = Vec::new();
        let Pair { a, b, .. } = &mut bench.pair;
        let mode = Mode::CU_STREAM_CAPTURE_MODE_GLOBAL;
        let sender = bench.a.capture(mode, |stream| {
            let work = match writes {
                true => Work::write(&slices, to.remote().slice(0, len).unwrap()).imm(5),
                false => Work::send(&slices),
            };
            tickets.push(a.stream_queue_send(stream, &work).unwrap());
            tickets.push(a.stream_wait_cq(stream, QueueKind::Send).unwrap());
        });
        let receiver = bench.b.capture(mode, |stream| {
            let into: &[_] = if writes { &[] } else { &into };
            tickets.push(b.stream_queue_recv(stream, 0, into).unwrap());
            tickets.push(b.stream_wait_cq(stream, QueueKind::Recv).unwrap());
        });
        let launches = 1 + random.below(60);
        let at = random.below(launches);
        let mut failed = false;
        for launch in 0..launches {
            let value = random.next() as u8;
            from.fill(0, len, value).unwrap();
            to.fill(0, len, !value).unwrap();
            if launch == at {
                let fault = |faults| assert!(device.set_faults(faults));
                match event {
                    Event::Nothing => {}
                    Event::AbortSender => a.abort(),
                    Event::AbortReceiver => b.abort(),
                    Event::Deregister => drop(to.deregister()),
                    Event::Cut => fault(Faults {
                        loss: 1.0,
                        ..strict()
                    }),
                    Event::FailSend => fault(Faults {
                        fail_send: (1, 0x04),
                        ..strict()
                    }),
                    Event::FailRecv => fault(Faults {
                        fail_recv: (1, 0x04),
                        ..strict()
                    }),
                }
            }
            bench.b.launch(&receiver);
            bench.a.launch(&sender);
            bench.a.wait();
            bench.b.wait();
            launched += 1;
            let counts: Vec<u64> = tickets.iter().filter_map(Ticket::launches).collect();
            let label = format!("{label}, {event:?} at {at}, launch {launch}, {counts:?}");
            // A count says no more than what was done.
            assert!(counts[1] <= counts[0] && counts[3] <= counts[2], "{label}");
            if counts[3] == launch + 1 {
                let is_right = to.is_filled_with(0, len, value).unwrap();
                assert!(is_right, "{label}");
            }
            if counts.iter().all(|count| *count == launch + 1) {
                assert!(!failed, "{label}");
                continue;
            }
            // At least one of the two has failed, and says why; what it has not done says so.
            failed = true;
            for (at, (side, application)) in [(&mut *a, &bench.a), (&mut *b, &bench.b)]
                .into_iter()
                .enumerate()
            {
                if counts[2 * at + 1] == launch + 1 {
                    continue;
                }
                let until = std::time::Instant::now() + Duration::from_secs(20);
                while side.failure().is_none() {
                    assert!(std::time::Instant::now() < until, "{label}, side {at}");
                    std::thread::sleep(Duration::from_micros(100));
                }
                assert!(is_failed(&tickets[2 * at + 1]), "{label}");
                let fault = application.stream.synchronize(SOON).unwrap_err();
                assert!(
                    matches!(fault, Error::Asynchronous { .. }),
                    "{label}: {fault}"
                );
            }
        }
        drop((sender, receiver));
        if has_faults {
            device.set_faults(strict());
        }
        for application in [&bench.a, &bench.b] {
            let _ = application.stream.take_fault();
        }
        bench.pair.reset();
    }
    device.set_faults(strict());
}

/// Words in memory of the GPU, and a count that grows with each launch.
#[test]
fn words_of_a_gpu_and_counts_are_awaited() {
    let _alone = alone();
    let Some(bench) = Bench::new("words_of_a_gpu", &config()) else {
        return;
    };
    let context = bench.a.stream.context().clone();
    let buffer = context.alloc(4096).unwrap();
    let domain = bench.from.domain().clone();
    let Some(region) = gpu_region("words_of_a_gpu", &domain, &buffer) else {
        return;
    };
    let write = |value: u64| buffer.copy_from_host(64, &value.to_ne_bytes()).unwrap();
    let read = |offset| {
        let mut bytes = [0; 8];
        buffer.copy_to_host(offset, &mut bytes).unwrap();
        u64::from_ne_bytes(bytes)
    };
    buffer.copy_from_host(0, &[0; 4096]).unwrap();
    let stream = &bench.a.stream;
    // Outside of a capture.
    let narrow = Condition::Equal(3);
    write(3);
    stream_wait_value32(stream, &region, 64, narrow, SOON).unwrap();
    let wide = Condition64::Equal(3);
    let waited = stream_wait_value64(stream, &region, 64, wide, SOON).unwrap();
    stream_write_value64(stream, &region, 128, 1 << 50).unwrap();
    stream_write_value32(stream, &region, 136, 5).unwrap();
    stream.synchronize(SOON).unwrap();
    assert_eq!((read(128), read(136)), (1 << 50, 5));
    assert_eq!(waited.launches(), Some(1));
    // Each launch waits for 10 more.
    let mut tickets = Vec::new();
    let graph = bench
        .a
        .capture(Mode::CU_STREAM_CAPTURE_MODE_GLOBAL, |stream| {
            tickets.push(stream_wait_count64(stream, &region, 64, (100, 10), SOON).unwrap());
        });
    for launch in 0..20 {
        write(100 + 10 * launch - 1);
        bench.a.launch(&graph);
        std::thread::sleep(Duration::from_millis(1));
        assert_eq!(tickets[0].launches(), Some(launch));
        write(100 + 10 * launch);
        bench.a.wait();
        assert_eq!(tickets[0].launches(), Some(launch + 1));
    }
}

/// Layers, each with a kernel, a push of the pages of its table, and a signal; the peer waits for the signals by counts. One launch a step on each side, and no other call.
#[test]
fn a_step_of_layers_is_one_launch() {
    const LAYERS: u64 = 5;
    const PAGE: u64 = 256;
    const PAGES: u64 = 24;
    /// Entries of a table.
    const ROOM: u64 = 20;
    let _alone = alone();
    let Some(mut bench) = Bench::new("a_step_of_layers", &config()) else {
        return;
    };
    let context = bench.a.stream.context().clone();
    let pages = bench.pair.region(LAYERS * PAGES * PAGE);
    let cache = bench.pair.region(LAYERS * PAGES * PAGE);
    let words = bench.pair.region(4096);
    let tables = context.alloc(LAYERS * 256).unwrap();
    let Some(table) = gpu_region("a_step_of_layers", bench.from.domain(), &tables) else {
        return;
    };
    let nothing = context.alloc(64).unwrap();
    nothing.copy_from_host(0, &[0; 64]).unwrap();
    let nothing = Region::register_device(bench.from.domain(), &nothing, Access::ALL).unwrap();
    words.fill(0, 4096, 0).unwrap();
    let signal = |at: u64| words.remote().slice(at * 8, 8).unwrap();
    let layer_bytes = PAGES * PAGE;
    let mut tickets = Vec::new();
    let Pair { a, b, .. } = &mut bench.pair;
    let mode = Mode::CU_STREAM_CAPTURE_MODE_GLOBAL;
    let sender = bench.a.capture(mode, |stream| {
        // The peer has used the pages of the step before.
        stream_wait_count64(stream, &words, 8 * LAYERS, (0, 1), SOON).unwrap();
        for layer in 0..LAYERS {
            stream.spin(Duration::from_micros(5)).unwrap();
            let push = PagePush {
                page_bytes: PAGE as u32,
                local: pages.slice(layer * layer_bytes, layer_bytes).unwrap(),
                remote: cache
                    .remote()
                    .slice(layer * layer_bytes, layer_bytes)
                    .unwrap(),
                table: table.slice(layer * 256, ROOM * 8).unwrap(),
                count: (&table, layer * 256 + ROOM * 8),
                signal: signal(layer),
            };
            tickets.push(a.stream_push_pages(stream, &push).unwrap());
        }
        for _ in 0..LAYERS {
            a.stream_wait_cq(stream, QueueKind::Send).unwrap();
        }
    });
    let receiver = bench.b.capture(mode, |stream| {
        for layer in 0..LAYERS {
            stream_wait_count64(stream, &words, layer * 8, (1, 1), SOON).unwrap();
            stream.spin(Duration::from_micros(5)).unwrap();
        }
        let acknowledge = PagePush {
            page_bytes: 1,
            local: pages.slice(0, 1).unwrap(),
            remote: signal(LAYERS),
            table: nothing.slice(0, 8).unwrap(),
            count: (&nothing, 8),
            signal: signal(LAYERS),
        };
        b.stream_push_pages(stream, &acknowledge).unwrap();
        b.stream_wait_cq(stream, QueueKind::Send).unwrap();
    });
    let mut random = Random(from_env("DOORBELL_SEED", 1));
    let fill_tables = |random: &mut Random| {
        let mut all = Vec::new();
        for layer in 0..LAYERS {
            let mut from: Vec<u64> = (0..PAGES).collect();
            let mut to = from.clone();
            random.shuffle(&mut from);
            random.shuffle(&mut to);
            let count = random.below(ROOM + 1);
            let entries: Vec<(u64, u64)> = from.into_iter().zip(to).take(count as usize).collect();
            let mut bytes: Vec<u8> = entries
                .iter()
                .flat_map(|(from, to)| (from | to << 32).to_ne_bytes())
                .collect();
            bytes.resize(ROOM as usize * 8, 0xff);
            bytes.extend((count as u32).to_ne_bytes());
            tables.copy_from_host(layer * 256, &bytes).unwrap();
            all.push(entries);
        }
        all
    };
    for step in 1..=50u64 {
        let entries = fill_tables(&mut random);
        for layer in 0..LAYERS {
            for page in 0..PAGES {
                let value = (step * 7 + layer * 31 + page) as u8;
                let at = layer * layer_bytes + page * PAGE;
                pages.fill(at, PAGE, value).unwrap();
                cache.fill(at, PAGE, !value).unwrap();
            }
        }
        let before = calls_here();
        bench.b.launch(&receiver);
        bench.a.launch(&sender);
        if let (Some(before), Some(after)) = (before, calls_here()) {
            assert_eq!(
                after - before,
                2,
                "calls of the driver in a step of both sides"
            );
        }
        bench.b.wait();
        for (layer, entries) in entries.iter().enumerate() {
            for (from, to) in entries {
                let value = (step * 7 + layer as u64 * 31 + from) as u8;
                let at = layer as u64 * layer_bytes + to * PAGE;
                assert!(
                    cache.is_filled_with(at, PAGE, value).unwrap(),
                    "step {step}"
                );
            }
            for page in (0..PAGES).filter(|page| entries.iter().all(|(_, to)| to != page)) {
                let value = !((step * 7 + layer as u64 * 31 + page) as u8);
                let at = layer as u64 * layer_bytes + page * PAGE;
                assert!(
                    cache.is_filled_with(at, PAGE, value).unwrap(),
                    "step {step}"
                );
            }
        }
        bench.a.wait();
        assert!(tickets.iter().all(|ticket| ticket.launches() == Some(step)));
    }
    // Steps behind each other: the signals keep them apart.
    fill_tables(&mut random);
    for _ in 0..50 {
        bench.a.launch(&sender);
        bench.b.launch(&receiver);
    }
    bench.a.wait();
    bench.b.wait();
    assert_eq!(tickets[0].launches(), Some(100));
    // A page that there is not: nothing of that layer is written, and all behind it is not executed.
    tables
        .copy_from_host(
            256,
            &[PAGES, 0]
                .map(|word| word as u32)
                .map(u32::to_ne_bytes)
                .concat(),
        )
        .unwrap();
    tables
        .copy_from_host(256 + ROOM * 8, &1u32.to_ne_bytes())
        .unwrap();
    bench.a.launch(&sender);
    bench.a.wait();
    assert_eq!(tickets[0].launches(), Some(101));
    assert!(is_failed(&tickets[1]) && is_failed(&tickets[4]));
    let fault = bench.a.stream.synchronize(SOON).unwrap_err();
    assert!(fault.to_string().contains("table of pages"), "{fault}");
    assert!(bench.pair.a.failure().is_some());
    assert_eq!(words.load_u64(8), Ok(100));
}

/// How many calls of the driver this thread has made, by the stand-in.
fn calls_here() -> Option<u64> {
    is_standin().then(standin::calls_here)
}

/// The example pushes the pages of each step, on both kinds of streams; it checks them itself.
#[test]
fn the_example_pushes_layers() {
    let _alone = alone();
    if Bench::new("the_example_pushes_layers", &config()).is_none() {
        return;
    }
    let name = std::env::var("DOORBELL_TEST_DEVICE");
    let device = name.as_deref().unwrap_or("softcx");
    for streams in ["host", "cuda"] {
        let arguments = [streams, "--device", device, "--steps", "5", "--layers", "6"];
        match kv_push::run(&arguments.map(String::from)) {
            Err(error) if lacks_gpu_memory(&format!("{error:#}")) => {
                waived("the_example_pushes_layers", &format!("{error:#}"));
            }
            pushed => pushed.unwrap(),
        }
    }
}

/// One endpoint fails; operations of another are in the same graph, behind it. These are not executed, so that endpoint fails, too: a later launch must not go on in
/// the middle.
#[test]
fn an_endpoint_whose_operations_are_skipped_fails() {
    let _alone = alone();
    let Some(mut bench) = Bench::new("an_endpoint_whose_operations", &config()) else {
        return;
    };
    let mut other = Pair::new(&device(), &config());
    let words = other.region(4096);
    let (from, to) = (bench.from.clone(), bench.to.clone());
    let mut tickets = Vec::new();
    let (first, second) = (&mut bench.pair.a, &mut other.a);
    let graph = bench
        .a
        .capture(Mode::CU_STREAM_CAPTURE_MODE_GLOBAL, |stream| {
            let slices = [from.slice(0, 8).unwrap()];
            let work = Work::write(&slices, to.remote().slice(0, 8).unwrap());
            tickets.push(first.stream_queue_send(stream, &work).unwrap());
            tickets.push(first.stream_wait_cq(stream, QueueKind::Send).unwrap());
            let slices = [words.slice(64, 8).unwrap()];
            let work = Work::write(&slices, words.remote().slice(128, 8).unwrap());
            tickets.push(second.stream_queue_send(stream, &work).unwrap());
            tickets.push(second.stream_wait_cq(stream, QueueKind::Send).unwrap());
        });
    bench.a.launch(&graph);
    bench.a.wait();
    assert!(tickets.iter().all(|ticket| ticket.launches() == Some(1)));
    bench.pair.a.abort();
    // A launch may still be executed before the watchdog has stopped the endpoint.
    let until = std::time::Instant::now() + Duration::from_secs(20);
    while other.a.failure().is_none() {
        assert!(std::time::Instant::now() < until);
        bench.a.launch(&graph);
        bench.a.wait();
        std::thread::sleep(Duration::from_millis(1));
    }
    let failure = other.a.failure().unwrap();
    assert_eq!(failure.cause, doorbell::Cause::Discarded);
    assert!(tickets.iter().all(is_failed), "{tickets:?}");
}

#[test]
fn a_receive_without_immediate_data_reports_none() {
    let _alone = alone();
    let Some(mut bench) = Bench::new("a_receive_without_immediate", &config()) else {
        return;
    };
    let both = exchange(&mut bench, Mode::CU_STREAM_CAPTURE_MODE_GLOBAL);
    check(&bench, &both, 3);
    assert_eq!(both.tickets[3].details(), Some((64, None)));
}

/// The builder would not know of the node, and its ticket would be that of an operation that is executed once.
#[test]
fn what_kernels_wait_for_is_refused_in_a_builders_capture() {
    let _alone = alone();
    let Some(bench) = Bench::new("what_kernels_wait_for", &config()) else {
        return;
    };
    let words = bench.pair.region(4096);
    let stream = &bench.a.stream;
    let builder = doorbell::GraphBuilder::capture(stream).unwrap();
    let equal = Condition64::Equal(0);
    let refused = stream_wait_value64(stream, &words, 0, equal, SOON).unwrap_err();
    assert!(
        matches!(&refused, Error::State { kind, .. } if *kind == StateKind::Captured),
        "{refused}"
    );
    drop(builder.instantiate().unwrap());
    stream_wait_value64(stream, &words, 0, equal, SOON).unwrap();
    stream.synchronize(SOON).unwrap();
}

/// The fault is taken while the launch that has failed is still on its way: the rest of the launch stays given up. What is queued later is executed.
#[test]
fn a_fault_is_taken_in_the_order_of_the_stream() {
    let _alone = alone();
    let Some(bench) = Bench::new("a_fault_is_taken_in_order", &config()) else {
        return;
    };
    let words = bench.pair.region(4096);
    words.fill(0, 4096, 0).unwrap();
    let mut tickets = Vec::new();
    let graph = bench
        .a
        .capture(Mode::CU_STREAM_CAPTURE_MODE_GLOBAL, |stream| {
            let short = Some(Duration::from_millis(20));
            let equal = Condition64::Equal(1);
            tickets.push(stream_wait_value64(stream, &words, 0, equal, short).unwrap());
            stream.spin(Duration::from_millis(100)).unwrap();
            tickets.push(stream_write_value64(stream, &words, 64, 12).unwrap());
        });
    for _ in 0..3 {
        words.fill(0, 4096, 0).unwrap();
        let before = tickets[1].launches();
        bench.a.launch(&graph);
        let until = std::time::Instant::now() + Duration::from_secs(20);
        while bench.a.stream.take_fault().is_none() {
            assert!(std::time::Instant::now() < until);
        }
        // It is taken once.
        assert!(bench.a.stream.take_fault().is_none());
        bench.a.wait();
        assert_eq!((words.load_u64(64), tickets[1].launches()), (Ok(0), before));
        words.store_u64(0, 1).unwrap();
        bench.a.launch(&graph);
        bench.a.wait();
        assert_eq!(words.load_u64(64), Ok(12));
        bench.a.stream.synchronize(SOON).unwrap();
    }
}

/// Behind a wait of a kernel that takes longer than its time limit, an endpoint whose queues are not those of graphs transmits nothing.
#[test]
fn what_is_behind_a_late_wait_of_a_kernel_is_not_transmitted() {
    let _alone = alone();
    let Some(mut bench) = Bench::new("what_is_behind_a_late_wait", &config()) else {
        return;
    };
    let words = bench.pair.region(4096);
    let (from, to) = (bench.from.clone(), bench.to.clone());
    let stream = &bench.a.stream;
    let slices = [from.slice(0, 8).unwrap()];
    let work = Work::write(&slices, to.remote().slice(0, 8).unwrap());
    for round in 0..6 {
        words.fill(0, 4096, 0).unwrap();
        from.fill(0, 8, 7).unwrap();
        to.fill(0, 8, 0).unwrap();
        let ends = round % 2 == 1;
        let short = Some(Duration::from_millis(if ends { 20_000 } else { 20 }));
        let reached = Condition64::GreaterOrEqual(1);
        let waited = stream_wait_value64(stream, &words, 0, reached, short).unwrap();
        let sent = bench.pair.a.stream_queue_send(stream, &work).unwrap();
        bench
            .pair
            .a
            .stream_wait_cq(stream, QueueKind::Send)
            .unwrap();
        if ends {
            std::thread::sleep(Duration::from_millis(5));
            assert!(to.is_filled_with(0, 8, 0).unwrap());
            words.store_u64(0, 1).unwrap();
            stream.synchronize(SOON).unwrap();
            assert!(to.is_filled_with(0, 8, 7).unwrap());
            assert_eq!(
                (waited.status(), sent.status()),
                (Status::Complete, Status::Complete)
            );
            continue;
        }
        let fault = stream.synchronize(SOON).unwrap_err();
        assert!(fault.to_string().contains("time limit"), "{fault}");
        std::thread::sleep(Duration::from_millis(20));
        assert!(to.is_filled_with(0, 8, 0).unwrap());
        assert!(is_failed(&waited));
        assert_ne!(sent.status(), Status::Complete);
        stream.take_fault().unwrap();
        bench.pair.reset();
    }
}

#[test]
fn a_wait_that_is_refused_leaves_the_send_to_the_next() {
    let _alone = alone();
    let Some(mut bench) = Bench::new("a_wait_that_is_refused", &config()) else {
        return;
    };
    let words = bench.pair.region(4096);
    words.fill(0, 4096, 0).unwrap();
    let _both = exchange(&mut bench, Mode::CU_STREAM_CAPTURE_MODE_GLOBAL);
    let (from, to) = (bench.from.clone(), bench.to.clone());
    let slices = [from.slice(0, 8).unwrap()];
    let work = Work::write(&slices, to.remote().slice(0, 8).unwrap());
    let (stream, a) = (&bench.a.stream, &mut bench.pair.a);
    a.stream_queue_send(stream, &work).unwrap();
    let short = Some(Duration::from_millis(20));
    stream_wait_value64(stream, &words, 0, Condition64::GreaterOrEqual(1), short).unwrap();
    stream.synchronize(SOON).unwrap_err();
    a.stream_wait_cq(stream, QueueKind::Send).unwrap_err();
    stream.take_fault().unwrap();
    let waited = a.stream_wait_cq(stream, QueueKind::Send).unwrap();
    stream.synchronize(SOON).unwrap();
    assert_eq!(waited.status(), Status::Complete);
}

/// Two instances of a graph, on two streams at the same time.
#[test]
fn launches_of_two_instances_are_all_counted() {
    let _alone = alone();
    let Some(mut bench) = Bench::new("launches_of_two_instances", &config()) else {
        return;
    };
    let (from, to) = (bench.from.clone(), bench.to.clone());
    let slices = [from.slice(0, 8).unwrap()];
    let work = Work::write(&slices, to.remote().slice(0, 8).unwrap());
    let (stream, endpoint) = (&bench.a.stream, &mut bench.pair.a);
    bench.a.begin(Mode::CU_STREAM_CAPTURE_MODE_GLOBAL);
    let sent = endpoint.stream_queue_send(stream, &work).unwrap();
    let waited = endpoint.stream_wait_cq(stream, QueueKind::Send).unwrap();
    let (mut graph, mut one, mut two) = (null_mut(), null_mut(), null_mut());
    // SAFETY: the capture of this stream; the graph is destroyed once, and the executable ones by `Graph`.
    unsafe {
        ok(sys::cuStreamEndCapture(bench.a.raw, &mut graph));
        ok(sys::cuGraphInstantiateWithFlags(&mut one, graph, 0));
        ok(sys::cuGraphInstantiateWithFlags(&mut two, graph, 0));
        ok(sys::cuGraphDestroy(graph));
    }
    let (one, two) = (Graph(one), Graph(two));
    let launches = from_env("DOORBELL_GRAPH_LAUNCHES", 1_000);
    for _ in 0..launches {
        bench.a.launch(&one);
        bench.b.launch(&two);
    }
    bench.a.wait();
    bench.b.wait();
    let counts = (sent.launches(), waited.launches());
    assert_eq!(counts, (Some(2 * launches), Some(2 * launches)));
}

/// Graph, endpoints and regions go while a launch runs, which has to end as if they were there.
#[test]
fn graphs_are_destroyed_while_they_run() {
    let _alone = alone();
    for _ in 0..10 {
        let Some(mut bench) = Bench::new("graphs_are_destroyed", &config()) else {
            return;
        };
        let both = exchange(&mut bench, Mode::CU_STREAM_CAPTURE_MODE_GLOBAL);
        bench.from.fill(0, 64, 1).unwrap();
        bench.to.fill(0, 64, 0).unwrap();
        bench.b.launch(&both.receiver);
        let Exchange {
            sender,
            receiver,
            tickets,
        } = both;
        drop(receiver);
        bench.a.launch(&sender);
        drop(sender);
        let other = Pair::new(&device(), &config());
        drop(std::mem::replace(&mut bench.pair, other));
        bench.b.wait();
        bench.a.wait();
        assert!(bench.is_filled(64, 1));
        assert_eq!(tickets[3].launches(), Some(1));
    }
}

/// A send of a capture that was broken off is not taken for one of the next capture.
#[test]
fn captures_that_are_broken_off_leave_nothing_to_wait_for() {
    let _alone = alone();
    let Some(mut bench) = Bench::new("captures_that_are_broken_off", &config()) else {
        return;
    };
    let (from, to) = (bench.from.clone(), bench.to.clone());
    let slices = [from.slice(0, 8).unwrap()];
    let work = Work::write(&slices, to.remote().slice(0, 8).unwrap());
    for round in 0..10 {
        bench.a.begin(Mode::CU_STREAM_CAPTURE_MODE_GLOBAL);
        let (stream, a) = (&bench.a.stream, &mut bench.pair.a);
        a.stream_queue_send(stream, &work).unwrap();
        let mut graph = null_mut();
        // SAFETY: calls that a capture does not permit, which breaks it off, and that ends it.
        unsafe {
            assert_ne!(
                sys::cuStreamSynchronize(bench.a.raw),
                sys::CUresult::CUDA_SUCCESS
            );
            a.stream_queue_send(stream, &work).unwrap_err();
            a.stream_wait_cq(stream, QueueKind::Send).unwrap_err();
            assert_ne!(
                sys::cuStreamEndCapture(bench.a.raw, &mut graph),
                sys::CUresult::CUDA_SUCCESS
            );
        }
        let mut waited = None;
        let mode = Mode::CU_STREAM_CAPTURE_MODE_GLOBAL;
        let graph = bench.a.capture(mode, |stream| {
            a.stream_queue_send(stream, &work).unwrap();
            waited = Some(a.stream_wait_cq(stream, QueueKind::Send).unwrap());
            a.stream_wait_cq(stream, QueueKind::Send).unwrap_err();
        });
        from.fill(0, 8, round).unwrap();
        bench.a.launch(&graph);
        bench.a.wait();
        assert!(bench.is_filled(8, round));
        assert_eq!(waited.unwrap().launches(), Some(1));
        drop(graph);
        if round % 3 == 2 {
            bench.pair.reset();
        }
    }
}

/// Posts, sends and waits in a random order, by graphs and by calls outside of them: each message arrives in the receive that was posted first, and each wait reports the
/// message that came first.
#[test]
fn random_orders_pair_sends_receives_and_waits() {
    let _alone = alone();
    for seed in 1..=from_env("DOORBELL_GRAPH_SEEDS", 4) {
        let Some(mut bench) = Bench::new("random_orders", &config()) else {
            return;
        };
        let mut random = Random(seed * 7919);
        let (from, to) = (bench.from.clone(), bench.to.clone());
        let mode = Mode::CU_STREAM_CAPTURE_MODE_GLOBAL;
        // First some host work to move the queues.
        let host = HostStream::new("before").unwrap();
        for _ in 0..random.below(40) {
            bench
                .pair
                .b
                .post_recv(0, &[to.slice(0, 8).unwrap()])
                .unwrap();
            let s = [from.slice(0, 8).unwrap()];
            let Pair { a, b, .. } = &mut bench.pair;
            a.stream_queue_send(&host, &Work::send(&s)).unwrap();
            a.stream_wait_cq(&host, QueueKind::Send).unwrap();
            b.stream_wait_cq(&host, QueueKind::Recv).unwrap();
            host.synchronize(SOON).unwrap();
        }
        // Graphs: sends of imm k; posts of buffer k; waits.
        let Pair { a, b, .. } = &mut bench.pair;
        let mut sends = Vec::new();
        for k in 0..4u32 {
            let mut t = None;
            let g = bench.a.capture(mode, |stream| {
                let s = [from.slice(0, 8 + u64::from(k)).unwrap()];
                let work = Work::send(&s);
                let work = if k % 2 == 0 { work.imm(100 + k) } else { work };
                a.stream_queue_send(stream, &work).unwrap();
                t = Some(a.stream_wait_cq(stream, QueueKind::Send).unwrap());
            });
            sends.push((g, t.unwrap(), 0u64));
        }
        let mut posts = Vec::new();
        for k in 0..6u64 {
            let g = bench.b.capture(mode, |stream| {
                let n = 1 + k % 3;
                for j in 0..n {
                    b.stream_queue_recv(
                        stream,
                        0,
                        &[
                            to.slice(1024 * k + 64 * j, 16).unwrap(),
                            to.slice(1024 * k + 64 * j + 16, 16).unwrap(),
                        ][..(1 + j as usize % 2)],
                    )
                    .unwrap();
                }
            });
            posts.push((g, 1 + k % 3));
        }
        let mut w = None;
        let waits = bench.b.capture(mode, |stream| {
            w = Some(b.stream_wait_cq(stream, QueueKind::Recv).unwrap());
        });
        let w = w.unwrap();
        let mut waited = 0u64;
        let mut posted = std::collections::VecDeque::new();
        let mut sent = std::collections::VecDeque::new();
        let mut value = 0u8;
        for step in 0..600 {
            match random.below(3) {
                0 if posted.len() + sent.len() <= 28 => {
                    if random.below(4) == 0 {
                        let off = 512 + 1024 * random.below(6);
                        b.stream_queue_recv(&bench.b.stream, 0, &[to.slice(off, 16).unwrap()])
                            .unwrap();
                        posted.push_back(off);
                    } else {
                        let k = random.below(6);
                        bench.b.launch(&posts[k as usize].0);
                        for j in 0..posts[k as usize].1 {
                            posted.push_back(1024 * k + 64 * j);
                        }
                    }
                    bench.b.wait();
                }
                1 if !posted.is_empty() => {
                    value = value.wrapping_add(1);
                    from.fill(0, 16, value).unwrap();
                    let off = posted.pop_front().unwrap();
                    to.fill(off, 16, !value).unwrap();
                    if random.below(5) == 0 {
                        let s = [from.slice(0, 8).unwrap()];
                        a.stream_queue_send(&bench.a.stream, &Work::send(&s))
                            .unwrap();
                        let t = a.stream_wait_cq(&bench.a.stream, QueueKind::Send).unwrap();
                        bench.a.stream.synchronize(SOON).unwrap();
                        assert_eq!(t.status(), Status::Complete);
                        sent.push_back((8, None, off, value));
                    } else {
                        let k = random.below(4) as usize;
                        bench.a.launch(&sends[k].0);
                        bench.a.wait();
                        sends[k].2 += 1;
                        assert_eq!(sends[k].1.launches(), Some(sends[k].2));
                        sent.push_back((
                            8 + k as u32,
                            k.is_multiple_of(2).then_some(100 + k as u32),
                            off,
                            value,
                        ));
                    }
                    let (len, _, off, value) = *sent.back().unwrap();
                    // Buffers may repeat; the check is at once.
                    assert!(
                        to.is_filled_with(off, len.into(), value).unwrap(),
                        "seed {seed} step {step}"
                    );
                }
                2 if !sent.is_empty() => {
                    let (len, imm, _, _) = sent.pop_front().unwrap();
                    if random.below(5) == 0 {
                        let t = b.stream_wait_cq(&bench.b.stream, QueueKind::Recv).unwrap();
                        bench.b.stream.synchronize(SOON).unwrap();
                        assert_eq!(
                            (t.status(), t.details()),
                            (Status::Complete, Some((len, imm)))
                        );
                    } else {
                        bench.b.launch(&waits);
                        bench.b.wait();
                        waited += 1;
                        assert_eq!(
                            (w.launches(), w.details()),
                            (Some(waited), Some((len, imm))),
                            "seed {seed} step {step}"
                        );
                    }
                }
                _ => {}
            }
        }
        drop((sends, posts, waits));
        bench.pair.reset();
    }
}

/// More receives than the 16 bits of a doorbell record count.
#[test]
fn doorbell_records_wrap() {
    let _alone = alone();
    let Some(mut bench) = Bench::new("doorbell_records_wrap", &config()) else {
        return;
    };
    let (from, to) = (bench.from.clone(), bench.to.clone());
    let mode = Mode::CU_STREAM_CAPTURE_MODE_GLOBAL;
    let Pair { a, b, .. } = &mut bench.pair;
    let s = [from.slice(0, 8).unwrap()];
    let r = [to.slice(0, 8).unwrap()];
    let mut last = None;
    let sender = bench.a.capture(mode, |stream| {
        for _ in 0..24 {
            a.stream_queue_send(stream, &Work::send(&s)).unwrap();
        }
        for _ in 0..24 {
            a.stream_wait_cq(stream, QueueKind::Send).unwrap();
        }
    });
    let receiver = bench.b.capture(mode, |stream| {
        for _ in 0..24 {
            b.stream_queue_recv(stream, 0, &r).unwrap();
        }
        for _ in 0..24 {
            last = Some(b.stream_wait_cq(stream, QueueKind::Recv).unwrap());
        }
    });
    for launch in 0..3000u64 {
        bench.b.launch(&receiver);
        bench.a.launch(&sender);
        if launch % 64 == 0 {
            bench.a.wait();
            bench.b.wait();
        }
    }
    bench.a.wait();
    bench.b.wait();
    assert_eq!(last.unwrap().launches(), Some(3000));
}

/// Nothing of an operation outside of a capture stays behind when the stream has executed it, also if the stream gets nothing more.
#[test]
fn operations_outside_of_a_capture_keep_nothing() {
    let _alone = alone();
    let Some(mut bench) = Bench::new("operations_outside_of_a_capture", &config()) else {
        return;
    };
    let to = bench.to.clone();
    let both = exchange(&mut bench, Mode::CU_STREAM_CAPTURE_MODE_GLOBAL);
    for _ in 0..8 {
        bench
            .pair
            .b
            .stream_queue_recv(&bench.b.stream, 0, &[to.slice(0, 16).unwrap()])
            .unwrap();
        bench.b.wait();
    }
    drop(both);
    bench.pair.b.reset().unwrap();
}
