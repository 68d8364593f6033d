//! What happens in the pipeline, for somebody who watches it as it happens.

use std::sync::Arc;

use crate::{
    event::{ProcessKey, Rid},
    request::{RequestKey, tracker::Change},
    sink::audit::RemediationStep,
    verdict::{ServerIdentity, Verdict},
};

/// One thing that happened.
#[derive(Clone, Debug)]
pub enum Notice {
    /// A server's marker has a probe.
    Attached(Arc<ServerIdentity>),
    /// A server is gone, or its probe is.
    Detached(ProcessKey),
    /// A request went a step.
    Step {
        /// Which and what.
        change: Box<Change>,
        /// Its id, where known.
        rid: Option<Rid>,
    },
    /// An alert changed its state.
    Verdict(Arc<Verdict>),
    /// A scheduler reported another length of its inflight queue.
    QueueLength {
        /// Which scheduler.
        process: ProcessKey,
        /// The length.
        length: u32,
    },
    /// Something was decided or done about a stuck request.
    Remediation {
        /// Which.
        request: RequestKey,
        /// What.
        step: RemediationStep,
    },
}
