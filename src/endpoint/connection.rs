//! The generation of an endpoint: making it, connecting it, failing it, and bringing it back.
#![allow(unsafe_code)] // makes the queues over the ring memory of a queue pair

use std::collections::VecDeque;
#[cfg(feature = "verbs")]
use std::ptr::NonNull;
#[cfg(feature = "verbs")]
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;

use crate::bytecode::Program;
use crate::endpoint::shared::{EndpointRef, EndpointShared};
use crate::endpoint::{Address, Endpoint, EndpointConfig, PathReport};
use crate::mlx5::{RecvQueue, RecvQueueConfig, SendQueue, SendQueueConfig};
use crate::nic::{Attributes, Queues, State};
#[cfg(feature = "verbs")]
use crate::nic::{Step, Steps};
use crate::region::ProtectionDomain;
use crate::{Cause, Error, Result, StateKind, WorkError};

/// How long a reset waits for the streams to be done with the endpoint's programs.
const QUIESCE: Duration = Duration::from_secs(5);

impl Endpoint {
    /// Makes an endpoint. Receives can be posted at once, everything else after [`Endpoint::connect`].
    ///
    /// # Errors
    /// [`Error::Range`] or [`Error::Alignment`] naming the field of `config`; [`Error::State`] or [`Error::System`] if the
    /// device or the system has no room for it.
    pub fn new(domain: &ProtectionDomain, config: &EndpointConfig) -> Result<Endpoint> {
        config.check()?;
        let (shared, targets) = EndpointShared::new(domain, config)?;
        let Queues::Mlx5(&memory) = shared.qp.queues();
        let send_config = SendQueueConfig {
            ring: memory.send_ring,
            wqebb_count: memory.sizes.send_wqebbs,
            qpn: shared.qp.qpn(),
            max_segments: config.max_segments,
            max_inline_bytes: config.max_inline_bytes,
            record: targets.send_record,
            uar: targets.uar,
        };
        let recv_config = RecvQueueConfig {
            ring: memory.recv_ring,
            wqe_count: memory.sizes.recv_wqes,
            max_segments: memory.sizes.recv_segments(),
            record: targets.recv_record,
        };
        // SAFETY: the rings are those of the queue pair, of these sizes; the endpoint holds `shared`, and drops it last.
        let (send, recv) = unsafe { (SendQueue::new(send_config)?, RecvQueue::new(recv_config)?) };
        shared.qp.init(config.attributes())?;
        Ok(Endpoint {
            send,
            recv,
            send_commits: VecDeque::with_capacity(config.send_depth as usize + 1),
            recv_commits: VecDeque::with_capacity(config.recv_depth as usize + 1),
            program: Program::for_targets(shared.targets_id()),
            config: *config,
            #[cfg(feature = "cuda")]
            replay: None,
            shared: EndpointRef::new(shared),
        })
    }

    /// The configuration that it was made with.
    pub fn config(&self) -> &EndpointConfig {
        &self.config
    }

    /// The number of its queue pair.
    pub fn qpn(&self) -> u32 {
        self.shared.qp.qpn()
    }

    /// A number of its own in this process, which a reset does not change.
    pub(crate) fn id(&self) -> u64 {
        self.shared.targets_id()
    }

    /// The protection domain.
    pub fn domain(&self) -> &ProtectionDomain {
        &self.shared.domain
    }

    /// Bytes of queue memory that the endpoint takes.
    pub fn memory_bytes(&self) -> usize {
        self.shared.qp.memory_bytes()
    }

    /// What the peer needs to connect to this endpoint; it changes with every [`Endpoint::reset`].
    pub fn address(&self) -> Address {
        Address {
            queue_pair: self.shared.qp.local(),
            mtu_bytes: self.config.mtu_bytes.min(self.shared.qp.mtu_bytes()),
        }
    }

    /// Connects to the peer's endpoint. Both sides do so, in any order; packets that come before this side has connected
    /// are sent again by the peer. The devices of the two are of one kind, or RoCE v2 reaches both: a card, the kernel's SoftRoCE, or `softcx` with UDP as its wire.
    ///
    /// # Errors
    /// [`Error::State`] if it is connected already, has failed, or if the peer's device is gone or on another host; [`Error::Foreign`] if it
    /// is a device of another kind, and not both are reached by RoCE; [`Error::System`] naming the verbs call that failed.
    pub fn connect(&mut self, peer: &Address) -> Result<()> {
        // As in `reset`: no failure of the endpoint comes between two steps.
        let _generation = self.shared.hold_generation();
        self.check_reliable("connect")?;
        self.check_unconnected()?;
        let mtu_bytes = self.config.mtu_bytes.min(peer.mtu_bytes);
        self.shared.qp.init(Attributes {
            mtu_bytes,
            ..self.config.attributes()
        })?;
        self.shared.qp.connect(&peer.queue_pair)
    }

