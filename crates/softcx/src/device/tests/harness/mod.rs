//! A world for tests of the transport: devices without engine threads, a clock that is moved by hand, and both ends of
//! connections with their queues. The same steps give the same run.

mod end;

pub(crate) use self::end::{End, INLINE, Shape};
use crate::device::{Device, DeviceOptions, Faults, LinkLayer, WireKind};

/// Simulated time of one turn.
const TURN_NS: u64 = 2_000;
/// Timers are looked at this often at least.
const TICK_NS: u64 = 20_000;
/// A time that no test reaches: that of a connection without a timeout.
const NEVER_NS: u64 = 1 << 60;

/// Devices and a clock.
pub(crate) struct World {
    pub(crate) devices: Vec<Device>,
    pub(crate) now_ns: u64,
}

impl World {
    pub(crate) fn new(devices: usize) -> World {
        World {
            devices: (0..devices)
                .map(|_| Device::without_engine().unwrap())
                .collect(),
            now_ns: 0,
        }
    }

    /// Devices that reach each other by UDP, over the loopback interface of this host.
    pub(crate) fn by_udp(devices: usize) -> World {
        let open = |_| Device::without_engine_on(WireKind::Udp(None)).unwrap();
        World {
            devices: (0..devices).map(open).collect(),
            now_ns: 0,
        }
    }

    /// Devices on a fabric of their own, whose name is removed again: devices that have joined stay.
    pub(crate) fn on_fabric(devices: usize, link: LinkLayer) -> World {
        World {
            devices: (0..devices).map(|_| World::node(link)).collect(),
            now_ns: 0,
        }
    }

    /// A device on the fabric of this test.
    pub(crate) fn node(link: LinkLayer) -> Device {
        let thread = std::thread::current();
        let test = thread.name().unwrap_or_default().replace(':', "_");
        let fabric = format!(
            "{}-{}",
            std::process::id(),
            &test[test.len().saturating_sub(50)..]
        );
        let options = DeviceOptions {
            fabric,
            link,
            ..DeviceOptions::default()
        };
        Device::on_fabric_without_engine(&options).unwrap()
    }

    /// Devices that run by themselves, in the time of the world outside.
    pub(crate) fn with_engines(devices: usize) -> World {
        World {
            devices: (0..devices).map(|_| Device::open().unwrap()).collect(),
            now_ns: 0,
        }
    }

    /// One turn of each device. Whether there was work.
    pub(crate) fn turn(&mut self) -> bool {
        self.now_ns += TURN_NS;
        let mut worked = false;
        for device in &self.devices {
            worked |= device.turn_at(self.now_ns);
        }
        worked
    }

    /// Turns until `done`. `false` if nothing is left to happen before that, or if it takes for ever.
    pub(crate) fn run(&mut self, mut done: impl FnMut() -> bool) -> bool {
        for _ in 0..400_000 {
            if done() {
                return true;
            }
            if self.turn() {
                continue;
            }
            let due = self.devices.iter();
            let due = due.filter_map(|device| device.lock().next_due_ns(self.now_ns));
            match due.min().filter(|&due| due < NEVER_NS) {
                Some(due) => self.now_ns = due.max(self.now_ns + TICK_NS),
                None => {
                    // What a tick finds without a timer: work posted to failed queue pairs.
                    self.now_ns += TICK_NS;
                    if !self.turn() {
                        return done();
                    }
                }
            }
        }
        panic!("livelock: the devices work and work");
    }

    /// Turns until nothing is left to happen.
    pub(crate) fn settle(&mut self) {
        self.run(|| false);
    }

    pub(crate) fn set_faults(&mut self, faults: Faults) {
        for (device, seed) in self.devices.iter().zip(faults.seed..) {
            device.set_faults(Faults { seed, ..faults });
        }
    }

    /// A connected pair; the two may be of one device or of two.
    pub(crate) fn pair(&mut self, shape: Shape) -> (End, End) {
        let a = End::new(&self.devices[0], shape);
        let last = self.devices.len() - 1;
        let b = End::new(&self.devices[last], shape);
        a.connect(&b);
        b.connect(&a);
        (a, b)
    }
}

/// Bytes that identify their place: no two windows of a message are equal.
pub(crate) fn pattern(seed: u64, len_bytes: usize) -> Vec<u8> {
    (0..len_bytes as u64)
        .map(|i| {
            let word = (i / 8 + 1)
                .wrapping_mul(0x9e37_79b9_7f4a_7c15)
                .rotate_left(seed as u32)
                ^ seed;
            (word >> (i % 8 * 8)) as u8
        })
        .collect()
}
