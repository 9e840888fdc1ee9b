//! Collective operations on streams.
#![allow(unsafe_code)] // exports functions to C, and takes its pointers
#![allow(non_camel_case_types)] // the names are the header's

use std::ffi::{c_char, c_int};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard};

use crate::argument::{
    VersionedStruct, array, choice, descriptor, out_handle, out_optional, timeout, write_struct,
};
use crate::boundary::{call, guard};
use crate::device::doorbell_domain;
use crate::endpoint::{try_lock, write_failure, write_path};
use crate::error::doorbell_failure;
use crate::failure::Failure;
use crate::group::doorbell_group;
use crate::handle::{CObject, create, destroy, get};
use crate::message::{
    doorbell_message_config, doorbell_message_queue, message_config, take_queues,
};
use crate::stream::doorbell_stream;
use crate::work::doorbell_slice;
use doorbell_rs::{
    AbortHandle, Algorithm, Collective, CollectiveCosts, CollectiveTicket, Communicator, DataType,
    ReduceOp, Reduction, Result as LibraryResult, Slice,
};

/// IEEE 754 binary16.
pub const DOORBELL_TYPE_F16: u32 = 0;
/// The upper half of a binary32.
pub const DOORBELL_TYPE_BF16: u32 = 1;
/// IEEE 754 binary32.
pub const DOORBELL_TYPE_F32: u32 = 2;
/// IEEE 754 binary64.
pub const DOORBELL_TYPE_F64: u32 = 3;
/// Signed, of 4 bytes.
pub const DOORBELL_TYPE_I32: u32 = 4;
/// Signed, of 8 bytes.
pub const DOORBELL_TYPE_I64: u32 = 5;
/// Unsigned, of 1 byte.
pub const DOORBELL_TYPE_U8: u32 = 6;

/// The sum.
pub const DOORBELL_REDUCE_SUM: u32 = 0;
/// The smaller one.
pub const DOORBELL_REDUCE_MIN: u32 = 1;
/// The larger one.
pub const DOORBELL_REDUCE_MAX: u32 = 2;
/// The sum, divided by the number of ranks.
pub const DOORBELL_REDUCE_AVERAGE: u32 = 3;

/// The one with the least predicted time.
pub const DOORBELL_ALGORITHM_AUTO: u32 = 0;
/// [`Algorithm::Ring`].
pub const DOORBELL_ALGORITHM_RING: u32 = 1;
/// [`Algorithm::RecursiveDoubling`].
pub const DOORBELL_ALGORITHM_RECURSIVE_DOUBLING: u32 = 2;
/// [`Algorithm::RecursiveHalving`].
pub const DOORBELL_ALGORITHM_RECURSIVE_HALVING: u32 = 3;
/// [`Algorithm::Bruck`].
pub const DOORBELL_ALGORITHM_BRUCK: u32 = 4;
/// [`Algorithm::Pairwise`].
pub const DOORBELL_ALGORITHM_PAIRWISE: u32 = 5;
/// [`Algorithm::Binomial`].
pub const DOORBELL_ALGORITHM_BINOMIAL: u32 = 6;
/// [`Algorithm::ScatterGather`].
pub const DOORBELL_ALGORITHM_SCATTER_GATHER: u32 = 7;
/// [`Algorithm::Linear`].
pub const DOORBELL_ALGORITHM_LINEAR: u32 = 8;
/// [`Algorithm::ParameterServer`].
pub const DOORBELL_ALGORITHM_PARAMETER_SERVER: u32 = 9;
/// [`Algorithm::Dissemination`].
pub const DOORBELL_ALGORITHM_DISSEMINATION: u32 = 10;
/// [`Algorithm::Knomial`].
pub const DOORBELL_ALGORITHM_KNOMIAL: u32 = 11;

const TYPES: [(u32, DataType); 7] = [
    (DOORBELL_TYPE_F16, DataType::F16),
    (DOORBELL_TYPE_BF16, DataType::Bf16),
    (DOORBELL_TYPE_F32, DataType::F32),
    (DOORBELL_TYPE_F64, DataType::F64),
    (DOORBELL_TYPE_I32, DataType::I32),
    (DOORBELL_TYPE_I64, DataType::I64),
    (DOORBELL_TYPE_U8, DataType::U8),
];

