//! `dislodge explain` on recordings of simulated servers: what it says is what happened, whatever is asked and whatever
//! stands in names.
#![expect(clippy::unwrap_used, clippy::panic, reason = "a test that cannot go on fails")]

use std::{
    path::Path,
    process::{Command, Output},
};

use dislodge::{
    core::Input,
    diagnose::Cause,
    event::{Backend, Body, Event, Phase, ProcessKey, Rid, Room, clock::Monotonic},
    explain::{
        answer::{Answer, Decision, Explanation, RuleState},
        recording::explain,
        text::{Style, not_found, render},
        wanted::Wanted,
    },
    record::{anonymize::anonymize, reader::Reader, replay::Replay},
    rule::load::defaults,
    simulate::{Family, Settings, recording, simulate, truth::Truth},
};
use jiff::{Timestamp, ToSpan as _};

/// A recording of a simulated server, and what is true of its requests.
struct Made {
    file: Vec<u8>,
    truth: Vec<Truth>,
}

impl Made {
    fn of(family: Family, seed: u64, requests: usize, ranks: usize) -> Self {
        let simulation = simulate(&Settings { family, seed, requests, ranks });
        Self { file: file(simulation.inputs), truth: simulation.truth }
    }

    /// The first of these seeds whose stream has a request that is stuck for this cause, and that request.
    fn stuck(family: Family, cause: &str, ranks: usize) -> (Self, Truth) {
        for seed in 0..60 {
            let made = Self::of(family, seed, 3, ranks);
            let is_it = |it: &&Truth| it.why_stuck().is_some_and(|stuck| stuck.cause == cause && stuck.seen);
            if let Some(truth) = made.truth.iter().find(is_it).cloned() {
                return (made, truth);
            }
        }
        panic!("no seed of {family:?} has a request that is stuck for {cause}");
    }

    fn ask(&self, wanted: &Wanted) -> Answer {
        self.ask_at(wanted, None)
    }

    fn ask_at(&self, wanted: &Wanted, until: Option<Timestamp>) -> Answer {
        let replay = || Replay::new(Reader::open(&*self.file).unwrap(), defaults().unwrap());
        explain((replay(), replay()), "made", wanted, until).unwrap()
    }

    /// What is said of one request in the end.
    fn explained(&self, truth: &Truth) -> Explanation {
        let mut answer = self.ask(&this(truth));
        assert_eq!(answer.requests.len(), 1, "{truth:?}");
        answer.requests.remove(0)
    }
}

fn file(inputs: Vec<Input>) -> Vec<u8> {
    let mut file = Vec::new();
    recording(inputs, defaults().unwrap()).write(&mut file).unwrap();
    file
}

fn named(name: &str) -> Wanted {
    Wanted::new(name.to_owned(), None, None)
}

/// This request and no other.
fn this(truth: &Truth) -> Wanted {
    let key = truth.request;
    Wanted::new(truth.room.to_string(), Some(key.process.pid), Some(key.serial))
}

fn texts(explanation: &Explanation) -> Vec<String> {
    let lines = &explanation.timeline.as_ref().unwrap().lines;
    lines.iter().map(|line| format!("{}: {}", line.source, line.text)).collect()
}

/// Where a line that has these words stands.
fn place(lines: &[String], words: &str) -> usize {
    lines.iter().position(|line| line.contains(words)).unwrap_or_else(|| panic!("`{words}` is not in {lines:#?}"))
}

fn state<'a>(explanation: &'a Explanation, rule: &str) -> &'a RuleState {
    &explanation.rules.iter().find(|it| it.rule == rule).unwrap().state
}

fn guards(explanation: &Explanation) -> Vec<&str> {
    explanation.remediation.refusals.iter().map(|refused| refused.guard.as_str()).collect()
}

