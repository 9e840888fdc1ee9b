//! Copies between registered memory of this process, of other processes and of other devices.
//!
//! Copies within this process are plain copies, made at once. Memory of another process is accessed by system calls, so copies into it are
//! collected. They are made together before the device reports them (by a completion, an acknowledgement or a freed slot), before memory is read,
//! or when enough are collected. Memory of another device is accessed in the same way, by calls of its owner. Each of these calls is expensive, so
//! copies from such memory into this process are collected, too.
#![allow(unsafe_code)] // copies to and from addresses that the key table resolved

mod pieces;
mod words;

use self::pieces::{Piece, PieceSource};
use crate::device::dma;
use crate::device::foreign::Move;
use crate::device::space::{AccessFault, Space, SpaceAddress, Span};
use doorbell_wire::mlx5::Syndrome;

/// Bytes and pieces that are collected.
const MAX_BYTES: usize = 256 << 10;
const MAX_PIECES: usize = 64;
/// Bytes that are kept by value: a packet's own, which are gone when it is.
const MAX_KEPT: usize = 64 << 10;

/// The origin of copies: a queue pair, whether they execute a request of its peer, and the packet number of that.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct CopyOrigin {
    pub(crate) qpn: u32,
    pub(crate) request: bool,
    pub(crate) psn: u32,
    /// Of a copy that failed: the process that had the bytes has died.
    pub(crate) is_source_gone: bool,
}

impl CopyOrigin {
    /// How the request fails whose response could not be copied. A peer that has died has not answered.
    pub(crate) fn syndrome(&self) -> Syndrome {
        if self.is_source_gone {
            Syndrome::TransportRetryExc
        } else {
            Syndrome::LocalProt
        }
    }
}

/// The copying part of a device.
#[derive(Debug)]
pub(crate) struct Copies {
    /// What is to be copied into `space`, and its bytes so far.
    pieces: Vec<Piece>,
    space: Space,
    bytes: usize,
    kept: Vec<u8>,
    bounce: Vec<u8>,
    cause: CopyOrigin,
    /// The origins of collected copies that failed.
    faults: Vec<CopyOrigin>,
    /// Queue pairs whose copies failed because the process with the source bytes has died.
    lost_senders: Vec<u32>,
    /// What is to be copied out of other processes, while such copies are collected.
    fetches: Vec<(SpaceAddress, Span)>,
    fetching: bool,
    spans: [Vec<Span>; 2],
    moves: Vec<Move>,
    /// A packet's bytes could not be read, which are in another device's memory.
    lost_source: bool,
    /// The bytes of a response of this device to itself could not be read.
    lost_response: bool,
    /// What is collected is to be copied into this process.
    brings: bool,
}

impl Default for Copies {
    fn default() -> Copies {
        Copies {
            pieces: Vec::new(),
            space: Space::LOCAL,
            bytes: 0,
            kept: Vec::new(),
            bounce: Vec::new(),
            cause: CopyOrigin::default(),
            faults: Vec::new(),
            lost_senders: Vec::new(),
            fetches: Vec::new(),
            fetching: false,
            spans: [Vec::new(), Vec::new()],
            moves: Vec::new(),
            lost_source: false,
            lost_response: false,
            brings: false,
        }
    }
}

impl Copies {
    /// Sets the origin of the next copies.
    #[inline]
    pub(crate) fn work_for(&mut self, qpn: u32, request: bool, psn: u32) {
        self.cause = CopyOrigin {
            qpn,
            request,
            psn,
            is_source_gone: false,
        };
    }

    /// Makes what was collected. What failed is known by [`Copies::settle_for`] and [`Copies::take_any_fault`].
    #[inline]
    pub(crate) fn settle(&mut self) {
        if !self.pieces.is_empty() {
            self.make_pieces();
        }
    }

    /// Makes what was collected for memory of this process, which is about to be read or written.
    #[inline]
    fn settle_here(&mut self) {
        if self.brings {
            self.make_pieces();
        }
    }

    /// Makes the collected copies, before this queue pair completes something. Returns the origin of the first copy for a request of its peer, or for a
    /// response to it, that has failed since the last call. A failure of the other kind is kept.
    #[inline]
    pub(crate) fn settle_for(&mut self, qpn: u32, request: bool) -> Option<CopyOrigin> {
        if self.pieces.is_empty() && self.faults.is_empty() {
            return None;
        }
        self.make_pieces();
        self.take_fault(qpn, request)
    }

    #[cold]
    fn take_fault(&mut self, qpn: u32, request: bool) -> Option<CopyOrigin> {
        let is_it = |cause: &CopyOrigin| (cause.qpn, cause.request) == (qpn, request);
        let first = self.faults.iter().copied().find(is_it);
        self.faults.retain(|cause| !is_it(cause));
        first
    }

