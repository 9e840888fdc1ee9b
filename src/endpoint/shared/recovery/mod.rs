//! Recovery of an endpoint: what happens from a failure to the next generation.
//!
//! 1. `failure`: the failure is recorded. Only the first one of a generation counts.
//! 2. `stopping`: the device is stopped. The queue pair is moved to ERR, flushes its work requests, and is moved to RESET. `stop_state` holds how
//!    far that is, and the endpoints whose device does not confirm it.
//! 3. `release_waits`: after the device is stopped, or is given up, the waits of streams are released. It also has
//!    `shut_down`, which makes steps 2 and 3, and `end_endpoint`, which does so for an endpoint that is dropped.
//! 4. `reset`: the queue pair is reset once more, its rings are cleared, and the next generation starts. `generation` makes sure that no stream has a program of the endpoint
//!    then, and that no failure is recorded for the wrong generation.
//!
//! A device must not execute a doorbell behind a wait that was released, so step 3 comes after step 2. `EndpointShared` has the state.

mod failure;
mod generation;
mod release_waits;
mod reset;
mod stop_state;
mod stopping;

pub(in crate::endpoint) use generation::Entered;
pub(super) use stop_state::DeviceStop;
