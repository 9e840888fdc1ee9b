//! `scripts/cuda-standin`: what it prints makes programs find the stand-in where they look for the driver.

mod rig;

use std::path::Path;
use std::process::Command;

use rig::*;

#[test]
fn programs_load_it_by_the_driver_names() {
    let test = "programs_load_it_by_the_driver_names";
    if std::env::var_os("DOORBELL_STANDIN_CHILD").is_some() {
        for name in ["libcuda.so", "libcuda.so.1"] {
            // SAFETY: the stand-in does nothing when it is loaded.
            let library = unsafe { libloading::Library::new(name) }.unwrap();
            // SAFETY: it is only looked for.
            let found = unsafe { library.get::<*const *const i8>(b"doorbell_cuda_standin") };
            assert!(found.is_ok(), "{name} is another library");
        }
        // SAFETY: loads the same library.
        assert!(unsafe { cu::is_culib_present() });
        good!(cuInit(0));
        return;
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let program = std::env::current_exe().unwrap();
    // target/debug/deps/program.
    let target = program.ancestors().nth(3).unwrap();
    let output = Command::new(root.join("scripts/cuda-standin"))
        .env("CARGO_TARGET_DIR", target)
        .env_remove("LD_LIBRARY_PATH")
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    let lines = String::from_utf8(output.stdout).unwrap();
    let folder = target.join("cuda-standin");
    assert_eq!(
        lines,
        format!(
            "export LD_LIBRARY_PATH={}\nexport DOORBELL_CUDA_STANDIN=1\n",
            folder.display()
        )
    );
    let output = Command::new(&program)
        .args(["--exact", test, "--nocapture"])
        .env("DOORBELL_STANDIN_CHILD", "1")
        .env("LD_LIBRARY_PATH", folder)
        .env("DOORBELL_CUDA_STANDIN", "1")
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stdout).contains("1 passed"));
}
