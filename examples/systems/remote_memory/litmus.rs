//! Litmus tests: small programs of several ranks, whose outcomes tell which order the memory keeps.
//!
//! Locations are lines of their own. A batch has many instances of a test, at other locations each, so that ranks run through it without meeting in between. Every write of a batch has a number
//! that no other one has; what a read returns is either of this batch, or the last value of the batch before.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use serde_json::{Value, json};

use crate::node::{DEADLINE, LINE_BYTES, Node};
use crate::random::Random;

use Step::{Atomic, Await, Fence, Read, Touch, Write};

#[derive(Clone, Copy)]
pub enum Step {
    /// Writes this value, 1 to 3, to a location.
    Write(usize, u8),
    /// As `Write`, by an atomic: there is no other fence before it.
    Atomic(usize, u8),
    Read(usize),
    /// A read whose value does not count: it brings the line into the cache.
    Touch(usize),
    /// Reads a location until it has a new value, which does not count either.
    Await(usize),
    Fence,
}

impl Step {
    fn location(self) -> Option<usize> {
        match self {
            Write(location, _)
            | Atomic(location, _)
            | Read(location)
            | Touch(location)
            | Await(location) => Some(location),
            Fence => None,
        }
    }
}

pub struct Litmus {
    pub name: &'static str,
    /// One program for each rank that takes part.
    programs: &'static [&'static [Step]],
    /// Of what all reads return, one program after the other; 0 is the value of before.
    is_forbidden: fn(&[u8]) -> bool,
    /// What sequential consistency would forbid.
    is_relaxed: fn(&[u8]) -> bool,
}

/// A value was seen after a newer one: two readers disagree, or one goes back.
fn goes_back(reads: &[u8]) -> bool {
    let pairs = [(reads[0], reads[1]), (reads[2], reads[3])];
    let back = pairs
        .iter()
        .any(|(first, second)| *first != 0 && *second == 0);
    let [(a, b), (c, d)] = pairs;
    back || (a != 0 && b != 0 && a != b && (a, b) == (d, c))
}

pub const TESTS: [Litmus; 8] = [
    // Location 0 is the data, 1 the flag. The reader has the old data in its cache. By location 2 the writer waits for it: neither runs ahead to the next instance.
    Litmus {
        name: "message passing",
        programs: &[
            &[Write(0, 1), Write(1, 1), Await(2)],
            &[Touch(0), Await(1), Read(0), Write(2, 1)],
        ],
        is_forbidden: |_| false,
        is_relaxed: |reads| reads == [0],
    },
    Litmus {
        name: "message passing, fence",
        programs: &[
            &[Write(0, 1), Fence, Write(1, 1), Await(2)],
            &[Touch(0), Await(1), Read(0), Write(2, 1)],
        ],
        is_forbidden: |reads| reads == [0],
        is_relaxed: |_| false,
    },
    Litmus {
        name: "message passing, atomic",
        programs: &[
            &[Write(0, 1), Atomic(1, 1), Await(2)],
            &[Touch(0), Await(1), Read(0), Write(2, 1)],
        ],
        is_forbidden: |reads| reads == [0],
        is_relaxed: |_| false,
    },
    Litmus {
        name: "store buffering",
        programs: &[&[Write(0, 1), Read(1)], &[Write(1, 1), Read(0)]],
        is_forbidden: |_| false,
        is_relaxed: |reads| reads == [0, 0],
    },
    Litmus {
        name: "store buffering, fence",
        programs: &[
            &[Write(0, 1), Fence, Read(1)],
            &[Write(1, 1), Fence, Read(0)],
        ],
        is_forbidden: |reads| reads == [0, 0],
        is_relaxed: |_| false,
    },
    Litmus {
        name: "load buffering",
        programs: &[&[Read(0), Write(1, 1)], &[Read(1), Write(0, 1)]],
        is_forbidden: |reads| reads == [1, 1],
        is_relaxed: |_| false,
    },
    // Both readers have both lines in their caches before they say so by locations 2 and 3, for which the writers wait.
    Litmus {
        name: "independent reads (IRIW)",
        programs: &[
            &[Await(2), Write(0, 1)],
            &[Await(3), Write(1, 1)],
            &[Touch(0), Touch(1), Write(2, 1), Await(1), Read(0)],
            &[Touch(0), Touch(1), Write(3, 1), Await(0), Read(1)],
        ],
        is_forbidden: |reads| reads == [0, 0],
        is_relaxed: |_| false,
    },
    Litmus {
        name: "one location",
        programs: &[
            &[Write(0, 1)],
            &[Write(0, 2)],
            &[Read(0), Read(0)],
            &[Read(0), Read(0)],
        ],
        is_forbidden: goes_back,
        is_relaxed: |_| false,
    },
];

