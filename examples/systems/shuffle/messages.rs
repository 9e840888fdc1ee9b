//! Fetches by messages, for comparison.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use doorbell::{Access, EndpointConfig, Error, Group, MessageConfig, MessageQueue, Region};

use crate::fetch::copy_local;
use crate::plan::{Flight, Plan};
use crate::{Attempt, Cost, DEADLINE, Held, Options, support};

/// The other method: a rank asks for a batch by a message, and a thread of the rank that has it replies with one message for each piece.
pub struct Queues {
    peers: Vec<u32>,
    /// To each peer's server.
    asking: Vec<MessageQueue>,
    /// From each peer, for this rank's server.
    serving: Vec<MessageQueue>,
    /// Requests on their way out, and the one that the server reads.
    requests: Region,
    request: Region,
    batch: usize,
}

/// Bytes of a piece in a request: split, offset, length.
const REQUEST_ENTRY: usize = 24;
/// Requests of one peer whose replies have not come.
const REQUESTS: u32 = 4;

impl Queues {
    pub fn open(options: &Options, group: &Group) -> Result<Queues> {
        let rank = group.rank();
        let peers: Vec<u32> = (0..group.size()).filter(|peer| *peer != rank).collect();
        // The tag is the rank that asks.
        let asking = peers.iter().map(|peer| (*peer, u64::from(rank)));
        let serving = peers.iter().map(|peer| (*peer, u64::from(*peer)));
        let with: Vec<(u32, u64)> = asking.chain(serving).collect();
        let slots = (REQUESTS * options.batch as u32).next_power_of_two();
        let config = MessageConfig::default()
            .slots(slots)
            .ahead(slots.max(64))
            .eager_bytes(options.read_bytes.min(1 << 20))
            .endpoint(EndpointConfig::default().wait_timeout(Some(DEADLINE)));
        let mut asking = group.message_queues(&with, &config)?;
        let serving = asking.split_off(peers.len());
        let bytes = (options.batch * REQUEST_ENTRY) as u64;
        let all = bytes * u64::from(REQUESTS) * peers.len() as u64;
        Ok(Queues {
            asking,
            serving,
            requests: Region::alloc(group.domain(), all, Access::LOCAL_WRITE)?,
            request: Region::alloc(group.domain(), bytes, Access::LOCAL_WRITE)?,
            batch: options.batch,
            peers,
        })
    }

    pub fn fetch(
        &mut self,
        attempt: &Attempt<'_>,
        held: &Held,
        plan: &Plan,
        fetched: &Region,
    ) -> Result<Cost> {
        let is_over = AtomicBool::new(false);
        let Queues {
            peers,
            asking,
            serving,
            requests,
            request,
            batch,
        } = self;
        let request = &*request;
        std::thread::scope(|scope| {
            let server = scope.spawn(|| serve(serving, held, request, &is_over));
            let mut fetch = || -> Result<Cost> {
                let cost = attempt.measure(|attempt| {
                    let ask = Asking {
                        peers,
                        requests,
                        batch: *batch,
                    };
                    ask.fetch(attempt, asking, held, plan, fetched)
                })?;
                // Until here a peer may ask.
                attempt.group.barrier()?;
                Ok(cost)
            };
            let fetched = fetch();
            is_over.store(true, Ordering::Relaxed);
            let served = server.join();
            let served = served.unwrap_or_else(|_| bail!("the server panicked"));
            Ok(Cost {
                serving: served?.as_secs_f64(),
                ..fetched?
            })
        })
    }

    pub fn finish(self) -> Result<()> {
        for mut queue in self.asking.into_iter().chain(self.serving) {
            queue.finish(Some(DEADLINE))?;
        }
        Ok(())
    }
}

