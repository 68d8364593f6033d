//! NIXL and Mooncake as released, and the peer programs of `tests/native` that transfer with them.

use std::{
    collections::HashMap,
    fmt,
    io::{BufRead as _, BufReader, Write as _},
    os::unix::fs::FileExt as _,
    path::{Path, PathBuf},
    process::{Child, ChildStdin, Command, Stdio},
    sync::{
        OnceLock,
        mpsc::{self, Receiver, RecvTimeoutError},
    },
    thread,
    time::{Duration, Instant},
};

use dislodge::{event::ProcessKey, target::discover};
use rustix::process::{Pid, Signal, kill_process};
use serde::Deserialize;
use serde_json::{Value, json};

use super::{environment, full, needs, repository, wait::PATIENCE};

const ALWAYS: [&str; 8] = [
    "nixl-1.5.1",
    "nixl-1.4.1",
    "nixl-1.0.1",
    "nixl-0.8.0",
    "mooncake-0.3.13.post1",
    "mooncake-0.3.11.post1",
    "mooncake-0.3.9",
    "mooncake-0.3.7.post1",
];
const IN_FULL: [&str; 8] =
    ["nixl-1.3.2", "nixl-1.2.0", "nixl-1.1.0", "nixl-0.10.1", "nixl-0.9.0", "nixl-0.7.1", "nixl-0.5.1", "nixl-0.3.1"];

/// What `prepare.py` made.
#[derive(Debug, Deserialize)]
pub struct NativeEnvironment {
    /// The Python that the peers run on.
    pub python: PathBuf,
    engines: HashMap<String, Prepared>,
}

#[derive(Clone, Debug, Deserialize)]
struct Prepared {
    folder: PathBuf,
    environment: HashMap<String, String>,
}

/// A release of an engine: "nixl-1.5.1".
#[derive(Clone, Debug)]
pub struct Release {
    /// Its name.
    pub name: String,
    /// The unpacked wheel.
    pub folder: PathBuf,
    environment: HashMap<String, String>,
    arguments: Vec<String>,
    python: PathBuf,
}

impl NativeEnvironment {
    /// A release of this run.
    pub fn release(&self, name: &str) -> Release {
        let Prepared { folder, environment } = self.engines[name].clone();
        Release { name: name.to_owned(), folder, environment, arguments: Vec::new(), python: self.python.clone() }
    }
}

/// Names of the releases of an engine that this run takes, the newest first.
pub fn releases(engine: &str) -> Vec<&'static str> {
    ALWAYS
        .into_iter()
        .chain(IN_FULL.into_iter().filter(|_| full()))
        .filter(|name| name.split('-').next() == Some(engine))
        .collect()
}

/// An engine's wheels, made when they are not there yet. `DISLODGE_TEST_NATIVE` may name their folder.
pub fn native(engine: &str) -> Result<&'static NativeEnvironment, String> {
    static PREPARED: [OnceLock<Result<NativeEnvironment, String>>; 2] = [const { OnceLock::new() }; 2];
    let prepare = || {
        let wanted: Vec<String> = releases(engine).iter().map(|name| name.replacen('-', "==", 1)).collect();
        let wanted: Vec<&str> = wanted.iter().map(String::as_str).collect();
        environment::prepared("tests/native/prepare.py", "DISLODGE_TEST_NATIVE", "native", &wanted)
    };
    PREPARED[usize::from(engine == "mooncake")].get_or_init(prepare).as_ref().map_err(Clone::clone)
}

fn native_and_bpf(engine: &str) -> Option<&'static NativeEnvironment> {
    needs(environment::bpf().and_then(|()| native(engine)))
}

/// Runs a test on each release of an engine, one after the other. A failure names its release.
pub fn on_each(engine: &str, test: impl Fn(&Release) + Sync) {
    let Some(native) = native_and_bpf(engine) else { return };
    let failed: Vec<&str> = releases(engine)
        .into_iter()
        .filter(|name| {
            let (release, test) = (native.release(name), &test);
            let thread = format!("{} on {name}", thread::current().name().unwrap_or("test"));
            thread::scope(|scope| {
                let running = thread::Builder::new().name(thread).spawn_scoped(scope, move || test(&release)).unwrap();
                running.join().is_err()
            })
        })
        .collect();
    assert!(failed.is_empty(), "failed on {}", failed.join(", "));
}

/// Runs a test on one release.
pub fn on(name: &str, test: impl FnOnce(&Release)) {
    if let Some(native) = native_and_bpf(name.split('-').next().unwrap_or_default()) {
        test(&native.release(name));
    }
}

