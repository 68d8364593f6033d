//! A process that makes marks as a test tells it to, through the marker library that the hook loads.

use std::{
    fmt,
    io::{BufRead as _, BufReader, Write as _},
    os::unix::process::CommandExt as _,
    path::PathBuf,
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
};

use dislodge::{event::ProcessKey, target::discover};
use serde_json::Value;

use super::{environment, repository};

/// A running process; ends with its test.
pub struct Marker {
    process: Child,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
}

impl Drop for Marker {
    fn drop(&mut self) {
        self.kill();
    }
}

impl Marker {
    /// Starts one.
    pub fn start() -> Self {
        Self::titled("python3")
    }

    /// Starts one whose command line begins with this.
    pub fn titled(title: &str) -> Self {
        let library: PathBuf = repository().join("hook/dislodge_hook/marker/x86_64.so");
        let mut process = Command::new(environment::python().unwrap())
            .arg0(title)
            .arg(repository().join("agent/tests/support/marks.py"))
            .arg(library)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (stdin, stdout) = (process.stdin.take().unwrap(), BufReader::new(process.stdout.take().unwrap()));
        let mut marker = Self { process, stdin, stdout };
        assert_eq!(marker.answer(), "ready");
        marker
    }

    /// Its process.
    pub fn key(&self) -> ProcessKey {
        discover::process_key(self.process.id()).unwrap()
    }

    /// Gives a command and waits until it is done.
    pub fn tell(&mut self, command: &impl fmt::Display) -> Value {
        writeln!(self.stdin, "{command}").unwrap();
        self.answer()
    }

    fn answer(&mut self) -> Value {
        let mut line = String::new();
        self.stdout.read_line(&mut line).unwrap();
        serde_json::from_str(&line).unwrap_or_else(|error| panic!("`{line}`: {error}"))
    }

    /// Ends it at once.
    pub fn kill(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
