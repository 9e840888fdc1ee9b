//! Pieces: copies into the memory of another process that are collected, and then made together.
#![allow(unsafe_code)] // copies to and from addresses that the key table resolved

use super::{Copies, CopyOrigin, push};
use crate::device::foreign::Move;
use crate::device::space::{AccessFault, SpaceAddress, Span};

/// Where the bytes of a piece are until they are copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PieceSource {
    /// In this process, for as long as they are not copied.
    Local(usize),
    /// In `Copies::kept`.
    Kept(usize),
    /// In another process, or in another device.
    OtherSpace(SpaceAddress),
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Piece {
    pub(super) from: PieceSource,
    pub(super) into: u64,
    pub(super) len_bytes: usize,
    pub(super) cause: CopyOrigin,
}

/// Bytes at the end of a copy that are stored behind all others: one store.
const LAST_BYTES: usize = 8;

impl Copies {
    #[cold]
    pub(super) fn make_pieces(&mut self) {
        let pieces = std::mem::take(&mut self.pieces);
        if !pieces.is_empty() && self.make(&pieces).is_err() {
            // Some memory is gone: those whose it is are found one by one.
            for piece in &pieces {
                if self.make(std::slice::from_ref(piece)).is_ok() {
                    continue;
                }
                let is_source_gone = match piece.from {
                    PieceSource::OtherSpace(from) => from.space.is_gone(),
                    _ => false,
                };
                if is_source_gone && piece.cause.request {
                    self.lost_senders.push(piece.cause.qpn);
                } else {
                    self.faults.push(CopyOrigin {
                        is_source_gone,
                        ..piece.cause
                    });
                }
            }
        }
        self.pieces = pieces;
        self.pieces.clear();
        self.kept.clear();
        self.bytes = 0;
        self.brings = false;
    }

    fn make(&mut self, pieces: &[Piece]) -> Result<(), AccessFault> {
        if self.space.is_local() {
            return self.bring(pieces);
        }
        if self.space.is_foreign() && self.shifts(pieces) {
            return self.shift(pieces);
        }
        self.read_far(pieces)?;
        let [own, theirs] = &mut self.spans;
        own.clear();
        theirs.clear();
        let mut bounced = 0;
        for piece in pieces {
            let len_bytes = piece.len_bytes;
            let addr = match piece.from {
                PieceSource::Local(addr) => addr,
                PieceSource::Kept(at) => self.kept.as_ptr() as usize + at,
                PieceSource::OtherSpace(_) => {
                    bounced += len_bytes;
                    self.bounce.as_ptr() as usize + bounced - len_bytes
                }
            };
            let addr = addr as u64;
            // The end is a copy of its own: stores of one long copy may be seen in any order, and programs look at the last byte of a
            // message to know that it is all there.
            let end = if len_bytes > LAST_BYTES {
                LAST_BYTES
            } else {
                0
            };
            let len = len_bytes - end;
            push(
                own,
                Span {
                    addr,
                    len_bytes: len,
                },
            );
            if end > 0 {
                own.push(Span {
                    addr: addr + len as u64,
                    len_bytes: end,
                });
            }
            push(
                theirs,
                Span {
                    addr: piece.into,
                    len_bytes,
                },
            );
        }
        // SAFETY: bytes of this process that were to stay, or that are in the two buffers, which have as many; the space is
        // another process's.
        unsafe { self.space.put(own, theirs) }
    }

    /// Copies out of other devices into this process.
    fn bring(&mut self, pieces: &[Piece]) -> Result<(), AccessFault> {
        let from = |piece: &Piece| match piece.from {
            PieceSource::OtherSpace(from) => Ok(from),
            _ => Err(AccessFault),
        };
        let [own, theirs] = &mut self.spans;
        for run in pieces.chunk_by(|a, b| from(a).map(|at| at.space) == from(b).map(|at| at.space))
        {
            own.clear();
            theirs.clear();
            let mut space = None;
            for piece in run {
                let (at, len_bytes) = (from(piece)?, piece.len_bytes);
                let (addr, into) = (at.addr, piece.into);
                push(
                    own,
                    Span {
                        addr: into,
                        len_bytes,
                    },
                );
                push(theirs, Span { addr, len_bytes });
                space = Some(at.space);
            }
            if let Some(space) = space {
                // SAFETY: both were resolved by the caller's promise (of `copy`).
                unsafe { space.fetch(own, theirs) }?;
            }
        }
        Ok(())
    }

    /// Whether all of it stays in one other device's memory, which can copy it by itself.
    fn shifts(&self, pieces: &[Piece]) -> bool {
        pieces.iter().all(|piece| match piece.from {
            PieceSource::OtherSpace(from) if from.space == self.space => {
                from.addr.abs_diff(piece.into) >= piece.len_bytes as u64
            }
            _ => false,
        })
    }

    fn shift(&mut self, pieces: &[Piece]) -> Result<(), AccessFault> {
        self.moves.clear();
        for piece in pieces {
            if let PieceSource::OtherSpace(from) = piece.from {
                self.moves.push(Move {
                    from: from.addr,
                    into: piece.into,
                    len_bytes: piece.len_bytes,
                });
            }
        }
        // SAFETY: both are memory of that device, resolved by the caller's promise (of `copy`), and none overlaps itself.
        unsafe { self.space.foreign()?.shift(&self.moves) }
    }

    /// Reads what lies in other processes into the bounce buffer, one after the other.
    fn read_far(&mut self, pieces: &[Piece]) -> Result<(), AccessFault> {
        let far = |piece: &Piece| match piece.from {
            PieceSource::OtherSpace(from) => Some((from, piece.len_bytes)),
            _ => None,
        };
        let total: usize = pieces.iter().filter_map(far).map(|(_, len)| len).sum();
        if total == 0 {
            return Ok(());
        }
        if self.bounce.len() < total {
            self.bounce.resize(total, 0);
        }
        let mut at = 0;
        let start = self.bounce.as_mut_ptr().expose_provenance();
        let [own, theirs] = &mut self.spans;
        own.clear();
        theirs.clear();
        let mut far = pieces.iter().filter_map(far).peekable();
        while let Some((from, len_bytes)) = far.next() {
            let addr = (start + at) as u64;
            push(own, Span { addr, len_bytes });
            push(
                theirs,
                Span {
                    addr: from.addr,
                    len_bytes,
                },
            );
            at += len_bytes;
            if far.peek().is_none_or(|(next, _)| next.space != from.space) {
                // SAFETY: pieces of the bounce buffer, which is as long as all of them.
                unsafe { from.space.fetch(own, theirs) }?;
                own.clear();
                theirs.clear();
            }
        }
        Ok(())
    }
}
