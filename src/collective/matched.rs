//! Operations that the ranks have matched before they launch them: each message is written straight into the memory of its receiver.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::communicator::{Collective, Communicator};
use super::schedule::{OperandSpan, Schedule, Transfer};
use crate::message::MessageQueue;
use crate::region::{Access, Region, RemoteSlice, Slice};
use crate::{Error, Result, StateKind};

/// What the ranks have told each other of an operation.
pub(super) struct Matched {
    /// By round and message: where it goes.
    pub(super) targets: Vec<Vec<RemoteSlice>>,
    /// By round: the receives whose memory is free when the round begins.
    pub(super) ready: Vec<Vec<ReadyReceive>>,
}

/// A receive whose memory may be written from now on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ReadyReceive {
    pub(super) peer: u32,
    /// Messages with bytes from that peer which come before it and have not been received.
    pub(super) ahead: u32,
}

/// For each round the receives whose memory is not used between its beginning and their own round, the earliest such round. `range` is where the memory of a span begins
/// and ends, and `limit` how many messages before its own a receive of a peer may be ready.
pub(super) fn ready_rounds(
    schedule: &Schedule,
    range: impl Fn(OperandSpan) -> (u64, u64),
    limit: impl Fn(u32) -> u32,
) -> Vec<Vec<ReadyReceive>> {
    let rounds = &schedule.rounds;
    let mut ready = vec![Vec::new(); rounds.len()];
    // What each round uses, sorted by where it begins, and received messages by peer before each round.
    let used: Vec<Vec<(u64, u64)>> = rounds
        .iter()
        .map(|round| {
            let transfers = round.sends.iter().chain(&round.receives);
            let steps = round.then.iter().flat_map(|step| {
                let (first, second, into) = step.spans();
                [Some(first), second, Some(into)].into_iter().flatten()
            });
            let spans = transfers.map(|it| it.span).chain(steps);
            spans.filter(|span| span.len > 0).map(&range).collect()
        })
        .collect();
    let mut received = BTreeMap::<u32, Vec<usize>>::new();
    for (at, round) in rounds.iter().enumerate() {
        for receive in with_bytes(&round.receives) {
            let (start, end) = range(receive.span);
            let is_free = |round: &usize| {
                used[*round]
                    .iter()
                    .all(|(from, to)| *to <= start || end <= *from)
            };
            let peers = received.entry(receive.peer).or_default();
            // Of the receives of that peer before this one, those of the round and behind it come in between.
            let ahead =
                |round: usize| (peers.len() - peers.partition_point(|it| *it < round)) as u32;
            // Earlier rounds have as many ahead or more, so none is looked at behind the limit.
            let may_begin = |round: &usize| ahead(*round) < limit(receive.peer) && is_free(round);
            let first = (0..at).rev().take_while(may_begin).last().unwrap_or(at);
            ready[first].push(ReadyReceive {
                peer: receive.peer,
                ahead: ahead(first),
            });
            peers.push(at);
        }
    }
    ready
}

fn with_bytes(transfers: &[Transfer]) -> impl Iterator<Item = &Transfer> {
    transfers.iter().filter(|transfer| transfer.span.len > 0)
}

/// Length of the head of what a rank tells a peer: a number of the operation, the number of messages, whether the rank refuses to match it, and zeros, 4 bytes each.
const HEAD: usize = 16;
/// Length of an entry for a message: address (8 bytes), key (4), length (4).
const ENTRY: usize = 16;

/// What one rank tells another: where it receives the messages of that rank.
struct Told {
    operation: u32,
    refuses: bool,
    targets: Vec<RemoteSlice>,
}

impl Told {
    fn to_bytes(&self) -> Vec<u8> {
        let head = [
            self.operation,
            self.targets.len() as u32,
            self.refuses.into(),
            0,
        ];
        let mut bytes: Vec<u8> = head.iter().flat_map(|word| word.to_le_bytes()).collect();
        for target in &self.targets {
            bytes.extend(target.addr().to_le_bytes());
            bytes.extend(target.rkey().to_le_bytes());
            bytes.extend((target.len_bytes() as u32).to_le_bytes());
        }
        bytes
    }

    /// Reads what a peer has told. None if it is something else.
    fn from_bytes(bytes: &[u8]) -> Option<Told> {
        let word = |at: usize| {
            bytes
                .get(at..)?
                .first_chunk()
                .map(|it| u32::from_le_bytes(*it))
        };
        let entries = bytes.get(HEAD..)?.chunks_exact(ENTRY);
        if word(4)? as usize != entries.len() || !entries.remainder().is_empty() {
            return None;
        }
        let targets = entries.filter_map(|entry| {
            let addr = u64::from_le_bytes(*entry.first_chunk()?);
            let word = |at: usize| entry[at..].first_chunk().map(|it| u32::from_le_bytes(*it));
            Some(RemoteSlice::new(addr, word(8)?, word(12)?.into()))
        });
        Some(Told {
            operation: word(0)?,
            refuses: word(8)? != 0,
            targets: targets.collect(),
        })
    }
}

