//! Which functions of the host a stream does not call: those behind a failure.

/// Where a function was queued.
#[derive(Debug, Clone, Copy)]
pub(super) struct FunctionPlace {
    /// How often the stream's fault had been taken, or the stream aborted.
    period: usize,
    /// Count of the entry before it.
    after: u64,
}

/// What ended a period.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Boundary {
    /// The stream's fault was taken: later failures of work before that are no fault.
    Taken,
    /// The stream was aborted. A panic of the function that runs meanwhile is still a fault.
    Aborted,
}

/// For each period between two of these: the count from which on functions are not called, and what began it.
#[derive(Debug)]
pub(super) struct GivenUpFunctions(Vec<(u64, Boundary)>);

impl Default for GivenUpFunctions {
    fn default() -> GivenUpFunctions {
        GivenUpFunctions(vec![(u64::MAX, Boundary::Taken)])
    }
}

impl GivenUpFunctions {
    /// The place of a function that is queued now, behind the entry with the count `after`.
    pub(super) fn place(&self, after: u64) -> FunctionPlace {
        FunctionPlace {
            period: self.0.len() - 1,
            after,
        }
    }

    /// Whether the function is behind a failure, which may have been taken as the stream's fault meanwhile.
    pub(super) fn is_given_up(&self, place: FunctionPlace) -> bool {
        let since = self.0.get(place.period..);
        // Functions of a stream that has ended are not counted any more, and their places may be gone.
        since.is_none_or(|since| since.iter().any(|(from, _)| *from <= place.after))
    }

    /// Whether the stream's fault was taken after the function was queued.
    pub(super) fn is_forgiven(&self, place: FunctionPlace) -> bool {
        let later = self.0.get(place.period + 1..).unwrap_or_default();
        (later.iter()).any(|(_, begun_by)| *begun_by == Boundary::Taken)
    }

    /// Gives up what is behind an entry, or all with the entry 0. If the failure is forgiven, those that were queued since are called.
    pub(super) fn give_up(&mut self, entry: u64, is_forgiven: bool) {
        let periods = self.0.len() - usize::from(is_forgiven);
        (self.0[..periods].iter_mut()).for_each(|(from, _)| *from = entry.min(*from));
    }

    /// A period ends. With `none` no function is queued now.
    pub(super) fn begin_period(&mut self, begun_by: Boundary, none: bool) {
        if none {
            self.0.clear();
        }
        self.0.push((u64::MAX, begun_by));
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn functions_behind_a_failure_are_given_up_also_when_it_was_forgiven() {
        let mut functions = GivenUpFunctions::default();
        let (before, behind) = (functions.place(3), functions.place(5));
        functions.give_up(4, false);
        functions.begin_period(Boundary::Taken, false);
        let later = functions.place(5);
        assert!(!functions.is_given_up(before) && functions.is_given_up(behind));
        assert!(!functions.is_given_up(later) && functions.is_forgiven(before));
        // Work fails that was queued before the fault was taken.
        functions.give_up(2, true);
        assert!(functions.is_given_up(before) && !functions.is_given_up(later));
        functions.give_up(0, false);
        assert!(functions.is_given_up(later) && !functions.is_forgiven(later));
        functions.begin_period(Boundary::Taken, true);
        assert!(!functions.is_given_up(functions.place(5)));
    }

    #[test]
    fn an_abort_forgives_no_panic_of_a_function_that_runs() {
        let mut functions = GivenUpFunctions::default();
        let running = functions.place(3);
        functions.give_up(0, false);
        functions.begin_period(Boundary::Aborted, false);
        let later = functions.place(3);
        assert!(!functions.is_forgiven(running) && !functions.is_given_up(later));
        functions.begin_period(Boundary::Taken, false);
        assert!(functions.is_forgiven(running) && functions.is_forgiven(later));
    }
}
