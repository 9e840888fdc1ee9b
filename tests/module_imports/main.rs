//! The structure of the sources: which top-level module may import from which (here), circles of files (`circles`), names of types (`names`), and
//! where code for tests is (`product`).
//!
//! Imports between modules point down only. The tables of [`tables`] have the allowed edges; every source file is read against them.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

mod circles;
mod files;
mod names;
mod product;
mod tables;
mod tokens;

use files::{inline_module, module_of, use_tree};
use tables::{CRATES, Edges, Package, SOFTCX};
use tokens::{Token, tokens};

#[test]
fn imports_point_down_only() {
    let mut found = Vec::new();
    for package in CRATES {
        let sources = sources_of(package.folder);
        let modules: Vec<Vec<String>> = sources.keys().map(|file| module_of(file)).collect();
        for top_module in package
            .modules
            .iter()
            .flat_map(|(top_module, _)| top_module.split(' '))
        {
            let is_there = modules
                .iter()
                .any(|module| module.first().is_some_and(|first| first == top_module));
            assert!(is_there, "{}: no module `{top_module}`", package.folder);
        }
        let broken = violations(&sources, package);
        found.extend(
            broken
                .iter()
                .map(|line| format!("{}/{line}", package.folder)),
        );
    }
    assert!(found.is_empty(), "{}", found.join("\n"));
}

/// The sources of one of [`CRATES`].
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

/// The row of the top-level module that a module belongs to.
fn row_of(modules: &[Edges], module: &str) -> Option<usize> {
    let has = |(top_module, _): &Edges| top_module.split(' ').any(|name| name == module);
    modules.iter().position(has)
}

/// The rows of the modules that the one of this row may name.
fn edges_of(package: &Package, row: usize) -> Vec<usize> {
    let (_, listed) = package.modules[row];
    let named = listed.iter().filter_map(|to| row_of(package.modules, to));
    let common = package.common.iter();
    let above = common.filter_map(|to| row_of(package.modules, to).filter(|to| *to < row));
    named.chain(above).collect()
}

