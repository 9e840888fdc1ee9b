//! libgdsync over the C library (`crates/capi/gdsync`, `include/gdsync.h`), used by programs in the style of its own, in C and in C++.
//!
//! Their streams are host streams, or with `DOORBELL_TEST_STREAM=cuda` those of a GPU; `scripts/test cuda` runs them over the stand-in for
//! the driver.

mod c_toolchain;
#[path = "../../../tests/waived/mod.rs"]
mod waived;

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::sync::OnceLock;

use c_toolchain::{NATIVE_LIBS, compiler, has, library, root, run, scratch, succeed};

/// libgdsync is an interface of libibverbs' types.
fn has_libibverbs(test: &str) -> bool {
    let path = scratch(&format!("has_libibverbs_{test}.c"));
    fs::write(&path, "#include <infiniband/verbs.h>\n").unwrap();
    let status = Command::new("cc").arg("-fsyntax-only").arg(path).status();
    let has = status.is_ok_and(|status| status.success());
    if !has {
        waived::waived(test, "libibverbs' headers are not installed");
    }
    has
}

/// Whether libibverbs opens the device, too: then the program passes contexts of libibverbs.
fn is_of_libibverbs() -> bool {
    let device = std::env::var("DOORBELL_TEST_DEVICE");
    cfg!(feature = "verbs")
        && device.is_ok_and(|name| name.starts_with("mlx5_") && !name.contains(','))
}

/// Whether host memory can have other addresses on the device: over the stand-in for the driver, and with the software NIC of the process.
fn is_standin_for_softcx() -> bool {
    let device = std::env::var("DOORBELL_TEST_DEVICE").unwrap_or_else(|_| "softcx".into());
    std::env::var_os("DOORBELL_CUDA_STANDIN").is_some() && device.starts_with("softcx")
}

/// The program is linked with libibverbs, and makes calls of it.
const WITH_LIBIBVERBS: &str = "-DGDSYNC_WITH_LIBIBVERBS";

/// The program is linked to fixed addresses, which are low.
const FIXED_ADDRESSES: &str = "-fno-pie";

/// Flags that the library is compiled with, beside those of the build.
fn library_compiler() -> Command {
    let mut command = compiler("cc", "gnu11");
    command.args(["-fPIC", "-O1"]);
    command
}

/// The sources of libgdsync.
fn library_sources() -> Vec<PathBuf> {
    let mut sources: Vec<PathBuf> = fs::read_dir(root().join("crates/capi/gdsync"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "c"))
        .collect();
    sources.sort();
    assert!(sources.len() > 4, "only {sources:?} were found");
    sources
}

/// The objects of libgdsync, compiled once.
fn library_objects() -> Vec<PathBuf> {
    static OBJECTS: OnceLock<Vec<PathBuf>> = OnceLock::new();
    let compile = || {
        let objects = library_sources().into_iter().map(|source| {
            let name = source.file_stem().unwrap().to_string_lossy().into_owned();
            let object = scratch(&format!("libgdsync_{name}_{}.o", std::process::id()));
            succeed(
                library_compiler()
                    .arg("-c")
                    .arg(source)
                    .arg("-o")
                    .arg(&object),
            );
            object
        });
        objects.collect()
    };
    OBJECTS.get_or_init(compile).clone()
}

fn source(name: &str) -> PathBuf {
    root().join("crates/capi/tests/c/gdsync").join(name)
}

/// Compiles a program of two sources: the first in that language, the other one in C.
fn build(name: &str, language: &str, verbs: &str, flags: &[&str]) -> PathBuf {
    let stem = format!("gdsync_{name}_{language}_{verbs}");
    let mut objects = library_objects();
    let mut files = vec![(format!("{name}.c"), language), ("elsewhere.c".into(), "c")];
    if flags.contains(&WITH_LIBIBVERBS) {
        files.push(("foreign.c".into(), "c"));
    }
    for (file, in_language) in files {
        let object = scratch(&format!("{stem}_{file}.o"));
        let mut command = match in_language {
            "c" => compiler("cc", "c11"),
            _ => compiler("g++", "c++17"),
        };
        command.args(flags);
        if in_language != "c" {
            // The program passes values that the enum does not have on purpose, which UndefinedBehaviorSanitizer reports in C++.
            command.args(["-x", "c++", "-fno-sanitize=enum"]);
        }
        command.arg("-c").arg(source(&file)).arg("-o").arg(&object);
        succeed(&mut command);
        objects.push(object);
    }
    let program = scratch(&stem);
    let mut link = Command::new(if language == "c" { "cc" } else { "g++" });
    if let Ok(flags) = std::env::var("CFLAGS") {
        link.args(flags.split_whitespace());
    }
    if flags.contains(&FIXED_ADDRESSES) {
        link.arg("-no-pie");
    }
    if name == "modify" {
        // The library finds the program's `ibv_reg_mr`, which is before libibverbs' own.
        link.arg("-Wl,--export-dynamic");
    }
    if name == "completions" {
        link.arg("-Wl,--wrap=doorbell_poll_cq");
    }
    link.args(&objects).arg(library("a")).args(NATIVE_LIBS);
    succeed(link.arg("-o").arg(&program));
    program
}

