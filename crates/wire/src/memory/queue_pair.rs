//! The memory of a queue pair, as a provider library would lay it out: rings, doorbell records, completion queues, UAR page.
#![allow(unsafe_code)] // addresses that two threads use

use crate::memory::{Pages, page_bytes};
use crate::mlx5::RecvQueue;
use crate::verbs::{Capacity, Transport};
use crate::{Error, Result};

/// Offsets of the two doorbell registers of a UAR page, each the start of a 256-byte BlueFlame buffer (mlx5 PRM; the
/// offsets are `MLX5_BF_OFFSET` and the alternate buffer in rdma-core's provider).
const UAR_REGISTERS: [usize; 2] = [0x800, 0x900];

/// Lengths of the queues of a queue pair in mlx5's formats; all counts are powers of two.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueuePairSizes {
    /// 64-byte blocks of the send ring, 1 to 32768.
    pub send_wqebbs: u32,
    /// Receives, 1 to 32768.
    pub recv_wqes: u32,
    /// Bytes of a receive WQE, 16 to 1024.
    pub recv_stride_bytes: u32,
    /// Entries of the completion queues, send and receive, 1 to 65536.
    pub cqes: [u32; 2],
}

impl QueuePairSizes {
    /// 64-byte blocks of the longest work request.
    #[must_use]
    pub fn wqebbs_each(capacity: &Capacity) -> u32 {
        // Control and address segment, and either the slices or the inline header and bytes; an atomic has one slice. The address of a
        // datagram has three segments.
        let inline = if capacity.inline_bytes == 0 {
            0
        } else {
            (4 + capacity.inline_bytes).div_ceil(16)
        };
        let head = match capacity.transport {
            Transport::Ud => 4,
            _ => 2,
        };
        (head + capacity.segments.max(inline).max(2)).div_ceil(4)
    }

    /// The lengths with which the queues have that capacity, whatever the work requests are.
    #[must_use]
    pub fn of(capacity: &Capacity) -> QueuePairSizes {
        let Capacity {
            send_depth,
            recv_depth,
            ..
        } = *capacity;
        QueuePairSizes {
            send_wqebbs: (send_depth * QueuePairSizes::wqebbs_each(capacity)).next_power_of_two(),
            recv_wqes: recv_depth.next_power_of_two(),
            recv_stride_bytes: RecvQueue::stride_bytes(capacity.segments),
            // Twice the depth: what is in flight, and as much that is complete and not collected yet.
            cqes: [send_depth, recv_depth].map(|depth| (2 * depth).next_power_of_two()),
        }
    }

    /// Pieces of memory of a receive, as its length says.
    #[must_use]
    pub fn recv_segments(&self) -> u32 {
        self.recv_stride_bytes / 16
    }

    fn check(&self) -> Result<()> {
        let range = |argument, value: u32, min, max| {
            if u64::from(value) < min || u64::from(value) > max {
                return Err(Error::Range {
                    argument,
                    value: value.into(),
                    min,
                    max,
                });
            }
            if !value.is_power_of_two() {
                return Err(Error::Alignment {
                    argument,
                    value: value.into(),
                    align: u64::from(value.next_power_of_two()),
                });
            }
            Ok(())
        };
        range("send_wqebbs", self.send_wqebbs, 1, 32768)?;
        range("recv_wqes", self.recv_wqes, 1, 32768)?;
        range("recv_stride_bytes", self.recv_stride_bytes, 16, 1024)?;
        range("send_cqes", self.cqes[0], 1, 65536)?;
        range("recv_cqes", self.cqes[1], 1, 65536)
    }
}

/// Where the queues of a queue pair lie, and how long they are; valid while the code that laid them out keeps them. Each array has one
/// element for the send queue and one for the receive queue.
#[derive(Debug, Clone, Copy)]
pub struct QueuePairMemory {
    /// Lengths.
    pub sizes: QueuePairSizes,
    /// Send ring.
    pub send_ring: *mut u8,
    /// Receive ring.
    pub recv_ring: *mut u8,
    /// Doorbell record: `[0]` receive, `[1]` send.
    pub record: *mut u32,
    /// The doorbell registers, which take turns, each the start of a BlueFlame buffer of `uar_bytes`; where that is 8, one register twice.
    pub uar: [*mut u8; 2],
    /// Bytes of a BlueFlame buffer; the first 8 are the doorbell register.
    pub uar_bytes: u32,
    /// Rings of the completion queues.
    pub cqs: [*mut u8; 2],
    /// Consumer records of the completion queues, by which entries are given back.
    pub cq_records: [*mut u32; 2],
    /// One word an entry, for the driver's own use.
    pub cq_marks: [*mut u32; 2],
}

