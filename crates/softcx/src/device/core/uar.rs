//! The UAR registers of one queue pair.

use crate::device::dma::UarRegister;

/// Turns without a doorbell after which a register is looked at only now and then.
pub(super) const HOT_TURNS: u16 = 2048;

/// A queue pair's UAR registers and how long ago they were rung.
#[derive(Debug)]
pub(super) struct Uar {
    pub(super) registers: [UarRegister; 2],
    pub(super) quiet_turns: u16,
}

impl Uar {
    /// Registers that turns do not read until a doorbell is found or reported.
    pub(super) fn new(registers: [UarRegister; 2]) -> Uar {
        Uar {
            registers,
            quiet_turns: HOT_TURNS,
        }
    }

    /// Whether a register holds a doorbell.
    #[inline]
    pub(super) fn is_rung(&self) -> bool {
        self.registers.iter().any(|register| register.is_rung())
    }
}
