//! The sorted partitions are compared with a sort of all records in this process.

use std::collections::BTreeMap;
use std::path::Path;

use crate::{Launcher, example, folder};

const SPLITS: u64 = 6;
const RECORDS: u64 = 1500;
const PARTITIONS: usize = 7;
const SEED: u64 = 11;

fn mix(state: u64) -> u64 {
    let mut mixed = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

/// All records of the input, as the program's documentation has them, in order.
fn sorted_records() -> Vec<Vec<u8>> {
    let record = |number: u64| {
        let first = mix(SEED ^ mix(number));
        let mut record = first.to_be_bytes().to_vec();
        record.extend_from_slice(&mix(first).to_be_bytes()[..2]);
        record.extend_from_slice(&[0x00, 0x11]);
        record.extend_from_slice(format!("{number:032X}").as_bytes());
        record.extend_from_slice(&[0x88, 0x99, 0xaa, 0xbb]);
        let filler = mix(number).to_be_bytes();
        for at in 0..48 {
            let digit = format!("{:X}", filler[at / 4 % 8] & 15);
            record.extend_from_slice(digit.as_bytes());
        }
        record.extend_from_slice(&[0xcc, 0xdd, 0xee, 0xff]);
        record
    };
    let mut records: Vec<Vec<u8>> = (0..SPLITS * RECORDS).map(record).collect();
    records.sort_by(|a, b| a[..10].cmp(&b[..10]));
    records
}

/// The partitions that the program has written, one behind the other.
fn check_output(out: &Path) {
    let mut parts = BTreeMap::new();
    for entry in std::fs::read_dir(out).unwrap() {
        let entry = entry.unwrap();
        let name = entry.file_name().into_string().unwrap();
        // A rank that was killed may have left one that it was writing.
        if !name.starts_with('.') {
            parts.insert(name, std::fs::read(entry.path()).unwrap());
        }
    }
    let names: Vec<String> = (0..PARTITIONS).map(|p| format!("part-{p:05}")).collect();
    assert!(parts.keys().eq(&names), "{:?}", parts.keys());
    for (name, part) in &parts {
        let records = part.len() / 100;
        let share = (SPLITS * RECORDS) as usize / PARTITIONS;
        assert!(
            (share / 2..share * 2).contains(&records),
            "{name} has {records} records; a fair share is {share}"
        );
    }
    let found: Vec<u8> = parts.into_values().flatten().collect();
    let expected = sorted_records();
    assert_eq!(found.len(), expected.len() * 100);
    for (number, record) in expected.iter().enumerate() {
        assert_eq!(
            found[number * 100..][..100],
            record[..],
            "record {number} of the output"
        );
    }
}

fn arguments(out: &Path) -> Vec<String> {
    [
        ("splits", SPLITS.to_string()),
        ("records", RECORDS.to_string()),
        ("partitions", PARTITIONS.to_string()),
        ("seed", SEED.to_string()),
        // Blocks of some 21,000 bytes are cut into pieces, of which few fit into the bound.
        ("read-bytes", "4000".into()),
        ("batch", "3".into()),
        ("in-flight", "30000".into()),
        ("rounds", "2".into()),
        ("out", out.display().to_string()),
    ]
    .map(|(name, value)| format!("--{name}={value}"))
    .into()
}

/// What the program measured of its last fetch by READ, and of that by messages.
fn check_fetch(text: &str) {
    let line = text.lines().find(|line| line.starts_with("a fetch: "));
    let line = line.unwrap_or_else(|| panic!("{text}"));
    let words: Vec<&str> = line.split([' ', ',']).filter(|w| !w.is_empty()).collect();
    // The number in front of, or behind, these words.
    let before = |word: &str| {
        let at = words.iter().position(|w| *w == word);
        let at = at.unwrap_or_else(|| panic!("{word}: {line}"));
        words[at - 1].parse::<usize>().unwrap()
    };
    let (reads, completions) = (before("READs"), before("completions"));
    // Three pieces have one completion; the last batch from a peer may have fewer.
    let peers = 4 * 3;
    assert!(completions >= reads.div_ceil(3), "{line}");
    assert!(completions <= reads / 3 + peers, "{line}");
    // By READ, and by messages.
    let most = words.windows(2).filter(|two| two[0] == "most");
    let most: Vec<usize> = most.map(|two| two[1].parse().unwrap()).collect();
    assert_eq!(most.len(), 2, "{line}");
    for in_flight in most {
        // More than a batch of 3 pieces of 4000 bytes, and no more than the bound.
        assert!((12_001..=30_000).contains(&in_flight), "{line}");
    }
}

#[test]
fn bound_below_one_batch_is_refused() {
    let run = |in_flight: &str| {
        let shape = ["--read-bytes=4000", "--batch=3", "--records=300"];
        let rest = ["--rounds=1", in_flight];
        example("shuffle", &[&shape[..], &rest[..]].concat())
    };
    let refused = run("--in-flight=11999");
    assert!(!refused.status.success(), "{refused:?}");
    let error = String::from_utf8_lossy(&refused.stderr);
    assert!(
        error.contains("at least --batch times --read-bytes, 12000 bytes"),
        "{error}"
    );
    let least = run("--in-flight=12000");
    assert!(least.status.success(), "{least:?}");
    let text = String::from_utf8_lossy(&least.stdout);
    let (_, line) = text.split_once(", at most ").unwrap();
    let (most, line) = line.split_once(' ').unwrap();
    // The blocks are of any length, so a batch is shorter than it may be.
    assert!(
        (1..=12_000).contains(&most.parse::<u64>().unwrap()),
        "{text}"
    );
    assert!(
        line.starts_with("bytes in flight for a rank, of 12000 that may be"),
        "{text}"
    );
    let (_, by_messages) = line.split_once(", and at most ").unwrap();
    let (most, _) = by_messages.split_once(' ').unwrap();
    assert!(
        (1..=12_000).contains(&most.parse::<u64>().unwrap()),
        "{text}"
    );
}

#[test]
fn output_is_the_sorted_input_by_either_method() {
    for launcher in Launcher::all("output_is_the_sorted_input_by_either_method") {
        let out = folder("shuffle");
        let arguments = arguments(&out);
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let output = launcher.example(4, "shuffle", &arguments);
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{text}\n{output:?}");
        // The program compares the bytes of the replies with those of the READs.
        assert!(text.contains("request and reply"), "{text}");
        check_fetch(&text);
        check_output(&out);
    }
}

#[test]
fn killed_mapper_is_named_and_its_splits_are_mapped_again() {
    let out = folder("shuffle_killed");
    let mut arguments = arguments(&out);
    arguments.push("--kill=2".into());
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let output = example("shuffle", &arguments);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}\n{output:?}");
    // Rank 3 was reading from it.
    let failed = text
        .lines()
        .find(|line| line.starts_with("rank 3: fetch of split "));
    let failed = failed.unwrap_or_else(|| panic!("{text}"));
    assert!(
        failed.contains("from rank 2: rank 2 of the group"),
        "{failed}"
    );
    // Splits 2 (and 6, if there were one) were the killed rank's: somebody else maps it the second time.
    let again = text
        .lines()
        .filter(|line| line.contains("maps splits [2]"))
        .filter(|line| !line.starts_with("rank 2:"));
    assert_eq!(again.count(), 1, "{text}");
    check_output(&out);
}

/// Its partitions are in their files, and no other rank knows that: they are sorted again, from splits that are mapped again.
#[test]
fn partitions_of_a_rank_that_was_killed_when_it_had_sorted_are_sorted_again() {
    let out = folder("shuffle_killed_sorted");
    let mut arguments = arguments(&out);
    arguments.extend(["--kill=2", "--kill-at=sorted"].map(str::to_owned));
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let output = example("shuffle", &arguments);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}\n{output:?}");
    // Of seven partitions and four ranks, rank 2 has two, of which two others have one each the second time.
    let lines = |start: &str, end: &str| {
        let is_it = |line: &&str| line.starts_with(start) && line.ends_with(end);
        text.lines().filter(is_it).count()
    };
    assert_eq!(lines("rank 2: ", "sorts partitions [2, 6]"), 1, "{text}");
    for partition in ["[2]", "[6]"] {
        assert_eq!(
            lines("rank ", &format!("sorts partitions {partition}")),
            1,
            "{text}"
        );
    }
    assert_eq!(lines("rank ", "maps splits [2]"), 2, "{text}");
    check_output(&out);
}
