//! Kernels, which are functions here: a table by name. A new one gets an entry, and takes device addresses through `Thread`.

use std::cell::Cell;
use std::ffi::{CStr, c_int, c_void};
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use crate::call::{CUresult, CudaResult};
use crate::life::ContextLife;
use crate::memop;
use crate::memory::{self, Place};
use crate::names;

pub struct Kernel {
    pub name: &'static CStr,
    /// The size of each parameter in bytes.
    pub parameters: &'static [usize],
    /// Run once for the whole grid: for what all threads do side by side.
    pub once: bool,
    run: KernelCode,
}

/// A kernel of `kernels.c`: a pointer to each argument, and the place of the thread. A CUresult comes back.
type InC = unsafe extern "C" fn(*const *const c_void, u64) -> u32;

enum KernelCode {
    Here(fn(&Thread) -> CudaResult),
    C(InC),
}

unsafe extern "C" {
    fn doorbell_execute(arguments: *const *const c_void, thread: u64) -> u32;
    fn doorbell_step(arguments: *const *const c_void, thread: u64) -> u32;
    fn doorbell_put_step(arguments: *const *const c_void, thread: u64) -> u32;
    fn doorbell_replay(arguments: *const *const c_void, thread: u64) -> u32;
    fn doorbell_reduce(arguments: *const *const c_void, thread: u64) -> u32;
    fn gpu_check_mark(arguments: *const *const c_void, thread: u64) -> u32;
    fn gpu_check_ring(arguments: *const *const c_void, thread: u64) -> u32;
    fn gpu_check_put(arguments: *const *const c_void, thread: u64) -> u32;
    fn gpu_check_look(arguments: *const *const c_void, thread: u64) -> u32;
    fn gpu_check_time(arguments: *const *const c_void, thread: u64) -> u32;
    fn gpu_check_flood(arguments: *const *const c_void, thread: u64) -> u32;
    fn gpu_check_post(arguments: *const *const c_void, thread: u64) -> u32;
    fn gpu_check_full(arguments: *const *const c_void, thread: u64) -> u32;
    fn gpu_check_group(arguments: *const *const c_void, thread: u64) -> u32;
    fn gpu_check_emit(arguments: *const *const c_void, thread: u64) -> u32;
    fn doorbell_standin_wait(arguments: *const *const c_void, thread: u64) -> u32;
}

static KERNELS: &[Kernel] = &[
    Kernel {
        name: c"doorbell_spin",
        parameters: &[8],
        once: true,
        run: KernelCode::Here(spin),
    },
    // `struct batch` of cuda/kernels.cu, with 62 words and with 2046.
    Kernel {
        name: c"doorbell_execute_short",
        parameters: &[512],
        once: true,
        run: KernelCode::C(doorbell_execute),
    },
    Kernel {
        name: c"doorbell_execute_long",
        parameters: &[16384],
        once: true,
        run: KernelCode::C(doorbell_execute),
    },
    // A `struct doorbell_trigger`, two times, an address.
    Kernel {
        name: c"doorbell_step",
        parameters: &[512, 8, 8, 8],
        once: true,
        run: KernelCode::C(doorbell_step),
    },
    // `struct doorbell_queue_view`, `struct dbl_step`.
    Kernel {
        name: c"doorbell_put_step",
        parameters: &[112, 64],
        once: true,
        run: KernelCode::C(doorbell_put_step),
    },
    // `struct dbl_replay`.
    Kernel {
        name: c"doorbell_replay",
        parameters: &[296],
        once: true,
        run: KernelCode::C(doorbell_replay),
    },
    // `struct dbl_reduce`. All of its threads at once.
    Kernel {
        name: c"doorbell_reduce",
        parameters: &[48],
        once: true,
        run: KernelCode::C(doorbell_reduce),
    },
    // Those of tools/gpu-check/src.
    Kernel {
        name: c"gpu_check_mark",
        parameters: &[8],
        once: true,
        run: KernelCode::C(gpu_check_mark),
    },
    Kernel {
        name: c"gpu_check_ring",
        parameters: &[48],
        once: true,
        run: KernelCode::C(gpu_check_ring),
    },
    Kernel {
        name: c"gpu_check_put",
        parameters: &[56],
        once: false,
        run: KernelCode::C(gpu_check_put),
    },
    Kernel {
        name: c"gpu_check_look",
        parameters: &[24],
        once: true,
        run: KernelCode::C(gpu_check_look),
    },
    Kernel {
        name: c"gpu_check_time",
        parameters: &[56],
        once: true,
        run: KernelCode::C(gpu_check_time),
    },
    Kernel {
        name: c"gpu_check_flood",
        parameters: &[32],
        once: false,
        run: KernelCode::C(gpu_check_flood),
    },
    Kernel {
        name: c"gpu_check_post",
        parameters: &[80],
        once: false,
        run: KernelCode::C(gpu_check_post),
    },
    Kernel {
        name: c"gpu_check_full",
        parameters: &[32],
        once: true,
        run: KernelCode::C(gpu_check_full),
    },
    Kernel {
        name: c"gpu_check_group",
        parameters: &[536],
        once: false,
        run: KernelCode::C(gpu_check_group),
    },
    Kernel {
        name: c"gpu_check_emit",
        parameters: &[16],
        once: false,
        run: KernelCode::C(gpu_check_emit),
    },
    Kernel {
        name: c"doorbell_standin_mark",
        parameters: &[8, 4],
        once: false,
        run: KernelCode::Here(mark),
    },
    Kernel {
        name: c"doorbell_test_copy",
        parameters: &[8, 8],
        once: true,
        run: KernelCode::Here(copy),
    },
    Kernel {
        name: c"doorbell_standin_wait",
        parameters: &[8, 4],
        once: true,
        run: KernelCode::C(doorbell_standin_wait),
    },
];

