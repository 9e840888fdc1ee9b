//! Kernels that ring, and kernels that make work requests: what only a GPU decides of them.

use std::ffi::{CStr, c_void};
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use cudarc::driver::sys::{self, CUfunction};
use doorbell::peer::{Fence, Program, Role, Target, TargetId, Targets};
use doorbell::stream::{Attachments, Outcome, Owner, Submission};
use doorbell::{
    Access, CudaContext, CudaStream, Device, DeviceBuffer, Endpoint, EndpointConfig, Executor,
    KernelQueue, KernelStream, Region, Side, TimingEvent, Trigger,
};
use serde_json::{Value, json};

use super::figures::figure;
use super::gpu::{Gpu, PORTABLE, Page, SOON, check, median};

/// Of an H100.
const BLOCKS: u32 = 132;

/// The kernels of `measured.cu`. It is not unloaded: the process ends with the step.
struct Kernels {
    context: CudaContext,
    module: sys::CUmodule,
}

impl Kernels {
    /// None where the bundle was made without nvcc.
    fn load(context: &CudaContext) -> Result<Option<Kernels>> {
        let here = std::env::current_exe()?;
        let file = here
            .ancestors()
            .nth(2)
            .map(|bundle| bundle.join("kernels/gpu_check.fatbin"));
        let image = match file.as_ref().map(std::fs::read) {
            Some(Ok(image)) => image,
            // Which has functions of these names, and looks at no code.
            _ if std::env::var_os("DOORBELL_CUDA_STANDIN").is_some() => PTX.to_bytes().to_vec(),
            _ => return Ok(None),
        };
        let mut aligned = vec![0_u64; image.len() / 8 + 2];
        for (word, bytes) in aligned.iter_mut().zip(image.chunks(8)) {
            let mut whole = [0; 8];
            whole[..bytes.len()].copy_from_slice(bytes);
            *word = u64::from_ne_bytes(whole);
        }
        let mut module = null_mut();
        // SAFETY: the image of this program's own kernels, which ends with zeroes; the context is current.
        check("cuModuleLoadData", unsafe {
            sys::cuModuleLoadData(&mut module, aligned.as_ptr().cast())
        })?;
        let context = context.clone();
        Ok(Some(Kernels { context, module }))
    }

    /// Launches a kernel with one parameter.
    fn launch<P>(
        &self,
        stream: &CudaStream,
        name: &CStr,
        (blocks, threads): (u32, u32),
        parameter: &P,
    ) -> Result<()> {
        let mut function: CUfunction = null_mut();
        let mut parameters = [std::ptr::from_ref(parameter).cast::<c_void>().cast_mut()];
        // SAFETY: a module of the current context; the parameter is of the kernel's type, by the callers, and copied with the launch.
        unsafe {
            check("cuCtxSetCurrent", sys::cuCtxSetCurrent(self.context.raw()))?;
            check(
                "cuModuleGetFunction",
                sys::cuModuleGetFunction(&mut function, self.module, name.as_ptr()),
            )?;
            check(
                "cuLaunchKernel",
                sys::cuLaunchKernel(
                    function,
                    blocks,
                    1,
                    1,
                    threads,
                    1,
                    1,
                    0,
                    stream.raw(),
                    parameters.as_mut_ptr(),
                    null_mut(),
                ),
            )
        }
    }
}

const PTX: &CStr = c".version 7.0\n.target sm_75\n.address_size 64\n";
const WITHOUT: &str = "the bundle was made without nvcc, and has no kernels of its own";

/// A kernel of which nothing can be wrong but where it runs.
pub fn mark() -> Result<Value> {
    let gpu = Gpu::new()?;
    let Some(measured) = Kernels::load(&gpu.context)? else {
        return Ok(json!({"waived": WITHOUT}));
    };
    let stream = CudaStream::new(&gpu.context, "mark")?;
    let word = gpu.context.alloc(4)?;
    measured.launch(&stream, c"gpu_check_mark", (1, 1), &word.ptr())?;
    stream.synchronize(Some(SOON))?;
    let mut bytes = [0; 4];
    word.copy_to_host(0, &mut bytes)?;
    let found = u32::from_ne_bytes(bytes);
    ensure!(found == 7, "the word is {found}");
    Ok(json!({"word": found}))
}

/// `struct measured_bells`.
#[repr(C)]
struct Bells {
    go: u64,
    data: u64,
    flag: u64,
    triggers: u64,
    code: u64,
    rounds: u32,
    ordered: u32,
}

/// A doorbell record and a doorbell register that are memory of this process, for a thread of it to watch.
struct Bell {
    targets: Targets,
    record: Target,
    register: Target,
    page: Page,
    attachments: Attachments,
    is_discarded: AtomicBool,
}

