//! The control path of an endpoint, and why better ones are not available.

use std::fmt;

use crate::region::Control;
use crate::{Error, Result, StateKind};

/// For each path, the result of the check: why it is available, or why not.
type Choice = std::result::Result<String, String>;

/// The control path in force.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct PathReport {
    /// The way.
    pub control: Control,
    /// Why this path was chosen: what makes it available.
    pub reason: String,
    /// Better ones, each with what is missing for it.
    pub better: Vec<(Control, String)>,
}

impl fmt::Display for PathReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({}", self.control, self.reason)?;
        for (control, missing) in &self.better {
            write!(f, "; not {control}: {missing}")?;
        }
        f.write_str(")")
    }
}

impl PathReport {
    /// The path that was asked for, or else the best one that is available.
    ///
    /// # Errors
    /// [`Error::State`], with the reasons, if the path that was asked for is not available, or none is.
    pub(super) fn choose(
        asked: Option<Control>,
        mut try_way: impl FnMut(Control) -> Choice,
    ) -> Result<PathReport> {
        let mut better: Vec<(Control, String)> = Vec::new();
        for control in Control::ALL {
            if asked.is_some_and(|asked| asked > control) {
                better.push((
                    control,
                    format!("{} was asked for", asked.unwrap_or(control)),
                ));
                continue;
            }
            match try_way(control) {
                Ok(reason) => {
                    return Ok(PathReport {
                        control,
                        reason,
                        better,
                    });
                }
                Err(missing) if asked == Some(control) => {
                    return Err(Error::state(
                        StateKind::Unsupported,
                        "control path",
                        format!(
                            "the path {control}, which was asked for, is not available: {missing}"
                        ),
                    ));
                }
                Err(missing) => better.push((control, missing)),
            }
        }
        let reasons: Vec<String> = better
            .iter()
            .map(|(control, missing)| format!("not {control}: {missing}"))
            .collect();
        Err(Error::state(
            StateKind::Unsupported,
            "control path",
            reasons.join("; "),
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn only(possible: &'static [Control]) -> impl FnMut(Control) -> Choice {
        move |control| {
            if possible.contains(&control) {
                Ok(format!("{control} can be"))
            } else {
                Err(format!("no {control} here"))
            }
        }
    }

    #[test]
    fn the_best_that_can_be_is_taken_with_the_reasons_against_better_ones() {
        let all = PathReport::choose(None, only(&Control::ALL)).unwrap();
        assert_eq!(all.to_string(), "direct (direct can be)");
        let slow = PathReport::choose(None, only(&[Control::Sync])).unwrap();
        assert_eq!(
            slow.to_string(),
            "sync (sync can be; not direct: no direct here; not proxy: no proxy here)"
        );
        let none = PathReport::choose(None, only(&[])).unwrap_err().to_string();
        assert!(
            none.contains("no direct here") && none.contains("no sync here"),
            "{none}"
        );
    }

    #[test]
    fn what_is_asked_for_is_taken_or_refused_with_its_reason() {
        let sync = PathReport::choose(Some(Control::Sync), only(&Control::ALL)).unwrap();
        assert_eq!(sync.control, Control::Sync);
        assert_eq!(sync.better.len(), 2);
        assert!(sync.to_string().contains("not proxy: sync was asked for"));
        let error = PathReport::choose(Some(Control::Direct), only(&[Control::Proxy])).unwrap_err();
        assert!(error.to_string().contains("no direct here"), "{error}");
        // A worse one is never taken in its place.
        assert!(PathReport::choose(Some(Control::Proxy), only(&[Control::Sync])).is_err());
    }
}
