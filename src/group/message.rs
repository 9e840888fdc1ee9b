//! What a rank and the store say to each other, once they know each other.

use crate::{Error, Result};

/// The longest key.
pub(super) const KEY_BYTES_MAX: usize = 256;
/// The longest value, and the longest message.
pub(super) const VALUE_BYTES_MAX: usize = 64 << 10;
/// The longest list of values.
pub(super) const LIST_BYTES_MAX: usize = 16 << 20;

/// One message. On the wire: the length of what follows in four bytes, a byte for the kind, then the fields in order; numbers are little-endian, a
/// key has its length in two bytes before it, and what comes last takes the rest. Ids are the rank's own numbers for its requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Message<'a> {
    /// To the store: remember this. Answered by `Done` or `Full`.
    Set {
        /// The request.
        id: u32,
        /// Under this key; an older value is replaced.
        key: &'a [u8],
        /// What.
        value: &'a [u8],
    },
    /// To the store: answer with a `Value` as soon as this key has one.
    Get {
        /// The request.
        id: u32,
        /// The key.
        key: &'a [u8],
    },
    /// To the store: as `Get`, and remove the value. One rank gets it; other requests of this kind wait for the next value.
    Take {
        /// The request.
        id: u32,
        /// The key.
        key: &'a [u8],
    },
    /// To the store: answer with `Done` when every rank has said this as often as this one. Answered by `Left` if one cannot any more.
    Barrier {
        /// The request.
        id: u32,
    },
    /// To the store: as `Barrier`, and answer with the `List` of what each rank gave.
    Gather {
        /// The request.
        id: u32,
        /// What this rank gives.
        value: &'a [u8],
    },
    /// To the store: as `Gather`, with what all ranks say under the same key. Meetings of different keys are apart.
    Meet {
        /// The request.
        id: u32,
        /// The key.
        key: &'a [u8],
        /// What this rank gives.
        value: &'a [u8],
    },
    /// To the store: nobody waits for that request any more.
    Cancel {
        /// The request.
        id: u32,
    },
    /// To the store: give this to another rank, now or when it comes.
    Forward {
        /// The other rank.
        to: u32,
        /// What.
        bytes: &'a [u8],
    },
    /// To the store: the end of this connection is no failure. Answered by `Done`; to rank 0 only when every other rank has ended, too.
    Leave {
        /// The request.
        id: u32,
    },
    /// To the store: make a group of the ranks that are here. Answered by the `List` of their numbers, each in four bytes, and of what the first of them
    /// gave, once every rank that is here has said this.
    Shrink {
        /// The request.
        id: u32,
        /// What this rank gives.
        value: &'a [u8],
    },
    /// From the store: it is done.
    Done {
        /// The request.
        id: u32,
    },
    /// From the store: what stands under the key.
    Value {
        /// The request.
        id: u32,
        /// What.
        value: &'a [u8],
    },
    /// From the store: what all ranks gave, in their order, each with its length in four bytes before it.
    List {
        /// The request.
        id: u32,
        /// The values.
        values: &'a [u8],
    },
    /// From the store: it cannot be, because that rank has left.
    Left {
        /// The request.
        id: u32,
        /// The rank that has left.
        rank: u32,
    },
    /// From the store: there is no room for it.
    Full {
        /// The request.
        id: u32,
    },
    /// From the store: another rank gave this to you.
    Delivery {
        /// The other rank.
        from: u32,
        /// What.
        bytes: &'a [u8],
    },
    /// From the store: that rank has ended and had not left.
    Lost {
        /// The rank.
        rank: u32,
    },
}