impl Release {
    /// The engine: `nixl` or `mooncake`.
    pub fn engine(&self) -> &str {
        self.name.split('-').next().unwrap_or_default()
    }

    /// Whether it is this version or a later one.
    pub fn is_since(&self, version: [u32; 3]) -> bool {
        let text = self.name.split('-').nth(1).unwrap_or_default();
        let mut numbers = text.split('.').map(|number| number.parse().unwrap_or(0));
        let own: [u32; 3] = std::array::from_fn(|_| numbers.next().unwrap_or(0));
        own >= version
    }

    /// The same with a variable set in the environment of its peers.
    #[must_use]
    pub fn with(mut self, name: &str, value: &str) -> Self {
        self.environment.insert(name.to_owned(), value.to_owned());
        self
    }

    /// The same with further arguments for its peers.
    #[must_use]
    pub fn with_arguments(mut self, arguments: &[&str]) -> Self {
        self.arguments = arguments.iter().map(ToString::to_string).collect();
        self
    }

    /// The same in a copy of the wheel, whose files may be replaced (not written to: they are links).
    pub fn copy(&self) -> (Self, tempfile::TempDir) {
        let parent = self.folder.parent().unwrap();
        let scratch = tempfile::Builder::new().prefix(".copy-").tempdir_in(parent).unwrap();
        let folder = scratch.path().join(&self.name);
        let done = Command::new("cp").arg("-al").arg(&self.folder).arg(&folder).status().unwrap();
        assert!(done.success());
        let mut copy = self.clone();
        let (old, new) = (self.folder.to_str().unwrap(), folder.to_str().unwrap());
        for value in copy.environment.values_mut() {
            *value = value.replace(old, new);
        }
        copy.folder = folder;
        (copy, scratch)
    }

    /// The file of that name in the wheel, which is a part of what its peers map.
    pub fn file(&self, name: &str) -> PathBuf {
        self.files().into_iter().find(|path| path.file_name().is_some_and(|it| it == name)).unwrap()
    }

    /// The files of that name in the wheel.
    pub fn files_named(&self, name: &str) -> Vec<PathBuf> {
        self.files().into_iter().filter(|path| path.file_name().is_some_and(|it| it == name)).collect()
    }

    /// Every file of the wheel.
    pub fn files(&self) -> Vec<PathBuf> {
        let (mut found, mut pending) = (Vec::new(), vec![self.folder.clone()]);
        while let Some(folder) = pending.pop() {
            for path in std::fs::read_dir(&folder).unwrap().flatten().map(|entry| entry.path()) {
                if path.is_dir() { pending.push(path) } else { found.push(path) }
            }
        }
        found.sort();
        found
    }

    /// Puts something else in the place of a file, as an upgrade does: the old file is not written to.
    pub fn replace(&self, file: &Path, content: &[u8]) {
        let new = file.with_extension("new");
        std::fs::write(&new, content).unwrap();
        std::fs::rename(new, file).unwrap();
    }
}

/// Renaming functions in a copy, as a later release might.
impl Release {
    /// Gives a function another name in a library, or in those that call it. The linker's hash of the name stays: of two
    /// characters the first counts 33 times as much as the second.
    pub fn rename_function(&self, file: &Path, name: &[u8]) {
        let mut other = name.to_vec();
        let place = name.windows(2).position(|pair| pair[0].is_ascii_lowercase() && pair[1] >= b'b').unwrap();
        other[place] += 1;
        other[place + 1] -= 33;
        let mut content = std::fs::read(file).unwrap();
        let places: Vec<usize> =
            content.windows(name.len()).enumerate().filter(|(_, it)| *it == name).map(|(place, _)| place).collect();
        assert!(!places.is_empty(), "{}", file.display());
        for place in places {
            content[place..place + name.len()].copy_from_slice(&other);
        }
        self.replace(file, &content);
    }

    /// Gives `nixlAgent::releaseXferReq`, which is required, another name in NIXL and in what calls it.
    pub fn rename_release_of_nixl(&self) {
        let is_binding =
            |path: &PathBuf| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("_bindings."));
        for path in self.files_named("libnixl.so").into_iter().chain(self.files().into_iter().filter(is_binding)) {
            self.rename_function(&path, b"14releaseXferReqEP12nixlXferReqH");
        }
    }
}

/// A running peer program; ends with its test.
pub struct Peer {
    process: Child,
    stdin: ChildStdin,
    lines: Receiver<Value>,
    kept: Vec<Value>,
    last: u64,
    /// What it said first.
    pub ready: Value,
}

