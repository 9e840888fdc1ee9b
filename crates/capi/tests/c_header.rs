//! `include/doorbell.h` and its parts against the compilers, against what the Rust side defines, and against what the library exports.

mod c_toolchain;
#[path = "../../../tests/waived/mod.rs"]
mod waived;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use c_toolchain::{build, compiler, has, library, root, run, scratch, succeed};

/// Every C header of the library; each must compile alone. Those of `gdsync/` are parts of `gdsync.h` and refuse that.
fn headers() -> Vec<String> {
    let mut headers = vec!["doorbell.h".to_owned()];
    for folder in ["doorbell", "doorbell/detail"] {
        for entry in fs::read_dir(root().join("include").join(folder)).unwrap() {
            let name = entry.unwrap().file_name().into_string().unwrap();
            if name.ends_with(".h") {
                headers.push(format!("{folder}/{name}"));
            }
        }
    }
    assert!(headers.len() > 15, "only {headers:?} were found");
    headers
}

/// The headers that doorbell.h includes: together they are the C interface.
fn parts() -> Vec<String> {
    let umbrella = fs::read_to_string(root().join("include/doorbell.h")).unwrap();
    let parts: Vec<String> = umbrella
        .lines()
        .filter_map(|line| line.strip_prefix("#include \"")?.strip_suffix('"'))
        .map(str::to_owned)
        .collect();
    assert!(parts.len() > 6, "only {parts:?} were found");
    parts
}

/// The text of the C interface.
fn interface_text() -> String {
    parts()
        .iter()
        .map(|part| fs::read_to_string(root().join("include").join(part)).unwrap())
        .collect()
}

#[test]
fn doorbell_h_compiles_as_c11_and_cpp17_and_twice() {
    let test = "doorbell_h_compiles_as_c11_and_cpp17_and_twice";
    let c = ["-Wstrict-prototypes", "-Wc++-compat", "-Wshadow"];
    let cpp = ["-Woverloaded-virtual", "-Wextra-semi"];
    for (name, standard, extension, more) in [
        ("cc", "c11", "c", &c[..]),
        ("gcc", "c17", "c", &c),
        ("gcc", "c2x", "c", &c),
        ("clang", "c11", "c", &c),
        ("g++", "c++17", "cpp", &cpp),
        ("g++", "c++20", "cpp", &cpp),
        ("clang++", "c++17", "cpp", &cpp),
        ("clang++", "c++20", "cpp", &cpp),
    ] {
        if !has(name) {
            waived::waived(test, &format!("{name} is not installed"));
            continue;
        }
        let mut command = compiler(name, standard);
        command.args(["-Wconversion", "-Wundef", "-fsyntax-only"]);
        command.args(more);
        succeed(command.args(included_twice(&format!("{name}_{standard}.{extension}"))));
    }
}

/// A program for each header that includes it twice, then another library's, and does nothing else.
fn included_twice(ending: &str) -> Vec<PathBuf> {
    let programs = headers().into_iter().map(|header| {
        let source = scratch(&format!(
            "header_{}_{ending}",
            header.replace(['/', '.'], "_")
        ));
        let twice = format!("#include <{header}>\n#include <{header}>\n");
        let program = format!("{twice}#include <stdio.h>\nint main(void) {{ return 0; }}\n");
        fs::write(&source, program).unwrap();
        source
    });
    programs.collect()
}

