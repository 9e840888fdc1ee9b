//! What the documentation leaves open, found out on the device.

use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use cudarc::driver::sys::{self, CUstreamWaitValue_flags as Flags};
use serde_json::{Value, json};

use super::gpu::{
    Gpu, IOMEMORY, PORTABLE, Page, SOON, barrier, check, drained, wait32, write32, write64,
};

/// What the device is.
pub fn device() -> Result<Value> {
    let gpu = Gpu::new()?;
    let (major, minor) = gpu.context.driver_version();
    let module = std::fs::read_to_string("/proc/driver/nvidia/version").unwrap_or_default();
    Ok(json!({
        "name": gpu.context.device_name(),
        "cuda": format!("{major}.{minor}"),
        "module": module.lines().next().unwrap_or(""),
        "capabilities": format!("{:?}", gpu.context.capabilities()),
    }))
}

/// Memory operations on registered memory, of each kind of mapping.
pub fn mappings() -> Result<Value> {
    let gpu = Gpu::new()?;
    let mut found = serde_json::Map::new();
    for (name, flags, memfd) in [
        ("anonymous", PORTABLE, false),
        ("memfd", PORTABLE, true),
        ("memfd as IOMEMORY", PORTABLE | IOMEMORY, true),
        ("anonymous as IOMEMORY", PORTABLE | IOMEMORY, false),
    ] {
        let tried = Page::new(flags, memfd).and_then(|page| {
            gpu.queue(&mut [write32(page.gpu + 64, 7), write64(page.gpu + 128, 9 << 40)])?;
            ensure!(drained(gpu.stream, SOON), "the stream did not end");
            ensure!(
                page.word(64).load(Ordering::Acquire) == 7,
                "32 bits are not there"
            );
            ensure!(
                page.long(128).load(Ordering::Acquire) == 9 << 40,
                "64 bits are not there"
            );
            Ok(page.gpu == page.host as u64)
        });
        let said = match tried {
            Ok(same) => json!({"memops": "work", "same address": same}),
            // Ordinary memory is what everything lies in; the rest is good to know.
            Err(error) if name == "anonymous" => return Err(error),
            Err(error) => json!({"memops": format!("{error:#}")}),
        };
        found.insert(name.into(), said);
    }
    // Memory is no I/O mapping. That of a device's registers is one: it is registered here, and nobody accesses it.
    found.insert("registers of a PCI device".into(), registers());
    Ok(found.into())
}

/// What the driver says to the registration of a PCI device's registers as I/O memory, of the first device whose registers can be mapped; a network card if
/// there is one.
fn registers() -> Value {
    let Ok(devices) = std::fs::read_dir("/sys/bus/pci/devices") else {
        return json!({"reason": "there is no /sys/bus/pci/devices"});
    };
    let mut files: Vec<_> = devices
        .flatten()
        .filter_map(|device| {
            let class = std::fs::read_to_string(device.path().join("class")).ok()?;
            // Not a GPU's: the driver knows those as its own.
            (!class.starts_with("0x03")).then(|| (!class.starts_with("0x02"), device.path()))
        })
        .flat_map(|(rank, device)| {
            (0..6).map(move |bar| (rank, device.join(format!("resource{bar}"))))
        })
        .collect();
    files.sort();
    for (_, file) in files {
        let Ok(opened) = std::fs::File::options().read(true).write(true).open(&file) else {
            continue;
        };
        let len = 4096;
        // SAFETY: a new mapping, which is not accessed. The kernel maps only registers that are memory.
        let host = unsafe {
            let access = libc::PROT_READ | libc::PROT_WRITE;
            libc::mmap(
                std::ptr::null_mut(),
                len,
                access,
                libc::MAP_SHARED,
                opened.as_raw_fd(),
                0,
            )
        };
        if host == libc::MAP_FAILED {
            continue;
        }
        // SAFETY: mapped above, and unmapped after it is given back.
        let registered = unsafe { sys::cuMemHostRegister_v2(host, len, PORTABLE | IOMEMORY) };
        if registered == sys::CUresult::CUDA_SUCCESS {
            // SAFETY: as above.
            let _ = unsafe { sys::cuMemHostUnregister(host) };
        }
        // SAFETY: as above.
        unsafe { libc::munmap(host, len) };
        return json!({"of": file, "registered": format!("{registered:?}")});
    }
    json!({"reason": "the registers of no PCI device can be mapped here"})
}

