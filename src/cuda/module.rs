//! The kernels of this library, loaded into a context.
#![allow(unsafe_code)] // calls the driver

use std::ffi::{CStr, c_void};
use std::ptr::null_mut;

use cudarc::driver::sys::{
    self, CUDA_KERNEL_NODE_PARAMS, CUcontext, CUdeviceptr, CUfunction, CUfunction_attribute,
    CUmodule, CUresult, CUstream,
};

use super::capture::RelaxedCapture;
use super::driver::{check, is};
use super::kernel_reduction::{KernelReduction, REDUCE_THREADS};
use super::kernel_words::{LONG_WORDS, SHORT_WORDS};
use crate::stream::ReplayWords;
use crate::{Error, Result, StateKind};

/// Alignment that the driver requires of an image.
#[repr(C, align(64))]
struct Aligned<T: ?Sized>(T);

/// `cuda/kernels.cu` as build.rs has compiled it: a fatbin of nvcc, or PTX of clang; or, without both, a text, which every driver refuses.
static IMAGE: &Aligned<[u8]> =
    &Aligned(*include_bytes!(concat!(env!("OUT_DIR"), "/kernels.image")));

/// The same of an nvcc of CUDA 12; empty without one.
static OLDER_IMAGE: &Aligned<[u8]> = &Aligned(*include_bytes!(concat!(
    env!("OUT_DIR"),
    "/kernels12.image"
)));

/// Why there is no code in [`IMAGE`].
const MISSING: Option<&str> = option_env!("DOORBELL_NO_KERNELS");
/// What nvcc was asked for: `sm_90` is code, `compute_90` is PTX.
const CODES: &str = match option_env!("DOORBELL_KERNELS") {
    Some(codes) => codes,
    None => "",
};
/// The compilers of the images, and whether they come from a file.
const COMPILER: Option<&str> = option_env!("DOORBELL_KERNELS_COMPILER");
/// Whether clang has made [`IMAGE`].
const BY_CLANG: bool = option_env!("DOORBELL_KERNELS_BY_CLANG").is_some();
/// The same of [`OLDER_IMAGE`].
const OLDER_CODES: Option<&str> = option_env!("DOORBELL_KERNELS_12");

/// The first `cuDriverGetVersion` that takes what nvcc 13 makes, which has another ELF ABI version than before.
const FIRST_OF_13: i32 = 13_000;

/// By which compiler the kernels were made, and for which GPUs; or why there are none.
pub fn kernels_made_by() -> String {
    match (MISSING, COMPILER) {
        (Some(reason), _) => format!("none: {reason}"),
        (None, compiler) => {
            let compiler = compiler.unwrap_or("an unknown compiler");
            format!("made by {compiler}, for {CODES}")
        }
    }
}

/// The kernels, loaded into a context.
#[derive(Debug)]
pub(super) struct KernelModule {
    raw: CUmodule,
    pub(super) spin: LoadedKernel,
    pub(super) step: LoadedKernel,
    pub(super) put_step: LoadedKernel,
    execute_short: LoadedKernel,
    execute_long: LoadedKernel,
    reduce: LoadedKernel,
    replay: LoadedKernel,
}

/// A function of the module, valid as long as the module is loaded.
#[derive(Debug)]
pub(super) struct LoadedKernel(CUfunction);

// SAFETY: handles of the driver, which locks.
unsafe impl Send for KernelModule {}
// SAFETY: as above.
unsafe impl Sync for KernelModule {}

