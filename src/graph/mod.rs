//! CUDA graphs with transfers in them, launched any number of times.
//!
//! A graph repeats constants; but a doorbell record, a doorbell and the owner bit of a completion change with each transfer. So the
//! operations are recorded here, and not the stores. Each launch prepares the operations anew and patches what their programs store and
//! poll into the nodes (`cuGraphExecBatchMemOpNodeSetParams`), which takes one call of the driver for up to 255 memory operations.
//! Launches that are queued or running keep the values that they had. On the proxy path the same is done, with fewer words.
//!
//! Messages and collective operations take the same operations each time: what depends on earlier ones is waited for in the graph or before it.
//!
//! [`GraphBuilder`] records, while a stream is captured or into a graph that the application makes node by node; [`GraphExec`]
//! launches.

mod builder;
mod exec;
mod member;
mod step;

pub use builder::GraphBuilder;
pub use exec::GraphExec;
pub use member::GraphMember;
