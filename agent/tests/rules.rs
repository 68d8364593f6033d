//! Rules from YAML to conditions.
#![expect(clippy::unwrap_used, clippy::panic, reason = "a test that cannot go on fails")]

#[path = "rules/properties.rs"]
mod properties;
#[path = "fixtures/request.rs"]
mod request;

use std::{fmt::Write as _, time::Duration};

use dislodge::{
    diagnose::Cause,
    event::{Backend, Hello, clock::Monotonic},
    problem::Problem,
    request::gauge::{GaugeState, Gauges, ServerGauge},
    rule::{
        Mode, RuleIndex, RuleSet, Severity,
        condition::{self, Condition, Scope},
        evaluate::Evaluator,
        field::{Description, FIELDS, Field, Kind, Value},
        load::{self, Source},
    },
};
use proptest::prelude::*;
use request::{World, at, key};

fn load_text(text: &str) -> Result<RuleSet, Vec<Problem>> {
    load::load(&[Source { file: "r.yaml", text }])
}

fn complaints(text: &str) -> Vec<String> {
    load_text(text).unwrap_err().iter().map(Problem::to_string).collect()
}

fn matches(source: &str, world: &World, now: Monotonic) -> bool {
    let condition = Condition::compile(source).unwrap_or_else(|errors| panic!("{source}: {errors:?}"));
    let root = condition::root();
    world.look(now, |subject| condition.matches(&Scope::of(&root, subject)).unwrap())
}

fn complaint(source: &str) -> String {
    let errors = Condition::compile(source).err().unwrap_or_else(|| panic!("{source} was taken"));
    errors.iter().map(|error| format!("{}:{} {error}", error.line, error.column)).collect::<Vec<_>>().join("\n")
}

// Conditions

#[test]
fn every_field_has_its_value() {
    let mut world = World::healthy();
    world.request.aborted = Some(Box::new(dislodge::request::Aborted { at: at(3.0), passes: 1 }));
    world.room.senders = vec![1, 2];
    world.server.hello = Some(Box::new(Hello {
        sglang: Some("0.5.22".into()),
        tp: Some(2),
        bootstrap_timeout: Some(120.0),
        ..Hello::default()
    }));
    let gauges = Gauges { prefill_inflight: Some(2), ..Gauges::default() };
    let read = GaugeState { gauges, at: at(9.0), since: at(5.0), readings: 2 };
    world.server.gauge = ServerGauge { queue_rests: Some(at(0.0)), read: Some(Box::new(read)) };
    let expected = [
        ("cause", Value::Text("AbortIgnored")),
        ("phase", Value::Text("Transferring")),
        ("role", Value::Text("prefill")),
        ("queue", Value::Text("inflight")),
        ("backend", Value::Text("nixl")),
        ("quiescence", Value::Text("Unknown")),
        ("confidence", Value::Text("high")),
        ("inflight", Value::Flag(true)),
        ("inflight_seconds", Value::Seconds(10.0)),
        ("phase_seconds", Value::Seconds(10.0)),
        ("waiting_seconds", Value::Seconds(10.0)),
        ("abort_seconds", Value::Seconds(7.0)),
        ("sent_chunks", Value::Count(1)),
        ("sent_pages", Value::Count(8)),
        ("room_shared", Value::Flag(true)),
        ("queue_length", Value::Count(1)),
        ("sglang", Value::Text("0.5.22")),
        ("tp", Value::Count(2)),
        ("pp", Value::Count(0)),
        ("cp", Value::Count(0)),
        ("server_bootstrap_timeout_seconds", Value::Seconds(120.0)),
        ("server_waiting_timeout_seconds", Value::Seconds(300.0)),
        ("paused", Value::Flag(false)),
        ("server_gauge", Value::Text("frozen")),
    ];
    assert_eq!(expected.map(|(name, _)| name), FIELDS.each_ref().map(|field| field.name), "a field without a test");
    world.look(at(10.0), |subject| {
        for (name, value) in expected {
            let field = Field::named(name).unwrap();
            assert_eq!(field.value(subject), value, "{name}");
            let values = (field.values)();
            assert!(values.is_empty() || matches!(value, Value::Text(text) if values.contains(&text)), "{name}");
        }
    });
}

