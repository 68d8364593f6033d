//! What a verbs context looks like in memory: `struct ibv_context` of rdma-core's `libibverbs/verbs.h`, offsets in bytes.

use zerocopy::{FromBytes as _, little_endian::U64};

const WORD: usize = size_of::<u64>();
const POLL_CQ: usize = 96;
const POST_SEND: usize = 208;
const POST_RECV: usize = 216;
const CMD_FD: usize = 264;
/// Its size, up to and including `async_fd`.
pub(super) const SIZE: usize = 272;

/// A place in memory that looks like a verbs context.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// Where it begins in the bytes.
    pub offset: usize,
    /// Which provider its functions belong to: an index into the providers' code.
    pub provider: usize,
    /// `ops.poll_cq`.
    pub poll_cq: u64,
    /// The descriptor of its device, as the process numbers it.
    pub cmd_fd: i32,
}

/// Where the code of verbs providers is in a process's memory.
#[derive(Clone, Debug, Default)]
pub struct ProviderCode {
    /// First address, address behind the last, which provider; by address.
    ranges: Vec<(u64, u64, usize)>,
}

impl ProviderCode {
    /// `code` has the address ranges of each provider's code.
    pub fn new(code: &[Vec<(u64, u64)>]) -> Self {
        let of = |(provider, ranges): (usize, &Vec<(u64, u64)>)| -> Vec<(u64, u64, usize)> {
            ranges.iter().map(|(start, end)| (*start, *end, provider)).collect()
        };
        let mut ranges: Vec<(u64, u64, usize)> = code.iter().enumerate().flat_map(of).collect();
        ranges.sort_unstable();
        Self { ranges }
    }

    /// Which provider's code an address lies in.
    fn provider(&self, address: u64) -> Option<usize> {
        let behind = self.ranges.partition_point(|(start, ..)| *start <= address);
        let (_, end, provider) = self.ranges.get(behind.checked_sub(1)?)?;
        (address < *end).then_some(*provider)
    }

    fn lowest(&self) -> u64 {
        self.ranges.first().map_or(u64::MAX, |(start, ..)| *start)
    }

    fn highest(&self) -> u64 {
        self.ranges.iter().map(|(_, end, _)| *end).max().unwrap_or(0)
    }
}

/// What looks like a verbs context in a piece of memory: `poll_cq`, `post_send` and `post_recv` lie in the code of one
/// provider. Only words that are aligned to 8 bytes are looked at.
pub fn candidates<'a>(bytes: &'a [u8], code: &'a ProviderCode) -> impl Iterator<Item = Candidate> + use<'a> {
    let words = <[U64]>::ref_from_prefix(bytes).map_or(&[][..], |(words, _)| words);
    // The word at which a context ends that begins at the first one.
    let span = SIZE / WORD;
    let last = (words.len() + 1).saturating_sub(span);
    let polls = words.get(POLL_CQ / WORD..).unwrap_or_default();
    let (lowest, highest) = (code.lowest(), code.highest());
    let mut from = 0;
    std::iter::from_fn(move || {
        loop {
            let at = next_between(polls, from, lowest, highest).filter(|at| *at < last)?;
            from = at + 1;
            if let Some(candidate) = words.get(at..at + span).and_then(|words| candidate(at * WORD, words, code)) {
                return Some(candidate);
            }
        }
    })
}

/// The index of the first word from `from` on that is not less than `lowest` and less than `highest`. A plain loop: of
/// gibibytes of memory each word comes through here.
fn next_between(words: &[U64], from: usize, lowest: u64, highest: u64) -> Option<usize> {
    let mut at = from;
    while at < words.len() {
        let word = words.get(at)?.get();
        if word >= lowest && word < highest {
            return Some(at);
        }
        at += 1;
    }
    None
}

fn candidate(offset: usize, words: &[U64], code: &ProviderCode) -> Option<Candidate> {
    let at = |field: usize| words.get(field / WORD).map(|word| word.get());
    let poll_cq = at(POLL_CQ)?;
    let provider = code.provider(poll_cq)?;
    let others = [at(POST_SEND)?, at(POST_RECV)?];
    if others.iter().any(|function| code.provider(*function) != Some(provider)) {
        return None;
    }
    // The lower half of a little-endian word.
    let cmd_fd = at(CMD_FD)? as i32;
    Some(Candidate { offset, provider, poll_cq, cmd_fd })
}

#[cfg(test)]
mod tests {
    use super::*;

    const CODE: (u64, u64) = (0x7f00_0000_1000, 0x7f00_0000_9000);

    fn context(poll_cq: u64, post_send: u64, post_recv: u64, cmd_fd: i32) -> Vec<u8> {
        let mut bytes = vec![0; SIZE];
        for (field, value) in [(POLL_CQ, poll_cq), (POST_SEND, post_send), (POST_RECV, post_recv)] {
            bytes[field..field + WORD].copy_from_slice(&value.to_le_bytes());
        }
        bytes[CMD_FD..CMD_FD + 4].copy_from_slice(&cmd_fd.to_le_bytes());
        bytes[CMD_FD + 4..].copy_from_slice(&9_i32.to_le_bytes());
        bytes
    }

    fn found(bytes: &[u8]) -> Vec<Candidate> {
        candidates(bytes, &ProviderCode::new(&[vec![CODE]])).collect()
    }

    fn valid() -> Vec<u8> {
        context(CODE.0, CODE.0 + 0x10, CODE.1 - 1, 7)
    }

    #[test]
    fn a_context_is_found_wherever_it_is_aligned() {
        let expected = Candidate { offset: 24, provider: 0, poll_cq: CODE.0, cmd_fd: 7 };
        assert_eq!(found(&[vec![0xff; 24], valid()].concat()), [expected]);
        assert_eq!(found(&[vec![0xff; 24], valid(), vec![0xff; 13]].concat()), [expected]);
        assert_eq!(found(&[vec![0xff; 4], valid()].concat()), []);
    }

    #[test]
    fn a_context_that_is_cut_off_is_none() {
        let bytes = valid();
        for length in 0..bytes.len() {
            assert_eq!(found(&bytes[..length]), [], "{length}");
        }
        assert_eq!(found(&bytes).len(), 1);
    }

    #[test]
    fn every_function_has_to_be_in_one_providers_code() {
        let (inside, outside) = (CODE.0 + 8, CODE.1);
        assert_eq!(found(&context(outside, inside, inside, 7)), []);
        assert_eq!(found(&context(inside, outside, inside, 7)), []);
        assert_eq!(found(&context(inside, inside, 0, 7)), []);
        let other = (CODE.0 + 0x10_0000, CODE.1 + 0x10_0000);
        let code = ProviderCode::new(&[vec![CODE], vec![other]]);
        assert_eq!(candidates(&context(inside, other.0, inside, 7), &code).count(), 0, "two providers mixed");
        assert_eq!(candidates(&context(other.0, other.0, other.0, 7), &code).next().map(|c| c.provider), Some(1));
        assert_eq!(candidates(&valid(), &ProviderCode::default()).count(), 0);
    }
}
