//! Waits of streams for words that the peer of an endpoint writes.

use std::sync::Arc;
use std::time::Duration;

use crate::Result;
use crate::endpoint::{Endpoint, Ticket, value};
use crate::region::Region;
use crate::stream::Submission;

impl Endpoint {
    /// A wait for the word at an offset of a region, which the peer writes, to reach `value`, and its ticket. It ends with the failure of the endpoint, too,
    /// which goes on after its drop until the wait has ended. It keeps `held` until then. `None` waits for ever.
    ///
    /// # Errors
    /// As [`stream_wait_value32`](crate::stream_wait_value32), and [`Error::Work`](crate::Error::Work) if the endpoint has failed.
    pub(crate) fn peer_value_wait(
        &self,
        word: (&Region, u64),
        value: u32,
        timeout: Option<Duration>,
        held: Option<Region>,
    ) -> Result<(Submission, Ticket)> {
        value::peer_value_wait(Arc::clone(&self.shared), word, value, timeout, held)
    }
}
