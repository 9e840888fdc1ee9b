//! The memory of a plan: each step has its own range in every region, and its own bytes to transfer.
#![allow(unsafe_code)] // maps memory, and registers it

use std::fs::File;
use std::io::Result;
use std::ops::{Deref, Range};
use std::os::fd::{AsRawFd, FromRawFd};
use std::ptr::NonNull;

use doorbell::{Access, ProtectionDomain, Region, RemoteRegion};

use crate::plan::{BANKS, GATES, PLACE, STEPS_MAX, recorded};
use crate::rig::Random;

/// Adds that a counter has room for: two bits each, so that an add that is executed twice differs from the next add.
const ADDS_PER_COUNTER: usize = 31;

pub struct Memory {
    seed: u64,
    /// By number: the bytes that a step transfers, in full length.
    stamps: Vec<Vec<u8>>,
    pub sources: Vec<Bank>,
    pub targets: Vec<Bank>,
    pub counters: Bank,
    /// A word of each step that swaps, 0 at first.
    pub swaps: Bank,
    /// A word of each operation of a graph, to which its launches add.
    pub launches: Bank,
    /// Words that streams wait for, and behind them one that each step may write.
    pub words: Region,
    /// The receives of an endpoint in another process.
    pub inbox: Option<Bank>,
    /// Last: it is unmapped after the regions above are gone.
    shared: Option<Shared>,
}

/// Memory that each device of a plan has registered.
pub struct Bank(Vec<Region>);

impl Bank {
    /// The registration on the device of an endpoint.
    pub fn of(&self, end: usize) -> &Region {
        &self.0[end % self.0.len()]
    }

    /// Whether it was registered.
    pub fn deregister(&self) -> bool {
        let ended = self.0.iter().map(|region| region.deregister().unwrap());
        let was: Vec<_> = ended.collect();
        was.contains(&true)
    }
}

impl Deref for Bank {
    type Target = Region;

    fn deref(&self) -> &Region {
        &self.0[0]
    }
}

/// Memory of the test itself, which several devices and another process can register.
pub struct Shared {
    file: File,
    start: NonNull<u8>,
}

// SAFETY: the mapping stays where it is until it is dropped; its bytes are used by registered regions alone.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

impl Shared {
    const LEN: usize = (2 * BANKS + 4) * Shared::BANK;
    /// Each bank begins a page.
    const BANK: usize = PLACE as usize * STEPS_MAX;

    pub fn new() -> Result<Shared> {
        // SAFETY: a valid name.
        let fd = unsafe { libc::memfd_create(c"doorbell-truth".as_ptr(), libc::MFD_CLOEXEC) };
        if fd < 0 {
            return Err(std::io::Error::last_os_error());
        }
        // SAFETY: it was opened above, for this file alone.
        let file = unsafe { File::from_raw_fd(fd) };
        file.set_len(Shared::LEN as u64)?;
        Shared::map(file)
    }

    /// That of another process.
    pub fn open(path: &str) -> Result<Shared> {
        Shared::map(File::options().read(true).write(true).open(path)?)
    }

    /// What [`Shared::open`] takes in another process.
    pub fn path(&self) -> String {
        format!("/proc/{}/fd/{}", std::process::id(), self.file.as_raw_fd())
    }

    fn map(file: File) -> Result<Shared> {
        let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED);
        // SAFETY: a new mapping at an address that the kernel chooses.
        let start = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                Shared::LEN,
                protection,
                flags,
                file.as_raw_fd(),
                0,
            )
        };
        if start == libc::MAP_FAILED {
            return Err(std::io::Error::last_os_error());
        }
        let start = NonNull::new(start.cast()).unwrap();
        Ok(Shared { file, start })
    }

    fn bank(&self, number: usize) -> NonNull<u8> {
        assert!((number + 1) * Shared::BANK <= Shared::LEN);
        // SAFETY: within the mapping, as asserted.
        unsafe { self.start.add(number * Shared::BANK) }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // SAFETY: mapped in `map`; `Memory` has deregistered its regions, so that no device accesses it.
        unsafe { libc::munmap(self.start.as_ptr().cast(), Shared::LEN) };
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if self.shared.is_some() {
            self.banks().for_each(|bank| {
                bank.deregister();
            });
        }
    }
}

