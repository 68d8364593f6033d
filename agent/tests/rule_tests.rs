//! `dislodge rules test`: the tests of the rules that come with the agent pass, and what is wrong is told.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use dislodge::{
    core::{Effects, Input, Pace},
    event::{Backend, Body, Event, ProcessKey, Room, clock::Monotonic, native::Engine},
    problem::Problem,
    record::{flight::Flight, recorder::Span},
    request::{ResyncReason, tracker::Limits},
    rule::{
        RuleSet,
        load::{self, Source, load},
        test::{RunError, files, load_file, run},
    },
};
use proptest::prelude::*;

const RULES: &str = "rules:
  - {name: Waits, when: inflight_seconds > 5.0, for: 10s, severity: info}
  - {name: Other, when: 'cause == \"Parked\"', severity: info}
";

fn rules() -> RuleSet {
    load(&[Source { file: "r.yaml", text: RULES }]).unwrap()
}

/// A folder with a rule set and a file of tests.
fn folder(tests: &str) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir(folder.path().join("rules")).unwrap();
    fs::write(folder.path().join("rules/r.yaml"), RULES).unwrap();
    let file = folder.path().join("t.yaml");
    fs::write(&file, tests).unwrap();
    (folder, file)
}

/// What the command says, and its exit status.
fn dislodge(arguments: &[&str], folder: &Path) -> (String, Option<i32>) {
    let arguments = ["rules", "test"].iter().chain(arguments);
    let output = Command::new(env!("CARGO_BIN_EXE_dislodge")).args(arguments).current_dir(folder).output().unwrap();
    let text = [output.stdout, output.stderr].concat();
    (String::from_utf8(text).unwrap(), output.status.code())
}

fn complaints(tests: &str) -> Vec<String> {
    let (_folder, file) = folder(tests);
    let name = file.display().to_string();
    let problems = load_file(&file, &rules()).unwrap_err();
    problems.iter().map(|problem| problem.to_string().replace(&name, "t.yaml")).collect()
}

#[test]
fn the_rules_that_come_with_the_agent_pass_their_tests_and_each_has_one() {
    let repository = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
    let (said, status) = dislodge(&["rules/tests"], repository);
    assert_eq!(status, Some(0), "{said}");
    assert_eq!(said.matches("SUCCESS").count(), files(&repository.join("rules/tests")).unwrap().len(), "{said}");
}

#[test]
fn each_default_rule_has_a_test_that_fails_without_it() {
    let repository = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
    let text = fs::read_to_string(repository.join("rules/default.yaml")).unwrap();
    for (_, rule) in load::defaults().unwrap().iter() {
        let off = format!("  - name: {}\n    when: |\n      false && ", rule.name);
        let without = text.replace(&format!("  - name: {}\n    when: |\n      ", rule.name), &off);
        assert_ne!(without, text, "{}", rule.name);
        let mutated = || load(&[Source { file: "r.yaml", text: &without }]);
        let rules = mutated().unwrap();
        let tests = files(&repository.join("rules/tests")).unwrap();
        let tests = tests.iter().flat_map(|file| load_file(file, &rules).unwrap());
        let fails = tests.filter(|test| !run(test, mutated).unwrap().is_empty()).count();
        assert!(fails > 0, "{}", rule.name);
    }
}

const GOOD: &str = "tests:
  - name: a request that waits
    events:
      - {at: 0s, what: open, room: 77, sender: 1}
      - {at: 1s, what: send, sender: 1}
      - {at: 1s, what: enter, sender: 1, rid: cmpl-1}
      - {at: 30s, what: leave, sender: 1, reason: success}
    expect:
      - {at: 6s, alerts: []}
      - at: 16s
        alerts: [{rule: Waits, state: pending, room: 77}]
      - at: 17s
        alerts: [{rule: Waits, rid: cmpl-1}]
      - {at: 30s, alerts: []}
";

#[test]
fn a_test_that_passes_succeeds_and_a_rule_without_one_fails_unless_that_is_allowed() {
    let (folder, _) = folder(GOOD);
    let (said, status) = dislodge(&["t.yaml", "--rules", "rules"], folder.path());
    let untested = "no test expects these rules to fire: Other\n";
    assert!(said.contains("Testing rules: t.yaml\n  SUCCESS (1 tests)\n"), "{said}");
    assert_eq!((said.ends_with(&format!("FAILED: {untested}")), status), (true, Some(1)), "{said}");
    let (said, status) = dislodge(&["t.yaml", "--rules", "rules", "--allow-untested"], folder.path());
    assert_eq!((said.ends_with(&format!("Untested: {untested}")), status), (true, Some(0)), "{said}");
}

