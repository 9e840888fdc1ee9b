//! CUDA graphs with operations in them.
#![allow(unsafe_code)] // exports functions to C, and takes its pointers
#![allow(non_camel_case_types)] // the names are the header's

use std::ffi::c_int;
use std::sync::{Mutex, MutexGuard};
use std::thread::ThreadId;

use crate::argument::{
    VersionedStruct, array, choice, out, out_handle, queue_kind_of, read_struct, timeout,
    write_struct,
};
use crate::boundary::{call, guard};
use crate::communicator::{doorbell_collective, doorbell_collective_ticket, doorbell_communicator};
use crate::endpoint::{doorbell_endpoint, try_lock, wait_timeout};
use crate::failure::Failure;
use crate::handle::{CObject, destroy, get, take};
use crate::message::{doorbell_message_queue, doorbell_message_ticket};
use crate::region::doorbell_region;
use crate::stream::doorbell_stream;
use crate::ticket::doorbell_ticket;
use crate::value::condition;
use crate::work::{doorbell_slice, doorbell_work, with_slices, with_work};
use doorbell_rs::{Error, MessageQueue, Result as LibraryResult, Slice, StateKind};
#[cfg(feature = "cuda")]
use doorbell_rs::{GraphBuilder, GraphExec, GraphMember};
#[cfg(not(feature = "cuda"))]
use nothing::{GraphBuilder, GraphExec, GraphMember};

/// A `CUgraph`, which is a `cudaGraph_t`: the driver's own type, known by its name.
pub enum CUgraph_st {}
/// A `CUgraphNode`.
pub enum CUgraphNode_st {}
/// A `CUgraphExec`.
pub enum CUgraphExec_st {}

/// Records operations into a graph.
pub struct doorbell_graph_builder {
    /// As the driver requires for captures, calls from any other thread get an error.
    thread: ThreadId,
    inner: Mutex<GraphBuilder>,
}

// SAFETY: its contents are used only by the thread that made it: each call checks that first. That thread drops it, too, or it is not dropped.
unsafe impl Send for doorbell_graph_builder {}
// SAFETY: as above.
unsafe impl Sync for doorbell_graph_builder {}

impl CObject for doorbell_graph_builder {
    const NAME: &'static str = "doorbell_graph_builder";
}

impl doorbell_graph_builder {
    fn new(inner: GraphBuilder) -> doorbell_graph_builder {
        doorbell_graph_builder {
            thread: std::thread::current().id(),
            inner: Mutex::new(inner),
        }
    }

    fn check_thread(&self) -> Result<(), Failure> {
        if self.thread == std::thread::current().id() {
            return Ok(());
        }
        Err(Failure::Library(Error::state(
            StateKind::WrongKind,
            "graph builder",
            "it stays in the thread that made it, as the driver asks of captures",
        )))
    }

    fn lock(&self) -> Result<MutexGuard<'_, GraphBuilder>, Failure> {
        self.check_thread()?;
        try_lock(&self.inner, "builder")
    }
}

/// A graph that is launched again and again.
pub struct doorbell_graph {
    inner: Mutex<GraphExec>,
}

impl CObject for doorbell_graph {
    const NAME: &'static str = "doorbell_graph";
}

impl doorbell_graph {
    fn lock(&self) -> Result<MutexGuard<'_, GraphExec>, Failure> {
        try_lock(&self.inner, "graph")
    }
}

/// What the operations of a graph belong to.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct doorbell_graph_members {
    pub struct_size: u32,
    pub reserved: u32,
    pub endpoints: *const *mut doorbell_endpoint,
    pub endpoint_count: usize,
    pub queues: *const *mut doorbell_message_queue,
    pub queue_count: usize,
    pub communicators: *const *mut doorbell_communicator,
    pub communicator_count: usize,
}

// SAFETY: repr(C), two 4-byte fields, pointers and sizes, without padding, integers and raw pointers, and the size first.
unsafe impl VersionedStruct for doorbell_graph_members {
    const BYTES_FIRST: usize = 8 + 6 * size_of::<usize>();

