//! What a kernel's fences and looks take, and a round trip between a kernel and a thread of the host.

use std::sync::atomic::Ordering;

use anyhow::{Result, ensure};
use doorbell::{CudaStream, Executor};
use serde_json::{Map, Value, json};

use super::gpu::{Gpu, PORTABLE, Page, SOON, echo, is_few};
use super::kernels::{Kernels, WITHOUT};

/// `struct measured_times`.
#[repr(C)]
struct Times {
    host: u64,
    gpu: u64,
    ping: u64,
    pong: u64,
    took_ns: u64,
    code: u64,
    count: u32,
    reserved: u32,
}

const HOST: usize = 0;
const PING: usize = 256;
const PONG: usize = 512;
const CODE: usize = 768;
const TOOK: usize = 1024;

/// In the order of `took_ns`.
const NAMES: [&str; 9] = [
    "fence.sc.sys",
    "fence.sc.sys behind a store to the host",
    "fence.acq_rel.sys",
    "fence.acq_rel.sys behind a store to the host",
    "fence.acq_rel.gpu",
    "fence.acq_rel.gpu behind a store to the host",
    "load of a word of the host",
    "load of a word of the GPU",
    "round trip: kernel, thread of the host, kernel",
];

/// Nanoseconds of each. The round trip is the least that any exchange of a kernel with the host takes.
pub fn times_of_kernels(short: bool) -> Result<Value> {
    let gpu = Gpu::new()?;
    let Some(measured) = Kernels::load(&gpu.context)? else {
        return Ok(json!({"waived": WITHOUT}));
    };
    let stream = CudaStream::new(&gpu.context, "times")?;
    let page = Page::new(PORTABLE, false)?;
    let word = gpu.context.alloc(4)?;
    word.copy_from_host(0, &[0; 4])?;
    let count = if is_few(short) { 100 } else { 2000 };
    let at = |offset: usize| page.gpu + offset as u64;
    let times = Times {
        host: at(HOST),
        gpu: word.ptr(),
        ping: at(PING),
        pong: at(PONG),
        took_ns: at(TOOK),
        code: at(CODE),
        count,
        reserved: 0,
    };
    let answers = echo(page, PING, PONG, count);
    measured.launch(&stream, c"gpu_check_time", (1, 1), &times)?;
    stream.synchronize(Some(SOON))?;
    let code = page.word(CODE).load(Ordering::Acquire).cast_signed();
    ensure!(code == 0, "the kernel came to the code {code}");
    ensure!(answers.join().unwrap_or(false), "the echo ended early");
    let ns = |number: usize| {
        let all = page.long(TOOK + 8 * number).load(Ordering::Acquire);
        json!(all as f64 / f64::from(count))
    };
    let named = NAMES.iter().enumerate();
    let found: Map<String, Value> = named
        .map(|(number, name)| (format!("{name}, ns"), ns(number)))
        .collect();
    Ok(found.into())
}
