//! What a blocked stream blocks: calls of other threads, other streams, graphs, and callers that queue on the stream. The library gives nothing back to the
//! driver while a stream waits, and the stand-in models a driver that blocks then. Only a GPU can confirm that model.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use cudarc::driver::sys::{self, CUresult, CUstream, CUstreamWaitValue_flags as Flags};
use serde_json::{Map, Value, json};

use super::gpu::{
    Gpu, PORTABLE, Page, SOON, check, drained, is_few, new_stream, queue, wait32, write32,
};

/// How long a call may take before it counts as blocked.
pub const BLOCKED: Duration = Duration::from_millis(300);
/// The same of the calls that are tried while another one is blocked.
pub const MEANWHILE: Duration = Duration::from_millis(100);
/// A kernel that does nothing, which every driver compiles.
pub const PTX: &[u8] =
    b".version 6.4\n.target sm_52\n.address_size 64\n.visible .entry nothing()\n{\n ret;\n}\n\0";

pub type Call = Box<dyn FnOnce() -> Result<()> + Send>;
pub type Running = JoinHandle<Result<Duration>>;

/// A stream, for another thread.
#[derive(Clone, Copy)]
pub struct SendableStream(pub CUstream);

// SAFETY: streams may be used from any thread; the driver locks.
unsafe impl Send for SendableStream {}

impl SendableStream {
    pub fn raw(self) -> CUstream {
        self.0
    }
}

/// A stream with a gate: it waits until the gate's word has the number of the wait.
pub struct GatedStream {
    pub gpu: Gpu,
    pub gate: Page,
    pub closed: u32,
}

impl GatedStream {
    pub fn new() -> Result<GatedStream> {
        Ok(GatedStream {
            gpu: Gpu::new()?,
            gate: Page::new(PORTABLE, false)?,
            closed: 0,
        })
    }

    pub fn close(&mut self) -> Result<()> {
        self.closed += 1;
        let geq = Flags::CU_STREAM_WAIT_VALUE_GEQ;
        self.gpu
            .queue(&mut [wait32(self.gate.gpu, self.closed, geq)])
    }

    pub fn open(&self) {
        self.gate.word(0).store(self.closed, Ordering::Release);
    }

    pub fn opened(&self) -> Result<()> {
        self.open();
        ensure!(drained(self.gpu.stream, SOON), "the stream did not end");
        Ok(())
    }

    /// Makes a call in a thread of its own, which says how long it took.
    pub fn call(&self, call: Call) -> Running {
        let context = self.gpu.context.clone();
        std::thread::spawn(move || {
            // SAFETY: a context that lives as long as the process.
            check("cuCtxSetCurrent", unsafe {
                sys::cuCtxSetCurrent(context.raw())
            })?;
            let start = Instant::now();
            call()?;
            Ok(start.elapsed())
        })
    }
}

/// Whether it ends by itself in that time.
pub fn ends(running: &Running, limit: Duration) -> bool {
    let start = Instant::now();
    while !running.is_finished() && start.elapsed() < limit {
        std::thread::sleep(Duration::from_millis(1));
    }
    running.is_finished()
}

pub fn us(running: Running) -> Value {
    match running.join() {
        Ok(Ok(took)) => json!(took.as_secs_f64() * 1e6),
        Ok(Err(error)) => json!(format!("{error:#}")),
        Err(_) => json!("it panicked"),
    }
}

/// A stream of the highest priority, on which copies are queued.
pub fn copying() -> Result<SendableStream> {
    let (mut least, mut greatest, mut stream) = (0, 0, std::ptr::null_mut());
    // SAFETY: each call writes what it says.
    unsafe {
        let asked = sys::cuCtxGetStreamPriorityRange(&mut least, &mut greatest);
        check("cuCtxGetStreamPriorityRange", asked)?;
        let made = sys::cuStreamCreateWithPriority(&mut stream, 1, greatest);
        check("cuStreamCreateWithPriority", made)?;
    }
    Ok(SendableStream(stream))
}

pub fn alloc() -> Result<u64> {
    let mut memory = 0;
    // SAFETY: writes one address.
    check("cuMemAlloc", unsafe {
        sys::cuMemAlloc_v2(&mut memory, 1 << 16)
    })?;
    Ok(memory)
}

