//! Graphs beside streams that wait: which calls about a graph wait for them, and how many graphs that wait inside stop another one.

use std::ptr::null_mut;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use cudarc::driver::sys::{
    self, CUDA_BATCH_MEM_OP_NODE_PARAMS, CUDA_KERNEL_NODE_PARAMS, CUDA_MEMCPY3D, CUgraphNode,
    CUmemorytype::CU_MEMORYTYPE_UNIFIED, CUresult, CUstreamWaitValue_flags as Flags,
};
use serde_json::{Map, Value, json};

use super::blocking::{
    BLOCKED, Call, GatedStream, MEANWHILE, PTX, Running, SendableStream, alloc, copying, ends,
    everyday, us,
};
use super::gpu::{
    PORTABLE, Page, SOON, check, drained, is_few, new_stream, queue, wait32, write32,
};

/// What a node of these graphs does.
#[derive(Clone, Copy, PartialEq)]
enum GraphWork {
    MemoryOperations,
    Kernel,
    HostToGpu,
    GpuToHost,
    GpuToGpu,
}

const GRAPH_WORKS: [(&str, GraphWork); 5] = [
    ("memory operations", GraphWork::MemoryOperations),
    ("a kernel", GraphWork::Kernel),
    ("a copy from host to GPU", GraphWork::HostToGpu),
    ("a copy from GPU to host", GraphWork::GpuToHost),
    ("a copy from GPU to GPU", GraphWork::GpuToGpu),
];

/// What nodes are made of. Nothing is given back.
#[derive(Clone, Copy)]
struct Parts {
    context: usize,
    /// None over the stand-in, which executes only kernels that it knows.
    function: Option<usize>,
    page: Page,
    memory: u64,
}

impl Parts {
    fn new(context: sys::CUcontext) -> Result<Parts> {
        let (mut module, mut function) = (null_mut(), null_mut());
        let stream = new_stream()?;
        // SAFETY: PTX that ends with a zero; each call writes one handle; a kernel without parameters.
        unsafe {
            let loaded = sys::cuModuleLoadData(&mut module, PTX.as_ptr().cast());
            check("cuModuleLoadData", loaded)?;
            let got = sys::cuModuleGetFunction(&mut function, module, c"nothing".as_ptr());
            if got == CUresult::CUDA_ERROR_NOT_FOUND && is_few(false) {
                return Parts::of(context, None);
            }
            check("cuModuleGetFunction", got)?;
            let launched = sys::cuLaunchKernel(
                function,
                1,
                1,
                1,
                1,
                1,
                1,
                0,
                stream,
                null_mut(),
                null_mut(),
            );
            check("cuLaunchKernel", launched)?;
        }
        ensure!(drained(stream, SOON), "a kernel did not end");
        Parts::of(context, Some(function as usize))
    }

    fn of(context: sys::CUcontext, function: Option<usize>) -> Result<Parts> {
        Ok(Parts {
            context: context as usize,
            function,
            page: Page::new(PORTABLE, false)?,
            memory: alloc()?,
        })
    }

    /// The kinds of work that can be had here.
    fn works(&self) -> impl Iterator<Item = (&'static str, GraphWork)> {
        let has_kernel = self.function.is_some();
        GRAPH_WORKS
            .into_iter()
            .filter(move |(_, work)| has_kernel || *work != GraphWork::Kernel)
    }

    /// A graph, not instantiated: it waits for the gate, if one is given, does the work, and stores a number.
    fn graph(&self, gate: Option<(Page, u32)>, work: GraphWork, number: u32) -> Result<usize> {
        let mut graph = null_mut();
        // SAFETY: writes one handle.
        check("cuGraphCreate", unsafe {
            sys::cuGraphCreate(&mut graph, 0)
        })?;
        let mut last = null_mut();
        if let Some((gate, number)) = gate {
            let op = wait32(gate.gpu, number, Flags::CU_STREAM_WAIT_VALUE_GEQ);
            self.add_op(graph, &mut last, op)?;
        }
        self.add_work(graph, &mut last, work)?;
        self.add_op(graph, &mut last, write32(self.page.gpu + 2048, number))?;
        Ok(graph as usize)
    }