#[test]
fn a_request_whose_room_another_one_cleared_is_told_from_its_making_to_its_alert() {
    let (made, truth) = Made::stuck(Family::ClearedRoom, "RoomCollision", 1);
    let told = made.explained(&truth);
    let lines = texts(&told);
    let expected = [
        "calls: its sender was made",
        "calls: poll() NotPolled",
        "diagnosis: RoomCollision",
        "rules: alert RoomCollision (critical) is pending",
        "rules: alert RoomCollision (critical) fires",
    ];
    assert!(expected.map(|words| place(&lines, words)).is_sorted(), "{lines:#?}");
    place(&lines, "calls: entered the inflight queue");
    let seconds: Vec<f64> = told.timeline.as_ref().unwrap().lines.iter().map(|line| line.at.seconds).collect();
    assert!(seconds.is_sorted() && seconds[0] == 0.0, "{seconds:?}");
    assert_eq!((&*told.diagnosis.cause, &*told.diagnosis.confidence), ("RoomCollision", "high"));
    let evidence = told.diagnosis.evidence.iter().map(|it| format!("{}: {}", it.source, it.text)).collect::<Vec<_>>();
    place(&evidence, "calls: poll() returns");
    place(&evidence, &format!("cleared room {}", truth.room));
    assert!(guards(&told).is_empty() && told.remediation.decision == Decision::Acts, "{:?}", told.remediation);
    assert_eq!((told.remediation.mode.as_deref(), &*told.remediation.action), (None, "enforce"));
    assert!(told.remediation.assumed.iter().any(|assumed| assumed.contains("control channel")));
    let RuleState::No { because } = state(&told, "Parked") else { panic!("{:?}", told.rules) };
    assert!(because.contains(&"cause is RoomCollision".to_owned()), "{because:?}");
    assert_eq!(told.instance.rid, Some(Rid { text: truth.rid, truncated: false }));
}

#[test]
fn a_rule_fires_when_it_was_said_that_it_would() {
    let (made, truth) = Made::stuck(Family::ParkedPrefill, "Parked", 1);
    let told = made.explained(&truth);
    let RuleState::Firing { since, fired } = state(&told, "Parked") else { panic!("{:?}", told.rules) };
    assert!((fired.seconds - since.seconds - 30.0).abs() < 0.3, "{since:?} {fired:?}");

    let before =
        |at: &dyn Fn(Timestamp) -> Timestamp| made.ask_at(&this(&truth), Some(at(since.time))).requests.remove(0);
    let pending = before(&|since| since + 10.seconds());
    let RuleState::Pending { since: said, fires } = state(&pending, "Parked") else { panic!("{:?}", pending.rules) };
    assert_eq!(said, since);
    assert!((fires.seconds - fired.seconds).abs() < 0.3, "{fires:?} {fired:?}");

    let earlier = before(&|since| since - 10.seconds());
    let RuleState::Later { matches, fires: Some(fires) } = state(&earlier, "Parked") else {
        panic!("{:?}", earlier.rules)
    };
    assert!((matches.seconds - since.seconds).abs() < 1.3 && (fires.seconds - fired.seconds).abs() < 2.3, "{fires:?}");
    assert!(texts(&earlier).len() < texts(&told).len(), "what comes later is not told");
    assert_eq!((guards(&earlier)[0], earlier.remediation.decision), ("cause_not_curable", Decision::Refused));
}

#[test]
fn a_transfer_that_never_ends_is_told_and_every_guard_that_it_offends_is_named() {
    let (made, truth) = Made::stuck(Family::TransferNeverEnds, "TransferStalled", 1);
    let told = made.explained(&truth);
    let lines = texts(&told);
    place(&lines, "transfers: a transfer of the room was posted");
    place(&lines, "diagnosis: TransferStalled, transfer InFlight");
    assert_eq!(guards(&told), ["cause_not_curable", "not_quiescent", "observing"]);
    assert!(told.diagnosis.evidence.iter().any(|it| it.source == "transfers"), "{:?}", told.diagnosis.evidence);
}

