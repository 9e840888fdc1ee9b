//! Where a queue lies in the process: checks of addresses that the device is going to use for long.

use crate::soft::client::Errno;
use crate::soft::space::Space;

/// EFAULT unless the ring's first and last words are mapped; EINVAL for an address that no driver uses. What is between, and what is
/// unmapped later, the device finds out when it gets there.
pub(super) fn check_ring(space: Space, address: u64, bytes: u64) -> Result<(), Errno> {
    if bytes == 0 {
        return Ok(());
    }
    if !address.is_multiple_of(64) {
        return Err(libc::EINVAL);
    }
    let last = address
        .checked_add(bytes - bytes.min(8))
        .ok_or(libc::EFAULT)?;
    let mut word = [0; 8];
    for at in [address, last] {
        space.read(at, &mut word).map_err(|_| libc::EFAULT)?;
    }
    Ok(())
}

/// The same for a doorbell record of two words.
pub(super) fn check_record(space: Space, address: u64) -> Result<(), Errno> {
    if !address.is_multiple_of(8) {
        return Err(libc::EINVAL);
    }
    space.read(address, &mut [0; 8]).map_err(|_| libc::EFAULT)
}
