//! Words in memory as operations of a graph.

use std::sync::Arc;

use super::operation::{ReplayKind, ReplayOperation, ReplayTarget, ReplayTicket, add};
use crate::region::Region;
use crate::stream::{ReplayKeeper, ReplayStream};
use crate::{Error, Result, StateKind};

/// A wait for a word: `enum dbl_replay_condition`, the value of the first launch, and how much it grows with each.
#[derive(Debug, Clone, Copy)]
pub(in crate::endpoint) struct WordWait {
    pub(in crate::endpoint) condition: u32,
    pub(in crate::endpoint) value: u64,
    pub(in crate::endpoint) step: u64,
    pub(in crate::endpoint) is_wide: bool,
    pub(in crate::endpoint) timeout_ns: u64,
}

/// Adds a wait for a word of a region.
pub(in crate::endpoint) fn replay_wait(
    stream: &dyn ReplayStream,
    (region, offset): (&Region, u64),
    wait: WordWait,
) -> Result<ReplayTicket> {
    let at = address(stream, region, offset, wait.is_wide)?;
    let operation = ReplayOperation {
        kind: ReplayKind::WaitWord,
        condition: wait.condition,
        is_wide: wait.is_wide,
        words: [at, wait.value, wait.step, 0, 0, 0, 0, 0],
        ..ReplayOperation::new(wait.timeout_ns)
    };
    queue(stream, &operation, region)
}

/// Adds a store to a word of a region.
pub(in crate::endpoint) fn replay_store(
    stream: &dyn ReplayStream,
    (region, offset): (&Region, u64),
    value: u64,
    is_wide: bool,
) -> Result<ReplayTicket> {
    let at = address(stream, region, offset, is_wide)?;
    let operation = ReplayOperation {
        kind: ReplayKind::Store,
        is_wide,
        words: [at, value, 0, 0, 0, 0, 0, 0],
        ..ReplayOperation::new(0)
    };
    queue(stream, &operation, region)
}

fn queue(
    stream: &dyn ReplayStream,
    operation: &ReplayOperation,
    region: &Region,
) -> Result<ReplayTicket> {
    let ends = stream.capture()?.is_none();
    let cell = Arc::new(stream.cells().take(stream)?);
    let kept: ReplayKeeper = Arc::new((region.clone(), Arc::clone(&cell)));
    add(
        stream,
        operation,
        ReplayTarget::default(),
        &cell,
        kept,
        None,
    )?;
    Ok(ReplayTicket::new(None, cell, (false, ends)))
}

/// The device's address of a word.
fn address(stream: &dyn ReplayStream, region: &Region, offset: u64, is_wide: bool) -> Result<u64> {
    let len_bytes = if is_wide { 8 } else { 4 };
    if !region.is_registered() {
        return Err(Error::state(
            StateKind::Deregistered,
            "stream value",
            "the region is deregistered",
        ));
    }
    region.slice(offset, len_bytes)?;
    region.check_aligned("offset", offset, len_bytes)?;
    stream.reach(&region.kernel_memory(offset))
}
