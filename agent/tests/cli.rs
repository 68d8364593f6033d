//! The command line: what it says and how it ends.
#![expect(clippy::unwrap_used, clippy::panic, reason = "a test that cannot go on fails")]

#[path = "support/support.rs"]
mod support;

use std::{
    fs,
    path::Path,
    process::{Command, Output, Stdio},
};

use serde_json::Value;
use support::{
    environment::on_each,
    server::{Setup, text},
};

fn dislodge(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_dislodge")).args(arguments).stdin(Stdio::null()).output().unwrap()
}

fn said(output: &[u8]) -> String {
    String::from_utf8(output.to_vec()).unwrap()
}

fn json(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {}", said(&output.stdout)))
}

/// A configuration and two rule files with a problem or two each, and one that is good.
fn bad_files(folder: &Path) -> [String; 2] {
    let rules = folder.join("rules");
    fs::create_dir(&rules).unwrap();
    let config = folder.join("config.yaml");
    fs::write(&config, "listen: nowhere\nmode: brave\nring_size: 1000\n").unwrap();
    fs::write(
        rules.join("a.yaml"),
        "rules:\n  - name: A\n    when: phaze == \"Failed\"\n    for: soon\n    severity: info\n",
    )
    .unwrap();
    fs::write(
        rules.join("b.yaml"),
        "rules:\n  - name: B\n    when: inflight\n    severity: loud\n    action: destroy\n",
    )
    .unwrap();
    fs::write(rules.join("c.yaml"), "rules:\n  - name: C\n    when: inflight\n    for: 1s\n    severity: info\n")
        .unwrap();
    [config.display().to_string(), rules.display().to_string()]
}

const PROBLEMS: [&str; 7] = [
    "config.yaml:1:9:",
    "config.yaml:2:7:",
    "config.yaml:3:12:",
    "a.yaml:3:",
    "a.yaml:4:10:",
    "b.yaml:4:15:",
    "b.yaml:5:13:",
];

#[test]
fn check_names_every_problem_of_every_file_with_its_place() {
    let folder = tempfile::tempdir().unwrap();
    let [config, rules] = bad_files(folder.path());
    let checked = dislodge(&["check", "--config", &config, "--rules", &rules]);
    let stderr = said(&checked.stderr);
    assert_eq!(checked.status.code(), Some(2), "{stderr}");
    for problem in PROBLEMS {
        assert!(stderr.contains(problem), "{problem} is missing:\n{stderr}");
    }
    assert!(!stderr.contains("c.yaml"), "{stderr}");

    let checked = dislodge(&["check", "--config", &config, "--rules", &rules, "-o", "json"]);
    let report = json(&checked);
    assert_eq!((checked.status.code(), &report["ok"]), (Some(2), &Value::Bool(false)), "{report}");
    let problems = report["problems"].as_array().unwrap();
    assert!(problems.len() >= PROBLEMS.len(), "{report}");
    for problem in problems {
        assert!(problem["file"].is_string() && problem["message"].is_string(), "{problem}");
        assert!(problem["line"].as_u64() > Some(0) && problem["column"].as_u64() > Some(0), "{problem}");
    }
}

#[test]
fn run_and_rules_list_refuse_the_same_files_with_the_same_words() {
    let folder = tempfile::tempdir().unwrap();
    let [config, rules] = bad_files(folder.path());
    for command in [&["run"][..], &["rules", "list"]] {
        let done = dislodge(&[command, &["--config", &config, "--rules", &rules]].concat());
        let stderr = said(&done.stderr);
        assert_eq!(done.status.code(), Some(2), "{command:?}: {stderr}");
        assert!(PROBLEMS.iter().all(|problem| stderr.contains(problem)), "{command:?}: {stderr}");
    }
}

#[test]
fn the_shipped_rules_are_good_and_listed() {
    let good = dislodge(&["check"]);
    assert!(good.status.success() && said(&good.stdout).contains("rules"), "{}", said(&good.stderr));
    let list = dislodge(&["rules", "list"]);
    let listed = said(&list.stdout);
    assert!(list.status.success() && listed.contains("RoomCollision") && listed.contains("critical"), "{listed}");
    let rules = json(&dislodge(&["rules", "list", "-o", "json"]));
    let names: Vec<&str> = rules.as_array().unwrap().iter().map(|rule| rule["name"].as_str().unwrap()).collect();
    assert!(names.contains(&"RoomCollision") && names.contains(&"Parked"), "{names:?}");
}

#[test]
fn what_cannot_be_understood_is_wrong_input() {
    for wrong in [
        &["run", "--mode", "brave"][..],
        &["run", "--listen", "nowhere"],
        &["dance"],
        &["check", "--config", "/nowhere.yaml"],
    ] {
        let done = dislodge(wrong);
        assert_eq!(done.status.code(), Some(2), "{wrong:?}: {}", said(&done.stderr));
        assert!(!done.stderr.is_empty());
    }
}

/// What `doctor` says of a server, as JSON and in words.
fn doctor(pid: u32) -> (Value, String) {
    let report = json(&dislodge(&["doctor", "-o", "json"]));
    assert!(report["checks"].as_array().unwrap().iter().any(|check| check["name"] == "bpf programs"), "{report}");
    let server = report["servers"].as_array().unwrap().iter().find(|server| server["key"]["pid"] == pid).cloned();
    let words = said(&dislodge(&["doctor"]).stdout);
    let line = words.lines().find(|line| line.contains(&format!("pid {pid} "))).unwrap_or(&words).to_owned();
    (server.unwrap_or_else(|| panic!("the server is not found: {report}")), line)
}

#[test]
fn doctor_says_that_the_hook_is_active() {
    on_each(&["0.5.10", "0.5.22"], |release| {
        let mut server = Setup::of(release).start();
        server.serve(1);
        let (found, words) = doctor(server.pid());
        assert!(
            found["hook"]["hook"].is_string()
                && found["hook"]["server"]["sglang"] == release
                && found["proved"] == true
                && found["marker"] == true
                && found["advice"].is_null(),
            "{found}"
        );
        assert!(words.contains("active"), "{words}");
    });
}

#[test]
fn doctor_says_why_the_hook_is_not_active_and_what_to_do() {
    on_each(&["0.5.22"], |release| {
        let left_out = Setup::of(release).variable("SGLANG_PLUGINS", "telemetry").launched().start();
        let (found, words) = doctor(left_out.pid());
        assert!(found["hook"].is_null() && found["marker"] == false, "{found}");
        let advice = text(&found["advice"]);
        assert!(advice.contains("SGLANG_PLUGINS=telemetry") && advice.contains("add `dislodge`"), "{advice}");
        assert!(words.contains("not active"), "{words}");
        drop(left_out);

        let (found, _) = doctor(Setup::of(release).unhooked().launched().start().pid());
        assert!(text(&found["advice"]).contains("PYTHONPATH"), "{found}");
    });
}
