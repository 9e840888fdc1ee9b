//! One rank of the memory: the lines that it is home of with their directory, its cache, and the protocol that keeps caches coherent.
//!
//! A line is unshared, shared or dirty. Its home has the data of an unshared and of a shared line; the owner has those of a dirty one. A rank has one thread: it handles the messages of
//! its peers whenever it waits, and once in a while when it does not.

mod cache;
mod directory;
mod message;
mod transport;

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use doorbell::{Access, EndpointConfig, Group, Region, RemoteRegion, Work};

use cache::{Cached, Held};
use directory::{Entry, Request, State};
use message::{Kind, MESSAGE_BYTES, Message};
use transport::{DIRECT, Link, MESSAGE, RECEIVES};

pub const LINE_BYTES: u64 = 512;
pub const DEADLINE: Duration = Duration::from_secs(30);

/// Lines whose writes wait for ownership, at most.
const PENDING: usize = 16;
/// Accesses between two looks for messages.
const ACCESSES_PER_LOOK: u32 = 16;

#[derive(PartialEq, PartialOrd)]
enum Right {
    Nothing,
    Read,
    Write,
}

/// A change of the 512 bytes of a line.
pub type Edit = Box<dyn FnOnce(&mut [u8])>;

/// What is done with a line once this rank has it.
enum Operation {
    Read(usize, usize),
    Write(usize, Vec<u8>),
    Edit(Edit),
    Atomic(usize, Box<dyn FnOnce(u64) -> u64>),
}

struct Pending {
    line: u64,
    write: bool,
    operations: Vec<Operation>,
}

/// What was posted, and how accesses ended.
#[derive(Clone, Copy, Default)]
pub struct Counts {
    pub hits: u64,
    pub misses: u64,
    pub reads: u64,
    pub writes: u64,
    pub atomics: u64,
    pub messages: u64,
}

impl Counts {
    pub fn since(&self, before: &Counts) -> [u64; 6] {
        [
            self.hits - before.hits,
            self.misses - before.misses,
            self.reads - before.reads,
            self.writes - before.writes,
            self.atomics - before.atomics,
            self.messages - before.messages,
        ]
    }
}

pub struct Node {
    pub group: Group,
    pub counts: Counts,
    /// One for each rank. That to this rank itself makes its atomics those of the device, as are those of others.
    links: Vec<Link>,
    /// The lines of this home, the slots of the cache, the receives of each peer, and the result of a direct access.
    region: Region,
    remotes: Vec<RemoteRegion>,
    cache_at: u64,
    receives_at: u64,
    direct_at: u64,
    directory: Vec<Entry>,
    cache: HashMap<u64, Cached>,
    /// The line in each slot.
    slots: Vec<Option<u64>>,
    free: Vec<usize>,
    /// Writes under way whose source is the slot.
    leaving: Vec<u32>,
    hand: usize,
    pending: Vec<Pending>,
    result: Option<Vec<u8>>,
    direct_done: bool,
    accesses: u32,
    barriers: u64,
    /// Messages that are not handled yet, with their senders.
    received: VecDeque<(u32, Message)>,
    /// Of each stage, the last barrier of which the message has come.
    arrived: [u64; 8],
}

