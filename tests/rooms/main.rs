//! The structure of the sources: which room may import from which (here), circles of files (`circles`), names of types (`names`).
//!
//! Imports between rooms point down only. The table below has the allowed edges; every source file is read against it.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

mod circles;
mod files;
mod names;
mod tokens;

use files::{module_of, use_tree};
use tokens::{Token, tokens};

/// A room with the rooms that it may name.
type Edges = (&'static str, &'static [&'static str]);

/// The crates, by the folder of their sources, each with its rooms. Its own name and `error` go without saying, and what the wire crate has
/// is for all. A new room gets a line here first.
const CRATES: &[(&str, &[Edges])] = &[
    ("src", LIBRARY),
    ("crates/wire/src", WIRE),
    ("crates/softcx/src", SOFTCX),
];

/// The folders of sources of all crates that are products; tools stand apart.
const SOURCES: &[&str] = &[
    "src",
    "crates/wire/src",
    "crates/softcx/src",
    "crates/softcx/preload/src",
    "crates/capi/src",
    "crates/cli/src",
];

const WIRE: &[Edges] = &[
    ("error", &[]),
    ("verbs", &[]),
    ("peer", &[]),
    ("mlx5", &["peer", "verbs"]),
    ("memory", &["mlx5", "verbs"]),
];

const SOFTCX: &[Edges] = &[("device", &[]), ("doors", &["device"])];

const LIBRARY: &[Edges] = &[
    ("error", &[]),
    ("setters", &[]),
    // The other half of mlx5 and of all verbs devices; a relay consumes queues as a card does.
    ("verbs", &[]),
    ("nic", &["verbs", "softcx"]),
    ("stream", &[]),
    // Threads that take turns at what they serve and know nothing of queues; of streams only how to sleep.
    ("proxy", &["stream"]),
    // An executor of programs; it counts, and a thread of its own goes round to its streams. It makes the copies that stand for the software
    // NIC's access to the memory of a GPU.
    ("cuda", &["softcx", "stream", "proxy"]),
    ("region", &["cuda", "nic", "stream", "proxy"]),
    ("endpoint", &["region", "proxy", "stream", "nic"]),
    // Operations of endpoints as nodes of a CUDA graph: what each launch prepares anew, `cuda` patches into the nodes.
    ("graph", &["cuda", "endpoint", "region", "stream"]),
    // The send queue of an endpoint, mapped to a GPU.
    ("kernel_queue", &["cuda", "endpoint", "region"]),
    // A user of the public interface.
    ("bounce", &["cuda", "endpoint", "region", "stream"]),
    // rdma_cm connects endpoints, and finds the attributes of their steps.
    ("cm", &["endpoint", "nic"]),
    // A user of the public interface, but for the deadlines of sockets.
    ("group", &["endpoint", "region"]),
];

#[test]
fn imports_point_down_only() {
    for (folder, table) in CRATES {
        let src = Path::new(env!("CARGO_MANIFEST_DIR")).join(folder);
        let sources = read_sources(&src);
        assert!(
            sources.contains_key("lib.rs"),
            "{folder}/lib.rs was not read"
        );
        for (room, _) in *table {
            let of_room = |file: &String| file.starts_with(room);
            assert!(sources.keys().any(of_room), "{folder}: no room `{room}`");
        }
        let found = violations(&sources, table);
        assert!(found.is_empty(), "{folder}\n{}", found.join("\n"));
    }
}

/// The sources of one of [`SOURCES`].
fn sources_of(folder: &str) -> BTreeMap<String, String> {
    let sources = read_sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join(folder));
    assert!(
        sources.contains_key("lib.rs") || sources.contains_key("main.rs"),
        "{folder} was not read"
    );
    sources
}

/// Every Rust file under `src`, by its path there.
fn read_sources(src: &Path) -> BTreeMap<String, String> {
    let mut sources = BTreeMap::new();
    let mut folders: Vec<PathBuf> = vec![src.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let name = path.strip_prefix(src).unwrap().to_str().unwrap().to_owned();
                sources.insert(name, fs::read_to_string(&path).unwrap());
            }
        }
    }
    sources
}

