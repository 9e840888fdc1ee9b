//! Tests of the transport in a world whose clock stands still unless it is moved: every run is the same.

mod clients;
mod errors;
mod fabric;
mod faults;
mod operations;
mod speed;
mod states;
mod timing;
