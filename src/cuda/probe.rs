//! Tries once which features a device has in streams.
#![allow(unsafe_code)] // calls the driver

use std::cell::Cell;
use std::mem::ManuallyDrop;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use cudarc::driver::sys::{self, CUevent, CUresult, CUstream, CUstreamWaitValue_flags as Flags};

use super::capabilities::{Capabilities, Probed};
use super::capture::RelaxedCapture;
use super::context::CudaContext;
use super::driver::{check, create_stream, is};
use super::kernel_words::KernelWords;
use super::memops::{MemOp, store_dword, store_qword, wait};
use super::stream_words::StreamWords;
use crate::stream::Backoff;
use crate::{Error, Result, StateKind};

/// How long a probe may take on a busy device. The conditions of its waits hold already.
const BOUND: Duration = Duration::from_secs(5);

/// How long a new stream may take to execute anything, on a device that is not blocked.
const BEGINS: Duration = Duration::from_millis(500);
/// The work queues of a context, if the variable is not set. Streams share them.
const CONNECTIONS: u32 = 8;

/// Tries the features that the driver promises, on a stream of its own and with a registered page of host memory.
pub(super) fn probe(context: &CudaContext, promised: Capabilities) -> Probed {
    let mut probed = Probed {
        capabilities: promised,
        findings: Vec::new(),
    };
    // Queries and loads of modules invalidate a capture of another thread, and are refused, unless this thread's mode is relaxed.
    let _relaxed = RelaxedCapture::new();
    match ProbeStream::new(context) {
        Ok(bench) => match bench.begins() {
            Ok(()) => bench.try_all(&mut probed),
            // What blocks the stream says nothing of them. The kernels are not loaded, because that may wait for the GPU.
            Err(error @ Error::Timeout { .. }) => {
                probed.findings.push(format!(
                    "memops, nor, qwords, flush, kernels: not tested. A new stream executed nothing ({error}). Another stream that waits may hold the work queue \
                     that both share; CUDA_DEVICE_MAX_CONNECTIONS sets the number of queues"
                ));
            }
            Err(_) => bench.try_all(&mut probed),
        },
        Err(error) => {
            let Capabilities {
                memops,
                kernels,
                nor,
                qwords,
                flush,
                ..
            } = &mut probed.capabilities;
            for (name, has) in [
                ("memops", memops),
                ("kernels", kernels),
                ("nor", nor),
                ("qwords", qwords),
                ("flush", flush),
            ] {
                probed.findings.push(format!("{name}: {error}"));
                *has = false;
            }
        }
    }
    probed.findings.extend(few_connections());
    let unknown = "iomemory: not tested; the first endpoint on a card tests it";
    probed.findings.push(unknown.into());
    probed
}

/// A note if the environment makes streams share fewer work queues than usual.
fn few_connections() -> Option<String> {
    let text = std::env::var("CUDA_DEVICE_MAX_CONNECTIONS").ok()?;
    let count: u32 = text.parse().ok().filter(|count| *count > 0)?;
    (count < CONNECTIONS).then(|| {
        format!(
            "streams: CUDA_DEVICE_MAX_CONNECTIONS is {count}. A stream that waits for a NIC stops the streams that share its work queue; what it waits for must not \
             be queued on one of these later"
        )
    })
}

/// A stream for probes, and its words.
struct ProbeStream<'a> {
    context: &'a CudaContext,
    stream: CUstream,
    words: ManuallyDrop<StreamWords>,
    /// A probe has not ended in time.
    hangs: Cell<bool>,
}

impl Drop for ProbeStream<'_> {
    fn drop(&mut self) {
        if self.hangs.get() {
            // The stream may still store to the words, and unregistering them would block.
            return;
        }
        // SAFETY: here alone.
        unsafe { ManuallyDrop::drop(&mut self.words) };
        if let Some(_entered) = self.context.enter_to_give_back() {
            // SAFETY: made by `ProbeStream::new`, and not used elsewhere.
            let _ = unsafe { sys::cuStreamDestroy_v2(self.stream) };
        }
    }
}