/// A number by which ranks find out that they match different operations: the 32-bit FNV-1a hash of its name and algorithm.
fn number_of(collective: &Collective) -> u32 {
    let name = format!("{}/{}", collective.name, collective.algorithm());
    let hash = |hash: u32, byte: u8| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193);
    name.bytes().fold(0x811c_9dc5, hash)
}

impl Communicator {
    /// Matches the messages of an operation with those of the other ranks, once for all its launches: each rank tells the others where it receives. The messages are then written
    /// straight into place by the NIC: no slot holds them, and neither the CPU nor a kernel copies them. All ranks call this, for the same operations in the same order.
    ///
    /// A message waits, on the stream of its sender, until the stream of its receiver has come so far that the memory is free. Copies and reductions between messages stay
    /// what they were.
    ///
    /// This waits until the streams have executed what they were given of this communicator, also by graphs that are instantiated and not launched yet, and then for the other ranks: for at most
    /// `timeout`; `None` waits for ever. Matching again does nothing.
    ///
    /// # Errors
    /// [`Error::State`] if memory that a message is received into has no [`Access::REMOTE_WRITE`], or if another rank refuses or prepares another operation: no rank has matched it then.
    /// [`Error::Foreign`] for an operation of another communicator, of which the other ranks learn nothing. [`Error::Timeout`] and [`Error::Work`], after which the communicator is aborted.
    pub fn match_ahead(
        &mut self,
        collective: &mut Collective,
        timeout: Option<Duration>,
    ) -> Result<()> {
        self.check_own(collective)?;
        if collective.matched.is_some() {
            return Ok(());
        }
        let own = self.own_targets(collective);
        let end = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let left = || end.map(|end| end.saturating_duration_since(Instant::now()));
        let matched = self.tell_all(collective, own, &left);
        match matched {
            Ok(found) => {
                collective.matched = Some(Arc::new(found?));
                Ok(())
            }
            Err(error) => {
                self.abort();
                Err(match error {
                    Error::Timeout { .. } => Error::Timeout {
                        operation: "the match of a collective operation",
                        timeout: timeout.unwrap_or_default(),
                    },
                    error => error,
                })
            }
        }
    }

    /// Where this rank receives, by peer.
    fn own_targets(&self, collective: &Collective) -> Result<Vec<Vec<RemoteSlice>>> {
        let mut targets = vec![Vec::new(); self.size() as usize];
        for receive in collective
            .schedule
            .rounds
            .iter()
            .flat_map(|round| &round.receives)
        {
            let target = match receive.span.len {
                0 => RemoteSlice::new(0, 0, 0),
                len => {
                    let (region, offset) = collective.memories.place(receive.span)?;
                    check_written(collective.name, region)?;
                    region.remote().slice(offset, len)?
                }
            };
            targets[receive.peer as usize].push(target);
        }
        Ok(targets)
    }

    /// Tells all other ranks, hears them, and agrees with them. The outer error is one of the connections, the inner one is that of all ranks.
    fn tell_all(
        &mut self,
        collective: &Collective,
        own: Result<Vec<Vec<RemoteSlice>>>,
        left: &dyn Fn() -> Option<Duration>,
    ) -> Result<Result<Matched>> {
        for queue in self.queues.iter_mut().flatten() {
            queue.await_streams(left())?;
        }
        let schedule = &collective.schedule;
        let count = self.size();
        let operation = number_of(collective);
        let mut sends: Vec<Vec<u64>> = vec![Vec::new(); count as usize];
        for send in schedule.rounds.iter().flat_map(|round| &round.sends) {
            sends[send.peer as usize].push(send.span.len);
        }
        let told: Vec<Vec<u8>> = (0..count as usize)
            .map(|peer| {
                let targets = own.as_ref().ok().map(|own| own[peer].clone());
                let refuses = targets.is_none();
                let targets = targets.unwrap_or_default();
                Told {
                    operation,
                    refuses,
                    targets,
                }
                .to_bytes()
            })
            .collect();
        let expected: Vec<usize> = sends
            .iter()
            .map(|sends| HEAD + ENTRY * sends.len())
            .collect();
        let heard = self.swap(&told, &expected, left)?;
        let mut targets = Vec::with_capacity(count as usize);
        let mut verdict = own.map(|_| ());
        for (peer, heard) in heard.into_iter().enumerate() {
            let found = match heard {
                // This rank itself.
                None => Ok(Vec::new()),
                Some(bytes) => agreed(
                    collective,
                    peer as u32,
                    bytes.as_deref(),
                    operation,
                    &sends[peer],
                ),
            };
            match found {
                Ok(found) => targets.push(found.into_iter()),
                Err(error) => {
                    targets.push(Vec::new().into_iter());
                    // Its own reason is the better one.
                    verdict = verdict.and(Err(error));
                }
            }
        }
        // No rank may launch what another one has not matched.
        let votes = vec![vec![u8::from(verdict.is_err())]; count as usize];
        let heard = self.swap(&votes, &vec![1; count as usize], left)?;
        for (peer, vote) in heard.into_iter().enumerate() {
            if let Some(vote) = vote
                && vote.as_deref() != Some(&[0])
            {
                let refused = refused(
                    collective,
                    peer as u32,
                    "has not matched it, and has the reason",
                );
                verdict = verdict.and(Err(refused));
            }
        }
        if let Err(error) = verdict {
            return Ok(Err(error));
        }
        let of_round = |sends: &[Transfer]| {
            let next = |send: &Transfer| targets[send.peer as usize].next();
            sends.iter().filter_map(next).collect()
        };
        let targets = schedule
            .rounds
            .iter()
            .map(|round| &round.sends[..])
            .map(of_round)
            .collect();
        // Places were found of all receives, so of all that is used.
        let range = |span: OperandSpan| {
            let place = collective.memories.place(span);
            let start = place.map_or(0, |(region, offset)| region.remote().addr + offset);
            (start, start + span.len)
        };
        let limit = |peer: u32| {
            let queue = self.queues.get(peer as usize).and_then(Option::as_ref);
            queue.map_or(1, MessageQueue::ready_limit)
        };
        Ok(Ok(Matched {
            targets,
            ready: ready_rounds(schedule, range, limit),
        }))
    }