/// In a program of CUDA's, whose types are there before or after; as host code, and with device code beside it.
#[test]
fn doorbell_h_compiles_in_cuda_programs() {
    let test = "doorbell_h_compiles_in_cuda_programs";
    let nvcc = std::env::var("DOORBELL_NVCC").unwrap_or_else(|_| "nvcc".into());
    if !has(&nvcc) {
        return waived::waived(test, "nvcc is not installed");
    }
    let program = "#include <doorbell.h>\n#include <cuda_runtime.h>\n#include <doorbell.h>\n\
        __global__ void kernel(const int *status, int *seen) { *seen = *status; }\n\
        int queue(cudaStream_t stream, doorbell_stream **made) {\n\
        doorbell_work work = doorbell_work_send_inline(\"x\", 1);\n\
        if (work.opcode != DOORBELL_OP_SEND) return 1;\n\
        return doorbell_stream_create_cuda(stream, nullptr, made);\n}\n\
        int over(cudaGraph_t graph, cudaGraphNode_t *node, doorbell_stream *stream, doorbell_graph_builder **builder) {\n\
        if (doorbell_graph_builder_last_node(*builder, node) < 0) return 1;\n\
        return doorbell_graph_builder_for_graph(stream, graph, builder);\n}\n";
    let first = "#include <cuda_runtime.h>\n#include <doorbell.h>\n\
        int exec(const doorbell_graph *graph, cudaGraphExec_t *exec) { return doorbell_graph_raw(graph, exec); }\n";
    // In the other order than they include each other.
    let every: String = headers()
        .iter()
        .chain(
            [
                "doorbell/collective.cuh".into(),
                "doorbell/device.cuh".into(),
            ]
            .iter(),
        )
        .rev()
        .map(|header| format!("#include <{header}>\n"))
        .collect();
    for (name, text) in [
        ("header_before.cu", program),
        ("header_behind.cu", first),
        ("header_every.cu", &every),
    ] {
        let source = scratch(name);
        fs::write(&source, text).unwrap();
        let mut command = Command::new(&nvcc);
        command.args(["-std=c++17", "-arch", "sm_75", "-Werror", "all-warnings"]);
        command.args(["-Xcompiler", "-Wall,-Wextra,-Werror", "-c", "-I"]);
        command.arg(root().join("include")).arg(&source);
        succeed(command.arg("-o").arg(scratch(&format!("{name}.o"))));
    }
}

/// The C test programs call every function of the header.
#[test]
fn every_function_is_called_from_c() {
    let test = "every_function_is_called_from_c";
    if !has("nm") {
        return waived::waived(test, "nm is not installed");
    }
    let mut called = BTreeSet::new();
    let mut programs = 0;
    for folder in [
        "crates/capi/tests/c",
        "crates/capi/tests/kernel_queue",
        "examples",
    ] {
        for entry in fs::read_dir(root().join(folder)).unwrap() {
            let source = entry.unwrap().path();
            if source.extension().is_none_or(|extension| extension != "c") {
                continue;
            }
            let name = source.file_stem().unwrap().to_string_lossy().into_owned();
            let object = scratch(&format!("called_{name}.o"));
            let mut command = compiler("cc", "c11");
            let options = ["DEBUG_LIBRARY", "WITH_CUDA", "WITH_KERNEL", "WITH_VERBS"];
            command.args(options.map(|option| format!("-D{option}=1")));
            command.arg("-c");
            succeed(command.arg(source).arg("-o").arg(&object));
            let undefined = succeed(
                Command::new("nm")
                    .args(["--undefined-only", "--format=posix"])
                    .arg(object),
            );
            let names = undefined.lines().filter_map(|line| line.split(' ').next());
            called.extend(
                names
                    .filter(|name| name.starts_with("doorbell_"))
                    .map(str::to_owned),
            );
            programs += 1;
        }
    }
    assert!(programs > 5, "only {programs} programs were read");
    let declared: BTreeSet<String> = header().functions.into_keys().collect();
    let never: Vec<_> = declared.difference(&called).collect();
    assert!(never.is_empty(), "no C program calls {never:?}");
    let unknown: Vec<_> = called.difference(&declared).collect();
    assert!(unknown.is_empty(), "the header does not have {unknown:?}");
}

#[test]
fn header_and_rust_define_the_same_interface() {
    let (c, rust) = (header(), rust());
    assert!(
        c.functions.len() > 60,
        "only {} functions were read",
        c.functions.len()
    );
    assert_same("function", &c.functions, &rust.functions);
    assert_same("struct", &c.structs, &rust.structs);
    let (mut constants, rust) = (c.constants, rust.constants);
    for (part, number) in [
        ("MAJOR", env!("CARGO_PKG_VERSION_MAJOR")),
        ("MINOR", env!("CARGO_PKG_VERSION_MINOR")),
        ("PATCH", env!("CARGO_PKG_VERSION_PATCH")),
    ] {
        // The Rust side computes these.
        let found = constants.remove(&format!("DOORBELL_VERSION_{part}"));
        assert_eq!(found.as_deref(), Some(number), "{part}");
    }
    assert!(
        constants.len() > 50,
        "only {} constants were read",
        constants.len()
    );
    assert_same("constant", &constants, &rust);
}

