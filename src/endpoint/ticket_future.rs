//! Waiting for a ticket without a thread of the application: a future, and a file descriptor.
//!
//! The end of an operation is a CQE in memory, which wakes nobody. So a thread of the library looks, while there is somebody to be woken.

use std::fmt;
use std::future::{Future, IntoFuture};
use std::os::fd::BorrowedFd;
use std::pin::Pin;
use std::sync::{Arc, OnceLock, Weak};
use std::task::{Context, Poll, Waker};

use crate::endpoint::Ticket;
use crate::proxy::{Pace, Placement, PollResult, ProgressThread, execute_elsewhere};
use crate::stream::{Lock, eventfd_waker, look_at_own_streams};
use crate::{Error, Result, StateKind};

/// An operation that somebody waits for without a thread.
pub(crate) trait Awaited: Send + Sync {
    /// `Some` once it is over; the output of the future. Waits for nothing: the thread that asks does so for all that are awaited, and a task must not block.
    fn outcome(&self) -> Option<Result<()>>;

    /// Lets the device work within the calling thread.
    fn progress(&self) {}

    /// Whether only threads that wait in this library bring it on, because it is on a stream without a thread. Executes that stream then.
    fn looks(&self) -> bool {
        false
    }
}

impl Awaited for Ticket {
    fn outcome(&self) -> Option<Result<()>> {
        if let Err(error) = self.check_ends() {
            return Some(Err(error));
        }
        self.check_now().map(|over| over.then_some(())).transpose()
    }

    fn progress(&self) {
        Ticket::progress(self);
    }

    fn looks(&self) -> bool {
        let looks = self.needs_looks();
        if looks {
            self.look_at_stream();
        }
        looks
    }
}

/// Looks whether one operation is over, and wakes one task or descriptor then.
struct TicketWaiter {
    awaited: Arc<dyn Awaited>,
    wake: Lock<WakeState>,
}

#[derive(Default)]
struct WakeState {
    is_over: bool,
    waker: Option<Waker>,
    /// Of a descriptor, which nobody else holds: the waiter itself, until it has written.
    own: Option<Arc<TicketWaiter>>,
}

impl TicketWaiter {
    fn new(awaited: Arc<dyn Awaited>) -> Arc<TicketWaiter> {
        Arc::new(TicketWaiter {
            awaited,
            wake: Lock::default(),
        })
    }

    /// Has the waker woken when the operation is over. False if the thread has found that already.
    fn wake_by(&self, waker: &Waker) -> bool {
        let mut state = self.wake.lock();
        if state.is_over {
            return false;
        }
        match &mut state.waker {
            Some(known) => known.clone_from(waker),
            none => *none = Some(waker.clone()),
        }
        true
    }

    /// What the thread does.
    fn look(&self) -> PollResult {
        self.awaited.progress();
        if self.awaited.outcome().is_none() {
            return PollResult::Waiting;
        }
        let WakeState { waker, own, .. } = std::mem::replace(
            &mut *self.wake.lock(),
            WakeState {
                is_over: true,
                ..WakeState::default()
            },
        );
        if let Some(waker) = waker {
            waker.wake();
        }
        // The thread itself has another handle.
        drop(own);
        PollResult::Over
    }
}

/// The thread that looks, started with its first use. It spins for some time after it had something to do, and then sleeps for 200 us at most.
///
/// # Errors
/// [`Error::System`] if there is no thread to be had.
fn waiter_thread() -> Result<&'static ProgressThread<TicketWaiter>> {
    static THREAD: OnceLock<Result<Arc<ProgressThread<TicketWaiter>>>> = OnceLock::new();
    THREAD
        .get_or_init(|| {
            ProgressThread::start(
                "doorbell-waiter",
                Placement::Anywhere,
                Pace::default(),
                TicketWaiter::look,
                // It may have the last handle of an endpoint.
                |waiter| {
                    if let Some(last) = Arc::into_inner(waiter) {
                        execute_elsewhere(Box::new(last));
                    }
                },
            )
        })
        .as_deref()
        .map_err(Error::clone)
}

fn register(waiter: &Arc<TicketWaiter>) -> Result<()> {
    let thread = waiter_thread()?;
    thread.register(Arc::downgrade(waiter) as Weak<TicketWaiter>);
    thread.wake_thread();
    Ok(())
}

/// A future that is ready when an operation is over. `IntoFuture` of a ticket makes it, so `ticket.await` is enough.
///
/// It needs no particular runtime. It may be dropped before it is ready; the operation goes on. While it waits, a thread of the library looks at the operation, so it is ready up to 200 us
/// after the operation is over. An operation on a stream without a thread is executed by the task that polls the future.
#[must_use = "a future does nothing unless it is awaited"]
pub struct TicketFuture {
    awaited: Arc<dyn Awaited>,
    /// From the first poll on that did not find it over.
    waiter: Option<Arc<TicketWaiter>>,
}

