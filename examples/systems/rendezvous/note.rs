//! What ranks say to each other: keys, and the messages about them.

use std::fmt;

use anyhow::{Context, Result, anyhow, bail, ensure};

/// Where a tensor comes from, where it goes, its name, and the step.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Key {
    pub producer: u32,
    /// A random number of the producer's process: another one after a restart.
    pub incarnation: u64,
    pub consumer: u32,
    pub name: String,
    pub step: u64,
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Key {
            producer,
            incarnation,
            consumer,
            name,
            step,
        } = self;
        write!(
            f,
            "/task:{producer};{incarnation:016x};/task:{consumer};{name};{step}"
        )
    }
}

impl Key {
    /// Reads what a peer sent: the text of a key.
    pub fn parse(text: &str) -> Result<Key> {
        let [producer, incarnation, consumer, name, step] = text.split(';').collect::<Vec<_>>()[..]
        else {
            bail!("`{text}` is no key: it has not five parts");
        };
        let task = |part: &str| -> Result<u32> {
            let number = part.strip_prefix("/task:");
            Ok(number
                .with_context(|| format!("`{text}` is no key"))?
                .parse()?)
        };
        ensure!(!name.is_empty(), "`{text}` is no key: it has no name");
        Ok(Key {
            producer: task(producer)?,
            incarnation: u64::from_str_radix(incarnation, 16)?,
            consumer: task(consumer)?,
            name: name.into(),
            step: step.parse()?,
        })
    }
}

/// A step was aborted: what all its receives end with.
#[derive(Debug, Clone)]
pub struct Aborted {
    pub step: u64,
    pub reason: String,
}

impl fmt::Display for Aborted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "step {} was aborted: {}", self.step, self.reason)
    }
}

impl std::error::Error for Aborted {}

/// A receive was cancelled by its consumer.
#[derive(Debug, Clone)]
pub struct Cancelled {
    pub key: String,
}

impl fmt::Display for Cancelled {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the receive of {} was cancelled", self.key)
    }
}

impl std::error::Error for Cancelled {}

/// How a consumer gets a tensor.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Method {
    /// Where it is, and an RDMA READ.
    Read = 0,
    /// In a message that is encoded and decoded: a copy at each end.
    Message = 1,
    /// As `Read`, into a buffer of the transport, from which the consumer copies it.
    ReadAndCopy = 2,
}

impl Method {
    pub fn name(self) -> &'static str {
        match self {
            Method::Read => "READ",
            Method::Message => "message",
            Method::ReadAndCopy => "READ+copy",
        }
    }
}

/// What ranks send to each other. On the wire: a byte for the kind, and the rest, little-endian.
pub enum Note<'a> {
    /// The consumer asks for a tensor.
    Ask {
        id: u64,
        method: Method,
        key: &'a str,
    },
    /// Where it is. The consumer gives the number back when it has read it.
    Located {
        id: u64,
        number: u32,
        len: u32,
        addr: u64,
        rkey: u32,
    },
    /// The tensor itself.
    Encoded {
        id: u64,
        values: &'a [u8],
    },
    Abort {
        step: u64,
        reason: &'a str,
    },
    /// The producer has nothing for this request, and will not have it.
    Refused {
        id: u64,
        reason: &'a str,
    },
    /// The consumer takes its request back.
    Cancel {
        id: u64,
        key: &'a str,
    },
    /// The operation that would have made the tensor was not run.
    Dead {
        id: u64,
    },
}

/// Bytes of an encoded tensor in front of its values.
pub const ENCODED_HEADER: usize = 9;
/// Bytes of an abort or a refusal in front of its reason.
pub const REASON_HEADER: usize = 9;

impl<'a> Note<'a> {
    pub fn to_bytes(&self) -> Vec<u8> {
        match self {
            Note::Ask { id, method, key } => [
                &[0][..],
                &id.to_le_bytes(),
                &[*method as u8],
                key.as_bytes(),
            ]
            .concat(),
            Note::Located {
                id,
                number,
                len,
                addr,
                rkey,
            } => [
                &[1][..],
                &id.to_le_bytes(),
                &number.to_le_bytes(),
                &len.to_le_bytes(),
                &addr.to_le_bytes(),
                &rkey.to_le_bytes(),
            ]
            .concat(),
            Note::Encoded { id, values } => [&[2][..], &id.to_le_bytes(), values].concat(),
            Note::Abort { step, reason } => {
                [&[3][..], &step.to_le_bytes(), reason.as_bytes()].concat()
            }
            Note::Refused { id, reason } => {
                [&[4][..], &id.to_le_bytes(), reason.as_bytes()].concat()
            }
            Note::Cancel { id, key } => [&[5][..], &id.to_le_bytes(), key.as_bytes()].concat(),
            Note::Dead { id } => [&[6][..], &id.to_le_bytes()].concat(),
        }
    }

    pub fn parse(bytes: &'a [u8]) -> Result<Note<'a>> {
        let malformed = || anyhow!("a note of {} bytes", bytes.len());
        let (kind, rest) = bytes.split_first().with_context(malformed)?;
        let (first, rest) = rest.split_first_chunk().with_context(malformed)?;
        let first = u64::from_le_bytes(*first);
        match (kind, rest) {
            (0, [method, key @ ..]) => Ok(Note::Ask {
                id: first,
                method: match method {
                    0 => Method::Read,
                    1 => Method::Message,
                    2 => Method::ReadAndCopy,
                    _ => bail!("a request for method {method}"),
                },
                key: std::str::from_utf8(key)?,
            }),
            (1, rest) => {
                let words = rest.as_chunks::<4>().0;
                ensure!(words.len() == 5, malformed());
                let word = |at: usize| u32::from_le_bytes(words[at]);
                Ok(Note::Located {
                    id: first,
                    number: word(0),
                    len: word(1),
                    addr: u64::from(word(2)) | u64::from(word(3)) << 32,
                    rkey: word(4),
                })
            }
            (2, values) => Ok(Note::Encoded { id: first, values }),
            (3, reason) => Ok(Note::Abort {
                step: first,
                reason: std::str::from_utf8(reason)?,
            }),
            (4, reason) => Ok(Note::Refused {
                id: first,
                reason: std::str::from_utf8(reason)?,
            }),
            (5, key) => Ok(Note::Cancel {
                id: first,
                key: std::str::from_utf8(key)?,
            }),
            (6, []) => Ok(Note::Dead { id: first }),
            _ => Err(malformed()),
        }
    }
}