    fn defaults() -> doorbell_graph_members {
        doorbell_graph_members {
            struct_size: size_of::<doorbell_graph_members>() as u32,
            reserved: 0,
            endpoints: std::ptr::null(),
            endpoint_count: 0,
            queues: std::ptr::null(),
            queue_count: 0,
            communicators: std::ptr::null(),
            communicator_count: 0,
        }
    }
}

const _: () = assert!(size_of::<doorbell_graph_members>() == doorbell_graph_members::BYTES_FIRST);

/// Begins to capture a stream.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_graph_builder_capture(
    stream: *mut doorbell_stream,
    builder: *mut *mut doorbell_graph_builder,
) -> c_int {
    call!(place = out_handle(builder), stream = get(stream), || {
        Ok(place.set(doorbell_graph_builder::new(capture(stream)?)))
    })
}

/// Adds nodes to a graph of the caller's.
///
/// # Safety
/// As the header says of pointers, and of the graph: it is one, and stays.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_graph_builder_for_graph(
    stream: *mut doorbell_stream,
    graph: *mut CUgraph_st,
    builder: *mut *mut doorbell_graph_builder,
) -> c_int {
    call!(place = out_handle(builder), stream = get(stream), || {
        if graph.is_null() {
            return Err(Failure::null("graph"));
        }
        // SAFETY: the caller's promise about the graph.
        let inner = unsafe { over(stream, graph) }?;
        Ok(place.set(doorbell_graph_builder::new(inner)))
    })
}

/// Lets the next operation come after nodes.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_graph_builder_after(
    builder: *mut doorbell_graph_builder,
    nodes: *const *mut CUgraphNode_st,
    count: usize,
) -> c_int {
    guard(|| {
        // SAFETY: the caller's promise about handles and arrays; a node is a pointer, wherever its type is declared.
        let (builder, nodes) = unsafe {
            (
                get(builder, "builder")?,
                array(nodes.cast(), count, "nodes")?,
            )
        };
        builder.lock()?.after(nodes)?;
        Ok(0)
    })
}

/// The node of the last operation.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_graph_builder_last_node(
    builder: *mut doorbell_graph_builder,
    node: *mut *mut CUgraphNode_st,
) -> c_int {
    call!(place = out(node), builder = get(builder), || {
        let last = builder.lock()?.last_node();
        if let Some(last) = last {
            place.write(last.cast());
        }
        Ok(last.is_some().into())
    })
}

/// Adds a work request.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_graph_builder_send(
    builder: *mut doorbell_graph_builder,
    endpoint: *mut doorbell_endpoint,
    work: *const doorbell_work,
) -> c_int {
    guard(|| {
        // SAFETY: the caller's promise about handles and work requests.
        unsafe {
            let (builder, endpoint) = (get(builder, "builder")?, get(endpoint, "endpoint")?);
            with_work(work, |work| {
                builder.lock()?.send(&mut *endpoint.lock()?, work)?;
                Ok(0)
            })
        }
    })
}

/// Adds a receive.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_graph_builder_recv(
    builder: *mut doorbell_graph_builder,
    endpoint: *mut doorbell_endpoint,
    wr_id: u64,
    slices: *const doorbell_slice,
    slice_count: u32,
) -> c_int {
    guard(|| {
        // SAFETY: the caller's promise about handles and slices.
        unsafe {
            let (builder, endpoint) = (get(builder, "builder")?, get(endpoint, "endpoint")?);
            with_slices(slices, slice_count, |slices| {
                builder
                    .lock()?
                    .recv(&mut *endpoint.lock()?, wr_id, slices)?;
                Ok(0)
            })
        }
    })
}

/// Adds a wait for a completion.
///
/// # Safety
/// As the header says of handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_graph_builder_wait_cq(
    builder: *mut doorbell_graph_builder,
    endpoint: *mut doorbell_endpoint,
    queue_kind: u32,
    timeout_ms: i64,
) -> c_int {
    call!(builder = get(builder), endpoint = get(endpoint), || {
        let mut endpoint = endpoint.lock()?;
        let timeout = wait_timeout(&endpoint, timeout_ms)?;
        let kind = queue_kind_of(queue_kind)?;
        builder.lock()?.wait_cq_for(&mut endpoint, kind, timeout)?;
        Ok(0)
    })
}

