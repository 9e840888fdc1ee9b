//! A progress bar on stderr, if that is a terminal.

use std::io::IsTerminal;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// A bar of `rows` steps on stderr: stdout has the rows.
pub fn bar(rows: u64) -> ProgressBar {
    let target = if std::io::stderr().is_terminal() {
        ProgressDrawTarget::stderr()
    } else {
        ProgressDrawTarget::hidden()
    };
    // The template is a constant that the test below checks.
    let style = ProgressStyle::with_template(TEMPLATE)
        .unwrap_or_else(|_| ProgressStyle::default_bar())
        .progress_chars("=> ");
    ProgressBar::with_draw_target(Some(rows), target).with_style(style)
}

const TEMPLATE: &str = "[{bar:32}] {pos}/{len} {msg} ({elapsed}, {eta} left)";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn template_is_understood() {
        assert!(ProgressStyle::with_template(TEMPLATE).is_ok());
        let bar = bar(3);
        bar.inc(2);
        assert_eq!((bar.position(), bar.length()), (2, Some(3)));
    }
}