impl KernelModule {
    /// Loads the kernels into the current context, with their code: if the driver loaded it at the first launch, it might wait for the GPU, and so for
    /// a stream that waits.
    ///
    /// # Errors
    /// [`Error::State`] if this library was built without nvcc, or for none of what the device is; [`Error::Cuda`].
    pub(super) fn load() -> Result<KernelModule> {
        let _relaxed = RelaxedCapture::new();
        let mut version = 0;
        // SAFETY: writes one int.
        check("cuDriverGetVersion", unsafe {
            sys::cuDriverGetVersion(&mut version)
        })?;
        let is_older = version < FIRST_OF_13 && OLDER_CODES.is_some();
        let image = if is_older { OLDER_IMAGE } else { IMAGE };
        let mut raw = null_mut();
        // SAFETY: an image that this was compiled with, which ends as the driver expects; writes one handle, which `KernelModule` unloads.
        let loaded = check("cuModuleLoadData", unsafe {
            sys::cuModuleLoadData(&mut raw, image.0.as_ptr().cast())
        });
        loaded.map_err(|error| explain(error, version))?;
        let mut module = KernelModule {
            raw,
            spin: LoadedKernel(null_mut()),
            step: LoadedKernel(null_mut()),
            put_step: LoadedKernel(null_mut()),
            execute_short: LoadedKernel(null_mut()),
            execute_long: LoadedKernel(null_mut()),
            reduce: LoadedKernel(null_mut()),
            replay: LoadedKernel(null_mut()),
        };
        let found = module.find();
        if found.is_err() {
            module.unload();
        }
        found.map(|()| module)
    }

    fn find(&mut self) -> Result<()> {
        self.spin = function(self.raw, c"doorbell_spin")?;
        self.step = function(self.raw, c"doorbell_step")?;
        self.put_step = function(self.raw, c"doorbell_put_step")?;
        self.execute_short = function(self.raw, c"doorbell_execute_short")?;
        self.execute_long = function(self.raw, c"doorbell_execute_long")?;
        self.reduce = function(self.raw, c"doorbell_reduce")?;
        self.replay = function(self.raw, c"doorbell_replay")?;
        Ok(())
    }

    /// Calls `give` with the launch of a kernel that executes the words of a [`KernelWords`](super::kernel_words::KernelWords). The addresses in `words`, and that of a
    /// `struct dbl_control`, are the device's.
    ///
    /// # Errors
    /// Those of `give`.
    pub(super) fn execute(
        &self,
        words: &[u64],
        control: CUdeviceptr,
        give: impl FnOnce(&KernelLaunch) -> Result<()>,
    ) -> Result<()> {
        if words.len() <= SHORT_WORDS {
            let batch = parameter::<{ SHORT_WORDS + 2 }>(words, control);
            give(&self.execute_short.with((&raw const batch).cast()))
        } else {
            let batch = parameter::<{ LONG_WORDS + 2 }>(words, control);
            give(&self.execute_long.with((&raw const batch).cast()))
        }
    }

    /// The launch of a reduction, which it points to. Its addresses are the device's.
    pub(super) fn reduce(&self, reduction: &KernelReduction) -> KernelLaunch {
        KernelLaunch {
            blocks: reduction.blocks(),
            threads: REDUCE_THREADS,
            ..self.reduce.with((&raw const *reduction).cast())
        }
    }

    /// The launch of an operation of a graph that its application launches: a `struct dbl_replay`, which it points to.
    pub(super) fn replay(&self, words: &ReplayWords) -> KernelLaunch {
        self.replay.with((&raw const *words).cast())
    }

    /// Unloads it in its context, which is current. No kernel of it may be queued.
    pub(super) fn unload(&self) {
        // SAFETY: loaded by `load`; the only call for this module, by the contract of the context.
        let _ = unsafe { sys::cuModuleUnload(self.raw) };
    }
}

/// A kernel with one parameter, for a stream or for a node of a graph. The driver copies the parameter.
pub(super) struct KernelLaunch {
    function: CUfunction,
    blocks: u32,
    threads: u32,
    parameter: *const c_void,
}

impl KernelLaunch {
    /// Queues it on a stream of its context, which is current.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    ///
    /// # Safety
    /// `parameter` points to a value of the parameter's type; what the kernel does with it is safe until it is done.
    pub(super) unsafe fn queue(&self, stream: CUstream) -> Result<()> {
        // SAFETY: by this function's contract.
        unsafe {
            LoadedKernel(self.function).launch_grid(
                stream,
                self.blocks,
                self.threads,
                [self.parameter],
            )
        }
    }

    /// Calls with the parameters of a node that does the same in a context. They are good during the call.
    pub(super) fn with_params<R>(
        &self,
        context: CUcontext,
        call: impl FnOnce(&CUDA_KERNEL_NODE_PARAMS) -> R,
    ) -> R {
        let mut parameters = [self.parameter.cast_mut()];
        call(&CUDA_KERNEL_NODE_PARAMS {
            func: self.function,
            gridDimX: self.blocks,
            gridDimY: 1,
            gridDimZ: 1,
            blockDimX: self.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: 0,
            kernelParams: parameters.as_mut_ptr(),
            extra: null_mut(),
            kern: null_mut(),
            ctx: context,
        })
    }
}

