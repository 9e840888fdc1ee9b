//! Queue pairs with the memory of their queues.
#![allow(unsafe_code)] // addresses that others use

#[cfg(feature = "verbs")]
use crate::Error;
use crate::Result;
use crate::nic::{Domain, RemoteQueuePair};
#[cfg(feature = "verbs")]
use crate::verbs;
use doorbell_softcx::device as soft;
#[cfg(feature = "verbs")]
use doorbell_wire::memory::Pages;
use doorbell_wire::memory::{QueuePairMemory, QueuePairSizes};
use doorbell_wire::verbs::{Attributes, State};

/// Sizes of a queue pair; counts are powers of two. A device may make it larger.
#[derive(Debug, Clone, Copy)]
#[cfg_attr(not(feature = "verbs"), allow(dead_code))] // the depths and inline bytes are for devices of plain verbs
pub(crate) struct QueuePairConfig {
    /// Work requests in flight at most, which need be no powers of two; and inline bytes of each.
    pub(crate) send_depth: u32,
    pub(crate) recv_depth: u32,
    pub(crate) inline_bytes: u32,
    pub(crate) send_wqebbs: u32,
    pub(crate) recv_wqes: u32,
    /// Pieces of memory of a work request.
    pub(crate) recv_segments: u32,
    pub(crate) send_cqes: u32,
    pub(crate) recv_cqes: u32,
}

/// Operations that not every device has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Abilities {
    pub(crate) atomics: bool,
    pub(crate) reads: bool,
}

/// Where the parts of a queue pair lie, and their sizes; valid while the [`QueuePair`] lives.
#[derive(Debug, Clone, Copy)]
pub(crate) struct QueueMemory {
    pub(crate) send_ring: *mut u8,
    pub(crate) send_wqebbs: u32,
    pub(crate) recv_ring: *mut u8,
    pub(crate) recv_wqes: u32,
    /// Pieces of memory of a receive, as its stride says.
    pub(crate) recv_segments: u32,
    /// Doorbell record: `[0]` receive, `[1]` send.
    pub(crate) record: *mut u32,
    /// The doorbell registers, which take turns, each the start of a BlueFlame buffer of `uar_bytes`; where that is 8, one register twice.
    pub(crate) uar: [*mut u8; 2],
    pub(crate) uar_bytes: u32,
    /// Rings of the completion queues, send and receive; their consumer records; and one word an entry, for the library's own use.
    pub(crate) cqs: [*mut u8; 2],
    pub(crate) cqes: [u32; 2],
    pub(crate) cq_records: [*mut u32; 2],
    pub(crate) cq_marks: [*mut u32; 2],
}

// SAFETY: addresses only; who uses them where is for the unsafe code that does.
unsafe impl Send for QueueMemory {}
// SAFETY: as above.
unsafe impl Sync for QueueMemory {}

#[derive(Debug)]
enum Kind {
    Soft(soft::QueuePair),
    #[cfg(feature = "verbs")]
    Verbs {
        pair: verbs::QueuePair,
        /// The marks of both completion queues.
        marks: Pages,
    },
    /// Any device of verbs; in a box because it is large.
    #[cfg(feature = "verbs")]
    Relay(Box<verbs::Relay>),
}

/// A reliable-connected queue pair with two completion queues of its own. Dropping it destroys it in the device first.
#[derive(Debug)]
pub(crate) struct QueuePair {
    kind: Kind,
    memory: QueueMemory,
}