/// Adds a wait for a word.
///
/// # Safety
/// As the header says of handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_graph_builder_wait_value32(
    builder: *mut doorbell_graph_builder,
    region: *const doorbell_region,
    offset: u64,
    wait_condition: u32,
    value: u32,
    timeout_ms: i64,
) -> c_int {
    call!(builder = get(builder), region = get(region), || {
        let condition = condition(wait_condition, value)?;
        let timeout = timeout(timeout_ms)?;
        let mut builder = builder.lock()?;
        builder.wait_value32(&region.inner, offset, condition, timeout)?;
        Ok(0)
    })
}

/// Adds a store to a word.
///
/// # Safety
/// As the header says of handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_graph_builder_write_value32(
    builder: *mut doorbell_graph_builder,
    region: *const doorbell_region,
    offset: u64,
    value: u32,
) -> c_int {
    call!(builder = get(builder), region = get(region), || {
        builder
            .lock()?
            .write_value32(&region.inner, offset, value)?;
        Ok(0)
    })
}

/// Makes a call that records a message, sent or received.
///
/// # Safety
/// As the header says of pointers.
unsafe fn record_message(
    call: fn(&mut GraphBuilder, &mut MessageQueue, &[Slice<'_>]) -> LibraryResult<()>,
    builder: *mut doorbell_graph_builder,
    queue: *mut doorbell_message_queue,
    (slices, slice_count): (*const doorbell_slice, u32),
) -> Result<c_int, Failure> {
    // SAFETY: the caller's promise about handles and slices.
    unsafe {
        let (builder, queue) = (get(builder, "builder")?, get(queue, "queue")?);
        with_slices(slices, slice_count, |slices| {
            call(&mut *builder.lock()?, &mut *queue.lock()?, slices)?;
            Ok(0)
        })
    }
}

/// Adds a message and a wait for it.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_graph_builder_send_message(
    builder: *mut doorbell_graph_builder,
    queue: *mut doorbell_message_queue,
    slices: *const doorbell_slice,
    slice_count: u32,
) -> c_int {
    let slices = (slices, slice_count);
    // SAFETY: the caller's promise about handles and slices.
    guard(|| unsafe { record_message(GraphBuilder::send_message, builder, queue, slices) })
}

/// Adds a message.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_graph_builder_start_message(
    builder: *mut doorbell_graph_builder,
    queue: *mut doorbell_message_queue,
    slices: *const doorbell_slice,
    slice_count: u32,
) -> c_int {
    let slices = (slices, slice_count);
    // SAFETY: the caller's promise about handles and slices.
    guard(|| unsafe { record_message(GraphBuilder::start_message, builder, queue, slices) })
}

/// Adds the waits for messages.
///
/// # Safety
/// As the header says of handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_graph_builder_wait_messages(
    builder: *mut doorbell_graph_builder,
    queue: *mut doorbell_message_queue,
) -> c_int {
    call!(builder = get(builder), queue = get(queue), || {
        builder.lock()?.wait_messages(&mut *queue.lock()?)?;
        Ok(0)
    })
}

/// Adds a receive.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_graph_builder_recv_message(
    builder: *mut doorbell_graph_builder,
    queue: *mut doorbell_message_queue,
    slices: *const doorbell_slice,
    slice_count: u32,
) -> c_int {
    let slices = (slices, slice_count);
    // SAFETY: the caller's promise about handles and slices.
    guard(|| unsafe { record_message(GraphBuilder::recv_message, builder, queue, slices) })
}

/// Adds a collective operation.
///
/// # Safety
/// As the header says of handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_graph_builder_collective(
    builder: *mut doorbell_graph_builder,
    communicator: *mut doorbell_communicator,
    collective: *const doorbell_collective,
) -> c_int {
    call!(
        builder = get(builder),
        communicator = get(communicator),
        collective = get(collective),
        || {
            let mut communicator = communicator.lock()?;
            builder
                .lock()?
                .collective(&mut communicator, &*collective.lock()?)?;
            Ok(0)
        }
    )
}

/// Fills members with none.
///
/// # Safety
/// As the header says of pointers; `struct_size` bytes are there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_graph_members_init(
    members: *mut doorbell_graph_members,
    struct_size: u32,
) -> c_int {
    guard(|| {
        let none = doorbell_graph_members::defaults();
        // SAFETY: the caller's promise about structs and their sizes.
        unsafe { write_struct(none, members, struct_size, "members") }
    })
}