/// Each condition holds the stream, and a store of the host lets it go.
pub fn conditions() -> Result<Value> {
    let gpu = Gpu::new()?;
    let page = Page::new(PORTABLE, false)?;
    let owner = 1_u32 << 24;
    let cases = [
        ("GEQ", Flags::CU_STREAM_WAIT_VALUE_GEQ, 4, 5, 5),
        (
            "GEQ over the wrap",
            Flags::CU_STREAM_WAIT_VALUE_GEQ,
            u32::MAX,
            1,
            2,
        ),
        ("EQ", Flags::CU_STREAM_WAIT_VALUE_EQ, 4, 5, 5),
        ("AND", Flags::CU_STREAM_WAIT_VALUE_AND, 0, owner, owner),
        (
            "NOR",
            Flags::CU_STREAM_WAIT_VALUE_NOR,
            0xf100_0000,
            !owner,
            0,
        ),
    ];
    let mut found = serde_json::Map::new();
    for (name, condition, before, operand, after) in cases {
        let word = page.word(0);
        word.store(before, Ordering::SeqCst);
        if name == "NOR" && !gpu.context.capabilities().nor {
            found.insert(name.into(), json!("the device has none"));
            continue;
        }
        gpu.queue(&mut [wait32(page.gpu, operand, condition)])?;
        std::thread::sleep(Duration::from_millis(5));
        ensure!(!drained(gpu.stream, Duration::ZERO), "{name}: did not wait");
        let start = Instant::now();
        word.store(after, Ordering::SeqCst);
        ensure!(drained(gpu.stream, SOON), "{name}: was not let go");
        found.insert(
            name.into(),
            json!({"let go after us": start.elapsed().as_secs_f64() * 1e6}),
        );
    }
    Ok(found.into())
}

/// A 32-bit store and then a 64-bit one: a CPU that sees the second never misses the first, and never sees half of it.
pub fn order(short: bool) -> Result<Value> {
    let gpu = Gpu::new()?;
    let page = Page::new(PORTABLE, false)?;
    let pairs = if short { 2000 } else { 200_000_u32 };
    let over = Arc::new(AtomicBool::new(false));
    let stop = Arc::clone(&over);
    let watcher = std::thread::spawn(move || {
        let (record, register) = (page.word(128), page.long(2048));
        let (mut last, mut late, mut torn, mut seen) = (0_u64, 0_u64, 0_u64, 0_u64);
        while last as u32 != pairs && !stop.load(Ordering::Relaxed) {
            let now = register.load(Ordering::Acquire);
            if now == last {
                continue;
            }
            let recorded = record.load(Ordering::Acquire);
            torn += u64::from((now >> 32) as u32 != now as u32);
            late += u64::from((recorded.wrapping_sub(now as u32) as i32) < 0);
            seen += 1;
            last = now;
        }
        (seen, late, torn)
    });
    let mut queued = Ok(());
    for first in (1..=pairs).step_by(100) {
        let mut ops: Vec<_> = (first..first + 100)
            .flat_map(|i| {
                let both = u64::from(i) << 32 | u64::from(i);
                [write32(page.gpu + 128, i), write64(page.gpu + 2048, both)]
            })
            .collect();
        queued = gpu.queue(&mut ops);
        if queued.is_err() {
            break;
        }
    }
    let ended = drained(gpu.stream, SOON);
    std::thread::sleep(Duration::from_millis(10));
    over.store(true, Ordering::Relaxed);
    let Ok((seen, late, torn)) = watcher.join() else {
        bail!("the watcher panicked");
    };
    queued?;
    ensure!(ended, "the stream did not end");
    ensure!(
        late == 0,
        "{late} of {seen} seen before what was stored first"
    );
    ensure!(torn == 0, "{torn} of {seen} seen torn");
    Ok(json!({"pairs": pairs, "seen by the CPU": seen, "second before first": late, "torn": torn}))
}

/// How many operations a call takes.
pub fn batches() -> Result<Value> {
    let gpu = Gpu::new()?;
    let page = Page::new(PORTABLE, false)?;
    let mut found = serde_json::Map::new();
    for count in [1, 64, 128, 193, 255, 256, 257, 512] {
        let mut ops: Vec<_> = (0..count).map(|i| write32(page.gpu + 64, i)).collect();
        let mut samples = Vec::new();
        let mut refused = None;
        for _ in 0..21 {
            let start = Instant::now();
            if let Err(error) = gpu.queue(&mut ops) {
                refused = Some(format!("{error:#}"));
                break;
            }
            samples.push(start.elapsed().as_secs_f64() * 1e6);
            ensure!(drained(gpu.stream, SOON), "the stream did not end");
        }
        let said = match refused {
            Some(error) if count <= 255 => bail!("{count} operations: {error}"),
            Some(error) => json!(error),
            None => json!({"call us": super::gpu::median(samples)?}),
        };
        found.insert(count.to_string(), said);
    }
    Ok(found.into())
}

