//! Waiting for an event without a thread: a future, and a file descriptor.

use std::fs::File;
use std::future::Future;
use std::io::Write;
use std::os::fd::BorrowedFd;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};

use super::Event;
use super::event::StreamPosition;
use super::own_streams::look_at_own_streams;
use crate::{Error, Result};

/// A future that is ready when a stream has passed an [`Event`]. [`Event::reached`] makes it.
///
/// It needs no particular runtime. It may be dropped before it is ready.
#[derive(Debug)]
#[must_use = "a future does nothing unless it is awaited"]
pub struct Reached {
    event: Event,
    /// `None` if the event was never recorded.
    mark: Option<StreamPosition>,
}

impl Future for Reached {
    /// As [`Event::synchronize`], but for the timeout.
    type Output = Result<()>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        match &self.mark {
            Some(mark) if !self.event.wake_at(mark, context.waker()) => {
                if mark.needs_looks() {
                    // Nobody else may look. It may be reached by now, and the waker may have been woken.
                    let _ = mark.look() | look_at_own_streams();
                    context.waker().wake_by_ref();
                }
                Poll::Pending
            }
            Some(mark) => Poll::Ready(self.event.verdict(mark)),
            None => Poll::Ready(Ok(())),
        }
    }
}

/// Writes to a descriptor in place of waking a task.
struct NotifiedFd(File);

impl Wake for NotifiedFd {
    fn wake(self: Arc<Self>) {
        // A failed write concerns the application that waits on the descriptor. The stream goes on.
        let _ = (&self.0).write(&1_u64.to_ne_bytes());
    }
}

/// A waker that adds 1 to a duplicate of the descriptor.
///
/// # Errors
/// [`Error::System`] if it cannot be duplicated.
pub(crate) fn eventfd_waker(eventfd: BorrowedFd<'_>) -> Result<Waker> {
    let duplicate = eventfd
        .try_clone_to_owned()
        .map_err(|error| Error::System {
            operation: "duplicate a descriptor",
            errno: error.raw_os_error().unwrap_or(0),
        })?;
    Ok(Waker::from(Arc::new(NotifiedFd(duplicate.into()))))
}

impl Event {
    /// A future that is ready when the work that the event stands for at this moment is done, or at once if the event was never recorded.
    ///
    /// A host stream wakes the task when it passes the record. A CUDA stream is observed by a thread of this library, which wakes the task up to
    /// some milliseconds later. A queue without a stream is awaited by way of a host stream:
    ///
    /// ```
    /// use doorbell::{Endpoint, Event, Executor, HostStream, QueueKind, Work};
    ///
    /// async fn transfer(endpoint: &mut Endpoint, stream: &HostStream, work: &Work<'_>) -> doorbell::Result<()> {
    ///     endpoint.post_send(work)?;
    ///     endpoint.stream_wait_cq(stream, QueueKind::Send)?;
    ///     let done = Event::blocking();
    ///     stream.record(&done)?;
    ///     done.reached()?.await
    /// }
    /// ```
    ///
    /// The output is an [`Error::Asynchronous`] if the work was discarded because its stream failed or was aborted.
    ///
    /// # Errors
    /// [`Error::State`] unless the event was created by [`Event::blocking`].
    pub fn reached(&self) -> Result<Reached> {
        self.check_blocking("wait for an event in a task")?;
        Ok(Reached {
            event: self.clone(),
            mark: self.mark(),
        })
    }

    /// Adds 1 to an eventfd (eventfd(2)) when the work that the event stands for at this moment is done or discarded, or within this call if that is
    /// so already: for programs that wait by epoll. [`Event::query`] then tells which of the two it is. The descriptor is duplicated, so the caller may
    /// close its own. It should be non-blocking: a write that blocks would block the stream.
    ///
    /// # Errors
    /// [`Error::State`] unless the event was created by [`Event::blocking`]. [`Error::System`] if the descriptor cannot be duplicated.
    pub fn notify(&self, eventfd: BorrowedFd<'_>) -> Result<()> {
        self.check_blocking("notify a descriptor of an event")?;
        let waker = eventfd_waker(eventfd)?;
        match self.mark() {
            Some(mark) if !self.wake_at(&mark, &waker) => {}
            _ => waker.wake(),
        }
        Ok(())
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::super::event::{Progress, Record};
    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering};

    #[derive(Default)]
    struct Count(AtomicU32);

    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    impl Count {
        fn poll(self: &Arc<Self>, reached: &mut Reached) -> Poll<Result<()>> {
            let waker = Waker::from(Arc::clone(self));
            Pin::new(reached).poll(&mut Context::from_waker(&waker))
        }

        fn is(&self, count: u32) -> bool {
            self.0.load(Ordering::Relaxed) == count
        }
    }

    fn record(event: &Event, progress: &Arc<Progress>, position: u64) -> Record {
        let (record, number) = event.begin_record();
        let progress = Arc::clone(progress);
        Record::announce(event, number, StreamPosition { progress, position });
        record
    }

    #[test]
    fn only_tasks_whose_record_has_passed_are_woken() {
        let progress = Arc::new(Progress::new(1));
        let event = Event::blocking();
        let [first, second] = [(); 2].map(|()| Arc::new(Count::default()));
        assert_eq!(
            first.poll(&mut event.reached().unwrap()),
            Poll::Ready(Ok(()))
        );

        let early = record(&event, &progress, 1);
        let mut reached_early = event.reached().unwrap();
        for _ in 0..3 {
            // A task that is polled for another reason is woken once all the same.
            assert!(first.poll(&mut reached_early).is_pending());
        }
        let late = record(&event, &progress, 2);
        let mut reached_late = event.reached().unwrap();
        assert!(second.poll(&mut reached_late).is_pending());

        early.fire(None);
        progress.complete(1);
        event.wake_tasks();
        assert!(first.is(1) && second.is(0));
        assert_eq!(first.poll(&mut reached_early), Poll::Ready(Ok(())));
        assert!(second.poll(&mut reached_late).is_pending());

        late.fire(None);
        progress.complete(2);
        event.wake_tasks();
        event.wake_tasks();
        assert!(first.is(1) && second.is(1));
        assert_eq!(second.poll(&mut reached_late), Poll::Ready(Ok(())));
    }

    #[test]
    fn a_waker_that_panics_keeps_no_other_from_being_woken() {
        struct Panics;
        impl Wake for Panics {
            fn wake(self: Arc<Self>) {
                panic!("a waker");
            }
        }
        let progress = Arc::new(Progress::new(1));
        let event = Event::blocking();
        let _record = record(&event, &progress, 1);
        let mut reached = event.reached().unwrap();
        let panics = Waker::from(Arc::new(Panics));
        assert!(
            Pin::new(&mut reached)
                .poll(&mut Context::from_waker(&panics))
                .is_pending()
        );
        let count = Arc::new(Count::default());
        assert!(count.poll(&mut reached).is_pending());
        progress.complete(1);
        event.wake_tasks();
        assert!(count.is(1));
    }

    #[test]
    fn an_event_that_spins_is_refused() {
        let refused = Event::new().reached().unwrap_err();
        assert!(
            matches!(refused, Error::State { .. })
                && refused.to_string().contains("Event::blocking"),
            "{refused}"
        );
    }
}
