//! What executes the programs of a CUDA stream.

/// What executes the programs of a CUDA stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Execution {
    /// The driver's memory operations (`cuStreamBatchMemOp_v2`). A kernel executes a program with an op that the device has no memory
    /// operation for.
    #[default]
    MemoryOps,
    /// A kernel of one thread that interprets the programs. It occupies a place on the GPU while it waits.
    Kernel,
}