impl<'a> Message<'a> {
    /// Reads the message that `bytes` begin with; also returns how many bytes it takes. `None` if bytes are still missing. The first five bytes
    /// show whether the message is well-formed, so a reader never has to hold more than the longest message.
    ///
    /// # Errors
    /// [`Error::Malformed`].
    pub fn parse(bytes: &'a [u8]) -> Result<Option<(Message<'a>, usize)>> {
        let Some((head, rest)) = bytes.split_first_chunk::<5>() else {
            return Ok(None);
        };
        let [a, b, c, d, kind] = *head;
        // Of the kind and the fields.
        let len = u32::from_le_bytes([a, b, c, d]) as usize;
        let longest = match kind {
            1 | 16 => 4 + 2 + KEY_BYTES_MAX + VALUE_BYTES_MAX,
            2 | 17 => 4 + 2 + KEY_BYTES_MAX,
            3 | 5 | 7 | 8 | 12 | 14 => 4,
            4 | 6 | 9 | 13 | 15 => 4 + VALUE_BYTES_MAX,
            10 => 4 + LIST_BYTES_MAX,
            11 => 8,
            _ => return Err(bad(format!("no message has kind {kind}"))),
        };
        let body_len = len
            .checked_sub(1)
            .filter(|body| (4..=longest).contains(body))
            .ok_or_else(|| {
                bad(format!(
                    "a message of kind {kind} cannot be {len} bytes long"
                ))
            })?;
        let Some(body) = rest.get(..body_len) else {
            return Ok(None);
        };
        let mut fields = Fields(body);
        let number = fields.number()?;
        let message = match kind {
            1 => Message::Set {
                id: number,
                key: fields.key()?,
                value: fields.rest(VALUE_BYTES_MAX)?,
            },
            2 => Message::Get {
                id: number,
                key: fields.key()?,
            },
            3 => Message::Barrier { id: number },
            4 => Message::Gather {
                id: number,
                value: fields.rest(VALUE_BYTES_MAX)?,
            },
            5 => Message::Cancel { id: number },
            6 => Message::Forward {
                to: number,
                bytes: fields.rest(VALUE_BYTES_MAX)?,
            },
            7 => Message::Leave { id: number },
            8 => Message::Done { id: number },
            9 => Message::Value {
                id: number,
                value: fields.rest(VALUE_BYTES_MAX)?,
            },
            10 => Message::List {
                id: number,
                values: fields.rest(LIST_BYTES_MAX)?,
            },
            11 => Message::Left {
                id: number,
                rank: fields.number()?,
            },
            12 => Message::Full { id: number },
            13 => Message::Delivery {
                from: number,
                bytes: fields.rest(VALUE_BYTES_MAX)?,
            },
            14 => Message::Lost { rank: number },
            15 => Message::Shrink {
                id: number,
                value: fields.rest(VALUE_BYTES_MAX)?,
            },
            16 => Message::Meet {
                id: number,
                key: fields.key()?,
                value: fields.rest(VALUE_BYTES_MAX)?,
            },
            _ => Message::Take {
                id: number,
                key: fields.key()?,
            },
        };
        fields.end()?;
        Ok(Some((message, 4 + len)))
    }

    /// Takes the values of a [`Message::List`] apart.
    ///
    /// # Errors
    /// [`Error::Malformed`] if there are not `count` of them.
    pub fn split_list(mut values: &[u8], count: u32) -> Result<Vec<&[u8]>> {
        let mut split = Vec::new();
        while let Some((len, rest)) = values.split_first_chunk::<4>() {
            let (value, rest) = rest
                .split_at_checked(u32::from_le_bytes(*len) as usize)
                .ok_or_else(|| bad("a value leaves its list".into()))?;
            split.push(value);
            values = rest;
        }
        if !values.is_empty() || split.len() != count as usize {
            return Err(bad(format!(
                "its list has {} values and {} bytes more, the group {count} ranks",
                split.len(),
                values.len()
            )));
        }
        Ok(split)
    }

