//! Debian's kernels 6.1 and 6.12 with real RDMA, in a virtual machine (tests/vm): what this machine's kernel cannot show.
//!
//! Each kernel is booted once; every test reads what its part of that run said. Needs root once, to prepare; the machine is kept
//! in the user's cache, or in the folder that `DISLODGE_TEST_VM` names.
#![expect(clippy::unwrap_used, clippy::panic, reason = "a test that cannot go on fails")]

#[path = "support/support.rs"]
mod support;

use std::{
    collections::BTreeMap,
    fs,
    io::Write as _,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
    sync::{Mutex, OnceLock, PoisonError},
    time::Instant,
};

use serde_json::Value;
use support::{needs, repository};

const KERNELS: [&str; 2] = ["6.1", "6.12"];

/// What a part of the run said, and how it ended.
#[derive(Debug)]
struct Part {
    status: i32,
    seconds: String,
    text: String,
}

impl Part {
    /// Its text; a part that failed fails the test with it.
    fn good(&self) -> &str {
        assert_eq!(self.status, 0, "{}", self.text);
        &self.text
    }

    /// Its lines of JSON.
    fn facts(&self) -> Vec<Value> {
        self.good().lines().filter_map(|line| serde_json::from_str(line).ok()).filter(Value::is_object).collect()
    }
}

/// A kernel, with its own name, and the parts of its one run; or how that failed. It is not run again for the next test.
type Run = Result<(String, BTreeMap<String, Part>), String>;

/// Runs a test on each kernel. Nothing, loudly, where there can be no virtual machine.
fn on_each_kernel(test: impl Fn(&BTreeMap<String, Part>)) {
    static RUNS: OnceLock<Result<Vec<Run>, String>> = OnceLock::new();
    let run_all = || machine().map(|cache| KERNELS.iter().map(|kernel| run_everything(cache, kernel)).collect());
    let Some(runs) = needs(RUNS.get_or_init(run_all).as_ref().map_err(Clone::clone)) else { return };
    for run in runs {
        let (kernel, parts) = run.as_ref().unwrap_or_else(|why| panic!("{why}"));
        tell(&format!("on {kernel}"));
        test(parts);
    }
}

/// The folder of the prepared machine.
fn machine() -> Result<&'static Path, String> {
    static PREPARED: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    let prepare = || {
        let found = Command::new("qemu-system-x86_64").arg("--version").output();
        found.map_err(|error| format!("qemu-system-x86_64 (Debian: qemu-system-x86) cannot be run: {error}"))?;
        let started = Instant::now();
        let mut command = Command::new(repository().join("tests/vm/prepare"));
        if let Some(folder) = std::env::var_os("DISLODGE_TEST_VM") {
            command.arg("--into").arg(folder);
        }
        let done = command.stdin(Stdio::null()).output().map_err(|error| error.to_string())?;
        if !done.status.success() {
            return Err(format!("no virtual machine can be made: {}", String::from_utf8_lossy(&done.stderr)));
        }
        tell(&format!("the virtual machine was prepared in {:.1} s", started.elapsed().as_secs_f64()));
        Ok(PathBuf::from(String::from_utf8_lossy(&done.stdout).trim()))
    };
    PREPARED.get_or_init(prepare).as_deref().map_err(Clone::clone)
}

/// Runs a script of the guest's; one machine at a time, for they take every core.
fn boot(cache: &Path, kernel: &str, arguments: &[&str], script: &Path) -> Output {
    static ONE: Mutex<()> = Mutex::new(());
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    // A machine ends with its test.
    Command::new("setpriv")
        .args(["--pdeathsig", "TERM"])
        .arg(repository().join("tests/vm/run"))
        .args(["--kernel", kernel, "--cache"])
        .arg(cache)
        .args(arguments)
        .arg(script)
        .stdin(Stdio::null())
        .output()
        .unwrap()
}

