//! One end of a benchmark: an endpoint, the stream that goes with it, and the memory of its messages.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use doorbell::{
    Access, Address, Control, Endpoint, EndpointConfig, Error, Executor, ProtectionDomain, Region,
    RemoteRegion, Result, Side, Work,
};
#[cfg(feature = "cuda")]
use doorbell::{GraphBuilder, GraphExec, KernelQueue, PutStep};

use super::backend::{Backend, BenchStream};
use super::message::Messages;
use super::options::{Op, Plan};
use super::pass::BenchStep;
use super::row::Loop;
use super::trigger::TriggerKernels;

/// How often a wait looks whether the other process still is there.
const SLICE: Duration = Duration::from_millis(100);

/// What bounds the waits of an end.
#[derive(Clone, Debug)]
pub struct WaitLimits {
    /// Longest wait for one transfer.
    pub timeout: Duration,
    /// Set when the other process has gone, by who watches it; nothing where there is none.
    pub disconnected: Option<Arc<AtomicBool>>,
}

impl WaitLimits {
    /// Waits for what ends by itself, because each transfer in it has a deadline of its own.
    ///
    /// # Errors
    /// Those of `wait`; [`Error::State`] if the other process goes.
    pub fn wait_for_all<T>(&self, wait: impl FnMut(Option<Duration>) -> Result<T>) -> Result<T> {
        self.wait(None, wait)
    }

    /// Waits for one transfer.
    fn wait_for_one<T>(&self, wait: impl FnMut(Option<Duration>) -> Result<T>) -> Result<T> {
        self.wait(Some(self.timeout), wait)
    }

    /// Calls `wait` with the timeout; while somebody watches for the peer, with short ones, to ask whether it still is there.
    fn wait<T>(
        &self,
        timeout: Option<Duration>,
        mut wait: impl FnMut(Option<Duration>) -> Result<T>,
    ) -> Result<T> {
        let Some(disconnected) = &self.disconnected else {
            return wait(timeout);
        };
        let mut waited = Duration::ZERO;
        loop {
            match wait(Some(SLICE)) {
                Err(Error::Timeout { operation, .. }) => {
                    if disconnected.load(Ordering::Acquire) {
                        let reason = "the other process has gone".into();
                        return Err(Error::State { operation, reason });
                    }
                    waited += SLICE;
                    if let Some(timeout) = timeout.filter(|timeout| waited >= *timeout) {
                        return Err(Error::Timeout { operation, timeout });
                    }
                }
                ended => return ended,
            }
        }
    }
}

/// Memory for the messages, where they are to lie.
fn messages_region(domain: &ProtectionDomain, backend: &Backend, len_bytes: u64) -> Result<Region> {
    #[cfg(feature = "cuda")]
    if let Some(region) = backend.device_region(domain, len_bytes)? {
        return Ok(region);
    }
    let _ = backend;
    Region::alloc(domain, len_bytes, Access::ALL)
}

/// Queues a transfer and the wait for its completion.
fn send_and_wait(endpoint: &mut Endpoint, stream: &dyn Executor, work: &Work<'_>) -> Result<()> {
    endpoint.stream_queue_send(stream, work)?;
    endpoint.stream_wait_cq(stream, Side::Send)?;
    Ok(())
}

/// One end.
pub struct Peer {
    /// What has the kernels of the asynchronous loop ring, if they do. Before what they use.
    trigger: Option<TriggerKernels>,
    endpoint: Endpoint,
    stream: BenchStream,
    /// The kernel of a step that is to ring: it comes with its transfer.
    #[cfg(feature = "cuda")]
    kernel: Duration,
    no_kernel: bool,
    messages: Arc<Messages>,
    /// Where the peer's messages arrive.
    remote: RemoteRegion,
    limits: WaitLimits,
    op: Op,
    validate: bool,
    /// A write tells the peer that it is there.
    announced: bool,
    /// Receives that are posted and that no arrival was asked for yet.
    ahead: u64,
    /// Receives that are posted at once.
    chunk: u64,
}

