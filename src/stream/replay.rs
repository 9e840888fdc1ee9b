//! Operations of graphs that the application captures and launches by itself: what a stream of a GPU does for them, and the words that they
//! share with this process.

use std::any::Any;
use std::fmt;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicI32, AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use doorbell_wire::memory::PageSlice;

use super::{KernelMemory, Owner};
use crate::Result;

/// `struct dbl_replay` of `include/doorbell/detail/replay.h`: an operation of a graph, the parameter of the kernel that executes it.
pub type ReplayWords = [u64; 37];

/// What graphs keep of an operation, as long as they may be launched.
pub type ReplayKeeper = Arc<dyn Any + Send + Sync>;

/// A part of this process's memory.
#[derive(Debug, Clone)]
pub struct ReplayPart {
    /// The address.
    pub start: usize,
    /// Its bytes.
    pub len_bytes: usize,
    /// What keeps it mapped, for the registers of a card.
    pub registers: Option<Weak<dyn Any + Send + Sync>>,
}

/// Memory of a GPU, and memory of this process that is mapped to it.
pub trait ReplayMemory: fmt::Debug + Send + Sync {
    /// The device's address of the GPU's memory.
    fn start(&self) -> u64;

    /// The device's address of each part of this process's memory, in their order.
    fn mapped(&self) -> &[u64];

    /// Copies bytes to an offset of the GPU's memory, and returns when they are there.
    ///
    /// # Errors
    /// [`Error::Cuda`](crate::Error::Cuda); [`Error::OutOfBounds`](crate::Error::OutOfBounds).
    fn write(&self, offset: u64, bytes: &[u8]) -> Result<()>;
}

/// A stream of a GPU on which operations become nodes of a graph that the application captures.
pub trait ReplayStream: fmt::Debug {
    /// The number of the capture that the stream is in, if the application captures it.
    ///
    /// # Errors
    /// [`Error::Cuda`](crate::Error::Cuda).
    fn capture(&self) -> Result<Option<u64>>;

    /// The number of its context.
    fn context_key(&self) -> u64;

    /// Memory of the GPU with these contents, and the parts mapped to it.
    ///
    /// # Errors
    /// [`Error::State`](crate::Error::State) if kernels of this library cannot be used here, or a NIC's writes are not in order; [`Error::Cuda`](crate::Error::Cuda).
    fn map(&self, parts: &[ReplayPart], contents: &[u8]) -> Result<Box<dyn ReplayMemory>>;

    /// The device's address of memory of a region.
    ///
    /// # Errors
    /// [`Error::Foreign`](crate::Error::Foreign) for memory of another context; [`Error::Cuda`](crate::Error::Cuda).
    fn reach(&self, memory: &KernelMemory<'_>) -> Result<u64>;

    /// The device's address of the word that has the code of the stream's first operation which was not executed.
    fn fault_word(&self) -> u64;

    /// Where the words of the stream's operations come from.
    fn cells(&self) -> &ReplayCells;

    /// Adds a node to the graph, which keeps `keeper`; on a stream that is not captured, queues the kernel, whose words have that cell. What is queued behind
    /// the kernel is given up if the kernel does not execute its operation. If the operation itself is given up, so is its endpoint.
    ///
    /// # Errors
    /// [`Error::Cuda`](crate::Error::Cuda); those of the stream.
    fn queue(
        &self,
        words: &ReplayWords,
        cell: &Arc<ReplayCell>,
        keeper: ReplayKeeper,
        endpoint: Option<Arc<dyn Owner>>,
    ) -> Result<()>;
}

/// `struct dbl_replay_report` of `include/doorbell/detail/replay.h`.
#[derive(Debug, Default)]
#[repr(C, align(64))]
struct ReplayReport {
    launches: AtomicU64,
    code: AtomicI32,
    len_bytes: AtomicU32,
    imm: AtomicU32,
    has_imm: AtomicU32,
    passed: AtomicU32,
}

const _: () = assert!(size_of::<ReplayReport>() == 64);

/// Cells of a chunk: their reports fill a page.
const CHUNK: u32 = 64;
/// Bytes of `struct dbl_replay_cell`.
const CELL_BYTES: u64 = 16;

/// Cells whose memory was allocated together.
#[derive(Debug)]
struct ReplayCellChunk {
    /// Before the memory that it maps.
    memory: Box<dyn ReplayMemory>,
    reports: PageSlice<ReplayReport>,
    free: Mutex<Vec<u32>>,
}

/// The cells of a stream.
#[derive(Debug, Default)]
pub struct ReplayCells {
    chunks: Mutex<Vec<Weak<ReplayCellChunk>>>,
}

/// What an operation of a graph keeps from launch to launch on the GPU, and what this process learns of it.
#[derive(Debug)]
pub struct ReplayCell {
    chunk: Arc<ReplayCellChunk>,
    at: u32,
    end: AtomicU8,
}

/// What the stream says of an operation that is no node of a graph.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum ReplayEnd {
    /// Nothing: the operation is a node of a graph.
    Untold,
    /// The stream has not come behind the operation.
    Pending,
    /// It has.
    Passed,
    /// It has ended before the operation.
    Discarded,
    /// It has ended when it may have been at the operation.
    Lost,
}