    /// A graph of so many nodes of that work, each behind the one before.
    fn graph_of(&self, nodes: u32, work: GraphWork) -> Result<usize> {
        let mut graph = null_mut();
        // SAFETY: writes one handle.
        check("cuGraphCreate", unsafe {
            sys::cuGraphCreate(&mut graph, 0)
        })?;
        let mut last = null_mut();
        for _ in 0..nodes {
            self.add_work(graph, &mut last, work)?;
        }
        Ok(graph as usize)
    }

    /// What [`Parts::graph`] does, queued on a stream.
    fn give(
        &self,
        stream: SendableStream,
        gate: Option<(Page, u32)>,
        work: GraphWork,
    ) -> Result<()> {
        if let Some((gate, number)) = gate {
            let op = wait32(gate.gpu, number, Flags::CU_STREAM_WAIT_VALUE_GEQ);
            queue(stream.raw(), &mut [op])?;
        }
        let done = write32(self.page.gpu + 2048, 1);
        let (into, from) = match work {
            GraphWork::MemoryOperations => {
                return queue(stream.raw(), &mut [write32(self.page.gpu + 4096, 1), done]);
            }
            GraphWork::Kernel => {
                let function = self.function.context("no kernel")? as sys::CUfunction;
                let (stream, none) = (stream.raw(), null_mut());
                // SAFETY: a kernel without parameters.
                check("cuLaunchKernel", unsafe {
                    sys::cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, none, none)
                })?;
                return queue(stream, &mut [done]);
            }
            GraphWork::HostToGpu | GraphWork::GpuToHost | GraphWork::GpuToGpu => self.ends_of(work),
        };
        // SAFETY: memory of at least that length, which is never freed.
        check("cuMemcpyAsync", unsafe {
            sys::cuMemcpyAsync(into, from, 1024, stream.raw())
        })?;
        queue(stream.raw(), &mut [done])
    }

    /// Where a copy goes to, and where it comes from.
    fn ends_of(&self, work: GraphWork) -> (u64, u64) {
        let (host, memory) = (self.page.gpu, self.memory);
        match work {
            GraphWork::GpuToHost => (host + 8192, memory),
            GraphWork::GpuToGpu => (memory + 8192, memory),
            _ => (memory, host),
        }
    }

    fn add_op(
        &self,
        graph: sys::CUgraph,
        last: &mut CUgraphNode,
        op: sys::CUstreamBatchMemOpParams,
    ) -> Result<()> {
        let mut ops = [op];
        let params = CUDA_BATCH_MEM_OP_NODE_PARAMS {
            ctx: self.context as _,
            count: 1,
            paramArray: ops.as_mut_ptr(),
            flags: 0,
        };
        let mut node = null_mut();
        // SAFETY: writes one handle; the operation is copied.
        check("cuGraphAddBatchMemOpNode", unsafe {
            sys::cuGraphAddBatchMemOpNode(&mut node, graph, &*last, count(*last), &params)
        })?;
        *last = node;
        Ok(())
    }

    fn add_work(&self, graph: sys::CUgraph, last: &mut CUgraphNode, work: GraphWork) -> Result<()> {
        let (into, from) = match work {
            GraphWork::MemoryOperations => {
                return self.add_op(graph, last, write32(self.page.gpu + 4096, 1));
            }
            GraphWork::Kernel => {
                let function = self.function.context("no kernel")?;
                // SAFETY: plain numbers and pointers, for all of which zero is a value.
                let mut params: CUDA_KERNEL_NODE_PARAMS = unsafe { std::mem::zeroed() };
                params.func = function as _;
                params.gridDimX = 1;
                params.gridDimY = 1;
                params.gridDimZ = 1;
                params.blockDimX = 1;
                params.blockDimY = 1;
                params.blockDimZ = 1;
                let mut node = null_mut();
                // SAFETY: writes one handle; a kernel without parameters.
                check("cuGraphAddKernelNode", unsafe {
                    sys::cuGraphAddKernelNode_v2(&mut node, graph, &*last, count(*last), &params)
                })?;
                *last = node;
                return Ok(());
            }
            GraphWork::HostToGpu | GraphWork::GpuToHost | GraphWork::GpuToGpu => self.ends_of(work),
        };
        let params = CUDA_MEMCPY3D {
            srcXInBytes: 0,
            srcY: 0,
            srcZ: 0,
            srcLOD: 0,
            srcMemoryType: CU_MEMORYTYPE_UNIFIED,
            srcHost: null_mut(),
            srcDevice: from,
            srcArray: null_mut(),
            reserved0: null_mut(),
            srcPitch: 0,
            srcHeight: 0,
            dstXInBytes: 0,
            dstY: 0,
            dstZ: 0,
            dstLOD: 0,
            dstMemoryType: CU_MEMORYTYPE_UNIFIED,
            dstHost: null_mut(),
            dstDevice: into,
            dstArray: null_mut(),
            reserved1: null_mut(),
            dstPitch: 0,
            dstHeight: 0,
            WidthInBytes: 1024,
            Height: 1,
            Depth: 1,
        };
        let mut node = null_mut();
        let context = self.context as _;
        // SAFETY: writes one handle; memory of at least that length, which is never freed.
        check("cuGraphAddMemcpyNode", unsafe {
            sys::cuGraphAddMemcpyNode(&mut node, graph, &*last, count(*last), &params, context)
        })?;
        *last = node;
        Ok(())
    }
}