const REDUCTIONS: [(u32, ReduceOp); 4] = [
    (DOORBELL_REDUCE_SUM, ReduceOp::Sum),
    (DOORBELL_REDUCE_MIN, ReduceOp::Min),
    (DOORBELL_REDUCE_MAX, ReduceOp::Max),
    (DOORBELL_REDUCE_AVERAGE, ReduceOp::Average),
];

const ALGORITHMS: [(u32, Option<Algorithm>); 12] = [
    (DOORBELL_ALGORITHM_AUTO, None),
    (DOORBELL_ALGORITHM_RING, Some(Algorithm::Ring)),
    (
        DOORBELL_ALGORITHM_RECURSIVE_DOUBLING,
        Some(Algorithm::RecursiveDoubling),
    ),
    (
        DOORBELL_ALGORITHM_RECURSIVE_HALVING,
        Some(Algorithm::RecursiveHalving),
    ),
    (DOORBELL_ALGORITHM_BRUCK, Some(Algorithm::Bruck)),
    (DOORBELL_ALGORITHM_PAIRWISE, Some(Algorithm::Pairwise)),
    (DOORBELL_ALGORITHM_BINOMIAL, Some(Algorithm::Binomial)),
    (
        DOORBELL_ALGORITHM_SCATTER_GATHER,
        Some(Algorithm::ScatterGather),
    ),
    (DOORBELL_ALGORITHM_LINEAR, Some(Algorithm::Linear)),
    (
        DOORBELL_ALGORITHM_PARAMETER_SERVER,
        Some(Algorithm::ParameterServer),
    ),
    (
        DOORBELL_ALGORITHM_DISSEMINATION,
        Some(Algorithm::Dissemination),
    ),
    (DOORBELL_ALGORITHM_KNOMIAL, Some(Algorithm::Knomial)),
];

/// What a number of the header stands for.
fn named<T: Copy>(table: &[(u32, T)], argument: &'static str, number: u32) -> Result<T, Failure> {
    let found = table.iter().find(|(known, _)| *known == number);
    let found = found.map(|(_, value)| *value);
    found.ok_or_else(|| choice(argument, number, table.len() as u32 - 1))
}

fn reduction(data: u32, op: u32) -> Result<Reduction, Failure> {
    let data = named(&TYPES, "type", data)?;
    Ok(Reduction::new(data, named(&REDUCTIONS, "op", op)?))
}

/// Ranks that carry out collective operations.
pub struct doorbell_communicator {
    /// Never waited for, as that of an endpoint.
    inner: Mutex<Communicator>,
    /// This and what follows is used without the lock.
    aborts: Vec<AbortHandle>,
    rank: u32,
    size: u32,
}

impl CObject for doorbell_communicator {
    const NAME: &'static str = "doorbell_communicator";
}

impl doorbell_communicator {
    fn new(communicator: Communicator) -> doorbell_communicator {
        doorbell_communicator {
            aborts: communicator.abort_handles(),
            rank: communicator.rank(),
            size: communicator.size(),
            inner: Mutex::new(communicator),
        }
    }

    pub(super) fn lock(&self) -> Result<MutexGuard<'_, Communicator>, Failure> {
        try_lock(&self.inner, "communicator")
    }
}

/// An operation that is prepared.
pub struct doorbell_collective {
    /// Never waited for: calls with it are calls with its communicator, one at a time.
    inner: Mutex<Collective>,
    /// This and what follows is used without the lock, so that a description makes no other call fail. `matched` is not set in it.
    plan: doorbell_collective_plan,
    is_matched: AtomicBool,
}

