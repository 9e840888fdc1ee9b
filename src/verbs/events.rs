//! Asynchronous events: what a device reports of queues and of itself, apart from completions.
#![allow(unsafe_code)] // calls libibverbs

use std::collections::{BTreeMap, HashMap};
use std::ffi::c_int;
use std::io;
use std::mem::MaybeUninit;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, TryLockError, Weak};
use std::time::Instant;

use rdma_sys::ibv_event_type;

use super::call::failed;
use crate::Result;
use doorbell_wire::verbs::State;

/// How often the kernel is asked at most: a look costs a system call, and poll loops look all the time.
const INTERVAL_NS: u64 = 500_000;

/// What is known of a queue pair without a call: the state that it was brought to, and the reported events.
#[derive(Debug)]
pub(super) struct AsyncStatus {
    state: AtomicU8,
    overrun: AtomicBool,
    device_failed: AtomicBool,
}

impl AsyncStatus {
    pub(super) fn new() -> AsyncStatus {
        AsyncStatus {
            state: AtomicU8::new(State::Reset as u8),
            overrun: AtomicBool::new(false),
            device_failed: AtomicBool::new(false),
        }
    }

    pub(super) fn state(&self) -> State {
        const STATES: [State; 5] = [
            State::Reset,
            State::Init,
            State::ReadyToReceive,
            State::ReadyToSend,
            State::Error,
        ];
        let number = self.state.load(Ordering::Acquire);
        STATES
            .into_iter()
            .find(|state| *state as u8 == number)
            .unwrap_or(State::Error)
    }

    /// A step from one state to the next. If an event has reported an error meanwhile, the error state stays until a reset.
    pub(super) fn step(&self, from: State, to: State) {
        let step = (from as u8, to as u8);
        let _ = self
            .state
            .compare_exchange(step.0, step.1, Ordering::AcqRel, Ordering::Acquire);
    }

    pub(super) fn fail(&self) {
        self.state.store(State::Error as u8, Ordering::Release);
    }

    pub(super) fn reset(&self) {
        self.state.store(State::Reset as u8, Ordering::Release);
    }

    /// Whether the device has reported that it failed. It stays so.
    pub(super) fn device_failed(&self) -> bool {
        self.device_failed.load(Ordering::Acquire)
    }

    pub(super) fn overrun(&self) -> bool {
        self.overrun.load(Ordering::Acquire)
    }
}

/// The readers of contexts, by the address of the context, and whether each has made the descriptor non-blocking.
static READERS: Mutex<BTreeMap<usize, (Weak<Events>, bool)>> = Mutex::new(BTreeMap::new());

/// The events of a context.
#[derive(Debug)]
pub(super) struct Events {
    context: RawContext,
    /// Whether this library reads them. Otherwise another reader of the same context reports them.
    is_reader: bool,
    /// Whether this library has made the event descriptor non-blocking.
    was_blocking: bool,
    /// The queue pair that an event is about, by its address or the address of one of its completion queues.
    subjects: Mutex<HashMap<usize, Weak<AsyncStatus>>>,
    /// Held while events are read, so that an event that was read is entered before a waiting thread looks.
    reading: Mutex<()>,
    started: Instant,
    last_look_ns: AtomicU64,
}

#[derive(Debug)]
struct RawContext(NonNull<rdma_sys::ibv_context>);

// SAFETY: used by `look` only, under its lock; the owner of the events holds the context.
unsafe impl Send for RawContext {}
// SAFETY: as above.
unsafe impl Sync for RawContext {}

impl Events {
    /// If this library is their reader, makes the event descriptor non-blocking, so that looking for an event does not wait for one. It is blocking again when
    /// these events are dropped, if it was before. Otherwise the descriptor is left alone.
    ///
    /// A context has one reader in a process: two would take each other's events, and the first one to end would make the descriptor block for the other. Whoever asks
    /// again shares it.
    ///
    /// # Errors
    /// [`crate::Error::System`].
    pub(super) fn of(
        context: NonNull<rdma_sys::ibv_context>,
        is_reader: bool,
    ) -> Result<Arc<Events>> {
        let events = |was_blocking| {
            Arc::new(Events {
                context: RawContext(context),
                is_reader,
                was_blocking,
                subjects: Mutex::default(),
                reading: Mutex::default(),
                started: Instant::now(),
                last_look_ns: AtomicU64::new(0),
            })
        };
        if !is_reader {
            return Ok(events(false));
        }
        let mut readers = READERS.lock().unwrap_or_else(PoisonError::into_inner);
        let known = readers.get(&context.addr().get());
        if let Some(shared) = known.and_then(|(reader, _)| reader.upgrade()) {
            return Ok(shared);
        }
        let was_blocking = match known {
            // It is being dropped, and finds that it was replaced: the descriptor is as this one wants it.
            Some((_, was_blocking)) => *was_blocking,
            None => {
                // SAFETY: an open context.
                let fd = unsafe { context.as_ref() }.async_fd;
                set_nonblocking(fd, true).map_err(|error| {
                    failed(
                        "fcntl of the event descriptor",
                        error.raw_os_error().unwrap_or(libc::EIO),
                    )
                })?
            }
        };
        let reader = events(was_blocking);
        readers.insert(
            context.addr().get(),
            (Arc::downgrade(&reader), was_blocking),
        );
        Ok(reader)
    }

