//! A key-value store: a hash table with one record in a line, over the memory with its caches, or over one-sided accesses without any.
//!
//! A record: lock, key + 1 (0 in an empty record), version, checksum, value. The lock is used without caches only. Value and checksum follow from key and version, so that every record that is
//! read can be checked, and the table at the end follows from the puts alone.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::ValueEnum;

use crate::node::{DEADLINE, LINE_BYTES, Node};
use crate::random::{Random, mix};
use crate::support;

const KEY_AT: usize = 8;
const VERSION_AT: usize = 16;
const CHECKSUM_AT: usize = 24;
const VALUE_AT: usize = 32;
pub const VALUE_BYTES_MAX: usize = LINE_BYTES as usize - VALUE_AT;

/// The pause behind the first attempt at a lock that another rank has, and the longest one.
const PAUSE_MIN: Duration = Duration::from_micros(4);
const PAUSE_MAX: Duration = Duration::from_micros(512);

#[derive(Clone, Copy, ValueEnum, PartialEq, Eq, Debug)]
pub enum Method {
    /// The caches
    Cached,
    /// One-sided reads; a put locks the record by a compare-and-swap
    Direct,
}

impl Method {
    pub fn name(self) -> String {
        self.to_possible_value()
            .map_or_else(String::new, |value| value.get_name().to_owned())
    }
}

/// The table of one method, as one rank knows it.
pub struct Table {
    pub method: Method,
    first_line: u64,
    lines: u64,
    value_bytes: usize,
    /// Lines of keys that were found. A key never moves.
    found: HashMap<u64, u64>,
    /// This process ends in the middle of its next put, as if its host lost power.
    pub is_killed: bool,
    /// Reads of records that another rank was writing, and locks that were taken.
    pub retries: u64,
}

impl Table {
    pub fn new(method: Method, first_line: u64, lines: u64, value_bytes: usize) -> Table {
        Table {
            method,
            first_line,
            lines,
            value_bytes,
            found: HashMap::new(),
            is_killed: false,
            retries: 0,
        }
    }

    /// Lines of a table for so many keys.
    pub fn lines_for(keys: u64) -> u64 {
        2 * keys
    }

    fn places(&self, key: u64) -> impl Iterator<Item = u64> + use<> {
        let (first_line, lines) = (self.first_line, self.lines);
        (0..lines).map(move |step| first_line + (mix(key) + step) % lines)
    }

    /// Adds a key, at the first line of its chain that no other key has.
    pub fn insert(&mut self, node: &mut Node, key: u64) -> Result<()> {
        for line in self.places(key) {
            let at = line * LINE_BYTES + KEY_AT as u64;
            let old = match self.method {
                Method::Cached => {
                    node.atomic(at, move |old| if old == 0 { key + 1 } else { old })?
                }
                Method::Direct => node.compare_swap_direct(at, 0, key + 1)?,
            };
            if old != 0 {
                continue;
            }
            self.found.insert(key, line);
            let value_bytes = self.value_bytes;
            return match self.method {
                Method::Cached => node.edit(
                    line,
                    Box::new(move |bytes| make(bytes, key, 0, value_bytes)),
                ),
                Method::Direct => {
                    let mut bytes = [0; LINE_BYTES as usize];
                    make(&mut bytes, key, 0, value_bytes);
                    self.write_direct(node, line, &bytes)
                }
            };
        }
        anyhow::bail!("no line for key {key}")
    }

    /// The version of a key; its value was checked.
    pub fn get(&mut self, node: &mut Node, key: u64) -> Result<u64> {
        let line = self.find(node, key)?;
        let mut bytes = vec![0; VALUE_AT + self.value_bytes];
        let (mut pause, started) = (PAUSE_MIN, Instant::now());
        loop {
            self.read(node, line, &mut bytes)?;
            if let Some(version) = check(&bytes, key) {
                return Ok(version);
            }
            ensure!(
                self.method == Method::Direct,
                "key {key}: a record that no put has made"
            );
            ensure!(
                started.elapsed() < DEADLINE,
                "key {key}: its record was never whole for {DEADLINE:?}"
            );
            self.retries += 1;
            // The rank that writes the record may need this core. If it has ended, the record stays as it is, and the pause fails.
            node.pause(pause)?;
            pause = (2 * pause).min(PAUSE_MAX);
        }
    }