impl Node {
    /// A memory with so many lines at each rank. Every rank calls this with the same numbers.
    pub fn new(group: Group, lines: u64, slots: usize) -> Result<Node> {
        let size = group.size();
        ensure!(
            (2..=64).contains(&size),
            "the memory has 2 to 64 ranks, not {size}"
        );
        ensure!(
            slots >= 2 * PENDING,
            "a cache has at least {} lines",
            2 * PENDING
        );
        let cache_at = lines * LINE_BYTES;
        let receives_at = cache_at + slots as u64 * LINE_BYTES;
        let direct_at = receives_at + u64::from(size) * RECEIVES * MESSAGE_BYTES;
        let region = Region::alloc(group.domain(), direct_at + LINE_BYTES, Access::ALL)?;
        let with: Vec<_> = (0..size).map(|peer| (peer, 0)).collect();
        let endpoints = group.endpoints(&with, &EndpointConfig::default())?;
        let mut links = Vec::new();
        for (peer, mut endpoint) in (0..size).zip(endpoints) {
            for number in 0..RECEIVES {
                let at = receives_at + (u64::from(peer) * RECEIVES + number) * MESSAGE_BYTES;
                endpoint.post_recv(number, &[region.slice(at, MESSAGE_BYTES)?])?;
            }
            links.push(Link {
                endpoint,
                unsignaled: 0,
                signals: 0,
            });
        }
        let mut remotes = Vec::new();
        for bytes in group
            .store()
            .gather(&region.remote().to_bytes(), DEADLINE)?
        {
            remotes.push(RemoteRegion::from_bytes(bytes[..].try_into()?));
        }
        let entry = || Entry {
            state: State::Unshared,
            transaction: None,
            requests: VecDeque::new(),
        };
        Ok(Node {
            group,
            counts: Counts::default(),
            links,
            region,
            remotes,
            cache_at,
            receives_at,
            direct_at,
            directory: (0..lines).map(|_| entry()).collect(),
            cache: HashMap::new(),
            slots: vec![None; slots],
            free: (0..slots).collect(),
            leaving: vec![0; slots],
            hand: 0,
            pending: Vec::new(),
            result: None,
            direct_done: false,
            accesses: 0,
            barriers: 0,
            received: VecDeque::new(),
            arrived: [0; 8],
        })
    }

    pub fn rank(&self) -> u32 {
        self.group.rank()
    }

    pub fn size(&self) -> u32 {
        self.group.size()
    }

    // The calls of the application.

    /// Reads bytes of one line. Waits until they are here; sees the writes of this rank before it.
    pub fn read(&mut self, address: u64, bytes: &mut [u8]) -> Result<()> {
        let offset = within_line(address, bytes.len())?;
        self.access(
            address / LINE_BYTES,
            false,
            Operation::Read(offset, bytes.len()),
        )?;
        self.wait("a read", |node| node.result.is_some())?;
        let result = self.result.take().context("the result of a read")?;
        bytes.copy_from_slice(&result);
        Ok(())
    }

    /// Writes bytes of one line. Does not wait: the write takes effect when this rank owns the line, and may be behind later reads and writes of other lines until then.
    pub fn write(&mut self, address: u64, bytes: &[u8]) -> Result<()> {
        let offset = within_line(address, bytes.len())?;
        self.access(
            address / LINE_BYTES,
            true,
            Operation::Write(offset, bytes.to_vec()),
        )
    }

    /// As [`Node::write`], of bytes that depend on those of the line.
    pub fn edit(&mut self, line: u64, edit: Edit) -> Result<()> {
        self.access(line, true, Operation::Edit(edit))
    }

    /// Changes eight bytes in one step, behind a fence. Returns the old value.
    pub fn atomic(
        &mut self,
        address: u64,
        change: impl FnOnce(u64) -> u64 + 'static,
    ) -> Result<u64> {
        let offset = within_line(address, 8)?;
        self.fence()?;
        let operation = Operation::Atomic(offset, Box::new(change));
        self.access(address / LINE_BYTES, true, operation)?;
        self.wait("an atomic", |node| node.result.is_some())?;
        let old = self.result.take().context("the result of an atomic")?;
        Ok(u64::from_le_bytes(old[..].try_into()?))
    }

    /// Gives a line back to its home if this rank has changed it, as the cache does when it needs the slot. Behind a fence.
    pub fn write_back(&mut self, line: u64) -> Result<()> {
        self.fence()?;
        let cached = self.cache.get(&line);
        if cached.is_some_and(|cached| cached.held == Held::Dirty) {
            self.evict(line)?;
        }
        Ok(())
    }

