//! The hook's own tests (`hook/tests`), on every Python that this machine has; and what hook and agent both have to say.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

#[path = "support/support.rs"]
mod support;

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use dislodge::{
    event::Backend,
    remedy::guard::{PROVED, ProvedOn},
};
use support::{
    environment::{interpreter, python},
    needs, repository,
};

/// Prints what the hook calls proved: by backend the releases, in their order; `null` stands for all.
const PROVED_BY_THE_HOOK: &str = "import json
from dislodge_hook import backend
print(json.dumps({backend.NAMES[number]: releases and sorted(releases) for number, releases in backend.PROVED.items()}))";

/// One interpreter of each minor version from 3.10 to 3.14, on the path or among pyenv's.
fn pythons() -> Result<BTreeMap<u32, PathBuf>, String> {
    let root = std::env::var_os("PYENV_ROOT").map(PathBuf::from);
    let root = root.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".pyenv")));
    let versions = root.and_then(|root| fs::read_dir(root.join("versions")).ok());
    let pyenvs = versions.into_iter().flatten().flatten().map(|entry| entry.path().join("bin/python"));
    let named = (10..=14).map(|minor| PathBuf::from(format!("python3.{minor}")));
    let found: BTreeMap<u32, PathBuf> = named
        .chain(pyenvs)
        .chain([PathBuf::from("python3")])
        .filter_map(|command| interpreter(&command))
        .filter(|(minor, _)| (10..=14).contains(minor))
        .collect();
    if found.is_empty() { Err("there is no Python from 3.10 to 3.14".to_owned()) } else { Ok(found) }
}

fn run_tests(python: &Path) -> Result<(), String> {
    let done = Command::new(python)
        .args(["-m", "unittest", "discover", "-s", "hook/tests"])
        .current_dir(repository())
        .env_remove("PYTHONPATH")
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let output = String::from_utf8_lossy(&done.stderr).into_owned();
    let ran = output.lines().any(|line| line.starts_with("Ran ") && !line.starts_with("Ran 0 "));
    if done.status.success() && ran { Ok(()) } else { Err(output) }
}

#[test]
fn the_hooks_tests_pass_on_every_python_of_this_machine() {
    let Some(pythons) = needs(pythons()) else { return };
    let mut failed = Vec::new();
    for (minor, python) in pythons {
        match run_tests(&python) {
            Ok(()) => println!("Python 3.{minor}: good"),
            Err(output) => {
                println!("Python 3.{minor}:\n{output}");
                failed.push(minor);
            }
        }
    }
    assert!(failed.is_empty(), "failed on Python 3.{failed:?}");
}

#[test]
fn the_agent_and_the_hook_call_the_same_backends_proved_on_the_same_releases() {
    let Some(python) = needs(python()) else { return };
    let done = Command::new(python)
        .args(["-c", PROVED_BY_THE_HOOK])
        .env("PYTHONPATH", repository().join("hook"))
        .stdin(Stdio::null())
        .output()
        .unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    let hooks: BTreeMap<String, Option<Vec<String>>> = serde_json::from_slice(&done.stdout).unwrap();
    let releases = |proved: ProvedOn| match proved {
        ProvedOn::Every => None,
        ProvedOn::These(releases) => Some(releases.iter().map(ToString::to_string).collect()),
    };
    let agents = PROVED.iter().map(|(backend, proved)| (backend.name().to_owned(), releases(*proved)));
    assert_eq!(agents.collect::<BTreeMap<_, _>>(), hooks);
    assert!(hooks.keys().all(|name| Backend::ALL.iter().any(|backend| backend.name() == name)), "{hooks:?}");
}
