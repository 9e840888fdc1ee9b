//! Send queues that kernels of a GPU own: kernels write by them, and report by codes.
#![allow(unsafe_code)] // launches kernels that post

use std::sync::MutexGuard;
use std::sync::atomic::Ordering;
use std::time::Duration;

use doorbell::__private::PutStep;
use doorbell::{DeviceBuffer, DeviceQueue, Error};

use super::{End, Lane, World};
use crate::memory::{Found, Memory, place};
use crate::model::lock;
use crate::plan::{Put, STEPS_MAX};

/// Error codes of the C interface that a put may end with.
const ETIMEOUT: i32 = -17;
const EFULL: i32 = -15;
const EWORK: i32 = -19;
/// Before a kernel has ended. A kernel that succeeds leaves it.
const FINE: i32 = 0;

/// An error code of each step.
pub struct Codes(DeviceBuffer);

impl Codes {
    /// `None` if the streams are not of a GPU.
    pub fn new(lanes: &[std::sync::Mutex<Lane>]) -> Option<Codes> {
        let lane = lock(&lanes[0]);
        let codes = lane
            .stream
            .cuda()?
            .context()
            .alloc(4 * STEPS_MAX as u64)
            .unwrap();
        codes.copy_from_host(0, &[0; 4 * STEPS_MAX]).unwrap();
        Some(Codes(codes))
    }

    fn address(&self, number: usize) -> u64 {
        self.0.ptr() + 4 * number as u64
    }

    fn read(&self, number: usize) -> i32 {
        let mut bytes = [0; 4];
        self.0.copy_to_host(4 * number as u64, &mut bytes).unwrap();
        i32::from_ne_bytes(bytes)
    }
}

/// A send queue that kernels own, and the kernels that were launched with it.
pub struct OwnedQueue {
    queue: DeviceQueue,
    puts: Vec<(usize, Put)>,
}

impl World<'_> {
    pub(super) fn take_queue(&self, number: usize, end: usize) {
        let mut end = lock(&self.ends[end]);
        let End {
            endpoint: Some(endpoint),
            life,
            queue: queue @ None,
        } = &mut *end
        else {
            return;
        };
        let lane = self.lane(0);
        let Some(cuda) = lane.stream.cuda() else {
            return;
        };
        let failure = endpoint.failure();
        match DeviceQueue::on_gpu(cuda.context(), endpoint) {
            Ok(owned) => {
                if let Some(failure) = failure {
                    self.model.lie(
                        "accepted after a failure",
                        format!("step {number}: {failure:?}"),
                    );
                }
                life.begin_kernels();
                self.model.lose_count(life);
                *queue = Some(OwnedQueue {
                    queue: owned,
                    puts: Vec::new(),
                });
            }
            Err(Error::Work(failure)) => self.model.failed(life, failure),
            Err(Error::State { .. }) => {}
            // The device registers nothing any more.
            Err(Error::System { .. }) if self.plan.has_no_stop() => {}
            Err(error) => self
                .model
                .lie("unexpected error", format!("step {number}: {error:?}")),
        }
    }

    pub(super) fn put(&self, number: usize, put: &Put) {
        let mut end = lock(&self.ends[put.end]);
        let (Some(owned), Some(codes)) = (&mut end.queue, &self.codes) else {
            return;
        };
        let memory = &self.model.memory;
        let slice = (memory.sources[put.to].of(put.end))
            .slice(place(number), put.len_bytes)
            .unwrap();
        let local = match owned.queue.local(&slice) {
            Ok(local) => local,
            // It is deregistered.
            Err(Error::State { .. }) => return,
            Err(error) => {
                let text = format!("step {number}: {error:?}");
                return self.model.lie("unexpected error", text);
            }
        };
        let remote = self.remote(&memory.targets[put.to], put.end ^ 1, put.wrong_key);
        let mut lane = self.lane(put.stream);
        let Some(cuda) = lane.stream.cuda() else {
            return;
        };
        let step = PutStep {
            local,
            len_bytes: put.len_bytes as u32,
            remote: (remote.addr + place(number), remote.rkey),
            timeout: put.timeout,
            code: codes.address(number),
            ..PutStep::default()
        };
        // SAFETY: `give_queue_back` drops the queue when the streams are done, and the codes and the memory go later.
        let result = unsafe { owned.queue.put_step(cuda, &step) };
        if self.allowed(&mut lane, result).is_some() {
            owned.puts.push((number, *put));
        }
    }

    /// Checks what the kernels have reported, and drops the queue. `false`: the streams are not done, so the queue stays.
    pub(super) fn give_queue_back(&self, end: &mut MutexGuard<'_, End>) -> bool {
        let (Some(owned), Some(codes)) = (&end.queue, &self.codes) else {
            return true;
        };
        let is_done =
            (0..self.lanes.len()).all(|stream| self.synchronize(stream, Duration::from_millis(20)));
        if !is_done {
            return false;
        }
        if let Some(failure) = owned.queue.failure() {
            self.model.failed(&end.life, failure);
        }
        for (number, put) in &owned.puts {
            self.settle_put(*number, put, codes.read(*number), end);
        }
        end.queue = None;
        true
    }

    fn settle_put(&self, number: usize, put: &Put, code: i32, end: &End) {
        let bytes = Memory::read(&self.model.memory.targets[put.to], number);
        let (found, is_foreign) = self.model.memory.find(&bytes, number, put.len_bytes);
        if is_foreign {
            self.model.lie("wrong bytes", format!("step {number}"));
        }
        if code == FINE {
            self.model.put.fetch_add(1, Ordering::Relaxed);
        }
        let is_right = match code {
            FINE => found == Found::All,
            EWORK => end.life.has_failed(),
            EFULL => found == Found::Nothing,
            ETIMEOUT => true,
            _ => false,
        };
        if !is_right {
            self.model.lie(
                "not what a kernel has reported",
                format!("step {number}: code {code}, {found:?} of its bytes"),
            );
        }
    }
}
