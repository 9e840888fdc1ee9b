//! One peer of a benchmark: what carries its messages, its stream, and the memory of its messages.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

#[cfg(feature = "cuda")]
use doorbell::__private::PutStep;
use doorbell::{
    Access, Control, Endpoint, Error, Executor, PostedSend, ProtectionDomain, QueueKind, Region,
    RemoteRegion, Result, StateKind, Work,
};
#[cfg(feature = "cuda")]
use doorbell::{CudaStream, DeviceQueue, GraphBuilder, GraphExec, stream_post_all};

use super::backend::{Backend, BenchStream};
use super::carrier::Carrier;
use super::kinds::Loop;
use super::message::Messages;
use super::options::{MessageOp, Plan};
use super::step::BenchStep;
use super::trigger::TriggerKernels;

/// How often a wait checks that the other process is still connected.
const SLICE: Duration = Duration::from_millis(100);

/// What bounds the waits of a peer.
#[derive(Clone, Debug)]
pub struct WaitLimits {
    /// Longest wait for one transfer.
    pub timeout: Duration,
    /// Set when the other process disconnects; none if both peers are in this process.
    pub disconnected: Option<Arc<AtomicBool>>,
}

impl WaitLimits {
    /// Waits for work that ends by itself, because each of its transfers has a deadline.
    ///
    /// # Errors
    /// Those of `wait`; [`Error::State`] if the other process disconnects.
    pub fn wait_for_all<T>(&self, wait: impl FnMut(Option<Duration>) -> Result<T>) -> Result<T> {
        self.wait(None, wait)
    }

    /// Waits for one transfer.
    fn wait_for_one<T>(&self, wait: impl FnMut(Option<Duration>) -> Result<T>) -> Result<T> {
        self.wait(Some(self.timeout), wait)
    }

    /// Calls `wait` with the timeout. With another process, waits in short slices and checks the connection after each.
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
                        return Err(Error::state(
                            StateKind::Disconnected,
                            operation,
                            "the other process has disconnected",
                        ));
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

/// Memory for the messages, on the host or the GPU.
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
    endpoint.stream_wait_cq(stream, QueueKind::Send)?;
    Ok(())
}

/// As [`send_and_wait`], by one call of the driver.
#[cfg(feature = "cuda")]
fn send_and_wait_in_one_call(
    endpoint: &mut Endpoint,
    stream: &CudaStream,
    work: &Work<'_>,
) -> Result<()> {
    let send = endpoint.prepare_send(work)?;
    let wait = endpoint.prepare_wait_cq(QueueKind::Send)?;
    stream_post_all(stream, &mut vec![send, wait]).map(drop)
}

/// One peer.
pub struct Peer {
    /// Launches the kernels that ring, with `--trigger`. Declared first, so that it is dropped before what its kernels use.
    trigger: Option<TriggerKernels>,
    carrier: Carrier,
    stream: BenchStream,
    /// The stream of the synchronous loop.
    sync_stream: BenchStream,
    /// Length of the kernel of the current step, which is launched with its transfer if it rings.
    #[cfg(feature = "cuda")]
    kernel: Duration,
    no_kernel: bool,
    messages: Arc<Messages>,
    /// Where the other peer's messages arrive.
    remote: RemoteRegion,
    limits: WaitLimits,
    op: MessageOp,
    validate: bool,
    /// Whether the receiver learns of each message.
    announced: bool,
    /// Posted receives that no wait was queued for yet.
    ahead: u64,
    /// Receives that are posted together.
    chunk: u64,
    /// Messages that this thread has sent, and has not waited for.
    posted: VecDeque<PostedSend>,
}

impl Peer {
    /// A peer that is not connected yet, with its streams of the asynchronous and of the synchronous loop. The two peers of a connection have
    /// `seeds` in opposite order.
    pub fn new(
        domain: &ProtectionDomain,
        backend: &Backend,
        [stream, sync_stream]: [&BenchStream; 2],
        plan: &Plan,
        seeds: [u64; 2],
        limits: &WaitLimits,
    ) -> Result<Peer> {
        let max_bytes = plan.sizes.max_bytes();
        let region = messages_region(domain, backend, Messages::region_bytes(max_bytes))?;
        let carrier = Carrier::new(domain, plan, limits.timeout)?;
        let trigger = backend.trigger(limits.timeout)?;
        if trigger.is_some() && carrier.path().control == Control::Sync {
            return Err(Error::state(
                StateKind::Unsupported,
                "--trigger",
                "kernels cannot ring on the sync path, where the application thread does",
            ));
        }
        Ok(Peer {
            carrier,
            stream: stream.clone(),
            sync_stream: sync_stream.clone(),
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
            posted: VecDeque::new(),
        })
    }

