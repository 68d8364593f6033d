//! The only writer of the ring buffer: every event is counted, and every loss with its reason.

use core::intrinsics::{AtomicOrdering, atomic_xadd};

use aya_ebpf::{
    EbpfContext as _,
    bindings::BPF_RB_NO_WAKEUP,
    helpers::{
        bpf_get_current_pid_tgid, bpf_ktime_get_ns,
        generated::{bpf_get_attach_cookie, bpf_probe_read_user},
    },
    macros::map,
    maps::{Array, RingBuf},
    programs::ProbeContext,
};
use dislodge_ebpf::{
    loss::ProcessCounters,
    process::{AttachCookie, MAX_PROCESSES, TracedProcess},
    wire::{DetailedEvent, Header, MAX_DETAIL, Mark, MarkEvent, flag},
};

/// Sized by the agent when it loads the object.
#[map]
pub static EVENTS: RingBuf = RingBuf::with_byte_size(8 << 20, 0);

/// The traced processes, filled by the agent only.
#[map]
pub static PROCESSES: Array<TracedProcess> = Array::with_max_entries(MAX_PROCESSES, 0);

/// The caller, when it is traced.
pub struct Traced {
    tgid: u32,
    tid: u32,
    counters: *mut ProcessCounters,
}

impl Traced {
    /// The current process, or nothing when it is not the one that this probe was attached for.
    pub fn current(ctx: &ProbeContext) -> Option<Self> {
        // SAFETY: the context is that of this program.
        let cookie = AttachCookie::from_bits(unsafe { bpf_get_attach_cookie(ctx.as_ptr()) });
        let both = bpf_get_current_pid_tgid();
        let (tgid, tid) = ((both >> 32) as u32, both as u32);
        let process = PROCESSES.get_ptr_mut(cookie.slot)?;
        // SAFETY: `process` points into a value of an array, which lives as long as the program.
        let (owner, counters) = unsafe { ((*process).tgid, &raw mut (*process).counters) };
        (owner == u64::from(tgid)).then_some(Self { tgid, tid, counters })
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

    /// Emits a mark without words.
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

    /// Emits a mark with the words at `detail` in the caller's memory: a `u32` length, then that many bytes.
    pub fn emit_detailed(&self, kind: u16, flags: u16, mark: Mark, detail: *const u8) {
        let mut header = self.header(kind, flags);
        let Some(mut event) = EVENTS.reserve::<DetailedEvent>(0) else {
            self.ring_full();
            return;
        };
        let target = event.as_mut_ptr();
        // SAFETY: `target` is the reserved event of this size; the helper bounds the copy by the length given, which
        // is at most MAX_DETAIL, and reports memory of the caller that cannot be read instead of faulting.
        unsafe {
            let mut length: u32 = 0;
            let mut fault = bpf_probe_read_user((&raw mut length).cast(), 4, detail.cast()) != 0;
            if length > MAX_DETAIL as u32 {
                length = MAX_DETAIL as u32;
                header.flags |= flag::DETAIL_TRUNCATED;
                bump(&raw mut (*self.counters).detail_truncated);
            }
            if !fault {
                fault = bpf_probe_read_user((&raw mut (*target).detail).cast(), length, detail.add(4).cast()) != 0;
            }
            if fault {
                header.flags |= flag::DETAIL_FAULT;
                bump(&raw mut (*self.counters).detail_fault);
                length = 0;
            }
            header.detail_length = length;
            (&raw mut (*target).header).write(header);
            (&raw mut (*target).mark).write(mark);
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
    // SAFETY: the counter lies in a map value, which is aligned to 8 and outlives the program's run; everybody
    // else who writes it, does so atomically.
    unsafe { atomic_xadd::<u64, u64, { AtomicOrdering::Relaxed }>(counter, 1) };
}

/// Adds one and returns the old value. Not relaxed: LLVM 22 compiles a relaxed one to the instruction that adds without
/// fetching, and takes the operand for the old value.
fn fetch_and_bump(counter: *mut u64) -> u64 {
    // SAFETY: as in `bump`.
    unsafe { atomic_xadd::<u64, u64, { AtomicOrdering::SeqCst }>(counter, 1) }
}
