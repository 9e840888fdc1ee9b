//! The outcomes of the litmus tests, counters whose lines are written back at once, and the versions of all keys of the store against those of the same puts made one after the other.

use std::os::unix::process::CommandExt;
use std::time::{Duration, Instant};

use serde_json::Value;

use super::{Drawing, Launcher, example, example_with_fault, folder, program};

const LITMUS_RANKS: u64 = 4;
/// More than the cores: a rank that is paused between two messages lets others overtake it.
const RANKS: u64 = 8;
const KEYS: u64 = 200;
const GETS: [u64; 2] = [20, 80];
const SEED: u64 = 7;

fn run(launcher: Launcher, ranks: u64, name: &str, arguments: &[&str]) -> Value {
    let file = folder(name).join("out.json");
    let arguments = [arguments, &["--out", file.to_str().unwrap()]].concat();
    let output = launcher.example(ranks as usize, "remote_memory", &arguments);
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {error}", output.status);
    serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap()
}

#[test]
fn no_litmus_test_has_a_forbidden_outcome() {
    // 256 lines and caches of 32: lines are evicted in the middle of a test, too.
    check_litmus(litmus_rounds(), &["--batch", "64", "--cache-lines", "32"]);
    let batch = ["--batch", "64", "--cache-lines", "32"];
    let reordered = [&batch[..], &["--reorder", "0.02"]].concat();
    check_litmus(rounds_with_faults(), &reordered);
}

/// A number that the environment sets. `scripts/test full` sets more: more than a million rounds of all litmus tests together.
fn from_environment(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).map_or(otherwise, |number| number.parse().unwrap())
}

fn litmus_rounds() -> u64 {
    from_environment("DOORBELL_LITMUS_ROUNDS", 256)
}

/// Packets that are held back make a round many times longer, so there are fewer.
fn rounds_with_faults() -> u64 {
    (litmus_rounds() / 32).max(256).next_multiple_of(64)
}

/// Gets and puts of each rank, for each share of gets and each method.
fn operations() -> u64 {
    from_environment("DOORBELL_STORE_OPERATIONS", 400)
}

/// The home of the data is slow. Without the fence, the reader then often sees the flag and old data: a fence that does nothing would show in `message passing, fence`, and an atomic
/// without its fence in `message passing, atomic`.
#[test]
fn without_a_fence_messages_are_passed_in_the_wrong_order() {
    let delayed = ["--batch", "16", "--delay-us", "1000"];
    // More rounds than only to find nothing: each of the two must have been relaxed.
    let counts = check_litmus(2 * rounds_with_faults(), &delayed);
    let relaxed = |name: &str| counts[name].as_u64().unwrap();
    // 73 and more of 512 messages were relaxed, however busy the machine was.
    assert!(relaxed("message passing") >= 8, "{counts}");
    assert!(relaxed("store buffering") >= 1, "{counts}");
}

/// Runs the litmus tests, and returns how often each had an outcome that sequential consistency would forbid.
fn check_litmus(rounds: u64, arguments: &[&str]) -> Value {
    let text = rounds.to_string();
    let all = ["--rounds", &text, "--operations", "0", "--increments", "0"];
    let name = format!("remote_memory_litmus{}", arguments.join(""));
    let out = run(
        Launcher::Itself,
        LITMUS_RANKS,
        &name,
        &[&all[..], arguments].concat(),
    );
    let tests = out["litmus"].as_array().unwrap();
    assert_eq!(tests.len(), 8);
    let mut relaxed = serde_json::Map::new();
    for test in tests {
        let counts = test["counts"].as_object().unwrap();
        let count = |reads: &str| counts.get(reads).map_or(0, |count| count.as_u64().unwrap());
        let sum = counts.values().map(|count| count.as_u64().unwrap());
        assert_eq!(sum.sum::<u64>(), rounds, "{test}");
        // What each test forbids and what is relaxed, once more, and without what the program says of it.
        let (name, mut is_relaxed) = (test["name"].as_str().unwrap(), 0);
        let forbidden = match name {
            "message passing, fence" | "message passing, atomic" => count("0"),
            "store buffering, fence" => count("00"),
            "load buffering" => count("11"),
            "independent reads (IRIW)" => count("00"),
            "one location" => {
                let is_wrong = |reads: &str| {
                    let [a, b, c, d] = reads.as_bytes() else {
                        panic!("{reads}")
                    };
                    let back = |first: u8, second: u8| first != b'0' && second == b'0';
                    back(*a, *b) || back(*c, *d) || ["1221", "2112"].contains(&reads)
                };
                let wrong = counts.iter().filter(|(reads, _)| is_wrong(reads));
                wrong.map(|(_, count)| count.as_u64().unwrap()).sum()
            }
            "message passing" => {
                is_relaxed = count("0");
                0
            }
            "store buffering" => {
                is_relaxed = count("00");
                0
            }
            other => panic!("{other}"),
        };
        assert_eq!(forbidden, 0, "{test}");
        assert_eq!(test["relaxed"], is_relaxed, "{test}");
        relaxed.insert(name.into(), is_relaxed.into());
    }
    relaxed.into()
}

/// A rank that writes a line back and is asked for it meanwhile must not give it away before the home has it: the next owner's write-back would be overwritten.
#[test]
fn no_increment_is_lost_when_lines_are_written_back() {
    for (reorder, increments) in [("0", 3000), ("0.02", 300)] {
        let text = increments.to_string();
        let arguments = [
            "--ranks",
            "8",
            "--rounds",
            "0",
            "--operations",
            "0",
            "--increments",
            &text,
            "--reorder",
            reorder,
        ];
        let name = "remote_memory_counters";
        let out = run(Launcher::Itself, RANKS, name, &arguments);
        assert_eq!(out["counted"], RANKS * increments, "--reorder {reorder}");
    }
}

