mod outcomes;
mod wait_outcomes;
mod waits;
