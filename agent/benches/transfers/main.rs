//! What the probes on transfer engines cost the servers: real NIXL and Mooncake over TCP on loopback, with probes and
//! without, taking turns in one run; and what each probe costs. Needs root and what `tests/native/prepare.py` needs.
//!
//!     cargo bench --bench transfers [-- ENGINE...]     e.g. -- nixl mooncake-0.3.9
//!
//! How busy the machine was meanwhile is said by a second turn without probes: its ratio to the first is what a ratio of
//! one looks like here.
#![expect(clippy::expect_used, reason = "a benchmark that cannot go on fails")]

mod peer;
mod programs;
mod trap;
mod turns;

use std::{
    collections::BTreeMap,
    fs,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use aya::sys::{Stats, enable_stats};
use dislodge::{
    event::ProcessKey,
    kernel::{
        Kernel, Sizes,
        canary::ReturnProbes,
        plan::{Planned, ProbeState, Site, Surveyed, plan},
        probe::ProbeSet,
    },
    target::{discover::process_key, library, symbol::SymbolTable},
};
use peer::{Bed, Pair};
use programs::{Account, Names};
use trap::Traps;
use turns::{Spread, undisturbed};

const ENGINES: [&str; 3] = ["nixl-1.5.1", "mooncake-0.3.13.post1", "mooncake-0.3.9"];
const ROUNDS: usize = 5;
/// How long a turn is: short enough that all states meet the same machine.
const TURN: Duration = Duration::from_millis(200);
/// Within a turn transfers are timed a few at a time, in less than the scheduler's turns (some 3 ms).
const FEW: f64 = 0.001;
/// How often the kernel's account of programs is read, for a median.
const ACCOUNTS: usize = 15;
/// Bytes of a page, and how many pages a transfer has.
const TRANSFERS: [(u64, u64); 3] = [(64 << 10, 4), (64 << 10, 64), (1 << 20, 16)];
/// A page that the sockets between two processes don't hold.
const ENDLESS: u64 = 64 << 20;
/// The agent's defaults.
const SIZES: Sizes = Sizes { ring: 8 << 20, calls: 8192 };

fn main() {
    // Cargo runs benchmarks as tests too; there is nothing to measure then.
    if std::env::args().any(|argument| argument == "--test") {
        return;
    }
    let only: Vec<String> = std::env::args().skip(1).filter(|argument| !argument.starts_with('-')).collect();
    let chosen = |engine: &&str| only.is_empty() || only.iter().any(|part| engine.contains(part.as_str()));
    let engines: Vec<&str> = ENGINES.into_iter().filter(chosen).collect();
    let bed = Bed::prepare(&engines);

    let (mut kernel, mut ring) = Kernel::load(SIZES).expect("BPF programs load (root?)");
    let stop = Arc::new(AtomicBool::new(false));
    let drained = thread::spawn({
        let stop = Arc::clone(&stop);
        move || {
            while !stop.load(Ordering::Relaxed) {
                ring.drain(usize::MAX, |event| assert!(event.is_ok()));
                thread::sleep(Duration::from_millis(10)); // as the agent does
            }
        }
    });
    println!("load before: {}", load());
    let names = programs::names();
    let traps = {
        let _on = enable_stats(Stats::RunTime).expect("the kernel counts programs' runs");
        Traps::measure(&mut kernel, &names, process_key(std::process::id()).expect("this process runs"))
    };
    for (prologue, trap) in traps.all() {
        println!("a trap on {prologue:?}: {trap:.0} ns, without its program");
    }
    let mut return_trap = f64::NAN;
    for engine in engines {
        println!("\n{engine}");
        // It is the kernel's: an engine whose loop does not come by the probe is told with that of the one before.
        return_trap = polls(&mut kernel, &names, &bed, engine, &traps).unwrap_or(return_trap);
        for (page, pages) in TRANSFERS {
            transfers(&mut kernel, &names, &bed, engine, (page, pages), &|site| {
                cost_of_traps(&traps, return_trap, site)
            });
        }
    }
    println!("\nBPF maps:");
    for map in programs::maps() {
        let taken = map.taken.map_or_else(String::new, |taken| format!(", {taken} taken after the last run"));
        println!("  {:16} {:9} entries {:9} bytes{taken}", map.name, map.entries, map.bytes);
    }
    println!("load after: {}", load());
    stop.store(true, Ordering::Relaxed);
    drained.join().expect("the reader ends");
}

fn load() -> String {
    fs::read_to_string("/proc/loadavg").expect("procfs is mounted").trim().to_owned()
}

/// Puts the probes of `sets` on every library of a process.
fn attach(kernel: &mut Kernel, key: ProcessKey, sets: &[ProbeSet]) {
    let libraries = library::find(key.pid).expect("the peer can be looked at").mapped;
    let rows = libraries
        .iter()
        .flat_map(|it| kernel.attach_library(key, &Surveyed::of(it.clone()), sets, &ReturnProbes::Allowed));
    for row in rows {
        assert!(!matches!(row.state, ProbeState::Refused { .. }), "{row:?}");
    }
}

/// Where the probes of `set` are in a process.
fn sites(key: ProcessKey, set: ProbeSet) -> Vec<Site> {
    let libraries = library::find(key.pid).expect("the peer can be looked at").mapped;
    let planned = libraries.iter().flat_map(|it| plan(it.role, &SymbolTable::read(&it.path).expect("a library")));
    planned
        .filter_map(|planned| match planned {
            Planned::At(site) if site.spec.set == set => Some(site),
            _ => None,
        })
        .collect()
}

fn cost_of_traps(traps: &Traps, return_trap: f64, site: &Site) -> f64 {
    // A return probe has a breakpoint at the entry, too; with a program there, it is the same.
    traps.at_entry(site.prologue) + site.spec.exit.map_or(0.0, |_| return_trap)
}

/// The tight loop of status polls, whose transfer cannot end because the decode is stopped. Returns what a return probe
/// costs beside its program and the trap at the entry; nothing when the loop calls another function than the probed one.
fn polls(kernel: &mut Kernel, names: &Names, bed: &Bed, engine: &str, traps: &Traps) -> Option<f64> {
    let mut pair = Pair::start(bed, engine, ENDLESS, 1);
    pair.decode.stop();
    let prefill = pair.prefill.key();
    let few = (FEW / undisturbed(pair.polls_for(TURN, 100))) as u64;
    let sets: [&[ProbeSet]; 4] = [&[], &[ProbeSet::Transfers], &[ProbeSet::Transfers, ProbeSet::Polls], &[]];
    let rows = turns::take(ROUNDS, sets.len(), |state| {
        attach(kernel, prefill, sets[state]);
        let each = undisturbed(pair.polls_for(TURN, few));
        kernel.detach(prefill);
        kernel.wait_for_removal();
        each * 1e9
    });
    println!("  polls, {few} at a time, {ROUNDS} rounds:");
    for (state, name) in ["no probes", "default set", "a look at polls", "no probes, again"].into_iter().enumerate() {
        let each = turns::median(turns::column(&rows, state));
        println!("    {name:17} {each:5.0} ns per poll, {}", times(turns::ratio(&rows, 0, state)));
    }

    let _on = enable_stats(Stats::RunTime).expect("the kernel counts programs' runs");
    let poll = sites(prefill, ProbeSet::Polls).into_iter().next().expect("the engine's polls can be probed");
    let (mut returns, mut programs) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        let without = undisturbed(pair.polls_for(TURN, few)) * 1e9;
        attach(kernel, prefill, &[ProbeSet::Polls]);
        let with = undisturbed(pair.polls_for(TURN, few)) * 1e9;
        let of = pair.endless();
        let before = programs::runs(names);
        pair.polls(few, &of);
        let ran = programs::between(&before, &programs::runs(names));
        kernel.detach(prefill);
        kernel.wait_for_removal();
        let both = poll.spec.entry.into_iter().chain(poll.spec.exit).map(|program| ran[program].each()).sum::<f64>();
        programs.push(both);
        returns.push(with - without - both - traps.at_entry(poll.prologue));
    }
    let (program, back) = (turns::median(programs), Spread::of(returns));
    if !back.middle.is_finite() {
        println!("    the loop does not call {}: a look sees nothing of it", poll.spec.function);
        return None;
    }
    println!(
        "    of a look: programs {program:.0} ns, trap at the entry ({:?}) {:.0}, at the return {:.0} ({:.0} to {:.0})",
        poll.prologue,
        traps.at_entry(poll.prologue),
        back.middle,
        back.low,
        back.high
    );
    Some(back.middle)
}

