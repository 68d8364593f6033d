//! Acting: what may be done, doing it, and checking that it worked.

pub mod control;
pub mod guard;
pub mod ladder;
