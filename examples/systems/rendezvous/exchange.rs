//! The rendezvous: what was sent waits here for whoever asks for its key.

use std::cell::Cell;
use std::collections::hash_map::RandomState;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::hash::BuildHasher;
use std::rc::Rc;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use doorbell::{
    Endpoint, Error, Group, MessageConfig, MessageQueue, PostedSend, QueueKind, RemoteSlice, Work,
    wait_until,
};

use crate::DEADLINE;
use crate::note::{Aborted, Cancelled, ENCODED_HEADER, Key, Method, Note, REASON_HEADER};
use crate::over::FinishedSteps;
use crate::tensor::{Allocator, Buffer, Tensor};

/// Longest message without a tensor: it is eager.
const CONTROL_BYTES: u32 = 1024;

/// As much of a reason as a message has room for behind a kind and a number, up to the end of a character.
fn fitting(reason: &str) -> &str {
    let mut len = reason.len().min(CONTROL_BYTES as usize - REASON_HEADER);
    while !reason.is_char_boundary(len) {
        len -= 1;
    }
    &reason[..len]
}

/// The reason with which receives of a finished step fail.
const OVER: &str = "it is over";

/// What a receive brings.
#[derive(Clone)]
pub enum Produced {
    Tensor(Rc<Tensor>),
    /// The operation that would have made the tensor was not run: it is behind the branch that a conditional did not take.
    Dead,
}

/// Why a receive failed.
enum NoTensor {
    Aborted(Aborted),
    Cancelled(Cancelled),
}