/// Ends the recording.
///
/// # Safety
/// As the header says of handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_graph_builder_instantiate(
    builder: *mut doorbell_graph_builder,
    graph: *mut *mut doorbell_graph,
) -> c_int {
    call!(place = out_handle(graph), held = get(builder), || {
        // No other thread uses it, and nothing panicked in it. Another code than that of errors behind which the builder is gone.
        held.check_thread().map_err(|_| Failure::Busy {
            argument: "builder",
        })?;
        drop(held.lock()?);
        // SAFETY: the caller's promise about handles and places for them; the reference is not used any more.
        let builder = unsafe { take(builder, "builder") }?;
        let inner = builder.inner.into_inner().map_err(|_| Failure::Busy {
            argument: "builder",
        })?;
        let inner = Mutex::new(inner.instantiate()?);
        Ok(place.set(doorbell_graph { inner }))
    })
}

/// Ends a recording without a graph.
///
/// # Safety
/// As the header says of handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_graph_builder_destroy(
    builder: *mut doorbell_graph_builder,
) -> c_int {
    guard(|| {
        if !builder.is_null() {
            // SAFETY: the caller's promise about handles.
            unsafe { get(builder, "builder") }?.check_thread()?;
        }
        // SAFETY: as above.
        unsafe { destroy(builder, "builder") }.map(|()| 0)
    })
}

/// Prepares the next launch, if it is not, and launches.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_graph_launch(
    graph: *mut doorbell_graph,
    stream: *mut doorbell_stream,
    members: *const doorbell_graph_members,
) -> c_int {
    guard(|| {
        // SAFETY: the caller's promise about handles.
        let (graph, stream) = unsafe { (get(graph, "graph")?, get(stream, "stream")?) };
        let mut graph = graph.lock()?;
        if !graph.is_armed() {
            // SAFETY: the caller's promise about the struct, its arrays and handles.
            unsafe { with_members(members, |members| Ok(graph.arm(members)?)) }?;
        }
        launch(&mut graph, stream)?;
        Ok(0)
    })
}

/// Launches what is prepared.
///
/// # Safety
/// As the header says of handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_graph_launch_armed(
    graph: *mut doorbell_graph,
    stream: *mut doorbell_stream,
) -> c_int {
    call!(graph = get(graph), stream = get(stream), || {
        launch(&mut *graph.lock()?, stream)?;
        Ok(0)
    })
}

/// Prepares the next launch.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_graph_arm(
    graph: *mut doorbell_graph,
    members: *const doorbell_graph_members,
) -> c_int {
    guard(|| {
        // SAFETY: the caller's promise about handles, and about the struct and its arrays.
        unsafe {
            let mut graph = get(graph, "graph")?.lock()?;
            with_members(members, |members| Ok(graph.arm(members)?))?;
        }
        Ok(0)
    })
}

/// Takes the preparation of the next launch back.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_graph_disarm(
    graph: *mut doorbell_graph,
    members: *const doorbell_graph_members,
) -> c_int {
    guard(|| {
        // SAFETY: the caller's promise about handles, and about the struct and its arrays.
        unsafe {
            let mut graph = get(graph, "graph")?.lock()?;
            with_members(members, |members| Ok(graph.disarm(members)?))?;
        }
        Ok(0)
    })
}

/// Whether the next launch is prepared.
///
/// # Safety
/// As the header says of handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_graph_is_armed(graph: *const doorbell_graph) -> c_int {
    // SAFETY: the caller's promise about handles.
    guard(|| Ok(unsafe { get(graph, "graph") }?.lock()?.is_armed().into()))
}

/// A ticket of the last launch.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_graph_ticket(
    graph: *const doorbell_graph,
    index: usize,
    ticket: *mut *mut doorbell_ticket,
) -> c_int {
    call!(place = out_handle(ticket), graph = get(graph), || {
        let graph = graph.lock()?;
        let Some(found) = graph.tickets().get(index) else {
            return Ok(0);
        };
        place.set(doorbell_ticket::new(found.clone()));
        Ok(1)
    })
}

