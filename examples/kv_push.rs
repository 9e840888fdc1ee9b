//! Layer-wise push of a key-value cache, from a prefill to a decode worker: for each layer a kernel makes pages, these are written to the peer's pages as a block table
//! says, and a signal follows. The peer waits for the signal of each layer before it uses the pages.
//!
//!     cargo run --release --example kv_push -- host
//!     cargo run --release --features cuda --example kv_push -- cuda
//!
//! With `cuda`, each side captures its step once, by the driver's calls, and launches the graph for each step; the block tables are in memory of the GPU. With `host`, streams of the host
//! stand for those of a GPU: they have no graphs, so each step queues its operations, and the table is read when they are queued.
//!
//! Both print how many calls the CPU has made for a step: launches of graphs, waits for the end of the step with the calls of the driver in them, and all others. With `cuda` they are measured
//! from the first launch to the end of the last wait. The stand-in for the driver counts the calls of this thread, and those of all other threads of the process. With a real driver, the
//! launches and waits of this program are counted, and what queues operations of this library on the streams ([`CudaStream::driver_calls`](doorbell::CudaStream::driver_calls)). The counts do
//! not include doorbells that the CPU rings. The last line says whether the GPU or the CPU rings the doorbells.

use std::cell::Cell;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use clap::{Parser, ValueEnum};
use doorbell::{
    Access, Control, Device, Endpoint, EndpointConfig, Executor, HostStream, QueueKind, Region,
    Work, stream_wait_count64,
};

/// The longest wait for the peer.
const DEADLINE: Option<Duration> = Some(Duration::from_secs(30));

#[derive(Clone, Copy, ValueEnum)]
enum Streams {
    Host,
    Cuda,
}

#[derive(Parser)]
struct Options {
    /// What executes the steps
    streams: Streams,
    /// The device, as of `doorbell info`
    #[arg(long, default_value = "softcx")]
    device: String,
    #[arg(long, default_value_t = 32)]
    layers: u64,
    /// Pages that a layer pushes in a step
    #[arg(long, default_value_t = 8)]
    pages: u64,
    #[arg(long, default_value_t = 16384)]
    page_bytes: u32,
    #[arg(long, default_value_t = 100)]
    steps: u64,
}

/// Calls of the driver until now.
#[cfg(feature = "cuda")]
pub struct Counted {
    /// Of this thread.
    pub here: u64,
    /// Of all threads of the process.
    pub all: u64,
}

/// Calls of the CPU for the steps.
#[derive(Default)]
pub struct Calls {
    launches: Cell<u64>,
    /// For the end of a step, one a worker: they make nothing happen.
    waits: Cell<u64>,
    /// Calls of the driver during the waits.
    wait_calls: Cell<u64>,
    others: Cell<u64>,
    /// Calls of the driver by other threads of the process during the steps.
    of_other_threads: Cell<u64>,
    /// Of the steps alone.
    time: Cell<Duration>,
}

impl Calls {
    fn other<T>(&self, result: T) -> T {
        self.others.set(self.others.get() + 1);
        result
    }

    fn wait<T>(&self, result: T) -> T {
        self.waits.set(self.waits.get() + 1);
        result
    }

    /// Measures a step.
    fn time<T>(&self, step: impl FnOnce() -> Result<T>) -> Result<T> {
        let begin = Instant::now();
        let result = step();
        self.time.set(self.time.get() + begin.elapsed());
        result
    }

    /// A step: that many launches, and the waits for them. Whatever else is counted while it launches are other calls.
    #[cfg(feature = "cuda")]
    pub fn step(
        &self,
        launches: u64,
        counted: impl Fn() -> Counted,
        launch: impl FnOnce() -> Result<()>,
        wait: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let add = |cell: &Cell<u64>, more: u64| cell.set(cell.get() + more);
        let before = counted();
        launch()?;
        let launched = counted();
        wait()?;
        let ended = counted();
        add(&self.launches, launches);
        let beside = (launched.here - before.here).saturating_sub(launches);
        add(&self.others, beside);
        add(&self.wait_calls, ended.here - launched.here);
        let elsewhere = |counted: &Counted| counted.all - counted.here;
        add(
            &self.of_other_threads,
            elsewhere(&ended) - elsewhere(&before),
        );
        Ok(())
    }

