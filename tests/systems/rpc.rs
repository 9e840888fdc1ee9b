//! The answers of all methods against the sum that a single thread computes, and the crossings against those that follow from the table.

use std::process::Command;

use serde_json::Value;

use super::{Drawing, Launcher, example, example_with_fault, folder, program, waived};

const SIZES: [u64; 3] = [8, 1000, 20_000];
const CLIENTS: [u64; 2] = [1, 3];
const CALLS: u64 = 12;
const METHODS: [&str; 5] = ["two-sided", "events", "one-sided", "read-based", "adaptive"];

#[test]
fn every_method_gives_the_answers_and_crossings_follow_from_the_table() {
    let test = "every_method_gives_the_answers_and_crossings_follow_from_the_table";
    for launcher in Launcher::all(test) {
        check_answers_and_crossings(launcher);
    }
}

fn check_answers_and_crossings(launcher: Launcher) {
    let folder = folder("rpc");
    let [file, answers, svg] = ["out.json", "answers", "rpc.svg"].map(|name| folder.join(name));
    let arguments = [
        "--sizes",
        "8,1000,20000",
        "--clients",
        "1,3",
        "--calls",
        "12",
        "--margin",
        "10",
        "--out",
        file.to_str().unwrap(),
        "--answers",
        answers.to_str().unwrap(),
        "--svg",
        svg.to_str().unwrap(),
    ];
    let output = launcher.example(4, "rpc", &arguments);
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {error}", output.status);
    let out: Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    let cells = out["cells"].as_array().unwrap();
    assert_eq!(cells.len(), SIZES.len() * CLIENTS.len() * METHODS.len());
    for cell in cells {
        let (size, clients) = (number(cell, "size"), number(cell, "clients"));
        assert_eq!(
            cell["sum"].as_u64().unwrap(),
            sum_of_answers(size, clients),
            "{cell}"
        );
        assert!(cell["latency"].as_u64().unwrap() > 0, "{cell}");
    }
    let mut expected = String::new();
    for clients in CLIENTS {
        for size in SIZES {
            let sum = sum_of_answers(size, clients);
            expected
                .extend(METHODS.map(|method| format!("{clients} {size} {method} {sum:016x}\n")));
        }
    }
    assert_eq!(std::fs::read_to_string(answers).unwrap(), expected);
    for name in ["rpc.svg", "rpc.clients.svg", "rpc.cpu.svg"] {
        let drawing = Drawing::read(&folder.join(name));
        drawing.has_texts(&METHODS);
        // A line of each method in the chart and one in the legend, and those of the axes.
        assert!(drawing.count("polyline") >= 2 * METHODS.len(), "{name}");
    }
    let mut expected = Vec::new();
    for (metric, less_is_better) in [("latency", true), ("throughput", false), ("cpu", true)] {
        for (over, other) in [("size", "clients"), ("clients", "size")] {
            for (first, second) in pairs() {
                for fixed in if over == "size" {
                    &CLIENTS[..]
                } else {
                    &SIZES[..]
                } {
                    let at = |method: &str, place: u64| {
                        let is_it = |cell: &&Value| {
                            cell["method"] == method
                                && number(cell, over) == place
                                && number(cell, other) == *fixed
                        };
                        cells.iter().find(is_it).unwrap()[metric].as_f64().unwrap()
                    };
                    // Those places where one of the two is better by the margin, and whether it is the first.
                    let places = if over == "size" {
                        &SIZES[..]
                    } else {
                        &CLIENTS[..]
                    };
                    let clear: Vec<(u64, bool)> = places
                        .iter()
                        .map(|place| (*place, at(first, *place), at(second, *place)))
                        .filter(|(_, a, b)| a / b >= 1.1 || b / a >= 1.1)
                        .map(|(place, a, b)| (place, if less_is_better { a < b } else { a > b }))
                        .collect();
                    for two in clear.windows(2).filter(|two| two[0].1 != two[1].1) {
                        let (before, after) = if two[0].1 {
                            (first, second)
                        } else {
                            (second, first)
                        };
                        let over = if over == "size" { "bytes" } else { over };
                        expected.push(format!(
                            "{metric} {over} {fixed} {before} {after} {} {}",
                            two[0].0, two[1].0
                        ));
                    }
                }
            }
        }
    }
    let text = |found: &Value| {
        let name = |key: &str| found[key].as_str().unwrap().to_owned();
        let (fixed, from, to) = (
            number(found, "fixed"),
            number(found, "from"),
            number(found, "to"),
        );
        format!(
            "{} {} {fixed} {} {} {from} {to}",
            name("metric"),
            name("over"),
            name("before"),
            name("after")
        )
    };
    let mut found: Vec<String> = out["crossings"]
        .as_array()
        .unwrap()
        .iter()
        .map(text)
        .collect();
    found.sort();
    expected.sort();
    assert_eq!(found, expected);
}

