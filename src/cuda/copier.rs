//! Synchronous copies between this process and the memory of a GPU, for a software NIC and for the calls of a buffer.
#![allow(unsafe_code)] // calls the driver with addresses of memory of others

use std::cell::UnsafeCell;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use cudarc::driver::sys::{self, CUdeviceptr, CUresult, CUstream};

use super::context::CudaContext;
use super::driver::{check, create_stream, is};
use super::host_call::in_host_function;
use super::host_registration::HostRegistration;
#[cfg(feature = "softcx")]
use super::nic_write_scope::NicWriteScope;
use crate::stream::{Backoff, Lock};
use crate::{Error, Result, StateKind};
#[cfg(feature = "softcx")]
use doorbell_softcx::device::{AccessFault, Foreign, Move};
use doorbell_wire::memory::{PageSlice, Span};

/// Bytes between the two memories. A copy engine reaches its speed with far less than this.
const STAGING_BYTES: usize = 1 << 20;
/// How long a copy may take. Other copies may be before it on the copy engine, but none of them waits for anything.
const TIME_LIMIT: Duration = Duration::from_secs(10);
/// A stream for copies, and pinned memory for their host side.
pub(crate) struct Copier {
    context: CudaContext,
    stream: CUstream,
    staging: Lock<Option<StagingMemory>>,
    /// A copy has not ended in time. It may still use the staging memory, so no other copy is made.
    stuck: AtomicBool,
    /// Why the last copy for a software NIC failed, which itself reports only that it did.
    failure: Lock<Option<Error>>,
}

struct StagingMemory {
    /// Dropped before the memory.
    _pinned: HostRegistration,
    /// Written by copies and by [`SpanCursor`], through pointers.
    pages: PageSlice<UnsafeCell<StagingPage>>,
}

#[repr(C, align(4096))]
struct StagingPage([u8; 4096]);

// SAFETY: a stream's handle may be used from any thread; the driver locks.
unsafe impl Send for Copier {}
// SAFETY: as above.
unsafe impl Sync for Copier {}

