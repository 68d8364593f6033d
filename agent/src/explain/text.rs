//! An answer for people: at most a hundred columns, readable without colour. Whatever a server said is shown so that a
//! terminal does not obey it, nor take it for something else.

use super::{
    answer::{
        Answer, Decision, Diagnosis, Explanation, Instance, Line, Moment, Origin, Remediation, RuleOutlook, RuleState,
        Timeline,
    },
    terminal::{clock, safe, wrapped},
    words::count,
};

/// Columns of a line.
const WIDTH: usize = 100;
/// Columns of what stands before a fact: its time twice, and its source.
const FACT: usize = 42;
/// Columns of what stands before a plain line's text.
const LABEL: usize = 14;

/// How a heading is set off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Style {
    /// Not at all.
    Plain,
    /// In bold, on a terminal.
    Bold,
}

/// The whole answer.
pub fn render(answer: &Answer, style: Style) -> String {
    let mut page = Page { text: String::new(), style };
    page.origin(answer);
    for explanation in &answer.requests {
        page.explanation(explanation);
    }
    if !answer.others.is_empty() {
        page.heading("others that this names; --server PID or --serial N asks for one of them");
        for other in &answer.others {
            page.plain("", &format!("{}, made {}", in_words(other), clock(other.created)));
        }
    }
    page.text
}

/// What to say where nothing is meant.
pub fn not_found(answer: &Answer) -> String {
    let searched = answer.searched;
    let place = match &answer.origin {
        Origin::Recording { file, first: Some(first), last: Some(last), .. } => {
            format!("{file}, from {first:.3} to {last:.3} (as of {:.3})", answer.as_of)
        }
        Origin::Recording { file, .. } => format!("{file}, which has no tick in it"),
        Origin::Agent { node, recorded_since: Some(since), .. } => {
            format!("the agent of {node}: what lives now, and what it recorded since {since:.3}")
        }
        Origin::Agent { node, .. } => format!("the agent of {node}: what lives now"),
    };
    let mut said = format!(
        "no request has room or id `{}`; looked through {} of {}: {place}",
        answer.asked,
        count(searched.requests, "request"),
        count(searched.servers, "server")
    );
    let mut also = |text: String| said = format!("{said}\n{text}");
    if searched.ids_cut > 0 {
        also(format!("{} ids were cut when they were seen: such a request is found by its room", searched.ids_cut));
    }
    also("an id is matched whole; before a request enters the inflight queue only its room is known".to_owned());
    match &answer.origin {
        Origin::Recording { .. } => also("look in an older or newer recording of that node's agent".to_owned()),
        Origin::Agent { recorded_since: Some(_), .. } => {
            also(
                "look in an older recording: --file FILE (`record.folder`), or at the agent of another node".to_owned(),
            );
        }
        Origin::Agent { .. } => {
            also("it may have ended: with `record.folder` set the agent remembers the last minutes".to_owned());
        }
    }
    for note in &answer.notes {
        also(format!("note: {note}"));
    }
    let lines = said.lines().flat_map(|line| wrapped(&safe(line), WIDTH - 2));
    lines.collect::<Vec<_>>().join("\n  ")
}

struct Page {
    text: String,
    style: Style,
}

impl Page {
    fn heading(&mut self, text: &str) {
        let (on, off) = if self.style == Style::Bold { ("\u{1b}[1m", "\u{1b}[0m") } else { ("", "") };
        for line in wrapped(&safe(text), WIDTH) {
            self.text.push_str(&format!("{on}{line}{off}\n"));
        }
    }

    fn section(&mut self, text: &str) {
        self.text.push('\n');
        self.heading(text);
    }

    /// A text beside its label, in as many lines as it takes.
    fn plain(&mut self, label: &str, text: &str) {
        self.hanging(&format!("  {label:<width$}", width = LABEL - 2), text);
    }

    fn hanging(&mut self, prefix: &str, text: &str) {
        let indent = prefix.chars().count();
        for (number, line) in wrapped(&safe(text), WIDTH.saturating_sub(indent)).iter().enumerate() {
            let prefix = if number == 0 { prefix } else { &" ".repeat(indent) };
            self.text.push_str(format!("{prefix}{line}").trim_end());
            self.text.push('\n');
        }
    }

    fn fact(&mut self, at: &Moment, source: &str, text: &str) {
        let prefix = format!("  {:>+11.3} s  {}  {source:<11}  ", at.seconds, clock(at.time));
        self.hanging(&format!("{prefix:<FACT$}"), text);
    }

