//! Commands of a driver to the device, by the command interface. A card's firmware executes them. They take microseconds to milliseconds. A firmware
//! that hangs does not answer; the kernel's driver then waits for up to a minute.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::client::Errno;
use super::faults::Faults;

/// The kinds of commands that faults distinguish.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum CommandKind {
    /// Makes a queue pair, a completion queue or a shared receive queue.
    Create,
    /// Changes one of these, other than to ERR or RESET.
    Modify,
    /// A queue pair to ERR.
    Error,
    /// A queue pair to RESET.
    Reset,
    /// Destroys what [`CommandKind::Create`] makes.
    Destroy,
    /// Registers memory.
    Register,
    /// Deregisters memory.
    Deregister,
}

const NAMES: [(&str, CommandKind); 7] = [
    ("create", CommandKind::Create),
    ("modify", CommandKind::Modify),
    ("error", CommandKind::Error),
    ("reset", CommandKind::Reset),
    ("destroy", CommandKind::Destroy),
    ("register", CommandKind::Register),
    ("deregister", CommandKind::Deregister),
];

/// A set of kinds of commands; the default is the empty set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CommandKinds(u8);

impl CommandKinds {
    /// The set of these kinds.
    pub fn of(kinds: &[CommandKind]) -> CommandKinds {
        CommandKinds(kinds.iter().fold(0, |bits, kind| bits | 1 << *kind as u8))
    }

    /// The kinds whose names are in `list`, with `+` between them: `error+reset`. `None` for another name.
    pub fn parse(list: &str) -> Option<CommandKinds> {
        let kind_of = |name| NAMES.iter().find(|(known, _)| *known == name);
        list.split('+').try_fold(CommandKinds(0), |kinds, name| {
            kind_of(name).map(|(_, kind)| CommandKinds(kinds.0 | 1 << *kind as u8))
        })
    }

    fn has(self, kind: CommandKind) -> bool {
        self.0 & 1 << kind as u8 != 0
    }
}

/// The effect of a command that is answered with success.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Answer {
    /// The device executes it.
    Executed,
    /// The device has failed. The driver answers success, and the command does not reach the device.
    Pretended,
}

/// How commands are answered. It is not under the device's lock, so that a slow command delays no other work.
#[derive(Debug, Default)]
pub(crate) struct Commands {
    /// Whether anything differs from an immediate answer.
    any: AtomicBool,
    state: Mutex<CommandState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct CommandState {
    faults: Faults,
    /// Counts the settings of faults: those that hang go on when it changes.
    settings: u64,
    /// The command that is to hang has come.
    has_hung: bool,
    device_failed: bool,
}

impl Commands {
    fn lock(&self) -> MutexGuard<'_, CommandState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets what happens to commands from now on. Those that hang are answered.
    pub(crate) fn set_faults(&self, faults: Faults) {
        let mut state = self.lock();
        state.faults = faults;
        state.settings += 1;
        state.has_hung = false;
        let none = CommandKinds::default();
        let any = state.device_failed
            || faults.commands_ns > 0
            || faults.hang.0 != none
            || faults.eio != none;
        self.any.store(any, Ordering::Release);
        drop(state);
        self.changed.notify_all();
    }

    /// The device has failed.
    pub(crate) fn fail_device(&self) {
        self.lock().device_failed = true;
        self.any.store(true, Ordering::Release);
    }

    /// Waits for the time that a command of that kind takes. Returns how it is answered.
    ///
    /// # Errors
    /// EIO, as a kernel answers for a device that has failed, or as a fault has it.
    pub(crate) fn pass(&self, kind: CommandKind) -> Result<Answer, Errno> {
        if !self.any.load(Ordering::Acquire) {
            return Ok(Answer::Executed);
        }
        let mut state = self.lock();
        let mut time_ns = state.faults.commands_ns;
        if state.faults.hang.0.has(kind) && !std::mem::replace(&mut state.has_hung, true) {
            time_ns = time_ns.saturating_add(state.faults.hang.1);
        }
        let (settings, begin) = (state.settings, Instant::now());
        let time = Duration::from_nanos(time_ns);
        while state.settings == settings
            && let Some(left) = time.checked_sub(begin.elapsed())
            && !left.is_zero()
        {
            let waited = self.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        if state.faults.eio.has(kind) {
            return Err(libc::EIO);
        }
        if !state.device_failed {
            return Ok(Answer::Executed);
        }
        // As `mlx5_internal_err_ret_value` in the kernel's `mlx5/core/cmd.c` has it. What is destroyed is destroyed here, because its memory goes.
        match kind {
            CommandKind::Error | CommandKind::Reset => Ok(Answer::Pretended),
            CommandKind::Destroy | CommandKind::Deregister => Ok(Answer::Executed),
            CommandKind::Create | CommandKind::Modify | CommandKind::Register => Err(libc::EIO),
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn with(faults: Faults) -> Commands {
        let commands = Commands::default();
        commands.set_faults(faults);
        commands
    }

    #[test]
    fn kinds_are_read_by_name() {
        let both = CommandKinds::of(&[CommandKind::Error, CommandKind::Reset]);
        assert_eq!(CommandKinds::parse("error+reset"), Some(both));
        assert_eq!(CommandKinds::parse("error+"), None);
        for (name, kind) in NAMES {
            assert_eq!(CommandKinds::parse(name), Some(CommandKinds::of(&[kind])));
        }
    }

    #[test]
    fn a_command_takes_its_time_and_one_of_its_kind_hangs() {
        let commands = with(Faults {
            commands_ns: 3_000_000,
            hang: (CommandKinds::of(&[CommandKind::Reset]), 60_000_000_000),
            ..Faults::default()
        });
        let begin = Instant::now();
        assert_eq!(commands.pass(CommandKind::Error), Ok(Answer::Executed));
        assert!(begin.elapsed() >= Duration::from_millis(3));
        std::thread::scope(|threads| {
            let hung = threads.spawn(|| commands.pass(CommandKind::Reset));
            while !commands.lock().has_hung {
                std::thread::yield_now();
            }
            // The second of its kind does not, and other commands go on.
            assert_eq!(commands.pass(CommandKind::Reset), Ok(Answer::Executed));
            assert!(!hung.is_finished());
            commands.set_faults(Faults::default());
            assert_eq!(hung.join().unwrap(), Ok(Answer::Executed));
        });
        assert!(begin.elapsed() < Duration::from_secs(30));
    }

    #[test]
    fn failed_device_gets_no_command() {
        let commands = with(Faults {
            eio: CommandKinds::of(&[CommandKind::Error]),
            ..Faults::default()
        });
        assert_eq!(commands.pass(CommandKind::Error), Err(libc::EIO));
        assert_eq!(commands.pass(CommandKind::Reset), Ok(Answer::Executed));
        commands.set_faults(Faults::default());
        assert_eq!(commands.pass(CommandKind::Error), Ok(Answer::Executed));
        commands.fail_device();
        assert_eq!(commands.pass(CommandKind::Create), Err(libc::EIO));
        assert_eq!(commands.pass(CommandKind::Reset), Ok(Answer::Pretended));
    }
}