impl Copier {
    /// The one of that context.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    pub(crate) fn of(context: &CudaContext) -> Result<Arc<Copier>> {
        static COPIERS: Mutex<BTreeMap<u64, Weak<Copier>>> = Mutex::new(BTreeMap::new());
        let mut known = COPIERS.lock().unwrap_or_else(PoisonError::into_inner);
        let found = known.get(&context.key()).and_then(Weak::upgrade);
        if let Some(copier) = found.filter(|it| !it.stuck.load(Ordering::Acquire)) {
            return Ok(copier);
        }
        known.retain(|_, copier| copier.strong_count() > 0);
        let copier = Arc::new(Copier::new(context)?);
        known.insert(context.key(), Arc::downgrade(&copier));
        Ok(copier)
    }

    fn new(context: &CudaContext) -> Result<Copier> {
        let _entered = context.enter_relaxed()?;
        let count = STAGING_BYTES / size_of::<StagingPage>();
        let pages = PageSlice::new(count, |_| UnsafeCell::new(StagingPage([0; 4096])))?;
        // SAFETY: the pages live longer than `pinned`, see `StagingMemory`, and have no other user.
        let pinned =
            unsafe { HostRegistration::new(context, pages.as_ptr().addr(), STAGING_BYTES)? };
        Ok(Copier {
            context: context.clone(),
            stream: create_stream()?,
            staging: Lock::new(Some(StagingMemory {
                _pinned: pinned,
                pages,
            })),
            stuck: AtomicBool::new(false),
            failure: Lock::default(),
        })
    }

    /// Why the last failed copy for a software NIC failed; None if none has.
    pub(super) fn failure(&self) -> Option<Error> {
        self.failure.lock().clone()
    }

    #[cfg(feature = "softcx")]
    #[cold]
    fn fault(&self, error: Error) -> AccessFault {
        *self.failure.lock() = Some(error);
        AccessFault
    }

    /// Copies out of the device's memory.
    ///
    /// # Errors
    /// [`Error::Cuda`]; [`Error::State`] after a copy that did not end.
    ///
    /// # Safety
    /// `from` is memory of the device of that length until this returns.
    pub(super) unsafe fn copy_out(&self, from: CUdeviceptr, into: &mut [u8]) -> Result<()> {
        let own = span(into.as_mut_ptr().expose_provenance() as u64, into.len());
        // SAFETY: `into` is borrowed, and the caller's promise.
        unsafe { self.fetch_all(&[own], &[span(from, into.len())]) }
    }

    /// Copies into the device's memory.
    ///
    /// # Errors
    /// As [`Copier::copy_out`].
    ///
    /// # Safety
    /// As [`Copier::copy_out`].
    pub(super) unsafe fn copy_in(&self, from: &[u8], into: CUdeviceptr) -> Result<()> {
        let own = span(from.as_ptr().expose_provenance() as u64, from.len());
        // SAFETY: `from` is borrowed, and the caller's promise.
        unsafe { self.put_all(&[own], &[span(into, from.len())]) }
    }

    /// # Safety
    /// As [`Foreign::fetch`].
    unsafe fn fetch_all(&self, own: &[Span], theirs: &[Span]) -> Result<()> {
        self.run(|staging| {
            let mut own = SpanCursor::new(own);
            let mut queued = 0;
            let mut fetched = |upto: &mut usize| -> Result<()> {
                self.finish()?;
                // SAFETY: the copies are over; `own` may be written, and has as many bytes as were queued.
                unsafe { own.write(staging.start(), *upto) };
                *upto = 0;
                Ok(())
            };
            for piece in theirs {
                let mut done = 0;
                while done < piece.len_bytes {
                    if queued == STAGING_BYTES {
                        fetched(&mut queued)?;
                    }
                    let len = (piece.len_bytes - done).min(STAGING_BYTES - queued);
                    // SAFETY: a part of the staging memory that no other copy uses, and the caller's promise.
                    check("cuMemcpyDtoHAsync", unsafe {
                        sys::cuMemcpyDtoHAsync_v2(
                            staging.start().add(queued).cast(),
                            piece.addr + done as u64,
                            len,
                            self.stream,
                        )
                    })?;
                    queued += len;
                    done += len;
                }
            }
            fetched(&mut queued)
        })
    }

    /// # Safety
    /// As [`Foreign::put`].
    unsafe fn put_all(&self, own: &[Span], theirs: &[Span]) -> Result<()> {
        self.run(|staging| {
            let mut own = SpanCursor::new(own);
            let mut queued = 0;
            for piece in theirs {
                let mut done = 0;
                while done < piece.len_bytes {
                    if queued == STAGING_BYTES {
                        self.finish()?;
                        queued = 0;
                    }
                    let len = (piece.len_bytes - done).min(STAGING_BYTES - queued);
                    // SAFETY: a part of the staging memory that no copy uses; `own` may be read, and has as many bytes as `theirs`.
                    unsafe { own.read(staging.start().add(queued), len) };
                    // SAFETY: as above, and the caller's promise.
                    check("cuMemcpyHtoDAsync", unsafe {
                        sys::cuMemcpyHtoDAsync_v2(
                            piece.addr + done as u64,
                            staging.start().add(queued).cast(),
                            len,
                            self.stream,
                        )
                    })?;
                    queued += len;
                    done += len;
                }
            }
            self.finish()
        })
    }

    /// # Safety
    /// As [`Foreign::shift`].
    #[cfg(feature = "softcx")]
    unsafe fn shift_all(&self, moves: &[Move]) -> Result<()> {
        self.run(|_| {
            for Move {
                from,
                into,
                len_bytes,
            } in moves
            {
                if *len_bytes == 0 {
                    continue;
                }
                // SAFETY: the caller's promise.
                check("cuMemcpyDtoDAsync", unsafe {
                    sys::cuMemcpyDtoDAsync_v2(*into, *from, *len_bytes, self.stream)
                })?;
            }
            self.finish()
        })
    }

    /// Runs `work` with the staging memory locked. When it returns, no copy is under way, or the copier is stuck for good.
    fn run(&self, work: impl Fn(&StagingMemory) -> Result<()> + Sync) -> Result<()> {
        if in_host_function() {
            return self.run_elsewhere(work);
        }
        match self.run_here(&work) {
            // Called in a host function of the application's, which must not call the driver either.
            Err(error) if is(&error, CUresult::CUDA_ERROR_NOT_PERMITTED) => {
                self.run_elsewhere(work)
            }
            done => done,
        }
    }

    fn run_here(&self, work: impl Fn(&StagingMemory) -> Result<()>) -> Result<()> {
        let mut staging = self.staging.lock();
        let Some(memory) = staging.as_ref() else {
            return Err(stuck());
        };
        let _entered = self.context.enter_relaxed()?;
        let done = work(memory);
        if done.is_err() && !self.stuck.load(Ordering::Acquire) {
            // What was queued before the failure.
            let _ = self.finish();
        }
        if self.stuck.load(Ordering::Acquire) {
            // A copy may write to it at any time.
            std::mem::forget(staging.take());
        }
        done
    }

    /// Runs `work` in another thread, for a caller in a host function, which must not call the driver.
    #[cold]
    fn run_elsewhere(&self, work: impl Fn(&StagingMemory) -> Result<()> + Sync) -> Result<()> {
        std::thread::scope(|scope| {
            let thread = std::thread::Builder::new()
                .name("doorbell-copies".into())
                .spawn_scoped(scope, || self.run_here(&work));
            let thread = thread.map_err(|error| Error::System {
                operation: "start of a thread for copies",
                errno: error.raw_os_error().unwrap_or(libc::EAGAIN),
            })?;
            thread.join().unwrap_or_else(|_| Err(stuck()))
        })
    }

    /// Waits until the stream's copies are done.
    fn finish(&self) -> Result<()> {
        let deadline = Instant::now() + TIME_LIMIT;
        let mut backoff = Backoff::new();
        loop {
            // SAFETY: a stream of ours.
            match unsafe { sys::cuStreamQuery(self.stream) } {
                CUresult::CUDA_ERROR_NOT_READY => {}
                result => return check("cuStreamQuery", result),
            }
            if !backoff.pause_until(Some(deadline)) {
                self.stuck.store(true, Ordering::Release);
                return Err(stuck());
            }
        }
    }
}

