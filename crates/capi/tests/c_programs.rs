//! C programs over the C interface: compiled here, linked with the static library, and run.

mod c_toolchain;
#[path = "../../../tests/waived/mod.rs"]
mod waived;

use std::path::Path;
use std::process::Command;

use c_toolchain::{build, compiler, has, library, root, run, scratch, succeed};

/// Whether the library looks handles up; it is built as this test is.
const DEBUG_LIBRARY: &str = if cfg!(debug_assertions) {
    "-DDEBUG_LIBRARY=1"
} else {
    "-DDEBUG_LIBRARY=0"
};

#[test]
fn c_calls_have_their_documented_effects() {
    let program = build(
        &root().join("crates/capi/tests/c/operations.c"),
        "operations",
        &[],
    );
    assert_eq!(run(&mut Command::new(program)), "done\n");
}

#[test]
fn misuse_returns_errors_and_breaks_nothing() {
    let source = root().join("crates/capi/tests/c/misuse.c");
    let program = build(&source, "misuse", &[DEBUG_LIBRARY]);
    assert_eq!(run(&mut Command::new(program)), "done\n");
}

#[test]
fn rarely_used_c_calls_work() {
    let program = build(
        &root().join("crates/capi/tests/c/details.c"),
        "details",
        &[],
    );
    assert_eq!(run(&mut Command::new(program)), "done\n");
}

#[test]
fn messages_go_by_streams_and_by_the_thread() {
    let source = root().join("crates/capi/tests/c/messages.c");
    let program = build(&source, "messages", &[]);
    assert_eq!(run(&mut Command::new(program)), "done\n");
}

#[test]
fn messages_are_matched_by_peer_and_tag() {
    let source = root().join("crates/capi/tests/c/matchers.c");
    let program = build(&source, "matchers", &[]);
    assert_eq!(run(&mut Command::new(program)), "done\n");
}

#[test]
fn collective_operations_work_between_ranks() {
    let source = root().join("crates/capi/tests/c/collectives.c");
    let program = build(&source, "collectives", &[]);
    assert_eq!(run(&mut Command::new(program)), "done\n");
}

#[test]
fn groups_connect_and_fail_as_a_whole() {
    let program = build(&root().join("crates/capi/tests/c/groups.c"), "groups", &[]);
    let mut command = Command::new(program);
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("DOORBELL_MASTER")) {
        command.env_remove(name);
    }
    assert_eq!(run(&mut command), "done\n");
}

/// A job as a launcher starts it: the environment of each process gives its rank.
#[test]
fn a_group_is_joined_from_the_environment() {
    let program = build(
        &root().join("crates/capi/tests/c/groups.c"),
        "launched",
        &[],
    );
    // This process's own. None that was bound to find out that it is free: a child that another test forks just then would keep it.
    let [_, b, c, d] = std::process::id().to_be_bytes();
    let address = format!("127.{b}.{c}.{d}");
    let device = std::env::var("DOORBELL_TEST_DEVICE").unwrap_or_else(|_| "softcx".into());
    let ranks: Vec<_> = (0..3)
        .map(|rank: u32| {
            let mut command = Command::new(&program);
            command.arg("launched").envs([
                ("DOORBELL_RANK", rank.to_string().as_str()),
                ("DOORBELL_SIZE", "3"),
                ("DOORBELL_MASTER_ADDR", &address),
                ("DOORBELL_MASTER_PORT", "20000"),
                ("DOORBELL_TOKEN", "of the test"),
                ("DOORBELL_DEVICE", &device),
            ]);
            std::thread::spawn(move || run(&mut command))
        })
        .collect();
    for rank in ranks {
        assert_eq!(rank.join().unwrap(), "done\n");
    }
}

#[test]
fn registration_caches_and_bounce_buffers_work() {
    let has_cuda = format!("-DWITH_CUDA={}", u32::from(cfg!(feature = "cuda")));
    let program = build(
        &root().join("crates/capi/tests/c/caches.c"),
        "caches",
        &[&has_cuda],
    );
    assert_eq!(run(&mut Command::new(program)), "done\n");
}

/// Of a verbs device: what a program has opened and registered is used beside it, and registered once. On the software ConnectX of this process: what the calls refuse.
#[test]
fn objects_of_libibverbs_are_adopted() {
    let has_verbs = format!("-DWITH_VERBS={}", u32::from(cfg!(feature = "verbs")));
    let source = root().join("crates/capi/tests/c/adopt.c");
    let program = build(&source, "adopt", &[&has_verbs]);
    assert_eq!(run(&mut Command::new(program)), "done\n");
}

