//! What the operations of a graph belong to.

use crate::collective::Communicator;
use crate::endpoint::Endpoint;
use crate::message::{MessageQueue, RecordingPart, RecordingParts};
use crate::{Error, Result};

/// What operations of a graph belong to, and each launch needs: an [`Endpoint`], a [`MessageQueue`] or a [`Communicator`].
pub trait GraphMember: kinds::Kinds {}

impl GraphMember for Endpoint {}
impl GraphMember for MessageQueue {}
impl GraphMember for Communicator {}

mod kinds {
    use super::{Communicator, Endpoint, MessageQueue};

    /// Which one it is.
    pub trait Kinds {
        fn as_endpoint(&mut self) -> Option<&mut Endpoint> {
            None
        }

        fn as_queue(&mut self) -> Option<&mut MessageQueue> {
            None
        }

        fn as_communicator(&mut self) -> Option<&mut Communicator> {
            None
        }
    }

    impl Kinds for Endpoint {
        fn as_endpoint(&mut self) -> Option<&mut Endpoint> {
            Some(self)
        }
    }

    impl Kinds for MessageQueue {
        fn as_queue(&mut self) -> Option<&mut MessageQueue> {
            Some(self)
        }
    }

    impl Kinds for Communicator {
        fn as_communicator(&mut self) -> Option<&mut Communicator> {
            Some(self)
        }
    }
}

/// The endpoint of that number.
///
/// # Errors
/// [`Error::Foreign`] if it is not among the members.
pub(super) fn endpoint<'a>(
    members: &'a mut [&mut dyn GraphMember],
    id: u64,
) -> Result<&'a mut Endpoint> {
    let mut all = members.iter_mut().filter_map(|member| member.as_endpoint());
    let found = all.find(|endpoint| endpoint.id() == id);
    found.ok_or_else(|| missing(format!("the recorded endpoint, with target table {id}")))
}

/// The message queue of that number.
///
/// # Errors
/// As [`endpoint`].
pub(super) fn queue<'a>(
    members: &'a mut [&mut dyn GraphMember],
    id: u64,
) -> Result<&'a mut MessageQueue> {
    let mut all = members.iter_mut().filter_map(|member| member.as_queue());
    let found = all.find(|queue| queue.id() == id);
    found.ok_or_else(|| missing("the message queue that was recorded".into()))
}

/// The communicator of that number.
///
/// # Errors
/// As [`endpoint`].
pub(super) fn communicator<'a>(
    members: &'a mut [&mut dyn GraphMember],
    id: u64,
) -> Result<&'a mut Communicator> {
    let mut all = members
        .iter_mut()
        .filter_map(|member| member.as_communicator());
    let found = all.find(|communicator| communicator.id() == id);
    found.ok_or_else(|| missing("the communicator that was recorded".into()))
}

fn missing(what: String) -> Error {
    Error::Foreign {
        argument: "members",
        found: "others".into(),
        expected: format!("{what}, among them"),
    }
}

/// The members as the places where operations go back to.
pub(super) struct Members<'a, 'b>(pub(super) &'a mut [&'b mut dyn GraphMember]);

impl RecordingParts for Members<'_, '_> {
    fn part(&mut self, id: u64) -> Option<RecordingPart<'_>> {
        self.0.iter_mut().find_map(|member| part(&mut **member, id))
    }
}

fn part(member: &mut dyn GraphMember, id: u64) -> Option<RecordingPart<'_>> {
    // Asked twice, because what is found in a match stays borrowed.
    if member.as_endpoint().is_some() {
        let endpoint = member.as_endpoint()?;
        return (endpoint.id() == id).then_some(RecordingPart::Endpoint(endpoint));
    }
    if member.as_queue().is_some() {
        return member.as_queue()?.part(id);
    }
    member.as_communicator()?.part(id)
}
