//! No more than three files import from each other in a circle.

use std::collections::BTreeMap;

use crate::files::{circles, imports};
use crate::sources_of;
use crate::tables::CRATES;

const MOST: usize = 3;

#[test]
fn import_circles_of_files_are_short() {
    let mut found = Vec::new();
    for package in CRATES {
        let folder = package.folder;
        for circle in circles(&imports(&sources_of(folder)), MOST) {
            found.push(format!("{folder}: {} files: {circle:?}", circle.len()));
        }
    }
    assert!(
        found.is_empty(),
        "circles of more than {MOST} files:\n{}",
        found.join("\n")
    );
}

/// The circles of more than one file among these, each as text.
fn circles_of(files: &[(&str, &str)]) -> Vec<String> {
    let sources: BTreeMap<String, String> = files
        .iter()
        .map(|(file, source)| ((*file).to_owned(), (*source).to_owned()))
        .collect();
    let circles = circles(&imports(&sources), 1);
    let text = |circle: &std::collections::BTreeSet<String>| {
        let files: Vec<&str> = circle.iter().map(String::as_str).collect();
        files.join(" ")
    };
    circles.iter().map(text).collect()
}

#[test]
fn import_circles_are_detected() {
    // Every way to name an item of another file, in one circle of files.
    let ring = [
        (
            "lib.rs",
            "mod a; mod b; pub use b::{B as Renamed, c::deep::C};",
        ),
        ("a.rs", "use crate::b::B; struct A;"),
        (
            "b/mod.rs",
            "pub mod c; mod d; pub use self::d::*; pub struct B(c::Inner);",
        ),
        (
            "b/c/mod.rs",
            "pub mod deep; pub struct Inner; fn f() -> u32 { super::from_d() }",
        ),
        ("b/c/deep.rs", "pub struct C; fn f() { crate::a::f(); }"),
        (
            "b/d.rs",
            "mod x { use super::super::c::{self, deep::C}; } pub fn from_d() {}",
        ),
    ];
    assert_eq!(
        circles_of(&ring),
        ["a.rs b/c/deep.rs b/c/mod.rs b/d.rs b/mod.rs"]
    );
    // By a re-export under another name, and back by a name that the parent has only imported.
    let renamed = [
        ("lib.rs", "mod a; mod b; pub use a::A as Z;"),
        ("a.rs", "use crate::b::B; pub struct A;"),
        ("b/mod.rs", "mod c; use crate::Z; pub struct B(c::C);"),
        ("b/c.rs", "use super::Z; pub struct C;"),
    ];
    assert_eq!(circles_of(&renamed), ["a.rs b/c.rs b/mod.rs"]);
}

#[test]
fn no_false_import_circle_is_detected() {
    for files in [
        // Declarations and re-exports of a parent.
        &[
            ("lib.rs", "mod a; pub use a::A;"),
            ("a.rs", "pub struct A; impl crate::A { }"),
        ][..],
        &[
            (
                "b/mod.rs",
                "mod c; pub(crate) use self::c::C; pub struct B;",
            ),
            ("b/c.rs", "use super::B; pub struct C;"),
        ],
        // Tests, in the file and in one of their own.
        &[
            (
                "a.rs",
                "pub struct A; #[cfg(test)] mod tests { use crate::b::B; }",
            ),
            ("b.rs", "use crate::a::A; pub struct B;"),
        ],
        &[
            (
                "a/mod.rs",
                "pub struct A; #[cfg(all(test, not(loom)))] mod tests;",
            ),
            ("a/tests.rs", "use crate::b::B;"),
            ("b.rs", "use crate::a::{A, tests};"),
        ],
        &[
            (
                "a.rs",
                "pub struct A; #[cfg(test)] #[allow(unused)] use crate::b::{B}; fn f() {}",
            ),
            ("b.rs", "use crate::a::A; pub struct B;"),
        ],
        // Names of other crates that are re-exported by a module here.
        &[
            (
                "a/mod.rs",
                "mod b; pub use other::Word; pub struct A(b::B);",
            ),
            ("a/b.rs", "use super::Word; pub struct B;"),
        ],
        // Visibilities.
        &[
            ("a/mod.rs", "mod b; pub struct A(b::B);"),
            ("a/b.rs", "pub(in crate::a) struct B;"),
        ],
        // Names in comments and strings only.
        &[
            (
                "a.rs",
                "// crate::b::B\nconst TEXT: &str = \"crate::b::B\";",
            ),
            ("b.rs", "use crate::a::TEXT;"),
        ],
    ] {
        assert_eq!(circles_of(files), Vec::<String>::new(), "{files:?}");
    }
}

#[test]
fn code_that_is_not_test_only_is_checked() {
    for attribute in [
        "#[cfg(not(test))]",
        "#[cfg(any(test, loom))]",
        "#[allow(dead_code)]",
    ] {
        let source = format!("pub struct A; {attribute} use crate::b::B;");
        let files = [
            ("a.rs", source.as_str()),
            ("b.rs", "use crate::a::A; pub struct B;"),
        ];
        assert_eq!(circles_of(&files), ["a.rs b.rs"], "{attribute}");
    }
}