/// UCX and this library use one device, one protection domain and one registration in one process.
#[test]
fn ucx_and_the_library_share_a_registration() {
    let test = "ucx_and_the_library_share_a_registration";
    let device = std::env::var("DOORBELL_TEST_DEVICE").unwrap_or_default();
    if !cfg!(feature = "verbs") || !(device.starts_with("mlx5") || device.starts_with("verbs")) {
        return waived::waived(test, "UCX finds no device in this column");
    }
    let probe = scratch("has_ucx.c");
    std::fs::write(
        &probe,
        "#include <ucp/api/ucp.h>\nint main(void) { return 0; }\n",
    )
    .unwrap();
    let libraries = ["-Wl,--no-as-needed", "-l:libucp.so.0", "-l:libucs.so.0"];
    let mut command = Command::new("cc");
    command.arg(&probe).args(libraries).arg("-o");
    if !command
        .arg(scratch("has_ucx"))
        .output()
        .is_ok_and(|output| output.status.success())
    {
        return waived::waived(
            test,
            "UCX is not installed (Debian: libucx-dev; C_INCLUDE_PATH may name a folder with its headers)",
        );
    }
    let mut flags = vec!["-rdynamic"];
    flags.extend(libraries);
    let source = root().join("crates/capi/tests/beside/beside_ucx.c");
    let mut command = Command::new(build(&source, "beside_ucx", &flags));
    command.env("UCX_TLS", "rc_v,ud_v");
    command.env("UCX_NET_DEVICES", "mlx5_0:1");
    let said = run(&mut command);
    assert!(said.ends_with("0 more by this library\ndone\n"), "{said}");
}

/// The whole program runs only with `DOORBELL_TEST_CM`, the IP address of the device; `scripts/test rxe` sets it.
#[test]
fn rdma_cm_connects_or_reports_the_reason() {
    let has_verbs = format!("-DWITH_VERBS={}", u32::from(cfg!(feature = "verbs")));
    let program = build(
        &root().join("crates/capi/tests/c/cm.c"),
        "cm",
        &[&has_verbs],
    );
    let mut command = Command::new(program);
    match std::env::var("DOORBELL_TEST_CM") {
        Ok(address) => drop(command.arg(address)),
        Err(_) => waived::waived(
            "rdma_cm_connects_or_reports_the_reason, connections",
            "no DOORBELL_TEST_CM, the IP address of a device that rdma_cm knows",
        ),
    }
    assert_eq!(run(&mut command), "done\n");
}

/// On streams and memory of a GPU, or of the stand-in for its driver. Without the feature `cuda` all calls must return the error for that.
#[test]
fn cuda_calls_work_or_report_the_missing_feature() {
    let test = "cuda_calls_work_or_report_the_missing_feature";
    let source = root().join("crates/capi/tests/c/cuda.c");
    let has_cuda = format!("-DWITH_CUDA={}", u32::from(cfg!(feature = "cuda")));
    let program = build(&source, "cuda", &[&has_cuda]);
    let output = run(&mut Command::new(&program));
    if let Some(reason) = output.strip_prefix("no driver: ") {
        assert!(
            std::env::var_os("DOORBELL_CUDA_STANDIN").is_none(),
            "{reason}"
        );
        return waived::waived(test, reason.trim_end());
    }
    assert_eq!(output, "done\n");
    // Over the stand-in once more, with other device addresses for host memory. The part that uses them needs the software NIC.
    let device = std::env::var("DOORBELL_TEST_DEVICE").unwrap_or_else(|_| "softcx".into());
    if device.starts_with("softcx") {
        let output = run(Command::new(&program).env("DOORBELL_CUDA_STANDIN_LACKS", "samepointer"));
        assert_eq!(output, "done\n");
    }
}

/// Triggers that kernels of the application execute. The kernel is a function of the stand-in for the driver.
#[test]
fn kernels_execute_triggers_of_a_c_program() {
    let test = "kernels_execute_triggers_of_a_c_program";
    let source = root().join("crates/capi/tests/c/kernels.c");
    let has_cuda = format!("-DWITH_CUDA={}", u32::from(cfg!(feature = "cuda")));
    let has_standin = std::env::var_os("DOORBELL_CUDA_STANDIN").is_some();
    let has_kernel = format!("-DWITH_KERNEL={}", u32::from(has_standin));
    let program = build(&source, "kernels", &[&has_cuda, &has_kernel]);
    let output = run(&mut Command::new(program));
    if let Some(reason) = output.strip_prefix("no driver: ") {
        assert!(!has_standin, "{reason}");
        return waived::waived(test, reason.trim_end());
    }
    if let Some(reason) = output.strip_prefix("no kernel: ") {
        return waived::waived(test, reason.trim_end());
    }
    assert_eq!(output, "done\n");
}

