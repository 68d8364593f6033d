//! `dislodge explain`: one request, from a running agent or from a recording.
//!
//! The running agent is asked twice: over HTTP for what it knows now, and, where it records and this runs on its node as
//! its user, by a signal for the recording, as `dislodge record` does: time lines name other requests too, and do not go
//! out through the port of the metrics.

use std::{
    fs::File,
    io::{BufReader, IsTerminal as _},
    path::{Path, PathBuf},
    process::ExitCode,
    time::Duration,
};

use clap::Args;
use dislodge::{
    check::read_rules,
    explain::{
        answer::{Answer, Explanation, Live, Origin},
        recording::{self, MAX_EXPLAINED},
        text::{Style, not_found, render},
        wanted::Wanted,
    },
    problem::Problem,
    record::{reader::Reader, replay::Replay},
    rule::RuleSet,
};
use jiff::Timestamp;
use reqwest::{Client, Url, redirect};

use super::{Output, fail, record::ask_for_recording, reject};

/// How long the agent may take to answer.
const PATIENCE: Duration = Duration::from_secs(10);
/// Longest answer of an agent that is taken, in bytes.
const MAX_ANSWER: usize = 16 << 20;

#[derive(Args, Debug)]
pub(super) struct Explain {
    /// A room, or a whole request id
    #[arg(value_name = "ROOM|RID")]
    name: String,
    /// The running agent
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:9464", conflicts_with = "file")]
    agent: Url,
    /// A recording, instead of a running agent
    #[arg(long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// As it was before this time (RFC 3339, such as 2026-01-31T12:00:00Z); in a recording
    #[arg(long, visible_alias = "until", value_name = "TIME", requires = "file")]
    at: Option<Timestamp>,
    /// Only the one of this server process, where several have it
    #[arg(long, value_name = "PID")]
    server: Option<u32>,
    /// Only the one of this sender, where several have it
    #[arg(long, value_name = "N")]
    serial: Option<u64>,
    /// Folder of rules for a recording, instead of those that come with the agent
    #[arg(long, value_name = "DIR")]
    rules: Option<PathBuf>,
    /// How to write the answer
    #[arg(short, long, value_enum, default_value_t)]
    output: Output,
}

/// Why there is no answer.
enum Failure {
    /// It does not work here or now.
    Message(String),
    /// The rules are wrong.
    Rules(Vec<Problem>),
}

impl Explain {
    pub(super) fn run(self) -> ExitCode {
        let wanted = Wanted::new(self.name.clone(), self.server, self.serial);
        let answer = match &self.file {
            Some(file) => of_file(file, self.rules.as_deref(), &wanted, self.at),
            None => self.of_agent(&wanted),
        };
        match answer {
            Ok(answer) => self.tell(&answer),
            Err(Failure::Message(message)) => fail(message),
            Err(Failure::Rules(problems)) => reject(&problems),
        }
    }

    fn tell(&self, answer: &Answer) -> ExitCode {
        if self.output == Output::Json {
            match serde_json::to_string_pretty(answer) {
                Ok(json) => println!("{json}"),
                Err(error) => return fail(error),
            }
        }
        if answer.requests.is_empty() {
            return fail(not_found(answer));
        }
        if self.output == Output::Text {
            let is_terminal = std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none();
            print!("{}", render(answer, if is_terminal { Style::Bold } else { Style::Plain }));
        }
        ExitCode::SUCCESS
    }

    fn of_agent(&self, wanted: &Wanted) -> Result<Answer, Failure> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let live = runtime.map_err(|error| Failure::Message(error.to_string()))?.block_on(get(&self.agent, wanted));
        let live = live.map_err(|error| {
            let agent = self.agent.as_str();
            Failure::Message(format!(
                "{agent}: {error}; is the agent running (--agent URL), or is there a --file FILE?"
            ))
        })?;
        let mut answer = live.answer;
        let Some(folder) = &live.recordings else {
            answer.notes.push("no timeline: the agent records nothing (set `record.folder`)".to_owned());
            return Ok(answer);
        };
        let dump = match ask_for_recording(folder) {
            Ok(dump) => dump,
            Err(error) => {
                answer.notes.push(format!("no timeline: the agent's recording cannot be had from here: {error}"));
                return Ok(answer);
            }
        };
        let recorded = of_file(&dump, self.rules.as_deref().or(live.rules_folder.as_deref()), wanted, None);
        // It was made for this alone, and takes the place of one that an alert made.
        if let Err(error) = std::fs::remove_file(&dump) {
            answer.notes.push(format!("{}: {error}", dump.display()));
        }
        Ok(joined(answer, recorded?))
    }
}

