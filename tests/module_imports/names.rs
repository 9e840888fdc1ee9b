//! Type names are unique, with a few listed exceptions.

use std::collections::BTreeMap;

use crate::files::production_files;
use crate::sources_of;
use crate::tables::CRATES;
use crate::tokens::Token;

/// Names that are defined more than once on purpose, how often, and why.
const ON_PURPOSE: &[(&str, usize, &str)] = &[
    (
        "CmConnection",
        2,
        "capi: without the feature `verbs`, a type without values stands for the library's",
    ),
    ("CmListener", 2, "capi: likewise"),
    ("CmRequest", 2, "capi: likewise"),
    (
        "GraphBuilder",
        2,
        "capi: without the feature `cuda`, likewise",
    ),
    ("GraphExec", 2, "capi: likewise"),
    ("GraphMember", 2, "capi: likewise"),
    ("Clock", 2, "cli: with the feature `cuda`, and without"),
    ("BatchGraph", 2, "cli: likewise"),
    ("TriggerKernels", 2, "cli: likewise"),
    (
        "Device",
        2,
        "an open NIC to the library's users, and the simulated NIC itself",
    ),
    (
        "Context",
        2,
        "an open verbs device, and a context of the stand-in for the CUDA driver: each API's own word",
    ),
    (
        "Event",
        2,
        "an event of the library's streams, and one of the stand-in: CUDA's word",
    ),
    (
        "Transport",
        2,
        "the services of the library's endpoints, and all services that clients of the simulated NIC may ask for: verbs' own word",
    ),
    (
        "UnsafeCell",
        2,
        "the interface of loom's, over that of the standard library",
    ),
];

/// How many names may be defined more than once.
const MOST: usize = 20;

#[test]
fn type_names_are_unique() {
    let mut places: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let folders = CRATES.iter().map(|package| package.folder);
    for folder in folders {
        for (name, files) in type_names(&sources_of(folder)) {
            let files = files.iter().map(|file| format!("{folder}/{file}"));
            places.entry(name).or_default().extend(files);
        }
    }
    places.retain(|_, files| files.len() > 1);
    assert!(ON_PURPOSE.len() <= MOST);
    let on_purpose = ON_PURPOSE.iter().map(|(name, most, _)| (*name, *most));
    let mut listed: BTreeMap<&str, usize> = BTreeMap::new();
    for (name, most) in on_purpose {
        assert_eq!(listed.insert(name, most), None, "`{name}` is listed twice");
    }
    let mut found = Vec::new();
    for (name, files) in &places {
        if files.len() > listed.get(name.as_str()).copied().unwrap_or(1) {
            found.push(format!("`{name}`: {}", files.join(", ")));
        }
    }
    for name in listed.keys().filter(|name| !places.contains_key(**name)) {
        found.push(format!("`{name}` stands once now: take it off the list"));
    }
    assert!(
        found.is_empty(),
        "names of several types:\n{}",
        found.join("\n")
    );
}

/// For each type name, the files that define it; a file that defines it twice is listed twice.
pub fn type_names(sources: &BTreeMap<String, String>) -> BTreeMap<String, Vec<String>> {
    let mut found: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (file, tokens) in production_files(sources) {
        for name in defined(&tokens) {
            found.entry(name).or_default().push(file.clone());
        }
    }
    found
}

/// The structs, enums, unions, traits and type aliases of a file; not the associated types of traits and impls.
fn defined(tokens: &[Token]) -> Vec<String> {
    let text = |at: usize| tokens.get(at).map_or("", |token| token.text.as_str());
    let mut found = Vec::new();
    // Of each open brace, whether it is that of a trait or of an impl.
    let mut open: Vec<bool> = Vec::new();
    let mut is_associating = false;
    for at in 0..tokens.len() {
        let before = if at == 0 { "" } else { text(at - 1) };
        let name = text(at + 1);
        match text(at) {
            "{" => open.push(std::mem::take(&mut is_associating)),
            "}" => {
                open.pop();
            }
            "impl" if ["", "{", "}", ";", "]", "unsafe"].contains(&before) => is_associating = true,
            "type" if open.last() == Some(&true) => {}
            kind @ ("struct" | "enum" | "union" | "trait" | "type")
                if name.starts_with(char::is_alphabetic) && ![".", "::"].contains(&before) =>
            {
                is_associating |= kind == "trait";
                // `union` is a keyword only before a type name.
                if kind != "union" || name.starts_with(char::is_uppercase) {
                    found.push(name.to_owned());
                }
            }
            _ => {}
        }
    }
    found
}

#[test]
fn types_are_found() {
    let source = "pub struct A; pub(crate) enum B<T> { X(T) } trait C { type Assoc; fn f(); } type D = u8; union E { a: u8 }
        impl C for A { type Assoc = u8; fn f() { struct Local; type Alias = u8; } }
        fn g(it: impl Fn()) -> impl Iterator { type InFunction = u8; it.union; let union = 1; }
        macro_rules! m { ($name:ident) => { struct $name; } }
        #[cfg(test)] struct OnlyInTests; #[cfg(test)] mod tests { struct Inside; } // struct Comment;
        const TEXT: &str = \"struct Text;\"; mod inline { pub struct Inline; }";
    let sources = BTreeMap::from([
        ("lib.rs".to_owned(), source.to_owned()),
        (
            "a/mod.rs".to_owned(),
            "struct A; #[cfg(test)] mod tests;".to_owned(),
        ),
        ("a/tests.rs".to_owned(), "struct A;".to_owned()),
    ]);
    let found = type_names(&sources);
    let names: Vec<&str> = found.keys().map(String::as_str).collect();
    assert_eq!(
        names,
        [
            "A",
            "Alias",
            "B",
            "C",
            "D",
            "E",
            "InFunction",
            "Inline",
            "Local"
        ]
    );
    assert_eq!(found["A"], ["a/mod.rs", "lib.rs"]);
}