/// Builds the forms of a program one after the other. Each runs while the next one is built, because one of them waits for seconds.
fn builds_and_runs(test: &str, name: &str) {
    if !has_libibverbs(test) {
        return;
    }
    std::thread::scope(|scope| {
        for language in ["c", "c++"] {
            if language == "c++" && !has("g++") {
                waived::waived(test, "g++ is not installed");
                continue;
            }
            let with_libibverbs: &[(&str, &[&str])] = &[("libibverbs", &["-DGDSYNC_LIBIBVERBS"])];
            let contexts = if is_of_libibverbs() && name == "transfers" {
                with_libibverbs
            } else {
                &[]
            };
            let plain: &[(&str, &[&str])] = &[("", &[])];
            for (verbs, flags) in plain.iter().chain(contexts) {
                let mut flags = flags.to_vec();
                flags.extend(
                    (cfg!(feature = "verbs") && verbs.is_empty() && name == "errors")
                        .then_some(WITH_LIBIBVERBS),
                );
                let program = build(name, language, verbs, &flags);
                scope.spawn(move || {
                    let output = run(&mut Command::new(&program));
                    assert_eq!(output, "done\n", "{language} {verbs}");
                    if name == "transfers" && is_standin_for_softcx() {
                        let output =
                            run(Command::new(program)
                                .env("DOORBELL_CUDA_STANDIN_LACKS", "samepointer"));
                        assert_eq!(output, "done\n", "{language} {verbs}: other addresses");
                    }
                });
            }
        }
    });
}

#[test]
fn programs_of_libgdsync_transfer() {
    builds_and_runs("programs_of_libgdsync_transfer", "transfers");
}

#[test]
fn completions_are_of_their_own_work_request() {
    builds_and_runs("completions_are_of_their_own_work_request", "completions");
}

#[test]
fn errors_are_errnos_or_error_completions() {
    builds_and_runs("errors_are_errnos_or_error_completions", "errors");
}

#[test]
fn memory_is_registered_on_first_use() {
    builds_and_runs("memory_is_registered_on_first_use", "on_use");
}

#[test]
fn programs_of_version_3_transfer() {
    builds_and_runs("programs_of_version_3_transfer", "version3");
}

/// A protection domain, memory and a connection as a program of libibverbs makes them.
#[test]
fn programs_of_libibverbs_connect_and_register_themselves() {
    let test = "programs_of_libibverbs_connect_and_register_themselves";
    if !is_of_libibverbs() {
        return waived::waived(test, "the device is not one of libibverbs");
    }
    let program = build("modify", "c", "", &[FIXED_ADDRESSES]);
    // On every path that the device has, and by plain verbs.
    for settings in ["", "path=proxy", "verbs"] {
        let output = run(Command::new(&program).env("GDS_DEVICE_SETTINGS", settings));
        assert_eq!(output, "done\n", "{settings}");
    }
}

/// Operations that kernels execute. The kernel is a function of the stand-in for the driver; with a real driver only refused calls are tested.
#[test]
fn kernels_ring_prepared_operations() {
    let test = "kernels_ring_prepared_operations";
    if std::env::var_os("DOORBELL_CUDA_STANDIN").is_none() {
        waived::waived(test, "the kernel that executes a trigger is the stand-in's");
    }
    builds_and_runs(test, "kernels");
}

