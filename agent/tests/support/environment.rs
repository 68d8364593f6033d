//! What this machine has: BPF, Python, the SGLang test-bed.

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::OnceLock,
    thread,
};

use dislodge::kernel::{Kernel, Sizes};
use serde::{Deserialize, de::DeserializeOwned};

use super::{full, needs, repository};

/// The releases that every run takes.
pub const ALWAYS: [&str; 4] = ["0.5.10", "0.5.12.post1", "0.5.22", "0.5.23"];
/// Those that a full run takes too.
const IN_FULL: [&str; 2] = ["0.5.15", "0.5.18"];

/// Every release of this run.
pub fn releases() -> Vec<&'static str> {
    ALWAYS.into_iter().chain(IN_FULL.into_iter().filter(|_| full())).collect()
}

/// Those in which a second request on a room gets pinned.
pub fn pinning_releases() -> Vec<&'static str> {
    releases().into_iter().filter(|release| !matches!(*release, "0.5.10" | "0.5.23")).collect()
}

/// Those that hand chunks to transfer queues.
pub fn releases_with_queues() -> Vec<&'static str> {
    releases().into_iter().filter(|release| *release != "0.5.10").collect()
}

/// What `prepare.py` made.
#[derive(Debug, Deserialize)]
pub struct SglangEnvironment {
    /// The Python that the server runs on.
    pub python: PathBuf,
    releases: HashMap<String, PathBuf>,
}

impl SglangEnvironment {
    /// The folder of a release.
    pub fn folder(&self, release: &str) -> &Path {
        &self.releases[release]
    }
}

/// Whether the BPF programs load.
pub fn bpf() -> Result<(), String> {
    static LOADED: OnceLock<Result<(), String>> = OnceLock::new();
    LOADED
        .get_or_init(|| {
            Kernel::load(Sizes { ring: 64 << 10, calls: 1024 }).map(|_| ()).map_err(|error| error.to_string())
        })
        .clone()
}

/// The test-bed, made when it is not there yet. `DISLODGE_TEST_SGLANG` may name its folder.
pub fn sglang() -> Result<&'static SglangEnvironment, String> {
    static PREPARED: OnceLock<Result<SglangEnvironment, String>> = OnceLock::new();
    PREPARED.get_or_init(prepare).as_ref().map_err(Clone::clone)
}

fn prepare() -> Result<SglangEnvironment, String> {
    bpf()?;
    prepared("tests/sglang/prepare.py", "DISLODGE_TEST_SGLANG", "sglang", &releases())
}

/// What a `prepare.py` makes, in the folder that a variable names, or in one of the build's.
pub fn prepared<T: DeserializeOwned>(
    script: &str,
    variable: &str,
    folder: &str,
    releases: &[&str],
) -> Result<T, String> {
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| repository().join("target"), PathBuf::from);
    let into = std::env::var_os(variable).map_or_else(|| target.join(folder), PathBuf::from);
    let done = Command::new("python3")
        .arg(repository().join(script))
        .arg("--into")
        .arg(into)
        .args(releases)
        .stdin(Stdio::null())
        .output()
        .map_err(|error| format!("python3 cannot be run: {error}"))?;
    if !done.status.success() {
        return Err(format!("{script} failed: {}", String::from_utf8_lossy(&done.stderr)));
    }
    let text = String::from_utf8_lossy(&done.stdout);
    let last = text.lines().last().unwrap_or_default();
    serde_json::from_str(last).map_err(|error| format!("{script} said `{last}`: {error}"))
}

/// A Python from 3.10 on.
pub fn python() -> Result<PathBuf, String> {
    static FOUND: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    let find = || {
        let names = ["python3", "python3.12", "python3.13", "python3.11", "python3.10", "python3.14"];
        let found = names.iter().find_map(|name| interpreter(Path::new(name)));
        found.map(|(_, path)| path).ok_or_else(|| "there is no Python from 3.10 on".to_owned())
    };
    FOUND.get_or_init(find).clone()
}

/// Minor version and own path of a Python from 3.10 on.
pub fn interpreter(command: &Path) -> Option<(u32, PathBuf)> {
    let code = "import sys; print(*sys.version_info[:2], sys.executable)";
    let done = Command::new(command).args(["-c", code]).stdin(Stdio::null()).output().ok()?;
    let text = String::from_utf8(done.stdout).ok()?;
    let mut words = text.trim().splitn(3, ' ');
    let (major, minor, path) = (words.next()?, words.next()?.parse().ok()?, words.next()?);
    (major == "3" && minor >= 10).then(|| (minor, path.into()))
}

/// Runs a test on each of these releases, side by side as far as servers are allowed. A failure names its release.
pub fn on_each(releases: &[&'static str], test: impl Fn(&'static str) + Sync) {
    if needs(sglang()).is_none() {
        return;
    }
    thread::scope(|scope| {
        let named = |release: &'static str| {
            let test = &test;
            let name = format!("{} on {release}", thread::current().name().unwrap_or("test"));
            (release, thread::Builder::new().name(name).spawn_scoped(scope, move || test(release)).unwrap())
        };
        let running: Vec<_> = releases.iter().copied().map(named).collect();
        let failed: Vec<_> =
            running.into_iter().filter_map(|(release, thread)| thread.join().is_err().then_some(release)).collect();
        assert!(failed.is_empty(), "failed on {}", failed.join(", "));
    });
}

/// Whether Mooncake's engine loads: it wants libraries of the system.
pub fn mooncake() -> Result<(), String> {
    let python = &sglang().map_err(|why| why.clone())?.python;
    let done = Command::new(python).args(["-c", "import mooncake.engine"]).output();
    let done = done.map_err(|error| error.to_string())?;
    let log = String::from_utf8_lossy(&done.stderr).into_owned();
    if done.status.success() { Ok(()) } else { Err(log.lines().last().unwrap_or_default().to_owned()) }
}
