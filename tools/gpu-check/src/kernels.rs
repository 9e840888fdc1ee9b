//! The kernels of `measured.cu`, and those of warps and blocks that ring.

use std::ffi::{CStr, c_void};
use std::ptr::null_mut;

use anyhow::{Context, Result, ensure};
use cudarc::driver::sys::{self, CUfunction};
use doorbell::{
    Access, CudaContext, CudaStream, Device, Endpoint, EndpointConfig, Executor, QueueKind, Region,
    RemoteSlice, Trigger, TriggerStream,
};
use serde_json::{Value, json};

use super::gpu::{Gpu, SOON, check};

/// Of an H100.
pub const BLOCKS: u32 = 132;

// Names of the steps that compute-sanitizer repeats.
pub const MARK: &str = "kernels: one that stores a word";
pub const GROUPS: &str = "kernels: triggers of warps and blocks";
pub const PUTS: &str = "kernels: puts of many blocks";
pub const POSTS: &str = "kernels: posts of lanes, warps and blocks";
pub const FAILURES: &str = "kernels: a full queue and a dead peer";

/// The kernels of `measured.cu`. It is not unloaded: the process ends with the step.
pub struct Kernels {
    context: CudaContext,
    module: sys::CUmodule,
}

impl Kernels {
    /// None where the bundle was made without nvcc.
    pub fn load(context: &CudaContext) -> Result<Option<Kernels>> {
        let here = std::env::current_exe()?;
        let file = here
            .ancestors()
            .nth(2)
            .map(|bundle| bundle.join("kernels/gpu_check.fatbin"));
        let image = match file.as_ref().map(std::fs::read) {
            Some(Ok(image)) => image,
            // Which has functions of these names, and looks at no code.
            _ if std::env::var_os("DOORBELL_CUDA_STANDIN").is_some() => PTX.to_bytes().to_vec(),
            _ => return Ok(None),
        };
        let mut aligned = vec![0_u64; image.len() / 8 + 2];
        for (word, bytes) in aligned.iter_mut().zip(image.chunks(8)) {
            let mut whole = [0; 8];
            whole[..bytes.len()].copy_from_slice(bytes);
            *word = u64::from_ne_bytes(whole);
        }
        let mut module = null_mut();
        // SAFETY: the image of this program's own kernels, which ends with zeroes; the context is current.
        check("cuModuleLoadData", unsafe {
            sys::cuModuleLoadData(&mut module, aligned.as_ptr().cast())
        })?;
        let context = context.clone();
        Ok(Some(Kernels { context, module }))
    }

    /// Launches a kernel with one parameter.
    pub fn launch<P>(
        &self,
        stream: &CudaStream,
        name: &CStr,
        (blocks, threads): (u32, u32),
        parameter: &P,
    ) -> Result<()> {
        let mut function: CUfunction = null_mut();
        let mut parameters = [std::ptr::from_ref(parameter).cast::<c_void>().cast_mut()];
        // SAFETY: a module of the current context; the parameter is of the kernel's type, by the callers, and copied with the launch.
        unsafe {
            check("cuCtxSetCurrent", sys::cuCtxSetCurrent(self.context.raw()))?;
            check(
                "cuModuleGetFunction",
                sys::cuModuleGetFunction(&mut function, self.module, name.as_ptr()),
            )?;
            check(
                "cuLaunchKernel",
                sys::cuLaunchKernel(
                    function,
                    blocks,
                    1,
                    1,
                    threads,
                    1,
                    1,
                    0,
                    stream.raw(),
                    parameters.as_mut_ptr(),
                    null_mut(),
                ),
            )
        }
    }
}

const PTX: &CStr = c".version 7.0\n.target sm_75\n.address_size 64\n";
pub const WITHOUT: &str = "the bundle was made without nvcc, and has no kernels of its own";

/// A kernel of which nothing can be wrong but where it runs.
pub fn mark() -> Result<Value> {
    let gpu = Gpu::new()?;
    let Some(measured) = Kernels::load(&gpu.context)? else {
        return Ok(json!({"waived": WITHOUT}));
    };
    let stream = CudaStream::new(&gpu.context, "mark")?;
    let word = gpu.context.alloc(4)?;
    measured.launch(&stream, c"gpu_check_mark", (1, 1), &word.ptr())?;
    stream.synchronize(Some(SOON))?;
    let mut bytes = [0; 4];
    word.copy_to_host(0, &mut bytes)?;
    let found = u32::from_ne_bytes(bytes);
    ensure!(found == 7, "the word is {found}");
    Ok(json!({"word": found}))
}

/// `struct measured_group`.
#[repr(C)]
struct MeasuredGroup {
    trigger: Trigger,
    data: u64,
    codes: u64,
    value: u32,
    is_warp: u32,
}

/// What all threads of a warp or a block have stored in memory of the GPU is what the trigger of one of them sends; and all get its code.
pub fn triggers_of_groups(short: bool) -> Result<Value> {
    let gpu = Gpu::new()?;
    let Some(measured) = Kernels::load(&gpu.context)? else {
        return Ok(json!({"waived": WITHOUT}));
    };
    let stream = CudaStream::new(&gpu.context, "groups")?;
    let kernels = TriggerStream::new(&gpu.context, "groups")?;
    let rounds = if short { 10 } else { 500 };
    for device in ["softcx", "softcx,path=proxy"] {
        let domain = Device::open(device)?.protection_domain();
        let mut a = Endpoint::new(&domain, &EndpointConfig::default())?;
        let mut b = Endpoint::new(&domain, &EndpointConfig::default())?;
        a.connect(&b.address())?;
        b.connect(&a.address())?;
        let data = gpu.context.alloc(1024)?;
        let codes = gpu.context.alloc(1024)?;
        let from = Region::register_device(&domain, &data, Access::ALL)?;
        let to = Region::alloc(&domain, 4096, Access::ALL)?;
        for (threads, is_warp) in [(32, 1), (256, 0)] {
            for round in 1..=rounds {
                let value = round * 1000 + is_warp;
                let bytes = 4 * u64::from(threads);
                codes.copy_from_host(0, &77_i32.to_ne_bytes().repeat(threads as usize))?;
                let slices = [from.slice(0, bytes)?];
                let remote = to.remote();
                a.stream_queue_write(&kernels, &slices, RemoteSlice::at(remote.addr, remote.rkey))?;
                a.stream_wait_cq(&kernels, QueueKind::Send)?;
                let group = MeasuredGroup {
                    trigger: kernels.take()?.context("no trigger")?,
                    data: data.ptr(),
                    codes: codes.ptr(),
                    value,
                    is_warp,
                };
                ensure!(kernels.take()?.is_none(), "it took two triggers");
                measured.launch(&stream, c"gpu_check_group", (1, threads), &group)?;
                stream.synchronize(Some(SOON))?;
                let (mut arrived, mut found) = (vec![0; bytes as usize], vec![0; bytes as usize]);
                to.read(0, &mut arrived)?;
                codes.copy_to_host(0, &mut found)?;
                ensure!(
                    found.iter().all(|byte| *byte == 0),
                    "{device}, {threads} threads, round {round}: codes {found:x?}"
                );
                let (arrived, _) = arrived.as_chunks::<4>();
                for (thread, bytes) in (0..).zip(arrived) {
                    let word = u32::from_ne_bytes(*bytes);
                    ensure!(
                        word == value + thread,
                        "{device}, {threads} threads, round {round}: thread {thread}'s word is {word}"
                    );
                }
            }
        }
        kernels.synchronize(Some(SOON))?;
    }
    Ok(json!({"rounds of each": rounds}))
}