impl Peer {
    /// An end that is not connected yet. The two ends of a connection have `seeds` in opposite order.
    pub fn new(
        domain: &ProtectionDomain,
        backend: &Backend,
        stream: &BenchStream,
        plan: &Plan,
        seeds: [u64; 2],
        limits: &WaitLimits,
    ) -> Result<Peer> {
        let max_bytes = plan.sizes.max_bytes();
        let region = messages_region(domain, backend, Messages::region_bytes(max_bytes))?;
        // The plan's limits keep this below the limit of endpoints.
        let depth = (plan.in_flight() + 2 * plan.steps) as u32;
        let config = EndpointConfig {
            send_depth: depth,
            recv_depth: depth,
            max_segments: 1,
            max_inline_bytes: 0,
            wait_timeout: Some(limits.timeout),
            ..EndpointConfig::default()
        };
        let endpoint = Endpoint::new(domain, &config)?;
        let trigger = backend.trigger(limits.timeout)?;
        if trigger.is_some() && endpoint.path().control == Control::Sync {
            return Err(Error::State {
                operation: "--trigger",
                reason: "on the sync path no kernel rings".into(),
            });
        }
        Ok(Peer {
            endpoint,
            stream: stream.clone(),
            trigger,
            #[cfg(feature = "cuda")]
            kernel: Duration::ZERO,
            remote: region.remote(),
            messages: Arc::new(Messages::new(region, max_bytes, seeds)),
            limits: limits.clone(),
            op: plan.op,
            no_kernel: plan.no_kernel,
            validate: plan.validate,
            announced: plan.announced(),
            ahead: 0,
            chunk: plan.steps,
        })
    }

    /// The endpoint.
    pub fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// The address and the region that the peer needs.
    pub fn contact(&self) -> (Address, RemoteRegion) {
        (self.endpoint.address(), self.messages.region().remote())
    }

    /// Connects to the peer, and posts the first receives.
    pub fn connect(&mut self, (address, region): (Address, RemoteRegion)) -> Result<()> {
        self.remote = region;
        self.endpoint.connect(&address)?;
        #[cfg(feature = "cuda")]
        if let Some(trigger) = &mut self.trigger {
            trigger.connected(&mut self.endpoint)?;
        }
        self.keep_ahead()
    }

    /// Launches the kernel of a step, unless that is to ring: then it is launched with the transfer.
    pub fn launch(&mut self, by: Loop, step: BenchStep) -> Result<()> {
        if self.no_kernel {
            // The time is taken all the same.
            if self.validate {
                self.messages.fill(step.index, step.size_bytes);
            }
            step.run_kernel();
            return Ok(());
        }
        if self.validate {
            let messages = Arc::clone(&self.messages);
            let (index, size_bytes) = (step.index, step.size_bytes);
            self.stream
                .launch_host(move || messages.fill(index, size_bytes))?;
        }
        #[cfg(feature = "cuda")]
        if self.trigger.is_some() && by == Loop::Async {
            self.kernel = step.kernel();
            return Ok(());
        }
        let _ = by;
        self.stream.launch_kernel(step)
    }

    /// Waits for the stream as applications do, which is CUDA's default: spinning.
    pub fn synchronize(&self) -> Result<()> {
        let stream = self.stream.executor();
        self.limits.wait_for_all(|slice| stream.synchronize(slice))
    }

    /// Transfers `size_bytes` and waits for the completion: by this thread, or on the stream.
    pub fn transfer(&mut self, by: Loop, step: u64, size_bytes: u64) -> Result<()> {
        match by {
            Loop::Sync => {
                self.post(step, size_bytes, |endpoint, _, work| {
                    endpoint.post_send(work).map(drop)
                })?;
                self.complete(Side::Send)
            }
            Loop::Async => {
                #[cfg(feature = "cuda")]
                if self.trigger.is_some() {
                    return self.trigger_transfer(step, size_bytes);
                }
                self.post(step, size_bytes, |endpoint, stream, work| {
                    send_and_wait(endpoint, stream.executor(), work)
                })
            }
        }
    }

    /// Has the kernel of the step ring.
    #[cfg(feature = "cuda")]
    fn trigger_transfer(&mut self, step: u64, size_bytes: u64) -> Result<()> {
        let kernel = std::mem::take(&mut self.kernel);
        let (Some(mut trigger), BenchStream::Cuda(stream)) =
            (self.trigger.take(), self.stream.clone())
        else {
            return Ok(());
        };
        let messages = Arc::clone(&self.messages);
        let to = self.remote.at(messages.arrival_offset(), size_bytes)?;
        let remote = (to, self.remote.rkey);
        let imm = self.announced.then_some(step as u32);
        let put = |queue: &KernelQueue| {
            Ok(PutStep {
                local: queue.local(&messages.leaving(size_bytes)?)?,
                len_bytes: size_bytes as u32,
                remote,
                imm,
                ..PutStep::default()
            })
        };
        let triggered = self.post(step, size_bytes, |endpoint, _, work| {
            trigger.step(&stream, kernel, put, |kernels| {
                send_and_wait(endpoint, kernels, work)
            })
        });
        self.trigger = Some(trigger);
        triggered
    }

