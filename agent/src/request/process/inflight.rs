//! Who enters and who leaves a prefill's inflight queue, applied.

use super::{super::tracker::Step, Applying, Process};
use crate::event::{LeaveReason, Rid};

impl Process {
    pub(super) fn enter(&mut self, serial: u64, rid: Option<&Rid>, applying: &mut Applying<'_>) {
        let at = applying.at;
        let Some(request) = self.request(serial, applying) else { return };
        request.rid = rid.cloned().or(request.rid.take());
        if request.entered.is_none() {
            request.entered = Some(at);
            self.inflight = self.inflight.saturating_add(1);
            self.changed(serial, Step::Entered, applying);
        }
    }

    pub(super) fn leave(&mut self, serial: u64, reason: LeaveReason, applying: &mut Applying<'_>) {
        match reason {
            LeaveReason::Success | LeaveReason::Failed => self.forget(serial, Some(reason), applying),
            // The sender may live on: a request that is put back into a waiting queue keeps it.
            LeaveReason::Removed => {
                let Some(request) = self.request(serial, applying) else { return };
                if request.failed.is_some() {
                    // Another rank's poll failed it: polls are MIN-reduced, and this one's own did not say so.
                    self.forget(serial, Some(LeaveReason::Failed), applying);
                } else if request.entered.take().is_some() {
                    self.inflight = self.inflight.saturating_sub(1);
                    self.changed(serial, Step::Left(reason), applying);
                }
            }
        }
    }
}
