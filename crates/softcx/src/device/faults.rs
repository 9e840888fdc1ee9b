//! Faults that a device injects on purpose.

/// The environment variable with the faults of the devices that a process makes by [`Device::open`](super::Device::open), as
/// `doorbell softcx run --fault` takes them.
pub const FAULT: &str = "DOORBELL_SOFTCX_FAULT";

use super::commands::CommandKinds;
use crate::{Error, Result};

/// Faults of the wire, the device and its commands. Probabilities are 0.0 to 1.0 per packet. The default injects no fault.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Faults {
    /// A packet that is sent is lost.
    pub loss: f64,
    /// A packet that arrives is lost: what a peer loses that injects no faults, such as the responses of a card.
    pub arrival_loss: f64,
    /// A packet arrives twice.
    pub duplicate: f64,
    /// A packet is held back for up to 50 us, so that later ones overtake it.
    pub reorder: f64,
    /// The delay of every packet, in nanoseconds.
    pub delay_ns: u64,
    /// The delay, in nanoseconds, with which the bytes of an incoming write are placed in memory. Later writes overtake it. Completions,
    /// immediate data, reads and atomics keep the order of a reliable connection.
    pub late_writes_ns: u64,
    /// The delay, in nanoseconds, with which the bytes of an incoming packet are placed in memory, if the packet does not end its write, send
    /// or read response. The rest of the message overtakes them. The completion comes after all bytes of the message.
    pub late_packets_ns: u64,
    /// When the device reads work requests from their ring. With `Some(0)` it copies them at the doorbell that announces them, and does not see
    /// later changes. With another number it reads the oldest request that it has not begun that many nanoseconds after its doorbell. With `None`
    /// it reads a request when it executes it. A card may do any of these.
    pub fetch_ns: Option<u64>,
    /// Start of the random sequence: the same seed and traffic give the same faults.
    pub seed: u64,
    /// The number of the packet that is lost, counted from 1. In this field and the next ones, 0 means that no packet or request is affected.
    pub drop_nth: u64,
    /// The number of an incoming request packet, counted in PSN order, and the code with which it is answered instead of being executed. The
    /// code is an AETH syndrome (IBTA 9.7.5.2): 0x20 to 0x3f for a receiver that is not ready, 0x60 to 0x63 for errors.
    pub refuse: (u64, u8),
    /// The number of the response to a read or an atomic that is garbled: a read response has the form of an atomic's, and vice versa.
    pub garble_nth: u64,
    /// The number of a work request of a send queue, and the syndrome with which it fails.
    pub fail_send: (u64, u8),
    /// The number of a receive, counted apart from sends, and the syndrome with which it fails when a message would use it.
    pub fail_recv: (u64, u8),
    /// The number of the completion for which the completion queue has no room: the queue overruns.
    pub overrun_nth: u64,
    /// The delay from setting the faults until the link goes down, and the time that it stays down, both in nanoseconds. Packets are lost
    /// meanwhile, and clients get events.
    pub down_ns: (u64, u64),
    /// The delay from setting the faults until the port's GID moves on by one index of its table, in nanoseconds; 0 means never. Clients get an event.
    pub gid_ns: u64,
    /// The delay from setting the faults until the device is removed from the machine, in nanoseconds; 0 means never. The device then does
    /// nothing more and does not flush. Its queue pairs are in error, and clients get one event.
    pub gone_ns: u64,
    /// Every command takes this long, in nanoseconds: making, changing and destroying queues, registering memory.
    pub commands_ns: u64,
    /// The first command of these kinds hangs: it is answered this much later, in nanoseconds, or when faults are set anew.
    pub hang: (CommandKinds, u64),
    /// Commands of these kinds fail with EIO. The device does not receive them and continues to work.
    pub eio: CommandKinds,
    /// The delay from setting the faults until the device reports `IBV_EVENT_DEVICE_FATAL`, and the time that it continues to work after the
    /// report, both in nanoseconds; 0 and 0 means never. Commands fail with EIO from the report on. Commands that move a queue pair to ERR or RESET
    /// succeed and do nothing, because the kernel's driver answers them without the device.
    pub fatal_ns: (u64, u64),
    /// The delay, in nanoseconds, with which a queue pair that goes to ERR flushes its work requests: after the command has returned.
    pub flush_ns: u64,
}

impl Faults {
    /// Sets faults by `name=value`, separated by commas.
    ///
    /// # Errors
    /// As [`Faults::set`].
    pub fn set_all(&mut self, list: &str) -> Result<()> {
        list.split(',').try_for_each(|fault| self.set(fault))
    }