/// What breaks the table, one line each: `file:line: reason`.
fn violations(sources: &BTreeMap<String, String>, package: &Package) -> Vec<String> {
    let root = sources.get("lib.rs").or_else(|| sources.get("main.rs"));
    let exports = exports(root.map_or("", String::as_str));
    let mut found = Vec::new();
    for (file, source) in sources {
        let tokens = tokens(source);
        let module = module_of(file);
        // The root stands above all modules, and may import from each.
        let Some(top_module) = module.first() else {
            found.extend(detours(file, &tokens));
            continue;
        };
        let Some(row) = row_of(package.modules, top_module) else {
            found.push(format!(
                "{file}:1: module `{top_module}` is not in the table"
            ));
            continue;
        };
        found.extend(detours(file, &tokens));
        if !package.modules[row].1.contains(&SOFTCX) {
            let named = tokens.iter().filter(|token| token.text == SOFTCX);
            found.extend(named.map(|token| {
                format!(
                    "{file}:{}: `{top_module}` must not import from `{SOFTCX}`",
                    token.line
                )
            }));
        }
        let allowed = edges_of(package, row);
        for (line, name) in root_names(&tokens, &module) {
            let to = exports.get(&name).unwrap_or(&name);
            match row_of(package.modules, to) {
                Some(to) if to == row || allowed.contains(&to) => {}
                Some(_) => found.push(format!(
                    "{file}:{line}: `{top_module}` must not import from `{to}` (`crate::{name}`)"
                )),
                None if to == "doorbell_wire" => {}
                None => found.push(format!(
                    "{file}:{line}: `crate::{name}` is neither a module nor an export of the root"
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
                "{file}:{}: `{}` goes around the modules",
                tokens[at].line, tokens[at].text
            )
        })
        .collect()
}

/// The names that `lib.rs` re-exports with `pub use`, and the top-level module that each is from.
fn exports(lib: &str) -> BTreeMap<String, String> {
    let tokens = tokens(lib);
    let mut exports = BTreeMap::new();
    for at in 0..tokens.len() {
        if tokens[at].text == "pub" && tokens.get(at + 1).is_some_and(|next| next.text == "use") {
            let mut paths = Vec::new();
            use_tree(&tokens, at + 2, &[], &mut paths);
            for (path, name) in paths {
                if let Some(top_module) = path.into_iter().find(|part| part != "crate") {
                    exports.insert(name, top_module);
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
            "crate" | "super" | "self" if next(1) == Some("::") => {
                let mut paths = Vec::new();
                let end = use_tree(tokens, at, &[], &mut paths);
                for (path, _) in paths {
                    let here = module
                        .iter()
                        .cloned()
                        .chain(inline.iter().map(|(name, _)| name.clone()));
                    if let Some(name) = from_root(here.collect(), &path) {
                        // One statement that takes several things from a top-level module is one finding.
                        let found = (tokens[at].line, name);
                        if !names.contains(&found) {
                            names.push(found);
                        }
                    }
                }
                at = end;
                continue;
            }
            _ => inline.extend(inline_module(tokens, at).map(|name| (name, depth + 1))),
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
    const TABLE: Package = Package {
        folder: "",
        common: &["error"],
        modules: &[
            ("error", &[]),
            ("bytecode", &[]),
            ("mlx5", &["bytecode"]),
            ("soft", &["mlx5", "bytecode"]),
            ("stream pipe", &["bytecode"]),
            ("endpoint", &["stream", "mlx5", "bytecode"]),
        ],
    };
    let lib = "mod error; pub mod bytecode; mod endpoint; pub use error::{Error, Result}; pub use endpoint::Endpoint;";
    violations(
        &BTreeMap::from([
            ("lib.rs".to_owned(), lib.to_owned()),
            (file.to_owned(), source.to_owned()),
        ]),
        &TABLE,
    )
}

#[test]
fn edges_down_are_allowed() {
    for (file, source) in [
        ("mlx5/wqe.rs", "use crate::bytecode::{Program, Dword};"),
        (
            "mlx5/wqe.rs",
            "use crate::{Error, Result, bytecode::Program};",
        ),
        (
            "soft/mod.rs",
            "mod tests { use super::*; fn f() { crate::mlx5::Wqe::parse(&[]); } }",
        ),
        ("soft/qp/mod.rs", "use super::super::mlx5;"),
        (
            "bytecode/mod.rs",
            "pub(crate) fn f() {} // crate::mlx5\n/* crate::soft /* nested */ crate::soft */",
        ),
        (
            "bytecode/mod.rs",
            "const TEXT: &str = \"crate::mlx5\"; const RAW: &str = r#\"\"crate::mlx5\"#;",
        ),
        (
            "bytecode/mod.rs",
            "macro_rules! m { ($top_module:ident) => { mod $top_module { use super::*; } } }",
        ),
        ("stream/mod.rs", "use crate::pipe::Pipe;"),
        ("pipe.rs", "use crate::{stream::Stream, bytecode::Program};"),
        (
            "bytecode/mod.rs",
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
fn edges_up_and_sideways_are_reported() {
    for (file, source, reason) in [
        (
            "bytecode/mod.rs",
            "\n\nuse crate::mlx5::Wqe;",
            "bytecode/mod.rs:3: `bytecode` must not import from `mlx5`",
        ),
        (
            "bytecode/mod.rs",
            "use super::mlx5::Wqe;",
            "must not import from `mlx5`",
        ),
        (
            "bytecode/unit.rs",
            "mod a { mod b {} mod c { use super::super::super::super::soft; } }",
            "from `soft`",
        ),
        (
            "bytecode/mod.rs",
            "use crate::{error::Error, mlx5::{Wqe, Cqe}};",
            "from `mlx5`",
        ),
        ("bytecode/mod.rs", "use self::super::mlx5;", "from `mlx5`"),
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
            "neither a module nor an export",
        ),
        (
            "stream/mod.rs",
            "use doorbell_softcx::device::Device;",
            "`stream` must not import from `doorbell_softcx`",
        ),
        (
            "soft/mod.rs",
            "use crate::nowhere::X;",
            "neither a module nor an export",
        ),
        (
            "error.rs",
            "use crate::bytecode::Program;",
            "`error` must not import from `bytecode`",
        ),
        (
            "pipe.rs",
            "use crate::mlx5::Wqe;",
            "`pipe` must not import from `mlx5`",
        ),
        ("cellar/mod.rs", "", "module `cellar` is not in the table"),
        ("cellar.rs", "", "module `cellar` is not in the table"),
        (
            "bytecode/mod.rs",
            "#[path = \"../mlx5/wqe.rs\"] mod wqe;",
            "goes around",
        ),
        (
            "bytecode/mod.rs",
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
    for package in CRATES {
        let modules = package.modules;
        for (row, (top_module, to)) in modules.iter().enumerate() {
            // A top-level module of several files is called by the first.
            let is_room = |to: &&str| {
                modules
                    .iter()
                    .any(|(name, _)| name.split(' ').next() == Some(to))
            };
            let unknown: Vec<_> = to
                .iter()
                .filter(|to| **to != SOFTCX && !is_room(to))
                .collect();
            assert!(
                unknown.is_empty(),
                "{}: {top_module} -> {unknown:?}",
                package.folder
            );
            // Every edge goes to a line further up: then no walk along edges comes back.
            let down = edges_of(package, row).into_iter().find(|to| *to >= row);
            assert_eq!(down, None, "{}: {top_module}", package.folder);
        }
    }
}
