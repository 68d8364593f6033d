//! `dislodge replay`: what a recording says, told to the same core again.

use std::{
    fs::File,
    io::BufReader,
    path::PathBuf,
    process::ExitCode,
    time::{Duration, Instant},
};

use clap::Args;
use dislodge::{
    check::read_rules,
    event::clock::{Monotonic, WallClock},
    record::{
        reader::{End, Reader},
        replay::{Replay, Summary, Told},
    },
    rule::alert::AlertState,
    verdict::Verdict,
};
use jiff::Timestamp;
use serde::Serialize;

use super::{Output, fail, reject};

#[derive(Args, Debug)]
pub(super) struct ReplayCommand {
    /// The recording
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Stop before this time (RFC 3339, such as 2026-01-31T12:00:00Z)
    #[arg(long, value_name = "TIME")]
    until: Option<Timestamp>,
    /// How many times as fast as it happened, or `max`
    #[arg(long, value_name = "N", default_value = "max", value_parser = speed)]
    speed: Speed,
    /// Folder of rules that replaces the rules that come with the agent
    #[arg(long, value_name = "DIR")]
    rules: Option<PathBuf>,
    /// How to write verdicts and summary: JSON is one object a line
    #[arg(short, long, value_enum, default_value_t)]
    output: Output,
}

/// How fast a recording is replayed.
#[derive(Clone, Copy, Debug)]
enum Speed {
    Max,
    Times(f64),
}

fn speed(text: &str) -> Result<Speed, String> {
    if text == "max" {
        return Ok(Speed::Max);
    }
    let times = text.parse().ok().filter(|times: &f64| (0.001..=1_000_000.0).contains(times));
    times.map(Speed::Times).ok_or_else(|| "write `max` or a number from 0.001 to 1000000".to_owned())
}

/// Waits until a moment of the recording has come.
struct Pacer {
    speed: Speed,
    began: Option<(Instant, Monotonic)>,
}

impl Pacer {
    fn wait_for(&mut self, now: Monotonic) {
        let Speed::Times(times) = self.speed else { return };
        let (began, first) = *self.began.get_or_insert((Instant::now(), now));
        // A file may say anything: no wait is longer than a day.
        let after = Duration::from_secs_f64((now.since(first).as_secs_f64() / times).min(86_400.0));
        std::thread::sleep(after.saturating_sub(began.elapsed()));
    }
}

impl ReplayCommand {
    pub(super) fn run(self) -> ExitCode {
        let rules = match read_rules(self.rules.as_deref()) {
            Ok(rules) => rules,
            Err(problems) => return reject(&problems),
        };
        let name = self.file.display();
        let reader =
            match File::open(&self.file).map_err(Into::into).and_then(|file| Reader::open(BufReader::new(file))) {
                Ok(reader) => reader,
                Err(error) => return fail(format!("{name}: {error}")),
            };
        if rules.digest() != reader.header().rules {
            eprintln!("dislodge: {name}: other rules applied when it was recorded; --rules names a folder of rules");
        }
        let clock = reader.header().clock();
        let mut pacer = Pacer { speed: self.speed, began: None };
        let replayed = Replay::new(reader, rules).run(|told| {
            match told {
                Told::Tick(now) if self.until.is_some_and(|until| clock.timestamp(now) >= until) => return false,
                Told::Tick(now) => pacer.wait_for(now),
                Told::Verdict(verdict) => self.tell(verdict, &clock),
            }
            true
        });
        match replayed {
            Ok((summary, _)) => {
                self.conclude(&summary, &clock);
                ExitCode::SUCCESS
            }
            Err(error) => fail(format!("{name}: {error}")),
        }
    }

    fn tell(&self, verdict: &Verdict, clock: &WallClock) {
        match self.output {
            Output::Json => print_json(&Line::Verdict { time: clock.timestamp(verdict.at), verdict }),
            Output::Text => lines(verdict, clock).iter().for_each(|line| println!("{line}")),
        }
    }

    fn conclude(&self, summary: &Summary, clock: &WallClock) {
        let span = summary.span.map(|(first, last)| (clock.timestamp(first), clock.timestamp(last)));
        if self.output == Output::Json {
            return print_json(&Line::Summary { first: span.map(|it| it.0), last: span.map(|it| it.1), summary });
        }
        let Summary { events, requests, ticks, alerts, losses, dropped, other_rules, unknown, damaged, end, .. } =
            summary;
        println!("{events} events, {requests} requests, {ticks} ticks, {} alerts fired", alerts.values().sum::<u64>());
        if let Some((first, last)) = span {
            println!("from {first} to {last}");
        }
        for (rule, count) in alerts {
            println!("  {rule}: {count}");
        }
        let end = end.map_or("was not replayed to its end".to_owned(), in_words);
        println!("the recording {end}");
        if !alerts.is_empty() {
            println!("`dislodge explain --file {} ROOM|RID` tells the story of one request", self.file.display());
        }
        for (count, what) in [
            (*losses, "losses of events while it was recorded"),
            (dropped.inputs, "inputs before it that the recorder did not keep"),
            (dropped.not_recorded, "inputs that could not be recorded"),
            (*other_rules, "times other rules came to apply, which a recording does not have"),
            (*unknown, "items of a newer agent, passed over"),
            (*damaged, "damaged blocks, passed over"),
        ] {
            if count > 0 {
                println!("{count} {what}");
            }
        }
    }
}

/// How a recording ends.
pub(super) fn in_words(end: End) -> String {
    match end {
        End::Whole => "is whole".to_owned(),
        End::Cut { at } => format!("is cut after {at} bytes"),
        End::Damaged { at } => format!("is damaged from byte {at} on"),
    }
}

#[derive(Serialize)]
#[serde(rename_all = "snake_case")]
enum Line<'a> {
    Verdict {
        time: Timestamp,
        #[serde(flatten)]
        verdict: &'a Verdict,
    },
    Summary {
        first: Option<Timestamp>,
        last: Option<Timestamp>,
        #[serde(flatten)]
        summary: &'a Summary,
    },
}

fn print_json(line: &Line<'_>) {
    match serde_json::to_string(line) {
        Ok(json) => println!("{json}"),
        Err(error) => eprintln!("dislodge: {error}"),
    }
}

fn lines(verdict: &Verdict, clock: &WallClock) -> Vec<String> {
    let diagnosis = &verdict.diagnosis;
    let rid = verdict.rid.as_ref().map_or(String::new(), |rid| format!(", rid {}", rid.text));
    let mut lines = vec![format!(
        "{}  alert {} {}: {}, transfer {}, confidence {}; pid {}, room {}{rid}",
        clock.timestamp(verdict.at),
        verdict.rule,
        verdict.state.name(),
        diagnosis.cause,
        diagnosis.quiescence,
        diagnosis.confidence.name(),
        verdict.request.process.pid,
        verdict.room,
    )];
    if verdict.state == AlertState::Firing {
        lines.extend(diagnosis.evidence.iter().map(|evidence| {
            format!("{}    evidence ({}): {}", clock.timestamp(evidence.at), evidence.source.name(), evidence.fact)
        }));
    }
    lines
}