#[test]
fn the_first_program_of_the_readme_runs() {
    let program = build(&root().join("examples/first.c"), "first", &[]);
    let output = run(&mut Command::new(program));
    assert!(
        output.starts_with("64 bytes arrived; control path: direct"),
        "{output}"
    );
}

#[test]
fn the_example_waits_by_epoll() {
    let program = build(&root().join("examples/epoll.c"), "epoll", &["-O2"]);
    let device = std::env::var("DOORBELL_TEST_DEVICE").unwrap_or_else(|_| "softcx".into());
    let output = run(Command::new(program).arg(device));
    assert_eq!(output, "8 transfers of 4096 bytes arrived\n");
}

#[test]
fn the_example_runs_both_loops_and_checks_every_byte() {
    let program = build(&root().join("examples/loop.c"), "loop", &["-O2"]);
    let device = std::env::var("DOORBELL_TEST_DEVICE").unwrap_or_else(|_| "softcx".into());
    for (arguments, bytes) in [
        (&["64", "200", "10", &device][..], 2 * 64 * 200),
        // Longer than a packet, no kernel time, and a last batch that is not full.
        (&["10000", "31", "0", &device], 2 * 10_000 * 31),
        (&["1", "1"], 2),
    ] {
        let output = run(Command::new(&program).args(arguments));
        let on = arguments.get(3).unwrap_or(&"softcx");
        // With plain verbs streams cannot ring.
        let control = if on.starts_with("verbs:") || on.contains("path=proxy") {
            "proxy"
        } else {
            "direct"
        };
        assert!(
            output.contains(&format!(", {on}, host stream, {control} (")),
            "{output}"
        );
        let last = format!("all {bytes} bytes arrived as they were sent");
        assert_eq!(output.lines().last(), Some(last.as_str()), "{output}");
        for name in ["sync ", "async "] {
            let row = output.lines().find(|line| line.starts_with(name));
            let row: Vec<&str> = row.unwrap_or("").split_whitespace().collect();
            assert_eq!(row.get(1), Some(&arguments[1]), "{output}");
            assert_eq!(row.get(4), Some(&"0"), "{output}");
        }
    }
    for wrong in [&["0"][..], &["x"], &["64", "-1"]] {
        let status = Command::new(&program).args(wrong).output().unwrap().status;
        assert_eq!(status.code(), Some(2), "{wrong:?}");
    }
}

/// A C++ program that is linked with the shared library by its name.
#[test]
fn a_program_in_cpp_links_with_the_shared_library() {
    let test = "a_program_in_cpp_links_with_the_shared_library";
    if !has("g++") {
        return waived::waived(test, "g++ is not installed");
    }
    let source = scratch("shared.cpp");
    std::fs::write(
        &source,
        "#include <doorbell.h>\n#include <cstdio>\n#include <cstdlib>\nint main() {\n\
         doorbell_device *device = nullptr;\n\
         const char *name = std::getenv(\"DOORBELL_TEST_DEVICE\");\n\
         if (doorbell_device_open(name ? name : \"softcx\", &device) < 0) return 1;\n\
         doorbell_work work = doorbell_work_send_inline(\"x\", 1);\n\
         if (doorbell_post_send(nullptr, &work, nullptr) != DOORBELL_EINVAL) return 2;\n\
         std::puts(doorbell_last_error());\n\
         return doorbell_device_close(device);\n}\n",
    )
    .unwrap();
    let shared = library("so");
    let folder = shared.parent().unwrap();
    let program = scratch("shared");
    let mut command = compiler("g++", "c++17");
    command.arg(&source).arg("-L").arg(folder);
    command.arg("-ldoorbell");
    command.arg(format!("-Wl,-rpath,{}", folder.display()));
    // Both libraries are in that folder, and -l prefers the shared one.
    succeed(command.arg("-o").arg(&program));
    // Cargo's own value of the variable has folders with older copies in them, and comes before the program's.
    let search = |name: &Path| {
        let mut command = Command::new(name);
        command.env("LD_LIBRARY_PATH", folder);
        command
    };
    let linked = succeed(search(Path::new("ldd")).arg(&program));
    assert!(linked.contains("deps/libdoorbell.so"), "{linked}");
    let output = run(&mut search(&program));
    assert_eq!(output, "`endpoint`: it is a null pointer\n");
}