// SAFETY: the table never changes; the page is never freed, and is used atomically.
unsafe impl Owner for Bell {
    fn targets(&self) -> &Targets {
        &self.targets
    }

    fn base(&self, target: TargetId) -> Option<NonNull<u8>> {
        let at = if target == self.record.id() {
            RECORD
        } else {
            REGISTER
        };
        // SAFETY: within the page.
        NonNull::new(unsafe { self.page.host.add(at) })
    }

    fn attachments(&self) -> Option<&Attachments> {
        Some(&self.attachments)
    }

    fn finished(&self, _: u64, outcome: Outcome) {
        if outcome != Outcome::Done {
            self.is_discarded.store(true, Ordering::Release);
        }
    }
}

const GO: usize = 0;
const CODE: usize = 256;
const RECORD: usize = 8192;
const REGISTER: usize = 16384;

/// A kernel's trigger, until the thread that stands for the NIC sees the doorbell, against a store, a fence and a flag that are bare. All
/// three begin with a word of the host that the kernel sees; half of what the way there and a flag alone take is that word's way.
pub fn trigger_to_doorbell(short: bool) -> Result<Value> {
    let gpu = Gpu::new()?;
    let Some(measured) = Kernels::load(&gpu.context)? else {
        return Ok(json!({"waived": WITHOUT}));
    };
    let stream = CudaStream::new(&gpu.context, "bells")?;
    let rounds = if short { 64 } else { 2000 };
    let page = Page::new(PORTABLE, false)?;
    let mut targets = Targets::new();
    let record = targets.register("doorbell record", Role::DoorbellRecord, 64);
    let register = targets.register("register", Role::Uar, 64);
    let bell = Arc::new(Bell {
        targets,
        record,
        register,
        page,
        attachments: Attachments::default(),
        is_discarded: AtomicBool::new(false),
    });
    let kernels = KernelStream::new(&gpu.context, "bells")?;
    let mut triggers = Vec::new();
    for round in 1..=u64::from(rounds) {
        let mut program = Program::new(&bell.targets);
        program.store_dword(bell.record.dword(0)?, round as u32)?;
        program.fence(Fence::RECORD_BEFORE_UAR)?;
        program.store_qword(bell.register.qword(0)?, round)?;
        let owner: Arc<dyn Owner> = bell.clone();
        let submission = Submission {
            program,
            owner,
            cookie: round,
        };
        kernels.submit_one(submission).map_err(|(_, error)| error)?;
        let trigger = kernels.take()?.context("no trigger")?;
        triggers.extend(trigger.to_bytes());
    }
    let memory = gpu.context.alloc(triggers.len() as u64)?;
    memory.copy_from_host(0, &triggers)?;
    let latency = |ordered: u32, triggers: u64| -> Result<f64> {
        page.word(GO).store(0, Ordering::SeqCst);
        page.word(CODE).store(77, Ordering::SeqCst);
        page.long(REGISTER).store(0, Ordering::SeqCst);
        let bells = Bells {
            go: page.gpu + GO as u64,
            data: page.gpu + RECORD as u64,
            flag: page.gpu + REGISTER as u64,
            triggers,
            code: page.gpu + CODE as u64,
            rounds,
            ordered,
        };
        measured.launch(&stream, c"gpu_check_ring", (1, 1), &bells)?;
        let mut times = Vec::new();
        for round in 1..=rounds {
            // The kernel waits again by then: what it has to do behind a doorbell is not in the figure.
            let pause = Instant::now();
            while pause.elapsed() < Duration::from_micros(20) {
                std::hint::spin_loop();
            }
            let start = Instant::now();
            page.word(GO).store(round, Ordering::Release);
            while page.long(REGISTER).load(Ordering::Acquire) != u64::from(round) {
                ensure!(start.elapsed() < SOON, "round {round}: no doorbell came");
                std::hint::spin_loop();
            }
            times.push(start.elapsed().as_secs_f64() * 1e6);
            ensure!(
                (ordered == 0 && triggers == 0)
                    || page.word(RECORD).load(Ordering::Acquire) == round,
                "round {round}: the doorbell came before its record"
            );
        }
        stream.synchronize(Some(SOON))?;
        let code = page.word(CODE).load(Ordering::Acquire).cast_signed();
        ensure!(code == 0, "the kernel came to the code {code}");
        median(times)
    };
    let alone = latency(0, 0)?;
    let bare = latency(1, 0)?;
    let triggered = latency(0, memory.ptr())?;
    kernels.synchronize(Some(SOON))?;
    ensure!(
        !bell.is_discarded.load(Ordering::Acquire),
        "a trigger was discarded"
    );
    let way = alone / 2.0;
    let more = json!({"go to a flag alone us": alone, "go to store, fence and flag us": bare, "go to the doorbell of a trigger us": triggered});
    Ok(figure(
        "kernel trigger to the doorbell that the NIC's thread sees, times a bare store, fence and flag",
        (triggered - way) / (bare - way),
        true,
        1.2,
        &more,
    ))
}

