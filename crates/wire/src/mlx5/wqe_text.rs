//! A WQE as text, field by field with its byte offsets.

use std::fmt;

use super::{Segment, Wqe};

impl fmt::Display for Wqe<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let control = &self.ctrl;
        let opcode = match (control.opcode, self.window()) {
            (Some(opcode), _) => opcode.name(),
            (None, Some(_)) => "UMR",
            (None, None) => "unknown",
        };
        writeln!(f, "control")?;
        writeln!(f, "   0  opmod     {:#04x}", control.opmod)?;
        writeln!(f, "   1  index     {}", control.index)?;
        writeln!(f, "   3  opcode    {:#04x} ({opcode})", control.opcode_raw)?;
        writeln!(f, "   4  qpn       {:#x}", control.qpn)?;
        writeln!(
            f,
            "   7  ds        {} ({} bytes)",
            control.ds,
            u32::from(control.ds) * 16
        )?;
        write!(f, "  11  fm_ce_se  {:#04x}", control.fm_ce_se)?;
        for (set, name) in [
            (control.signaled, "signaled"),
            (control.solicited, "solicited"),
            (control.fence, "fence"),
            (control.ordered, "ordered"),
        ] {
            if set {
                write!(f, " {name}")?;
            }
        }
        write!(f, "\n  12  imm       {:#010x}", control.imm)?;
        if let Some(remote) = self.remote {
            write!(
                f,
                "\nremote\n  16  addr      {:#018x}\n  24  rkey      {:#010x}",
                remote.addr, remote.rkey
            )?;
        }
        if let Some(atomic) = self.atomic {
            write!(
                f,
                "\natomic\n  32  swap/add  {:#018x}\n  40  compare   {:#018x}",
                atomic.swap_or_add, atomic.compare
            )?;
        }
        let mut segments = self.segments();
        loop {
            let at = segments.offset();
            match segments.next() {
                None => return Ok(()),
                Some(Segment::Memory(memory)) => {
                    write!(f, "\ndata\n{at:4}  length    {}", memory.len_bytes)?;
                    write!(f, "\n{:4}  lkey      {:#010x}", at + 4, memory.lkey)?;
                    write!(f, "\n{:4}  addr      {:#018x}", at + 8, memory.addr)?;
                }
                Some(Segment::Inline(bytes)) => {
                    write!(f, "\ninline\n{at:4}  length    {}", bytes.len())?;
                    for (row, chunk) in bytes.chunks(16).enumerate() {
                        write!(f, "\n{:4}  bytes    ", at + 4 + 16 * row)?;
                        for byte in chunk {
                            write!(f, " {byte:02x}")?;
                        }
                    }
                }
            }
        }
    }
}