fn run_everything(cache: &Path, kernel: &str) -> Run {
    let share = tempfile::tempdir().unwrap();
    let into = share.path().join("repository");
    fs::create_dir_all(into.join("agent/tests/support")).unwrap();
    copy(&repository().join("hook"), &into);
    copy(&repository().join("agent/tests/support/marks.py"), &into.join("agent/tests/support"));
    // Without what debuggers read: that is nine tenths of them.
    for (program, name) in [(Path::new(env!("CARGO_BIN_EXE_dislodge")), "dislodge"), (&kernel_tests(), "kernel-tests")]
    {
        let stripped =
            Command::new("strip").arg("--strip-debug").arg("-o").arg(share.path().join(name)).arg(program).status();
        assert!(stripped.unwrap().success(), "{name}");
    }
    let at = format!("REPOSITORY={}", repository().display());
    let shared = share.path().to_str().unwrap();
    let arguments = ["--limit", "1200", "--share", shared, "--env", &at];
    let started = Instant::now();
    let done = boot(cache, kernel, &arguments, &repository().join("tests/vm/guest/everything"));
    let text = String::from_utf8_lossy(&done.stdout);
    if !done.status.success() {
        return Err(format!("{kernel}: {}\n{text}", String::from_utf8_lossy(&done.stderr)));
    }
    let parts = parts(&text)?;
    let name = parts["uname"].good().trim().to_owned();
    let took: Vec<String> = parts.iter().map(|(part, Part { seconds, .. })| format!("{part} {seconds}")).collect();
    let seconds = started.elapsed().as_secs_f64();
    tell(&format!("the virtual machine ran on {name} for {seconds:.1} s ({})", took.join(", ")));
    if !name.starts_with(&format!("{kernel}.")) {
        return Err(format!("{name} is not {kernel}"));
    }
    Ok((name, parts))
}

fn parts(text: &str) -> Result<BTreeMap<String, Part>, String> {
    let mut parts = BTreeMap::new();
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        let Some(name) = line.strip_prefix("part ").and_then(|rest| rest.strip_suffix(" begins")) else { continue };
        let end = format!("part {name} ends: ");
        let mut text = String::new();
        let ended = loop {
            let line = lines.next().ok_or_else(|| format!("{name} has no end: {text}"))?;
            match line.strip_prefix(&end) {
                Some(ended) => break ended,
                None => text = text + line + "\n",
            }
        };
        let (status, seconds) = ended.split_once(" after ").ok_or_else(|| format!("{name} ends: {ended}"))?;
        let (status, seconds) = (status.parse().unwrap(), seconds.to_owned());
        parts.insert(name.to_owned(), Part { status, seconds, text });
    }
    Ok(parts)
}

fn copy(from: &Path, to: &Path) {
    assert!(Command::new("cp").arg("-r").arg(from).arg(to).status().unwrap().success());
}

/// The compiled tests of kernel.rs, as they are now.
fn kernel_tests() -> PathBuf {
    let profile = if cfg!(debug_assertions) { "dev" } else { "release" };
    let done = Command::new(env!("CARGO"))
        .args(["test", "--no-run", "--locked", "--message-format=json", "--package=dislodge", "--test=kernel"])
        .args(["--profile", profile])
        .current_dir(repository())
        .output()
        .unwrap();
    let messages = String::from_utf8_lossy(&done.stdout);
    let executable = |line: &str| {
        let message: Value = serde_json::from_str(line).ok()?;
        let wanted = message["target"]["name"] == "kernel";
        message["executable"].as_str().filter(|_| wanted).map(PathBuf::from)
    };
    let found = messages.lines().find_map(executable);
    found.unwrap_or_else(|| panic!("kernel.rs is not compiled: {}", String::from_utf8_lossy(&done.stderr)))
}

/// Says so at once: the test harness would keep it to itself.
fn tell(what: &str) {
    let _ = std::io::stderr().write_all(format!("{what}\n").as_bytes());
}

#[test]
fn the_bpf_programs_load_on_each_kernel_and_every_test_of_them_passes() {
    on_each_kernel(|parts| {
        let text = parts["kernel"].good();
        let result = text.lines().find(|line| line.starts_with("test result: ok.")).unwrap();
        assert!(result.contains(" 0 failed; 0 ignored;") && !result.contains(" 0 passed"), "{text}");
        tell(result);
    });
}

