//! Operations as nodes of graphs that the application captures and launches by itself: kernels that find what changes in memory.
#![allow(unsafe_code)] // calls the driver

use std::any::Any;
use std::ffi::c_void;
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use cudarc::driver::sys::{self, CUgraph, CUstreamCaptureStatus, CUuserObject};

use super::capabilities::{UNORDERED_WRITES, WritesOrdering};
use super::context::CudaContext;
use super::driver::check;
use super::gpu_mapping::registers_error;
use super::host_registration::HostRegistration;
use super::kernel_address::kernel_address;
use super::memory::DeviceBuffer;
use super::pending::PendingWork;
use super::queued_kernel::{KeptByGraph, QueuedKernel};
use super::state::replay_failure;
use super::stream::CudaStream;
use crate::bytecode::{Program, Role, TargetId, Targets};
use crate::proxy::drop_elsewhere;
use crate::stream::{
    Attachments, Executor, KernelMemory, Outcome, Owner, ReplayCell, ReplayCells, ReplayEnd,
    ReplayKeeper, ReplayMemory, ReplayPart, ReplayStream, ReplayWords, StreamFailure,
};
use crate::{Error, Result, StateKind};

#[derive(Debug)]
struct GpuReplayMemory {
    mapped: Vec<u64>,
    _registrations: Vec<HostRegistration>,
    memory: DeviceBuffer,
}

impl ReplayMemory for GpuReplayMemory {
    fn start(&self) -> u64 {
        self.memory.ptr()
    }

    fn mapped(&self) -> &[u64] {
        &self.mapped
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        self.memory.copy_from_host(offset, bytes)
    }
}

impl ReplayStream for CudaStream {
    fn capture(&self) -> Result<Option<u64>> {
        let state = self.state();
        if !state.may_be_captured_by_others() {
            return Ok(None);
        }
        let _entered = state.context.enter()?;
        Ok(find_capture(self)?.map(|(id, _)| id))
    }

    fn context_key(&self) -> u64 {
        self.context().key()
    }

    fn map(&self, parts: &[ReplayPart], contents: &[u8]) -> Result<Box<dyn ReplayMemory>> {
        let context = self.context();
        context.check_kernels()?;
        if context.capabilities().ordering == WritesOrdering::None {
            return Err(Error::state(
                StateKind::Unsupported,
                "add an operation to a graph of the application",
                UNORDERED_WRITES,
            ));
        }
        let map = |part: &ReplayPart| map_part(context, part);
        let registrations = parts.iter().map(map).collect::<Result<Vec<_>>>()?;
        let mapped = parts
            .iter()
            .zip(&registrations)
            .map(|(part, pinned)| pinned.device_address(part.start))
            .collect();
        let memory = context.alloc(contents.len() as u64)?;
        memory.copy_from_host(0, contents)?;
        Ok(Box::new(GpuReplayMemory {
            mapped,
            _registrations: registrations,
            memory,
        }))
    }

    fn reach(&self, memory: &KernelMemory<'_>) -> Result<u64> {
        kernel_address(memory, self.context())
    }

    fn fault_word(&self) -> u64 {
        self.state().count.words.replay_fault_at()
    }

    fn cells(&self) -> &ReplayCells {
        &self.state().replay_cells
    }

    fn queue(
        &self,
        words: &ReplayWords,
        cell: &Arc<ReplayCell>,
        keeper: ReplayKeeper,
        endpoint: Option<Arc<dyn Owner>>,
    ) -> Result<()> {
        let state = self.state();
        state.check()?;
        state.forbid_builder("add an operation to a graph of the application")?;
        let module = state.context.module()?;
        let entered = state.context.enter_relaxed()?;
        // SAFETY: the parameter of the kernel; what it names stays as long as what is kept here, which is longer than any launch.
        let launch = || unsafe { module.replay(words).queue(self.raw_inside()) };
        let kept = KeptByGraph::new(Some(keeper), &state.count, &state.context);
        if let Some((_, graph)) = find_capture(self)? {
            retain(graph, kept)?;
            return launch();
        }
        drop(entered);
        let (gate, program) = ReplayGate::new(cell, endpoint)?;
        let kernel = QueuedKernel {
            kept,
            cell: Arc::clone(cell),
            is_uncounted: false,
        };
        cell.begin();
        self.launch_counted(PendingWork::Kernel(Box::new(kernel)), |_, _| launch())?;
        let guarded = self.submit_program(&program, gate, 0);
        if let Err(error) = guarded {
            // The kernel is queued, so the operation is, and may be executed after any time. No operation may come behind it, because nothing would give that
            // up if the kernel fails.
            cell.end(ReplayEnd::Passed);
            state.fault.fail(error.to_string());
        }
        Ok(())
    }
}

/// A wait behind a kernel that is no node of a graph, until the kernel has executed its operation. It is there for the operations behind it: if the kernel has
/// not, they are given up before the stream comes to them, as behind any wait that fails. What gives the gate up gives the operation up, and with it its endpoint.
struct ReplayGate {
    /// Before the memory.
    attachments: Attachments,
    targets: Targets,
    passed: TargetId,
    is_given_up: AtomicBool,
    endpoint: Option<Arc<dyn Owner>>,
    generation: u32,
    cell: Arc<ReplayCell>,
}

