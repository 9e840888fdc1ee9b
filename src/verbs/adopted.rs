//! What the library needs of objects of libibverbs that another part of the process has made.

use std::any::Any;
use std::fmt;

/// Keeps alive what an adopted object needs, until it is dropped.
pub(crate) struct KeptAlive(#[expect(dead_code)] Box<dyn Any + Send + Sync>); // only dropped

impl KeptAlive {
    pub(crate) fn new(owner: impl Any + Send + Sync) -> KeptAlive {
        KeptAlive(Box::new(owner))
    }
}

impl fmt::Debug for KeptAlive {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("KeptAlive")
    }
}