/// The version of the library in the metadata for `cargo cinstall` is the crate's.
#[test]
fn cargo_c_metadata_has_the_crate_version() {
    let manifest = fs::read_to_string(root().join("crates/capi/Cargo.toml")).unwrap();
    let (_, library) = manifest
        .split_once("[package.metadata.capi.library]")
        .expect("a section for cargo-c");
    let version = library
        .lines()
        .find_map(|line| line.strip_prefix("version = "))
        .expect("a version");
    assert_eq!(version, format!("{:?}", env!("CARGO_PKG_VERSION")));
}

/// Prefix of the names in the shim.
const SHIM: &[&str] = &[
    "doorbell_shim_",
    #[cfg(feature = "verbs")]
    "doorbell_dv_",
];

#[test]
fn header_and_library_have_the_same_functions() {
    let test = "header_and_library_have_the_same_functions";
    if !has("nm") {
        return waived::waived(test, "nm is not installed");
    }
    let declared: BTreeSet<String> = header().functions.into_keys().collect();
    let symbols = |path: &Path, dynamic: bool| -> BTreeSet<String> {
        let mut command = Command::new("nm");
        command.args(dynamic.then_some("-D"));
        command.args(["--defined-only", "--extern-only", "--format=posix"]);
        succeed(command.arg(path))
            .lines()
            .filter_map(|line| line.split(' ').next().map(str::to_owned))
            .collect()
    };
    // The shared library exports the interface only.
    assert_eq!(symbols(&library("so"), true), declared);
    // Symbols with this prefix in the static library are the interface, and the shim with its glue to mlx5dv, which are hidden.
    let mut named = symbols(&library("a"), false);
    named.retain(|name| name.starts_with("doorbell_"));
    for part in SHIM {
        let before = named.len();
        named.retain(|name| !name.starts_with(part));
        assert!(named.len() < before, "there is no {part}");
    }
    assert_eq!(named, declared);
}

/// The symbols that a shared library exports which a user links with the static one.
#[test]
fn static_library_exports_no_shim_symbols() {
    let test = "static_library_exports_no_shim_symbols";
    if !has("nm") {
        return waived::waived(test, "nm is not installed");
    }
    let shared = scratch("libuser.so");
    let mut command = compiler("cc", "c11");
    command.args(["-shared", "-Wl,--whole-archive"]);
    command.arg(library("a")).arg("-Wl,--no-whole-archive");
    succeed(
        command
            .args(c_toolchain::NATIVE_LIBS)
            .arg("-o")
            .arg(&shared),
    );
    let exported = succeed(
        Command::new("nm")
            .args(["-D", "--defined-only"])
            .arg(shared),
    );
    assert!(exported.contains("doorbell_version"));
    for part in SHIM {
        let leaks = exported.contains(&format!(" {part}"));
        assert!(!leaks, "{part} is exported");
    }
}

/// The rules of the line `Threads:` before the declaration of a function; empty if any thread may call it at any time.
fn thread_rules(text: &str, function: &str) -> Vec<String> {
    let declaration = text
        .match_indices(&format!("{function}("))
        .map(|(at, _)| at)
        .find(|at| {
            let start = text[..*at].rfind('\n').map_or(0, |newline| newline + 1);
            text[start..].starts_with(|c: char| c.is_ascii_alphabetic())
                && !text[start..*at].contains("static")
        })
        .unwrap_or_else(|| panic!("{function}: no declaration"));
    let comment = text[..declaration]
        .rfind("/*")
        .map_or("", |start| &text[start..declaration]);
    assert_eq!(comment.matches("*/").count(), 1, "{function}: no comment");
    comment
        .lines()
        .find_map(|line| line.trim().strip_prefix("* Threads: "))
        .map(|line| line.trim_end_matches('.').split(", "))
        .map_or(Vec::new(), |rules| rules.map(str::to_owned).collect())
}

