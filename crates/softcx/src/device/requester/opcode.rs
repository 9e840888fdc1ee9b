//! Opcodes of work requests, as in the first segment of a WQE.

use doorbell_wire::mlx5::WindowUpdate;

pub(super) const NOP: u8 = 0x00;
pub(super) const SEND_INVAL: u8 = 0x01;
pub(super) const RDMA_WRITE: u8 = 0x08;
pub(super) const RDMA_WRITE_IMM: u8 = 0x09;
pub(super) const SEND: u8 = 0x0a;
pub(super) const SEND_IMM: u8 = 0x0b;
pub(super) const RDMA_READ: u8 = 0x10;
pub(super) const ATOMIC_CS: u8 = 0x11;
pub(super) const ATOMIC_FA: u8 = 0x12;
pub(super) const UMR: u8 = WindowUpdate::OPCODE;