/// A node of memory operations is patched before each launch, and each launch stores its own value.
pub fn graphs() -> Result<Value> {
    let gpu = Gpu::new()?;
    let page = Page::new(PORTABLE, false)?;
    let mut op = write32(page.gpu + 1024, 1);
    let mut params = sys::CUDA_BATCH_MEM_OP_NODE_PARAMS {
        ctx: gpu.context.raw(),
        count: 1,
        paramArray: &mut op,
        flags: 0,
    };
    let (mut graph, mut node, mut exec) = (
        std::ptr::null_mut(),
        std::ptr::null_mut(),
        std::ptr::null_mut(),
    );
    // SAFETY: each call writes one handle; the parameters are copied.
    unsafe {
        check("cuGraphCreate", sys::cuGraphCreate(&mut graph, 0))?;
        check(
            "cuGraphAddBatchMemOpNode",
            sys::cuGraphAddBatchMemOpNode(&mut node, graph, std::ptr::null(), 0, &params),
        )?;
        check(
            "cuGraphInstantiateWithFlags",
            sys::cuGraphInstantiateWithFlags(&mut exec, graph, 0),
        )?;
    }
    let (mut patches, mut launches) = (Vec::new(), Vec::new());
    for value in 1..=200 {
        let mut op = write32(page.gpu + 1024, value);
        params.paramArray = &mut op;
        let start = Instant::now();
        // SAFETY: handles made above; the parameters are copied.
        check("cuGraphExecBatchMemOpNodeSetParams", unsafe {
            sys::cuGraphExecBatchMemOpNodeSetParams(exec, node, &params)
        })?;
        patches.push(start.elapsed().as_secs_f64() * 1e6);
        let start = Instant::now();
        // SAFETY: as above.
        check("cuGraphLaunch", unsafe {
            sys::cuGraphLaunch(exec, gpu.stream)
        })?;
        launches.push(start.elapsed().as_secs_f64() * 1e6);
        ensure!(drained(gpu.stream, SOON), "the launch did not end");
        let stored = page.word(1024).load(Ordering::Acquire);
        ensure!(stored == value, "launch {value} stored {stored}");
    }
    Ok(
        json!({"patched launches": 200, "patch us": super::gpu::median(patches)?, "launch us": super::gpu::median(launches)?}),
    )
}

/// What operations take on the GPU, by events before and behind many of them.
pub fn times() -> Result<Value> {
    const CALLS: u32 = 10;
    const OPS: u32 = 250;
    let gpu = Gpu::new()?;
    let page = Page::new(PORTABLE, false)?;
    let geq = Flags::CU_STREAM_WAIT_VALUE_GEQ;
    let (mut before, mut behind) = (std::ptr::null_mut(), std::ptr::null_mut());
    // SAFETY: each call writes one handle.
    unsafe {
        check("cuEventCreate", sys::cuEventCreate(&mut before, 0))?;
        check("cuEventCreate", sys::cuEventCreate(&mut behind, 0))?;
    }
    let mut found = serde_json::Map::new();
    for (name, op) in [
        ("32-bit store", write32(page.gpu + 64, 1)),
        ("64-bit store", write64(page.gpu + 128, 1)),
        ("wait whose condition holds", wait32(page.gpu, 0, geq)),
        ("barrier of the system", barrier()),
    ] {
        let mut ops = vec![op; OPS as usize];
        let mut samples = Vec::new();
        for _ in 0..5 {
            let mut ms = 0_f32;
            // SAFETY: events and a stream made above; writes one float.
            unsafe {
                check("cuEventRecord", sys::cuEventRecord(before, gpu.stream))?;
                for _ in 0..CALLS {
                    gpu.queue(&mut ops)?;
                }
                check("cuEventRecord", sys::cuEventRecord(behind, gpu.stream))?;
                ensure!(drained(gpu.stream, SOON), "the stream did not end");
                let asked = sys::cuEventElapsedTime(&mut ms, before, behind);
                check("cuEventElapsedTime", asked)?;
            }
            samples.push(f64::from(ms) * 1e6 / f64::from(CALLS * OPS));
        }
        found.insert(name.into(), json!({"ns": super::gpu::median(samples)?}));
    }
    Ok(found.into())
}
