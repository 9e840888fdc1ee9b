//! Code that only tests use is in files and folders called `tests` or `testing`, and these contain nothing else.

use std::collections::BTreeMap;

use crate::files::production_files;
use crate::sources_of;
use crate::tables::CRATES;

/// The files that are in the wrong place.
fn misplaced(sources: &BTreeMap<String, String>) -> Vec<String> {
    let product = production_files(sources);
    let is_place_for_tests =
        |part: &str| ["tests", "testing", "tests.rs", "testing.rs"].contains(&part);
    let wrong = sources.keys().filter_map(|file| {
        match (
            product.contains_key(file),
            file.split('/').any(is_place_for_tests),
        ) {
            (true, true) => Some(format!("{file}: the product has what is called tests")),
            (false, false) => Some(format!("{file}: only tests have it")),
            _ => None,
        }
    });
    wrong.collect()
}

#[test]
fn test_code_is_kept_in_test_folders() {
    let mut found = Vec::new();
    for package in CRATES {
        let wrong = misplaced(&sources_of(package.folder));
        found.extend(
            wrong
                .iter()
                .map(|line| format!("{}/{line}", package.folder)),
        );
    }
    assert!(found.is_empty(), "{}", found.join("\n"));
}

#[test]
fn misplaced_code_is_detected() {
    let found = |attribute: &str, module: &str| {
        let root = format!("{attribute} mod {module}; struct A;");
        let sources = [
            ("lib.rs".to_owned(), root),
            (format!("{module}/mod.rs"), String::new()),
        ];
        misplaced(&BTreeMap::from(sources)).len()
    };
    for only_tests in [
        "#[cfg(test)]",
        "#[cfg(all(test, not(loom)))]",
        "#[cfg(fuzzing)] pub",
    ] {
        assert_eq!(found(only_tests, "fake"), 1, "{only_tests}");
        assert_eq!(found(only_tests, "tests"), 0, "{only_tests}");
        assert_eq!(found(only_tests, "testing"), 0, "{only_tests}");
    }
    assert_eq!(found("", "fake"), 0);
    assert_eq!(found("", "testing"), 1);
}
