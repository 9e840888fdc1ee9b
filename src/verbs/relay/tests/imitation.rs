//! A provider without a device, with limits as small as one likes: it carries out what a test tells it to, and gives places back as
//! verbs says.

use std::collections::VecDeque;

use crate::verbs::relay::provider::{
    PolledCompletion, PostedUpTo, Provider, Queue, Recv, Send, Sge,
};
use crate::verbs::relay::request::{INLINE, SIGNALED};
use doorbell_wire::verbs::WcStatus;

/// A send that was posted.
#[derive(Debug, Clone)]
pub(super) struct Sent {
    pub(super) request: Send,
    pub(super) sges: Vec<Sge>,
    /// Of an inline request, as they were when it was posted.
    pub(super) inline: Vec<u8>,
}

#[derive(Debug, Default)]
pub(super) struct Imitation {
    /// Places of the queues.
    pub(super) send_places: usize,
    pub(super) recv_places: usize,
    pub(super) inline_bytes: usize,
    /// Sends that are refused with EINVAL: those to that address of the peer.
    pub(super) refuses_remote: Option<u64>,
    /// Likewise those without memory, of which a marker is one.
    pub(super) refuses_empty: bool,
    pub(super) refuses_recv: Option<u64>,
    pub(super) is_broken: bool,
    /// Whether sends that fail without being signaled complete, as verbs says they do.
    pub(super) hides_flushes: bool,
    /// Everything that was posted, ever.
    pub(super) sends: Vec<Sent>,
    pub(super) recvs: Vec<(Recv, Vec<Sge>)>,
    /// Posted and not carried out.
    pub(super) send_queue: VecDeque<Send>,
    pub(super) recv_queue: VecDeque<Recv>,
    /// Places in use: given back when a completion is polled.
    pub(super) send_used: usize,
    pub(super) recv_used: usize,
    /// Completions, each with the places that it gives back.
    pub(super) completions: [VecDeque<(PolledCompletion, usize)>; 2],
    /// Sends that were carried out since the last completion.
    pub(super) unreported: usize,
    pub(super) has_failed: bool,
}

impl Imitation {
    /// Carries out the next send. Whether there was one.
    pub(super) fn carry_out_send(&mut self, status: WcStatus) -> bool {
        let Some(request) = self.send_queue.pop_front() else {
            return false;
        };
        let status = if self.has_failed {
            WcStatus::WrFlushErr
        } else {
            status
        };
        self.has_failed |= status != WcStatus::Success;
        self.unreported += 1;
        let shows = status != WcStatus::Success && !self.hides_flushes;
        if request.flags & SIGNALED != 0 || shows {
            let completion = PolledCompletion {
                wr_id: request.wr_id,
                status: status as u32,
                vendor_err: 0x77 * u32::from(status != WcStatus::Success),
                ..PolledCompletion::default()
            };
            let places = std::mem::take(&mut self.unreported);
            self.completions[0].push_back((completion, places));
        }
        true
    }

    /// Carries out the next receive: what it completes with but for its number. Whether there was one.
    pub(super) fn carry_out_recv(&mut self, completion: PolledCompletion) -> bool {
        let Some(request) = self.recv_queue.pop_front() else {
            return false;
        };
        let flushed = PolledCompletion {
            status: WcStatus::WrFlushErr as u32,
            ..PolledCompletion::default()
        };
        let completion = PolledCompletion {
            wr_id: request.wr_id,
            ..if self.has_failed { flushed } else { completion }
        };
        self.has_failed |= completion.status != 0;
        self.completions[1].push_back((completion, 1));
        true
    }

    /// What a modify to RESET does: what is posted is forgotten, and what is complete stays.
    pub(super) fn reset(&mut self) {
        self.send_queue.clear();
        self.recv_queue.clear();
        (self.send_used, self.recv_used, self.unreported) = (0, 0, 0);
        for (_, places) in self.completions.iter_mut().flatten() {
            *places = 0;
        }
        self.has_failed = false;
    }

    /// Completions that nobody has polled.
    pub(super) fn waiting(&self) -> usize {
        self.completions.iter().map(VecDeque::len).sum()
    }
}

impl Provider for Imitation {
    fn post_send(&mut self, requests: &[Send], sges: &[Sge]) -> PostedUpTo {
        for (count, request) in requests.iter().enumerate() {
            let refuse = |errno| PostedUpTo { count, errno };
            if self.send_used == self.send_places {
                return refuse(libc::ENOMEM);
            }
            let is_empty = request.sges == 0 && self.refuses_empty;
            if is_empty || self.refuses_remote == Some(request.remote_addr) {
                return refuse(libc::EINVAL);
            }
            let sges = &sges[request.first_sge as usize..][..request.sges as usize];
            let mut inline = Vec::new();
            if request.flags & INLINE != 0 {
                for sge in sges {
                    inline.extend(memory(sge));
                }
                if inline.len() > self.inline_bytes {
                    return refuse(libc::EINVAL);
                }
            }
            self.sends.push(Sent {
                request: *request,
                sges: sges.to_vec(),
                inline,
            });
            self.send_queue.push_back(*request);
            self.send_used += 1;
        }
        PostedUpTo {
            count: requests.len(),
            errno: 0,
        }
    }

    fn post_recv(&mut self, requests: &[Recv], sges: &[Sge]) -> PostedUpTo {
        for (count, request) in requests.iter().enumerate() {
            let refuse = |errno| PostedUpTo { count, errno };
            if self.recv_used == self.recv_places {
                return refuse(libc::ENOMEM);
            }
            if self.refuses_recv == Some(self.recvs.len() as u64) {
                return refuse(libc::EINVAL);
            }
            let sges = &sges[request.first_sge as usize..][..request.sges as usize];
            self.recvs.push((*request, sges.to_vec()));
            self.recv_queue.push_back(*request);
            self.recv_used += 1;
        }
        PostedUpTo {
            count: requests.len(),
            errno: 0,
        }
    }

    fn poll(&mut self, queue: Queue, into: &mut [PolledCompletion]) -> Option<usize> {
        if self.is_broken {
            return None;
        }
        let mut count = 0;
        for place in into {
            let Some((completion, places)) = self.completions[queue as usize].pop_front() else {
                break;
            };
            *place = completion;
            count += 1;
            match queue {
                Queue::Send => self.send_used -= places,
                Queue::Recv => self.recv_used = self.recv_used.saturating_sub(places),
            }
        }
        Some(count)
    }
}

/// The bytes of a piece of memory of this process.
#[allow(unsafe_code)] // a device's read
pub(super) fn memory(sge: &Sge) -> Vec<u8> {
    // SAFETY: the relay has put the bytes there, in a slot that lives as long as the rig.
    unsafe { std::slice::from_raw_parts(sge.addr as usize as *const u8, sge.len_bytes as usize) }
        .to_vec()
}
