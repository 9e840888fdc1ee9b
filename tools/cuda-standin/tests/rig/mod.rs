//! What the tests of the stand-in have in common: the library that was built is loaded, and called through cudarc's bindings.
#![allow(dead_code, unused_imports)]

use std::ffi::c_void;
use std::path::PathBuf;
use std::process::{Command, Output};
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

pub use cudarc::driver::sys as cu;
pub use cudarc::driver::sys::CUresult::{self, *};

/// The library that cargo built for this test.
pub fn library() -> PathBuf {
    let program = std::env::current_exe().unwrap();
    program.with_file_name("libdoorbell_cuda_standin.so")
}

/// Loads it under the name that cudarc's bindings look for: what has that SONAME already is what they find.
pub fn load() {
    static LOADED: Once = Once::new();
    LOADED.call_once(|| {
        // SAFETY: before any call of the driver, and no test changes the environment at another time.
        unsafe {
            if std::env::var_os("DOORBELL_CUDA_STANDIN").is_none() {
                std::env::set_var("DOORBELL_CUDA_STANDIN", "1");
            }
            std::mem::forget(libloading::Library::new(library()).unwrap());
            let found = cu::culib().get::<*const *const i8>(b"doorbell_cuda_standin");
            assert!(found.is_ok(), "another libcuda.so was found");
        }
    });
}

/// Calls the driver: `call!(cuStreamQuery(stream))` is its result.
#[macro_export]
macro_rules! call {
    ($function:ident($($argument:expr),* $(,)?)) => {
        // SAFETY: pointers are to variables of the test; the rest is for the stand-in to check.
        unsafe { $crate::rig::cu::$function($($argument),*) }
    };
}

/// Calls that must succeed.
#[macro_export]
macro_rules! good {
    ($($function:ident($($argument:expr),* $(,)?));+ $(;)?) => {
        $(assert_eq!($crate::call!($function($($argument),*)), $crate::rig::CUDA_SUCCESS, stringify!($function));)+
    };
}

/// Ends the process if a test takes too long: a hang is a finding.
pub struct Limit(Arc<AtomicBool>);

impl Limit {
    pub fn new(seconds: u64) -> Limit {
        let over = Arc::new(AtomicBool::new(false));
        let seen = over.clone();
        let end = Instant::now() + Duration::from_secs(seconds);
        std::thread::spawn(move || {
            while !seen.load(Ordering::Relaxed) {
                if Instant::now() > end {
                    eprintln!("a test took longer than {seconds} s");
                    std::process::abort();
                }
                std::thread::sleep(Duration::from_millis(20));
            }
        });
        Limit(over)
    }
}

impl Drop for Limit {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// A context of this test alone, current to its thread.
pub struct Gpu {
    pub context: cu::CUcontext,
    _limit: Limit,
}

impl Gpu {
    pub fn new() -> Gpu {
        load();
        let limit = Limit::new(240);
        good!(cuInit(0));
        let mut context = null_mut();
        good!(cuCtxCreate_v2(&mut context, 0, 0));
        Gpu {
            context,
            _limit: limit,
        }
    }

    pub fn stream(&self) -> cu::CUstream {
        self.stream_with(1)
    }

    pub fn stream_with(&self, flags: u32) -> cu::CUstream {
        let mut stream = null_mut();
        good!(cuStreamCreate(&mut stream, flags));
        stream
    }

    pub fn event(&self, flags: u32) -> cu::CUevent {
        let mut event = null_mut();
        good!(cuEventCreate(&mut event, flags));
        event
    }

    pub fn alloc(&self, len: usize) -> cu::CUdeviceptr {
        let mut pointer = 0;
        good!(cuMemAlloc_v2(&mut pointer, len));
        pointer
    }

    /// Words that both sides reach.
    pub fn words(&self) -> Words {
        let mut pointer: *mut c_void = null_mut();
        good!(cuMemAllocHost_v2(&mut pointer, 4096));
        Words(pointer as usize)
    }