impl TicketFuture {
    pub(crate) fn new(awaited: impl Awaited + 'static) -> TicketFuture {
        TicketFuture {
            awaited: Arc::new(awaited),
            waiter: None,
        }
    }
}

impl Future for TicketFuture {
    type Output = Result<()>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        self.awaited.progress();
        let looks = self.awaited.looks();
        if let Some(outcome) = self.awaited.outcome() {
            return Poll::Ready(outcome);
        }
        if looks {
            // Nobody else may execute the stream.
            look_at_own_streams();
            context.waker().wake_by_ref();
            return Poll::Pending;
        }
        if let Some(waiter) = &self.waiter {
            if !waiter.wake_by(context.waker()) {
                // It was not over before, and is now.
                context.waker().wake_by_ref();
            }
            return Poll::Pending;
        }
        let waiter = TicketWaiter::new(Arc::clone(&self.awaited));
        waiter.wake_by(context.waker());
        if let Err(error) = register(&waiter) {
            return Poll::Ready(Err(error));
        }
        self.waiter = Some(waiter);
        Poll::Pending
    }
}

impl fmt::Debug for TicketFuture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TicketFuture").finish_non_exhaustive()
    }
}

/// Adds 1 to an eventfd when an operation is over, as [`Ticket::notify`].
pub(crate) fn notify(awaited: impl Awaited + 'static, eventfd: BorrowedFd<'_>) -> Result<()> {
    let waker = eventfd_waker(eventfd)?;
    match awaited.outcome() {
        None => {}
        // It is never over. A notice would say that it is.
        Some(Err(
            refusal @ Error::State {
                kind: StateKind::Captured,
                ..
            },
        )) => return Err(refusal),
        Some(_) => {
            waker.wake();
            return Ok(());
        }
    }
    let waiter = TicketWaiter::new(Arc::new(awaited));
    {
        let mut state = waiter.wake.lock();
        state.waker = Some(waker);
        state.own = Some(Arc::clone(&waiter));
    }
    register(&waiter).inspect_err(|_| waiter.wake.lock().own = None)
}

impl Ticket {
    /// Adds 1 to an eventfd (eventfd(2)) when the operation is over, with success or not, or within this call if that is so already: for programs that wait by
    /// epoll. [`Ticket::check`] then tells how it ended. The descriptor is duplicated, so the caller may close its own. It should be non-blocking: a write that
    /// blocks would block the notices of others. A thread of the library looks at the operation, up to 200 us after it is over.
    ///
    /// An operation on a stream without a thread (`HostStream::without_thread`) also needs a thread that waits in this library: the notice itself does not
    /// execute the stream.
    ///
    /// ```
    /// # #[cfg(feature = "softcx")]
    /// # fn main() -> doorbell::Result<()> {
    /// # use doorbell::{Device, Endpoint, EndpointConfig};
    /// # let domain = Device::open("softcx")?.protection_domain();
    /// # let endpoint_config = EndpointConfig::default();
    /// # let (mut endpoint, peer) = (Endpoint::new(&domain, &endpoint_config)?, Endpoint::new(&domain, &endpoint_config)?);
    /// # endpoint.connect(&peer.address())?;
    /// async fn receive(endpoint: &mut Endpoint) -> doorbell::Result<()> {
    ///     endpoint.post_recv(1, &[])?.await
    /// }
    /// # drop(receive(&mut endpoint));
    /// # Ok(())
    /// # }
    /// # #[cfg(not(feature = "softcx"))]
    /// # fn main() {}
    /// ```
    ///
    /// # Errors
    /// [`Error::System`] if the descriptor cannot be duplicated, or if there is no thread to be had. [`Error::State`] with [`StateKind::Captured`] for an operation that is
    /// never complete, see [`Ticket::is_over`]; there is no notice then.
    pub fn notify(&self, eventfd: BorrowedFd<'_>) -> Result<()> {
        notify(self.clone(), eventfd)
    }
}

/// `ticket.await` is ready when the operation is over, with the errors of [`Ticket::check`]. For an operation that is never complete ([`Ticket::is_over`]) it is ready at once,
/// with [`Error::State`] and [`StateKind::Captured`].
impl IntoFuture for Ticket {
    type Output = Result<()>;
    type IntoFuture = TicketFuture;

    fn into_future(self) -> TicketFuture {
        TicketFuture::new(self)
    }
}

/// As that of the ticket itself, which stays.
impl IntoFuture for &Ticket {
    type Output = Result<()>;
    type IntoFuture = TicketFuture;

    fn into_future(self) -> TicketFuture {
        TicketFuture::new(self.clone())
    }
}
