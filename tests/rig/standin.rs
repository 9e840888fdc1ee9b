//! Faults of the stand-in for the CUDA driver.
#![allow(dead_code)] // Reason: each test uses a part.
#![allow(unsafe_code)] // calls a function of the library that stands for the driver

use std::ffi::{CStr, CString, c_char};
use std::process::Command;

use crate::waived::waived;

type Tell = unsafe extern "C" fn(*const c_char) -> u32;

pub fn is_standin() -> bool {
    std::env::var_os("DOORBELL_CUDA_STANDIN").is_some()
}

/// Makes the devices of the stand-in lack capabilities, which `tools/cuda-standin/src/settings.rs` lists.
pub const LACKS: &str = "DOORBELL_CUDA_STANDIN_LACKS";

/// Runs this test again in a process whose devices lack that. False: this is that process.
pub fn lacking(test: &str, what: &str) -> bool {
    with_setting(test, LACKS, what)
}

/// Runs this test again in a process with that setting of the stand-in. False: this is that process.
pub fn with_setting(test: &str, name: &str, value: &str) -> bool {
    if std::env::var(name).is_ok_and(|set| set == value) {
        return false;
    }
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture"])
        .env(name, value)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&child.stdout);
    let failed = String::from_utf8_lossy(&child.stderr);
    assert!(child.status.success(), "{name}={value}: {said}{failed}");
    true
}

/// How often calls of this thread have waited for work of streams although that was not their purpose. Always 0 with a real driver, which does not say.
pub fn waits_here() -> u64 {
    if is_standin() {
        count_of(c"doorbell_cuda_standin_waits_here")
    } else {
        0
    }
}

/// Calls of the driver that this thread has made. The driver has to be the stand-in.
pub fn calls_here() -> u64 {
    count_of(c"doorbell_cuda_standin_calls_here")
}

/// Calls of the driver that all threads of the process have made. The driver has to be the stand-in.
pub fn calls() -> u64 {
    count_of(c"doorbell_cuda_standin_calls")
}

/// Memory operations that this thread has queued. The driver has to be the stand-in.
pub fn memops_here() -> u64 {
    count_of(c"doorbell_cuda_standin_memops_here")
}

fn count_of(name: &CStr) -> u64 {
    // SAFETY: a function of that type.
    unsafe { std::mem::transmute::<*mut libc::c_void, extern "C" fn() -> u64>(symbol(name))() }
}

/// A symbol of the library that stands for the driver.
fn symbol(name: &CStr) -> *mut libc::c_void {
    // SAFETY: the library is loaded.
    let symbol = unsafe {
        let library = libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW);
        assert!(!library.is_null());
        libc::dlsym(library, name.as_ptr())
    };
    assert!(!symbol.is_null(), "{name:?}");
    symbol
}

/// Makes the stand-in fail by the rules of `tools/cuda-standin/src/fault.rs`, until it is dropped.
pub struct Fault(Tell);

impl Fault {
    /// By rules for all threads. `None`, and the test is WAIVED, with a real driver.
    pub fn new(test: &str, rules: &str) -> Option<Fault> {
        if !is_standin() {
            waived(test, "a real driver does not fail on request");
            return None;
        }
        Some(Fault::with_rules(c"doorbell_cuda_standin_fault", rules))
    }

    /// By rules for calls of this thread. The driver has to be the stand-in.
    pub fn here(rules: &str) -> Fault {
        Fault::with_rules(c"doorbell_cuda_standin_fault_here", rules)
    }

    fn with_rules(function: &CStr, rules: &str) -> Fault {
        // SAFETY: a function of that type.
        let function = unsafe { std::mem::transmute::<*mut libc::c_void, Tell>(symbol(function)) };
        let fault = Fault(function);
        for rule in rules.split(';') {
            let rule = CString::new(rule).unwrap();
            // SAFETY: takes a string.
            assert_eq!(unsafe { function(rule.as_ptr()) }, 0);
        }
        fault
    }
}

impl Drop for Fault {
    fn drop(&mut self) {
        // SAFETY: null takes the rules away.
        unsafe { (self.0)(std::ptr::null()) };
    }
}
