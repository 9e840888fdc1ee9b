//! The directory of a home: for each of its lines the ranks that have it, and the requests that wait for it.

use std::collections::VecDeque;

use anyhow::{Context, Result, bail, ensure};

use super::message::{Kind, Message};
use super::{LINE_BYTES, Node};

/// What a rank wants of a line.
#[derive(Clone, Copy)]
pub(super) struct Request {
    pub(super) from: u32,
    pub(super) write: bool,
    /// It had the line when it asked.
    pub(super) had_line: bool,
    /// Where its region takes the line.
    pub(super) place: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum State {
    Unshared,
    /// The bits of the ranks that may have it, besides the home.
    Shared(u64),
    Dirty(u32),
}

/// A request that the home cannot answer by itself.
pub(super) struct Transaction {
    pub(super) request: Request,
    /// Answers that are to come.
    pub(super) left: u32,
    pub(super) owner: Option<u32>,
    pub(super) needs_data: bool,
    /// The requester has had the line and written it back.
    pub(super) evicted: bool,
}

pub(super) struct Entry {
    pub(super) state: State,
    /// While it is there, other requests wait.
    pub(super) transaction: Option<Transaction>,
    pub(super) requests: VecDeque<Request>,
}

impl Node {
    pub(super) fn home(&self, line: u64) -> u32 {
        (line % u64::from(self.size())) as u32
    }

    pub(super) fn entry(&mut self, line: u64) -> Result<&mut Entry> {
        let at = line / u64::from(self.size());
        self.directory
            .get_mut(at as usize)
            .with_context(|| format!("line {line} is behind the end of the memory"))
    }

    /// Where the line is in the region of its home.
    pub(super) fn home_place(&self, line: u64) -> u64 {
        line / u64::from(self.size()) * LINE_BYTES
    }

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

    pub(super) fn enter(&mut self, line: u64, request: Request) -> Result<()> {
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
    pub(super) fn answered(&mut self, line: u64) -> Result<()> {
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

    pub(super) fn evicted(&mut self, line: u64, from: u32) -> Result<()> {
        let entry = self.entry(line)?;
        match &mut entry.transaction {
            // It got the line from the old owner, whose answer has not come yet.
            Some(transaction) if transaction.request.from == from => transaction.evicted = true,
            // The owner keeps the line for the forward of the transaction, and answers it behind this answer.
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
}