    /// The bytes that [`Message::parse`] reads.
    ///
    /// # Errors
    /// [`Error::Range`] for a key of more than 256 bytes, a value of more than 64 KiB, a list of more than 16 MiB.
    pub fn to_bytes(&self) -> Result<Vec<u8>> {
        let (kind, number) = match *self {
            Message::Set { id, .. } => (1, id),
            Message::Get { id, .. } => (2, id),
            Message::Barrier { id } => (3, id),
            Message::Gather { id, .. } => (4, id),
            Message::Cancel { id } => (5, id),
            Message::Forward { to, .. } => (6, to),
            Message::Leave { id } => (7, id),
            Message::Done { id } => (8, id),
            Message::Value { id, .. } => (9, id),
            Message::List { id, .. } => (10, id),
            Message::Left { id, .. } => (11, id),
            Message::Full { id } => (12, id),
            Message::Delivery { from, .. } => (13, from),
            Message::Lost { rank } => (14, rank),
            Message::Shrink { id, .. } => (15, id),
            Message::Meet { id, .. } => (16, id),
            Message::Take { id, .. } => (17, id),
        };
        let mut bytes = vec![0; 4];
        bytes.push(kind);
        bytes.extend(number.to_le_bytes());
        if let Message::Set { key, .. }
        | Message::Get { key, .. }
        | Message::Take { key, .. }
        | Message::Meet { key, .. } = *self
        {
            within("key", key, KEY_BYTES_MAX)?;
            bytes.extend((key.len() as u16).to_le_bytes());
            bytes.extend(key);
        }
        match *self {
            Message::Set { value, .. }
            | Message::Gather { value, .. }
            | Message::Meet { value, .. }
            | Message::Shrink { value, .. }
            | Message::Value { value, .. } => {
                within("value", value, VALUE_BYTES_MAX)?;
                bytes.extend(value);
            }
            Message::Forward { bytes: message, .. } | Message::Delivery { bytes: message, .. } => {
                within("message", message, VALUE_BYTES_MAX)?;
                bytes.extend(message);
            }
            Message::List { values, .. } => {
                within("list", values, LIST_BYTES_MAX)?;
                bytes.extend(values);
            }
            Message::Left { rank, .. } => bytes.extend(rank.to_le_bytes()),
            _ => {}
        }
        let len = (bytes.len() - 4) as u32;
        bytes[..4].copy_from_slice(&len.to_le_bytes());
        Ok(bytes)
    }
}

struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn number(&mut self) -> Result<u32> {
        let (number, rest) = self
            .0
            .split_first_chunk()
            .ok_or_else(|| bad("a number is missing".into()))?;
        self.0 = rest;
        Ok(u32::from_le_bytes(*number))
    }

    fn key(&mut self) -> Result<&'a [u8]> {
        let (len, rest) = self
            .0
            .split_first_chunk()
            .ok_or_else(|| bad("a key is missing".into()))?;
        let len = u16::from_le_bytes(*len) as usize;
        let (key, rest) = rest
            .split_at_checked(len)
            .filter(|_| len <= KEY_BYTES_MAX)
            .ok_or_else(|| bad(format!("a key cannot be {len} bytes long")))?;
        self.0 = rest;
        Ok(key)
    }

    fn rest(&mut self, longest: usize) -> Result<&'a [u8]> {
        let rest = std::mem::take(&mut self.0);
        if rest.len() > longest {
            return Err(bad(format!("{} bytes are too many", rest.len())));
        }
        Ok(rest)
    }

    fn end(&self) -> Result<()> {
        if self.0.is_empty() {
            Ok(())
        } else {
            Err(bad(format!("{} bytes too many", self.0.len())))
        }
    }
}

fn bad(reason: String) -> Error {
    Error::Malformed {
        what: "message of a group's store",
        reason,
    }
}