/// What breaks the table, one line each: `file:line: reason`.
fn violations(sources: &BTreeMap<String, String>, table: &[Edges]) -> Vec<String> {
    let exports = exports(sources.get("lib.rs").map_or("", String::as_str));
    let mut found = Vec::new();
    for (file, source) in sources {
        let tokens = tokens(source);
        let module = module_of(file);
        let room = module.first().map(String::as_str);
        let allowed = table
            .iter()
            .find(|(name, _)| Some(*name) == room)
            .map(|(_, to)| *to);
        match (room, allowed) {
            (Some(room), None) => {
                found.push(format!("{file}:1: room `{room}` is not in the table"));
                continue;
            }
            _ => found.extend(detours(file, &tokens)),
        }
        let (Some(room), Some(allowed)) = (room, allowed) else {
            // The root declares and exports rooms; it has no code that could import.
            continue;
        };
        if !allowed.contains(&"softcx") {
            let named = tokens
                .iter()
                .filter(|token| token.text == "doorbell_softcx");
            found.extend(named.map(|token| {
                format!(
                    "{file}:{}: `{room}` must not import from `softcx`",
                    token.line
                )
            }));
        }
        for (line, name) in root_names(&tokens, &module) {
            let exported = exports.get(&name).map(String::as_str);
            let is_room = table.iter().any(|(room, _)| *room == name);
            match exported.or(is_room.then_some(name.as_str())) {
                None => found.push(format!(
                    "{file}:{line}: `crate::{name}` is neither a room nor an export of the root"
                )),
                Some(to)
                    if to == room
                        || ["error", "doorbell_wire"].contains(&to)
                        || allowed.contains(&to) => {}
                Some(to) => found.push(format!(
                    "{file}:{line}: `{room}` must not import from `{to}` (`crate::{name}`)"
                )),
            }
        }
    }
    found
}

/// Ways to bring in a file that no import shows.
fn detours(file: &str, tokens: &[Token]) -> Vec<String> {
    let is = |at: usize, text: &str| tokens.get(at).is_some_and(|token| token.text == text);
    (0..tokens.len())
        .filter(|&at| (is(at, "[") && is(at + 1, "path")) || (is(at, "include") && is(at + 1, "!")))
        .map(|at| {
            format!(
                "{file}:{}: `{}` goes around the rooms",
                tokens[at].line, tokens[at].text
            )
        })
        .collect()
}

/// The names that `lib.rs` re-exports with `pub use`, and the room that each is from.
fn exports(lib: &str) -> BTreeMap<String, String> {
    let tokens = tokens(lib);
    let mut exports = BTreeMap::new();
    for at in 0..tokens.len() {
        if tokens[at].text == "pub" && tokens.get(at + 1).is_some_and(|next| next.text == "use") {
            let mut paths = Vec::new();
            use_tree(&tokens, at + 2, &[], &mut paths);
            for (path, name) in paths {
                if let Some(room) = path.into_iter().find(|part| part != "crate") {
                    exports.insert(name, room);
                }
            }
        }
    }
    exports
}

/// Every name of the crate root that a file in `module` reaches through `crate::` or enough `super::`, with its line.
fn root_names(tokens: &[Token], module: &[String]) -> Vec<(usize, String)> {
    let mut names = Vec::new();
    // Inline modules that are open: their name, and the brace depth inside.
    let mut inline: Vec<(String, usize)> = Vec::new();
    let mut depth = 0;
    let mut at = 0;
    while at < tokens.len() {
        let text = tokens[at].text.as_str();
        let next = |ahead: usize| tokens.get(at + ahead).map(|token| token.text.as_str());
        match text {
            "{" => depth += 1,
            "}" => {
                depth -= 1;
                inline.pop_if(|(_, inside)| *inside > depth);
            }
            "mod" if next(2) == Some("{") => {
                inline.push((tokens[at + 1].text.clone(), depth + 1));
            }
            "crate" | "super" | "self" if next(1) == Some("::") => {
                let mut paths = Vec::new();
                let end = use_tree(tokens, at, &[], &mut paths);
                for (path, _) in paths {
                    let here = module
                        .iter()
                        .cloned()
                        .chain(inline.iter().map(|(name, _)| name.clone()));
                    if let Some(name) = from_root(here.collect(), &path) {
                        // One statement that takes several things from a room is one finding.
                        let found = (tokens[at].line, name);
                        if !names.contains(&found) {
                            names.push(found);
                        }
                    }
                }
                at = end;
                continue;
            }
            _ => {}
        }
        at += 1;
    }
    names
}

/// Follows `path` from module `here`; the first name taken from the crate root, if it comes by there.
fn from_root(mut here: Vec<String>, path: &[String]) -> Option<String> {
    for part in path {
        match part.as_str() {
            "crate" => here.clear(),
            "self" => {}
            "super" => {
                here.pop();
            }
            name if here.is_empty() => return Some(name.to_owned()),
            _ => return None,
        }
    }
    None
}

