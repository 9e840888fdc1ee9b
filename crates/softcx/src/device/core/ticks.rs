//! What a turn looks at only now and then.

use super::DeviceCore;
use crate::device::client::DeviceEvent;
use crate::device::qp::State;
use crate::device::wire::DeviceFailure;

/// Timers and failed queue pairs are looked at this often.
const TICK_NS: u64 = 20_000;
/// Failed queue pairs of other processes are looked at once in so many ticks.
const FAR_TICKS: u32 = 50;
/// Lanes are looked over for dead writers this often.
const SWEEP_NS: u64 = 20_000_000;

impl DeviceCore {
    /// The device is pulled out: it does nothing from now on.
    fn remove(&mut self) {
        self.gone = true;
        for qp in self.qps.iter_mut().flatten() {
            if qp.state() != State::Reset {
                qp.set_state(State::Error);
            }
        }
        self.clients.notify_all(DeviceEvent::DeviceFatal);
    }

    /// The device reports that it has failed. It may continue to work for a while: commands no longer stop it.
    fn report_failure(&mut self) {
        self.has_failed = true;
        self.commands.fail_device();
        for qp in self.qps.iter().flatten() {
            qp.status.set_device_failed();
        }
        self.clients.notify_all(DeviceEvent::DeviceFatal);
    }

    /// The port's GID stands at another index of its table from now on, or nowhere.
    pub(crate) fn set_gid_index(&mut self, index: Option<u8>) {
        self.gid_index = index;
        self.clients.notify_all(DeviceEvent::GidChange);
    }

    /// Timers, flushes of what was posted to failed queue pairs, and lanes without a writer.
    #[cold]
    pub(super) fn tick(&mut self, now_ns: u64) -> bool {
        self.next_tick_ns = now_ns + TICK_NS;
        let mut worked = false;
        let mut at = 0;
        while let Some(&slot) = self.lists.timed.get(at) {
            let Some(Some(qp)) = self.qps.get_mut(slot) else {
                self.lists.timed.swap_remove(at);
                continue;
            };
            worked |= qp.on_timer(self.parts.at(now_ns));
            if qp.next_timer_ns().is_none() {
                qp.timed = false;
                self.lists.timed.swap_remove(at);
            } else {
                at += 1;
            }
            self.mark_active(slot);
        }
        if self.parts.wire.is_gone(now_ns) {
            self.remove();
            return true;
        }
        match self.parts.wire.failure(now_ns) {
            DeviceFailure::None => {}
            DeviceFailure::Working if self.has_failed => {}
            DeviceFailure::Working => self.report_failure(),
            DeviceFailure::Over => {
                if !self.has_failed {
                    self.report_failure();
                }
                self.gone = true;
                return true;
            }
        }
        if let Some(active) = self.parts.wire.link_change(now_ns) {
            self.clients.notify_all(DeviceEvent::Port { active });
            worked = true;
        }
        if self.parts.wire.gid_moves(now_ns) {
            self.set_gid_index(self.gid_index.map(|index| index + 1));
            worked = true;
        }
        self.ticks = self.ticks.wrapping_add(1);
        for at in 0..self.lists.failed.len() {
            let Some(Some(qp)) = self.qps.get_mut(self.lists.failed[at]) else {
                continue;
            };
            // To look at the record of another process is a system call.
            let waits = qp.parts.recv_record.is_far() && !qp.requester.has_work();
            if waits && !self.ticks.is_multiple_of(FAR_TICKS) {
                continue;
            }
            let before = self.parts.counters.completions;
            qp.flush(self.parts.at(now_ns));
            worked |= self.parts.counters.completions != before;
        }
        let qps = &self.qps;
        self.lists.failed.retain(|&slot| {
            let qp = qps.get(slot).and_then(Option::as_ref);
            qp.is_some_and(|qp| matches!(qp.state(), State::Error | State::SendQueueError))
        });
        if now_ns >= self.next_sweep_ns {
            self.next_sweep_ns = now_ns + SWEEP_NS;
            self.inbox.sweep();
            let parts = &mut self.parts;
            if let Some(fabric) = &parts.fabric {
                parts.links.sweep_nodes(fabric, &mut parts.wire);
            }
        }
        worked
    }
}