/// Lines for the locations of an instance. With four ranks, rank 0 is the home of all first locations.
const LOCATIONS: u64 = 4;

/// Lines that a batch needs.
pub fn lines(batch: u64) -> u64 {
    LOCATIONS * batch
}

/// What came out of a test, on every rank.
pub struct Outcomes {
    pub name: &'static str,
    pub counts: BTreeMap<Vec<u8>, u64>,
    pub relaxed: u64,
    pub forbidden: u64,
}

impl Outcomes {
    pub fn json(&self) -> Value {
        let text = |reads: &[u8]| reads.iter().map(u8::to_string).collect::<String>();
        let counts: BTreeMap<String, u64> = self
            .counts
            .iter()
            .map(|(reads, count)| (text(reads), *count))
            .collect();
        json!({ "name": self.name, "counts": counts, "relaxed": self.relaxed, "forbidden": self.forbidden })
    }
}

/// Batches since the memory was made: the values of each begin behind those of the one before.
pub struct Batches {
    done: u64,
    batch: u64,
    random: Random,
}

/// Rounds whose results are gathered at once: a value of the store has at most 64 KiB.
const GATHERED: usize = 32 << 10;

/// Values that a batch may write.
const VALUES: u64 = 4;

impl Batches {
    pub fn new(batch: u64, seed: u64, rank: u32) -> Batches {
        Batches {
            done: 0,
            batch,
            random: Random::new(seed ^ u64::from(rank) << 32),
        }
    }

    /// Runs a test for at least so many rounds. `None` if there are too few ranks for it.
    pub fn run(&mut self, node: &mut Node, test: &Litmus, rounds: u64) -> Result<Option<Outcomes>> {
        if node.size() < test.programs.len() as u32 {
            return Ok(None);
        }
        let batches = rounds.div_ceil(self.batch);
        let steps = test.programs.iter().copied().flatten();
        let last = steps.filter_map(|step| step.location()).max();
        let locations = last.map_or(0, |last| last + 1);
        // Of each round what the reads of this rank returned, or nothing.
        let mut own = Vec::new();
        for _ in 0..batches {
            self.done += 1;
            self.prelude(node, locations)?;
            node.barrier()?;
            // Each batch has another rank for each role.
            let role = (u64::from(node.rank()) + self.done) % u64::from(node.size());
            let program = test
                .programs
                .get(role as usize)
                .copied()
                .unwrap_or_default();
            for instance in 0..self.batch {
                own.push(self.instance(node, program, instance)?);
            }
            node.fence()?;
            node.barrier()?;
            self.level(node)?;
            node.barrier()?;
        }
        self.outcomes(node, test, &own, batches).map(Some)
    }

    fn address(&self, instance: u64, location: usize) -> u64 {
        (instance * LOCATIONS + location as u64) * LINE_BYTES
    }

    /// Brings some lines into caches, and some to an owner: where a line is decides how long an access takes.
    fn prelude(&mut self, node: &mut Node, locations: usize) -> Result<()> {
        for instance in 0..self.batch {
            for location in 0..locations {
                let address = self.address(instance, location);
                match self.random.below(8) {
                    0..4 => node.read(address, &mut [0; 8])?,
                    // Bytes that no test looks at.
                    4 => node.write(address + 8, &[1])?,
                    _ => {}
                }
            }
        }
        node.fence()
    }