impl doorbell_collective {
    fn new(collective: Collective) -> doorbell_collective {
        let used = Some(collective.algorithm());
        let number = ALGORITHMS.iter().find(|(_, algorithm)| *algorithm == used);
        doorbell_collective {
            plan: doorbell_collective_plan {
                algorithm: number.map_or(DOORBELL_ALGORITHM_AUTO, |(number, _)| *number),
                messages: collective.messages(),
                sent_bytes: collective.sent_bytes(),
                predicted_ns: collective.predicted_ns().round() as u64,
                ..doorbell_collective_plan::defaults()
            },
            is_matched: AtomicBool::new(collective.is_matched()),
            inner: Mutex::new(collective),
        }
    }

    pub(super) fn lock(&self) -> Result<MutexGuard<'_, Collective>, Failure> {
        try_lock(&self.inner, "collective")
    }
}

impl CObject for doorbell_collective {
    const NAME: &'static str = "doorbell_collective";
}

/// A handle of an operation that was launched.
pub struct doorbell_collective_ticket {
    inner: CollectiveTicket,
}

impl doorbell_collective_ticket {
    pub(super) fn new(inner: CollectiveTicket) -> doorbell_collective_ticket {
        doorbell_collective_ticket { inner }
    }
}

impl CObject for doorbell_collective_ticket {
    const NAME: &'static str = "doorbell_collective_ticket";
}

/// What an operation does at each launch.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct doorbell_collective_plan {
    pub struct_size: u32,
    pub algorithm: u32,
    pub messages: u64,
    pub sent_bytes: u64,
    pub predicted_ns: u64,
    pub matched: u64,
}

// SAFETY: repr(C), two 4-byte fields and four 8-byte ones, without padding, integers, and the size first.
unsafe impl VersionedStruct for doorbell_collective_plan {
    const BYTES_FIRST: usize = 40;

    fn defaults() -> doorbell_collective_plan {
        doorbell_collective_plan {
            struct_size: size_of::<doorbell_collective_plan>() as u32,
            algorithm: DOORBELL_ALGORITHM_AUTO,
            messages: 0,
            sent_bytes: 0,
            predicted_ns: 0,
            matched: 0,
        }
    }
}

const _: () =
    assert!(size_of::<doorbell_collective_plan>() == doorbell_collective_plan::BYTES_FIRST);

/// A slice, or none.
///
/// # Safety
/// The pointer is null or of a slice whose handle is as the header says.
unsafe fn slice_or_none<'a>(
    slice: *const doorbell_slice,
    argument: &'static str,
) -> Result<Option<Slice<'a>>, Failure> {
    // SAFETY: the caller's promise.
    let Some(given) = (unsafe { slice.as_ref() }) else {
        return Ok(None);
    };
    // SAFETY: the caller's promise.
    let region = unsafe { get(given.region, argument) }?;
    Ok(Some(region.inner.slice(given.offset, given.len_bytes)?))
}

/// A slice.
///
/// # Safety
/// As [`slice_or_none`].
unsafe fn slice<'a>(
    slice: *const doorbell_slice,
    argument: &'static str,
) -> Result<Slice<'a>, Failure> {
    // SAFETY: the caller's promise.
    unsafe { slice_or_none(slice, argument) }?.ok_or_else(|| Failure::null(argument))
}

/// Prepares an operation, and gives its handle to C.
///
/// # Safety
/// As the header says of pointers; what `prepare` reads as well.
unsafe fn prepare(
    communicator: *const doorbell_communicator,
    algorithm: u32,
    collective: *mut *mut doorbell_collective,
    prepare: impl FnOnce(&Communicator, Option<Algorithm>) -> Result<LibraryResult<Collective>, Failure>,
) -> c_int {
    call!(
        place = out_handle(collective),
        communicator = get(communicator),
        || {
            let algorithm = named(&ALGORITHMS, "algorithm", algorithm)?;
            let made = prepare(&*communicator.lock()?, algorithm)??;
            Ok(place.set(doorbell_collective::new(made)))
        }
    )
}

