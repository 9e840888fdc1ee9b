//! A stream that only stores and polls, as a GPU does: the owner of a program cannot tell it to give a wait up.
#![allow(dead_code, unsafe_code)] // Reason: each test uses a part; `Owner` is an unsafe trait.

use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use doorbell::__private::{Outcome, Owner, StreamFailure, Submission};
use doorbell::{Event, Executor, HostStream, Result};
use doorbell_wire::bytecode::{TargetId, Targets};

pub struct StoreOnlyStream(pub HostStream);

struct StoreOnlyOwner(Arc<dyn Owner>);

// SAFETY: targets and memory are those of the owner inside, which lives as long.
unsafe impl Owner for StoreOnlyOwner {
    fn targets(&self) -> &Targets {
        self.0.targets()
    }

    fn base(&self, target: TargetId) -> Option<NonNull<u8>> {
        self.0.base(target)
    }

    // No `progress` and no `rung`: a GPU stores and polls, and nothing else. No `released`: it is never told.

    fn started(&self, cookie: u64) {
        self.0.started(cookie);
    }

    fn finished(&self, cookie: u64, outcome: Outcome) {
        self.0.finished(cookie, outcome);
    }
}

fn wrap(submission: Submission) -> Submission {
    Submission {
        owner: Arc::new(StoreOnlyOwner(submission.owner)),
        ..submission
    }
}

impl doorbell::__private::SealedExecutor for StoreOnlyStream {}

// SAFETY: it hands everything on to a host stream, once and in order.
unsafe impl Executor for StoreOnlyStream {
    fn id(&self) -> u64 {
        self.0.id()
    }

    fn name(&self) -> &str {
        self.0.name()
    }

    fn executes_on_host(&self) -> bool {
        self.0.executes_on_host()
    }

    fn submit(&self, batch: &mut Vec<Submission>) -> Result<()> {
        let mut wrapped = batch.iter().cloned().map(wrap).collect();
        self.0.submit(&mut wrapped)?;
        batch.clear();
        Ok(())
    }

    #[allow(clippy::result_large_err)] // as the trait
    fn submit_one(
        &self,
        submission: Submission,
    ) -> std::result::Result<(), (Submission, doorbell::Error)> {
        self.0
            .submit_one(wrap(submission.clone()))
            .map_err(|(_, error)| (submission, error))
    }

    fn record(&self, event: &Event) -> Result<()> {
        self.0.record(event)
    }

    fn wait_event(&self, event: &Event) -> Result<()> {
        self.0.wait_event(event)
    }

    fn take_fault(&self) -> Option<doorbell::Error> {
        self.0.take_fault()
    }

    fn fail(&self, failure: StreamFailure) -> bool {
        self.0.fail(failure)
    }

    fn query(&self) -> Result<bool> {
        self.0.query()
    }

    fn synchronize(&self, timeout: Option<Duration>) -> Result<()> {
        self.0.synchronize(timeout)
    }
}
