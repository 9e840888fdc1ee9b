//! What every exported function does around its own work, and the pointers that it gets from C.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

pub use cudarc::driver::sys::CUresult;

use crate::fault;

/// The outcome of a call but for the number that C gets.
pub type CudaResult<T = ()> = Result<T, CUresult>;

static INITIALIZED: AtomicBool = AtomicBool::new(false);
static CALLS_OF_ALL: AtomicU64 = AtomicU64::new(0);

thread_local! {
    static IN_HOST_FUNCTION: Cell<bool> = const { Cell::new(false) };
    static CALLS: Cell<u64> = const { Cell::new(0) };
    static WAITS: Cell<u64> = const { Cell::new(0) };
    static MEMOPS: Cell<u64> = const { Cell::new(0) };
}

/// `cuInit` succeeded.
pub fn set_initialized() {
    INITIALIZED.store(true, Ordering::Release);
}

/// Runs a function of the program on a stream's thread; it may not call the driver meanwhile (cuLaunchHostFunc).
pub fn as_host_function(run: impl FnOnce()) {
    IN_HOST_FUNCTION.set(true);
    run();
    IN_HOST_FUNCTION.set(false);
}

/// How many functions of the driver the calling thread has called, refused calls included. For tests of what a program's calls cost.
#[unsafe(no_mangle)]
pub extern "C" fn doorbell_cuda_standin_calls_here() -> u64 {
    CALLS.get()
}

/// How many functions of the driver all threads of the process have called.
#[unsafe(no_mangle)]
pub extern "C" fn doorbell_cuda_standin_calls() -> u64 {
    CALLS_OF_ALL.load(Ordering::Relaxed)
}

fn count_call() {
    CALLS_OF_ALL.fetch_add(1, Ordering::Relaxed);
    // A thread that is ending has no counter any more.
    let _ = CALLS.try_with(|calls| calls.set(calls.get() + 1));
}

/// The call waits for streams although it is not a call for that.
pub fn count_wait() {
    // A thread that is ending has no counter any more.
    let _ = WAITS.try_with(|waits| waits.set(waits.get() + 1));
}

/// How often calls of this thread have waited for work of streams, those aside whose purpose it is (synchronize, copies). For tests of calls that must not.
#[unsafe(no_mangle)]
pub extern "C" fn doorbell_cuda_standin_waits_here() -> u64 {
    WAITS.get()
}

/// A batch of memory operations was queued.
pub fn count_memops(count: usize) {
    let _ = MEMOPS.try_with(|memops| memops.set(memops.get() + count as u64));
}

/// How many memory operations the calling thread has queued in batches.
#[unsafe(no_mangle)]
pub extern "C" fn doorbell_cuda_standin_memops_here() -> u64 {
    MEMOPS.get()
}

/// A call that works before `cuInit` too.
pub fn always(name: &'static str, work: impl FnOnce() -> CudaResult) -> CUresult {
    count_call();
    run(name, work)
}

fn run(name: &'static str, work: impl FnOnce() -> CudaResult) -> CUresult {
    let work = || {
        fault::of_call(name)?;
        work()
    };
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(Ok(())) => CUresult::CUDA_SUCCESS,
        Ok(Err(error)) => error,
        // A fault of the stand-in itself; the panic's text is on stderr.
        Err(_) => CUresult::CUDA_ERROR_UNKNOWN,
    }
}

/// Any other call.
pub fn enter(name: &'static str, work: impl FnOnce() -> CudaResult) -> CUresult {
    count_call();
    if !INITIALIZED.load(Ordering::Acquire) {
        return CUresult::CUDA_ERROR_NOT_INITIALIZED;
    }
    if IN_HOST_FUNCTION.get() {
        return CUresult::CUDA_ERROR_NOT_PERMITTED;
    }
    run(name, work)
}

/// Declares functions of the driver: `cuda! { fn cuName(argument: Type) { work } }`, where the work is of type `Outcome`.
macro_rules! cuda {
    ($(fn $name:ident($($argument:ident: $kind:ty),* $(,)?) $body:block)*) => {
        $(
            #[unsafe(no_mangle)]
            #[allow(non_snake_case, clippy::too_many_arguments)]
            pub extern "C" fn $name($($argument: $kind),*) -> $crate::call::CUresult {
                $crate::call::enter(stringify!($name), || $body)
            }
        )*
    };
}
pub(crate) use cuda;

/// A pointer at which the caller wants a value.
#[repr(transparent)]
pub struct Out<T>(*mut T);

impl<T> Out<T> {
    pub fn is_null(&self) -> bool {
        self.0.is_null()
    }

    /// Null is CUDA_ERROR_INVALID_VALUE.
    pub fn put(&self, value: T) -> CudaResult {
        if self.0.is_null() {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        // SAFETY: the caller of the driver answers for a pointer that is not null.
        unsafe { self.0.write_unaligned(value) };
        Ok(())
    }

    /// For a value that the caller need not want.
    pub fn put_if_wanted(&self, value: T) {
        let _ = self.put(value);
    }

    /// For what is both read and written.
    pub fn get(&self) -> CudaResult<T>
    where
        T: Copy,
    {
        In(self.0.cast_const()).get()
    }

    /// Writes the first elements of an array.
    pub fn put_all(&self, values: &[T])
    where
        T: Copy,
    {
        for (index, value) in values.iter().enumerate() {
            // SAFETY: the caller of the driver gave an array of at least this length.
            unsafe { self.0.add(index).write_unaligned(*value) };
        }
    }
}

/// A pointer to a value, or to an array.
#[repr(transparent)]
pub struct In<T>(*const T);

impl<T: Copy> In<T> {
    /// A pointer that came within something else.
    pub fn at(pointer: *const std::ffi::c_void) -> In<T> {
        In(pointer.cast())
    }

    pub fn is_null(&self) -> bool {
        self.0.is_null()
    }

    /// Null is CUDA_ERROR_INVALID_VALUE.
    pub fn get(&self) -> CudaResult<T> {
        if self.0.is_null() {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        // SAFETY: the caller of the driver answers for a pointer that is not null.
        Ok(unsafe { self.0.read_unaligned() })
    }

    /// An array of `len` elements. Null is CUDA_ERROR_INVALID_VALUE unless it is empty.
    pub fn get_all(&self, len: usize) -> CudaResult<Vec<T>> {
        if len > 0 && self.0.is_null() {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        // SAFETY: the caller of the driver gave an array of this length.
        Ok((0..len)
            .map(|index| unsafe { self.0.add(index).read_unaligned() })
            .collect())
    }
}

/// CUDA_ERROR_INVALID_VALUE unless it holds.
pub fn valid(holds: bool) -> CudaResult {
    if holds {
        Ok(())
    } else {
        Err(CUresult::CUDA_ERROR_INVALID_VALUE)
    }
}
