//! Capturing streams: what is queued becomes nodes of a graph, and what would break that is refused and breaks the capture.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::ThreadId;

use crate::call::{CUresult, CudaResult};
use crate::context::Context;
use crate::graph::{self, Graph, NodeWork};
use crate::stream::{Stream, StreamOrder};
use crate::task::node_type;

pub const GLOBAL: u32 = 0;
pub const RELAXED: u32 = 2;

pub struct Capture {
    /// Unique for the life of the process.
    pub id: u64,
    mode: u32,
    thread: ThreadId,
    pub graph: Arc<Graph>,
    origin: u64,
    state: Mutex<CaptureState>,
}

#[derive(Default)]
struct CaptureState {
    /// The streams in it, each with the nodes that its next one comes after.
    parts: Vec<(Arc<Stream>, Vec<u64>)>,
    invalid: bool,
    over: bool,
}

/// Those that are under way.
static ACTIVE: Mutex<Vec<Arc<Capture>>> = Mutex::new(Vec::new());
/// How many there are, for callers that need only the count.
static COUNT: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    static MODE: Cell<u32> = const { Cell::new(GLOBAL) };
}

fn active() -> Vec<Arc<Capture>> {
    if COUNT.load(Ordering::Acquire) == 0 {
        return Vec::new();
    }
    ACTIVE
        .lock()
        .unwrap_or_else(|poisoned| poisoned.into_inner())
        .clone()
}

fn change_active(change: impl FnOnce(&mut Vec<Arc<Capture>>)) {
    let mut all = ACTIVE
        .lock()
        .unwrap_or_else(|poisoned| poisoned.into_inner());
    change(&mut all);
    COUNT.store(all.len(), Ordering::Release);
}

/// Gives the thread another mode, and back comes the one that it had.
pub fn exchange_mode(mode: u32) -> u32 {
    MODE.replace(mode)
}

impl Capture {
    fn state(&self) -> MutexGuard<'_, CaptureState> {
        self.state
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    pub fn invalidate(&self) {
        self.state().invalid = true;
    }

    pub fn is_invalid(&self) -> bool {
        self.state().invalid
    }

    pub fn is_over(&self) -> bool {
        self.state().over
    }

    /// What the next node of a stream comes after.
    pub fn after(&self, stream: &Stream) -> Vec<u64> {
        let state = self.state();
        let part = state.parts.iter().find(|(other, _)| other.id == stream.id);
        part.map(|(_, after)| after.clone()).unwrap_or_default()
    }

    /// Changes it; a stream that was not part of the capture is from now on.
    pub fn set_after(self: &Arc<Capture>, stream: &Arc<Stream>, after: Vec<u64>) {
        let mut state = self.state();
        match state
            .parts
            .iter_mut()
            .find(|(other, _)| other.id == stream.id)
        {
            Some((_, part)) => *part = after,
            None => {
                state.parts.push((stream.clone(), after));
                stream.set_capture(Some(self.clone()));
            }
        }
    }

    fn add(self: &Arc<Capture>, stream: &Arc<Stream>, work: NodeWork) -> CudaResult {
        if self.is_invalid() {
            return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
        }
        if work.kind() == node_type::GRAPH {
            // The driver makes a node of it that holds a graph; there are none here.
            self.invalidate();
            return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
        }
        let node = self.graph.add(work, &self.after(stream))?;
        self.set_after(stream, vec![node]);
        Ok(())
    }

    /// Whether one of its streams is of this context and what else is asked for.
    fn has(&self, context: &Context, wanted: impl Fn(&Stream) -> bool) -> bool {
        let state = self.state();
        state
            .parts
            .iter()
            .any(|(stream, _)| stream.context.id == context.id && wanted(stream))
    }

    /// A stream's last nodes that the origin never came to.
    fn is_unjoined(&self) -> bool {
        let state = self.state();
        let origin = state
            .parts
            .iter()
            .find(|(stream, _)| stream.id == self.origin);
        let Some((_, after)) = origin else {
            return true;
        };
        let joined = self.graph.ancestors(after);
        let all = state.parts.iter().flat_map(|(_, after)| after);
        all.into_iter().any(|node| !joined.contains(node))
    }

    fn finish(self: &Arc<Capture>) {
        let mut state = self.state();
        state.over = true;
        for (stream, _) in &state.parts {
            stream.set_capture(None);
        }
        drop(state);
        change_active(|all| all.retain(|other| other.id != self.id));
        self.graph.capturing.store(false, Ordering::Release);
    }
}

pub fn begin(stream: &Arc<Stream>, mode: u32) -> CudaResult {
    if stream.kind == StreamOrder::Legacy {
        return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    }
    if stream.capture().is_some() {
        return Err(CUresult::CUDA_ERROR_ILLEGAL_STATE);
    }
    static NEXT: AtomicU64 = AtomicU64::new(1);
    let capture = Arc::new(Capture {
        id: NEXT.fetch_add(1, Ordering::Relaxed),
        mode,
        thread: std::thread::current().id(),
        graph: graph::create(),
        origin: stream.id,
        state: Mutex::default(),
    });
    capture.graph.capturing.store(true, Ordering::Release);
    capture.set_after(stream, Vec::new());
    change_active(|all| all.push(capture));
    Ok(())
}

