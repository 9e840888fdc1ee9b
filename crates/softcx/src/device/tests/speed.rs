//! What the device costs clients in other processes: `cargo test --release --lib -- --ignored --nocapture speed`.
#![allow(unsafe_code)] // asks for the processor's time

use crate::device::client::Transport;
use crate::device::options::LinkLayer;
use crate::device::space::calls;
use crate::device::tests::driver::{ALL, Driver, Process, Work, data, remote};
use crate::device::tests::harness::World;

/// The processor time of this thread.
pub(super) fn cpu_ns() -> u64 {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: fills in the time.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Messages of one size from one client to another, with so many on their way.
fn measure(devices: usize, process: fn(usize) -> Process, bytes: u32, depth: u16, send: bool) {
    let mut world = World::on_fabric(devices, LinkLayer::InfiniBand);
    let (first, last) = (world.devices[0].clone(), world.devices[devices - 1].clone());
    let mut a = Driver::new(&first, process(4 << 20));
    let mut b = Driver::new(&last, process(4 << 20));
    (a.dlid, b.dlid) = (last.lid(), first.lid());
    let mut cqs = [a.cq(256, 64), b.cq(256, 64)];
    let mut from = a.qp(Transport::Rc, [&cqs[0], &cqs[0]]);
    let mut into = b.qp(Transport::Rc, [&cqs[1], &cqs[1]]);
    a.mtu = 5;
    b.mtu = 5;
    a.connect(&from, into.qpn);
    b.connect(&into, from.qpn);
    let (source, lkey) = a.region(1 << 20, ALL);
    let (target, rkey) = b.region(1 << 20, ALL);
    let work = if send {
        Work::new(0x0a, &[data(source, lkey, bytes)])
    } else {
        Work::new(0x08, &[remote(target, rkey), data(source, lkey, bytes)])
    };
    let mut run = |messages: u32| {
        let (mut posted, mut done) = (0, 0);
        let mut spin = 0;
        while done < messages {
            while posted < messages && posted - done < u32::from(depth) {
                if send {
                    b.post_recv(&mut into, &[data(target, rkey, bytes)]);
                }
                a.send(&mut from, &work);
                posted += 1;
            }
            world.turn();
            while let Some(cqe) = a.poll(&mut cqs[0]) {
                assert_eq!(cqe.syndrome, 0);
                done += 1;
                spin = 0;
            }
            while b.poll(&mut cqs[1]).is_some() {}
            spin += 1;
            assert!(spin < 1_000_000);
        }
    };
    run(1000);
    let (start, before) = (cpu_ns(), calls());
    let messages = if bytes > 4096 { 5_000 } else { 50_000 };
    run(messages);
    let (ns, calls) = ((cpu_ns() - start) / u64::from(messages), calls() - before);
    let calls = calls as f64 / f64::from(messages);
    let rate = f64::from(bytes) / ns as f64;
    println!(
        "{devices} devices, {} {bytes} bytes, {depth} on their way: {ns} ns, {calls:.2} calls, {rate:.2} GB/s",
        if send { "SEND" } else { "WRITE" },
    );
}

#[test]
#[ignore = "a measurement"]
fn speed_between_other_processes() {
    for process in [Process::local as fn(usize) -> Process, Process::other] {
        for devices in [1, 2] {
            for (bytes, depth) in [(8, 1), (8, 32), (65536, 1), (65536, 32)] {
                for send in [false, true] {
                    measure(devices, process, bytes, depth, send);
                }
            }
        }
    }
}
