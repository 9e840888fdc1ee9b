//! Graphs that can be launched.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use cudarc::driver::sys::{
    CUDA_KERNEL_NODE_PARAMS_v2, CUgraph, CUgraphExec, CUgraphNode, CUstream,
};

use crate::call::{CUresult, CudaResult, In, Out, cuda, valid};
use crate::capture;
use crate::current;
use crate::graph::{self, KeptObject, Node, NodeWork};
use crate::handle::{self, ObjectTable};
use crate::life::ContextLife;
use crate::mark::StreamMark;
use crate::node::{self, BatchParams};
use crate::settings::settings;
use crate::streams;
use crate::task::{Task, node_type};

/// A snapshot of a graph. Its nodes are named by those of the graph.
struct Exec {
    state: Mutex<ExecState>,
    kept: Vec<KeptObject>,
    flags: u64,
}

struct ExecState {
    nodes: Vec<Node>,
    /// The end of the last launch: the next one comes after it, in whatever stream.
    last: Option<Arc<StreamMark>>,
}

/// CUDA_GRAPH_INSTANTIATE_PARAMS, whose result need not be a value of its enumeration before it is written.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct InstantiateParams {
    flags: u64,
    upload: CUstream,
    wrong_node: CUgraphNode,
    result: u32,
}

static EXECS: ObjectTable<Exec> = ObjectTable::new();

/// AUTO_FREE_ON_LAUNCH, which has nothing to free here, and USE_NODE_PRIORITY.
const FLAGS: u64 = 1 | 8;
/// Only for cuGraphInstantiateWithParams.
const UPLOAD: u64 = 2;
const DEVICE_LAUNCH: u64 = 4;

impl Exec {
    fn state(&self) -> MutexGuard<'_, ExecState> {
        self.state
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

fn find(exec: CUgraphExec) -> CudaResult<Arc<Exec>> {
    EXECS.get(exec).ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)
}

fn instantiate(to: &Out<CUgraphExec>, graph: CUgraph, flags: u64) -> CudaResult {
    let graph = graph::find(graph)?;
    // Seen on an H200 with driver 580.159 (docs/measured/h200-5.md): while a stream waited, tens of graphs were instantiated at once, and then one only when the stream
    // went on, with all calls of other threads behind it. No caller can know which graph needs more of the driver's memory, so each one waits.
    if let Ok(context) = current::context() {
        context.wait_idle_alone();
    }
    valid(!to.is_null() && flags & !(FLAGS | DEVICE_LAUNCH) == 0)?;
    if flags & DEVICE_LAUNCH != 0 {
        return Err(CUresult::CUDA_ERROR_NOT_SUPPORTED);
    }
    let nodes = graph.nodes().clone();
    // A circle has no order.
    valid(graph::order(&nodes, 1).is_some())?;
    let handle = handle::fresh();
    let state = Mutex::new(ExecState { nodes, last: None });
    let kept = graph.kept();
    EXECS.insert(handle, Arc::new(Exec { state, kept, flags }));
    to.put(handle as CUgraphExec)
}

/// Which of the orders a launch takes: another each time, the same for the same seed.
fn draw() -> u64 {
    static LAUNCHES: AtomicU64 = AtomicU64::new(1);
    let launch = LAUNCHES.fetch_add(1, Ordering::Relaxed);
    (settings()
        .seed
        .wrapping_add(launch)
        .wrapping_mul(0x9e37_79b9_7f4a_7c15))
    .max(1)
}

/// One launch, in the order that was drawn for it.
struct GraphLaunch {
    tasks: Vec<Arc<dyn Task>>,
    before: Option<Arc<StreamMark>>,
    end: Arc<StreamMark>,
    /// As long as it is queued.
    _kept: Vec<KeptObject>,
}

impl Task for GraphLaunch {
    fn run(&self, life: &ContextLife) -> CudaResult {
        if let Some(before) = &self.before {
            before.wait(life);
        }
        for task in self.tasks.iter() {
            if life.is_over() {
                break;
            }
            task.run(life)?;
        }
        Ok(())
    }

    fn holds_work_queue(&self) -> bool {
        self.tasks.iter().any(|task| task.holds_work_queue())
    }

    /// On an H200 each node of memory operations and each copy from or to the host has one, while kernels and copies within the GPU have one together
    /// (docs/measured/h200-5.md).
    fn places(&self) -> u64 {
        (self.tasks.len() as u64).max(1)
    }

    /// What the next launch waits for.
    fn end(&self) -> Option<&StreamMark> {
        Some(&self.end)
    }

    fn node_type(&self) -> u32 {
        node_type::GRAPH
    }
}

fn launch(exec: CUgraphExec, stream: CUstream) -> CudaResult {
    let exec = find(exec)?;
    let stream = streams::find(stream)?;
    let mut state = exec.state();
    let order = graph::order(&state.nodes, draw()).ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
    let tasks = order
        .iter()
        .filter_map(|index| state.nodes[*index].work.task().cloned())
        .collect();
    let end = Arc::new(StreamMark::default());
    let run = GraphLaunch {
        tasks,
        before: state.last.clone(),
        end: end.clone(),
        _kept: exec.kept.clone(),
    };
    capture::queue(&stream, NodeWork::of(run))?;
    state.last = Some(end);
    Ok(())
}

/// Later launches of the node do this; what is queued stays as it is.
fn set(exec: CUgraphExec, node: CUgraphNode, work: NodeWork) -> CudaResult {
    let exec = find(exec)?;
    // It must be in the graph still.
    graph::find_of(node)?;
    let mut state = exec.state();
    let found = state
        .nodes
        .iter_mut()
        .find(|other| other.handle == node as u64);
    let found = found.ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
    node::check_change(&found.work, &work)?;
    found.work = work;
    Ok(())
}

cuda! {
    fn cuGraphInstantiateWithFlags(exec: Out<CUgraphExec>, graph: CUgraph, flags: u64) {
        instantiate(&exec, graph, flags)
    }

    fn cuGraphInstantiateWithParams(exec: Out<CUgraphExec>, graph: CUgraph, params: Out<InstantiateParams>) {
        let mut given = params.get()?;
        if given.flags & UPLOAD != 0 {
            streams::find(given.upload)?;
        }
        given.wrong_node = std::ptr::null_mut();
        let outcome = instantiate(&exec, graph, given.flags & !UPLOAD);
        // CUgraphInstantiateResult: SUCCESS, or ERROR.
        given.result = u32::from(outcome.is_err());
        params.put(given)?;
        outcome
    }

    // What is queued of it is still done.
    fn cuGraphExecDestroy(exec: CUgraphExec) {
        EXECS.remove(exec).ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
        Ok(())
    }

    fn cuGraphExecGetFlags(exec: CUgraphExec, flags: Out<u64>) {
        flags.put(find(exec)?.flags)
    }

    // There is nothing to be brought anywhere.
    fn cuGraphUpload(exec: CUgraphExec, stream: CUstream) {
        find(exec)?;
        streams::find(stream)?;
        Ok(())
    }

    fn cuGraphLaunch(exec: CUgraphExec, stream: CUstream) {
        launch(exec, stream)
    }

    fn cuGraphExecBatchMemOpNodeSetParams(exec: CUgraphExec, node: CUgraphNode, params: In<BatchParams>) {
        set(exec, node, node::batch(&params)?)
    }

    fn cuGraphExecKernelNodeSetParams_v2(exec: CUgraphExec, node: CUgraphNode, params: In<CUDA_KERNEL_NODE_PARAMS_v2>) {
        set(exec, node, node::kernel(&params)?)
    }
}
