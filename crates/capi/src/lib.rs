//! The C interface: what `include/doorbell.h` and the headers that it includes declare.
//!
//! It is a user of the crate's public interface like any other, and adds only what C lacks: handles, codes for errors, checks of
//! pointers, and a boundary that no panic crosses. Names are those of the header, so that a test can compare the two.
//!
//! - `boundary` makes codes (`code`) of results (`failure`) and panics, and keeps the text (`last_error`); `handle` hands objects out and knows them again; `argument` reads and
//!   writes what pointers point to.
//! - `exchange` is what `group` and `store` have in common. Each other file implements one section of a header in `include/doorbell`: `version`, `error`, `device`, `region`, `endpoint`,
//!   `rendezvous`, `group`, `store`, `cuda`, `stream`, `event`, `work`, `queue`, `value`, `cpu`, `ticket`, `page_push`, `graph`, `cache`,
//!   `adopt`, `address_handle`, `bounce`, `cm`, `device_queue`, `trigger_stream`, `message`, `communicator`, `matcher`.

mod address_handle;
mod adopt;
mod argument;
mod bounce;
mod boundary;
mod cache;
mod cm;
mod code;
mod communicator;
mod cpu;
mod cuda;
mod device;
mod device_queue;
mod endpoint;
mod error;
mod event;
mod exchange;
mod failure;
mod graph;
mod group;
mod handle;
mod last_error;
mod matcher;
mod message;
mod page_push;
mod queue;
mod region;
mod rendezvous;
mod store;
mod stream;
mod ticket;
mod trigger_stream;
mod value;
mod version;
mod work;
