//! The states of a queue pair, and the calls that lead from one to the next.
#![allow(unsafe_code)] // calls libibverbs

use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rdma_sys::{ibv_qp_attr, ibv_qp_attr_mask as Mask, ibv_qp_state};

use super::call::{failed, release, status};
use super::completion_queue::CompletionQueue;
use super::context::Context;
use super::events::AsyncStatus;
use super::gid::Gid;
use super::port::{Link, PortAddress};
use crate::{Error, Result, StateKind};
use doorbell_wire::verbs::{Abilities, Access, Attributes, State, Transport};

/// Routers on the way to the peer, at most: as many as there can be.
pub(super) const HOP_LIMIT: u8 = 255;

/// The data that one end of a connection needs of the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct VerbsRemote {
    pub(crate) port: PortAddress,
    pub(crate) qpn: u32,
    /// The PSN that it starts with, 24 bits.
    pub(crate) psn: u32,
    /// Reads and atomics that it serves at a time.
    pub(crate) reads: u8,
}

/// The data that later steps of a connection need from earlier ones.
#[derive(Debug, Clone, Copy)]
pub(super) struct StateProgress {
    /// The PSN of the next connection.
    psn: u32,
    /// The address that the peer is told, once it is chosen.
    gid: Option<Gid>,
    pub(super) attributes: Attributes,
}

/// The states of a queue pair, however it was created.
#[derive(Debug)]
pub(crate) struct States {
    qp: RawQp,
    transport: Transport,
    /// The objects that events can be about.
    subjects: [usize; 3],
    status: Arc<AsyncStatus>,
    context: Arc<Context>,
    /// Held through every call that changes the state.
    progress: Mutex<StateProgress>,
}

#[derive(Debug)]
pub(super) struct RawQp(pub(super) NonNull<rdma_sys::ibv_qp>);

impl Drop for RawQp {
    fn drop(&mut self) {
        // SAFETY: created by the code that made the `States`, destroyed once, before its completion queues and its domain.
        release("ibv_destroy_qp", || unsafe {
            rdma_sys::ibv_destroy_qp(self.0.as_ptr())
        });
    }
}

// SAFETY: the queue pair is handed to calls that any thread may make.
unsafe impl Send for RawQp {}
// SAFETY: as above.
unsafe impl Sync for RawQp {}

impl States {
    /// A queue pair in the RESET state. Its completion queues are destroyed after this.
    ///
    /// # Errors
    /// [`Error::System`] if the kernel has no random numbers for the first connection.
    pub(super) fn new(
        qp: RawQp,
        transport: Transport,
        context: &Arc<Context>,
        cqs: &[CompletionQueue; 2],
    ) -> Result<States> {
        let [send_cq, recv_cq] = cqs.each_ref().map(|cq| cq.raw().addr().get());
        let subjects = [qp.0.addr().get(), send_cq, recv_cq];
        let states = States {
            qp,
            transport,
            subjects,
            status: Arc::new(AsyncStatus::new()),
            context: Arc::clone(context),
            progress: Mutex::new(StateProgress {
                psn: random_psn()?,
                gid: None,
                attributes: Attributes::default(),
            }),
        };
        states.context.events.watch(subjects, &states.status);
        Ok(states)
    }

    pub(super) fn raw(&self) -> NonNull<rdma_sys::ibv_qp> {
        self.qp.0
    }

    pub(super) fn context(&self) -> &Context {
        &self.context
    }

    /// A step that a call has made, as [`AsyncStatus::step`].
    pub(super) fn step(&self, from: State, to: State) {
        self.status.step(from, to);
    }

    pub(super) fn progress(&self) -> MutexGuard<'_, StateProgress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Its number.
    pub(crate) fn qpn(&self) -> u32 {
        // SAFETY: alive; the number does not change.
        unsafe { self.qp.0.as_ref().qp_num }
    }

    /// The state that it was brought to, or that an event reported.
    #[inline]
    pub(crate) fn state(&self) -> State {
        self.status.state()
    }

    /// Whether a completion queue overran.
    pub(crate) fn overrun(&self) -> bool {
        self.status.overrun()
    }

    /// Looks for events of the device, unless a thread did so lately.
    pub(crate) fn poll_async_events(&self) {
        self.context.events.look();
    }

    /// What its device can do.
    pub(crate) fn abilities(&self) -> Abilities {
        self.context.abilities()
    }

    /// The largest MTU of the port.
    pub(crate) fn mtu_bytes(&self) -> u32 {
        self.context.port.mtu_bytes
    }