    /// Waits until all writes of this rank have taken effect: every later read of any rank sees them.
    pub fn fence(&mut self) -> Result<()> {
        self.wait("a fence", |node| node.pending.is_empty())
    }

    /// Waits until all ranks are here. Handles their messages meanwhile, which the group's barrier would not.
    pub fn barrier(&mut self) -> Result<()> {
        self.barriers += 1;
        let number = self.barriers;
        for stage in 0.. {
            let distance = 1 << stage;
            if distance >= self.size() {
                break;
            }
            let peer = (self.rank() + distance) % self.size();
            let message = Message {
                place: stage,
                ..Message::of(Kind::Barrier, number)
            };
            self.send(peer, message)?;
            // One-sided accesses of the others bring no message here, however long they go on. Each of their waits has a limit.
            self.wait_at_most(Duration::MAX, "a barrier", |node| {
                node.arrived[stage as usize] >= number
            })?;
        }
        Ok(())
    }

    // One-sided accesses without a cache: to other lines than those of the calls above.

    /// Reads from the home.
    pub fn read_direct(&mut self, address: u64, bytes: &mut [u8]) -> Result<()> {
        let offset = within_line(address, bytes.len())? as u64;
        let line = address / LINE_BYTES;
        let (home, at) = (self.home(line), self.home_place(line) + offset);
        if home == self.rank() {
            return Ok(self.region.read(at, bytes)?);
        }
        let region = self.region.clone();
        let slices = [region.slice(self.direct_at, bytes.len() as u64)?];
        let remote = self.remotes[home as usize].slice(at, bytes.len() as u64)?;
        self.counts.reads += 1;
        self.direct(home, &Work::read(&slices, remote))?;
        Ok(region.read(self.direct_at, bytes)?)
    }

    /// Writes to the home, and then eight bytes elsewhere in the line, which no rank sees before the others.
    pub fn write_direct(&mut self, address: u64, bytes: &[u8], then: (u64, u64)) -> Result<()> {
        let offset = within_line(address, bytes.len())? as u64;
        let line = address / LINE_BYTES;
        let (home, at) = (self.home(line), self.home_place(line));
        let then_at = at + within_line(then.0, 8)? as u64;
        if home == self.rank() {
            self.region.write(at + offset, bytes)?;
            return Ok(self.region.store_u64(then_at, then.1)?);
        }
        let region = self.region.clone();
        region.write(self.direct_at, bytes)?;
        let slices = [region.slice(self.direct_at, bytes.len() as u64)?];
        let remote = self.remotes[home as usize];
        let work = Work::write(&slices, remote.slice(at + offset, bytes.len() as u64)?);
        self.counts.writes += 2;
        self.post(home, &work, false, MESSAGE)?;
        let value = then.1.to_le_bytes();
        let last = Work::write_inline(&value, remote.slice(then_at, 8)?).ordered(true);
        self.direct(home, &last)
    }

    /// Replaces eight bytes at the home if they are `compare`. Returns the old ones.
    pub fn compare_swap_direct(&mut self, address: u64, compare: u64, swap: u64) -> Result<u64> {
        let offset = within_line(address, 8)? as u64;
        let line = address / LINE_BYTES;
        let (home, at) = (self.home(line), self.home_place(line) + offset);
        let region = self.region.clone();
        let slices = [region.slice(self.direct_at, 8)?];
        let remote = self.remotes[home as usize].slice(at, 8)?;
        self.counts.atomics += 1;
        self.direct(home, &Work::compare_swap(&slices, remote, compare, swap))?;
        Ok(region.load_u64(self.direct_at)?)
    }

    /// Sleeps, and then handles what has come meanwhile.
    pub fn pause(&mut self, time: Duration) -> Result<()> {
        std::thread::sleep(time);
        self.group.check()?;
        self.serve().map(drop)
    }

    fn direct(&mut self, home: u32, work: &Work<'_>) -> Result<()> {
        self.direct_done = false;
        self.post(home, work, true, DIRECT)?;
        self.wait("a direct access", |node| node.direct_done)
    }

