//! The software ConnectX as the kernel would show it: `mlx5_0`, to unmodified verbs programs.
//!
//! Two doors lead to it. [`run`] is the reference: a supervisor that has the device, and answers the system calls of a program
//! and all its children (`filter`, `install`, `listener`, `call_handler`, `clients`). [`Local`] is the device in the program's own process,
//! for the library `libdoorbell_softcx.so` (the workspace member `preload`), which puts itself before the C library's functions.
//!
//! Behind both, `context::DeviceContext` is one open of `/dev/infiniband/uverbs0`. It decodes what libibverbs and libmlx5 ask for
//! (`uverbs`, with the structures in `abi`), keeps the handles (`objects`), and asks the device (`device::client`). The process reads
//! its events from `event_pipe`s, and maps `pages` as it would map a card's. `rdma_cm` is the connection manager. `sysfs` writes what libibverbs and
//! librdmacm find the device by.

mod abi;
mod call_handler;
mod caller;
mod clients;
mod cm_files;
pub(crate) mod context;
mod descriptor_watch;
mod descriptors;
mod event_pipe;
mod events;
mod filter;
mod install;
mod limits;
mod listener;
mod local;
mod node;
mod objects;
mod pages;
mod pci_function;
mod poll;
mod port;
mod process;
mod rdma_cm;
mod scratch;
mod signals;
mod supervisor;
pub(crate) mod sysfs;
#[cfg(fuzzing)]
pub mod testing;
mod uverbs;

pub use local::{Local, Redirect};
pub use node::DeviceNode;
pub use supervisor::{ProgramExit, run};
