//! What would be done about a request: the guards are asked by the code that asks them live, in their order.

use super::{
    answer::{Decision, Refused, Remediation, RuleOutlook, RuleState},
    meaning,
};
use crate::{
    diagnose::Diagnosis,
    remedy::guard::{Context, Refusal, refusals},
    request::tracker::Tracked,
    rule::Mode,
};

/// What the guards are told beside what is known of the request.
#[derive(Clone, Copy, Debug)]
pub enum Surroundings {
    /// A running agent's: its own mode, and everything else that its guards look at.
    Live {
        /// The agent's own mode.
        mode: Mode,
        /// The rest.
        context: Context,
    },
    /// A recording does not have them.
    NotRecorded,
}

/// What a recording does not say, and is taken to allow it.
const NOT_RECORDED: [&str; 6] = [
    "the agent's own mode is enforce",
    "the agent has the hook's control channel",
    "no kill switch is up",
    "the audit log can be written",
    "fewer requests were failed in this minute than are allowed",
    "it was not acted on before the recording begins",
];

/// Asks the guards.
pub fn remediation(
    tracked: &Tracked<'_>,
    diagnosis: &Diagnosis,
    rules: &[RuleOutlook],
    surroundings: &Surroundings,
) -> Remediation {
    let (mode, context, assumed) = match surroundings {
        Surroundings::Live { mode, context } => (Some(*mode), *context, Vec::new()),
        Surroundings::NotRecorded => (None, favourable(), NOT_RECORDED.map(str::to_owned).to_vec()),
    };
    let (action, fires) = allowed(rules);
    let effective = action.min(mode.unwrap_or(Mode::Enforce));
    let context = Context { mode: effective, ..context }.on_room(Some(tracked.room));
    let refused = refusals(tracked.request, tracked.server, diagnosis, &context);
    let flag = tracked.server.hello.as_deref().and_then(|hello| hello.flag);
    Remediation {
        mode: mode.map(|mode| mode.name().to_owned()),
        action: action.name().to_owned(),
        flag: flag.map(|flag| flag.name().to_owned()),
        decision: match effective {
            _ if !refused.is_empty() => Decision::Refused,
            _ if !fires => Decision::Waits,
            Mode::Enforce => Decision::Acts,
            Mode::DryRun | Mode::Observe => Decision::WouldAct,
        },
        refusals: refused
            .into_iter()
            .map(|refusal| Refused { guard: refusal.name().to_owned(), why: meaning::refusal(refusal).to_owned() })
            .collect(),
        assumed,
    }
}

/// Nothing is done about a request that has ended: the first guard says so.
pub(super) fn of_ended() -> Remediation {
    let terminal = Refusal::Terminal;
    Remediation {
        mode: None,
        action: Mode::Observe.name().to_owned(),
        flag: None,
        decision: Decision::Refused,
        refusals: vec![Refused { guard: terminal.name().to_owned(), why: meaning::refusal(terminal).to_owned() }],
        assumed: Vec::new(),
    }
}

fn favourable() -> Context {
    Context {
        mode: Mode::Enforce,
        kill_switch: false,
        audit_available: true,
        actions_left: 1,
        has_control_channel: true,
        acted_before: false,
        senders_on_room: 0,
        abandoned_handles: false,
    }
}

/// The most that the rules allow which fire; else those that are pending, else those that would match. And whether any
/// fires.
fn allowed(rules: &[RuleOutlook]) -> (Mode, bool) {
    let most = |is: fn(&RuleState) -> bool| {
        let of = |rule: &RuleOutlook| Mode::ALL.into_iter().find(|mode| mode.name() == rule.action);
        rules.iter().filter(|rule| is(&rule.state)).filter_map(of).max()
    };
    let firing = most(|state| matches!(state, RuleState::Firing { .. }));
    let next = || {
        most(|state| matches!(state, RuleState::Pending { .. }))
            .or_else(|| most(|state| matches!(state, RuleState::Later { fires: Some(_), .. })))
    };
    (firing.or_else(next).unwrap_or_default(), firing.is_some())
}