    pub fn function(&self, name: &std::ffi::CStr) -> cu::CUfunction {
        let mut module = null_mut();
        let mut function = null_mut();
        good!(cuModuleLoadData(&mut module, c"any image".as_ptr().cast()));
        good!(cuModuleGetFunction(&mut function, module, name.as_ptr()));
        function
    }

    /// Queues a wait that lasts until `words` at `index` is 1.
    pub fn block(&self, stream: cu::CUstream, words: Words, index: usize) {
        good!(cuStreamWaitValue32_v2(stream, words.at(index), 1, 0));
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        // Fails where the test destroyed it.
        let _ = call!(cuCtxDestroy_v2(self.context));
    }
}

/// Host memory of 4096 bytes, page-locked.
#[derive(Clone, Copy)]
pub struct Words(pub usize);

impl Words {
    /// The device's address of a 32-bit word.
    pub fn at(&self, index: usize) -> cu::CUdeviceptr {
        (self.0 + 4 * index) as cu::CUdeviceptr
    }

    pub fn word(&self, index: usize) -> &'static AtomicU32 {
        // SAFETY: as long as the driver leaves it mapped, which the test does not outlive.
        unsafe { &*((self.0 + 4 * index) as *const AtomicU32) }
    }

    pub fn long(&self, index: usize) -> &'static AtomicU64 {
        // SAFETY: as above.
        unsafe { &*((self.0 + 4 * index) as *const AtomicU64) }
    }

    pub fn get(&self, index: usize) -> u32 {
        self.word(index).load(Ordering::Acquire)
    }

    pub fn set(&self, index: usize, value: u32) {
        self.word(index).store(value, Ordering::Release);
    }
}

/// Waits until it holds; false if it never does.
pub fn eventually(mut holds: impl FnMut() -> bool) -> bool {
    let end = Instant::now() + Duration::from_secs(20);
    while !holds() {
        if Instant::now() > end {
            return false;
        }
        std::thread::sleep(Duration::from_micros(200));
    }
    true
}

/// Long enough for a thread that is free to run to have run.
pub fn a_while() {
    std::thread::sleep(Duration::from_millis(30));
}

/// The test of this name in a process of its own, with these settings of the stand-in. There it runs to its end; here `None` comes
/// back in it.
pub fn in_child(test: &str, settings: &[(&str, &str)]) -> Option<Output> {
    if std::env::var_os("DOORBELL_STANDIN_CHILD").is_some() {
        return None;
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--nocapture"]);
    command.env("DOORBELL_STANDIN_CHILD", "1");
    for (name, value) in settings {
        command.env(format!("DOORBELL_CUDA_STANDIN{name}"), value);
    }
    Some(command.output().unwrap())
}

/// As `in_child`, where the child must pass. True in the child.
pub fn is_child(test: &str, settings: &[(&str, &str)]) -> bool {
    let Some(output) = in_child(test, settings) else {
        return true;
    };
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && text.contains("1 passed"),
        "{text}{}",
        String::from_utf8_lossy(&output.stderr)
    );
    false
}

/// Pages of a file by that name, and a page of ordinary memory behind them.
pub fn mapped_file(name: &std::ffi::CStr, len: usize) -> *mut std::ffi::c_void {
    // SAFETY: new mappings, the second one over the first of its pages; they stay until the process ends.
    unsafe {
        let file = libc::memfd_create(name.as_ptr(), 0);
        assert!(file >= 0 && libc::ftruncate(file, len as libc::off_t) == 0);
        let (access, none) = (libc::PROT_READ | libc::PROT_WRITE, std::ptr::null_mut());
        let hidden = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let at = libc::mmap(none, len + 4096, access, hidden, -1, 0);
        assert_ne!(at, libc::MAP_FAILED);
        let shared = libc::MAP_SHARED | libc::MAP_FIXED;
        assert_eq!(libc::mmap(at, len, access, shared, file, 0), at);
        at
    }
}
