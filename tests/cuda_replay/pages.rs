//! Pages of a table, layer by layer.

use std::ptr::{NonNull, null_mut};
use std::time::Duration;

use cudarc::driver::sys::{self, CUstreamCaptureMode as Mode};
use doorbell::{Access, Executor, PagePush, QueueKind, Region, stream_wait_count64};

use crate::kv_push::Counted;
use crate::rig::gpu::alone;
use crate::rig::{Pair, Random, SOON, from_env};
use crate::standin::is_standin;
use crate::waived::waived;
use crate::{Bench, config, gpu_region, is_failed, lacks_gpu_memory, ok};

/// Layers, each with a kernel, a push of the pages of its table, and a signal; the peer waits for the signals by counts. One launch a step on each side, and no other call.
#[test]
fn a_step_of_layers_is_one_launch() {
    const LAYERS: u64 = 5;
    const PAGE: u64 = 256;
    const PAGES: u64 = 24;
    /// Entries of a table.
    const ROOM: u64 = 20;
    let _alone = alone();
    let Some(mut bench) = Bench::new("a_step_of_layers", &config()) else {
        return;
    };
    let context = bench.a.stream.context().clone();
    let pages = bench.pair.region(LAYERS * PAGES * PAGE);
    let cache = bench.pair.region(LAYERS * PAGES * PAGE);
    let words = bench.pair.region(4096);
    let tables = context.alloc(LAYERS * 256).unwrap();
    let Some(table) = gpu_region("a_step_of_layers", bench.from.domain(), &tables) else {
        return;
    };
    let nothing = context.alloc(64).unwrap();
    nothing.copy_from_host(0, &[0; 64]).unwrap();
    let nothing = Region::register_device(bench.from.domain(), &nothing, Access::ALL).unwrap();
    words.fill(0, 4096, 0).unwrap();
    let signal = |at: u64| words.remote().slice(at * 8, 8).unwrap();
    let layer_bytes = PAGES * PAGE;
    let mut tickets = Vec::new();
    let Pair { a, b, .. } = &mut bench.pair;
    let mode = Mode::CU_STREAM_CAPTURE_MODE_GLOBAL;
    let sender = bench.a.capture(mode, |stream| {
        // The peer has used the pages of the step before.
        stream_wait_count64(stream, &words, 8 * LAYERS, (0, 1), SOON).unwrap();
        for layer in 0..LAYERS {
            stream.spin(Duration::from_micros(5)).unwrap();
            let push = PagePush {
                page_bytes: PAGE as u32,
                local: pages.span(layer * layer_bytes, layer_bytes).unwrap(),
                remote: cache
                    .remote()
                    .slice(layer * layer_bytes, layer_bytes)
                    .unwrap(),
                table: table.slice(layer * 256, ROOM * 8).unwrap(),
                count: (&table, layer * 256 + ROOM * 8),
                signal: signal(layer),
            };
            tickets.push(a.stream_push_pages(stream, &push).unwrap());
        }
        for _ in 0..LAYERS {
            a.stream_wait_cq(stream, QueueKind::Send).unwrap();
        }
    });
    let receiver = bench.b.capture(mode, |stream| {
        for layer in 0..LAYERS {
            stream_wait_count64(stream, &words, layer * 8, (1, 1), SOON).unwrap();
            stream.spin(Duration::from_micros(5)).unwrap();
        }
        let acknowledge = PagePush {
            page_bytes: 1,
            local: pages.span(0, 1).unwrap(),
            remote: signal(LAYERS),
            table: nothing.slice(0, 8).unwrap(),
            count: (&nothing, 8),
            signal: signal(LAYERS),
        };
        b.stream_push_pages(stream, &acknowledge).unwrap();
        b.stream_wait_cq(stream, QueueKind::Send).unwrap();
    });
    let mut random = Random(from_env("DOORBELL_SEED", 1));
    let fill_tables = |random: &mut Random| {
        let mut all = Vec::new();
        for layer in 0..LAYERS {
            let mut from: Vec<u64> = (0..PAGES).collect();
            let mut to = from.clone();
            random.shuffle(&mut from);
            random.shuffle(&mut to);
            let count = random.below(ROOM + 1);
            let entries: Vec<(u64, u64)> = from.into_iter().zip(to).take(count as usize).collect();
            let mut bytes: Vec<u8> = entries
                .iter()
                .flat_map(|(from, to)| (from | to << 32).to_ne_bytes())
                .collect();
            bytes.resize(ROOM as usize * 8, 0xff);
            bytes.extend((count as u32).to_ne_bytes());
            tables.copy_from_host(layer * 256, &bytes).unwrap();
            all.push(entries);
        }
        all
    };
    let mut elsewhere = 0;
    for step in 1..=50u64 {
        let entries = fill_tables(&mut random);
        for layer in 0..LAYERS {
            for page in 0..PAGES {
                let value = (step * 7 + layer * 31 + page) as u8;
                let at = layer * layer_bytes + page * PAGE;
                pages.fill(at, PAGE, value).unwrap();
                cache.fill(at, PAGE, !value).unwrap();
            }
        }
        let before = calls();
        bench.b.launch(&receiver);
        bench.a.launch(&sender);
        if let (Some(before), Some(after)) = (before, calls()) {
            assert_eq!(after.here - before.here, 2, "calls in a step of both sides");
            elsewhere += (after.all - after.here) - (before.all - before.here);
        }
        bench.b.wait();
        for (layer, entries) in entries.iter().enumerate() {
            for (from, to) in entries {
                let value = (step * 7 + layer as u64 * 31 + from) as u8;
                let at = layer as u64 * layer_bytes + to * PAGE;
                assert!(
                    cache.is_filled_with(at, PAGE, value).unwrap(),
                    "step {step}"
                );
            }
            for page in (0..PAGES).filter(|page| entries.iter().all(|(_, to)| to != page)) {
                let value = !((step * 7 + layer as u64 * 31 + page) as u8);
                let at = layer as u64 * layer_bytes + page * PAGE;
                assert!(
                    cache.is_filled_with(at, PAGE, value).unwrap(),
                    "step {step}"
                );
            }
        }
        bench.a.wait();
        assert!(tickets.iter().all(|ticket| ticket.launches() == Some(step)));
    }
    assert!(elsewhere <= OF_OTHER_THREADS, "{elsewhere} in 50 steps");
    // Steps behind each other: the signals keep them apart.
    fill_tables(&mut random);
    for _ in 0..50 {
        bench.a.launch(&sender);
        bench.b.launch(&receiver);
    }
    bench.a.wait();
    bench.b.wait();
    assert_eq!(tickets[0].launches(), Some(100));
    // A page that there is not: nothing of that layer is written, and all behind it is not executed.
    tables
        .copy_from_host(
            256,
            &[PAGES, 0]
                .map(|word| word as u32)
                .map(u32::to_ne_bytes)
                .concat(),
        )
        .unwrap();
    tables
        .copy_from_host(256 + ROOM * 8, &1u32.to_ne_bytes())
        .unwrap();
    bench.a.launch(&sender);
    bench.a.wait();
    assert_eq!(tickets[0].launches(), Some(101));
    assert!(is_failed(&tickets[1]) && is_failed(&tickets[4]));
    let fault = bench.a.stream.synchronize(SOON).unwrap_err();
    assert!(fault.to_string().contains("table of pages"), "{fault}");
    assert!(bench.pair.a.failure().is_some());
    assert_eq!(words.load_u64(8), Ok(100));
}

