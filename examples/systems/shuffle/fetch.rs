//! Fetches by RDMA READ.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use doorbell::{Endpoint, Error, QueueKind, Region, Work, wait_until};

use crate::plan::{Flight, Location, Plan};
use crate::{Attempt, DEADLINE, Held, Moment};

/// The fetch of a block failed: what Spark calls a FetchFailedException. The rank that has ended is in the cause; it need not be the one that was fetched from, because the group fails
/// as a whole.
#[derive(Debug)]
pub struct FetchFailed {
    split: u32,
    rank: u32,
    cause: Error,
}

impl fmt::Display for FetchFailed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let FetchFailed { split, rank, cause } = self;
        write!(f, "fetch of split {split} from rank {rank}: {cause}")
    }
}

impl std::error::Error for FetchFailed {}

/// What a fetch did, counted where it posts and polls, and not where it decides to.
#[derive(Clone, Copy, Default)]
pub struct Fetched {
    pub reads: u64,
    pub completions: u64,
    /// The most bytes that were asked for and had not come.
    pub most_bytes: u64,
}

impl Attempt<'_> {
    pub fn fetch_failed(&self, split: u32, rank: u32, error: Error) -> FetchFailed {
        // The endpoint only reports that it failed; the group knows which rank has ended.
        let cause = match self.group.cause_of(error) {
            Error::Rank { rank, reason } => Error::Rank {
                rank: self.name(rank),
                reason,
            },
            other => other,
        };
        FetchFailed {
            split,
            rank: self.name(rank),
            cause,
        }
    }

    /// Fetches by RDMA READ: no code of the application runs at the rank that is read from.
    pub fn fetch_by_read(
        &self,
        held: &Held,
        plan: &Plan,
        locations: &BTreeMap<u32, Location>,
        endpoints: &mut BTreeMap<u32, Endpoint>,
        fetched: &Region,
    ) -> Result<()> {
        copy_local(held, plan, fetched)?;
        let mut flight = Flight::new(plan, self.options.in_flight);
        let batches = plan.batches.values().map(Vec::len).sum::<usize>();
        let mut posted = 0;
        let (mut fetched_now, mut under_way) = (Fetched::default(), 0);
        while !flight.is_over() {
            while let Some((peer, batch)) = flight.next(|peer, batch| {
                let endpoint = endpoints.get_mut(&peer);
                endpoint.is_some_and(|e| e.room(QueueKind::Send) as usize >= batch.len())
            }) {
                let endpoint = endpoints.get_mut(&peer).context("an endpoint")?;
                for (index, piece) in batch.iter().enumerate() {
                    let slices = [fetched.slice(piece.to, piece.len_bytes)?];
                    let records = &locations[&piece.split].records;
                    let remote = records.slice(piece.from, piece.len_bytes)?;
                    // Reads of a connection complete in order, so the last one's completion is that of all.
                    let work = Work::read(&slices, remote).signaled(index + 1 == batch.len());
                    endpoint
                        .post_send(&work)
                        .map_err(|error| self.fetch_failed(piece.split, peer, error))?;
                    fetched_now.reads += 1;
                    under_way += piece.len_bytes;
                    fetched_now.most_bytes = fetched_now.most_bytes.max(under_way);
                }
                posted += 1;
            }
            if self.options.victim(Moment::Fetch).is_some() && 2 * posted >= batches {
                self.read_until_killed(plan, locations, endpoints, fetched)?;
            }
            wait_until(Some(DEADLINE), || -> Result<_> {
                let mut come = None;
                for (peer, endpoint) in endpoints.iter_mut() {
                    while let Some(piece) = flight.first_of(*peer).first() {
                        let polled = endpoint.poll_cq(QueueKind::Send);
                        let polled =
                            polled.map_err(|error| self.fetch_failed(piece.split, *peer, error))?;
                        if polled.is_none() {
                            break;
                        }
                        fetched_now.completions += 1;
                        let batch = flight.first_of(*peer).iter();
                        under_way -= batch.map(|piece| piece.len_bytes).sum::<u64>();
                        flight.complete(*peer);
                        come = Some(());
                    }
                }
                Ok(come)
            })?;
        }
        self.fetched.set(fetched_now);
        Ok(())
    }

    /// At the neighbour of the rank that is to be killed: asks for that in the middle of a fetch, and reads from it until it is gone, so that it ends with reads under way.
    fn read_until_killed(
        &self,
        plan: &Plan,
        locations: &BTreeMap<u32, Location>,
        endpoints: &mut BTreeMap<u32, Endpoint>,
        fetched: &Region,
    ) -> Result<()> {
        let Some(victim) = self
            .names
            .iter()
            .position(|name| Some(*name) == self.options.kill)
        else {
            return Ok(()); // It is gone.
        };
        let victim = victim as u32;
        if self.group.rank() != (victim + 1) % self.group.size() {
            return Ok(());
        }
        let batches = plan.batches.get(&victim);
        let piece = batches.and_then(|batches| batches.first()?.first());
        let piece = piece.context("this rank fetches nothing from the one that is to be killed")?;
        let endpoint = endpoints.get_mut(&victim).context("an endpoint")?;
        self.group.store().set(b"shuffle/kill", &[], DEADLINE)?;
        let end = Instant::now() + DEADLINE;
        while Instant::now() < end {
            let slices = [fetched.slice(piece.to, piece.len_bytes)?];
            let remote = locations[&piece.split]
                .records
                .slice(piece.from, piece.len_bytes)?;
            let read = endpoint.wait_room(QueueKind::Send, 1, Some(DEADLINE));
            read.and_then(|()| endpoint.post_send(&Work::read(&slices, remote)))
                .and_then(|_| endpoint.wait_cq(QueueKind::Send, Some(DEADLINE)))
                .map_err(|error| self.fetch_failed(piece.split, victim, error))?;
        }
        bail!("rank {} was not killed", self.name(victim))
    }
}

/// Blocks in this rank's own outputs are copied, whatever the method.
pub fn copy_local(held: &Held, plan: &Plan, fetched: &Region) -> Result<()> {
    for piece in &plan.local {
        let records = &held.outputs[&piece.split].records;
        fetched.copy_from(piece.to, records.slice(piece.from, piece.len_bytes)?)?;
    }
    Ok(())
}