fn within(argument: &'static str, bytes: &[u8], max: usize) -> Result<()> {
    if bytes.len() > max {
        return Err(Error::Range {
            argument,
            value: bytes.len() as u64,
            min: 0,
            max: max as u64,
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn all<'a>(key: &'a [u8], value: &'a [u8]) -> Vec<Message<'a>> {
        let id = 0x0403_0201;
        vec![
            Message::Set { id, key, value },
            Message::Get { id, key },
            Message::Barrier { id },
            Message::Gather { id, value },
            Message::Cancel { id },
            Message::Forward {
                to: 7,
                bytes: value,
            },
            Message::Leave { id },
            Message::Done { id },
            Message::Value { id, value },
            Message::List { id, values: value },
            Message::Left { id, rank: 9 },
            Message::Full { id },
            Message::Delivery {
                from: 8,
                bytes: value,
            },
            Message::Lost { rank: 3 },
            Message::Shrink { id, value },
            Message::Meet { id, key, value },
            Message::Take { id, key },
        ]
    }

    #[test]
    fn golden_bytes() {
        let set = Message::Set {
            id: 0x0403_0201,
            key: b"key",
            value: b"value",
        };
        assert_eq!(
            set.to_bytes().unwrap(),
            b"\x0f\0\0\0\x01\x01\x02\x03\x04\x03\0keyvalue"
        );
        let left = Message::Left { id: 1, rank: 2 };
        assert_eq!(
            left.to_bytes().unwrap(),
            b"\x09\0\0\0\x0b\x01\0\0\0\x02\0\0\0"
        );
    }

    #[test]
    fn every_message_reads_back_and_is_never_read_early() {
        for message in all(b"key", b"value") {
            let mut bytes = message.to_bytes().unwrap();
            let len = bytes.len();
            for cut in 0..len {
                assert_eq!(Message::parse(&bytes[..cut]), Ok(None), "{message:?}");
            }
            bytes.extend(b"next");
            assert_eq!(Message::parse(&bytes), Ok(Some((message, len))));
        }
    }

    #[test]
    fn lengths_that_lie_are_known_from_five_bytes() {
        for kind in 0..=255 {
            for len in [0, 1, 4, 17 << 20, u32::MAX] {
                let mut bytes = len.to_le_bytes().to_vec();
                bytes.push(kind);
                let parsed = Message::parse(&bytes);
                assert!(
                    matches!(parsed, Err(Error::Malformed { .. })),
                    "{kind} {len}"
                );
            }
        }
        let mut long_key = Message::Get { id: 1, key: b"k" }.to_bytes().unwrap();
        long_key[9] = 2;
        assert!(Message::parse(&long_key).is_err());
    }

    #[test]
    fn limits_hold_when_writing() {
        let long = vec![0; VALUE_BYTES_MAX + 1];
        let refused = [
            Message::Get {
                id: 1,
                key: &long[..257],
            },
            Message::Value {
                id: 1,
                value: &long,
            },
            Message::Forward {
                to: 1,
                bytes: &long,
            },
        ];
        for message in refused {
            assert!(matches!(message.to_bytes(), Err(Error::Range { .. })));
        }
        for message in all(&long[..256], &long[1..]) {
            let bytes = message.to_bytes().unwrap();
            assert_eq!(Message::parse(&bytes), Ok(Some((message, bytes.len()))));
        }
    }

    #[test]
    fn lists_are_taken_apart_whole_or_not() {
        let list = b"\x01\0\0\0a\0\0\0\0\x02\0\0\0bc";
        let split = vec![&b"a"[..], b"", b"bc"];
        assert_eq!(Message::split_list(list, 3), Ok(split));
        assert!(Message::split_list(list, 2).is_err());
        assert!(Message::split_list(&list[..list.len() - 1], 3).is_err());
        assert!(Message::split_list(b"\xff\xff\xff\xff", 1).is_err());
    }

    proptest! {
        #[test]
        fn whatever_is_read_is_written_the_same(bytes in proptest::collection::vec(any::<u8>(), 0..64), kind in 1u8..16, trim in 0u32..60) {
            let mut bytes = bytes;
            if let Some(head) = bytes.first_chunk_mut::<5>() {
                let [a, b, c, d] = trim.to_le_bytes();
                *head = [a, b, c, d, kind];
            }
            if let Ok(Some((message, len))) = Message::parse(&bytes) {
                prop_assert_eq!(message.to_bytes().unwrap(), &bytes[..len]);
            }
        }
    }
}