    // Accesses.

    /// What this rank may do with the line now.
    fn right(&mut self, line: u64) -> Result<Right> {
        if self.home(line) == self.rank() {
            let entry = self.entry(line)?;
            return Ok(match entry.state {
                _ if entry.transaction.is_some() => Right::Nothing,
                State::Unshared => Right::Write,
                State::Shared(_) => Right::Read,
                State::Dirty(_) => Right::Nothing,
            });
        }
        let Some(cached) = self.cache.get_mut(&line) else {
            return Ok(Right::Nothing);
        };
        cached.used = true;
        Ok(match cached.held {
            Held::Dirty => Right::Write,
            Held::Shared => Right::Read,
            Held::Nothing | Held::Evicting => Right::Nothing,
        })
    }

    /// Does the operation now if this rank has the right, or asks for it. Reads wait behind this call, so what is pending are writes.
    fn access(&mut self, line: u64, write: bool, operation: Operation) -> Result<()> {
        self.accesses += 1;
        if self.accesses.is_multiple_of(ACCESSES_PER_LOOK) {
            self.serve()?;
        }
        if write {
            self.wait("room for a write", |node| node.pending.len() < PENDING)?;
        }
        if let Some(pending) = self.pending.iter_mut().find(|pending| pending.line == line) {
            // Behind this rank's own writes of the line.
            self.counts.misses += 1;
            pending.operations.push(operation);
            return Ok(());
        }
        let needed = if write { Right::Write } else { Right::Read };
        if self.right(line)? >= needed {
            self.counts.hits += 1;
            let place = self.place(line)?;
            return self.execute(place, operation);
        }
        self.counts.misses += 1;
        let home = self.home(line);
        if home != self.rank() && !self.cache.contains_key(&line) {
            let slot = self.take_slot()?;
            self.slots[slot] = Some(line);
            self.cache.insert(
                line,
                Cached {
                    slot,
                    held: Held::Nothing,
                    used: true,
                    forward: None,
                },
            );
        }
        self.pending.push(Pending {
            line,
            write,
            operations: vec![operation],
        });
        let place = self.place(line)?;
        let had_line = self
            .cache
            .get(&line)
            .is_some_and(|cached| cached.held == Held::Shared);
        if home == self.rank() {
            let request = Request {
                from: home,
                write,
                had_line: true,
                place,
            };
            return self.enter(line, request);
        }
        let kind = match (write, had_line) {
            (false, _) => Kind::Read,
            (true, false) => Kind::Write,
            (true, true) => Kind::Upgrade,
        };
        self.send(
            home,
            Message {
                place,
                ..Message::of(kind, line)
            },
        )
    }

    fn execute(&mut self, place: u64, operation: Operation) -> Result<()> {
        match operation {
            Operation::Read(offset, len) => {
                let mut bytes = vec![0; len];
                self.region.read(place + offset as u64, &mut bytes)?;
                self.result = Some(bytes);
            }
            Operation::Write(offset, bytes) => self.region.write(place + offset as u64, &bytes)?,
            Operation::Edit(edit) => {
                let mut bytes = [0; LINE_BYTES as usize];
                self.region.read(place, &mut bytes)?;
                edit(&mut bytes);
                self.region.write(place, &bytes)?;
            }
            Operation::Atomic(offset, change) => {
                let mut word = [0; 8];
                self.region.read(place + offset as u64, &mut word)?;
                let new = change(u64::from_le_bytes(word));
                self.region
                    .write(place + offset as u64, &new.to_le_bytes())?;
                self.result = Some(word.to_vec());
            }
        }
        Ok(())
    }
}

/// The offset in its line of an access that must not leave it.
fn within_line(address: u64, len: usize) -> Result<usize> {
    let offset = (address % LINE_BYTES) as usize;
    ensure!(
        offset + len <= LINE_BYTES as usize,
        "{len} bytes from {address} on are in more than one line"
    );
    Ok(offset)
}
