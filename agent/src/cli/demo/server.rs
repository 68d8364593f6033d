//! The demo's server process: carried inside the agent, written to a temporary folder, run with the Python at hand.

use std::{
    fs,
    io::{BufRead as _, BufReader, Write as _},
    path::{Path, PathBuf},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
};

use anyhow::{Context as _, bail};
use serde_json::Value;

/// The hook's package.
const HOOK: &[(&str, &[u8])] = &include!(concat!(env!("OUT_DIR"), "/hook_files.rs"));
/// The server.
const DEMO: &[(&str, &[u8])] = &include!(concat!(env!("OUT_DIR"), "/demo_files.rs"));
/// Programs that may be a Python that is new enough.
const PYTHONS: [&str; 7] = ["python3", "python3.14", "python3.13", "python3.12", "python3.11", "python3.10", "python"];
/// Exits with 0 on a Python that is new enough.
const NEW_ENOUGH: &str = "import sys; sys.exit(sys.version_info < (3, 10))";

/// The running server; ended when dropped.
#[derive(Debug)]
pub(super) struct DemoServer {
    child: Child,
    commands: ChildStdin,
    answers: BufReader<ChildStdout>,
    pid: u32,
}

impl DemoServer {
    /// Writes the server and the hook into `folder` and starts it.
    pub(super) fn start(folder: &Path, python: Option<&str>) -> anyhow::Result<Self> {
        let python = match python {
            Some(python) if is_new_enough(python) => python,
            Some(python) => bail!("{python} is not a Python 3.10 or newer"),
            None => PYTHONS
                .into_iter()
                .find(|python| is_new_enough(python))
                .context("no Python 3.10 or newer on PATH; install one or name it with --python")?,
        };
        let hook = folder.join("hook");
        write(&hook, HOOK)?;
        write(folder, DEMO)?;
        let mut child = Command::new(python)
            .arg(folder.join("demo").join("prefill_server.py"))
            .env("PYTHONPATH", &hook)
            .env("PYTHONDONTWRITEBYTECODE", "1")
            .env_remove("SGLANG_PLUGINS")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .with_context(|| format!("starting {python}"))?;
        let commands = child.stdin.take().context("the server's stdin")?;
        let answers = BufReader::new(child.stdout.take().context("the server's stdout")?);
        let pid = child.id();
        let mut server = Self { child, commands, answers, pid };
        server.answer().context("the demo's server did not start")?;
        Ok(server)
    }

    pub(super) fn pid(&self) -> u32 {
        self.pid
    }

    /// Gives the server a command and waits for its answer.
    pub(super) fn ask(&mut self, command: &str) -> anyhow::Result<Value> {
        writeln!(self.commands, "{command}").with_context(|| format!("asking the server for `{command}`"))?;
        let answer = self.answer()?;
        match answer.get("error") {
            Some(error) => bail!("the server could not do `{command}`: {error}"),
            None => Ok(answer),
        }
    }

    fn answer(&mut self) -> anyhow::Result<Value> {
        let mut line = String::new();
        self.answers.read_line(&mut line)?;
        if line.is_empty() {
            bail!("the server ended");
        }
        serde_json::from_str(&line).with_context(|| format!("the server answered {line:?}"))
    }
}

impl Drop for DemoServer {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn is_new_enough(python: &str) -> bool {
    Command::new(python).args(["-c", NEW_ENOUGH]).output().is_ok_and(|output| output.status.success())
}

fn write(folder: &Path, files: &[(&str, &[u8])]) -> anyhow::Result<()> {
    for (name, content) in files {
        let path: PathBuf = folder.join(name);
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent).with_context(|| format!("making {}", parent.display()))?;
        }
        fs::write(&path, content).with_context(|| format!("writing {}", path.display()))?;
    }
    Ok(())
}
