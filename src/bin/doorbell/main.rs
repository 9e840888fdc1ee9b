//! The `doorbell` command.

// The endpoints that it measures on are not in the crate yet. `expect`, not `allow`: the first caller makes the compiler ask for its removal.
#[expect(dead_code, reason = "no command calls it yet")]
mod bench;

fn main() {}
