//! A stream: a queue of tasks and the thread that does them in order.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};

use crate::call::{CUresult, CudaResult, count_wait};
use crate::capture::Capture;
use crate::context::Context;
use crate::life::ContextLife;
use crate::mark::LOOK;
use crate::settings::settings;
use crate::task::Task;
use crate::{fault, held};

pub const NON_BLOCKING: u32 = 1;
pub const GREATEST_PRIORITY: i32 = -5;

/// How a stream stands to the default one.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum StreamOrder {
    Legacy,
    /// In order with the default stream, both ways.
    Blocking,
    NonBlocking,
}

pub struct Stream {
    /// 0 for those that have no handle of their own.
    pub handle: u64,
    pub id: u64,
    pub context: Arc<Context>,
    pub flags: u32,
    pub priority: i32,
    pub kind: StreamOrder,
    queue: Mutex<TaskQueue>,
    changed: Condvar,
    /// What it is being captured into.
    capture: Mutex<Option<Arc<Capture>>>,
}

#[derive(Default)]
struct TaskQueue {
    tasks: VecDeque<Arc<dyn Task>>,
    /// How many tasks ever came.
    submitted: u64,
    /// How many are done, or never will be.
    completed: u64,
    /// Places in the stream's queue that work not done has.
    places: u64,
    /// How many must be done before later work of other streams in the same work queue begins: all that were queued before a task that only has to
    /// begin, and a wait with them.
    held_until: u64,
    /// A task is being done.
    busy: bool,
    /// No more tasks come: the thread ends with the last.
    closing: bool,
    has_thread: bool,
    /// How many callers wait for room.
    blocked: u32,
}

/// Waits until these streams have completed their work up to these places.
struct WaitForStreams(Vec<(Arc<Stream>, u64)>);

impl Task for WaitForStreams {
    fn run(&self, life: &ContextLife) -> CudaResult {
        for (stream, place) in &self.0 {
            stream.wait_until_over(*place, life);
        }
        Ok(())
    }

    fn holds_work_queue(&self) -> bool {
        true
    }
}

impl TaskQueue {
    fn push(&mut self, task: Arc<dyn Task>) -> u64 {
        let place = self.submitted + 1;
        self.held_until = if task.holds_work_queue() {
            place
        } else {
            self.held_until.max(self.submitted)
        };
        self.places += task.places();
        self.tasks.push_back(task);
        self.submitted = place;
        place
    }
}