#[test]
fn every_put_is_there_once_with_caches_and_without() {
    let numbers = [RANKS, KEYS, operations(), SEED].map(|number| number.to_string());
    let [ranks, keys, operations, seed] = &numbers;
    // Few lines: much is evicted.
    let arguments = [
        "--rounds",
        "0",
        // They take seconds with this many ranks, and have a test of their own.
        "--increments",
        "0",
        "--ranks",
        ranks,
        "--keys",
        keys,
        "--operations",
        operations,
        "--seed",
        seed,
        "--gets",
        "20,80",
        "--cache-lines",
        "32",
        "--skew",
        "0.5",
    ];
    for launcher in Launcher::all("every_put_is_there_once_with_caches_and_without") {
        let out = run(launcher, RANKS, "remote_memory_store", &arguments);
        let versions = out["versions"].as_array().unwrap();
        let expected = puts();
        assert_eq!(versions.len(), expected.len());
        for (key, (version, puts)) in versions.iter().zip(&expected).enumerate() {
            let both = serde_json::json!([puts, puts]);
            assert_eq!(*version, both, "{launcher:?}: key {key}");
        }
    }
    // The software ConnectX places the bytes of a write 200 us late, and a later write that is not ordered behind it at once: the lock would be free before the record is there.
    let file = folder("remote_memory_late_writes").join("out.json");
    let direct = ["--methods", "direct", "--out", file.to_str().unwrap()];
    let arguments = [&arguments[..], &direct].concat();
    let output = example_with_fault("late-writes-us=200", "remote_memory", &arguments);
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {error}", output.status);
    let out: Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    let expected: Vec<[u64; 1]> = puts().into_iter().map(|puts| [puts]).collect();
    assert_eq!(out["versions"], serde_json::json!(expected));
}

/// Gets alone: each rank misses each line once at most, when it looks for a key and when it reads it.
#[test]
fn reads_of_lines_in_the_cache_are_hits() {
    let svg = folder("remote_memory_hits").join("store.svg");
    let drawn = ["--svg", svg.to_str().unwrap()];
    let arguments = "--ranks 4 --rounds 0 --increments 0 --keys 50 --operations 2000 --gets 50,100";
    let arguments: Vec<&str> = arguments.split(' ').collect();
    let output = example("remote_memory", &[&arguments[..], &drawn].concat());
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}\n{output:?}");
    let row = |method: &str| -> Vec<&str> {
        let mut rows = text
            .lines()
            .map(|line| line.split_whitespace().collect::<Vec<_>>());
        let row = rows.find(|row| row.starts_with(&["100", "%", method]));
        row.unwrap_or_else(|| panic!("{text}"))
    };
    // 4 ranks, a table of 100 lines, 8000 gets: at least 95 %. Without a cache every get of another rank's line is a READ.
    let hits: u32 = row("cached")[4].parse().unwrap();
    assert!((95..=100).contains(&hits), "{text}");
    let reads: f64 = row("direct")[5].parse().unwrap();
    assert!((0.5..=1.0).contains(&reads), "{text}");
    let drawing = Drawing::read(&svg);
    drawing.has_texts(&["cached", "direct", "Key-value store"]);
    assert!(drawing.count("polyline") >= 4);
}

/// How often each key is put: the operations of all ranks, in any order.
fn puts() -> Vec<u64> {
    let weights: Vec<f64> = (1..=KEYS).map(|k| (k as f64).powf(-0.5)).collect();
    let total: f64 = weights.iter().fold(0.0, |sum, weight| sum + weight);
    let mut puts = vec![0; KEYS as usize];
    for (phase, share) in (0..).zip(GETS) {
        for rank in 0..RANKS {
            let mut state = SEED * (1 << 20) + (phase << 10) + rank;
            for _ in 0..operations() {
                let is_get = split_mix(&mut state) % 100 < share;
                let at = (split_mix(&mut state) >> 11) as f64 / (1_u64 << 53) as f64 * total;
                let mut sum = 0.0;
                let key = weights.iter().position(|weight| {
                    sum += weight;
                    sum > at
                });
                puts[key.unwrap()] += u64::from(!is_get);
            }
        }
    }
    puts
}

fn split_mix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let value = (*state ^ *state >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ value >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ value >> 31
}

/// One key, whose home is one of two ranks. When the other one has ended in the middle of a put, the home must not wait for a whole record for ever.
#[test]
fn rank_that_ends_in_the_middle_of_a_put_is_named() {
    for victim in ["0", "1"] {
        let file = folder("remote_memory_killed").join("said");
        let mut command = std::process::Command::new(program("remote_memory"));
        command.args(["--ranks", "2", "--rounds", "0", "--increments", "0"]);
        command.args(["--methods", "direct", "--keys", "1", "--gets", "100"]);
        command.args(["--operations", "100000000", "--kill", victim]);
        let said = std::fs::File::create(&file).unwrap();
        command.process_group(0);
        let mut running = command.stderr(said).spawn().unwrap();
        let begin = Instant::now();
        let status = loop {
            if let Some(status) = running.try_wait().unwrap() {
                break status;
            }
            if begin.elapsed() > Duration::from_secs(60) {
                // With the rank that goes on.
                let group = format!("-{}", running.id());
                let kill = ["-KILL", "--", &group];
                std::process::Command::new("kill")
                    .args(kill)
                    .status()
                    .unwrap();
                panic!("rank {victim} has ended, and the other one goes on");
            }
            std::thread::sleep(Duration::from_millis(20));
        };
        let said = std::fs::read_to_string(&file).unwrap();
        assert!(!status.success(), "{said}");
        let named = format!("rank {victim} of the group");
        assert!(said.contains(&named), "{said}");
    }
}
