//! `dislodge explain` where names are hostile, cut or hashed, where very much happens, as tools read it and as a command.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

#[path = "fixtures/made.rs"]
mod made;

use std::{
    collections::BTreeSet,
    path::Path,
    process::{Command, Output},
};

use dislodge::{
    core::Input,
    diagnose::Cause,
    event::{Body, Event, Phase, Room},
    explain::{
        answer::Answer,
        text::{Style, not_found, render},
    },
    record::{
        anonymize::anonymize,
        reader::Reader,
        replay::{Replay, Told},
    },
    rule::load::defaults,
    simulate::Family,
};
use made::{Made, SECOND, event, file, healthy, named, place, texts, this};

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
            if let Told::Verdict(verdict) = told
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
fn paths(value: &serde_json::Value, path: &str, into: &mut BTreeSet<String>) {
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
    let mut found = BTreeSet::new();
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
