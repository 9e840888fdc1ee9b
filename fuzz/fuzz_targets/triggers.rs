//! The words that streams and kernels write on the proxy path, with whatever a stray pointer may write there.
#![no_main]

use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use doorbell::__private::{StreamFailure, Submission, execute};
use doorbell::{
    Device, Endpoint, EndpointConfig, Error, Event, Executor, QueueKind, Region, RemoteSlice,
    Result, Work,
};
use doorbell_wire::bytecode::ProgramOp;
use libfuzzer_sys::fuzz_target;

/// Carries out what it is given at once, but for waits, which it forgets, and writes what it likes to the words that programs name.
struct Stray {
    owners: Mutex<Vec<Submission>>,
}

impl Stray {
    fn write(&self, word: usize, value: u32) {
        let held = self.owners.lock().unwrap();
        let Some(submission) = held.last() else {
            return;
        };
        let targets = submission.owner.targets();
        let mut words = targets
            .iter()
            .filter(|target| {
                let name = targets.name(target.id());
                name.is_some_and(|name| ["progress", "completed"].contains(&name))
            })
            .flat_map(|target| [(target.id(), 0), (target.id(), 4)]);
        if let Some((target, offset)) = words.nth(word % 4) {
            let base = submission.owner.base(target).unwrap();
            // SAFETY: the two words of a target that has two; everybody uses them atomically.
            unsafe { AtomicU32::from_ptr(base.as_ptr().add(offset).cast()) }
                .store(value, Ordering::Release);
        }
    }

    fn forget(&self) {
        for Submission { owner, cookie, .. } in self.owners.lock().unwrap().drain(..) {
            owner.finished(cookie, doorbell::__private::Outcome::Done);
        }
    }
}

impl doorbell::__private::SealedExecutor for Stray {}

// SAFETY: each program is executed at most once, in order; what else is written is what this target is for.
unsafe impl Executor for Stray {
    fn id(&self) -> u64 {
        1 << 40
    }

    fn name(&self) -> &str {
        "stray"
    }

    fn executes_on_host(&self) -> bool {
        true
    }

    fn submit(&self, batch: &mut Vec<Submission>) -> Result<()> {
        for submission in batch.drain(..) {
            let _ = self.submit_one(submission);
        }
        Ok(())
    }

    fn submit_one(&self, submission: Submission) -> std::result::Result<(), (Submission, Error)> {
        let polls = submission
            .program
            .ops()
            .any(|op| matches!(op, ProgramOp::PollGeq { .. }));
        if !polls {
            execute(&submission.program, &*submission.owner, submission.cookie);
        }
        self.owners.lock().unwrap().push(submission);
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

fuzz_target!(|data: &[u8]| {
    let device = Device::open("softcx,path=proxy").unwrap();
    let domain = device.protection_domain();
    let config = EndpointConfig::default().send_depth(4).recv_depth(4);
    let [mut a, mut b, mut bystander] = [(); 3].map(|()| Endpoint::new(&domain, &config).unwrap());
    a.connect(&b.address()).unwrap();
    b.connect(&a.address()).unwrap();
    let own = bystander.address();
    bystander.connect(&own).unwrap();
    let region = Region::alloc(&domain, 4096, doorbell::Access::ALL).unwrap();
    let stray = Stray {
        owners: Mutex::default(),
    };
    for step in data.chunks(5).take(16) {
        let value = step[1..]
            .iter()
            .fold(0, |value, byte| value << 8 | u32::from(*byte));
        let remote = region.remote();
        let bytes = [1; 8];
        // What an endpoint that has failed, or is full, refuses is no finding.
        let _ = match step[0] % 6 {
            0 => a.stream_queue_send(&stray, &Work::nop()).map(drop),
            1 => a
                .stream_queue_send(
                    &stray,
                    &Work::write_inline(&bytes, RemoteSlice::at(remote.addr, remote.rkey)),
                )
                .map(drop),
            2 => a.stream_queue_recv(&stray, 1, &[]).map(drop),
            3 => a.stream_wait_cq(&stray, QueueKind::Send).map(drop),
            4 => a.poll_cq(QueueKind::Send).map(drop),
            _ => {
                stray.write(step[0] as usize / 6, value);
                Ok(())
            }
        };
    }
    // The neighbour on the same thread goes on.
    bystander.stream_queue_send(&stray, &Work::nop()).unwrap();
    bystander
        .wait_cq(QueueKind::Send, Some(Duration::from_secs(5)))
        .unwrap();
    // Whatever it was, a reset forgets it.
    stray.forget();
    a.abort();
    a.reset().unwrap();
    b.reset().unwrap();
    a.connect(&b.address()).unwrap();
    b.connect(&a.address()).unwrap();
    a.post_send(&Work::nop()).unwrap();
    a.wait_cq(QueueKind::Send, Some(Duration::from_secs(5)))
        .unwrap();
});