    /// Calls of the driver by other threads, in all steps.
    #[allow(dead_code)] // Reason: only the test asks.
    pub fn of_other_threads(&self) -> u64 {
        self.of_other_threads.get()
    }

    /// Launches, waits, calls in the waits, and others, of all steps.
    #[allow(dead_code)] // Reason: only the test asks.
    pub fn all(&self) -> [u64; 4] {
        [&self.launches, &self.waits, &self.wait_calls, &self.others].map(Cell::get)
    }
}

/// Both workers, in one process: two endpoints, the pages of each side, and the words.
struct Workers {
    prefill: Endpoint,
    decode: Endpoint,
    /// Pages of each layer, twice as many as a step pushes.
    pages: Region,
    cache: Region,
    /// 8 bytes a layer: the steps whose pages are in the cache. Behind them the steps that the decode worker has used.
    words: Region,
    /// For each layer, the numbers of the pages here and at the peer.
    table: Vec<Vec<(u64, u64)>>,
}

impl Workers {
    fn new(options: &Options) -> doorbell::Result<Workers> {
        let domain = Device::open(&options.device)?.protection_domain();
        let config = EndpointConfig::default()
            .send_depth(1024)
            .wait_timeout(DEADLINE)
            .room_timeout(DEADLINE);
        let mut prefill = Endpoint::new(&domain, &config)?;
        let mut decode = Endpoint::new(&domain, &config)?;
        prefill.connect(&decode.address())?;
        decode.connect(&prefill.address())?;
        let all = options.layers * layer_bytes(options);
        let places = 2 * options.pages;
        // A place of its own for each page: that of the peer is another one.
        let table = (0..options.layers)
            .map(|layer| {
                let place = |page: u64, factor: u64| (page * factor + layer) % places;
                (0..options.pages)
                    .map(|page| (place(page, 1), places - 1 - place(page, 1)))
                    .collect()
            })
            .collect();
        Ok(Workers {
            prefill,
            decode,
            pages: Region::alloc(&domain, all, Access::ALL)?,
            cache: Region::alloc(&domain, all, Access::ALL)?,
            words: Region::alloc(&domain, 8 * (options.layers + 1), Access::ALL)?,
            table,
        })
    }

    /// What the model would make: pages whose contents are those of the step.
    fn fill(&self, options: &Options, step: u64) -> doorbell::Result<()> {
        let page_bytes = u64::from(options.page_bytes);
        for (layer, entries) in self.table.iter().enumerate() {
            for (from, _) in entries {
                let at = layer as u64 * layer_bytes(options) + from * page_bytes;
                self.pages
                    .fill(at, page_bytes, contents(step, layer, *from))?;
            }
        }
        Ok(())
    }

    fn check(&self, options: &Options, step: u64) -> Result<()> {
        let page_bytes = u64::from(options.page_bytes);
        for (layer, entries) in self.table.iter().enumerate() {
            for (from, to) in entries {
                let at = layer as u64 * layer_bytes(options) + to * page_bytes;
                let value = contents(step, layer, *from);
                ensure!(
                    self.cache.is_filled_with(at, page_bytes, value)?,
                    "step {step}: the cache does not have page {from} of layer {layer}"
                );
            }
        }
        Ok(())
    }
}

fn layer_bytes(options: &Options) -> u64 {
    2 * options.pages * u64::from(options.page_bytes)
}

fn contents(step: u64, layer: usize, page: u64) -> u8 {
    (step * 31 + layer as u64 * 7 + page) as u8
}

#[allow(dead_code)] // Reason: a test has this file as a module.
fn main() -> Result<()> {
    run(&std::env::args().skip(1).collect::<Vec<_>>()).map(drop)
}

