//! A peer's view: a program over libibverbs (`tests/verbs/peer.c`) talks to an endpoint on a device of verbs, one process each, both ways.
//! `scripts/test verbs` runs this behind both doors, with DOORBELL_TEST_DEVICE naming the device that is behind them.
#![cfg(all(feature = "verbs", feature = "softcx", not(loom)))]

mod door;
mod rig;
mod waived;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use door::verbs_program;
use doorbell::{
    Access, Address, Device, Endpoint, EndpointConfig, Executor, HostStream, Operation, QueueKind,
    Region, RemoteSlice, Transport, Work,
};
use rig::{Limit, SOON};
use waived::waived;

const AREA: u64 = 65_536;
const LENGTH: u64 = 20_011;
const IMM: u32 = 0x0102_0304;
const SOURCE: u64 = 0;
const WRITTEN: u64 = AREA;
const RECEIVED: u64 = 2 * AREA;
const COUNTERS: u64 = 3 * AREA;
const RESULTS: u64 = 4 * AREA;

struct Peer {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Peer {
    /// The next line that the peer prints.
    fn read_line(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    }

    fn ask(&mut self, line: &str) -> String {
        writeln!(self.input, "{line}").unwrap();
        self.read_line()
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The contents of the source area of the peer or the endpoint.
fn pattern(of_peer: bool) -> Vec<u8> {
    (0..LENGTH as u32)
        .map(|at| (at * 13 + (at >> 8) + if of_peer { 0x5a } else { 0 }) as u8)
        .collect()
}

#[test]
fn a_libibverbs_program_talks_to_an_endpoint() {
    let test = "a_libibverbs_program_talks_to_an_endpoint";
    let name = std::env::var("DOORBELL_TEST_DEVICE").unwrap_or_default();
    if name.is_empty() || name == "softcx" {
        return waived(test, "DOORBELL_TEST_DEVICE names no verbs device");
    }
    let Some(program) = verbs_program(test, "verbs/peer.c") else {
        return;
    };
    let _limit = Limit::new(test, Duration::from_secs(60));
    let mut child = Command::new(program)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut peer = Peer {
        input: child.stdin.take().unwrap(),
        output: BufReader::new(child.stdout.take().unwrap()),
        child,
    };
    let line = peer.read_line();
    let words: Vec<&str> = line.split(' ').collect();
    assert_eq!((words.len(), words[0]), (4, "address"), "{line}");
    let address: Address = words[1].parse().unwrap();
    let base = u64::from_str_radix(words[2], 16).unwrap();
    let rkey = u32::from_str_radix(words[3], 16).unwrap();

    let domain = Device::open(&name).unwrap().protection_domain();
    let mut endpoint = Endpoint::new(&domain, &EndpointConfig::default()).unwrap();
    let region = Region::alloc(&domain, 5 * AREA, Access::ALL).unwrap();
    region.write(SOURCE, &pattern(false)).unwrap();
    let own = region.remote();
    let told = format!(
        "connect {} {:x} {:x}",
        endpoint.address(),
        own.addr,
        own.rkey
    );
    endpoint.connect(&address).unwrap();
    assert_eq!(peer.ask(&told), "connected");

    // There.
    let stream = HostStream::new("peer").unwrap();
    let part = |at, len| region.slice(at, len).unwrap();
    let (source, fetched) = ([part(SOURCE, LENGTH)], [part(RESULTS + 64, LENGTH)]);
    let results = [[part(RESULTS, 8)], [part(RESULTS + 8, 8)]];
    let works = [
        Work::write(&source, RemoteSlice::at(base + WRITTEN, rkey)),
        Work::read(&fetched, RemoteSlice::at(base + SOURCE, rkey)),
        Work::fetch_add(&results[0], RemoteSlice::at(base + COUNTERS, rkey), 42),
        Work::compare_swap(
            &results[1],
            RemoteSlice::at(base + COUNTERS + 8, rkey),
            0,
            7,
        ),
        Work::send(&source).imm(IMM),
    ];
    for work in &works {
        endpoint.stream_queue_send(&stream, work).unwrap();
    }
    for _ in &works {
        endpoint.wait_cq(QueueKind::Send, SOON).unwrap();
    }
    stream.synchronize(SOON).unwrap();
    let read = |at: u64| {
        let mut bytes = vec![0; LENGTH as usize];
        region.read(at, &mut bytes).unwrap();
        bytes
    };
    assert!(read(RESULTS + 64) == pattern(true), "read");
    assert_eq!(peer.ask("check"), "checked");

    // And back.
    endpoint.post_recv(9, &[part(RECEIVED, AREA)]).unwrap();
    assert_eq!(peer.ask("go"), "done");
    let completion = endpoint.wait_cq(QueueKind::Recv, SOON).unwrap();
    assert_eq!(
        (completion.wr_id, completion.operation),
        (9, Operation::Receive)
    );
    assert_eq!(
        (completion.len_bytes, completion.imm),
        (LENGTH as u32, Some(IMM))
    );
    assert!(read(RECEIVED) == pattern(true), "received");
    assert!(read(WRITTEN) == pattern(true), "written");
    assert_eq!(region.load_u32(COUNTERS), Ok(42));
    assert_eq!(region.load_u32(COUNTERS + 8), Ok(7));
}

/// The queue key of `ibv_ud_pingpong`.
const PINGPONG_QKEY: u32 = 0x1111_1111;

/// A program of rdma-core answers each datagram of an endpoint with one of its own. The two exchange their addresses as `ibv_ud_pingpong` does with
/// itself: `LID:QPN:PSN:GID` over a socket.
#[test]
fn ibv_ud_pingpong_answers_datagrams() {
    let test = "ibv_ud_pingpong_answers_datagrams";
    let name = std::env::var("DOORBELL_TEST_DEVICE").unwrap_or_default();
    if name.is_empty() || name == "softcx" {
        return waived(test, "DOORBELL_TEST_DEVICE names no verbs device");
    }
    let program = "ibv_ud_pingpong";
    if Command::new(program).arg("--version").output().is_err() {
        return waived(
            test,
            "ibv_ud_pingpong is not installed (Debian: ibverbs-utils)",
        );
    }
    let _limit = Limit::new(test, Duration::from_secs(60));
    let port = TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .port();
    let (rounds, len) = (50u64, 200usize);
    let mut child = Command::new(program)
        .args([
            "-g",
            "0",
            "-p",
            &port.to_string(),
            "-s",
            &len.to_string(),
            "-n",
            &rounds.to_string(),
        ])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();

    let domain = Device::open(&name).unwrap().protection_domain();
    let config = EndpointConfig::default()
        .transport(Transport::Ud)
        .qkey(PINGPONG_QKEY)
        .mtu_bytes(1024);
    let mut endpoint = Endpoint::new(&domain, &config).unwrap();
    endpoint.activate().unwrap();
    // Where an address has GID and LID of a verbs device.
    let address = endpoint.address().to_bytes();
    let gid: String = address[8..24]
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    let lid = u16::from_le_bytes([address[24], address[25]]);
    let mut socket = loop {
        match TcpStream::connect(("127.0.0.1", port)) {
            Ok(socket) => break socket,
            Err(_) => std::thread::sleep(Duration::from_millis(10)),
        }
    };
    let told = format!("{lid:04x}:{:06x}:{:06x}:{gid}\0", endpoint.qpn(), 0);
    socket.write_all(told.as_bytes()).unwrap();
    let mut answer = vec![0; told.len()];
    socket.read_exact(&mut answer).unwrap();
    let answer = String::from_utf8(answer).unwrap();
    let words: Vec<&str> = answer.trim_end_matches('\0').split(':').collect();
    let number = |at: usize| u32::from_str_radix(words[at], 16).unwrap();
    let gid: [u8; 16] = u128::from_str_radix(words[3], 16).unwrap().to_be_bytes();
    let handle = endpoint
        .address_handle_of_port(number(0) as u16, Some(gid))
        .unwrap();

    let region = Region::alloc(&domain, 8192, Access::ALL).unwrap();
    let stream = HostStream::new("pingpong").unwrap();
    let (place, source) = (
        [region.slice(0, 40 + len as u64).unwrap()],
        [region.slice(4096, len as u64).unwrap()],
    );
    socket.write_all(b"done\0").unwrap();
    for round in 0..rounds {
        region.write(0, &[0xee; 256]).unwrap();
        endpoint.post_recv(round, &place).unwrap();
        let ping = Work::send(&source).to(&handle, number(1), PINGPONG_QKEY);
        endpoint.stream_queue_send(&stream, &ping).unwrap();
        endpoint.stream_wait_cq(&stream, QueueKind::Send).unwrap();
        stream.synchronize(SOON).unwrap();
        let pong = endpoint.wait_cq(QueueKind::Recv, SOON).unwrap();
        assert_eq!((pong.wr_id, pong.len_bytes), (round, 40 + len as u32));
        let source = pong.source.unwrap();
        assert_eq!((source.qpn, source.has_grh), (number(1), true));
        // The global route header: the GIDs of both sides.
        let mut head = [0; 40];
        region.read(0, &mut head).unwrap();
        assert_eq!((&head[8..24], &head[24..]), (&gid[..], &address[8..24]));
    }
    assert!(child.wait().unwrap().success());
}