    /// Whether a copy made so far for this queue pair failed because the sender, which had the bytes, has died.
    #[inline]
    pub(crate) fn has_lost_sender(&self, qpn: u32) -> bool {
        !self.lost_senders.is_empty() && self.lost_senders.contains(&qpn)
    }

    /// Takes a queue pair whose sender died with bytes of its request.
    #[inline]
    pub(crate) fn take_lost_sender(&mut self) -> Option<u32> {
        self.lost_senders.pop()
    }

    /// The origin of the first collected copy that failed for some queue pair.
    #[inline]
    pub(crate) fn take_any_fault(&mut self) -> Option<CopyOrigin> {
        let CopyOrigin { qpn, request, .. } = *self.faults.first()?;
        self.take_fault(qpn, request)
    }

    /// A sender's bytes could not be read. If they were in another process, that process has died, and no sender is left to notify. Memory of another
    /// device is still registered, and reading it would fail at each repetition of the packet, so the sender must be notified.
    #[cold]
    pub(crate) fn lose_source(&mut self, from: SpaceAddress) {
        self.lost_source |= from.space.is_foreign();
    }

    /// Whether [`Copies::lose_source`] has recorded such memory of a device since the last call.
    #[inline]
    pub(crate) fn take_lost_source(&mut self) -> bool {
        std::mem::take(&mut self.lost_source)
    }

    /// The bytes of a response of a queue pair of this device to another one could not be read.
    #[cold]
    pub(crate) fn lose_response(&mut self) {
        self.lost_response = true;
    }

    /// Whether [`Copies::lose_response`] was called since the last call.
    #[inline]
    pub(crate) fn take_lost_response(&mut self) -> bool {
        std::mem::take(&mut self.lost_response)
    }

    /// Copies out of registered memory.
    ///
    /// # Safety
    /// `from` was resolved by the key table for `into.len()` bytes, under the lock that deregistration takes.
    #[inline]
    pub(crate) unsafe fn load(
        &mut self,
        from: SpaceAddress,
        into: &mut [u8],
    ) -> Result<(), AccessFault> {
        match from.pointer() {
            Some(from) => {
                self.settle_here();
                // SAFETY: the caller's promise.
                unsafe { dma::copy_out(from, into) }
            }
            None if into.is_empty() => {}
            None => {
                self.settle();
                from.space.read(from.addr, into)?;
            }
        }
        Ok(())
    }

    /// Copies into registered memory.
    ///
    /// # Safety
    /// `into` was resolved by the key table for `from.len()` bytes, under the lock that deregistration takes.
    #[inline]
    pub(crate) unsafe fn store(
        &mut self,
        into: SpaceAddress,
        from: &[u8],
    ) -> Result<(), AccessFault> {
        match into.pointer() {
            Some(into) => {
                self.settle_here();
                // SAFETY: the caller's promise.
                unsafe { dma::copy_in(into, from) }
            }
            None if from.is_empty() => {}
            None => self.keep(into, from)?,
        }
        Ok(())
    }

    fn keep(&mut self, into: SpaceAddress, from: &[u8]) -> Result<(), AccessFault> {
        if from.len() > MAX_KEPT {
            self.settle();
            return into.space.write(into.addr, from);
        }
        self.make_room(into.space, from.len());
        if self.kept.len() + from.len() > MAX_KEPT {
            self.settle();
        }
        let at = self.kept.len();
        self.kept.extend_from_slice(from);
        self.collect(PieceSource::Kept(at), into, from.len());
        Ok(())
    }

    /// Copies between two places, which may overlap if they are in one space. What lies in this process must stay until
    /// [`Copies::settle`]. An error is about `from`: that `into` is gone is found out later.
    ///
    /// # Safety
    /// Both were resolved by the key table for `len_bytes`, under the lock that deregistration takes.
    #[inline]
    pub(crate) unsafe fn copy(
        &mut self,
        from: SpaceAddress,
        into: SpaceAddress,
        len_bytes: usize,
    ) -> Result<(), AccessFault> {
        match (from.pointer(), into.pointer()) {
            (Some(from), Some(into)) => {
                self.settle_here();
                // SAFETY: the caller's promise.
                unsafe { dma::copy_across(from, into, len_bytes) };
                Ok(())
            }
            (None, Some(at)) if self.fetching || !from.space.is_foreign() => {
                self.fetch(from, at, len_bytes)
            }
            _ if len_bytes == 0 => Ok(()),
            (Some(start), None) => {
                self.make_room(into.space, len_bytes);
                self.collect(
                    PieceSource::Local(start.expose_provenance()),
                    into,
                    len_bytes,
                );
                Ok(())
            }
            (None, _) => {
                self.collect_far(from, into, len_bytes);
                Ok(())
            }
        }
    }