/// Runs with these arguments, and returns what it has counted.
pub fn run(arguments: &[String]) -> Result<Calls> {
    let name = std::iter::once("kv_push");
    let options = Options::try_parse_from(name.chain(arguments.iter().map(String::as_str)))?;
    let mut workers = Workers::new(&options)?;
    let calls = Calls::default();
    match options.streams {
        Streams::Host => host::steps(&options, &mut workers, &calls)?,
        #[cfg(feature = "cuda")]
        Streams::Cuda => cuda::steps(&options, &mut workers, &calls)?,
        #[cfg(not(feature = "cuda"))]
        Streams::Cuda => anyhow::bail!("built without the feature `cuda`"),
    }
    let steps = options.steps;
    let time = calls.time.get() / u32::try_from(steps).unwrap_or(u32::MAX).max(1);
    println!(
        "{steps} steps of {} layers with {} pages of {} bytes: {time:.1?} a step, {} launches, {} waits with {} calls of the driver, and {} other calls of the CPU for both workers; other threads called the driver {} times in all steps",
        options.layers,
        options.pages,
        options.page_bytes,
        per_step(calls.launches.get(), steps),
        per_step(calls.waits.get(), steps),
        per_step(calls.wait_calls.get(), steps),
        per_step(calls.others.get(), steps),
        calls.of_other_threads.get(),
    );
    println!("{}", who_rings(&options, workers.prefill.path().control));
    Ok(calls)
}

/// Which component stores to the doorbells of the NIC. The counts above do not have these stores.
fn who_rings(options: &Options, control: Control) -> &'static str {
    match (control, options.streams) {
        (Control::Direct, Streams::Cuda) => "doorbells: rung by the GPU",
        (Control::Direct, Streams::Host) => {
            "doorbells: rung by the CPU, in the threads of the streams"
        }
        (Control::Proxy, _) => {
            "doorbells: rung by the CPU, in a thread of the library (the path is proxy)"
        }
        _ => "doorbells: rung by the CPU, in the thread of this program",
    }
}

fn per_step(count: u64, steps: u64) -> String {
    format!("{:.2}", count as f64 / steps.max(1) as f64)
}

mod host {
    use super::*;

    pub fn steps(options: &Options, workers: &mut Workers, calls: &Calls) -> Result<()> {
        let prefill = HostStream::new("prefill")?;
        let decode = HostStream::new("decode")?;
        for step in 1..=options.steps {
            workers.fill(options, step)?;
            calls.time(|| {
                step_of(options, workers, (&prefill, &decode), calls, step)?;
                calls.wait(decode.synchronize(DEADLINE))?;
                Ok(calls.wait(prefill.synchronize(DEADLINE))?)
            })?;
            workers.check(options, step)?;
        }
        Ok(())
    }

    fn step_of(
        options: &Options,
        workers: &mut Workers,
        (prefill, decode): (&HostStream, &HostStream),
        calls: &Calls,
        step: u64,
    ) -> doorbell::Result<()> {
        let Workers {
            prefill: endpoint,
            decode: peer,
            pages,
            cache,
            words,
            table,
        } = workers;
        let page_bytes = u64::from(options.page_bytes);
        let used = 8 * options.layers;
        calls.other(stream_wait_count64(
            prefill,
            words,
            used,
            (step - 1, 1),
            DEADLINE,
        ))?;
        for (layer, entries) in (0..).zip(table.iter()) {
            calls.other(prefill.launch(|| ()))?;
            let base = layer * layer_bytes(options);
            for (from, to) in entries {
                let slices = [pages.slice(base + from * page_bytes, page_bytes)?];
                let into = cache.remote().slice(base + to * page_bytes, page_bytes)?;
                let work = Work::write(&slices, into).signaled(false);
                calls.other(endpoint.stream_queue_send(prefill, &work))?;
            }
            let bytes = step.to_ne_bytes();
            let signal = Work::write_inline(&bytes, words.remote().slice(8 * layer, 8)?);
            calls.other(endpoint.stream_queue_send(prefill, &signal.ordered(true)))?;
            calls.other(stream_wait_count64(
                decode,
                words,
                8 * layer,
                (step, 1),
                DEADLINE,
            ))?;
            calls.other(decode.launch(|| ()))?;
        }
        for _ in 0..options.layers {
            calls.other(endpoint.stream_wait_cq(prefill, QueueKind::Send))?;
        }
        let bytes = step.to_ne_bytes();
        let signal = Work::write_inline(&bytes, words.remote().slice(used, 8)?);
        calls.other(peer.stream_queue_send(decode, &signal))?;
        calls.other(peer.stream_wait_cq(decode, QueueKind::Send))?;
        Ok(())
    }
}

