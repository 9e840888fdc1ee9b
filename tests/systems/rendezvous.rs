//! The weights are compared with those of a loop without ranks, bit by bit.

use crate::{Launcher, example, folder};

const ELEMENTS: usize = 900;
const TENSORS: usize = 4;
const STEPS: usize = 12;
const WORKERS: u32 = 3;

/// The training, as the program's documentation has it.
fn trained() -> Vec<f32> {
    let mut weights = Vec::new();
    let mut len = ELEMENTS;
    for tensor in 0..TENSORS {
        for element in 0..len {
            let mut weight = 0.0_f32;
            for _ in 0..STEPS {
                let mut sum = 0.0_f32;
                for worker in 1..=WORKERS as usize {
                    let target = ((worker * 31 + tensor * 7 + element) % 1000) as f32 / 100.0;
                    sum += weight - target;
                }
                weight -= 0.25 * sum / WORKERS as f32;
            }
            weights.push(weight);
        }
        len = len * 2 / 3;
    }
    weights
}

fn arguments() -> Vec<String> {
    [
        ("ranks", WORKERS as usize + 1),
        ("tensors", TENSORS),
        ("elements", ELEMENTS),
        ("steps", STEPS),
    ]
    .map(|(name, value)| format!("--{name}={value}"))
    .into()
}

#[test]
fn weights_are_those_of_a_loop_and_keys_mean_what_tensorflow_says() {
    let test = "weights_are_those_of_a_loop_and_keys_mean_what_tensorflow_says";
    for launcher in Launcher::all(test) {
        check_weights_and_keys(launcher);
    }
}

/// With an asterisk in the place of each word of 16 hexadecimal digits.
fn without_incarnations(text: &str) -> String {
    let is_one = |word: &str| word.len() == 16 && word.bytes().all(|b| b.is_ascii_hexdigit());
    let words = text.split_inclusive([' ', ';', '\n']).map(|part| {
        let word = part.trim_end_matches([' ', ';', '\n']);
        if is_one(word) {
            part.replace(word, "*")
        } else {
            part.to_owned()
        }
    });
    words.collect()
}

fn check_weights_and_keys(launcher: Launcher) {
    let out = folder("rendezvous").join("weights");
    let mut arguments = arguments();
    arguments.push(format!("--out={}", out.display()));
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let output = launcher.example(WORKERS as usize + 1, "rendezvous", &arguments);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}\n{output:?}");

    let found = std::fs::read(&out).unwrap();
    let found: Vec<f32> = found
        .as_chunks()
        .0
        .iter()
        .map(|bytes| f32::from_le_bytes(*bytes))
        .collect();
    let expected = trained();
    assert_eq!(found.len(), expected.len());
    for (element, (found, expected)) in found.iter().zip(&expected).enumerate() {
        assert_eq!(found.to_bits(), expected.to_bits(), "weight {element}");
    }

    // Incarnations are random: what begins with one goes on behind it.
    let text = without_incarnations(&text);
    for line in [
        "READ+copy: received before and after their sends",
        "READ: cancelled when its tensor was on its way",
        "READ+copy: cancelled when its tensor was on its way",
        "message: cancelled when its tensor was on its way",
        "another incarnation: step 9 was aborted: the request is for incarnation * of its producer, which is * and was probably restarted",
        "READ: received before and after their sends",
        "message: received before and after their sends",
        "/task:0;*;/task:1;a;3: step 3 was aborted: out of memory",
        "/task:0;*;/task:1;b;3: step 3 was aborted: out of memory",
        "/task:0;*;/task:1;a;3, sent later: step 3 was aborted: out of memory",
        "/task:0;*;/task:1;c;4: received",
        "/task:0;*;/task:1;a;3, asked later: step 3 was aborted: out of memory",
        "/task:0;*;/task:1;read;13, being read: step 13 was aborted: behind a READ",
        "200 answers were dropped",
        "wrong key: `/task:0;*;/task:1;;16` is no key: it has no name",
        "wrong key: `/task:0;*;/task:1;a;b;16` is no key: it has not five parts",
        "/task:0;*;/task:1;long;7: 1014 of 1200 bytes of the reason",
        "waiting when its producer ends the step: step 5 was aborted: it is over",
        "asking when the producer has ended the step: step 5 was aborted: it is over",
        "waiting when its consumer ends the step: step 5 was aborted: it is over",
        "beginning behind the end of the step: step 5 was aborted: it is over",
        "cancelled: the receive of /task:0;*;/task:1;x;6 was cancelled",
        "/task:0;*;/task:1;x;6: received behind the cancelled receive",
        "/task:0;*;/task:1;dead;6, READ: dead",
        "/task:0;*;/task:1;dead;6, message: dead",
    ] {
        assert!(
            text.lines().any(|l| l == line),
            "`{line}` is not in\n{text}"
        );
    }

    // Each step sends each tensor to each worker and back; a copy at each end if it goes in a message.
    let transfers = 2 * STEPS * TENSORS * WORKERS as usize;
    let columns = |name: &str| -> Vec<String> {
        let mut rows = text.lines().filter(|line| line.starts_with(name));
        let row = rows.next_back().unwrap_or_else(|| panic!("{text}"));
        row.split_whitespace().map(str::to_owned).collect()
    };
    // Besides the program's own count of copies: the READs that went from where one application had a tensor to where the other one was given it.
    for (name, copies, in_place) in [
        ("READ ", 0, transfers),
        ("READ+copy ", transfers, 0),
        ("message ", 2 * transfers, 0),
    ] {
        let row = columns(name);
        assert_eq!(row[4], transfers.to_string(), "received: {row:?}");
        assert_eq!(row[5], copies.to_string(), "copies: {row:?}");
        assert_eq!(row[9], in_place.to_string(), "in place: {row:?}");
    }
}

#[test]
fn receives_from_a_killed_rank_fail_and_name_it() {
    let mut arguments = arguments();
    arguments.push("--kill=2".into());
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let output = example("rendezvous", &arguments);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}\n{output:?}");
    for rank in [0, 1, 3] {
        let start = format!("rank {rank}: ");
        let line = text.lines().find(|line| line.starts_with(&start));
        let line = line.unwrap_or_else(|| panic!("rank {rank} says nothing:\n{text}"));
        assert!(line.contains("rank 2 of the group"), "{line}");
    }
}