#[test]
fn other_ranks_of_the_server_are_told_beside_it() {
    let (made, truth) = Made::stuck(Family::ClearedRoom, "RoomCollision", 2);
    let answer = made.ask(&named(&truth.rid));
    assert_eq!(answer.requests.len(), 2, "one of each rank");
    for told in &answer.requests {
        let lines = texts(told);
        let other = answer.requests.iter().find(|other| other.instance.pid != told.instance.pid).unwrap();
        place(&lines, &format!("ranks: pid {} (TP", other.instance.pid));
        assert!(guards(told).contains(&"tensor_parallel"), "{:?}", guards(told));
    }
}

#[test]
fn what_the_agent_missed_stands_among_what_happened() {
    for seed in 0..60 {
        let made = Made::of(Family::AgentBlind, seed, 3, 1);
        for truth in &made.truth {
            let answer = made.ask(&this(truth));
            let Some(told) = answer.requests.first() else { continue };
            let lines = texts(told);
            if lines.iter().any(|line| line.starts_with("agent: the picture of the server may be wrong: events_lost")) {
                place(&lines, "agent: the hook was asked for everything that lives");
                assert!(answer.notes.iter().any(|note| note.starts_with("events were lost")), "{:?}", answer.notes);
                return;
            }
        }
    }
    panic!("no request of any seed lived while events were lost");
}

#[test]
fn a_request_that_has_ended_is_told_with_its_end() {
    let made = Made::of(Family::LateCompletion, 1, 3, 1);
    let truth = made.truth.iter().find(|truth| truth.ended.is_some() && truth.entered.is_some()).unwrap();
    let told = made.explained(truth);
    let ended = told.standing.ended.as_ref().unwrap();
    assert_eq!(ended.how, "left the inflight queue: success");
    assert!(told.rules.is_empty() && told.diagnosis.is_past);
    assert_eq!(guards(&told), ["terminal"]);
    assert_eq!(told.server.sglang.as_deref().map(|release| release.starts_with("0.")), Some(true), "{:?}", told.server);
    place(&texts(&told), "calls: left the inflight queue: success");
}

#[test]
fn in_every_family_what_is_said_is_what_the_core_says_in_lines_that_fit() {
    for family in Family::ALL {
        for (seed, ranks) in [(1, 1), (4, 2)] {
            let made = Made::of(family, seed, 3, ranks);
            let mut core = None;
            let replay = Replay::new(Reader::open(&*made.file).unwrap(), defaults().unwrap());
            let mut last = Monotonic(0);
            let mut observe = |told: dislodge::record::replay::Told<'_>| {
                if let dislodge::record::replay::Told::Tick(now) = told {
                    last = now;
                }
                true
            };
            core.get_or_insert(replay.run(&mut observe).unwrap().1);
            for truth in &made.truth {
                let answer = made.ask(&this(truth));
                let page = render(&answer, Style::Plain);
                assert!(page.lines().all(|line| line.chars().count() <= 100 && line == line.trim_end()), "{page}");
                let Some(told) = answer.requests.first() else { continue };
                let lines = &told.timeline.as_ref().unwrap().lines;
                assert!(lines.is_sorted_by_key(|line| line.at.time) && lines.len() <= 120, "{page}");
                if let Some((_, diagnosis)) = core.as_ref().unwrap().diagnose(truth.request, last) {
                    assert_eq!(told.diagnosis.cause, diagnosis.cause.name(), "{family:?} {seed}: {page}");
                    assert_eq!(told.diagnosis.evidence.len(), diagnosis.evidence.len());
                }
                for rule in &told.rules {
                    let fires = matches!(rule.state, RuleState::Firing { .. });
                    let is_firing = core
                        .as_ref()
                        .unwrap()
                        .firing()
                        .any(|verdict| verdict.request == truth.request && *verdict.rule == *rule.rule);
                    assert_eq!(fires, is_firing, "{family:?} {seed} {}: {page}", rule.rule);
                }
            }
        }
    }
}

