//! Words of verbs, with the numbers that verbs gives them.

mod access;
mod attributes;
mod capacity;
mod state;

pub use crate::status::WcStatus;
pub use access::Access;
pub use attributes::Attributes;
pub use capacity::{Abilities, Capacity, Transport};
pub use state::State;