impl QueuePair {
    /// Makes a queue pair in the RESET state.
    pub(crate) fn new(domain: &Domain, config: &QueuePairConfig) -> Result<QueuePair> {
        match domain {
            Domain::Soft { device, number } => {
                let pair = soft::QueuePair::new(
                    device,
                    &QueuePairSizes {
                        pd: *number,
                        send_wqebbs: config.send_wqebbs,
                        recv_wqes: config.recv_wqes,
                        recv_stride_bytes: 16 * config.recv_segments.next_power_of_two(),
                        send_cqes: config.send_cqes,
                        recv_cqes: config.recv_cqes,
                    },
                )?;
                let memory = own_memory(pair.memory(), config);
                Ok(QueuePair {
                    kind: Kind::Soft(pair),
                    memory,
                })
            }
            #[cfg(feature = "verbs")]
            Domain::Verbs(domain) if domain.is_plain() => {
                let relay = verbs::Relay::new(
                    domain,
                    &verbs::RelayConfig {
                        send_depth: config.send_depth,
                        recv_depth: config.recv_depth,
                        segments: config.recv_segments,
                        inline_bytes: config.inline_bytes,
                        send_wqebbs: config.send_wqebbs,
                        recv_wqes: config.recv_wqes,
                        send_cqes: config.send_cqes,
                        recv_cqes: config.recv_cqes,
                    },
                )?;
                let memory = own_memory(relay.memory(), config);
                Ok(QueuePair {
                    kind: Kind::Relay(Box::new(relay)),
                    memory,
                })
            }
            #[cfg(feature = "verbs")]
            Domain::Verbs(domain) => {
                let config = verbs::QueuePairConfig {
                    send_wqebbs: config.send_wqebbs,
                    recv_wqes: config.recv_wqes,
                    recv_segments: config.recv_segments.next_power_of_two(),
                    send_cqes: config.send_cqes,
                    recv_cqes: config.recv_cqes,
                };
                let pair = verbs::QueuePair::new(domain, &config)?;
                let queues = pair.queues();
                let marks = Pages::new(4 * (queues.send_cqes + queues.recv_cqes) as usize)?;
                let memory = verbs_memory(queues, &marks);
                Ok(QueuePair {
                    kind: Kind::Verbs { pair, marks },
                    memory,
                })
            }
        }
    }

    /// Where its parts lie.
    pub(crate) fn memory(&self) -> &QueueMemory {
        &self.memory
    }

    /// Bytes of memory that it takes, without the device's own bookkeeping.
    pub(crate) fn memory_bytes(&self) -> usize {
        match &self.kind {
            Kind::Soft(pair) => pair.memory_bytes(),
            #[cfg(feature = "verbs")]
            Kind::Verbs { marks, .. } => {
                let memory = &self.memory;
                let rings = memory.send_wqebbs * 64 + memory.recv_wqes * memory.recv_segments * 16;
                let cqes = memory.cqes.iter().sum::<u32>() * 64;
                (rings + cqes) as usize + marks.len_bytes()
            }
            #[cfg(feature = "verbs")]
            Kind::Relay(relay) => relay.memory_bytes(),
        }
    }

    /// Its number.
    pub(crate) fn qpn(&self) -> u32 {
        match &self.kind {
            Kind::Soft(pair) => pair.qpn(),
            #[cfg(feature = "verbs")]
            Kind::Verbs { pair, .. } => pair.states().qpn(),
            #[cfg(feature = "verbs")]
            Kind::Relay(relay) => relay.states().qpn(),
        }
    }

    /// Its state, without a call.
    #[inline]
    pub(crate) fn state(&self) -> State {
        match &self.kind {
            Kind::Soft(pair) => pair.status().state(),
            #[cfg(feature = "verbs")]
            Kind::Verbs { pair, .. } => pair.states().state(),
            #[cfg(feature = "verbs")]
            Kind::Relay(relay) => relay.state(),
        }
    }

    /// Whether a completion queue overran: completions were lost.
    pub(crate) fn overrun(&self) -> bool {
        match &self.kind {
            Kind::Soft(pair) => pair.status().overrun(),
            #[cfg(feature = "verbs")]
            Kind::Verbs { pair, .. } => pair.states().overrun(),
            #[cfg(feature = "verbs")]
            Kind::Relay(relay) => relay.states().overrun(),
        }
    }

    /// Looks for what the device says of its queue pairs apart from completions. The software NIC sets the state itself.
    #[inline]
    pub(crate) fn look_for_events(&self) {
        match &self.kind {
            Kind::Soft(_) => {}
            #[cfg(feature = "verbs")]
            Kind::Verbs { pair, .. } => pair.states().look_for_events(),
            #[cfg(feature = "verbs")]
            Kind::Relay(relay) => {
                // And for completions: the watchdog looks at endpoints that nobody polls.
                relay.turn();
                relay.states().look_for_events();
            }
        }
    }

    /// Lets a device of software, or a relay, work inside the caller, for poll loops. Whether there was any work.
    #[inline]
    pub(crate) fn progress(&self) -> bool {
        match &self.kind {
            Kind::Soft(pair) => pair.device().progress(),
            #[cfg(feature = "verbs")]
            Kind::Verbs { .. } => false,
            #[cfg(feature = "verbs")]
            Kind::Relay(relay) => relay.turn(),
        }
    }

    /// Tells a device of software, or a relay, that a register of this queue pair was stored to. To a card the store itself says it.
    #[inline]
    pub(crate) fn rung(&self) {
        match &self.kind {
            Kind::Soft(pair) => pair.rung(),
            #[cfg(feature = "verbs")]
            Kind::Verbs { .. } => {}
            #[cfg(feature = "verbs")]
            Kind::Relay(relay) => relay.rung(),
        }
    }