    /// Returns what the reads returned, two bits each, the first one lowest.
    fn instance(&mut self, node: &mut Node, program: &[Step], instance: u64) -> Result<u8> {
        let mut result = 0;
        let mut reads = 0;
        for step in program {
            // The ranks are more than the cores: so that others get on between two steps, and not only between two batches.
            match self.random.below(16) {
                0 => std::thread::sleep(Duration::from_micros(self.random.below(100))),
                1..4 => std::thread::yield_now(),
                _ => {}
            }
            match *step {
                Write(location, value) => {
                    let value = self.done * VALUES + u64::from(value);
                    node.write(self.address(instance, location), &value.to_le_bytes())?;
                }
                Atomic(location, value) => {
                    let value = self.done * VALUES + u64::from(value);
                    node.atomic(self.address(instance, location), move |_| value)?;
                }
                Read(location) => {
                    result |= self.look(node, instance, location)? << (2 * reads);
                    reads += 1;
                }
                Touch(location) => drop(self.look(node, instance, location)?),
                Await(location) => {
                    let started = Instant::now();
                    while self.look(node, instance, location)? == 0 {
                        std::thread::yield_now();
                        ensure!(
                            started.elapsed() < DEADLINE,
                            "batch {}, instance {instance}: location {location} stays as it was",
                            self.done
                        );
                    }
                }
                Fence => node.fence()?,
            }
        }
        Ok(result)
    }

    /// The value of a location, 0 if it is that of before.
    fn look(&self, node: &mut Node, instance: u64, location: usize) -> Result<u8> {
        let mut bytes = [0; 8];
        node.read(self.address(instance, location), &mut bytes)?;
        let value = u64::from_le_bytes(bytes);
        let (batch, value) = (value / VALUES, value % VALUES);
        let is_last = batch + 1 == self.done && value == 0;
        ensure!(
            batch == self.done || is_last,
            "batch {}, instance {instance}: value {value} of batch {batch}",
            self.done
        );
        Ok(if is_last { 0 } else { value as u8 })
    }

    /// Ends the batch: all locations have its number, whatever the test has written. Rank 0 alone would be the owner of all.
    fn level(&mut self, node: &mut Node) -> Result<()> {
        let value = self.done * VALUES;
        let (rank, size) = (u64::from(node.rank()), u64::from(node.size()));
        for instance in (0..self.batch).filter(|instance| instance % size == rank) {
            for location in 0..LOCATIONS as usize {
                node.write(self.address(instance, location), &value.to_le_bytes())?;
            }
        }
        node.fence()
    }

    /// Puts together what all ranks have read.
    fn outcomes(
        &self,
        node: &mut Node,
        test: &Litmus,
        own: &[u8],
        batches: u64,
    ) -> Result<Outcomes> {
        let mut all = vec![Vec::new(); node.size() as usize];
        for part in own.chunks(GATHERED) {
            let parts = node.group.store().gather(part, DEADLINE)?;
            for (all, part) in all.iter_mut().zip(parts) {
                all.extend(part);
            }
        }
        let mut outcomes = Outcomes {
            name: test.name,
            counts: BTreeMap::new(),
            relaxed: 0,
            forbidden: 0,
        };
        let first = self.done + 1 - batches;
        for (round, at) in (0..own.len()).zip(0_u64..) {
            let shift = first + at / self.batch;
            let mut reads = Vec::new();
            for (role, program) in test.programs.iter().enumerate() {
                let size = u64::from(node.size());
                let rank = (role as u64 + size - shift % size) % size;
                let result = all[rank as usize][round];
                let count = program
                    .iter()
                    .filter(|step| matches!(step, Read(_)))
                    .count();
                reads.extend((0..count).map(|at| result >> (2 * at) & 3));
            }
            outcomes.relaxed += u64::from((test.is_relaxed)(&reads));
            outcomes.forbidden += u64::from((test.is_forbidden)(&reads));
            *outcomes.counts.entry(reads).or_default() += 1;
        }
        Ok(outcomes)
    }
}