    /// What carries the messages.
    pub fn carrier(&self) -> &Carrier {
        &self.carrier
    }

    /// What the other peer needs to connect.
    pub fn contact(&self) -> Vec<u8> {
        self.carrier.contact(self.messages.region())
    }

    /// Connects to the other peer, by its contact, and posts the first receives.
    pub fn connect(&mut self, contact: &[u8]) -> Result<()> {
        if let Some(remote) = self.carrier.connect(contact)? {
            self.remote = remote;
        }
        #[cfg(feature = "cuda")]
        if let Some(trigger) = &mut self.trigger {
            trigger.connected(self.carrier.endpoint()?)?;
        }
        self.keep_ahead()
    }

    /// Launches the kernel of a step. A kernel that rings is launched with the transfer instead.
    pub fn launch(&mut self, by: Loop, step: BenchStep) -> Result<()> {
        if self.no_kernel {
            // There is no kernel; the step still notes its time.
            if self.validate {
                self.messages.fill(step.index, step.size_bytes);
            }
            step.run_kernel();
            return Ok(());
        }
        if self.validate {
            let messages = Arc::clone(&self.messages);
            let (index, size_bytes) = (step.index, step.size_bytes);
            self.stream_of(by)
                .launch_host(move || messages.fill(index, size_bytes))?;
        }
        #[cfg(feature = "cuda")]
        if self.trigger.is_some() && by == Loop::Async {
            self.kernel = step.kernel();
            return Ok(());
        }
        self.stream_of(by).launch_kernel(step)
    }

    fn stream_of(&self, by: Loop) -> &BenchStream {
        match by {
            Loop::Sync => &self.sync_stream,
            Loop::Async => &self.stream,
        }
    }

    /// Waits for the stream by spinning, as applications do by CUDA's default.
    pub fn synchronize(&self) -> Result<()> {
        let stream = self.sync_stream.executor();
        self.limits.wait_for_all(|slice| stream.synchronize(slice))
    }

    /// Transfers `size_bytes` and waits for the completion: in this thread, or on the stream. Of a message queue's message [`Peer::sent`] waits in this
    /// thread.
    pub fn transfer(&mut self, by: Loop, step: u64, size_bytes: u64) -> Result<()> {
        if let Carrier::Queue(queue) = &mut self.carrier {
            let slices = [self.messages.leaving(size_bytes)?];
            match by {
                Loop::Sync => {
                    let start = |slice| queue.start_send_now(&slices, slice);
                    self.posted.push_back(self.limits.wait_for_one(start)?);
                }
                Loop::Async => drop(queue.send(self.stream.executor(), &slices)?),
            }
            return Ok(());
        }
        match by {
            Loop::Sync => {
                self.post(step, size_bytes, |endpoint, _, work| {
                    endpoint.post_send(work).map(drop)
                })?;
                self.complete(QueueKind::Send)
            }
            Loop::Async => {
                #[cfg(feature = "cuda")]
                if self.trigger.is_some() {
                    return self.trigger_transfer(step, size_bytes);
                }
                self.post(step, size_bytes, |endpoint, stream, work| {
                    #[cfg(feature = "cuda")]
                    if let BenchStream::Cuda(stream) = stream {
                        return send_and_wait_in_one_call(endpoint, stream, work);
                    }
                    send_and_wait(endpoint, stream.executor(), work)
                })
            }
        }
    }