/// A ticket of a message of the last launch.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_graph_message_ticket(
    graph: *const doorbell_graph,
    index: usize,
    ticket: *mut *mut doorbell_message_ticket,
) -> c_int {
    call!(place = out_handle(ticket), graph = get(graph), || {
        let graph = graph.lock()?;
        let Some(found) = graph.message_tickets().get(index) else {
            return Ok(0);
        };
        place.set(doorbell_message_ticket::new(found.clone()));
        Ok(1)
    })
}

/// A ticket of a collective operation of the last launch.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_graph_collective_ticket(
    graph: *const doorbell_graph,
    index: usize,
    ticket: *mut *mut doorbell_collective_ticket,
) -> c_int {
    call!(place = out_handle(ticket), graph = get(graph), || {
        let graph = graph.lock()?;
        let Some(found) = graph.collective_tickets().get(index) else {
            return Ok(0);
        };
        place.set(doorbell_collective_ticket::new(found.clone()));
        Ok(1)
    })
}

/// The driver's handle of a graph.
///
/// # Safety
/// As the header says of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_graph_raw(
    graph: *const doorbell_graph,
    raw: *mut *mut CUgraphExec_st,
) -> c_int {
    call!(place = out(raw), graph = get(graph), || {
        place.write(graph.lock()?.raw().cast());
        Ok(0)
    })
}

/// Destroys the handle of a graph.
///
/// # Safety
/// As the header says of handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_graph_destroy(graph: *mut doorbell_graph) -> c_int {
    // SAFETY: the caller's promise about handles.
    guard(|| unsafe { destroy(graph, "graph") }.map(|()| 0))
}

/// Hands the members to `body`, each for this thread alone.
///
/// # Safety
/// The pointer is null, or as the header says of structs, arrays and handles.
unsafe fn with_members<R>(
    members: *const doorbell_graph_members,
    body: impl FnOnce(&mut [&mut dyn GraphMember]) -> Result<R, Failure>,
) -> Result<R, Failure> {
    if members.is_null() {
        return body(&mut []);
    }
    let (mut endpoints, mut queues, mut communicators) = (Vec::new(), Vec::new(), Vec::new());
    // SAFETY: the caller's promise.
    unsafe {
        let given = read_struct(members, "members")?;
        if given.reserved != 0 {
            return Err(choice("reserved", given.reserved, 0));
        }
        for handle in array(given.endpoints, given.endpoint_count, "endpoints")? {
            endpoints.push(get(*handle, "endpoints[]")?.lock()?);
        }
        for handle in array(given.queues, given.queue_count, "queues")? {
            queues.push(get(*handle, "queues[]")?.lock()?);
        }
        let handles = array(
            given.communicators,
            given.communicator_count,
            "communicators",
        )?;
        for handle in handles {
            communicators.push(get(*handle, "communicators[]")?.lock()?);
        }
    }
    let mut all: Vec<&mut dyn GraphMember> = Vec::new();
    all.extend(
        endpoints
            .iter_mut()
            .map(|it| &mut **it as &mut dyn GraphMember),
    );
    all.extend(
        queues
            .iter_mut()
            .map(|it| &mut **it as &mut dyn GraphMember),
    );
    all.extend(
        communicators
            .iter_mut()
            .map(|it| &mut **it as &mut dyn GraphMember),
    );
    body(&mut all)
}

#[cfg(feature = "cuda")]
fn capture(stream: &doorbell_stream) -> Result<GraphBuilder, Failure> {
    Ok(GraphBuilder::capture(stream.cuda("capture of a stream")?)?)
}

/// # Safety
/// As [`GraphBuilder::over`].
#[cfg(feature = "cuda")]
unsafe fn over(stream: &doorbell_stream, graph: *mut CUgraph_st) -> Result<GraphBuilder, Failure> {
    let stream = stream.cuda("graph")?;
    // SAFETY: the caller's promise.
    Ok(unsafe { GraphBuilder::over(stream, graph.cast()) })
}

#[cfg(feature = "cuda")]
fn launch(graph: &mut GraphExec, stream: &doorbell_stream) -> Result<(), Failure> {
    Ok(graph.launch_armed(stream.cuda("launch of a graph")?)?)
}

