//! A keyed rendezvous of tensors, as TensorFlow's Rendezvous with its `gdr` transport: a tensor is sent under a key (producer;consumer;name;step), and goes to whoever asks for that key,
//! before or after. Tensors are in one registered region. The consumer reads a tensor by RDMA READ from where the producer has computed it to where the consumer uses it.
//!
//!     cargo run --release --example rendezvous
//!
//! The workload is that of a parameter server: rank 0 sends weights, the other ranks send gradients. The same training runs once more with each tensor encoded into a message and decoded
//! on the other side, and both are compared. Before that, a few tensors check what a key, an order of calls and an abort mean.

#![allow(unsafe_code)] // tensors are used where they lie

#[path = "support/mod.rs"]
mod support;

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::fmt;
use std::path::PathBuf;
use std::rc::Rc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use clap::Parser;
use doorbell::{
    Access, Endpoint, Error, Group, MessageConfig, MessageQueue, PostedSend, QueueKind, Region,
    RemoteSlice, Work,
};
use support::Recorder;

/// The longest wait for another rank.
const DEADLINE: Duration = Duration::from_secs(30);
/// Longest message without a tensor: it is eager.
const CONTROL_BYTES: u32 = 1024;
const SERVER: u32 = 0;

#[derive(Parser)]
struct Options {
    /// Ranks that the program starts
    #[arg(long, default_value_t = 3)]
    ranks: u32,
    /// Tensors of weights, at most 16
    #[arg(long, default_value_t = 6)]
    tensors: usize,
    /// Elements of the first tensor; each further one has a third less
    #[arg(long, default_value_t = 400_000)]
    elements: usize,
    #[arg(long, default_value_t = 40)]
    steps: u64,
    /// Worker that is killed in the middle of the training
    #[arg(long)]
    kill: Option<u32>,
    /// File for the weights at the end, as 32-bit floats
    #[arg(long)]
    out: Option<PathBuf>,
    /// File for a timeline
    #[arg(long)]
    svg: Option<PathBuf>,
}

impl Options {
    fn lengths(&self) -> Vec<usize> {
        let shorter = |len: &usize| Some((len * 2 / 3).max(1));
        std::iter::successors(Some(self.elements.max(1)), shorter)
            .take(self.tensors)
            .collect()
    }
}

fn main() -> Result<()> {
    let options = Options::parse();
    ensure!(
        (1..=16).contains(&options.tensors),
        "--tensors must be 1 to 16: the reads of a step have to fit into a send queue"
    );
    ensure!((2..=33).contains(&options.ranks), "--ranks must be 2 to 33");
    if let Some(victim) = options.kill {
        ensure!(
            (1..options.ranks).contains(&victim),
            "--kill takes a worker: rank 0 hosts the store of the group"
        );
    }
    support::run_with_victim(options.ranks, options.kill, |group| rank(&options, group))
}

/// Where a tensor comes from, where it goes, its name, and the step.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct Key {
    producer: u32,
    consumer: u32,
    name: String,
    step: u64,
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Key {
            producer,
            consumer,
            name,
            step,
        } = self;
        write!(f, "/task:{producer};/task:{consumer};{name};{step}")
    }
}

impl Key {
    fn new(producer: u32, consumer: u32, name: &str, step: u64) -> Key {
        Key {
            producer,
            consumer,
            name: name.into(),
            step,
        }
    }

    /// Reads what a peer sent: the text of a key.
    fn parse(text: &str) -> Result<Key> {
        let [producer, consumer, name, step] = text.split(';').collect::<Vec<_>>()[..] else {
            bail!("`{text}` is no key: it has not four parts");
        };
        let task = |part: &str| -> Result<u32> {
            let number = part.strip_prefix("/task:");
            Ok(number
                .with_context(|| format!("`{text}` is no key"))?
                .parse()?)
        };
        ensure!(!name.is_empty(), "`{text}` is no key: it has no name");
        Ok(Key::new(
            task(producer)?,
            task(consumer)?,
            name,
            step.parse()?,
        ))
    }
}

/// A step was aborted: what all its receives end with.
#[derive(Debug, Clone)]
struct Aborted {
    step: u64,
    reason: String,
}

impl fmt::Display for Aborted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "step {} was aborted: {}", self.step, self.reason)
    }
}

impl std::error::Error for Aborted {}

/// Memory for tensors, out of one region: registered once, so that no transfer registers anything.
struct Allocator {
    region: Region,
    /// Free spans, by their offsets: first fit.
    free: RefCell<BTreeMap<u64, u64>>,
}

impl Allocator {
    fn new(group: &Group, len_bytes: u64) -> Result<Rc<Allocator>> {
        let access = Access::LOCAL_WRITE | Access::REMOTE_READ;
        let region = Region::alloc(group.domain(), len_bytes, access)?;
        let free = RefCell::new(BTreeMap::from([(0, len_bytes)]));
        Ok(Rc::new(Allocator { region, free }))
    }

