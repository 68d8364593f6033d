//! The kernel's own account of our BPF programs and maps: what it says of the file descriptors of this process.

use std::{
    collections::{BTreeMap, HashMap},
    fs,
};

use aya::maps::{HashMap as BpfHashMap, Map, MapData, MapInfo};

/// Runs of a program, and the time that they took.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Runs {
    pub(crate) count: u64,
    pub(crate) nanoseconds: u64,
}

impl Runs {
    /// Nanoseconds per run; what takes them at the program's entry and end counts too.
    pub(crate) fn each(self) -> f64 {
        self.nanoseconds as f64 / self.count as f64
    }
}

/// `/proc/self/fdinfo/N` of each descriptor, as name → value.
fn descriptors() -> Vec<HashMap<String, String>> {
    let folder = fs::read_dir("/proc/self/fdinfo").expect("procfs is mounted");
    let texts = folder.flatten().filter_map(|entry| fs::read_to_string(entry.path()).ok());
    let fields = |text: String| {
        text.lines()
            .filter_map(|line| line.split_once(':'))
            .map(|(name, value)| (name.to_owned(), value.trim().to_owned()))
            .collect()
    };
    texts.map(fields).collect()
}

/// The programs' names by tag.
pub(crate) type Names = HashMap<String, String>;

/// What ran of each program.
pub(crate) type Account = BTreeMap<String, Runs>;

/// The names of all programs that are loaded. The kernel cuts a program's own name at 15 characters; that of its symbol is whole.
pub(crate) fn names() -> Names {
    let symbols = fs::read_to_string("/proc/kallsyms").expect("procfs is mounted");
    symbols
        .lines()
        .filter_map(|line| {
            line.split(' ').nth(2)?.split_whitespace().next()?.strip_prefix("bpf_prog_")?.split_once('_')
        })
        .map(|(tag, name)| (tag.to_owned(), name.to_owned()))
        .collect()
}

/// The runs of each of our programs so far. They are counted while `aya::sys::enable_stats` says so.
pub(crate) fn runs(names: &Names) -> Account {
    let number =
        |of: &HashMap<String, String>, name: &str| of.get(name).and_then(|text| text.parse().ok()).unwrap_or(0);
    let mut runs = Account::new();
    for program in descriptors() {
        let Some(name) = program.get("prog_tag").and_then(|tag| names.get(tag)) else { continue };
        let count = number(&program, "run_cnt");
        // Links have the tag of their program, but no count: the larger is the program's.
        let known = runs.entry(name.clone()).or_default();
        if count >= known.count {
            *known = Runs { count, nanoseconds: number(&program, "run_time_ns") };
        }
    }
    runs
}

/// What ran between two accounts.
pub(crate) fn between(before: &Account, after: &Account) -> Account {
    let difference = |(name, after): (&String, &Runs)| {
        let before = before.get(name).copied().unwrap_or_default();
        let runs = Runs { count: after.count - before.count, nanoseconds: after.nanoseconds - before.nanoseconds };
        (name.clone(), runs)
    };
    after.iter().map(difference).collect()
}

/// One of our maps.
pub(crate) struct MapUse {
    pub(crate) name: String,
    pub(crate) bytes: u64,
    pub(crate) entries: u64,
    /// Entries that are taken, of a hash map.
    pub(crate) taken: Option<usize>,
}

/// Our maps, each once.
pub(crate) fn maps() -> Vec<MapUse> {
    let mut maps = BTreeMap::new();
    for map in descriptors() {
        let Some(id) = map.get("map_id").and_then(|id| id.parse::<u32>().ok()) else { continue };
        let Ok(info) = MapInfo::from_id(id) else { continue };
        let number = |name: &str| map.get(name).and_then(|text| text.parse().ok()).unwrap_or(0);
        let name = info.name_as_str().unwrap_or_default().to_owned();
        let taken = match (number("key_size"), number("value_size")) {
            (8, 40) => taken::<8, 40>(id),
            (16, 32) => taken::<16, 32>(id),
            (8, 16) => taken::<8, 16>(id),
            _ => None,
        };
        maps.insert(id, MapUse { name, bytes: number("memlock"), entries: number("max_entries"), taken });
    }
    maps.into_values().collect()
}

fn taken<const KEY: usize, const VALUE: usize>(id: u32) -> Option<usize> {
    let map = Map::HashMap(MapData::from_id(id).ok()?);
    let entries: BpfHashMap<MapData, [u8; KEY], [u8; VALUE]> = map.try_into().ok()?;
    Some(entries.keys().count())
}
