//! One rank of the memory: the lines that it is home of with their directory, its cache, and the protocol that keeps caches coherent.
//!
//! A line is unshared, shared or dirty. Its home has the data of an unshared and of a shared line; the owner has those of a dirty one. A rank has one thread: it handles the messages of
//! its peers whenever it waits, and once in a while when it does not.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use doorbell::{Access, Endpoint, EndpointConfig, Group, QueueKind, Region, RemoteRegion, Work};

pub const LINE_BYTES: u64 = 512;
pub const DEADLINE: Duration = Duration::from_secs(30);

const MESSAGE_BYTES: u64 = 32;
/// Receives that are posted for each peer: the depth of an endpoint of a group.
const RECEIVES: u64 = 128;
/// One of so many posts without a completion of its own is signaled.
const POSTS_PER_SIGNAL: u32 = 8;
/// Signaled posts under way, at most: with the others they fit into the send queue.
const SIGNALS: u32 = 12;
/// Lines whose writes wait for ownership, at most.
const PENDING: usize = 16;
/// Accesses between two looks for messages.
const ACCESSES_PER_LOOK: u32 = 16;

/// `wr_id` of messages; that of a line that leaves its slot is one more than the slot's number.
const MESSAGE: u64 = 0;
const DIRECT: u64 = u64::MAX;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u64)]
enum Kind {
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
struct Message {
    kind: Kind,
    line: u64,
    requester: u32,
    place: u64,
}

impl Message {
    fn of(kind: Kind, line: u64) -> Message {
        let (requester, place) = (0, 0);
        Message {
            kind,
            line,
            requester,
            place,
        }
    }