    /// Returns when the device has the receives that were rung for: an attempt of the peer finds them. A card, and a device of software, look
    /// for receives when a message comes.
    #[inline]
    pub(crate) fn settle_receives(&self) {
        #[cfg(feature = "verbs")]
        if let Kind::Relay(relay) = &self.kind {
            relay.settle_receives();
        }
    }

    /// Whether a stream can ring this queue pair's doorbell itself: why, or why not.
    pub(crate) fn direct(&self) -> Result<&'static str, String> {
        match &self.kind {
            Kind::Soft(_) => Ok(
                "a software ConnectX's UAR page is memory of this process, which a host stream stores to",
            ),
            #[cfg(feature = "verbs")]
            Kind::Verbs { .. } => Ok(
                "mlx5dv shows the queue's rings and its own UAR register, mapped into this process, which a host stream stores to",
            ),
            #[cfg(feature = "verbs")]
            Kind::Relay(relay) => Err(format!(
                "`{}` is used by plain verbs, which show no doorbell register: a thread has to post",
                relay.device_name()
            )),
        }
    }

    /// What it can do that not every device can.
    #[inline]
    pub(crate) fn abilities(&self) -> Abilities {
        match &self.kind {
            #[cfg(feature = "verbs")]
            Kind::Relay(relay) => {
                let verbs::Abilities { atomics, reads } = relay.abilities();
                Abilities { atomics, reads }
            }
            _ => Abilities {
                atomics: true,
                reads: true,
            },
        }
    }

    /// The largest MTU that a connection can have here.
    pub(crate) fn mtu_bytes(&self) -> u32 {
        match &self.kind {
            Kind::Soft(_) => 4096,
            #[cfg(feature = "verbs")]
            Kind::Verbs { pair, .. } => pair.states().mtu_bytes(),
            #[cfg(feature = "verbs")]
            Kind::Relay(relay) => relay.states().mtu_bytes(),
        }
    }

    /// What the other end needs to connect to this one, until the next reset.
    pub(crate) fn local(&self) -> RemoteQueuePair {
        match &self.kind {
            Kind::Soft(pair) => RemoteQueuePair::Soft(pair.local()),
            #[cfg(feature = "verbs")]
            Kind::Verbs { pair, .. } => RemoteQueuePair::Verbs(pair.states().local()),
            #[cfg(feature = "verbs")]
            Kind::Relay(relay) => RemoteQueuePair::Verbs(relay.states().local()),
        }
    }

    /// RESET to INIT: receives may be posted from now on. In INIT it sets the attributes anew.
    pub(crate) fn init(&self, attributes: Attributes) -> Result<()> {
        match &self.kind {
            Kind::Soft(pair) => Ok(pair.init(attributes)?),
            #[cfg(feature = "verbs")]
            Kind::Verbs { pair, .. } => pair.states().init(attributes),
            #[cfg(feature = "verbs")]
            Kind::Relay(relay) => relay.states().init(attributes),
        }
    }

    /// INIT to RTR and RTS. After an error it is where it was.
    pub(crate) fn connect(&self, remote: &RemoteQueuePair) -> Result<()> {
        match (&self.kind, remote) {
            (Kind::Soft(pair), RemoteQueuePair::Soft(remote)) => Ok(pair.connect(remote)?),
            #[cfg(feature = "verbs")]
            (Kind::Verbs { pair, .. }, RemoteQueuePair::Verbs(remote)) => {
                pair.states().connect(remote)
            }
            #[cfg(feature = "verbs")]
            (Kind::Relay(relay), RemoteQueuePair::Verbs(remote)) => relay.connect(remote),
            #[cfg(feature = "verbs")]
            _ => Err(Error::Foreign {
                argument: "peer",
                found: remote.kind_name().into(),
                expected: self.local().kind_name().into(),
            }),
        }
    }

    /// INIT to RTR and RTS, by a connection manager. After an error it may be in any state.
    #[cfg(feature = "verbs")]
    pub(crate) fn connect_by(&self, steps: &verbs::Steps<'_>) -> Result<()> {
        match &self.kind {
            Kind::Soft(_) => Err(Error::State {
                operation: "connect",
                reason: "the software NIC of this process has no connection manager".into(),
            }),
            Kind::Verbs { pair, .. } => pair.states().connect_by(steps),
            Kind::Relay(relay) => relay.states().connect_by(steps),
        }
    }

    /// The most reads and atomics at once that the device serves, and that it has on their way.
    #[cfg(feature = "verbs")]
    pub(crate) fn reads_max(&self) -> (u8, u8) {
        match &self.kind {
            Kind::Soft(_) => (u8::MAX, u8::MAX),
            Kind::Verbs { pair, .. } => pair.states().reads_max(),
            Kind::Relay(relay) => relay.states().reads_max(),
        }
    }

    /// The name that the system has for the device, and its port: where it is one of the system's.
    #[cfg(feature = "verbs")]
    pub(crate) fn place(&self) -> Option<(String, u8)> {
        match &self.kind {
            Kind::Soft(_) => None,
            Kind::Verbs { pair, .. } => Some(pair.states().place()),
            Kind::Relay(relay) => Some(relay.states().place()),
        }
    }

    /// Any state to ERR. The device flushes what is posted: the software NIC before this returns, a card soon, a relay in turns to come. See
    /// [`QueuePair::silence`].
    pub(crate) fn fail(&self) {
        match &self.kind {
            Kind::Soft(pair) => pair.fail(),
            #[cfg(feature = "verbs")]
            Kind::Verbs { pair, .. } => pair.states().fail(),
            #[cfg(feature = "verbs")]
            Kind::Relay(relay) => relay.fail(),
        }
    }

    /// After [`QueuePair::fail`], once what was rung is flushed or nothing more is expected of the device: it does not write to the
    /// completion queues by itself any more. Whether their consumer records must be set again after it.
    pub(crate) fn silence(&self) -> bool {
        match &self.kind {
            // It writes only what is rung later, in the order of the ring, and under the lock that its owner's waits end behind.
            Kind::Soft(_) => false,
            #[cfg(feature = "verbs")]
            Kind::Verbs { pair, .. } => {
                pair.states().silence();
                true
            }
            #[cfg(feature = "verbs")]
            Kind::Relay(relay) => {
                relay.silence();
                false
            }
        }
    }

    /// Any state to RESET. The driver makes rings and records fresh before it goes on.
    pub(crate) fn reset(&self) -> Result<()> {
        match &self.kind {
            Kind::Soft(pair) => Ok(pair.reset()?),
            #[cfg(feature = "verbs")]
            Kind::Verbs { pair, .. } => pair.states().reset(),
            #[cfg(feature = "verbs")]
            Kind::Relay(relay) => relay.reset(),
        }
    }

    /// Whether completion queues begin at their first entry after a reset. A card's go on where they are: they are objects of their own.
    pub(crate) fn resets_cqs(&self) -> bool {
        match &self.kind {
            Kind::Soft(_) => true,
            #[cfg(feature = "verbs")]
            Kind::Verbs { .. } => false,
            #[cfg(feature = "verbs")]
            Kind::Relay(_) => true,
        }
    }
}

