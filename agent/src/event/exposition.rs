//! What a server's `/metrics` page says of its queues: bytes → the few samples that matter; pure, and everything in the
//! bytes may be wrong.
//!
//! SGLang writes Prometheus' text format 0.0.4 (`prometheus_client`'s multi-process collector). A page of many ranks has
//! megabytes of histograms, so it is never held: it comes in pieces, and of each line only its beginning is kept until it is
//! known to be one of ours. Of the crates for this format one is under the LGPL (`openmetrics-parser` 0.5.1), and the other
//! (`prometheus-parse` 0.2.5) reads no name with a colon, ends labels at the first `}` and cuts them at each comma, in quotes
//! too: a model's name could pass for a rank.

use serde::Serialize;

/// Longest line that is read: labels are ranks, a model's name and what an operator added.
const MAX_LINE: usize = 4_096;
/// Most samples of a page: four gauges, each of some hundred ranks.
const MAX_SAMPLES: usize = 4_096;
/// How every name of SGLang's begins; the second where something in between does not like colons.
const PREFIXES: [&str; 2] = ["sglang:", "sglang_"];

/// A queue whose length SGLang exports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Queue {
    /// Prefill: waits for its transfer to end.
    PrefillInflight,
    /// Prefill: waits for the decode side to register.
    PrefillBootstrap,
    /// Decode: waits for memory.
    DecodePrealloc,
    /// Decode: waits for the transfer to arrive.
    DecodeTransfer,
}

/// The gauges (`observability/metrics_collector.py`, until 0.5.9 `metrics/collector.py`): their names without the prefix, and
/// whether releases up to 0.5.1 alone spell them so.
const NAMES: [(&str, Queue, bool); 6] = [
    ("num_prefill_inflight_queue_reqs", Queue::PrefillInflight, false),
    ("num_prefill_infight_queue_reqs", Queue::PrefillInflight, true), // 0.4.6.post5 to 0.5.1
    ("num_prefill_bootstrap_queue_reqs", Queue::PrefillBootstrap, false), // 0.5.12 and newer
    ("num_prefill_prealloc_queue_reqs", Queue::PrefillBootstrap, false), // until 0.5.11
    ("num_decode_prealloc_queue_reqs", Queue::DecodePrealloc, false),
    ("num_decode_transfer_queue_reqs", Queue::DecodeTransfer, false),
];

/// What one line says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sample {
    /// Of which queue.
    pub queue: Queue,
    /// Of which rank.
    pub rank: Rank,
    /// Its length; nothing where what stands there is no count.
    pub length: Option<u32>,
    /// Whether it is spelt as releases up to 0.5.1 did.
    pub is_old_spelling: bool,
}

/// The labels by which SGLang tells schedulers apart: its *global* ranks, which stand in a scheduler's title too. A rank that
/// is not named is 0; without data-parallel replicas `dp` is not there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Rank {
    /// `dp_rank`.
    pub dp: Option<u32>,
    /// `pp_rank`.
    pub pp: u32,
    /// `tp_rank`.
    pub tp: u32,
}

impl Rank {
    /// The rank that a scheduler's title says: `sglang::scheduler_DP0_PP1_TP3` (`run_scheduler_process`; all releases).
    pub fn of_title(title: &str) -> Self {
        let number = |name: &str| title.split('_').find_map(|part| part.strip_prefix(name)?.parse().ok());
        // The parts of `_ATTN_CP0` and `_MOE_DP0` begin like others.
        let title_dp = title.replace("_MOE_DP", "_MOE-DP");
        let dp = title_dp.split('_').find_map(|part| part.strip_prefix("DP")?.parse().ok());
        Self { dp, pp: number("PP").unwrap_or(0), tp: number("TP").unwrap_or(0) }
    }
}

/// A page that is being read.
#[derive(Clone, Debug, Default)]
pub struct Page {
    line: Vec<u8>,
    is_too_long: bool,
    samples: Vec<Sample>,
    left_out: usize,
}

impl Page {
    /// Takes in the next piece of it.
    pub fn feed(&mut self, mut bytes: &[u8]) {
        while let Some(end) = bytes.iter().position(|byte| *byte == b'\n') {
            let (piece, rest) = bytes.split_at(end);
            self.extend(piece);
            self.end_line();
            bytes = rest.get(1..).unwrap_or_default();
        }
        self.extend(bytes);
    }

    /// What it says, and how many of our samples there was no place for, or were written wrongly.
    pub fn end(mut self) -> (Vec<Sample>, usize) {
        self.end_line();
        (self.samples, self.left_out)
    }