#[cfg(feature = "cuda")]
mod cuda {
    #![allow(unsafe_code)] // captures and launches by the driver's calls

    use std::ffi::CStr;
    use std::ptr::null_mut;

    use anyhow::anyhow;
    use doorbell::cudarc::driver::sys::{self, CUresult};
    use doorbell::{CudaContext, CudaStream, PagePush};

    use super::*;

    /// How long the kernel that stands for a layer runs.
    const LAYER: Duration = Duration::from_micros(20);

    /// A worker's stream, and the graph of its step. The stream is the application's.
    struct Step {
        raw: sys::CUstream,
        stream: CudaStream,
        exec: sys::CUgraphExec,
        /// Calls of the driver by this program.
        own_calls: Cell<u64>,
    }

    /// A counter of the stand-in for the driver, if that is the driver.
    fn counter(name: &CStr) -> Option<extern "C" fn() -> u64> {
        // SAFETY: the library is loaded already, and stays; the counters have this type.
        unsafe {
            let library = libc::dlopen(
                c"libcuda.so.1".as_ptr(),
                libc::RTLD_LAZY | libc::RTLD_NOLOAD,
            );
            if library.is_null() {
                return None;
            }
            let function = libc::dlsym(library, name.as_ptr());
            (!function.is_null())
                .then(|| std::mem::transmute::<*mut libc::c_void, extern "C" fn() -> u64>(function))
        }
    }

    fn driver(call: &str, result: CUresult) -> Result<()> {
        match result {
            CUresult::CUDA_SUCCESS => Ok(()),
            other => Err(anyhow!("{call}: {other:?}")),
        }
    }

    impl Step {
        /// Captures what `record` queues.
        fn new(
            context: &CudaContext,
            record: impl FnOnce(&CudaStream) -> doorbell::Result<()>,
        ) -> Result<Step> {
            let (mut raw, mut graph, mut exec) = (null_mut(), null_mut(), null_mut());
            let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
            let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;
            // SAFETY: each call writes one handle, of which `Step` destroys the last; the context lives to the end.
            unsafe {
                driver("cuCtxSetCurrent", sys::cuCtxSetCurrent(context.raw()))?;
                driver("cuStreamCreate", sys::cuStreamCreate(&mut raw, flags))?;
                let stream = CudaStream::from_raw(context, raw, "step")?;
                driver(
                    "cuStreamBeginCapture",
                    sys::cuStreamBeginCapture_v2(raw, mode),
                )?;
                let recorded = record(&stream);
                driver(
                    "cuStreamEndCapture",
                    sys::cuStreamEndCapture(raw, &mut graph),
                )?;
                recorded?;
                let made = sys::cuGraphInstantiateWithFlags(&mut exec, graph, 0);
                driver("cuGraphInstantiate", made)?;
                driver("cuGraphDestroy", sys::cuGraphDestroy(graph))?;
                Ok(Step {
                    raw,
                    stream,
                    exec,
                    own_calls: Cell::new(0),
                })
            }
        }

        fn launch(&self) -> Result<()> {
            self.own_calls.set(self.own_calls.get() + 1);
            // SAFETY: both live.
            driver("cuGraphLaunch", unsafe {
                sys::cuGraphLaunch(self.exec, self.raw)
            })
        }

        /// Calls of this program, and calls that queued operations of the library.
        fn calls(&self) -> u64 {
            self.own_calls.get() + self.stream.driver_calls()
        }

        /// Waits for the launches, and reports what was not executed.
        fn wait(&self, calls: &Calls) -> Result<()> {
            self.own_calls.set(self.own_calls.get() + 1);
            // SAFETY: as above.
            let waited = unsafe { sys::cuStreamSynchronize(self.raw) };
            driver("cuStreamSynchronize", calls.wait(waited))?;
            Ok(self.stream.query().map(drop)?)
        }
    }