#[test]
fn a_test_that_fails_says_what_was_expected_and_what_there_was() {
    let tests = GOOD.replace("at: 16s", "at: 15s").replace("at: 6s, alerts: []", "at: 6s, alerts: [{rule: Other}]");
    let (folder, _) = folder(&tests.replace("at: 17s", "at: 16s").replace("rid: cmpl-1}]", "rid: cmpl-2}]"));
    let (said, status) = dislodge(&["t.yaml", "--rules", "rules", "--allow-untested"], folder.path());
    let expected = "Testing rules: t.yaml
  FAILED:
    a request that waits, time: 6 s (t.yaml:9)
      - Other firing (expected)

    a request that waits, time: 16 s (t.yaml:12)
      - Waits firing, rid cmpl-2 (expected)
      + Waits pending, room 77, rid cmpl-1 (got)

";
    assert_eq!((said.as_str(), status), (expected, Some(1)));
}

#[test]
fn an_alert_that_is_not_expected_is_a_failure_too() {
    let (_folder, file) = folder(&GOOD.replace("alerts: [{rule: Waits, state: pending, room: 77}]", "alerts: []"));
    let tests = load_file(&file, &rules()).unwrap();
    let mismatches = run(&tests[0], || Ok(rules())).unwrap();
    assert_eq!(mismatches.len(), 1);
    assert_eq!((mismatches[0].at, mismatches[0].line), (Duration::from_secs(16), 10));
    assert_eq!(mismatches[0].unexpected[0].to_string(), "Waits pending, room 77, rid cmpl-1");
}

#[test]
fn every_problem_of_a_file_is_told_with_its_place() {
    let found = complaints(
        "tests:
  - name: one
    events:
      - {at: 0s, what: open, room: 77, sender: 1}
      - {at: soon, what: opens, room: 77}
      - {at: 1s, what: open, room: x, sender: 1}
      - {at: 2s, what: phase, sender: 2, to: Success}
      - {at: 2s, what: phase, sender: 1, to: Sucess}
      - {at: 2s, what: abort, sender: 1, room: 7}
      - {at: 1s, what: paused}
      - {at: 3s, what: leave, reason: success}
      - {at: 3s, sender: 1}
      - {what: resumed}
      - {at: 3s, what: paused, sendr: 1}
    interval: 0s
    server: {tp: 0, sglan: x}
    expect:
      - {at: 5s, alerts: [{rule: Wait}, {state: fires}]}
      - {alerts: []}
      - {at: 4s}
  - recording: x
    events: []
  - name: three
    recording: y
    interval: 1s
    expect: []
",
    );
    let expected = [
        "t.yaml:5:14: `soon` is not a duration",
        "t.yaml:5:26: `opens` is nothing that happens; did you mean `open`?",
        "t.yaml:6:36: `x` is no number that `room` can be",
        "t.yaml:7:39: sender 2 was not opened before",
        "t.yaml:8:46: `Sucess` is no status; did you mean `Success`?",
        "t.yaml:9:48: `abort` has no `room`",
        "t.yaml:10:9: is before the event above it",
        "t.yaml:11:9: `leave` needs `sender`",
        "t.yaml:12:9: an event needs `what`",
        "t.yaml:13:9: needs `at`",
        "t.yaml:14:32: unknown key `sendr` in `events`; did you mean `sender`?",
        "t.yaml:15:15: `0s` is too short",
        "t.yaml:16:18: `0` is no number that `tp` can be",
        "t.yaml:16:21: unknown key `sglan` in `server`; did you mean `sglang`?",
        "t.yaml:18:34: there is no rule `Wait`; did you mean `Waits`?",
        "t.yaml:18:41: an alert needs `rule`",
        "t.yaml:18:49: `fires` is no state",
        "t.yaml:19:9: needs `at`",
        "t.yaml:20:9: needs `alerts`; write `alerts: []`",
        "t.yaml:20:9: is before the time above it",
        "t.yaml:21:5: a test needs `name`",
        "t.yaml:21:5: a test needs `expect`",
        "t.yaml:21:5: a test needs either `recording` or `events`",
        "t.yaml:23:5: a test needs `expect`",
        "t.yaml:24:16: a recording has its own",
    ];
    for expected in expected {
        assert!(
            found.iter().any(|found| found.starts_with(expected)),
            "{expected} is missing in\n{}",
            found.join("\n")
        );
    }
    assert_eq!(found.len(), expected.len(), "{}", found.join("\n"));
}

#[test]
fn a_file_that_is_no_test_is_wrong_input() {
    for text in ["tests: []", "tests: 5", "rules: []", "- a", "tests:\n\t- a"] {
        assert!(!complaints(text).is_empty(), "{text}");
        let (folder, _) = folder(text);
        let (said, status) = dislodge(&["t.yaml"], folder.path());
        assert!(status == Some(2) && said.starts_with("t.yaml:"), "{text}: {said}");
    }
    let (folder, _) = folder(GOOD);
    let (said, status) = dislodge(&["nowhere.yaml", "rules"], folder.path());
    assert_eq!(status, Some(2));
    assert!(said.contains("nowhere.yaml: cannot be read"), "{said}");
}