/// The parameter of a kernel: `struct batch` of `cuda/kernels.cu`.
fn parameter<const N: usize>(words: &[u64], control: CUdeviceptr) -> [u64; N] {
    let mut batch = [0; N];
    if let [of, count, to @ ..] = batch.as_mut_slice() {
        let len = words.len().min(to.len());
        debug_assert_eq!(len, words.len());
        (*of, *count) = (control, len as u64);
        to[..len].copy_from_slice(&words[..len]);
    }
    batch
}

fn function(module: CUmodule, name: &CStr) -> Result<LoadedKernel> {
    let mut function = null_mut();
    // SAFETY: a module of the current context; writes one handle.
    check("cuModuleGetFunction", unsafe {
        sys::cuModuleGetFunction(&mut function, module, name.as_ptr())
    })?;
    let mut registers = 0;
    // SAFETY: writes one int. This call makes the driver load the code.
    check("cuFuncGetAttribute", unsafe {
        sys::cuFuncGetAttribute(
            &mut registers,
            CUfunction_attribute::CU_FUNC_ATTRIBUTE_NUM_REGS,
            function,
        )
    })?;
    Ok(LoadedKernel(function))
}

/// Explains the errors of a driver of that version for an image without code, or without code for the device.
fn explain(error: Error, version: i32) -> Error {
    const NO_CODE: [CUresult; 7] = [
        CUresult::CUDA_ERROR_INVALID_IMAGE,
        CUresult::CUDA_ERROR_INVALID_PTX,
        CUresult::CUDA_ERROR_UNSUPPORTED_PTX_VERSION,
        CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU,
        CUresult::CUDA_ERROR_INVALID_SOURCE,
        // It has no code for the GPU, and the driver cannot make some of its PTX.
        CUresult::CUDA_ERROR_JIT_COMPILER_NOT_FOUND,
        CUresult::CUDA_ERROR_JIT_COMPILATION_DISABLED,
    ];
    if !NO_CODE.iter().any(|result| is(&error, *result)) {
        return error;
    }
    let reason = match MISSING {
        Some(reason) => format!(
            "this library has no kernels: {reason}. `eval \"$(scripts/setup-cuda)\"` installs nvcc; rebuild after it"
        ),
        None => {
            let driver = format!("CUDA {}.{}", version / 1000, version % 1000 / 10);
            let older = match OLDER_CODES {
                Some(codes) => format!("for {codes} with drivers of CUDA 12.1 or newer, and "),
                None => String::new(),
            };
            let drivers = match BY_CLANG {
                true => "CUDA 12.2 or newer",
                false => "the 580 series (CUDA 13.0) or newer",
            };
            format!(
                "this library's kernels are {older}for {CODES} with drivers of {drivers}, and this driver has {driver}: {error}"
            )
        }
    };
    Error::state(StateKind::Unsupported, "load kernels", reason)
}

impl LoadedKernel {
    /// It with one thread and that parameter.
    fn with(&self, parameter: *const c_void) -> KernelLaunch {
        KernelLaunch {
            function: self.0,
            blocks: 1,
            threads: 1,
            parameter,
        }
    }

    /// Queues it, with one thread, on a stream of its context, which is current.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    ///
    /// # Safety
    /// There is a pointer for each parameter, to a value of its type; what the kernel does with them is safe.
    pub(super) unsafe fn launch<const N: usize>(
        &self,
        stream: CUstream,
        parameters: [*const c_void; N],
    ) -> Result<()> {
        // SAFETY: by this function's contract.
        unsafe { self.launch_grid(stream, 1, 1, parameters) }
    }