    /// Launches the kernel of the step, which rings the doorbell.
    #[cfg(feature = "cuda")]
    fn trigger_transfer(&mut self, step: u64, size_bytes: u64) -> Result<()> {
        let kernel = std::mem::take(&mut self.kernel);
        let (Some(mut trigger), BenchStream::Cuda(stream)) =
            (self.trigger.take(), self.stream.clone())
        else {
            return Ok(());
        };
        let messages = Arc::clone(&self.messages);
        let to = self.remote.slice(messages.arrival_offset(), size_bytes)?;
        let remote = (to.addr(), to.rkey());
        let imm = self.announced.then_some(step as u32);
        let put = |queue: &DeviceQueue| {
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

    /// Reports failures of kernels that ring, after they have run.
    ///
    /// # Errors
    /// The first failure.
    pub fn settle(&self) -> Result<()> {
        self.trigger
            .as_ref()
            .map_or(Ok(()), TriggerKernels::verdict)
    }

    /// Records kernel, transfer and the wait for its completion, `steps` times, into a graph. The stream must be drained.
    ///
    /// # Errors
    /// Those of the library; [`Error::State`] if the stream is not a GPU's, or if the steps differ from each other.
    #[cfg(feature = "cuda")]
    pub fn record(&mut self, step: &BenchStep, steps: u64) -> Result<GraphExec> {
        let refused = |reason: &str| Error::state(StateKind::Unsupported, "bench", reason);
        if self.announced || self.no_kernel {
            return Err(refused(
                "a graph repeats a kernel and a write without immediate data",
            ));
        }
        self.post(step.index, step.size_bytes, |endpoint, stream, work| {
            let BenchStream::Cuda(stream) = stream else {
                return Err(refused("only CUDA streams launch graphs"));
            };
            let mut graph = GraphBuilder::capture(stream)?;
            for _ in 0..steps {
                stream.spin(step.kernel())?;
                graph.send(endpoint, work)?;
                graph.wait_cq(endpoint, QueueKind::Send)?;
            }
            graph.instantiate()
        })
    }

    /// Launches a graph of [`Peer::record`].
    ///
    /// # Errors
    /// Those of the library.
    #[cfg(feature = "cuda")]
    pub fn launch_graph(&mut self, graph: &mut GraphExec) -> Result<()> {
        match &self.stream {
            BenchStream::Cuda(stream) => graph.launch(stream, &mut [self.carrier.endpoint()?]),
            BenchStream::Host(_) => Ok(()),
        }
    }

    /// Builds the work request of a step and passes it to `post`, with the endpoint and the stream.
    fn post<T>(
        &mut self,
        step: u64,
        size_bytes: u64,
        post: impl FnOnce(&mut Endpoint, &BenchStream, &Work<'_>) -> Result<T>,
    ) -> Result<T> {
        let slices = [self.messages.leaving(size_bytes)?];
        let work = match self.op {
            MessageOp::Send | MessageOp::Message => Work::send(&slices),
            MessageOp::Write => {
                let to = self.messages.arrival_offset();
                let work = Work::write(&slices, self.remote.slice(to, size_bytes)?);
                if self.announced {
                    work.imm(step as u32)
                } else {
                    work
                }
            }
        };
        post(self.carrier.endpoint()?, &self.stream, &work)
    }

    /// Waits in this thread until the memory of the oldest message that it has sent may be used again.
    pub fn sent(&mut self, by: Loop) -> Result<()> {
        match (by, &self.carrier, self.posted.pop_front()) {
            (Loop::Sync, Carrier::Queue(queue), Some(sent)) => self
                .limits
                .wait_for_one(|slice| queue.wait_send_now(&sent, slice)),
            _ => Ok(()),
        }
    }

    /// Waits for a message of the other peer, of `size_bytes`: in this thread, or on the stream.
    pub fn arrive(&mut self, by: Loop, size_bytes: u64) -> Result<()> {
        if let Carrier::Queue(queue) = &mut self.carrier {
            // Of that length, so that the receive of a short message does not prepare a read.
            let region = self.messages.region();
            let into = [region.slice(self.messages.arrival_offset(), size_bytes)?];
            match by {
                Loop::Sync => {
                    let receive = |slice| queue.recv_now(&into, slice);
                    self.limits.wait_for_one(receive)?;
                }
                Loop::Async => drop(queue.recv(self.stream.executor(), &into)?),
            }
            return Ok(());
        }
        self.keep_ahead()?;
        match by {
            Loop::Sync => self.complete(QueueKind::Recv)?,
            Loop::Async => {
                let stream = self.stream.executor();
                let endpoint = self.carrier.endpoint()?;
                drop(endpoint.stream_wait_cq(stream, QueueKind::Recv)?);
            }
        }
        self.ahead -= 1;
        Ok(())
    }

    /// Checks every byte of the message that has arrived, if the plan says so: in this thread, or in a host function on the stream.
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
    /// The first wrong byte.
    pub fn verdict(&self) -> anyhow::Result<()> {
        self.messages.verdict()
    }

    fn complete(&mut self, side: QueueKind) -> Result<()> {
        let Self {
            limits, carrier, ..
        } = self;
        let endpoint = carrier.endpoint()?;
        limits
            .wait_for_one(|slice| endpoint.wait_cq(side, slice))
            .map(drop)
    }

    /// Posts receives, several at a time, before the posted ones run out. A write without immediate data consumes none: then the first
    /// ones serve all rows.
    fn keep_ahead(&mut self) -> Result<()> {
        let Carrier::Endpoint(endpoint) = &mut self.carrier else {
            return Ok(());
        };
        if self.ahead >= self.chunk {
            return Ok(());
        }
        let place = [self.messages.arriving()?];
        for _ in 0..self.chunk {
            endpoint.post_recv(0, &place)?;
        }
        self.ahead += self.chunk;
        Ok(())
    }
}