    fn alloc(self: &Rc<Allocator>, len_bytes: u64) -> Result<Buffer> {
        // Whole cache lines: no two tensors share one.
        let size = len_bytes.max(1).next_multiple_of(64);
        let mut free = self.free.borrow_mut();
        let found = free.iter().find(|(_, len)| **len >= size);
        let (at, len) = found
            .map(|(at, len)| (*at, *len))
            .with_context(|| format!("no {size} bytes are free in the region for tensors"))?;
        free.remove(&at);
        if len > size {
            free.insert(at + size, len - size);
        }
        Ok(Buffer {
            memory: Rc::clone(self),
            at,
            len_bytes,
            size,
        })
    }

    fn tensor(self: &Rc<Allocator>, len: usize) -> Result<Tensor> {
        let buffer = self.alloc(4 * len as u64)?;
        Ok(Tensor { buffer, len })
    }
}

/// A piece of the allocator's region, which is free again when this is dropped.
struct Buffer {
    memory: Rc<Allocator>,
    at: u64,
    len_bytes: u64,
    size: u64,
}

impl Buffer {
    fn slice(&self) -> doorbell::Result<doorbell::Slice<'_>> {
        self.memory.region.slice(self.at, self.len_bytes)
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let mut free = self.memory.free.borrow_mut();
        let (mut at, mut size) = (self.at, self.size);
        if let Some((before, len)) = free.range(..at).next_back()
            && before + len == at
        {
            (at, size) = (*before, len + size);
        }
        if let Some(len) = free.remove(&(self.at + self.size)) {
            size += len;
        }
        free.insert(at, size);
    }
}

/// A vector of numbers in registered memory.
struct Tensor {
    buffer: Buffer,
    len: usize,
}

impl Tensor {
    fn values(&self) -> Result<&[f32]> {
        let Buffer { memory, at, .. } = &self.buffer;
        // SAFETY: a tensor that can be read through a shared reference is complete: what receives into it or changes it has it alone. Peers only read it.
        Ok(unsafe { memory.region.values(*at, self.len)? })
    }

    fn values_mut(&mut self) -> Result<&mut [f32]> {
        let Buffer { memory, at, .. } = &self.buffer;
        // SAFETY: a tensor that a peer may read, or that a receive fills, is behind an `Rc` of the rendezvous or in its list, so there is no `&mut` to it.
        Ok(unsafe { memory.region.values_mut(*at, self.len)? })
    }
}

/// How a consumer gets a tensor.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Method {
    /// Where it is, and an RDMA READ.
    Read = 0,
    /// In a message that is encoded and decoded.
    Message = 1,
}

impl Method {
    fn name(self) -> &'static str {
        match self {
            Method::Read => "READ",
            Method::Message => "message",
        }
    }
}

/// What ranks send to each other. On the wire: a byte for the kind, and the rest, little-endian.
enum Note<'a> {
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
}

/// Bytes of an encoded tensor in front of its values.
const ENCODED_HEADER: usize = 9;

