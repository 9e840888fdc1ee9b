//! Transfers through bounce buffers, with a copy engine that copies late, and may fail.
#![allow(unsafe_code)] // a copy engine, and addresses for it

use std::collections::VecDeque;
use std::ptr::{NonNull, with_exposed_provenance, with_exposed_provenance_mut};
use std::sync::atomic::Ordering;
use std::time::Duration;

use doorbell::{Bounce, BounceConfig, CopyEngine, CopyTicket, Endpoint, Error, Result, StateKind};

use super::{End, World};
use crate::memory::{Found, Memory, is_zero, place};
use crate::model::lock;
use crate::plan::Bounced;

/// Work requests of bounce buffers have numbers from here on.
pub const CHUNKS: u64 = 1 << 63;

/// A place that was written and found complete. It was cleared then.
pub struct Written {
    number: usize,
}

/// Each copy is made by the second query for it.
struct Late {
    copies: VecDeque<(Copy, u32)>,
    begun: u64,
    fails_at: Option<u64>,
}

struct Copy {
    from: *const u8,
    to: *mut u8,
    len: usize,
    number: u64,
}

// SAFETY: its pointers are used under the contract of the engine, by any thread.
unsafe impl Send for Late {}

const FAILURE: &str = "a copy that fails";

impl Late {
    fn begin(&mut self, from: *const u8, to: *mut u8, len: usize) -> CopyTicket {
        self.begun += 1;
        let copy = Copy {
            from,
            to,
            len,
            number: self.begun,
        };
        self.copies.push_back((copy, 0));
        CopyTicket(self.begun)
    }
}

// SAFETY: a copy is made inside `is_copy_done`, before it says so.
unsafe impl CopyEngine for Late {
    unsafe fn copy_to_host(
        &mut self,
        foreign: u64,
        host: NonNull<u8>,
        len_bytes: usize,
    ) -> Result<CopyTicket> {
        Ok(self.begin(
            with_exposed_provenance(foreign as usize),
            host.as_ptr(),
            len_bytes,
        ))
    }

    unsafe fn copy_from_host(
        &mut self,
        host: NonNull<u8>,
        foreign: u64,
        len_bytes: usize,
    ) -> Result<CopyTicket> {
        Ok(self.begin(
            host.as_ptr(),
            with_exposed_provenance_mut(foreign as usize),
            len_bytes,
        ))
    }

    fn is_copy_done(&mut self, ticket: CopyTicket) -> Result<bool> {
        let is_it = |(copy, _): &(Copy, u32)| copy.number == ticket.0;
        let at = self.copies.iter().position(is_it).unwrap();
        let (copy, queries) = &mut self.copies[at];
        *queries += 1;
        if *queries < 2 {
            return Ok(false);
        }
        let has_failed = self.fails_at == Some(copy.number);
        if !has_failed {
            // SAFETY: the promise of the call that began it.
            unsafe { copy.from.copy_to(copy.to, copy.len) };
        }
        self.copies.remove(at);
        if has_failed {
            return Err(Error::State {
                kind: StateKind::Unexpected,
                operation: "copy",
                reason: FAILURE.into(),
            });
        }
        Ok(true)
    }
}