/// By doorbell.h any thread may make any call, unless the call's comment has a line `Threads:`. Calls that end a handle must have one, and so must
/// those with a handle of a type that calls may use only one at a time.
#[test]
fn header_documents_every_thread_safety_exception() {
    let (text, header) = (interface_text(), header());
    // Functions, with their parameters that are handles, or lists of such: (name, type).
    let functions: Vec<(&String, Vec<(&str, &str)>)> = header
        .functions
        .iter()
        .map(|(function, signature)| {
            let handles = signature.parameters.iter().filter_map(|parameter| {
                let (name, kind) = parameter.split_once(": ").expect("a name and a type");
                let pointee = kind.rsplit(' ').next().expect("a type");
                let is_handle = header.handles.contains(pointee) && !kind.starts_with("*mut *mut ");
                is_handle.then_some((name, pointee))
            });
            (function, handles.collect())
        })
        .collect();
    let rules = |function: &str| thread_rules(&text, function);
    let names = |rule: &str, name: &str| {
        rule.strip_prefix("one at a time for ")
            .or_else(|| rule.strip_prefix("alone with each of "))
            .or_else(|| rule.strip_prefix("alone with "))
            == Some(name)
    };
    let mut exclusive = BTreeSet::new();
    for (function, handles) in &functions {
        for rule in rules(function) {
            let named = handles.iter().find(|(name, _)| names(&rule, name));
            assert!(rule == "any" || named.is_some(), "{function}: `{rule}`");
            if rule.starts_with("one at a time") {
                exclusive.extend(named.map(|(_, kind)| *kind));
            }
        }
    }
    assert!(exclusive.len() > 6, "only {exclusive:?} were found");
    for (function, handles) in &functions {
        let rules = rules(function);
        let restricted: Vec<_> = handles
            .iter()
            .filter(|(_, kind)| exclusive.contains(kind))
            .collect();
        if rules == ["any"] {
            assert!(!restricted.is_empty(), "{function}: `any` is the rule");
            continue;
        }
        for (name, _) in restricted {
            let said = rules.iter().any(|rule| names(rule, name));
            assert!(said, "{function}: nothing is said of `{name}`");
        }
        let ends = function.ends_with("_destroy") || function.ends_with("_close");
        let is_alone = rules.iter().any(|rule| rule.starts_with("alone with "));
        assert!(is_alone || !ends, "{function}: it ends a handle");
    }
}

/// Each code has its name, in the header and in the library.
#[test]
fn error_codes_have_names() {
    let mut program = String::from(PROLOGUE);
    for (name, value) in &header().constants {
        let is_code =
            name == "DOORBELL_OK" || name.starts_with("DOORBELL_E") && value.starts_with('-');
        if is_code {
            writeln!(
                program,
                "\tCHECK({name}, !strcmp(doorbell_error_name({value}), \"{name}\"));"
            )
            .unwrap();
        }
    }
    program.push_str("\treturn 0;\n}\n");
    assert!(program.matches("CHECK(").count() > 15);
    run_generated("codes", &program, &[]);
}

/// Calls every function that takes pointers with null pointers and zeros only.
#[test]
fn null_pointers_are_never_dereferenced() {
    let mut program = String::from(PROLOGUE);
    let first_name = format!("result == {}", doorbell_rs::Device::list()[0].len());
    for (name, signature) in &header().functions {
        if !signature
            .parameters
            .iter()
            .any(|parameter| parameter.contains('*'))
        {
            continue;
        }
        let arguments = vec!["0"; signature.parameters.len()].join(", ");
        let wanted = match (name.as_str(), signature.result.as_str()) {
            // A text buffer of no bytes may be null.
            ("doorbell_device_name", _) => &first_name,
            ("doorbell_describe", _) => "result > 0",
            // An empty list.
            (destroy, _) if destroy.ends_with("_destroy") || destroy.ends_with("_close") => {
                "result == 0"
            }
            (_, "c_int") => "result == DOORBELL_EINVAL && strstr(doorbell_last_error(), \"null\")",
            _ => "result == 0 && strstr(doorbell_last_error(), \"null\")",
        };
        let kind = c_result(&signature.result);
        writeln!(
            program,
            "\t{{ {kind} result = {name}({arguments}); CHECK({name}, {wanted}); }}"
        )
        .unwrap();
    }
    program.push_str("\treturn 0;\n}\n");
    assert!(program.matches("CHECK(").count() > 50);
    run_generated("null_pointers", &program, &[]);
}

