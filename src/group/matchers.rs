//! Matchers of the ranks of a group.

use crate::group::Group;
use crate::matching::{Matcher, MatcherConfig};
use crate::{Error, Result, StateKind};

impl Group {
    /// Makes a matcher for messages between the ranks `ranks`, by their place in that list, or between all ranks without it. Each of these ranks makes it, with the same ranks
    /// and tag. The tag is that of its queues ([`Group::message_queues`]) and belongs to it; its messages have tags of their own.
    ///
    /// If a rank ends, its group aborts the queues: receives that name it fail with [`Error::Peer`], whose failure names the rank ([`Cause::Rank`](crate::Cause::Rank)). The group fails as a
    /// whole, so all other peers fail, too.
    ///
    /// # Errors
    /// As [`Group::message_queues`] and [`Matcher::new`]; [`Error::State`] if this rank is not one of them, or one is there twice.
    pub fn matcher(
        &self,
        ranks: Option<&[u32]>,
        tag: u64,
        config: &MatcherConfig,
    ) -> Result<Matcher> {
        let all: Vec<u32> = (0..self.size()).collect();
        let ranks = ranks.unwrap_or(&all);
        let refused = |reason| Err(Error::state(StateKind::WrongKind, "make a matcher", reason));
        if !ranks.contains(&self.rank()) {
            let own = self.rank();
            return refused(format!("rank {own} makes it, and is not one of its ranks"));
        }
        let mut sorted = ranks.to_vec();
        sorted.sort_unstable();
        if let Some(twice) = sorted.windows(2).find(|pair| pair[0] == pair[1]) {
            return refused(format!("rank {} is there twice", twice[0]));
        }
        let mut queues = self.queues_with(ranks, tag, &config.messages)?.into_iter();
        let queue_of = |rank: &u32| (*rank != self.rank()).then(|| queues.next()).flatten();
        let queues = ranks.iter().map(queue_of).collect();
        Matcher::new(self.domain(), queues, config)
    }
}
