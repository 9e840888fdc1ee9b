//! The states of a queue pair whose connection a connection manager makes: rdma_cm finds the path, and agrees on the rest with the peer.
#![allow(unsafe_code)] // reads the name of a device

use std::ffi::CStr;

use rdma_sys::{ibv_qp_attr, ibv_qp_attr_mask as Mask, ibv_qp_state};

use super::qp_states::States;
use crate::{Error, Result, StateKind};
use doorbell_wire::verbs::State;

/// What a connection manager says of one step of a queue pair's way to its peer.
pub(crate) struct Step {
    pub(crate) attr: ibv_qp_attr,
    /// Those of the attributes that it found.
    pub(crate) mask: Mask,
}

/// Asks a connection manager for the step to that state.
pub(crate) type Steps<'a> = dyn Fn(ibv_qp_state::Type) -> Result<Step> + 'a;

impl States {
    /// INIT to RTR and RTS, with the attributes that a connection manager agreed on with the peer: path, MTU, PSNs, repetitions, reads.
    /// Settings of this side alone come from the queue pair's own attributes.
    ///
    /// # Errors
    /// [`Error::State`] if the state does not lead there, [`Error::System`] of `ibv_modify_qp`, those of `steps`. The queue pair may be in
    /// any state then: its connection has failed.
    pub(crate) fn connect_by(&self, steps: &Steps<'_>) -> Result<()> {
        let progress = self.progress();
        if self.state() != State::Init {
            return Err(Error::state(
                StateKind::QueuePair,
                "connect",
                format!("the queue pair is in state {:?}", self.state()),
            ));
        }
        let own = &progress.attributes;
        // For the partition. The peer's rights here are not for the manager to decide.
        let mut step = steps(ibv_qp_state::IBV_QPS_INIT)?;
        step.attr.qp_access_flags = self.access(own).bits();
        self.modify("ibv_modify_qp to INIT", step.attr, step.mask)?;
        let mut step = steps(ibv_qp_state::IBV_QPS_RTR)?;
        step.attr.min_rnr_timer = own.min_rnr_timer;
        self.modify("ibv_modify_qp to RTR", step.attr, step.mask)?;
        self.step(State::Init, State::ReadyToReceive);
        let mut step = steps(ibv_qp_state::IBV_QPS_RTS)?;
        step.attr.timeout = own.ack_timeout;
        self.modify("ibv_modify_qp to RTS", step.attr, step.mask)?;
        self.step(State::ReadyToReceive, State::ReadyToSend);
        Ok(())
    }

    /// One step of the application's: to INIT, from INIT to RTR, or from RTR to RTS, with its attributes as they are.
    ///
    /// # Errors
    /// [`Error::State`] if the step is another one, [`Error::System`] of `ibv_modify_qp`. The state is as before then.
    pub(crate) fn modify_by(&self, step: Step) -> Result<()> {
        let _progress = self.progress();
        let (from, to) = match (self.state(), step.attr.qp_state) {
            (State::Init, ibv_qp_state::IBV_QPS_INIT) => (State::Init, State::Init),
            (State::Init, ibv_qp_state::IBV_QPS_RTR) => (State::Init, State::ReadyToReceive),
            (State::ReadyToReceive, ibv_qp_state::IBV_QPS_RTS) => {
                (State::ReadyToReceive, State::ReadyToSend)
            }
            (state, to) => {
                return Err(Error::state(
                    StateKind::QueuePair,
                    "modify",
                    format!(
                        "the queue pair is in state {state:?}, from which no step leads to `enum ibv_qp_state` {to}: they are INIT, RTR and RTS"
                    ),
                ));
            }
        };
        self.modify("ibv_modify_qp", step.attr, step.mask)?;
        self.step(from, to);
        Ok(())
    }

    /// The name that the system has for the device, and the port.
    pub(crate) fn place(&self) -> (String, u8) {
        let context = self.context();
        // SAFETY: an open context has a device, whose name is an array with an end mark.
        let name =
            unsafe { CStr::from_ptr(rdma_sys::ibv_get_device_name(context.raw().as_ref().device)) };
        (name.to_string_lossy().into_owned(), context.port.number)
    }
}