pub fn find(name: &CStr) -> Option<&'static Kernel> {
    KERNELS.iter().find(|kernel| kernel.name == name)
}

impl Kernel {
    pub fn run(&self, thread: &Thread) -> CudaResult {
        let function = match self.run {
            KernelCode::Here(function) => return function(thread),
            KernelCode::C(function) => function,
        };
        let arguments: Vec<*const c_void> = thread
            .arguments
            .iter()
            .map(|argument| argument.as_ptr().cast())
            .collect();
        RUNNING.set(thread.life);
        // SAFETY: a pointer to each parameter of the kernel, which were copied with the sizes in its entry.
        let number = unsafe { function(arguments.as_ptr(), thread.index) };
        RUNNING.set(null());
        match names::result(number) {
            Some(CUresult::CUDA_SUCCESS) => Ok(()),
            other => Err(other.unwrap_or(CUresult::CUDA_ERROR_LAUNCH_FAILED)),
        }
    }
}

thread_local! {
    /// That of the context whose kernel in C this thread runs.
    static RUNNING: Cell<*const ContextLife> = const { Cell::new(null()) };
}

/// For kernels in C: memory at a device address, or null. It stays while the kernel runs, since to free it is to wait for the kernel.
#[unsafe(no_mangle)]
pub extern "C" fn doorbell_cuda_standin_reach(address: u64, len_bytes: u64) -> *mut c_void {
    match memory::device_place(address, len_bytes) {
        Some(place) => place.address as *mut c_void,
        None => {
            memory::illegal("a kernel", address, len_bytes);
            null_mut()
        }
    }
}

/// For kernels in C, in each turn of a wait: whether to end.
#[unsafe(no_mangle)]
pub extern "C" fn doorbell_cuda_standin_pause(turn: u32) -> c_int {
    memop::pause(turn);
    is_over()
}

/// For kernels in C: whether to end.
#[unsafe(no_mangle)]
pub extern "C" fn doorbell_cuda_standin_over() -> c_int {
    std::thread::yield_now();
    is_over()
}

fn is_over() -> c_int {
    let life = RUNNING.get();
    // SAFETY: not null only while the kernel runs, which borrows it.
    c_int::from(!life.is_null() && unsafe { &*life }.is_over())
}

/// One thread of a grid, and what it can reach.
pub struct Thread<'a> {
    life: &'a ContextLife,
    arguments: &'a [Vec<u8>],
    /// Its place in the grid, all dimensions in one.
    pub index: u64,
}

impl<'a> Thread<'a> {
    pub fn new(life: &'a ContextLife, arguments: &'a [Vec<u8>], index: u64) -> Thread<'a> {
        Thread {
            life,
            arguments,
            index,
        }
    }

    /// An unsigned argument of up to 8 bytes.
    pub fn argument(&self, index: usize) -> u64 {
        let mut bytes = [0u8; 8];
        let argument = &self.arguments[index];
        bytes[..argument.len()].copy_from_slice(argument);
        u64::from_le_bytes(bytes)
    }

    /// Memory at a device address. Where there is none, the context keeps CUDA_ERROR_ILLEGAL_ADDRESS, if the kernel returns it.
    pub fn memory(&self, address: u64, len: u64) -> CudaResult<Place> {
        memory::device_place(address, len).ok_or_else(|| memory::illegal("a kernel", address, len))
    }

    /// Whether it is to end: its context has.
    pub fn is_over(&self) -> bool {
        self.life.is_over()
    }
}

/// `doorbell_spin(uint64_t ns)`: takes that long.
fn spin(thread: &Thread) -> CudaResult {
    let start = Instant::now();
    let time = Duration::from_nanos(thread.argument(0));
    while start.elapsed() < time && !thread.is_over() {
        // A GPU would not take a core of the CPU.
        if time - start.elapsed().min(time) > Duration::from_micros(200) {
            std::thread::sleep(Duration::from_micros(100));
        } else {
            std::hint::spin_loop();
        }
    }
    Ok(())
}

/// `doorbell_standin_mark(uint32_t *words, uint32_t value)`: each thread writes its word. For the tests of the stand-in.
fn mark(thread: &Thread) -> CudaResult {
    let address = thread.argument(0).wrapping_add(4 * thread.index);
    let place = thread.memory(address, 4)?;
    if !address.is_multiple_of(4) {
        return Err(CUresult::CUDA_ERROR_MISALIGNED_ADDRESS);
    }
    // SAFETY: aligned and within the place, which keeps device memory alive; host memory is the program's to keep while it is
    // registered.
    unsafe { (place.address as *mut u32).write_volatile(thread.argument(1) as u32) };
    Ok(())
}

/// `doorbell_test_copy(uint32_t *to, const uint32_t *from)`: a word. For tests in which the application launches kernels of its own.
fn copy(thread: &Thread) -> CudaResult {
    let [to, from] = [0, 1].map(|index| thread.argument(index));
    let (into, out_of) = (thread.memory(to, 4)?, thread.memory(from, 4)?);
    if !to.is_multiple_of(4) || !from.is_multiple_of(4) {
        return Err(CUresult::CUDA_ERROR_MISALIGNED_ADDRESS);
    }
    // SAFETY: aligned and within the places, as in `mark`.
    unsafe {
        let word = &*(out_of.address as *const AtomicU32);
        (*(into.address as *const AtomicU32))
            .store(word.load(Ordering::Acquire), Ordering::Release);
    }
    Ok(())
}