/// Transfers one after the other, in turns without and with the default set on both processes, and each probe's part.
fn transfers(
    kernel: &mut Kernel,
    names: &Names,
    bed: &Bed,
    engine: &str,
    (page, pages): (u64, u64),
    traps: &dyn Fn(&Site) -> f64,
) {
    let mut pair = Pair::start(bed, engine, page, pages);
    let all: Vec<u64> = (0..pages).collect();
    let keys = [pair.prefill.key(), pair.decode.key()];
    pair.transfers(20, &all);
    let few = ((FEW / undisturbed(pair.transfers_for(TURN, 1, &all))) as u64).max(1);
    let mut counted = 0;
    let rows = turns::take(ROUNDS, 3, |state| {
        if state == 1 {
            keys.into_iter().for_each(|key| attach(kernel, key, &[ProbeSet::Transfers]));
            pair.transfers(5, &all); // the breakpoints' pages are copied when they are first hit
        }
        let times = pair.transfers_for(TURN, few, &all);
        counted += times.len() as u64 * few;
        for key in keys.into_iter().filter(|_| state == 1) {
            let counters = kernel.counters(key).expect("it is traced");
            assert_eq!((counters.lost(), counters.calls_full), (0, 0), "{counters:?}");
            kernel.detach(key);
            kernel.wait_for_removal();
        }
        undisturbed(times)
    });
    let seconds = turns::median(turns::column(&rows, 0));
    println!("  {pages} × {} KiB, {few} at a time, {counted} transfers in {ROUNDS} rounds:", page >> 10);
    println!("    no probes         {:9.0} transfers/s, {:.1} µs each", 1.0 / seconds, seconds * 1e6);
    println!("    default set       {}", times(turns::ratio(&rows, 0, 1)));
    println!("    no probes, again  {}", times(turns::ratio(&rows, 0, 2)));

    let _on = enable_stats(Stats::RunTime).expect("the kernel counts programs' runs");
    for (side, key) in ["prefill", "decode"].into_iter().zip(keys) {
        attach(kernel, key, &[ProbeSet::Transfers]);
        pair.transfers(5, &all);
        let each = (10 * few).min(100);
        let accounts: Vec<Account> = (0..ACCOUNTS)
            .map(|_| {
                let before = programs::runs(names);
                pair.transfers(each, &all);
                programs::between(&before, &programs::runs(names))
            })
            .collect();
        kernel.detach(key);
        kernel.wait_for_removal();
        let total = report(&sites(key, ProbeSet::Transfers), &accounts, each, traps);
        println!("    {side}: {:.2} µs per transfer, {:.2} % of it", total / 1e3, total / seconds / 1e7);
    }
}