    impl Drop for Step {
        fn drop(&mut self) {
            // SAFETY: made in `new`.
            unsafe {
                let _ = sys::cuStreamSynchronize(self.raw);
                let _ = sys::cuGraphExecDestroy(self.exec);
                let _ = sys::cuStreamDestroy_v2(self.raw);
            }
        }
    }

    pub fn steps(options: &Options, workers: &mut Workers, calls: &Calls) -> Result<()> {
        let context = CudaContext::primary(0)?;
        // A table is its entries, and their number behind them.
        let table_bytes = 8 * (options.pages + 1);
        let memory = context.alloc(options.layers * table_bytes)?;
        for (layer, entries) in (0..).zip(&workers.table) {
            let mut bytes: Vec<u8> = entries
                .iter()
                .flat_map(|(from, to)| (from | to << 32).to_ne_bytes())
                .collect();
            bytes.extend((entries.len() as u64).to_ne_bytes());
            memory.copy_from_host(layer * table_bytes, &bytes)?;
        }
        let domain = workers.words.domain().clone();
        let tables = Region::register_device(&domain, &memory, Access::ALL)?;
        let none = context.alloc(16)?;
        none.copy_from_host(0, &[0; 16])?;
        let none = Region::register_device(&domain, &none, Access::ALL)?;
        let (prefill, decode) = capture(options, workers, &context, (&tables, table_bytes), &none)?;
        let here = counter(c"doorbell_cuda_standin_calls_here");
        let all = counter(c"doorbell_cuda_standin_calls");
        let counted = || match (here, all) {
            (Some(here), Some(all)) => Counted {
                here: here(),
                all: all(),
            },
            _ => {
                let own = prefill.calls() + decode.calls();
                Counted {
                    here: own,
                    all: own,
                }
            }
        };
        for step in 1..=options.steps {
            workers.fill(options, step)?;
            calls.time(|| {
                calls.step(
                    2,
                    counted,
                    || {
                        decode.launch()?;
                        prefill.launch()
                    },
                    || {
                        decode.wait(calls)?;
                        prefill.wait(calls)
                    },
                )
            })?;
            workers.check(options, step)?;
        }
        Ok(())
    }

    fn capture(
        options: &Options,
        workers: &mut Workers,
        context: &CudaContext,
        (tables, table_bytes): (&Region, u64),
        none: &Region,
    ) -> Result<(Step, Step)> {
        let Workers {
            prefill: endpoint,
            decode: peer,
            pages,
            cache,
            words,
            ..
        } = workers;
        let used = 8 * options.layers;
        let bytes = layer_bytes(options);
        let prefill = Step::new(context, |stream| {
            stream_wait_count64(stream, words, used, (0, 1), DEADLINE)?;
            for layer in 0..options.layers {
                stream.spin(LAYER)?;
                let push = PagePush {
                    page_bytes: options.page_bytes,
                    local: pages.span(layer * bytes, bytes)?,
                    remote: cache.remote().slice(layer * bytes, bytes)?,
                    table: tables.slice(layer * table_bytes, table_bytes - 8)?,
                    count: (tables, layer * table_bytes + table_bytes - 8),
                    signal: words.remote().slice(8 * layer, 8)?,
                };
                endpoint.stream_push_pages(stream, &push)?;
            }
            for _ in 0..options.layers {
                endpoint.stream_wait_cq(stream, QueueKind::Send)?;
            }
            Ok(())
        })?;
        let decode = Step::new(context, |stream| {
            for layer in 0..options.layers {
                stream_wait_count64(stream, words, 8 * layer, (1, 1), DEADLINE)?;
                stream.spin(LAYER)?;
            }
            let remote = words.remote().slice(used, 8)?;
            // No pages: the signal alone.
            let push = PagePush {
                page_bytes: 8,
                local: words.span(used, 8)?,
                remote,
                table: none.slice(0, 8)?,
                count: (none, 8),
                signal: remote,
            };
            peer.stream_push_pages(stream, &push)?;
            peer.stream_wait_cq(stream, QueueKind::Send)?;
            Ok(())
        })?;
        Ok((prefill, decode))
    }
}