/// Calls every function that takes a handle with a pointer that is not a handle, and with valid memory for other pointers.
#[test]
fn invalid_handles_are_never_dereferenced() {
    if !cfg!(debug_assertions) {
        // Release builds do not look handles up, by design.
        return waived::waived(
            "invalid_handles_are_never_dereferenced",
            "this is a release build, which does not look handles up",
        );
    }
    let header = header();
    let mut program = String::from(PROLOGUE);
    for (name, signature) in &header.functions {
        let mut has_handle = false;
        let arguments: Vec<String> = signature
            .parameters
            .iter()
            .map(|parameter| {
                let (_, kind) = parameter.split_once(": ").expect("a name and a type");
                let pointee = kind
                    .trim_start_matches("*const ")
                    .trim_start_matches("*mut ");
                let is_pointer = kind.starts_with('*');
                let is_handle = header.handles.contains(pointee) && kind.matches('*').count() == 1;
                has_handle |= is_handle;
                match (is_handle, is_pointer, kind) {
                    (true, ..) => "(void *)64",
                    (_, true, "*const c_char") => "\"x\"",
                    (_, true, _) => "(void *)zeros",
                    (_, false, "doorbell_host_fn") => "0",
                    (_, false, _) => "0",
                }
                .to_owned()
            })
            .collect();
        if !has_handle {
            continue;
        }
        let arguments = arguments.join(", ");
        let wanted = match signature.result.as_str() {
            "c_int" => "result == DOORBELL_EHANDLE",
            _ => "result == 0",
        };
        let kind = c_result(&signature.result);
        writeln!(
            program,
            "\tmemset(zeros, 0, sizeof zeros);\n\t{{ {kind} result = {name}({arguments}); \
             CHECK({name}, {wanted} && strstr(doorbell_last_error(), \"not a valid\")); }}"
        )
        .unwrap();
    }
    program.push_str("\treturn 0;\n}\n");
    assert!(program.matches("CHECK(").count() > 50);
    run_generated("no_handles", &program, &[]);
}

const PROLOGUE: &str = "#include <doorbell.h>\n#include <stdio.h>\n#include <string.h>\n\
    #define CHECK(name, condition) if (!(condition)) { fprintf(stderr, \"%s: %s; %s\\n\", #name, #condition, \
    doorbell_last_error()); return 1; }\n\
    static union { uint64_t aligned; char bytes[4096]; } zeros_;\n#define zeros zeros_.bytes\n\
    int main(void)\n{\n\t(void)zeros_;\n";

fn run_generated(name: &str, program: &str, flags: &[&str]) {
    let source = scratch(&format!("generated_{name}.c"));
    fs::write(&source, program).unwrap();
    run(&mut Command::new(build(
        &source,
        &format!("generated_{name}"),
        flags,
    )));
}

fn c_result(rust: &str) -> &'static str {
    match rust {
        "c_int" => "int",
        "u64" => "uint64_t",
        "*mut c_void" => "void *",
        other => panic!("no function with pointers returns {other} so far"),
    }
}

/// A function's types, in Rust's notation.
#[derive(Debug, PartialEq, Eq)]
struct Signature {
    /// `name: type`
    parameters: Vec<String>,
    result: String,
}

/// What one side defines, in Rust's notation.
#[derive(Debug, Default)]
struct Interface {
    functions: BTreeMap<String, Signature>,
    /// Fields as `name: type`, in order.
    structs: BTreeMap<String, Vec<String>>,
    constants: BTreeMap<String, String>,
    /// Types that are known by name only.
    handles: BTreeSet<String>,
}