/// The table of docs/rules.md.
fn table() -> String {
    let mut table = String::from("| field | type | unit | source | meaning |\n|---|---|---|---|---|\n");
    for field in FIELDS.iter().map(Field::describe) {
        let Description { name, r#type, unit, source, meaning, values } = field;
        let values: Vec<String> = values.iter().map(|value| format!("`{value}`")).collect();
        let values = if values.is_empty() { String::new() } else { format!(": {}", values.join(", ")) };
        writeln!(table, "| `{name}` | {type} | {} | {source} | {meaning}{values} |", unit.unwrap_or("")).unwrap();
    }
    table
}

/// `DISLODGE_WRITE_DOCS=1 cargo test --test rules` writes the table anew.
#[test]
fn the_documentation_has_the_table_of_fields_as_it_is() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/rules.md");
    let text = std::fs::read_to_string(path).unwrap();
    let (before, rest) = text.split_once("<!-- fields -->\n").unwrap();
    let (written, after) = rest.split_once("<!-- end of fields -->\n").unwrap();
    if std::env::var_os("DISLODGE_WRITE_DOCS").is_some() {
        let table = table();
        std::fs::write(path, format!("{before}<!-- fields -->\n{table}<!-- end of fields -->\n{after}")).unwrap();
        return;
    }
    assert_eq!(
        written,
        table(),
        "docs/rules.md is stale; write it anew: DISLODGE_WRITE_DOCS=1 cargo test --test rules"
    );
}

#[test]
fn every_number_has_a_unit_and_nothing_else_has() {
    for field in &FIELDS {
        let is_number = matches!(field.kind, Kind::Count | Kind::Seconds);
        assert_eq!(field.unit.is_some(), is_number, "{}", field.name);
    }
}