/// `struct measured_puts`.
#[repr(C)]
struct Puts {
    queues: u64,
    codes: u64,
    local_addr: u64,
    remote_addr: u64,
    lkey: u32,
    rkey: u32,
    queue_count: u32,
    puts: u32,
}

/// Blocks that post to one queue, and to one each, over the software NIC directly and by the proxy: nothing is lost, doubled or torn.
pub fn puts_of_blocks(short: bool) -> Result<Value> {
    let gpu = Gpu::new()?;
    let Some(measured) = Kernels::load(&gpu.context)? else {
        return Ok(json!({"waived": WITHOUT}));
    };
    let mut found = Vec::new();
    for device in ["softcx", "softcx,path=proxy"] {
        for queues in [1, BLOCKS] {
            let puts = if short { 4 } else { 200 };
            let seconds = put(&gpu.context, &measured, device, queues, puts)
                .with_context(|| format!("{device}, {queues} queues"))?;
            let count = 2.0 * f64::from(BLOCKS * puts);
            found.push(json!({"device": device, "queues": queues, "operations": count, "operations a second": count / seconds}));
        }
    }
    Ok(json!(found))
}

fn put(
    context: &CudaContext,
    measured: &Kernels,
    device: &str,
    queue_count: u32,
    puts: u32,
) -> Result<f64> {
    let stream = CudaStream::new(context, "puts")?;
    let domain = Device::open(device)?.protection_domain();
    let config = EndpointConfig {
        send_depth: 256,
        ..EndpointConfig::default()
    };
    let bytes = 4096 * 2;
    let local = Region::alloc(&domain, bytes, Access::ALL)?;
    let remote = Region::alloc(&domain, bytes, Access::ALL)?;
    for thread in 0..BLOCKS {
        let value = u64::from(thread) | 0x5a5a_0000_0000_0000;
        local.write(8 + 8 * u64::from(thread), &value.to_ne_bytes())?;
    }
    let mut ends: Vec<(Endpoint, Endpoint)> = Vec::new();
    let mut queues: Vec<KernelQueue> = Vec::new();
    let mut views: Vec<u8> = Vec::new();
    for _ in 0..queue_count {
        let mut a = Endpoint::new(&domain, &config)?;
        let mut b = Endpoint::new(&domain, &config)?;
        a.connect(&b.address())?;
        b.connect(&a.address())?;
        let queue = KernelQueue::on_gpu(context, &mut a)?;
        views.extend(queue.view().to_bytes());
        queues.push(queue);
        ends.push((a, b));
    }
    let (local_addr, lkey) = queues[0].local(&local.slice(0, bytes)?)?;
    let memory: DeviceBuffer = context.alloc(views.len() as u64)?;
    memory.copy_from_host(0, &views)?;
    let codes = context.alloc(4 * u64::from(BLOCKS))?;
    codes.copy_from_host(0, &77_i32.to_ne_bytes().repeat(BLOCKS as usize))?;
    let parameter = Puts {
        queues: memory.ptr(),
        codes: codes.ptr(),
        local_addr,
        remote_addr: remote.remote().addr,
        lkey,
        rkey: remote.remote().rkey,
        queue_count,
        puts,
    };
    let start = Instant::now();
    measured.launch(&stream, c"gpu_check_put", (BLOCKS, 1), &parameter)?;
    stream.synchronize(Some(Duration::from_secs(40)))?;
    let seconds = start.elapsed().as_secs_f64();
    let mut found = vec![0; 4 * BLOCKS as usize];
    codes.copy_to_host(0, &mut found)?;
    let (found, _) = found.as_chunks::<4>();
    if let Some(at) = found.iter().position(|code| *code != [0; 4]) {
        bail!(
            "block {at} came to the code {}",
            i32::from_ne_bytes(found[at])
        );
    }
    let mut arrived = vec![0; 8 * (1 + BLOCKS as usize)];
    remote.read(0, &mut arrived)?;
    let (arrived, _) = arrived.as_chunks::<8>();
    let counted = u64::from_ne_bytes(arrived[0]);
    ensure!(
        counted == u64::from(BLOCKS * puts),
        "{counted} additions of {} were made",
        BLOCKS * puts
    );
    for (thread, bytes) in arrived[1..].iter().enumerate() {
        let value = u64::from_ne_bytes(*bytes);
        ensure!(
            value == thread as u64 | 0x5a5a_0000_0000_0000,
            "block {thread}: {value:x} arrived"
        );
    }
    // Before what they name.
    drop(queues);
    drop(ends);
    Ok(seconds)
}

/// `struct measured_group`.
#[repr(C)]
struct Group {
    trigger: Trigger,
    data: u64,
    codes: u64,
    value: u32,
    is_warp: u32,
}