    /// Puts the next version of a key.
    pub fn put(&mut self, node: &mut Node, key: u64) -> Result<()> {
        let line = self.find(node, key)?;
        let value_bytes = self.value_bytes;
        if self.method == Method::Cached {
            // In one step, when this rank owns the line. It does not wait for that.
            return node.edit(
                line,
                Box::new(move |bytes| {
                    let version = word(bytes, VERSION_AT) + 1;
                    make(bytes, key, version, value_bytes);
                }),
            );
        }
        let mut pause = PAUSE_MIN;
        while node.compare_swap_direct(line * LINE_BYTES, 0, 1)? != 0 {
            self.retries += 1;
            // The rank that has the lock may need this core to free it, and its device answers to every attempt.
            node.pause(pause)?;
            pause = (2 * pause).min(PAUSE_MAX);
        }
        let mut bytes = [0; LINE_BYTES as usize];
        self.read(node, line, &mut bytes[..VALUE_AT + value_bytes])?;
        let version = word(&bytes, VERSION_AT) + 1;
        make(&mut bytes, key, version, value_bytes);
        if self.is_killed {
            // A part of the record is there, and its lock is taken.
            let at = line * LINE_BYTES;
            let torn = &bytes[KEY_AT..CHECKSUM_AT];
            node.write_direct(at + KEY_AT as u64, torn, (at, 1))?;
            support::kill_myself();
        }
        self.write_direct(node, line, &bytes)
    }

    /// Writes all but the lock, and then frees this.
    fn write_direct(&self, node: &mut Node, line: u64, bytes: &[u8]) -> Result<()> {
        let at = line * LINE_BYTES;
        node.write_direct(
            at + KEY_AT as u64,
            &bytes[KEY_AT..VALUE_AT + self.value_bytes],
            (at, 0),
        )
    }

    fn read(&self, node: &mut Node, line: u64, bytes: &mut [u8]) -> Result<()> {
        match self.method {
            Method::Cached => node.read(line * LINE_BYTES, bytes),
            Method::Direct => node.read_direct(line * LINE_BYTES, bytes),
        }
    }

    fn find(&mut self, node: &mut Node, key: u64) -> Result<u64> {
        if let Some(line) = self.found.get(&key) {
            return Ok(*line);
        }
        for line in self.places(key) {
            let mut header = [0; VALUE_AT];
            self.read(node, line, &mut header)?;
            match word(&header, KEY_AT) {
                0 => break,
                other if other == key + 1 => {
                    self.found.insert(key, line);
                    return Ok(line);
                }
                _ => {}
            }
        }
        None.with_context(|| format!("key {key} is not in the table"))
    }
}

fn word(bytes: &[u8], at: usize) -> u64 {
    bytes[at..]
        .first_chunk()
        .map_or(0, |bytes| u64::from_le_bytes(*bytes))
}

/// Makes the record of a version, all but its lock.
fn make(bytes: &mut [u8], key: u64, version: u64, value_bytes: usize) {
    let mut random = Random::new(mix(key) ^ version);
    for to in bytes[VALUE_AT..VALUE_AT + value_bytes].chunks_mut(8) {
        to.copy_from_slice(&random.next().to_le_bytes()[..to.len()]);
    }
    let sum = checksum(&bytes[VALUE_AT..VALUE_AT + value_bytes], key, version);
    for (at, word) in [(KEY_AT, key + 1), (VERSION_AT, version), (CHECKSUM_AT, sum)] {
        bytes[at..at + 8].copy_from_slice(&word.to_le_bytes());
    }
}

/// The version of a record, if it is one of this key and whole.
fn check(bytes: &[u8], key: u64) -> Option<u64> {
    let version = word(bytes, VERSION_AT);
    let sum = checksum(&bytes[VALUE_AT..], key, version);
    (word(bytes, KEY_AT) == key + 1 && word(bytes, CHECKSUM_AT) == sum).then_some(version)
}

fn checksum(value: &[u8], key: u64, version: u64) -> u64 {
    let sum = mix(key ^ mix(version));
    value.chunks(8).fold(sum, |sum, part| {
        let mut word = [0; 8];
        word[..part.len()].copy_from_slice(part);
        mix(sum ^ u64::from_le_bytes(word))
    })
}
