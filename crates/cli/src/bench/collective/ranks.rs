//! The ranks: threads of this process, or this process in a group; and how they exchange figures.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use doorbell::{
    AbortHandle, Communicator, Device, EndpointConfig, Group, GroupConfig, LaunchEnvironment,
    MessageConfig, MessageQueue, ProtectionDomain,
};
use serde::{Serialize, de::DeserializeOwned};

use super::options::CollectivePlan;

/// One rank.
pub struct Rank {
    /// What carries out its operations.
    pub communicator: Communicator,
}

/// Where ranks meet outside of what is measured.
pub enum Meeting {
    /// The threads of this process.
    Threads(ThreadMeeting),
    /// The store of a group.
    Group(Box<Group>),
}

/// Where the threads of a process meet.
pub struct ThreadMeeting {
    state: Mutex<MeetingState>,
    changed: Condvar,
    aborts: Vec<AbortHandle>,
    count: usize,
    timeout: Duration,
}

#[derive(Default)]
struct MeetingState {
    /// By rank, those of the present round.
    given: Vec<Option<Vec<u8>>>,
    /// Those of the last round that is complete.
    taken: Vec<Vec<u8>>,
    rounds: u64,
    has_failed: bool,
}

impl Meeting {
    /// Gives figures to all ranks, and returns those of all by rank.
    ///
    /// # Errors
    /// Another rank has failed or does not come.
    pub fn exchange<T: Serialize + DeserializeOwned>(&self, rank: u32, own: &T) -> Result<Vec<T>> {
        let own = serde_json::to_vec(own)?;
        let all = match self {
            Self::Threads(threads) => threads.exchange(rank as usize, own)?,
            Self::Group(group) => {
                let timeout = GroupConfig::default().timeout;
                let gathered = group.store().gather(&own, timeout);
                gathered.map_err(|error| group.cause_of(error))?
            }
        };
        let parsed = all.iter().map(|bytes| serde_json::from_slice(bytes));
        Ok(parsed.collect::<Result<_, _>>()?)
    }

    /// Ends the waits of all ranks of this process. Returns the error that says why, of `error` and what the group knows.
    pub fn fail(&self, error: anyhow::Error) -> anyhow::Error {
        match self {
            Self::Threads(threads) => {
                threads.lock().has_failed = true;
                threads.changed.notify_all();
                threads.aborts.iter().for_each(AbortHandle::abort);
                error
            }
            Self::Group(group) => match error.downcast::<doorbell::Error>() {
                Ok(error) => group.cause_of(error).into(),
                Err(error) => error,
            },
        }
    }

    /// The number of processes.
    pub fn processes(&self) -> u32 {
        match self {
            Self::Threads(_) => 1,
            Self::Group(group) => group.size(),
        }
    }
}

impl ThreadMeeting {
    fn lock(&self) -> MutexGuard<'_, MeetingState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn exchange(&self, rank: usize, own: Vec<u8>) -> Result<Vec<Vec<u8>>> {
        let mut state = self.lock();
        let round = state.rounds;
        state.given.resize(self.count, None);
        state.given[rank] = Some(own);
        if state.given.iter().all(Option::is_some) {
            state.taken = state.given.drain(..).flatten().collect();
            state.rounds += 1;
            self.changed.notify_all();
        }
        // Nobody ends the next round before all have taken from this one: each rank gives once in a round.
        let waits = |state: &mut MeetingState| state.rounds == round && !state.has_failed;
        let waited = self.changed.wait_timeout_while(state, self.timeout, waits);
        let (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        if state.rounds > round {
            return Ok(state.taken.clone());
        }
        Err(match state.has_failed {
            true => anyhow!(OTHER_FAILED),
            false => anyhow!("another rank did not come within {:?}", self.timeout),
        })
    }
}

/// The error of a rank that has not failed itself.
const OTHER_FAILED: &str = "another rank has failed";

fn message_config(plan: &CollectivePlan, count: u32) -> MessageConfig {
    let timeout = Some(plan.timeout);
    let endpoint = EndpointConfig::default()
        .wait_timeout(timeout)
        .room_timeout(timeout);
    MessageConfig::default()
        .eager_bytes(plan.eager_bytes)
        // As many as the longest algorithm sends to one peer. A launch waits for room if there are more.
        .ahead((plan.in_flight * 2 * count).clamp(64, 1024))
        .endpoint(endpoint)
}

