//! The software ConnectX as the kernel would show it: `mlx5_0`, to unmodified verbs programs.
//!
//! [`context::Context`] is one open of `/dev/infiniband/uverbs0`. It decodes what libibverbs and libmlx5 ask for (`uverbs`, with the
//! structures in `abi`), keeps the handles (`objects`), and asks the device (`soft::client`). The process reads its events from
//! `channel`s, and maps `pages` as it would map a card's. [`sysfs`] writes what libibverbs finds the device by.

mod abi;
mod channel;
pub(crate) mod context;
mod events;
mod objects;
mod pages;
mod port;
pub(crate) mod sysfs;
mod uverbs;
