mod outcomes;
mod waits;