/// How much of a step's bytes its range holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Found {
    Nothing,
    Part,
    All,
}

impl Memory {
    /// `shared`: for several devices or processes; otherwise the memory is the library's.
    pub fn new(
        domains: &[ProtectionDomain],
        seed: u64,
        numbers: impl Iterator<Item = usize>,
        shared: Option<Shared>,
    ) -> Memory {
        let mut banks = 0;
        let mut bank = |len_bytes| {
            banks += 1;
            let Some(shared) = &shared else {
                return Bank(vec![
                    Region::alloc(&domains[0], len_bytes, Access::ALL).unwrap(),
                ]);
            };
            let start = shared.bank(banks - 1);
            let register = |domain| {
                // SAFETY: it stays mapped until `Memory`, which deregisters it, is dropped, and that is after all endpoints of the plan.
                unsafe { Region::register(domain, start, len_bytes, Access::ALL) }.unwrap()
            };
            Bank(domains.iter().map(register).collect())
        };
        const LEN_BYTES: u64 = PLACE * STEPS_MAX as u64;
        let stamps = (0..STEPS_MAX).map(|number| stamp(seed, number)).collect();
        let memory = Memory {
            seed,
            stamps,
            sources: (0..BANKS).map(|_| bank(LEN_BYTES)).collect(),
            targets: (0..BANKS).map(|_| bank(LEN_BYTES)).collect(),
            counters: bank(8 * STEPS_MAX.div_ceil(ADDS_PER_COUNTER) as u64),
            swaps: bank(8 * STEPS_MAX as u64),
            launches: bank(8 * recorded(STEPS_MAX, 0) as u64),
            inbox: shared.is_some().then(|| bank(LEN_BYTES)),
            words: Region::alloc(&domains[0], 4 * (GATES + STEPS_MAX) as u64, Access::ALL).unwrap(),
            shared,
        };
        for number in numbers {
            for source in &memory.sources {
                source
                    .write(place(number), memory.stamp(number, PLACE))
                    .unwrap();
            }
        }
        memory
    }

    fn banks(&self) -> impl Iterator<Item = &Bank> {
        let words = [&self.counters, &self.swaps, &self.launches];
        let banks = self.sources.iter().chain(&self.targets);
        banks.chain(words).chain(&self.inbox)
    }

    /// The file of memory that another process can map.
    pub fn path(&self) -> Option<String> {
        self.shared.as_ref().map(Shared::path)
    }

    /// All banks, as another process accesses them.
    pub fn remote(&self) -> Vec<RemoteRegion> {
        self.banks().map(|bank| bank.remote()).collect()
    }

    /// Where a bank is among those of [`Memory::remote`].
    pub fn number(&self, bank: &Bank) -> usize {
        let is_it = |other: &Bank| std::ptr::eq(other, bank);
        self.banks().position(is_it).unwrap()
    }

    /// The bytes that a step transfers, which no other step has.
    pub fn stamp(&self, number: usize, len_bytes: u64) -> &[u8] {
        &self.stamps[number][..len_bytes as usize]
    }

    /// The bytes of a step's place.
    pub fn read(region: &Region, number: usize) -> Vec<u8> {
        let mut bytes = vec![0; PLACE as usize];
        region.read(place(number), &mut bytes).unwrap();
        bytes
    }

