//! Objects of the program that graphs keep, with a function that is called when the last reference is gone (cuUserObjectCreate).

use std::ffi::c_void;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys::CUhostFn;

use crate::call::{CUresult, CudaResult, Out, as_host_function, cuda, valid};
use crate::graph;
use crate::handle::{self, ObjectTable};
use crate::task::HostCallback;

type RawObject = cudarc::driver::sys::CUuserObject;
type RawGraph = cudarc::driver::sys::CUgraph;

/// NO_DESTRUCTOR_SYNC, which the driver requires: nothing waits for the function.
const NO_DESTRUCTOR_SYNC: u32 = 1;
/// The caller's references become the graph's.
const MOVE: u32 = 1;

struct UserObject {
    handle: u64,
    references: Mutex<u64>,
    end: HostCallback,
}

static OBJECTS: ObjectTable<UserObject> = ObjectTable::new();

fn find(object: RawObject) -> CudaResult<Arc<UserObject>> {
    OBJECTS
        .get(object)
        .ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)
}

impl UserObject {
    fn retain(&self, count: u32) -> CudaResult {
        let mut references = self
            .references
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        valid(count > 0 && *references > 0)?;
        *references += u64::from(count);
        Ok(())
    }

    fn release(self: &Arc<Self>, count: u32) -> CudaResult {
        let is_last = {
            let mut references = self
                .references
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            valid(count > 0 && *references >= u64::from(count))?;
            *references -= u64::from(count);
            *references == 0
        };
        if is_last {
            OBJECTS.remove(self.handle as RawObject);
            let object = Arc::clone(self);
            // Some time later, by a thread of the driver's, which may not call the driver.
            std::thread::spawn(move || {
                // SAFETY: the program answers for what it gave to cuUserObjectCreate.
                as_host_function(|| unsafe { (object.end.function)(object.end.argument) });
            });
        }
        Ok(())
    }
}

/// References of a graph, which its clones, and what is instantiated and launched of it, share.
pub struct GraphReferences {
    object: Arc<UserObject>,
    count: u32,
}

impl Drop for GraphReferences {
    fn drop(&mut self) {
        let _ = self.object.release(self.count);
    }
}

cuda! {
    fn cuUserObjectCreate(to: Out<RawObject>, argument: *mut c_void, function: CUhostFn, count: u32, flags: u32) {
        let function = function.ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
        valid(!to.is_null() && count > 0 && count <= i32::MAX as u32 && flags == NO_DESTRUCTOR_SYNC)?;
        let handle = handle::fresh();
        let object = UserObject {
            handle,
            references: Mutex::new(count.into()),
            end: HostCallback { function, argument },
        };
        OBJECTS.insert(handle, Arc::new(object));
        to.put(handle as RawObject)
    }

    fn cuUserObjectRetain(object: RawObject, count: u32) {
        find(object)?.retain(count)
    }

    fn cuUserObjectRelease(object: RawObject, count: u32) {
        find(object)?.release(count)
    }

    // Also of a graph that a stream is being captured into.
    fn cuGraphRetainUserObject(graph: RawGraph, object: RawObject, count: u32, flags: u32) {
        let graph = graph::find(graph)?;
        let object = find(object)?;
        valid(count > 0 && flags & !MOVE == 0)?;
        if flags & MOVE == 0 {
            object.retain(count)?;
        }
        graph.keep(Arc::new(GraphReferences { object, count }));
        Ok(())
    }
}
