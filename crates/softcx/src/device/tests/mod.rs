//! Tests of the transport in a world whose clock stands still unless it is moved: every run is the same.

mod beside_memory;
mod clients;
mod commands;
mod datagrams;
mod depths;
pub(crate) mod driver;
mod errors;
mod fabric;
mod faults;
mod fetch;
pub(crate) mod harness;
mod hosts;
mod injected;
mod late_packets;
mod operations;
mod paced;
mod pair;
mod path_mtu;
mod shared;
mod speed;
mod states;
mod timing;
mod unreliable;
mod windows;
mod writes;
