//! An endpoint in a process of its own: the test program, started again. It has registered the memory of the plan, posts receives, and does what it is
//! told by lines of text. It can be stopped and killed.
#![allow(unsafe_code)] // sends signals to a process

use std::io::{BufRead, BufReader, Write, stdin};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Mutex;

use doorbell::{Address, Device, Endpoint, RemoteRegion};

use crate::means;
use crate::memory::{Memory, Shared, place};
use crate::model::lock;
use crate::plan::{PLACE, Plan, STEPS_MAX};

/// The environment variable of that process: the seed of the plan, and the file of its memory.
pub const ROLE: &str = "DOORBELL_TEST_PEER";
/// Before each answer: the test harness prints to the same pipe.
const ANSWER: &str = "answer: ";

pub struct Peer {
    process: Mutex<Process>,
    regions: Vec<RemoteRegion>,
}

struct Process {
    child: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
    address: Address,
    can_answer: bool,
    is_alive: bool,
}

impl Peer {
    /// `path`: see [`Memory::path`]. Its endpoint is then connected to `address`.
    pub fn start(plan: &Plan, path: &str, address: &Address) -> Peer {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "random_calls_report_only_possible_outcomes"])
            .arg("--nocapture")
            .env(ROLE, format!("{} {path}", plan.seed))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (to, from) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let mut process = Process {
            child,
            to,
            from: BufReader::new(from),
            address: *address,
            can_answer: true,
            is_alive: true,
        };
        let answer = process.connect(address);
        let regions = answer.split(' ').skip(1).map(region).collect();
        Peer {
            process: Mutex::new(process),
            regions,
        }
    }

    /// The address of its endpoint.
    pub fn address(&self) -> Address {
        lock(&self.process).address
    }

    /// Its registration of a bank.
    pub fn region(&self, bank: usize) -> RemoteRegion {
        self.regions[bank]
    }

    /// Resets its endpoint, connects it to `address`, and returns its own address; `None` if the process is stopped or killed.
    pub fn reset(&self, address: &Address) -> Option<Address> {
        let mut process = lock(&self.process);
        process.can_answer.then(|| {
            process.connect(address);
            process.address
        })
    }

    pub fn stop(&self, is_stopped: bool) {
        let mut process = lock(&self.process);
        if process.is_alive {
            process.can_answer = !is_stopped;
            let signal = if is_stopped {
                libc::SIGSTOP
            } else {
                libc::SIGCONT
            };
            // SAFETY: the process was started here, and has not been waited for.
            assert_eq!(unsafe { libc::kill(process.child.id() as i32, signal) }, 0);
        }
    }

    pub fn kill(&self) {
        lock(&self.process).kill();
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        self.kill();
    }
}

impl Process {
    fn connect(&mut self, address: &Address) -> String {
        writeln!(self.to, "{address}").unwrap();
        let mut line = String::new();
        let answer = loop {
            line.clear();
            let len = self.from.read_line(&mut line).unwrap();
            assert!(len > 0, "the process of the remote endpoint has ended");
            if let Some((_, answer)) = line.trim_end().split_once(ANSWER) {
                break answer;
            }
        };
        let (own, _) = answer.split_once(' ').unwrap();
        self.address = own.parse().unwrap();
        answer.to_string()
    }

    fn kill(&mut self) {
        if self.is_alive {
            self.child.kill().unwrap();
            self.child.wait().unwrap();
            (self.is_alive, self.can_answer) = (false, false);
        }
    }
}

fn region(text: &str) -> RemoteRegion {
    let numbers: Vec<u64> = (text.split(':').map(|number| number.parse().unwrap())).collect();
    RemoteRegion {
        addr: numbers[0],
        rkey: numbers[1] as u32,
        len_bytes: numbers[2],
    }
}

/// What the other process does, until it is killed or its input ends.
pub fn serve(role: &str) {
    // SAFETY: no memory is passed. A stopped process ends with the one that started it, too.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
    let (seed, path) = role.split_once(' ').unwrap();
    let plan = Plan::new(seed.parse().unwrap(), means());
    let device = std::env::var("DOORBELL_TEST_DEVICE").unwrap_or_else(|_| "softcx".into());
    let device = Device::open(&device).unwrap();
    device.set_faults(plan.usual_faults());
    let domain = device.protection_domain();
    let shared = Shared::open(path).unwrap();
    let memory = Memory::new(
        std::slice::from_ref(&domain),
        plan.seed,
        std::iter::empty(),
        Some(shared),
    );
    let regions: Vec<_> = (memory.remote().iter())
        .map(|region| format!("{}:{}:{}", region.addr, region.rkey, region.len_bytes))
        .collect();
    let mut endpoint = Endpoint::new(&domain, &plan.pairs[plan.remote.unwrap() / 2]).unwrap();
    let inbox = memory.inbox.as_ref().unwrap();
    // Each receive has a place of its own, which the plan looks at.
    let mut places = 0..STEPS_MAX;
    for (turn, line) in stdin().lock().lines().enumerate() {
        if turn > 0 {
            endpoint.abort_handle().abort();
            endpoint.reset().unwrap();
        }
        // Before the answer: the plan then connects its own endpoint to this one.
        let address = endpoint.address();
        endpoint.connect(&line.unwrap().parse().unwrap()).unwrap();
        let depth = plan.pairs[plan.remote.unwrap() / 2].recv_depth as usize;
        for number in places.by_ref().take(depth) {
            let into = [inbox.slice(place(number), PLACE).unwrap()];
            endpoint.post_recv(number as u64, &into).unwrap();
        }
        println!("{ANSWER}{address} {}", regions.join(" "));
    }
}