    fn fetch(
        &mut self,
        from: SpaceAddress,
        into: *mut u8,
        len_bytes: usize,
    ) -> Result<(), AccessFault> {
        self.settle();
        let span = Span {
            addr: into.expose_provenance() as u64,
            len_bytes,
        };
        if self.fetching {
            self.fetches.push((from, span));
            return Ok(());
        }
        // SAFETY: resolved for the length by the caller's promise (of `copy`).
        unsafe {
            from.space.fetch(
                &[span],
                &[Span {
                    addr: from.addr,
                    len_bytes,
                }],
            )
        }
    }

    /// Collects copies out of other processes until [`Copies::end_fetches`].
    pub(crate) fn begin_fetches(&mut self) {
        self.fetches.clear();
        self.fetching = true;
    }

    /// Makes them. They are of use only if all of them succeed.
    ///
    /// # Safety
    /// What they were to be copied to is still there.
    pub(crate) unsafe fn end_fetches(&mut self) -> Result<(), AccessFault> {
        self.fetching = false;
        let [own, theirs] = &mut self.spans;
        for run in self.fetches.chunk_by(|(a, _), (b, _)| a.space == b.space) {
            for run in run.chunks(MAX_PIECES) {
                own.clear();
                theirs.clear();
                for (from, span) in run {
                    push(own, *span);
                    push(
                        theirs,
                        Span {
                            addr: from.addr,
                            ..*span
                        },
                    );
                }
                let space = run[0].0.space;
                // SAFETY: the caller's promise.
                unsafe { space.fetch(own, theirs) }
                    .inspect_err(|_| self.lost_source |= space.is_foreign())?;
            }
        }
        Ok(())
    }

    /// Between two other processes, inside of one, or out of another device.
    fn collect_far(&mut self, from: SpaceAddress, into: SpaceAddress, len_bytes: usize) {
        let mut done = 0;
        while done < len_bytes {
            let piece = (len_bytes - done).min(MAX_BYTES);
            let (from, into) = (from.behind(done as u64), into.behind(done as u64));
            // What is read is read before anything is written: it may not be what a collected copy writes.
            if from.space == self.space && self.writes_to(from.addr, piece) {
                self.settle();
            }
            self.make_room(into.space, piece);
            self.collect(PieceSource::OtherSpace(from), into, piece);
            done += piece;
        }
    }

    fn writes_to(&self, addr: u64, len_bytes: usize) -> bool {
        let end = addr.saturating_add(len_bytes as u64);
        let mut pieces = self.pieces.iter();
        pieces.any(|piece| {
            piece.into < end && addr < piece.into.saturating_add(piece.len_bytes as u64)
        })
    }

    fn make_room(&mut self, space: Space, len_bytes: usize) {
        let full = self.pieces.len() == MAX_PIECES || self.bytes + len_bytes > MAX_BYTES;
        if full || self.space != space {
            self.settle();
            self.space = space;
        }
    }

    fn collect(&mut self, from: PieceSource, into: SpaceAddress, len_bytes: usize) {
        self.bytes += len_bytes;
        self.brings = into.space.is_local();
        let cause = self.cause;
        if let Some(last) = self.pieces.last_mut() {
            let behind = last.len_bytes as u64;
            let follows = match (last.from, from) {
                (PieceSource::OtherSpace(last), PieceSource::OtherSpace(from)) => {
                    last.behind(behind) == from
                }
                (PieceSource::Kept(last), PieceSource::Kept(from)) => {
                    last + behind as usize == from
                }
                _ => false,
            };
            let is_same = (last.cause.qpn, last.cause.request) == (cause.qpn, cause.request);
            if follows && last.into.wrapping_add(behind) == into.addr && is_same {
                last.len_bytes += len_bytes;
                return;
            }
        }
        self.pieces.push(Piece {
            from,
            into: into.addr,
            len_bytes,
            cause,
        });
    }
}