    /// Makes a UD endpoint ready to send, and to receive. It has no peer: [`Work::to`](crate::Work::to) says where a send goes.
    ///
    /// # Errors
    /// [`Error::State`] for an endpoint of a reliable connection, if it is active already, or has failed; [`Error::System`] naming the verbs call that failed.
    pub fn activate(&mut self) -> Result<()> {
        let _generation = self.shared.hold_generation();
        if !self.is_datagram() {
            return Err(Error::state(
                StateKind::WrongKind,
                "activate",
                "the endpoint has a reliable connection (RC); call `connect` with the address of its peer",
            ));
        }
        self.check_unconnected()?;
        self.shared.qp.activate()
    }

    /// Fails unless [`Endpoint::connect`] can be called now.
    pub(crate) fn check_unconnected(&self) -> Result<()> {
        self.shared.check_alive()?;
        if self.is_connected() {
            return Err(Error::state(
                StateKind::AlreadyConnected,
                "connect",
                "the endpoint is connected already; reset it first",
            ));
        }
        Ok(())
    }

    /// Whether [`Endpoint::connect`], or [`Endpoint::activate`], was done and nothing has failed since.
    pub fn is_connected(&self) -> bool {
        // A card shows some failures by a completion alone.
        self.shared.qp.state() == State::ReadyToSend && self.shared.failure().is_none()
    }

    /// The first failure since the last reset, if there was one. Looks at new completions first.
    pub fn failure(&self) -> Option<WorkError> {
        self.shared.look_for_failure();
        self.shared.failure()
    }

    /// Aborts: fails the endpoint as the watchdog would, releases every wait, and flushes what is in flight.
    pub fn abort(&self) {
        self.fail(Cause::Aborted);
    }

    pub(crate) fn fail(&self, cause: Cause) {
        self.shared.fail(None, cause);
    }

    /// A handle with which a thread can abort an endpoint that another thread uses.
    pub fn abort_handle(&self) -> AbortHandle {
        AbortHandle {
            shared: Arc::downgrade(&self.shared),
            other: None,
        }
    }

    /// Fails if the endpoint has failed.
    ///
    /// # Errors
    /// [`Error::Work`].
    pub(crate) fn check_alive(&self) -> Result<()> {
        self.shared.check_alive()
    }

    /// [`Endpoint::check_alive`] behind a look at the completions and events that the device has for it.
    ///
    /// # Errors
    /// [`Error::Work`].
    pub(crate) fn look_whether_alive(&self) -> Result<()> {
        self.shared.look_for_failure();
        self.shared.check_alive()
    }

    /// Waits until the device of an endpoint that has failed has stopped, or was given up.
    pub(crate) fn await_stop(&self) {
        self.shared.shut_down_until(u64::MAX);
    }

    /// Whether the device of an endpoint that has failed has stopped, or was given up: [`Endpoint::await_stop`] without the wait.
    pub(crate) fn has_stopped(&self) -> bool {
        self.shared.shut_down_until(0);
        self.shared.has_stopped()
    }

    /// Returns the endpoint to its initial state, with a new address. Its failure is cleared; work in flight, and
    /// operations that are prepared and not queued on a stream, are dropped. Waits for up to five seconds until streams
    /// are done with the endpoint's programs, and as long until the driver has reported that captured graphs were destroyed. If a wait is not going to end, call
    /// [`Endpoint::abort`] first.
    ///
    /// # Errors
    /// [`Error::Timeout`] if a stream still has a program, [`Error::State`] if a graph of the application still has operations of this endpoint; nothing has changed then.
    /// [`Error::System`].
    pub fn reset(&mut self) -> Result<()> {
        #[cfg(feature = "cuda")]
        self.end_replays()?;
        for queue in &self.shared.queues {
            queue.check_ownership_over("reset")?;
        }
        let _closing = self.shared.close(QUIESCE)?;
        let made = {
            // Until the queue pair is in INIT again. Otherwise the watchdog could set it to ERR between two steps, for an abort of the new generation.
            let _generation = self.shared.hold_generation();
            self.shared.start_over()?;
            self.send.reset();
            self.recv.reset();
            self.send_commits.clear();
            self.recv_commits.clear();
            self.shared.reset_records();
            self.shared.qp.init(self.config.attributes())
        };
        self.shared.handles.clear();
        made
    }

    /// The control path that doorbells take, and why no better one is available.
    pub fn path(&self) -> PathReport {
        self.shared.path.clone()
    }
}

