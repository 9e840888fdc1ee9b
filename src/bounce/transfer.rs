//! Transfers in chunks.
#![allow(unsafe_code)] // gives addresses to a copy engine

use std::collections::VecDeque;
use std::ptr::NonNull;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::chunk_counts::{ChunkCounts, ChunkStage, Stages};
use super::engine::{CopyEngine, CopyTicket};
use crate::endpoint::{Endpoint, QueueKind, Ticket, Work};
use crate::region::{Access, ProtectionDomain, Region, RemoteRegion};
use crate::stream::Backoff;
use crate::{Cause, Error, RemoteSlice, Result, StateKind};

/// The largest chunk: 1 GiB.
const CHUNK_BYTES_MAX: u32 = 1 << 30;
/// The most slots.
const SLOTS_MAX: u32 = 256;

/// Added to the number of a chunk for its `wr_id`, so that a failure does not name a work request of the application.
const CHUNK_WR_ID: u64 = 1 << 63;

const OPERATION: &str = "transfer through a bounce buffer";

/// How much pinned memory a [`Bounce`] has, and how it is divided. For two-sided transfers both ends have the same `chunk_bytes`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct BounceConfig {
    /// Bytes of a chunk, 1 to 2^30. Default 256 KiB.
    pub chunk_bytes: u32,
    /// Chunks under way at once, 1 to 256. With one, nothing overlaps. Default 4.
    pub slots: u32,
}

setters!(BounceConfig {
    chunk_bytes: u32,
    slots: u32,
});

impl Default for BounceConfig {
    fn default() -> BounceConfig {
        BounceConfig {
            chunk_bytes: 256 << 10,
            slots: 4,
        }
    }
}

impl BounceConfig {
    fn check(&self) -> Result<()> {
        let limits = [
            ("chunk_bytes", self.chunk_bytes, CHUNK_BYTES_MAX),
            ("slots", self.slots, SLOTS_MAX),
        ];
        for (argument, value, max) in limits {
            if !(1..=max).contains(&value) {
                return Err(Error::Range {
                    argument,
                    value: value.into(),
                    min: 1,
                    max: max.into(),
                });
            }
        }
        Ok(())
    }
}

/// Pinned memory between foreign memory and the NIC, and the engine that copies. One call at a time; each returns when all is done.
///
/// A call needs an endpoint whose completions are all polled, or taken by waits: those of the send queue, of [`Bounce::recv`] those of the receive
/// queue. Otherwise it fails with [`Error::State`] and does nothing.
///
/// A failure that a chunk caused names it by its number plus 2^63 ([`WorkError::wr_id`](crate::WorkError::wr_id)).
///
/// # When it fails
/// The error is that of the first stage that failed. No chunk starts after it. The call returns when the chunks in flight have ended, so the caller
/// may use the foreign memory again. The number of bytes that have arrived is not known. If the engine of a `write` or `read` fails, the endpoint
/// stays usable. After a timeout with chunks on the wire, and after any failure of a `send` or `recv` that has begun, whose peer waits for chunks that will not
/// come, the endpoint is aborted: with [`Cause::Deadline`] after a timeout. If the engine does not end its copies within a second timeout, the error is [`Error::State`], and the engine may still
/// access the foreign memory.
#[derive(Debug)]
pub struct Bounce<E> {
    engine: E,
    domain: ProtectionDomain,
    config: BounceConfig,
    /// `None` where the last one may still be in use by a device or an engine.
    staging: Option<Region>,
    copies: VecDeque<CopyTicket>,
    transfers: VecDeque<Ticket>,
}

/// Pinned memory that an engine may still write to, kept for as long as the process lives.
static GIVEN_UP: Mutex<Vec<Region>> = Mutex::new(Vec::new());

fn give_up(staging: Region) {
    let mut given_up = GIVEN_UP.lock().unwrap_or_else(PoisonError::into_inner);
    given_up.push(staging);
}

impl<E> Drop for Bounce<E> {
    fn drop(&mut self) {
        // Only if the engine panicked in a call.
        if !self.copies.is_empty()
            && let Some(staging) = self.staging.take()
        {
            give_up(staging);
        }
    }
}

/// The operation that the endpoint does with a chunk.
#[derive(Debug, Clone, Copy)]
enum ChunkTarget {
    Write { addr: u64, rkey: u32 },
    Read { addr: u64, rkey: u32 },
    Send,
    Recv,
}

impl ChunkTarget {
    fn queue_kind(self) -> QueueKind {
        match self {
            ChunkTarget::Recv => QueueKind::Recv,
            ChunkTarget::Write { .. } | ChunkTarget::Read { .. } | ChunkTarget::Send => {
                QueueKind::Send
            }
        }
    }