/// Prints the functions that were hit; returns what all of them cost per transfer, in nanoseconds.
fn report(sites: &[Site], accounts: &[Account], transfers: u64, traps: &dyn Fn(&Site) -> f64) -> f64 {
    // Functions that share their programs are told together: runs are counted by program.
    let mut groups: BTreeMap<[Option<&str>; 2], Vec<&Site>> = BTreeMap::new();
    for site in sites {
        groups.entry([site.spec.entry, site.spec.exit]).or_default().push(site);
    }
    let mut total = 0.0;
    for (programs, sites) in groups {
        let runs =
            |account: &Account| programs.map(|name| name.and_then(|it| account.get(it)).copied().unwrap_or_default());
        let hits: u64 = accounts.iter().map(|account| runs(account).map(|it| it.count)).map(|[a, b]| a.max(b)).sum();
        let mut names: Vec<&str> = sites.iter().map(|site| site.spec.function).collect();
        names.dedup();
        let (names, prologue) = (names.join(", "), sites[0].prologue);
        if hits == 0 {
            continue;
        }
        let each = |account| runs(account).map(|it| if it.count == 0 { 0.0 } else { it.each() }).iter().sum::<f64>();
        let program = turns::median(accounts.iter().map(each).collect());
        let hit = program + traps(sites[0]);
        let per_transfer = hits as f64 / (transfers * accounts.len() as u64) as f64;
        total += hit * per_transfer;
        println!(
            "      {names}: {prologue:?}, {per_transfer:.2} hits × {hit:.0} ns, {program:.0} of them in its programs"
        );
    }
    total
}

/// How many times as fast: the median, and the middle half.
fn times(ratio: Spread) -> String {
    format!("{:.3} × as fast ({:.3} to {:.3})", ratio.middle, ratio.low, ratio.high)
}