fn assert_same<T: PartialEq + std::fmt::Debug>(
    what: &str,
    c: &BTreeMap<String, T>,
    rust: &BTreeMap<String, T>,
) {
    let names: BTreeSet<_> = c.keys().chain(rust.keys()).collect();
    let different: Vec<String> = names
        .into_iter()
        .filter(|name| c.get(*name) != rust.get(*name))
        .map(|name| {
            format!(
                "{name}\n  header: {:?}\n  Rust:   {:?}",
                c.get(name),
                rust.get(name)
            )
        })
        .collect();
    assert!(different.is_empty(), "{what}:\n{}", different.join("\n"));
}

/// Words and single signs, without comments, texts and (in C) the lines of the preprocessor.
fn tokens(source: &str) -> Vec<String> {
    let mut tokens = Vec::new();
    let mut rest = source;
    while let Some(c) = rest.chars().next() {
        let word = |c: char| c.is_alphanumeric() || c == '_';
        let length = if rest.starts_with("/*") {
            rest.find("*/").map_or(rest.len(), |end| end + 2)
        } else if rest.starts_with("//") {
            rest.find('\n').unwrap_or(rest.len())
        } else if c == '"' {
            let mut escaped = false;
            let end = rest[1..].find(|c| {
                let ends = c == '"' && !escaped;
                escaped = c == '\\' && !escaped;
                ends
            });
            end.map_or(rest.len(), |end| end + 2)
        } else if word(c) {
            rest.find(|c| !word(c)).unwrap_or(rest.len())
        } else {
            c.len_utf8()
        };
        if word(c)
            || !(c.is_whitespace() || c == '"' || rest.starts_with("/*") || rest.starts_with("//"))
        {
            tokens.push(rest[..length].to_owned());
        }
        rest = &rest[length..];
    }
    tokens
}

/// The tokens from an opening sign at `at` to the one that closes it, without both; and where it goes on.
fn group(tokens: &[String], at: usize) -> (&[String], usize) {
    let mut depth = 0;
    for (end, token) in tokens.iter().enumerate().skip(at) {
        match token.as_str() {
            "(" | "{" => depth += 1,
            ")" | "}" => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return (&tokens[at + 1..end], end + 1);
        }
    }
    panic!("a group does not end");
}

fn number(tokens: &[String]) -> Option<String> {
    let text: String = tokens
        .iter()
        .filter(|token| !"()".contains(token.as_str()))
        .cloned()
        .collect();
    text.parse::<i64>().ok().map(|number| number.to_string())
}

// ------------------------------------------------------------------------------------------------------- the C side

fn header() -> Interface {
    let text = interface_text();
    let mut interface = Interface::default();
    let mut code = String::new();
    let mut in_cpp = false;
    for line in text.lines() {
        match line.split_whitespace().collect::<Vec<_>>()[..] {
            ["#ifdef", "__cplusplus"] => in_cpp = true,
            ["#endif", ..] => in_cpp = false,
            ["#define", name, value] => {
                let value = number(&tokens(value)).unwrap_or_else(|| panic!("{name} is no number"));
                interface.constants.insert(name.to_owned(), value);
            }
            [first, ..] if first.starts_with('#') => {}
            _ if in_cpp => {}
            _ => {
                code.push_str(line);
                code.push('\n');
            }
        }
    }
    let tokens = tokens(&code);
    let mut at = 0;
    while at < tokens.len() {
        let open = at
            + tokens[at..]
                .iter()
                .position(|token| ["(", "{", ";"].contains(&token.as_str()))
                .unwrap();
        let head: Vec<&str> = tokens[at..open].iter().map(String::as_str).collect();
        match (head.as_slice(), tokens[open].as_str()) {
            (["static", "inline", ..], _) => {
                let (_, body) = group(&tokens, open);
                at = group(&tokens, body).1;
            }
            (["enum", _], "{") => {
                let (body, end) = group(&tokens, open);
                for entry in body.split(|token| token == ",") {
                    let value = number(&entry[2..]).unwrap_or_else(|| panic!("{entry:?}"));
                    interface.constants.insert(entry[0].clone(), value);
                }
                at = end + 1;
            }
            (["typedef", "struct", name], "{") => {
                let (body, end) = group(&tokens, open);
                let fields = body
                    .split(|token| token == ";")
                    .filter(|field| !field.is_empty());
                interface
                    .structs
                    .insert((*name).to_owned(), fields.map(c_variable).collect());
                assert_eq!(tokens[end], *name);
                at = end + 2;
            }
            // Types of another library, without a Rust type here.
            (["struct", name], ";") => {
                assert!(!name.starts_with("doorbell_"), "{name}");
                at = open + 1;
            }
            (["typedef", "struct", name, again], ";") => {
                assert_eq!(name, again);
                interface.handles.insert((*name).to_owned());
                at = open + 1;
            }
            (["typedef", "void"], "(") => {
                // The types of functions that the library calls; their own test is that programs with such functions run.
                let (name, parameters) = group(&tokens, open);
                assert!(
                    [["*", "doorbell_host_fn"], ["*", "doorbell_release"]]
                        .contains(&[&name[0], &name[1]]),
                    "{name:?}"
                );
                at = group(&tokens, parameters).1 + 1;
            }
            ([.., name], "(") => {
                let (parameters, end) = group(&tokens, open);
                let parameters = match parameters {
                    [void] if void == "void" => Vec::new(),
                    _ => parameters
                        .split(|token| token == ",")
                        .map(c_variable)
                        .collect(),
                };
                let result = c_type(&tokens[at..open - 1]);
                let signature = Signature { parameters, result };
                assert!(
                    interface
                        .functions
                        .insert((*name).to_owned(), signature)
                        .is_none()
                );
                assert_eq!(tokens[end], ";");
                at = end + 1;
            }
            other => panic!("what is {other:?}?"),
        }
    }
    interface
}