/// One generation of an endpoint, from one reset to the next. Its holder may abort this generation and no later one.
#[cfg(feature = "verbs")]
#[derive(Debug)]
pub(crate) struct ConnectedGeneration {
    shared: Weak<EndpointShared>,
    epoch: u32,
}

#[cfg(feature = "verbs")]
impl ConnectedGeneration {
    /// Fails the endpoint, if it still has this generation.
    pub(crate) fn end(&self, cause: Cause) {
        if let Some(shared) = self.shared.upgrade() {
            shared.fail_in(self.epoch, None, cause);
        }
    }
}

#[cfg(feature = "verbs")]
impl Endpoint {
    /// What [`Endpoint::connect`] does, with the attributes that a connection manager agreed on with the peer. Should it fail, so has
    /// the endpoint.
    pub(crate) fn connect_by(&mut self, steps: &Steps<'_>) -> Result<ConnectedGeneration> {
        self.check_reliable("connect")?;
        self.check_unconnected()?;
        self.shared.qp.init(self.config.attributes())?;
        let generation = ConnectedGeneration {
            shared: Arc::downgrade(&self.shared),
            epoch: self.shared.epoch.load(Ordering::Acquire),
        };
        if let Err(error) = self.shared.qp.connect_by(steps) {
            generation.end(Cause::QueuePair);
            return Err(error);
        }
        Ok(generation)
    }

    /// Brings the queue pair one step further, as `ibv_modify_qp` does, for applications that exchange the number of the queue pair,
    /// LIDs or GIDs and PSNs themselves, and for peers that do not use this library. The steps are those to INIT, from INIT to RTR, and from
    /// RTR to RTS; the last one does what [`Endpoint::connect`] does. A new endpoint is in INIT already, and may be brought there
    /// once more with other rights. The attributes are given to the device as they are: those of [`EndpointConfig`]
    /// for the same purpose do not hold then.
    ///
    /// # Safety
    /// `attributes` points to a `struct ibv_qp_attr` of the rdma-core that this library was built with, in which the fields that `mask`
    /// (`enum ibv_qp_attr_mask`) names are set, and all others have a value.
    ///
    /// # Errors
    /// [`Error::State`] for another step, if the endpoint is connected or has failed, and on a device that is not one of libibverbs;
    /// [`Error::System`] of `ibv_modify_qp`. Nothing has changed then.
    pub unsafe fn modify_qp(
        &mut self,
        attributes: NonNull<std::ffi::c_void>,
        mask: i32,
    ) -> Result<()> {
        let _generation = self.shared.hold_generation();
        self.check_unconnected()?;
        let step = Step {
            // SAFETY: the caller's promise.
            attr: unsafe { attributes.cast().read() },
            mask: rdma_sys::ibv_qp_attr_mask(mask.cast_unsigned()),
        };
        self.shared.qp.modify_by(step)
    }

    /// The name that the system has for its device, and the port: where it is one of the system's.
    pub(crate) fn place(&self) -> Option<(String, u8)> {
        self.shared.qp.place()
    }

    /// Reads and atomics at once that are asked for and that the device can do: that it serves, and that it has on their way.
    #[cfg(feature = "verbs")]
    pub(crate) fn reads(&self) -> (u8, u8) {
        let (serves, has) = self.shared.qp.reads_max();
        (
            serves.min(self.config.max_reads),
            has.min(self.config.max_reads),
        )
    }
}

/// Aborts an endpoint that it does not own; see [`Endpoint::abort_handle`].
#[derive(Debug, Clone)]
pub struct AbortHandle {
    shared: Weak<EndpointShared>,
    /// Of a second endpoint that is aborted with it.
    other: Option<Weak<EndpointShared>>,
}

impl AbortHandle {
    /// [`Endpoint::abort`] of the endpoint, if it still exists.
    pub fn abort(&self) {
        self.fail(Cause::Aborted);
    }

    /// [`AbortHandle::abort`] for the end of that rank of the group.
    #[cfg(feature = "group")]
    pub(crate) fn abort_for_rank(&self, rank: u32) {
        self.fail(Cause::Rank(rank));
    }

    /// Whether an endpoint of it still exists.
    #[cfg(feature = "group")]
    pub(crate) fn is_alive(&self) -> bool {
        let mut handles = [Some(&self.shared), self.other.as_ref()]
            .into_iter()
            .flatten();
        handles.any(|shared| shared.strong_count() > 0)
    }

    /// A handle for both endpoints.
    pub(crate) fn and(self, other: AbortHandle) -> AbortHandle {
        AbortHandle {
            other: Some(other.shared),
            ..self
        }
    }

    fn fail(&self, cause: Cause) {
        let handles = [Some(&self.shared), self.other.as_ref()];
        for shared in handles.into_iter().flatten().filter_map(Weak::upgrade) {
            shared.fail(None, cause);
        }
    }
}
