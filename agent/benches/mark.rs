//! What a mark costs the server: the same loop of marks in a Python process, with the agent's probe on the marker and
//! without it, taking turns in one run, in processor time. Needs root; `cargo bench --bench mark`.
#![expect(clippy::expect_used, reason = "a benchmark that cannot go on fails")]

use std::{
    io::{BufRead as _, BufReader, Write as _},
    process::{Child, Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use dislodge::{
    kernel::{Kernel, Sizes},
    target::{discover::process_key, marker},
};

const ROUNDS: usize = 9;
const MARKS: u32 = 100_000;

/// Marks as many times as each line says, and answers with the nanoseconds per mark.
const SERVER: &str = r#"
import sys, time
from dislodge_hook import marks
marks.load()
mark = marks.mark
print("ready", flush=True)
for line in sys.stdin:
    count = int(line)
    began = time.process_time_ns()
    for _ in range(count):
        mark(12, 77, 0x201, 1)
    print((time.process_time_ns() - began) / count, flush=True)
"#;

struct Server {
    child: Child,
    answers: BufReader<std::process::ChildStdout>,
}

impl Server {
    fn start() -> Self {
        let hook = concat!(env!("CARGO_MANIFEST_DIR"), "/../hook");
        let mut child = Command::new("python3")
            .args(["-c", SERVER])
            .env("PYTHONPATH", hook)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("python3 runs");
        let answers = BufReader::new(child.stdout.take().expect("a pipe"));
        let mut server = Self { child, answers };
        assert_eq!(server.answer(), "ready");
        server
    }

    fn answer(&mut self) -> String {
        let mut line = String::new();
        self.answers.read_line(&mut line).expect("the server answers");
        line.trim().to_owned()
    }

    fn nanoseconds_per_mark(&mut self) -> f64 {
        let stdin = self.child.stdin.as_mut().expect("a pipe");
        writeln!(stdin, "{MARKS}").expect("the server takes commands");
        self.answer().parse().expect("a number")
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn main() {
    // Cargo runs benchmarks as tests too; there is nothing to measure then.
    if std::env::args().any(|argument| argument == "--test") {
        return;
    }
    let mut server = Server::start();
    let key = process_key(server.child.id()).expect("the server runs");
    let site = marker::find(key.pid).expect("the marker is mapped");
    let (mut kernel, mut ring) = Kernel::load(Sizes { ring: 8 << 20, calls: 1024 }).expect("BPF programs load (root?)");
    let stop = Arc::new(AtomicBool::new(false));
    let drained = thread::spawn({
        let stop = Arc::clone(&stop);
        move || {
            let mut count = 0;
            while !stop.load(Ordering::Relaxed) {
                count += ring.drain(usize::MAX, |event| assert!(event.is_ok()));
                thread::sleep(Duration::from_millis(10)); // as the agent does
            }
            count + ring.drain(usize::MAX, |event| assert!(event.is_ok()))
        }
    });
    let (mut without, mut with) = (Vec::new(), Vec::new());
    let (mut seen, mut lost) = (0, 0);
    for _ in 0..ROUNDS {
        without.push(server.nanoseconds_per_mark());
        kernel.attach(key, &site).expect("the probe attaches");
        with.push(server.nanoseconds_per_mark());
        let counters = kernel.counters(key).expect("it is traced");
        seen += counters.seen;
        lost += counters.lost();
        kernel.detach(key);
        kernel.wait_for_removal();
    }
    stop.store(true, Ordering::Relaxed);
    let delivered = drained.join().expect("the reader ends");
    let (without, with) = (median(without), median(with));
    println!("mark, medians of {ROUNDS} rounds of {MARKS} each, taking turns:");
    println!("  without probe {without:7.1} ns");
    println!("  with probe    {with:7.1} ns");
    println!("  the probe     {:7.1} ns per mark", with - without);
    println!("  seen {seen}, delivered {delivered}, lost {lost}");
}
