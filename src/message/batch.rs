//! Operations of a queue and other programs, in the order in which they are executed.

use crate::endpoint::Prepared;
use crate::stream::Submission;

/// What is to be executed in one batch.
#[derive(Default)]
pub(crate) struct OperationBatch {
    pub(crate) prepared: Vec<Prepared>,
    /// The other programs, each with the number of the operations before it.
    pub(crate) others: Vec<(usize, Submission)>,
}

impl OperationBatch {
    /// Adds a program behind the operations so far.
    pub(crate) fn push(&mut self, submission: Submission) {
        self.others.push((self.prepared.len(), submission));
    }

    /// All programs in order, if those of the operations are these.
    #[cfg(feature = "cuda")]
    pub(crate) fn in_order(
        others: &[(usize, Submission)],
        operations: impl Iterator<Item = Submission>,
    ) -> Vec<Submission> {
        let mut all = Vec::new();
        let mut others = others.iter().peekable();
        for (at, program) in operations.enumerate() {
            while let Some((_, other)) = others.next_if(|(before, _)| *before <= at) {
                all.push(other.clone());
            }
            all.push(program);
        }
        all.extend(others.map(|(_, other)| other.clone()));
        all
    }

    /// Adds what another batch has. Returns the number of the operations before that.
    #[cfg(feature = "cuda")]
    pub(crate) fn append(&mut self, other: OperationBatch) -> usize {
        let before = self.prepared.len();
        self.prepared.extend(other.prepared);
        let others = other.others.into_iter();
        self.others
            .extend(others.map(|(index, program)| (before + index, program)));
        before
    }
}