    /// What the other end needs to connect to this one, until the next reset.
    pub(crate) fn local(&self) -> VerbsRemote {
        let mut progress = self.progress();
        VerbsRemote {
            port: self.context.address(&mut progress.gid),
            qpn: self.qpn(),
            psn: progress.psn,
            reads: self.reads_in(&progress.attributes),
        }
    }

    /// RESET to INIT: receives may be posted from now on. In INIT the attributes are replaced.
    ///
    /// # Errors
    /// [`Error::System`] of `ibv_modify_qp`; [`Error::State`] if the state does not lead to INIT.
    pub(crate) fn init(&self, attributes: Attributes) -> Result<()> {
        let mut progress = self.progress();
        match self.state() {
            State::Reset => self.to_init(&attributes)?,
            State::Init => {}
            state => {
                let reason = format!("the queue pair is in state {state:?}");
                return Err(Error::state(StateKind::QueuePair, "init", reason));
            }
        }
        progress.attributes = attributes;
        Ok(())
    }

    /// The number of the peer's reads and atomics that are served at a time: like the MTU, the smaller of the requested value and the device's
    /// limit.
    fn reads_in(&self, attributes: &Attributes) -> u8 {
        attributes.max_reads.min(self.context.limits.reads_in)
    }

    /// The most reads and atomics that the device serves at once, and that it has in flight at once.
    pub(crate) fn reads_max(&self) -> (u8, u8) {
        let limits = &self.context.limits;
        (limits.reads_in, limits.reads_out)
    }

    /// The peer's rights, limited to the operations that the device supports: the driver refuses a queue pair with rights to others.
    pub(super) fn access(&self, attributes: &Attributes) -> Access {
        match self.context.limits.has_atomics() {
            true => attributes.access,
            false => attributes.access.without(Access::REMOTE_ATOMIC),
        }
    }

    fn to_init(&self, attributes: &Attributes) -> Result<()> {
        let mut attr = blank(ibv_qp_state::IBV_QPS_INIT);
        attr.pkey_index = attributes.pkey_index;
        attr.port_num = self.context.port.number;
        let mut mask = Mask::IBV_QP_PKEY_INDEX | Mask::IBV_QP_PORT;
        if self.transport == Transport::Ud {
            attr.qkey = attributes.qkey;
            mask |= Mask::IBV_QP_QKEY;
        } else {
            attr.qp_access_flags = self.access(attributes).bits();
            mask |= Mask::IBV_QP_ACCESS_FLAGS;
        }
        self.modify("ibv_modify_qp to INIT", attr, mask)?;
        self.step(State::Reset, State::Init);
        Ok(())
    }

    /// INIT to RTR and RTS. This succeeds also if the device reports an error of the queue pair meanwhile; then that is the state.
    ///
    /// # Errors
    /// [`Error::System`] of `ibv_modify_qp`; [`Error::State`] if the state does not lead there, or the other end is on another kind of
    /// link. The queue pair then has its earlier state.
    pub(crate) fn connect(&self, remote: &VerbsRemote) -> Result<()> {
        let mut progress = self.progress();
        let refuse = |kind, reason: String| Err(Error::state(kind, "connect", reason));
        if self.state() != State::Init {
            return refuse(
                StateKind::QueuePair,
                format!("the queue pair is in state {:?}", self.state()),
            );
        }
        let own = self.context.port.address;
        if own.link != remote.port.link {
            return refuse(
                StateKind::Unreachable,
                format!(
                    "the peer's link is {:?}, this port's is {:?}",
                    remote.port.link, own.link
                ),
            );
        }
        let made = self
            .to_ready_to_receive(&mut progress, remote)
            .and_then(|()| self.to_ready_to_send(&progress, remote));
        if made.is_err() && self.state() != State::Init {
            // If this fails as well, `state` shows it.
            let _ = self
                .to_reset()
                .and_then(|()| self.to_init(&progress.attributes));
        }
        made
    }