/// The graph, or why there is none.
pub fn end(stream: &Arc<Stream>) -> CudaResult<Arc<Graph>> {
    let capture = stream.capture().ok_or(CUresult::CUDA_ERROR_ILLEGAL_STATE)?;
    if capture.origin != stream.id {
        capture.invalidate();
        return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
    }
    if capture.mode != RELAXED && capture.thread != std::thread::current().id() {
        return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD);
    }
    capture.finish();
    let fault = if capture.is_invalid() {
        CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
    } else if capture.is_unjoined() {
        CUresult::CUDA_ERROR_STREAM_CAPTURE_UNJOINED
    } else {
        return Ok(capture.graph.clone());
    };
    capture.graph.destroy();
    Err(fault)
}

/// A stream is destroyed: the capture that it is part of is broken, and over if it began there.
pub fn leave(stream: &Stream) {
    if let Some(capture) = stream.capture() {
        capture.invalidate();
        if capture.origin == stream.id {
            capture.finish();
            capture.graph.destroy();
        }
    }
}

/// A context is destroyed, and with it what its streams were captured into.
pub fn forget(context: &Context) {
    for capture in active() {
        if capture.has(context, |_| true) {
            capture.invalidate();
            capture.finish();
            capture.graph.destroy();
        }
    }
}

/// Queues work to a stream, or makes it a node if the stream is being captured.
pub fn queue(stream: &Arc<Stream>, work: NodeWork) -> CudaResult {
    match stream.capture() {
        Some(capture) => capture.add(stream, work),
        None => {
            check_default(stream)?;
            work.task()
                .map_or(Ok(()), |task| stream.submit(task.clone()).map(drop))
        }
    }
}

/// Work of the default stream would come between that of a blocking stream, which is being captured.
pub fn check_default(stream: &Stream) -> CudaResult {
    if stream.kind != StreamOrder::Legacy {
        return Ok(());
    }
    let mut outcome = Ok(());
    for capture in active() {
        if capture.has(&stream.context, |other| other.kind == StreamOrder::Blocking) {
            capture.invalidate();
            outcome = Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
        }
    }
    outcome
}

/// As `check_default`, for a caller that only asks: nothing is invalidated.
pub fn is_default_beside_capture(stream: &Stream) -> bool {
    let beside = |capture: &Arc<Capture>| {
        capture.has(&stream.context, |other| other.kind == StreamOrder::Blocking)
    };
    stream.kind == StreamOrder::Legacy && active().iter().any(beside)
}

/// For a call that asks how far a stream is, or waits for it.
pub fn check_idle_call(stream: &Stream) -> CudaResult {
    if let Some(capture) = stream.capture() {
        capture.invalidate();
        return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    }
    check_default(stream)?;
    check_safe()
}

/// For a call that waits for a whole context.
pub fn check_context_call(context: &Context) -> CudaResult {
    let mut outcome = check_safe();
    for capture in active() {
        if capture.has(context, |_| true) {
            capture.invalidate();
            outcome = Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
        }
    }
    outcome
}

/// For calls that a capture does not see and that are not safe beside it, by the modes of the capture and of the thread
/// (cuThreadExchangeStreamCaptureMode).
pub fn check_safe() -> CudaResult {
    let mode = MODE.get();
    if mode == RELAXED {
        return Ok(());
    }
    let mut outcome = Ok(());
    for capture in active() {
        let own = capture.thread == std::thread::current().id();
        let forbids = if own {
            capture.mode != RELAXED
        } else {
            capture.mode == GLOBAL && mode == GLOBAL
        };
        if forbids {
            capture.invalidate();
            outcome = Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
        }
    }
    outcome
}

/// A wait, in a stream, for what was recorded in a capture: the stream joins it.
pub fn join(stream: &Arc<Stream>, recorded: &Arc<Capture>, nodes: &[u64]) -> CudaResult {
    let own = stream.capture();
    if recorded.is_over() {
        // It has become part of a graph, and nothing outside a graph can wait for a part of it.
        return Err(match own {
            Some(own) => {
                own.invalidate();
                CUresult::CUDA_ERROR_STREAM_CAPTURE_ISOLATION
            }
            None => CUresult::CUDA_ERROR_CAPTURED_EVENT,
        });
    }
    if recorded.is_invalid() {
        return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    }
    match own {
        Some(own) if own.id != recorded.id => {
            own.invalidate();
            recorded.invalidate();
            Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_MERGE)
        }
        None if stream.kind == StreamOrder::Legacy => {
            recorded.invalidate();
            Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT)
        }
        _ => {
            let mut after = recorded.after(stream);
            after.extend(nodes);
            after.sort_unstable();
            after.dedup();
            recorded.set_after(stream, after);
            Ok(())
        }
    }
}