    fn origin(&mut self, answer: &Answer) {
        let (mut text, as_of) = (String::new(), format!("{:.3}", answer.as_of));
        match &answer.origin {
            Origin::Recording { file, node, .. } => text += &format!("recording {file} of node {node}, as of {as_of}"),
            Origin::Agent { node, version, recorded_since: None } => {
                text += &format!("agent {version} of node {node}, as of {as_of}");
            }
            Origin::Agent { node, version, recorded_since: Some(since) } => {
                text += &format!("agent {version} of node {node}, as of {as_of}; recorded since {since:.3}");
            }
        }
        self.hanging("", &text);
        for note in &answer.notes {
            self.hanging("note: ", note);
        }
    }

    fn explanation(&mut self, explanation: &Explanation) {
        self.text.push('\n');
        self.heading(&in_words(&explanation.instance));
        self.who(explanation);
        match &explanation.timeline {
            Some(timeline) => self.timeline(timeline),
            None => self.plain("timeline", "not recorded; what is known is under the diagnosis"),
        }
        self.diagnosis(&explanation.diagnosis);
        self.rules(&explanation.rules);
        self.remediation(&explanation.remediation, &explanation.diagnosis);
    }

    fn who(&mut self, explanation: &Explanation) {
        let (server, standing) = (&explanation.server, &explanation.standing);
        let parts = [
            Some(format!("pid {}", explanation.instance.pid)),
            Some(server.title.clone()).filter(|title| !title.is_empty()),
            server.sglang.as_ref().map(|release| format!("SGLang {release}")),
            server.role.clone(),
            server.engine.clone(),
            server.ranks.clone(),
            server.container.as_ref().map(|id| format!("container {id}")),
            Some(format!("node {}", server.node)).filter(|_| !server.node.is_empty()),
        ];
        self.plain("server", &parts.into_iter().flatten().collect::<Vec<_>>().join(", "));
        let known = if server.synchronised { "everything that lives is known" } else { "not everything is known" };
        let queue =
            server.queue_length.map_or_else(|| "length not told".to_owned(), |length| count(length.into(), "request"));
        let paused = if server.paused { "; generation is paused" } else { "" };
        self.plain("", &format!("inflight queue: {queue}; {known}; transfers: {}{paused}", server.transfers));
        self.plain(
            "sender",
            &format!(
                "serial {}, {}, made {}, {:.1} s old",
                explanation.instance.serial,
                standing.backend,
                clock(explanation.instance.created),
                standing.age_seconds
            ),
        );
        let queue = match (&standing.ended, &standing.entered) {
            (Some(ended), _) => format!("{} at {}", ended.how, relative(&ended.at)),
            (None, Some(entered)) => format!("in the inflight queue since {}", relative(entered)),
            (None, None) if standing.queue == "none" => "in no queue".to_owned(),
            (None, None) => format!("in the {} queue", standing.queue),
        };
        let (phase, since) = (&standing.phase, relative(&standing.phase_since));
        let sent =
            format!("{}, {} sent", count(standing.sent_chunks.into(), "chunk"), count(standing.sent_pages, "page"));
        self.plain("state", &format!("{queue}; poll() {phase} since {since}; {sent}"));
        if !standing.room_shared_with.is_empty() {
            let others: Vec<String> = standing.room_shared_with.iter().map(u64::to_string).collect();
            self.plain("room", &format!("shared with sender {}, which lives", others.join(", ")));
        }
    }

    fn timeline(&mut self, timeline: &Timeline) {
        self.section("what happened");
        for line in &timeline.lines {
            self.fact(&line.at, &line.source, &repeated(line));
        }
        if timeline.left_out > 0 {
            self.plain("", &format!("({} in the middle left out)", count(timeline.left_out, "thing")));
        }
        let passes = timeline.passes;
        if let (Some(least), Some(most), Some(last)) = (passes.queue_least, passes.queue_most, passes.last) {
            let queue = if least == most { least.to_string() } else { format!("{least} to {most}") };
            self.plain(
                "passes",
                &format!(
                    "told {}, the last one at {}, {:.1} s apart at most; inflight queue {queue}",
                    count(passes.count, "time"),
                    relative(&last),
                    passes.longest_gap_seconds
                ),
            );
        }
    }