/// Makes a communicator of connected queues.
///
/// # Safety
/// As the header says of pointers; no other thread uses the queues now or later.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_communicator_create(
    rank: u32,
    queues: *const *mut doorbell_message_queue,
    count: u32,
    communicator: *mut *mut doorbell_communicator,
) -> c_int {
    call!(place = out_handle(communicator), || {
        // SAFETY: the caller's promise about arrays and handles.
        let queues = unsafe { take_queues(queues, count) }?;
        let made = Communicator::new(rank, queues)?;
        Ok(place.set(doorbell_communicator::new(made)))
    })
}

/// Makes a communicator of one rank.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_communicator_create_alone(
    domain: *const doorbell_domain,
    communicator: *mut *mut doorbell_communicator,
) -> c_int {
    call!(
        place = out_handle(communicator),
        domain = get(domain),
        || {
            let made = Communicator::alone(&domain.inner);
            Ok(place.set(doorbell_communicator::new(made)))
        }
    )
}

/// Makes a communicator of ranks of a group.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_group_communicator(
    group: *const doorbell_group,
    ranks: *const u32,
    rank_count: u32,
    tag: u64,
    config: *const doorbell_message_config,
    communicator: *mut *mut doorbell_communicator,
) -> c_int {
    call!(place = out_handle(communicator), group = get(group), || {
        // SAFETY: the caller's promise about arrays and structs.
        let (ranks, config) = unsafe {
            let ranks = array(ranks, rank_count as usize, "ranks")?;
            (ranks, message_config(config)?)
        };
        let ranks = (!ranks.is_empty()).then_some(ranks);
        let made = group.inner.communicator(ranks, tag, &config)?;
        Ok(place.set(doorbell_communicator::new(made)))
    })
}

/// Destroys a communicator.
///
/// # Safety
/// As the header says of handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_communicator_destroy(
    communicator: *mut doorbell_communicator,
) -> c_int {
    guard(|| {
        if !communicator.is_null() {
            // SAFETY: the caller's promise about handles.
            let held = unsafe { get(communicator, "communicator") }?;
            match held.lock() {
                // One that panicked can be destroyed, and nothing else.
                Ok(_) | Err(Failure::Panic { .. }) => {}
                Err(busy) => return Err(busy),
            }
        }
        // SAFETY: as above.
        unsafe { destroy(communicator, "communicator") }.map(|()| 0)
    })
}

/// The rank of this process.
///
/// # Safety
/// As the header says of handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_communicator_rank(
    communicator: *const doorbell_communicator,
) -> c_int {
    call!(communicator = get(communicator), || {
        Ok(communicator.rank as c_int)
    })
}

/// How many ranks there are.
///
/// # Safety
/// As the header says of handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_communicator_size(
    communicator: *const doorbell_communicator,
) -> c_int {
    call!(communicator = get(communicator), || {
        Ok(communicator.size as c_int)
    })
}

/// Has algorithms chosen by other costs.
///
/// # Safety
/// As the header says of handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_communicator_set_costs(
    communicator: *mut doorbell_communicator,
    latency_ns: u64,
    byte_ps: u64,
    work_ps: u64,
) -> c_int {
    call!(communicator = get(communicator), || {
        let costs = CollectiveCosts::default()
            .latency_ns(latency_ns as f64)
            .byte_ns(byte_ps as f64 / 1e3)
            .work_ns(work_ps as f64 / 1e3);
        communicator.lock()?.set_costs(costs);
        Ok(0)
    })
}

/// Prepares a barrier.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_communicator_barrier(
    communicator: *const doorbell_communicator,
    algorithm: u32,
    collective: *mut *mut doorbell_collective,
) -> c_int {
    // SAFETY: the caller's promise about handles, places, slices and arrays.
    unsafe {
        prepare(communicator, algorithm, collective, |ranks, algorithm| {
            Ok(ranks.barrier(algorithm))
        })
    }
}

/// Prepares a broadcast.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_communicator_broadcast(
    communicator: *const doorbell_communicator,
    buffer: *const doorbell_slice,
    root: u32,
    algorithm: u32,
    collective: *mut *mut doorbell_collective,
) -> c_int {
    // SAFETY: the caller's promise about handles, places, slices and arrays.
    unsafe {
        prepare(communicator, algorithm, collective, |ranks, algorithm| {
            Ok(ranks.broadcast(&slice(buffer, "buffer")?, root, algorithm))
        })
    }
}