/// What a running agent knows, with the time lines of its recording; and what only the recording has.
fn joined(mut live: Answer, recorded: Answer) -> Answer {
    let is_same = |a: &Explanation, b: &Explanation| {
        (a.instance.pid, a.instance.start, a.instance.serial) == (b.instance.pid, b.instance.start, b.instance.serial)
    };
    let mut requests = std::mem::take(&mut live.requests);
    for explanation in recorded.requests {
        match requests.iter_mut().find(|known| is_same(known, &explanation)) {
            Some(known) => known.timeline = explanation.timeline,
            None => requests.push(explanation),
        }
    }
    requests.sort_by_key(|explanation| std::cmp::Reverse((explanation.instance.created, explanation.instance.serial)));
    let beyond = requests.split_off(requests.len().min(MAX_EXPLAINED));
    live.others.splice(0..0, beyond.into_iter().map(|explanation| explanation.instance));
    for other in recorded.others {
        if !live.others.iter().any(|known| (known.pid, known.serial) == (other.pid, other.serial)) {
            live.others.push(other);
        }
    }
    if let (Origin::Agent { recorded_since, .. }, Origin::Recording { first, .. }) = (&mut live.origin, recorded.origin)
    {
        *recorded_since = first;
    }
    live.searched.requests = live.searched.requests.max(recorded.searched.requests);
    live.searched.servers = live.searched.servers.max(recorded.searched.servers);
    live.notes.extend(recorded.notes);
    Answer { requests, ..live }
}

fn of_file(file: &Path, rules: Option<&Path>, wanted: &Wanted, until: Option<Timestamp>) -> Result<Answer, Failure> {
    let name = file.display().to_string();
    let error = |error: &dyn std::fmt::Display| Failure::Message(format!("{name}: {error}"));
    let replay = || -> Result<Replay<BufReader<File>>, Failure> {
        let rules: RuleSet = read_rules(rules).map_err(Failure::Rules)?;
        let reader = File::open(file).map_err(Into::into).and_then(|file| Reader::open(BufReader::new(file)));
        Ok(Replay::new(reader.map_err(|source| error(&source))?, rules))
    };
    recording::explain((replay()?, replay()?), &name, wanted, until).map_err(|source| error(&source))
}

async fn get(agent: &Url, wanted: &Wanted) -> Result<Live, String> {
    let mut url = agent.clone();
    url.set_path(&format!("{}/explain", agent.path().trim_end_matches('/')));
    wanted.to_query(&mut url);
    // An error says that somebody has installed one already, which is what is needed.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let mut builder = Client::builder().timeout(PATIENCE).redirect(redirect::Policy::none()).no_proxy();
    if url.scheme() == "http" {
        // Without this the system's authorities are looked for, and a container often has none.
        builder = builder.tls_certs_only([]);
    }
    let client = builder.build().map_err(|error| error.to_string())?;
    let mut response = client.get(url).send().await.map_err(|error| in_full(&error))?;
    let status = response.status();
    let mut body = Vec::new();
    while let Some(chunk) = response.chunk().await.map_err(|error| in_full(&error))? {
        body.extend_from_slice(&chunk);
        if body.len() > MAX_ANSWER {
            return Err(format!("answered more than {MAX_ANSWER} bytes"));
        }
    }
    if !status.is_success() {
        return Err(format!("answered {status}: an older agent, or something else"));
    }
    serde_json::from_slice(&body).map_err(|error| format!("answered something else: {error}"))
}

/// An error with its sources: reqwest's own words say only that something was wrong with the request.
fn in_full(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text = format!("{text}: {error}");
        source = error.source();
    }
    text
}