    /// Sets one fault by `name=value`, as `doorbell softcx run --fault` takes them: `loss`, `lose-arriving`, `duplicate`, `reorder` with a
    /// probability; `delay-us`, `late-writes-us`, `late-packets-us`, `fetch-us`, `seed`, `drop`, `garble`, `overrun` with a number; `refuse`, `send`, `recv` with a number and a
    /// code (`3:0x12`); `down-ms` and `fatal-ms` with two times (`100+50`), `gone-ms`, `gid-ms`, `commands-us` and `flush-us` with one; `eio` with kinds of
    /// commands (`error+reset`), `hang` with these and a time in milliseconds (`reset:5000`).
    ///
    /// # Errors
    /// [`Error::Malformed`] for an unknown name, or an invalid value.
    pub fn set(&mut self, fault: &str) -> Result<()> {
        let bad = || Error::Malformed {
            what: "fault",
            reason: format!(
                "`{fault}`: there are loss, lose-arriving, duplicate, reorder (=0.1), delay-us, late-writes-us, late-packets-us, fetch-us, seed, drop, garble, overrun (=3), refuse, send, \
                 recv (=3:0x12), down-ms, fatal-ms (=100+50), gone-ms, gid-ms (=100), commands-us, flush-us (=2000), eio (=error+reset) and hang \
                 (=reset:5000)"
            ),
        };
        let (name, value) = fault.split_once('=').ok_or_else(bad)?;
        let share = || {
            let share = value.parse().ok();
            share
                .filter(|share| (0.0..=1.0).contains(share))
                .ok_or_else(bad)
        };
        let number = |text: &str| text.parse::<u64>().map_err(|_| bad());
        let milliseconds = |text: &str| number(text).map(|ms| ms.saturating_mul(1_000_000));
        let numbered = || -> Result<(u64, u8)> {
            let (nth, code) = value.split_once(':').ok_or_else(bad)?;
            let code = match code.strip_prefix("0x") {
                Some(code) => u8::from_str_radix(code, 16),
                None => code.parse(),
            };
            Ok((number(nth)?, code.map_err(|_| bad())?))
        };
        match name {
            "loss" => self.loss = share()?,
            "lose-arriving" => self.arrival_loss = share()?,
            "duplicate" => self.duplicate = share()?,
            "reorder" => self.reorder = share()?,
            "delay-us" => self.delay_ns = number(value)?.saturating_mul(1000),
            "late-writes-us" => self.late_writes_ns = number(value)?.saturating_mul(1000),
            "late-packets-us" => self.late_packets_ns = number(value)?.saturating_mul(1000),
            "fetch-us" => self.fetch_ns = Some(number(value)?.saturating_mul(1000)),
            "seed" => self.seed = number(value)?,
            "drop" => self.drop_nth = number(value)?,
            "garble" => self.garble_nth = number(value)?,
            "overrun" => self.overrun_nth = number(value)?,
            "refuse" => self.refuse = numbered()?,
            "send" => self.fail_send = numbered()?,
            "recv" => self.fail_recv = numbered()?,
            "down-ms" | "fatal-ms" => {
                let (after, time) = value.split_once('+').ok_or_else(bad)?;
                let times = (milliseconds(after)?, milliseconds(time)?);
                if name == "down-ms" {
                    self.down_ns = times;
                } else {
                    self.fatal_ns = times;
                }
            }
            "gone-ms" => self.gone_ns = milliseconds(value)?,
            "gid-ms" => self.gid_ns = milliseconds(value)?,
            "commands-us" => self.commands_ns = number(value)?.saturating_mul(1000),
            "flush-us" => self.flush_ns = number(value)?.saturating_mul(1000),
            "eio" => self.eio = CommandKinds::parse(value).ok_or_else(bad)?,
            "hang" => {
                let (kinds, time) = value.split_once(':').ok_or_else(bad)?;
                let kinds = CommandKinds::parse(kinds).ok_or_else(bad)?;
                self.hang = (kinds, milliseconds(time)?);
            }
            _ => return Err(bad()),
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::commands::CommandKind;
    use super::*;

    #[test]
    fn faults_are_set_by_name() {
        let mut faults = Faults::default();
        for fault in [
            "loss=0.25",
            "lose-arriving=0.5",
            "duplicate=1",
            "reorder=0",
            "delay-us=7",
            "late-writes-us=8",
            "late-packets-us=15",
            "fetch-us=16",
            "seed=9",
            "drop=1",
            "garble=2",
            "overrun=3",
            "refuse=4:0x62",
            "send=5:18",
            "recv=6:0x04",
            "down-ms=100+50",
            "gone-ms=20",
            "gid-ms=17",
            "commands-us=10",
            "hang=reset:11",
            "eio=error+reset",
            "fatal-ms=12+13",
            "flush-us=14",
        ] {
            faults.set(fault).unwrap();
        }
        let expected = Faults {
            loss: 0.25,
            arrival_loss: 0.5,
            duplicate: 1.0,
            reorder: 0.0,
            delay_ns: 7000,
            late_writes_ns: 8000,
            late_packets_ns: 15_000,
            fetch_ns: Some(16_000),
            seed: 9,
            drop_nth: 1,
            refuse: (4, 0x62),
            garble_nth: 2,
            fail_send: (5, 0x12),
            fail_recv: (6, 4),
            overrun_nth: 3,
            down_ns: (100_000_000, 50_000_000),
            gone_ns: 20_000_000,
            gid_ns: 17_000_000,
            commands_ns: 10_000,
            hang: (CommandKinds::of(&[CommandKind::Reset]), 11_000_000),
            eio: CommandKinds::of(&[CommandKind::Error, CommandKind::Reset]),
            fatal_ns: (12_000_000, 13_000_000),
            flush_ns: 14_000,
        };
        assert_eq!(faults, expected);
        for bad in [
            "",
            "loss",
            "loss=2",
            "loss=NaN",
            "lose-arriving=-0.1",
            "drop=-1",
            "send=3",
            "send=1:0x100",
            "down-ms=5",
            "hang=reset",
            "hang=nothing:1",
            "eio=",
            "fatal-ms=1",
            "x=1",
        ] {
            assert!(faults.set(bad).is_err(), "{bad}");
        }
        assert_eq!(faults, expected);
    }
}
