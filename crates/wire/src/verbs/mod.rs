//! Words of verbs, with the numbers that verbs gives them.

mod access;
mod attributes;
mod state;
mod status;

pub use access::Access;
pub use attributes::Attributes;
pub use state::State;
pub use status::WcStatus;
