//! What happened to one request, why it waits, what the rules will say and when, and what would be done about it.
//!
//! Pure. [`recording`] goes through a recording with the core beside it and keeps what concerns the request; [`state`],
//! [`outlook`] and [`remediation`] say what a core knows of it at one moment, by the code that diagnoses, evaluates and
//! guards live; [`text`] is for people, the serialised [`answer::Answer`] for tools. Fields may be added to that within a
//! schema; nothing else changes.

pub mod answer;
mod beside;
mod follow;
mod lines;
mod meaning;
pub mod outlook;
pub mod recording;
pub mod remediation;
pub mod state;
mod terminal;
pub mod text;
mod transfers;
pub mod wanted;
mod words;
