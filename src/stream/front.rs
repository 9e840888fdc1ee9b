//! The front of the queue of a stream without a thread: what the next look goes on with.

use super::event::Event;
use super::execute_program::ProgramPosition;
use super::ring::Consumer;
use super::worker::Queued;

/// What only the thread that looks has.
pub(super) struct Look {
    pub(super) consumer: Consumer<Queued>,
    pub(super) front: FrontPosition,
}

/// How far the front of the queue is.
#[derive(Default)]
pub(super) struct FrontPosition {
    /// A look has come to it, and left it at a wait.
    pub(super) has_begun: bool,
    pub(super) program: ProgramPosition,
}

/// What became of an entry.
pub(super) enum Performed {
    /// It is done with. Then this event is to be woken.
    Done(Option<Event>),
    /// It waits. Only of a stream without a thread.
    Waits,
}