    fn extend(&mut self, piece: &[u8]) {
        if self.line.len() + piece.len() > MAX_LINE {
            self.is_too_long = true;
        }
        if !self.is_too_long {
            self.line.extend_from_slice(piece);
        }
    }

    fn end_line(&mut self) {
        let is_too_long = std::mem::take(&mut self.is_too_long);
        let line = std::mem::take(&mut self.line);
        let text = std::str::from_utf8(&line).ok().filter(|_| !is_too_long);
        match text.map(read_line) {
            Some(Line::Sample(sample)) if self.samples.len() < MAX_SAMPLES => self.samples.push(sample),
            Some(Line::Sample(_) | Line::Malformed) => self.left_out = self.left_out.saturating_add(1),
            Some(Line::Other) | None => {}
        }
        self.line = line;
        self.line.clear();
    }
}

enum Line {
    Sample(Sample),
    /// One of ours, but not as the format wants it.
    Malformed,
    /// Nothing of ours: another metric, a comment, one priority's share.
    Other,
}

fn read_line(line: &str) -> Line {
    let Some(name) = PREFIXES.iter().find_map(|prefix| line.strip_prefix(prefix)) else { return Line::Other };
    let found = NAMES.iter().find_map(|(known, queue, is_old)| Some((name.strip_prefix(known)?, *queue, *is_old)));
    let Some((rest, queue, is_old_spelling)) = found else { return Line::Other };
    if !rest.starts_with(['{', ' ', '\t']) {
        return Line::Other;
    }
    let Some((labels, value)) = labels(rest.trim_start()) else { return Line::Malformed };
    // The share of one priority; the total has the label too, but empty (0.5.10 and newer, with priority scheduling).
    if labels.has_priority {
        return Line::Other;
    }
    let mut words = value.split_ascii_whitespace();
    let Some(value) = words.next() else { return Line::Malformed };
    let Labels { rank: Some(rank), .. } = labels else { return Line::Malformed };
    Line::Sample(Sample { queue, rank, length: count(value), is_old_spelling })
}

/// A gauge's value as a number of requests.
fn count(value: &str) -> Option<u32> {
    let value: f64 = value.parse().ok()?;
    let is_count = value >= 0.0 && value <= f64::from(u32::MAX) && value.fract() == 0.0;
    is_count.then_some(value as u32)
}

#[derive(Default)]
struct Labels {
    /// Nothing where a rank is no number, or is said twice.
    rank: Option<Rank>,
    has_priority: bool,
}

/// The labels at the beginning of `text`, and what follows them; nothing when they are not as the format wants them.
fn labels(text: &str) -> Option<(Labels, &str)> {
    let (mut dp, mut pp, mut tp) = (None, None, None);
    let (mut is_sound, mut has_priority) = (true, false);
    let mut set = |rank: &mut Option<u32>, value: &str| match value.parse() {
        Ok(number) if rank.is_none() => *rank = Some(number),
        _ => is_sound = false,
    };
    let mut rest = match text.strip_prefix('{') {
        None => return Some((Labels { rank: Some(Rank::default()), has_priority }, text)),
        Some(rest) => rest.trim_start(),
    };
    loop {
        if let Some(after) = rest.strip_prefix('}') {
            let rank = Rank { dp, pp: pp.unwrap_or(0), tp: tp.unwrap_or(0) };
            return Some((Labels { rank: is_sound.then_some(rank), has_priority }, after));
        }
        let (name, after) = rest.split_once('=')?;
        let (value, after) = quoted(after.trim_start())?;
        match name.trim() {
            "dp_rank" => set(&mut dp, value),
            "pp_rank" => set(&mut pp, value),
            "tp_rank" => set(&mut tp, value),
            "priority" => has_priority |= !value.is_empty(),
            _ => {}
        }
        let after = after.trim_start();
        rest = match after.strip_prefix(',') {
            Some(next) => next.trim_start(),
            None if after.starts_with('}') => after,
            None => return None,
        };
    }
}

/// The text in quotes at the beginning of `text`, as it is written, and what follows it.
fn quoted(text: &str) -> Option<(&str, &str)> {
    let inner = text.strip_prefix('"')?;
    let mut is_escaped = false;
    let end = inner.bytes().position(|byte| {
        let is_end = byte == b'"' && !is_escaped;
        is_escaped = byte == b'\\' && !is_escaped;
        is_end
    })?;
    Some((inner.get(..end)?, inner.get(end + 1..)?))
}

#[cfg(test)]
#[path = "exposition/tests.rs"]
mod tests;