/// Packets of the clients take three milliseconds. In that time the requests of all of them come, and a side that may sleep has polled for as long as it does.
#[test]
fn server_reads_several_requests_at_once_and_only_some_methods_sleep() {
    let file = folder("rpc_delayed").join("out.json");
    let arguments = [
        "--sizes",
        "8,20000",
        "--clients",
        "3",
        "--calls",
        "24",
        "--delay-us",
        "3000",
        "--out",
        file.to_str().unwrap(),
    ];
    let output = Launcher::Itself.example(4, "rpc", &[&["--ranks", "4"], &arguments[..]].concat());
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {error}", output.status);
    let out: Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    for cell in out["cells"].as_array().unwrap() {
        let (size, reads) = (number(cell, "size"), number(cell, "most_reads"));
        let sleeps = cell["sleeps"].as_f64().unwrap();
        let may_sleep = ["events", "adaptive"].contains(&cell["method"].as_str().unwrap());
        if may_sleep {
            assert!(sleeps >= 0.5, "{cell}");
        } else {
            assert_eq!(sleeps, 0.0, "{cell}");
        }
        if cell["method"] == "adaptive" && size > 4096 {
            assert!((2..=3).contains(&reads), "{cell}");
        } else {
            assert_eq!(reads, 0, "{cell}");
        }
    }
}

/// The software ConnectX places the bytes of a write 200 us late, and a later write that is not ordered behind it at once: the word would come before the bytes.
#[test]
fn word_is_not_there_before_the_bytes_of_late_writes() {
    let file = folder("rpc_late_writes").join("out.json");
    let arguments = [
        "--methods",
        "one-sided,read-based",
        "--sizes",
        "8,1000,20000",
        "--clients",
        "1,3",
        "--calls",
        "12",
        "--out",
        file.to_str().unwrap(),
    ];
    let output = example_with_fault("late-writes-us=200", "rpc", &arguments);
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {error}", output.status);
    let out: Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    let cells = out["cells"].as_array().unwrap();
    assert_eq!(cells.len(), SIZES.len() * CLIENTS.len() * 2);
    for cell in cells {
        let sum = sum_of_answers(number(cell, "size"), number(cell, "clients"));
        assert_eq!(cell["sum"].as_u64().unwrap(), sum, "{cell}");
    }
}

/// One client and the server have a core each, so `adaptive` may poll. How long it does so depends on the load of the machine, and so does whether it sleeps then; that it polls at all does not.
#[test]
fn adaptive_polls_before_it_sleeps() {
    let file = folder("rpc_polled").join("out.json");
    let arguments =
        "--ranks 2 --methods two-sided,events,adaptive --sizes 8 --clients 1 --calls 200 --out";
    let mut arguments: Vec<&str> = arguments.split(' ').collect();
    arguments.push(file.to_str().unwrap());
    let output = Launcher::Itself.example(2, "rpc", &arguments);
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {error}", output.status);
    let out: Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    let cores = std::thread::available_parallelism().unwrap().get();
    for cell in out["cells"].as_array().unwrap() {
        assert_eq!(cell["crowded"], cores < 2, "{cell}");
        let polled = cell["polled"].as_f64().unwrap();
        if cell["method"] == "events" {
            assert_eq!(polled, 0.0, "{cell}");
        } else {
            // A wait does not poll if the answer is there at once, or if the thread has lost its core for as long as it would poll.
            assert!(polled >= 0.1, "{cell}");
        }
    }
}

/// A call takes more than 300 us. With a core for each thread `adaptive` polls for up to twice as long as calls have taken lately; with one core for both it sleeps after 20 us.
#[test]
fn adaptive_sleeps_early_where_threads_share_a_core() {
    let test = "adaptive_sleeps_early_where_threads_share_a_core";
    if std::thread::available_parallelism().unwrap().get() < 2 {
        return waived(test, "this machine has one core");
    }
    let file = folder("rpc_crowded").join("out.json");
    // Whether the program found more threads than cores, and its sleeps for each call.
    let run = |prefix: &[&str]| {
        let words = "--ranks 2 --methods adaptive --sizes 8 --clients 1 --calls 200 --delay-us 300";
        let mut command = match prefix {
            [] => Command::new(program("rpc")),
            [first, others @ ..] => {
                let mut command = Command::new(first);
                command.args(others).arg(program("rpc"));
                command
            }
        };
        let command = command.args(words.split(' ')).arg("--out").arg(&file);
        let output = command.output().unwrap();
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{}: {error}", output.status);
        let out: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
        let cell = &out["cells"][0];
        (cell["crowded"].as_bool(), cell["sleeps"].as_f64().unwrap())
    };
    // A thread that has lost its core finds that its time for polling is over, or what it waits for: some tries, for machines with other work.
    let found = |prefix: &[&str], crowded: bool, is_it: fn(f64) -> bool| {
        let tries = (0..10).map(|_| run(prefix));
        tries
            .inspect(|(is_crowded, _)| assert_eq!(*is_crowded, Some(crowded)))
            .any(|(_, sleeps)| is_it(sleeps))
    };
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let cores = status
        .lines()
        .find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
    let core = cores.unwrap().trim().split([',', '-']).next().unwrap();
    assert!(found(&["taskset", "-c", core], true, |sleeps| sleeps >= 1.0));
    assert!(found(&[], false, |sleeps| sleeps < 0.5));
}