impl<'a> Note<'a> {
    fn to_bytes(&self) -> Vec<u8> {
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
        }
    }

    fn parse(bytes: &'a [u8]) -> Result<Note<'a>> {
        let malformed = || anyhow!("a note of {} bytes", bytes.len());
        let (kind, rest) = bytes.split_first().with_context(malformed)?;
        let (first, rest) = rest.split_first_chunk().with_context(malformed)?;
        let first = u64::from_le_bytes(*first);
        match (kind, rest) {
            (0, [method, key @ ..]) => Ok(Note::Ask {
                id: first,
                method: if *method == 0 {
                    Method::Read
                } else {
                    Method::Message
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
            _ => Err(malformed()),
        }
    }
}

/// A rank that has asked for a tensor before it was sent.
struct Asker {
    rank: u32,
    id: u64,
    method: Method,
}

/// What a rank knows of a step.
#[derive(Default)]
struct Step {
    /// Sent and not asked for.
    tensors: HashMap<Key, VecDeque<Rc<Tensor>>>,
    /// Asked for and not sent.
    askers: HashMap<Key, VecDeque<Asker>>,
    aborted: Option<Aborted>,
}

/// A receive.
enum Pending {
    Asked(Key),
    /// It is being read.
    Reading(Key, Tensor),
    Done(Rc<Tensor>),
    Failed(Aborted),
}

/// What the program did with the bytes of tensors, and when it was asked for them.
#[derive(Default, Clone, Copy)]
struct Counts {
    received: u64,
    copies: u64,
    copied_bytes: u64,
    asked_before: u64,
    asked_after: u64,
}

/// The connection with another rank.
struct Peer {
    queue: MessageQueue,
    endpoint: Endpoint,
    /// Sent, with the memory that must stay until the peer has it.
    posted: VecDeque<(PostedSend, Buffer)>,
    reading: VecDeque<u64>,
}

/// A rank's rendezvous. It makes progress in its calls, as no thread of its own does.
struct Rendezvous<'a> {
    group: &'a Group,
    memory: Rc<Allocator>,
    inbox: Buffer,
    peers: BTreeMap<u32, Peer>,
    steps: HashMap<u64, Step>,
    /// Steps that are over: what comes for them is dropped.
    over: HashSet<u64>,
    pending: HashMap<u64, Pending>,
    next_id: u64,
    /// Tensors that peers read, by their numbers.
    lent: HashMap<u32, Rc<Tensor>>,
    next_number: u32,
    counts: Cell<Counts>,
}

impl<'a> Rendezvous<'a> {
    fn new(group: &'a Group, memory: Rc<Allocator>, longest: usize) -> Result<Rendezvous<'a>> {
        let others: Vec<u32> = (0..group.size()).filter(|r| *r != group.rank()).collect();
        let config = MessageConfig::default()
            .eager_bytes(CONTROL_BYTES)
            .slots(256)
            .ahead(256);
        let with: Vec<(u32, u64)> = others.iter().map(|peer| (*peer, 0)).collect();
        let mut peers = BTreeMap::new();
        for (peer, queue) in others.iter().zip(group.message_queues(&with, &config)?) {
            let mut endpoint = group.take_endpoint(*peer)?;
            // No memory: a number comes as immediate data.
            for _ in 0..64 {
                endpoint.post_recv(0, &[])?;
            }
            let peer_state = Peer {
                queue,
                endpoint,
                posted: VecDeque::new(),
                reading: VecDeque::new(),
            };
            peers.insert(*peer, peer_state);
        }
        group.barrier()?;
        let inbox = (4 * longest + ENCODED_HEADER).max(CONTROL_BYTES as usize);
        Ok(Rendezvous {
            group,
            inbox: memory.alloc(inbox as u64)?,
            memory,
            peers,
            steps: HashMap::new(),
            over: HashSet::new(),
            pending: HashMap::new(),
            next_id: 0,
            lent: HashMap::new(),
            next_number: 0,
            counts: Cell::default(),
        })
    }

    fn count(&self, change: impl FnOnce(&mut Counts)) {
        let mut counts = self.counts.get();
        change(&mut counts);
        self.counts.set(counts);
    }

    /// Gives a tensor to whoever asks for this key. Does not wait.
    ///
    /// # Errors
    /// [`Aborted`] if its step was aborted.
    fn send(&mut self, key: &Key, tensor: &Rc<Tensor>) -> Result<()> {
        ensure!(
            key.producer == self.group.rank(),
            "{key} is sent by another rank than its producer"
        );
        ensure!(!self.over.contains(&key.step), "the step of {key} is over");
        let step = self.steps.entry(key.step).or_default();
        if let Some(aborted) = &step.aborted {
            return Err(aborted.clone().into());
        }
        let asker = step.askers.get_mut(key).and_then(VecDeque::pop_front);
        match asker {
            None => {
                let tensors = step.tensors.entry(key.clone()).or_default();
                tensors.push_back(Rc::clone(tensor));
                Ok(())
            }
            Some(asker) => {
                self.count(|counts| counts.asked_before += 1);
                self.answer(&asker, Rc::clone(tensor))
            }
        }
    }

    /// Asks for the tensor of a key, and does not wait for it.
    fn start_recv(&mut self, key: &Key, method: Method) -> Result<u64> {
        ensure!(
            key.consumer == self.group.rank(),
            "{key} is received by another rank than its consumer"
        );
        let id = self.next_id;
        self.next_id += 1;
        let aborted = self
            .steps
            .get(&key.step)
            .and_then(|step| step.aborted.clone());
        let pending = match &aborted {
            Some(aborted) => Pending::Failed(aborted.clone()),
            None => Pending::Asked(key.clone()),
        };
        self.pending.insert(id, pending);
        if aborted.is_none() {
            let rank = self.group.rank();
            if key.producer == rank {
                self.asked(key.clone(), Asker { rank, id, method })?;
            } else {
                let key = key.to_string();
                let note = Note::Ask {
                    id,
                    method,
                    key: &key,
                };
                self.post(self.producer_of(id)?, &note.to_bytes())?;
            }
        }
        Ok(id)
    }

    fn producer_of(&self, id: u64) -> Result<u32> {
        match self.pending.get(&id) {
            Some(Pending::Asked(key) | Pending::Reading(key, _)) => Ok(key.producer),
            _ => bail!("receive {id} is over"),
        }
    }

    /// Waits for a tensor.
    ///
    /// # Errors
    /// [`Aborted`] if its step was aborted; an error of the group that names the rank if one has ended.
    fn wait(&mut self, id: u64) -> Result<Rc<Tensor>> {
        let end = Instant::now() + DEADLINE;
        loop {
            if let Some(Pending::Done(_) | Pending::Failed(_)) = self.pending.get(&id) {
                return match self.pending.remove(&id) {
                    Some(Pending::Done(tensor)) => Ok(tensor),
                    Some(Pending::Failed(aborted)) => Err(aborted.into()),
                    _ => bail!("receive {id} is unknown"),
                };
            }
            self.progress(true)?;
            ensure!(
                Instant::now() < end,
                "receive {id} did not end in {DEADLINE:?}"
            );
        }
    }

    /// Aborts a step at all ranks: its receives fail with this reason, and so do later sends.
    fn abort(&mut self, step: u64, reason: &str) -> Result<()> {
        self.aborted(step, reason);
        let note = Note::Abort { step, reason }.to_bytes();
        let peers: Vec<u32> = self.peers.keys().copied().collect();
        peers
            .into_iter()
            .try_for_each(|peer| self.post(peer, &note))
    }

    fn aborted(&mut self, step: u64, reason: &str) {
        let aborted = Aborted {
            step,
            reason: reason.into(),
        };
        // What was sent is dropped with the rest of the step. The askers hear of the abort themselves.
        let state = Step {
            aborted: Some(aborted.clone()),
            ..Step::default()
        };
        self.steps.insert(step, state);
        for pending in self.pending.values_mut() {
            // One that is being read ends first: the device writes into its memory.
            if matches!(pending, Pending::Asked(key) if key.step == step) {
                *pending = Pending::Failed(aborted.clone());
            }
        }
    }

    /// Forgets a step whose tensors have all been received.
    fn finish_step(&mut self, step: u64) {
        self.steps.remove(&step);
        self.over.insert(step);
    }

    /// Whether a rank waits for this key here.
    fn is_awaited(&self, key: &Key) -> bool {
        let step = self.steps.get(&key.step);
        let askers = step.and_then(|step| step.askers.get(key));
        askers.is_some_and(|askers| !askers.is_empty())
    }

    /// Somebody asks for a key.
    fn asked(&mut self, key: Key, asker: Asker) -> Result<()> {
        let step = self.steps.entry(key.step).or_default();
        if let Some(Aborted { step, reason }) = step.aborted.clone() {
            let note = Note::Abort {
                step,
                reason: &reason,
            };
            return match asker.rank == self.group.rank() {
                true => Ok(()),
                false => self.post(asker.rank, &note.to_bytes()),
            };
        }
        match step.tensors.get_mut(&key).and_then(VecDeque::pop_front) {
            None => {
                step.askers.entry(key).or_default().push_back(asker);
                Ok(())
            }
            Some(tensor) => {
                self.count(|counts| counts.asked_after += 1);
                self.answer(&asker, tensor)
            }
        }
    }

    fn answer(&mut self, asker: &Asker, tensor: Rc<Tensor>) -> Result<()> {
        if asker.rank == self.group.rank() {
            self.pending.insert(asker.id, Pending::Done(tensor));
            return Ok(());
        }
        match asker.method {
            Method::Read => {
                let number = self.next_number;
                self.next_number += 1;
                let remote = self.memory.region.remote();
                let note = Note::Located {
                    id: asker.id,
                    number,
                    len: tensor.len as u32,
                    addr: remote.addr + tensor.buffer.at,
                    rkey: remote.rkey,
                };
                self.lent.insert(number, tensor);
                self.post(asker.rank, &note.to_bytes())
            }
            Method::Message => {
                let Buffer { at, len_bytes, .. } = tensor.buffer;
                let message = self.memory.alloc(len_bytes + ENCODED_HEADER as u64)?;
                let header = Note::Encoded {
                    id: asker.id,
                    values: &[],
                };
                let region = &self.memory.region;
                region.write(message.at, &header.to_bytes())?;
                // SAFETY: of two buffers, one of which is new; nothing changes a tensor that was sent.
                let values: &[u8] = unsafe { region.values(at, len_bytes as usize)? };
                region.write(message.at + ENCODED_HEADER as u64, values)?;
                self.copied(len_bytes);
                self.post_buffer(asker.rank, message)
            }
        }
    }

    fn copied(&self, len_bytes: u64) {
        self.count(|counts| {
            counts.copies += 1;
            counts.copied_bytes += len_bytes;
        });
    }

    fn post(&mut self, to: u32, note: &[u8]) -> Result<()> {
        ensure!(note.len() <= CONTROL_BYTES as usize, "a long key or reason");
        let buffer = self.memory.alloc(note.len() as u64)?;
        self.memory.region.write(buffer.at, note)?;
        self.post_buffer(to, buffer)
    }

    fn post_buffer(&mut self, to: u32, buffer: Buffer) -> Result<()> {
        let peer = self.peers.get_mut(&to).context("no such rank")?;
        let posted = peer
            .queue
            .start_send_now(&[buffer.slice()?], Some(DEADLINE));
        let posted = posted.map_err(|error| self.group.cause_of(error))?;
        peer.posted.push_back((posted, buffer));
        Ok(())
    }

    /// Does what there is to do. With `waits` and nothing to do, waits a little.
    fn progress(&mut self, waits: bool) -> Result<()> {
        let found = self.look().map_err(|error| match error.downcast() {
            // An endpoint only reports that it failed; the group knows which rank has ended.
            Ok(error) => self.group.cause_of(error).into(),
            Err(error) => error,
        })?;
        if waits && !found {
            // No call waits for messages and for the completions of endpoints at once, so this sleeps for less than a long transfer takes.
            std::thread::sleep(Duration::from_micros(20));
        }
        Ok(())
    }

    /// Whether there was anything.
    fn look(&mut self) -> Result<bool> {
        let mut found = false;
        loop {
            let mut queues: Vec<&mut MessageQueue> = self
                .peers
                .values_mut()
                .map(|peer| &mut peer.queue)
                .collect();
            let into = [self.inbox.slice()?];
            let received = MessageQueue::recv_any_now(&mut queues, &into, Some(Duration::ZERO));
            let (from, len_bytes) = match received {
                Err(Error::Timeout { .. }) => break,
                received => received?,
            };
            let from = *self.peers.keys().nth(from).context("a queue")?;
            found = true;
            self.received(from, len_bytes)?;
        }
        let mut read = Vec::new();
        let mut released = Vec::new();
        for peer in self.peers.values_mut() {
            while peer.endpoint.poll_cq(QueueKind::Send)?.is_some() {
                // Reads of a connection complete in order.
                read.extend(peer.reading.pop_front());
            }
            while let Some(released_one) = peer.endpoint.poll_cq(QueueKind::Recv)? {
                peer.endpoint.post_recv(0, &[])?;
                released.extend(released_one.imm);
            }
            while let Some((posted, _)) = peer.posted.front() {
                match peer.queue.wait_send_now(posted, Some(Duration::ZERO)) {
                    Err(Error::Timeout { .. }) => break,
                    done => done?,
                }
                peer.posted.pop_front();
            }
        }
        found |= !read.is_empty() || !released.is_empty();
        for number in released {
            self.lent
                .remove(&number)
                .context("an unknown tensor was released")?;
        }
        for id in read {
            let Some(Pending::Reading(key, tensor)) = self.pending.remove(&id) else {
                bail!("receive {id} was not being read");
            };
            self.complete(id, key.step, tensor);
        }
        Ok(found)
    }

    fn complete(&mut self, id: u64, step: u64, tensor: Tensor) {
        let aborted = self.steps.get(&step).and_then(|step| step.aborted.clone());
        self.count(|counts| counts.received += 1);
        let pending = match aborted {
            Some(aborted) => Pending::Failed(aborted),
            None => Pending::Done(Rc::new(tensor)),
        };
        self.pending.insert(id, pending);
    }

    /// A message is in the inbox.
    fn received(&mut self, from: u32, len_bytes: u64) -> Result<()> {
        let inbox = self.inbox.at;
        let mut bytes = vec![0; len_bytes.min(CONTROL_BYTES.into()) as usize];
        self.memory.region.read(inbox, &mut bytes)?;
        match Note::parse(&bytes)? {
            Note::Ask { id, method, key } => {
                let key = Key::parse(key)?;
                ensure!(
                    key.producer == self.group.rank() && key.consumer == from,
                    "rank {from} asks for {key}"
                );
                let rank = from;
                self.asked(key, Asker { rank, id, method })
            }
            Note::Located {
                id,
                number,
                len,
                addr,
                rkey,
            } => {
                let peer = self.peers.get_mut(&from).context("no such rank")?;
                match self.pending.remove(&id) {
                    Some(Pending::Asked(key)) => {
                        let tensor = self.memory.tensor(len as usize)?;
                        let into = [tensor.buffer.slice()?];
                        let remote = RemoteSlice::new(addr, rkey, tensor.buffer.len_bytes);
                        peer.endpoint.post_send(&Work::read(&into, remote))?;
                        peer.reading.push_back(id);
                        self.pending.insert(id, Pending::Reading(key, tensor));
                    }
                    // The step was aborted meanwhile. The producer is to have its tensor back all the same.
                    Some(Pending::Failed(aborted)) => {
                        self.pending.insert(id, Pending::Failed(aborted));
                    }
                    None => (),
                    Some(_) => bail!("rank {from} has answered twice"),
                }
                // Gives the tensor back, and must not overtake the read.
                let release = Work::write(&[], RemoteSlice::new(addr, rkey, 0));
                let release = release.imm(number).fence(true).signaled(false);
                peer.endpoint.post_send(&release)?;
                Ok(())
            }
            Note::Encoded { id, .. } => {
                let key = match self.pending.get(&id) {
                    Some(Pending::Asked(key)) => key.clone(),
                    _ => return Ok(()),
                };
                let values = len_bytes - ENCODED_HEADER as u64;
                let tensor = self.memory.tensor(values as usize / 4)?;
                let region = &self.memory.region;
                // SAFETY: the inbox changes with the next receive only.
                let from: &[u8] =
                    unsafe { region.values(inbox + ENCODED_HEADER as u64, values as usize)? };
                region.write(tensor.buffer.at, from)?;
                self.copied(values);
                self.complete(id, key.step, tensor);
                Ok(())
            }
            Note::Abort { step, reason } => {
                self.aborted(step, reason);
                Ok(())
            }
        }
    }

    /// Goes on until no peer needs this rank any more: all of them call it.
    fn drain(&mut self, name: &str) -> Result<()> {
        let end = Instant::now() + DEADLINE;
        let is_busy = |r: &Self| {
            let reading = r
                .peers
                .values()
                .any(|p| !p.reading.is_empty() || !p.posted.is_empty());
            reading || !r.lent.is_empty()
        };
        while is_busy(self) {
            self.progress(true)?;
            ensure!(
                Instant::now() < end,
                "{name}: a peer has not read its tensors"
            );
        }
        Ok(self.group.barrier()?)
    }
}

impl Rendezvous<'_> {
    fn until(&mut self, what: &str, is_so: impl Fn(&Self) -> bool) -> Result<()> {
        let end = Instant::now() + DEADLINE;
        while !is_so(self) {
            self.progress(true)?;
            ensure!(Instant::now() < end, "{what}: not within {DEADLINE:?}");
        }
        Ok(())
    }
}

/// Ranks 0 and 1 send each other a few tensors, in each order of send and receive and with an abort.
fn check_meaning(rendezvous: &mut Rendezvous<'_>) -> Result<()> {
    let group = rendezvous.group;
    let key = |name: &str, step: u64| Key::new(0, 1, name, step);
    let tensor = |rendezvous: &Rendezvous<'_>, first: f32| -> Result<Rc<Tensor>> {
        let mut tensor = rendezvous.memory.tensor(300)?;
        for (value, at) in tensor.values_mut()?.iter_mut().zip(0_u16..) {
            *value = first + f32::from(at);
        }
        Ok(Rc::new(tensor))
    };
    let check = |tensor: &Tensor, first: f32| -> Result<()> {
        let expected = (0..300_u16).map(|at| first + f32::from(at));
        ensure!(
            tensor.values()?.iter().copied().eq(expected),
            "other values"
        );
        Ok(())
    };
    for (method, step) in [(Method::Read, 1), (Method::Message, 2)] {
        let (early, other, late) = (key("early", step), key("other", step), key("late", step));
        match group.rank() {
            0 => {
                for key in [&early, &other] {
                    rendezvous.until("ask for a tensor", |r| r.is_awaited(key))?;
                }
                let [first, second, third] = [1.0, 1000.0, 2000.0].map(|at| tensor(rendezvous, at));
                // Of two keys in another order than they were asked for, and of one key twice.
                rendezvous.send(&other, &second?)?;
                rendezvous.send(&early, &first?)?;
                rendezvous.send(&late, &third?)?;
                rendezvous.send(&late, &tensor(rendezvous, 3000.0)?)?;
                group.barrier()?;
                rendezvous.until("ask for `late`", |r| {
                    r.steps[&step].tensors.values().all(VecDeque::is_empty)
                })?;
            }
            1 => {
                let first = rendezvous.start_recv(&early, method)?;
                let second = rendezvous.start_recv(&other, method)?;
                check(&*rendezvous.wait(first)?, 1.0)?;
                check(&*rendezvous.wait(second)?, 1000.0)?;
                group.barrier()?;
                for first in [2000.0, 3000.0] {
                    let id = rendezvous.start_recv(&late, method)?;
                    check(&*rendezvous.wait(id)?, first)?;
                }
                println!("{}: received before and after their sends", method.name());
            }
            _ => group.barrier()?,
        }
        rendezvous.drain("the check of keys")?;
        rendezvous.finish_step(step);
    }

    let (aborted, goes_on) = (3, 4);
    let (a, b, c) = (key("a", aborted), key("b", aborted), key("c", goes_on));
    match group.rank() {
        0 => {
            for key in [&a, &b, &c] {
                rendezvous.until("ask for a tensor", |r| r.is_awaited(key))?;
            }
            rendezvous.abort(aborted, "out of memory")?;
            let late = rendezvous.send(&a, &tensor(rendezvous, 1.0)?);
            let failure: Aborted = late
                .err()
                .context("a send of an aborted step has ended well")?
                .downcast()?;
            println!("{a}, sent later: {failure}");
            rendezvous.send(&c, &tensor(rendezvous, 2.0)?)?;
        }
        1 => {
            let pending = [&a, &b, &c].map(|key| rendezvous.start_recv(key, Method::Read));
            let [of_a, of_b, of_c] = pending;
            for (key, id) in [(&a, of_a?), (&b, of_b?)] {
                let Err(failure) = rendezvous.wait(id) else {
                    bail!("{key} was received, though its step was aborted");
                };
                let failure: Aborted = failure.downcast()?;
                println!("{key}: {failure}");
            }
            // One that begins after the abort fails, too.
            let id = rendezvous.start_recv(&a, Method::Read)?;
            let failure = rendezvous.wait(id).err();
            let failure = failure.context("a receive of an aborted step has ended well")?;
            ensure!(failure.is::<Aborted>(), "{failure}");
            check(&*rendezvous.wait(of_c?)?, 2.0)?;
            println!("{c}: received");
        }
        _ => rendezvous.until("abort", |r| r.steps.contains_key(&aborted))?,
    }
    rendezvous.drain("the check of aborts")?;
    rendezvous.finish_step(goes_on);
    let held = rendezvous.memory.free.borrow().values().sum::<u64>();
    let all = rendezvous.memory.region.len_bytes();
    ensure!(
        held + rendezvous.inbox.size == all,
        "of {all} bytes {held} are free when all tensors are gone"
    );
    Ok(())
}

/// What the training of one method cost this rank.
#[derive(Default)]
struct Cost {
    /// Of each step.
    seconds: Vec<f64>,
    application: Duration,
    process: Duration,
    counts: Counts,
}

/// What worker `rank` pulls an element of the weights to.
fn target(rank: u32, tensor: usize, element: usize) -> f32 {
    ((rank as usize * 31 + tensor * 7 + element) % 1000) as f32 / 100.0
}

/// Steepest descent with rate 1/4 to the mean of the workers' targets. Returns the weights at the server. Step numbers begin with `first`.
fn train(
    options: &Options,
    rendezvous: &mut Rendezvous<'_>,
    method: Method,
    first: u64,
) -> Result<(Cost, Vec<f32>)> {
    rendezvous.group.barrier()?;
    rendezvous.counts.set(Counts::default());
    let (thread, process) = (support::thread_time()?, support::process_time()?);
    let (seconds, weights) = match rendezvous.group.rank() {
        SERVER => serve(options, rendezvous, method, first)?,
        _ => work(options, rendezvous, method, first)?,
    };
    rendezvous.drain("the end of the training")?;
    let cost = Cost {
        seconds,
        application: support::thread_time()? - thread,
        process: support::process_time()? - process,
        counts: rendezvous.counts.get(),
    };
    Ok((cost, weights))
}

/// The server: sends the weights to all workers, and changes them by the workers' gradients.
fn serve(
    options: &Options,
    rendezvous: &mut Rendezvous<'_>,
    method: Method,
    first: u64,
) -> Result<(Vec<f64>, Vec<f32>)> {
    let memory = Rc::clone(&rendezvous.memory);
    let workers = rendezvous.group.size() - 1;
    let mut weights = Vec::new();
    for len in options.lengths() {
        let mut tensor = memory.tensor(len)?;
        tensor.values_mut()?.fill(0.0);
        weights.push(Rc::new(tensor));
    }
    let mut seconds = Vec::new();
    for step in first..first + options.steps {
        let begin = Instant::now();
        for worker in 1..=workers {
            for (number, tensor) in weights.iter().enumerate() {
                let key = Key::new(SERVER, worker, &format!("weights/{number}"), step);
                rendezvous.send(&key, tensor)?;
            }
        }
        let mut ids = Vec::new();
        for number in 0..weights.len() {
            for worker in 1..=workers {
                let key = Key::new(worker, SERVER, &format!("gradient/{number}"), step);
                ids.push(rendezvous.start_recv(&key, method)?);
            }
        }
        let mut ids = ids.into_iter();
        for old in &mut weights {
            // Workers may still read the old weights.
            let mut new = memory.tensor(old.len)?;
            let values = new.values_mut()?;
            values.fill(0.0);
            for id in ids.by_ref().take(workers as usize) {
                let gradient = rendezvous.wait(id)?;
                for (sum, value) in values.iter_mut().zip(gradient.values()?) {
                    *sum += value;
                }
            }
            for (value, old) in values.iter_mut().zip(old.values()?) {
                *value = old - 0.25 * *value / workers as f32;
            }
            *old = Rc::new(new);
        }
        rendezvous.finish_step(step);
        seconds.push(begin.elapsed().as_secs_f64());
    }
    let mut all = Vec::new();
    for tensor in &weights {
        all.extend_from_slice(tensor.values()?);
    }
    Ok((seconds, all))
}

/// A worker: receives the weights, and sends what they differ by from its targets.
fn work(
    options: &Options,
    rendezvous: &mut Rendezvous<'_>,
    method: Method,
    first: u64,
) -> Result<(Vec<f64>, Vec<f32>)> {
    let memory = Rc::clone(&rendezvous.memory);
    let rank = rendezvous.group.rank();
    let ask = |rendezvous: &mut Rendezvous<'_>, step: u64| -> Result<Vec<u64>> {
        (0..options.tensors)
            .map(|number| {
                let key = Key::new(SERVER, rank, &format!("weights/{number}"), step);
                rendezvous.start_recv(&key, method)
            })
            .collect()
    };
    let end = first + options.steps;
    let mut ids = ask(rendezvous, first)?;
    for step in first..end {
        if options.kill == Some(rank) && step == first + options.steps / 2 {
            support::kill_myself();
        }
        for (number, id) in std::mem::take(&mut ids).into_iter().enumerate() {
            let weights = rendezvous.wait(id)?;
            let mut gradient = memory.tensor(weights.len)?;
            let pairs = gradient.values_mut()?.iter_mut().zip(weights.values()?);
            for (element, (slope, weight)) in pairs.enumerate() {
                *slope = weight - target(rank, number, element);
            }
            let key = Key::new(rank, SERVER, &format!("gradient/{number}"), step);
            rendezvous.send(&key, &Rc::new(gradient))?;
        }
        // The server had all gradients of the step before when it sent these weights.
        rendezvous.finish_step(step.wrapping_sub(1));
        if step + 1 < end {
            ids = ask(rendezvous, step + 1)?;
        }
    }
    // The gradients of the last step have not been asked for yet.
    rendezvous.until("ask for the last gradients", |r| {
        let step = r.steps.get(&(end - 1));
        step.is_none_or(|step| step.tensors.values().all(VecDeque::is_empty))
    })?;
    rendezvous.finish_step(end - 1);
    Ok((Vec::new(), Vec::new()))
}

