//! What a rank fetches, and what it has asked for.

use std::collections::{BTreeMap, VecDeque};

use anyhow::{Context, Result};
use doorbell::{Access, Endpoint, QueueKind, Region, RemoteRegion, Work};

use crate::records::ENTRY;
use crate::{Attempt, DEADLINE, Held};

/// Where a split's output is.
pub struct Location {
    pub rank: u32,
    pub records: RemoteRegion,
    pub table: RemoteRegion,
}

/// A piece of a block: the unit that is read, or sent in a reply.
#[derive(Clone, Copy)]
pub struct Piece {
    pub split: u32,
    /// In the split's output.
    pub from: u64,
    /// In this rank's memory.
    pub to: u64,
    pub len_bytes: u64,
}

/// What a rank fetches.
pub struct Plan {
    /// By the rank that has them.
    pub batches: BTreeMap<u32, Vec<Vec<Piece>>>,
    /// Blocks in this rank's own outputs.
    pub local: Vec<Piece>,
    /// Where each partition of this rank is in the fetched memory.
    pub partitions: BTreeMap<u32, (u64, u64)>,
    pub len_bytes: u64,
}

impl Plan {
    pub fn remote_bytes(&self) -> u64 {
        let pieces = self.batches.values().flatten().flatten();
        pieces.map(|piece| piece.len_bytes).sum()
    }
}

impl Attempt<'_> {
    /// Reads the tables of all map outputs, and says from them what this rank fetches to which place.
    pub fn plan(
        &self,
        held: &Held,
        locations: &BTreeMap<u32, Location>,
        endpoints: &mut BTreeMap<u32, Endpoint>,
        partitions: &[u32],
    ) -> Result<Plan> {
        let options = self.options;
        let table_bytes = u64::from(options.partitions) * ENTRY;
        let tables = Region::alloc(
            self.group.domain(),
            u64::from(options.splits) * table_bytes,
            Access::LOCAL_WRITE,
        )?;
        for (split, location) in locations {
            let at = u64::from(*split) * table_bytes;
            if let Some(output) = held.outputs.get(split) {
                tables.copy_from(at, output.table.slice(0, table_bytes)?)?;
                continue;
            }
            let endpoint = endpoints.get_mut(&location.rank).context("an endpoint")?;
            let slices = [tables.slice(at, table_bytes)?];
            let remote = location.table.slice(0, table_bytes)?;
            let read = endpoint.post_send(&Work::read(&slices, remote));
            read.and_then(|_| endpoint.wait_cq(QueueKind::Send, Some(DEADLINE)))
                .map_err(|error| self.fetch_failed(*split, location.rank, error))?;
        }
        let mut plan = Plan {
            batches: BTreeMap::new(),
            local: Vec::new(),
            partitions: BTreeMap::new(),
            len_bytes: 0,
        };
        for partition in partitions {
            let start = plan.len_bytes;
            // Each rank begins with another mapper, so that not all read from one at a time.
            let first = self.group.rank() * options.splits / self.group.size();
            for turn in 0..options.splits {
                let split = (first + turn) % options.splits;
                let entry = u64::from(split) * table_bytes + u64::from(*partition) * ENTRY;
                let mut block = [0_u64; 2];
                tables.read_values(entry, &mut block)?;
                let [mut from, mut left] = block;
                while left > 0 {
                    let piece = Piece {
                        split,
                        from,
                        to: plan.len_bytes,
                        len_bytes: left.min(options.read_bytes.into()),
                    };
                    from += piece.len_bytes;
                    left -= piece.len_bytes;
                    plan.len_bytes += piece.len_bytes;
                    if held.outputs.contains_key(&split) {
                        plan.local.push(piece);
                        continue;
                    }
                    let batches = plan.batches.entry(locations[&split].rank).or_default();
                    match batches.last_mut() {
                        Some(batch) if batch.len() < options.batch => batch.push(piece),
                        _ => batches.push(vec![piece]),
                    }
                }
            }
            let len_bytes = plan.len_bytes - start;
            plan.partitions.insert(*partition, (start, len_bytes));
        }
        Ok(plan)
    }
}

/// Which batches have been asked for and have not come. The order of a peer's batches is that in which they come.
pub struct Flight<'a> {
    left: BTreeMap<u32, VecDeque<&'a [Piece]>>,
    under_way: BTreeMap<u32, VecDeque<&'a [Piece]>>,
    /// The peer of each batch that is under way, oldest first.
    order: VecDeque<u32>,
    bytes: u64,
    limit: u64,
    last: u32,
}

impl<'a> Flight<'a> {
    pub fn new(plan: &'a Plan, limit: u64) -> Flight<'a> {
        let batches = plan.batches.iter();
        let left = batches.map(|(peer, list)| (*peer, list.iter().map(|b| &b[..]).collect()));
        Flight {
            left: left.collect(),
            under_way: BTreeMap::new(),
            order: VecDeque::new(),
            bytes: 0,
            limit,
            last: 0,
        }
    }

    pub fn is_over(&self) -> bool {
        self.order.is_empty() && self.left.values().all(VecDeque::is_empty)
    }

    /// The next batch to ask for: peers take turns. None if the limit would be exceeded, or no peer has room. The options make sure that one batch is never
    /// longer than the limit.
    pub fn next(
        &mut self,
        mut has_room: impl FnMut(u32, &[Piece]) -> bool,
    ) -> Option<(u32, &'a [Piece])> {
        let behind = self.left.range(self.last + 1..);
        let order: Vec<u32> = behind
            .chain(self.left.range(..=self.last))
            .map(|(peer, _)| *peer)
            .collect();
        for peer in order {
            let Some(batch) = self.left[&peer].front().copied() else {
                continue;
            };
            let bytes = bytes_of(batch);
            // With nothing under way there is room, unless the endpoint has failed: then the post says why, and `Endpoint::room` would be 0.
            let is_free = self.bytes == 0;
            if !is_free && (self.bytes + bytes > self.limit || !has_room(peer, batch)) {
                continue;
            }
            self.left.entry(peer).or_default().pop_front();
            self.under_way.entry(peer).or_default().push_back(batch);
            self.order.push_back(peer);
            self.bytes += bytes;
            self.last = peer;
            return Some((peer, batch));
        }
        None
    }

    pub fn oldest(&self) -> Option<u32> {
        self.order.front().copied()
    }

    /// The oldest batch that is under way with the peer, or an empty one.
    pub fn first_of(&self, peer: u32) -> &'a [Piece] {
        let queue = self.under_way.get(&peer);
        queue
            .and_then(|queue| queue.front())
            .copied()
            .unwrap_or(&[])
    }

    /// The peer's oldest batch has come.
    pub fn complete(&mut self, peer: u32) {
        let queue = self.under_way.entry(peer).or_default();
        if let Some(batch) = queue.pop_front() {
            self.bytes -= bytes_of(batch);
        }
        if let Some(at) = self.order.iter().position(|other| *other == peer) {
            self.order.remove(at);
        }
    }
}

fn bytes_of(batch: &[Piece]) -> u64 {
    batch.iter().map(|piece| piece.len_bytes).sum()
}
