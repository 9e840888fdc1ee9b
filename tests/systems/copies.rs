//! What each path brings against the file that was sent, and how often it copied each byte.

use serde_json::Value;

use super::{Launcher, folder};

const CHUNK: u64 = 1000;

#[test]
fn every_path_brings_the_file_with_as_many_copies_as_it_says() {
    let test = "every_path_brings_the_file_with_as_many_copies_as_it_says";
    for launcher in Launcher::all(test) {
        check_bytes_and_copies(launcher);
    }
}

fn check_bytes_and_copies(launcher: Launcher) {
    let folder = folder("copies");
    let (input, out) = (folder.join("input"), folder.join("out.json"));
    // No whole number of chunks, and more of them than slots.
    let bytes: Vec<u8> = (0..9_731_u32).map(|at| ((at * at) >> 5) as u8).collect();
    std::fs::write(&input, &bytes).unwrap();
    let [input, file] = [&input, &out].map(|path| path.to_str().unwrap());
    let arguments = [
        "--input",
        input,
        "--out",
        file,
        "--transfers",
        "3",
        "--chunk-bytes",
        "1000",
        "--slots",
        "2",
    ];
    let output = launcher.example(2, "copies", &arguments);
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {error}", output.status);
    let rows: Value = serde_json::from_slice(&std::fs::read(&out).unwrap()).unwrap();
    let expected = [
        ("staged", 3),
        ("shared", 2),
        ("registered", 0),
        ("direct", 0),
    ];
    assert_eq!(rows.as_array().unwrap().len(), expected.len());
    for (row, (path, copies)) in rows.as_array().unwrap().iter().zip(expected) {
        assert!(
            std::fs::read(out.with_extension(path)).unwrap() == bytes,
            "{path}: other bytes"
        );
        assert_eq!(row["path"], path);
        let (len, transfers) = (bytes.len() as u64, 3);
        assert_eq!(row["copied_bytes"], copies * len * transfers, "{path}");
        assert_eq!(
            row["copies"],
            copies * len.div_ceil(CHUNK) * transfers,
            "{path}"
        );
    }
}