    fn subjects(&self) -> std::sync::MutexGuard<'_, HashMap<usize, Weak<AsyncStatus>>> {
        self.subjects.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Registers the status that events about the objects at these addresses change.
    pub(super) fn watch(&self, objects: [usize; 3], status: &Arc<AsyncStatus>) {
        let mut subjects = self.subjects();
        for object in objects {
            subjects.insert(object, Arc::downgrade(status));
        }
    }

    /// Before the objects are destroyed: their addresses may come again.
    pub(super) fn forget(&self, objects: [usize; 3]) {
        // A thread that is reading an event of these objects has to be done with it first.
        let _reading = self.reading.lock().unwrap_or_else(PoisonError::into_inner);
        let mut subjects = self.subjects();
        for object in objects {
            subjects.remove(&object);
        }
    }

    /// Takes the events that there are, unless a thread did so lately or is doing so.
    pub(super) fn look(&self) {
        if !self.is_reader {
            return;
        }
        let now_ns = self.started.elapsed().as_nanos() as u64;
        let last_ns = self.last_look_ns.load(Ordering::Relaxed);
        if now_ns.saturating_sub(last_ns) < INTERVAL_NS {
            return;
        }
        let _reading = match self.reading.try_lock() {
            Ok(reading) => reading,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return,
        };
        self.last_look_ns.store(now_ns, Ordering::Relaxed);
        self.read();
    }

    /// Takes the events that there are.
    pub(super) fn take(&self) {
        if !self.is_reader {
            return;
        }
        let _reading = self.reading.lock().unwrap_or_else(PoisonError::into_inner);
        self.read();
    }

    /// The caller holds `reading`.
    fn read(&self) {
        let mut event = MaybeUninit::<rdma_sys::ibv_async_event>::zeroed();
        let event = event.as_mut_ptr();
        // SAFETY: an open context, and a place for the event; it does not wait. The event is acknowledged before the object that it is
        // about can be destroyed, because that waits for this lock.
        while unsafe { rdma_sys::ibv_get_async_event(self.context.0.as_ptr(), event) } == 0 {
            // SAFETY: the call has filled it in. Its kind is read as a number, because the kernel may know more kinds than the bindings;
            // and the object as an address, which every member of the union lies in.
            unsafe {
                let kind = (&raw const (*event).event_type).cast::<u32>().read();
                let object = (&raw const (*event).element).cast::<usize>().read();
                self.enter(kind, object);
                rdma_sys::ibv_ack_async_event(event);
            }
        }
    }

    /// Enters an event of that kind (`enum ibv_event_type`) about that object.
    pub(super) fn enter(&self, kind: u32, object: usize) {
        const CQ_ERR: u32 = ibv_event_type::IBV_EVENT_CQ_ERR as u32;
        const QP_FATAL: u32 = ibv_event_type::IBV_EVENT_QP_FATAL as u32;
        const QP_REQ_ERR: u32 = ibv_event_type::IBV_EVENT_QP_REQ_ERR as u32;
        const QP_ACCESS_ERR: u32 = ibv_event_type::IBV_EVENT_QP_ACCESS_ERR as u32;
        const DEVICE_FATAL: u32 = ibv_event_type::IBV_EVENT_DEVICE_FATAL as u32;
        let subjects = self.subjects();
        let found = || subjects.get(&object).and_then(Weak::upgrade);
        match kind {
            QP_FATAL | QP_REQ_ERR | QP_ACCESS_ERR => {
                if let Some(status) = found() {
                    status.fail();
                }
            }
            CQ_ERR => {
                if let Some(status) = found() {
                    status.overrun.store(true, Ordering::Release);
                }
            }
            DEVICE_FATAL => {
                for status in subjects.values().filter_map(Weak::upgrade) {
                    status.device_failed.store(true, Ordering::Release);
                    status.fail();
                }
            }
            // A port that is down is one whose peers do not answer: the queue pairs' own timers judge that. The others tell of what
            // was asked for, or of nothing that concerns a reliable queue pair.
            _ => {}
        }
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        if !self.is_reader {
            return;
        }
        let mut readers = READERS.lock().unwrap_or_else(PoisonError::into_inner);
        let context = self.context.0.addr().get();
        let is_own = |(reader, _): &(Weak<Events>, bool)| std::ptr::eq(reader.as_ptr(), self);
        if !readers.get(&context).is_some_and(is_own) {
            return;
        }
        readers.remove(&context);
        if self.was_blocking {
            // SAFETY: the context is open still: its owner, or what closes it, is dropped after these events.
            let fd = unsafe { self.context.0.as_ref() }.async_fd;
            // Nothing can be done about a descriptor that its owner has closed.
            let _ = set_nonblocking(fd, false);
        }
    }
}