impl ReplayCells {
    /// A cell of which nothing has been launched.
    ///
    /// # Errors
    /// Those of [`ReplayStream::map`].
    pub(crate) fn take(&self, stream: &dyn ReplayStream) -> Result<ReplayCell> {
        let mut chunks = self.chunks.lock().unwrap_or_else(PoisonError::into_inner);
        chunks.retain(|chunk| chunk.strong_count() > 0);
        let free = chunks.iter().filter_map(Weak::upgrade).find_map(|chunk| {
            let at = chunk.free().pop()?;
            Some(ReplayCell::new(chunk, at))
        });
        if let Some(cell) = free {
            cell.clear()?;
            return Ok(cell);
        }
        let reports = PageSlice::new(CHUNK as usize, |_| ReplayReport::default())?;
        let part = ReplayPart {
            start: reports.as_ptr().addr(),
            len_bytes: size_of_val(&*reports),
            registers: None,
        };
        let contents = [0; CHUNK as usize * CELL_BYTES as usize];
        let chunk = Arc::new(ReplayCellChunk {
            memory: stream.map(&[part], &contents)?,
            reports,
            free: Mutex::new((1..CHUNK).rev().collect()),
        });
        chunks.push(Arc::downgrade(&chunk));
        Ok(ReplayCell::new(chunk, 0))
    }
}

impl ReplayCellChunk {
    fn free(&self) -> std::sync::MutexGuard<'_, Vec<u32>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ReplayCell {
    fn new(chunk: Arc<ReplayCellChunk>, at: u32) -> ReplayCell {
        ReplayCell {
            chunk,
            at,
            end: AtomicU8::new(ReplayEnd::Untold as u8),
        }
    }

    /// A stream has the operation, and will call [`ReplayCell::end`].
    pub(crate) fn begin(&self) {
        self.end.store(ReplayEnd::Pending as u8, Ordering::Release);
    }

    /// The stream has passed the operation, or never will. Only the first call says how.
    pub(crate) fn end(&self, end: ReplayEnd) {
        let pending = ReplayEnd::Pending as u8;
        let _ =
            (self.end).compare_exchange(pending, end as u8, Ordering::AcqRel, Ordering::Acquire);
    }

    /// What the stream has said.
    pub(crate) fn ended(&self) -> ReplayEnd {
        let ends = [
            ReplayEnd::Untold,
            ReplayEnd::Pending,
            ReplayEnd::Passed,
            ReplayEnd::Discarded,
        ];
        let at = self.end.load(Ordering::Acquire);
        ends.get(usize::from(at))
            .copied()
            .unwrap_or(ReplayEnd::Lost)
    }

    fn report(&self) -> &ReplayReport {
        &self.chunk.reports[self.at as usize]
    }

    fn clear(&self) -> Result<()> {
        let offset = u64::from(self.at) * CELL_BYTES;
        self.chunk.memory.write(offset, &[0; CELL_BYTES as usize])?;
        let report = self.report();
        report.launches.store(0, Ordering::Relaxed);
        report.code.store(0, Ordering::Relaxed);
        report.passed.store(0, Ordering::Relaxed);
        Ok(())
    }

    /// The device's address of the `struct dbl_replay_cell`.
    pub(crate) fn cell_at(&self) -> u64 {
        self.chunk.memory.start() + u64::from(self.at) * CELL_BYTES
    }

    /// The device's address of the `struct dbl_replay_report`.
    pub(crate) fn report_at(&self) -> u64 {
        let offset = u64::from(self.at) * size_of::<ReplayReport>() as u64;
        self.chunk.memory.mapped().first().copied().unwrap_or(0) + offset
    }

    /// The 32-bit word that is 1 when the operation was executed.
    pub(crate) fn passed(&self) -> NonNull<u8> {
        NonNull::from(&self.report().passed).cast()
    }

    /// How many launches have executed the operation.
    pub(crate) fn launches(&self) -> u64 {
        self.report().launches.load(Ordering::Acquire)
    }

    /// 0, or the code of the first launch that did not execute the operation.
    pub(crate) fn code(&self) -> i32 {
        self.report().code.load(Ordering::Acquire)
    }

    /// Bytes and immediate data of the last receive that it has waited for.
    pub(crate) fn details(&self) -> (u32, Option<u32>) {
        let report = self.report();
        let has_imm = report.has_imm.load(Ordering::Relaxed) != 0;
        (
            report.len_bytes.load(Ordering::Relaxed),
            has_imm.then(|| report.imm.load(Ordering::Relaxed)),
        )
    }
}

impl Drop for ReplayCell {
    fn drop(&mut self) {
        self.chunk.free().push(self.at);
    }
}
