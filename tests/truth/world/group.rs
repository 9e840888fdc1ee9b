//! A group of two ranks in this process. The endpoints of the first pair are its endpoints.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use doorbell::{Endpoint, Error, Group, GroupConfig, LaunchEnvironment, ProtectionDomain, Token};

use super::World;
use crate::model::{Life, lock};
use crate::plan::{Plan, end_name};

/// For joining, and for each exchange with the store.
const TIMEOUT: Duration = Duration::from_secs(20);
/// Time in which a rank learns that another one has ended.
const SOON: Duration = Duration::from_secs(5);

pub struct Ranks {
    /// `None` after the rank has ended or left.
    groups: [Mutex<Option<Group>>; 2],
    /// The generations of their endpoints that the group has made.
    pub lives: Vec<Arc<Life>>,
}

impl Ranks {
    pub fn join(plan: &Plan, domains: &[ProtectionDomain]) -> (Ranks, [Endpoint; 2]) {
        let random = RandomState::new().build_hasher().finish();
        let [b, c, d, ..] = random.to_ne_bytes().map(|byte| byte.clamp(1, 254));
        let address = format!("127.{b}.{c}.{d}:19998");
        let join = |rank: u32| {
            let token = Token::new("of this test");
            let environment = LaunchEnvironment::new(rank, 2, &address, token).unwrap();
            let config = GroupConfig::default()
                .endpoint(plan.pairs[0])
                .timeout(TIMEOUT);
            let domain = &domains[rank as usize % domains.len()];
            let group = Group::join(&environment, domain, &config).unwrap();
            let endpoint = group.take_endpoint(1 - rank).unwrap();
            (Mutex::new(Some(group)), endpoint)
        };
        let ((one, a), (other, b)) = thread::scope(|scope| {
            let other = scope.spawn(|| join(1));
            (join(0), other.join().unwrap())
        });
        let ranks = Ranks {
            groups: [one, other],
            lives: Vec::new(),
        };
        (ranks, [a, b])
    }
}

impl World<'_> {
    /// The rank ends without having left.
    pub(super) fn end_rank(&self, rank: usize) {
        let Some(ranks) = &self.ranks else { return };
        if let Some(group) = lock(&ranks.groups[rank]).take() {
            self.model.rank_ends(rank);
            drop(group);
        }
    }

    pub(super) fn leave(&self, rank: usize) {
        let Some(ranks) = &self.ranks else { return };
        // Rank 0 has the store, and waits for the other one.
        if rank == 0 && lock(&ranks.groups[1]).is_some() {
            return;
        }
        let Some(group) = lock(&ranks.groups[rank]).take() else {
            return;
        };
        let Err(error) = group.leave() else { return };
        match error {
            // It ends without having left, then.
            Error::Rank { rank: named, .. } if self.model.has_ended(named) => {
                self.model.rank_ends(rank)
            }
            error => self.judge_rank(rank, error),
        }
    }

    pub(super) fn check_rank(&self, rank: usize) {
        let Some(ranks) = &self.ranks else { return };
        if let Some(Err(error)) = lock(&ranks.groups[rank]).as_ref().map(Group::check) {
            self.judge_rank(rank, error);
        }
    }

    fn judge_rank(&self, rank: usize, error: Error) {
        match error {
            Error::Rank { rank: named, .. } if self.model.has_ended(named) => {}
            error => self
                .model
                .lie("unexpected error", format!("rank {rank}: {error:?}")),
        }
    }

    /// Checks that ranks know of those that have ended, and ends the group.
    pub(super) fn settle_ranks(&self) {
        let Some(ranks) = &self.ranks else { return };
        for rank in [1, 0] {
            if !self.model.has_ended(1 - rank as u32) {
                self.leave(rank);
                continue;
            }
            let Some(group) = lock(&ranks.groups[rank]).take() else {
                continue;
            };
            let started = Instant::now();
            while group.check().is_ok() && started.elapsed() < SOON {
                thread::sleep(Duration::from_millis(1));
            }
            match group.check() {
                Ok(()) => self.model.lie(
                    "a rank that ended without a report",
                    format!("rank {rank} does not know it"),
                ),
                Err(error) => self.judge_rank(rank, error),
            }
            let end = lock(&self.ends[rank]);
            let is_first = Arc::ptr_eq(&end.life, &ranks.lives[rank]);
            let failure = end.endpoint.as_ref().map(Endpoint::failure);
            if is_first && failure == Some(None) {
                self.model.lie(
                    "an endpoint of a group that failed",
                    format!("{} has not failed", end_name(rank)),
                );
            }
        }
    }
}