impl fmt::Debug for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Peer").field("ready", &self.ready).finish_non_exhaustive()
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Pages of a peer: bytes of each, their number.
pub type Pages = (u64, u64);
/// Pages that the sockets hold at once.
pub const SMALL: Pages = (4096, 64);
/// Pages that they do not.
pub const BIG: Pages = (1 << 20, 64);

/// A prefill and a decode that know each other.
pub fn pair(release: &Release, pages: Pages) -> (Peer, Peer) {
    let (mut prefill, mut decode) = (Peer::start(release, "prefill", pages), Peer::start(release, "decode", pages));
    prefill.ask(json!({"do": "connect", "peer": decode.ready}));
    decode.ask(json!({"do": "connect", "peer": prefill.ready}));
    (prefill, decode)
}

impl Peer {
    /// Starts one and waits until it is ready.
    pub fn start(release: &Release, role: &str, (page, pages): Pages) -> Self {
        let script = repository().join(format!("tests/native/{}_peer.py", release.engine()));
        let mut command = Command::new(&release.python);
        command.arg(script).args([role, "--page", &page.to_string(), "--pages", &pages.to_string()]);
        Self::run(command.args(&release.arguments).envs(&release.environment))
    }

    /// Starts another program that talks as the peers do (`tests/native/lines.py`).
    pub fn run(command: &mut Command) -> Self {
        let mut process = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        let (stdin, stdout) = (process.stdin.take().unwrap(), BufReader::new(process.stdout.take().unwrap()));
        let (tell, lines) = mpsc::channel();
        thread::spawn(move || {
            for line in stdout.lines().map_while(Result::ok) {
                if tell.send(serde_json::from_str(&line).unwrap_or(Value::String(line))).is_err() {
                    return;
                }
            }
        });
        let mut peer = Self { process, stdin, lines, kept: Vec::new(), last: 0, ready: Value::Null };
        peer.ready = peer.lines.recv_timeout(PATIENCE).unwrap_or_else(|error| panic!("{command:?}: {error}"));
        assert_eq!(peer.ready["ready"], true, "{:?}", peer.ready);
        peer
    }

    /// Its process.
    pub fn key(&self) -> ProcessKey {
        discover::process_key(self.process.id()).unwrap()
    }

    /// Makes `/proc/PID/cmdline` say that it is a scheduler of SGLang: the title is written where its arguments are, as
    /// `setproctitle` does.
    pub fn pose_as_scheduler(&self) {
        let stat = procfs::process::Process::new(self.process.id().try_into().unwrap()).unwrap().stat().unwrap();
        let (start, end) = (stat.arg_start.unwrap(), stat.arg_end.unwrap());
        let mut title = b"sglang::scheduler_TP0".to_vec();
        title.resize((end - start) as usize, 0);
        let memory = std::fs::OpenOptions::new().write(true).open(format!("/proc/{}/mem", self.process.id())).unwrap();
        memory.write_all_at(&title, start).unwrap();
    }

    /// Gives a command and waits for the answer, which must not be an exception.
    pub fn ask(&mut self, command: Value) -> Value {
        let answer = self.try_ask(command);
        assert!(answer.get("raised").is_none(), "{answer}");
        answer
    }

    /// Gives a command and waits for the answer.
    pub fn try_ask(&mut self, command: Value) -> Value {
        let id = self.send(command);
        self.answer(id, PATIENCE).unwrap_or_else(|| panic!("no answer from {:?}", self.ready))
    }

    /// Gives a command. What it says to it is what [`Peer::answer`] returns.
    pub fn send(&mut self, mut command: Value) -> u64 {
        self.last += 1;
        command["id"] = self.last.into();
        writeln!(self.stdin, "{command}").unwrap();
        self.last
    }

    /// The answer to a command, if it comes in time.
    pub fn answer(&mut self, id: u64, patience: Duration) -> Option<Value> {
        let deadline = Instant::now() + patience;
        loop {
            if let Some(place) = self.kept.iter().position(|answer| answer["id"] == id) {
                return Some(self.kept.swap_remove(place));
            }
            match self.lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(line) => self.kept.push(line),
                Err(RecvTimeoutError::Timeout) => return None,
                Err(RecvTimeoutError::Disconnected) => panic!("{:?} has ended", self.ready),
            }
        }
    }

    /// SIGSTOP.
    pub fn stop(&self) {
        self.signal(Signal::STOP);
    }

    /// SIGCONT.
    pub fn go_on(&self) {
        self.signal(Signal::CONT);
    }

    /// SIGKILL.
    pub fn kill(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.process), signal).unwrap();
    }
}