impl ReplayGate {
    fn new(
        cell: &Arc<ReplayCell>,
        endpoint: Option<Arc<dyn Owner>>,
    ) -> Result<(Arc<ReplayGate>, Program)> {
        let mut targets = Targets::new();
        let word = targets.register("an operation of a kernel", Role::Memory, 4);
        let passed = word.id();
        let at = word.dword(0)?;
        let mut program = Program::new(&targets);
        program.poll_geq(at, 1)?;
        let gate = ReplayGate {
            attachments: Attachments::default(),
            targets,
            passed,
            is_given_up: AtomicBool::new(false),
            generation: endpoint.as_ref().map_or(0, |owner| owner.generation()),
            endpoint,
            cell: Arc::clone(cell),
        };
        Ok((Arc::new(gate), program))
    }
}

// SAFETY: the one target of the table is a word of the cell, which the gate keeps, and which is atomic to everyone.
unsafe impl Owner for ReplayGate {
    fn targets(&self) -> &Targets {
        &self.targets
    }

    fn base(&self, target: TargetId) -> Option<NonNull<u8>> {
        (target == self.passed).then(|| self.cell.passed())
    }

    fn attachments(&self) -> Option<&Attachments> {
        Some(&self.attachments)
    }

    fn failure_of(&self, _cookie: u64, outcome: Outcome) -> Option<StreamFailure> {
        (outcome == Outcome::Released).then(|| match self.cell.code() {
            0 => "an operation of a kernel was given up".into(),
            code => replay_failure(code),
        })
    }

    fn finished(&self, _cookie: u64, outcome: Outcome) {
        self.cell.end(match outcome {
            Outcome::Done | Outcome::Released => ReplayEnd::Passed,
            Outcome::Discarded => ReplayEnd::Discarded,
            Outcome::Lost => ReplayEnd::Lost,
        });
        if matches!(outcome, Outcome::Discarded | Outcome::Lost) {
            self.give_up(self.generation);
        }
    }

    fn generation(&self) -> u32 {
        self.generation
    }

    fn give_up(&self, generation: u32) {
        if let Some(endpoint) = &self.endpoint {
            endpoint.give_up(generation);
        }
        self.is_given_up.store(true, Ordering::Release);
    }

    fn released(&self, _cookie: u64) -> bool {
        self.cell.code() != 0 || self.is_given_up.load(Ordering::Acquire)
    }
}

fn map_part(context: &CudaContext, part: &ReplayPart) -> Result<HostRegistration> {
    let keeper = part.registers.clone();
    let is_register = keeper.is_some();
    // SAFETY: the caller keeps the memory longer than what is returned.
    let pinned = unsafe { HostRegistration::new_kept(context, part.start, part.len_bytes, keeper) };
    pinned.map_err(|error| match is_register {
        true => registers_error("add an operation to a graph of the application", error),
        false => error,
    })
}

/// The capture that the stream is in: its number, and the graph.
///
/// # Errors
/// [`Error::State`] for a capture that was broken off; [`Error::Cuda`].
pub(super) fn find_capture(stream: &CudaStream) -> Result<Option<(u64, CUgraph)>> {
    let mut status = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    let (mut id, mut graph) = (0, null_mut());
    // SAFETY: writes the status, the number and the graph; the stream lives as long as its state.
    check("cuStreamGetCaptureInfo", unsafe {
        sys::cuStreamGetCaptureInfo_v2(
            stream.raw_inside(),
            &mut status,
            &mut id,
            &mut graph,
            null_mut(),
            null_mut(),
        )
    })?;
    match status {
        CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE => Ok(None),
        CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE => Ok(Some((id, graph))),
        _ => Err(Error::state(
            StateKind::Graph,
            "add an operation to a graph of the application",
            "the capture has been broken off",
        )),
    }
}

/// Has a graph, its clones and what is instantiated of them keep an object until all of them are destroyed.
///
/// # Errors
/// [`Error::Cuda`].
pub(super) fn retain(graph: CUgraph, kept: KeptByGraph) -> Result<()> {
    let data = Box::into_raw(Box::new(kept));
    let mut object: CUuserObject = null_mut();
    // SAFETY: writes one handle. The driver calls `release` once, with `data`, when the last reference is gone.
    let created = check("cuUserObjectCreate", unsafe {
        sys::cuUserObjectCreate(
            &mut object,
            data.cast(),
            Some(release),
            1,
            sys::CUuserObject_flags::CU_USER_OBJECT_NO_DESTRUCTOR_SYNC as u32,
        )
    });
    if let Err(error) = created {
        // SAFETY: made above, and not given away.
        drop(unsafe { Box::from_raw(data) });
        return Err(error);
    }
    // SAFETY: a graph that is being captured, and an object with one reference, which goes to the graph.
    let retained = check("cuGraphRetainUserObject", unsafe {
        sys::cuGraphRetainUserObject(
            graph,
            object,
            1,
            sys::CUuserObjectRetain_flags::CU_GRAPH_USER_OBJECT_MOVE as u32,
        )
    });
    retained.inspect_err(|_| {
        // SAFETY: the one reference, which did not go to the graph.
        let _ = unsafe { sys::cuUserObjectRelease(object, 1) };
    })
}

/// A thread of the driver calls it, which must not call the driver.
unsafe extern "C" fn release(data: *mut c_void) {
    // SAFETY: `retain` gave it, and the driver calls once.
    let kept: Box<KeptByGraph> = unsafe { Box::from_raw(data.cast()) };
    let kept: Box<dyn Any + Send> = kept;
    drop_elsewhere(Box::new(kept));
}
