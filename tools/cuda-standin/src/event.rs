//! Events: each record makes a new mark, and queries mean the latest.

use std::sync::{Arc, Mutex, MutexGuard};

use cudarc::driver::sys::{CUevent, CUstream};

use crate::call::{CUresult, CudaResult, Out, cuda, valid};
use crate::capture::{self, Capture};
use crate::context::Context;
use crate::graph::NodeWork;
use crate::handle::{self, ObjectTable};
use crate::life::ContextLife;
use crate::mark::StreamMark;
use crate::stream::Stream;
use crate::task::Task;
use crate::{current, streams};

const BLOCKING_SYNC: u32 = 1;
const DISABLE_TIMING: u32 = 2;
const INTERPROCESS: u32 = 4;
/// Record and wait flags alike: for nodes of graphs only.
const EXTERNAL: u32 = 1;

pub struct Event {
    context: Arc<Context>,
    flags: u32,
    latest: Mutex<Latest>,
}

/// What an event recorded last.
#[derive(Clone, Default)]
enum Latest {
    #[default]
    Nothing,
    Mark(Arc<StreamMark>),
    /// In a stream that was being captured: the nodes that came before it.
    Captured(Arc<Capture>, Vec<u64>),
}

impl Latest {
    /// For calls that ask whether it has passed: an event of a capture cannot
    /// be queried.
    fn mark(self) -> CudaResult<Option<Arc<StreamMark>>> {
        match self {
            Latest::Nothing => Ok(None),
            Latest::Mark(mark) => Ok(Some(mark)),
            Latest::Captured(capture, _) => {
                capture.invalidate();
                Err(CUresult::CUDA_ERROR_CAPTURED_EVENT)
            }
        }
    }
}

/// A record.
struct RecordTask(Arc<StreamMark>);

impl Task for RecordTask {
    fn run(&self, _life: &ContextLife) -> CudaResult {
        Ok(())
    }

    fn end(&self) -> Option<&StreamMark> {
        Some(&self.0)
    }
}

/// A wait for a record.
struct WaitTask(Arc<StreamMark>);

impl Task for WaitTask {
    fn run(&self, life: &ContextLife) -> CudaResult {
        self.0.wait(life);
        Ok(())
    }

    fn holds_work_queue(&self) -> bool {
        true
    }
}

static EVENTS: ObjectTable<Event> = ObjectTable::new();

impl Event {
    fn latest(&self) -> MutexGuard<'_, Latest> {
        self.latest
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

fn find(handle: CUevent) -> CudaResult<Arc<Event>> {
    current::context()?;
    let event = EVENTS
        .get(handle)
        .ok_or(CUresult::CUDA_ERROR_INVALID_HANDLE)?;
    event.context.life.check()?;
    Ok(event)
}

pub fn forget(context: &Context) {
    EVENTS.remove_where(|event| event.context.id == context.id);
}

/// Queues to a stream the wait for what the event recorded last.
pub fn wait_in(stream: &Arc<Stream>, event: CUevent) -> CudaResult {
    let event = find(event)?;
    let latest = event.latest().clone();
    match (latest, stream.capture()) {
        (Latest::Nothing, _) => Ok(()),
        (Latest::Captured(capture, nodes), _) => capture::join(stream, &capture, &nodes),
        // A graph cannot wait for what is not of it.
        (Latest::Mark(_), Some(capture)) => {
            capture.invalidate();
            Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_ISOLATION)
        }
        (Latest::Mark(mark), None) => capture::queue(stream, NodeWork::of(WaitTask(mark))),
    }
}