#[test]
fn a_room_that_was_used_again_shows_each_use_the_newest_first_and_names_the_others() {
    let mut inputs = healthy(9, |serial| format!("rid-{serial}"));
    inputs.retain(|input| !matches!(input, Input::Event(Event { body: Body::Close { .. }, .. })));
    let made = Made { file: file(inputs), truth: Vec::new() };
    let answer = made.ask(&named("77"));
    let serials = |answer: &Answer| answer.requests.iter().map(|it| it.instance.serial).collect::<Vec<_>>();
    assert_eq!(serials(&answer), [9, 8, 7, 6]);
    assert_eq!(answer.others.iter().map(|other| other.serial).collect::<Vec<_>>(), [5, 4, 3, 2, 1]);
    assert!(render(&answer, Style::Plain).contains("--serial N"));
    let one = made.ask(&Wanted::new("77".to_owned(), None, Some(2)));
    assert_eq!((serials(&one), one.others.len()), (vec![2], 0));
    assert_eq!(serials(&made.ask(&named("rid-5"))), [5]);
    assert!(made.ask(&Wanted::new("77".to_owned(), Some(8), None)).requests.is_empty());
}

const PROCESS: ProcessKey = ProcessKey { pid: 7, start: 1 };
const SECOND: u64 = 1_000_000_000;

fn event(at: u64, body: Body) -> Input {
    Input::Event(Event { pid: PROCESS.pid, tid: 7, at: Monotonic(at), sequence: 1, detail_lost: false, body })
}

/// So many requests on room 77, one after the other, of a server that a tick looks at.
fn healthy(requests: u64, rid: impl Fn(u64) -> String) -> Vec<Input> {
    let mut inputs = vec![Input::Attach { process: PROCESS, identity: Box::default(), clock_offset: 0 }];
    let room = Room::Number(77);
    for sender in 1..=requests {
        let at = sender * SECOND;
        let rid = Some(Rid { text: rid(sender), truncated: false });
        inputs.push(event(at, Body::Open { room, sender, backend: Backend::Nixl }));
        inputs.push(event(at + 1, Body::Phase { room, sender, old: None, new: Some(Phase::WaitingForInput) }));
        inputs.push(event(at + 2, Body::Enter { room, sender, rid, queue_length: 1 }));
        let pace = dislodge::core::Pace::As(None);
        inputs.push(Input::Tick { now: Monotonic(at + SECOND / 2), pace });
        let reason = dislodge::event::LeaveReason::Success;
        inputs.push(event(at + SECOND * 3 / 4, Body::Leave { room, sender, reason }));
        inputs.push(event(at + SECOND * 4 / 5, Body::Close { room, sender }));
    }
    inputs.push(Input::Tick { now: Monotonic((requests + 1) * SECOND), pace: dislodge::core::Pace::As(None) });
    inputs
}

#[test]
fn hostile_names_are_shown_and_never_obeyed() {
    let hostile = "\u{1b}[2J\u{9b}31m\r\n\u{202e}nothing happened\u{7}\u{430}".to_owned() + &"x".repeat(400);
    let made = Made { file: file(healthy(1, |_| hostile.clone())), truth: Vec::new() };
    let answer = made.ask(&named(&hostile));
    assert_eq!(answer.requests[0].instance.rid.as_ref().unwrap().text, hostile, "tools get it as it is");
    let page = render(&answer, Style::Plain);
    let in_a_line = page.replace('\n', " ");
    assert!(in_a_line.contains("\\u{1b}[2J\\u{9b}31m\\u{d}\\u{a}\\u{202e}nothing happened"), "{page}");
    let is_ours = |c: char| c == '\n' || (' '..='~').contains(&c) || "\u{2192}\u{d7}\u{2026}".contains(c);
    assert!(page.chars().all(is_ours), "{page:?}");
    assert!(page.lines().all(|line| line.chars().count() <= 100), "{page}");
    let unknown = made.ask(&named("\u{1b}[2J"));
    assert!(not_found(&unknown).chars().all(is_ours), "{}", not_found(&unknown));
}

