//! Reading the rules again while the agent runs.

use super::Pipeline;
use crate::{
    check,
    core::{Input, Rules},
    event::clock::Monotonic,
    metrics::OutcomeLabel,
};

impl Pipeline {
    /// Takes the rules as they are now, if all of them are sound; opens the audit log again, which may have been rotated.
    pub(super) fn reload(&mut self) {
        let outcome = match check::read_rules(self.config.rules.as_deref()) {
            Ok(rules) => {
                tracing::info!(rules = rules.len(), "rules reloaded");
                self.apply(Input::Rules { rules: Rules::Here(Box::new(rules)), at: Monotonic::now() });
                "loaded"
            }
            Err(problems) => {
                for problem in problems {
                    tracing::error!("{problem}");
                }
                tracing::error!(
                    "the old rules stay: mend the new ones (`dislodge check` names every problem) and reload"
                );
                "refused"
            }
        };
        if let Some(audit) = &mut self.audit
            && let Err(error) = audit.reopen()
        {
            tracing::error!(%error, "the audit log goes on in the old file");
        }
        self.metrics.reloads.get_or_create(&OutcomeLabel { outcome }).inc();
    }
}
