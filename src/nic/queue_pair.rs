//! Queue pairs.

#[cfg(feature = "cuda")]
use std::any::Any;
use std::fmt;
#[cfg(feature = "cuda")]
use std::sync::Weak;

use super::{Abilities, Attributes, PeerQueuePair, QueuePairMemory, State};
use crate::Result;
#[cfg(feature = "verbs")]
use crate::verbs::{Step, Steps};

/// The queues of a queue pair as memory, in the format that its device consumes. Valid while the queue pair lives.
pub(crate) enum Queues<'a> {
    /// WQE rings with a doorbell record and UAR registers, and CQE rings whose entries are given back by consumer records.
    Mlx5(&'a QueuePairMemory),
}

/// A queue pair, RC or UD, with two completion queues of its own. Dropping it destroys it in the device first.
pub(crate) trait NicQueuePair: fmt::Debug + Send + Sync {
    /// Where its queues lie, and in which format.
    fn queues(&self) -> Queues<'_>;

    /// Bytes of memory that it takes, without the device's own bookkeeping.
    fn memory_bytes(&self) -> usize;

    /// Its number.
    fn qpn(&self) -> u32;

    /// Its state, without a system call.
    fn state(&self) -> State;

    /// Whether a completion queue overran: completions were lost.
    fn overrun(&self) -> bool;

    /// Looks for what the device says of its queue pairs apart from completions. A device that sets the state itself has nothing to look for.
    fn poll_async_events(&self) {}

    /// Lets a device of software, or a relay, work inside the caller, for poll loops. Returns whether there was any work.
    fn progress(&self) -> bool {
        false
    }

    /// Tells a device of software, or a relay, that a register of this queue pair was stored to. A card notices the store itself.
    fn rung(&self) {}

    /// Returns when the device has the posted receives, so that a message of the peer finds them. A device that reads its receive queue when a
    /// message comes has them already.
    fn wait_receives_posted(&self) {}

    /// True if requests may be waiting for earlier ones and need [`NicQueuePair::progress`] to be sent.
    fn holds_work(&self) -> bool {
        false
    }

    /// Whether a stream can ring this queue pair's doorbell itself: why, or why not.
    fn direct(&self) -> Result<&'static str, String>;

    /// For a physical NIC, whose doorbell registers not every GPU can store to: the open device, which keeps them mapped.
    #[cfg(feature = "cuda")]
    fn uar_mapping(&self) -> Option<Weak<dyn Any + Send + Sync>> {
        None
    }

    /// The operations that it has, and how long a message can be.
    fn abilities(&self) -> Abilities;

    /// The largest MTU that a connection can have here.
    fn mtu_bytes(&self) -> u32;

    /// What the other end needs to connect to this one, until the next reset.
    fn local(&self) -> PeerQueuePair;

    /// RESET to INIT: receives may be posted from now on. In INIT it sets the attributes anew.
    ///
    /// # Errors
    /// [`Error::State`](crate::Error::State) if the state does not lead to INIT; those of the device's calls.
    fn init(&self, attributes: Attributes) -> Result<()>;

    /// INIT to RTR and RTS. After an error it is where it was.
    ///
    /// # Errors
    /// [`Error::Foreign`](crate::Error::Foreign) for a peer on another kind of device; as [`NicQueuePair::init`].
    fn connect(&self, peer: &PeerQueuePair) -> Result<()>;

    /// INIT to RTR and RTS of a UD queue pair, which has no peer. After an error it is where it was.
    ///
    /// # Errors
    /// As [`NicQueuePair::init`].
    fn activate(&self) -> Result<()>;

    /// INIT to RTR and RTS, by a connection manager. After an error it may be in any state.
    ///
    /// # Errors
    /// As [`NicQueuePair::connect`], and those of `steps`.
    #[cfg(feature = "verbs")]
    fn connect_by(&self, _steps: &Steps<'_>) -> Result<()> {
        Err(crate::Error::state(
            crate::StateKind::Unsupported,
            "connect",
            "the software NIC of this process has no connection manager",
        ))
    }

    /// One step of the application's to INIT, RTR or RTS.
    ///
    /// # Errors
    /// [`Error::State`](crate::Error::State) for another step; those of the device's call.
    #[cfg(feature = "verbs")]
    fn modify_by(&self, _step: Step) -> Result<()> {
        Err(crate::Error::state(
            crate::StateKind::Unsupported,
            "modify",
            "the software NIC of this process takes no attributes of verbs; connect its endpoints by their addresses",
        ))
    }

    /// The most reads and atomics at once that the device serves, and that it has on their way.
    #[cfg(feature = "verbs")]
    fn reads_max(&self) -> (u8, u8) {
        (u8::MAX, u8::MAX)
    }

    /// The name that the system has for the device, and its port: where it is one of the system's.
    #[cfg(feature = "verbs")]
    fn place(&self) -> Option<(String, u8)> {
        None
    }

    /// Any state to ERR. The device flushes what is posted: the software ConnectX before this returns, a card soon, a relay in turns to
    /// come. See [`NicQueuePair::quiesce`]. A command of the device: it may take milliseconds, or never return.
    ///
    /// # Errors
    /// Those of the device's call. The queue pair may go on. [`NicQueuePair::state`] is that of an error all the same.
    fn fail(&self) -> Result<()>;

    /// After [`NicQueuePair::fail`], once what was rung is flushed or nothing more is expected of the device: the device executes nothing and writes
    /// nothing for this queue pair any more. Returns whether the consumer records of its completion queues must be set again after it. A command,
    /// as [`NicQueuePair::fail`].
    ///
    /// # Errors
    /// Those of the device's call, and [`Error::State`](crate::Error::State) if its success means nothing, because the device has reported
    /// that it failed. The device may go on.
    fn quiesce(&self) -> Result<bool>;

    /// Any state to RESET. The driver makes rings and records fresh before it goes on.
    ///
    /// # Errors
    /// Those of the device's calls.
    fn reset(&self) -> Result<()>;

    /// Whether completion queues begin at their first entry after a reset. A card's go on where they are: they are objects of their own.
    fn resets_cqs(&self) -> bool;
}