    /// INIT to RTR and RTS of a UD queue pair, which has no peer.
    ///
    /// # Errors
    /// As [`States::connect`].
    pub(crate) fn activate(&self) -> Result<()> {
        let progress = self.progress();
        if self.state() != State::Init {
            let reason = format!("the queue pair is in state {:?}", self.state());
            return Err(Error::state(StateKind::QueuePair, "activate", reason));
        }
        let attr = blank(ibv_qp_state::IBV_QPS_RTR);
        let made = self
            .modify("ibv_modify_qp to RTR", attr, Mask(0))
            .and_then(|()| {
                self.step(State::Init, State::ReadyToReceive);
                let mut attr = blank(ibv_qp_state::IBV_QPS_RTS);
                attr.sq_psn = progress.psn;
                self.modify("ibv_modify_qp to RTS", attr, Mask::IBV_QP_SQ_PSN)
            });
        match made {
            Ok(()) => self.step(State::ReadyToReceive, State::ReadyToSend),
            Err(_) if self.state() != State::Init => {
                // If this fails as well, `state` shows it.
                let _ = self
                    .to_reset()
                    .and_then(|()| self.to_init(&progress.attributes));
            }
            Err(_) => {}
        }
        made
    }

    fn to_ready_to_receive(
        &self,
        progress: &mut StateProgress,
        remote: &VerbsRemote,
    ) -> Result<()> {
        let port = &self.context.port;
        let own = match progress.gid {
            None => self.context.address(&mut progress.gid),
            Some(gid) => port.address_at(gid),
        };
        let attributes = &progress.attributes;
        if !port.needs_global_route && !needs_global_route(&own, &remote.port) {
            return self.receive_from(attributes, remote, None);
        }
        let find = |gid| port.gids.find(self.context.raw(), gid);
        let mut gid = find(progress.gid.unwrap_or(port.gid))?;
        loop {
            let made = self.receive_from(attributes, remote, Some(gid.index));
            if made.is_ok() {
                return made;
            }
            // Once more if the address has moved meanwhile.
            match find(gid) {
                Ok(now) if now != gid => gid = now,
                _ => return made,
            }
        }
    }

    /// By a global route from the entry of the table of GIDs at that index, or by LIDs.
    fn receive_from(
        &self,
        attributes: &Attributes,
        remote: &VerbsRemote,
        gid_index: Option<u8>,
    ) -> Result<()> {
        let port = &self.context.port;
        let mut attr = blank(ibv_qp_state::IBV_QPS_RTR);
        let mtu_bytes = attributes.mtu_bytes.min(port.mtu_bytes);
        // `enum ibv_mtu`: 1 is 256, 5 is 4096.
        attr.path_mtu = mtu_bytes.clamp(256, 4096).ilog2() - 7;
        attr.dest_qp_num = remote.qpn;
        attr.rq_psn = remote.psn;
        attr.max_dest_rd_atomic = self.reads_in(attributes);
        attr.min_rnr_timer = attributes.min_rnr_timer;
        attr.ah_attr.port_num = port.number;
        attr.ah_attr.dlid = remote.port.lid;
        attr.ah_attr.sl = attributes.service_level;
        if let Some(index) = gid_index {
            attr.ah_attr.is_global = 1;
            attr.ah_attr.grh.dgid.raw = remote.port.gid;
            attr.ah_attr.grh.sgid_index = index;
            attr.ah_attr.grh.hop_limit = HOP_LIMIT;
            attr.ah_attr.grh.traffic_class = attributes.traffic_class;
        }
        let mask = Mask::IBV_QP_AV
            | Mask::IBV_QP_PATH_MTU
            | Mask::IBV_QP_DEST_QPN
            | Mask::IBV_QP_RQ_PSN
            | Mask::IBV_QP_MAX_DEST_RD_ATOMIC
            | Mask::IBV_QP_MIN_RNR_TIMER;
        self.modify("ibv_modify_qp to RTR", attr, mask)?;
        self.step(State::Init, State::ReadyToReceive);
        Ok(())
    }

    fn to_ready_to_send(&self, progress: &StateProgress, remote: &VerbsRemote) -> Result<()> {
        let mut attr = blank(ibv_qp_state::IBV_QPS_RTS);
        attr.timeout = progress.attributes.ack_timeout;
        attr.retry_cnt = progress.attributes.retry_count;
        attr.rnr_retry = progress.attributes.rnr_retry;
        attr.sq_psn = progress.psn;
        // No more than the peer serves: it treats one too many as an invalid request.
        let reads_out = self.context.limits.reads_out.min(remote.reads);
        attr.max_rd_atomic = progress.attributes.max_reads.min(reads_out);
        let mask = Mask::IBV_QP_TIMEOUT
            | Mask::IBV_QP_RETRY_CNT
            | Mask::IBV_QP_RNR_RETRY
            | Mask::IBV_QP_SQ_PSN
            | Mask::IBV_QP_MAX_QP_RD_ATOMIC;
        self.modify("ibv_modify_qp to RTS", attr, mask)?;
        self.step(State::ReadyToReceive, State::ReadyToSend);
        Ok(())
    }