/// Prepares a gather.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_communicator_gather(
    communicator: *const doorbell_communicator,
    input: *const doorbell_slice,
    output: *const doorbell_slice,
    lens: *const u64,
    root: u32,
    algorithm: u32,
    collective: *mut *mut doorbell_collective,
) -> c_int {
    // SAFETY: the caller's promise about handles, places, slices and arrays.
    unsafe {
        prepare(communicator, algorithm, collective, |ranks, algorithm| {
            let (input, output) = (slice(input, "input")?, slice_or_none(output, "output")?);
            let lens = array(lens, ranks.size() as usize, "lens")?;
            Ok(ranks.gather(&input, output.as_ref(), lens, root, algorithm))
        })
    }
}

/// Prepares a scatter.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_communicator_scatter(
    communicator: *const doorbell_communicator,
    input: *const doorbell_slice,
    output: *const doorbell_slice,
    lens: *const u64,
    root: u32,
    algorithm: u32,
    collective: *mut *mut doorbell_collective,
) -> c_int {
    // SAFETY: the caller's promise about handles, places, slices and arrays.
    unsafe {
        prepare(communicator, algorithm, collective, |ranks, algorithm| {
            let (input, output) = (slice_or_none(input, "input")?, slice(output, "output")?);
            let lens = array(lens, ranks.size() as usize, "lens")?;
            Ok(ranks.scatter(input.as_ref(), &output, lens, root, algorithm))
        })
    }
}

/// Prepares an all-gather.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_communicator_all_gather(
    communicator: *const doorbell_communicator,
    input: *const doorbell_slice,
    output: *const doorbell_slice,
    lens: *const u64,
    algorithm: u32,
    collective: *mut *mut doorbell_collective,
) -> c_int {
    // SAFETY: the caller's promise about handles, places, slices and arrays.
    unsafe {
        prepare(communicator, algorithm, collective, |ranks, algorithm| {
            let (input, output) = (slice_or_none(input, "input")?, slice(output, "output")?);
            let lens = array(lens, ranks.size() as usize, "lens")?;
            Ok(ranks.all_gather(input.as_ref(), &output, lens, algorithm))
        })
    }
}

/// Prepares an all-to-all.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_communicator_all_to_all(
    communicator: *const doorbell_communicator,
    input: *const doorbell_slice,
    output: *const doorbell_slice,
    algorithm: u32,
    collective: *mut *mut doorbell_collective,
) -> c_int {
    // SAFETY: the caller's promise about handles, places, slices and arrays.
    unsafe {
        prepare(communicator, algorithm, collective, |ranks, algorithm| {
            let (input, output) = (slice(input, "input")?, slice(output, "output")?);
            Ok(ranks.all_to_all(&input, &output, algorithm))
        })
    }
}

/// Prepares an all-to-all of blocks of several lengths.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_communicator_all_to_all_v(
    communicator: *const doorbell_communicator,
    input: *const doorbell_slice,
    output: *const doorbell_slice,
    sends: *const u64,
    receives: *const u64,
    algorithm: u32,
    collective: *mut *mut doorbell_collective,
) -> c_int {
    // SAFETY: the caller's promise about handles, places, slices and arrays.
    unsafe {
        prepare(communicator, algorithm, collective, |ranks, algorithm| {
            if let Some(other) = algorithm.filter(|it| *it != Algorithm::Pairwise) {
                let reason = format!("it is pairwise, not {other}");
                return Err(Failure::argument("algorithm", reason));
            }
            let (input, output) = (slice(input, "input")?, slice(output, "output")?);
            let count = ranks.size() as usize;
            let (sends, receives) = (
                array(sends, count, "sends")?,
                array(receives, count, "receives")?,
            );
            Ok(ranks.all_to_all_v(&input, &output, sends, receives))
        })
    }
}