/// Of the nodes that one comes behind.
fn count(last: CUgraphNode) -> usize {
    usize::from(!last.is_null())
}

/// The call was made, however long it took.
fn succeeded(running: Running) -> Result<()> {
    let said = us(running);
    ensure!(said.is_number(), "{said}");
    Ok(())
}

fn instantiate(graph: usize) -> Result<usize> {
    let mut exec = null_mut();
    // SAFETY: writes one handle; a graph that was made here.
    check("cuGraphInstantiate", unsafe {
        sys::cuGraphInstantiateWithFlags(&mut exec, graph as _, 0)
    })?;
    Ok(exec as usize)
}

fn launch(exec: usize, stream: SendableStream) -> Result<()> {
    // SAFETY: a graph and a stream that are never given back while they are used.
    check("cuGraphLaunch", unsafe {
        sys::cuGraphLaunch(exec as _, stream.raw())
    })
}

/// Which calls about graphs wait for a stream that waits: that stream itself, on which they are launched, or another one. For those that wait, what other
/// threads cannot do meanwhile.
pub fn calls() -> Result<Value> {
    let mut gated = GatedStream::new()?;
    let parts = Parts::new(gated.gpu.context.raw())?;
    let (other, copying) = (SendableStream(new_stream()?), copying()?);
    let (beside, host, memory) = (
        SendableStream(new_stream()?),
        Page::new(PORTABLE, false)?,
        alloc()?,
    );
    let mut found = Map::new();
    for (place, stream) in [
        ("on the stream that waits", SendableStream(gated.gpu.stream)),
        ("on another stream", other),
    ] {
        for (name, work) in parts.works() {
            let (made, graph) = std::sync::mpsc::channel();
            let (first, second) = (
                parts.graph(None, work, 1)?,
                instantiate(parts.graph(None, work, 2)?)?,
            );
            launch(second, stream)?;
            ensure!(drained(stream.raw(), SOON), "a launch did not end");
            let unused = instantiate(parts.graph(None, work, 3)?)?;
            let calls: [(&str, Call); 5] = [
                (
                    "cuGraphInstantiate",
                    Box::new(move || Ok(made.send(instantiate(first)?)?)),
                ),
                (
                    "first cuGraphLaunch",
                    Box::new(move || launch(graph.recv_timeout(SOON)?, stream)),
                ),
                (
                    "later cuGraphLaunch",
                    Box::new(move || launch(second, stream)),
                ),
                (
                    "cuGraphUpload",
                    Box::new(move || {
                        // SAFETY: as of `launch`.
                        check("cuGraphUpload", unsafe {
                            sys::cuGraphUpload(unused as _, stream.raw())
                        })
                    }),
                ),
                (
                    "cuGraphExecDestroy",
                    Box::new(move || {
                        // SAFETY: it is not used again.
                        check("cuGraphExecDestroy", unsafe {
                            sys::cuGraphExecDestroy(unused as _)
                        })
                    }),
                ),
            ];
            gated.close()?;
            for (call, make) in calls {
                let running = gated.call(make);
                let is_over = ends(&running, BLOCKED);
                let mut blocked = Map::new();
                let mut meanwhile = Vec::new();
                if !is_over {
                    for (what, call) in everyday(beside, copying, host, memory) {
                        let running = gated.call(call);
                        blocked.insert(what.into(), json!(!ends(&running, MEANWHILE)));
                        meanwhile.push(running);
                    }
                    gated.opened()?;
                    gated.close()?;
                }
                meanwhile.into_iter().for_each(|running| drop(us(running)));
                let took = us(running);
                ensure!(took.is_number(), "{call}: {took}");
                let mut said = json!({"waits": !is_over, "us": took});
                if !is_over {
                    said["blocked meanwhile"] = blocked.into();
                }
                found.insert(format!("{call}, {name}, {place}"), said);
            }
            gated.opened()?;
            ensure!(drained(stream.raw(), SOON), "the launches did not end");
        }
    }
    Ok(found.into())
}