    /// The same with so many blocks of so many threads.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    ///
    /// # Safety
    /// As [`LoadedKernel::launch`].
    unsafe fn launch_grid<const N: usize>(
        &self,
        stream: CUstream,
        blocks: u32,
        threads: u32,
        parameters: [*const c_void; N],
    ) -> Result<()> {
        let mut parameters = parameters.map(<*const c_void>::cast_mut);
        // SAFETY: by this function's contract; the driver copies the values before it returns.
        check("cuLaunchKernel", unsafe {
            sys::cuLaunchKernel(
                self.0,
                blocks,
                1,
                1,
                threads,
                1,
                1,
                0,
                stream,
                parameters.as_mut_ptr(),
                null_mut(),
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The kind (1 is PTX, 2 is ELF) and the architecture of each part of the image.
    fn parts(mut image: &[u8]) -> Vec<(u16, u32)> {
        let u16_at = |at: &[u8], place: usize| u16::from_le_bytes([at[place], at[place + 1]]);
        let u32_at =
            |at: &[u8], place: usize| u32::from_le_bytes(at[place..place + 4].try_into().unwrap());
        // The magic number, a version, the length of this header, that of all that follows.
        assert_eq!(u32_at(image, 0), 0xba55_ed50);
        image = &image[usize::from(u16_at(image, 6))..];
        let mut parts = Vec::new();
        while !image.is_empty() {
            // The kind; the lengths of its header and of what follows.
            parts.push((u16_at(image, 0), u32_at(image, 28)));
            let len = u32_at(image, 4) + u32_at(image, 8);
            image = &image[len as usize..];
        }
        parts.sort_unstable();
        parts
    }

    fn check_parts(image: &[u8], codes: &str) {
        let mut expected: Vec<(u16, u32)> = codes
            .split(' ')
            .map(|code| {
                let (kind, number) = code.split_once('_').unwrap();
                (if kind == "sm" { 2 } else { 1 }, number.parse().unwrap())
            })
            .collect();
        expected.sort_unstable();
        assert!(expected.len() > 1);
        assert_eq!(parts(image), expected);
    }

    /// PTX with each kernel, whose parameters stay where they are.
    fn check_ptx(text: &str) {
        assert!(text.ends_with('\0') && text.contains(&CODES.replace("compute", ".target sm")));
        let bodies: Vec<&str> = text.split(".visible .entry ").skip(1).collect();
        for kernel in [
            "spin",
            "step",
            "put_step",
            "execute_short",
            "execute_long",
            "reduce",
        ] {
            let start = format!("doorbell_{kernel}(");
            let body = bodies.iter().find(|body| body.starts_with(&start)).unwrap();
            // A measurement's kernel has room for a number there.
            let has_stack = body.contains("__local_depot") && kernel != "put_step";
            assert!(!has_stack, "{kernel} copies its parameter to the stack");
        }
    }

    #[test]
    fn the_images_have_code_for_each_architecture_or_say_why_not() {
        match OLDER_CODES {
            Some(codes) => check_parts(&OLDER_IMAGE.0, codes),
            None => assert!(OLDER_IMAGE.0.is_empty()),
        }
        match MISSING {
            None if BY_CLANG => check_ptx(std::str::from_utf8(&IMAGE.0).unwrap()),
            None => check_parts(&IMAGE.0, CODES),
            Some(reason) => {
                assert!(!reason.is_empty());
                assert_eq!(IMAGE.0.last(), Some(&0));
            }
        }
    }

    #[test]
    fn a_driver_that_finds_no_code_is_explained_and_any_other_error_is_not() {
        let cuda = |result: CUresult| Error::Cuda {
            call: "cuModuleLoadData",
            code: result as u32,
            name: "a name".into(),
        };
        for result in [
            CUresult::CUDA_ERROR_INVALID_PTX,
            CUresult::CUDA_ERROR_JIT_COMPILER_NOT_FOUND,
            CUresult::CUDA_ERROR_JIT_COMPILATION_DISABLED,
        ] {
            let explained = explain(cuda(result), 12_040).to_string();
            match MISSING {
                None => assert!(
                    explained.contains(CODES) && explained.contains("CUDA 12.4"),
                    "{explained}"
                ),
                Some(reason) => assert!(
                    explained.contains(reason) && explained.contains("scripts/setup-cuda"),
                    "{explained}"
                ),
            }
        }
        let other = cuda(CUresult::CUDA_ERROR_OUT_OF_MEMORY);
        assert_eq!(explain(other.clone(), 13_000), other);
    }
}
