//! The only writer of the ring buffer: every event is counted, and every loss with its reason.

use core::intrinsics::{AtomicOrdering, atomic_xadd};

use aya_ebpf::{
    EbpfContext,
    bindings::BPF_RB_NO_WAKEUP,
    helpers::{
        bpf_get_current_pid_tgid, bpf_ktime_get_ns,
        generated::{bpf_get_attach_cookie, bpf_probe_read_user},
    },
    macros::map,
    maps::{Array, RingBuf},
};
use dislodge_ebpf::{
    loss::ProcessCounters,
    process::{AttachCookie, MAX_PROCESSES, TracedProcess},
    wire::{DetailedEvent, Header, Kind, MAX_DETAIL, Mark, MarkEvent, Native, flag},
};

use crate::abi::read;

/// Sized by the agent when it loads the object.
#[map]
pub static EVENTS: RingBuf = RingBuf::with_byte_size(8 << 20, 0);

/// The traced processes, filled by the agent only.
#[map]
pub static PROCESSES: Array<TracedProcess> = Array::with_max_entries(MAX_PROCESSES, 0);

/// The caller, when it is traced.
pub struct Traced {
    slot: u32,
    tgid: u32,
    tid: u32,
    counters: *mut ProcessCounters,
}

impl Traced {
    /// The current process and the probe's parameter, or nothing when the process is not the one that this probe was
    /// attached for.
    #[inline(always)]
    pub fn of_probe(ctx: &impl EbpfContext) -> Option<(Self, u32)> {
        // SAFETY: the context is that of this program.
        let cookie = AttachCookie::from_bits(unsafe { bpf_get_attach_cookie(ctx.as_ptr()) });
        let both = bpf_get_current_pid_tgid();
        let (tgid, tid) = ((both >> 32) as u32, both as u32);
        let process = PROCESSES.get_ptr_mut(cookie.slot)?;
        // SAFETY: `process` points into a value of an array, which lives as long as the program.
        let (owner, counters) = unsafe { ((*process).tgid, &raw mut (*process).counters) };
        (owner == u64::from(tgid)).then_some((Self { slot: cookie.slot, tgid, tid, counters }, cookie.parameter))
    }

    /// Slot of the process in the map of traced processes.
    pub fn slot(&self) -> u32 {
        self.slot
    }

    /// The calling thread.
    pub fn tid(&self) -> u32 {
        self.tid
    }

    /// Counts a call whose entry found no room in the map of calls.
    pub fn count_calls_full(&self) {
        // SAFETY: `counters` points into a live value of PROCESSES: see `bump`.
        bump(unsafe { &raw mut (*self.counters).calls_full });
    }

    /// Counts what a look could not count: its map was full.
    pub fn count_look_full(&self) {
        // SAFETY: as above.
        bump(unsafe { &raw mut (*self.counters).look_full });
    }

    /// Counts a return whose entry was not seen.
    pub fn count_return_unmatched(&self) {
        // SAFETY: as above.
        bump(unsafe { &raw mut (*self.counters).returns_unmatched });
    }

    fn count_detail_fault(&self) {
        // SAFETY: as above.
        bump(unsafe { &raw mut (*self.counters).detail_fault });
    }

    fn count_detail_truncated(&self) {
        // SAFETY: as above.
        bump(unsafe { &raw mut (*self.counters).detail_truncated });
    }

    fn header(&self, kind: u16, flags: u16) -> Header {
        Header {
            kind,
            flags,
            tgid: self.tgid,
            tid: self.tid,
            detail_length: 0,
            // SAFETY: a helper without arguments.
            time_ns: unsafe { bpf_ktime_get_ns() },
            // SAFETY: `counters` points into a live value of PROCESSES: see `bump`.
            sequence: fetch_and_bump(unsafe { &raw mut (*self.counters).seen }) + 1,
        }
    }