    fn copies_first(self) -> bool {
        matches!(self, ChunkTarget::Write { .. } | ChunkTarget::Send)
    }

    fn has_two_sides(self) -> bool {
        matches!(self, ChunkTarget::Send | ChunkTarget::Recv)
    }
}

impl<E: CopyEngine> Bounce<E> {
    /// Pins `slots` times `chunk_bytes` of host memory.
    ///
    /// # Errors
    /// [`Error::Range`] for the configuration; those of [`Region::alloc`] and of the engine.
    pub fn new(domain: &ProtectionDomain, engine: E, config: BounceConfig) -> Result<Bounce<E>> {
        config.check()?;
        let mut bounce = Bounce {
            engine,
            domain: domain.clone(),
            config,
            staging: None,
            copies: VecDeque::with_capacity(config.slots as usize),
            transfers: VecDeque::with_capacity(config.slots as usize),
        };
        bounce.staging()?;
        Ok(bounce)
    }

    /// The configuration.
    pub fn config(&self) -> &BounceConfig {
        &self.config
    }

    /// The engine.
    pub fn engine(&mut self) -> &mut E {
        &mut self.engine
    }

    /// Writes `len_bytes` of foreign memory to the peer's region, from `offset` on.
    ///
    /// # Safety
    /// The foreign memory is valid for reads by the engine until this returns.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`] for the peer's region; [`Error::Timeout`]; those of the engine and of the endpoint.
    pub unsafe fn write(
        &mut self,
        endpoint: &mut Endpoint,
        foreign: u64,
        len_bytes: u64,
        remote: &RemoteRegion,
        offset: u64,
        timeout: Duration,
    ) -> Result<()> {
        let way = ChunkTarget::Write {
            addr: remote.slice(offset, len_bytes)?.addr(),
            rkey: remote.rkey,
        };
        // SAFETY: the caller's promise.
        unsafe { self.run(endpoint, way, foreign, len_bytes, timeout) }
    }

    /// Reads `len_bytes` of the peer's region, from `offset` on, into foreign memory.
    ///
    /// # Safety
    /// The foreign memory is valid for writes by the engine until this returns.
    ///
    /// # Errors
    /// As [`Bounce::write`].
    pub unsafe fn read(
        &mut self,
        endpoint: &mut Endpoint,
        remote: &RemoteRegion,
        offset: u64,
        foreign: u64,
        len_bytes: u64,
        timeout: Duration,
    ) -> Result<()> {
        let way = ChunkTarget::Read {
            addr: remote.slice(offset, len_bytes)?.addr(),
            rkey: remote.rkey,
        };
        // SAFETY: the caller's promise.
        unsafe { self.run(endpoint, way, foreign, len_bytes, timeout) }
    }