/// Answers requests, and returns the processor time that it took.
fn serve(
    queues: &mut [MessageQueue],
    held: &Held,
    request: &Region,
    is_over: &AtomicBool,
) -> Result<Duration> {
    let whole = [request.slice(0, request.len_bytes())?];
    let mut bytes = vec![0; request.len_bytes() as usize];
    while !is_over.load(Ordering::Relaxed) {
        let mut all: Vec<&mut MessageQueue> = queues.iter_mut().collect();
        let limit = Some(Duration::from_millis(10));
        let (from, len_bytes) = match MessageQueue::recv_any_now(&mut all, &whole, limit) {
            Err(Error::Timeout { .. }) => continue,
            received => received?,
        };
        request.read(0, &mut bytes)?;
        let entries = bytes[..len_bytes as usize].as_chunks::<REQUEST_ENTRY>().0;
        for entry in entries {
            let (words, _) = entry.as_chunks();
            let [split, at, len] = [0, 1, 2].map(|word| u64::from_le_bytes(words[word]));
            let output = held.outputs.get(&(split as u32));
            let output = output.with_context(|| format!("split {split} was asked for"))?;
            // It is sent from where the map has written it, which stays.
            let reply = [output.records.slice(at, len)?];
            let _ = queues[from].start_send_now(&reply, Some(DEADLINE))?;
        }
    }
    support::thread_time()
}

/// The side that asks.
struct Asking<'a> {
    peers: &'a [u32],
    requests: &'a Region,
    batch: usize,
}

impl Asking<'_> {
    fn fetch(
        &self,
        attempt: &Attempt<'_>,
        queues: &mut [MessageQueue],
        held: &Held,
        plan: &Plan,
        fetched: &Region,
    ) -> Result<()> {
        copy_local(held, plan, fetched)?;
        let mut flight = Flight::new(plan, attempt.options.in_flight);
        let mut asked = vec![0_u32; self.peers.len()];
        let mut under_way = vec![0_u32; self.peers.len()];
        // Counted where requests are sent and replies come, and not where the flight decides.
        let (mut bytes_under_way, mut most_bytes) = (0, 0);
        let index = |peer: u32| self.peers.iter().position(|p| *p == peer);
        while !flight.is_over() {
            while let Some((peer, batch)) =
                flight.next(|peer, _| index(peer).is_some_and(|at| under_way[at] < REQUESTS))
            {
                let at = index(peer).context("a queue")?;
                let bytes: Vec<u8> = batch
                    .iter()
                    .flat_map(|piece| [piece.split.into(), piece.from, piece.len_bytes])
                    .flat_map(u64::to_le_bytes)
                    .collect();
                // The replies to what was there before have come.
                let place = at as u32 * REQUESTS + asked[at] % REQUESTS;
                let place = u64::from(place) * (self.batch * REQUEST_ENTRY) as u64;
                self.requests.write(place, &bytes)?;
                let request = [self.requests.slice(place, bytes.len() as u64)?];
                let _ = queues[at]
                    .start_send_now(&request, Some(DEADLINE))
                    .map_err(|error| attempt.fetch_failed(batch[0].split, peer, error))?;
                asked[at] += 1;
                under_way[at] += 1;
                bytes_under_way += batch.iter().map(|piece| piece.len_bytes).sum::<u64>();
                most_bytes = most_bytes.max(bytes_under_way);
            }
            let peer = flight.oldest().context("nothing in flight")?;
            let at = index(peer).context("a queue")?;
            for piece in flight.first_of(peer) {
                let into = [fetched.slice(piece.to, piece.len_bytes)?];
                let len_bytes = queues[at]
                    .recv_now(&into, Some(DEADLINE))
                    .map_err(|error| attempt.fetch_failed(piece.split, peer, error))?;
                ensure!(len_bytes == piece.len_bytes, "a reply of {len_bytes} bytes");
                bytes_under_way -= len_bytes;
            }
            flight.complete(peer);
            under_way[at] -= 1;
        }
        attempt.most_by_message.set(most_bytes);
        Ok(())
    }
}