/// A recording of a request that enters the queue of its server at 101 and is looked at each second up to 130.
fn recording(path: &Path) {
    const SECOND: u64 = 1_000_000_000;
    let limits = Limits { requests: 10, transfers: 10 };
    let span = Span { time: Duration::from_secs(600), bytes: 1 << 20 };
    let mut flight = Flight::new(rules(), limits, "node", Some(span), Monotonic(0));
    let mut tell = |input| flight.apply(input, &mut Effects::default());
    let process = ProcessKey { pid: 7, start: 1 };
    let at = Monotonic(100 * SECOND);
    tell(Input::Attach { process, identity: Box::default(), clock_offset: 0 });
    tell(Input::Watch { process, engine: Some(Engine::Nixl), at });
    tell(Input::Asked { process, epoch: 1, why: ResyncReason::Attached, at });
    for second in 100..=130 {
        let now = Monotonic(second * SECOND);
        let mut see =
            |body| tell(Input::Event(Event { pid: 7, tid: 7, at: now, sequence: 1, detail_lost: false, body }));
        let (room, sender) = (Room::Number(77), 1);
        match second {
            100 => see(Body::Open { room, sender, backend: Backend::Nixl }),
            101 => see(Body::Enter { room, sender, rid: None, queue_length: 1 }),
            _ => {}
        }
        tell(Input::Tick { now, pace: Pace::As(None) });
    }
    flight.recording().unwrap().write(&mut fs::File::create(path).unwrap()).unwrap();
}

#[test]
fn a_recording_is_replayed_up_to_each_time() {
    let tests = "tests:
  - name: what was recorded
    recording: x.dislodge
    expect:
      - {at: 6s, alerts: []}
      - {at: 7s, alerts: [{rule: Waits, state: pending, room: 77}]}
      - {at: 17s, alerts: [{rule: Waits, room: 77}]}
";
    let (folder, file) = folder(tests);
    recording(&folder.path().join("x.dislodge"));
    let loaded = load_file(&file, &rules()).unwrap();
    assert_eq!(run(&loaded[0], || Ok(rules())).unwrap(), []);

    fs::write(&file, tests.replace("at: 17s", "at: 31s")).unwrap();
    let loaded = load_file(&file, &rules()).unwrap();
    assert!(matches!(run(&loaded[0], || Ok(rules())), Err(RunError::Ends { length, .. }) if length.as_secs() == 30));
    fs::write(folder.path().join("x.dislodge"), "nonsense").unwrap();
    let (said, status) = dislodge(&["t.yaml", "--rules", "rules", "--allow-untested"], folder.path());
    assert_eq!(status, Some(1), "{said}");
    assert!(said.contains("    what was recorded: x.dislodge: "), "{said}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn no_text_makes_loading_panic(text in "\\PC*|[ \\n:{}\\[\\]|>'\"&*!#a-z0-9-]*") {
        let (_folder, file) = folder(&text);
        let _ = load_file(&file, &rules());
    }

    #[test]
    fn no_event_makes_a_test_panic(events in proptest::collection::vec((
        0..30_u32,
        prop::sample::select(vec![
            "open, room: 7, sender: 1", "open, room: 7, sender: 1, rank: 1", "enter, sender: 1, rank: 1", "leave, sender: 1, reason: failed, rank: 1", "open, room: 18446744073709551615, sender: 18446744073709551615", "open, room: 7, sender: 2, backend: fake",
            "close, sender: 1", "phase, sender: 1, to: none", "phase, sender: 1, to: Failed", "abort, sender: 1", "update, room: 7, from: Failed, to: Success",
            "send, sender: 1, pages: 4294967295, last: true", "clear, sender: 1", "failure, sender: 1", "enter, sender: 1, rid: ''", "leave, sender: 1, reason: removed",
            "peer_abort, room: 7", "chunk, room: 7, step: begun, queued: 65535, thread: 0", "post, handle: 1, room: 7", "transfer, handle: 1, status: failed, code: -2147483648",
            "endpoint_error, code: -128", "completion_error, code: 4294967295", "paused", "resumed", "loop_stops", "loop_turns", "marks_lost", "transfers_lost", "exit",
            "other_end, room: 7, state: lives", "other_end, room: 7, state: process_ended", "other_end, room: 7, state: failed",
        ]),
    ), 0..20)) {
        let mut events = events;
        events.sort_by_key(|(at, _)| *at);
        let opened: String = [(1, 0), (2, 0), (1, 1)]
            .map(|(sender, rank)| format!("      - {{at: 0s, rank: {rank}, what: open, room: 7, sender: {sender}}}\n"))
            .concat();
        let events: String = events.iter().map(|(at, what)| format!("      - {{at: {at}s, what: {what}}}\n")).collect();
        let (_folder, file) = folder(&format!("tests:\n  - name: x\n    server: {{tp: 2}}\n    events:\n{opened}{events}      - {{at: 30s, what: paused}}\n    expect: [{{at: 31s, alerts: []}}]\n"));
        let loaded: Result<_, Vec<Problem>> = load_file(&file, &rules());
        for test in loaded.unwrap() {
            run(&test, || Ok(rules())).unwrap();
        }
    }
}