#[cfg(not(feature = "cuda"))]
fn capture(_: &doorbell_stream) -> Result<GraphBuilder, Failure> {
    Err(Failure::Feature { feature: "cuda" })
}

#[cfg(not(feature = "cuda"))]
unsafe fn over(_: &doorbell_stream, _: *mut CUgraph_st) -> Result<GraphBuilder, Failure> {
    Err(Failure::Feature { feature: "cuda" })
}

#[cfg(not(feature = "cuda"))]
fn launch(graph: &mut GraphExec, _: &doorbell_stream) -> Result<(), Failure> {
    graph.never()
}

/// Stand-ins for the types that need the feature. They have the same calls, which are never made.
#[cfg(not(feature = "cuda"))]
mod nothing {
    use std::convert::Infallible;
    use std::ffi::c_void;
    use std::time::Duration;

    use crate::failure::Failure;
    use doorbell_rs::{
        Collective, CollectiveTicket, Communicator, Condition, Endpoint, MessageQueue,
        MessageTicket, QueueKind, Region, Result, Slice, Ticket, Work,
    };

    pub(super) struct GraphBuilder(Infallible);
    pub(super) struct GraphExec(Infallible);
    pub(super) trait GraphMember {}

    impl GraphMember for Endpoint {}
    impl GraphMember for MessageQueue {}
    impl GraphMember for Communicator {}

    impl GraphBuilder {
        pub(super) fn after(&mut self, _: &[*mut c_void]) -> Result<()> {
            match self.0 {}
        }

        pub(super) fn last_node(&mut self) -> Option<*mut c_void> {
            match self.0 {}
        }

        pub(super) fn send(&mut self, _: &mut Endpoint, _: &Work<'_>) -> Result<()> {
            match self.0 {}
        }

        pub(super) fn recv(&mut self, _: &mut Endpoint, _: u64, _: &[Slice<'_>]) -> Result<()> {
            match self.0 {}
        }

        pub(super) fn wait_cq_for(
            &mut self,
            _: &mut Endpoint,
            _: QueueKind,
            _: Option<Duration>,
        ) -> Result<()> {
            match self.0 {}
        }

        pub(super) fn wait_value32(
            &mut self,
            _: &Region,
            _: u64,
            _: Condition,
            _: Option<Duration>,
        ) -> Result<()> {
            match self.0 {}
        }

        pub(super) fn write_value32(&mut self, _: &Region, _: u64, _: u32) -> Result<()> {
            match self.0 {}
        }

        pub(super) fn send_message(&mut self, _: &mut MessageQueue, _: &[Slice<'_>]) -> Result<()> {
            match self.0 {}
        }

        pub(super) fn start_message(
            &mut self,
            _: &mut MessageQueue,
            _: &[Slice<'_>],
        ) -> Result<()> {
            match self.0 {}
        }

        pub(super) fn wait_messages(&mut self, _: &mut MessageQueue) -> Result<()> {
            match self.0 {}
        }

        pub(super) fn recv_message(&mut self, _: &mut MessageQueue, _: &[Slice<'_>]) -> Result<()> {
            match self.0 {}
        }

        pub(super) fn collective(&mut self, _: &mut Communicator, _: &Collective) -> Result<()> {
            match self.0 {}
        }

        pub(super) fn instantiate(self) -> Result<GraphExec> {
            match self.0 {}
        }
    }

    impl GraphExec {
        pub(super) fn arm(&mut self, _: &mut [&mut dyn GraphMember]) -> Result<()> {
            match self.0 {}
        }

        pub(super) fn disarm(&mut self, _: &mut [&mut dyn GraphMember]) -> Result<()> {
            match self.0 {}
        }

        pub(super) fn never(&self) -> std::result::Result<(), Failure> {
            match self.0 {}
        }

        pub(super) fn is_armed(&self) -> bool {
            match self.0 {}
        }

        pub(super) fn tickets(&self) -> &[Ticket] {
            match self.0 {}
        }

        pub(super) fn message_tickets(&self) -> &[MessageTicket] {
            match self.0 {}
        }

        pub(super) fn collective_tickets(&self) -> &[CollectiveTicket] {
            match self.0 {}
        }

        pub(super) fn raw(&self) -> *mut c_void {
            match self.0 {}
        }
    }
}