/// How many graphs that wait, each on a stream of its own, stop a graph of the same work on another stream; and how many launches of a graph a stream that
/// waits takes until the caller is blocked.
pub fn beside(short: bool) -> Result<Value> {
    let mut gated = GatedStream::new()?;
    let parts = Parts::new(gated.gpu.context.raw())?;
    let most = if is_few(short) { 4 } else { 12_u32 };
    let gate = gated.gate;
    let mut found = Map::new();
    let mut streams = Vec::new();
    for _ in 0..most {
        streams.push(SendableStream(new_stream()?));
    }
    let other = SendableStream(new_stream()?);
    for as_graphs in [false, true] {
        for (name, work) in parts.works() {
            gated.closed += 1;
            let number = gated.closed;
            let mut waiting = Vec::new();
            for stream in &streams {
                let gate = Some((gate, number));
                let graph = as_graphs.then(|| instantiate(parts.graph(gate, work, 1)?));
                waiting.push((graph.transpose()?, *stream));
            }
            let passing = as_graphs.then(|| instantiate(parts.graph(None, work, 1)?));
            let passing = passing.transpose()?;
            let mut stopped = json!(format!("none of {most}"));
            for (at, (exec, stream)) in waiting.iter().enumerate() {
                let (exec, stream) = (*exec, *stream);
                let first = gated.call(Box::new(move || match exec {
                    Some(exec) => launch(exec, stream),
                    None => parts.give(stream, Some((gate, number)), work),
                }));
                // It waits before the other one is queued.
                let has_queued = ends(&first, MEANWHILE);
                let second = gated.call(Box::new(move || match passing {
                    Some(exec) => launch(exec, other),
                    None => parts.give(other, None, work),
                }));
                let is_over = has_queued && ends(&second, MEANWHILE);
                let is_stopped = !is_over || !drained(other.raw(), MEANWHILE);
                if is_stopped {
                    gated.open();
                }
                succeeded(first)?;
                succeeded(second)?;
                if is_stopped {
                    stopped = json!({"that wait": at + 1, "a call is blocked": !is_over});
                    break;
                }
            }
            gated.open();
            for stream in streams.iter().chain([&other]) {
                ensure!(drained(stream.raw(), SOON), "the work did not end");
            }
            let form = if as_graphs { "graphs" } else { "streams" };
            found.insert(format!("beside {form} with {name}"), stopped);
        }
    }
    for (name, work) in parts.works() {
        let exec = instantiate(parts.graph(None, work, 1)?)?;
        let stream = SendableStream(gated.gpu.stream);
        launch(exec, stream)?;
        ensure!(drained(stream.raw(), SOON), "a launch did not end");
        gated.close()?;
        let launches = if is_few(short) { 100 } else { 3000_u32 };
        let made = Arc::new(AtomicU32::new(0));
        let counted = Arc::clone(&made);
        let making = gated.call(Box::new(move || {
            for _ in 0..launches {
                launch(exec, stream)?;
                counted.fetch_add(1, Ordering::Relaxed);
            }
            Ok(())
        }));
        let is_over = ends(&making, Duration::from_secs(1));
        let many = made.load(Ordering::Relaxed);
        let text = format!("launches with {name} until the caller is blocked");
        let said = if is_over {
            json!(format!("more than {launches}"))
        } else {
            json!(many)
        };
        found.insert(text, said);
        gated.open();
        succeeded(making)?;
        ensure!(drained(stream.raw(), SOON), "the launches did not end");
    }
    Ok(found.into())
}