    /// Sends `len_bytes` of foreign memory to a peer that calls [`Bounce::recv`] for as many, with chunks of the same length.
    ///
    /// # Safety
    /// As [`Bounce::write`].
    ///
    /// # Errors
    /// As [`Bounce::write`].
    pub unsafe fn send(
        &mut self,
        endpoint: &mut Endpoint,
        foreign: u64,
        len_bytes: u64,
        timeout: Duration,
    ) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.run(endpoint, ChunkTarget::Send, foreign, len_bytes, timeout) }
    }

    /// Receives into foreign memory what the peer's [`Bounce::send`] sends.
    ///
    /// # Safety
    /// As [`Bounce::read`].
    ///
    /// # Errors
    /// As [`Bounce::write`]; [`Error::Malformed`] if the peer sends another length or other chunks.
    pub unsafe fn recv(
        &mut self,
        endpoint: &mut Endpoint,
        foreign: u64,
        len_bytes: u64,
        timeout: Duration,
    ) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.run(endpoint, ChunkTarget::Recv, foreign, len_bytes, timeout) }
    }

    fn staging(&mut self) -> Result<Region> {
        if let Some(staging) = &self.staging {
            return Ok(staging.clone());
        }
        let bytes = u64::from(self.config.chunk_bytes) * u64::from(self.config.slots);
        let staging = Region::alloc(&self.domain, bytes, Access::LOCAL_WRITE)?;
        self.engine.use_staging(&staging)?;
        Ok(self.staging.insert(staging).clone())
    }

    /// # Safety
    /// The foreign memory is valid for what the engine does with it until this returns.
    unsafe fn run(
        &mut self,
        endpoint: &mut Endpoint,
        way: ChunkTarget,
        foreign: u64,
        len_bytes: u64,
        timeout: Duration,
    ) -> Result<()> {
        if foreign.checked_add(len_bytes).is_none() {
            return Err(Error::Range {
                argument: "len_bytes",
                value: len_bytes,
                min: 0,
                max: u64::MAX - foreign,
            });
        }
        endpoint.check_collected(way.queue_kind(), OPERATION)?;
        let deadline = Instant::now().checked_add(timeout);
        let chunk_bytes = u64::from(self.config.chunk_bytes);
        let mut job = Job {
            staging: self.staging()?,
            slots: u64::from(self.config.slots),
            chunk_bytes,
            chunks: len_bytes.div_ceil(chunk_bytes),
            foreign,
            len_bytes,
            way,
            engine: &mut self.engine,
            endpoint,
            copies: &mut self.copies,
            transfers: &mut self.transfers,
        };
        let mut line = ChunkCounts::new(job.chunks, job.slots);
        let mut backoff = Backoff::new();
        let failed = loop {
            match line.turn(&mut job) {
                Ok(_) if line.is_done() => return Ok(()),
                Ok(true) => backoff.reset(),
                Ok(false) => {}
                Err(error) => break error,
            }
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                break Error::Timeout {
                    operation: OPERATION,
                    timeout,
                };
            }
            backoff.pause();
        };
        // A chunk may only have been flushed: the cause is that of the endpoint.
        let failed = match failed {
            Error::Work(of_chunk) => Error::Work(job.endpoint.failure().unwrap_or(of_chunk)),
            failed => failed,
        };
        let cause = match failed {
            Error::Timeout { .. } => Cause::Deadline(timeout),
            _ => Cause::Aborted,
        };
        let clean = job.clear(deadline, cause, Cause::Deadline(timeout));
        let stuck = !job.end_copies(Instant::now().checked_add(timeout));
        if stuck {
            give_up(job.staging.clone());
        }
        if stuck || !clean {
            self.staging = None;
        }
        self.copies.clear();
        self.transfers.clear();
        if stuck {
            return Err(Error::state(
                StateKind::Unexpected,
                OPERATION,
                format!(
                    "{failed}; the copy engine did not end its copies within the timeout and may still access the foreign memory"
                ),
            ));
        }
        Err(failed)
    }
}

/// One transfer.
struct Job<'a, E> {
    engine: &'a mut E,
    endpoint: &'a mut Endpoint,
    staging: Region,
    way: ChunkTarget,
    foreign: u64,
    len_bytes: u64,
    chunk_bytes: u64,
    chunks: u64,
    slots: u64,
    /// Those that are not known to be over, in order.
    copies: &'a mut VecDeque<CopyTicket>,
    transfers: &'a mut VecDeque<Ticket>,
}

/// A part of the transfer: where it is in the whole, and in the staging memory.
#[derive(Debug, Clone, Copy)]
struct Chunk {
    start: u64,
    slot: u64,
    len_bytes: u32,
}