// SAFETY: addresses only. The unsafe code that uses them is responsible for the accesses.
unsafe impl Send for QueuePairMemory {}
// SAFETY: as above.
unsafe impl Sync for QueuePairMemory {}

impl QueuePairMemory {
    /// Fresh memory for the parts of a queue pair of these sizes, which is in the pages.
    ///
    /// # Errors
    /// [`Error::Range`] or [`Error::Alignment`] naming the size; [`Error::System`] if there is not so much.
    pub fn new(sizes: &QueuePairSizes) -> Result<(Pages, QueuePairMemory)> {
        sizes.check()?;
        let page = page_bytes();
        let mut end: usize = 0;
        // What is longer than the rest of a page has pages of its own, as buffers of libmlx5 have. A GPU maps each of these by itself: a part of a page that was
        // mapped before may have another address there.
        let mut place = |bytes: usize| {
            let is_within = end % page + bytes <= page;
            let start = if is_within {
                end
            } else {
                end.next_multiple_of(page)
            };
            let unit = if bytes > page { page } else { 64 };
            end = (start + bytes).next_multiple_of(unit);
            start
        };
        // As in mlx5: the receive ring first, the send ring behind it.
        let recv_ring = place((sizes.recv_wqes * sizes.recv_stride_bytes) as usize);
        let send_ring = place(sizes.send_wqebbs as usize * 64);
        let cqs = sizes.cqes.map(|count| place(count as usize * 64));
        let cq_marks = sizes.cqes.map(|count| place(count as usize * 4));
        // Each record on a cache line of its own: the device reads them while the driver writes its neighbours.
        let record = place(8);
        let cq_records = [place(8), place(8)];
        let uar = end.next_multiple_of(page);
        let pages = Pages::new(uar + page)?;
        let memory = QueuePairMemory {
            sizes: *sizes,
            send_ring: pages.at(send_ring),
            recv_ring: pages.at(recv_ring),
            record: pages.at(record).cast(),
            uar: UAR_REGISTERS.map(|register| pages.at(uar + register)),
            uar_bytes: 256,
            cqs: cqs.map(|cq| pages.at(cq)),
            cq_records: cq_records.map(|record| pages.at(record).cast()),
            cq_marks: cq_marks.map(|marks| pages.at(marks).cast()),
        };
        Ok((pages, memory))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_of_several_pages_share_none() {
        for depth in [1, 16, 64, 65, 256, 1000] {
            let sizes = QueuePairSizes::of(&Capacity {
                transport: Transport::Rc,
                send_depth: depth,
                recv_depth: depth,
                segments: 3,
                inline_bytes: 64,
            });
            let (_pages, memory) = QueuePairMemory::new(&sizes).unwrap();
            let mut spans = vec![
                (memory.send_ring.addr(), sizes.send_wqebbs as usize * 64),
                (memory.record.addr(), 8),
            ];
            for side in [0, 1] {
                let count = sizes.cqes[side] as usize;
                spans.push((memory.cqs[side].addr(), count * 64));
                spans.push((memory.cq_marks[side].addr(), count * 4));
                spans.push((memory.cq_records[side].addr(), 8));
            }
            let page = page_bytes();
            let pages: Vec<_> = (spans.iter())
                .map(|(start, bytes)| start / page..(start + bytes).div_ceil(page))
                .collect();
            for (at, a) in pages.iter().enumerate() {
                for b in &pages[at + 1..] {
                    let are_apart = a.end <= b.start || b.end <= a.start;
                    assert!(
                        are_apart || (a.len() == 1 && b.len() == 1),
                        "{depth}: {a:?} {b:?}"
                    );
                }
            }
        }
    }

    #[test]
    fn the_ring_holds_the_depth_in_the_longest_work_requests() {
        for (segments, inline_bytes, each) in [
            (1, 0, 1),
            (2, 28, 1),
            (3, 0, 2),
            (4, 64, 2),
            (16, 0, 5),
            (1, 476, 8),
        ] {
            let capacity = Capacity {
                transport: Transport::Rc,
                send_depth: 64,
                recv_depth: 1,
                segments,
                inline_bytes,
            };
            assert_eq!(QueuePairSizes::wqebbs_each(&capacity), each, "{capacity:?}");
            assert!(QueuePairSizes::of(&capacity).send_wqebbs >= 64 * each);
        }
    }
}
