//! Nothing but a build script, which looks for rdma-core and libclang before anything is compiled against them.