impl<E: CopyEngine> Job<'_, E> {
    fn chunk(&self, number: u64) -> Chunk {
        let start = number * self.chunk_bytes;
        Chunk {
            start,
            slot: number % self.slots * self.chunk_bytes,
            len_bytes: self.chunk_bytes.min(self.len_bytes - start) as u32,
        }
    }

    /// What a chunk's immediate data says: how many chunks there are from it on, modulo 2^32. So an end that expects another length notices.
    fn imm(&self, number: u64) -> u32 {
        (self.chunks - number) as u32
    }

    fn begin_copy(&mut self, number: u64) -> Result<bool> {
        let Chunk {
            start,
            slot,
            len_bytes,
        } = self.chunk(number);
        let at = self.staging.as_ptr().wrapping_add(slot as usize);
        let Some(host) = NonNull::new(at) else {
            return Ok(false);
        };
        let (foreign, len) = (self.foreign + start, len_bytes as usize);
        // SAFETY: the slot is within the staging region, which lives until the copies are over; it belongs to this chunk, which is in this
        // stage, alone. The foreign memory is the caller's promise.
        let copy = unsafe {
            if self.way.copies_first() {
                self.engine.copy_to_host(foreign, host, len)
            } else {
                self.engine.copy_from_host(host, foreign, len)
            }
        }?;
        self.copies.push_back(copy);
        Ok(true)
    }

    fn begin_transfer(&mut self, number: u64) -> Result<bool> {
        let chunk = self.chunk(number);
        let slices = [self.staging.slice(chunk.slot, chunk.len_bytes.into())?];
        let wr_id = CHUNK_WR_ID + number;
        let posted = match self.way {
            ChunkTarget::Write { addr, rkey } => {
                let work = Work::write(
                    &slices,
                    RemoteSlice::at(addr.wrapping_add(chunk.start), rkey),
                );
                self.endpoint.post_send(&work.wr_id(wr_id))
            }
            ChunkTarget::Read { addr, rkey } => {
                let work = Work::read(
                    &slices,
                    RemoteSlice::at(addr.wrapping_add(chunk.start), rkey),
                );
                self.endpoint.post_send(&work.wr_id(wr_id))
            }
            ChunkTarget::Send => {
                let work = Work::send(&slices).imm(self.imm(number));
                self.endpoint.post_send(&work.wr_id(wr_id))
            }
            ChunkTarget::Recv => self.endpoint.post_recv(wr_id, &slices),
        };
        match posted {
            Ok(ticket) => {
                self.transfers.push_back(ticket);
                Ok(true)
            }
            // There will be room when one of the engine's own transfers is over.
            Err(Error::QueueFull { .. }) if !self.transfers.is_empty() => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn is_copied(&mut self) -> Result<bool> {
        let Some(copy) = self.copies.front() else {
            return Ok(false);
        };
        let over = self.engine.is_copy_done(*copy);
        // A copy that failed is over as well.
        if !matches!(over, Ok(false)) {
            self.copies.pop_front();
        }
        over
    }

    fn is_transferred(&mut self, number: u64) -> Result<bool> {
        let Some(completion) = self.endpoint.poll_cq(self.way.queue_kind())? else {
            return Ok(false);
        };
        if completion.wr_id != CHUNK_WR_ID + number {
            // A thread has dropped a prepared request meanwhile, and its wait gets a completion of this transfer. Nobody else will find that one.
            self.endpoint.abort();
            return Err(Error::state(
                StateKind::Unexpected,
                OPERATION,
                format!(
                    "the next completion is of work request {}",
                    completion.wr_id
                ),
            ));
        }
        self.transfers.pop_front();
        let (chunk, imm) = (self.chunk(number), self.imm(number));
        let found = (completion.len_bytes, completion.imm);
        if matches!(self.way, ChunkTarget::Recv) && found != (chunk.len_bytes, Some(imm)) {
            return Err(Error::Malformed {
                what: "chunk from the peer",
                reason: format!(
                    "received {} bytes with immediate data {:?}; expected {} bytes with {imm}",
                    completion.len_bytes, completion.imm, chunk.len_bytes
                ),
            });
        }
        Ok(true)
    }

    /// Waits until the endpoint has finished its operations, or aborts it: because of `cause` if the peer waits for chunks, and because of `late` if the
    /// deadline passes. Returns whether it is certain that the endpoint no longer uses the staging memory.
    fn clear(&mut self, deadline: Option<Instant>, cause: Cause, late: Cause) -> bool {
        if self.way.has_two_sides() {
            self.endpoint.fail(cause);
            return false;
        }
        let mut backoff = Backoff::new();
        while !self.transfers.is_empty() {
            if self.endpoint.failure().is_some() {
                return false;
            }
            match self.endpoint.poll_cq(self.way.queue_kind()) {
                Ok(Some(_)) => drop(self.transfers.pop_front()),
                Ok(None) if deadline.is_none_or(|deadline| Instant::now() < deadline) => {
                    backoff.pause()
                }
                Ok(None) | Err(_) => {
                    self.endpoint.fail(late);
                    return false;
                }
            }
        }
        true
    }

    /// Waits for the copies that are under way, whether they succeed or fail. Returns whether all are over.
    fn end_copies(&mut self, deadline: Option<Instant>) -> bool {
        let mut backoff = Backoff::new();
        while !self.copies.is_empty() {
            if !matches!(self.is_copied(), Ok(false)) {
                backoff.reset();
            } else if deadline.is_none_or(|deadline| Instant::now() < deadline) {
                backoff.pause();
            } else {
                return false;
            }
        }
        true
    }
}

impl<E: CopyEngine> Stages for Job<'_, E> {
    fn begin(&mut self, stage: ChunkStage, chunk: u64) -> Result<bool> {
        if (stage == ChunkStage::First) == self.way.copies_first() {
            self.begin_copy(chunk)
        } else {
            self.begin_transfer(chunk)
        }
    }

    fn is_copy_done(&mut self, stage: ChunkStage, chunk: u64) -> Result<bool> {
        if (stage == ChunkStage::First) == self.way.copies_first() {
            self.is_copied()
        } else {
            self.is_transferred(chunk)
        }
    }
}