    /// Any state to ERR: the device flushes what is posted, some time later. The state is reported as ERR, whatever the device answers.
    ///
    /// # Errors
    /// [`Error::System`] of `ibv_modify_qp`. The device may go on.
    pub(crate) fn fail(&self) -> Result<()> {
        let _progress = self.progress();
        let is_reset = self.state() == State::Reset;
        self.status.fail();
        if is_reset {
            return Ok(());
        }
        let attr = blank(ibv_qp_state::IBV_QPS_ERR);
        self.modify("ibv_modify_qp to ERR", attr, Mask(0))
    }

    /// After [`States::fail`]: the device writes nothing more to the completion queues when this returns. Doorbells do nothing. The
    /// state that shows is still the error; and the consumer records are libmlx5's last, so they are to be set again.
    ///
    /// # Errors
    /// [`Error::System`] of `ibv_modify_qp`; [`Error::State`] if the device has reported that it failed. From then on the kernel's driver answers in
    /// its place, and with success (`mlx5_internal_err_ret_value`). The device may go on.
    pub(crate) fn quiesce(&self) -> Result<()> {
        let _progress = self.progress();
        let call = "ibv_modify_qp to RESET";
        self.modify(call, blank(ibv_qp_state::IBV_QPS_RESET), Mask(0))?;
        self.context.events.take();
        if self.status.device_failed() {
            return Err(Error::state(
                StateKind::QueuePair,
                call,
                "the device has reported that it failed (IBV_EVENT_DEVICE_FATAL); the kernel answers commands in its place, and it may go on",
            ));
        }
        Ok(())
    }

    /// Any state to RESET. The completion queues go on where they are; see [`VerbsQueuePair::quiesce`] about their records.
    ///
    /// # Errors
    /// [`Error::System`] of `ibv_modify_qp`, or if the kernel has no random numbers for the next connection; [`Error::State`] if a
    /// completion queue overran.
    pub(crate) fn reset(&self) -> Result<()> {
        let mut progress = self.progress();
        if self.overrun() {
            return Err(Error::state(
                StateKind::QueuePair,
                "reset",
                "a completion queue overran, which ends it; make a new endpoint",
            ));
        }
        let psn = random_psn()?;
        self.to_reset()?;
        progress.psn = psn;
        Ok(())
    }

    fn to_reset(&self) -> Result<()> {
        let attr = blank(ibv_qp_state::IBV_QPS_RESET);
        self.modify("ibv_modify_qp to RESET", attr, Mask(0))?;
        // Events of the generation that ends must not be applied to the next one.
        self.context.events.take();
        self.status.reset();
        Ok(())
    }

    /// The caller holds `progress`.
    pub(super) fn modify(
        &self,
        call: &'static str,
        mut attr: ibv_qp_attr,
        mask: Mask,
    ) -> Result<()> {
        let mask = (mask | Mask::IBV_QP_STATE).0.cast_signed();
        // SAFETY: a live queue pair; the attributes that the mask names are filled in, and the others are zero.
        status(call, || unsafe {
            rdma_sys::ibv_modify_qp(self.qp.0.as_ptr(), &raw mut attr, mask)
        })
    }
}

impl Drop for States {
    fn drop(&mut self) {
        self.context.events.forget(self.subjects);
    }
}

/// Attributes that are zero but for the state.
fn blank(state: ibv_qp_state::Type) -> ibv_qp_attr {
    // SAFETY: plain numbers and arrays of them, for which zero is a value.
    let mut attr: ibv_qp_attr = unsafe { std::mem::zeroed() };
    attr.qp_state = state;
    attr
}

/// Always on Ethernet; on InfiniBand between subnets, and where there is no local address.
pub(super) fn needs_global_route(own: &PortAddress, remote: &PortAddress) -> bool {
    own.link == Link::Ethernet || remote.lid == 0 || own.gid[..8] != remote.gid[..8]
}

fn random_psn() -> Result<u32> {
    let mut bytes = [0u8; 4];
    // SAFETY: a place for that many bytes.
    let got = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
    if got != bytes.len() as isize {
        let error = std::io::Error::last_os_error();
        return Err(failed(
            "getrandom",
            error.raw_os_error().unwrap_or(libc::EIO),
        ));
    }
    Ok(u32::from_ne_bytes(bytes) & 0xff_ffff)
}