/// How many calls of the driver were made, by the stand-in.
fn calls() -> Option<Counted> {
    is_standin().then(counted)
}

fn counted() -> Counted {
    Counted {
        here: crate::standin::calls_here(),
        all: crate::standin::calls(),
    }
}

/// The most calls of other threads in a test: the library frees what a test has dropped, once, in a thread of its own. No step has calls there.
const OF_OTHER_THREADS: u64 = 12;

/// Calls of the driver in the waits of the example for a step. Each worker synchronizes its stream by one call, and asks the library for faults of the stream: 5 calls, of which 4 are
/// those that keep captures of other threads and the current context as they are.
const IN_WAITS: u64 = 2 * (1 + 5);

/// The example pushes the pages of each step, on both kinds of streams; it checks them itself.
#[test]
fn the_example_pushes_layers() {
    let _alone = alone();
    // Kept, so that nothing of it is freed meanwhile.
    let Some(_bench) = Bench::new("the_example_pushes_layers", &config()) else {
        return;
    };
    // With a real driver the example counts its own calls.
    let in_waits = if is_standin() { IN_WAITS } else { 2 };
    let name = std::env::var("DOORBELL_TEST_DEVICE");
    let device = name.as_deref().unwrap_or("softcx");
    for (streams, expected) in [
        // For each layer a wait and a function on both sides, 8 pages and a signal, and a wait for that; and what the two sides tell each other of.
        ("host", [0, 2 * 50, 0, (6 * 13 + 3) * 50]),
        ("cuda", [2 * 50, 2 * 50, in_waits * 50, 0]),
    ] {
        let arguments = [
            streams, "--device", device, "--steps", "50", "--layers", "6",
        ];
        match crate::kv_push::run(&arguments.map(String::from)) {
            Err(error) if lacks_gpu_memory(&format!("{error:#}")) => {
                waived("the_example_pushes_layers", &format!("{error:#}"));
            }
            pushed => {
                let pushed = pushed.unwrap();
                assert_eq!(pushed.all(), expected, "{streams}");
                assert!(pushed.of_other_threads() <= OF_OTHER_THREADS);
            }
        }
    }
}