/// The messages of a list.
///
/// # Safety
/// The arrays have that length, and handles are as the header says.
unsafe fn listed<'a>(
    ranks: (*const u32, &'static str),
    slices: (*const doorbell_slice, &'static str),
    count: usize,
) -> Result<Vec<(u32, Slice<'a>)>, Failure> {
    // SAFETY: the caller's promise.
    unsafe {
        let numbers = array(ranks.0, count, ranks.1)?;
        let given = array(slices.0, count, slices.1)?.iter();
        let each = numbers.iter().zip(given);
        each.map(|(rank, given)| Ok((*rank, slice(given, slices.1)?)))
            .collect()
    }
}

/// Prepares a list of messages.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_communicator_exchange(
    communicator: *const doorbell_communicator,
    to: *const u32,
    sends: *const doorbell_slice,
    send_count: usize,
    from: *const u32,
    receives: *const doorbell_slice,
    receive_count: usize,
    collective: *mut *mut doorbell_collective,
) -> c_int {
    // SAFETY: the caller's promise about handles, places, slices and arrays.
    unsafe {
        prepare(
            communicator,
            DOORBELL_ALGORITHM_AUTO,
            collective,
            |ranks, _| {
                let sends = listed((to, "to"), (sends, "sends"), send_count)?;
                let receives = listed((from, "from"), (receives, "receives"), receive_count)?;
                Ok(ranks.exchange(&sends, &receives))
            },
        )
    }
}

/// Prepares a reduction.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_communicator_reduce(
    communicator: *const doorbell_communicator,
    input: *const doorbell_slice,
    output: *const doorbell_slice,
    r#type: u32,
    op: u32,
    root: u32,
    algorithm: u32,
    collective: *mut *mut doorbell_collective,
) -> c_int {
    // SAFETY: the caller's promise about handles, places, slices and arrays.
    unsafe {
        prepare(communicator, algorithm, collective, |ranks, algorithm| {
            let (input, output) = (slice(input, "input")?, slice_or_none(output, "output")?);
            let reduction = reduction(r#type, op)?;
            Ok(ranks.reduce(&input, output.as_ref(), reduction, root, algorithm))
        })
    }
}

/// Prepares a reduction of which each rank has a block.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_communicator_reduce_scatter(
    communicator: *const doorbell_communicator,
    input: *const doorbell_slice,
    output: *const doorbell_slice,
    lens: *const u64,
    r#type: u32,
    op: u32,
    algorithm: u32,
    collective: *mut *mut doorbell_collective,
) -> c_int {
    // SAFETY: the caller's promise about handles, places, slices and arrays.
    unsafe {
        prepare(communicator, algorithm, collective, |ranks, algorithm| {
            let (input, output) = (slice(input, "input")?, slice(output, "output")?);
            let lens = array(lens, ranks.size() as usize, "lens")?;
            let reduction = reduction(r#type, op)?;
            Ok(ranks.reduce_scatter(&input, &output, lens, reduction, algorithm))
        })
    }
}

/// Prepares a reduction that all ranks have.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_communicator_all_reduce(
    communicator: *const doorbell_communicator,
    input: *const doorbell_slice,
    output: *const doorbell_slice,
    r#type: u32,
    op: u32,
    algorithm: u32,
    collective: *mut *mut doorbell_collective,
) -> c_int {
    // SAFETY: the caller's promise about handles, places, slices and arrays.
    unsafe {
        prepare(communicator, algorithm, collective, |ranks, algorithm| {
            let (input, output) = (slice(input, "input")?, slice(output, "output")?);
            let reduction = reduction(r#type, op)?;
            Ok(ranks.all_reduce(&input, &output, reduction, algorithm))
        })
    }
}

/// Queues an operation on a stream.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_communicator_launch(
    communicator: *mut doorbell_communicator,
    stream: *mut doorbell_stream,
    collective: *const doorbell_collective,
    ticket: *mut *mut doorbell_collective_ticket,
) -> c_int {
    guard(|| {
        // SAFETY: the caller's promise about places.
        let mut place = unsafe { out_optional(ticket) };
        if let Some(place) = &mut place {
            place.write(std::ptr::null_mut());
        }
        // SAFETY: the caller's promise about handles.
        let (communicator, stream, collective) = unsafe {
            (
                get(communicator, "communicator")?,
                get(stream, "stream")?,
                get(collective, "collective")?,
            )
        };
        let inner = communicator
            .lock()?
            .launch(stream.executor(), &*collective.lock()?)?;
        if let Some(place) = place {
            place.write(create(doorbell_collective_ticket { inner }));
        }
        Ok(0)
    })
}

