//! The software ConnectX as the kernel would show it: `mlx5_0`, to unmodified verbs programs.
//!
//! Two doors lead to it. [`run`] is the reference: a supervisor that has the device, and answers the system calls of a program
//! and all its children (`filter`, `install`, `listener`, `service`, `clients`). [`Local`] is the device in the program's own process,
//! for the library `libdoorbell_softcx.so` (the workspace member `preload`), which puts itself before the C library's functions.
//!
//! Behind both, `context::Context` is one open of `/dev/infiniband/uverbs0`. It decodes what libibverbs and libmlx5 ask for
//! (`uverbs`, with the structures in `abi`), keeps the handles (`objects`), and asks the device (`soft::client`). The process reads
//! its events from `channel`s, and maps `pages` as it would map a card's. `sysfs` writes what libibverbs finds the device by.

mod abi;
mod caller;
mod channel;
mod clients;
pub(crate) mod context;
mod descriptors;
mod events;
mod filter;
#[cfg(fuzzing)]
pub mod hostile;
mod install;
mod last_close;
mod limits;
mod listener;
mod local;
mod node;
mod objects;
mod pages;
mod poll;
mod port;
mod process;
mod scratch;
mod service;
mod signals;
mod supervisor;
pub(crate) mod sysfs;
mod uverbs;

pub use local::{Local, Redirect};
pub use supervisor::{Outcome, run};