impl From<NoTensor> for anyhow::Error {
    fn from(failure: NoTensor) -> anyhow::Error {
        match failure {
            NoTensor::Aborted(aborted) => aborted.into(),
            NoTensor::Cancelled(cancelled) => cancelled.into(),
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
    tensors: HashMap<Key, VecDeque<Produced>>,
    /// Asked for and not sent.
    askers: HashMap<Key, VecDeque<Asker>>,
    aborted: Option<Aborted>,
}

/// A receive.
enum Pending {
    Asked(Key, Method),
    /// It is being read.
    Reading(Key, Method, Tensor),
    Done(Produced),
    Failed(NoTensor),
}

/// What the program did with the bytes of tensors, and when it was asked for them.
#[derive(Default, Clone, Copy)]
pub struct Counts {
    pub received: u64,
    pub copies: u64,
    pub copied_bytes: u64,
    pub asked_before: u64,
    pub asked_after: u64,
}

/// What a READ was told: from where, at which rank, to where.
#[derive(Clone, Copy)]
pub struct ReadPlaces {
    pub producer: u32,
    pub from: u64,
    pub to: u64,
    pub len_bytes: u64,
}

/// The connection with another rank.
struct Peer {
    queue: MessageQueue,
    endpoint: Endpoint,
    /// Messages for which the peer had no slot yet.
    unsent: VecDeque<Buffer>,
    /// Sent, with the memory that must stay until the peer has it.
    posted: VecDeque<(PostedSend, Buffer)>,
    /// The signaled requests of the endpoint: the receive that a READ is for, or `None` for the release of a tensor that no receive wants any more.
    signaled: VecDeque<Option<u64>>,
}

impl Peer {
    /// Sends the messages for which the peer has slots. Does not wait for slots: two ranks that wait for slots of each other would free none.
    fn send_messages(&mut self) -> doorbell::Result<()> {
        while let Some(buffer) = self.unsent.front() {
            let sent = self
                .queue
                .start_send_now(&[buffer.slice()?], Some(Duration::ZERO));
            if matches!(sent, Err(Error::Timeout { .. })) {
                break;
            }
            let posted = sent?;
            let buffers = self.unsent.pop_front();
            self.posted.extend(buffers.map(|buffer| (posted, buffer)));
        }
        Ok(())
    }
}

/// A rank's rendezvous. It makes progress in its calls, as no thread of its own does.
pub struct Rendezvous<'a> {
    pub group: &'a Group,
    /// Of the processes of all ranks.
    incarnations: Vec<u64>,
    pub memory: Rc<Allocator>,
    /// The transport's own, of [`Method::ReadAndCopy`].
    transit: Rc<Allocator>,
    inbox: Buffer,
    peers: BTreeMap<u32, Peer>,
    steps: HashMap<u64, Step>,
    /// What comes for them is dropped, and who asks for a tensor of them is refused.
    pub over: FinishedSteps,
    /// Requests of other ranks that were refused.
    pub refused: u64,
    /// Answers that came when their receives were over.
    pub dropped: u64,
    pending: HashMap<u64, Pending>,
    next_id: u64,
    /// Tensors that peers read, by their numbers.
    lent: HashMap<u32, Rc<Tensor>>,
    next_number: u32,
    pub counts: Cell<Counts>,
    /// Of all READs that were posted.
    pub reads: Vec<ReadPlaces>,
}

impl<'a> Rendezvous<'a> {
    pub fn new(
        group: &'a Group,
        memory: Rc<Allocator>,
        transit: Rc<Allocator>,
        longest: usize,
    ) -> Result<Rendezvous<'a>> {
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
                unsent: VecDeque::new(),
                posted: VecDeque::new(),
                signaled: VecDeque::new(),
            };
            peers.insert(*peer, peer_state);
        }
        // Seeded anew in each process.
        let incarnation = RandomState::new().hash_one(group.rank());
        let incarnations = crate::support::gather(group, &[incarnation])?.concat();
        let inbox = (4 * longest + ENCODED_HEADER).max(CONTROL_BYTES as usize);
        Ok(Rendezvous {
            group,
            incarnations,
            inbox: memory.alloc(inbox as u64)?,
            memory,
            transit,
            peers,
            steps: HashMap::new(),
            over: FinishedSteps::default(),
            refused: 0,
            dropped: 0,
            pending: HashMap::new(),
            next_id: 0,
            lent: HashMap::new(),
            next_number: 0,
            counts: Cell::default(),
            reads: Vec::new(),
        })
    }

    /// The key of a tensor that a process of this group makes.
    ///
    /// # Errors
    /// A name that is empty or has a `;`, which separates the parts of a key.
    pub fn key(&self, producer: u32, consumer: u32, name: &str, step: u64) -> Result<Key> {
        ensure!(
            !name.is_empty() && !name.contains(';'),
            "`{name}` is no name for a key: it is empty or has a `;`"
        );
        Ok(Key {
            producer,
            incarnation: self.incarnations[producer as usize],
            consumer,
            name: name.into(),
            step,
        })
    }

    /// Why a request for a key is refused that names another process than that which has the producer's rank now.
    fn stale(&self, key: &Key) -> Option<String> {
        let now = self.incarnations[self.group.rank() as usize];
        (key.incarnation != now).then(|| {
            format!(
                "the request is for incarnation {:016x} of its producer, which is {now:016x} and was probably restarted",
                key.incarnation
            )
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
    pub fn send(&mut self, key: &Key, tensor: &Rc<Tensor>) -> Result<()> {
        self.send_produced(key, Produced::Tensor(Rc::clone(tensor)))
    }

    /// As [`Rendezvous::send`], a dead tensor: whoever receives it is not to run, either.
    pub fn send_dead(&mut self, key: &Key) -> Result<()> {
        self.send_produced(key, Produced::Dead)
    }

    fn send_produced(&mut self, key: &Key, produced: Produced) -> Result<()> {
        ensure!(
            key.producer == self.group.rank(),
            "{key} is sent by another rank than its producer"
        );
        ensure!(
            self.stale(key).is_none(),
            "{key} is of another incarnation of this rank"
        );
        ensure!(!self.over.contains(key.step), "the step of {key} is over");
        let step = self.steps.entry(key.step).or_default();
        if let Some(aborted) = &step.aborted {
            return Err(aborted.clone().into());
        }
        let asker = step.askers.get_mut(key).and_then(VecDeque::pop_front);
        match asker {
            None => {
                let tensors = step.tensors.entry(key.clone()).or_default();
                tensors.push_back(produced);
                Ok(())
            }
            Some(asker) => {
                self.count(|counts| counts.asked_before += 1);
                self.answer(&asker, produced)
            }
        }
    }

    /// Asks for the tensor of a key, and does not wait for it.
    pub fn start_recv(&mut self, key: &Key, method: Method) -> Result<u64> {
        ensure!(
            key.consumer == self.group.rank(),
            "{key} is received by another rank than its consumer"
        );
        let id = self.next_id;
        self.next_id += 1;
        let aborted = self.end_of(key.step);
        let pending = match &aborted {
            Some(aborted) => Pending::Failed(NoTensor::Aborted(aborted.clone())),
            None => Pending::Asked(key.clone(), method),
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

    /// What receives of a step end with that was aborted or is over.
    fn end_of(&self, step: u64) -> Option<Aborted> {
        if self.over.contains(step) {
            let reason = OVER.into();
            return Some(Aborted { step, reason });
        }
        self.steps.get(&step)?.aborted.clone()
    }

    /// Takes a receive back: what comes for it is dropped, and [`Rendezvous::wait`] fails with [`Cancelled`]. Returns false if it is too late, because the tensor is here or is being read.
    pub fn cancel(&mut self, id: u64) -> Result<bool> {
        let Some(Pending::Asked(key, _)) = self.pending.get(&id) else {
            return Ok(false);
        };
        let (producer, key) = (key.producer, key.clone());
        let text = key.to_string();
        let cancelled = Cancelled { key: text.clone() };
        let failed = Pending::Failed(NoTensor::Cancelled(cancelled));
        self.pending.insert(id, failed);
        if producer == self.group.rank() {
            self.forget_asker(&key, producer, id);
        } else {
            let note = Note::Cancel { id, key: &text };
            self.post(producer, &note.to_bytes())?;
        }
        Ok(true)
    }

    fn forget_asker(&mut self, key: &Key, rank: u32, id: u64) {
        let step = self.steps.get_mut(&key.step);
        if let Some(askers) = step.and_then(|step| step.askers.get_mut(key)) {
            askers.retain(|asker| (asker.rank, asker.id) != (rank, id));
        }
    }

    fn producer_of(&self, id: u64) -> Result<u32> {
        match self.pending.get(&id) {
            Some(Pending::Asked(key, _) | Pending::Reading(key, ..)) => Ok(key.producer),
            _ => bail!("receive {id} is over"),
        }
    }

    /// Waits for a tensor that is not dead.
    ///
    /// # Errors
    /// As [`Rendezvous::wait_produced`], and if it is dead.
    pub fn wait(&mut self, id: u64) -> Result<Rc<Tensor>> {
        match self.wait_produced(id)? {
            Produced::Tensor(tensor) => Ok(tensor),
            Produced::Dead => bail!("receive {id} has brought a dead tensor"),
        }
    }

    /// Waits for a tensor.
    ///
    /// # Errors
    /// [`Aborted`] if its step was aborted or is over; [`Cancelled`]; an error of the group that names the rank if one has ended.
    pub fn wait_produced(&mut self, id: u64) -> Result<Produced> {
        wait_until(Some(DEADLINE), || {
            if let Some(Pending::Asked(..) | Pending::Reading(..)) = self.pending.get(&id) {
                self.progress()?;
                return Ok(None);
            }
            match self.pending.remove(&id) {
                Some(Pending::Done(produced)) => Ok(Some(produced)),
                Some(Pending::Failed(failure)) => Err(failure.into()),
                _ => bail!("receive {id} is unknown"),
            }
        })
    }

    /// Aborts a step at all ranks: its receives fail with this reason, and so do later sends. What does not fit into a message is cut off. At a rank that has heard of an abort of
    /// the step before, the first reason stays.
    pub fn abort(&mut self, step: u64, reason: &str) -> Result<()> {
        // Here, too, so that all ranks have the same reason.
        let reason = fitting(reason);
        self.aborted(step, reason);
        let note = Note::Abort { step, reason }.to_bytes();
        let peers: Vec<u32> = self.peers.keys().copied().collect();
        peers
            .into_iter()
            .try_for_each(|peer| self.post(peer, &note))
    }

    fn aborted(&mut self, step: u64, reason: &str) {
        // The first reason stays, as TensorFlow's status keeps its first error: later ones are mostly its consequences.
        if self.end_of(step).is_some() {
            return;
        }
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
        self.fail_pending(&aborted);
    }

    fn fail_pending(&mut self, aborted: &Aborted) {
        for pending in self.pending.values_mut() {
            // One that is being read ends first: the device writes into its memory.
            if matches!(pending, Pending::Asked(key, _) if key.step == aborted.step) {
                *pending = Pending::Failed(NoTensor::Aborted(aborted.clone()));
            }
        }
    }

    /// Ends a step at this rank: drops tensors that nobody has asked for, and fails receives that wait, here and at other ranks for tensors of this one. TensorFlow's `Cleanup` of a step aborts
    /// them likewise.
    pub fn finish_step(&mut self, step: u64) -> Result<()> {
        self.over.insert(step);
        let reason = OVER.into();
        self.fail_pending(&Aborted { step, reason });
        let askers = self.steps.remove(&step).map(|step| step.askers);
        let askers = askers.into_iter().flat_map(HashMap::into_values).flatten();
        for asker in askers {
            self.refuse(&asker, OVER)?;
        }
        Ok(())
    }

    /// Tells a rank that its request fails. Those of this rank have failed with their step.
    fn refuse(&mut self, asker: &Asker, reason: &str) -> Result<()> {
        if asker.rank == self.group.rank() {
            return Ok(());
        }
        self.refused += 1;
        let id = asker.id;
        let reason = fitting(reason);
        self.post(asker.rank, &Note::Refused { id, reason }.to_bytes())
    }

    /// Whether the device reads the tensor of this receive, as far as this rank has looked.
    pub fn is_being_read(&self, id: u64) -> bool {
        matches!(self.pending.get(&id), Some(Pending::Reading(..)))
    }

    /// Whether a rank waits for this key here.
    pub fn is_awaited(&self, key: &Key) -> bool {
        let step = self.steps.get(&key.step);
        let askers = step.and_then(|step| step.askers.get(key));
        askers.is_some_and(|askers| !askers.is_empty())
    }

    /// Somebody asks for a key.
    fn asked(&mut self, key: Key, asker: Asker) -> Result<()> {
        if let Some(reason) = self.stale(&key) {
            if asker.rank == self.group.rank() {
                let step = key.step;
                let failed = NoTensor::Aborted(Aborted { step, reason });
                self.pending.insert(asker.id, Pending::Failed(failed));
                return Ok(());
            }
            return self.refuse(&asker, &reason);
        }
        // A request that comes late must not make the step anew.
        if let Some(Aborted { reason, .. }) = self.end_of(key.step) {
            return self.refuse(&asker, &reason);
        }
        let step = self.steps.entry(key.step).or_default();
        match step.tensors.get_mut(&key).and_then(VecDeque::pop_front) {
            None => {
                step.askers.entry(key).or_default().push_back(asker);
                Ok(())
            }
            Some(produced) => {
                self.count(|counts| counts.asked_after += 1);
                self.answer(&asker, produced)
            }
        }
    }

    fn answer(&mut self, asker: &Asker, produced: Produced) -> Result<()> {
        if asker.rank == self.group.rank() {
            self.pending.insert(asker.id, Pending::Done(produced));
            return Ok(());
        }
        let Produced::Tensor(tensor) = produced else {
            let note = Note::Dead { id: asker.id };
            return self.post(asker.rank, &note.to_bytes());
        };
        match asker.method {
            Method::Read | Method::ReadAndCopy => {
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
                let values = tensor.buffer.slice()?;
                let header = Note::Encoded {
                    id: asker.id,
                    values: &[],
                };
                let header = header.to_bytes();
                let len_bytes = u64::from(values.len_bytes());
                let message = self.memory.alloc(header.len() as u64 + len_bytes)?;
                let region = &self.memory.region;
                region.write(message.at, &header)?;
                region.copy_from(message.at + header.len() as u64, values)?;
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
        peer.unsent.push_back(buffer);
        let sent = peer.send_messages();
        Ok(sent.map_err(|error| self.group.cause_of(error))?)
    }

    /// Does what there is to do, and does not wait.
    fn progress(&mut self) -> Result<()> {
        self.look().map_err(|error| match error.downcast() {
            // An endpoint only reports that it failed; the group knows which rank has ended.
            Ok(error) => self.group.cause_of(error).into(),
            Err(error) => error,
        })
    }

    fn look(&mut self) -> Result<()> {
        self.take_messages()?;
        self.take_completions()
    }

    /// Does what the messages of the peers ask for.
    pub fn take_messages(&mut self) -> Result<()> {
        loop {
            let mut queues: Vec<&mut MessageQueue> = self
                .peers
                .values_mut()
                .map(|peer| &mut peer.queue)
                .collect();
            let into = [self.inbox.slice()?];
            let received = MessageQueue::recv_any_now(&mut queues, &into, Some(Duration::ZERO));
            let (from, len_bytes) = match received {
                Err(Error::Timeout { .. }) => return Ok(()),
                received => received?,
            };
            let from = *self.peers.keys().nth(from).context("a queue")?;
            self.received(from, len_bytes)?;
        }
    }

    /// Completes the receives whose tensors were read, and takes back what peers have read. Sends no message that is not there already.
    fn take_completions(&mut self) -> Result<()> {
        let mut read = Vec::new();
        let mut released = Vec::new();
        for peer in self.peers.values_mut() {
            while peer.endpoint.poll_cq(QueueKind::Send)?.is_some() {
                // The requests of a connection complete in order.
                read.extend(peer.signaled.pop_front().flatten());
            }
            while let Some(released_one) = peer.endpoint.poll_cq(QueueKind::Recv)? {
                peer.endpoint.post_recv(0, &[])?;
                released.extend(released_one.imm);
            }
            while let Some((posted, _)) = peer.posted.front()
                && peer.queue.is_sent(posted)?
            {
                peer.posted.pop_front();
            }
            peer.send_messages()?;
        }
        for number in released {
            self.lent
                .remove(&number)
                .context("an unknown tensor was released")?;
        }
        for id in read {
            let Some(Pending::Reading(key, method, mut tensor)) = self.pending.remove(&id) else {
                bail!("receive {id} was not being read");
            };
            if method == Method::ReadAndCopy {
                let own = self.memory.tensor(tensor.len)?;
                let read = tensor.buffer.slice()?;
                self.copied(read.len_bytes().into());
                self.memory.region.copy_from(own.buffer.at, read)?;
                tensor = own;
            }
            self.complete(id, key.step, tensor);
        }
        Ok(())
    }

    /// Waits until there is room for a read and the release behind it. The completions of all peers are taken meanwhile: a peer whose releases wait for receives of this rank may wait
    /// for room, too.
    fn wait_for_room(&mut self, peer: u32) -> Result<()> {
        wait_until(Some(DEADLINE), || {
            let with = self.peers.get_mut(&peer).context("no such rank")?;
            if with.endpoint.room(QueueKind::Send) >= 2 {
                return Ok(Some(()));
            }
            self.take_completions().map(|()| None)
        })
    }

    fn complete(&mut self, id: u64, step: u64, tensor: Tensor) {
        let aborted = self.steps.get(&step).and_then(|step| step.aborted.clone());
        self.count(|counts| counts.received += 1);
        let pending = match aborted {
            Some(aborted) => Pending::Failed(NoTensor::Aborted(aborted)),
            None => Pending::Done(Produced::Tensor(Rc::new(tensor))),
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
                let (rank, own) = (from, self.group.rank());
                let asker = Asker { rank, id, method };
                // A wrong request is the error of the rank that made it.
                match Key::parse(key) {
                    Ok(key) if (key.producer, key.consumer) == (own, from) => {
                        self.asked(key, asker)
                    }
                    Ok(key) => {
                        self.refuse(&asker, &format!("rank {from} asks rank {own} for {key}"))
                    }
                    Err(error) => self.refuse(&asker, &error.to_string()),
                }
            }
            Note::Located {
                id,
                number,
                len,
                addr,
                rkey,
            } => {
                self.wait_for_room(from)?;
                let peer = self.peers.get_mut(&from).context("no such rank")?;
                let mut is_read = false;
                match self.pending.remove(&id) {
                    Some(Pending::Asked(key, method)) => {
                        let memory = match method {
                            Method::ReadAndCopy => &self.transit,
                            _ => &self.memory,
                        };
                        let tensor = memory.tensor(len as usize)?;
                        let into = [tensor.buffer.slice()?];
                        let remote = RemoteSlice::new(addr, rkey, tensor.buffer.len_bytes);
                        peer.endpoint.post_send(&Work::read(&into, remote))?;
                        self.reads.push(ReadPlaces {
                            producer: from,
                            from: addr,
                            to: memory.region.remote().addr + tensor.buffer.at,
                            len_bytes: tensor.buffer.len_bytes,
                        });
                        peer.signaled.push_back(Some(id));
                        is_read = true;
                        self.pending
                            .insert(id, Pending::Reading(key, method, tensor));
                    }
                    // The step was aborted or the receive cancelled meanwhile. The producer is to have its tensor back all the same.
                    Some(Pending::Failed(failure)) => {
                        self.pending.insert(id, Pending::Failed(failure));
                        self.dropped += 1;
                    }
                    None => self.dropped += 1,
                    Some(_) => bail!("rank {from} has answered twice"),
                }
                // Gives the tensor back, and must not overtake the read. Without a read it is signaled: the place of an unsignaled request is free when a later signaled one is complete,
                // and no later read need come.
                let release = Work::write(&[], RemoteSlice::new(addr, rkey, 0));
                let release = release.imm(number).fence(true).signaled(!is_read);
                peer.endpoint.post_send(&release)?;
                peer.signaled.extend((!is_read).then_some(None));
                Ok(())
            }
            Note::Encoded { id, .. } => {
                let key = match self.pending.get(&id) {
                    Some(Pending::Asked(key, _)) => key.clone(),
                    _ => {
                        self.dropped += 1;
                        return Ok(());
                    }
                };
                let values = len_bytes - ENCODED_HEADER as u64;
                let tensor = self.memory.tensor(values as usize / 4)?;
                let region = &self.memory.region;
                let from = region.slice(inbox + ENCODED_HEADER as u64, values)?;
                region.copy_from(tensor.buffer.at, from)?;
                self.copied(values);
                self.complete(id, key.step, tensor);
                Ok(())
            }
            Note::Abort { step, reason } => {
                self.aborted(step, reason);
                Ok(())
            }
            Note::Refused { id, reason } => {
                if let Some(pending) = self.pending.get_mut(&id)
                    && let Pending::Asked(key, _) = pending
                {
                    let (step, reason) = (key.step, reason.into());
                    *pending = Pending::Failed(NoTensor::Aborted(Aborted { step, reason }));
                }
                Ok(())
            }
            Note::Cancel { id, key } => {
                // A request with another key was refused.
                if let Ok(key) = Key::parse(key) {
                    self.forget_asker(&key, from, id);
                }
                Ok(())
            }
            Note::Dead { id } => {
                if let Some(pending) = self.pending.get_mut(&id)
                    && matches!(pending, Pending::Asked(..))
                {
                    *pending = Pending::Done(Produced::Dead);
                }
                Ok(())
            }
        }
    }

    /// Goes on until no peer needs this rank any more: all of them call it.
    pub fn drain(&mut self, name: &str) -> Result<()> {
        self.until(name, |r| {
            let is_done = |peer: &Peer| {
                peer.unsent.is_empty() && peer.posted.is_empty() && peer.signaled.is_empty()
            };
            r.lent.is_empty() && r.peers.values().all(is_done)
        })?;
        Ok(self.group.barrier()?)
    }

    /// Goes on until something is so.
    pub fn until(&mut self, what: &str, is_so: impl Fn(&Self) -> bool) -> Result<()> {
        wait_until(Some(DEADLINE), || -> Result<Option<()>> {
            if is_so(self) {
                return Ok(Some(()));
            }
            self.progress().map(|()| None)
        })
        .with_context(|| what.to_owned())
    }

    /// Whether all tensors of a step were asked for.
    pub fn is_taken(&self, step: u64) -> bool {
        let step = self.steps.get(&step);
        step.is_none_or(|step| step.tensors.values().all(VecDeque::is_empty))
    }

    /// Whether a step was heard of that is not over.
    pub fn knows(&self, step: u64) -> bool {
        self.steps.contains_key(&step)
    }

    /// Whether an abort of a step was heard of.
    pub fn knows_abort(&self, step: u64) -> bool {
        let step = self.steps.get(&step);
        step.is_some_and(|step| step.aborted.is_some())
    }

    /// Bytes that are neither free nor the rendezvous' own.
    pub fn held_bytes(&self) -> u64 {
        let free = self.memory.free.borrow().values().sum::<u64>();
        self.memory.region.len_bytes() - free - self.inbox.size
    }
}