fn report(options: &Options, group: &Group, costs: &[Cost]) -> Result<()> {
    let mut own = Vec::new();
    for cost in costs {
        let counts = &cost.counts;
        own.extend([
            cost.application.as_nanos() as u64,
            cost.process.as_nanos() as u64,
            counts.received,
            counts.copies,
            counts.copied_bytes,
            counts.asked_before,
            counts.asked_after,
        ]);
    }
    let mut sums = vec![0; own.len()];
    for list in support::gather(group, &own)? {
        for (sum, word) in sums.iter_mut().zip(list) {
            *sum += word;
        }
    }
    if group.rank() != SERVER {
        return Ok(());
    }
    println!(
        "{} steps with {} tensors of {:?} floats, {} workers",
        options.steps,
        options.tensors,
        options.lengths(),
        group.size() - 1
    );
    println!(
        "{:<8} {:>14} {:>20} {:>12} {:>9} {:>7} {:>11} {:>13} {:>12}",
        "",
        "ms of a step",
        "CPU of threads, ms",
        "all CPU, ms",
        "received",
        "copies",
        "MiB copied",
        "asked before",
        "asked after"
    );
    for ((cost, sums), method) in costs
        .iter()
        .zip(sums.as_chunks::<7>().0)
        .zip([Method::Read, Method::Message])
    {
        let mut seconds = cost.seconds.clone();
        seconds.sort_by(f64::total_cmp);
        let [application, process, received, copies, bytes, before, after] = *sums;
        println!(
            "{:<8} {:>14.2} {:>20.1} {:>12.1} {received:>9} {copies:>7} {:>11.1} {before:>13} {after:>12}",
            method.name(),
            seconds.get(seconds.len() / 2).copied().unwrap_or_default() * 1e3,
            application as f64 / 1e6,
            process as f64 / 1e6,
            bytes as f64 / f64::from(1 << 20)
        );
    }
    Ok(())
}