    /// What failed of the steps whose kernels rang, once they are done.
    ///
    /// # Errors
    /// That.
    pub fn settle(&self) -> Result<()> {
        self.trigger
            .as_ref()
            .map_or(Ok(()), TriggerKernels::verdict)
    }

    /// Records kernel, transfer and the wait for its completion, so many times, into a graph. What was queued on the stream is done.
    ///
    /// # Errors
    /// What the library refuses; [`Error::State`] if it is no stream of a GPU, or if steps differ from each other.
    #[cfg(feature = "cuda")]
    pub fn record(&mut self, step: &BenchStep, steps: u64) -> Result<GraphExec> {
        let refused = |reason: &str| Error::State {
            operation: "bench",
            reason: reason.into(),
        };
        if self.announced || self.no_kernel {
            return Err(refused("a graph repeats a kernel and a bare write"));
        }
        self.post(step.index, step.size_bytes, |endpoint, stream, work| {
            let BenchStream::Cuda(stream) = stream else {
                return Err(refused("threads take no graph"));
            };
            let mut graph = GraphBuilder::capture(stream)?;
            for _ in 0..steps {
                stream.spin(step.kernel())?;
                graph.send(endpoint, work)?;
                graph.wait_cq(endpoint, Side::Send)?;
            }
            graph.instantiate()
        })
    }

    /// Launches what [`Peer::record`] made.
    ///
    /// # Errors
    /// What the library refuses.
    #[cfg(feature = "cuda")]
    pub fn launch_graph(&mut self, graph: &mut GraphExec) -> Result<()> {
        match &self.stream {
            BenchStream::Cuda(stream) => graph.launch(stream, &mut [&mut self.endpoint]),
            BenchStream::Host(_) => Ok(()),
        }
    }

    /// Hands over what is to be transferred, and what it is queued on.
    fn post<T>(
        &mut self,
        step: u64,
        size_bytes: u64,
        post: impl FnOnce(&mut Endpoint, &BenchStream, &Work<'_>) -> Result<T>,
    ) -> Result<T> {
        let slices = [self.messages.leaving(size_bytes)?];
        let work = match self.op {
            Op::Send => Work::send(&slices),
            Op::Write => {
                let at = self.remote.at(self.messages.arrival_offset(), size_bytes)?;
                let work = Work::write(&slices, at, self.remote.rkey);
                if self.announced {
                    work.imm(step as u32)
                } else {
                    work
                }
            }
        };
        post(&mut self.endpoint, &self.stream, &work)
    }

    /// Waits for the peer's message: by this thread, or on the stream.
    pub fn arrive(&mut self, by: Loop) -> Result<()> {
        self.keep_ahead()?;
        match by {
            Loop::Sync => self.complete(Side::Recv)?,
            Loop::Async => drop(
                self.endpoint
                    .stream_wait_cq(self.stream.executor(), Side::Recv)?,
            ),
        }
        self.ahead -= 1;
        Ok(())
    }

    /// Looks at every byte of what has arrived, if the plan says so: in this thread, or as a kernel on the stream.
    pub fn inspect(&self, by: Loop, step: u64, size_bytes: u64) -> Result<()> {
        if !self.validate {
            return Ok(());
        }
        match by {
            Loop::Sync => {
                self.messages.inspect(step, size_bytes);
                Ok(())
            }
            Loop::Async => {
                let messages = Arc::clone(&self.messages);
                self.stream
                    .launch_host(move || messages.inspect(step, size_bytes))
            }
        }
    }

    /// Whether all bytes so far were right.
    ///
    /// # Errors
    /// The first that was not.
    pub fn verdict(&self) -> anyhow::Result<()> {
        self.messages.verdict()
    }

    fn complete(&mut self, side: Side) -> Result<()> {
        let Self {
            limits, endpoint, ..
        } = self;
        limits
            .wait_for_one(|slice| endpoint.wait_cq(side, slice))
            .map(drop)
    }

    /// Posts receives, many at a time, before those that are there run out. A send without announcement takes none, but what
    /// is posted once serves all rows.
    fn keep_ahead(&mut self) -> Result<()> {
        if self.ahead >= self.chunk {
            return Ok(());
        }
        let place = [self.messages.arriving()?];
        for _ in 0..self.chunk {
            self.endpoint.post_recv(0, &place)?;
        }
        self.ahead += self.chunk;
        Ok(())
    }
}
