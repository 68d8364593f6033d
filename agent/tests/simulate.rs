//! The simulator itself: the same seed gives the same stream, every family gives one, `dislodge replay` reads what
//! `dislodge simulate` writes.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::{
    collections::BTreeSet,
    path::Path,
    process::{Command, Output},
};

use dislodge::{
    core::Input,
    simulate::{Family, Settings, simulate, truth::Fate},
};

fn settings(family: Family, seed: u64) -> Settings {
    Settings { family, seed, requests: 3, ranks: 2 }
}

fn dislodge(arguments: &[&str], folder: &Path) -> Output {
    let output = Command::new(env!("CARGO_BIN_EXE_dislodge")).args(arguments).current_dir(folder).output().unwrap();
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    output
}

#[test]
fn the_same_seed_gives_the_same_stream_and_another_one_another() {
    let told = |seed| format!("{:?}", simulate(&settings(Family::AgentBlind, seed)));
    assert_eq!(told(7), told(7));
    assert_ne!(told(7), told(8));
}

#[test]
fn every_family_gives_a_stream_in_order_and_what_it_is_about_does_happen() {
    for family in Family::ALL {
        let mut fates = BTreeSet::new();
        for seed in 0..30 {
            let simulation = simulate(&settings(family, seed));
            let times = simulation.inputs.iter().filter_map(|input| match input {
                Input::Event(event) => Some(event.at),
                Input::Tick { now, .. } => Some(*now),
                _ => None,
            });
            assert!(times.is_sorted(), "{family:?} {seed}");
            fates.extend(simulation.truth.into_iter().map(|truth| match truth.fate {
                Fate::Stuck(stuck) => stuck.cause,
                Fate::Slow => "slow",
                _ => "healthy",
            }));
        }
        let expected = match family {
            Family::ClearedRoom => "RoomCollision",
            Family::AbortIgnored => "AbortIgnored",
            Family::ParkedPrefill => "Parked",
            Family::TransferNeverEnds => "TransferStalled",
            Family::CompletionLost => "CompletionLost",
            Family::UnsafeRelease => "UnsafeRelease",
            Family::Resurrection => "Resurrected",
            Family::PipelineDivergence | Family::TensorDivergence => "RankDivergence",
            Family::LoopStalled => "LoopStalled",
            Family::PeerDied => "PeerGone",
            Family::Blackholed => "CompletionError",
            Family::WorkerBlocked => "WorkerBlocked",
            Family::WarmupPinned => "WarmupPinned",
            Family::BootstrapThreadDied | Family::OrphanRoom => "NeverBootstrapped",
            Family::Backpressure => "slow",
            _ => "healthy",
        };
        assert!(fates.contains(expected), "{family:?}: {fates:?}");
    }
}

#[test]
fn what_is_written_is_replayed_to_the_alert_that_the_truth_beside_it_names() {
    let folder = tempfile::tempdir().unwrap();
    let arguments = ["simulate", "--family", "cleared-room", "--seed", "3", "--requests", "2", "-o", "made"];
    dislodge(&arguments, folder.path());
    let truth = std::fs::read_to_string(folder.path().join("made.truth.json")).unwrap();
    let truth: serde_json::Value = serde_json::from_str(&truth).unwrap();
    let stuck = truth["truth"].as_array().unwrap().iter().find(|truth| truth["fate"]["fate"] == "stuck").unwrap();
    let replayed = dislodge(&["replay", "made", "-o", "json"], folder.path());
    let lines = String::from_utf8(replayed.stdout).unwrap();
    let mut verdicts = lines.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    let fired = verdicts.find(|line| line["verdict"]["state"] == "firing").unwrap();
    assert_eq!(fired["verdict"]["cause"], stuck["fate"]["cause"]);
    assert_eq!(fired["verdict"]["request"]["serial"], stuck["request"]["serial"]);

    let printed = dislodge(&arguments[..arguments.len() - 2], folder.path());
    assert_eq!(serde_json::from_slice::<serde_json::Value>(&printed.stdout).unwrap(), truth);
    let made = std::fs::read(folder.path().join("made")).unwrap();
    dislodge(&arguments, folder.path());
    assert_eq!(std::fs::read(folder.path().join("made")).unwrap(), made, "the same file again");
}

#[test]
fn a_family_that_does_not_exist_is_refused_by_name() {
    let refused =
        Command::new(env!("CARGO_BIN_EXE_dislodge")).args(["simulate", "--family", "gremlins"]).output().unwrap();
    assert_eq!(refused.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("no family `gremlins`"));
}