/// How many graphs of so many nodes can be instantiated while a stream waits, until the caller is blocked; what other threads cannot do then; the same if each
/// is launched on that stream, and if as many were instantiated and destroyed before.
pub fn instantiated(short: bool) -> Result<Value> {
    const NODES: u32 = 32;
    let mut gated = GatedStream::new()?;
    let parts = Parts::new(gated.gpu.context.raw())?;
    let (beside, copying) = (SendableStream(new_stream()?), copying()?);
    let (host, memory) = (Page::new(PORTABLE, false)?, alloc()?);
    let stream = SendableStream(gated.gpu.stream);
    let mut found = Map::new();
    let rounds = [
        ("instantiated", 200),
        ("instantiated after as many were destroyed", 150),
        ("instantiated and launched", 100),
    ];
    for (name, work) in parts.works() {
        let execs = Arc::new(Mutex::new(Vec::new()));
        for (how, most) in rounds {
            let launches = how == "instantiated and launched";
            let most = if is_few(short) { 20 } else { most };
            let taken = std::mem::take(&mut *execs.lock().unwrap_or_else(PoisonError::into_inner));
            for exec in taken {
                // SAFETY: instantiated here, and not used again.
                check("cuGraphExecDestroy", unsafe {
                    sys::cuGraphExecDestroy(exec as _)
                })?;
            }
            gated.close()?;
            let made = Arc::new(AtomicU32::new(0));
            let (counted, keeping) = (Arc::clone(&made), Arc::clone(&execs));
            let making = gated.call(Box::new(move || {
                for _ in 0..most {
                    let exec = instantiate(parts.graph_of(NODES, work)?)?;
                    keeping
                        .lock()
                        .unwrap_or_else(PoisonError::into_inner)
                        .push(exec);
                    if launches {
                        launch(exec, stream)?;
                    }
                    counted.fetch_add(1, Ordering::Relaxed);
                }
                Ok(())
            }));
            let mut last = (0, Instant::now());
            while !making.is_finished() && last.1.elapsed() < BLOCKED {
                std::thread::sleep(Duration::from_millis(1));
                let now = made.load(Ordering::Relaxed);
                if now != last.0 {
                    last = (now, Instant::now());
                }
            }
            let mut said = json!(format!("more than {most}"));
            if !making.is_finished() {
                said = json!({"graphs until the caller is blocked": last.0});
                let mut blocked = Map::new();
                let mut meanwhile = Vec::new();
                for (what, call) in everyday(beside, copying, host, memory) {
                    let running = gated.call(call);
                    blocked.insert(what.into(), json!(!ends(&running, MEANWHILE)));
                    meanwhile.push(running);
                }
                gated.open();
                meanwhile.into_iter().for_each(|running| drop(us(running)));
                said["blocked meanwhile"] = blocked.into();
            }
            gated.open();
            succeeded(making)?;
            ensure!(drained(stream.raw(), SOON), "the launches did not end");
            found.insert(format!("graphs of {NODES} nodes, {name}, {how}"), said);
        }
    }
    Ok(found.into())
}
