//! `dislodge simulate`: a recording of a server that never was, and what is true of its requests.

use std::{io::Write as _, path::PathBuf, process::ExitCode};

use clap::Args;
use dislodge::{
    check::read_rules,
    record::folder::write_whole,
    simulate::{Family, Settings, Simulation, recording, simulate, truth::Truth},
};
use serde::Serialize;

use super::{fail, reject};

#[derive(Args, Debug)]
#[command(after_help = families())]
pub(super) struct Simulate {
    /// Which faults: a family's name; `all` lets the seed choose family, requests and ranks
    #[arg(long, value_name = "NAME", default_value = "all")]
    family: String,
    /// Decides everything else: the same seed, the same stream
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Requests; some families add one
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=10_000))]
    requests: Option<u16>,
    /// Ranks of the server's tensor-parallel group
    #[arg(long, value_name = "R", value_parser = clap::value_parser!(u16).range(1..=64))]
    ranks: Option<u16>,
    /// Where to write the recording; the truth goes to FILE.truth.json, or without FILE to standard output
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
}

/// What is written of the truth.
#[derive(Serialize)]
struct Told {
    family: Family,
    name: &'static str,
    story: &'static str,
    seed: u64,
    requests: usize,
    ranks: usize,
    truth: Vec<Truth>,
}

fn families() -> String {
    let lines = Family::ALL.map(|family| format!("  {:<23}{}\n", family.name(), family.story()));
    format!("Families:\n{}", lines.concat())
}

impl Simulate {
    pub(super) fn run(self) -> ExitCode {
        let mut settings = Settings::of_seed(self.seed);
        if self.family != "all" {
            match Family::of_name(&self.family) {
                Some(family) => settings = Settings { family, requests: 4, ranks: 1, ..settings },
                None => return fail(format!("no family `{}`: `dislodge simulate --help` lists them", self.family)),
            }
        }
        settings.requests = self.requests.map_or(settings.requests, usize::from);
        settings.ranks = self.ranks.map_or(settings.ranks, usize::from);
        let Simulation { inputs, truth, .. } = simulate(&settings);
        let Settings { family, seed, requests, ranks } = settings;
        let told = Told { family, name: family.name(), story: family.story(), seed, requests, ranks, truth };
        let json = match serde_json::to_string_pretty(&told) {
            Ok(json) => json + "\n",
            Err(error) => return fail(error),
        };
        let Some(file) = &self.output else {
            let written = std::io::stdout().write_all(json.as_bytes());
            return written.map_or_else(fail, |()| ExitCode::SUCCESS);
        };
        let rules = match read_rules(None) {
            Ok(rules) => rules,
            Err(problems) => return reject(&problems),
        };
        let recording = recording(inputs, rules);
        let mut beside = file.clone().into_os_string();
        beside.push(".truth.json");
        let written = write_whole(file, |out| recording.write(out))
            .and_then(|()| write_whole(beside.as_ref(), |out| out.write_all(json.as_bytes())));
        written.map_or_else(|error| fail(format!("{}: {error}", file.display())), |()| ExitCode::SUCCESS)
    }
}