/// `type name` or `type name[length]`, as `name: type` of Rust.
fn c_variable(tokens: &[String]) -> String {
    if let [kind, name, open, length, _] = tokens
        && open == "["
    {
        return format!("{name}: [{}; {length}]", c_type(std::slice::from_ref(kind)));
    }
    let (name, kind) = tokens.split_last().expect("a type and a name");
    format!("{name}: {}", c_type(kind))
}

fn c_type(tokens: &[String]) -> String {
    let (is_const, tokens) = match tokens {
        [first, rest @ ..] if first == "const" => (true, rest),
        _ => (false, tokens),
    };
    let (tagged, tokens) = match tokens {
        [first, rest @ ..] if first == "struct" => (true, rest),
        _ => (false, tokens),
    };
    let (base, stars) = tokens.split_first().expect("a type has a name");
    let base = match base.as_str() {
        theirs
            if tagged
                && ["CU", "ibv_"]
                    .iter()
                    .any(|prefix| theirs.starts_with(prefix)) =>
        {
            theirs
        }
        "char" => "c_char",
        "int" => "c_int",
        "void" => "c_void",
        "size_t" => "usize",
        "uint8_t" => "u8",
        "uint16_t" => "u16",
        "uint32_t" => "u32",
        "uint64_t" => "u64",
        "int64_t" => "i64",
        own if own.starts_with("doorbell_") => own,
        other => panic!("{other} is a type that this test does not know"),
    };
    let (mut kind, mut points_to_const) = (base.to_owned(), is_const);
    let mut stars = stars.iter().peekable();
    while let Some(star) = stars.next() {
        assert_eq!(star, "*");
        let target = if points_to_const { "const" } else { "mut" };
        kind = format!("*{target} {kind}");
        points_to_const = stars.next_if(|token| *token == "const").is_some();
    }
    kind
}

// ---------------------------------------------------------------------------------------------------- the Rust side

fn rust() -> Interface {
    let mut interface = Interface::default();
    let mut exports = 0;
    for entry in fs::read_dir(root().join("crates/capi/src")).unwrap() {
        let text = fs::read_to_string(entry.unwrap().path()).unwrap();
        // Tests stand at the end, and have functions of their own.
        let text = text.split("#[cfg(test)]").next().unwrap_or("");
        exports += text.matches("#[unsafe(no_mangle)]").count();
        read_rust(&tokens(text), &mut interface);
    }
    assert_eq!(interface.functions.len(), exports, "each export was read");
    interface
}

