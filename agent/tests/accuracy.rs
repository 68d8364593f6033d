//! How often the diagnosis is right, on simulated servers with faults of every family: it never names a wrong cause with
//! high confidence, never alerts on what is healthy, slow or backpressured, and names every stuck request's cause in time.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

#[path = "judge/judge.rs"]
mod judge;

use std::{
    collections::BTreeMap,
    env,
    fmt::Write as _,
    sync::{
        Mutex,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::Instant,
};

use dislodge::{
    event::clock::Monotonic,
    rule::load,
    simulate::{Settings, Support, simulate},
};
use judge::{Finding, core, judge};

/// How many schedules, unless DISLODGE_SCHEDULES says otherwise.
const SCHEDULES: u64 = 10_000;
/// The first seed, unless DISLODGE_SEED says otherwise.
const SEED: u64 = 1;

fn number(variable: &str, default: u64) -> u64 {
    env::var(variable).map_or(default, |value| value.parse().unwrap())
}

/// What was said in all schedules.
#[derive(Default)]
struct Total {
    pairs: BTreeMap<(&'static str, &'static str), u64>,
    schedules: u64,
    not_judged: BTreeMap<&'static str, u64>,
    alerts: u64,
    diagnosed: u64,
    not_shown: u64,
    findings: Vec<(Settings, Finding)>,
}

fn run(seeds: std::ops::Range<u64>) -> Total {
    let next = AtomicU64::new(seeds.start);
    let total = Mutex::new(Total::default());
    let work = || {
        let mut core = core(load::defaults().unwrap());
        while let seed = next.fetch_add(1, Ordering::Relaxed)
            && seed < seeds.end
        {
            let settings = Settings::of_seed(seed);
            if let Support::NotYet(_) = settings.family.support() {
                *total.lock().unwrap().not_judged.entry(settings.family.name()).or_default() += 1;
                continue;
            }
            let judgement = judge(simulate(&settings), &mut core);
            let mut total = total.lock().unwrap();
            total.schedules += 1;
            total.alerts += judgement.alerts;
            total.diagnosed += judgement.diagnosed;
            total.not_shown += judgement.not_shown;
            judgement.pairs.into_iter().for_each(|pair| *total.pairs.entry(pair).or_default() += 1);
            total.findings.extend(judgement.findings.into_iter().map(|finding| (settings, finding)));
        }
    };
    let threads = thread::available_parallelism().map_or(1, usize::from);
    thread::scope(|scope| (0..threads).for_each(|_| drop(scope.spawn(work))));
    total.into_inner().unwrap()
}

/// The matrix as a table of Markdown: truth downwards, diagnosis across.
fn matrix(total: &Total) -> String {
    let mut said: Vec<&str> = total.pairs.keys().map(|(_, said)| *said).collect();
    said.sort_unstable();
    said.dedup();
    let mut table = format!("| truth \\ diagnosis | {} |\n|---|{}\n", said.join(" | "), "---|".repeat(said.len()));
    let mut truths: Vec<&str> = total.pairs.keys().map(|(truth, _)| *truth).collect();
    truths.dedup();
    for truth in truths {
        write!(table, "| {truth} |").unwrap();
        for said in &said {
            let count = total.pairs.get(&(truth, *said)).map_or(String::new(), u64::to_string);
            write!(table, " {count} |").unwrap();
        }
        table.push('\n');
    }
    table
}

fn command(settings: &Settings) -> String {
    let Settings { family, seed, requests, ranks } = settings;
    format!("dislodge simulate --family {} --seed {seed} --requests {requests} --ranks {ranks}", family.name())
}

#[test]
fn no_wrong_cause_no_false_alert_and_every_stuck_request_in_time() {
    let (first, count) = (number("DISLODGE_SEED", SEED), number("DISLODGE_SCHEDULES", SCHEDULES));
    let began = Instant::now();
    let total = run(first..first + count);
    println!("{}", matrix(&total));
    let Total { schedules, not_judged, alerts, diagnosed, not_shown, findings, .. } = &total;
    println!(
        "{count} seeds from {first}, {schedules} judged in {:.1} s; {diagnosed} stuck requests diagnosed in time, {alerts} alerts \
         in time; {not_shown} stuck while what shows it could not be seen",
        began.elapsed().as_secs_f64()
    );
    println!("not judged, for want of a cause: {not_judged:?}");
    let mut kinds: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (settings, Finding { request, at, what }) in findings {
        let Monotonic(at) = at;
        let line = format!(
            "  {:.1} s, pid {}, sender {}: {}",
            (*at as f64 - 1e12) / 1e9,
            request.process.pid,
            request.serial,
            command(settings)
        );
        kinds.entry(format!("{}: {what:?}", settings.family.name())).or_default().push(line);
    }
    for (kind, lines) in &kinds {
        println!("{} × {kind}", lines.len());
        lines.iter().take(3).for_each(|line| println!("{line}"));
    }
    assert!(findings.is_empty(), "{} disagreements, above", findings.len());
    assert!(diagnosed * 10 > *schedules && alerts * 20 > *schedules, "the schedules show little");
}