impl<'a> ProbeStream<'a> {
    fn new(context: &'a CudaContext) -> Result<ProbeStream<'a>> {
        let _entered = context.enter()?;
        let words = StreamWords::new(context)?;
        Ok(ProbeStream {
            context,
            stream: create_stream()?,
            words: ManuallyDrop::new(words),
            hangs: Cell::new(false),
        })
    }

    /// Waits until the stream has executed something that every driver has.
    fn begins(&self) -> Result<()> {
        let _entered = self.context.enter()?;
        let mut event: CUevent = std::ptr::null_mut();
        // SAFETY: it writes a handle.
        check("cuEventCreate", unsafe {
            sys::cuEventCreate(&mut event, 0)
        })?;
        // SAFETY: both were made here.
        let recorded = check("cuEventRecord", unsafe {
            sys::cuEventRecord(event, self.stream)
        });
        let began = recorded.and_then(|()| self.wait(BEGINS));
        // SAFETY: made here. The driver keeps it until the record is done.
        let _ = unsafe { sys::cuEventDestroy_v2(event) };
        began
    }

    fn try_all(&self, probed: &mut Probed) {
        let Probed {
            capabilities,
            findings,
        } = probed;
        // Tries a feature that is promised.
        let mut found = |name: &str, has: &mut bool, trial: &dyn Fn() -> Result<()>| {
            let result = if !*has {
                Err("the driver says that the device has none".into())
            } else if self.hangs.get() {
                Err("not tested, because an earlier test has not finished".into())
            } else {
                trial().map_err(|error| error.to_string())
            };
            if let Err(reason) = result {
                findings.push(format!("{name}: {reason}"));
                *has = false;
            }
        };
        let done = self.words.done_at();
        let status = self.words.status_at();
        found("memops", &mut capabilities.memops, &|| {
            self.execute(&mut [store_dword(done, 5)])?;
            self.expect(5)?;
            let geq = Flags::CU_STREAM_WAIT_VALUE_GEQ;
            self.execute(&mut [wait(done, 4, geq as u32), store_dword(done, 6)])?;
            self.expect(6)
        });
        found("nor", &mut capabilities.nor, &|| {
            let nor = Flags::CU_STREAM_WAIT_VALUE_NOR;
            self.execute(&mut [wait(status, 1, nor as u32), store_dword(done, 7)])?;
            self.expect(7)
        });
        found("qwords", &mut capabilities.qwords, &|| {
            // `stop` and `done`, side by side and aligned.
            self.execute(&mut [store_qword(done - 4, 8 << 32)])?;
            self.expect(8)
        });
        found("flush", &mut capabilities.flush, &|| {
            let flags =
                Flags::CU_STREAM_WAIT_VALUE_GEQ as u32 | Flags::CU_STREAM_WAIT_VALUE_FLUSH as u32;
            self.execute(&mut [wait(done, 0, flags), store_dword(done, 9)])?;
            self.expect(9)
        });
        found("kernels", &mut capabilities.kernels, &|| {
            let mut batch = KernelWords::default();
            batch.wait_count(status, 0, 1);
            batch.count(10);
            let launch = batch.end_launch();
            let module = self.context.module()?;
            let _entered = self.context.enter()?;
            let words = batch.words(launch);
            // SAFETY: the addresses are those of `words`, which stay until the stream is idle, or as long as the process.
            module.execute(words, self.words.control_at(), |launch| unsafe {
                launch.queue(self.stream)
            })?;
            self.wait(BOUND)?;
            self.expect(10)
        });
        let Capabilities {
            memops,
            nor,
            qwords,
            flush,
            ..
        } = capabilities;
        for has in [nor, qwords, flush] {
            *has &= *memops;
        }
    }

    fn execute(&self, ops: &mut [MemOp]) -> Result<()> {
        let _entered = self.context.enter()?;
        // SAFETY: operations of the driver's layout, on words that stay until the stream is idle, or as long as the process.
        check("cuStreamBatchMemOp", unsafe {
            sys::cuStreamBatchMemOp_v2(self.stream, ops.len() as u32, ops.as_mut_ptr(), 0)
        })?;
        self.wait(BOUND)
    }

    /// Waits until the stream is idle.
    fn wait(&self, timeout: Duration) -> Result<()> {
        let _entered = self.context.enter()?;
        let deadline = Instant::now() + timeout;
        let mut backoff = Backoff::new();
        loop {
            // SAFETY: a stream of the context.
            match check("cuStreamQuery", unsafe { sys::cuStreamQuery(self.stream) }) {
                Err(error) if is(&error, CUresult::CUDA_ERROR_NOT_READY) => {}
                other => return other,
            }
            if !backoff.pause_until(Some(deadline)) {
                self.hangs.set(true);
                return Err(Error::Timeout {
                    operation: "what was tried on a stream",
                    timeout,
                });
            }
        }
    }

    fn expect(&self, value: u32) -> Result<()> {
        let found = self.words.done().load(Ordering::Acquire);
        if found == value {
            return Ok(());
        }
        Err(Error::state(
            StateKind::Unexpected,
            "try a stream",
            format!("the word has {found} and should have {value}"),
        ))
    }
}
