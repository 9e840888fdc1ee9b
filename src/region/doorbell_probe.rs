//! Whether a doorbell that a GPU rings reaches the card. That the driver maps the card's registers to the GPU does not show it: PCIe access control
//! (ACS) or an IOMMU between two devices may silently drop the stores of one to the other.
#![allow(unsafe_code)] // makes queues over the memory of a queue pair, and promises it to an executor

use std::any::Any;
use std::ptr::NonNull;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use super::ProtectionDomain;
use crate::Result;
use crate::bytecode::{Program, Role, TargetId, Targets};
use crate::cuda::{CudaContext, CudaStream, ProbeResult};
use crate::mlx5::{CqRing, CqRingConfig, SendQueue, SendQueueConfig, SendRequest};
use crate::nic::{Attributes, Capacity, NicQueuePair, Queues, Transport};
use crate::stream::{Attachments, Executor, Owner, Submission};

/// How long the GPU may take to execute the doorbell of an otherwise empty stream.
const EXECUTED: Duration = Duration::from_millis(200);
/// How long a card may take for a NOP. It takes some microseconds.
const COMPLETED: Duration = Duration::from_secs(1);

const CAPACITY: Capacity = Capacity {
    transport: Transport::Rc,
    send_depth: 1,
    recv_depth: 1,
    segments: 1,
    inline_bytes: 0,
};

/// A queue pair that is connected to itself.
struct ProbePair {
    /// Before the queue pair, whose memory it maps.
    attachments: Attachments,
    qp: Box<dyn NicQueuePair>,
    targets: Targets,
    /// By the number of the target.
    bases: Vec<NonNull<u8>>,
}

// SAFETY: the addresses are those of memory of `qp`. The stream alone stores to it, and the thread that made the pair only reads the completion.
unsafe impl Send for ProbePair {}
// SAFETY: as above.
unsafe impl Sync for ProbePair {}

// SAFETY: the targets are memory of `qp`, of the lengths that they were registered with, and `qp` lives as long as this.
unsafe impl Owner for ProbePair {
    fn targets(&self) -> &Targets {
        &self.targets
    }

    fn base(&self, target: TargetId) -> Option<NonNull<u8>> {
        self.bases.get(target.index() as usize).copied()
    }

    fn keeper(&self, target: TargetId) -> Option<Weak<dyn Any + Send + Sync>> {
        let mut targets = self.targets.iter();
        let target = targets.find(|known| known.id() == target)?;
        (target.role() == Role::Uar).then(|| self.qp.uar_mapping())?
    }

    fn attachments(&self) -> Option<&Attachments> {
        Some(&self.attachments)
    }
}

/// Has a stream of that context ring for a NOP, and looks whether the card executes it. A trial that could not be made shows nothing, and is no error:
/// the GPU may be too busy to execute the doorbell in time.
pub(super) fn try_ring(domain: &ProtectionDomain, context: &CudaContext) -> ProbeResult {
    match ring_and_look(domain, context) {
        // Told of every later endpoint: only the first card and the first GPU are tried.
        Ok(true) => ProbeResult::Reached("a test doorbell from the GPU reached the card".into()),
        Ok(false) => ProbeResult::Lost(format!(
            "in this process a GPU has stored to a card's doorbell register, and the card has not executed the request after {} ms: PCIe access control (ACS) \
             or an IOMMU may drop what one device stores to another",
            COMPLETED.as_millis()
        )),
        Err(error) => ProbeResult::Unknown(format!(
            "whether a GPU can ring a card was not found out: {error}"
        )),
    }
}

/// Whether the request was executed.
fn ring_and_look(domain: &ProtectionDomain, context: &CudaContext) -> Result<bool> {
    let qp = domain.on_device()?.queue_pair(&CAPACITY)?;
    qp.init(Attributes::default())?;
    qp.connect(&qp.local())?;
    let Queues::Mlx5(&memory) = qp.queues();
    let mut targets = Targets::new();
    let mut bases = Vec::new();
    let mut register = |name, role, len_bytes: u64, base: *mut u8| {
        bases.extend(NonNull::new(base));
        targets.register(name, role, len_bytes)
    };
    let record = register("dbrec", Role::DoorbellRecord, 8, memory.record.cast());
    let uar_bytes = u64::from(memory.uar_bytes);
    let uar = [
        register("uar0", Role::Uar, uar_bytes, memory.uar[0]),
        register("uar1", Role::Uar, uar_bytes, memory.uar[1]),
    ];
    let cqes = memory.sizes.cqes[0];
    let cq_bytes = u64::from(cqes) * 64;
    let completions = register("send_cq", Role::Completions, cq_bytes, memory.cqs[0]);
    let marks = memory.cq_marks[0];
    let marks_target = register("send_marks", Role::Marks, u64::from(cqes) * 4, marks.cast());
    let cq_config = CqRingConfig {
        ring: memory.cqs[0],
        cqe_count: cqes,
        record: memory.cq_records[0],
        marks,
        completions,
        marks_target,
    };
    let send_config = SendQueueConfig {
        ring: memory.send_ring,
        wqebb_count: memory.sizes.send_wqebbs,
        qpn: qp.qpn(),
        max_segments: CAPACITY.segments,
        max_inline_bytes: CAPACITY.inline_bytes,
        record: record.dword(4)?,
        uar: [
            uar[0].block(0, memory.uar_bytes)?,
            uar[1].block(0, memory.uar_bytes)?,
        ],
    };
    // SAFETY: memory of the queue pair, in its sizes; `pair` keeps that longer than this function uses them.
    let (cq, mut send) = unsafe { (CqRing::new(cq_config)?, SendQueue::new(send_config)?) };
    cq.reset();
    let mut program = Program::new(&targets);
    send.post(&SendRequest::nop().signaled(true))?;
    send.commit(&mut program)?;
    let pair = Arc::new(ProbePair {
        attachments: Attachments::default(),
        qp,
        targets,
        bases,
    });
    let stream = CudaStream::new(context, "doorbell trial")?;
    let owner = Arc::clone(&pair) as Arc<dyn Owner>;
    let submission = Submission {
        program,
        owner,
        cookie: 0,
    };
    stream.submit_one(submission).map_err(|(_, error)| error)?;
    stream.synchronize(Some(EXECUTED))?;
    let until = Instant::now() + COMPLETED;
    loop {
        pair.qp.progress();
        // A card that fails flushes what the record counts, whether or not the doorbell has arrived.
        if cq.cqe(0).is_some_and(|cqe| !cqe.opcode.is_error()) {
            return Ok(true);
        }
        if Instant::now() > until {
            return Ok(false);
        }
        std::thread::yield_now();
    }
}