/// Measures the costs that algorithms are chosen by, and sets them.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_communicator_measure_costs(
    communicator: *mut doorbell_communicator,
    stream: *mut doorbell_stream,
    beside: *const doorbell_slice,
    timeout_ms: i64,
    latency_ns: *mut u64,
    byte_ps: *mut u64,
    work_ps: *mut u64,
) -> c_int {
    guard(|| {
        // SAFETY: the caller's promise about handles, slices and places.
        let (communicator, stream, beside, places) = unsafe {
            (
                get(communicator, "communicator")?,
                get(stream, "stream")?,
                slice_or_none(beside, "beside.region")?,
                [latency_ns, byte_ps, work_ps].map(|place| out_optional(place)),
            )
        };
        let timeout = timeout(timeout_ms)?;
        let mut communicator = communicator.lock()?;
        let costs = communicator.measure_costs(stream.executor(), beside.as_ref(), timeout)?;
        let numbers = [costs.latency_ns, costs.byte_ns * 1e3, costs.work_ns * 1e3];
        for (place, number) in places.into_iter().zip(numbers) {
            if let Some(place) = place {
                place.write(number.round() as u64);
            }
        }
        Ok(0)
    })
}

/// Matches the messages of an operation with those of the other ranks.
///
/// # Safety
/// As the header says of handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_communicator_match_ahead(
    communicator: *mut doorbell_communicator,
    collective: *mut doorbell_collective,
    timeout_ms: i64,
) -> c_int {
    call!(
        communicator = get(communicator),
        collective = get(collective),
        || {
            let timeout = timeout(timeout_ms)?;
            let mut communicator = communicator.lock()?;
            let mut inner = collective.lock()?;
            communicator.match_ahead(&mut inner, timeout)?;
            collective
                .is_matched
                .store(inner.is_matched(), Ordering::Release);
            Ok(0)
        }
    )
}

/// Waits until the peers have everything.
///
/// # Safety
/// As the header says of handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_communicator_finish(
    communicator: *mut doorbell_communicator,
    timeout_ms: i64,
) -> c_int {
    call!(communicator = get(communicator), || {
        let timeout = timeout(timeout_ms)?;
        communicator.lock()?.finish(timeout)?;
        Ok(0)
    })
}

/// Ends all connections.
///
/// # Safety
/// As the header says of handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_communicator_abort(
    communicator: *mut doorbell_communicator,
) -> c_int {
    call!(communicator = get(communicator), || {
        communicator.aborts.iter().for_each(AbortHandle::abort);
        Ok(0)
    })
}

/// How a communicator failed, if it did, and with which peer.
///
/// # Safety
/// As the header says of pointers and text buffers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_communicator_failure(
    communicator: *const doorbell_communicator,
    peer: *mut u32,
    failure: *mut doorbell_failure,
    text: *mut c_char,
    capacity: usize,
) -> c_int {
    guard(|| {
        // SAFETY: the caller's promise about handles and places.
        let (peer, place, communicator) = unsafe {
            (
                out_optional(peer),
                out_optional(failure),
                get(communicator, "communicator")?,
            )
        };
        let found = communicator.lock()?.failure();
        if let (Some(peer), Some((rank, _))) = (peer, &found) {
            peer.write(*rank);
        }
        let found = found.map(|(_, failure)| failure);
        // SAFETY: the caller's promise about text buffers.
        unsafe { write_failure(found, place, text, capacity) }
    })
}