fn rank(options: &Options, group: Group) -> Result<()> {
    let recorder = Recorder::new(group.rank());
    let lengths = options.lengths();
    let (longest, all) = (lengths[0], lengths.iter().sum::<usize>() as u64);
    // Weights of two steps, gradients of all workers, and as much again in messages.
    let workers = u64::from(group.size()) - 1;
    let need = 4 * all * (4 + 3 * workers) + 4 * longest as u64 + (4 << 20);
    let memory = Allocator::new(&group, need)?;
    let mut rendezvous = Rendezvous::new(&group, Rc::clone(&memory), longest)?;
    check_meaning(&mut rendezvous)?;
    let mut costs = Vec::new();
    let mut results = Vec::new();
    for (method, first) in [(Method::Read, 1000), (Method::Message, 1_000_000)] {
        let begin = Recorder::now_ms();
        let trained = train(options, &mut rendezvous, method, first);
        let (cost, weights) = match trained {
            Err(failure) if options.kill.is_some() && group.check().is_err() => {
                println!("rank {}: {failure:#}", group.rank());
                return Ok(());
            }
            trained => trained?,
        };
        recorder.add(method.name(), begin);
        costs.push(cost);
        results.push(weights);
    }
    ensure!(results[0] == results[1], "the methods have other weights");
    report(options, &group, &costs)?;
    if let (SERVER, Some(file)) = (group.rank(), &options.out) {
        let bytes: Vec<u8> = results[0].iter().flat_map(|w| w.to_le_bytes()).collect();
        std::fs::write(file, bytes).with_context(|| file.display().to_string())?;
    }
    recorder.write("Keyed rendezvous", options.svg.as_deref(), &group)?;
    drop(rendezvous);
    group.barrier()?;
    group.leave()?;
    Ok(())
}
