//! The replicas' copies are compared with the file that was written.

use std::path::Path;

use std::process::{Child, Command, Stdio};

use crate::{Launcher, folder, free_port, rank_by_hand, waived};

/// Not a multiple of the length of a packet.
const LEN: usize = 1_000_003;
/// Of 7000 bytes.
const PACKETS: u32 = 143;
/// So many packets of the client may be unacknowledged.
const WINDOW: u32 = 10;

/// Writes a file, whose bytes this returns, as a block with these further arguments. Returns what the program says, too.
fn write(launcher: Launcher, test: &str, further: &[&str]) -> (Vec<u8>, String) {
    let folder = folder(test);
    let file = folder.join("block");
    let mut state = 0x1234_5678_u32;
    let content: Vec<u8> = (0..LEN)
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 24) as u8
        })
        .collect();
    std::fs::write(&file, &content).unwrap();
    let options = [
        format!("--file={}", file.display()),
        format!("--out={}", folder.join("out").display()),
        "--packet-bytes=7000".into(),
        format!("--window={WINDOW}"),
        "--rounds=2".into(),
    ];
    let mut arguments: Vec<&str> = options.iter().map(String::as_str).collect();
    arguments.extend(further);
    let output = launcher.example(4, "block_write", &arguments);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{text}\n{output:?}");
    (content, text)
}

fn check_replicas(test: &str, content: &[u8], replicas: &[u32]) {
    let out = Path::new(env!("CARGO_TARGET_TMPDIR"))
        .join("systems")
        .join(test)
        .join("out");
    let mut names: Vec<String> = std::fs::read_dir(&out)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    let expected: Vec<String> = replicas.iter().map(|r| format!("replica-{r}")).collect();
    assert_eq!(names, expected);
    for name in names {
        let copy = std::fs::read(out.join(&name)).unwrap();
        assert_eq!(copy.len(), content.len(), "{name}");
        let wrong = copy.iter().zip(content).position(|(a, b)| a != b);
        assert_eq!(wrong, None, "the first byte of {name} that is not right");
    }
}

/// For each chain the packets that the client has posted to it, and the most that were not acknowledged.
fn posted(text: &str) -> Vec<(u32, u32)> {
    let said = text.lines().filter(|line| line.contains(": posted "));
    let numbers = |line| {
        (
            number_after(line, "rank 0: posted "),
            number_after(line, " packets, at most "),
        )
    };
    said.map(numbers).collect()
}

/// The number behind the first place with these words.
fn number_after(text: &str, words: &str) -> u32 {
    let (_, rest) = text
        .split_once(words)
        .unwrap_or_else(|| panic!("`{words}` is not in {text}"));
    let end = rest.find(|c: char| !c.is_ascii_digit());
    rest[..end.unwrap_or(rest.len())].parse().unwrap()
}

/// CRC-32C, bit by bit.
fn crc32c(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(u32::MAX, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| {
            (crc >> 1) ^ if crc & 1 == 1 { 0x82f6_3b78 } else { 0 }
        })
    })
}

#[test]
fn every_replica_has_the_block() {
    assert_eq!(
        crc32c(b"123456789"),
        0xe306_9283,
        "the check value of CRC-32C"
    );
    for launcher in Launcher::all("every_replica_has_the_block") {
        let (content, text) = write(launcher, "block_write", &[]);
        check_replicas("block_write", &content, &[1, 2, 3]);
        let sum = format!("sum {:08x}", crc32c(&content));
        assert!(text.contains(&sum), "{sum} is not in\n{text}");
        // The program compares what TCP brings with what RDMA brings.
        assert!(text.contains("\nTCP "), "{text}");
        let [(packets, most)] = posted(&text)[..] else {
            panic!("{text}");
        };
        assert_eq!(packets, PACKETS, "{text}");
        assert!((2..=WINDOW).contains(&most), "{text}");
    }
}

