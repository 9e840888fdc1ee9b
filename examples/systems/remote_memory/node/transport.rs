//! The endpoints between the ranks: posts whose completions are taken when there is time, and receives of messages.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use doorbell::{Completion, Endpoint, Error, Group, QueueKind, Work};

use super::directory::Request;
use super::message::{Kind, MESSAGE_BYTES, Message};
use super::{DEADLINE, LINE_BYTES, Node};

/// Receives that are posted for each peer: the depth of an endpoint of a group.
pub(super) const RECEIVES: u64 = 128;

/// One of so many posts without a completion of its own is signaled.
const POSTS_PER_SIGNAL: u32 = 8;

/// Signaled posts under way, at most: with the others they fit into the send queue.
const SIGNALS: u32 = 12;

/// `wr_id` of messages; that of a line that leaves its slot is one more than the slot's number.
pub(super) const MESSAGE: u64 = 0;

pub(super) const DIRECT: u64 = u64::MAX;

pub(super) struct Link {
    pub(super) endpoint: Endpoint,
    pub(super) unsignaled: u32,
    pub(super) signals: u32,
}

/// Takes a completion. In place of a flushed one, the error is the failure that flushed it.
fn poll(group: &Group, endpoint: &mut Endpoint, queue: QueueKind) -> Result<Option<Completion>> {
    let polled = endpoint.poll_cq(queue);
    Ok(polled.map_err(|error| {
        let first = endpoint.failure().map_or(error, Error::Work);
        group.cause_of(first)
    })?)
}

impl Node {
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
            Kind::Evicted => self.written_back(line),
            Kind::Barrier => {
                self.arrived[place as usize] = line;
                Ok(())
            }
        }
    }

    /// A send comes behind the writes of its endpoint, so that a grant comes behind its line.
    pub(super) fn send(&mut self, to: u32, message: Message) -> Result<()> {
        self.counts.messages += 1;
        self.post(to, &Work::send_inline(&message.to_bytes()), false, MESSAGE)
    }

    /// Writes the line at `from` here to `place` at another rank. If it leaves a slot, this is not used again before the write is done.
    pub(super) fn write_line(
        &mut self,
        to: u32,
        from: u64,
        place: u64,
        leaves: Option<usize>,
    ) -> Result<()> {
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

    pub(super) fn post(
        &mut self,
        to: u32,
        work: &Work<'_>,
        signaled: bool,
        wr_id: u64,
    ) -> Result<()> {
        let started = Instant::now();
        while self.links[to as usize].signals >= SIGNALS {
            self.collect(to)?;
            // The peer may be in this loop, too, because of this rank's receives. They are handled later: a message is not posted in the middle of another one's handling.
            self.receive()?;
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
            let Some(completion) = poll(&self.group, &mut link.endpoint, QueueKind::Send)? else {
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

    /// Takes the messages that have come, so that their receives are posted again.
    fn receive(&mut self) -> Result<()> {
        let rank = self.rank();
        for peer in (0..self.size()).filter(|peer| *peer != rank) {
            loop {
                let endpoint = &mut self.links[peer as usize].endpoint;
                let Some(completion) = poll(&self.group, endpoint, QueueKind::Recv)? else {
                    break;
                };
                let number = u64::from(peer) * RECEIVES + completion.wr_id;
                let at = self.receives_at + number * MESSAGE_BYTES;
                let mut bytes = [0; MESSAGE_BYTES as usize];
                self.region.read(at, &mut bytes)?;
                let slices = [self.region.slice(at, MESSAGE_BYTES)?];
                endpoint.post_recv(completion.wr_id, &slices)?;
                self.received
                    .push_back((peer, Message::from_bytes(&bytes)?));
            }
        }
        Ok(())
    }

    /// Handles the messages that have come. Returns whether there were any.
    pub(super) fn serve(&mut self) -> Result<bool> {
        self.receive()?;
        let found = !self.received.is_empty();
        // With those that come meanwhile while a post waits.
        while let Some((from, message)) = self.received.pop_front() {
            self.handle(from, message)?;
        }
        Ok(found)
    }

    /// Goes on until something is so. Fails if nothing has come for a while.
    pub(super) fn wait(&mut self, what: &str, until: impl Fn(&Node) -> bool) -> Result<()> {
        self.wait_at_most(DEADLINE, what, until)
    }

    /// As [`Node::wait`], with this longest time in which nothing comes.
    pub(super) fn wait_at_most(
        &mut self,
        longest: Duration,
        what: &str,
        until: impl Fn(&Node) -> bool,
    ) -> Result<()> {
        let mut idle = 0_u32;
        let mut started = None;
        while !until(self) {
            for peer in 0..self.size() {
                self.collect(peer)?;
            }
            if self.serve()? {
                (idle, started) = (0, None);
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
                    started.elapsed() < longest,
                    "{what} of rank {}: nothing has come for {longest:?}",
                    self.rank()
                );
            }
        }
        Ok(())
    }
}