/// The text of libgdsync's headers.
fn headers() -> String {
    let mut paths: Vec<_> = fs::read_dir(root().join("include/gdsync"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    paths.push(root().join("include/gdsync.h"));
    paths.sort();
    paths
        .iter()
        .map(|path| fs::read_to_string(path).unwrap())
        .collect()
}

/// The functions named `gds_` that the headers declare.
fn declared() -> BTreeSet<String> {
    headers()
        .lines()
        .filter(|line| line.starts_with(|first: char| first.is_ascii_lowercase()))
        .filter(|line| !line.starts_with("typedef") && !line.starts_with("static"))
        .filter_map(|line| {
            let before = line.split_once('(')?.0;
            let name = before.rsplit([' ', '*']).next()?;
            name.starts_with("gds_").then(|| name.to_owned())
        })
        .collect()
}

/// What a shared library of the sources exports. `scripts/test-install` looks at the one that is installed.
fn exported() -> BTreeSet<String> {
    let library = scratch("libgdsync.so");
    let mut link = library_compiler();
    link.args(library_objects())
        .args(["-shared", "-o"])
        .arg(&library);
    succeed(&mut link);
    succeed(
        Command::new("nm")
            .args(["-D", "--defined-only", "--format=posix"])
            .arg(&library),
    )
    .lines()
    .filter_map(|line| line.split(' ').next())
    .filter(|name| name.starts_with("gds_"))
    .map(str::to_owned)
    .collect()
}

#[test]
fn every_function_is_called_by_a_program() {
    let functions = declared();
    assert!(functions.len() > 40, "only {} were read", functions.len());
    // By the names of libibverbs.
    let names = |name: &String| {
        [
            format!("{name}("),
            format!("{}(", name.replace("gds_ibv_", "ibv_")),
        ]
    };
    let programs: String = [
        "transfers.c",
        "errors.c",
        "rig.h",
        "elsewhere.c",
        "kernels.c",
        "on_use.c",
        "version3.c",
        "modify.c",
        "completions.c",
    ]
    .iter()
    .filter_map(|name| fs::read_to_string(source(name)).ok())
    .collect();
    let uncalled: Vec<&String> = functions
        .iter()
        .filter(|name| !names(name).iter().any(|name| programs.contains(name)))
        .collect();
    assert!(uncalled.is_empty(), "{uncalled:?}");
}

/// The calls of libgdsync's headers of version 2.2, `core.h`, `tools.h` and `mlx5.h`, those of its inside that its programs name, and the
/// calls that versions 3.0 and later have in addition. `scripts/gdsync-programs` reads the headers themselves.
const LIBGDSYNC: &[&str] = &[
    "gds_query_param",
    "gds_create_qp",
    "gds_destroy_qp",
    "gds_post_send",
    "gds_post_recv",
    "gds_stream_wait_cq",
    "gds_stream_queue_send",
    "gds_prepare_send",
    "gds_stream_post_send",
    "gds_stream_post_send_all",
    "gds_prepare_wait_cq",
    "gds_append_wait_cq",
    "gds_abort_wait_cq",
    "gds_stream_post_wait_cq",
    "gds_stream_post_wait_cq_all",
    "gds_post_wait_cq",
    "gds_prepare_wait_value32",
    "gds_prepare_write_value32",
    "gds_prepare_write_memory",
    "gds_stream_post_descriptors",
    "gds_post_descriptors",
    "gds_post_pokes",
    "gds_post_pokes_on_cpu",
    "gds_stream_post_wait_cq_multi",
    "gds_register_mem",
    "gds_unregister_mem",
    "gds_alloc_mapped_memory",
    "gds_free_mapped_memory",
    "gds_stream_post_poll_dword",
    "gds_stream_post_poke_dword",
    "gds_stream_post_inline_copy",
    "gds_stream_post_polls_and_pokes",
    "gds_stream_post_polls_and_immediate_copies",
    "gds_mlx5_get_send_info",
    "gds_mlx5_get_wait_info",
    "gds_mlx5_get_dword_wait_info",
    "gds_poll_cq",
    "gds_destroy_cq",
    "gds_modify_qp",
];

/// Of a version 3.0 program, where a struct or a result differs from 2.2.
const LIBGDSYNC_3: &[&str] = &["gds_create_qp_v3", "gds_query_param_v3", "gds_qp_of_v3"];

#[test]
fn the_library_exports_what_the_headers_declare_and_no_name_of_libgdsync_is_missing() {
    let test = "the_library_exports_what_the_headers_declare_and_no_name_of_libgdsync_is_missing";
    if !has_libibverbs(test) {
        return;
    }
    if !has("nm") {
        return waived::waived(test, "nm is not installed");
    }
    let mut expected = declared();
    expected.extend(LIBGDSYNC_3.iter().map(|&name| name.to_owned()));
    let exported = exported();
    assert_eq!(exported, expected);
    for name in LIBGDSYNC {
        assert!(exported.contains(*name), "{name}");
    }
}

/// Other orders and forms of inclusion than the programs above have: as libgdsync's programs name the headers, and each alone.
#[test]
fn gdsync_headers_compile_in_every_include_order() {
    let test = "gdsync_headers_compile_in_every_include_order";
    if !has_libibverbs(test) {
        return;
    }
    let forms = [
        (
            "libgdsync",
            "#include <gdsync.h>\n#include <gdsync/tools.h>\n#include <gdsync/mlx5.h>\n",
        ),
        ("tools_first", "#include <gdsync/tools.h>\n"),
        ("mlx5_first", "#include <gdsync/mlx5.h>\n"),
        (
            "twice",
            "#include <doorbell/gdsync.h>\n#include <gdsync.h>\n#include <doorbell.h>\n",
        ),
        (
            "ofed",
            "#include <infiniband/verbs_exp.h>\n#include <infiniband/peer_ops.h>\n#include <gdsync.h>\n",
        ),
        ("version_3", "#define GDSYNC_API 3\n#include <gdsync.h>\n"),
    ];
    for (name, standard, extension) in [
        ("cc", "c11", "c"),
        ("g++", "c++17", "cpp"),
        ("clang", "c11", "c"),
    ] {
        if !has(name) {
            waived::waived(test, &format!("{name} is not installed"));
            continue;
        }
        for (form, text) in forms {
            let path = scratch(&format!("gdsync_{form}.{extension}"));
            fs::write(&path, format!("{text}int main(void) {{ int value; return gds_query_param(GDS_PARAM_VERSION, &value); }}\n"))
                .unwrap();
            let mut command = compiler(name, standard);
            command.args(["-Wshadow", "-fsyntax-only"]);
            succeed(command.arg(&path));
        }
    }
}

/// What docs/c.md lists as left out does not compile, and the compiler says which name it was.
#[test]
fn what_is_left_out_is_refused_by_name_when_it_is_compiled() {
    let test = "what_is_left_out_is_refused_by_name";
    if !has("cc") || !has_libibverbs(test) {
        return;
    }
    let uses = [
        ("gds_create_cq", "gds_create_cq(0, 0, 0, 0, 0, 0, 0)"),
        ("res_domain", "((gds_qp_init_attr_t *)0)->res_domain"),
        ("ibv_exp_peer_commit", "sizeof(struct ibv_exp_peer_commit)"),
        ("ibv_exp_peer_peek", "sizeof(struct ibv_exp_peer_peek)"),
        ("peer_op_wr", "((gds_send_request_t *)0)->peer_op_wr"),
        ("mh", "((gds_mem_desc_t *)0)->mh"),
        ("", "sizeof(gds_send_request_t) + sizeof(gds_mem_desc_t)"),
    ];
    for (number, (name, used)) in uses.into_iter().enumerate() {
        let path = scratch(&format!("gdsync_left_out_{number}.c"));
        let text = format!("#include <gdsync.h>\nint main(void) {{ (void)({used}); return 0; }}\n");
        fs::write(&path, text).unwrap();
        let mut command = compiler("cc", "c11");
        let output = command.args(["-fsyntax-only"]).arg(&path).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.success(), name.is_empty(), "{used}: {said}");
        assert!(said.contains(name), "{used}: {said}");
    }
}

/// Kernels' waits on a processor, with a clock that steps back.
#[test]
fn waits_of_kernels_end_with_the_word_or_with_their_time() {
    let test = "waits_of_kernels_end_with_the_word_or_with_their_time";
    if !has("g++") {
        return waived::waived(test, "g++ is not installed");
    }
    if !has_libibverbs(test) {
        return;
    }
    let program = scratch("gdsync_device_waits");
    let mut command = compiler("g++", "c++17");
    command.args(["-O1", "-o"]).arg(&program);
    succeed(command.arg(source("device_waits.cpp")));
    assert_eq!(run(&mut Command::new(program)), "done\n");
}

/// With CUDA's own header, and infos that a kernel executes.
#[test]
fn gdsync_h_compiles_in_cuda_programs() {
    let nvcc = std::env::var("DOORBELL_NVCC").unwrap_or_else(|_| "nvcc".into());
    if !has(&nvcc) {
        return waived::waived(
            "gdsync_h_compiles_in_cuda_programs",
            "nvcc is not installed",
        );
    }
    if !has_libibverbs("gdsync_h_compiles_in_cuda_programs") {
        return;
    }
    let path = scratch("gdsync.cu");
    let text = "#include <cuda.h>\n#include <gdsync.h>\n#include <gdsync/device.cuh>\n#include <doorbell/device.cuh>\n\
        __global__ void wait(gdsync::isem32_t word, gdsync::isem64_t db, gdsync::sem32_t own, int *status)\n\
        { using namespace gdsync::device;\n\
          *status = wait(word, GDS_WAIT_COND_EQ) + wait_geq(word) + wait_nor(own) + wait_and(own); release(word); release(db); }\n\
        __global__ void ring(const __grid_constant__ gds_mlx5_send_info_t info, int *status)\n\
        { *status = doorbell_device_trigger(&info.trigger, 1000); }\n\
        int send(CUstream stream, gds_send_request_t *request, CUdeviceptr *address)\n\
        { *address = 0; return gds_stream_post_send(stream, request); }\n";
    fs::write(&path, text).unwrap();
    let mut command = Command::new(&nvcc);
    command.args([
        "-std=c++17",
        "-arch=sm_75",
        "-Werror",
        "all-warnings",
        "-Xcompiler",
        "-Wall,-Wextra",
    ]);
    command.arg("-I").arg(root().join("include"));
    succeed(
        command
            .arg("-c")
            .arg(&path)
            .arg("-o")
            .arg(scratch("gdsync_cu.o")),
    );
}
