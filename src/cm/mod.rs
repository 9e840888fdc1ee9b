//! Connections by rdma_cm: to ADDR:PORT, as sockets have them, with peers that need not know this library. Feature `verbs`.
//!
//! - [`CmListener`] waits for requests; a [`CmRequest`] is taken with an endpoint, or refused.
//! - [`CmConnection`] is the resulting connection on either side; dropping it ends the connection.
//!
//! The queue pair is the endpoint's own, made before and on another context than librdmacm's; so librdmacm does not drive it. It is
//! asked for the attributes of each step instead (`rdma_init_qp_attr`), and the steps are the endpoint's.
//! `id` has librdmacm's objects and calls, `event` its events, `socket` its addresses.

mod connection;
mod event;
mod id;
mod listener;
mod socket;

pub use connection::CmConnection;
pub use listener::{CmListener, CmRequest};