    /// How much of the bytes of the step `number` its range holds, and whether it holds anything else.
    pub fn find(&self, bytes: &[u8], number: usize, len_bytes: u64) -> (Found, bool) {
        let (own, rest) = bytes.split_at(len_bytes as usize);
        let stamp = self.stamp(number, len_bytes);
        let is_spilled = !is_zero(rest);
        if own == stamp {
            return (Found::All, is_spilled);
        }
        if is_zero(own) {
            return (Found::Nothing, is_spilled);
        }
        let mut pairs = own.iter().zip(stamp);
        let is_foreign = pairs.any(|(byte, stamp)| *byte != 0 && byte != stamp);
        (Found::Part, is_spilled || is_foreign)
    }

    /// The step whose bytes begin here.
    pub fn sender(&self, bytes: &[u8]) -> Option<usize> {
        let first = u64::from_le_bytes(bytes[..8].try_into().unwrap());
        let number = (first & 0xffff) as usize;
        (first >> 16 == self.seed << 16 >> 16 && (1..=STEPS_MAX).contains(&number))
            .then(|| number - 1)
    }

    /// The counter of a step that adds, as an offset, and what it adds.
    pub fn counter(number: usize) -> (u64, u64) {
        (
            (number / ADDS_PER_COUNTER) as u64 * 8,
            1 << (number % ADDS_PER_COUNTER * 2),
        )
    }

    /// The result of an atomic, in the step's range.
    pub fn result(&self, number: usize, bank: usize) -> u64 {
        let mut bytes = [0; 8];
        self.targets[bank].read(place(number), &mut bytes).unwrap();
        u64::from_le_bytes(bytes)
    }

    /// Whether the word of a step that swaps holds what it puts there.
    pub fn is_swapped(&self, number: usize) -> bool {
        let mut bytes = [0; 8];
        self.swaps.read(swapped(number), &mut bytes).unwrap();
        u64::from_le_bytes(bytes) == number as u64 + 1
    }

    /// The sum of what the launches of an operation of a graph have added.
    pub fn launched(&self, recorded: usize) -> u64 {
        let mut bytes = [0; 8];
        let offset = 8 * recorded as u64;
        self.launches.read(offset, &mut bytes).unwrap();
        u64::from_le_bytes(bytes)
    }

    /// Whether a target holds what an operation of a step's graph writes.
    pub fn has_graph_bytes(&self, step: usize, at: usize) -> bool {
        let range = graph_bytes(at);
        let (from, to) = (range.start as usize, range.end as usize);
        let bytes = Memory::read(&self.targets[0], step);
        bytes[from..to] == self.stamp(step, PLACE)[from..to]
    }

    /// How often a step has added to its counter: 3 is three times or more.
    pub fn added(&self, number: usize) -> u64 {
        let (offset, one) = Memory::counter(number);
        let mut bytes = [0; 8];
        self.counters.read(offset, &mut bytes).unwrap();
        (u64::from_le_bytes(bytes) / one) & 3
    }
}

fn stamp(seed: u64, number: usize) -> Vec<u8> {
    let mut random = Random(seed ^ (number as u64) << 48);
    // The number can be read from the first word.
    let first = (seed << 16) | (number as u64 + 1);
    let mut bytes = Vec::from(first.to_le_bytes());
    while (bytes.len() as u64) < PLACE {
        bytes.extend_from_slice(&(random.next() | 1).to_le_bytes());
    }
    bytes
}

/// Compares memory: these tests run without optimisation.
pub fn is_zero(bytes: &[u8]) -> bool {
    bytes == &[0; PLACE as usize][..bytes.len()]
}

/// The part of a step's place that an operation of its graph writes.
pub fn graph_bytes(at: usize) -> Range<u64> {
    let start = 64 * (at as u64 + 1);
    start..start + 64
}

/// The word of a step that swaps, as an offset.
pub fn swapped(number: usize) -> u64 {
    8 * number as u64
}

/// Where the place of a step begins, in each of the sources and targets.
pub fn place(number: usize) -> u64 {
    number as u64 * PLACE
}

/// The word that a step may write.
pub fn word(number: usize) -> u64 {
    4 * (GATES + number) as u64
}