impl Stream {
    pub fn new(
        context: &Arc<Context>,
        flags: u32,
        priority: i32,
        kind: StreamOrder,
    ) -> Arc<Stream> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Arc::new(Stream {
            handle: 0,
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            context: context.clone(),
            flags,
            priority,
            kind,
            queue: Mutex::default(),
            changed: Condvar::new(),
            capture: Mutex::default(),
        })
    }

    pub fn capture(&self) -> Option<Arc<Capture>> {
        let capture = self.capture.lock();
        capture
            .unwrap_or_else(|poisoned| poisoned.into_inner())
            .clone()
    }

    pub fn set_capture(&self, capture: Option<Arc<Capture>>) {
        let mut own = self
            .capture
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner());
        *own = capture;
    }

    fn lock(&self) -> MutexGuard<'_, TaskQueue> {
        self.queue
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn sleep<'a>(&self, queue: MutexGuard<'a, TaskQueue>) -> MutexGuard<'a, TaskQueue> {
        self.changed
            .wait_timeout(queue, LOOK)
            .map_or_else(|poisoned| poisoned.into_inner().0, |(guard, _)| guard)
    }

    /// A stream takes so many calls, and the next one waits until one of them is done. Other streams wait meanwhile, above all copies
    /// (Oneflow-Inc/oneflow pull request 890): it has the driver's lock.
    fn wait_for_room(&self) {
        let is_full = |queue: &TaskQueue| queue.places >= settings().queue;
        if !is_full(&self.lock()) {
            return;
        }
        count_wait();
        let _alone = self.context.passed();
        let mut queue = self.lock();
        queue.blocked += 1;
        while is_full(&queue) && !self.context.life.is_over() {
            queue = self.sleep(queue);
        }
        queue.blocked -= 1;
        self.changed.notify_all();
    }

    /// A query waits while another thread is blocked in a call that queues on the stream: seen on an H200 with driver 580.159.04, where cuStreamQuery
    /// came back when the stream went on (docs/measured/h200.md).
    pub fn wait_for_blocked_callers(&self) {
        let mut queue = self.lock();
        if queue.blocked > 0 {
            count_wait();
        }
        while queue.blocked > 0 && !self.context.life.is_over() {
            queue = self.sleep(queue);
        }
    }

    /// Queues a task behind what it follows by the rules of the default stream. Its place in the stream's count comes back.
    pub fn submit(self: &Arc<Stream>, task: Arc<dyn Task>) -> CudaResult<u64> {
        // Work that is queued later than a NIC's write sees it.
        if !held::is_nic() {
            held::release();
        }
        self.context.pass();
        self.wait_for_room();
        let streams = self.context.lock_streams();
        self.context.life.check()?;
        let before: Vec<(Arc<Stream>, u64)> = streams
            .iter()
            .filter_map(|other| Some((other.clone(), self.place_before(other)?)))
            .collect();
        let mut queue = self.lock();
        if !before.is_empty() {
            queue.push(Arc::new(WaitForStreams(before)));
        }
        let place = queue.push(task);
        if !queue.has_thread {
            let stream = self.clone();
            std::thread::Builder::new()
                .name(format!("cuda-{}", self.id))
                .spawn(move || stream.serve())
                .map_err(|_| CUresult::CUDA_ERROR_OUT_OF_MEMORY)?;
            queue.has_thread = true;
        }
        drop(queue);
        self.changed.notify_all();
        Ok(place)
    }

    /// How much of the work of another stream comes before what is queued next: all of it by the rules of the default stream, or what is ahead in the same
    /// work queue. Streams are aliased onto work queues, which are in order (NVIDIA, Multi-Process Service, architecture; CUDA programming guide,
    /// `CUDA_DEVICE_MAX_CONNECTIONS`). That is the stricter reading, for those who set the variable; see [`Context::with_work_queue`] for what was seen.
    /// Programs set one queue to have kernels begin in the order of their launches (NVIDIA/Megatron-LM issue 533).
    fn place_before(&self, other: &Stream) -> Option<u64> {
        let is_ordered = match self.kind {
            StreamOrder::Legacy => other.kind == StreamOrder::Blocking,
            StreamOrder::Blocking => other.kind == StreamOrder::Legacy,
            StreamOrder::NonBlocking => false,
        };
        let shares = |count: &u64| other.id != self.id && other.id % count == self.id % count;
        let shares_queue = settings().connections.as_ref().is_some_and(shares);
        if !is_ordered && !shares_queue {
            return None;
        }
        let queue = other.lock();
        let place = if is_ordered {
            queue.submitted
        } else {
            queue.held_until
        };
        (queue.completed < place).then_some(place)
    }

    /// Queues a task and waits for its end.
    pub fn submit_and_wait(self: &Arc<Stream>, task: Arc<dyn Task>) -> CudaResult {
        let place = self.submit(task)?;
        self.wait_for(place);
        self.context.life.check()
    }

    /// The same, with the driver's lock while it waits.
    pub fn submit_and_wait_alone(self: &Arc<Stream>, task: Arc<dyn Task>) -> CudaResult {
        let place = self.submit(task)?;
        self.context.alone(|| self.wait_for(place));
        self.context.life.check()
    }

    pub fn submitted(&self) -> u64 {
        self.lock().submitted
    }

    pub fn is_idle(&self) -> bool {
        let queue = self.lock();
        queue.completed == queue.submitted
    }

    /// Until the task with this place has ended. Ends with the context, too: `serve` gives up what is queued then.
    pub fn wait_for(&self, place: u64) {
        let mut queue = self.lock();
        while queue.completed < place {
            queue = self.sleep(queue);
        }
    }

    /// As `wait_for`, in the thread of another stream.
    pub fn wait_until_over(&self, place: u64, life: &ContextLife) {
        let mut queue = self.lock();
        while queue.completed < place && !life.is_over() {
            queue = self.sleep(queue);
        }
    }

    /// Takes no more work. What is queued is still done.
    pub fn close(self: &Arc<Stream>) {
        let mut queue = self.lock();
        queue.closing = true;
        let leaves = !queue.has_thread;
        drop(queue);
        if leaves {
            self.leave();
        }
        self.changed.notify_all();
    }

    /// It has no work and gets none.
    fn leave(&self) {
        self.context
            .lock_streams()
            .retain(|stream| stream.id != self.id);
    }

    /// Gives up what is queued and waits for what is being done: the context is over.
    pub fn end(self: &Arc<Stream>) {
        let mut queue = self.lock();
        queue.closing = true;
        self.changed.notify_all();
        while queue.busy || (queue.has_thread && !queue.tasks.is_empty()) {
            queue = self.sleep(queue);
        }
    }

    fn serve(self: Arc<Stream>) {
        loop {
            let mut queue = self.lock();
            let task = loop {
                if let Some(task) = queue.tasks.pop_front() {
                    break task;
                }
                if queue.closing {
                    drop(queue);
                    self.leave();
                    return;
                }
                queue = self
                    .changed
                    .wait(queue)
                    .unwrap_or_else(|poisoned| poisoned.into_inner());
            };
            queue.busy = true;
            drop(queue);
            let holds = task.holds_work_queue();
            self.context.with_work_queue(holds, || self.perform(&*task));
            let mut queue = self.lock();
            queue.completed += 1;
            queue.places -= task.places();
            queue.busy = false;
            // With the lock held: a thread that sees the mark reached may query the stream next, and the other way round. Also if the task
            // was not done.
            if let Some(mark) = task.end() {
                mark.reach();
            }
            drop(queue);
            self.changed.notify_all();
        }
    }

    fn perform(&self, task: &dyn Task) {
        fault::delay_task();
        if self.context.life.is_over() {
            return;
        }
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            fault::of_task()?;
            task.run(&self.context.life)
        }));
        let error = match outcome {
            Ok(Ok(())) => return,
            Ok(Err(error)) => error,
            Err(_) => CUresult::CUDA_ERROR_LAUNCH_FAILED,
        };
        self.context.life.keep(error);
    }
}
