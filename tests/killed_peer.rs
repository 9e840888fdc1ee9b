//! Peer processes that are killed in the middle of a transfer.
//!
//! The test starts itself again as the peer. Both sides exchange connection data over pipes.
#![cfg(feature = "softcx")]

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use doorbell_softcx::device::{Attributes, Device, PortId, RemoteQueuePair, State};
use doorbell_wire::mlx5::{SendRequest, Syndrome};

mod soft_end;
use soft_end::End;

const ROLE: &str = "DOORBELL_TEST_PEER";
const LEN: usize = 1 << 20;
/// 4.096 us * 2^15, sent eight times: the retries are exceeded after 1.07 s. A live peer may not be scheduled for a while.
const ATTRIBUTES: Attributes = Attributes {
    ack_timeout: 15,
    retry_count: 7,
    mtu_bytes: 4096,
    rnr_retry: 7,
    min_rnr_timer: 12,
    max_reads: 16,
    access: doorbell_softcx::device::Access::ALL,
    traffic_class: 0,
    service_level: 0,
    pkey_index: 0,
    qkey: 0,
};

/// The connection data of one side, as a line of text.
struct Card {
    remote: RemoteQueuePair,
    addr: u64,
    key: u32,
}

impl Card {
    fn of(end: &End) -> Card {
        Card {
            remote: end.pair.qp.local(),
            addr: end.at(0),
            key: end.key,
        }
    }

    fn line(&self) -> String {
        let port = self.remote.port.to_bytes().map(|byte| byte.to_string());
        let RemoteQueuePair {
            qpn,
            psn,
            connection,
            ..
        } = self.remote;
        let (addr, key) = (self.addr, self.key);
        format!(
            "card {qpn} {psn} {connection} {addr} {key} {}\n",
            port.join(" ")
        )
    }

    /// Reads up to the next card; the test harness prints lines of its own.
    fn read(from: &mut impl BufRead) -> Card {
        loop {
            let mut line = String::new();
            assert!(
                from.read_line(&mut line).unwrap() > 0,
                "the other side is gone"
            );
            // Behind "test peer ... ", which ends no line.
            let Some((_, numbers)) = line.split_once("card ") else {
                continue;
            };
            let numbers: Vec<u64> = numbers
                .split_whitespace()
                .map(|number| number.parse().unwrap())
                .collect();
            let port: Vec<u8> = numbers[5..].iter().map(|&byte| byte as u8).collect();
            return Card {
                remote: RemoteQueuePair {
                    port: PortId::from_bytes(&port.try_into().unwrap()),
                    qpn: numbers[0] as u32,
                    psn: numbers[1] as u32,
                    connection: numbers[2] as u32,
                    reads: 16,
                },
                addr: numbers[3],
                key: numbers[4] as u32,
            };
        }
    }
}

/// The peer's side: does nothing unless the process was started as the peer.
#[test]
fn peer() {
    if std::env::var_os(ROLE).is_none() {
        return;
    }
    let device = Device::open().unwrap();
    let end = End::new(&device, LEN);
    let card = Card::read(&mut std::io::stdin().lock());
    end.pair.qp.init(ATTRIBUTES).unwrap();
    end.pair.qp.connect(&card.remote).unwrap();
    let mut out = std::io::stdout();
    out.write_all(Card::of(&end).line().as_bytes()).unwrap();
    out.flush().unwrap();
    // Until it is killed, or the parent is: its end of the pipe closes then.
    let mut line = String::new();
    let _ = std::io::stdin().read_line(&mut line);
}

struct Peer {
    child: Child,
    card: Card,
}

impl Peer {
    fn start(end: &End) -> Peer {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "peer", "--nocapture"])
            .env(ROLE, "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let to = child.stdin.as_mut().unwrap();
        to.write_all(Card::of(end).line().as_bytes()).unwrap();
        let card = Card::read(&mut BufReader::new(child.stdout.take().unwrap()));
        Peer { child, card }
    }

    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn killed_peer_causes_retry_exceeded_and_the_queue_pair_is_reused() {
    let device = Device::open().unwrap();
    let mut end = End::new(&device, LEN);
    for round in 0..2 {
        let mut peer = Peer::start(&end);
        end.pair.qp.init(ATTRIBUTES).unwrap();
        end.pair.qp.connect(&peer.card.remote).unwrap();
        let list = [end.segment(0, LEN)];
        let (addr, key) = (peer.card.addr, peer.card.key);
        let write = SendRequest::write(addr, key).segments(&list).signaled(true);
        for _ in 0..20 {
            end.ring(&write);
            end.wait();
        }
        // In the middle of transfers, with more behind them: those posted afterwards have no receiver.
        for _ in 0..8 {
            end.ring(&write);
        }
        peer.kill();
        for _ in 0..8 {
            end.ring(&write);
        }
        let killed = Instant::now();
        let (mut good, mut bad) = (0, Vec::new());
        while good + bad.len() < 16 {
            assert!(killed.elapsed() < Duration::from_secs(60), "it hangs");
            match end.poll() {
                Some(cqe) if cqe.syndrome == 0 => good += 1,
                Some(cqe) => bad.push(Syndrome::from_raw(cqe.syndrome).unwrap()),
                None => std::thread::sleep(Duration::from_millis(1)),
            }
        }
        assert_eq!(
            bad.first(),
            Some(&Syndrome::TransportRetryExc),
            "round {round}"
        );
        assert!(bad[1..].iter().all(|&flushed| flushed == Syndrome::WrFlush));
        assert_eq!(end.pair.qp.status().state(), State::Error);
        end.reset();
    }
}

#[test]
fn lanes_of_dead_processes_are_freed() {
    let device = Device::open().unwrap();
    let end = End::new(&device, 4096);
    // More processes, one after the other, than the 32 lanes of a device; each had claimed a lane when it was killed.
    for _ in 0..40 {
        Peer::start(&end).kill();
    }
}
