//! Communicators of the ranks of a group.

use crate::collective::Communicator;
use crate::group::Group;
use crate::message::MessageConfig;
use crate::{Error, Result, StateKind};

impl Group {
    /// Makes a communicator for collective operations of the ranks `ranks`, in that order, or of all ranks without it. Each of these ranks makes it, with the same ranks, tag and
    /// configuration. The tag belongs to it, as to the queues of [`Group::message_queues`], which it has to each other rank.
    ///
    /// Its waits end with the group: if a rank ends, its streams have a fault, and its tickets name the rank ([`Cause::Rank`](crate::Cause::Rank)).
    ///
    /// # Errors
    /// As [`Group::message_queues`]; [`Error::State`] if this rank is not one of them, or one is there twice.
    pub fn communicator(
        &self,
        ranks: Option<&[u32]>,
        tag: u64,
        config: &MessageConfig,
    ) -> Result<Communicator> {
        let all: Vec<u32> = (0..self.size()).collect();
        let ranks = ranks.unwrap_or(&all);
        let refused = |reason| {
            Err(Error::state(
                StateKind::WrongKind,
                "make a communicator",
                reason,
            ))
        };
        let Some(own) = ranks.iter().position(|rank| *rank == self.rank()) else {
            return refused(format!(
                "rank {} makes it, and is not one of its ranks",
                self.rank()
            ));
        };
        let mut sorted = ranks.to_vec();
        sorted.sort_unstable();
        if let Some(twice) = sorted.windows(2).find(|pair| pair[0] == pair[1]) {
            return refused(format!("rank {} is there twice", twice[0]));
        }
        if ranks.len() == 1 {
            return Ok(Communicator::alone(self.domain()));
        }
        let mut queues = self.queues_with(ranks, tag, config)?.into_iter();
        let queue_of = |rank: &u32| (*rank != self.rank()).then(|| queues.next()).flatten();
        Communicator::new(own as u32, ranks.iter().map(queue_of).collect())
    }
}