    fn to_bytes(self) -> [u8; MESSAGE_BYTES as usize] {
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

    fn from_bytes(bytes: &[u8; MESSAGE_BYTES as usize]) -> Result<Message> {
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

/// What a rank wants of a line.
#[derive(Clone, Copy)]
struct Request {
    from: u32,
    write: bool,
    /// It had the line when it asked.
    had_line: bool,
    /// Where its region takes the line.
    place: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    Unshared,
    /// The bits of the ranks that may have it, besides the home.
    Shared(u64),
    Dirty(u32),
}

/// A request that the home cannot answer by itself.
struct Transaction {
    request: Request,
    /// Answers that are to come.
    left: u32,
    owner: Option<u32>,
    needs_data: bool,
    /// The requester has had the line and written it back.
    evicted: bool,
}

struct Entry {
    state: State,
    /// While it is there, other requests wait.
    transaction: Option<Transaction>,
    requests: VecDeque<Request>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Held {
    Nothing,
    Shared,
    Dirty,
    /// Written back; the home has not answered yet, and may have sent a forward before.
    Evicting,
}

struct Cached {
    slot: usize,
    held: Held,
    used: bool,
}

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

struct Link {
    endpoint: Endpoint,
    unsignaled: u32,
    signals: u32,
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
            self.wait("a barrier", |node| node.arrived[stage as usize] >= number)?;
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

    fn direct(&mut self, home: u32, work: &Work<'_>) -> Result<()> {
        self.direct_done = false;
        self.post(home, work, true, DIRECT)?;
        self.wait("a direct access", |node| node.direct_done)
    }

    // Accesses.

    fn home(&self, line: u64) -> u32 {
        (line % u64::from(self.size())) as u32
    }

    fn entry(&mut self, line: u64) -> Result<&mut Entry> {
        let at = line / u64::from(self.size());
        self.directory
            .get_mut(at as usize)
            .with_context(|| format!("line {line} is behind the end of the memory"))
    }

    /// Where the line is in the region of its home.
    fn home_place(&self, line: u64) -> u64 {
        line / u64::from(self.size()) * LINE_BYTES
    }

    fn slot_place(&self, slot: usize) -> u64 {
        self.cache_at + slot as u64 * LINE_BYTES
    }

    /// Where the line is here.
    fn place(&self, line: u64) -> Result<u64> {
        if self.home(line) == self.rank() {
            return Ok(self.home_place(line));
        }
        let cached = self
            .cache
            .get(&line)
            .with_context(|| format!("line {line} has no slot"))?;
        Ok(self.slot_place(cached.slot))
    }

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

    /// Returns a free slot. If all slots are in use, evicts the line of a slot that was not used since the last pass of the clock hand.
    fn take_slot(&mut self) -> Result<usize> {
        loop {
            if let Some(slot) = self.free.pop() {
                return Ok(slot);
            }
            let mut victim = None;
            for _ in 0..2 * self.slots.len() {
                self.hand = (self.hand + 1) % self.slots.len();
                let Some(line) = self.slots[self.hand] else {
                    continue;
                };
                let is_pending = self.pending.iter().any(|pending| pending.line == line);
                let Some(cached) = self.cache.get_mut(&line) else {
                    continue;
                };
                if !is_pending && !std::mem::take(&mut cached.used) {
                    victim = Some((line, cached.held));
                    break;
                }
            }
            match victim {
                // The home does not learn of it: an invalidation that comes later is answered.
                Some((line, Held::Shared | Held::Nothing)) => self.drop_line(line),
                Some((line, Held::Dirty)) => {
                    self.set_held(line, Held::Evicting)?;
                    let (home, place) = (self.home(line), self.place(line)?);
                    self.write_line(home, place, self.home_place(line), None)?;
                    self.send(home, Message::of(Kind::Evict, line))?;
                    self.wait("a write-back", |node| !node.cache.contains_key(&line))?;
                }
                // All are leaving.
                Some((_, Held::Evicting)) | None => {
                    self.wait("a free slot", |node| !node.free.is_empty())?;
                }
            }
        }
    }

    fn set_held(&mut self, line: u64, held: Held) -> Result<()> {
        let cached = self.cache.get_mut(&line);
        cached
            .with_context(|| format!("line {line} is not in the cache"))?
            .held = held;
        Ok(())
    }

    fn drop_line(&mut self, line: u64) {
        if let Some(cached) = self.cache.remove(&line) {
            self.slots[cached.slot] = None;
            if self.leaving[cached.slot] == 0 {
                self.free.push(cached.slot);
            }
        }
    }

    // The home.

    fn bit(&self, rank: u32) -> u64 {
        if rank == self.rank() { 0 } else { 1 << rank }
    }

    /// The state in which that rank may write.
    fn owned_by(&self, rank: u32) -> State {
        if rank == self.rank() {
            State::Unshared
        } else {
            State::Dirty(rank)
        }
    }

    fn enter(&mut self, line: u64, request: Request) -> Result<()> {
        self.entry(line)?.requests.push_back(request);
        self.go_on(line)
    }

    fn go_on(&mut self, line: u64) -> Result<()> {
        while self.entry(line)?.transaction.is_none() {
            let Some(request) = self.entry(line)?.requests.pop_front() else {
                break;
            };
            self.begin(line, request)?;
        }
        Ok(())
    }

    fn begin(&mut self, line: u64, request: Request) -> Result<()> {
        let from = request.from;
        let state = self.entry(line)?.state;
        match state {
            State::Dirty(owner) => {
                ensure!(
                    owner != from,
                    "rank {from} asks for line {line}, which it has"
                );
                // The answers of the owner, and of the requester that gets the line from it.
                let left = if from == self.rank() { 1 } else { 2 };
                let owner_of = Some(owner);
                let transaction = Transaction {
                    request,
                    left,
                    owner: owner_of,
                    needs_data: false,
                    evicted: false,
                };
                self.entry(line)?.transaction = Some(transaction);
                let kind = if request.write {
                    Kind::ForwardWrite
                } else {
                    Kind::ForwardRead
                };
                self.send(
                    owner,
                    Message {
                        kind,
                        line,
                        requester: from,
                        place: request.place,
                    },
                )
            }
            State::Shared(sharers) if request.write => {
                let others = sharers & !self.bit(from);
                let needs_data = !(request.had_line && sharers & self.bit(from) == self.bit(from));
                if others == 0 {
                    return self.give(line, request, needs_data);
                }
                let left = others.count_ones();
                self.entry(line)?.transaction = Some(Transaction {
                    request,
                    left,
                    owner: None,
                    needs_data,
                    evicted: false,
                });
                for peer in (0..self.size()).filter(|peer| others >> peer & 1 == 1) {
                    self.send(peer, Message::of(Kind::Invalidate, line))?;
                }
                Ok(())
            }
            State::Shared(_) | State::Unshared => self.give(line, request, true),
        }
    }

    /// Gives the line, of which the home has the data.
    fn give(&mut self, line: u64, request: Request, needs_data: bool) -> Result<()> {
        let from = request.from;
        let before = self.entry(line)?.state;
        let state = match before {
            _ if request.write => self.owned_by(from),
            State::Shared(sharers) => State::Shared(sharers | self.bit(from)),
            _ if from == self.rank() => State::Unshared,
            _ => State::Shared(self.bit(from)),
        };
        self.entry(line)?.state = state;
        if from == self.rank() {
            return self.granted(from, line);
        }
        if needs_data {
            self.write_line(from, self.home_place(line), request.place, None)?;
        }
        self.send(from, Message::of(Kind::Granted, line))
    }

    /// One more answer that the transaction of the line waited for.
    fn answered(&mut self, line: u64) -> Result<()> {
        let entry = self.entry(line)?;
        let transaction = entry
            .transaction
            .as_mut()
            .context("an answer to no question")?;
        transaction.left -= 1;
        if transaction.left > 0 {
            return Ok(());
        }
        let Some(Transaction {
            request,
            owner,
            needs_data,
            evicted,
            ..
        }) = entry.transaction.take()
        else {
            bail!("the transaction of line {line} is gone");
        };
        let from = request.from;
        match owner {
            None => self.give(line, request, needs_data)?,
            Some(owner) => {
                self.entry(line)?.state = match request.write {
                    true if evicted => State::Unshared,
                    true => self.owned_by(from),
                    false => State::Shared(self.bit(owner) | self.bit(from)),
                };
                if from == self.rank() {
                    self.granted(from, line)?;
                }
            }
        }
        self.go_on(line)
    }

    fn evicted(&mut self, line: u64, from: u32) -> Result<()> {
        let entry = self.entry(line)?;
        match &mut entry.transaction {
            // It got the line from the old owner, whose answer has not come yet.
            Some(transaction) if transaction.request.from == from => transaction.evicted = true,
            // The owner gets the forward of the transaction while it keeps the line for this answer.
            Some(_) => {}
            None => {
                ensure!(
                    entry.state == State::Dirty(from),
                    "rank {from} evicts line {line}, which is {:?}",
                    entry.state
                );
                entry.state = State::Unshared;
            }
        }
        self.send(from, Message::of(Kind::Evicted, line))
    }

    // The owner, the sharers and the requester.

    fn forwarded(&mut self, message: Message) -> Result<()> {
        let Message {
            line, requester, ..
        } = message;
        let write = message.kind == Kind::ForwardWrite;
        let home = self.home(line);
        let (place, cached) = (self.place(line)?, &self.cache[&line]);
        let (slot, held) = (cached.slot, cached.held);
        ensure!(
            matches!(held, Held::Dirty | Held::Evicting),
            "a forward of line {line}, which is {held:?} here"
        );
        // The slot is not used again before the device has read it, whether the line leaves now or later.
        self.write_line(requester, place, message.place, Some(slot))?;
        if requester != home {
            self.send(requester, Message::of(Kind::Granted, line))?;
            if !write {
                self.write_line(home, place, self.home_place(line), Some(slot))?;
            }
        }
        self.send(home, Message::of(Kind::Released, line))?;
        match (held, write) {
            (Held::Dirty, true) => self.drop_line(line),
            (Held::Dirty, false) => self.set_held(line, Held::Shared)?,
            _ => {}
        }
        Ok(())
    }

    fn invalidated(&mut self, line: u64, home: u32) -> Result<()> {
        if self
            .cache
            .get(&line)
            .is_some_and(|cached| cached.held == Held::Shared)
        {
            if self.pending.iter().any(|pending| pending.line == line) {
                self.set_held(line, Held::Nothing)?;
            } else {
                self.drop_line(line);
            }
        }
        self.send(home, Message::of(Kind::Invalidated, line))
    }

    /// This rank has the line: does what waits for it before any other rank can get it.
    fn granted(&mut self, from: u32, line: u64) -> Result<()> {
        let at = self.pending.iter().position(|pending| pending.line == line);
        let Pending {
            write, operations, ..
        } = self
            .pending
            .swap_remove(at.context("a line that nobody asked for")?);
        let (home, place) = (self.home(line), self.place(line)?);
        if home != self.rank() {
            self.set_held(line, if write { Held::Dirty } else { Held::Shared })?;
        }
        for operation in operations {
            self.execute(place, operation)?;
        }
        if from != home {
            self.send(home, Message::of(Kind::Done, line))?;
        }
        Ok(())
    }

    fn handle(&mut self, from: u32, message: Message) -> Result<()> {
        let Message {
            kind, line, place, ..
        } = message;
        match kind {
            Kind::Read | Kind::Write | Kind::Upgrade => {
                let (write, had_line) = (kind != Kind::Read, kind == Kind::Upgrade);
                self.enter(
                    line,
                    Request {
                        from,
                        write,
                        had_line,
                        place,
                    },
                )
            }
            Kind::ForwardRead | Kind::ForwardWrite => self.forwarded(message),
            Kind::Invalidate => self.invalidated(line, from),
            Kind::Invalidated | Kind::Released | Kind::Done => self.answered(line),
            Kind::Granted => self.granted(from, line),
            Kind::Evict => self.evicted(line, from),
            Kind::Evicted => {
                self.drop_line(line);
                Ok(())
            }
            Kind::Barrier => {
                self.arrived[place as usize] = line;
                Ok(())
            }
        }
    }

    // Transport.

    /// A send comes behind the writes of its endpoint, so that a grant comes behind its line.
    fn send(&mut self, to: u32, message: Message) -> Result<()> {
        self.counts.messages += 1;
        self.post(to, &Work::send_inline(&message.to_bytes()), false, MESSAGE)
    }

    /// Writes the line at `from` here to `place` at another rank. If it leaves a slot, this is not used again before the write is done.
    fn write_line(&mut self, to: u32, from: u64, place: u64, leaves: Option<usize>) -> Result<()> {
        let region = self.region.clone();
        let slices = [region.slice(from, LINE_BYTES)?];
        let remote = self.remotes[to as usize].slice(place, LINE_BYTES)?;
        self.counts.writes += 1;
        if let Some(slot) = leaves {
            self.leaving[slot] += 1;
        }
        let wr_id = leaves.map_or(MESSAGE, |slot| slot as u64 + 1);
        self.post(to, &Work::write(&slices, remote), leaves.is_some(), wr_id)
    }

    fn post(&mut self, to: u32, work: &Work<'_>, signaled: bool, wr_id: u64) -> Result<()> {
        let started = Instant::now();
        while self.links[to as usize].signals >= SIGNALS {
            self.collect(to)?;
            ensure!(
                started.elapsed() < DEADLINE,
                "rank {to} takes no work for {DEADLINE:?}"
            );
        }
        let link = &mut self.links[to as usize];
        let signaled = signaled || link.unsignaled + 1 >= POSTS_PER_SIGNAL;
        if signaled {
            link.signals += 1;
            link.unsignaled = 0;
        } else {
            link.unsignaled += 1;
        }
        let posted = link
            .endpoint
            .post_send(&work.signaled(signaled).wr_id(wr_id));
        posted.map_err(|error| self.group.cause_of(error))?;
        Ok(())
    }

    /// Takes completions of what was posted to a rank.
    fn collect(&mut self, peer: u32) -> Result<()> {
        let link = &mut self.links[peer as usize];
        while link.signals > 0 {
            let polled = link.endpoint.poll_cq(QueueKind::Send);
            let Some(completion) = polled.map_err(|error| self.group.cause_of(error))? else {
                break;
            };
            link.signals -= 1;
            match completion.wr_id {
                MESSAGE => {}
                DIRECT => self.direct_done = true,
                slot => {
                    let slot = slot as usize - 1;
                    self.leaving[slot] -= 1;
                    if self.leaving[slot] == 0 && self.slots[slot].is_none() {
                        self.free.push(slot);
                    }
                }
            }
        }
        Ok(())
    }

    /// Handles the messages that have come. Returns whether there were any.
    fn serve(&mut self) -> Result<bool> {
        let mut found = false;
        let rank = self.rank();
        for peer in (0..self.size()).filter(|peer| *peer != rank) {
            loop {
                let endpoint = &mut self.links[peer as usize].endpoint;
                let polled = endpoint.poll_cq(QueueKind::Recv);
                let Some(completion) = polled.map_err(|error| self.group.cause_of(error))? else {
                    break;
                };
                let number = u64::from(peer) * RECEIVES + completion.wr_id;
                let at = self.receives_at + number * MESSAGE_BYTES;
                let mut bytes = [0; MESSAGE_BYTES as usize];
                self.region.read(at, &mut bytes)?;
                let slices = [self.region.slice(at, MESSAGE_BYTES)?];
                endpoint.post_recv(completion.wr_id, &slices)?;
                self.handle(peer, Message::from_bytes(&bytes)?)?;
                found = true;
            }
        }
        Ok(found)
    }

    fn wait(&mut self, what: &str, until: impl Fn(&Node) -> bool) -> Result<()> {
        let mut idle = 0_u32;
        let mut started = None;
        while !until(self) {
            for peer in 0..self.size() {
                self.collect(peer)?;
            }
            if self.serve()? {
                idle = 0;
                continue;
            }
            idle += 1;
            if idle > 4 {
                // The ranks are more than the cores.
                std::thread::yield_now();
            }
            if idle.is_multiple_of(256) {
                self.group.check()?;
                let started = started.get_or_insert_with(Instant::now);
                ensure!(
                    started.elapsed() < DEADLINE,
                    "{what} of rank {} took {DEADLINE:?}",
                    self.rank()
                );
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