impl Drop for Copier {
    fn drop(&mut self) {
        // A destroyed context has destroyed its streams.
        if let Some(_entered) = self.context.enter_to_give_back() {
            // SAFETY: made by `new`, and the last handle was dropped.
            let _ = unsafe { sys::cuStreamDestroy_v2(self.stream) };
        }
    }
}

impl StagingMemory {
    fn start(&self) -> *mut u8 {
        UnsafeCell::raw_get(self.pages.as_ptr()).cast()
    }
}

fn span(addr: u64, len_bytes: usize) -> Span {
    Span { addr, len_bytes }
}

#[cold]
fn stuck() -> Error {
    Error::state(
        StateKind::Unexpected,
        "copy of a GPU's memory",
        format!("a copy has not ended within {TIME_LIMIT:?}"),
    )
}

/// A position in a list of spans of this process.
struct SpanCursor<'a> {
    spans: &'a [Span],
    done: usize,
}

impl<'a> SpanCursor<'a> {
    fn new(spans: &'a [Span]) -> SpanCursor<'a> {
        SpanCursor { spans, done: 0 }
    }

    /// The next piece, of at most so many bytes.
    fn next(&mut self, len: usize) -> Option<(*mut u8, usize)> {
        loop {
            let first = self.spans.first()?;
            if self.done == first.len_bytes {
                (self.spans, self.done) = (&self.spans[1..], 0);
                continue;
            }
            let piece = len.min(first.len_bytes - self.done);
            let at = std::ptr::with_exposed_provenance_mut::<u8>(first.addr as usize);
            let at = at.wrapping_add(self.done);
            self.done += piece;
            return Some((at, piece));
        }
    }

    /// # Safety
    /// The spans may be written, and `from` has `len` bytes.
    unsafe fn write(&mut self, from: *const u8, len: usize) {
        let mut done = 0;
        while done < len {
            let Some((at, piece)) = self.next(len - done) else {
                return;
            };
            // SAFETY: the caller's promise; the staging memory overlaps no memory of the process's.
            unsafe { std::ptr::copy_nonoverlapping(from.add(done), at, piece) };
            done += piece;
        }
    }

    /// # Safety
    /// The spans may be read, and `into` has room for `len` bytes.
    unsafe fn read(&mut self, into: *mut u8, len: usize) {
        let mut done = 0;
        while done < len {
            let Some((at, piece)) = self.next(len - done) else {
                return;
            };
            // SAFETY: the caller's promise; the staging memory overlaps no memory of the process's.
            unsafe { std::ptr::copy_nonoverlapping(at, into.add(done), piece) };
            done += piece;
        }
    }
}

// SAFETY: `run` returns when the stream has made all that was queued, or the device's memory and the staging memory are all that a copy
// still uses; see there.
#[cfg(feature = "softcx")]
unsafe impl Foreign for Copier {
    unsafe fn fetch(&self, own: &[Span], theirs: &[Span]) -> std::result::Result<(), AccessFault> {
        // SAFETY: the caller's promise.
        unsafe { self.fetch_all(own, theirs) }.map_err(|error| self.fault(error))
    }

    unsafe fn put(&self, own: &[Span], theirs: &[Span]) -> std::result::Result<(), AccessFault> {
        let _nic = NicWriteScope::begin();
        // SAFETY: the caller's promise.
        unsafe { self.put_all(own, theirs) }.map_err(|error| self.fault(error))
    }

    unsafe fn shift(&self, moves: &[Move]) -> std::result::Result<(), AccessFault> {
        let _nic = NicWriteScope::begin();
        // SAFETY: the caller's promise.
        unsafe { self.shift_all(moves) }.map_err(|error| self.fault(error))
    }
}
