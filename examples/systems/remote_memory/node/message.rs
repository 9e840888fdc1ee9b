//! What ranks tell each other: four words, in one inline send.

use anyhow::{Context, Result};

/// Bytes of a message.
pub(super) const MESSAGE_BYTES: u64 = 32;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u64)]
pub(super) enum Kind {
    /// To the home: a request for the line, to be written to `place` of the sender.
    Read,
    Write,
    /// As `Write`, from a rank that has the line.
    Upgrade,
    /// From the home to the owner: give the line to `requester`.
    ForwardRead,
    ForwardWrite,
    /// From the home to a rank that shares the line, and the answer.
    Invalidate,
    Invalidated,
    /// To the requester: the line is in its place.
    Granted,
    /// From the owner to the home: the line was given.
    Released,
    /// From the requester to the home: the line of the owner has come.
    Done,
    /// To the home: the owner has written the line back. And the answer.
    Evict,
    Evicted,
    Barrier,
}

const KINDS: [Kind; 13] = [
    Kind::Read,
    Kind::Write,
    Kind::Upgrade,
    Kind::ForwardRead,
    Kind::ForwardWrite,
    Kind::Invalidate,
    Kind::Invalidated,
    Kind::Granted,
    Kind::Released,
    Kind::Done,
    Kind::Evict,
    Kind::Evicted,
    Kind::Barrier,
];

#[derive(Clone, Copy, Debug)]
pub(super) struct Message {
    pub(super) kind: Kind,
    pub(super) line: u64,
    pub(super) requester: u32,
    pub(super) place: u64,
}

impl Message {
    pub(super) fn of(kind: Kind, line: u64) -> Message {
        let (requester, place) = (0, 0);
        Message {
            kind,
            line,
            requester,
            place,
        }
    }

    pub(super) fn to_bytes(self) -> [u8; MESSAGE_BYTES as usize] {
        let mut bytes = [0; MESSAGE_BYTES as usize];
        let words = [
            self.kind as u64,
            self.line,
            self.requester.into(),
            self.place,
        ];
        for (to, word) in bytes.chunks_exact_mut(8).zip(words) {
            to.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    pub(super) fn from_bytes(bytes: &[u8; MESSAGE_BYTES as usize]) -> Result<Message> {
        let mut words = [0; 4];
        for (word, from) in words.iter_mut().zip(bytes.chunks_exact(8)) {
            *word = u64::from_le_bytes(from.try_into()?);
        }
        let kind = *KINDS
            .get(words[0] as usize)
            .context("a message of no known kind")?;
        Ok(Message {
            kind,
            line: words[1],
            requester: words[2] as u32,
            place: words[3],
        })
    }
}
