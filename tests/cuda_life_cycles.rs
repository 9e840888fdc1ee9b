//! Creates, uses and drops objects while streams of a GPU wait. The driver frees memory only when the GPU is idle, and holds a lock until then: a
//! library call that freed memory behind a wait would block, possibly in the thread that has to end the wait.
#![cfg(all(feature = "cuda", feature = "softcx", not(loom)))]
#![allow(unsafe_code)] // registers memory of its own

mod rig;
#[path = "rig/standin.rs"]
mod standin;
mod waived;

use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::time::{Duration, Instant};

use doorbell::{
    Access, Condition, Control, CudaContext, CudaStream, Device, DeviceBuffer, DeviceQueue,
    EndpointConfig, Executor, GraphBuilder, GraphExec, QueueKind, Region, RemoteSlice, Status,
    Work, WritesOrdering, stream_wait_value32, stream_write_value32,
};
use rig::gpu::{alone, context};
use rig::{Limit, Pair, SOON, Stream, device, from_env, stream};
use standin::waits_here;

/// Longer than a call of the library takes on a loaded machine: 21 s were seen with twenty threads on two cores. A call that blocks does so as long as the
/// waits, which have no end while calls are timed; and the stand-in counts the calls that wait for streams.
const BLOCKED: Duration = Duration::from_secs(50);

/// The goal, which a loaded machine misses now and then.
const GOAL: Duration = Duration::from_millis(10);

/// How long calls have taken.
#[derive(Default)]
struct Calls {
    longest: (Duration, &'static str),
    late: usize,
    count: usize,
    /// Those that waited for work of streams, by the stand-in.
    blocked: BTreeMap<&'static str, u64>,
}

impl Calls {
    fn time<R>(&mut self, name: &'static str, call: impl FnOnce() -> R) -> R {
        let (started, waits) = (Instant::now(), waits_here());
        let result = call();
        let took = started.elapsed();
        let waits = waits_here() - waits;
        if waits > 0 {
            *self.blocked.entry(name).or_default() += waits;
        }
        assert!(took < BLOCKED, "{name} has taken {took:?}");
        self.longest = self.longest.max((took, name));
        self.late += usize::from(took > GOAL);
        self.count += 1;
        result
    }
}

/// Memory that this process has mapped.
#[derive(Debug)]
struct Mapped {
    /// Mappings of files, which is what memory of the stand-in's GPU and pages of a device are.
    files: usize,
    /// Bytes of the rest that can be written, without stacks of threads, which stay mapped for later threads; there are addresses reserved without memory
    /// besides. The number of these mappings says nothing: to free a piece in the middle of one makes two of it.
    anonymous: usize,
}

/// The stack of a thread that `std::thread` makes.
const STACK_BYTES: usize = 2 << 20;
/// The longest guard below a stack.
const GUARD_BYTES: usize = 1 << 16;

fn mapped() -> Mapped {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let mut mapped = Mapped {
        files: 0,
        anonymous: 0,
    };
    let mut guard_end = 0;
    for line in maps.lines() {
        let (from, to) = line.split(' ').next().unwrap().split_once('-').unwrap();
        let address = |text| usize::from_str_radix(text, 16).unwrap();
        let (start, end) = (address(from), address(to));
        if line.contains('/') {
            mapped.files += 1;
        } else if line.contains(" rw") {
            let stack_bytes = if start == guard_end { STACK_BYTES } else { 0 };
            mapped.anonymous += (end - start).saturating_sub(stack_bytes);
        } else if line.contains(" ---p ") && end - start <= GUARD_BYTES {
            guard_end = end;
        }
    }
    mapped
}

/// A pair with a stream that waits for a message that the test sends only at the end.
struct Waiter {
    pair: Pair,
    region: Region,
    stream: Stream,
}

impl Waiter {
    fn new(device: &Device) -> Waiter {
        let config = EndpointConfig::default().wait_timeout(None);
        let mut pair = Pair::new(device, &config);
        let region = pair.region(64);
        let stream = stream("waits");
        pair.b
            .post_recv(1, &[region.slice(0, 64).unwrap()])
            .unwrap();
        pair.b.stream_wait_cq(&stream, QueueKind::Recv).unwrap();
        Waiter {
            pair,
            region,
            stream,
        }
    }

