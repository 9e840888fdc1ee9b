//! Modules and their functions. What a function does is known by its name, and of an image only which drivers take it.

use std::ffi::OsStr;
use std::ffi::{CStr, c_char, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;

use cudarc::driver::sys::{CUdeviceptr, CUfunction, CUlaunchConfig, CUmodule, CUstream};

use crate::call::{CUresult, CudaResult, In, Out, cuda, valid};
use crate::context::Context;
use crate::graph::NodeWork;
use crate::handle::{self, ObjectTable};
use crate::kernels::{self, Kernel, Thread};
use crate::life::ContextLife;
use crate::settings::settings;
use crate::task::{Task, node_type};
use crate::{capture, current, image, streams};

struct Module {
    context: Arc<Context>,
}

pub struct KernelFunction {
    context: Arc<Context>,
    module: u64,
    kernel: &'static Kernel,
}

static MODULES: ObjectTable<Module> = ObjectTable::new();
static FUNCTIONS: ObjectTable<KernelFunction> = ObjectTable::new();

/// A kernel with its grid and its arguments, which were copied when the call was made.
#[derive(Clone)]
pub struct Launch {
    /// The id of its context.
    context: u64,
    kernel: &'static Kernel,
    grid: [u32; 3],
    block: [u32; 3],
    arguments: Vec<Vec<u8>>,
}

pub fn forget(context: &Context) {
    MODULES.remove_where(|module| module.context.id == context.id);
    FUNCTIONS.remove_where(|function| function.context.id == context.id);
}

fn load(module: &Out<CUmodule>, image: *const c_void) -> CudaResult {
    let context = current::context()?;
    capture::check_safe()?;
    valid(!module.is_null() && !image.is_null())?;
    if settings().lacks("kernels") {
        return Err(CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU);
    }
    // SAFETY: an image, as the call takes it.
    unsafe { image::check(image.cast())? };
    // Seen on an H100 with driver 580.159: it waits for streams that wait, and other threads' calls wait for it.
    context.pass();
    context.wait_idle_alone();
    let handle = handle::fresh();
    MODULES.insert(handle, Arc::new(Module { context }));
    module.put(handle as CUmodule)
}

pub fn find(function: CUfunction) -> CudaResult<Arc<KernelFunction>> {
    let found = FUNCTIONS
        .get(function)
        .ok_or(CUresult::CUDA_ERROR_INVALID_HANDLE)?;
    found.context.life.check()?;
    Ok(found)
}

impl Launch {
    /// Checked as the call checks it. `arguments` has a pointer for each parameter.
    pub fn new(
        context: &Context,
        function: CUfunction,
        grid: [u32; 3],
        block: [u32; 3],
        shared_bytes: u32,
        arguments: &In<*const c_void>,
    ) -> CudaResult<Launch> {
        let function = find(function)?;
        // A function is of its context.
        if function.context.id != context.id {
            return Err(CUresult::CUDA_ERROR_INVALID_HANDLE);
        }
        let threads = block.iter().map(|size| u64::from(*size)).product::<u64>();
        valid(
            grid.iter().all(|size| *size > 0)
                && (1..=1024).contains(&threads)
                && shared_bytes <= 49152,
        )?;
        valid(
            grid[0] <= i32::MAX as u32 && grid[1] <= 65535 && grid[2] <= 65535 && block[2] <= 64,
        )?;
        let kernel = function.kernel;
        let pointers = arguments.get_all(kernel.parameters.len())?;
        let arguments = pointers
            .iter()
            .zip(kernel.parameters)
            .map(|(pointer, len)| In::<u8>::at(*pointer).get_all(*len))
            .collect::<CudaResult<Vec<_>>>()?;
        Ok(Launch {
            context: context.id,
            kernel,
            grid,
            block,
            arguments,
        })
    }
}

impl Task for Launch {
    /// One thread after the other.
    fn run(&self, life: &ContextLife) -> CudaResult {
        if self.kernel.once {
            return self.kernel.run(&Thread::new(life, &self.arguments, 0));
        }
        let count = self
            .grid
            .iter()
            .chain(&self.block)
            .map(|size| u64::from(*size))
            .product();
        for index in 0..count {
            if life.is_over() {
                break;
            }
            self.kernel
                .run(&Thread::new(life, &self.arguments, index))?;
        }
        Ok(())
    }

    fn node_type(&self) -> u32 {
        node_type::KERNEL
    }

    fn context(&self) -> Option<u64> {
        Some(self.context)
    }
}

/// Arguments come one pointer each; not packed into a buffer, which nothing here uses.
#[allow(clippy::too_many_arguments)]
fn launch(
    function: CUfunction,
    grid: [u32; 3],
    block: [u32; 3],
    shared_bytes: u32,
    stream: CUstream,
    arguments: &In<*const c_void>,
    extra: *const c_void,
) -> CudaResult {
    let stream = streams::find_here(stream)?;
    if !extra.is_null() {
        return Err(if arguments.is_null() {
            CUresult::CUDA_ERROR_NOT_SUPPORTED
        } else {
            CUresult::CUDA_ERROR_INVALID_VALUE
        });
    }
    let launch = Launch::new(
        &stream.context,
        function,
        grid,
        block,
        shared_bytes,
        arguments,
    )?;
    capture::queue(&stream, NodeWork::of(launch))
}

/// What a function may be asked for, by number (cuda.h, CUfunction_attribute).
fn function_attribute(attribute: u32) -> CudaResult<i32> {
    match attribute {
        // MAX_THREADS_PER_BLOCK.
        0 => Ok(1024),
        // SHARED_SIZE_BYTES, CONST_SIZE_BYTES, LOCAL_SIZE_BYTES, CACHE_MODE_CA.
        1..=3 | 7 => Ok(0),
        // NUM_REGS.
        4 => Ok(32),
        // PTX_VERSION, BINARY_VERSION.
        5 | 6 => Ok(90),
        // MAX_DYNAMIC_SHARED_SIZE_BYTES.
        8 => Ok(49152),
        // PREFERRED_SHARED_MEMORY_CARVEOUT: no preference.
        9 => Ok(-1),
        _ => Err(CUresult::CUDA_ERROR_INVALID_VALUE),
    }
}

cuda! {
    fn cuModuleLoadData(module: Out<CUmodule>, image: *const c_void) {
        load(&module, image)
    }

    fn cuModuleLoadDataEx(module: Out<CUmodule>, image: *const c_void, count: u32, options: In<u32>, values: In<*mut c_void>) {
        valid(count == 0 || (!options.is_null() && !values.is_null()))?;
        load(&module, image)
    }

    fn cuModuleLoad(module: Out<CUmodule>, path: *const c_char) {
        valid(!path.is_null())?;
        // SAFETY: the caller gave a string.
        let path = Path::new(OsStr::from_bytes(unsafe { CStr::from_ptr(path) }.to_bytes()));
        if !path.is_file() {
            return Err(CUresult::CUDA_ERROR_FILE_NOT_FOUND);
        }
        // Whatever is in it.
        load(&module, path.as_os_str().as_bytes().as_ptr().cast())
    }

    // Kernels here have no variables.
    fn cuModuleGetGlobal_v2(_address: Out<CUdeviceptr>, _len: Out<usize>, module: CUmodule, name: *const c_char) {
        current::context()?;
        MODULES.get(module).ok_or(CUresult::CUDA_ERROR_INVALID_HANDLE)?;
        valid(!name.is_null())?;
        Err(CUresult::CUDA_ERROR_NOT_FOUND)
    }

    fn cuModuleLoadFatBinary(module: Out<CUmodule>, image: *const c_void) {
        load(&module, image)
    }

    // Its functions go with it.
    fn cuModuleUnload(module: CUmodule) {
        let context = current::context()?;
        capture::check_safe()?;
        let found = MODULES.get(module).ok_or(CUresult::CUDA_ERROR_INVALID_HANDLE)?;
        if found.context.id != context.id {
            return Err(CUresult::CUDA_ERROR_INVALID_CONTEXT);
        }
        context.pass();
        context.wait_idle_alone();
        MODULES.remove(module);
        FUNCTIONS.remove_where(|function| function.module == module as u64);
        Ok(())
    }

    fn cuModuleGetFunction(function: Out<CUfunction>, module: CUmodule, name: *const c_char) {
        current::context()?;
        let found = MODULES.get(module).ok_or(CUresult::CUDA_ERROR_INVALID_HANDLE)?;
        valid(!function.is_null() && !name.is_null())?;
        // SAFETY: the caller gave a string.
        let name = unsafe { CStr::from_ptr(name) };
        let kernel = kernels::find(name).ok_or(CUresult::CUDA_ERROR_NOT_FOUND)?;
        let handle = handle::fresh();
        let made = KernelFunction { context: found.context.clone(), module: module as u64, kernel };
        FUNCTIONS.insert(handle, Arc::new(made));
        function.put(handle as CUfunction)
    }

    fn cuFuncGetAttribute(value: Out<i32>, attribute: u32, function: CUfunction) {
        current::context()?;
        find(function)?;
        value.put(function_attribute(attribute)?)
    }

    // The two that can be set: shared memory and its share of the cache.
    fn cuFuncSetAttribute(function: CUfunction, attribute: u32, value: i32) {
        current::context()?;
        find(function)?;
        match attribute {
            8 => valid((0..=232_448).contains(&value)),
            9 => valid((-1..=100).contains(&value)),
            _ => Err(CUresult::CUDA_ERROR_INVALID_VALUE),
        }
    }

    fn cuFuncGetModule(module: Out<CUmodule>, function: CUfunction) {
        module.put(find(function)?.module as CUmodule)
    }

    fn cuLaunchKernel(
        function: CUfunction,
        grid_x: u32, grid_y: u32, grid_z: u32,
        block_x: u32, block_y: u32, block_z: u32,
        shared_bytes: u32,
        stream: CUstream,
        arguments: In<*const c_void>,
        extra: *const c_void,
    ) {
        launch(function, [grid_x, grid_y, grid_z], [block_x, block_y, block_z], shared_bytes, stream, &arguments, extra)
    }

    // Without attributes.
    fn cuLaunchKernelEx(config: In<CUlaunchConfig>, function: CUfunction, arguments: In<*const c_void>, extra: *const c_void) {
        let config = config.get()?;
        if config.numAttrs != 0 {
            return Err(CUresult::CUDA_ERROR_NOT_SUPPORTED);
        }
        let grid = [config.gridDimX, config.gridDimY, config.gridDimZ];
        let block = [config.blockDimX, config.blockDimY, config.blockDimZ];
        launch(function, grid, block, config.sharedMemBytes, config.hStream, &arguments, extra)
    }
}