impl World<'_> {
    pub(super) fn bounce(&self, number: usize, bounced: &Bounced) {
        let memory = &self.model.memory;
        let mut end = lock(&self.ends[bounced.end]);
        let End { endpoint, life, .. } = &mut *end;
        let Some(endpoint) = endpoint else { return };
        let before = endpoint.failure();
        let config = BounceConfig::default()
            .chunk_bytes(bounced.chunk_bytes)
            .slots(bounced.slots);
        let engine = Late {
            copies: VecDeque::new(),
            begun: 0,
            fails_at: bounced.fails_at,
        };
        let domain = &self.domains[bounced.end % self.domains.len()];
        let mut buffer = match Bounce::new(domain, engine, config) {
            Ok(buffer) => buffer,
            // The device registers nothing any more.
            Err(
                Error::System { .. }
                | Error::State {
                    kind: StateKind::DeviceGone,
                    ..
                },
            ) if self.plan.has_no_stop() => return,
            Err(error) => panic!("{error}"),
        };
        let bytes = memory.stamp(number, bounced.len_bytes);
        let result = if bounced.is_read {
            let mut into = vec![0; bytes.len()];
            let result = self.transfer(number, bounced, &mut buffer, endpoint, &mut into);
            if result.is_ok() && into != bytes {
                self.model
                    .lie("read without its bytes", format!("step {number}"));
            }
            result
        } else {
            let mut from = bytes.to_vec();
            let result = self.transfer(number, bounced, &mut buffer, endpoint, &mut from);
            let seen = Memory::read(&memory.targets[0], number);
            let (found, is_foreign) = memory.find(&seen, number, bounced.len_bytes);
            if is_foreign {
                self.model.lie("wrong bytes", format!("step {number}"));
            }
            if result.is_ok() {
                if found != Found::All {
                    self.model.lie(
                        "written without its bytes",
                        format!("step {number}: {found:?}"),
                    );
                }
                memory.targets[0]
                    .fill(place(number), bounced.len_bytes, 0)
                    .unwrap();
                lock(&self.written).push(Written { number });
            }
            result
        };
        if let Some(failure) = before {
            self.model.failed(life, failure);
        }
        let Err(error) = result else {
            self.model.bounced.fetch_add(1, Ordering::Relaxed);
            if before.is_some() {
                self.model
                    .lie("accepted after a failure", format!("step {number}"));
            }
            return;
        };
        let is_refused = matches!(
            error,
            Error::State {
                kind: StateKind::WorkPending,
                ..
            }
        );
        if is_refused {
            if self.model.is_collected(life) {
                self.model.lie(
                    "refused without a reason",
                    format!("step {number}: {error:?}"),
                );
            }
            return;
        }
        // Completions of its chunks may be left.
        self.model.lose_count(life);
        match error {
            Error::Work(failure) => self.model.failed(life, failure),
            Error::State { reason, .. } if reason == FAILURE => {
                if bounced.fails_at.is_none() {
                    self.model
                        .lie("unexpected error", format!("step {number}: {FAILURE}"));
                }
            }
            // The engine ends a copy when it is asked a second time: with a short timeout there may be no time for that.
            Error::State { reason, .. }
                if reason.contains("did not end its copies")
                    && bounced.timeout < Duration::from_millis(100) => {}
            Error::State {
                kind: StateKind::Unexpected,
                ..
            } => self
                .model
                .lie("unexpected error", format!("step {number}: {error:?}")),
            Error::State { .. } | Error::QueueFull { .. } | Error::Timeout { .. } => {}
            error => self
                .model
                .lie("unexpected error", format!("step {number}: {error:?}")),
        }
    }

    fn transfer(
        &self,
        number: usize,
        bounced: &Bounced,
        buffer: &mut Bounce<Late>,
        endpoint: &mut Endpoint,
        foreign: &mut [u8],
    ) -> Result<()> {
        let memory = &self.model.memory;
        let there = bounced.end ^ 1;
        let (address, len_bytes) = (
            foreign.as_mut_ptr().expose_provenance() as u64,
            bounced.len_bytes,
        );
        let (offset, timeout) = (place(number), bounced.timeout);
        if bounced.is_read {
            let remote = self.remote(&memory.sources[0], there, bounced.wrong_key);
            // SAFETY: it stays until the call returns.
            unsafe { buffer.read(endpoint, &remote, offset, address, len_bytes, timeout) }
        } else {
            let remote = self.remote(&memory.targets[0], there, bounced.wrong_key);
            // SAFETY: as above.
            unsafe { buffer.write(endpoint, address, len_bytes, &remote, offset, timeout) }
        }
    }

    /// Checks that nothing was written again to places that were complete.
    pub(super) fn settle_written(&self) {
        for Written { number } in lock(&self.written).iter() {
            let bytes = Memory::read(&self.model.memory.targets[0], *number);
            if !is_zero(&bytes) {
                self.model.lie("written again", format!("step {number}"));
            }
        }
    }
}