fn read_rust(tokens: &[String], interface: &mut Interface) {
    let is = |at: usize, text: &str| tokens.get(at).is_some_and(|token| token == text);
    for at in 0..tokens.len() {
        if is(at, "extern") && is(at + 1, "fn") && !is(at + 2, "(") {
            let (parameters, end) = group(tokens, at + 3);
            let result = if is(end, "-") && is(end + 1, ">") {
                let length = tokens[end..].iter().position(|token| token == "{").unwrap();
                rust_type(&tokens[end + 2..end + length])
            } else {
                "c_void".to_owned()
            };
            let parameters = fields(parameters);
            interface
                .functions
                .insert(tokens[at + 2].clone(), Signature { parameters, result });
        } else if is(at, "struct") && is(at + 2, "{") && tokens[..at].ends_with(&["pub".to_owned()])
        {
            // Types with fields visible in C have the attribute `repr(C)` before.
            let mut before = tokens[..at].rsplit(|token| ["}", ";"].contains(&token.as_str()));
            let attributes = before.next().unwrap_or(&[]).concat();
            if attributes.contains("repr(C)") {
                let (body, _) = group(tokens, at + 2);
                interface
                    .structs
                    .insert(tokens[at + 1].clone(), fields(body));
            }
        } else if tokens[at].starts_with("DOORBELL_") {
            // `NAME: type = value;`, or `NAME = value;` inside the macro of the codes.
            let equals = if is(at + 1, ":") { at + 3 } else { at + 1 };
            if !is(equals, "=") {
                continue;
            }
            let length = tokens[equals..]
                .iter()
                .position(|token| token == ";")
                .unwrap_or(0);
            if let Some(value) = (length > 0)
                .then(|| number(&tokens[equals + 1..equals + length]))
                .flatten()
            {
                interface.constants.insert(tokens[at].clone(), value);
            }
        }
    }
}

/// `name: type` for each of a list.
fn fields(tokens: &[String]) -> Vec<String> {
    tokens
        .split(|token| token == ",")
        .filter(|field| !field.is_empty())
        .map(|field| {
            let colon = field
                .iter()
                .position(|token| token == ":")
                .expect("a name and a type");
            format!("{}: {}", field[colon - 1], rust_type(&field[colon + 1..]))
        })
        .collect()
}

fn rust_type(tokens: &[String]) -> String {
    match tokens {
        [star, kind, rest @ ..] if star == "*" => format!("*{kind} {}", rust_type(rest)),
        [open, kind, semicolon, length, _] if open == "[" => {
            format!("[{kind}{semicolon} {length}]")
        }
        [name] => name.clone(),
        other => panic!("{other:?} is a type that this test does not know"),
    }
}

// ---------------------------------------------------------------------------------------- that the readers find what differs

#[test]
fn type_parsers_handle_const_and_nested_pointers() {
    for (c, rust) in [
        ("const char *name", "name: *const c_char"),
        (
            "doorbell_device **device",
            "device: *mut *mut doorbell_device",
        ),
        (
            "doorbell_prepared *const *list",
            "list: *const *mut doorbell_prepared",
        ),
        ("const uint32_t *const x", "x: *const u32"),
        ("uint8_t bytes[N]", "bytes: [u8; N]"),
    ] {
        assert_eq!(c_variable(&tokens(c)), rust);
    }
    let mut interface = Interface::default();
    let source = "#[repr(C)] #[derive(Debug)] pub struct s { pub a: u32, pub b: *const *mut x, pub c: [u8; N], }
        pub struct hidden { a: u8 }
        /// Text with (brackets.
        pub unsafe extern \"C\" fn f(a: *mut *mut s, b: usize) -> *const c_char { }
        pub type k = Option<unsafe extern \"C\" fn(*mut c_void)>;
        pub const DOORBELL_A: i64 = -1; if x == DOORBELL_A { }";
    read_rust(&tokens(source), &mut interface);
    assert_eq!(interface.structs.len(), 1);
    assert_eq!(
        interface.structs["s"],
        ["a: u32", "b: *const *mut x", "c: [u8; N]"]
    );
    assert_eq!(interface.functions.len(), 1);
    assert_eq!(
        interface.functions["f"].parameters,
        ["a: *mut *mut s", "b: usize"]
    );
    assert_eq!(interface.functions["f"].result, "*const c_char");
    assert_eq!(interface.constants["DOORBELL_A"], "-1");
}