    fn end(mut self) {
        let data = [self.region.slice(0, 4).unwrap()];
        let helper = stream("ends");
        self.pair
            .a
            .stream_queue_send(&helper, &Work::send(&data))
            .unwrap();
        let sent = self
            .pair
            .a
            .stream_wait_cq(&helper, QueueKind::Send)
            .unwrap();
        helper.synchronize(SOON).unwrap();
        self.stream.synchronize(SOON).unwrap();
        assert_eq!(sent.status(), Status::Complete);
    }
}

/// Creates, uses and drops endpoints, regions, a stream, and memory of the GPU that the software NIC copies by the driver.
fn round(device: &Device, memory: Option<&DeviceBuffer>, calls: &mut Calls, value: u32) {
    let mut pair = calls.time("endpoints", || {
        Pair::new(device, &EndpointConfig::default())
    });
    let region = calls.time("a region", || pair.region(8192));
    let stream = calls.time("a stream", || stream("round"));
    calls.time("a store", || {
        stream_write_value32(&stream, &region, 0, value).unwrap()
    });
    let data = [region.slice(0, 64).unwrap()];
    let remote = region.remote();
    let into = RemoteSlice::at(remote.addr + 4096, remote.rkey);
    calls.time("a write", || {
        pair.a.stream_queue_write(&stream, &data, into).unwrap()
    });
    let written = calls.time("a wait", || {
        pair.a.stream_wait_cq(&stream, QueueKind::Send).unwrap()
    });
    calls.time("synchronize", || stream.synchronize(SOON).unwrap());
    assert_eq!(written.status(), Status::Complete);
    assert_eq!(region.load_u32(4096).unwrap(), value);
    if let Some(memory) = memory {
        let on_gpu = calls.time("a region of the GPU", || {
            Region::register_device(&pair.domain, memory, Access::ALL).unwrap()
        });
        let to_gpu = on_gpu.remote().slice(0, 64).unwrap();
        calls.time("a write to the GPU", || {
            pair.a.stream_queue_write(&stream, &data, to_gpu).unwrap()
        });
        pair.a.stream_wait_cq(&stream, QueueKind::Send).unwrap();
        calls.time("synchronize", || stream.synchronize(SOON).unwrap());
        let mut bytes = [0; 4];
        memory.copy_to_host(0, &mut bytes).unwrap();
        assert_eq!(u32::from_ne_bytes(bytes), value);
        calls.time("drop of a region of the GPU", || drop(on_gpu));
    }
    calls.time("drop of endpoints", || drop(pair));
    calls.time("drop of a region", || drop(region));
    calls.time("drop of a stream", || drop(stream));
}

/// A graph with a transfer, and what it belongs to. It is instantiated while no stream waits, for which the driver may wait then.
struct Recorded {
    pair: Pair,
    region: Region,
    stream: CudaStream,
    graph: GraphExec,
}

impl Recorded {
    fn new(context: &CudaContext, device: &Device) -> Recorded {
        let mut pair = Pair::new(device, &EndpointConfig::default());
        let region = pair.region(64);
        let remote = region.remote().slice(0, 8).unwrap();
        let stream = CudaStream::new(context, "captured").unwrap();
        let mut builder = GraphBuilder::capture(&stream).unwrap();
        let work = Work::write_inline(&[1; 8], remote);
        builder.send(&mut pair.b, &work).unwrap();
        let graph = builder.instantiate().unwrap();
        Recorded {
            pair,
            region,
            stream,
            graph,
        }
    }
}

/// Creates and drops a send queue of kernels, launches and drops a graph, and drops a stream that still waits.
fn kernels_and_graphs(context: &CudaContext, recorded: Recorded, calls: &mut Calls) {
    let Recorded {
        mut pair,
        region,
        stream,
        mut graph,
    } = recorded;
    calls.time("a launch of a graph", || {
        graph.launch(&stream, &mut [&mut pair.b]).unwrap();
    });
    // A GPU that sees writes of NICs without an order has no such queues.
    let has_queues = context.capabilities().ordering != WritesOrdering::None;
    if has_queues && pair.a.path().control != Control::Sync {
        let queue = calls.time("a device queue", || {
            DeviceQueue::on_gpu(context, &mut pair.a).unwrap()
        });
        calls.time("drop of a device queue", || drop(queue));
    }
    let condition = Condition::GreaterOrEqual(1);
    let timeout = Some(Duration::from_millis(1));
    calls.time("a wait for a value", || {
        stream_wait_value32(&stream, &region, 32, condition, timeout).unwrap()
    });
    calls.time("drop of a stream", || drop(stream));
    calls.time("drop of a graph", || drop(graph));
    calls.time("drop of endpoints", || drop(pair));
    calls.time("drop of a region", || drop(region));
}

#[test]
fn no_call_blocks_on_freeing_memory_behind_a_wait() {
    let test = "no_call_blocks_on_freeing_memory_behind_a_wait";
    let _alone = alone();
    let Some(context) = context(test) else { return };
    let device = device();
    let rounds = from_env("DOORBELL_CYCLES", 1000);
    let limit = Limit::new("life cycles behind waits", Duration::from_secs(60));
    let memory = (device.name() == "softcx").then(|| context.alloc(4096).unwrap());
    let mut calls = Calls::default();
    round(&device, memory.as_ref(), &mut calls, 1);
    let recorded = (0..rounds.div_ceil(100)).map(|_| Recorded::new(&context, &device));
    let mut recorded = recorded.collect::<Vec<_>>();
    let before = mapped();
    let waiters = [Waiter::new(&device), Waiter::new(&device)];
    let mut during = None;
    let mut calls = Calls::default();
    for number in 0..rounds {
        limit.step(number, Duration::from_secs(60));
        round(&device, memory.as_ref(), &mut calls, number as u32 + 2);
        if number % 100 == 0 {
            // A separate allocation of GPU memory, which is not freed before the waits are over.
            let short = calls.time("an allocation", || context.alloc(4096).unwrap());
            calls.time("drop of an allocation", || drop(short));
            kernels_and_graphs(&context, recorded.pop().unwrap(), &mut calls);
        }
        if number == rounds / 10 {
            during = Some(mapped());
        }
    }
    let (during, after) = (during.unwrap(), mapped());
    let files = after.files.saturating_sub(during.files);
    let anonymous = after.anonymous.saturating_sub(during.anonymous);
    println!("{files} mapped files and {anonymous} bytes more in {rounds} rounds");
    // Objects whose destruction was deferred are reused; the separate allocations above, one in 100 rounds, are not.
    assert!(files < 80 + rounds as usize / 50);
    // A page a round would be more, in the shortest run, too.
    assert!(anonymous < (2 << 20) + rounds as usize * 1024);
    waiters.into_iter().for_each(Waiter::end);
    // A thread of the library frees what was kept during the waits.
    let started = Instant::now();
    loop {
        let after = mapped();
        if after.files <= before.files + 32 && after.anonymous <= before.anonymous + (16 << 20) {
            break;
        }
        assert!(
            started.elapsed() < Duration::from_secs(30),
            "{after:?}, before {before:?}"
        );
        std::thread::sleep(Duration::from_millis(10));
    }
    println!("before {before:?}, after {:?}", mapped());
    let Calls {
        longest: (longest, name),
        late,
        count,
        blocked,
    } = calls;
    assert!(blocked.is_empty(), "calls that waited: {blocked:?}");
    println!(
        "{count} calls, {late} of them longer than {GOAL:?}; the longest: {name}, {longest:?}"
    );
}

/// The driver still has the pages of a dropped region registered, and the library cannot know whether the memory is the same.
#[test]
fn application_memory_is_reregistered_when_streams_are_idle() {
    let test = "application_memory_is_reregistered_when_streams_are_idle";
    let _alone = alone();
    let Some(_context) = context(test) else {
        return;
    };
    let device = device();
    let limit = Limit::new("registered again", Duration::from_secs(60));
    limit.step(0, Duration::from_secs(60));
    let pair = Pair::new(&device, &EndpointConfig::default());
    let stream = stream("registers");
    let mut memory = vec![0_u8; 65536];
    let start = NonNull::new(memory.as_mut_ptr()).unwrap();
    let store = |value| {
        // SAFETY: the vector lives longer than the region.
        let region = unsafe { Region::register(&pair.domain, start, 65536, Access::ALL) }.unwrap();
        stream_write_value32(&stream, &region, 0, value).unwrap();
        stream.synchronize(SOON).unwrap();
        assert_eq!(region.load_u32(0).unwrap(), value);
    };
    store(1);
    let waiter = Waiter::new(&device);
    store(2);
    let ending = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(200));
        waiter.end();
    });
    let started = Instant::now();
    store(3);
    let took = started.elapsed();
    ending.join().unwrap();
    assert!(took > Duration::from_millis(150), "{took:?}");
}

/// The registers of a card stay registered with the driver while a stream waits. If they were unmapped meanwhile, other memory at their addresses could not
/// be registered.
#[test]
fn addresses_of_a_closed_device_are_not_reused_behind_a_wait() {
    let test = "addresses_of_a_closed_device_are_not_reused_behind_a_wait";
    let _alone = alone();
    let Some(_context) = context(test) else {
        return;
    };
    let limit = Limit::new("closed devices", Duration::from_secs(60));
    let waiting = device();
    let waiter = Waiter::new(&waiting);
    let other = Pair::new(&waiting, &EndpointConfig::default());
    let stream = stream("closes");
    let mut calls = Calls::default();
    let mut kept = Vec::new();
    for number in 0..20 {
        limit.step(number, Duration::from_secs(60));
        round(&device(), None, &mut calls, number as u32 + 1);
        // One of these gets the addresses, if they are free.
        for _ in 0..8 {
            let region = Region::alloc(&other.domain, 4096, Access::ALL).unwrap();
            calls.time("a store", || {
                stream_write_value32(&stream, &region, 0, 1).unwrap()
            });
            kept.push(region);
        }
        stream.synchronize(SOON).unwrap();
    }
    waiter.end();
}
