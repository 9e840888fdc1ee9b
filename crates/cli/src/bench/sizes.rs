//! Lists of message sizes on the command line: `8,64,1K..64K`.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// The longest message: `max_msg_sz` of a ConnectX port is 2^30 bytes.
pub const MAX_BYTES: u64 = 1 << 30;

/// Message sizes in bytes, in the order given. Never empty, each 1 to 2^30.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MessageSizes(Vec<u64>);

impl MessageSizes {
    /// The sizes one by one.
    pub fn iter(&self) -> impl Iterator<Item = u64> + '_ {
        self.0.iter().copied()
    }

    /// The longest of them: the length of buffers.
    pub fn max_bytes(&self) -> u64 {
        self.iter().max().unwrap_or(1)
    }
}

impl FromStr for MessageSizes {
    type Err = String;

    /// Items are separated by commas; `A..B` is every power of two from A to B, both included.
    fn from_str(text: &str) -> Result<Self, String> {
        let mut sizes = Vec::new();
        for item in text.split(',').map(str::trim) {
            let Some((first, last)) = item.split_once("..") else {
                sizes.push(size(item)?);
                continue;
            };
            let (first, last) = (size(first)?, size(last)?);
            if !first.is_power_of_two() || !last.is_power_of_two() || first > last {
                return Err(format!(
                    "`{item}`: a range goes from a power of two up to a power of two"
                ));
            }
            sizes.extend((first.ilog2()..=last.ilog2()).map(|exponent| 1u64 << exponent));
        }
        Ok(Self(sizes))
    }
}

impl fmt::Display for MessageSizes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, bytes) in self.iter().enumerate() {
            let comma = if index == 0 { "" } else { "," };
            write!(f, "{comma}{}", Short(bytes))?;
        }
        Ok(())
    }
}

/// A size with a binary suffix where it is a whole number of them: `64`, `4K`, `1M`.
pub struct Short(pub u64);

impl fmt::Display for Short {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            0 => f.pad("0"),
            n if n % (1 << 20) == 0 => f.pad(&format!("{}M", n >> 20)),
            n if n % (1 << 10) == 0 => f.pad(&format!("{}K", n >> 10)),
            n => f.pad(&n.to_string()),
        }
    }
}

fn size(text: &str) -> Result<u64, String> {
    let text = text.trim();
    let (digits, shift) = match text.as_bytes().last() {
        Some(b'k' | b'K') => (&text[..text.len() - 1], 10),
        Some(b'm' | b'M') => (&text[..text.len() - 1], 20),
        _ => (text, 0),
    };
    // `u64::from_str` takes a leading plus sign, which no size has.
    if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(format!(
            "`{text}` is not a size: a number of bytes, or one with K or M"
        ));
    }
    digits
        .parse::<u64>()
        .ok()
        .and_then(|number| number.checked_mul(1 << shift))
        .filter(|bytes| (1..=MAX_BYTES).contains(bytes))
        .ok_or_else(|| format!("`{text}` is out of range: a size is 1 to {MAX_BYTES} bytes"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Vec<u64> {
        text.parse::<MessageSizes>().unwrap().iter().collect()
    }

    #[test]
    fn items_suffixes_and_ranges() {
        assert_eq!(parsed("8"), [8]);
        assert_eq!(parsed("8, 64,3K,1m"), [8, 64, 3072, 1 << 20]);
        assert_eq!(parsed("8,64,1K..4K"), [8, 64, 1024, 2048, 4096]);
        assert_eq!(parsed("512..2K,1"), [512, 1024, 2048, 1]);
        assert_eq!(parsed("4..4"), [4]);
        assert_eq!(parsed("1024M"), [1 << 30]);
    }

    #[test]
    fn what_is_no_size_is_named() {
        for (text, named) in [
            ("", "``"),
            ("8,", "``"),
            ("K", "`K`"),
            ("+8", "`+8`"),
            ("8G", "`8G`"),
            ("8..", "``"),
            ("1.5K", "`1.5K`"),
            ("64..8", "`64..8`"),
            ("8..24", "`8..24`"),
            ("0", "1 to 1073741824"),
            ("1025M", "1 to 1073741824"),
            ("18446744073709551615K", "1 to 1073741824"),
            ("99999999999999999999", "1 to 1073741824"),
            ("8Ä", "`8Ä`"),
        ] {
            let error = text.parse::<MessageSizes>().unwrap_err();
            assert!(error.contains(named), "{text:?}: {error}");
        }
    }

    #[test]
    fn what_is_shown_parses_back() {
        let sizes: MessageSizes = "8,1000,1K..8K,1M".parse().unwrap();
        assert_eq!(sizes.to_string(), "8,1000,1K,2K,4K,8K,1M");
        assert_eq!(sizes.to_string().parse(), Ok(sizes.clone()));
        assert_eq!(sizes.max_bytes(), 1 << 20);
        assert_eq!(format!("{:>5}", Short(65536)), "  64K");
    }
}