/// The verdict on one file beside a root with two exports.
fn judged(file: &str, source: &str) -> Vec<String> {
    const TABLE: &[Edges] = &[
        ("error", &[]),
        ("peer", &[]),
        ("mlx5", &["peer"]),
        ("soft", &["mlx5", "peer"]),
        ("stream", &["peer"]),
        ("endpoint", &["stream", "mlx5", "peer"]),
    ];
    let lib = "mod error; pub mod peer; mod endpoint; pub use error::{Error, Result}; pub use endpoint::Endpoint;";
    violations(
        &BTreeMap::from([
            ("lib.rs".to_owned(), lib.to_owned()),
            (file.to_owned(), source.to_owned()),
        ]),
        TABLE,
    )
}

#[test]
fn edges_down_are_allowed() {
    for (file, source) in [
        ("mlx5/wqe.rs", "use crate::peer::{Program, Dword};"),
        ("mlx5/wqe.rs", "use crate::{Error, Result, peer::Program};"),
        (
            "soft/mod.rs",
            "mod tests { use super::*; fn f() { crate::mlx5::Wqe::parse(&[]); } }",
        ),
        ("soft/qp/mod.rs", "use super::super::mlx5;"),
        (
            "peer/mod.rs",
            "pub(crate) fn f() {} // crate::mlx5\n/* crate::soft /* nested */ crate::soft */",
        ),
        (
            "peer/mod.rs",
            "const TEXT: &str = \"crate::mlx5\"; const RAW: &str = r#\"\"crate::mlx5\"#;",
        ),
        (
            "peer/mod.rs",
            "fn f<'a>(c: char) -> bool { c == '\"' || c == '\\'' } use crate::Error;",
        ),
    ] {
        assert_eq!(
            judged(file, source),
            Vec::<String>::new(),
            "{file}: {source}"
        );
    }
}

#[test]
fn edges_up_and_sideways_are_caught() {
    for (file, source, reason) in [
        (
            "peer/mod.rs",
            "\n\nuse crate::mlx5::Wqe;",
            "peer/mod.rs:3: `peer` must not import from `mlx5`",
        ),
        (
            "peer/mod.rs",
            "use super::mlx5::Wqe;",
            "must not import from `mlx5`",
        ),
        (
            "peer/unit.rs",
            "mod a { mod b {} mod c { use super::super::super::super::soft; } }",
            "from `soft`",
        ),
        (
            "peer/mod.rs",
            "use crate::{error::Error, mlx5::{Wqe, Cqe}};",
            "from `mlx5`",
        ),
        ("peer/mod.rs", "use self::super::mlx5;", "from `mlx5`"),
        (
            "stream/mod.rs",
            "fn f() -> u32 { crate::soft::COUNT }",
            "`stream` must not import from `soft`",
        ),
        (
            "stream/mod.rs",
            "macro_rules! m { () => { $crate::soft::COUNT } }",
            "from `soft`",
        ),
        (
            "soft/mod.rs",
            "use crate::Endpoint;",
            "`soft` must not import from `endpoint`",
        ),
        (
            "soft/mod.rs",
            "use crate::*;",
            "neither a room nor an export",
        ),
        (
            "stream/mod.rs",
            "use doorbell_softcx::device::Device;",
            "`stream` must not import from `softcx`",
        ),
        (
            "soft/mod.rs",
            "use crate::nowhere::X;",
            "neither a room nor an export",
        ),
        ("cellar/mod.rs", "", "room `cellar` is not in the table"),
        ("cellar.rs", "", "room `cellar` is not in the table"),
        (
            "peer/mod.rs",
            "#[path = \"../mlx5/wqe.rs\"] mod wqe;",
            "goes around",
        ),
        (
            "peer/mod.rs",
            "include!(\"../../mlx5/wqe.rs\");",
            "goes around",
        ),
    ] {
        let found = judged(file, source);
        assert!(
            found.len() == 1 && found[0].contains(reason),
            "{file}: {source}: {found:?}"
        );
    }
}

#[test]
fn the_tables_themselves_have_no_cycle() {
    for (folder, table) in CRATES {
        // Every edge goes to a line further up: then no walk along edges comes back.
        for (from, (room, to)) in table.iter().enumerate() {
            for other in to.iter().filter(|other| **other != "softcx") {
                let line = table.iter().position(|(name, _)| name == other);
                assert!(
                    line.is_some_and(|line| line < from),
                    "{folder}: {room} -> {other}"
                );
            }
        }
    }
}