#[test]
fn the_fields_are_printed_for_people_and_for_machines() {
    let run = |arguments: &[&str]| {
        let output = std::process::Command::new(env!("CARGO_BIN_EXE_dislodge")).args(arguments).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    let text = run(&["rules", "fields"]);
    let json: serde_json::Value = serde_json::from_str(&run(&["rules", "fields", "-o", "json"])).unwrap();
    assert_eq!(json.as_array().map(Vec::len), Some(FIELDS.len()));
    for (field, json) in FIELDS.iter().zip(json.as_array().unwrap()) {
        let line = text.lines().find(|line| line.split(' ').next() == Some(field.name)).unwrap();
        for part in [field.kind.name(), field.unit.unwrap_or("-"), field.source, field.meaning] {
            assert!(line.contains(part), "{part} is missing in {line}");
        }
        assert_eq!(
            (json["name"].as_str(), json["type"].as_str(), json["unit"].as_str()),
            (Some(field.name), Some(field.kind.name()), field.unit)
        );
        assert_eq!((json["source"].as_str(), json["meaning"].as_str()), (Some(field.source), Some(field.meaning)));
    }
}

#[test]
fn every_closed_field_lists_each_value_that_it_has() {
    for (name, cause) in Cause::ALL.map(|cause| (cause.name(), cause)) {
        let world = World::pinned(cause);
        world.look(at(10.0), |subject| {
            for field in FIELDS.iter().filter(|field| !(field.values)().is_empty()) {
                let Value::Text(text) = field.value(subject) else { panic!("{} is no text", field.name) };
                assert!((field.values)().contains(&text), "{} is {text} for {name}", field.name);
            }
        });
    }
    for backend in [Backend::Other, Backend::Nixl, Backend::Fake, Backend::Mooncake, Backend::Mori, Backend::Ascend] {
        assert!((Field::named("backend").unwrap().values)().contains(&backend.name()));
    }
}

#[test]
fn a_request_outside_the_queue_has_no_time_in_it() {
    let mut world = World::healthy();
    world.request.entered = None;
    world.request.phase = None;
    assert!(matches(
        "!inflight && inflight_seconds == 0 && waiting_seconds == 10.0 && abort_seconds < 0 && phase == 'NotPolled'",
        &world,
        at(10.0)
    ));
}

#[test]
fn conditions_are_cel() {
    let world = World::healthy();
    for (source, expected) in [
        ("true", true),
        ("inflight_seconds > 9", true),
        ("inflight_seconds > 10", false),
        ("9.5 < inflight_seconds", true),
        ("cause in ['Parked', 'Unknown']", true),
        ("!(cause == 'Unknown')", false),
        ("sglang == '' || sglang.startsWith('0.5.')", true),
        ("size(sglang) == 0", true),
        ("(inflight ? inflight_seconds : waiting_seconds) >= 10.0", true),
        ("double(sent_pages) / double(sent_chunks) > 7.5 && sent_pages % 2 == 0", true),
        ("-sent_chunks == -1", true),
        ("inflight_seconds > server_waiting_timeout_seconds + 60.0", false),
    ] {
        assert_eq!(matches(source, &world, at(10.0)), expected, "{source}");
    }
}

#[test]
fn conditions_that_cannot_be_right_are_refused_with_their_place() {
    for (source, place, words) in [
        ("inflight_second > 5", "1:1", "did you mean `inflight_seconds`?"),
        ("inflight &&\n  caus == 'Parked'", "2:3", "unknown field `caus`"),
        ("false && nothing", "1:10", "unknown field `nothing`; known are cause, "),
        ("false && cause.name == 'x'", "1:15", "unknown member `name`: a string has none"),
        ("cause == 'RoomColision'", "1:10", "did you mean `RoomCollision`?"),
        ("cause in ['Parked', 'Bogus']", "1:21", "`cause` is never \"Bogus\""),
        ("phase == 3", "1:7", "string and int are never equal"),
        ("inflight_seconds", "1:1", "the condition must be bool, this is double"),
        ("inflight_seconds && true", "1:1", "what stands before `&&` must be bool"),
        ("false && inflight_seconds > 'x'", "1:27", "string and double cannot be compared"),
        ("sglang > '0.5.9'", "1:8", "strings have no useful order"),
        ("inflight_seconds + 1 > 5", "1:18", "write 2.0 for 2"),
        ("has(cause)", "1:4", "`has` is not needed"),
        ("[1, 2].all(x, x > 0)", "1:11", "the macro `all` has no use"),
        ("cause.matches('a')", "1:14", "unknown function `matches`"),
        ("cause[0] == 'a'", "1:6", "nothing can be indexed"),
        ("cause == null", "1:10", "ever null"),
        ("sent_chunks == 1u", "1:16", "write the number without `u`"),
        ("true ? 1 : 'a'", "1:12", "must have one type"),
        ("inflight_seconds > ", "1:20", "is not CEL"),
        ("", "1:1", "is empty"),
    ] {
        let complaint = complaint(source);
        assert!(complaint.starts_with(place) && complaint.contains(words), "{source:?}: {complaint}");
    }
    let all = complaint("caus == 'x' && phas == 'y' && inflight > 3");
    assert_eq!(all.lines().count(), 3, "every error is told: {all}");
}

#[test]
fn the_default_rules_need_no_interpreter() {
    for (_, rule) in load::defaults().unwrap().iter() {
        for cause in Cause::ALL {
            World::pinned(cause).look(at(400.0), |subject| {
                assert!(rule.condition.decide(subject).is_some(), "{} with {cause}", rule.name);
            });
        }
    }
}

#[test]
fn a_condition_cannot_run_away() {
    assert!(complaint(&format!("inflight{}", " || inflight".repeat(400))).contains("bytes, more than"));
    assert!(complaint(&vec!["1"; 300].join("+")).contains("operators, more than"));
    assert!(complaint(&"(".repeat(250)).contains("is not CEL"));
    assert!(complaint(&format!("cause{}", ".a".repeat(200))).contains("unknown member"));
    let deepest = format!("{} > 0", vec!["sent_pages"; 255].join("+"));
    assert!(deepest.len() < condition::MAX_SOURCE && Condition::compile(&deepest).is_ok());
}

#[test]
fn what_fails_at_run_time_is_counted_and_does_not_match() {
    let rules = load_text("rules: [{name: Divides, when: '1 / (sent_chunks - 1) == 1', severity: info}]").unwrap();
    let mut evaluator = Evaluator::new(rules, 10);
    let mut transitions = Vec::new();
    World::healthy().look(at(1.0), |subject| evaluator.evaluate(key(1), subject, &mut transitions));
    assert!(transitions.is_empty());
    assert_eq!(evaluator.errors().collect::<Vec<_>>(), [(RuleIndex(0), 1)]);
}

// Loading

#[test]
fn a_rule_has_what_its_file_says() {
    let rules = load_text(
        "rules:\n  - name: Mine\n    when: inflight_seconds > 5\n    for: 1m 30s\n    severity: warning\n    labels: {team: serving, version: 1.10}\n    summary: it is stuck\n    action: dry-run\n",
    )
    .unwrap();
    let (_, rule) = rules.iter().next().unwrap();
    assert_eq!(
        (&*rule.name, rule.hold, rule.severity, rule.action),
        ("Mine", Duration::from_secs(90), Severity::Warning, Mode::DryRun)
    );
    assert_eq!(rule.labels.get("version").map(String::as_str), Some("1.10"), "as written, not as a number");
    assert_eq!(rule.summary.as_deref(), Some("it is stuck"));
}

#[test]
fn every_problem_of_every_file_is_told_with_its_place() {
    let first = "\
rules:
  - name: Fine
    when: inflight_seconds > 5
    severity: info
  - name: not fine
    when: |
      inflight
      && caus == 'Parked'
    for: soon
    severity: loud
    severty: info
    action: enforced
    labels:
      team: serving
      alertname: x
      0bad: y
  - when: \"inflight_second > 5\"
    severity: info
";
    let second = "rules:\n  - {name: Fine, when: 'true', severity: info}\nextra: 1\n";
    let third = "rules:\n  - name: [\n";
    let sources = [("a.yaml", first), ("b.yaml", second), ("c.yaml", third)].map(|(file, text)| Source { file, text });
    let problems: Vec<String> = load::load(&sources).unwrap_err().iter().map(Problem::to_string).collect();
    let expected = [
        "a.yaml:11:5: unknown key `severty` in `rules`; did you mean `severity`?",
        "a.yaml:5:11: `not fine` is not a rule's name",
        "a.yaml:8:10: unknown field `caus`; did you mean `cause`?",
        "a.yaml:10:15: `loud` is no severity; known are info, warning, critical",
        "a.yaml:12:13: `enforced` is no action; did you mean `enforce`?",
        "a.yaml:9:10: `soon` is not a duration",
        "a.yaml:16:13: `0bad` is not a label's name",
        "a.yaml:15:18: the label `alertname` is set by the agent",
        "a.yaml:17:5: a rule needs `name`",
        "a.yaml:17:12: unknown field `inflight_second`; did you mean `inflight_seconds`?",
        "b.yaml:3:1: unknown key `extra`",
        "b.yaml:2:12: there is a rule `Fine` in a.yaml:2 already",
        "c.yaml:",
    ];
    for expected in expected {
        assert!(
            problems.iter().any(|problem| problem.starts_with(expected)),
            "{expected} is missing in\n{}",
            problems.join("\n")
        );
    }
    assert_eq!(problems.len(), expected.len(), "{}", problems.join("\n"));
}

#[test]
fn yaml_errors_name_line_and_column() {
    for (text, place) in [
        ("rules:\n  - name: A\n    name: B\n    when: 'true'\n", "r.yaml:3:5: "),
        ("rules:\n\t- name: A\n", "r.yaml:2:"),
        ("rules: 5\n", "r.yaml:1:8: "),
        ("- a\n", "r.yaml:1:1: "),
        ("rules: []\n", "r.yaml: has no rule"),
    ] {
        let complaints = complaints(text);
        assert!(
            complaints.len() == 1 && complaints.iter().all(|complaint| complaint.starts_with(place)),
            "{text:?}: {complaints:?}"
        );
        assert!(complaints.iter().all(|complaint| !complaint.contains('\n')), "one line each: {complaints:?}");
    }
}

#[test]
fn a_folder_is_read_by_file_name_and_without_what_is_no_rule_file() {
    let folder = tempfile::tempdir().unwrap();
    let rule = |name: &str| format!("rules: [{{name: {name}, when: 'true', severity: info}}]");
    let write = |file: &str, text: &str| std::fs::write(folder.path().join(file), text).unwrap();
    assert!(load::load_folder(folder.path()).unwrap_err()[0].to_string().contains("has no rule file"));
    write("b.yaml", &rule("B"));
    write("a.yml", &rule("A"));
    write(".hidden.yaml", "nonsense");
    write("readme.txt", "nonsense");
    std::fs::create_dir(folder.path().join("folder.yaml")).unwrap();
    let elsewhere = tempfile::tempdir().unwrap();
    std::fs::write(elsewhere.path().join("data"), rule("C")).unwrap();
    std::os::unix::fs::symlink(elsewhere.path().join("data"), folder.path().join("c.yaml")).unwrap();
    let rules = load::load_folder(folder.path()).unwrap();
    assert_eq!(rules.iter().map(|(_, rule)| &*rule.name).collect::<Vec<_>>(), ["A", "B", "C"]);

    write("d.yaml", &"#".repeat(1 << 20 | 1));
    std::fs::write(folder.path().join("e.yaml"), b"rules: \xff").unwrap();
    std::os::unix::fs::symlink("nowhere", folder.path().join("f.yaml")).unwrap();
    write("g.yaml", "rules: [{}]");
    let problems: Vec<String> = load::load_folder(folder.path()).unwrap_err().iter().map(Problem::to_string).collect();
    for words in [
        "d.yaml: is larger than 1024 KiB",
        "e.yaml: is not UTF-8",
        "f.yaml: cannot be read",
        "g.yaml:1:9: a rule needs `name`",
    ] {
        assert!(problems.iter().any(|problem| problem.contains(words)), "{words}: {problems:?}");
    }
    let missing = load::load_folder(&folder.path().join("missing")).unwrap_err();
    assert!(missing[0].to_string().contains("cannot be read"));
}
