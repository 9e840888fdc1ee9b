//! Messages that nobody has answered, and peers that are gone.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use super::id::{ExchangeState, IdState};
use super::mad::CM_RETRIES;
use super::table::{CmTable, EventParam, event};
use crate::doors::abi::CmConnParam;

/// How often the table looks whether the devices of its peers are still there.
const PEER_LOOK: Duration = Duration::from_millis(250);
/// How often a peer may say that its answer to a reply takes time: some two minutes, as with the kernel's manager.
const MOST_DELAYS: u8 = 128;
/// What a peer that does not answer gives.
const TIMED_OUT: i32 = -libc::ETIMEDOUT;

impl CmTable {
    /// Handles all timers whose time has come. Returns how long until the next one.
    pub(super) fn run_timers(&mut self, next_look: &mut Instant) -> Option<Duration> {
        let now = Instant::now();
        while let Some(&(due, handle)) = self.timers.first()
            && due <= now
        {
            self.set_timer(handle, None);
            self.on_timer(handle);
        }
        let looks = self.ids.values().any(|id| id.exchange.exists);
        if looks && now >= *next_look {
            *next_look = now + PEER_LOOK;
            self.look_at_peers();
        }
        let next = self.timers.first().map(|&(due, _)| due);
        let next = next.into_iter().chain(looks.then_some(*next_look)).min();
        next.map(|next| next.saturating_duration_since(now))
    }

    fn on_timer(&mut self, handle: u32) {
        use ExchangeState::*;
        let Some(id) = self.ids.get(&handle) else {
            return;
        };
        let is_over = id.exchange.repetitions >= CM_RETRIES || id.exchange.delays >= MOST_DELAYS;
        match id.exchange.state {
            RequestSent | RequestReceivedThere | ReplySent | ReplyReceivedThere
            | DisconnectSent | ServiceRequestSent
                if !is_over =>
            {
                let is_mrad =
                    matches!(id.exchange.state, RequestReceivedThere | ReplyReceivedThere);
                if is_mrad {
                    let before = match id.exchange.state {
                        RequestReceivedThere => RequestSent,
                        _ => ReplySent,
                    };
                    self.set_exchange(handle, before);
                }
                self.repeat(handle);
            }
            _ => self.give_up(handle),
        }
    }

    /// The peer has not answered, or late packets are no more expected.
    fn give_up(&mut self, handle: u32) {
        use ExchangeState::*;
        let Some(id) = self.ids.get(&handle) else {
            return;
        };
        let (exchange, state) = (id.exchange.state, id.state);
        let nothing = EventParam::Connection(CmConnParam::default());
        match exchange {
            RequestSent | ServiceRequestSent if self.try_next(handle) => return,
            RequestSent | RequestReceivedThere | ReplySent | ReplyReceivedThere
            | ServiceRequestSent => {
                self.set_exchange(handle, Idle);
                if state == IdState::Connect {
                    self.post(handle, event::UNREACHABLE, TIMED_OUT, nothing);
                }
            }
            DisconnectSent => {
                self.wait(handle);
                self.disconnected(handle, TIMED_OUT);
            }
            TimeWait => {
                self.set_exchange(handle, Idle);
                if state == IdState::Disconnect {
                    self.post(handle, event::TIMEWAIT_EXIT, 0, nothing);
                }
            }
            _ => {}
        }
        self.forget_orphan(handle);
    }

    /// A device that has ended says nothing any more: as a kernel does for a process that has died, this side ends its connections.
    fn look_at_peers(&mut self) {
        use ExchangeState::*;
        let mut ports = HashMap::new();
        let mut gone = Vec::new();
        for (&handle, id) in &self.ids {
            let exchange = &id.exchange;
            let talks = !matches!(exchange.state, Idle | TimeWait);
            let Some(peer) = exchange.peer.filter(|&peer| talks && peer != self.own) else {
                continue;
            };
            let port = *ports.entry(peer).or_insert_with(|| self.port_of(peer));
            if !exchange.is_with(port) {
                gone.push(handle);
            }
        }
        for handle in gone {
            self.set_timer(handle, None);
            self.lose_peer(handle);
        }
    }

    fn lose_peer(&mut self, handle: u32) {
        use ExchangeState::*;
        let Some(id) = self.ids.get(&handle) else {
            return;
        };
        match id.exchange.state {
            Established => {
                self.wait(handle);
                self.disconnected(handle, 0);
            }
            DisconnectReceived => self.wait(handle),
            RequestReceived | ReplyReceived | ServiceRequestReceived => {
                self.set_exchange(handle, Idle);
                let is_answered = self.ids.get(&handle).is_some_and(|id| id.user_handle != 0);
                if is_answered {
                    let nothing = EventParam::Connection(CmConnParam::default());
                    self.post(handle, event::UNREACHABLE, TIMED_OUT, nothing);
                }
            }
            _ => self.give_up(handle),
        }
        self.forget_orphan(handle);
    }
}