#[test]
fn an_id_that_was_cut_is_not_matched_and_it_is_said_that_there_is_one() {
    let mut inputs = healthy(1, |_| "cmpl-1".to_owned());
    for input in &mut inputs {
        if let Input::Event(Event { body: Body::Enter { rid: Some(rid), .. }, .. }) = input {
            rid.truncated = true;
        }
    }
    let made = Made { file: file(inputs), truth: Vec::new() };
    let answer = made.ask(&named("cmpl-1"));
    assert!(answer.requests.is_empty() && answer.searched.ids_cut == 1);
    assert!(not_found(&answer).contains("1 ids were cut"), "{}", not_found(&answer));
    assert!(render(&made.ask(&named("77")), Style::Plain).contains("request cmpl-1\u{2026} (cut)"));
}

#[test]
fn a_request_to_which_very_much_happens_has_a_timeline_of_bounded_length() {
    let mut inputs = healthy(1, |_| "rid".to_owned());
    let room = Room::Number(77);
    let phases = [Phase::WaitingForInput, Phase::Transferring];
    let more = (0..50_000_u64).map(|step| {
        let (old, new) = (Some(phases[(step % 2) as usize]), Some(phases[((step + 1) % 2) as usize]));
        event(SECOND + 3 + step, Body::Phase { room, sender: 1, old, new })
    });
    let before_the_tick = inputs.len() - 4;
    inputs.splice(before_the_tick..before_the_tick, more);
    let made = Made { file: file(inputs), truth: Vec::new() };
    let told = made.ask(&named("rid")).requests.remove(0);
    let timeline = told.timeline.as_ref().unwrap();
    assert!(timeline.lines.len() <= 120 && timeline.left_out > 49_000, "{}", timeline.left_out);
    let lines = texts(&told);
    assert!(lines[0].contains("its sender was made"), "{lines:#?}");
    place(&lines, "left the inflight queue: success");
}

#[test]
fn without_names_it_is_found_by_the_hashes_that_the_recording_has() {
    let (made, truth) = Made::stuck(Family::ClearedRoom, "RoomCollision", 1);
    let mut file = Vec::new();
    anonymize(Reader::open(&*made.file).unwrap(), &mut file).unwrap();
    let shared = Made { file, truth: Vec::new() };
    let unknown = shared.ask(&this(&truth));
    assert!(unknown.requests.is_empty() && unknown.notes[0].contains("hashed"), "{:?}", unknown.notes);
    let mut hash = None;
    Replay::new(Reader::open(&*shared.file).unwrap(), defaults().unwrap())
        .run(|told| {
            if let dislodge::record::replay::Told::Verdict(verdict) = told
                && verdict.cause == Cause::RoomCollision
            {
                hash = verdict.rid.clone().or(hash.take());
            }
            true
        })
        .unwrap();
    let answer = shared.ask(&named(&hash.unwrap().text));
    assert_eq!(
        (&*answer.requests[0].diagnosis.cause, answer.requests[0].instance.serial),
        ("RoomCollision", truth.request.serial)
    );
}

/// Every path of a value with the type that stands there; what stands in a list is of one kind.
fn paths(value: &serde_json::Value, path: &str, into: &mut std::collections::BTreeSet<String>) {
    use serde_json::Value;
    let kind = match value {
        Value::Null => "null",
        Value::Bool(_) => "bool",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(items) => {
            items.iter().for_each(|item| paths(item, &format!("{path}[]"), into));
            return;
        }
        Value::Object(fields) => {
            fields.iter().for_each(|(key, value)| paths(value, &format!("{path}.{key}"), into));
            return;
        }
    };
    into.insert(format!("{path}: {kind}"));
}

