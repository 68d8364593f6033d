//! Finds SGLang's schedulers by their process titles, in containers too.

use std::{
    fs::{self, File},
    io::Read as _,
};

use super::{
    Target,
    library::{self, LibraryRole, MappedLibrary},
};
use crate::event::ProcessKey;

/// How every scheduler's title begins (`setproctitle` in SGLang's `run_scheduler_process`).
pub const SCHEDULER_TITLE: &str = "sglang::scheduler";

/// Longest part of a command line that is looked at: titles are short, command lines may be hostile.
const MAX_TITLE: usize = 256;

/// Every scheduler of this node. Processes that end meanwhile are left out.
pub fn schedulers() -> Vec<Target> {
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    entries
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter_map(|pid| {
            let mut cmdline = [0; MAX_TITLE];
            let length =
                File::open(format!("/proc/{pid}/cmdline")).and_then(|mut file| file.read(&mut cmdline)).ok()?;
            let title = title(cmdline.get(..length)?)?;
            Some(Target { key: process_key(pid)?, title })
        })
        .collect()
}

/// Every scheduler of this node, and those of `only` that are none but have a transfer engine loaded.
pub fn servers(only: &[u32]) -> Vec<Target> {
    let mut servers = schedulers();
    let others = only.iter().filter(|pid| servers.iter().all(|server| server.key.pid != **pid));
    let others: Vec<Target> = others.filter_map(|pid| with_transfer_engine(*pid)).collect();
    servers.extend(others);
    servers
}

fn with_transfer_engine(pid: u32) -> Option<Target> {
    let key = process_key(pid)?;
    let is_engine = |library: &MappedLibrary| matches!(library.role, LibraryRole::Nixl | LibraryRole::MooncakeEngine);
    library::find(pid).ok()?.mapped.iter().any(is_engine).then(|| Target { key, title: name(pid) })
}

/// The name of a process that has no title: `/proc/PID/comm`, at most 15 bytes.
fn name(pid: u32) -> String {
    fs::read_to_string(format!("/proc/{pid}/comm")).map(|name| name.trim_end().to_owned()).unwrap_or_default()
}

/// The process of a pid, as it is now; nothing when there is none.
pub fn process_key(pid: u32) -> Option<ProcessKey> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    start_time(&stat).map(|start| ProcessKey { pid, start })
}

/// Whether a process has ended; one that nobody has waited for yet has, too.
pub fn is_over(key: ProcessKey) -> bool {
    let Ok(stat) = fs::read_to_string(format!("/proc/{}/stat", key.pid)) else { return true };
    start_time(&stat) != Some(key.start) || has_exited(&stat)
}

/// Field 3 of `/proc/PID/stat`: a zombie, or dead.
fn has_exited(stat: &str) -> bool {
    matches!(field(stat, 3), Some("Z" | "X"))
}

/// The process that started this one; nothing where that is gone, and `init` took its children over.
pub fn parent(pid: u32) -> Option<ProcessKey> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    parent_pid(&stat).filter(|parent| *parent > 1).and_then(process_key)
}

/// Field 22 of `/proc/PID/stat`.
fn start_time(stat: &str) -> Option<u64> {
    field(stat, 22)?.parse().ok()
}

/// Field 4 of `/proc/PID/stat`.
fn parent_pid(stat: &str) -> Option<u32> {
    field(stat, 4)?.parse().ok()
}

/// A field of `/proc/PID/stat`, from the third on. The name of the process (field 2) may hold spaces and parentheses.
fn field(stat: &str, number: usize) -> Option<&str> {
    let (_, after_name) = stat.rsplit_once(')')?;
    after_name.split_ascii_whitespace().nth(number.checked_sub(3)?)
}

/// The title of a scheduler, from its command line as `setproctitle` leaves it: padded with NUL.
fn title(cmdline: &[u8]) -> Option<String> {
    let first = cmdline.split(|byte| *byte == 0).next()?;
    let text = std::str::from_utf8(first).ok()?.trim_end();
    text.starts_with(SCHEDULER_TITLE).then(|| text.to_owned())
}

/// The offset of a process's CLOCK_MONOTONIC to the node's, in nanoseconds: what `/proc/PID/timens_offsets` says.
pub fn clock_offset(pid: u32) -> i64 {
    fs::read_to_string(format!("/proc/{pid}/timens_offsets")).map(|text| monotonic_offset(&text)).unwrap_or(0)
}

fn monotonic_offset(text: &str) -> i64 {
    text.lines()
        .find_map(|line| {
            let mut words = line.split_ascii_whitespace();
            (words.next()? == "monotonic").then_some(())?;
            let (seconds, nanoseconds): (i64, i64) = (words.next()?.parse().ok()?, words.next()?.parse().ok()?);
            seconds.checked_mul(1_000_000_000)?.checked_add(nanoseconds)
        })
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scheduler_is_known_by_its_padded_title() {
        assert_eq!(title(b"sglang::scheduler_TP0\0\0\0\0").as_deref(), Some("sglang::scheduler_TP0"));
        assert_eq!(title(b"sglang::scheduler\0").as_deref(), Some("sglang::scheduler"));
        assert_eq!(title(b"python\0-m\0sglang::scheduler\0"), None);
        assert_eq!(title(b"sglang::detokenizer\0"), None);
        assert_eq!(title(b""), None);
        assert_eq!(title(b"\xff\xfe"), None);
    }

    #[test]
    fn a_start_time_is_found_behind_any_name() {
        let fields = "S 1 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 4711 0 0";
        assert_eq!(start_time(&format!("12 (python) {fields}")), Some(4711));
        assert_eq!(start_time(&format!("12 (a) b) {fields}")), Some(4711));
        assert_eq!(start_time("12 (python) S 1"), None);
        assert!(!has_exited(&format!("12 (a) b) {fields}")));
        assert!(has_exited(&format!("12 (a) b) {}", fields.replacen('S', "Z", 1))));
        assert_eq!(parent_pid(&format!("12 (a) b) {}", fields.replacen("S 1", "S 11", 1))), Some(11));
    }

    #[test]
    fn this_process_has_a_key_and_goes_on() {
        let key = process_key(std::process::id()).unwrap();
        assert!(!is_over(key) && is_over(ProcessKey { start: key.start + 1, ..key }));
        assert_eq!(process_key(std::process::id()), Some(key));
        assert!(key.start > 0);
        assert_eq!(parent(std::process::id()), process_key(std::os::unix::process::parent_id()));
    }

    #[test]
    fn a_time_namespace_shifts_the_clock() {
        assert_eq!(monotonic_offset("monotonic  3600  5\nboottime 0 0\n"), 3_600_000_000_005);
        assert_eq!(monotonic_offset("monotonic -1 0\n"), -1_000_000_000);
        assert_eq!(monotonic_offset("nonsense"), 0);
    }
}