/// What all threads of a warp or a block have stored in memory of the GPU is what the trigger of one of them sends; and all get its code.
pub fn triggers_of_groups(short: bool) -> Result<Value> {
    let gpu = Gpu::new()?;
    let Some(measured) = Kernels::load(&gpu.context)? else {
        return Ok(json!({"waived": WITHOUT}));
    };
    let stream = CudaStream::new(&gpu.context, "groups")?;
    let kernels = KernelStream::new(&gpu.context, "groups")?;
    let rounds = if short { 10 } else { 500 };
    for device in ["softcx", "softcx,path=proxy"] {
        let domain = Device::open(device)?.protection_domain();
        let mut a = Endpoint::new(&domain, &EndpointConfig::default())?;
        let mut b = Endpoint::new(&domain, &EndpointConfig::default())?;
        a.connect(&b.address())?;
        b.connect(&a.address())?;
        let data = gpu.context.alloc(1024)?;
        let codes = gpu.context.alloc(1024)?;
        let from = Region::register_device(&domain, &data, Access::ALL)?;
        let to = Region::alloc(&domain, 4096, Access::ALL)?;
        for (threads, is_warp) in [(32, 1), (256, 0)] {
            for round in 1..=rounds {
                let value = round * 1000 + is_warp;
                let bytes = 4 * u64::from(threads);
                codes.copy_from_host(0, &77_i32.to_ne_bytes().repeat(threads as usize))?;
                let slices = [from.slice(0, bytes)?];
                let remote = to.remote();
                a.stream_queue_write(&kernels, &slices, remote.addr, remote.rkey)?;
                a.stream_wait_cq(&kernels, Side::Send)?;
                let group = Group {
                    trigger: kernels.take()?.context("no trigger")?,
                    data: data.ptr(),
                    codes: codes.ptr(),
                    value,
                    is_warp,
                };
                ensure!(kernels.take()?.is_none(), "it took two triggers");
                measured.launch(&stream, c"gpu_check_group", (1, threads), &group)?;
                stream.synchronize(Some(SOON))?;
                let (mut arrived, mut found) = (vec![0; bytes as usize], vec![0; bytes as usize]);
                to.read(0, &mut arrived)?;
                codes.copy_to_host(0, &mut found)?;
                ensure!(
                    found.iter().all(|byte| *byte == 0),
                    "{device}, {threads} threads, round {round}: codes {found:x?}"
                );
                let (arrived, _) = arrived.as_chunks::<4>();
                for (thread, bytes) in (0..).zip(arrived) {
                    let word = u32::from_ne_bytes(*bytes);
                    ensure!(
                        word == value + thread,
                        "{device}, {threads} threads, round {round}: thread {thread}'s word is {word}"
                    );
                }
            }
        }
        kernels.synchronize(Some(SOON))?;
    }
    Ok(json!({"rounds of each": rounds}))
}

/// `struct measured_emits`.
#[repr(C)]
struct Emits {
    ring: u64,
    count: u32,
    reserved: u32,
}

/// Work requests a second that kernels write when nobody consumes them.
pub fn emitter(short: bool) -> Result<Value> {
    let gpu = Gpu::new()?;
    let Some(measured) = Kernels::load(&gpu.context)? else {
        return Ok(json!({"waived": WITHOUT}));
    };
    let stream = CudaStream::new(&gpu.context, "emitter")?;
    let threads = 128;
    let count = if short { 2 } else { 4096 };
    let ring = gpu.context.alloc(64 * u64::from(BLOCKS * threads))?;
    let emits = Emits {
        ring: ring.ptr(),
        count,
        reserved: 0,
    };
    let (start, end) = (
        TimingEvent::new(&gpu.context)?,
        TimingEvent::new(&gpu.context)?,
    );
    let mut rates = Vec::new();
    for _ in 0..if short { 2 } else { 9 } {
        start.record(&stream)?;
        measured.launch(&stream, c"gpu_check_emit", (BLOCKS, threads), &emits)?;
        end.record(&stream)?;
        end.synchronize()?;
        let seconds = end.since(&start)?.as_secs_f64();
        rates.push(f64::from(BLOCKS * threads) * f64::from(count) / seconds / 1e6);
    }
    let mut first = [0; 4];
    ring.copy_to_host(0, &mut first)?;
    // The last one's index and opcode, RDMA write, in the order of the wire.
    let expected = (count - 1) << 8 | 8;
    ensure!(
        u32::from_be_bytes(first) == expected,
        "the ring has {first:x?}"
    );
    Ok(figure(
        "work requests that kernels write when nobody consumes them, millions a second",
        median(rates)?,
        false,
        100.0,
        &json!({"blocks": BLOCKS, "threads of each": threads}),
    ))
}
