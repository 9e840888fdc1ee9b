//! `libdoorbell_softcx.so`: loaded before all other libraries of a verbs program (`LD_PRELOAD`), it shows the program a software
//! ConnectX that lives in its own process. `doorbell softcx run --door preload -- PROGRAM` does that.
//!
//! It puts itself before the functions of the C library by which libibverbs finds and talks to a device: those that take paths,
//! `fstat`, `ioctl` and `socket`; and before those of UCX by which a program waits. Nothing happens, and no thread starts, before the program looks for RDMA devices.
//!
//! Variadic functions are defined here with their last argument in place: on the machines that this is built for (x86-64,
//! aarch64) a variadic call passes it in the same register.
//!
//! After a fork the child has no device: an engine does not survive it. Contexts that it inherited are dead there (commands fail with
//! EIO, completions no longer come), as those of a card may not be used either; what it opens anew works.

mod access;
mod attributes;
mod calls;
mod opens;
mod paths;
mod progress;
mod state;
mod verbs;