/// Memory of the application for pages, of which only those that are used are there.
struct SparseMemory(*mut libc::c_void, usize);

impl SparseMemory {
    fn new(len_bytes: usize) -> SparseMemory {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: new memory.
        let start = unsafe { libc::mmap(null_mut(), len_bytes, protection, flags, -1, 0) };
        assert_ne!(start, libc::MAP_FAILED);
        SparseMemory(start, len_bytes)
    }
}

impl Drop for SparseMemory {
    fn drop(&mut self) {
        // SAFETY: mapped in `new`; its region was dropped before.
        unsafe { libc::munmap(self.0, self.1) };
    }
}

/// Pages of a cache that is longer than a slice may be.
#[test]
fn pages_of_more_than_4_gib_are_pushed() {
    let _alone = alone();
    let Some(mut bench) = Bench::new("pages_of_more_than_4_gib", &config()) else {
        return;
    };
    const PAGE: u64 = 1 << 16;
    let len_bytes = 5 << 30;
    let memory = SparseMemory::new(len_bytes as usize);
    let domain = bench.from.domain().clone();
    let start = NonNull::new(memory.0).unwrap().cast();
    // SAFETY: the memory lives longer than the region.
    let pages = unsafe { Region::register(&domain, start, len_bytes, Access::ALL) };
    let pages = match pages {
        Ok(pages) => pages,
        Err(error) => {
            let reason = format!("5 GiB cannot be registered: {error}");
            return waived("pages_of_more_than_4_gib", &reason);
        }
    };
    let table = bench.pair.region(4096);
    let entries = [(70_000_u32, 3_u32), (5, 75_001)];
    for (at, (from, to)) in (0..).zip(entries) {
        table.store_u32(8 * at, from).unwrap();
        table.store_u32(8 * at + 4, to).unwrap();
        let value = 11 + at as u8;
        pages.fill(u64::from(from) * PAGE, PAGE, value).unwrap();
    }
    table.store_u32(64, entries.len() as u32).unwrap();
    let push = PagePush {
        page_bytes: PAGE as u32,
        local: pages.span(0, len_bytes).unwrap(),
        remote: pages.remote().slice(0, len_bytes).unwrap(),
        table: table.slice(0, 64).unwrap(),
        count: (&table, 64),
        signal: table.remote().slice(128, 8).unwrap(),
    };
    let (stream, a) = (&bench.a.stream, &mut bench.pair.a);
    a.stream_push_pages(stream, &push).unwrap();
    a.stream_wait_cq(stream, QueueKind::Send).unwrap();
    stream.synchronize(SOON).unwrap();
    for (at, (_, to)) in (0..).zip(entries) {
        let filled = pages.is_filled_with(u64::from(to) * PAGE, PAGE, 11 + at);
        assert!(filled.unwrap(), "page {to}");
    }
    assert_eq!(table.load_u64(128), Ok(1));
    drop((bench, pages));
    drop(memory);
}

/// A call beside the launches shows in the example's count.
#[test]
fn the_example_counts_what_is_called_beside_its_launches() {
    let _alone = alone();
    let test = "the_example_counts_what_is_called_beside_its_launches";
    let Some(bench) = Bench::new(test, &config()) else {
        return;
    };
    if !is_standin() {
        return waived(test, "a real driver does not say how often it is called");
    }
    let graph = (bench.a).capture(Mode::CU_STREAM_CAPTURE_MODE_GLOBAL, |stream| {
        stream.spin(Duration::from_micros(5)).unwrap();
    });
    let launch = || {
        bench.a.launch(&graph);
        Ok(())
    };
    let wait = || {
        bench.a.wait();
        Ok(())
    };
    let calls = crate::kv_push::Calls::default();
    calls.step(1, counted, launch, wait).unwrap();
    assert_eq!(calls.all(), [1, 0, 1, 0]);
    // Of this thread, and of another one.
    let beside = || {
        launch()?;
        wait()?;
        let other = std::thread::spawn(|| {
            let mut version = 0;
            // SAFETY: writes one number.
            ok(unsafe { sys::cuDriverGetVersion(&mut version) });
        });
        other.join().unwrap();
        Ok(())
    };
    let elsewhere = calls.of_other_threads();
    calls.step(1, counted, beside, || Ok(())).unwrap();
    assert_eq!(calls.all(), [2, 0, 1, 1]);
    assert!(calls.of_other_threads() > elsewhere);
}