/// The most clients that the figures have.
#[test]
fn every_method_serves_32_clients() {
    let file = folder("rpc_32").join("out.json");
    let arguments = "--sizes 8 --clients 32 --calls 12 --out";
    let mut arguments: Vec<&str> = arguments.split(' ').collect();
    arguments.push(file.to_str().unwrap());
    let output = example("rpc", &arguments);
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {error}", output.status);
    let out: Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    let cells = out["cells"].as_array().unwrap();
    let sums: Vec<Option<u64>> = cells.iter().map(|cell| cell["sum"].as_u64()).collect();
    assert_eq!(sums, [Some(sum_of_answers(8, 32)); METHODS.len()]);
}

/// The clients of three ranks begin 200 ms after each other, and each is done long before the next one begins: all calls together take as long as from the first begin to
/// the last end.
#[test]
fn throughput_is_that_of_ranks_one_after_the_other() {
    // Three calls, and at least 0.4 s between the begins.
    let throughput = throughput_of_staggered(3, "two-sided", 200_000, 60);
    assert!((0.1..=3.0 / 0.4).contains(&throughput), "{throughput}");
}

/// The clients of each further rank begin 4 s after those of the one before. Those of the first rank wait for longer than a barrier of the group does, 10 s here, and they do not fail.
#[test]
fn ranks_that_are_done_wait_for_the_others() {
    // Four calls in more than 10 s.
    let throughput = throughput_of_staggered(4, "events", 4_000_000, 10);
    assert!((0.01..=4.0 / 10.0).contains(&throughput), "{throughput}");
}

/// Calls a second of that many clients, each in a rank of its own, with one call each, of which each begins so long after the one before. A barrier of the group has this limit.
fn throughput_of_staggered(clients: u32, method: &str, stagger_us: u32, limit_s: u32) -> f64 {
    let file = folder(&format!("rpc_staggered_{clients}")).join("out.json");
    let numbers = [clients + 1, clients, stagger_us, limit_s];
    let [ranks, clients, stagger_us, limit_s] = numbers.map(|n| n.to_string());
    let arguments = [
        "--ranks",
        &ranks,
        "--methods",
        method,
        "--sizes",
        "8",
        "--clients",
        &clients,
        "--calls",
        &clients,
        "--stagger-us",
        &stagger_us,
        "--group-limit-s",
        &limit_s,
        "--out",
        file.to_str().unwrap(),
    ];
    let output = Launcher::Itself.example(ranks.parse().unwrap(), "rpc", &arguments);
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {error}", output.status);
    let out: Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    out["cells"][0]["throughput"].as_f64().unwrap()
}

fn pairs() -> Vec<(&'static str, &'static str)> {
    let behind = |at: usize| {
        METHODS[at + 1..]
            .iter()
            .map(move |second| (METHODS[at], *second))
    };
    (0..METHODS.len()).flat_map(behind).collect()
}

fn number(value: &Value, key: &str) -> u64 {
    value[key].as_u64().unwrap()
}

/// What the answers to all calls add up to.
fn sum_of_answers(size: u64, clients: u64) -> u64 {
    let mut sum = 0_u64;
    for client in 0..clients {
        for call in 0..CALLS.div_ceil(clients) {
            let seed = (client << 40) ^ (size << 16) ^ call;
            for at in 0..size {
                let word = (seed ^ ((at / 8) << 20))
                    .wrapping_mul(0x9e37_79b9_7f4a_7c15)
                    .rotate_left(23);
                let request = (word >> (8 * (at % 8))) as u8;
                let answer = request.wrapping_mul(5).wrapping_add((at as u8) ^ 0x5a);
                sum = sum.wrapping_add(u64::from(answer) * (at + 1));
            }
        }
    }
    sum
}
