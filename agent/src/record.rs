//! Recordings: what the core was told, kept so that it can be told again.
//!
//! [`recorder`] keeps the last minutes in memory, [`flight`] makes sure that it is told everything that the core is told,
//! [`folder`] writes dumps; [`reader`] reads them, whatever is in them, [`replay`] tells a core what is in one, and
//! [`anonymize`] takes names out. The format is in `docs/recording.md`.

pub mod anonymize;
pub mod codec;
pub mod flight;
pub mod folder;
pub mod format;
pub mod reader;
pub mod recorder;
pub mod replay;
mod values;