#[test]
fn chain_is_made_again_without_a_replica_that_was_killed() {
    for (victim, others) in [(1, [2, 3]), (2, [1, 3]), (3, [1, 2])] {
        let test = format!("block_write_without_{victim}");
        let kill = format!("--kill={victim}");
        let (content, text) = write(Launcher::Itself, &test, &[&kill]);
        let named = "rank 0: the chain broke behind packet ";
        let line = text.lines().find(|line| line.starts_with(named));
        let line = line.unwrap_or_else(|| panic!("{text}"));
        let cause = format!("rank {victim} of the group");
        assert!(line.contains(&cause), "{line}");
        let broke_behind = number_after(line, named);
        // In the middle, not from the beginning.
        let goes_on = number_after(&text, "rank 0: goes on with packet ");
        assert!(goes_on > 0 && goes_on >= broke_behind, "{text}");
        // The packets that both survivors have are not sent again.
        let [(before, _), (after, most)] = posted(&text)[..] else {
            panic!("{text}");
        };
        assert!((goes_on..PACKETS).contains(&before), "{text}");
        assert_eq!(after, PACKETS - goes_on, "{text}");
        assert!((2..=WINDOW).contains(&most), "{text}");
        check_replicas(&test, &content, &others);
    }
}

/// The replica behind it waits for its connection, and the one before it connects to nobody.
#[test]
fn replica_that_ends_before_it_connects_by_tcp_is_named() {
    let port = free_port();
    let start = |rank: u32| {
        let mut command = rank_by_hand(&["timeout", "60"], "block_write", (rank, 4), port);
        command.args(["--block-bytes=100000", "--rounds=1"]);
        command.args(["--kill=2", "--kill-at=connect"]);
        let command = command.stdout(Stdio::null()).stderr(Stdio::piped());
        command.spawn().unwrap()
    };
    let ranks: Vec<Child> = (0..4).map(start).collect();
    for (rank, process) in ranks.into_iter().enumerate() {
        let output = process.wait_with_output().unwrap();
        let error = String::from_utf8_lossy(&output.stderr);
        if rank != 2 {
            // Not by `timeout`.
            assert_eq!(output.status.code(), Some(1), "rank {rank}: {error}");
            assert!(
                error.contains("rank 2 of the group"),
                "rank {rank}: {error}"
            );
        }
    }
}

/// Two ranks with different names of their hosts, of which rank 0 is at an address that only its own host reaches.
#[test]
fn address_that_other_hosts_do_not_reach_is_refused() {
    let test = "address_that_other_hosts_do_not_reach_is_refused";
    let unshare = ["unshare", "--uts", "sh", "-c"];
    let is_possible = Command::new(unshare[0])
        .args(&unshare[1..])
        .arg("hostname another-host")
        .status();
    if !is_possible.is_ok_and(|status| status.success()) {
        return waived(test, "this user cannot change the name of a host");
    }
    let arguments = ["--block-bytes=100000", "--rounds=1"];
    let port = free_port();
    let script = "hostname another-host; exec \"$0\" \"$@\"";
    let mut other = rank_by_hand(
        &[&unshare[..], &[script]].concat(),
        "block_write",
        (1, 2),
        port,
    );
    let other = other.args(arguments).stderr(Stdio::null());
    let mut other = other.spawn().unwrap();
    let output = rank_by_hand(&[], "block_write", (0, 2), port)
        .args(arguments)
        .output()
        .unwrap();
    other.wait().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "{output:?}");
    assert!(
        error.contains("other hosts do not reach 127.0.0.1"),
        "{error}"
    );
}

#[test]
fn packet_that_changed_at_a_replica_is_found_and_sent_again() {
    let test = "block_write_corrupt";
    let (content, text) = write(Launcher::Itself, test, &["--corrupt=1"]);
    assert!(text.contains("rank 2: packet 71 is not right"), "{text}");
    assert!(text.contains("rank 0: packet 71 is sent again"), "{text}");
    check_replicas(test, &content, &[1, 2, 3]);
}

#[test]
fn packet_that_changes_each_time_is_not_sent_for_ever() {
    let arguments = ["--block-bytes=100000", "--packet-bytes=7000", "--rounds=1"];
    let corrupt = ["--corrupt=2", "--corruptions=1000"];
    let output = Launcher::Itself.example(4, "block_write", &[&arguments[..], &corrupt].concat());
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "{output:?}");
    assert!(error.contains("packet 7 was refused 5 times"), "{error}");
    let again = String::from_utf8_lossy(&output.stdout);
    assert_eq!(
        again.matches("packet 7 is sent again").count(),
        4,
        "{again}"
    );
}