/// Calls that other threads make all the time.
pub fn everyday(
    other: SendableStream,
    copying: SendableStream,
    host: Page,
    memory: u64,
) -> [(&'static str, Call); 4] {
    [
        (
            "a copy to the GPU on a stream of high priority",
            Box::new(move || {
                let from = host.word(0).as_ptr();
                // SAFETY: memory of that length, which is never freed.
                check("cuMemcpyHtoDAsync", unsafe {
                    sys::cuMemcpyHtoDAsync_v2(memory, from.cast(), 64, copying.raw())
                })?;
                ensure!(drained(copying.raw(), SOON), "the copy did not end");
                Ok(())
            }),
        ),
        (
            "a memory operation on another stream",
            Box::new(move || {
                queue(other.raw(), &mut [write32(host.gpu + 512, 1)])?;
                ensure!(drained(other.raw(), SOON), "the operation did not end");
                Ok(())
            }),
        ),
        (
            "an event on another stream",
            Box::new(move || {
                let mut event = std::ptr::null_mut();
                // SAFETY: writes one handle, which is then used.
                unsafe {
                    check("cuEventCreate", sys::cuEventCreate(&mut event, 2))?;
                    check("cuEventRecord", sys::cuEventRecord(event, other.raw()))
                }
            }),
        ),
        ("an allocation", Box::new(|| alloc().map(drop))),
    ]
}

/// What is given back, made or loaded now and then.
fn rare() -> Result<Vec<(&'static str, Call)>> {
    let registered = Page::new(PORTABLE, false)?;
    let memory = alloc()?;
    let mut pinned = std::ptr::null_mut();
    // SAFETY: writes one address.
    check("cuMemAllocHost", unsafe {
        sys::cuMemAllocHost_v2(&mut pinned, 4096)
    })?;
    let (pinned, registered) = (pinned as usize, registered.host as usize);
    let spare = SendableStream(new_stream()?);
    let mut module = std::ptr::null_mut();
    // SAFETY: PTX that ends with a zero; writes one handle.
    check("cuModuleLoadData", unsafe {
        sys::cuModuleLoadData(&mut module, PTX.as_ptr().cast())
    })?;
    let module = module as usize;
    Ok(vec![
        (
            "cuMemHostUnregister",
            Box::new(move || {
                // SAFETY: registered above, and not used after this.
                check("cuMemHostUnregister", unsafe {
                    sys::cuMemHostUnregister(registered as *mut _)
                })
            }),
        ),
        (
            "cuMemFree",
            // SAFETY: allocated above.
            Box::new(move || check("cuMemFree", unsafe { sys::cuMemFree_v2(memory) })),
        ),
        (
            "cuMemFreeHost",
            Box::new(move || {
                // SAFETY: allocated above.
                check("cuMemFreeHost", unsafe {
                    sys::cuMemFreeHost(pinned as *mut _)
                })
            }),
        ),
        (
            "cuMemHostRegister",
            Box::new(|| Page::new(PORTABLE, false).map(drop)),
        ),
        ("cuMemAlloc", Box::new(|| alloc().map(drop))),
        ("cuStreamCreate", Box::new(|| new_stream().map(drop))),
        (
            "cuStreamDestroy",
            Box::new(move || {
                // SAFETY: made above.
                check("cuStreamDestroy", unsafe {
                    sys::cuStreamDestroy_v2(spare.raw())
                })
            }),
        ),
        (
            "cuModuleLoadData",
            Box::new(|| {
                let mut module = std::ptr::null_mut();
                // SAFETY: PTX that ends with a zero; writes one handle.
                check("cuModuleLoadData", unsafe {
                    sys::cuModuleLoadData(&mut module, PTX.as_ptr().cast())
                })
            }),
        ),
        (
            "cuModuleUnload",
            Box::new(move || {
                // SAFETY: loaded above.
                check("cuModuleUnload", unsafe {
                    sys::cuModuleUnload(module as _)
                })
            }),
        ),
        (
            "cuMemAllocHost",
            Box::new(|| {
                let mut pinned = std::ptr::null_mut();
                // SAFETY: writes one address.
                check("cuMemAllocHost", unsafe {
                    sys::cuMemAllocHost_v2(&mut pinned, 4096)
                })
            }),
        ),
    ])
}

/// Which calls wait for a stream that waits, and what other threads cannot do meanwhile.
pub fn calls() -> Result<Value> {
    let mut gated = GatedStream::new()?;
    let (other, copying) = (SendableStream(new_stream()?), copying()?);
    let (host, memory) = (Page::new(PORTABLE, false)?, alloc()?);
    let mut found = Map::new();
    gated.close()?;
    for (name, call) in everyday(other, copying, host, memory) {
        let running = gated.call(call);
        let is_over = ends(&running, BLOCKED);
        if !is_over {
            gated.opened()?;
            gated.close()?;
        }
        found.insert(name.into(), json!({"waits": !is_over, "us": us(running)}));
    }
    gated.opened()?;
    for (name, call) in rare()? {
        gated.close()?;
        let running = gated.call(call);
        let is_over = ends(&running, BLOCKED);
        let mut blocks = Map::new();
        let mut meanwhile = Vec::new();
        if !is_over {
            for (what, call) in everyday(other, copying, host, memory) {
                let beside = gated.call(call);
                blocks.insert(what.into(), json!(!ends(&beside, MEANWHILE)));
                meanwhile.push(beside);
            }
        }
        gated.opened()?;
        meanwhile.into_iter().for_each(|beside| drop(us(beside)));
        let said = match is_over {
            true => json!({"waits": false, "us": us(running)}),
            false => json!({"waits": true, "us": us(running), "blocked meanwhile": blocks}),
        };
        found.insert(name.into(), said);
    }
    Ok(found.into())
}

/// How long a step of [`streams`] may make no progress.
const STUCK: Duration = Duration::from_secs(2);

/// How many streams may wait until others stop as well: four that have worked before, one of the highest priority, and one that begins only then. Also
/// how many streams that wait let another one be made.
pub fn streams(short: bool) -> Result<Value> {
    let mut gated = GatedStream::new()?;
    let gate = gated.gate;
    let mut others = Vec::new();
    for name in ["first", "second", "third", "fourth"] {
        others.push((name, new_stream()?));
    }
    others.push(("of the highest priority", copying()?.raw()));
    for (_, stream) in &others {
        queue(*stream, &mut [write32(gate.gpu + 256, 1)])?;
        ensure!(drained(*stream, SOON), "a stream does not work");
    }
    others.push(("not used before", new_stream()?));
    let most = if is_few(short) { 8 } else { 36 };
    let mut waiting = Vec::new();
    let mut found = Map::new();
    gated.close()?;
    let turn = Arc::new(AtomicU32::new(1));
    // A call that is blocked until a stream goes on ends when the gate opens.
    let watch = std::thread::spawn({
        let (turn, closed) = (Arc::clone(&turn), gated.closed);
        move || {
            let (mut last, mut since) = (0, Instant::now());
            loop {
                let now = turn.load(Ordering::Acquire);
                if now == 0 {
                    return None;
                }
                if now != last {
                    (last, since) = (now, Instant::now());
                } else if since.elapsed() > STUCK {
                    gate.word(0).store(closed, Ordering::Release);
                    return Some(now);
                }
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    });
    // One that waits is made already.
    for count in 2..=most {
        turn.store(count, Ordering::Release);
        let stream = new_stream()?;
        let geq = Flags::CU_STREAM_WAIT_VALUE_GEQ;
        queue(stream, &mut [wait32(gate.gpu, gated.closed, geq)])?;
        if watch.is_finished() {
            break;
        }
        waiting.push(stream);
        for (name, stream) in &others {
            if found.contains_key(*name) {
                continue;
            }
            queue(*stream, &mut [write32(gate.gpu + 256, count)])?;
            if !drained(*stream, Duration::from_millis(100)) {
                found.insert((*name).into(), json!(count));
            }
        }
    }
    turn.store(0, Ordering::Release);
    let stuck = watch.join().ok().flatten();
    for (name, _) in &others {
        let none = format!("none of {most} streams stops it");
        found.entry(*name).or_insert(json!(none));
    }
    found.insert(
        "a new one cannot be made beside".into(),
        json!(stuck.map(|count| count - 1)),
    );
    gated.opened()?;
    waiting.extend(others.iter().map(|(_, stream)| *stream));
    ensure!(
        waiting.iter().all(|stream| drained(*stream, SOON)),
        "the streams did not end"
    );
    let connections = std::env::var("CUDA_DEVICE_MAX_CONNECTIONS");
    found.insert(
        "CUDA_DEVICE_MAX_CONNECTIONS".into(),
        json!(connections.ok()),
    );
    Ok(found.into())
}

/// Whether a graph whose earlier launch waits is patched and launched again without waiting, and whether each launch has its own values.
pub fn graphs() -> Result<Value> {
    let gated = GatedStream::new()?;
    let (page, stream) = (gated.gate, SendableStream(gated.gpu.stream));
    let context = gated.gpu.context.raw() as usize;
    let ops = move |number: u32| {
        let geq = Flags::CU_STREAM_WAIT_VALUE_GEQ;
        [
            wait32(page.gpu, number, geq),
            write32(page.gpu + 1024, number),
        ]
    };
    let params = move |ops: &mut [_; 2]| sys::CUDA_BATCH_MEM_OP_NODE_PARAMS {
        ctx: context as _,
        count: 2,
        paramArray: ops.as_mut_ptr(),
        flags: 0,
    };
    let (mut graph, mut node, mut exec) = (
        std::ptr::null_mut(),
        std::ptr::null_mut(),
        std::ptr::null_mut(),
    );
    let mut first = ops(1);
    // SAFETY: each call writes one handle; the parameters are copied.
    unsafe {
        check("cuGraphCreate", sys::cuGraphCreate(&mut graph, 0))?;
        let added = sys::cuGraphAddBatchMemOpNode(
            &mut node,
            graph,
            std::ptr::null(),
            0,
            &params(&mut first),
        );
        check("cuGraphAddBatchMemOpNode", added)?;
        let made = sys::cuGraphInstantiateWithFlags(&mut exec, graph, 0);
        check("cuGraphInstantiateWithFlags", made)?;
        check("cuGraphLaunch", sys::cuGraphLaunch(exec, gated.gpu.stream))?;
    }
    let (exec, node) = (exec as usize, node as usize);
    let again = gated.call(Box::new(move || {
        let mut second = ops(2);
        // SAFETY: handles made above; the parameters are copied.
        unsafe {
            let patched =
                sys::cuGraphExecBatchMemOpNodeSetParams(exec as _, node as _, &params(&mut second));
            check("cuGraphExecBatchMemOpNodeSetParams", patched)?;
            check("cuGraphLaunch", sys::cuGraphLaunch(exec as _, stream.raw()))
        }
    }));
    let is_over = ends(&again, BLOCKED);
    let stored = page.word(1024);
    page.word(0).store(1, Ordering::Release);
    let start = Instant::now();
    while stored.load(Ordering::Acquire) == 0 && start.elapsed() < SOON {
        std::hint::spin_loop();
    }
    std::thread::sleep(Duration::from_millis(5));
    let of_first = stored.load(Ordering::Acquire);
    page.word(0).store(2, Ordering::Release);
    let took = us(again);
    ensure!(drained(gated.gpu.stream, SOON), "the launches did not end");
    let of_second = stored.load(Ordering::Acquire);
    ensure!(
        (of_first, of_second) == (1, 2),
        "the launches stored {of_first} and {of_second}"
    );
    Ok(json!({"patch and launch wait for the launch before": !is_over, "us": took}))
}

/// Calls on the stream itself and about an event that it has not reached.
fn of_stream(
    full: SendableStream,
    other: SendableStream,
    event: usize,
) -> [(&'static str, Call); 5] {
    [
        (
            "cuStreamQuery",
            Box::new(move || {
                // SAFETY: a stream of the context.
                let answer = unsafe { sys::cuStreamQuery(full.raw()) };
                ensure!(
                    matches!(
                        answer,
                        CUresult::CUDA_SUCCESS | CUresult::CUDA_ERROR_NOT_READY
                    ),
                    "{answer:?}"
                );
                Ok(())
            }),
        ),
        (
            "cuStreamIsCapturing",
            Box::new(move || {
                let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
                // SAFETY: writes one value.
                check("cuStreamIsCapturing", unsafe {
                    sys::cuStreamIsCapturing(full.raw(), &mut status)
                })
            }),
        ),
        (
            "cuStreamGetCtx",
            Box::new(move || {
                let mut context = std::ptr::null_mut();
                // SAFETY: writes one handle.
                check("cuStreamGetCtx", unsafe {
                    sys::cuStreamGetCtx(full.raw(), &mut context)
                })
            }),
        ),
        (
            "cuEventQuery",
            Box::new(move || {
                // SAFETY: an event of the context.
                let answer = unsafe { sys::cuEventQuery(event as _) };
                ensure!(answer == CUresult::CUDA_ERROR_NOT_READY, "{answer:?}");
                Ok(())
            }),
        ),
        (
            "cuStreamWaitEvent on another stream",
            Box::new(move || {
                // SAFETY: a stream and an event of the context.
                check("cuStreamWaitEvent", unsafe {
                    sys::cuStreamWaitEvent(other.raw(), event as _, 0)
                })
            }),
        ),
    ]
}

/// How many calls a stream that waits takes, and what other threads cannot do while the next one is blocked.
pub fn queued(short: bool) -> Result<Value> {
    let mut gated = GatedStream::new()?;
    let (other, following, copying) = (
        SendableStream(new_stream()?),
        SendableStream(new_stream()?),
        copying()?,
    );
    let (host, memory) = (Page::new(PORTABLE, false)?, alloc()?);
    let most = if is_few(short) { 500 } else { 20_000_u32 };
    let (page, stream) = (gated.gate, SendableStream(gated.gpu.stream));
    gated.close()?;
    let mut event = std::ptr::null_mut();
    // SAFETY: writes one handle, which is then used.
    unsafe {
        check("cuEventCreate", sys::cuEventCreate(&mut event, 2))?;
        check("cuEventRecord", sys::cuEventRecord(event, stream.raw()))?;
    }
    let made = Arc::new(AtomicU32::new(0));
    let making = gated.call({
        let made = Arc::clone(&made);
        Box::new(move || {
            for number in 1..=most {
                queue(stream.raw(), &mut [write32(page.gpu + 64, number)])?;
                made.store(number, Ordering::Relaxed);
            }
            Ok(())
        })
    });
    let (mut last, mut since) = (0, Instant::now());
    while !making.is_finished() && since.elapsed() < BLOCKED {
        let now = made.load(Ordering::Relaxed);
        if now != last {
            (last, since) = (now, Instant::now());
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    let is_blocked = !making.is_finished();
    let calls = everyday(other, copying, host, memory)
        .into_iter()
        .chain(of_stream(stream, following, event as usize));
    let mut blocked = Map::new();
    let mut beside = Vec::new();
    for (name, call) in calls {
        let running = gated.call(call);
        let is_late = !ends(&running, MEANWHILE);
        blocked.insert(name.into(), json!(is_blocked.then_some(is_late)));
        beside.push(running);
    }
    gated.open();
    let all = us(making);
    let beside: Vec<Value> = beside.into_iter().map(us).collect();
    ensure!(drained(gated.gpu.stream, SOON), "the stream did not end");
    if !all.is_number() || !beside.iter().all(Value::is_number) {
        bail!("{all} {beside:?}");
    }
    Ok(json!({
        "calls until the caller is blocked": if is_blocked { json!(last) } else { json!(format!("more than {most}")) },
        "blocked meanwhile": blocked,
    }))
}

/// Which copies on a stream that waits wait for it, and what other threads cannot do meanwhile.
pub fn copies() -> Result<Value> {
    let mut gated = GatedStream::new()?;
    let (other, copying) = (SendableStream(new_stream()?), copying()?);
    let (host, into, memory) = (
        Page::new(PORTABLE, false)?,
        Page::new(PORTABLE, false)?,
        alloc()?,
    );
    let stream = SendableStream(gated.gpu.stream);
    let mut found = Map::new();
    for (name, to, from, len) in [
        ("host to host, 64 bytes", into.gpu, host.gpu, 64),
        ("host to host, 64 KiB", into.gpu, host.gpu, 1 << 16),
        ("host to GPU", memory, host.gpu, 4096),
        ("GPU to host", into.gpu, memory, 4096),
        ("GPU to GPU", memory, memory + 4096, 4096),
    ] {
        gated.close()?;
        let running = gated.call(Box::new(move || {
            // SAFETY: memory of at least that length, which is never freed.
            check("cuMemcpyAsync", unsafe {
                sys::cuMemcpyAsync(to, from, len, stream.raw())
            })
        }));
        let waits = !ends(&running, MEANWHILE);
        let mut blocked = Map::new();
        let mut beside = Vec::new();
        if waits {
            for (name, call) in everyday(other, copying, host, memory) {
                let call = gated.call(call);
                blocked.insert(name.into(), json!(!ends(&call, MEANWHILE)));
                beside.push(call);
            }
        }
        gated.opened()?;
        let all: Vec<Value> = beside.into_iter().chain([running]).map(us).collect();
        ensure!(all.iter().all(Value::is_number), "{name}: {all:?}");
        found.insert(
            name.into(),
            json!({"waits": waits, "blocked meanwhile": blocked}),
        );
    }
    Ok(found.into())
}