    /// Emits an event without a detail.
    #[inline(always)]
    pub fn emit(&self, kind: u16, flags: u16, mark: Mark) {
        let header = self.header(kind, flags);
        match EVENTS.reserve::<MarkEvent>(0) {
            Some(mut event) => {
                event.write(MarkEvent { header, mark });
                event.submit(u64::from(BPF_RB_NO_WAKEUP));
            }
            None => self.ring_full(),
        }
    }

    /// Emits what a transfer engine's library said.
    #[inline(always)]
    pub fn emit_native(&self, kind: Kind, flags: u16, native: Native) {
        if flags & flag::DETAIL_FAULT != 0 {
            self.count_detail_fault();
        }
        self.emit(kind as u16, flags, as_mark(native));
    }

    /// Emits a mark with the words at `detail` in the caller's memory: a `u32` length, then that many bytes.
    pub fn emit_detailed(&self, kind: u16, flags: u16, mark: Mark, detail: u64) {
        match read::<u32>(detail) {
            Some(length) => self.emit_bytes(kind, flags, mark, detail + 4, u64::from(length)),
            None => self.emit_bytes(kind, flags | flag::DETAIL_FAULT, mark, 0, 0),
        }
    }

    /// Emits what a transfer engine's library said, with `length` bytes at `detail` in the caller's memory.
    pub fn emit_native_bytes(&self, kind: Kind, flags: u16, native: Native, detail: u64, length: u64) {
        self.emit_bytes(kind as u16, flags, as_mark(native), detail, length);
    }

    #[inline(always)]
    fn emit_bytes(&self, kind: u16, flags: u16, mark: Mark, detail: u64, length: u64) {
        let mut header = self.header(kind, flags);
        let Some(mut event) = EVENTS.reserve::<DetailedEvent>(0) else {
            self.ring_full();
            return;
        };
        let target = event.as_mut_ptr();
        let mut length = length;
        if length > MAX_DETAIL as u64 {
            length = MAX_DETAIL as u64;
            header.flags |= flag::DETAIL_TRUNCATED;
            self.count_detail_truncated();
        }
        // SAFETY: `target` is the reserved event of this size; the helper bounds the copy by the length given, which
        // is at most MAX_DETAIL, and reports memory of the caller that cannot be read instead of faulting.
        unsafe {
            if bpf_probe_read_user((&raw mut (*target).detail).cast(), length as u32, detail as *const _) != 0 {
                header.flags |= flag::DETAIL_FAULT;
                length = 0;
            }
            header.detail_length = length as u32;
            (&raw mut (*target).header).write(header);
            (&raw mut (*target).mark).write(mark);
        }
        if header.flags & flag::DETAIL_FAULT != 0 {
            self.count_detail_fault();
        }
        event.submit(u64::from(BPF_RB_NO_WAKEUP));
    }

    fn ring_full(&self) {
        // SAFETY: `counters` points into a live value of PROCESSES: see `bump`.
        bump(unsafe { &raw mut (*self.counters).ring_full });
    }
}

/// Adds one. Programs on uprobes are preempted and run on several CPUs at once: only an atomic counts right.
fn bump(counter: *mut u64) {
    bump_by(counter, 1);
}

/// Adds `number` to a counter in a map value.
pub fn bump_by(counter: *mut u64, number: u64) {
    // SAFETY: the counter lies in a map value, which is aligned to 8 and outlives the program's run; everybody
    // else who writes it, does so atomically.
    unsafe { atomic_xadd::<u64, u64, { AtomicOrdering::Relaxed }>(counter, number) };
}

/// Adds one and returns the old value. Not relaxed: LLVM 22 compiles a relaxed one to the instruction that adds without
/// fetching, and takes the operand for the old value.
fn fetch_and_bump(counter: *mut u64) -> u64 {
    // SAFETY: as in `bump`.
    unsafe { atomic_xadd::<u64, u64, { AtomicOrdering::SeqCst }>(counter, 1) }
}

/// A native payload has the size of a mark and stands in its place.
const fn as_mark(native: Native) -> Mark {
    Mark { room: native.object, value: native.value, sender: native.size }
}
