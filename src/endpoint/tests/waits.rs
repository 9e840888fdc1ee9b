//! How a wait ends is decided once: for its stream and for its ticket.
#![allow(unsafe_code)] // implements `Executor`

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::endpoint::queue::Wait;
use crate::stream::{Event, Executor, Outcome, SealedExecutor, StreamFailure, Submission};
use crate::{
    Access, Device, Endpoint, EndpointConfig, Error, QueueKind, Region, Result, Status, Ticket,
    Work,
};

/// A stream that the test executes.
#[derive(Default)]
struct ByHand(Mutex<Vec<Submission>>);

impl SealedExecutor for ByHand {}

// SAFETY: the tests execute nothing but waits, of which they call the owner's methods in their order, once.
unsafe impl Executor for ByHand {
    fn id(&self) -> u64 {
        1 << 41
    }

    fn name(&self) -> &str {
        "by hand"
    }

    fn executes_on_host(&self) -> bool {
        true
    }

    fn submit(&self, batch: &mut Vec<Submission>) -> Result<()> {
        self.0.lock().unwrap().append(batch);
        Ok(())
    }

    fn submit_one(&self, submission: Submission) -> std::result::Result<(), (Submission, Error)> {
        self.0.lock().unwrap().push(submission);
        Ok(())
    }

    fn record(&self, _event: &Event) -> Result<()> {
        Ok(())
    }

    fn wait_event(&self, _event: &Event) -> Result<()> {
        Ok(())
    }

    fn take_fault(&self) -> Option<Error> {
        None
    }

    fn fail(&self, _failure: StreamFailure) -> bool {
        true
    }

    fn query(&self) -> Result<bool> {
        Ok(true)
    }

    fn synchronize(&self, _timeout: Option<Duration>) -> Result<()> {
        Ok(())
    }
}

/// An endpoint and its peer, and a wait for a receive of the endpoint that a stream has.
struct Waiting {
    endpoint: Endpoint,
    peer: Endpoint,
    region: Region,
    ticket: Ticket,
    submission: Submission,
}

impl Waiting {
    fn new() -> Waiting {
        let waiting = Waiting::queued();
        waiting.start();
        waiting
    }

    /// The stream has not come to the wait.
    fn queued() -> Waiting {
        let domain = Device::open("softcx").unwrap().protection_domain();
        let make = || Endpoint::new(&domain, &EndpointConfig::default()).unwrap();
        let [mut endpoint, mut peer] = [make(), make()];
        endpoint.connect(&peer.address()).unwrap();
        peer.connect(&endpoint.address()).unwrap();
        let region = Region::alloc(&domain, 64, Access::ALL).unwrap();
        let to = [region.slice(8, 8).unwrap()];
        endpoint.post_recv(1, &to).unwrap();
        let stream = ByHand::default();
        let ticket = endpoint.stream_wait_cq(&stream, QueueKind::Recv).unwrap();
        let submission = stream.0.lock().unwrap().pop().unwrap();
        Waiting {
            endpoint,
            peer,
            region,
            ticket,
            submission,
        }
    }

    fn start(&self) {
        self.submission.owner.started(self.submission.cookie);
    }

    fn complete(&mut self) {
        let from = [self.region.slice(0, 8).unwrap()];
        self.peer.post_send(&Work::send(&from)).unwrap();
        let queue = self.endpoint.shared.queue(QueueKind::Recv);
        let begin = Instant::now();
        while !queue.has_succeeded(0) {
            self.endpoint.shared.look_for_failure();
            assert!(begin.elapsed() < Duration::from_secs(60));
        }
    }

    fn failure(&self) -> Option<StreamFailure> {
        let Submission { owner, cookie, .. } = &self.submission;
        owner.failure_of(*cookie, Outcome::Done)
    }

    fn finish(&self) -> Status {
        let Submission { owner, cookie, .. } = &self.submission;
        owner.finished(*cookie, Outcome::Done);
        self.ticket.status()
    }
}

/// A GPU's stream is told of a failure also before the GPU has come to the wait. A completion may come before the device is told.
#[test]
fn a_wait_that_its_stream_took_for_failed_is_not_complete_later() {
    for has_begun in [true, false] {
        let waiting = Waiting::queued();
        if has_begun {
            waiting.start();
        }
        assert!(waiting.failure().is_some());
        if !has_begun {
            waiting.start();
        }
        // As if the completion came now.
        let queue = waiting.endpoint.shared.queue(QueueKind::Recv);
        assert!(!queue.set_wait(0, Wait::Done));
        let status = waiting.finish();
        assert!(matches!(status, Status::Failed(_)), "{status:?}");
    }
}

/// A GPU that comes to a wait whose endpoint has failed may find the completion and pass it, until everything behind the wait is stopped. If the wait had failed by then,
/// what is behind it would be complete behind a failure.
#[test]
fn a_wait_is_not_decided_before_everything_behind_it_is_stopped() {
    for has_begun in [true, false] {
        for is_stopped in [false, true] {
            let mut waiting = Waiting::queued();
            if has_begun {
                waiting.start();
            }
            let Submission { owner, cookie, .. } = waiting.submission.clone();
            // So that the watchdog does not stop the device yet.
            let shared = Arc::clone(&waiting.endpoint.shared);
            let held = loop {
                if let Some(held) = shared.try_hold_generation() {
                    break held;
                }
            };
            assert!(owner.expected_failure(cookie).is_some());
            if is_stopped {
                owner.stopped_behind(cookie);
            }
            waiting.complete();
            if !has_begun {
                waiting.start();
            }
            // Of a wait that its stream is in, the stream decides.
            let is_failed = is_stopped && !has_begun;
            assert_eq!(waiting.failure().is_some(), is_failed);
            let status = waiting.finish();
            drop(held);
            let is_right = match is_failed {
                true => matches!(status, Status::Failed(_)),
                false => status == Status::Complete,
            };
            assert!(is_right, "{has_begun} {is_stopped}: {status:?}");
        }
    }
}

#[test]
fn a_wait_that_its_stream_took_for_complete_does_not_miss_its_deadline_later() {
    let mut waiting = Waiting::new();
    waiting.complete();
    assert!(waiting.failure().is_none());
    // As the watchdog does, which may have looked for the completion just before it came.
    let queue = waiting.endpoint.shared.queue(QueueKind::Recv);
    assert!(!queue.set_wait(0, Wait::Failed));
    assert_eq!(waiting.finish(), Status::Complete);
}

/// Its work request is not complete, either.
#[test]
fn a_wait_is_not_complete_by_what_a_device_writes_that_was_given_up() {
    let waiting = Waiting::new();
    let queue = waiting.endpoint.shared.queue(QueueKind::Recv);
    queue.reap_for_the_last_time(&|_| {});
    let (endpoint, mut peer) = (waiting.endpoint, waiting.peer);
    let from = [waiting.region.slice(0, 8).unwrap()];
    peer.post_send(&Work::send(&from)).unwrap();
    let queue = endpoint.shared.queue(QueueKind::Recv);
    let begin = Instant::now();
    while queue.cq.cqe(0).is_none() {
        endpoint.shared.look_for_failure();
        assert!(begin.elapsed() < Duration::from_secs(60));
    }
    assert!(!queue.has_succeeded(0));
    assert!(!queue.decide_wait(0));
}