/// Memory that was laid out for a device of software.
fn own_memory(memory: &QueuePairMemory, config: &QueuePairConfig) -> QueueMemory {
    QueueMemory {
        send_ring: memory.send_ring,
        send_wqebbs: config.send_wqebbs,
        recv_ring: memory.recv_ring,
        recv_wqes: config.recv_wqes,
        recv_segments: config.recv_segments,
        record: memory.record,
        uar: memory.uar,
        uar_bytes: 256,
        cqs: [memory.send_cq, memory.recv_cq],
        cqes: [config.send_cqes, config.recv_cqes],
        cq_records: [memory.send_cq_record, memory.recv_cq_record],
        cq_marks: [memory.send_marks, memory.recv_marks],
    }
}

#[cfg(feature = "verbs")]
fn verbs_memory(queues: &verbs::Queues, marks: &Pages) -> QueueMemory {
    QueueMemory {
        send_ring: queues.send_ring,
        send_wqebbs: queues.send_wqebbs,
        recv_ring: queues.recv_ring,
        recv_wqes: queues.recv_wqes,
        recv_segments: queues.recv_stride_bytes / 16,
        record: queues.record,
        // The second buffer lies behind the first; a register without buffers is one.
        uar: [0, queues.uar_bytes as usize].map(|offset| queues.uar.wrapping_add(offset)),
        uar_bytes: queues.uar_bytes.max(8),
        cqs: [queues.send_cq, queues.recv_cq],
        cqes: [queues.send_cqes, queues.recv_cqes],
        cq_records: [queues.send_cq_record, queues.recv_cq_record],
        cq_marks: [0, 4 * queues.send_cqes as usize].map(|offset| marks.at(offset).cast()),
    }
}