    /// Sends each other rank its bytes, and receives as many as are expected from each. By rank: none of this one, and an inner none of a rank whose bytes are more.
    pub(super) fn swap(
        &mut self,
        bytes: &[Vec<u8>],
        expected: &[usize],
        left: &dyn Fn() -> Option<Duration>,
    ) -> Result<Vec<Option<Option<Vec<u8>>>>> {
        let lens = |lens: &mut dyn Iterator<Item = usize>| lens.map(|len| len as u64).sum::<u64>();
        let sent = lens(&mut bytes.iter().map(Vec::len));
        let all = sent + lens(&mut expected.iter().copied());
        let region = Region::alloc(
            &self.domain,
            all.max(1),
            Access::LOCAL_WRITE | Access::REMOTE_READ,
        )?;
        let mut at = 0;
        let mut next = |len: usize| {
            let slice: Result<Slice<'_>> = region.slice(at, len as u64);
            at += len as u64;
            slice
        };
        let mut posted = Vec::new();
        for (queue, bytes) in self.queues.iter_mut().zip(bytes) {
            let slice = next(bytes.len())?;
            let Some(queue) = queue else { continue };
            region.write(slice.offset, bytes)?;
            posted.push(queue.start_send_now(&[slice], left())?);
        }
        let mut heard = Vec::with_capacity(expected.len());
        for (queue, expected) in self.queues.iter_mut().zip(expected) {
            let slice = next(*expected)?;
            let Some(queue) = queue else {
                heard.push(None);
                continue;
            };
            heard.push(Some(match queue.recv_now(&[slice], left()) {
                Ok(len_bytes) => {
                    let mut bytes = vec![0; len_bytes as usize];
                    region.read(slice.offset, &mut bytes)?;
                    Some(bytes)
                }
                Err(Error::Truncated { .. }) => None,
                Err(error) => return Err(error),
            }));
        }
        for (queue, sent) in self.queues.iter().flatten().zip(&posted) {
            queue.wait_send_now(sent, left())?;
        }
        Ok(heard)
    }
}

/// Where a peer receives, if it receives what this rank sends.
fn agreed(
    collective: &Collective,
    peer: u32,
    bytes: Option<&[u8]>,
    operation: u32,
    sends: &[u64],
) -> Result<Vec<RemoteSlice>> {
    let told = bytes.and_then(Told::from_bytes);
    if let Some(told) = &told {
        if told.refuses {
            return Err(refused(
                collective,
                peer,
                "refuses to match it, and has the reason",
            ));
        }
        if told.operation != operation {
            return Err(refused(
                collective,
                peer,
                "matches another operation or algorithm",
            ));
        }
    }
    let found = told.filter(|told| {
        told.targets
            .iter()
            .map(RemoteSlice::len_bytes)
            .eq(sends.iter().copied())
    });
    let found = found.ok_or_else(|| {
        refused(
            collective,
            peer,
            "receives messages of other lengths than this rank sends",
        )
    })?;
    Ok(found.targets)
}

fn refused(collective: &Collective, peer: u32, what: &str) -> Error {
    let reason = format!("rank {peer} {what}");
    Error::state(StateKind::WrongKind, collective.name, reason)
}

/// Fails for memory that a peer cannot write.
fn check_written(name: &'static str, region: &Region) -> Result<()> {
    if region.is_registered() && region.access().contains(Access::REMOTE_WRITE) {
        return Ok(());
    }
    let reason = "memory that a message is received into is deregistered, or does not have Access::REMOTE_WRITE";
    Err(Error::state(StateKind::NoAccess, name, reason))
}
