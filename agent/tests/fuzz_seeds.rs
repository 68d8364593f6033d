//! Every seed of `fuzz/run`, and every input that once broke something, goes through what is fuzzed.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

#[path = "../../fuzz/src/lib.rs"]
#[expect(unreachable_pub, reason = "where libFuzzer runs it, it is a crate")]
mod fuzz;
#[path = "fuzz_seeds/make.rs"]
mod make;

use std::{
    fs,
    path::{Path, PathBuf},
};

use dislodge::{event::decode::decode, record::reader::Reader, remedy::control::Reply, rule::load, target::mapping};

/// What is run on an input.
type Run = fn(&[u8]);

const TARGETS: [(&str, Run); 6] = [
    ("decode", fuzz::decode),
    ("events", fuzz::events),
    ("rules", fuzz::rules),
    ("recording", fuzz::recording),
    ("control", fuzz::control),
    ("library", fuzz::library),
];

fn folder(target: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/seeds").join(target)
}

/// The seeds of a target, by name.
fn seeds(target: &str) -> Vec<(String, Vec<u8>)> {
    let mut seeds: Vec<_> = fs::read_dir(folder(target))
        .unwrap()
        .map(|entry| entry.unwrap())
        .map(|entry| (entry.file_name().into_string().unwrap(), fs::read(entry.path()).unwrap()))
        .collect();
    seeds.sort();
    seeds
}

#[test]
fn no_seed_breaks_what_is_fuzzed() {
    for (target, run) in TARGETS {
        let seeds = seeds(target);
        assert!(seeds.len() >= 2, "{target} has seeds");
        for (name, bytes) in seeds {
            println!("{target}/{name}");
            run(&bytes);
        }
    }
}

#[test]
fn the_seeds_get_as_far_as_what_they_are_to_lead_into() {
    let any = |target: &str, gets_there: &dyn Fn(&[u8]) -> bool| {
        assert!(seeds(target).iter().any(|(_, bytes)| gets_there(bytes)), "{target}");
    };
    any("decode", &|bytes| decode(bytes).is_ok());
    any("events", &|bytes| {
        let length = usize::from(u16::from_le_bytes([bytes[0], bytes[1]]));
        decode(&bytes[2..2 + length]).is_ok()
    });
    any("rules", &|bytes| {
        load::load(&[load::Source { file: "seed", text: std::str::from_utf8(bytes).unwrap_or_default() }]).is_ok()
    });
    any("recording", &|bytes| Reader::open(bytes).is_ok());
    any("control", &|bytes| Reply::read(bytes, 5).is_some());
    any("library", &|bytes| bytes.split(|byte| *byte == b'\n').any(|line| mapping::parse_line(line).is_some()));
    any("library", &|bytes| bytes.starts_with(b"\x7fELF"));
}

/// `cargo test --test fuzz_seeds -- --ignored` after a change of a format; inputs that broke something stay.
#[test]
#[ignore = "writes the seeds"]
fn write_the_seeds() {
    for (target, name, bytes) in make::all() {
        assert!(bytes.len() <= 8 << 10, "{target}/{name} is {} bytes", bytes.len());
        fs::create_dir_all(folder(target)).unwrap();
        fs::write(folder(target).join(name), bytes).unwrap();
    }
}