/// Sets or clears `O_NONBLOCK`. Returns whether that has changed it.
fn set_nonblocking(fd: c_int, is_nonblocking: bool) -> io::Result<bool> {
    // SAFETY: reads flags, if the descriptor is one.
    let flags = unsafe { libc::fcntl(fd, libc::F_GETFL) };
    if flags < 0 {
        return Err(io::Error::last_os_error());
    }
    let wanted = match is_nonblocking {
        true => flags | libc::O_NONBLOCK,
        false => flags & !libc::O_NONBLOCK,
    };
    if wanted == flags {
        return Ok(false);
    }
    // SAFETY: changes one flag of a descriptor.
    match unsafe { libc::fcntl(fd, libc::F_SETFL, wanted) } {
        0 => Ok(true),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

    use super::*;

    /// The descriptor may be the program's, which goes on using it.
    #[test]
    fn the_event_descriptor_blocks_again_when_the_library_is_done_with_it() {
        for (flags, is_reader) in [
            (0, true),
            (0, false),
            (libc::EFD_NONBLOCK, true),
            (libc::EFD_NONBLOCK, false),
        ] {
            // SAFETY: makes a descriptor, which belongs to this test.
            let fd = unsafe { OwnedFd::from_raw_fd(libc::eventfd(0, flags)) };
            // SAFETY: reads flags.
            let is_nonblocking =
                || unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GETFL) } & libc::O_NONBLOCK != 0;
            // SAFETY: plain numbers and addresses, for which zero is a value; only the descriptor is used.
            let mut context: rdma_sys::ibv_context = unsafe { std::mem::zeroed() };
            context.async_fd = fd.as_raw_fd();
            let of_context = NonNull::from(&mut context);
            let events = Events::of(of_context, is_reader).unwrap();
            let again = Events::of(of_context, is_reader).unwrap();
            assert_eq!(Arc::ptr_eq(&events, &again), is_reader);
            drop(events);
            // It is read still.
            assert_eq!(is_nonblocking(), is_reader || flags != 0);
            drop(again);
            assert_eq!(is_nonblocking(), flags != 0, "reader: {is_reader}");
        }
    }

    #[test]
    fn an_event_changes_what_it_is_about() {
        let events = Events {
            context: RawContext(NonNull::dangling()),
            is_reader: true,
            was_blocking: false,
            subjects: Mutex::default(),
            reading: Mutex::default(),
            started: Instant::now(),
            last_look_ns: AtomicU64::new(0),
        };
        let [a, b] = [(); 2].map(|()| Arc::new(AsyncStatus::new()));
        events.watch([0x10, 0x20, 0x30], &a);
        events.watch([0x40, 0x50, 0x60], &b);
        a.step(State::Reset, State::ReadyToReceive);
        b.step(State::Reset, State::ReadyToSend);
        events.enter(ibv_event_type::IBV_EVENT_COMM_EST as u32, 0x10);
        events.enter(ibv_event_type::IBV_EVENT_QP_FATAL as u32, 0x70);
        assert_eq!(a.state(), State::ReadyToReceive);
        events.enter(ibv_event_type::IBV_EVENT_QP_ACCESS_ERR as u32, 0x10);
        assert_eq!((a.state(), b.state()), (State::Error, State::ReadyToSend));
        // The call that was under way is done now.
        a.step(State::ReadyToReceive, State::ReadyToSend);
        assert_eq!(a.state(), State::Error);
        events.enter(ibv_event_type::IBV_EVENT_CQ_ERR as u32, 0x60);
        assert!(b.overrun() && !a.overrun());
        events.forget([0x40, 0x50, 0x60]);
        a.reset();
        a.step(State::Reset, State::Init);
        assert_eq!(a.state(), State::Init);
        events.enter(ibv_event_type::IBV_EVENT_DEVICE_FATAL as u32, 0);
        assert_eq!((a.state(), b.state()), (State::Error, State::ReadyToSend));
    }
}