/// Runs `measured` as each of so many ranks. Returns what the first returns.
///
/// # Errors
/// Those of the library, and that of the first rank that has failed itself.
pub fn threads(
    device: &Device,
    count: u32,
    plan: &CollectivePlan,
    measured: impl Fn(&mut Rank, &Meeting) -> Result<u64> + Sync,
) -> Result<u64> {
    let domain = device.protection_domain();
    let communicators = communicators(&domain, count, &message_config(plan, count))?;
    let meeting = Meeting::Threads(ThreadMeeting {
        state: Mutex::default(),
        changed: Condvar::new(),
        aborts: communicators
            .iter()
            .flat_map(Communicator::abort_handles)
            .collect(),
        count: count as usize,
        // A rank may be measuring: each of its operations has the plan's.
        timeout: plan.timeout.saturating_mul(2),
    });
    let run = |communicator| measured(&mut Rank { communicator }, &meeting);
    let results: Vec<Result<u64>> = thread::scope(|scope| {
        let mut communicators = communicators.into_iter();
        let first = communicators.next();
        let others: Vec<_> = communicators
            .map(|communicator| scope.spawn(|| run(communicator)))
            .collect();
        let first = first.map(run);
        let others = others.into_iter().map(|other| {
            other
                .join()
                .unwrap_or_else(|_| Err(anyhow!("a rank has panicked")))
        });
        first.into_iter().chain(others).collect()
    });
    let mut results = (0..).zip(results);
    let first = match results.next() {
        Some((_, Ok(first))) => {
            let failed = results.find_map(|(rank, result)| Some((rank, result.err()?)));
            failed.map_or(Ok(first), Err)
        }
        Some((rank, Err(error))) => {
            let is_other = |error: &anyhow::Error| error.to_string() == OTHER_FAILED;
            let mut failed = results.filter_map(|(rank, result)| Some((rank, result.err()?)));
            let cause = failed.find(|(_, other)| is_other(&error) && !is_other(other));
            Err(cause.unwrap_or((rank, error)))
        }
        None => Ok(0),
    };
    first.map_err(|(rank, error): (u32, anyhow::Error)| error.context(format!("rank {rank}")))
}

fn communicators(
    domain: &ProtectionDomain,
    count: u32,
    config: &MessageConfig,
) -> Result<Vec<Communicator>> {
    if count == 1 {
        return Ok(vec![Communicator::alone(domain)]);
    }
    let mut queues: Vec<Vec<Option<MessageQueue>>> = (0..count)
        .map(|_| (0..count).map(|_| None).collect())
        .collect();
    for (a, b) in (0..count as usize).flat_map(|a| (0..a).map(move |b| (a, b))) {
        let mut of_a = MessageQueue::new(domain, config)?;
        let mut of_b = MessageQueue::new(domain, config)?;
        of_a.connect(&of_b.address())?;
        of_b.connect(&of_a.address())?;
        queues[a][b] = Some(of_a);
        queues[b][a] = Some(of_b);
    }
    let made = (0..).zip(queues);
    let made = made.map(|(rank, queues)| Communicator::new(rank, queues));
    Ok(made.collect::<doorbell::Result<_>>()?)
}

/// Runs `measured` as the rank of this process in the group of its launcher.
///
/// # Errors
/// Those of the group, and of `measured`.
pub fn process_of_group(
    device: &Device,
    plan: &CollectivePlan,
    measured: impl Fn(&mut Rank, &Meeting) -> Result<u64>,
) -> Result<u64> {
    let environment = LaunchEnvironment::from_env().context("--group")?;
    let domain = device.protection_domain();
    let group = Group::join(&environment, &domain, &GroupConfig::default()).context("--group")?;
    let config = message_config(plan, group.size());
    let communicator = group.communicator(None, 0, &config);
    let communicator = communicator.map_err(|error| group.cause_of(error))?;
    let mut rank = Rank { communicator };
    let meeting = Meeting::Group(Box::new(group));
    let measured = measured(&mut rank, &meeting)?;
    drop(rank);
    if let Meeting::Group(group) = meeting {
        group.barrier()?;
        group.leave()?;
    }
    Ok(measured)
}

#[cfg(test)]
mod tests {
    use super::super::options::tests::plan;
    use super::*;

    fn meeting(count: usize) -> ThreadMeeting {
        ThreadMeeting {
            state: Mutex::default(),
            changed: Condvar::new(),
            aborts: Vec::new(),
            count,
            timeout: Duration::from_secs(20),
        }
    }

    #[test]
    fn threads_exchange_round_by_round() {
        let meeting = Meeting::Threads(meeting(3));
        thread::scope(|scope| {
            for rank in 0..3_u32 {
                let meeting = &meeting;
                scope.spawn(move || {
                    for round in 0..200_u32 {
                        let all = meeting.exchange(rank, &(round, rank)).unwrap();
                        assert_eq!(all, [(round, 0), (round, 1), (round, 2)]);
                    }
                });
            }
        });
    }

    #[test]
    fn one_failed_rank_ends_the_others_and_is_the_one_named() {
        let device = Device::open("softcx").unwrap();
        let plan = plan("--op barrier").unwrap();
        let error = threads(&device, 3, &plan, |rank, meeting| {
            if rank.communicator.rank() == 2 {
                return Err(meeting.fail(anyhow!("no room on the shelf")));
            }
            meeting.exchange(rank.communicator.rank(), &0_u8)?;
            Ok(0)
        });
        let error = format!("{:#}", error.unwrap_err());
        assert_eq!(error, "rank 2: no room on the shelf");
    }
}