fn record(event: CUevent, stream: CUstream) -> CudaResult {
    let event = find(event)?;
    let stream = streams::find(stream)?;
    // Both are of one context.
    if event.context.id != stream.context.id {
        return Err(CUresult::CUDA_ERROR_INVALID_HANDLE);
    }
    if let Some(capture) = stream.capture() {
        if capture.is_invalid() {
            return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
        }
        let nodes = capture.after(&stream);
        *event.latest() = Latest::Captured(capture, nodes);
        return Ok(());
    }
    capture::check_default(&stream)?;
    let mark = Arc::new(StreamMark::default());
    let mut latest = event.latest();
    stream.submit(Arc::new(RecordTask(mark.clone())))?;
    *latest = Latest::Mark(mark);
    Ok(())
}

/// Milliseconds between the two, with the documented errors.
fn elapsed(start: CUevent, end: CUevent) -> CudaResult<f32> {
    let (start, end) = (find(start)?, find(end)?);
    if (start.flags | end.flags) & DISABLE_TIMING != 0 || start.context.id != end.context.id {
        return Err(CUresult::CUDA_ERROR_INVALID_HANDLE);
    }
    let never = CUresult::CUDA_ERROR_INVALID_HANDLE;
    let first = start.latest().clone().mark()?.ok_or(never)?;
    let last = end.latest().clone().mark()?.ok_or(never)?;
    let (Some(first), Some(last)) = (first.reached(), last.reached()) else {
        return Err(CUresult::CUDA_ERROR_NOT_READY);
    };
    // Events may be recorded the other way round.
    let before = first.saturating_duration_since(last).as_secs_f32();
    let after = last.saturating_duration_since(first).as_secs_f32();
    Ok((after - before) * 1e3)
}

cuda! {
    fn cuEventCreate(event: Out<CUevent>, flags: u32) {
        let context = current::context()?;
        valid(!event.is_null() && flags & !(BLOCKING_SYNC | DISABLE_TIMING | INTERPROCESS) == 0)?;
        // An event between processes measures no time; and there is none here.
        valid(flags & INTERPROCESS == 0 || flags & DISABLE_TIMING != 0)?;
        if flags & INTERPROCESS != 0 {
            return Err(CUresult::CUDA_ERROR_NOT_SUPPORTED);
        }
        let handle = handle::fresh();
        EVENTS.insert(handle, Arc::new(Event { context, flags, latest: Mutex::default() }));
        event.put(handle as CUevent)
    }

    // What waits for it goes on waiting for what it recorded.
    fn cuEventDestroy_v2(event: CUevent) {
        current::context()?;
        EVENTS.remove(event).ok_or(CUresult::CUDA_ERROR_INVALID_HANDLE)?;
        Ok(())
    }

    fn cuEventRecord(event: CUevent, stream: CUstream) {
        record(event, stream)
    }

    fn cuEventRecordWithFlags(event: CUevent, stream: CUstream, flags: u32) {
        // EXTERNAL is for streams that are captured.
        valid(flags & !EXTERNAL == 0 && flags & EXTERNAL == 0)?;
        record(event, stream)
    }

    // One that never recorded is done.
    fn cuEventQuery(event: CUevent) {
        let event = find(event)?;
        let latest = event.latest().clone().mark()?;
        capture::check_safe()?;
        match latest {
            Some(mark) if mark.reached().is_none() => Err(CUresult::CUDA_ERROR_NOT_READY),
            _ => event.context.life.check(),
        }
    }

    fn cuEventSynchronize(event: CUevent) {
        let event = find(event)?;
        let latest = event.latest().clone().mark()?;
        capture::check_safe()?;
        if let Some(mark) = latest {
            mark.wait(&event.context.life);
        }
        event.context.life.check()
    }

    fn cuEventElapsedTime(milliseconds: Out<f32>, start: CUevent, end: CUevent) {
        valid(!milliseconds.is_null())?;
        milliseconds.put(elapsed(start, end)?)
    }

    fn cuEventElapsedTime_v2(milliseconds: Out<f32>, start: CUevent, end: CUevent) {
        valid(!milliseconds.is_null())?;
        milliseconds.put(elapsed(start, end)?)
    }
}
