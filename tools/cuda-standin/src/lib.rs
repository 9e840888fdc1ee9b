//! A stand-in for the CUDA driver (`libcuda.so.1`), for the tests of doorbell only: streams are threads, device memory is a memfd
//! that the program cannot touch, kernels are functions of this library. There is no GPU and none is needed.
//!
//! It is to be as unforgiving as the driver: what cuda.h documents as an error is that error here, and where the documentation leaves
//! a choice, the stricter one is taken. A device pointer that the CPU dereferences is a SIGSEGV; a handle that was destroyed is never
//! given out again.
//!
//! It cannot be mistaken for the product. `cuInit` finds no device unless the environment has `DOORBELL_CUDA_STANDIN=1`, the device's
//! name identifies it, and programs can look up the symbol `doorbell_cuda_standin`. `scripts/cuda-standin` builds it and prints what to
//! set; `settings` lists the environment that it reads.

mod call;
mod capture;
mod capture_calls;
mod context;
mod context_calls;
mod copy;
mod current;
mod device;
mod event;
mod exec;
mod fault;
mod fill;
mod graph;
mod graph_calls;
mod handle;
mod held;
mod host_memory;
mod image;
mod kernels;
mod life;
mod mark;
mod memop;
mod memory;
mod module;
mod names;
mod node;
mod pages;
mod pointer;
mod reservation;
mod settings;
mod stream;
mod stream_calls;
mod streams;
mod task;
mod user_object;

use std::ffi::{CStr, c_char};

/// A text that a program may show; a pointer that threads may share.
#[repr(transparent)]
pub struct Text(*const c_char);

// SAFETY: it points to a constant.
unsafe impl Sync for Text {}

const TEXT: &CStr = c"doorbell's CUDA stand-in: for tests, no GPU";

/// A variable of type `const char *` that only this library has: by it programs distinguish the stand-in from a driver.
#[unsafe(no_mangle)]
#[allow(non_upper_case_globals)]
pub static doorbell_cuda_standin: Text = Text(TEXT.as_ptr());
