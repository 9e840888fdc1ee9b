//! Pages whose numbers are in memory of the GPU, and a signal behind them.

use std::sync::Arc;

use super::super::post::Endpoint;
use super::super::shared::timeout_ns;
use super::super::ticket::Ticket;
use super::operation::{ReplayKind, ReplayOperation, refused};
use crate::region::{Region, RegionSpan, RemoteSlice, Slice};
use crate::stream::Executor;
use crate::{Error, Result, StateKind};

/// Pages to be written to the peer: which ones is found in memory when the stream comes to it.
///
/// The table has an entry of 8 bytes for each page: the number of a page of `local`, a `u32` in native byte order, and the number of the page of `remote` that it is
/// written to. `count` is a `u32`: how many entries there are.
#[derive(Debug, Clone, Copy)]
pub struct PagePush<'a> {
    /// Bytes of a page, 1 to 2^30.
    pub page_bytes: u32,
    /// Where the pages are. A rest that is no whole page is not used.
    pub local: RegionSpan<'a>,
    /// Where the peer's pages are, with the length of that memory.
    pub remote: RemoteSlice,
    /// The entries, as many as fit: memory of the stream's GPU, or of the host.
    pub table: Slice<'a>,
    /// A region, and the offset of the number of entries in it, a multiple of 4.
    pub count: (&'a Region, u64),
    /// 8 bytes of the peer's memory, at a multiple of 8. When all pages are written, they become the number of times that this operation was executed, the first
    /// time 1. [`stream_wait_count64`](crate::stream_wait_count64) of `(1, 1)` waits for it at the peer.
    pub signal: RemoteSlice,
}

impl Endpoint {
    /// Queues a push of pages on a CUDA stream: a kernel reads the table, writes the pages, and then the signal. On a stream that the application captures, each launch of
    /// its graph does so, with the table of then. A [`Endpoint::stream_wait_cq`] behind it waits until the peer has the pages and the signal.
    ///
    /// An entry that names no page, or more entries than the table has room for, is a failure of the operation: nothing is written, and the endpoint fails.
    ///
    /// # Errors
    /// As [`Endpoint::stream_queue_send`] on a captured stream; [`Error::Range`] for a length of a page; [`Error::Alignment`] for the table, the count and the signal;
    /// [`Error::OutOfBounds`] for the count and the signal; [`Error::State`] for another kind of stream.
    pub fn stream_push_pages(
        &mut self,
        stream: &dyn Executor,
        push: &PagePush<'_>,
    ) -> Result<Ticket> {
        let Some(stream) = stream.replays() else {
            return Err(Error::state(
                StateKind::WrongKind,
                "push pages",
                "a kernel of a CUDA stream reads the table; on another stream, queue a write for each page",
            ));
        };
        let pages = |len_bytes: u64| u32::try_from(len_bytes / u64::from(push.page_bytes));
        if push.page_bytes == 0 || push.page_bytes > PAGE_BYTES_MAX {
            return Err(Error::Range {
                argument: "page_bytes",
                value: push.page_bytes.into(),
                min: 1,
                max: PAGE_BYTES_MAX.into(),
            });
        }
        if push.signal.len_bytes() < SIGNAL_BYTES {
            return Err(Error::OutOfBounds {
                argument: "signal",
                offset: 0,
                len_bytes: SIGNAL_BYTES,
                limit_bytes: push.signal.len_bytes(),
                what: "the remote slice",
            });
        }
        let (count_region, count_offset) = push.count;
        count_region.slice(count_offset, 4)?;
        push.table
            .region
            .check_aligned("table", push.table.offset, 8)?;
        count_region.check_aligned("count", count_offset, 4)?;
        if !push.signal.addr().is_multiple_of(SIGNAL_BYTES) {
            return Err(Error::Alignment {
                argument: "signal",
                value: push.signal.addr(),
                align: SIGNAL_BYTES,
            });
        }
        let held = [push.local.region, push.table.region, count_region];
        // Of the right domain; the pages follow at higher addresses.
        let first = push.local.len_bytes.min(push.page_bytes.into());
        let first = push.local.region.slice(push.local.offset, first)?;
        let local = self.check_slices(&[first])?;
        let local = local.first().ok_or_else(|| refused("there are no pages"))?;
        let ends = (
            pages(push.local.len_bytes).unwrap_or(u32::MAX),
            pages(push.remote.len_bytes()).unwrap_or(u32::MAX),
        );
        let pair = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
        let (capture, timeout) = (stream.capture()?, self.config.wait_timeout);
        let operation = ReplayOperation {
            kind: ReplayKind::Pages,
            segments: push.table.len_bytes / 8,
            words: [
                stream.reach(&push.table.region.kernel_memory(push.table.offset))?,
                stream.reach(&count_region.kernel_memory(count_offset))?,
                local.addr,
                push.remote.addr(),
                push.signal.addr(),
                pair(local.lkey, push.remote.rkey()),
                pair(push.page_bytes, push.signal.rkey()),
                pair(ends.0, ends.1),
            ],
            ..ReplayOperation::new(timeout_ns(timeout))
        };
        let replay = self.take_queues(stream)?;
        for region in held {
            replay.hold(region)?;
        }
        let cell = Arc::new(stream.cells().take(stream)?);
        replay.queue(stream, &operation, &cell, None)?;
        replay.expect(capture, &cell);
        Ok(Ticket::of_replay(replay.ticket(cell, (false, false))))
    }
}

/// `DOORBELL_MESSAGE_BYTES_MAX` of queue.h.
const PAGE_BYTES_MAX: u32 = 1 << 30;
const SIGNAL_BYTES: u64 = 8;
