//! What the entry of a call has to tell its return.
//!
//! Kept per thread and function, since calls of different functions nest. A plain hash map: it never evicts silently;
//! what does not fit is counted, and the agent takes out what dead threads left behind.

use aya_ebpf::{macros::map, maps::HashMap};

use crate::emit::Traced;

/// The functions whose return is probed.
#[derive(Clone, Copy)]
#[repr(u32)]
pub enum Function {
    NixlMake = 1,
    NixlPost,
    NixlStatus,
    NixlRange,
    MooncakeAllocate,
    MooncakeSubmit,
    MooncakeStatus,
    MooncakeFree,
    MooncakePoll,
    VerbsPollCq,
}

/// Who called what.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct CallKey {
    tid: u32,
    function: u32,
}

/// What its entry said; what the numbers mean is between a function's two programs.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Call(pub [u64; 5]);

/// Sized by the agent when it loads the object.
#[map]
pub static CALLS: HashMap<CallKey, Call> = HashMap::with_max_entries(8192, 0);

/// Remembers a call until it returns.
#[inline(always)]
pub fn entered(process: &Traced, function: Function, call: Call) {
    let key = CallKey { tid: process.tid(), function: function as u32 };
    if CALLS.insert(key, call, 0).is_err() {
        process.count_calls_full();
    }
}

/// What the entry of the call that returns now had said.
#[inline(always)]
pub fn returned(process: &Traced, function: Function) -> Option<Call> {
    let call = under_way(process, function);
    if call.is_none() {
        process.count_return_unmatched();
    }
    call
}

/// What a call of this thread had said that is under way, once.
#[inline(always)]
pub fn under_way(process: &Traced, function: Function) -> Option<Call> {
    let key = CallKey { tid: process.tid(), function: function as u32 };
    // SAFETY: the key belongs to this thread, which is here: nobody else writes or removes the entry.
    let call = unsafe { CALLS.get(key) }.copied()?;
    let _ = CALLS.remove(key);
    Some(call)
}
