//! Reads the memory of a process from outside, and only what is there: to read a page that is not would fault it in.

use std::{fs::File, io, os::unix::fs::FileExt as _, time::Instant};

use super::mapping::Mapping;

const WORD: usize = size_of::<u64>();
/// Entries of `/proc/PID/pagemap` that are read at once.
const PAGEMAP_ENTRIES: usize = 4096;
/// The page is in memory (`Documentation/admin-guide/mm/pagemap.rst`).
const PRESENT: u64 = 1 << 63;

/// A process's memory and which of its pages are there.
pub(super) struct Memory {
    memory: File,
    pagemap: File,
    page: u64,
    buffer: Vec<u8>,
}

impl Memory {
    /// Opens the memory of a process, for reads of at most `most` bytes.
    pub(super) fn open(pid: u32, most: usize) -> io::Result<Self> {
        Ok(Self {
            memory: File::open(format!("/proc/{pid}/mem"))?,
            pagemap: File::open(format!("/proc/{pid}/pagemap"))?,
            page: rustix::param::page_size() as u64,
            buffer: vec![0; most],
        })
    }

    /// The address ranges of a mapping that are present: the first `most` bytes or a bit more, as far as they are known by
    /// the deadline.
    pub(super) fn present(&self, mapping: &Mapping, most: u64, deadline: Instant) -> Vec<(u64, u64)> {
        let mut ranges: Vec<(u64, u64)> = Vec::new();
        let mut entries = vec![0; PAGEMAP_ENTRIES * WORD];
        let (mut at, mut present) = (mapping.start, 0);
        while at < mapping.end && present < most && Instant::now() < deadline {
            let pages = ((mapping.end - at) / self.page).min(PAGEMAP_ENTRIES as u64) as usize;
            let Some(wanted) = entries.get_mut(..pages * WORD) else { break };
            let place = at / self.page * WORD as u64;
            if wanted.is_empty() || self.pagemap.read_exact_at(wanted, place).is_err() {
                break;
            }
            for entry in wanted.chunks_exact(WORD) {
                let next = at.saturating_add(self.page);
                if entry.try_into().is_ok_and(|entry| u64::from_le_bytes(entry) & PRESENT != 0) {
                    present += self.page;
                    match ranges.last_mut() {
                        Some((_, end)) if *end == at => *end = next,
                        _ => ranges.push((at, next)),
                    }
                }
                at = next;
            }
        }
        ranges
    }

    /// Up to `length` bytes at an address; none where the memory is gone.
    pub(super) fn read(&mut self, address: u64, length: usize) -> &[u8] {
        let Some(buffer) = self.buffer.get_mut(..length) else { return &[] };
        let have = self.memory.read_at(buffer, address).unwrap_or(0);
        buffer.get(..have).unwrap_or_default()
    }
}
