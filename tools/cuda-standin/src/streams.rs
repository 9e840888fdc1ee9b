//! The streams that handles name.

use std::cell::RefCell;
use std::sync::Arc;

use cudarc::driver::sys::CUstream;

use crate::call::{CUresult, CudaResult};
use crate::context::Context;
use crate::handle::{self, ObjectTable};
use crate::stream::{GREATEST_PRIORITY, NON_BLOCKING, Stream, StreamOrder};
use crate::{capture, current};

static STREAMS: ObjectTable<Stream> = ObjectTable::new();

thread_local! {
    /// CU_STREAM_PER_THREAD of each context, by its id.
    static OF_THREAD: RefCell<Vec<(u64, Arc<Stream>)>> = const { RefCell::new(Vec::new()) };
}

/// The stream that a handle names, in a context that can be used. 0 and 1 are the default stream, 2 is that of the thread.
pub fn find(handle: CUstream) -> CudaResult<Arc<Stream>> {
    let context = current::context()?;
    match handle as u64 {
        0 | 1 => Ok(context.legacy()),
        2 => Ok(of_thread(&context)),
        _ => {
            let stream = STREAMS
                .get(handle)
                .ok_or(CUresult::CUDA_ERROR_INVALID_HANDLE)?;
            stream.context.life.check()?;
            Ok(stream)
        }
    }
}

/// As `find`, for work that takes a stream of the current context only.
pub fn find_here(handle: CUstream) -> CudaResult<Arc<Stream>> {
    let stream = find(handle)?;
    if stream.context.id != current::context()?.id {
        return Err(CUresult::CUDA_ERROR_INVALID_HANDLE);
    }
    Ok(stream)
}

fn of_thread(context: &Arc<Context>) -> Arc<Stream> {
    OF_THREAD.with_borrow_mut(|streams| {
        streams.retain(|(_, stream)| !stream.context.life.is_destroyed());
        if let Some((_, stream)) = streams.iter().find(|(id, _)| *id == context.id) {
            return stream.clone();
        }
        let made = Stream::new(context, 0, 0, StreamOrder::Blocking);
        context.lock_streams().push(made.clone());
        streams.push((context.id, made.clone()));
        made
    })
}

/// A stream with a handle.
pub fn create(flags: u32, priority: i32) -> CudaResult<Arc<Stream>> {
    let context = current::context()?;
    let kind = if flags & NON_BLOCKING != 0 {
        StreamOrder::NonBlocking
    } else {
        StreamOrder::Blocking
    };
    context.pass();
    let mut made = Stream::new(&context, flags, priority.clamp(GREATEST_PRIORITY, 0), kind);
    let handle = handle::fresh();
    if let Some(stream) = Arc::get_mut(&mut made) {
        stream.handle = handle;
    }
    STREAMS.insert(handle, made.clone());
    context.lock_streams().push(made.clone());
    Ok(made)
}

/// Takes the handle away. What is queued is still done.
pub fn destroy(handle: CUstream) -> CudaResult {
    current::context()?;
    let stream = STREAMS
        .remove(handle)
        .ok_or(CUresult::CUDA_ERROR_INVALID_HANDLE)?;
    capture::leave(&stream);
    stream.close();
    Ok(())
}

/// The handles of a context that is destroyed.
pub fn forget(context: &Context) {
    STREAMS.remove_where(|stream| stream.context.id == context.id);
}