#[test]
fn doctor_finds_nothing_wrong_with_either_kernel() {
    on_each_kernel(|parts| {
        let report: Value = serde_json::from_str(parts["doctor"].good()).unwrap();
        let programs = report["checks"].as_array().unwrap().iter().find(|check| check["name"] == "bpf programs");
        assert_eq!(programs.unwrap()["outcome"], "good", "{report}");
    });
}

#[test]
fn unmodified_engines_write_over_rdma_and_the_device_counts_every_packet() {
    on_each_kernel(|parts| {
        let facts = parts["transfers"].facts();
        for engine in ["nixl", "mooncake"] {
            let fact = facts.iter().find(|fact| fact["transferred"] == engine).unwrap();
            let packets = fact["changed"]["sent_pkts"].as_u64().unwrap();
            assert!(packets * 1024 >= fact["bytes"].as_u64().unwrap(), "{fact}");
            tell(&fact.to_string());
        }
    });
}

#[test]
fn each_fault_does_to_each_engine_what_its_name_says() {
    let nixl = ["stalled", "nothing_gets_through", "peer_killed", "link_lost"];
    let mooncake = [&nixl[..], &["memory_unregistered"]].concat();
    on_each_kernel(|parts| {
        // Only one kernel of the two is asked.
        let both = [("faults-nixl", &nixl[..]), ("faults-mooncake", &mooncake)];
        for (part, faults) in both.into_iter().filter(|(part, _)| parts.contains_key(*part)) {
            let facts = parts[part].facts();
            for fault in ["frozen_before_the_first_write", "frozen_when_connected"].iter().chain(faults) {
                let fact = facts.iter().find(|fact| fact["fault"] == **fault);
                tell(&fact.unwrap_or_else(|| panic!("no {fault}: {facts:?}")).to_string());
            }
        }
    });
}

#[test]
fn the_agent_counts_what_the_device_counts_and_names_each_fault_without_acting() {
    on_each_kernel(|parts| {
        for engine in ["nixl", "mooncake"] {
            let facts = parts[&format!("agent-{engine}")].facts();
            let last = facts.last().unwrap_or_else(|| panic!("{engine}: no facts"));
            assert_eq!(last["agent"], "good", "{facts:?}");
            facts.iter().for_each(|fact| tell(&fact.to_string()));
        }
    });
}

#[test]
fn a_process_that_forbids_itself_other_system_calls_survives_every_probe() {
    on_each_kernel(|parts| {
        let (control, probed): (Vec<_>, Vec<_>) =
            parts["seccomp"].facts().into_iter().partition(|fact| fact["probe"] == "none");
        assert_eq!(control[0]["end"], "SIGSYS", "the filter does not work: {control:?}");
        assert_eq!(probed.len(), 12);
        for fact in probed {
            let survived = fact["end"] == 0 && fact["said"] == "1000 of 1000 right" && fact["hits"] == 1000;
            assert!(survived, "{fact}");
        }
    });
}

#[test]
fn the_script_s_own_status_is_told_and_a_panic_or_the_end_of_its_time_is_a_failure() {
    let Some(cache) = needs(machine()) else { return };
    let folder = tempfile::tempdir().unwrap();
    let run = |name: &str, script: &str, arguments: &[&str]| {
        let file = folder.path().join(name);
        fs::write(&file, format!("#!/bin/sh\n{script}\n")).unwrap();
        let done = boot(cache, "6.12", arguments, &file);
        let [said, why] = [done.stdout, done.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
        (done.status.code().unwrap(), said, why)
    };
    let (status, said, _) = run("status", "echo status 0; exit 7", &[]);
    assert_eq!((status, &*said), (7, "status 0\n"));
    let (status, _, why) = run("panic", "echo c >/proc/sysrq-trigger; sleep 1000", &[]);
    assert_eq!(status, 125);
    assert!(why.contains("sysrq triggered crash") && why.contains("the guest's kernel panicked"), "{why}");
    let (status, _, why) = run("slow", "sleep 1000", &["--limit", "2"]);
    assert_eq!(status, 125);
    assert!(why.contains("not done after 2 s"), "{why}");
}