/// Adds a span, to the last one if it goes on there.
fn push(spans: &mut Vec<Span>, span: Span) {
    match spans.last_mut() {
        Some(last) if last.addr.wrapping_add(last.len_bytes as u64) == span.addr => {
            last.len_bytes += span.len_bytes;
        }
        _ => spans.push(span),
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::device::space::calls;
    use crate::device::tests::driver::Process;

    fn place(process: &Process, addr: u64) -> SpaceAddress {
        SpaceAddress {
            space: process.space,
            addr,
        }
    }

    /// SAFETY of all copies here: addresses of mappings that live as long as the test, or of other processes.
    fn copy(copies: &mut Copies, from: SpaceAddress, into: SpaceAddress, len_bytes: usize) {
        // SAFETY: as said.
        unsafe { copies.copy(from, into, len_bytes) }.unwrap();
    }

    #[test]
    fn many_pieces_take_one_read_call_and_one_write_call() {
        let mut a = Process::other(1 << 20);
        let mut b = Process::other(1 << 20);
        let (from, into) = (a.place(1 << 17, 4096), b.place(1 << 17, 4096));
        let bytes: Vec<u8> = (0..1u32 << 17).map(|i| (i * 31) as u8).collect();
        a.write(from, &bytes);
        let mut copies = Copies::default();
        let before = calls();
        for at in (0..1u64 << 17).step_by(4096) {
            copy(
                &mut copies,
                place(&a, from + at),
                place(&b, into + at),
                4096,
            );
        }
        assert_eq!(calls() - before, 0);
        copies.settle();
        assert_eq!(calls() - before, 2);
        assert_eq!(b.read(into, 1 << 17), bytes);
        copies.settle();
        assert_eq!(calls() - before, 2);
    }

    #[test]
    fn dependent_copies_keep_their_order() {
        let mut a = Process::other(1 << 20);
        let at = a.place(4096, 64);
        a.write(at, b"one");
        let mut copies = Copies::default();
        for step in 0..5 {
            let (from, into) = (at + step * 100, at + step * 100 + 100);
            copy(&mut copies, place(&a, from), place(&a, into), 3);
        }
        // SAFETY: as said.
        unsafe { copies.store(place(&a, at), b"two") }.unwrap();
        copy(&mut copies, place(&a, at), place(&a, at + 1000), 3);
        let mut got = [0; 3];
        // SAFETY: as said.
        unsafe { copies.load(place(&a, at + 1000), &mut got) }.unwrap();
        assert_eq!(&got, b"two", "a look sees what was collected");
        assert_eq!(a.read(at + 500, 3), b"one");
    }

    #[test]
    fn payload_kept_by_value_arrives_whole() {
        let mut a = Process::other(1 << 20);
        let at = a.place(1 << 18, 64);
        let mut copies = Copies::default();
        for piece in 0..3000u64 {
            let bytes = [piece as u8; 50];
            // SAFETY: as said.
            unsafe { copies.store(place(&a, at + piece * 64), &bytes) }.unwrap();
        }
        let long = vec![7; MAX_KEPT + 1];
        // SAFETY: as said.
        unsafe { copies.store(place(&a, at), &long) }.unwrap();
        copies.settle();
        assert_eq!(a.read(at, long.len()), long);
        for piece in (long.len() as u64 / 64 + 1)..3000 {
            assert_eq!(a.read(at + piece * 64, 50), [piece as u8; 50]);
        }
        let mut copies = Copies::default();
        // SAFETY: as said.
        let sum = unsafe {
            copies.store(place(&a, at), &41u64.to_ne_bytes()).unwrap();
            copies.fetch_add(place(&a, at), 1).unwrap()
                + copies.compare_swap(place(&a, at), 42, 50).unwrap()
        };
        copies.settle();
        assert_eq!((sum, a.read(at, 8)), (83, 50u64.to_ne_bytes().to_vec()));
    }

    #[test]
    fn a_copy_fault_is_reported_to_its_own_queue_pair() {
        let mut a = Process::other(1 << 20);
        let mut b = Process::other(1 << 20);
        let (good, bad) = (a.place(4096, 4096), a.place(4096, 4096));
        let source = b.place(4096, 4096);
        b.write(source, b"good");
        a.unmap(bad, 4096);
        let mut copies = Copies::default();
        for (qpn, into) in [(1, good), (2, bad), (3, good + 8)] {
            copies.work_for(qpn, qpn == 2, 0);
            copy(&mut copies, place(&b, source), place(&a, into), 4);
        }
        copies.settle();
        assert_eq!(a.read(good, 4), b"good");
        assert_eq!(a.read(good + 8, 4), b"good");
        assert!(copies.settle_for(1, false).is_none() && copies.settle_for(2, false).is_none());
        let cause = CopyOrigin {
            qpn: 2,
            request: true,
            psn: 0,
            ..CopyOrigin::default()
        };
        assert_eq!(copies.take_any_fault(), Some(cause));
        assert_eq!(copies.take_any_fault(), None);
        let mut byte = [0];
        // SAFETY: as said.
        let refused = unsafe { copies.load(place(&a, bad), &mut byte) };
        assert_eq!(refused, Err(AccessFault));
    }
}