    fn diagnosis(&mut self, diagnosis: &Diagnosis) {
        let Diagnosis { cause, quiescence, confidence, .. } = diagnosis;
        let past = if diagnosis.is_past { " (said of it last, before it ended)" } else { "" };
        self.section(&format!("why: {cause}, transfer {quiescence}, confidence {confidence}{past}"));
        self.plain("means", &diagnosis.meaning);
        self.plain("to do", &diagnosis.advice);
        for doubt in &diagnosis.doubts {
            self.plain("doubt", doubt);
        }
        for evidence in &diagnosis.evidence {
            self.fact(&evidence.at, &evidence.source, &evidence.text);
        }
    }

    fn rules(&mut self, rules: &[RuleOutlook]) {
        self.section("rules");
        if rules.is_empty() {
            return self.plain("", "it has ended: no rule is about it");
        }
        for rule in rules {
            let RuleOutlook { rule: name, severity, action, .. } = rule;
            let text = match &rule.state {
                RuleState::Firing { since, fired } => {
                    format!("fires since {} (matches since {})", relative(fired), relative(since))
                }
                RuleState::Pending { since, fires } => {
                    format!("pending since {}, fires at {}", relative(since), moment(fires))
                }
                RuleState::Later { matches, fires: Some(fires) } => {
                    format!("if nothing changes it matches at {}, and fires at {}", relative(matches), moment(fires))
                }
                RuleState::Later { matches, fires: None } => {
                    format!("if nothing changes it matches at {}, not for long enough to fire", relative(matches))
                }
                RuleState::No { .. } => continue,
            };
            self.hanging(&format!("  {:<18} ", safe(name)), &format!("{text}; {severity}, action {action}"));
        }
        for (because, names) in by_reason(rules) {
            self.plain("no match", &format!("{because}: {}", names.join(", ")));
        }
    }

    fn remediation(&mut self, remediation: &Remediation, diagnosis: &Diagnosis) {
        let mode = remediation.mode.as_deref().unwrap_or("not known");
        self.section(&format!(
            "what would be done (the agent's mode: {mode}; the rules allow: {})",
            remediation.action
        ));
        let flag = remediation.flag.as_deref().unwrap_or("the flag that its release has");
        let what = format!(
            "set {flag} on the sender, on the scheduler's thread, where the hook checks again; effective once poll() \
             returned Failed and it left the queue"
        );
        match remediation.decision {
            Decision::Refused => {}
            Decision::Waits => {
                self.plain("waits", &format!("no alert fires yet; then every guard would allow it: {what}"))
            }
            Decision::WouldAct => self.plain("would", &what),
            Decision::Acts => self.plain("act", &what),
        }
        for (number, refused) in remediation.refusals.iter().enumerate() {
            let label = if number == 0 { "refused" } else { "also" };
            self.plain(label, &format!("{}: {}", refused.guard, refused.why));
        }
        if !remediation.assumed.is_empty() && !diagnosis.is_past {
            self.plain("if", &format!("(not in a recording) {}", remediation.assumed.join("; ")));
        }
    }
}

/// Rules that do not match, by what makes them not match.
fn by_reason(rules: &[RuleOutlook]) -> Vec<(String, Vec<String>)> {
    let mut by_reason: Vec<(String, Vec<String>)> = Vec::new();
    for rule in rules {
        let RuleState::No { because } = &rule.state else { continue };
        // One comparison that is false is enough, and the cause is what most rules begin with.
        let cause = because.iter().find(|reason| reason.starts_with("cause is ")).cloned();
        let reason = cause.unwrap_or_else(|| because.join("; "));
        match by_reason.iter_mut().find(|(other, _)| *other == reason) {
            Some((_, names)) => names.push(rule.rule.clone()),
            None => by_reason.push((reason, vec![rule.rule.clone()])),
        }
    }
    by_reason
}

fn in_words(instance: &Instance) -> String {
    let rid = match &instance.rid {
        Some(rid) if rid.truncated => format!(", request {}\u{2026} (cut)", rid.text),
        Some(rid) => format!(", request {}", rid.text),
        None => ", request id not known".to_owned(),
    };
    format!("room {}{rid}, sender {} of pid {}", instance.room, instance.serial, instance.pid)
}

fn repeated(line: &Line) -> String {
    match &line.until {
        Some(until) => format!("{} (\u{d7}{}, until {})", line.text, line.count, relative(until)),
        None => line.text.clone(),
    }
}

fn relative(at: &Moment) -> String {
    format!("{:+.3} s", at.seconds)
}

fn moment(at: &Moment) -> String {
    format!("{} ({})", relative(at), clock(at.time))
}