/// Which way doorbells take, and why.
///
/// # Safety
/// As the header says of pointers and text buffers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_communicator_path(
    communicator: *const doorbell_communicator,
    control: *mut u32,
    text: *mut c_char,
    capacity: usize,
) -> c_int {
    guard(|| {
        // SAFETY: the caller's promise about handles and places.
        let (place, communicator) = unsafe {
            let place = out_optional(control);
            (place, get(communicator, "communicator")?)
        };
        let path = communicator.lock()?.path();
        let path = path
            .ok_or_else(|| Failure::argument("communicator", "a single rank has no connections"))?;
        // SAFETY: the caller's promise about text buffers.
        unsafe { write_path(path, place, text, capacity) }
    })
}

/// What an operation does at each launch.
///
/// # Safety
/// As the header says of pointers; `struct_size` bytes are there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_collective_describe(
    collective: *const doorbell_collective,
    plan: *mut doorbell_collective_plan,
    struct_size: u32,
) -> c_int {
    call!(collective = get(collective), || {
        let described = doorbell_collective_plan {
            matched: collective.is_matched.load(Ordering::Acquire).into(),
            ..collective.plan
        };
        // SAFETY: the caller's promise about structs and their sizes.
        unsafe { write_struct(described, plan, struct_size, "plan") }
    })
}

/// Destroys an operation.
///
/// # Safety
/// As the header says of handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_collective_destroy(
    collective: *mut doorbell_collective,
) -> c_int {
    // SAFETY: the caller's promise about handles.
    guard(|| unsafe { destroy(collective, "collective") }.map(|()| 0))
}

/// Whether a launch is over on this rank.
///
/// # Safety
/// As the header says of handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_collective_ticket_check(
    ticket: *const doorbell_collective_ticket,
) -> c_int {
    call!(ticket = get(ticket), || {
        Ok(ticket.inner.check()?.into())
    })
}

/// Waits until a launch is over on this rank.
///
/// # Safety
/// As the header says of handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_collective_ticket_wait(
    ticket: *const doorbell_collective_ticket,
    timeout_ms: i64,
) -> c_int {
    call!(ticket = get(ticket), || {
        ticket.inner.wait(timeout(timeout_ms)?)?;
        Ok(0)
    })
}

/// Notifies a descriptor when a launch is over on this rank.
///
/// # Safety
/// As the header says of handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_collective_ticket_notify(
    ticket: *const doorbell_collective_ticket,
    eventfd: c_int,
) -> c_int {
    call!(ticket = get(ticket), || {
        // SAFETY: the caller does not close it within this call.
        let eventfd = unsafe { descriptor(eventfd, "eventfd") }?;
        ticket.inner.notify(eventfd)?;
        Ok(0)
    })
}

/// The peer of the first message that has failed.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_collective_ticket_failed_peer(
    ticket: *const doorbell_collective_ticket,
    peer: *mut u32,
) -> c_int {
    call!(ticket = get(ticket), || {
        // SAFETY: the caller's promise about places.
        let place = unsafe { out_optional(peer) };
        let found = ticket.inner.failed_peer();
        if let (Some(place), Some(peer)) = (place, found) {
            place.write(peer);
        }
        Ok(found.is_some().into())
    })
}

/// Destroys a ticket.
///
/// # Safety
/// As the header says of handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_collective_ticket_destroy(
    ticket: *mut doorbell_collective_ticket,
) -> c_int {
    // SAFETY: the caller's promise about handles.
    guard(|| unsafe { destroy(ticket, "ticket") }.map(|()| 0))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each value of the library has a number.
    #[test]
    fn numbers_stand_for_all_values_of_the_library() {
        assert!(TYPES.iter().map(|it| it.1).eq(DataType::ALL));
        assert!(REDUCTIONS.iter().map(|it| it.1).eq(ReduceOp::ALL));
        let algorithms = ALGORITHMS.iter().filter_map(|it| it.1);
        assert!(algorithms.eq(Algorithm::ALL));
        for (at, (number, _)) in (0..).zip(ALGORITHMS) {
            assert_eq!(number, at);
        }
        assert!(named(&TYPES, "type", 7).is_err());
    }
}