/// Tools read it: a path that goes, or changes its type, breaks them; one that is new does not. `UPDATE=1` writes the file
/// anew.
#[test]
fn the_structure_that_tools_read_stays_as_it_is() {
    let mut found = std::collections::BTreeSet::new();
    for family in Family::ALL {
        let made = Made::of(family, 1, 3, 1 + family as usize % 2);
        for truth in &made.truth {
            paths(&serde_json::to_value(made.ask(&named(&truth.room.to_string()))).unwrap(), "", &mut found);
        }
    }
    let again = Made { file: file(healthy(9, |serial| format!("rid-{serial}"))), truth: Vec::new() };
    paths(&serde_json::to_value(again.ask(&named("77"))).unwrap(), "", &mut found);
    found.retain(|path| !path.ends_with(": null"));
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/explain_schema_1.txt");
    if std::env::var_os("UPDATE").is_some() {
        std::fs::write(&golden, found.iter().map(|path| format!("{path}\n")).collect::<String>()).unwrap();
    }
    let golden = std::fs::read_to_string(&golden).unwrap();
    let gone: Vec<&str> = golden.lines().filter(|path| !found.contains(*path)).collect();
    assert!(golden.lines().count() > 70 && gone.is_empty(), "{gone:#?}");
}

fn dislodge(arguments: &[&str], folder: &Path) -> Output {
    Command::new(env!("CARGO_BIN_EXE_dislodge")).args(arguments).current_dir(folder).output().unwrap()
}

fn said(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn the_command_answers_for_people_and_for_tools_and_its_exit_status_says_whether_it_could() {
    let folder = tempfile::tempdir().unwrap();
    let (made, truth) = Made::stuck(Family::ClearedRoom, "RoomCollision", 1);
    std::fs::write(folder.path().join("made"), &made.file).unwrap();
    let run = |arguments: &[&str]| dislodge(&[&["explain"], arguments].concat(), folder.path());

    let people = run(&[&truth.rid, "--file", "made"]);
    let page = said(&people.stdout);
    assert_eq!(people.status.code(), Some(0), "{}", said(&people.stderr));
    for words in ["what happened", "why: RoomCollision", "rules", "what would be done"] {
        assert!(page.contains(words), "{page}");
    }
    assert!(!page.contains('\u{1b}'), "no colour where nobody sees it: {page}");

    let tools = run(&[&truth.rid, "--file", "made", "-o", "json"]);
    let answer: Answer = serde_json::from_slice(&tools.stdout).unwrap();
    assert_eq!(render(&answer, Style::Plain), page, "the same content");

    let unknown = run(&["4711", "--file", "made", "-o", "json"]);
    assert_eq!(unknown.status.code(), Some(1));
    assert!(said(&unknown.stderr).contains("no request has room or id `4711`; looked through"));
    assert!(serde_json::from_slice::<Answer>(&unknown.stdout).unwrap().requests.is_empty());

    for (wrong, status, words) in [
        (&["1", "--file", "nowhere"][..], 1, "nowhere"),
        (&["1", "--file", "."], 1, "."),
        (&["1", "--agent", "http://127.0.0.1:1"], 1, "is the agent running"),
        (&["1", "--file", "made", "--rules", "nowhere"], 2, "nowhere"),
        (&["1", "--at", "2026-01-31T12:00:00Z"], 2, "--file"),
        (&["1", "--file", "made", "--at", "noon"], 2, "noon"),
        (&["1", "--file", "made", "--agent", "http://a"], 2, "--agent"),
        (&[], 2, "ROOM|RID"),
    ] {
        let refused = run(wrong);
        assert_eq!(refused.status.code(), Some(status), "{wrong:?}: {}", said(&refused.stderr));
        assert!(said(&refused.stderr).contains(words), "{wrong:?}: {}", said(&refused.stderr));
    }
    std::fs::write(folder.path().join("cut"), &made.file[..made.file.len() / 2]).unwrap();
    let cut = run(&[&truth.room.to_string(), "--file", "cut"]);
    assert_eq!(cut.status.code(), Some(0), "{}", said(&cut.stderr));
    assert!(said(&cut.stdout).contains("note: its end is missing"), "{}", said(&cut.stdout));
}
