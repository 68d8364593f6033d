//! Where verdicts go. No sink ever makes its caller wait: [`alertmanager`] delivers from tasks of its own, and
//! [`audit`] writes one line.

pub mod alertmanager;
pub mod audit;
